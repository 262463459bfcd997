//! Profile of a bundle's functions.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::backend::Backend;
use super::intercepted::InterceptedBackend;

/// Number and total time of a function's calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallTime {
    /// Number of calls.
    pub count: u64,
    /// Total time.
    pub time: Duration,
}

/// Call times by function: its index in `bundle.json`.
pub type FunctionProfile = Arc<Mutex<BTreeMap<usize, CallTime>>>;

/// Wraps a backend so that its calls are measured.
pub fn profiled(inner: Arc<dyn Backend>) -> (InterceptedBackend, FunctionProfile) {
    let profile = FunctionProfile::default();
    let times = profile.clone();
    let timer = move |function: usize, time: Duration| {
        let mut times = times.lock().unwrap_or_else(PoisonError::into_inner);
        let calls = times.entry(function).or_default();
        calls.count += 1;
        calls.time += time;
    };
    let measured = InterceptedBackend::timed(inner, Arc::new(timer));
    (measured, profile)
}

#[cfg(test)]
mod tests {
    use super::super::fake::{self, FakeOptions};
    use super::super::forward::ForwardOptions;

    #[test]
    fn every_call_is_counted_under_its_function() {
        let (model, calls) = fake::model(&FakeOptions::default());
        let (measured, profile) = model.profiled().unwrap();
        let mut session = measured.start(16).unwrap();
        session.forward(&[1, 2, 3, 4, 5], &ForwardOptions::last()).unwrap();
        let profile = profile.lock().unwrap().clone();
        let count: u64 = profile.values().map(|calls| calls.count).sum();
        assert_eq!(count as usize, calls.lock().unwrap().len());
        assert_eq!(profile[&0].count, 2, "five tokens are two calls of the first shard");
    }
}
