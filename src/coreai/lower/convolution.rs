//! Convolutions and pooling.

use anec_mil::Op;

use super::context::{Lowering, Tensor};
use super::shape::pad_constant;
use super::{Lowered, Row};

pub(super) const ROWS: &[Row] = &[
    ("conv", conv),
    ("conv_transpose", conv_transpose),
    ("avg_pool", avg_pool),
    ("max_pool", max_pool),
    ("l2_pool", l2_pool),
];

/// Window of a convolution or pooling.
struct Window {
    kernel: Vec<u64>,
    strides: Vec<u64>,
    dilations: Vec<u64>,
    /// Padding before and behind each axis.
    pads: Vec<[u64; 2]>,
}

fn positive(list: Vec<i64>) -> Vec<u64> {
    list.into_iter().map(|n| n.max(0) as u64).collect()
}

impl Window {
    fn of(l: &Lowering<'_>, op: &Op, sizes: &[u64], kernel: Vec<u64>) -> Result<Window, String> {
        let count = kernel.len();
        let strides = positive(l.integers_or(op, "strides", vec![1; count])?);
        let dilations = positive(l.integers_or(op, "dilations", vec![1; count])?);
        let kind = l.text(op, "pad_type", "valid");
        let given = positive(l.integers_or(op, "pad", vec![0; 2 * count])?);
        let extent = |i: usize| (kernel[i] - 1) * dilations[i] + 1;
        let pads = (0..count).map(|i| match &kind[..] {
            "valid" => Ok([0, 0]),
            "custom" => Ok([given[2 * i], given[2 * i + 1]]),
            "same" | "same_lower" => {
                let needed = ((sizes[i].div_ceil(strides[i]) - 1) * strides[i] + extent(i)).saturating_sub(sizes[i]);
                let (less, more) = (needed / 2, needed - needed / 2);
                Ok(if kind == "same" { [less, more] } else { [more, less] })
            }
            other => Err(format!("padding `{other}`")),
        });
        let pads = pads.collect::<Result<Vec<_>, String>>()?;
        Ok(Window { kernel, strides, dilations, pads })
    }

    /// Padding behind each axis grows until the last window, which may begin within the padding, is whole.
    fn round_up(&mut self, sizes: &[u64]) {
        for (i, pads) in self.pads.iter_mut().enumerate() {
            let free = (sizes[i] + pads[0] + pads[1]).saturating_sub(self.kernel[i]);
            pads[1] += free.div_ceil(self.strides[i]) * self.strides[i] - free;
        }
    }

    fn pads_of_all_axes(&self) -> Vec<[u64; 2]> {
        [&[[0, 0]; 2][..], &self.pads].concat()
    }

    fn outputs(&self, padded: &[u64]) -> Vec<u64> {
        let extent = |i: usize| (self.kernel[i] - 1) * self.dilations[i] + 1;
        (0..self.kernel.len()).map(|i| padded[i].saturating_sub(extent(i)) / self.strides[i] + 1).collect()
    }
}

/// A tensor with one spatial axis gets a second one of size 1.
fn with_plane(l: &mut Lowering<'_>, x: &Tensor) -> Tensor {
    if x.rank() != 3 {
        return x.clone();
    }
    let shape = [&x.shape[..], &[1]].concat();
    l.reshape(x, &shape)
}

fn conv(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (x, weight) = (l.tensor(op, "x")?, l.tensor(op, "weight")?);
    let window = Window::of(l, op, &x.shape[2..], weight.shape[2..].to_vec())?;
    let groups = l.integer_or(op, "groups", 1)?.max(1) as u64;
    let padded = pad_constant(l, &x, &window.pads_of_all_axes(), 0.0)?;
    let mut shape = [&[x.shape[0], weight.shape[0]][..], &window.outputs(&padded.shape[2..])].concat();
    let flat = x.rank() == 3;
    let (padded, weight) = (with_plane(l, &padded), with_plane(l, &weight));
    let (mut strides, mut dilations) = (window.strides, window.dilations);
    if flat {
        strides.push(1);
        dilations.push(1);
        shape.push(1);
    }
    let name = if shape.len() == 5 { "primitive.conv3d_v1" } else { "primitive.conv2d_v1" };
    let (strides, dilations, groups) = (l.unsigned(&strides), l.unsigned(&dilations), l.unsigned_scalar(groups));
    let product = l.op(name, &[&padded, &weight, &strides, &dilations, &groups], &shape, x.element);
    let product = with_bias(l, op, product)?;
    if flat {
        shape.pop();
    }
    Ok(vec![l.reshape(&product, &shape)])
}

fn with_bias(l: &mut Lowering<'_>, op: &Op, product: Tensor) -> Result<Tensor, String> {
    let Some(bias) = l.optional(op, "bias")? else { return Ok(product) };
    let bias = super::arithmetic::per_channel(l, &product, &bias);
    l.binary("primitive.add_v1", &product, &bias)
}

/// Without padding, and cut afterwards.
fn conv_transpose(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (x, weight) = (l.tensor(op, "x")?, l.tensor(op, "weight")?);
    if x.rank() > 4 {
        return Err("a transposed convolution of three spatial axes".into());
    }
    let count = x.rank() - 2;
    let mut strides = positive(l.integers_or(op, "strides", vec![1; count])?);
    let mut dilations = positive(l.integers_or(op, "dilations", vec![1; count])?);
    let groups = l.integer_or(op, "groups", 1)?.max(1) as u64;
    let (wanted, _) = l.result_type(op, 0)?;
    let kind = l.text(op, "pad_type", "valid");
    let given = positive(l.integers_or(op, "pad", vec![0; 2 * count])?);
    let full: Vec<u64> =
        (0..count).map(|i| (x.shape[i + 2] - 1) * strides[i] + (weight.shape[i + 2] - 1) * dilations[i] + 1).collect();
    let mut shape = [&[x.shape[0], weight.shape[1] * groups][..], &full].concat();
    let begin: Vec<u64> = (0..count)
        .map(|i| match &kind[..] {
            "custom" => given[2 * i],
            "same" => full[i].saturating_sub(wanted[i + 2]) / 2,
            _ => 0,
        })
        .collect();
    let flat = x.rank() == 3;
    let (input, weight) = (with_plane(l, &x), with_plane(l, &weight));
    if flat {
        strides.push(1);
        dilations.push(1);
        shape.push(1);
    }
    let (strides, dilations) = (l.unsigned(&strides), l.unsigned(&dilations));
    let (no_pads, no_output_pads, groups) = (l.unsigned(&[0; 2]), l.unsigned(&[0; 2]), l.unsigned_scalar(groups));
    let operands = [&input, &weight, &strides, &no_pads, &dilations, &no_output_pads, &groups];
    let product = l.op("primitive.conv_transpose2d_v1", &operands, &shape, x.element);
    let mut result = with_bias(l, op, product)?;
    if flat {
        shape.pop();
        result = l.reshape(&result, &shape);
    }
    for i in 0..count {
        let end = begin[i] + wanted[i + 2];
        let behind = end.saturating_sub(result.shape[i + 2]);
        if behind > 0 {
            // an output shape beyond what the windows reach
            let mut pads = vec![[0, 0]; result.rank()];
            pads[i + 2][1] = behind;
            result = pad_constant(l, &result, &pads, 0.0)?;
        }
        result = l.slice_axis(&result, i + 2, begin[i], end);
    }
    Ok(vec![result])
}

/// A pooling operation over padded input of two spatial axes.
fn pool(l: &mut Lowering<'_>, x: &Tensor, window: &Window, name: &'static str, padding: f64) -> Result<Tensor, String> {
    if x.rank() > 4 {
        return Err("pooling of three spatial axes".into());
    }
    let padded = pad_constant(l, x, &window.pads_of_all_axes(), padding)?;
    let shape = [&x.shape[..2], &window.outputs(&padded.shape[2..])].concat();
    let flat = x.rank() == 3;
    let padded = with_plane(l, &padded);
    let planar = |list: &[u64]| if flat { [list, &[1]].concat() } else { list.to_vec() };
    let (kernel, strides, dilations) = (
        l.unsigned(&planar(&window.kernel)),
        l.unsigned(&planar(&window.strides)),
        l.unsigned(&planar(&window.dilations)),
    );
    let mut operands = vec![&padded, &kernel, &strides, &dilations];
    let ceil = l.boolean(false);
    if name == "primitive.max_pool_2d_v1" {
        operands.push(&ceil);
    }
    let pooled = l.op(name, &operands, &planar(&shape), x.element);
    Ok(l.reshape(&pooled, &shape))
}

fn window_of(l: &mut Lowering<'_>, op: &Op) -> Result<(Tensor, Window), String> {
    let x = l.tensor(op, "x")?;
    let kernel = positive(l.integers(op, "kernel_sizes")?.unwrap_or_default());
    let mut window = Window::of(l, op, &x.shape[2..], kernel)?;
    if l.flag(op, "ceil_mode")? {
        window.round_up(&x.shape[2..]);
    }
    Ok((x, window))
}

fn max_pool(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (x, window) = window_of(l, op)?;
    Ok(vec![pool(l, &x, &window, "primitive.max_pool_2d_v1", -65504.0)?])
}

/// Elements of each window: all of the kernel, or those within the input.
fn counts(x: &Tensor, window: &Window, outputs: &[u64], exclude: bool) -> Vec<f64> {
    let along = |i: usize, place: u64| {
        let begin = place * window.strides[i];
        let inside = |k: &u64| {
            let at = begin + k * window.dilations[i];
            at >= window.pads[i][0] && at < window.pads[i][0] + x.shape[i + 2]
        };
        if exclude { (0..window.kernel[i]).filter(inside).count() as f64 } else { window.kernel[i] as f64 }
    };
    let mut counts = vec![1.0];
    for (i, size) in outputs.iter().enumerate() {
        counts = counts
            .iter()
            .flat_map(|count| (0..*size).map(move |place| (*count, place)))
            .map(|(count, place)| count * along(i, place))
            .collect();
    }
    counts
}

fn avg_pool(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (x, window) = window_of(l, op)?;
    let exclude = l.flag(op, "exclude_padding_from_average")?;
    let sums = pool(l, &x, &window, "primitive.sum_pool_2d_v1", 0.0)?;
    let outputs = sums.shape[2..].to_vec();
    let counts = counts(&x, &window, &outputs, exclude);
    let counts = l.floats(&counts, &[&[1, 1][..], &outputs].concat(), x.element)?;
    Ok(vec![l.binary("primitive.divide_v1", &sums, &counts)?])
}

fn l2_pool(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (x, window) = window_of(l, op)?;
    let squares = l.binary("primitive.mul_v1", &x, &x)?;
    let sums = pool(l, &squares, &window, "primitive.sum_pool_2d_v1", 0.0)?;
    Ok(vec![l.unary("primitive.sqrt_v1", &sums)])
}

/// Sum over a window along one axis, of the same size.
pub(super) fn window_sum(l: &mut Lowering<'_>, x: &Tensor, axis: usize, size: u64) -> Result<Tensor, String> {
    let mut pads = vec![[0, 0]; x.rank()];
    pads[axis] = [(size - 1) / 2, size / 2];
    let padded = pad_constant(l, x, &pads, 0.0)?;
    let mut sum: Option<Tensor> = None;
    for offset in 0..size {
        let part = l.slice_axis(&padded, axis, offset, offset + x.shape[axis]);
        sum = Some(match sum {
            None => part,
            Some(sum) => l.binary("primitive.add_v1", &sum, &part)?,
        });
    }
    sum.ok_or_else(|| "a window without size".into())
}
