//! How large activations are: their second moments, measured by calibration, or assumed.
//!
//! What is assumed is that a normalised hidden state is normally distributed, each channel on its own, with the norm's gain
//! as its standard deviation: `a ~ N(0, diag(g^2))`. Then `W a + b` has the second moments `|W_j g|^2 + b_j^2`.

use crate::table::Activation;

/// Second moments of activations, measured over a text, before channels are equalized. Folding gains and rotating the
/// residual stream don't change them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Moments {
    /// Of each layer.
    pub layers: Vec<LayerMoments>,
}

/// Second moments of a layer's activations; a vector that is empty was not measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerMoments {
    /// `E[h^2]` of what the down projection reads, `[intermediate]`; of packed experts one after another.
    pub hidden: Vec<f64>,
    /// `E[act(gate)^2]`, likewise.
    pub gates: Vec<f64>,
    /// `E[o^2]` of what the attention's output projection reads, `[heads * head_dim]`.
    pub attended: Vec<f64>,
    /// `E[q^2]` of queries with their bias, `[heads * head_dim]`, before or after rotation.
    pub queries: Vec<f64>,
    /// `E[k^2]` of keys, `[key-value heads * head_dim]`, likewise.
    pub keys: Vec<f64>,
}

impl LayerMoments {
    /// What was measured, if it is of `length` channels.
    pub(super) fn measured(values: &[f64], length: usize) -> Option<Vec<f64>> {
        (values.len() == length).then(|| values.to_vec())
    }
}

/// `E[act(z)^2]` for `z ~ N(mean, deviation^2)`: a sum over steps of the deviation.
pub(super) fn activated(activation: Activation, mean: f64, deviation: f64) -> f64 {
    const STEPS: i32 = 24;
    const REACH: f64 = 5.0;
    let (mut sum, mut weights) = (0.0, 0.0);
    for step in -STEPS..=STEPS {
        let z = f64::from(step) * REACH / f64::from(STEPS);
        let weight = (-z * z / 2.0).exp();
        sum += weight * apply(activation, mean + deviation * z).powi(2);
        weights += weight;
    }
    sum / weights
}

fn apply(activation: Activation, x: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match activation {
        Activation::Silu => x * sigmoid(x),
        // GELU by tanh is within 1e-3 of GELU by the error function
        Activation::GeluTanh | Activation::Gelu => {
            x * sigmoid(2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_of_activations_are_those_of_many_samples() {
        for (activation, mean, deviation) in
            [(Activation::Silu, 0.0, 1.0), (Activation::Silu, -2.0, 3.0), (Activation::GeluTanh, 0.5, 0.1)]
        {
            let mut values = vec![0f32; 200_000];
            let random = anec_source::SourceTensor::random("z", &[200_000], 1, mean as f32, deviation as f32).unwrap();
            random.read(0, &mut values).unwrap();
            let sampled = values.iter().map(|z| apply(activation, f64::from(*z)).powi(2)).sum::<f64>() / 2e5;
            let found = activated(activation, mean, deviation);
            // the samples are sums of four numbers: their ends are short
            assert!((found / sampled - 1.0).abs() < 0.1, "{activation:?} {mean} {deviation}: {found}, {sampled}");
        }
        // far out, SiLU is the identity on one side
        assert!((activated(Activation::Silu, 100.0, 1.0) / 10_001.0 - 1.0).abs() < 1e-3);
    }
}
