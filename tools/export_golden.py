#!/usr/bin/env python3
"""Export a golden: what Hugging Face transformers computes for a model, position by position.

A golden is a safetensors file that the parity gate compares a bundle with. This one is *independent*: the graph that
computed it is not ours. A porter runs this once per model, on any machine with torch and transformers:

    python tools/export_golden.py --model Qwen/Qwen2.5-0.5B --prompt "The sea is" --out golden.safetensors
    python tools/export_golden.py --model ./folder --tokens 1,2,3 --hidden --out golden.safetensors
    python tools/export_golden.py --model ./folder --gguf-file model.gguf --text prompt.txt --greedy 64 --out g.safetensors

The file holds

    tokens    i32 [n]          the input; a tokenizer's own beginning-of-text token is part of it
    logits    f32 [n, vocab]   after every token, softcaps and logit scales applied; of the labels if it is a classifier; the final
                               hidden states if it is a model for vectors of texts, which has no head
    positions i32 [k]          with --positions: the positions of the k rows of logits
    losses    f32 [n - 1]      negative log likelihood of every token but the first, in nats: the perplexity of the text;
                               not for a classifier, nor for vectors
    hidden.N  f32 [n, hidden]  with --hidden: hidden.0 enters layer 0 (after any embedding multiplier),
                               hidden.N leaves layer N-1 (the residual stream, before the final norm; of a model for
                               vectors the last has passed it, and the first hasn't passed a norm of the embeddings)
    greedy    i32 [m]          with --greedy: the argmax continuation; ends early after an end-of-text token

and as metadata: reference, version, case, kind = "independent", and with a tokenizer the prompt's text, the tokens of other
texts (`tokenization`) and a rendered conversation (`chat`), by which the bundle's tokenizer and chat template are compared.

Everything is computed in float32 with eager attention, from weights widened to float32 whatever their stored type, in one
forward pass over all tokens. For RoPE whose frequencies depend on the length of the sequence (dynamic, longrope) that length
is n for every position of `logits` and `hidden.N`.
"""

import argparse
import json
import pathlib
import sys

import torch
import transformers
from transformers.utils import cached_file


def load(model, gguf_file=None, **kwargs):
    """The model in float32 with eager attention. Weights that are missing or left over are errors, not warnings."""
    if gguf_file is not None:
        kwargs["gguf_file"] = gguf_file
        if "config" not in kwargs and cached_file(model, "config.json", _raise_exceptions_for_missing_entries=False):
            # transformers rebuilds a configuration from few of a GGUF's keys: prefer the original.
            kwargs["config"] = transformers.AutoConfig.from_pretrained(model)
    loaded, report = auto_class(model, gguf_file).from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager", output_loading_info=True, **kwargs
    )
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(fault):
            raise SystemExit(f"{model}: {fault.replace('_', ' ')}: {sorted(map(str, report[fault]))}")
    if gguf_file is not None:
        refuse_what_was_dropped(cached_file(model, gguf_file), loaded, rebuilt="config" not in kwargs)
    return loaded.eval()


def auto_class(model, gguf_file=None):
    """What makes the model: a classifier of tokens where its configuration says that it is one; a GGUF holds none."""
    if gguf_file is not None:
        return transformers.AutoModelForCausalLM
    if gives_vectors(model):
        return transformers.AutoModel
    architectures = transformers.AutoConfig.from_pretrained(model).architectures or [""]
    if architectures[0].endswith("ForTokenClassification"):
        return transformers.AutoModelForTokenClassification
    generates = type(transformers.AutoConfig.from_pretrained(model)) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return transformers.AutoModelForCausalLM if generates else transformers.AutoModelForImageTextToText


def gives_vectors(model):
    """Whether a model is for vectors of texts: an encoder, or one whose folder has sentence-transformers' modules."""
    config = transformers.AutoConfig.from_pretrained(model)
    if (config.architectures or [""])[0].endswith("Classification"):
        return False
    encoder = config.model_type in ("bert", "roberta", "xlm-roberta", "mpnet", "deberta-v2", "modernbert") or getattr(config, "use_bidirectional_attention", False) in (True, "all")
    return bool(encoder or cached_file(model, "modules.json", _raise_exceptions_for_missing_entries=False))


def refuse_what_was_dropped(path, loaded, rebuilt):
    """Reading a GGUF, transformers silently drops biases that the configuration lacks and, without one, all RoPE scaling."""
    import gguf

    reader = gguf.GGUFReader(path)
    names = [tensor.name for tensor in reader.tensors]
    biases = sum(name.endswith(".bias") for name in names)
    used = sum(name.endswith(".bias") for name, _ in loaded.named_parameters())
    if biases != used:
        raise SystemExit(f"{path}: {biases} biases, of which transformers would use {used}; put the original config.json beside it")
    scaled = [name for name in [*names, *reader.fields] if ".rope.scaling." in name or name.startswith("rope_")]
    if rebuilt and scaled:
        raise SystemExit(f"{path}: transformers ignores {', '.join(scaled)}; put the original config.json beside it")


@torch.no_grad()
def golden(model, tokens, hidden=True):
    """Tensors `tokens`, `logits` and, if asked for, `hidden.N`, as numpy arrays."""
    captured, hooks = {}, []

    def keep(index, value):
        captured[f"hidden.{index}"] = value[0].detach().clone()

    def entering(_module, args, kwargs):
        keep(0, args[0] if args else kwargs["hidden_states"])

    def leaving(index):
        return lambda _module, _args, output: keep(index, output[0] if isinstance(output, tuple) else output)

    if hidden:
        # output_hidden_states doesn't fit: its last entry has passed the final norm, and a multiplier of the embedding
        # may be applied before or after its first.
        base = getattr(model.base_model, "language_model", model.base_model)
        layers = base.encoder.layer if hasattr(base, "encoder") else getattr(base, "layers", None) or base.h
        embeddings = getattr(base, "embeddings", None)
        first = getattr(embeddings, "LayerNorm", None) or getattr(embeddings, "norm", None) or layers[0]
        hooks.append(first.register_forward_pre_hook(entering, with_kwargs=True))
        hooks += [layer.register_forward_hook(leaving(index + 1)) for index, layer in enumerate(layers)]
    try:
        cache = {} if hasattr(model.base_model, "encoder") else {"use_cache": False}
        output = model(input_ids=torch.tensor([tokens]), **cache)
        logits = output.logits[0] if "logits" in output else output.last_hidden_state[0]
        if hidden and "logits" not in output:
            keep(len(layers), output.last_hidden_state)
    finally:
        for hook in hooks:
            hook.remove()
    tensors = {"tokens": torch.tensor(tokens, dtype=torch.int32), "logits": logits, **captured}
    return {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}


def losses(logits, tokens):
    """Negative log likelihood of every token but the first, in nats."""
    following = torch.tensor(tokens[1:], dtype=torch.long)
    return torch.nn.functional.cross_entropy(torch.from_numpy(logits[:-1]), following, reduction="none").numpy()


@torch.no_grad()
def greedy(model, tokens, count):
    """The argmax continuation. No generate(): a generation_config may hide a repetition penalty that changes the argmax."""
    parameters = getattr(model.config, "rope_parameters", None) or {}
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    # A cache keeps keys rotated with the frequencies of the length they were made at.
    cached = parameters.get("rope_type", "default") not in ("dynamic", "longrope")
    known, made, cache = list(tokens), [], None
    for _ in range(count):
        step = known[-1:] if cache is not None else known
        output = model(input_ids=torch.tensor([step]), past_key_values=cache, use_cache=cached)
        cache = output.past_key_values if cached else None
        made.append(int(output.logits[0, -1].argmax()))
        known.append(made[-1])
        if made[-1] in ends:
            break
    return torch.tensor(made, dtype=torch.int32).numpy()


PROBES = pathlib.Path(__file__).parent.parent / "src/validate/tokenization.json"
MESSAGES = [
    {"role": "user", "content": "What is 12 + 30?"},
    {"role": "assistant", "content": "42."},
    {"role": "user", "content": " Why?\n"},
]


def tokenization(tokenizer):
    """Metadata by which the tokenizer and the chat template of a bundle are compared."""
    texts = []
    for name, text in json.loads(PROBES.read_text(encoding="utf-8")).items():
        ids = tokenizer(text).input_ids
        decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        texts.append({"name": name, "text": text, "ids": ids, "decoded": decoded})
    metadata = {"tokenization": json.dumps(texts)}
    if tokenizer.chat_template and "strftime_now" not in tokenizer.chat_template:
        rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
        metadata["chat"] = json.dumps({"messages": MESSAGES, "rendered": rendered})
    return metadata


def save(path, tensors, case, **metadata):
    """Write the golden with the metadata that every reader expects. The same content gives the same bytes.

    Not the safetensors package's own writer: it puts metadata in an order that changes from run to run.
    """
    described = {"reference": "transformers", "version": transformers.__version__, "case": case, "kind": "independent"}
    header, offset = {"__metadata__": described | metadata}, 0
    for name, values in tensors.items():
        dtype = {"int32": "I32", "float32": "F32"}[str(values.dtype)]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [offset, offset + values.nbytes]}
        offset += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(values.tobytes() for values in tensors.values())
    pathlib.Path(path).write_bytes(len(text).to_bytes(8, "little") + text + data)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder or id; the folder of the GGUF with --gguf-file")
    parser.add_argument("--gguf-file", help="name of a GGUF inside --model, for architectures that transformers can read from GGUF")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", help="text, tokenized with the model's tokenizer")
    given.add_argument("--text", type=pathlib.Path, help="a UTF-8 file with the prompt")
    given.add_argument("--tokens", help="comma-separated token ids; needs no tokenizer")
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--hidden", action="store_true", help="store hidden.N as well")
    parser.add_argument("--positions", help="comma-separated positions whose logits are stored, ascending; all if not given")
    parser.add_argument("--greedy", type=int, default=0, metavar="N", help="store up to N tokens of greedy continuation")
    options = parser.parse_args()

    metadata = {}
    if options.tokens is not None:
        tokens = [int(token) for token in options.tokens.split(",")]
    else:
        text = options.prompt if options.prompt is not None else options.text.read_text(encoding="utf-8")
        files = {"gguf_file": options.gguf_file} if options.gguf_file else {}
        tokens = transformers.AutoTokenizer.from_pretrained(options.model, **files)(text).input_ids
        metadata["text"] = text
        metadata |= tokenization(transformers.AutoTokenizer.from_pretrained(options.model, **files))
    model = load(options.model, options.gguf_file)
    vocab = model.config.vocab_size
    if not tokens or not all(0 <= token < vocab for token in tokens):
        raise SystemExit(f"--tokens: need at least one id, each in 0..{vocab - 1}; found {tokens}")
    tensors = golden(model, tokens, options.hidden)
    if not type(model).__name__.endswith(("ForTokenClassification", "Model")):
        tensors["losses"] = losses(tensors["logits"], tokens)
    if options.positions is not None:
        positions = [int(position) for position in options.positions.split(",")]
        if positions != sorted(set(positions)) or not 0 <= positions[0] <= positions[-1] < len(tokens):
            raise SystemExit(f"--positions: need ascending positions in 0..{len(tokens) - 1}; found {positions}")
        tensors["positions"] = torch.tensor(positions, dtype=torch.int32).numpy()
        tensors["logits"] = tensors["logits"][positions]
    if options.greedy:
        tensors["greedy"] = greedy(model, tokens, options.greedy)
    case = pathlib.PurePath(options.model).name
    save(options.out, tensors, f"{case}/{options.gguf_file}" if options.gguf_file else case, **metadata)
    print(f"{options.out}: {len(tokens)} tokens, {', '.join(sorted(tensors))}", file=sys.stderr)


if __name__ == "__main__":
    main()
