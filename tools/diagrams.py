#!/usr/bin/env python3
"""Draws the diagrams of the book: book/src/img/*.svg. Plots are drawn by the tests (tests/book/plots.rs).

Colors are classes, with a value for light and one for dark; a panel behind each diagram keeps it legible whatever the page.
"""
import textwrap
from pathlib import Path
from xml.sax.saxutils import escape

STYLE = """<style>
text{font:14px system-ui,sans-serif;fill:#1c2733}.s{font-size:12px}.m{font-family:ui-monospace,monospace;font-size:12px}
.h{font-weight:600}.c{text-anchor:middle}.e{text-anchor:end}.panel{fill:#fdfdfb}
.box{fill:#eef2f6;stroke:#6b7885}.a{fill:#d5e6f7;stroke:#0b63b5}.b{fill:#fbe3d0;stroke:#c2500a}.g{fill:#dcefdc;stroke:#2c7a35}
.off{fill:none;stroke:#9aa5b1;stroke-dasharray:4 3}.line{stroke:#4c5965;fill:none}.head{fill:#4c5965}.dim{fill:#5d6b78}
@media (prefers-color-scheme: dark){text{fill:#e4e9ee}.panel{fill:#1b2128}.box{fill:#2a333d;stroke:#8b98a5}
.a{fill:#1c3b57;stroke:#6db3f2}.b{fill:#4d2f18;stroke:#f0a36b}.g{fill:#1f3d24;stroke:#7cc787}.off{stroke:#66727e}
.line{stroke:#a9b4bf}.head{fill:#a9b4bf}.dim{fill:#9fabb7}}
</style>"""


class Drawing:
    def __init__(self, width, height, title):
        self.width = width
        self.out = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>{escape(title)}</title>", STYLE,
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            '<path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>',
            f'<rect class="panel" width="{width}" height="{height}" rx="8"/>']

    def text(self, x, y, words, kind=""):
        for at, line in enumerate(words.split("\n")):
            self.out.append(f'<text class="{kind}" x="{x}" y="{y + 16 * at}">{escape(line)}</text>')

    def note(self, x, y, words):
        """A caption, divided into lines that fit."""
        self.text(x, y, "\n".join(textwrap.wrap(words.replace("\n", " "), int((self.width - x - 15) / 6.7))), "s")

    def box(self, x, y, width, height, words="", kind="box", text="c"):
        self.out.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>')
        lines = words.split("\n")
        self.text(x + width / 2, y + height / 2 + 5 - 8 * (len(lines) - 1), words, text)

    def line(self, *points, arrow=True, kind="line"):
        path = " L".join(f"{x} {y}" for x, y in points)
        head = ' marker-end="url(#arrow)"' if arrow else ""
        self.out.append(f'<path class="{kind}" d="M{path}"{head}/>')

    def save(self, name):
        path = Path(__file__).parent.parent / "book/src/img" / f"{name}.svg"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(self.out) + "\n</svg>\n")


def devices():
    d = Drawing(720, 320, "Core ML decides where each operation runs")
    d.box(20, 90, 130, 70, ".mlpackage\nMIL program\nand weights")
    d.line((150, 125), (200, 125))
    d.box(200, 90, 130, 70, "Core ML\ncompiles and\nplans", "a")
    for y, name, words in ((20, "g", "Neural Engine\nfp16, fixed shapes, static graph"), (105, "box", "GPU\nnot allowed by anec's default"),
                           (190, "b", "CPU\neverything that isn't taken elsewhere")):
        d.box(430, y, 270, 60, words, name, "c s")
        d.line((330, 125), (380, 125), (380, y + 30), (430, y + 30))
    d.note(20, 285, "The plan (MLComputePlan) names a preferred\ndevice for each operation. It can be read on a Mac\nonly; an operation that falls to the CPU cuts the graph.")
    d.save("devices")


def phases():
    d = Drawing(720, 265, "Prefill and decode")
    d.text(20, 30, "prefill: many tokens in a call", "h")
    d.box(20, 45, 680, 34, "weights read once for 64 tokens: bound by multiplications", "a")
    d.text(20, 115, "decode: one token in a call, each waits for the one before", "h")
    for at in range(8):
        d.box(20 + 86 * at, 130, 78, 34, "weights", "b")
        d.text(59 + 86 * at, 185, f"token {at + 1}", "c s")
    d.note(20, 215, "Every token reads all weights and the cache again: bound by bytes. A model of W bytes on an engine that reads B bytes a\nsecond generates at most B / W tokens a second, whatever its arithmetic can do.")
    d.save("phases")


def layer():
    d = Drawing(720, 330, "One layer of a decoder")
    d.line((20, 165), (700, 165))
    d.text(440, 155, "residual stream  [1, C, T, 1]", "s")
    for x, name, ops, words in ((60, "attention", ["norm", "q, k, v", "rotate", "scores,\nsoftmax", "output"], "cache of\nkeys, values"),
                                (420, "feed-forward", ["norm", "gate, up", "act × up", "down"], None)):
        d.text(x, 30, name, "h")
        y = 50
        width = 270 / len(ops)
        d.line((x - 10, 165), (x - 10, y + 30), (x, y + 30))
        for at, op in enumerate(ops):
            d.box(x + width * at + 2, y, width - 6, 60, op, "a" if op in ("q, k, v", "output", "gate, up", "down") else "box", "c s")
        d.line((x + 270, y + 30), (x + 280, y + 30), (x + 280, 158))
        d.out.append(f'<circle class="g" cx="{x + 280}" cy="165" r="9"/>')
        d.text(x + 280, 170, "+", "c")
        if words:
            d.box(x + width * 2 + 4, 215, width * 2 - 8, 50, words, "b", "c s")
            d.line((x + width * 3, 215), (x + width * 3.4, 112))
            d.line((x + width * 1.5, 112), (x + width * 2.2, 215))
    d.box(20, 290, 16, 16, "", "a")
    d.text(44, 303, "weights: a projection, written as a 1×1 convolution", "s")
    d.box(400, 290, 16, 16, "", "b")
    d.text(424, 303, "memory: survives from call to call", "s")
    d.save("layer")


def convolution():
    d = Drawing(720, 245, "A projection as a 1x1 convolution")
    d.box(30, 50, 130, 110, "weight W\n[O, I]")
    d.text(178, 110, "×", "c h")
    d.box(200, 50, 60, 110, "x\n[I, T]", "a")
    d.text(278, 110, "=", "c h")
    d.box(300, 50, 60, 110, "y\n[O, T]", "g")
    d.line((385, 105), (425, 105))
    d.text(405, 92, "is", "c s")
    d.box(440, 40, 260, 40, "weight  [O, I, 1, 1]", "box", "c m")
    d.box(440, 90, 260, 40, "x  [1, I, T, 1]", "a", "c m")
    d.box(440, 140, 260, 40, "conv(x, weight)  [1, O, T, 1]", "g", "c m")
    d.note(30, 205, "The channels are the features of a token; the tokens of a call lie along the height (layout bcs1, the default) or the width (bc1s: [1, I, 1, T]). A kernel of size 1 sees one token at a time.")
    d.save("convolution")


def layouts():
    d = Drawing(720, 265, "Two layouts of hidden states, and their padding")
    d.text(20, 30, "bcs1: [1, C, T, 1]", "h")
    d.text(380, 30, "bc1s: [1, C, 1, T]", "h")
    for row in range(5):
        d.box(20, 45 + 26 * row, 22, 22, "", "a")
        d.box(44, 45 + 26 * row, 290, 22, "", "off")
    d.text(190, 190, "a row for each channel and token: 1 element\nused, the rest of 64 bytes is padding", "c s")
    for row in range(5):
        for at in range(4):
            d.box(380 + 24 * at, 45 + 26 * row, 22, 22, "", "a")
        d.box(476, 45 + 26 * row, 220, 22, "", "off")
    d.text(540, 190, "a row for each channel: T elements used", "c s")
    d.note(20, 232, "Published (Apple, 2022): the last axis is padded. Contradicted in effect: a bcs1 model was fully resident (ane-book).")
    d.save("layouts")


def pipeline():
    d = Drawing(720, 260, "How anec converts")
    x = 15
    for name, words, kind in (("source", "GGUF\nsafetensors\nONNX", "box"), ("family", "model as\na graph of\nblocks", "a"), ("MIL", "typed IR\nverified", "a"),
                              ("weights", "transform\nquantize\nstream", "a"), ("package", ".mlpackage\nbundle.json", "g")):
        d.box(x, 50, 120, 80, words, kind)
        d.text(x + 60, 40, name, "c h")
        if x > 15:
            d.line((x - 22, 90), (x, 90))
        x += 142
    d.line((359, 130), (359, 175))
    d.box(229, 175, 260, 60, "CPU executor:\nruns the program that was emitted", "b", "c s")
    d.line((643, 130), (643, 175))
    d.box(550, 175, 155, 60, "Core ML (a Mac):\ncompile, plan, run", "off", "c s")
    d.text(20, 190, "plan: the same build,\nwith weights that have\nsizes and no bytes", "s")
    d.save("pipeline")


def call():
    d = Drawing(720, 325, "One call: what the host does and what the packages do")
    d.text(20, 30, "host", "h")
    d.text(150, 30, "functions of packages", "h")
    d.box(20, 50, 110, 50, "embedding\nrow of token", "b", "c s")
    d.box(20, 115, 110, 50, "rotary rows,\nmasks, place", "b", "c s")
    for at, name in enumerate(("layers 0–7", "layers 8–15", "layers 16–23")):
        d.box(160 + 125 * at, 50, 105, 115, f"{name}\n\nstates:\nkeys, values", "a", "c s")
        if at:
            d.line((140 + 125 * at, 90), (160 + 125 * at, 90))
    d.line((130, 75), (160, 75))
    d.line((130, 140), (160, 140))
    for at in range(3):
        d.box(560, 50 + 42 * at, 140, 34, f"LM head, piece {at}", "g", "c s")
        d.line((515, 105), (540, 105), (540, 67 + 42 * at), (560, 67 + 42 * at))
    d.line((630, 168), (630, 215), (520, 215))
    d.box(380, 195, 140, 40, "logits: sample", "b", "c s")
    d.line((380, 215), (10, 215), (10, 75), (20, 75))
    d.text(90, 208, "next token", "s")
    d.note(20, 265, "Packages of layers follow each other, so their times add up. Pieces of the head run side by side. Every arrow into a package is\na call with a price of its own; hidden states travel between packages as [1, C, T, 1] in fp16 (layout: bcs1).")
    d.save("call")


def cache_forms():
    d = Drawing(720, 330, "Three ways of writing the cache")
    for at, (name, words, lines) in enumerate((
            ("kv_write: mask", "cache · (1 − m) + m @ new", "the whole cache is read and\nwritten in each call; T may vary"),
            ("kv_write: slice", "slice_update at [p, p + T)", "rows of the call only; places are\ninputs, T is fixed"),
            ("state: host", "inputs, rows as outputs", "no state: the host appends;\ncaches are copied in"))):
        x = 20 + 235 * at
        d.text(x, 30, name, "h")
        for row in range(8):
            kind = ("b" if at == 0 else "g" if row == 5 else "box") if at < 2 else "box"
            d.box(x, 45 + 22 * row, 120, 18, "", kind)
        d.text(x + 128, 60, "slot 0", "s")
        d.text(x + 128, 45 + 22 * 5 + 14, "slot p", "s")
        d.text(x, 245, words, "m")
        d.text(x, 270, lines, "s")
        if at == 2:
            d.box(x + 128, 175, 70, 18, "new rows", "g", "c s")
            d.line((x + 160, 193), (x + 160, 225), (x + 60, 225), (x + 60, 222), kind="line")
    d.save("cache-forms")


def ring():
    d = Drawing(720, 225, "A cache with a window is a ring")
    d.text(20, 30, "window 4, S = 6 slots, position 9 is written to slot 9 mod 6 = 3", "h")
    for at, (position, kind) in enumerate(((6, "a"), (7, "a"), (8, "a"), (9, "g"), (4, "off"), (5, "off"))):
        d.box(60 + 100 * at, 60, 90, 50, f"position {position}", kind, "c s")
        d.text(105 + 100 * at, 130, f"slot {at}", "c s")
    d.note(20, 165, "Dashed: older than the window; the mask hides them until they are overwritten. S is larger than the window by what a call\nof several tokens needs: no token of a call may take a slot that another of it still sees.")
    d.save("ring")


def shards():
    d = Drawing(720, 290, "Functions share a weight file; each loaded function has its copy")
    d.text(20, 30, "on the disk", "h")
    d.box(20, 45, 300, 170, "", "off")
    d.box(40, 60, 120, 36, "function T = 1", "a", "c s")
    d.box(180, 60, 120, 36, "function T = 64", "a", "c s")
    d.box(40, 130, 260, 60, "weights/weight.bin\none copy", "g", "c s")
    d.line((100, 96), (100, 130))
    d.line((240, 96), (240, 130))
    d.text(390, 30, "loaded by Core ML", "h")
    for at, name in enumerate(("T = 1", "T = 64")):
        d.box(390 + 165 * at, 60, 140, 36, f"function {name}", "a", "c s")
        d.box(390 + 165 * at, 130, 140, 60, "weights,\na copy of its own", "b", "c s")
        d.line((460 + 165 * at, 96), (460 + 165 * at, 130))
    d.line((325, 130), (385, 130))
    d.note(20, 245, "Measured by anemll-forge: a package of 0.69 GB took 1.05 GB with one function loaded and 2.09 GB with two (coremltools#2351 reports the same).")
    d.save("functions")


def formats():
    d = Drawing(720, 315, "How a weight is stored")
    for at, (name, scales, words) in enumerate((
            ("int8, per tensor", "one s", "W = s · q"), ("int8, per channel", "s for each row", "W[o,i] = s[o] · q[o,i]"),
            ("palette, row scales", "P of 2ⁿ numbers", "y[o] = s[o] · Σ P[q[o,i]] x[i]"))):
        x = 20 + 235 * at
        d.text(x, 30, name, "h")
        for row in range(5):
            for column in range(6):
                d.box(x + 22 * column, 50 + 22 * row, 20, 20, str((row * 7 + column * 5) % 9 - 4) if at < 2 else str((row * 7 + column * 5) % 4), "a", "c s")
            if at:
                d.box(x + 140, 50 + 22 * row, 30, 20, "s", "b", "c s")
        if at == 0:
            d.box(x + 140, 94, 30, 20, "s", "b", "c s")
        if at == 2:
            for entry in range(4):
                d.box(x + 22 * entry * 1.4, 172, 28, 20, f"P{entry}", "g", "c s")
        d.text(x, 222, words, "m")
        d.text(x, 248, scales, "s")
    d.note(20, 280, "Blue: codes. Orange: scales in fp16. Green: the palette. One large weight makes the single scale of a tensor coarse for all others.")
    d.save("number-formats")


def rotation():
    d = Drawing(720, 250, "A rotation spreads a large channel")
    values = [3, 5, 4, 96, 6, 2, 5, 4, 3, 7, 4, 5]
    mean = 28
    for left, heights, name in ((30, values, "before: one channel is large"),
                                (390, [mean + (at * 37 % 11) - 5 for at in range(12)], "after x' = x Q: all alike")):
        d.text(left, 28, name, "h")
        for at, height in enumerate(heights):
            d.box(left + 24 * at, 150 - height, 18, height, "", "a" if height < 60 else "b")
        d.line((left - 5, 150), (left + 290, 150), arrow=False)
    d.note(30, 185, "‖x‖ is the same, so a norm without gain gives the same; readers take W Q, writers Qᵀ W. Heights are drawn, not measured.\nMeasured (CPU, Qwen2.5-Coder-0.5B): the largest |x| falls from 2182 to 199.")
    d.save("rotation")


def experts():
    d = Drawing(720, 260, "Three forms of a layer with experts")
    for at, (name, words) in enumerate((("packed", "one function: every expert is\nread, weights of 0 multiply"), ("split", "packages of several experts;\nunused ones aren't called"),
                                        ("routed", "a function for each expert;\nonly chosen ones are called"))):
        x = 20 + 235 * at
        d.text(x, 30, name, "h")
        d.box(x, 45, 210, 34, "attention, router", "box", "c s")
        if at == 0:
            d.box(x, 95, 210, 70, "", "a")
        for expert in range(8):
            place = (x + 6 + 25.5 * expert, 108)
            used = expert in (2, 5)
            kind = "g" if used else ("a" if at == 0 else "b" if at == 1 and expert // 4 == 0 or at == 1 else "off")
            d.box(place[0], place[1], 22, 44, str(expert), kind if not (at == 2 and not used) else "off", "c s")
        if at == 1:
            for group in range(2):
                d.box(x + 2 + 103 * group, 95, 101, 70, "", "off")
        d.text(x, 195, words, "s")
    d.text(20, 245, "Green: the experts that the router chose for the tokens of the call.", "s")
    d.save("experts")


def halves():
    d = Drawing(720, 265, "The range of half precision")
    marks = ((40, "6e-8", "smallest\nsubnormal"), (140, "6.1e-5", "smallest\nnormal"), (225, "2.4e-4", "below it\nx² is gone"), (330, "1", "11 bits\nof it"),
             (430, "256", "from it on\nx² is ∞"), (515, "4094", "slices,\nM1, A14"), (600, "32768", "sums,\nM1"), (675, "65504", "largest"))
    d.box(40, 80, 100, 24, "subnormal", "b", "c s")
    d.box(140, 80, 535, 24, "normal: 11 significant bits everywhere", "g", "c s")
    for x, value, words in marks:
        d.line((x, 72), (x, 112), arrow=False)
        d.text(x, 60, value, "c s")
        d.text(x, 132, words, "c s")
    d.text(20, 30, "|x| in fp16, logarithmic, not to scale", "h")
    d.note(20, 185, "6e-8, 6.1e-5, 2.4e-4, 256, 65504 follow from the format (IEEE 754 binary16). 4094 and 32768 are published measurements of\nthe Neural Engine (ane-guide, M1 and A14); anec simulates them under --precision ane. Subnormals are flushed in products\non M1 and M6, and kept on M5.")
    d.save("half-precision")


def speculation():
    d = Drawing(720, 265, "Speculation by the text's own past")
    d.text(20, 30, "a call of T = 4 checks three guesses", "h")
    for at, (word, kind) in enumerate((("last", "box"), ("guess 1", "a"), ("guess 2", "a"), ("guess 3", "a"))):
        d.box(30 + 130 * at, 50, 110, 34, word, kind, "c s")
        d.line((85 + 130 * at, 84), (85 + 130 * at, 112))
    for at, (word, kind) in enumerate((("= guess 1 ✓", "g"), ("= guess 2 ✓", "g"), ("≠ guess 3", "b"), ("dropped", "off"))):
        d.box(30 + 130 * at, 114, 110, 34, word, kind, "c s")
    d.text(560, 72, "inputs", "s")
    d.text(560, 136, "what the model says", "s")
    d.note(20, 185, "Two guesses are right, and the model's own token follows: three tokens for one call. The cache needs no undoing: wrong\nrows lie behind the position, the mask hides them, and later tokens overwrite them. A recurrent state has no such slots;\nit is kept and put back.")
    d.save("speculation")


def gates():
    d = Drawing(720, 280, "What each gate compares")
    rows = (("structure", "package", "its own declarations, bundle.json, digests", "anywhere", "g"), ("numerics", "program in fp16", "itself in f32, and simulated", "anywhere", "g"),
            ("parity", "program", "transformers' logits, layers, text", "anywhere", "g"), ("residency", "compute plan", "every op prefers the Neural Engine", "plan: a Mac", "b"),
            ("forecast", "program", "published rules: no proof, no verdict", "anywhere", "off"))
    for at, (name, left, right, where, kind) in enumerate(rows):
        y = 20 + 50 * at
        d.box(20, y, 110, 38, name, kind)
        d.box(160, y, 150, 38, left, "box", "c s")
        d.line((310, y + 19), (350, y + 19))
        d.box(350, y, 275, 38, right, "a", "c s")
        d.text(635, y + 24, where, "s")
    d.save("gates")


def road():
    d = Drawing(720, 470, "Which framework, which device, which form")
    d.box(20, 20, 300, 44, "most tokens per second?", "b")
    d.line((320, 42), (400, 42))
    d.text(345, 35, "yes", "s")
    d.box(400, 20, 300, 44, "GPU: Core AI on OS 27, MLX, llama.cpp", "off", "c s")
    d.line((170, 64), (170, 90))
    d.text(180, 82, "no: power, a free GPU, prefill, vectors", "s")
    d.box(20, 90, 300, 44, "OS 27 only, and its Core AI tools?", "b")
    d.line((320, 112), (400, 112))
    d.text(345, 105, "yes", "s")
    d.box(400, 90, 300, 44, "measure Core AI beside Core ML on the\ndevice: its way to the engine is younger", "off", "c s")
    d.line((170, 134), (170, 160))
    d.text(180, 152, "no", "s")
    d.box(20, 160, 680, 40, "Core ML on the Neural Engine", "g")
    for at, (name, words) in enumerate((
            ("M1 to M4, A14 to A19\nOS 15 to 26", "state: per_layer\nlengths.fixed: [1, 64]"), ("M5, or OS 27", "state: host\nlengths.fixed: [8, 64]\npackages below 1 GiB"),
            ("recurrent layers", "recurrent_states:\ninput_output"), ("encoders", "lengths.fixed:\n[128, 512]"))):
        x = 20 + 172 * at
        d.line((x + 82, 200), (x + 82, 222))
        d.box(x, 222, 164, 48, name, "box", "c s")
        d.line((x + 82, 270), (x + 82, 288))
        d.box(x, 288, 164, 64, words, "a", "c s")
    for at, (name, words) in enumerate((("M1", "one palette, row_scale"), ("A14, M2", "int8, quant.op: affine"), ("A15, M3 and later", "int8"), ("M6", "palette4, palette6"))):
        x = 20 + 172 * at
        d.box(x, 372, 164, 44, f"{name}\n{words}", "g", "c s")
    d.note(20, 440, "From published measurements, none of them ours. The last row is what weights each generation streams compressed; below 8 bits, check the parity gate.")
    d.save("road")


for draw in (devices, phases, layer, convolution, layouts, pipeline, call, cache_forms, ring, shards, formats, rotation, experts, halves,
             speculation, gates, road):
    draw()
