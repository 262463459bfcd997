//! Layer norms: one operator, or a chain of small ones.

use crate::error::Result;
use crate::onnx::follow::Weights;
use crate::onnx::model::Node;
use crate::onnx::network::{Constant, Network};
use crate::onnx::norm::decimal;

/// Layer norm: `(x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias`.
pub(super) struct LayerNorm<'a> {
    pub input: &'a str,
    pub weight: Constant,
    pub bias: Constant,
    pub epsilon: f64,
}

impl LayerNorm<'_> {
    /// Whether another norm has the same epsilon; graphs hold single precision.
    pub fn is_like(&self, other: &LayerNorm<'_>) -> bool {
        (self.epsilon / other.epsilon - 1.0).abs() < 1e-6
    }

    pub fn put(self, weights: &mut Weights, name: &str) {
        weights.push((format!("{name}.weight"), self.weight));
        weights.push((format!("{name}.bias"), self.bias));
    }
}

impl Network {
    /// Returns the layer norm that a value comes from, if it comes from one.
    pub(super) fn layer_norm<'a>(&'a self, value: &'a str) -> Result<Option<LayerNorm<'a>>> {
        let Some((node, _, output)) = self.producer(self.behind_casts(value)) else { return Ok(None) };
        if node.is("LayerNormalization") && output == 0 {
            let axis = node.int("axis").unwrap_or(-1);
            if !matches!(axis, -1 | 2) {
                return Err(self.refuse(node, format!("it norms from axis {axis}, expected the last")));
            }
            let epsilon = decimal(node.float("epsilon").unwrap_or(1e-5));
            return match (self.vector(node.input(1))?, self.vector(node.input(2))?) {
                (Some(weight), Some(bias)) => {
                    Ok(Some(LayerNorm { input: self.behind_casts(node.input(0)), weight, bias, epsilon }))
                }
                _ => Err(self.refuse(node, "its weight and bias aren't constant vectors")),
            };
        }
        if node.is("Add") { self.layer_norm_of_small_steps(node) } else { Ok(None) }
    }

    /// Returns a norm expressed as `Add(Mul(Div(Sub(x, mean), Sqrt(Add(variance, epsilon))), weight), bias)`.
    fn layer_norm_of_small_steps<'a>(&'a self, node: &'a Node) -> Result<Option<LayerNorm<'a>>> {
        let made_by = |value: &'a str, op: &str| {
            self.producer(self.behind_casts(value)).map(|(node, ..)| node).filter(|node| node.is(op))
        };
        let with_constant = |node: &'a Node| -> Result<Option<(&'a str, Constant)>> {
            for (of, constant) in [(0, 1), (1, 0)] {
                if let Some(constant) = self.vector(node.input(constant))? {
                    return Ok(Some((node.input(of), constant)));
                }
            }
            Ok(None)
        };
        let Some((scaled, bias)) = with_constant(node)? else { return Ok(None) };
        let Some(scaled) = made_by(scaled, "Mul") else { return Ok(None) };
        let Some((normed, weight)) = with_constant(scaled)? else { return Ok(None) };
        let Some(normed) = made_by(normed, "Div") else { return Ok(None) };
        let (Some(centred), Some(root)) = (made_by(normed.input(0), "Sub"), made_by(normed.input(1), "Sqrt")) else {
            return Ok(None);
        };
        let Some(sum) = made_by(root.input(0), "Add") else { return Ok(None) };
        let (variance, epsilon) = match (self.scalar(sum.input(1))?, self.scalar(sum.input(0))?) {
            (Some(epsilon), _) => (sum.input(0), epsilon),
            (None, Some(epsilon)) => (sum.input(1), epsilon),
            (None, None) => return Ok(None),
        };
        let input = self.behind_casts(centred.input(0));
        let is_mean_of = |mean: Option<&'a Node>, of: &dyn Fn(&'a str) -> bool| -> Result<bool> {
            let Some(mean) = mean else { return Ok(false) };
            let axes = match mean.ints("axes") {
                Some(axes) => Some(axes.to_vec()),
                None => self.integers(mean.input(1))?,
            };
            Ok(matches!(axes.as_deref(), Some([-1 | 2])) && of(mean.input(0)))
        };
        let is_input = |value: &'a str| self.behind_casts(value) == input;
        // exporters compute the difference once, or twice
        let is_difference = |value: &'a str| {
            made_by(value, "Sub").is_some_and(|other| {
                is_input(other.input(0)) && self.behind_casts(other.input(1)) == self.behind_casts(centred.input(1))
            })
        };
        let is_square = |value: &'a str| {
            made_by(value, "Pow").is_some_and(|square| {
                is_difference(square.input(0)) && matches!(self.scalar(square.input(1)), Ok(Some(2.0)))
            }) || made_by(value, "Mul")
                .is_some_and(|square| is_difference(square.input(0)) && is_difference(square.input(1)))
        };
        let is_norm = is_mean_of(made_by(centred.input(1), "ReduceMean"), &is_input)?
            && is_mean_of(made_by(variance, "ReduceMean"), &is_square)?;
        Ok(is_norm.then(|| LayerNorm { input, weight, bias, epsilon: decimal(epsilon) }))
    }

    /// Returns a constant vector of more than one element.
    fn vector(&self, value: &str) -> Result<Option<Constant>> {
        let constant = self.constant(value)?;
        Ok(constant.filter(|of| of.is_float && of.weight.shape().len() == 1 && of.weight.elements() > 1))
    }
}
