//! Reads the text form back.
//!
//! The parser takes what is written as it stands, mistakes of the graph included: those are the verifier's to find.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::lexer::{Place, Token, tokens};
use super::literal::pack;
use crate::error::{Diagnostic, Error, Fault, Result as OwnResult};
use crate::mil::constant::{Constant, Content, Data};
use crate::mil::error::MilError;
use crate::mil::ir::{Argument, Binding, Block, Function, Lengths, Op, Program, Value, ValueId};
use crate::mil::types::{DataType, Dim, Opset, Symbol, TensorType, ValueType};

/// Blocks and lists nest no deeper.
const DEPTH: usize = 64;

/// The program that a text stands for. Constants written as `<N bytes>` have a length but no data.
///
/// # Errors
/// The place, what stands there and what was expected.
pub fn parse(text: &str) -> Result<Program, MilError> {
    let error = |place: Place, problem| MilError::Text { line: place.line, column: place.column, problem };
    let tokens = tokens(text).map_err(|(place, problem)| error(place, problem))?;
    let mut parser = Parser { tokens, at: 0 };
    parser.program().map_err(|problem| error(parser.place(), problem))
}

/// Data that the text form left out.
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

/// Data that the text form left out was asked for.
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

type Parsed<T> = Result<T, String>;

struct Parser {
    tokens: Vec<(Token, Place)>,
    at: usize,
}

impl Parser {
    fn peek(&self) -> &Token {
        self.tokens.get(self.at).map_or(&Token::End, |(token, _)| token)
    }

    fn place(&self) -> Place {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(Place { line: 1, column: 1 }, |(_, place)| *place)
    }

    fn next(&mut self) -> Token {
        let token = self.peek().clone();
        self.at += 1;
        token
    }

    fn wanted<T>(&self, wanted: &str) -> Parsed<T> {
        let found = match self.peek() {
            Token::Word(text) | Token::Number(text) => format!("`{text}`"),
            Token::Quoted(text) => format!("{text:?}"),
            Token::Arrow => "`->`".into(),
            Token::Mark(c) => format!("`{c}`"),
            Token::End => "the end".into(),
        };
        Err(format!("found {found}, expected {wanted}"))
    }

    fn is(&self, mark: char) -> bool {
        *self.peek() == Token::Mark(mark)
    }

    fn take(&mut self, mark: char) -> bool {
        let is = self.is(mark);
        self.at += usize::from(is);
        is
    }

    fn mark(&mut self, mark: char) -> Parsed<()> {
        if self.take(mark) { Ok(()) } else { self.wanted(&format!("`{mark}`")) }
    }

    fn is_word(&self, word: &str) -> bool {
        matches!(self.peek(), Token::Word(text) if text == word)
    }

    fn word(&mut self, word: &str) -> Parsed<()> {
        if self.is_word(word) {
            self.at += 1;
            return Ok(());
        }
        self.wanted(&format!("`{word}`"))
    }

    fn name(&mut self) -> Parsed<String> {
        match self.next() {
            Token::Word(name) | Token::Quoted(name) => Ok(name),
            _ => {
                self.at -= 1;
                self.wanted("a name")
            }
        }
    }

    fn number<T: std::str::FromStr>(&mut self) -> Parsed<T> {
        if let Token::Number(text) = self.peek()
            && let Ok(number) = text.trim_start_matches('+').parse()
        {
            self.at += 1;
            return Ok(number);
        }
        self.wanted("a whole number in range")
    }

    /// `item, item, …` up to `close`, which is taken.
    fn list<T>(&mut self, close: char, mut item: impl FnMut(&mut Self) -> Parsed<T>) -> Parsed<Vec<T>> {
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
    fn key(&mut self) -> Parsed<String> {
        let key = self.name()?;
        self.mark('=')?;
        Ok(key)
    }

    fn program(&mut self) -> Parsed<Program> {
        self.word("program")?;
        self.mark('(')?;
        self.at += 1; // the version, which the opsets tell
        self.mark(')')?;
        let mut default = None;
        if self.take('[') {
            self.word("default")?;
            self.mark('=')?;
            default = Some(self.name()?);
            self.mark(']')?;
        }
        self.mark('{')?;
        let mut functions = Vec::new();
        while !self.take('}') {
            functions.push(self.function()?);
        }
        if *self.peek() != Token::End {
            return self.wanted("nothing after the program");
        }
        let first = functions.first().map(|f| f.name.clone());
        let default_function = default.or(first).ok_or("the program has no function")?;
        Ok(Program { functions, default_function })
    }

    fn function(&mut self) -> Parsed<Function> {
        self.word("func")?;
        let name = self.name()?;
        self.mark('<')?;
        let target = self.name()?;
        let opset = Opset::ALL.into_iter().find(|o| o.target().eq_ignore_ascii_case(&target));
        let opset =
            opset.ok_or_else(|| format!("found `{target}`, expected one of ios15, ios16, ios17, ios18, ios26"))?;
        self.mark('>')?;
        let mut body = Body::default();
        self.mark('(')?;
        let inputs = self.list(')', |p| p.definition(&mut body))?;
        let mut lengths = BTreeMap::new();
        if self.take('[') {
            lengths = unique(self.list(']', Parser::length)?)?;
        }
        let block = self.block(&mut body, Vec::new(), 0)?;
        if let Some(missing) = body.pending.keys().min() {
            return Err(format!("`{missing}` is used in function `{name}` but never defined"));
        }
        Ok(Function { name, opset, inputs, values: body.values, block, lengths })
    }

    /// `T = range(lower = 1, upper = 4, default = 1)` or `T = enumerated(1, 64)`
    fn length(&mut self) -> Parsed<(Symbol, Lengths)> {
        let symbol = Symbol::new(&self.key()?);
        if self.is_word("enumerated") {
            self.at += 1;
            self.mark('(')?;
            return Ok((symbol, Lengths::Enumerated(self.list(')', Parser::number)?)));
        }
        self.word("range")?;
        self.mark('(')?;
        let entries: BTreeMap<String, u64> = unique(self.list(')', |p| Ok((p.key()?, p.number()?)))?)?;
        let entry = |key: &str| entries.get(key).copied();
        match (entry("lower"), entry("upper"), entry("default")) {
            (Some(lower), upper, Some(default)) => Ok((symbol, Lengths::Range { lower, upper, default })),
            _ => Err("a range needs `lower` and `default`".into()),
        }
    }

    /// `type name`
    fn definition(&mut self, body: &mut Body) -> Parsed<ValueId> {
        let ty = self.value_type()?;
        Ok(body.define(self.name()?, ty))
    }

    fn value_type(&mut self) -> Parsed<ValueType> {
        if self.is_word("opaque") {
            self.at += 1;
            self.mark('(')?;
            let text = self.name()?;
            self.mark(')')?;
            return Ok(ValueType::Opaque(text));
        }
        if self.is_word("state") {
            self.at += 1;
            self.mark('<')?;
            let ty = self.tensor_type()?;
            self.mark('>')?;
            return Ok(ValueType::State(ty));
        }
        Ok(ValueType::Tensor(self.tensor_type()?))
    }

    fn tensor_type(&mut self) -> Parsed<TensorType> {
        if !self.is_word("tensor") {
            return Ok(TensorType::scalar(self.data_type()?));
        }
        self.at += 1;
        self.mark('<')?;
        let dtype = self.data_type()?;
        self.mark(',')?;
        self.mark('[')?;
        let shape = self.list(']', Parser::dimension)?;
        self.mark('>')?;
        Ok(TensorType { dtype, shape })
    }

    fn data_type(&mut self) -> Parsed<DataType> {
        match self.peek() {
            Token::Word(name) if DataType::from_name(name).is_some() => {
                let dtype = DataType::from_name(name).ok_or("no type");
                self.at += 1;
                Ok(dtype?)
            }
            _ => self.wanted("a type"),
        }
    }

    /// `4`, `T`, `2*T+1` or `?`
    fn dimension(&mut self) -> Parsed<Dim> {
        if self.take('?') {
            return Ok(Dim::Unknown);
        }
        let mut factor = 1;
        if let Token::Number(_) = self.peek() {
            factor = self.number()?;
            if !self.take('*') {
                return Ok(Dim::Fixed(factor));
            }
        }
        let symbol = Symbol::new(&self.name()?);
        let offset = match self.peek() {
            Token::Number(text) if text.starts_with(['+', '-']) => self.number()?,
            _ => 0,
        };
        if factor == 0 { Ok(Dim::Fixed(0)) } else { Ok(Dim::Symbolic { factor, symbol, offset }) }
    }

    /// `{ ops } -> (outputs);`
    fn block(&mut self, body: &mut Body, inputs: Vec<ValueId>, depth: usize) -> Parsed<Block> {
        if depth > DEPTH {
            return Err(format!("blocks nest deeper than {DEPTH}"));
        }
        self.mark('{')?;
        let mut ops = Vec::new();
        while !self.take('}') {
            ops.push(self.op(body, depth)?);
        }
        if *self.peek() != Token::Arrow {
            return self.wanted("`->`");
        }
        self.at += 1;
        self.mark('(')?;
        let outputs = self.list(')', |p| Ok(body.refer(p.name()?)))?;
        self.mark(';')?;
        Ok(Block { inputs, ops, outputs })
    }

    /// `type name = operator(parameter = …)[name = string("…"), attribute = …];`
    fn op(&mut self, body: &mut Body, depth: usize) -> Parsed<Op> {
        let mut definitions = Vec::new();
        // an op without results starts with its operator
        let results = !matches!(self.tokens.get(self.at + 1), Some((Token::Mark('('), _))) || self.is_word("opaque");
        if results {
            definitions.push((self.value_type()?, self.name()?));
            while self.take(',') {
                definitions.push((self.value_type()?, self.name()?));
            }
            self.mark('=')?;
        }
        let operator = self.name()?;
        self.mark('(')?;
        let inputs = unique(self.list(')', |p| Ok((p.key()?, p.argument(body)?)))?)?;
        let mut attributes: BTreeMap<String, Constant> = BTreeMap::new();
        if self.take('[') {
            attributes = unique(self.list(']', |p| Ok((p.key()?, p.constant()?)))?)?;
        }
        let name = attributes.remove("name").and_then(|c| c.as_str().map(str::to_owned));
        let outputs: Vec<ValueId> = definitions.into_iter().map(|(ty, name)| body.define(name, ty)).collect();
        let name = match (name, outputs.first()) {
            (Some(name), _) => name,
            (None, Some(first)) => body.values[first.0 as usize].name.clone(),
            (None, None) => return self.wanted("the attribute `name`"),
        };
        let mut blocks = Vec::new();
        if self.take('{') {
            while !self.take('}') {
                self.word("block")?;
                self.mark('(')?;
                let inputs = self.list(')', |p| p.definition(body))?;
                blocks.push(self.block(body, inputs, depth + 1)?);
            }
        }
        self.mark(';')?;
        if operator == "const"
            && let (Some(value), [output]) = (attributes.get("val"), outputs.as_slice())
        {
            body.values[output.0 as usize].constant = Some(value.clone());
        }
        Ok(Op { operator, name, inputs, attributes, outputs, blocks })
    }

    fn argument(&mut self, body: &mut Body) -> Parsed<Argument> {
        if self.take('(') {
            return self.list(')', |p| p.binding(body));
        }
        Ok(vec![self.binding(body)?])
    }

    fn binding(&mut self, body: &mut Body) -> Parsed<Binding> {
        // a type is followed by `<` or `(`, a name is not
        match self.tokens.get(self.at + 1) {
            Some((Token::Mark('<' | '('), _)) => Ok(Binding::Constant(self.constant()?)),
            _ => Ok(Binding::Value(body.refer(self.name()?))),
        }
    }

    /// `type(elements)`
    fn constant(&mut self) -> Parsed<Constant> {
        let ty = self.tensor_type()?;
        self.mark('(')?;
        let data = if self.take('<') {
            let length = self.number()?;
            self.word("bytes")?;
            self.mark('>')?;
            Data::Content(Arc::new(Elided { length }))
        } else if let Token::Number(text) = self.peek()
            && let Some(digits) = text.strip_prefix("0x")
        {
            let bytes = hexadecimal(digits).ok_or_else(|| format!("`{text}` has no two digits for each byte"))?;
            self.at += 1;
            Data::Literal(bytes.into())
        } else if ty.dtype == DataType::String {
            let mut texts = Vec::new();
            self.elements(0, &mut |token| match token {
                Token::Quoted(text) => {
                    texts.push(text);
                    Ok(())
                }
                _ => Err("expected text in quotes".to_owned()),
            })?;
            Data::Strings(texts.into())
        } else {
            let mut texts = Vec::new();
            self.elements(0, &mut |token| match token {
                Token::Number(text) | Token::Word(text) => {
                    texts.push(text);
                    Ok(())
                }
                _ => Err("expected a number".to_owned()),
            })?;
            Data::Literal(pack(ty.dtype, texts.iter().map(String::as_str))?.into())
        };
        self.mark(')')?;
        Ok(Constant { ty, data })
    }

    /// One element, or lists of elements; the type tells how they are nested.
    fn elements(&mut self, depth: usize, element: &mut dyn FnMut(Token) -> Parsed<()>) -> Parsed<()> {
        if depth > DEPTH {
            return Err(format!("lists nest deeper than {DEPTH}"));
        }
        if self.take('[') {
            self.list(']', |p| p.elements(depth + 1, element))?;
            return Ok(());
        }
        let token = self.peek().clone();
        element(token)?;
        self.at += 1;
        Ok(())
    }
}

/// The values of a function while its text is read.
#[derive(Default)]
struct Body {
    values: Vec<Value>,
    /// The latest value of each name.
    by_name: HashMap<String, ValueId>,
    /// Values that were used, but not defined so far.
    pending: HashMap<String, ValueId>,
}

impl Body {
    fn define(&mut self, name: String, ty: ValueType) -> ValueId {
        if let Some(id) = self.pending.remove(&name) {
            self.values[id.0 as usize].ty = ty;
            self.by_name.insert(name, id);
            return id;
        }
        let id = self.push(name.clone(), ty);
        self.by_name.insert(name, id);
        id
    }

    fn refer(&mut self, name: String) -> ValueId {
        if let Some(id) = self.by_name.get(&name).or(self.pending.get(&name)) {
            return *id;
        }
        let id = self.push(name.clone(), ValueType::Opaque(String::new()));
        self.pending.insert(name, id);
        id
    }

    fn push(&mut self, name: String, ty: ValueType) -> ValueId {
        let id = ValueId(self.values.len() as u32);
        self.values.push(Value { name, ty, constant: None });
        id
    }
}

/// Entries as a map; a key that comes twice is a mistake.
fn unique<K: Ord + std::fmt::Debug, V>(entries: Vec<(K, V)>) -> Parsed<BTreeMap<K, V>> {
    let mut map = BTreeMap::new();
    for (key, value) in entries {
        if map.contains_key(&key) {
            return Err(format!("{key:?} is given twice"));
        }
        map.insert(key, value);
    }
    Ok(map)
}

fn hexadecimal(digits: &str) -> Option<Vec<u8>> {
    let pairs = digits.as_bytes().chunks(2);
    pairs.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok().filter(|_| pair.len() == 2)).collect()
}
