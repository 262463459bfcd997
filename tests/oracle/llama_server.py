"""Runs the tests of llama.cpp's server against `anec serve`, and prints a table.

    pip install pytest requests openai numpy wget
    python tests/models.py
    python tests/oracle/llama_server.py target/release/anec FOLDER llama.cpp/tools/server/tests [PATTERN]

The models of the tests are replaced: the built-in demo for those that generate text, all-MiniLM-L6-v2 for vectors, and
for ranks the latter with a head. `/completion` and `/completions` are sent to `/v1/completions`; `content`, `stop` and
the numbers of tokens are taken from its answer.

equal: all assertions hold. but for texts: all hold but those on texts and tokens of a model. refused: the server has
no such path, or an error names what isn't supported. not applicable: an option or a field of llama.cpp's own, or a test
that skips itself. wrong: the rest. Tests marked as slow are left out, because they download models.

FOLDER takes the models, the tests and the servers' logs. PATTERN chooses tests, as pytest's `-k`. Exit code: 0 if no
case is wrong, 1 otherwise.
"""

import collections
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
from clients import REPOSITORY

VECTORS = Path.home() / ".cache/anec/models/all-minilm-l6-v2"
CHATML = (
    "{% for t in tools or [] %}{{ t | tojson }}{# <tool_call> #}\n{% endfor %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content or m.tool_calls | tojson }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATHS = {"/completion": "/v1/completions", "/completions": "/v1/completions"}
# attributes of llama.cpp's `ServerProcess` for options that `anec serve` doesn't have, and the values without effect
OPTIONS = {
    "lora_files", "enable_ctx_shift", "slot_save_path", "sleep_idle_seconds", "server_tools", "mcp_servers_config",
    "mcp_servers_json", "ui_mcp_proxy", "gcp_compat", "spec_synth_rates", "spec_synth_len", "models_dir",
    "models_preset", "no_models_autoload", "media_path", "reasoning", "no_cache_idle_slots", "cache_ram", "model_tags",
    "no_ui", "mmproj_url", "pooling",
}
NEUTRAL = (None, False, 0, [], "auto", "last", "mean")
# text of a test -> text that takes any model's tokens, any build's name, and an empty content before the first token
REPLACED = (
    (r"== (n_prompt|n_cache|n_tokens|n_token_output|bosId)\b", r"== Own(\1)"),
    (r"(most_relevant|least_relevant)\[\"index\"\] == (\d)", r'\1["index"] == Own(\2)'),
    (r"\.startswith\(\"b\"\)", r'.startswith("")'),
    (r"(delta\"\]\[\"content\"\]|delta\.content) is None", r'\1 in (None, "")'),
    (r"assert len\(choice\['delta'\]\['content'\]\) > 0", "assert choice['delta']['content'] is not None"),
)
# pattern of a test's name, failed statement and last refusal -> verdict and kind of the reason
REASONS = (
    (r"unknown_url|there is nothing at", "refused", "path"),
    (r"__verbose|saw_progress|last_progress|len\(progress\)|\"(truncated|has_new_line|tokens|timings|prompt_ms"
     r"|generation_settings|generation_settings/n_predict|completion_probabilities|predicted_per_second)\"",
     "not applicable", "field of llama.cpp's own"),
    (r"Process-Start-Time|test_metrics_disabled", "not applicable", "metrics of llama.cpp's own"),
    (r"exceed_context_size_error|authentication_error", "not applicable", "type of an error that isn't OpenAI's"),
    (r"test_reasoning|test_date_inside_prompt", "not applicable", "variable that llama.cpp gives templates"),
    (r"test_slot_ctx_not_exceeded|test_ctx_shift_disabled_long", "not applicable", "length in another model's tokens"),
    (r"test_embedding_error_prompt_too_long", "not applicable", "text that is cut by default"),
    (r"test_invalid_chat_completion_req.messages7", "not applicable", "two answers in a row, which aren't continued"),
    (r"test_cors", "not applicable", "value of a CORS header"),
    (r"; 400 ", "refused", "field"),
)
CONFTEST = """
import pytest
from utils import server_instances


@pytest.fixture(autouse=True)
def stop_servers():
    yield
    for server in list(server_instances):
        server.stop()
"""


class NotOffered(Exception):
    """Server that `anec serve` can't be; the message is the option."""


class Own:
    """Value that depends on the model; equals any other."""

    differences = []

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        if self.value != other:
            Own.differences.append(f"{other!r} instead of {self.value!r}")
        return True


def match_regex(regex, text):
    if not re.search(regex, text, re.I | re.M | re.S):
        Own.differences.append(f"{text!r} instead of {regex!r}")
    return True


def ranks(folder):
    """Makes a model that ranks texts out of the one for vectors; its scores are meaningless."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(VECTORS, folder, ignore=shutil.ignore_patterns("1_Pooling", "modules.json"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "rank"}, "label2id": {"rank": 0}}
    (folder / "config.json").write_text(json.dumps(config))
    data, size = (folder / "model.safetensors").read_bytes(), config["hidden_size"]
    start = 8 + struct.unpack("<Q", data[:8])[0]
    tensors = json.loads(data[8:start])
    header = {name if name == "__metadata__" else f"bert.{name}": tensor for name, tensor in tensors.items()}
    head, end = struct.pack(f"<{size}f", *((7 * index % 11 - 5) / 50 for index in range(size))), len(data) - start
    header["classifier.weight"] = {"dtype": "F32", "shape": [1, size], "data_offsets": [end, end + 4 * size]}
    header["classifier.bias"] = {"dtype": "F32", "shape": [1], "data_offsets": [end + 4 * size, end + 4 * size + 4]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data[start:] + head + bytes(4))
    return folder


class Servers:
    """Starts `anec serve` in the place of `llama-server`."""

    def __init__(self, anec, folder, tests, running):
        self.anec, self.folder, self.tests, self.running = anec, folder, tests, running
        self.bundles, self.ranks = {}, ranks(folder / "ranks")

    def template(self, server):
        """Chat template of a server."""
        file, text = server.chat_template_file, server.chat_template
        if text == "llama3":
            file = "../../../models/templates/meta-llama-Llama-3.1-8B-Instruct.jinja"
        if file:
            return (self.tests / file).read_text(encoding="utf-8")
        return CHATML if text in (None, "chatml") else text

    def source(self, key):
        """Arguments of `anec convert` for a folder, or for the demo with a context, a template and a temperature."""
        if isinstance(key, Path):
            return [key]
        context, template, temperature = key
        source = self.folder / "source"
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(REPOSITORY / "demo/model", source)
        for name, more in (
            ("tokenizer_config.json", {"chat_template": template}),
            ("config.json", {"max_position_embeddings": max(context, 512)}),
            ("generation_config.json", {"temperature": temperature, "do_sample": temperature > 0}),
        ):
            config = json.loads((source / name).read_text()) | more
            (source / name).write_text(json.dumps(config))
        return ["-m", "demo", "--source", source, "--set", f"context={context}"]

    def bundle(self, server):
        """Bundle for a server."""
        key = VECTORS if server.server_embeddings else self.ranks if server.server_reranking else None
        if key is None:
            context = server.n_ctx // (1 if server.kv_unified else server.n_slots or 1)
            key = (context, self.template(server), server.temperature)
        if key not in self.bundles:
            self.bundles[key] = self.folder / f"{len(self.bundles)}.anec"
            command = [self.anec, "convert", "--no-compile", "--no-measure", "--force", "--out", self.bundles[key]]
            subprocess.run(command + self.source(key), check=True, capture_output=True)
        return self.bundles[key]

    def start(self, server):
        for option in sorted(OPTIONS):
            if getattr(server, option) not in NEUTRAL:
                raise NotOffered(option)
        if server.model_hf_repo is None:
            raise NotOffered("router")
        if not re.search("stories|bert-bge|jina-reranker", f"{server.model_hf_repo}/{server.model_hf_file}"):
            raise NotOffered("models of images, or with paths of their own")
        if "," in server.server_host:
            raise NotOffered("several addresses")
        options = ["--parallel", server.n_slots or 1, "--host", server.server_host, "--port", server.server_port]
        options += ["--name", server.model_alias, "--cors", server.cors_origins or "*"]
        options += ["--api-key", server.api_key] if server.api_key else []
        if server.model_draft:
            options += ["--draft", self.bundle(server), "--draft-tokens", server.spec_draft_n_max or 4]
        command = [self.anec, "serve", self.bundle(server), "--precision", "f32", *options]
        log = self.folder / "server.log"
        with log.open("w") as written:
            server.process = subprocess.Popen([str(part) for part in command], stdout=written, stderr=written)
        self.running.add(server)
        while True:
            assert server.process.poll() is None, log.read_text()
            try:
                if requests.get(server.make_url("/health")).status_code == 200:
                    return
            except requests.ConnectionError:
                pass
            time.sleep(0.02)


def request(server, path, data):
    """Request with the values that options of `llama-server` give to omitted fields."""
    if not path.endswith(("/completion", "/completions")) or not isinstance(data, dict):
        return data
    length = {"n_predict": server.n_predict or -1} if path in ("/completion", "/completions") else {}
    return {"seed": server.seed} | length | data


def answer(path, data, body):
    """Answer of `/v1/completions` in the form of `/completion`; other answers as they are."""
    if path not in ("/completion", "/completions") or "choices" not in body:
        return body
    usage, prompt = body.get("usage"), data["prompt"]
    more = {}
    if usage:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        numbers = {"cache_n": cached, "prompt_n": usage["prompt_tokens"] - cached}
        more["timings"] = numbers | {"predicted_n": usage["completion_tokens"]}
    texts = [
        {"content": choice["text"], "stop": choice["finish_reason"] is not None} | more for choice in body["choices"]
    ]
    several = isinstance(prompt, list) and not any(isinstance(part, int) for part in prompt)
    return texts if several else texts[0]


def replace(utils, servers):
    """Replaces the parts of llama.cpp's `utils` that its server and its models have to do with."""
    server = utils.ServerProcess
    make_url, make_request, make_stream_request = server.make_url, server.make_request, server.make_stream_request

    def whole(self, method, path, data=None, *more, **options):
        response = make_request(self, method, path, request(self, path, data), *more, **options)
        response.headers = requests.structures.CaseInsensitiveDict(response.headers)
        if response.status_code == 200 and isinstance(response.body, dict):
            response.body = answer(path, data, response.body)
        return response

    def streamed(self, method, path, data=None, *more, **options):
        for chunk in make_stream_request(self, method, path, request(self, path, data), *more, **options):
            yield answer(path, data, chunk)

    server.start = lambda self, *_, **__: servers.start(self)
    server.make_url = lambda self, path, host=None: make_url(self, PATHS.get(path, path), host)
    server.make_request, server.make_stream_request = whole, streamed
    utils.Own, utils.match_regex, utils.download_file = Own, match_regex, lambda address, *_: address


class Recorder:
    """Plugin of pytest that keeps a verdict on each test."""

    def __init__(self):
        self.verdicts, self.refusals = {}, []
        send = requests.Session.request

        def sent(session, method, url, *more, **options):
            response = send(session, method, url, *more, **options)
            if response.status_code >= 400 and not url.endswith("/health"):
                self.refusals.append(f"{response.status_code} {method} {url.split('/', 3)[3]}: {response.text}")
            return response

        requests.Session.request = sent

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = (yield).get_result()
        name = item.nodeid.removeprefix("unit/")
        if call.when == "setup":
            self.refusals.clear()
            Own.differences.clear()
        if report.skipped:
            self.verdicts[name] = ("not applicable", "skips itself", str(call.excinfo.value))
        elif report.failed:
            self.verdicts[name] = self.judge(name, call.excinfo)
        elif call.when == "call":
            verdict = "but for texts" if Own.differences else "equal"
            self.verdicts[name] = (verdict, "", "; ".join(Own.differences))

    def judge(self, name, info):
        """Verdict on a test that failed, the kind of its reason, and the reason."""
        if info.errisinstance(NotOffered):
            return "not applicable", f"option: {info.value}", ""
        statement, refusal = str(info.traceback[-1].statement), "".join(self.refusals[-1:])
        reason = f"{statement}: {type(info.value).__name__}: {info.value}; {refusal}"
        for pattern, verdict, kind in REASONS:
            if re.search(pattern, f"{name}: {statement}; {refusal or str(info.value)[:60]}"):
                return verdict, kind, reason
        return "wrong", "", reason


def main():
    anec, folder, tests = (Path(argument).resolve() for argument in sys.argv[1:4])
    copy = folder / "tests"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(tests, copy)
    (copy / "tmp").mkdir(exist_ok=True)
    (copy / "conftest.py").write_text(CONFTEST)
    for file in (copy / "utils.py", *copy.glob("unit/*.py")):
        text = file.read_text()
        for found, put in REPLACED:
            text = re.sub(found, put, text)
        file.write_text(text)
    sys.path.insert(0, str(copy))
    os.chdir(copy)
    import utils

    replace(utils, Servers(anec, folder, tests, utils.server_instances))
    recorder = Recorder()
    options = ["-qq", "--tb=no", "-rN", "-p", "no:cacheprovider", "-m", "not slow"]
    pytest.main([*options, *(["-k", sys.argv[4]] if sys.argv[4:] else []), "unit"], [recorder])
    for name, (verdict, kind, reason) in recorder.verdicts.items():
        if verdict != "equal":
            print(f"{verdict}: {name}: {kind}: {' '.join(reason.split())[:400]}", flush=True)
    kinds = collections.Counter((verdict, kind) for verdict, kind, _ in recorder.verdicts.values() if kind)
    for (verdict, kind), count in kinds.most_common():
        print(f"{count} {verdict}: {kind}")
    counts = collections.Counter(verdict for verdict, _, _ in recorder.verdicts.values())
    verdicts = ("equal", "but for texts", "refused", "wrong", "not applicable")
    print("| cases |", " | ".join(verdicts), "|")
    print("|", sum(counts.values()), "|", " | ".join(str(counts[verdict]) for verdict in verdicts), "|")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
