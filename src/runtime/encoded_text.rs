//! Texts as tokens, for models that read them as a whole.

/// A text, or a pair of texts, as tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EncodedText {
    /// Tokens.
    pub ids: Vec<u32>,
    /// The type of each token, 1 in the second text of a pair; all are 0 if empty.
    pub types: Vec<u32>,
}

impl From<Vec<u32>> for EncodedText {
    fn from(ids: Vec<u32>) -> Self {
        EncodedText { ids, types: Vec::new() }
    }
}
