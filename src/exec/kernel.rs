//! Kernels: ops whose arguments have been resolved. Attributes are fields of a kernel; what is computed is found by its
//! place among the values of a call.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::pool::Pool;
use super::state::State;
use super::tensor::{Tensor, TensorData};
use super::value::Value;
use super::weight::{LoadedWeight, WeightProduct};

/// An op made ready: one type for each group of operators, with the op's attributes as fields.
pub(crate) trait Kernel: Any + Send + Sync {
    /// Computes the op, and gives its results to the call, in order.
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String>;

    /// The one product with a weight that computes the op, if it is one: sequences that are computed together share it.
    fn weight_product<'c>(&'c self, _: &'c Call<'_>) -> Result<Option<WeightProduct<'c>>, String> {
        Ok(None)
    }

    /// What it does to each element by itself, if that is all.
    fn elementwise(&self) -> Option<&dyn Elementwise> {
        None
    }

    /// What it makes of each row of numbers, if it reduces an axis and keeps it.
    fn reduction(&self) -> Option<&dyn Reduction> {
        None
    }
}

/// An op that makes one number of all that lie along an axis.
pub(crate) trait Reduction: Sync {
    /// The tensor.
    fn input(&self) -> Input;

    /// The axis of a tensor of so many, if it is the only one that is reduced and stays, with a size of one.
    fn axis(&self, rank: usize) -> Option<usize>;

    /// What a row of floats is reduced to.
    fn reduce(&self, row: &[f32]) -> f32;
}

/// An op each element of whose result follows from those at the same place of one or two tensors, or from single numbers.
pub(crate) trait Elementwise: Sync {
    /// The tensors.
    fn inputs(&self) -> (Input, Option<Input>);

    /// Puts the results of floats in their place; `other` are those of the second input.
    fn apply(&self, values: &mut [f32], other: Elements<'_>);
}

/// Numbers of an input for a part of a result.
#[derive(Clone, Copy)]
pub(crate) enum Elements<'a, T = f32> {
    /// One for each of the result's.
    Each(&'a [T]),
    /// The same for all.
    One(T),
}

impl dyn Kernel {
    /// This kernel, if it is of a type.
    pub fn is<K: Kernel>(&self) -> Option<&K> {
        (self as &dyn Any).downcast_ref()
    }
}

/// An argument of an op, by its place among those of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Input {
    /// The place.
    pub place: usize,
    /// The parameter.
    pub name: &'static str,
}

/// The arguments of a parameter that takes a list.
#[derive(Clone, Debug)]
pub(crate) struct Inputs {
    /// Their places.
    pub places: Range<usize>,
    /// The parameter.
    pub name: &'static str,
}

impl Inputs {
    /// One after the other.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Input> + '_ {
        self.places.clone().map(|place| Input { place, name: self.name })
    }
}

/// Integers that say where or how large something is.
#[derive(Clone, Debug)]
pub(crate) enum Integers {
    /// Constants.
    Known(Box<[i64]>),
    /// What an op or an input gives.
    Computed(Input),
}

impl Integers {
    /// So many constants.
    pub fn known<const N: usize>(&self) -> Option<[i64; N]> {
        match self {
            Integers::Known(values) => values[..].try_into().ok(),
            Integers::Computed(_) => None,
        }
    }
}

/// Some integers, seldom more than a tensor has axes.
pub(crate) type Numbers = SmallVec<[i64; 8]>;

/// A matrix that inputs are multiplied with.
#[derive(Clone, Debug)]
pub(crate) enum Matrix {
    /// A constant, in its stored form.
    Constant(Arc<LoadedWeight>),
    /// What an op or an input gives.
    Computed(Input),
}

/// One op about to run.
pub(crate) struct Call<'a> {
    /// Arguments, by place; those that a kernel has taken are missing.
    pub values: &'a mut [Option<Value>],
    /// The states.
    pub state: &'a mut State,
    /// For `read_state`: this is the last read before the state is written anew, so its buffer may be taken.
    pub takes_state: bool,
    /// The results, in order.
    pub results: &'a mut Vec<Arc<Tensor>>,
}

impl Call<'_> {
    /// Gives the next result.
    pub fn give(&mut self, result: Arc<Tensor>) -> Result<(), String> {
        self.results.push(result);
        Ok(())
    }

    /// An argument.
    pub fn value(&self, input: Input) -> Result<&Value, String> {
        self.values[input.place].as_ref().ok_or_else(|| format!("parameter `{}` has been used up", input.name))
    }

    /// A tensor.
    pub fn tensor(&self, input: Input) -> Result<&Tensor, String> {
        let tensor = self.value(input)?.tensor();
        tensor.map(Arc::as_ref).ok_or_else(|| format!("parameter `{}` is not a tensor", input.name))
    }

    /// A tensor, given up by the call: if no other op needs it, its buffer can be reused.
    pub fn take(&mut self, input: Input) -> Result<Arc<Tensor>, String> {
        self.tensor(input)?;
        match self.values[input.place].take() {
            Some(Value::Tensor(tensor)) => Ok(tensor),
            Some(Value::Weight(weight)) => Ok(weight.dense().clone()),
            _ => Err(format!("parameter `{}` is not a tensor", input.name)),
        }
    }

    /// The floats of a tensor.
    pub fn floats(&self, input: Input) -> Result<&[f32], String> {
        let tensor = self.tensor(input)?;
        tensor.floats().ok_or_else(|| format!("parameter `{}` holds {}, not floats", input.name, tensor.data.kind()))
    }

    /// The integers of a tensor; booleans count as 0 and 1.
    pub fn numbers(&self, input: Input) -> Result<Numbers, String> {
        integers_of(self.tensor(input)?, input.name)
    }

    /// Integers, wherever they come from.
    pub fn integers(&self, integers: &Integers) -> Result<Numbers, String> {
        match integers {
            Integers::Known(values) => Ok(Numbers::from_slice(values)),
            Integers::Computed(input) => self.numbers(*input),
        }
    }

    /// A matrix; one that was computed is copied.
    pub fn matrix(&self, matrix: &Matrix) -> Result<Arc<LoadedWeight>, String> {
        match matrix {
            Matrix::Constant(weight) => Ok(weight.clone()),
            Matrix::Computed(input) => LoadedWeight::of(self.tensor(*input)?)
                .map(Arc::new)
                .ok_or_else(|| format!("parameter `{}` doesn't hold floats", input.name)),
        }
    }
}

/// The integers of a tensor; booleans count as 0 and 1.
pub(crate) fn integers_of(tensor: &Tensor, name: &str) -> Result<Numbers, String> {
    match &tensor.data {
        TensorData::I32(v) => Ok(v.iter().map(|v| i64::from(*v)).collect()),
        TensorData::Bool(v) => Ok(v.iter().map(|v| i64::from(*v)).collect()),
        TensorData::F32(_) => Err(format!("parameter `{name}` holds floats, not integers")),
    }
}
