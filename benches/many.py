"""Measures how many tokens a second `anec serve` writes for 1, 2, 4, 8 and 16 clients that ask at the same time.

    taskset -c 0,1 python benches/many.py --anec target/release/anec --bundle qwen.anec
    taskset -c 0,1 python benches/many.py --anec target/release/anec --bundle qwen.anec --llama-server llama-server --gguf qwen-q8_0.gguf

Every client asks for one greedy text of its own at a time. Each text is compared with the one that the server writes when it is
alone: sharing calls may not change a character. Numbers of clients take turns, so that a machine that slows down slows all of them.
Prints a table of medians, and ends with status 1 if a text of anec's was another one.

The second form asks llama.cpp's server, too, in turns with anec's, with as many slots and nothing kept of earlier prompts. Its
texts are counted as different in the same way, but may be: it doesn't promise what anec does.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time

from load import Server

SUBJECTS = [
    "sorting a list", "reading a file", "a binary tree", "prime numbers", "a web server", "matrix products", "a priority queue",
    "parsing dates", "a hash table", "walking a folder", "the Fibonacci numbers", "a text editor", "random walks", "a linked list",
    "reversing a string", "a calendar",
]  # fmt: skip


class LlamaServer(Server):
    """llama.cpp's server, which answers the same requests."""

    def __init__(self, program, gguf, slots, tokens):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.host, self.port = free.getsockname()
        threads = str(len(os.sched_getaffinity(0)))
        # a slot has room for its share of the context
        context = str(slots * (tokens + 256))
        options = ["--parallel", str(slots), "--ctx-size", context, "--threads", threads, "--threads-batch", threads]
        command = [program, "--model", gguf, "--host", self.host, "--port", str(self.port), "--cache-ram", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not self.ready():
            if self.process.poll() is not None:
                sys.exit(f"{program} ended with {self.process.returncode}")
            time.sleep(0.1)

    def ready(self):
        try:
            return self.send("GET", "/health")[0] == 200
        except ConnectionRefusedError:
            return False


def ask(server, number, tokens):
    """Text and number of tokens of a client's request."""
    prompt = f"# A program in Python about {SUBJECTS[number]}, written with care and in full.\n"
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    if isinstance(server, LlamaServer):
        body["cache_prompt"] = False
    status, answer = server.send("POST", "/v1/completions", json.dumps(body))
    if status != 200:
        sys.exit(f"status {status}: {answer.decode()}")
    answer = json.loads(answer)
    return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]


def run(server, clients, tokens, expected):
    """Tokens a second of so many clients at a time, and how many of their texts differ."""
    answers = [None] * clients

    def client(number):
        answers[number] = ask(server, number, tokens)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    begin = time.time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.time() - begin
    wrong = sum(answer != text for answer, text in zip(answers, expected))
    return sum(count for _, count in answers) / elapsed, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anec", required=True)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-server", help="llama.cpp's server, with which anec's takes turns")
    parser.add_argument("--gguf", help="the model that it runs")
    arguments = parser.parse_args()
    if bool(arguments.llama_server) != bool(arguments.gguf):
        parser.error("--llama-server and --gguf come together")
    most = max(arguments.clients)
    # no states are kept: every text computes its prompt
    servers = {"anec": Server(arguments.anec, arguments.bundle, ["--parallel", str(most), "--kept", "0"])}
    if arguments.llama_server:
        servers["llama.cpp"] = LlamaServer(arguments.llama_server, arguments.gguf, most, arguments.tokens)
    expected = {name: [ask(server, number, arguments.tokens) for number in range(most)] for name, server in servers.items()}
    speeds, wrong = {(name, clients): [] for name in servers for clients in arguments.clients}, dict.fromkeys(servers, 0)
    for _ in range(arguments.rounds):
        for clients in arguments.clients:
            for name, server in servers.items():
                speed, different = run(server, clients, arguments.tokens, expected[name])
                speeds[name, clients].append(speed)
                wrong[name] += different
    for server in servers.values():
        server.process.terminate()
        server.process.wait(timeout=60)
    print(f"| server | clients | tokens/s, all together | times the tokens/s of {arguments.clients[0]} | least and most |")
    print("|---|---|---|---|---|")
    for (name, clients), each in speeds.items():
        middle, alone = statistics.median(each), statistics.median(speeds[name, arguments.clients[0]])
        print(f"| {name} | {clients} | {middle:.1f} | {middle / alone:.2f} | {min(each):.1f} to {max(each):.1f} |")
    for name, different in wrong.items():
        print(f"{name}: {different} texts differ from those that it wrote alone")
    sys.exit(wrong["anec"] > 0)


if __name__ == "__main__":
    main()
