"""Runs coremltools' own op tests on anec's CPU executor and prints a table: equal, wrong, refused.

coremltools compares its tests' packages with expected numbers only on a Mac. Here each package is saved with its inputs
and expected outputs, `anec run` computes it in f32, and the outputs are compared within the test's own tolerance. Of a
test with many parameters, sets of parameters are taken in equal distances.

    pip install coremltools==9.0 pytest scipy torch        (without torch, tests that need it are left out)
    cargo build --release
    python tests/oracle/op_tests.py target/release/anec FOLDER [--each N] [-k EXPRESSION] [--json FILE]

FOLDER takes the packages; a second run without harvesting: --again. --coreai migrates each package instead, and Apple's
runtime computes the asset (tests/requirements-coreai.txt).
"""

import argparse
import collections
import hashlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ["PYMIL_TEST_TARGETS"] = "mlprogram"

import numpy as np  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402

INPUT_TYPES = {65568: np.float32, 65552: np.float16, 131104: np.int32, 131080: np.int8}


class Harvest:
    """pytest plugin that saves the packages that tests compare."""

    def __init__(self, folder, each):
        self.folder, self.each = folder, each
        self.models, self.index = [], []

    def pytest_collection_modifyitems(self, items):
        tests = collections.OrderedDict()
        for item in items:
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
        chosen = []
        for of_test in tests.values():
            step = max(1, len(of_test) / self.each)
            chosen += [of_test[int(i * step)] for i in range(min(self.each, len(of_test)))]
        items[:] = chosen

    def pytest_runtest_setup(self, item):
        self.models.clear()
        np.random.seed(int(hashlib.sha256(item.nodeid.encode()).hexdigest()[:8], 16))

    def pytest_runtest_makereport(self, item, call):
        # where a Mac's prediction is expected to fail
        if call.when == "call" and call.excinfo and "DID NOT RAISE" in str(call.excinfo.value):
            for _, case in self.models:
                case["raises"] = True

    def compare(self, mlmodel, input_key_values, expected_outputs, dtype="fp32", atol=1e-4, rtol=1e-5, also_compare_shapes=True, state=None, allow_mismatch_ratio=0.0):
        """Takes the place of coremltools' compare_backend."""
        known = next((case for model, case in self.models if model is mlmodel), None)
        if known is None:
            known = {"dtype": dtype, "atol": atol, "rtol": rtol, "shapes": also_compare_shapes, "ratio": allow_mismatch_ratio, "steps": []}
            self.models.append((mlmodel, known))
        known["steps"].append((dict(input_key_values), dict(expected_outputs or {})))

    def pytest_runtest_teardown(self, item):
        for model, case in self.models:
            folder = self.folder / f"{len(self.index):04}"
            folder.mkdir(parents=True)
            model.save(str(folder / "model.mlpackage"))
            spec = model.get_spec()
            functions = spec.description.functions
            described = functions[0].input if functions else spec.description.input
            steps = case.pop("steps")
            entry = {"test": item.nodeid.split("::", 1)[1], "file": "/".join(item.path.parts[-2:]), "folder": folder.name, "steps": len(steps), **case}
            for number, (inputs, expected) in enumerate(steps):
                given = {}
                for feature in described:
                    if feature.type.WhichOneof("Type") != "multiArrayType" or not expected:
                        entry["not_applicable"] = "an image" if expected else "no expected values"
                        continue
                    value = np.atleast_1d(np.asarray(inputs[feature.name]))
                    given[feature.name] = np.ascontiguousarray(value.astype(INPUT_TYPES[feature.type.multiArrayType.dataType]))
                if any(np.asarray(value).dtype == object for value in expected.values()):
                    entry["not_applicable"] = "a dictionary"
                if "not_applicable" not in entry:
                    save_file(given, folder / f"in{number}.safetensors")
                    wide = {name: np.ascontiguousarray(np.asarray(value, np.float64)) for name, value in expected.items()}
                    save_file(wide, folder / f"expected{number}.safetensors")
            self.index.append(entry)
        self.models.clear()


def harvest(folder, each, expression):
    import coremltools as ct
    import pytest
    from coremltools.converters.mil import testing_utils
    from coremltools.converters.mil.mil.ops import tests

    plugin = Harvest(folder, each)
    testing_utils.compare_backend = plugin.compare
    ct.models.MLModel.make_state = lambda self: object()
    path = str(Path(tests.__file__).parent)
    options = ["-q", "--tb=no", "--no-summary", "-p", "no:cacheprovider", "--continue-on-collection-errors", "--rootdir", path, "-W", "ignore", path]
    pytest.main(options + (["-k", expression] if expression else []), plugins=[plugin])
    (folder / "index.json").write_text(json.dumps(plugin.index, indent=1))


def run(anec, folder, entry):
    """Verdict and reason."""
    folder = folder / entry["folder"]
    state = folder / "state.safetensors"
    state.unlink(missing_ok=True)
    for number in range(entry["steps"]):
        out = folder / f"out{number}.safetensors"
        command = [anec, "run", folder / "model.mlpackage", "--precision", "f32", "--inputs", folder / f"in{number}.safetensors", "--out", out, "--state", state]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            return "wrong", "no result after 120 s"
        if done.returncode:
            if entry.get("raises"):
                return "equal", ""
            # an error has a code of the program; a crash has another
            return ("refused" if 1 <= done.returncode <= 5 else "wrong"), done.stderr.strip().split("\n")[0]
        problem = compare(load_file(out), load_file(folder / f"expected{number}.safetensors"), entry)
        if problem:
            return ("equal", "") if entry.get("raises") else ("wrong", problem)
    return ("wrong", "an error is expected") if entry.get("raises") else ("equal", "")


def run_coreai(anec, folder, entry):
    """Verdict and reason of the migrated package on Apple's runtime."""
    folder = folder / entry["folder"]
    asset = folder / "model.aimodel"
    command = [anec, "migrate", folder / "model.mlpackage", "--out", asset, "--force", "--no-verify", *shapes(anec, folder, entry)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return ("refused" if done.returncode == 4 else "wrong"), done.stderr.strip().split("\n")[0]
    command = [sys.executable, Path(__file__).parent / "run_asset.py", asset, folder, str(entry["steps"])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return "wrong", "no result after 120 s"
    if done.returncode:
        last = (done.stderr.strip().split("\n") or [""])[-1]
        return ("refused" if last == "no function for these shapes" else "wrong"), f"{done.returncode}: {last}"
    for number in range(entry["steps"]):
        problem = compare(load_file(folder / f"out{number}.safetensors"), load_file(folder / f"expected{number}.safetensors"), entry)
        if problem:
            return ("equal", "") if entry.get("raises") else ("wrong", problem)
    return "equal", ""


def shapes(anec, folder, entry):
    """Options that give each flexible dimension the sizes of a test's inputs."""
    text = subprocess.run([anec, "inspect", folder / "model.mlpackage", "--mil"], capture_output=True, text=True).stdout
    header = next((line for line in text.split("\n") if line.lstrip().startswith("func ")), "")
    sizes = collections.defaultdict(set)
    for number in range(entry["steps"]):
        given = load_file(folder / f"in{number}.safetensors")
        for shape, name in re.findall(r"tensor<\w+, \[([^\]]*)\]> (\w+)", header):
            for symbol, size in zip(shape.split(", "), given[name].shape if name in given else ()):
                if re.fullmatch(r"[A-Za-z_]\w*", symbol):
                    sizes[symbol].add(size)
    return [word for symbol, of in sizes.items() for word in ("--shapes", f"{symbol}={','.join(map(str, sorted(of)))}")]


def compare(found, expected, entry):
    """coremltools' comparison; a program in half precision may be as far off as on its devices."""
    half = entry["dtype"] == "fp16"
    atol, rtol = (max(entry["atol"] * 100, 0.5), max(entry["rtol"] * 100, 0.05)) if half else (entry["atol"], entry["rtol"])
    for name, value in expected.items():
        own = found.get(name, found.get(re.sub(r"\W", "_", name)))
        if own is None:
            return f"no output {name}"
        if entry["shapes"] and own.shape != value.shape and (value.shape, own.shape) != ((), (1,)):
            return f"{name} has the shape {own.shape}, expected {value.shape}"
        apart = ~np.isclose(own.astype(np.float64), value, atol=atol, rtol=rtol, equal_nan=True)
        if apart.size and apart.mean() > entry["ratio"]:
            return f"{name}: {apart.sum()} of {apart.size} elements are {own[apart][:3]}, expected {np.broadcast_to(value, own.shape)[apart][:3]}"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("anec", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--each", type=int, default=4, help="sets of parameters of a test (default: 4)")
    parser.add_argument("-k", dest="expression", help="pytest's choice of tests")
    parser.add_argument("--again", action="store_true", help="run the packages of an earlier harvest")
    parser.add_argument("--coreai", action="store_true", help="migrate the packages and run the assets on Apple's runtime")
    parser.add_argument("--json", type=Path, help="write each verdict there")
    arguments = parser.parse_args()
    if not arguments.again:
        harvest(arguments.folder.resolve(), arguments.each, arguments.expression)
    index = json.loads((arguments.folder / "index.json").read_text())
    cases = [entry for entry in index if "not_applicable" not in entry]
    with ThreadPoolExecutor() as pool:
        runner = run_coreai if arguments.coreai else run
        verdicts = pool.map(lambda entry: runner(arguments.anec.resolve(), arguments.folder.resolve(), entry), cases)
        for entry, (verdict, reason) in zip(cases, verdicts):
            entry["verdict"], entry["reason"] = verdict, reason
    if arguments.json:
        arguments.json.write_text(json.dumps(index, indent=1))
    for entry in cases:
        if entry["verdict"] != "equal":
            print(f"{entry['verdict']}: {entry['file']} {entry['test']}: {entry['reason']}")
    print("| tests | cases | equal | refused | wrong | not applicable |")
    print("|---|--:|--:|--:|--:|--:|")
    for part in sorted({entry["file"].split("/")[0] for entry in index}) + ["all"]:
        of_part = [entry for entry in index if part in ("all", entry["file"].split("/")[0])]
        counts = collections.Counter(entry.get("verdict", "not applicable") for entry in of_part)
        row = [len(of_part)] + [counts[verdict] for verdict in ("equal", "refused", "wrong", "not applicable")]
        print(f"| {part} | " + " | ".join(map(str, row)) + " |")


if __name__ == "__main__":
    sys.exit(main())
