//! Compressed weights: scales and palettes must be normal, finite numbers, including row scales behind products with
//! palettes.

use std::collections::BTreeSet;

use half::f16;

use anec_base::Result;
use anec_mil::{Constant, DataType, Function, Op, Program, ValueId};

/// Problems of the scales and palettes of a program's weights.
///
/// # Errors
/// If a constant can't be read.
pub(super) fn unusable(program: &Program) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for function in &program.functions {
        for op in function.ops().filter(|op| op.is_constexpr()) {
            // int4 reaches one further down than up: negative scales are used
            let signed = op.constants().any(|(name, constant)| name == "data" && constant.ty.dtype == DataType::Int4);
            for (parameter, constant) in op.constants() {
                let size = |scale: f32| if signed { scale.abs() } else { scale };
                let normal = |scale: f32| scale.is_finite() && size(scale) >= f16::MIN_POSITIVE.to_f32();
                let problem = match parameter {
                    "scale" => first_wrong(constant, normal)?,
                    "lut" => first_wrong(constant, f32::is_finite)?,
                    _ => None,
                };
                let name = &op.name;
                problems.extend(problem.map(|(place, value)| match parameter {
                    "scale" => format!("`{name}`: scale {place} is {value}, expected a positive, normal number"),
                    _ => format!("`{name}`: entry {place} of its palettes is {value}, expected a number"),
                }));
            }
        }
        for (op, scales) in row_scales(function) {
            let wrong = first_wrong(scales, |scale| scale.is_finite() && scale.abs() >= f16::MIN_POSITIVE.to_f32())?;
            problems.extend(wrong.map(|(row, value)| {
                format!("`{}`: the scale of row {row} is {value}, expected a normal number", op.name)
            }));
        }
    }
    Ok(problems)
}

/// Row scales that are multiplied after products with palettes.
fn row_scales(function: &Function) -> Vec<(&Op, &Constant)> {
    let (mut weights, mut products) = (BTreeSet::<ValueId>::new(), BTreeSet::<ValueId>::new());
    let mut found = Vec::new();
    for op in function.ops() {
        match op.operator.as_str() {
            "constexpr_lut_to_dense" => weights.extend(&op.outputs),
            "conv" | "linear" | "matmul" if op.operands().any(|id| weights.contains(&id)) => {
                products.extend(&op.outputs);
            }
            "mul" if op.operands().any(|id| products.contains(&id)) => {
                let bindings = op.inputs.values().flatten();
                found.extend(bindings.filter_map(|binding| function.constant(binding)).map(|scales| (op, scales)));
            }
            _ => {}
        }
    }
    found
}

/// First number that violates the condition, and its index.
fn first_wrong(constant: &Constant, right: impl Fn(f32) -> bool) -> Result<Option<(usize, f32)>> {
    let bytes = constant.bytes()?;
    let wrong = |value: &(usize, f32)| !right(value.1);
    Ok(match constant.ty.dtype {
        DataType::Fp16 => {
            let values = bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32());
            values.enumerate().find(wrong)
        }
        DataType::Fp32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).enumerate().find(wrong),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_mil::{FunctionBuilder, Opset, TensorType};

    #[test]
    fn invalid_row_scales_are_found() {
        let of = |scale: f32, palette: bool| {
            let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
            let x = ops.input("x", TensorType::new(DataType::Fp16, [2u64, 2]));
            let w = if palette {
                let indices = Constant::literal(TensorType::new(DataType::Uint1, [2u64, 2]), vec![6]);
                let parts = [("indices", indices), ("lut", Constant::fp16_tensor(&[1, 1, 2, 1], &[1.0, 2.0]))];
                ops.op("constexpr_lut_to_dense", "w", parts)
            } else {
                ops.constant("w", Constant::fp16_tensor(&[2, 2], &[1.0; 4]))
            };
            let product = ops.matmul(w, x, false, false);
            let scales = ops.constant("w_row_scale", Constant::fp16_tensor(&[2, 1], &[1.0, scale]));
            let y = ops.mul(product, scales);
            ops.output("y", y);
            unusable(&Program::single(ops.finish().unwrap())).unwrap()
        };
        assert!(of(0.5, true).is_empty() && of(0.0, false).is_empty());
        for wrong in [0.0, 1e-6, f32::NAN, f32::INFINITY] {
            let problems = of(wrong, true);
            assert!(problems.len() == 1 && problems[0].contains("the scale of row 1 is"), "{problems:?}");
        }
    }

    #[test]
    fn invalid_scales_and_palettes_are_found() {
        let of = |values: [f32; 2], palette: bool, integers: DataType| {
            let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
            let x = ops.input("x", TensorType::new(DataType::Fp16, [2u64, 2]));
            let numbers = |shape: &[u64]| Constant::fp16_tensor(shape, &values);
            let literal = |dtype, bytes: &[u8]| Constant::literal(TensorType::new(dtype, [2u64, 2]), bytes.to_vec());
            let w = if palette {
                let parts = [("indices", literal(DataType::Uint1, &[6])), ("lut", numbers(&[1, 1, 2, 1]))];
                ops.op("constexpr_lut_to_dense", "w", parts)
            } else {
                let bytes: &[u8] = if integers == DataType::Int4 { &[0x21, 0x43] } else { &[1, 2, 3, 4] };
                let parts = [("data", literal(integers, bytes)), ("scale", numbers(&[2, 1]))];
                ops.op("constexpr_blockwise_shift_scale", "w", parts)
            };
            let y = ops.add(x, w);
            ops.output("y", y);
            unusable(&Program::single(ops.finish().unwrap())).unwrap()
        };
        let found = |values, palette| of(values, palette, DataType::Int8);
        assert!(of([1.0, -0.5], false, DataType::Int4).is_empty());
        for wrong in [0.0, -1e-6, f32::NAN, f32::NEG_INFINITY] {
            assert_eq!(of([1.0, wrong], false, DataType::Int4).len(), 1, "{wrong}");
        }
        assert!(found([1.0, 0.5], false).is_empty() && found([0.0, -3.0], true).is_empty());
        for wrong in [0.0, -1.0, 1e-6, f32::NAN, f32::INFINITY] {
            let problems = found([1.0, wrong], false);
            assert!(problems.len() == 1 && problems[0].contains("`w`: scale 1 is"), "{problems:?}");
        }
        assert_eq!(found([f32::NAN, 1.0], true), ["`w`: entry 0 of its palettes is NaN, expected a number"]);
    }
}
