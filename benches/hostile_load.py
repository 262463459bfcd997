"""Loads `anec serve` with strangers for minutes: 64 clients whose texts are known, 32 with hostile requests, 16 slow and 16 deaf ones.

    taskset -c 0,1 python benches/hostile_load.py --anec target/release/anec --bundle demo.anec --seconds 300

Hostile requests have schemas and grammars that explode, numbers without bound, bodies and prompts that are too large, broken JSON and
broken HTTP. Slow clients send a byte at a time; deaf ones ask for long streams and read nothing. Every text of a valid client is
compared with the one that the server wrote when it was alone, and every answer to a hostile one must be a refusal, or an answer.
Memory and file descriptors are read each second: the median of the last fifth may not be above that of the second fifth by more than
15 %. Prints a table and ends with status 1 if anything was wrong.
"""

import argparse
import collections
import json
import os
import random
import socket
import statistics
import threading
import time

from load import Server, finish, request

GROWTH = 1.15
VALID, HOSTILE, SLOW, DEAF = 64, 32, 16, 16
TEXTS = 60


def hostile_bodies():
    """Requests that no server should compute to the end."""

    def schema(schema):
        return {"prompt": "x", "max_tokens": 4, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}

    def number(divisor):
        return {"type": "integer", "multipleOf": divisor}

    rules = "".join(f'r{i}: "a"? r{i + 1}?\n' for i in range(800))
    lark = f'start: r0\n{rules}r800: "b"?\n'
    return [
        schema(number(9999991)),
        schema(number(99991)),
        schema({"allOf": [number(9973), number(9967)]}),
        schema({"type": "string", "pattern": "^(a|b|ab){0,5000}(ba){0,5000}$", "minLength": 4000}),
        schema({"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(2000)}}),
        {"prompt": "x", "max_tokens": 4, "response_format": {"type": "grammar", "grammar": lark}},
        {"prompt": "x", "max_tokens": 4, "response_format": {"type": "regex", "regex": "((a{1,500}b{1,500}){1,500}c){1,500}"}},
        {"prompt": "x", "n": 10**9},
        {"prompt": "x", "max_tokens": 2**63},
        {"prompt": "x", "temperature": -1, "top_k": -(2**40)},
        {"prompt": "x", "logit_bias": {str(i): 1e308 for i in range(5000)}},
        {"prompt": "x", "stop": ["y" * 1000] * 50},
        {"prompt": "one " * 4096},
        {"prompt": "a" * 90000},
        {"prompt": [[i % 2000 for i in range(10000)]]},
        {"prompt": ["x"] * 5000},
        {"prompt": {"a": [[[[[[[[]]]]]]]]}},
    ]


RAW = [
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000000\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nHost: other\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    b"GET /" + b"a" * 60000 + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200\r\nConnection: close\r\n\r\n" + b"[" * 200,
]


class Load:
    def __init__(self, server, seconds):
        self.server, self.end = server, time.time() + seconds
        self.expected = [server.text(number)[1] for number in range(TEXTS)]
        self.faults, self.codes, self.latencies = [], collections.defaultdict(collections.Counter), []
        self.end = time.time() + seconds

    def open(self, buffer=None):
        client = socket.socket()
        if buffer:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        client.settimeout(120)
        client.connect((self.server.host, self.server.port))
        return client

    def valid(self, seed):
        chance = random.Random(seed)
        while time.time() < self.end:
            number, begin = chance.randrange(TEXTS), time.time()
            try:
                status, text = (self.server.text if chance.random() < 0.5 else self.server.streamed)(number)
            except Exception as error:
                self.faults.append(f"valid request {number}: {type(error).__name__}: {error}")
                continue
            self.codes["valid"][status] += 1
            if status == 200:
                self.latencies.append(time.time() - begin)
                if text != self.expected[number]:
                    self.faults.append(f"valid request {number} got another text")
            elif status == 429:
                time.sleep(0.1)
            else:
                self.faults.append(f"valid request {number}: {status}")

    def hostile(self, seed):
        chance, bodies = random.Random(seed), [json.dumps(body) for body in hostile_bodies()]
        while time.time() < self.end:
            try:
                if chance.random() < 0.25:
                    with self.open() as client:
                        client.sendall(chance.choice(RAW))
                        client.shutdown(socket.SHUT_WR)
                        answer = client.recv(4096)
                    status = int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else "closed"
                elif chance.random() < 0.2:
                    # one that hangs up at once
                    body = chance.choice(bodies).encode()
                    with self.open() as client:
                        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                    status = "left"
                else:
                    status, _ = self.server.send("POST", "/v1/completions", chance.choice(bodies))
            except (BrokenPipeError, ConnectionResetError):
                # a server that refuses early needn't read to the end
                status = "closed"
            except Exception as error:
                status = type(error).__name__
            self.codes["hostile"][status] += 1
            if status not in (200, 400, 404, 408, 413, 414, 429, 431, "closed", "left"):
                self.faults.append(f"hostile request: {status}")

    def slow(self, seed):
        body = json.dumps(request(seed)).encode()
        text = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        while time.time() < self.end:
            status = "closed"
            try:
                with self.open() as client:
                    for at in range(len(text)):
                        if time.time() > self.end:
                            return
                        client.sendall(text[at : at + 1])
                        time.sleep(0.3)
                    status = int(client.recv(4096).split()[1])
            except OSError:
                pass
            self.codes["slow"][status] += 1

    def deaf(self, seed):
        body = {"messages": [{"role": "user", "content": "The sea"}], "n": 16, "stream": True, "max_tokens": 400, "logprobs": True}
        body = json.dumps(body | {"top_logprobs": 20, "logit_bias": {"0": -100}, "seed": seed}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        while time.time() < self.end:
            try:
                with self.open(4096) as client:
                    client.sendall(head + body)
                    begin = time.time()
                    while time.time() < min(self.end, begin + 45):
                        time.sleep(0.5)
            except OSError:
                pass
            self.codes["deaf"]["closed"] += 1

    def watch(self, process, samples):
        begin = time.time()
        while time.time() < self.end:
            samples.append((time.time() - begin, self.server.memory() / 1024, len(os.listdir(f"/proc/{process}/fd"))))
            time.sleep(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anec", required=True)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("options", nargs="*", help="more options of anec serve, after --")
    arguments = parser.parse_args()
    server = Server(arguments.anec, arguments.bundle, ["--parallel", "8", "--queue", "128", *arguments.options])
    load, samples = Load(server, arguments.seconds), []
    kinds = [(load.valid, VALID), (load.hostile, HOSTILE), (load.slow, SLOW), (load.deaf, DEAF)]
    threads = [threading.Thread(target=kind, args=(seed,)) for kind, count in kinds for seed in range(count)]
    for thread in threads:
        thread.start()
    load.watch(server.process.pid, samples)
    for thread in threads:
        thread.join()
    faults = load.faults
    part = arguments.seconds / 5

    def middle(column, which):
        return statistics.median(sample[column] for sample in samples if which * part <= sample[0] < (which + 1) * part)

    for name, column, slack in (("memory in MB", 1, 0), ("file descriptors", 2, 20)):
        early, late = middle(column, 1), middle(column, 4)
        if late > GROWTH * early + slack:
            faults.append(f"{name}: {early:.0f} in the second fifth, {late:.0f} in the last")
        most = max(sample[column] for sample in samples)
        print(f"{name}: {early:.0f} in the second fifth, {late:.0f} in the last, at most {most:.0f}")
    if server.text(0)[1] != load.expected[0]:
        faults.append("at the end the server writes another text")
    every = sorted(load.latencies)
    for kind, codes in load.codes.items():
        print(f"{kind}: {sum(codes.values())} requests: {dict(codes)}")
    at = [every[int(len(every) * share)] for share in (0.5, 0.99)]
    print(f"{len(every)} right texts in {arguments.seconds} s; latency: median {at[0]:.2f} s, p99 {at[1]:.2f} s, at most {every[-1]:.2f} s")
    print(f"{len(faults)} wrong")
    finish(server, faults)


if __name__ == "__main__":
    main()
