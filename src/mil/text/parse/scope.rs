//! Scopes of a function during parsing.

use std::collections::HashMap;

use crate::ir::{Value, ValueId};
use crate::types::ValueType;

/// Values and their names.
#[derive(Default)]
pub(super) struct Scope {
    pub(super) values: Vec<Value>,
    /// Names by block, the innermost last.
    blocks: Vec<HashMap<String, ValueId>>,
    /// Names of closed blocks. Using one is an error that the verifier reports.
    ended: HashMap<String, ValueId>,
    /// Values that are used but not yet defined.
    pending: HashMap<String, ValueId>,
}

impl Scope {
    /// Enters a block.
    pub(super) fn enter(&mut self) {
        self.blocks.push(HashMap::new());
    }

    /// Leaves the innermost block.
    pub(super) fn leave(&mut self) {
        self.ended.extend(self.blocks.pop().into_iter().flatten());
    }

    /// Defines a value in the innermost block.
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

    /// Returns the value of a name.
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

    /// Returns a name that is used but never defined.
    pub(super) fn missing(&self) -> Option<&str> {
        self.pending.keys().min().map(String::as_str)
    }

    fn push(&mut self, name: String, ty: ValueType) -> ValueId {
        let id = ValueId(self.values.len() as u32);
        self.values.push(Value { name, ty, constant: None });
        id
    }
}
