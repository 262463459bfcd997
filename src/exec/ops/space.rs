//! Ops that move elements between channels, space and windows, and pooling over space.

use super::conv::{Axis, axes};
use super::{Call, Results, Row, computing, map_data, moving, one};
use crate::strided::View;
use crate::tensor::{Tensor, TensorData, axis_index, for_each_index, strides};
use anec_kernels::reduce::{max, sum, sum_of_squares};

/// The rows of the group that moves.
pub(super) const ROWS: &[Row] = moving! {
    "depth_to_space" => |c| to_space(c, "block_size", false),
    "pixel_shuffle" => |c| to_space(c, "upscale_factor", true),
    "pixel_unshuffle" => |c| to_depth(c, "downscale_factor", true),
    "sliding_windows" => sliding_windows,
    "space_to_depth" => |c| to_depth(c, "block_size", false),
    "upsample_nearest_neighbor" => upsample_nearest_neighbor,
};

/// The rows of the group that computes.
pub(super) const POOL: &[Row] = computing! {
    "avg_pool" => average_pool,
    "l2_pool" => |c| pool(c, |window, _| sum_of_squares(window).sqrt()),
    "max_pool" => |c| pool(c, |window, _| max(window)),
};

fn block_size(call: &Call<'_>, parameter: &str) -> Result<usize, String> {
    let size = call.integer(parameter)?;
    usize::try_from(size).ok().filter(|size| *size > 0).ok_or_else(|| format!("`{parameter}` is {size}"))
}

/// Channels become blocks in space. The place in a block is counted after the channels (`channels_first`: pixel
/// shuffle) or before them (depth to space).
fn to_space(call: &mut Call<'_>, parameter: &str, channels_first: bool) -> Results {
    let block = block_size(call, parameter)?;
    let x = call.tensor("x")?;
    let [n, c, h, w] = x.shape[..] else { return Err(format!("`x` of shape {:?} is no image", x.shape)) };
    if c % (block * block) != 0 {
        return Err(format!("{c} channels don't make blocks of {block} by {block}"));
    }
    let depth = c / (block * block);
    let (split, order) = if channels_first {
        ([n, depth, block, block, h, w], [0, 1, 4, 2, 5, 3])
    } else {
        ([n, block, block, depth, h, w], [0, 3, 4, 1, 5, 2])
    };
    let view = View::whole(&split).permute(&order);
    one(Tensor { data: map_data!(&x.data, v => view.read(v)), shape: vec![n, depth, h * block, w * block] })
}

/// Undoes [`to_space`].
fn to_depth(call: &mut Call<'_>, parameter: &str, channels_first: bool) -> Results {
    let block = block_size(call, parameter)?;
    let x = call.tensor("x")?;
    let [n, c, h, w] = x.shape[..] else { return Err(format!("`x` of shape {:?} is no image", x.shape)) };
    if h % block != 0 || w % block != 0 {
        return Err(format!("{h} by {w} doesn't divide into blocks of {block} by {block}"));
    }
    let split = [n, c, h / block, block, w / block, block];
    let order = if channels_first { [0, 1, 3, 5, 2, 4] } else { [0, 3, 5, 1, 2, 4] };
    let view = View::whole(&split).permute(&order);
    let shape = vec![n, c * block * block, h / block, w / block];
    one(Tensor { data: map_data!(&x.data, v => view.read(v)), shape })
}

/// The last two axes scaled: each result is the element that its place, divided by the factor and cut, names.
fn upsample_nearest_neighbor(call: &mut Call<'_>) -> Results {
    let factors = [call.float_or("scale_factor_height", 1.0)?, call.float_or("scale_factor_width", 1.0)?];
    let x = call.tensor("x")?;
    let [lead @ .., h, w] = &x.shape[..] else { return Err(format!("`x` of shape {:?} is no image", x.shape)) };
    if factors.iter().any(|f| !(*f > 0.0 && f.is_finite())) {
        return Err(format!("`x` can't be scaled by {factors:?}"));
    }
    let sources = |size: usize, factor: f32| -> Vec<usize> {
        let count = (size as f32 * factor) as usize;
        (0..count).map(|i| ((i as f32 / factor) as usize).min(size.saturating_sub(1))).collect()
    };
    let (rows, columns) = (sources(*h, factors[0]), sources(*w, factors[1]));
    fn pick<T: Copy>(from: &[T], (h, w): (usize, usize), rows: &[usize], columns: &[usize]) -> Vec<T> {
        let planes = from.chunks_exact((h * w).max(1));
        planes.flat_map(|p| rows.iter().flat_map(move |r| columns.iter().map(move |c| p[r * w + c]))).collect()
    }
    let shape = [lead, &[rows.len(), columns.len()]].concat();
    one(Tensor { data: map_data!(&x.data, v => pick(v, (*h, *w), &rows, &columns)), shape })
}

/// Windows of `size` along an axis, each `stride` after the one before: the axis becomes two.
fn sliding_windows(call: &mut Call<'_>) -> Results {
    let (size, stride) = (block_size(call, "size")?, call.integer_or("stride", 1)?);
    let x = call.tensor("x")?;
    let axis = axis_index(call.integer("axis")?, x.rank())?;
    let stride = usize::try_from(stride).ok().filter(|s| *s > 0).ok_or_else(|| format!("`stride` is {stride}"))?;
    let span = x.shape[axis].checked_sub(size);
    let span = span.ok_or_else(|| format!("windows of {size} over an axis of {}", x.shape[axis]))?;
    let mut view = View::whole(&x.shape);
    let step = view.strides[axis];
    view.shape[axis] = span / stride + 1;
    view.strides[axis] = step * stride as isize;
    view.shape.insert(axis + 1, size);
    view.strides.insert(axis + 1, step);
    one(Tensor { data: map_data!(&x.data, v => view.read(v)), shape: view.shape })
}

/// The mean of each window: of the elements within the tensor, or of padded zeros, too.
fn average_pool(call: &mut Call<'_>) -> Results {
    let excluded = call.flag_or("exclude_padding_from_average", false)?;
    pool(call, |window, padded| sum(window) / if excluded { window.len() } else { padded } as f32)
}

/// `function` of the elements of each window that are within the tensor, and of how many the window has with padding.
fn pool(call: &mut Call<'_>, function: impl Fn(&[f32], usize) -> f32) -> Results {
    let kernel: Option<Vec<usize>> =
        call.integers("kernel_sizes")?.into_iter().map(|k| usize::try_from(k).ok().filter(|k| *k > 0)).collect();
    let x = call.tensor("x")?;
    let values = call.floats("x")?;
    let spatial = x.shape.get(2..).unwrap_or_default();
    let kernel = kernel.filter(|k| k.len() == spatial.len() && !k.is_empty());
    let kernel = kernel.ok_or_else(|| format!("`kernel_sizes` doesn't fit `x` of shape {:?}", x.shape))?;
    let mut axes = axes(call, spatial, &kernel)?;
    let mut ends: Vec<usize> = axes.iter().map(|a| a.size + a.before + a.after).collect();
    if call.flag_or("ceil_mode", false)? {
        for (axis, end) in axes.iter_mut().zip(&mut ends) {
            // one more window where the last one left something over, if it starts within the tensor
            let left = *end - axis.kernel - (axis.out - 1) * axis.stride;
            if left > 0 && axis.out * axis.stride < axis.size + axis.before {
                axis.out += 1;
            }
        }
    }
    let results: Vec<usize> = axes.iter().map(|a| a.out).collect();
    let planes: usize = x.shape[..2].iter().product();
    let size: usize = spatial.iter().product();
    let mut out = Vec::with_capacity(planes * results.iter().product::<usize>());
    let (steps, result_strides) = (strides(spatial), strides(&results));
    let mut window = Vec::new();
    for plane in values.chunks_exact(size.max(1)) {
        for_each_index(&results, [&result_strides], |[result]| {
            window.clear();
            let first: Vec<usize> =
                axes.iter().zip(&result_strides).map(|(a, stride)| result / stride % a.out * a.stride).collect();
            gather_window(plane, &axes, &first, &steps, 0, &mut window);
            let padded =
                first.iter().zip(&axes).zip(&ends).map(|((first, a), end)| a.kernel.min(end.saturating_sub(*first)));
            out.push(function(&window, padded.product()));
        });
    }
    one(Tensor { shape: [&x.shape[..2], &results].concat(), data: TensorData::F32(out) })
}

fn gather_window(plane: &[f32], axes: &[Axis], first: &[usize], steps: &[usize], offset: usize, window: &mut Vec<f32>) {
    let Some((axis, axes)) = axes.split_first() else {
        window.push(plane[offset]);
        return;
    };
    let begin = first[0].max(axis.before) - axis.before;
    let end = (first[0] + axis.kernel).saturating_sub(axis.before).min(axis.size);
    for place in begin..end {
        gather_window(plane, axes, &first[1..], &steps[1..], offset + place * steps[0], window);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Value;
    use super::super::testing::{assert_close, b, f, i, run, s};

    fn counted(shape: &[usize]) -> Value {
        let count: usize = shape.iter().product();
        f(shape, &(0..count).map(|v| v as f32).collect::<Vec<_>>())
    }

    #[test]
    fn channels_become_blocks_and_back() {
        // channels 0..8 of one pixel: two results of two by two
        let shuffled = run("pixel_shuffle", vec![("x", counted(&[1, 8, 1, 1])), ("upscale_factor", i(&[], &[2]))]);
        assert_close(&shuffled, &[1, 2, 2, 2], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        let spread = run("depth_to_space", vec![("x", counted(&[1, 8, 1, 1])), ("block_size", i(&[], &[2]))]);
        assert_close(&spread, &[1, 2, 2, 2], &[0.0, 2.0, 4.0, 6.0, 1.0, 3.0, 5.0, 7.0]);
        for (there, back, to, from) in [
            ("pixel_unshuffle", "pixel_shuffle", "downscale_factor", "upscale_factor"),
            ("space_to_depth", "depth_to_space", "block_size", "block_size"),
        ] {
            let deep = run(there, vec![("x", counted(&[1, 3, 4, 6])), (to, i(&[], &[2]))]);
            assert_eq!(deep.shape, [1, 12, 2, 3]);
            let deep = f(&deep.shape, deep.floats().unwrap());
            let Value::Tensor(original) = counted(&[1, 3, 4, 6]) else { panic!("a tensor") };
            assert_eq!(run(back, vec![("x", deep), (from, i(&[], &[2]))]), *original);
        }
    }

    #[test]
    fn the_nearest_element_fills_a_scaled_image() {
        let x = || counted(&[1, 1, 2, 2]);
        let scale = |h, w| {
            run("upsample_nearest_neighbor", vec![("x", x()), ("scale_factor_height", h), ("scale_factor_width", w)])
        };
        let whole = scale(i(&[], &[1]), i(&[], &[2]));
        assert_close(&whole, &[1, 1, 2, 4], &[0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]);
        let part = scale(f(&[], &[1.5]), f(&[], &[0.5]));
        assert_close(&part, &[1, 1, 3, 1], &[0.0, 0.0, 2.0]);
    }

    #[test]
    fn windows_slide() {
        let windows = run(
            "sliding_windows",
            vec![("x", counted(&[5])), ("axis", i(&[], &[0])), ("size", i(&[], &[3])), ("stride", i(&[], &[2]))],
        );
        assert_close(&windows, &[2, 3], &[0.0, 1.0, 2.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn pools_see_padding_as_told() {
        let pool = |operator, excluded: bool, ceil: bool| {
            run(
                operator,
                vec![
                    ("x", f(&[1, 1, 4], &[1.0, 2.0, 3.0, 5.0])),
                    ("kernel_sizes", i(&[1], &[2])),
                    ("strides", i(&[1], &[2])),
                    ("pad_type", s("custom")),
                    ("pad", i(&[2], &[1, 0])),
                    ("exclude_padding_from_average", b(&[], &[excluded])),
                    ("ceil_mode", b(&[], &[ceil])),
                ],
            )
        };
        assert_close(&pool("max_pool", false, false), &[1, 1, 2], &[1.0, 3.0]);
        assert_close(&pool("avg_pool", false, false), &[1, 1, 2], &[0.5, 2.5]);
        assert_close(&pool("avg_pool", true, false), &[1, 1, 2], &[1.0, 2.5]);
        assert_close(&pool("max_pool", false, true), &[1, 1, 3], &[1.0, 3.0, 5.0]);
        assert_close(&pool("l2_pool", false, false), &[1, 1, 2], &[1.0, 13f32.sqrt()]);
    }
}
