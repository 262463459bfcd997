//! Interleaved columns for dot products: the elements that are multiplied with one vector of a row are contiguous, so
//! that a processor prefetches them and one pointer serves all columns.

use super::aligned_buf::AlignedBuf;

/// Consecutive elements of a column in a group, a multiple of every vector length.
pub(super) const GROUP: usize = 16;

/// Column whose element `k` is `values[k * step]`.
#[derive(Clone, Copy)]
pub(super) struct StridedColumn<'a> {
    /// Elements from the first one on.
    pub values: &'a [f32],
    /// Distance between elements.
    pub step: usize,
}

impl<'a> StridedColumn<'a> {
    /// First `count` elements.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn elements(self, count: usize) -> impl Iterator<Item = &'a f32> + Clone {
        assert!(count == 0 || self.values.len() > (count - 1) * self.step);
        self.values.iter().step_by(self.step.max(1)).take(count)
    }
}

/// Columns in parts of equal length (the last may be shorter). A part holds the first [`GROUP`] elements of each
/// column, column by column, then the next of each.
pub(super) enum InterleavedColumns<'a> {
    /// A single contiguous column needs no packing.
    One(&'a [f32], PartLength),
    /// Parts of whole groups; contents behind the last element of a part are unspecified.
    Packed(AlignedBuf, PartLength, usize),
}

/// Length of columns and of parts.
#[derive(Clone, Copy)]
pub(super) struct PartLength {
    length: usize,
    part: usize,
}

/// Part of all columns.
#[derive(Clone, Copy)]
pub(super) struct ColumnPart<'a> {
    values: &'a [f32],
    count: usize,
    length: usize,
}

impl<'a> InterleavedColumns<'a> {
    /// Interleaves columns of `length` elements, in parts of `part`.
    ///
    /// # Panics
    /// If a column is shorter, or there is none.
    pub fn new(columns: &[StridedColumn<'a>], length: usize, part: usize) -> Self {
        let sizes = PartLength { length, part: part.clamp(1, length.max(1)) };
        match columns {
            [StridedColumn { values, step: 1 }] => InterleavedColumns::One(&values[..length], sizes),
            _ => InterleavedColumns::Packed(pack(columns, sizes), sizes, columns.len()),
        }
    }

    /// Number of columns.
    pub fn count(&self) -> usize {
        match self {
            InterleavedColumns::One(..) => 1,
            InterleavedColumns::Packed(.., count) => *count,
        }
    }

    /// Part by number.
    ///
    /// # Panics
    /// If there are fewer parts.
    pub fn part(&self, number: usize) -> ColumnPart<'_> {
        let (InterleavedColumns::One(_, sizes) | InterleavedColumns::Packed(_, sizes, _)) = self;
        let length = sizes.part.min(sizes.length - number * sizes.part);
        match self {
            InterleavedColumns::One(values, _) => {
                ColumnPart { values: &values[number * sizes.part..][..length], count: 1, length }
            }
            InterleavedColumns::Packed(values, _, count) => {
                let values = &values.as_floats()[number * packed(sizes.part, *count)..][..packed(length, *count)];
                ColumnPart { values, count: *count, length }
            }
        }
    }
}

impl<'a> ColumnPart<'a> {
    /// Number of columns.
    pub fn count(self) -> usize {
        self.count
    }

    /// Elements of each column.
    pub fn length(self) -> usize {
        self.length
    }

    /// Groups of elements: that of the first column, followed by those of the others.
    pub fn values(self) -> &'a [f32] {
        self.values
    }
}

/// Size of `count` packed columns of `length` elements.
fn packed(length: usize, count: usize) -> usize {
    length.next_multiple_of(GROUP) * count
}

fn pack(columns: &[StridedColumn<'_>], PartLength { length, part }: PartLength) -> AlignedBuf {
    let count = columns.len();
    let room = length / part * packed(part, count) + packed(length % part, count);
    let mut buffer = AlignedBuf::new(room);
    let packed = buffer.floats();
    for (c, column) in columns.iter().enumerate() {
        let mut elements = column.elements(length);
        let mut at = 0;
        for first in (0..length).step_by(part) {
            let of_part = part.min(length - first);
            for begin in (0..of_part).step_by(GROUP) {
                let size = GROUP.min(of_part - begin);
                let group = &mut packed[at + c * GROUP..][..size];
                if column.step == 1 {
                    group.copy_from_slice(&column.values[first + begin..][..size]);
                } else {
                    group.iter_mut().zip(&mut elements).for_each(|(place, element)| *place = *element);
                }
                at += GROUP * count;
            }
        }
    }
    buffer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_found_in_its_group() {
        for (length, part) in [(1, 1), (16, 16), (50, 50), (96, 32), (70, 24), (2100, 2048)] {
            for (count, step) in [(1, 1), (1, 3), (2, 1), (8, 8)] {
                let values: Vec<f32> = (0..length * step * count).map(|i| i as f32).collect();
                let column =
                    |c: usize| StridedColumn { values: &values[c * if step == 1 { length } else { 1 }..], step };
                let columns: Vec<StridedColumn<'_>> = (0..count).map(column).collect();
                let all = InterleavedColumns::new(&columns, length, part);
                for number in 0..length.div_ceil(part) {
                    let found = all.part(number);
                    assert_eq!((found.count(), found.length()), (count, part.min(length - number * part)));
                    for k in 0..found.length() {
                        for (c, column) in columns.iter().enumerate() {
                            let place = (k - k % GROUP) * count + c * GROUP + k % GROUP;
                            assert_eq!(found.values()[place], column.values[(number * part + k) * step]);
                        }
                    }
                }
            }
        }
    }
}
