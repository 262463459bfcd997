#!/usr/bin/env bash
# Type-checks, lints or links anec for aarch64-apple-darwin on another system; or checks it for iOS.
#
#   tools/mac-check.sh [--ios] [--clippy | --link | --std] [cargo arguments…]
#
# Code under cfg(target_os = "macos") can't run elsewhere, but it can be compiled.
# --ios uses aarch64-apple-ios, which has no program to link: `--ios -p anec-bindings` checks the library for apps.
#
# The standard library for the target is the prebuilt one where rustup has it (`rustup target add
# aarch64-apple-darwin`), or else compiled from source (tools/std-source.sh). C and Objective-C of build scripts is not
# compiled: a stand-in compiler writes empty objects, which is all that a check needs. --std provides the standard
# library and does no more.
#
# --link makes a real, ad-hoc signed Mach-O executable with rustup's own rust-lld. PyPI's ziglang gives a C compiler and
# the symbols of libSystem; the symbols of the Objective-C runtime and of the frameworks are taken from the objc2
# crates.
#
# Exit codes: cargo's; 3 if the check could not be done here.
set -euo pipefail

target=aarch64-apple-darwin
export MACOSX_DEPLOYMENT_TARGET=15.0 IPHONEOS_DEPLOYMENT_TARGET=18.0 # the first with states
cache=${XDG_CACHE_HOME:-$HOME/.cache}/anec/mac-check
verb=check kind=check
say() { printf 'mac-check: %s\n' "$*" >&2; }
while :; do case ${1-} in
  --ios) target=aarch64-apple-ios; shift;;
  --clippy) verb=clippy; shift;;
  --link) verb=build kind=link; shift;;
  --std) kind=std; shift;;
  *) break;;
esac; done
[ $kind != link ] || [ $target = aarch64-apple-darwin ] || { say "only a program for macOS can be linked"; exit 2; }

cd "$(dirname "$0")/.."                      # rust-toolchain.toml decides which rustc
mkdir -p "$cache"

. tools/std-source.sh
std_for $target $( [ $kind = link ] && echo build || echo check )
[ $kind != std ] || exit 0

# A C compiler and archiver that write nothing. With an SDKROOT, nothing looks for xcrun.
bin=$cache/bin sdk=$cache/sdk
mkdir -p "$bin" "$sdk/usr/lib"
cat > "$bin/cc" <<'CC'
#!/bin/sh
prev=; for a in "$@"; do [ "$prev" = -o ] && : > "$a"; prev=$a; done; exit 0
CC
cat > "$bin/ar" <<'AR'
#!/bin/sh
for a in "$@"; do case $a in *.a) : > "$a"; exit 0;; esac; done; exit 0
AR
chmod +x "$bin/cc" "$bin/ar"

# For --link: real ones, and an SDK that is nothing but lists of symbols.
prepare_link() {
  if [ ! -f "$sdk/usr/lib/libSystem.tbd" ]; then
    say "installing zig (PyPI's ziglang)"
    python3 -m venv "$cache/zig" && "$cache/zig/bin/pip" -q install "ziglang${ZIG_VERSION:+==$ZIG_VERSION}" ||
      { say "ziglang can't be had"; exit 3; }
    "$cache/zig/bin/python" - "$sdk/usr/lib/libSystem.tbd" <<'PY'
import os, sys, ziglang
text = open(os.path.dirname(ziglang.__file__) + '/lib/libc/darwin/libSystem.tbd').read()
# zig 0.17 names an architecture that lld doesn't know
open(sys.argv[1], 'w').write(text.replace('arm64e.x1-', 'arm64-'))
PY
    for l in c m dl pthread System.B; do ln -sf libSystem.tbd "$sdk/usr/lib/lib$l.tbd"; done
  fi
  cat > "$bin/zcc" <<'CC'
#!/usr/bin/env bash
args=() skip=
for a in "$@"; do
  if [ -n "$skip" ]; then skip=; continue; fi
  case $a in
    -arch) skip=1;; -mmacosx-version-min=*|--target=*) ;;
    -xassembler-with-cpp) args+=(-x assembler-with-cpp);;
    -xobjective-c) args+=(-x objective-c);;
    *) args+=("$a");;
  esac
done
exec "${0%/bin/zcc}/zig/bin/python" -m ziglang cc -target aarch64-macos.15.0 \
  -fno-sanitize=undefined "${args[@]}"
CC
  printf '#!/bin/sh\nexec "${0%%/bin/zar}/zig/bin/python" -m ziglang ar "$@"\n' > "$bin/zar"
  chmod +x "$bin/zcc" "$bin/zar"
  cargo fetch -q --target $target
  cargo metadata -q --format-version 1 --filter-platform $target | python3 -c '
import json, os, re, sys
sdk = sys.argv[1]
def tbd(path, install, symbols, classes):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    open(path, "w").write(f"""--- !tapi-tbd
tbd-version: 4
targets: [ arm64-macos ]
install-name: {install!r}
exports:
  - targets: [ arm64-macos ]
    symbols: [ {", ".join(sorted(symbols))} ]
    objc-classes: [ {", ".join(sorted(classes))} ]
...
""")
tbd(f"{sdk}/usr/lib/libiconv.tbd", "/usr/lib/libiconv.2.dylib", ["_iconv", "_iconv_open", "_iconv_close"], [])
extern = re.compile(r"extern \"C(?:-unwind)?\"[^{]*\{(.*?)\n\s*\}", re.S)
item = re.compile(r"\b(?:fn|static)\s+(?:mut\s+)?(\w+)")
class_ = re.compile(r"extern_class!\(.*?pub struct (\w+)", re.S)
framework_of = re.compile(r"link\(name = \"(\w+)\", kind = \"framework\"\)")
def framework(name, symbols=(), classes=()):
    tbd(f"{sdk}/System/Library/Frameworks/{name}.framework/{name}.tbd",
        f"/System/Library/Frameworks/{name}.framework/Versions/A/{name}", symbols, classes)
for name in ["CoreFoundation", "Foundation", "Security", "SystemConfiguration"]:  # std and others name them
    framework(name)
for package in json.load(sys.stdin)["packages"]:
    if not package["name"].startswith("objc2"): continue
    root = os.path.dirname(package["manifest_path"]) + "/src"
    text = "\n".join(open(os.path.join(d, f), encoding="utf8").read()
                     for d, _, fs in os.walk(root) for f in fs if f.endswith(".rs"))
    code = re.sub(r"^\s*//.*$", "", text, flags=re.M)
    symbols = {"_" + s for b in extern.findall(code) for s in item.findall(b)}
    for name in set(framework_of.findall(code)):
        framework(name, symbols, class_.findall(code))
    if package["name"] == "objc2":
        symbols |= {"_" + s for s in re.findall(
            r"\b((?:objc|class|sel|method|object|protocol|ivar|property|imp)_\w+)\b", code)}
        symbols |= {"_objc_" + s for s in
                    "msgSend msgSendSuper exception_throw begin_catch end_catch exception_rethrow terminate".split()}
        symbols |= {"___objc_personality_v0", "_OBJC_EHTYPE_id"}
        tbd(f"{sdk}/usr/lib/libobjc.tbd", "/usr/lib/libobjc.A.dylib", symbols, {"NSObject"})
' "$sdk"
  export CARGO_TARGET_AARCH64_APPLE_DARWIN_LINKER=rust-lld
  export CARGO_TARGET_AARCH64_APPLE_DARWIN_RUSTFLAGS="${CARGO_TARGET_AARCH64_APPLE_DARWIN_RUSTFLAGS-} -Clinker-flavor=ld64.lld"
}

if [ "$(uname)" != Darwin ]; then
  cc=cc ar=ar
  if [ $kind = link ]; then prepare_link; cc=zcc ar=zar; fi
  export "CC_${target//-/_}=$bin/$cc" "CXX_${target//-/_}=$bin/$cc" "AR_${target//-/_}=$bin/$ar"
  export SDKROOT=$sdk
fi

# A program has a build folder of its own, so that no empty object meets the linker. A check uses what was compiled for
# the host: build scripts and macros.
if [ $kind = link ]; then
  folder=$(cargo metadata -q --no-deps --format-version 1 | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')
  export CARGO_TARGET_DIR=$folder/mac-link
fi
[ $# -gt 0 ] || set -- -p anec-cli -p anec # the program has no library of its own
start=$(date +%s)
# unoptimised: nothing is going to run
cargo $verb --target $target \
  --config profile.dev.opt-level=0 --lib --bins "$@"
say "$target: cargo $verb took $(( $(date +%s) - start )) s ($(rustc -V))"
