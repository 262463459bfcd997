//! Calls in pieces: the function's name as soon as it is known, then the arguments as they are generated. Only calls
//! whose arguments are one JSON object in the text come in pieces.

use serde_json::Value as Json;

use super::ToolCall;
use super::body::Body;

/// Piece of a function call.
#[derive(Clone, Debug, PartialEq)]
pub enum CallPiece {
    /// Beginning of a call of the function with this name.
    Begin(String),
    /// More of the arguments; all of them together are a JSON object.
    Arguments(String),
    /// End of the call.
    End,
}

impl CallPiece {
    /// Returns the pieces of a whole call.
    pub fn of(call: ToolCall) -> [Self; 3] {
        let arguments = Json::Object(call.arguments).to_string();
        [CallPiece::Begin(call.name), CallPiece::Arguments(arguments), CallPiece::End]
    }
}

/// Progress in the contents of a mark.
#[derive(Clone, Debug, Default)]
pub(super) enum Progress {
    /// No call of these contents has begun.
    #[default]
    Before,
    /// Within the arguments of a call.
    Arguments(ObjectScanner),
    /// After a call.
    After,
    /// The contents are read whole.
    Whole,
}

/// Beginning of a call.
#[derive(Debug, PartialEq)]
pub(super) enum Head {
    /// More text is needed.
    Incomplete,
    /// The text isn't a call that comes in pieces.
    Other,
    /// Call.
    Call {
        /// Name of the function.
        name: String,
        /// Number of bytes before the arguments.
        length: usize,
    },
}

impl Body {
    /// Returns whether calls of this form can come in pieces.
    pub(super) fn has_pieces(self) -> bool {
        matches!(self, Body::Json { .. } | Body::Arguments)
    }

    /// Parses the beginning of a call, up to its arguments.
    pub(super) fn head(self, text: &str) -> Head {
        let mut cursor = Cursor { text, at: 0 };
        let name = match self {
            Body::Json { .. } => cursor.json_head(),
            Body::Arguments => cursor.named_head(),
            _ => Err(Head::Other),
        };
        match name {
            Ok(name) => Head::Call { name, length: cursor.at },
            Err(head) => head,
        }
    }
}

/// Position in a text that may go on.
struct Cursor<'a> {
    text: &'a str,
    at: usize,
}

impl Cursor<'_> {
    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn space(&mut self) {
        self.at = self.text.len() - self.rest().trim_start().len();
    }

    /// Takes a literal after white space.
    fn take(&mut self, literal: &str) -> Result<(), Head> {
        self.space();
        match self.rest() {
            rest if rest.starts_with(literal) => {
                self.at += literal.len();
                Ok(())
            }
            rest if literal.starts_with(rest) => Err(Head::Incomplete),
            _ => Err(Head::Other),
        }
    }

    /// Takes a JSON string after white space.
    fn string(&mut self) -> Result<String, Head> {
        self.take("\"")?;
        let mut escaped = false;
        let end = self.rest().find(|c: char| {
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        let end = self.at + end.ok_or(Head::Incomplete)? + 1;
        let string = serde_json::from_str(&self.text[self.at - 1..end]).map_err(|_| Head::Other)?;
        self.at = end;
        Ok(string)
    }

    /// Takes `{"name": "f", "arguments": ` before an object, the first of a list or not.
    fn json_head(&mut self) -> Result<String, Head> {
        self.space();
        if self.rest().starts_with('[') {
            self.at += 1;
        }
        self.take("{")?;
        self.take("\"name\"")?;
        self.take(":")?;
        let name = self.string()?;
        self.take(",")?;
        let key = self.string()?;
        if key != "arguments" && key != "parameters" {
            return Err(Head::Other);
        }
        self.take(":")?;
        self.object().map(|()| name)
    }

    /// Takes `f[ARGS]` before an object.
    fn named_head(&mut self) -> Result<String, Head> {
        const MARK: &str = "[ARGS]";
        let mark = self.rest().find(MARK).ok_or(Head::Incomplete)?;
        let name = self.text[..mark].split("[CALL_ID]").next().unwrap_or_default().trim().to_owned();
        self.at = mark + MARK.len();
        self.object().map(|()| name)
    }

    /// Stops before an object.
    fn object(&mut self) -> Result<(), Head> {
        self.take("{")?;
        self.at -= 1;
        Ok(())
    }
}

/// Finds the end of a JSON object.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ObjectScanner {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl ObjectScanner {
    /// Reads more of the object; returns the length of its rest if it ends in `text`.
    pub(super) fn push(&mut self, text: &str) -> Option<usize> {
        for (at, byte) in text.bytes().enumerate() {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = self.in_string,
                b'"' => self.in_string = !self.in_string,
                _ if self.in_string => {}
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(at + 1);
                    }
                }
                _ => {}
            }
        }
        None
    }
}

/// Returns the position of the first of `marks`, or of an object, outside of JSON strings.
pub(super) fn next_mark(text: &str, marks: &[&str]) -> Option<usize> {
    let (mut in_string, mut escaped) = (false, false);
    for (at, letter) in text.char_indices() {
        match letter {
            _ if escaped => escaped = false,
            '\\' => escaped = in_string,
            '"' => in_string = !in_string,
            _ if in_string => {}
            _ if letter == '{' || marks.iter().any(|mark| text[at..].starts_with(mark)) => return Some(at),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_beginning_of_a_call_is_its_name() {
        let json = Body::BARE;
        let text = "\n[ {\"name\" : \"a\\\"b\", \"arguments\": {\"x\": 1}}";
        let length = text.find("{\"x\"").unwrap();
        for end in 0..=length {
            assert_eq!(json.head(&text[..end]), Head::Incomplete, "{:?}", &text[..end]);
        }
        assert_eq!(json.head(text), Head::Call { name: "a\"b".into(), length });
        for other in [
            "{\"arguments\": {}, \"name\": \"f\"}",
            "{\"name\": \"f\", \"arguments\": \"{}\"}",
            "{\"name\": \"f\"}",
            "{\"name\": 1",
            "no call",
        ] {
            assert_eq!(json.head(other), Head::Other, "{other}");
        }
        let named = "f[CALL_ID]abc[ARGS] {";
        assert_eq!(Body::Arguments.head(named), Head::Call { name: "f".into(), length: named.len() - 1 });
        assert_eq!(Body::Arguments.head(&named[..named.len() - 1]), Head::Incomplete);
        assert_eq!(Body::Arguments.head("f[ARGS]1"), Head::Other);
        assert_eq!(Body::Python.head("[f(a=1)]"), Head::Other);
    }

    #[test]
    fn objects_end_with_their_last_bracket() {
        let object = r#"{"a": "}\"", "b": [{"é": 1}, 2], "c": "\\"}"#;
        let text = format!("{object}, }}");
        assert_eq!(ObjectScanner::default().push(&text), Some(object.len()));
        let mut scanner = ObjectScanner::default();
        let ends: Vec<Option<usize>> = object.split_inclusive(' ').map(|piece| scanner.push(piece)).collect();
        assert!(ends.iter().rev().skip(1).all(Option::is_none) && ends.last().unwrap().is_some(), "{ends:?}");
        assert_eq!(next_mark("}, \"id\": \"{</x>\"}</x>", &["</x>"]), Some("}, \"id\": \"{</x>\"}".len()));
        assert_eq!(next_mark("}, {\"name\"", &["</x>"]), Some(3));
        assert_eq!(next_mark("}, \"id\": \"{", &["</x>"]), None);
    }
}
