//! Consistency of a manifest. Checks that depend on the model (number of layers, longest text) are made when the
//! conversion is planned.

use std::collections::BTreeMap;

use strum::IntoEnumIterator;

use super::error::ManifestError;
use super::{
    Contexts, HeadOutputs, HeadSplit, KvWrite, Lengths, Manifest, Quant, QuantOverride, QuantPlan, ResidencyGate,
    ResidualScale, Role, StateForm, Transform, Transforms, WeightFormat,
};

/// Largest context; no published dense model has a larger one.
pub const MAX_CONTEXT: u64 = 1 << 21;
/// Largest number of tokens in one call.
pub const MAX_TOKENS: u64 = 1 << 14;

/// Most numbers of tokens in a range with `format: coreai`.
const MAX_COREAI_SIZES: u64 = 16;

/// Checks all values.
pub(super) fn check(manifest: &Manifest) -> Result<(), ManifestError> {
    name(manifest)?;
    if let Some(contract) = manifest.contract {
        contract.check(manifest)?;
    }
    context(&manifest.context)?;
    lengths(manifest)?;
    states(manifest)?;
    format(manifest)?;
    shards(manifest)?;
    lm_head(manifest)?;
    overrides("quant.overrides", &manifest.quant.overrides)?;
    for own in &manifest.quant.layers {
        let [first, end] = own.range;
        if first >= end {
            let problem = format!("[{first}, {end}], expected the first layer, then the one behind the last");
            return Err(ManifestError::value("quant.layers.range", problem));
        }
        overrides("quant.layers.overrides", &own.overrides)?;
    }
    if let Some(entry) = manifest.adapters.iter().find(|entry| !entry.scale.is_finite() || entry.scale == 0.0) {
        let problem = format!("{} for {}, expected a number that isn't 0", entry.scale, entry.path.display());
        return Err(ManifestError::value("adapters.scale", problem));
    }
    if let Some(reranker) = &manifest.reranker {
        if let Some(place) = reranker.prompt.wrong_place() {
            return Err(ManifestError::value("reranker.prompt.text", format!("it needs {place} exactly once")));
        }
        if manifest.draft.is_some() {
            return Err(ManifestError::value("draft", "there is nothing to draft for a `reranker`"));
        }
        if reranker.positive == reranker.negative {
            return Err(ManifestError::value("reranker.negative", "it is the token of `positive`, too"));
        }
    }
    plan(manifest.quant.plan)?;
    formats(&manifest.quant)?;
    transforms(&manifest.transforms)?;
    if manifest.calibration.tokens == 0 {
        return Err(ManifestError::value("calibration.tokens", "0 tokens, expected at least 1"));
    }
    residual_scale(manifest.numerics.scale)?;
    share("gates.parity.cosine", manifest.gates.parity.cosine)?;
    share("gates.parity.p1", manifest.gates.parity.p1)?;
    share("gates.parity.kl", manifest.gates.parity.kl)?;
    share("gates.parity.perplexity", manifest.gates.parity.perplexity)?;
    share("gates.parity.top1", manifest.gates.parity.top1)?;
    residency(&manifest.gates.residency)
}

/// A looser gate needs a reason and a limit.
fn residency(gate: &ResidencyGate) -> Result<(), ManifestError> {
    share("gates.residency.cost_share", gate.cost_share)?;
    match &gate.reason {
        Some(reason) if reason.trim().is_empty() => {
            Err(ManifestError::value("gates.residency.reason", "it is empty, expected why ops may be elsewhere"))
        }
        Some(_) if gate.cost_share.is_none() => {
            Err(ManifestError::value("gates.residency.reason", "a reason without a share of the cost loosens nothing")
                .advise("add `cost_share`, the smallest share of the planned cost on the Neural Engine"))
        }
        _ => Ok(()),
    }
}

/// Only projections can be quantized.
fn overrides(key: &str, overrides: &BTreeMap<Role, QuantOverride>) -> Result<(), ManifestError> {
    let never = |(role, own): &(&Role, &QuantOverride)| {
        !role.is_projection() && !matches!(own.weights, Some(WeightFormat::None))
    };
    match overrides.iter().find(never) {
        None => Ok(()),
        Some((role, _)) => {
            let problem = format!("weights of role {role} are never quantized");
            Err(ManifestError::value(&format!("{key}.{role}"), problem).advise("remove the override"))
        }
    }
}

fn plan(plan: Option<QuantPlan>) -> Result<(), ManifestError> {
    let (key, value, expected) = match plan {
        None => return Ok(()),
        Some(QuantPlan::Bits(bits)) => ("bits", bits, "bits for each weight, such as 5"),
        Some(QuantPlan::MaxMb(megabytes)) => ("max_mb", megabytes, "megabytes of weights, such as 400"),
        Some(QuantPlan::Kl(nats)) => ("kl", nats, "nats, such as 0.01"),
    };
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(ManifestError::value(&format!("quant.plan.{key}"), format!("{value}, expected {expected}")))
}

/// Checks that every role's weights can be stored in the requested format in every layer.
fn formats(quant: &Quant) -> Result<(), ManifestError> {
    for role in Role::iter() {
        let Some((key, problem, remedy)) = quant.of(role, None).problem() else { continue };
        let place =
            if quant.overrides.contains_key(&role) { format!("quant.overrides.{role}") } else { "quant".into() };
        return Err(ManifestError::value(&format!("{place}.{key}"), problem).advise(remedy));
    }
    for own in &quant.layers {
        for role in own.overrides.keys() {
            let Some((key, problem, remedy)) = quant.of(*role, Some(own.range[0])).problem() else { continue };
            let place = format!("quant.layers.overrides.{role}.{key}");
            return Err(ManifestError::value(&place, problem).advise(remedy));
        }
    }
    Ok(())
}

fn transforms(transforms: &Transforms) -> Result<(), ManifestError> {
    let Transforms::List(list) = transforms else { return Ok(()) };
    let twice = |(index, transform): &(usize, &Transform)| {
        list[..*index].iter().any(|before| before.name() == transform.name())
    };
    match list.iter().enumerate().find(twice) {
        Some((_, transform)) => {
            Err(ManifestError::value("transforms", format!("`{}` is listed twice", transform.name())))
        }
        None => Ok(()),
    }
}

/// Other factors than powers of two would round every weight; factors above 1 would only reduce the range.
fn residual_scale(scale: Option<ResidualScale>) -> Result<(), ManifestError> {
    let Some(ResidualScale::Factor(factor)) = scale else { return Ok(()) };
    if (-16..=0).any(|power| factor == 2f32.powi(power)) {
        return Ok(());
    }
    Err(ManifestError::value("numerics.scale", format!("{factor}, expected `auto` or a power of two from 2^-16 to 1"))
        .advise("0.5, 0.25, 0.125, 0.0625 … scale the residual stream without rounding"))
}

/// Checks forms that Core AI's compiler for the Neural Engine rejects (apple/coreai-torch#6), and numbers of tokens, of
/// which each needs a function.
fn format(manifest: &Manifest) -> Result<(), ManifestError> {
    if manifest.format.is_coreml() {
        return Ok(());
    }
    if manifest.kv_write == Some(KvWrite::Slice) {
        let problem = "`slice` writes at computed places, which stops Core AI's compiler for the Neural Engine";
        return Err(ManifestError::value("kv_write", problem).advise("use `kv_write: mask`, or `state: host`"));
    }
    match manifest.lengths {
        Lengths::Range([lower, upper]) if upper.saturating_sub(lower) >= MAX_COREAI_SIZES => {
            let problem = format!(
                "[{lower}, {upper}]: `format: coreai` has a function for each number of tokens, at most {MAX_COREAI_SIZES}"
            );
            Err(ManifestError::value("lengths.range", problem).advise("use `lengths: { fixed: [1, 64] }`"))
        }
        _ => Ok(()),
    }
}

fn name(manifest: &Manifest) -> Result<(), ManifestError> {
    let Some(name) = &manifest.name else { return Ok(()) };
    let fits = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.' | '+' | ' ');
    if name.is_empty() || name.starts_with('.') || !name.chars().all(fits) {
        return Err(ManifestError::value("name", format!("`{name}` can't be the name of a folder"))
            .advise("use letters, digits, `-`, `_`, `.`"));
    }
    Ok(())
}

fn context(context: &Contexts) -> Result<(), ManifestError> {
    let all = context.all();
    if let Contexts::Several(list) = context
        && let Some(twice) = all.iter().find(|n| list.iter().filter(|other| other == n).count() > 1)
    {
        return Err(ManifestError::value("context", format!("{twice} is listed twice")));
    }
    if all.is_empty() {
        return Err(ManifestError::value("context", "an empty list, expected at least one number of tokens"));
    }
    match all.iter().find(|n| !(1..=MAX_CONTEXT).contains(*n)) {
        Some(n) => Err(ManifestError::value("context", format!("{n} tokens, expected 1 to {MAX_CONTEXT}"))),
        None => Ok(()),
    }
}

fn lengths(manifest: &Manifest) -> Result<(), ManifestError> {
    let contexts = manifest.context.all();
    let smallest = contexts.first().copied().unwrap_or(1);
    let key = match &manifest.lengths {
        Lengths::Range([lower, upper]) => {
            if *lower < 1 || lower > upper {
                let problem =
                    format!("[{lower}, {upper}], expected a smallest of at least 1, then a largest not below");
                return Err(ManifestError::value("lengths.range", problem));
            }
            if manifest.kv_write == Some(KvWrite::Slice) {
                let problem =
                    "`slice` needs the number of tokens when the graph is built, `lengths.range` leaves it open";
                return Err(ManifestError::value("kv_write", problem)
                    .advise("use `kv_write: mask`, or `lengths: { fixed: [1, 64] }`"));
            }
            if contexts.len() > 1 {
                let problem = "several contexts make several functions, and Core ML doesn't load packages of several \
                               functions with a flexible dimension (`lengths.range`)";
                return Err(ManifestError::value("context", problem)
                    .advise("use `lengths: { fixed: [1, 64] }`, or convert once for each context"));
            }
            "lengths.range"
        }
        Lengths::Fixed(sizes) => {
            if sizes.is_empty() {
                let problem = "an empty list, expected at least one number of tokens";
                return Err(ManifestError::value("lengths.fixed", problem));
            }
            if sizes.contains(&0) {
                return Err(ManifestError::value("lengths.fixed", "0 tokens, expected at least 1"));
            }
            let mut sorted = sizes.clone();
            sorted.sort_unstable();
            if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
                return Err(ManifestError::value("lengths.fixed", format!("{} is listed twice", pair[0])));
            }
            "lengths.fixed"
        }
    };
    let largest = manifest.lengths.largest();
    if largest > MAX_TOKENS {
        return Err(ManifestError::value(key, format!("{largest} tokens in one call, expected at most {MAX_TOKENS}")));
    }
    if largest > smallest {
        let problem = format!("{largest} tokens in one call don't fit into a context of {smallest}");
        return Err(ManifestError::value(key, problem));
    }
    Ok(())
}

/// With `state: host` the host writes the caches, so `kv_write` has no effect.
fn states(manifest: &Manifest) -> Result<(), ManifestError> {
    if manifest.state == StateForm::Host && manifest.kv_write.is_some() {
        let problem = "with `state: host` a function writes no cache, the host appends the rows that it gives";
        return Err(ManifestError::value("kv_write", problem).advise("leave `kv_write` out"));
    }
    Ok(())
}

/// Checks the LM head: one form of the largest logits, and no pieces where one function has everything.
fn lm_head(manifest: &Manifest) -> Result<(), ManifestError> {
    let (head, shards) = (&manifest.lm_head, &manifest.shards);
    if head.split == HeadSplit::Pieces(0) {
        return Err(ManifestError::value("lm_head.split", "0 pieces, expected at least 1, auto or none"));
    }
    if head.argmax && head.top_k.is_some() {
        return Err(ManifestError::value("lm_head.top_k", "not beside `argmax`: one of them"));
    }
    if head.top_k == Some(0) {
        return Err(ManifestError::value("lm_head.top_k", "0 logits, expected at least 1"));
    }
    if manifest.contract.is_some() && (head.outputs() != HeadOutputs::default() || head.split == HeadSplit::None) {
        return Err(ManifestError::value("lm_head", "the contract asks for functions of the head that give logits"));
    }
    let several = shards.layers.as_ref().is_some_and(|ranges| ranges.len() > 1) || !shards.divide.is_none();
    if head.split == HeadSplit::None && (several || !manifest.experts.is_packed()) {
        let problem = "none, which keeps all layers in one package: not beside several ranges of `shards.layers`, \
                       `shards.divide` or experts in packages of their own";
        return Err(ManifestError::value("lm_head.split", problem));
    }
    Ok(())
}

fn shards(manifest: &Manifest) -> Result<(), ManifestError> {
    let max = manifest.shards.max_mb;
    if !max.is_finite() || max <= 0.0 {
        return Err(ManifestError::value("shards.max_mb", format!("{max}, expected a positive number of megabytes")));
    }
    if manifest.shards.max_experts == Some(0) {
        return Err(ManifestError::value("shards.max_experts", "0 experts, expected at least 1"));
    }
    if manifest.shards.max_experts.is_some() && manifest.experts.is_packed() {
        let problem = "experts in the functions of their layers are not divided";
        return Err(ManifestError::value("shards.max_experts", problem).advise("use `experts: split`"));
    }
    let Some(ranges) = &manifest.shards.layers else { return Ok(()) };
    if !manifest.shards.divide.is_none() {
        let problem = "ranges of layers, each of which `shards.divide` puts into packages of its own";
        return Err(ManifestError::value("shards.layers", problem).advise("use one of the two"));
    }
    if ranges.is_empty() {
        return Err(ManifestError::value("shards.layers", "an empty list, expected at least one range"));
    }
    let mut next = 0;
    for [first, end] in ranges {
        if first >= end {
            let problem = format!("[{first}, {end}] holds no layer, expected [first, one past the last]");
            return Err(ManifestError::value("shards.layers", problem));
        }
        if *first != next {
            let problem = format!("[{first}, {end}] follows layer {next}, expected it to begin at {next}");
            return Err(ManifestError::value("shards.layers", problem)
                .advise("ranges follow one another without gaps, from layer 0 on"));
        }
        next = *end;
    }
    Ok(())
}

fn share(key: &str, value: Option<f64>) -> Result<(), ManifestError> {
    match value {
        Some(v) if !(0.0..=1.0).contains(&v) => {
            Err(ManifestError::value(key, format!("{v}, expected a number from 0 to 1")))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use crate::{Manifest, ManifestError};
    use anec_base::Diagnostic;

    /// Manifest, key that the error must name, and a word of the message.
    const WRONG: &[(&str, &str, &str)] = &[
        ("name: ../up", "name", "folder"),
        ("name: ''", "name", "folder"),
        ("context: 0", "context", "expected 1 to"),
        ("context: []", "context", "empty"),
        ("context: 99999999", "context", "99999999"),
        ("{ context: [64, 128, 64], lengths: { fixed: [1] } }", "context", "twice"),
        ("lengths: { range: [0, 4] }", "lengths.range", "at least 1"),
        ("lengths: { range: [5, 4] }", "lengths.range", "not below"),
        ("lengths: { fixed: [] }", "lengths.fixed", "empty"),
        ("lengths: { fixed: [1, 0] }", "lengths.fixed", "at least 1"),
        ("lengths: { fixed: [4, 1, 4] }", "lengths.fixed", "twice"),
        ("{ context: 32, lengths: { fixed: [1, 64] } }", "lengths.fixed", "context of 32"),
        ("{ lengths: { range: [1, 4] }, kv_write: slice }", "kv_write", "number of tokens"),
        ("context: [64, 128]", "context", "flexible"),
        ("{ state: host, kv_write: mask }", "kv_write", "host appends"),
        ("shards: { max_mb: 0 }", "shards.max_mb", "positive"),
        ("shards: { max_mb: .nan }", "shards.max_mb", "positive"),
        ("shards: { layers: [] }", "shards.layers", "empty"),
        ("shards: { layers: [[0, 0]] }", "shards.layers", "no layer"),
        ("shards: { layers: [[0, 3], [4, 5]] }", "shards.layers", "begin at 3"),
        ("shards: { layers: [[1, 3]] }", "shards.layers", "begin at 0"),
        ("{ experts: split, shards: { max_experts: 0 } }", "shards.max_experts", "at least 1"),
        ("shards: { max_experts: 4 }", "shards.max_experts", "not divided"),
        ("shards: { divide: attention_mlp, layers: [[0, 2]] }", "shards.layers", "packages of its own"),
        ("lm_head: { split: 0 }", "lm_head.split", "at least 1"),
        ("lm_head: { argmax: true, top_k: 4 }", "lm_head.top_k", "one of them"),
        ("lm_head: { top_k: 0 }", "lm_head.top_k", "at least 1"),
        ("{ contract: coreai-llm, lm_head: { argmax: true } }", "lm_head", "logits"),
        ("{ lm_head: { split: none }, shards: { layers: [[0, 2], [2, 4]] } }", "lm_head.split", "one package"),
        ("{ lm_head: { split: none }, experts: routed }", "lm_head.split", "one package"),
        ("quant: { overrides: { norm: { weights: int8 } } }", "quant.overrides.norm", "never"),
        ("quant: { weights: palette4, granularity: per_channel }", "quant.granularity", "palette4"),
        ("quant: { weights: palette4, granularity: { group: 0 } }", "quant.granularity", "at least 1"),
        ("quant: { granularity: { group: 16 } }", "quant.granularity", "share a palette"),
        ("quant: { row_scale: true }", "quant.row_scale", "int8"),
        ("quant: { granularity: { block: 32 }, op: affine }", "quant.op", "blocks"),
        ("quant: { weights: int4, op: affine }", "quant.op", "bytes only"),
        (
            "quant: { overrides: { expert: { weights: palette2, granularity: { block: 2 } } } }",
            "quant.overrides.expert.granularity",
            "block of 2",
        ),
        ("transforms: [rotate, { rotate: { seed: 7 } }]", "transforms", "twice"),
        ("calibration: { tokens: 0 }", "calibration.tokens", "at least 1"),
        ("gates: { parity: { cosine: 1.5 } }", "gates.parity.cosine", "0 to 1"),
        ("gates: { residency: { cost_share: 99 } }", "gates.residency.cost_share", "0 to 1"),
        ("gates: { residency: { reason: index ops } }", "gates.residency.reason", "loosens nothing"),
        ("gates: { residency: { cost_share: 0.9, reason: ' ' } }", "gates.residency.reason", "empty"),
    ];

    #[test]
    fn values_that_make_no_sense_are_named() {
        for (text, key, word) in WRONG {
            let error = Manifest::from_yaml(text, "test.yaml", &[]).expect_err(text);
            let ManifestError::Value { key: found, problem, .. } = &error else { panic!("{text}: {error}") };
            assert_eq!(found, key, "{text}");
            assert!(problem.contains(word), "{text}: {problem}");
            assert_eq!(error.fault().exit_code(), 2);
        }
    }

    #[test]
    fn values_that_make_sense_pass() {
        for text in [
            "context: [64, 128]\nlengths: { fixed: [1, 64] }",
            "shards: { layers: [[0, 20], [20, 24]] }",
            "quant: { overrides: { norm: { weights: none } } }",
            "{ lengths: { fixed: [8] }, kv_write: mask }",
            "transforms: auto",
            "transforms: none",
            "transforms: []",
            "transforms: [fold, { rotate: { seed: 7 } }, equalize]",
        ] {
            Manifest::from_yaml(text, "test.yaml", &[]).expect(text);
        }
    }
}
