//! Weight files (MILBlob, version 2).
//!
//! | bytes | what |
//! |---|---|
//! | 0..64 | u32 number of blobs, u32 version = 2, zeros |
//! | each blob, 64-byte aligned | record of 64 bytes, then the data |
//!
//! A record holds u32 0xDEADBEEF, u32 data type, u64 bytes, u64 absolute offset of the data, u64 bits of padding in the
//! last byte, and zeros. All numbers are little-endian. A program refers to a blob by the offset of its record. A file
//! is written in two steps, [`WeightPlan`] and [`WeightPlan::write`]: places follow from lengths alone, so the program
//! that refers to them can be written before any data exists, and the data is produced by many threads, each at its
//! place.

mod plan;
mod read;
mod write;

pub use plan::WeightPlan;
pub use read::{Record, WeightFile};
pub(super) use write::Preparation;
pub use write::WriteProgress;

use anec_mil::DataType;

/// Alignment of records and data; also the size of a record and of the file header.
pub const ALIGNMENT: u64 = 64;
/// First word of a record.
const SENTINEL: u32 = 0xDEAD_BEEF;
/// Only version of the format.
const VERSION: u32 = 2;

/// Type codes of the format.
const CODES: [(DataType, u32); 15] = [
    (DataType::Fp16, 1),
    (DataType::Fp32, 2),
    (DataType::Uint8, 3),
    (DataType::Int8, 4),
    (DataType::Bf16, 5),
    (DataType::Int16, 6),
    (DataType::Uint16, 7),
    (DataType::Int4, 8),
    (DataType::Uint1, 9),
    (DataType::Uint2, 10),
    (DataType::Uint4, 11),
    (DataType::Uint3, 12),
    (DataType::Uint6, 13),
    (DataType::Int32, 14),
    (DataType::Uint32, 15),
];

/// Returns the code of a data type, if it can be in a weight file.
fn code(dtype: DataType) -> Option<u32> {
    CODES.iter().find(|(d, _)| *d == dtype).map(|(_, code)| *code)
}

/// Returns the data type of a code.
fn data_type(code: u32) -> Option<DataType> {
    CODES.iter().find(|(_, c)| *c == code).map(|(dtype, _)| *dtype)
}

/// Returns the number of unused bits in the last byte of `elements` elements.
fn padding_bits(dtype: DataType, elements: u64) -> u64 {
    // elements * bits modulo 8, without overflow
    let used = (elements % 8) * dtype.bits() % 8;
    (8 - used) % 8
}

/// Returns the file's header.
fn header(count: u32) -> [u8; ALIGNMENT as usize] {
    let mut out = [0; ALIGNMENT as usize];
    out[..4].copy_from_slice(&count.to_le_bytes());
    out[4..8].copy_from_slice(&VERSION.to_le_bytes());
    out
}

impl Record {
    /// Returns the record's 64 bytes.
    fn to_bytes(self) -> [u8; ALIGNMENT as usize] {
        let mut out = [0; ALIGNMENT as usize];
        out[..4].copy_from_slice(&SENTINEL.to_le_bytes());
        out[4..8].copy_from_slice(&code(self.dtype).unwrap_or(0).to_le_bytes());
        out[8..16].copy_from_slice(&self.length.to_le_bytes());
        out[16..24].copy_from_slice(&self.data.to_le_bytes());
        out[24..32].copy_from_slice(&self.padding_bits.to_le_bytes());
        out
    }

    /// Parses a record and checks it against the size of its file.
    fn from_bytes(offset: u64, bytes: &[u8], file_length: u64) -> Result<Record, String> {
        let word = |at: usize| bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes);
        let long = |at: usize| bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes);
        if word(0) != SENTINEL {
            return Err(format!("no record is there: it starts with {:#010x}, expected {SENTINEL:#010x}", word(0)));
        }
        let dtype = data_type(word(4)).ok_or_else(|| format!("data type code {} is not known", word(4)))?;
        let record = Record { offset, dtype, length: long(8), data: long(16), padding_bits: long(24) };
        let end = record.data.checked_add(record.length);
        if !record.data.is_multiple_of(ALIGNMENT) || record.data < offset.saturating_add(ALIGNMENT) {
            return Err(format!("its data is at {}, expected {}", record.data, offset.saturating_add(ALIGNMENT)));
        }
        if end.is_none_or(|end| end > file_length) {
            let (data, length) = (record.data, record.length);
            return Err(format!("its {length} bytes at {data} are out of the file, which has {file_length}"));
        }
        if record.padding_bits >= 8 || (record.padding_bits > 0 && record.dtype.bits() >= 8) {
            return Err(format!("{} bits of padding for {}", record.padding_bits, record.dtype));
        }
        Ok(record)
    }
}

#[cfg(test)]
mod tests;
