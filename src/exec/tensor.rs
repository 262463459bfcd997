//! Tensors in memory: f32, i32 or bool elements in row-major order, independent of the declared type.

use std::ops::Range;

use anec_mil::DataType;
use smallvec::SmallVec;

/// Sizes or strides of a tensor's axes, on the stack if there are few.
pub(crate) type Dims = SmallVec<[usize; 8]>;

/// Tensor in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Sizes, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
    /// Elements in row-major order; their number is the product of the shape.
    pub data: TensorData,
}

/// Elements of a tensor. Every floating-point type is held as `f32`, every integer type as `i32`.
#[derive(Clone, Debug, PartialEq)]
pub enum TensorData {
    /// fp16, bf16, fp32, fp64.
    F32(Vec<f32>),
    /// Integers of any width.
    I32(Vec<i32>),
    /// Booleans.
    Bool(Vec<bool>),
}

impl TensorData {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            TensorData::F32(v) => v.len(),
            TensorData::I32(v) => v.len(),
            TensorData::Bool(v) => v.len(),
        }
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Capacity in bytes.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            TensorData::F32(v) => size_of::<f32>() * v.capacity(),
            TensorData::I32(v) => size_of::<i32>() * v.capacity(),
            TensorData::Bool(v) => v.capacity(),
        }
    }

    /// Name of the element type in error messages.
    pub fn kind(&self) -> &'static str {
        match self {
            TensorData::F32(_) => "floats",
            TensorData::I32(_) => "integers",
            TensorData::Bool(_) => "booleans",
        }
    }

    /// Returns whether elements of this declared type are held in this variant.
    pub fn holds(&self, dtype: DataType) -> bool {
        match self {
            TensorData::F32(_) => dtype.is_float(),
            TensorData::I32(_) => dtype.is_integer(),
            TensorData::Bool(_) => dtype == DataType::Bool,
        }
    }
}

impl From<Vec<f32>> for TensorData {
    fn from(v: Vec<f32>) -> Self {
        TensorData::F32(v)
    }
}

impl From<Vec<i32>> for TensorData {
    fn from(v: Vec<i32>) -> Self {
        TensorData::I32(v)
    }
}

impl From<Vec<bool>> for TensorData {
    fn from(v: Vec<bool>) -> Self {
        TensorData::Bool(v)
    }
}

impl Tensor {
    /// Tensor of this shape; `data` has as many elements as the product of `shape`.
    pub fn new(shape: impl Into<Vec<usize>>, data: impl Into<TensorData>) -> Self {
        Tensor { shape: shape.into(), data: data.into() }
    }

    /// A scalar.
    pub fn scalar<T>(value: T) -> Self
    where
        Vec<T>: Into<TensorData>,
    {
        Tensor::new([], vec![value])
    }

    /// Zeros (or false) of a declared type.
    pub fn zeros(dtype: DataType, shape: impl Into<Vec<usize>>) -> Self {
        let shape = shape.into();
        let count = shape.iter().product();
        let data = match dtype {
            DataType::Bool => TensorData::Bool(vec![false; count]),
            d if d.is_integer() => TensorData::I32(vec![0; count]),
            _ => TensorData::F32(vec![0.0; count]),
        };
        Tensor { shape, data }
    }

    /// Zeros of this tensor's shape and variant.
    pub(crate) fn zeros_like(&self) -> Self {
        let dtype = match self.data {
            TensorData::F32(_) => DataType::Fp32,
            TensorData::I32(_) => DataType::Int32,
            TensorData::Bool(_) => DataType::Bool,
        };
        Tensor::zeros(dtype, self.shape.clone())
    }

    /// Sets some slots of a cache `[…, S, D]`, or everything, to zero.
    pub(crate) fn clear_slots(&mut self, slots: Option<Range<usize>>) {
        match &mut self.data {
            TensorData::F32(elements) => clear_slots(elements, &self.shape, slots),
            TensorData::I32(elements) => clear_slots(elements, &self.shape, slots),
            TensorData::Bool(elements) => clear_slots(elements, &self.shape, slots),
        }
    }

    /// Floats of the tensor.
    pub fn floats(&self) -> Option<&[f32]> {
        match &self.data {
            TensorData::F32(v) => Some(v),
            _ => None,
        }
    }

    /// Integers of the tensor.
    pub fn integers(&self) -> Option<&[i32]> {
        match &self.data {
            TensorData::I32(v) => Some(v),
            _ => None,
        }
    }

    /// Booleans of the tensor.
    pub fn booleans(&self) -> Option<&[bool]> {
        match &self.data {
            TensorData::Bool(v) => Some(v),
            _ => None,
        }
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// Returns whether the number of elements fits the shape.
    pub fn is_consistent(&self) -> bool {
        self.shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)) == Some(self.data.len())
    }
}

/// Sets some slots of a cache `[…, S, D]`, or everything, to zero.
pub(crate) fn clear_slots<T: Default + Clone>(elements: &mut [T], shape: &[usize], slots: Option<Range<usize>>) {
    let (part, of) = match (slots, shape) {
        (Some(slots), [.., count, width]) => (slots.start * width..slots.end * width, count * width),
        _ => (0..elements.len(), elements.len()),
    };
    elements.chunks_mut(of.max(1)).for_each(|matrix| matrix[part.clone()].fill(T::default()));
}

/// Strides of a row-major tensor.
pub(crate) fn strides(shape: &[usize]) -> Dims {
    let mut strides = Dims::from_elem(1, shape.len());
    for axis in (0..shape.len().saturating_sub(1)).rev() {
        strides[axis] = strides[axis + 1] * shape[axis + 1];
    }
    strides
}

/// Index of an axis; negative ones count from the back.
pub(crate) fn axis_index(axis: i64, rank: usize) -> Result<usize, String> {
    let index = if axis < 0 { axis + rank as i64 } else { axis };
    usize::try_from(index)
        .ok()
        .filter(|i| *i < rank)
        .ok_or_else(|| format!("axis {axis} is outside a tensor of rank {rank}"))
}

/// Shape that two shapes broadcast to, aligned at their last axes.
pub(crate) fn broadcast_shape(a: &[usize], b: &[usize]) -> Result<Dims, String> {
    let rank = a.len().max(b.len());
    let at = |shape: &[usize], i: usize| if i + shape.len() < rank { 1 } else { shape[i + shape.len() - rank] };
    (0..rank)
        .map(|i| match (at(a, i), at(b, i)) {
            (x, y) if x == y => Ok(x),
            (1, y) => Ok(y),
            (x, 1) => Ok(x),
            _ => Err(format!("the shapes {a:?} and {b:?} don't broadcast")),
        })
        .collect()
}

/// Strides for reading a tensor of `shape` as if it had shape `to`: 0 along broadcast axes.
pub(crate) fn broadcast_strides(shape: &[usize], to: &[usize]) -> Dims {
    let own = strides(shape);
    let lead = to.len() - shape.len();
    (0..to.len()).map(|i| if i < lead || shape[i - lead] == 1 { 0 } else { own[i - lead] }).collect()
}

/// Calls `visit` with the offsets into several strided tensors at each index of `shape`, in row-major order.
pub(crate) fn for_each_index<const N: usize>(
    shape: &[usize],
    strides: [&[usize]; N],
    mut visit: impl FnMut([usize; N]),
) {
    if shape.contains(&0) {
        return;
    }
    let mut index = Dims::from_elem(0, shape.len());
    let mut offsets = [0usize; N];
    loop {
        visit(offsets);
        let mut axis = shape.len();
        loop {
            if axis == 0 {
                return;
            }
            axis -= 1;
            index[axis] += 1;
            for (offset, stride) in offsets.iter_mut().zip(strides) {
                *offset += stride[axis];
            }
            if index[axis] < shape[axis] {
                break;
            }
            for (offset, stride) in offsets.iter_mut().zip(strides) {
                *offset -= stride[axis] * shape[axis];
            }
            index[axis] = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_broadcast_from_the_last_axis() {
        assert_eq!(broadcast_shape(&[2, 1, 3], &[4, 1]).unwrap()[..], [2, 4, 3]);
        assert_eq!(broadcast_shape(&[], &[5]).unwrap()[..], [5]);
        assert!(broadcast_shape(&[2], &[3]).is_err());
        assert_eq!(broadcast_strides(&[4, 1], &[2, 4, 3])[..], [0, 1, 0]);
    }

    #[test]
    fn indices_are_visited_in_row_major_order() {
        let mut seen = Vec::new();
        for_each_index(&[2, 2], [&[1, 2]], |[o]| seen.push(o));
        assert_eq!(seen, [0, 2, 1, 3]);
        let mut scalars = 0;
        for_each_index(&[], [&[]], |[o]| scalars += o + 1);
        assert_eq!(scalars, 1);
        for_each_index(&[3, 0], [&[0, 0]], |[_]| panic!("an empty tensor has no index"));
    }

    #[test]
    fn axes_count_from_both_ends() {
        assert_eq!(axis_index(-1, 3), Ok(2));
        assert!(axis_index(3, 3).is_err());
        assert!(axis_index(-4, 3).is_err());
    }
}
