//! The sum of the embeddings of tokens, positions and token types, and its norm.

use std::collections::HashSet;

use super::layer_norm::LayerNorm;
use crate::error::Result;
use crate::onnx::follow::Weights;
use crate::onnx::model::Node;
use crate::onnx::network::{Constant, LONGEST_CHAIN, Network};

/// Maximum number of nodes between an input and the indices of a table.
const MOST_NODES: usize = 256;

/// Embedding of an encoder.
pub(super) struct EmbeddingSum<'a> {
    pub words: Constant,
    pub positions: Constant,
    pub types: Option<Constant>,
    pub norm: LayerNorm<'a>,
    /// Padding token, behind which RoBERTa's positions begin; `None` if positions begin at 0.
    pub padding: Option<i64>,
}

impl EmbeddingSum<'_> {
    /// Adds the tables; `typed` models have one of token types, of zeros if the graph has none.
    pub fn put(self, weights: &mut Weights, typed: bool) -> Result<()> {
        let zeros = || Constant::zeros("token_type_embeddings", &[1, self.words.weight.columns()]);
        let types = match self.types {
            None if typed => Some(zeros()?),
            types => types,
        };
        let tables = [("word", Some(self.words)), ("position", Some(self.positions)), ("token_type", types)];
        for (name, table) in tables {
            weights.extend(table.map(|table| (format!("embeddings.{name}_embeddings.weight"), table)));
        }
        self.norm.put(weights, "embeddings.LayerNorm");
        Ok(())
    }
}

impl Network {
    /// Returns the embedding that the first hidden state is the norm of.
    pub(super) fn embedding_sum<'a>(&'a self, value: &'a str) -> Result<EmbeddingSum<'a>> {
        let Some(norm) = self.layer_norm(value)? else {
            return Err(self.refuse_value(value, "it isn't a layer with BERT's norms and attention"));
        };
        let (mut words, mut positions, mut types, mut padding) = (None, None, None, None);
        let mut left = vec![norm.input];
        while let Some(value) = left.pop() {
            let value = self.behind_casts(value);
            let Some((node, ..)) = self.producer(value) else {
                return Err(self.refuse_value(value, "the embedding isn't a sum of tables' rows"));
            };
            if node.is("Add") && left.len() < 8 {
                left.extend([node.input(0), node.input(1)]);
                continue;
            }
            let Some((table, indices)) = self.rows(node)? else {
                return Err(self.refuse(node, "the embedding isn't a sum of tables' rows"));
            };
            let direct = self.behind_counting(indices);
            let place = if direct == "input_ids" {
                &mut words
            } else if direct == "token_type_ids" || table.weight.rows() <= 4 {
                &mut types
            } else {
                padding = self.padding(indices)?;
                &mut positions
            };
            if place.replace(table).is_some() {
                return Err(self.refuse(node, "the embedding has two tables of one purpose"));
            }
        }
        let (Some(words), Some(positions)) = (words, positions) else {
            return Err(self.refuse_value(value, "the embedding has no table of tokens or none of positions"));
        };
        Ok(EmbeddingSum { words, positions, types, norm, padding })
    }

    /// Returns table and indices of the rows that a node takes.
    fn rows<'a>(&'a self, node: &'a Node) -> Result<Option<(Constant, &'a str)>> {
        // ONNX Runtime dequantizes the rows
        let (gather, codes) = match node.is("DequantizeLinear") {
            true => match self.producer(node.input(0)) {
                Some((gather, ..)) => (gather, self.constant(gather.input(0))?),
                None => return Ok(None),
            },
            false => (node, None),
        };
        if !gather.is("Gather") || gather.int("axis").unwrap_or(0) != 0 {
            return Ok(None);
        }
        let table = match codes {
            Some(codes) => Some(self.dequantized(node, codes, LONGEST_CHAIN)?),
            None => self.constant(gather.input(0))?,
        };
        let table = table.filter(|table| table.is_float && table.weight.shape().len() == 2);
        Ok(table.map(|table| (table, gather.input(1))))
    }

    /// Returns the padding token of RoBERTa's positions, which count the tokens that aren't padding: `padding +
    /// cumsum(token != padding)`. `None` for positions that count from 0.
    fn padding(&self, indices: &str) -> Result<Option<i64>> {
        let (mut left, mut seen) = (vec![indices], HashSet::new());
        let mut offset = None;
        while let Some(value) = left.pop() {
            if !seen.insert(value) || seen.len() > MOST_NODES {
                continue;
            }
            let Some((node, ..)) = self.producer(value) else { continue };
            if node.is("CumSum") {
                return match offset {
                    Some(offset) => Ok(Some(offset)),
                    None => Err(self.refuse(node, "positions count tokens, but begin at no constant")),
                };
            }
            if node.is("Shape") {
                continue;
            }
            for input in node.inputs.iter().map(String::as_str).filter(|input| !input.is_empty()) {
                match self.integers(input)? {
                    Some(numbers) if node.is("Add") && numbers.len() == 1 && numbers[0] > 0 => {
                        offset = Some(numbers[0])
                    }
                    Some(_) => {}
                    None => left.push(input),
                }
            }
        }
        Ok(None)
    }
}
