"""The judge judged: sound packages made by coremltools pass, and each of many kinds of damage is rejected.

    python tests/oracle/test_check_package.py
"""

import json
import shutil
import struct
import tempfile
import unittest
from pathlib import Path

import check_package as judge

import coremltools as ct
import numpy as np
from coremltools import proto
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol, types

MIL = proto.MIL_pb2
TARGET = ct.target.iOS18


def weight(*shape):
    return (np.arange(np.prod(shape)) * 7 % 17 / 16 - 0.5).reshape(shape).astype(np.float16)


def flexible_program():
    """Linear layers over a sequence of unknown length."""

    @mb.program(input_specs=[mb.TensorSpec((1, get_new_symbol(), 8), types.fp16)], opset_version=TARGET)
    def program(x):
        y = mb.linear(x=x, weight=weight(8, 8), bias=weight(8), name="projected")
        y = mb.reduce_sum(x=y, axes=[2], keep_dims=False, name="summed")
        return mb.softmax(x=y, axis=-1, name="y")

    inputs = [ct.TensorType("x", shape=(1, ct.RangeDim(1, 4), 8), dtype=np.float16)]
    return ct.convert(program, inputs=inputs, minimum_deployment_target=TARGET)


def baked_program():
    """A graph that promises any length and holds for four only."""

    @mb.program(input_specs=[mb.TensorSpec((1, get_new_symbol(), 8), types.fp16)], opset_version=TARGET)
    def program(x):
        y = mb.reshape(x=x, shape=[4, 8], name="flat")
        return mb.relu(x=y, name="y")

    inputs = [ct.TensorType("x", shape=(1, ct.RangeDim(1, 4), 8), dtype=np.float16)]
    return ct.convert(program, inputs=inputs, minimum_deployment_target=TARGET)


def stateful_program():
    """A state that gathers its inputs, and int8 weights."""

    specs = [mb.TensorSpec((1, 8), types.fp16), mb.StateTensorSpec((1, 8), types.fp16)]

    @mb.program(input_specs=specs, opset_version=TARGET)
    def program(x, memory):
        w = mb.constexpr_blockwise_shift_scale(
            data=(np.arange(64).reshape(8, 8) - 32).astype(np.int8), scale=weight(8, 1), name="w"
        )
        y = mb.add(x=mb.linear(x=x, weight=w, bias=weight(8)), y=mb.read_state(input=memory))
        y = mb.coreml_update_state(state=memory, value=y)
        return mb.mul(x=y, y=np.float16(2), name="y")

    return ct.convert(program, minimum_deployment_target=TARGET)


ROOM = Path(tempfile.mkdtemp())
MAKERS = {"flexible": flexible_program, "baked": baked_program, "stateful": stateful_program}


def setUpModule():
    for name, maker in MAKERS.items():
        maker().save(str(ROOM / f"{name}.mlpackage"))


def tearDownModule():
    shutil.rmtree(ROOM)


class Copy:
    """A package to damage."""

    def __init__(self, name):
        self.path = Path(tempfile.mkdtemp(dir=ROOM)) / "copy.mlpackage"
        shutil.copytree(ROOM / f"{name}.mlpackage", self.path)
        self.model_path = self.path / "Data/com.apple.CoreML/model.mlmodel"
        self.weights_path = self.model_path.parent / "weights/weight.bin"
        self.model = proto.Model_pb2.Model.FromString(self.model_path.read_bytes())

    @property
    def function(self):
        return self.model.mlProgram.functions["main"]

    @property
    def block(self):
        return self.function.block_specializations[self.function.opset]

    def op(self, name):
        return next(op for op in self.block.operations if name in [o.name for o in op.outputs] or name == op.type)

    def blob_value(self, shape):
        """The blob-held value of this shape."""
        for op in judge.operations_of(self.block):
            for _, value in judge.values_of(op):
                if value.WhichOneof("value") == "blobFileValue" and judge.dimensions(value.type.tensorType) == shape:
                    return value
        raise AssertionError(shape)

    def patch_weights(self, change):
        content = bytearray(self.weights_path.read_bytes())
        change(content)
        self.weights_path.write_bytes(content)

    def judge(self, lengths=()):
        self.model_path.write_bytes(self.model.SerializeToString())
        return judge.check_package(self.path, lengths)


class Sound(unittest.TestCase):
    def test_coremltools_packages_pass(self):
        for name in MAKERS:
            result = Copy(name).judge()
            self.assertEqual((result["errors"], result["warnings"]), ([], []), name)
            self.assertTrue(all(f["ok"] and f["unproven"] == 0 for f in result["functions"]))

    def test_every_length_is_typed(self):
        result = Copy("flexible").judge([1, 2, 3, 4])
        self.assertEqual(result["errors"], [])
        self.assertEqual(result["functions"][0]["lengths"], {str(t): {"y": [1, t]} for t in (1, 2, 3, 4)})

    def test_the_census_counts_ops(self):
        result = Copy("stateful").judge()
        ops = result["functions"][0]["ops"]
        self.assertEqual((ops["write_state"], ops["read_state"], ops["linear"]), (1, 2, 1))
        self.assertGreaterEqual(result["blobs"], 1)


class Damaged(unittest.TestCase):
    def rejected(self, copy, word, lengths=()):
        result = copy.judge(lengths)
        self.assertTrue(any(word in error for error in result["errors"]), (word, result["errors"]))
        json.dumps(result)

    # -- types --

    def test_wrong_declared_dtype(self):
        copy = Copy("flexible")
        copy.op("projected").outputs[0].type.tensorType.dataType = MIL.FLOAT32
        self.rejected(copy, "projected")

    def test_wrong_declared_shape(self):
        copy = Copy("flexible")
        copy.op("projected").outputs[0].type.tensorType.dimensions[2].constant.size = 9
        self.rejected(copy, "projected")

    def test_wrong_declared_shape_of_a_constexpr(self):
        copy = Copy("stateful")
        copy.op("w").outputs[0].type.tensorType.dimensions[0].constant.size = 4
        self.rejected(copy, "w (constexpr_blockwise_shift_scale): declared fp16[4, 8]".replace("fp16", "float16"))

    def test_wrong_declared_rank(self):
        copy = Copy("flexible")
        tensor = copy.op("summed").outputs[0].type.tensorType
        tensor.rank = 3
        tensor.dimensions.add().constant.size = 1
        self.rejected(copy, "summed")

    def test_constant_where_the_length_is(self):
        copy = Copy("flexible")
        copy.op("projected").outputs[0].type.tensorType.dimensions[1].constant.size = 4
        self.rejected(copy, "follows the inputs")

    def test_a_graph_made_for_one_length(self):
        self.rejected(Copy("baked"), "main at length 3", [1, 2, 3, 4])

    def test_a_length_that_the_description_forbids(self):
        self.rejected(Copy("flexible"), "does not allow this length", [5])

    def test_opset_without_the_op(self):
        copy = Copy("stateful")
        block = MIL.Block.FromString(copy.block.SerializeToString())
        copy.function.opset = "CoreML7"
        del copy.function.block_specializations["CoreML8"]
        copy.function.block_specializations["CoreML7"].CopyFrom(block)
        copy.model.specificationVersion = 8
        self.rejected(copy, "main")

    def test_opset_newer_than_the_specification(self):
        copy = Copy("flexible")
        copy.model.specificationVersion = 8
        self.rejected(copy, "opset CoreML8 needs specification version 9")

    # -- ops --

    def test_missing_parameter(self):
        copy = Copy("flexible")
        del copy.op("summed").inputs["keep_dims"]
        self.rejected(copy, "keep_dims")

    def test_unknown_parameter(self):
        copy = Copy("flexible")
        copy.op("y").inputs["temperature"].CopyFrom(copy.op("y").inputs["axis"])
        self.rejected(copy, "temperature")

    def test_missing_name(self):
        copy = Copy("flexible")
        del copy.op("projected").attributes["name"]
        self.rejected(copy, "no name attribute")

    def test_dangling_input(self):
        copy = Copy("flexible")
        copy.op("projected").inputs["x"].arguments[0].name = "nowhere"
        self.rejected(copy, "nowhere")

    def test_use_before_definition(self):
        copy = Copy("flexible")
        ops = list(copy.block.operations)
        del copy.block.operations[:]
        copy.block.operations.extend(reversed(ops))
        self.rejected(copy, "not found")

    def test_a_name_defined_twice(self):
        copy = Copy("flexible")
        copy.op("summed").outputs[0].name = "projected"
        self.rejected(copy, "defined 2 times")

    def test_a_name_with_a_dot(self):
        copy = Copy("flexible")
        copy.op("projected").outputs[0].name = "layers.0"
        copy.op("summed").inputs["x"].arguments[0].name = "layers.0"
        self.rejected(copy, "no valid name")

    def test_val_of_another_type(self):
        copy = Copy("flexible")
        copy.op("const").outputs[0].type.tensorType.dataType = MIL.INT8
        self.rejected(copy, "the type of val")

    def test_wrong_state_value(self):
        copy = Copy("stateful")
        for value in copy.function.inputs:
            if value.type.WhichOneof("type") == "stateType":
                value.type.stateType.wrappedType.tensorType.dimensions[1].constant.size = 4
        self.rejected(copy, "main")

    # -- weights --

    def test_blob_offset_off_by_64(self):
        copy = Copy("flexible")
        copy.blob_value([8, 8]).blobFileValue.offset += 64
        self.rejected(copy, "no record is there")

    def test_blob_offset_off_by_one(self):
        copy = Copy("flexible")
        copy.blob_value([8, 8]).blobFileValue.offset += 1
        self.rejected(copy, "no record can be there")

    def test_blob_offset_far_away(self):
        copy = Copy("flexible")
        copy.blob_value([8, 8]).blobFileValue.offset = 1 << 40
        self.rejected(copy, "no record can be there")

    def test_blob_of_another_dtype(self):
        copy = Copy("stateful")
        at = copy.blob_value([8, 8]).blobFileValue.offset
        copy.patch_weights(lambda content: content.__setitem__(slice(at + 4, at + 8), struct.pack("<I", 3)))
        self.rejected(copy, "the record has")

    def test_blob_of_another_size(self):
        copy = Copy("flexible")
        copy.blob_value([8, 8]).type.tensorType.dimensions[0].constant.size = 9
        self.rejected(copy, "the record has")

    def test_truncated_weights(self):
        copy = Copy("flexible")
        copy.weights_path.write_bytes(copy.weights_path.read_bytes()[:150])
        self.rejected(copy, "is out of the file")

    def test_missing_weights(self):
        copy = Copy("flexible")
        copy.weights_path.unlink()
        self.rejected(copy, "is not in the package")

    def test_weights_of_another_package(self):
        copy = Copy("flexible")
        copy.blob_value([8, 8]).blobFileValue.fileName = "@model_path/../../../../flexible.mlpackage/Data/com.apple.CoreML/weights/weight.bin"
        self.rejected(copy, "is not in the package")

    def test_wrong_count_of_blobs(self):
        copy = Copy("flexible")
        copy.patch_weights(lambda content: content.__setitem__(slice(0, 4), struct.pack("<I", 9)))
        self.rejected(copy, "the header counts 9 blobs")

    def test_wrong_version_of_the_file(self):
        copy = Copy("flexible")
        copy.patch_weights(lambda content: content.__setitem__(slice(4, 8), struct.pack("<I", 1)))
        self.rejected(copy, "MILBlob version 1")

    def test_short_immediate_value(self):
        copy = Copy("flexible")
        axes = next(op for op in copy.block.operations if op.outputs[0].name == copy.op("summed").inputs["axes"].arguments[0].name)
        del axes.attributes["val"].immediateValue.tensor.ints.values[:]
        self.rejected(copy, "main")

    # -- description --

    def feature(self, copy, role="input"):
        return getattr(copy.model.description, role)[0].type

    def test_feature_of_another_dtype(self):
        copy = Copy("flexible")
        self.feature(copy).multiArrayType.dataType = proto.FeatureTypes_pb2.ArrayFeatureType.FLOAT32
        self.rejected(copy, "the feature is FLOAT32")

    def test_feature_of_another_shape(self):
        copy = Copy("stateful")
        self.feature(copy).multiArrayType.shape[1] = 9
        self.rejected(copy, "shape [1, 9]")

    def test_range_of_a_fixed_dimension(self):
        copy = Copy("flexible")
        self.feature(copy).multiArrayType.shapeRange.sizeRanges[2].upperBound = 16
        self.rejected(copy, "dimension 2 is 8")

    def test_default_outside_the_range(self):
        copy = Copy("flexible")
        self.feature(copy).multiArrayType.shape[1] = 5
        self.rejected(copy, "is out of 1..4")

    def test_missing_range(self):
        copy = Copy("flexible")
        self.feature(copy).multiArrayType.ClearField("shapeRange")
        self.rejected(copy, "fixed shape")

    def test_renamed_output(self):
        copy = Copy("flexible")
        copy.model.description.output[0].name = "z"
        self.rejected(copy, "outputs: described ['z']")

    def test_state_among_the_inputs(self):
        copy = Copy("stateful")
        copy.model.description.input.extend(copy.model.description.state)
        del copy.model.description.state[:]
        self.rejected(copy, "described as stateType")

    def test_function_without_description(self):
        copy = Copy("flexible")
        copy.model.mlProgram.functions["other"].CopyFrom(copy.function)
        self.rejected(copy, "the program has ['main', 'other']")

    def test_a_function_that_leans_on_another(self):
        copy = Copy("flexible")
        copy.model.mlProgram.functions["other"].CopyFrom(copy.function)
        other = copy.model.mlProgram.functions["other"]
        block = other.block_specializations[other.opset]
        del block.operations[:-1]
        self.rejected(copy, "other")

    # -- package --

    def test_manifest_without_its_root(self):
        copy = Copy("flexible")
        manifest = json.loads((copy.path / "Manifest.json").read_text())
        manifest["rootModelIdentifier"] = "nobody"
        (copy.path / "Manifest.json").write_text(json.dumps(manifest))
        self.rejected(copy, "Manifest.json")

    def test_manifest_with_a_missing_file(self):
        copy = Copy("flexible")
        manifest = json.loads((copy.path / "Manifest.json").read_text())
        for entry in manifest["itemInfoEntries"].values():
            entry["path"] = entry["path"].replace("weights", "heights")
        (copy.path / "Manifest.json").write_text(json.dumps(manifest))
        self.rejected(copy, "does not exist")

    def test_no_package_at_all(self):
        result = judge.check_package(ROOM / "nothing.mlpackage", ())
        self.assertTrue(result["errors"])

    def test_a_model_that_is_no_protobuf(self):
        copy = Copy("flexible")
        copy.model_path.write_bytes(b"\xff" * 100)
        self.assertTrue(judge.check_package(copy.path, ())["errors"])


if __name__ == "__main__":
    unittest.main()
