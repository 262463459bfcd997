"""Seconds from the start of a program to its first token, and its memory beside the weights: anec, llama.cpp, OpenVINO GenAI.

    python benches/first_token.py --anec target/release/anec --bundle qwen.anec --source qwen-q8_0.gguf \\
        --llama-cli llama-completion --openvino python

Each run is a process of its own that reads its model, computes a prompt and ends after one token. *Warm* runs find all files
in the page cache; before *cold* ones the model's files are dropped from it (`posix_fadvise`; the program's own files and
libraries stay). Programs take turns. Memory is the largest resident set of a run, mapped pages of files included.
"""

import argparse
import os
import statistics
import subprocess
import time
from pathlib import Path

PROMPT = "def quicksort(values):"
OPENVINO = """
import sys, openvino_genai
pipeline = openvino_genai.LLMPipeline(sys.argv[1], "CPU", INFERENCE_NUM_THREADS=int(sys.argv[3]))
pipeline.generate(sys.argv[2], openvino_genai.GenerationConfig(max_new_tokens=1, ignore_eos=True))
"""


def files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def drop(path: Path) -> None:
    """Drops a model's pages from the cache."""
    for file in files(path):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(command: list) -> tuple[float, float]:
    """Seconds and megabytes of a process."""
    begin = time.perf_counter()
    process = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command[0]} ended with {os.waitstatus_to_exitcode(status)}")
    return time.perf_counter() - begin, used.ru_maxrss * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anec", required=True)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--source", type=Path, required=True, help="the GGUF that the others read")
    parser.add_argument("--llama-cli", help="llama.cpp's llama-completion")
    parser.add_argument("--openvino", metavar="PYTHON", help="an interpreter with openvino-genai")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    threads = arguments.threads
    programs = {"anec": (arguments.bundle, [arguments.anec, "run", arguments.bundle, "--prompt", PROMPT, "--max-tokens", 1])}
    if arguments.llama_cli:
        programs["llama.cpp"] = (arguments.source, [arguments.llama_cli, "-m", arguments.source, "-p", PROMPT, "-n", 1,
                                                    "-t", threads, "-no-cnv", "-c", 512])
    if arguments.openvino:
        programs["OpenVINO GenAI"] = (arguments.source, [arguments.openvino, "-c", OPENVINO, arguments.source, PROMPT, threads])
    found = {(name, cold): [] for name in programs for cold in (False, True)}
    for name, (_, command) in programs.items():
        measure(command)  # the first reads libraries, and may write caches of its own
    for _ in range(arguments.turns):
        for (name, cold), runs in found.items():
            model, command = programs[name]
            if cold:
                drop(model)
            runs.append(measure(command))
    print("| program | model | warm, seconds | cold, seconds | memory | memory beside the file |")
    print("|---|---|---|---|---|---|")
    for name, (model, _) in programs.items():
        size = sum(file.stat().st_size for file in files(model)) / 1e6
        warm, cold = (statistics.median(seconds for seconds, _ in found[name, cold]) for cold in (False, True))
        memory = statistics.median(memory for _, memory in found[name, False])
        print(f"| {name} | {size:.0f} MB | {warm:.2f} | {cold:.2f} | {memory:.0f} MB | {memory / size:.2f} × |")


if __name__ == "__main__":
    main()
