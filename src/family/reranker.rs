//! Decoders that score pairs of texts. The score is the difference of two logits, so that the LM head becomes the
//! difference of two of its rows.

use anec_base::Result;
use anec_bundle::{Pooling, SequenceClassification};
use anec_manifest::Reranker;
use anec_source::{Result as SourceResult, SourceWeight};

use super::Purpose;
use super::decoder::Decoder;
use super::error::FamilyError;

/// Label of the score.
const LABEL: &str = "relevance";

impl Decoder {
    /// Replaces the LM head by the difference of two of its rows.
    ///
    /// # Errors
    /// Returns an error if the model doesn't continue texts, or has no such tokens.
    pub(super) fn score_pairs(&mut self, reranker: &Reranker) -> Result<()> {
        let wrong = |problem: String| FamilyError::Reranker { family: self.facts.family.clone(), problem };
        if self.facts.purpose != Purpose::TextGeneration {
            return Err(wrong("it doesn't continue texts".into()).into());
        }
        let tokens = self.facts.vocab_size;
        if let Some(token) = [reranker.positive, reranker.negative].into_iter().find(|token| *token >= tokens) {
            return Err(wrong(format!("token {token} is beyond its {tokens} tokens")).into());
        }
        let difference = |of: &SourceWeight| -> SourceResult<SourceWeight> {
            let columns = of.elements() / tokens;
            let row = |token: u64| of.slice(token..token + 1)?.reshape(&[1, columns]);
            let one = SourceWeight::from_values("one", &[1, 1], vec![1.0])?;
            row(reranker.positive)?.plus_product(&one, &row(reranker.negative)?, -1.0)
        };
        self.head.weight = difference(&self.head.weight)?;
        self.head.bias = self.head.bias.as_ref().map(|bias| difference(bias)?.reshape(&[1])).transpose()?;
        self.facts.purpose = Purpose::SequenceClassification(SequenceClassification {
            labels: vec![LABEL.into()],
            pooling: Pooling::Last,
            causal: true,
            prompt: Some(reranker.prompt.clone()),
        });
        Ok(())
    }
}
