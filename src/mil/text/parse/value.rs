//! Parser of types and constants.

use std::sync::Arc;

use super::{DEPTH, Parsed, Parser};
use crate::constant::{Constant, Content, Data};
use crate::text::lexer::Lexeme;
use crate::text::literal::pack;
use crate::types::{DataType, Dim, Symbol, TensorType, ValueType};
use anec_base::{Diagnostic, Error, Fault, Result as OwnResult};

/// Content that the text form doesn't contain.
struct Elided {
    length: u64,
}

impl Content for Elided {
    fn length(&self) -> u64 {
        self.length
    }

    fn granule(&self) -> u64 {
        1
    }

    fn read(&self, _offset: u64, _out: &mut [u8]) -> OwnResult<()> {
        Err(Error::from(ElidedError { length: self.length }))
    }
}

/// Error of reading content that the text form doesn't contain.
#[derive(Debug, thiserror::Error)]
#[error("the text form holds only the length of this constant ({length} bytes), not its data")]
struct ElidedError {
    length: u64,
}

impl Diagnostic for ElidedError {
    fn fault(&self) -> Fault {
        Fault::Source
    }
}

impl Parser {
    pub(super) fn value_type(&mut self) -> Parsed<ValueType> {
        if self.take_word("opaque") {
            self.mark('(')?;
            let text = self.name()?;
            self.mark(')')?;
            return Ok(ValueType::Opaque(text));
        }
        if self.take_word("state") {
            self.mark('<')?;
            let ty = self.tensor_type()?;
            self.mark('>')?;
            return Ok(ValueType::State(ty));
        }
        Ok(ValueType::Tensor(self.tensor_type()?))
    }

    fn tensor_type(&mut self) -> Parsed<TensorType> {
        if !self.take_word("tensor") {
            return Ok(TensorType::scalar(self.data_type()?));
        }
        self.mark('<')?;
        let dtype = self.data_type()?;
        self.mark(',')?;
        self.mark('[')?;
        let shape = self.list(']', Parser::dimension)?;
        self.mark('>')?;
        Ok(TensorType { dtype, shape })
    }

    fn data_type(&mut self) -> Parsed<DataType> {
        let dtype = match self.peek() {
            Lexeme::Word(name) => DataType::from_name(name),
            _ => None,
        };
        match dtype {
            Some(dtype) => {
                self.next();
                Ok(dtype)
            }
            None => self.wanted("a type"),
        }
    }

    /// `4`, `T`, `2*T+1` or `?`
    fn dimension(&mut self) -> Parsed<Dim> {
        if self.take('?') {
            return Ok(Dim::Unknown);
        }
        let mut factor = 1;
        if let Lexeme::Number(text) = self.peek() {
            if text.parse().is_ok_and(|size: u64| size > Dim::MAX) {
                return self.wanted(&format!("at most {}", Dim::MAX));
            }
            factor = self.number()?;
            if !self.take('*') {
                return Ok(Dim::Fixed(factor));
            }
        }
        let symbol = Symbol::new(&self.name()?);
        let offset = match self.peek() {
            Lexeme::Number(text) if text.starts_with(['+', '-']) => self.number()?,
            _ => 0,
        };
        if factor == 0 { Ok(Dim::Fixed(0)) } else { Ok(Dim::Symbolic { factor, symbol, offset }) }
    }

    /// `type(elements)`
    pub(super) fn constant(&mut self) -> Parsed<Constant> {
        let ty = self.tensor_type()?;
        self.mark('(')?;
        let data = self.data(ty.dtype)?;
        self.mark(')')?;
        Ok(Constant { ty, data })
    }

    /// `<N bytes>`, `0x…`, or elements in nested lists.
    fn data(&mut self, dtype: DataType) -> Parsed<Data> {
        if self.take('<') {
            let length = self.number()?;
            self.word("bytes")?;
            self.mark('>')?;
            return Ok(Data::Content(Arc::new(Elided { length })));
        }
        if let Lexeme::Number(text) = self.peek()
            && let Some(digits) = text.strip_prefix("0x")
        {
            let bytes = hexadecimal(digits).ok_or_else(|| format!("`{text}` has no two digits for each byte"))?;
            self.next();
            return Ok(Data::Literal(bytes.into()));
        }
        let mut texts = Vec::new();
        self.elements(0, &mut |token| match (token, dtype) {
            (Lexeme::Quoted(text), DataType::String) => {
                texts.push(text);
                Ok(())
            }
            (_, DataType::String) => Err("expected text in quotes".to_owned()),
            (Lexeme::Number(text) | Lexeme::Word(text), _) => {
                texts.push(text);
                Ok(())
            }
            _ => Err("expected a number".to_owned()),
        })?;
        match dtype {
            DataType::String => Ok(Data::Strings(texts.into())),
            _ => Ok(Data::Literal(pack(dtype, texts.iter().map(String::as_str))?.into())),
        }
    }

    /// One element, or nested lists of elements; the type determines the nesting.
    fn elements(&mut self, depth: usize, element: &mut dyn FnMut(Lexeme) -> Parsed<()>) -> Parsed<()> {
        if depth > DEPTH {
            return Err(format!("lists nest deeper than {DEPTH}"));
        }
        if self.take('[') {
            self.list(']', |p| p.elements(depth + 1, element))?;
            return Ok(());
        }
        element(self.peek().clone())?;
        self.next();
        Ok(())
    }
}

fn hexadecimal(digits: &str) -> Option<Vec<u8>> {
    let pairs = digits.as_bytes().chunks(2);
    pairs.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok().filter(|_| pair.len() == 2)).collect()
}
