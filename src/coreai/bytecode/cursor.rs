//! Reading integers, strings and sections out of bytes that may be anything.

use super::PADDING;

/// Bytes that break the format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Malformed {
    /// Offset within the file.
    pub at: usize,
    /// Found and expected.
    pub problem: String,
}

/// A position within a part of a file.
#[derive(Clone, Debug)]
pub struct ByteCursor<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Offset of `bytes` within the file.
    base: usize,
}

type Read<T> = Result<T, Malformed>;

impl<'a> ByteCursor<'a> {
    /// The beginning of `bytes`, which stand at `base` of their file.
    pub fn new(bytes: &'a [u8], base: usize) -> Self {
        ByteCursor { bytes, at: 0, base }
    }

    /// Offset within the file.
    pub fn position(&self) -> usize {
        self.base + self.at
    }

    /// Number of bytes that are left.
    pub fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// Whether no byte is left.
    pub fn is_empty(&self) -> bool {
        self.remaining() == 0
    }

    /// An error at this position.
    pub fn malformed(&self, problem: impl Into<String>) -> Malformed {
        Malformed { at: self.position(), problem: problem.into() }
    }

    /// Reads one byte.
    ///
    /// # Errors
    /// [`Malformed`] at the end of the bytes.
    pub fn byte(&mut self) -> Read<u8> {
        Ok(self.take(1)?[0])
    }

    /// Reads `count` bytes.
    ///
    /// # Errors
    /// [`Malformed`] if fewer are left.
    pub fn take(&mut self, count: usize) -> Read<&'a [u8]> {
        if count > self.remaining() {
            return Err(self.malformed(format!("{count} bytes are expected, {} are left", self.remaining())));
        }
        let bytes = &self.bytes[self.at..self.at + count];
        self.at += count;
        Ok(bytes)
    }

    /// Reads MLIR's PrefixVarInt: the zeros below the lowest one of the first byte count the bytes that follow.
    ///
    /// # Errors
    /// [`Malformed`] at the end of the bytes.
    pub fn varint(&mut self) -> Read<u64> {
        let first = self.byte()?;
        let more = first.trailing_zeros() as usize;
        let mut word = [0; 8];
        if first == 0 {
            word.copy_from_slice(self.take(8)?);
            return Ok(u64::from_le_bytes(word));
        }
        word[0] = first;
        word[1..=more].copy_from_slice(self.take(more)?);
        Ok(u64::from_le_bytes(word) >> (more + 1))
    }

    /// Reads a signed integer in zigzag form.
    ///
    /// # Errors
    /// As [`varint`](ByteCursor::varint).
    pub fn signed(&mut self) -> Read<i64> {
        let value = self.varint()?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    /// Reads an integer whose lowest bit is a flag.
    ///
    /// # Errors
    /// As [`varint`](ByteCursor::varint).
    pub fn flagged(&mut self) -> Read<(u64, bool)> {
        let value = self.varint()?;
        Ok((value >> 1, value & 1 == 1))
    }

    /// Reads an integer that must fit 32 bits: an index or a count.
    ///
    /// # Errors
    /// As [`varint`](ByteCursor::varint), and for larger ones.
    pub fn index(&mut self) -> Read<u32> {
        let at = self.position();
        let value = self.varint()?;
        u32::try_from(value).map_err(|_| Malformed { at, problem: format!("{value} is no index") })
    }

    /// Reads the length of a list whose items take at least one byte each.
    ///
    /// # Errors
    /// As [`varint`](ByteCursor::varint), and for more items than bytes are left.
    pub fn count(&mut self) -> Read<usize> {
        let value = self.varint()?;
        self.check_count(value)
    }

    /// Checks the length of a list whose items take at least one byte each.
    ///
    /// # Errors
    /// [`Malformed`] for more items than bytes are left.
    pub fn check_count(&self, count: u64) -> Read<usize> {
        match usize::try_from(count) {
            Ok(count) if count <= self.remaining() => Ok(count),
            _ => Err(self.malformed(format!("a list of {count} items in {} bytes", self.remaining()))),
        }
    }

    /// Reads a list of indices.
    ///
    /// # Errors
    /// As [`count`](ByteCursor::count) and [`index`](ByteCursor::index).
    pub fn indices(&mut self) -> Read<Vec<u32>> {
        (0..self.count()?).map(|_| self.index()).collect()
    }

    /// Reads a string that ends with a zero byte.
    ///
    /// # Errors
    /// [`Malformed`] without that byte, or for text that isn't UTF-8.
    pub fn c_string(&mut self) -> Read<&'a str> {
        let rest = &self.bytes[self.at..];
        let length = rest.iter().position(|byte| *byte == 0);
        let length = length.ok_or_else(|| self.malformed("a string without its zero byte"))?;
        let text = std::str::from_utf8(&rest[..length]).map_err(|_| self.malformed("a string that isn't UTF-8"))?;
        self.at += length + 1;
        Ok(text)
    }

    /// Skips padding up to a multiple of `alignment` in the file.
    ///
    /// # Errors
    /// [`Malformed`] for other bytes, or an alignment that isn't a power of two of at most 2^20.
    pub fn align(&mut self, alignment: u64) -> Read<()> {
        if !alignment.is_power_of_two() || alignment > 1 << 20 {
            return Err(self.malformed(format!("an alignment of {alignment} bytes; expected a power of two")));
        }
        while !(self.position() as u64).is_multiple_of(alignment) {
            match self.byte()? {
                PADDING => {}
                other => return Err(self.malformed(format!("padding byte {other:#04x}; expected {PADDING:#04x}"))),
            }
        }
        Ok(())
    }

    /// Reads a section: its number and its body.
    ///
    /// # Errors
    /// [`Malformed`] for a section that is longer than what is left.
    pub fn section(&mut self) -> Read<(u8, ByteCursor<'a>)> {
        let head = self.byte()?;
        let length = self.varint()?;
        if head & 0x80 != 0 {
            let alignment = self.varint()?;
            self.align(alignment)?;
        }
        let length = self.check_count(length)?;
        let base = self.position();
        Ok((head & 0x7F, ByteCursor::new(self.take(length)?, base)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{push_signed, push_varint};
    use super::*;

    #[test]
    fn integers_of_all_lengths_are_read_as_they_were_written() {
        let mut numbers = vec![0, 1, u64::MAX, i64::MAX as u64, 1 << 63];
        numbers.extend((0..9).flat_map(|bytes| [(1u64 << (7 * bytes)) - 1, 1 << (7 * bytes), (1 << (7 * bytes)) + 1]));
        for number in numbers {
            let mut bytes = Vec::new();
            push_varint(&mut bytes, number);
            push_signed(&mut bytes, number as i64);
            let mut cursor = ByteCursor::new(&bytes, 0);
            assert_eq!(cursor.varint(), Ok(number));
            assert_eq!(cursor.signed(), Ok(number as i64));
            assert!(cursor.is_empty(), "{number}");
            for length in 0..bytes.len() {
                let mut cut = ByteCursor::new(&bytes[..length], 0);
                assert!(cut.varint().and_then(|_| cut.varint()).is_err());
            }
        }
    }
}
