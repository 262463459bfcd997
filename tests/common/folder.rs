//! The program under test, and what it writes.
#![allow(dead_code, reason = "each test uses what it needs")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value as Json;

/// A path of the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The program, where there is no Core ML compiler: a test that wants one brings its own.
pub fn anec() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_anec"));
    command.current_dir(env!("CARGO_MANIFEST_DIR")).env("PATH", "").env_remove("RUST_BACKTRACE");
    // nobody's caches
    let caches = Path::new(env!("CARGO_TARGET_TMPDIR")).join("caches");
    command.env("ANEC_CACHE", caches.join("anec")).env("HF_HOME", caches.join("huggingface"));
    command
}

/// Runs the program; returns exit code, stdout and stderr.
pub fn run(arguments: &[&str]) -> (i32, String, String) {
    finish(anec().args(arguments).output().unwrap())
}

/// Exit code, stdout and stderr of a finished program.
pub fn finish(output: Output) -> (i32, String, String) {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap_or(-1), text(output.stdout), text(output.stderr))
}

/// Every file under a folder with its content, by name.
pub fn contents(folder: &Path) -> std::collections::BTreeMap<String, Vec<u8>> {
    fn visit(root: &Path, folder: &Path, out: &mut std::collections::BTreeMap<String, Vec<u8>>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                visit(root, &path, out);
            } else {
                let name = path.strip_prefix(root).unwrap().display().to_string();
                out.insert(name, std::fs::read(&path).unwrap());
            }
        }
    }
    let mut out = Default::default();
    visit(folder, folder, &mut out);
    out
}

/// Reads a JSON file.
pub fn json(path: &Path) -> Json {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}
