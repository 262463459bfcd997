//! Calls of functions of the environment, of macros and of loops.

use std::rc::Weak;

use anec_base::clock;

use super::{Evaluator, Passed, methods};
use crate::jinja::parser::Arguments;
use crate::jinja::value::{ITEM, LoopState, MacroValue, Value, to_str};
use crate::jinja::{Error, Result};

/// Maximum number of elements of a `range`, as in Jinja2's sandbox.
const MAX_RANGE: u64 = 100_000;

/// State of `cycler` and `joiner`.
pub(super) enum Counter {
    Cycler(Vec<Value>, usize),
    Joiner(Value, bool),
}

impl Evaluator {
    pub(super) fn arguments(&mut self, arguments: &Arguments) -> Result<Passed> {
        let mut passed = Passed::of(self.evals(&arguments.positional)?);
        for (name, value) in &arguments.named {
            passed.named.push((name.clone(), self.eval(value)?));
        }
        if let Some(sequence) = &arguments.sequence {
            let items = self.eval(sequence)?.items(&mut self.budget)?;
            passed.positional.extend(items.items.iter().cloned());
        }
        if let Some(mapping) = &arguments.mapping {
            let Value::Dict(dict) = self.eval(mapping)? else { return Err(Error::new("`**` needs a mapping")) };
            for (key, value) in &dict.entries {
                self.budget.pay(ITEM)?;
                passed.named.push((to_str(key, &mut self.budget)?, value.clone()));
            }
        }
        Ok(passed)
    }

    /// Calls a value.
    pub fn call(&mut self, callee: &Value, passed: Passed) -> Result<Value> {
        self.budget.step()?;
        match callee {
            Value::Function(name) => self.function(name, passed),
            Value::Macro(own) => self.call_macro(own, passed),
            Value::Method(method) => match &method.0 {
                Value::Loop(state) => self.loop_method(state, &method.1, passed),
                Value::Counter(index) => self.count(*index, &method.1),
                receiver => methods::call(self, receiver, &method.1, passed),
            },
            Value::Counter(index) => self.count(*index, "next"),
            Value::Loop(state) => self.call_loop(state, passed),
            Value::Undefined(name) => Err(Value::undefined_error(name)),
            other => Err(Error::new(format!("a {} can't be called", other.type_name()))),
        }
    }

    fn call_macro(&mut self, own: &MacroValue, passed: Passed) -> Result<Value> {
        let definition = &own.definition;
        let parent = own.scope.upgrade().unwrap_or_else(|| self.root.clone());
        self.captured(|evaluator| {
            evaluator.scoped(&parent, |evaluator| {
                let mut positional = passed.positional.into_iter();
                let mut named = passed.named;
                for (name, default) in &definition.parameters {
                    let given = named.iter().position(|(own, _)| own == name).map(|index| named.remove(index).1);
                    let value = match (positional.next().or(given), default) {
                        (Some(value), _) => value,
                        (None, Some(default)) => evaluator.eval(default)?,
                        (None, None) => Value::Undefined(name.clone()),
                    };
                    evaluator.scope.set(name.clone(), value);
                }
                let caller = named.iter().position(|(name, _)| &**name == "caller");
                let caller = caller.map(|index| named.remove(index).1);
                evaluator.scope.set("caller".into(), caller.unwrap_or(Value::Undefined("caller".into())));
                let varargs = Value::tuple(positional.collect(), &mut evaluator.budget)?;
                evaluator.scope.set("varargs".into(), varargs);
                let kwargs = named.into_iter().map(|(name, value)| (Value::Str(name), value)).collect();
                evaluator.scope.set("kwargs".into(), Value::dict(kwargs, &mut evaluator.budget)?);
                evaluator.nodes(&definition.body).map(|_| ())
            })
        })
    }

    fn call_loop(&mut self, state: &LoopState, passed: Passed) -> Result<Value> {
        let [iterable] = passed.fixed("loop", ["iterable"], 1)?;
        let Some((node, scope)) = &state.recursive else { return Err(Error::new("the loop isn't recursive")) };
        let parent = Weak::upgrade(scope).unwrap_or_else(|| self.root.clone());
        let outer = std::mem::replace(&mut self.level, state.level + 1);
        let text = self.captured(|own| {
            let scope = std::mem::replace(&mut own.scope, parent);
            let done = own.nested(|own| own.for_loop(node, &iterable.unwrap_or(Value::None)));
            own.scope = scope;
            done.map(|_| ())
        });
        self.level = outer;
        text
    }

    fn loop_method(&mut self, state: &LoopState, name: &str, passed: Passed) -> Result<Value> {
        if name == "cycle" {
            let count = passed.positional.len();
            let item = passed.positional.into_iter().nth(state.index.get() % count.max(1));
            return item.ok_or_else(|| Error::new("nothing to cycle through"));
        }
        let same = match &self.changed[state.id] {
            Some(before) if before.len() == passed.positional.len() => {
                let mut same = true;
                for (a, b) in before.iter().zip(&passed.positional) {
                    same &= a.equals(b, &mut self.budget)?;
                }
                same
            }
            _ => false,
        };
        self.changed[state.id] = Some(passed.positional);
        Ok(Value::Bool(!same))
    }

    fn count(&mut self, index: usize, method: &str) -> Result<Value> {
        match (&mut self.counters[index], method) {
            (Counter::Cycler(_, at), "reset") => {
                *at = 0;
                Ok(Value::None)
            }
            (Counter::Cycler(items, at), _) => {
                let item = items[*at].clone();
                *at = (*at + 1) % items.len();
                Ok(item)
            }
            (Counter::Joiner(separator, used), _) => {
                Ok(if std::mem::replace(used, true) { separator.clone() } else { Value::Str("".into()) })
            }
        }
    }

    /// Calls a function of the environment.
    fn function(&mut self, name: &str, passed: Passed) -> Result<Value> {
        match name {
            "range" => {
                let [first, second, step] = passed.fixed(name, ["start", "stop", "step"], 1)?;
                let int = |value: Option<Value>, default: i64| match value {
                    None => Ok(default),
                    Some(value) => value.as_int().ok_or_else(|| Error::new("range needs integers")),
                };
                let (start, stop) = match second {
                    None => (0, int(first, 0)?),
                    second => (int(first, 0)?, int(second, 0)?),
                };
                let range = Value::Range(start, stop, int(step, 1)?);
                if matches!(range, Value::Range(_, _, 0)) {
                    return Err(Error::new("range needs a step other than 0"));
                }
                match range.length().is_some_and(|length| length > MAX_RANGE) {
                    true => Err(Error::new(format!("a range of more than {MAX_RANGE} numbers"))),
                    false => Ok(range),
                }
            }
            "dict" | "namespace" => {
                let mut entries = Vec::new();
                for argument in &passed.positional {
                    let Value::Dict(dict) = argument else { return Err(Error::new(format!("{name} needs a mapping"))) };
                    for (key, value) in &dict.entries {
                        Value::insert(&mut entries, key.clone(), value.clone(), &mut self.budget)?;
                    }
                }
                for (key, value) in passed.named {
                    Value::insert(&mut entries, Value::Str(key), value, &mut self.budget)?;
                }
                if name == "dict" {
                    return Value::dict(entries, &mut self.budget);
                }
                self.budget.pay(256 + 64 * entries.len() as u64)?;
                let mut fields = Vec::with_capacity(entries.len());
                for (key, value) in entries {
                    fields.push((to_str(&key, &mut self.budget)?, value));
                }
                self.namespaces.push(fields);
                Ok(Value::Namespace(self.namespaces.len() - 1))
            }
            "cycler" | "joiner" => {
                let counter = match name {
                    "cycler" if passed.positional.is_empty() => return Err(Error::new("nothing to cycle through")),
                    "cycler" => Counter::Cycler(passed.positional, 0),
                    _ => {
                        let [separator] = passed.fixed(name, ["sep"], 0)?;
                        Counter::Joiner(separator.unwrap_or(Value::Str(", ".into())), false)
                    }
                };
                self.budget.pay(64)?;
                self.counters.push(counter);
                Ok(Value::Counter(self.counters.len() - 1))
            }
            "strftime_now" => {
                let [format] = passed.fixed(name, ["format"], 1)?;
                let format = to_str(&format.unwrap_or(Value::None), &mut self.budget)?;
                self.budget.pay_len(format.len().saturating_mul(16))?;
                Value::str(clock::strftime(&format, clock::now()), &mut self.budget)
            }
            _ => {
                let [message] = passed.fixed(name, ["message"], 1)?;
                Err(Error::new(&*to_str(&message.unwrap_or(Value::None), &mut self.budget)?))
            }
        }
    }
}

/// Returns an attribute of `loop`.
pub(super) fn loop_attribute(state: &LoopState, name: &str) -> Option<Value> {
    let (index, length) = (state.index.get(), state.items.items.len());
    let number = |number: usize| Some(Value::Int(number as i64));
    let neighbour = |at: Option<usize>| {
        let item = at.and_then(|at| state.items.items.get(at)).cloned();
        Some(item.unwrap_or_else(|| Value::Undefined(name.into())))
    };
    match name {
        "index" => number(index + 1),
        "index0" => number(index),
        "revindex" => number(length - index),
        "revindex0" => number(length - index - 1),
        "first" => Some(Value::Bool(index == 0)),
        "last" => Some(Value::Bool(index + 1 == length)),
        "length" => number(length),
        "depth" => number(state.level + 1),
        "depth0" => number(state.level),
        "previtem" => neighbour(index.checked_sub(1)),
        "nextitem" => neighbour(index.checked_add(1)),
        _ => None,
    }
}
