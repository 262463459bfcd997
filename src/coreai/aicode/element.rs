//! Element types.

use anec_mil::DataType;

/// Type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // the names are the documentation
pub enum ElementType {
    I1,
    F64,
    F32,
    F16,
    Bf16,
    F8E5M2,
    F8E4M3Fn,
    Si64,
    Si32,
    Si16,
    Si8,
    Si4,
    Si2,
    Ui64,
    Ui32,
    Ui16,
    Ui8,
    Ui4,
    Ui2,
    Ui1,
    Ui6,
    Ui3,
    F4E2M1Fn,
    F8E8M0Fnu,
    ComplexF64,
    ComplexF32,
}

/// Code, name, bits of one element, and the date of the form.
const ROWS: [(ElementType, u64, &str, u64, u32); 26] = [
    (ElementType::I1, 4, "i1", 8, 20250707),
    (ElementType::F64, 5, "f64", 64, 20250707),
    (ElementType::F32, 6, "f32", 32, 20250707),
    (ElementType::F16, 7, "f16", 16, 20250707),
    (ElementType::Bf16, 8, "bf16", 16, 20250707),
    (ElementType::F8E5M2, 9, "f8e5m2", 8, 20250707),
    (ElementType::F8E4M3Fn, 10, "f8e4m3fn", 8, 20250707),
    (ElementType::Si64, 17, "si64", 64, 20250707),
    (ElementType::Si32, 18, "si32", 32, 20250707),
    (ElementType::Si16, 19, "si16", 16, 20250707),
    (ElementType::Si8, 20, "si8", 8, 20250707),
    (ElementType::Si4, 21, "si4", 4, 20250707),
    (ElementType::Si2, 22, "si2", 2, 20250707),
    (ElementType::Ui64, 23, "ui64", 64, 20250707),
    (ElementType::Ui32, 24, "ui32", 32, 20250707),
    (ElementType::Ui16, 25, "ui16", 16, 20250707),
    (ElementType::Ui8, 26, "ui8", 8, 20250707),
    (ElementType::Ui4, 27, "ui4", 4, 20250707),
    (ElementType::Ui2, 28, "ui2", 2, 20250707),
    (ElementType::Ui1, 29, "ui1", 1, 20250707),
    (ElementType::Ui6, 36, "ui6", 6, 20251003),
    (ElementType::Ui3, 37, "ui3", 3, 20251003),
    (ElementType::F4E2M1Fn, 46, "f4e2m1fn", 4, 20250723),
    (ElementType::F8E8M0Fnu, 47, "f8e8m0fnu", 8, 20250723),
    (ElementType::ComplexF64, 11, "complex<f64>", 128, 20250707),
    (ElementType::ComplexF32, 12, "complex<f32>", 64, 20250707),
];

impl ElementType {
    fn row(self) -> (ElementType, u64, &'static str, u64, u32) {
        ROWS[self as usize]
    }

    /// Code in serialized types.
    pub fn code(self) -> u64 {
        self.row().1
    }

    /// All element types.
    pub fn all() -> impl Iterator<Item = ElementType> {
        ROWS.iter().map(|row| row.0)
    }

    /// The element type of a code.
    pub fn from_code(code: u64) -> Option<ElementType> {
        ROWS.iter().find(|row| row.1 == code).map(|row| row.0)
    }

    /// Name in MLIR text.
    pub fn name(self) -> &'static str {
        self.row().2
    }

    /// Bits of one element in a resource.
    pub fn bits(self) -> u64 {
        self.row().3
    }

    /// Bytes of packed elements, as a resource holds them; `None` if they exceed 64 bits.
    pub fn packed_bytes(self, elements: u64) -> Option<u64> {
        elements.checked_mul(self.bits()).map(|bits| bits.div_ceil(8))
    }

    /// Bytes of elements in an attribute, where one below 8 bits takes a byte; `None` if they exceed 64 bits.
    pub fn unpacked_bytes(self, elements: u64) -> Option<u64> {
        elements.checked_mul(self.bits().div_ceil(8))
    }

    /// Date of its form.
    pub fn date(self) -> u32 {
        self.row().4
    }

    /// Floating point of any width.
    pub fn is_float(self) -> bool {
        self.name().starts_with(['f', 'b'])
    }

    /// The element type of a MIL data type; `None` for strings.
    pub fn of(dtype: DataType) -> Option<ElementType> {
        Some(match dtype {
            DataType::Bool => ElementType::I1,
            DataType::String => return None,
            DataType::Fp16 => ElementType::F16,
            DataType::Fp32 => ElementType::F32,
            DataType::Fp64 => ElementType::F64,
            DataType::Bf16 => ElementType::Bf16,
            DataType::Int4 => ElementType::Si4,
            DataType::Int8 => ElementType::Si8,
            DataType::Int16 => ElementType::Si16,
            DataType::Int32 => ElementType::Si32,
            DataType::Int64 => ElementType::Si64,
            DataType::Uint1 => ElementType::Ui1,
            DataType::Uint2 => ElementType::Ui2,
            DataType::Uint3 => ElementType::Ui3,
            DataType::Uint4 => ElementType::Ui4,
            DataType::Uint6 => ElementType::Ui6,
            DataType::Uint8 => ElementType::Ui8,
            DataType::Uint16 => ElementType::Ui16,
            DataType::Uint32 => ElementType::Ui32,
            DataType::Uint64 => ElementType::Ui64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_stand_at_their_types_place() {
        for (place, row) in ROWS.iter().enumerate() {
            assert_eq!(row.0 as usize, place);
            assert_eq!(ElementType::from_code(row.1), Some(row.0));
        }
        for dtype in DataType::ALL.into_iter().filter(|dtype| *dtype != DataType::String) {
            assert_eq!(ElementType::of(dtype).map(ElementType::bits), Some(dtype.bits()), "{dtype}");
        }
    }
}
