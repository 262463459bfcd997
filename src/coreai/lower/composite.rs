//! The definitions of composite operations: what a system computes that doesn't know their names.

use super::numbers::number_bytes;
use crate::aicode::{AiRegion, ElementType};
use crate::builder::{BodyBuilder, ModuleBuilder, Property};

/// A reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reduction {
    Sum,
    Mean,
    Max,
    Min,
    Product,
}

impl Reduction {
    pub(super) fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "reduce_sum_v1",
            Reduction::Mean => "reduce_mean_v1",
            Reduction::Max => "reduce_max_v1",
            Reduction::Min => "reduce_min_v1",
            Reduction::Product => "reduce_product_v1",
        }
    }

    fn combiner(self) -> &'static str {
        match self {
            Reduction::Sum | Reduction::Mean => "primitive.add_v1",
            Reduction::Max => "primitive.maximum_v1",
            Reduction::Min => "primitive.minimum_v1",
            Reduction::Product => "primitive.mul_v1",
        }
    }

    /// Type in which elements are combined, as Apple's exporter chooses it.
    fn accumulator(self, element: ElementType) -> ElementType {
        match (self, element) {
            (Reduction::Max | Reduction::Min, _) => element,
            (_, ElementType::F16 | ElementType::Bf16) => ElementType::F32,
            (_, ElementType::Si32) => ElementType::Si64,
            _ => element,
        }
    }

    /// Neutral element of the combiner; a finite number, which every element type has.
    fn neutral(self, element: ElementType) -> f64 {
        let most = match element {
            ElementType::F16 => 65504.0,
            ElementType::F32 | ElementType::Bf16 => f64::from(f32::MAX),
            ElementType::Si32 => f64::from(i32::MAX),
            ElementType::Si16 => f64::from(i16::MAX),
            ElementType::Si8 => f64::from(i8::MAX),
            ElementType::Ui8 => f64::from(u8::MAX),
            ElementType::Ui16 => f64::from(u16::MAX),
            _ => f64::MAX,
        };
        match self {
            Reduction::Sum | Reduction::Mean => 0.0,
            Reduction::Product => 1.0,
            Reduction::Max => -most,
            Reduction::Min => most,
        }
    }
}

/// An activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Activation {
    Relu,
    Sigmoid,
    Silu,
}

impl Activation {
    pub(super) fn name(self) -> &'static str {
        match self {
            Activation::Relu => "relu_v1",
            Activation::Sigmoid => "sigmoid_v1",
            Activation::Silu => "silu_v1",
        }
    }
}

/// The body of a composite operation.
struct Definition<'m> {
    module: &'m mut ModuleBuilder,
    body: BodyBuilder,
}

impl<'m> Definition<'m> {
    fn new(module: &'m mut ModuleBuilder, arguments: &[(&[u64], ElementType)]) -> Self {
        let types: Vec<_> = arguments.iter().map(|(shape, element)| module.tensor(shape, *element)).collect();
        Definition { module, body: BodyBuilder::new(&types) }
    }

    fn op(&mut self, name: &'static str, operands: &[u32], shape: &[u64], element: ElementType) -> u32 {
        self.op_with(name, operands, shape, element, Vec::new())
    }

    fn op_with(
        &mut self,
        name: &'static str,
        operands: &[u32],
        shape: &[u64],
        element: ElementType,
        regions: Vec<AiRegion>,
    ) -> u32 {
        let ty = self.module.tensor(shape, element);
        self.body.op(self.module, name, &[], operands, &[ty], regions)
    }

    fn splat(&mut self, value: f64, shape: &[u64], element: ElementType) -> Result<u32, String> {
        let bytes = number_bytes(value, element)?;
        let value = Property::Required(self.module.dense(bytes, true));
        let ty = self.module.tensor(shape, element);
        Ok(self.body.op(self.module, "primitive.constant_v1", &[value], &[], &[ty], Vec::new()))
    }

    /// Reduces axes to size 1 by the primitive reduction, as Apple's exporter does.
    fn reduce(
        &mut self,
        kind: Reduction,
        x: u32,
        axes: u32,
        reduced: &[u64],
        element: ElementType,
    ) -> Result<u32, String> {
        let wide = kind.accumulator(element);
        let mut combiner = Definition::new(self.module, &[(&[], wide), (&[], element)]);
        let each = if wide == element { 1 } else { combiner.op("primitive.cast_v1", &[1], &[], wide) };
        let result = combiner.op(kind.combiner(), &[0, each], &[], wide);
        let region = combiner.yielding(result);
        let neutral = self.splat(kind.neutral(element), &[], wide)?;
        Ok(self.op_with("primitive.reduce_v1", &[x, axes, neutral], reduced, element, vec![region]))
    }

    /// Reduces axes to size 1 by a composite operation.
    fn reduce_by_name(
        &mut self,
        kind: Reduction,
        x: u32,
        axes: (u32, &[usize]),
        shape: &[u64],
        element: ElementType,
    ) -> Result<u32, String> {
        let region = reduction(self.module, kind, shape, axes.1, element)?;
        Ok(self.op_with(kind.name(), &[x, axes.0], &reduced(shape, axes.1), element, vec![region]))
    }

    /// Repeats the only place of an axis.
    fn broadcast(&mut self, x: u32, axis: usize, shape: &[u64], element: ElementType) -> Result<u32, String> {
        let size = self.splat(shape[axis] as f64, &[1], ElementType::Ui32)?;
        let axis = self.splat(axis as f64, &[1], ElementType::Si32)?;
        Ok(self.op("primitive.broadcast_in_dims_v1", &[x, size, axis], shape, element))
    }

    fn yielding(self, value: u32) -> AiRegion {
        self.body.yielding(self.module, &[value])
    }
}

fn reduced(shape: &[u64], axes: &[usize]) -> Vec<u64> {
    let mut reduced = shape.to_vec();
    axes.iter().for_each(|axis| reduced[*axis] = 1);
    reduced
}

/// Arguments: the tensor, the axes.
pub(super) fn reduction(
    module: &mut ModuleBuilder,
    kind: Reduction,
    shape: &[u64],
    axes: &[usize],
    element: ElementType,
) -> Result<AiRegion, String> {
    let (small, count) = (reduced(shape, axes), [axes.len() as u64]);
    let mut body = Definition::new(module, &[(shape, element), (&count, ElementType::Si32)]);
    if kind != Reduction::Mean {
        let result = body.reduce(kind, 0, 1, &small, element)?;
        return Ok(body.yielding(result));
    }
    // a sum may leave the range of half precision
    let wide = kind.accumulator(element);
    let x = if wide == element { 0 } else { body.op("primitive.cast_v1", &[0], shape, wide) };
    let sum = body.reduce_by_name(Reduction::Sum, x, (1, axes), shape, wide)?;
    let count = axes.iter().map(|axis| shape[*axis]).product::<u64>();
    let count = body.splat(count as f64, &small, wide)?;
    let mut mean = body.op("primitive.divide_v1", &[sum, count], &small, wide);
    if wide != element {
        mean = body.op("primitive.cast_v1", &[mean], &small, element);
    }
    Ok(body.yielding(mean))
}

/// Arguments: the tensor, the axis.
pub(super) fn softmax(
    module: &mut ModuleBuilder,
    shape: &[u64],
    axis: usize,
    element: ElementType,
) -> Result<AiRegion, String> {
    let mut body = Definition::new(module, &[(shape, element), (&[], ElementType::Si32)]);
    let one = body.splat(1.0, &[1], ElementType::Si32)?;
    let axes = body.op("primitive.reshape_v2", &[1, one], &[1], ElementType::Si32);
    let most = body.reduce_by_name(Reduction::Max, 0, (axes, &[axis]), shape, element)?;
    let most = body.broadcast(most, axis, shape, element)?;
    let shifted = body.op("primitive.sub_v1", &[0, most], shape, element);
    let powers = body.op("primitive.exp_v1", &[shifted], shape, element);
    let sum = body.reduce_by_name(Reduction::Sum, powers, (axes, &[axis]), shape, element)?;
    let sum = body.broadcast(sum, axis, shape, element)?;
    let result = body.op("primitive.divide_v1", &[powers, sum], shape, element);
    Ok(body.yielding(result))
}

/// Argument: the tensor.
pub(super) fn activation(
    module: &mut ModuleBuilder,
    kind: Activation,
    shape: &[u64],
    element: ElementType,
) -> Result<AiRegion, String> {
    let mut body = Definition::new(module, &[(shape, element)]);
    let zero = body.splat(0.0, shape, element)?;
    if kind == Activation::Relu {
        let result = body.op("primitive.maximum_v1", &[0, zero], shape, element);
        return Ok(body.yielding(result));
    }
    let one = body.splat(1.0, shape, element)?;
    let negated = body.op("primitive.sub_v1", &[zero, 0], shape, element);
    let power = body.op("primitive.exp_v1", &[negated], shape, element);
    let sum = body.op("primitive.add_v1", &[one, power], shape, element);
    let numerator = if kind == Activation::Silu { 0 } else { one };
    let result = body.op("primitive.divide_v1", &[numerator, sum], shape, element);
    Ok(body.yielding(result))
}

/// Arguments: the tensor, the axis, whether descending, whether stable.
pub(super) fn sort(
    module: &mut ModuleBuilder,
    shape: &[u64],
    axis: usize,
    element: ElementType,
) -> Result<AiRegion, String> {
    let scalars = [ElementType::Si32, ElementType::I1, ElementType::I1];
    let arguments: Vec<(&[u64], ElementType)> =
        std::iter::once((shape, element)).chain(scalars.map(|element| (&[][..], element))).collect();
    let mut body = Definition::new(module, &arguments);
    let order = body.op("primitive.argsort_v1", &[0, 1, 2, 3], shape, ElementType::Si32);
    let axis = body.splat(axis as f64, &[], ElementType::Si32)?;
    let result = body.op("primitive.gather_along_axis_v1", &[0, order, axis], shape, element);
    Ok(body.yielding(result))
}
