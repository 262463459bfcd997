//! Grammar of a forced call, in llguidance's variant of Lark.

use std::fmt::Write;

use serde_json::{Map, Value as Json, json};

use super::body::Body;
use super::braces::QUOTE;
use super::{CallSyntax, ToolFunction};
use crate::constraint::Grammar;
use crate::tokenizer::Tokenizer;

impl CallSyntax {
    /// Returns the grammar of a call of one of `functions`, or of several calls.
    pub fn grammar(&self, functions: &[ToolFunction], several: bool, tokenizer: &Tokenizer) -> Grammar {
        let mark = |mark: Option<&str>| match mark {
            None => String::new(),
            // special tokens aren't text
            Some(mark) => match tokenizer.id(mark).filter(|id| tokenizer.token_bytes(*id).is_empty()) {
                Some(id) => format!("<[{id}]>"),
                None => quoted(mark),
            },
        };
        let (open, close) = (mark(self.open), mark(self.close));
        let space = quoted(self.space);
        let names: Vec<String> = (0..functions.len()).map(|index| format!("call_{index}")).collect();
        let in_list = matches!(self.body, Body::Python | Body::Json { list: true, .. });
        let more = |separator: &str, rule: &str| {
            if several { format!(" ({} {rule})*", quoted(separator)) } else { String::new() }
        };
        let mut lark = String::new();
        if in_list {
            let _ = writeln!(lark, "start: {open} {space} \"[\" call{} \"]\" {space} {close}", more(", ", "call"));
        } else {
            // without an opening mark nothing separates calls
            let between = if matches!(self.body, Body::Arguments | Body::Braces) { "" } else { "\n" };
            let more = if self.open.is_some() { more(between, "marked") } else { String::new() };
            let _ = writeln!(lark, "start: marked{more}\nmarked: {open} {space} call {space} {close}");
        }
        let _ = writeln!(lark, "call: {}", names.join(" | "));
        for (name, function) in names.iter().zip(functions) {
            match self.body {
                Body::Json { name: key, arguments, .. } => json_call(&mut lark, name, function, [key, arguments]),
                Body::Elements => element_call(&mut lark, name, function),
                Body::Keys => key_call(&mut lark, name, function),
                Body::Arguments => argument_call(&mut lark, name, function, &mark(Some("[ARGS]"))),
                Body::Python => python_call(&mut lark, name, function),
                Body::Braces => brace_call(&mut lark, name, function, &mark(Some(QUOTE))),
            }
        }
        Grammar::Lark(lark)
    }
}

/// Quotes a text with Lark's escapes, which equal JSON's.
fn quoted(text: &str) -> String {
    Json::from(text).to_string()
}

/// Returns a `%json` rule of a schema in the style of templates, with the function's definitions.
fn json_rule(mut schema: Map<String, Json>, function: &ToolFunction) -> String {
    for key in ["$defs", "definitions"] {
        if let Some(definitions) = function.parameters.get(key) {
            schema.insert(key.into(), definitions.clone());
        }
    }
    let style = json!({"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": false});
    schema.insert("x-guidance".into(), style);
    format!("%json {}", Json::Object(schema))
}

/// Keywords whose schemas can allow or require arguments that `properties` doesn't name.
const OPEN: [&str; 10] = [
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "dependentSchemas",
    "allOf",
    "anyOf",
    "oneOf",
    "if",
    "$ref",
    "minProperties",
];

/// Forbids arguments that a function doesn't name, unless its schema says otherwise. Clients derive schemas from the
/// parameters of functions without `additionalProperties`, and small models go on with invented names. The other
/// syntaxes can't express these either.
fn forbid_others(parameters: &mut Map<String, Json>) {
    let Some(named) = parameters.get("properties").and_then(Json::as_object) else { return };
    let required = parameters.get("required").and_then(Json::as_array);
    let mut required = required.into_iter().flatten().filter_map(Json::as_str);
    if required.all(|name| named.contains_key(name)) && !OPEN.iter().any(|key| parameters.contains_key(*key)) {
        parameters.insert("additionalProperties".into(), json!(false));
    }
}

fn json_call(lark: &mut String, rule: &str, function: &ToolFunction, [name, arguments]: [&str; 2]) {
    let mut parameters = function.parameters.clone();
    if let Some(fields) = parameters.as_object_mut() {
        fields.retain(|key, _| !matches!(key.as_str(), "$defs" | "definitions" | "$schema"));
        fields.insert("type".into(), json!("object"));
        forbid_others(fields);
    }
    let schema = json!({
        "type": "object",
        "properties": {name: {"const": function.name}, arguments: parameters},
        "required": [name, arguments],
        "additionalProperties": false,
    });
    let Json::Object(schema) = schema else { return };
    let _ = writeln!(lark, "{rule}: {}", json_rule(schema, function));
}

fn argument_call(lark: &mut String, rule: &str, function: &ToolFunction, mark: &str) {
    let mut parameters = function.parameters.as_object().cloned().unwrap_or_default();
    parameters.retain(|key, _| key != "$schema");
    parameters.insert("type".into(), json!("object"));
    forbid_others(&mut parameters);
    let name = quoted(&function.name);
    let _ = writeln!(lark, "{rule}: {name} {mark} {rule}_json\n{rule}_json: {}", json_rule(parameters, function));
}

fn key_call(lark: &mut String, rule: &str, function: &ToolFunction) {
    let mut rules = String::new();
    let _ = write!(lark, "{rule}: {}", quoted(&format!("{}\n", function.name)));
    for (index, (key, schema, required)) in properties(function).into_iter().enumerate() {
        let field = format!("{rule}_{index}");
        let _ = write!(lark, " {field}{}", if required { "" } else { "?" });
        let open = quoted(&format!("<arg_key>{key}</arg_key>\n<arg_value>"));
        let choices = schema.get("enum").and_then(Json::as_array);
        let choices: Option<Vec<String>> =
            choices.and_then(|values| values.iter().map(|value| value.as_str().map(quoted)).collect());
        let close = quoted("</arg_value>\n");
        let _ = match (choices, schema.get("type")) {
            (Some(choices), _) if !choices.is_empty() => {
                writeln!(rules, "{field}: {open} ({}) {close}", choices.join(" | "))
            }
            // any text up to the closing mark
            (_, Some(kind)) if kind == "string" => {
                writeln!(
                    rules,
                    "{field}: {open} {field}_text \"\\n\"\n{field}_text[suffix=\"</arg_value>\"]: /(?s:.*)/"
                )
            }
            _ => writeln!(rules, "{field}: {open} {field}_json {close}\n{field}_json: {}", json_rule(schema, function)),
        };
    }
    let _ = write!(lark, "\n{rules}");
}

/// Returns the properties of a function's arguments: name, schema, and whether required.
fn properties(function: &ToolFunction) -> Vec<(&str, Map<String, Json>, bool)> {
    let required = |key: &str| {
        let names = function.parameters["required"].as_array();
        names.is_some_and(|names| names.iter().any(|name| name == key))
    };
    let schema = |schema: &Json| schema.as_object().cloned().unwrap_or_default();
    let fields = function.parameters["properties"].as_object();
    fields.into_iter().flatten().map(|(key, value)| (key.as_str(), schema(value), required(key))).collect()
}

fn element_call(lark: &mut String, rule: &str, function: &ToolFunction) {
    let (mut sequence, mut rules) = (String::new(), String::new());
    for (index, (key, schema, required)) in properties(function).into_iter().enumerate() {
        let field = format!("{rule}_{index}");
        let _ = write!(sequence, " {field}{}", if required { "" } else { "?" });
        let open = quoted(&format!("<parameter={key}>\n"));
        let close = "\n</parameter>\n";
        let choices: Option<Vec<String>> = schema
            .get("enum")
            .and_then(Json::as_array)
            .and_then(|values| values.iter().map(|value| value.as_str().map(quoted)).collect());
        let _ = match (choices, schema.get("type")) {
            (Some(choices), _) if !choices.is_empty() => {
                writeln!(rules, "{field}: {open} ({}) {}", choices.join(" | "), quoted(close))
            }
            (_, Some(kind)) if kind == "string" => {
                // any text up to the closing mark
                writeln!(
                    rules,
                    "{field}: {open} {field}_text \"\\n\"\n{field}_text[suffix=\"</parameter>\"]: /(?s:.*)/"
                )
            }
            _ => {
                let value = format!("{field}_value: {}", json_rule(schema, function));
                writeln!(rules, "{field}: {open} {field}_value {}\n{value}", quoted(close))
            }
        };
    }
    let open = quoted(&format!("<function={}>\n", function.name));
    let _ = write!(lark, "{rule}: {open}{sequence} \"</function>\"\n{rules}");
}

fn python_call(lark: &mut String, rule: &str, function: &ToolFunction) {
    let value = |field: &str, schema| format!("{field}_value: {}", json_rule(schema, function));
    keyword_call(lark, rule, function, ["(", "=", ", ", ")"], value);
}

fn brace_call(lark: &mut String, rule: &str, function: &ToolFunction, quote: &str) {
    let value = |field: &str, schema: Map<String, Json>| {
        let choices = schema.get("enum").and_then(Json::as_array);
        let choices: Option<Vec<String>> =
            choices.and_then(|values| values.iter().map(|value| value.as_str().map(quoted)).collect());
        match (choices, schema.get("type")) {
            (Some(choices), _) if !choices.is_empty() => {
                format!("{field}_value: {quote} ({}) {quote}", choices.join(" | "))
            }
            // any text up to the closing mark; a special token isn't text
            (_, Some(kind)) if kind == "string" && quote.starts_with('<') => {
                format!("{field}_value: {quote} {field}_text {quote}\n{field}_text: /(?s:.*)/")
            }
            (_, Some(kind)) if kind == "string" => {
                format!("{field}_value: {quote} {field}_text\n{field}_text[suffix={quote}]: /(?s:.*)/")
            }
            _ => format!("{field}_value: {}", json_rule(schema, function)),
        }
    };
    let named = ToolFunction { name: format!("call:{}", function.name), parameters: function.parameters.clone() };
    keyword_call(lark, rule, &named, ["{", ":", ",", "}"], value);
}

/// Adds the rule of a call with keys: brackets, the sign after a key, and the separator are given. `value` returns the
/// rule `FIELD_value`.
fn keyword_call(
    lark: &mut String,
    rule: &str,
    function: &ToolFunction,
    [open, equals, comma, close]: [&str; 4],
    value: impl Fn(&str, Map<String, Json>) -> String,
) {
    let properties = properties(function);
    let (begin, close) = (quoted(&format!("{}{open}", function.name)), quoted(close));
    let arguments = if properties.is_empty() { String::new() } else { format!(" {rule}_first_0") };
    let _ = writeln!(lark, "{rule}: {begin}{arguments} {close}");
    let last = properties.len().saturating_sub(1);
    for (index, (key, schema, required)) in properties.into_iter().enumerate() {
        let field = format!("{rule}_{index}");
        let value = value(&field, schema);
        let _ = writeln!(lark, "{field}: {} {field}_value\n{value}", quoted(&format!("{key}{equals}")));
        // `first`: no argument so far; `rest`: a separator precedes
        let (next_first, next_rest) = match index < last {
            true => (format!("{rule}_first_{}", index + 1), format!(" {rule}_rest_{}", index + 1)),
            false => ("\"\"".to_owned(), String::new()),
        };
        let (skip, mark) = if required { (String::new(), "") } else { (format!(" | {next_first}"), "?") };
        let _ = writeln!(lark, "{rule}_first_{index}: {field}{next_rest}{skip}");
        let _ = writeln!(lark, "{rule}_rest_{index}: ({} {field}){mark}{next_rest}", quoted(comma));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_without_a_name_are_forbidden_unless_the_schema_allows_them() {
        let forbids = |schema: Json| {
            let mut fields = schema.as_object().cloned().unwrap();
            forbid_others(&mut fields);
            fields.get("additionalProperties") == Some(&json!(false))
        };
        assert!(forbids(json!({"properties": {"a": {}}, "required": ["a"]})) && forbids(json!({"properties": {}})));
        for open in [
            json!({"type": "object"}),
            json!({"properties": {"a": {}}, "required": ["b"]}),
            json!({"properties": {"a": {}}, "additionalProperties": {"type": "string"}}),
            json!({"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]}),
        ] {
            assert!(!forbids(open.clone()), "{open}");
        }
    }
}
