//! Judging a plan: what it says of every function of a bundle, and what it doesn't.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use indexmap::IndexMap;
use schemars::JsonSchema;
use serde::Serialize;

use super::latency::Latency;
use super::take::{digest, lengths};
use super::weights::WeightBytes;
use super::{CLAIM, GATE, UNITS};
use crate::thresholds::ResidencyThresholds;
use crate::verdict::{Check, GateReport, Verdict};
use anec_base::Result;
use anec_bundle::{Bundle, FunctionEntry};
use anec_coreml::plan::{Device, FunctionPlan, Operation};
use anec_coreml::{ComputePlan, CoreMlError};
use anec_mil::{Function, catalogue};
use anec_package::Package;

/// An op that doesn't prefer the Neural Engine.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct MisplacedOp {
    /// The operator as Core ML names it.
    pub operator: String,
    /// The name of its result.
    pub output: String,
    /// The device that it prefers; none where Core ML plans nothing for it.
    pub device: Option<Device>,
    /// The devices that could run it.
    pub supported: Vec<Device>,
    /// Share of the function's work, as Core ML estimates it.
    pub cost: Option<f64>,
    /// Bytes of the weights that it reads, if the package has an op with this result.
    pub weight_bytes: Option<u64>,
}

/// Judges the plan of a bundle in a folder; `path` is where the plan came from.
///
/// Every function must be there at every number of tokens. In each, every compute op must prefer the Neural Engine, and
/// there must be a convolution: a plan that shows none shows nothing. Reading a state is no computing, writing one is.
///
/// # Errors
/// When the plan is of another bundle or of other bytes, contradicts itself, or was not taken for the Neural Engine.
pub fn judge(
    bundle: &Bundle,
    folder: &Path,
    plan: &ComputePlan,
    path: &Path,
    thresholds: &ResidencyThresholds,
) -> Result<GateReport> {
    let mut packages = HashMap::new();
    for entry in &bundle.packages {
        packages.insert(entry.package.as_str(), anec_package::open(&folder.join(&entry.package))?);
    }
    check_plan(bundle, plan, &packages).map_err(|problem| CoreMlError::plan(path, problem))?;
    let taken = Check {
        detail: Some(format!("{}, {}, {}", plan.machine, plan.date, plan.compute_units)),
        ..Check::of("plan", "it is of these packages", None)
    };
    let mut checks = vec![taken];
    for entry in &bundle.functions {
        let package = packages.get(entry.package.as_str());
        let Some(function) = package.and_then(|package| package.program.function(&entry.function)) else {
            let problem = Some(format!("{} has no such function", entry.package));
            checks.push(Check::of(&entry.function, "it is in its package", problem));
            continue;
        };
        let weights = WeightBytes::of(function);
        for tokens in lengths(entry.tokens) {
            let subject = subject(entry, tokens);
            let of_entry = |planned: &&FunctionPlan| {
                (&planned.package, &planned.function, planned.tokens) == (&entry.package, &entry.function, tokens)
            };
            let Some(planned) = plan.functions.iter().find(of_entry) else {
                checks.push(Check::unproven(subject, CLAIM, "the plan says nothing of it"));
                continue;
            };
            if let Some(refused) = &planned.refused {
                checks.push(Check::of(subject, CLAIM, Some(format!("it was refused: {refused}"))));
                continue;
            }
            if plan.machine.neural_engine_cores.is_none() {
                let reason = "the plan is of a machine without a Neural Engine, as virtual machines are";
                checks.push(Check::unproven(subject, CLAIM, reason));
                continue;
            }
            let latency = Latency::of(planned);
            let check = placement(subject.clone(), function, planned, &weights, latency);
            let resident = check.verdict == Verdict::Passed;
            checks.push(check);
            if let Some(latency) = latency.filter(|_| resident) {
                checks.push(clock(subject, latency.contradiction(thresholds.shortest_ms)));
            }
        }
    }
    Ok(GateReport::new(GATE, checks))
}

/// What is wrong with a plan as a whole.
fn check_plan(bundle: &Bundle, plan: &ComputePlan, packages: &HashMap<&str, Package>) -> Result<(), String> {
    if plan.compute_units != UNITS {
        return Err(format!("it was taken for {}, expected {UNITS}", plan.compute_units));
    }
    for listed in &plan.packages {
        let Some(package) = packages.get(listed.package.as_str()) else {
            return Err(format!("it is of another bundle: {} has no package {}", bundle.name, listed.package));
        };
        let found = digest(package).map_err(|e| e.to_string())?;
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
        let known = |entry: &&FunctionEntry| (&entry.package, &entry.function) == (package, function);
        let entry = bundle.functions.iter().find(known);
        if !entry.is_some_and(|entry| entry.tokens.allows(*tokens)) {
            return Err(format!("{package} has no function `{function}` for {tokens} tokens"));
        }
        if !seen.insert((package, function, tokens)) {
            return Err(format!("it has function `{function}` of {package} for {tokens} tokens twice"));
        }
    }
    Ok(())
}

/// How people call a function: `layers_0_3, T = 1`.
fn subject(entry: &FunctionEntry, tokens: u64) -> String {
    let package = entry.package.strip_suffix(".mlpackage").unwrap_or(&entry.package);
    match entry.function.as_str() {
        "main" => format!("{package}, T = {tokens}"),
        function => format!("{package} {function}, T = {tokens}"),
    }
}

/// What an operator does, for placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// A constant, or one that is expanded: nothing that runs in a call.
    Constant,
    /// Makes a state's content visible.
    StateRead,
    /// Everything else, operators that the catalogue doesn't know among it.
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

/// What a plan has of a function.
#[derive(Default)]
struct Census {
    compute: usize,
    resident: usize,
    convs: usize,
    cost: f64,
    resident_cost: f64,
    misplaced: Vec<MisplacedOp>,
}

impl Census {
    fn count(&mut self, operations: &[Operation], weights: &WeightBytes) {
        for op in operations {
            let operator = op.bare_operator();
            if class(operator) == Class::Compute {
                let cost = op.cost.unwrap_or(0.0);
                self.compute += 1;
                self.convs += usize::from(operator == "conv");
                self.cost += cost;
                if op.preferred == Some(Device::NeuralEngine) {
                    self.resident += 1;
                    self.resident_cost += cost;
                } else {
                    let output = op.outputs.first().cloned().unwrap_or_default();
                    self.misplaced.push(MisplacedOp {
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

/// The compute ops of a function that don't prefer the Neural Engine.
pub fn misplaced(function: &Function, operations: &[Operation]) -> Vec<MisplacedOp> {
    let mut census = Census::default();
    census.count(operations, &WeightBytes::of(function));
    census.misplaced
}

/// Where the ops of one function are.
fn placement(
    subject: String,
    function: &Function,
    planned: &FunctionPlan,
    weights: &WeightBytes,
    latency: Option<Latency>,
) -> Check {
    let mut census = Census::default();
    census.count(&planned.operations, weights);
    let convs_in_program = function.ops().filter(|op| op.operator == "conv").count();
    let mut problems = Vec::new();
    if census.compute == 0 {
        problems.push("the plan has no compute op".to_owned());
    } else if census.convs == 0 {
        problems.push("the plan has no conv".to_owned());
    }
    if !census.misplaced.is_empty() {
        let (wrong, all) = (census.misplaced.len(), census.compute);
        problems.push(format!("{wrong} of {all} ops don't: {}", by_place(&census.misplaced)));
    }
    let problem = (!problems.is_empty()).then(|| problems.join("; "));
    let mut check = match problem {
        None if census.convs < convs_in_program => {
            let reason = format!("the plan has {} of the {convs_in_program} convs of the program", census.convs);
            Check::unproven(subject, CLAIM, reason)
        }
        problem => Check::of(subject, CLAIM, problem),
    };
    let mut measured = IndexMap::from([
        ("compute_ops".to_owned(), census.compute as f64),
        ("on_neural_engine".to_owned(), census.resident as f64),
        ("convs".to_owned(), census.convs as f64),
    ]);
    if census.cost > 0.0 {
        measured.insert("cost_on_neural_engine".into(), census.resident_cost / census.cost);
    }
    if let Some(Latency { neural_engine, cpu }) = latency {
        measured.insert("milliseconds".into(), neural_engine);
        measured.insert("cpu_milliseconds".into(), cpu);
    }
    check.measured = measured;
    check.ops = census.misplaced;
    check
}

/// `2 softmax on CPU, 1 cast on no device`
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

/// Whether the clock agrees with a plan that has everything on the Neural Engine.
fn clock(subject: String, contradiction: Option<String>) -> Check {
    let claim = "it is faster than on the CPU alone";
    match contradiction {
        None => Check::of(subject, claim, None),
        Some(reason) => Check::unproven(subject, claim, reason),
    }
}
