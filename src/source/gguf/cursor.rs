//! Reader of little-endian numbers and strings with errors that name the missing part.

use std::fmt::Arguments;
use std::path::Path;

use crate::error::{Result, SourceError};

#[derive(Clone)]
pub struct Cursor<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Cursor<'a> {
    pub fn new(path: &'a Path, bytes: &'a [u8]) -> Self {
        Cursor { path, bytes, position: 0 }
    }

    pub fn path(&self) -> &'a Path {
        self.path
    }

    /// Number of bytes read so far.
    pub fn position(&self) -> usize {
        self.position
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.position
    }

    pub fn take(&mut self, length: u64, what: Arguments) -> Result<&'a [u8]> {
        match usize::try_from(length).ok().filter(|&length| length <= self.left()) {
            Some(length) => {
                let taken = &self.bytes[self.position..self.position + length];
                self.position += length;
                Ok(taken)
            }
            None => {
                let (position, left) = (self.position, self.left());
                let problem = format!("{what} takes {length} bytes at byte {position}, but only {left} are left");
                Err(self.damaged(problem))
            }
        }
    }

    pub fn array<const N: usize>(&mut self, what: Arguments) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, what)?);
        Ok(array)
    }

    pub fn u32(&mut self, what: Arguments) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, what: Arguments) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// Reads a length and that many bytes of UTF-8.
    pub fn string(&mut self, what: Arguments) -> Result<&'a str> {
        let length = self.u64(what)?;
        let position = self.position;
        let bytes = self.take(length, what)?;
        std::str::from_utf8(bytes)
            .map_err(|error| self.damaged(format!("{what} at byte {position} isn't UTF-8: {error}")))
    }

    /// Reads a length and that many bytes; `None` if they are missing.
    pub fn sized(&mut self) -> Option<&'a [u8]> {
        let (length, rest) = self.bytes[self.position..].split_first_chunk()?;
        let bytes = rest.get(..usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        self.position += length.len() + bytes.len();
        Some(bytes)
    }

    /// Checks that `count` items of at least `smallest` bytes can follow.
    pub fn check_count(&self, count: u64, smallest: u64, what: Arguments) -> Result<()> {
        if count > self.left() as u64 / smallest {
            let problem = format!(
                "{count} {what} of at least {smallest} bytes each are announced at byte {}, but only {} bytes are left",
                self.position,
                self.left()
            );
            return Err(self.damaged(problem));
        }
        Ok(())
    }

    pub fn damaged(&self, problem: String) -> SourceError {
        SourceError::file(self.path, problem)
    }
}
