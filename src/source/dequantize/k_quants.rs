//! Super-blocks of 256 elements: sub-blocks have quantized scales (and minima) under a half-precision scale of the
//! whole.
//!
//! Two and three low bits of elements are stored 32 bytes for 128 elements: pair `s` of bits of byte `i` belongs to
//! element `32 s + i`. Nibbles of Q4_K and Q5_K are stored 32 bytes for 64 elements in the same way. Elements that
//! share bytes are a loop of their own, short enough to be unrolled: by how much it shifts is then known to the
//! compiler.

use super::blocks::{NON_LINEAR, looked_up};
use super::{field, half_at};

/// Sub-blocks of 16: 4-bit scale and 4-bit minimum; 2-bit elements.
#[inline(always)]
pub fn q2_k(block: &[u8; 84], values: &mut [f32; 256]) {
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    let stored = field::<16>(block, 0);
    let (mut scales, mut minima) = ([0.0; 16], [0.0; 16]);
    for sub in 0..16 {
        scales[sub] = d * f32::from(stored[sub] & 15);
        minima[sub] = dmin * f32::from(stored[sub] >> 4);
    }
    for (half, values) in values.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        let bytes = field::<32>(block, 16 + 32 * half);
        let (scales, minima) = (&scales[8 * half..][..8], &minima[8 * half..][..8]);
        for (quarter, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for i in 0..32 {
                let sub = 2 * quarter + i / 16;
                values[i] = scales[sub] * f32::from(bytes[i] >> (2 * quarter) & 3) - minima[sub];
            }
        }
    }
}

/// Sub-blocks of 16: 6-bit scale, offset -32; 2-bit elements and a mask bit that takes 4 off when clear.
#[inline(always)]
pub fn q3_k(block: &[u8; 110], values: &mut [f32; 256]) {
    let d = half_at(block, 108);
    let mask = field::<32>(block, 0);
    // Low nibbles of the 16 scales, then four of their pairs of high bits to a byte.
    let [first, second, high] = words(field(block, 96));
    let mut scales = [0.0; 16];
    for (four, low) in [first, second, first >> 4, second >> 4].into_iter().enumerate() {
        let stored = (low & 0x0f0f_0f0f | (high >> (2 * four) & 0x0303_0303) << 4).to_le_bytes();
        for i in 0..4 {
            scales[4 * four + i] = d * (i32::from(stored[i]) - 32) as f32;
        }
    }
    for (half, values) in values.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        let bytes = field::<32>(block, 32 + 32 * half);
        let scales = &scales[8 * half..][..8];
        for (quarter, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for i in 0..32 {
                let low = i32::from(bytes[i] >> (2 * quarter) & 3);
                let clear = i32::from(!(mask[i] >> (4 * half + quarter)) & 1);
                values[i] = scales[2 * quarter + i / 16] * (low - 4 * clear) as f32;
            }
        }
    }
}

/// Packed numbers as words, of which each holds parts of four.
#[inline(always)]
fn words(packed: &[u8; 12]) -> [u32; 3] {
    [0, 4, 8].map(|at| u32::from_le_bytes(*field(packed, at)))
}

/// Returns the scales and minima of the 8 sub-blocks of Q4_K and Q5_K: half-precision ones of the whole, times 6-bit
/// ones. Of these, bytes 0..4 and 4..8 hold six bits for the first four sub-blocks and in their top two bits the top
/// bits for the others, whose lower nibbles are in bytes 8..12.
#[inline(always)]
fn scales_and_minima(block: &[u8]) -> ([f32; 8], [f32; 8]) {
    const SIX_BITS: u32 = 0x3f3f_3f3f;
    const NIBBLE: u32 = 0x0f0f_0f0f;
    const TOP_TWO: u32 = 0x3030_3030;
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let [scale, minimum, nibbles] = words(field(block, 4));
    let stored_scales = [scale & SIX_BITS, nibbles & NIBBLE | scale >> 2 & TOP_TWO];
    let stored_minima = [minimum & SIX_BITS, nibbles >> 4 & NIBBLE | minimum >> 2 & TOP_TWO];
    (eight(stored_scales, d), eight(stored_minima, dmin))
}

/// Eight bytes times a number.
#[inline(always)]
fn eight([low, high]: [u32; 2], factor: f32) -> [f32; 8] {
    let bytes = (u64::from(low) | u64::from(high) << 32).to_le_bytes();
    let mut products = [0.0; 8];
    for i in 0..8 {
        products[i] = factor * f32::from(bytes[i]);
    }
    products
}

/// Sub-blocks of 32: 6-bit scale and minimum; 4-bit elements.
#[inline(always)]
pub fn q4_k(block: &[u8; 144], values: &mut [f32; 256]) {
    let (scales, minima) = scales_and_minima(block);
    for (pair, values) in values.as_chunks_mut::<64>().0.iter_mut().enumerate() {
        let bytes = field::<32>(block, 16 + 32 * pair);
        let (low, high) = values.split_at_mut(32);
        for i in 0..32 {
            low[i] = scales[2 * pair] * f32::from(bytes[i] & 15) - minima[2 * pair];
            high[i] = scales[2 * pair + 1] * f32::from(bytes[i] >> 4) - minima[2 * pair + 1];
        }
    }
}

/// As [`q4_k`], with a fifth bit: bit `sub` of byte `i` for element `i` of the sub-block.
#[inline(always)]
pub fn q5_k(block: &[u8; 176], values: &mut [f32; 256]) {
    let (scales, minima) = scales_and_minima(block);
    let fifth = field::<32>(block, 16);
    for (pair, values) in values.as_chunks_mut::<64>().0.iter_mut().enumerate() {
        let bytes = field::<32>(block, 48 + 32 * pair);
        let (low, high) = values.split_at_mut(32);
        for i in 0..32 {
            let fifth = fifth[i] >> (2 * pair);
            low[i] = scales[2 * pair] * f32::from(bytes[i] & 15 | (fifth & 1) << 4) - minima[2 * pair];
            high[i] = scales[2 * pair + 1] * f32::from(bytes[i] >> 4 | (fifth >> 1 & 1) << 4) - minima[2 * pair + 1];
        }
    }
}

/// Sub-blocks of 16: signed 8-bit scale; 6-bit elements, offset -32. Of every 128 elements the low nibbles are in 64
/// bytes, the high bits in 32.
#[inline(always)]
pub fn q6_k(block: &[u8; 210], values: &mut [f32; 256]) {
    let d = half_at(block, 208);
    let scales = field::<16>(block, 192).map(|scale| d * f32::from(scale as i8));
    for (half, values) in values.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        let low = field::<64>(block, 64 * half);
        let high = field::<32>(block, 128 + 32 * half);
        let scales = &scales[8 * half..][..8];
        for (quarter, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for i in 0..32 {
                let nibble = low[32 * (quarter % 2) + i] >> (4 * (quarter / 2)) & 15;
                let q = nibble | (high[i] >> (2 * quarter) & 3) << 4;
                values[i] = scales[2 * quarter + i / 16] * (i32::from(q) - 32) as f32;
            }
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Sub-block by sub-block, as the layouts are described.
    fn one_by_one(block: &[u8; 144]) -> [(f32, f32); 8] {
        let packed = &block[4..16];
        std::array::from_fn(|sub| {
            let (scale, minimum) = match sub {
                0..4 => (packed[sub] & 63, packed[sub + 4] & 63),
                _ => {
                    let (low, top) = (packed[sub + 4], [packed[sub - 4], packed[sub]].map(|byte| byte >> 6 << 4));
                    (low & 15 | top[0], low >> 4 | top[1])
                }
            };
            (half_at(block, 0) * f32::from(scale), half_at(block, 2) * f32::from(minimum))
        })
    }

    proptest! {
        #[test]
        fn scales_of_sub_blocks_are_found_wherever_their_bits_are(bytes in proptest::collection::vec(any::<u8>(), 144)) {
            let mut block: [u8; 144] = bytes.try_into().unwrap();
            // finite scales
            block[1] &= 0xbb;
            block[3] &= 0xbb;
            let (scales, minima) = scales_and_minima(&block);
            let expected = one_by_one(&block);
            for sub in 0..8 {
                prop_assert_eq!((scales[sub], minima[sub]), expected[sub]);
            }
            let mut values = [0.0; 256];
            q4_k(&block, &mut values);
            for (i, value) in values.iter().enumerate() {
                let q = block[16 + i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15;
                let (scale, minimum) = expected[i / 32];
                prop_assert_eq!(*value, scale * f32::from(q) - minimum);
            }
        }
    }
}
