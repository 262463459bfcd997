//! Files of a bundle: written whole or not at all, with their digests.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::bundle::FileDigest;
use super::error::ConvertError;
use crate::error::Result;
use crate::mil::Content;
use crate::source::hexadecimal;

/// Bytes of one step of streaming, about.
const CHUNK: u64 = 8 << 20;

/// A file that appears under its name once it is complete.
pub struct AtomicFile {
    path: PathBuf,
    partial: PathBuf,
    file: File,
    hasher: Sha256,
    bytes: u64,
}

impl AtomicFile {
    /// Begins a file.
    ///
    /// # Errors
    /// When it can't be created.
    pub fn create(path: &Path) -> Result<Self, ConvertError> {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(".partial");
        let partial = path.with_file_name(name);
        let file = File::create(&partial).map_err(ConvertError::io(&partial, "create"))?;
        Ok(AtomicFile { path: path.to_owned(), partial, file, hasher: Sha256::new(), bytes: 0 })
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// When they can't be written.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), ConvertError> {
        self.file.write_all(bytes).map_err(ConvertError::io(&self.path, "write"))?;
        self.hasher.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Appends a content, of which a piece is produced while the one before is written. `written` is told of each
    /// piece's bytes.
    ///
    /// # Errors
    /// When it can't be produced or written.
    pub fn stream(&mut self, content: &dyn Content, written: &dyn Fn(u64)) -> Result<()> {
        content.prepare()?;
        let granule = content.granule().max(1);
        let step = (CHUNK / granule).max(1) * granule;
        let length = content.length();
        let produce = |offset: u64, buffer: &mut Vec<u8>| -> Result<()> {
            buffer.resize(step.min(length - offset) as usize, 0);
            content.read(offset, buffer)
        };
        let (mut ready, mut next) = (Vec::new(), Vec::new());
        produce(0, &mut ready)?;
        let mut offset = 0;
        while offset < length {
            let bytes = ready.len() as u64;
            offset += bytes;
            let (done, produced) = rayon::join(
                || self.write(&ready),
                || if offset < length { produce(offset, &mut next) } else { Ok(()) },
            );
            done?;
            produced?;
            written(bytes);
            std::mem::swap(&mut ready, &mut next);
        }
        Ok(())
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn finish(self) -> Result<FileDigest, ConvertError> {
        drop(self.file);
        std::fs::rename(&self.partial, &self.path).map_err(ConvertError::io(&self.path, "rename"))?;
        Ok(FileDigest {
            file: self.path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            bytes: self.bytes,
            sha256: hexadecimal(&self.hasher.finalize()),
        })
    }
}

/// Writes a whole file.
///
/// # Errors
/// When the system refuses.
pub fn write(path: &Path, bytes: &[u8]) -> Result<FileDigest, ConvertError> {
    let mut file = AtomicFile::create(path)?;
    file.write(bytes)?;
    file.finish()
}

/// Writes a value as indented JSON that ends with a newline.
///
/// # Errors
/// When the system refuses.
pub fn write_json(path: &Path, value: &impl serde::Serialize) -> Result<FileDigest, ConvertError> {
    let mut text = serde_json::to_string_pretty(value)
        .map_err(|e| ConvertError::Bundle { path: path.to_owned(), problem: e.to_string() })?;
    text.push('\n');
    write(path, text.as_bytes())
}
