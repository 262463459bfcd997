//! Calls of functions that a model writes into its text. Every family has its own way; the chat template and the
//! vocabulary tell which.
//!
//! | module | holds |
//! |---|---|
//! | `body` | what stands between the marks of a call: JSON, elements, Python |
//! | `grammar` | the form that a text is held to when it has to be a call |
//!
//! Text that looks like a call and can't be read, or that calls what wasn't offered, stays text: nothing is lost.

mod body;
mod grammar;
mod python;

use serde_json::{Map, Value as Json, json};

use super::text::overlap;
use super::tokenizer::Tokenizer;
use body::Body;

/// A function that a model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolFunction {
    /// Its name.
    pub name: String,
    /// JSON Schema of its arguments, an object.
    pub parameters: Json,
}

impl ToolFunction {
    /// Reads a tool of OpenAI's API: `{"type": "function", "function": {"name": …, "parameters": {…}}}`.
    ///
    /// # Errors
    /// When it is something else; the text says what.
    pub fn of(tool: &Json) -> Result<Self, String> {
        if let Some(kind) = tool["type"].as_str().filter(|kind| *kind != "function") {
            return Err(format!("a tool of type {kind:?}: only functions are understood"));
        }
        let function = &tool["function"];
        let name = function["name"].as_str().filter(|name| !name.is_empty()).ok_or("a tool without `function.name`")?;
        let parameters = match &function["parameters"] {
            Json::Null => json!({"type": "object", "properties": {}}),
            parameters @ Json::Object(_) => parameters.clone(),
            _ => return Err(format!("the `parameters` of {name:?} are no JSON Schema of an object")),
        };
        Ok(ToolFunction { name: name.to_owned(), parameters })
    }
}

/// A call.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// The function's name.
    pub name: String,
    /// Its arguments.
    pub arguments: Map<String, Json>,
}

/// How a model writes calls.
#[derive(Debug, PartialEq)]
pub struct CallSyntax {
    /// What a call, or a list of calls, begins with. Where there is none, the answer as a whole is a call or isn't.
    open: Option<&'static str>,
    /// What it ends with, if anything does before the text ends.
    close: Option<&'static str>,
    /// What stands between.
    body: Body,
    /// White space around the body.
    space: &'static str,
    /// What tells it: all of these are in the template, or name tokens of the vocabulary.
    told_by: &'static [&'static str],
}

/// The known ones; the first that fits counts.
static SYNTAXES: [CallSyntax; 7] = [
    // LFM2 and LFM2.5
    CallSyntax {
        open: Some("<|tool_call_start|>"),
        close: Some("<|tool_call_end|>"),
        body: Body::Python,
        space: "",
        told_by: &["<|tool_call_start|>"],
    },
    // Qwen3.5, Qwen3-Coder
    CallSyntax {
        open: Some("<tool_call>"),
        close: Some("</tool_call>"),
        body: Body::Elements,
        space: "\n",
        told_by: &["<tool_call>", "<function=", "<parameter="],
    },
    // Hermes, Qwen2.5, Qwen3, SmolLM3, Granite 4
    CallSyntax {
        open: Some("<tool_call>"),
        close: Some("</tool_call>"),
        body: Body::Json { arguments: "arguments", list: false },
        space: "\n",
        told_by: &["<tool_call>"],
    },
    // Phi-4-mini
    CallSyntax {
        open: Some("<|tool_call|>"),
        close: Some("<|/tool_call|>"),
        body: Body::Json { arguments: "arguments", list: true },
        space: "",
        told_by: &["<|tool_call|>", "<|/tool_call|>"],
    },
    // Granite 3
    CallSyntax {
        open: Some("<|tool_call|>"),
        close: None,
        body: Body::Json { arguments: "arguments", list: true },
        space: "",
        told_by: &["<|tool_call|>"],
    },
    // Mistral
    CallSyntax {
        open: Some("[TOOL_CALLS]"),
        close: None,
        body: Body::Json { arguments: "arguments", list: true },
        space: "",
        told_by: &["[TOOL_CALLS]"],
    },
    // Llama 3.1 to 3.3
    CallSyntax {
        open: None,
        close: None,
        body: Body::Json { arguments: "parameters", list: false },
        space: "",
        told_by: &["<|python_tag|>", "\"parameters\""],
    },
];

impl CallSyntax {
    /// The way of a model with this chat template and vocabulary, if it is known.
    pub fn of(template: &str, tokenizer: &Tokenizer) -> Option<&'static Self> {
        let told = |mark: &&str| template.contains(*mark) || tokenizer.id(mark).is_some();
        // a vocabulary may have marks that its model was never taught; then the template has none of its own
        let by_template = SYNTAXES.iter().find(|syntax| syntax.told_by.iter().all(|mark| template.contains(mark)));
        by_template.or_else(|| SYNTAXES.iter().find(|syntax| syntax.told_by.iter().all(told)))
    }

    /// Tokens of the marks. As special tokens they would give no text.
    pub fn marks(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        self.open.iter().chain(&self.close).filter_map(|mark| tokenizer.id(mark)).collect()
    }

    /// A string that ends a text after its first call, where calls have an end.
    pub fn end(&self) -> Option<&'static str> {
        self.close
    }
}

/// A part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum ToolTextPart {
    /// Text.
    Text(String),
    /// A call.
    Call(ToolCall),
}

/// Takes calls out of a text that comes in pieces.
#[derive(Clone, Debug)]
pub struct CallReader {
    syntax: &'static CallSyntax,
    functions: Vec<ToolFunction>,
    /// Text that may be, or become, a call, or white space before one.
    held: String,
    /// `held` begins with the opening mark.
    inside: bool,
    /// Something came out already.
    begun: bool,
    /// A call did.
    called: bool,
}

impl CallReader {
    /// At the beginning of an answer by a model that was offered `functions`.
    pub fn new(syntax: &'static CallSyntax, functions: &[ToolFunction]) -> Self {
        CallReader {
            syntax,
            functions: functions.to_vec(),
            held: String::new(),
            inside: false,
            begun: false,
            called: false,
        }
    }

    /// What the next piece of text makes certain.
    pub fn push(&mut self, text: &str) -> Vec<ToolTextPart> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.advance(&mut parts) {}
        self.begun |= !parts.is_empty();
        parts
    }

    /// The rest, at the end of the answer.
    pub fn finish(&mut self) -> Vec<ToolTextPart> {
        let mut parts = Vec::new();
        let rest = std::mem::take(&mut self.held);
        let body = match self.syntax.open {
            Some(open) if self.inside => rest.strip_prefix(open),
            None if !self.begun => Some(rest.as_str()),
            _ => None,
        };
        match body.and_then(|body| self.calls(body)) {
            Some(calls) => parts.extend(calls.into_iter().map(ToolTextPart::Call)),
            // a line break after the last call says nothing
            None if self.called && rest.trim().is_empty() => {}
            None => text(rest, &mut parts),
        }
        self.inside = false;
        parts
    }

    /// Takes one step; gives whether another one may follow.
    fn advance(&mut self, parts: &mut Vec<ToolTextPart>) -> bool {
        let Some(open) = self.syntax.open else {
            // a whole answer: once it doesn't begin as a call does, it isn't one
            if self.begun || self.held.trim_start().chars().next().is_some_and(|first| first != '{' && first != '[') {
                text(std::mem::take(&mut self.held), parts);
            }
            return false;
        };
        if !self.inside {
            let Some(start) = self.held.find(open) else {
                let waits = overlap(&self.held, open);
                let certain = self.held[..self.held.len() - waits].trim_end().len();
                text(self.held.drain(..certain).collect(), parts);
                return false;
            };
            let before = self.held[..start].trim_end().len();
            text(self.held[..before].to_owned(), parts);
            self.held.drain(..start);
            self.inside = true;
        }
        let Some(close) = self.syntax.close else { return false };
        let Some(end) = self.held.find(close) else { return false };
        let whole: String = self.held.drain(..end + close.len()).collect();
        self.inside = false;
        match self.calls(&whole[open.len()..end]) {
            Some(calls) => {
                self.called = true;
                parts.extend(calls.into_iter().map(ToolTextPart::Call));
            }
            None => text(whole, parts),
        }
        true
    }

    /// The calls of a body, if it has some and all are of functions that were offered.
    fn calls(&self, body: &str) -> Option<Vec<ToolCall>> {
        let calls = self.syntax.body.read(body, &self.functions)?;
        let offered = |call: &ToolCall| self.functions.iter().any(|function| function.name == call.name);
        (!calls.is_empty() && calls.iter().all(offered)).then_some(calls)
    }
}

/// Adds text, if there is any, to what came before.
fn text(new: String, parts: &mut Vec<ToolTextPart>) {
    match parts.last_mut() {
        _ if new.is_empty() => {}
        Some(ToolTextPart::Text(text)) => text.push_str(&new),
        _ => parts.push(ToolTextPart::Text(new)),
    }
}

#[cfg(test)]
mod tests;
