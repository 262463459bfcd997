#!/bin/sh
# Installs a wheel on a system with nothing but Python, and uses it: the program converts and runs the demo model, and
# the module converts, and generates text.
#
#   tools/wheel-check.sh FOLDER|FILE    # a wheel, or a folder that has one for this machine
#
# Needs Python with venv, and nothing of the build: a clean container will do.
set -eu
# which files these are is known before the folder changes
tests=$(cd "$(dirname "$0")/../tests" && pwd)
wheel=$1
[ ! -d "$wheel" ] || wheel=$(cd "$wheel" && pwd)
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/clean"
if [ -d "$wheel" ]; then
  "$room/clean/bin/pip" install -q --no-index --find-links "$wheel" anec
else
  "$room/clean/bin/pip" install -q --no-index "$wheel"
fi
# not where the sources are, with no other program `anec` before it
cd "$room"
export PATH="$room/clean/bin:$PATH" HOME="$room/home"
[ "$(command -v anec)" = "$room/clean/bin/anec" ]
anec --version
anec demo --out demo.anec >demo.txt
cat demo.txt
grep -q passed demo.txt
anec plan --manifest qwen3-0.6b >plan.txt
grep -q 'shapes from the built-in configuration' plan.txt
ANEC=$(command -v anec) python "$tests/bindings_client.py" demo.anec
python "$tests/toolchain_client.py" "$tests/../demo/model" "$room"
