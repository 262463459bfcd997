//! Parser of the text form.
//!
//! The parser accepts programs with invalid graphs; the verifier reports those.

mod cursor;
mod scope;
mod value;

use std::collections::BTreeMap;

use super::lexer::{Lexeme, TextPosition, tokens};
use crate::constant::Constant;
use crate::error::MilError;
use crate::ir::{Argument, Binding, Block, Function, Op, ParameterMap, Program, SymbolRange, ValueId};
use crate::types::{Opset, Symbol};
use cursor::Parser;
use scope::Scope;
use smallvec::{SmallVec, smallvec};

/// Maximum nesting depth of blocks and lists.
const DEPTH: usize = 64;

/// Parses a program. Constants written as `<N bytes>` have a length but no data.
///
/// # Errors
/// Returns the position, the text found there and the expected text.
pub fn parse(text: &str) -> Result<Program, MilError> {
    let error = |place: TextPosition, problem| MilError::Text { line: place.line, column: place.column, problem };
    let tokens = tokens(text).map_err(|(place, problem)| error(place, problem))?;
    let mut parser = Parser::new(tokens);
    parser.program().map_err(|problem| error(parser.place(), problem))
}

type Parsed<T> = Result<T, String>;

impl Parser {
    fn program(&mut self) -> Parsed<Program> {
        self.word("program")?;
        self.mark('(')?;
        self.next(); // the version, which the opsets tell
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
        if *self.peek() != Lexeme::End {
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
        let mut scope = Scope::default();
        scope.enter();
        self.mark('(')?;
        let inputs = self.list(')', |p| p.definition(&mut scope))?;
        let mut lengths = BTreeMap::new();
        if self.take('[') {
            lengths = unique(self.list(']', Parser::length)?)?;
        }
        let block = self.block(&mut scope, Vec::new(), 0)?;
        if let Some(missing) = scope.missing() {
            return Err(format!("`{missing}` is used in function `{name}` but never defined"));
        }
        Ok(Function { name, opset, inputs, values: scope.values, block, lengths })
    }

    /// `T = range(lower = 1, upper = 4, default = 1)` or `T = enumerated(1, 64)`
    fn length(&mut self) -> Parsed<(Symbol, SymbolRange)> {
        let symbol = Symbol::new(&self.key()?);
        if self.take_word("enumerated") {
            self.mark('(')?;
            return Ok((symbol, SymbolRange::Enumerated(self.list(')', Parser::number)?)));
        }
        self.word("range")?;
        self.mark('(')?;
        let entries: BTreeMap<String, u64> = unique(self.list(')', |p| Ok((p.key()?, p.number()?)))?)?;
        let entry = |key: &str| entries.get(key).copied();
        match (entry("lower"), entry("upper"), entry("default")) {
            (Some(lower), upper, Some(default)) => Ok((symbol, SymbolRange::Range { lower, upper, default })),
            _ => Err("a range needs `lower` and `default`".into()),
        }
    }

    /// `type name`
    fn definition(&mut self, scope: &mut Scope) -> Parsed<ValueId> {
        let ty = self.value_type()?;
        Ok(scope.define(self.name()?, ty))
    }

    /// `{ ops } -> (outputs);`
    fn block(&mut self, scope: &mut Scope, inputs: Vec<ValueId>, depth: usize) -> Parsed<Block> {
        if depth > DEPTH {
            return Err(format!("blocks nest deeper than {DEPTH}"));
        }
        self.mark('{')?;
        let mut ops = Vec::new();
        while !self.take('}') {
            ops.push(self.op(scope, depth)?);
        }
        self.arrow()?;
        self.mark('(')?;
        let outputs = self.list(')', |p| Ok(scope.refer(p.name()?)))?;
        self.mark(';')?;
        Ok(Block { inputs, ops, outputs })
    }

    /// `type name = operator(parameter = …)[name = string("…"), attribute = …];`
    fn op(&mut self, scope: &mut Scope, depth: usize) -> Parsed<Op> {
        let mut definitions = Vec::new();
        // an op without results starts with its operator
        let results = !matches!(self.peek_second(), Lexeme::Mark('(')) || self.is_word("opaque");
        if results {
            definitions.push((self.value_type()?, self.name()?));
            while self.take(',') {
                definitions.push((self.value_type()?, self.name()?));
            }
            self.mark('=')?;
        }
        let operator = self.name()?;
        self.mark('(')?;
        let inputs = unique(self.list(')', |p| Ok((p.key()?.into(), p.argument(scope)?)))?)?.into_iter().collect();
        let mut attributes: ParameterMap<Constant> = ParameterMap::new();
        if self.take('[') {
            attributes = unique(self.list(']', |p| Ok((p.key()?.into(), p.constant()?)))?)?.into_iter().collect();
        }
        let name = match (attributes.remove("name"), definitions.first()) {
            (Some(name), _) => name.as_str().ok_or("the attribute `name` is no string")?.to_owned(),
            (None, Some((_, first))) => first.clone(),
            (None, None) => return self.wanted("the attribute `name`"),
        };
        let mut blocks = Vec::new();
        if self.take('{') {
            while !self.take('}') {
                self.word("block")?;
                self.mark('(')?;
                scope.enter();
                let inputs = self.list(')', |p| p.definition(scope))?;
                blocks.push(self.block(scope, inputs, depth + 1)?);
                scope.leave();
            }
        }
        self.mark(';')?;
        // the blocks don't see the results
        let outputs: SmallVec<[ValueId; 2]> =
            definitions.into_iter().map(|(ty, name)| scope.define(name, ty)).collect();
        if operator == "const"
            && let (Some(value), [output]) = (attributes.get("val"), outputs.as_slice())
        {
            scope.values[output.0 as usize].constant = Some(value.clone());
        }
        Ok(Op { operator: operator.into(), name, inputs, attributes, outputs, blocks })
    }

    fn argument(&mut self, scope: &mut Scope) -> Parsed<Argument> {
        if self.take('(') {
            return Ok(self.list(')', |p| p.binding(scope))?.into());
        }
        Ok(smallvec![self.binding(scope)?])
    }

    fn binding(&mut self, scope: &mut Scope) -> Parsed<Binding> {
        // a type is followed by `<` or `(`, a name isn't
        match self.peek_second() {
            Lexeme::Mark('<' | '(') => Ok(Binding::Constant(Box::new(self.constant()?))),
            _ => Ok(Binding::Value(scope.refer(self.name()?))),
        }
    }
}

/// Collects entries into a map; duplicate keys are an error.
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
