"""Convert, plan, validate and inspect models: the verbs of the program `anec`, as functions.

    import anec

    bundle = anec.convert("model.gguf", out="model.anec", quant={"weights": "int8"}, progress=print)
    report = anec.validate(bundle.path, golden="golden.safetensors")
    assert report.passed, report.problems

The program comes with the same wheel; the variable ANEC of the environment names another one.
"""

import json
import os
import shutil
import subprocess
import sysconfig
import tempfile
import threading
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Union

__all__ = [
    "Conversion", "Gate", "ManifestError", "Plan", "Progress", "SourceError", "ToolError", "UnavailableError", "Validation",
    "convert", "inspect", "plan", "validate",
]

PathLike = Union[str, "os.PathLike[str]"]


class ToolError(Exception):
    """A verb failed. `help` says what to do about it, where there is something; `code` is the program's exit code."""

    def __init__(self, message: str, help: Optional[str], code: int) -> None:
        super().__init__(message if help is None else f"{message}\n{help}")
        self.message, self.help, self.code = message, help, code


class ManifestError(ToolError):
    """A wrong argument, manifest or manifest key."""


class SourceError(ToolError):
    """A source that can't be read or isn't supported."""


class UnavailableError(ToolError):
    """A tool or a platform is missing, or memory."""


ERRORS = {2: ManifestError, 4: SourceError, 5: UnavailableError}


@dataclass(frozen=True)
class Progress:
    """Progress of a verb: its stage, and how much of it is done, in bytes for conversions. `total` is 0 while nobody knows it."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class Conversion:
    """A bundle. `written` is False where the folder had the same one before."""

    path: str
    written: bool
    notes: List[str]
    report: Dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Plan:
    """What a conversion would emit."""

    name: str
    family: str
    weight_bytes: int
    state_bytes: int
    contexts: List[int]
    notes: List[str]
    details: Dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Gate:
    """A gate and its verdict: `passed`, `failed` or `unproven`."""

    name: str
    verdict: str
    checks: List[Dict[str, Any]] = field(repr=False)


@dataclass(frozen=True)
class Validation:
    """Verdicts of the gates. What couldn't be checked here is `unproven`, never passed."""

    verdict: str
    gates: List[Gate]
    report: Dict[str, Any] = field(repr=False)

    @property
    def passed(self) -> bool:
        """Whether every gate passed."""
        return self.verdict == "passed"

    @property
    def problems(self) -> List[str]:
        """What failed or is unproven, a line each."""
        checks = [(gate.name, check) for gate in self.gates for check in gate.checks if check["verdict"] != "passed"]
        return [f"{name}: {check['subject']}: {check['claim']}: {check.get('problem') or check['verdict']}" for name, check in checks]


def convert(
    source: Optional[PathLike] = None,
    *,
    out: Optional[PathLike] = None,
    manifest: Optional[PathLike] = None,
    force: bool = False,
    compile: bool = True,
    measure: bool = True,
    progress: Optional[Callable[[Progress], None]] = None,
    **keys: Any,
) -> Conversion:
    """Convert a model into a bundle.

    `source` is a GGUF, safetensors or ONNX file, a folder, or `hf:owner/name`; by default the manifest's. `manifest` is a file, or the
    name of a built-in one. Other arguments are keys of the manifest (`context=4096`, `format="coreai"`,
    `quant={"weights": "int8", "granularity": "per_tensor"}`) and override it.
    """
    flags = [flag for flag, on in (("--force", force), ("--no-compile", not compile), ("--no-measure", not measure)) if on]
    if out is not None:
        flags += ["--out", os.fspath(out)]
    answer = json.loads(_run(["convert", "--json", *flags, *_model(source, manifest, keys)], progress))
    return Conversion(answer["path"], answer["status"] == "written", answer.get("notes", []), answer.get("report", {}))


def plan(
    source: Optional[PathLike] = None,
    *,
    manifest: Optional[PathLike] = None,
    chips: Sequence[str] = (),
    progress: Optional[Callable[[Progress], None]] = None,
    **keys: Any,
) -> Plan:
    """Preview a conversion without reading weights. `chips` (`["m4", "a18-pro"]`) adds predictions of speed and memory."""
    flags = ["--for", ",".join(chips)] if chips else []
    answer = json.loads(_run(["plan", "--json", *flags, *_model(source, manifest, keys)], progress))
    names = ("name", "family", "weight_bytes", "state_bytes", "contexts", "notes")
    return Plan(*(answer[name] for name in names), details=answer)


def validate(
    path: PathLike,
    *,
    golden: Optional[PathLike] = None,
    gates: Sequence[str] = (),
    plan: Optional[PathLike] = None,
    backend: str = "cpu",
    progress: Optional[Callable[[Progress], None]] = None,
) -> Validation:
    """Check a bundle or a Core ML package. `gates` selects some of `structure`, `numerics`, `parity` and `residency`; `plan` is a compute
    plan that was taken on a Mac."""
    flags = [f"--{gate}" for gate in gates]
    for flag, file in (("--golden", golden), ("--plan", plan)):
        if file is not None:
            flags += [flag, os.fspath(file)]
    with tempfile.TemporaryDirectory() as room:
        file = os.path.join(room, "report.json")
        # 1 and 3 are verdicts: failed and unproven
        _run(["validate", os.fspath(path), "--backend", backend, "--json", file, *flags], progress, (0, 1, 3))
        with open(file, encoding="utf-8") as text:
            report = json.load(text)
    verdicts = [Gate(gate["gate"], gate["verdict"], gate["checks"]) for gate in report["gates"]]
    return Validation(report["verdict"], verdicts, report)


def inspect(path: PathLike, *, progress: Optional[Callable[[Progress], None]] = None) -> Dict[str, Any]:
    """Return the contents of a source, a package, an asset of Core AI or a bundle."""
    return json.loads(_run(["inspect", "--json", os.fspath(path)], progress))


def _model(source: Optional[PathLike], manifest: Optional[PathLike], keys: Mapping[str, Any]) -> List[str]:
    """Arguments that name a model."""
    named = [(flag, os.fspath(value)) for flag, value in (("--source", source), ("--manifest", manifest)) if value is not None]
    return [word for pair in named for word in pair] + [word for key in _sets(keys) for word in ("--set", key)]


def _sets(keys: Mapping[str, Any], above: str = "") -> List[str]:
    """Keys of a manifest as `quant.weights="int8"`; JSON is YAML."""
    lines: List[str] = []
    for key, value in keys.items():
        if isinstance(value, Mapping):
            lines += _sets(value, f"{above}{key}.")
        else:
            lines.append(f"{above}{key}={json.dumps(os.fspath(value) if isinstance(value, os.PathLike) else value)}")
    return lines


def _program() -> str:
    """The program of this wheel, else the one in the path."""
    name = "anec.exe" if os.name == "nt" else "anec"
    own = os.path.join(sysconfig.get_path("scripts"), name)
    found = os.environ.get("ANEC") or (own if os.path.exists(own) else shutil.which(name))
    if not found:
        raise UnavailableError("the program `anec` isn't there", "install the wheel again, or name it in the variable ANEC", 5)
    return found


def _run(words: Sequence[str], progress: Optional[Callable[[Progress], None]], codes: Sequence[int] = (0,)) -> str:
    """Run the program and return what it prints. It ends with this call, also where `progress` raises."""
    environment = {**os.environ, "ANEC_PROGRESS": "json"}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([_program(), *words], env=environment, encoding="utf-8", errors="replace", **pipes) as child:
        printed: List[str] = []
        reader = threading.Thread(target=lambda: printed.append(child.stdout.read()))
        reader.start()
        said: List[str] = []
        try:
            for line in child.stderr:
                event = _event(line)
                if event is None:
                    said.append(line.rstrip("\n"))
                elif progress is not None:
                    progress(event)
        except BaseException:
            child.kill()
            raise
        finally:
            reader.join()
    if child.returncode not in codes:
        raise _error(said, child.returncode)
    return printed[0]


def _event(line: str) -> Optional[Progress]:
    if not line.startswith('{"progress"'):
        return None
    try:
        return Progress(**json.loads(line)["progress"])
    except (ValueError, TypeError):
        return None


def _error(said: Sequence[str], code: int) -> ToolError:
    """The error that the program printed; its message may have several lines."""
    message: List[str] = []
    help: List[str] = []
    part: Optional[List[str]] = None
    for line in said:
        for prefix, lines in (("error: ", message), ("help: ", help)):
            if line.startswith(prefix):
                part, line = lines, line[len(prefix) :]
        if part is not None and not line.startswith("note: "):
            part.append(line)
    text = "\n".join(message or said) or f"anec ended with code {code}"
    return ERRORS.get(code, ToolError)(text, "\n".join(help) or None, code)
