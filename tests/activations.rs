//! Activations keep to their equations in either form, in f32 and in fp16.

use anec::exec::{Executable, Precision, Tensor, WeightCache};
use anec::family::blocks::Graph;
use anec::family::blocks::activation::{activate, silu, softplus};
use anec::family::row::Activation;
use anec::manifest::ActivationForm;
use anec::mil::{DataType, Dim, FunctionBuilder, Opset, TensorType, ValueId};

use crate::common::forms::FORM;
use crate::common::fp16_literals::Fp16Literals;

/// Numbers from far below to far above what activations bend at.
fn numbers() -> Vec<f32> {
    let sizes =
        [0.0, 1e-4, 0.01, 0.1, 0.3, 0.7, 1.0, 1.5, 2.0, 2.7, 3.3, 4.1, 5.0, 6.5, 8.0, 10.5, 14.0, 30.0, 300.0, 6e4];
    sizes.iter().flat_map(|size| [-size, *size]).map(|size| half::f16::from_f32(size).to_f32()).collect()
}

/// Evaluates an activation through an emitted function.
fn by_graph(
    activations: ActivationForm,
    precision: Precision,
    body: impl Fn(&mut Graph<'_>, ValueId) -> ValueId,
) -> Vec<f32> {
    let numbers = numbers();
    let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
    let x = ops.input("x", TensorType::new(DataType::Fp16, [1, numbers.len() as u64, 1, 1]));
    let mut weights = Fp16Literals;
    let mut graph = Graph::new(ops, anec::family::LoweringOptions { activations, ..FORM }, Dim::Fixed(1), &mut weights);
    let y = body(&mut graph, x);
    let mut ops = graph.into_ops().expect("builds");
    ops.output("y", y);
    let function = ops.finish().expect("builds");
    let executable = Executable::compile(&function, precision, &WeightCache::new()).expect("compiles");
    let x = Tensor::new(vec![1, numbers.len(), 1, 1], numbers);
    let outputs = executable.run(&[("x", &x)], &mut executable.new_state()).expect("runs");
    outputs[0].1.floats().expect("floats").to_vec()
}

/// The error function, by its series and, far out, by its continued fraction.
fn erf(x: f64) -> f64 {
    if x.abs() > 3.0 {
        let tail = (1..60).rev().fold(0.0, |rest, k| f64::from(k) / 2.0 / (x.abs() + rest));
        return x.signum() * (1.0 - (-x * x).exp() / ((x.abs() + tail) * std::f64::consts::PI.sqrt()));
    }
    let mut term = x;
    let mut sum = x;
    for n in 1..80 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}

/// An activation: in ops, and its equation.
type Case = (&'static str, fn(&mut Graph<'_>, ValueId) -> ValueId, fn(f64) -> f64);

const CASES: [Case; 4] = [
    ("silu", silu, |x| x / (1.0 + (-x).exp())),
    ("softplus", softplus, |x| x.max(0.0) + (-x.abs()).exp().ln_1p()),
    ("gelu", |g, x| activate(g, x, Activation::Gelu), |x| x / 2.0 * (1.0 + erf(x / 2f64.sqrt()))),
    (
        "gelu by tanh",
        |g, x| activate(g, x, Activation::GeluTanh),
        |x| x / 2.0 * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh()),
    ),
];

#[test]
fn either_form_keeps_to_the_equation() {
    for (name, body, equation) in CASES {
        for form in [ActivationForm::Stable, ActivationForm::Native] {
            for (precision, absolute, relative) in [(Precision::F32, 6e-5, 1e-6), (Precision::F16, 1.1e-3, 1.5e-3)] {
                for (x, y) in numbers().into_iter().zip(by_graph(form, precision, body)) {
                    let expected = equation(f64::from(x));
                    let error = (f64::from(y) - expected).abs();
                    assert!(
                        error <= absolute + relative * expected.abs(),
                        "{name} {form:?} {precision:?}: {y} at {x}, expected {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_small_softplus_keeps_its_digits_in_fp16() {
    let found = by_graph(ActivationForm::Stable, Precision::F16, softplus);
    for (x, y) in numbers().into_iter().zip(found).filter(|(x, _)| (-9.0..0.0).contains(x)) {
        let expected = f64::from(x).exp().ln_1p();
        assert!((f64::from(y) / expected - 1.0).abs() < 4e-3, "{y} at {x}, expected {expected}");
    }
}
