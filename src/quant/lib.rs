//! Weights in the number formats of a package.
//!
//! A weight becomes [`Content`](anec_mil::Content)s that read, convert and measure rows when the package writer asks
//! for their bytes. Only the rows being converted are in memory. The format follows from the weight's role (see
//! [`Quant`](anec_manifest::Quant)), never from its size.
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
//! | module | contents |
//! |---|---|
//! | `coded` | quantized weights: integers or palette indices, computed as they are read |
//! | `layout` | parts of a weight in each number format, and their sizes |
//! | [`scales`] | symmetric integers with a scale per tensor, channel or block |
//! | [`palette`] | palettes per tensor or per group of rows |
//! | `tensor_pass` | pass over a tensor that finds its scale |
//! | `clip` | clipping range of a per-tensor scale |
//! | [`cluster`] | exact one-dimensional k-means |
//! | `rounding` | rounding of values to codes |
//! | `kept` | integers that are the source's |
//! | `chosen` | codes chosen before the weight is written |
//! | `feedback` | error feedback (GPTQ) by the second moments of the inputs |
//! | `cholesky` | Cholesky factor of the moments |
//! | `descent` | coordinate descent on codes and scales |
//! | `fp16` | half precision for weights that aren't quantized |
//! | `measure` | conversion error, independent of the order of reads |

#![forbid(unsafe_code)]

mod cholesky;
mod chosen;
mod clip;
pub mod cluster;
mod coded;
mod descent;
mod error;
mod feedback;
mod fp16;
mod kept;
mod layout;
mod measure;
mod pack;
pub mod palette;
mod reader;
mod rounding;
pub mod scales;
mod tensor_pass;

pub use chosen::{ChosenCodes, ReadCodes};
pub use clip::Inputs;
pub use coded::CodedWeight;
pub use error::QuantError;
pub use feedback::{Damping, ErrorFeedback, RowCodes};
pub use fp16::Fp16;
pub use kept::{KeptIntegers, KeptWeight};
pub use layout::WeightLayout;
pub use measure::{Loss, RoundingError};
pub use rounding::{Grid, Rounding};

use std::ops::Range;

use anec_base::Result;
use anec_mil::DataType;
use anec_source::SourceWeight;
use rayon::prelude::*;

/// Division of a weight's rows into blocks: the unit of reading, of parallel work and of measuring. One block of f32
/// fits into a core's innermost cache, where it is decoded, scanned and converted.
#[derive(Clone, Copy, Debug)]
pub struct Blocks {
    rows: u64,
    columns: u64,
    rows_per_block: u64,
}

impl Blocks {
    /// Maximum number of elements in a block of more than one row.
    const ELEMENTS: u64 = 1 << 13;

    /// Returns the blocks of a weight.
    pub fn of(weight: &SourceWeight) -> Self {
        let (rows, columns) = (weight.rows(), weight.columns());
        Blocks { rows, columns, rows_per_block: (Self::ELEMENTS / columns.max(1)).max(1) }
    }

    /// Returns blocks of `rows` rows each.
    pub fn of_rows(weight: &SourceWeight, rows: u64) -> Self {
        Blocks { rows: weight.rows(), columns: weight.columns(), rows_per_block: rows.max(1) }
    }

    /// Returns blocks of at least `rows` rows, each a whole number of bytes at `bits` bits per element.
    pub fn packed(weight: &SourceWeight, bits: u64, rows: u64) -> Self {
        let blocks = Self::of(weight);
        // rows that together fill whole bytes: a power of two
        let together = 8 >> (blocks.columns * bits).trailing_zeros().min(3);
        let rows_per_block = blocks.rows_per_block.max(rows).next_multiple_of(together);
        Blocks { rows_per_block, ..blocks }
    }

    /// Number of blocks.
    pub fn count(&self) -> usize {
        self.rows.div_ceil(self.rows_per_block) as usize
    }

    /// Number of blocks that a thread converts in sequence; fewer don't pay for another thread.
    pub fn at_a_time(&self) -> usize {
        ((1 << 20) / self.elements().max(1)).max(1) as usize
    }

    /// Number of elements in a whole block; the last block can have fewer.
    pub fn elements(&self) -> u64 {
        self.rows_per_block * self.columns
    }

    /// Reads whole blocks of a weight's constant of type `dtype` from byte `offset` on: `convert` writes a block, with
    /// buffers of its thread.
    fn read<B>(
        &self,
        weight: &SourceWeight,
        dtype: DataType,
        (offset, out): (u64, &mut [u8]),
        buffers: impl Fn() -> B + Send + Sync,
        convert: impl Fn(&mut B, usize, &mut [u8]) -> Result<()> + Send + Sync,
    ) -> Result<()> {
        let (length, granule) = (dtype.packed_bytes(weight.elements()), dtype.packed_bytes(self.elements()).max(1));
        let end = offset.saturating_add(out.len() as u64);
        if end > length || !offset.is_multiple_of(granule) || end != length && !end.is_multiple_of(granule) {
            return Err(QuantError::Granule { weight: weight.key(), offset, end, granule }.into());
        }
        let first = (offset / granule) as usize;
        out.par_chunks_mut(granule as usize)
            .enumerate()
            .with_min_len(self.at_a_time())
            .try_for_each_init(buffers, |buffers, (block, out)| convert(buffers, first + block, out))?;
        let elements = |bytes: u64| (bytes * 8 / dtype.bits()).min(weight.elements());
        weight.release(elements(offset)..elements(end));
        Ok(())
    }

    /// Returns the rows of a block.
    pub fn rows(&self, block: usize) -> Range<u64> {
        let first = block as u64 * self.rows_per_block;
        first..self.rows.min(first + self.rows_per_block)
    }

    /// Number of values in a row.
    pub fn columns(&self) -> u64 {
        self.columns
    }
}
