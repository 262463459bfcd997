//! Filters and tests.

use std::cmp::Ordering;
use std::sync::Arc;

use super::{Evaluator, Passed, methods};
use crate::jinja::json::{self, Style};
use crate::jinja::parser::{Binary, Comparison};
use crate::jinja::value::{ITEM, Value, to_str, write_str};
use crate::jinja::{Error, Result, format};

/// Applies a filter.
pub(super) fn filter(own: &mut Evaluator, name: &str, value: Value, passed: Passed) -> Result<Value> {
    let read: u64 = passed.positional.iter().map(|value| value.as_str().map_or(0, str::len) as u64).sum();
    own.budget.pay(read)?;
    match name {
        "default" | "d" => {
            let [default, boolean] = passed.fixed(name, ["default_value", "boolean"], 0)?;
            let replaces =
                value.is_undefined() || (boolean.is_some_and(|boolean| boolean.is_true()) && !value.is_true());
            Ok(if replaces { default.unwrap_or(Value::Str("".into())) } else { value })
        }
        "length" | "count" => {
            if let Some(text) = value.as_str() {
                own.budget.pay_len(text.len())?;
            }
            let length = value.length().map(|length| Value::Int(length as i64));
            length.ok_or_else(|| Error::new(format!("a {} has no length", value.type_name())))
        }
        "attr" => {
            let [attribute] = passed.fixed(name, ["name"], 1)?;
            let attribute = to_str(&attribute.unwrap_or(Value::None), &mut own.budget)?;
            match value {
                // attributes alone, without items
                Value::Dict(_) if !methods::has_method(&value, &attribute) => Ok(Value::Undefined(attribute)),
                value => own.attribute(&value, &attribute),
            }
        }
        "int" | "float" | "abs" | "round" => number(own, name, &value, passed),
        "upper" | "lower" | "capitalize" | "title" | "trim" | "replace" | "indent" | "center" | "wordcount"
        | "truncate" | "escape" | "e" | "forceescape" | "string" | "safe" | "urlencode" | "format" => {
            text(own, name, &value, passed)
        }
        "tojson" => tojson(own, &value, passed),
        "join" => join(own, &value, passed),
        "items" => match value {
            Value::Undefined(_) => Value::generator(Vec::new(), &mut own.budget),
            Value::Dict(_) => {
                let view = methods::call(own, &value, "items", Passed::default())?.items(&mut own.budget)?;
                Value::generator(view.items.clone(), &mut own.budget)
            }
            other => Err(Error::new(format!("a {} is no mapping", other.type_name()))),
        },
        "map" => map(own, &value, passed),
        "select" | "reject" | "selectattr" | "rejectattr" => select(own, name, &value, passed),
        _ => sequence(own, name, &value, passed),
    }
}

/// Filters of sequences.
fn sequence(own: &mut Evaluator, name: &str, value: &Value, passed: Passed) -> Result<Value> {
    let known = [
        "list", "first", "last", "reverse", "sort", "unique", "min", "max", "sum", "dictsort", "groupby", "batch",
        "slice",
    ];
    if !known.contains(&name) {
        return Err(Error::new(format!("the filter `{name}` isn't supported")));
    }
    if name == "reverse"
        && let Some(text) = value.as_str()
    {
        own.budget.pay_len(text.len())?;
        return Value::str(text.chars().rev().collect::<String>(), &mut own.budget);
    }
    if name == "dictsort" {
        return dictsort(own, value, passed);
    }
    let items = value.items(&mut own.budget)?;
    own.budget.pay(ITEM * items.items.len() as u64)?;
    match name {
        "list" => Value::list(items.items.clone(), &mut own.budget),
        "first" | "last" => {
            let item = if name == "first" { items.items.first() } else { items.items.last() };
            Ok(item.cloned().unwrap_or(Value::Undefined("an item of an empty sequence".into())))
        }
        "reverse" => Value::generator(items.items.iter().rev().cloned().collect(), &mut own.budget),
        "sort" => {
            let [reverse, cased, attribute] = passed.fixed(name, ["reverse", "case_sensitive", "attribute"], 0)?;
            let sorted = sorted(own, &items.items, attribute.as_ref(), truth(cased.as_ref()), truth(reverse.as_ref()))?;
            Value::list(sorted, &mut own.budget)
        }
        "unique" => {
            let [cased, attribute] = passed.fixed(name, ["case_sensitive", "attribute"], 0)?;
            let (mut keys, mut kept): (Vec<Value>, Vec<Value>) = (Vec::new(), Vec::new());
            for item in &items.items {
                let key = key(own, item, attribute.as_ref(), truth(cased.as_ref()))?;
                let mut known = false;
                for other in &keys {
                    known |= key.equals(other, &mut own.budget)?;
                }
                if !known {
                    keys.push(key);
                    kept.push(item.clone());
                }
            }
            Value::generator(kept, &mut own.budget)
        }
        "min" | "max" => {
            let [cased, attribute] = passed.fixed(name, ["case_sensitive", "attribute"], 0)?;
            let mut best: Option<(Value, &Value)> = None;
            for item in &items.items {
                let key = key(own, item, attribute.as_ref(), truth(cased.as_ref()))?;
                let wins = match &best {
                    None => true,
                    Some((other, _)) if name == "min" => own.compares(Comparison::Lt, &key, other)?,
                    Some((other, _)) => own.compares(Comparison::Gt, &key, other)?,
                };
                if wins {
                    best = Some((key, item));
                }
            }
            Ok(best.map_or(Value::Undefined("an item of an empty sequence".into()), |(_, item)| item.clone()))
        }
        "sum" => {
            let [attribute, start] = passed.fixed(name, ["attribute", "start"], 0)?;
            let mut sum = start.unwrap_or(Value::Int(0));
            for item in &items.items {
                let item = attribute_of(own, item, attribute.as_ref())?;
                if matches!(sum, Value::Str(_)) {
                    return Err(Error::new("sum can't sum strings"));
                }
                sum = own.binary(Binary::Add, &sum, &item)?;
            }
            Ok(sum)
        }
        "groupby" => groupby(own, &items.items, passed),
        _ => divided(own, name, &items.items, passed),
    }
}

fn truth(value: Option<&Value>) -> bool {
    value.is_some_and(Value::is_true)
}

/// Filters that divide a sequence into lists.
fn divided(own: &mut Evaluator, name: &str, items: &[Value], passed: Passed) -> Result<Value> {
    let [count, fill] = passed.fixed(name, ["count", "fill_with"], 1)?;
    let count = count.and_then(|count| count.as_int()).filter(|count| *count > 0);
    let count = count.ok_or_else(|| Error::new(format!("{name} needs a positive number")))? as usize;
    let fill = fill.filter(|fill| !matches!(fill, Value::None));
    let mut lists = Vec::new();
    if name == "batch" {
        for part in items.chunks(count) {
            let mut part = part.to_vec();
            if let Some(fill) = &fill {
                let missing = count - part.len();
                own.budget.pay(ITEM.saturating_mul(missing as u64))?;
                part.extend(std::iter::repeat_n(fill.clone(), missing));
            }
            lists.push(Value::list(part, &mut own.budget)?);
        }
    } else {
        own.budget.pay(ITEM.saturating_mul(count as u64))?;
        let (each, longer) = (items.len() / count, items.len() % count);
        let mut rest = items;
        for index in 0..count {
            let (part, after) = rest.split_at(each + usize::from(index < longer));
            rest = after;
            let fill = fill.iter().filter(|_| index >= longer).cloned();
            lists.push(Value::list(part.iter().cloned().chain(fill).collect(), &mut own.budget)?);
        }
    }
    Value::generator(lists, &mut own.budget)
}

/// Returns an attribute path of an item: `a.b.0`.
fn attribute_of(own: &mut Evaluator, item: &Value, attribute: Option<&Value>) -> Result<Value> {
    let mut value = item.clone();
    match attribute {
        None | Some(Value::None) => {}
        Some(Value::Str(path)) => {
            own.budget.pay_len(path.len())?;
            for part in path.split('.') {
                let key = match part.parse::<i64>() {
                    Ok(index) => Value::Int(index),
                    Err(_) => Value::Str(part.into()),
                };
                value = own.item(&value, &key)?;
            }
        }
        Some(index) => value = own.item(&value, index)?,
    }
    Ok(value)
}

/// Returns the key by which an item is sorted.
fn key(own: &mut Evaluator, item: &Value, attribute: Option<&Value>, cased: bool) -> Result<Value> {
    let value = attribute_of(own, item, attribute)?;
    match value.as_str() {
        Some(text) if !cased => Value::str(text.to_lowercase(), &mut own.budget),
        _ => Ok(value),
    }
}

/// Sorts items by keys; equal ones stay in their order.
fn sorted_by_keys(own: &mut Evaluator, mut keyed: Vec<(Value, Value)>, reverse: bool) -> Result<Vec<Value>> {
    let mut failure = None;
    let budget = &mut own.budget;
    keyed.sort_by(|(a, _), (b, _)| {
        let (a, b) = if reverse { (b, a) } else { (a, b) };
        match a.order(b, budget) {
            Ok(order) => order.unwrap_or(Ordering::Equal),
            Err(error) => {
                failure.get_or_insert(error);
                Ordering::Equal
            }
        }
    });
    match failure {
        Some(error) => Err(error),
        None => Ok(keyed.into_iter().map(|(_, item)| item).collect()),
    }
}

fn sorted(
    own: &mut Evaluator,
    items: &[Value],
    attribute: Option<&Value>,
    cased: bool,
    reverse: bool,
) -> Result<Vec<Value>> {
    let mut keyed = Vec::with_capacity(items.len());
    for item in items {
        let key = match attribute.and_then(Value::as_str).filter(|attributes| attributes.contains(',')) {
            Some(attributes) => {
                let attributes: Vec<Value> = attributes.split(',').map(|one| Value::Str(one.into())).collect();
                let keys = attributes.iter().map(|one| key(own, item, Some(one), cased)).collect::<Result<_>>()?;
                Value::tuple(keys, &mut own.budget)?
            }
            None => key(own, item, attribute, cased)?,
        };
        keyed.push((key, item.clone()));
    }
    sorted_by_keys(own, keyed, reverse)
}

fn dictsort(own: &mut Evaluator, value: &Value, passed: Passed) -> Result<Value> {
    let [cased, by, reverse] = passed.fixed("dictsort", ["case_sensitive", "by", "reverse"], 0)?;
    let Value::Dict(dict) = value else {
        return Err(Error::new(format!("a {} is no mapping", value.type_name())));
    };
    let by_value = by.as_ref().and_then(Value::as_str) == Some("value");
    let mut keyed = Vec::with_capacity(dict.entries.len());
    for (own_key, value) in &dict.entries {
        let sort_key = key(own, if by_value { value } else { own_key }, None, truth(cased.as_ref()))?;
        keyed.push((sort_key, Value::tuple(vec![own_key.clone(), value.clone()], &mut own.budget)?));
    }
    let sorted = sorted_by_keys(own, keyed, truth(reverse.as_ref()))?;
    Value::list(sorted, &mut own.budget)
}

fn groupby(own: &mut Evaluator, items: &[Value], passed: Passed) -> Result<Value> {
    let [attribute, default, cased] = passed.fixed("groupby", ["attribute", "default", "case_sensitive"], 1)?;
    let cased = truth(cased.as_ref());
    let mut keyed = Vec::with_capacity(items.len());
    for item in items {
        let mut value = attribute_of(own, item, attribute.as_ref())?;
        if let (true, Some(default)) = (value.is_undefined(), &default) {
            value = default.clone();
        }
        let sort_key = key(own, &value, None, cased)?;
        keyed.push((sort_key.clone(), Value::tuple(vec![sort_key, value, item.clone()], &mut own.budget)?));
    }
    let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
    for entry in sorted_by_keys(own, keyed, false)? {
        let Value::Tuple(entry) = entry else { continue };
        let [sort_key, value, item] = &entry.items[..] else { continue };
        match groups.last_mut() {
            Some((key, _, group)) if key.equals(sort_key, &mut own.budget)? => group.push(item.clone()),
            _ => groups.push((sort_key.clone(), value.clone(), vec![item.clone()])),
        }
    }
    let mut out = Vec::with_capacity(groups.len());
    for (_, value, group) in groups {
        let group = Value::list(group, &mut own.budget)?;
        out.push(Value::tuple(vec![value, group], &mut own.budget)?);
    }
    Value::list(out, &mut own.budget)
}

/// Returns the items of a value; none of a false one, whatever it is.
fn items_if_true(own: &mut Evaluator, value: &Value) -> Result<std::rc::Rc<crate::jinja::value::List>> {
    match value.is_true() {
        true => value.items(&mut own.budget),
        false => Value::Undefined("".into()).items(&mut own.budget),
    }
}

fn map(own: &mut Evaluator, value: &Value, passed: Passed) -> Result<Value> {
    let items = items_if_true(own, value)?;
    let mut out = Vec::with_capacity(items.items.len());
    let mut positional = passed.positional.into_iter();
    match positional.next() {
        Some(filter) => {
            let filter = to_str(&filter, &mut own.budget)?;
            let rest: Vec<Value> = positional.collect();
            for item in &items.items {
                own.budget.step()?;
                let passed = Passed { positional: rest.clone(), named: passed.named.clone() };
                out.push(self::filter(own, &filter, item.clone(), passed)?);
            }
        }
        None => {
            let [attribute, default] =
                Passed { positional: Vec::new(), ..passed }.fixed("map", ["attribute", "default"], 1)?;
            for item in &items.items {
                own.budget.step()?;
                let value = attribute_of(own, item, attribute.as_ref())?;
                out.push(if value.is_undefined() { default.clone().unwrap_or(value) } else { value });
            }
        }
    }
    Value::generator(out, &mut own.budget)
}

fn select(own: &mut Evaluator, name: &str, value: &Value, passed: Passed) -> Result<Value> {
    let items = items_if_true(own, value)?;
    let mut positional = passed.positional.into_iter();
    let attribute = if name.ends_with("attr") { positional.next() } else { None };
    if name.ends_with("attr") && attribute.is_none() {
        return Err(Error::new(format!("{name} needs an attribute")));
    }
    let test = positional.next().map(|test| to_str(&test, &mut own.budget)).transpose()?;
    let rest: Vec<Value> = positional.collect();
    let mut kept = Vec::new();
    for item in &items.items {
        own.budget.step()?;
        let value = attribute_of(own, item, attribute.as_ref())?;
        let holds = match &test {
            Some(test) => self::test(own, test, &value, Passed::of(rest.clone()))?,
            None => value.is_true(),
        };
        if holds == name.starts_with("select") {
            kept.push(item.clone());
        }
    }
    Value::generator(kept, &mut own.budget)
}

fn join(own: &mut Evaluator, value: &Value, passed: Passed) -> Result<Value> {
    let [separator, attribute] = passed.fixed("join", ["d", "attribute"], 0)?;
    let separator = separator.map(|separator| to_str(&separator, &mut own.budget)).transpose()?;
    let mut out = String::new();
    for (index, item) in value.items(&mut own.budget)?.items.iter().enumerate() {
        let item = attribute_of(own, item, attribute.as_ref())?;
        if let Some(separator) = separator.as_ref().filter(|_| index > 0) {
            own.budget.pay_len(separator.len())?;
            out.push_str(separator);
        }
        write_str(&item, &mut out, &mut own.budget)?;
    }
    Value::str(out, &mut own.budget)
}

fn tojson(own: &mut Evaluator, value: &Value, passed: Passed) -> Result<Value> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [ascii, indent, separators, sort] = passed.fixed("tojson", names, 0)?;
    let given = |value: Option<Value>| value.filter(|value| !matches!(value, Value::None));
    let indent: Option<Arc<str>> = match given(indent) {
        None => None,
        Some(Value::Str(text)) => Some(text),
        Some(other) => {
            let count = other.as_int().ok_or_else(|| Error::new("`indent` has to be a number"))?.max(0);
            own.budget.pay(count as u64)?;
            Some(" ".repeat(count as usize).into())
        }
    };
    let (item_separator, key_separator) = match given(separators) {
        None => (if indent.is_some() { "," } else { ", " }.into(), ": ".into()),
        Some(pair) => {
            let pair = pair.items(&mut own.budget)?;
            match &pair.items[..] {
                [Value::Str(item), Value::Str(key)] => (item.clone(), key.clone()),
                _ => return Err(Error::new("`separators` has to be a pair of strings")),
            }
        }
    };
    let style = Style {
        ensure_ascii: truth(ascii.as_ref()),
        indent,
        item_separator,
        key_separator,
        sort_keys: truth(sort.as_ref()),
    };
    let mut out = String::new();
    json::write(value, &style, 0, &mut out, &mut own.budget)?;
    Value::str(out, &mut own.budget)
}

/// Filters of numbers.
fn number(own: &mut Evaluator, name: &str, value: &Value, passed: Passed) -> Result<Value> {
    match name {
        "int" => {
            let [default, _base] = passed.fixed(name, ["default", "base"], 0)?;
            let parsed = match value {
                Value::Str(text) => {
                    own.budget.pay_len(text.len())?;
                    let text = methods::strip(text, "strip", None).replace('_', "");
                    text.parse::<i64>().ok().or_else(|| Some(text.parse::<f64>().ok()?.trunc() as i64))
                }
                Value::Float(value) if value.is_finite() => Some(value.trunc() as i64),
                other => other.as_int(),
            };
            Ok(parsed.map(Value::Int).or(default).unwrap_or(Value::Int(0)))
        }
        "float" => {
            let [default] = passed.fixed(name, ["default"], 0)?;
            let parsed = match value {
                Value::Str(text) => methods::strip(text, "strip", None).replace('_', "").parse().ok(),
                other => other.as_float(),
            };
            Ok(parsed.map(Value::Float).or(default).unwrap_or(Value::Float(0.0)))
        }
        "abs" => match value {
            Value::Float(value) => Ok(Value::Float(value.abs())),
            other => other.as_int().and_then(i64::checked_abs).map(Value::Int).ok_or_else(|| not_a_number(other)),
        },
        _ => {
            let [precision, method] = passed.fixed(name, ["precision", "method"], 0)?;
            let precision = precision.and_then(|precision| precision.as_int()).unwrap_or(0);
            if precision.abs() > 300 {
                return Err(Error::new("round has a precision of at most 300"));
            }
            let number = value.as_float().ok_or_else(|| not_a_number(value))?;
            let factor = 10f64.powi(precision as i32);
            Ok(match method.as_ref().and_then(Value::as_str).unwrap_or("common") {
                "ceil" => Value::Float((number * factor).ceil() / factor),
                "floor" => Value::Float((number * factor).floor() / factor),
                _ => match value.as_int() {
                    Some(whole) if precision >= 0 => Value::Int(whole),
                    _ if precision < 0 => Value::Float((number * factor).round_ties_even() / factor),
                    // the decimal digits of the float, ties to even
                    _ => Value::Float(format!("{number:.*}", precision as usize).parse().unwrap_or(number)),
                },
            })
        }
    }
}

fn not_a_number(value: &Value) -> Error {
    Error::new(format!("a {} is no number", value.type_name()))
}

/// Filters of texts; other values are converted.
fn text(own: &mut Evaluator, name: &str, value: &Value, mut passed: Passed) -> Result<Value> {
    let text = to_str(value, &mut own.budget)?;
    own.budget.pay_len(text.len().saturating_mul(2))?;
    let result = match name {
        "string" | "safe" => return Ok(Value::Str(text)),
        "upper" => text.to_uppercase(),
        "lower" => text.to_lowercase(),
        "capitalize" => methods::capitalized(&text),
        "title" => title(&text),
        "trim" => {
            let [chars] = passed.fixed(name, ["chars"], 0)?;
            let set = chars.as_ref().and_then(Value::as_str);
            own.budget.pay_len(text.len().saturating_mul(set.map_or(1, str::len)))?;
            methods::strip(&text, "strip", set).to_owned()
        }
        "replace" => {
            let [old, new, count] = passed.fixed(name, ["old", "new", "count"], 2)?;
            let old = to_str(&old.unwrap_or(Value::None), &mut own.budget)?;
            let new = to_str(&new.unwrap_or(Value::None), &mut own.budget)?;
            return methods::replace(own, &text, &old, &new, count.and_then(|count| count.as_int()));
        }
        "center" => {
            if passed.positional.is_empty() && passed.named.is_empty() {
                passed.positional.push(Value::Int(80));
            }
            return methods::call(own, &Value::Str(text), name, passed);
        }
        "wordcount" => {
            let words = text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
            return Ok(Value::Int(words.count() as i64));
        }
        "escape" | "e" | "forceescape" => {
            own.budget.pay_len(text.len().saturating_mul(4))?;
            let escaped = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
            escaped.replace('\'', "&#39;").replace('"', "&#34;")
        }
        "urlencode" => {
            own.budget.pay_len(text.len().saturating_mul(3))?;
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-~/".contains(&byte);
            text.bytes()
                .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
                .collect()
        }
        "format" => {
            let arguments = match passed.named.is_empty() {
                true => Value::tuple(passed.positional, &mut own.budget)?,
                false => {
                    let entries = passed.named.into_iter().map(|(name, value)| (Value::Str(name), value)).collect();
                    Value::dict(entries, &mut own.budget)?
                }
            };
            return format::percent(&text, &arguments, &mut own.budget);
        }
        "truncate" => truncated(own, &text, passed)?,
        _ => indented(own, &text, passed)?,
    };
    Value::str(result, &mut own.budget)
}

/// Returns the text with the first letter of each word in upper case, as Jinja2 finds words.
fn title(text: &str) -> String {
    let mut out = String::new();
    let mut begins = true;
    for c in text.chars() {
        let separates = "-({[<".contains(c) || crate::jinja::lexer::is_space(c);
        if separates {
            out.push(c);
        } else if begins {
            out.extend(c.to_uppercase());
        } else {
            out.extend(c.to_lowercase());
        }
        begins = separates;
    }
    out
}

fn truncated(own: &mut Evaluator, text: &str, passed: Passed) -> Result<String> {
    let [length, kill, end, leeway] = passed.fixed("truncate", ["length", "killwords", "end", "leeway"], 0)?;
    let count =
        |value: Option<Value>, default| value.and_then(|value| value.as_int()).unwrap_or(default).max(0) as usize;
    let (length, leeway) = (count(length, 255), count(leeway, 5));
    let end = match end {
        Some(end) => to_str(&end, &mut own.budget)?,
        None => "...".into(),
    };
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text.to_owned());
    }
    let kept: String = text.chars().take(length.saturating_sub(end.chars().count())).collect();
    let kept = match truth(kill.as_ref()) {
        true => kept.as_str(),
        false => kept.rsplit_once(' ').map_or(kept.as_str(), |(before, _)| before),
    };
    Ok(format!("{kept}{end}"))
}

fn indented(own: &mut Evaluator, text: &str, passed: Passed) -> Result<String> {
    let [width, first, blank] = passed.fixed("indent", ["width", "first", "blank"], 0)?;
    let lines = methods::lines(text, false);
    let indent: Arc<str> = match width {
        Some(Value::Str(text)) => text,
        width => {
            let width = width.and_then(|width| width.as_int()).unwrap_or(4).max(0) as u64;
            own.budget.pay(width)?;
            " ".repeat(width as usize).into()
        }
    };
    own.budget.pay_len(indent.len().saturating_mul(lines.len() + 1))?;
    // a final line break is kept
    let last = (text.is_empty() || text.ends_with('\n')).then_some("");
    let mut out = String::new();
    for (index, line) in lines.into_iter().chain(last).enumerate() {
        if index > 0 {
            out.push('\n');
        }
        let indents = if index == 0 { truth(first.as_ref()) } else { truth(blank.as_ref()) || !line.is_empty() };
        if indents {
            out.push_str(&indent);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// Returns whether a test holds.
pub(super) fn test(own: &mut Evaluator, name: &str, value: &Value, passed: Passed) -> Result<bool> {
    let comparison = match name {
        "eq" | "equalto" | "==" => Some(Comparison::Eq),
        "ne" | "!=" => Some(Comparison::Ne),
        "lt" | "lessthan" | "<" => Some(Comparison::Lt),
        "le" | "<=" => Some(Comparison::Le),
        "gt" | "greaterthan" | ">" => Some(Comparison::Gt),
        "ge" | ">=" => Some(Comparison::Ge),
        "in" => Some(Comparison::In),
        _ => None,
    };
    if let Some(comparison) = comparison {
        let [other] = passed.fixed(name, ["other"], 1)?;
        return own.compares(comparison, value, &other.unwrap_or(Value::None));
    }
    Ok(match name {
        "defined" => !value.is_undefined(),
        "undefined" => value.is_undefined(),
        "none" => matches!(value, Value::None),
        "boolean" => matches!(value, Value::Bool(_)),
        "true" => matches!(value, Value::Bool(true)),
        "false" => matches!(value, Value::Bool(false)),
        "integer" => matches!(value, Value::Int(_)),
        "float" => matches!(value, Value::Float(_)),
        "number" => value.as_float().is_some(),
        "string" => matches!(value, Value::Str(_)),
        "mapping" => matches!(value, Value::Dict(_)),
        "iterable" => value.is_iterable(),
        "sequence" => matches!(
            value,
            Value::Str(_) | Value::List(_) | Value::Tuple(_) | Value::Dict(_) | Value::Range(..) | Value::Undefined(_)
        ),
        "callable" => matches!(value, Value::Function(_) | Value::Macro(_) | Value::Method(_) | Value::Loop(_)),
        "escaped" => false,
        "odd" | "even" | "divisibleby" => {
            let number = value.as_int().ok_or_else(|| not_a_number(value))?;
            match name {
                "odd" => number % 2 != 0,
                "even" => number % 2 == 0,
                _ => {
                    let [divisor] = passed.fixed(name, ["num"], 1)?;
                    match divisor.and_then(|divisor| divisor.as_int()).unwrap_or(0) {
                        0 => return Err(Error::new("a division by zero")),
                        divisor => number.checked_rem(divisor).unwrap_or(0) == 0,
                    }
                }
            }
        }
        "lower" | "upper" => {
            let text = to_str(value, &mut own.budget)?;
            own.budget.pay_len(text.len())?;
            let cased = |c: char| if name == "lower" { c.is_uppercase() } else { c.is_lowercase() };
            text.chars().any(|c| c.is_lowercase() || c.is_uppercase()) && !text.chars().any(cased)
        }
        "sameas" => {
            let [other] = passed.fixed(name, ["other"], 1)?;
            let other = other.unwrap_or(Value::None);
            match (value, &other) {
                (Value::List(a), Value::List(b)) => std::rc::Rc::ptr_eq(a, b),
                (Value::Dict(a), Value::Dict(b)) => std::rc::Rc::ptr_eq(a, b),
                (a, b) => std::mem::discriminant(a) == std::mem::discriminant(b) && a.equals(b, &mut own.budget)?,
            }
        }
        _ => return Err(Error::new(format!("the test `{name}` isn't supported"))),
    })
}
