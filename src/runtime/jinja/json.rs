//! `json.dumps`.

use std::sync::Arc;

use super::value::{Value, float_text, to_str};
use super::{Budget, Error, Result};

/// Options of `json.dumps`.
pub(super) struct Style {
    pub ensure_ascii: bool,
    /// Text of one level of indentation.
    pub indent: Option<Arc<str>>,
    pub item_separator: Arc<str>,
    pub key_separator: Arc<str>,
    pub sort_keys: bool,
}

/// Appends a value as JSON.
pub(super) fn write(value: &Value, style: &Style, level: usize, out: &mut String, budget: &mut Budget) -> Result<()> {
    budget.step()?;
    let before = out.len();
    match value {
        Value::None => out.push_str("null"),
        Value::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
        Value::Int(value) => out.push_str(&value.to_string()),
        Value::Float(value) => out.push_str(&number(*value)),
        Value::Str(text) => string(text, style.ensure_ascii, out),
        Value::List(list) | Value::Tuple(list) => {
            let item = |item: &Value, out: &mut String, budget: &mut Budget| write(item, style, level + 1, out, budget);
            return container(['[', ']'], &list.items, style, level, out, budget, item);
        }
        Value::Dict(dict) => {
            let mut entries: Vec<(Arc<str>, &Value)> = Vec::with_capacity(dict.entries.len());
            for (key, value) in &dict.entries {
                entries.push((self::key(key, budget)?, value));
            }
            if style.sort_keys {
                budget.pay_len(entries.iter().map(|(key, _)| key.len() * 16).sum())?;
                entries.sort_by(|(a, _), (b, _)| a.cmp(b));
            }
            let item = |(key, value): &(Arc<str>, &Value), out: &mut String, budget: &mut Budget| {
                let before = out.len();
                string(key, style.ensure_ascii, out);
                out.push_str(&style.key_separator);
                budget.pay_len(out.len() - before)?;
                write(value, style, level + 1, out, budget)
            };
            return container(['{', '}'], &entries, style, level, out, budget, item);
        }
        other => return Err(Error::new(format!("a value of type {} can't be JSON", other.type_name()))),
    }
    budget.pay_len(out.len() - before)
}

fn container<T>(
    [open, close]: [char; 2],
    items: &[T],
    style: &Style,
    level: usize,
    out: &mut String,
    budget: &mut Budget,
    mut write: impl FnMut(&T, &mut String, &mut Budget) -> Result<()>,
) -> Result<()> {
    out.push(open);
    let newline = |level: usize, out: &mut String, budget: &mut Budget| {
        let Some(indent) = &style.indent else { return Ok(()) };
        budget.pay_len(1 + indent.len() * level)?;
        out.push('\n');
        out.push_str(&indent.repeat(level));
        Ok(())
    };
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            budget.pay_len(style.item_separator.len())?;
            out.push_str(&style.item_separator);
        }
        newline(level + 1, out, budget)?;
        write(item, out, budget)?;
    }
    if !items.is_empty() {
        newline(level, out, budget)?;
    }
    out.push(close);
    budget.pay(2)
}

fn key(key: &Value, budget: &mut Budget) -> Result<Arc<str>> {
    Ok(match key {
        Value::Str(text) => text.clone(),
        Value::None => "null".into(),
        Value::Bool(value) => if *value { "true" } else { "false" }.into(),
        Value::Float(value) => number(*value).into(),
        Value::Int(_) => to_str(key, budget)?,
        other => return Err(Error::new(format!("a {} is no key of JSON", other.type_name()))),
    })
}

fn number(value: f64) -> String {
    match value {
        value if value.is_nan() => "NaN".into(),
        f64::INFINITY => "Infinity".into(),
        f64::NEG_INFINITY => "-Infinity".into(),
        value => float_text(value),
    }
}

fn string(text: &str, ensure_ascii: bool, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' => out.push_str(&format!("\\u{:04x}", c as u32)),
            c if ensure_ascii && (c as u32) > 126 => {
                let mut units = [0; 2];
                c.encode_utf16(&mut units).iter().for_each(|unit| out.push_str(&format!("\\u{unit:04x}")));
            }
            c => out.push(c),
        }
    }
    out.push('"');
}
