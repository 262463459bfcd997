#!/usr/bin/env python3
"""Measure the demo model with transformers, float32 on the CPU.

    python demo/check.py --text TEXT [--model demo/model]

prints the held-out loss; what int8 weights cost (symmetric, one scale per
tensor, absmax / 127, on the seven projections of every layer and then on the
tied embedding as well): the mean and the worst cosine of the logits, the share
of positions whose best token stays, the loss; the largest activation, which has
to fit fp16; and greedy and sampled text (top_k and top_p from generation_config.json).
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from train import HELD_OUT_EVERY, HELD_OUT_FIRST
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = [
    "It was a fine morning, and",
    '"I am very glad',
    "The house",
    "Elizabeth",
    "When the letter arrived, she",
]


def load(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def quantize(model, embedding: bool) -> None:
    """Round the weights to int8 and back, in place."""
    for name, p in model.named_parameters():
        if name.endswith("_proj.weight") or (embedding and "embed_tokens" in name):
            scale = p.abs().max() / 127
            p.copy_((p / scale).round().clamp(-127, 127) * scale)


@torch.no_grad()
def logits_of(model, windows: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(row[None]).logits for row in windows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="what text.py wrote")
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--windows", type=int, default=0, help="held-out windows; 0 for all")
    parser.add_argument("--length", type=int, default=160, help="tokens of each sample")
    args = parser.parse_args()
    torch.manual_seed(1)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = load(args.model)
    chapters = (args.text / "austen.txt").read_text(encoding="utf-8").split("\f")
    ids = []
    for chapter in chapters[HELD_OUT_FIRST::HELD_OUT_EVERY]:
        ids += [*tokenizer(chapter)["input_ids"], tokenizer.eos_token_id]
    context = model.config.max_position_embeddings
    rows = (len(ids) - 1) // context
    x = torch.tensor(ids[: rows * context]).view(rows, context)
    y = torch.tensor(ids[1 : rows * context + 1]).view(rows, context)
    if args.windows:
        x, y = x[: args.windows], y[: args.windows]

    def loss(logits):
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()).item()

    largest = 0.0

    def watch(_module, _inputs, output):
        nonlocal largest
        for value in output if isinstance(output, tuple) else (output,):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                largest = max(largest, value.abs().max().item())

    hooks = [m.register_forward_hook(watch) for m in model.modules()]
    reference = logits_of(model, x)
    for hook in hooks:
        hook.remove()
    parameters = sum(p.numel() for p in model.parameters())
    characters = len(tokenizer.decode(x.flatten().tolist()))
    print(f"{parameters} parameters, {y.numel()} held-out tokens, {characters / y.numel():.2f} characters each")
    print(f"held-out loss {loss(reference):.4f}; largest activation {largest:.1f}")
    for embedding in (False, True):
        quantized = load(args.model)
        quantize(quantized, embedding)
        logits = logits_of(quantized, x)
        cosine = F.cosine_similarity(logits, reference, dim=-1)
        same = (logits.argmax(-1) == reference.argmax(-1)).float().mean()
        print(
            f"int8 per tensor, projections{' and embedding' if embedding else ''}: "
            f"cosine mean {cosine.mean():.5f} worst {cosine.min():.5f}, "
            f"top-1 {same:.4f}, loss {loss(logits):.4f}"
        )

    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        for title, options in [
            ("greedy", {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}),
            ("T = 0.8", {"do_sample": True, "temperature": 0.8}),
        ]:
            out = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=args.length,
                **options,
            )
            print(f"\n== {title}\n{tokenizer.decode(out[0])}")


if __name__ == "__main__":
    main()
