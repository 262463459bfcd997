//! Forms of constrained text.

use serde_json::Value as Json;

/// Form of constrained text.
#[derive(Clone, Debug, PartialEq)]
pub enum Grammar {
    /// JSON that satisfies a JSON Schema.
    JsonSchema(Json),
    /// Text that a regular expression matches as a whole.
    Regex(String),
    /// Grammar in llguidance's variant of Lark.
    Lark(String),
    /// Text of one of two forms.
    Either(Box<[Grammar; 2]>),
}
