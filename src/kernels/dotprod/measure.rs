//! Units of columns' integers, column by column, or many at a time if they are neighbours in the rows of a matrix.

use super::ROWS_AHEAD;
use crate::columns::StridedColumn;
use crate::digits::{Activations, MAX_DEPTH, Unit, third_squared};
use crate::dispatch::{Vectorize, vectorized};
use crate::prefetch::prefetch;

/// Maximum columns that are measured together.
pub const STRIP: usize = 128;
/// Elements of a strip of columns, which is read twice: they stay in the second-level cache.
const STRIP_ELEMENTS: usize = 1 << 17;
/// Elements of a cache line.
const LINE: usize = 16;

/// Column with its unit. Only [`StridedColumn::measured`] and [`measure_beside`] construct it.
#[derive(Clone, Copy)]
pub struct MeasuredColumn<'a> {
    pub(super) column: StridedColumn<'a>,
    pub(super) count: usize,
    pub(super) unit: Unit,
}

impl<'a> StridedColumn<'a> {
    /// Measures `count` elements. Returns `None` if they can't be written in digits: all must be finite, and sums of
    /// products must fit into 32 bits.
    pub fn measured(self, count: usize, activations: Activations) -> Option<MeasuredColumn<'a>> {
        let fits = (self.step > 0 || count == 1) && (1..=MAX_DEPTH).contains(&count);
        let unit = fits.then(|| vectorized(Measure { column: self, count, activations })).flatten()?;
        Some(MeasuredColumn { column: self, count, unit })
    }
}

/// Search for the unit of a column.
struct Measure<'a> {
    column: StridedColumn<'a>,
    count: usize,
    activations: Activations,
}

impl Vectorize for Measure<'_> {
    type Output = Option<Unit>;

    #[inline(always)]
    fn run(self) -> Option<Unit> {
        #[inline(always)]
        fn unit<'a>(
            elements: impl Iterator<Item = &'a f32> + Clone,
            count: usize,
            activations: Activations,
        ) -> Option<Unit> {
            let largest = elements.clone().fold(0, |largest, element| element.abs().to_bits().max(largest));
            let few = Unit::of_few(largest)?;
            // SAFETY: the unit is that of these elements.
            let square = |element: &f32| unsafe { third_squared(*element, few.inverse) };
            Unit::of(activations, largest, elements.map(square).fold(0, u32::wrapping_add), count)
        }
        let Measure { column, count, activations } = self;
        match column {
            // contiguous elements are read in vectors
            StridedColumn { values, step: 1 } => unit(values[..count].iter(), count, activations),
            column => unit(column.elements(count), count, activations),
        }
    }
}

/// Measures columns that are neighbours in the rows of a matrix, as [`StridedColumn::measured`] does each. Element
/// `k` of column `c` is `x[k * step + c]`.
pub fn measure_beside<'a>(
    (x, step): (&'a [f32], usize),
    count: usize,
    activations: Activations,
    out: &mut [Option<MeasuredColumn<'a>>],
) {
    let strip = (STRIP_ELEMENTS / count.max(1)).next_multiple_of(2 * LINE).min(STRIP);
    for (i, out) in out.chunks_mut(strip).enumerate() {
        let x = &x[i * strip..];
        let fits = step >= out.len() && (1..=MAX_DEPTH).contains(&count);
        let work = || vectorized(MeasureBeside { x, step, columns: out.len(), count, activations });
        let units = fits.then(work).flatten();
        for (c, out) in out.iter_mut().enumerate() {
            let column = StridedColumn { values: &x[c..], step };
            *out = match &units {
                Some(units) => units[c].map(|unit| MeasuredColumn { column, count, unit }),
                None => column.measured(count, activations),
            };
        }
    }
}

/// Search for the units of neighbouring columns. `None` if an element isn't finite.
struct MeasureBeside<'a> {
    x: &'a [f32],
    step: usize,
    columns: usize,
    count: usize,
    activations: Activations,
}

impl Vectorize for MeasureBeside<'_> {
    type Output = Option<Vec<Option<Unit>>>;

    #[inline(always)]
    fn run(self) -> Self::Output {
        let MeasureBeside { x, step, columns, count, activations } = self;
        let rows = || {
            (0..count).map(|k| {
                // rows are too far apart for the processor's own prefetching
                let next = x.as_ptr().wrapping_add((k + ROWS_AHEAD) * step);
                (0..columns).step_by(LINE).for_each(|c| prefetch(next.wrapping_add(c)));
                &x[k * step..][..columns]
            })
        };
        let mut largest = vec![0; columns];
        for row in rows() {
            largest.iter_mut().zip(row).for_each(|(largest, x)| *largest = x.abs().to_bits().max(*largest));
        }
        let inverses = largest.iter().map(|largest| Some(Unit::of_few(*largest)?.inverse));
        let inverses: Vec<f32> = inverses.collect::<Option<_>>()?;
        let mut squares = vec![0u32; columns];
        for row in rows() {
            for ((squares, x), inverse) in squares.iter_mut().zip(row).zip(&inverses) {
                // SAFETY: the unit is that of the column, whose elements are finite.
                *squares = squares.wrapping_add(unsafe { third_squared(*x, *inverse) });
            }
        }
        let unit = |(largest, squares): (&u32, &u32)| Unit::of(activations, *largest, *squares, count);
        Some(largest.iter().zip(&squares).map(unit).collect())
    }
}
