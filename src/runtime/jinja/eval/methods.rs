//! Methods of strings, lists and dictionaries.

use std::sync::Arc;

use super::{Evaluator, Passed};
use crate::jinja::format::{FormatArguments, braces};
use crate::jinja::lexer::is_space;
use crate::jinja::value::{ITEM, Value};
use crate::jinja::{Error, Result};

/// Methods of strings.
const STRING: [&str; 40] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isspace",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "upper",
];

/// Methods of dictionaries.
const DICT: [&str; 5] = ["get", "items", "keys", "values", "copy"];

/// Methods that the sandbox forbids, because they change their value.
const CHANGING: [&str; 13] = [
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "remove",
    "reverse",
    "sort",
    "popitem",
    "setdefault",
    "update",
    "add",
    "discard",
];

/// Python's line boundaries.
const LINE_ENDS: [char; 10] =
    ['\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}'];

/// Returns whether a value has a method.
pub(super) fn has_method(value: &Value, name: &str) -> bool {
    match value {
        Value::Str(_) => STRING.contains(&name) || name == "zfill",
        Value::Dict(_) => DICT.contains(&name) || ["clear", "pop", "popitem", "setdefault", "update"].contains(&name),
        Value::List(_) => {
            ["count", "index", "copy"].contains(&name)
                || ["append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"].contains(&name)
        }
        Value::Tuple(_) | Value::Range(..) => ["count", "index"].contains(&name),
        Value::Float(_) => name == "is_integer",
        Value::Loop(_) => ["cycle", "changed"].contains(&name),
        Value::Counter(_) => name == "next" || name == "reset",
        _ => false,
    }
}

/// Calls a method of a string, list or dictionary.
pub(super) fn call(evaluator: &mut Evaluator, receiver: &Value, name: &str, passed: Passed) -> Result<Value> {
    let read: u64 = passed.positional.iter().map(|value| value.as_str().map_or(0, str::len) as u64).sum();
    evaluator.budget.pay(read)?;
    match receiver {
        Value::Str(text) => string(evaluator, text, name, passed),
        _ if CHANGING.contains(&name) => {
            Err(Error::new(format!("`{name}` changes a {}, which templates may not do", receiver.type_name())))
        }
        Value::Dict(dict) => {
            let budget = &mut evaluator.budget;
            budget.pay(ITEM * 3 * dict.entries.len() as u64)?;
            match name {
                "get" => {
                    let [key, default] = passed.fixed(name, ["key", "default"], 1)?;
                    let key = key.unwrap_or(Value::None);
                    key.check_hashable()?;
                    Ok(dict.get(&key, budget)?.cloned().or(default).unwrap_or(Value::None))
                }
                "keys" => Value::view("dict_keys", dict.entries.iter().map(|(key, _)| key.clone()).collect(), budget),
                "values" => {
                    Value::view("dict_values", dict.entries.iter().map(|(_, value)| value.clone()).collect(), budget)
                }
                "items" => {
                    let mut items = Vec::with_capacity(dict.entries.len());
                    for (key, value) in &dict.entries {
                        items.push(Value::tuple(vec![key.clone(), value.clone()], budget)?);
                    }
                    Value::view("dict_items", items, budget)
                }
                _ => Ok(receiver.clone()),
            }
        }
        Value::Float(value) => Ok(Value::Bool(value.fract() == 0.0)),
        other if name == "copy" => Ok(other.clone()),
        other => {
            let [item] = passed.fixed(name, ["value"], 1)?;
            let item = item.unwrap_or(Value::None);
            let budget = &mut evaluator.budget;
            let mut count = 0;
            for (index, own) in other.items(budget)?.items.iter().enumerate() {
                if own.equals(&item, budget)? {
                    if name == "index" {
                        return Ok(Value::Int(index as i64));
                    }
                    count += 1;
                }
            }
            if name == "index" { Err(Error::new("the item isn't in the list")) } else { Ok(Value::Int(count)) }
        }
    }
}

fn string(evaluator: &mut Evaluator, text: &Arc<str>, name: &str, passed: Passed) -> Result<Value> {
    evaluator.budget.pay_len(text.len())?;
    if let Some(result) = plain(text, name) {
        return Value::str(result, &mut evaluator.budget);
    }
    if let Some(result) = question(text, name) {
        return Ok(Value::Bool(result));
    }
    match name {
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = passed.fixed(name, ["chars"], 0)?;
            let set = chars.as_ref().and_then(Value::as_str);
            evaluator.budget.pay_len(text.len().saturating_mul(set.map_or(1, str::len)))?;
            Value::str(strip(text, name, set), &mut evaluator.budget)
        }
        "startswith" | "endswith" => affix(text, name, passed),
        "removeprefix" | "removesuffix" => {
            let [affix] = passed.fixed(name, ["affix"], 1)?;
            let affix = argument(name, affix.as_ref())?;
            let cut = if name == "removeprefix" { text.strip_prefix(affix) } else { text.strip_suffix(affix) };
            Value::str(cut.unwrap_or(text), &mut evaluator.budget)
        }
        "find" | "rfind" | "index" | "rindex" | "count" => search(text, name, passed),
        "partition" | "rpartition" => {
            let [separator] = passed.fixed(name, ["sep"], 1)?;
            let separator = argument(name, separator.as_ref())?;
            if separator.is_empty() {
                return Err(Error::new("an empty separator"));
            }
            let split = if name == "partition" { text.split_once(separator) } else { text.rsplit_once(separator) };
            let parts = match split {
                Some((before, after)) => [before, separator, after],
                None if name == "partition" => [text, "", ""],
                None => ["", "", text],
            };
            strings(evaluator, parts.into_iter()).and_then(|parts| Value::tuple(parts, &mut evaluator.budget))
        }
        "split" | "rsplit" => split(evaluator, text, name == "rsplit", passed),
        "splitlines" => {
            let [keep] = passed.fixed(name, ["keepends"], 0)?;
            evaluator.budget.pay(ITEM * text.matches(LINE_ENDS).count() as u64)?;
            let lines = lines(text, keep.is_some_and(|keep| keep.is_true()));
            strings(evaluator, lines.into_iter()).and_then(|lines| Value::list(lines, &mut evaluator.budget))
        }
        "replace" => {
            let [old, new, count] = passed.fixed(name, ["old", "new", "count"], 2)?;
            let (old, new) = (argument(name, old.as_ref())?.to_owned(), argument(name, new.as_ref())?.to_owned());
            replace(evaluator, text, &old, &new, count.and_then(|count| count.as_int()))
        }
        "join" => {
            let [items] = passed.fixed(name, ["iterable"], 1)?;
            let items = items.unwrap_or(Value::None).items(&mut evaluator.budget)?;
            let mut out = String::new();
            for (index, item) in items.items.iter().enumerate() {
                let Some(item) = item.as_str() else {
                    return Err(Error::new(format!("join needs strings, not a {}", item.type_name())));
                };
                evaluator.budget.pay_len(item.len() + text.len())?;
                if index > 0 {
                    out.push_str(text);
                }
                out.push_str(item);
            }
            Value::str(out, &mut evaluator.budget)
        }
        "center" | "ljust" | "rjust" | "zfill" => justify(evaluator, text, name, passed),
        "format" => {
            let mut lookup = |value: &Value, key: &str, attribute: bool, budget: &mut super::Budget| {
                super::lookup(value, key, attribute, budget)
            };
            let mut arguments =
                FormatArguments { positional: &passed.positional, named: &passed.named, lookup: &mut lookup };
            braces(text, &mut arguments, &mut evaluator.budget)
        }
        "expandtabs" => {
            let [size] = passed.fixed(name, ["tabsize"], 0)?;
            let size = size.and_then(|size| size.as_int()).unwrap_or(8).clamp(0, 1000) as usize;
            evaluator.budget.pay_len(text.matches('\t').count().saturating_mul(size))?;
            let (mut out, mut column) = (String::new(), 0);
            for c in text.chars() {
                match c {
                    '\t' if size > 0 => {
                        let spaces = size - column % size;
                        out.extend(std::iter::repeat_n(' ', spaces));
                        column += spaces;
                    }
                    '\t' => {}
                    c => {
                        column = if c == '\n' || c == '\r' { 0 } else { column + 1 };
                        out.push(c);
                    }
                }
            }
            Value::str(out, &mut evaluator.budget)
        }
        _ => Err(Error::new(format!("the method `{name}` of str isn't supported"))),
    }
}

/// Methods without arguments that return a string.
fn plain(text: &str, name: &str) -> Option<String> {
    Some(match name {
        "upper" => text.to_uppercase(),
        "lower" => text.to_lowercase(),
        "casefold" => text.to_lowercase().replace('ß', "ss"),
        "capitalize" => capitalized(text),
        "swapcase" => {
            let swapped = |c: char| -> String {
                if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() }
            };
            text.chars().map(swapped).collect()
        }
        "title" => {
            let mut inside = false;
            let mut out = String::new();
            for c in text.chars() {
                match inside {
                    true => out.extend(c.to_lowercase()),
                    false => out.extend(c.to_uppercase()),
                }
                inside = c.is_alphabetic();
            }
            out
        }
        _ => return None,
    })
}

/// Returns the text with its first character in upper case and the rest in lower case.
pub(super) fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    let first = chars.next().into_iter().flat_map(char::to_uppercase).collect::<String>();
    first + &chars.as_str().to_lowercase()
}

/// Methods without arguments that ask for a property of a string.
fn question(text: &str, name: &str) -> Option<bool> {
    let all = |of: &dyn Fn(char) -> bool| !text.is_empty() && text.chars().all(of);
    let cased =
        |has: &dyn Fn(char) -> bool, not: &dyn Fn(char) -> bool| text.chars().any(has) && !text.chars().any(not);
    Some(match name {
        "isalnum" => all(&char::is_alphanumeric),
        "isalpha" => all(&char::is_alphabetic),
        "isascii" => text.is_ascii(),
        "isdecimal" | "isdigit" => all(&|c| c.is_numeric() && (c.is_ascii_digit() || !c.is_ascii())),
        "isnumeric" => all(&char::is_numeric),
        "isspace" => all(&is_space),
        "isidentifier" => {
            !text.starts_with(|c: char| c.is_numeric()) && all(&|c: char| c.is_alphanumeric() || c == '_')
        }
        "islower" => cased(&char::is_lowercase, &char::is_uppercase),
        "isupper" => cased(&char::is_uppercase, &char::is_lowercase),
        _ => return None,
    })
}

/// Returns the string of an argument.
fn argument<'a>(method: &str, value: Option<&'a Value>) -> Result<&'a str> {
    let value = value.unwrap_or(&Value::None);
    value.as_str().ok_or_else(|| Error::new(format!("{method} needs a str, not a {}", value.type_name())))
}

/// Strips white space, or the characters of a set, at the ends that a method names.
pub(super) fn strip<'t>(text: &'t str, method: &str, set: Option<&str>) -> &'t str {
    let drops = |c: char| set.map_or_else(|| is_space(c), |set| set.contains(c));
    let text = if method == "rstrip" { text } else { text.trim_start_matches(drops) };
    if method == "lstrip" { text } else { text.trim_end_matches(drops) }
}

fn strings<'t>(evaluator: &mut Evaluator, parts: impl Iterator<Item = &'t str>) -> Result<Vec<Value>> {
    parts
        .map(|part| {
            evaluator.budget.pay(ITEM)?;
            Value::str(part, &mut evaluator.budget)
        })
        .collect()
}

/// Returns the text between character positions.
fn between(text: &str, start: Option<&Value>, end: Option<&Value>) -> (usize, String) {
    let count = text.chars().count() as i64;
    let place = |value: Option<&Value>, default: i64| {
        let place = value.and_then(Value::as_int).unwrap_or(default);
        if place < 0 { (place + count).max(0) } else { place.min(count) }
    };
    let (start, end) = (place(start, 0), place(end, count));
    let part = text.chars().skip(start as usize).take((end - start).max(0) as usize).collect();
    (start as usize, part)
}

fn affix(text: &str, name: &str, passed: Passed) -> Result<Value> {
    let [affix, start, end] = passed.fixed(name, ["affix", "start", "end"], 1)?;
    let (_, part) = between(text, start.as_ref(), end.as_ref());
    let fits = |affix: &str| if name == "startswith" { part.starts_with(affix) } else { part.ends_with(affix) };
    match affix {
        Some(Value::Tuple(affixes)) => {
            for affix in &affixes.items {
                if fits(argument(name, Some(affix))?) {
                    return Ok(Value::Bool(true));
                }
            }
            Ok(Value::Bool(false))
        }
        affix => Ok(Value::Bool(fits(argument(name, affix.as_ref())?))),
    }
}

fn search(text: &str, name: &str, passed: Passed) -> Result<Value> {
    let [part, start, end] = passed.fixed(name, ["sub", "start", "end"], 1)?;
    let part = argument(name, part.as_ref())?;
    let (offset, own) = between(text, start.as_ref(), end.as_ref());
    if name == "count" {
        let count = if part.is_empty() { own.chars().count() + 1 } else { own.matches(part).count() };
        return Ok(Value::Int(count as i64));
    }
    let found = if name.starts_with('r') { own.rfind(part) } else { own.find(part) };
    match found {
        Some(at) => Ok(Value::Int((offset + own[..at].chars().count()) as i64)),
        None if name.ends_with("index") => Err(Error::new("the substring isn't found")),
        None => Ok(Value::Int(-1)),
    }
}

fn split(evaluator: &mut Evaluator, text: &str, from_end: bool, passed: Passed) -> Result<Value> {
    let [separator, most] = passed.fixed("split", ["sep", "maxsplit"], 0)?;
    let most = most.and_then(|most| most.as_int()).filter(|most| *most >= 0).map(|most| most as usize);
    let separator = separator.filter(|separator| !matches!(separator, Value::None));
    let mut parts: Vec<&str> = Vec::new();
    let found = match &separator {
        Some(Value::Str(separator)) => text.matches(&**separator).count(),
        _ => text.matches(is_space).count(),
    };
    evaluator.budget.pay(ITEM * found.min(most.unwrap_or(usize::MAX)) as u64)?;
    match &separator {
        None => {
            let mut rest = strip(text, "strip", None);
            while !rest.is_empty() {
                let cut = match parts.len() == most.unwrap_or(usize::MAX) {
                    true => None,
                    false if from_end => rest.char_indices().rev().find(|(_, c)| is_space(*c)).map(|(at, _)| at),
                    false => rest.find(is_space),
                };
                let Some(at) = cut else {
                    parts.push(rest);
                    break;
                };
                if from_end {
                    let word = rest[at..].trim_start_matches(is_space);
                    parts.push(word);
                    rest = rest[..at].trim_end_matches(is_space);
                } else {
                    parts.push(&rest[..at]);
                    rest = rest[at..].trim_start_matches(is_space);
                }
            }
            if from_end {
                parts.reverse();
            }
        }
        Some(separator) => {
            let separator = argument("split", Some(separator))?;
            if separator.is_empty() {
                return Err(Error::new("an empty separator"));
            }
            let most = most.map_or(usize::MAX, |most| most.saturating_add(1));
            parts =
                if from_end { text.rsplitn(most, separator).collect() } else { text.splitn(most, separator).collect() };
            if from_end {
                parts.reverse();
            }
        }
    }
    strings(evaluator, parts.into_iter()).and_then(|parts| Value::list(parts, &mut evaluator.budget))
}

/// Splits a text at Python's line boundaries.
pub(super) fn lines(text: &str, keep: bool) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let Some(at) = rest.find(LINE_ENDS) else {
            lines.push(rest);
            break;
        };
        let end = match rest[at..].starts_with("\r\n") {
            true => at + 2,
            false => at + rest[at..].chars().next().map_or(1, char::len_utf8),
        };
        lines.push(if keep { &rest[..end] } else { &rest[..at] });
        rest = &rest[end..];
    }
    lines
}

/// Replaces up to `count` occurrences of a text, paid for in advance.
pub(super) fn replace(
    evaluator: &mut Evaluator,
    text: &str,
    old: &str,
    new: &str,
    count: Option<i64>,
) -> Result<Value> {
    let most = count.filter(|count| *count >= 0).map_or(usize::MAX, |count| count as usize);
    let found = if old.is_empty() { text.chars().count() + 1 } else { text.matches(old).count() };
    evaluator.budget.pay_len(text.len().saturating_add(found.min(most).saturating_mul(new.len())))?;
    Value::str(text.replacen(old, new, most), &mut evaluator.budget)
}

fn justify(evaluator: &mut Evaluator, text: &str, name: &str, passed: Passed) -> Result<Value> {
    let [width, fill] = passed.fixed(name, ["width", "fillchar"], 1)?;
    let width = width.and_then(|width| width.as_int()).unwrap_or(0).max(0) as usize;
    let fill = fill.as_ref().and_then(Value::as_str).and_then(|fill| fill.chars().next()).unwrap_or(' ');
    let missing = width.saturating_sub(text.chars().count());
    evaluator.budget.pay_len(missing.saturating_mul(fill.len_utf8()))?;
    let filled = |count: usize, c: char| std::iter::repeat_n(c, count).collect::<String>();
    let text = match name {
        "ljust" => text.to_owned() + &filled(missing, fill),
        "rjust" => filled(missing, fill) + text,
        "zfill" => {
            let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
            let sign = &text[..text.len() - digits.len()];
            [sign, &filled(missing, '0'), digits].concat()
        }
        _ => {
            // as CPython divides an odd number of fill characters
            let left = missing / 2 + (missing & width & 1);
            filled(left, fill) + text + &filled(missing - left, fill)
        }
    };
    Value::str(text, &mut evaluator.budget)
}
