#!/usr/bin/env bash
# Makes what Swift apps are linked with: swift/AnecFFI.xcframework and swift/Sources/Anec/anec.swift.
#
#   tools/xcframework.sh                  # on a Mac with Xcode: macOS, iOS and iOS' simulator, all arm64
#   tools/xcframework.sh --check SWIFTC   # on Linux or a Mac: type-checks the module, links it with the library of this
#                                         # machine, runs it, and compares its text with that of `anec run`
#
# The frameworks have the release profile, --check takes what the tests built. Needs Python with venv: uniffi-bindgen
# comes from PyPI, in the version of tests/requirements.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(cargo metadata -q --no-deps --format-version 1 | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT

# The Swift module of a library with its symbols, into $room/swift.
generate() { # LIBRARY
  python3 -m venv "$room/python"
  "$room/python/bin/pip" install -q "$(grep '^uniffi-bindgen==' tests/requirements.txt)"
  "$room/python/bin/uniffi-bindgen" generate --no-format --metadata-no-deps --language swift --out-dir "$room/swift" "$1"
  mv "$room/swift/anecFFI.modulemap" "$room/swift/module.modulemap"
}

if [ "${1-}" = --check ]; then
  [ $# = 2 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
  swiftc=$2 prompt="It was a fine morning, and"
  [ "$(uname)" = Darwin ] && extension=dylib || extension=so
  library=$folder/debug/deps/libanec_bindings.$extension
  # the tests' build makes both
  [ -e "$folder/debug/anec" ] && [ -e "$library" ] || cargo test --test integration --no-run
  generate "$library"
  "$folder/debug/anec" demo --out "$room/swift/demo.anec" >/dev/null 2>&1
  "$folder/debug/anec" run "$room/swift/demo.anec" --prompt "$prompt" --max-tokens 40 >"$room/expected" 2>/dev/null
  cp "$library" swift/Sources/Anec/Streams.swift swift/Example/{Assistant,BundleDownload}.swift swift/Check/main.swift "$room/swift"
  cd "$room/swift" # the compiler may see nothing but this folder
  "$swiftc" -emit-module -emit-library -module-name Anec -I . -L . -lanec_bindings -o libAnec.$extension anec.swift Streams.swift
  "$swiftc" -typecheck -module-name Example -I . Assistant.swift BundleDownload.swift
  "$swiftc" -module-name Check -I . -L . -lAnec -lanec_bindings -Xlinker -rpath -Xlinker '$ORIGIN' -Xlinker -rpath -Xlinker @executable_path \
    -o check main.swift
  ${ANEC_RUNNER:-} ./check demo.anec "$prompt" >"$room/found"
  cmp "$room/expected" "$room/found"
  echo "type-checked, linked, run: the text is that of anec run"
  exit 0
fi

[ "$(uname)" = Darwin ] || { echo "xcframework: only Xcode makes one; --check works here" >&2; exit 5; }
export MACOSX_DEPLOYMENT_TARGET=15.0 IPHONEOS_DEPLOYMENT_TARGET=18.0 # the first with states
targets="aarch64-apple-darwin aarch64-apple-ios aarch64-apple-ios-sim"
rustup target add $targets
for target in $targets; do
  cargo rustc --release -p anec-bindings --lib --crate-type staticlib --target "$target"
done
# the generator reads symbols, which the release profile strips
cargo build -p anec-bindings
generate "$folder/debug/libanec_bindings.dylib"
mkdir -p "$room/headers"
mv "$room/swift/anecFFI.h" "$room/swift/module.modulemap" "$room/headers"
mv "$room/swift/anec.swift" swift/Sources/Anec/
rm -rf swift/AnecFFI.xcframework
arguments=()
for target in $targets; do
  arguments+=(-library "$folder/$target/release/libanec_bindings.a" -headers "$room/headers")
done
xcodebuild -create-xcframework "${arguments[@]}" -output swift/AnecFFI.xcframework
