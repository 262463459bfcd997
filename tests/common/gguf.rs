//! GGUF files taken apart: changed and written again, or walked field by field.

use std::path::Path;

use anec::source::SourceDtype;
use anec::source::gguf::write::Writer;
use anec::source::gguf::{GgufValue, parse};

/// A GGUF file's keys and tensors.
pub struct Parts {
    pub keys: Vec<(String, GgufValue)>,
    /// Name, type, shape (outermost dimension first), bytes.
    pub tensors: Vec<(String, SourceDtype, Vec<u64>, Vec<u8>)>,
}

impl Parts {
    pub fn read(path: &Path) -> Parts {
        let bytes = std::fs::read(path).unwrap();
        let header = parse(path, &bytes).unwrap();
        let data = |range: &std::ops::Range<u64>| bytes[range.start as usize..range.end as usize].to_vec();
        Parts {
            keys: header.metadata.iter().map(|(key, value)| (key.to_owned(), value.clone())).collect(),
            tensors: header
                .tensors
                .iter()
                .map(|t| (t.name.clone(), t.dtype, t.shape.clone(), data(&t.range)))
                .collect(),
        }
    }

    pub fn write(&self, path: &Path) {
        let mut writer = Writer::new();
        for (key, value) in &self.keys {
            writer.key(key, value.clone());
        }
        for (name, dtype, shape, _) in &self.tensors {
            writer.tensor(name, *dtype, shape);
        }
        let mut bytes = Vec::new();
        writer.write(&mut bytes, |index, out| out.write_all(&self.tensors[index].3)).unwrap();
        std::fs::write(path, bytes).unwrap();
    }

    /// The bytes of a tensor.
    pub fn data(&mut self, name: &str) -> &mut Vec<u8> {
        &mut self.tensors.iter_mut().find(|(own, ..)| own == name).unwrap().3
    }

    /// Sets a key, which may be new.
    pub fn set(&mut self, key: &str, value: impl Into<GgufValue>) {
        let value = value.into();
        match self.keys.iter_mut().find(|(own, _)| own == key) {
            Some((_, own)) => *own = value,
            None => self.keys.push((key.to_owned(), value)),
        }
    }
}

/// Changes a GGUF file.
pub fn edit_gguf(path: &Path, edit: impl FnOnce(&mut Parts)) {
    let mut parts = Parts::read(path);
    edit(&mut parts);
    parts.write(path);
}

/// Where each field of a GGUF file begins, and what it is called. Reads the format on its own.
pub fn fields(bytes: &[u8]) -> Vec<(usize, String)> {
    let mut walk = Walk { bytes, at: 0, fields: Vec::new() };
    walk.take(4, "the magic number");
    walk.take(4, "the version");
    let tensors = walk.number(8, "the number of tensors");
    let keys = walk.number(8, "the number of keys");
    for key in 0..keys {
        let name = walk.text(&format!("key {key}"));
        let kind = walk.number(4, &format!("the type of {name}"));
        walk.value(kind, &format!("the value of {name}"));
    }
    let mut data = Vec::new();
    for tensor in 0..tensors {
        let name = walk.text(&format!("tensor {tensor}"));
        let dimensions = walk.number(4, &format!("the number of dimensions of {name}"));
        let elements: u64 = (0..dimensions).map(|i| walk.number(8, &format!("dimension {i} of {name}"))).product();
        let dtype = SourceDtype::from_ggml(walk.number(4, &format!("the type of {name}")) as u32).unwrap();
        let offset = walk.number(8, &format!("the offset of {name}"));
        data.push((name, offset, dtype.bytes(elements).unwrap()));
    }
    walk.note("the padding before the data");
    let start = walk.at.next_multiple_of(32);
    for (name, offset, length) in data {
        walk.at = start + offset as usize;
        walk.take(length as usize, &format!("the data of {name}"));
    }
    walk.fields
}

struct Walk<'a> {
    bytes: &'a [u8],
    at: usize,
    fields: Vec<(usize, String)>,
}

impl Walk<'_> {
    fn note(&mut self, what: &str) {
        self.fields.push((self.at, what.to_owned()));
    }

    fn take(&mut self, length: usize, what: &str) -> &[u8] {
        self.note(what);
        self.at += length;
        &self.bytes[self.at - length..self.at]
    }

    fn number(&mut self, width: usize, what: &str) -> u64 {
        self.take(width, what).iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    fn text(&mut self, what: &str) -> String {
        let length = self.number(8, &format!("the length of {what}"));
        String::from_utf8(self.take(length as usize, what).to_vec()).unwrap()
    }

    fn value(&mut self, kind: u64, what: &str) {
        match kind {
            0 | 1 | 7 => drop(self.number(1, what)),
            2 | 3 => drop(self.number(2, what)),
            4..=6 => drop(self.number(4, what)),
            8 => drop(self.text(what)),
            9 => {
                let kind = self.number(4, &format!("the type of the elements of {what}"));
                let count = self.number(8, &format!("the number of elements of {what}"));
                (0..count).for_each(|i| self.value(kind, &format!("element {i} of {what}")));
            }
            10..=12 => drop(self.number(8, what)),
            other => panic!("type {other}"),
        }
    }
}
