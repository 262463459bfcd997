//! Estimate of a conversion.

use serde_json::{Value as Json, json};

use super::conversion::stage;
use super::table::table;
use super::{bytes, counted};
use anec_bundle::TokenCount;
use anec_convert::plan::ConvertPlan;
use anec_convert::{Estimate, FormEstimate};
use anec_family::{FamilyFacts, FunctionRequest, Purpose};
use anec_manifest::builtin::Builtin;
use anec_manifest::{Manifest, Quant, Transform, WeightFormat};

/// Formats the result of `anec plan`; `forms` are the estimates of all forms of experts.
pub fn plan(
    manifest: &Manifest,
    facts: &FamilyFacts,
    plan: &ConvertPlan,
    estimate: &Estimate,
    forms: &[FormEstimate],
) -> String {
    let rows = plan.packages.iter().map(|package| {
        vec![
            format!("{}.mlpackage", package.name),
            stage(&package.stage),
            package.functions.iter().map(function).collect::<Vec<_>>().join(", "),
            bytes(package.weight_bytes),
            bytes(package.state_bytes.last().copied().unwrap_or(0)),
        ]
    });
    let table = table(&["package", "holds", "functions", ">weights", ">state"], rows);
    header(manifest, facts, plan) + &table + &totals(facts, plan, estimate) + &experts(facts, forms)
}

/// Model and form of a plan.
pub(super) fn header(manifest: &Manifest, facts: &FamilyFacts, plan: &ConvertPlan) -> String {
    let name = manifest.name.as_deref().unwrap_or("model");
    let Quant { weights, granularity, row_scale, .. } = manifest.quant;
    let quant = match (weights, row_scale) {
        (WeightFormat::None, _) => "fp16 weights".to_owned(),
        (weights, false) => format!("{weights} weights {granularity}"),
        (weights, true) => format!("{weights} weights {granularity} with row scales"),
    };
    format!(
        "{name}: {}, {} layers of {}, vocabulary {}; {quant}, context {}\n\n",
        facts.family,
        facts.num_layers,
        facts.hidden_size,
        facts.vocab_size,
        plan.contexts.iter().map(u64::to_string).collect::<Vec<_>>().join(", "),
    )
}

/// Unit of estimates and their speed: tokens of generated texts, else forward passes, whose products aren't counted.
fn units(facts: &FamilyFacts) -> [&'static str; 2] {
    match facts.purpose {
        Purpose::TextGeneration => ["token", "decode tok/s"],
        _ => ["forward pass", "forward passes/s at most"],
    }
}

/// Sizes and speed of a plan.
pub(super) fn totals(facts: &FamilyFacts, plan: &ConvertPlan, estimate: &Estimate) -> String {
    let ([slow, fast], [unit, speed]) = (estimate.tokens_per_second, units(facts));
    format!(
        "\n{}: {} of weights, {} of state\n{}\n{slow:.0} to {fast:.0} {speed} ({})\n",
        counted(plan.packages.len(), "package"),
        bytes(plan.weight_bytes()),
        bytes(plan.state_bytes()),
        streamed(estimate, unit),
        Estimate::ASSUMPTION,
    )
}

/// Weights and calls of a token or pass: as expected, and at most if that differs.
fn streamed(estimate: &Estimate, unit: &str) -> String {
    let Estimate { weight_bytes_per_token, max_weight_bytes_per_token, calls_per_token, max_calls_per_token, .. } =
        *estimate;
    let expected =
        format!("{} streamed per {unit} in {}", bytes(weight_bytes_per_token), counted(calls_per_token, "call"));
    if (weight_bytes_per_token, calls_per_token) == (max_weight_bytes_per_token, max_calls_per_token) {
        return expected;
    }
    format!("{expected}, at most {} in {max_calls_per_token}", bytes(max_weight_bytes_per_token))
}

/// Estimates of every form of experts.
fn experts(facts: &FamilyFacts, forms: &[FormEstimate]) -> String {
    if forms.is_empty() {
        return String::new();
    }
    let [unit, speed] = units(facts);
    let rows = forms.iter().map(|FormEstimate { experts, estimate }| {
        let [slow, fast] = estimate.tokens_per_second;
        vec![
            experts.to_string(),
            bytes(estimate.weight_bytes_per_token),
            bytes(estimate.max_weight_bytes_per_token),
            estimate.calls_per_token.to_string(),
            estimate.max_calls_per_token.to_string(),
            format!("{slow:.0} to {fast:.0}"),
        ]
    });
    let [streamed, speed] = [format!(">streamed per {unit}"), format!(">{speed}")];
    let names = ["experts", &streamed, ">at most", ">calls", ">at most", &speed];
    format!("\n{}", table(&names, rows))
}

/// Formats the weight transforms, with notes about those that are left out.
pub fn transforms(done: &[Transform], notes: &[String]) -> String {
    let name = |transform: &Transform| match transform.rotation() {
        Some(rotation) => format!("{} (seed {})", transform.name(), rotation.seed),
        None => transform.name().to_owned(),
    };
    let names: Vec<String> = done.iter().map(name).collect();
    let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    let mut text = format!("\ntransforms of the weights: {names}\n");
    notes.iter().for_each(|note| text.push_str(&format!("  {note}\n")));
    text
}

fn function(request: &FunctionRequest) -> String {
    match request.tokens {
        TokenCount::Range(lower, upper) => format!("{} (T = {lower}..{upper})", request.name),
        TokenCount::Fixed(count) => format!("{} (T = {count})", request.name),
    }
}

/// Formats the result of `anec plan --json`.
pub fn plan_json(
    manifest: &Manifest,
    facts: &FamilyFacts,
    plan: &ConvertPlan,
    estimate: &Estimate,
    forms: &[FormEstimate],
) -> Json {
    let packages: Vec<Json> = plan
        .packages
        .iter()
        .map(|package| {
            let functions: Vec<Json> = package
                .functions
                .iter()
                .map(|f| {
                    let tokens = match f.tokens {
                        TokenCount::Range(lower, upper) => {
                            json!({"range": [lower, upper], "default": f.default_tokens})
                        }
                        TokenCount::Fixed(count) => json!({"fixed": count}),
                    };
                    json!({"name": f.name, "context": f.context, "tokens": tokens})
                })
                .collect();
            json!({
                "package": format!("{}.mlpackage", package.name),
                "stage": package.stage,
                "functions": functions,
                "weight_bytes": package.weight_bytes,
                "state_bytes": package.state_bytes,
            })
        })
        .collect();
    let mut json = json!({
        "name": manifest.name,
        "family": facts.family,
        "num_layers": facts.num_layers,
        "hidden_size": facts.hidden_size,
        "vocab_size": facts.vocab_size,
        "contexts": plan.contexts,
        "packages": packages,
        "weight_bytes": plan.weight_bytes(),
        "state_bytes": plan.state_bytes(),
        "estimate": estimate,
        "estimate_unit": units(facts)[0],
        "estimate_assumption": Estimate::ASSUMPTION,
        "manifest": manifest,
    });
    if !forms.is_empty() {
        json["experts"] = json!(forms);
    }
    json
}

/// Formats the result of `anec manifests`.
pub fn manifests(all: &[(&Builtin, Manifest)]) -> String {
    let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".into());
    let rows = all.iter().map(|(builtin, m)| {
        let contexts = m.context.all().iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
        let doubted = builtin.doubted().collect::<Vec<_>>().join(", ");
        vec![builtin.name.to_owned(), or_dash(&m.family), or_dash(&m.source), contexts, doubted]
    });
    let table = table(&["name", "family", "source", ">context", "doubted"], rows);
    format!(
        "{table}\ndoubted: rules that advise against the default form; `anec explain RULE` shows them, `--for CHIP` avoids \
         them\n"
    )
}
