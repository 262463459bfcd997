//! Transposed convolutions.

use std::sync::Arc;

use super::conv::{Axes, Axis, Geometry, PadType, for_each_overlap, kernel_extent};
use super::matmul::bias;
use super::{Resolved, Row, computing};
use crate::kernel::{Call, Input, Kernel, Matrix};
use crate::pool::Pool;
use crate::resolve::Resolver;
use crate::tensor::Dims;
use anec_kernels::layout::MatrixLayout;
use anec_kernels::matrix::product;

/// Rows of the table.
pub(super) const ROWS: &[Row] = computing! {
    "conv_transpose" => ConvTranspose::resolve,
};

/// Axes of the convolution from the results back to `x`: `size` is that of the results, `out` that of `x`. Without
/// `output_shape`, there are `size * stride` results for pad_type `same`, else the extent of the kernel less the
/// padding.
fn axes(op: &ConvTranspose, sizes: &[usize], kernels: &[usize]) -> Result<Axes, String> {
    let geometry = &op.geometry;
    geometry.check(sizes.len())?;
    let same = geometry.pad_type == PadType::Same;
    let misfit = || format!("no result fits `x` of sizes {sizes:?} and a kernel of {kernels:?}");
    (0..sizes.len())
        .map(|i| {
            let (out, kernel) = (sizes[i], kernels[i]);
            let (stride, dilation, pad) = (geometry.stride(i), geometry.dilation(i), geometry.pad(i));
            let covered = out.checked_sub(1).ok_or_else(misfit)? * stride + kernel_extent(kernel, dilation);
            let size = match &op.output_shape {
                Some(shape) => shape.get(i + 2).and_then(|n| usize::try_from(*n).ok()),
                None if same => Some(out * stride),
                None => covered.checked_sub(pad.0 + pad.1),
            };
            let size = size.ok_or_else(misfit)?;
            let before = if same { covered.saturating_sub(size) / 2 } else { pad.0 };
            let after = covered.saturating_sub(before + size);
            Ok(Axis { size, kernel, stride, dilation, before, after, out })
        })
        .collect()
}

/// Transpose of a convolution: each element of `x` adds the kernel times the element to the results around it. The
/// weight is `[channels, results / groups, kernel…]`.
struct ConvTranspose {
    x: Input,
    weight: Matrix,
    bias: Option<Input>,
    groups: usize,
    geometry: Geometry,
    output_shape: Option<Vec<i64>>,
}

impl ConvTranspose {
    fn resolve(op: &mut Resolver<'_>) -> Resolved {
        let geometry = Geometry::resolve(op)?;
        if geometry.pad_type == PadType::SameLower {
            return Err("pad_type `same_lower` is none of valid, same, custom".into());
        }
        Ok(Arc::new(ConvTranspose {
            x: op.input("x")?,
            weight: op.matrix("weight")?,
            bias: op.optional_input("bias")?,
            groups: usize::try_from(op.integer("groups")?).unwrap_or(0),
            geometry,
            output_shape: op.known_integers("output_shape")?.map(|shape| shape.to_vec()),
        }))
    }
}

impl Kernel for ConvTranspose {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let weight = call.matrix(&self.weight)?;
        let x = call.tensor(self.x)?;
        let values = call.floats(self.x)?;
        let groups = self.groups;
        let misfit = || {
            format!("`x` of shape {:?} doesn't fit a weight of shape {:?} in {groups} groups", x.shape, weight.shape())
        };
        if !(3..=5).contains(&x.rank()) || weight.shape().len() != x.rank() || groups == 0 {
            return Err(misfit());
        }
        let (batch, channels, group_rows) = (x.shape[0], x.shape[1], weight.shape()[1]);
        if weight.shape()[0] != channels || channels % groups != 0 {
            return Err(misfit());
        }
        let bias = bias(call, self.bias, groups * group_rows)?;
        let axes = axes(self, &x.shape[2..], &weight.shape()[2..])?;
        let places: usize = axes.iter().map(|a| a.out).product();
        let (size, kernel): (usize, usize) =
            (axes.iter().map(|a| a.size).product(), axes.iter().map(|a| a.kernel).product());
        let shape: Dims = [batch, groups * group_rows].into_iter().chain(axes.iter().map(|a| a.size)).collect();
        let mut out = vec![0f32; shape.iter().product()];
        let (dense, group_channels) = (weight.dense(), channels / groups);
        let Some(weights) = dense.floats() else { return Err(misfit()) };
        let mut parts = vec![0.0; group_rows * kernel * places];
        for (i, out) in out.chunks_exact_mut((group_rows * size).max(1)).enumerate() {
            let (n, group) = (i / groups, i % groups);
            let inputs = &values[(n * channels + group * group_channels) * places..][..group_channels * places];
            let rows = &weights[group * group_channels * group_rows * kernel..][..group_channels * group_rows * kernel];
            let (a, b) =
                (MatrixLayout { row: 1, column: group_rows * kernel }, MatrixLayout { row: places, column: 1 });
            product((group_rows * kernel, group_channels, places), (rows, a), (inputs, b), &mut parts);
            for (row, plane) in out.chunks_exact_mut(size).enumerate() {
                plane.fill(bias.map_or(0.0, |bias| bias[group * group_rows + row]));
                let mut parts = parts[row * kernel * places..].iter();
                for_each_overlap(&axes, |offset| {
                    if let (Some(part), Some(offset)) = (parts.next(), offset) {
                        plane[offset] += part;
                    }
                });
            }
        }
        let result = pool.copied(&shape, &out);
        call.push(result)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, f, i, run, s};

    #[test]
    fn each_element_adds_the_kernel_around_its_place() {
        let x = || f(&[1, 1, 3], &[1.0, 2.0, 3.0]);
        let weight = || f(&[1, 1, 3], &[1.0, 10.0, 100.0]);
        let plain = run("conv_transpose", vec![("x", x()), ("weight", weight()), ("bias", f(&[1], &[0.5]))]);
        assert_close(&plain, &[1, 1, 5], &[1.5, 12.5, 123.5, 230.5, 300.5]);
        let two = || i(&[1], &[2]);
        let strided = run("conv_transpose", vec![("x", x()), ("weight", weight()), ("strides", two())]);
        assert_close(&strided, &[1, 1, 7], &[1.0, 10.0, 102.0, 20.0, 203.0, 30.0, 300.0]);
        let same = vec![("x", x()), ("weight", weight()), ("strides", two()), ("pad_type", s("same"))];
        assert_close(&run("conv_transpose", same), &[1, 1, 6], &[1.0, 10.0, 102.0, 20.0, 203.0, 30.0]);
        let custom = vec![("x", x()), ("weight", weight()), ("pad_type", s("custom")), ("pad", i(&[2], &[1, 1]))];
        assert_close(&run("conv_transpose", custom), &[1, 1, 3], &[12.0, 123.0, 230.0]);
        let shaped = vec![("x", x()), ("weight", weight()), ("strides", two()), ("output_shape", i(&[3], &[1, 1, 8]))];
        assert_close(&run("conv_transpose", shaped), &[1, 1, 8], &[1.0, 10.0, 102.0, 20.0, 203.0, 30.0, 300.0, 0.0]);
    }

    #[test]
    fn groups_add_to_their_own_results() {
        let x = f(&[1, 2, 1, 1], &[2.0, 3.0]);
        let weight = f(&[2, 2, 1, 1], &[1.0, 10.0, 100.0, 1000.0]);
        let grouped =
            run("conv_transpose", vec![("x", x.clone()), ("weight", weight.clone()), ("groups", i(&[], &[2]))]);
        assert_close(&grouped, &[1, 4, 1, 1], &[2.0, 20.0, 300.0, 3000.0]);
        let whole = run("conv_transpose", vec![("x", x), ("weight", weight)]);
        assert_close(&whole, &[1, 2, 1, 1], &[302.0, 3020.0]);
    }
}
