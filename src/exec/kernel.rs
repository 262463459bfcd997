//! Kernels: ops with resolved arguments. Attributes are fields of the kernel; computed arguments are found by their
//! position in the call.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::pool::Pool;
use super::state::State;
use super::tensor::{Tensor, TensorData};
use super::value::Value;
use super::weight::{LoadedWeight, WeightProduct};

/// Op that is ready to run. Each group of operators has one type, with the attributes as fields.
pub(crate) trait Kernel: Any + Send + Sync {
    /// Computes the op and adds its results to the call, in order.
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String>;

    /// The single product with a weight that computes the op, if it is one. Sequences of a batch share it.
    fn weight_product<'c>(&'c self, _: &'c Call<'_>) -> Result<Option<WeightProduct<'c>>, String> {
        Ok(None)
    }

    /// Elementwise form of the op, if it has one.
    fn elementwise(&self) -> Option<&dyn Elementwise> {
        None
    }

    /// Row reduction of the op, if it reduces one axis and keeps it.
    fn reduction(&self) -> Option<&dyn Reduction> {
        None
    }
}

/// Op that reduces the elements along an axis to one number.
pub(crate) trait Reduction: Sync {
    /// Tensor that is reduced.
    fn input(&self) -> Input;

    /// Axis that is reduced, for a tensor of this rank; `None` unless it is a single axis that stays with size 1.
    fn axis(&self, rank: usize) -> Option<usize>;

    /// Reduces a row of floats.
    fn reduce(&self, row: &[f32]) -> f32;
}

/// Op whose result elements each depend on the elements at the same position of one or two tensors, or on scalars.
pub(crate) trait Elementwise: Sync {
    /// Input tensors.
    fn inputs(&self) -> (Input, Option<Input>);

    /// Replaces floats by their results; `other` holds the elements of the second input.
    fn apply(&self, values: &mut [f32], other: Elements<'_>);
}

/// Elements of an input for a part of a result.
#[derive(Clone, Copy)]
pub(crate) enum Elements<'a, T = f32> {
    /// One element for each of the result's.
    Each(&'a [T]),
    /// One number for all.
    One(T),
}

impl dyn Kernel {
    /// Returns this kernel if it is of type `K`.
    pub fn is<K: Kernel>(&self) -> Option<&K> {
        (self as &dyn Any).downcast_ref()
    }
}

/// Argument of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Input {
    /// Position among the arguments of a call.
    pub place: usize,
    /// Parameter name.
    pub name: &'static str,
}

/// Arguments of a parameter that takes a list.
#[derive(Clone, Debug)]
pub(crate) struct Inputs {
    /// Positions among the arguments of a call.
    pub places: Range<usize>,
    /// Parameter name.
    pub name: &'static str,
}

impl Inputs {
    /// Arguments in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Input> + '_ {
        self.places.clone().map(|place| Input { place, name: self.name })
    }
}

/// Integers that give positions or sizes.
#[derive(Clone, Debug)]
pub(crate) enum Integers {
    /// Constants.
    Known(Box<[i64]>),
    /// Result of an op, or an input.
    Computed(Input),
}

impl Integers {
    /// Exactly `N` constants.
    pub fn known<const N: usize>(&self) -> Option<[i64; N]> {
        match self {
            Integers::Known(values) => values[..].try_into().ok(),
            Integers::Computed(_) => None,
        }
    }
}

/// A few integers, seldom more than a tensor has axes.
pub(crate) type Numbers = SmallVec<[i64; 8]>;

/// Matrix operand of a product.
#[derive(Clone, Debug)]
pub(crate) enum Matrix {
    /// Constant in its stored form.
    Constant(Arc<LoadedWeight>),
    /// Result of an op, or an input.
    Computed(Input),
}

/// Call of a kernel.
pub(crate) struct Call<'a> {
    /// Arguments by position; missing once a kernel has taken them.
    pub values: &'a mut [Option<Value>],
    /// States of the sequence.
    pub state: &'a mut State,
    /// For `read_state`: whether this is the last read before the state is overwritten, so that its buffer may be
    /// taken.
    pub takes_state: bool,
    /// Results, in order.
    pub results: &'a mut Vec<Arc<Tensor>>,
}

impl Call<'_> {
    /// Adds the next result.
    pub fn push(&mut self, result: Arc<Tensor>) -> Result<(), String> {
        self.results.push(result);
        Ok(())
    }

    /// Argument of any kind.
    pub fn value(&self, input: Input) -> Result<&Value, String> {
        self.values[input.place].as_ref().ok_or_else(|| format!("parameter `{}` has been used up", input.name))
    }

    /// Tensor argument.
    pub fn tensor(&self, input: Input) -> Result<&Tensor, String> {
        let tensor = self.value(input)?.tensor();
        tensor.map(Arc::as_ref).ok_or_else(|| format!("parameter `{}` is not a tensor", input.name))
    }

    /// Takes a tensor argument; its buffer can be reused if no other op needs it.
    pub fn take(&mut self, input: Input) -> Result<Arc<Tensor>, String> {
        self.tensor(input)?;
        match self.values[input.place].take() {
            Some(Value::Tensor(tensor)) => Ok(tensor),
            Some(Value::Weight(weight)) => Ok(weight.dense().clone()),
            _ => Err(format!("parameter `{}` is not a tensor", input.name)),
        }
    }

    /// Floats of a tensor argument.
    pub fn floats(&self, input: Input) -> Result<&[f32], String> {
        let tensor = self.tensor(input)?;
        tensor.floats().ok_or_else(|| format!("parameter `{}` holds {}, not floats", input.name, tensor.data.kind()))
    }

    /// Integers of a tensor argument; booleans count as 0 and 1.
    pub fn numbers(&self, input: Input) -> Result<Numbers, String> {
        integers_of(self.tensor(input)?, input.name)
    }

    /// Integers, constant or computed.
    pub fn integers(&self, integers: &Integers) -> Result<Numbers, String> {
        match integers {
            Integers::Known(values) => Ok(Numbers::from_slice(values)),
            Integers::Computed(input) => self.numbers(*input),
        }
    }

    /// Matrix; a computed one is copied.
    pub fn matrix(&self, matrix: &Matrix) -> Result<Arc<LoadedWeight>, String> {
        match matrix {
            Matrix::Constant(weight) => Ok(weight.clone()),
            Matrix::Computed(input) => LoadedWeight::of(self.tensor(*input)?)
                .map(Arc::new)
                .ok_or_else(|| format!("parameter `{}` doesn't hold floats", input.name)),
        }
    }
}

/// Integers of a tensor; booleans count as 0 and 1.
pub(crate) fn integers_of(tensor: &Tensor, name: &str) -> Result<Numbers, String> {
    match &tensor.data {
        TensorData::I32(v) => Ok(v.iter().map(|v| i64::from(*v)).collect()),
        TensorData::Bool(v) => Ok(v.iter().map(|v| i64::from(*v)).collect()),
        TensorData::F32(_) => Err(format!("parameter `{name}` holds floats, not integers")),
    }
}
