//! Conversion of constants to and from protobuf: in place, or in a weight file.
//!
//! The format stores elements in lists by data type: fp32, fp64, bool and string have their own; int16, uint16 and
//! int32 are `ints`; int64 and uint64 are `longInts`; everything else, sub-byte types included, is `bytes`, laid out as
//! in a weight file.

use coreml_proto::mil_spec::{self as proto, tensor_value, value, value_type};

use super::types;
use crate::constant::{Constant, Data};
use crate::types::{DataType, Opset, TensorType, ValueType};

/// Minimum number of elements of a constant in the weight file.
const BLOB_ELEMENTS: u64 = 10;

/// Returns whether a constant belongs in the weight file. Small constants and data types without a code in weight
/// files are written in place. Before CoreML8, so are integers of 16 and 32 bits of any count.
pub(super) fn belongs_in_blob(constant: &Constant, opset: Opset) -> bool {
    let possible = match constant.ty.dtype {
        DataType::Int16 | DataType::Uint16 | DataType::Int32 | DataType::Uint32 => opset >= Opset::CoreMl8,
        DataType::Bool | DataType::String | DataType::Fp64 | DataType::Int64 | DataType::Uint64 => false,
        _ => true,
    };
    let elements = constant.ty.elements().unwrap_or(0);
    let large = matches!(constant.data, Data::Content(_)) || elements >= BLOB_ELEMENTS;
    possible && large && elements > 0
}

/// A value in a weight file.
pub(super) fn blob(ty: &TensorType, file_name: String, offset: u64) -> proto::Value {
    proto::Value {
        doc_string: String::new(),
        r#type: Some(types::tensor_value_type(ty)),
        value: Some(value::Value::BlobFileValue(value::BlobFileValue { file_name, offset })),
    }
}

/// A string scalar in place.
pub(super) fn string(text: &str) -> proto::Value {
    let strings = tensor_value::RepeatedStrings { values: vec![text.to_owned()] };
    immediate(&TensorType::scalar(DataType::String), tensor_value::Value::Strings(strings))
}

/// The text of a string scalar in place.
pub(super) fn as_string(value: &proto::Value) -> Option<&str> {
    let Some(value::Value::ImmediateValue(value)) = &value.value else { return None };
    let Some(value::immediate_value::Value::Tensor(tensor)) = &value.value else { return None };
    match &tensor.value {
        Some(tensor_value::Value::Strings(strings)) if strings.values.len() == 1 => Some(&strings.values[0]),
        _ => None,
    }
}

fn immediate(ty: &TensorType, elements: tensor_value::Value) -> proto::Value {
    let tensor = proto::TensorValue { value: Some(elements) };
    let value = value::ImmediateValue { value: Some(value::immediate_value::Value::Tensor(tensor)) };
    proto::Value {
        doc_string: String::new(),
        r#type: Some(types::tensor_value_type(ty)),
        value: Some(value::Value::ImmediateValue(value)),
    }
}

/// Elements of a constant: bytes or strings.
pub(super) enum Elements<'a> {
    Bytes(&'a [u8]),
    Strings(&'a [String]),
}

/// A tensor in place.
pub(super) fn tensor(ty: &TensorType, elements: &Elements<'_>) -> proto::Value {
    immediate(ty, tensor_elements(ty.dtype, elements))
}

/// A list of scalars in place.
pub(super) fn list(dtype: DataType, elements: &Elements<'_>) -> proto::Value {
    let scalar = TensorType::scalar(dtype);
    let values: Vec<proto::Value> = match elements {
        Elements::Strings(strings) => strings.iter().map(|s| string(s)).collect(),
        Elements::Bytes(bytes) => {
            let width = dtype.packed_bytes(1).max(1) as usize;
            bytes.chunks_exact(width).map(|b| tensor(&scalar, &Elements::Bytes(b))).collect()
        }
    };
    let length =
        proto::dimension::Dimension::Constant(proto::dimension::ConstantDimension { size: values.len() as u64 });
    let ty = proto::ListType {
        r#type: Some(Box::new(types::tensor_value_type(&scalar))),
        length: Some(proto::Dimension { dimension: Some(length) }),
    };
    let value = value::immediate_value::Value::List(proto::ListValue { values });
    proto::Value {
        doc_string: String::new(),
        r#type: Some(proto::ValueType { r#type: Some(value_type::Type::ListType(Box::new(ty))) }),
        value: Some(value::Value::ImmediateValue(value::ImmediateValue { value: Some(value) })),
    }
}

fn tensor_elements(dtype: DataType, elements: &Elements<'_>) -> tensor_value::Value {
    use tensor_value::*;
    let bytes = match elements {
        Elements::Strings(strings) => return Value::Strings(RepeatedStrings { values: strings.to_vec() }),
        Elements::Bytes(bytes) => *bytes,
    };
    match dtype {
        DataType::Bool => Value::Bools(RepeatedBools { values: bytes.iter().map(|b| *b != 0).collect() }),
        DataType::Fp32 => Value::Floats(RepeatedFloats { values: each(bytes, f32::from_le_bytes) }),
        DataType::Fp64 => Value::Doubles(RepeatedDoubles { values: each(bytes, f64::from_le_bytes) }),
        DataType::Int16 => Value::Ints(RepeatedInts { values: each(bytes, |b| i32::from(i16::from_le_bytes(b))) }),
        DataType::Uint16 => Value::Ints(RepeatedInts { values: each(bytes, |b| i32::from(u16::from_le_bytes(b))) }),
        DataType::Int32 => Value::Ints(RepeatedInts { values: each(bytes, i32::from_le_bytes) }),
        // two's complement: the format has no unsigned list
        DataType::Int64 | DataType::Uint64 => {
            Value::LongInts(RepeatedLongInts { values: each(bytes, i64::from_le_bytes) })
        }
        _ => Value::Bytes(RepeatedBytes { values: bytes.to_vec() }),
    }
}

fn each<const WIDTH: usize, T>(bytes: &[u8], read: impl Fn([u8; WIDTH]) -> T) -> Vec<T> {
    bytes.as_chunks::<WIDTH>().0.iter().map(|b| read(*b)).collect()
}

/// A constant of the format.
pub(super) enum Decoded<'a> {
    /// Elements stored in the message.
    Constant(Constant),
    /// Elements stored in a weight file.
    Blob(TensorType, &'a value::BlobFileValue),
}

/// Decodes a constant. Lists of scalars become vectors.
pub(super) fn decode(value: &proto::Value) -> Result<Decoded<'_>, String> {
    if let Some(value::Value::ImmediateValue(immediate)) = &value.value
        && let Some(value::immediate_value::Value::List(list)) = &immediate.value
    {
        return decode_list(value.r#type.as_ref(), list).map(Decoded::Constant);
    }
    let ty = match types::decode(value.r#type.as_ref())? {
        ValueType::Tensor(ty) => ty,
        other => return Err(format!("a constant of type {other} is not supported")),
    };
    let elements = ty.elements().ok_or_else(|| format!("a constant of type {ty} has no fixed size"))?;
    match &value.value {
        Some(value::Value::BlobFileValue(blob)) => Ok(Decoded::Blob(ty, blob)),
        Some(value::Value::ImmediateValue(immediate)) => match &immediate.value {
            Some(value::immediate_value::Value::Tensor(tensor)) => {
                let data = decode_tensor(&ty, elements, tensor.value.as_ref())?;
                Ok(Decoded::Constant(Constant { ty, data }))
            }
            _ => Err(format!("the value of a constant of type {ty} is not a tensor")),
        },
        None => Err(format!("a constant of type {ty} has no value")),
    }
}

fn decode_tensor(ty: &TensorType, elements: u64, value: Option<&tensor_value::Value>) -> Result<Data, String> {
    use tensor_value::Value;
    let count = |found: usize| {
        if found as u64 == elements { Ok(()) } else { Err(format!("{found} elements for {ty}, expected {elements}")) }
    };
    let misfit = |list: &str| Err(format!("elements of {ty} are in the list `{list}`, which can't hold them"));
    let bytes = match value {
        None => {
            count(0)?;
            if ty.dtype == DataType::String {
                return Ok(Data::Strings(Default::default()));
            }
            Vec::new()
        }
        Some(Value::Strings(list)) => {
            if ty.dtype != DataType::String {
                return misfit("strings");
            }
            count(list.values.len())?;
            return Ok(Data::Strings(list.values.clone().into()));
        }
        Some(_) if ty.dtype == DataType::String => return misfit("of numbers"),
        Some(Value::Bytes(list)) => {
            let expected = ty.bytes().unwrap_or(u64::MAX);
            if list.values.len() as u64 != expected {
                return Err(format!("{} bytes for {ty}, expected {expected}", list.values.len()));
            }
            list.values.clone()
        }
        Some(Value::Bools(list)) => {
            count(list.values.len())?;
            if ty.dtype != DataType::Bool {
                return misfit("bools");
            }
            list.values.iter().map(|b| u8::from(*b)).collect()
        }
        Some(Value::Floats(list)) => {
            count(list.values.len())?;
            match ty.dtype {
                DataType::Fp32 => list.values.iter().flat_map(|v| v.to_le_bytes()).collect(),
                _ => return misfit("floats"),
            }
        }
        Some(Value::Doubles(list)) => {
            count(list.values.len())?;
            match ty.dtype {
                DataType::Fp64 => list.values.iter().flat_map(|v| v.to_le_bytes()).collect(),
                _ => return misfit("doubles"),
            }
        }
        Some(Value::Ints(list)) => {
            count(list.values.len())?;
            integers(ty, list.values.iter().map(|v| i64::from(*v)))?
        }
        Some(Value::LongInts(list)) => {
            count(list.values.len())?;
            integers(ty, list.values.iter().copied())?
        }
    };
    Ok(Data::Literal(bytes.into()))
}

/// Integers in the width of their type.
fn integers(ty: &TensorType, values: impl Iterator<Item = i64>) -> Result<Vec<u8>, String> {
    let (low, high) = match ty.dtype {
        DataType::Int8 => (i64::from(i8::MIN), i64::from(i8::MAX)),
        DataType::Uint8 => (0, i64::from(u8::MAX)),
        DataType::Int16 => (i64::from(i16::MIN), i64::from(i16::MAX)),
        DataType::Uint16 => (0, i64::from(u16::MAX)),
        DataType::Int32 => (i64::from(i32::MIN), i64::from(i32::MAX)),
        // writers without an unsigned list wrap
        DataType::Uint32 => (i64::from(i32::MIN), i64::from(u32::MAX)),
        DataType::Int64 | DataType::Uint64 => (i64::MIN, i64::MAX),
        _ => return Err(format!("elements of {ty} are in a list of integers, which can't hold them")),
    };
    let width = ty.dtype.packed_bytes(1) as usize;
    let mut bytes = Vec::new();
    for value in values {
        if value < low || value > high {
            return Err(format!("{value} is out of the range of {}", ty.dtype));
        }
        bytes.extend_from_slice(&value.to_le_bytes()[..width]);
    }
    Ok(bytes)
}

fn decode_list(ty: Option<&proto::ValueType>, list: &proto::ListValue) -> Result<Constant, String> {
    let declared = types::decode(ty)?;
    let scalar = types::list_member(ty)?
        .filter(|member| member.rank() == 0 && (member.dtype == DataType::String || member.dtype.bits() >= 8))
        .ok_or_else(|| format!("a constant of type {declared} is not supported"))?;
    let (mut bytes, mut strings) = (Vec::new(), Vec::new());
    for value in &list.values {
        match decode(value)? {
            Decoded::Constant(member) if member.ty == scalar => match member.data {
                Data::Literal(b) => bytes.extend_from_slice(&b),
                Data::Strings(s) => strings.extend_from_slice(&s),
                Data::Content(_) => {}
            },
            _ => return Err(format!("a list of type {declared} holds something else")),
        }
    }
    let data = match scalar.dtype {
        DataType::String => Data::Strings(strings.into()),
        _ => Data::Literal(bytes.into()),
    };
    Ok(Constant { ty: TensorType::new(scalar.dtype, [list.values.len() as u64]), data })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(constant: &Constant) -> Constant {
        let elements = match &constant.data {
            Data::Literal(bytes) => Elements::Bytes(bytes),
            Data::Strings(strings) => Elements::Strings(strings),
            Data::Content(_) => panic!("tests hold literals"),
        };
        match decode(&tensor(&constant.ty, &elements)) {
            Ok(Decoded::Constant(constant)) => constant,
            Ok(Decoded::Blob(..)) => panic!("a literal became a blob"),
            Err(problem) => panic!("{problem}"),
        }
    }

    fn list_name(constant: &Constant) -> &'static str {
        let Data::Literal(bytes) = &constant.data else { return "strings" };
        match tensor_elements(constant.ty.dtype, &Elements::Bytes(bytes)) {
            tensor_value::Value::Floats(_) => "floats",
            tensor_value::Value::Ints(_) => "ints",
            tensor_value::Value::Bools(_) => "bools",
            tensor_value::Value::Strings(_) => "strings",
            tensor_value::Value::LongInts(_) => "longInts",
            tensor_value::Value::Doubles(_) => "doubles",
            tensor_value::Value::Bytes(_) => "bytes",
        }
    }

    #[test]
    fn each_type_has_its_list_and_survives() {
        use DataType::*;
        let lists = [
            (Bool, "bools"),
            (Fp16, "bytes"),
            (Bf16, "bytes"),
            (Fp32, "floats"),
            (Fp64, "doubles"),
            (Int4, "bytes"),
            (Int8, "bytes"),
            (Int16, "ints"),
            (Int32, "ints"),
            (Int64, "longInts"),
            (Uint1, "bytes"),
            (Uint3, "bytes"),
            (Uint6, "bytes"),
            (Uint8, "bytes"),
            (Uint16, "ints"),
            (Uint32, "bytes"),
            (Uint64, "longInts"),
        ];
        for (dtype, list) in lists {
            for shape in [vec![], vec![3u64], vec![2, 0]] {
                let ty = TensorType::new(dtype, shape);
                // high bits set, so that signs matter; a bool is 0 or 1
                let length = ty.bytes().unwrap() as usize;
                let bytes: Vec<u8> = (0..length)
                    .map(|i| if dtype == Bool { i as u8 % 2 } else { 0xf1u8.wrapping_sub(i as u8) })
                    .collect();
                let constant = Constant::literal(ty, bytes);
                assert_eq!(round_trip(&constant), constant);
                assert_eq!(list_name(&constant), list, "{dtype}");
            }
        }
        let text = Constant::string("caf\u{e9}");
        assert_eq!(round_trip(&text), text);
    }

    #[test]
    fn an_fp16_scalar_is_two_bytes_without_rank() {
        let value = tensor(&TensorType::scalar(DataType::Fp16), &Elements::Bytes(&[0, 0x3c]));
        let Some(value_type::Type::TensorType(ty)) = &value.r#type.as_ref().unwrap().r#type else { panic!() };
        assert_eq!((ty.rank, ty.dimensions.len()), (0, 0));
        assert!(matches!(decode(&value), Ok(Decoded::Constant(c)) if c.as_float() == Some(1.0)));
    }

    #[test]
    fn counts_and_ranges_are_checked() {
        let int8 = |values: Vec<i32>| {
            let list = tensor_value::RepeatedInts { values };
            immediate(&TensorType::new(DataType::Int8, [2u64]), tensor_value::Value::Ints(list))
        };
        assert!(matches!(decode(&int8(vec![-128, 127])), Ok(Decoded::Constant(_))));
        let problem = |value| decode(&value).err().unwrap();
        assert_eq!(problem(int8(vec![1])), "1 elements for tensor<int8, [2]>, expected 2");
        assert_eq!(problem(int8(vec![1, 128])), "128 is out of the range of int8");
        let huge = TensorType::new(DataType::Fp16, [u64::MAX, 2]);
        let problem = problem(tensor(&huge, &Elements::Bytes(&[])));
        assert!(problem.contains("expected at most"), "{problem}");
        let most = TensorType::new(DataType::Fp64, [u64::MAX]);
        assert!(decode(&tensor(&most, &Elements::Bytes(&[]))).is_err());
        let bools = tensor_value::RepeatedBools { values: vec![true] };
        let wrong = immediate(&TensorType::scalar(DataType::Fp32), tensor_value::Value::Bools(bools));
        assert!(decode(&wrong).is_err());
    }

    #[test]
    fn lists_of_scalars_are_vectors() {
        let labels: Vec<String> = vec!["cat".into(), "dog".into()];
        let Ok(Decoded::Constant(constant)) = decode(&list(DataType::String, &Elements::Strings(&labels))) else {
            panic!()
        };
        assert_eq!(constant.ty, TensorType::new(DataType::String, [2u64]));
        let numbers: Vec<u8> = [7i64, -1].iter().flat_map(|v| v.to_le_bytes()).collect();
        let Ok(Decoded::Constant(constant)) = decode(&list(DataType::Int64, &Elements::Bytes(&numbers))) else {
            panic!()
        };
        assert_eq!(constant.as_integers(), Some(vec![7, -1]));
    }

    #[test]
    fn blobs_begin_at_ten_elements() {
        let of = |dtype, n: u64| {
            let ty = TensorType::new(dtype, [n]);
            let length = ty.bytes().unwrap() as usize;
            Constant::literal(ty, vec![0u8; length])
        };
        for dtype in [DataType::Fp16, DataType::Fp32, DataType::Int8, DataType::Uint8, DataType::Uint4] {
            assert!(!belongs_in_blob(&of(dtype, 9), Opset::CoreMl5));
            assert!(belongs_in_blob(&of(dtype, 10), Opset::CoreMl5));
        }
        for dtype in [DataType::Int16, DataType::Uint16, DataType::Int32, DataType::Uint32] {
            assert!(!belongs_in_blob(&of(dtype, 10), Opset::CoreMl7));
            assert!(belongs_in_blob(&of(dtype, 10), Opset::CoreMl8));
        }
        for dtype in [DataType::Bool, DataType::Int64, DataType::Fp64] {
            assert!(!belongs_in_blob(&of(dtype, 100), Opset::CoreMl9));
        }
    }
}
