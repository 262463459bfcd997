//! Size-limited reading of files that a user names: devices are endless, pipes have no size.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use crate::file::{FileError, open_file};

/// Reads a file of at most `most` bytes.
///
/// # Errors
/// If the system refuses, or the file is larger.
pub fn read(path: &Path, most: u64) -> Result<Vec<u8>, FileError> {
    let refused = |error: io::Error| FileError::of(path, "read")(error);
    let file = File::open(path).map_err(refused)?;
    read_from(file, most).map_err(refused)
}

/// Reads a regular file of at most `most` bytes.
///
/// # Errors
/// If it isn't a regular file, it is larger, or the system refuses.
pub fn read_file(path: &Path, most: u64) -> Result<Vec<u8>, FileError> {
    let (file, _) = open_file(path)?;
    read_from(file, most).map_err(FileError::of(path, "read"))
}

/// Largest configuration, tokenizer or description of a model, in bytes.
pub const MOST_JSON: u64 = 1 << 30;

/// Reads a text file of at most `most` bytes.
///
/// # Errors
/// As [`read`], and if the content isn't UTF-8.
pub fn read_text(path: &Path, most: u64) -> Result<String, FileError> {
    utf8(path, read(path, most)?)
}

/// Reads a regular text file of at most `most` bytes.
///
/// # Errors
/// As [`read_file`], and if the content isn't UTF-8.
pub fn read_text_file(path: &Path, most: u64) -> Result<String, FileError> {
    utf8(path, read_file(path, most)?)
}

fn utf8(path: &Path, bytes: Vec<u8>) -> Result<String, FileError> {
    String::from_utf8(bytes)
        .map_err(|_| FileError::of(path, "read")(io::Error::new(io::ErrorKind::InvalidData, "it isn't UTF-8")))
}

/// Reads until the end, at most `most` bytes.
///
/// # Errors
/// As [`read`].
pub fn read_from(input: impl Read, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    input.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("larger than {most} bytes")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(unix)]
    use crate::error::Diagnostic;

    #[test]
    #[cfg(unix)]
    fn only_regular_files_are_model_files() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let socket = folder.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for path in [folder.path(), &pipe, &socket, Path::new("/dev/zero")] {
            let error = read_file(path, 100).unwrap_err();
            assert!(error.to_string().contains(", not a file"), "{error}");
            assert_eq!(error.help().as_deref(), Some("name a regular file"));
            assert!(crate::MappedFile::open(path).is_err());
        }
        let link = folder.path().join("link");
        let file = folder.path().join("file");
        std::fs::write(&file, "1234").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert_eq!(read_file(&link, 4).unwrap(), b"1234");
        assert!(read_file(&link, 3).is_err());
    }

    #[test]
    fn files_above_the_limit_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read_text(&path, 5).unwrap(), "12345");
        assert!(read(&path, 4).unwrap_err().to_string().contains("larger than 4 bytes"));
        std::fs::write(&path, [0xff]).unwrap();
        assert!(read_text(&path, 4).unwrap_err().to_string().contains("UTF-8"));
        if Path::new("/dev/zero").exists() {
            assert!(read(Path::new("/dev/zero"), 100).is_err());
        }
    }
}
