//! Attention between all tokens of a text, as exporters write it: products of queries and keys, a mask that depends on
//! the length of the text alone, and softmax.

use std::collections::HashSet;

use crate::error::Result;
use crate::onnx::model::Node;
use crate::onnx::network::{LONGEST_CHAIN, Network};
use crate::onnx::norm::decimal;
use crate::onnx::projection::Projection;

/// Attention of a layer.
pub(super) struct EncoderAttention<'a> {
    pub query: Projection<'a>,
    pub key: Projection<'a>,
    pub value: Projection<'a>,
    pub output: Projection<'a>,
    pub heads: u64,
}

/// A projection as one of the factors of a product of heads.
struct Heads<'a> {
    projection: Projection<'a>,
    head_dim: u64,
    /// Factor by which the projection is multiplied.
    scale: f64,
}

/// Maximum number of values that a mask is made of.
const MOST_VALUES: usize = 4096;
/// Maximum number of operations that make a factor.
const DEEPEST_FACTOR: usize = 12;

impl Network {
    /// Returns the attention before its output projection, of the hidden state `from`.
    pub(super) fn encoder_attention<'a>(
        &'a self,
        output: Projection<'a>,
        from: &'a str,
    ) -> Result<EncoderAttention<'a>> {
        let joined = self.behind_reshapes(output.input);
        let turned = self.made_by(joined, "Transpose").filter(|node| node.ints("perm") == Some(&[0, 2, 1, 3]));
        let Some(product) = turned.and_then(|node| self.made_by(self.behind_reshapes(node.input(0)), "MatMul")) else {
            return Err(self.refuse_value(output.input, "it isn't the joined heads of attention"));
        };
        let value = self.head_factor(product.input(1))?;
        let (scores, mut scale) = self.scores(product.input(0))?;
        let (query, key) = (self.head_factor(scores.input(0))?, self.head_factor(scores.input(1))?);
        scale *= query.scale * key.scale;
        let head_dim = value.head_dim;
        let expected = (head_dim as f64).powf(-0.5);
        if (scale / expected - 1.0).abs() > 1e-4 || value.scale != 1.0 {
            return Err(self.refuse(scores, format!("scores are multiplied by {scale}, expected {expected}")));
        }
        let width = value.projection.rows();
        for heads in [&query, &key, &value] {
            if self.behind_casts(heads.projection.input) != from {
                return Err(self.refuse_value(heads.projection.input, "it isn't the hidden state before the layer"));
            }
            if heads.head_dim != head_dim || heads.projection.rows() != width {
                return Err(self.refuse(scores, "queries, keys and values have different numbers of heads"));
            }
        }
        if head_dim == 0 || !width.is_multiple_of(head_dim) {
            return Err(self.refuse(scores, format!("{width} channels aren't heads of {head_dim}")));
        }
        let heads = width / head_dim;
        Ok(EncoderAttention { query: query.projection, key: key.projection, value: value.projection, output, heads })
    }

    /// Returns the product of queries and keys behind the softmax of a value, and the factor between them.
    fn scores<'a>(&'a self, mut value: &'a str) -> Result<(&'a Node, f64)> {
        // exporters of newer versions guard against texts without tokens
        if let Some(guard) = self.made_by(value, "Where").filter(|node| self.made_by(node.input(0), "IsNaN").is_some())
        {
            value = guard.input(2);
        }
        let Some(softmax) = self.made_by(value, "Softmax").filter(|node| matches!(node.int("axis"), Some(-1 | 3)))
        else {
            return Err(self.refuse_value(value, "it isn't a softmax over the last dimension"));
        };
        let (mut value, mut scale, mut is_scaled) = (softmax.input(0), 1.0, false);
        for _ in 0..LONGEST_CHAIN {
            let Some((node, ..)) = self.producer(self.behind_casts(value)) else { break };
            let (next, mask) = match node.op.as_str() {
                _ if !node.domain.is_empty() => break,
                "MatMul" => return Ok((node, scale)),
                "Mul" | "Div" => {
                    let (next, factor) = self.behind_factors(value)?;
                    if next == self.behind_casts(value) {
                        break;
                    }
                    (scale, is_scaled) = (scale * factor, true);
                    value = next;
                    continue;
                }
                "Add" if self.is_mask(node.input(1))? => (node.input(0), node.input(1)),
                "Add" if self.is_mask(node.input(0))? => (node.input(1), node.input(0)),
                // masked_fill
                "Where" if self.is_mask(node.input(1))? => (node.input(2), node.input(0)),
                "Where" if self.is_mask(node.input(2))? => (node.input(1), node.input(0)),
                _ => break,
            };
            if is_scaled || !self.is_mask(mask)? {
                return Err(self.refuse(node, "it isn't the mask of a text's length"));
            }
            value = next;
        }
        Err(self.refuse_value(value, "it isn't a product of queries and keys with a mask"))
    }

    /// Whether a value depends on the mask, the lengths and numbers alone, and not on which token is where: no table,
    /// no band and no comparison of positions.
    fn is_mask(&self, value: &str) -> Result<bool> {
        let (mut left, mut seen) = (vec![value], HashSet::new());
        while let Some(value) = left.pop() {
            if !seen.insert(value) || self.is_input(value) {
                continue;
            }
            if seen.len() > MOST_VALUES {
                return Ok(false);
            }
            if let Some((name, stored)) = self.stored(value) {
                let tensor = self.tensor(name, stored, None)?;
                if tensor.elements() > 1 && tensor.dtype().is_float() {
                    return Ok(false);
                }
                continue;
            }
            let Some((node, ..)) = self.producer(value) else { return Ok(false) };
            // a length depends on no values
            if node.is("Shape") {
                continue;
            }
            let compares = ["Less", "LessOrEqual", "Greater", "GreaterOrEqual"].iter().any(|op| node.is(op));
            let constant = |index: usize| self.stored(node.input(index)).is_some();
            let is_other = ["MatMul", "Gemm", "Trilu", "Softmax", "LayerNormalization", "CumSum", "ReduceMean"];
            if compares && !constant(0) && !constant(1)
                || is_other.iter().any(|op| node.is(op))
                || !node.domain.is_empty()
            {
                return Ok(false);
            }
            left.extend(node.inputs.iter().map(String::as_str).filter(|input| !input.is_empty()));
        }
        Ok(true)
    }

    /// Returns the projection whose heads a value is, possibly turned or multiplied by a number.
    fn head_factor<'a>(&'a self, mut value: &'a str) -> Result<Heads<'a>> {
        let (mut factors, mut split, mut turns) = (Vec::new(), None, None::<[i64; 4]>);
        for _ in 0..LONGEST_CHAIN {
            if let Some(projection) = self.projection(value)? {
                let swapped = matches!(turns, Some([0, 2, 1 | 3, 1 | 3]));
                let Some(head_dim) = split.filter(|_| swapped) else {
                    return Err(self.refuse_value(value, "it isn't split into heads as [text, token, head, channel]"));
                };
                let mut scale = 1.0;
                for (factor, is_divisor) in factors {
                    let factor = self.factor(factor, head_dim as f64, DEEPEST_FACTOR)?.unwrap_or(f64::NAN);
                    scale *= if is_divisor { 1.0 / factor } else { factor };
                }
                return Ok(Heads { projection, head_dim, scale });
            }
            value = self.behind_casts(value);
            let Some((node, ..)) = self.producer(value) else { break };
            match node.op.as_str() {
                "Mul" | "Div" => {
                    let is_factor = |index: usize| -> Result<bool> {
                        Ok(self.factor(node.input(index), 1.0, DEEPEST_FACTOR)?.is_some())
                    };
                    let (of, factor) = match (is_factor(1)?, is_factor(0)?) {
                        (true, _) => (0, 1),
                        (false, true) if node.is("Mul") => (1, 0),
                        _ => break,
                    };
                    factors.push((node.input(factor), node.is("Div")));
                    value = node.input(of);
                }
                "Transpose" => {
                    turns = node.ints("perm").and_then(|perm| perm.try_into().ok());
                    value = node.input(0);
                }
                "Reshape" => {
                    split = self.channels(node)?;
                    value = node.input(0);
                }
                _ => break,
            }
        }
        Err(self.refuse_value(value, "it isn't a projection that is split into heads"))
    }

    /// Returns the number that a value is, where the last dimension of what has a shape is `head_dim`.
    fn factor(&self, value: &str, head_dim: f64, steps: usize) -> Result<Option<f64>> {
        let value = self.behind_counting(value);
        if let Some(number) = self.scalar(value)? {
            return Ok(Some(decimal(number)));
        }
        let Some((node, ..)) = self.producer(value).filter(|_| steps > 0) else { return Ok(None) };
        let of = |index: usize| self.factor(node.input(index), head_dim, steps - 1);
        Ok(match node.op.as_str() {
            "Sqrt" => of(0)?.map(f64::sqrt),
            "Mul" => of(0)?.zip(of(1)?).map(|(a, b)| a * b),
            "Div" => of(0)?.zip(of(1)?).map(|(a, b)| a / b),
            "Slice" | "Gather" if self.made_by(node.input(0), "Shape").is_some() => {
                let is_last = matches!(self.integers(node.input(1))?.as_deref(), Some([-1 | 3]));
                is_last.then_some(head_dim)
            }
            _ => None,
        })
    }

    /// Returns the number of channels of a head, the last dimension of a reshape `[text, token, head, channel]`.
    fn channels(&self, node: &Node) -> Result<Option<u64>> {
        let last = match self.integers(node.input(1))? {
            Some(shape) => shape.last().copied(),
            None => match self.made_by(node.input(1), "Concat").and_then(|node| node.inputs.last()) {
                Some(last) => self.integers(last)?.and_then(|last| last.last().copied()),
                None => None,
            },
        };
        Ok(last.and_then(|last| u64::try_from(last).ok()))
    }
}
