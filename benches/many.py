"""Measures how many tokens a second `anec serve` writes for 1, 2, 4, 8 and 16 clients that ask at the same time.

    taskset -c 0,1 python benches/many.py --anec target/release/anec --bundle qwen.anec

Every client asks for one greedy text of its own at a time. Each text is compared with the one that the server writes when it is
alone: sharing calls may not change a character. Numbers of clients take turns, so that a machine that slows down slows all of them.
Prints a table of medians, and ends with status 1 if a text was another one.
"""

import argparse
import json
import statistics
import sys
import threading
import time

from load import Server

SUBJECTS = [
    "sorting a list", "reading a file", "a binary tree", "prime numbers", "a web server", "matrix products", "a priority queue",
    "parsing dates", "a hash table", "walking a folder", "the Fibonacci numbers", "a text editor", "random walks", "a linked list",
    "reversing a string", "a calendar",
]  # fmt: skip


def ask(server, number, tokens):
    """Text and number of tokens of a client's request."""
    prompt = f"# A program in Python about {SUBJECTS[number]}, written with care and in full.\n"
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
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
    arguments = parser.parse_args()
    most = max(arguments.clients)
    # no states are kept: every text computes its prompt
    server = Server(arguments.anec, arguments.bundle, ["--parallel", str(most), "--kept", "0"])
    expected = [ask(server, number, arguments.tokens) for number in range(most)]
    speeds, wrong = {clients: [] for clients in arguments.clients}, 0
    for _ in range(arguments.rounds):
        for clients in arguments.clients:
            speed, different = run(server, clients, arguments.tokens, expected)
            speeds[clients].append(speed)
            wrong += different
    server.process.terminate()
    server.process.wait(timeout=60)
    alone = statistics.median(speeds[arguments.clients[0]])
    print(f"| clients | tokens/s, all together | times the tokens/s of {arguments.clients[0]} | least and most |\n|---|---|---|---|")
    for clients, each in speeds.items():
        middle = statistics.median(each)
        print(f"| {clients} | {middle:.1f} | {middle / alone:.2f} | {min(each):.1f} to {max(each):.1f} |")
    print(f"{wrong} texts differ from those that the server wrote alone")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
