//! Convolutions over one, two or three spatial axes.

use super::matmul::{bias, weight};
use super::{Call, Results, Row, computing, one};
use crate::tensor::{Tensor, for_each_index, strides};
use anec_kernels::matrix::product;
use anec_kernels::layout::Layout;
use anec_kernels::product::multiply;
use anec_kernels::team;

/// The rows of this group.
pub(super) const ROWS: &[Row] = computing! {
    "conv" => conv,
};

/// What happens along one spatial axis.
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

/// What the op says of the spatial axes.
pub(super) struct Geometry {
    pub strides: Vec<usize>,
    pub dilations: Vec<usize>,
    /// Elements added before and after each axis; none unless `pad_type` is `custom`.
    pub pad: Vec<usize>,
}

/// The strides, dilations and padding of an op, for so many spatial axes.
pub(super) fn geometry(call: &Call<'_>, rank: usize) -> Result<Geometry, String> {
    let numbers = |name: &str| -> Result<Vec<usize>, String> {
        let given = call.optional_integers(name)?.unwrap_or_else(|| vec![1; rank]);
        let numbers: Option<Vec<usize>> = given.iter().map(|n| usize::try_from(*n).ok().filter(|n| *n > 0)).collect();
        numbers.filter(|n| n.len() == rank).ok_or_else(|| format!("`{name}` {given:?} doesn't fit {rank} spatial axes"))
    };
    let (strides, dilations) = (numbers("strides")?, numbers("dilations")?);
    if call.text_or("pad_type", "valid")? != "custom" {
        return Ok(Geometry { strides, dilations, pad: vec![0; 2 * rank] });
    }
    let pad = call.integers("pad")?;
    if pad.len() != 2 * rank || pad.iter().any(|n| *n < 0) {
        return Err(format!("`pad` {pad:?} doesn't fit {rank} spatial axes"));
    }
    Ok(Geometry { strides, dilations, pad: pad.iter().map(|n| *n as usize).collect() })
}

/// How far the ends of a kernel are apart, both counted.
pub(super) fn reach(kernel: usize, dilation: usize) -> usize {
    kernel.saturating_sub(1).saturating_mul(dilation) + 1
}

/// `pad_type`: `valid` pads nothing; `same` and `same_lower` pad until there are `ceil(size / stride)` results, the odd
/// one after or before; `custom` is told by `pad`.
pub(super) fn axes(call: &Call<'_>, sizes: &[usize], kernels: &[usize]) -> Result<Vec<Axis>, String> {
    let rank = sizes.len();
    let Geometry { strides, dilations, pad } = geometry(call, rank)?;
    let pad_type = call.text_or("pad_type", "valid")?;
    (0..rank)
        .map(|i| {
            let (size, kernel, stride, dilation) = (sizes[i], kernels[i], strides[i], dilations[i]);
            let reach = reach(kernel, dilation);
            let (before, after) = match pad_type {
                "valid" | "custom" => (pad[2 * i], pad[2 * i + 1]),
                "same" | "same_lower" => {
                    let covered = size.div_ceil(stride).saturating_sub(1) * stride + reach;
                    let total = covered.saturating_sub(size);
                    let (less, more) = (total / 2, total - total / 2);
                    if pad_type == "same" { (less, more) } else { (more, less) }
                }
                other => return Err(format!("pad_type `{other}` is none of valid, same, same_lower, custom")),
            };
            let padded = size + before + after;
            let span = padded.checked_sub(reach);
            let span =
                span.ok_or_else(|| format!("a kernel that reaches over {reach} is beyond a size of {padded}"))?;
            Ok(Axis { size, kernel, stride, dilation, before, after, out: span / stride + 1 })
        })
        .collect()
}

fn conv(call: &mut Call<'_>) -> Results {
    let weight = weight(call, "weight")?;
    let rows = weight.rows();
    let bias = bias(call, rows)?;
    let x = call.tensor("x")?;
    let values = call.floats("x")?;
    let groups = usize::try_from(call.integer_or("groups", 1)?).unwrap_or(0);
    let misfit =
        || format!("`x` of shape {:?} doesn't fit a weight of shape {:?} in {groups} groups", x.shape, weight.shape());
    if !(3..=5).contains(&x.rank()) || weight.shape().len() != x.rank() || groups == 0 {
        return Err(misfit());
    }
    let (batch, channels) = (x.shape[0], x.shape[1]);
    if weight.shape()[1] * groups != channels || rows % groups != 0 {
        return Err(misfit());
    }
    let axes = axes(call, &x.shape[2..], &weight.shape()[2..])?;
    let places: usize = axes.iter().map(|a| a.out).product();
    let shape: Vec<usize> = [batch, rows].into_iter().chain(axes.iter().map(|a| a.out)).collect();
    let mut out = vec![0.0; batch * rows * places];
    let size: usize = x.shape[2..].iter().product();
    let pointwise = groups == 1 && axes.iter().all(|a| a.kernel == 1 && a.stride == 1 && a.out == a.size);
    if out.is_empty() {
        return one(Tensor::new(shape, out));
    }
    if pointwise {
        let layout = Layout { row: places, column: 1 };
        if channels > 0 {
            for (x, out) in values.chunks_exact(channels * size).zip(out.chunks_exact_mut(rows * places)) {
                multiply(&weight, (x, layout), places, bias, (out, layout));
            }
        }
        return one(Tensor::new(shape, out));
    }
    let dense = weight.dense();
    let Some(kernel) = dense.floats() else { return Err(misfit()) };
    let (group_rows, group_channels) = (rows / groups, channels / groups);
    let columns = weight.columns();
    team::for_each_chunk(&mut out, group_rows * places, |i, out| {
        let (n, group) = (i / groups, i % groups);
        let first = (n * channels + group * group_channels) * size;
        let gathered = windows(&values[first..][..group_channels * size], &axes);
        let rows = &kernel[group * group_rows * columns..][..group_rows * columns];
        let (a, b) = (Layout { row: columns, column: 1 }, Layout { row: places, column: 1 });
        product((group_rows, columns, places), (rows, a), (&gathered, b), out);
        if let Some(bias) = bias {
            for (r, out) in out.chunks_exact_mut(places).enumerate() {
                out.iter_mut().for_each(|v| *v += bias[group * group_rows + r]);
            }
        }
    });
    one(Tensor::new(shape, out))
}

/// For each channel and each place in the kernel, the elements that the kernel meets there, one for each result.
fn windows(values: &[f32], axes: &[Axis]) -> Vec<f32> {
    let size: usize = axes.iter().map(|a| a.size).product();
    let count: usize = axes.iter().map(|a| a.kernel * a.out).product();
    let mut out = Vec::with_capacity(values.len() / size.max(1) * count);
    for plane in values.chunks_exact(size.max(1)) {
        for_each_meeting(axes, |offset| out.push(offset.map_or(0.0, |offset| plane[offset])));
    }
    out
}

/// For each place in the kernel and each result, where in the plane the two meet; `None` in the padding.
pub(super) fn for_each_meeting(axes: &[Axis], mut visit: impl FnMut(Option<usize>)) {
    let sizes: Vec<usize> = axes.iter().map(|a| a.size).collect();
    let kernel: Vec<usize> = axes.iter().map(|a| a.kernel).collect();
    let results: Vec<usize> = axes.iter().map(|a| a.out).collect();
    let step = strides(&sizes);
    // an index into a space of this shape is told by its number when the strides are those of the space itself
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
    use super::super::Value;
    use super::super::testing::{assert_close, f, i, run, s, try_run};

    fn counted(shape: &[usize]) -> Value {
        let count: usize = shape.iter().product();
        f(shape, &(0..count).map(|v| v as f32).collect::<Vec<_>>())
    }

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
