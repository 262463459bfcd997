"""Runs calls of a Core AI asset on Apple's runtime, one after the other over the same states.

python run_asset.py ASSET FOLDER STEPS: reads in0.safetensors … of the folder and writes out0.safetensors … there. Each
call takes the function whose inputs have the names and shapes of the file. A process for each asset, because the
runtime ends its process on some programs.
"""

import asyncio
import os
import re
import sys
from pathlib import Path

import numpy as np
from coreai.authoring import AIModelAsset
from coreai.runtime import NDArray
from safetensors.numpy import load_file, save_file


def shaped(function, given):
    """Whether a function takes these inputs; scalars travel as arrays of one element."""
    shapes = {name: tuple(function.desc.input_descriptor(name).shape) for name in function.desc.input_names}
    return shapes.keys() == given.keys() and all(
        shapes[name] == value.shape or (shapes[name] == () and value.shape == (1,)) for name, value in given.items()
    )


async def main():
    asset, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    states = {}
    async with AIModelAsset.load(asset).executable() as model:
        functions = [model.load_function(name) for name in sorted(model.function_names)]
        for step in range(steps):
            given = load_file(folder / f"in{step}.safetensors")
            names = {re.sub(r"\W", "_", name): name for name in functions[0].desc.input_names}
            given = {names.get(re.sub(r"\W", "_", name), name): value for name, value in given.items()}
            function = next((function for function in functions if shaped(function, given)), None)
            if function is None:
                sys.exit("no function for these shapes")
            of = function.desc
            inputs = {}
            for name in of.input_names:
                expected = of.input_descriptor(name)
                value = given[name].astype(np.dtype(str(expected.dtype))).reshape(list(expected.shape))
                inputs[name] = NDArray(np.ascontiguousarray(value))
            for name in of.state_names:
                state = of.state_descriptor(name)
                states.setdefault(name, NDArray(np.zeros(list(state.shape), np.dtype(str(state.dtype)))))
            found = await function(inputs, {name: states[name] for name in of.state_names})
            outputs = {name: np.ascontiguousarray(np.array(value.numpy())) for name, value in found.items()}
            plain = {name: value.astype(np.float32) if value.dtype.kind in "fV" else value.astype(np.int32) for name, value in outputs.items()}
            save_file(plain, folder / f"out{step}.safetensors")
    # the runtime may end the process otherwise when it takes itself down
    os._exit(0)


asyncio.run(main())
