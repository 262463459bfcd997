//! Quantized activations.

use std::sync::Arc;

use super::{Row, computing};
use crate::kernel::{Call, Input, Kernel};
use crate::pool::Pool;
use crate::resolve::Resolver;
use crate::tensor::{TensorData, axis_index};
use anec_mil::DataType;

/// Rows of the table.
pub(super) const ROWS: &[Row] = computing! {
    "dequantize" => |op| Ok(Arc::new(Dequantize { scheme: Scheme::resolve(op)? })),
    "quantize" => |op| {
        let range = match op.dtype() {
            DataType::Int8 => (-128.0, 127.0),
            DataType::Uint8 => (0.0, 255.0),
            other => return Err(format!("it quantizes to int8 and uint8, not to {other}")),
        };
        Ok(Arc::new(Quantize { scheme: Scheme::resolve(op)?, range }))
    },
};

/// Scales and zero points: one for all elements, or one for each position of an axis.
struct Scheme {
    input: Input,
    axis: Option<i64>,
    scales: Vec<f32>,
    /// Zero points, one for each scale.
    zero_points: Vec<f32>,
}

impl Scheme {
    fn resolve(op: &mut Resolver<'_>) -> Result<Self, String> {
        let scale = op.constant_floats("scale")?.ok_or("parameter `scale` is missing")?;
        let axis = match op.has("axis") {
            true => Some(op.integer("axis")?),
            false => None,
        };
        let zero_points = match op.known_integers("zero_point")? {
            Some(zero_points) => zero_points.iter().map(|zero_point| *zero_point as f32).collect(),
            None => vec![0.0; scale.len()],
        };
        if zero_points.len() != scale.len() {
            return Err(format!("{} scales and {} zero points are given", scale.len(), zero_points.len()));
        }
        Ok(Scheme { input: op.input("input")?, axis, scales: scale.to_vec(), zero_points })
    }

    /// Number of consecutive elements of a tensor that share a scale.
    fn rows(&self, shape: &[usize]) -> Result<usize, String> {
        let axis = match (self.axis, self.scales.len()) {
            (_, 1) => return Ok(usize::MAX),
            (Some(axis), _) => axis_index(axis, shape.len())?,
            (None, count) => return Err(format!("{count} scales need an `axis`")),
        };
        if shape[axis] != self.scales.len() {
            return Err(format!("{} scales don't fit axis {axis} of shape {shape:?}", self.scales.len()));
        }
        Ok(shape[axis + 1..].iter().product::<usize>().max(1))
    }

    /// Scale and zero point of each row of elements, in order.
    fn each(&self) -> impl Iterator<Item = (f32, f32)> {
        self.scales.iter().copied().zip(self.zero_points.iter().copied()).cycle()
    }
}

/// Rounds to the nearest integer (nearest even) and clips to the range of the type.
struct Quantize {
    scheme: Scheme,
    range: (f32, f32),
}

impl Kernel for Quantize {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let x = call.tensor(self.scheme.input)?;
        let values = call.floats(self.scheme.input)?;
        let row = self.scheme.rows(&x.shape)?;
        let (low, high) = self.range;
        let result = pool.make(&x.shape, |out: &mut Vec<i32>| {
            for (row, (scale, zero_point)) in values.chunks(row).zip(self.scheme.each()) {
                out.extend(row.iter().map(|v| ((v / scale).round_ties_even() + zero_point).clamp(low, high) as i32));
            }
        });
        call.push(result)
    }
}

struct Dequantize {
    scheme: Scheme,
}

impl Kernel for Dequantize {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let x = call.tensor(self.scheme.input)?;
        let TensorData::I32(values) = &x.data else {
            return Err(format!("parameter `input` holds {}, not integers", x.data.kind()));
        };
        let row = self.scheme.rows(&x.shape)?;
        let result = pool.make(&x.shape, |out: &mut Vec<f32>| {
            for (row, (scale, zero_point)) in values.chunks(row).zip(self.scheme.each()) {
                out.extend(row.iter().map(|v| (*v as f32 - zero_point) * scale));
            }
        });
        call.push(result)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, f, i, results, run};
    use anec_mil::DataType;

    #[test]
    fn values_are_rounded_to_even_and_clipped() {
        let quantize = |dtype| {
            let arguments = vec![
                ("input", vec![f(&[2, 3], &[-1.0, 0.25, 300.0, -1.0, 0.25, f32::NAN])]),
                ("scale", vec![f(&[2], &[0.5, 0.1])]),
                ("zero_point", vec![i(&[2], &[10, 3])]),
                ("axis", vec![i(&[], &[0])]),
            ];
            results("quantize", arguments, dtype).map(|results| results[0].integers().unwrap().to_vec())
        };
        // 0.25 / 0.5 is a tie
        assert_eq!(quantize(DataType::Uint8).unwrap(), [8, 10, 255, 0, 5, 0]);
        assert_eq!(quantize(DataType::Int8).unwrap(), [8, 10, 127, -7, 5, 0]);
        assert!(quantize(DataType::Int32).unwrap_err().contains("int32"));
    }

    #[test]
    fn integers_are_scaled_along_an_axis() {
        let x = || i(&[1, 2, 2], &[1, 2, -3, 4]);
        let result = run(
            "dequantize",
            vec![
                ("input", x()),
                ("scale", f(&[2], &[0.5, 2.0])),
                ("zero_point", i(&[2], &[1, -1])),
                ("axis", i(&[], &[-1])),
            ],
        );
        assert_close(&result, &[1, 2, 2], &[0.0, 6.0, -2.0, 10.0]);
        assert_close(
            &run("dequantize", vec![("input", x()), ("scale", f(&[], &[2.0]))]),
            &[1, 2, 2],
            &[2.0, 4.0, -6.0, 8.0],
        );
    }

    #[test]
    fn scales_must_fit_the_axis() {
        let of = |more: Vec<(&'static str, crate::value::Value)>| {
            let given = vec![("input", i(&[3], &[1, 2, 3])), ("scale", f(&[2], &[1.0, 2.0]))];
            super::super::testing::try_run("dequantize", given.into_iter().chain(more).collect()).unwrap_err()
        };
        assert!(of(vec![]).contains("need an `axis`"));
        assert!(of(vec![("axis", i(&[], &[0]))]).contains("2 scales don't fit axis 0"));
        assert!(of(vec![("zero_point", i(&[1], &[0]))]).contains("1 zero points"));
    }
}
