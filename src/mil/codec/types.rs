//! Conversion of data types and value types to and from protobuf.
//!
//! Lists, dictionaries, tuples and tensors of types that the IR can't compute with are carried as text
//! ([`ValueType::Opaque`]). The text contains the whole type, so that it can be written again:
//! `list<string, 3>`, `dict<int64, fp32>`, `tuple<fp16, tensor<fp8e4m3fn, [2, ?]>>`, `tensor<fp16, [...]>`.

use anec_base::listing::list;
use coreml_proto::mil_spec::{self as proto, dimension, value_type};

use crate::types::{DataType, Dim, TensorType, ValueType};

/// Maximum nesting depth of types.
const MAX_DEPTH: usize = 32;

/// Data types of the format: its enum, the name in text, and the IR's type where it has one.
const DATA_TYPES: [(proto::DataType, &str, Option<DataType>); 22] = [
    (proto::DataType::Bool, "bool", Some(DataType::Bool)),
    (proto::DataType::String, "string", Some(DataType::String)),
    (proto::DataType::Float16, "fp16", Some(DataType::Fp16)),
    (proto::DataType::Float32, "fp32", Some(DataType::Fp32)),
    (proto::DataType::Float64, "fp64", Some(DataType::Fp64)),
    (proto::DataType::Bfloat16, "bf16", Some(DataType::Bf16)),
    (proto::DataType::Int4, "int4", Some(DataType::Int4)),
    (proto::DataType::Int8, "int8", Some(DataType::Int8)),
    (proto::DataType::Int16, "int16", Some(DataType::Int16)),
    (proto::DataType::Int32, "int32", Some(DataType::Int32)),
    (proto::DataType::Int64, "int64", Some(DataType::Int64)),
    (proto::DataType::Uint1, "uint1", Some(DataType::Uint1)),
    (proto::DataType::Uint2, "uint2", Some(DataType::Uint2)),
    (proto::DataType::Uint3, "uint3", Some(DataType::Uint3)),
    (proto::DataType::Uint4, "uint4", Some(DataType::Uint4)),
    (proto::DataType::Uint6, "uint6", Some(DataType::Uint6)),
    (proto::DataType::Uint8, "uint8", Some(DataType::Uint8)),
    (proto::DataType::Uint16, "uint16", Some(DataType::Uint16)),
    (proto::DataType::Uint32, "uint32", Some(DataType::Uint32)),
    (proto::DataType::Uint64, "uint64", Some(DataType::Uint64)),
    (proto::DataType::Float8e4m3fn, "fp8e4m3fn", None),
    (proto::DataType::Float8e5m2, "fp8e5m2", None),
];

/// Number of a data type in the format.
pub(super) fn data_type_number(dtype: DataType) -> i32 {
    DATA_TYPES.iter().find(|(_, _, d)| *d == Some(dtype)).map_or(0, |(p, _, _)| *p as i32)
}

/// Text name and IR type of a data type's number in the format.
fn data_type_of(number: i32) -> Result<(&'static str, Option<DataType>), String> {
    DATA_TYPES
        .iter()
        .find(|(p, _, _)| *p as i32 == number)
        .map(|(_, name, dtype)| (*name, *dtype))
        .ok_or_else(|| format!("data type {number} is not known"))
}

/// A tensor type. Dimensions that are not fixed are written as unknown: the format has no symbols.
pub(super) fn encode_tensor(ty: &TensorType) -> proto::TensorType {
    proto::TensorType {
        data_type: data_type_number(ty.dtype),
        rank: ty.rank() as i64,
        dimensions: ty.shape.iter().map(encode_dim).collect(),
        attributes: Default::default(),
    }
}

fn encode_dim(dim: &Dim) -> proto::Dimension {
    let dimension = match dim.fixed() {
        Some(size) => dimension::Dimension::Constant(dimension::ConstantDimension { size }),
        None => dimension::Dimension::Unknown(dimension::UnknownDimension { variadic: false }),
    };
    proto::Dimension { dimension: Some(dimension) }
}

/// A tensor type as a value type.
pub(super) fn tensor_value_type(ty: &TensorType) -> proto::ValueType {
    proto::ValueType { r#type: Some(value_type::Type::TensorType(encode_tensor(ty))) }
}

/// Encodes a value type; opaque types are parsed from their text.
pub(super) fn encode(ty: &ValueType) -> Result<proto::ValueType, String> {
    match ty {
        ValueType::Tensor(tensor) => Ok(tensor_value_type(tensor)),
        ValueType::State(tensor) => Ok(state_of(tensor_value_type(tensor))),
        ValueType::Opaque(text) => parse(text),
    }
}

fn state_of(wrapped: proto::ValueType) -> proto::ValueType {
    let state = proto::StateType { wrapped_type: Some(Box::new(wrapped)) };
    proto::ValueType { r#type: Some(value_type::Type::StateType(Box::new(state))) }
}

/// Decodes a value type; unknown dimensions become [`Dim::Unknown`].
pub(super) fn decode(ty: Option<&proto::ValueType>) -> Result<ValueType, String> {
    use value_type::Type;
    let kind = ty.and_then(|t| t.r#type.as_ref()).ok_or("no type is declared")?;
    if let Some(tensor) = plain_tensor(kind)? {
        return Ok(ValueType::Tensor(tensor));
    }
    if let Type::StateType(state) = kind
        && let Some(wrapped) = state.wrapped_type.as_ref().and_then(|t| t.r#type.as_ref())
        && let Some(tensor) = plain_tensor(wrapped)?
    {
        return Ok(ValueType::State(tensor));
    }
    let mut text = String::new();
    print(ty, &mut text, 0)?;
    Ok(ValueType::Opaque(text))
}

/// Type of a list's members if they are tensors of the IR.
pub(super) fn list_member(ty: Option<&proto::ValueType>) -> Result<Option<TensorType>, String> {
    match ty.and_then(|t| t.r#type.as_ref()) {
        Some(value_type::Type::ListType(list)) => match decode(list.r#type.as_deref())? {
            ValueType::Tensor(member) => Ok(Some(member)),
            _ => Ok(None),
        },
        _ => Ok(None),
    }
}

/// Tensor type of the IR, if this type has one.
fn plain_tensor(kind: &value_type::Type) -> Result<Option<TensorType>, String> {
    let value_type::Type::TensorType(tensor) = kind else { return Ok(None) };
    let (_, dtype) = data_type_of(tensor.data_type)?;
    let Some(dtype) = dtype else { return Ok(None) };
    Ok(fixed_rank(tensor)?.map(|shape| TensorType { dtype, shape }))
}

/// Dimensions of a tensor; `None` if its rank isn't fixed.
fn fixed_rank(tensor: &proto::TensorType) -> Result<Option<Vec<Dim>>, String> {
    if !tensor.attributes.is_empty() {
        return Err(format!("a tensor type has attributes ({}), none are known", list(tensor.attributes.keys())));
    }
    let mut shape = Vec::with_capacity(tensor.dimensions.len());
    for dim in &tensor.dimensions {
        match dim.dimension {
            Some(dimension::Dimension::Constant(c)) if c.size > Dim::MAX => {
                return Err(format!("a dimension is {}, expected at most {}", c.size, Dim::MAX));
            }
            Some(dimension::Dimension::Constant(c)) => shape.push(Dim::Fixed(c.size)),
            Some(dimension::Dimension::Unknown(u)) if !u.variadic => shape.push(Dim::Unknown),
            Some(dimension::Dimension::Unknown(_)) => return Ok(None),
            None => return Err("a dimension is neither constant nor unknown".into()),
        }
    }
    if tensor.rank < 0 {
        return Ok(None);
    }
    if tensor.rank != shape.len() as i64 {
        return Err(format!("a tensor type of rank {} has {} dimensions", tensor.rank, shape.len()));
    }
    Ok(Some(shape))
}

/// Prints any type as text.
fn print(ty: Option<&proto::ValueType>, out: &mut String, depth: usize) -> Result<(), String> {
    use value_type::Type;
    if depth > MAX_DEPTH {
        return Err(format!("types nest deeper than {MAX_DEPTH}"));
    }
    match ty.and_then(|t| t.r#type.as_ref()).ok_or("no type is declared")? {
        Type::TensorType(tensor) => {
            let (name, _) = data_type_of(tensor.data_type)?;
            match fixed_rank(tensor)? {
                Some(shape) if shape.is_empty() => out.push_str(name),
                Some(shape) => {
                    let dims: Vec<String> = shape.iter().map(Dim::to_string).collect();
                    out.push_str(&format!("tensor<{name}, [{}]>", dims.join(", ")));
                }
                None => out.push_str(&format!("tensor<{name}, [...]>")),
            }
        }
        Type::StateType(state) => {
            out.push_str("state<");
            print(state.wrapped_type.as_deref(), out, depth + 1)?;
            out.push('>');
        }
        Type::ListType(list) => {
            out.push_str("list<");
            print(list.r#type.as_deref(), out, depth + 1)?;
            match list.length.and_then(|d| d.dimension) {
                Some(dimension::Dimension::Constant(c)) => out.push_str(&format!(", {}>", c.size)),
                _ => out.push_str(", ?>"),
            }
        }
        Type::DictionaryType(dictionary) => {
            out.push_str("dict<");
            print(dictionary.key_type.as_deref(), out, depth + 1)?;
            out.push_str(", ");
            print(dictionary.value_type.as_deref(), out, depth + 1)?;
            out.push('>');
        }
        Type::TupleType(tuple) => {
            out.push_str("tuple<");
            for (i, member) in tuple.types.iter().enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                print(Some(member), out, depth + 1)?;
            }
            out.push('>');
        }
    }
    Ok(())
}

/// Parses a type from its text.
fn parse(text: &str) -> Result<proto::ValueType, String> {
    let mut parser = Parser { rest: text };
    let ty = parser.ty(0);
    match ty {
        Some(ty) if parser.rest.is_empty() => Ok(ty),
        _ => Err(format!("`{text}` is not a type")),
    }
}

struct Parser<'a> {
    rest: &'a str,
}

impl<'a> Parser<'a> {
    fn eat(&mut self, token: &str) -> bool {
        match self.rest.trim_start().strip_prefix(token) {
            Some(rest) => {
                self.rest = rest.trim_start();
                true
            }
            None => false,
        }
    }

    fn need(&mut self, token: &str) -> Option<()> {
        self.eat(token).then_some(())
    }

    fn word(&mut self) -> &'a str {
        let end = self.rest.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        word
    }

    fn ty(&mut self, depth: usize) -> Option<proto::ValueType> {
        use value_type::Type;
        if depth > MAX_DEPTH {
            return None;
        }
        let kind = match self.word() {
            "tensor" => {
                self.need("<")?;
                let mut tensor = Self::scalar(self.word())?;
                self.need(",")?;
                self.need("[")?;
                if self.eat("...") {
                    tensor.rank = -1;
                } else {
                    while !self.rest.starts_with(']') {
                        if !tensor.dimensions.is_empty() {
                            self.need(",")?;
                        }
                        tensor.dimensions.push(self.dim()?);
                    }
                    tensor.rank = tensor.dimensions.len() as i64;
                }
                self.need("]")?;
                self.need(">")?;
                Type::TensorType(tensor)
            }
            "state" => {
                self.need("<")?;
                let wrapped = self.ty(depth + 1)?;
                self.need(">")?;
                return Some(state_of(wrapped));
            }
            "list" => {
                self.need("<")?;
                let member = self.ty(depth + 1)?;
                self.need(",")?;
                let length = self.dim()?;
                self.need(">")?;
                Type::ListType(Box::new(proto::ListType { r#type: Some(Box::new(member)), length: Some(length) }))
            }
            "dict" => {
                self.need("<")?;
                let key = self.ty(depth + 1)?;
                self.need(",")?;
                let value = self.ty(depth + 1)?;
                self.need(">")?;
                let types = proto::DictionaryType { key_type: Some(Box::new(key)), value_type: Some(Box::new(value)) };
                Type::DictionaryType(Box::new(types))
            }
            "tuple" => {
                self.need("<")?;
                let mut types = Vec::new();
                while !self.eat(">") {
                    if !types.is_empty() {
                        self.need(",")?;
                    }
                    types.push(self.ty(depth + 1)?);
                }
                Type::TupleType(proto::TupleType { types })
            }
            name => Type::TensorType(Self::scalar(name)?),
        };
        Some(proto::ValueType { r#type: Some(kind) })
    }

    fn scalar(name: &str) -> Option<proto::TensorType> {
        let (number, _, _) = DATA_TYPES.iter().find(|(_, n, _)| *n == name)?;
        Some(proto::TensorType { data_type: *number as i32, ..Default::default() })
    }

    fn dim(&mut self) -> Option<proto::Dimension> {
        if self.eat("?") {
            return Some(encode_dim(&Dim::Unknown));
        }
        Some(encode_dim(&Dim::Fixed(self.word().parse().ok()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Symbol;

    fn round_trip(ty: &ValueType) -> ValueType {
        decode(Some(&encode(ty).unwrap())).unwrap()
    }

    #[test]
    fn every_data_type_keeps_its_name_and_number() {
        for (number, name, dtype) in DATA_TYPES {
            let Some(dtype) = dtype else { continue };
            assert_eq!(dtype.name(), name);
            assert_eq!(data_type_number(dtype), number as i32);
            let scalar = ValueType::Tensor(TensorType::scalar(dtype));
            assert_eq!(round_trip(&scalar), scalar);
        }
    }

    #[test]
    fn a_scalar_is_written_without_rank() {
        assert_eq!(encode_tensor(&TensorType::scalar(DataType::Fp16)).rank, 0);
    }

    #[test]
    fn symbols_become_unknown() {
        let t = Symbol::new("T");
        let ty = ValueType::State(TensorType::new(DataType::Fp16, [Dim::Fixed(1), Dim::symbol(&t)]));
        let expected = ValueType::State(TensorType::new(DataType::Fp16, [Dim::Fixed(1), Dim::Unknown]));
        assert_eq!(round_trip(&ty), expected);
    }

    #[test]
    fn opaque_types_survive_as_text() {
        for text in [
            "list<string, 3>",
            "list<tensor<fp16, [2, ?]>, ?>",
            "dict<int64, fp32>",
            "tuple<>",
            "tuple<fp16, dict<string, tuple<bool>>>",
            "tensor<fp16, [...]>",
            "tensor<fp8e4m3fn, [4]>",
            "fp8e5m2",
            "state<list<fp16, 1>>",
        ] {
            let ty = ValueType::Opaque(text.into());
            assert_eq!(round_trip(&ty), ty);
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "lst<fp16, 1>", "list<fp16>", "list<fp16, 1", "dict<fp16, >", "fp16 fp16", "tensor<fp16, [a]>"]
        {
            assert!(encode(&ValueType::Opaque(text.into())).is_err(), "{text}");
        }
        let deep = format!("{}fp16{}", "tuple<".repeat(1000), ">".repeat(1000));
        assert!(encode(&ValueType::Opaque(deep)).is_err());
        assert_eq!(decode(None).unwrap_err(), "no type is declared");
        let mut tensor = encode_tensor(&TensorType::new(DataType::Fp16, [2u64]));
        tensor.rank = 3;
        let ty = proto::ValueType { r#type: Some(value_type::Type::TensorType(tensor)) };
        assert_eq!(decode(Some(&ty)).unwrap_err(), "a tensor type of rank 3 has 1 dimensions");
    }
}
