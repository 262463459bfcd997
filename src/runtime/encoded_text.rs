//! Tokenized texts for models that read them whole.

/// Tokens of a text, or of a pair of texts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EncodedText {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Type of each token: 1 in the second text of a pair. Empty means all 0.
    pub types: Vec<u32>,
}

impl From<Vec<u32>> for EncodedText {
    fn from(ids: Vec<u32>) -> Self {
        EncodedText { ids, types: Vec::new() }
    }
}
