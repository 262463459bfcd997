//! Wire format of protocol buffers, read in place.
//!
//! A weight inside a message stays in the mapped file: a field is a range of the file's bytes, and nothing is copied
//! until it is read. Generated decoders copy every such field into memory.

use std::ops::Range;
use std::path::Path;

use crate::error::{Result, SourceError};

/// Message: a range of a file.
#[derive(Clone, Debug)]
pub(crate) struct Message<'a> {
    path: &'a Path,
    /// Name of the message, for errors.
    what: &'static str,
    file: &'a [u8],
    range: Range<usize>,
}

/// Content of a field.
#[derive(Clone, Debug)]
pub(crate) enum FieldValue {
    /// Variable-length integer.
    Varint(u64),
    /// Eight bytes, which no supported field has.
    Fixed64,
    /// Four bytes.
    Fixed32(u32),
    /// String, bytes, message or packed list, as a range of the file.
    Bytes(Range<usize>),
}

impl<'a> Message<'a> {
    /// Returns the message of a whole file.
    pub fn new(path: &'a Path, what: &'static str, file: &'a [u8]) -> Self {
        Message { path, what, file, range: 0..file.len() }
    }

    /// Returns the message in a field.
    pub fn message(&self, what: &'static str, value: &FieldValue) -> Result<Message<'a>> {
        Ok(Message { what, range: self.range_of(value)?, ..self.clone() })
    }

    /// Returns the range of a field's bytes in the file.
    pub fn range_of(&self, value: &FieldValue) -> Result<Range<usize>> {
        match value {
            FieldValue::Bytes(range) => Ok(range.clone()),
            _ => Err(self.damaged("a number stands where bytes should")),
        }
    }

    /// Returns a text field.
    pub fn text(&self, value: &FieldValue) -> Result<&'a str> {
        std::str::from_utf8(&self.file[self.range_of(value)?]).map_err(|_| self.damaged("a text isn't UTF-8"))
    }

    /// Returns an integer field; negative numbers are stored in two's complement.
    pub fn integer(&self, value: &FieldValue) -> Result<i64> {
        match value {
            FieldValue::Varint(number) => Ok(*number as i64),
            _ => Err(self.damaged("something else stands where a whole number should")),
        }
    }

    /// Returns a single-precision field.
    pub fn float(&self, value: &FieldValue) -> Result<f32> {
        match value {
            FieldValue::Fixed32(bits) => Ok(f32::from_bits(*bits)),
            _ => Err(self.damaged("something else stands where a number should")),
        }
    }

    /// Appends the values of a repeated integer field: one, or a packed list.
    pub fn integers(&self, value: &FieldValue, into: &mut Vec<i64>) -> Result<()> {
        let FieldValue::Bytes(range) = value else {
            into.push(self.integer(value)?);
            return Ok(());
        };
        let mut reader = Fields { message: self, at: range.start, end: range.end };
        while reader.at < reader.end {
            into.push(reader.varint()? as i64);
        }
        Ok(())
    }

    /// Appends the values of a repeated single-precision field: one, or a packed list.
    pub fn floats(&self, value: &FieldValue, into: &mut Vec<f32>) -> Result<()> {
        let FieldValue::Bytes(range) = value else {
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

    /// Returns the fields in the order of the file.
    pub fn fields(&self) -> Fields<'_, 'a> {
        Fields { message: self, at: self.range.start, end: self.range.end }
    }

    /// Returns an error about this message.
    pub fn damaged(&self, problem: &str) -> SourceError {
        SourceError::file(self.path, format!("{} at byte {}: {problem}", self.what, self.range.start))
    }
}

/// Iterator over the fields of a message: number and content.
pub(crate) struct Fields<'m, 'a> {
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
            // the tenth byte has one significant bit
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

    fn field(&mut self) -> Result<(u64, FieldValue)> {
        let key = self.varint()?;
        let value = match key & 7 {
            0 => FieldValue::Varint(self.varint()?),
            1 => {
                self.bytes(8)?;
                FieldValue::Fixed64
            }
            2 => {
                let length = self.varint()?;
                FieldValue::Bytes(self.bytes(length)?)
            }
            5 => {
                let range = self.bytes(4)?;
                FieldValue::Fixed32(u32::from_le_bytes(*self.message.file[range].first_chunk().expect("4 bytes")))
            }
            kind => {
                return Err(self.message.damaged(&format!("a field has wire type {kind}, which doesn't exist here")));
            }
        };
        Ok((key >> 3, value))
    }
}

impl Iterator for Fields<'_, '_> {
    type Item = Result<(u64, FieldValue)>;

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
