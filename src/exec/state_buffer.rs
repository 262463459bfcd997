//! Memory of a state: a tensor as it is computed with, or floats in half precision, which take half of the room and are
//! widened where they are used.

use std::ops::Range;
use std::sync::Arc;

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::pool::Pool;
use super::tensor::{Tensor, TensorData, clear_slots};
use anec_kernels::aligned_buf::AlignedBuf;

/// The elements of a state. A clone is the same memory.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum StateBuffer {
    /// As they are computed with.
    Tensor(Arc<Tensor>),
    /// Rounded to half precision when they were written.
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
    /// Zeros, which take no memory until something is written.
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

    /// Bytes that the elements have room for.
    pub fn bytes(&self) -> usize {
        match self {
            StateBuffer::Tensor(tensor) => tensor.data.bytes(),
            StateBuffer::Half(half) => size_of::<f16>() * half.values.capacity(),
        }
    }

    /// Floats in half precision, to nearest even (what is beyond its range becomes infinite); other elements as they are. What
    /// is known to be zero isn't looked at.
    pub fn in_half_precision(self, is_zero: bool) -> StateBuffer {
        let StateBuffer::Tensor(tensor) = &self else { return self };
        let Some(values) = tensor.floats() else { return self };
        let mut half = HalfTensor::zeros(tensor.shape.clone());
        if !is_zero {
            half.values.convert_from_f32_slice(values);
        }
        StateBuffer::Half(Arc::new(half))
    }

    /// Another content in the same precision, and a tensor that is no longer needed.
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

    /// The content as it is computed with.
    pub fn tensor(&self, pool: &mut Pool) -> Arc<Tensor> {
        match self {
            StateBuffer::Tensor(tensor) => tensor.clone(),
            StateBuffer::Half(half) => pool.written(&half.shape, |out| half.values.convert_to_f32_slice(out)),
        }
    }

    /// Changes `length` floats from each of some places on, in place if nobody else has the memory; each place comes with what
    /// `change` is told of it.
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

    /// Whether nobody else has the memory.
    pub fn is_own(&mut self) -> bool {
        match self {
            StateBuffer::Tensor(tensor) => Arc::get_mut(tensor).is_some(),
            StateBuffer::Half(half) => Arc::get_mut(half).is_some(),
        }
    }

    /// Makes everything zero, in place if nobody else has the memory: what lies outside of some slots is zero already.
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
