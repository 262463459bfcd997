"""Compares `anec bench` with llama.cpp's `llama-bench`, OpenVINO GenAI and torch in fp32: same machine, weights, threads.

    python benches/llama_cpp.py --anec target/release/anec --llama-bench llama-bench --source model-q8_0.gguf

The source is converted with one scale for each channel and calls of up to `--call` tokens: bundles for the Neural Engine
take few tokens at a time, which is no measure of the executor. Programs take turns, and each number is the median of what
its own benchmark reports. `--synthesize` writes a source of Qwen2.5-0.5B's shape with random weights, for machines that have
no model: times don't depend on what the weights are. Needs gguf for that, and torch and transformers for `--torch`.

`--openvino` names a Python with openvino-genai, which reads the same file (see openvino_bench.py). `--precision` compares anec's
precisions, each in turns with the others.

Other forms than int8: `--set` gives the conversion other keys, for example `--set quant.weights=palette6 --set
quant.granularity=per_tensor`, and `--llama-source` names the file that `llama-bench` reads, for example in Q6_K.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

SHAPE = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
             num_key_value_heads=2, vocab_size=151936, max_position_embeddings=32768, rope_theta=1e6,
             rms_norm_eps=1e-6, tie_word_embeddings=True)


def synthesize(path: Path) -> None:
    """Writes random weights of Qwen2.5-0.5B's shape as a Q8_0 GGUF without a tokenizer."""
    import gguf
    import numpy as np

    hidden, wide, layers = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["num_hidden_layers"]
    heads, kv_heads = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
    kv = hidden // heads * kv_heads
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(SHAPE["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(SHAPE["rope_theta"])
    writer.add_layer_norm_rms_eps(SHAPE["rms_norm_eps"])
    writer.add_vocab_size(SHAPE["vocab_size"])
    writer.add_tokenizer_model("no_vocab")

    def matrix(name: str, rows: int, columns: int) -> None:
        values = random.standard_normal((rows, columns), dtype=np.float32) / columns**0.5
        quantized = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    def vector(name: str, size: int, value: float) -> None:
        writer.add_tensor(name, np.full(size, value, dtype=np.float32))

    matrix("token_embd.weight", SHAPE["vocab_size"], hidden)
    vector("output_norm.weight", hidden, 1.0)
    for layer in range(layers):
        for name, rows, columns in [("attn_q", hidden, hidden), ("attn_k", kv, hidden), ("attn_v", kv, hidden),
                                    ("attn_output", hidden, hidden), ("ffn_gate", wide, hidden),
                                    ("ffn_up", wide, hidden), ("ffn_down", hidden, wide)]:
            matrix(f"blk.{layer}.{name}.weight", rows, columns)
        for name, size in [("attn_q", hidden), ("attn_k", kv), ("attn_v", kv)]:
            vector(f"blk.{layer}.{name}.bias", size, 0.01)
        for name in ["attn_norm", "ffn_norm"]:
            vector(f"blk.{layer}.{name}.weight", hidden, 1.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run(command: list) -> str:
    return subprocess.run([str(part) for part in command], check=True, text=True, stdout=subprocess.PIPE).stdout


def of_anec(anec: str, bundle: Path, precision: str, prompt: int, generated: int, repetitions: int) -> dict:
    report = json.loads(run([anec, "bench", bundle, "--json", "--precision", precision, "--prefill", prompt,
                             "--decode", generated, "--repetitions", repetitions]))
    prefill, decode = ([test["median_tps"] for test in report["tests"] if kind(test)][0]
                       for kind in (lambda test: test["generated"] == 0, lambda test: test["generated"] > 0))
    return {"prefill": prefill, "decode": decode}


def of_llama_cpp(llama_bench: str, source: Path, prompt: int, generated: int, threads: int, repetitions: int) -> dict:
    tests = json.loads(run([llama_bench, "-m", source, "-p", prompt, "-n", generated, "-t", threads, "-ngl", 0,
                            "-r", repetitions, "-o", "json"]))
    speed = lambda test: statistics.median(test["samples_ts"])
    return {"prefill": next(speed(test) for test in tests if test["n_prompt"] and not test["n_gen"]),
            "decode": next(speed(test) for test in tests if test["n_gen"])}


def of_openvino(python: str, source: Path, prompt: int, generated: int, threads: int, repetitions: int) -> dict:
    return json.loads(run([python, Path(__file__).with_name("openvino_bench.py"), source, "--threads", threads,
                           "--prompt", prompt, "--generated", generated, "--repetitions", repetitions]))


def of_torch(prompt: int, generated: int, threads: int, repetitions: int) -> dict:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE)).float().eval()
    ids = torch.randint(0, SHAPE["vocab_size"], (1, prompt))
    prefill, decode = [], []
    with torch.inference_mode():
        for repetition in range(repetitions + 1):
            start = time.perf_counter()
            out = model(ids, use_cache=True, logits_to_keep=1)
            middle = time.perf_counter()
            for _ in range(generated):
                token = out.logits[:, -1:].argmax(-1)
                out = model(token, past_key_values=out.past_key_values, use_cache=True)
            if repetition:  # the first warms up
                prefill.append(prompt / (middle - start))
                decode.append(generated / (time.perf_counter() - middle))
    return {"prefill": statistics.median(prefill), "decode": statistics.median(decode)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anec", required=True)
    parser.add_argument("--llama-bench")
    parser.add_argument("--openvino", metavar="PYTHON", help="an interpreter with openvino-genai")
    parser.add_argument("--precision", action="append", help="of anec; the first is compared [default: i16]")
    parser.add_argument("--source", type=Path, required=True, help="a Q8_0 GGUF")
    parser.add_argument("--llama-source", type=Path, help="what llama-bench reads instead")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the manifest")
    parser.add_argument("--synthesize", action="store_true", help="writes the source first")
    parser.add_argument("--torch", action="store_true", help="also torch in fp32, on random weights of the same shape")
    parser.add_argument("--threads", type=int, default=2, help="processors that this process was given, for example by taskset")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--generated", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--call", type=int, default=64, help="most tokens of a call of the bundle")
    arguments = parser.parse_args()
    if arguments.synthesize:
        synthesize(arguments.source)
    theirs = arguments.llama_source or arguments.source
    prompt, generated, repetitions = arguments.prompt, arguments.generated, arguments.repetitions
    with tempfile.TemporaryDirectory() as room:
        bundle = Path(room) / "bench.anec"
        manifest = Path(room) / "bench.yaml"
        manifest.write_text(f"name: bench\nsource: {arguments.source.resolve()}\ncontext: 512\n"
                            f"quant: {{granularity: per_channel}}\nlengths: {{range: [1, {arguments.call}]}}\n")
        run([arguments.anec, "convert", "--manifest", manifest, "--out", bundle, "--no-compile",
             *(part for key in arguments.set for part in ("--set", key))])
        precisions = arguments.precision or ["i16"]
        programs = {f"anec {precision}": lambda precision=precision: of_anec(arguments.anec, bundle, precision, prompt,
                                                                            generated, repetitions)
                    for precision in precisions}
        if arguments.llama_bench:
            programs["llama.cpp"] = lambda: of_llama_cpp(arguments.llama_bench, theirs, prompt, generated,
                                                         arguments.threads, repetitions)
        if arguments.openvino:
            programs["OpenVINO GenAI"] = lambda: of_openvino(arguments.openvino, theirs, prompt, generated,
                                                             arguments.threads, repetitions)
        if arguments.torch:
            programs["torch fp32"] = lambda: of_torch(prompt, generated, arguments.threads, repetitions)
        speeds = {name: [] for name in programs}
        for _ in range(arguments.turns):
            for name, program in programs.items():
                speeds[name].append(program())
    own = {}
    print(f"| program | prefill, tokens/s | decode, tokens/s | anec {precisions[0]}'s prefill is | and its decode |")
    print("|---|---|---|---|---|")
    for name, runs in speeds.items():
        prefill, decode = (statistics.median(run[what] for run in runs) for what in ("prefill", "decode"))
        own = own or {"prefill": prefill, "decode": decode}
        ratios = "| |" if name.startswith("anec") else f"| {own['prefill'] / prefill:.2f} × | {own['decode'] / decode:.2f} × |"
        print(f"| {name} | {prefill:.1f} | {decode:.1f} {ratios}")


if __name__ == "__main__":
    main()
