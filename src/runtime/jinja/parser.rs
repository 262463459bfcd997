//! Syntax tree of a template, by Jinja2's grammar.

use std::sync::Arc;

use super::lexer::{Token, tokenize};
use super::{Error, Result};

/// Maximum nesting of expressions and statements.
const MAX_NESTING: usize = 300;

/// Constant of an expression.
#[derive(Clone, Debug)]
pub(super) enum Literal {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Str(Arc<str>),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Mod,
    Pow,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Comparison {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    In,
    NotIn,
}

#[derive(Debug)]
pub(super) enum Expr {
    Literal(Literal),
    Name(Arc<str>),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Negative(Box<Expr>),
    Positive(Box<Expr>),
    Not(Box<Expr>),
    And(Box<Expr>, Box<Expr>),
    Or(Box<Expr>, Box<Expr>),
    Binary(Binary, Box<Expr>, Box<Expr>),
    Concat(Vec<Expr>),
    Compare(Box<Expr>, Vec<(Comparison, Expr)>),
    /// Value, condition, alternative.
    Condition(Box<Expr>, Box<Expr>, Option<Box<Expr>>),
    Attribute(Box<Expr>, Arc<str>),
    Item(Box<Expr>, Box<Expr>),
    Slice(Box<Expr>, [Option<Box<Expr>>; 3]),
    Call(Box<Expr>, Arguments),
    Filter(Box<Expr>, Arc<str>, Arguments),
    Test(Box<Expr>, Arc<str>, Arguments),
    /// Text of a block that filters apply to.
    BlockText,
}

#[derive(Debug, Default)]
pub(super) struct Arguments {
    pub positional: Vec<Expr>,
    pub named: Vec<(Arc<str>, Expr)>,
    pub sequence: Option<Box<Expr>>,
    pub mapping: Option<Box<Expr>>,
}

/// Target of an assignment.
#[derive(Debug)]
pub(super) enum Target {
    Name(Arc<str>),
    /// Attribute of a namespace.
    Attribute(Arc<str>, Arc<str>),
    Tuple(Vec<Target>),
}

#[derive(Debug)]
pub(super) struct ForLoop {
    pub target: Target,
    pub iterable: Expr,
    pub condition: Option<Expr>,
    pub recursive: bool,
    pub body: Vec<Node>,
    pub otherwise: Vec<Node>,
}

#[derive(Debug)]
pub(super) struct Macro {
    pub name: Arc<str>,
    pub parameters: Vec<(Arc<str>, Option<Expr>)>,
    pub body: Vec<Node>,
}

#[derive(Debug)]
pub(super) enum Kind {
    Data(String),
    Output(Expr),
    If(Vec<(Expr, Vec<Node>)>, Vec<Node>),
    For(Arc<ForLoop>),
    Set(Target, Expr),
    SetBlock(Target, Expr, Vec<Node>),
    Macro(Arc<Macro>),
    /// Call with the body as `caller`.
    CallBlock(Expr, Arc<Macro>),
    FilterBlock(Expr, Vec<Node>),
    With(Vec<(Target, Expr)>, Vec<Node>),
    Break,
    Continue,
}

#[derive(Debug)]
pub(super) struct Node {
    pub line: u32,
    pub kind: Kind,
}

/// Parses a template.
pub(super) fn parse(source: &str) -> Result<Vec<Node>> {
    let mut parser = Parser { tokens: tokenize(source)?, at: 0, nesting: 0, loops: 0 };
    let (nodes, end) = parser.nodes(&[])?;
    match end {
        None => Ok(nodes),
        Some(end) => parser.error(format!("unexpected `{end}`")),
    }
}

struct Parser {
    tokens: Vec<(Token, u32)>,
    at: usize,
    nesting: usize,
    /// Number of enclosing loops.
    loops: usize,
}

impl Parser {
    fn line(&self) -> u32 {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(1, |(_, line)| *line)
    }

    fn error<T>(&self, message: impl Into<String>) -> Result<T> {
        Err(Error::new(message).at(self.line()))
    }

    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at).map(|(token, _)| token)
    }

    fn next(&mut self) -> Option<Token> {
        let token = self.tokens.get_mut(self.at).map(|(token, _)| std::mem::replace(token, Token::Op("")));
        self.at += 1;
        token
    }

    fn is_op(&self, operator: &str) -> bool {
        matches!(self.peek(), Some(Token::Op(op)) if *op == operator)
    }

    fn is_name(&self, name: &str) -> bool {
        matches!(self.peek(), Some(Token::Name(own)) if own == name)
    }

    fn take_op(&mut self, operator: &str) -> bool {
        let found = self.is_op(operator);
        self.at += usize::from(found);
        found
    }

    fn take_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        self.at += usize::from(found);
        found
    }

    fn expect_op(&mut self, operator: &str) -> Result<()> {
        match self.take_op(operator) {
            true => Ok(()),
            false => self.error(format!("expected `{operator}`")),
        }
    }

    fn expect(&mut self, token: &Token, what: &str) -> Result<()> {
        match self.peek() == Some(token) {
            true => {
                self.at += 1;
                Ok(())
            }
            false => self.error(format!("expected {what}")),
        }
    }

    fn name(&mut self) -> Result<Arc<str>> {
        match self.peek() {
            Some(Token::Name(name)) => {
                let name = Arc::from(name.as_str());
                self.at += 1;
                Ok(name)
            }
            _ => self.error("expected a name"),
        }
    }

    fn nested<T>(&mut self, parse: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.nesting >= MAX_NESTING {
            return self.error(format!("it is nested more than {MAX_NESTING} times"));
        }
        self.nesting += 1;
        let parsed = parse(self);
        self.nesting -= 1;
        parsed
    }

    /// Parses nodes up to a tag of `ends`, whose name is taken.
    fn nodes(&mut self, ends: &[&str]) -> Result<(Vec<Node>, Option<String>)> {
        let mut nodes = Vec::new();
        loop {
            let line = self.line();
            let kind = match self.next() {
                None if ends.is_empty() => return Ok((nodes, None)),
                None => return self.error(format!("expected `{}` before the end", ends.join("` or `"))),
                Some(Token::Data(text)) => Kind::Data(text),
                Some(Token::VariableBegin) => {
                    let value = self.tuple(true)?;
                    self.expect(&Token::VariableEnd, "the end of an expression")?;
                    Kind::Output(value)
                }
                Some(Token::BlockBegin) => {
                    let name = self.name()?;
                    if ends.contains(&&*name) {
                        return Ok((nodes, Some(name.to_string())));
                    }
                    match self.nested(|parser| parser.statement(&name))? {
                        Some(kind) => kind,
                        None => return Ok((nodes, Some(name.to_string()))),
                    }
                }
                Some(_) => return self.error("unexpected token"),
            };
            nodes.push(Node { line, kind });
        }
    }

    /// Parses the body of a block up to one of `ends`, after the rest of the current tag.
    fn body(&mut self, ends: &[&str]) -> Result<(Vec<Node>, String)> {
        self.block_end()?;
        let (nodes, end) = self.nodes(ends)?;
        match end {
            Some(end) if ends.contains(&end.as_str()) => Ok((nodes, end)),
            Some(end) => self.error(format!("unexpected `{end}`, expected `{}`", ends.join("` or `"))),
            None => self.error(format!("expected `{}`", ends.join("` or `"))),
        }
    }

    fn block_end(&mut self) -> Result<()> {
        self.expect(&Token::BlockEnd, "the end of a tag")
    }

    /// Parses a statement; `None` if its name begins none.
    fn statement(&mut self, name: &str) -> Result<Option<Kind>> {
        let kind = match name {
            "if" => self.condition()?,
            "for" => self.for_loop()?,
            "set" => return self.set().map(Some),
            "macro" => {
                let name = self.name()?;
                self.expect_op("(")?;
                Kind::Macro(self.macro_body(name, true, "endmacro")?)
            }
            "call" => {
                let own = self.take_op("(");
                let parameters = if own { self.parameters()? } else { Vec::new() };
                let call = self.expression()?;
                if !matches!(call, Expr::Call(..)) {
                    return self.error("expected a call");
                }
                let (body, _) = self.outside_loops(|parser| parser.body(&["endcall"]))?;
                Kind::CallBlock(call, Arc::new(Macro { name: "caller".into(), parameters, body }))
            }
            "filter" => {
                let name = self.name()?;
                let mut filter = self.filter(Expr::BlockText, name)?;
                while self.take_op("|") {
                    let name = self.name()?;
                    filter = self.filter(filter, name)?;
                }
                Kind::FilterBlock(filter, self.body(&["endfilter"])?.0)
            }
            "with" => {
                let mut targets = Vec::new();
                while self.peek() != Some(&Token::BlockEnd) {
                    if !targets.is_empty() {
                        self.expect_op(",")?;
                    }
                    let target = self.target(false)?;
                    self.expect_op("=")?;
                    targets.push((target, self.expression()?));
                }
                Kind::With(targets, self.body(&["endwith"])?.0)
            }
            // marks an assistant's text for training
            "generation" => Kind::With(Vec::new(), self.body(&["endgeneration"])?.0),
            "break" | "continue" if self.loops == 0 => return self.error(format!("`{name}` outside of a loop")),
            "break" => Kind::Break,
            "continue" => Kind::Continue,
            name if name.starts_with("end") || name.starts_with("el") => return Ok(None),
            name => return self.error(format!("the tag `{name}` isn't supported")),
        };
        self.block_end()?;
        Ok(Some(kind))
    }

    fn outside_loops<T>(&mut self, parse: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let loops = std::mem::take(&mut self.loops);
        let parsed = parse(self);
        self.loops = loops;
        parsed
    }

    fn condition(&mut self) -> Result<Kind> {
        let mut branches = Vec::new();
        loop {
            let test = self.tuple(true)?;
            let (body, end) = self.body(&["elif", "else", "endif"])?;
            branches.push((test, body));
            match end.as_str() {
                "elif" => {}
                "else" => return Ok(Kind::If(branches, self.body(&["endif"])?.0)),
                _ => return Ok(Kind::If(branches, Vec::new())),
            }
        }
    }

    fn for_loop(&mut self) -> Result<Kind> {
        let target = self.target(false)?;
        if !self.take_name("in") {
            return self.error("expected `in`");
        }
        let iterable = self.tuple(false)?;
        let condition = if self.take_name("if") { Some(self.expression()?) } else { None };
        let recursive = self.take_name("recursive");
        self.loops += 1;
        let (body, end) = self.body(&["endfor", "else"])?;
        self.loops -= 1;
        let otherwise = if end == "else" { self.body(&["endfor"])?.0 } else { Vec::new() };
        Ok(Kind::For(Arc::new(ForLoop { target, iterable, condition, recursive, body, otherwise })))
    }

    fn set(&mut self) -> Result<Kind> {
        let target = self.target(true)?;
        let kind = if self.take_op("=") {
            Kind::Set(target, self.tuple(true)?)
        } else {
            let mut filter = Expr::BlockText;
            while self.take_op("|") {
                let name = self.name()?;
                filter = self.filter(filter, name)?;
            }
            Kind::SetBlock(target, filter, self.body(&["endset"])?.0)
        };
        self.block_end()?;
        Ok(kind)
    }

    /// Parses the target of an assignment.
    fn target(&mut self, attributes: bool) -> Result<Target> {
        self.nested(|parser| {
            let mut targets = Vec::new();
            let mut tuple = false;
            loop {
                if parser.take_op("(") {
                    targets.push(parser.target(false)?);
                    parser.expect_op(")")?;
                } else {
                    let name = parser.name()?;
                    targets.push(match attributes && parser.take_op(".") {
                        true => Target::Attribute(name, parser.name()?),
                        false => Target::Name(name),
                    });
                }
                if !parser.take_op(",") {
                    break;
                }
                tuple = true;
                if !matches!(parser.peek(), Some(Token::Name(name)) if name != "in") && !parser.is_op("(") {
                    break;
                }
            }
            match targets.pop() {
                Some(target) if !tuple => Ok(target),
                last => Ok(Target::Tuple(targets.into_iter().chain(last).collect())),
            }
        })
    }

    fn macro_body(&mut self, name: Arc<str>, parameters: bool, end: &str) -> Result<Arc<Macro>> {
        let parameters = if parameters { self.parameters()? } else { Vec::new() };
        let (body, _) = self.outside_loops(|parser| parser.body(&[end]))?;
        Ok(Arc::new(Macro { name, parameters, body }))
    }

    /// Parses parameters after their opening parenthesis.
    fn parameters(&mut self) -> Result<Vec<(Arc<str>, Option<Expr>)>> {
        let mut parameters: Vec<(Arc<str>, Option<Expr>)> = Vec::new();
        while !self.take_op(")") {
            if !parameters.is_empty() {
                self.expect_op(",")?;
            }
            let name = self.name()?;
            let default = if self.take_op("=") { Some(self.expression()?) } else { None };
            if default.is_none() && parameters.last().is_some_and(|(_, default)| default.is_some()) {
                return self.error("a parameter without a default follows one with a default");
            }
            parameters.push((name, default));
        }
        Ok(parameters)
    }

    /// Parses an expression, or several with commas as a tuple.
    fn tuple(&mut self, conditional: bool) -> Result<Expr> {
        let one = |parser: &mut Self| if conditional { parser.expression() } else { parser.nested(Self::or) };
        let first = one(self)?;
        if !self.is_op(",") {
            return Ok(first);
        }
        let mut items = vec![first];
        while self.take_op(",") {
            let ends = matches!(self.peek(), Some(Token::VariableEnd | Token::BlockEnd | Token::Op(")")) | None)
                || self.is_name("recursive");
            if ends {
                break;
            }
            items.push(one(self)?);
        }
        Ok(Expr::Tuple(items))
    }

    fn expression(&mut self) -> Result<Expr> {
        self.nested(|parser| {
            let mut value = parser.or()?;
            while parser.take_name("if") {
                let test = parser.or()?;
                let otherwise = if parser.take_name("else") { Some(Box::new(parser.expression()?)) } else { None };
                value = Expr::Condition(Box::new(value), Box::new(test), otherwise);
            }
            Ok(value)
        })
    }

    fn or(&mut self) -> Result<Expr> {
        let mut left = self.and()?;
        while self.take_name("or") {
            left = Expr::Or(Box::new(left), Box::new(self.and()?));
        }
        Ok(left)
    }

    fn and(&mut self) -> Result<Expr> {
        let mut left = self.not()?;
        while self.take_name("and") {
            left = Expr::And(Box::new(left), Box::new(self.not()?));
        }
        Ok(left)
    }

    fn not(&mut self) -> Result<Expr> {
        if self.take_name("not") {
            return self.nested(|parser| Ok(Expr::Not(Box::new(parser.not()?))));
        }
        let first = self.sum()?;
        let mut rest = Vec::new();
        loop {
            let comparison = match self.peek() {
                Some(Token::Op("==")) => Comparison::Eq,
                Some(Token::Op("!=")) => Comparison::Ne,
                Some(Token::Op("<")) => Comparison::Lt,
                Some(Token::Op("<=")) => Comparison::Le,
                Some(Token::Op(">")) => Comparison::Gt,
                Some(Token::Op(">=")) => Comparison::Ge,
                Some(Token::Name(name)) if name == "in" => Comparison::In,
                Some(Token::Name(name)) if name == "not" => {
                    let next = self.tokens.get(self.at + 1).map(|(token, _)| token);
                    if !matches!(next, Some(Token::Name(name)) if name == "in") {
                        break;
                    }
                    self.at += 1;
                    Comparison::NotIn
                }
                _ => break,
            };
            self.at += 1;
            rest.push((comparison, self.sum()?));
        }
        Ok(if rest.is_empty() { first } else { Expr::Compare(Box::new(first), rest) })
    }

    fn sum(&mut self) -> Result<Expr> {
        let mut left = self.concat()?;
        loop {
            let operator = match self.peek() {
                Some(Token::Op("+")) => Binary::Add,
                Some(Token::Op("-")) => Binary::Sub,
                _ => return Ok(left),
            };
            self.at += 1;
            left = Expr::Binary(operator, Box::new(left), Box::new(self.concat()?));
        }
    }

    fn concat(&mut self) -> Result<Expr> {
        let first = self.product()?;
        if !self.is_op("~") {
            return Ok(first);
        }
        let mut parts = vec![first];
        while self.take_op("~") {
            parts.push(self.product()?);
        }
        Ok(Expr::Concat(parts))
    }

    fn product(&mut self) -> Result<Expr> {
        let mut left = self.power()?;
        loop {
            let operator = match self.peek() {
                Some(Token::Op("*")) => Binary::Mul,
                Some(Token::Op("/")) => Binary::Div,
                Some(Token::Op("//")) => Binary::FloorDiv,
                Some(Token::Op("%")) => Binary::Mod,
                _ => return Ok(left),
            };
            self.at += 1;
            left = Expr::Binary(operator, Box::new(left), Box::new(self.power()?));
        }
    }

    fn power(&mut self) -> Result<Expr> {
        let mut left = self.unary(true)?;
        while self.take_op("**") {
            left = Expr::Binary(Binary::Pow, Box::new(left), Box::new(self.unary(true)?));
        }
        Ok(left)
    }

    fn unary(&mut self, filters: bool) -> Result<Expr> {
        self.nested(|parser| {
            let value = if parser.take_op("-") {
                Expr::Negative(Box::new(parser.unary(false)?))
            } else if parser.take_op("+") {
                Expr::Positive(Box::new(parser.unary(false)?))
            } else {
                parser.primary()?
            };
            let value = parser.postfix(value)?;
            if filters { parser.filters(value) } else { Ok(value) }
        })
    }

    fn primary(&mut self) -> Result<Expr> {
        let literal = |literal| Ok(Expr::Literal(literal));
        match self.next() {
            Some(Token::Name(name)) => match name.as_str() {
                "true" | "True" => literal(Literal::Bool(true)),
                "false" | "False" => literal(Literal::Bool(false)),
                "none" | "None" => literal(Literal::None),
                name => Ok(Expr::Name(name.into())),
            },
            Some(Token::Str(mut text)) => {
                while let Some(Token::Str(more)) = self.peek() {
                    text.push_str(more);
                    self.at += 1;
                }
                literal(Literal::Str(text.into()))
            }
            Some(Token::Int(value)) => literal(Literal::Int(value)),
            Some(Token::Float(value)) => literal(Literal::Float(value)),
            Some(Token::Op("(")) => {
                if self.take_op(")") {
                    return Ok(Expr::Tuple(Vec::new()));
                }
                let value = self.tuple(true)?;
                self.expect_op(")")?;
                Ok(value)
            }
            Some(Token::Op("[")) => Ok(Expr::List(self.items("]", Self::expression)?)),
            Some(Token::Op("{")) => {
                let pair = |parser: &mut Self| {
                    let key = parser.expression()?;
                    parser.expect_op(":")?;
                    Ok((key, parser.expression()?))
                };
                Ok(Expr::Dict(self.items("}", pair)?))
            }
            _ => {
                self.at -= 1;
                self.error("expected a value")
            }
        }
    }

    /// Parses items with commas up to `end`; a trailing comma is allowed.
    fn items<T>(&mut self, end: &str, mut item: impl FnMut(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        let mut items = Vec::new();
        while !self.take_op(end) {
            if !items.is_empty() {
                self.expect_op(",")?;
                if self.take_op(end) {
                    break;
                }
            }
            items.push(item(self)?);
        }
        Ok(items)
    }

    fn postfix(&mut self, mut value: Expr) -> Result<Expr> {
        loop {
            value = if self.take_op(".") {
                match self.next() {
                    Some(Token::Name(name)) => Expr::Attribute(Box::new(value), name.into()),
                    Some(Token::Int(index)) => {
                        Expr::Item(Box::new(value), Box::new(Expr::Literal(Literal::Int(index))))
                    }
                    _ => return self.error("expected a name after `.`"),
                }
            } else if self.take_op("[") {
                self.subscript(value)?
            } else if self.is_op("(") {
                Expr::Call(Box::new(value), self.arguments()?)
            } else {
                return Ok(value);
            };
        }
    }

    fn subscript(&mut self, value: Expr) -> Result<Expr> {
        let mut places: [Option<Box<Expr>>; 3] = [None, None, None];
        let mut colons = 0;
        let mut indices = Vec::new();
        while !self.take_op("]") {
            if self.take_op(":") {
                colons += 1;
                if colons > 2 || !indices.is_empty() {
                    return self.error("an invalid slice");
                }
            } else if self.take_op(",") {
                match places[0].take() {
                    Some(index) if colons == 0 => indices.push(*index),
                    _ => return self.error("an invalid slice"),
                }
            } else {
                let place = &mut places[colons];
                if place.is_some() {
                    return self.error("expected `]`");
                }
                *place = Some(Box::new(self.expression()?));
            }
        }
        let [first, stop, step] = places;
        match (colons, first) {
            (0, Some(index)) if indices.is_empty() => Ok(Expr::Item(Box::new(value), index)),
            (0, last) if !indices.is_empty() => {
                indices.extend(last.map(|last| *last));
                Ok(Expr::Item(Box::new(value), Box::new(Expr::Tuple(indices))))
            }
            (0, _) => self.error("an empty subscript"),
            (_, start) => Ok(Expr::Slice(Box::new(value), [start, stop, step])),
        }
    }

    fn filters(&mut self, mut value: Expr) -> Result<Expr> {
        loop {
            if self.take_op("|") {
                let name = self.name()?;
                value = self.filter(value, name)?;
            } else if self.take_name("is") {
                value = self.test(value)?;
            } else if self.is_op("(") {
                value = Expr::Call(Box::new(value), self.arguments()?);
            } else {
                return Ok(value);
            }
        }
    }

    fn filter(&mut self, value: Expr, name: Arc<str>) -> Result<Expr> {
        let arguments = if self.is_op("(") { self.arguments()? } else { Arguments::default() };
        Ok(Expr::Filter(Box::new(value), name, arguments))
    }

    fn test(&mut self, value: Expr) -> Result<Expr> {
        let negated = self.take_name("not");
        let name = self.name()?;
        let mut arguments = Arguments::default();
        let begins_value = match self.peek() {
            Some(Token::Name(name)) => !["else", "or", "and", "if", "is", "in", "not"].contains(&name.as_str()),
            Some(Token::Str(_) | Token::Int(_) | Token::Float(_) | Token::Op("[" | "{")) => true,
            _ => false,
        };
        if self.is_op("(") {
            arguments = self.arguments()?;
        } else if begins_value {
            let argument = self.primary()?;
            arguments.positional.push(self.postfix(argument)?);
        }
        let test = Expr::Test(Box::new(value), name, arguments);
        Ok(if negated { Expr::Not(Box::new(test)) } else { test })
    }

    fn arguments(&mut self) -> Result<Arguments> {
        self.expect_op("(")?;
        let mut arguments = Arguments::default();
        let mut first = true;
        while !self.take_op(")") {
            if !first {
                self.expect_op(",")?;
                if self.take_op(")") {
                    break;
                }
            }
            first = false;
            let named = matches!(self.peek(), Some(Token::Name(_)))
                && matches!(self.tokens.get(self.at + 1), Some((Token::Op("="), _)));
            if self.take_op("**") {
                arguments.mapping = Some(Box::new(self.expression()?));
            } else if self.take_op("*") {
                arguments.sequence = Some(Box::new(self.expression()?));
            } else if named {
                let name = self.name()?;
                self.expect_op("=")?;
                arguments.named.push((name, self.expression()?));
            } else {
                arguments.positional.push(self.expression()?);
            }
        }
        Ok(arguments)
    }
}
