//! Packing of codes of up to eight bits: least significant bit first, across byte borders, as in weight files.

/// Packs the low `bits` bits of each code, where `bits` is at most 8. Bits that fill up the last byte are zero. `out`
/// has exactly the length needed.
pub fn pack(codes: &[u8], bits: u32, out: &mut [u8]) {
    if bits == 8 {
        return out.copy_from_slice(codes);
    }
    // eight codes take `bits` bytes
    for (codes, out) in codes.chunks(8).zip(out.chunks_mut(bits as usize)) {
        let mask = (1u64 << bits) - 1;
        let word = codes.iter().rev().fold(0u64, |word, code| word << bits | u64::from(*code) & mask);
        out.copy_from_slice(&word.to_le_bytes()[..out.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_follow_one_another_bit_by_bit() {
        let packed = |codes: &[u8], bits: u32| {
            let mut out = vec![0xaa; (codes.len() * bits as usize).div_ceil(8)];
            pack(codes, bits, &mut out);
            out
        };
        assert_eq!(packed(&[1, 2, 3, 0xff, 1], 4), [0x21, 0xf3, 0x01]);
        assert_eq!(packed(&[1, 2, 3, 4, 5], 3), (1u16 | 2 << 3 | 3 << 6 | 4 << 9 | 5 << 12).to_le_bytes());
        assert_eq!(packed(&[63, 0, 63, 1], 6), [0x3f, 0xf0, 0x07]);
        assert_eq!(packed(&[1, 0, 1, 1, 0, 0, 0, 1, 1], 1), [0x8d, 1]);
        assert_eq!(packed(&[1, 0xff], 8), [1, 0xff]);
    }
}
