//! Values of a template, with Python's truth, equality, order and text.

use std::cell::{Cell, RefCell};
use std::cmp::Ordering;
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use serde_json::Value as Json;

use super::parser::{ForLoop, Macro};
use super::{Budget, Error, Result};

/// Maximum nesting of containers.
const MAX_DEPTH: u32 = 192;
/// Bytes of an element of a container.
pub(super) const ITEM: u64 = 32;

/// Value of a template.
#[derive(Clone)]
pub(super) enum Value {
    /// Undefined variable or attribute, with its name.
    Undefined(Arc<str>),
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Str(Arc<str>),
    List(Rc<List>),
    Tuple(Rc<List>),
    Dict(Rc<Dict>),
    Range(i64, i64, i64),
    /// View of a dictionary, with its type's name.
    View(&'static str, Rc<List>),
    /// Iterator that can be used once.
    Generator(Rc<Generator>),
    /// Namespace, by its index in the rendering.
    Namespace(usize),
    Macro(Rc<MacroValue>),
    Loop(Rc<LoopState>),
    /// Function of the environment.
    Function(&'static str),
    /// `cycler` or `joiner`, by its index in the rendering.
    Counter(usize),
    /// Method of a value.
    Method(Rc<(Value, Arc<str>)>),
}

/// Sequence of values with its nesting.
pub(super) struct List {
    pub items: Vec<Value>,
    depth: u32,
}

/// Dictionary in the order of insertion.
pub(super) struct Dict {
    pub entries: Vec<(Value, Value)>,
    depth: u32,
}

pub(super) struct Generator {
    items: RefCell<Option<Rc<List>>>,
    depth: u32,
}

pub(super) struct MacroValue {
    pub definition: Arc<Macro>,
    /// Scope of the definition; owned by the rendering, so that scopes don't form cycles.
    pub scope: Weak<Scope>,
}

/// Variables of a block, within those of the enclosing blocks.
pub(super) struct Scope {
    pub variables: RefCell<HashMap<Arc<str>, Value>>,
    parent: Option<Rc<Scope>>,
}

impl Scope {
    pub fn root() -> Rc<Self> {
        Rc::new(Scope { variables: RefCell::default(), parent: None })
    }

    pub fn within(parent: &Rc<Scope>) -> Rc<Self> {
        Rc::new(Scope { variables: RefCell::default(), parent: Some(parent.clone()) })
    }

    pub fn get(&self, name: &str) -> Option<Value> {
        let mut scope = self;
        loop {
            if let Some(value) = scope.variables.borrow().get(name) {
                return Some(value.clone());
            }
            scope = scope.parent.as_deref()?;
        }
    }

    pub fn set(&self, name: Arc<str>, value: Value) {
        self.variables.borrow_mut().insert(name, value);
    }
}

/// State of a `for` loop.
pub(super) struct LoopState {
    pub id: usize,
    pub items: Rc<List>,
    pub index: Cell<usize>,
    pub level: usize,
    pub recursive: Option<(Arc<ForLoop>, Weak<Scope>)>,
}

fn nested<'a>(values: impl Iterator<Item = &'a Value>) -> Result<u32> {
    let depth = values.map(Value::depth).max().unwrap_or(0) + 1;
    match depth > MAX_DEPTH {
        true => Err(Error::new(format!("a value is nested more than {MAX_DEPTH} times"))),
        false => Ok(depth),
    }
}

impl List {
    fn new(items: Vec<Value>, budget: &mut Budget) -> Result<Rc<Self>> {
        budget.pay(ITEM * (items.len() as u64 + 1))?;
        Ok(Rc::new(List { depth: nested(items.iter())?, items }))
    }
}

impl Dict {
    /// Returns the value of a key.
    pub fn get(&self, key: &Value, budget: &mut Budget) -> Result<Option<&Value>> {
        for (own, value) in &self.entries {
            if own.equals(key, budget)? {
                return Ok(Some(value));
            }
        }
        Ok(None)
    }

    /// Returns the value of a string key.
    pub fn get_str(&self, key: &str, budget: &mut Budget) -> Result<Option<&Value>> {
        budget.pay_len(self.entries.len() + key.len())?;
        Ok(self.entries.iter().find(|(own, _)| matches!(own, Value::Str(own) if **own == *key)).map(|(_, value)| value))
    }
}

impl Value {
    pub fn str(text: impl Into<Arc<str>>, budget: &mut Budget) -> Result<Self> {
        let text = text.into();
        budget.pay_len(text.len())?;
        Ok(Value::Str(text))
    }

    pub fn list(items: Vec<Value>, budget: &mut Budget) -> Result<Self> {
        List::new(items, budget).map(Value::List)
    }

    pub fn tuple(items: Vec<Value>, budget: &mut Budget) -> Result<Self> {
        List::new(items, budget).map(Value::Tuple)
    }

    pub fn view(kind: &'static str, items: Vec<Value>, budget: &mut Budget) -> Result<Self> {
        Ok(Value::View(kind, List::new(items, budget)?))
    }

    pub fn generator(items: Vec<Value>, budget: &mut Budget) -> Result<Self> {
        let items = List::new(items, budget)?;
        let depth = items.depth;
        Ok(Value::Generator(Rc::new(Generator { items: RefCell::new(Some(items)), depth })))
    }

    /// Returns a dictionary of distinct keys.
    pub fn dict(entries: Vec<(Value, Value)>, budget: &mut Budget) -> Result<Self> {
        budget.pay(2 * ITEM * (entries.len() as u64 + 1))?;
        let depth = nested(entries.iter().flat_map(|(key, value)| [key, value]))?;
        Ok(Value::Dict(Rc::new(Dict { entries, depth })))
    }

    /// Adds an entry, or replaces the value of its key.
    pub fn insert(entries: &mut Vec<(Value, Value)>, key: Value, value: Value, budget: &mut Budget) -> Result<()> {
        key.check_hashable()?;
        for (own, old) in entries.iter_mut() {
            if own.equals(&key, budget)? {
                *old = value;
                return Ok(());
            }
        }
        entries.push((key, value));
        Ok(())
    }

    pub fn method(receiver: Value, name: &str) -> Self {
        Value::Method(Rc::new((receiver, name.into())))
    }

    pub fn from_json(json: &Json, budget: &mut Budget) -> Result<Self> {
        Ok(match json {
            Json::Null => Value::None,
            Json::Bool(value) => Value::Bool(*value),
            Json::Number(number) => match number.as_i64() {
                Some(value) => Value::Int(value),
                None => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(text) => Value::str(text.as_str(), budget)?,
            Json::Array(items) => {
                let items = items.iter().map(|item| Value::from_json(item, budget)).collect::<Result<_>>()?;
                Value::list(items, budget)?
            }
            Json::Object(fields) => {
                let mut entries = Vec::with_capacity(fields.len());
                for (key, value) in fields {
                    entries.push((Value::str(key.as_str(), budget)?, Value::from_json(value, budget)?));
                }
                Value::dict(entries, budget)?
            }
        })
    }

    /// Nesting of containers.
    fn depth(&self) -> u32 {
        match self {
            Value::List(list) | Value::Tuple(list) | Value::View(_, list) => list.depth,
            Value::Dict(dict) => dict.depth,
            Value::Generator(generator) => generator.depth,
            Value::Loop(state) => state.items.depth,
            Value::Method(method) => method.0.depth() + 1,
            _ => 0,
        }
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::Str(text) => Some(text),
            _ => None,
        }
    }

    /// Returns an integer; booleans count as integers.
    pub fn as_int(&self) -> Option<i64> {
        match self {
            Value::Int(value) => Some(*value),
            Value::Bool(value) => Some(i64::from(*value)),
            _ => None,
        }
    }

    /// Returns a number as a float.
    pub fn as_float(&self) -> Option<f64> {
        match self {
            Value::Float(value) => Some(*value),
            other => other.as_int().map(|value| value as f64),
        }
    }

    pub fn is_undefined(&self) -> bool {
        matches!(self, Value::Undefined(_))
    }

    pub fn type_name(&self) -> &'static str {
        match self {
            Value::Undefined(_) => "undefined",
            Value::None => "NoneType",
            Value::Bool(_) => "bool",
            Value::Int(_) => "int",
            Value::Float(_) => "float",
            Value::Str(_) => "str",
            Value::List(_) => "list",
            Value::Tuple(_) => "tuple",
            Value::Dict(_) => "dict",
            Value::Range(..) => "range",
            Value::View(kind, _) => kind,
            Value::Generator(_) => "generator",
            Value::Namespace(_) => "Namespace",
            Value::Macro(_) => "Macro",
            Value::Loop(_) => "LoopContext",
            Value::Function(_) => "function",
            Value::Counter(_) => "cycler",
            Value::Method(_) => "method",
        }
    }

    /// Returns the error for an undefined value.
    pub fn undefined_error(name: &str) -> Error {
        Error::new(format!("'{name}' is undefined"))
    }

    pub fn check_hashable(&self) -> Result<()> {
        match self {
            Value::List(_) | Value::Dict(_) => Err(Error::new(format!("a {} is no key", self.type_name()))),
            Value::Tuple(items) => items.items.iter().try_for_each(Value::check_hashable),
            _ => Ok(()),
        }
    }

    pub fn is_true(&self) -> bool {
        match self {
            Value::Undefined(_) | Value::None => false,
            Value::Bool(value) => *value,
            Value::Int(value) => *value != 0,
            Value::Float(value) => *value != 0.0,
            Value::Str(text) => !text.is_empty(),
            Value::List(list) | Value::Tuple(list) | Value::View(_, list) => !list.items.is_empty(),
            Value::Dict(dict) => !dict.entries.is_empty(),
            Value::Range(..) => self.length().is_some_and(|length| length > 0),
            _ => true,
        }
    }

    /// Returns Python's `len`; `None` where there is none.
    pub fn length(&self) -> Option<u64> {
        match self {
            Value::Undefined(_) => Some(0),
            Value::Str(text) => Some(text.chars().count() as u64),
            Value::List(list) | Value::Tuple(list) | Value::View(_, list) => Some(list.items.len() as u64),
            Value::Dict(dict) => Some(dict.entries.len() as u64),
            Value::Range(start, stop, step) => {
                let span = match *step > 0 {
                    true => i128::from(*stop) - i128::from(*start),
                    false => i128::from(*start) - i128::from(*stop),
                };
                let step = i128::from(step.unsigned_abs());
                Some(if span <= 0 { 0 } else { (span + step - 1).div_euclid(step) as u64 })
            }
            Value::Loop(state) => Some(state.items.items.len() as u64),
            _ => None,
        }
    }

    /// Returns whether Python's `iter` accepts the value.
    pub fn is_iterable(&self) -> bool {
        self.length().is_some() || matches!(self, Value::Generator(_))
    }

    /// Returns the items that iteration yields.
    pub fn items(&self, budget: &mut Budget) -> Result<Rc<List>> {
        let items = match self {
            Value::List(list) | Value::Tuple(list) | Value::View(_, list) => return Ok(list.clone()),
            Value::Generator(generator) => {
                let taken = generator.items.take();
                return taken.map_or_else(|| List::new(Vec::new(), budget), Ok);
            }
            Value::Undefined(_) => Vec::new(),
            Value::Str(text) => {
                budget.pay(ITEM * text.len() as u64)?;
                text.chars().map(|c| Value::Str(c.to_string().into())).collect()
            }
            Value::Dict(dict) => dict.entries.iter().map(|(key, _)| key.clone()).collect(),
            Value::Range(start, _, step) => {
                let length = self.length().unwrap_or(0);
                budget.pay(ITEM.saturating_mul(length))?;
                let at = |index: u64| i128::from(*start) + i128::from(*step) * i128::from(index);
                (0..length).map(|index| Value::Int(at(index) as i64)).collect()
            }
            other => return Err(Error::new(format!("a {} can't be iterated", other.type_name()))),
        };
        List::new(items, budget)
    }

    /// Compares two values for equality.
    pub fn equals(&self, other: &Value, budget: &mut Budget) -> Result<bool> {
        budget.pay(1)?;
        if let (Some(a), Some(b)) = (self.as_int(), other.as_int()) {
            return Ok(a == b);
        }
        if let (Some(a), Some(b)) = (self.as_float(), other.as_float()) {
            return Ok(a == b);
        }
        match (self, other) {
            (Value::Str(a), Value::Str(b)) => {
                budget.pay_len(a.len().min(b.len()))?;
                Ok(a == b)
            }
            (Value::None, Value::None) | (Value::Undefined(_), Value::Undefined(_)) => Ok(true),
            (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
                if a.items.len() != b.items.len() {
                    return Ok(false);
                }
                for (a, b) in a.items.iter().zip(&b.items) {
                    if !a.equals(b, budget)? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
            (Value::Dict(a), Value::Dict(b)) => {
                if a.entries.len() != b.entries.len() {
                    return Ok(false);
                }
                for (key, value) in &a.entries {
                    match b.get(key, budget)? {
                        Some(other) if value.equals(other, budget)? => {}
                        _ => return Ok(false),
                    }
                }
                Ok(true)
            }
            (Value::Range(..), Value::Range(..)) => {
                let (a, b) = (self.items(budget)?, other.items(budget)?);
                Value::List(a).equals(&Value::List(b), budget)
            }
            (Value::Namespace(a), Value::Namespace(b)) | (Value::Counter(a), Value::Counter(b)) => Ok(a == b),
            (Value::Function(a), Value::Function(b)) => Ok(a == b),
            (Value::Loop(a), Value::Loop(b)) => Ok(Rc::ptr_eq(a, b)),
            (Value::Macro(a), Value::Macro(b)) => Ok(Rc::ptr_eq(a, b)),
            (Value::Generator(a), Value::Generator(b)) => Ok(Rc::ptr_eq(a, b)),
            _ => Ok(false),
        }
    }

    /// Orders two values, or fails where Python does; `None` if one is NaN.
    pub fn order(&self, other: &Value, budget: &mut Budget) -> Result<Option<Ordering>> {
        budget.pay(1)?;
        if let (Some(a), Some(b)) = (self.as_int(), other.as_int()) {
            return Ok(Some(a.cmp(&b)));
        }
        if let (Some(a), Some(b)) = (self.as_float(), other.as_float()) {
            return Ok(a.partial_cmp(&b));
        }
        match (self, other) {
            (Value::Str(a), Value::Str(b)) => {
                budget.pay_len(a.len().min(b.len()))?;
                Ok(Some(a.cmp(b)))
            }
            (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
                for (a, b) in a.items.iter().zip(&b.items) {
                    if !a.equals(b, budget)? {
                        return a.order(b, budget);
                    }
                }
                Ok(Some(a.items.len().cmp(&b.items.len())))
            }
            (Value::Undefined(name), _) | (_, Value::Undefined(name)) => Err(Value::undefined_error(name)),
            (a, b) => Err(Error::new(format!("a {} and a {} have no order", a.type_name(), b.type_name()))),
        }
    }

    /// Returns whether the container has an item.
    pub fn contains(&self, item: &Value, budget: &mut Budget) -> Result<bool> {
        match self {
            Value::Str(text) => match item {
                Value::Str(part) => {
                    budget.pay_len(text.len() + part.len())?;
                    Ok(text.contains(&**part))
                }
                other => Err(Error::new(format!("a str contains no {}", other.type_name()))),
            },
            Value::Dict(dict) => {
                item.check_hashable()?;
                Ok(dict.get(item, budget)?.is_some())
            }
            Value::Range(start, _, step) => Ok(item.as_int().is_some_and(|item| {
                let offset = i128::from(item) - i128::from(*start);
                let index = offset / i128::from(*step);
                offset % i128::from(*step) == 0 && index >= 0 && (index as u64) < self.length().unwrap_or(0)
            })),
            other => {
                for own in &other.items(budget)?.items {
                    if own.equals(item, budget)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
        }
    }
}

/// Appends Python's `str` of a value.
pub(super) fn write_str(value: &Value, out: &mut String, budget: &mut Budget) -> Result<()> {
    match value {
        Value::Str(text) => {
            budget.pay_len(text.len())?;
            out.push_str(text);
            Ok(())
        }
        Value::Undefined(_) => Ok(()),
        other => write_repr(other, out, budget),
    }
}

/// Returns Python's `str` of a value.
pub(super) fn to_str(value: &Value, budget: &mut Budget) -> Result<Arc<str>> {
    if let Value::Str(text) = value {
        return Ok(text.clone());
    }
    let mut out = String::new();
    write_str(value, &mut out, budget)?;
    Ok(out.into())
}

/// Appends Python's `repr` of a value.
pub(super) fn write_repr(value: &Value, out: &mut String, budget: &mut Budget) -> Result<()> {
    budget.step()?;
    let before = out.len();
    let mut sequence = |open: &str, items: &[Value], close: &str| -> Result<()> {
        out.push_str(open);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                out.push_str(", ");
            }
            write_repr(item, out, budget)?;
        }
        out.push_str(close);
        Ok(())
    };
    match value {
        Value::List(list) => return sequence("[", &list.items, "]"),
        Value::Tuple(list) if list.items.len() == 1 => return sequence("(", &list.items, ",)"),
        Value::Tuple(list) => return sequence("(", &list.items, ")"),
        Value::View(kind, list) => return sequence(&format!("{kind}(["), &list.items, "])"),
        Value::Dict(dict) => {
            out.push('{');
            for (index, (key, value)) in dict.entries.iter().enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                write_repr(key, out, budget)?;
                out.push_str(": ");
                write_repr(value, out, budget)?;
            }
            out.push('}');
            return Ok(());
        }
        Value::Undefined(_) => out.push_str("Undefined"),
        Value::None => out.push_str("None"),
        Value::Bool(value) => out.push_str(if *value { "True" } else { "False" }),
        Value::Int(value) => out.push_str(&value.to_string()),
        Value::Float(value) => out.push_str(&float_text(*value)),
        Value::Str(text) => quote(text, out),
        Value::Range(start, stop, 1) => out.push_str(&format!("range({start}, {stop})")),
        Value::Range(start, stop, step) => out.push_str(&format!("range({start}, {stop}, {step})")),
        other => return Err(Error::new(format!("a {} has no text", other.type_name()))),
    }
    budget.pay_len(out.len() - before)
}

/// Appends a string as Python's `repr` writes it.
fn quote(text: &str, out: &mut String) {
    let mark = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(mark);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == mark || c == '\\' => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            c => out.push_str(&match c as u32 {
                code @ ..=0xFF => format!("\\x{code:02x}"),
                code @ ..=0xFFFF => format!("\\u{code:04x}"),
                code => format!("\\U{code:08x}"),
            }),
        }
    }
    out.push(mark);
}

/// Returns whether Python's `repr` writes a character as it is: no control, format, private-use or space character.
fn is_printable(c: char) -> bool {
    let hidden = matches!(c,
        '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{8e2}' | '\u{180e}'
        | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{e000}'..='\u{f8ff}'
        | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{fffe}'..='\u{ffff}' | '\u{e0001}' | '\u{e0020}'..='\u{e007f}'
        | '\u{f0000}'..);
    c == ' ' || !(c.is_control() || c.is_whitespace() || hidden)
}

/// Returns Python's `repr` of a float: the shortest digits that read back as the same value.
pub(super) fn float_text(value: f64) -> String {
    if value.is_nan() {
        return "nan".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.into();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{value}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}
