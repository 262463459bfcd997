#!/usr/bin/env bash
# Packs a release of anec for one target: program, completions, manual pages, licence; and the archive's checksum.
#
#   tools/archive.sh PROGRAM TARGET FOLDER
#
# PROGRAM must run here: it writes its own completions and pages. Writes FOLDER/anec-TARGET.tar.gz and its .sha256.
set -euo pipefail
[ $# = 3 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
program=$(realpath "$1") target=$2 out=$3
root=$(cd "$(dirname "$0")/.." && pwd)
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT

name=anec-$target
mkdir -p "$out" "$room/$name/completions" "$room/$name/man"
install -m 755 "$program" "$room/$name/anec"
cp "$root/LICENSE" "$root/README.md" "$room/$name/"
"$program" completions bash >"$room/$name/completions/anec.bash"
"$program" completions zsh >"$room/$name/completions/_anec"
"$program" completions fish >"$room/$name/completions/anec.fish"
"$program" man --out "$room/$name/man" >/dev/null
tar -C "$room" -czf "$out/$name.tar.gz" "$name"
cd "$out"
if command -v sha256sum >/dev/null; then sha256sum "$name.tar.gz"; else shasum -a 256 "$name.tar.gz"; fi >"$name.tar.gz.sha256"
cat "$name.tar.gz.sha256"
