"""Judges .mlpackage folders with coremltools' own parser, weight reader and type inference, on any OS.

    python tests/oracle/check_package.py [--lengths 1,2,3,4|ends] [--strict] PACKAGE_OR_FOLDER...

For each package it checks
  * Manifest.json, by hand and through libmodelpackage;
  * the protobuf, specification version, opsets and names;
  * every weight blob: its record by hand, its data through libmilstoragepython;
  * every op: coremltools infers its output types again and they must equal the declared ones;
    every parameter that coremltools would write must be there (Core ML has no defaults of its own);
  * the description: features against the functions' signatures, flexible shapes against unknown dimensions.
With --lengths, each function that has unknown input dimensions is typed again with all of them set to each length; its
outputs' unknown dimensions must then have the size which the symbolic types promise (the length itself where those
promise nothing), and the length must be one that the description allows. `all` stands for every length that the
description allows, the 16 smallest of them.

A folder that is no .mlpackage stands for the packages in it. One JSON line per package goes to stdout:
    {"package", "specification_version", "functions": [{"name", "opset", "ops", "ok", "unproven", "lengths"}], "blobs", "errors", "warnings"}
`unproven` counts declared dimensions that inference could neither confirm nor refute (the --lengths runs usually do).
Exit code: 0 all sound, 1 some error (with --strict, also some warning), 2 usage, 3 coremltools can't be had here.
"""

import argparse
import contextlib
import functools
import gc
import json
import logging
import re
import struct
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path

warnings.filterwarnings("ignore")
try:
    # The wheel talks of missing macOS libraries and untested versions of other packages while it loads.
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(sys.stderr):
        import numpy as np
        from coremltools import _OPSET, proto
        from coremltools.converters.mil._deployment_compatibility import AvailableTarget
        from coremltools.converters.mil.frontend.milproto import load as milproto
        from coremltools.converters.mil.mil import types
        from coremltools.converters.mil.mil.types.symbolic import is_symbolic
        from coremltools.libmilstoragepython import _BlobStorageReader
        from coremltools.libmodelpackage import ModelPackage
except Exception as error:
    print(f"check_package: coremltools is not usable here: {error}", file=sys.stderr)
    sys.exit(3)

# What coremltools says of a type is asked twenty times for each op, and never changes.
_of_type = sys.modules["coremltools.converters.mil.mil.types.get_type_info"].get_type_info
_of_type_once = functools.cache(_of_type)
for _module in list(sys.modules.values()):
    if getattr(_module, "get_type_info", None) is _of_type:
        _module.get_type_info = _of_type_once
# Garbage isn't searched among what is imported, nor after every 700 new objects, of which a package has far more.
gc.freeze()
gc.set_threshold(30_000, 20, 20)

MIL = proto.MIL_pb2
VERBOSE = False
SPECIFICATION_OF_OPSET = {opset: version for version, opset in _OPSET.items()}
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_@]*")
WEIGHTS_PREFIX = "@model_path/"
# `--lengths ends`: the smallest and the largest length of those up to this one.
ENDS, MAX_LENGTH = "ends", 1024

# MILBlob's dtype codes, beside the bits of an element.
BLOB_DTYPES = {
    "FLOAT16": (1, 16), "FLOAT32": (2, 32), "UINT8": (3, 8), "INT8": (4, 8), "BFLOAT16": (5, 16), "INT16": (6, 16),
    "UINT16": (7, 16), "INT4": (8, 4), "UINT1": (9, 1), "UINT2": (10, 2), "UINT4": (11, 4), "UINT3": (12, 3),
    "UINT6": (13, 6), "INT32": (14, 32), "UINT32": (15, 32),
}
BLOB_READERS = {"FLOAT16": "read_fp16_data", "FLOAT32": "read_float_data"}
FEATURE_DTYPES = {"FLOAT16": "FLOAT16", "FLOAT32": "FLOAT32", "INT32": "INT32", "INT8": "INT8"}


class Report:
    """Errors and warnings of one package, each with the place it was found at."""

    def __init__(self):
        self.errors, self.warnings = [], []

    def error(self, where, what):
        self.errors.append(f"{where}: {what}")

    def warn(self, where, what):
        self.warnings.append(f"{where}: {what}")


# ---- types in the protobuf ----


def dtype_name(code):
    try:
        return MIL.DataType.Name(code)
    except ValueError:
        return f"dtype {code}"


def dimensions(tensor_type):
    """The declared dimensions; None where unknown."""
    return [
        d.constant.size if d.WhichOneof("dimension") == "constant" else None for d in tensor_type.dimensions
    ]


def tensor_of(value_type):
    """The TensorType of a tensor or state type; None of any other."""
    kind = value_type.WhichOneof("type")
    if kind == "tensorType":
        return value_type.tensorType
    if kind == "stateType":
        return tensor_of(value_type.stateType.wrappedType)
    return None


def show(dtype, shape):
    return f"{dtype.lower()}[{', '.join('?' if d is None else str(d) for d in shape)}]"


def check_value_type(report, where, value_type):
    """Whether a declared type is well formed by itself."""
    kind = value_type.WhichOneof("type")
    if kind is None:
        report.error(where, "no type is declared")
    tensor = tensor_of(value_type)
    if tensor is None:
        return
    if tensor.rank != len(tensor.dimensions):
        report.error(where, f"rank {tensor.rank} with {len(tensor.dimensions)} dimensions")
    if tensor.dataType == 0 or dtype_name(tensor.dataType).startswith("dtype"):
        report.error(where, f"unknown {dtype_name(tensor.dataType)}")
    for index, dimension in enumerate(tensor.dimensions):
        which = dimension.WhichOneof("dimension")
        if which is None:
            report.error(where, f"dimension {index} is neither constant nor unknown")
        elif which == "unknown" and dimension.unknown.variadic:
            report.error(where, f"dimension {index} is variadic")
    if kind == "stateType" and any(d is None for d in dimensions(tensor)):
        report.error(where, "a state has an unknown dimension")


def inferred_type(var):
    """(dtype name, [size or sympy expression]) of a pymil variable; None for what is no tensor or scalar."""
    kind = var.sym_type
    if types.is_state(kind):
        kind = kind.wrapped_type()
    if types.is_tensor(kind):
        primitive, shape = kind.get_primitive(), kind.get_shape()
    elif types.is_list(kind) or types.is_dict(kind) or types.is_tuple(kind):
        return None
    else:
        primitive, shape = kind, ()
    code = types.BUILTIN_TO_PROTO_TYPES.get(primitive)
    return (dtype_name(code) if code is not None else str(primitive)), list(shape)


# ---- walking the protobuf ----


def operations_of(block):
    """Every op of a block and of the blocks nested in it."""
    for op in block.operations:
        yield op
        for inner in op.blocks:
            yield from operations_of(inner)


def values_of(op):
    """(parameter, Value) for every value written into an op."""
    for key, value in sorted(op.attributes.items()):
        yield key, value
    for key, argument in sorted(op.inputs.items()):
        for binding in argument.arguments:
            if binding.WhichOneof("binding") == "value":
                yield key, binding.value


def op_name(op):
    """What to call an op in a message: its first output, or its name, and its kind."""
    names = [output.name for output in op.outputs]
    if not names and "name" in op.attributes:
        names = list(op.attributes["name"].immediateValue.tensor.strings.values)
    return f"{names[0] if names else '?'} ({op.type})"


# ---- manifest ----


def check_manifest(report, package):
    """Returns the paths of the model file and of the folder that blob names are relative to."""
    path = package / "Manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        entries = manifest["itemInfoEntries"]
        root = entries[manifest["rootModelIdentifier"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        report.error("Manifest.json", f"unreadable: {type(error).__name__} {error}")
        return None
    if manifest.get("fileFormatVersion") != "1.0.0":
        report.error("Manifest.json", f"fileFormatVersion is {manifest.get('fileFormatVersion')!r}")
    data = package / "Data"
    covered = []
    for identifier, entry in entries.items():
        if sorted(entry) != ["author", "description", "name", "path"]:
            report.error("Manifest.json", f"item {identifier} has the keys {sorted(entry)}")
        item = data / entry.get("path", "")
        if not item.exists():
            report.error("Manifest.json", f"item {identifier}: {entry.get('path')} does not exist")
        covered.append(item)
    for file in sorted(p for p in package.rglob("*") if p.is_file() and p != path):
        if not any(item == file or item in file.parents for item in covered):
            report.warn("Manifest.json", f"{file.relative_to(package)} is in no item")

    # The library creates a manifest where it finds none, so it is asked only when there is one.
    try:
        if not ModelPackage.isValid(str(package)):
            report.error("Manifest.json", "libmodelpackage calls the package invalid")
        model = Path(ModelPackage(str(package)).getRootModel().path())
    except Exception as error:
        report.error("Manifest.json", f"libmodelpackage: {error}")
        model = data / root.get("path", "")
    if model.resolve() != (data / root.get("path", "")).resolve():
        report.error("Manifest.json", f"libmodelpackage takes {model} for the model")
    return model


# ---- weights ----


class Weights:
    """The weight files of a package: records read by hand, data by coremltools, each blob once."""

    def __init__(self, report, folder):
        self.report, self.folder = report, folder
        self.files, self.readers, self.data, self.ranges = {}, {}, {}, {}

    def path(self, name):
        return self.folder / name.removeprefix(WEIGHTS_PREFIX)

    def open(self, where, name):
        if name in self.files:
            return self.files[name]
        self.files[name] = None
        path = self.path(name)
        inside = name.startswith(WEIGHTS_PREFIX) and path.resolve().is_relative_to(self.folder.resolve())
        if not inside or not path.is_file():
            self.report.error(where, f"weight file {name} is not in the package")
            return None
        content = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)
        if content.size < 64:
            self.report.error(name, f"{content.size} bytes are no weight file")
            return None
        count, version = struct.unpack("<II", content[:8].tobytes())
        if version != 2:
            self.report.error(name, f"MILBlob version {version}, expected 2")
            return None
        if content[8:64].any():
            self.report.error(name, "the file header's reserved bytes are not zero")
        self.files[name] = content
        self.walk(name, content, count)
        return content

    def walk(self, name, content, count):
        """Follows the records from the first to the last: the header's count must be theirs."""
        at, seen = 64, 0
        while at + 64 <= content.size:
            sentinel, _, size, offset = struct.unpack("<IIQQ", content[at : at + 24].tobytes())
            if sentinel != 0xDEADBEEF or offset != at + 64:
                self.report.error(name, f"no record of a blob at {at}")
                return
            seen += 1
            at = (offset + size + 63) // 64 * 64
        if seen != count:
            self.report.error(name, f"the header counts {count} blobs, the file holds {seen}")

    def check(self, where, value):
        """Checks one blob value and reads it."""
        tensor = tensor_of(value.type)
        name, at = value.blobFileValue.fileName, value.blobFileValue.offset
        if tensor is None or any(d is None for d in dimensions(tensor)):
            return self.report.error(where, "a blob without a fixed tensor type")
        content = self.open(where, name)
        if content is None:
            return None
        dtype, shape = dtype_name(tensor.dataType), dimensions(tensor)
        place = f"{where}: blob at {at}"
        if dtype not in BLOB_DTYPES:
            return self.report.error(place, f"{dtype} can't be in a weight file")
        if at % 64 or at < 64 or at + 64 > content.size:
            return self.report.error(place, f"no record can be there (file of {content.size} bytes)")
        sentinel, code, size, offset, padding_bits = struct.unpack("<IIQQQ", content[at : at + 32].tobytes())
        if sentinel != 0xDEADBEEF:
            return self.report.error(place, "no record is there")
        expected_code, bits = BLOB_DTYPES[dtype]
        total_bits = int(np.prod(shape, dtype=np.int64)) * bits
        expected = (expected_code, (total_bits + 7) // 8, -total_bits % 8)
        if (code, size, padding_bits) != expected:
            self.report.error(
                place, f"{show(dtype, shape)} needs (dtype, bytes, padding bits) {expected}, the record has {(code, size, padding_bits)}"
            )
            return None
        if offset % 64 or offset + size > content.size:
            return self.report.error(place, f"data at {offset} + {size} is out of the file ({content.size} bytes)")
        for other_at, (start, end) in self.ranges.get(name, {}).items():
            if other_at != at and start < offset + size and at < end:
                self.report.error(place, f"overlaps the blob at {other_at}")
        self.ranges.setdefault(name, {})[at] = (at, offset + size)
        method = BLOB_READERS.get(dtype, f"read_{dtype.lower()}_data")
        try:
            data = getattr(self.reader(name), method)(at)
        except Exception as error:
            return self.report.error(place, f"libmilstoragepython: {error}")
        if np.asarray(data).size != int(np.prod(shape, dtype=np.int64)):
            self.report.error(place, f"libmilstoragepython reads {np.asarray(data).size} elements for {show(dtype, shape)}")
        return None

    def reader(self, name):
        if name not in self.readers:
            self.readers[name] = CachedReader(_BlobStorageReader(str(self.path(name))), self.data, name)
        return self.readers[name]


class CachedReader:
    """coremltools' blob reader that reads each blob once, however often a function is typed."""

    def __init__(self, reader, data, name):
        self._reader, self._data, self._name = reader, data, name

    def __getattr__(self, method):
        def read(offset):
            key = (self._name, method, offset)
            if key not in self._data:
                self._data[key] = getattr(self._reader, method)(offset)
            return self._data[key]

        return read


# ---- types ----


class Mismatch(Exception):
    """A declared type that inference contradicts."""


class Typing:
    """One pass of coremltools' type inference over a function, op by op."""

    def __init__(self, report, where, function, weights, lengths_run=False):
        self.report, self.where, self.function, self.weights = report, where, function, weights
        self.lengths_run = lengths_run
        self.unproven = 0
        self.input_symbols = None

    def run(self):
        """The pymil function, or None after reporting why not."""
        # A context of its own, so that a function can't lean on another's values, as a shared one would allow.
        context = milproto.TranscriptionContext(str(self.weights.folder / "weights"))
        for name in self.weights.files:
            # The loader drops the folder of a blob's file name and looks in the weights folder.
            key = str(self.weights.folder / "weights" / name.split("/")[-1])
            context.blob_reader_from_filename[key] = self.weights.reader(name)
        original = milproto._load_operation
        current = None

        def checked(context, op):
            nonlocal current
            current = op_name(op)
            if self.input_symbols is None:
                self.remember_inputs(context)
            original(context, op)
            self.check_op(context, op)

        milproto._load_operation = checked
        try:
            target = AvailableTarget(SPECIFICATION_OF_OPSET[self.function.opset])
            return milproto._load_function(context, self.function, target)
        except Exception as error:
            reason = str(error) or type(error).__name__
            if not isinstance(error, Mismatch):
                reason = f"{type(error).__name__}: {reason}"
                if VERBOSE:
                    traceback.print_exc()
            self.report.error(f"{self.where}{f', {current}' if current else ''}", reason)
            return None
        finally:
            milproto._load_operation = original

    def remember_inputs(self, context):
        self.input_symbols = {}
        for value in self.function.inputs:
            for size in inferred_type(context.name_to_var[value.name])[1]:
                if is_symbolic(size):
                    self.input_symbols[size] = value.name

    def check_op(self, context, op):
        for output in op.outputs:
            var = context.name_to_var[output.name]
            declared, inferred = tensor_of(output.type), inferred_type(var)
            if declared is None or inferred is None:
                continue
            shape = dimensions(declared)
            dtype = dtype_name(declared.dataType)
            found = show(dtype, shape)
            known = [None if is_symbolic(d) else int(d) for d in inferred[1]]
            # A rank-0 result is a scalar to coremltools; the format has no other way to write it.
            if dtype != inferred[0] or len(shape) != len(known):
                raise Mismatch(f"declared {found}, inferred {show(inferred[0], known)}")
            for index, (size, expected) in enumerate(zip(shape, known)):
                if size is not None and expected is not None and size != expected:
                    raise Mismatch(f"declared {found}, inferred {show(inferred[0], known)}")
                if size is not None and expected is None:
                    free = inferred[1][index].free_symbols
                    if free and free <= set(self.input_symbols):
                        raise Mismatch(f"declared {found}, but dimension {index} follows the inputs: {inferred[1][index]}")
                    self.unproven += 1
                if size is None and expected is not None and not self.lengths_run:
                    self.report.warn(
                        f"{self.where}, {op_name(op)}", f"declared {found}, though dimension {index} is always {expected}"
                    )
        if op.type in ("const", "write_state") or not op.outputs:
            return
        defaults = self.missing_parameters(context.name_to_var[op.outputs[0].name].op, op)
        if defaults:
            raise Mismatch(f"parameters {', '.join(defaults)} are left out; Core ML has no defaults for them")

    @staticmethod
    def missing_parameters(pymil_op, op):
        """Parameters that coremltools filled in with a default."""
        if pymil_op is None or pymil_op.op_type != op.type:
            return []
        written = set(op.inputs) | set(op.attributes)
        return [
            name
            for name, value in pymil_op.inputs.items()
            if name not in written and not name.startswith("_") and value is not None
        ]


def check_static(report, where, function, weights, specification_version):
    """What needs no inference: names, attributes, values and blobs."""
    block = function.block_specializations[function.opset]
    if sorted(function.block_specializations) != [function.opset]:
        report.error(where, f"blocks for {sorted(function.block_specializations)}, opset {function.opset}")
    if SPECIFICATION_OF_OPSET[function.opset] > specification_version:
        report.error(where, f"opset {function.opset} needs specification version {SPECIFICATION_OF_OPSET[function.opset]}")
    elif SPECIFICATION_OF_OPSET[function.opset] < specification_version:
        report.warn(where, f"opset {function.opset} under specification version {specification_version}")
    names = Counter()
    for value in function.inputs:
        names[value.name] += 1
        check_value_type(report, f"{where}, input {value.name}", value.type)
    for op in operations_of(block):
        place = f"{where}, {op_name(op)}"
        if "name" not in op.attributes:
            report.error(place, "the op has no name attribute")
        if op.type == "const":
            if op.inputs:
                report.error(place, "a const has inputs")
            if "val" not in op.attributes:
                report.error(place, "a const has no val")
            elif len(op.outputs) == 1 and op.attributes["val"].type != op.outputs[0].type:
                report.error(place, "the type of val is not the declared output type")
        for output in op.outputs:
            names[output.name] += 1
            if not IDENTIFIER.fullmatch(output.name):
                report.error(place, f"{output.name!r} is no valid name")
            check_value_type(report, place, output.type)
        for key, value in values_of(op):
            which = value.WhichOneof("value")
            if which is None:
                report.error(f"{place}, {key}", "a value without content")
            elif which == "blobFileValue":
                weights.check(f"{place}, {key}", value)
    for name, count in names.items():
        if count > 1:
            report.error(where, f"{name} is defined {count} times")
    for name, count in Counter(block.outputs).items():
        if count > 1:
            report.error(where, f"{name} is returned {count} times")
    for name in block.outputs:
        if any(name == value.name for value in function.inputs):
            report.error(where, f"{name} is both an input and an output")


# ---- description ----


def array_dtype(array):
    try:
        return type(array).ArrayDataType.Name(array.dataType)
    except ValueError:
        return f"dtype {array.dataType}"


def check_array(report, where, array, value_type, is_output):
    """One multi-array feature against the tensor it stands for."""
    tensor = tensor_of(value_type)
    if tensor is None:
        return report.error(where, "the function has no tensor there")
    dtype, declared = dtype_name(tensor.dataType), dimensions(tensor)
    if FEATURE_DTYPES.get(dtype) != array_dtype(array):
        report.error(where, f"the feature is {array_dtype(array)}, the function's value {dtype}")
    shape = list(array.shape)
    flexibility = array.WhichOneof("ShapeFlexibility")
    if not declared:
        if shape not in ([], [1]) or flexibility:
            report.error(where, f"shape {shape} for a scalar")
        return None
    if is_output and not shape and flexibility is None:
        if None not in declared:
            report.warn(where, f"no shape, though the value is always {show(dtype, declared)}")
        return None
    if len(shape) != len(declared) or any(d is not None and d != s for s, d in zip(shape, declared)):
        return report.error(where, f"shape {shape} for {show(dtype, declared)}")
    if any(s < 1 for s in shape):
        report.error(where, f"shape {shape} is empty")
    if None not in declared:
        if flexibility is not None:
            report.error(where, f"{flexibility} for a value of fixed shape")
    elif flexibility is None:
        report.error(where, f"fixed shape {shape} for {show(dtype, declared)}")
    elif flexibility == "shapeRange":
        ranges = [(r.lowerBound, r.upperBound) for r in array.shapeRange.sizeRanges]
        if len(ranges) != len(declared):
            return report.error(where, f"{len(ranges)} size ranges for rank {len(declared)}")
        for index, ((lower, upper), size, default) in enumerate(zip(ranges, declared, shape)):
            if size is not None and (lower, upper) != (size, size):
                report.error(where, f"dimension {index} is {size}, its range {lower}..{upper}")
            if lower < 1 or (upper != -1 and upper < lower):
                report.error(where, f"dimension {index} has the range {lower}..{upper}")
            if default < lower or (upper != -1 and default > upper):
                report.error(where, f"dimension {index}: default {default} is out of {lower}..{upper}")
    else:
        listed = [list(s.shape) for s in array.enumeratedShapes.shapes]
        if not listed:
            report.error(where, "no shape is enumerated")
        for other in listed:
            if len(other) != len(declared) or any(d is not None and d != s for s, d in zip(other, declared)):
                report.error(where, f"enumerated shape {other} for {show(dtype, declared)}")
        if listed and shape not in listed:
            report.error(where, f"default {shape} is not among the enumerated shapes")
    return None


def allows(feature, declared, length):
    """Whether a feature's description admits this length in each unknown dimension."""
    if feature is None or feature.type.WhichOneof("Type") != "multiArrayType":
        return True
    array = feature.type.multiArrayType
    flexibility = array.WhichOneof("ShapeFlexibility")
    if flexibility == "shapeRange":
        ranges = array.shapeRange.sizeRanges
        return all(
            d is not None or (r.lowerBound <= length and (r.upperBound == -1 or length <= r.upperBound))
            for r, d in zip(ranges, declared)
        )
    if flexibility == "enumeratedShapes":
        wanted = [length if d is None else d for d in declared]
        return wanted in [list(s.shape) for s in array.enumeratedShapes.shapes]
    return None not in declared


def allowed_lengths(function, described):
    """The smallest and the largest length that every flexible input of a function allows."""
    features = {feature.name: feature for feature in described.input} if described else {}
    shapes = [(features.get(v.name), dimensions(tensor_of(v.type))) for v in function.inputs if tensor_of(v.type)]
    flexible = [(feature, shape) for feature, shape in shapes if None in shape]
    candidates = (n for n in range(1, MAX_LENGTH + 1) if all(allows(feature, shape, n) for feature, shape in flexible))
    lengths = list(candidates)
    return [] if not lengths else sorted({lengths[0], lengths[-1]})


def check_features(report, where, description, function):
    """A function's description (the model's own, where there is only `main`) against its signature."""
    values = {value.name: value.type for value in function.inputs}
    states = {name for name, kind in values.items() if kind.WhichOneof("type") == "stateType"}
    block = function.block_specializations[function.opset]
    produced = {output.name: output.type for op in operations_of(block) for output in op.outputs}
    for role, features, names in (
        ("input", description.input, [name for name in values if name not in states]),
        ("state", description.state, sorted(states)),
        ("output", description.output, list(block.outputs)),
    ):
        described = [feature.name for feature in features]
        if sorted(described) != sorted(names):
            report.error(where, f"{role}s: described {sorted(described)}, in the function {sorted(names)}")
        elif role != "state" and described != names:
            report.warn(where, f"{role}s are described in another order: {described}, in the function {names}")
        for feature in features:
            place = f"{where}, {role} {feature.name}"
            value_type = produced.get(feature.name) if role == "output" else values.get(feature.name)
            kind = feature.type.WhichOneof("Type")
            if value_type is None:
                continue
            if (kind == "stateType") != (role == "state"):
                report.error(place, f"described as {kind}")
            elif kind == "stateType":
                if array_dtype(feature.type.stateType.arrayType) != "FLOAT16":
                    report.error(place, "Core ML holds states in FLOAT16 only")
                check_array(report, place, feature.type.stateType.arrayType, value_type, False)
            elif kind == "multiArrayType":
                check_array(report, place, feature.type.multiArrayType, value_type, role == "output")
            elif kind is None:
                report.error(place, "the feature has no type")


def check_description(report, model):
    """Returns {function name: its description}."""
    description, functions = model.description, model.mlProgram.functions
    if description.functions:
        names = [f.name for f in description.functions]
        if model.specificationVersion < 9:
            report.error("description", f"several functions need specification version 9, found {model.specificationVersion}")
        if description.input or description.output or description.state:
            report.error("description", "features of the model beside those of its functions")
        if description.defaultFunctionName not in names:
            report.error("description", f"defaultFunctionName {description.defaultFunctionName!r} is not among {names}")
        if sorted(names) != sorted(functions):
            report.error("description", f"describes {sorted(names)}, the program has {sorted(functions)}")
        described = {f.name: f for f in description.functions}
    else:
        if sorted(functions) != ["main"]:
            report.error("description", f"describes `main` only, the program has {sorted(functions)}")
        if description.defaultFunctionName:
            report.error("description", f"defaultFunctionName {description.defaultFunctionName!r} without functions")
        described = {"main": description}
    for name, function in sorted(functions.items()):
        if name in described and function.opset in function.block_specializations:
            check_features(report, name, described[name], function)
    stateful = any(v.type.WhichOneof("type") == "stateType" for f in functions.values() for v in f.inputs)
    if stateful and model.specificationVersion < 9:
        report.error("description", f"a state needs specification version 9, found {model.specificationVersion}")
    return described


# ---- lengths ----


def at_length(function, length):
    """The function with every unknown dimension of its inputs set to a length."""
    fixed = MIL.Function()
    fixed.CopyFrom(function)
    for value in fixed.inputs:
        tensor = tensor_of(value.type)
        for dimension in tensor.dimensions if tensor else []:
            if dimension.WhichOneof("dimension") == "unknown":
                dimension.constant.size = length
    return fixed


def check_length(report, name, function, described, weights, length, promised):
    """Types a function at one length; returns its outputs' shapes."""
    where = f"{name} at length {length}"
    features = {feature.name: feature for feature in described.input} if described else {}
    for value in function.inputs:
        tensor = tensor_of(value.type)
        if tensor and not allows(features.get(value.name), dimensions(tensor), length):
            report.error(where, f"the description of {value.name} does not allow this length")
    loaded = Typing(report, where, at_length(function, length), weights, lengths_run=True).run()
    if loaded is None:
        return None
    shapes = {}
    for var in loaded.outputs:
        found = inferred_type(var)
        shape = [None if is_symbolic(d) else int(d) for d in found[1]] if found else None
        shapes[var.name] = shape
        if shape is None:
            continue
        for index, size in enumerate(promised.get(var.name, [])):
            expected = length if size is None else size
            if hasattr(size, "subs"):
                expected = int(size.subs({symbol: length for symbol in size.free_symbols}))
            if shape[index] != expected:
                report.error(where, f"output {var.name} has the shape {shape}, dimension {index} should be {expected}")
    return shapes


def promises(typing, loaded):
    """Outputs' dimensions: a size, an expression over the inputs' lengths, or None where inference lost track."""
    result = {}
    for var in loaded.outputs:
        found = inferred_type(var)
        if found:
            result[var.name] = [
                int(d) if not is_symbolic(d) else (d if d.free_symbols <= set(typing.input_symbols) else None)
                for d in found[1]
            ]
    return result


# ---- the whole ----


def check_package(package, lengths):
    report = Report()
    result = {"package": str(package), "specification_version": None, "functions": [], "blobs": 0}
    try:
        inspect_package(report, package, lengths, result)
    except Exception as error:
        if VERBOSE:
            traceback.print_exc()
        report.error("package", f"{type(error).__name__}: {error}")
    return result | {"errors": report.errors, "warnings": report.warnings}


def inspect_package(report, package, lengths, result):
    path = check_manifest(report, package)
    if path is None:
        return
    model = proto.Model_pb2.Model()
    model.ParseFromString(path.read_bytes())
    result["specification_version"] = model.specificationVersion
    if model.WhichOneof("Type") != "mlProgram":
        return report.error("model", f"is a {model.WhichOneof('Type')}, no mlProgram")
    program = model.mlProgram
    if program.version != 1:
        report.error("program", f"version {program.version}, expected 1")
    if program.docString:
        report.error("program", "has a docString, which coremltools refuses")
    unknown = sorted(set(program.attributes) - {"buildInfo"})
    if unknown:
        report.error("program", f"unknown attributes {unknown}")
    if model.specificationVersion not in _OPSET:
        report.error("model", f"unknown specification version {model.specificationVersion}")
    weights = Weights(report, path.parent)
    described = check_description(report, model)
    for name, function in sorted(program.functions.items()):
        before = len(report.errors)
        entry = {"name": name, "opset": function.opset, "ops": {}, "ok": False}
        result["functions"].append(entry)
        if not IDENTIFIER.fullmatch(name):
            report.error("program", f"function {name!r} has no valid name")
        if function.opset not in function.block_specializations or function.opset not in SPECIFICATION_OF_OPSET:
            report.error(name, f"opset {function.opset!r}, blocks {sorted(function.block_specializations)}")
            continue
        block = function.block_specializations[function.opset]
        entry["ops"] = dict(sorted(Counter(op.type for op in operations_of(block)).items()))
        check_static(report, name, function, weights, model.specificationVersion)
        typing = Typing(report, name, function, weights)
        loaded = typing.run()
        entry["unproven"] = typing.unproven
        flexible = any(None in dimensions(tensor_of(v.type)) for v in function.inputs if tensor_of(v.type))
        if loaded is not None and lengths and flexible:
            promised = promises(typing, loaded)
            tried = allowed_lengths(function, described.get(name)) if lengths == ENDS else lengths
            entry["lengths"] = {
                str(length): check_length(report, name, function, described.get(name), weights, length, promised)
                for length in tried
            }
            if not tried:
                report.error(name, f"no length up to {MAX_LENGTH} is allowed for every input")
        # What is wrong with the description of this function counts against it, too.
        entry["ok"] = len(report.errors) == before and not any(
            error.startswith((f"{name}:", f"{name},", f"{name} ")) for error in report.errors
        )
    result["blobs"] = sum(len(blobs) for blobs in weights.ranges.values())


def packages_of(path):
    if path.suffix == ".mlpackage" or not path.is_dir():
        return [path]
    found = sorted(path.glob("*.mlpackage"))
    return found or [path]


def main():
    global VERBOSE
    parser = argparse.ArgumentParser(description="Judges .mlpackage folders with coremltools.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PACKAGE_OR_FOLDER")
    parser.add_argument("--lengths", default="", help="lengths to type flexible functions at, or `ends`")
    parser.add_argument("--strict", action="store_true", help="warnings fail, too")
    parser.add_argument("-v", "--verbose", action="store_true", help="show coremltools' tracebacks on stderr")
    arguments = parser.parse_args()
    VERBOSE = arguments.verbose
    try:
        lengths = ENDS if arguments.lengths == ENDS else [int(p) for p in arguments.lengths.split(",") if p.strip()]
    except ValueError:
        parser.error(f"--lengths {arguments.lengths}: expected numbers")
    failed = False
    for path in arguments.paths:
        for package in packages_of(path):
            with contextlib.redirect_stdout(sys.stderr):
                result = check_package(package, lengths)
            print(json.dumps(result, ensure_ascii=False), flush=True)
            failed |= bool(result["errors"] or (arguments.strict and result["warnings"]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
