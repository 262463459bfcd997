//! Jinja as Hugging Face transformers renders chat templates: Jinja2's language with `trim_blocks` and `lstrip_blocks`,
//! in its immutable sandbox, on Python's values.
//!
//! Templates are untrusted. Every evaluated expression costs a step, and every byte that is built or read is paid for
//! before the work is done, so that a [`Budget`] bounds the time and the memory of a rendering. Containers know how
//! deep they are nested, so that walking and dropping them needs little stack.
//!
//! | module | holds |
//! |---|---|
//! | `lexer` | tokens and white space control |
//! | `parser` | the syntax tree |
//! | `value` | Python's values: truth, equality, order, text |
//! | `eval` | statements and expressions |
//! | `filters` | filters and tests |
//! | `methods` | methods of strings, lists and dictionaries |
//! | `format` | `%` formatting, `str.format`, numbers as text |
//! | `json` | `json.dumps` |

mod eval;
mod format;
mod json;
mod lexer;
mod parser;
#[cfg(test)]
mod tests;
mod value;

use std::fmt;

use serde_json::Value as Json;

use super::stack::with_stack;

/// Stack of the thread that parses or renders a template.
const STACK: usize = 128 << 20;
/// Maximum size of a template in bytes.
const MAX_SOURCE: usize = 128 << 10;
/// Bytes that a rendering may build and read, in addition to its conversation.
const BUDGET: u64 = 256 << 20;
/// Number of times that a rendering may read its conversation.
const PASSES: u64 = 16;
/// Number of evaluated expressions of a rendering.
const STEPS: u64 = 10_000_000;
/// Maximum size of a rendered text in bytes.
const MAX_RENDERED: usize = 64 << 20;

/// Error of a template, with its line if known.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Error {
    line: Option<u32>,
    message: String,
}

impl Error {
    fn new(message: impl Into<String>) -> Self {
        Error { line: None, message: message.into() }
    }

    fn at(mut self, line: u32) -> Self {
        self.line.get_or_insert(line);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "line {line}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

type Result<T, E = Error> = std::result::Result<T, E>;

/// Parsed template.
pub(crate) struct Template {
    body: Vec<parser::Node>,
}

impl Template {
    /// Parses a template.
    pub fn new(source: &str) -> Result<Self> {
        if source.len() > MAX_SOURCE {
            return Err(Error::new(format!("it has {} bytes, but the maximum is {MAX_SOURCE}", source.len())));
        }
        on_large_stack(|| Ok(Template { body: parser::parse(source)? }))
    }

    /// Renders the template with an object of variables.
    pub fn render(&self, variables: &Json) -> Result<String> {
        self.render_within(variables, Budget::of)
    }

    fn render_within(&self, variables: &Json, budget: fn(&Json) -> Budget) -> Result<String> {
        on_large_stack(|| eval::render(&self.body, variables, budget(variables)))
    }
}

/// Runs work on a thread with a large stack, because parsing and rendering are recursive.
fn on_large_stack<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    with_stack(STACK, "it can't be rendered", work).unwrap_or_else(|problem| Err(Error::new(problem)))
}

/// Remaining work of a rendering.
struct Budget {
    steps: u64,
    bytes: u64,
    max_steps: u64,
    max_bytes: u64,
}

impl Budget {
    /// Creates the budget of a rendering with an object of variables.
    fn of(variables: &Json) -> Self {
        Budget::new(STEPS, text_bytes(variables).saturating_mul(PASSES).saturating_add(BUDGET))
    }

    fn new(max_steps: u64, max_bytes: u64) -> Self {
        Budget { steps: max_steps, bytes: max_bytes, max_steps, max_bytes }
    }

    fn step(&mut self) -> Result<()> {
        let steps = self.steps.checked_sub(1);
        self.steps = steps.ok_or_else(|| Error::new(format!("it takes more than {} steps", self.max_steps)))?;
        Ok(())
    }

    /// Pays for bytes that will be built or read.
    fn pay(&mut self, bytes: u64) -> Result<()> {
        let left = self.bytes.checked_sub(bytes);
        self.bytes =
            left.ok_or_else(|| Error::new(format!("it computes values of more than {} bytes", self.max_bytes)))?;
        Ok(())
    }

    fn pay_len(&mut self, bytes: usize) -> Result<()> {
        self.pay(bytes as u64)
    }
}

/// Returns the number of bytes of all strings.
fn text_bytes(json: &Json) -> u64 {
    match json {
        Json::String(text) => text.len() as u64,
        Json::Array(items) => items.iter().map(|item| 16 + text_bytes(item)).sum(),
        Json::Object(fields) => fields.iter().map(|(key, value)| 16 + key.len() as u64 + text_bytes(value)).sum(),
        _ => 8,
    }
}
