//! What filters, tests, functions, methods and operators pay before they are carried out.

use std::sync::Arc;

use minijinja::value::{DynObject, Kwargs, ObjectRepr, Rest, Tuple, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value, filters, tests};

use super::namespace::Namespace;
use super::{Budget, CONTAINER, ENTRY, Guard, ITEM, Outcome, SAME, SCAN, invalid, items, len, size, text};

/// What operands pay, by the names of the filters that let them through.
const GUARDS: [(&str, Guard); 17] = [
    ("#arguments", |budget, _| budget.pay(budget.arguments)),
    ("#concat", |budget, values| budget.pay(budget.texts(values)?)),
    ("#add", Budget::add),
    ("#mul", Budget::multiply),
    ("#slice", Budget::slice),
    ("#compare", Budget::compare),
    ("#in", |budget, values| match values {
        [value, container] => budget.contains(container, value),
        _ => Ok(()),
    }),
    ("#item", |budget, values| match values {
        [container, key] => budget.item(container, key),
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
    ("#name", |budget, values| budget.pay(budget.texts(values)?.saturating_mul(8))),
    ("#cycle", Budget::cycle),
    ("#cycle-in-order", Budget::cycle),
    ("#loop-in-order", |budget, values| budget.pay(values.iter().map(len).sum())),
    ("#refuse", |_, _| Err(invalid("a list of too many values"))),
];

impl Budget {
    /// The filters that pay for instructions.
    pub(super) fn add_guards(self: &Arc<Self>, environment: &mut Environment) {
        environment.add_filter(SAME, |value: Value| value);
        for (name, guard) in GUARDS {
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

    /// Bytes of the texts of all values.
    fn texts(&self, values: &[Value]) -> Outcome<u64> {
        values.iter().map(|value| self.text(value)).sum()
    }

    fn add(&self, values: &[Value]) -> Outcome {
        let grows = values.iter().all(|value| value.as_str().is_some() || value.is_tuple());
        if grows { self.pay(values.iter().map(size).sum()) } else { Ok(()) }
    }

    fn multiply(&self, values: &[Value]) -> Outcome {
        let [a, b] = values else { return Ok(()) };
        let times = |value: &Value, times: &Value| {
            let once = if value.as_str().is_some() || value.is_tuple() { size(value) } else { 0 };
            once.saturating_mul(times.as_usize().unwrap_or(0) as u64)
        };
        self.pay(times(a, b).max(times(b, a)))
    }

    fn slice(&self, values: &[Value]) -> Outcome {
        match values {
            [value, start, stop, step] if value.as_str().is_some() => {
                let place = |place: &Value| place.as_usize().map(|place| (place as u64).saturating_mul(4));
                let all = len(value);
                let start = if start.is_none() { Some(0) } else { place(start) };
                let (start, stop) = match (start, place(stop)) {
                    (Some(start), Some(stop)) => (start.min(all), stop.min(all)),
                    _ => (0, all),
                };
                self.pay(stop.saturating_mul(SCAN))?;
                self.pay(stop.saturating_sub(start).saturating_mul(if step.is_none() { 1 } else { 4 }))
            }
            // the whole of a tuple is copied
            [value, ..] if value.is_tuple() => self.pay(size(value)),
            _ => Ok(()),
        }
    }

    fn item(&self, container: &Value, key: &Value) -> Outcome {
        self.walk(key)?;
        if key.as_str() == Some("arguments") {
            self.pay(self.arguments)?;
        }
        match container.as_object().map(DynObject::repr) {
            None => {
                let touched = key.as_usize().map_or(u64::MAX, |place| (place as u64).saturating_mul(4));
                self.pay(len(container).min(touched).saturating_mul(SCAN))
            }
            Some(ObjectRepr::Iterable) => self.pay(size(container)),
            Some(_) => Ok(()),
        }
    }

    fn cycle(&self, values: &[Value]) -> Outcome {
        match values {
            [_] => Err(invalid("nothing to cycle through")),
            _ => Ok(()),
        }
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

    pub(super) fn before_filter(&self, state: &mut State, name: &str, arguments: &[Value]) -> Outcome {
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

    pub(super) fn before_test(&self, name: &str, arguments: &[Value]) -> Outcome {
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

    pub(super) fn before_function(&self, name: &str, arguments: &[Value]) -> Outcome {
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

    pub(super) fn before_method(&self, value: &Value, method: &str, arguments: &[Value]) -> Outcome {
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
pub(super) fn without_layers(value: Value, filter: &str) -> Outcome<Value> {
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

/// The engine's filters that do more than a few steps.
pub(super) fn built_in_filters() -> Vec<(&'static str, Value)> {
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
pub(super) fn built_in_tests() -> Vec<(&'static str, Value)> {
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
