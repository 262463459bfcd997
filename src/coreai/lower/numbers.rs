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

/// The number 0 of an element type: one byte for those of at most 8 bits.
pub(super) fn zero_bytes(element: ElementType) -> Vec<u8> {
    vec![0; element.bits().div_ceil(8) as usize]
}
