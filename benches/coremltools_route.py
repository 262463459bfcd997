"""The usual route to the same packages, measured: dequantize a GGUF with gguf-py, build the layers in torch, trace them,
convert with coremltools, quantize to int8, save.

    python benches/coremltools_route.py MODEL.gguf --first 0 --end 2 --head-rows 66688

builds layers [first, end) of a Phi-4-mini-shaped GGUF (as `cargo bench --bench convert` writes) as one stateful package, and one
piece of the LM head, in the graph form that `anec convert` emits by default: 1x1 convolutions, masked cache writes, one
key-value head at a time, T from 1 to 4, int8 weights per tensor. Prints one line of JSON: wall seconds, processor seconds
of all threads, and peak memory, for the layers, for the head, and in all.

Needs: coremltools, torch, gguf, numpy.
"""

import argparse
import json
import pathlib
import resource
import tempfile
import time

import coremltools as ct
import coremltools.optimize.coreml as cto
import gguf
import numpy as np
import torch
from torch import nn

HIDDEN, HEADS, KEY_HEADS, HEAD_DIM, ROTARY, EPS = 3072, 24, 8, 128, 96, 1e-5


class Norm(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.reshape(1, -1, 1, 1), requires_grad=False)

    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(dim=1, keepdim=True) + EPS) * self.weight


def conv(weight):
    module = nn.Conv2d(weight.shape[1], weight.shape[0], 1, bias=False)
    module.weight = nn.Parameter(weight.reshape(*weight.shape, 1, 1), requires_grad=False)
    return module


def rotate(x, cos, sin):
    half = ROTARY // 2
    a, b, rest = x[..., :half], x[..., half:ROTARY], x[..., ROTARY:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class Layer(nn.Module):
    def __init__(self, tensor):
        super().__init__()
        qkv, gate_up = tensor("attn_qkv"), tensor("ffn_up")
        queries, keys = HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM
        self.query, self.key, self.value = (conv(w) for w in qkv.split([queries, keys, keys]))
        self.gate, self.up = (conv(w) for w in gate_up.chunk(2))
        self.output, self.down = conv(tensor("attn_output")), conv(tensor("ffn_down"))
        self.attention_norm, self.mlp_norm = Norm(tensor("attn_norm")), Norm(tensor("ffn_norm"))

    def heads(self, x, count):
        # [1, count * dim, T, 1] -> [1, count, T, dim]
        return x.reshape(1, count, HEAD_DIM, -1).permute(0, 1, 3, 2)

    def forward(self, x, cos, sin, mask, write, k_cache, v_cache):
        normal = self.attention_norm(x)
        query = rotate(self.heads(self.query(normal), HEADS), cos, sin)
        key = rotate(self.heads(self.key(normal), KEY_HEADS), cos, sin)
        value = self.heads(self.value(normal), KEY_HEADS)
        keep = 1 - write.sum(dim=-1, keepdim=True)
        k_cache[:] = k_cache * keep + torch.matmul(write, key)
        v_cache[:] = v_cache * keep + torch.matmul(write, value)
        keys, values = k_cache, v_cache
        group = HEADS // KEY_HEADS
        out = []
        for head in range(KEY_HEADS):
            k, v = keys[:, head : head + 1], values[:, head : head + 1]
            q = query[:, head * group : (head + 1) * group]
            scores = torch.matmul(q, k.transpose(-1, -2)) * HEAD_DIM**-0.5 + mask
            out.append(torch.matmul(torch.softmax(scores, dim=-1), v))
        attended = torch.cat(out, dim=1).permute(0, 1, 3, 2).reshape(1, HEADS * HEAD_DIM, -1, 1)
        x = x + self.output(attended)
        normal = self.mlp_norm(x)
        return x + self.down(nn.functional.silu(self.gate(normal)) * self.up(normal))


class Layers(nn.Module):
    def __init__(self, layers, context):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        for index in range(len(layers)):
            for name in "kv":
                self.register_buffer(f"{name}_cache_{index}", torch.zeros(1, KEY_HEADS, context, HEAD_DIM))

    def forward(self, hidden, rope_cos, rope_sin, attn_mask, kv_write_mask):
        for index, layer in enumerate(self.layers):
            caches = getattr(self, f"k_cache_{index}"), getattr(self, f"v_cache_{index}")
            hidden = layer(hidden, rope_cos, rope_sin, attn_mask, kv_write_mask, *caches)
        return hidden


class Head(nn.Module):
    def __init__(self, norm, weight):
        super().__init__()
        self.norm, self.head = Norm(norm), conv(weight)

    def forward(self, hidden):
        return self.head(self.norm(hidden))


def used():
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in (own, children))


def package(module, inputs, states, output, path):
    """Traces, converts, quantizes and saves a module. `inputs` maps names to shapes, "T" standing for the tokens."""
    tokens = ct.RangeDim(lower_bound=1, upper_bound=4, default=1, symbol="T")
    module = module.eval()
    example = [torch.zeros([2 if d == "T" else d for d in shape]) for shape in inputs.values()]
    with torch.no_grad():
        traced = torch.jit.trace(module, example, check_trace=False)
    model = ct.convert(
        traced,
        inputs=[
            ct.TensorType(name, [tokens if d == "T" else d for d in shape], dtype=np.float16)
            for name, shape in inputs.items()
        ],
        outputs=[ct.TensorType(output, dtype=np.float16)],
        states=[ct.StateType(ct.TensorType(shape=shape, dtype=np.float16), name) for name, shape in states.items()],
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision.FLOAT16,
        skip_model_load=True,
    )
    config = cto.OpLinearQuantizerConfig(mode="linear_symmetric", dtype="int8", granularity="per_tensor")
    model = cto.linear_quantize_weights(model, cto.OptimizationConfig(global_config=config))
    model.save(str(path))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--end", type=int, default=1)
    parser.add_argument("--head-rows", type=int, default=0, help="rows of the LM-head piece; 0 for none")
    parser.add_argument("--context", type=int, default=2048)
    arguments = parser.parse_args()

    reader = gguf.GGUFReader(arguments.model)
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def read(name, rows=None):
        tensor = tensors[name]
        values = gguf.dequantize(tensor.data if rows is None else tensor.data[:rows], tensor.tensor_type)
        return torch.from_numpy(np.ascontiguousarray(values))

    results, folder = {}, pathlib.Path(tempfile.mkdtemp(prefix="coremltools-route-"))

    def measure(name, build):
        begin, cpu = time.time(), used()
        build()
        results[name] = {"wall_seconds": round(time.time() - begin, 2), "cpu_seconds": round(used() - cpu, 2)}

    def layers():
        own = [
            Layer(lambda name, i=i: read(f"blk.{i}.{name}.weight")) for i in range(arguments.first, arguments.end)
        ]
        inputs = {
            "hidden": [1, HIDDEN, "T", 1],
            "rope_cos": [1, 1, "T", ROTARY // 2],
            "rope_sin": [1, 1, "T", ROTARY // 2],
            "attn_mask": [1, 1, "T", arguments.context],
            "kv_write_mask": [1, 1, arguments.context, "T"],
        }
        shape = (1, KEY_HEADS, arguments.context, HEAD_DIM)
        states = {f"{name}_cache_{i}": shape for i in range(len(own)) for name in "kv"}
        package(Layers(own, arguments.context), inputs, states, "hidden_out", folder / "layers.mlpackage")

    def head():
        module = Head(read("output_norm.weight"), read("token_embd.weight", arguments.head_rows))
        package(module, {"hidden": [1, HIDDEN, "T", 1]}, {}, "logits", folder / "head.mlpackage")

    measure("layers", layers)
    if arguments.head_rows:
        measure("head", head)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"layers": arguments.end - arguments.first, "head_rows": arguments.head_rows, **results, "peak_bytes": peak}))


if __name__ == "__main__":
    main()
