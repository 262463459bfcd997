#!/usr/bin/env bash
# Runs the kernels' tests for 64-bit Arm processors, on one or under emulation.
#
#   tools/arm-test.sh [arguments of the tests…]
#
# On other processors it needs Debian's packages qemu-user-static and gcc-aarch64-linux-gnu. QEMU's processor has the
# instructions of Apple's that the kernels use (dotprod and i8mm), so the tests show correctness, not speed.
#
# Exit codes: cargo's; 3 if the tests could not be run here.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf 'arm-test: %s\n' "$*" >&2; }
if [ "$(uname -m)" = aarch64 ]; then
  exec cargo test -p anec-kernels --lib -- "$@"
fi
cache=${XDG_CACHE_HOME:-$HOME/.cache}/anec/mac-check
mkdir -p "$cache"
target=aarch64-unknown-linux-gnu
for tool in qemu-aarch64-static aarch64-linux-gnu-gcc; do
  command -v $tool >/dev/null || { say "$tool is missing: apt-get install qemu-user-static gcc-aarch64-linux-gnu libc6-dev-arm64-cross"; exit 3; }
done
. tools/std-source.sh
std_for $target build
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -cpu max -L /usr/aarch64-linux-gnu"
# all but the kernels unoptimised: little runs of it
cargo test --target $target --target-dir target/arm --config profile.dev.opt-level=0 -p anec-kernels --lib -- "$@"
