//! Namespaces, which a rendering can empty: they can hold themselves.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use minijinja::Value;
use minijinja::value::{Enumerator, Object};

/// The engine's namespace, but that it can be emptied.
#[derive(Debug, Default)]
pub(super) struct Namespace {
    fields: Mutex<BTreeMap<Arc<str>, Value>>,
}

impl Namespace {
    pub(super) fn fields(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, Value>> {
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
