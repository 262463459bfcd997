"""Apple's Core AI runtime behind a pipe: anec starts this file as a child process, because that runtime ends its process
when it doesn't like its input.

A message is a line of JSON and the bytes that the line's `arrays` describe, in order. Floats travel as f32, other numbers
as si32. Needs the package `coreai-core`, with numpy.
"""
import asyncio
import json
import os
import select
import sys

# a child without an asset ends after this time
IDLE_SECONDS = 10

# what the runtime prints must not get between the messages
pipe = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)


def send(line, arrays=()):
    line["arrays"] = [{"name": n, "kind": a.dtype.kind, "shape": list(a.shape)} for n, a in arrays]
    pipe.write(json.dumps(line).encode() + b"\n")
    for _, array in arrays:
        pipe.write(array.tobytes())
    pipe.flush()


try:
    import numpy as np
    from coreai.authoring import AIModelAsset
    from coreai.runtime import AIModel, NDArray, SpecializationOptions
except Exception as error:  # also what its libraries raise on a system that they don't know
    send({"missing": f"{type(error).__name__}: {error}", "python": sys.executable})
    sys.exit(0)


def plain(array):
    """An array as it travels."""
    array = np.asarray(array)
    return np.ascontiguousarray(array.astype(np.float32 if array.dtype.kind in "fV" else np.int32))


def described(names, descriptor):
    out = []
    for name in names:
        of = descriptor(name)
        out.append({"name": name, "dtype": str(of.dtype), "shape": list(of.shape)})
    return out


def receive(source):
    line = source.readline()
    if not line:
        return None, {}
    line = json.loads(line)
    arrays = {}
    for of in line.get("arrays", ()):
        dtype = np.dtype(np.float32 if of["kind"] == "f" else np.int32)
        count = int(np.prod(of["shape"], dtype=np.int64))
        arrays[of["name"]] = np.frombuffer(source.read(count * dtype.itemsize), dtype).reshape(of["shape"])
    return line, arrays


class Model:
    def __init__(self, model):
        self.model, self.functions, self.states = model, {}, {}

    def function(self, name):
        if name not in self.functions:
            self.functions[name] = self.model.load_function(name)
        return self.functions[name]

    def describe(self):
        out = []
        for name in sorted(self.model.function_names):
            of = self.function(name).desc
            out.append(
                {
                    "name": name,
                    "inputs": described(of.input_names, of.input_descriptor),
                    "states": described(of.state_names, of.state_descriptor),
                    "outputs": described(of.output_names, of.output_descriptor),
                }
            )
        return out

    def state(self, sequence, key, descriptor):
        states = self.states.setdefault(sequence, {})
        if key not in states:
            states[key] = NDArray(np.zeros(list(descriptor.shape), np.dtype(str(descriptor.dtype))))
        return states[key]

    async def call(self, line, arrays):
        function = self.function(line["function"])
        of = function.desc
        typed = lambda name: np.ascontiguousarray(arrays[name].astype(np.dtype(str(of.input_descriptor(name).dtype))))
        inputs = {name: NDArray(typed(name)) for name in of.input_names}
        keys = dict(line["states"])
        states = {n: self.state(line["sequence"], keys[n], of.state_descriptor(n)) for n in of.state_names}
        outputs = await function(inputs, states)
        send({"ok": True}, [(name, plain(outputs[name].numpy())) for name in line["outputs"]])

    def keep(self, line, arrays):
        states = self.states.setdefault(line["sequence"], {})
        for key, array in arrays.items():
            states[key] = NDArray(np.ascontiguousarray(array.astype(np.float16)))
        send({"ok": True})

    def show(self, line):
        states = self.states.get(line["sequence"], {})
        known = [key for key in line["keys"] if key in states]
        send({"ok": True}, [(key, plain(states[key].numpy())) for key in known])

    def copy(self, line):
        states = self.states.get(line["sequence"], {})
        self.states[line["to"]] = {k: NDArray(np.array(v.numpy())) for k, v in states.items()}
        send({"ok": True})

    def forget(self, line):
        self.states.pop(line["sequence"], None)
        send({"ok": True})


async def serve(model, source):
    model = Model(model)
    send({"functions": model.describe()})
    while True:
        line, arrays = receive(source)
        if line is None or line["do"] == "close":
            return
        try:
            match line["do"]:
                case "call":
                    await model.call(line, arrays)
                case "keep":
                    model.keep(line, arrays)
                case "show":
                    model.show(line)
                case "copy":
                    model.copy(line)
                case "forget":
                    model.forget(line)
        except Exception as error:
            send({"error": f"{type(error).__name__}: {error}"})


async def load(line, source):
    if line["system"]:
        # written from Apple's documentation: this branch needs a Mac with OS 27
        options = None
        if line["units"] == "cpu_only":
            options = SpecializationOptions.cpu_only()
        elif line["units"]:
            from coreai.runtime import ComputeUnitKind

            # the kinds are class methods: cpu, gpu, neural_engine
            kind = getattr(ComputeUnitKind, line["units"])()
            options = SpecializationOptions.from_preferred_compute_unit_kind(kind)
        await serve(await AIModel.load(line["asset"], options), source)
    else:
        async with AIModelAsset.load(line["asset"]).executable() as model:
            await serve(model, source)


async def main():
    source = sys.stdin.buffer
    while select.select([source], [], [], IDLE_SECONDS)[0]:
        line, _ = receive(source)
        if line is None:
            return
        await load(line, source)
        # the asset is closed
        send({"ok": True})


try:
    asyncio.run(main())
except Exception as error:
    send({"error": f"{type(error).__name__}: {error}"})
# the runtime may end the process otherwise when it takes itself down
os._exit(0)
