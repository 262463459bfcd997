"""Writes what coremltools' registry of operators says.

pymil_ops.json: every operator of coremltools' MIL, its parameters and the opsets it changed in; the catalogue is
compared with it. src/mil/ops/element_types.txt: the element types of the parameters; the catalogue reads it.

python pymil_ops.py [FOLDER]        (coremltools 9.0; with a folder, both files go there)
"""

import json
import sys
from pathlib import Path

import coremltools
from coremltools.converters.mil.mil import Builder  # noqa: F401  registers the operators
from coremltools.converters.mil.mil import types
from coremltools.converters.mil.mil.ops import defs  # noqa: F401
from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

OPSETS = ["iOS15", "iOS16", "iOS17", "iOS18"]
HERE = Path(__file__).resolve().parent
HEADER = """\
# Element types of parameters, from coremltools' registry; tests/oracle/pymil_ops.py writes this file.
# A line: operator, the first target with this form, parameter:types. A capitalised word stands for a type that all its
# parameters share; the types that it may be are at the end of the line. What isn't listed takes any type.
"""


def forms(of_form):
    """For each operator the forms in which it differs from the one before, as (opset, form)."""
    for name, versions in sorted(SSAOpRegistry.core_ops.items()):
        rows = [(OPSETS.index(opset.name), of_form(cls)) for opset, cls in versions.items() if opset.name in OPSETS]
        rows.sort(key=lambda row: row[0])
        yield name, [(OPSETS[i], form) for at, (i, form) in enumerate(rows) if at == 0 or form != rows[at - 1][1]]


def parameters(cls):
    """Names, constness and presence of an operator's parameters."""
    return [
        {
            "name": parameter,
            "const": bool(kind.const),
            "optional": bool(kind.optional),
            "variadic": type(kind).__name__ == "TupleInputType",
        }
        for parameter, kind in cls.input_spec.input_types.items()
    ]


def element_types(cls):
    """The rest of a line of element_types.txt."""

    def text(domain):
        return "|".join(sorted(types.builtin_to_string(one) for one in domain))

    words, shared = [], {}
    for parameter, kind in cls.input_spec.input_types.items():
        if type(kind).__name__ != "TensorInputType":
            continue
        letter = kind._type_domain_id
        if letter:
            shared[letter] = text(cls.type_domains[letter])
        words.append(f"{parameter}:{letter or text(kind._type_domain)}")
    return " ".join(words + [f"{letter}={names}" for letter, names in shared.items()])


def main():
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    operators = {
        name: [{"opset": opset, "parameters": form} for opset, form in rows] for name, rows in forms(parameters)
    }
    with open((folder or HERE) / "pymil_ops.json", "w") as out:
        dump = {"coremltools": coremltools.__version__, "operators": operators}
        json.dump(dump, out, sort_keys=True, separators=(",", ":"))
        out.write("\n")
    with open((folder or HERE.parents[1] / "src/mil/ops") / "element_types.txt", "w") as out:
        out.write(HEADER)
        for name, rows in forms(element_types):
            out.writelines(f"{name} {opset} {form}\n" for opset, form in rows if form)


if __name__ == "__main__":
    main()
