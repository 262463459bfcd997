//! Decoders that score how well a document answers a query.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Decoder that scores a pair of texts: the score is the logit of one token minus that of another, at the end of a
/// prompt with both texts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Reranker {
    /// Id of the token whose logit counts for the document, such as `yes`.
    pub positive: u64,
    /// Id of the token whose logit counts against it, such as `no`.
    pub negative: u64,
    /// Prompt with both texts.
    pub prompt: PairPrompt,
}

/// Prompt with two texts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PairPrompt {
    /// Text before, tokenized alone. Special tokens are spelled out.
    #[serde(default)]
    pub before: String,
    /// Text with `{query}` and `{document}`. Special tokens that are spelled out in it are letters.
    pub text: String,
    /// Text after, tokenized alone. Special tokens are spelled out.
    #[serde(default)]
    pub after: String,
}

/// Places of the texts in a prompt.
const PLACES: [&str; 2] = ["{query}", "{document}"];

impl PairPrompt {
    /// Name of a place that isn't exactly once in the text.
    pub fn wrong_place(&self) -> Option<&'static str> {
        PLACES.into_iter().find(|place| self.text.matches(place).count() != 1)
    }

    /// Text with a query and a document, which may contain the names of places.
    pub fn filled(&self, query: &str, document: &str) -> String {
        let fill = |text: &str| text.replace(PLACES[1], document);
        match self.text.split_once(PLACES[0]) {
            Some((before, after)) => [&fill(before), query, &fill(after)].concat(),
            None => fill(&self.text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_take_their_places_whatever_they_contain() {
        let prompt = |text: &str| PairPrompt { before: String::new(), text: text.into(), after: String::new() };
        let both = prompt("q: {query}\nd: {document}.");
        assert_eq!(
            (both.wrong_place(), both.filled("{document}", "{query}")),
            (None, "q: {document}\nd: {query}.".into())
        );
        assert_eq!(prompt("{document} {query}").filled("a", "b"), "b a");
        assert_eq!(prompt("{query}").wrong_place(), Some("{document}"));
        assert_eq!(prompt("{query} {document} {query}").wrong_place(), Some("{query}"));
    }
}
