//! Numbers as the bytes of one element.

use half::f16;

use crate::aicode::ElementType;

/// A number as one element.
pub(super) fn number_bytes(value: f64, element: ElementType) -> Result<Vec<u8>, String> {
    Ok(match element {
        ElementType::F16 => f16::from_f64(value).to_le_bytes().to_vec(),
        ElementType::Bf16 => half::bf16::from_f64(value).to_le_bytes().to_vec(),
        ElementType::F32 => (value as f32).to_le_bytes().to_vec(),
        ElementType::F64 => value.to_le_bytes().to_vec(),
        ElementType::Si32 => (value as i32).to_le_bytes().to_vec(),
        ElementType::Ui32 => (value as u32).to_le_bytes().to_vec(),
        ElementType::Si16 => (value as i16).to_le_bytes().to_vec(),
        ElementType::Ui16 => (value as u16).to_le_bytes().to_vec(),
        ElementType::Si64 => (value as i64).to_le_bytes().to_vec(),
        ElementType::Si8 | ElementType::Si4 => vec![value as i8 as u8],
        ElementType::Ui8 | ElementType::Ui4 | ElementType::I1 => vec![value as u8],
        other => return Err(format!("numbers of type {}", other.name())),
    })
}

/// The elements of a type that [`number_bytes`] writes; nothing for other types.
pub(super) fn numbers(bytes: &[u8], element: ElementType) -> Option<Vec<f64>> {
    fn read<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        bytes.as_chunks().0.iter().map(|bytes| number(*bytes)).collect()
    }
    Some(match element {
        ElementType::F16 => read(bytes, |bytes| f16::from_le_bytes(bytes).to_f64()),
        ElementType::Bf16 => read(bytes, |bytes| half::bf16::from_le_bytes(bytes).to_f64()),
        ElementType::F32 => read(bytes, |bytes| f32::from_le_bytes(bytes).into()),
        ElementType::Si32 => read(bytes, |bytes| i32::from_le_bytes(bytes).into()),
        ElementType::Ui32 => read(bytes, |bytes| u32::from_le_bytes(bytes).into()),
        ElementType::Si16 => read(bytes, |bytes| i16::from_le_bytes(bytes).into()),
        ElementType::Ui16 => read(bytes, |bytes| u16::from_le_bytes(bytes).into()),
        ElementType::Si8 => read(bytes, |bytes| i8::from_le_bytes(bytes).into()),
        ElementType::Ui8 => read(bytes, |[byte]| byte.into()),
        _ => return None,
    })
}

/// The number 0 of an element type: one byte for those of at most 8 bits.
pub(super) fn zero_bytes(element: ElementType) -> Vec<u8> {
    vec![0; element.bits().div_ceil(8) as usize]
}
