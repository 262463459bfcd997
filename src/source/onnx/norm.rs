//! RMS norms as graphs express them: one operator, one that adds the residual stream first, or a chain of small ones.

use super::model::Node;
use super::network::{Constant, LONGEST_CHAIN, Network};
use super::stream::Stream;
use crate::error::Result;

/// RMS norm: `x / sqrt(mean(x^2) + epsilon) * weight`.
#[derive(Clone, Debug)]
pub(super) struct Norm<'a> {
    /// Input; see [`Network::unscaled`].
    pub input: Stream<'a>,
    /// Weight.
    pub weight: Constant,
    /// Epsilon.
    pub epsilon: f64,
}

impl Network {
    /// Returns the norm that a value comes from, if it comes from one.
    ///
    /// # Errors
    /// Returns an error if the norm is of an unsupported form.
    pub fn norm<'a>(&'a self, value: &'a str) -> Result<Option<Norm<'a>>> {
        let Some((node, index, output)) = self.producer(self.behind_casts(value)) else { return Ok(None) };
        let skips = node.is_contrib("SkipSimplifiedLayerNormalization");
        // ONNX Runtime has the first in both domains
        if node.op == "SimplifiedLayerNormalization" || node.is("RMSNormalization") {
            return self.plain_norm(node).map(Some);
        }
        if skips && output == 0 {
            if !node.input(3).is_empty() {
                return Err(self.refuse(node, "it adds a bias to the residual stream"));
            }
            let epsilon = decimal(node.float("epsilon").unwrap_or(1e-12));
            let weight = self.norm_weight(node, node.input(2))?;
            return Ok(Some(Norm { input: Stream::Sum(index), weight, epsilon }));
        }
        if node.op.ends_with("LayerNormalization") && !skips {
            return Err(self.refuse(node, "it is a layer norm, which subtracts the mean; decoders here have RMS norms"));
        }
        if node.is("Mul") { self.norm_of_small_steps(node) } else { Ok(None) }
    }

    fn plain_norm<'a>(&'a self, node: &'a Node) -> Result<Norm<'a>> {
        let axis = node.int("axis").unwrap_or(-1);
        if !matches!(axis, -1 | 2 | 3) {
            return Err(self.refuse(node, format!("it norms from axis {axis}, expected the last")));
        }
        let weight = self.norm_weight(node, node.input(1))?;
        let epsilon = decimal(node.float("epsilon").unwrap_or(1e-5));
        Ok(Norm { input: self.stream(node.input(0)), weight, epsilon })
    }

    /// Returns an equivalent norm of its input before multiplication by a constant: the norm of `c x` is that of `x`
    /// with an epsilon of `epsilon / c^2`. Graphs scale so that the square of `x` fits into half precision.
    pub fn unscaled<'a>(&'a self, norm: Norm<'a>) -> Result<Norm<'a>> {
        let Stream::Value(value) = norm.input else { return Ok(norm) };
        let (input, factor) = self.behind_factors(value)?;
        if !(factor.is_finite() && factor > 0.0) {
            return Err(self.refuse_value(value, format!("the input of a norm is multiplied by {factor}")));
        }
        Ok(Norm { input: self.stream(input), epsilon: norm.epsilon / (factor * factor), ..norm })
    }

    fn norm_weight(&self, node: &Node, value: &str) -> Result<Constant> {
        match self.constant(value)? {
            Some(weight) if weight.is_float && weight.weight.columns() == weight.weight.elements() => {
                let elements = weight.weight.elements();
                Ok(Constant { weight: weight.weight.reshape(&[elements])?, ..weight })
            }
            _ => Err(self.refuse(node, "its weight isn't a constant vector")),
        }
    }

    /// Returns a norm expressed as a chain of small operations.
    fn norm_of_small_steps<'a>(&'a self, node: &'a Node) -> Result<Option<Norm<'a>>> {
        for (of, weight) in [(0, 1), (1, 0)] {
            let Some(constant) = self.constant(node.input(weight))? else { continue };
            if constant.weight.elements() == 1 {
                continue; // a factor
            }
            let Some((input, epsilon)) = self.normed(node.input(of))? else { return Ok(None) };
            let weight = self.norm_weight(node, node.input(weight))?;
            return Ok(Some(Norm { input: self.stream(input), weight, epsilon }));
        }
        Ok(None)
    }

    /// Returns `x` and epsilon of `x / sqrt(mean(x^2) + epsilon)`.
    fn normed<'a>(&'a self, value: &'a str) -> Result<Option<(&'a str, f64)>> {
        let Some((node, ..)) = self.producer(self.behind_casts(value)) else { return Ok(None) };
        let (input, root) = if node.is("Div") {
            (node.input(0), self.behind_casts(node.input(1)))
        } else if node.is("Mul") {
            // a product with the reciprocal
            let reciprocal = |index: usize| {
                let (of, ..) = self.producer(self.behind_casts(node.input(index)))?;
                let one = of.is("Div") && matches!(self.scalar(of.input(0)), Ok(Some(1.0)));
                if of.is("Reciprocal") { Some(of.input(0)) } else { one.then(|| of.input(1)) }
            };
            match (reciprocal(1), reciprocal(0)) {
                (Some(root), _) => (node.input(0), self.behind_casts(root)),
                (None, Some(root)) => (node.input(1), self.behind_casts(root)),
                (None, None) => return Ok(None),
            }
        } else {
            return Ok(None);
        };
        let Some(root) = self.made_by(root, "Sqrt") else { return Ok(None) };
        let Some((mean, epsilon)) = self.plus_number(root.input(0))? else { return Ok(None) };
        let Some(square) = self.mean_over_last(mean)? else { return Ok(None) };
        if self.producer(self.behind_casts(square)).is_none() {
            return Ok(None);
        }
        if self.squared(square)? != Some(self.behind_casts(input)) {
            return Err(self.refuse_value(self.behind_casts(square), "it isn't the square of what is normed"));
        }
        Ok(Some((self.behind_casts(input), decimal(epsilon))))
    }

    /// Returns summand and number of the sum of a value and a constant number.
    pub fn plus_number<'a>(&'a self, value: &'a str) -> Result<Option<(&'a str, f32)>> {
        let Some(sum) = self.made_by(value, "Add") else { return Ok(None) };
        Ok(match (self.scalar(sum.input(1))?, self.scalar(sum.input(0))?) {
            (Some(number), _) => Some((sum.input(0), number)),
            (None, Some(number)) => Some((sum.input(1), number)),
            (None, None) => None,
        })
    }

    /// Returns the value whose mean over the last dimension a value is, if it is a mean.
    pub fn mean_over_last<'a>(&'a self, value: &'a str) -> Result<Option<&'a str>> {
        let Some(mean) = self.made_by(value, "ReduceMean") else { return Ok(None) };
        let axes = match mean.ints("axes") {
            Some(axes) => Some(axes.to_vec()),
            None => self.integers(mean.input(1))?,
        };
        if !matches!(axes.as_deref(), Some([-1 | 2 | 3])) || mean.int("keepdims").unwrap_or(1) != 1 {
            return Err(self.refuse(mean, "it isn't the mean over the last dimension"));
        }
        Ok(Some(mean.input(0)))
    }

    /// Returns the value whose square a value is, before casts.
    pub fn squared<'a>(&'a self, value: &'a str) -> Result<Option<&'a str>> {
        if let Some(power) = self.made_by(value, "Pow") {
            let is_two = self.stored(self.behind_casts(power.input(1))).is_some()
                && (self.integers(power.input(1))? == Some(vec![2]) || self.scalar(power.input(1))? == Some(2.0));
            return Ok(is_two.then(|| self.behind_casts(power.input(0))));
        }
        let product = self.made_by(value, "Mul").map(|node| [0, 1].map(|index| self.behind_casts(node.input(index))));
        Ok(product.filter(|[a, b]| a == b).map(|[a, _]| a))
    }

    /// Returns the value before products with and quotients by one-element constants, and the product of those.
    pub fn behind_factors<'a>(&'a self, mut value: &'a str) -> Result<(&'a str, f64)> {
        let mut product = 1.0;
        for _ in 0..LONGEST_CHAIN {
            value = self.behind_casts(value);
            let Some((node, ..)) = self.producer(value) else { return Ok((value, product)) };
            let (is_product, is_quotient) = (node.is("Mul"), node.is("Div"));
            if !is_product && !is_quotient {
                return Ok((value, product));
            }
            match (self.scalar(node.input(1))?, self.scalar(node.input(0))?) {
                (Some(factor), _) => {
                    let factor = decimal(factor);
                    product *= if is_quotient { 1.0 / factor } else { factor };
                    value = node.input(0);
                }
                (None, Some(factor)) if is_product => {
                    product *= decimal(factor);
                    value = node.input(1);
                }
                _ => return Ok((value, product)),
            }
        }
        Ok((value, product))
    }
}

/// Returns the shortest decimal number that rounds to this single-precision number.
pub(super) fn decimal(rounded: f32) -> f64 {
    rounded.to_string().parse().unwrap_or(f64::from(rounded))
}
