//! What encoders' tokenizers put around a text, and between two.

use serde_json::{Map, Value as Json, json};

/// The tokens around a text, and between the two of a pair.
pub(super) struct Ends<'a> {
    /// Before a text, or the first of two.
    pub(super) begin: Option<(&'a str, u64)>,
    /// Behind a text, and each of two.
    pub(super) end: Option<(&'a str, u64)>,
    /// How often the end stands between two texts.
    pub(super) between: usize,
    /// The type of the tokens of the second text.
    pub(super) second_type: u64,
}

impl Ends<'_> {
    /// As a post-processor of `tokenizer.json`.
    pub(super) fn template(&self) -> Json {
        let special = |(token, _): (&str, u64), kind: u64| json!({"SpecialToken": {"id": token, "type_id": kind}});
        let sequence = |name: &str, kind: u64| json!({"Sequence": {"id": name, "type_id": kind}});
        let mut single: Vec<Json> = self.begin.iter().map(|begin| special(*begin, 0)).collect();
        single.push(sequence("A", 0));
        let mut pair = single.clone();
        single.extend(self.end.map(|end| special(end, 0)));
        pair.extend(self.end.iter().flat_map(|end| std::iter::repeat_n(special(*end, 0), self.between)));
        pair.push(sequence("B", self.second_type));
        pair.extend(self.end.map(|end| special(end, self.second_type)));
        let all = self.begin.iter().chain(&self.end);
        let tokens: Map<String, Json> = all
            .map(|(token, id)| ((*token).to_owned(), json!({"id": token, "ids": [id], "tokens": [token]})))
            .collect();
        json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens})
    }
}
