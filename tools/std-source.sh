# Sourced by scripts that compile for another target: `std_for TARGET check|build` makes cargo find the target's
# standard library. Where rustup has none, it is compiled from source, once, for checks or for programs: from the
# rust-src component, or else from Debian's package rust-src of the very version of rustc, verified by apt's signatures.
# The build that follows needs no -Z, so what cargo compiled for the host serves it, too.
# Needs `cache`, a folder, and `say`, which prints a line. Ends with status 3 if there is no library.

# The source of the standard library, into a folder of its own: from Debian.
fetch_std() {
  local apt=$cache/apt mirror list deb=
  command -v apt-get >/dev/null || { say "no standard library for $target, no rust-src, no apt"; exit 3; }
  say "fetching the source of the standard library $version from Debian"
  mkdir -p "$apt"/{lists/partial,archives/partial}
  # lists of its own: those of the system stay as they are
  local options=(-q -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o Dir::State::lists="$apt/lists" -o Dir::Cache="$apt" -o APT::Sandbox::User=root -o Acquire::Retries=3
    -o Acquire::Languages=none -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false)
  mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep -m1 '/debian/$') ||
    { say "apt knows no Debian mirror: run apt-get update first"; exit 3; }
  suites() { # KIND SUITE…
    local kind=$1 suite; shift
    for suite; do
      echo "$kind [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main"
    done > "$apt/sources.list"
    apt-get "${options[@]}" update >/dev/null || { say "apt can't reach Debian"; exit 3; }
  }
  tmp=$(mktemp -d "$cache/std.XXXXXX")
  for list in trixie-backports 'sid experimental trixie'; do
    suites deb $list
    deb=$(apt-cache "${options[@]}" madison rust-src | awk -F' *[|] *' '{print $2}' |
      grep -m1 "^${version//./\\.}+" || true)
    [ -z "$deb" ] || break
  done
  if [ -n "$deb" ]; then
    (cd "$tmp" && apt-get "${options[@]}" download "rust-src=$deb" >/dev/null)
    dpkg-deb --fsys-tarfile "$tmp"/rust-src_*.deb |
      tar -x -C "$tmp" --strip-components=4 --wildcards './usr/src/rustc-*/library'
  else # the binary package is gone: the source package stays longer
    suites deb-src sid experimental
    deb=$(apt-cache "${options[@]}" showsrc rustc | sed -n 's/^Version: //p' | grep -m1 "^${version//./\\.}+" || true)
    [ -n "$deb" ] || { say "Debian has no source of the standard library $version"; exit 3; }
    (cd "$tmp" && apt-get "${options[@]}" source --download-only --tar-only "rustc=$deb" >/dev/null)
    tar -x -C "$tmp" --strip-components=1 --wildcards '*/library' -f "$tmp"/rustc_*.orig.tar.xz
  fi
  [ -f "$tmp/library/Cargo.lock" ]
  mkdir -p "${1%/library}"; rm -rf "$1"; mv "$tmp/library" "$1"
}

std_for() {
  local target=$1 kind=$2 release version sysroot source own libraries variable
  tmp= built= # global: the trap runs outside
  trap 'rm -rf "$tmp" "$built"' EXIT
  release=$(rustc -vV | sed -n 's/^release: //p')
  version=${release%%-*}
  sysroot=$(rustc --print sysroot)
  [ ! -d "$sysroot/lib/rustlib/$target/lib" ] || return 0
  own=$cache/sysroot-$version-$kind
  libraries=$own/lib/rustlib/$target/lib
  if [ ! -d "$libraries" ]; then
    source=$sysroot/lib/rustlib/src/rust/library
    if [ ! -d "$source" ]; then
      source=$cache/std-$version/library
      [ -f "$source/Cargo.lock" ] || fetch_std "$source"
    fi
    built=$(mktemp -d "$cache/std-build.XXXXXX")
    cat > "$built/Cargo.toml" <<'TOML'
[package]
name = "empty"
edition = "2024"
[lib]
path = "lib.rs"
[profile.dev]
debug = false
[workspace]
TOML
    : > "$built/lib.rs"
    # where cargo looks for the source, and -Z with a stable toolchain
    __CARGO_TESTS_ONLY_SRC_ROOT=$source RUSTC_BOOTSTRAP=1 \
      cargo "$kind" -q -Zbuild-std=std,panic_abort,test --target "$target" \
      --manifest-path "$built/Cargo.toml" --target-dir "$built/target"
    mkdir -p "$built/lib" "${libraries%/lib}"
    cp "$built/target/$target"/debug/deps/lib*.r* "$built/lib"
    rm -rf "$built/lib"/libempty-*
    mv "$built/lib" "$libraries"
    rm -rf "$built"
  fi
  variable=CARGO_TARGET_$(echo "$target" | tr a-z- A-Z_)_RUSTFLAGS
  export "$variable=--sysroot=$own"
}
