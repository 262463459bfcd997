//! Weights in the number formats of a package.
//!
//! A weight becomes [`Content`](anec_mil::Content)s that read, convert and measure their rows when the package
//! writer asks for the bytes: nothing is held but the rows in work. What converts is decided by the weight's role
//! (see [`Quant`](anec_manifest::Quant)), never by its size.
//!
//! ```
//! use anec_manifest::{Granularity, NumberFormat, Overflow, WeightFormat};
//! use anec_quant::CodedWeight;
//! use anec_source::SourceWeight;
//!
//! let weight = SourceWeight::from_values("w", &[2, 2], vec![127.0, -1.0, 0.5, 0.25])?;
//! let granularity = Granularity::PerChannel;
//! let format = NumberFormat { weights: WeightFormat::Int8, granularity, ..NumberFormat::FP16 };
//! let int8 = CodedWeight::new(weight, format, Overflow::Error, None);
//! let mut bytes = [0; 4];
//! int8.data().read(0, &mut bytes)?;
//! assert_eq!(bytes.map(|byte| byte as i8), [127, -1, 127, 64]);
//! assert_eq!(int8.layout().scales, Some([2, 1]));
//! assert!(int8.measures().total().unwrap().cosine > 0.9999);
//! # Ok::<(), anec_base::Error>(())
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`coded`] | weights as codes: integers and indices, as they are read |
//! | [`layout`] | the parts of a weight in each number format, and their sizes |
//! | [`scales`] | symmetric integers with a scale for a tensor, a channel or a block |
//! | [`palette`] | palettes for a tensor or for groups of rows |
//! | [`clip`] | where the steps of a whole tensor end |
//! | [`cluster`] | exact one-dimensional k-means |
//! | [`rounding`] | which code a value becomes |
//! | [`chosen`] | codes that were chosen before |
//! | [`feedback`] | codes that make up for each other's errors, by the second moments of the inputs |
//! | `descent` | codes and scales that are the best while all others stay |
//! | [`fp16`] | half precision, for all that isn't quantized |
//! | [`measure`] | what the conversion lost, summed the same whatever the order of reads |

#![forbid(unsafe_code)]

pub mod chosen;
pub mod clip;
pub mod cluster;
pub mod coded;
mod descent;
pub mod error;
pub mod feedback;
pub mod fp16;
pub mod layout;
pub mod measure;
mod pack;
pub mod palette;
mod reader;
pub mod rounding;
pub mod scales;

pub use chosen::{ChosenCodes, ReadCodes};
pub use clip::Inputs;
pub use coded::CodedWeight;
pub use error::QuantError;
pub use feedback::{Damping, ErrorFeedback, RowCodes};
pub use fp16::Fp16;
pub use layout::WeightLayout;
pub use measure::{Loss, RoundingError};
pub use rounding::{Grid, Rounding};

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

    /// Blocks of so many rows.
    pub fn of_rows(weight: &SourceWeight, rows: u64) -> Self {
        Blocks { rows: weight.rows(), columns: weight.columns(), rows_per_block: rows.max(1) }
    }

    /// Blocks of at least so many rows, each of whole bytes where elements have so many bits.
    pub fn packed(weight: &SourceWeight, bits: u64, rows: u64) -> Self {
        let blocks = Self::of(weight);
        // as many rows as make up whole bytes: a power of two
        let together = 8 >> (blocks.columns * bits).trailing_zeros().min(3);
        let rows_per_block = blocks.rows_per_block.max(rows).next_multiple_of(together);
        Blocks { rows_per_block, ..blocks }
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
