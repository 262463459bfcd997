"""What llama.cpp's formats cost a model, in the measures and over the texts of benches/quant_table.py.

    python benches/llama_formats.py --llama BIN --include INCLUDE --source model.gguf --golden golden.safetensors --work /tmp/work

`BIN` is a folder of llama.cpp's programs and libraries, `INCLUDE` the folders of llama.h and ggml.h, with a colon between
them. The source is requantized: to F16 first, and from there to each format. The logits of every token of the golden's texts
(`anec golden --texts long`) are compared with the golden's. Columns: divergence (mean KL of the next token's probabilities,
in nats), first percentile and worst cosine, agreement of the likeliest token, perplexity and its difference from the golden's,
megabytes of the file.
"""

import argparse
import os
import subprocess
from pathlib import Path

import numpy as np
from safetensors import safe_open

FORMATS = ["F16", "Q8_0", "Q6_K", "Q4_K_M", "Q4_0"]
# rows at a time: in f64 the logits of a large vocabulary take gigabytes
ROWS = 64


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def compare(process, golden, starts: list[int], tokens: list[int]) -> dict:
    """Measures of the rows that a process writes, beside those of a golden."""
    logits = golden.get_slice("logits")
    count, width = logits.get_shape()
    last = set([start - 1 for start in starts[1:]] + [count - 1])
    divergence, cosines, same, losses, golden_losses = [], [], [], [], []
    for first in range(0, count, ROWS):
        end = min(first + ROWS, count)
        own = np.frombuffer(process.stdout.read(4 * width * (end - first)), np.float32)
        own = own.reshape(end - first, width).astype(np.float64)
        expected = logits[first:end].astype(np.float64)
        cosines += list((own * expected).sum(1) / np.linalg.norm(own, axis=1) / np.linalg.norm(expected, axis=1))
        same += list(own.argmax(1) == expected.argmax(1))
        own, expected = log_softmax(own), log_softmax(expected)
        divergence += list((np.exp(expected) * (expected - own)).sum(1))
        for position in range(first, end):
            if position not in last:
                losses.append(-own[position - first, tokens[position + 1]])
                golden_losses.append(-expected[position - first, tokens[position + 1]])
    perplexity, unquantized = np.exp(np.mean(losses)), np.exp(np.mean(golden_losses))
    return {"kl": np.mean(divergence), "p1": np.percentile(cosines, 1, method="lower"), "worst": min(cosines),
            "top1": np.mean(same), "perplexity": perplexity, "difference": perplexity / unquantized - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, required=True)
    parser.add_argument("--include", required=True)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--golden", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "LD_LIBRARY_PATH": str(args.llama), "THREADS": str(args.threads)}
    program = args.work / "llama_logits"
    includes = [f"-I{folder}" for folder in args.include.split(":")]
    subprocess.run(["cc", "-O2", *includes, Path(__file__).with_name("llama_logits.c"), "-o", program, f"-L{args.llama}",
                    "-lllama", "-lggml", "-lggml-base"], check=True)
    f16 = args.work / "F16.gguf"
    print("| form | KL | p1 | worst | top-1 | perplexity | MB |\n|---|---|---|---|---|---|---|")
    with safe_open(args.golden, "numpy") as golden:
        tokens = golden.get_tensor("tokens").reshape(-1).astype(np.int32)
        starts = golden.get_tensor("texts").reshape(-1).astype(int).tolist()
        texts = [tokens[start:end] for start, end in zip(starts, starts[1:] + [len(tokens)])]
        asked = b"".join(np.int32(len(text)).tobytes() + text.tobytes() for text in texts)
        for name in FORMATS:
            model = args.work / f"{name}.gguf"
            quantize = [args.llama / "llama-quantize", "--allow-requantize", args.source if name == "F16" else f16, model, name]
            subprocess.run(quantize, check=True, env=env, capture_output=True)
            with open(args.work / "tokens.bin", "wb+") as file:
                file.write(asked)
                file.seek(0)
                process = subprocess.Popen([program, model], stdin=file, stdout=subprocess.PIPE, env=env)
                m = compare(process, golden, starts, tokens.tolist())
            if process.wait() != 0:
                raise SystemExit(f"{program} {model}: exit code {process.returncode}")
            print(f"| {name} | {m['kl']:.5f} | {m['p1']:.4f} | {m['worst']:.4f} | {m['top1']:.3f} | {m['perplexity']:.3f} "
                  f"({100 * m['difference']:+.2f} %) | {model.stat().st_size / 1e6:.0f} |", flush=True)
            if name != "F16":
                model.unlink()


if __name__ == "__main__":
    main()
