//! Dot products of stored rows with a few columns, the bulk of the work of decoding. A stored row is read once, widened
//! in registers and multiplied with every column.

use half::f16;

use super::columns::{ColumnPart, GROUP};
use super::dispatch::with_lanes;
use super::simd::{CACHE_LINE, Kernel, Lanes};

/// Maximum number of columns.
pub const MAX_COLUMNS: usize = 8;

/// Element type of stored rows.
pub trait Stored: Copy + Sync {
    /// Value of the element.
    fn value(self) -> f32;

    /// Elements as floats, if they are stored as f32.
    fn floats(_: &[Self]) -> Option<&[f32]> {
        None
    }

    /// Loads a vector of values.
    ///
    /// # Safety
    /// As [`Lanes::load`].
    unsafe fn lanes<L: Lanes>(at: *const Self) -> L;
}

impl Stored for f32 {
    #[inline(always)]
    fn value(self) -> f32 {
        self
    }

    #[inline(always)]
    fn floats(elements: &[f32]) -> Option<&[f32]> {
        Some(elements)
    }

    #[inline(always)]
    unsafe fn lanes<L: Lanes>(at: *const f32) -> L {
        // SAFETY: as promised.
        unsafe { L::load(at) }
    }
}

impl Stored for f16 {
    #[inline(always)]
    fn value(self) -> f32 {
        self.to_f32()
    }

    #[inline(always)]
    unsafe fn lanes<L: Lanes>(at: *const f16) -> L {
        // SAFETY: as promised.
        unsafe { L::load_f16(at) }
    }
}

impl Stored for i8 {
    #[inline(always)]
    fn value(self) -> f32 {
        self.into()
    }

    #[inline(always)]
    unsafe fn lanes<L: Lanes>(at: *const i8) -> L {
        // SAFETY: as promised.
        unsafe { L::load_i8(at) }
    }
}

/// Values of elements: the elements themselves, or their values in `room`, which is at least as long.
///
/// # Safety
/// The processor has the instruction set of `L`.
#[inline(always)]
pub(super) unsafe fn values_of<'a, S: Stored, L: Lanes>(elements: &'a [S], room: &'a mut [f32]) -> &'a [f32] {
    if let Some(values) = S::floats(elements) {
        return values;
    }
    let room = &mut room[..elements.len()];
    let (vectors, rest) = (elements.chunks_exact(L::COUNT), room.len() / L::COUNT * L::COUNT);
    for (vector, values) in vectors.zip(room.chunks_exact_mut(L::COUNT)) {
        // SAFETY: as promised; the chunks have as many elements as a vector.
        unsafe { S::lanes::<L>(vector.as_ptr()).store(values.as_mut_ptr()) };
    }
    room[rest..].iter_mut().zip(&elements[rest..]).for_each(|(value, element)| *value = element.value());
    room
}

/// Rows of a matrix: row `r` begins at `r * stride`.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, S> {
    pub values: &'a [S],
    /// Distance between rows.
    pub stride: usize,
    /// Number of rows.
    pub count: usize,
}

/// Destination of the products: that of row `r` and column `c` is added to `values[r * row + c * column]`.
pub(super) struct Sums<'a> {
    pub values: &'a mut [f32],
    /// Distance between rows.
    pub row: usize,
    /// Distance between columns.
    pub column: usize,
}

/// Factors of rows: products of row `r` are multiplied by `values[r * row]`.
#[derive(Clone, Copy)]
pub(super) struct Factors<'a> {
    pub values: &'a [f32],
    /// Distance between rows; 0 for one factor for all rows.
    pub row: usize,
}

/// Adds dot products of rows and columns, times the row's factor, to sums. A product has the same bits whatever other
/// rows and columns there are.
///
/// # Panics
/// If a slice is too short or there are more than [`MAX_COLUMNS`] columns.
pub(super) fn add_dots<S: Stored>(rows: Rows<'_, S>, columns: ColumnPart<'_>, factors: Factors<'_>, sums: Sums<'_>) {
    with_lanes(Dots::new(rows, columns, Some(factors), sums));
}

/// Overwrites `products` with dot products of rows and columns.
///
/// # Panics
/// As [`add_dots`].
pub(super) fn put_dots<S: Stored>(rows: Rows<'_, S>, columns: ColumnPart<'_>, products: Sums<'_>) {
    with_lanes(Dots::new(rows, columns, None, products));
}

struct Dots<'a, S> {
    rows: Rows<'a, S>,
    columns: ColumnPart<'a>,
    /// If `None`, products overwrite the sums.
    factors: Option<Factors<'a>>,
    sums: Sums<'a>,
}

impl<'a, S: Stored> Dots<'a, S> {
    /// # Panics
    /// As [`add_dots`].
    fn new(rows: Rows<'a, S>, columns: ColumnPart<'a>, factors: Option<Factors<'a>>, sums: Sums<'a>) -> Self {
        let count = columns.count();
        assert!((1..=MAX_COLUMNS).contains(&count));
        if let Some(last) = rows.count.checked_sub(1) {
            assert!(rows.values.len() >= last * rows.stride + columns.length());
            assert!(sums.values.len() > last * sums.row + (count - 1) * sums.column);
            assert!(factors.is_none_or(|factors| factors.values.len() > last * factors.row));
        }
        Dots { rows, columns, factors, sums }
    }
}

impl<S: Stored> Kernel for Dots<'_, S> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // SAFETY: as promised; `new` has checked the slices.
        unsafe {
            let count = self.columns.count();
            // numbers of columns, each with the rows that are computed at a time
            macro_rules! rows_of_columns {
                ($($columns:literal: $rows:literal),*; $most:literal) => {
                    match count {
                        $($columns => self.few::<L, $rows, $columns>(),)*
                        _ => self.few::<L, $most, MAX_COLUMNS>(),
                    }
                };
            }
            // memory is read fastest in one stream; for more columns, as many rows as leave registers for their sums
            if const { L::REGISTERS >= 32 } {
                rows_of_columns!(1: 1, 2: 4, 3: 4, 4: 4, 5: 4, 6: 4, 7: 3; 3)
            } else if const { L::REGISTERS >= 16 } {
                rows_of_columns!(1: 1, 2: 4, 3: 3, 4: 2, 5: 2, 6: 2, 7: 1; 1)
            } else {
                rows_of_columns!(1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1; 1)
            }
        }
    }
}

impl<S: Stored> Dots<'_, S> {
    /// Computes `C` columns, `R` rows at a time.
    ///
    /// # Safety
    /// The processor has the instruction set of `L`; there are `C` columns.
    #[inline(always)]
    unsafe fn few<L: Lanes, const R: usize, const C: usize>(mut self) {
        let Rows { values, stride, count } = self.rows;
        let (columns, length) = (self.columns.values().as_ptr(), self.columns.length());
        for row in (0..count).step_by(R) {
            let here = R.min(count - row);
            // SAFETY: the rows lie within their slice, and the columns are as long.
            let products = unsafe {
                let first = values.as_ptr().add(row * stride);
                // the last tile may have fewer rows: it computes its last one again
                let rows = std::array::from_fn(|r| first.add(r.min(here - 1) * stride));
                let next = rows.map(|row: *const S| row.wrapping_add(R * stride));
                Tile::<S, R, C> { rows, next, columns, length }.products::<L>()
            };
            self.put(row, here, products);
        }
    }

    /// Adds the products of columns and `count` rows to the sums, or overwrites the sums.
    #[inline(always)]
    fn put<const R: usize, const C: usize>(&mut self, first: usize, count: usize, products: [[f32; R]; C]) {
        let Sums { values, row, column } = &mut self.sums;
        for (c, products) in products.iter().enumerate() {
            let start = first * *row + c * *column;
            let products_of_rows = products.iter().enumerate().take(count);
            match self.factors {
                None if *row == 1 && count == R => values[start..start + R].copy_from_slice(products),
                None => products_of_rows.for_each(|(r, product)| values[start + r * *row] = *product),
                Some(factors) => {
                    for (r, product) in products_of_rows {
                        values[start + r * *row] += product * factors.values[(first + r) * factors.row];
                    }
                }
            }
        }
    }
}

/// `R` rows and `C` columns whose sums fit into registers.
struct Tile<S, const R: usize, const C: usize> {
    rows: [*const S; R],
    /// Following rows, for prefetching; they need not be readable.
    next: [*const S; R],
    /// Groups of elements in the layout of [`ColumnPart`].
    columns: *const f32,
    length: usize,
}

/// Sets of sums of a row and a column.
const SETS: usize = 4;

/// Prefetch distance of a single row in bytes: more than memory delivers while its start is processed. A processor's
/// own prefetching ends at each page.
pub(super) const PREFETCH_DISTANCE: usize = 8192;

/// Safety of all functions: the processor has the instruction set of `L`, and `length` elements of each row and column
/// are readable.
impl<S: Stored, const R: usize, const C: usize> Tile<S, R, C> {
    /// Products of columns and rows. The order of summation doesn't depend on other rows and columns: each vector of
    /// elements belongs to one of several sets of sums, which are added at the end. A few vectors all belong to one
    /// set.
    #[inline(always)]
    unsafe fn products<L: Lanes>(&self) -> [[f32; R]; C] {
        const { assert!(GROUP.is_multiple_of(L::COUNT) && (SETS * L::COUNT).is_multiple_of(GROUP)) };
        // SAFETY: as promised.
        unsafe {
            let sums = if self.length <= SETS * L::COUNT {
                for row in &self.rows {
                    prefetch::<S, L>(row.wrapping_byte_add(PREFETCH_DISTANCE), self.length);
                }
                let mut sums = [[L::splat(0.0); C]; R];
                self.rest(0, &mut sums);
                sums
            } else if R * C == 1 {
                self.sets_at_once::<L>()
            } else {
                self.sets_in_turn::<L>()
            };
            let tail = self.length - self.length % L::COUNT;
            let mut products = across(&std::array::from_fn(|c| std::array::from_fn(|r| sums[r][c])));
            if tail < self.length {
                for (c, products) in products.iter_mut().enumerate() {
                    for (r, product) in products.iter_mut().enumerate() {
                        let term = |k: usize| (*self.rows[r].add(k)).value() * *self.column(c, k);
                        *product += (tail..self.length).map(term).sum::<f32>();
                    }
                }
            }
            products
        }
    }

    /// Computes all sets at the same time, so that multiplications don't wait for each other.
    #[inline(always)]
    unsafe fn sets_at_once<L: Lanes>(&self) -> [[L; C]; R] {
        // SAFETY: as promised.
        unsafe {
            let mut sums = [[[L::splat(0.0); C]; R]; SETS];
            let whole = self.length - self.length % (SETS * L::COUNT);
            for k in (0..whole).step_by(SETS * L::COUNT) {
                prefetch::<S, L>(self.rows[0].wrapping_add(k).wrapping_byte_add(PREFETCH_DISTANCE), SETS * L::COUNT);
                for (i, sums) in sums.iter_mut().enumerate() {
                    self.step(k + i * L::COUNT, sums);
                }
            }
            self.rest(whole, &mut sums[0]);
            let [first, second, third, fourth] = sums;
            added(added(first, second), added(third, fourth))
        }
    }

    /// Computes one set after the other: registers hold the sums of one set, and these are enough to hide latencies.
    #[inline(always)]
    unsafe fn sets_in_turn<L: Lanes>(&self) -> [[L; C]; R] {
        // SAFETY: as promised.
        unsafe {
            let whole = self.length - self.length % (SETS * L::COUNT);
            let zeros = [[L::splat(0.0); C]; R];
            let (mut sums, mut before) = (zeros, zeros);
            for i in 0..SETS {
                let mut own = zeros;
                for k in (0..whole).step_by(SETS * L::COUNT) {
                    if i == 0 {
                        for row in &self.next {
                            prefetch::<S, L>(row.wrapping_add(k), SETS * L::COUNT);
                        }
                    }
                    self.step(k + i * L::COUNT, &mut own);
                }
                match i {
                    0 => {
                        self.rest(whole, &mut own);
                        before = own;
                    }
                    2 => before = own,
                    1 => sums = added(before, own),
                    _ => sums = added(sums, added(before, own)),
                }
            }
            sums
        }
    }

    /// Adds the products of the remaining vectors from `k` on, which belong to the first set.
    #[inline(always)]
    unsafe fn rest<L: Lanes>(&self, mut k: usize, sums: &mut [[L; C]; R]) {
        while k + L::COUNT <= self.length {
            // SAFETY: as promised.
            unsafe { self.step(k, sums) };
            k += L::COUNT;
        }
    }

    /// Adds the products of the vectors that begin with element `k`.
    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "a column is loaded once, and is in one register at a time")]
    unsafe fn step<L: Lanes>(&self, k: usize, sums: &mut [[L; C]; R]) {
        // SAFETY: as promised.
        unsafe {
            let w: [L; R] = std::array::from_fn(|r| S::lanes(self.rows[r].add(k)));
            for c in 0..C {
                let x = L::load(self.column(c, k));
                for r in 0..R {
                    sums[r][c] = w[r].mul_add(x, sums[r][c]);
                }
            }
        }
    }

    /// Address of an element of a column.
    #[inline(always)]
    unsafe fn column(&self, c: usize, k: usize) -> *const f32 {
        // SAFETY: as promised.
        unsafe { self.columns.add((k & !(GROUP - 1)).wrapping_mul(C) + c * GROUP + k % GROUP) }
    }
}

/// Prefetches the cache lines of `count` elements, which need not be readable.
///
/// # Safety
/// The processor has the instruction set of `L`.
#[inline(always)]
unsafe fn prefetch<S, L: Lanes>(at: *const S, count: usize) {
    for line in 0..(count * size_of::<S>()).div_ceil(CACHE_LINE) {
        // SAFETY: as promised; the address need not be one that can be read.
        unsafe { L::prefetch_far(at.cast::<i8>().wrapping_add(line * CACHE_LINE)) };
    }
}

/// Adds element by element.
///
/// # Safety
/// The processor has the instruction set of `L`.
#[inline(always)]
unsafe fn added<L: Lanes, const R: usize, const C: usize>(mut sums: [[L; C]; R], others: [[L; C]; R]) -> [[L; C]; R] {
    for (sums, others) in sums.iter_mut().zip(others) {
        for (sum, other) in sums.iter_mut().zip(others) {
            // SAFETY: as promised.
            *sum = unsafe { sum.add(other) };
        }
    }
    sums
}

/// Sum of each vector.
///
/// # Safety
/// The processor has the instruction set of `L`.
#[inline(always)]
unsafe fn across<L: Lanes, const R: usize, const C: usize>(sums: &[[L; R]; C]) -> [[f32; R]; C] {
    let mut found = [[0.0; R]; C];
    let (eights, rest) = sums.as_flattened().as_chunks::<8>();
    let (of_eights, of_rest) = found.as_flattened_mut().as_chunks_mut::<8>();
    // SAFETY: as promised.
    unsafe {
        for (found, eight) in of_eights.iter_mut().zip(eights) {
            *found = L::sums(*eight);
        }
        for (found, sum) in of_rest.iter_mut().zip(rest) {
            *found = sum.sum();
        }
    }
    found
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::columns::{InterleavedColumns, StridedColumn};
    use super::*;
    use crate::dispatch::InstructionSet;

    /// Reproducible pseudo-random numbers in -1..1.
    pub fn noise(count: usize, mut seed: u32) -> Vec<f32> {
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    /// Columns in one part.
    fn beside(columns: &[Vec<f32>]) -> InterleavedColumns<'_> {
        let strided: Vec<_> = columns.iter().map(|values| StridedColumn { values, step: 1 }).collect();
        InterleavedColumns::new(&strided, columns[0].len(), columns[0].len())
    }

    fn check<S: Stored>(store: impl Fn(f32) -> S) {
        for length in [1, 7, 8, 16, 33, 100] {
            for count in [1, 2, 3, 4, 5, 7] {
                for column_count in 1..=MAX_COLUMNS {
                    let stride = length + 3;
                    let values: Vec<S> = noise(count * stride, 7).into_iter().map(&store).collect();
                    let inputs: Vec<Vec<f32>> = (0..column_count).map(|c| noise(length, 100 + c as u32)).collect();
                    let columns = beside(&inputs);
                    let scales: Vec<f32> = (0..count).flat_map(|r| [1.0 + r as f32, f32::NAN]).collect();
                    let factors = Factors { values: &scales, row: 2 };
                    InstructionSet::available().for_each(|run| {
                        let mut found = vec![1.0; count * column_count];
                        let rows = Rows { values: &values, stride, count };
                        let sums = Sums { values: &mut found, row: 1, column: count };
                        run.run_lanes(Dots::new(rows, columns.part(0), Some(factors), sums));
                        // contiguous and strided
                        for (row, column) in [(1, count), (column_count, 1)] {
                            let mut put = vec![f32::NAN; count * column_count];
                            run.run_lanes(Dots::new(
                                rows,
                                columns.part(0),
                                None,
                                Sums { values: &mut put, row, column },
                            ));
                            for (i, found) in found.iter().enumerate() {
                                let (c, r) = (i / count, i % count);
                                let sum = put[r * row + c * column] * (1.0 + r as f32) + 1.0;
                                assert_eq!(sum.to_bits(), found.to_bits());
                            }
                        }
                        for (i, found) in found.iter().enumerate() {
                            let (c, r) = (i / count, i % count);
                            let (row, scale) = (&values[r * stride..][..length], 1.0 + r as f64);
                            let terms = row.iter().zip(&inputs[c]).map(|(w, x)| f64::from(w.value() * x));
                            let exact = terms.sum::<f64>() * scale + 1.0;
                            let size = row.iter().map(|w| f64::from(w.value().abs())).sum::<f64>() * scale;
                            assert!((f64::from(*found) - exact).abs() <= 2e-6 * size + 1e-6, "{found} {exact}");
                        }
                    });
                }
            }
        }
    }

    fn check_alone<S: Stored>(store: impl Fn(f32) -> S) {
        for length in [5, 16, 63, 64, 130, 896] {
            let (count, stride) = (9, length + 1);
            let values: Vec<S> = noise(count * stride, 3).into_iter().map(&store).collect();
            let inputs: Vec<Vec<f32>> = (0..MAX_COLUMNS).map(|c| noise(length, 50 + c as u32)).collect();
            let factors = Factors { values: &[0.37], row: 0 };
            InstructionSet::available().for_each(|run| {
                let products = |columns: &[Vec<f32>], row: usize| {
                    let mut values_of = vec![0.5; count * columns.len()];
                    let rows = Rows { values: &values[row * stride..], stride, count: count - row };
                    let sums = Sums { values: &mut values_of, row: columns.len(), column: 1 };
                    run.run_lanes(Dots::new(rows, beside(columns).part(0), Some(factors), sums));
                    values_of
                };
                let alone: Vec<Vec<f32>> =
                    inputs.iter().map(|column| products(std::slice::from_ref(column), 0)).collect();
                for together in 2..=MAX_COLUMNS {
                    for first in [0, MAX_COLUMNS - together] {
                        let found = products(&inputs[first..][..together], 0);
                        // from another row on, other rows share a tile
                        let later = products(&inputs[first..][..together], 2);
                        for (i, found) in found.iter().enumerate() {
                            let (r, c) = (i / together, i % together);
                            assert_eq!(
                                found.to_bits(),
                                alone[first + c][r].to_bits(),
                                "{together} columns of {length}"
                            );
                            assert!(r < 2 || later[i - 2 * together].to_bits() == found.to_bits());
                        }
                    }
                }
            });
        }
    }

    #[test]
    fn a_product_has_the_same_bits_whatever_is_beside_it() {
        check_alone(|v| v);
        check_alone(f16::from_f32);
        check_alone(|v| (v * 127.0) as i8);
    }

    #[test]
    fn products_of_every_size_agree_with_exact_ones_for_every_instruction_set() {
        check(|v| v);
        check(f16::from_f32);
        check(|v| (v * 127.0) as i8);
    }
}
