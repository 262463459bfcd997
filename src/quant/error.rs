//! Errors of number formats.

use anec_base::{Diagnostic, Fault};

/// Why a weight can't be held.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QuantError {
    /// fp16 ends at 65504.
    #[error(
        "tensor `{tensor}`, row {row}, column {column}: {value} doesn't fit into fp16, whose largest number is 65504"
    )]
    Overflow {
        /// The tensors that the weight is made of.
        tensor: String,
        /// Row of the weight.
        row: u64,
        /// Column within the row.
        column: u64,
        /// What stands there.
        value: f32,
    },
    /// Second moments of inputs that no inputs have.
    #[error("the second moment of input channel {channel} is {value}, expected a number from 0 on")]
    Moments {
        /// The channel.
        channel: usize,
        /// What stands there.
        value: f32,
    },
    /// Codes that don't belong to the weight.
    #[error("weight `{weight}`: {found} codes were chosen for {expected} elements")]
    Codes {
        /// The weight.
        weight: String,
        /// Codes.
        found: u64,
        /// Elements.
        expected: u64,
    },
    /// Scales that don't belong to the weight.
    #[error("weight `{weight}`: {found} scales were chosen, expected {expected}")]
    Scales {
        /// The weight.
        weight: String,
        /// Scales.
        found: u64,
        /// Scales of its format.
        expected: u64,
    },
    /// A read that isn't whole blocks.
    #[error("weight `{weight}`: bytes {offset} to {end} were asked for, which aren't whole granules of {granule}")]
    Granule {
        /// The weight.
        weight: String,
        /// First byte.
        offset: u64,
        /// One past the last byte.
        end: u64,
        /// Bytes that reads are multiples of.
        granule: u64,
    },
}

impl Diagnostic for QuantError {
    fn fault(&self) -> Fault {
        Fault::Source
    }

    fn help(&self) -> Option<String> {
        match self {
            QuantError::Overflow { .. } => Some(
                "`quant.overflow: saturate` holds it at 65504 and reports how many; the model will differ there".into(),
            ),
            QuantError::Moments { .. } => {
                Some("the calibration text makes the model overflow: choose another, or `quant.feedback: none`".into())
            }
            QuantError::Granule { .. } | QuantError::Codes { .. } | QuantError::Scales { .. } => {
                Some("this is a defect of anec; please report it with the manifest".into())
            }
        }
    }
}
