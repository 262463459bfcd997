//! Methods for the ops that model families use, so that a block reads like its equation.

use std::ops::Range;

use super::{FunctionBuilder, OpInput};
use crate::constant::Constant;
use crate::ir::ValueId;
use crate::types::Dim;

/// Defines methods of two operands.
macro_rules! binary {
    ($($(#[$doc:meta])* $name:ident)*) => {$(
        $(#[$doc])*
        pub fn $name(&mut self, x: impl Into<OpInput>, y: impl Into<OpInput>) -> ValueId {
            self.op(stringify!($name), stringify!($name), [("x", x.into()), ("y", y.into())])
        }
    )*};
}

/// Defines methods of one operand.
macro_rules! unary {
    ($($(#[$doc:meta])* $name:ident)*) => {$(
        $(#[$doc])*
        pub fn $name(&mut self, x: ValueId) -> ValueId {
            self.op(stringify!($name), stringify!($name), [("x", x)])
        }
    )*};
}

/// Defines reductions.
macro_rules! reduction {
    ($($(#[$doc:meta])* $name:ident)*) => {$(
        $(#[$doc])*
        pub fn $name(&mut self, x: ValueId, axes: &[i32], keep_dims: bool) -> ValueId {
            let axes = Constant::int32s(axes);
            let arguments = [("x", x.into()), ("axes", axes.into()), ("keep_dims", Constant::bool(keep_dims).into())];
            self.op::<OpInput>(stringify!($name), stringify!($name), arguments)
        }
    )*};
}

impl FunctionBuilder {
    binary! {
        /// `x + y`
        add
        /// `x - y`
        sub
        /// `x * y`
        mul
        /// `x / y`
        real_div
        /// Elementwise maximum.
        maximum
        /// Elementwise minimum.
        minimum
        /// `x = y` as a bool.
        equal
    }

    unary! {
        /// `|x|`
        abs
        /// `x / (1 + exp(-x))`
        silu
        /// `1 / (1 + exp(-x))`
        sigmoid
        /// `log(1 + exp(x))`
        softplus
        /// Square root.
        sqrt
        /// Hyperbolic tangent.
        tanh
        /// `exp(x)`
        exp
    }

    reduction! {
        /// Sum along axes.
        reduce_sum
        /// Mean along axes.
        reduce_mean
        /// Maximum along axes.
        reduce_max
    }

    /// `1 / sqrt(x + epsilon)`
    pub fn rsqrt(&mut self, x: ValueId, epsilon: f32) -> ValueId {
        self.op::<OpInput>("rsqrt", "rsqrt", [("x", x.into()), ("epsilon", Constant::fp16(epsilon).into())])
    }

    /// `min(max(x, least), most)`
    pub fn clip(&mut self, x: ValueId, least: f32, most: f32) -> ValueId {
        let [alpha, beta] = [least, most].map(|limit| Constant::fp16(limit).into());
        self.op::<OpInput>("clip", "clip", [("x", x.into()), ("alpha", alpha), ("beta", beta)])
    }

    /// GELU with the error function.
    pub fn gelu(&mut self, x: ValueId) -> ValueId {
        self.op::<OpInput>("gelu", "gelu", [("x", x.into()), ("mode", Constant::string("EXACT").into())])
    }

    /// GELU approximated with tanh.
    pub fn gelu_tanh(&mut self, x: ValueId) -> ValueId {
        let mode = Constant::string("TANH_APPROXIMATION");
        self.op::<OpInput>("gelu", "gelu", [("x", x.into()), ("mode", mode.into())])
    }

    /// Softmax along an axis.
    pub fn softmax(&mut self, x: ValueId, axis: i32) -> ValueId {
        self.op::<OpInput>("softmax", "softmax", [("x", x.into()), ("axis", Constant::int32(axis).into())])
    }

    /// Index of the maximum along an axis, int32.
    pub fn reduce_argmax(&mut self, x: ValueId, axis: i32, keep_dims: bool) -> ValueId {
        let keep_dims = Constant::bool(keep_dims).into();
        let arguments = [("x", x.into()), ("axis", Constant::int32(axis).into()), ("keep_dims", keep_dims)];
        self.op::<OpInput>("reduce_argmax", "reduce_argmax", arguments)
    }

    /// The `count` largest values along an axis in descending order, and their indices in int32.
    pub fn top(&mut self, x: ValueId, count: u64, axis: i32) -> [ValueId; 2] {
        let (count, axis) = (Constant::int32(count as i32), Constant::int32(axis));
        let outputs = self.op_with_outputs::<OpInput>(
            "topk",
            "topk",
            [("x", x.into()), ("k", count.into()), ("axis", axis.into())],
        );
        let [first, last] = [outputs.first(), outputs.last()].map(|value| value.copied().unwrap_or(x));
        [first, last]
    }

    /// Indices of the `count` largest values along an axis in descending order, int32.
    pub fn top_indices(&mut self, x: ValueId, count: u64, axis: i32) -> ValueId {
        self.top(x, count, axis)[1]
    }

    /// Conversion to fp16; a bool becomes 0 or 1.
    pub fn to_fp16(&mut self, x: ValueId) -> ValueId {
        self.op::<OpInput>("cast", "cast", [("x", x.into()), ("dtype", Constant::string("fp16").into())])
    }

    /// Matrix product of the last two dimensions; the others broadcast.
    pub fn matmul(&mut self, x: ValueId, y: ValueId, transpose_x: bool, transpose_y: bool) -> ValueId {
        let arguments = [
            ("x", x.into()),
            ("y", y.into()),
            ("transpose_x", Constant::bool(transpose_x).into()),
            ("transpose_y", Constant::bool(transpose_y).into()),
        ];
        self.op::<OpInput>("matmul", "matmul", arguments)
    }

    /// Convolution without padding, stride 1, one group.
    pub fn conv(&mut self, name: &str, x: ValueId, weight: ValueId, bias: Option<ValueId>) -> ValueId {
        self.op::<OpInput>("conv", name, [("x", x.into()), ("weight", weight.into()), ("bias", bias.into())])
    }

    /// Depthwise convolution without padding, stride 1; `weight` is `[channels, 1, …]`.
    pub fn depthwise_conv(&mut self, name: &str, x: ValueId, weight: ValueId, bias: Option<ValueId>) -> ValueId {
        let groups = self.ty(weight).shape[0].fixed().unwrap_or(1);
        self.grouped_conv(name, x, weight, bias, groups)
    }

    /// Grouped convolution without padding, stride 1; `weight` is `[channels, channels / groups, …]`.
    pub fn grouped_conv(
        &mut self,
        name: &str,
        x: ValueId,
        weight: ValueId,
        bias: Option<ValueId>,
        groups: u64,
    ) -> ValueId {
        let groups = Constant::int32(groups as i32);
        let arguments = [("x", x.into()), ("weight", weight.into()), ("bias", bias.into()), ("groups", groups.into())];
        self.op::<OpInput>("conv", name, arguments)
    }

    /// `x weight^T + bias` on the last dimension.
    pub fn linear(&mut self, name: &str, x: ValueId, weight: ValueId, bias: Option<ValueId>) -> ValueId {
        self.op::<OpInput>("linear", name, [("x", x.into()), ("weight", weight.into()), ("bias", bias.into())])
    }

    /// Layer norm along axes, without a gain.
    pub fn layer_norm(&mut self, x: ValueId, axes: &[i32], epsilon: f32) -> ValueId {
        let axes = Constant::int32s(axes).into();
        let arguments = [("x", x.into()), ("axes", axes), ("epsilon", Constant::fp16(epsilon).into())];
        self.op::<OpInput>("layer_norm", "layer_norm", arguments)
    }

    /// Reshape; one size may be -1.
    pub fn reshape(&mut self, x: ValueId, shape: &[i32]) -> ValueId {
        self.op::<OpInput>("reshape", "reshape", [("x", x.into()), ("shape", Constant::int32s(shape).into())])
    }

    /// Permutation of axes.
    pub fn transpose(&mut self, x: ValueId, perm: &[i32]) -> ValueId {
        self.op::<OpInput>("transpose", "transpose", [("x", x.into()), ("perm", Constant::int32s(perm).into())])
    }

    /// Removal of axes of size 1.
    pub fn squeeze(&mut self, x: ValueId, axes: &[i32]) -> ValueId {
        self.op::<OpInput>("squeeze", "squeeze", [("x", x.into()), ("axes", Constant::int32s(axes).into())])
    }

    /// Insertion of axes of size 1.
    pub fn expand_dims(&mut self, x: ValueId, axes: &[i32]) -> ValueId {
        self.op::<OpInput>("expand_dims", "expand_dims", [("x", x.into()), ("axes", Constant::int32s(axes).into())])
    }

    /// Concatenation along an axis.
    pub fn concat(&mut self, values: &[ValueId], axis: i32) -> ValueId {
        let values = OpInput::Values(values.to_vec());
        self.op::<OpInput>("concat", "concat", [("values", values), ("axis", Constant::int32(axis).into())])
    }

    /// Elements `range` of one axis.
    pub fn slice(&mut self, x: ValueId, axis: usize, range: Range<u64>) -> ValueId {
        let rank = self.ty(x).rank();
        let at_axis = |value: u64| (0..rank).map(|i| if i == axis { value as i32 } else { 0 }).collect::<Vec<i32>>();
        let whole: Vec<bool> = (0..rank).map(|i| i != axis).collect();
        let arguments = [
            ("x", x.into()),
            ("begin", Constant::int32s(&at_axis(range.start)).into()),
            ("end", Constant::int32s(&at_axis(range.end)).into()),
            ("begin_mask", Constant::bools(&whole).into()),
            ("end_mask", Constant::bools(&whole).into()),
        ];
        self.op::<OpInput>("slice_by_index", "slice", arguments)
    }

    /// Last `count` elements of one axis.
    pub fn last(&mut self, x: ValueId, axis: usize, count: u64) -> ValueId {
        let rank = self.ty(x).rank();
        let begin: Vec<i32> = (0..rank).map(|i| if i == axis { -(count as i32) } else { 0 }).collect();
        let others: Vec<bool> = (0..rank).map(|i| i != axis).collect();
        let arguments = [
            ("x", x.into()),
            ("begin", Constant::int32s(&begin).into()),
            ("end", Constant::int32s(&vec![0; rank]).into()),
            ("begin_mask", Constant::bools(&others).into()),
            ("end_mask", Constant::bools(&vec![true; rank]).into()),
        ];
        let last = self.op::<OpInput>("slice_by_index", "last", arguments);
        if self.ty(x).shape[axis].fixed().is_some() {
            return last;
        }
        // the size of a slice from the end of a symbolic dimension can't be inferred: the reshape states it
        let mut shape = self.ty(x).shape;
        shape[axis] = Dim::Fixed(count);
        let sizes: Vec<i32> = shape.iter().map(|size| size.fixed().map_or(-1, |size| size as i32)).collect();
        self.reshape(last, &sizes)
    }

    /// Replaces `begin` to `end` of an axis of `x` with `update`, across all other axes. `begin` and `end` are int32
    /// vectors with an element for each axis; only those of that axis are used.
    pub fn slice_update_along(
        &mut self,
        x: ValueId,
        update: ValueId,
        axis: usize,
        begin: ValueId,
        end: ValueId,
    ) -> ValueId {
        let others: Vec<bool> = (0..self.ty(x).rank()).map(|i| i != axis).collect();
        let arguments: [(&str, OpInput); 6] = [
            ("x", x.into()),
            ("update", update.into()),
            ("begin", begin.into()),
            ("end", end.into()),
            ("begin_mask", Constant::bools(&others).into()),
            ("end_mask", Constant::bools(&others).into()),
        ];
        self.op("slice_update", "slice_update", arguments)
    }

    /// Reads a state.
    pub fn read_state(&mut self, state: ValueId) -> ValueId {
        self.op("read_state", "read_state", [("input", state)])
    }

    /// Writes a value to a state.
    pub fn write_state(&mut self, state: ValueId, value: ValueId) {
        self.op_with_outputs("write_state", "write_state", [("input", state), ("data", value)]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SymbolRange;
    use crate::types::{DataType, Opset, TensorType};

    #[test]
    fn the_last_elements_have_a_fixed_size_whatever_the_axis() {
        for symbolic in [false, true] {
            let mut b = FunctionBuilder::new("main", Opset::CoreMl8);
            let size = match symbolic {
                true => Dim::symbol(&b.symbol("t", SymbolRange::Range { lower: 4, upper: Some(16), default: 8 })),
                false => Dim::Fixed(8),
            };
            let x = b.input("x", TensorType::new(DataType::Fp16, [Dim::Fixed(1), Dim::Fixed(5), size]));
            let last = b.last(x, 2, 3);
            assert_eq!(b.ty(last).shape, [1, 5, 3].map(Dim::Fixed));
            b.output("y", last);
            let function = b.finish().unwrap();
            let operators: Vec<_> =
                function.ops().map(|op| op.operator.as_str()).filter(|name| *name != "const").collect();
            // Core ML infers no size for a slice from the end of a flexible axis
            assert_eq!(operators, if symbolic { vec!["slice_by_index", "reshape"] } else { vec!["slice_by_index"] });
        }
    }
}
