//! Special tokens that encoders put around a text and between two.

use serde_json::{Map, Value as Json, json};

/// Special tokens around a text and between the two of a pair.
pub(super) struct Ends<'a> {
    /// Token before a text, or before the first of two.
    pub(super) begin: Option<(&'a str, u64)>,
    /// Token after a text, and after each of two.
    pub(super) end: Option<(&'a str, u64)>,
    /// Number of end tokens between two texts.
    pub(super) between: usize,
    /// Type id of the second text's tokens.
    pub(super) second_type: u64,
}

impl Ends<'_> {
    /// Returns a post-processor of `tokenizer.json`.
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
