//! Measures how long the functions of a bundle take, one by one.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::backend::{Backend, Sequence, Watch};
use anec_base::Result;
use anec_exec::Tensor;

/// Calls of a function and the time that they took together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallTime {
    /// How many.
    pub count: u64,
    /// Time of all.
    pub time: Duration,
}

/// Times of calls by function: its index in `bundle.json`.
pub type FunctionProfile = Arc<Mutex<BTreeMap<usize, CallTime>>>;

/// A backend whose calls are measured.
pub struct Profiled {
    inner: Arc<dyn Backend>,
    profile: FunctionProfile,
}

impl Profiled {
    /// Measures the calls of a backend.
    pub fn new(inner: Arc<dyn Backend>) -> (Self, FunctionProfile) {
        let profile = FunctionProfile::default();
        (Profiled { inner, profile: profile.clone() }, profile)
    }
}

impl Backend for Profiled {
    fn prepare(&self, function: usize) -> Result<()> {
        self.inner.prepare(function)
    }

    fn sequence(&self) -> Result<Box<dyn Sequence>> {
        Ok(Box::new(Measured { inner: self.inner.sequence()?, profile: self.profile.clone() }))
    }
}

struct Measured {
    inner: Box<dyn Sequence>,
    profile: FunctionProfile,
}

impl Sequence for Measured {
    fn run(&mut self, function: usize, inputs: &[&Tensor], watch: Option<Watch<'_>>) -> Result<Vec<Tensor>> {
        let start = Instant::now();
        let outputs = self.inner.run(function, inputs, watch);
        let mut profile = self.profile.lock().unwrap_or_else(PoisonError::into_inner);
        let calls = profile.entry(function).or_default();
        calls.count += 1;
        calls.time += start.elapsed();
        outputs
    }

    fn reset(&mut self) -> Result<()> {
        self.inner.reset()
    }

    fn fork(&self) -> Result<Option<Box<dyn Sequence>>> {
        let copy = self.inner.fork()?;
        let profile = &self.profile;
        Ok(copy.map(|inner| Box::new(Measured { inner, profile: profile.clone() }) as Box<dyn Sequence>))
    }
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
