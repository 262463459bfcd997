//! Plain numbers.

/// IEEE half precision to single, without branches.
///
/// Subnormal numbers are converted as integers: arithmetic on subnormal f32 is slow on some processors. Infinities and
/// NaNs keep their mantissa.
#[inline(always)]
pub fn half_to_f32(bits: u16) -> f32 {
    const REBIAS: u32 = (127 - 15) << 23;
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7FFF);
    let value = match magnitude {
        0..0x0400 => (magnitude as i32 as f32 * f32::from_bits((127 - 24) << 23)).to_bits(),
        0x0400..0x7C00 => (magnitude << 13) + REBIAS,
        _ => (magnitude << 13) + 2 * REBIAS,
    };
    f32::from_bits(value | sign)
}

#[inline(always)]
pub fn f16(bytes: [u8; 2]) -> f32 {
    half_to_f32(u16::from_le_bytes(bytes))
}

#[inline(always)]
pub fn bf16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

#[inline(always)]
pub fn f64(bytes: [u8; 8]) -> f32 {
    f64::from_le_bytes(bytes) as f32
}

/// Half precision cut to its upper byte.
#[inline(always)]
pub fn f8_e5m2([byte]: [u8; 1]) -> f32 {
    half_to_f32(u16::from(byte) << 8)
}

/// Bias 7; all ones are NaN and there is no infinity.
#[inline(always)]
pub fn f8_e4m3([byte]: [u8; 1]) -> f32 {
    const REBIAS: u32 = (127 - 7) << 23;
    let sign = u32::from(byte & 0x80) << 24;
    let magnitude = u32::from(byte & 0x7F);
    let value = match magnitude {
        0..0x08 => (magnitude as i32 as f32 * f32::from_bits((127 - 9) << 23)).to_bits(),
        0x08..0x7F => (magnitude << 20) + REBIAS,
        _ => 0x7FC0_0000,
    };
    f32::from_bits(value | sign)
}

/// 2^(byte - 127); all ones are NaN.
#[inline(always)]
pub fn f8_e8m0([byte]: [u8; 1]) -> f32 {
    f32::from_bits(match byte {
        0 => 0x0040_0000,
        255 => 0x7FC0_0000,
        exponent => u32::from(exponent) << 23,
    })
}

/// Two numbers of 4 bits: sign, two exponent bits with bias 1, one mantissa bit; neither infinities nor NaN.
#[inline(always)]
pub fn f4_e2m1(&[byte]: &[u8; 1], values: &mut [f32; 2]) {
    const VALUES: [f32; 16] = [0., 0.5, 1., 1.5, 2., 3., 4., 6., -0., -0.5, -1., -1.5, -2., -3., -4., -6.];
    *values = [byte & 0xF, byte >> 4].map(|code| VALUES[usize::from(code)]);
}

#[inline(always)]
pub fn u4(&[byte]: &[u8; 1], values: &mut [f32; 2]) {
    *values = [byte & 0xF, byte >> 4].map(f32::from);
}

#[inline(always)]
pub fn i4(&[byte]: &[u8; 1], values: &mut [f32; 2]) {
    let byte = byte as i8;
    // shifts of signed numbers keep the sign
    *values = [byte << 4 >> 4, byte >> 4].map(f32::from);
}

#[inline(always)]
pub fn u2(&[byte]: &[u8; 1], values: &mut [f32; 4]) {
    *values = [byte & 3, byte >> 2 & 3, byte >> 4 & 3, byte >> 6].map(f32::from);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_is_what_the_half_crate_says() {
        for bits in 0..=u16::MAX {
            let expected = half::f16::from_bits(bits).to_f32();
            let value = half_to_f32(bits);
            assert!(value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan(), "{bits:#06x}");
        }
    }

    #[test]
    fn parts_of_a_byte_stand_lowest_first() {
        let (mut two, mut four) = ([0.0; 2], [0.0; 4]);
        u4(&[0xF1], &mut two);
        assert_eq!(two, [1.0, 15.0]);
        i4(&[0x8F], &mut two);
        assert_eq!(two, [-1.0, -8.0]);
        i4(&[0x72], &mut two);
        assert_eq!(two, [2.0, 7.0]);
        f4_e2m1(&[0xF1], &mut two);
        assert_eq!(two, [0.5, -6.0]);
        u2(&[0b11_10_01_00], &mut four);
        assert_eq!(four, [0.0, 1.0, 2.0, 3.0]);
    }

    #[test]
    fn eight_bit_floats_have_the_landmarks_of_their_definition() {
        assert_eq!(f8_e4m3([0x38]), 1.0);
        assert_eq!(f8_e4m3([0xB8]), -1.0);
        assert_eq!(f8_e4m3([0x7E]), 448.0);
        assert_eq!(f8_e4m3([0x01]), 2f32.powi(-9));
        assert_eq!(f8_e4m3([0x08]), 2f32.powi(-6));
        assert!(f8_e4m3([0x7F]).is_nan() && f8_e4m3([0xFF]).is_nan());
        assert_eq!(f8_e5m2([0x3C]), 1.0);
        assert_eq!(f8_e5m2([0x7B]), 57344.0);
        assert_eq!(f8_e5m2([0x01]), 2f32.powi(-16));
        assert_eq!(f8_e5m2([0x7C]), f32::INFINITY);
        assert_eq!(f8_e8m0([127]), 1.0);
        assert_eq!(f8_e8m0([0]), 2f32.powi(-127));
        assert!(f8_e8m0([255]).is_nan());
    }
}
