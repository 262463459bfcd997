#!/usr/bin/env python3
"""Apple's side of the contract for language models: signatures as Apple's compiler prints them, and the calls of Apple's
engine for fixed shapes, in numpy on Apple's runtime. Knows nothing of anec. Needs coreai-core, numpy and safetensors.

    coreai_llm.py signatures ASSET                 prints {function: signature}
    coreai_llm.py logits ASSET TEXTS OUT [DECODE]  runs each text of the file TEXTS (safetensors, tensors of int32):
                                                   all but the last DECODE tokens as a prompt, then one by one; writes
                                                   tensors NAME (logits, f32) and NAME.positions to OUT

Source of the calls: apple/coreai-models at 86b363d, CoreAIStaticShapeEngine.
"""
import asyncio
import json
import os
import sys
from pathlib import Path

import numpy as np
from coreai.authoring import AIModelAsset
from coreai.runtime import NDArray
from safetensors.numpy import load_file, save_file

PUBLIC = ("load_embeddings", "gather_embeddings_", "extend_", "prompt_opt_")


def signatures(asset):
    """First lines of the functions that the engine calls."""
    found = {}
    for line in str(AIModelAsset.load(Path(asset)).program._module).splitlines():
        head, _, rest = line.strip().partition("(")
        name = head.split("@")[-1]
        if head.startswith("coreai.graph @") and name.startswith(PUBLIC):
            found[name] = "(" + rest
    return found


class Engine:
    """One text. Caches of a context are views of the same memory there; here they are copied to the next context."""

    def __init__(self, model):
        self.model, self.functions = model, {}
        names = [name for name in model.function_names if name.startswith("extend_")]
        self.pairs = sorted(tuple(map(int, name.split("_")[-2:])) for name in names)
        self.longest = max(tokens for _, tokens in self.pairs)
        self.done, self.context, self.caches = 0, None, {}

    def function(self, name):
        if name not in self.functions:
            self.functions[name] = self.model.load_function(name)
        return self.functions[name]

    async def start(self):
        self.table = (await self.function("load_embeddings")({}, {}))["embedding_table"]

    def states(self, function, context):
        if self.context != context:
            caches = {}
            for name in function.desc.state_names:
                of = function.desc.state_descriptor(name)
                dense = np.zeros(tuple(of.shape), np.dtype(str(of.dtype)))
                if self.context:
                    old = self.caches[name].numpy()
                    dense[..., : self.context] = old
                caches[name] = NDArray(dense)
            self.caches, self.context = caches, context
        return self.caches

    async def infer(self, tokens):
        """Processes tokens after those done; returns the logits of the last call and the positions of its rows."""
        while self.done < len(tokens):
            left = len(tokens) - self.done
            fills = left > self.longest
            sizes = sorted({tokens for _, tokens in self.pairs})
            size = next((size for size in sizes if size >= left), self.longest)
            context = next(context for context, of in self.pairs if of == size and context > self.done)
            begin = self.done // size * size
            end = min(begin + size, len(tokens))
            count = end - begin
            ids = np.zeros((1, size), np.int32)
            ids[0, :count] = tokens[begin:end]
            gather = self.function(f"gather_embeddings_{size}")
            given = {"in_new_token_ids": NDArray(ids), "embedding_table": self.table}
            embedded = (await gather(given, {}))["gathered_embeddings"]
            function = self.function(f"{'prompt_opt' if fills else 'extend'}_{context}_{size}")
            dtype = np.dtype(str(function.desc.input_descriptor("causal_mask").dtype))
            mask = np.full((1, context, 1, size), -40000, dtype)
            for row in range(count):
                mask[0, : begin + row + 1, 0, row] = 0
            given = {
                "transformer_input": embedded,
                "position_ids": NDArray((begin + np.arange(size, dtype=np.uint16))[None]),
                "in_step": NDArray(np.array([begin], np.int32)),
                "causal_mask": NDArray(mask),
                "embedding_table": self.table,
            }
            given = {name: given[name] for name in function.desc.input_names}
            out = await function(given, self.states(function, context))
            logits = np.array(out["out_logits"].numpy()).astype(np.float32)
            self.done = end
        return logits[0, 0, :count], list(range(begin, end))


async def run(asset, texts, decoded):
    found = {}
    async with AIModelAsset.load(Path(asset)).executable() as model:
        for name, tokens in texts.items():
            tokens, engine = tokens.tolist(), Engine(model)
            await engine.start()
            rows, positions = await engine.infer(tokens[: len(tokens) - decoded])
            for end in range(len(tokens) - decoded + 1, len(tokens) + 1):
                last, _ = await engine.infer(tokens[:end])
                rows, positions = np.concatenate([rows, last[-1:]]), positions + [end - 1]
            found[name] = np.ascontiguousarray(rows)
            found[f"{name}.positions"] = np.array(positions, np.int32)
    return found


if __name__ == "__main__":
    if sys.argv[1] == "signatures":
        print(json.dumps(signatures(sys.argv[2])))
    else:
        decoded = int(sys.argv[5]) if len(sys.argv) > 5 else 0
        save_file(asyncio.run(run(sys.argv[2], load_file(sys.argv[3]), decoded)), sys.argv[4])
    sys.stdout.flush()
    # the runtime may end the process otherwise when it takes itself down
    os._exit(0)
