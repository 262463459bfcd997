//! Super-blocks of 256 elements: sub-blocks have quantized scales (and minima) under a half-precision scale of the
//! whole.
//!
//! Two and three low bits of elements are stored 32 bytes for 128 elements: pair `s` of bits of byte `i` belongs to
//! element `32 s + i`. Nibbles of Q4_K and Q5_K are stored 32 bytes for 64 elements in the same way.

use super::blocks::{NON_LINEAR, looked_up};
use super::{field, half_at};

/// Sub-blocks of 16: 4-bit scale and 4-bit minimum; 2-bit elements.
#[inline(always)]
pub fn q2_k(block: &[u8; 84], values: &mut [f32; 256]) {
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    let scales = field::<16>(block, 0);
    for (run, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let scale = [0, 1].map(|sub| d * f32::from(scales[2 * run + sub] & 15));
        let minimum = [0, 1].map(|sub| dmin * f32::from(scales[2 * run + sub] >> 4));
        let bytes = field::<32>(block, 16 + 32 * (run / 4));
        for i in 0..32 {
            values[i] = scale[i / 16] * f32::from(bytes[i] >> (2 * (run % 4)) & 3) - minimum[i / 16];
        }
    }
}

/// Sub-blocks of 16: 6-bit scale, offset -32; 2-bit elements and a mask bit that takes 4 off when clear.
#[inline(always)]
pub fn q3_k(block: &[u8; 110], values: &mut [f32; 256]) {
    let d = half_at(block, 108);
    let mask = field::<32>(block, 0);
    let scales = field::<12>(block, 96);
    // Low nibbles of the 16 scales, then four of their pairs of high bits to a byte.
    let scale = |sub: usize| {
        let low = scales[sub % 8] >> (4 * (sub / 8)) & 15;
        let high = scales[8 + sub % 4] >> (2 * (sub / 4)) & 3;
        d * (i32::from(low | high << 4) - 32) as f32
    };
    for (run, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let scale = [scale(2 * run), scale(2 * run + 1)];
        let bytes = field::<32>(block, 32 + 32 * (run / 4));
        for i in 0..32 {
            let low = i32::from(bytes[i] >> (2 * (run % 4)) & 3);
            let clear = i32::from(!(mask[i] >> run) & 1);
            values[i] = scale[i / 16] * (low - 4 * clear) as f32;
        }
    }
}

/// The 6-bit scales and minima of the 8 sub-blocks of Q4_K and Q5_K: bytes 0..4 and 4..8 hold six bits for the first
/// four sub-blocks and in their top two bits the top bits for the others, whose lower nibbles are in bytes 8..12.
#[inline(always)]
fn scales_and_minima(packed: &[u8; 12]) -> ([f32; 8], [f32; 8]) {
    let (mut scales, mut minima) = ([0.0; 8], [0.0; 8]);
    for i in 0..4 {
        let (scale, minimum, nibbles) = (packed[i], packed[i + 4], packed[i + 8]);
        scales[i] = f32::from(scale & 63);
        minima[i] = f32::from(minimum & 63);
        scales[i + 4] = f32::from(nibbles & 15 | scale >> 2 & 48);
        minima[i + 4] = f32::from(nibbles >> 4 | minimum >> 2 & 48);
    }
    (scales, minima)
}

/// Sub-blocks of 32: 6-bit scale and minimum; 4-bit elements.
#[inline(always)]
pub fn q4_k(block: &[u8; 144], values: &mut [f32; 256]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (scales, minima) = scales_and_minima(field(block, 4));
    for (sub, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, minimum) = (d * scales[sub], dmin * minima[sub]);
        let nibbles = field::<32>(block, 16 + 32 * (sub / 2));
        for (value, byte) in values.iter_mut().zip(nibbles) {
            *value = scale * f32::from(byte >> (4 * (sub % 2)) & 15) - minimum;
        }
    }
}

/// As [`q4_k`], with a fifth bit: bit `sub` of byte `i` for element `i` of the sub-block.
#[inline(always)]
pub fn q5_k(block: &[u8; 176], values: &mut [f32; 256]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (scales, minima) = scales_and_minima(field(block, 4));
    let fifth = field::<32>(block, 16);
    for (sub, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, minimum) = (d * scales[sub], dmin * minima[sub]);
        let nibbles = field::<32>(block, 48 + 32 * (sub / 2));
        for ((value, byte), fifth) in values.iter_mut().zip(nibbles).zip(fifth) {
            let q = byte >> (4 * (sub % 2)) & 15 | (fifth >> sub & 1) << 4;
            *value = scale * f32::from(q) - minimum;
        }
    }
}

/// Sub-blocks of 16: signed 8-bit scale; 6-bit elements, offset -32. Of every 128 elements the low nibbles are in 64
/// bytes, the high bits in 32.
#[inline(always)]
pub fn q6_k(block: &[u8; 210], values: &mut [f32; 256]) {
    let d = half_at(block, 208);
    let scales = field::<16>(block, 192);
    for (run, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (half, quarter) = (run / 4, run % 4);
        let low = field::<32>(block, 64 * half + 32 * (quarter % 2));
        let high = field::<32>(block, 128 + 32 * half);
        let scales = [d * f32::from(scales[2 * run] as i8), d * f32::from(scales[2 * run + 1] as i8)];
        for i in 0..32 {
            let q = low[i] >> (4 * (quarter / 2)) & 15 | (high[i] >> (2 * quarter) & 3) << 4;
            values[i] = scales[i / 16] * (i32::from(q) - 32) as f32;
        }
    }
}

/// Sub-blocks of 32: 6-bit scale, offset -32; nibbles that index [`NON_LINEAR`].
#[inline(always)]
pub fn iq4_xs(block: &[u8; 136], values: &mut [f32; 256]) {
    let d = half_at(block, 0);
    let high = u16::from_le_bytes(*field(block, 2));
    let low = field::<4>(block, 4);
    for (sub, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let scale = low[sub / 2] >> (4 * (sub % 2)) & 15 | ((high >> (2 * sub) & 3) as u8) << 4;
        let scale = d * (i32::from(scale) - 32) as f32;
        looked_up(field::<16>(block, 8 + 16 * sub), &NON_LINEAR, scale, values);
    }
}
