"""Writes pymil_ops.json: every operator of coremltools' MIL, its parameters and the opsets it changed in.

python pymil_ops.py        (coremltools 9.0)
"""

import json
import os

import coremltools
from coremltools.converters.mil.mil import Builder  # noqa: F401  registers the operators
from coremltools.converters.mil.mil.ops import defs  # noqa: F401
from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

OPSETS = ["iOS15", "iOS16", "iOS17", "iOS18"]


def main():
    operators = {}
    for name, versions in sorted(SSAOpRegistry.core_ops.items()):
        rows = []
        for opset, cls in versions.items():
            if opset.name not in OPSETS:
                continue
            parameters = []
            for parameter, kind in cls.input_spec.input_types.items():
                parameters.append(
                    {
                        "name": parameter,
                        "const": bool(kind.const),
                        "optional": bool(kind.optional),
                        "variadic": type(kind).__name__ == "TupleInputType",
                    }
                )
            # a form is listed where it first differs from the one before
            rows.append((OPSETS.index(opset.name), {"opset": opset.name, "parameters": parameters}))
        rows = [row for _, row in sorted(rows, key=lambda row: row[0])]
        rows = [row for i, row in enumerate(rows) if i == 0 or row["parameters"] != rows[i - 1]["parameters"]]
        operators[name] = rows
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "pymil_ops.json"), "w") as out:
        json.dump({"coremltools": coremltools.__version__, "operators": operators}, out, sort_keys=True, separators=(",", ":"))
        out.write("\n")


if __name__ == "__main__":
    main()
