//! Samples of weights from which a rotation is learned.
//!
//! A rotation in blocks keeps the norm of each block of a row, and an element can't be larger than that norm. So a
//! tensor is sampled by *pieces*, blocks of rows (of columns for weights that write to the stream), of largest norm.

use anec_kernels::reduce::sum_of_squares;
use ndarray::{Array2, Axis};

use super::hadamard::HadamardRotation;
use crate::error::Result;
use crate::weight::{SourceWeight, SquareMatrix, WeightExtent};

/// Maximum and minimum number of rows whose size a tensor's sample has.
const ROWS: usize = 160;
const FEWEST_ROWS: usize = 16;
/// Factor of rows, those of largest norm, among whose pieces a sample is chosen.
const CANDIDATES: usize = 2;
/// Maximum number of sampled elements, and number of weights per sampled element, so that learning never dominates the
/// conversion of a small model.
const ELEMENTS: u64 = 3 << 23;
const SHARE: u64 = 24;
/// Inverse fraction of a sample's pieces that lead it.
const LEADING: usize = 3;
/// Number of threads that read samples.
const PARTS: usize = 8;

/// Sample of a tensor.
pub(super) struct TensorSample {
    /// Pieces by block.
    pub(super) blocks: Vec<Pieces>,
}

/// Pieces of one block, from the largest norm down.
#[derive(Default)]
pub(super) struct Pieces {
    values: Vec<f32>,
    /// Number of values of the pieces that lead the tensor's sample.
    leading: usize,
}

impl Pieces {
    /// Returns the values of all pieces, or of those that lead the sample.
    pub(super) fn values(&self, only_leading: bool) -> &[f32] {
        if only_leading { &self.values[..self.leading] } else { &self.values }
    }
}

impl TensorSample {
    /// Returns all values.
    pub(super) fn values(&self) -> impl Iterator<Item = &f32> {
        self.blocks.iter().flat_map(|pieces| &pieces.values)
    }

    /// Returns the `count` pieces of largest norm, of `width` elements, of rows of `size`.
    pub(super) fn of(rows: &[f32], size: usize, width: usize, count: usize) -> Self {
        let norm = |piece: &[f32]| f64::from(sum_of_squares(piece));
        let norms: Vec<f64> = rows.chunks_exact(width).map(norm).collect();
        let mut blocks: Vec<Pieces> = (0..size / width).map(|_| Pieces::default()).collect();
        for (place, index) in largest(&norms, count).into_iter().enumerate() {
            let block = &mut blocks[index % (size / width)];
            block.values.extend_from_slice(&rows[index * width..][..width]);
            if place < count.div_ceil(LEADING) {
                block.leading = block.values.len();
            }
        }
        TensorSample { blocks }
    }
}

/// Returns the samples of weights that read and write the stream, times the rotation, in blocks of `width` channels.
///
/// # Errors
/// Returns an error if a weight can't be read.
pub(super) fn samples(
    random: &HadamardRotation,
    width: usize,
    readers: &[SourceWeight],
    writers: &[SourceWeight],
) -> Result<Vec<TensorSample>> {
    let size = random.size() as usize;
    let tensors = (readers.len() + writers.len()).max(1);
    let weights: u64 = readers.iter().chain(writers).map(|weight| weight.elements()).sum();
    let pieces = |elements: u64| elements as usize / (width * tensors);
    let (most, least) = (ROWS * size / width, FEWEST_ROWS * size / width);
    let count = pieces(ELEMENTS.min(weights / SHARE)).clamp(least.min(pieces(ELEMENTS)).max(1), most);
    let candidates = CANDIDATES * (count * width).div_ceil(size);
    let sample = |index: usize| {
        let mut rows = match writers.get(index) {
            Some(writer) => largest_columns(writer, candidates)?,
            None => largest_rows(&readers[index - writers.len()], candidates)?,
        };
        let rows = rows.as_slice_mut().unwrap_or_default();
        random.multiply_rows(rows)?;
        Ok(TensorSample::of(rows, size, width, count))
    };
    let indices: Vec<usize> = (0..readers.len() + writers.len()).collect();
    in_parts(&indices, |part| part.iter().map(|index| sample(*index)).collect::<Result<Vec<_>>>())
        .into_iter()
        .collect::<Result<Vec<_>>>()
        .map(|parts| parts.into_iter().flatten().collect())
}

/// Returns the `count` rows of largest norm.
fn largest_rows(weight: &SourceWeight, count: usize) -> Result<Array2<f32>> {
    let chosen = largest(&WeightExtent::of(weight)?.row_squares, count);
    let columns = weight.columns() as usize;
    let mut rows = Array2::zeros((chosen.len(), columns));
    for (mut row, index) in rows.outer_iter_mut().zip(chosen) {
        if let Some(row) = row.as_slice_mut() {
            weight.read_rows(index as u64, row)?;
        }
    }
    Ok(rows)
}

/// Returns the `count` columns of largest norm, as rows.
fn largest_columns(weight: &SourceWeight, count: usize) -> Result<Array2<f32>> {
    let chosen = largest(&WeightExtent::of(weight)?.column_squares, count);
    let mut rows = Array2::zeros((chosen.len(), weight.rows() as usize));
    let mut row = vec![0.0; weight.columns() as usize];
    for (index, mut column) in rows.axis_iter_mut(Axis(1)).enumerate() {
        weight.read_rows(index as u64, &mut row)?;
        column.iter_mut().zip(&chosen).for_each(|(to, from)| *to = row[*from]);
    }
    weight.release(0..weight.elements());
    Ok(rows)
}

/// Returns the indices of the `count` largest numbers.
fn largest(values: &[f64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*b].total_cmp(&values[*a]));
    order.truncate(count);
    order
}

/// Processes fixed parts of a list on threads and returns the results in order. These are separate threads, because a
/// thread of the pool that waits here could block the work it waits for. If the system gives no thread, the caller does
/// the work.
fn in_parts<T: Sync, R: Send>(items: &[T], work: impl Fn(&[T]) -> R + Sync) -> Vec<R> {
    let (length, work) = (items.len().div_ceil(PARTS).max(1), &work);
    std::thread::scope(|scope| {
        let start = |part| std::thread::Builder::new().spawn_scoped(scope, move || work(part)).map_err(|_| work(part));
        let threads: Vec<_> = items.chunks(length).map(start).collect();
        let joined = threads.into_iter().map(|started| started.map_or_else(Ok, |thread| thread.join()));
        joined.map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_holds_the_pieces_of_largest_norm_from_the_largest_down() {
        // two rows of three blocks
        let rows = [1.0, 0.0, 5.0, 5.0, 2.0, 2.0, 3.0, 3.0, 0.0, -4.0, 0.5, 0.5];
        let sample = TensorSample::of(&rows, 6, 2, 4);
        let values =
            |only_leading| -> Vec<&[f32]> { sample.blocks.iter().map(|pieces| pieces.values(only_leading)).collect() };
        assert_eq!(values(false), [&[3.0, 3.0][..], &[5.0, 5.0, 0.0, -4.0], &[2.0, 2.0]]);
        // two of four
        assert_eq!(values(true), [&[3.0, 3.0][..], &[5.0, 5.0], &[]]);
        assert_eq!(sample.values().count(), 8);
    }
}
