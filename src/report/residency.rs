//! Result of the residency gate.

use super::bytes;
use super::table::table;
use anec_validate::verdict::GateReport;

/// Maximum number of listed ops per function; JSON has all.
const LISTED: usize = 12;

/// Measured shares of the planned cost, with their names.
const DEVICES: [(&str, &str); 5] = [
    ("cost_on_neural_engine", "the Neural Engine"),
    ("cost_on_cpu", "the CPU"),
    ("cost_on_gpu", "the GPU"),
    ("cost_on_unknown_device", "an unknown device"),
    ("cost_undetermined", "no device"),
];

/// Formats the placement of each function's ops, and the misplaced ops. `None` without a plan.
pub fn residency(gate: &GateReport) -> Option<String> {
    let planned: Vec<_> = gate.checks.iter().filter(|check| !check.measured.is_empty()).collect();
    if planned.is_empty() {
        return None;
    }
    let rows = planned.iter().map(|check| {
        let of = |name: &str| check.measured.get(name);
        let count = |name: &str| of(name).map_or_else(|| "-".into(), |value| format!("{value:.0}"));
        let milliseconds = |name: &str| of(name).map_or_else(|| "-".into(), |value| format!("{value:.2}"));
        let cost = of("cost_on_neural_engine").map_or_else(|| "-".into(), |share| percent(*share));
        vec![
            check.subject.clone(),
            count("compute_ops"),
            count("on_neural_engine"),
            count("convs"),
            cost,
            milliseconds("milliseconds"),
            milliseconds("cpu_milliseconds"),
            check.verdict.to_string(),
        ]
    });
    let head = [&gate.gate, ">ops", ">on Neural Engine", ">convs", ">cost there", ">ms", ">ms on CPU", "verdict"];
    let mut text = String::new();
    let plan = gate.checks.iter().find(|check| check.subject == "plan").and_then(|check| check.detail.as_deref());
    if let Some(plan) = plan {
        text.push_str(&format!("plan: {plan}\n\n"));
    }
    text.push_str(&table(&head, rows));
    for check in &planned {
        let parts: Vec<String> = DEVICES
            .iter()
            .filter_map(|(name, device)| Some(format!("{} on {device}", percent(*check.measured.get(*name)?))))
            .collect();
        // the table already shows functions with a single device
        if parts.len() > 1 {
            text.push_str(&format!("  {}: {} of the planned cost\n", check.subject, parts.join(", ")));
        }
    }
    let undetermined = gate.checks.iter().filter(|check| check.ops.iter().any(|op| op.device.is_none()));
    for check in undetermined {
        text.push_str(&format!("  {}: {}\n", check.subject, check.detail.as_deref().unwrap_or_default()));
    }

    let misplaced: Vec<Vec<String>> = planned
        .iter()
        .flat_map(|check| {
            let shown = check.ops.iter().take(LISTED).map(|op| {
                let devices: Vec<String> = op.supported.iter().map(ToString::to_string).collect();
                vec![
                    check.subject.clone(),
                    op.operator.clone(),
                    op.output.clone(),
                    op.device.map_or_else(|| "none".into(), |device| device.to_string()),
                    devices.join(", "),
                    op.cost.map_or_else(|| "-".into(), percent),
                    op.weight_bytes.map_or_else(|| "-".into(), bytes),
                ]
            });
            let more = check.ops.len().saturating_sub(LISTED);
            let rest = (more > 0).then(|| vec![check.subject.clone(), format!("and {more} more")]);
            shown.chain(rest).collect::<Vec<_>>()
        })
        .collect();
    if !misplaced.is_empty() {
        let head = ["not on the Neural Engine", "op", "result", "prefers", "could run on", ">cost", ">weights"];
        text.push_str(&format!("\n{}", table(&head, misplaced)));
    }
    Some(text)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value as Json, json};

    use anec_base::{Error, Fault};
    use anec_bundle::{Bundle, PackageEntry, TokenCount};
    use anec_coreml::plan::ComputePlan;
    use anec_runtime::fake::{self, FakeOptions};
    use anec_validate::ResidencyThresholds;
    use anec_validate::residency::{ResidencySubject, judge};
    use anec_validate::verdict::{GateReport, GatesReport, Verdict};

    /// Bundle with only the package of the hand-made plan.
    fn bundle() -> Bundle {
        let mut bundle = fake::bundle(&FakeOptions::default());
        let package = "model.mlpackage".to_owned();
        bundle.functions.truncate(1);
        bundle.functions[0].package = package.clone();
        bundle.functions[0].function = "main".into();
        bundle.functions[0].tokens = TokenCount::Range(1, 2);
        bundle.packages = vec![PackageEntry { package, compiled: None, weight_bytes: 0, files: Vec::new() }];
        bundle
    }

    /// Judges the hand-made plan after a change.
    fn try_judged(change: impl FnOnce(&mut Json)) -> Result<GateReport, Error> {
        try_judged_by(change, &ResidencyThresholds { shortest_ms: 0.5, cost_share: None, reason: None })
    }

    fn try_judged_by(change: impl FnOnce(&mut Json), thresholds: &ResidencyThresholds) -> Result<GateReport, Error> {
        let text = include_str!("../../tests/fixtures/plans/resident.json");
        let mut json: Json = serde_json::from_str(text).unwrap();
        jsonschema::validate(&anec_coreml::plan::schema(), &json).unwrap();
        change(&mut json);
        let plan: ComputePlan = serde_json::from_value(json).unwrap();
        let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/coremltools/conv_fp16"));
        let subject = ResidencySubject::of_bundle(&bundle(), folder)?;
        judge(&subject, &plan, Path::new("plan.json"), thresholds)
    }

    fn judged(change: impl FnOnce(&mut Json)) -> (Verdict, String) {
        let gate = try_judged(change).unwrap();
        let verdict = gate.verdict;
        (verdict, crate::gates(&GatesReport::new("double", vec![gate])))
    }

    /// Op of the function for one token, by the name of its result.
    fn op<'a>(plan: &'a mut Json, output: &str) -> &'a mut Json {
        let operations = plan["functions"][0]["operations"].as_array_mut().unwrap();
        operations.iter_mut().find(|op| op["outputs"][0] == output).unwrap()
    }

    #[test]
    fn a_resident_bundle_passes() {
        let (verdict, text) = judged(|_| {});
        assert_eq!(verdict, Verdict::Passed);
        insta::assert_snapshot!("resident", text);
    }

    #[test]
    fn ops_elsewhere_are_listed_with_the_weights_behind_them() {
        let (verdict, text) = judged(|plan| {
            let conv = op(plan, "var_62_cast_fp16");
            (conv["preferred"], conv["supported"]) = (json!("cpu"), json!(["cpu", "gpu"]));
            op(plan, "point_1_cast_fp16")["preferred"] = json!("gpu");
            let unplanned = op(plan, "causal");
            (unplanned["preferred"], unplanned["supported"], unplanned["cost"]) = (Json::Null, json!([]), Json::Null);
        });
        assert_eq!(verdict, Verdict::Failed);
        insta::assert_snapshot!("elsewhere", text);
    }

    /// Compute plan of the best public package (tests/fixtures/plans/qwen3_1.7b_palette6.json): counts of ops by kind
    /// and device with their total cost, for each of the two lengths.
    fn public_artefact(plan: &mut Json) {
        let text = include_str!("../../tests/fixtures/plans/qwen3_1.7b_palette6.json");
        let shape: Json = serde_json::from_str(text).unwrap();
        let mut operations = Vec::new();
        for group in shape["operations"].as_array().unwrap() {
            let count = group["count"].as_u64().unwrap();
            let cost = group["cost"].as_f64().map(|cost| cost / count as f64);
            operations.extend((0..count).map(|index| {
                let operator = group["operator"].as_str().unwrap();
                json!({
                    "operator": operator,
                    "outputs": [format!("{}_{}_{index}", operator.replace('.', "_"), group["preferred"].as_str().unwrap_or("none"))],
                    "preferred": group["preferred"],
                    "supported": group["supported"],
                    "cost": cost,
                })
            }));
        }
        for function in plan["functions"].as_array_mut().unwrap() {
            function["operations"] = json!(operations);
            function["timings"] = json!([]);
        }
    }

    #[test]
    fn a_plan_in_the_shape_of_the_best_public_artefact_fails_the_rule_and_keeps_a_share() {
        // 1166 ops on the Neural Engine, 13 index ops on the CPU, 1448 without a device
        let (verdict, text) = judged(public_artefact);
        assert_eq!(verdict, Verdict::Failed);
        assert!(text.contains("13 of 2627 ops don't: 9 add on CPU, 4 concat on CPU"), "{text}");
        assert!(text.contains("undetermined are 1448 of 2627 ops"), "{text}");
        assert!(
            text.contains("model, T = 1: 99.8 % on the Neural Engine, 0.2 % on the CPU of the planned cost"),
            "{text}"
        );
        assert!(text.contains("none has a cost; no clock says where they run"), "{text}");

        let share = |least: f64, reason: Option<&str>| ResidencyThresholds {
            shortest_ms: 0.5,
            cost_share: Some(least),
            reason: reason.map(str::to_owned),
        };
        let index_ops = Some("index arithmetic of the caches");
        // with a reason the share counts; ops without a device stay undetermined
        let gate = try_judged_by(public_artefact, &share(0.995, index_ops)).unwrap();
        let verdicts = |gate: &GateReport| gate.checks.iter().map(|check| check.verdict).collect::<Vec<_>>();
        let (passed, unproven, failed) = (Verdict::Passed, Verdict::Unproven, Verdict::Failed);
        assert_eq!(verdicts(&gate), [passed, passed, unproven, passed, unproven], "{:#?}", gate.checks);
        let report = GatesReport::new("double", vec![gate]);
        let texts =
            [crate::gates(&report), crate::markdown(&report), crate::junit(&report), crate::html(&report, None)];
        for text in texts {
            assert!(
                text.contains("at least 99.5 % of the planned cost is on the Neural Engine instead of every op"),
                "{text}"
            );
            assert!(text.contains("index arithmetic of the caches"), "{text}");
        }
        assert!(serde_json::to_string(&report).unwrap().contains("index arithmetic of the caches"));
        // share not reached
        let gate = try_judged_by(public_artefact, &share(0.9999, index_ops)).unwrap();
        assert_eq!(verdicts(&gate)[1], failed);
        let detail = gate.checks[1].detail.as_deref().unwrap();
        assert!(
            detail.starts_with("99.80 % of the planned cost is there, at least 99.99 %; elsewhere are 9 add"),
            "{detail}"
        );

        // latency decides about ops without device and cost
        let timed = |plan: &mut Json| {
            public_artefact(plan);
            for function in plan["functions"].as_array_mut().unwrap() {
                function["timings"] = json!([
                    {"compute_units": "cpu_and_neural_engine", "milliseconds": [36.0]},
                    {"compute_units": "cpu_only", "milliseconds": [48.0]},
                ]);
            }
        };
        let gate = try_judged_by(timed, &share(0.995, index_ops)).unwrap();
        assert_eq!(gate.verdict, passed);
        let said = gate.checks[2].detail.as_deref().unwrap();
        assert!(said.ends_with("none has a cost, and a call takes 36.00 ms, 48.00 ms on the CPU alone"), "{said}");
        // without a reason the share is an additional condition
        let gate = try_judged_by(|_| {}, &share(0.99, None)).unwrap();
        assert_eq!((gate.verdict, gate.notes.len()), (passed, 0));
        let costly = |plan: &mut Json| op(plan, "causal")["preferred"] = Json::Null;
        let gate = try_judged_by(costly, &share(0.99, None)).unwrap();
        assert_eq!(verdicts(&gate)[1..3], [failed, unproven]);
    }

    #[test]
    fn ops_in_nested_blocks_count() {
        let (verdict, text) = judged(|plan| {
            let inner = json!([
                {"operator": "const", "outputs": ["zero"], "preferred": null, "supported": [], "cost": null},
                {"operator": "ios18.constexpr_blockwise_shift_scale", "outputs": ["w"], "preferred": null, "supported": [], "cost": null},
                {"operator": "read_state", "outputs": ["old"], "preferred": null, "supported": [], "cost": null},
                {"operator": "write_state", "outputs": [], "preferred": "cpu", "supported": ["cpu"], "cost": 0.1},
                {"operator": "ios18.gather", "outputs": ["row"], "preferred": "cpu", "supported": ["cpu"], "cost": 0.1},
            ]);
            op(plan, "point_1_cast_fp16")["blocks"] = json!([[], inner]);
        });
        assert_eq!(verdict, Verdict::Failed);
        insta::assert_snapshot!("nested", text);
    }

    #[test]
    fn incomplete_plans_are_unproven() {
        // no functions
        let (verdict, text) = judged(|plan| plan["functions"] = json!([]));
        assert_eq!(verdict, Verdict::Unproven);
        insta::assert_snapshot!("empty", text);
        // one length missing
        let (verdict, text) = judged(|plan| {
            plan["functions"].as_array_mut().unwrap().pop();
        });
        assert_eq!(verdict, Verdict::Unproven);
        insta::assert_snapshot!("missing", text);
        // a function without ops; without convs; with some of the convs
        let (verdict, text) = judged(|plan| {
            plan["functions"][0]["operations"] = json!([]);
            let operations = plan["functions"][1]["operations"].as_array_mut().unwrap();
            operations.retain(|op| op["operator"] != "ios18.conv");
        });
        assert_eq!(verdict, Verdict::Failed);
        insta::assert_snapshot!("no_conv", text);
        let (verdict, text) = judged(|plan| {
            let operations = plan["functions"][1]["operations"].as_array_mut().unwrap();
            operations.retain(|op| op["outputs"][0] != "var_62_cast_fp16");
        });
        assert_eq!(verdict, Verdict::Unproven);
        assert!(text.contains("the plan has 3 of the 4 convs of the program"), "{text}");
        // virtual machine
        let (verdict, text) = judged(|plan| plan["machine"]["neural_engine_cores"] = Json::Null);
        assert_eq!(verdict, Verdict::Unproven);
        assert!(text.contains("the plan is of a machine without a Neural Engine"), "{text}");
    }

    #[test]
    fn latency_can_cast_doubt_on_a_plan() {
        let (verdict, text) = judged(|plan| {
            plan["functions"][1]["timings"][0]["milliseconds"] = json!([3.4, 3.6, 3.5]);
        });
        assert_eq!(verdict, Verdict::Unproven);
        insta::assert_snapshot!("suspect", text);
        // latency isn't considered for functions that fail anyway, or that weren't timed
        let (verdict, text) = judged(|plan| {
            plan["functions"][0]["timings"] = json!([]);
            plan["functions"][1]["timings"][0]["milliseconds"] = json!([3.4]);
            plan["functions"][1]["operations"][2]["preferred"] = json!("gpu");
        });
        assert_eq!((verdict, text.contains("suspect")), (Verdict::Failed, false), "{text}");
    }

    #[test]
    fn a_function_that_core_ml_refuses_fails() {
        let (verdict, text) = judged(|plan| plan["functions"][1]["refused"] = json!("error -14"));
        assert_eq!(verdict, Verdict::Failed);
        let line = "residency: model, T = 2: every compute op prefers the Neural Engine: it was refused: error -14";
        assert!(text.contains(line), "{text}");
    }

    #[test]
    fn all_ops_are_in_the_json() {
        let gate = try_judged(|plan| {
            for op in plan["functions"][0]["operations"].as_array_mut().unwrap() {
                op["preferred"] = json!("cpu");
            }
            let more: Vec<Json> = plan["functions"][0]["operations"].as_array().unwrap().clone();
            plan["functions"][0]["operations"].as_array_mut().unwrap().extend(more);
        });
        let gate = gate.unwrap();
        let text = crate::gates(&GatesReport::new("double", vec![gate.clone()]));
        assert!(text.contains("and 10 more"), "{text}");
        let json = serde_json::to_value(&gate).unwrap();
        let ops = json["checks"][1]["ops"].as_array().unwrap();
        assert_eq!(ops.len(), 22);
        let expected = json!({
            "operator": "ios18.conv",
            "output": "input_1_cast_fp16",
            "device": "cpu",
            "supported": ["cpu", "gpu", "neural_engine"],
            "cost": 0.14,
            // 20 x 12 weights and 20 biases
            "weight_bytes": 2 * (20 * 12 + 20),
        });
        assert_eq!(ops[0], expected);
    }

    #[test]
    fn plans_of_other_bundles_are_refused() {
        let refused = |change: fn(&mut Json)| {
            let error = try_judged(change).unwrap_err();
            assert_eq!((error.fault(), error.help().is_some()), (Fault::Source, true));
            error.to_string()
        };
        let text = refused(|plan| plan["packages"][0]["sha256"] = json!("ab12"));
        assert!(
            text.starts_with(
                "compute plan plan.json: model.mlpackage is not the package that the plan was taken of: SHA-256 f2a6"
            ),
            "{text}"
        );
        assert!(text.ends_with("the plan's is ab12"), "{text}");
        let text = refused(|plan| plan["packages"][0]["package"] = json!("other.mlpackage"));
        assert_eq!(text, "compute plan plan.json: it is of another model: double has no package other.mlpackage");
        let text = refused(|plan| plan["packages"] = json!([]));
        assert_eq!(text, "compute plan plan.json: it has a function of model.mlpackage, but no digest of that");
        let text = refused(|plan| plan["compute_units"] = json!("all"));
        assert_eq!(text, "compute plan plan.json: it was taken for all, expected cpu-and-neural-engine");
        let text = refused(|plan| plan["functions"][0]["tokens"] = json!(3));
        assert_eq!(text, "compute plan plan.json: model.mlpackage has no function `main` for 3 tokens");
        let text = refused(|plan| plan["functions"][0]["tokens"] = json!(2));
        assert_eq!(text, "compute plan plan.json: it has function `main` of model.mlpackage for 2 tokens twice");
    }
}
