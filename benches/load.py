"""Loads `anec serve` for minutes: 64 clients that ask, stream, leave, send nonsense, wait, and know what they should get.

    python benches/load.py --anec target/release/anec --bundle demo.anec --seconds 180

Greedy texts and seeded samples are compared with what the server gave when it was alone; every answer must have the code that its
request deserves (429 counts as one, for the queue is bounded). The server's memory is read every few seconds: at the end it may
not be more than a little above what it was after the first fifth. Ends with status 1 and a list if anything was wrong.
"""

import argparse
import collections
import http.client
import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time

PROMPTS = ["One day", "The old king said", "There was a", "In the wood", "Once upon a time", "She went to"]
GROWTH = 1.15  # of the memory after the first fifth


def request(number: int) -> dict:
    """The request of a number: half are greedy, half are samples with a seed."""
    body = {"prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": 8 + number % 17}
    return body | ({"temperature": 0} if number % 2 else {"temperature": 0.9, "seed": number})


class Server:
    def __init__(self, anec, bundle, options):
        command = [anec, "serve", bundle, "--port", "0", "--max-body", "100000", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if "http://" in line:
                self.host, port = line.split("http://")[1].strip().split(":")
                self.port = int(port)
                break
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        while self.send("GET", "/health")[0] != 200:
            time.sleep(0.05)

    def send(self, method, path, body=None):
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def text(self, number):
        """Code and text of a request."""
        status, answer = self.send("POST", "/v1/completions", json.dumps(request(number)))
        return status, json.loads(answer)["choices"][0]["text"] if status == 200 else None

    def streamed(self, number):
        """The same, in pieces."""
        status, answer = self.send("POST", "/v1/completions", json.dumps(request(number) | {"stream": True}))
        if status != 200:
            return status, None
        events = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: {")]
        return status, "".join(json.loads(event)["choices"][0]["text"] for event in events)

    def leave(self, number):
        """Begins a long text and hangs up."""
        body = json.dumps(request(number) | {"max_tokens": 400, "stream": True})
        with socket.create_connection((self.host, self.port), timeout=30) as client:
            client.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            client.recv(200)

    def dawdle(self):
        """Sends half a request and waits for the server to give up."""
        with socket.create_connection((self.host, self.port), timeout=30) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            answer = client.recv(200)
            return int(answer.split()[1]) if answer else 408

    def memory(self):
        with open(f"/proc/{self.process.pid}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def client(server, expected, end, faults, codes, latencies, seed):
    chance = random.Random(seed)
    while time.time() < end:
        number, kind = chance.randrange(len(expected)), chance.random()
        begin = time.time()
        try:
            if kind < 0.80:
                status, text = (server.text if kind < 0.5 else server.streamed)(number)
                right = status == 429 or (status == 200 and text == expected[number])
                if status == 200:
                    latencies[seed].append(time.time() - begin)
            elif kind < 0.90:
                server.leave(number)
                status, right = "left", True
            elif kind < 0.94:
                status, _ = server.send("POST", "/v1/completions", '{"prompt": "a", ')
                right = status == 400
            elif kind < 0.97:
                status, _ = server.send("POST", "/v1/completions", json.dumps({"prompt": "a" * 200_000}))
                right = status == 413
            elif kind < 0.98:
                status = server.dawdle()
                right = status == 408
            else:
                status, _ = server.send("POST", "/v1/completions", json.dumps({"prompt": "one " * 4096}))
                right = status == 400
        except (BrokenPipeError, ConnectionResetError):
            # a server that refuses a large body needn't read it to its end
            status, right = "closed", 0.94 <= kind < 0.97
        except Exception as error:
            status, right = type(error).__name__, False
        codes[status] += 1
        if not right:
            faults.append(f"request {number} of kind {kind:.2f}: {status}")


def finish(server, faults):
    """Ends the server and the program: with status 1 if anything was wrong, of which 20 are printed."""
    server.process.terminate()
    if server.process.wait(timeout=60) != 0:
        faults.append(f"the server ended with {server.process.returncode}")
    for fault in faults[:20]:
        print(f"WRONG: {fault}")
    sys.exit(bool(faults))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anec", required=True)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--seconds", type=int, default=180)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("options", nargs="*", help="more options of anec serve, after --")
    arguments = parser.parse_args()
    server = Server(arguments.anec, arguments.bundle, arguments.options)
    expected = [server.text(number)[1] for number in range(60)]
    faults, codes = [], collections.Counter()
    latencies = [[] for _ in range(arguments.clients)]
    begin = time.time()
    end = begin + arguments.seconds
    common = (server, expected, end, faults, codes, latencies)
    clients = [threading.Thread(target=client, args=(*common, seed)) for seed in range(arguments.clients)]
    for thread in clients:
        thread.start()
    memory = []
    while time.time() < end:
        memory.append((time.time() - begin, server.memory()))
        time.sleep(2)
    for thread in clients:
        thread.join()
    early = max(kilobytes for at, kilobytes in memory if at <= arguments.seconds / 5)
    late = server.memory()
    if late > GROWTH * early:
        faults.append(f"memory grew from {early} kB to {late} kB")
    if server.text(0)[1] != expected[0]:
        faults.append("at the end the server writes another text")
    done = [len(times) for times in latencies]
    every = sorted(time for times in latencies for time in times)
    print(f"{sum(codes.values())} requests of {arguments.clients} clients in {arguments.seconds} s: {dict(codes)}")
    print(f"latency of whole texts: median {statistics.median(every):.2f} s, 99 % within {every[int(len(every) * 0.99)]:.2f} s")
    print(f"texts of a client: {min(done)} to {max(done)}")
    print(f"memory: {early / 1024:.0f} MB after the first fifth, {late / 1024:.0f} MB at the end")
    finish(server, faults)


if __name__ == "__main__":
    main()
