//! A model's description: the features of each function, derived from its signature and read back.
//!
//! The format describes each dimension on its own: a range, or a list of whole shapes. It doesn't say which dimensions
//! are the same symbol. Packages written here record that in the metadata (key `anec.symbols.{function}`, value
//! `hidden[2]=T; mask[3]=2*T+1`). In other packages, dimensions count as the same symbol if their ranges and defaults
//! are equal, or if one enumerated size follows from the other by `factor * size + offset`; otherwise each input would
//! have a length of its own, and most graphs would not type-check.

use std::collections::BTreeMap;

use coreml_proto::array_feature_type::{ArrayDataType, EnumeratedShapes, Shape, ShapeFlexibility, ShapeRange};
use coreml_proto::feature_type::Type;
use coreml_proto::{ArrayFeatureType, FeatureDescription, FeatureType, FunctionDescription, SizeRange};

use super::PackageError;
use anec_mil::codec::{self, Dimensions};
use anec_mil::{DataType, Dim, Function, Opset, Symbol, SymbolRange, TensorType, Value, ValueType};

/// Prefix of metadata keys that map dimensions to symbols.
pub(super) const SYMBOLS_KEY: &str = "anec.symbols.";

/// Maximum number of shapes that an input may enumerate.
const MAX_SHAPES: usize = 128;

/// Element types that features may have.
const DATA_TYPES: [(DataType, ArrayDataType); 5] = [
    (DataType::Fp16, ArrayDataType::Float16),
    (DataType::Fp32, ArrayDataType::Float32),
    (DataType::Fp64, ArrayDataType::Double),
    (DataType::Int8, ArrayDataType::Int8),
    (DataType::Int32, ArrayDataType::Int32),
];

/// Returns the element type of a feature.
pub(super) fn data_type(array: &ArrayFeatureType) -> Option<DataType> {
    DATA_TYPES.iter().find(|(_, a)| *a as i32 == array.data_type).map(|(d, _)| *d)
}

/// Returns the description of a function.
///
/// # Errors
/// Returns an error for anything that Core ML can't take as a feature: other data types, states of unknown shape,
/// symbols without ranges.
pub(super) fn describe(function: &Function) -> Result<FunctionDescription, PackageError> {
    let mut out = FunctionDescription { name: function.name.clone(), ..Default::default() };
    for value in function.inputs.iter().map(|id| function.value(*id)) {
        let error = |problem: String| PackageError::Interface {
            function: function.name.clone(),
            feature: value.name.clone(),
            problem,
        };
        match &value.ty {
            ValueType::Tensor(ty) => {
                let array = input_array(function, ty).map_err(error)?;
                out.input.push(feature(value, Type::MultiArrayType(array)));
            }
            ValueType::State(ty) => {
                let array = state_array(function, ty).map_err(error)?;
                let kind = coreml_proto::state_feature_type::Type::ArrayType(array);
                out.state.push(feature(value, Type::StateType(coreml_proto::StateFeatureType { r#type: Some(kind) })));
            }
            ValueType::Opaque(text) => return Err(error(format!("an input can't be a {text}"))),
        }
    }
    for value in function.outputs() {
        let error = |problem: String| PackageError::Interface {
            function: function.name.clone(),
            feature: value.name.clone(),
            problem,
        };
        let ValueType::Tensor(ty) = &value.ty else {
            return Err(error(format!("an output can't be a {}", value.ty)));
        };
        let data_type = array_data_type(function.opset, ty.dtype).map_err(error)?;
        // an output of flexible shape has no shape in the description
        let shape = ty.fixed_shape().map_or(Ok(Vec::new()), |s| sizes(&s)).map_err(error)?;
        let array = ArrayFeatureType { shape, data_type, ..Default::default() };
        out.output.push(feature(value, Type::MultiArrayType(array)));
    }
    Ok(out)
}

fn feature(value: &Value, kind: Type) -> FeatureDescription {
    let ty = FeatureType { is_optional: false, r#type: Some(kind) };
    FeatureDescription { name: value.name.clone(), short_description: String::new(), r#type: Some(ty) }
}

fn array_data_type(opset: Opset, dtype: DataType) -> Result<i32, String> {
    let since = match dtype {
        DataType::Fp32 | DataType::Int32 => Opset::CoreMl5,
        DataType::Fp16 => Opset::CoreMl6,
        DataType::Int8 => Opset::CoreMl9,
        _ => return Err(format!("a feature can't be {dtype}; expected fp16, fp32 or int32")),
    };
    if opset < since {
        return Err(format!(
            "a feature can be {dtype} from {} on, the function is for {}",
            since.target(),
            opset.target()
        ));
    }
    Ok(DATA_TYPES.iter().find(|(d, _)| *d == dtype).map_or(0, |(_, a)| *a as i32))
}

fn sizes(shape: &[u64]) -> Result<Vec<i64>, String> {
    shape.iter().map(|n| i64::try_from(*n).map_err(|_| format!("the size {n} is out of range"))).collect()
}

fn state_array(function: &Function, ty: &TensorType) -> Result<ArrayFeatureType, String> {
    if function.opset < Opset::CoreMl8 {
        return Err(format!("states exist from iOS18 on, the function is for {}", function.opset.target()));
    }
    if ty.dtype != DataType::Fp16 {
        return Err(format!("a state must be fp16, found {}", ty.dtype));
    }
    let shape = ty.fixed_shape().ok_or_else(|| format!("a state must have a fixed shape, found {ty}"))?;
    Ok(ArrayFeatureType { shape: sizes(&shape)?, data_type: ArrayDataType::Float16 as i32, ..Default::default() })
}

fn input_array(function: &Function, ty: &TensorType) -> Result<ArrayFeatureType, String> {
    let data_type = array_data_type(function.opset, ty.dtype)?;
    if ty.rank() == 0 {
        // the format describes a scalar as a vector of one element
        return Ok(ArrayFeatureType { shape: vec![1], data_type, ..Default::default() });
    }
    if let Some(shape) = ty.fixed_shape() {
        return Ok(ArrayFeatureType { shape: sizes(&shape)?, data_type, ..Default::default() });
    }
    let mut symbols: Vec<(&Symbol, &SymbolRange)> = Vec::new();
    for dim in &ty.shape {
        match dim {
            Dim::Fixed(_) => {}
            Dim::Unknown => return Err(format!("{ty} has a dimension that nothing is known of")),
            Dim::Symbolic { symbol, .. } => {
                let lengths = function.lengths.get(symbol);
                let lengths = lengths.ok_or_else(|| format!("nothing says what {} may be", symbol.name()))?;
                if !symbols.iter().any(|(known, _)| *known == symbol) {
                    symbols.push((symbol, lengths));
                }
            }
        }
    }
    let enumerated = symbols.iter().filter(|(_, l)| matches!(l, SymbolRange::Enumerated(_))).count();
    let flexibility = match enumerated {
        0 => ShapeFlexibility::ShapeRange(ranges(ty, &symbols)?),
        n if n == symbols.len() => ShapeFlexibility::EnumeratedShapes(enumeration(ty, &symbols)?),
        _ => return Err(format!("{ty} has both a range and a list of sizes; expected one or the other")),
    };
    let defaults: Vec<(&Symbol, u64)> = symbols.iter().map(|(s, l)| (*s, l.default_size())).collect();
    let shape = at(ty, &defaults)?;
    Ok(ArrayFeatureType {
        shape: sizes(&shape)?,
        data_type,
        shape_flexibility: Some(flexibility),
        ..Default::default()
    })
}

/// Returns the shape for given sizes of the symbols.
fn at(ty: &TensorType, values: &[(&Symbol, u64)]) -> Result<Vec<u64>, String> {
    let fixed = values.iter().fold(ty.clone(), |ty, (symbol, size)| ty.substitute(symbol, *size));
    fixed.fixed_shape().filter(|s| s.iter().all(|n| *n > 0)).ok_or_else(|| {
        let sizes: Vec<String> = values.iter().map(|(s, n)| format!("{} = {n}", s.name())).collect();
        format!("{ty} is no shape for {}", sizes.join(", "))
    })
}

fn ranges(ty: &TensorType, symbols: &[(&Symbol, &SymbolRange)]) -> Result<ShapeRange, String> {
    let bounds = |upper: bool| -> Vec<(&Symbol, u64)> {
        let bound = |lengths: &SymbolRange| match lengths {
            SymbolRange::Range { lower, upper: limit, .. } => {
                if upper {
                    limit.unwrap_or(*lower)
                } else {
                    *lower
                }
            }
            SymbolRange::Enumerated(_) => lengths.default_size(),
        };
        symbols.iter().map(|(s, l)| (*s, bound(l))).collect()
    };
    for (symbol, lengths) in symbols {
        if let SymbolRange::Range { lower, upper, default } = lengths
            && (*lower == 0 || upper.is_some_and(|u| u < *lower) || !lengths.contains(*default))
        {
            let upper = upper.map_or("any".to_owned(), |u| u.to_string());
            return Err(format!("{} ranges from {lower} to {upper} with default {default}", symbol.name()));
        }
    }
    let (lower, upper) = (at(ty, &bounds(false))?, sizes(&at(ty, &bounds(true))?)?);
    let unbounded = |dim: &Dim| match dim {
        Dim::Symbolic { symbol, .. } => {
            symbols.iter().any(|(s, l)| *s == symbol && matches!(l, SymbolRange::Range { upper: None, .. }))
        }
        _ => false,
    };
    let range = |((dim, lower), upper): ((&Dim, u64), i64)| SizeRange {
        lower_bound: lower,
        upper_bound: if unbounded(dim) { -1 } else { upper },
    };
    Ok(ShapeRange { size_ranges: ty.shape.iter().zip(lower).zip(upper).map(range).collect() })
}

fn enumeration(ty: &TensorType, symbols: &[(&Symbol, &SymbolRange)]) -> Result<EnumeratedShapes, String> {
    let mut choices: Vec<Vec<(&Symbol, u64)>> = vec![Vec::new()];
    for (symbol, lengths) in symbols {
        let SymbolRange::Enumerated(values) = lengths else { continue };
        if values.is_empty() {
            return Err(format!("{} has no sizes", symbol.name()));
        }
        let extended = |choice: &Vec<(_, u64)>| -> Vec<Vec<(_, u64)>> {
            values.iter().map(|size| choice.iter().copied().chain([(*symbol, *size)]).collect()).collect()
        };
        if choices.len().saturating_mul(values.len()) > MAX_SHAPES {
            return Err(format!("{ty} takes more than {MAX_SHAPES} shapes"));
        }
        choices = choices.iter().flat_map(extended).collect();
    }
    let shape = |choice: &Vec<_>| Ok(Shape { shape: sizes(&at(ty, choice)?)? });
    Ok(EnumeratedShapes { shapes: choices.iter().map(shape).collect::<Result<_, String>>()? })
}

/// Returns the mapping of dimensions to symbols as metadata text; `None` if there are no symbols.
pub(super) fn symbols_text(function: &Function) -> Option<String> {
    let mut parts = Vec::new();
    for value in function.tensor_inputs() {
        for (axis, dim) in value.ty.tensor().into_iter().flat_map(|t| t.shape.iter().enumerate()) {
            if let Dim::Symbolic { .. } = dim {
                parts.push(format!("{}[{axis}]={dim}", value.name));
            }
        }
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// Parses metadata text into a mapping of dimensions; `None` if the text is invalid.
fn parse_symbols(text: &str) -> Option<BTreeMap<(String, usize), Dim>> {
    text.split(';')
        .map(|part| {
            let (place, dim) = part.trim().split_once('=')?;
            let (input, axis) = place.strip_suffix(']')?.rsplit_once('[')?;
            Some(((input.to_owned(), axis.parse().ok()?), parse_dim(dim)?))
        })
        .collect()
}

/// Parses `T`, `2*T`, `T+1` or `2*T-1`.
fn parse_dim(text: &str) -> Option<Dim> {
    let (factor, rest) = text.split_once('*').map_or(Some((1, text)), |(f, rest)| Some((f.parse().ok()?, rest)))?;
    let sign = rest.find(['+', '-']).unwrap_or(rest.len());
    let (name, offset) = rest.split_at(sign);
    let offset: i64 = if offset.is_empty() { 0 } else { offset.parse().ok()? };
    let named = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    (named && factor >= 1).then(|| Dim::Symbolic { factor, symbol: Symbol::new(name), offset })
}

/// Sizes that a flexible dimension of an input may have.
#[derive(Clone, Debug, PartialEq)]
enum Sizes {
    Range {
        lower: u64,
        upper: Option<u64>,
        default: u64,
    },
    /// Enumerated sizes, the default first.
    List(Vec<u64>),
}

impl Sizes {
    /// Returns the range of the dimension's symbol; `None` if a size isn't `factor * n + offset`.
    fn of_symbol(&self, factor: u64, offset: i64) -> Option<SymbolRange> {
        let invert = |size: u64| {
            let rest = i64::try_from(size).ok()?.checked_sub(offset)?;
            let rest = u64::try_from(rest).ok()?;
            (factor > 0 && rest % factor == 0).then(|| rest / factor)
        };
        Some(match self {
            Sizes::Range { lower, upper, default } => SymbolRange::Range {
                lower: invert(*lower)?,
                upper: upper.map(|u| invert(u).ok_or(())).transpose().ok()?,
                default: invert(*default)?,
            },
            Sizes::List(list) => {
                let mut values: Vec<u64> = Vec::new();
                for size in list {
                    let value = invert(*size)?;
                    if !values.contains(&value) {
                        values.push(value);
                    }
                }
                SymbolRange::Enumerated(values)
            }
        })
    }

    /// Returns the factor and offset by which these sizes follow from others.
    fn follows(&self, other: &Sizes) -> Option<(u64, i64)> {
        if self == other {
            return Some((1, 0));
        }
        let (Sizes::List(own), Sizes::List(other)) = (self, other) else { return None };
        let signed = |n: u64| i64::try_from(n).ok();
        let (first, base) = (signed(*own.first()?)?, signed(*other.first()?)?);
        let second = other.iter().position(|n| n != &other[0])?;
        let rise = signed(*own.get(second)?)?.checked_sub(first)?;
        let run = signed(other[second])?.checked_sub(base)?;
        let factor = rise.checked_div(run).filter(|f| *f >= 1)?;
        let offset = first.checked_sub(factor.checked_mul(base)?)?;
        let fits = own.len() == other.len()
            && own.iter().zip(other).all(|(a, b)| {
                signed(*b)
                    .and_then(|b| b.checked_mul(factor)?.checked_add(offset))
                    .is_some_and(|n| signed(*a) == Some(n))
            });
        fits.then_some((factor as u64, offset))
    }
}

/// Returns the sizes that the description allows for the dimensions of inputs. Enumerated shapes are split into
/// dimensions.
fn flexible(description: &[FeatureDescription]) -> Vec<((String, usize), Sizes)> {
    let mut out = Vec::new();
    for feature in description {
        let Some(Type::MultiArrayType(array)) = feature.r#type.as_ref().and_then(|t| t.r#type.as_ref()) else {
            continue;
        };
        let default = |axis: usize| array.shape.get(axis).and_then(|n| u64::try_from(*n).ok());
        match &array.shape_flexibility {
            None => {}
            Some(ShapeFlexibility::ShapeRange(ranges)) => {
                for (axis, range) in ranges.size_ranges.iter().enumerate() {
                    let lower = range.lower_bound;
                    let upper = u64::try_from(range.upper_bound).ok();
                    let default = default(axis).unwrap_or(lower.max(1));
                    out.push(((feature.name.clone(), axis), Sizes::Range { lower, upper, default }));
                }
            }
            Some(ShapeFlexibility::EnumeratedShapes(enumerated)) => {
                let mut shapes: Vec<&[i64]> = enumerated.shapes.iter().map(|s| s.shape.as_slice()).collect();
                if let Some(first) = shapes.iter().position(|s| *s == array.shape.as_slice()) {
                    shapes[..=first].rotate_right(1);
                }
                for axis in 0..array.shape.len() {
                    let column = shapes.iter().map(|s| s.get(axis).and_then(|n| u64::try_from(*n).ok()));
                    if let Some(list) = column.collect::<Option<Vec<u64>>>().filter(|l| !l.is_empty()) {
                        out.push(((feature.name.clone(), axis), Sizes::List(list)));
                    }
                }
            }
        }
    }
    out
}

/// Returns the flexible dimensions of a function, from its description and, if present, its symbol metadata.
///
/// Symbol metadata that contradicts itself or the description is ignored.
pub(super) fn dimensions(
    inputs: &[FeatureDescription],
    function: &coreml_proto::mil_spec::Function,
    symbols: Option<&str>,
) -> Dimensions {
    let described = flexible(inputs);
    let open = codec::unknown_dimensions(function);
    let flexible: Vec<_> =
        open.iter().filter_map(|place| described.iter().find(|(p, _)| p == place).cloned()).collect();
    symbols
        .and_then(parse_symbols)
        .and_then(|named| named_symbols(&flexible, named))
        .unwrap_or_else(|| guess(&flexible))
}

fn named_symbols(flexible: &[((String, usize), Sizes)], dims: BTreeMap<(String, usize), Dim>) -> Option<Dimensions> {
    let mut lengths: BTreeMap<Symbol, SymbolRange> = BTreeMap::new();
    for (place, dim) in &dims {
        let Dim::Symbolic { factor, symbol, offset } = dim else { return None };
        let (_, sizes) = flexible.iter().find(|(p, _)| p == place)?;
        let found = sizes.of_symbol(*factor, *offset)?;
        if *lengths.entry(symbol.clone()).or_insert_with(|| found.clone()) != found {
            return None;
        }
    }
    Some(Dimensions { dims, lengths })
}

fn guess(flexible: &[((String, usize), Sizes)]) -> Dimensions {
    let mut known = Dimensions::default();
    let mut symbols: Vec<(Symbol, &Sizes)> = Vec::new();
    for (place, sizes) in flexible {
        let found = symbols.iter().find_map(|(s, other)| Some((s.clone(), sizes.follows(other)?)));
        let dim = match found {
            Some((symbol, (factor, offset))) => Dim::Symbolic { factor, symbol, offset },
            None => {
                let symbol = Symbol::new(&name(symbols.len()));
                let Some(lengths) = sizes.of_symbol(1, 0) else { continue };
                known.lengths.insert(symbol.clone(), lengths);
                symbols.push((symbol.clone(), sizes));
                Dim::symbol(&symbol)
            }
        };
        known.dims.insert(place.clone(), dim);
    }
    known
}

/// Returns the name of a symbol: `T`, `T1`, `T2`, …
fn name(index: usize) -> String {
    if index == 0 { "T".into() } else { format!("T{index}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_mil::{Block, ValueId};

    /// Returns an identity function of the inputs.
    fn function(opset: Opset, inputs: Vec<(&str, ValueType)>, lengths: Vec<(&Symbol, SymbolRange)>) -> Function {
        let values: Vec<Value> =
            inputs.into_iter().map(|(name, ty)| Value { name: name.into(), ty, constant: None }).collect();
        let ids: Vec<ValueId> = (0..values.len() as u32).map(ValueId).collect();
        let outputs = ids.iter().copied().filter(|id| matches!(values[id.0 as usize].ty, ValueType::Tensor(_)));
        let block = Block { outputs: outputs.collect(), ..Default::default() };
        let lengths = lengths.into_iter().map(|(s, l)| (s.clone(), l)).collect();
        Function { name: "main".into(), opset, inputs: ids, values, block, lengths }
    }

    fn tensor(dims: impl IntoIterator<Item = Dim>) -> ValueType {
        TensorType::new(DataType::Fp16, dims).into()
    }

    fn message(function: &Function) -> coreml_proto::mil_spec::Function {
        struct Nowhere;
        impl codec::BlobSink for Nowhere {
            fn place(&mut self, _: &anec_mil::Constant, _: &str) -> anec_base::Result<codec::BlobPlace> {
                unreachable!("there are no constants")
            }
        }
        let program = anec_mil::Program::single(function.clone());
        let bytes = codec::encode(&program, &mut Nowhere).unwrap();
        <coreml_proto::mil_spec::Program as coreml_proto::Message>::decode(&bytes[..])
            .unwrap()
            .functions
            .remove("main")
            .unwrap()
    }

    /// Returns the symbols read back, with or without metadata.
    fn read_back(function: &Function, symbols: Option<&str>) -> Dimensions {
        dimensions(&describe(function).unwrap().input, &message(function), symbols)
    }

    fn range(lower: u64, upper: Option<u64>, default: u64) -> SymbolRange {
        SymbolRange::Range { lower, upper, default }
    }

    #[test]
    fn a_range_lists_every_dimension() {
        let t = Symbol::new("T");
        let ty = tensor([Dim::Fixed(1), Dim::Fixed(64), Dim::symbol(&t), Dim::Fixed(1)]);
        let function = function(Opset::CoreMl8, vec![("hidden", ty)], vec![(&t, range(1, Some(4), 1))]);
        let described = describe(&function).unwrap();
        let Some(Type::MultiArrayType(array)) = &described.input[0].r#type.as_ref().unwrap().r#type else { panic!() };
        assert_eq!(array.shape, [1, 64, 1, 1]);
        let Some(ShapeFlexibility::ShapeRange(ranges)) = &array.shape_flexibility else { panic!() };
        let bounds: Vec<(u64, i64)> = ranges.size_ranges.iter().map(|r| (r.lower_bound, r.upper_bound)).collect();
        assert_eq!(bounds, [(1, 1), (64, 64), (1, 4), (1, 1)]);
        // outputs of flexible shape have a type and no shape
        let Some(Type::MultiArrayType(array)) = &described.output[0].r#type.as_ref().unwrap().r#type else { panic!() };
        assert_eq!((array.shape.len(), array.data_type), (0, ArrayDataType::Float16 as i32));
    }

    #[test]
    fn symbols_survive_by_metadata() {
        let (t, s) = (Symbol::new("tokens"), Symbol::new("S"));
        let mask = Dim::symbol(&t).times(&Dim::Fixed(2)).offset_by(-1);
        let inputs =
            vec![("hidden", tensor([Dim::symbol(&t), Dim::Fixed(3)])), ("mask", tensor([Dim::symbol(&s), mask]))];
        for lengths in [
            vec![(&t, range(1, Some(4), 2)), (&s, range(1, Some(4), 2))],
            vec![(&t, range(1, None, 3)), (&s, range(2, Some(9), 2))],
            vec![(&t, SymbolRange::Enumerated(vec![2, 1])), (&s, SymbolRange::Enumerated(vec![64, 1, 8]))],
        ] {
            let function = function(Opset::CoreMl8, inputs.clone(), lengths);
            let text = symbols_text(&function).unwrap();
            assert_eq!(text, "hidden[0]=tokens; mask[0]=S; mask[1]=2*tokens-1");
            let known = read_back(&function, Some(&text));
            assert_eq!(known.lengths, function.lengths);
            assert_eq!(known.dims[&("mask".to_owned(), 1)].to_string(), "2*tokens-1");
        }
    }

    #[test]
    fn without_metadata_equal_ranges_are_one_symbol() {
        let (a, b) = (Symbol::new("a"), Symbol::new("b"));
        let inputs = vec![("x", tensor([Dim::symbol(&a)])), ("y", tensor([Dim::symbol(&b)]))];
        let same =
            function(Opset::CoreMl8, inputs.clone(), vec![(&a, range(1, Some(4), 1)), (&b, range(1, Some(4), 1))]);
        let known = read_back(&same, None);
        assert_eq!(known.dims[&("x".to_owned(), 0)], known.dims[&("y".to_owned(), 0)]);
        assert_eq!(known.lengths, BTreeMap::from([(Symbol::new("T"), range(1, Some(4), 1))]));

        let other =
            function(Opset::CoreMl8, inputs.clone(), vec![(&a, range(1, Some(4), 1)), (&b, range(1, Some(5), 1))]);
        let known = read_back(&other, None);
        assert_eq!(known.dims[&("y".to_owned(), 0)].to_string(), "T1");
        // metadata that contradicts the description is ignored
        assert_eq!(read_back(&other, Some("x[0]=T; y[0]=T")), known);
        assert_eq!(read_back(&other, Some("x[0]=3*T")), known);
        for nonsense in ["", ";", "x[0", "x[0]=", "x[0]=0*T", "x[9]=T", "z[0]=T", "x[0]=T+99999999999999999999"] {
            assert_eq!(read_back(&other, Some(nonsense)), known, "{nonsense}");
        }
    }

    #[test]
    fn enumerated_columns_that_rise_together_are_one_symbol() {
        let t = Symbol::new("T");
        let inputs = vec![
            ("x", tensor([Dim::Fixed(1), Dim::symbol(&t)])),
            ("y", tensor([Dim::symbol(&t).times(&Dim::Fixed(3)).offset_by(2)])),
        ];
        let lengths = SymbolRange::Enumerated(vec![16, 1, 64]);
        let function = function(Opset::CoreMl8, inputs, vec![(&t, lengths.clone())]);
        let known = read_back(&function, None);
        assert_eq!(known.dims[&("y".to_owned(), 0)].to_string(), "3*T+2");
        assert_eq!(known.lengths, BTreeMap::from([(t, lengths)]));
    }

    #[test]
    fn unsupported_features_are_refused() {
        let problem = |f: &Function| describe(f).unwrap_err().to_string();
        let of = |dtype, opset| function(opset, vec![("x", TensorType::new(dtype, [2u64]).into())], vec![]);
        assert_eq!(
            problem(&of(DataType::Bool, Opset::CoreMl8)),
            "function `main`, `x`: a feature can't be bool; expected fp16, fp32 or int32"
        );
        assert_eq!(
            problem(&of(DataType::Fp16, Opset::CoreMl5)),
            "function `main`, `x`: a feature can be fp16 from iOS16 on, the function is for iOS15"
        );
        assert!(describe(&of(DataType::Int8, Opset::CoreMl9)).is_ok());
        let state =
            |dtype, opset| function(opset, vec![("k", ValueType::State(TensorType::new(dtype, [2u64])))], vec![]);
        assert!(problem(&state(DataType::Fp16, Opset::CoreMl7)).contains("from iOS18 on"));
        assert!(problem(&state(DataType::Fp32, Opset::CoreMl8)).contains("must be fp16"));
        let t = Symbol::new("T");
        let flexible = |lengths: Vec<(&Symbol, SymbolRange)>| {
            function(Opset::CoreMl8, vec![("x", tensor([Dim::symbol(&t)]))], lengths)
        };
        assert!(problem(&flexible(vec![])).contains("nothing says what T may be"));
        assert!(problem(&flexible(vec![(&t, range(3, Some(2), 3))])).contains("T ranges from 3 to 2"));
        assert!(problem(&flexible(vec![(&t, range(0, None, 1))])).contains("T ranges from 0 to any"));
        assert!(problem(&flexible(vec![(&t, SymbolRange::Enumerated(vec![]))])).contains("T has no sizes"));
        let many = SymbolRange::Enumerated((1..=129).collect());
        assert!(problem(&flexible(vec![(&t, many)])).contains("more than 128 shapes"));
        let huge = range(1, Some(u64::MAX), 1);
        assert!(problem(&flexible(vec![(&t, huge)])).contains("out of range"));
    }
}
