//! Files that are written whole or not at all.
//!
//! A file is written under an unguessable hidden name beside its final one and renamed when it is complete. Until then
//! the old file is untouched, and an error leaves nothing behind. The hidden file is created exclusively, so it is
//! never another program's file or link. If the target is a link, the file that it leads to is replaced. A target that
//! isn't a regular file (terminal, pipe, device) is written directly.

use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::file::FileError;

/// Marker in the names of unfinished files, between the final name and a random number.
const PARTIAL: &str = ".partial-";

/// File being written. Removed if dropped before [`OutputFile::commit`].
#[derive(Debug)]
pub struct OutputFile {
    file: File,
    target: PathBuf,
    /// Temporary name; `None` if the target itself is written.
    partial: Option<PathBuf>,
}

impl OutputFile {
    /// Creates a file that will become `path`.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn create(path: &Path) -> Result<Self, FileError> {
        let target = resolve(path).map_err(FileError::of(path, "create"))?;
        let special = fs::metadata(&target).is_ok_and(|found| !found.is_file() && !found.is_dir());
        if special || is_open_file(&target) {
            let file = File::options().append(true).open(path).map_err(FileError::of(path, "write"))?;
            return Ok(OutputFile { file, target: path.to_owned(), partial: None });
        }
        if target.is_dir() {
            return Err(FileError::of(path, "write")(io::ErrorKind::IsADirectory.into()));
        }
        loop {
            let partial = partial_name(&target);
            match File::options().read(true).write(true).create_new(true).open(&partial) {
                Ok(file) => return Ok(OutputFile { file, target, partial: Some(partial) }),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(FileError::of(path, "create")(error)),
            }
        }
    }

    /// Underlying file, for reads and writes at positions.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Renames the file to its final name.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn commit(mut self) -> Result<(), FileError> {
        let Some(partial) = self.partial.take() else { return Ok(()) };
        fs::rename(&partial, &self.target).map_err(|error| {
            let _ = fs::remove_file(&partial);
            FileError::of(&self.target, "rename")(error)
        })
    }

    /// Flushes the file to the disk.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn sync(&self) -> Result<(), FileError> {
        match self.partial {
            Some(_) => self.file.sync_all().map_err(FileError::of(&self.target, "write to the disk")),
            None => Ok(()),
        }
    }
}

impl Write for OutputFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        if let Some(partial) = &self.partial {
            // report the error that led here, not this one
            let _ = fs::remove_file(partial);
        }
    }
}

/// Writes a file atomically.
///
/// # Errors
/// If the system refuses.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let mut output = OutputFile::create(path)?;
    output.write_all(bytes).map_err(FileError::of(path, "write"))?;
    output.commit()
}

/// Returns an unguessable hidden name beside `target`.
pub fn partial_name(target: &Path) -> PathBuf {
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(target.file_name().unwrap_or_default());
    // the standard library's source of random numbers
    hidden.push(format!("{PARTIAL}{}", RandomState::new().build_hasher().finish()));
    target.with_file_name(hidden)
}

/// Whether a file name comes from [`partial_name`]. The number may contain `-`.
pub fn is_partial_name(name: &str) -> bool {
    let Some((before, number)) = name.strip_prefix('.').and_then(|n| n.rsplit_once(PARTIAL)) else { return false };
    let number = number.strip_suffix("-old").unwrap_or(number);
    !before.is_empty() && number.split('-').all(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

/// Follows symbolic links. The last target need not exist.
///
/// # Errors
/// If links form a cycle.
pub fn resolve(path: &Path) -> io::Result<PathBuf> {
    /// Maximum number of links followed, as in operating systems.
    const MAX_LINKS: usize = 40;
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        if is_open_file(&path) {
            return Ok(path);
        }
        match fs::read_link(&path) {
            Ok(to) => path = path.parent().unwrap_or(Path::new("")).join(to),
            // not a link, or doesn't exist
            Err(_) => return Ok(path),
        }
    }
    Err(io::Error::other("symbolic links form a cycle"))
}

/// Whether a path names an open file of a process, such as `/dev/stdout`. It may lead to a regular file, but the open
/// file is meant.
fn is_open_file(path: &Path) -> bool {
    let named = ["/dev/stdin", "/dev/stdout", "/dev/stderr"].iter().any(|name| path == Path::new(name));
    let folder = path.parent().unwrap_or(Path::new(""));
    named || folder == Path::new("/dev/fd") || (folder.starts_with("/proc") && folder.ends_with("fd"))
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
    fn a_file_appears_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        fs::write(folder.path().join("a.json.partial"), "mine").unwrap();
        write_file(&path, b"one").unwrap();
        let mut second = OutputFile::create(&path).unwrap();
        second.write_all(b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"one");
        drop(second);
        assert_eq!(names(folder.path()), ["a.json", "a.json.partial"]);
        write_file(&path, b"three").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"three");
        assert_eq!(fs::read(folder.path().join("a.json.partial")).unwrap(), b"mine");
        // a folder is no file
        assert!(write_file(folder.path(), b"").is_err());
        assert_eq!(names(folder.path()), ["a.json", "a.json.partial"]);
    }

    #[test]
    fn partial_names_are_recognized_and_differ() {
        let path = Path::new("some/b.zip");
        let (one, two) = (partial_name(path), partial_name(path));
        assert_ne!(one, two);
        assert_eq!(one.parent(), path.parent());
        assert!(is_partial_name(one.file_name().unwrap().to_str().unwrap()));
        assert!(!is_partial_name("b.zip.partial"));
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed_and_pipes_are_written() {
        use std::io::Read;
        use std::os::unix::fs::{FileTypeExt, symlink};
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("elsewhere")).unwrap();
        for to in ["elsewhere/real", "elsewhere/new"] {
            symlink(to, at("link")).unwrap();
            write_file(&at("link"), to.as_bytes()).unwrap();
            assert!(fs::symlink_metadata(at("link")).unwrap().is_symlink());
            assert_eq!(fs::read(at(to)).unwrap(), to.as_bytes());
            fs::remove_file(at("link")).unwrap();
        }
        assert_eq!(names(&at("elsewhere")), ["new", "real"]);
        symlink("circle", at("circle")).unwrap();
        assert!(write_file(&at("circle"), b"").is_err());

        let made = std::process::Command::new("mkfifo").arg(at("pipe")).status().unwrap();
        assert!(made.success());
        let reader = std::thread::spawn({
            let pipe = at("pipe");
            move || {
                let mut text = String::new();
                File::open(pipe).unwrap().read_to_string(&mut text).unwrap();
                text
            }
        });
        write_file(&at("pipe"), b"through").unwrap();
        assert_eq!(reader.join().unwrap(), "through");
        assert!(fs::symlink_metadata(at("pipe")).unwrap().file_type().is_fifo());
    }
}
