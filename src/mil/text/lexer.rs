//! Lexer of the text form.

#[derive(Clone, Debug, PartialEq)]
pub enum Lexeme {
    /// A name or keyword.
    Word(String),
    /// A number with its sign as written; bytes as `0x…`.
    Number(String),
    /// Quoted text, which may stand for a name.
    Quoted(String),
    /// `->`
    Arrow,
    /// Any other character.
    Mark(char),
    /// The end of the text.
    End,
}

/// Position of a token, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextPosition {
    /// Line.
    pub line: usize,
    /// Column, in characters.
    pub column: usize,
}

/// Splits text into tokens; `//` starts a comment.
///
/// # Errors
/// Returns the position of an unterminated quote or an unknown escape.
pub fn tokens(text: &str) -> Result<Vec<(Lexeme, TextPosition)>, (TextPosition, String)> {
    let mut out = Vec::new();
    let mut line = 0;
    let mut rest = text;
    while !rest.is_empty() {
        let (this, next) = rest.split_once('\n').unwrap_or((rest, ""));
        line += 1;
        tokens_of_line(this, line, &mut out)?;
        rest = next;
    }
    let column = text.lines().last().map_or(0, |last| last.chars().count()) + 1;
    out.push((Lexeme::End, TextPosition { line: line.max(1), column }));
    Ok(out)
}

fn tokens_of_line(
    text: &str,
    line: usize,
    out: &mut Vec<(Lexeme, TextPosition)>,
) -> Result<(), (TextPosition, String)> {
    let chars: Vec<char> = text.chars().collect();
    let at = |i: usize| chars.get(i).copied().unwrap_or('\0');
    let mut i = 0;
    while i < chars.len() {
        let place = TextPosition { line, column: i + 1 };
        let c = at(i);
        let start = i;
        let token = if c.is_whitespace() {
            i += 1;
            continue;
        } else if c == '/' && at(i + 1) == '/' {
            break;
        } else if c == '"' {
            let (quoted, end) = quoted(&chars, i + 1).map_err(|problem| (place, problem))?;
            i = end;
            Lexeme::Quoted(quoted)
        } else if c == '-' && at(i + 1) == '>' {
            i += 2;
            Lexeme::Arrow
        } else if c.is_ascii_digit() || (matches!(c, '-' | '+') && (at(i + 1).is_ascii_digit() || at(i + 1) == 'i')) {
            i += 1;
            // an exponent has a sign of its own
            while at(i).is_ascii_alphanumeric()
                || at(i) == '.'
                || (matches!(at(i), '-' | '+') && at(i - 1) == 'e' && at(start + 1) != 'x')
            {
                i += 1;
            }
            Lexeme::Number(chars[start..i].iter().collect())
        } else if c.is_ascii_alphabetic() || c == '_' {
            while at(i).is_ascii_alphanumeric() || matches!(at(i), '_' | '@') {
                i += 1;
            }
            Lexeme::Word(chars[start..i].iter().collect())
        } else {
            i += 1;
            Lexeme::Mark(c)
        };
        out.push((token, place));
    }
    Ok(())
}

/// Text from `i` to the closing quote and the position behind it; escapes are those of Rust's `Debug`.
fn quoted(chars: &[char], mut i: usize) -> Result<(String, usize), String> {
    let mut text = String::new();
    loop {
        match chars.get(i) {
            None => return Err("the quote is never closed".into()),
            Some('"') => return Ok((text, i + 1)),
            Some('\\') => {
                let escape = chars.get(i + 1).copied().unwrap_or('\0');
                i += 2;
                text.push(match escape {
                    'n' => '\n',
                    'r' => '\r',
                    't' => '\t',
                    '0' => '\0',
                    '\\' | '"' | '\'' => escape,
                    'u' => {
                        let end = chars[i..].iter().position(|c| *c == '}').map(|n| i + n);
                        let digits: String =
                            end.map_or(String::new(), |end| chars[i + 1..end.max(i + 1)].iter().collect());
                        let code = u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32);
                        i = end.unwrap_or(i) + 1;
                        code.ok_or_else(|| format!("`\\u{{{digits}}}` is no character"))?
                    }
                    other => return Err(format!("`\\{other}` is no escape")),
                });
            }
            Some(c) => {
                text.push(*c);
                i += 1;
            }
        }
    }
}
