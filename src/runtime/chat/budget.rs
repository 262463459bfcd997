//! What a template may compute: bytes and work of one rendering, whatever it writes in the end.
//!
//! Fuel counts instructions, and one instruction can double a string or walk through a list that holds itself a million
//! times. So every operation is paid for before it is done, by the bytes that it makes and those that it reads.
//! Nothing that was paid for is given back, which bounds the memory of a rendering by what it may pay.
//!
//! - Filters, tests, functions and methods are called through the environment, which has paying ones under their names.
//! - Operators are instructions of their own. Each is preceded by a filter that takes its operands, pays and gives them
//!   back; no template can name that filter in its source, and one that calls it all the same only pays.
//! - What is written, into the text or into a variable, goes through the formatter, raw text too.
//! - Constants are computed when a template is compiled. A filter that changes nothing keeps them from that.
//!
//! Chains of values need a bound too, for they are walked by recursion, and dropped so. Lazy sequences are collected where
//! they are made, what is walked may only be so deep, and each container is kept until the end, when the youngest goes
//! first: what it holds is held by others still. Namespaces can hold themselves, and are emptied before.

mod guards;
mod namespace;
mod rewriting;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use minijinja::machinery::{self, Instruction};
use minijinja::value::{DynObject, ObjectRepr, Rest, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Template, Value, functions};
use minijinja_contrib::pycompat::unknown_method_callback;

use guards::{built_in_filters, built_in_tests, without_layers};
use namespace::Namespace;
pub(super) use rewriting::without_folding;
use rewriting::{Rewriting, each};

/// Bytes that a rendering may make and read, beside those for its conversation.
const BUDGET: u64 = 256 << 20;
/// As often may it go through its conversation.
const PASSES: u64 = 16;
/// How deep a value that is walked through may be nested: JSON ends at 128.
const MAX_DEPTH: usize = 192;
/// Instructions of one rendering, those that pay for others included: they are about as many.
const FUEL: u64 = 10_000_000;
/// Most tokens of one `{{ … }}` or `{% … %}`: compiling a chain of operators takes the square of its length.
const MAX_TOKENS: usize = 4096;

/// Bytes of a container.
const CONTAINER: u64 = 128;
/// Bytes of a place in a sequence.
const ITEM: u64 = 32;
/// Bytes of a place in a map.
const ENTRY: u64 = 128;

/// What it costs to go through a byte of a string character by character.
const SCAN: u64 = 4;
/// Bytes of a first node of a `BTreeMap`.
const TREE: u64 = 512;

/// The filter that changes nothing.
const SAME: &str = "_same";

type Outcome<T = ()> = Result<T, Error>;
type Guard = fn(&Budget, &[Value]) -> Outcome;

fn invalid(problem: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem)
}

/// What a template writes with `root` as its variables, whose texts have so many bytes. `own_filters` and `own_functions` are those beyond the engine's own.
pub(super) fn render(
    template: &Template,
    root: Value,
    conversation: u64,
    own_filters: &[(&'static str, Value)],
    own_functions: &[(&'static str, Value)],
) -> Outcome<String> {
    let compiled = machinery::get_compiled_template(template);
    let all: Vec<_> = std::iter::once(&compiled.instructions).chain(compiled.blocks.values()).flat_map(each).collect();
    let recursive = |instruction: &&Instruction| matches!(instruction, Instruction::PushLoop(flags) if flags & 2 != 0);
    let rewriting = Rewriting { recursive: all.iter().any(recursive) };
    let arguments = all.windows(2).filter_map(|pair| match pair {
        [Instruction::LoadConst(arguments), Instruction::BuildMacro(..)] => arguments.len(),
        _ => None,
    });
    // declared first, dropped last
    let budget = Arc::new(Budget::new(conversation, arguments.max().unwrap_or(0)));
    let instructions = rewriting.guarded(&compiled.instructions);
    let blocks: BTreeMap<_, _> =
        compiled.blocks.iter().map(|(name, block)| (*name, rewriting.guarded(block))).collect();
    let environment = budget.environment(own_filters, own_functions);
    let mut text = String::new();
    let mut output = machinery::make_string_output(&mut text);
    machinery::eval(&environment, &instructions, root, &blocks, &mut output, AutoEscape::None)?;
    drop(output);
    Ok(text)
}

/// What is left of a rendering's bytes, and the containers that it made.
struct Budget {
    left: AtomicU64,
    most: u64,
    kept: Mutex<Kept>,
    /// Bytes of the list of a macro's arguments, which is made whenever it is looked at.
    arguments: u64,
}

#[derive(Default)]
struct Kept {
    containers: Vec<Value>,
    namespaces: Vec<Arc<Namespace>>,
}

impl Drop for Budget {
    fn drop(&mut self) {
        let kept = self.kept.get_mut().unwrap_or_else(PoisonError::into_inner);
        kept.namespaces.iter().for_each(|namespace| namespace.fields().clear());
        while kept.containers.pop().is_some() {}
    }
}

impl Budget {
    fn new(conversation: u64, arguments: usize) -> Self {
        let most = conversation.saturating_mul(PASSES).saturating_add(BUDGET);
        Budget { left: AtomicU64::new(most), most, kept: Mutex::default(), arguments: ITEM * arguments as u64 }
    }

    fn left(&self) -> u64 {
        self.left.load(Ordering::Relaxed)
    }

    fn exhausted(&self) -> Error {
        self.left.store(0, Ordering::Relaxed);
        invalid(format!("it computes values of more than {} bytes", self.most))
    }

    /// Pays for bytes that are made or read.
    fn pay(&self, bytes: u64) -> Outcome {
        let left = self.left().checked_sub(bytes).ok_or_else(|| self.exhausted())?;
        self.left.store(left, Ordering::Relaxed);
        Ok(())
    }

    /// Bytes of a value with all that it holds, as often as it holds it.
    fn weigh(&self, value: &Value) -> Outcome<u64> {
        let Some(object) = value.as_object() else { return Ok(len(value)) };
        let most = self.left();
        let mut bytes = CONTAINER;
        let mut open = vec![held(object)];
        while let Some(innermost) = open.last_mut() {
            let Some(value) = innermost.next() else {
                open.pop();
                continue;
            };
            bytes += ITEM + len(&value);
            if let Some(object) = value.as_object() {
                bytes += CONTAINER;
                if open.len() >= MAX_DEPTH {
                    return Err(invalid(format!("it uses a value that is nested more than {MAX_DEPTH} times")));
                }
                open.push(held(object));
            }
            if bytes > most {
                return Err(self.exhausted());
            }
        }
        Ok(bytes)
    }

    /// Pays for reading all of a value.
    fn walk(&self, value: &Value) -> Outcome {
        self.weigh(value).and_then(|bytes| self.pay(bytes))
    }

    /// As [`Budget::walk`], of values that are walked through if they are containers.
    fn walk_containers(&self, values: &[Value]) -> Outcome {
        values.iter().filter(|value| value.as_object().is_some()).try_for_each(|value| self.walk(value))
    }

    /// Bytes of a value as text.
    fn text(&self, value: &Value) -> Outcome<u64> {
        match value.as_str() {
            Some(text) => Ok(text.len() as u64),
            None => self.formatted(value, format_args!("{value}")),
        }
    }

    /// Bytes of a text of a value.
    fn formatted(&self, value: &Value, text: fmt::Arguments) -> Outcome<u64> {
        self.walk(value)?;
        let mut count = Count { bytes: 0, most: self.left() };
        count.write_fmt(text).map_err(|_| self.exhausted())?;
        Ok(count.bytes)
    }

    /// Keeps a container that was made, and pays for it.
    fn made(&self, value: Value) -> Outcome<Value> {
        let Some(object) = value.as_object() else { return Ok(value) };
        let known = value.len();
        let place = if object.repr() == ObjectRepr::Map { ENTRY } else { ITEM };
        self.pay(CONTAINER.saturating_add(place.saturating_mul(known.unwrap_or(0) as u64)))?;
        let value = if value.kind() == ValueKind::Iterable { self.collected(&value, known)? } else { value };
        self.kept().containers.push(value.clone());
        Ok(value)
    }

    /// A lazy sequence, collected.
    fn collected(&self, value: &Value, known: Option<usize>) -> Outcome<Value> {
        let mut items = Vec::new();
        for item in value.try_iter()?.checked() {
            if items.len() >= known.unwrap_or(0) {
                self.pay(ITEM)?;
            }
            items.push(item?);
        }
        Ok(match known {
            Some(_) => Value::make_object_iterable(items, |items| Box::new(items.iter().cloned())),
            // of a length that isn't known, as before
            None => Value::make_object_iterable(items, |items| {
                let mut items = items.iter();
                Box::new(std::iter::from_fn(move || items.next().cloned()))
            }),
        })
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An environment whose operations pay.
    fn environment(
        self: &Arc<Self>,
        own_filters: &[(&'static str, Value)],
        own_functions: &[(&'static str, Value)],
    ) -> Environment<'static> {
        let mut environment = Environment::new();
        environment.set_fuel(Some(FUEL));
        environment.set_debug(false);
        let budget = self.clone();
        environment.set_formatter(move |out, state, value| {
            budget.pay(match state.auto_escape() {
                AutoEscape::None => budget.text(value)?,
                AutoEscape::Html => budget.text(value)?.saturating_mul(6),
                _ => budget.weigh(value)?.saturating_mul(8),
            })?;
            minijinja::escape_formatter(out, state, value)
        });
        let budget = self.clone();
        environment.set_unknown_method_callback(move |state, value, method, arguments| {
            budget.before_method(value, method, arguments)?;
            let result = unknown_method_callback(state, value, method, arguments)?;
            if method == "get" { Ok(result) } else { budget.made(result) }
        });
        self.add_guards(&mut environment);
        for (name, filter) in built_in_filters().into_iter().chain(own_filters.iter().cloned()) {
            let budget = self.clone();
            environment.add_filter(name, move |state: &mut State, arguments: Rest<ValueOrKwargs>| {
                let arguments = arguments.into_values();
                budget.before_filter(state, name, &arguments)?;
                let result = filter.call(state, &arguments)?;
                let chosen = ["default", "d", "first", "last", "attr", "min", "max", "string"].contains(&name);
                if chosen { Ok(result) } else { budget.made(without_layers(result, name)?) }
            });
        }
        for (name, test) in built_in_tests() {
            let budget = self.clone();
            environment.add_test(name, move |state: &mut State, arguments: Rest<ValueOrKwargs>| {
                let arguments = arguments.into_values();
                budget.before_test(name, &arguments)?;
                test.call(state, &arguments)
            });
        }
        let own = [("dict", Value::from_function(functions::dict)), ("debug", Value::from_function(functions::debug))];
        for (name, function) in own.into_iter().chain(own_functions.iter().cloned()) {
            let budget = self.clone();
            let function = move |state: &mut State, arguments: Rest<ValueOrKwargs>| {
                let arguments = arguments.into_values();
                budget.before_function(name, &arguments)?;
                budget.made(function.call(state, &arguments)?)
            };
            environment.add_function(name, function);
        }
        let budget = self.clone();
        environment.add_function("namespace", move |fields: Option<ValueOrKwargs>| {
            budget.pay(TREE)?;
            let namespace = Arc::new(Namespace::default());
            if let Some(fields) = fields.map(ValueOrKwargs::into_value) {
                let Some(object) = fields.as_object().filter(|object| object.repr() == ObjectRepr::Map) else {
                    return Err(invalid(format!("expected object or keyword arguments, got {}", fields.kind())));
                };
                for (key, value) in object.try_iter_pairs().into_iter().flatten() {
                    budget.pay(ENTRY)?;
                    if let Some(key) = key.to_str() {
                        namespace.fields().insert(key, value);
                    }
                }
            }
            budget.kept().namespaces.push(namespace.clone());
            budget.made(Value::from_dyn_object(namespace))
        });
        environment
    }
}

/// Bytes of a string.
fn len(value: &Value) -> u64 {
    value.as_str().map_or(0, str::len) as u64
}

/// Bytes of a string, or of a container without what it holds.
fn size(value: &Value) -> u64 {
    match value.as_str() {
        Some(text) => text.len() as u64,
        None => items(value),
    }
}

/// Bytes of the items of a value as a list.
fn items(value: &Value) -> u64 {
    let count = match value.as_str() {
        Some(text) => text.len(),
        None => value.as_object().and_then(DynObject::enumerator_len).unwrap_or(0),
    };
    (count as u64).saturating_mul(ITEM)
}

/// A value as text, whose length was paid for.
fn text(value: &Value) -> Cow<'_, str> {
    value.as_str().map_or_else(|| Cow::Owned(value.to_string()), Cow::Borrowed)
}

/// What a container holds, keys of a map included.
fn held(object: &DynObject) -> Box<dyn Iterator<Item = Value>> {
    match object.repr() {
        ObjectRepr::Map => {
            Box::new(object.try_iter_pairs().into_iter().flatten().flat_map(|(key, value)| [key, value]))
        }
        ObjectRepr::Seq | ObjectRepr::Iterable => Box::new(object.try_iter().into_iter().flatten()),
        _ => Box::new(std::iter::empty()),
    }
}

/// Counts what is written, up to a limit.
struct Count {
    bytes: u64,
    most: u64,
}

impl Write for Count {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.bytes += text.len() as u64;
        if self.bytes > self.most { Err(fmt::Error) } else { Ok(()) }
    }
}
