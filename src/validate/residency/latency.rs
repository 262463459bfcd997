//! Cross-check of a plan by latency: calls on the Neural Engine are faster than on the CPU alone.

use std::path::Path;
use std::time::Instant;

use anec_base::Result;
use anec_bundle::{FunctionEntry, Port, PortRole};
use anec_coreml::array::{Element, OwnedValues, StridedArray};
use anec_coreml::plan::{ComputeUnits, FunctionPlan, Timing};
use anec_coreml::{CoreMlError, Engine, LoadedFunction};
use anec_exec::{Tensor, TensorData};
use anec_runtime::Sequence;
use anec_runtime::coreml::element;
use anec_runtime::inputs::shape_of;

use super::UNITS;
use super::subject::Signature;

/// Uncounted calls at the beginning, which load, allocate and wake the device.
const WARM_UP: usize = 3;
/// Timed calls.
const CALLS: usize = 20;

/// Times calls of a function at position 0 with zero inputs; milliseconds.
///
/// # Errors
/// If a call fails.
pub fn measure(sequence: &mut dyn Sequence, function: usize, entry: &FunctionEntry, tokens: u64) -> Result<Vec<f64>> {
    let zeros = |port: &Port| {
        let shape = shape_of(port, tokens);
        if port.role == PortRole::SliceEnd {
            return Tensor::new(shape, vec![0, 0, tokens as i32, 0]);
        }
        let count = shape.iter().product();
        match element(&port.role) {
            Element::I32 => Tensor::new(shape, vec![0i32; count]),
            Element::F16 | Element::F32 => Tensor::new(shape, vec![0f32; count]),
        }
    };
    let inputs: Vec<Tensor> = entry.inputs.iter().map(zeros).collect();
    let inputs: Vec<&Tensor> = inputs.iter().collect();
    let mut milliseconds = Vec::with_capacity(CALLS);
    for call in 0..WARM_UP + CALLS {
        let begin = Instant::now();
        let outputs = sequence.run(function, &inputs, None)?;
        let elapsed = begin.elapsed();
        debug_assert!(outputs.iter().all(|output| !matches!(output.data, TensorData::Bool(_))));
        if call >= WARM_UP {
            milliseconds.push(elapsed.as_secs_f64() * 1e3);
        }
    }
    Ok(milliseconds)
}

/// Loads a compiled model of one function and calls it with `inputs`, in the order of the signature. Returns the
/// outputs of the first call and the milliseconds of `calls` later ones.
///
/// # Errors
/// If Core ML refuses to load or call it.
pub fn run_directly(
    engine: &impl Engine,
    compiled: &Path,
    units: ComputeUnits,
    signature: &Signature,
    inputs: &[OwnedValues],
    calls: usize,
) -> Result<(Vec<OwnedValues>, Vec<f64>), CoreMlError> {
    let loaded = engine.load(compiled, None, units)?;
    let state = if signature.states.is_empty() { None } else { Some(loaded.state(&signature.states)?) };
    let mut call = loaded.call(&signature.inputs, &signature.outputs)?;
    let values: Vec<_> = inputs.iter().map(OwnedValues::as_values).collect();
    let outputs = loaded.predict(&mut call, state.as_ref(), &values)?;
    let mut milliseconds = Vec::with_capacity(calls);
    for index in 0..if calls == 0 { 0 } else { WARM_UP + calls } {
        let begin = Instant::now();
        loaded.predict(&mut call, state.as_ref(), &values)?;
        if index >= WARM_UP {
            milliseconds.push(begin.elapsed().as_secs_f64() * 1e3);
        }
    }
    Ok((outputs, milliseconds))
}

/// Times calls of a compiled model of one function with zero inputs; milliseconds.
///
/// # Errors
/// As [`run_directly`].
pub fn measure_directly(
    engine: &impl Engine,
    compiled: &Path,
    units: ComputeUnits,
    signature: &Signature,
) -> Result<Vec<f64>, CoreMlError> {
    let zeros = |array: &StridedArray| match array.element {
        Element::I32 => OwnedValues::Integers(vec![0; array.count()]),
        Element::F16 | Element::F32 => OwnedValues::Floats(vec![0.0; array.count()]),
    };
    let inputs: Vec<OwnedValues> = signature.inputs.iter().map(zeros).collect();
    Ok(run_directly(engine, compiled, units, signature, &inputs, CALLS)?.1)
}

/// Latency of a function.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latency {
    /// Median milliseconds with the Neural Engine.
    pub neural_engine: f64,
    /// Median milliseconds on the CPU alone.
    pub cpu: f64,
}

impl Latency {
    /// Medians of a plan, if both were measured.
    pub fn of(plan: &FunctionPlan) -> Option<Self> {
        let median = |units: ComputeUnits| {
            let timing: &Timing = plan.timings.iter().find(|timing| timing.compute_units == units)?;
            median(&timing.milliseconds)
        };
        Some(Latency { neural_engine: median(UNITS)?, cpu: median(ComputeUnits::CpuOnly)? })
    }

    /// Whether calls are long enough to be compared.
    pub fn is_telling(&self, shortest: f64) -> bool {
        self.neural_engine >= shortest || self.cpu >= shortest
    }

    /// Reason to doubt a resident plan, if there is one. Functions faster than `shortest` milliseconds can't be judged,
    /// because a call has a fixed cost of a few tenths of a millisecond.
    pub fn contradiction(&self, shortest: f64) -> Option<String> {
        let Latency { neural_engine, cpu } = self;
        // false for NaN, which is then a contradiction
        let faster = neural_engine < cpu;
        let too_short = *cpu < shortest && *neural_engine < shortest;
        (!faster && !too_short).then(|| {
            format!(
                "suspect: {neural_engine:.2} ms a call, {cpu:.2} ms on the CPU alone; it may run elsewhere than planned"
            )
        })
    }
}

/// Median; `None` if a number isn't finite.
fn median(numbers: &[f64]) -> Option<f64> {
    if numbers.is_empty() || numbers.iter().any(|number| !number.is_finite()) {
        return None;
    }
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    Some(if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(timings: &[(ComputeUnits, &[f64])]) -> FunctionPlan {
        let timings = timings.iter().map(|(units, ms)| Timing { compute_units: *units, milliseconds: ms.to_vec() });
        FunctionPlan {
            package: "p".into(),
            function: "main".into(),
            tokens: Some(1),
            operations: Vec::new(),
            refused: None,
            timings: timings.collect(),
        }
    }

    #[test]
    fn medians_are_compared() {
        let cpu = ComputeUnits::CpuOnly;
        // one slow call doesn't matter
        let fast = Latency::of(&plan(&[(UNITS, &[1.0, 90.0, 1.2]), (cpu, &[4.0, 5.0])])).unwrap();
        assert_eq!(fast, Latency { neural_engine: 1.2, cpu: 4.5 });
        assert_eq!(fast.contradiction(0.5), None);
        let slow = Latency::of(&plan(&[(UNITS, &[4.6]), (cpu, &[4.5])])).unwrap();
        assert!(slow.contradiction(0.5).unwrap().starts_with("suspect: 4.60 ms a call, 4.50 ms on the CPU alone"));
        // too short to compare, unless the Neural Engine is slow
        assert_eq!(Latency { neural_engine: 0.3, cpu: 0.1 }.contradiction(0.5), None);
        assert!(Latency { neural_engine: 3.0, cpu: 0.1 }.contradiction(0.5).is_some());
        assert!(Latency { neural_engine: 0.5, cpu: 0.5 }.contradiction(0.5).is_some());
    }

    #[test]
    fn missing_latencies_are_not_compared() {
        let cpu = ComputeUnits::CpuOnly;
        for timings in [
            &[][..],
            &[(UNITS, &[1.0][..])],
            &[(UNITS, &[]), (cpu, &[1.0])],
            &[(UNITS, &[f64::NAN]), (cpu, &[1.0])],
            &[(ComputeUnits::All, &[1.0]), (cpu, &[1.0])],
        ] {
            assert_eq!(Latency::of(&plan(timings)), None);
        }
    }
}
