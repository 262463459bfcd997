#!/usr/bin/env bash
# Builds the Python wheel, installs it where nothing else is, and runs what it installed.
#
#   tools/wheel.sh [FOLDER]      # the folder gets the wheel; a temporary one if none is given
#
# The profile is release unless ANEC_PROFILE names another: users get `dist`. Needs Python with venv, and cargo.
set -euo pipefail
cd "$(dirname "$0")/.."
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
out=${1:-$room/wheels}

python3 -m venv "$room/maturin"
"$room/maturin/bin/pip" install -q 'maturin>=1.9,<2'
# for this machine: which others it is for, the release workflow decides
"$room/maturin/bin/maturin" build --profile "${ANEC_PROFILE:-release}" --compatibility linux --auditwheel skip --out "$out"

python3 -m venv "$room/clean"
"$room/clean/bin/pip" install -q --no-index "$out"/anec-*.whl
cd "$room" # not where the sources are
export PATH=$room/clean/bin:$PATH HOME=$room/home
[ "$(command -v anec)" = "$room/clean/bin/anec" ]
anec --version
anec demo >demo.txt
grep -q passed demo.txt
anec plan --manifest qwen3-0.6b >plan.txt
grep -q 'shapes from the built-in configuration' plan.txt
ls -l "$out"
