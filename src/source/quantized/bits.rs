//! Fields of a few bits in a row of little-endian words, least significant bit first.

/// Returns field `index` of `bits` bits, at most 8 of them, of consecutive bytes.
#[inline]
pub(super) fn field(bytes: &[u8], index: usize, bits: u32) -> u32 {
    let bit = index * bits as usize;
    let low = u32::from(bytes.get(bit / 8).copied().unwrap_or(0));
    let high = u32::from(bytes.get(bit / 8 + 1).copied().unwrap_or(0));
    ((low | high << 8) >> (bit % 8)) & ((1 << bits) - 1)
}

/// Returns 32-bit word `index` of consecutive bytes.
#[inline]
pub(super) fn word(bytes: &[u8], index: usize) -> u32 {
    bytes.get(4 * index..).and_then(|rest| rest.first_chunk()).map_or(0, |word| u32::from_le_bytes(*word))
}

/// Returns field `index` of `bits` bits of a column: consecutive words of the column are `stride` words apart.
#[inline]
pub(super) fn field_of_column(bytes: &[u8], column: usize, stride: usize, index: usize, bits: u32) -> u32 {
    let bit = index * bits as usize;
    let low = u64::from(word(bytes, bit / 32 * stride + column));
    // only fields that straddle two words look at the next
    let straddles = bit % 32 + bits as usize > 32;
    let high = if straddles { u64::from(word(bytes, (bit / 32 + 1) * stride + column)) } else { 0 };
    (((low | high << 32) >> (bit % 32)) & ((1 << bits) - 1)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_follow_one_another_across_words() {
        for bits in [1u32, 2, 3, 4, 5, 6, 8] {
            let values: Vec<u32> = (0..96u32).map(|i| (i * 37 + 11) & ((1 << bits) - 1)).collect();
            let mut bytes = vec![0u8; 4 * (96 * bits as usize).div_ceil(32)];
            for (index, value) in values.iter().enumerate() {
                for bit in 0..bits as usize {
                    let at = index * bits as usize + bit;
                    bytes[at / 8] |= ((value >> bit & 1) << (at % 8)) as u8;
                }
            }
            // the same words as the second of three columns
            let words = bytes.as_chunks::<4>().0;
            let columns: Vec<u8> = words.iter().flat_map(|word| [[0xff; 4], *word, [0xaa; 4]].concat()).collect();
            for (index, value) in values.iter().enumerate() {
                assert_eq!(field(&bytes, index, bits), *value);
                assert_eq!(field_of_column(&columns, 1, 3, index, bits), *value);
            }
        }
    }
}
