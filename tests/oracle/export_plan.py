"""Runs tools/export_plan.py on a double of coremltools' MLComputePlan, for the packages that are given; prints the file.

    export_plan.py [--cpu OPERATOR] [--none OPERATOR] [--compiled X.mlmodelc] X.mlpackage...

The structure of the plan is made from the packages' programs with coremltools' own classes. Every compute op prefers the
Neural Engine, but those of --cpu, and those of --none, for which the plan names no device. --compiled names the folder
that stands for the compiled package.
"""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import coremltools as ct  # noqa: E402
import export_plan  # noqa: E402
from coremltools.models import compute_plan as cp  # noqa: E402


class MLNeuralEngineComputeDevice:
    pass


class MLCPUComputeDevice:
    pass


class Double:
    def __init__(self, program, cpu, none):
        functions = {name: self.function(function) for name, function in program.functions.items()}
        program = cp.MLModelStructureProgram(functions=functions)
        self.model_structure = cp.MLModelStructure(neuralnetwork=None, program=program, pipeline=None)
        self.cpu, self.none = cpu, none

    def function(self, function):
        block = function.block_specializations[function.opset]
        return cp.MLModelStructureProgramFunction(inputs=[], block=self.block(block, function.opset.lower()))

    def block(self, block, opset):
        operations = [self.operation(op, opset) for op in block.operations]
        return cp.MLModelStructureProgramBlock(inputs=[], operations=operations, output_names=list(block.outputs))

    def operation(self, op, opset):
        outputs = [cp.MLModelStructureProgramNamedValueType(name=output.name, type=None) for output in op.outputs]
        name = op.type if op.type == "const" else f"{opset}.{op.type}"
        blocks = [self.block(inner, opset) for inner in op.blocks]
        return cp.MLModelStructureProgramOperation(
            inputs={}, operator_name=name, outputs=outputs, blocks=blocks, __proxy__=None
        )

    def is_idle(self, op):
        name = op.operator_name.split(".")[-1]
        return name == "const" or name == "read_state" or name.startswith("constexpr_") or name == self.none

    def get_compute_device_usage_for_mlprogram_operation(self, op):
        if self.is_idle(op):
            return None
        on_cpu = op.operator_name.split(".")[-1] == self.cpu
        device = MLCPUComputeDevice() if on_cpu else MLNeuralEngineComputeDevice()
        return cp.MLComputePlanDeviceUsage(preferred_compute_device=device, supported_compute_devices=[device])

    def get_estimated_cost_for_mlprogram_operation(self, op):
        return None if self.is_idle(op) else cp.MLComputePlanCost(weight=0.01)


def main(arguments):
    options = {"--cpu": None, "--none": None, "--compiled": None}
    while arguments[:1] and arguments[0] in options:
        options[arguments[0]], arguments = arguments[1], arguments[2:]
    machine = {
        "model": "Mac16,8", "chip": "Apple M4 Pro", "os_version": "15.6", "os_build": "24G84", "neural_engine_cores": 16,
    }
    models = []
    for package in map(Path, arguments):
        program = ct.utils.load_spec(str(package)).mlProgram
        plan = Double(program, options["--cpu"], options["--none"])
        if options["--compiled"]:
            models.append((Path(options["--compiled"]), export_plan.plans_of_default(plan)))
        else:
            models.append((package, [export_plan.function_plan(plan, name) for name in sorted(program.functions)]))
    print(json.dumps(export_plan.export(models, machine, ct.__version__, "double")))


main(sys.argv[1:])
