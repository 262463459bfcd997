"""Assets of Core AI, evaluated with numpy in f32: the bytecode from the words of book/src/aimodel.md and no others, every op as
its name says. Definitions of composite operations are not read."""

import math
from pathlib import Path

import numpy as np

FLOATS = {5: np.float64, 6: np.float32, 7: np.float16}
INTEGERS = {17: np.int64, 18: np.int32, 19: np.int16, 20: np.int8, 23: np.uint64, 24: np.uint32, 25: np.uint16, 26: np.uint8}
# integers of fewer bits than a byte: how many, and whether they have a sign
PACKED = {21: (4, True), 22: (2, True), 27: (4, False), 28: (2, False), 29: (1, False), 36: (6, False), 37: (3, False)}
BOOLEAN = 4


class Cursor:
    def __init__(self, data, at=0):
        self.data, self.at = data, at

    def byte(self):
        self.at += 1
        return self.data[self.at - 1]

    def number(self):
        first = self.byte()
        if first == 0:
            return int.from_bytes(self.take(8), "little")
        more = (first & -first).bit_length() - 1
        return int.from_bytes(bytes([first]) + self.take(more), "little") >> (more + 1)

    def signed(self):
        number = self.number()
        return -(number + 1) // 2 if number & 1 else number // 2

    def take(self, count):
        self.at += count
        return self.data[self.at - count : self.at]

    def section(self):
        """Number, and where its body begins and ends in the file."""
        head, length = self.byte(), self.number()
        if head & 0x80:
            alignment = self.number()
            self.at = -(-self.at // alignment) * alignment
        start = self.at
        self.at += length
        return head & 0x7F, start, self.at

    def numbers(self):
        return [self.number() for _ in range(self.number())]


class Asset:
    """An asset: its functions by name."""

    def __init__(self, folder):
        data = (Path(folder) / "main.mlirb").read_bytes()
        assert data[:4] == b"ML\xefR"
        cursor = Cursor(data, 4)
        assert cursor.number() == 6
        cursor.at = data.index(0, cursor.at) + 1
        sections = {}
        while cursor.at < len(data):
            number, start, end = cursor.section()
            sections[number] = (start, end)
        self.data = data
        at = lambda number: Cursor(data, sections[number][0])
        self.strings = strings(at(0))
        self.op_names = op_names(at(1), sections[1][1], self.strings)
        self.attributes, self.types = entries(at(3), sections[3][1], sections[2][0])
        self.resources = resources(at(6), sections[6][1], data, sections[5][0])
        properties = at(8)
        self.properties = []
        for _ in range(properties.number()):
            length = properties.number()
            self.properties.append(properties.at)
            properties.at += length
        self.constants = {}
        _, (asset,) = self.block(at(4))
        self.functions = {}
        for op in self.region(asset["region"])[1]:
            arguments, results, private, name = self.signature(op)
            if not private:
                self.functions[name] = Function(self, op, arguments, results)

    # entries

    def attribute(self, index):
        return Cursor(self.data, self.attributes[index])

    def string(self, index):
        cursor = self.attribute(index)
        assert cursor.number() == 1
        return self.strings[cursor.number()]

    def boolean(self, index):
        cursor = self.attribute(index)
        assert (cursor.number(), cursor.number()) == (2, 1)
        cursor.byte()
        return bool(cursor.byte())

    def array(self, index):
        cursor = self.attribute(index)
        assert cursor.number() == 5
        return cursor.numbers()

    def tensor(self, index):
        """Shape and code of the elements; `None` for what is no tensor."""
        cursor = Cursor(self.data, self.types[index])
        code = cursor.number()
        if code == 31:
            return self.tensor(cursor.number())
        if code not in (2, 3):
            return None
        shape = [cursor.signed() for _ in range(cursor.number())]
        return shape, Cursor(self.data, self.types[cursor.number()]).number()

    def is_token(self, index):
        return Cursor(self.data, self.types[index]).number() == 32

    def signature(self, op):
        cursor = Cursor(self.data, self.properties[op["properties"]])
        arguments, _, _, function, private, name, _, _, results = [cursor.number() for _ in range(9)]
        names = lambda index: [self.name_of(value) for value in self.array(index)]
        return names(arguments), names(results), self.boolean(private), self.string(name)

    def name_of(self, value):
        """The name among the attributes of a value."""
        for item in self.array(value):
            cursor = self.attribute(item)
            assert cursor.number() == 9
            if self.strings[cursor.number()] == "aicode.name":
                return self.string(cursor.numbers()[0])
        return None

    # operations

    def block(self, cursor):
        head = cursor.number()
        types = []
        if head & 1:
            for _ in range(cursor.number()):
                entry = cursor.number()
                types.append(entry >> 1)
                if entry & 1:
                    cursor.number()
            assert cursor.byte() == 0
        return types, [self.op(cursor) for _ in range(head >> 1)]

    def op(self, cursor):
        op = {"name": self.op_names[cursor.number()], "types": [], "operands": []}
        mask = cursor.byte()
        cursor.number()
        assert not mask & 0x29, "no use of these was seen"
        if mask & 0x40:
            op["properties"] = cursor.number()
        if mask & 0x02:
            op["types"] = cursor.numbers()
        if mask & 0x04:
            op["operands"] = cursor.numbers()
        if mask & 0x10:
            count = cursor.number()
            assert count & 1
            for _ in range(count >> 1):
                number, start, _ = cursor.section()
                assert number == 4
                op["region"] = start
        return op

    def region(self, start):
        """Types of the arguments, and ops."""
        cursor = Cursor(self.data, start)
        blocks, _ = cursor.number(), cursor.number()
        assert blocks == 1
        return self.block(cursor)

    def constant(self, op):
        """A constant in f32, or in whole numbers; one array for all functions."""
        value = Cursor(self.data, self.properties[op["properties"]]).number()
        key = value, op["types"][0]
        if key not in self.constants:
            shape, code = self.tensor(op["types"][0])
            cursor = self.attribute(value)
            kind, count = cursor.number(), math.prod(shape)
            if kind == 6:
                cursor.byte()
                data = cursor.take(cursor.number())
                array = np.frombuffer(data, FLOATS.get(code) or INTEGERS.get(code, np.uint8))
                if code in PACKED and PACKED[code][1]:
                    bits = PACKED[code][0]
                    array = ((array.astype(np.int8) << (8 - bits)).astype(np.int8) >> (8 - bits)).astype(np.int8)
                array = array if len(array) == count else np.broadcast_to(array, count)
            else:
                assert kind == 7
                start, end = self.resources[cursor.number()]
                data = self.data[start:end]
                dtype = FLOATS.get(code) or INTEGERS.get(code, np.uint8)
                array = unpacked(data, code, count) if code in PACKED else np.frombuffer(data, dtype)
            self.constants[key] = as_values(array, code).reshape(shape)
        return self.constants[key]


def as_values(array, code):
    if code in FLOATS:
        return array.astype(np.float32)
    return array.astype(np.bool_ if code == BOOLEAN else np.int32)


def unpacked(data, code, count):
    bits, signed = PACKED[code]
    digits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[: count * bits].reshape(count, bits)
    numbers = (digits.astype(np.int32) << np.arange(bits)).sum(1)
    return np.where(numbers >= 1 << (bits - 1), numbers - (1 << bits), numbers) if signed else numbers


def strings(cursor):
    lengths = cursor.numbers()[::-1]
    return [cursor.take(length)[:-1].decode() for length in lengths]


def op_names(cursor, end, strings):
    for _ in range(cursor.number()):
        if cursor.number() & 1:
            cursor.section()
    cursor.number()
    names = []
    while cursor.at < end:
        cursor.number()
        names += [strings[index >> 1] for index in cursor.numbers()]
    return names


def entries(cursor, end, place):
    """Places of attributes and types in the file."""
    attributes = cursor.number()
    cursor.number()
    places = []
    while cursor.at < end:
        cursor.number()
        for length in cursor.numbers():
            places.append(place)
            place += length >> 1
    return places[:attributes], places[attributes:]


def resources(cursor, end, data, place):
    """Starts and ends of resources in the file."""
    assert cursor.number() == 0
    found, body = [], Cursor(data, place)
    while cursor.at < end:
        cursor.number()
        for _ in range(cursor.number()):
            cursor.number(), cursor.number(), cursor.byte()
            alignment, count = body.number(), body.number()
            body.at = -(-body.at // alignment) * alignment
            body.take(count)
            found.append((body.at - count, body.at))
    return found


class Function:
    """A function of an asset."""

    def __init__(self, asset, op, arguments, results):
        self.asset = asset
        self.types, self.ops = asset.region(op["region"])
        self.arguments, self.results = arguments, results

    def run(self, inputs, states):
        """Outputs by name. `states` holds the states by name, and is changed."""
        values = [inputs[name] if name in inputs else name for name in self.arguments]
        for op in self.ops:
            name, operands = op["name"], [values[index] for index in op["operands"]]
            if name == "primitive.constant_v1":
                values.append(self.asset.constant(op))
            elif name == "dataflow.create_token_v1":
                values.append(None)
            elif name == "dataflow.read_handle_v1":
                values += [states[operands[0]], None]
            elif name == "dataflow.write_handle_v1":
                states[operands[0]] = operands[1]
                values.append(None)
            elif name == "dataflow.output_v1":
                named = zip(self.results, operands, self.tokens(op), strict=True)
                return {name: value for name, value, token in named if not token}
            else:
                shape, code = self.asset.tensor(op["types"][0])
                result = OPS[name.removeprefix("primitive.")](self.asset, op, code, *operands)
                result = result if isinstance(result, list) else [result]
                assert list(result[0].shape) == shape, (name, result[0].shape, shape)
                values += result
        raise AssertionError("no output")

    def tokens(self, op):
        """Whether each result is a token."""
        types = list(self.types)
        for other in self.ops:
            types += other["types"]
        return [self.asset.is_token(types[index]) for index in op["operands"]]


def cast(asset, op, code, x):
    return as_values(np.trunc(x) if code not in FLOATS and x.dtype == np.float32 else x, code)


def integers(x):
    return [int(n) for n in np.ravel(x)]


def conv2d(asset, op, code, x, weight, stride, dilation, groups):
    groups = int(groups)
    (down, right), (out, width, height, length) = integers(stride), weight.shape
    steps = integers(dilation)
    rows = (x.shape[2] - (height - 1) * steps[0] - 1) // down + 1
    columns = (x.shape[3] - (length - 1) * steps[1] - 1) // right + 1
    result = np.zeros((x.shape[0], out, rows, columns), np.float32)
    for group in range(groups):
        own = slice(group * (out // groups), (group + 1) * (out // groups))
        part = x[:, group * width : (group + 1) * width]
        for i in range(height):
            for j in range(length):
                seen = part[:, :, i * steps[0] :: down, j * steps[1] :: right][:, :, :rows, :columns]
                result[:, own] += np.einsum("oc,bchw->bohw", weight[own, :, i, j], seen)
    return result


def slices(begin, end, stride):
    return tuple(slice(b, e, s) for b, e, s in zip(integers(begin), integers(end), integers(stride)))


def slice_update(asset, op, code, x, begin, end, stride, update):
    result = x.copy()
    result[slices(begin, end, stride)] = update
    return result


def broadcast_in_dims(asset, op, code, x, sizes, axes):
    shape = list(x.shape)
    for axis, size in zip(integers(axes), integers(sizes)):
        shape[axis] = size
    return np.broadcast_to(x, shape)


def over_blocks(blocks, shape):
    for axis, size in enumerate(shape):
        blocks = np.repeat(blocks, size // blocks.shape[axis], axis)
    return blocks


def blockwise_shift_scale(asset, op, code, data, scale, offset1, offset2):
    scale, offset1, offset2 = (over_blocks(of, data.shape) for of in (scale, offset1, offset2))
    return (scale * (data - offset1) + offset2).astype(np.float32)


def lut_to_dense(asset, op, code, indices, lut, axis):
    assert lut.shape[-1] == 1, "vectors were not needed"
    blocks = lut.shape[:-2]
    numbers = over_blocks(np.arange(math.prod(blocks)).reshape(blocks), indices.shape)
    return lut.reshape(math.prod(blocks), -1)[numbers, indices]


def softmax(asset, op, code, x, axis):
    powers = np.exp(x - x.max(int(axis), keepdims=True))
    return powers / powers.sum(int(axis), keepdims=True)


def split(asset, op, code, x, sizes, axis):
    return np.split(x, np.cumsum(integers(sizes))[:-1], int(axis))


def scan(asset, op, code, x, axis, reverse):
    kind = Cursor(asset.data, asset.properties[op["properties"]]).number()
    kind = asset.attribute(kind)
    assert kind.number() == 25 and kind.number() == 0, "sums only"
    x = np.flip(x, int(axis)) if reverse else x
    total = np.cumsum(x, int(axis), dtype=x.dtype)
    return np.flip(total, int(axis)) if reverse else total


def pad(asset, op, code, x, pads, value):
    pads = integers(pads)
    return np.pad(x, list(zip(pads[::2], pads[1::2])), constant_values=value)


def order(x, axis, descending):
    return np.argsort(-x if descending else x, int(axis), kind="stable")


def scatter_along_axis(asset, op, code, x, indices, updates, axis):
    mode = Cursor(asset.data, asset.properties[op["properties"]]).number()
    mode = asset.attribute(mode)
    mode = (mode.number(), mode.number())
    assert mode in ((20, 0), (20, 1)), "updates and sums only"
    result, places = x.copy(), list(np.indices(indices.shape))
    places[int(axis)] = indices
    if mode == (20, 1):
        np.add.at(result, tuple(places), updates)
    else:
        result[tuple(places)] = updates
    return result


def elementwise(function):
    return lambda asset, op, code, *operands: as_values(function(*operands), code)


def reduction(function):
    return lambda asset, op, code, x, axes: function(x, axis=tuple(integers(axes)), keepdims=True).astype(x.dtype)


erf = np.vectorize(math.erf, otypes=[np.float32])
sigmoid = lambda x: 1 / (1 + np.exp(-x))

OPS = {
    "add_v1": elementwise(np.add),
    "sub_v1": elementwise(np.subtract),
    "mul_v1": elementwise(np.multiply),
    "divide_v1": elementwise(lambda x, y: x / y if x.dtype == np.float32 else x // y),
    "floor_divide_v1": elementwise(np.floor_divide),
    "modulo_v1": elementwise(np.fmod),
    "pow_v1": elementwise(np.power),
    "maximum_v1": elementwise(np.maximum),
    "minimum_v1": elementwise(np.minimum),
    "abs_v1": elementwise(np.abs),
    "exp_v1": elementwise(np.exp),
    "log_v1": elementwise(np.log),
    "tanh_v1": elementwise(np.tanh),
    "sqrt_v1": elementwise(np.sqrt),
    "rsqrt_v1": elementwise(lambda x: 1 / np.sqrt(x)),
    "erf_v1": elementwise(erf),
    "round_v1": elementwise(np.round),
    "not_v1": elementwise(np.logical_not),
    "equal_v1": elementwise(np.equal),
    "not_equal_v1": elementwise(np.not_equal),
    "greater_v1": elementwise(np.greater),
    "logical_and_v1": elementwise(np.logical_and),
    "logical_or_v1": elementwise(np.logical_or),
    "where_v1": elementwise(np.where),
    "cast_v1": cast,
    "sigmoid_v1": elementwise(sigmoid),
    "silu_v1": elementwise(lambda x: x * sigmoid(x)),
    "relu_v1": elementwise(lambda x: np.maximum(x, 0)),
    "gelu_v1": elementwise(lambda x: x * (1 + erf(x / math.sqrt(2))) / 2),
    "softmax_v1": softmax,
    "reduce_sum_v1": reduction(np.sum),
    "reduce_mean_v1": reduction(np.mean),
    "reduce_max_v1": reduction(np.max),
    "reduce_min_v1": reduction(np.min),
    "argmax_v1": lambda asset, op, code, x, axis: as_values(x.argmax(int(axis), keepdims=True), code),
    "sort_v1": lambda asset, op, code, x, axis, down, stable: np.take_along_axis(x, order(x, axis, down), int(axis)),
    "argsort_v1": lambda asset, op, code, x, axis, down, stable: as_values(order(x, axis, down), code),
    "scan_v1": scan,
    "batch_matmul_v1": lambda asset, op, code, x, y: x @ y,
    "conv2d_v1": conv2d,
    "broadcast_in_dims_v1": broadcast_in_dims,
    "concat_v1": lambda asset, op, code, axis, *parts: np.concatenate(parts, int(axis)),
    "reshape_v2": lambda asset, op, code, x, shape: x.reshape(integers(shape)),
    "transpose_v1": lambda asset, op, code, x, order: x.transpose(integers(order)),
    "slice_v1": lambda asset, op, code, x, *bounds: x[slices(*bounds)],
    "slice_update_v1": slice_update,
    "split_v1": split,
    "pad_v1": pad,
    "tile_v2": lambda asset, op, code, x, times: np.tile(x, integers(times)),
    "gather_nd_v1": lambda asset, op, code, x, places: x[tuple(np.moveaxis(places, -1, 0))],
    "gather_along_axis_v1": lambda asset, op, code, x, places, axis: np.take_along_axis(x, places, int(axis)),
    "scatter_along_axis_v1": scatter_along_axis,
    "blockwise_shift_scale_v2": blockwise_shift_scale,
    "lut_to_dense_v1": lut_to_dense,
}
