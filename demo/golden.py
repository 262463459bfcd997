#!/usr/bin/env python3
"""Write demo/golden.safetensors: what transformers computes from demo/model.

    pip install torch transformers safetensors
    python demo/golden.py

Float32 on the CPU, one forward pass over TEXT, which no training saw (the
opening of Emma's thirteenth chapter, held out by train.py). Logits and hidden
states are stored in fp16: the golden is a part of the program, and what fp16
loses (a cosine of 0.99999998) is far below every limit. Tensors:

- `tokens` i32 [n]: TEXT's first n tokens
- `logits` f16 [n, vocab_size]
- `hidden.N` f16 [n, hidden_size], N = 0 … num_hidden_layers: the embeddings for
  N = 0, else the output of layer N - 1 (the last one before the final norm)
- `greedy.prompt` i32 [p]: PROMPT's tokens; `greedy.ids` i32 [g]: the g tokens
  that follow when the best logit is taken each time

The metadata names the reference, its version, the source and the weights' hash,
and the smallest lead of a greedy choice over the runner-up: an implementation
whose logits are off by less than half of it must choose the same tokens.
"""

import hashlib
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
POSITIONS = 80
GREEDY = 64
LEAST_LEAD = 0.02
PROMPT = "The carriage"
TEXT = (
    "There could hardly be a happier creature in the world than Mrs. John Knightley, in this short "
    "visit to Hartfield, going about every morning among her old acquaintance with her five children, "
    "and talking over what she had done every evening with her father and sister. She had nothing to "
    "wish otherwise, but that the days did not pass so swiftly. It was a delightful visit;--perfect, "
    "in being much too short."
)


@torch.no_grad()
def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(HERE / "model")
    model = AutoModelForCausalLM.from_pretrained(HERE / "model", dtype=torch.float32).eval()

    def ids_of(text: str) -> torch.Tensor:
        return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])

    tokens = ids_of(TEXT)[:POSITIONS]
    if len(tokens) != POSITIONS:
        raise SystemExit(f"TEXT has {len(tokens)} tokens, {POSITIONS} are wanted")
    hidden = {}

    def keep(index):
        def hook(_module, _inputs, output):
            value = output[0] if isinstance(output, tuple) else output
            hidden[f"hidden.{index}"] = value.reshape(POSITIONS, -1).clone()

        return hook

    modules = [model.model.embed_tokens, *model.model.layers]
    hooks = [m.register_forward_hook(keep(i)) for i, m in enumerate(modules)]
    logits = model(tokens[None]).logits[0]
    for hook in hooks:
        hook.remove()

    prompt = ids_of(PROMPT)
    ids, lead = prompt, float("inf")
    for _ in range(GREEDY):
        best = model(ids[None]).logits[0, -1].topk(2)
        lead = min(lead, (best.values[0] - best.values[1]).item())
        ids = torch.cat((ids, best.indices[:1]))
    print(f"smallest lead of a greedy choice: {lead:.4f}")
    print(tokenizer.decode(ids))
    if lead < LEAST_LEAD:
        raise SystemExit("too close a call for a token-for-token test: choose another PROMPT")

    tensors = {
        "tokens": tokens.int(),
        "logits": logits.half().contiguous(),
        "greedy.prompt": prompt.int(),
        "greedy.ids": ids[len(prompt) :].int().contiguous(),
        **{name: value.half() for name, value in hidden.items()},
    }
    weights = (HERE / "model" / "model.safetensors").read_bytes()
    metadata = {
        "reference": "transformers",
        "version": transformers.__version__,
        "source": "Qwen3ForCausalLM of demo/model in float32 on the CPU, by demo/golden.py",
        "kind": "independent",
        "weights.sha256": hashlib.sha256(weights).hexdigest(),
        "greedy.lead": f"{lead:.4f}",
    }
    path = HERE / "golden.safetensors"
    save_file(tensors, path, metadata=metadata)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
