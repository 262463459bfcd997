"""What compressed weights stand for: each package of a folder has one, in the function `main`, and its numbers are written
beside the package, in f32, as coremltools expands them (.coremltools) and as tests/reader does (.reader)."""

import sys
from pathlib import Path

import numpy as np
from coremltools.converters.mil.frontend.milproto.load import load
from coremltools.proto import Model_pb2

sys.path.insert(0, str(Path(__file__).parent.parent / "reader"))
from mil import Package

for package in sorted(Path(sys.argv[1]).glob("*.mlpackage")):
    data = package / "Data/com.apple.CoreML"
    model = Model_pb2.Model()
    model.ParseFromString((data / "model.mlmodel").read_bytes())
    program = load(model, model.specificationVersion, str(data / "weights"))
    [op] = [op for op in program.functions["main"].operations if op.op_type.startswith("constexpr_")]
    read = Package(package).functions["main"].constants[op.outputs[0].name]
    for kind, values in (("coremltools", op.materialized_val_inference()), ("reader", read)):
        package.with_suffix(f".{kind}").write_bytes(np.ascontiguousarray(values, np.float32).tobytes())
