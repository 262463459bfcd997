//! Tokens of a template, with the white space control of Jinja2 under `trim_blocks` and `lstrip_blocks`.

use super::{Error, Result};

/// Maximum number of tokens in a tag.
const MAX_TOKENS: usize = 4096;

/// Token of a template.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    Data(String),
    VariableBegin,
    VariableEnd,
    BlockBegin,
    BlockEnd,
    Name(String),
    Str(String),
    Int(i64),
    Float(f64),
    Op(&'static str),
}

/// Operators, longer ones first.
const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<", "=", ".",
    ":", "|", ",", ";",
];

/// Returns whether Python's `str.isspace` counts a character as white space.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

struct Lexer<'s> {
    source: &'s str,
    at: usize,
    line: u32,
    /// Whether only trimmed text precedes on the current line.
    line_starting: bool,
    tokens: Vec<(Token, u32)>,
}

/// Splits a template into tokens with their lines.
pub(super) fn tokenize(source: &str) -> Result<Vec<(Token, u32)>> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let source = source.strip_suffix('\n').unwrap_or(&source);
    let mut lexer = Lexer { source, at: 0, line: 1, line_starting: true, tokens: Vec::new() };
    while lexer.next()? {}
    Ok(lexer.tokens)
}

impl<'s> Lexer<'s> {
    fn rest(&self) -> &'s str {
        &self.source[self.at..]
    }

    fn error<T>(&self, message: impl Into<String>) -> Result<T> {
        Err(Error::new(message).at(self.line))
    }

    /// Moves over some bytes.
    fn skip(&mut self, bytes: usize) {
        let text = &self.source[self.at..self.at + bytes];
        self.line += text.matches('\n').count() as u32;
        self.at += bytes;
    }

    fn skip_space(&mut self) {
        let rest = self.rest();
        let bytes = rest.len() - rest.trim_start_matches(is_space).len();
        self.skip(bytes);
    }

    fn data(&mut self, text: &str) {
        if !text.is_empty() {
            self.tokens.push((Token::Data(text.to_owned()), self.line));
        }
    }

    /// Adds the text before the next tag, and the tag; returns false at the end.
    fn next(&mut self) -> Result<bool> {
        let rest = &self.source[self.at..];
        let starts = ["{{", "{%", "{#"].map(|start| rest.find(start).map(|at| (at, start)));
        let Some((at, start)) = starts.into_iter().flatten().min() else {
            self.data(rest);
            return Ok(false);
        };
        let sign = rest[at + 2..].chars().next().filter(|sign| ['-', '+'].contains(sign));
        let text = stripped(&rest[..at], sign, start != "{{", self.line_starting);
        self.data(text);
        self.skip(at + 2 + usize::from(sign.is_some()));
        match start {
            "{#" => {
                let Some(end) = self.rest().find("#}") else { return self.error("a comment isn't closed") };
                let sign = self.rest()[..end].chars().next_back();
                self.skip(end + 2);
                self.after_tag(sign, true);
            }
            "{%" if self.is_raw().is_some() => self.raw()?,
            start => self.tag(start == "{%")?,
        }
        Ok(true)
    }

    /// Applies the white space control after a tag that ends with `sign`.
    fn after_tag(&mut self, sign: Option<char>, trims: bool) {
        let before = self.at;
        match sign {
            Some('-') => self.skip_space(),
            Some('+') => {}
            _ if trims && self.rest().starts_with('\n') => self.skip(1),
            _ => {}
        }
        self.line_starting = self.at > before && self.source[..self.at].ends_with('\n');
    }

    /// Returns the length of the rest of a `raw` tag.
    fn is_raw(&self) -> Option<(usize, bool)> {
        let rest = self.rest();
        let after = rest.trim_start_matches(is_space).strip_prefix("raw")?.trim_start_matches(is_space);
        let (after, strips) = match after.strip_prefix('-') {
            Some(after) => (after, true),
            None => (after, false),
        };
        after.strip_prefix("%}").map(|after| (rest.len() - after.len(), strips))
    }

    fn raw(&mut self) -> Result<()> {
        let Some((length, strips)) = self.is_raw() else { return Ok(()) };
        self.skip(length);
        if strips {
            self.skip_space();
        }
        let mut from = 0;
        let whole = &self.source[self.at..];
        while let Some(start) = whole[from..].find("{%").map(|start| from + start) {
            from = start + 2;
            let sign = whole[from..].chars().next().filter(|sign| ['-', '+'].contains(sign));
            let inside = whole[from + usize::from(sign.is_some())..].trim_start_matches(is_space);
            let Some(inside) = inside.strip_prefix("endraw") else { continue };
            let inside = inside.trim_start_matches(is_space);
            let end = inside.chars().next().filter(|sign| ['-', '+'].contains(sign));
            let Some(after) = inside[usize::from(end.is_some())..].strip_prefix("%}") else { continue };
            let text = stripped(&whole[..start], sign, true, false);
            self.data(text);
            self.skip(whole.len() - after.len());
            self.after_tag(end, true);
            return Ok(());
        }
        self.error("a raw block isn't closed")
    }

    /// Adds the tokens of a block or a variable.
    fn tag(&mut self, block: bool) -> Result<()> {
        let (begin, end, close) = match block {
            true => (Token::BlockBegin, Token::BlockEnd, "%}"),
            false => (Token::VariableBegin, Token::VariableEnd, "}}"),
        };
        self.tokens.push((begin, self.line));
        let first = self.tokens.len();
        let mut open = 0_usize;
        loop {
            self.skip_space();
            let rest = self.rest();
            if open == 0 {
                let sign = rest.chars().next().filter(|sign| *sign == '-' || (block && *sign == '+'));
                for (sign, rest) in [(None, Some(rest)), (sign, sign.and_then(|sign| rest.strip_prefix(sign)))] {
                    if rest.is_some_and(|rest| rest.starts_with(close)) {
                        self.tokens.push((end, self.line));
                        self.skip(2 + usize::from(sign.is_some()));
                        self.after_tag(sign, block);
                        return Ok(());
                    }
                }
            }
            let line = self.line;
            let token = self.token()?;
            match token {
                Token::Op("(" | "[" | "{") => open += 1,
                Token::Op(")" | "]" | "}") if open == 0 => {
                    return self.error("a closing bracket without an opening one");
                }
                Token::Op(")" | "]" | "}") => open -= 1,
                _ => {}
            }
            self.tokens.push((token, line));
            if self.tokens.len() - first > MAX_TOKENS {
                return self.error(format!("a tag of more than {MAX_TOKENS} words"));
            }
        }
    }

    fn token(&mut self) -> Result<Token> {
        let rest = &self.source[self.at..];
        let Some(first) = rest.chars().next() else { return self.error("a tag isn't closed") };
        if first.is_ascii_digit() {
            return self.number();
        }
        if first == '\'' || first == '"' {
            return self.string(first);
        }
        if first.is_alphabetic() || first == '_' {
            let length = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            self.skip(length);
            return Ok(Token::Name(rest[..length].to_owned()));
        }
        match OPERATORS.iter().find(|operator| rest.starts_with(**operator)) {
            Some(operator) => {
                self.skip(operator.len());
                Ok(Token::Op(operator))
            }
            None => self.error(format!("unexpected character {first:?}")),
        }
    }

    fn number(&mut self) -> Result<Token> {
        let rest = &self.source[self.at..];
        let radix = match rest.get(..2) {
            Some("0x" | "0X") => 16,
            Some("0o" | "0O") => 8,
            Some("0b" | "0B") => 2,
            _ => 10,
        };
        if radix != 10 {
            let digits = &rest[2..];
            let length = digits.find(|c: char| !c.is_digit(radix) && c != '_').unwrap_or(digits.len());
            let value = i64::from_str_radix(&digits[..length].replace('_', ""), radix);
            self.skip(2 + length);
            return value.map(Token::Int).or_else(|_| self.error("a number is too large"));
        }
        let digits = |text: &str| text.find(|c: char| !c.is_ascii_digit() && c != '_').unwrap_or(text.len());
        let mut length = digits(rest);
        let mut float = false;
        let after_dot = self.source[..self.at].ends_with('.');
        if !after_dot {
            let fraction = rest[length..].strip_prefix('.').map(digits).filter(|count| *count > 0);
            if let Some(count) = fraction {
                (length, float) = (length + 1 + count, true);
            }
            if let Some(exponent) = rest[length..].strip_prefix(['e', 'E']) {
                let signed = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
                let count = digits(signed);
                if count > 0 {
                    (length, float) = (length + 1 + (exponent.len() - signed.len()) + count, true);
                }
            }
        }
        let text = rest[..length].replace('_', "");
        self.skip(length);
        match float {
            true => text.parse().map(Token::Float).or_else(|_| self.error("a number can't be read")),
            false => text.parse().map(Token::Int).or_else(|_| self.error("a number is too large")),
        }
    }

    fn string(&mut self, quote: char) -> Result<Token> {
        let rest = &self.source[self.at + 1..];
        let mut out = String::new();
        let mut chars = rest.char_indices();
        while let Some((at, c)) = chars.next() {
            match c {
                '\\' => {
                    let Some((_, escaped)) = chars.next() else { break };
                    if !unescape(escaped, &mut chars, &mut out) {
                        return self.error("a string has an invalid escape");
                    }
                }
                c if c == quote => {
                    self.skip(at + 2);
                    return Ok(Token::Str(out));
                }
                c => out.push(c),
            }
        }
        self.error("a string isn't closed")
    }
}

/// Adds the character of an escape; returns false if it is invalid.
fn unescape(escaped: char, chars: &mut std::str::CharIndices<'_>, out: &mut String) -> bool {
    let mut hexadecimal = |digits: usize| {
        let text: String = chars.clone().take(digits).map(|(_, c)| c).collect();
        let code = u32::from_str_radix(&text, 16).ok().filter(|_| text.chars().count() == digits);
        for _ in 0..digits {
            chars.next();
        }
        code.and_then(char::from_u32)
    };
    let c = match escaped {
        'n' => '\n',
        't' => '\t',
        'r' => '\r',
        'a' => '\u{7}',
        'b' => '\u{8}',
        'f' => '\u{c}',
        'v' => '\u{b}',
        '\n' => return true,
        '\\' | '\'' | '"' => escaped,
        'x' | 'u' | 'U' => {
            let digits = match escaped {
                'x' => 2,
                'u' => 4,
                _ => 8,
            };
            match hexadecimal(digits) {
                Some(c) => c,
                None => return false,
            }
        }
        '0'..='7' => {
            let mut code = escaped.to_digit(8).unwrap_or(0);
            for _ in 0..2 {
                let Some(digit) = chars.clone().next().and_then(|(_, c)| c.to_digit(8)) else { break };
                code = code * 8 + digit;
                chars.next();
            }
            char::from_u32(code).unwrap_or_default()
        }
        other => {
            out.push('\\');
            other
        }
    };
    out.push(c);
    true
}

/// Returns the text before a tag that begins with `sign`, without the white space that the tag strips.
fn stripped(text: &str, sign: Option<char>, strips: bool, line_starting: bool) -> &str {
    match sign {
        Some('-') => text.trim_end_matches(is_space),
        Some('+') => text,
        _ if strips => {
            let line = text.rfind('\n').map_or(0, |at| at + 1);
            let on_line = line > 0 || line_starting;
            if on_line && text[line..].chars().all(is_space) { &text[..line] } else { text }
        }
        _ => text,
    }
}
