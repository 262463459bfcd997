//! `%` formatting and `str.format`.

use std::sync::Arc;

use super::value::{Value, float_text, to_str, write_repr};
use super::{Budget, Error, Result};

/// Format of a single value: a conversion of `%`, or a field of `str.format`.
#[derive(Clone, Debug)]
struct Spec {
    fill: char,
    /// `<`, `>`, `^`, `=`, or the type's own.
    align: Option<char>,
    /// `+`, `-` or a space.
    sign: char,
    alternate: bool,
    zero: bool,
    width: usize,
    /// `,` or `_`.
    grouping: Option<char>,
    precision: Option<usize>,
    kind: char,
}

impl Default for Spec {
    fn default() -> Self {
        Spec {
            fill: ' ',
            align: None,
            sign: '-',
            alternate: false,
            zero: false,
            width: 0,
            grouping: None,
            precision: None,
            kind: 's',
        }
    }
}

fn invalid<T>(problem: impl Into<String>) -> Result<T> {
    Err(Error::new(problem))
}

/// Maximum precision of a number.
const MAX_PRECISION: usize = 1000;

impl Spec {
    /// Appends a text within the width.
    fn pad(&self, text: &str, default: char, out: &mut String, budget: &mut Budget) -> Result<()> {
        let count = text.chars().count();
        let missing = self.width.saturating_sub(count);
        budget.pay_len(text.len().saturating_add(missing.saturating_mul(4)))?;
        let (before, after) = match self.align.unwrap_or(default) {
            '<' => (0, missing),
            '^' => (missing / 2, missing - missing / 2),
            _ => (missing, 0),
        };
        out.extend(std::iter::repeat_n(self.fill, before));
        out.push_str(text);
        out.extend(std::iter::repeat_n(self.fill, after));
        Ok(())
    }

    /// Appends digits with their sign; zeros go between the two.
    fn number(&self, negative: bool, prefix: &str, digits: &str, out: &mut String, budget: &mut Budget) -> Result<()> {
        let sign = match (negative, self.sign) {
            (true, _) => "-",
            (false, '+') => "+",
            (false, ' ') => " ",
            _ => "",
        };
        let digits = match self.grouping {
            Some(separator) => grouped(digits, separator),
            None => digits.to_owned(),
        };
        if self.align == Some('=') || (self.zero && self.align.is_none()) {
            let missing = self.width.saturating_sub(sign.len() + prefix.len() + digits.len());
            budget.pay_len(missing.saturating_mul(4))?;
            let fill = if self.zero { '0' } else { self.fill };
            let filled: String = std::iter::repeat_n(fill, missing).collect();
            budget.pay_len(digits.len())?;
            out.push_str(&[sign, prefix, &filled, &digits].concat());
            return Ok(());
        }
        self.pad(&[sign, prefix, &digits].concat(), '>', out, budget)
    }

    fn integer(&self, value: i64, out: &mut String, budget: &mut Budget) -> Result<()> {
        let size = value.unsigned_abs();
        let (prefix, digits) = match self.kind {
            'x' => ("0x", format!("{size:x}")),
            'X' => ("0X", format!("{size:X}")),
            'o' => ("0o", format!("{size:o}")),
            'b' => ("0b", format!("{size:b}")),
            _ => ("", size.to_string()),
        };
        self.number(value < 0, if self.alternate { prefix } else { "" }, &digits, out, budget)
    }

    fn float(&self, value: f64, out: &mut String, budget: &mut Budget) -> Result<()> {
        let precision = self.precision.unwrap_or(6);
        if precision > MAX_PRECISION {
            return invalid(format!("a precision of more than {MAX_PRECISION}"));
        }
        let size = value.abs();
        let digits = match self.kind {
            _ if !value.is_finite() => if value.is_nan() { "nan" } else { "inf" }.to_owned(),
            'e' | 'E' => exponential(size, precision),
            'g' | 'G' => general(size, precision, self.alternate),
            '%' => format!("{:.precision$}%", size * 100.0),
            _ => format!("{size:.precision$}"),
        };
        let digits = if self.kind.is_ascii_uppercase() { digits.to_uppercase() } else { digits };
        self.number(value.is_sign_negative() && !value.is_nan(), "", &digits, out, budget)
    }
}

/// Inserts separators between groups of three digits before the point.
fn grouped(digits: &str, separator: char) -> String {
    let end = digits.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(digits.len());
    let mut out = String::new();
    for (index, c) in digits[..end].chars().enumerate() {
        if index > 0 && (end - index) % 3 == 0 {
            out.push(separator);
        }
        out.push(c);
    }
    out + &digits[end..]
}

fn exponential(size: f64, precision: usize) -> String {
    let text = format!("{size:.precision$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

fn general(size: f64, precision: usize, alternate: bool) -> String {
    let precision = precision.max(1);
    let scientific = exponential(size, precision - 1);
    let exponent: i32 = scientific.split_once('e').and_then(|(_, exponent)| exponent.parse().ok()).unwrap_or(0);
    let trimmed = |digits: &str| match digits.contains('.') && !alternate {
        true => digits.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => digits.to_owned(),
    };
    if exponent < -4 || exponent >= precision as i32 {
        let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "+00"));
        return format!("{}e{exponent}", trimmed(digits));
    }
    let places = (precision as i32 - 1 - exponent).max(0) as usize;
    trimmed(&format!("{size:.places$}"))
}

fn whole(value: &Value) -> Result<i64> {
    match value {
        Value::Float(value) if value.abs() < 9e18 => Ok(value.trunc() as i64),
        other => other.as_int().ok_or_else(|| Error::new(format!("a number is needed, not a {}", other.type_name()))),
    }
}

fn real(value: &Value) -> Result<f64> {
    value.as_float().ok_or_else(|| Error::new(format!("a number is needed, not a {}", value.type_name())))
}

/// Formats as `text % arguments`.
pub(super) fn percent(text: &str, arguments: &Value, budget: &mut Budget) -> Result<Value> {
    let mut positional: Vec<Value> = match arguments {
        Value::Tuple(list) => list.items.clone(),
        other => vec![other.clone()],
    };
    positional.reverse();
    let mut out = String::new();
    let mut chars = text.chars().peekable();
    let mut named = false;
    budget.pay_len(text.len())?;
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut key = None;
        if chars.next_if_eq(&'(').is_some() {
            let mut name = String::new();
            loop {
                match chars.next() {
                    Some(')') => break,
                    Some(c) => name.push(c),
                    None => return invalid("an incomplete format key"),
                }
            }
            key = Some(name);
        }
        let mut spec = Spec::default();
        while let Some(flag) = chars.next_if(|c| "#0- +".contains(*c)) {
            match flag {
                '#' => spec.alternate = true,
                '0' => spec.zero = true,
                '-' => spec.align = Some('<'),
                '+' => spec.sign = '+',
                _ if spec.sign != '+' => spec.sign = ' ',
                _ => {}
            }
        }
        let mut size = |chars: &mut std::iter::Peekable<std::str::Chars<'_>>| -> Result<Option<i64>> {
            if chars.next_if_eq(&'*').is_some() {
                return match positional.pop() {
                    Some(value) => whole(&value).map(Some),
                    None => invalid("not enough arguments for a format"),
                };
            }
            let mut number: Option<i64> = None;
            while let Some(digit) = chars.peek().and_then(|c| c.to_digit(10)) {
                number = Some(number.unwrap_or(0).saturating_mul(10).saturating_add(i64::from(digit)));
                chars.next();
            }
            Ok(number)
        };
        if let Some(width) = size(&mut chars)? {
            if width < 0 {
                spec.align = Some('<');
            }
            spec.width = usize::try_from(width.unsigned_abs()).unwrap_or(usize::MAX);
        }
        if chars.next_if_eq(&'.').is_some() {
            spec.precision = Some(usize::try_from(size(&mut chars)?.unwrap_or(0)).unwrap_or(0));
        }
        while chars.next_if(|c| "hlL".contains(*c)).is_some() {}
        let Some(kind) = chars.next() else { return invalid("an incomplete format") };
        if kind == '%' {
            out.push('%');
            continue;
        }
        let value = match key {
            Some(key) => {
                named = true;
                let Value::Dict(dict) = arguments else { return invalid("a format needs a mapping") };
                match dict.get_str(&key, budget)? {
                    Some(value) => value.clone(),
                    None => return invalid(format!("a format names the missing key '{key}'")),
                }
            }
            None => match positional.pop() {
                Some(value) => value,
                None => return invalid("not enough arguments for a format"),
            },
        };
        spec.kind = kind;
        one_percent(&spec, &value, &mut out, budget)?;
    }
    if !positional.is_empty() && !named && !matches!(arguments, Value::Dict(_)) {
        return invalid("not all arguments are used by a format");
    }
    Value::str(out, budget)
}

fn one_percent(spec: &Spec, value: &Value, out: &mut String, budget: &mut Budget) -> Result<()> {
    match spec.kind {
        's' | 'r' | 'a' => {
            let mut text = String::new();
            match spec.kind {
                's' => text.push_str(&to_str(value, budget)?),
                _ => write_repr(value, &mut text, budget)?,
            }
            let text = match spec.precision {
                Some(precision) => text.chars().take(precision).collect(),
                None => text,
            };
            spec.pad(&text, '>', out, budget)
        }
        'd' | 'i' | 'u' | 'x' | 'X' | 'o' => spec.integer(whole(value)?, out, budget),
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' => spec.float(real(value)?, out, budget),
        'c' => {
            let c = match value {
                Value::Str(text) if text.chars().count() == 1 => text.chars().next(),
                other => other.as_int().and_then(|code| u32::try_from(code).ok()).and_then(char::from_u32),
            };
            match c {
                Some(c) => spec.pad(&c.to_string(), '>', out, budget),
                None => invalid("%c needs a character"),
            }
        }
        other => invalid(format!("an unknown format `%{other}`")),
    }
}

/// Source of the values of `str.format`.
pub(super) struct FormatArguments<'a> {
    pub positional: &'a [Value],
    pub named: &'a [(Arc<str>, Value)],
    /// Looks up an attribute (`true`) or an item of a value.
    pub lookup: &'a mut dyn FnMut(&Value, &str, bool, &mut Budget) -> Result<Value>,
}

/// Formats as `text.format(…)`.
pub(super) fn braces(text: &str, arguments: &mut FormatArguments<'_>, budget: &mut Budget) -> Result<Value> {
    let mut out = String::new();
    let mut rest = text;
    let mut automatic = 0;
    budget.pay_len(text.len())?;
    while let Some(at) = rest.find(['{', '}']) {
        out.push_str(&rest[..at]);
        let mark = &rest[at..=at];
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix(mark) {
            out.push_str(mark);
            rest = after;
            continue;
        }
        if mark == "}" {
            return invalid("a single '}' in a format");
        }
        let Some(end) = rest.find('}') else { return invalid("a '{' isn't closed in a format") };
        let field = &rest[..end];
        rest = &rest[end + 1..];
        if field.contains('{') {
            return invalid("nested fields of a format aren't supported");
        }
        let (name, spec) = field.split_once(':').unwrap_or((field, ""));
        let (name, conversion) = match name.split_once('!') {
            Some((name, conversion)) => (name, Some(conversion)),
            None => (name, None),
        };
        let value = field_value(name, &mut automatic, arguments, budget)?;
        let value = match conversion {
            None => value,
            Some("s") => Value::Str(to_str(&value, budget)?),
            Some("r" | "a") => {
                let mut text = String::new();
                write_repr(&value, &mut text, budget)?;
                Value::str(text, budget)?
            }
            Some(other) => return invalid(format!("an unknown conversion '{other}' in a format")),
        };
        format_value(&value, spec, &mut out, budget)?;
    }
    out.push_str(rest);
    Value::str(out, budget)
}

fn field_value(
    name: &str,
    automatic: &mut usize,
    arguments: &mut FormatArguments<'_>,
    budget: &mut Budget,
) -> Result<Value> {
    let end = name.find(['.', '[']).unwrap_or(name.len());
    let (first, mut path) = name.split_at(end);
    let mut value =
        if let Some(index) = first.parse::<usize>().ok().or(if first.is_empty() { Some(*automatic) } else { None }) {
            *automatic += usize::from(first.is_empty());
            arguments
                .positional
                .get(index)
                .cloned()
                .ok_or_else(|| Error::new(format!("a format has no argument {index}")))?
        } else {
            let named = arguments.named.iter().find(|(own, _)| **own == *first);
            named
                .map(|(_, value)| value.clone())
                .ok_or_else(|| Error::new(format!("a format has no argument '{first}'")))?
        };
    while !path.is_empty() {
        let (key, attribute, after) = if let Some(rest) = path.strip_prefix('.') {
            let end = rest.find(['.', '[']).unwrap_or(rest.len());
            (&rest[..end], true, &rest[end..])
        } else if let Some((key, after)) = path.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            (key, false, after)
        } else {
            return invalid("an invalid field of a format");
        };
        value = (arguments.lookup)(&value, key, attribute, budget)?;
        path = after;
    }
    Ok(value)
}

/// Appends a value by a format specification.
fn format_value(value: &Value, spec: &str, out: &mut String, budget: &mut Budget) -> Result<()> {
    if spec.is_empty() {
        out.push_str(&to_str(value, budget)?);
        return Ok(());
    }
    let mut own = Spec { kind: '\0', ..Spec::default() };
    let mut chars: Vec<char> = spec.chars().collect();
    chars.reverse();
    let is_align = |c: Option<&char>| c.is_some_and(|c| "<>^=".contains(*c));
    if chars.len() >= 2 && is_align(chars.get(chars.len() - 2)) {
        own.fill = chars.pop().unwrap_or(' ');
        own.align = chars.pop();
    } else if is_align(chars.last()) {
        own.align = chars.pop();
    }
    let mut take = |wanted: &str| match chars.last() {
        Some(c) if wanted.contains(*c) => chars.pop(),
        _ => None,
    };
    own.sign = take("+- ").unwrap_or('-');
    own.alternate = take("#").is_some();
    own.zero = take("0").is_some();
    while let Some(digit) = take("0123456789").and_then(|c| c.to_digit(10)) {
        own.width = own.width.saturating_mul(10).saturating_add(digit as usize);
    }
    own.grouping = take(",_");
    if take(".").is_some() {
        let mut precision = 0_usize;
        while let Some(digit) = take("0123456789").and_then(|c| c.to_digit(10)) {
            precision = precision.saturating_mul(10).saturating_add(digit as usize);
        }
        own.precision = Some(precision);
    }
    own.kind = chars.pop().unwrap_or('\0');
    if !chars.is_empty() {
        return invalid(format!("an invalid format '{spec}'"));
    }
    match (value, own.kind) {
        (Value::Int(_) | Value::Bool(_), '\0' | 'd' | 'x' | 'X' | 'o' | 'b' | 'n') => {
            own.integer(value.as_int().unwrap_or(0), out, budget)
        }
        (Value::Int(_) | Value::Bool(_) | Value::Float(_), 'e' | 'E' | 'f' | 'F' | 'g' | 'G' | '%') => {
            own.float(real(value)?, out, budget)
        }
        (Value::Float(number), '\0') if own.precision.is_none() => {
            own.number(number.is_sign_negative(), "", float_text(number.abs()).as_str(), out, budget)
        }
        (Value::Float(_), '\0') => {
            own.kind = 'g';
            own.float(real(value)?, out, budget)
        }
        (Value::Str(_), '\0' | 's') => {
            let text = to_str(value, budget)?;
            let text: String = match own.precision {
                Some(precision) => text.chars().take(precision).collect(),
                None => text.to_string(),
            };
            if own.zero && own.align.is_none() {
                (own.fill, own.align) = ('0', Some('<'));
            }
            own.pad(&text, '<', out, budget)
        }
        (other, kind) => invalid(format!("a {} has no format '{kind}'", other.type_name())),
    }
}
