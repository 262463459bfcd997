//! How large every value inside the functions gets, noted as they run on the CPU executor.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use indexmap::IndexMap;

use anec_exec::{Precision, Tensor};
use anec_kernels::distance::largest_magnitude_bits;
use anec_runtime::{CpuBackend, InterceptedBackend, PackageStore};

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
        // what isn't finite comes last
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

    /// Whether everything was finite.
    pub fn is_finite(&self) -> bool {
        self.infinite == 0 && self.nan == 0
    }
}

/// What was seen: by function (its index in `bundle.json`), then by value, in the order in which they came.
pub type SeenRanges = BTreeMap<usize, IndexMap<String, ValueRange>>;

/// A few elements of every value, by function and by value, in the order in which they came.
pub type Samples = BTreeMap<usize, IndexMap<String, Vec<f32>>>;

/// Elements that are kept of a value over all calls.
const KEPT: usize = 2048;
/// Elements that are kept of a value of one call, at least.
const SAMPLED: usize = 256;

/// Where what was seen is kept.
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Notes>>);

#[derive(Default)]
struct Notes {
    seen: SeenRanges,
    /// Only where they are asked for.
    samples: Option<Samples>,
    /// Elements that are kept of a value of one call.
    sampled: usize,
}

impl Log {
    /// A log that also keeps a few elements of every value, over so many calls.
    pub fn sampling(calls: usize) -> Self {
        let sampled = (KEPT / calls.max(1)).max(SAMPLED);
        Log(Arc::new(Mutex::new(Notes { samples: Some(Samples::new()), sampled, ..Notes::default() })))
    }

    /// The CPU executor, whose functions run op by op, in a precision: what it computes is noted here.
    pub fn backend(&self, programs: Arc<PackageStore>, precision: Precision) -> InterceptedBackend {
        let log = self.clone();
        let note = move |function, name: &str, tensor: &Tensor| log.note(function, name, tensor);
        InterceptedBackend::observed(Arc::new(CpuBackend::unfused(programs, precision)), Arc::new(note))
    }

    fn note(&self, function: usize, name: &str, tensor: &Tensor) {
        let Some(values) = tensor.floats() else { return };
        let mut notes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let sampled = notes.sampled;
        if let Some(samples) = &mut notes.samples {
            let kept = samples.entry(function).or_default().entry(name.to_owned()).or_default();
            let room = KEPT.saturating_sub(kept.len()).min(sampled);
            kept.extend(values.iter().step_by(values.len().div_ceil(sampled).max(1)).take(room));
        }
        let ranges = notes.seen.entry(function).or_default();
        match ranges.get_mut(name) {
            Some(range) => range.add(values),
            None => ranges.entry(name.to_owned()).or_default().add(values),
        }
    }

    /// What was seen so far; it is forgotten here.
    pub fn take(&self) -> SeenRanges {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner).seen)
    }

    /// The elements that were kept; none unless the log is [`sampling`](Log::sampling).
    pub fn samples(&self) -> Samples {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).samples.clone().unwrap_or_default()
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
