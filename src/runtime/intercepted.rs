//! Backend decorator that times calls, records their inputs, or shows the values inside them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::backend::{Backend, FunctionCall, Phase, Sequence, Watch};
use anec_base::Result;
use anec_exec::Tensor;

/// Function that makes a call of the function with this index in `bundle.json`, on these inputs.
pub type Interceptor =
    Arc<dyn Fn(&mut dyn Sequence, usize, &[&Tensor], Option<Watch<'_>>) -> Result<Vec<Tensor>> + Send + Sync>;

/// Callback for named values: the function's index in `bundle.json`, the name, and the value.
pub type Observer = Arc<dyn Fn(usize, &str, &Tensor) + Send + Sync>;

/// Callback after a call: the function's index in `bundle.json`, and the duration.
pub(super) type Timer = Arc<dyn Fn(usize, Duration) + Send + Sync>;

/// Backend whose calls are intercepted.
pub struct InterceptedBackend {
    inner: Arc<dyn Backend>,
    interception: Interception,
}

/// Treatment of calls.
#[derive(Clone)]
enum Interception {
    Replaced(Interceptor),
    /// Timed, and otherwise unchanged.
    Timed(Timer),
}

impl InterceptedBackend {
    /// Creates a backend that replaces calls on `inner` by `interceptor`.
    pub fn new(inner: Arc<dyn Backend>, interceptor: Interceptor) -> Self {
        InterceptedBackend { inner, interception: Interception::Replaced(interceptor) }
    }

    /// Creates a backend that reports the duration of each call on `inner` to `timer`.
    pub(super) fn timed(inner: Arc<dyn Backend>, timer: Timer) -> Self {
        InterceptedBackend { inner, interception: Interception::Timed(timer) }
    }

    /// Creates a backend that shows the values of each call on `inner` to `observer`.
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
        Ok(Box::new(Intercepted { inner: self.inner.sequence()?, interception: self.interception.clone() }))
    }
}

/// Runs a call and reports its duration.
fn timed<T>(timer: &Timer, function: usize, call: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = call();
    timer(function, start.elapsed());
    result
}

struct Intercepted {
    inner: Box<dyn Sequence>,
    interception: Interception,
}

impl Sequence for Intercepted {
    fn run(&mut self, function: usize, inputs: &[&Tensor], watch: Option<Watch<'_>>) -> Result<Vec<Tensor>> {
        match &self.interception {
            Interception::Replaced(interceptor) => interceptor(&mut *self.inner, function, inputs, watch),
            Interception::Timed(timer) => timed(timer, function, || self.inner.run(function, inputs, watch)),
        }
    }

    fn run_into(&mut self, call: FunctionCall<'_>, outputs: &mut Vec<Arc<Tensor>>) -> Result<()> {
        match &self.interception {
            Interception::Replaced(interceptor) => {
                *outputs = call.outputs_of(|function, inputs| interceptor(&mut *self.inner, function, inputs, None))?;
                Ok(())
            }
            Interception::Timed(timer) => timed(timer, call.function, || self.inner.run_into(call, outputs)),
        }
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
        let interception = &self.interception;
        let own = |inner| Box::new(Intercepted { inner, interception: interception.clone() }) as Box<dyn Sequence>;
        Ok(self.inner.fork()?.map(own))
    }
}
