//! A backend whose calls go through a function of one's own, which times them, keeps their inputs, or shows the values
//! inside them.

use std::sync::Arc;

use super::backend::{Backend, Phase, Sequence, Watch};
use anec_base::Result;
use anec_exec::{ProductMemo, Tensor};

/// Makes a call of a text: of the function with this index in `bundle.json`, on these inputs.
pub type Interceptor =
    Arc<dyn Fn(&mut dyn Sequence, usize, &[&Tensor], Option<Watch<'_>>) -> Result<Vec<Tensor>> + Send + Sync>;

/// Sees a value that has a name: the function's index in `bundle.json`, the name, and the value.
pub type Observer = Arc<dyn Fn(usize, &str, &Tensor) + Send + Sync>;

/// A backend, intercepted.
pub struct InterceptedBackend {
    inner: Arc<dyn Backend>,
    interceptor: Interceptor,
}

impl InterceptedBackend {
    /// Calls of functions on `inner` are what `interceptor` makes of them.
    pub fn new(inner: Arc<dyn Backend>, interceptor: Interceptor) -> Self {
        InterceptedBackend { inner, interceptor }
    }

    /// Runs functions on `inner` and shows their values to `observer`, call by call.
    pub fn observed(inner: Arc<dyn Backend>, observer: Observer) -> Self {
        Self::new(
            inner,
            Arc::new(move |sequence, function, inputs, mut watch| {
                let mut observe = |name: &str, tensor: &Tensor| {
                    observer(function, name, tensor);
                    if let Some(watch) = watch.as_mut() {
                        watch(name, tensor);
                    }
                };
                sequence.run(function, inputs, Some(&mut observe))
            }),
        )
    }
}

impl Backend for InterceptedBackend {
    fn prepare(&self, function: usize) -> Result<()> {
        self.inner.prepare(function)
    }

    fn has_room(&self, function: usize) -> bool {
        self.inner.has_room(function)
    }

    fn sequence(&self) -> Result<Box<dyn Sequence>> {
        Ok(Box::new(Intercepted { inner: self.inner.sequence()?, interceptor: self.interceptor.clone() }))
    }
}

struct Intercepted {
    inner: Box<dyn Sequence>,
    interceptor: Interceptor,
}

impl Sequence for Intercepted {
    fn run(&mut self, function: usize, inputs: &[&Tensor], watch: Option<Watch<'_>>) -> Result<Vec<Tensor>> {
        (self.interceptor)(&mut *self.inner, function, inputs, watch)
    }

    fn remember(&mut self, memo: &Arc<ProductMemo>) -> bool {
        self.inner.remember(memo)
    }

    fn enter(&mut self, phase: Phase) {
        self.inner.enter(phase);
    }

    fn states(&self, function: usize) -> Result<Option<Vec<Arc<Tensor>>>> {
        self.inner.states(function)
    }

    fn set_states(&mut self, function: usize, values: Vec<Tensor>) -> Result<()> {
        self.inner.set_states(function, values)
    }

    fn reset(&mut self) -> Result<()> {
        self.inner.reset()
    }

    fn fork(&self) -> Result<Option<Box<dyn Sequence>>> {
        let interceptor = &self.interceptor;
        let own = |inner| Box::new(Intercepted { inner, interceptor: interceptor.clone() }) as Box<dyn Sequence>;
        Ok(self.inner.fork()?.map(own))
    }
}
