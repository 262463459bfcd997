//! Products of two matrices, of f32 and of f32 or elements that are widened to it.

use half::f16;
use smallvec::SmallVec;

use super::aligned_buf::AlignedBuf;
use super::columns::{InterleavedColumns, StridedColumn};
use super::dispatch::{InstructionSet, with_lanes};
use super::dot::{MAX_COLUMNS, Rows, Stored, Sums, put_dots, values_of};
use super::layout::MatrixLayout;
use super::simd::{Kernel, Lanes};
use super::tiles::{self, Widen};

/// Maximum rows of the first matrix for which reading the second one in place beats packing it.
const FEW: usize = 8;

/// Element type of a product's second matrix. Its products are compiled in this crate, with this crate's optimisation.
pub trait MatrixElement: Stored {
    /// Computes [`product`].
    fn product(size: (usize, usize, usize), a: (&[f32], MatrixLayout), b: (&[Self], MatrixLayout), out: &mut [f32]);
}

macro_rules! products_of {
    ($($element:ty),*) => {$(
        impl MatrixElement for $element {
            fn product(
                size: (usize, usize, usize),
                a: (&[f32], MatrixLayout),
                b: (&[Self], MatrixLayout),
                out: &mut [f32],
            ) {
                product_with(size, a, b, out);
            }
        }
    )*};
}
products_of!(f32, f16);

/// `out = a b`, of sizes `[m, k]` and `[k, n]`; `out` is row-major and overwritten. Elements of `b` that aren't f32
/// give the bits of their values in f32.
///
/// # Panics
/// If a slice is too short for its layout.
pub fn product<B: MatrixElement>(
    size: (usize, usize, usize),
    a: (&[f32], MatrixLayout),
    b: (&[B], MatrixLayout),
    out: &mut [f32],
) {
    B::product(size, a, b, out);
}

fn product_with<B: Stored>(
    (m, k, n): (usize, usize, usize),
    (a, a_layout): (&[f32], MatrixLayout),
    (b, b_layout): (&[B], MatrixLayout),
    out: &mut [f32],
) {
    assert!(a.len() >= a_layout.extent(m, k) && b.len() >= b_layout.extent(k, n) && out.len() >= m.saturating_mul(n));
    if m == 0 || n == 0 {
        return;
    }
    if k > 0 && m <= MAX_COLUMNS && a_layout.column == 1 && b_layout.row == 1 {
        let columns: Columns<'_> = (0..m).map(|i| of_column(&a[i * a_layout.row..])).collect();
        let sums = Sums { values: out, row: 1, column: n };
        return by_dots(Rows { values: b, stride: b_layout.column, count: n }, &columns, k, sums);
    }
    if k > 0 && n <= MAX_COLUMNS && a_layout.column == 1 && b_layout.row == 1 {
        let Some(b) = B::floats(b) else {
            let mut room = AlignedBuf::new(n * k);
            for (j, room) in room.floats().chunks_exact_mut(k).enumerate() {
                with_lanes(Widened { elements: &b[j * b_layout.column..][..k], room });
            }
            let b_layout = MatrixLayout { row: 1, column: k };
            return product_with((m, k, n), (a, a_layout), (room.as_floats(), b_layout), out);
        };
        let columns: Columns<'_> = (0..n).map(|j| of_column(&b[j * b_layout.column..])).collect();
        let sums = Sums { values: out, row: n, column: 1 };
        return by_dots(Rows { values: a, stride: a_layout.row, count: m }, &columns, k, sums);
    }
    if m <= FEW && b_layout.column == 1 {
        return with_lanes(Combine { size: (m, k, n), a, a_layout, b, stride: b_layout.row, out });
    }
    let rows = Strided::new(a, a_layout, (m, k));
    let out_layout = MatrixLayout { row: n, column: 1 };
    tiles::multiply(InstructionSet::best(), (m, k, n), &rows, (b, b_layout), |_| (1.0, 0.0), (out, out_layout));
}

/// Computes [`product`] a few rows of the first matrix at a time: each row of the result has the bits that it has
/// alone.
///
/// # Panics
/// As [`product`].
pub fn product_of_few<B: MatrixElement>(
    (m, k, n): (usize, usize, usize),
    (a, a_layout): (&[f32], MatrixLayout),
    b: (&[B], MatrixLayout),
    out: &mut [f32],
) {
    for first in (0..m).step_by(FEW) {
        let count = FEW.min(m - first);
        let a = a.get(first * a_layout.row..).unwrap_or_default();
        product((count, k, n), (a, a_layout), b, &mut out[first * n..][..count * n]);
    }
}

/// Rows of a matrix within a slice.
struct Strided<'a> {
    values: &'a [f32],
    layout: MatrixLayout,
    size: (usize, usize),
}

impl<'a> Strided<'a> {
    /// # Panics
    /// If the slice is too short.
    fn new(values: &'a [f32], layout: MatrixLayout, (rows, depth): (usize, usize)) -> Self {
        assert!(values.len() >= layout.extent(rows, depth), "the matrix is larger than its slice");
        Strided { values, layout, size: (rows, depth) }
    }
}

// SAFETY: `new` has checked that all elements of the rows lie within the slice.
unsafe impl Widen for Strided<'_> {
    fn size(&self) -> (usize, usize) {
        self.size
    }

    #[inline(always)]
    unsafe fn widen<L: Lanes>(&self, row: usize, from: usize, count: usize, out: *mut f32) {
        // SAFETY: the row has these elements, and there is room for them, as promised.
        unsafe {
            let start = self.values.as_ptr().add(row * self.layout.row + from * self.layout.column);
            if self.layout.column == 1 {
                out.copy_from_nonoverlapping(start, count);
            } else {
                for k in 0..count {
                    *out.add(k) = *start.add(k * self.layout.column);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn prefetch<L: Lanes>(&self, _: usize, _: usize) {}
}

/// Widens elements that aren't f32 into `room`, which is as long.
struct Widened<'a, S> {
    elements: &'a [S],
    room: &'a mut [f32],
}

impl<S: Stored> Kernel for Widened<'_, S> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // SAFETY: as promised.
        unsafe { values_of::<S, L>(self.elements, self.room) };
    }
}

type Columns<'a> = SmallVec<[StridedColumn<'a>; MAX_COLUMNS]>;

/// Contiguous column.
fn of_column(values: &[f32]) -> StridedColumn<'_> {
    StridedColumn { values, step: 1 }
}

/// Multiplies rows of one matrix with a few columns of the other, both contiguous along `k`.
fn by_dots<S: Stored>(rows: Rows<'_, S>, columns: &[StridedColumn<'_>], k: usize, sums: Sums<'_>) {
    put_dots(rows, InterleavedColumns::new(columns, k, k).part(0), sums);
}

/// Sums of the contiguous rows of `b`, times elements of `a`.
struct Combine<'a, B> {
    size: (usize, usize, usize),
    a: &'a [f32],
    a_layout: MatrixLayout,
    b: &'a [B],
    stride: usize,
    out: &'a mut [f32],
}

impl<B: Stored> Kernel for Combine<'_, B> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(mut self) {
        let (m, _, n) = self.size;
        // columns in batches that leave registers for the sums of four rows, then one vector at a time
        let mut column = 0;
        if const { L::REGISTERS >= 32 } {
            while column + 4 * L::COUNT <= n {
                // SAFETY: as promised; the columns lie within the rows.
                column += unsafe { self.rows::<L, 4>(column) };
            }
        }
        while column + L::COUNT <= n {
            let pair = column + 2 * L::COUNT <= n;
            // SAFETY: as promised; the columns lie within the rows.
            unsafe {
                column += if pair { self.rows::<L, 2>(column) } else { self.rows::<L, 1>(column) };
            }
        }
        for i in 0..m {
            for column in column..n {
                self.out[i * n + column] = self.element(i, column);
            }
        }
    }
}

impl<B: Stored> Combine<'_, B> {
    /// Computes `V` vectors of columns for all rows of the result; returns their number of columns.
    ///
    /// # Safety
    /// The processor has the instruction set of `L`; that many columns follow `column`.
    #[inline(always)]
    unsafe fn rows<L: Lanes, const V: usize>(&mut self, column: usize) -> usize {
        let mut row = 0;
        while row < self.size.0 {
            // SAFETY: as promised.
            unsafe {
                row += if row + 4 <= self.size.0 {
                    self.tile::<L, 4, V>(row, column)
                } else if row + 3 == self.size.0 {
                    self.tile::<L, 3, V>(row, column)
                } else if row + 2 <= self.size.0 {
                    self.tile::<L, 2, V>(row, column)
                } else {
                    self.tile::<L, 1, V>(row, column)
                };
            }
        }
        V * L::COUNT
    }

    /// Computes `R` rows and `V` vectors of columns of the result; returns `R`.
    ///
    /// # Safety
    /// As [`rows`](Combine::rows); that many rows follow `row`.
    #[inline(always)]
    unsafe fn tile<L: Lanes, const R: usize, const V: usize>(&mut self, row: usize, column: usize) -> usize {
        let (_, k, n) = self.size;
        // SAFETY: `product` has checked that the matrices lie within their slices.
        unsafe {
            let mut sums = [[L::splat(0.0); V]; R];
            for j in 0..k {
                let from = self.b.as_ptr().add(j * self.stride + column);
                let b: [L; V] = std::array::from_fn(|v| B::lanes(from.add(v * L::COUNT)));
                for (r, sums) in sums.iter_mut().enumerate() {
                    let place = (row + r) * self.a_layout.row + j * self.a_layout.column;
                    let a = L::splat(*self.a.as_ptr().add(place));
                    for v in 0..V {
                        sums[v] = b[v].mul_add(a, sums[v]);
                    }
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                for (v, sum) in sums.iter().enumerate() {
                    sum.store(self.out.as_mut_ptr().add((row + r) * n + column + v * L::COUNT));
                }
            }
        }
        R
    }

    /// Element of the result.
    fn element(&self, row: usize, column: usize) -> f32 {
        let a = |j: usize| self.a[row * self.a_layout.row + j * self.a_layout.column];
        (0..self.size.1).map(|j| a(j) * self.b[j * self.stride + column].value()).sum()
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::super::dot::tests::noise;
    use super::*;

    #[test]
    fn rows_are_combined_alike_by_every_instruction_set() {
        for (m, k, n) in [(1, 3, 64), (7, 20, 101), (8, 1, 16), (5, 9, 40), (2, 0, 17)] {
            let (a, b) = (noise(m * k, 1), noise(k * (n + 2), 2));
            InstructionSet::available().for_each(|set| {
                let mut out = vec![f32::NAN; m * n];
                let a_layout = MatrixLayout { row: 1, column: m };
                set.run_lanes(Combine { size: (m, k, n), a: &a, a_layout, b: &b, stride: n + 2, out: &mut out });
                for (i, found) in out.iter().enumerate() {
                    let exact: f32 = (0..k).map(|j| a[i / n + j * m] * b[j * (n + 2) + i % n]).sum();
                    assert!((found - exact).abs() < 1e-5, "{set:?} {m} {k} {n}: {found} {exact}");
                }
            });
        }
    }

    #[test]
    fn a_row_among_others_has_the_bits_that_it_has_alone() {
        for (m, k, n) in [(1, 16, 5), (9, 64, 48), (28, 64, 400), (28, 400, 64), (13, 33, 37)] {
            let (a, b) = (noise(m * k, 1), noise(k * n, 2));
            let a_layout = MatrixLayout { row: k, column: 1 };
            for b_layout in [MatrixLayout { row: n, column: 1 }, MatrixLayout { row: 1, column: k }] {
                let mut out = vec![f32::NAN; m * n];
                product_of_few((m, k, n), (&a, a_layout), (&b[..], b_layout), &mut out);
                for (a, found) in a.chunks_exact(k).zip(out.chunks_exact(n)) {
                    let mut alone = vec![f32::NAN; n];
                    product((1, k, n), (a, a_layout), (&b[..], b_layout), &mut alone);
                    assert!(found.iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits()), "{m} {k} {n}");
                }
            }
        }
    }

    #[test]
    fn every_path_gives_the_same_product() {
        for (m, k, n) in [(1, 16, 5), (3, 7, 9), (4, 10, 36), (8, 5, 3), (20, 17, 11), (2, 0, 3)] {
            let (a, b) = (noise(m * k, 1), noise(k * n, 2));
            let layouts = |rows: usize, columns: usize| {
                [MatrixLayout { row: columns, column: 1 }, MatrixLayout { row: 1, column: rows }]
            };
            for a_layout in layouts(m, k) {
                for b_layout in layouts(k, n) {
                    let mut out = vec![f32::NAN; m * n];
                    product((m, k, n), (&a, a_layout), (&b[..], b_layout), &mut out);
                    for i in 0..m {
                        for j in 0..n {
                            let exact: f32 = (0..k)
                                .map(|l| {
                                    a[i * a_layout.row + l * a_layout.column]
                                        * b[l * b_layout.row + j * b_layout.column]
                                })
                                .sum();
                            assert!((out[i * n + j] - exact).abs() < 1e-5, "{m} {k} {n}: {} {exact}", out[i * n + j]);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn half_precision_gives_the_bits_of_its_values() {
        // by columns of the second, by columns of the first, row by row, and in tiles
        for (m, k, n) in [(3, 64, 40), (20, 50, 7), (7, 40, 70), (30, 64, 150), (40, 200, 64), (2, 0, 3)] {
            let (a, halves) = (noise(m * k, 1), noise(k * n, 2).into_iter().map(f16::from_f32).collect::<Vec<_>>());
            let values: Vec<f32> = halves.iter().map(|half| half.to_f32()).collect();
            let a_layout = MatrixLayout { row: k, column: 1 };
            for b_layout in [MatrixLayout { row: n, column: 1 }, MatrixLayout { row: 1, column: k }] {
                let [mut found, mut expected] = [(); 2].map(|()| vec![f32::NAN; m * n]);
                product((m, k, n), (&a, a_layout), (&halves[..], b_layout), &mut found);
                product((m, k, n), (&a, a_layout), (&values[..], b_layout), &mut expected);
                assert!(found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{m} {k} {n}");
            }
        }
    }
}
