//! Gates of packages that anec didn't make.

use std::collections::BTreeSet;
use std::path::Path;

use super::lint::lint;
use super::measure::{LogitMeasures, cosine};
use super::numerics::check;
use super::residency::latency::run_directly;
use super::residency::subject::{Signature, SubjectCall};
use super::residency::take::with_compiled;
use super::sizes::{default_size, fixed_at, sizes};
use super::thresholds::NumericsThresholds;
use super::verdict::{Check, GateReport, listed};
use super::watch::ValueRange;
use anec_base::{FileError, Result, SplitMix64};
use anec_coreml::Engine;
use anec_coreml::array::OwnedValues;
use anec_coreml::plan::ComputeUnits;
use anec_exec::{ExecError, Executable, Precision, Tensor, TensorData, WeightCache};
use anec_mil::verify::{infer_types, verify, verify_function};
use anec_mil::{Constant, Data, DataType, Function, TensorType, Value};
use anec_package::Package;

/// Structure gate of a package called `name`.
pub fn structure(name: &str, package: &Package) -> GateReport {
    let program = &package.program;
    let mut types = Vec::new();
    for function in &program.functions {
        for fixed in sizes(function) {
            let inputs: Vec<String> = fixed.tensor_inputs().map(|value| value.ty.to_string()).collect();
            let at = |problem: String| format!("function `{}` with {}: {problem}", function.name, inputs.join(", "));
            match infer_types(&fixed) {
                Err(error) => types.push(at(error.to_string())),
                Ok(inferred) => {
                    types.extend(verify_function(&inferred).into_iter().map(|finding| at(finding.to_string())));
                }
            }
        }
    }
    let empty = program.functions.is_empty().then(|| "it has no function".to_owned());
    GateReport::new(
        super::structure::GATE,
        vec![
            Check::of(name, "it can be read, and it has functions", empty),
            Check::of(name, "its program obeys the rules of MIL", listed(&verify(program))),
            Check::of(name, "its description is that of its program", listed(&package.check_description())),
            Check::of(name, "types inferred anew are the declared ones", listed(&types)),
            Check::of(name, "its weights are where the program says", listed(&unreadable(package))),
        ],
    )
}

/// Constants that can't be read or don't fill their type.
fn unreadable(package: &Package) -> Vec<String> {
    let mut seen = BTreeSet::new();
    let mut problems = Vec::new();
    let mut visit = |name: &str, constant: &Constant| {
        if let Data::Content(content) = &constant.data
            && !seen.insert(std::sync::Arc::as_ptr(content).cast::<()>().addr())
        {
            return;
        }
        if !constant.is_consistent() {
            problems.push(format!("`{name}`: {constant:?} doesn't fill its type"));
        } else if let Err(error) = constant.bytes() {
            problems.push(format!("`{name}`: {error}"));
        }
    };
    for op in package.program.functions.iter().flat_map(Function::ops) {
        op.attributes.values().for_each(|constant| visit(&op.name, constant));
        for binding in op.inputs.values().flatten() {
            if let anec_mil::Binding::Constant(constant) = binding {
                visit(&op.name, constant);
            }
        }
    }
    problems
}

/// Numerics gate of a package: the lint, and each function on generated inputs, in f32 and with fp16 rounding.
///
/// # Errors
/// If a constant can't be read.
pub fn numerics(name: &str, package: &Package, thresholds: &NumericsThresholds) -> Result<GateReport> {
    let mut checks = lint(name, &package.program)?;
    let cache = WeightCache::new();
    for function in &package.program.functions {
        for fixed in sizes(function) {
            let subject = format!("{name}, {}, made-up inputs{}", function.name, size(function, &fixed));
            checks.push(run(&subject, &fixed, &cache, thresholds));
        }
    }
    Ok(GateReport::new(super::numerics::GATE, checks))
}

/// Name of a function's size: the shape of its first flexible input.
fn size(function: &Function, fixed: &Function) -> String {
    let mut pairs = function.tensor_inputs().zip(fixed.tensor_inputs());
    let flexible = pairs.find(|(declared, fixed)| declared.ty != fixed.ty);
    let shape = flexible.and_then(|(_, fixed)| Some((&fixed.name, fixed.ty.tensor()?.fixed_shape()?)));
    shape.map_or_else(String::new, |(name, shape)| format!(", {name} {shape:?}"))
}

/// Parity gate of a package or an asset. The meaning of its inputs isn't known, so a golden can't be compared.
pub fn parity(name: &str) -> GateReport {
    let reason = "it doesn't say what its inputs mean; parity is for bundles";
    GateReport::new(super::parity::GATE, vec![Check::unproven(name, "it agrees with a golden", reason)])
}

/// Checks of what Core ML computes for each function of a package at its default shape, on generated inputs.
///
/// # Errors
/// If the package can't be copied.
pub fn core_ml(
    engine: &impl Engine,
    name: &str,
    package: &Package,
    units: ComputeUnits,
    thresholds: &NumericsThresholds,
) -> Result<Vec<Check>> {
    let room = tempfile::tempdir().map_err(FileError::of(&std::env::temp_dir(), "create a folder in"))?;
    let claim = format!("Core ML with {units} computes what f32 computes");
    let mut checks = Vec::new();
    for function in &package.program.functions {
        let subject = format!("{name}, {}", function.name);
        let fixed = fixed_at(function, None);
        let (signature, inputs) = match (Signature::of(&fixed), made_up_inputs(&fixed)) {
            (Some(signature), Ok(inputs)) => (signature, inputs),
            (None, _) => {
                checks.push(Check::unproven(subject, &claim, "it has arrays of other types than fp16, fp32 and int32"));
                continue;
            }
            (_, Err(reason)) => {
                checks.push(Check::unproven(subject, &claim, reason));
                continue;
            }
        };
        let single = Executable::compile(&fixed, Precision::F32, &WeightCache::new());
        let given: Vec<(&str, &Tensor)> = inputs.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let expected = single.and_then(|single| single.run(&given, &mut single.new_state()));
        let expected = match expected {
            Ok(expected) => expected,
            Err(error) => {
                checks.push(Check::unproven(subject, &claim, error.to_string()));
                continue;
            }
        };
        let values: Vec<OwnedValues> = inputs.iter().map(|(_, tensor)| values_of(tensor)).collect();
        let call =
            SubjectCall { part: 0, function: function.name.clone(), tokens: default_size(function), is_default: true };
        let run = |path: &Path| run_directly(engine, path, units, &signature, &values, 0);
        let problem = match with_compiled(engine, package, &call, room.path(), run)? {
            Err(error) => Some(error.to_string()),
            Ok((outputs, _)) => difference(&signature, &outputs, &expected, thresholds),
        };
        checks.push(Check::of(subject, &claim, problem));
    }
    Ok(checks)
}

fn values_of(tensor: &Tensor) -> OwnedValues {
    match &tensor.data {
        TensorData::F32(values) => OwnedValues::Floats(values.to_vec()),
        TensorData::I32(values) => OwnedValues::Integers(values.to_vec()),
        TensorData::Bool(values) => OwnedValues::Integers(values.iter().map(|value| i32::from(*value)).collect()),
    }
}

/// Differences of Core ML's outputs from the expected ones; `None` if all agree.
fn difference(
    signature: &Signature,
    outputs: &[OwnedValues],
    expected: &[(String, Tensor)],
    thresholds: &NumericsThresholds,
) -> Option<String> {
    let mut problems = Vec::new();
    for (array, found) in signature.outputs.iter().zip(outputs) {
        let expected = expected.iter().find(|(name, _)| *name == array.name).map(|(_, tensor)| values_of(tensor));
        match (found, expected) {
            (OwnedValues::Floats(found), Some(OwnedValues::Floats(expected))) => {
                let cosine = cosine(found, &expected);
                if found.iter().any(|value| !value.is_finite()) {
                    problems.push(format!("`{}` has elements that aren't finite", array.name));
                } else if !(cosine >= thresholds.cosine) {
                    problems
                        .push(format!("`{}`: cosine {cosine:.5}, expected at least {}", array.name, thresholds.cosine));
                }
            }
            (OwnedValues::Integers(found), Some(OwnedValues::Integers(expected))) if *found == expected => {}
            _ => problems.push(format!("`{}` differs", array.name)),
        }
    }
    listed(&problems)
}

const CLAIM: &str = "fp16 computes what f32 computes";

fn run(subject: &str, function: &Function, cache: &WeightCache, thresholds: &NumericsThresholds) -> Check {
    let half = function.ops().any(|op| {
        !op.is_const()
            && op.outputs.iter().any(|id| function.tensor_type(*id).is_some_and(|t| t.dtype == DataType::Fp16))
    });
    if !half {
        return Check::unproven(subject, CLAIM, "nothing in it is computed in fp16");
    }
    let inputs = match made_up_inputs(function) {
        Ok(inputs) => inputs,
        Err(reason) => return Check::unproven(subject, CLAIM, reason),
    };
    let trace = |precision| trace(function, precision, &inputs, cache);
    let (single, half) = match (trace(Precision::F32), trace(Precision::F16)) {
        (Ok(single), Ok(half)) => (single, half),
        (Err(error), _) | (_, Err(error)) => return Check::unproven(subject, CLAIM, error.to_string()),
    };
    let measures = LogitMeasures::of(&half.outputs, &single.outputs, single.outputs.len().max(1));
    check(subject.to_owned(), &half.seen, &single.seen, &BTreeSet::new(), &measures, thresholds)
}

struct Trace {
    seen: indexmap::IndexMap<String, ValueRange>,
    /// Floating-point outputs of all calls, concatenated.
    outputs: Vec<f32>,
}

/// Two calls, so that states matter.
fn trace(
    function: &Function,
    precision: Precision,
    inputs: &[(String, Tensor)],
    cache: &WeightCache,
) -> Result<Trace, ExecError> {
    let executable = Executable::compile_unfused(function, precision, cache)?;
    let mut state = executable.new_state();
    let mut trace = Trace { seen: Default::default(), outputs: Vec::new() };
    let given: Vec<(&str, &Tensor)> = inputs.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    for _ in 0..2 {
        let mut note = |name: &str, tensor: &Tensor| {
            if let Some(values) = tensor.floats() {
                trace.seen.entry(name.to_owned()).or_default().add(values);
            }
        };
        let outputs = executable.run_with(&given, &mut state, &mut note)?;
        trace.outputs.extend(outputs.iter().filter_map(|(_, tensor)| tensor.floats()).flatten());
    }
    Ok(trace)
}

/// Generated inputs of a function with fixed shapes.
pub(super) fn made_up_inputs(function: &Function) -> Result<Vec<(String, Tensor)>, String> {
    let inputs = function.tensor_inputs().enumerate();
    inputs.map(|(index, value)| Ok((value.name.clone(), made_up(value, index as u64)?))).collect()
}

/// Generated input: reproducible floats from -1 to 1, zero for integers (usually positions or indices), true for
/// booleans.
fn made_up(value: &Value, seed: u64) -> Result<Tensor, String> {
    let wrong = || format!("input `{}` is {}, which can't be made up", value.name, value.ty);
    let ty: &TensorType = value.ty.tensor().ok_or_else(wrong)?;
    let shape: Vec<usize> = ty.fixed_shape().ok_or_else(wrong)?.into_iter().map(|size| size as usize).collect();
    let count = shape.iter().product();
    let data = match ty.dtype {
        DataType::Bool => TensorData::Bool(vec![true; count]),
        dtype if dtype.is_float() => TensorData::F32(noise(seed, count)),
        DataType::String => return Err(wrong()),
        _ => TensorData::I32(vec![0; count]),
    };
    Ok(Tensor { shape, data })
}

/// Numbers from -1 to 1.
pub(super) fn noise(seed: u64, count: usize) -> Vec<f32> {
    let mut random = SplitMix64::new(seed.wrapping_mul(0x2545_f491_4f6c_dd1d));
    (0..count).map(|_| (random.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_is_the_same_every_time_and_fills_its_range() {
        let values = noise(3, 10_000);
        assert_eq!(values, noise(3, 10_000));
        assert_ne!(values, noise(4, 10_000));
        assert!(values.iter().all(|value| (-1.0..1.0).contains(value)));
        let mean = values.iter().sum::<f32>() / 10_000.0;
        assert!(mean.abs() < 0.02, "{mean}");
    }
}
