//! The residency gate: every op prefers the Neural Engine.
//!
//! Only Core ML on a Mac reports where ops run (`MLComputePlan`). [`take`](mod@take) takes a plan of every function at
//! every number of tokens; [`judge`](mod@judge) judges a plan on any machine. Rules are not proof: without a plan the
//! gate is unproven.
//!
//! A plan contains preferences. [`latency`] checks them by comparing the time of calls with that on the CPU only.

pub mod judge;
pub mod latency;
pub mod subject;
pub mod take;
mod weights;

pub use judge::{judge, misplaced};
pub use subject::ResidencySubject;
pub use take::{take, time, time_directly};

use super::verdict::{Check, GateReport};
use anec_coreml::plan::ComputeUnits;

/// Name of the gate.
pub const GATE: &str = "residency";

/// Compute units for loading: if the GPU were allowed, Core ML might prefer it to the Neural Engine.
pub const UNITS: ComputeUnits = ComputeUnits::CpuAndNeuralEngine;

/// Claim about every function.
const CLAIM: &str = "every compute op prefers the Neural Engine";

/// Report of the gate without a plan.
pub fn without_plan() -> GateReport {
    let reason = "only Core ML on a Mac can tell; a plan that was taken there can be judged here";
    GateReport::new(GATE, vec![Check::unproven("bundle", CLAIM, reason)])
}

/// Report of the gate for an asset of Core AI, whose placement no plan tells.
pub fn of_asset() -> GateReport {
    let reason = "Core AI reports no placement before it compiles; on a Mac, count `*ANE_region_*` in the asset that \
                  `xcrun coreai-build compile` makes: none means GPU";
    GateReport::new(GATE, vec![Check::unproven("bundle", CLAIM, reason)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::Verdict;

    use std::path::Path;

    use crate::Thresholds;
    use crate::third_party;
    use anec_base::{Progress, Result};
    use anec_coreml::plan::{ComputePlan, Device};
    use anec_coreml::{Engine, project};
    use anec_manifest::Gates;
    use anec_package::WriteOptions;
    use anec_testing::fake::{DoubleEngine, convert_demo};

    #[test]
    fn placement_is_never_claimed_without_proof() {
        assert_eq!(without_plan().verdict, Verdict::Unproven);
    }

    fn judged(subject: &ResidencySubject, plan: &ComputePlan) -> Result<GateReport> {
        judge(subject, plan, Path::new("plan.json"), &Thresholds::of(&Gates::default()).residency)
    }

    fn verdict(subject: &ResidencySubject, plan: &ComputePlan) -> Verdict {
        judged(subject, plan).unwrap().verdict
    }

    /// Judges a model with sound, incomplete and foreign plans.
    fn check_verdicts(subject: &ResidencySubject, plan: &ComputePlan) {
        let report = judged(subject, plan).unwrap();
        assert_eq!(report.verdict, Verdict::Passed, "{:?}", report.checks);
        let mut elsewhere = plan.clone();
        let ops = &mut elsewhere.functions[0].operations;
        ops.iter_mut().find(|op| op.bare_operator() == "softmax").unwrap().preferred = Some(Device::Cpu);
        assert_eq!(verdict(subject, &elsewhere), Verdict::Failed);
        let mut undetermined = plan.clone();
        let ops = &mut undetermined.functions[0].operations;
        let op = ops.iter_mut().find(|op| op.bare_operator() == "softmax").unwrap();
        (op.preferred, op.cost) = (None, None);
        undetermined.functions[0].timings.clear();
        assert_eq!(verdict(subject, &undetermined), Verdict::Unproven);
        let empty = ComputePlan { functions: Vec::new(), ..plan.clone() };
        assert_eq!(verdict(subject, &empty), Verdict::Unproven);
        let mut other = plan.clone();
        other.packages[0].sha256 = "ab12".into();
        assert!(judged(subject, &other).unwrap_err().to_string().contains("is not the package"));
    }

    #[test]
    fn packages_are_planned_and_timed_at_three_sizes() {
        let room = tempfile::tempdir().unwrap();
        convert_demo(room.path(), &["lengths={range: [1, 6]}"]);
        let package = anec_package::open(&room.path().join("layers_0_3.mlpackage")).unwrap();
        let subject = ResidencySubject::of_package("layers_0_3.mlpackage", package);
        let sizes: Vec<Option<u64>> = subject.calls.iter().map(|call| call.tokens).collect();
        assert_eq!((sizes.first(), sizes.last()), (Some(&Some(1)), Some(&Some(6))), "{sizes:?}");
        let (engine, progress) = (DoubleEngine::new(), Progress::hidden());
        let mut plan = take(&engine, &subject, &progress).unwrap();
        time_directly(&engine, &subject, &mut plan, &progress).unwrap();
        assert!(plan.functions.iter().all(|function| function.timings.len() == 2), "{:?}", plan.functions.len());
        // the double is no faster with one than with the other
        plan.functions.iter_mut().for_each(|function| function.timings.clear());
        check_verdicts(&subject, &plan);
        let one = |tokens| plan.functions.iter().position(|function| function.tokens == tokens).unwrap();
        let mut by_default = plan.clone();
        let default = subject.calls.iter().find(|call| call.is_default).unwrap().tokens;
        by_default.functions[one(default)].tokens = None;
        assert_eq!(verdict(&subject, &by_default), Verdict::Passed);
    }

    #[test]
    fn compiled_models_are_planned_and_timed() {
        let room = tempfile::tempdir().unwrap();
        convert_demo(room.path(), &["lengths={fixed: [1]}", "kv_write=mask"]);
        let program = anec_package::open(&room.path().join("layers_0_3.mlpackage")).unwrap().program;
        let program = project(&program, &program.default_function, 1).unwrap();
        let (package, compiled) = (room.path().join("x.mlpackage"), room.path().join("x.mlmodelc"));
        anec_package::write(&program, &package, &WriteOptions::default()).unwrap();
        let engine = DoubleEngine::new();
        engine.compile(&package, &compiled).unwrap();
        let arrays = |arrays: &[anec_coreml::array::StridedArray]| -> Vec<serde_json::Value> {
            let entry = |array: &anec_coreml::array::StridedArray| {
                let kind = if array.element == anec_coreml::array::Element::I32 { "Int32" } else { "Float16" };
                let shape = format!("{:?}", array.shape);
                serde_json::json!({"name": array.name, "dataType": kind, "shape": shape, "hasShapeFlexibility": "0"})
            };
            arrays.iter().map(entry).collect()
        };
        let signature = subject::Signature::of(&program.functions[0]).unwrap();
        let states: Vec<_> = signature.states.iter().map(|name| serde_json::json!({"name": name})).collect();
        let metadata = serde_json::json!([{
            "inputSchema": arrays(&signature.inputs), "outputSchema": arrays(&signature.outputs), "stateSchema": states,
            "mlProgramOperationTypeHistogram": {"Ios18.conv": 21, "Ios18.softmax": 3},
        }]);
        std::fs::write(compiled.join("metadata.json"), metadata.to_string()).unwrap();
        let subject = ResidencySubject::of_compiled("x.mlmodelc", &compiled).unwrap();
        let progress = Progress::hidden();
        let mut plan = take(&engine, &subject, &progress).unwrap();
        time_directly(&engine, &subject, &mut plan, &progress).unwrap();
        assert_eq!(plan.functions[0].timings.len(), 2);
        plan.functions[0].timings.clear();
        check_verdicts(&subject, &plan);
        // a plan with fewer convolutions than the model has
        plan.functions[0].operations.retain(|op| op.outputs.iter().all(|output| !output.contains("q_proj")));
        assert_eq!(verdict(&subject, &plan), Verdict::Unproven);
        // functions beside the default one aren't planned
        std::fs::write(compiled.join("model.mil"), "func main<ios18>(x)\ny = conv(x = x);\nfunc other<ios18>(x)")
            .unwrap();
        let subject = ResidencySubject::of_compiled("x.mlmodelc", &compiled).unwrap();
        let plan = take(&engine, &subject, &progress).unwrap();
        assert_eq!((subject.calls.len(), plan.functions.len()), (2, 1));
        assert_eq!(verdict(&subject, &plan), Verdict::Unproven);
    }

    #[test]
    fn packages_are_run_by_core_ml() {
        let room = tempfile::tempdir().unwrap();
        convert_demo(room.path(), &["lengths={fixed: [1, 4]}", "kv_write=mask"]);
        let mut package = anec_package::open(&room.path().join("layers_0_3.mlpackage")).unwrap();
        let thresholds = Thresholds::of(&Gates::default()).numerics;
        let checks = |package: &anec_package::Package| {
            third_party::core_ml(&DoubleEngine::new(), "x", package, UNITS, &thresholds).unwrap()
        };
        let sound = checks(&package);
        assert_eq!(sound.len(), 2);
        assert!(sound.iter().all(|check| check.verdict == Verdict::Passed), "{sound:?}");
        package.path = room.path().join("refused.mlpackage");
        let mut engine = DoubleEngine::new();
        engine.refuses = Some("refused.mlpackage");
        let refused = third_party::core_ml(&engine, "x", &package, UNITS, &thresholds).unwrap();
        assert!(refused.iter().all(|check| check.verdict == Verdict::Failed), "{refused:?}");
    }
}
