//! Norms compute `x / sqrt(mean(x^2) + eps) * gain` in every form, for rows that the epsilon decides as for those that
//! it doesn't, and a form that can't hold an epsilon is refused.

use crate::common::forms::FORM;
use crate::common::fp16_literals::Fp16Literals;

use anec::base::{Fault, Result};
use anec::exec::{Executable, Precision, Tensor, WeightCache};
use anec::family::LoweringOptions;
use anec::family::blocks::Graph;
use anec::family::blocks::norm::{Norm, rms_norm};
use anec::manifest::NormForm;
use anec::mil::{DataType, Dim, FunctionBuilder, Opset, TensorType};
use anec::source::SourceWeight;

const WIDTH: usize = 64;

/// Rows whose root mean squares go from far below the root of the epsilon to where squares are near fp16's end.
fn rows(scale: f64) -> Vec<Vec<f32>> {
    let row = |size: f64| -> Vec<f32> {
        let values = (0..WIDTH).map(|i| (((i * 37 % 64) as f64 - 31.5) / 18.5 * size * scale) as f32);
        values.map(|v| half::f16::from_f32(v).to_f32()).collect()
    };
    [0.0, 1e-4, 5e-4, 1e-3, 3e-3, 0.1, 1.0, 60.0].map(row).to_vec()
}

/// Norms of the rows by an emitted function, in f32.
fn by_graph(form: NormForm, norm: &Norm, rows: &[Vec<f32>]) -> Result<Vec<Vec<f32>>> {
    by_graph_in(Precision::F32, form, norm, rows)
}

fn by_graph_in(precision: Precision, form: NormForm, norm: &Norm, rows: &[Vec<f32>]) -> Result<Vec<Vec<f32>>> {
    let form = LoweringOptions { norm: form, ..FORM };
    let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
    let (width, tokens) = (WIDTH as u64, rows.len() as u64);
    let x = ops.input("x", TensorType::new(DataType::Fp16, [1, width, tokens, 1]));
    let mut weights = Fp16Literals;
    let mut graph = Graph::new(ops, form, Dim::Fixed(tokens), &mut weights);
    let y = rms_norm(&mut graph, x, norm, 1);
    let mut ops = graph.into_ops()?;
    ops.output("y", y);
    let executable = Executable::compile(&ops.finish()?, precision, &WeightCache::new())?;
    let data: Vec<f32> = (0..WIDTH).flat_map(|c| rows.iter().map(move |row| row[c])).collect();
    let x = Tensor::new(vec![1, WIDTH, rows.len(), 1], data);
    let outputs = executable.run(&[("x", &x)], &mut executable.new_state())?;
    let found = outputs[0].1.floats().expect("floats");
    Ok((0..rows.len()).map(|t| (0..WIDTH).map(|c| found[c * rows.len() + t]).collect()).collect())
}

/// The equation, in f64.
fn by_hand(row: &[f32], gain: &[f64], eps: f64) -> Vec<f64> {
    let mean = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / row.len() as f64;
    row.iter().zip(gain).map(|(v, g)| f64::from(*v) / (mean + eps).sqrt() * g).collect()
}

/// A weight near zero whose sum with 1 fp16 can't hold, as bf16 has it.
fn weight() -> Vec<f32> {
    (0..WIDTH).map(|i| half::bf16::from_f32((i as f32 - 30.0) * 0.0013).to_f32()).collect()
}

fn norm(offset: f32, factor: f32, eps: f64) -> Norm {
    let weight = SourceWeight::from_values("w", &[WIDTH as u64], weight()).unwrap().scale(factor);
    Norm::root_mean_square("norm", weight, offset * factor, eps)
}

/// Largest relative difference of a row from the equation; rows of zeros stay zeros.
fn worst(form: NormForm, offset: f32, eps: f64, scale: f64) -> f64 {
    let eps = eps * scale * scale;
    let rows = rows(scale);
    let found = by_graph(form, &norm(offset, 1.0, eps), &rows).unwrap_or_else(|e| panic!("{form}: {e}"));
    let gain: Vec<f64> = weight().iter().map(|w| f64::from(*w) + f64::from(offset)).collect();
    let difference = |(row, found): (&Vec<f32>, Vec<f32>)| {
        let expected = by_hand(row, &gain, eps);
        let largest = expected.iter().fold(0f64, |most, v| most.max(v.abs()));
        let difference = expected.iter().zip(&found).fold(0f64, |most, (e, f)| most.max((e - f64::from(*f)).abs()));
        if largest == 0.0 { difference } else { difference / largest }
    };
    rows.iter().zip(found).map(difference).fold(0.0, f64::max)
}

#[test]
fn every_form_holds_the_epsilon() {
    for eps in [1e-5, 1e-6] {
        for form in [NormForm::Accurate, NormForm::Naive, NormForm::Prescale, NormForm::LayerNormConcat] {
            let worst = worst(form, 1.0, eps, 1.0);
            assert!(worst < 0.01, "{form}, {eps}: {worst}");
        }
        for form in [NormForm::Accurate, NormForm::Naive, NormForm::Prescale] {
            let worst = worst(form, 1.0, eps, 1.0 / 16.0);
            assert!(worst < 0.01, "{form}, {eps}, scaled: {worst}");
        }
    }
}

#[test]
fn an_epsilon_that_a_form_cannot_hold_is_refused() {
    let scaled = |scale: f64| norm(0.0, 1.0, 1e-6 * scale * scale);
    let refused = |form: NormForm, scale: f64| by_graph(form, &scaled(scale), &rows(scale)).unwrap_err();
    for (form, scale) in [
        (NormForm::LayerNormConcat, 1.0 / 16.0),
        (NormForm::Accurate, 2f64.powi(-16)),
        (NormForm::Naive, 2f64.powi(-16)),
        (NormForm::Prescale, 2f64.powi(-12)),
    ] {
        let error = refused(form, scale);
        assert_eq!(error.fault(), Fault::Usage);
        assert!(error.to_string().contains(&format!("`norm: {form}`")), "{error}");
    }
    by_graph(NormForm::Accurate, &scaled(2f64.powi(-10)), &rows(1.0)).unwrap();
}

#[test]
fn a_zero_centred_gain_is_not_rounded() {
    // fp16(1 + w) is off by up to 2^-11; the root of this epsilon is exact
    let worst = worst(NormForm::Accurate, 1.0, 2f64.powi(-20), 1.0);
    assert!(worst < 5e-5, "{worst}");
    // a norm that writes to a scaled stream
    let rows = rows(1.0);
    let whole = by_graph(NormForm::Accurate, &norm(1.0, 1.0, 1e-6), &rows).unwrap();
    let part = by_graph(NormForm::Accurate, &norm(1.0, 0.25, 1e-6), &rows).unwrap();
    for (whole, part) in whole.iter().flatten().zip(part.iter().flatten()) {
        assert!((whole * 0.25 - part).abs() <= whole.abs() * 1e-5, "{whole} {part}");
    }
}

/// Peaks of published inputs of norms whose squares exceed fp16 (EmbeddingGemma 2: 710 before the norms of queries and
/// keys, 2,000 behind the block of per-layer inputs), and rows that nearly vanish.
#[test]
fn rows_whose_squares_leave_fp16_are_normed_in_half_precision_and_by_the_engine() {
    let row = |peak: f64| -> Vec<f32> {
        let value = |i: usize| ((i * 37 % 64) as f64 - 31.5) / 31.5 * peak;
        (0..WIDTH).map(|i| half::f16::from_f32(value(i) as f32).to_f32()).collect()
    };
    let gain: Vec<f64> = weight().iter().map(|w| f64::from(*w) + 1.0).collect();
    let far = |precision, form, peak: f64| {
        let row = row(peak);
        let found = by_graph_in(precision, form, &norm(1.0, 1.0, 1e-6), std::slice::from_ref(&row)).unwrap().remove(0);
        let expected = by_hand(&row, &gain, 1e-6);
        let largest = expected.iter().fold(0f64, |most, value| most.max(value.abs()));
        let difference = |(found, expected): (&f32, &f64)| (f64::from(*found) - expected).abs() / largest;
        found
            .iter()
            .zip(&expected)
            .map(difference)
            .fold(0.0, |most, far| if far.is_nan() { far } else { most.max(far) })
    };
    for precision in [Precision::F16, Precision::ANE] {
        for peak in [2f64.powi(-13), 1e-3, 0.01, 470.0, 710.0, 2000.0, 60_000.0] {
            let accurate = far(precision, NormForm::Accurate, peak);
            assert!(accurate < 0.01, "{precision:?}, {peak}: {accurate}");
        }
        // as written, the equation overflows, so that these rows tell the forms apart
        for peak in [710.0, 2000.0] {
            let naive = far(precision, NormForm::Naive, peak);
            assert!(naive.is_nan() || naive > 0.5, "{precision:?}, {peak}: {naive}");
        }
    }
}

/// The largest number of a row near zero divides the epsilon's root, whose square fp16 must hold.
#[test]
fn a_large_epsilon_decides_rows_near_zero_in_half_precision() {
    let rows = rows(1.0);
    let norm = norm(0.0, 1.0, 1e-3);
    let gain: Vec<f64> = weight().iter().map(|gain| f64::from(*gain)).collect();
    let found = by_graph_in(Precision::F16, NormForm::Accurate, &norm, &rows).unwrap();
    for (row, found) in rows.iter().zip(found) {
        let expected = by_hand(row, &gain, 1e-3);
        let largest = expected.iter().fold(0.0, |largest: f64, value| largest.max(value.abs()));
        let far = found.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
        assert!(far <= 0.01 * largest, "{far} of {largest}");
    }
}
