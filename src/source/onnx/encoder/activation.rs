//! Activations, which exporters write as chains of small operations.

use crate::error::Result;
use crate::onnx::network::Network;
use crate::onnx::norm::decimal;

/// Maximum number of factors of an activation.
const MOST_FACTORS: usize = 16;

impl Network {
    /// Returns the input of an activation, and the activation's name in transformers.
    ///
    /// # Errors
    /// Returns an error if the value isn't a known activation.
    pub(super) fn activation<'a>(&'a self, value: &'a str) -> Result<(&'a str, &'static str)> {
        let value = self.behind_casts(value);
        if let Some((node, ..)) = self.producer(value) {
            let name = match (node.op.as_str(), node.domain.as_str(), node.text("approximate")) {
                ("Gelu", "", Some("tanh")) | ("FastGelu", "com.microsoft", _) => Some("gelu_new"),
                ("Gelu", ..) => Some("gelu"),
                _ => None,
            };
            if let Some(name) = name.filter(|_| node.inputs.len() == 1) {
                return Ok((self.behind_casts(node.input(0)), name));
            }
        }
        // products of a constant, x, and 1 + erf(x / sqrt 2) or 1 + tanh(..), or the sigmoid of x
        let (mut constant, mut factors, mut left) = (1.0, Vec::new(), vec![value]);
        while let Some(value) = left.pop() {
            let value = self.behind_casts(value);
            match self.made_by(value, "Mul") {
                Some(node) if factors.len() + left.len() < MOST_FACTORS => {
                    left.extend([node.input(0), node.input(1)]);
                }
                _ => match self.scalar(value)? {
                    Some(factor) => constant *= decimal(factor),
                    None => factors.push(value),
                },
            }
        }
        if let [a, b] = factors[..] {
            for [input, curve] in [[a, b], [b, a]] {
                if let Some(name) = self.curve(curve, input, constant)? {
                    return Ok((input, name));
                }
            }
        }
        Err(self.refuse_value(value, "it isn't an activation that is known here: gelu, gelu_new, silu"))
    }

    /// Returns the name of the activation `constant * input * curve`.
    fn curve(&self, curve: &str, input: &str, constant: f64) -> Result<Option<&'static str>> {
        let near = |a: f64, b: f64| (a - b).abs() < 1e-4 * b.abs();
        let Some((node, ..)) = self.producer(curve) else { return Ok(None) };
        if node.is("Sigmoid") {
            return Ok((near(constant, 1.0) && self.behind_casts(node.input(0)) == input).then_some("silu"));
        }
        if !node.is("Add") || !near(constant, 0.5) {
            return Ok(None);
        }
        let inner = match (self.scalar(node.input(0))?, self.scalar(node.input(1))?) {
            (Some(1.0), None) => node.input(1),
            (None, Some(1.0)) => node.input(0),
            _ => return Ok(None),
        };
        let Some((inner, ..)) = self.producer(self.behind_casts(inner)) else { return Ok(None) };
        let (argument, factor) = self.behind_factors(inner.input(0))?;
        if inner.is("Erf") {
            return Ok((argument == input && near(factor, std::f64::consts::FRAC_1_SQRT_2)).then_some("gelu"));
        }
        // tanh(sqrt(2 / pi) (x + 0.044715 x^3))
        let is_tanh = inner.is("Tanh") && near(factor, (2.0 / std::f64::consts::PI).sqrt());
        let Some(sum) = self.made_by(argument, "Add").filter(|_| is_tanh) else { return Ok(None) };
        for (linear, cubic) in [(0, 1), (1, 0)] {
            let (power, factor) = self.behind_factors(sum.input(cubic))?;
            let is_cube = self.producer(power).is_some_and(|(node, ..)| {
                let cubes = self.scalar(node.input(1)).is_ok_and(|power| power == Some(3.0));
                node.is("Pow") && cubes && self.behind_casts(node.input(0)) == input
            });
            if is_cube && near(factor, 0.044_715) && self.behind_casts(sum.input(linear)) == input {
                return Ok(Some("gelu_new"));
            }
        }
        Ok(None)
    }
}
