//! Token cursor of the parser.

use super::Parsed;
use crate::text::lexer::{Lexeme, TextPosition};

/// A cursor over tokens; the rules of the grammar are its methods, by file.
pub(super) struct Parser {
    tokens: Vec<(Lexeme, TextPosition)>,
    at: usize,
}

impl Parser {
    pub(super) fn new(tokens: Vec<(Lexeme, TextPosition)>) -> Self {
        Parser { tokens, at: 0 }
    }

    pub(super) fn peek(&self) -> &Lexeme {
        self.token(self.at)
    }

    /// The token after the next.
    pub(super) fn peek_second(&self) -> &Lexeme {
        self.token(self.at + 1)
    }

    fn token(&self, at: usize) -> &Lexeme {
        self.tokens.get(at).map_or(&Lexeme::End, |(token, _)| token)
    }

    /// Position of the next token.
    pub(super) fn place(&self) -> TextPosition {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(TextPosition { line: 1, column: 1 }, |(_, place)| *place)
    }

    pub(super) fn next(&mut self) -> Lexeme {
        let token = self.peek().clone();
        self.at += 1;
        token
    }

    /// Error for an unexpected token.
    pub(super) fn wanted<T>(&self, wanted: &str) -> Parsed<T> {
        let found = match self.peek() {
            Lexeme::Word(text) | Lexeme::Number(text) => format!("`{text}`"),
            Lexeme::Quoted(text) => format!("{text:?}"),
            Lexeme::Arrow => "`->`".into(),
            Lexeme::Mark(c) => format!("`{c}`"),
            Lexeme::End => "the end".into(),
        };
        Err(format!("found {found}, expected {wanted}"))
    }

    /// Consumes a token if it is the next.
    fn take_token(&mut self, token: &Lexeme) -> bool {
        let is = self.peek() == token;
        self.at += usize::from(is);
        is
    }

    /// Consumes a mark if it is the next token.
    pub(super) fn take(&mut self, mark: char) -> bool {
        self.take_token(&Lexeme::Mark(mark))
    }

    pub(super) fn mark(&mut self, mark: char) -> Parsed<()> {
        if self.take(mark) { Ok(()) } else { self.wanted(&format!("`{mark}`")) }
    }

    /// `->`
    pub(super) fn arrow(&mut self) -> Parsed<()> {
        if self.take_token(&Lexeme::Arrow) { Ok(()) } else { self.wanted("`->`") }
    }

    pub(super) fn is_word(&self, word: &str) -> bool {
        matches!(self.peek(), Lexeme::Word(text) if text == word)
    }

    /// Consumes a word if it is the next token.
    pub(super) fn take_word(&mut self, word: &str) -> bool {
        let is = self.is_word(word);
        self.at += usize::from(is);
        is
    }

    pub(super) fn word(&mut self, word: &str) -> Parsed<()> {
        if self.take_word(word) { Ok(()) } else { self.wanted(&format!("`{word}`")) }
    }

    pub(super) fn name(&mut self) -> Parsed<String> {
        match self.peek() {
            Lexeme::Word(name) | Lexeme::Quoted(name) => {
                let name = name.clone();
                self.at += 1;
                Ok(name)
            }
            _ => self.wanted("a name"),
        }
    }

    pub(super) fn number<T: std::str::FromStr>(&mut self) -> Parsed<T> {
        if let Lexeme::Number(text) = self.peek()
            && let Ok(number) = text.trim_start_matches('+').parse()
        {
            self.at += 1;
            return Ok(number);
        }
        self.wanted("a whole number in range")
    }

    /// `item, item, …` up to and including `close`.
    pub(super) fn list<T>(&mut self, close: char, mut item: impl FnMut(&mut Self) -> Parsed<T>) -> Parsed<Vec<T>> {
        let mut items = Vec::new();
        while !self.take(close) {
            if !items.is_empty() {
                self.mark(',')?;
            }
            items.push(item(self)?);
        }
        Ok(items)
    }

    /// `key = …`
    pub(super) fn key(&mut self) -> Parsed<String> {
        let key = self.name()?;
        self.mark('=')?;
        Ok(key)
    }
}
