//! Arguments of an op for type inference.

use crate::constant::Constant;
use crate::ir::{Argument, Binding, Block, Function, Op, ParameterMap};
use crate::types::{TensorType, ValueType};

/// Arguments of an op.
pub struct Arguments<'a> {
    /// Function under construction.
    pub function: &'a Function,
    /// Arguments by parameter.
    pub inputs: &'a ParameterMap<Argument>,
    /// Attributes (`const`, older constexpr forms).
    pub attributes: &'a ParameterMap<Constant>,
    /// Nested blocks.
    pub blocks: &'a [Block],
}

impl<'a> Arguments<'a> {
    /// Arguments of an op of the function.
    pub fn of(function: &'a Function, op: &'a Op) -> Self {
        Arguments { function, inputs: &op.inputs, attributes: &op.attributes, blocks: &op.blocks }
    }

    /// Tensor type of a required parameter.
    ///
    /// # Errors
    /// Returns a sentence naming the parameter.
    pub fn tensor(&self, parameter: &str) -> Result<&'a TensorType, String> {
        match self.optional_tensor(parameter)? {
            Some(ty) => Ok(ty),
            None => Err(format!("parameter `{parameter}` is missing")),
        }
    }

    /// Tensor type of an optional parameter.
    ///
    /// # Errors
    /// Returns a sentence naming the parameter if it isn't one tensor.
    pub fn optional_tensor(&self, parameter: &str) -> Result<Option<&'a TensorType>, String> {
        let binding = match self.inputs.get(parameter).map(Argument::as_slice) {
            Some([one]) => one,
            Some(several) => return Err(format!("parameter `{parameter}` takes one value, not {}", several.len())),
            None => return Ok(self.attributes.get(parameter).map(|c| &c.ty)),
        };
        self.tensor_of(parameter, binding).map(Some)
    }

    /// Tensor types of a parameter that takes a list.
    ///
    /// # Errors
    /// Returns a sentence naming the parameter.
    pub fn tensors(&self, parameter: &str) -> Result<Vec<&'a TensorType>, String> {
        let bindings = self.inputs.get(parameter).filter(|b| !b.is_empty());
        let bindings = bindings.ok_or_else(|| format!("parameter `{parameter}` is missing"))?;
        bindings.iter().map(|binding| self.tensor_of(parameter, binding)).collect()
    }

    /// Types of a parameter that takes a list of any values; empty if omitted.
    pub fn types(&self, parameter: &str) -> Vec<ValueType> {
        let bindings = self.inputs.get(parameter).into_iter().flatten();
        let of = |binding: &Binding| match binding {
            Binding::Constant(constant) => ValueType::Tensor(constant.ty.clone()),
            Binding::Value(id) => self.function.value(*id).ty.clone(),
        };
        bindings.map(of).collect()
    }

    fn tensor_of(&self, parameter: &str, binding: &'a Binding) -> Result<&'a TensorType, String> {
        let ty = match binding {
            Binding::Constant(constant) => return Ok(&constant.ty),
            Binding::Value(id) => &self.function.value(*id).ty,
        };
        match ty {
            ValueType::Tensor(ty) => Ok(ty),
            ValueType::State(_) => Err(format!("`{parameter}` is a state; expected what `read_state` reads from it")),
            ValueType::Opaque(_) => Err(format!("`{parameter}` is {ty}; expected a tensor")),
        }
    }

    /// Constant argument of a parameter, if it is one.
    pub fn constant(&self, parameter: &str) -> Option<&'a Constant> {
        match self.inputs.get(parameter).map(Argument::as_slice) {
            Some([one]) => self.function.constant(one),
            _ => self.attributes.get(parameter),
        }
    }

    /// Constants of a parameter that takes a list of them.
    ///
    /// # Errors
    /// Returns a sentence naming the parameter.
    pub fn constants(&self, parameter: &str) -> Result<Vec<&'a Constant>, String> {
        let bindings = self.inputs.get(parameter).map_or(&[][..], Argument::as_slice);
        let constants = bindings.iter().map(|binding| self.function.constant(binding)).collect::<Option<Vec<_>>>();
        constants.ok_or_else(|| format!("parameter `{parameter}` must be constants"))
    }

    /// Integers of a parameter that must be constant.
    ///
    /// # Errors
    /// Returns a sentence naming the parameter.
    pub fn integers(&self, parameter: &str) -> Result<Vec<i64>, String> {
        self.optional_integers(parameter).ok_or_else(|| format!("parameter `{parameter}` must be constant integers"))
    }

    /// Integers of a parameter if it is constant.
    pub fn optional_integers(&self, parameter: &str) -> Option<Vec<i64>> {
        self.constant(parameter).and_then(Constant::as_integers)
    }

    /// Integer of a parameter that must be constant.
    ///
    /// # Errors
    /// Returns a sentence naming the parameter.
    pub fn integer(&self, parameter: &str) -> Result<i64, String> {
        let constant = self.constant(parameter).and_then(Constant::as_integer);
        constant.ok_or_else(|| format!("parameter `{parameter}` must be a constant integer"))
    }

    /// Boolean of a parameter; false if omitted.
    pub fn flag(&self, parameter: &str) -> bool {
        self.constant(parameter).and_then(Constant::as_bool).unwrap_or(false)
    }

    /// Text of a parameter if it is a constant string.
    pub fn text(&self, parameter: &str) -> Option<&'a str> {
        self.constant(parameter).and_then(Constant::as_str)
    }
}
