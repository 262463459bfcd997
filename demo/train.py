#!/usr/bin/env python3
"""Train the demo language model: Qwen3's architecture, 3.7 M parameters.

    pip install torch transformers tokenizers safetensors
    python demo/text.py TEXT
    python demo/train.py --text TEXT --out demo/model --compile

The model is to write like Jane Austen, whose novels are about a million tokens:
few next to the model, so plain training overfits. Two things help. Training
starts mostly on other English (the background) and ends on Austen alone. And a
few larger networks ("teachers", heavy dropout) are trained first,
and the demo model learns both the
next token and the teachers' mean distribution over it (Hinton et al. 2015,
"Distilling the Knowledge in a Neural Network").

Seeded throughout; a GPU's bf16 sums still differ between machines, so a second
run gives a model like the first, not its bits. README.md has what it reached.
"""

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import bpe
import torch
import torch.nn.functional as F
from bpe import END
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

# Qwen2's and Qwen3's own split: contractions, words, single digits, punctuation, blanks.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
# One chapter in so many is held out: never trained on, never seen by the tokenizer.
HELD_OUT_EVERY, HELD_OUT_FIRST = 24, 12
# Stored weights are multiples of one over this: few different numbers, so that they deflate well.
GRID = 256


@dataclass
class Config:
    """Sizes by their names in Hugging Face's config.json."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    dropout: float = 0.0  # on the embeddings and on each block's two outputs


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention, RMSNorm on each query and key head, then RoPE."""

    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        group = self.c.num_attention_heads // self.c.num_key_value_heads

        def heads(y):
            return y.view(batch, length, -1, self.c.head_dim).transpose(1, 2)

        def rotate(y):
            low, high = y.chunk(2, dim=-1)
            return y * cos + torch.cat((-high, low), dim=-1) * sin

        q = rotate(self.q_norm(heads(self.q_proj(x))))
        k = rotate(self.k_norm(heads(self.k_proj(x)))).repeat_interleave(group, dim=1)
        v = heads(self.v_proj(x)).repeat_interleave(group, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)
        self.dropout = c.dropout

    def forward(self, x, cos, sin):
        y = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + F.dropout(y, self.dropout, self.training)
        y = self.mlp(self.post_attention_layernorm(x))
        return x + F.dropout(y, self.dropout, self.training)


class Qwen3(nn.Module):
    """Parameter names are Hugging Face's without the leading `model.`."""

    def __init__(self, c: Config):
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        frequency = c.rope_theta ** (-torch.arange(0, c.head_dim, 2).float() / c.head_dim)
        angle = torch.outer(torch.arange(c.max_position_embeddings).float(), frequency)
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = (2 * c.num_hidden_layers) ** -0.5 if into_residual else 1.0
                nn.init.normal_(p, std=c.initializer_range * scale)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]].to(x.dtype), self.sin[: ids.shape[1]].to(x.dtype)
        x = F.dropout(x, self.c.dropout, self.training)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)  # tied


def train_tokenizer(chapters: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of the chapters."""
    tokenizer = bpe.train(chapters, vocab_size, SPLIT)
    if tokenizer.get_vocab_size() != vocab_size:
        raise SystemExit(f"the text gives {tokenizer.get_vocab_size()} tokens of {vocab_size}")
    return tokenizer


def encode(tokenizer: Tokenizer, chapters: list[str]) -> torch.Tensor:
    """All chapters as one row of ids, each closed by END."""
    end = tokenizer.token_to_id(END)
    return torch.tensor([i for c in chapters for i in [*tokenizer.encode(c).ids, end]])


@torch.no_grad()
def validation_loss(model: nn.Module, ids: torch.Tensor, context: int) -> float:
    """Mean loss in nats per token over consecutive full windows of `context`."""
    model.eval()
    rows = (len(ids) - 1) // context
    x = ids[: rows * context].view(rows, context)
    y = ids[1 : rows * context + 1].view(rows, context)
    losses = [
        F.cross_entropy(model(a).float().flatten(0, 1), b.flatten()).item() * len(a)
        for a, b in zip(x.split(32), y.split(32), strict=True)
    ]
    model.train()
    return sum(losses) / rows


def optimizer_of(model: nn.Module, rate: float, decay: float):
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=matrices[0].is_cuda)


def windows(ids: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """`count` random windows of `ids` as rows."""
    at = torch.randint(len(ids) - length, (count, 1), device=ids.device)
    return ids[at + torch.arange(length, device=ids.device)]


def fit(name, config, texts, args, steps, rate, decay, teachers=()):
    """Train one network; returns it with its best held-out loss's weights."""
    train, background, held_out = texts
    device = train.device
    model = Qwen3(config).to(device)
    optimizer = optimizer_of(model, rate, decay)
    run = torch.compile(model) if args.compile else model
    context, batch = config.max_position_embeddings, args.batch
    warmup = max(1, steps // 20)
    best, best_state, started = math.inf, None, time.time()
    print(f"{name}: {sum(p.numel() for p in model.parameters())} parameters, {steps} steps", flush=True)
    for step in range(1, steps + 1):
        cosine = 0.5 * (1 + math.cos(math.pi * max(0, step - warmup) / max(1, steps - warmup)))
        for group in optimizer.param_groups:
            group["lr"] = rate * min(step / warmup, 0.02 + 0.98 * cosine)
        share = args.background * max(0.0, 1 - step / (args.mixed * steps))
        others = round(batch * share)
        window = torch.cat(
            (
                windows(train, batch - others, context + 1),
                windows(background, others, context + 1),
            )
        )
        x, y = window[:, :-1], window[:, 1:]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = run(x).flatten(0, 1)
            loss = F.cross_entropy(logits.float(), y.flatten())
            if teachers:
                with torch.no_grad():
                    mean = sum(t(x).flatten(0, 1).float().softmax(-1) for t in teachers) / len(teachers)
                soft = -(mean * logits.float().log_softmax(-1)).sum(-1).mean()
                loss = args.soft * soft + (1 - args.soft) * loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % args.every == 0 or step == steps:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                value = validation_loss(run, held_out, context)
            seconds = time.time() - started
            print(
                f"  {step:6d}  train {loss.item():.3f}  held out {value:.4f}  {seconds:.0f} s", flush=True
            )
            if value < best:
                best = value
                best_state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    model.load_state_dict(best_state)
    model.eval()
    print(f"{name}: best held-out loss {best:.4f}", flush=True)
    return model, best


@torch.no_grad()
def sample(model: Qwen3, tokenizer: Tokenizer, prompt: str, count: int, temperature: float, top_k=40) -> str:
    ids = torch.tensor([tokenizer.encode(prompt).ids], device=next(model.parameters()).device)
    for _ in range(count):
        logits = model(ids[:, -model.c.max_position_embeddings :])[0, -1].float()
        if temperature == 0:
            chosen = logits.argmax()[None]
        else:
            top = logits.topk(top_k)
            chosen = top.indices[torch.multinomial((top.values / temperature).softmax(-1), 1)]
        ids = torch.cat((ids, chosen[None]), dim=1)
    return tokenizer.decode(ids[0].tolist(), skip_special_tokens=False)


@torch.no_grad()
def as_stored(model: nn.Module) -> None:
    """Rounds matrices to multiples of 1 / GRID, and everything to fp16, in place."""
    for p in model.parameters():
        if p.dim() == 2:
            p.copy_((p * GRID).round() / GRID)
    model.half().float()


def export(model: Qwen3, tokenizer: Tokenizer, folder: Path) -> None:
    """A Hugging Face folder, weights in fp16."""
    folder.mkdir(parents=True, exist_ok=True)
    end, c = tokenizer.token_to_id(END), asdict(model.c)
    rope_theta = c.pop("rope_theta")
    del c["dropout"]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **c,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": end,
        "dtype": "float16",
        "hidden_act": "silu",
        "max_window_layers": c["num_hidden_layers"],
        "rope_scaling": None,
        "rope_theta": rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
    }
    generation = {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.9,
        "eos_token_id": end,
        "pad_token_id": end,
    }
    tokenizer_config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": c["max_position_embeddings"],
        "pad_token": END,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    for name, value in [
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
    ]:
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = {f"model.{k}": v.half().cpu().contiguous() for k, v in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="what text.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--every", type=int, default=100, help="steps between held-out losses")
    parser.add_argument("--compile", action="store_true", help="torch.compile the networks")
    parser.add_argument("--background", type=float, default=0.9, help="its first share of a batch")
    parser.add_argument("--mixed", type=float, default=0.9, help="part of the steps that see it")
    parser.add_argument("--teachers", type=int, default=5)
    parser.add_argument("--teacher-steps", type=int, default=1000)
    parser.add_argument("--teacher-rate", type=float, default=1e-3)
    parser.add_argument("--teacher-decay", type=float, default=1.0)
    parser.add_argument("--teacher-dropout", type=float, default=0.3)
    parser.add_argument("--teacher-width", type=int, default=512)
    parser.add_argument("--teacher-layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--decay", type=float, default=0.3)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--soft", type=float, default=0.9, help="weight of the teachers' distribution")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chapters, others = (
        (args.text / f"{name}.txt").read_text(encoding="utf-8").split("\f")
        for name in ("austen", "background")
    )
    held_out = chapters[HELD_OUT_FIRST::HELD_OUT_EVERY]
    kept = [c for i, c in enumerate(chapters) if i % HELD_OUT_EVERY != HELD_OUT_FIRST]
    config = Config(dropout=args.dropout)
    tokenizer = train_tokenizer(kept, config.vocab_size)
    texts = [encode(tokenizer, c).to(device) for c in (kept, others, held_out)]
    print("tokens: {} to train on, {} background, {} held out".format(*map(len, texts)), flush=True)

    teacher_config = replace(
        config,
        hidden_size=args.teacher_width,
        intermediate_size=3 * args.teacher_width,
        num_hidden_layers=args.teacher_layers,
        num_attention_heads=args.teacher_width // 64,
        num_key_value_heads=args.teacher_width // 64,
        head_dim=64,
        dropout=args.teacher_dropout,
    )
    teachers = []
    for i in range(args.teachers):
        torch.manual_seed(args.seed + 100 + i)
        teacher, _ = fit(
            f"teacher {i}", teacher_config, texts, args, args.teacher_steps, args.teacher_rate, args.teacher_decay
        )
        teacher.requires_grad_(False)
        teachers.append(torch.compile(teacher) if args.compile else teacher)
    torch.manual_seed(args.seed)
    model, _ = fit("demo", config, texts, args, args.steps, args.rate, args.decay, teachers)
    as_stored(model)
    export(model, tokenizer, args.out)
    print(f"held-out loss as stored: {validation_loss(model, texts[2], config.max_position_embeddings):.4f}")
    model.eval()
    for prompt in ["It was a fine morning, and", '"I am very glad', "The house", "Elizabeth"]:
        for temperature in (0.0, 0.8):
            text = sample(model, tokenizer, prompt, 160, temperature)
            print(f"\n== T = {temperature}\n{text}", flush=True)


if __name__ == "__main__":
    main()
