#!/usr/bin/env bash
# Counts the instructions that a program of another profile takes, and compares them with those that
# tests/instructions.rs keeps of the tests' profile: what users get must not be slower than what is tested.
#
#   tools/instructions.sh PROGRAM      # Linux on x86-64, with valgrind and Python
#
# Exit codes: 4 if it takes more than a tenth more; that of what failed.
set -euo pipefail
cd "$(dirname "$0")/.."
program=$1
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT

# Instructions of a command, on one thread.
count() {
  RAYON_NUM_THREADS=1 valgrind --tool=callgrind --callgrind-out-file=/dev/null "$program" "$@" --threads 1 2>&1 >/dev/null |
    sed -n 's/.*Collected : *//p'
}
prompt() { # TOKENS
  count run "$room/demo.anec" --ids "$(seq -s, "$1")" --ignore-eos --temperature 0 --max-tokens 1
}

"$program" convert -m demo --no-compile -o "$room/demo.anec" >/dev/null 2>&1
conversion=$(count convert -m demo -o "$room/again.anec" --set quant.granularity=per_channel --no-compile --no-measure)
few=$(prompt 8) many=$(prompt 200)
python3 - "$conversion" $(((many - few) / 192)) <<'PY'
import json, sys
kept = json.load(open("tests/fixtures/instructions.json"))
slower = False
for name, count in zip(("conversion", "prompt_token"), map(int, sys.argv[1:])):
    change = count / kept[name] - 1
    slower |= change > 0.1
    print(f"{name}: {count} instructions, {100 * change:+.1f} % against the tests")
sys.exit(4 if slower else 0)
PY
