//! Vectors of f32 for each instruction set.
//!
//! A [`Kernel`] is written once over [`Lanes`].
//! [`InstructionSet::run_lanes`](super::dispatch::InstructionSet::run_lanes) runs the instance for the processor.

use half::f16;

/// Bytes of a cache line.
pub const CACHE_LINE: usize = 64;

/// Vector register of f32 values.
///
/// # Safety
/// All functions need the instruction set of the type. Functions that take a pointer read or write
/// [`COUNT`](Lanes::COUNT) elements.
#[allow(clippy::missing_safety_doc, reason = "the trait says it once for all of them")]
pub trait Lanes: Copy {
    /// Name of the vector unit.
    const NAME: &'static str;
    /// Number of values.
    const COUNT: usize;
    /// Number of vector registers.
    const REGISTERS: usize;
    /// Broadcasts a value.
    unsafe fn splat(value: f32) -> Self;
    /// Loads values.
    unsafe fn load(at: *const f32) -> Self;
    /// Loads half-precision values.
    unsafe fn load_f16(at: *const f16) -> Self;
    /// Loads signed bytes.
    unsafe fn load_i8(at: *const i8) -> Self;
    /// Looks codes of `BITS` bits up in a table. Codes are packed least significant bit first, starting at a byte. The
    /// table has a number for each code, and at least 16.
    #[inline(always)]
    unsafe fn look_up<const BITS: usize>(codes: *const u8, table: *const f32) -> Self {
        let mut found = [0.0; 16];
        for (eight, found) in found.chunks_exact_mut(8).take(Self::COUNT / 8).enumerate() {
            // SAFETY: eight codes are `BITS` bytes; the table has a number for each code.
            unsafe {
                let word = eight_codes::<BITS>(codes.add(eight * BITS));
                for (i, found) in found.iter_mut().enumerate() {
                    *found = *table.add((word >> (i * BITS)) as usize & ((1 << BITS) - 1));
                }
            }
        }
        // SAFETY: there are 16.
        unsafe { Self::load(found.as_ptr()) }
    }
    /// Stores the values.
    unsafe fn store(self, at: *mut f32);
    /// `self * factor + sum`, rounded once if the processor has a fused instruction.
    unsafe fn mul_add(self, factor: Self, sum: Self) -> Self;
    /// `self + other`
    unsafe fn add(self, other: Self) -> Self;
    /// Sum of the values.
    unsafe fn sum(self) -> f32;
    /// Sums of eight vectors, each with the bits of [`sum`](Self::sum).
    #[inline(always)]
    unsafe fn sums(vectors: [Self; 8]) -> [f32; 8] {
        // SAFETY: as promised.
        vectors.map(|vector| unsafe { vector.sum() })
    }
    /// Prefetches the cache line at an address, which need not be readable.
    unsafe fn prefetch(at: *const i8);
    /// Prefetches into the second-level cache, for data that is used too late for the first level.
    unsafe fn prefetch_far(at: *const i8);
}

/// Eight codes of `BITS` bits, the first in the lowest bits.
///
/// # Safety
/// `BITS` bytes can be read.
#[inline(always)]
unsafe fn eight_codes<const BITS: usize>(codes: *const u8) -> u64 {
    let mut bytes = [0; 8];
    // SAFETY: as promised.
    unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(codes, BITS) };
    u64::from_le_bytes(bytes)
}

/// Work with explicit vectors.
pub trait Kernel {
    /// Result of the work.
    type Output;
    /// Does the work. Must be `#[inline(always)]`, so that it is compiled for the instruction set of `L`.
    ///
    /// # Safety
    /// The processor has that instruction set.
    unsafe fn run<L: Lanes>(self) -> Self::Output;
}

/// Eight values in an array.
#[derive(Clone, Copy)]
pub struct Portable([f32; 8]);

impl Portable {
    #[inline(always)]
    fn zip(self, other: Self, function: impl Fn(f32, f32) -> f32) -> Self {
        Portable(std::array::from_fn(|i| function(self.0[i], other.0[i])))
    }
}

impl Lanes for Portable {
    const NAME: &str = "portable";
    const COUNT: usize = 8;
    const REGISTERS: usize = 8;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Portable([value; 8])
    }

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: the caller promises the elements.
        Portable(std::array::from_fn(|i| unsafe { *at.add(i) }))
    }

    #[inline(always)]
    unsafe fn load_f16(at: *const f16) -> Self {
        // SAFETY: the caller promises the elements.
        Portable(std::array::from_fn(|i| unsafe { (*at.add(i)).to_f32() }))
    }

    #[inline(always)]
    unsafe fn load_i8(at: *const i8) -> Self {
        // SAFETY: the caller promises the elements.
        Portable(std::array::from_fn(|i| unsafe { f32::from(*at.add(i)) }))
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: the caller promises the room.
        unsafe { at.copy_from_nonoverlapping(self.0.as_ptr(), 8) };
    }

    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, sum: Self) -> Self {
        // a fused multiplication is a function call on processors without it
        self.zip(factor, |a, b| a * b).zip(sum, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        self.0.iter().sum()
    }

    #[inline(always)]
    unsafe fn prefetch(_: *const i8) {}

    #[inline(always)]
    unsafe fn prefetch_far(_: *const i8) {}
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use std::arch::x86_64::*;

    use super::*;

    #[derive(Clone, Copy)]
    pub struct Avx512(__m512);

    // SAFETY (of the blocks below): the caller promises AVX-512F, and what is read or written.
    impl Lanes for Avx512 {
        const NAME: &str = "AVX-512";
        const COUNT: usize = 16;
        const REGISTERS: usize = 32;

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            unsafe { Avx512(_mm512_set1_ps(value)) }
        }

        #[inline(always)]
        unsafe fn load(at: *const f32) -> Self {
            unsafe { Avx512(_mm512_loadu_ps(at)) }
        }

        #[inline(always)]
        unsafe fn load_f16(at: *const f16) -> Self {
            unsafe { Avx512(_mm512_cvtph_ps(_mm256_loadu_si256(at.cast()))) }
        }

        #[inline(always)]
        unsafe fn load_i8(at: *const i8) -> Self {
            unsafe { Avx512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast())))) }
        }

        #[inline(always)]
        unsafe fn look_up<const BITS: usize>(codes: *const u8, table: *const f32) -> Self {
            unsafe {
                let indices = match BITS {
                    8 => _mm512_cvtepu8_epi32(_mm_loadu_si128(codes.cast())),
                    // words of the first eight codes and of the others, shifted
                    4 => {
                        let both = _mm512_set1_epi64(codes.cast::<i64>().read_unaligned());
                        let each = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
                        let by = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
                        _mm512_srlv_epi32(_mm512_permutexvar_epi32(each, both), by)
                    }
                    _ => {
                        let bits = BITS as i64;
                        let by = _mm512_setr_epi64(0, bits, 2 * bits, 3 * bits, 4 * bits, 5 * bits, 6 * bits, 7 * bits);
                        let eight = |codes: *const u8| {
                            let word = _mm512_set1_epi64(eight_codes::<BITS>(codes) as i64);
                            _mm512_cvtepi64_epi32(_mm512_srlv_epi64(word, by))
                        };
                        let first = _mm512_castsi256_si512(eight(codes));
                        let all = _mm512_inserti64x4::<1>(first, eight(codes.add(BITS)));
                        _mm512_and_si512(all, _mm512_set1_epi32((1 << BITS) - 1))
                    }
                };
                let part = |i: usize| _mm512_loadu_ps(table.add(16 * i));
                Avx512(match BITS {
                    // only the lowest four bits of an index count
                    1..=4 => _mm512_permutexvar_ps(indices, part(0)),
                    6 => {
                        let low = _mm512_permutex2var_ps(part(0), indices, part(1));
                        let high = _mm512_permutex2var_ps(part(2), indices, part(3));
                        _mm512_mask_blend_ps(_mm512_test_epi32_mask(indices, _mm512_set1_epi32(32)), low, high)
                    }
                    _ => _mm512_i32gather_ps::<4>(indices, table),
                })
            }
        }

        #[inline(always)]
        unsafe fn store(self, at: *mut f32) {
            unsafe { _mm512_storeu_ps(at, self.0) }
        }

        #[inline(always)]
        unsafe fn mul_add(self, factor: Self, sum: Self) -> Self {
            unsafe { Avx512(_mm512_fmadd_ps(self.0, factor.0, sum.0)) }
        }

        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            unsafe { Avx512(_mm512_add_ps(self.0, other.0)) }
        }

        #[inline(always)]
        unsafe fn sum(self) -> f32 {
            unsafe { _mm512_reduce_add_ps(self.0) }
        }

        #[inline(always)]
        unsafe fn sums(vectors: [Self; 8]) -> [f32; 8] {
            unsafe {
                // fold pairs of vectors: the lower half of each holds lanes of the first, the upper half of the second
                let [a, b, c, d, e, f, g, h] = vectors;
                let first = four_left(eight_left(a.0, b.0), eight_left(c.0, d.0));
                let second = four_left(eight_left(e.0, f.0), eight_left(g.0, h.0));
                let two_left =
                    _mm512_add_ps(_mm512_shuffle_ps::<0x44>(first, second), _mm512_shuffle_ps::<0xee>(first, second));
                let one_left = _mm512_add_ps(two_left, _mm512_permute_ps::<0b10_11_00_01>(two_left));
                let mut all = [0.0; 16];
                _mm512_storeu_ps(all.as_mut_ptr(), one_left);
                let [a, _, e, _, b, _, f, _, c, _, g, _, d, _, h, _] = all;
                [a, b, c, d, e, f, g, h]
            }
        }

        #[inline(always)]
        unsafe fn prefetch(at: *const i8) {
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at) }
        }

        #[inline(always)]
        unsafe fn prefetch_far(at: *const i8) {
            unsafe { _mm_prefetch::<_MM_HINT_T1>(at) }
        }
    }

    /// Folds two vectors to eight lanes each: those of `a`, then those of `b`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn eight_left(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b))
    }

    /// Folds two vectors of eight lanes each to four lanes each.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn four_left(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b))
    }

    /// Folds two vectors to four lanes each: those of `a`, then those of `b`.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn half_left(a: __m256, b: __m256) -> __m256 {
        _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b))
    }

    /// Folds two vectors of four lanes each to two lanes each.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn pair_left(a: __m256, b: __m256) -> __m256 {
        _mm256_add_ps(_mm256_shuffle_ps::<0x44>(a, b), _mm256_shuffle_ps::<0xee>(a, b))
    }

    #[derive(Clone, Copy)]
    pub struct Avx2(__m256);

    // SAFETY (of the blocks below): the caller promises AVX2, FMA and F16C, and what is read or written.
    impl Lanes for Avx2 {
        const NAME: &str = "AVX2";
        const COUNT: usize = 8;
        const REGISTERS: usize = 16;

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            unsafe { Avx2(_mm256_set1_ps(value)) }
        }

        #[inline(always)]
        unsafe fn load(at: *const f32) -> Self {
            unsafe { Avx2(_mm256_loadu_ps(at)) }
        }

        #[inline(always)]
        unsafe fn load_f16(at: *const f16) -> Self {
            unsafe { Avx2(_mm256_cvtph_ps(_mm_loadu_si128(at.cast()))) }
        }

        #[inline(always)]
        unsafe fn load_i8(at: *const i8) -> Self {
            unsafe { Avx2(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast())))) }
        }

        #[inline(always)]
        unsafe fn look_up<const BITS: usize>(codes: *const u8, table: *const f32) -> Self {
            unsafe {
                let bits = BITS as i32;
                let indices = match BITS {
                    8 => _mm256_cvtepu8_epi32(_mm_loadl_epi64(codes.cast())),
                    6 => {
                        let word = _mm256_set1_epi64x(eight_codes::<BITS>(codes) as i64);
                        let even = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
                        let four = |by| _mm256_permutevar8x32_epi32(_mm256_srlv_epi64(word, by), even);
                        let first = four(_mm256_setr_epi64x(0, 6, 12, 18));
                        _mm256_blend_epi32::<0xf0>(first, four(_mm256_setr_epi64x(24, 30, 36, 42)))
                    }
                    _ => {
                        let by = _mm256_setr_epi32(0, bits, 2 * bits, 3 * bits, 4 * bits, 5 * bits, 6 * bits, 7 * bits);
                        _mm256_srlv_epi32(_mm256_set1_epi32(eight_codes::<BITS>(codes) as i32), by)
                    }
                };
                let indices = _mm256_and_si256(indices, _mm256_set1_epi32((1 << bits) - 1));
                let part = |i: usize| _mm256_permutevar8x32_ps(_mm256_loadu_ps(table.add(8 * i)), indices);
                Avx2(match BITS {
                    1..=3 => part(0),
                    // the fourth bit of an index becomes the sign, which selects
                    4 => {
                        let upper = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(indices));
                        _mm256_blendv_ps(part(0), part(1), upper)
                    }
                    _ => _mm256_i32gather_ps::<4>(table, indices),
                })
            }
        }

        #[inline(always)]
        unsafe fn store(self, at: *mut f32) {
            unsafe { _mm256_storeu_ps(at, self.0) }
        }

        #[inline(always)]
        unsafe fn mul_add(self, factor: Self, sum: Self) -> Self {
            unsafe { Avx2(_mm256_fmadd_ps(self.0, factor.0, sum.0)) }
        }

        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            unsafe { Avx2(_mm256_add_ps(self.0, other.0)) }
        }

        #[inline(always)]
        unsafe fn sum(self) -> f32 {
            unsafe {
                let half = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
                let pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
                _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps::<1>(pair, pair)))
            }
        }

        #[inline(always)]
        unsafe fn sums(vectors: [Self; 8]) -> [f32; 8] {
            unsafe {
                // as above
                let [a, b, c, d, e, f, g, h] = vectors;
                let first = pair_left(half_left(a.0, b.0), half_left(c.0, d.0));
                let second = pair_left(half_left(e.0, f.0), half_left(g.0, h.0));
                let one_left =
                    _mm256_add_ps(_mm256_shuffle_ps::<0x88>(first, second), _mm256_shuffle_ps::<0xdd>(first, second));
                let mut all = [0.0; 8];
                _mm256_storeu_ps(all.as_mut_ptr(), one_left);
                let [a, c, e, g, b, d, f, h] = all;
                [a, b, c, d, e, f, g, h]
            }
        }

        #[inline(always)]
        unsafe fn prefetch(at: *const i8) {
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at) }
        }

        #[inline(always)]
        unsafe fn prefetch_far(at: *const i8) {
            unsafe { _mm_prefetch::<_MM_HINT_T1>(at) }
        }
    }
}

#[cfg(target_arch = "aarch64")]
pub(super) mod neon {
    use std::arch::aarch64::*;

    use super::*;

    /// Two vectors of four.
    #[derive(Clone, Copy)]
    pub struct Neon(float32x4_t, float32x4_t);

    // SAFETY (of the blocks below): NEON is always there, and the caller promises what is read or written.
    impl Lanes for Neon {
        const NAME: &str = "NEON";
        const COUNT: usize = 8;
        const REGISTERS: usize = 16;

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            unsafe { Neon(vdupq_n_f32(value), vdupq_n_f32(value)) }
        }

        #[inline(always)]
        unsafe fn load(at: *const f32) -> Self {
            unsafe { Neon(vld1q_f32(at), vld1q_f32(at.add(4))) }
        }

        #[inline(always)]
        unsafe fn load_f16(at: *const f16) -> Self {
            // the conversion is in the base instruction set, but its intrinsic isn't stable
            unsafe {
                let halves = vld1q_u16(at.cast());
                let (low, high): (float32x4_t, float32x4_t);
                std::arch::asm!(
                    "fcvtl {low:v}.4s, {halves:v}.4h",
                    "fcvtl2 {high:v}.4s, {halves:v}.8h",
                    low = out(vreg) low,
                    high = lateout(vreg) high,
                    halves = in(vreg) halves,
                    options(pure, nomem, nostack, preserves_flags),
                );
                Neon(low, high)
            }
        }

        #[inline(always)]
        unsafe fn load_i8(at: *const i8) -> Self {
            unsafe {
                let wide = vmovl_s8(vld1_s8(at));
                let (low, high) = (vmovl_s16(vget_low_s16(wide)), vmovl_high_s16(wide));
                Neon(vcvtq_f32_s32(low), vcvtq_f32_s32(high))
            }
        }

        #[inline(always)]
        unsafe fn store(self, at: *mut f32) {
            unsafe {
                vst1q_f32(at, self.0);
                vst1q_f32(at.add(4), self.1);
            }
        }

        #[inline(always)]
        unsafe fn mul_add(self, factor: Self, sum: Self) -> Self {
            unsafe { Neon(vfmaq_f32(sum.0, self.0, factor.0), vfmaq_f32(sum.1, self.1, factor.1)) }
        }

        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            unsafe { Neon(vaddq_f32(self.0, other.0), vaddq_f32(self.1, other.1)) }
        }

        #[inline(always)]
        unsafe fn sum(self) -> f32 {
            unsafe { vaddvq_f32(vaddq_f32(self.0, self.1)) }
        }

        #[inline(always)]
        unsafe fn prefetch(at: *const i8) {
            // SAFETY: a hint reads nothing; its intrinsic isn't stable.
            unsafe { std::arch::asm!("prfm pldl1keep, [{at}]", at = in(reg) at, options(nostack, preserves_flags)) };
        }

        #[inline(always)]
        unsafe fn prefetch_far(at: *const i8) {
            // SAFETY: as above.
            unsafe { std::arch::asm!("prfm pldl2keep, [{at}]", at = in(reg) at, options(nostack, preserves_flags)) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::InstructionSet;

    struct Everything;

    impl Kernel for Everything {
        type Output = Vec<f32>;

        #[inline(always)]
        unsafe fn run<L: Lanes>(self) -> Vec<f32> {
            let floats: Vec<f32> = (0..L::COUNT).map(|i| i as f32).collect();
            let halves: Vec<f16> = floats.iter().map(|v| f16::from_f32(v * 0.5)).collect();
            let bytes: Vec<i8> = (0..L::COUNT).map(|i| -(i as i8)).collect();
            let mut out = vec![0.0; L::COUNT];
            // SAFETY: the slices hold L::COUNT elements.
            unsafe {
                let (x, y, z) = (L::load(floats.as_ptr()), L::load_f16(halves.as_ptr()), L::load_i8(bytes.as_ptr()));
                x.mul_add(y, z).add(L::splat(3.0)).store(out.as_mut_ptr());
                out.push(x.sum());
            }
            out
        }
    }

    struct Sums<'a>(&'a [f32]);

    impl Kernel for Sums<'_> {
        type Output = [[u32; 8]; 2];

        #[inline(always)]
        unsafe fn run<L: Lanes>(self) -> [[u32; 8]; 2] {
            // SAFETY: there are eight times 16 numbers.
            unsafe {
                let vectors: [L; 8] = std::array::from_fn(|i| L::load(self.0[i * 16..].as_ptr()));
                [L::sums(vectors), vectors.map(|vector| vector.sum())].map(|sums| sums.map(f32::to_bits))
            }
        }
    }

    #[test]
    fn sums_of_eight_have_the_bits_of_each() {
        let values = super::super::dot::tests::noise(8 * 16, 5);
        InstructionSet::available().for_each(|set| {
            let [together, each] = set.run_lanes(Sums(&values));
            assert_eq!(together, each, "{set:?}");
        });
    }

    #[test]
    fn every_instruction_set_computes_the_same() {
        InstructionSet::available().for_each(|set| {
            let found = set.run_lanes(Everything);
            let count = found.len() - 1;
            let mut expected: Vec<f32> = (0..count).map(|i| i as f32).map(|v| v * v * 0.5 - v + 3.0).collect();
            expected.push((count * (count - 1) / 2) as f32);
            assert_eq!(found, expected, "{set:?}");
        });
    }
}
