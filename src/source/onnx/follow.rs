//! Search for a decoder's parts, from the logits back to the embedding.
//!
//! The purpose of a constant follows from its use in the graph, not from its name, which differs between exporters.
//! Every operation on the way must be understood, or the graph is refused, so that none of its maths gets lost.

use super::attention::Attention;
use super::decoder::{OnnxActivation, OnnxDecoder, OnnxNormPlacement};
use super::model::Node;
use super::network::{Constant, Network};
use super::projection::Projection;
use super::stream::Stream;
use crate::error::{Result, SourceError};
use anec_base::listing::list;

/// Maximum number of layers.
const MOST_LAYERS: usize = 4096;

/// Weights by their names in transformers.
pub(super) type Weights = Vec<(String, Constant)>;

/// Kind of a layer's block.
pub(super) enum OnnxBlock<'a> {
    Attention(Box<Attention<'a>>),
    Mlp(Box<Mlp<'a>>),
}

/// Gated feed-forward network, without its last projection.
pub(super) struct Mlp<'a> {
    pub gate: Projection<'a>,
    pub up: Projection<'a>,
    pub activation: OnnxActivation,
}

/// Branch that a block adds to the residual stream, from its end to its beginning.
pub(super) struct Branch<'a> {
    pub multiplier: f64,
    pub after: Option<(Constant, f64)>,
    pub output: Projection<'a>,
    pub block: OnnxBlock<'a>,
    pub before: Option<(Constant, f64)>,
    /// Residual stream at the branch's input.
    pub from: Stream<'a>,
}

impl<'a> Branch<'a> {
    /// Returns the placement of the norms; `None` without norms.
    pub fn placement(&self) -> Option<OnnxNormPlacement> {
        match (&self.before, &self.after) {
            (Some(_), None) => Some(OnnxNormPlacement::Pre),
            (None, Some(_)) => Some(OnnxNormPlacement::Post),
            (Some(_), Some(_)) => Some(OnnxNormPlacement::Both),
            (None, None) => None,
        }
    }
}

impl Network {
    /// Returns the residual stream at a value.
    pub fn stream<'a>(&'a self, value: &'a str) -> Stream<'a> {
        let value = self.behind_casts(value);
        match self.producer(value) {
            Some((node, index, 3)) if node.is_contrib("SkipSimplifiedLayerNormalization") => Stream::Sum(index),
            _ => Stream::Value(value),
        }
    }

    /// Returns the summands of the residual stream; `None` before the first layer.
    fn summands<'a>(&'a self, stream: Stream<'a>) -> Result<Option<[&'a str; 2]>> {
        let node = match stream {
            Stream::Sum(index) => &self.graph().nodes[index],
            Stream::Value(value) => match self.producer(value) {
                Some((node, ..)) if node.is("Add") => node,
                _ => return Ok(None),
            },
        };
        let summands = [node.input(0), node.input(1)];
        for value in summands {
            if self.constant(value)?.is_some() {
                return Err(self.refuse(node, "it adds a constant to the residual stream"));
            }
        }
        Ok(Some(summands))
    }

    /// Returns an error about the residual stream.
    pub fn refuse_stream(&self, stream: Stream<'_>, problem: &str) -> SourceError {
        match stream {
            Stream::Sum(index) => self.refuse(&self.graph().nodes[index], problem),
            Stream::Value(value) => self.refuse_value(value, problem),
        }
    }

    /// Follows the graph from its logits.
    ///
    /// # Errors
    /// Returns an error that names the operation if something on the way isn't understood.
    pub fn decoder(&self, logits: &str, input_ids: &str) -> Result<(OnnxDecoder, Weights)> {
        if !self.graph().outputs.iter().any(|output| output == logits) {
            let problem = format!("the graph has no output `{logits}`; it has {}", list(&self.graph().outputs));
            return Err(SourceError::file(self.path(), problem).advise("give the model's decoder, with its LM head"));
        }
        let (value, logits_multiplier) = self.behind_factors(logits)?;
        let Some(head) = self.projection(value)? else {
            return Err(
                self.refuse_value(value, "it isn't an LM head, or changes the logits in a way that isn't known")
            );
        };
        let Some(final_norm) = self.norm(self.behind_last_token(head.input)?)? else {
            return Err(self.refuse_value(head.input, "before the LM head should be a norm"));
        };
        // before the first sum, the stream was scaled for the norm
        let final_norm = match self.summands(final_norm.input)? {
            Some(_) => final_norm,
            None => self.unscaled(final_norm)?,
        };
        let mut stream = final_norm.input;
        let mut branches = Vec::new();
        while let Some(summands) = self.summands(stream)? {
            if branches.len() >= 2 * MOST_LAYERS {
                return Err(self.refuse_stream(stream, "it has more layers than any model"));
            }
            let branch = self.branch(stream, summands)?;
            stream = branch.from;
            branches.push(branch);
        }
        let Stream::Value(embedded) = stream else {
            return Err(self.refuse_stream(stream, "the residual stream has no beginning"));
        };
        let (lookup, embedding_multiplier) = self.behind_factors(embedded)?;
        let embedding = self.embedding(lookup, input_ids)?;
        self.assemble(head, final_norm, branches, embedding, [embedding_multiplier, logits_multiplier])
    }

    /// Returns the value before the selection of the last token, which doesn't change the logits.
    fn behind_last_token<'a>(&'a self, value: &'a str) -> Result<&'a str> {
        let value = self.behind_casts(value);
        let Some((node, ..)) = self.producer(value).filter(|(node, ..)| node.is("Unsqueeze")) else { return Ok(value) };
        match self.producer(node.input(0)) {
            Some((gather, ..)) if gather.is("Gather") && gather.int("axis") == Some(1) => {
                match self.integers(gather.input(1))?.as_deref() {
                    Some([-1]) => Ok(gather.input(0)),
                    _ => Err(self.refuse(gather, "it chooses other tokens than the last")),
                }
            }
            _ => Ok(value),
        }
    }

    /// Returns the branch that is added to the residual stream: the summand that ends in a projection.
    fn branch<'a>(&'a self, stream: Stream<'a>, summands: [&'a str; 2]) -> Result<Branch<'a>> {
        let mut found = None;
        for (index, value) in summands.into_iter().enumerate() {
            let (value, multiplier) = self.behind_factors(value)?;
            let (after, end) = match self.norm(value)? {
                Some(norm) => match norm.input {
                    Stream::Value(input) => (Some((norm.weight, norm.epsilon)), input),
                    Stream::Sum(_) => continue,
                },
                None => (None, value),
            };
            if let Some(output) = self.projection(end)? {
                if found.is_some() {
                    return Err(self.refuse_stream(stream, "both summands are what a block gives"));
                }
                found = Some((summands[1 - index], multiplier, after, output));
            }
        }
        let Some((residual, multiplier, after, output)) = found else {
            return Err(self.refuse_stream(stream, "neither summand is what a block gives"));
        };
        let inner = self.behind_casts(output.input);
        let Some((node, ..)) = self.producer(inner) else {
            return Err(self.refuse_value(inner, "it should be what attention or a feed-forward network gives"));
        };
        let (block, input) = if node.is_contrib("GroupQueryAttention") {
            let attention = self.attention(node)?;
            let [query, key, value] = attention.projections.each_ref().map(|part| self.behind_casts(part.input));
            if query != key || query != value {
                return Err(self.refuse(node, "queries, keys and values come from different values"));
            }
            (OnnxBlock::Attention(Box::new(attention)), query)
        } else if node.is("Mul") {
            let (gate, up, activation) = self.gated(node)?;
            let (input, other) = (self.behind_casts(gate.input), self.behind_casts(up.input));
            if input != other {
                return Err(self.refuse(node, "gate and up projection come from different values"));
            }
            (OnnxBlock::Mlp(Box::new(Mlp { gate, up, activation })), input)
        } else if node.is_contrib("MultiHeadAttention") {
            let problem = "its mask is computed in the graph, which isn't read; the model builder writes GroupQueryAttention \
                           for int4 and fp32 on CPUs, and for fp16 on GPUs";
            return Err(self.refuse(node, problem));
        } else {
            return Err(self.refuse(node, "it is neither GroupQueryAttention nor a gated feed-forward network"));
        };
        let residual = self.stream(residual);
        let (before, from) = match self.norm(input)? {
            Some(norm) => {
                // the stream itself may be a product: the scaled embedding
                let norm = if norm.input == residual { norm } else { self.unscaled(norm)? };
                (Some((norm.weight, norm.epsilon)), norm.input)
            }
            None => (None, self.stream(input)),
        };
        if from != residual {
            return Err(self.refuse(node, "it isn't added to the residual stream that it was computed from"));
        }
        Ok(Branch { multiplier, after, output, block, before, from })
    }

    /// Returns the projections of a gated feed-forward network, given its product.
    fn gated<'a>(&'a self, node: &'a Node) -> Result<(Projection<'a>, Projection<'a>, OnnxActivation)> {
        for (gate, up) in [(0, 1), (1, 0)] {
            let Some((gate, activation)) = self.activated(node.input(gate))? else { continue };
            let (gate, up) = (self.projection(gate)?, self.projection(node.input(up))?);
            if let (Some(gate), Some(up)) = (gate, up) {
                return Ok((gate, up, activation));
            }
        }
        Err(self.refuse(node, "it isn't the product of an activated gate and another projection"))
    }

    /// Returns the input and kind of an activation.
    fn activated<'a>(&'a self, value: &'a str) -> Result<Option<(&'a str, OnnxActivation)>> {
        let Some((node, ..)) = self.producer(self.behind_casts(value)) else { return Ok(None) };
        let input = node.input(0);
        let ours = node.domain == "com.microsoft";
        Ok(match node.op.as_str() {
            // x sigmoid(x)
            "Mul" if node.domain.is_empty() => {
                let sigmoid = |index: usize| {
                    let (of, ..) = self.producer(self.behind_casts(node.input(index)))?;
                    of.is("Sigmoid").then(|| self.behind_casts(of.input(0)))
                };
                let place = [(0, 1), (1, 0)]
                    .into_iter()
                    .find(|&(x, other)| sigmoid(other) == Some(self.behind_casts(node.input(x))));
                place.map(|(x, _)| (node.input(x), OnnxActivation::Silu))
            }
            "Swish" if node.domain.is_empty() && node.float("alpha").unwrap_or(1.0) == 1.0 => {
                Some((input, OnnxActivation::Silu))
            }
            // the default factor is 1.702
            "QuickGelu" if ours && node.float("alpha") == Some(1.0) => Some((input, OnnxActivation::Silu)),
            "Gelu" if ours => Some((input, OnnxActivation::Gelu)),
            "Gelu" if node.domain.is_empty() => match node.text("approximate").unwrap_or("none") {
                "none" => Some((input, OnnxActivation::Gelu)),
                "tanh" => Some((input, OnnxActivation::GeluTanh)),
                _ => None,
            },
            "FastGelu" if ours && node.input(1).is_empty() => Some((input, OnnxActivation::GeluTanh)),
            _ => None,
        })
    }
}
