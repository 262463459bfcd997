//! Ops that move elements between channels, space and windows; pooling.

use std::sync::Arc;

use super::conv::{Axis, Geometry, axes};
use super::{Resolved, Row, computing, make_like, moving};
use crate::kernel::{Call, Input, Kernel};
use crate::pool::Pool;
use crate::resolve::Resolver;
use crate::strided::View;
use crate::tensor::{Dims, TensorData, axis_index, for_each_index, strides};
use anec_kernels::reduce::{max, sum, sum_of_squares};

/// Rows of the table for ops that move elements.
pub(super) const ROWS: &[Row] = moving! {
    "depth_to_space" => |op| Blocks::resolve(op, "block_size", true, false),
    "pixel_shuffle" => |op| Blocks::resolve(op, "upscale_factor", true, true),
    "pixel_unshuffle" => |op| Blocks::resolve(op, "downscale_factor", false, true),
    "sliding_windows" => SlidingWindows::resolve,
    "space_to_depth" => |op| Blocks::resolve(op, "block_size", false, false),
};

/// Rows of the table for ops that compute.
pub(super) const POOL: &[Row] = computing! {
    "avg_pool" => |op| {
        let excluded = op.flag("exclude_padding_from_average")?;
        pool(op, move |window, padded| sum(window) / if excluded { window.len() } else { padded } as f32)
    },
    "l2_pool" => |c| pool(c, |window, _| sum_of_squares(window).sqrt()),
    "max_pool" => |c| pool(c, |window, _| max(window)),
};

fn block_size(op: &Resolver<'_>, parameter: &str) -> Result<usize, String> {
    let size = op.integer(parameter)?;
    usize::try_from(size).ok().filter(|size| *size > 0).ok_or_else(|| format!("`{parameter}` is {size}"))
}

/// Rearrangement between channels and blocks in space.
struct Blocks {
    x: Input,
    block: usize,
    to_space: bool,
    channels_first: bool,
}

impl Blocks {
    fn resolve(op: &mut Resolver<'_>, parameter: &str, to_space: bool, channels_first: bool) -> Resolved {
        let block = block_size(op, parameter)?;
        Ok(Arc::new(Blocks { x: op.input("x")?, block, to_space, channels_first }))
    }
}

impl Kernel for Blocks {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        match self.to_space {
            true => to_space(self, call, pool),
            false => to_depth(self, call, pool),
        }
    }
}

/// Moves channels to blocks in space. The position in a block is counted after the channels (`channels_first`: pixel
/// shuffle) or before them (depth to space).
fn to_space(op: &Blocks, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
    let (block, channels_first) = (op.block, op.channels_first);
    let x = call.tensor(op.x)?;
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
    let shape = [n, depth, h * block, w * block];
    let result = make_like!(pool, &shape, &x.data, (v, out) => view.read_into(v, out));
    call.push(result)
}

/// Inverse of [`to_space`].
fn to_depth(op: &Blocks, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
    let (block, channels_first) = (op.block, op.channels_first);
    let x = call.tensor(op.x)?;
    let [n, c, h, w] = x.shape[..] else { return Err(format!("`x` of shape {:?} is no image", x.shape)) };
    if h % block != 0 || w % block != 0 {
        return Err(format!("{h} by {w} doesn't divide into blocks of {block} by {block}"));
    }
    let split = [n, c, h / block, block, w / block, block];
    let order = if channels_first { [0, 1, 3, 5, 2, 4] } else { [0, 3, 5, 1, 2, 4] };
    let view = View::whole(&split).permute(&order);
    let shape = [n, c * block * block, h / block, w / block];
    let result = make_like!(pool, &shape, &x.data, (v, out) => view.read_into(v, out));
    call.push(result)
}

/// Windows of `size` along an axis, `stride` apart: the axis becomes two.
struct SlidingWindows {
    x: Input,
    axis: i64,
    size: usize,
    stride: usize,
}

impl SlidingWindows {
    fn resolve(op: &mut Resolver<'_>) -> Resolved {
        let stride = block_size(op, "stride")?;
        let (axis, size) = (op.integer("axis")?, block_size(op, "size")?);
        Ok(Arc::new(SlidingWindows { x: op.input("x")?, axis, size, stride }))
    }
}

impl Kernel for SlidingWindows {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let (size, stride) = (self.size, self.stride);
        let x = call.tensor(self.x)?;
        let axis = axis_index(self.axis, x.rank())?;
        let span = x.shape[axis].checked_sub(size);
        let span = span.ok_or_else(|| format!("windows of {size} over an axis of {}", x.shape[axis]))?;
        let mut view = View::whole(&x.shape);
        let step = view.strides[axis];
        view.shape[axis] = span / stride + 1;
        view.strides[axis] = step * stride as isize;
        view.shape.insert(axis + 1, size);
        view.strides.insert(axis + 1, step);
        let result = make_like!(pool, &view.shape, &x.data, (v, out) => view.read_into(v, out));
        call.push(result)
    }
}

/// `function` of the elements of each window within the tensor, and of the window's size with padding.
struct Pooling<F> {
    x: Input,
    kernel: Vec<usize>,
    geometry: Geometry,
    ceil_mode: bool,
    function: F,
}

fn pool(op: &mut Resolver<'_>, function: impl Fn(&[f32], usize) -> f32 + Send + Sync + 'static) -> Resolved {
    let kernel = op.known_integers("kernel_sizes")?.ok_or("parameter `kernel_sizes` is missing")?;
    let kernel: Option<Vec<usize>> = kernel.iter().map(|k| usize::try_from(*k).ok().filter(|k| *k > 0)).collect();
    let kernel = kernel.ok_or("`kernel_sizes` aren't sizes")?;
    let (geometry, ceil_mode) = (Geometry::resolve(op)?, op.flag("ceil_mode")?);
    Ok(Arc::new(Pooling { x: op.input("x")?, kernel, geometry, ceil_mode, function }))
}

impl<F: Fn(&[f32], usize) -> f32 + Send + Sync + 'static> Kernel for Pooling<F> {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let x = call.tensor(self.x)?;
        let values = call.floats(self.x)?;
        let spatial = x.shape.get(2..).unwrap_or_default();
        let kernel = Some(&self.kernel).filter(|k| k.len() == spatial.len() && !k.is_empty());
        let kernel = kernel.ok_or_else(|| format!("`kernel_sizes` doesn't fit `x` of shape {:?}", x.shape))?;
        let mut axes = axes(&self.geometry, spatial, kernel)?;
        let mut ends: Vec<usize> = axes.iter().map(|a| a.size + a.before + a.after).collect();
        if self.ceil_mode {
            for (axis, end) in axes.iter_mut().zip(&mut ends) {
                // one more window for the remainder, if it starts within the tensor
                let left = *end - axis.kernel - (axis.out - 1) * axis.stride;
                if left > 0 && axis.out * axis.stride < axis.size + axis.before {
                    axis.out += 1;
                }
            }
        }
        let results: Dims = axes.iter().map(|a| a.out).collect();
        let planes: usize = x.shape[..2].iter().product();
        let size: usize = spatial.iter().product();
        let mut out = Vec::with_capacity(planes * results.iter().product::<usize>());
        let (steps, result_strides) = (strides(spatial), strides(&results));
        let mut window = Vec::new();
        for plane in values.chunks_exact(size.max(1)) {
            for_each_index(&results, [&result_strides], |[result]| {
                window.clear();
                let first: Dims =
                    axes.iter().zip(&result_strides).map(|(a, stride)| result / stride % a.out * a.stride).collect();
                gather_window(plane, &axes, &first, &steps, 0, &mut window);
                let padded = first
                    .iter()
                    .zip(&axes)
                    .zip(&ends)
                    .map(|((first, a), end)| a.kernel.min(end.saturating_sub(*first)));
                out.push((self.function)(&window, padded.product()));
            });
        }
        let result = pool.copied(&[&x.shape[..2], &results].concat(), &out);
        call.push(result)
    }
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
    use super::super::testing::{assert_close, b, counted, f, i, run, s};
    use crate::value::Value;

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
    fn windows_slide() {
        let windows = run(
            "sliding_windows",
            vec![("x", counted(&[5])), ("axis", i(&[], &[0])), ("size", i(&[], &[3])), ("stride", i(&[], &[2]))],
        );
        assert_close(&windows, &[2, 3], &[0.0, 1.0, 2.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn pooling_counts_padding_as_declared() {
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
