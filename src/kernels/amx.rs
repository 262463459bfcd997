//! Products of a matrix of bytes with many columns, on a processor that multiplies tiles (Intel's AMX).
//!
//! The unit multiplies bytes and adds the products up in 32 bits, exactly. So each column becomes integers of two to four
//! signed [digits](super::digits), and as many products of tiles are one of f32 numbers. 16 columns are multiplied
//! together, with as many digits as one of them needs. Numbers that are looked up are integers of several bytes: the highest,
//! which has a sign, is multiplied with all digits, the next with all but the lowest, and so on.
//!
//! A thread takes [`ROWS`] rows at a time, or twice as many where they are long: it lays their bytes out in tiles and
//! multiplies them with 16 columns after the other, over the whole length of the rows, for sums that leave the registers
//! cost more than products. The columns' digits are packed once, as the unit reads them: four elements side by side.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::marker::PhantomData;
use std::sync::OnceLock;

use smallvec::SmallVec;

use super::aligned_buf::AlignedBuf;
use super::digits::{Activations, DIGITS, FEW_DIGITS, LEAST_DIGITS, joined, most_digits};
use super::dotprod::StoredRows;
use super::layout::{MatrixLayout, SharedOutput};
use super::planes::PLANES;
use super::pool;
use super::simd::CACHE_LINE;
use super::tiles::{STRIP, put};

mod columns;
mod tile_products;

use columns::{Group, TileColumns};
use tile_products::multiply_some;

/// Rows of a tile, and its columns.
const SIDE: usize = 16;
/// Rows whose sums are in the registers at a time: two tiles, whose sums with two or three digits, and what gives them, fill
/// these.
const ROWS: usize = 2 * SIDE;
/// Elements of a row from which a thread takes two times [`ROWS`] at a time: the digits of 16 columns, which come from the
/// third-level cache then, are read half as often.
const LONG: usize = 2048;
/// Elements of a row in a tile.
const STEP: usize = 64;
/// Words of a tile: a kilobyte.
const TILE: usize = 256;

/// Whether this processor has the unit, and the system lets this program use it.
pub(super) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        /// Asks for the permission to use a part of the processor's state (Linux, `asm/prctl.h`).
        const REQUEST_PERMISSION: libc::c_ulong = 0x1023;
        /// The tiles' contents (Intel's manual, volume 1, section 13.1).
        const TILE_DATA: libc::c_ulong = 18;
        // leaf 7: bit 24 says AMX-TILE, bit 25 AMX-INT8
        let has_tiles =
            is_x86_feature_detected!("avx512f") && __cpuid_count(7, 0).edx & (1 << 24 | 1 << 25) == (1 << 24 | 1 << 25);
        // SAFETY: the call changes nothing but what this program may do.
        has_tiles && unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) } == 0
    })
}

/// Rows of a matrix that can be laid out in tiles.
#[derive(Clone, Copy)]
pub(super) enum TileRows<'a> {
    /// Signed bytes.
    Bytes(&'a [i8]),
    /// Bytes that are looked up.
    Stored(StoredRows<'a>),
}

impl TileRows<'_> {
    /// Whether there are so many rows and elements.
    fn holds(&self, rows: usize, depth: usize) -> bool {
        match self {
            TileRows::Bytes(bytes) => bytes.len() >= rows.saturating_mul(depth),
            TileRows::Stored(stored) => stored.size().0 >= rows && stored.size().1 == depth,
        }
    }

    /// Bytes of an element.
    fn planes(&self) -> usize {
        match self {
            TileRows::Bytes(_) => 1,
            TileRows::Stored(stored) => stored.planes(),
        }
    }
}

/// As [`tiles::multiply`](super::tiles::multiply), for rows of bytes; gives false, and does nothing, if the columns hold
/// a number that isn't finite, which has no digits, or the rows are too long.
///
/// # Panics
/// If a slice is too short, elements of `out` would share places, or the processor lacks the unit.
pub(super) fn multiply(
    (rows, depth, columns): (usize, usize, usize),
    (a, activations): (TileRows<'_>, Activations),
    (x, x_layout): (&[f32], MatrixLayout),
    finish: impl Fn(usize) -> (f32, f32) + Sync,
    (out, out_layout): (&mut [f32], MatrixLayout),
) -> bool {
    assert!(is_available() && a.holds(rows, depth));
    assert!(x.len() >= x_layout.extent(depth, columns) && out.len() >= out_layout.extent(rows, columns));
    assert!(out_layout.is_injective(rows, columns), "elements of the result would share places");
    if columns == 0 {
        return true;
    }
    // SAFETY: the processor has the vectors, as asserted.
    let Some(packed) = (unsafe { TileColumns::new((x, x_layout), (depth, columns), activations) }) else {
        return false;
    };
    let out = SharedOutput::new(out, out_layout);
    // lower bytes are multiplied with the higher digits alone
    let planes = a.planes().min(most_digits(&packed.units));
    let chunk = Chunk { a, planes, depth, columns, packed: &packed, finish: &finish, out };
    let of_chunk = if depth < LONG { ROWS } else { MOST_ROWS };
    pool::for_each(rows.div_ceil(of_chunk), |i| {
        // SAFETY: the processor has the unit, as asserted.
        unsafe { chunk.run(i * of_chunk, of_chunk.min(rows - i * of_chunk)) }
    });
    true
}

/// What threads share.
struct Chunk<'a, F> {
    a: TileRows<'a>,
    /// How many of an element's bytes are multiplied, the highest first.
    planes: usize,
    depth: usize,
    columns: usize,
    packed: &'a TileColumns,
    finish: &'a F,
    out: SharedOutput,
}

/// Rows in tiles: those of each byte of their elements, and what the rows' integers count.
struct LaidOut {
    planes: SmallVec<[AlignedBuf; PLANES]>,
    units: [f32; ROWS],
}

/// The sums of a chunk's rows with each digit of 16 columns.
#[repr(align(64))]
struct Sums([[[i32; SIDE]; ROWS]; DIGITS]);

/// Puts the sums of rows with 16 columns of `D` digits together, from a column on. A sum is multiplied with what its column
/// counts in, and with what its row does.
///
/// # Safety
/// The processor has AVX-512F.
#[target_feature(enable = "avx512f")]
unsafe fn joined_rows<const D: usize>(
    sums: &Sums,
    of_columns: &[f32; SIDE],
    of_rows: &[f32; ROWS],
    whole: &mut [[f32; STRIP]; ROWS],
    first: usize,
) {
    for r in 0..ROWS {
        let Some(whole) = whole[r][first..].first_chunk_mut::<SIDE>() else { return };
        for c in 0..SIDE {
            let of_digits = std::array::from_fn(|digit| if digit < D { sums.0[digit][r][c] } else { 0 });
            whole[c] = joined(of_digits) * of_columns[c] * of_rows[r];
        }
    }
}

/// Most rows that a thread takes at a time.
const MOST_ROWS: usize = 2 * ROWS;

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

/// The unit, configured for this thread until this is dropped, by a panic, too: what it holds then would be saved and
/// restored with every change of threads.
struct ConfiguredTiles(PhantomData<*const ()>);

impl ConfiguredTiles {
    /// # Safety
    /// The processor has the unit; this thread has no other of these.
    unsafe fn new() -> Self {
        // SAFETY: as promised.
        unsafe {
            asm!(
                "ldtilecfg [{0}]",
                in(reg) &raw const CONFIGURATION,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, preserves_flags, readonly),
            );
        }
        ConfiguredTiles(PhantomData)
    }
}

impl Drop for ConfiguredTiles {
    fn drop(&mut self) {
        // SAFETY: the unit is there, or there would be no configuration.
        unsafe {
            asm!(
                "tilerelease",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nomem, nostack, preserves_flags),
            );
        }
    }
}

impl<F: Fn(usize) -> (f32, f32)> Chunk<'_, F> {
    /// Some rows with all columns.
    ///
    /// # Safety
    /// The processor has the unit and AVX-512F; no other thread takes these rows.
    #[target_feature(enable = "avx512f")]
    unsafe fn run(&self, first: usize, count: usize) {
        let steps = self.depth.div_ceil(STEP);
        let pairs = count.div_ceil(ROWS);
        let near = [self.laid_out(first, count.min(ROWS)), self.laid_out(first + ROWS, count.saturating_sub(ROWS))];
        // the rows after these come while these are multiplied, a part of them with every product
        let products: usize = self.packed.groups.iter().map(|group| if group.digits == DIGITS { 2 } else { 1 }).sum();
        let lines = ROWS.div_ceil(products);
        let (mut ahead, end) = match self.a {
            TileRows::Bytes(bytes) => {
                let ahead = bytes.as_ptr().wrapping_add((first + count) * self.depth);
                (ahead, ahead.wrapping_add(steps * count * STEP))
            }
            // what looks up asks for itself
            TileRows::Stored(_) => (std::ptr::null(), std::ptr::null()),
        };
        let mut sums = Sums([[[0; SIDE]; ROWS]; DIGITS]);
        let mut whole = [[0.0; STRIP]; MOST_ROWS];
        // SAFETY: the unit is there.
        let _tiles = unsafe { ConfiguredTiles::new() };
        for strip in (0..self.columns).step_by(STRIP) {
            let columns = STRIP.min(self.columns - strip);
            for place in 0..columns.div_ceil(SIDE) {
                let start = strip + place * SIDE;
                let units = &self.packed.units[start..][..SIDE];
                let sizes: [f32; SIDE] = std::array::from_fn(|c| units[c].size);
                let Group { first: place_of_digits, digits } = self.packed.groups[start / SIDE];
                for (near, whole) in near[..pairs].iter().zip(whole.as_chunks_mut().0) {
                    for (plane, bytes) in near.planes.iter().enumerate().take(digits) {
                        let mut digit = plane;
                        while digit < digits {
                            let (multiply, taken) = multiply_some(plane > 0, digits - digit);
                            // SAFETY: the columns are packed to this depth, and the sums have room for all digits.
                            unsafe {
                                let x = self.packed.lines.pointer().add(place_of_digits + digit * TILE);
                                let lines = if ahead < end { lines } else { 0 };
                                let sums = sums.0[digit - plane..].as_mut_ptr().cast();
                                multiply(
                                    bytes.pointer(),
                                    (x, digits * TILE * size_of::<u32>()),
                                    steps,
                                    sums,
                                    (ahead, lines),
                                );
                            }
                            ahead = ahead.wrapping_add(steps * lines * CACHE_LINE);
                            digit += taken;
                        }
                    }
                    let joined = match digits {
                        LEAST_DIGITS => joined_rows::<LEAST_DIGITS>,
                        FEW_DIGITS => joined_rows::<FEW_DIGITS>,
                        _ => joined_rows::<DIGITS>,
                    };
                    // SAFETY: the processor has these vectors, as promised.
                    unsafe { joined(&sums, &sizes, &near.units, whole, place * SIDE) };
                }
            }
            // SAFETY: `multiply` has checked that the result's elements lie within its slice; the rows are this thread's.
            unsafe {
                let out = self.out.at(first, strip);
                put(&whole[..count], columns, |r| (self.finish)(first + r), out);
            }
        }
    }

    /// Bytes of some rows as tiles of 16 rows, two of each step. Beyond the last row and its last byte anything may be:
    /// what it gives is left, or multiplied by zeros.
    #[inline(always)]
    fn laid_out(&self, first: usize, count: usize) -> LaidOut {
        let buffer = |_| AlignedBuf::new(self.depth.div_ceil(STEP) * ROWS * STEP / 4);
        let mut near = LaidOut { planes: (0..self.planes).map(buffer).collect(), units: [1.0; ROWS] };
        let LaidOut { planes, units } = &mut near;
        let mut planes: SmallVec<[&mut [[i8; STEP]]; PLANES]> = planes
            .iter_mut()
            .map(|plane| bytemuck::cast_slice_mut::<u32, i8>(plane.words()).as_chunks_mut().0)
            .collect();
        match &self.a {
            TileRows::Bytes(all) => {
                for r in 0..count {
                    // a row is read from end to end, as a processor expects it
                    let (whole, rest) = all[(first + r) * self.depth..][..self.depth].as_chunks();
                    let mut places = planes[0].iter_mut().skip(r).step_by(ROWS);
                    places.by_ref().zip(whole).for_each(|(place, bytes)| *place = *bytes);
                    if let Some(place) = places.next().filter(|_| !rest.is_empty()) {
                        place[..rest.len()].copy_from_slice(rest);
                    }
                }
            }
            TileRows::Stored(stored) => {
                for (r, unit) in units.iter_mut().enumerate().take(count) {
                    *unit = stored.look_up_row(first + r, self.planes, |step, plane, bytes| {
                        planes[plane][step * ROWS + r] = bytes;
                    });
                }
            }
        }
        drop(planes);
        near
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Once;

    use proptest::prelude::*;

    use super::super::digits::tests::most_off;
    use super::super::dot::tests::noise;
    use super::super::tiles::tests::{check_exact, finish, laid_out};
    use super::*;

    /// Whether there is anything to test here; says so loudly, once, if not.
    fn present() -> bool {
        static TOLD: Once = Once::new();
        if !is_available() {
            TOLD.call_once(|| anec_base::skipped("this processor has no AMX"));
        }
        is_available()
    }

    /// The product, `[rows, columns]`.
    fn product(
        sizes: (usize, usize, usize),
        (a, activations): (&[i8], Activations),
        x: &[f32],
        turned: bool,
    ) -> Option<Vec<f32>> {
        let (mut done, a) = (false, (TileRows::Bytes(a), activations));
        let out = laid_out(sizes, turned, |x_layout, out| done = multiply(sizes, a, (x, x_layout), finish, out));
        done.then_some(out)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]
        #[test]
        fn products_of_every_size_agree_with_exact_ones(
            rows in 0usize..120, depth in 1usize..600, columns in 1usize..150, turned: bool, uneven in 0usize..40, seed: u32,
            short: bool
        ) {
            let activations = if short { Activations::I16 } else { Activations::F32 };
            if !present() {
                return Ok(());
            }
            let a: Vec<i8> = noise(rows * depth, seed).iter().map(|v| (v * 127.0) as i8).collect();
            // in some columns, or in all, some are larger than others
            let mut x = noise(depth * columns, !seed);
            x.iter_mut().step_by(1 + uneven * uneven).for_each(|v| *v *= 300.0);
            let found = product((rows, depth, columns), (&a, activations), &x, turned).expect("all are finite");
            assert_eq!(found.len(), rows * columns);
            let off = |column: &[f64]| most_off(activations, column);
            check_exact((depth, columns), |i| a[i].into(), (&x, turned, off), &found, &"AMX");
        }
    }

    #[test]
    fn numbers_of_every_size_are_multiplied() {
        if present() {
            for size in [1e-30, 1e-20, 1e20, 1e33] {
                let x = [1.0, -2.0, 0.5, 3.0].map(|v| v * size);
                let found = laid_out((1, 4, 1), false, |x_layout, out| {
                    let a = (TileRows::Bytes(&[3, 127, -128, 1]), Activations::F32);
                    assert!(multiply((1, 4, 1), a, (&x, x_layout), |_| (1.0, 0.0), out));
                });
                assert!((found[0] / size + 312.0).abs() < 1e-4, "{size}: {}", found[0] / size);
            }
            for activations in [Activations::F32, Activations::I16] {
                let found = product((2, 3, 1), (&[1; 6], activations), &[0.0; 3], false);
                assert_eq!(found.unwrap(), [-3.0, -2.0]);
            }
        }
    }

    #[test]
    fn what_has_no_digits_is_refused() {
        if present() {
            let mut x = noise(32 * 9, 1);
            let a = (&[1; 96][..], Activations::F32);
            assert!(product((3, 32, 9), a, &x, false).is_some());
            for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
                x[100] = value;
                assert!(product((3, 32, 9), a, &x, false).is_none());
            }
            let long = super::super::digits::MOST_DEPTH + 1;
            let a = (&vec![1; long][..], Activations::F32);
            assert!(product((1, long, 9), a, &vec![1.0; long * 9], false).is_none());
        }
    }

    /// The first byte of what `sttilecfg` stores is the palette, 0 when the unit is released.
    fn palette() -> u8 {
        let mut configuration = [0u8; 64];
        // SAFETY: the instruction writes 64 bytes.
        unsafe { asm!("sttilecfg [{0}]", in(reg) configuration.as_mut_ptr(), options(nostack, preserves_flags)) };
        configuration[0]
    }

    #[test]
    fn the_unit_is_released_by_a_panic() {
        if present() {
            let (x, mut out) = ([1.0; 64], [0.0]);
            let layout = MatrixLayout { row: 1, column: 64 };
            let finish = |_| {
                assert_eq!(palette(), 1, "the unit is configured while a product is made");
                panic!("no scale")
            };
            let a = (TileRows::Bytes(&[1; 64]), Activations::F32);
            let product = || multiply((1, 64, 1), a, (&x, layout), finish, (&mut out, layout));
            let panic = catch_unwind(AssertUnwindSafe(product)).unwrap_err();
            assert_eq!(panic.downcast_ref(), Some(&"no scale"));
            assert_eq!(palette(), 0);
        }
    }
}
