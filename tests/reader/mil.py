"""Packages of MIL programs, evaluated with numpy in f32: the protobuf and the weight file as coremltools defines them,
every op as its documentation says."""

import math
import struct
from pathlib import Path

import numpy as np
from coremltools.proto import MIL_pb2, Model_pb2

DTYPES = {
    MIL_pb2.FLOAT16: np.float16,
    MIL_pb2.FLOAT32: np.float32,
    MIL_pb2.INT8: np.int8,
    MIL_pb2.UINT8: np.uint8,
    MIL_pb2.INT32: np.int32,
    MIL_pb2.BOOL: np.bool_,
    MIL_pb2.STRING: str,
}


# integers of fewer bits than a byte: how many, and whether they have a sign
PACKED = {
    MIL_pb2.INT4: (4, True),
    MIL_pb2.UINT1: (1, False),
    MIL_pb2.UINT2: (2, False),
    MIL_pb2.UINT3: (3, False),
    MIL_pb2.UINT4: (4, False),
    MIL_pb2.UINT6: (6, False),
}


class Package:
    """A package: its functions by name."""

    def __init__(self, folder):
        data = Path(folder) / "Data/com.apple.CoreML"
        model = Model_pb2.Model()
        model.ParseFromString((data / "model.mlmodel").read_bytes())
        weights = data / "weights/weight.bin"
        self.weights = weights.read_bytes() if weights.exists() else b""
        functions = model.mlProgram.functions
        self.functions = {name: Function(function, self.weights) for name, function in functions.items()}


class Function:
    """A function: its constants are read once."""

    def __init__(self, function, weights):
        block = function.block_specializations[function.opset]
        self.inputs = [value.name for value in function.inputs]
        self.outputs = list(block.outputs)
        self.constants = {}
        self.steps = []
        for op in block.operations:
            names = [value.name for value in op.outputs]
            sources = {}
            for parameter, argument in op.inputs.items():
                bound = [
                    constant(b.value, weights) if b.WhichOneof("binding") == "value" else Name(b.name)
                    for b in argument.arguments
                ]
                # several values are a tuple, whatever their number
                sources[parameter] = bound if parameter == "values" else bound[0]
            if op.type == "const":
                self.constants[names[0]] = constant(op.attributes["val"], weights)
            elif op.type.startswith("constexpr"):
                # the older ops hold what they expand as attributes
                held = {p: constant(v, weights) for p, v in op.attributes.items() if p != "name"}
                sources.update(held)
                known = {p: self.constants[s] if isinstance(s, Name) else s for p, s in sources.items()}
                self.constants[names[0]] = OPS[op.type](**known)
            else:
                self.steps.append((op.type, sources, names))

    def run(self, inputs, states):
        """Outputs by name. `states` holds the states by their names in the package, and is changed."""
        values = dict(inputs)

        def value(source):
            if isinstance(source, list):
                return [value(part) for part in source]
            if not isinstance(source, Name):
                return source
            return self.constants[source] if source in self.constants else values[source]

        for kind, sources, names in self.steps:
            if kind == "read_state":
                values[names[0]] = states[sources["input"]]
            elif kind == "write_state":
                states[sources["input"]] = value(sources["data"])
            else:
                result = OPS[kind](**{parameter: value(source) for parameter, source in sources.items()})
                results = result if isinstance(result, tuple) else (result,)
                values.update(zip(names, results))
        return {name: value(Name(name)) for name in self.outputs}


class Name(str):
    """The name of a value, as opposed to a string."""


def constant(value, weights):
    """A constant in f32, or in whole numbers."""
    tensor = value.type.tensorType
    shape = [dimension.constant.size for dimension in tensor.dimensions]
    if tensor.dataType in PACKED:
        return packed(value, weights, shape, *PACKED[tensor.dataType])
    dtype = DTYPES[tensor.dataType]
    if value.WhichOneof("value") == "blobFileValue":
        sentinel, _, size, offset = struct.unpack_from("<IIQQ", weights, value.blobFileValue.offset)
        assert sentinel == 0xDEADBEEF
        array = np.frombuffer(weights, dtype, int(np.prod(shape)), offset)
        assert array.nbytes == size
    else:
        held = value.immediateValue.tensor
        kind = held.WhichOneof("value")
        if kind == "strings":
            return held.strings.values[0]
        if kind == "bytes":
            array = np.frombuffer(held.bytes.values, dtype)
        else:
            array = np.array(getattr(held, kind).values, dtype)
    array = array.reshape(shape)
    return array.astype(np.float32) if array.dtype == np.float16 else array


def packed(value, weights, shape, bits, signed):
    """Elements of so many bits, the least significant bit first, across byte borders."""
    count = int(np.prod(shape))
    if value.WhichOneof("value") == "blobFileValue":
        sentinel, _, size, offset, padding = struct.unpack_from("<IIQQQ", weights, value.blobFileValue.offset)
        assert sentinel == 0xDEADBEEF and size * 8 - padding == count * bits
        raw = np.frombuffer(weights, np.uint8, size, offset)
    else:
        raw = np.frombuffer(value.immediateValue.tensor.bytes.values, np.uint8)
    digits = np.unpackbits(raw, bitorder="little")[: count * bits].reshape(count, bits)
    numbers = digits.astype(np.int32) @ (1 << np.arange(bits))
    if signed:
        numbers = np.where(digits[:, -1] == 1, numbers - (1 << bits), numbers)
    return numbers.reshape(shape)


def windows(x, begin, end, begin_mask, end_mask, squeeze_mask, stride):
    slices = []
    for axis in range(x.ndim):
        first = None if begin_mask[axis] else int(begin[axis])
        last = None if end_mask[axis] else int(end[axis])
        assert not squeeze_mask[axis]
        slices.append(slice(first, last, int(stride[axis])))
    return tuple(slices)


def slice_update(x, update, **where):
    at = windows(x, **where)
    assert x[at].shape == update.shape, "the slice lies in the tensor"
    result = x.copy()
    result[at] = update
    return result


def conv(x, weight, strides, pad, pad_type, dilations, groups, bias=None):
    assert pad_type in ("valid", "custom") and all(n == 1 for n in (*strides, *dilations))
    if pad_type == "custom":
        x = np.pad(x, [(0, 0), (0, 0), (pad[0], pad[1]), (pad[2], pad[3])])
    groups = int(groups)
    outputs, channels, height, width = weight.shape
    rows, columns = x.shape[2] - height + 1, x.shape[3] - width + 1
    x = x.reshape(groups, channels, *x.shape[2:])
    weight = weight.reshape(groups, outputs // groups, channels, height, width)
    result = np.zeros((groups, outputs // groups, rows * columns), np.float32)
    for i in range(height):
        for j in range(width):
            seen = x[:, :, i : i + rows, j : j + columns].reshape(groups, channels, -1)
            result += weight[:, :, :, i, j] @ seen
    result = result.reshape(1, outputs, rows, columns)
    return result if bias is None else result + bias.reshape(1, -1, 1, 1)


def matmul(x, y, transpose_x, transpose_y):
    return (np.swapaxes(x, -1, -2) if transpose_x else x) @ (np.swapaxes(y, -1, -2) if transpose_y else y)


erf = np.vectorize(math.erf, otypes=[np.float32])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x, mode):
    if mode == "EXACT":
        return 0.5 * x * (1 + erf(x / np.float32(np.sqrt(2))))
    assert mode == "TANH_APPROXIMATION", mode
    return 0.5 * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + 0.044715 * x**3)))


def softmax(x, axis):
    powers = np.exp(x - x.max(axis=int(axis), keepdims=True))
    return powers / powers.sum(axis=int(axis), keepdims=True)


def layer_norm(x, axes, epsilon):
    axes = tuple(axes)
    centred = x - x.mean(axis=axes, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=axes, keepdims=True) + epsilon)


def topk(x, k, axis, ascending, sort, return_indices, output_indices_dtype):
    assert return_indices and not ascending
    order = np.argsort(-x, axis=int(axis), kind="stable")
    indices = np.take(order, np.arange(int(k)), axis=int(axis))
    return np.take_along_axis(x, indices, int(axis)), indices.astype(np.int32)


def reduced(how):
    return lambda x, axes, keep_dims: how(x, axis=tuple(axes), keepdims=bool(keep_dims))


def reduce_argmax(x, axis, keep_dims, output_dtype):
    return np.argmax(x, axis=int(axis), keepdims=bool(keep_dims)).astype(np.int32)


def dequantize(data, scale):
    """Each scale stands for a block of elements along every axis."""
    for axis, (many, few) in enumerate(zip(data.shape, scale.shape)):
        scale = np.repeat(scale, many // few, axis)
    # the result is a tensor of fp16 like its scale
    return (data.astype(np.float32) * scale).astype(np.float16).astype(np.float32)


def affine_dequantize(quantized_data, zero_point, scale, axis):
    """A scale for all, or for each place along an axis."""
    shape = [1] * quantized_data.ndim
    if scale.ndim == 1:
        shape[int(axis)] = -1
    assert np.all(zero_point == 0)
    return dequantize(quantized_data, scale.reshape(shape))


def look_up(indices, lut):
    """Tables of numbers, each for a block of indices along every axis."""
    *groups, entries, width = lut.shape
    assert width == 1 and indices.max() < entries
    table = np.arange(np.prod(groups)).reshape(groups)
    for axis, (many, few) in enumerate(zip(indices.shape, groups)):
        table = np.repeat(table, many // few, axis)
    return lut.reshape(-1, entries)[table, indices]


OPS = {
    "abs": np.abs,
    "add": np.add,
    "cast": lambda x, dtype: x.astype({"fp16": np.float32, "fp32": np.float32, "int32": np.int32, "bool": bool}[dtype]),
    "concat": lambda values, axis, interleave: np.concatenate(values, int(axis)),
    "constexpr_affine_dequantize": affine_dequantize,
    "constexpr_blockwise_shift_scale": dequantize,
    "constexpr_lut_to_dense": look_up,
    "conv": conv,
    "equal": np.equal,
    "exp": np.exp,
    "expand_dims": lambda x, axes: np.expand_dims(x, tuple(axes)),
    "gelu": gelu,
    "layer_norm": layer_norm,
    "linear": lambda x, weight, bias: x @ weight.T + bias,
    "matmul": matmul,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "identity": np.positive,
    "mul": np.multiply,
    "real_div": np.divide,
    "reduce_argmax": reduce_argmax,
    "reduce_max": reduced(np.max),
    "reduce_mean": reduced(np.mean),
    "reduce_sum": reduced(np.sum),
    "reshape": lambda x, shape: x.reshape(shape),
    "rsqrt": lambda x, epsilon: 1 / np.sqrt(x + epsilon),
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "slice_by_index": lambda x, **where: x[windows(x, **where)],
    "slice_update": slice_update,
    "softmax": softmax,
    "softplus": lambda x: np.logaddexp(0, x),
    "squeeze": lambda x, axes: np.squeeze(x, tuple(axes)),
    "sub": np.subtract,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "topk": topk,
    "transpose": lambda x, perm: np.transpose(x, perm),
}

for name, function in OPS.items():
    # ufuncs name their parameters otherwise
    if isinstance(function, np.ufunc):
        OPS[name] = (lambda f: (lambda x, y: f(x, y)) if f.nin == 2 else (lambda x: f(x)))(function)
