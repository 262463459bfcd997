"""A runtime for bundles, from the words of book/src/bundle.md and no others: it knows no family and no option of the converter."""

import json
import struct
from pathlib import Path

import numpy as np

from aicode import Asset
from mil import Package


class Bundle:
    def __init__(self, folder):
        self.folder = Path(folder)
        self.json = json.loads((self.folder / "bundle.json").read_text())
        assert self.json["schema_version"] in (2, 3), "convert the model again"
        self.model = self.json["model"]
        self.functions = self.json["functions"]
        self.is_core_ai = self.json["manifest"].get("format") == "coreai"
        self.masked = np.float32(-4e4 if self.is_core_ai else -1e4)
        program = Asset if self.is_core_ai else Package
        self.packages = {name: program(self.folder / name) for name in {f["package"] for f in self.functions}}
        self.host = safetensors(self.folder / self.json["host"]["file"]["file"])

    def run(self, function, inputs, states):
        """Outputs by name."""
        for port in function["inputs"]:
            shape = inputs[port["name"]].shape
            fixed = [(n, extent) for n, extent in zip(shape, port["shape"], strict=True) if extent != "T"]
            assert all(n == extent for n, extent in fixed), (function["function"], port, shape)
        # the package's names for what the text keeps by id
        own = {state["name"]: states.setdefault(state["id"], zeros(state["shape"])) for state in function["states"]}
        outputs = self.packages[function["package"]].functions[function["function"]].run(inputs, own)
        for state in function["states"]:
            states[state["id"]] = own[state["name"]]
        return outputs

    def told(self, tokens, port, shape):
        """What layers are told of tokens: a column for each."""
        table = self.host[self.json["host"]["per_layer_embedding"]]
        width = table.shape[1] // self.model["num_layers"]
        columns = table[tokens, port["first"] * width : port["end"] * width].T.astype(np.float32)
        return pad(columns, max(shape[2:])).reshape(shape)


class Text:
    """A text of up to `length` tokens."""

    def __init__(self, bundle, length):
        self.bundle = bundle
        self.context = min(context for context in bundle.model["contexts"] if context >= length)
        of_context = lambda f: f["context"] == self.context
        self.layers = parts(bundle, "layers", of_context) + parts(bundle, "model", of_context)
        self.networks = parts(bundle, "feed_forward")
        self.experts = parts(bundle, "experts")
        self.head = parts(bundle, "head")
        self.rope = rope_of(bundle, length)
        self.position = 0
        self.states = {}
        self.carried = {}

    def forward(self, tokens, wish=None):
        """Logits of the tokens, a row for each."""
        rows = []
        while tokens:
            count, size = self.call_of(len(tokens), wish)
            hidden = pad(embed(self.bundle, tokens[:count], self.position), size)
            self.carried = {}
            for part in self.layers:
                hidden = self.part(part, hidden, count, self.position, tokens[:count])
            self.position += count
            # where the head is in the function of the layers, it has given them already
            rows.append(self.logits(hidden[:, :count]) if self.head else piece_of(self.carried, size)[:, :count].T)
            tokens = tokens[count:]
        return np.concatenate(rows)

    def call_of(self, left, wish):
        """How many of the tokens that are left go into the next call, and its columns, fillers among them."""
        most = min(left, wish or left)
        count = max((n for n in range(1, most + 1) if all(choose(part, n) for part in self.layers)), default=None)
        if count:
            return count, count
        functions = [f for part in self.layers for f in part]
        assert not any(carries(f) for f in functions), "a filler would change the states for good"
        size = next(n for n in range(most, self.context + 1) if all(choose(part, n) for part in self.layers))
        if any(port["role"] == "slice_begin" for f in functions for port in f["inputs"]):
            assert self.position + size <= self.context, "fillers end within the context"
        return most, size

    def part(self, part, hidden, count, position, tokens=()):
        """What leaves a part of the layers, with its feed-forward network or experts. `hidden` has a column for each token and filler."""
        size = hidden.shape[1]
        function = choose(part, size)
        hidden, carried = self.call(function, hidden, self.carried, count, position, tokens)
        for network in self.networks:
            if network[0]["stage"]["layer"] == function["stage"]["end"] - 1:
                hidden, carried = self.call(choose(network, size), hidden, carried, count, position, tokens)
        for experts in self.experts:
            stage = experts[0]["stage"]
            if stage["layer"] != function["stage"]["end"] - 1:
                continue
            shares = carried["expert_shares"].reshape(-1, size)
            if np.any(shares[stage["first"] : stage["end"]]):
                hidden, _ = self.call(choose(experts, size), hidden, carried, count, position)
        self.carried = carried
        return hidden

    def call(self, function, hidden, carried, count, position, tokens=()):
        size = hidden.shape[1]
        inputs = {}
        for port in function["inputs"]:
            shape = [size if extent == "T" else extent for extent in port["shape"]]
            role = port["role"]
            if role == "hidden":
                value = hidden.reshape(shape)
            elif role in ("router_state", "feed_forward_input", "expert_input", "expert_shares"):
                value = carried[role]
            elif role in ("shared_keys", "shared_values"):
                value = carried[role, port["layer"]]
            elif role == "embedding":
                value = pad(embed(self.bundle, tokens), size).reshape(shape)
            elif role == "per_layer_input":
                value = self.bundle.told(tokens, port, shape)
            elif role in ("state", "cache"):
                value = self.states.setdefault(port["id"], zeros(shape))
            else:
                value = self.made(port, shape, size, count, position)
            inputs[port["name"]] = value
        outputs = self.bundle.run(function, inputs, self.states)
        carried = dict(carried)
        for port in function["outputs"]:
            value = outputs[port["name"]]
            if port["role"] == "hidden":
                hidden = value.reshape(-1, size)
            elif port["role"] == "state":
                self.states[port["id"]] = value
            elif port["role"] == "cache_rows":
                cache = self.states[port["id"]] = self.states[port["id"]].copy()
                for t in range(count):
                    cache[:, :, (position + t) % cache.shape[2]] = value[:, :, t]
            elif "layer" in port:
                carried[port["role"], port["layer"]] = value
            else:
                carried[port["role"]] = value
        return hidden, carried

    def made(self, port, shape, size, count, position):
        """The inputs that depend on nothing but positions."""
        role = port["role"]
        i, j = np.arange(size)[:, None], np.arange(size)[None]
        # a filler sees what the last token sees
        positions = position + np.minimum(np.arange(size), count - 1)
        if role in ("rope_cos", "rope_sin"):
            cos, sin = self.rope[port["table"]]
            return (cos if role == "rope_cos" else sin)[positions].reshape(shape)
        if role == "attention_mask":
            mask = np.full((size, shape[3]), self.bundle.masked)
            for t, p in enumerate(positions):
                first = max(0, p + 1 - port["window"]) if "window" in port else 0
                mask[t, np.arange(first, p + 1) % shape[3]] = 0
            return mask.reshape(shape)
        if role == "past_mask":
            mask = np.full((size, shape[3]), self.bundle.masked)
            for t, p in enumerate(positions):
                first = max(0, p + 1 - port["window"]) if "window" in port else 0
                mask[t, np.arange(first, max(first, position)) % shape[3]] = 0
            return mask.reshape(shape)
        if role == "call_mask":
            # a filler sees what the last token sees
            i = np.minimum(i, count - 1)
            seen = (j <= i) & (i - j < port.get("window", size))
            return np.where(seen, np.float32(0), self.bundle.masked).reshape(shape)
        if role == "kv_write_mask":
            mask = np.zeros((shape[2], size), np.float32)
            for t in range(count):
                mask[(position + t) % shape[2], t] = 1
            return mask.reshape(shape)
        if role in ("slice_begin", "slice_end"):
            return np.array([0, 0, position if role == "slice_begin" else position + size, 0], np.int32)
        if role == "token_order":
            planes = [j <= i]
            for level in range(shape[1] - 1):
                block, half = 2 ** (level + 1), 2**level
                planes.append((i // block == j // block) & (i % block >= half) & (j % block < half))
            return np.stack(planes).astype(np.float32).reshape(shape)
        if role == "band_mask":
            seen = (abs(i - j) <= port["band"]) & (i < count) & (j < count)
            bias = np.float32(0)
            if port.get("biased"):
                table = self.bundle.host[self.bundle.json["host"]["attention_bias"]]
                bias = table[np.clip(len(table) // 2 + j - i, 0, len(table) - 1)].transpose(2, 0, 1)
            return np.where(seen, bias, self.bundle.masked).reshape(shape)
        raise AssertionError(f"no word of the role {role}")

    def logits(self, hidden):
        """A row for each column."""
        rows = []
        while hidden.shape[1]:
            left = hidden.shape[1]
            sizes = sorted({n for part in self.head for f in part for n in sizes_of(f)})
            sizes = [n for n in sizes if all(choose(part, n) for part in self.head)]
            size = max((n for n in sizes if n <= left), default=min(sizes))
            count = min(left, size)
            columns = pad(hidden[:, :count], size)
            pieces = []
            for part in self.head:
                function = choose(part, size)
                (port,) = function["inputs"]
                shape = [size if extent == "T" else extent for extent in port["shape"]]
                outputs = self.bundle.run(function, {port["name"]: columns.reshape(shape)}, {})
                pieces.append(piece_of({port["role"]: outputs[port["name"]] for port in function["outputs"]}, size))
            rows.append(np.concatenate(pieces)[:, :count].T)
            hidden = hidden[:, count:]
        return np.concatenate(rows)


def piece_of(by_role, size):
    """The logits of a piece of the head, a column for each token, with which the largest ones agree."""
    piece = by_role["logits"].reshape(-1, size)
    if "top_indices" in by_role:
        indices = by_role["top_indices"].reshape(-1, size)
        assert np.array_equal(indices, np.argsort(-piece, axis=0, kind="stable")[: len(indices)])
        assert np.array_equal(by_role["top_values"].reshape(-1, size), np.take_along_axis(piece, indices, 0))
    return piece


def label(bundle, tokens, wish=None):
    """The logits of a whole text, of a model that labels tokens."""
    text = Text(bundle, bundle.model["contexts"][-1])
    task = bundle.model["task"]
    total = len(tokens)
    hidden = embed(bundle, tokens)
    for part in text.layers:
        stage = part[0]["stage"]
        halo = (stage["end"] - stage["first"]) * task["band"]
        most = max(n for f in part for n in sizes_of(f))
        most = min(most, wish or most)
        results = []
        done = 0
        while done < total:
            first = max(0, done - halo)
            end = min(total, first + most)
            certain = end if end == total else end - halo
            assert certain > done, "the windows are too small for so long a text"
            size = min(n for f in part for n in sizes_of(f) if n >= end - first)
            window = text.part(part, pad(hidden[:, first:end], size), end - first, 0)
            results.append(window[:, done - first : certain - first])
            done = certain
        hidden = np.concatenate(results, 1)
    return text.logits(hidden)


def of_whole(bundle, tokens, types=0):
    """The labels' logits, or the vector, of a whole text."""
    text = Text(bundle, bundle.model["contexts"][-1])
    task = bundle.model["task"]
    count = len(tokens)
    size = next(n for n in range(count, text.context + 1) if all(choose(part, n) for part in text.layers))
    hidden = pad(embed(bundle, tokens, types=types), size)
    for part in text.layers:
        hidden = text.part(part, hidden, count, 0, tokens)
    hidden = hidden[:, :count]
    pooled = {"cls": hidden[:, :1], "mean": hidden.mean(1, keepdims=True), "last": hidden[:, -1:]}[task["pooling"]]
    if task["kind"] == "sequence_classification":
        return text.logits(pooled)
    for projection in task.get("projections", []):
        assert projection["activation"] == "identity" and "bias" not in projection
        pooled = bundle.host[projection["weight"]] @ pooled
    return pooled / np.linalg.norm(pooled) if task["normalize"] else pooled


def parts(bundle, kind, wanted=lambda function: True):
    """The functions of a stage in the order of a call, those of one part together."""
    found = {}
    for function in bundle.functions:
        if function["stage"]["kind"] == kind and wanted(function):
            found.setdefault(json.dumps(function["stage"]), []).append(function)
    return list(found.values())


def sizes_of(function):
    tokens = function["tokens"]
    return [tokens["fixed"]] if "fixed" in tokens else range(tokens["range"][0], tokens["range"][1] + 1)


def choose(part, size):
    """The function of a part for a number of tokens."""
    return next((function for function in part if size in sizes_of(function)), None)


def carries(function):
    roles = [state["role"] for state in function["states"]]
    roles += [port["holds"]["role"] for port in function["inputs"] if port["role"] == "state"]
    return any(role in ("convolution_state", "delay_state", "recurrent_state") for role in roles)


def rope_of(bundle, length):
    """Cosines and sines by table."""
    tables = {}
    for table in bundle.json["host"]["rope"]:
        variant = next(v for v in table["variants"] if v["max_length"] >= length)
        tables[table["table"]] = bundle.host[variant["cos"]], bundle.host[variant["sin"]]
    return tables


def embed(bundle, tokens, position=0, types=0):
    """The columns that enter the layers, of tokens from a position on."""
    host = bundle.json["host"]
    rows = bundle.host[host["embedding"]][tokens].astype(np.float32)
    if "positions" in host:
        rows = rows + bundle.host[host["positions"]][position : position + len(tokens)]
    if "token_types" in host:
        rows = rows + bundle.host[host["token_types"]][types]
    return np.pad(rows, [(0, 0), (0, bundle.model["hidden_size"] - rows.shape[1])]).T


def pad(hidden, size):
    return np.pad(hidden, [(0, 0), (0, size - hidden.shape[1])])


def zeros(shape):
    return np.zeros(shape, np.float32)


def safetensors(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            dtype = {"F16": np.float16, "F32": np.float32, "I32": np.int32}[entry["dtype"]]
            tensors[name] = np.frombuffer(data[start:end], dtype).reshape(entry["shape"])
    return tensors


def main():
    """Reads cases as JSON from stdin, writes the logits of each as f32 in rows."""
    import sys

    for case in json.load(sys.stdin):
        bundle = Bundle(case["bundle"])
        tokens, wish = case["tokens"], case.get("chunk")
        match bundle.model.get("task", {}).get("kind"):
            case None:
                logits = Text(bundle, len(tokens)).forward(tokens, wish)
            case "token_classification":
                logits = label(bundle, tokens, wish)
            case _:
                logits = of_whole(bundle, tokens, case.get("types", 0))
        logits.astype("<f4").tofile(case["out"])


if __name__ == "__main__":
    main()
