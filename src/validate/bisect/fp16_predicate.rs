//! Predicate: fp16 accuracy. A piece runs on the values that the whole function computes in f32, so that an op isn't
//! blamed for the loss of earlier ones.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use indexmap::IndexMap;

use super::{Failure, Predicate};
use crate::lint::lint;
use crate::measure::LogitMeasures;
use crate::numerics::check;
use crate::sizes::sizes;
use crate::third_party::made_up_inputs;
use crate::thresholds::NumericsThresholds;
use crate::verdict::Verdict;
use crate::watch::ValueRange;
use anec_base::Result;
use anec_bundle::Bundle;
use anec_exec::{ExecError, Executable, Precision, Tensor, WeightCache};
use anec_mil::verify::infer_known_types;
use anec_mil::{Function, Program};
use anec_package::Package;
use anec_runtime::classify::windows::Windows;
use anec_runtime::{
    Chunking, CpuBackend, ForwardOptions, Hidden, HostTables, InterceptedBackend, Interceptor, LoadedModel,
    PackageStore,
};

/// Function of fixed shapes with the inputs of one call.
pub struct RecordedCall {
    /// Package of the function.
    pub package: String,
    /// Function.
    pub function: Function,
    /// Inputs by name.
    pub inputs: Vec<(String, Tensor)>,
}

/// Calls of a package's functions at several lengths on generated inputs. Functions whose inputs can't be generated are
/// left out.
pub fn calls_of_package(name: &str, package: &Package) -> Vec<RecordedCall> {
    let fixed = package.program.functions.iter().flat_map(sizes);
    let call = |function: Function| {
        let inputs = made_up_inputs(&function).ok()?;
        Some(RecordedCall { package: name.to_owned(), function: infer_known_types(&function), inputs })
    };
    fixed.filter_map(call).collect()
}

/// First call of each function that a bundle makes for a text; states are zero then.
///
/// # Errors
/// If the bundle can't be run in f32.
pub fn calls_of_bundle(bundle: &Bundle, folder: &Path, tokens: &[u32]) -> Result<Vec<RecordedCall>> {
    let host = Arc::new(HostTables::open(bundle, folder)?);
    let bundle = &bundle.with_logits();
    let programs = PackageStore::of(bundle, folder);
    let (backend, seen) = recording(CpuBackend::new(programs, Precision::F32), bundle);
    let model = LoadedModel::new(bundle.clone(), folder, host, Box::new(backend))?;
    if model.bundle().model.band().is_some() {
        Windows::new(&model, None, Hidden::No)?.label(tokens)?;
    } else {
        let mut session = model.start(model.context())?;
        session
            .forward(&tokens[..tokens.len().min(session.limit() as usize)], &ForwardOptions::all(Chunking::Largest))?;
    }
    let seen = std::mem::take(&mut *seen.lock().unwrap_or_else(PoisonError::into_inner));
    let mut calls = Vec::new();
    for (index, inputs) in seen {
        let entry = &bundle.functions[index];
        let program = anec_package::open(&folder.join(&entry.package))?.program;
        let Some(function) = program.function(&entry.function) else { continue };
        let fixed = at_sizes(function, &inputs);
        calls.push(RecordedCall { package: entry.package.clone(), function: infer_known_types(&fixed), inputs });
    }
    Ok(calls)
}

/// Fixes the function's symbols to the sizes of the inputs.
fn at_sizes(function: &Function, inputs: &[(String, Tensor)]) -> Function {
    let mut fixed = function.clone();
    for (name, tensor) in inputs {
        let ty = function.tensor_inputs().find(|value| value.name == *name).and_then(|value| value.ty.tensor());
        for (dim, size) in ty.into_iter().flat_map(|ty| &ty.shape).zip(&tensor.shape) {
            // sizes derived from T follow from inputs of size T
            if let anec_mil::Dim::Symbolic { symbol, factor: 1, offset: 0 } = dim {
                fixed = fixed.with_length(symbol, *size as u64);
            }
        }
    }
    fixed
}

/// Tensors by name.
type Named = Vec<(String, Tensor)>;

/// Backend that records the inputs of each function's first call, by index in `bundle.json`.
fn recording(inner: CpuBackend, bundle: &Bundle) -> (InterceptedBackend, Arc<Mutex<BTreeMap<usize, Named>>>) {
    let kept = Arc::new(Mutex::new(BTreeMap::<usize, Named>::new()));
    let (seen, functions) = (kept.clone(), bundle.functions.clone());
    let interceptor: Interceptor = Arc::new(move |sequence, function, inputs, watch| {
        let names = functions[function].inputs.iter().map(|port| port.name.clone());
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.entry(function).or_insert_with(|| names.zip(inputs.iter().copied().cloned()).collect());
        drop(seen);
        sequence.run(function, inputs, watch)
    });
    (InterceptedBackend::new(Arc::new(inner), interceptor), kept)
}

/// Fails if fp16 can't represent a constant, or computes something else than f32.
pub struct Fp16Predicate {
    /// Values of the whole function in f32, by name.
    values: BTreeMap<String, Tensor>,
    thresholds: NumericsThresholds,
    cache: WeightCache,
}

impl Fp16Predicate {
    /// Runs the whole function in f32.
    ///
    /// # Errors
    /// If it can't be run.
    pub fn of(call: &RecordedCall, thresholds: &NumericsThresholds) -> Result<Self> {
        let cache = WeightCache::new();
        let mut values: BTreeMap<String, Tensor> = call.inputs.iter().cloned().collect();
        let mut note = |name: &str, tensor: &Tensor| {
            values.insert(name.to_owned(), tensor.clone());
        };
        run(&call.function, Precision::F32, &call.inputs, &cache, &mut note)?;
        Ok(Fp16Predicate { values, thresholds: thresholds.clone(), cache })
    }

    /// Runs a piece: the range of its values, and its results.
    fn trace(&self, function: &Function, precision: Precision) -> Result<Trace, ExecError> {
        let given = function.tensor_inputs();
        let inputs: Vec<(String, Tensor)> =
            given.filter_map(|v| Some((v.name.clone(), self.values.get(&v.name)?.clone()))).collect();
        let mut seen: IndexMap<String, ValueRange> = IndexMap::new();
        let mut note = |name: &str, tensor: &Tensor| {
            if let Some(values) = tensor.floats() {
                seen.entry(name.to_owned()).or_default().add(values);
            }
        };
        let outputs = run(function, precision, &inputs, &self.cache, &mut note)?;
        Ok(Trace { seen, outputs })
    }
}

struct Trace {
    seen: IndexMap<String, ValueRange>,
    outputs: Vec<(String, Tensor)>,
}

fn run(
    function: &Function,
    precision: Precision,
    inputs: &[(String, Tensor)],
    cache: &WeightCache,
    note: &mut dyn FnMut(&str, &Tensor),
) -> Result<Vec<(String, Tensor)>, ExecError> {
    let executable = Executable::compile_unfused(function, precision, cache)?;
    let inputs: Vec<(&str, &Tensor)> = inputs.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    executable.run_with(&inputs, &mut executable.new_state(), note)
}

/// Kind of failures by overflow, as opposed to inaccuracy.
const OVERFLOW: &str = "overflow";

impl Predicate for Fp16Predicate {
    fn failures(&mut self, function: &Function) -> Result<Vec<Failure>> {
        let program = Program { functions: vec![function.clone()], default_function: function.name.clone() };
        let mut failures = Vec::new();
        for check in lint(&function.name, &program)? {
            if let Some(detail) = check.detail.filter(|_| check.verdict == Verdict::Failed) {
                failures.push(Failure { kind: check.claim, detail });
            }
        }
        let (Ok(single), Ok(half)) = (self.trace(function, Precision::F32), self.trace(function, Precision::F16))
        else {
            // a piece that can't be run proves nothing
            return Ok(failures);
        };
        // inputs, such as masks, may be large on purpose: only values computed by the piece count
        let overflows = half.seen.values().any(|extent| !extent.is_finite());
        for (half_output, single_output) in half.outputs.iter().zip(&single.outputs) {
            let (Some(found), Some(reference)) = (half_output.1.floats(), single_output.1.floats()) else { continue };
            let measures = LogitMeasures::of(found, reference, reference.len());
            let name = half_output.0.clone();
            let check = check(name.clone(), &half.seen, &single.seen, &BTreeSet::new(), &measures, &self.thresholds);
            if let Some(detail) = check.detail {
                let kind = if overflows { OVERFLOW.to_owned() } else { check.claim };
                failures.push(Failure { kind, detail: format!("`{name}`: {detail}") });
            }
        }
        Ok(failures)
    }
}
