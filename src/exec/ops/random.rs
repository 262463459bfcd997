//! Random numbers. Their distribution is the op's; the numbers themselves aren't Core ML's.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Row, computing};
use crate::kernel::{Call, Input, Integers, Kernel};
use crate::pool::Pool;
use crate::resolve::Resolver;
use anec_base::SplitMix64;

/// Rows of the table.
pub(super) const ROWS: &[Row] = computing! {
    "random_bernoulli" => |op| {
        let prob = op.float("prob")?;
        Ok(Arc::new(Random { shape: op.integers("shape")?, seed: seed(op)?, draw: move |numbers: &mut SplitMix64| {
            if numbers.uniform() < f64::from(prob) { 1.0 } else { 0.0 }
        } }))
    },
    "random_categorical" => |op| {
        let logits = match op.text("mode")? {
            "logits" => true,
            "probs" => false,
            other => return Err(format!("`mode` is \"{other}\"; expected logits or probs")),
        };
        let size = op.integer("size")?;
        let size = usize::try_from(size).ok().filter(|size| *size <= MAX_ELEMENTS);
        let size = size.ok_or("`size` is no number of samples")?;
        Ok(Arc::new(Categorical { x: op.input("x")?, logits, size, seed: seed(op)? }))
    },
    "random_normal" => |op| {
        let (mean, deviation) = (op.float("mean")?, op.float("stddev")?);
        Ok(Arc::new(Random { shape: op.integers("shape")?, seed: seed(op)?, draw: move |numbers: &mut SplitMix64| {
            // Box and Muller; 1 - u is never 0
            let radius = (-2.0 * (1.0 - numbers.uniform()).ln()).sqrt();
            mean + deviation * (radius * (std::f64::consts::TAU * numbers.uniform()).cos()) as f32
        } }))
    },
    "random_uniform" => |op| {
        let (low, high) = (op.float("low")?, op.float("high")?);
        Ok(Arc::new(Random { shape: op.integers("shape")?, seed: seed(op)?, draw: move |numbers: &mut SplitMix64| {
            low + (high - low) * numbers.uniform() as f32
        } }))
    },
};

/// Maximum number of random numbers of a call.
const MAX_ELEMENTS: usize = 1 << 28;

/// Seed of an op; `None` stands for other numbers at each call.
fn seed(op: &Resolver<'_>) -> Result<Option<u64>, String> {
    Ok(u64::try_from(op.integer("seed")?).ok())
}

/// Numbers of a call.
fn numbers(seed: Option<u64>) -> SplitMix64 {
    static CALLS: AtomicU64 = AtomicU64::new(1 << 32);
    SplitMix64::new(seed.unwrap_or_else(|| CALLS.fetch_add(1, Ordering::Relaxed)))
}

/// Tensor of independent numbers.
struct Random<F> {
    shape: Integers,
    seed: Option<u64>,
    draw: F,
}

impl<F: Fn(&mut SplitMix64) -> f32 + Send + Sync + 'static> Kernel for Random<F> {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let asked = call.integers(&self.shape)?;
        let shape: Option<Vec<usize>> = asked.iter().map(|size| usize::try_from(*size).ok()).collect();
        let count = shape.as_ref().and_then(|shape| shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)));
        let (Some(shape), Some(count)) = (shape, count.filter(|count| *count <= MAX_ELEMENTS)) else {
            return Err(format!("{asked:?} is no shape, or too large"));
        };
        let mut numbers = numbers(self.seed);
        let draw = || (self.draw)(&mut numbers);
        let result = pool.make(&shape, |out: &mut Vec<f32>| out.extend(std::iter::repeat_with(draw).take(count)));
        call.push(result)
    }
}

/// Indices along the last axis, each as often as its probability says.
struct Categorical {
    x: Input,
    /// Whether the values are logarithms of probabilities.
    logits: bool,
    size: usize,
    seed: Option<u64>,
}

impl Kernel for Categorical {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        let x = call.tensor(self.x)?;
        let values = call.floats(self.x)?;
        let (lead, classes) = match x.shape.split_last() {
            Some((classes, lead)) if *classes > 0 => (lead, *classes),
            _ => return Err(format!("`x` of shape {:?} has no classes", x.shape)),
        };
        let rows = values.len() / classes;
        if rows.checked_mul(self.size).is_none_or(|count| count > MAX_ELEMENTS) {
            return Err(format!("{} samples of {rows} rows are too many", self.size));
        }
        let mut numbers = numbers(self.seed);
        let result = pool.make(&[lead, &[self.size]].concat(), |out: &mut Vec<f32>| {
            for row in values.chunks_exact(classes) {
                let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let weight = |value: &f32| f64::from(if self.logits { (value - most).exp() } else { value.max(0.0) });
                let sum: f64 = row.iter().map(weight).sum();
                out.extend((0..self.size).map(|_| {
                    let mut rest = numbers.uniform() * sum;
                    let class = row.iter().position(|value| {
                        rest -= weight(value);
                        rest < 0.0
                    });
                    class.unwrap_or(classes - 1) as f32
                }));
            }
        });
        call.push(result)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{NamedValues, f, i, run, s, try_run};
    use crate::tensor::Tensor;

    fn mean(tensor: &Tensor) -> f32 {
        let values = tensor.floats().unwrap();
        values.iter().sum::<f32>() / values.len() as f32
    }

    fn drawn(operator: &str, seed: i32, more: NamedValues<'static>) -> Tensor {
        let given: NamedValues<'_> = vec![("shape", i(&[2], &[100, 200])), ("seed", i(&[], &[seed]))];
        run(operator, given.into_iter().chain(more).collect())
    }

    #[test]
    fn numbers_follow_their_distribution() {
        let uniform = drawn("random_uniform", 3, vec![("low", f(&[], &[2.0])), ("high", f(&[], &[4.0]))]);
        assert_eq!(uniform.shape, [100, 200]);
        assert!(
            (mean(&uniform) - 3.0).abs() < 0.02 && uniform.floats().unwrap().iter().all(|v| (2.0..=4.0).contains(v))
        );
        let normal = drawn("random_normal", 3, vec![("mean", f(&[], &[1.0])), ("stddev", f(&[], &[2.0]))]);
        let squares = normal.floats().unwrap().iter().map(|v| (v - 1.0).powi(2)).sum::<f32>() / 20000.0;
        assert!((mean(&normal) - 1.0).abs() < 0.05 && (squares - 4.0).abs() < 0.15, "{squares}");
        let bernoulli = drawn("random_bernoulli", 3, vec![("prob", f(&[], &[0.25]))]);
        assert!((mean(&bernoulli) - 0.25).abs() < 0.02);
        let classes = |mode, values: &[f32]| {
            let x = f(&[1, 3], values);
            run(
                "random_categorical",
                vec![("x", x), ("mode", s(mode)), ("size", i(&[], &[9000])), ("seed", i(&[], &[1]))],
            )
        };
        let logits = classes("logits", &[0.0, 2f32.ln(), f32::NEG_INFINITY]);
        assert!((mean(&logits) - 2.0 / 3.0).abs() < 0.02);
        assert!((mean(&classes("probs", &[0.0, 0.5, 0.5])) - 1.5).abs() < 0.02);
    }

    #[test]
    fn a_seed_repeats_the_numbers() {
        let of = |seed| drawn("random_uniform", seed, vec![("low", f(&[], &[0.0])), ("high", f(&[], &[1.0]))]);
        assert_eq!(of(5), of(5));
        assert_ne!(of(5), of(6));
        assert_ne!(of(-1), of(-1));
        let huge = vec![("shape", i(&[2], &[i32::MAX, i32::MAX])), ("seed", i(&[], &[1])), ("prob", f(&[], &[0.5]))];
        assert!(try_run("random_bernoulli", huge).unwrap_err().contains("too large"));
    }
}
