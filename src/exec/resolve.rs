//! Resolution of an op: named arguments become fields of a kernel, once, at compile time.

use std::sync::Arc;

use super::kernel::{Input, Inputs, Integers, Matrix, Numbers, integers_of};
use super::operand::Operand;
use super::tensor::{Tensor, TensorData};
use super::value::Value;
use super::weight::LoadedWeight;
use anec_mil::{DataType, TensorType};

/// Arguments of an op while its kernel is resolved.
pub(crate) struct Resolver<'a> {
    /// Arguments by parameter.
    arguments: &'a [(&'a str, Vec<Operand>)],
    /// Declared types of the results.
    types: &'a [TensorType],
    /// Operands that the kernel asked for, by position.
    operands: Vec<Operand>,
    /// First position of each parameter's arguments.
    places: Vec<(&'a str, usize)>,
}

impl<'a> Resolver<'a> {
    /// Resolver for an op with these arguments and result types.
    pub fn new(arguments: &'a [(&'a str, Vec<Operand>)], types: &'a [TensorType]) -> Self {
        Resolver { arguments, types, operands: Vec::new(), places: Vec::new() }
    }

    /// Operands for calls of the kernel.
    pub fn into_operands(self) -> Vec<Operand> {
        self.operands
    }

    fn given(&self, parameter: &str) -> Option<&'a (&'a str, Vec<Operand>)> {
        self.arguments.iter().find(|(name, operands)| *name == parameter && !operands.is_empty())
    }

    /// Returns whether a parameter is present.
    pub fn has(&self, parameter: &str) -> bool {
        self.given(parameter).is_some()
    }

    fn operand(&self, parameter: &str) -> Result<Option<&'a Operand>, String> {
        match self.given(parameter).map(|(_, operands)| operands.as_slice()) {
            None => Ok(None),
            Some([one]) => Ok(Some(one)),
            Some(several) => Err(format!("parameter `{parameter}` takes one value, {} are given", several.len())),
        }
    }

    /// Required argument.
    pub fn input(&mut self, parameter: &'static str) -> Result<Input, String> {
        self.optional_input(parameter)?.ok_or_else(|| format!("parameter `{parameter}` is missing"))
    }

    /// Required argument of a product. From iOS17 on, a constant may hold integers beside floats, or floats beside
    /// integers; it is converted to the kind of the result.
    pub fn factor(&mut self, parameter: &'static str) -> Result<Input, String> {
        let (input, dtype) = (self.input(parameter)?, self.dtype());
        if let Operand::Constant(Value::Tensor(tensor)) = &mut self.operands[input.place] {
            *tensor = converted(tensor, dtype);
        }
        Ok(input)
    }

    /// Optional argument.
    pub fn optional_input(&mut self, parameter: &'static str) -> Result<Option<Input>, String> {
        if self.operand(parameter)?.is_none() {
            return Ok(None);
        }
        Ok(self.inputs(parameter)?.iter().next())
    }

    /// Arguments of a parameter that takes a list.
    pub fn inputs(&mut self, parameter: &'static str) -> Result<Inputs, String> {
        let (name, operands) = self.given(parameter).ok_or_else(|| format!("parameter `{parameter}` is missing"))?;
        let known = self.places.iter().find(|(other, _)| other == name).map(|(_, first)| *first);
        let first = known.unwrap_or_else(|| {
            self.places.push((*name, self.operands.len()));
            self.operands.extend(operands.iter().cloned());
            self.operands.len() - operands.len()
        });
        Ok(Inputs { places: first..first + operands.len(), name: parameter })
    }

    /// Constant argument.
    fn constant(&self, parameter: &str) -> Result<Option<&'a Value>, String> {
        match self.operand(parameter)? {
            None => Ok(None),
            Some(Operand::Constant(value)) => Ok(Some(value)),
            Some(Operand::Slot { .. }) => Err(format!("parameter `{parameter}` must be a constant")),
        }
    }

    fn constant_tensor(&self, parameter: &str) -> Result<Option<&'a Arc<Tensor>>, String> {
        let Some(value) = self.constant(parameter)? else { return Ok(None) };
        value.tensor().map(Some).ok_or_else(|| format!("parameter `{parameter}` is not a tensor"))
    }

    /// Integers, constant or computed.
    pub fn integers(&mut self, parameter: &'static str) -> Result<Integers, String> {
        match self.operand(parameter)? {
            Some(Operand::Slot { .. }) => self.input(parameter).map(Integers::Computed),
            _ => {
                let tensor = self.constant_tensor(parameter)?;
                let tensor = tensor.ok_or_else(|| format!("parameter `{parameter}` is missing"))?;
                Ok(Integers::Known(integers_of(tensor, parameter)?.into_boxed_slice()))
            }
        }
    }

    /// Constant integers, if the parameter is present.
    pub fn known_integers(&self, parameter: &str) -> Result<Option<Numbers>, String> {
        self.constant_tensor(parameter)?.map(|tensor| integers_of(tensor, parameter)).transpose()
    }

    /// Constant integers or booleans of a parameter that takes a list of them.
    pub fn list_of_integers(&self, parameter: &str) -> Result<Vec<i64>, String> {
        let (_, operands) = self.given(parameter).ok_or_else(|| format!("parameter `{parameter}` is missing"))?;
        let number = |operand: &Operand| match operand {
            Operand::Constant(Value::Tensor(tensor)) => match integers_of(tensor, parameter)?.as_slice() {
                [one] => Ok(*one),
                several => Err(format!("`{parameter}` takes scalars, one has {} elements", several.len())),
            },
            _ => Err(format!("parameter `{parameter}` must be constants")),
        };
        operands.iter().map(number).collect()
    }

    /// Constant integer.
    pub fn integer(&self, parameter: &str) -> Result<i64, String> {
        let integers = self.known_integers(parameter)?;
        match integers.ok_or_else(|| format!("parameter `{parameter}` is missing"))?.as_slice() {
            [one] => Ok(*one),
            several => Err(format!("parameter `{parameter}` takes one integer, {} are given", several.len())),
        }
    }

    /// Constant float; an integer counts as a float.
    pub fn float(&self, parameter: &str) -> Result<f32, String> {
        let tensor = self.constant_tensor(parameter)?;
        match &tensor.ok_or_else(|| format!("parameter `{parameter}` is missing"))?.data {
            TensorData::F32(v) if v.len() == 1 => Ok(v[0]),
            TensorData::I32(v) if v.len() == 1 => Ok(v[0] as f32),
            _ => Err(format!("parameter `{parameter}` takes one number")),
        }
    }

    /// Constant sizes, `N` of them.
    pub fn sizes<const N: usize>(&self, parameter: &str) -> Result<[usize; N], String> {
        let numbers = self.known_integers(parameter)?.ok_or_else(|| format!("parameter `{parameter}` is missing"))?;
        let sizes: Option<Vec<usize>> =
            numbers.iter().map(|n| usize::try_from(*n).ok().filter(|n| *n < 1 << 31)).collect();
        let sizes = sizes.and_then(|sizes| <[usize; N]>::try_from(sizes).ok());
        let count = if N == 2 { "two".to_owned() } else { N.to_string() };
        sizes.ok_or_else(|| format!("`{parameter}` is {numbers:?}; expected {count} sizes"))
    }

    /// Constant tensor, if the parameter is present.
    pub fn known_tensor(&self, parameter: &str) -> Result<Option<Arc<Tensor>>, String> {
        Ok(self.constant_tensor(parameter)?.cloned())
    }

    /// Constant floats, if the parameter is present.
    pub fn constant_floats(&self, parameter: &str) -> Result<Option<&'a [f32]>, String> {
        let Some(tensor) = self.constant_tensor(parameter)? else { return Ok(None) };
        let floats = tensor.floats().map(Some);
        floats.ok_or_else(|| format!("parameter `{parameter}` holds {}, not floats", tensor.data.kind()))
    }

    /// Constant boolean.
    pub fn flag(&self, parameter: &str) -> Result<bool, String> {
        Ok(self.integer(parameter)? != 0)
    }

    /// Constant booleans, if the parameter is present.
    pub fn flags(&self, parameter: &str) -> Result<Option<Vec<bool>>, String> {
        Ok(self.known_integers(parameter)?.map(|flags| flags.into_iter().map(|flag| flag != 0).collect()))
    }

    /// String.
    pub fn text(&self, parameter: &str) -> Result<&'a str, String> {
        match self.constant(parameter)? {
            None => Err(format!("parameter `{parameter}` is missing")),
            Some(Value::Text(text)) => Ok(text),
            Some(_) => Err(format!("parameter `{parameter}` is not a string")),
        }
    }

    /// Name of a state.
    pub fn state(&self, parameter: &str) -> Result<Arc<str>, String> {
        match self.constant(parameter) {
            Ok(Some(Value::State(name))) => Ok(name.clone()),
            _ => Err(format!("parameter `{parameter}` is not a state")),
        }
    }

    /// Matrix operand of a product. A constant is loaded here.
    pub fn matrix(&mut self, parameter: &'static str) -> Result<Matrix, String> {
        match self.operand(parameter)? {
            Some(Operand::Constant(Value::Weight(weight))) => Ok(Matrix::Constant(weight.clone())),
            Some(Operand::Constant(Value::Tensor(tensor))) => LoadedWeight::of(&converted(tensor, self.dtype()))
                .map(|weight| Matrix::Constant(Arc::new(weight)))
                .ok_or_else(|| format!("parameter `{parameter}` holds {}, not floats", tensor.data.kind())),
            _ => self.input(parameter).map(Matrix::Computed),
        }
    }

    /// Declared element type of the first result.
    pub fn dtype(&self) -> DataType {
        self.types.first().map_or(DataType::Fp32, |t| t.dtype)
    }
}

/// Constant as floats or integers, if the type asks for the others and they have all its values.
fn converted(tensor: &Arc<Tensor>, dtype: DataType) -> Arc<Tensor> {
    let data: TensorData = match &tensor.data {
        TensorData::I32(values) if dtype.is_float() => values.iter().map(|v| *v as f32).collect::<Vec<f32>>().into(),
        TensorData::F32(values) if dtype.is_integer() && values.iter().all(|v| v.fract() == 0.0) => {
            values.iter().map(|v| *v as i32).collect::<Vec<i32>>().into()
        }
        _ => return tensor.clone(),
    };
    Arc::new(Tensor { shape: tensor.shape.clone(), data })
}
