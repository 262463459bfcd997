//! Elementwise ops of one tensor.

use std::sync::Arc;

use super::{Resolved, Row, computing};
use crate::kernel::{Call, Elements, Elementwise, Input, Kernel};
use crate::pool::Pool;
use crate::resolve::Resolver;
use crate::tensor::{Tensor, TensorData};
use anec_kernels::activation::{
    erf, exp_in_place, gelu, gelu_sigmoid_in_place, gelu_tanh_in_place, sigmoid_in_place, silu_in_place, tanh_in_place,
};
use anec_kernels::pool;
use anec_mil::DataType;

/// Rows of the table.
pub(super) const ROWS: &[Row] = computing! {
    "abs" => |c| unary(c, f32::abs),
    "acos" => |c| unary(c, f32::acos),
    "asin" => |c| unary(c, f32::asin),
    "atan" => |c| unary(c, f32::atan),
    "atanh" => |c| unary(c, f32::atanh),
    "cast" => |c| Ok(Arc::new(Cast { x: c.input("x")?, to: c.dtype() })),
    "ceil" => |c| unary(c, f32::ceil),
    "clamped_relu" => |c| two(c, |x, alpha, beta| if x >= 0.0 { x.min(beta) } else { (alpha * x).min(beta) }),
    "clip" => |c| two(c, |x, low, high| x.max(low).min(high)),
    "cos" => |c| unary(c, f32::cos),
    "cosh" => |c| unary(c, f32::cosh),
    "elu" => |c| with(c, "alpha", |x, alpha| if x > 0.0 { x } else { alpha * x.exp_m1() }),
    "erf" => |c| unary(c, erf),
    "exp" => |c| slices(c, exp_in_place),
    "exp2" => |c| unary(c, f32::exp2),
    "floor" => |c| unary(c, f32::floor),
    "gelu" => resolve_gelu,
    "inverse" => |c| with(c, "epsilon", |x, epsilon| 1.0 / (x + epsilon)),
    "leaky_relu" => |c| with(c, "alpha", |x, alpha| if x >= 0.0 { x } else { alpha * x }),
    "linear_activation" => |c| two(c, |x, alpha, beta| alpha * x + beta),
    "log" => |c| with(c, "epsilon", |x, epsilon| (x + epsilon).ln()),
    "logical_not" => |c| Ok(Arc::new(LogicalNot { x: c.input("x")? })),
    "prelu" => |c| by_channel(c, |x, alpha, _| if x >= 0.0 { x } else { alpha * x }),
    "relu" => |c| unary(c, |x| x.max(0.0)),
    "relu6" => |c| unary(c, |x| x.clamp(0.0, 6.0)),
    "round" => |c| unary(c, f32::round_ties_even),
    "rsqrt" => |c| with(c, "epsilon", |x, epsilon| 1.0 / (x + epsilon).sqrt()),
    "scaled_tanh" => |c| two(c, |x, alpha, beta| alpha * (beta * x).tanh()),
    "sigmoid" => |c| slices(c, sigmoid_in_place),
    "sigmoid_hard" => |c| two(c, |x, alpha, beta| (alpha * x + beta).clamp(0.0, 1.0)),
    "sign" => |c| unary(c, |x| if x == 0.0 { 0.0 } else { x.signum() }),
    "silu" => |c| slices(c, silu_in_place),
    "sin" => |c| unary(c, f32::sin),
    "sinh" => |c| unary(c, f32::sinh),
    "softplus" => |c| unary(c, softplus),
    "softplus_parametric" => |c| by_channel(c, |x, alpha, beta| alpha * softplus(beta * x)),
    "softsign" => |c| unary(c, |x| x / (1.0 + x.abs())),
    "sqrt" => |c| unary(c, f32::sqrt),
    "square" => |c| unary(c, |x| x * x),
    "tan" => |c| unary(c, f32::tan),
    "tanh" => |c| slices(c, tanh_in_place),
    "threshold" => |c| with(c, "alpha", f32::max),
    "thresholded_relu" => |c| with(c, "alpha", |x, alpha| if x >= alpha { x } else { 0.0 }),
};

/// `ln(1 + e^x)` without overflow.
fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// Elementwise function. Integers stay integers.
struct Unary<F> {
    x: Input,
    function: F,
}

fn unary(op: &mut Resolver<'_>, function: impl Fn(f32) -> f32 + Send + Sync + 'static) -> Resolved {
    Ok(Arc::new(Unary { x: op.input("x")?, function }))
}

/// Applies `function` to parts of a tensor's floats, on all threads if there are many; in place if the tensor isn't
/// shared.
fn of_parts(pool: &mut Pool, mut x: Arc<Tensor>, function: impl Fn(&mut [f32]) + Sync) -> Result<Arc<Tensor>, String> {
    if let Some(Tensor { data: TensorData::F32(values), .. }) = Arc::get_mut(&mut x) {
        pool::for_each_part(values, |_, values| function(values));
        return Ok(x);
    }
    let from = x.floats().ok_or_else(|| format!("`x` holds {}, not floats", x.data.kind()))?;
    let result = pool.written(&x.shape, |out| {
        pool::for_each_part(out, |first, out| {
            out.copy_from_slice(&from[first..][..out.len()]);
            function(out);
        });
    });
    pool.recycle(x);
    Ok(result)
}

impl<F: Fn(f32) -> f32 + Send + Sync + 'static> Kernel for Unary<F> {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let function = &self.function;
        let mut x = call.take(self.x)?;
        let result = match x.data {
            TensorData::F32(_) => of_parts(pool, x, |part| self.apply(part, Elements::One(0.0)))?,
            TensorData::I32(_) => {
                // f32 is exact for the small integers that MIL allows here (abs, clip, sign)
                if let TensorData::I32(values) = &mut pool.make_mut(&mut x).data {
                    values.iter_mut().for_each(|v| *v = function(*v as f32) as i32);
                }
                x
            }
            TensorData::Bool(_) => return Err("`x` holds booleans, not numbers".into()),
        };
        call.push(result)
    }

    fn elementwise(&self) -> Option<&dyn Elementwise> {
        Some(self)
    }
}

impl<F: Fn(f32) -> f32 + Send + Sync + 'static> Elementwise for Unary<F> {
    fn inputs(&self) -> (Input, Option<Input>) {
        (self.x, None)
    }

    fn apply(&self, values: &mut [f32], _: Elements<'_>) {
        values.iter_mut().for_each(|value| *value = (self.function)(*value));
    }
}

/// Elementwise function of slices.
struct Slices {
    x: Input,
    function: fn(&mut [f32]),
}

fn slices(op: &mut Resolver<'_>, function: fn(&mut [f32])) -> Resolved {
    Ok(Arc::new(Slices { x: op.input("x")?, function }))
}

impl Kernel for Slices {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let x = call.take(self.x)?;
        let result = of_parts(pool, x, self.function)?;
        call.push(result)
    }

    fn elementwise(&self) -> Option<&dyn Elementwise> {
        Some(self)
    }
}

impl Elementwise for Slices {
    fn inputs(&self) -> (Input, Option<Input>) {
        (self.x, None)
    }

    fn apply(&self, values: &mut [f32], _: Elements<'_>) {
        (self.function)(values);
    }
}

/// Elementwise function with one parameter.
fn with(
    op: &mut Resolver<'_>,
    parameter: &'static str,
    function: impl Fn(f32, f32) -> f32 + Send + Sync + 'static,
) -> Resolved {
    let value = op.float(parameter)?;
    unary(op, move |x| function(x, value))
}

/// Elementwise function with parameters `alpha` and `beta`.
fn two(op: &mut Resolver<'_>, function: impl Fn(f32, f32, f32) -> f32 + Send + Sync + 'static) -> Resolved {
    let (alpha, beta) = (op.float("alpha")?, op.float("beta")?);
    unary(op, move |x| function(x, alpha, beta))
}

/// Elementwise function with parameters `alpha` and `beta` for each channel (axis 1).
struct ByChannel {
    x: Input,
    alpha: Input,
    beta: Option<Input>,
    function: fn(f32, f32, f32) -> f32,
}

fn by_channel(op: &mut Resolver<'_>, function: fn(f32, f32, f32) -> f32) -> Resolved {
    let (x, alpha, beta) = (op.input("x")?, op.input("alpha")?, op.optional_input("beta")?);
    Ok(Arc::new(ByChannel { x, alpha, beta, function }))
}

impl Kernel for ByChannel {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let mut x = call.take(self.x)?;
        let alpha = call.floats(self.alpha)?;
        let beta = self.beta.map_or(Ok(alpha), |beta| call.floats(beta))?;
        let Tensor { shape, data } = pool.make_mut(&mut x);
        let channels = shape.get(1).copied().unwrap_or(1);
        if alpha.len() != channels || beta.len() != channels {
            return Err(format!("`alpha` has {} elements for {channels} channels", alpha.len()));
        }
        let inner: usize = shape.iter().skip(2).product();
        let TensorData::F32(values) = data else { return Err(format!("`x` holds {}, not floats", data.kind())) };
        for (i, plane) in values.chunks_mut(inner.max(1)).enumerate() {
            let channel = i % channels;
            plane.iter_mut().for_each(|v| *v = (self.function)(*v, alpha[channel], beta[channel]));
        }
        call.push(x)
    }
}

fn resolve_gelu(op: &mut Resolver<'_>) -> Resolved {
    match op.text("mode")? {
        "EXACT" => unary(op, gelu),
        "TANH_APPROXIMATION" => slices(op, gelu_tanh_in_place),
        "SIGMOID_APPROXIMATION" => slices(op, gelu_sigmoid_in_place),
        other => Err(format!("mode `{other}` is none of EXACT, TANH_APPROXIMATION, SIGMOID_APPROXIMATION")),
    }
}

struct LogicalNot {
    x: Input,
}

impl Kernel for LogicalNot {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let mut x = call.take(self.x)?;
        match &mut pool.make_mut(&mut x).data {
            TensorData::Bool(values) => values.iter_mut().for_each(|v| *v = !*v),
            data => return Err(format!("`x` holds {}, not booleans", data.kind())),
        }
        call.push(x)
    }
}

/// Conversion to the declared type of the result: floats are truncated, wide integers keep their low bits.
struct Cast {
    x: Input,
    to: DataType,
}

impl Kernel for Cast {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let mut x = call.take(self.x)?;
        let narrow = |v: i32| match self.to {
            DataType::Int8 => i32::from(v as i8),
            DataType::Uint8 => i32::from(v as u8),
            DataType::Int16 => i32::from(v as i16),
            DataType::Uint16 => i32::from(v as u16),
            _ => v,
        };
        let Tensor { shape, data } = &*x;
        let result = if self.to.is_float() {
            match data {
                TensorData::F32(_) => return call.push(x),
                TensorData::I32(v) => pool.make(shape, |out: &mut Vec<f32>| out.extend(v.iter().map(|v| *v as f32))),
                TensorData::Bool(v) => {
                    pool.make(shape, |out: &mut Vec<f32>| out.extend(v.iter().map(|v| f32::from(u8::from(*v)))))
                }
            }
        } else if self.to.is_integer() {
            match data {
                TensorData::F32(v) => {
                    pool.make(shape, |out: &mut Vec<i32>| out.extend(v.iter().map(|v| narrow(*v as i32))))
                }
                TensorData::I32(_) => {
                    if let TensorData::I32(values) = &mut pool.make_mut(&mut x).data {
                        values.iter_mut().for_each(|v| *v = narrow(*v));
                    }
                    return call.push(x);
                }
                TensorData::Bool(v) => {
                    pool.make(shape, |out: &mut Vec<i32>| out.extend(v.iter().map(|v| i32::from(*v))))
                }
            }
        } else {
            match data {
                TensorData::F32(v) => pool.make(shape, |out: &mut Vec<bool>| out.extend(v.iter().map(|v| *v != 0.0))),
                TensorData::I32(v) => pool.make(shape, |out: &mut Vec<bool>| out.extend(v.iter().map(|v| *v != 0))),
                TensorData::Bool(_) => return call.push(x),
            }
        };
        pool.recycle(x);
        call.push(result)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, f, i, results, run, s, try_run};
    use super::*;

    #[test]
    fn functions_of_one_element() {
        let x = || f(&[3], &[-1.0, 0.0, 4.0]);
        let check = |operator, expected: [f32; 3]| assert_close(&run(operator, vec![("x", x())]), &[3], &expected);
        check("abs", [1.0, 0.0, 4.0]);
        check("square", [1.0, 0.0, 16.0]);
        check("relu", [0.0, 0.0, 4.0]);
        check("sign", [-1.0, 0.0, 1.0]);
        check("exp", [0.367_879_44, 1.0, 54.598_15]);
        check("sigmoid", [0.268_941_4, 0.5, 0.982_013_8]);
        check("silu", [-0.268_941_4, 0.0, 3.928_055]);
        check("tanh", [-0.761_594_2, 0.0, 0.999_329_3]);
        check("softplus", [0.313_261_7, std::f32::consts::LN_2, 4.018_15]);
        check("erf", [-0.842_700_8, 0.0, 1.0]);
        check("gelu", [-0.158_655_3, 0.0, 3.999_873_3]);
        let tanh = run("gelu", vec![("x", x()), ("mode", s("TANH_APPROXIMATION"))]);
        assert_close(&tanh, &[3], &[-0.158_808, 0.0, 3.999_93]);
        assert!(try_run("gelu", vec![("x", x()), ("mode", s("FAST"))]).unwrap_err().contains("FAST"));
    }

    #[test]
    fn functions_with_numbers() {
        let x = f(&[2], &[3.0, 0.25]);
        let rsqrt = run("rsqrt", vec![("x", x.clone()), ("epsilon", f(&[], &[1.0]))]);
        assert_close(&rsqrt, &[2], &[0.5, 0.894_427_2]);
        let clip = run("clip", vec![("x", x.clone()), ("alpha", f(&[], &[0.5])), ("beta", f(&[], &[2.0]))]);
        assert_close(&clip, &[2], &[2.0, 0.5]);
        for (operator, alpha, expected) in [("elu", 1.0, [-0.632_120_6, 4.0]), ("leaky_relu", 0.01, [-0.01, 4.0])] {
            let found = run(operator, vec![("x", f(&[2], &[-1.0, 4.0])), ("alpha", f(&[], &[alpha]))]);
            assert_close(&found, &[2], &expected);
        }
        assert!(try_run("elu", vec![("x", x.clone())]).unwrap_err().contains("alpha"));
        let log = run("log", vec![("x", x), ("epsilon", f(&[], &[0.0]))]);
        assert_close(&log, &[2], &[1.098_612_3, -1.386_294_4]);
        let prelu = run("prelu", vec![("x", f(&[1, 2, 2], &[-1.0, 1.0, -1.0, 1.0])), ("alpha", f(&[2], &[0.1, 0.2]))]);
        assert_close(&prelu, &[1, 2, 2], &[-0.1, 1.0, -0.2, 1.0]);
    }

    #[test]
    fn casts_cut_and_wrap() {
        let cast = |value, to| results("cast", vec![("x", vec![value])], to).unwrap().remove(0);
        assert_eq!(cast(f(&[2], &[-1.7, 2.9]), DataType::Int32), Tensor::new([2], vec![-1, 2]));
        assert_eq!(cast(i(&[2], &[300, -1]), DataType::Uint8), Tensor::new([2], vec![44, 255]));
        assert_eq!(cast(i(&[2], &[0, 5]), DataType::Bool), Tensor::new([2], vec![false, true]));
        assert_eq!(cast(i(&[1], &[7]), DataType::Fp16), Tensor::new([1], vec![7.0]));
    }
}
