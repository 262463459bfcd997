//! Second digits that are mostly zeros: only vectors of lanes with others are kept. Elements that need them are the
//! same ones in many columns, so that few vectors have any.

use std::arch::x86_64::*;

use super::super::MIDDLE;
use super::{LANES, VECTORS};

/// A vector of lanes, with signed digits.
type Vector = [u32; LANES];

/// Second digits of a group's columns.
#[derive(Default)]
pub(super) struct Rare([RareVectors; VECTORS]);

/// Second digits of a vector's columns.
#[derive(Default)]
struct RareVectors {
    /// First element of each four neighbours with a digit that isn't zero.
    places: Vec<u32>,
    /// Digits of these neighbours.
    lanes: Vec<Vector>,
    /// Initial sums.
    starts: Vector,
}

impl Rare {
    /// Adds the digits of four neighbours, from an element on, in a vector's columns. Zeros are left out.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    pub fn add(&mut self, place: usize, vector: usize, digits: __m512i) {
        if _mm512_test_epi32_mask(digits, digits) == 0 {
            return;
        }
        let of = &mut self.0[vector];
        of.places.push(place as u32);
        of.lanes.push(stored(digits));
        let taken = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(MIDDLE), digits);
        of.starts = stored(_mm512_sub_epi32(loaded(&of.starts), taken));
    }

    /// Sums of rows with each lane.
    ///
    /// # Safety
    /// The processor has the instructions; rows are as long as the columns.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    pub unsafe fn of_rows<const V: usize, const R: usize>(&self, rows: [*const i8; R]) -> [[__m512i; R]; V] {
        // SAFETY: as promised.
        std::array::from_fn(|v| unsafe { self.0[v].of_rows(rows) })
    }
}

impl RareVectors {
    /// Sums of rows with each lane.
    ///
    /// # Safety
    /// As [`Rare::of_rows`].
    // inlined, the sums would leave the registers
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn of_rows<const R: usize>(&self, rows: [*const i8; R]) -> [__m512i; R] {
        let mut sums = [loaded(&self.starts); R];
        for (place, lanes) in self.places.iter().zip(&self.lanes) {
            let lanes = loaded(lanes);
            for (sum, row) in sums.iter_mut().zip(rows) {
                // SAFETY: as promised.
                let near = unsafe { row.add(*place as usize).cast::<i32>().read_unaligned() };
                // no exclusive or, which compilers move to a scalar register
                let near = _mm512_add_epi8(_mm512_set1_epi32(near), _mm512_set1_epi8(MIDDLE));
                *sum = _mm512_dpbusd_epi32(*sum, near, lanes);
            }
        }
        sums
    }
}

/// Stores a vector.
#[inline]
#[target_feature(enable = "avx512f")]
fn stored(vector: __m512i) -> Vector {
    let mut words = [0; LANES];
    // SAFETY: there is room for a vector.
    unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), vector) };
    words
}

/// Loads a vector.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn loaded(vector: &Vector) -> __m512i {
    // SAFETY: all words of a vector are there.
    unsafe { _mm512_loadu_si512(vector.as_ptr().cast()) }
}
