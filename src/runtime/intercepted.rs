//! Backend decorator that times calls, records their inputs, or shows the values inside them.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::backend::{Backend, BatchMember, BatchResult, FunctionCall, Phase, Sequence, Watch, run_each, run_in_turn};
use anec_base::Result;
use anec_bundle::Bundle;
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

    /// Calls of another bundle aren't intercepted, because its functions have other indices.
    fn of_bundle(&self, bundle: &Bundle) -> Result<Option<Box<dyn Backend>>> {
        self.inner.of_bundle(bundle)
    }

    fn run_batch(&self, function: usize, mut members: Vec<BatchMember<'_>>) -> Vec<BatchResult> {
        let timer = match &self.interception {
            Interception::Timed(timer) if members.iter_mut().all(|member| own(member.sequence).is_some()) => timer,
            _ => return run_each(function, members),
        };
        let count = members.len() as u32;
        let inner = |BatchMember { sequence, inputs }| {
            own(sequence).map(|sequence| BatchMember { sequence: &mut *sequence.inner, inputs })
        };
        let members = members.into_iter().filter_map(inner).collect();
        let start = Instant::now();
        let results = self.inner.run_batch(function, members);
        // each text's share of the call
        (0..count).for_each(|_| timer(function, start.elapsed() / count));
        results
    }

    fn sequence(&self) -> Result<Box<dyn Sequence>> {
        Ok(Box::new(Intercepted { inner: self.inner.sequence()?, interception: self.interception.clone() }))
    }
}

/// Returns the sequence of an intercepted backend.
fn own<'a>(sequence: &'a mut (dyn Sequence + 'static)) -> Option<&'a mut Intercepted> {
    let sequence: &mut dyn Any = sequence;
    sequence.downcast_mut()
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

    fn run_together(&mut self, calls: &[FunctionCall<'_>], outputs: &mut [Vec<Arc<Tensor>>]) -> Result<()> {
        let Interception::Timed(timer) = &self.interception else { return run_in_turn(self, calls, outputs) };
        let start = Instant::now();
        let result = self.inner.run_together(calls, outputs);
        let each = start.elapsed() / calls.len().max(1) as u32;
        calls.iter().for_each(|call| timer(call.function, each));
        result
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

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::super::backend::{run_anew, run_in_turn};
    use super::*;

    /// Backend that records which of its methods run functions.
    #[derive(Clone, Default)]
    struct Recorder(Arc<Mutex<Vec<&'static str>>>);

    impl Recorder {
        fn note(&self, method: &'static str) {
            self.0.lock().unwrap().push(method);
        }
    }

    impl Backend for Recorder {
        fn prepare(&self, _: usize) -> Result<()> {
            Ok(())
        }

        fn has_room(&self, _: usize) -> bool {
            true
        }

        fn of_bundle(&self, _: &Bundle) -> Result<Option<Box<dyn Backend>>> {
            Ok(None)
        }

        fn run_batch(&self, function: usize, mut members: Vec<BatchMember<'_>>) -> Vec<BatchResult> {
            let mut is_own = |member: &mut BatchMember<'_>| (&mut *member.sequence as &mut dyn Any).is::<Recorder>();
            assert!(members.iter_mut().all(&mut is_own), "members are the inner backend's sequences");
            self.note("run_batch");
            run_each(function, members)
        }

        fn sequence(&self) -> Result<Box<dyn Sequence>> {
            Ok(Box::new(self.clone()))
        }
    }

    impl Sequence for Recorder {
        fn run(&mut self, _: usize, inputs: &[&Tensor], watch: Option<Watch<'_>>) -> Result<Vec<Tensor>> {
            if let Some(watch) = watch {
                watch("value", inputs[0]);
            }
            Ok(inputs.iter().copied().cloned().collect())
        }

        fn run_into(&mut self, call: FunctionCall<'_>, outputs: &mut Vec<Arc<Tensor>>) -> Result<()> {
            run_anew(self, call, outputs)
        }

        fn run_together(&mut self, calls: &[FunctionCall<'_>], outputs: &mut [Vec<Arc<Tensor>>]) -> Result<()> {
            self.note("run_together");
            run_in_turn(self, calls, outputs)
        }

        fn enter(&mut self, _: Phase) {}

        fn states(&self, _: usize) -> Result<Option<Vec<Arc<Tensor>>>> {
            Ok(None)
        }

        fn set_states(&mut self, _: usize, _: Vec<Tensor>) -> Result<()> {
            Ok(())
        }

        fn reset(&mut self) -> Result<()> {
            Ok(())
        }

        fn fork(&self) -> Result<Option<Box<dyn Sequence>>> {
            Ok(Some(Box::new(self.clone())))
        }
    }

    /// Runs functions 0 and 1 together, then function 2 for two texts.
    fn run(backend: &InterceptedBackend) {
        let inputs = [Arc::new(Tensor::new(vec![1], vec![3.0]))];
        let mut texts = [backend.sequence().unwrap(), backend.sequence().unwrap()];
        let calls = [0, 1].map(|function| FunctionCall { function, inputs: &inputs });
        let mut outputs = vec![Vec::new(); 2];
        texts[0].run_together(&calls, &mut outputs).unwrap();
        assert!(outputs.iter().all(|own| own[0].floats() == Some(&[3.0])));
        let members = texts.iter_mut().map(|text| BatchMember { sequence: &mut **text, inputs: &inputs }).collect();
        assert!(backend.run_batch(2, members).into_iter().all(|result| result.unwrap()[0].floats() == Some(&[3.0])));
    }

    #[test]
    fn timed_calls_run_as_without_a_timer() {
        let (recorder, times) = (Recorder::default(), Arc::new(Mutex::new(Vec::new())));
        let seen = times.clone();
        let timer: Timer = Arc::new(move |function, _| seen.lock().unwrap().push(function));
        run(&InterceptedBackend::timed(Arc::new(recorder.clone()), timer));
        assert_eq!(*recorder.0.lock().unwrap(), ["run_together", "run_batch"]);
        assert_eq!(*times.lock().unwrap(), [0, 1, 2, 2]);
    }

    #[test]
    fn every_call_is_observed() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let own = seen.clone();
        let observer: Observer =
            Arc::new(move |function, name, _| own.lock().unwrap().push((function, name.to_owned())));
        run(&InterceptedBackend::observed(Arc::new(Recorder::default()), observer));
        let functions: Vec<usize> = seen.lock().unwrap().iter().map(|(function, _)| *function).collect();
        assert_eq!(functions, [0, 1, 2, 2]);
    }
}
