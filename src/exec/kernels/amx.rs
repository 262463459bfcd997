//! Products of a matrix of bytes with many columns, on a processor that multiplies tiles (Intel's AMX).
//!
//! The unit multiplies bf16 numbers, of 8 significant bits, exactly and adds the products up in f32. A byte is a bf16
//! number, and an f32 number is the sum of three: its first 8 bits, the next 8, and the last 8. So three products of
//! tiles are one of f32 numbers, with the sums rounded as f32 rounds them; it takes a fifth of the time.
//!
//! A thread takes [`ROWS`] rows at a time: it turns [`DEPTH`] of their bytes into bf16, which stay in the first-level
//! cache, and multiplies them with 16 columns after the other. The columns' parts are packed once, as the unit reads
//! them: pairs of elements side by side.

use std::arch::asm;
use std::arch::x86_64::{
    __cpuid_count, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps,
    _mm512_cvtne2ps_pbh,
};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use super::lines::Lines;
use super::product::Layout;
use super::simd::CACHE_LINE;
use super::team;
use super::tiles::{STRIP, Shared, put};

/// Rows of a tile, and its columns.
const SIDE: usize = 16;
/// Rows that a thread takes at a time: three tiles, whose sums, with the tiles that give them, fill the registers.
const ROWS: usize = 3 * SIDE;
/// Elements of a row in a tile.
const STEP: usize = 32;
/// Elements of a row that are turned into bf16 at a time.
const DEPTH: usize = 256;
/// Words of a tile: a kilobyte.
const TILE: usize = 256;
/// Parts of a number.
const PARTS: usize = 3;

/// Whether this processor has the unit, and the system lets this program use it.
pub(super) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        /// Asks for the permission to use a part of the processor's state (Linux, `asm/prctl.h`).
        const REQUEST_PERMISSION: libc::c_ulong = 0x1023;
        /// The tiles' contents (Intel's manual, volume 1, section 13.1).
        const TILE_DATA: libc::c_ulong = 18;
        let has_vectors = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16");
        // leaf 7: bit 22 says AMX-BF16, bit 24 AMX-TILE
        let has_tiles = has_vectors && __cpuid_count(7, 0).edx & (1 << 22 | 1 << 24) == (1 << 22 | 1 << 24);
        // SAFETY: the call changes nothing but what this program may do.
        has_tiles && unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) } == 0
    })
}

/// As [`tiles::multiply`](super::tiles::multiply), for rows of bytes; gives false, and does nothing, if the columns hold
/// a number that isn't finite, which has no parts.
///
/// # Panics
/// If a slice is too short, elements of `out` would share places, or the processor lacks the unit.
pub(super) fn multiply(
    (rows, depth, columns): (usize, usize, usize),
    a: &[i8],
    (x, x_layout): (&[f32], Layout),
    finish: impl Fn(usize) -> (f32, f32) + Sync,
    (out, out_layout): (&mut [f32], Layout),
) -> bool {
    assert!(is_available() && a.len() >= rows * depth);
    assert!(x.len() >= x_layout.extent(depth, columns) && out.len() >= out_layout.extent(rows, columns));
    assert!(out_layout.is_injective(rows, columns), "elements of the result would share places");
    let steps = depth.div_ceil(STEP);
    let mut lines = Lines::new(columns.div_ceil(SIDE) * steps * PARTS * TILE);
    // pieces of the depth of 16 columns, which don't cross columns
    let of_columns = depth.div_ceil(DEPTH);
    let piece = DEPTH / STEP * PARTS * TILE;
    let mut pieces: Vec<&mut [u32]> =
        lines.words().chunks_exact_mut((steps * PARTS * TILE).max(1)).flat_map(|all| all.chunks_mut(piece)).collect();
    let finite = AtomicBool::new(true);
    team::for_each_chunk(&mut pieces, 1, |i, piece| {
        let (first, from) = (i / of_columns * SIDE, i % of_columns * DEPTH);
        let (wide, deep) = (SIDE.min(columns - first), DEPTH.min(depth - from));
        let start = first * x_layout.column + from * x_layout.row;
        // SAFETY: the processor has these vectors, as asserted.
        if !unsafe { pack((&x[start..], x_layout), (deep, wide), &mut *piece[0]) } {
            finite.store(false, Ordering::Relaxed);
        }
    });
    if !finite.into_inner() {
        return false;
    }
    let chunk = Chunk { a, depth, columns, packed: &lines, finish: &finish, out: Shared(out.as_mut_ptr()), out_layout };
    team::for_each(rows.div_ceil(ROWS), |i| {
        // SAFETY: the processor has the unit, as asserted.
        unsafe { chunk.run(i * ROWS, ROWS.min(rows - i * ROWS)) }
    });
    true
}

/// Packs `deep` elements of `wide` columns as the unit reads them, part by part of each step; says whether all are
/// finite.
///
/// # Safety
/// The processor has AVX-512F.
#[target_feature(enable = "avx512f")]
unsafe fn pack((x, layout): (&[f32], Layout), (deep, wide): (usize, usize), words: &mut [u32]) -> bool {
    /// The bits of a bf16 number.
    const HIGH: u32 = 0xffff_0000;
    let mut largest = 0u32;
    for (step, tiles) in words.chunks_exact_mut(PARTS * TILE).enumerate() {
        let (tiles, _) = tiles.as_chunks_mut::<SIDE>();
        for pair in 0..STEP / 2 {
            let mut values = [[0f32; SIDE]; 2];
            for (k, values) in values.iter_mut().enumerate() {
                let k = step * STEP + 2 * pair + k;
                if k >= deep {
                    continue;
                }
                let x = &x[k * layout.row..];
                if layout.column == 1 && wide == SIDE {
                    values.copy_from_slice(&x[..SIDE]);
                } else {
                    values.iter_mut().enumerate().take(wide).for_each(|(c, value)| *value = x[c * layout.column]);
                }
            }
            for c in 0..SIDE {
                let mut rest = [values[0][c], values[1][c]];
                largest = largest.max(rest[0].to_bits() & !(1 << 31)).max(rest[1].to_bits() & !(1 << 31));
                for part in 0..PARTS {
                    let [low, high] = rest.map(|value| value.to_bits() & HIGH);
                    tiles[part * SIDE + pair][c] = low >> 16 | high;
                    // exact: the bits that are left
                    rest = [rest[0] - f32::from_bits(low), rest[1] - f32::from_bits(high)];
                }
            }
        }
    }
    largest < f32::INFINITY.to_bits()
}

/// What threads share.
struct Chunk<'a, F> {
    a: &'a [i8],
    depth: usize,
    columns: usize,
    packed: &'a Lines,
    finish: &'a F,
    out: Shared,
    out_layout: Layout,
}

/// Bytes of a chunk's rows as bf16: tiles of 16 rows, three of each step.
#[repr(align(64))]
struct Wide([[[[u16; STEP]; SIDE]; ROWS / SIDE]; DEPTH / STEP]);

/// The sums of a chunk.
#[repr(align(64))]
struct Sums([[f32; STRIP]; ROWS]);

/// Eight tiles of 16 rows of 64 bytes (Intel's manual, volume 1, section 18.2: palette 1).
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static CONFIGURATION: Configuration = Configuration {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

impl<F: Fn(usize) -> (f32, f32)> Chunk<'_, F> {
    /// Some rows with all columns.
    ///
    /// # Safety
    /// The processor has the unit, AVX-512F and AVX512-BF16; no other thread takes these rows.
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn run(&self, first: usize, count: usize) {
        let steps = self.depth.div_ceil(STEP);
        let mut wide = Wide([[[[0; STEP]; SIDE]; ROWS / SIDE]; DEPTH / STEP]);
        let mut sums = Sums([[0.0; STRIP]; ROWS]);
        // SAFETY: the unit is there; it is left as it was found.
        unsafe { asm!("ldtilecfg [{0}]", in(reg) &raw const CONFIGURATION, options(nostack, preserves_flags)) };
        for strip in (0..self.columns).step_by(STRIP) {
            let columns = STRIP.min(self.columns - strip);
            sums.0 = [[0.0; STRIP]; ROWS];
            for from in (0..self.depth).step_by(DEPTH) {
                let deep = DEPTH.min(self.depth - from);
                for r in 0..count {
                    // what this thread needs of the rows next, or of those after them
                    let far = if from + deep < self.depth { deep } else { ROWS * self.depth - from };
                    let row = &self.a[(first + r) * self.depth + from..];
                    for line in (0..DEPTH).step_by(CACHE_LINE) {
                        // only a hint, so that the address need not be one that can be read
                        _mm_prefetch::<_MM_HINT_T0>(row.as_ptr().wrapping_add(far + line));
                    }
                    let row = &row[..deep];
                    for (tiles, bytes) in wide.0.iter_mut().zip(row.chunks(STEP)) {
                        // SAFETY: the processor has the instructions.
                        unsafe { widen(bytes, &mut tiles[r / SIDE][r % SIDE]) };
                    }
                }
                for place in 0..columns.div_ceil(SIDE) {
                    // SAFETY: the columns are packed to this depth, and the sums have room for 16 columns.
                    unsafe {
                        let x = ((strip / SIDE + place) * steps + from / STEP) * PARTS * TILE;
                        let sums = sums.0.as_mut_ptr().cast::<f32>().add(place * SIDE);
                        multiply_tiles(&wide, self.packed.pointer().add(x), deep.div_ceil(STEP), sums);
                    }
                }
            }
            let Layout { row, column } = self.out_layout;
            // SAFETY: `multiply` has checked that the result's elements lie within its slice; the rows are this thread's.
            unsafe {
                let out = self.out.pointer().add(first * row + strip * column);
                put(&sums.0[..count], columns, |r| (self.finish)(first + r), (out, self.out_layout));
            }
        }
        // SAFETY: as above.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }
}

/// Bytes as bf16, zeros beyond the last.
///
/// # Safety
/// The processor has AVX-512F and AVX512-BF16.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn widen(bytes: &[i8], out: &mut [u16; STEP]) {
    let mut whole = [0i8; STEP];
    let bytes: &[i8; STEP] = match bytes.try_into() {
        Ok(bytes) => bytes,
        Err(_) => {
            whole[..bytes.len()].copy_from_slice(bytes);
            &whole
        }
    };
    // SAFETY: there are 32 bytes, and room for as many numbers.
    unsafe {
        let half =
            |from: usize| _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes.as_ptr().add(from).cast())));
        let numbers = _mm512_cvtne2ps_pbh(half(16), half(0));
        out.as_mut_ptr().cast::<std::arch::x86_64::__m512bh>().write_unaligned(numbers);
    }
}

/// Adds the products of three tiles of rows and the parts of 16 columns, over some steps, to sums that are [`STRIP`]
/// apart from row to row.
///
/// # Safety
/// The processor has the unit, which is configured; `x` has the parts of as many steps, and `sums` has room.
#[inline(always)]
unsafe fn multiply_tiles(wide: &Wide, x: *const u32, steps: usize, sums: *mut f32) {
    // SAFETY: as promised. The compiler uses none of the tiles. A tile is a kilobyte, three are what a step takes of the
    // rows and of the columns; 16 rows of sums are 4 kilobytes.
    unsafe {
        asm!(
            "tileloadd tmm0, [{sums} + {sums_stride}]",
            "tileloadd tmm1, [{sums} + {sums_stride} + 4096]",
            "tileloadd tmm2, [{sums} + {sums_stride} + 8192]",
            "2:",
            "tileloadd tmm3, [{a} + {stride}]",
            "tileloadd tmm6, [{x} + {stride}]",
            "tileloadd tmm4, [{a} + {stride} + 1024]",
            "tileloadd tmm5, [{a} + {stride} + 2048]",
            "tileloadd tmm7, [{x} + {stride} + 1024]",
            "tdpbf16ps tmm0, tmm3, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm6",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tileloadd tmm6, [{x} + {stride} + 2048]",
            "tdpbf16ps tmm0, tmm3, tmm7",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm7",
            "tdpbf16ps tmm0, tmm3, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm6",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "add {a}, 3072",
            "add {x}, 3072",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{sums} + {sums_stride}], tmm0",
            "tilestored [{sums} + {sums_stride} + 4096], tmm1",
            "tilestored [{sums} + {sums_stride} + 8192], tmm2",
            a = inout(reg) &raw const *wide => _,
            x = inout(reg) x => _,
            steps = inout(reg) steps => _,
            sums = in(reg) sums,
            stride = in(reg) 64usize,
            sums_stride = in(reg) STRIP * size_of::<f32>(),
            options(nostack),
        );
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::dot::tests::noise;
    use super::super::tiles::tests::{check_exact, finish, laid_out};
    use super::*;

    /// The product, `[rows, columns]`.
    fn product(sizes: (usize, usize, usize), a: &[i8], x: &[f32], turned: bool) -> Option<Vec<f32>> {
        let mut done = false;
        let out = laid_out(sizes, turned, |x_layout, out| done = multiply(sizes, a, (x, x_layout), finish, out));
        done.then_some(out)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]
        #[test]
        fn products_of_every_size_agree_with_exact_ones(
            rows in 0usize..120, depth in 1usize..600, columns in 1usize..150, turned: bool, seed: u32
        ) {
            if !is_available() {
                return Ok(());
            }
            let a: Vec<i8> = noise(rows * depth, seed).iter().map(|v| (v * 127.0) as i8).collect();
            let x = noise(depth * columns, !seed);
            let found = product((rows, depth, columns), &a, &x, turned).expect("all are finite");
            assert_eq!(found.len(), rows * columns);
            check_exact((depth, columns), |i| a[i].into(), (&x, turned), &found, &"AMX");
        }
    }

    #[test]
    fn what_has_no_parts_is_refused() {
        if is_available() {
            let mut x = noise(32 * 9, 1);
            assert!(product((3, 32, 9), &[1; 96], &x, false).is_some());
            x[100] = f32::INFINITY;
            assert!(product((3, 32, 9), &[1; 96], &x, false).is_none());
        }
    }
}
