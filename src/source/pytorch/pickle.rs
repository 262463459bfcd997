//! Pickled data (Python's `pickletools` documents the opcodes), read without running code: calls of functions become
//! values, and whoever reads them decides what they mean.

use std::collections::HashMap;

/// Most values of a pickle.
const MOST_VALUES: usize = 1 << 22;

/// Place of a value in its [`Pickle`].
pub(super) type Index = usize;

/// Value of a pickle. Containers hold the places of their elements.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    None,
    Bool(bool),
    Integer(i64),
    /// Integer of more than 64 bits, little-endian, in two's complement.
    Long(Vec<u8>),
    Float(f64),
    Bytes(Vec<u8>),
    Text(String),
    Tuple(Vec<Index>),
    List(Vec<Index>),
    /// Keys and values, in the order of insertion.
    Dict(Vec<(Index, Index)>),
    /// Class or function: `module.name`.
    Global(String),
    /// Call of a function or class with a tuple of arguments.
    Call(Index, Index),
    /// Object that is stored outside of the pickle, with its id.
    Persistent(Index),
}

/// Values of a pickle.
pub(super) struct Pickle {
    values: Vec<Value>,
    root: Index,
}

impl Pickle {
    /// Reads the pickle at the start of `bytes`. Also returns its length in bytes.
    ///
    /// # Errors
    /// Returns an error if the pickle is damaged, has more than 4 million values, or has an opcode that PyTorch doesn't
    /// write for state dicts.
    pub(super) fn read(bytes: &[u8]) -> Result<(Self, usize), String> {
        let mut machine =
            Machine { input: bytes, values: Vec::new(), stack: Vec::new(), marks: Vec::new(), memo: HashMap::new() };
        loop {
            let at = bytes.len() - machine.input.len();
            let [opcode] = machine.array()?;
            if opcode == b'.' {
                let root = machine.pop()?;
                return Ok((Pickle { values: machine.values, root }, at + 1));
            }
            machine.step(opcode).map_err(|problem| format!("{problem}, at byte {at} of the pickle"))?;
        }
    }

    /// The pickled object.
    pub(super) fn root(&self) -> &Value {
        &self.values[self.root]
    }

    /// Value at a place.
    pub(super) fn get(&self, index: Index) -> &Value {
        &self.values[index]
    }

    /// All values.
    pub(super) fn values(&self) -> impl Iterator<Item = &Value> {
        self.values.iter()
    }

    /// Elements of a tuple or list.
    pub(super) fn elements(&self, value: &Value) -> Option<Vec<&Value>> {
        match value {
            Value::Tuple(indices) | Value::List(indices) => {
                Some(indices.iter().map(|index| self.get(*index)).collect())
            }
            _ => None,
        }
    }

    /// Called function and its arguments.
    pub(super) fn call(&self, value: &Value) -> Option<(&str, Vec<&Value>)> {
        let Value::Call(function, arguments) = value else { return None };
        match self.get(*function) {
            Value::Global(name) => Some((name, self.elements(self.get(*arguments))?)),
            _ => None,
        }
    }
}

/// State of the reader.
struct Machine<'a> {
    input: &'a [u8],
    values: Vec<Value>,
    stack: Vec<Index>,
    /// Heights of the stack at marks.
    marks: Vec<usize>,
    memo: HashMap<usize, Index>,
}

impl<'a> Machine<'a> {
    fn step(&mut self, opcode: u8) -> Result<(), String> {
        if let Some(value) = self.plain_value(opcode)? {
            return self.push(value);
        }
        if let Some(value) = self.compound_value(opcode)? {
            return self.push(value);
        }
        match opcode {
            // PROTO and FRAME
            0x80 => drop(self.array::<1>()?),
            0x95 => drop(self.array::<8>()?),
            b'(' => self.marks.push(self.stack.len()),
            b'0' => drop(self.pop()?),
            b'1' => drop(self.since_mark()?),
            b'2' => {
                let top = self.top()?;
                self.stack.push(top);
            }
            b'a' => {
                let element = self.pop()?;
                self.append(vec![element])?;
            }
            b'e' => {
                let elements = self.since_mark()?;
                self.append(elements)?;
            }
            b's' => {
                let pair = self.pop_many(2)?;
                self.insert(&pair)?;
            }
            b'u' => {
                let pairs = self.since_mark()?;
                self.insert(&pairs)?;
            }
            b'q' | b'h' => {
                let [place] = self.array()?;
                self.memo(opcode == b'q', place.into())?;
            }
            b'r' | b'j' => {
                let place = self.length32()?;
                self.memo(opcode == b'r', place)?;
            }
            0x94 => {
                let place = self.memo.len();
                self.memo(true, place)?;
            }
            // BUILD: attributes of an object, which aren't its elements
            b'b' => drop(self.pop()?),
            _ => return Err(format!("opcode {opcode:#04x} isn't one that torch.save writes for tensors")),
        }
        Ok(())
    }

    /// Returns the value of an opcode that pushes a number, a text or an empty container.
    fn plain_value(&mut self, opcode: u8) -> Result<Option<Value>, String> {
        Ok(Some(match opcode {
            b'N' => Value::None,
            0x88 => Value::Bool(true),
            0x89 => Value::Bool(false),
            b'J' => Value::Integer(i32::from_le_bytes(self.array()?).into()),
            b'K' => Value::Integer(self.array::<1>()?[0].into()),
            b'M' => Value::Integer(u16::from_le_bytes(self.array()?).into()),
            0x8a => {
                let [length] = self.array()?;
                self.long(length.into())?
            }
            0x8b => {
                let length = self.length32()?;
                self.long(length)?
            }
            b'G' => Value::Float(f64::from_be_bytes(self.array()?)),
            b'X' => {
                let length = self.length32()?;
                self.text(length)?
            }
            0x8c => {
                let [length] = self.array()?;
                self.text(length.into())?
            }
            0x8d => {
                let length = u64::from_le_bytes(self.array()?);
                self.text(usize::try_from(length).unwrap_or(usize::MAX))?
            }
            b'T' | b'B' => {
                let length = self.length32()?;
                Value::Bytes(self.take(length)?.to_vec())
            }
            b'U' | b'C' => {
                let [length] = self.array()?;
                Value::Bytes(self.take(length.into())?.to_vec())
            }
            b']' => Value::List(Vec::new()),
            b'}' => Value::Dict(Vec::new()),
            b')' => Value::Tuple(Vec::new()),
            _ => return Ok(None),
        }))
    }

    /// Returns the value of an opcode that makes one of others, or names a class.
    fn compound_value(&mut self, opcode: u8) -> Result<Option<Value>, String> {
        Ok(Some(match opcode {
            b't' => Value::Tuple(self.since_mark()?),
            0x85..=0x87 => Value::Tuple(self.pop_many(usize::from(opcode - 0x84))?),
            b'c' => Value::Global(format!("{}.{}", self.line()?, self.line()?)),
            0x93 => {
                let names = self.pop_many(2)?;
                let (Value::Text(module), Value::Text(name)) = (&self.values[names[0]], &self.values[names[1]]) else {
                    return Err("the name of a class isn't text".into());
                };
                Value::Global(format!("{module}.{name}"))
            }
            b'Q' => Value::Persistent(self.pop()?),
            // REDUCE and NEWOBJ
            b'R' | 0x81 => {
                let parts = self.pop_many(2)?;
                let is_dict =
                    matches!(&self.values[parts[0]], Value::Global(name) if name == "collections.OrderedDict");
                let is_empty = matches!(&self.values[parts[1]], Value::Tuple(elements) if elements.is_empty());
                if is_dict && is_empty { Value::Dict(Vec::new()) } else { Value::Call(parts[0], parts[1]) }
            }
            _ => return Ok(None),
        }))
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], String> {
        let (taken, rest) = self.input.split_at_checked(length).ok_or("the pickle ends too early")?;
        self.input = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn length32(&mut self) -> Result<usize, String> {
        Ok(u32::from_le_bytes(self.array()?) as usize)
    }

    /// Text up to the end of the line.
    fn line(&mut self) -> Result<&'a str, String> {
        let length = self.input.iter().position(|byte| *byte == b'\n').ok_or("the pickle ends within a line")?;
        let line = self.take(length)?;
        self.take(1)?;
        std::str::from_utf8(line).map_err(|_| "a name isn't UTF-8".into())
    }

    fn text(&mut self, length: usize) -> Result<Value, String> {
        let text = std::str::from_utf8(self.take(length)?).map_err(|_| "a text isn't UTF-8")?;
        Ok(Value::Text(text.to_owned()))
    }

    /// Integer of `length` bytes.
    fn long(&mut self, length: usize) -> Result<Value, String> {
        let bytes = self.take(length)?;
        let negative = bytes.last().is_some_and(|last| last & 0x80 != 0);
        let mut wide = [if negative { 0xff } else { 0 }; 8];
        Ok(match wide.get_mut(..length) {
            Some(low) => {
                low.copy_from_slice(bytes);
                Value::Integer(i64::from_le_bytes(wide))
            }
            None => Value::Long(bytes.to_vec()),
        })
    }

    fn push(&mut self, value: Value) -> Result<(), String> {
        if self.values.len() == MOST_VALUES {
            return Err(format!("the pickle has more than {MOST_VALUES} values"));
        }
        self.stack.push(self.values.len());
        self.values.push(value);
        Ok(())
    }

    /// Height above which values may be taken.
    fn bottom(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn top(&self) -> Result<Index, String> {
        let top = (self.stack.len() > self.bottom()).then(|| self.stack.last().copied()).flatten();
        top.ok_or_else(|| "a value is missing".into())
    }

    fn pop(&mut self) -> Result<Index, String> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn pop_many(&mut self, count: usize) -> Result<Vec<Index>, String> {
        let start = self.stack.len().checked_sub(count).filter(|start| *start >= self.bottom());
        Ok(self.stack.split_off(start.ok_or("a value is missing")?))
    }

    fn since_mark(&mut self) -> Result<Vec<Index>, String> {
        let mark = self.marks.pop().ok_or("a mark is missing")?;
        Ok(self.stack.split_off(mark))
    }

    fn append(&mut self, elements: Vec<Index>) -> Result<(), String> {
        let list = self.top()?;
        match &mut self.values[list] {
            Value::List(list) => list.extend(elements),
            // a class of its own that is filled like a list
            Value::Call(..) => {}
            _ => return Err("what is appended to isn't a list".into()),
        }
        Ok(())
    }

    fn insert(&mut self, pairs: &[Index]) -> Result<(), String> {
        let dict = self.top()?;
        match &mut self.values[dict] {
            Value::Dict(entries) => {
                let (pairs, []) = pairs.as_chunks::<2>() else { return Err("a key has no value".into()) };
                entries.extend(pairs.iter().map(|[key, value]| (*key, *value)));
            }
            Value::Call(..) => {}
            _ => return Err("what gets a key isn't a dict".into()),
        }
        Ok(())
    }

    /// Keeps the top of the stack at a place, or pushes what is kept there.
    fn memo(&mut self, keeps: bool, place: usize) -> Result<(), String> {
        if keeps {
            let top = self.top()?;
            self.memo.insert(place, top);
        } else {
            let kept = *self.memo.get(&place).ok_or("a value that was never kept is asked for")?;
            self.stack.push(kept);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(bytes: &[u8]) -> Pickle {
        Pickle::read(bytes).unwrap().0
    }

    /// `pickle.dumps({"a": [1, -2, 300, 70000, 2**40, 2.5, None, True], "b": ("x", b"y")}, 2)` and protocol 4.
    #[test]
    fn values_of_python_are_read() {
        let two: &[u8] = b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01]q\x02(K\x01J\xfe\xff\xff\xffM,\x01Jp\x11\x01\x00\x8a\x06\x00\x00\x00\x00\x00\x01G@\x04\x00\x00\x00\x00\x00\x00N\x88eX\x01\x00\x00\x00bq\x03X\x01\x00\x00\x00xq\x04C\x01y\x86q\x05u.";
        let pickle = read(two);
        let Value::Dict(entries) = pickle.root() else { panic!() };
        assert_eq!(pickle.get(entries[0].0), &Value::Text("a".into()));
        let list: Vec<Value> = pickle.elements(pickle.get(entries[0].1)).unwrap().into_iter().cloned().collect();
        let integers = [1, -2, 300, 70000, 1 << 40].map(Value::Integer);
        assert_eq!(list, [&integers[..], &[Value::Float(2.5), Value::None, Value::Bool(true)]].concat());
        let pair = pickle.elements(pickle.get(entries[1].1)).unwrap();
        assert_eq!(pair, [&Value::Text("x".into()), &Value::Bytes(b"y".to_vec())]);

        let four: &[u8] = b"\x80\x04\x95\x0e\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94]\x94(K\x01K\x02es.";
        let pickle = read(four);
        let Value::Dict(entries) = pickle.root() else { panic!() };
        assert_eq!(pickle.elements(pickle.get(entries[0].1)).unwrap().len(), 2);
    }

    #[test]
    fn calls_are_values_and_are_not_run() {
        // what a malicious checkpoint holds: os.system("true")
        let pickle = read(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.");
        assert_eq!(pickle.call(pickle.root()).unwrap(), ("os.system", vec![&Value::Text("true".into())]));
    }

    #[test]
    fn damaged_pickles_are_refused() {
        for (bytes, problem) in [
            (&b""[..], "ends too early"),
            (b"X\xff\xff\xff\xff", "ends too early"),
            (b".", "a value is missing"),
            (b"(.", "a value is missing"),
            (b"t", "a mark is missing"),
            (b"h\x07.", "never kept"),
            (b"K\x01K\x02a", "isn't a list"),
            (b"}(K\x01u", "a key has no value"),
            (b"cos\nsystem", "ends within a line"),
            (b"i", "0x69"),
        ] {
            let found = Pickle::read(bytes).err().unwrap();
            assert!(found.contains(problem), "{found}");
        }
        assert!(Pickle::read(&[b'N'; MOST_VALUES + 1]).err().unwrap().contains("more than"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = Pickle::read(&bytes);
        }
    }
}
