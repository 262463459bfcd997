//! Parts of an answer: reasoning within a model's marks, text, and function calls after the reasoning.

use super::text::overlap;
use super::tokenizer::Tokenizer;
use super::tools::{CallPiece, CallReader, CallSyntax, ToolCall, ToolTextPart};

/// Marks of a model's reasoning.
#[derive(Debug, PartialEq, Eq)]
pub struct ReasoningSyntax {
    open: &'static str,
    close: &'static str,
    /// Whether reasoning may follow text, and closing marks may stand alone.
    repeats: bool,
}

/// Known marks; the first whose closing mark a template contains applies.
static SYNTAXES: [ReasoningSyntax; 5] = [
    // Qwen3, DeepSeek-R1, SmolLM3, Nemotron, GLM, …
    ReasoningSyntax { open: "<think>", close: "</think>", repeats: false },
    // Magistral, Ministral 3
    ReasoningSyntax { open: "[THINK]", close: "[/THINK]", repeats: false },
    // Seed-OSS
    ReasoningSyntax { open: "<seed:think>", close: "</seed:think>", repeats: false },
    // Command A
    ReasoningSyntax { open: "<|START_THINKING|>", close: "<|END_THINKING|>", repeats: false },
    // Gemma 4
    ReasoningSyntax { open: "<|channel>thought", close: "<channel|>", repeats: true },
];

/// Marks of gpt-oss, whose answers are messages in channels.
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const CHANNEL_MARKS: [&str; 7] = [CHANNEL, MESSAGE, "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"];

/// Way in which a model separates the parts of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerSyntax {
    /// Text alone.
    Plain,
    /// Reasoning within marks, then text.
    Marked(&'static ReasoningSyntax),
    /// Messages in channels: gpt-oss.
    Channels,
}

impl AnswerSyntax {
    /// Returns the syntax of a model with this chat template.
    pub fn of(template: &str) -> Self {
        if template.contains("<|channel|>analysis<|message|>") {
            return AnswerSyntax::Channels;
        }
        match SYNTAXES.iter().find(|syntax| template.contains(syntax.close)) {
            Some(syntax) => AnswerSyntax::Marked(syntax),
            None => AnswerSyntax::Plain,
        }
    }

    /// Returns the token ids of the marks, which must be shown although they may be special tokens.
    pub fn marks(self, tokenizer: &Tokenizer) -> Vec<u32> {
        let marks: &[&str] = match self {
            AnswerSyntax::Plain => &[],
            AnswerSyntax::Marked(syntax) => &[syntax.open, syntax.close],
            AnswerSyntax::Channels => &CHANNEL_MARKS,
        };
        marks.iter().filter_map(|mark| tokenizer.id(mark)).collect()
    }

    /// Returns the syntax of calls where they are messages of their own, which need no marks.
    pub fn calls(self) -> Option<&'static CallSyntax> {
        (self == AnswerSyntax::Channels).then_some(&CallSyntax::MESSAGES)
    }

    /// Returns whether a prompt ends within the reasoning, because its template opens it.
    pub fn is_opened_by(self, prompt: &str) -> bool {
        match self {
            AnswerSyntax::Marked(syntax) => prompt.trim_end().ends_with(syntax.open),
            _ => false,
        }
    }
}

/// Part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum AnswerPart {
    /// Reasoning before the text.
    Reasoning(String),
    /// Text.
    Text(String),
    /// Function call.
    Call(ToolCall),
    /// Piece of a function call, of readers that give pieces.
    Piece(CallPiece),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Only white space so far.
    Before,
    Reasoning,
    Text,
    /// Header of a message in channels.
    Header,
    /// Arguments of a call in channels.
    Arguments,
}

/// Streaming parser of an answer.
#[derive(Clone, Debug)]
pub struct AnswerReader {
    syntax: AnswerSyntax,
    stage: Stage,
    calls: Option<CallReader>,
    /// Text whose meaning isn't certain yet.
    held: String,
    /// Function that a message in channels calls.
    function: String,
    /// White space is dropped until other text comes.
    trims: bool,
    /// The answer has to be a call: the rest of one that is cut is no text.
    forced: bool,
}

impl AnswerReader {
    /// Creates a parser at the beginning of an answer. `opened` tells that the prompt opens the reasoning.
    pub fn new(syntax: AnswerSyntax, opened: bool, calls: Option<CallReader>, forced: bool) -> Self {
        let stage = match syntax {
            AnswerSyntax::Plain => Stage::Text,
            AnswerSyntax::Marked(_) if opened => Stage::Reasoning,
            AnswerSyntax::Marked(_) => Stage::Before,
            AnswerSyntax::Channels => Stage::Header,
        };
        AnswerReader { syntax, stage, calls, held: String::new(), function: String::new(), trims: opened, forced }
    }

    /// Lets calls come in pieces where their syntax allows it. Calls in channels come whole.
    pub fn in_pieces(mut self) -> Self {
        self.calls = self.calls.map(CallReader::in_pieces);
        self
    }

    /// Adds a piece of text and returns the parts that are certain.
    pub fn push(&mut self, text: &str) -> Vec<AnswerPart> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.advance(&mut parts) {}
        parts
    }

    /// Returns the remaining parts at the end of the answer.
    pub fn finish(&mut self) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        let rest = std::mem::take(&mut self.held);
        match self.stage {
            Stage::Reasoning => self.unclosed(&rest, &mut parts),
            Stage::Arguments => self.call(&rest, &mut parts),
            Stage::Header => {}
            Stage::Before | Stage::Text => self.text(&rest, &mut parts),
        }
        if let Some(calls) = &mut self.calls {
            let forced = self.forced;
            let rest = calls.finish().into_iter().filter(|part| !forced || !matches!(part, ToolTextPart::Text(_)));
            parts.extend(rest.map(AnswerPart::from));
        }
        parts
    }

    /// Takes one step; returns whether another may follow.
    fn advance(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        match (self.stage, self.syntax) {
            (Stage::Before, AnswerSyntax::Marked(syntax)) => {
                let begun = self.held.trim_start();
                if let Some(rest) = begun.strip_prefix(syntax.open) {
                    (self.held, self.stage, self.trims) = (rest.to_owned(), Stage::Reasoning, true);
                    return true;
                }
                let undecided = syntax.open.starts_with(begun);
                self.stage = if undecided { Stage::Before } else { Stage::Text };
                !undecided
            }
            (Stage::Reasoning, AnswerSyntax::Marked(syntax)) => self.up_to(&[syntax.close], Stage::Text, parts),
            (Stage::Header, _) => {
                let Some(at) = self.held.find(MESSAGE) else { return false };
                let header: String = self.held.drain(..at + MESSAGE.len()).collect();
                // some models begin a second header in the first
                let channel = header.rsplit_once(CHANNEL).map_or("", |(_, channel)| channel.trim_start());
                self.function = match header.split("to=functions.").nth(1) {
                    Some(name) => name.split(|c: char| c.is_whitespace() || c == '<').next().unwrap_or_default().into(),
                    None => String::new(),
                };
                let is_offered = self.calls.as_ref().is_some_and(|calls| calls.offers(&self.function));
                self.stage = match channel.starts_with("analysis") {
                    // calls may be in any channel
                    _ if is_offered => Stage::Arguments,
                    true => Stage::Reasoning,
                    false if self.function.is_empty() => Stage::Text,
                    false => Stage::Arguments,
                };
                true
            }
            (Stage::Arguments, _) => {
                let ends = CHANNEL_MARKS.iter().filter_map(|mark| self.held.find(mark).map(|at| (at, mark.len())));
                let Some((at, length)) = ends.min() else { return false };
                let arguments: String = self.held.drain(..at).collect();
                self.held.drain(..length);
                self.call(&arguments, parts);
                self.stage = Stage::Header;
                true
            }
            (Stage::Text, AnswerSyntax::Marked(syntax)) if syntax.repeats => {
                let [open, close] = [syntax.open, syntax.close].map(|mark| self.held.find(mark));
                let opens = open.is_some_and(|open| close.is_none_or(|close| open < close));
                let next = if opens { Stage::Reasoning } else { Stage::Text };
                self.up_to(&[syntax.open, syntax.close], next, parts)
            }
            (Stage::Reasoning | Stage::Text, AnswerSyntax::Channels) => {
                self.up_to(&["<|end|>", "<|return|>", "<|start|>"], Stage::Header, parts)
            }
            _ => {
                let text = std::mem::take(&mut self.held);
                self.text(&text, parts);
                false
            }
        }
    }

    /// Passes text on up to the first mark, after which another stage begins.
    fn up_to(&mut self, marks: &[&str], next: Stage, parts: &mut Vec<AnswerPart>) -> bool {
        let found = marks.iter().filter_map(|mark| self.held.find(mark).map(|at| (at, mark.len()))).min();
        let waits = marks.iter().map(|mark| overlap(&self.held, mark)).max().unwrap_or(0);
        let certain = found.map_or(self.held.len() - waits.max(self.may_call()), |(at, _)| at);
        // white space before the mark isn't part of the text
        let end = self.held[..certain].trim_end().len();
        let text: String = self.held.drain(..end).collect();
        match self.stage {
            Stage::Reasoning => self.reasoning(text, parts),
            _ => self.text(&text, parts),
        }
        if let Some((at, length)) = found {
            self.held.drain(..at - end + length);
            (self.stage, self.trims) = (next, true);
        }
        found.is_some()
    }

    /// Returns the length of the end of the held reasoning that may be a call, because its mark begins there.
    fn may_call(&self) -> usize {
        let open = self.calls.as_ref().and_then(CallReader::open);
        match open.filter(|_| self.stage == Stage::Reasoning && self.syntax != AnswerSyntax::Channels) {
            Some(open) => self.held.find(open).map_or(overlap(&self.held, open), |at| self.held.len() - at),
            None => 0,
        }
    }

    /// Passes on reasoning without a closing mark. Calls at its end are calls: some models leave out the mark.
    fn unclosed(&mut self, rest: &str, parts: &mut Vec<AnswerPart>) {
        let calls = self.calls.as_ref();
        let at = calls.and_then(|calls| rest.find(calls.open()?));
        if let (Some(at), Some(mut calls)) = (at, calls.cloned()) {
            let read: Vec<_> = calls.push(&rest[at..]).into_iter().chain(calls.finish()).collect();
            if read.iter().all(|part| !matches!(part, ToolTextPart::Text(_))) {
                self.reasoning(rest[..at].trim_end().to_owned(), parts);
                parts.extend(read.into_iter().map(AnswerPart::from));
                return;
            }
        }
        self.reasoning(rest.to_owned(), parts);
    }

    fn trimmed<'t>(&mut self, text: &'t str) -> &'t str {
        let text = if self.trims { text.trim_start() } else { text };
        self.trims &= text.is_empty();
        text
    }

    fn reasoning(&mut self, text: String, parts: &mut Vec<AnswerPart>) {
        let text = self.trimmed(&text);
        if !text.is_empty() {
            parts.push(AnswerPart::Reasoning(text.to_owned()));
        }
    }

    fn text(&mut self, text: &str, parts: &mut Vec<AnswerPart>) {
        let text = self.trimmed(text);
        match &mut self.calls {
            Some(calls) => parts.extend(calls.push(text).into_iter().map(AnswerPart::from)),
            None if text.is_empty() => {}
            None => parts.push(AnswerPart::Text(text.to_owned())),
        }
    }

    /// Adds a call in channels; what isn't one stays text.
    fn call(&mut self, arguments: &str, parts: &mut Vec<AnswerPart>) {
        let name = std::mem::take(&mut self.function);
        let offered = self.calls.as_ref().is_some_and(|calls| calls.offers(&name));
        match serde_json::from_str(arguments.trim()) {
            Ok(arguments) if offered => parts.push(AnswerPart::Call(ToolCall { name, arguments })),
            _ if self.forced => {}
            _ => parts.push(AnswerPart::Text(arguments.to_owned())),
        }
    }
}

impl From<ToolTextPart> for AnswerPart {
    fn from(part: ToolTextPart) -> Self {
        match part {
            ToolTextPart::Text(text) => AnswerPart::Text(text),
            ToolTextPart::Call(call) => AnswerPart::Call(call),
            ToolTextPart::Piece(piece) => AnswerPart::Piece(piece),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tools::ToolFunction;
    use super::*;

    /// Returns the parts of a text fed in pieces, with neighbouring parts of a kind joined.
    fn read(reader: &AnswerReader, whole: &str, size: usize) -> Vec<AnswerPart> {
        let mut reader = reader.clone();
        let letters: Vec<char> = whole.chars().collect();
        let mut parts: Vec<AnswerPart> = Vec::new();
        let pieces = letters.chunks(size).map(|piece| reader.push(&piece.iter().collect::<String>()));
        let pieces: Vec<AnswerPart> = pieces.flatten().collect();
        for part in pieces.into_iter().chain(reader.finish()) {
            match (parts.last_mut(), part) {
                (Some(AnswerPart::Text(own)), AnswerPart::Text(new)) => own.push_str(&new),
                (Some(AnswerPart::Reasoning(own)), AnswerPart::Reasoning(new)) => own.push_str(&new),
                (_, part) => parts.push(part),
            }
        }
        parts
    }

    fn calls(template: &str) -> CallReader {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/model/tokenizer.json");
        CallReader::new(CallSyntax::of(template, &Tokenizer::open(&folder).unwrap()).unwrap(), &[now()])
    }

    fn now() -> ToolFunction {
        let now = json!({"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}});
        ToolFunction::of(&now).unwrap()
    }

    #[test]
    fn reasoning_is_told_from_text_however_it_is_cut() {
        let reasoning = |text: &str| AnswerPart::Reasoning(text.into());
        let text = |text: &str| AnswerPart::Text(text.into());
        let syntax = AnswerSyntax::of("{% if '</think>' in content %}");
        let [closed, opened] = [false, true].map(|opened| AnswerReader::new(syntax, opened, None, false));
        for size in [1, 3, 100] {
            let answer = read(&closed, "<think>\nLet me see.\n\nYes.\n</think>\n\nIt is.", size);
            assert_eq!(answer, [reasoning("Let me see.\n\nYes."), text("It is.")]);
            assert_eq!(read(&opened, "well\n</think>\nIt is.", size), [reasoning("well"), text("It is.")]);
            assert_eq!(read(&opened, "well, cut", size), [reasoning("well, cut")]);
            assert_eq!(read(&closed, " <thing> <think>", size), [text(" <thing> <think>")]);
            assert_eq!(read(&closed, "<think></think>x", size), [text("x")]);
        }
    }

    #[test]
    fn gemma_may_reason_again_and_leave_a_mark() {
        let syntax = AnswerSyntax::of("<|channel>thought <channel|>");
        let reader = AnswerReader::new(syntax, false, None, false);
        let parts = [AnswerPart::Reasoning("a".into()), AnswerPart::Text("b\n\nc".into())];
        for size in [1, 3, 1000] {
            for rest in ["", "<channel|>", "\n<|channel>thought\n<channel|>", "<|channel>thought\n<channel|><channel|>"]
            {
                let whole = format!("<|channel>thought\na\n<channel|>b\n\nc{rest}");
                assert_eq!(read(&reader, &whole, size), parts, "{whole}");
            }
        }
    }

    #[test]
    fn calls_are_read_after_the_reasoning_only() {
        let call = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
        let calls = calls("</think> <tool_call>");
        let reader = AnswerReader::new(AnswerSyntax::of("</think>"), false, Some(calls), false);
        for size in [1, 5, 1000] {
            let parts = read(&reader, &format!("<think>{call}?</think>\n{call}"), size);
            let called = AnswerPart::Call(ToolCall { name: "now".into(), arguments: serde_json::Map::new() });
            assert_eq!(parts, [AnswerPart::Reasoning(format!("{call}?")), called]);
        }
    }

    #[test]
    fn calls_at_the_end_of_unclosed_reasoning_are_calls() {
        let call = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
        let calls = calls("</think> <tool_call>");
        let reader = AnswerReader::new(AnswerSyntax::of("</think>"), true, Some(calls), false);
        for size in [1, 5, 1000] {
            let parts = read(&reader, &format!("Let me see.\n{call}\n"), size);
            let called = AnswerPart::Call(ToolCall { name: "now".into(), arguments: serde_json::Map::new() });
            assert_eq!(parts, [AnswerPart::Reasoning("Let me see.".into()), called]);
            for rest in [format!("{call} hm"), "<tool_call>\n{\"name\"".into(), "<tool".into()] {
                assert_eq!(read(&reader, &rest, size), [AnswerPart::Reasoning(rest)]);
            }
        }
    }

    #[test]
    fn a_forced_call_that_is_cut_is_no_text() {
        let reader = |forced| AnswerReader::new(AnswerSyntax::Plain, false, Some(calls("<tool_call>")), forced);
        let cut = "<tool_call>\n{\"name\": \"now\", \"argu";
        assert_eq!(read(&reader(true), cut, 4), []);
        assert_eq!(read(&reader(false), cut, 4), [AnswerPart::Text(cut.into())]);
    }

    #[test]
    fn channels_are_parts() {
        let syntax = AnswerSyntax::of("<|channel|>analysis<|message|>");
        let calls = CallReader::new(syntax.calls().unwrap(), &[now()]);
        let reader = AnswerReader::new(syntax, false, Some(calls), false);
        let whole = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary to=functions.now \
            <|constrain|>json<|message|>{\"a\": 1}<|call|>";
        let last = "<|channel|>final<|message|>It is.<|return|>";
        for size in [1, 7, 1000] {
            let parts = read(&reader, whole, size);
            let AnswerPart::Call(call) = &parts[1] else { panic!("{parts:?}") };
            assert_eq!((&parts[0], parts.len()), (&AnswerPart::Reasoning("Think.".into()), 2));
            assert_eq!((call.name.as_str(), call.arguments["a"].clone()), ("now", json!(1)));
            assert_eq!(read(&reader, last, size), [AnswerPart::Text("It is.".into())]);
            let called = [AnswerPart::Call(ToolCall { name: "now".into(), arguments: serde_json::Map::new() })];
            for header in ["<|channel|>analysis to=functions.now", " to=functions.now<|channel|>commentary json"] {
                assert_eq!(read(&reader, &format!("{header}<|message|>{{}}"), size), called, "{header}");
            }
            let twice = "<|channel|>commentary to=assistant<|channel|>analysis<|message|>Think.";
            assert_eq!(read(&reader, twice, size), [AnswerPart::Reasoning("Think.".into())]);
        }
    }
}
