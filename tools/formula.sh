#!/usr/bin/env bash
# Writes the Homebrew formula of a release from its archives' checksums.
#
#   tools/formula.sh VERSION URL FOLDER >anec.rb
#
# URL is where the archives are downloaded from, without the file's name; FOLDER holds the .sha256 files of all targets.
set -euo pipefail
[ $# = 3 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
version=$1 url=$2 folder=$3

digest() { # TARGET
  local file=$folder/anec-$1.tar.gz.sha256 digest
  [ -f "$file" ] || { echo "formula: $file is missing" >&2; exit 4; }
  digest=$(cut -d' ' -f1 "$file")
  [[ $digest =~ ^[0-9a-f]{64}$ ]] || { echo "formula: $file holds no SHA-256" >&2; exit 4; }
  printf %s "$digest"
}
mac=$(digest aarch64-apple-darwin)
intel=$(digest x86_64-unknown-linux-gnu)
arm=$(digest aarch64-unknown-linux-gnu)

cat <<RUBY
class Anec < Formula
  desc "Core ML compiler and runtime for language models on the Apple Neural Engine"
  homepage "${url%/releases/*}"
  version "$version"
  license "MIT"

  on_macos do
    depends_on arch: :arm64
    url "$url/anec-aarch64-apple-darwin.tar.gz"
    sha256 "$mac"
  end

  on_linux do
    on_intel do
      url "$url/anec-x86_64-unknown-linux-gnu.tar.gz"
      sha256 "$intel"
    end
    on_arm do
      url "$url/anec-aarch64-unknown-linux-gnu.tar.gz"
      sha256 "$arm"
    end
  end

  def install
    bin.install "anec"
    bash_completion.install "completions/anec.bash" => "anec"
    zsh_completion.install "completions/_anec"
    fish_completion.install "completions/anec.fish"
    man1.install Dir["man/*.1"]
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/anec --version")
    system bin/"anec", "demo", "--prompt", "It was"
  end
end
RUBY
