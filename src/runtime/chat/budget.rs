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

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use minijinja::machinery::{self, Instruction, Instructions, Token};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{DynObject, Enumerator, Kwargs, Object, ObjectRepr, Rest, Tuple, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Template, Value, filters, functions, tests};
use minijinja_contrib::pycompat::unknown_method_callback;

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

/// A source whose constants are computed when they are rendered.
pub(super) fn without_folding(source: &str, syntax: &SyntaxConfig) -> Outcome<String> {
    let mut out = String::new();
    let (mut done, mut tokens, mut operand) = (0, 0, false);
    for token in machinery::tokenize(source, false, syntax.clone()) {
        let (token, span) = token?;
        // what follows an operand is an operator of two, and not a sign or the star of `f(*arguments)`
        if operand && matches!(token, Token::Plus | Token::Mul | Token::Tilde) {
            let start = span.start_offset as usize;
            out.push_str(source.get(done..start).unwrap_or_default());
            out.push('|');
            out.push_str(SAME);
            out.push(' ');
            done = start;
        }
        operand = matches!(
            token,
            Token::Ident(_)
                | Token::Str(_)
                | Token::String(_)
                | Token::Int(_)
                | Token::Int128(_)
                | Token::Float(_)
                | Token::BracketClose
                | Token::ParenClose
                | Token::BraceClose
        );
        tokens = match token {
            Token::VariableStart | Token::BlockStart => 0,
            _ => tokens + 1,
        };
        if tokens > MAX_TOKENS {
            return Err(invalid(format!("line {}: a tag of more than {MAX_TOKENS} words", span.start_line)));
        }
    }
    out.push_str(source.get(done..).unwrap_or_default());
    Ok(out)
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

/// The instructions of a template.
fn each<'a, 's>(instructions: &'a Instructions<'s>) -> impl Iterator<Item = &'a Instruction<'s>> {
    (0..).map_while(|index| instructions.get(index))
}

/// How instructions become ones that pay.
struct Rewriting {
    /// There is a recursive loop, which any call may call.
    recursive: bool,
}

impl Rewriting {
    fn guarded<'s>(&self, instructions: &Instructions<'s>) -> Instructions<'s> {
        let mut targets = Vec::new();
        for instruction in each(instructions) {
            let mut instruction = instruction.clone();
            targets.extend(target(&mut instruction).map(|target| *target));
        }
        targets.sort_unstable();
        let mut out: Vec<(Instruction, u32)> = Vec::new();
        let mut places = Vec::new();
        let mut before: Option<&Instruction> = None;
        for (index, instruction) in (0u32..).zip(each(instructions)) {
            places.push(out.len() as u32);
            // whether the operand on top is a small constant, on whatever way this instruction is reached
            let small = matches!(before, Some(Instruction::LoadConst(value)) if value.as_object().is_none()
                && value.as_str().is_none_or(|text| text.len() < 256 && text != "arguments")
                && value.as_i64().is_none_or(|number| (0..256).contains(&number)));
            let small = small && targets.binary_search(&index).is_err();
            out.extend(self.one(instruction, small).into_iter().map(|instruction| (instruction, index)));
            before = Some(instruction);
        }
        places.push(out.len() as u32);
        let mut guarded = Instructions::new(instructions.name(), instructions.source());
        for (mut instruction, index) in out {
            if let Some(target) = target(&mut instruction) {
                *target = places.get(*target as usize).copied().unwrap_or(u32::MAX);
            }
            match (instructions.get_span(index), instructions.get_line(index)) {
                (Some(span), _) => guarded.add_with_span(instruction, span),
                (None, Some(line)) => guarded.add_with_line(instruction, u16::try_from(line).unwrap_or(u16::MAX)),
                (None, None) => guarded.add(instruction),
            };
        }
        guarded
    }

    /// What stands for one instruction.
    fn one<'s>(&self, instruction: &Instruction<'s>, small: bool) -> Vec<Instruction<'s>> {
        use Instruction as I;
        let own = instruction.clone();
        let apply = |name, count: u16| I::ApplyFilter(name, Some(count), !0);
        // the operands, paid for and put back
        let paid = |name, count: usize| match (count, u16::try_from(count)) {
            (0, _) => vec![],
            (1, _) => vec![apply(name, 1)],
            (_, Ok(short)) => vec![apply(name, short), I::UnpackList(count)],
            // more than a call can have
            (_, Err(_)) => vec![I::LoadConst(Value::from(())), apply("#refuse", 1)],
        };
        let around = |name, count| [paid(name, count), vec![own.clone(), apply("#made", 1)]].concat();
        let then = |name, count| [paid(name, count), vec![own.clone()]].concat();
        let call = |name, in_order, count: Option<u16>| match count {
            Some(count) => then(name, usize::from(count)),
            // the number of arguments is on top of them
            None => vec![I::ApplyFilter(in_order, None, !0), I::UnpackLists(1), own.clone()],
        };
        match instruction {
            I::EmitRaw(text) => vec![I::LoadConst(Value::from_safe_string((*text).to_owned())), I::Emit],
            I::StringConcat => then("#concat", 2),
            I::Add => around("#add", 2),
            I::Mul => around("#mul", 2),
            I::Slice => around("#slice", 4),
            I::Eq | I::Ne | I::Gt | I::Gte | I::Lt | I::Lte if !small => then("#compare", 2),
            I::In | I::CompareAndPreserve(_) => then("#in", 2),
            I::GetItem if !small => then("#item", 2),
            I::GetAttr("arguments") => then("#arguments", 1),
            I::BuildMap(pairs) => around("#keys", pairs * 2),
            I::BuildList(_) | I::BuildTuple(_) | I::BuildKwargs(_) => around("", 0),
            I::MergeKwargs(count) => around("#copy", *count),
            I::UnpackLists(count) => then("#items", *count),
            I::PushLoop(_) | I::FastRecurse => then("#loop", 1),
            I::CallFunction(_, count) if self.recursive => call("#loop", "#loop-in-order", *count),
            I::CallMethod("changed", count) => call("#changed", "#changed-in-order", *count),
            I::CallMethod("cycle", count) => call("#cycle", "#cycle-in-order", *count),
            I::Include(_) | I::LoadBlocks => then("#name", 1),
            I::SetAttr(name) => vec![I::LoadConst(Value::from(*name)), apply("#set", 3), I::DiscardTop],
            I::Enclose(_) => vec![I::LoadConst(Value::from(TREE)), apply("#pay", 1), I::DiscardTop, own],
            _ => vec![own],
        }
    }
}

/// Where an instruction goes on.
fn target<'a>(instruction: &'a mut Instruction<'_>) -> Option<&'a mut u32> {
    match instruction {
        Instruction::Jump(target)
        | Instruction::JumpIfFalse(target)
        | Instruction::JumpIfFalseOrPop(target)
        | Instruction::JumpIfTrueOrPop(target)
        | Instruction::Iterate(target)
        | Instruction::BuildMacro(_, target, _) => Some(target),
        _ => None,
    }
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

    /// The filters that pay for instructions.
    fn add_guards(self: &Arc<Self>, environment: &mut Environment) {
        environment.add_filter(SAME, |value: Value| value);
        let guards: [(&str, Guard); 17] = [
            ("#arguments", |budget, _| budget.pay(budget.arguments)),
            ("#concat", |budget, values| {
                let texts = values.iter().map(|value| budget.text(value));
                texts.sum::<Outcome<u64>>().and_then(|bytes| budget.pay(bytes))
            }),
            ("#add", |budget, values| {
                let grows = values.iter().all(|value| value.as_str().is_some() || value.is_tuple());
                if grows { budget.pay(values.iter().map(size).sum()) } else { Ok(()) }
            }),
            ("#mul", |budget, values| match values {
                [a, b] => {
                    let times = |value: &Value, times: &Value| {
                        let once = if value.as_str().is_some() || value.is_tuple() { size(value) } else { 0 };
                        once.saturating_mul(times.as_usize().unwrap_or(0) as u64)
                    };
                    budget.pay(times(a, b).max(times(b, a)))
                }
                _ => Ok(()),
            }),
            ("#slice", |budget, values| match values {
                [value, start, stop, step] if value.as_str().is_some() => {
                    let place = |place: &Value| place.as_usize().map(|place| (place as u64).saturating_mul(4));
                    let all = len(value);
                    let start = if start.is_none() { Some(0) } else { place(start) };
                    let (start, stop) = match (start, place(stop)) {
                        (Some(start), Some(stop)) => (start.min(all), stop.min(all)),
                        _ => (0, all),
                    };
                    budget.pay(stop.saturating_mul(SCAN))?;
                    budget.pay(stop.saturating_sub(start).saturating_mul(if step.is_none() { 1 } else { 4 }))
                }
                // the whole of a tuple is copied
                [value, ..] if value.is_tuple() => budget.pay(size(value)),
                _ => Ok(()),
            }),
            ("#compare", Budget::compare),
            ("#in", |budget, values| match values {
                [value, container] => budget.contains(container, value),
                _ => Ok(()),
            }),
            ("#item", |budget, values| match values {
                [container, key] => {
                    budget.walk(key)?;
                    if key.as_str() == Some("arguments") {
                        budget.pay(budget.arguments)?;
                    }
                    match container.as_object().map(DynObject::repr) {
                        None => {
                            let touched = key.as_usize().map_or(u64::MAX, |place| (place as u64).saturating_mul(4));
                            budget.pay(len(container).min(touched).saturating_mul(SCAN))
                        }
                        Some(ObjectRepr::Iterable) => budget.pay(size(container)),
                        Some(_) => Ok(()),
                    }
                }
                _ => Ok(()),
            }),
            ("#keys", |budget, values| values.iter().step_by(2).try_for_each(|key| budget.walk(key))),
            ("#copy", |budget, values| values.iter().try_for_each(|value| budget.copy(value))),
            ("#items", |budget, values| budget.pay(values.iter().map(items).sum())),
            ("#loop", |budget, values| {
                values.iter().try_for_each(|value| match value.downcast_object_ref::<Namespace>() {
                    Some(_) => budget.pay(size(value)),
                    None => budget.pay(len(value)),
                })
            }),
            ("#name", |budget, values| {
                let texts = values.iter().map(|value| budget.text(value));
                texts.sum::<Outcome<u64>>().and_then(|bytes| budget.pay(bytes.saturating_mul(8)))
            }),
            ("#cycle", |_, values| match values {
                [_] => Err(invalid("nothing to cycle through")),
                _ => Ok(()),
            }),
            ("#cycle-in-order", |_, values| match values {
                [_] => Err(invalid("nothing to cycle through")),
                _ => Ok(()),
            }),
            ("#loop-in-order", |budget, values| budget.pay(values.iter().map(len).sum())),
            ("#refuse", |_, _| Err(invalid("a list of too many values"))),
        ];
        for (name, guard) in guards {
            let budget = self.clone();
            environment.add_filter(name, move |values: Rest<ValueOrKwargs>| {
                let values = values.into_values();
                guard(&budget, &values)?;
                Ok::<Value, Error>(operands(values, name.ends_with("-in-order")))
            });
        }
        for name in ["#changed", "#changed-in-order"] {
            let budget = self.clone();
            // a loop keeps these, and could keep itself: the text of a container does for seeing whether it has changed
            environment.add_filter(name, move |values: Rest<ValueOrKwargs>| {
                let mut values = values.into_values();
                for value in values.iter_mut().skip(1).filter(|value| value.as_object().is_some()) {
                    budget.pay(budget.formatted(value, format_args!("{value:?}"))?)?;
                    *value = Value::from(format!("{value:?}"));
                }
                Ok::<Value, Error>(operands(values, name.ends_with("-in-order")))
            });
        }
        let budget = self.clone();
        environment.add_filter("#made", move |value: ValueOrKwargs| budget.made(value.into_value()));
        let budget = self.clone();
        environment.add_filter("#pay", move |bytes: u64| budget.pay(bytes));
        let budget = self.clone();
        environment.add_filter("#set", move |value: ValueOrKwargs, target: ValueOrKwargs, name: &str| {
            let (value, target) = (value.into_value(), target.into_value());
            let Some(namespace) = target.downcast_object_ref::<Namespace>() else {
                return Err(invalid(format!("can only assign to namespaces, not {}", target.kind())));
            };
            if namespace.fields().insert(name.into(), value).is_none() {
                budget.pay(ENTRY)?;
            }
            Ok(())
        });
    }

    fn compare(&self, values: &[Value]) -> Outcome {
        match values {
            [a, b] => match (a.as_str(), b.as_str()) {
                (Some(a), Some(b)) => self.pay(a.len().min(b.len()) as u64),
                // values of two kinds are told apart without looking into them
                _ if a.as_object().is_none() || b.as_object().is_none() => Ok(()),
                _ => self.walk_containers(values),
            },
            _ => Ok(()),
        }
    }

    fn contains(&self, container: &Value, value: &Value) -> Outcome {
        match container.as_object().map(DynObject::repr) {
            None => {
                self.pay(len(container))?;
                match container.as_str().is_some() && value.as_str().is_none() {
                    true => self.pay(self.text(value)?),
                    false => Ok(()),
                }
            }
            Some(ObjectRepr::Seq | ObjectRepr::Iterable) if value.as_object().is_none() => {
                let count = container.len().unwrap_or(0) as u64;
                self.pay(count.saturating_mul(ITEM.saturating_add(len(value))))
            }
            Some(ObjectRepr::Map) => self.walk(value),
            Some(_) => self.walk(container).and_then(|()| self.walk(value)),
        }
    }

    /// Pays for a copy of a map.
    fn copy(&self, value: &Value) -> Outcome {
        let Some(object) = value.as_object() else { return Ok(()) };
        self.pay(ENTRY.saturating_mul(value.len().unwrap_or(0) as u64))?;
        object.try_iter().into_iter().flatten().try_for_each(|key| self.walk(&key))
    }

    fn before_filter(&self, state: &mut State, name: &str, arguments: &[Value]) -> Outcome {
        let Some((value, others)) = arguments.split_first() else { return Ok(()) };
        let others_read: u64 = others.iter().map(len).sum();
        self.pay(len(value).saturating_add(others_read))?;
        let count = items(value) / ITEM;
        if value.as_object().is_some() {
            // attributes that are looked up in each item
            let names = others.iter().filter(|other| other.as_str().is_some() || other.is_kwargs());
            let names = names.map(|names| self.weigh(names)).sum::<Outcome<u64>>()?;
            self.pay(count.saturating_mul(names))?;
        }
        match name {
            "default" | "d" | "length" | "count" | "first" | "abs" | "bool" => return Ok(()),
            "list" | "reverse" | "last" => return self.pay(items(value).saturating_add(len(value))),
            "items" => return self.pay(count.saturating_mul(ITEM + CONTAINER)),
            "chain" => {
                // keys of maps are sorted, which compares them
                for map in arguments.iter().filter(|value| value.kind() == ValueKind::Map) {
                    self.copy(map)?;
                }
                return self.pay(arguments.iter().map(items).sum());
            }
            "zip" => {
                let shortest = arguments.iter().map(items).min().unwrap_or(0) / ITEM;
                return self.pay(shortest.saturating_mul(CONTAINER + ITEM * arguments.len() as u64));
            }
            "batch" | "slice" => {
                let filled = others.first().and_then(Value::as_usize).unwrap_or(0) as u64;
                let lists = if name == "slice" { filled } else { count / filled.max(1) + 1 };
                let filled = if others.len() > 1 { filled } else { 0 };
                let lists = lists.saturating_mul(CONTAINER + ITEM);
                return self.pay(lists.saturating_add(filled.saturating_add(count).saturating_mul(ITEM)));
            }
            "map" => return self.pay(count.saturating_mul(ITEM * 4 + self.arguments)),
            "select" | "reject" | "selectattr" | "rejectattr" => {
                self.pay(count.saturating_mul(ITEM * 4 + self.arguments))?;
            }
            _ => {}
        }
        // others may be converted to text, whatever they are
        for other in others.iter().filter(|value| value.as_object().is_some()) {
            self.pay(self.text(other)?)?;
        }
        match name {
            "upper" | "lower" | "title" | "capitalize" => self.pay(self.text(value)?.saturating_mul(3)),
            "escape" | "e" => self.pay(self.text(value)?.saturating_mul(6)),
            "safe" | "string" => self.pay(self.text(value)?),
            "trim" => {
                let text = self.text(value)?;
                self.pay(text.saturating_mul(others.first().map_or(1, len)))?;
                self.pay(text)
            }
            "replace" => match others {
                [from, to, ..] => self.replace(value, &text(from), self.text(to)?, u64::MAX),
                _ => Ok(()),
            },
            "join" => self.join(state, value, others),
            "split" => {
                let text = value.as_str().unwrap_or_default();
                self.split(text, others.first().and_then(Value::as_str))
            }
            "lines" => self.split(value.as_str().unwrap_or_default(), Some("\n")),
            "indent" => {
                let bytes = self.text(value)?;
                let lines = text(value).matches('\n').count() as u64 + 2;
                let named = |name| others.last().and_then(|kwargs| kwargs.get_attr(name).ok()?.as_usize());
                let width = others.first().and_then(Value::as_usize).or_else(|| named("width")).unwrap_or(4) as u64;
                self.pay(bytes.saturating_add(width.saturating_mul(lines)))
            }
            "format" => self.format(value.as_str().unwrap_or_default(), others),
            "pprint" => self.pay(self.formatted(value, format_args!("{value:#?}"))?),
            "tojson" => self.pay(self.weigh(value)?.saturating_mul(2)),
            "sort" | "unique" | "groupby" | "dictsort" | "min" | "max" => {
                self.pay(count.saturating_mul(self.arguments))?;
                let weight = self.weigh(value)?;
                self.pay(weight.saturating_mul(u64::from(count.checked_ilog2().unwrap_or(0)) + 1))?;
                self.pay(count.saturating_mul(ENTRY * 2).saturating_add(weight / 2))
            }
            "sum" => {
                self.pay(count.saturating_mul(self.arguments))?;
                let weight = self.weigh(value)?;
                let numbers = others.is_empty() && weight <= count.saturating_mul(ITEM).saturating_add(CONTAINER);
                if numbers { self.pay(weight) } else { self.pay(weight.saturating_mul(count.max(1))) }
            }
            "attr" => Ok(()),
            _ => self.walk(value),
        }
    }

    fn before_test(&self, name: &str, arguments: &[Value]) -> Outcome {
        match (name, arguments) {
            ("in", [value, container]) => self.contains(container, value),
            ("iterable", [value]) => self.pay(size(value)),
            ("startingwith" | "endingwith" | "lower" | "upper", _) => {
                let texts = arguments.iter().map(|value| self.text(value));
                texts.sum::<Outcome<u64>>().and_then(|bytes| self.pay(bytes))
            }
            _ => self.compare(arguments),
        }
    }

    fn before_function(&self, name: &str, arguments: &[Value]) -> Outcome {
        match (name, arguments) {
            ("dict", _) => arguments.iter().try_for_each(|value| self.copy(value)),
            ("debug", []) => Err(invalid("debug() needs something to show")),
            ("debug", _) => arguments
                .iter()
                .try_for_each(|value| self.pay(self.formatted(value, format_args!("{value:#?}"))?.saturating_mul(2))),
            // a text that is copied a few times, or that tells how a short one is to look
            _ => arguments.iter().try_for_each(|value| self.pay(self.text(value)?.saturating_mul(16))),
        }
    }

    fn before_method(&self, value: &Value, method: &str, arguments: &[Value]) -> Outcome {
        let Some(own) = value.as_str() else {
            return match method {
                "keys" | "values" => self.pay(items(value)),
                "items" => self.pay((items(value) / ITEM).saturating_mul(ITEM + CONTAINER)),
                "count" => self.walk(value).and_then(|()| arguments.iter().try_for_each(|value| self.walk(value))),
                _ => arguments.iter().try_for_each(|value| self.walk(value)),
            };
        };
        let bytes = own.len() as u64;
        let first = arguments.first();
        self.pay(bytes.saturating_add(arguments.iter().map(len).sum()))?;
        match method {
            "upper" | "lower" | "title" | "capitalize" => self.pay(bytes.saturating_mul(3)),
            "strip" | "lstrip" | "rstrip" => {
                self.pay(bytes.saturating_mul(first.map_or(1, len)))?;
                self.pay(bytes)
            }
            "replace" => match arguments {
                [from, to, rest @ ..] => {
                    let most = rest.first().and_then(Value::as_usize).map_or(u64::MAX, |most| most as u64);
                    self.replace(value, from.as_str().unwrap_or_default(), len(to), most)
                }
                _ => Ok(()),
            },
            "split" => self.split(own, first.and_then(Value::as_str)),
            "splitlines" => self.split(own, Some("\n")),
            "join" => first.map_or(Ok(()), |values| self.joined(values, bytes)),
            "format" => self.format(own, arguments),
            _ => self.walk_containers(arguments),
        }
    }

    fn replace(&self, value: &Value, from: &str, to: u64, most: u64) -> Outcome {
        let bytes = self.text(value)?;
        let matches = text(value).matches(from).count() as u64;
        self.pay(bytes.saturating_add(matches.min(most).saturating_mul(to)))
    }

    fn split(&self, text: &str, separator: Option<&str>) -> Outcome {
        let pieces = match separator {
            Some(separator) => text.matches(separator).count(),
            None => text.split_whitespace().count(),
        };
        self.pay((pieces as u64 + 1).saturating_mul(ITEM * 2).saturating_add(text.len() as u64))
    }

    fn join(&self, state: &mut State, value: &Value, others: &[Value]) -> Outcome {
        let (plain, named) = match others.split_last() {
            Some((last, rest)) if last.is_kwargs() => (rest, Some(last)),
            _ => (others, None),
        };
        let named = |name| named.and_then(|kwargs| kwargs.get_attr(name).ok()).filter(|value| !value.is_undefined());
        let joiner = plain.first().cloned().or_else(|| named("d")).unwrap_or_default();
        let joiner = self.text(&joiner)?;
        match plain.get(1).cloned().or_else(|| named("attribute")).filter(|attribute| !attribute.is_none()) {
            None => self.joined(value, joiner),
            Some(attribute) => {
                let kwargs: Kwargs = [("attribute", attribute), ("default", Value::from(""))].into_iter().collect();
                let map = Value::from_function(filters::map);
                self.pay((items(value) / ITEM).saturating_mul(ITEM * 4 + self.arguments))?;
                // what can't be joined says so itself
                let Ok(values) = map.call(state, &[value.clone(), kwargs.into()]) else { return Ok(()) };
                self.joined(&values, joiner)
            }
        }
    }

    fn joined(&self, values: &Value, joiner: u64) -> Outcome {
        // what can't be joined says so itself
        let Ok(values) = values.try_iter() else { return Ok(()) };
        for value in values {
            self.pay(self.text(&value)?.saturating_add(joiner))?;
        }
        Ok(())
    }

    /// Pays for a text in which others are put: each at most as often as there are places, and as wide as a place is.
    fn format(&self, text: &str, arguments: &[Value]) -> Outcome {
        let (mut widths, mut places, mut stars, mut number) = (0u64, 0u64, 0u64, 0u64);
        let (mut before, mut named, mut braces, mut spec) = (' ', false, false, false);
        for character in text.chars() {
            match character {
                '0'..='9' if spec => {
                    let digit = u64::from(character.to_digit(10).unwrap_or(0));
                    number = number.saturating_mul(10).saturating_add(digit);
                    before = character;
                    continue;
                }
                '%' => (places, spec) = (places + 1, before != '%'),
                '(' if before == '%' => (named, spec) = (true, false),
                ')' if named => (named, spec) = (false, true),
                '{' => (places, braces, spec) = (places + 1, true, false),
                '}' => (braces, spec) = (false, false),
                ':' if braces => spec = true,
                '*' if spec => stars += 1,
                // what fills places up, and signs
                _ if spec && (before == ':' || "#- +.<>=^,_hlL".contains(character)) => {}
                _ => spec = false,
            }
            widths = widths.saturating_add(std::mem::take(&mut number));
            before = character;
        }
        widths = widths.saturating_add(number);
        let mut longest = 0;
        for argument in arguments {
            longest = longest.max(self.weigh(argument)?.saturating_mul(8)).max(self.text(argument)?);
        }
        let widest = arguments.iter().filter_map(Value::as_i64).map(i64::unsigned_abs).max().unwrap_or(0);
        let widths = widths.saturating_add(stars.saturating_mul(widest)).saturating_mul(4);
        self.pay(widths.saturating_add(places.saturating_mul(longest)).saturating_add(text.len() as u64))
    }
}

/// What filters of the engine hold beyond their own sequence, taken out: maps that look into maps.
fn without_layers(value: Value, filter: &str) -> Outcome<Value> {
    match (filter, value.as_object()) {
        ("chain", Some(object)) if object.repr() == ObjectRepr::Map => {
            Ok(Value::from_pairs(object.try_iter_pairs().into_iter().flatten()))
        }
        ("chain", Some(object)) if object.repr() == ObjectRepr::Seq => {
            Ok(Value::from(value.try_iter()?.checked().collect::<Outcome<Vec<Value>>>()?))
        }
        _ => Ok(value),
    }
}

/// Operands as they are put back on the stack: one as it is, more in a tuple that is unpacked from its end.
fn operands(mut values: Vec<Value>, in_order: bool) -> Value {
    if in_order {
        return Value::from(Tuple::from(values));
    }
    if values.len() == 1 {
        return values.remove(0);
    }
    values.reverse();
    Value::from(Tuple::from(values))
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

/// The engine's namespace, but that it can be emptied.
#[derive(Debug, Default)]
struct Namespace {
    fields: Mutex<BTreeMap<Arc<str>, Value>>,
}

impl Namespace {
    fn fields(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, Value>> {
        self.fields.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Object for Namespace {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.fields().get(key).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.fields().keys().cloned().map(Value::from).collect())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.fields().len())
    }
}

/// The engine's filters that do more than a few steps.
fn built_in_filters() -> Vec<(&'static str, Value)> {
    macro_rules! filters {
        ($($name:ident)*) => { [$((stringify!($name), Value::from_function(filters::$name))),*] };
    }
    let mut all = filters!(
        safe escape lower upper title capitalize replace length dictsort items reverse trim join split lines default abs
        attr first last min max sort list string bool batch slice sum indent select reject selectattr rejectattr map
        groupby unique chain zip pprint format int float
    )
    .to_vec();
    all.push(("e", Value::from_function(filters::escape)));
    all.push(("count", Value::from_function(filters::length)));
    all.push(("d", Value::from_function(filters::default)));
    all
}

/// The engine's tests that look into values.
fn built_in_tests() -> Vec<(&'static str, Value)> {
    macro_rules! tests {
        ($($function:ident: $($name:literal)*;)*) => { vec![$($(($name, Value::from_function(tests::$function))),*),*] };
    }
    tests!(
        is_eq: "eq" "equalto" "==";
        is_ne: "ne" "!=";
        is_lt: "lt" "lessthan" "<";
        is_le: "le" "<=";
        is_gt: "gt" "greaterthan" ">";
        is_ge: "ge" ">=";
        is_in: "in";
        is_iterable: "iterable";
        is_sameas: "sameas";
        is_startingwith: "startingwith";
        is_endingwith: "endingwith";
        is_lower: "lower";
        is_upper: "upper";
    )
}
