//! Weights in the number formats of a package.
//!
//! A weight becomes [`Content`](anec_mil::Content)s that read, convert and measure their rows when the package
//! writer asks for the bytes: nothing is held but the rows in work. What converts is decided by the weight's role
//! (see [`Quant`](anec_manifest::Quant)), never by its size.
//!
//! ```
//! use anec_manifest::{Granularity, Overflow};
//! use anec_quant::Int8;
//! use anec_source::SourceWeight;
//!
//! let weight = SourceWeight::from_values("w", &[2, 2], vec![127.0, -1.0, 0.5, 0.25])?;
//! let int8 = Int8::new(weight, Granularity::PerChannel, Overflow::Error);
//! let mut bytes = [0; 4];
//! int8.data().read(0, &mut bytes)?;
//! assert_eq!(bytes.map(|byte| byte as i8), [127, -1, 127, 64]);
//! assert_eq!(int8.scale_count(), 2);
//! assert!(int8.measures().total().unwrap().cosine > 0.9999);
//! # Ok::<(), anec_base::Error>(())
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`int8`] | symmetric 8-bit integers with a scale for each tensor or each output channel |
//! | [`chosen`] | codes that were chosen before |
//! | [`feedback`] | codes that make up for each other's errors, by the second moments of the inputs |
//! | [`fp16`] | half precision, for all that isn't quantized |
//! | [`measure`] | what the conversion lost, summed the same whatever the order of reads |

#![forbid(unsafe_code)]

pub mod chosen;
pub mod error;
pub mod feedback;
pub mod fp16;
pub mod int8;
pub mod measure;

pub use chosen::ChosenCodes;
pub use error::QuantError;
pub use feedback::{ErrorFeedback, Grid, Integers, PaletteGrid};
pub use fp16::Fp16;
pub use int8::Int8;
pub use measure::{Loss, RoundingError};

use std::ops::Range;

use anec_source::SourceWeight;

/// The division of a weight's rows into blocks: the unit of reading, of parallel work and of measuring. One block of
/// f32 fits into a core's innermost cache, where it is decoded, looked through and converted.
#[derive(Clone, Copy, Debug)]
pub struct Blocks {
    rows: u64,
    columns: u64,
    rows_per_block: u64,
}

impl Blocks {
    /// Elements that a block has at most, if a row has no more.
    const ELEMENTS: u64 = 1 << 13;

    /// The blocks of a weight.
    pub fn of(weight: &SourceWeight) -> Self {
        let (rows, columns) = (weight.rows(), weight.columns());
        Blocks { rows, columns, rows_per_block: (Self::ELEMENTS / columns.max(1)).max(1) }
    }

    /// Number of blocks.
    pub fn count(&self) -> usize {
        self.rows.div_ceil(self.rows_per_block) as usize
    }

    /// Blocks that a thread converts one after another: fewer aren't worth another thread.
    pub fn at_a_time(&self) -> usize {
        ((1 << 20) / self.elements().max(1)).max(1) as usize
    }

    /// Elements of a whole block; the last can have fewer.
    pub fn elements(&self) -> u64 {
        self.rows_per_block * self.columns
    }

    /// Rows of one block.
    pub fn rows(&self, block: usize) -> Range<u64> {
        let first = block as u64 * self.rows_per_block;
        first..self.rows.min(first + self.rows_per_block)
    }

    /// Values of one row.
    pub fn columns(&self) -> u64 {
        self.columns
    }
}
