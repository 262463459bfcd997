//! Head of a sequence classifier: `W_labels tanh(W_dense h + b) + b`, of the hidden state of the first token.

use super::put_projection;
use crate::error::Result;
use crate::onnx::follow::Weights;
use crate::onnx::network::Network;
use crate::onnx::projection::Projection;

/// Head of a sequence classifier.
pub(super) struct ClassifierHead<'a> {
    dense: Projection<'a>,
    labels: Projection<'a>,
    /// Hidden states that the head classifies.
    pub hidden: &'a str,
}

impl ClassifierHead<'_> {
    /// Number of labels.
    pub fn labels(&self) -> u64 {
        self.labels.rows()
    }

    /// Adds the weights under the names of BERT's head, or of RoBERTa's.
    pub fn put(self, weights: &mut Weights, is_roberta: bool) -> Result<()> {
        let [dense, labels] = match is_roberta {
            true => ["classifier.dense", "classifier.out_proj"],
            false => ["bert.pooler.dense", "classifier"],
        };
        put_projection(weights, dense, self.dense)?;
        put_projection(weights, labels, self.labels)
    }
}

impl Network {
    /// Returns the head that the logits come from.
    pub(super) fn classifier_head<'a>(&'a self, logits: &'a str) -> Result<ClassifierHead<'a>> {
        let Some(labels) = self.projection(logits)? else {
            return Err(self.refuse_value(logits, "it isn't a projection to labels"));
        };
        let Some(tanh) = self.made_by(labels.input, "Tanh") else {
            return Err(self.refuse_value(labels.input, "before the labels should be tanh, as in BERT and RoBERTa"));
        };
        let Some(dense) = self.projection(tanh.input(0))? else {
            return Err(self.refuse(tanh, "its input isn't a projection"));
        };
        let first = self.made_by(dense.input, "Gather").filter(|node| node.int("axis") == Some(1));
        match first {
            Some(node) if self.integers(node.input(1))?.as_deref() == Some(&[0]) => {
                Ok(ClassifierHead { dense, labels, hidden: self.behind_casts(node.input(0)) })
            }
            _ => Err(self.refuse_value(dense.input, "it isn't the hidden state of the first token")),
        }
    }
}
