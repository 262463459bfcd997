#!/usr/bin/env python3
"""The hub's own client against the double of the hub, and against what our client left: run by src/hub/tests.rs.

    python tests/hub_client.py ENDPOINT FOLDER CACHE OUT

Uploads FOLDER as o/python and downloads it again; downloads o/ours, which our client uploaded, into OUT; finds o/ours
in CACHE, which our client filled, without asking anybody.
"""

import os
import pathlib
import sys

endpoint, folder, cache, out = sys.argv[1:]
os.environ.update(HF_ENDPOINT=endpoint, HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_PROGRESS_BARS="1")

from huggingface_hub import HfApi, snapshot_download  # noqa: E402  (it reads the environment when it is imported)


def content(root):
    root = pathlib.Path(root)
    files = (path for path in root.rglob("*") if path.is_file() and ".cache" not in path.parts)
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def main():
    api = HfApi(endpoint=endpoint, token="t")
    api.create_repo("o/python", exist_ok=True)
    api.upload_folder(repo_id="o/python", folder_path=folder)
    again = snapshot_download("o/python", token="t", cache_dir=pathlib.Path(out) / "cache")
    assert content(again) == content(folder), (content(again).keys(), content(folder).keys())
    snapshot_download("o/ours", token="t", local_dir=pathlib.Path(out) / "ours")
    assert content(pathlib.Path(out) / "ours") == content(folder)
    found = snapshot_download("o/ours", cache_dir=cache, local_files_only=True)
    assert content(found) == content(folder), found
    print("all of it works")


if __name__ == "__main__":
    main()
