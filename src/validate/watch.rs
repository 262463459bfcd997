//! A backend that notes how large every value inside the functions gets, and runs them on the CPU executor.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use indexmap::IndexMap;

use anec_base::Result;
use anec_exec::{Precision, Tensor};
use anec_runtime::{Backend, CpuBackend, PackageStore, Sequence, Watch};

/// What was seen of one value over all calls.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ValueRange {
    /// Largest finite magnitude.
    pub largest: f32,
    /// Elements that were infinite.
    pub infinite: u64,
    /// Elements that were not a number.
    pub nan: u64,
}

impl ValueRange {
    /// Adds what is among `values`.
    pub fn add(&mut self, values: &[f32]) {
        // magnitudes are in the order of their bits; what isn't finite comes last
        let magnitude = |value: &f32| value.to_bits() & 0x7fff_ffff;
        let largest = values.iter().map(magnitude).max().unwrap_or(0);
        if largest < f32::INFINITY.to_bits() {
            self.largest = self.largest.max(f32::from_bits(largest));
            return;
        }
        for value in values {
            if value.is_nan() {
                self.nan += 1;
            } else if value.is_infinite() {
                self.infinite += 1;
            } else {
                self.largest = self.largest.max(value.abs());
            }
        }
    }

    /// Whether everything was finite.
    pub fn is_finite(&self) -> bool {
        self.infinite == 0 && self.nan == 0
    }
}

/// What was seen: by function (its index in `bundle.json`), then by value, in the order in which they came.
pub type Seen = BTreeMap<usize, IndexMap<String, ValueRange>>;

/// Where a watching backend keeps what it saw.
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Seen>>);

impl Log {
    /// What was seen so far; it is forgotten here.
    pub fn take(&self) -> Seen {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The CPU executor, watched.
pub struct RecordingBackend {
    inner: CpuBackend,
    log: Log,
}

impl RecordingBackend {
    /// Runs programs in a precision and notes what it sees in `log`.
    pub fn new(programs: Arc<PackageStore>, precision: Precision, log: Log) -> Self {
        RecordingBackend { inner: CpuBackend::unfused(programs, precision), log }
    }
}

impl Backend for RecordingBackend {
    fn prepare(&self, function: usize) -> Result<()> {
        self.inner.prepare(function)
    }

    fn sequence(&self) -> Result<Box<dyn Sequence>> {
        Ok(Box::new(Watched { inner: self.inner.sequence()?, log: self.log.clone() }))
    }
}

struct Watched {
    inner: Box<dyn Sequence>,
    log: Log,
}

impl Sequence for Watched {
    fn run(&mut self, function: usize, inputs: &[&Tensor], mut watch: Option<Watch<'_>>) -> Result<Vec<Tensor>> {
        let mut seen = self.log.0.lock().unwrap_or_else(PoisonError::into_inner);
        let extents = seen.entry(function).or_default();
        let mut note = |name: &str, tensor: &Tensor| {
            if let Some(values) = tensor.floats() {
                match extents.get_mut(name) {
                    Some(extent) => extent.add(values),
                    None => extents.entry(name.to_owned()).or_default().add(values),
                }
            }
            if let Some(watch) = watch.as_mut() {
                watch(name, tensor);
            }
        };
        self.inner.run(function, inputs, Some(&mut note))
    }

    fn reset(&mut self) -> Result<()> {
        self.inner.reset()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_finite_is_counted_and_never_the_largest() {
        let mut extent = ValueRange::default();
        extent.add(&[1.0, -3.0, 0.5]);
        assert_eq!(extent, ValueRange { largest: 3.0, infinite: 0, nan: 0 });
        extent.add(&[f32::NEG_INFINITY, f32::NAN, -f32::NAN, -7.0, f32::INFINITY]);
        assert_eq!(extent, ValueRange { largest: 7.0, infinite: 2, nan: 2 });
        assert!(!extent.is_finite());
    }
}
