"""The bindings, as an app in Python uses them: python bindings_client.py DEMO EMBEDDER FILTER, with the module `anec` where
Python finds it. ANEC is the program, whose texts and vectors are to be those of the bindings; EMBEDDER and FILTER may be left out."""

import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading

import anec
from anec import AnecError, AnecModel, AnecUnits, ChatTurn, TextEnd, TextForm, TextOptions

program = os.environ["ANEC"]
demo, *others = sys.argv[1:]
PROMPT = "It was a fine morning, and"


def run(*arguments):
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def refused(kind, what, call, *arguments, **more):
    try:
        call(*arguments, **more)
    except AnecError as error:
        assert type(error) is kind and what in error.message, repr(error)
        return error
    raise AssertionError(f"{call} was to be refused")


class Pieces(anec.TextListener):
    """Keeps the pieces of a text."""

    def __init__(self, each=lambda piece: True):
        self.pieces, self.each = [], each

    def on_text(self, piece):
        self.pieces.append(piece)
        return self.each(piece)


class Loads(anec.PrewarmListener):
    def __init__(self):
        self.seen = []

    def on_progress(self, done, total):
        self.seen.append((done, total))


refused(AnecError.NoBundle, "no bundle here", AnecModel.open, os.path.join(demo, "nothing"))
if sys.platform != "darwin":
    error = refused(AnecError.System, "Core ML", AnecModel.open, demo, units=AnecUnits.NEURAL_ENGINE)
    assert "Mac" in error.help
    assert AnecModel.open(demo).info().units == AnecUnits.EXECUTOR
model = AnecModel.open(demo, units=AnecUnits.EXECUTOR)
info = model.info()
assert info.task == "text_generation" and info.context >= 128 and info.dimensions == 0 and info.weight_bytes > 10**5
assert model.prewarm_estimate() is None, "the executor maps files"
loads = Loads()
model.prewarm(loads)
total = loads.seen[-1][1]
assert total > 0 and loads.seen == [(done, total) for done in range(total + 1)], "one after the other"

# the text of the program, piece by piece
session = model.session()
for more, options in [
    ([], TextOptions(max_tokens=40)),
    (["--temperature", "0.9", "--top-k", "20", "--seed", "7"], TextOptions(max_tokens=40, temperature=0.9, top_k=20, seed=7)),
]:
    expected = json.loads(run("run", demo, "--prompt", PROMPT, "--max-tokens", "40", "--json", *more))
    pieces = Pieces()
    text = session.generate(PROMPT, options, pieces)
    assert (text.text, text.tokens) == (expected["text"], expected["ids"]), (text, expected)
    assert "".join(pieces.pieces) == text.text and len(pieces.pieces) > 5, "as it comes"
    assert text.end == {"length": TextEnd.LENGTH, "stop": TextEnd.STOP}[expected["finish"]]
assert text.cached_tokens > 0, "what the session knows isn't computed again"

# cancelled by what the listener says, by a call within it, by another thread
stopped = session.generate(PROMPT, TextOptions(max_tokens=40), Pieces(lambda piece: False))
assert stopped.end == TextEnd.CANCELLED and 0 < len(stopped.tokens) < 40
pieces = Pieces(lambda piece: session.cancel() or True)
assert session.generate(PROMPT, TextOptions(max_tokens=40), pieces).end == TextEnd.CANCELLED and len(pieces.pieces) == 1
came, gone = threading.Event(), threading.Event()
thread = threading.Thread(target=lambda: (came.wait(), session.cancel(), gone.set()))
thread.start()
waiting = Pieces(lambda piece: (came.set(), gone.wait())[1])
assert session.generate(PROMPT, TextOptions(max_tokens=40), waiting).end == TextEnd.CANCELLED
thread.join()
whole = session.generate(PROMPT, TextOptions(max_tokens=40)).text
assert whole.startswith(stopped.text), "a cancelled text leaves nothing behind"

# forms, stop strings
form = TextForm.REGEX("[a-c]{3}")
assert set(session.generate(PROMPT, TextOptions(max_tokens=20, form=form)).text) <= set("abc")
schema = json.dumps({"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["n"],
                     "additionalProperties": False})
found = session.generate(PROMPT, TextOptions(max_tokens=60, form=TextForm.JSON_SCHEMA(schema)))
assert 1 <= json.loads(found.text)["n"] <= 9 and found.end == TextEnd.STOP
stop = whole[8:12]
assert session.generate(PROMPT, TextOptions(max_tokens=40, stops=[stop])).text == whole[: whole.index(stop)]

# files as bundle.json lists them, and as version 2 did
with open(os.path.join(demo, "bundle.json"), encoding="utf8") as file:
    listed = json.load(file)["host"]["file"]
table = os.path.join(demo, listed["file"])
with open(table, "rb") as file:
    sha256 = hashlib.sha256(file.read()).hexdigest()
assert anec.file_has_digest(table, listed["digest"]) and anec.file_has_digest(table, sha256)
assert not anec.file_has_digest(os.path.join(demo, "bundle.json"), listed["digest"])
refused(AnecError.WrongArgument, "not a digest", anec.file_has_digest, table, "md5:0")
refused(AnecError.DamagedBundle, "can't read", anec.file_has_digest, table + ".part", sha256)

# errors are exceptions
refused(AnecError.TextTooLong, "context", session.generate, PROMPT * 2000, TextOptions())
refused(AnecError.WrongArgument, "temperature", session.generate, PROMPT, TextOptions(temperature=-1.0))
refused(AnecError.WrongArgument, "JSON", session.generate, PROMPT, TextOptions(form=TextForm.JSON_SCHEMA("{")))
refused(AnecError.OtherTask, "no vectors", model.embed, ["a"])
refused(AnecError.OtherTask, "label", model.redact, "a")


def fails(piece):
    raise KeyError("of the app")


refused(AnecError.Listener, "of the app", session.generate, PROMPT, TextOptions(), Pieces(fails))
assert session.generate(PROMPT, TextOptions(max_tokens=40)).text == whole, "the session goes on"

# two sessions at a time, each with its own text
texts = {}
threads = [threading.Thread(target=lambda n=n: texts.update({n: model.session().generate(PROMPT, TextOptions(max_tokens=40)).text})) for n in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert list(texts.values()) == [whole, whole]

# a chat by the model's template, where it has one
turns = [ChatTurn(role="user", content="Hello")]
chat = subprocess.run([program, "run", demo, "--prompt", "Hello", "--chat", "--max-tokens", "12", "--json"], capture_output=True, text=True)
if chat.returncode == 0:
    assert model.session().chat(turns, TextOptions(max_tokens=12)).text == json.loads(chat.stdout)["text"]
else:
    refused(AnecError.OtherTask, "chat template", model.session().chat, turns, TextOptions())

if others:
    embedder = AnecModel.open(others[0], units=AnecUnits.EXECUTOR)
    words = ["the sea", "is singing"]
    vectors = embedder.embed(words)
    assert [len(vector) for vector in vectors] == [embedder.info().dimensions] * 2
    with tempfile.TemporaryDirectory() as room:
        path = os.path.join(room, "v.safetensors")
        run("embed", others[0], "--prompt", words[0], "--prompt", words[1], "--out", path)
        with open(path, "rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
            [start, end] = header["embedding"]["data_offsets"]
            values = struct.unpack(f"<{(end - start) // 4}f", file.read()[start:end])
    assert list(values) == vectors[0] + vectors[1], "to the last bit"
    refused(AnecError.OtherTask, "vectors", embedder.session().generate, PROMPT, TextOptions())

    filter = AnecModel.open(others[1], units=AnecUnits.EXECUTOR)
    text = "Dear Ms. Zoë Müller-Łukasz,\nwrite to zoe.mueller@example.org before 2026-03-15. 海は静かだった。"
    with tempfile.TemporaryDirectory() as room:
        path = os.path.join(room, "text")
        with open(path, "w", encoding="utf8", newline="") as file:
            file.write(text)
        redacted = subprocess.run([program, "redact", others[1], path], capture_output=True, check=True).stdout
        spans = [json.loads(line) for line in run("redact", others[1], path, "--json").splitlines()]
    found = filter.redact(text)
    assert found.text == redacted.decode(errors="replace")
    assert [vars(span) for span in found.spans] == spans and spans
    kept = filter.redact(text, [spans[0]["label"]])
    assert {span.label for span in kept.spans} == {spans[0]["label"]}
    refused(AnecError.WrongArgument, "no spans", filter.redact, text, ["nonsense"])
print("bindings: ok")
