//! The wire format of protocol buffers, read in place.
//!
//! A weight inside a message stays where it is in the mapped file: a field is a range of the file's bytes, and nothing
//! is copied until somebody reads it. Generated decoders copy every such field into memory.

use std::ops::Range;
use std::path::Path;

use crate::error::{Result, SourceError};

/// A message: a range of a file.
#[derive(Clone, Debug)]
pub(super) struct Message<'a> {
    path: &'a Path,
    /// What the message is, for errors.
    what: &'static str,
    file: &'a [u8],
    range: Range<usize>,
}

/// A field's content.
#[derive(Clone, Debug)]
pub(super) enum GgufValue {
    /// A number of variable length.
    Varint(u64),
    /// Eight bytes, which no field that is read has.
    Fixed64,
    /// Four bytes.
    Fixed32(u32),
    /// A string, bytes, message or packed list: where it lies in the file.
    Bytes(Range<usize>),
}

impl<'a> Message<'a> {
    /// The message that is a whole file.
    pub fn new(path: &'a Path, what: &'static str, file: &'a [u8]) -> Self {
        Message { path, what, file, range: 0..file.len() }
    }

    /// The message within this one that a field holds.
    pub fn message(&self, what: &'static str, value: &GgufValue) -> Result<Message<'a>> {
        Ok(Message { what, range: self.range_of(value)?, ..self.clone() })
    }

    /// Where the bytes of a field lie in the file.
    pub fn range_of(&self, value: &GgufValue) -> Result<Range<usize>> {
        match value {
            GgufValue::Bytes(range) => Ok(range.clone()),
            _ => Err(self.damaged("a number stands where bytes should")),
        }
    }

    /// A field that holds text.
    pub fn text(&self, value: &GgufValue) -> Result<&'a str> {
        std::str::from_utf8(&self.file[self.range_of(value)?]).map_err(|_| self.damaged("a text isn't UTF-8"))
    }

    /// A field that holds a whole number; negative ones are stored in two's complement.
    pub fn integer(&self, value: &GgufValue) -> Result<i64> {
        match value {
            GgufValue::Varint(number) => Ok(*number as i64),
            _ => Err(self.damaged("something else stands where a whole number should")),
        }
    }

    /// A field that holds a single-precision number.
    pub fn float(&self, value: &GgufValue) -> Result<f32> {
        match value {
            GgufValue::Fixed32(bits) => Ok(f32::from_bits(*bits)),
            _ => Err(self.damaged("something else stands where a number should")),
        }
    }

    /// Adds what a repeated field of whole numbers holds: one, or a packed list.
    pub fn integers(&self, value: &GgufValue, into: &mut Vec<i64>) -> Result<()> {
        let GgufValue::Bytes(range) = value else {
            into.push(self.integer(value)?);
            return Ok(());
        };
        let mut reader = Fields { message: self, at: range.start, end: range.end };
        while reader.at < reader.end {
            into.push(reader.varint()? as i64);
        }
        Ok(())
    }

    /// Adds what a repeated field of single-precision numbers holds: one, or a packed list.
    pub fn floats(&self, value: &GgufValue, into: &mut Vec<f32>) -> Result<()> {
        let GgufValue::Bytes(range) = value else {
            into.push(self.float(value)?);
            return Ok(());
        };
        let (numbers, rest) = self.file[range.clone()].as_chunks();
        if !rest.is_empty() {
            return Err(self.damaged("a list of numbers has a part of one at its end"));
        }
        into.extend(numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        Ok(())
    }

    /// The fields, in the order of the file.
    pub fn fields(&self) -> Fields<'_, 'a> {
        Fields { message: self, at: self.range.start, end: self.range.end }
    }

    /// An error about this message.
    pub fn damaged(&self, problem: &str) -> SourceError {
        SourceError::file(self.path, format!("{} at byte {}: {problem}", self.what, self.range.start))
    }
}

/// Iterates over the fields of a message: number and content.
pub(super) struct Fields<'m, 'a> {
    message: &'m Message<'a>,
    at: usize,
    end: usize,
}

impl Fields<'_, '_> {
    fn bytes(&mut self, count: u64) -> Result<Range<usize>> {
        match usize::try_from(count).ok().filter(|&count| count <= self.end - self.at) {
            Some(count) => {
                let range = self.at..self.at + count;
                self.at = range.end;
                Ok(range)
            }
            None => {
                let left = self.end - self.at;
                Err(self.message.damaged(&format!("a field has {count} bytes, but {left} are left; it was cut off")))
            }
        }
    }

    fn varint(&mut self) -> Result<u64> {
        let mut number = 0u64;
        for shift in (0..64).step_by(7) {
            let range = self.bytes(1)?;
            let byte = u64::from(self.message.file[range.start]);
            // of the tenth byte, one bit is left
            if shift == 63 && byte > 1 {
                break;
            }
            number |= (byte & 0x7F) << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(self.message.damaged("a number has more than 64 bits"))
    }

    fn field(&mut self) -> Result<(u64, GgufValue)> {
        let key = self.varint()?;
        let value = match key & 7 {
            0 => GgufValue::Varint(self.varint()?),
            1 => {
                self.bytes(8)?;
                GgufValue::Fixed64
            }
            2 => {
                let length = self.varint()?;
                GgufValue::Bytes(self.bytes(length)?)
            }
            5 => {
                let range = self.bytes(4)?;
                GgufValue::Fixed32(u32::from_le_bytes(*self.message.file[range].first_chunk().expect("4 bytes")))
            }
            kind => {
                return Err(self.message.damaged(&format!("a field has wire type {kind}, which doesn't exist here")));
            }
        };
        Ok((key >> 3, value))
    }
}

impl Iterator for Fields<'_, '_> {
    type Item = Result<(u64, GgufValue)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.end {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.at = self.end;
        }
        Some(field)
    }
}
