#!/usr/bin/env python3
"""Train the redaction demo: a tiny classifier of private spans, of the privacy filter's architecture and labels.

    python demo/redact/train.py --out demo/redact/model
    python demo/redact/train.py --check demo/redact/model

Six minutes on one H100 with `--workers 7`; more than an hour on one core. Texts come from text.py; labels are B, I, E, S
of the published eight kinds. The model is measured on held-out texts by exact spans, which are those of the best
sequence of labels that makes whole spans.
"""

import argparse
import json
import math
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from text import KINDS, Writer
from tokenizers import Tokenizer
from transformers import AutoModelForTokenClassification, OpenAIPrivacyFilterConfig

# the module beside the folder
sys.path.append(str(Path(__file__).parents[1]))
import bpe  # noqa: E402
from bpe import END  # noqa: E402

# Words, single digits, punctuation, blanks.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LABELS = ["O"] + [f"{place}-{kind}" for kind in KINDS for place in "BIES"]
CONTEXT = 512
# The published model's configuration, whose keys the tiny one has.
PUBLISHED = Path(__file__).parents[2] / "src/manifest/manifests/configs/privacy-filter.json"


def config(vocab_size: int) -> OpenAIPrivacyFilterConfig:
    return OpenAIPrivacyFilterConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=16,
        max_position_embeddings=CONTEXT,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": CONTEXT // 8,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        initializer_range=0.06,
        pad_token_id=0,
        eos_token_id=0,
        id2label=dict(enumerate(LABELS)),
        label2id={label: index for index, label in enumerate(LABELS)},
        architectures=["OpenAIPrivacyFilterForTokenClassification"],
    )


def train_tokenizer(vocab_size: int, seed: int) -> Tokenizer:
    """Byte-level BPE of generated texts."""
    writer = Writer(seed)
    return bpe.train([writer.text()[0] for _ in range(5000)], vocab_size, SPLIT)


def labelled(tokenizer: Tokenizer, text: str, spans: list) -> tuple[list[int], list[int]]:
    """Token ids, and their labels: a token belongs to the span that it has a character of."""
    encoded = tokenizer.encode(text)
    labels = [0] * len(encoded.ids)
    for start, end, kind in spans:
        inside = [i for i, (a, b) in enumerate(encoded.offsets) if a < end and b > start]
        places = ["S"] if len(inside) == 1 else ["B", *"I" * (len(inside) - 2), "E"]
        for index, place in zip(inside, places, strict=True):
            labels[index] = LABELS.index(f"{place}-{kind}")
    return encoded.ids, labels


class Rows(torch.utils.data.Dataset):
    """Rows of tokens and labels, each of texts one after the other, the first from its beginning."""

    def __init__(self, tokenizer: Tokenizer, seed: int, count: int, length: int):
        self.tokenizer, self.seed, self.count, self.length = tokenizer, seed, count, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        writer, ids, labels = Writer(f"{self.seed} {index}"), [], []
        while len(ids) < self.length:
            text, spans = writer.text()
            more = labelled(self.tokenizer, text + "\n\n", spans)
            ids, labels = ids + more[0], labels + more[1]
        return torch.tensor(ids[: self.length]), torch.tensor(labels[: self.length])


def follows(before: str, after: str) -> bool:
    if before[0] in "BI":
        return after[0] in "IE" and before[1:] == after[1:]
    return after[0] in "OBS"


FOLLOWS = torch.tensor([[0.0 if follows(a, b) else -math.inf for b in LABELS] for a in LABELS])


def decode(logits: torch.Tensor) -> list[int]:
    """The best sequence of labels that makes whole spans."""
    score, back = logits[0] + FOLLOWS[0], []
    for step in logits[1:]:
        best = (score[:, None] + FOLLOWS).max(dim=0)
        back.append(best.indices)
        score = best.values + step
    path = [int((score + FOLLOWS[:, 0]).argmax())]
    for indices in reversed(back):
        path.append(int(indices[path[-1]]))
    return path[::-1]


def spans_of(labels: list[int], offsets: list[tuple[int, int]], text: str) -> set[tuple[int, int, str]]:
    """Spans of characters, without white space at their ends."""
    spans, first = set(), 0
    for index, label in enumerate(LABELS[i] for i in labels):
        if label[0] in "BS":
            first = index
        if label[0] in "ES":
            start, end = offsets[first][0], offsets[index][1]
            inside = text[start:end]
            if inside.strip():
                start += len(inside) - len(inside.lstrip())
                spans.add((start, start + len(inside.strip()), label[2:]))
    return spans


@torch.no_grad()
def measure(model, tokenizer: Tokenizer, held_out: bool, count: int, seed: int = 9) -> dict:
    """Found, right and present spans by kind, and the same for characters of any kind."""
    writer, found, right, present = Writer(seed, held_out), Counter(), Counter(), Counter()
    for _ in range(count):
        text, spans = writer.text()
        encoded = tokenizer.encode(text)
        labels = decode(model(torch.tensor([encoded.ids])).logits[0])
        mine, theirs = spans_of(labels, encoded.offsets, text), set(spans)
        for counter, some in ((found, mine), (right, mine & theirs), (present, theirs)):
            counter.update(kind for *_, kind in some)
        a, b = ({i for start, end, _ in some for i in range(start, end)} for some in (mine, theirs))
        for counter, some in ((found, a), (right, a & b), (present, b)):
            counter["characters"] += len(some)
    return {kind: (found[kind], right[kind], present[kind]) for kind in [*KINDS, "characters"]}


def report(title: str, counts: dict) -> None:
    print(f"\n| {title} | spans | precision | recall |\n| --- | --- | --- | --- |")
    all_kinds = tuple(map(sum, zip(*(counts[kind] for kind in KINDS), strict=True)))
    rows = {kind: counts[kind] for kind in KINDS} | {"all": all_kinds, "characters": counts["characters"]}
    for kind, (found, right, present) in rows.items():
        print(f"| {kind} | {present} | {right / max(1, found):.3f} | {right / max(1, present):.3f} |")


def train(args, tokenizer: Tokenizer):
    model = AutoModelForTokenClassification.from_config(
        config(tokenizer.get_vocab_size()), attn_implementation="eager", experts_implementation="eager"
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).train()
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters} parameters, {args.steps} steps of {args.batch} x {args.length} tokens", flush=True)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": args.decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.rate, betas=(0.9, 0.95))
    started, warmup = time.time(), args.steps // 20
    rows = Rows(tokenizer, args.seed, args.steps * args.batch, args.length)
    batches = torch.utils.data.DataLoader(rows, args.batch, num_workers=args.workers)
    for step, (ids, labels) in enumerate(batches, start=1):
        cosine = 0.5 * (1 + math.cos(math.pi * max(0, step - warmup) / max(1, args.steps - warmup)))
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(step / max(1, warmup), 0.02 + 0.98 * cosine)
        loss = F.cross_entropy(model(ids.to(device)).logits.flatten(0, 1), labels.to(device).flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % args.every == 0:
            print(f"  {step:5d}  loss {loss.item():.4f}  {time.time() - started:.0f} s", flush=True)
    return model.eval().cpu()


def export(model, tokenizer: Tokenizer, folder: Path) -> None:
    """A Hugging Face folder, weights in fp16."""
    folder.mkdir(parents=True, exist_ok=True)
    values = model.config.to_dict() | {"dtype": "float16"}
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    values = {key: values[key] for key in published if key in values and key != "transformers_version"}
    tokenizer_config = {
        "add_bos_token": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": CONTEXT,
        "pad_token": END,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    for name, value in (("config.json", values), ("tokenizer_config.json", tokenizer_config)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = {name: value.half().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the model is put")
    parser.add_argument("--check", type=Path, help="only measure this model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--length", type=int, default=160)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.05)
    parser.add_argument("--workers", type=int, default=0, help="processes that write texts")
    parser.add_argument("--every", type=int, default=100, help="steps between reports")
    parser.add_argument("--texts", type=int, default=1000, help="texts to measure on")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    if args.out:
        tokenizer = train_tokenizer(args.vocab, args.seed)
        export(train(args, tokenizer), tokenizer, args.out)
    folder = args.check or args.out
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForTokenClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    for held_out in (False, True):
        title = "other templates, names, places" if held_out else "templates and names of training"
        report(title, measure(model, tokenizer, held_out, args.texts))


if __name__ == "__main__":
    main()
