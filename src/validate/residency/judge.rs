//! Judges the compute plan of a model.

use std::collections::BTreeMap;
use std::path::Path;

use indexmap::IndexMap;

use super::latency::Latency;
use super::subject::{ResidencySubject, SubjectCall};
use super::weights::WeightBytes;
use super::{CLAIM, GATE, UNITS};
use crate::thresholds::ResidencyThresholds;
use crate::verdict::{Check, GateReport, MisplacedOp, Verdict};
use anec_base::Result;
use anec_coreml::CoreMlError;
use anec_coreml::plan::{ComputePlan, Device, FunctionPlan, Operation};
use anec_mil::{Function, catalogue};

/// Judges the plan of a model; `path` is the plan's.
///
/// Every function must be in the plan at every size. Each must have a convolution, and every compute op must prefer the
/// Neural Engine; writing a state is a compute op, reading one isn't. A manifest may require a share of the planned
/// cost in addition, or instead if it gives a reason. Ops without a device are undetermined: a separate check reports
/// their number and whether latency speaks for them.
///
/// # Errors
/// If the plan is of another model or of other bytes, contradicts itself, or wasn't taken for the Neural Engine.
pub fn judge(
    subject: &ResidencySubject,
    plan: &ComputePlan,
    path: &Path,
    thresholds: &ResidencyThresholds,
) -> Result<GateReport> {
    check_plan(subject, plan).map_err(|problem| CoreMlError::plan(path, problem))?;
    let taken = Check {
        detail: Some(format!("{}, {}, {}", plan.machine, plan.date, plan.compute_units)),
        ..Check::of("plan", "it is of these packages", None)
    };
    let mut checks = vec![taken];
    for call in &subject.calls {
        let (name, part) = (display_name(subject, call), subject.part(call));
        let Some(convs) = part.convs(&call.function) else {
            let problem = Some(format!("{} has no such function", part.name));
            checks.push(Check::of(&call.function, "it is in its package", problem));
            continue;
        };
        let is_of_call = |planned: &&FunctionPlan| {
            planned.package == part.name
                && planned.function == call.function
                && (planned.tokens == call.tokens || planned.tokens.is_none() && call.is_default)
        };
        let Some(planned) = plan.functions.iter().find(is_of_call) else {
            checks.push(Check::unproven(name, CLAIM, "the plan says nothing of it"));
            continue;
        };
        if let Some(refused) = &planned.refused {
            checks.push(Check::of(name, CLAIM, Some(format!("it was refused: {refused}"))));
            continue;
        }
        if plan.machine.neural_engine_cores.is_none() {
            let reason = "the plan is of a machine without a Neural Engine, as virtual machines are";
            checks.push(Check::unproven(name, CLAIM, reason));
            continue;
        }
        let latency = Latency::of(planned);
        let mut census = Census::default();
        let weights = part.function(&call.function).map(WeightBytes::of).unwrap_or_default();
        census.count(&planned.operations, &weights);
        let check = placement(name.clone(), convs, &census, latency, thresholds);
        let resident = check.verdict == Verdict::Passed;
        checks.push(check);
        checks.extend(undetermined(&name, census, latency.filter(|_| resident), thresholds.shortest_ms));
        if let Some(latency) = latency.filter(|_| resident) {
            checks.push(clock(name, latency.contradiction(thresholds.shortest_ms)));
        }
    }
    let notes = thresholds.reason.iter().map(|reason| {
        format!("the manifest lets ops be elsewhere: {} instead of every op; {reason}", share_claim(thresholds))
    });
    Ok(GateReport { notes: notes.collect(), ..GateReport::new(GATE, checks) })
}

/// Percentage without rounding noise.
fn percent(share: f64) -> f64 {
    (share * 1e6).round() / 1e4
}

/// Claim if a share of the cost is required.
fn share_claim(thresholds: &ResidencyThresholds) -> String {
    let share = percent(thresholds.cost_share.unwrap_or(1.0));
    format!("at least {share} % of the planned cost is on the Neural Engine")
}

/// Problem of the plan as a whole.
fn check_plan(subject: &ResidencySubject, plan: &ComputePlan) -> Result<(), String> {
    if plan.compute_units != UNITS {
        return Err(format!("it was taken for {}, expected {UNITS}", plan.compute_units));
    }
    for listed in &plan.packages {
        let Some(part) = subject.parts.iter().find(|part| part.name == listed.package) else {
            return Err(format!("it is of another model: {} has no package {}", subject.name, listed.package));
        };
        let found = part.digest().map_err(|e| e.to_string())?;
        if found != listed.sha256 {
            return Err(format!(
                "{} is not the package that the plan was taken of: SHA-256 {found}, the plan's is {}",
                listed.package, listed.sha256
            ));
        }
    }
    let mut seen = std::collections::BTreeSet::new();
    for planned in &plan.functions {
        let FunctionPlan { package, function, tokens, .. } = planned;
        if !plan.packages.iter().any(|listed| listed.package == *package) {
            return Err(format!("it has a function of {package}, but no digest of that"));
        }
        let size = tokens.map_or_else(String::new, |tokens| format!(" for {tokens} tokens"));
        let is_known = subject.calls.iter().any(|call| {
            (&subject.part(call).name, &call.function) == (package, function)
                && (tokens.is_none() || call.tokens == *tokens)
        });
        if !is_known {
            return Err(format!("{package} has no function `{function}`{size}"));
        }
        if !seen.insert((package, function, tokens)) {
            return Err(format!("it has function `{function}` of {package}{size} twice"));
        }
    }
    Ok(())
}

/// Display name of a call: `layers_0_3, T = 1`.
fn display_name(subject: &ResidencySubject, call: &SubjectCall) -> String {
    let part = subject.part(call).name.as_str();
    let part =
        [".mlpackage", ".mlmodelc", ".mlmodel"].iter().find_map(|suffix| part.strip_suffix(suffix)).unwrap_or(part);
    let function = if call.function == "main" { String::new() } else { format!(" {}", call.function) };
    let size = call.tokens.map_or_else(String::new, |tokens| format!(", T = {tokens}"));
    format!("{part}{function}{size}")
}

/// Class of an operator for placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// Constant or compressed constant: doesn't run in a call.
    Constant,
    /// Reads a state.
    StateRead,
    /// Everything else, including unknown operators.
    Compute,
}

fn class(operator: &str) -> Class {
    match operator {
        "const" => Class::Constant,
        "read_state" => Class::StateRead,
        name if name.starts_with("constexpr_") && catalogue::first_opset(name).is_some() => Class::Constant,
        _ => Class::Compute,
    }
}

/// Statistics of a function's plan.
#[derive(Default)]
struct Census {
    compute: usize,
    resident: usize,
    convs: usize,
    /// Cost by device, `None` for undetermined ops.
    cost: BTreeMap<Option<Device>, f64>,
    misplaced: Vec<MisplacedOp>,
    /// Ops without a device in the plan.
    undetermined: Vec<MisplacedOp>,
}

impl Census {
    fn count(&mut self, operations: &[Operation], weights: &WeightBytes) {
        for op in operations {
            let operator = op.bare_operator();
            if class(operator) == Class::Compute {
                self.compute += 1;
                self.convs += usize::from(operator == "conv");
                *self.cost.entry(op.preferred).or_default() += op.cost.unwrap_or(0.0);
                if op.preferred == Some(Device::NeuralEngine) {
                    self.resident += 1;
                } else {
                    let output = op.outputs.first().cloned().unwrap_or_default();
                    let list = if op.preferred.is_none() { &mut self.undetermined } else { &mut self.misplaced };
                    list.push(MisplacedOp {
                        operator: op.operator.clone(),
                        weight_bytes: weights.behind(&output),
                        output,
                        device: op.preferred,
                        supported: op.supported.clone(),
                        cost: op.cost,
                    });
                }
            }
            op.blocks.iter().for_each(|block| self.count(block, weights));
        }
    }
}

impl Census {
    /// Share of the planned cost on a device; `None` if the plan has no costs.
    fn share(&self, device: Option<Device>) -> Option<f64> {
        let all: f64 = self.cost.values().sum();
        (all > 0.0).then(|| self.cost.get(&device).copied().unwrap_or(0.0) / all)
    }
}

/// Compute ops of a function that prefer another device than the Neural Engine.
pub fn misplaced(function: &Function, operations: &[Operation]) -> Vec<MisplacedOp> {
    let mut census = Census::default();
    census.count(operations, &WeightBytes::of(function));
    census.misplaced
}

/// Checks the placement of one function's ops.
fn placement(
    subject: String,
    convs_in_program: usize,
    census: &Census,
    latency: Option<Latency>,
    thresholds: &ResidencyThresholds,
) -> Check {
    let loosened = thresholds.reason.is_some();
    let claim = if loosened { share_claim(thresholds) } else { CLAIM.to_owned() };
    let mut problems = Vec::new();
    if census.compute == 0 {
        problems.push("the plan has no compute op".to_owned());
    } else if census.convs == 0 {
        problems.push("the plan has no conv".to_owned());
    }
    if !census.misplaced.is_empty() && !loosened {
        let (wrong, all) = (census.misplaced.len(), census.compute);
        problems.push(format!("{wrong} of {all} ops don't: {}", by_place(&census.misplaced)));
    }
    let share = census.share(Some(Device::NeuralEngine));
    if let (Some(least), Some(share)) = (thresholds.cost_share, share)
        && share < least
    {
        let places = by_place(&census.misplaced);
        let elsewhere = if places.is_empty() { String::new() } else { format!("; elsewhere are {places}") };
        problems.push(format!(
            "{:.2} % of the planned cost is there, at least {} %{elsewhere}",
            share * 100.0,
            percent(least)
        ));
    }
    let problem = (!problems.is_empty()).then(|| problems.join("; "));
    let mut check = match problem {
        None if census.convs < convs_in_program => {
            let reason = format!("the plan has {} of the {convs_in_program} convs of the program", census.convs);
            Check::unproven(subject, claim, reason)
        }
        None if thresholds.cost_share.is_some() && share.is_none() => {
            Check::unproven(subject, claim, "the plan has no costs")
        }
        None if census.resident == 0 => Check::unproven(subject, claim, "the plan names a device for no op"),
        problem => Check::of(subject, claim, problem),
    };
    let mut measured = IndexMap::from([
        ("compute_ops".to_owned(), census.compute as f64),
        ("on_neural_engine".to_owned(), census.resident as f64),
        ("convs".to_owned(), census.convs as f64),
    ]);
    if !census.undetermined.is_empty() {
        measured.insert("undetermined".into(), census.undetermined.len() as f64);
    }
    let names = [
        (Some(Device::NeuralEngine), "cost_on_neural_engine"),
        (Some(Device::Cpu), "cost_on_cpu"),
        (Some(Device::Gpu), "cost_on_gpu"),
        (Some(Device::Unknown), "cost_on_unknown_device"),
        (None, "cost_undetermined"),
    ];
    for (device, name) in names {
        let share = census.share(device).filter(|share| *share > 0.0 || device == Some(Device::NeuralEngine));
        measured.extend(share.map(|share| (name.to_owned(), share)));
    }
    if let Some(Latency { neural_engine, cpu }) = latency {
        measured.insert("milliseconds".into(), neural_engine);
        measured.insert("cpu_milliseconds".into(), cpu);
    }
    check.measured = measured;
    if loosened && check.verdict == Verdict::Passed && !census.misplaced.is_empty() {
        check.detail = Some(format!("elsewhere are {}", by_place(&census.misplaced)));
    }
    check.ops.clone_from(&census.misplaced);
    check
}

/// Check of ops without a device; `None` if there are none. It passes if all other ops are on the Neural Engine, none
/// of these has a cost, and calls are faster than on the CPU.
fn undetermined(subject: &str, census: Census, latency: Option<Latency>, shortest: f64) -> Option<Check> {
    if census.undetermined.is_empty() {
        return None;
    }
    let cost = census.share(None).unwrap_or(0.0);
    let shown = latency.filter(|latency| latency.is_telling(shortest) && latency.contradiction(shortest).is_none());
    let by_clock = match (shown, cost > 0.0) {
        (_, true) => format!("they are {:.2} % of the planned cost", cost * 100.0),
        (Some(Latency { neural_engine, cpu }), _) => {
            format!("none has a cost, and a call takes {neural_engine:.2} ms, {cpu:.2} ms on the CPU alone")
        }
        (None, _) => "none has a cost; no clock says where they run".to_owned(),
    };
    let (count, all) = (census.undetermined.len(), census.compute);
    let reason = format!("undetermined are {count} of {all} ops: {}; {by_clock}", by_place(&census.undetermined));
    let claim = "every compute op has a device in the plan";
    let mut check = Check::unproven(subject, claim, reason);
    if shown.is_some() && cost == 0.0 {
        check.verdict = Verdict::Passed;
    }
    check.ops = census.undetermined;
    Some(check)
}

/// Counts by operator and device: `2 softmax on CPU, 1 cast on no device`.
fn by_place(misplaced: &[MisplacedOp]) -> String {
    let mut places: BTreeMap<(String, &str), usize> = BTreeMap::new();
    for op in misplaced {
        let device = op.device.map_or_else(|| "no device".into(), |device| device.to_string());
        let operator = op.operator.rsplit('.').next().unwrap_or_default();
        *places.entry((device, operator)).or_default() += 1;
    }
    let texts: Vec<String> =
        places.into_iter().map(|((device, operator), count)| format!("{count} {operator} on {device}")).collect();
    texts.join(", ")
}

/// Check of a resident plan by latency.
fn clock(subject: String, contradiction: Option<String>) -> Check {
    let claim = "it is faster than on the CPU alone";
    match contradiction {
        None => Check::of(subject, claim, None),
        Some(reason) => Check::unproven(subject, claim, reason),
    }
}
