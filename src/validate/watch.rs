//! Records the magnitudes of all values while functions run on the CPU executor, and of outputs elsewhere.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use indexmap::IndexMap;

use anec_bundle::Bundle;
use anec_exec::{Precision, Tensor};
use anec_kernels::distance::largest_magnitude_bits;
use anec_runtime::{Backend, CpuBackend, InterceptedBackend, Interceptor, PackageStore};

/// Range of one value over all calls.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ValueRange {
    /// Largest finite magnitude.
    pub largest: f32,
    /// Number of infinite elements.
    pub infinite: u64,
    /// Number of NaN elements.
    pub nan: u64,
}

impl ValueRange {
    /// Adds elements.
    pub fn add(&mut self, values: &[f32]) {
        // non-finite bit patterns sort last
        let largest = largest_magnitude_bits(values);
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

    /// Whether all elements were finite.
    pub fn is_finite(&self) -> bool {
        self.infinite == 0 && self.nan == 0
    }
}

/// Ranges by function (index in `bundle.json`) and by value, in order of computation.
pub type SeenRanges = BTreeMap<usize, IndexMap<String, ValueRange>>;

/// Some elements of every value, by function and by value, in order of computation.
pub type Samples = BTreeMap<usize, IndexMap<String, Vec<f32>>>;

/// Maximum number of samples of a value over all calls.
const MAX_SAMPLES: usize = 2048;
/// Minimum number of samples of a value per call.
const MIN_SAMPLES: usize = 256;

/// Shared record of observed values.
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Record>>);

#[derive(Default)]
struct Record {
    seen: SeenRanges,
    /// Samples, if requested.
    samples: Option<Samples>,
    /// Number of samples of a value per call.
    sampled: usize,
}

impl Log {
    /// Creates a log that also keeps samples of every value, over `calls` calls.
    pub fn sampling(calls: usize) -> Self {
        let sampled = (MAX_SAMPLES / calls.max(1)).max(MIN_SAMPLES);
        Log(Arc::new(Mutex::new(Record { samples: Some(Samples::new()), sampled, ..Record::default() })))
    }

    /// Op-by-op CPU executor in a precision whose values are recorded in this log.
    pub fn backend(&self, programs: Arc<PackageStore>, precision: Precision) -> InterceptedBackend {
        let log = self.clone();
        let note = move |function, name: &str, tensor: &Tensor| log.note(function, name, tensor);
        InterceptedBackend::observed(Arc::new(CpuBackend::unfused(programs, precision)), Arc::new(note))
    }

    /// Backend whose outputs are recorded in this log, by their names in the bundle.
    pub(super) fn outputs(&self, bundle: &Bundle, inner: Box<dyn Backend>) -> InterceptedBackend {
        let (log, functions) = (self.clone(), bundle.functions.clone());
        let note: Interceptor = Arc::new(move |sequence, function, inputs, _| {
            let outputs = sequence.run(function, inputs, None)?;
            let ports = functions.get(function).map_or(&[][..], |entry| &entry.outputs);
            ports.iter().zip(&outputs).for_each(|(port, tensor)| log.note(function, &port.name, tensor));
            Ok(outputs)
        });
        InterceptedBackend::new(inner.into(), note)
    }

    fn note(&self, function: usize, name: &str, tensor: &Tensor) {
        let Some(values) = tensor.floats() else { return };
        let mut notes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let sampled = notes.sampled;
        if let Some(samples) = &mut notes.samples {
            let kept = samples.entry(function).or_default().entry(name.to_owned()).or_default();
            let room = MAX_SAMPLES.saturating_sub(kept.len()).min(sampled);
            kept.extend(values.iter().step_by(values.len().div_ceil(sampled).max(1)).take(room));
        }
        let ranges = notes.seen.entry(function).or_default();
        match ranges.get_mut(name) {
            Some(range) => range.add(values),
            None => ranges.entry(name.to_owned()).or_default().add(values),
        }
    }

    /// Takes the ranges recorded so far.
    pub fn take(&self) -> SeenRanges {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner).seen)
    }

    /// Returns the samples; empty unless the log is [`sampling`](Log::sampling).
    pub fn samples(&self) -> Samples {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).samples.clone().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn non_finite_values_are_counted_separately() {
        let mut extent = ValueRange::default();
        extent.add(&[1.0, -3.0, 0.5]);
        assert_eq!(extent, ValueRange { largest: 3.0, infinite: 0, nan: 0 });
        extent.add(&[f32::NEG_INFINITY, f32::NAN, -f32::NAN, -7.0, f32::INFINITY]);
        assert_eq!(extent, ValueRange { largest: 7.0, infinite: 2, nan: 2 });
        assert!(!extent.is_finite());
    }
}
