"""Use of the Python module as of a notebook: convert, plan, validate, inspect, and what goes wrong.

    ANEC=anec python tests/toolchain_client.py demo/model room
"""

import os
import sys

import anec

source, room = sys.argv[1:]
out = os.path.join(room, "python.anec")


def refused(kind, words, act, *arguments, **keys):
    try:
        act(*arguments, **keys)
    except kind as error:
        assert all(word in str(error) for word in words), error
        return error
    raise AssertionError(f"{act.__name__}{arguments}{keys} went well")


plan = anec.plan(source, context=64, quant={"weights": "int8"}, chips=["m4"])
assert plan.contexts == [64] and plan.weight_bytes > 10**6 and "m4" in str(plan.details), plan

events = []
made = anec.convert(source, out=out, progress=events.append, context=64, quant={"weights": "int8", "granularity": "per_channel"})
assert made.written and made.path == out and made.report["packages"], made
assert events and events[-1].total > 0 and events[-1].done <= events[-1].total, events
assert not anec.convert(source, out=out, context=64, quant={"weights": "int8", "granularity": "per_channel"}).written
assert anec.inspect(out)["manifest"]["quant"]["granularity"] == "per_channel"
assert any(tensor["name"].endswith("q_proj.weight") for tensor in anec.inspect(source)["tensors"])

checked = anec.validate(out, gates=["structure"])
assert checked.passed and [gate.name for gate in checked.gates] == ["structure"] and not checked.problems, checked
unproven = anec.validate(out, gates=["structure", "parity"])
assert unproven.verdict == "unproven" and not unproven.passed and len(unproven.problems) == 1, unproven.problems

error = refused(anec.ManifestError, ["contextt", "did you mean `context`"], anec.convert, source, out=out, contextt=64)
assert error.code == 2 and error.help and "help:" not in str(error), error
refused(anec.SourceError, ["nowhere"], anec.inspect, os.path.join(room, "nowhere.gguf"))
refused(anec.ToolError, [out], anec.convert, source, out=out, context=32)


def stop(event):
    raise KeyboardInterrupt


other = os.path.join(room, "other.anec")
refused(KeyboardInterrupt, [], anec.convert, source, out=other, context=64, progress=stop)
assert anec.convert(source, out=other, context=64).written, "a conversion that was interrupted is taken up again"
os.environ["ANEC"] = os.path.join(room, "nothing")
refused(FileNotFoundError, [], anec.inspect, out)
print("toolchain: ok")
