"""Renders conversations with published chat templates, by jinja2 with transformers' settings and by `anec serve`.

equal: the texts are the same. refused: both refuse, or the server because the template leaves a message out. wrong: the
rest.

    pip install jinja2
    python tests/oracle/templates.py target/release/anec FOLDER llama.cpp/models/templates

FOLDER takes a bundle and the servers' logs. Exit code: 0 if no case is wrong, 1 otherwise.
"""

import collections
import datetime
import json
import shutil
import subprocess
import sys
import urllib.error
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.sandbox
from clients import REPOSITORY, post, serve



class Generation(jinja2.ext.Extension):
    """The tags around what a model generates, which transformers knows."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather at a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "Name of the place."}},
            "required": ["place"],
        },
    },
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"place": "Oslo"}}}
ASK, ANSWER = {"role": "user", "content": "How is the weather?"}, {"role": "assistant", "content": "Fine."}
SYSTEM, RESULT = {"role": "system", "content": "Be brief."}, {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "rain"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
THOUGHT = {"role": "assistant", "content": "Fine.", "reasoning_content": "It rains seldom."}
CONVERSATIONS = [
    {"messages": [ASK]},
    {"messages": [SYSTEM, ASK]},
    {"messages": [ASK, ANSWER, ASK]},
    {"messages": [SYSTEM, ASK, ANSWER, ASK]},
    {"messages": [ASK, ANSWER, ASK, ANSWER, ASK]},
    {"messages": [{"role": "user", "content": "  <b>\u00e9\u4e2d</b> {{ x }}\n\"'\\\n"}]},
    {"messages": [ASK], "tools": [TOOL]},
    {"messages": [SYSTEM, ASK], "tools": [TOOL]},
    {"messages": [ASK, CALLING, RESULT], "tools": [TOOL]},
    {"messages": [SYSTEM, ASK, CALLING, RESULT, ANSWER, ASK], "tools": [TOOL]},
    {"messages": [ASK, {**CALLING, "content": "Let me look."}, RESULT], "tools": [TOOL]},
    {"messages": [ASK, THOUGHT, ASK]},
    {"messages": [ASK, ANSWER, ANSWER, ASK]},
    {"messages": [ASK, ASK]},
    {"messages": [{"role": "user", "content": ""}]},
]


def transformers(template, conversation, ends):
    """Text of a template, as transformers' apply_chat_template renders it; raises what the template raises."""
    def fail(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    given = {"tools": None, "documents": None, "add_generation_prompt": True, **ends, **conversation}
    return environment.from_string(template).render(**given)


def judge(root, template, conversation, ends):
    """Verdict on a conversation, and the reason."""
    try:
        expected, refusal = transformers(template, conversation, ends), ""
    except Exception as error:
        expected, refusal = None, f"{type(error).__name__}: {error}"
    try:
        found = post(f"{root}/apply-template", conversation)["prompt"]
    except urllib.error.HTTPError as error:
        message = json.load(error)["error"]["message"]
        is_refusal = expected is None or "it leaves out message" in message
        return ("refused", message) if is_refusal else ("wrong", f"only refused here: {message}")
    if expected is None:
        return "wrong", f"only refused there: {refusal}"
    return ("equal", "") if found == expected else ("wrong", f"{found!r} instead of {expected!r}")


def main():
    anec, folder, templates = sys.argv[1:]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    counts, files = collections.Counter(), sorted(Path(templates).glob("*.jinja"))
    for file in files:
        template, source = file.read_text(encoding="utf-8"), folder / "source"
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(REPOSITORY / "demo/model", source)
        path = source / "tokenizer_config.json"
        config = json.loads(path.read_text()) | {"chat_template": template}
        path.write_text(json.dumps(config))
        ends = {name: config.get(name) or "" for name in ("bos_token", "eos_token")}
        command = [anec, "convert", source, "--out", folder / "bundle.anec", "--no-compile", "--no-measure", "--force"]
        subprocess.run(command + ["--set", "quant.weights=none"], check=True, capture_output=True)
        with serve(anec, folder / "bundle.anec", folder / "templates.log") as root:
            for number, conversation in enumerate(CONVERSATIONS, start=1):
                verdict, reason = judge(root, template, conversation, ends)
                counts[verdict] += 1
                if verdict != "equal":
                    print(f"{verdict}: {file.stem}: {number}: {' '.join(reason.split())[:400]}", flush=True)
    verdicts = ("equal", "refused", "wrong")
    print(f"{len(files)} templates")
    print("| cases |", " | ".join(verdicts), "|")
    print("|", sum(counts.values()), "|", " | ".join(str(counts[verdict]) for verdict in verdicts), "|")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
