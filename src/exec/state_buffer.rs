//! Memory of a state: a tensor in f32, or floats in half precision, which take half the memory and are widened when
//! they are used.

use std::ops::Range;
use std::sync::Arc;

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::pool::Pool;
use super::tensor::{Tensor, TensorData, clear_slots};
use anec_kernels::aligned_buf::AlignedBuf;

/// Elements of a state. A clone shares the memory.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum StateBuffer {
    /// Tensor as used in computations.
    Tensor(Arc<Tensor>),
    /// Floats that were rounded to half precision when written.
    Half(Arc<HalfTensor>),
}

/// Floats in half precision.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct HalfTensor {
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    /// The elements in row-major order.
    pub values: Vec<f16>,
}

impl HalfTensor {
    /// Zeros, which take no memory until they are written.
    fn zeros(shape: Vec<usize>) -> HalfTensor {
        let values = bytemuck::zeroed_vec(shape.iter().product());
        HalfTensor { shape, values }
    }
}

impl StateBuffer {
    /// Sizes, outermost first.
    pub fn shape(&self) -> &[usize] {
        match self {
            StateBuffer::Tensor(tensor) => &tensor.shape,
            StateBuffer::Half(half) => &half.shape,
        }
    }

    /// Capacity in bytes.
    pub fn bytes(&self) -> usize {
        match self {
            StateBuffer::Tensor(tensor) => tensor.data.bytes(),
            StateBuffer::Half(half) => size_of::<f16>() * half.values.capacity(),
        }
    }

    /// Converts floats to half precision (nearest even, infinite beyond the range); other elements stay. Elements known
    /// to be zero aren't read.
    pub fn in_half_precision(self, is_zero: bool) -> StateBuffer {
        let StateBuffer::Tensor(tensor) = &self else { return self };
        let Some(values) = tensor.floats() else { return self };
        let mut half = HalfTensor::zeros(tensor.shape.clone());
        if !is_zero {
            half.values.convert_from_f32_slice(values);
        }
        StateBuffer::Half(Arc::new(half))
    }

    /// Replaces the content, in the same precision; returns a tensor for reuse.
    pub fn replace(&mut self, tensor: Arc<Tensor>) -> Arc<Tensor> {
        match self {
            StateBuffer::Tensor(own) => std::mem::replace(own, tensor),
            StateBuffer::Half(own) => {
                match (Arc::get_mut(own), tensor.floats()) {
                    (Some(own), Some(values)) if own.shape == tensor.shape => own.values.convert_from_f32_slice(values),
                    _ => *self = StateBuffer::Tensor(tensor.clone()).in_half_precision(false),
                }
                tensor
            }
        }
    }

    /// Content as a tensor for computations.
    pub fn tensor(&self, pool: &mut Pool) -> Arc<Tensor> {
        match self {
            StateBuffer::Tensor(tensor) => tensor.clone(),
            StateBuffer::Half(half) => pool.written(&half.shape, |out| half.values.convert_to_f32_slice(out)),
        }
    }

    /// Modifies `length` floats at each of some positions, in place if the memory isn't shared. Each position comes
    /// with an argument for `change`.
    pub fn change_each<T>(
        &mut self,
        pool: &mut Pool,
        length: usize,
        places: impl Iterator<Item = (usize, T)>,
        mut change: impl FnMut(T, &mut [f32]),
    ) {
        match self {
            StateBuffer::Tensor(tensor) => {
                if let TensorData::F32(values) = &mut pool.make_mut(tensor).data {
                    places.for_each(|(place, of)| change(of, &mut values[place..][..length]));
                }
            }
            StateBuffer::Half(half) => {
                let (values, mut room) = (&mut Arc::make_mut(half).values, AlignedBuf::new(length));
                for (place, of) in places {
                    let halves = &mut values[place..][..length];
                    halves.convert_to_f32_slice(room.floats());
                    change(of, room.floats());
                    halves.convert_from_f32_slice(room.floats());
                }
            }
        }
    }

    /// Returns whether the memory isn't shared.
    pub fn is_own(&mut self) -> bool {
        match self {
            StateBuffer::Tensor(tensor) => Arc::get_mut(tensor).is_some(),
            StateBuffer::Half(half) => Arc::get_mut(half).is_some(),
        }
    }

    /// Sets all elements to zero, in place if the memory isn't shared; elements outside of `slots` are zero already.
    pub fn clear(&mut self, slots: Option<Range<usize>>) {
        match self {
            StateBuffer::Tensor(tensor) => match Arc::get_mut(tensor) {
                Some(tensor) => tensor.clear_slots(slots),
                None => *tensor = Arc::new(tensor.zeros_like()),
            },
            StateBuffer::Half(half) => match Arc::get_mut(half) {
                Some(HalfTensor { shape, values }) => clear_slots(values, shape, slots),
                None => *half = Arc::new(HalfTensor::zeros(half.shape.clone())),
            },
        }
    }
}
