//! Heads of classifiers: `W_labels act(W_dense h + b) + b` of the hidden state of the first token, or `W_labels h + b`
//! of each token's.

use super::{EncoderKind, put_projection};
use crate::error::Result;
use crate::onnx::follow::Weights;
use crate::onnx::network::Network;
use crate::onnx::projection::Projection;

/// Head of a classifier.
pub(super) struct ClassifierHead<'a> {
    /// Layer before the labels, and its activation; `None` for classifiers of tokens.
    dense: Option<(Projection<'a>, &'static str)>,
    labels: Projection<'a>,
    /// Hidden states that the head classifies.
    pub hidden: &'a str,
}

impl ClassifierHead<'_> {
    /// Number of labels.
    pub fn labels(&self) -> u64 {
        self.labels.rows()
    }

    /// Activation before the labels; `None` for classifiers of tokens.
    pub fn activation(&self) -> Option<&'static str> {
        self.dense.as_ref().map(|(_, activation)| *activation)
    }

    /// Adds the weights under the names that a family has for them.
    pub fn put(self, weights: &mut Weights, kind: EncoderKind) -> Result<()> {
        let [dense, labels] = match kind {
            _ if self.dense.is_none() => ["", "classifier"],
            EncoderKind::Bert => ["bert.pooler.dense", "classifier"],
            EncoderKind::DistilBert => ["pre_classifier", "classifier"],
            EncoderKind::Electra | EncoderKind::Roberta => ["classifier.dense", "classifier.out_proj"],
        };
        if let Some((projection, _)) = self.dense {
            put_projection(weights, dense, projection)?;
        }
        put_projection(weights, labels, self.labels)
    }
}

impl Network {
    /// Returns the head that the logits come from.
    pub(super) fn classifier_head<'a>(&'a self, logits: &'a str) -> Result<ClassifierHead<'a>> {
        let Some(labels) = self.projection(logits)? else {
            return Err(self.refuse_value(logits, "it isn't a projection to labels"));
        };
        let input = self.behind_casts(labels.input);
        if self.layer_norm(input)?.is_some() {
            return Ok(ClassifierHead { dense: None, labels, hidden: input });
        }
        let simple = [("Tanh", "tanh"), ("Relu", "relu")];
        let known = simple.iter().find_map(|(op, name)| Some((self.made_by(input, op)?.input(0), *name)));
        let (inner, activation) = match known {
            Some(known) => known,
            None => self.activation(input)?,
        };
        let Some(dense) = self.projection(inner)? else {
            return Err(self.refuse_value(inner, "before the labels should be an activation of a projection"));
        };
        let first = self.made_by(dense.input, "Gather").filter(|node| node.int("axis") == Some(1));
        match first {
            Some(node) if self.integers(node.input(1))?.as_deref() == Some(&[0]) => {
                let hidden = self.behind_casts(node.input(0));
                Ok(ClassifierHead { dense: Some((dense, activation)), labels, hidden })
            }
            _ => Err(self.refuse_value(dense.input, "it isn't the hidden state of the first token")),
        }
    }
}
