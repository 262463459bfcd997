//! Products of a matrix with many columns, blocked for the caches and tiled for the registers.
//!
//! Columns are packed once, in panels of the tile's width, interleaved element by element. A thread takes `ROWS` rows
//! at a time. It widens [`DEPTH`] elements of a tile's rows to f32 into the first-level cache, from any stored form,
//! and uses them for up to `STRIP` columns; that depth of the columns stays cached from tile to tile. A tile's sums
//! stay in registers over that depth: for vectors of 16 and 32 registers, six rows by four vectors, which is 24
//! multiplications for ten loads.
//!
//! A sum consists of parts of [`DEPTH`] products, each added in order from zero, and the parts are added in order. So
//! the result of a column has the same bits whatever other columns there are, and on every processor with fused
//! multiply-add.

use std::ops::Range;

use super::aligned_buf::AlignedBuf;
use super::dispatch::InstructionSet;
use super::dot::{Stored, values_of};
use super::layout::{MatrixLayout, SharedOutput};
use super::pool;
use super::simd::{Kernel, Lanes};

/// Rows that a thread takes at a time: a multiple of every tile height.
const ROWS: usize = 24;
/// Maximum columns for which widened rows are used.
pub(super) const STRIP: usize = 64;
/// Elements of a row that are summed in registers.
pub const DEPTH: usize = 128;
/// Minimum multiplications for which threads are used.
const MIN_PARALLEL_WORK: usize = 1 << 17;
/// Minimum elements for which threads are used to pack them.
const MIN_PARALLEL_PACK: usize = 1 << 16;

/// Rows of a matrix that can be widened to f32.
///
/// # Safety
/// All elements within [`size`](Widen::size) are readable.
pub unsafe trait Widen: Sync {
    /// Number of rows, and of elements in each; constant.
    fn size(&self) -> (usize, usize);

    /// Writes elements `from..from + count` of a row to `out`.
    ///
    /// # Safety
    /// The processor has the instruction set of `L`; the elements are within [`size`](Widen::size), and `out` has room
    /// for them.
    unsafe fn widen<L: Lanes>(&self, row: usize, from: usize, count: usize, out: *mut f32);

    /// Prefetches up to [`DEPTH`] elements of a row, which need not exist.
    ///
    /// # Safety
    /// The processor has the instruction set of `L`.
    unsafe fn prefetch<L: Lanes>(&self, row: usize, from: usize);
}

/// `out[r, c] = sum over k of a[r, k] * x[k, c] * scale(r) + bias(r)` for `a` of `rows` rows with `depth` elements each
/// and `columns` columns of `x`; `finish` returns a row's scale and bias.
///
/// # Panics
/// If `a` has fewer rows or elements, a slice is too short for its layout, or elements of `out` overlap.
pub fn multiply<A: Widen, X: Stored>(
    set: InstructionSet,
    (rows, depth, columns): (usize, usize, usize),
    a: &A,
    (x, x_layout): (&[X], MatrixLayout),
    finish: impl Fn(usize) -> (f32, f32) + Sync,
    (out, out_layout): (&mut [f32], MatrixLayout),
) {
    let (most_rows, most_depth) = a.size();
    assert!(rows <= most_rows && depth <= most_depth, "the matrix has fewer elements than are asked for");
    assert!(x.len() >= x_layout.extent(depth, columns) && out.len() >= out_layout.extent(rows, columns));
    assert!(out_layout.is_injective(rows, columns), "elements of the result would share places");
    let target = SharedOutput::new(out, out_layout);
    let packed = Packed::new(set, (x, x_layout), (depth, columns));
    let chunk = |i: usize| {
        let first = i * ROWS;
        let count = ROWS.min(rows - first);
        set.run_lanes(Chunk { a, packed: &packed, first, count, finish: &finish, out: target });
    };
    if rows * depth * columns > MIN_PARALLEL_WORK {
        pool::for_each(rows.div_ceil(ROWS), chunk);
    } else {
        (0..rows.div_ceil(ROWS)).for_each(chunk);
    }
}

/// Columns in panels: `[panel, k, width]`, padded with zeros.
struct Packed {
    lines: AlignedBuf,
    /// Columns of a panel.
    width: usize,
    columns: usize,
    depth: usize,
}

impl Packed {
    fn new<X: Stored>(
        set: InstructionSet,
        (x, x_layout): (&[X], MatrixLayout),
        (depth, columns): (usize, usize),
    ) -> Packed {
        let width = set.run_lanes(Width { columns });
        let panels = columns.div_ceil(width);
        let lines = AlignedBuf::new(panels * depth * width);
        let mut packed = Packed { lines, width, columns, depth };
        let part = |piece: usize, values: &mut [f32]| {
            // pieces don't cross panels
            let of_panel = depth.div_ceil(DEPTH);
            let (panel, from) = (piece / of_panel, piece % of_panel * DEPTH);
            let first = panel * width;
            set.run_lanes(Pack {
                x,
                layout: x_layout,
                from,
                columns: first..(first + width).min(columns),
                out: values,
                width,
            });
        };
        let pieces = packed.lines.floats().chunks_exact_mut((depth * width).max(1));
        let pieces = pieces.flat_map(|panel| panel.chunks_mut(DEPTH * width));
        if depth * columns > MIN_PARALLEL_PACK {
            let mut pieces: Vec<&mut [f32]> = pieces.collect();
            pool::for_each_mut(&mut pieces, |i, piece| part(i, piece));
        } else {
            pieces.enumerate().for_each(|(i, piece)| part(i, piece));
        }
        packed
    }
}

/// Packing of some columns' elements from `from` on as rows of `width`.
struct Pack<'a, X> {
    x: &'a [X],
    layout: MatrixLayout,
    from: usize,
    columns: Range<usize>,
    out: &'a mut [f32],
    width: usize,
}

impl<X: Stored> Kernel for Pack<'_, X> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // a few elements of all columns at a time, so that each cache line is used completely while it is cached
        const BLOCK: usize = 16;
        let Pack { x, layout, from, columns, out, width } = self;
        let count = columns.len();
        let mut room = [0.0; STRIP];
        if layout.column == 1 {
            for (k, row) in out.chunks_exact_mut(width).enumerate() {
                let (values, rest) = row.split_at_mut(count);
                let elements = &x[(from + k) * layout.row + columns.start..][..count];
                // SAFETY: as promised.
                values.copy_from_slice(unsafe { values_of::<X, L>(elements, &mut room) });
                rest.fill(0.0);
            }
            return;
        }
        for (i, rows) in out.chunks_mut(BLOCK * width).enumerate() {
            let depth = rows.len() / width;
            for (c, column) in columns.clone().enumerate() {
                let start = (from + i * BLOCK) * layout.row + column * layout.column;
                let places = rows[c..].iter_mut().step_by(width);
                if layout.row == 1 {
                    // SAFETY: as promised.
                    let values = unsafe { values_of::<X, L>(&x[start..start + depth], &mut room) };
                    places.zip(values).for_each(|(place, value)| *place = *value);
                } else {
                    let elements = x[start..].iter().step_by(layout.row.max(1));
                    places.zip(elements).for_each(|(place, element)| *place = element.value());
                }
            }
            rows.chunks_exact_mut(width).for_each(|row| row[count..].fill(0.0));
        }
    }
}

/// Choice of the panels' width.
struct Width {
    columns: usize,
}

impl Kernel for Width {
    type Output = usize;

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) -> usize {
        let most = match L::REGISTERS {
            32.. => 4,
            16.. => 2,
            _ => 1,
        };
        // no wider than an even division of the columns needs
        let vectors = self.columns.div_ceil(L::COUNT).max(1);
        vectors.div_ceil(vectors.div_ceil(most)) * L::COUNT
    }
}

/// Some rows of the result.
struct Chunk<'a, A, F> {
    a: &'a A,
    packed: &'a Packed,
    first: usize,
    count: usize,
    finish: &'a F,
    out: SharedOutput,
}

impl<A: Widen, F: Fn(usize) -> (f32, f32)> Kernel for Chunk<'_, A, F> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // SAFETY: as promised. Sums, columns and the element of a row have room in the registers.
        unsafe {
            let vectors = self.packed.width / L::COUNT;
            if const { L::REGISTERS >= 32 } {
                match vectors {
                    4 => self.strips::<L, 6, 4>(),
                    3 => self.strips::<L, 8, 3>(),
                    2 => self.strips::<L, 12, 2>(),
                    _ => self.strips::<L, 12, 1>(),
                }
            } else if const { L::REGISTERS >= 16 } {
                match vectors {
                    2 => self.strips::<L, 6, 2>(),
                    _ => self.strips::<L, 12, 1>(),
                }
            } else {
                self.strips::<L, 4, 1>();
            }
        }
    }
}

/// Sums of a chunk's rows and a strip's columns.
#[repr(align(64))]
struct Sums([[f32; STRIP]; ROWS]);

/// Widened elements of a tile's rows.
#[repr(align(64))]
struct Wide<const R: usize>([[f32; DEPTH]; R]);

impl<A: Widen, F: Fn(usize) -> (f32, f32)> Chunk<'_, A, F> {
    /// Computes the rows with all columns, in tiles of `R` rows and `V` vectors.
    ///
    /// # Safety
    /// The processor has the instruction set of `L`; panels are `V` vectors wide.
    #[inline(always)]
    unsafe fn strips<L: Lanes, const R: usize, const V: usize>(&self) {
        let Packed { lines, width, columns, depth } = self.packed;
        let packed: *const f32 = lines.pointer().cast();
        let of_strip = STRIP / width;
        let mut sums = Sums([[0.0; STRIP]; ROWS]);
        let mut wide = Wide::<R>([[0.0; DEPTH]; R]);
        for strip in 0..columns.div_ceil(of_strip * width) {
            let panels = strip * of_strip..((strip + 1) * of_strip).min(columns.div_ceil(*width));
            for from in (0..*depth).step_by(DEPTH) {
                let part = DEPTH.min(depth - from);
                for tile in 0..self.count.div_ceil(R) {
                    let rows = R.min(self.count - tile * R);
                    for (r, wide) in wide.0.iter_mut().enumerate().take(rows) {
                        let row = self.first + tile * R + r;
                        // SAFETY: `multiply` has checked the row's elements, and `wide` has room for them.
                        unsafe { self.a.widen::<L>(row, from, part, wide.as_mut_ptr()) };
                        // next elements of these rows, or of the rows after them
                        let (row, from) = if from + part < *depth { (row, from + part) } else { (row + ROWS, 0) };
                        // SAFETY: as promised.
                        unsafe { self.a.prefetch::<L>(row, from) };
                    }
                    for (place, panel) in panels.clone().enumerate() {
                        // SAFETY: the panel has `depth` rows, and the sums have room for a tile.
                        unsafe {
                            let x = packed.add((panel * depth + from) * width);
                            let sums = sums.0[tile * R..].as_mut_ptr().cast::<f32>().add(place * width);
                            tile_product::<L, R, V>(&wide, x, part, sums, from == 0);
                        }
                    }
                }
            }
            let first = strip * of_strip * width;
            let count = (of_strip * width).min(columns - first);
            // SAFETY: `multiply` has checked that the result's elements are in the slice; these rows belong to this
            // thread.
            unsafe {
                let out = self.out.at(self.first, first);
                put(&sums.0[..self.count], count, |r| (self.finish)(self.first + r), out);
            }
        }
    }
}

/// Writes sums of rows and some columns, each times the scale of its row, plus its bias.
///
/// # Safety
/// The elements of the layout are writable, and no other thread uses them.
#[inline(always)]
pub(super) unsafe fn put(
    sums: &[[f32; STRIP]],
    columns: usize,
    finish: impl Fn(usize) -> (f32, f32),
    (out, layout): (*mut f32, MatrixLayout),
) {
    // SAFETY: as promised.
    unsafe {
        if layout.column == 1 {
            for (r, sums) in sums.iter().enumerate() {
                let (scale, bias) = finish(r);
                let out = std::slice::from_raw_parts_mut(out.add(r * layout.row), columns);
                out.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum * scale + bias);
            }
            return;
        }
        let mut factors = [(0.0, 0.0); STRIP];
        factors.iter_mut().enumerate().take(sums.len()).for_each(|(r, place)| *place = finish(r));
        for c in 0..columns {
            for (r, (sums, (scale, bias))) in sums.iter().zip(factors).enumerate() {
                *out.add(r * layout.row + c * layout.column) = sums[c] * scale + bias;
            }
        }
    }
}

/// Adds the products of `R` widened rows and a panel of `V` vectors to sums, which are [`STRIP`] apart from row to row,
/// or overwrites them.
///
/// # Safety
/// The processor has the instruction set of `L`; `x` has `depth` rows of `V` vectors, at most [`DEPTH`], and `sums` has
/// room.
#[inline(always)]
unsafe fn tile_product<L: Lanes, const R: usize, const V: usize>(
    wide: &Wide<R>,
    x: *const f32,
    depth: usize,
    sums: *mut f32,
    fresh: bool,
) {
    // SAFETY: as promised.
    unsafe {
        let mut tile = [[L::splat(0.0); V]; R];
        let a = wide.0.as_ptr().cast::<f32>();
        let mut at = x;
        for k in 0..depth {
            let x: [L; V] = std::array::from_fn(|v| L::load(at.add(v * L::COUNT)));
            for (r, tile) in tile.iter_mut().enumerate() {
                let a = L::splat(*a.add(r * DEPTH + k));
                for v in 0..V {
                    tile[v] = x[v].mul_add(a, tile[v]);
                }
            }
            at = at.add(V * L::COUNT);
        }
        for (r, tile) in tile.iter().enumerate() {
            for (v, part) in tile.iter().enumerate() {
                let place = sums.add(r * STRIP + v * L::COUNT);
                let sum = if fresh { *part } else { part.add(L::load(place)) };
                sum.store(place);
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::super::dot::tests::noise;
    use super::*;

    /// Contiguous rows of f32.
    struct Plain<'a>(&'a [f32], usize);

    // SAFETY: the rows are chunks of the slice.
    unsafe impl Widen for Plain<'_> {
        fn size(&self) -> (usize, usize) {
            (self.0.len().checked_div(self.1).unwrap_or(usize::MAX), self.1)
        }

        #[inline(always)]
        unsafe fn widen<L: Lanes>(&self, row: usize, from: usize, count: usize, out: *mut f32) {
            // SAFETY: the row has these elements, and `out` has room.
            unsafe { out.copy_from_nonoverlapping(self.0.as_ptr().add(row * self.1 + from), count) };
        }

        #[inline(always)]
        unsafe fn prefetch<L: Lanes>(&self, _: usize, _: usize) {}
    }

    /// Scale and bias of a row.
    pub fn finish(row: usize) -> (f32, f32) {
        (1.0 + row as f32 * 0.25, row as f32 - 3.0)
    }

    /// Result of `multiply` for a matrix stored by rows or by columns, as `[rows, columns]`. It gets the layouts of its
    /// input and of the result.
    pub fn laid_out(
        (rows, depth, columns): (usize, usize, usize),
        turned: bool,
        multiply: impl FnOnce(MatrixLayout, (&mut [f32], MatrixLayout)),
    ) -> Vec<f32> {
        let layout = |rows: usize, columns: usize| match turned {
            true => MatrixLayout { row: 1, column: rows },
            false => MatrixLayout { row: columns, column: 1 },
        };
        let out_layout = layout(rows, columns);
        let mut out = vec![f32::NAN; rows * columns];
        multiply(layout(depth, columns), (&mut out, out_layout));
        (0..rows * columns).map(|i| out[i / columns * out_layout.row + i % columns * out_layout.column]).collect()
    }

    /// Checks a product, scaled and biased by [`finish`], against exact sums. `off` gives the allowed error of a
    /// column's elements.
    pub fn check_exact(
        (depth, columns): (usize, usize),
        a: impl Fn(usize) -> f64,
        (x, turned, off): (&[f32], bool, impl Fn(&[f64]) -> f64),
        found: &[f32],
        what: &dyn std::fmt::Debug,
    ) {
        let of_x = |k: usize, c: usize| if turned { x[c * depth + k] } else { x[k * columns + c] };
        let of_column = |c: usize| (0..depth).map(|k| f64::from(of_x(k, c))).collect::<Vec<_>>();
        let off: Vec<f64> = (0..columns).map(|c| off(&of_column(c))).collect();
        for (i, found) in found.iter().enumerate() {
            let (r, c) = (i / columns, i % columns);
            let sizes: f64 = (0..depth).map(|k| a(r * depth + k).abs()).sum();
            let terms = (0..depth).map(|k| a(r * depth + k) * f64::from(of_x(k, c)));
            let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
            let (scale, bias) = finish(r);
            let exact = sum * f64::from(scale) + f64::from(bias);
            let size = 1e-6 * size + sizes * off[c];
            let limit = size * f64::from(scale) + 1e-6 * f64::from(bias.abs()) + 1e-12;
            assert!((f64::from(*found) - exact).abs() <= limit, "{what:?} [{r}, {c}]: {found} {exact}");
        }
    }

    /// Product `[rows, columns]` with an instruction set.
    fn product(set: InstructionSet, sizes: (usize, usize, usize), a: &[f32], x: &[f32], turned: bool) -> Vec<f32> {
        laid_out(sizes, turned, |x_layout, out| {
            multiply(set, sizes, &Plain(a, sizes.1), (x, x_layout), finish, out);
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]
        #[test]
        fn products_of_every_size_agree_with_exact_ones(
            rows in 0usize..75, depth in 0usize..300, columns in 1usize..150, turned: bool, seed: u32
        ) {
            let (a, x) = (noise(rows * depth, seed), noise(depth * columns, !seed));
            InstructionSet::available().for_each(|set| {
                let found = product(set, (rows, depth, columns), &a, &x, turned);
                assert_eq!(found.len(), rows * columns);
                check_exact((depth, columns), |i| a[i].into(), (&x, turned, |_| 0.0), &found, &set);
            });
        }
    }

    #[test]
    #[should_panic(expected = "fewer elements than are asked for")]
    fn more_rows_than_there_are_are_refused() {
        let (a, x) = (noise(6, 1), noise(3, 2));
        product(InstructionSet::available().next().unwrap(), (3, 3, 1), &a, &x, false);
    }

    #[test]
    fn a_column_is_the_same_whatever_is_beside_it() {
        let (rows, depth) = (31, 257);
        let (a, x) = (noise(rows * depth, 1), noise(depth * 130, 2));
        InstructionSet::available().for_each(|set| {
            let all = product(set, (rows, depth, 130), &a, &x, true);
            for (first, count) in [(0, 1), (3, 9), (0, 16), (17, 33), (60, 48), (40, 64), (1, 65), (30, 100)] {
                let part = product(set, (rows, depth, count), &a, &x[first * depth..][..count * depth], true);
                for (row, part) in part.chunks_exact(count).enumerate() {
                    assert_eq!(part, &all[row * 130 + first..][..count], "{set:?} {first} {count} {row}");
                }
            }
        });
    }
}
