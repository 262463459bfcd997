//! Cache of compiled packages, by digest of their contents.

use std::path::{Path, PathBuf};

use anec_base::FileError;

use super::engine::Engine;
use super::error::CoreMlError;

/// Folder of compiled models.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// Creates a cache in a folder, which needn't exist yet.
    pub fn new(folder: PathBuf) -> Self {
        Cache { folder }
    }

    /// Returns the user's cache: `anec/compiled` in `XDG_CACHE_HOME` or in the system's cache folder.
    ///
    /// # Errors
    /// If there is no home folder.
    pub fn of_user() -> Result<Self, CoreMlError> {
        let caches = if cfg!(target_vendor = "apple") { "Library/Caches" } else { ".cache" };
        let home = || std::env::home_dir().map(|home| home.join(caches));
        let root = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home);
        let root =
            root.ok_or_else(|| CoreMlError::Unavailable("there is no home folder for compiled models".into()))?;
        Ok(Cache::new(root.join("anec/compiled")))
    }

    /// Returns the compiled model of a package; compiles it if it isn't cached. `digest` identifies the contents of the
    /// package.
    ///
    /// # Errors
    /// If Core ML rejects the package, or the system the folder.
    pub fn compiled(&self, engine: &impl Engine, package: &Path, digest: &str) -> Result<PathBuf, CoreMlError> {
        let target = self.folder.join(format!("{digest}.mlmodelc"));
        if target.exists() {
            return Ok(target);
        }
        std::fs::create_dir_all(&self.folder).map_err(FileError::of(&self.folder, "create"))?;
        let scratch = tempfile::Builder::new().prefix(".compiling-").tempdir_in(&self.folder);
        let scratch = scratch.map_err(FileError::of(&self.folder, "write to"))?;
        let compiled = scratch.path().join("model.mlmodelc");
        engine.compile(package, &compiled)?;
        match std::fs::rename(&compiled, &target) {
            Ok(()) => {}
            // another process was faster
            Err(_) if target.exists() => {}
            Err(error) => return Err(FileError::of(&target, "rename")(error).into()),
        }
        Ok(target)
    }
}

/// Moves a folder, across file systems if necessary.
///
/// # Errors
/// If the system refuses.
pub fn move_folder(from: &Path, to: &Path) -> Result<(), CoreMlError> {
    if std::fs::rename(from, to).is_ok() {
        return Ok(());
    }
    copy_folder(from, to)?;
    Ok(std::fs::remove_dir_all(from).map_err(FileError::of(from, "remove"))?)
}

fn copy_folder(from: &Path, to: &Path) -> Result<(), CoreMlError> {
    std::fs::create_dir_all(to).map_err(FileError::of(to, "create"))?;
    for entry in std::fs::read_dir(from).map_err(FileError::of(from, "read"))? {
        let entry = entry.map_err(FileError::of(from, "read"))?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if source.is_dir() {
            copy_folder(&source, &target)?;
        } else {
            std::fs::copy(&source, &target).map_err(FileError::of(&target, "write"))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_moved_whole() {
        let room = tempfile::tempdir().unwrap();
        let [from, to, copied] = ["from", "to", "copied"].map(|name| room.path().join(name));
        std::fs::create_dir_all(from.join("a/b")).unwrap();
        std::fs::write(from.join("a/b/c"), "c").unwrap();
        copy_folder(&from, &copied).unwrap();
        move_folder(&from, &to).unwrap();
        assert!(!from.exists());
        for folder in [to, copied] {
            assert_eq!(std::fs::read_to_string(folder.join("a/b/c")).unwrap(), "c");
        }
        assert!(move_folder(&from, &room.path().join("other")).is_err());
    }
}
