#!/usr/bin/env python3
"""Table of book/src/arithmetic.md: small models of every family, and real ones, on the simulated Neural Engine.

    tools/arithmetic-table.py target/release/anec [MODEL.gguf …] > rows.md

Each model is converted as by default, with activations by Core ML's ops, and by the search for two chips; `anec validate
--numerics` runs 32 tokens of its text in fp16 and with the simulation."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FIXTURES = Path(__file__).parent.parent / "tests/fixtures/families"

# Manifest keys of a conversion, by the column's title.
FORMS = {
    "default": [],
    "`activations: native`": ["--set", "activations=native"],
    "`--for m1`": ["--for", "m1"],
    "`--for m5`": ["--for", "m5"],
}


def simulated(anec, source, labels, form, room):
    """Smallest cosine of the logits, and the first op that differs."""
    if labels and "--for" in form:
        return "not searched"
    bundle = Path(room) / "model.anec"
    convert = [anec, "convert", "--no-measure", "--source", source, "--out", bundle, "--no-compile", "--force", *form]
    # a classifier attends to both sides of a text, in one call
    convert += ["--set", "context=48", "--set", "lengths.range=[1,48]"] if labels else ["--set", "context=256"]
    done = subprocess.run(convert, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{source}, {form}: {done.stderr}")
    validate = [anec, "validate", bundle, "--numerics", "--max-tokens", "32", "--json", "-"]
    report = json.loads(subprocess.run(validate, capture_output=True).stdout)
    (check,) = (c for gate in report["gates"] for c in gate["checks"] if c["subject"].endswith("simulated"))
    first = re.search(r"`(\w+)` of \S+ departs by ([^(]*?) first", check.get("detail") or "")
    first = f"; `{first[1]}`, {first[2]}" if first else ""
    cosine = check["measured"]["cosine"]
    return ("not a number" if cosine is None else f"{cosine:.6f}") + first


def main():
    anec, *models = sys.argv[1:]
    cases = json.loads((FIXTURES / "cases.json").read_text())
    first = {}
    for kind in ["cases", "classifiers"]:
        for case in cases[kind]:
            first.setdefault(case["family"], (FIXTURES / case["hugging_face"], kind == "classifiers"))
    sources = [(f"{family}, small", path, labels) for family, (path, labels) in first.items()]
    sources += [(Path(model).stem, model, False) for model in models]
    print("| model | " + " | ".join(FORMS) + " |")
    print("|---" * (1 + len(FORMS)) + "|")
    for name, source, labels in sources:
        with tempfile.TemporaryDirectory() as room:
            cells = [simulated(anec, source, labels, form, room) for form in FORMS.values()]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


main()
