#!/usr/bin/env python3
"""The tables of book/src/arithmetic.md: what the simulated Neural Engine makes of small models of every family, and of real ones.

    tools/arithmetic-table.py target/release/anec [MODEL.gguf …] > rows.md

Each model is converted twice, with activations as they are by default and by Core ML's ops, and `anec validate --numerics` runs 32 tokens of its text in
fp16 and with the simulation."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FIXTURES = Path(__file__).parent.parent / "tests/fixtures/families"


def simulated(anec, source, labels, form, room):
    """Smallest cosine of the logits, and what departs first."""
    bundle = Path(room) / form
    convert = [anec, "convert", "--source", source, "--out", bundle, "--no-compile", "--set", f"activations={form}"]
    # a classifier sees a text on both sides, in one call
    convert += ["--set", "context=48", "--set", "lengths.range=[1,48]"] if labels else ["--set", "context=256"]
    subprocess.run(convert, check=True, capture_output=True)
    validate = [anec, "validate", bundle, "--numerics", "--positions", "32", "--json", "-"]
    report = json.loads(subprocess.run(validate, capture_output=True).stdout)
    (check,) = (c for gate in report["gates"] for c in gate["checks"] if c["subject"].endswith("simulated"))
    first = re.search(r"`(\w+)` of \S+ departs by ([^(]*?) first", check.get("detail") or "")
    first = f"`{first[1]}`, {first[2]}" if first else "nothing by 2 %"
    cosine = check["measured"]["cosine"]
    return ("not a number" if cosine is None else f"{cosine:.6f}"), first


def main():
    anec, *models = sys.argv[1:]
    cases = json.loads((FIXTURES / "cases.json").read_text())
    first = {}
    for kind in ["cases", "classifiers"]:
        for case in cases[kind]:
            first.setdefault(case["family"], (FIXTURES / case["hugging_face"], kind == "classifiers"))
    sources = [(f"{family}, small", path, labels) for family, (path, labels) in first.items()]
    sources += [(Path(model).stem, model, False) for model in models]
    print("| model | stable: cosine | what departs first | native: cosine | what departs first |")
    print("|---|---|---|---|---|")
    for name, source, labels in sources:
        with tempfile.TemporaryDirectory() as room:
            cells = [cell for form in ("stable", "native") for cell in simulated(anec, source, labels, form, room)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


main()
