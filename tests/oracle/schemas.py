"""Generates a text for each schema of the JSON Schema suite on `anec serve`, validates it, and prints a table.

equal: every text that came to its end is valid. refused: an error or a warning of the answer names what isn't held.
wrong: a text is invalid, and nothing was said. not applicable: no text came to its end, or the suite's own validator
needs a schema that isn't in the suite.

    pip install jsonschema
    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    python tests/oracle/schemas.py target/release/anec FOLDER JSON-Schema-Test-Suite/tests/draft2020-12

FOLDER takes the bundle and the server's log. The model is the built-in demo, whose texts are meaningless; biases of its
logits let texts end early. Exit code: 0 if no case is wrong, 1 otherwise.
"""

import collections
import json
import sys
import urllib.error
from pathlib import Path

import jsonschema
from clients import build, post, serve

SEEDS = (1, 2, 3)
VERDICTS = ("equal", "refused", "wrong", "not applicable")


def judge(root, bias, schema):
    """Verdict on a schema, and the reason."""
    form = {"type": "json_schema", "json_schema": {"name": "case", "schema": schema}}
    texts, warnings = [], []
    for seed in SEEDS:
        body = {"messages": [{"role": "user", "content": "x"}], "response_format": form, "max_tokens": 300}
        try:
            answer = post(f"{root}/v1/chat/completions", body | {"seed": seed, "temperature": 1, "logit_bias": bias})
        except urllib.error.HTTPError as error:
            return "refused", json.load(error)["error"]["message"]
        warnings += answer.get("anec", {}).get("warnings", [])
        choice = answer["choices"][0]
        if choice["finish_reason"] == "stop":
            texts.append(choice["message"]["content"])
    if not texts:
        return "not applicable", "no text came to its end"
    for text in texts:
        try:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        except jsonschema.ValidationError as error:
            verdict = "refused" if warnings else "wrong"
            return verdict, "; ".join(dict.fromkeys(warnings)) or f"{text}: {error.message}"
        except Exception as error:
            return "not applicable", f"{type(error).__name__}: {error}"
    return "equal", ""


def main():
    anec, folder, suite = sys.argv[1:]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    build(anec, folder)
    counts = collections.Counter()
    with serve(anec, folder / "demo.anec", folder / "schemas.log") as root:
        marks = [post(f"{root}/tokenize", {"content": mark})["tokens"] for mark in ('"', "}", "]", "<|endoftext|>")]
        bias = {str(token): bias for [token], bias in zip(marks, (20, 20, 20, 20))}
        for file in sorted(Path(suite).rglob("*.json")):
            for case in json.loads(file.read_text()):
                verdict, reason = judge(root, bias, case["schema"])
                counts[verdict] += 1
                because = f": {' '.join(reason.split())[:200]}" if reason else ""
                print(f"{verdict}: {file.stem}: {case['description']}{because}", flush=True)
    print("| cases |", " | ".join(VERDICTS), "|")
    print("|", sum(counts.values()), "|", " | ".join(str(counts[verdict]) for verdict in VERDICTS), "|")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
