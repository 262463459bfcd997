//! Function calls in generated text. The syntax differs by family; chat template and vocabulary tell which one a model
//! uses.
//!
//! | module | holds |
//! |---|---|
//! | `body` | contents between the marks of a call: JSON, elements, Python |
//! | `braces`, `python`, `reader` | parsers of calls in syntaxes that aren't JSON |
//! | `grammar` | grammar that forces a text to be a call |
//! | `pieces` | calls whose arguments come as they are generated |
//!
//! Text that looks like a call but can't be parsed, or calls a function that wasn't offered, stays text.

mod body;
mod braces;
mod grammar;
mod pieces;
mod python;
mod reader;

use serde_json::{Map, Value as Json, json};

use super::text::overlap;
use super::tokenizer::Tokenizer;
use body::Body;
use braces::QUOTE;
pub use pieces::CallPiece;
use pieces::{Head, ObjectScanner, Progress, next_mark};

/// Function that a model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolFunction {
    /// Name of the function.
    pub name: String,
    /// JSON Schema of its arguments, an object.
    pub parameters: Json,
}

impl ToolFunction {
    /// Reads a tool of OpenAI's API: `{"type": "function", "function": {"name": …, "parameters": {…}}}`.
    ///
    /// # Errors
    /// If it is no such object, with the reason.
    pub fn of(tool: &Json) -> Result<Self, String> {
        if let Some(kind) = tool["type"].as_str().filter(|kind| *kind != "function") {
            return Err(format!("a tool of type {kind:?}: only functions are understood"));
        }
        let function = &tool["function"];
        let name = function["name"].as_str().filter(|name| !name.is_empty()).ok_or("a tool without `function.name`")?;
        let parameters = match &function["parameters"] {
            Json::Null => json!({"type": "object", "properties": {}, "additionalProperties": false}),
            parameters @ Json::Object(_) => parameters.clone(),
            _ => return Err(format!("the `parameters` of {name:?} are no JSON Schema of an object")),
        };
        Ok(ToolFunction { name: name.to_owned(), parameters })
    }
}

/// Function call.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// Name of the function.
    pub name: String,
    /// Arguments of the call.
    pub arguments: Map<String, Json>,
}

/// Syntax of a model's calls.
#[derive(Debug, PartialEq)]
pub struct CallSyntax {
    /// Opening mark of a call or a list of calls; `None` if only a whole answer can be a call.
    open: Option<&'static str>,
    /// Closing mark; `None` if a call extends to the end of the text.
    close: Option<&'static str>,
    /// Form of the contents.
    body: Body,
    /// White space around the contents.
    space: &'static str,
    /// Marks that identify the syntax: each is in the template or a token of the vocabulary.
    marks: &'static [&'static str],
}

/// Known syntaxes; the first match applies.
static SYNTAXES: [CallSyntax; 12] = [
    // LFM2 and LFM2.5
    CallSyntax {
        open: Some("<|tool_call_start|>"),
        close: Some("<|tool_call_end|>"),
        body: Body::Python,
        space: "",
        marks: &["<|tool_call_start|>"],
    },
    // Qwen3.5, Qwen3-Coder
    CallSyntax {
        open: Some("<tool_call>"),
        close: Some("</tool_call>"),
        body: Body::Elements,
        space: "\n",
        marks: &["<tool_call>", "<function=", "<parameter="],
    },
    // Seed-OSS
    CallSyntax {
        open: Some("<seed:tool_call>"),
        close: Some("</seed:tool_call>"),
        body: Body::Elements,
        space: "\n",
        marks: &["<seed:tool_call>", "<function=", "<parameter="],
    },
    // Command R7B
    CallSyntax {
        open: Some("<|START_ACTION|>"),
        close: Some("<|END_ACTION|>"),
        body: Body::Json { name: "tool_name", arguments: "parameters", list: true },
        space: "",
        marks: &["<|START_ACTION|>", "<|END_ACTION|>"],
    },
    // Gemma 4
    CallSyntax {
        open: Some("<|tool_call>"),
        close: Some("<tool_call|>"),
        body: Body::Braces,
        space: "",
        marks: &["<|tool_call>", "<tool_call|>"],
    },
    // GLM 4.5 and later
    CallSyntax {
        open: Some("<tool_call>"),
        close: Some("</tool_call>"),
        body: Body::Keys,
        space: "",
        marks: &["<tool_call>", "<arg_key>", "<arg_value>"],
    },
    // Hermes, Qwen2.5, Qwen3, SmolLM3, Granite 4
    CallSyntax {
        open: Some("<tool_call>"),
        close: Some("</tool_call>"),
        body: Body::Json { name: "name", arguments: "arguments", list: false },
        space: "\n",
        marks: &["<tool_call>"],
    },
    // Phi-4-mini
    CallSyntax {
        open: Some("<|tool_call|>"),
        close: Some("<|/tool_call|>"),
        body: Body::Json { name: "name", arguments: "arguments", list: true },
        space: "",
        marks: &["<|tool_call|>", "<|/tool_call|>"],
    },
    // Granite 3
    CallSyntax {
        open: Some("<|tool_call|>"),
        close: None,
        body: Body::Json { name: "name", arguments: "arguments", list: true },
        space: "",
        marks: &["<|tool_call|>"],
    },
    // Mistral Small 3.2, Devstral, Ministral 3
    CallSyntax {
        open: Some("[TOOL_CALLS]"),
        close: None,
        body: Body::Arguments,
        space: "",
        marks: &["[TOOL_CALLS]", "[ARGS]"],
    },
    // Mistral
    CallSyntax {
        open: Some("[TOOL_CALLS]"),
        close: None,
        body: Body::Json { name: "name", arguments: "arguments", list: true },
        space: "",
        marks: &["[TOOL_CALLS]"],
    },
    // Llama 3.1 to 3.3
    CallSyntax {
        open: None,
        close: None,
        body: Body::Json { name: "name", arguments: "parameters", list: false },
        space: "",
        marks: &["<|python_tag|>", "\"parameters\""],
    },
];

impl CallSyntax {
    /// Calls that are messages of their own: gpt-oss. Such a message ends with the mark, which text doesn't contain.
    pub(super) const MESSAGES: CallSyntax =
        CallSyntax { open: Some("<|call|>"), close: None, body: Body::BARE, space: "", marks: &[] };

    /// Returns the syntax of a model with this chat template and vocabulary, if known.
    pub fn of(template: &str, tokenizer: &Tokenizer) -> Option<&'static Self> {
        let told = |mark: &&str| template.contains(*mark) || tokenizer.id(mark).is_some();
        // a vocabulary may have marks that the model wasn't trained on; its template lacks them
        let by_template = SYNTAXES.iter().find(|syntax| syntax.marks.iter().all(|mark| template.contains(mark)));
        by_template.or_else(|| SYNTAXES.iter().find(|syntax| syntax.marks.iter().all(told)))
    }

    /// Returns the token ids of the marks, which must be shown although they are special tokens.
    pub fn marks(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let inside = match self.body {
            Body::Arguments => &["[ARGS]", "[CALL_ID]"][..],
            Body::Braces => &[QUOTE],
            _ => &[],
        };
        self.open.iter().chain(&self.close).chain(inside).filter_map(|mark| tokenizer.id(mark)).collect()
    }

    /// Returns the string that ends a text after its first call, if calls have a closing mark.
    pub fn end(&self) -> Option<&'static str> {
        self.close
    }
}

/// Part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum ToolTextPart {
    /// Plain text.
    Text(String),
    /// Function call.
    Call(ToolCall),
    /// Piece of a function call, of readers that give pieces.
    Piece(CallPiece),
}

/// Streaming parser that separates calls from text.
#[derive(Clone, Debug)]
pub struct CallReader {
    syntax: &'static CallSyntax,
    functions: Vec<ToolFunction>,
    /// Text that may become a call, or white space before one.
    held: String,
    /// Whether `held` begins with the opening mark.
    inside: bool,
    /// Whether any part was returned.
    begun: bool,
    /// Whether a call was returned.
    called: bool,
    /// Progress in a call that comes in pieces; `None` if all calls come whole.
    pieces: Option<Progress>,
    /// Whether the answer ends with its first call.
    single: bool,
    /// Whether that call was returned.
    over: bool,
}

impl CallReader {
    /// Creates a parser for an answer of a model that was offered `functions`.
    pub fn new(syntax: &'static CallSyntax, functions: &[ToolFunction]) -> Self {
        CallReader {
            syntax,
            functions: functions.to_vec(),
            held: String::new(),
            inside: false,
            begun: false,
            called: false,
            pieces: None,
            single: false,
            over: false,
        }
    }

    /// Drops everything after the first call.
    pub fn single(mut self) -> Self {
        self.single = true;
        self
    }

    /// Lets calls come in pieces where the syntax allows it. A call that is cut or malformed has begun then.
    pub fn in_pieces(mut self) -> Self {
        self.pieces = self.syntax.body.has_pieces().then(Progress::default);
        self
    }

    /// Returns the opening mark of calls, if they have one.
    pub(super) fn open(&self) -> Option<&'static str> {
        self.syntax.open
    }

    /// Returns whether a function was offered.
    pub fn offers(&self, name: &str) -> bool {
        self.functions.iter().any(|function| function.name == name)
    }

    /// Adds a piece of text and returns the parts that are certain.
    pub fn push(&mut self, text: &str) -> Vec<ToolTextPart> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.advance(&mut parts) {}
        self.begun |= !parts.is_empty();
        self.end_after_call(&mut parts);
        parts
    }

    /// Returns the remaining parts at the end of the answer.
    pub fn finish(&mut self) -> Vec<ToolTextPart> {
        let mut parts = Vec::new();
        let mut rest = std::mem::take(&mut self.held);
        if matches!(self.pieces, Some(Progress::Arguments(_) | Progress::After)) {
            // marks of a call that was returned
            rest.clear();
        }
        let calls = match self.syntax.open {
            Some(open) if self.inside => self.calls(rest.strip_prefix(open).unwrap_or(&rest)),
            None if !self.begun => self.calls(&rest),
            // some models leave out the marks
            Some(_) if !self.begun => {
                self.offered(Body::BARE.read(&rest, &self.functions)).filter(|calls| calls.len() == 1)
            }
            _ => None,
        };
        match calls {
            Some(calls) => parts.extend(calls.into_iter().map(ToolTextPart::Call)),
            // white space after the last call is dropped
            None if self.called && rest.trim().is_empty() => {}
            None => text(rest, &mut parts),
        }
        self.inside = false;
        self.end_after_call(&mut parts);
        parts
    }

    /// Drops the parts after the first call where only one is allowed.
    fn end_after_call(&mut self, parts: &mut Vec<ToolTextPart>) {
        if !self.single {
            return;
        }
        if self.over {
            parts.clear();
        }
        let is_end = |part: &ToolTextPart| matches!(part, ToolTextPart::Call(_) | ToolTextPart::Piece(CallPiece::End));
        if let Some(at) = parts.iter().position(is_end) {
            parts.truncate(at + 1);
            self.over = true;
        }
    }

    /// Takes one step; returns whether another may follow.
    fn advance(&mut self, parts: &mut Vec<ToolTextPart>) -> bool {
        let Some(open) = self.syntax.open else {
            // an answer that doesn't begin like a call isn't one
            if self.begun || self.held.trim_start().chars().next().is_some_and(|first| first != '{' && first != '[') {
                text(std::mem::take(&mut self.held), parts);
            }
            return false;
        };
        // the mark that models leave out
        let bare = if self.syntax.body == Body::Elements { "<function=" } else { open };
        if !self.inside {
            if !self.begun && may_be_bare(&self.held) {
                return false;
            }
            let Some(start) = [open, bare].iter().filter_map(|mark| self.held.find(mark)).min() else {
                let waits = overlap(&self.held, open).max(overlap(&self.held, bare));
                let certain = self.held[..self.held.len() - waits].trim_end().len();
                text(self.held.drain(..certain).collect(), parts);
                return false;
            };
            let before = self.held[..start].trim_end().len();
            text(self.held[..before].to_owned(), parts);
            self.held.drain(..start);
            self.inside = true;
        }
        if let Some(more) = self.advance_in_pieces(open, parts) {
            return more;
        }
        let Some(close) = self.syntax.close else { return false };
        let Some(end) = self.held.find(close) else { return false };
        let whole: String = self.held.drain(..end + close.len()).collect();
        self.leave();
        match self.calls(whole[..end].strip_prefix(open).unwrap_or(&whole[..end])) {
            Some(calls) => {
                self.called = true;
                parts.extend(calls.into_iter().map(ToolTextPart::Call));
            }
            None => text(whole, parts),
        }
        true
    }

    /// Takes one step within a mark whose calls come in pieces; `None` if they come whole.
    fn advance_in_pieces(&mut self, open: &str, parts: &mut Vec<ToolTextPart>) -> Option<bool> {
        match self.pieces.as_mut()? {
            Progress::Whole => None,
            Progress::Before => self.begin_call(open.len(), parts),
            Progress::Arguments(scanner) => {
                let end = scanner.push(&self.held);
                let arguments: String = self.held.drain(..end.unwrap_or(self.held.len())).collect();
                if !arguments.is_empty() {
                    parts.push(ToolTextPart::Piece(CallPiece::Arguments(arguments)));
                }
                if end.is_some() {
                    parts.push(ToolTextPart::Piece(CallPiece::End));
                    self.pieces = Some(Progress::After);
                }
                Some(end.is_some())
            }
            Progress::After => {
                let marks: Vec<&str> = [open].into_iter().chain(self.syntax.close).collect();
                let Some(at) = next_mark(&self.held, &marks) else { return Some(false) };
                self.held.drain(..at);
                if let Some(close) = self.syntax.close.filter(|close| self.held.starts_with(close)) {
                    self.held.drain(..close.len());
                    self.leave();
                    return Some(true);
                }
                let mark = if self.held.starts_with(open) { open.len() } else { 0 };
                self.begin_call(mark, parts)
            }
        }
    }

    /// Begins a call in pieces after an opening mark of some bytes; `None` if it comes whole.
    fn begin_call(&mut self, mark: usize, parts: &mut Vec<ToolTextPart>) -> Option<bool> {
        match self.syntax.body.head(&self.held[mark..]) {
            Head::Incomplete => Some(false),
            Head::Call { name, length } if self.offers(&name) => {
                self.held.drain(..mark + length);
                self.called = true;
                self.pieces = Some(Progress::Arguments(ObjectScanner::default()));
                parts.push(ToolTextPart::Piece(CallPiece::Begin(name)));
                Some(true)
            }
            _ => {
                self.pieces = Some(Progress::Whole);
                None
            }
        }
    }

    /// Leaves a mark.
    fn leave(&mut self) {
        self.inside = false;
        self.pieces = self.pieces.take().map(|_| Progress::Before);
    }

    /// Returns the calls of a body if it parses and all functions were offered.
    fn calls(&self, body: &str) -> Option<Vec<ToolCall>> {
        self.offered(self.syntax.body.read(body, &self.functions))
    }

    /// Returns calls if there are any and all are of functions that were offered.
    fn offered(&self, calls: Option<Vec<ToolCall>>) -> Option<Vec<ToolCall>> {
        calls.filter(|calls| !calls.is_empty() && calls.iter().all(|call| self.offers(&call.name)))
    }
}

/// Returns whether a text may become nothing but a JSON object with a name.
fn may_be_bare(text: &str) -> bool {
    const BEGINNING: &str = "{\"name\":\"";
    let text: String = text.chars().filter(|c| !c.is_whitespace()).take(BEGINNING.len()).collect();
    !text.is_empty() && (BEGINNING.starts_with(&text) || text.starts_with(BEGINNING))
}

/// Appends text to the last part, or as a new part.
fn text(new: String, parts: &mut Vec<ToolTextPart>) {
    match parts.last_mut() {
        _ if new.is_empty() => {}
        Some(ToolTextPart::Text(text)) => text.push_str(&new),
        _ => parts.push(ToolTextPart::Text(new)),
    }
}

#[cfg(test)]
mod tests;
