#!/usr/bin/env python3
"""Records the terminal session of the README as an SVG: `tools/record.py [ANEC] > book/src/img/session.svg`.

Runs the commands below in an empty folder, without a network, and draws what they print. The lines appear one after another, with the pauses
that the commands took (at most two seconds each); where animation is off, all of them are there.
"""
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from html import escape

COMMANDS = [
    "anec convert --manifest demo",
    'anec run demo.anec --prompt "It was a dark night" --max-tokens 40',
]
COLUMNS, ROW, LEFT, TOP = 104, 19, 20, 46


def session(program):
    """Lines with the second at which each appears, and whether it is a command."""
    lines, clock = [], 0.6
    with tempfile.TemporaryDirectory() as room:
        environment = {"PATH": "", "HOME": room, "ANEC_CACHE": room, "HF_HUB_OFFLINE": "1"}
        for command in COMMANDS:
            lines.append((clock, True, command))
            began = time.time()
            done = subprocess.run(["/bin/sh", "-c", f"anec() {{ '{program}' \"$@\"; }}; exec 2>&1; {command}"], cwd=room, env=environment,
                                  stdout=subprocess.PIPE, text=True, check=True)
            clock += 1 + min(time.time() - began, 2)
            for line in done.stdout.splitlines():
                for part in textwrap.wrap(line, COLUMNS, drop_whitespace=False, replace_whitespace=False) or [""]:
                    lines.append((clock, False, part))
                    clock += 0.12
            clock += 0.8
    return lines


def draw(lines):
    width, height = LEFT * 2 + int(COLUMNS * 7.85), TOP + ROW * len(lines) + 14
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
           "<title>anec converts the demo model and writes a text</title>",
           """<style>
text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#24303a;white-space:pre;animation:show .01s both}
.panel{fill:#f7f8f6;stroke:#cfd6dc}.bar{fill:#c3cbd2}.p{fill:#0b63b5;font-weight:600}
@keyframes show{from{opacity:0}to{opacity:1}}
@media (prefers-color-scheme: dark){text{fill:#dfe5ea}.panel{fill:#171c22;stroke:#39434d}.bar{fill:#4a5560}.p{fill:#6db3f2}}
@media (prefers-reduced-motion: reduce){text{animation:none}}
</style>""",
           f'<rect class="panel" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>']
    out += [f'<circle class="bar" cx="{22 + 18 * at}" cy="20" r="6"/>' for at in range(3)]
    for row, (clock, command, line) in enumerate(lines):
        shown = f'<tspan class="p">$ </tspan>{escape(line)}' if command else escape(line)
        out.append(f'<text xml:space="preserve" x="{LEFT}" y="{TOP + ROW * (row + 1) - 6}" style="animation-delay:{clock:.2f}s">{shown}</text>')
    return "\n".join(out) + "\n</svg>\n"


if __name__ == "__main__":
    program = sys.argv[1] if len(sys.argv) > 1 else "target/release/anec"
    sys.stdout.write(draw(session(os.path.abspath(program))))
