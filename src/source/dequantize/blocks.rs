//! Blocks of one or two scales over small integers.

use super::{field, half_at};

/// Values of IQ4_NL's and IQ4_XS's 4-bit codes.
#[rustfmt::skip]
pub const NON_LINEAR: [f32; 16] =
    [-127., -104., -83., -65., -49., -35., -22., -10., 1., 13., 25., 38., 53., 69., 89., 113.];

/// Twice the values of the 4-bit float e2m1; scales are halved in turn.
const E2M1_DOUBLED: [f32; 16] = [0., 1., 2., 3., 4., 6., 8., 12., 0., -1., -2., -3., -4., -6., -8., -12.];

/// Returns the low nibbles of bytes, then the high ones. Loops borrow what this gives: an iterator that owns an array
/// is dropped by a call for each block, around which no register keeps its vector.
#[inline(always)]
fn nibbles(bytes: &[u8; 16]) -> [u8; 32] {
    let mut q = [0; 32];
    for i in 0..16 {
        q[i] = bytes[i] & 15;
        q[i + 16] = bytes[i] >> 4;
    }
    q
}

/// f16 scale; 32 nibbles, element `i` in the low half of byte `i`, element `i + 16` in its high half; offset -8.
#[inline(always)]
pub fn q4_0(block: &[u8; 18], values: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (value, q) in values.iter_mut().zip(&nibbles(field(block, 2))) {
        *value = d * (i32::from(*q) - 8) as f32;
    }
}

/// f16 scale, f16 minimum; nibbles as in [`q4_0`].
#[inline(always)]
pub fn q4_1(block: &[u8; 20], values: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (value, q) in values.iter_mut().zip(&nibbles(field(block, 4))) {
        *value = d * f32::from(*q) + m;
    }
}

/// Returns the integers of [`q5_0`] and [`q5_1`]: nibbles as in [`q4_0`], fifth bits in one 32-bit number.
#[inline(always)]
fn five_bits(high_bits: &[u8; 4], nibbles: &[u8; 16]) -> [i32; 32] {
    let high_bits = u32::from_le_bytes(*high_bits);
    let mut q = [0; 32];
    for i in 0..16 {
        q[i] = i32::from(nibbles[i] & 15) | ((high_bits >> i & 1) << 4) as i32;
        q[i + 16] = i32::from(nibbles[i] >> 4) | ((high_bits >> (i + 16) & 1) << 4) as i32;
    }
    q
}

/// f16 scale; 5-bit integers; offset -16.
#[inline(always)]
pub fn q5_0(block: &[u8; 22], values: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (value, q) in values.iter_mut().zip(&five_bits(field(block, 2), field(block, 6))) {
        *value = d * (*q as f32 - 16.0);
    }
}

/// f16 scale, f16 minimum; 5-bit integers.
#[inline(always)]
pub fn q5_1(block: &[u8; 24], values: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (value, q) in values.iter_mut().zip(&five_bits(field(block, 4), field(block, 8))) {
        *value = d * *q as f32 + m;
    }
}

/// f16 scale; bytes.
#[inline(always)]
pub fn q8_0(block: &[u8; 34], values: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (value, &q) in values.iter_mut().zip(field::<32>(block, 2)) {
        *value = f32::from(q as i8) * d;
    }
}

/// f32 scale; bytes; 16-bit sums that only serve dot products.
#[inline(always)]
pub fn q8_k(block: &[u8; 292], values: &mut [f32; 256]) {
    let d = f32::from_le_bytes(*field(block, 0));
    for (value, &q) in values.iter_mut().zip(field::<256>(block, 4)) {
        *value = d * f32::from(q as i8);
    }
}

/// f16 scale; one bit per element, least significant first: set is `d`, not set is `-d`.
#[inline(always)]
pub fn q1_0(block: &[u8; 18], values: &mut [f32; 128]) {
    let d = half_at(block, 0).to_bits();
    for (byte, values) in field::<16>(block, 2).iter().zip(values.as_chunks_mut::<8>().0) {
        let clear = !u32::from(*byte);
        for (bit, value) in values.iter_mut().enumerate() {
            *value = f32::from_bits(d ^ (clear >> bit & 1) << 31);
        }
    }
}

/// f16 scale; two bits per element, least significant first, standing for -3, -1, 1 and 3: the four levels of Stretched
/// Elastic Quantization (-1.5, -0.5, 0.5, 1.5) times a step of twice the scale.
#[inline(always)]
pub fn seq_2bit(block: &[u8; 130], values: &mut [f32; 512]) {
    let d = half_at(block, 0);
    for (byte, values) in field::<128>(block, 2).iter().zip(values.as_chunks_mut::<4>().0) {
        for (place, value) in values.iter_mut().enumerate() {
            *value = d * (2.0 * f32::from(byte >> (2 * place) & 3) - 3.0);
        }
    }
}

/// Ternary, five elements to a byte: the byte is a fraction of 256 whose base-3 digits are the elements plus one.
/// 48 bytes hold 5 digits each, in runs of 32 and of 16 bytes, 4 bytes hold 4; f16 scale at the end.
#[inline(always)]
pub fn tq1_0(block: &[u8; 54], values: &mut [f32; 256]) {
    let d = half_at(block, 52);
    let (first, rest) = values.split_at_mut(160);
    let (second, third) = rest.split_at_mut(80);
    digits(&block[..32], first, d);
    digits(&block[32..48], second, d);
    digits(&block[48..52], third, d);
}

/// Base-3 digits, most significant first, of a run of bytes: digit `n` of byte `i` is element `n * run + i`.
#[inline(always)]
fn digits(run: &[u8], values: &mut [f32], d: f32) {
    let mut power = 1u8;
    for values in values.chunks_exact_mut(run.len()) {
        for (value, byte) in values.iter_mut().zip(run) {
            let digit = (u32::from(byte.wrapping_mul(power)) * 3) >> 8;
            *value = d * (digit as i32 - 1) as f32;
        }
        power = power.wrapping_mul(3);
    }
}

/// Ternary, two bits per element; 32 bytes hold 128 elements, a quarter in each pair of bits; f16 scale at the end.
#[inline(always)]
pub fn tq2_0(block: &[u8; 66], values: &mut [f32; 256]) {
    let d = half_at(block, 64);
    for (bytes, values) in block[..64].as_chunks::<32>().0.iter().zip(values.as_chunks_mut::<128>().0) {
        for (quarter, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for (value, byte) in values.iter_mut().zip(bytes) {
                *value = d * (i32::from(byte >> (2 * quarter) & 3) - 1) as f32;
            }
        }
    }
}

/// f16 scale; nibbles as in [`q4_0`] that index [`NON_LINEAR`].
#[inline(always)]
pub fn iq4_nl(block: &[u8; 18], values: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (value, q) in values.iter_mut().zip(&nibbles(field(block, 2))) {
        *value = d * NON_LINEAR[usize::from(*q)];
    }
}

/// Scale 2^(e - 128), one half of what the exponent byte e says in MXFP4, because the values are doubled; nibbles as
/// in [`q4_0`].
#[inline(always)]
pub fn mxfp4(block: &[u8; 17], values: &mut [f32; 32]) {
    let d = f32::from_bits(match block[0] {
        e @ 0..2 => 0x0020_0000 << e,
        e => u32::from(e - 1) << 23,
    });
    for (value, q) in values.iter_mut().zip(&nibbles(field(block, 1))) {
        *value = d * E2M1_DOUBLED[usize::from(*q)];
    }
}

/// Four scales, each an unsigned e4m3, over 16 elements each; in every 8 bytes the low nibbles come first.
#[inline(always)]
pub fn nvfp4(block: &[u8; 36], values: &mut [f32; 64]) {
    let nibbles = block[4..].as_chunks::<8>().0.iter();
    for ((&scale, nibbles), values) in block[..4].iter().zip(nibbles).zip(values.as_chunks_mut::<16>().0) {
        looked_up(nibbles, &E2M1_DOUBLED, half_of_unsigned_e4m3(scale), values);
    }
}

/// Half the value of an e4m3 scale whose sign bit is not looked at. The code for NaN reads as zero.
#[inline(always)]
fn half_of_unsigned_e4m3(scale: u8) -> f32 {
    const REBIAS: f32 = f32::from_bits((127 + 119) << 23);
    if scale == 0x7F { 0.0 } else { f32::from_bits(u32::from(scale & 0x7F) << 20) * REBIAS }
}

/// Values from a table, indexed by nibbles: the low halves of the bytes, then the high ones.
#[inline(always)]
pub fn looked_up(bytes: &[u8], table: &[f32; 16], d: f32, values: &mut [f32]) {
    let (low, high) = values.split_at_mut(bytes.len());
    for (value, byte) in low.iter_mut().zip(bytes) {
        *value = d * table[usize::from(byte & 15)];
    }
    for (value, byte) in high.iter_mut().zip(bytes) {
        *value = d * table[usize::from(byte >> 4)];
    }
}
