//! A backend that shows the values inside functions to an observer.

use std::sync::Arc;

use super::backend::{Backend, Sequence, Watch};
use super::cpu::CpuBackend;
use anec_base::Result;
use anec_exec::Tensor;

/// Sees a value that has a name: the function's index in `bundle.json`, the name, and the value.
pub type Observer = Arc<dyn Fn(usize, &str, &Tensor) + Send + Sync>;

/// The CPU executor, observed.
pub struct ObservedBackend {
    inner: CpuBackend,
    observer: Observer,
}

impl ObservedBackend {
    /// Runs functions on `inner` and shows their values to `observer`, call by call.
    pub fn new(inner: CpuBackend, observer: Observer) -> Self {
        ObservedBackend { inner, observer }
    }
}

impl Backend for ObservedBackend {
    fn prepare(&self, function: usize) -> Result<()> {
        self.inner.prepare(function)
    }

    fn sequence(&self) -> Result<Box<dyn Sequence>> {
        Ok(Box::new(Observed { inner: self.inner.sequence()?, observer: self.observer.clone() }))
    }
}

struct Observed {
    inner: Box<dyn Sequence>,
    observer: Observer,
}

impl Sequence for Observed {
    fn run(&mut self, function: usize, inputs: &[&Tensor], mut watch: Option<Watch<'_>>) -> Result<Vec<Tensor>> {
        let mut observe = |name: &str, tensor: &Tensor| {
            (self.observer)(function, name, tensor);
            if let Some(watch) = watch.as_mut() {
                watch(name, tensor);
            }
        };
        self.inner.run(function, inputs, Some(&mut observe))
    }

    fn reset(&mut self) -> Result<()> {
        self.inner.reset()
    }
}
