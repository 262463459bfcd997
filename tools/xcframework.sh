#!/usr/bin/env bash
# Makes what Swift apps are linked with: swift/AnecFFI.xcframework and swift/Sources/Anec/anec.swift.
#
#   tools/xcframework.sh                 # on a Mac with Xcode, for macOS, iOS and iOS' simulator, all arm64
#   tools/xcframework.sh --check [SWIFTC …]   # anywhere: generates the Swift, and type-checks it with the compiler named
#
# The profile is dist unless ANEC_PROFILE names another. Needs Python with venv: uniffi-bindgen comes from PyPI, in the version of
# tests/requirements.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
profile=${ANEC_PROFILE:-dist}
folder=$(cargo metadata -q --no-deps --format-version 1 | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT

generate() { # LIBRARY FOLDER
  python3 -m venv "$room/python"
  "$room/python/bin/pip" install -q "$(grep '^uniffi-bindgen==' tests/requirements.txt)"
  "$room/python/bin/uniffi-bindgen" generate --no-format --metadata-no-deps --language swift --out-dir "$2" "$1"
}

if [ "${1-}" = --check ]; then
  shift
  library=${ANEC_BINDINGS:-}
  if [ -z "$library" ]; then
    cargo build --release -p anec-bindings
    library=$(ls "$folder"/release/libanec_bindings.{so,dylib} 2>/dev/null | head -n 1)
  fi
  generate "$library" "$room/swift"
  [ $# -gt 0 ] || { echo "generated, not type-checked: no compiler was named"; exit 0; }
  cp "$room/swift/anecFFI.modulemap" "$room/swift/module.modulemap"
  cp swift/Sources/Anec/*.swift swift/Example/{Assistant,BundleDownload}.swift "$room/swift"
  cd "$room/swift"
  "$@" -emit-module -module-name Anec -I . anec.swift Streams.swift
  "$@" -typecheck -module-name Example -I . Assistant.swift BundleDownload.swift
  echo "type-checked"
  exit 0
fi

[ "$(uname)" = Darwin ] || { echo "xcframework: only Xcode makes one; --check works here" >&2; exit 5; }
export MACOSX_DEPLOYMENT_TARGET=15.0 IPHONEOS_DEPLOYMENT_TARGET=18.0 # the first with states
targets="aarch64-apple-darwin aarch64-apple-ios aarch64-apple-ios-sim"
rustup target add $targets
for target in $targets; do
  cargo rustc --profile "$profile" -p anec-bindings --lib --crate-type staticlib --target "$target"
done
# symbols that say what is in it are stripped by the profile: the generator reads those of a build of its own
cargo build --release -p anec-bindings
generate "$folder/release/libanec_bindings.dylib" "$room/swift"
mkdir -p "$room/headers"
mv "$room/swift/anecFFI.h" "$room/headers"
mv "$room/swift/anecFFI.modulemap" "$room/headers/module.modulemap"
mv "$room/swift/anec.swift" swift/Sources/Anec/
rm -rf swift/AnecFFI.xcframework
arguments=()
for target in $targets; do
  arguments+=(-library "$folder/$target/$profile/libanec_bindings.a" -headers "$room/headers")
done
xcodebuild -create-xcframework "${arguments[@]}" -output swift/AnecFFI.xcframework
