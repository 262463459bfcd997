//! Table of ops: one row for each operator, with its parameters, their defaults and the inference of result types.
//!
//! The verifier, the builder, the text form and the executor's checks read this table. An operator whose
//! parameters changed with an opset has a row for each form; [`lookup`] returns the newest that an opset has.
//!
//! Rows are in `ops/`, by group; element types of parameters are in `ops/element_types.txt`. A row's parameters are
//! one line. In `x weight bias? groups!=1`, `x` and `weight` are required, `bias` is optional (`?`), and `groups` must
//! be constant (`!`), with 1 as the builder's default. `stride?=rank:1` has a default and is optional in programs.
//! `values*` takes a list. Defaults: `true`, `7`, `1.5` (in the type of the op's data), `"text"`, `rank:0` (one for
//! each dimension of `x`), `spatial:1` (one for each dimension but the first two), `pads:0` (two for each of those).

mod arguments;

use std::collections::BTreeMap;
use std::sync::LazyLock;

use hashbrown::HashMap;

use super::constant::Constant;
use super::ops::{self, element_types};
use super::types::{DataType, Dim, Opset, TensorType, ValueType};

pub use super::ops::element_types::ElementTypes;
pub use arguments::Arguments;

/// One parameter of an operator.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Name in packages.
    pub name: &'static str,
    /// Whether a program may omit it.
    pub optional: bool,
    /// Value that the builder writes if the parameter is omitted. Core ML's runtime has few defaults of its own.
    pub default: Option<DefaultValue>,
    /// Whether it takes a list of bindings (`values` of `concat`).
    pub variadic: bool,
    /// Whether it must be known when the graph is built.
    pub constant: bool,
    /// Accepted element types.
    pub elements: ElementTypes,
}

/// Default value of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum DefaultValue {
    /// A boolean.
    Bool(bool),
    /// An int32.
    Int(i32),
    /// A number in the type of the op's data.
    Float(f32),
    /// A string.
    Text(&'static str),
    /// One integer for each dimension of `x`.
    Rank(i32),
    /// One integer for each dimension of `x` but the first two.
    Spatial(i32),
    /// Two integers for each dimension of `x` but the first two.
    Pads(i32),
    /// One boolean for each dimension of `x`.
    RankBool(bool),
}

impl DefaultValue {
    /// Constant for data of type `float` and rank `rank`.
    pub fn constant(&self, float: DataType, rank: usize) -> Constant {
        let spatial = rank.saturating_sub(2);
        match self {
            DefaultValue::Bool(value) => Constant::bool(*value),
            DefaultValue::Int(value) => Constant::int32(*value),
            DefaultValue::Float(value) if float == DataType::Fp32 => Constant::fp32(*value),
            DefaultValue::Float(value) => Constant::fp16(*value),
            DefaultValue::Text(text) => Constant::string(text),
            DefaultValue::Rank(value) => Constant::int32s(&vec![*value; rank]),
            DefaultValue::Spatial(value) => Constant::int32s(&vec![*value; spatial]),
            DefaultValue::Pads(value) => Constant::int32s(&vec![*value; 2 * spatial]),
            DefaultValue::RankBool(value) => Constant::bools(&vec![*value; rank]),
        }
    }
}

/// Inference of result types from arguments; errors say what was found and expected.
pub type Infer = fn(&Arguments<'_>) -> Result<Vec<ValueType>, String>;

/// A row as written in `ops/`: operator, first opset, parameters, inference.
pub type Row = (&'static str, Opset, &'static str, Infer);

/// Specification of an operator in one opset.
#[derive(Clone, Debug)]
pub struct OpSpec {
    /// Name in packages.
    pub name: &'static str,
    /// Opset that introduced this form.
    pub since: Opset,
    /// Parameters, in the order of the text form.
    pub parameters: Vec<Parameter>,
    infer: Infer,
}

impl OpSpec {
    /// Combines a row with element types.
    fn new((name, _, parameters, infer): Row, since: Opset, elements: Option<&element_types::ElementForm>) -> OpSpec {
        let mut parameters: Vec<Parameter> = parameters.split_whitespace().map(parameter).collect();
        for parameter in &mut parameters {
            parameter.elements = elements.and_then(|form| form.get(parameter.name)).cloned().unwrap_or_default();
        }
        OpSpec { name, since, parameters, infer }
    }

    /// Returns the parameter with this name.
    pub fn parameter(&self, name: &str) -> Option<&Parameter> {
        self.parameters.iter().find(|p| p.name == name)
    }

    /// Returns whether ops have nested blocks, which their inference checks.
    pub fn takes_blocks(&self) -> bool {
        matches!(self.name, "cond" | "while_loop")
    }

    /// Infers the types of an op's results, after checking the element types of its arguments.
    ///
    /// # Errors
    /// Returns a sentence: found and expected.
    pub fn results(&self, arguments: &Arguments<'_>) -> Result<Vec<ValueType>, String> {
        self.check_elements(arguments)?;
        let types = (self.infer)(arguments)?;
        let dims = types.iter().filter_map(ValueType::tensor).flat_map(|ty| &ty.shape);
        match dims.filter_map(Dim::fixed).find(|size| *size > Dim::MAX) {
            Some(size) => Err(format!("a result would have {size} elements along one axis")),
            None => Ok(types),
        }
    }

    fn check_elements(&self, arguments: &Arguments<'_>) -> Result<(), String> {
        let mut shared: BTreeMap<&str, (&str, DataType)> = BTreeMap::new();
        for Parameter { name, elements, .. } in self.parameters.iter().filter(|p| !p.elements.any_of.is_empty()) {
            let Some(TensorType { dtype, .. }) = arguments.optional_tensor(name)? else { continue };
            if !elements.any_of.contains(dtype) {
                let names: Vec<&str> = elements.any_of.iter().map(|dtype| dtype.name()).collect();
                return Err(format!("`{name}` is {dtype}; expected {}", names.join(" or ")));
            }
            if let Some(word) = elements.shared {
                let (other, known) = *shared.entry(word).or_insert((name, *dtype));
                if known != *dtype {
                    return Err(format!("`{other}` is {known} and `{name}` is {dtype}; both must be the same type"));
                }
            }
        }
        Ok(())
    }
}

fn parameter(text: &'static str) -> Parameter {
    let (name, default) = match text.split_once('=') {
        Some((name, default)) => (name, Some(default)),
        None => (text, None),
    };
    let bare = name.trim_end_matches(['!', '?', '*']);
    let flag = |c: char| name[bare.len()..].contains(c);
    Parameter {
        name: bare,
        optional: flag('?'),
        default: default.map(default_value),
        variadic: flag('*'),
        constant: flag('!'),
        elements: ElementTypes::default(),
    }
}

fn default_value(text: &'static str) -> DefaultValue {
    let number = |text: &str| text.parse().unwrap_or(0);
    match text.split_once(':') {
        Some(("rank", "false")) => DefaultValue::RankBool(false),
        Some(("rank", value)) => DefaultValue::Rank(number(value)),
        Some(("spatial", value)) => DefaultValue::Spatial(number(value)),
        Some((_, value)) => DefaultValue::Pads(number(value)),
        None if text.starts_with('"') => DefaultValue::Text(text.trim_matches('"')),
        None => match (text.parse::<bool>(), text.parse::<i32>()) {
            (Ok(value), _) => DefaultValue::Bool(value),
            (_, Ok(value)) => DefaultValue::Int(value),
            _ => DefaultValue::Float(text.parse().unwrap_or(0.0)),
        },
    }
}

/// One form for each opset in which a row or its element types changed.
static TABLE: LazyLock<Vec<OpSpec>> = LazyLock::new(|| {
    let (rows, forms) = (ops::rows(), element_types::forms());
    let mut table = Vec::new();
    for row in &rows {
        let (name, since, ..) = *row;
        let until = rows.iter().filter(|other| other.0 == name && other.1 > since).map(|other| other.1).min();
        let forms = forms.get(name).map_or(&[][..], Vec::as_slice);
        let changes = forms.iter().map(|(opset, _)| *opset).filter(|o| *o > since && until.is_none_or(|u| *o < u));
        for opset in std::iter::once(since).chain(changes) {
            let elements = forms.iter().rev().find(|(first, _)| *first <= opset).map(|(_, form)| form);
            table.push(OpSpec::new(*row, opset, elements));
        }
    }
    table
});

static BY_NAME: LazyLock<HashMap<&'static str, Vec<&'static OpSpec>>> = LazyLock::new(|| {
    let mut by_name: HashMap<&'static str, Vec<&'static OpSpec>> = HashMap::new();
    for spec in TABLE.iter() {
        by_name.entry(spec.name).or_default().push(spec);
    }
    by_name.values_mut().for_each(|forms| forms.sort_by_key(|spec| spec.since));
    by_name
});

/// Returns the form of an operator in an opset, if the catalogue has one.
pub fn lookup(operator: &str, opset: Opset) -> Option<&'static OpSpec> {
    BY_NAME.get(operator)?.iter().rev().find(|spec| spec.since <= opset).copied()
}

/// Returns the first opset with the operator, if the catalogue has it.
pub fn first_opset(operator: &str) -> Option<Opset> {
    BY_NAME.get(operator)?.first().map(|spec| spec.since)
}

/// Returns all rows.
pub fn table() -> &'static [OpSpec] {
    &TABLE
}
