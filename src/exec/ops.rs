//! The table of kernels by operator, and what a kernel sees of its op.

mod binary;
mod conv;
mod conv_transpose;
mod einsum;
mod elementwise;
mod gather;
mod matmul;
mod norm;
mod order;
mod reduce;
mod shape;
mod slice;
mod space;
mod state;

use std::sync::Arc;

pub(super) use self::norm::softmax_rows;
use super::state::State;
use super::tensor::{Tensor, TensorData};
use super::weight::Weight;
use anec_mil::{DataType, TensorType};

/// What an argument is when an op runs.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    /// A tensor; shared as long as another op needs it.
    Tensor(Arc<Tensor>),
    /// A large constant in its stored form.
    Weight(Arc<Weight>),
    /// A string constant.
    Text(Arc<str>),
    /// A state, by name.
    State(Arc<str>),
}

/// One op about to run.
pub(crate) struct Call<'a> {
    /// Values by parameter.
    pub arguments: Vec<(&'a str, Vec<Value>)>,
    /// Declared types of the results.
    pub types: &'a [TensorType],
    /// The states.
    pub state: &'a mut State,
    /// For `read_state`: this is the last read before the state is written anew, so its buffer may be taken.
    pub takes_state: bool,
}

/// The results of an op, in order.
pub(crate) type Results = Result<Vec<Arc<Tensor>>, String>;

/// Computes an op.
pub(crate) type Kernel = fn(&mut Call<'_>) -> Results;

/// One row of the table.
pub(crate) struct Row {
    /// The operator.
    pub operator: &'static str,
    /// Its kernel.
    pub kernel: Kernel,
    /// The results hold nothing but elements of the arguments, so that rounding them again changes nothing.
    pub moves: bool,
}

/// Rows of a group of operators that compute.
macro_rules! computing {
    ($($operator:literal => $kernel:expr),* $(,)?) => {
        &[$($crate::ops::Row { operator: $operator, kernel: $kernel, moves: false }),*]
    };
}
/// Rows of a group of operators that only move elements.
macro_rules! moving {
    ($($operator:literal => $kernel:expr),* $(,)?) => {
        &[$($crate::ops::Row { operator: $operator, kernel: $kernel, moves: true }),*]
    };
}
/// The same computation on the elements of a tensor, whatever they are.
macro_rules! map_data {
    ($data:expr, $elements:ident => $result:expr) => {
        match $data {
            TensorData::F32($elements) => TensorData::F32($result),
            TensorData::I32($elements) => TensorData::I32($result),
            TensorData::Bool($elements) => TensorData::Bool($result),
        }
    };
}
pub(crate) use {computing, map_data, moving};

/// The table, by group.
const GROUPS: &[&[Row]] = &[
    binary::ROWS,
    conv::ROWS,
    conv_transpose::ROWS,
    einsum::ROWS,
    elementwise::ROWS,
    gather::ROWS,
    gather::SCATTER,
    matmul::ROWS,
    norm::ROWS,
    order::ROWS,
    reduce::ROWS,
    shape::ROWS,
    slice::ROWS,
    space::POOL,
    space::ROWS,
    state::ROWS,
];

/// The row of an operator.
pub(crate) fn lookup(operator: &str) -> Option<&'static Row> {
    GROUPS.iter().flat_map(|group| group.iter()).find(|row| row.operator == operator)
}

/// One result.
pub(crate) fn one(tensor: Tensor) -> Results {
    Ok(vec![Arc::new(tensor)])
}

impl Call<'_> {
    fn values(&self, parameter: &str) -> Option<&[Value]> {
        self.arguments.iter().find(|(name, _)| *name == parameter).map(|(_, values)| values.as_slice())
    }

    /// Whether a parameter is given.
    pub fn has(&self, parameter: &str) -> bool {
        self.values(parameter).is_some_and(|v| !v.is_empty())
    }

    /// The single value of a parameter.
    pub fn value(&self, parameter: &str) -> Result<&Value, String> {
        match self.values(parameter) {
            Some([one]) => Ok(one),
            Some(several) => Err(format!("parameter `{parameter}` takes one value, {} are given", several.len())),
            None => Err(format!("parameter `{parameter}` is missing")),
        }
    }

    /// A tensor.
    pub fn tensor(&self, parameter: &str) -> Result<&Tensor, String> {
        as_tensor(self.value(parameter)?).ok_or_else(|| format!("parameter `{parameter}` is not a tensor"))
    }

    /// All tensors of a parameter that takes a list.
    pub fn tensors(&self, parameter: &str) -> Result<Vec<&Tensor>, String> {
        let values = self.values(parameter).ok_or_else(|| format!("parameter `{parameter}` is missing"))?;
        let tensors: Option<Vec<_>> = values.iter().map(as_tensor).collect();
        tensors.ok_or_else(|| format!("parameter `{parameter}` is not a list of tensors"))
    }

    /// A tensor, given up by the call: if no other op needs it, its buffer can be reused.
    pub fn take(&mut self, parameter: &str) -> Result<Arc<Tensor>, String> {
        self.value(parameter)?;
        let index = self.arguments.iter().position(|(name, _)| *name == parameter).unwrap_or(0);
        match self.arguments.swap_remove(index).1.pop() {
            Some(Value::Tensor(tensor)) => Ok(tensor),
            Some(Value::Weight(weight)) => Ok(weight.dense().clone()),
            _ => Err(format!("parameter `{parameter}` is not a tensor")),
        }
    }

    /// The floats of a tensor.
    pub fn floats(&self, parameter: &str) -> Result<&[f32], String> {
        let tensor = self.tensor(parameter)?;
        tensor.floats().ok_or_else(|| format!("parameter `{parameter}` holds {}, not floats", tensor.data.kind()))
    }

    /// The integers of a tensor; booleans count as 0 and 1.
    pub fn integers(&self, parameter: &str) -> Result<Vec<i64>, String> {
        match &self.tensor(parameter)?.data {
            TensorData::I32(v) => Ok(v.iter().map(|v| i64::from(*v)).collect()),
            TensorData::Bool(v) => Ok(v.iter().map(|v| i64::from(*v)).collect()),
            TensorData::F32(_) => Err(format!("parameter `{parameter}` holds floats, not integers")),
        }
    }

    /// Integers, if the parameter is given.
    pub fn optional_integers(&self, parameter: &str) -> Result<Option<Vec<i64>>, String> {
        if self.has(parameter) { self.integers(parameter).map(Some) } else { Ok(None) }
    }

    /// One integer.
    pub fn integer(&self, parameter: &str) -> Result<i64, String> {
        match self.integers(parameter)?.as_slice() {
            [one] => Ok(*one),
            several => Err(format!("parameter `{parameter}` takes one integer, {} are given", several.len())),
        }
    }

    /// One integer, or what it is when left out.
    pub fn integer_or(&self, parameter: &str, default: i64) -> Result<i64, String> {
        if self.has(parameter) { self.integer(parameter) } else { Ok(default) }
    }

    /// One float, or what it is when left out; an integer counts as a float.
    pub fn float_or(&self, parameter: &str, default: f32) -> Result<f32, String> {
        if !self.has(parameter) {
            return Ok(default);
        }
        match &self.tensor(parameter)?.data {
            TensorData::F32(v) if v.len() == 1 => Ok(v[0]),
            TensorData::I32(v) if v.len() == 1 => Ok(v[0] as f32),
            _ => Err(format!("parameter `{parameter}` takes one number")),
        }
    }

    /// One boolean, or what it is when left out.
    pub fn flag_or(&self, parameter: &str, default: bool) -> Result<bool, String> {
        if self.has(parameter) { Ok(self.integer(parameter)? != 0) } else { Ok(default) }
    }

    /// One boolean for each of `count` axes; all false when left out.
    pub fn flags(&self, parameter: &str, count: usize) -> Result<Vec<bool>, String> {
        let flags = self.optional_integers(parameter)?.unwrap_or_else(|| vec![0; count]);
        if flags.len() != count {
            return Err(format!("parameter `{parameter}` has {} elements, {count} are needed", flags.len()));
        }
        Ok(flags.into_iter().map(|f| f != 0).collect())
    }

    /// A string, or what it is when left out.
    pub fn text_or<'s>(&'s self, parameter: &str, default: &'s str) -> Result<&'s str, String> {
        match self.values(parameter) {
            None => Ok(default),
            Some([Value::Text(text)]) => Ok(text),
            Some(_) => Err(format!("parameter `{parameter}` is not a string")),
        }
    }

    /// The declared element type of the first result.
    pub fn dtype(&self) -> DataType {
        self.types.first().map_or(DataType::Fp32, |t| t.dtype)
    }
}

fn as_tensor(value: &Value) -> Option<&Tensor> {
    match value {
        Value::Tensor(tensor) => Some(tensor),
        Value::Weight(weight) => Some(weight.dense()),
        Value::Text(_) | Value::State(_) => None,
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! Runs single kernels on values.

    use super::*;

    /// Arguments by parameter.
    pub type Given<'a> = Vec<(&'a str, Value)>;

    /// Floats.
    pub fn f(shape: &[usize], values: &[f32]) -> Value {
        Value::Tensor(Arc::new(Tensor::new(shape, values.to_vec())))
    }

    /// Integers.
    pub fn i(shape: &[usize], values: &[i32]) -> Value {
        Value::Tensor(Arc::new(Tensor::new(shape, values.to_vec())))
    }

    /// Booleans.
    pub fn b(shape: &[usize], values: &[bool]) -> Value {
        Value::Tensor(Arc::new(Tensor::new(shape, values.to_vec())))
    }

    /// A string.
    pub fn s(text: &str) -> Value {
        Value::Text(text.into())
    }

    /// All results of an op, or its complaint.
    pub fn results(operator: &str, arguments: Vec<(&str, Vec<Value>)>, dtype: DataType) -> Result<Vec<Tensor>, String> {
        let row = lookup(operator).ok_or_else(|| format!("no kernel for {operator}"))?;
        let types = [TensorType::scalar(dtype)];
        let mut state = State::default();
        let mut call = Call { arguments, types: &types, state: &mut state, takes_state: false };
        let results = (row.kernel)(&mut call)?;
        Ok(results.into_iter().map(Arc::unwrap_or_clone).collect())
    }

    /// The one result of an op whose declared type is fp32, or its complaint.
    pub fn try_run(operator: &str, arguments: Given<'_>) -> Result<Tensor, String> {
        let arguments = arguments.into_iter().map(|(name, value)| (name, vec![value])).collect();
        let mut results = results(operator, arguments, DataType::Fp32)?;
        assert_eq!(results.len(), 1, "{operator} gives one result");
        let tensor = results.remove(0);
        assert!(tensor.is_consistent(), "{operator} gives {:?} for {} elements", tensor.shape, tensor.data.len());
        Ok(tensor)
    }

    /// The one result of an op whose declared type is fp32.
    #[track_caller]
    pub fn run(operator: &str, arguments: Given<'_>) -> Tensor {
        try_run(operator, arguments).unwrap_or_else(|problem| panic!("{operator}: {problem}"))
    }

    /// Asserts a float tensor's shape and values within 1e-5 of their size.
    #[track_caller]
    pub fn assert_close(tensor: &Tensor, shape: &[usize], values: &[f32]) {
        assert_eq!(tensor.shape, shape);
        let found = tensor.floats().expect("floats");
        for (found, expected) in found.iter().zip(values) {
            let near = (found - expected).abs() <= 1e-5 * expected.abs().max(1.0);
            assert!(near || found == expected, "found {:?}, expected {values:?}", tensor.floats());
        }
        assert_eq!(found.len(), values.len());
    }
}
