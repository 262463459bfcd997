//! Parser of Python calls: `[f(a="b", n=[1, 2.5], flag=True), g()]`. Dotted names, keyword arguments and literals,
//! including JSON's `true`, `false` and `null`.

use serde_json::{Map, Number, Value as Json};

use super::ToolCall;
use super::reader::{DEPTH, Reader};

/// Parses a list of calls, or a single call.
pub(super) fn calls(text: &str) -> Option<Vec<ToolCall>> {
    let mut reader = Reader { rest: text };
    let calls = match reader.take("[") {
        true => reader.list("]", Reader::call)?,
        false => vec![reader.call()?],
    };
    reader.ends().then_some(calls)
}

/// Parses a literal.
pub(super) fn value(text: &str) -> Option<Json> {
    let mut reader = Reader { rest: text };
    let value = reader.value(DEPTH)?;
    reader.ends().then_some(value)
}

impl<'a> Reader<'a> {
    /// Takes one or more characters that satisfy `of`.
    fn word(&mut self, of: impl Fn(char) -> bool) -> Option<&'a str> {
        self.skip();
        let end = self.rest.find(|letter| !of(letter)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        (!word.is_empty()).then_some(word)
    }

    fn name(&mut self) -> Option<&'a str> {
        self.word(|letter| letter.is_alphanumeric() || "_.-".contains(letter))
    }

    /// Parses items separated by commas up to `end`; a trailing comma is allowed.
    fn list<T>(&mut self, end: &str, mut item: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let mut items = Vec::new();
        while !self.take(end) {
            items.push(item(self)?);
            if !self.take(",") {
                return self.take(end).then_some(items);
            }
        }
        Some(items)
    }

    fn call(&mut self) -> Option<ToolCall> {
        let name = self.name()?.to_owned();
        if !self.take("(") {
            return None;
        }
        let argument = |reader: &mut Self| {
            let key = reader.name()?.to_owned();
            Some((key, if reader.take("=") { reader.value(DEPTH)? } else { return None }))
        };
        let arguments = self.list(")", argument)?.into_iter().collect::<Map<_, _>>();
        Some(ToolCall { name, arguments })
    }

    fn value(&mut self, depth: usize) -> Option<Json> {
        let depth = depth.checked_sub(1)?;
        self.skip();
        match self.rest.chars().next()? {
            quote @ ('"' | '\'') => self.string(quote).map(Json::String),
            '[' => {
                self.take("[");
                self.list("]", |reader| reader.value(depth)).map(Json::Array)
            }
            '(' => {
                self.take("(");
                self.list(")", |reader| reader.value(depth)).map(Json::Array)
            }
            '{' => {
                self.take("{");
                let field = |reader: &mut Self| {
                    let Json::String(key) = reader.value(depth)? else { return None };
                    Some((key, if reader.take(":") { reader.value(depth)? } else { return None }))
                };
                self.list("}", field).map(|fields| Json::Object(fields.into_iter().collect()))
            }
            _ => match self.word(|letter| letter.is_alphanumeric() || "_.+-".contains(letter))? {
                "True" | "true" => Some(Json::Bool(true)),
                "False" | "false" => Some(Json::Bool(false)),
                "None" | "null" => Some(Json::Null),
                number => match number.replace('_', "").parse::<i64>() {
                    Ok(integer) => Some(Json::from(integer)),
                    Err(_) if number.starts_with(|first: char| first.is_ascii_digit() || "+-.".contains(first)) => {
                        Number::from_f64(number.replace('_', "").parse().ok()?).map(Json::Number)
                    }
                    Err(_) => None,
                },
            },
        }
    }

    /// Parses a string with Python's escapes, in single or triple quotation marks.
    fn string(&mut self, quote: char) -> Option<String> {
        let long: String = [quote; 3].iter().collect();
        let end = if self.take(&long) {
            long
        } else {
            self.take(&long[..1]);
            long[..1].to_owned()
        };
        let mut out = String::new();
        loop {
            if let Some(rest) = self.rest.strip_prefix(end.as_str()) {
                self.rest = rest;
                return Some(out);
            }
            match self.letter()? {
                '\\' => out.extend(self.escape()?),
                letter => out.push(letter),
            }
        }
    }

    fn letter(&mut self) -> Option<char> {
        let letter = self.rest.chars().next()?;
        self.rest = &self.rest[letter.len_utf8()..];
        Some(letter)
    }

    /// Parses the rest of an escape. An unknown escape stands for itself, as in Python.
    fn escape(&mut self) -> Option<Vec<char>> {
        Some(match self.letter()? {
            'n' => vec!['\n'],
            't' => vec!['\t'],
            'r' => vec!['\r'],
            'b' => vec!['\u{8}'],
            'f' => vec!['\u{c}'],
            '0' => vec!['\0'],
            '\n' => Vec::new(),
            quoted @ ('\\' | '\'' | '"') => vec![quoted],
            'x' => vec![self.code(2)?],
            'u' => vec![self.code(4)?],
            'U' => vec![self.code(8)?],
            other => vec!['\\', other],
        })
    }

    /// Parses a character code of `digits` hexadecimal digits. Surrogate pairs, as in JSON, are joined.
    fn code(&mut self, digits: usize) -> Option<char> {
        let code = self.hexadecimal(digits)?;
        if (0xD800..0xDC00).contains(&code)
            && let Some(rest) = self.rest.strip_prefix("\\u")
        {
            self.rest = rest;
            let low = self.hexadecimal(4)?.checked_sub(0xDC00).filter(|low| *low < 0x400)?;
            return char::from_u32(0x10000 + ((code - 0xD800) << 10) + low);
        }
        char::from_u32(code)
    }

    fn hexadecimal(&mut self, digits: usize) -> Option<u32> {
        let text = self.rest.get(..digits)?;
        self.rest = &self.rest[digits..];
        text.chars().all(|digit| digit.is_ascii_hexdigit()).then(|| u32::from_str_radix(text, 16).ok())?
    }
}
