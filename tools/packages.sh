#!/usr/bin/env bash
# Packs every published crate as for the registry, and prints the sizes of the packages.
#
#   tools/packages.sh            # packs them: are all files that the sources include there, is none too large?
#   tools/packages.sh --verify   # also compiles each from its package alone; takes as long as building everything
#
# Includes uncommitted files. Uploads nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
most=10000000 # bytes that the registry takes
folder=$(cargo metadata -q --no-deps --format-version 1 | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')/publish
verify=--no-verify
[ "${1-}" != --verify ] || verify=
rm -rf "$folder/package"
# those of Cargo.toml's with `publish = false` are for this repository alone
CARGO_TARGET_DIR=$folder cargo package --workspace --exclude anec-testing --exclude anec-bindings --allow-dirty --quiet $verify

failed=
for package in "$folder"/package/*.crate; do
  size=$(wc -c <"$package")
  printf '%9d %s\n' "$size" "$(basename "$package")"
  [ "$size" -lt $most ] || { echo "packages: that is more than the registry takes, $most bytes" >&2; failed=1; }
done
# files that crates read at compile time
for file in anec-manifest:manifests/demo.yaml anec-manifest:manifests/configs/demo.json anec-advice:tables/ane-rules.yaml anec-validate:gates.yaml anec-experiment:probes.yaml \
  anec-cli:demo/model/model.safetensors anec-cli:demo/golden.safetensors anec-cli:demo/redact/model/model.safetensors; do
  name=${file%%:*}
  tar -tzf "$folder/package/$name"-[0-9]*.crate | grep "^$name-[^/]*/${file#*:}\$" >/dev/null ||
    { echo "packages: $name lacks ${file#*:}" >&2; failed=1; }
done
[ -z "$failed" ]
