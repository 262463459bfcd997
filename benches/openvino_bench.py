"""Speeds of OpenVINO GenAI with a GGUF, as JSON, for `llama_cpp.py`: run by a Python that has openvino-genai.

    python benches/openvino_bench.py model-q8_0.gguf --prompt 128 --generated 32 --repetitions 5

No prompt has a beginning in common with another one, because OpenVINO keeps the caches of what it has read. Its own defaults
hold, among them 8-bit activations (`DYNAMIC_QUANTIZATION_GROUP_SIZE`); `--set` gives its plugin other properties.
"""

import argparse
import json
import random
import statistics
import time

import openvino
import openvino_genai

WORDS = "def return class import value index list sort read file open write tree node queue stack".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--generated", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    properties = dict(one.split("=") for one in arguments.set)
    start = time.perf_counter()
    pipeline = openvino_genai.LLMPipeline(arguments.model, "CPU", INFERENCE_NUM_THREADS=arguments.threads, **properties)
    load = time.perf_counter() - start
    tokenizer = pipeline.get_tokenizer()
    dice = random.Random(1)

    def prompt(count: int) -> openvino.Tensor:
        ids = tokenizer.encode(" ".join(dice.choice(WORDS) for _ in range(3 * count))).input_ids
        return openvino.Tensor(ids.data[:, :count].copy())

    def generate(count: int, generated: int) -> tuple[float, float]:
        """Seconds to the first token, and tokens a second after it."""
        config = openvino_genai.GenerationConfig(max_new_tokens=generated, ignore_eos=True, do_sample=False)
        start = time.perf_counter()
        metrics = pipeline.generate(prompt(count), config).perf_metrics
        return time.perf_counter() - start, metrics.get_throughput().mean

    generate(16, 1)
    prefill = [arguments.prompt / generate(arguments.prompt, 1)[0] for _ in range(arguments.repetitions)]
    decode = [generate(16, arguments.generated + 1)[1] for _ in range(arguments.repetitions)]
    print(json.dumps({"load": load, "prefill": statistics.median(prefill), "decode": statistics.median(decode)}))


if __name__ == "__main__":
    main()
