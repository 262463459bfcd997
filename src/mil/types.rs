//! Data types, value types, and dimensions that may depend on a symbol such as the number of tokens `T`.

use std::fmt;
use std::sync::Arc;

use super::names::Name;

/// Element types of MIL tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // the names are the documentation
pub enum DataType {
    Bool,
    String,
    Fp16,
    Fp32,
    Fp64,
    Bf16,
    Int4,
    Int8,
    Int16,
    Int32,
    Int64,
    Uint1,
    Uint2,
    Uint3,
    Uint4,
    Uint6,
    Uint8,
    Uint16,
    Uint32,
    Uint64,
}

impl DataType {
    /// All types in the order of their declaration.
    pub const ALL: [DataType; 20] = [
        DataType::Bool,
        DataType::String,
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

    /// Returns the type with this name.
    pub fn from_name(name: &str) -> Option<DataType> {
        DataType::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Name in MIL text: `fp16`, `int32`, …
    pub fn name(self) -> &'static str {
        match self {
            DataType::Bool => "bool",
            DataType::String => "string",
            DataType::Fp16 => "fp16",
            DataType::Fp32 => "fp32",
            DataType::Fp64 => "fp64",
            DataType::Bf16 => "bf16",
            DataType::Int4 => "int4",
            DataType::Int8 => "int8",
            DataType::Int16 => "int16",
            DataType::Int32 => "int32",
            DataType::Int64 => "int64",
            DataType::Uint1 => "uint1",
            DataType::Uint2 => "uint2",
            DataType::Uint3 => "uint3",
            DataType::Uint4 => "uint4",
            DataType::Uint6 => "uint6",
            DataType::Uint8 => "uint8",
            DataType::Uint16 => "uint16",
            DataType::Uint32 => "uint32",
            DataType::Uint64 => "uint64",
        }
    }

    /// Bits of one element; 0 for strings.
    pub fn bits(self) -> u64 {
        match self {
            DataType::String => 0,
            DataType::Uint1 => 1,
            DataType::Uint2 => 2,
            DataType::Uint3 => 3,
            DataType::Int4 | DataType::Uint4 => 4,
            DataType::Uint6 => 6,
            DataType::Bool | DataType::Int8 | DataType::Uint8 => 8,
            DataType::Fp16 | DataType::Bf16 | DataType::Int16 | DataType::Uint16 => 16,
            DataType::Fp32 | DataType::Int32 | DataType::Uint32 => 32,
            DataType::Fp64 | DataType::Int64 | DataType::Uint64 => 64,
        }
    }

    /// Bytes of `elements` packed elements (sub-byte types are packed across bytes).
    pub fn packed_bytes(self, elements: u64) -> u64 {
        (elements * self.bits()).div_ceil(8)
    }

    /// Returns whether the type is floating point of any width.
    pub fn is_float(self) -> bool {
        matches!(self, DataType::Fp16 | DataType::Fp32 | DataType::Fp64 | DataType::Bf16)
    }

    /// Returns whether the type is a signed or unsigned integer of any width.
    pub fn is_integer(self) -> bool {
        !self.is_float() && !matches!(self, DataType::Bool | DataType::String)
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A named unknown, such as the number of tokens `T` of a call.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Symbol(Arc<str>);

impl Symbol {
    /// Creates a symbol; symbols with equal names are the same within a function.
    pub fn new(name: &str) -> Self {
        Symbol(name.into())
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.0
    }
}

/// A dimension of a shape. Known sizes are at most [`Dim::MAX`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Dim {
    /// A size that is known when the graph is built.
    Fixed(u64),
    /// `factor * symbol + offset` with `factor >= 1`.
    Symbolic {
        /// Factor of the symbol.
        factor: u64,
        /// Symbol.
        symbol: Symbol,
        /// Constant term.
        offset: i64,
    },
    /// A size that the function's symbols can't express; compatible with any size.
    Unknown,
}

impl Dim {
    /// Maximum size.
    pub const MAX: u64 = i64::MAX as u64;

    /// Returns the symbol as a dimension.
    pub fn symbol(symbol: &Symbol) -> Self {
        Dim::Symbolic { factor: 1, symbol: symbol.clone(), offset: 0 }
    }

    /// `factor * symbol + offset`, or unknown if a term overflows.
    fn symbolic(factor: Option<u64>, symbol: &Symbol, offset: Option<i64>) -> Self {
        match (factor, offset) {
            (Some(factor), Some(offset)) => Dim::Symbolic { factor, symbol: symbol.clone(), offset },
            _ => Dim::Unknown,
        }
    }

    /// Returns the size if it is known.
    pub fn fixed(&self) -> Option<u64> {
        match self {
            Dim::Fixed(n) => Some(*n),
            _ => None,
        }
    }

    /// Returns the size for `symbol = value`; dimensions of other symbols are unchanged.
    pub fn substitute(&self, symbol: &Symbol, value: u64) -> Dim {
        match self {
            Dim::Symbolic { factor, symbol: own, offset } if own == symbol => {
                let size = i128::from(*factor) * i128::from(value) + i128::from(*offset);
                u64::try_from(size).map_or(Dim::Unknown, Dim::Fixed)
            }
            other => other.clone(),
        }
    }

    /// Adds a number to the dimension.
    pub fn offset_by(&self, by: i64) -> Dim {
        match self {
            Dim::Fixed(n) => n.checked_add_signed(by).map_or(Dim::Unknown, Dim::Fixed),
            Dim::Symbolic { factor, symbol, offset } => Dim::symbolic(Some(*factor), symbol, offset.checked_add(by)),
            Dim::Unknown => Dim::Unknown,
        }
    }

    /// Adds two dimensions.
    pub fn plus(&self, other: &Dim) -> Dim {
        match (self, other) {
            (Dim::Fixed(n), d) | (d, Dim::Fixed(n)) => i64::try_from(*n).map_or(Dim::Unknown, |n| d.offset_by(n)),
            (Dim::Symbolic { factor: a, symbol: s, offset: p }, Dim::Symbolic { factor: b, symbol: t, offset: q })
                if s == t =>
            {
                Dim::symbolic(a.checked_add(*b), s, p.checked_add(*q))
            }
            _ => Dim::Unknown,
        }
    }

    /// Multiplies two dimensions.
    pub fn times(&self, other: &Dim) -> Dim {
        match (self, other) {
            (Dim::Fixed(a), Dim::Fixed(b)) => a.checked_mul(*b).map_or(Dim::Unknown, Dim::Fixed),
            (Dim::Fixed(0), _) | (_, Dim::Fixed(0)) => Dim::Fixed(0),
            (Dim::Fixed(n), Dim::Symbolic { factor, symbol, offset })
            | (Dim::Symbolic { factor, symbol, offset }, Dim::Fixed(n)) => {
                let signed = i64::try_from(*n).ok();
                Dim::symbolic(factor.checked_mul(*n), symbol, signed.and_then(|n| offset.checked_mul(n)))
            }
            _ => Dim::Unknown,
        }
    }

    /// Divides two dimensions; `None` unless the quotient is exact for every value of the symbol.
    pub fn divided_by(&self, other: &Dim) -> Option<Dim> {
        match (self, other) {
            (_, Dim::Fixed(0)) => None,
            (Dim::Fixed(a), Dim::Fixed(b)) => (a % b == 0).then(|| Dim::Fixed(a / b)),
            (Dim::Symbolic { factor, symbol, offset }, Dim::Fixed(n)) => {
                let n_signed = i64::try_from(*n).ok()?;
                (factor % n == 0 && offset % n_signed == 0).then(|| Dim::Symbolic {
                    factor: factor / n,
                    symbol: symbol.clone(),
                    offset: offset / n_signed,
                })
            }
            (Dim::Symbolic { factor: a, symbol: s, offset: p }, Dim::Symbolic { factor: b, symbol: t, offset: q })
                if s == t && a % b == 0 =>
            {
                let k = a / b;
                (i64::try_from(k).ok()?.checked_mul(*q)? == *p).then_some(Dim::Fixed(k))
            }
            _ => None,
        }
    }

    /// Returns whether both can be the same size: equal, or one of them unknown.
    pub fn is_compatible(&self, other: &Dim) -> bool {
        match (self, other) {
            (Dim::Fixed(a), Dim::Fixed(b)) => a == b,
            (Dim::Symbolic { .. }, Dim::Symbolic { .. }) => self == other,
            (Dim::Unknown, _) | (_, Dim::Unknown) => true,
            (Dim::Fixed(_), Dim::Symbolic { .. }) | (Dim::Symbolic { .. }, Dim::Fixed(_)) => false,
        }
    }
}

impl From<u64> for Dim {
    fn from(n: u64) -> Self {
        Dim::Fixed(n)
    }
}

impl From<&Symbol> for Dim {
    fn from(symbol: &Symbol) -> Self {
        Dim::symbol(symbol)
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dim::Fixed(n) => write!(f, "{n}"),
            Dim::Symbolic { factor, symbol, offset } => {
                if *factor != 1 {
                    write!(f, "{factor}*")?;
                }
                write!(f, "{}", Name(symbol.name()))?;
                if *offset != 0 {
                    write!(f, "{offset:+}")?;
                }
                Ok(())
            }
            Dim::Unknown => f.write_str("?"),
        }
    }
}

/// Element type and shape of a tensor; rank 0 is a scalar.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorType {
    /// Element type.
    pub dtype: DataType,
    /// Dimensions, outermost first.
    pub shape: Vec<Dim>,
}

impl TensorType {
    /// Creates a tensor type; dimensions convert from numbers and symbols.
    pub fn new(dtype: DataType, shape: impl IntoIterator<Item = impl Into<Dim>>) -> Self {
        TensorType { dtype, shape: shape.into_iter().map(Into::into).collect() }
    }

    /// Creates the type of a scalar.
    pub fn scalar(dtype: DataType) -> Self {
        TensorType { dtype, shape: Vec::new() }
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// All dimensions; `None` unless every one is known.
    pub fn fixed_shape(&self) -> Option<Vec<u64>> {
        self.shape.iter().map(Dim::fixed).collect()
    }

    /// Number of elements; `None` unless every dimension is known and the product fits.
    pub fn elements(&self) -> Option<u64> {
        self.shape.iter().try_fold(1u64, |n, d| n.checked_mul(d.fixed()?))
    }

    /// Bytes of all packed elements, if known.
    pub fn bytes(&self) -> Option<u64> {
        let elements = self.elements()?;
        elements.checked_mul(self.dtype.bits()).map(|bits| bits.div_ceil(8))
    }

    /// Returns the type for `symbol = value`.
    pub fn substitute(&self, symbol: &Symbol, value: u64) -> TensorType {
        TensorType { dtype: self.dtype, shape: self.shape.iter().map(|d| d.substitute(symbol, value)).collect() }
    }

    /// Returns whether element types are equal and shapes are compatible.
    pub fn is_compatible(&self, other: &TensorType) -> bool {
        self.dtype == other.dtype
            && self.shape.len() == other.shape.len()
            && self.shape.iter().zip(&other.shape).all(|(a, b)| a.is_compatible(b))
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.shape.is_empty() {
            return write!(f, "{}", self.dtype);
        }
        write!(f, "tensor<{}, [", self.dtype)?;
        for (i, dim) in self.shape.iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{dim}")?;
        }
        f.write_str("]>")
    }
}

/// Type of an SSA value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ValueType {
    /// A tensor or scalar.
    Tensor(TensorType),
    /// A state for `read_state` and `write_state`.
    State(TensorType),
    /// Text of a type that this crate carries and prints but can't compute with (lists, dictionaries, tuples).
    Opaque(String),
}

impl ValueType {
    /// Returns the tensor type, or that of the tensor in a state.
    pub fn tensor(&self) -> Option<&TensorType> {
        match self {
            ValueType::Tensor(t) | ValueType::State(t) => Some(t),
            ValueType::Opaque(_) => None,
        }
    }
}

impl From<TensorType> for ValueType {
    fn from(t: TensorType) -> Self {
        ValueType::Tensor(t)
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ValueType::Tensor(t) => write!(f, "{t}"),
            ValueType::State(t) => write!(f, "state<{t}>"),
            ValueType::Opaque(text) => f.write_str(text),
        }
    }
}

/// Version of the op set; each belongs to one specification version and one OS generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Opset {
    CoreMl5,
    CoreMl6,
    CoreMl7,
    CoreMl8,
    CoreMl9,
}

impl Opset {
    /// All opsets, oldest first.
    pub const ALL: [Opset; 5] = [Opset::CoreMl5, Opset::CoreMl6, Opset::CoreMl7, Opset::CoreMl8, Opset::CoreMl9];

    /// Name in `Function.opset` and `block_specializations`: `CoreML5` …
    pub fn name(self) -> &'static str {
        match self {
            Opset::CoreMl5 => "CoreML5",
            Opset::CoreMl6 => "CoreML6",
            Opset::CoreMl7 => "CoreML7",
            Opset::CoreMl8 => "CoreML8",
            Opset::CoreMl9 => "CoreML9",
        }
    }

    /// Returns the opset with this name.
    pub fn from_name(name: &str) -> Option<Opset> {
        Opset::ALL.into_iter().find(|o| o.name() == name)
    }

    /// Model specification version of the opset.
    pub fn specification_version(self) -> i32 {
        match self {
            Opset::CoreMl5 => 6,
            Opset::CoreMl6 => 7,
            Opset::CoreMl7 => 8,
            Opset::CoreMl8 => 9,
            Opset::CoreMl9 => 10,
        }
    }

    /// Name of the deployment target: `iOS15` …
    pub fn target(self) -> &'static str {
        match self {
            Opset::CoreMl5 => "iOS15",
            Opset::CoreMl6 => "iOS16",
            Opset::CoreMl7 => "iOS17",
            Opset::CoreMl8 => "iOS18",
            Opset::CoreMl9 => "iOS26",
        }
    }
}
