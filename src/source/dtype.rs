//! Element types of source tensors.

use std::fmt;

use safetensors::Dtype;
use serde::{Deserialize, Serialize};

/// Element type of a source tensor.
///
/// Every type is stored in blocks of a fixed number of elements and bytes; plain numbers are blocks of one. The block
/// types are those of ggml, with ggml's names and numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[allow(non_camel_case_types, missing_docs, reason = "the names are the formats' own")]
pub enum SourceDtype {
    F64,
    F32,
    F16,
    BF16,
    /// 4 exponent and 3 mantissa bits, no infinities (the "FN" flavour).
    F8_E4M3,
    /// 5 exponent and 2 mantissa bits.
    F8_E5M2,
    /// Power of two.
    F8_E8M0,
    /// 2 exponent bits and 1 mantissa bit, two to a byte, the first in its low half.
    F4_E2M1,
    #[serde(rename = "BOOL")]
    Bool,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    /// Two per byte, the first in the low half.
    U4,
    /// Two per byte in two's complement, the first in the low half.
    I4,
    /// Four per byte, the first in the lowest bits.
    U2,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_K,
    IQ1_S,
    IQ1_M,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    IQ4_NL,
    IQ4_XS,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
    Q1_0,
    /// AngelSlim's 2-bit type (`Q2_0C` in its fork of llama.cpp), which has the number of [`SourceDtype::Q1_0`] in some
    /// files and that of [`SourceDtype::NVFP4`] in others.
    SEQ_2BIT,
}

/// Size of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockLayout {
    /// Number of elements.
    pub elements: u64,
    /// Size in bytes.
    pub bytes: u64,
}

use SourceDtype::*;

/// Type, name, number in GGUF, elements and bytes of a block.
const TABLE: [(SourceDtype, &str, Option<u32>, u64, u64); 46] = [
    (F64, "F64", Some(28), 1, 8),
    (F32, "F32", Some(0), 1, 4),
    (F16, "F16", Some(1), 1, 2),
    (BF16, "BF16", Some(30), 1, 2),
    (F8_E4M3, "F8_E4M3", None, 1, 1),
    (F8_E5M2, "F8_E5M2", None, 1, 1),
    (F8_E8M0, "F8_E8M0", None, 1, 1),
    (F4_E2M1, "F4_E2M1", None, 2, 1),
    (Bool, "BOOL", None, 1, 1),
    (I8, "I8", Some(24), 1, 1),
    (I16, "I16", Some(25), 1, 2),
    (I32, "I32", Some(26), 1, 4),
    (I64, "I64", Some(27), 1, 8),
    (U8, "U8", None, 1, 1),
    (U16, "U16", None, 1, 2),
    (U32, "U32", None, 1, 4),
    (U64, "U64", None, 1, 8),
    (U4, "U4", None, 2, 1),
    (I4, "I4", None, 2, 1),
    (U2, "U2", None, 4, 1),
    (Q4_0, "Q4_0", Some(2), 32, 18),
    (Q4_1, "Q4_1", Some(3), 32, 20),
    (Q5_0, "Q5_0", Some(6), 32, 22),
    (Q5_1, "Q5_1", Some(7), 32, 24),
    (Q8_0, "Q8_0", Some(8), 32, 34),
    (Q2_K, "Q2_K", Some(10), 256, 84),
    (Q3_K, "Q3_K", Some(11), 256, 110),
    (Q4_K, "Q4_K", Some(12), 256, 144),
    (Q5_K, "Q5_K", Some(13), 256, 176),
    (Q6_K, "Q6_K", Some(14), 256, 210),
    (Q8_K, "Q8_K", Some(15), 256, 292),
    (IQ1_S, "IQ1_S", Some(19), 256, 50),
    (IQ1_M, "IQ1_M", Some(29), 256, 56),
    (IQ2_XXS, "IQ2_XXS", Some(16), 256, 66),
    (IQ2_XS, "IQ2_XS", Some(17), 256, 74),
    (IQ2_S, "IQ2_S", Some(22), 256, 82),
    (IQ3_XXS, "IQ3_XXS", Some(18), 256, 98),
    (IQ3_S, "IQ3_S", Some(21), 256, 110),
    (IQ4_NL, "IQ4_NL", Some(20), 32, 18),
    (IQ4_XS, "IQ4_XS", Some(23), 256, 136),
    (TQ1_0, "TQ1_0", Some(34), 256, 54),
    (TQ2_0, "TQ2_0", Some(35), 256, 66),
    (MXFP4, "MXFP4", Some(39), 32, 17),
    (NVFP4, "NVFP4", Some(40), 64, 36),
    (Q1_0, "Q1_0", Some(41), 128, 18),
    (SEQ_2BIT, "SEQ_2BIT", Some(41), 512, 130),
];

impl SourceDtype {
    /// Returns every type.
    pub fn all() -> impl Iterator<Item = SourceDtype> {
        TABLE.iter().map(|row| row.0)
    }

    fn row(self) -> &'static (SourceDtype, &'static str, Option<u32>, u64, u64) {
        // the table has the order of the variants, which a test checks
        &TABLE[self as usize]
    }

    /// Name as the file formats spell it.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Number of the type in GGUF, if it has one.
    pub fn ggml_number(self) -> Option<u32> {
        self.row().2
    }

    /// Returns the type with this number in GGUF. 41 gives [`SourceDtype::Q1_0`]; see [`SourceDtype::SEQ_2BIT`].
    pub fn from_ggml(number: u32) -> Option<SourceDtype> {
        TABLE.iter().find(|row| row.2 == Some(number)).map(|row| row.0)
    }

    /// Returns the type for one of safetensors, unless it is one that no model file uses.
    pub fn from_safetensors(dtype: Dtype) -> Option<SourceDtype> {
        Some(match dtype {
            Dtype::F64 => F64,
            Dtype::F32 => F32,
            Dtype::F16 => F16,
            Dtype::BF16 => BF16,
            Dtype::F8_E4M3 => F8_E4M3,
            Dtype::F8_E5M2 => F8_E5M2,
            Dtype::F8_E8M0 => F8_E8M0,
            Dtype::BOOL => Bool,
            Dtype::I8 => I8,
            Dtype::I16 => I16,
            Dtype::I32 => I32,
            Dtype::I64 => I64,
            Dtype::U8 => U8,
            Dtype::U16 => U16,
            Dtype::U32 => U32,
            Dtype::U64 => U64,
            _ => return None,
        })
    }

    /// Returns the type with this number in onnx.proto3, unless it is one that no weight is stored in.
    pub fn from_onnx(number: i64) -> Option<SourceDtype> {
        Some(match number {
            1 => F32,
            2 => U8,
            3 => I8,
            4 => U16,
            5 => I16,
            6 => I32,
            7 => I64,
            9 => Bool,
            10 => F16,
            11 => F64,
            12 => U32,
            13 => U64,
            16 => BF16,
            17 => F8_E4M3,
            19 => F8_E5M2,
            21 => U4,
            22 => I4,
            24 => F8_E8M0,
            25 => U2,
            _ => return None,
        })
    }

    /// Whether elements are floating-point numbers.
    pub fn is_float(self) -> bool {
        matches!(self, F64 | F32 | F16 | BF16 | F8_E4M3 | F8_E5M2 | F8_E8M0 | F4_E2M1)
    }

    /// Returns the size of a block.
    pub fn block(self) -> BlockLayout {
        let (_, _, _, elements, bytes) = *self.row();
        BlockLayout { elements, bytes }
    }

    /// Returns the size of `elements` elements in bytes; `None` if they aren't whole blocks or the size overflows.
    pub fn bytes(self, elements: u64) -> Option<u64> {
        let block = self.block();
        if !elements.is_multiple_of(block.elements) {
            return None;
        }
        (elements / block.elements).checked_mul(block.bytes)
    }
}

impl fmt::Display for SourceDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_stands_in_the_order_of_the_variants() {
        for (index, row) in TABLE.iter().enumerate() {
            assert_eq!(row.0 as usize, index, "{}", row.1);
            assert_eq!(serde_json::to_value(row.0).unwrap(), row.1);
        }
    }

    #[test]
    fn a_number_of_ggml_leads_back_to_its_type() {
        for dtype in SourceDtype::all().filter(|&d| d != SEQ_2BIT) {
            if let Some(number) = dtype.ggml_number() {
                assert_eq!(SourceDtype::from_ggml(number), Some(dtype));
            }
        }
        // Q4_2 and Q4_3 were removed from ggml; Q8_1 only ever holds activations.
        assert!([4, 5, 9, 31, 36, 42, u32::MAX].iter().all(|&number| SourceDtype::from_ggml(number).is_none()));
    }

    #[test]
    fn sizes_are_whole_blocks() {
        assert_eq!(Q4_K.bytes(512), Some(288));
        assert_eq!(Q4_K.bytes(100), None);
        assert_eq!(F64.bytes(u64::MAX), None);
    }
}
