//! Types and attributes, and their encodings. An entry refers to others by index.

use super::DYNAMIC;
use super::element::ElementType;
use crate::bytecode::{ByteCursor, Malformed, push_signed, push_varint};

/// Index of a string.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StringId(pub u32);

/// Index of a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TypeId(pub u32);

/// Index of an attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AttributeId(pub u32);

/// A type.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum AiType {
    /// A number.
    Scalar(ElementType),
    /// A tensor; `None` is a dynamic dimension.
    Tensor {
        /// Sizes, outermost first.
        shape: Vec<Option<u64>>,
        /// Type of the elements.
        element: TypeId,
        /// [`AiAttribute::Constraints`] on its memory, or its [`AiAttribute::SparseEncoding`].
        constraints: Option<AttributeId>,
    },
    /// The signature of a graph.
    Function {
        /// Types of the arguments.
        arguments: Vec<TypeId>,
        /// Types of the results.
        results: Vec<TypeId>,
    },
    /// A state that holds a value of the type.
    Handle(TypeId),
    /// Orders reads and writes of states.
    Token,
    /// A symbol that a call of a graph names.
    Symbol,
    /// An image.
    Image {
        /// [`AiAttribute::PixelFormat`] of the image.
        format: AttributeId,
        /// Height in pixels.
        height: u64,
        /// Width in pixels.
        width: u64,
    },
    /// Debug information: type of an [`AiAttribute::Subprogram`]; the number is 1 wherever it was seen.
    Debug(u64),
    /// A type that this crate doesn't understand, as it is encoded.
    Unknown(Vec<u8>),
    /// MLIR text in place of an encoding.
    Text(String),
}

/// Where a tensor's memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Allocation(pub u64);

impl Allocation {
    /// An IOSurface.
    pub const IO_SURFACE: Allocation = Allocation(1);
}

/// Requirements on the memory of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Constraints {
    /// Alignment of each stride, and of the whole: one more than dimensions.
    pub alignments: Vec<i64>,
    /// Elements of each dimension that lie side by side.
    pub interleave: Vec<i64>,
    /// Kind of memory.
    pub allocation: Allocation,
}

/// An attribute.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum AiAttribute {
    /// A string.
    String(StringId),
    /// An integer.
    Integer {
        /// Width in bits.
        bits: u64,
        /// Whether it is unsigned.
        unsigned: bool,
        /// Value of the parameter.
        value: i64,
    },
    /// A float.
    Float {
        /// Width in bits.
        bits: u64,
        /// Bit pattern.
        pattern: i64,
    },
    /// A type.
    Type(TypeId),
    /// A list.
    Array(Vec<AttributeId>),
    /// Elements of a constant, one byte each below 8 bits, or one element that stands for all.
    Dense {
        /// One element stands for all.
        splat: bool,
        /// Little-endian elements.
        bytes: Vec<u8>,
    },
    /// Index of a resource that holds the elements of a constant.
    Resource(u32),
    /// Values with a name.
    Named {
        /// The name.
        name: StringId,
        /// The values.
        values: Vec<AttributeId>,
    },
    /// Constraints on memory.
    Constraints(Constraints),
    /// Reference to a graph.
    SymbolReference(Vec<StringId>),
    /// A constant of a parameter.
    Parameter {
        /// Value of the parameter.
        value: AttributeId,
        /// Type of the parameter.
        ty: TypeId,
    },
    /// Fill mode of `pad`, by code.
    PaddingMode(u64),
    /// Approximation of `gelu`, by code.
    GeluApproximation(u64),
    /// Combiner of `scan`, by code.
    ScanCombiner(u64),
    /// Combiner of `scatter_along_axis`, by code.
    ScatterMode(u64),
    /// Values between elements in `interpolate`, by code.
    InterpolationMode(u64),
    /// Encoding of a tensor that stores the elements of a bit mask only.
    SparseEncoding {
        /// Scheme and widths, not understood; 0, 1, 1 and 0 wherever they were seen.
        numbers: [u64; 4],
        /// Number of stored elements.
        stored: u64,
    },
    /// Pixel format of an image: four characters, the first in the highest byte.
    PixelFormat(u64),
    /// A source file.
    File([StringId; 3]),
    /// A range of a source file.
    SourceRange {
        /// The file.
        file: AttributeId,
        /// Lines and columns.
        numbers: [u64; 4],
    },
    /// Debug information: the source that a program was made from.
    CompileUnit {
        /// Language of the source.
        language: StringId,
        /// The [`AiAttribute::File`].
        file: AttributeId,
        /// Program that made the asset.
        producer: StringId,
        /// Not understood.
        text: StringId,
        /// Numbers before and after the text, not understood; zero wherever they were seen.
        numbers: [u64; 2],
    },
    /// Debug information: a dictionary.
    Metadata(AttributeId),
    /// Debug information: id of an operation.
    OpId {
        /// Kind of the id.
        name: StringId,
        /// The [`AiAttribute::Metadata`].
        metadata: AttributeId,
    },
    /// Debug information: a function of the source.
    Subprogram {
        /// The [`AiType::Debug`].
        ty: TypeId,
        /// The [`AiAttribute::CompileUnit`].
        unit: AttributeId,
        /// The [`AiAttribute::File`].
        file: AttributeId,
        /// Name of the function, twice.
        names: [StringId; 2],
        /// Not understood.
        number: u64,
    },
    /// Where an operation comes from.
    Location {
        /// Range of the source.
        source: AttributeId,
        /// Scope.
        scope: AttributeId,
        /// Not understood; zero wherever it was seen.
        kind: u64,
        /// Each an [`AiAttribute::OpId`]; most locations have none.
        ids: Vec<AttributeId>,
    },
    /// Named values.
    Dictionary(Vec<AttributeId>),
    /// Unit: an attribute without content.
    Unit,
    /// An attribute that this crate doesn't understand, as it is encoded.
    Unknown(Vec<u8>),
    /// MLIR text in place of an encoding.
    Text(String),
}

mod code {
    pub const TENSOR: u64 = 2;
    pub const CONSTRAINED_TENSOR: u64 = 3;
    pub const FUNCTION: u64 = 30;
    pub const HANDLE: u64 = 31;
    pub const TOKEN: u64 = 32;
    pub const PARAMETER_SYMBOL: u64 = 33;
    pub const IMAGE: u64 = 39;
    pub const DEBUG: u64 = 41;

    pub const STRING: u64 = 1;
    pub const INTEGER: u64 = 2;
    pub const FLOAT: u64 = 3;
    pub const TYPE: u64 = 4;
    pub const ARRAY: u64 = 5;
    pub const DENSE: u64 = 6;
    pub const RESOURCE: u64 = 7;
    pub const NAMED: u64 = 9;
    pub const CONSTRAINTS: u64 = 12;
    pub const SYMBOL: u64 = 14;
    pub const PARAMETER: u64 = 16;
    pub const PADDING_MODE: u64 = 17;
    pub const GELU: u64 = 19;
    pub const SCATTER_MODE: u64 = 20;
    pub const SPARSE_ENCODING: u64 = 21;
    pub const SCAN_COMBINER: u64 = 25;
    pub const PIXEL_FORMAT: u64 = 27;
    pub const FILE: u64 = 30;
    pub const SOURCE_RANGE: u64 = 31;
    pub const COMPILE_UNIT: u64 = 32;
    pub const METADATA: u64 = 33;
    pub const OP_ID: u64 = 35;
    pub const SUBPROGRAM: u64 = 36;
    pub const LOCATION: u64 = 40;
    pub const INTERPOLATION_MODE: u64 = 43;
    pub const DICTIONARY: u64 = 45;
    pub const UNIT: u64 = 46;
}

type Read<T> = Result<T, Malformed>;

fn push_fields(out: &mut Vec<u8>, fields: &[u64]) {
    fields.iter().for_each(|field| push_varint(out, *field));
}

fn push_all(out: &mut Vec<u8>, ids: impl ExactSizeIterator<Item = u32>) {
    push_varint(out, ids.len() as u64);
    ids.for_each(|id| push_varint(out, u64::from(id)));
}

fn types(cursor: &mut ByteCursor<'_>) -> Read<Vec<TypeId>> {
    Ok(cursor.indices()?.into_iter().map(TypeId).collect())
}

fn attributes(cursor: &mut ByteCursor<'_>) -> Read<Vec<AttributeId>> {
    Ok(cursor.indices()?.into_iter().map(AttributeId).collect())
}

fn signed_list(cursor: &mut ByteCursor<'_>) -> Read<Vec<i64>> {
    (0..cursor.count()?).map(|_| cursor.signed()).collect()
}

/// Decodes an entry; one that its decoder doesn't know, or doesn't read to its end, is unknown.
fn decode<T>(
    bytes: &[u8],
    at: usize,
    known: impl FnOnce(&mut ByteCursor<'_>, u64) -> Read<Option<T>>,
    unknown: impl FnOnce(Vec<u8>) -> T,
) -> Read<T> {
    let mut cursor = ByteCursor::new(bytes, at);
    let code = cursor.varint()?;
    match known(&mut cursor, code)? {
        Some(entry) if cursor.is_empty() => Ok(entry),
        Some(_) => Err(cursor.malformed(format!("{} bytes too many for code {code}", cursor.remaining()))),
        None => Ok(unknown(bytes.to_vec())),
    }
}

impl AiType {
    /// Decodes a type.
    ///
    /// # Errors
    /// [`Malformed`] for a known code with other fields. Unknown codes give [`AiType::Unknown`].
    pub fn decode(bytes: &[u8], at: usize) -> Read<AiType> {
        decode(bytes, at, AiType::known, AiType::Unknown)
    }

    fn known(cursor: &mut ByteCursor<'_>, code: u64) -> Read<Option<AiType>> {
        if let Some(element) = ElementType::from_code(code) {
            return Ok(Some(AiType::Scalar(element)));
        }
        Ok(Some(match code {
            code::TENSOR | code::CONSTRAINED_TENSOR => {
                let size = |size: i64| match size {
                    DYNAMIC => Ok(None),
                    size => u64::try_from(size).map(Some),
                };
                let shape = signed_list(cursor)?.into_iter().map(size).collect::<Result<Vec<_>, _>>();
                let shape = shape.map_err(|_| cursor.malformed("a negative dimension"))?;
                let element = TypeId(cursor.index()?);
                let constrained = code == code::CONSTRAINED_TENSOR;
                let constraints = constrained.then(|| cursor.index().map(AttributeId)).transpose()?;
                AiType::Tensor { shape, element, constraints }
            }
            code::FUNCTION => {
                let results = types(cursor)?;
                AiType::Function { results, arguments: types(cursor)? }
            }
            code::HANDLE => AiType::Handle(TypeId(cursor.index()?)),
            code::TOKEN => AiType::Token,
            code::PARAMETER_SYMBOL => AiType::Symbol,
            code::IMAGE => AiType::Image {
                format: AttributeId(cursor.index()?),
                height: cursor.varint()?,
                width: cursor.varint()?,
            },
            code::DEBUG => AiType::Debug(cursor.varint()?),
            _ => return Ok(None),
        }))
    }

    /// Returns the encoding.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            AiType::Scalar(element) => push_varint(&mut out, element.code()),
            AiType::Tensor { shape, element, constraints } => {
                push_varint(&mut out, if constraints.is_some() { code::CONSTRAINED_TENSOR } else { code::TENSOR });
                push_varint(&mut out, shape.len() as u64);
                shape.iter().for_each(|size| push_signed(&mut out, size.map_or(DYNAMIC, |size| size as i64)));
                push_varint(&mut out, u64::from(element.0));
                if let Some(constraints) = constraints {
                    push_varint(&mut out, u64::from(constraints.0));
                }
            }
            AiType::Function { arguments, results } => {
                push_varint(&mut out, code::FUNCTION);
                push_all(&mut out, results.iter().map(|ty| ty.0));
                push_all(&mut out, arguments.iter().map(|ty| ty.0));
            }
            AiType::Handle(ty) => {
                push_varint(&mut out, code::HANDLE);
                push_varint(&mut out, u64::from(ty.0));
            }
            AiType::Token => push_varint(&mut out, code::TOKEN),
            AiType::Symbol => push_varint(&mut out, code::PARAMETER_SYMBOL),
            AiType::Image { format, height, width } => {
                push_fields(&mut out, &[code::IMAGE, format.0.into(), *height, *width]);
            }
            AiType::Debug(number) => push_fields(&mut out, &[code::DEBUG, *number]),
            AiType::Unknown(bytes) => out.clone_from(bytes),
            AiType::Text(text) => out.extend(text.bytes().chain([0])),
        }
        out
    }
}

impl AiAttribute {
    /// Decodes an attribute.
    ///
    /// # Errors
    /// [`Malformed`] for a known code with other fields. Unknown codes give [`AiAttribute::Unknown`].
    pub fn decode(bytes: &[u8], at: usize) -> Read<AiAttribute> {
        decode(bytes, at, AiAttribute::known, AiAttribute::Unknown)
    }

    fn known(cursor: &mut ByteCursor<'_>, code: u64) -> Read<Option<AiAttribute>> {
        Ok(Some(match code {
            code::STRING => AiAttribute::String(StringId(cursor.index()?)),
            code::INTEGER => {
                let (bits, unsigned) = (cursor.varint()?, cursor.byte()? != 0);
                let value = match (bits <= 8, unsigned) {
                    (true, true) => i64::from(cursor.byte()?),
                    (true, false) => i64::from(cursor.byte()? as i8),
                    (false, _) => cursor.signed()?,
                };
                AiAttribute::Integer { bits, unsigned, value }
            }
            code::FLOAT => AiAttribute::Float { bits: cursor.varint()?, pattern: cursor.signed()? },
            code::TYPE => AiAttribute::Type(TypeId(cursor.index()?)),
            code::ARRAY => AiAttribute::Array(attributes(cursor)?),
            code::DENSE => {
                let splat = cursor.byte()? != 0;
                let length = cursor.count()?;
                AiAttribute::Dense { splat, bytes: cursor.take(length)?.to_vec() }
            }
            code::RESOURCE => AiAttribute::Resource(cursor.index()?),
            code::NAMED => AiAttribute::Named { name: StringId(cursor.index()?), values: attributes(cursor)? },
            code::CONSTRAINTS => AiAttribute::Constraints(Constraints {
                alignments: signed_list(cursor)?,
                interleave: signed_list(cursor)?,
                allocation: Allocation(cursor.varint()?),
            }),
            code::SYMBOL => AiAttribute::SymbolReference(cursor.indices()?.into_iter().map(StringId).collect()),
            code::PARAMETER => {
                AiAttribute::Parameter { value: AttributeId(cursor.index()?), ty: TypeId(cursor.index()?) }
            }
            code::PADDING_MODE => AiAttribute::PaddingMode(cursor.varint()?),
            code::GELU => AiAttribute::GeluApproximation(cursor.varint()?),
            code::SCATTER_MODE => AiAttribute::ScatterMode(cursor.varint()?),
            code::INTERPOLATION_MODE => AiAttribute::InterpolationMode(cursor.varint()?),
            code::SPARSE_ENCODING => AiAttribute::SparseEncoding {
                numbers: [cursor.varint()?, cursor.varint()?, cursor.varint()?, cursor.varint()?],
                stored: cursor.varint()?,
            },
            code::SCAN_COMBINER => AiAttribute::ScanCombiner(cursor.varint()?),
            code::PIXEL_FORMAT => AiAttribute::PixelFormat(cursor.varint()?),
            code::FILE => AiAttribute::File([cursor.index()?, cursor.index()?, cursor.index()?].map(StringId)),
            code::SOURCE_RANGE => AiAttribute::SourceRange {
                file: AttributeId(cursor.index()?),
                numbers: [cursor.varint()?, cursor.varint()?, cursor.varint()?, cursor.varint()?],
            },
            code::COMPILE_UNIT => {
                let (language, file) = (StringId(cursor.index()?), AttributeId(cursor.index()?));
                let (producer, before) = (StringId(cursor.index()?), cursor.varint()?);
                let (text, after) = (StringId(cursor.index()?), cursor.varint()?);
                AiAttribute::CompileUnit { language, file, producer, text, numbers: [before, after] }
            }
            code::METADATA => AiAttribute::Metadata(AttributeId(cursor.index()?)),
            code::OP_ID => {
                AiAttribute::OpId { name: StringId(cursor.index()?), metadata: AttributeId(cursor.index()?) }
            }
            code::SUBPROGRAM => AiAttribute::Subprogram {
                ty: TypeId(cursor.index()?),
                unit: AttributeId(cursor.index()?),
                file: AttributeId(cursor.index()?),
                names: [StringId(cursor.index()?), StringId(cursor.index()?)],
                number: cursor.varint()?,
            },
            code::LOCATION => AiAttribute::Location {
                source: AttributeId(cursor.index()?),
                scope: AttributeId(cursor.index()?),
                kind: cursor.varint()?,
                ids: attributes(cursor)?,
            },
            code::DICTIONARY => AiAttribute::Dictionary(attributes(cursor)?),
            code::UNIT => AiAttribute::Unit,
            _ => return Ok(None),
        }))
    }

    /// Returns the encoding.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            AiAttribute::String(text) => push_fields(&mut out, &[code::STRING, text.0.into()]),
            AiAttribute::Integer { bits, unsigned, value } => {
                push_fields(&mut out, &[code::INTEGER, *bits]);
                out.push(u8::from(*unsigned));
                if *bits <= 8 { out.push(*value as u8) } else { push_signed(&mut out, *value) }
            }
            AiAttribute::Float { bits, pattern } => {
                push_fields(&mut out, &[code::FLOAT, *bits]);
                push_signed(&mut out, *pattern);
            }
            AiAttribute::Type(ty) => push_fields(&mut out, &[code::TYPE, ty.0.into()]),
            AiAttribute::Array(items) => {
                push_fields(&mut out, &[code::ARRAY]);
                push_all(&mut out, items.iter().map(|item| item.0));
            }
            AiAttribute::Dense { splat, bytes } => {
                push_fields(&mut out, &[code::DENSE]);
                out.push(u8::from(*splat));
                push_varint(&mut out, bytes.len() as u64);
                out.extend(bytes);
            }
            AiAttribute::Resource(index) => push_fields(&mut out, &[code::RESOURCE, (*index).into()]),
            AiAttribute::Named { name, values } => {
                push_fields(&mut out, &[code::NAMED, name.0.into()]);
                push_all(&mut out, values.iter().map(|value| value.0));
            }
            AiAttribute::Constraints(constraints) => {
                push_fields(&mut out, &[code::CONSTRAINTS]);
                for list in [&constraints.alignments, &constraints.interleave] {
                    push_varint(&mut out, list.len() as u64);
                    list.iter().for_each(|number| push_signed(&mut out, *number));
                }
                push_varint(&mut out, constraints.allocation.0);
            }
            AiAttribute::SymbolReference(path) => {
                push_fields(&mut out, &[code::SYMBOL]);
                push_all(&mut out, path.iter().map(|part| part.0));
            }
            AiAttribute::Parameter { value, ty } => {
                push_fields(&mut out, &[code::PARAMETER, value.0.into(), ty.0.into()])
            }
            AiAttribute::PaddingMode(mode) => push_fields(&mut out, &[code::PADDING_MODE, *mode]),
            AiAttribute::GeluApproximation(form) => push_fields(&mut out, &[code::GELU, *form]),
            AiAttribute::ScatterMode(mode) => push_fields(&mut out, &[code::SCATTER_MODE, *mode]),
            AiAttribute::InterpolationMode(mode) => push_fields(&mut out, &[code::INTERPOLATION_MODE, *mode]),
            AiAttribute::SparseEncoding { numbers: [a, b, c, d], stored } => {
                push_fields(&mut out, &[code::SPARSE_ENCODING, *a, *b, *c, *d, *stored]);
            }
            AiAttribute::ScanCombiner(form) => push_fields(&mut out, &[code::SCAN_COMBINER, *form]),
            AiAttribute::PixelFormat(characters) => push_fields(&mut out, &[code::PIXEL_FORMAT, *characters]),
            AiAttribute::File([name, folder, hash]) => {
                push_fields(&mut out, &[code::FILE, name.0.into(), folder.0.into(), hash.0.into()]);
            }
            AiAttribute::SourceRange { file, numbers: [a, b, c, d] } => {
                push_fields(&mut out, &[code::SOURCE_RANGE, file.0.into(), *a, *b, *c, *d]);
            }
            AiAttribute::CompileUnit { language, file, producer, text, numbers: [before, after] } => {
                let fields = [language.0.into(), file.0.into(), producer.0.into(), *before, text.0.into(), *after];
                push_fields(&mut out, &[code::COMPILE_UNIT]);
                push_fields(&mut out, &fields);
            }
            AiAttribute::Metadata(dictionary) => push_fields(&mut out, &[code::METADATA, dictionary.0.into()]),
            AiAttribute::OpId { name, metadata } => {
                push_fields(&mut out, &[code::OP_ID, name.0.into(), metadata.0.into()]);
            }
            AiAttribute::Subprogram { ty, unit, file, names: [first, second], number } => {
                let fields = [ty.0.into(), unit.0.into(), file.0.into(), first.0.into(), second.0.into(), *number];
                push_fields(&mut out, &[code::SUBPROGRAM]);
                push_fields(&mut out, &fields);
            }
            AiAttribute::Location { source, scope, kind, ids } => {
                push_fields(&mut out, &[code::LOCATION, source.0.into(), scope.0.into(), *kind]);
                push_all(&mut out, ids.iter().map(|id| id.0));
            }
            AiAttribute::Dictionary(items) => {
                push_fields(&mut out, &[code::DICTIONARY]);
                push_all(&mut out, items.iter().map(|item| item.0));
            }
            AiAttribute::Unit => push_fields(&mut out, &[code::UNIT]),
            AiAttribute::Unknown(bytes) => out.clone_from(bytes),
            AiAttribute::Text(text) => out.extend(text.bytes().chain([0])),
        }
        out
    }
}
