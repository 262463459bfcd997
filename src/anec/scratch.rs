//! Scratch folders beside an output path. One that a killed run left is removed by the next run that needs one there.

use std::fs::{self, File, TryLockError};
use std::path::Path;

use anec_base::{FileError, Result};
use tempfile::TempDir;

/// Beginning of the names of scratch folders.
const PREFIX: &str = ".anec-scratch-";

/// Folder that is removed when dropped, and locked until then.
#[derive(Debug)]
pub(crate) struct Scratch {
    folder: TempDir,
    /// `None` on systems that don't lock folders.
    _lock: Option<File>,
}

impl Scratch {
    /// Creates a folder in `parent`.
    ///
    /// # Errors
    /// If the system refuses.
    pub(crate) fn within(parent: &Path) -> Result<Scratch> {
        remove_abandoned(parent);
        loop {
            let folder = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent);
            let folder = folder.map_err(FileError::of(parent, "create a folder in"))?;
            let lock = File::open(folder.path()).ok();
            match lock.as_ref().map(File::try_lock) {
                // another run takes it for an abandoned one
                Some(Err(TryLockError::WouldBlock)) => {}
                _ => return Ok(Scratch { folder, _lock: lock }),
            }
        }
    }

    /// Path of the folder.
    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// Removes the scratch folders in `parent` that no run holds. What can't be locked or removed stays.
fn remove_abandoned(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let is_scratch = entry.file_name().to_string_lossy().starts_with(PREFIX);
        let folder = entry.path();
        if !is_scratch || !entry.file_type().is_ok_and(|found| found.is_dir()) {
            continue;
        }
        // the lock is held until the folder is gone
        if let Ok(lock) = File::open(&folder)
            && lock.try_lock().is_ok()
        {
            let _ = fs::remove_dir_all(&folder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_run_left_is_removed_and_what_another_run_uses_stays() {
        let room = tempfile::tempdir().unwrap();
        let [abandoned, other] = [format!("{PREFIX}abandoned"), "other".into()].map(|name| room.path().join(name));
        fs::create_dir_all(abandoned.join("bundle")).unwrap();
        fs::create_dir(&other).unwrap();
        let first = Scratch::within(room.path()).unwrap();
        let second = Scratch::within(room.path()).unwrap();
        assert!(first.path().exists() && second.path().exists() && other.exists());
        assert!(cfg!(not(unix)) || !abandoned.exists());
        let path = second.path().to_owned();
        drop(second);
        assert!(!path.exists());
    }
}
