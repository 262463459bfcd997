//! The values of a function while its text is read.

use std::collections::HashMap;

use crate::ir::{Value, ValueId};
use crate::types::ValueType;

/// The values so far, and what their names mean.
#[derive(Default)]
pub(super) struct Scope {
    pub(super) values: Vec<Value>,
    /// Names by block, the innermost last.
    blocks: Vec<HashMap<String, ValueId>>,
    /// Names of blocks that have ended. To use one is a mistake, and the verifier's to find.
    ended: HashMap<String, ValueId>,
    /// Values that were used, but not defined so far.
    pending: HashMap<String, ValueId>,
}

impl Scope {
    /// A block begins.
    pub(super) fn enter(&mut self) {
        self.blocks.push(HashMap::new());
    }

    /// The innermost block ends.
    pub(super) fn leave(&mut self) {
        self.ended.extend(self.blocks.pop().into_iter().flatten());
    }

    /// A value comes into being in the innermost block.
    pub(super) fn define(&mut self, name: String, ty: ValueType) -> ValueId {
        let id = match self.pending.remove(&name) {
            Some(id) => {
                self.values[id.0 as usize].ty = ty;
                id
            }
            None => self.push(name.clone(), ty),
        };
        if let Some(block) = self.blocks.last_mut() {
            block.insert(name, id);
        }
        id
    }

    /// The value of a name.
    pub(super) fn refer(&mut self, name: String) -> ValueId {
        let names = |block: &HashMap<String, ValueId>| block.get(&name).copied();
        let known = self.blocks.iter().rev().find_map(names);
        if let Some(id) = known.or_else(|| names(&self.ended)).or_else(|| names(&self.pending)) {
            return id;
        }
        let id = self.push(name.clone(), ValueType::Opaque(String::new()));
        self.pending.insert(name, id);
        id
    }

    /// A name that was used and never defined, if there is one.
    pub(super) fn missing(&self) -> Option<&str> {
        self.pending.keys().min().map(String::as_str)
    }

    fn push(&mut self, name: String, ty: ValueType) -> ValueId {
        let id = ValueId(self.values.len() as u32);
        self.values.push(Value { name, ty, constant: None });
        id
    }
}
