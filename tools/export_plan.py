#!/usr/bin/env python3
"""Exports the compute plans of Core ML models on a Mac, for `anec validate --plan`.

    python tools/export_plan.py --out plan.json X.mlpackage
    python tools/export_plan.py --out plan.json X.mlmodelc
    python tools/export_plan.py --out plan.json qwen3.anec        # folder of a bundle: all its packages

Needs macOS 14.4 and `pip install coremltools` (8.1 or later), and not anec. The file can be judged on any machine:

    anec validate X.mlpackage --residency --plan plan.json

Core ML plans the default function of a model at its default shape. Each function of a package is therefore planned in a
copy of which it is the default. Other sizes of flexible shapes are not planned; `anec validate --plan-out` does that.
"""
import argparse
import datetime
import hashlib
import json
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

FORMAT = "coremltools.MLComputePlan"
SPEC = Path("Data/com.apple.CoreML/model.mlmodel")


def digest(folder):
    """SHA-256 of the listing of a folder's files, in the form of `sha256sum`."""
    files = sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*") if path.is_file())
    lines = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n" for name, path in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def block(plan, of):
    """A block of operations with the devices and costs of a plan."""
    return {"operations": [operation(plan, op) for op in of.operations]}


def operation(plan, op):
    usage = plan.get_compute_device_usage_for_mlprogram_operation(op)
    cost = plan.get_estimated_cost_for_mlprogram_operation(op)
    return {
        "operator_name": op.operator_name,
        "outputs": [output.name for output in op.outputs],
        "device_usage": usage and {
            "preferred_compute_device": type(usage.preferred_compute_device).__name__,
            "supported_compute_devices": [type(device).__name__ for device in usage.supported_compute_devices],
        },
        "estimated_cost": cost and {"weight": cost.weight},
        "blocks": [block(plan, inner) for inner in op.blocks],
    }


def function_plan(plan, function, key=None):
    """The plan of a model's default function; `key` is its name in the model's structure."""
    functions = plan.model_structure.program.functions
    return {"function": function, "block": block(plan, functions[key or function].block)}


def load(compiled):
    import coremltools as ct
    from coremltools.models.compute_plan import MLComputePlan

    return MLComputePlan.load_from_path(path=str(compiled), compute_units=ct.ComputeUnit.CPU_AND_NE)


def package_plans(package):
    """A plan for each function of a package."""
    import coremltools as ct

    spec = ct.utils.load_spec(str(package))
    functions = sorted(spec.mlProgram.functions)
    for function in functions:
        with tempfile.TemporaryDirectory() as room:
            copy = Path(room) / "model.mlpackage"
            shutil.copytree(package, copy)
            if len(functions) > 1:
                spec.description.defaultFunctionName = function
                (copy / SPEC).write_bytes(spec.SerializeToString())
            try:
                compiled = ct.models.utils.compile_model(str(copy), str(Path(room) / "model.mlmodelc"))
                yield function_plan(load(compiled), function)
            except RuntimeError as error:
                yield {"function": function, "refused": str(error)}


def compiled_plans(model):
    yield from plans_of_default(load(model))


def plans_of_default(plan):
    """The plan of a model's default function."""
    functions = list(plan.model_structure.program.functions)
    default = "main" if "main" in functions else functions[0]
    yield function_plan(plan, default)


def machine():
    from coremltools.models.compute_device import MLComputeDevice, MLNeuralEngineComputeDevice

    def output(*command):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    devices = MLComputeDevice.get_all_compute_devices()
    cores = [device.total_core_count for device in devices if isinstance(device, MLNeuralEngineComputeDevice)]
    return {
        "model": output("sysctl", "-n", "hw.model"),
        "chip": output("sysctl", "-n", "machdep.cpu.brand_string"),
        "os_version": platform.mac_ver()[0],
        "os_build": output("sw_vers", "-buildVersion"),
        "neural_engine_cores": cores[0] if cores else None,
    }


def export(models, where, version, name=""):
    """The file's content, from pairs of a model's folder and its plans."""
    return {
        "format": FORMAT,
        "coremltools": version,
        "name": name,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": where,
        "compute_units": "CPU_AND_NE",
        "models": [{"model": path.name, "sha256": digest(path), "plans": list(plans)} for path, plans in models],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a .mlpackage, a .mlmodelc, or the folder of a bundle")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    arguments = parser.parse_args()

    import coremltools

    model = arguments.model.resolve()
    if model.suffix == ".mlmodelc":
        models = [(model, compiled_plans(model))]
    elif (model / "bundle.json").exists():
        packages = json.loads((model / "bundle.json").read_text())["packages"]
        models = [(model / entry["package"], package_plans(model / entry["package"])) for entry in packages]
    else:
        models = [(model, package_plans(model))]
    content = export(models, machine(), coremltools.__version__, model.name)
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
