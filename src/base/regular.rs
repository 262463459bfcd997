//! Opening of regular files.

use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::path::Path;

/// Opens a regular file and returns it with its size. Folders, pipes, sockets and devices are refused: a pipe without a
/// writer blocks for ever, and a device has no end.
pub(crate) fn open(path: &Path) -> Result<(File, u64)> {
    // before it is opened, which blocks for pipes
    let metadata = std::fs::metadata(path)?;
    if !metadata.is_file() {
        let kind = if metadata.is_dir() { "a folder" } else { "a pipe, socket or device" };
        return Err(Error::new(ErrorKind::InvalidInput, format!("it is {kind}, not a file")));
    }
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    Ok((file, length))
}
