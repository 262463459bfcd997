//! Elementwise operators.

use anec_mil::{DataType, Op};

use super::composite::{Activation, Reduction};
use super::context::{Lowering, Tensor, broadcast_shape};
use super::{Lowered, Row};
use crate::aicode::{AiAttribute, ElementType};

pub(super) const ROWS: &[Row] = &[
    ("add", |l, op| binary(l, op, "primitive.add_v1")),
    ("sub", |l, op| binary(l, op, "primitive.sub_v1")),
    ("mul", |l, op| binary(l, op, "primitive.mul_v1")),
    ("real_div", |l, op| binary(l, op, "primitive.divide_v1")),
    ("floor_div", floor_div),
    ("mod", modulo),
    ("pow", |l, op| binary(l, op, "primitive.pow_v1")),
    ("maximum", |l, op| binary(l, op, "primitive.maximum_v1")),
    ("minimum", |l, op| binary(l, op, "primitive.minimum_v1")),
    ("equal", |l, op| comparison(l, op, "primitive.equal_v1")),
    ("not_equal", |l, op| comparison(l, op, "primitive.not_equal_v1")),
    ("greater", |l, op| ordering(l, op, false, false)),
    ("less", |l, op| ordering(l, op, true, false)),
    ("less_equal", |l, op| ordering(l, op, false, true)),
    ("greater_equal", |l, op| ordering(l, op, true, true)),
    ("logical_and", |l, op| comparison(l, op, "primitive.logical_and_v1")),
    ("logical_or", |l, op| comparison(l, op, "primitive.logical_or_v1")),
    ("logical_xor", |l, op| comparison(l, op, "primitive.logical_xor_v1")),
    ("logical_not", |l, op| unary(l, op, "primitive.not_v1")),
    ("abs", |l, op| unary(l, op, "primitive.abs_v1")),
    ("acos", |l, op| unary(l, op, "primitive.acos_v1")),
    ("asin", |l, op| unary(l, op, "primitive.asin_v1")),
    ("atan", |l, op| unary(l, op, "primitive.atan_v1")),
    ("atanh", |l, op| unary(l, op, "primitive.atanh_v1")),
    ("cos", |l, op| unary(l, op, "primitive.cos_v1")),
    ("cosh", |l, op| unary(l, op, "primitive.cosh_v1")),
    ("erf", |l, op| unary(l, op, "primitive.erf_v1")),
    ("exp", |l, op| unary(l, op, "primitive.exp_v1")),
    ("round", |l, op| unary(l, op, "primitive.round_v1")),
    ("sin", |l, op| unary(l, op, "primitive.sin_v1")),
    ("sinh", |l, op| unary(l, op, "primitive.sinh_v1")),
    ("sqrt", |l, op| unary(l, op, "primitive.sqrt_v1")),
    ("tan", |l, op| unary(l, op, "primitive.tan_v1")),
    ("tanh", |l, op| unary(l, op, "primitive.tanh_v1")),
    ("identity", |l, op| Ok(vec![l.tensor(op, "x")?])),
    ("ceil", |l, op| rounded(l, op, true)),
    ("floor", |l, op| rounded(l, op, false)),
    ("exp2", exp2),
    ("inverse", inverse),
    ("log", |l, op| with_epsilon(l, op, "primitive.log_v1", 1e-45)),
    ("rsqrt", |l, op| with_epsilon(l, op, "primitive.rsqrt_v1", 1e-12)),
    ("sign", sign),
    ("square", square),
    ("threshold", threshold),
    ("clip", clip),
    ("clamped_relu", clamped_relu),
    ("elu", elu),
    ("gelu", gelu),
    ("leaky_relu", leaky_relu),
    ("linear_activation", linear_activation),
    ("prelu", prelu),
    ("relu", |l, op| activation(l, op, Activation::Relu)),
    ("relu6", relu6),
    ("scaled_tanh", scaled_tanh),
    ("sigmoid", |l, op| activation(l, op, Activation::Sigmoid)),
    ("sigmoid_hard", sigmoid_hard),
    ("silu", |l, op| activation(l, op, Activation::Silu)),
    ("softplus", softplus),
    ("softplus_parametric", softplus_parametric),
    ("softsign", softsign),
    ("thresholded_relu", thresholded_relu),
    ("softmax", softmax),
    ("cast", cast),
    ("select", select),
    ("cumsum", cumsum),
    ("fill_like", fill_like),
];

fn binary(l: &mut Lowering<'_>, op: &Op, name: &'static str) -> Lowered {
    let (x, y) = (l.tensor(op, "x")?, l.tensor(op, "y")?);
    Ok(vec![l.binary(name, &x, &y)?])
}

/// A comparison, or a logical operator on booleans.
fn comparison(l: &mut Lowering<'_>, op: &Op, name: &'static str) -> Lowered {
    let (x, y) = (l.tensor(op, "x")?, l.tensor(op, "y")?);
    Ok(vec![l.binary_to(name, &x, &y, ElementType::I1)?])
}

/// There is one ordering, `greater`; the others swap its operands or negate it.
fn ordering(l: &mut Lowering<'_>, op: &Op, swapped: bool, negated: bool) -> Lowered {
    let (x, y) = (l.tensor(op, "x")?, l.tensor(op, "y")?);
    let greater = if swapped { l.greater(&y, &x)? } else { l.greater(&x, &y)? };
    Ok(vec![if negated { l.unary("primitive.not_v1", &greater) } else { greater }])
}

fn unary(l: &mut Lowering<'_>, op: &Op, name: &'static str) -> Lowered {
    let x = l.tensor(op, "x")?;
    Ok(vec![l.unary(name, &x)])
}

fn activation(l: &mut Lowering<'_>, op: &Op, kind: Activation) -> Lowered {
    let x = l.tensor(op, "x")?;
    Ok(vec![l.activation(kind, &x)?])
}

/// The largest whole numbers that aren't above, or the smallest that aren't below. `x // 1` isn't used: a GPU delegate
/// folds it to `x` (apple/coreai-torch#10).
fn whole(l: &mut Lowering<'_>, x: &Tensor, up: bool) -> Result<Tensor, String> {
    if !x.element.is_float() {
        return Ok(x.clone());
    }
    let nearest = l.unary("primitive.round_v1", x);
    let off = if up { l.greater(x, &nearest)? } else { l.greater(&nearest, x)? };
    let off = l.cast(&off, x.element);
    l.binary(if up { "primitive.add_v1" } else { "primitive.sub_v1" }, &nearest, &off)
}

fn rounded(l: &mut Lowering<'_>, op: &Op, up: bool) -> Lowered {
    let x = l.tensor(op, "x")?;
    Ok(vec![whole(l, &x, up)?])
}

fn floor_div(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (x, y) = (l.tensor(op, "x")?, l.tensor(op, "y")?);
    if !x.element.is_float() {
        return Ok(vec![l.binary("primitive.floor_divide_v1", &x, &y)?]);
    }
    let quotient = l.binary("primitive.divide_v1", &x, &y)?;
    Ok(vec![whole(l, &quotient, false)?])
}

/// With the sign of the divisor; the primitive has that of the dividend.
fn modulo(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (x, y) = (l.tensor(op, "x")?, l.tensor(op, "y")?);
    let quotient = match x.element.is_float() {
        true => {
            let quotient = l.binary("primitive.divide_v1", &x, &y)?;
            whole(l, &quotient, false)?
        }
        false => l.binary("primitive.floor_divide_v1", &x, &y)?,
    };
    let multiple = l.binary("primitive.mul_v1", &quotient, &y)?;
    Ok(vec![l.binary("primitive.sub_v1", &x, &multiple)?])
}

fn with_epsilon(l: &mut Lowering<'_>, op: &Op, name: &'static str, default: f32) -> Lowered {
    let x = l.tensor(op, "x")?;
    let epsilon = l.number(op, "epsilon", default)?;
    let sum = add_number(l, &x, epsilon)?;
    Ok(vec![l.unary(name, &sum)])
}

/// Adds a number, unless it is 0 in the type of the elements.
pub(super) fn add_number(l: &mut Lowering<'_>, x: &Tensor, number: f32) -> Result<Tensor, String> {
    let is_zero = match x.element {
        ElementType::F16 => half::f16::from_f32(number).to_f32() == 0.0,
        _ => number == 0.0,
    };
    if is_zero { Ok(x.clone()) } else { l.with_number("primitive.add_v1", x, number.into()) }
}

fn inverse(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let epsilon = l.number(op, "epsilon", 1e-4)?;
    let sum = add_number(l, &x, epsilon)?;
    let one = l.splat(1.0, &x.shape, x.element)?;
    Ok(vec![l.binary("primitive.divide_v1", &one, &sum)?])
}

fn exp2(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let two = l.splat(2.0, &x.shape, x.element)?;
    Ok(vec![l.binary("primitive.pow_v1", &two, &x)?])
}

fn sign(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let zero = l.splat(0.0, &x.shape, x.element)?;
    let (above, below) = (l.greater(&x, &zero)?, l.greater(&zero, &x)?);
    let (above, below) = (l.cast(&above, x.element), l.cast(&below, x.element));
    Ok(vec![l.binary("primitive.sub_v1", &above, &below)?])
}

fn square(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    Ok(vec![l.binary("primitive.mul_v1", &x, &x)?])
}

fn threshold(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (x, alpha) = (l.tensor(op, "x")?, l.number(op, "alpha", 0.0)?);
    Ok(vec![l.with_number("primitive.maximum_v1", &x, alpha.into())?])
}

/// Elements no smaller than one number and no larger than another.
fn clamp(l: &mut Lowering<'_>, x: &Tensor, least: f32, most: f32) -> Result<Tensor, String> {
    let above = l.with_number("primitive.maximum_v1", x, least.into())?;
    l.with_number("primitive.minimum_v1", &above, most.into())
}

fn clip(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let (least, most) = (l.number(op, "alpha", f32::MIN)?, l.number(op, "beta", f32::MAX)?);
    Ok(vec![clamp(l, &x, least, most)?])
}

fn relu6(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    Ok(vec![clamp(l, &x, 0.0, 6.0)?])
}

/// `alpha` times what is below 0, and what is above 0 up to `beta`.
fn clamped_relu(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let (alpha, beta) = (l.number(op, "alpha", 0.0)?, l.number(op, "beta", 0.0)?);
    let scaled = l.with_number("primitive.mul_v1", &x, alpha.into())?;
    let below = l.splat(0.0, &x.shape, x.element).and_then(|zero| l.greater(&zero, &x))?;
    let leaky = l.choose(&below, &scaled, &x);
    Ok(vec![l.with_number("primitive.minimum_v1", &leaky, beta.into())?])
}

fn elu(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (x, alpha) = (l.tensor(op, "x")?, l.number(op, "alpha", 1.0)?);
    // the power of what is above 0 isn't used, and must not overflow
    let below = l.with_number("primitive.minimum_v1", &x, 0.0)?;
    let power = l.unary("primitive.exp_v1", &below);
    let power = l.with_number("primitive.sub_v1", &power, 1.0)?;
    let scaled = l.with_number("primitive.mul_v1", &power, alpha.into())?;
    let positive = l.greater_than(&x, 0.0)?;
    Ok(vec![l.choose(&positive, &x, &scaled)])
}

fn gelu(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let approximation = match &l.text(op, "mode", "EXACT")[..] {
        "EXACT" => 0,
        "TANH_APPROXIMATION" => 1,
        "SIGMOID_APPROXIMATION" => {
            let scaled = l.with_number("primitive.mul_v1", &x, 1.702)?;
            let gate = l.activation(Activation::Sigmoid, &scaled)?;
            return Ok(vec![l.binary("primitive.mul_v1", &x, &gate)?]);
        }
        other => return Err(format!("mode {other}")),
    };
    let kind = AiAttribute::GeluApproximation(approximation);
    Ok(vec![l.op_of_kind("primitive.gelu_v1", kind, &[&x], &x.shape, x.element)])
}

fn leaky_relu(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (x, alpha) = (l.tensor(op, "x")?, l.number(op, "alpha", 0.01)?);
    let scaled = l.with_number("primitive.mul_v1", &x, alpha.into())?;
    let positive = l.greater_than(&x, 0.0)?;
    Ok(vec![l.choose(&positive, &x, &scaled)])
}

/// A vector with an element for each channel, as it broadcasts to `x`.
pub(super) fn per_channel(l: &mut Lowering<'_>, x: &Tensor, vector: &Tensor) -> Tensor {
    let mut shape = vec![1; x.rank()];
    if x.rank() > 1 && vector.shape.iter().product::<u64>() > 1 {
        shape[1] = vector.shape.iter().product();
    }
    l.reshape(vector, &shape)
}

fn prelu(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (x, alpha) = (l.tensor(op, "x")?, l.tensor(op, "alpha")?);
    let alpha = per_channel(l, &x, &alpha);
    let scaled = l.binary("primitive.mul_v1", &x, &alpha)?;
    let positive = l.greater_than(&x, 0.0)?;
    Ok(vec![l.choose(&positive, &x, &scaled)])
}

fn linear_activation(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let (alpha, beta) = (l.number(op, "alpha", 1.0)?, l.number(op, "beta", 0.0)?);
    let scaled = l.with_number("primitive.mul_v1", &x, alpha.into())?;
    Ok(vec![l.with_number("primitive.add_v1", &scaled, beta.into())?])
}

fn scaled_tanh(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let (alpha, beta) = (l.number(op, "alpha", 1.0)?, l.number(op, "beta", 1.0)?);
    let inner = l.with_number("primitive.mul_v1", &x, beta.into())?;
    let tanh = l.unary("primitive.tanh_v1", &inner);
    Ok(vec![l.with_number("primitive.mul_v1", &tanh, alpha.into())?])
}

fn sigmoid_hard(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let linear = linear_activation(l, op)?.remove(0);
    Ok(vec![clamp(l, &linear, 0.0, 1.0)?])
}

/// `log(1 + exp(x))` without overflow: `max(x, 0) + log(1 + exp(-|x|))`.
fn soft_plus(l: &mut Lowering<'_>, x: &Tensor) -> Result<Tensor, String> {
    let size = l.unary("primitive.abs_v1", x);
    let negated = l.with_number("primitive.mul_v1", &size, -1.0)?;
    let power = l.unary("primitive.exp_v1", &negated);
    let sum = l.with_number("primitive.add_v1", &power, 1.0)?;
    let log = l.unary("primitive.log_v1", &sum);
    let positive = l.with_number("primitive.maximum_v1", x, 0.0)?;
    l.binary("primitive.add_v1", &positive, &log)
}

fn softplus(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    Ok(vec![soft_plus(l, &x)?])
}

fn softplus_parametric(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let (alpha, beta) = (l.tensor(op, "alpha")?, l.tensor(op, "beta")?);
    let (alpha, beta) = (per_channel(l, &x, &alpha), per_channel(l, &x, &beta));
    let inner = l.binary("primitive.mul_v1", &x, &beta)?;
    let soft = soft_plus(l, &inner)?;
    Ok(vec![l.binary("primitive.mul_v1", &soft, &alpha)?])
}

fn softsign(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let size = l.unary("primitive.abs_v1", &x);
    let sum = l.with_number("primitive.add_v1", &size, 1.0)?;
    Ok(vec![l.binary("primitive.divide_v1", &x, &sum)?])
}

/// Elements of at least `alpha`; 0 in place of smaller ones.
fn thresholded_relu(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (x, alpha) = (l.tensor(op, "x")?, l.number(op, "alpha", 1.0)?);
    let (limit, zero) = (l.splat(alpha.into(), &x.shape, x.element)?, l.splat(0.0, &x.shape, x.element)?);
    let below = l.greater(&limit, &x)?;
    Ok(vec![l.choose(&below, &zero, &x)])
}

fn softmax(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let axis = x.axis(l.integer_or(op, "axis", -1)?)?;
    Ok(vec![l.softmax(&x, axis)?])
}

fn cast(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let name = l.text(op, "dtype", "");
    let element = DataType::from_name(&name).and_then(ElementType::of).ok_or_else(|| format!("type `{name}`"))?;
    if element == ElementType::I1 && x.element != ElementType::I1 {
        let zero = l.splat(0.0, &x.shape, x.element)?;
        return Ok(vec![l.binary_to("primitive.not_equal_v1", &x, &zero, ElementType::I1)?]);
    }
    Ok(vec![l.cast(&x, element)])
}

fn select(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let (condition, a, b) = (l.tensor(op, "cond")?, l.tensor(op, "a")?, l.tensor(op, "b")?);
    let shape = broadcast_shape(&condition.shape, &broadcast_shape(&a.shape, &b.shape)?)?;
    let (condition, a, b) = (l.broadcast(&condition, &shape)?, l.broadcast(&a, &shape)?, l.broadcast(&b, &shape)?);
    Ok(vec![l.choose(&condition, &a, &b)])
}

fn cumsum(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let x = l.tensor(op, "x")?;
    let axis = x.axis(l.integer_or(op, "axis", 0)?)?;
    let (exclusive, reverse) = (l.flag(op, "exclusive")?, l.flag(op, "reverse")?);
    let (along, reverse) = (l.unsigned_scalar(axis as u64), l.boolean(reverse));
    let sums =
        l.op_of_kind("primitive.scan_v1", AiAttribute::ScanCombiner(0), &[&x, &along, &reverse], &x.shape, x.element);
    Ok(vec![if exclusive { l.binary("primitive.sub_v1", &sums, &x)? } else { sums }])
}

fn fill_like(l: &mut Lowering<'_>, op: &Op) -> Lowered {
    let shape = l.tensor(op, "ref_tensor")?.shape;
    let value = l.tensor(op, "value")?;
    let value = l.reshape(&value, &vec![1; shape.len()]);
    Ok(vec![l.broadcast(&value, &shape)?])
}

/// Square root of the sum of squares over some axes.
pub(super) fn norm(l: &mut Lowering<'_>, x: &Tensor, axes: &[usize], epsilon: f32) -> Result<Tensor, String> {
    let squares = l.binary("primitive.mul_v1", x, x)?;
    let sum = l.reduce(Reduction::Sum, &squares, axes)?;
    let sum = add_number(l, &sum, epsilon)?;
    Ok(l.unary("primitive.sqrt_v1", &sum))
}
