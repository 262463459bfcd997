//! Conversion of constants' elements to and from text.

use crate::types::{DataType, TensorType};

/// Text of packed little-endian elements. `None` if text can't represent the bytes exactly: a NaN with a payload, a
/// bool other than 0 and 1, bits behind the last element, or a wrong number of bytes.
pub fn elements(ty: &TensorType, bytes: &[u8]) -> Option<Vec<String>> {
    let count = usize::try_from(ty.elements()?).ok()?;
    if ty.bytes() != Some(bytes.len() as u64) {
        return None;
    }
    let texts: Vec<String> = match ty.dtype {
        DataType::Fp64 => wide(bytes, |b| format!("{:?}", f64::from_le_bytes(b))),
        DataType::Fp32 => wide(bytes, |b| format!("{:?}", f32::from_le_bytes(b))),
        DataType::Fp16 => wide(bytes, |b| format!("{:?}", half::f16::from_le_bytes(b).to_f32())),
        DataType::Bf16 => wide(bytes, |b| format!("{:?}", half::bf16::from_le_bytes(b).to_f32())),
        DataType::Bool => bytes.iter().map(|b| (*b != 0).to_string()).collect(),
        DataType::Int8 => bytes.iter().map(|b| (*b as i8).to_string()).collect(),
        DataType::Int16 => wide(bytes, |b| i16::from_le_bytes(b).to_string()),
        DataType::Int32 => wide(bytes, |b| i32::from_le_bytes(b).to_string()),
        DataType::Int64 => wide(bytes, |b| i64::from_le_bytes(b).to_string()),
        DataType::Uint16 => wide(bytes, |b| u16::from_le_bytes(b).to_string()),
        DataType::Uint32 => wide(bytes, |b| u32::from_le_bytes(b).to_string()),
        DataType::Uint64 => wide(bytes, |b| u64::from_le_bytes(b).to_string()),
        DataType::Int4 => (0..count).map(|i| (i64::from(bits(bytes, i, 4) << 4) as i8 >> 4).to_string()).collect(),
        DataType::Uint1 | DataType::Uint2 | DataType::Uint3 | DataType::Uint4 | DataType::Uint6 | DataType::Uint8 => {
            (0..count).map(|i| bits(bytes, i, ty.dtype.bits() as usize).to_string()).collect()
        }
        DataType::String => return None,
    };
    (pack(ty.dtype, texts.iter().map(String::as_str)).ok()? == bytes).then_some(texts)
}

fn wide<const N: usize>(bytes: &[u8], text: fn([u8; N]) -> String) -> Vec<String> {
    bytes.chunks_exact(N).map(|b| text(b.try_into().unwrap_or([0; N]))).collect()
}

/// Element `i` of packed elements of `width` bits, least significant bit first.
fn bits(bytes: &[u8], i: usize, width: usize) -> u8 {
    (0..width).fold(0, |value, k| {
        let at = i * width + k;
        value | ((bytes[at / 8] >> (at % 8)) & 1) << k
    })
}

/// Packs elements given as text. The error is a sentence.
pub fn pack<'a>(dtype: DataType, elements: impl Iterator<Item = &'a str>) -> Result<Vec<u8>, String> {
    fn number<T: std::str::FromStr>(text: &str, dtype: DataType) -> Result<T, String> {
        text.parse().map_err(|_| format!("`{text}` is not of type {dtype}"))
    }
    let mut out = Vec::new();
    let mut bit = 0usize; // for elements that share bytes
    for text in elements {
        match dtype {
            DataType::Fp64 => out.extend(number::<f64>(text, dtype)?.to_le_bytes()),
            DataType::Fp32 => out.extend(number::<f32>(text, dtype)?.to_le_bytes()),
            DataType::Fp16 => out.extend(half::f16::from_f32(number(text, dtype)?).to_le_bytes()),
            DataType::Bf16 => out.extend(half::bf16::from_f32(number(text, dtype)?).to_le_bytes()),
            DataType::Bool => out.push(u8::from(number::<bool>(text, dtype)?)),
            DataType::Int8 => out.extend(number::<i8>(text, dtype)?.to_le_bytes()),
            DataType::Int16 => out.extend(number::<i16>(text, dtype)?.to_le_bytes()),
            DataType::Int32 => out.extend(number::<i32>(text, dtype)?.to_le_bytes()),
            DataType::Int64 => out.extend(number::<i64>(text, dtype)?.to_le_bytes()),
            DataType::Uint16 => out.extend(number::<u16>(text, dtype)?.to_le_bytes()),
            DataType::Uint32 => out.extend(number::<u32>(text, dtype)?.to_le_bytes()),
            DataType::Uint64 => out.extend(number::<u64>(text, dtype)?.to_le_bytes()),
            DataType::Int4 | DataType::Uint1 | DataType::Uint2 | DataType::Uint3 | DataType::Uint4 => {
                pack_bits(&mut out, &mut bit, small(text, dtype)?, dtype.bits() as usize);
            }
            DataType::Uint6 | DataType::Uint8 => {
                pack_bits(&mut out, &mut bit, small(text, dtype)?, dtype.bits() as usize);
            }
            DataType::String => return Err(format!("`{text}` is not a string")),
        }
    }
    Ok(out)
}

/// An integer of at most eight bits within the range of its type.
fn small(text: &str, dtype: DataType) -> Result<u8, String> {
    let size = 1i64 << dtype.bits();
    let (low, high) = if dtype == DataType::Int4 { (-size / 2, size / 2) } else { (0, size) };
    let value: Option<i64> = text.parse().ok().filter(|v| (low..high).contains(v));
    value.map(|v| v.rem_euclid(size) as u8).ok_or_else(|| format!("`{text}` is not of type {dtype}"))
}

fn pack_bits(out: &mut Vec<u8>, bit: &mut usize, value: u8, width: usize) {
    for k in 0..width {
        let at = *bit + k;
        if at / 8 == out.len() {
            out.push(0);
        }
        if let Some(byte) = out.get_mut(at / 8) {
            *byte |= ((value >> k) & 1) << (at % 8);
        }
    }
    *bit += width;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NUMERIC: [DataType; 19] = [
        DataType::Bool,
        DataType::Fp16,
        DataType::Fp32,
        DataType::Fp64,
        DataType::Bf16,
        DataType::Int4,
        DataType::Int8,
        DataType::Int16,
        DataType::Int32,
        DataType::Int64,
        DataType::Uint1,
        DataType::Uint2,
        DataType::Uint3,
        DataType::Uint4,
        DataType::Uint6,
        DataType::Uint8,
        DataType::Uint16,
        DataType::Uint32,
        DataType::Uint64,
    ];

    #[test]
    fn sub_byte_elements_are_packed_least_significant_bit_first() {
        let three = TensorType::new(DataType::Uint3, [3u64]);
        assert_eq!(pack(DataType::Uint3, ["1", "2", "7"].into_iter()), Ok(vec![0b1101_0001, 0b1]));
        assert_eq!(elements(&three, &[0b1101_0001, 0b1]), Some(vec!["1".into(), "2".into(), "7".into()]));
        let four = TensorType::new(DataType::Int4, [2u64]);
        assert_eq!(elements(&four, &[0x8f]), Some(vec!["-1".into(), "-8".into()]));
    }

    #[test]
    fn bytes_that_elements_cannot_tell_are_left_as_bytes() {
        let ty = |dtype| TensorType::new(dtype, [1u64]);
        assert_eq!(elements(&ty(DataType::Bool), &[2]), None, "a bool of 2");
        assert_eq!(elements(&ty(DataType::Uint3), &[0xf0]), None, "bits behind the last element");
        assert_eq!(elements(&ty(DataType::Fp16), &[0x01, 0x7e]), None, "a NaN with a payload");
        assert_eq!(elements(&ty(DataType::Fp16), &[0x00]), None, "half an element");
    }

    #[test]
    fn a_number_outside_of_its_type_is_refused() {
        for (dtype, text) in
            [(DataType::Int4, "8"), (DataType::Uint4, "16"), (DataType::Int8, "-129"), (DataType::Bool, "1")]
        {
            assert_eq!(pack(dtype, [text].into_iter()), Err(format!("`{text}` is not of type {dtype}")));
        }
    }

    proptest! {
        /// For any bytes, the text gives them back, or there is no text.
        #[test]
        fn text_gives_the_bytes_back(dtype in proptest::sample::select(&NUMERIC[..]), count in 0u64..9, seed: [u8; 72]) {
            let ty = TensorType::new(dtype, [count]);
            let bytes = &seed[..ty.bytes().unwrap() as usize];
            if let Some(texts) = elements(&ty, bytes) {
                prop_assert_eq!(pack(dtype, texts.iter().map(String::as_str)).unwrap(), bytes);
            }
        }
    }
}
