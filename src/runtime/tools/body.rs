//! Contents between the marks of a call.

use serde_json::{Deserializer, Map, Value as Json};

use super::{ToolCall, ToolFunction};
use super::{braces, python};

/// Form of the contents.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Body {
    /// JSON: `{"name": "f", "arguments": {"a": 1}}`, one or several, or a list of them.
    Json {
        /// Key of the name that the model was trained on; `name` and `tool_name` are read.
        name: &'static str,
        /// Key of the arguments that the model was trained on; both keys are read.
        arguments: &'static str,
        /// Whether the model was trained to write a list.
        list: bool,
    },
    /// Elements: `<function=f><parameter=a>1</parameter></function>`, strings without quotation marks, other values as
    /// JSON.
    Elements,
    /// Keys and values: `f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>`, strings without quotation marks.
    Keys,
    /// Name and arguments: `f[ARGS]{"a": 1}`, with an identifier or without, each after the opening mark.
    Arguments,
    /// Python calls: `[f(a=1), g()]`.
    Python,
    /// Name and bare keys: `call:f{a:1,b:<|"|>text<|"|>}`.
    Braces,
}

impl Body {
    /// Call without marks.
    pub(super) const BARE: Body = Body::Json { name: "name", arguments: "arguments", list: false };

    /// Parses calls; `None` if the text is anything else. The schemas of `functions` give the types of elements.
    pub(super) fn read(self, text: &str, functions: &[ToolFunction]) -> Option<Vec<ToolCall>> {
        match self {
            Body::Json { .. } => json(text),
            Body::Elements => elements(text, functions),
            Body::Keys => keys(text, functions).map(|call| vec![call]),
            Body::Arguments => text.split("[TOOL_CALLS]").map(arguments).collect(),
            Body::Python => python::calls(text),
            Body::Braces => braces::call(text).map(|call| vec![call]),
        }
    }
}

fn json(text: &str) -> Option<Vec<ToolCall>> {
    let values = Deserializer::from_str(text).into_iter::<Json>().collect::<Result<Vec<_>, _>>().ok()?;
    let single = values.into_iter().flat_map(|value| match value {
        Json::Array(items) => items,
        value => vec![value],
    });
    let call = |value: Json| {
        let Json::Object(mut fields) = value else { return None };
        let name = fields.get("name").or_else(|| fields.get("tool_name"))?.as_str()?.to_owned();
        let arguments = fields.remove("arguments").or_else(|| fields.remove("parameters"));
        let arguments = match arguments {
            None | Some(Json::Null) => Map::new(),
            Some(Json::Object(arguments)) => arguments,
            // some models write the API's form, JSON in a string
            Some(Json::String(text)) => serde_json::from_str(&text).ok()?,
            Some(_) => return None,
        };
        Some(ToolCall { name, arguments })
    };
    single.map(call).collect()
}

fn elements(text: &str, functions: &[ToolFunction]) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let (name, inside) = rest.strip_prefix("<function=")?.split_once('>')?;
        let (inside, after) = inside.split_once("</function>")?;
        let function = functions.iter().find(|function| function.name == name);
        let mut arguments = Map::new();
        let mut fields = inside.trim();
        while !fields.is_empty() {
            let (key, value) = fields.strip_prefix("<parameter=")?.split_once('>')?;
            let (value, next) = value.split_once("</parameter>")?;
            let schema = function.map(|function| &function.parameters["properties"][key]);
            arguments.insert(key.to_owned(), typed(unwrapped(value), schema));
            fields = next.trim_start();
        }
        calls.push(ToolCall { name: name.to_owned(), arguments });
        rest = after.trim_start();
    }
    Some(calls)
}

fn keys(text: &str, functions: &[ToolFunction]) -> Option<ToolCall> {
    let end = text.find("<arg_key>").unwrap_or(text.len());
    let (name, mut rest) = (text[..end].trim(), text[end..].trim());
    let function = functions.iter().find(|function| function.name == name);
    let mut arguments = Map::new();
    while !rest.is_empty() {
        let (key, after) = rest.strip_prefix("<arg_key>")?.split_once("</arg_key>")?;
        let (value, after) = after.trim_start().strip_prefix("<arg_value>")?.split_once("</arg_value>")?;
        let key = key.trim();
        let schema = function.map(|function| &function.parameters["properties"][key]);
        arguments.insert(key.to_owned(), typed(value, schema));
        rest = after.trim_start();
    }
    Some(ToolCall { name: name.to_owned(), arguments })
}

fn arguments(text: &str) -> Option<ToolCall> {
    let (name, arguments) = text.split_once("[ARGS]")?;
    let name = name.split("[CALL_ID]").next()?.trim().to_owned();
    Some(ToolCall { name, arguments: serde_json::from_str(arguments.trim()).ok()? })
}

/// Returns a value without the line breaks around it.
fn unwrapped(value: &str) -> &str {
    let value = value.strip_prefix('\n').unwrap_or(value);
    value.strip_suffix('\n').unwrap_or(value)
}

/// Parses an unquoted value by its schema's type; without a schema, as JSON if possible.
fn typed(value: &str, schema: Option<&Json>) -> Json {
    let string = || Json::String(value.to_owned());
    match schema.map(|schema| &schema["type"]) {
        Some(Json::String(kind)) if kind == "string" => string(),
        _ => serde_json::from_str(value).ok().or_else(|| python::value(value)).unwrap_or_else(string),
    }
}
