//! Additions to the standard library for writing folders safely: positioned reads and writes, free disk space, and
//! folders that appear complete or not at all.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use super::PackageError;
use anec_base::output::{is_partial_name, partial_name};

/// Writes all bytes at an offset.
#[cfg(unix)]
pub(super) fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

/// Fills the buffer from an offset.
#[cfg(unix)]
pub(super) fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset)
}

/// Writes all bytes at an offset.
#[cfg(windows)]
pub(super) fn write_at(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let written = std::os::windows::fs::FileExt::seek_write(file, bytes, offset)?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        bytes = &bytes[written..];
        offset += written as u64;
    }
    Ok(())
}

/// Fills the buffer from an offset.
#[cfg(windows)]
pub(super) fn read_at(file: &File, mut bytes: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let read = std::os::windows::fs::FileExt::seek_read(file, bytes, offset)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        bytes = &mut bytes[read..];
        offset += read as u64;
    }
    Ok(())
}

/// Sets the length of an empty file and reserves disk space if the system can.
pub(super) fn reserve(file: &File, length: u64) -> io::Result<()> {
    file.set_len(length)?;
    #[cfg(unix)]
    match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, length) {
        // file systems that can't reserve report a full disk on write
        Err(error) if error == rustix::io::Errno::NOSPC => return Err(error.into()),
        _ => {}
    }
    Ok(())
}

/// Number of bytes that an unprivileged user may write to the folder's disk, if known.
pub fn available_space(folder: &Path) -> Option<u64> {
    #[cfg(unix)]
    {
        let disk = rustix::fs::statvfs(folder).ok()?;
        disk.f_bavail.checked_mul(disk.f_frsize)
    }
    #[cfg(not(unix))]
    {
        let _ = folder;
        None
    }
}

/// Checks that an existing folder's disk has room for `needed` bytes.
///
/// # Errors
/// Returns [`PackageError::NoSpace`] if it hasn't.
pub fn check_space(folder: &Path, needed: u64) -> Result<(), PackageError> {
    match available_space(folder) {
        Some(available) if available < needed => {
            Err(PackageError::NoSpace { path: folder.to_owned(), needed, available })
        }
        _ => Ok(()),
    }
}

/// Folder that is being filled. It has a hidden name beside its final one until [`PartialFolder::publish`] and is
/// removed if dropped before. It is locked meanwhile, so that [`clean_partials`] leaves it alone.
pub struct PartialFolder(Partial);

impl PartialFolder {
    /// Returns an empty folder that will become `target`.
    ///
    /// # Errors
    /// Returns an error if `target` exists and `replace` is false, or the folder can't be created.
    pub fn create(target: &Path, replace: bool) -> Result<Self, PackageError> {
        Partial::create(target, replace, |path| {
            fs::create_dir(path)?;
            // where folders can't be locked, they are merely unprotected
            Ok(File::open(path).ok())
        })
        .map(PartialFolder)
    }

    /// Current path of the folder.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Renames the folder to its final name; with `sync`, after its content is on the disk.
    ///
    /// # Errors
    /// Returns an error if the folder can't be renamed, or `target` exists by now and isn't to be replaced.
    pub fn publish(self, sync: bool) -> Result<(), PackageError> {
        if sync {
            sync_tree(&self.0.path)?;
        }
        self.0.publish(sync)
    }
}

/// File or folder with a hidden name beside its final one.
struct Partial {
    path: PathBuf,
    target: PathBuf,
    replace: bool,
    /// Lock, held until dropped.
    _lock: Option<File>,
    published: bool,
}

impl Partial {
    fn create(
        target: &Path,
        replace: bool,
        make: impl Fn(&Path) -> io::Result<Option<File>>,
    ) -> Result<Self, PackageError> {
        let parent = parent(target);
        if target.file_name().is_none() {
            return Err(PackageError::Name { path: target.to_owned(), problem: "the path has no name".into() });
        }
        if !replace && fs::symlink_metadata(target).is_ok() {
            return Err(PackageError::Exists { path: target.to_owned() });
        }
        fs::create_dir_all(parent).map_err(|e| PackageError::write(parent, "create the folder", e))?;
        loop {
            let path = partial_name(target);
            match make(&path) {
                Ok(lock) => {
                    let lock = lock.filter(|f| f.try_lock().is_ok());
                    let target = target.to_owned();
                    return Ok(Partial { path, target, replace, _lock: lock, published: false });
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(e) => return Err(PackageError::write(&path, "create it", e)),
            }
        }
    }

    fn publish(mut self, sync: bool) -> Result<(), PackageError> {
        let refused = |e: io::Error| PackageError::write(&self.target, "give it its name", e);
        if fs::symlink_metadata(&self.target).is_err() {
            fs::rename(&self.path, &self.target).map_err(refused)?;
        } else if self.replace {
            replace(&self.path, &self.target).map_err(refused)?;
        } else {
            return Err(PackageError::Exists { path: self.target.clone() });
        }
        self.published = true;
        if sync {
            sync_folder(parent(&self.target));
        }
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.published {
            // the original error is reported; clean_partials removes what remains
            let _ = remove(&self.path);
        }
    }
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Replaces an existing folder, which moves to the new folder's old path and is removed.
fn replace(new: &Path, target: &Path) -> io::Result<()> {
    if exchange(new, target).is_ok() {
        return remove(new);
    }
    let mut aside = new.as_os_str().to_owned();
    aside.push("-old");
    let aside = PathBuf::from(aside);
    fs::rename(target, &aside)?;
    if let Err(error) = fs::rename(new, target) {
        fs::rename(&aside, target)?;
        return Err(error);
    }
    remove(&aside)
}

/// Swaps the names of two files or folders atomically.
///
/// # Errors
/// Returns an error, with nothing changed, if the system or the file system can't.
pub fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    #[cfg(any(target_os = "linux", target_os = "macos"))]
    {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        Ok(renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)?)
    }
    #[cfg(not(any(target_os = "linux", target_os = "macos")))]
    {
        let _ = (a, b);
        Err(io::ErrorKind::Unsupported.into())
    }
}

fn remove(path: &Path) -> io::Result<()> {
    if fs::symlink_metadata(path)?.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

/// Flushes a folder and its content to the disk.
fn sync_tree(folder: &Path) -> Result<(), PackageError> {
    let refused = |path: &Path, e| PackageError::write(path, "write to the disk", e);
    for entry in fs::read_dir(folder).map_err(|e| refused(folder, e))? {
        let path = entry.map_err(|e| refused(folder, e))?.path();
        if path.is_dir() {
            sync_tree(&path)?;
        } else {
            // opened for writing, because Windows flushes nothing else
            let file = File::options().write(true).open(&path).map_err(|e| refused(&path, e))?;
            file.sync_all().map_err(|e| refused(&path, e))?;
        }
    }
    sync_folder(folder);
    Ok(())
}

/// Flushes a folder's list of names. Some systems can't; names then reach the disk later.
fn sync_folder(folder: &Path) {
    if let Ok(file) = File::open(folder) {
        let _ = file.sync_all();
    }
}

/// Removes unfinished output of killed runs from a folder and returns its number. Output that a running process still
/// writes is left alone.
///
/// # Errors
/// Returns an error if the folder can't be read or something can't be removed.
pub fn clean_partials(folder: &Path) -> Result<usize, PackageError> {
    let mut removed = 0;
    let entries = match fs::read_dir(folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(0),
        other => other.map_err(|e| PackageError::unreadable(folder, e))?,
    };
    for entry in entries {
        let entry = entry.map_err(|e| PackageError::unreadable(folder, e))?;
        if !is_partial_name(&entry.file_name().to_string_lossy()) {
            continue;
        }
        let path = entry.path();
        let lock = File::open(&path).ok();
        if lock.as_ref().is_some_and(|f| matches!(f.try_lock(), Err(TryLockError::WouldBlock))) {
            continue;
        }
        remove(&path).map_err(|e| PackageError::write(&path, "remove what is unfinished", e))?;
        removed += 1;
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_folder_appears_whole_or_not_at_all() {
        let room = tempfile::tempdir().unwrap();
        let target = room.path().join("a/b/model.mlpackage");
        let partial = PartialFolder::create(&target, false).unwrap();
        fs::write(partial.path().join("file"), "new").unwrap();
        assert!(!target.exists());
        partial.publish(true).unwrap();
        assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "new");

        drop(PartialFolder::create(&target, true).unwrap());
        assert_eq!(names(target.parent().unwrap()), ["model.mlpackage"]);
    }

    #[test]
    fn existing_packages_are_replaced_only_on_request() {
        let room = tempfile::tempdir().unwrap();
        for (kind, make) in [
            ("folder", (|p: &Path| fs::create_dir(p).and_then(|()| fs::write(p.join("old"), ""))) as fn(&Path) -> _),
            ("file", |p: &Path| fs::write(p, "")),
        ] {
            let target = room.path().join(kind);
            make(&target).unwrap();
            assert!(matches!(PartialFolder::create(&target, false), Err(PackageError::Exists { .. })));
            let partial = PartialFolder::create(&target, true).unwrap();
            fs::write(partial.path().join("new"), "").unwrap();
            partial.publish(true).unwrap();
            assert_eq!(names(&target), ["new"]);
        }
        // the target appeared meanwhile
        let target = room.path().join("raced");
        let partial = PartialFolder::create(&target, false).unwrap();
        fs::create_dir(&target).unwrap();
        assert!(matches!(partial.publish(true), Err(PackageError::Exists { .. })));
        assert_eq!(names(room.path()), ["file", "folder", "raced"]);
    }

    #[test]
    fn only_abandoned_output_is_cleaned() {
        let room = tempfile::tempdir().unwrap();
        let dead = room.path().join(".m.mlpackage.partial-4194305-0");
        fs::create_dir(&dead).unwrap();
        fs::write(dead.join("x"), "").unwrap();
        fs::write(room.path().join(".b.zip.partial-4194305-12"), "").unwrap();
        let others = [".partial-1-0", ".m.partial-", ".m.partial-x", "m.partial-1-0", "weights.partial-1"];
        for other in others {
            fs::write(room.path().join(other), "").unwrap();
        }
        let alive = PartialFolder::create(&room.path().join("n.mlpackage"), false).unwrap();
        assert_eq!(clean_partials(room.path()).unwrap(), 2);
        assert!(alive.path().is_dir());
        assert_eq!(names(room.path()).len(), others.len() + 1);
        drop(alive);
        assert_eq!(clean_partials(&room.path().join("missing")).unwrap(), 0);
    }

    #[test]
    fn missing_disk_space_is_detected() {
        let room = tempfile::tempdir().unwrap();
        check_space(room.path(), 1).unwrap();
        if cfg!(unix) {
            assert!(matches!(check_space(room.path(), u64::MAX), Err(PackageError::NoSpace { .. })));
        }
    }
}
