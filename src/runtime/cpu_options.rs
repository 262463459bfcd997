//! Options of the CPU executor.

use std::fmt;
use std::str::FromStr;

use anec_exec::Precision;

/// Precision in which keys and values are kept between calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CachePrecision {
    /// As computed.
    #[default]
    F32,
    /// Rounded to fp16, as on a device: half the memory and half the reads per decoded token. Precisions that round to
    /// fp16 anyway give the same numbers.
    F16,
}

impl fmt::Display for CachePrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CachePrecision::F32 => "f32",
            CachePrecision::F16 => "f16",
        })
    }
}

impl FromStr for CachePrecision {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [CachePrecision::F32, CachePrecision::F16];
        all.into_iter().find(|precision| precision.to_string() == text).ok_or_else(|| "expected f32 or f16".into())
    }
}

/// Options of the CPU executor.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CpuOptions {
    /// Precision of fp16 values.
    pub precision: Precision,
    /// Precision of keys and values kept as states. Those that functions take as inputs are kept as computed.
    pub caches: CachePrecision,
    /// Maximum bytes of weights in memory; the least recently used functions are evicted.
    pub max_memory_bytes: Option<u64>,
    /// Whether calls of text-generation functions with a range of tokens may have up to 64 tokens, provided that a
    /// token's values don't depend on the number of tokens and no sliding window's ring wraps. Calls are those of the
    /// bundle otherwise.
    pub wide_calls: bool,
}

impl CpuOptions {
    /// Returns options with the bundle's own calls and no limits.
    pub fn new(precision: Precision) -> Self {
        CpuOptions { precision, caches: CachePrecision::F32, max_memory_bytes: None, wide_calls: false }
    }

    /// Returns options for text generation: wide calls in a precision.
    pub fn to_write(precision: Precision) -> Self {
        CpuOptions { wide_calls: true, ..CpuOptions::new(precision) }
    }
}
