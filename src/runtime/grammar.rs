//! What a text can be held to.

use serde_json::Value as Json;

/// What a text has to be.
#[derive(Clone, Debug, PartialEq)]
pub enum Grammar {
    /// JSON that a JSON Schema describes.
    JsonSchema(Json),
    /// Text that a regular expression matches as a whole.
    Regex(String),
    /// A grammar in Lark's form, as llguidance extends it.
    Lark(String),
}
