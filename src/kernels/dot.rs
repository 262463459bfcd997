//! Dot products of stored rows with a few columns: where a model spends its time when it writes one token after the
//! other. A stored row is read once, widened in registers and multiplied with every column.

use half::f16;

use super::simd::{CACHE_LINE, Dispatch, Kernel, Lanes, Widest};

/// Most columns that [`add_dots`] takes.
pub const MOST_COLUMNS: usize = 8;

/// An element that rows are stored in.
pub trait Stored: Copy + Sync {
    /// Its value.
    fn value(self) -> f32;

    /// Elements that are bytes.
    #[cfg_attr(not(all(target_arch = "x86_64", target_os = "linux")), allow(dead_code))] // where there is no AMX
    fn bytes(_: &[Self]) -> Option<&[i8]> {
        None
    }

    /// Values from memory.
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

    fn bytes(values: &[i8]) -> Option<&[i8]> {
        Some(values)
    }

    #[inline(always)]
    unsafe fn lanes<L: Lanes>(at: *const i8) -> L {
        // SAFETY: as promised.
        unsafe { L::load_i8(at) }
    }
}

/// Rows of a matrix: row `r` begins at `r * stride`.
#[derive(Clone, Copy)]
pub struct Rows<'a, S> {
    /// The elements.
    pub values: &'a [S],
    /// From row to row.
    pub stride: usize,
    /// How many rows.
    pub count: usize,
}

/// Where the products go: that of row `r` and column `c` is added to `values[r * row + c * column]`.
pub struct Sums<'a> {
    /// The sums.
    pub values: &'a mut [f32],
    /// From row to row.
    pub row: usize,
    /// From column to column.
    pub column: usize,
}

/// What the products of each row are multiplied by: row `r` by `values[r * row]`.
#[derive(Clone, Copy)]
pub struct Factors<'a> {
    /// The factors.
    pub values: &'a [f32],
    /// From row to row; 0 if all have the same.
    pub row: usize,
}

/// Adds the dot products of rows and columns, times the row's factor, to sums. The columns are equally long, and so
/// are the rows. A product has the same bits whatever other rows and columns there are.
///
/// # Panics
/// If a slice is too short or there are more than [`MOST_COLUMNS`] columns.
pub fn add_dots<S: Stored>(rows: Rows<'_, S>, columns: &[&[f32]], factors: Factors<'_>, sums: Sums<'_>) {
    let length = columns.first().map_or(0, |c| c.len());
    if rows.count == 0 || columns.is_empty() {
        return;
    }
    assert!(columns.len() <= MOST_COLUMNS && columns.iter().all(|c| c.len() == length));
    assert!(rows.values.len() >= (rows.count - 1) * rows.stride + length);
    assert!(sums.values.len() > (rows.count - 1) * sums.row + (columns.len() - 1) * sums.column);
    assert!(factors.values.len() > (rows.count - 1) * factors.row);
    Widest.run(Dots { rows, columns, length, factors, sums });
}

struct Dots<'a, S> {
    rows: Rows<'a, S>,
    columns: &'a [&'a [f32]],
    length: usize,
    factors: Factors<'a>,
    sums: Sums<'a>,
}

impl<S: Stored> Kernel for Dots<'_, S> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // SAFETY: as promised; `add_dots` has checked the slices.
        unsafe {
            match self.columns.len() {
                // memory is read fastest from end to end
                1 => self.few::<L, 1, 1>(),
                // as many rows as leave room for their sums in the registers
                2 => self.few::<L, 2, 4>(),
                3 if L::REGISTERS >= 32 => self.few::<L, 3, 4>(),
                4 if L::REGISTERS >= 32 => self.few::<L, 4, 4>(),
                5 if L::REGISTERS >= 32 => self.few::<L, 5, 4>(),
                6 if L::REGISTERS >= 32 => self.few::<L, 6, 4>(),
                7 if L::REGISTERS >= 32 => self.few::<L, 7, 3>(),
                8 if L::REGISTERS >= 32 => self.few::<L, 8, 3>(),
                3 => self.few::<L, 3, 3>(),
                4 => self.few::<L, 4, 2>(),
                5 => self.few::<L, 5, 2>(),
                6 => self.few::<L, 6, 2>(),
                7 => self.few::<L, 7, 1>(),
                _ => self.few::<L, 8, 1>(),
            }
        }
    }
}

impl<S: Stored> Dots<'_, S> {
    /// `C` columns, `R` rows at a time.
    ///
    /// # Safety
    /// The processor has the instruction set of `L`; there are `C` columns.
    #[inline(always)]
    unsafe fn few<L: Lanes, const C: usize, const R: usize>(mut self) {
        let Rows { values, stride, count } = self.rows;
        let columns: [*const f32; C] = std::array::from_fn(|c| self.columns[c].as_ptr());
        let mut row = 0;
        while row < count {
            // SAFETY: the rows lie within their slice, the columns have `length` elements.
            unsafe {
                let first = values.as_ptr().add(row * stride);
                if row + R <= count {
                    self.put(row, tile::<S, L, R, C>(first, stride, &columns, self.length));
                    row += R;
                } else {
                    self.put(row, tile::<S, L, 1, C>(first, stride, &columns, self.length));
                    row += 1;
                }
            }
        }
    }

    /// Adds the products of some rows to the sums.
    #[inline(always)]
    fn put<const R: usize, const C: usize>(&mut self, first: usize, products: [[f32; C]; R]) {
        for (r, products) in products.iter().enumerate() {
            let scale = self.factors.values[(first + r) * self.factors.row];
            for (c, product) in products.iter().enumerate() {
                self.sums.values[(first + r) * self.sums.row + c * self.sums.column] += product * scale;
            }
        }
    }
}

/// The products of `R` rows and `C` columns. Each is summed in the same order, whatever the others are: every vector of
/// elements belongs to one of several sets of sums, which are added up at the end.
///
/// # Safety
/// The processor has the instruction set of `L`; `length` elements can be read from each column and each row, which are
/// `stride` apart.
#[inline(always)]
unsafe fn tile<S: Stored, L: Lanes, const R: usize, const C: usize>(
    rows: *const S,
    stride: usize,
    columns: &[*const f32; C],
    length: usize,
) -> [[f32; C]; R] {
    // SAFETY: as promised.
    unsafe {
        let w: [*const S; R] = std::array::from_fn(|r| rows.add(r * stride));
        let mut sums = [[[L::splat(0.0); C]; R]; SETS];
        let whole = length - length % (SETS * L::COUNT);
        if R * C == 1 {
            // all sets at once, so that one multiplication need not wait for the one before it
            for k in (0..whole).step_by(SETS * L::COUNT) {
                prefetch::<S, L>(w[0].wrapping_add(k).wrapping_byte_add(AHEAD), SETS * L::COUNT);
                for (i, sums) in sums.iter_mut().enumerate() {
                    step::<S, L, R, C>(&w, columns, k + i * L::COUNT, sums);
                }
            }
        } else {
            // one set after the other: there are registers for the sums of one, and sums enough to wait for none
            for (i, sums) in sums.iter_mut().enumerate() {
                let mut own = *sums;
                for k in (0..whole).step_by(SETS * L::COUNT) {
                    if i == 0 {
                        // the same place in the rows that come next
                        for row in &w {
                            prefetch::<S, L>(row.wrapping_add(R * stride + k), SETS * L::COUNT);
                        }
                    }
                    step::<S, L, R, C>(&w, columns, k + i * L::COUNT, &mut own);
                }
                *sums = own;
            }
        }
        let mut k = whole;
        while k + L::COUNT <= length {
            step::<S, L, R, C>(&w, columns, k, &mut sums[0]);
            k += L::COUNT;
        }
        let mut products = [[0.0; C]; R];
        for r in 0..R {
            for c in 0..C {
                let rest: f32 = (k..length).map(|k| (*w[r].add(k)).value() * *columns[c].add(k)).sum();
                let [first, second, third, fourth] = std::array::from_fn(|i| sums[i][r][c]);
                products[r][c] = first.add(second).add(third.add(fourth)).sum() + rest;
            }
        }
        products
    }
}

/// Sets of sums of a row and a column.
const SETS: usize = 4;

/// How far ahead, in bytes, a row that is read alone is asked for: as much as comes from memory in the time that the
/// first of it takes. A processor's own prefetching ends with each page.
const AHEAD: usize = 4096;

/// Asks for the cache lines of `count` elements, which need not be ones that can be read.
///
/// # Safety
/// The processor has the instruction set of `L`.
#[inline(always)]
unsafe fn prefetch<S, L: Lanes>(at: *const S, count: usize) {
    for line in 0..(count * size_of::<S>()).div_ceil(CACHE_LINE) {
        // SAFETY: as promised; the address need not be one that can be read.
        unsafe { L::prefetch(at.cast::<i8>().wrapping_add(line * CACHE_LINE)) };
    }
}

/// Adds the products of the elements from `k` of each row and column.
///
/// # Safety
/// As [`tile`]; `k + L::COUNT` elements are within every row and column.
#[inline(always)]
unsafe fn step<S: Stored, L: Lanes, const R: usize, const C: usize>(
    rows: &[*const S; R],
    columns: &[*const f32; C],
    k: usize,
    sums: &mut [[L; C]; R],
) {
    // SAFETY: as promised to this function.
    unsafe {
        let w: [L; R] = std::array::from_fn(|r| S::lanes(rows[r].add(k)));
        for c in 0..C {
            let x = L::load(columns[c].add(k));
            for r in 0..R {
                sums[r][c] = w[r].mul_add(x, sums[r][c]);
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::simd::tests::each;
    use super::*;

    /// Numbers in -1..1 that look random and are the same every time.
    pub fn noise(count: usize, mut seed: u32) -> Vec<f32> {
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    fn check<S: Stored>(store: impl Fn(f32) -> S) {
        for length in [1, 7, 8, 16, 33, 100] {
            for count in [1, 2, 3, 4, 5, 7] {
                for column_count in 1..=MOST_COLUMNS {
                    let stride = length + 3;
                    let values: Vec<S> = noise(count * stride, 7).into_iter().map(&store).collect();
                    let inputs: Vec<Vec<f32>> = (0..column_count).map(|c| noise(length, 100 + c as u32)).collect();
                    let columns: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
                    let scales: Vec<f32> = (0..count).flat_map(|r| [1.0 + r as f32, f32::NAN]).collect();
                    let factors = Factors { values: &scales, row: 2 };
                    each(|run| {
                        let mut found = vec![1.0; count * column_count];
                        let rows = Rows { values: &values, stride, count };
                        let sums = Sums { values: &mut found, row: 1, column: count };
                        run.run(Dots { rows, columns: &columns, length, factors, sums });
                        for (i, found) in found.iter().enumerate() {
                            let (c, r) = (i / count, i % count);
                            let (row, scale) = (&values[r * stride..][..length], 1.0 + r as f64);
                            let terms = row.iter().zip(columns[c]).map(|(w, x)| f64::from(w.value() * x));
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
            let inputs: Vec<Vec<f32>> = (0..MOST_COLUMNS).map(|c| noise(length, 50 + c as u32)).collect();
            let columns: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
            let factors = Factors { values: &[0.37], row: 0 };
            each(|run| {
                let products = |columns: &[&[f32]], row: usize| {
                    let mut values_of = vec![0.5; count * columns.len()];
                    let rows = Rows { values: &values[row * stride..], stride, count: count - row };
                    let sums = Sums { values: &mut values_of, row: columns.len(), column: 1 };
                    run.run(Dots { rows, columns, length, factors, sums });
                    values_of
                };
                let alone: Vec<Vec<f32>> = columns.iter().map(|column| products(&[column], 0)).collect();
                for together in 2..=MOST_COLUMNS {
                    for first in [0, MOST_COLUMNS - together] {
                        let found = products(&columns[first..][..together], 0);
                        // from another row on, other rows share a tile
                        let later = products(&columns[first..][..together], 2);
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
