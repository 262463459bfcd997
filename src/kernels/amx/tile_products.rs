//! Products of tiles: sums stay in the unit's registers over the whole length of rows.
//!
//! Tiles of rows are multiplied with one group of columns after the other, so they are to stay in the first-level cache, where
//! digits, each read once for two tiles of rows, would take their place: they are loaded (`tileloaddt1`) past it.

use std::arch::asm;

use crate::digits::FEW_DIGITS;

/// What multiplies two tiles of rows with digits of 16 columns, over some steps. With each step, it asks for as many of the
/// cache lines from `ahead` on as it says: they come while the unit computes. They need not be ones that can be read.
///
/// The arguments are the rows' tiles, the columns' and how many bytes these are from step to step, how many steps, where the sums
/// of each digit go, and what to ask for.
pub(super) type MultiplyTiles = unsafe fn(*const u32, (*const u32, usize), usize, *mut i32, (*const i8, usize));

/// A function of [`MultiplyTiles`], of what is done before the steps, with each, and after them.
macro_rules! multiply_tiles {
    ($(#[$doc:meta])* $name:ident, $($before:literal)*; $($with:expr,)*; $($after:literal)*) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// The processor has the unit, which is configured; `near` has the tiles of as many steps, `x` the digits, and
        /// `sums` has room.
        unsafe fn $name(
            near: *const u32,
            (x, of_step): (*const u32, usize),
            steps: usize,
            sums: *mut i32,
            (ahead, lines): (*const i8, usize),
        ) {
            // SAFETY: as promised. A tile is a kilobyte, two are what a step takes of the rows.
            unsafe {
                asm!(
                    $($before,)*
                    "test {steps}, {steps}",
                    "jz 3f",
                    "2:",
                    $($with,)*
                    "mov {line}, {lines}",
                    "test {lines}, {lines}",
                    "jz 5f",
                    "4:",
                    "prefetcht1 [{ahead}]",
                    "add {ahead}, 64",
                    "dec {line}",
                    "jnz 4b",
                    "5:",
                    "add {a}, 2048",
                    "add {x}, {of_step}",
                    "dec {steps}",
                    "jnz 2b",
                    "3:",
                    $($after,)*
                    a = inout(reg) near => _,
                    x = inout(reg) x => _,
                    of_step = in(reg) of_step,
                    steps = inout(reg) steps => _,
                    sums = in(reg) sums,
                    stride = in(reg) 64usize,
                    ahead = inout(reg) ahead => _,
                    lines = in(reg) lines,
                    line = out(reg) _,
                    out("tmm0") _,
                    out("tmm1") _,
                    out("tmm2") _,
                    out("tmm3") _,
                    out("tmm4") _,
                    out("tmm5") _,
                    out("tmm6") _,
                    out("tmm7") _,
                    options(nostack),
                );
            }
        }
        const _: MultiplyTiles = $name;
    };
}

/// What multiplies bytes, with or without a sign, with some of so many digits, and how many these are. Sums of bytes with a
/// sign begin at zero, others with what is there.
pub(super) fn multiply_some(without_sign: bool, digits: usize) -> (MultiplyTiles, usize) {
    match (without_sign, digits) {
        (false, FEW_DIGITS) => (multiply_three, FEW_DIGITS),
        (false, _) => (multiply_two, 2),
        (true, 1) => (add_one, 1),
        (true, 2) => (add_two, 2),
        (true, _) => (add_three, 3),
    }
}

/// A function of [`MultiplyTiles`] for two digits, of what multiplies bytes and what is done before the steps.
macro_rules! two_digits {
    ($(#[$doc:meta])* $name:ident, $op:literal, $($before:literal)*) => {
        multiply_tiles! {
            $(#[$doc])*
            $name,
            $($before)*;
            "tileloadd tmm4, [{a} + {stride}]",
            "tileloaddt1 tmm6, [{x} + {stride}]",
            "tileloadd tmm5, [{a} + {stride} + 1024]",
            "tileloaddt1 tmm7, [{x} + {stride} + 1024]",
            concat!($op, " tmm0, tmm4, tmm6"),
            concat!($op, " tmm1, tmm5, tmm6"),
            concat!($op, " tmm2, tmm4, tmm7"),
            concat!($op, " tmm3, tmm5, tmm7"),
            ;
            "tilestored [{sums} + {stride}], tmm0"
            "tilestored [{sums} + {stride} + 1024], tmm1"
            "tilestored [{sums} + {stride} + 2048], tmm2"
            "tilestored [{sums} + {stride} + 3072], tmm3"
        }
    };
}

/// As `two_digits` for three. There is a register for one tile of rows and one of digits; these are loaded once each.
macro_rules! three_digits {
    ($(#[$doc:meta])* $name:ident, $op:literal, $($before:literal)*) => {
        multiply_tiles! {
            $(#[$doc])*
            $name,
            $($before)*;
            "tileloadd tmm6, [{a} + {stride}]",
            "tileloaddt1 tmm7, [{x} + {stride}]",
            concat!($op, " tmm0, tmm6, tmm7"),
            "tileloadd tmm6, [{a} + {stride} + 1024]",
            concat!($op, " tmm1, tmm6, tmm7"),
            "tileloaddt1 tmm7, [{x} + {stride} + 1024]",
            concat!($op, " tmm3, tmm6, tmm7"),
            "tileloadd tmm6, [{a} + {stride}]",
            concat!($op, " tmm2, tmm6, tmm7"),
            "tileloaddt1 tmm7, [{x} + {stride} + 2048]",
            concat!($op, " tmm4, tmm6, tmm7"),
            "tileloadd tmm6, [{a} + {stride} + 1024]",
            concat!($op, " tmm5, tmm6, tmm7"),
            ;
            "tilestored [{sums} + {stride}], tmm0"
            "tilestored [{sums} + {stride} + 1024], tmm1"
            "tilestored [{sums} + {stride} + 2048], tmm2"
            "tilestored [{sums} + {stride} + 3072], tmm3"
            "tilestored [{sums} + {stride} + 4096], tmm4"
            "tilestored [{sums} + {stride} + 5120], tmm5"
        }
    };
}

two_digits! {
    /// Two digits.
    multiply_two,
    "tdpbssd",
    "tilezero tmm0"
    "tilezero tmm1"
    "tilezero tmm2"
    "tilezero tmm3"
}

three_digits! {
    /// Three digits.
    multiply_three,
    "tdpbssd",
    "tilezero tmm0"
    "tilezero tmm1"
    "tilezero tmm2"
    "tilezero tmm3"
    "tilezero tmm4"
    "tilezero tmm5"
}

multiply_tiles! {
    /// One digit, with bytes that have no sign; the products are added to the sums.
    add_one,
    "tileloadd tmm0, [{sums} + {stride}]"
    "tileloadd tmm1, [{sums} + {stride} + 1024]";
    "tileloadd tmm4, [{a} + {stride}]",
    "tileloaddt1 tmm6, [{x} + {stride}]",
    "tileloadd tmm5, [{a} + {stride} + 1024]",
    "tdpbusd tmm0, tmm4, tmm6",
    "tdpbusd tmm1, tmm5, tmm6",
    ;
    "tilestored [{sums} + {stride}], tmm0"
    "tilestored [{sums} + {stride} + 1024], tmm1"
}

two_digits! {
    /// Two digits, with bytes that have no sign; the products are added to the sums.
    add_two,
    "tdpbusd",
    "tileloadd tmm0, [{sums} + {stride}]"
    "tileloadd tmm1, [{sums} + {stride} + 1024]"
    "tileloadd tmm2, [{sums} + {stride} + 2048]"
    "tileloadd tmm3, [{sums} + {stride} + 3072]"
}

three_digits! {
    /// Three digits, with bytes that have no sign; the products are added to the sums.
    add_three,
    "tdpbusd",
    "tileloadd tmm0, [{sums} + {stride}]"
    "tileloadd tmm1, [{sums} + {stride} + 1024]"
    "tileloadd tmm2, [{sums} + {stride} + 2048]"
    "tileloadd tmm3, [{sums} + {stride} + 3072]"
    "tileloadd tmm4, [{sums} + {stride} + 4096]"
    "tileloadd tmm5, [{sums} + {stride} + 5120]"
}
