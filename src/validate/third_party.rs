//! Gates of packages that anec didn't make.

use std::collections::BTreeSet;

use super::lint::lint;
use super::measure::LogitMeasures;
use super::numerics::check;
use super::thresholds::NumericsThresholds;
use super::verdict::{Check, GateReport, listed};
use super::watch::ValueRange;
use anec_base::{Result, SplitMix64};
use anec_exec::{ExecError, ExecOptions, Executable, Precision, Tensor, TensorData, WeightCache};
use anec_mil::constant::Data;
use anec_mil::verify::{infer_types, verify, verify_function};
use anec_mil::{Constant, DataType, Function, TensorType, Value};
use anec_package::Package;

/// Tested sizes of a flexible dimension: smallest, default, largest.
pub(super) fn sizes(function: &Function) -> Vec<Function> {
    let lengths: Vec<_> = function.lengths.iter().collect();
    let Some((_, first)) = lengths.first() else { return vec![function.clone()] };
    let mut sizes = match first {
        anec_mil::SymbolRange::Range { lower, upper, default } => {
            // an unbounded dimension is tried near its default
            vec![(*lower).max(1), *default, upper.unwrap_or(*default + 1).min(default.saturating_mul(8).max(8))]
        }
        anec_mil::SymbolRange::Enumerated(sizes) => sizes.clone(),
    };
    sizes.sort_unstable();
    sizes.dedup();
    let fix = |size: u64| {
        lengths.iter().fold(function.clone(), |fixed, (symbol, lengths)| {
            let size = if lengths.contains(size) { size } else { lengths.default_size() };
            fixed.with_length(symbol, size)
        })
    };
    sizes.into_iter().map(fix).collect()
}

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

/// Parity gate of a package. The meaning of its inputs isn't known, so a golden can't be compared.
pub fn parity(name: &str) -> GateReport {
    let reason = "a package says nothing of what its inputs mean; parity is for bundles";
    GateReport::new(super::parity::GATE, vec![Check::unproven(name, "it agrees with a golden", reason)])
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
    let executable = Executable::compile_unfused(function, ExecOptions { precision }, cache)?;
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
fn noise(seed: u64, count: usize) -> Vec<f32> {
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
