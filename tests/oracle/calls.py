"""Lets models say the texts of llama.cpp's tests of chat formats, and compares the messages that `anec serve` answers.

    pip install numpy
    python tests/oracle/calls.py target/release/anec FOLDER llama.cpp

The cases (template, text, functions, expected message) are written by a program made of `tests/test-chat.cpp`, so a
compiler of C++ is needed. A model says a text because each of its tokens is followed by one token alone; a bias of the
logits chooses the first. Answers are read whole and streamed. As in llama.cpp, white space around text doesn't count.

equal: content, reasoning, and calls are the same. refused: the server refuses the conversation. not applicable: a
format that anec doesn't read; texts that are cut, continued, or have a form; and reasoning that is to stay in the text.
wrong: the rest.

FOLDER takes the program, the models and the servers' logs. Exit code: 0 if no case is wrong, 1 otherwise.
"""

import collections
import json
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy
from clients import post, serve

CONTEXT, HIDDEN, END = 16384, 256, 256
# marks that a model's vocabulary has and its chat template lacks
LFM2 = ["<|tool_call_start|>", "<|tool_call_end|>"]
MARKS = {"LFM2-8B": LFM2, "LFM2.5-I": LFM2}
# templates whose reasoning or calls anec doesn't read; what the server says of calls tells the others
UNREAD = "Cohere2MoE|Kimi-K3|MiniMax-M3|muse-glimmer|functionary|Apriel"
# special tokens that aren't shown; as here they are text, they are removed
UNSEEN = "<[|]START_RESPONSE[|]>|<[|]END_RESPONSE[|]>|<[|]START_TEXT[|]>|<[|]END_TEXT[|]>|<[|]role_end[|]>|<[|]eot[|]>"
VERDICTS = ("equal", "refused", "wrong", "not applicable")
# the builder of test-chat.cpp, which prints a case instead of running it
PROGRAM = r"""
#include <cstdio>
#include <string>
#include <vector>
#define LOG_DBG(...)
using string = std::string;
struct common_chat_tool_call { string name, arguments, id; };
struct common_chat_msg_content_part { string type, text; };
struct common_chat_msg {
    string role, content; std::vector<common_chat_msg_content_part> content_parts;
    std::vector<common_chat_tool_call> tool_calls; string reasoning_content, tool_name, tool_call_id;
};
struct common_chat_tool { string name, description, parameters; };
enum common_reasoning_format {
    COMMON_REASONING_FORMAT_NONE, COMMON_REASONING_FORMAT_AUTO, COMMON_REASONING_FORMAT_DEEPSEEK_LEGACY,
    COMMON_REASONING_FORMAT_DEEPSEEK,
};
enum common_chat_tool_choice {
    COMMON_CHAT_TOOL_CHOICE_AUTO, COMMON_CHAT_TOOL_CHOICE_REQUIRED, COMMON_CHAT_TOOL_CHOICE_NONE,
};
enum common_chat_continuation {
    COMMON_CHAT_CONTINUATION_NONE, COMMON_CHAT_CONTINUATION_AUTO, COMMON_CHAT_CONTINUATION_REASONING,
    COMMON_CHAT_CONTINUATION_CONTENT,
};
static string quoted(const string & text) {
    string out = "\"";
    for (unsigned char letter : text) {
        char escaped[8];
        snprintf(escaped, 8, letter == '"' || letter == '\\' ? "\\%c" : letter < 32 ? "\\u%04x" : "%c", letter);
        out += escaped;
    }
    return out + '"';
}
template <typename Item, typename Print> static string list(const std::vector<Item> & items, Print print) {
    string out;
    for (const auto & item : items) out += (out.empty() ? "" : ",") + print(item);
    return "[" + out + "]";
}
static string message(const common_chat_msg & it) {
    return "{\"role\":" + quoted(it.role) + ",\"content\":" + quoted(it.content) + ",\"reasoning_content\":" +
        quoted(it.reasoning_content) + ",\"tool_calls\":" + list(it.tool_calls, [](const common_chat_tool_call & call) {
            return "[" + quoted(call.name) + "," + quoted(call.arguments) + "]";
        }) + "}";
}
static string tool(const common_chat_tool & it) {
    return "{\"type\":\"function\",\"function\":{\"name\":" + quoted(it.name) + ",\"description\":" +
        quoted(it.description) + ",\"parameters\":" + quoted(it.parameters) + "}}";
}
struct peg_test_builder {
    string path, input; common_chat_msg wanted;
    std::vector<common_chat_tool> offered; std::vector<common_chat_msg> asked;
    int format = 0, continued = 0; bool thinks = true, generates = true, cut = false, formed = false;
    using Self = peg_test_builder;
    Self & reasoning_format(common_reasoning_format it) { format = it; return *this; }
    Self & tools(std::vector<common_chat_tool> it) { offered = it; return *this; }
    Self & enable_thinking(bool it) { thinks = it; return *this; }
    Self & parallel_tool_calls(bool) { return *this; }
    Self & add_generation_prompt(bool it) { generates = it; return *this; }
    Self & continue_final_message(common_chat_continuation it) { continued = it; return *this; }
    Self & json_schema(const string & it) { formed = !it.empty(); return *this; }
    Self & is_partial(bool it) { cut = it; return *this; }
    Self & expect_reconstruction(bool = true) { return *this; }
    Self & expect(const common_chat_msg & it) { wanted = it; return *this; }
    Self & expect_content(const string & it) { wanted.content = it; return *this; }
    Self & expect_reasoning(const string & it) { wanted.reasoning_content = it; return *this; }
    Self & expect_tool_calls(std::vector<common_chat_tool_call> it) { wanted.tool_calls = it; return *this; }
    Self & tool_choice(common_chat_tool_choice) { return *this; }
    Self & messages(std::vector<common_chat_msg> it) { asked = it; return *this; }
    void run() {
        printf("{\"template\":%s,\"text\":%s,\"tools\":%s,\"messages\":%s,\"format\":%d,\"continued\":%d,\"thinks\":%d,"
            "\"generates\":%d,\"cut\":%d,\"formed\":%d,\"expected\":%s}\n", quoted(path).c_str(),
            quoted(input).c_str(), list(offered, tool).c_str(), list(asked, message).c_str(), format, continued, thinks,
            generates, cut, formed, message(wanted).c_str());
    }
};
struct peg_tester {
    string path;
    peg_tester(const string & path, bool = false) : path(path) {}
    peg_test_builder test(const string & input) { return {path, input}; }
};
"""


def extract(folder, source):
    """Cases of test-chat.cpp."""
    text = (source / "tests/test-chat.cpp").read_text(encoding="utf-8")
    start = text.index("static common_chat_tool special_function_tool{")
    middle = text.index("// Use for PEG parser implementations")
    functions = text.index("static void test_lfm2_parser(")
    lines = text[functions:text.index("static void test_template_generation_prompt(")].split("\n")
    # blocks that call the parser itself are left out
    while (at := next((at for at, line in enumerate(lines) if re.search("read_templates|templates_init", line)), None)):
        depth = len(lines[at]) - len(lines[at].lstrip())
        first = next(n for n in range(at, 0, -1) if re.fullmatch(" *{", lines[n]) and len(lines[n]) <= depth)
        last = next(n for n in range(at, len(lines)) if lines[n].rstrip() == lines[first].replace("{", "}"))
        del lines[first:last + 1]
    main = "int main() { test_template_output_peg_parsers(false); }"
    (folder / "cases.cpp").write_text("\n".join([PROGRAM, text[start:middle], *lines, main]), encoding="utf-8")
    subprocess.run(["c++", "-std=c++17", "-w", "-o", folder / "cases", folder / "cases.cpp"], check=True)
    printed = subprocess.run([folder / "cases"], check=True, capture_output=True).stdout.decode(errors="replace")
    cases = [json.loads(line) for line in printed.split("\n") if line]
    for function in (tool["function"] for case in cases for tool in case["tools"]):
        function["parameters"] = json.loads(function["parameters"])
    return cases


def letters():
    """Letters of byte-level vocabularies for the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def pieces(texts, marks):
    """Divides different texts into pieces of two or more letters, each of which there is once; none is a mark."""
    seen, out = set(marks), []
    for text in texts:
        parts, rest = [], text
        while rest:
            length = next((n for n in range(2, len(rest) + 1) if rest[:n] not in seen), 0)
            while not length:
                # a rest that was seen joins the piece before it
                last = parts.pop()
                seen.discard(last)
                rest = last + rest
                length = 0 if rest in seen else len(rest)
            parts.append(rest[:length])
            seen.add(rest[:length])
            rest = rest[length:]
        out.append(parts)
    return out


def build(anec, folder, template, marks, texts):
    """Converts a model that can say some texts; returns the first tokens of the texts."""
    source, alphabet = folder / "source", letters()
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir()
    divided = pieces(texts, marks)
    ending = "<|end of the case|>"
    vocab = {letter: byte for byte, letter in enumerate(alphabet)}
    vocab |= {mark: END + index for index, mark in enumerate([ending, *marks])}
    following, firsts, lasts = {}, [], []
    for parts in divided:
        firsts.append(len(vocab))
        for part in parts:
            token = len(vocab)
            vocab["".join(alphabet[byte] for byte in part.encode())] = token
            following[token] = token + 1
        del following[token]
        lasts.append(token)
    size = len(vocab)
    flags = {flag: flag == "special" for flag in ("special", "single_word", "lstrip", "rstrip", "normalized")}
    special = [{"id": vocab[mark], "content": mark, **flags} for mark in (ending, *marks)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = {
        "version": "1.0", "added_tokens": special, "pre_tokenizer": level, "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": size, "hidden_size": HIDDEN,
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64,
        "intermediate_size": 32, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6, "eos_token_id": END,
        "tie_word_embeddings": False, "hidden_act": "silu", "rope_theta": 10000.0,
    }
    for name, value in (
        ("tokenizer.json", tokenizer), ("config.json", config), ("generation_config.json", {"eos_token_id": END}),
        ("tokenizer_config.json", {"eos_token": ending, "bos_token": "", "chat_template": template}),
    ):
        (source / name).write_text(json.dumps(value))
    signs = numpy.random.default_rng(0).integers(0, 2, (size, HIDDEN)) * 2.0 - 1
    # tokens of prompts have no effect, so that only the bias counts after a prompt
    signs[:firsts[0]] = 0
    signs[lasts] = signs[lasts[0]]
    head = numpy.zeros((size, HIDDEN))
    head[END] = 4 * signs[lasts[0]]
    for token, after in following.items():
        head[after] = 4 * signs[token]
    layer, ones = "model.layers.0.", numpy.ones(HIDDEN)
    tensors = {"model.embed_tokens.weight": signs, "lm_head.weight": head, "model.norm.weight": ones}
    tensors |= {layer + name: ones for name in ("input_layernorm.weight", "post_attention_layernorm.weight")}
    for name, shape in (
        ("self_attn.q_proj", (64, HIDDEN)), ("self_attn.k_proj", (64, HIDDEN)), ("self_attn.v_proj", (64, HIDDEN)),
        ("self_attn.o_proj", (HIDDEN, 64)), ("mlp.gate_proj", (32, HIDDEN)), ("mlp.up_proj", (32, HIDDEN)),
        ("mlp.down_proj", (HIDDEN, 32)),
    ):
        tensors[f"{layer}{name}.weight"] = numpy.zeros(shape)
    header, data = {}, b""
    for name, tensor in tensors.items():
        more = tensor.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [len(data), len(data) + len(more)]}
        data += more
    text = json.dumps(header).encode()
    (source / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    command = [anec, "convert", source, "--out", folder / "bundle.anec", "--no-compile", "--no-measure", "--force"]
    command += ["--set", f"context={CONTEXT}", "--set", "quant.weights=none"]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return firsts


def streamed(url, body):
    """Message of a streamed answer."""
    message = {"content": "", "reasoning_content": "", "tool_calls": []}
    data = json.dumps(body | {"stream": True}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"})) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                delta = choice["delta"]
                for name in ("content", "reasoning_content"):
                    message[name] += delta.get(name) or ""
                for call in delta.get("tool_calls", []):
                    if "name" in call["function"]:
                        message["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


def normal(message, calls):
    """Content, reasoning and calls, without what doesn't count."""
    def value(arguments):
        try:
            return json.loads(arguments or "{}")
        except ValueError:
            return arguments

    read = (re.sub(UNSEEN, "", message.get(name) or "").strip() for name in ("content", "reasoning_content"))
    text, reasoning = read
    return text, reasoning, [(name, value(arguments)) for name, arguments in calls]


def judge(root, case, first):
    """Verdict on a case, and the reason."""
    if case["cut"] or case["continued"] or not case["generates"]:
        return "not applicable", "cut or continued"
    body = {"messages": case["messages"] or [{"role": "user", "content": "Hey there!"}], "temperature": 0}
    body["logit_bias"] = {str(first): 100}
    body["chat_template_kwargs"] = {name: bool(case["thinks"]) for name in ("enable_thinking", "thinking")}
    if case["tools"]:
        body["tools"] = case["tools"]
    for message in body["messages"]:
        calls = message.pop("tool_calls", [])
        if calls:
            functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
            message["tool_calls"] = [{"id": "0", "type": "function", "function": function} for function in functions]
    expected = normal(case["expected"], case["expected"]["tool_calls"])
    url, found = f"{root}/v1/chat/completions", []
    try:
        for message in (post(url, body)["choices"][0]["message"], streamed(url, body)):
            calls = [call["function"] for call in message.get("tool_calls") or []]
            found.append(normal(message, [(call["name"], call["arguments"]) for call in calls]))
    except urllib.error.HTTPError as error:
        return "refused", json.load(error)["error"]["message"]
    if found == [expected, expected]:
        return "equal", ""
    if case["format"] == 0 and found[0][1] or case["formed"]:
        return "not applicable", "reasoning in the text, or a form"
    try:
        known = not expected[2] or bool(post(url, body | {"tool_choice": "required", "max_tokens": 1}))
    except urllib.error.HTTPError as error:
        # calls in channels are read, but can't be required
        known = "isn't known" not in json.load(error)["error"]["message"] or "<|channel|>" in case["text"]
    different = f", streamed {found[1]}" * (found[0] != found[1])
    verdict = "wrong" if known and not re.search(UNREAD, case["template"]) else "not applicable"
    return verdict, f"{case['text']!r} is {found[0]}{different}, expected {expected}"


def main():
    anec, folder, source = (Path(argument).resolve() for argument in sys.argv[1:4])
    folder.mkdir(parents=True, exist_ok=True)
    families = collections.defaultdict(list)
    for case in extract(folder, source):
        families[case["template"]].append(case)
    total = collections.Counter()
    print("| template | cases |", " | ".join(VERDICTS), "|")
    for name, cases in families.items():
        if sys.argv[4:] and not any(word in name for word in sys.argv[4:]):
            continue
        counts, template = collections.Counter(), (source / name).read_text(encoding="utf-8")
        cases = [case for case in cases if len(case["text"]) > 1]
        texts = list(dict.fromkeys(case["text"] for case in cases))
        marks = next((marks for start, marks in MARKS.items() if start in name), [])
        firsts = dict(zip(texts, build(anec, folder, template, marks, texts)))
        with serve(anec, folder / "bundle.anec", folder / "server.log") as root:
            for case in cases:
                verdict, reason = judge(root, case, firsts[case["text"]])
                counts[verdict] += 1
                if verdict != "equal" and reason != "cut or continued":
                    print(f"{verdict}: {Path(name).stem}: {' '.join(reason.split(chr(10)))[:900]}", flush=True)
        total += counts
        print(f"| {Path(name).stem} | {sum(counts.values())} |", " | ".join(str(counts[it]) for it in VERDICTS), "|")
    print(f"| all | {sum(total.values())} |", " | ".join(str(total[it]) for it in VERDICTS), "|")
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
