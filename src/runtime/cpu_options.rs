//! How the CPU executor runs a bundle.

use std::fmt;
use std::str::FromStr;

use anec_exec::Precision;

/// How the executor keeps keys and values from call to call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CachePrecision {
    /// As they were computed.
    #[default]
    F32,
    /// Rounded to fp16, as a device keeps them: half of the memory, and half of what each token of a long text reads. Precisions that
    /// round fp16 values keep the same numbers either way.
    F16,
}

/// `f32` or `f16`.
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

/// How the CPU executor runs a bundle.
#[derive(Clone, Copy, Debug)]
pub struct CpuOptions {
    /// Of fp16 values.
    pub precision: Precision,
    /// Of keys and values that are states of functions. Those that functions take as inputs are kept as they were computed.
    pub caches: CachePrecision,
    /// Bytes of weights in memory at most: functions that were needed longest ago are let go for others.
    pub max_memory_bytes: Option<u64>,
    /// Functions of a range of tokens that continue texts take up to 64, if a token's values don't depend on how many there
    /// are, and as long as no ring of a sliding window comes round. Calls are those of the bundle otherwise.
    pub wide_calls: bool,
}

impl CpuOptions {
    /// The calls of the bundle in a precision, without limits.
    pub fn new(precision: Precision) -> Self {
        CpuOptions { precision, caches: CachePrecision::F32, max_memory_bytes: None, wide_calls: false }
    }

    /// To write texts: in a precision, with wide calls.
    pub fn to_write(precision: Precision) -> Self {
        CpuOptions { wide_calls: true, ..CpuOptions::new(precision) }
    }
}
