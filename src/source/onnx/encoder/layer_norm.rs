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
        let with_constant = |node: &'a Node| -> Result<Option<(&'a str, Constant)>> {
            for (of, constant) in [(0, 1), (1, 0)] {
                if let Some(constant) = self.vector(node.input(constant))? {
                    return Ok(Some((node.input(of), constant)));
                }
            }
            Ok(None)
        };
        let Some((scaled, bias)) = with_constant(node)? else { return Ok(None) };
        let Some(scaled) = self.made_by(scaled, "Mul") else { return Ok(None) };
        let Some((normed, weight)) = with_constant(scaled)? else { return Ok(None) };
        let Some(normed) = self.made_by(normed, "Div") else { return Ok(None) };
        let Some(centred) = self.made_by(normed.input(0), "Sub") else { return Ok(None) };
        let Some(root) = self.made_by(normed.input(1), "Sqrt") else { return Ok(None) };
        let Some((variance, epsilon)) = self.plus_number(root.input(0))? else { return Ok(None) };
        let [input, mean] = [0, 1].map(|index| self.behind_casts(centred.input(index)));
        let Some(square) = self.mean_over_last(variance)? else { return Ok(None) };
        // exporters compute the difference once, or twice
        let difference = match self.squared(square)? {
            Some(difference) => self.made_by(difference, "Sub"),
            None => None,
        };
        let is_same = |other: &Node| [0, 1].map(|index| self.behind_casts(other.input(index))) == [input, mean];
        let of_input = self.mean_over_last(mean)?.is_some_and(|of| self.behind_casts(of) == input);
        let is_norm = of_input && difference.is_some_and(is_same);
        Ok(is_norm.then(|| LayerNorm { input, weight, bias, epsilon: decimal(epsilon) }))
    }

    /// Returns a constant vector of more than one element.
    fn vector(&self, value: &str) -> Result<Option<Constant>> {
        let constant = self.constant(value)?;
        Ok(constant.filter(|of| of.is_float && of.weight.shape().len() == 1 && of.weight.elements() > 1))
    }
}
