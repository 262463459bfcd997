//! The table of ops: one row for each operator, with its parameters, their defaults and the inference of result types.
//!
//! The verifier, the builder, the text form and the executor's checks read this one table. An operator whose
//! parameters changed with an opset has a row for each form; [`lookup`] gives the newest that an opset has.
//!
//! Rows live in `ops/`, by group. A row's parameters are written as one line: `x weight bias? groups!=1` means that `x` and
//! `weight` must be given, `bias` may be left out, and `groups` must be known when the graph is built (`!`) and is 1
//! where it isn't given. `values*` takes a list. Defaults: `true`, `7`, `1.5` (in the type of the op's data), `"text"`,
//! `rank:0` (one for each dimension of `x`), `spatial:1` (one for each but the first two), `pads:0` (two for each of
//! those).

use std::collections::{BTreeMap, HashMap};
use std::sync::LazyLock;

use super::constant::Constant;
use super::ir::{Argument, Function};
use super::ops;
use super::types::{DataType, Opset, TensorType, ValueType};

/// One parameter of an operator.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Its name in the package.
    pub name: &'static str,
    /// Whether it must be given, or what stands in for it.
    pub presence: Presence,
    /// Takes a list of bindings (`values` of `concat`).
    pub variadic: bool,
    /// Must be known when the graph is built.
    pub constant: bool,
    /// Has a default that the runtime knows, too: coremltools leaves it out.
    pub unwritten: bool,
}

/// Whether a parameter must be given.
#[derive(Clone, Debug, PartialEq)]
pub enum Presence {
    /// Must be given.
    Required,
    /// May be left out, and then isn't written (`bias` of `conv`).
    Optional,
    /// May be left out when building; then this is written. Core ML's runtime has no defaults of its own.
    Default(DefaultValue),
}

/// What stands in for a parameter that isn't given.
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
    /// One for each dimension of `x`.
    Rank(i32),
    /// One for each dimension of `x` but the first two.
    Spatial(i32),
    /// Two for each dimension of `x` but the first two.
    Pads(i32),
    /// A boolean for each dimension of `x`.
    RankBool(bool),
}

impl DefaultValue {
    /// The constant, for data of type `float` and rank `rank`.
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

/// Result types from arguments, or a sentence: what was found, what was expected.
pub type Infer = fn(&Arguments<'_>) -> Result<Vec<ValueType>, String>;

/// A row as it is written in `ops/`: operator, opset it appeared in, parameters, inference.
pub type Row = (&'static str, Opset, &'static str, Infer);

/// One operator, as of one opset.
#[derive(Clone, Debug)]
pub struct OpSpec {
    /// Its name in the package.
    pub name: &'static str,
    /// The opset that this form appeared in.
    pub since: Opset,
    /// Parameters, in the order of the text form.
    pub parameters: Vec<Parameter>,
    /// Type inference.
    pub infer: Infer,
}

impl OpSpec {
    fn new((name, since, parameters, infer): Row) -> OpSpec {
        OpSpec { name, since, parameters: parameters.split_whitespace().map(parameter).collect(), infer }
    }

    /// A parameter.
    pub fn parameter(&self, name: &str) -> Option<&Parameter> {
        self.parameters.iter().find(|p| p.name == name)
    }
}

fn parameter(text: &'static str) -> Parameter {
    let (name, default) = match text.split_once('=') {
        Some((name, default)) => (name, Some(default)),
        None => (text, None),
    };
    let bare = name.trim_end_matches(['!', '?', '*']);
    let flag = |c: char| name[bare.len()..].contains(c);
    let presence = match default {
        Some(default) => Presence::Default(default_value(default)),
        None if flag('?') => Presence::Optional,
        None => Presence::Required,
    };
    let unwritten = flag('?') && default.is_some();
    Parameter { name: bare, presence, variadic: flag('*'), constant: flag('!'), unwritten }
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

/// What type inference sees of an op.
pub struct Arguments<'a> {
    /// The function so far.
    pub function: &'a Function,
    /// Arguments by parameter.
    pub inputs: &'a BTreeMap<String, Argument>,
    /// Attributes (`const`, older constexpr forms).
    pub attributes: &'a BTreeMap<String, Constant>,
}

impl<'a> Arguments<'a> {
    /// The tensor type of a parameter that must be there.
    ///
    /// # Errors
    /// A sentence naming the parameter.
    pub fn tensor(&self, parameter: &str) -> Result<&'a TensorType, String> {
        match self.optional_tensor(parameter)? {
            Some(ty) => Ok(ty),
            None => Err(format!("parameter `{parameter}` is missing")),
        }
    }

    /// The tensor type of a parameter that may be left out.
    ///
    /// # Errors
    /// A sentence naming the parameter, when it is there but isn't one tensor.
    pub fn optional_tensor(&self, parameter: &str) -> Result<Option<&'a TensorType>, String> {
        let binding = match self.inputs.get(parameter).map(Vec::as_slice) {
            Some([one]) => one,
            Some(several) => return Err(format!("parameter `{parameter}` takes one value, not {}", several.len())),
            None => return Ok(self.attributes.get(parameter).map(|c| &c.ty)),
        };
        let ty = self.function.binding_type(binding);
        ty.map(Some).ok_or_else(|| format!("parameter `{parameter}` is not a tensor"))
    }

    /// The tensor types of a parameter that takes a list.
    ///
    /// # Errors
    /// A sentence naming the parameter.
    pub fn tensors(&self, parameter: &str) -> Result<Vec<&'a TensorType>, String> {
        let bindings = self.inputs.get(parameter).filter(|b| !b.is_empty());
        let bindings = bindings.ok_or_else(|| format!("parameter `{parameter}` is missing"))?;
        let ty = |binding| self.function.binding_type(binding);
        bindings
            .iter()
            .map(|b| ty(b).ok_or_else(|| format!("`{parameter}` holds something else than tensors")))
            .collect()
    }

    /// The constant given for a parameter, if it is one.
    pub fn constant(&self, parameter: &str) -> Option<&'a Constant> {
        match self.inputs.get(parameter).map(Vec::as_slice) {
            Some([one]) => self.function.constant(one),
            _ => self.attributes.get(parameter),
        }
    }

    /// The integers of a parameter that must be a constant.
    ///
    /// # Errors
    /// A sentence naming the parameter.
    pub fn integers(&self, parameter: &str) -> Result<Vec<i64>, String> {
        self.optional_integers(parameter).ok_or_else(|| format!("parameter `{parameter}` must be constant integers"))
    }

    /// The integers of a parameter, if it is a constant.
    pub fn optional_integers(&self, parameter: &str) -> Option<Vec<i64>> {
        self.constant(parameter).and_then(Constant::as_integers)
    }

    /// The one integer of a parameter that must be a constant.
    ///
    /// # Errors
    /// A sentence naming the parameter.
    pub fn integer(&self, parameter: &str) -> Result<i64, String> {
        let constant = self.constant(parameter).and_then(Constant::as_integer);
        constant.ok_or_else(|| format!("parameter `{parameter}` must be a constant integer"))
    }

    /// The boolean of a parameter, or false.
    pub fn flag(&self, parameter: &str) -> bool {
        self.constant(parameter).and_then(Constant::as_bool).unwrap_or(false)
    }

    /// The text of a parameter, if it is a constant string.
    pub fn text(&self, parameter: &str) -> Option<&'a str> {
        self.constant(parameter).and_then(Constant::as_str)
    }
}

static TABLE: LazyLock<Vec<OpSpec>> = LazyLock::new(|| ops::rows().into_iter().map(OpSpec::new).collect());

static BY_NAME: LazyLock<HashMap<&'static str, Vec<&'static OpSpec>>> = LazyLock::new(|| {
    let mut by_name: HashMap<&'static str, Vec<&'static OpSpec>> = HashMap::new();
    for spec in TABLE.iter() {
        by_name.entry(spec.name).or_default().push(spec);
    }
    by_name.values_mut().for_each(|forms| forms.sort_by_key(|spec| spec.since));
    by_name
});

/// The form of an operator that an opset has, if the catalogue knows one.
pub fn lookup(operator: &str, opset: Opset) -> Option<&'static OpSpec> {
    BY_NAME.get(operator)?.iter().rev().find(|spec| spec.since <= opset).copied()
}

/// The first opset that has the operator, if the catalogue knows it at all.
pub fn first_opset(operator: &str) -> Option<Opset> {
    BY_NAME.get(operator)?.first().map(|spec| spec.since)
}

/// All rows.
pub fn table() -> &'static [OpSpec] {
    &TABLE
}
