//! Errors of number formats.

use anec_base::{Diagnostic, Fault};

/// Error of converting a weight to a number format.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QuantError {
    /// A value beyond 65504, the largest number of fp16.
    #[error(
        "tensor `{tensor}`, row {row}, column {column}: {value} doesn't fit into fp16, whose largest number is 65504"
    )]
    Overflow {
        /// Source tensors of the weight.
        tensor: String,
        /// Row of the weight.
        row: u64,
        /// Column within the row.
        column: u64,
        /// Value found.
        value: f32,
    },
    /// Invalid second moments of inputs: negative, NaN or infinite.
    #[error("the second moment of input channel {channel} is {value}, expected a number from 0 on")]
    Moments {
        /// Input channel.
        channel: usize,
        /// Value found.
        value: f32,
    },
    /// Number of codes that differs from the weight's number of elements.
    #[error("weight `{weight}`: {found} codes were chosen, expected {expected}")]
    Codes {
        /// Key of the weight.
        weight: String,
        /// Number of codes.
        found: u64,
        /// Number of elements.
        expected: u64,
    },
    /// Number of scales that differs from the format's.
    #[error("weight `{weight}`: {found} scales were chosen, expected {expected}")]
    Scales {
        /// Key of the weight.
        weight: String,
        /// Number of scales.
        found: u64,
        /// Number of scales that the format has.
        expected: u64,
    },
    /// Read that isn't a whole number of blocks.
    #[error("weight `{weight}`: read of bytes {offset} to {end} isn't a multiple of {granule} bytes")]
    Granule {
        /// Key of the weight.
        weight: String,
        /// First byte.
        offset: u64,
        /// One past the last byte.
        end: u64,
        /// Number of bytes that offsets and lengths are multiples of.
        granule: u64,
    },
}

impl Diagnostic for QuantError {
    fn fault(&self) -> Fault {
        Fault::Source
    }

    fn help(&self) -> Option<String> {
        match self {
            QuantError::Overflow { .. } => {
                Some("set `quant.overflow: saturate` to clamp such values to 65504; the report counts them".into())
            }
            QuantError::Moments { .. } => Some(
                "the model overflows on the calibration text: choose another text, or set `quant.feedback: none`"
                    .into(),
            ),
            QuantError::Granule { .. } | QuantError::Codes { .. } | QuantError::Scales { .. } => {
                Some("report this defect of anec with the manifest".into())
            }
        }
    }
}
