//! Columns of activations as digits, packed as the unit reads them.

use super::{SIDE, STEP, TILE};
use crate::ahead::ask;
use crate::aligned_buf::AlignedBuf;
use crate::digits::{
    Activations, DIGITS, FEW_DIGITS, LEAST_DIGITS, MOST_DEPTH, Unit, digits_of, most_digits, third_squared,
};
use crate::layout::MatrixLayout;
use crate::pool;

/// Elements of a column that are packed at a time.
const DEPTH: usize = 512;
/// Elements of each column that are measured at a time.
const MEASURED: usize = 128;
/// How many rows of elements are asked for ahead.
const AHEAD: usize = 16;

/// Columns in digits.
pub(super) struct TileColumns {
    /// What each column's integers count, zeros' beyond the last.
    pub units: Vec<Unit>,
    /// 16 columns each.
    pub groups: Vec<Group>,
    /// Of each group and each step of the depth, a tile for each digit, the lowest first.
    pub lines: AlignedBuf,
}

/// 16 columns that are multiplied together.
#[derive(Clone, Copy)]
pub(super) struct Group {
    /// Words before theirs.
    pub first: usize,
    /// The digits of that column which has most. Groups with fewer take less room: what is read again and again stays nearer.
    pub digits: usize,
}

impl TileColumns {
    /// `columns` of `depth` elements each; `None` if they hold a number that isn't finite, which has no digits, or are too
    /// long. There are as many elements as the layout says.
    ///
    /// # Safety
    /// The processor has AVX-512F.
    pub unsafe fn new(
        (x, layout): (&[f32], MatrixLayout),
        (depth, columns): (usize, usize),
        activations: Activations,
    ) -> Option<Self> {
        // SAFETY: as promised.
        let units = unsafe { units((x, layout), (depth, columns), activations)? };
        let steps = depth.div_ceil(STEP);
        let mut words = 0;
        let group = |units: &[Unit]| {
            let group = Group { first: words, digits: most_digits(units) };
            words += steps * group.digits * TILE;
            group
        };
        let groups: Vec<Group> = units.chunks(SIDE).map(group).collect();
        let mut lines = AlignedBuf::new(words);
        // pieces of the depth of a group
        let mut pieces: Vec<(usize, usize, &mut [u32])> = Vec::new();
        let mut left = lines.words();
        for (g, group) in groups.iter().enumerate() {
            let (own, others) = left.split_at_mut(steps * group.digits * TILE);
            let own = own.chunks_mut(DEPTH / STEP * group.digits * TILE).enumerate();
            pieces.extend(own.map(|(i, words)| (g, i * DEPTH, words)));
            left = others;
        }
        pool::for_each_mut(&mut pieces, |_, (group, from, words)| {
            let first = *group * SIDE;
            let part = Part {
                x: &x[first * layout.column + *from * layout.row..],
                layout,
                deep: DEPTH.min(depth - *from),
                wide: SIDE.min(columns - first),
            };
            // SAFETY: as promised; the units are those of the columns.
            unsafe {
                match groups[*group].digits {
                    LEAST_DIGITS => part.pack::<LEAST_DIGITS>(&units[first..], words),
                    FEW_DIGITS => part.pack::<FEW_DIGITS>(&units[first..], words),
                    _ => part.pack::<DIGITS>(&units[first..], words),
                }
            }
        });
        Some(TileColumns { units, groups, lines })
    }
}

/// What each column's integers count, for whole groups of columns.
///
/// # Safety
/// As [`TileColumns::new`].
unsafe fn units(
    (x, layout): (&[f32], MatrixLayout),
    (depth, columns): (usize, usize),
    activations: Activations,
) -> Option<Vec<Unit>> {
    let padded = columns.next_multiple_of(SIDE);
    let part = |i: usize| Part {
        x: &x[i * MEASURED * layout.row..],
        layout,
        deep: MEASURED.min(depth - i * MEASURED),
        wide: columns,
    };
    let parts = depth.div_ceil(MEASURED);
    // SAFETY: as promised.
    let largest = found_in_parts(parts, padded, u32::max, |i, largest| unsafe { part(i).largest(largest) });
    let inverse = |bits: &u32| Unit::of_few(*bits).map(|unit| unit.inverse);
    let few = largest.iter().map(inverse).collect::<Option<Vec<f32>>>().filter(|_| depth <= MOST_DEPTH)?;
    // SAFETY: as promised; the units are those of the columns.
    let squares = found_in_parts(parts, padded, u32::wrapping_add, |i, own| unsafe { part(i).squares(&few, own) });
    let unit = |(bits, squares): (&u32, u32)| Unit::of(activations, *bits, squares, depth);
    largest.iter().zip(squares).map(unit).collect()
}

/// What the parts of so many columns find of each, put together.
fn found_in_parts(
    parts: usize,
    columns: usize,
    join: fn(u32, u32) -> u32,
    find: impl Fn(usize, &mut [u32]) + Sync,
) -> Vec<u32> {
    let mut found = vec![0; parts.max(1) * columns];
    pool::for_each_chunk(&mut found[..parts * columns], columns, find);
    let (all, others) = found.split_at_mut(columns);
    for others in others.chunks_exact(columns) {
        all.iter_mut().zip(others).for_each(|(all, other)| *all = join(*all, *other));
    }
    found.truncate(columns);
    found
}

/// Some of the depth of some columns.
struct Part<'a> {
    x: &'a [f32],
    layout: MatrixLayout,
    deep: usize,
    wide: usize,
}

impl Part<'_> {
    /// An element of each of 16 columns, zeros beyond the last.
    #[inline(always)]
    fn elements(&self, k: usize) -> [f32; SIDE] {
        let mut elements = [0.0; SIDE];
        let x = &self.x[k * self.layout.row..];
        if self.layout.column == 1 && self.wide == SIDE {
            elements.copy_from_slice(&x[..SIDE]);
        } else {
            elements.iter_mut().enumerate().take(self.wide).for_each(|(c, e)| *e = x[c * self.layout.column]);
        }
        elements
    }

    /// Does something with the elements of each column, and with what is given for it, in the order in which they lie in
    /// memory.
    #[inline(always)]
    fn each<T: Copy>(
        &self,
        of_columns: &mut [u32],
        given: impl Iterator<Item = T> + Clone,
        act: impl Fn(&mut u32, f32, T),
    ) {
        if self.layout.column == 1 {
            // nothing but zipped iterators, which become vectors
            for k in 0..self.deep {
                let row = &self.x[k * self.layout.row..][..self.wide];
                let columns = row.iter().zip(&mut *of_columns).zip(given.clone());
                columns.for_each(|((element, own), given)| act(own, *element, given));
            }
        } else {
            for (c, (own, given)) in of_columns.iter_mut().zip(given).enumerate().take(self.wide) {
                (0..self.deep).for_each(|k| act(own, self.x[c * self.layout.column + k * self.layout.row], given));
            }
        }
    }

    /// The bits, without the sign, of the largest element of each column.
    ///
    /// # Safety
    /// The processor has AVX-512F.
    #[target_feature(enable = "avx512f")]
    unsafe fn largest(&self, largest: &mut [u32]) {
        let bits = |element: f32| element.to_bits() & !(1 << 31);
        self.each(largest, std::iter::repeat(()), |largest, element, ()| *largest = (*largest).max(bits(element)));
    }

    /// The sum of the squares of the third digits of each column.
    ///
    /// # Safety
    /// The processor has AVX-512F; each column is finite and has its unit in three digits.
    #[target_feature(enable = "avx512f")]
    unsafe fn squares(&self, inverse: &[f32], squares: &mut [u32]) {
        self.each(squares, inverse.iter().copied(), |squares, element, inverse| {
            // SAFETY: the unit is that of this column.
            *squares = squares.wrapping_add(unsafe { third_squared(element, inverse) });
        });
    }

    /// Packs `D` digits as the unit reads them: of each step, a tile for each digit, the lowest first, in which a row
    /// has four elements of each column.
    ///
    /// # Safety
    /// The processor has AVX-512F; each column is finite and has its unit.
    #[target_feature(enable = "avx512f")]
    unsafe fn pack<const D: usize>(&self, units: &[Unit], words: &mut [u32]) {
        /// Every other byte.
        const EVEN: u32 = 0x00ff_00ff;
        let inverse: [f32; SIDE] = std::array::from_fn(|c| units[c].inverse);
        for (step, tiles) in words.chunks_exact_mut(D * TILE).enumerate() {
            let (tiles, _) = tiles.as_chunks_mut::<SIDE>();
            for row in 0..STEP / 4 {
                let mut digits = [[0u32; SIDE]; 4];
                for (j, digits) in digits.iter_mut().enumerate() {
                    let k = step * STEP + 4 * row + j;
                    if k < self.deep {
                        // rows are so far apart that a processor doesn't do it by itself
                        ask(self.x.as_ptr().wrapping_add((k + AHEAD) * self.layout.row));
                        let elements = self.elements(k);
                        for c in 0..SIDE {
                            // SAFETY: the unit is that of this column.
                            digits[c] = unsafe { digits_of(elements[c], inverse[c]) };
                        }
                    }
                }
                for c in 0..SIDE {
                    let [first, second, third, fourth] = [digits[0][c], digits[1][c], digits[2][c], digits[3][c]];
                    let even = |low: u32, high: u32| low & EVEN | (high & EVEN) << 8;
                    let odd = |low: u32, high: u32| low >> 8 & EVEN | high & !EVEN;
                    let pairs = [(even(first, second), even(third, fourth)), (odd(first, second), odd(third, fourth))];
                    for (digit, (low, high)) in pairs.into_iter().enumerate() {
                        tiles[digit * SIDE + row][c] = low & 0xffff | high << 16;
                        if digit + 2 < D {
                            tiles[(digit + 2) * SIDE + row][c] = low >> 16 | high & !0xffff;
                        }
                    }
                }
            }
        }
    }
}
