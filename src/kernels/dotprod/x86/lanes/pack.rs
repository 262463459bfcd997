//! Packing of columns in lanes: one by one, or, if they are neighbours in the rows of a matrix, straight from the rows.

use std::arch::x86_64::*;

use smallvec::SmallVec;

use super::super::super::{MeasuredColumn, ROWS_AHEAD};
use super::super::{STEP, pack_digits};
use super::rare::{Rare, loaded};
use super::{Group, LANES, NEIGHBOURS, VECTORS};
use crate::aligned_buf::AlignedBuf;
use crate::digits::{DIGITS_MIDDLE, Unit};
use crate::prefetch::prefetch;

/// Adds 128 to four digits.
const MIDDLES: u32 = 0x8080_8080;

/// Columns that are neighbours in the rows of a matrix.
struct Beside<'a> {
    /// The matrix from the first of the columns on.
    x: &'a [f32],
    /// Distance between rows.
    step: usize,
    /// Place in a row, and unit, of each column.
    columns: SmallVec<[(usize, Unit); LANES]>,
}

impl<'a> Beside<'a> {
    /// Returns `None` if the columns aren't neighbours.
    fn new(columns: &[MeasuredColumn<'a>]) -> Option<Self> {
        let first = columns.iter().map(|of| of.column).min_by_key(|column| column.values.as_ptr().addr())?;
        let place = |of: &MeasuredColumn<'a>| {
            let place = (of.column.values.as_ptr().addr() - first.values.as_ptr().addr()) / size_of::<f32>();
            let same = first.values.get(place..).is_some_and(|values| std::ptr::eq(values, of.column.values));
            (same && place < first.step && of.column.step == first.step).then_some((place, of.unit))
        };
        let columns = columns.iter().map(place).collect::<Option<_>>()?;
        (first.step > 1).then_some(Beside { x: first.values, step: first.step, columns })
    }
}

/// Elements of a row that become a vector of lanes.
struct Source {
    /// First of the elements, and their number.
    first: usize,
    span: usize,
    /// Element, from the first one on, of each lane.
    places: __m512i,
    /// Inverse of the unit of each lane's column.
    inverses: __m512,
    /// Bits below each lane's digit.
    shifts: __m512i,
}

impl Source {
    /// Source of some columns' lanes. Unused lanes are zeros.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vnni")]
    fn new(columns: &[(usize, Unit)], digits: usize) -> Self {
        let first = columns.iter().map(|(place, _)| *place).min().unwrap_or(0);
        let last = columns.iter().map(|(place, _)| *place).max().unwrap_or(0);
        let (mut places, mut inverses, mut shifts) = ([0; LANES], [0.0; LANES], [0; LANES]);
        for digit in 0..digits {
            for (c, (place, unit)) in columns.iter().enumerate() {
                let lane = digit * (LANES / digits) + c;
                (places[lane], inverses[lane], shifts[lane]) = ((place - first) as i32, unit.inverse, 8 * digit as i32);
            }
        }
        // SAFETY: the arrays have as many elements as the vectors.
        let (places, inverses, shifts) = unsafe {
            (
                _mm512_loadu_si512(places.as_ptr().cast()),
                _mm512_loadu_ps(inverses.as_ptr()),
                _mm512_loadu_si512(shifts.as_ptr().cast()),
            )
        };
        Source { first, span: last - first + 1, places, inverses, shifts }
    }

    /// All digits of an element of a row in each lane.
    ///
    /// # Panics
    /// If the row doesn't have the elements.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vnni")]
    fn digits(&self, row: &[f32]) -> __m512i {
        let near = &row[self.first..][..self.span];
        let first_of = |count: usize| (1u32 << count).wrapping_sub(1) as __mmask16;
        // SAFETY: all elements that are read are in the slice.
        let elements = unsafe {
            if self.span <= LANES {
                let near = _mm512_maskz_loadu_ps(first_of(self.span), near.as_ptr());
                _mm512_permutexvar_ps(self.places, near)
            } else if self.span <= 2 * LANES {
                let upper = _mm512_maskz_loadu_ps(first_of(self.span - LANES), near[LANES..].as_ptr());
                _mm512_permutex2var_ps(_mm512_loadu_ps(near.as_ptr()), self.places, upper)
            } else {
                _mm512_i32gather_ps::<4>(self.places, near.as_ptr())
            }
        };
        // nearest, ties to even
        let rounded = _mm512_cvtps_epi32(_mm512_mul_ps(elements, self.inverses));
        let middle = _mm512_set1_epi32(DIGITS_MIDDLE.cast_signed());
        _mm512_xor_si512(_mm512_add_epi32(rounded, middle), middle)
    }
}

impl Group {
    /// Writes the vectors of lanes for each four neighbours of its columns, which are among these, and sets the rare
    /// digits. Unused lanes are arbitrary.
    ///
    /// # Safety
    /// The processor has the instructions.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vnni")]
    pub unsafe fn pack(&mut self, columns: &[MeasuredColumn<'_>], words: &mut [u32]) {
        let columns: SmallVec<[MeasuredColumn<'_>; LANES]> = self.columns.iter().map(|c| columns[*c]).collect();
        let mut rare = self.rare.take();
        match Beside::new(&columns) {
            Some(beside) => self.pack_beside(&beside, words, &mut rare),
            None => self.pack_apart(&columns, words, &mut rare),
        }
        self.rare = rare;
    }

    /// Packs columns one by one.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vnni")]
    fn pack_apart(&self, columns: &[MeasuredColumn<'_>], words: &mut [u32], rare: &mut Option<Rare>) {
        const FOURS: usize = STEP / NEIGHBOURS;
        let (width, all) = (self.width(), self.vectors() * LANES);
        let steps = words.len().div_ceil(FOURS * all);
        let mut digits = AlignedBuf::new(steps * (self.digits + usize::from(rare.is_some())) * FOURS);
        let mut second = AlignedBuf::new(if rare.is_some() { words.len() } else { 0 });
        second.words().fill(0);
        for (c, column) in columns.iter().enumerate() {
            let digits = &mut digits.words()[..steps * column.unit.digits * FOURS];
            // SAFETY: the processor has the instructions; the column was measured with its unit.
            unsafe { pack_digits(*column, bytemuck::cast_slice_mut(digits)) };
            for (step, vectors) in digits.as_chunks::<FOURS>().0.chunks_exact(column.unit.digits).enumerate() {
                for (digit, vector) in vectors.iter().enumerate() {
                    let in_lanes = digit < self.digits;
                    let (out, flip) = if in_lanes { (&mut *words, MIDDLES) } else { (second.words(), 0) };
                    let lane = c / width * LANES + digit % self.digits * width + c % width;
                    for (out, near) in out[step * FOURS * all..].chunks_exact_mut(all).zip(vector) {
                        out[lane] = near ^ flip;
                    }
                }
            }
        }
        if let Some(rare) = rare {
            let (vectors, _) = second.words().as_chunks::<LANES>();
            for (i, vector) in vectors.iter().enumerate() {
                rare.add(i / self.vectors() * NEIGHBOURS, i % self.vectors(), loaded(vector));
            }
        }
    }

    /// Packs columns that are neighbours, all at a time.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vnni")]
    fn pack_beside(&self, of: &Beside<'_>, words: &mut [u32], rare: &mut Option<Rare>) {
        let mut sources = SmallVec::<[Source; VECTORS]>::new();
        for columns in of.columns.chunks(self.width()) {
            sources.push(Source::new(columns, self.digits));
        }
        let lowest = _mm512_set1_epi32(0xff);
        let (vectors, _) = words.as_chunks_mut::<LANES>();
        for (four, vectors) in vectors.chunks_exact_mut(sources.len()).enumerate() {
            let first = four * NEIGHBOURS;
            for (v, (source, out)) in sources.iter().zip(vectors).enumerate() {
                let mut lanes = _mm512_setzero_si512();
                let mut second = _mm512_setzero_si512();
                for n in (0..NEIGHBOURS).rev() {
                    // rows are too far apart for the processor's own prefetching
                    prefetch(of.x.as_ptr().wrapping_add((first + n + ROWS_AHEAD) * of.step + source.first));
                    let digits = source.digits(&of.x[(first + n) * of.step..]);
                    let of_lane = _mm512_and_si512(_mm512_srlv_epi32(digits, source.shifts), lowest);
                    lanes = _mm512_or_si512(_mm512_slli_epi32::<8>(lanes), of_lane);
                    if rare.is_some() {
                        let of_second = _mm512_and_si512(_mm512_srli_epi32::<8>(digits), lowest);
                        second = _mm512_or_si512(_mm512_slli_epi32::<8>(second), of_second);
                    }
                }
                lanes = _mm512_xor_si512(lanes, _mm512_set1_epi32(MIDDLES.cast_signed()));
                // SAFETY: there is room for a vector.
                unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), lanes) };
                if let Some(rare) = rare {
                    rare.add(first, v, second);
                }
            }
        }
    }
}
