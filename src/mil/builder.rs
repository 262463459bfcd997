//! Builder of functions, op by op. Types are inferred as ops are added. The first error is recorded and returned by
//! [`FunctionBuilder::finish`], so that code that builds a graph reads like its equations.

mod inline;
mod shorthand;

use std::collections::BTreeMap;

// its hash takes a third of the time of the standard library's
use hashbrown::HashSet;
use smallvec::{SmallVec, smallvec};

use super::catalogue::{self, Arguments};
use super::constant::Constant;
use super::error::MilError;
use super::ir::{Argument, Binding, Block, Function, Op, ParameterMap, SymbolRange, Value, ValueId};
use super::types::{DataType, Opset, Symbol, TensorType, ValueType};

/// A builder of one function.
pub struct FunctionBuilder {
    function: Function,
    names: HashSet<String>,
    /// Prefix of names within the current scopes.
    prefix: String,
    /// Lengths of the prefix outside of each scope.
    scopes: Vec<usize>,
    error: Option<MilError>,
}

impl FunctionBuilder {
    /// Creates an empty function.
    pub fn new(name: &str, opset: Opset) -> Self {
        FunctionBuilder {
            function: Function {
                name: name.to_owned(),
                opset,
                inputs: Vec::new(),
                values: Vec::new(),
                block: Block::default(),
                lengths: BTreeMap::new(),
            },
            names: HashSet::new(),
            prefix: String::new(),
            scopes: Vec::new(),
            error: None,
        }
    }

    /// Declares a symbol and the sizes it may take.
    pub fn symbol(&mut self, name: &str, lengths: SymbolRange) -> Symbol {
        let symbol = Symbol::new(name);
        self.function.lengths.insert(symbol.clone(), lengths);
        symbol
    }

    /// Adds an input tensor; its name isn't prefixed.
    pub fn input(&mut self, name: &str, ty: TensorType) -> ValueId {
        let id = self.define(name.to_owned(), ty.into(), None);
        self.function.inputs.push(id);
        id
    }

    /// Adds a state.
    pub fn state(&mut self, name: &str, ty: TensorType) -> ValueId {
        let id = self.define(name.to_owned(), ValueType::State(ty), None);
        self.function.inputs.push(id);
        id
    }

    /// Prefixes the names of added values with `scope_` until [`leave`](Self::leave); scopes nest.
    pub fn enter(&mut self, scope: &str) {
        self.scopes.push(self.prefix.len());
        self.prefix.extend([scope, "_"]);
    }

    /// Leaves the innermost scope.
    pub fn leave(&mut self) {
        self.prefix.truncate(self.scopes.pop().unwrap_or_default());
    }

    /// Renames a value within the current scopes; returns the value.
    pub fn rename(&mut self, value: ValueId, name: &str) -> ValueId {
        let name = self.unique(name);
        let old = std::mem::replace(&mut self.function.values[value.0 as usize].name, name.clone());
        self.names.remove(&old);
        self.names.insert(name);
        value
    }

    /// Type of a value.
    pub fn ty(&self, id: ValueId) -> TensorType {
        self.function.tensor_type(id).cloned().unwrap_or_else(|| TensorType::scalar(DataType::Fp16))
    }

    /// Opset of the function.
    pub fn opset(&self) -> Opset {
        self.function.opset
    }

    /// Adds a `const` op with a name of its own.
    pub fn constant(&mut self, name: &str, constant: Constant) -> ValueId {
        let name = self.unique(name);
        self.add_constant(name, constant)
    }

    fn add_constant(&mut self, name: String, constant: Constant) -> ValueId {
        if !constant.is_consistent() {
            self.fail(&name, "const", format!("the data of {constant:?} doesn't fill its type"));
        }
        let ty = ValueType::Tensor(constant.ty.clone());
        let id = self.define(name.clone(), ty, Some(constant.clone()));
        let mut attributes = ParameterMap::with_capacity(1);
        attributes.insert("val".into(), constant);
        self.function.block.ops.push(Op {
            operator: "const".into(),
            name,
            inputs: ParameterMap::new(),
            attributes,
            outputs: smallvec![id],
            blocks: Vec::new(),
        });
        id
    }

    /// Adds an op with one result. Constants among the arguments become `const` ops named after op and parameter.
    /// Omitted parameters get their default.
    pub fn op<A: Into<OpInput>>(
        &mut self,
        operator: &str,
        name: &str,
        inputs: impl IntoIterator<Item = (&'static str, A)>,
    ) -> ValueId {
        let outputs = self.op_with_outputs(operator, name, inputs);
        match outputs.first() {
            Some(id) => *id,
            None => {
                self.fail(name, operator, "the op has no result, one is needed".into());
                self.define(format!("{name}_missing"), TensorType::scalar(DataType::Fp16).into(), None)
            }
        }
    }

    /// Adds an op with any number of results (`split` has several, `write_state` none).
    pub fn op_with_outputs<A: Into<OpInput>>(
        &mut self,
        operator: &str,
        name: &str,
        inputs: impl IntoIterator<Item = (&'static str, A)>,
    ) -> SmallVec<[ValueId; 2]> {
        // generic code is compiled for each caller, so it is kept small
        self.add_op(operator, name, inputs.into_iter().map(|(parameter, input)| (parameter, input.into())).collect())
    }

    fn add_op(&mut self, operator: &str, name: &str, given: Vec<(&'static str, OpInput)>) -> SmallVec<[ValueId; 2]> {
        let name = self.unique(name);
        let mut arguments: ParameterMap<Argument> = ParameterMap::with_capacity(given.len());
        let mut float = DataType::Fp16;
        for (_, argument) in &given {
            if let OpInput::Value(id) = argument
                && let Some(t) = self.function.tensor_type(*id)
                && t.dtype.is_float()
            {
                float = t.dtype;
                break;
            }
        }
        // constexpr ops contain their constants, the older ones as attributes; all others refer to `const` ops
        let inline = operator.starts_with("constexpr_");
        for (parameter, argument) in given {
            let argument = match argument {
                OpInput::Value(id) => smallvec![Binding::Value(id)],
                OpInput::Values(ids) => ids.into_iter().map(Binding::Value).collect(),
                OpInput::Constant(c) if inline => smallvec![Binding::Constant(Box::new(c))],
                OpInput::Constant(c) => smallvec![Binding::Value(self.parameter(&name, parameter, c))],
                OpInput::Absent => continue,
            };
            arguments.insert(parameter.into(), argument);
        }
        let Some(spec) = catalogue::lookup(operator, self.function.opset) else {
            let opset = self.function.opset.name();
            self.fail(&name, operator, format!("the catalogue doesn't know this operator in {opset}"));
            return smallvec![self.define(name, TensorType::scalar(float).into(), None)];
        };
        let rank = arguments.get("x").and_then(|x| self.function.binding_type(x.first()?)).map_or(0, TensorType::rank);
        for parameter in &spec.parameters {
            if let Some(default) = &parameter.default
                && !arguments.contains_key(parameter.name)
            {
                let id = self.parameter(&name, parameter.name, default.constant(float, rank));
                arguments.insert(parameter.name.into(), smallvec![Binding::Value(id)]);
            }
        }
        if let Some(unknown) = arguments.keys().find(|given| spec.parameter(given).is_none()) {
            let problem = format!("there is no parameter `{unknown}`");
            self.fail(&name, operator, problem);
        }
        let mut attributes = ParameterMap::new();
        if inline && spec.since < Opset::CoreMl8 {
            for (parameter, argument) in std::mem::take(&mut arguments) {
                match argument.into_inner() {
                    Ok([Binding::Constant(constant)]) => _ = attributes.insert(parameter, *constant),
                    _ => self.fail(&name, operator, format!("`{parameter}` must be a constant")),
                }
            }
        }
        let given = Arguments { function: &self.function, inputs: &arguments, attributes: &attributes, blocks: &[] };
        let types = match spec.results(&given) {
            Ok(types) => types,
            Err(problem) => {
                self.fail(&name, operator, problem);
                vec![TensorType::scalar(float).into()]
            }
        };
        let several = types.len() > 1;
        let outputs: SmallVec<[ValueId; 2]> = types
            .into_iter()
            .enumerate()
            .map(|(i, ty)| {
                let output = if several { self.unique_absolute(format!("{name}_{i}")) } else { name.clone() };
                self.define(output, ty, None)
            })
            .collect();
        // otherwise the name is that of the result
        if outputs.len() != 1 {
            self.names.insert(name.clone());
        }
        self.function.block.ops.push(Op {
            operator: operator.into(),
            name,
            inputs: arguments,
            attributes,
            outputs: outputs.clone(),
            blocks: Vec::new(),
        });
        outputs
    }

    /// Makes a value an output with this name. An input or a value that is already an output passes through `identity`.
    pub fn output(&mut self, name: &str, value: ValueId) {
        let taken = self.function.inputs.contains(&value) || self.function.block.outputs.contains(&value);
        let value = if taken { self.op("identity", "identity", [("x", value)]) } else { value };
        if !self.names.insert(name.to_owned()) {
            self.fail(name, "output", "the name is taken by another value".into());
        }
        let old = std::mem::replace(&mut self.function.values[value.0 as usize].name, name.to_owned());
        self.names.remove(&old);
        self.function.block.outputs.push(value);
    }

    /// Returns the function.
    ///
    /// # Errors
    /// Returns the first error recorded while building: an op whose arguments didn't fit.
    pub fn finish(self) -> Result<Function, MilError> {
        match self.error {
            Some(error) => Err(error),
            None => Ok(self.function),
        }
    }

    /// Records an error found by a block.
    pub fn fail(&mut self, op: &str, operator: &str, problem: String) {
        if self.error.is_none() {
            self.error = Some(MilError::Op {
                function: self.function.name.clone(),
                op: op.to_owned(),
                operator: operator.to_owned(),
                problem,
            });
        }
    }

    fn parameter(&mut self, op: &str, parameter: &str, constant: Constant) -> ValueId {
        let name = self.unique_absolute([op, "_", parameter].concat());
        self.add_constant(name, constant)
    }

    fn define(&mut self, name: String, ty: ValueType, constant: Option<Constant>) -> ValueId {
        self.names.insert(name.clone());
        let id = ValueId(self.function.values.len() as u32);
        self.function.values.push(Value { name, ty, constant });
        id
    }

    fn unique(&self, name: &str) -> String {
        self.unique_absolute([&self.prefix, name].concat())
    }

    fn unique_absolute(&self, full: String) -> String {
        if !self.names.contains(&full) {
            return full;
        }
        (1u32..).map(|n| format!("{full}_{n}")).find(|n| !self.names.contains(n)).unwrap_or(full)
    }
}

/// Argument of an op under construction.
pub enum OpInput {
    /// A value.
    Value(ValueId),
    /// A list of values.
    Values(Vec<ValueId>),
    /// A constant, which becomes a `const` op.
    Constant(Constant),
    /// Omitted.
    Absent,
}

impl From<ValueId> for OpInput {
    fn from(id: ValueId) -> Self {
        OpInput::Value(id)
    }
}

impl From<Vec<ValueId>> for OpInput {
    fn from(ids: Vec<ValueId>) -> Self {
        OpInput::Values(ids)
    }
}

impl From<Constant> for OpInput {
    fn from(constant: Constant) -> Self {
        OpInput::Constant(constant)
    }
}

impl<T: Into<OpInput>> From<Option<T>> for OpInput {
    fn from(given: Option<T>) -> Self {
        given.map_or(OpInput::Absent, Into::into)
    }
}
