"""What number formats cost a model: one table of divergence, cosines, likeliest tokens, perplexity, size and time.

    python benches/quant_table.py --anec target/release/anec --source model.gguf --work /tmp/work

Every form is converted and compared, in f32 on the CPU executor, with the source's own weights, not quantized, over the
2,500 tokens of `anec golden --texts long` (src/validate/texts.txt: prose, code, data, other languages, talk, and starts after
a lone blank). `--forms` names some of the forms below, or others as `name=key=value;key=value` in the words of `--set`.
What was measured is kept in the work folder and not measured again, unless `--again` is given. Columns: divergence
(mean KL of the next token's probabilities, in nats), first percentile and worst cosine of the logits, agreement of the
likeliest token, perplexity and its difference from that of the source's own weights, whether anec's parity gate passes,
megabytes of the packages' weights, bits for each weight of a projection, seconds of the conversion, and its processor time.
"""

import argparse
import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HEAD8 = "quant.overrides={lm_head: {weights: int8, granularity: per_channel, row_scale: false}}"
GPTQ = "quant.feedback=gptq"
# left open, a form that fails the gate would get feedback by itself
ROUNDED = "quant.feedback=none"


def palette(bits: int, *more: str) -> list[str]:
    return [f"quant.weights=palette{bits}", *more]


FORMS = {
    "int8 per tensor": ["quant.granularity=per_tensor"],
    "int8 per tensor, gptq": ["quant.granularity=per_tensor", GPTQ],
    "int8 per channel": ["quant.granularity=per_channel"],
    "int8 per channel, gptq": ["quant.granularity=per_channel", GPTQ],
    "palette8": palette(8),
    "palette8, gptq": palette(8, GPTQ),
    "palette6": palette(6, HEAD8),
    "palette6, gptq": palette(6, HEAD8, GPTQ),
    "palette6 row scales": palette(6, "quant.row_scale=true", HEAD8),
    "palette6 row scales, gptq": palette(6, "quant.row_scale=true", HEAD8, GPTQ),
    "palette4 row scales": palette(4, "quant.row_scale=true", HEAD8),
    "palette4 row scales, gptq": palette(4, "quant.row_scale=true", HEAD8, GPTQ),
    "palette4 group 16": palette(4, "quant.granularity={group: 16}", HEAD8),
    "palette4 group 16, gptq": palette(4, "quant.granularity={group: 16}", HEAD8, GPTQ),
    "int4 block 32": ["quant.weights=int4", "quant.granularity={block: 32}", HEAD8],
    "int4 block 32, gptq": ["quant.weights=int4", "quant.granularity={block: 32}", HEAD8, GPTQ],
}

# calls of one size: the gate tries every way of calling with the first text, and numbers don't depend on it
CALLS = ["lengths={fixed: [128]}", "context=640", "shards.max_mb=4000"]


def run(command: list[str], env: dict[str, str], accepted: tuple[int, ...] = (0,)) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode not in accepted:
        raise SystemExit(f"{' '.join(command)}\nexit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def measure(anec: str, source: str, sets: list[str], bundle: Path, golden: Path, env: dict[str, str]) -> dict:
    """Converts one form and compares it; the bundle is removed."""
    shutil.rmtree(bundle, ignore_errors=True)
    feedback = [] if any(key.startswith("quant.feedback=") for key in sets) else [ROUNDED]
    flags = [flag for key in CALLS + sets + feedback for flag in ("--set", key)]
    command = [anec, "convert", "--source", source, "--out", str(bundle), "--force", "--no-compile", "--json", *flags]
    report = json.loads(run(command, env))["report"]
    command = [anec, "validate", str(bundle), "--parity", "--golden", str(golden), "--precision", "f32", "--json", "-"]
    gate = json.loads(run(command, env, (0, 1)))["gates"][0]
    shutil.rmtree(bundle)
    measured = {check["subject"]: check["measured"] for check in gate["checks"] if check.get("measured")}
    positions, perplexity = measured["f32, positions"], measured["f32, perplexity"]
    tensors = [t for package in report["packages"] for t in package["tensors"] if t["weights"] != "none"]
    weights = sum(8 * t["bytes"] / t["bits_per_weight"] for t in tensors)
    return {
        **{key: positions[key] for key in ("kl", "p1", "worst", "top1", "below")},
        **{key: perplexity[key] for key in ("perplexity", "golden_perplexity", "difference", "tokens")},
        "passes": gate["verdict"] == "passed",
        "mb": sum(package["weight_bytes"] for package in report["packages"]) / 1e6,
        "bits": 8 * sum(t["bytes"] for t in tensors) / max(weights, 1),
        "seconds": report["run"]["seconds"],
        "cpu_seconds": report["run"]["cpu_seconds"],
        "peak_mb": report["run"]["peak_memory_bytes"] / 1e6,
    }


def row(name: str, m: dict) -> str:
    gate = "passes" if m["passes"] else "fails"
    return (f"| {name} | {m['kl']:.5f} | {m['p1']:.4f} | {m['worst']:.4f} | {m['top1']:.3f} "
            f"| {m['perplexity']:.3f} ({100 * m['difference']:+.2f} %) | {gate} | {m['mb']:.0f} | {m['bits']:.2f} "
            f"| {m['seconds']:.0f} | {m['cpu_seconds']:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anec", default="anec")
    parser.add_argument("--source", required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for the golden (1.5 GB), bundles and results")
    parser.add_argument("--forms", action="append", help="one form, by name or as name=key=value;key=value; may be repeated")
    parser.add_argument("--threads", type=int, help="threads of anec; one for each core if not given")
    parser.add_argument("--jobs", type=int, default=1, help="forms that are measured at the same time")
    parser.add_argument("--again", action="store_true", help="measures anew what was measured")
    args = parser.parse_args()
    env = dict(os.environ)
    if args.threads:
        env["RAYON_NUM_THREADS"] = str(args.threads)
    forms = FORMS
    if args.forms:
        pairs = [form.partition("=") for form in args.forms]
        forms = {name: FORMS[name] if not sets else [s for s in sets.split(";") if s] for name, _, sets in pairs}
    args.work.mkdir(parents=True, exist_ok=True)
    golden, results = args.work / "golden.safetensors", args.work / "results.json"
    if not golden.exists():
        run([args.anec, "golden", "--source", args.source, "--texts", "long", "--out", str(golden)], env)
    known = json.loads(results.read_text()) if results.exists() else {}
    print("| form | KL | p1 | worst | top-1 | perplexity | gate | MB | bits | seconds | processor seconds |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    failed: list[str] = []

    def row_of(form: tuple[int, tuple[str, list[str]]]) -> str:
        index, (name, sets) = form
        key = f"{name}: {' '.join(sets)}"
        if args.again or key not in known:
            try:
                known[key] = measure(args.anec, args.source, sets, args.work / f"bundle-{index}", golden, env)
            except SystemExit as error:
                failed.append(name)
                return f"| {name} | could not be measured: see below |\n{error}"
            results.write_text(json.dumps(dict(known), indent=1))
        return row(name, known[key])

    with ThreadPoolExecutor(args.jobs) as pool:
        for line in pool.map(row_of, enumerate(forms.items())):
            print(line, flush=True)
    if failed:
        raise SystemExit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
