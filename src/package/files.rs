//! What the standard library lacks for writing folders safely: positioned reads and writes, room on the disk, and
//! folders that appear whole or not at all.

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

/// Reads exactly so many bytes from an offset.
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

/// Reads exactly so many bytes from an offset.
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

/// Gives an empty file its length, with room on the disk for it where the system can reserve that.
pub(super) fn reserve(file: &File, length: u64) -> io::Result<()> {
    file.set_len(length)?;
    #[cfg(unix)]
    match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, length) {
        // a file system that can't reserve finds out while writing
        Err(error) if error == rustix::io::Errno::NOSPC => return Err(error.into()),
        _ => {}
    }
    Ok(())
}

/// Bytes that an ordinary user may still write to the disk of a folder, if the system tells.
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

/// Whether there is room for so many bytes in a folder that exists.
///
/// # Errors
/// [`PackageError::NoSpace`].
pub fn check_space(folder: &Path, needed: u64) -> Result<(), PackageError> {
    match available_space(folder) {
        Some(available) if available < needed => {
            Err(PackageError::NoSpace { path: folder.to_owned(), needed, available })
        }
        _ => Ok(()),
    }
}

/// A folder that is being filled. It has a hidden name beside its final one until [`PartialFolder::publish`], and is
/// removed when dropped before. While it exists it is locked, so that [`clean_partials`] leaves it alone.
pub struct PartialFolder(Partial);

impl PartialFolder {
    /// An empty folder that will become `target`.
    ///
    /// # Errors
    /// When `target` exists and `replace` isn't given, or the system refuses.
    pub fn create(target: &Path, replace: bool) -> Result<Self, PackageError> {
        Partial::create(target, replace, |path| {
            fs::create_dir(path)?;
            // locks work on folders in most places; elsewhere the folder is merely not protected
            Ok(File::open(path).ok())
        })
        .map(PartialFolder)
    }

    /// Where the folder is now.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Gives the folder its final name; with `sync`, once everything in it is on the disk.
    ///
    /// # Errors
    /// When the system refuses, or `target` exists by now and isn't to be replaced.
    pub fn publish(self, sync: bool) -> Result<(), PackageError> {
        if sync {
            sync_tree(&self.0.path)?;
        }
        self.0.publish(sync)
    }
}

/// Something that has a hidden name beside its final one.
struct Partial {
    path: PathBuf,
    target: PathBuf,
    replace: bool,
    /// Locked while this exists.
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
            // the error that brought us here is the one to report; clean_partials finds what is left
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

/// Puts a folder in the place of what is there, which ends up at the folder's old path and is removed.
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

/// Gives two things each other's name in one step.
///
/// # Errors
/// Where the system or the file system can't; nothing has changed then.
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

/// Makes the system write a folder and all it holds to the disk.
fn sync_tree(folder: &Path) -> Result<(), PackageError> {
    let refused = |path: &Path, e| PackageError::write(path, "write to the disk", e);
    for entry in fs::read_dir(folder).map_err(|e| refused(folder, e))? {
        let path = entry.map_err(|e| refused(folder, e))?.path();
        if path.is_dir() {
            sync_tree(&path)?;
        } else {
            // opened for writing: Windows flushes nothing else
            let file = File::options().write(true).open(&path).map_err(|e| refused(&path, e))?;
            file.sync_all().map_err(|e| refused(&path, e))?;
        }
    }
    sync_folder(folder);
    Ok(())
}

/// Makes the system write a folder's list of names; some systems can't, and then the names follow later.
fn sync_folder(folder: &Path) {
    if let Ok(file) = File::open(folder) {
        let _ = file.sync_all();
    }
}

/// Removes what killed runs left unfinished in a folder, and tells how many that were. What a running process still
/// writes is left alone.
///
/// # Errors
/// When the folder can't be read or something can't be removed.
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
    fn what_exists_is_replaced_only_when_asked() {
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
        // it appeared while the folder was being filled
        let target = room.path().join("raced");
        let partial = PartialFolder::create(&target, false).unwrap();
        fs::create_dir(&target).unwrap();
        assert!(matches!(partial.publish(true), Err(PackageError::Exists { .. })));
        assert_eq!(names(room.path()), ["file", "folder", "raced"]);
    }

    #[test]
    fn only_what_nobody_writes_any_more_is_cleaned() {
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
    fn room_is_looked_for() {
        let room = tempfile::tempdir().unwrap();
        check_space(room.path(), 1).unwrap();
        if cfg!(unix) {
            assert!(matches!(check_space(room.path(), u64::MAX), Err(PackageError::NoSpace { .. })));
        }
    }
}
