//! Shared test support: real models, fixtures of the repository, doubles of Core ML and of the hub.

#![forbid(unsafe_code)]

#[allow(missing_docs, reason = "for tests of this workspace")]
pub mod fake;
#[allow(missing_docs, reason = "for tests of this workspace")]
pub mod hub;

use std::path::{Path, PathBuf};

/// Root of the repository, which holds `tests/fixtures` and `demo`.
pub fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Path of a real model in the folder that tests/models.py fills: `ANEC_MODELS`, or `anec/models` in the user's cache
/// folder. If the file is missing, reports that past the test harness and returns `None`.
pub fn real_model(file: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("ANEC_MODELS").map(PathBuf::from).or_else(|| {
        let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home)?;
        Some(cache.join("anec/models"))
    });
    let path = folder.map(|folder| folder.join(file)).filter(|path| path.exists());
    if path.is_none() {
        anec_base::skipped(&format!("{file} isn't here; `python tests/models.py` fetches it"));
    }
    path
}
