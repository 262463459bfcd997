//! What tests share.

pub mod engine;

use std::io::Write;
use std::path::{Path, PathBuf};

use crate::convert::progress::Progress;
use crate::convert::{Options, convert};
use crate::manifest::Manifest;

/// Converts the demo's model into a folder, with changes of its manifest (`key=value`).
pub fn convert_demo(out: &Path, changes: &[&str]) {
    let changes: Vec<String> = changes.iter().map(|change| (*change).to_owned()).collect();
    let manifest = Manifest::open("manifests/demo.yaml", &changes).unwrap();
    let progress = Progress::hidden();
    let out = Some(out.to_owned());
    convert(&Options { manifest, out, force: false, compile: false, progress }).unwrap();
}

/// A real model's file, out of the folder that tests/models.py fills: `ANEC_MODELS`, or `anec/models` in the user's cache
/// folder. Says so loudly, past the test harness, where it isn't there.
pub fn real_model(file: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("ANEC_MODELS").map(PathBuf::from).or_else(|| {
        let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home)?;
        Some(cache.join("anec/models"))
    });
    let path = folder.map(|folder| folder.join(file)).filter(|path| path.exists());
    if path.is_none() {
        let thread = std::thread::current();
        let test = thread.name().unwrap_or("a test");
        let message = format!("\n!!! SKIPPED: {test}: {file} isn't here; `python tests/models.py` fetches it !!!\n");
        // eprintln! would be captured
        let _ = std::io::stderr().write_all(message.as_bytes());
    }
    path
}
