//! The table of operations: a row for each form that this crate knows.

use std::collections::HashMap;
use std::sync::LazyLock;

/// One form of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpForm {
    /// Name without the dialect.
    pub name: &'static str,
    /// Names of its operands; `*` marks a list.
    pub operands: &'static str,
    /// Names of its properties in the order of their encoding; `?` marks one that may be absent.
    pub properties: &'static str,
    /// Number of results; `None` for any number.
    pub results: Option<usize>,
    /// Number of regions.
    pub regions: usize,
    /// Date of the form: the least version of an asset that uses it.
    pub date: u32,
}

const fn row(name: &'static str, operands: &'static str, date: u32) -> OpForm {
    OpForm { name, operands, properties: "", results: Some(1), regions: 0, date }
}

impl OpForm {
    const fn properties(self, properties: &'static str) -> OpForm {
        OpForm { properties, ..self }
    }

    const fn results(self, count: Option<usize>) -> OpForm {
        OpForm { results: count, ..self }
    }

    const fn region(self) -> OpForm {
        OpForm { regions: 1, ..self }
    }
}

/// All rows, by the group of their name.
pub const FORMS: &[OpForm] = &[
    // structure
    row("serialization.asset", "", 20250707).properties("attributes? version?").results(Some(0)).region(),
    row("dataflow.graph_v1", "", 20250707)
        .properties("argAttrs compositeDecl? externalize functionType isPrivate name noInline paramDecls resAttrs")
        .results(Some(0))
        .region(),
    row("dataflow.output_v1", "operands*", 20250707).results(Some(0)),
    row("dataflow.yield_v1", "args*", 20250707).results(Some(0)),
    row("dataflow.invoke_v1", "operands*", 20250909).properties("arg_attrs callee res_attrs").results(None),
    row("dataflow.create_token_v1", "", 20250707),
    row("dataflow.join_token_v1", "in_token rest_tokens*", 20250707),
    row("dataflow.read_handle_v1", "handle in_token", 20250707).results(Some(2)),
    row("dataflow.write_handle_v1", "handle data in_token", 20250707),
    row("ax.copy_with_constraints_v1", "input", 20250906),
    row("ax.copy_discarding_constraints_v1", "input", 20250906),
    row("primitive.constant_v1", "", 20250707).properties("value"),
    // elementwise
    row("primitive.abs_v1", "x", 20250814),
    row("primitive.acos_v1", "x", 20250928),
    row("primitive.acosh_v1", "x", 20250928),
    row("primitive.asin_v1", "x", 20250928),
    row("primitive.asinh_v1", "x", 20250928),
    row("primitive.atan_v1", "x", 20250928),
    row("primitive.atanh_v1", "x", 20250928),
    row("primitive.cos_v1", "x", 20250928),
    row("primitive.cosh_v1", "x", 20250928),
    row("primitive.erf_v1", "x", 20250928),
    row("primitive.exp_v1", "x", 20250819),
    row("primitive.gelu_v1", "input", 20251024).properties("approximate"),
    row("primitive.log_v1", "x", 20250928),
    row("primitive.not_v1", "x", 20250923),
    row("primitive.round_v1", "x", 20251001),
    row("primitive.rsqrt_v1", "x", 20250928),
    row("primitive.sin_v1", "x", 20250928),
    row("primitive.sinh_v1", "x", 20250928),
    row("primitive.sqrt_v1", "x", 20250717),
    row("primitive.tan_v1", "x", 20250928),
    row("primitive.tanh_v1", "x", 20250928),
    row("primitive.cast_v1", "input", 20250723),
    row("primitive.add_v1", "x y", 20250707),
    row("primitive.sub_v1", "x y", 20250717),
    row("primitive.mul_v1", "x y", 20250717),
    row("primitive.divide_v1", "x y", 20250717),
    row("primitive.floor_divide_v1", "x y", 20250928),
    row("primitive.modulo_v1", "x y", 20250928),
    row("primitive.pow_v1", "x y", 20250928),
    row("primitive.maximum_v1", "x y", 20250928),
    row("primitive.minimum_v1", "x y", 20250928),
    row("primitive.bitwise_and_v1", "x y", 20250928),
    row("primitive.bitwise_or_v1", "x y", 20250928),
    row("primitive.bitwise_xor_v1", "x y", 20250928),
    row("primitive.equal_v1", "input other", 20250923),
    row("primitive.not_equal_v1", "input other", 20251003),
    row("primitive.greater_v1", "input other", 20251013),
    row("primitive.logical_and_v1", "x y", 20251013),
    row("primitive.logical_or_v1", "x y", 20251013),
    row("primitive.logical_xor_v1", "x y", 20251013),
    row("primitive.where_v1", "condition a b", 20251023),
    // elementwise, of shapes that broadcast
    row("broadcasting_add_v1", "x y", 20250827).region(),
    row("broadcasting_sub_v1", "x y", 20250827).region(),
    row("broadcasting_mul_v1", "x y", 20250827).region(),
    row("broadcasting_divide_v1", "x y", 20250827).region(),
    row("broadcasting_floor_divide_v1", "x y", 20250930).region(),
    row("broadcasting_modulo_v1", "x y", 20250930).region(),
    row("broadcasting_pow_v1", "x y", 20250930).region(),
    row("broadcasting_maximum_v1", "x y", 20250930).region(),
    row("broadcasting_minimum_v1", "x y", 20250930).region(),
    row("broadcasting_bitwise_and_v1", "x y", 20250930).region(),
    row("broadcasting_bitwise_or_v1", "x y", 20250930).region(),
    row("broadcasting_bitwise_xor_v1", "x y", 20250930).region(),
    row("broadcasting_equal_v1", "x other", 20250923).region(),
    row("broadcasting_not_equal_v1", "x other", 20260112).region(),
    row("broadcasting_greater_v1", "x other", 20251105).region(),
    row("broadcasting_logical_and_v1", "x y", 20251202).region(),
    row("broadcasting_logical_or_v1", "x y", 20251105).region(),
    row("broadcasting_logical_xor_v1", "x y", 20251203).region(),
    row("broadcasting_where_v1", "condition x y", 20251024).region(),
    // shapes
    row("primitive.broadcast_in_dims_v1", "input dim_sizes axes", 20250826),
    row("primitive.broadcast_shapes_v1", "shape_1 shape_2", 20250911),
    row("primitive.broadcast_to_v1", "input shape", 20250707),
    row("primitive.concat_v1", "dimension inputs*", 20250903),
    row("primitive.expand_dims_v1", "input axes", 20250707),
    row("primitive.shrink_dims_v1", "input axes", 20250707),
    row("primitive.get_shape_v2", "input", 20250707),
    row("primitive.pad_v1", "input padding padding_value", 20250924).properties("padding_mode"),
    row("primitive.range_v1", "start stop step", 20251017),
    row("primitive.reshape_v2", "input new_shape", 20260204),
    row("primitive.reverse_v1", "input dims", 20251101),
    row("primitive.slice_v1", "input start_indices end_indices strides", 20250922),
    row("primitive.slice_update_v1", "input start_indices end_indices strides update", 20250922),
    row("primitive.split_v1", "input split_size_or_sections dim", 20250904).results(None),
    row("primitive.transpose_v1", "input permutation", 20250811),
    row("tile_v2", "input dims", 20260219).region(),
    // images; a tensor has the axes height, width and component
    row("primitive.image_to_tensor_v1", "source", 20251114),
    row("primitive.tensor_to_image_v1", "source", 20260108),
    // interpolation
    row("primitive.interpolate_v1", "input output_shape scale offset", 20260127).properties("interpolation_mode"),
    row("primitive.interpolate_coordinates_v1", "input coords", 20260127).properties("interpolation_mode"),
    // products
    row("primitive.batch_matmul_v1", "x y", 20250723),
    row("broadcasting_batch_matmul_v1", "x y", 20251202).region(),
    row("primitive.conv2d_v1", "input weight stride dilation groups", 20250905),
    row("primitive.conv3d_v1", "input weight stride dilation groups", 20251023),
    row("primitive.conv_transpose2d_v1", "input weight stride padding dilation output_pad groups", 20250905),
    row("primitive.max_pool_2d_v1", "input kernel_size stride dilation ceil_mode", 20251023),
    row("primitive.sum_pool_2d_v1", "input kernel_size strides dilation", 20250905),
    // reductions and order
    row("primitive.reduce_v1", "input axes init_value", 20250707).region(),
    row("primitive.reduce_index_v1", "input axis init_value init_index", 20251028).region(),
    row("primitive.scan_v1", "input axis reverse", 20251114).properties("scan_op"),
    row("primitive.argsort_v1", "input dim descending stable", 20251028),
    row("all_v1", "input axes", 20250926).region(),
    row("any_v1", "input axes", 20250926).region(),
    row("argmax_v1", "input axis", 20251028).region(),
    row("reduce_max_v1", "input axes", 20251023).region(),
    row("reduce_mean_v1", "input axes", 20260317).region(),
    row("reduce_min_v1", "input axes", 20251023).region(),
    row("reduce_product_v1", "input axes", 20250926).region(),
    row("reduce_sum_v1", "input axes", 20250926).region(),
    row("sort_v1", "input dim descending stable", 20251101).region(),
    // activations
    row("relu_v1", "input", 20260204).region(),
    row("sigmoid_v1", "input", 20260204).region(),
    row("silu_v1", "input", 20260204).region(),
    row("softmax_v1", "input axis", 20260204).region(),
    // indices
    row("primitive.gather_along_axis_v1", "input indices axis", 20251028),
    row("primitive.gather_nd_v1", "input indices", 20250723),
    row("primitive.non_zero_v1", "input", 20251028),
    row("primitive.scatter_along_axis_v1", "input indices updates axis", 20251030).properties("scatter_mode"),
    row("primitive.scatter_nd_v1", "input indices updates", 20251027).region(),
    // weights
    row("primitive.blockwise_shift_scale_v2", "data scale offset1 offset2", 20260202),
    row("primitive.lut_to_dense_v1", "indices lut axis", 20251003),
    row("primitive.build_sparse_with_bitmask_v1", "values bitmask", 20251003),
    row("primitive.sparse_with_bitmask_to_dense_v1", "input", 20251003),
    row("primitive.lut_to_sparse_with_bitmask_v1", "indices lut axis", 20251003),
    row("dequantize_v2", "input scale offset1 offset2 axis", 20260204).region(),
    row("quantize_v2", "input scale offset1 offset2 axis", 20260204).region(),
];

static BY_NAME: LazyLock<HashMap<&'static str, &'static OpForm>> =
    LazyLock::new(|| FORMS.iter().map(|form| (form.name, form)).collect());

/// The form of this name.
pub fn form(name: &str) -> Option<&'static OpForm> {
    BY_NAME.get(name).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_has_one_row_and_its_properties_are_in_order() {
        assert_eq!(BY_NAME.len(), FORMS.len());
        for form in FORMS {
            let names: Vec<&str> = form.properties.split_whitespace().collect();
            assert!(names.is_sorted(), "{}: {names:?}", form.name);
        }
    }
}
