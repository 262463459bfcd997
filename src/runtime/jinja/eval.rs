//! Statements and expressions.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use serde_json::Value as Json;

use super::format::percent;
use super::parser::{Binary, Comparison, Expr, ForLoop, Kind, Literal, Macro, Node, Target};
use super::value::{LoopState, MacroValue, Scope, Value, write_str};
use super::{Budget, Error, MAX_RENDERED, Result};
use calls::{Counter, loop_attribute};

mod calls;
mod filters;
mod methods;

/// Maximum depth of the evaluation.
const MAX_DEPTH: usize = 4_000;

/// Functions of the environment.
const FUNCTIONS: [&str; 7] = ["range", "dict", "cycler", "joiner", "namespace", "raise_exception", "strftime_now"];

/// Arguments of a call.
#[derive(Default)]
pub(super) struct Passed {
    pub positional: Vec<Value>,
    pub named: Vec<(Arc<str>, Value)>,
}

impl Passed {
    pub fn of(positional: Vec<Value>) -> Self {
        Passed { positional, named: Vec::new() }
    }

    /// Binds the arguments to parameters, of which the first `required` must be given.
    pub fn fixed<const N: usize>(self, what: &str, names: [&str; N], required: usize) -> Result<[Option<Value>; N]> {
        let mut bound = [const { None }; N];
        if self.positional.len() > N {
            return Err(Error::new(format!("{what} takes at most {N} arguments")));
        }
        for (slot, value) in bound.iter_mut().zip(self.positional) {
            *slot = Some(value);
        }
        for (name, value) in self.named {
            match names.iter().position(|own| **own == *name) {
                Some(index) => bound[index] = Some(value),
                None => return Err(Error::new(format!("{what} has no argument `{name}`"))),
            }
        }
        match bound.iter().take(required).all(Option::is_some) {
            true => Ok(bound),
            false => Err(Error::new(format!("{what} needs {required} arguments"))),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Flow {
    Next,
    Break,
    Continue,
}

pub(super) struct Evaluator {
    pub budget: Budget,
    out: String,
    scope: Rc<Scope>,
    root: Rc<Scope>,
    /// Namespaces live in the rendering, because they can contain themselves.
    namespaces: Vec<Vec<(Arc<str>, Value)>>,
    counters: Vec<Counter>,
    /// Last values of `loop.changed`, by loop.
    changed: Vec<Option<Vec<Value>>>,
    /// Text of the block that filters apply to.
    block_text: Value,
    depth: usize,
    /// Nesting of recursive loops.
    level: usize,
}

/// Renders a template with an object of variables.
pub(super) fn render(body: &[Node], variables: &Json, mut budget: Budget) -> Result<String> {
    let root = Scope::root();
    for (name, value) in variables.as_object().into_iter().flatten() {
        root.set(name.as_str().into(), Value::from_json(value, &mut budget)?);
    }
    let mut evaluator = Evaluator {
        budget,
        out: String::new(),
        scope: root.clone(),
        root,
        namespaces: Vec::new(),
        counters: Vec::new(),
        changed: Vec::new(),
        block_text: Value::None,
        depth: 0,
        level: 0,
    };
    evaluator.nodes(body)?;
    match evaluator.out.len() > MAX_RENDERED {
        true => Err(Error::new(format!("it writes more than {MAX_RENDERED} bytes"))),
        false => Ok(evaluator.out),
    }
}

/// Looks up an item or attribute of a dictionary or list, as fields of `str.format` do.
pub(super) fn lookup(value: &Value, key: &str, attribute: bool, budget: &mut Budget) -> Result<Value> {
    let found = match (value, key.parse::<usize>()) {
        (Value::Dict(dict), _) if !attribute => dict.get_str(key, budget)?.cloned(),
        (Value::List(list) | Value::Tuple(list), Ok(index)) if !attribute => list.items.get(index).cloned(),
        _ => None,
    };
    found.ok_or_else(|| Error::new(format!("a {} has no '{key}'", value.type_name())))
}

impl Evaluator {
    fn nested<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(Error::new("it exceeds the recursion limit"));
        }
        let done = work(self);
        self.depth -= 1;
        done
    }

    /// Runs work in a scope of its own.
    fn scoped<T>(&mut self, parent: &Rc<Scope>, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.budget.pay(256)?;
        let scope = Scope::within(parent);
        let outer = std::mem::replace(&mut self.scope, scope);
        let done = self.nested(work);
        self.scope = outer;
        done
    }

    /// Runs work and returns the text that it writes.
    fn captured(&mut self, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<Value> {
        let outer = std::mem::take(&mut self.out);
        work(self)?;
        let text = std::mem::replace(&mut self.out, outer);
        Value::str(text, &mut self.budget)
    }

    fn nodes(&mut self, nodes: &[Node]) -> Result<Flow> {
        for node in nodes {
            let flow = self.node(node).map_err(|error| error.at(node.line))?;
            if flow != Flow::Next {
                return Ok(flow);
            }
        }
        Ok(Flow::Next)
    }

    fn block(&mut self, nodes: &[Node]) -> Result<Flow> {
        let parent = self.scope.clone();
        self.scoped(&parent, |own| own.nodes(nodes))
    }

    fn node(&mut self, node: &Node) -> Result<Flow> {
        self.budget.step()?;
        match &node.kind {
            Kind::Data(text) => {
                self.budget.pay_len(text.len())?;
                self.out.push_str(text);
            }
            Kind::Output(expression) => {
                let value = self.eval(expression)?;
                write_str(&value, &mut self.out, &mut self.budget)?;
            }
            Kind::If(branches, otherwise) => {
                for (test, body) in branches {
                    if self.eval(test)?.is_true() {
                        return self.nested(|own| own.nodes(body));
                    }
                }
                return self.nested(|own| own.nodes(otherwise));
            }
            Kind::For(node) => {
                let iterable = self.eval(&node.iterable)?;
                return self.nested(|own| own.for_loop(node, &iterable));
            }
            Kind::Set(target, expression) => {
                let value = self.eval(expression)?;
                self.assign(target, value)?;
            }
            Kind::SetBlock(target, filter, body) => {
                let text = self.captured(|own| own.block(body).map(|_| ()))?;
                let value = self.filtered_block(text, filter)?;
                self.assign(target, value)?;
            }
            Kind::FilterBlock(filter, body) => {
                let text = self.captured(|own| own.block(body).map(|_| ()))?;
                let value = self.filtered_block(text, filter)?;
                write_str(&value, &mut self.out, &mut self.budget)?;
            }
            Kind::Macro(definition) => {
                let value = self.macro_value(definition);
                self.scope.set(definition.name.clone(), value);
            }
            Kind::CallBlock(call, body) => {
                let Expr::Call(callee, arguments) = call else { return Err(Error::new("expected a call")) };
                let callee = self.eval(callee)?;
                let mut passed = self.arguments(arguments)?;
                passed.named.push((body.name.clone(), self.macro_value(body)));
                let value = self.call(&callee, passed)?;
                write_str(&value, &mut self.out, &mut self.budget)?;
            }
            Kind::With(targets, body) => {
                let values = targets.iter().map(|(_, value)| self.eval(value)).collect::<Result<Vec<_>>>()?;
                let parent = self.scope.clone();
                return self.scoped(&parent, |own| {
                    for ((target, _), value) in targets.iter().zip(values) {
                        own.assign(target, value)?;
                    }
                    own.nodes(body)
                });
            }
            Kind::Break => return Ok(Flow::Break),
            Kind::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::Next)
    }

    fn macro_value(&self, definition: &Arc<Macro>) -> Value {
        let scope = Rc::downgrade(&self.scope);
        Value::Macro(Rc::new(MacroValue { definition: definition.clone(), scope }))
    }

    fn filtered_block(&mut self, text: Value, filter: &Expr) -> Result<Value> {
        let outer = std::mem::replace(&mut self.block_text, text);
        let value = self.eval(filter);
        self.block_text = outer;
        value
    }

    fn assign(&mut self, target: &Target, value: Value) -> Result<()> {
        match target {
            Target::Name(name) => self.scope.set(name.clone(), value),
            Target::Attribute(name, attribute) => {
                let Some(Value::Namespace(index)) = self.scope.get(name) else {
                    return Err(Error::new(format!("`{name}` is no namespace, so no attribute of it can be set")));
                };
                let fields = &mut self.namespaces[index];
                self.budget.pay_len(fields.len() + 64)?;
                match fields.iter_mut().find(|(own, _)| own == attribute) {
                    Some((_, own)) => *own = value,
                    None => fields.push((attribute.clone(), value)),
                }
            }
            Target::Tuple(targets) => {
                let items = value.items(&mut self.budget)?;
                if items.items.len() != targets.len() {
                    let problem = format!("{} values for {} names", items.items.len(), targets.len());
                    return Err(Error::new(problem));
                }
                for (target, value) in targets.iter().zip(&items.items) {
                    self.assign(target, value.clone())?;
                }
            }
        }
        Ok(())
    }

    fn for_loop(&mut self, node: &Arc<ForLoop>, iterable: &Value) -> Result<Flow> {
        let mut items = iterable.items(&mut self.budget)?;
        let parent = self.scope.clone();
        if let Some(condition) = &node.condition {
            let mut kept = Vec::new();
            for item in &items.items {
                let keeps = self.scoped(&parent, |own| {
                    own.assign(&node.target, item.clone())?;
                    own.eval(condition)
                })?;
                if keeps.is_true() {
                    kept.push(item.clone());
                }
            }
            items = Value::list(kept, &mut self.budget)?.items(&mut self.budget)?;
        }
        if items.items.is_empty() {
            return self.block(&node.otherwise);
        }
        let recursive = node.recursive.then(|| (node.clone(), Rc::downgrade(&parent)));
        let id = self.changed.len();
        self.changed.push(None);
        let level = if node.recursive { self.level } else { 0 };
        let state = Rc::new(LoopState { id, items: items.clone(), index: Cell::new(0), level, recursive });
        for (index, item) in items.items.iter().enumerate() {
            state.index.set(index);
            let flow = self.scoped(&parent, |own| {
                own.budget.step()?;
                own.scope.set("loop".into(), Value::Loop(state.clone()));
                own.assign(&node.target, item.clone())?;
                own.nodes(&node.body)
            })?;
            if flow == Flow::Break {
                break;
            }
        }
        Ok(Flow::Next)
    }

    /// Evaluates an expression.
    pub fn eval(&mut self, expression: &Expr) -> Result<Value> {
        self.budget.step()?;
        self.nested(|own| own.value_of(expression))
    }

    fn evals(&mut self, expressions: &[Expr]) -> Result<Vec<Value>> {
        expressions.iter().map(|expression| self.eval(expression)).collect()
    }

    fn value_of(&mut self, expression: &Expr) -> Result<Value> {
        match expression {
            Expr::Literal(literal) => Ok(match literal {
                Literal::None => Value::None,
                Literal::Bool(value) => Value::Bool(*value),
                Literal::Int(value) => Value::Int(*value),
                Literal::Float(value) => Value::Float(*value),
                Literal::Str(text) => Value::Str(text.clone()),
            }),
            Expr::BlockText => Ok(self.block_text.clone()),
            Expr::Name(name) => Ok(match self.scope.get(name) {
                Some(value) => value,
                None => match FUNCTIONS.iter().find(|function| ***function == **name) {
                    Some(function) => Value::Function(function),
                    None => Value::Undefined(name.clone()),
                },
            }),
            Expr::List(items) => {
                let items = self.evals(items)?;
                Value::list(items, &mut self.budget)
            }
            Expr::Tuple(items) => {
                let items = self.evals(items)?;
                Value::tuple(items, &mut self.budget)
            }
            Expr::Dict(pairs) => {
                let mut entries = Vec::with_capacity(pairs.len());
                for (key, value) in pairs {
                    let (key, value) = (self.eval(key)?, self.eval(value)?);
                    Value::insert(&mut entries, key, value, &mut self.budget)?;
                }
                Value::dict(entries, &mut self.budget)
            }
            Expr::Not(value) => Ok(Value::Bool(!self.eval(value)?.is_true())),
            Expr::And(left, right) => {
                let left = self.eval(left)?;
                if left.is_true() { self.eval(right) } else { Ok(left) }
            }
            Expr::Or(left, right) => {
                let left = self.eval(left)?;
                if left.is_true() { Ok(left) } else { self.eval(right) }
            }
            Expr::Condition(value, test, otherwise) => match (self.eval(test)?.is_true(), otherwise) {
                (true, _) => self.eval(value),
                (false, Some(otherwise)) => self.eval(otherwise),
                (false, None) => Ok(Value::Undefined("a condition without `else`".into())),
            },
            Expr::Negative(value) => match self.eval(value)? {
                Value::Float(value) => Ok(Value::Float(-value)),
                value => self.integer(value.as_int().and_then(i64::checked_neg), &value),
            },
            Expr::Positive(value) => match self.eval(value)? {
                Value::Float(value) => Ok(Value::Float(value)),
                value => self.integer(value.as_int(), &value),
            },
            Expr::Binary(operator, left, right) => {
                let safe = [is_markup(left), is_markup(right)];
                let mut values = [self.eval(left)?, self.eval(right)?];
                // as Jinja2's `Markup`, which `safe` makes, escapes what is added to it
                if *operator == Binary::Add && safe[0] != safe[1] {
                    let other = &mut values[usize::from(safe[0])];
                    *other = filters::filter(self, "escape", other.clone(), Passed::default())?;
                }
                self.binary(*operator, &values[0], &values[1])
            }
            Expr::Concat(parts) => {
                let mut text = String::new();
                for part in parts {
                    let part = self.eval(part)?;
                    write_str(&part, &mut text, &mut self.budget)?;
                }
                Value::str(text, &mut self.budget)
            }
            Expr::Compare(first, rest) => self.compare(first, rest),
            Expr::Attribute(value, name) => {
                let value = self.eval(value)?;
                self.attribute(&value, name)
            }
            Expr::Item(value, key) => {
                let (value, key) = (self.eval(value)?, self.eval(key)?);
                self.item(&value, &key)
            }
            Expr::Slice(value, places) => self.slice(value, places),
            Expr::Call(callee, arguments) => {
                let callee = self.eval(callee)?;
                let passed = self.arguments(arguments)?;
                self.call(&callee, passed)
            }
            Expr::Filter(value, name, arguments) => {
                let value = self.eval(value)?;
                let passed = self.arguments(arguments)?;
                filters::filter(self, name, value, passed)
            }
            Expr::Test(value, name, arguments) => {
                let value = self.eval(value)?;
                let passed = self.arguments(arguments)?;
                filters::test(self, name, &value, passed).map(Value::Bool)
            }
        }
    }

    fn integer(&self, result: Option<i64>, of: &Value) -> Result<Value> {
        match (result, of.as_int()) {
            (Some(value), _) => Ok(Value::Int(value)),
            (None, Some(_)) => Err(Error::new("a number is too large")),
            (None, None) => Err(Error::new(format!("a {} is no number", of.type_name()))),
        }
    }

    fn compare(&mut self, first: &Expr, rest: &[(Comparison, Expr)]) -> Result<Value> {
        let mut left = self.eval(first)?;
        for (comparison, right) in rest {
            let right = self.eval(right)?;
            if !self.compares(*comparison, &left, &right)? {
                return Ok(Value::Bool(false));
            }
            left = right;
        }
        Ok(Value::Bool(true))
    }

    /// Returns whether a comparison holds.
    pub fn compares(&mut self, comparison: Comparison, left: &Value, right: &Value) -> Result<bool> {
        let budget = &mut self.budget;
        Ok(match comparison {
            Comparison::Eq => left.equals(right, budget)?,
            Comparison::Ne => !left.equals(right, budget)?,
            Comparison::In => right.contains(left, budget)?,
            Comparison::NotIn => !right.contains(left, budget)?,
            Comparison::Lt => left.order(right, budget)?.is_some_and(std::cmp::Ordering::is_lt),
            Comparison::Le => left.order(right, budget)?.is_some_and(std::cmp::Ordering::is_le),
            Comparison::Gt => left.order(right, budget)?.is_some_and(std::cmp::Ordering::is_gt),
            Comparison::Ge => left.order(right, budget)?.is_some_and(std::cmp::Ordering::is_ge),
        })
    }

    /// Applies an arithmetic operator.
    pub fn binary(&mut self, operator: Binary, left: &Value, right: &Value) -> Result<Value> {
        if let (Value::Undefined(name), _) | (_, Value::Undefined(name)) = (left, right) {
            return Err(Value::undefined_error(name));
        }
        let budget = &mut self.budget;
        match (operator, left, right) {
            (Binary::Add, Value::Str(a), Value::Str(b)) => {
                budget.pay_len(a.len() + b.len())?;
                return Ok(Value::Str([&**a, &**b].concat().into()));
            }
            (Binary::Add, Value::List(a), Value::List(b)) => {
                budget.pay(super::value::ITEM * (a.items.len() + b.items.len()) as u64)?;
                return Value::list([&a.items[..], &b.items[..]].concat(), budget);
            }
            (Binary::Add, Value::Tuple(a), Value::Tuple(b)) => {
                budget.pay(super::value::ITEM * (a.items.len() + b.items.len()) as u64)?;
                return Value::tuple([&a.items[..], &b.items[..]].concat(), budget);
            }
            (Binary::Mul, sequence @ (Value::Str(_) | Value::List(_) | Value::Tuple(_)), count)
            | (Binary::Mul, count, sequence @ (Value::Str(_) | Value::List(_) | Value::Tuple(_))) => {
                let Some(count) = count.as_int() else {
                    return Err(Error::new(format!("a {} can't be multiplied", count.type_name())));
                };
                return repeated(sequence, count.max(0) as u64, budget);
            }
            (Binary::Mod, Value::Str(text), arguments) => return percent(text, arguments, budget),
            _ => {}
        }
        let operands = (left.as_float(), right.as_float());
        let (Some(a), Some(b)) = operands else {
            let (a, b) = (left.type_name(), right.type_name());
            return Err(Error::new(format!("a {a} and a {b} have no such operation")));
        };
        let zero = || Error::new("a division by zero");
        if let (Some(a), Some(b)) = (left.as_int(), right.as_int()) {
            let result = match operator {
                Binary::Add => a.checked_add(b),
                Binary::Sub => a.checked_sub(b),
                Binary::Mul => a.checked_mul(b),
                Binary::FloorDiv | Binary::Mod | Binary::Div if b == 0 => return Err(zero()),
                Binary::Div => return Ok(Value::Float(a as f64 / b as f64)),
                Binary::FloorDiv => a.checked_div(b).map(|q| if a % b != 0 && (a < 0) != (b < 0) { q - 1 } else { q }),
                Binary::Mod => a.checked_rem(b).map(|r| if r != 0 && (r < 0) != (b < 0) { r + b } else { r }),
                Binary::Pow if b < 0 => return Ok(Value::Float((a as f64).powf(b as f64))),
                Binary::Pow => u32::try_from(b).ok().and_then(|b| a.checked_pow(b)),
            };
            return result.map(Value::Int).ok_or_else(|| Error::new("a number is too large"));
        }
        Ok(Value::Float(match operator {
            Binary::Add => a + b,
            Binary::Sub => a - b,
            Binary::Mul => a * b,
            Binary::Div | Binary::FloorDiv | Binary::Mod if b == 0.0 => return Err(zero()),
            Binary::Div => a / b,
            Binary::FloorDiv => (a / b).floor(),
            Binary::Mod => a - b * (a / b).floor(),
            Binary::Pow => a.powf(b),
        }))
    }

    /// Returns `value.name`: a method or attribute first, then an item.
    pub fn attribute(&mut self, value: &Value, name: &str) -> Result<Value> {
        let undefined = || Ok(Value::Undefined(name.into()));
        match value {
            Value::Undefined(own) => Err(Value::undefined_error(own)),
            Value::Namespace(index) => {
                let fields = &self.namespaces[*index];
                self.budget.pay_len(fields.len())?;
                match fields.iter().find(|(own, _)| **own == *name) {
                    Some((_, value)) => Ok(value.clone()),
                    None => undefined(),
                }
            }
            value if methods::has_method(value, name) => Ok(Value::method(value.clone(), name)),
            Value::Dict(dict) => match dict.get_str(name, &mut self.budget)? {
                Some(value) => Ok(value.clone()),
                None => undefined(),
            },
            Value::Loop(state) => Ok(loop_attribute(state, name).unwrap_or_else(|| Value::Undefined(name.into()))),
            Value::Macro(own) if name == "name" => Ok(Value::Str(own.definition.name.clone())),
            Value::Counter(index) if name == "current" => Ok(match &self.counters[*index] {
                Counter::Cycler(items, at) => items[*at].clone(),
                Counter::Joiner(..) => Value::Undefined(name.into()),
            }),
            _ => undefined(),
        }
    }

    /// Returns `value[key]`: an item first, then a method or attribute.
    pub fn item(&mut self, value: &Value, key: &Value) -> Result<Value> {
        let missing = |own: &mut Self| match key {
            Value::Str(name) if !matches!(value, Value::Dict(_)) => own.attribute(value, name),
            Value::Str(name) if methods::has_method(value, name) => Ok(Value::method(value.clone(), name)),
            Value::Str(name) => Ok(Value::Undefined(name.clone())),
            _ => Ok(Value::Undefined("an item".into())),
        };
        let place = |length: u64| {
            let index = key.as_int()?;
            let index = if index < 0 { u64::try_from(index.checked_add_unsigned(length)?).ok()? } else { index as u64 };
            (index < length).then_some(index as usize)
        };
        let found = match value {
            Value::Undefined(name) => return Err(Value::undefined_error(name)),
            Value::Dict(dict) => dict.get(key, &mut self.budget)?.cloned(),
            Value::List(list) | Value::Tuple(list) => place(list.items.len() as u64).map(|at| list.items[at].clone()),
            Value::Str(text) => {
                self.budget.pay_len(text.len())?;
                let at = place(value.length().unwrap_or(0));
                at.and_then(|at| text.chars().nth(at)).map(|c| Value::Str(c.to_string().into()))
            }
            Value::Range(start, _, step) => {
                place(value.length().unwrap_or(0)).map(|at| Value::Int(start + step * at as i64))
            }
            _ => None,
        };
        match found {
            Some(found) => Ok(found),
            None => missing(self),
        }
    }

    fn slice(&mut self, value: &Expr, places: &[Option<Box<Expr>>; 3]) -> Result<Value> {
        let value = self.eval(value)?;
        let mut bounds = [None; 3];
        for (bound, place) in bounds.iter_mut().zip(places) {
            if let Some(place) = place {
                *bound = match self.eval(place)? {
                    Value::None => None,
                    place => Some(place.as_int().ok_or_else(|| Error::new("a slice needs integers"))?),
                };
            }
        }
        let budget = &mut self.budget;
        match &value {
            Value::Str(text) => {
                budget.pay_len(text.len())?;
                let chars: Vec<char> = text.chars().collect();
                let text: String = indices(bounds, chars.len())?.into_iter().map(|at| chars[at]).collect();
                Value::str(text, budget)
            }
            Value::List(list) | Value::Tuple(list) => {
                budget.pay(super::value::ITEM * list.items.len() as u64)?;
                let items = indices(bounds, list.items.len())?.into_iter().map(|at| list.items[at].clone()).collect();
                match value {
                    Value::List(_) => Value::list(items, budget),
                    _ => Value::tuple(items, budget),
                }
            }
            Value::Range(..) => {
                let all = value.items(budget)?;
                let items = indices(bounds, all.items.len())?.into_iter().map(|at| all.items[at].clone()).collect();
                Value::list(items, budget)
            }
            Value::Undefined(name) => Err(Value::undefined_error(name)),
            other => Err(Error::new(format!("a {} can't be sliced", other.type_name()))),
        }
    }
}

/// Returns whether an expression is text that needs no escaping.
fn is_markup(expression: &Expr) -> bool {
    match expression {
        Expr::Filter(_, name, _) => ["safe", "escape", "e", "forceescape"].contains(&&**name),
        Expr::Binary(Binary::Add, left, right) => is_markup(left) || is_markup(right),
        _ => false,
    }
}

/// Repeats a sequence.
fn repeated(sequence: &Value, count: u64, budget: &mut Budget) -> Result<Value> {
    match sequence {
        Value::Str(text) => {
            budget.pay((text.len() as u64).saturating_mul(count))?;
            Ok(Value::Str(text.repeat(count as usize).into()))
        }
        Value::List(list) | Value::Tuple(list) => {
            budget.pay((super::value::ITEM * list.items.len() as u64).saturating_mul(count))?;
            let length = list.items.len() * count.min(u64::from(u32::MAX)) as usize;
            let items = list.items.iter().cycle().take(length).cloned().collect();
            if matches!(sequence, Value::List(_)) { Value::list(items, budget) } else { Value::tuple(items, budget) }
        }
        other => Err(Error::new(format!("a {} can't be multiplied", other.type_name()))),
    }
}

/// Returns the indices of a slice.
fn indices([start, stop, step]: [Option<i64>; 3], length: usize) -> Result<Vec<usize>> {
    let (step, length) = (i128::from(step.unwrap_or(1)), length as i128);
    if step == 0 {
        return Err(Error::new("a slice needs a step other than 0"));
    }
    let (low, high) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let place = |place: Option<i64>, default: i128| match place.map(i128::from) {
        None => default,
        Some(place) => (if place < 0 { place + length } else { place }).clamp(low, high),
    };
    let (first, end) = if step > 0 { (low, high) } else { (high, low) };
    let (mut at, end) = (place(start, first), place(stop, end));
    let mut found = Vec::new();
    while if step > 0 { at < end } else { at > end } {
        found.push(at as usize);
        at += step;
    }
    Ok(found)
}
