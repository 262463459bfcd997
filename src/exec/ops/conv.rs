//! Convolutions over one, two or three spatial axes.

use std::sync::Arc;

use smallvec::SmallVec;

use super::matmul::bias;
use super::{Resolved, Row, computing};
use crate::arithmetic::ProductArithmetic;
use crate::engine::sums::{multiply, product};
use crate::engine::{EngineEffect, EngineEffects};
use crate::kernel::{Call, Input, Kernel, Matrix};
use crate::pool::Pool;
use crate::resolve::Resolver;
use crate::tensor::{Dims, for_each_index, strides};
use crate::weight::WeightProduct;
use anec_kernels::aligned_buf::AlignedBuf;
use anec_kernels::layout::MatrixLayout;
use anec_kernels::pool;

/// Rows of the table.
pub(super) const ROWS: &[Row] = computing! {
    "conv" => Conv::resolve,
};

/// Convolution along one spatial axis.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    pub size: usize,
    pub kernel: usize,
    pub stride: usize,
    pub dilation: usize,
    pub before: usize,
    pub after: usize,
    pub out: usize,
}

/// Padding mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PadType {
    /// No padding.
    Valid,
    /// `ceil(size / stride)` results; the odd element of padding comes last.
    Same,
    /// `ceil(size / stride)` results; the odd element of padding comes first.
    SameLower,
    /// Padding given by `pad`.
    Custom,
}

/// Geometry of the spatial axes.
#[derive(Clone)]
pub(crate) struct Geometry {
    strides: Option<Vec<usize>>,
    dilations: Option<Vec<usize>>,
    pub pad_type: PadType,
    /// Padding before and after each axis; empty unless `pad_type` is `custom`.
    pad: Vec<usize>,
}

impl Geometry {
    /// Resolves strides, dilations and padding of an op.
    pub fn resolve(op: &Resolver<'_>) -> Result<Self, String> {
        let numbers = |name: &str, least: i64| -> Result<Option<Vec<usize>>, String> {
            let Some(given) = op.known_integers(name)? else { return Ok(None) };
            let numbers: Option<Vec<usize>> =
                given.iter().map(|n| usize::try_from(*n).ok().filter(|_| *n >= least)).collect();
            numbers.map(Some).ok_or_else(|| format!("`{name}` {given:?} doesn't fit spatial axes"))
        };
        let pad_type = match op.text("pad_type")? {
            "valid" => PadType::Valid,
            "same" => PadType::Same,
            "same_lower" => PadType::SameLower,
            "custom" => PadType::Custom,
            other => return Err(format!("pad_type `{other}` is none of valid, same, same_lower, custom")),
        };
        let pad = match pad_type {
            PadType::Custom => numbers("pad", 0)?.ok_or("parameter `pad` is missing")?,
            _ => Vec::new(),
        };
        Ok(Geometry { strides: numbers("strides", 1)?, dilations: numbers("dilations", 1)?, pad_type, pad })
    }

    /// Checks that the geometry has `rank` spatial axes.
    pub fn check(&self, rank: usize) -> Result<(), String> {
        for (name, given) in [("strides", &self.strides), ("dilations", &self.dilations)] {
            if let Some(given) = given.as_ref().filter(|given| given.len() != rank) {
                return Err(format!("`{name}` {given:?} doesn't fit {rank} spatial axes"));
            }
        }
        if self.pad_type == PadType::Custom && self.pad.len() != 2 * rank {
            return Err(format!("`pad` {:?} doesn't fit {rank} spatial axes", self.pad));
        }
        Ok(())
    }

    /// Stride of an axis.
    pub fn stride(&self, axis: usize) -> usize {
        self.strides.as_ref().map_or(1, |strides| strides[axis])
    }

    /// Dilation of an axis.
    pub fn dilation(&self, axis: usize) -> usize {
        self.dilations.as_ref().map_or(1, |dilations| dilations[axis])
    }

    /// Padding of `pad` before and after an axis.
    pub fn pad(&self, axis: usize) -> (usize, usize) {
        self.pad.get(2 * axis..2 * axis + 2).map_or((0, 0), |pair| (pair[0], pair[1]))
    }
}

/// Extent of a dilated kernel.
pub(super) fn kernel_extent(kernel: usize, dilation: usize) -> usize {
    kernel.saturating_sub(1).saturating_mul(dilation) + 1
}

/// Spatial axes of an op.
pub(super) type Axes = SmallVec<[Axis; 3]>;

/// Axes for these input and kernel sizes.
pub(super) fn axes(geometry: &Geometry, sizes: &[usize], kernels: &[usize]) -> Result<Axes, String> {
    geometry.check(sizes.len())?;
    (0..sizes.len())
        .map(|i| {
            let (size, kernel) = (sizes[i], kernels[i]);
            let (stride, dilation) = (geometry.stride(i), geometry.dilation(i));
            let kernel_extent = kernel_extent(kernel, dilation);
            let (before, after) = match geometry.pad_type {
                PadType::Valid | PadType::Custom => geometry.pad(i),
                PadType::Same | PadType::SameLower => {
                    let covered = size.div_ceil(stride).saturating_sub(1) * stride + kernel_extent;
                    let total = covered.saturating_sub(size);
                    let (less, more) = (total / 2, total - total / 2);
                    if geometry.pad_type == PadType::Same { (less, more) } else { (more, less) }
                }
            };
            let padded = size + before + after;
            let span = padded.checked_sub(kernel_extent);
            let span =
                span.ok_or_else(|| format!("a kernel that reaches over {kernel_extent} is beyond a size of {padded}"))?;
            Ok(Axis { size, kernel, stride, dilation, before, after, out: span / stride + 1 })
        })
        .collect()
}

/// A convolution.
#[derive(Clone)]
pub(crate) struct Conv {
    pub x: Input,
    pub weight: Matrix,
    pub bias: Option<Input>,
    pub groups: usize,
    pub geometry: Geometry,
    /// Arithmetic of products.
    pub arithmetic: ProductArithmetic,
}

impl Conv {
    fn resolve(op: &mut Resolver<'_>) -> Resolved {
        Ok(Arc::new(Conv {
            x: op.input("x")?,
            weight: op.matrix("weight")?,
            bias: op.optional_input("bias")?,
            groups: usize::try_from(op.integer("groups")?).unwrap_or(0),
            geometry: Geometry::resolve(op)?,
            arithmetic: ProductArithmetic::default(),
        }))
    }

    /// Returns whether it multiplies the channels of each position with a constant.
    pub fn mixes_channels(&self) -> bool {
        let Matrix::Constant(weight) = &self.weight else { return false };
        self.groups == 1 && weight.shape().iter().skip(2).all(|size| *size == 1)
    }
}

impl Kernel for Conv {
    fn weight_product<'c>(&'c self, call: &'c Call<'_>) -> Result<Option<WeightProduct<'c>>, String> {
        let Matrix::Constant(weight) = &self.weight else { return Ok(None) };
        let x = call.tensor(self.x)?;
        let rank = x.rank();
        let fits = (3..=5).contains(&rank) && weight.shape().len() == rank && weight.columns() == x.shape[1];
        if !fits || !self.mixes_channels() || x.shape[0] != 1 || self.arithmetic.effects != EngineEffects::NONE {
            return Ok(None);
        }
        let axes = axes(&self.geometry, &x.shape[2..], &weight.shape()[2..])?;
        if axes.iter().any(|axis| axis.stride != 1 || axis.out != axis.size) {
            return Ok(None);
        }
        let tokens = axes.iter().map(|axis| axis.size).product();
        let layout = MatrixLayout { row: tokens, column: 1 };
        let mut shape = Dims::from_slice(&x.shape);
        shape[1] = weight.rows();
        let (bias, x) = (bias(call, self.bias, weight.rows())?, (call.floats(self.x)?, layout));
        let activations = self.arithmetic.activations;
        Ok(Some(WeightProduct { weight, activations, bias, x, tokens, shape, layout }))
    }

    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let weight = call.matrix(&self.weight)?;
        let (rows, columns, groups) = (weight.rows(), weight.columns(), self.groups);
        let bias = bias(call, self.bias, rows)?;
        let x = call.tensor(self.x)?;
        let values = call.floats(self.x)?;
        let misfit = || {
            let (x, weight) = (&x.shape, weight.shape());
            format!("`x` of shape {x:?} doesn't fit a weight of shape {weight:?} in {groups} groups")
        };
        if !(3..=5).contains(&x.rank()) || weight.shape().len() != x.rank() || groups == 0 {
            return Err(misfit());
        }
        let (batch, channels) = (x.shape[0], x.shape[1]);
        if weight.shape()[1] * groups != channels || rows % groups != 0 {
            return Err(misfit());
        }
        let axes = axes(&self.geometry, &x.shape[2..], &weight.shape()[2..])?;
        let places: usize = axes.iter().map(|a| a.out).product();
        let shape: Dims = [batch, rows].into_iter().chain(axes.iter().map(|a| a.out)).collect();
        let size: usize = x.shape[2..].iter().product();
        let pointwise = groups == 1 && axes.iter().all(|a| a.kernel == 1 && a.stride == 1 && a.out == a.size);
        if batch * rows * places == 0 {
            let empty = pool.filled(&shape, 0f32);
            return call.push(empty);
        }
        // a convolution without sums has none to saturate
        let mut arithmetic = self.arithmetic;
        if columns == 1 {
            arithmetic.effects = arithmetic.effects.without(EngineEffect::SumsSaturate);
        }
        if pointwise {
            if channels == 0 {
                let zeros = pool.filled(&shape, 0f32);
                return call.push(zeros);
            }
            let layout = MatrixLayout { row: places, column: 1 };
            let result = pool.written(&shape, |out| {
                for (x, out) in values.chunks_exact(channels * size).zip(out.chunks_exact_mut(rows * places)) {
                    multiply(arithmetic, &weight, (x, layout), places, bias, (out, layout));
                }
            });
            return call.push(result);
        }
        let dense = weight.dense();
        let Some(kernel) = dense.floats() else { return Err(misfit()) };
        let (group_rows, group_channels) = (rows / groups, channels / groups);
        let result = pool.make(&shape, |out| {
            out.resize(batch * rows * places, 0.0);
            pool::for_each_chunk(out, group_rows * places, |i, out| {
                let (n, group) = (i / groups, i % groups);
                let first = (n * channels + group * group_channels) * size;
                let count = axes.iter().map(|a| a.kernel * a.out).product::<usize>() * group_channels;
                let mut gathered = AlignedBuf::new(count);
                windows(&values[first..][..group_channels * size], &axes, gathered.floats());
                let rows = &kernel[group * group_rows * columns..][..group_rows * columns];
                let (a, b) = (MatrixLayout { row: columns, column: 1 }, MatrixLayout { row: places, column: 1 });
                product(arithmetic.effects, (group_rows, columns, places), (rows, a), (gathered.floats(), b), out);
                if let Some(bias) = bias {
                    for (r, out) in out.chunks_exact_mut(places).enumerate() {
                        out.iter_mut().for_each(|v| *v += bias[group * group_rows + r]);
                    }
                }
            });
        });
        call.push(result)
    }
}

/// Input elements under each position of the kernel, for each channel; one per result.
fn windows(values: &[f32], axes: &[Axis], out: &mut [f32]) {
    let size: usize = axes.iter().map(|a| a.size).product();
    let mut out = out.iter_mut();
    for plane in values.chunks_exact(size.max(1)) {
        for_each_overlap(axes, |offset| {
            if let Some(place) = out.next() {
                *place = offset.map_or(0.0, |offset| plane[offset]);
            }
        });
    }
}

/// Calls `visit` for each position of the kernel and each result, with the element of the plane where the two meet;
/// `None` in the padding.
pub(super) fn for_each_overlap(axes: &[Axis], mut visit: impl FnMut(Option<usize>)) {
    let sizes: Dims = axes.iter().map(|a| a.size).collect();
    let kernel: Dims = axes.iter().map(|a| a.kernel).collect();
    let results: Dims = axes.iter().map(|a| a.out).collect();
    let step = strides(&sizes);
    // an index into this shape is its number when the strides are those of the shape itself
    let (kernel_strides, result_strides) = (strides(&kernel), strides(&results));
    for_each_index(&kernel, [&kernel_strides], |[at]| {
        for_each_index(&results, [&result_strides], |[result]| {
            let mut offset = Some(0);
            for (i, axis) in axes.iter().enumerate() {
                let k = at / kernel_strides[i] % axis.kernel;
                let r = result / result_strides[i] % axis.out;
                let place = (r * axis.stride + k * axis.dilation).checked_sub(axis.before);
                let place = place.filter(|place| *place < axis.size);
                offset = offset.and_then(|offset| place.map(|place| offset + place * step[i]));
            }
            visit(offset);
        });
    });
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, counted, f, i, run, s, try_run};

    #[test]
    fn a_kernel_of_one_mixes_channels() {
        let x = f(&[1, 2, 1, 3], &[1.0, 2.0, 3.0, 10.0, 20.0, 30.0]);
        let weight = f(&[3, 2, 1, 1], &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
        let out = run("conv", vec![("x", x), ("weight", weight), ("bias", f(&[3], &[0.0, 0.5, 0.0]))]);
        assert_close(&out, &[1, 3, 1, 3], &[1.0, 2.0, 3.0, 10.5, 20.5, 30.5, 11.0, 22.0, 33.0]);
    }

    #[test]
    fn kernels_slide_with_stride_dilation_and_padding() {
        let x = || f(&[1, 1, 5], &[1.0, 2.0, 3.0, 4.0, 5.0]);
        let weight = || f(&[1, 1, 2], &[1.0, 10.0]);
        let plain = run("conv", vec![("x", x()), ("weight", weight())]);
        assert_close(&plain, &[1, 1, 4], &[21.0, 32.0, 43.0, 54.0]);
        let strided = run("conv", vec![("x", x()), ("weight", weight()), ("strides", i(&[1], &[2]))]);
        assert_close(&strided, &[1, 1, 2], &[21.0, 43.0]);
        let dilated = run("conv", vec![("x", x()), ("weight", weight()), ("dilations", i(&[1], &[3]))]);
        assert_close(&dilated, &[1, 1, 2], &[41.0, 52.0]);
        let same = run("conv", vec![("x", x()), ("weight", weight()), ("pad_type", s("same"))]);
        assert_close(&same, &[1, 1, 5], &[21.0, 32.0, 43.0, 54.0, 5.0]);
        let lower = run("conv", vec![("x", x()), ("weight", weight()), ("pad_type", s("same_lower"))]);
        assert_close(&lower, &[1, 1, 5], &[10.0, 21.0, 32.0, 43.0, 54.0]);
        let custom =
            run("conv", vec![("x", x()), ("weight", weight()), ("pad_type", s("custom")), ("pad", i(&[2], &[2, 0]))]);
        assert_close(&custom, &[1, 1, 6], &[0.0, 10.0, 21.0, 32.0, 43.0, 54.0]);
    }

    #[test]
    fn groups_see_their_own_channels() {
        let out = run(
            "conv",
            vec![
                ("x", counted(&[1, 2, 2, 2])),
                ("weight", f(&[2, 1, 2, 2], &[1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 2.0])),
                ("groups", i(&[], &[2])),
            ],
        );
        assert_close(&out, &[1, 2, 1, 1], &[6.0, 14.0]);
        let problem = try_run("conv", vec![("x", counted(&[1, 3, 2])), ("weight", counted(&[1, 2, 1]))]).unwrap_err();
        assert!(problem.contains("[1, 3, 2]"), "{problem}");
    }
}
