//! Notes about a successful conversion: one sentence each.

use super::plan::ConvertPlan;
use super::report::{ConvertReport, QualityReport, TensorReport};
use anec_base::Error;
use anec_bundle::{Bundle, Task, WHOLE_TEXT};
use anec_family::{FamilyModel, MASKED_TOKEN_HEAD};
use anec_manifest::{Feedback, Granularity, Manifest, Quant, Role, Transform, Transforms, WeightFormat};
use anec_source::{Description, Source};
use serde_json::Value as Json;

/// Relative rms error of an 8-bit weight that causes a note. Weights without outliers lose about 1 % at any
/// granularity; ten times that means that outliers determine the scale. The limit doubles for every two bits less.
pub const NOTABLE_LOSS: f64 = 0.1;

/// Maximum number of weights that a note names.
const NAMED: usize = 3;

/// Notes on unusual settings of a plan.
pub fn of_plan(plan: &ConvertPlan, model: &dyn FamilyModel) -> Vec<String> {
    let longest = model.facts().max_position_embeddings;
    let over = plan.contexts.iter().filter(|context| **context > longest);
    let over = over
        .map(|context| format!("context {context} is longer than the {longest} tokens that the model was made for"));
    over.chain(short_windows(plan, model)).collect()
}

/// Note on the size of the draft layer.
pub fn of_draft(plan: &ConvertPlan) -> Option<String> {
    let draft = plan.draft.as_ref()?;
    let megabytes = draft.packages.iter().map(|package| package.weight_bytes).sum::<u64>() as f64 / 1e6;
    let (count, s) = (draft.packages.len(), if draft.packages.len() == 1 { "" } else { "s" });
    Some(format!("`draft`: {count} additional package{s}, {megabytes:.1} MB of weights; the LM head is shared"))
}

/// Notes on requested transforms that were not applied, and on roles whose granularity differs from `asked`.
pub fn of_transforms(asked: &Manifest, resolved: &Manifest, model: &dyn FamilyModel) -> Vec<String> {
    let wanted = match &asked.transforms {
        Transforms::List(list) => list.clone(),
        // what most families support
        Transforms::Auto if !model.transformed().done.is_empty() => vec![Transform::Rotate],
        Transforms::Auto | Transforms::None => Vec::new(),
    };
    let refused = |transform: &Transform| Some((transform.name(), model.permits(*transform).err()?));
    let refused = wanted.iter().filter_map(refused).map(|(name, reason)| format!("`{name}` isn't done: {reason}"));
    let mut notes: Vec<String> = refused.chain(model.transformed().left_out).collect();
    if asked.quant.plan.is_some() {
        notes.push("`quant.plan`: formats are chosen by measurement during the conversion".to_owned());
    }
    let other = |role: &&Role| asked.quant.of(**role, None) != resolved.quant.of(**role, None);
    let roles: Vec<String> = Role::PROJECTIONS.iter().filter(other).map(|role| format!("`{role}`")).collect();
    if !roles.is_empty() {
        notes.push(format!(
            "{} got a scale for each channel: their rows feed norms or are logits, which no transform can get around; \
             `transforms: none`, or `quant.overrides`, says otherwise",
            roles.join(", ")
        ));
    }
    notes
}

/// Note on calls of a token classifier that are no longer than the window of its layers on both sides.
fn short_windows(plan: &ConvertPlan, model: &dyn FamilyModel) -> Option<String> {
    let band = Some(model.facts().label_set()?.band).filter(|band| *band != WHOLE_TEXT)?;
    let functions = plan.packages.iter().flat_map(|package| &package.functions);
    let window = functions.map(|function| function.most_tokens).max()?;
    let seen = 2 * plan.most_layers() * band;
    (window <= seen).then(|| {
        format!(
            "calls of up to {window} tokens label no longer text than that: its layers see {seen} tokens around a \
             window; `lengths: {{ range: [1, {}] }}` or more takes texts of any length",
            2 * seen
        )
    })
}

/// Notes on settings without effect, on a head that is left out, and on a missing end-of-text token.
pub fn of_source(manifest: &Manifest, source: &Source, bundle: &Bundle) -> Vec<String> {
    let mut notes = Vec::new();
    let has_experts =
        ["experts", "num_experts"].iter().any(|key| bundle.config.get(*key).is_some_and(|value| !value.is_null()));
    let asked = [
        ("experts", !manifest.experts.is_packed()),
        ("quant.overrides.expert", manifest.quant.overrides.contains_key(&Role::Expert)),
    ];
    for (key, _) in asked.iter().filter(|(_, asked)| *asked && !has_experts) {
        notes.push(format!("`{key}` has no effect: the model has no experts"));
    }
    let config = match source.description() {
        Description::HuggingFace(files) => files.config.as_ref(),
        _ => None,
    };
    for key in manifest.acknowledge.iter().filter(|key| config.is_some_and(|config| !has_key(config, key))) {
        notes.push(format!("`acknowledge` names `{key}`, which the configuration doesn't have"));
    }
    let tokenizer = bundle.tokenizer.contains_key("tokenizer");
    if tokenizer && bundle.model.task == Task::TextGeneration && bundle.model.eos_token_ids.is_empty() {
        notes
            .push("the source names no end-of-text token; generation stops at the maximum number of tokens".to_owned());
    }
    if bundle.ledger.ignored.values().any(|reason| reason == MASKED_TOKEN_HEAD) {
        notes.push(
            "the head for masked tokens is left out: the bundle gives hidden states and their pooled vector, not sparse \
             vectors of the vocabulary (SPLADE)"
                .to_owned(),
        );
    }
    notes
}

/// Returns whether a configuration has a key at any depth; of a path of keys, the last one counts.
fn has_key(json: &Json, key: &str) -> bool {
    let name = key.rsplit('.').next().unwrap_or(key);
    match json {
        Json::Object(map) => map.contains_key(name) || map.values().any(|value| has_key(value, key)),
        Json::Array(list) => list.iter().any(|value| has_key(value, key)),
        _ => false,
    }
}

/// Note on integers of the source: how many weights keep them, or how they would be kept.
pub fn of_integers(report: &ConvertReport, source: &Source) -> Option<String> {
    let quantized: Vec<&TensorReport> = report
        .packages
        .iter()
        .flat_map(|package| &package.tensors)
        .filter(|tensor| tensor.weights != WeightFormat::None)
        .collect();
    let kept = quantized.iter().filter(|tensor| tensor.kept).count();
    if kept > 0 {
        let all = quantized.len();
        return Some(format!(
            "{kept} of {all} quantized weights keep the source's integers, with its scales and zero points"
        ));
    }
    let of_source = |tensor: &&TensorReport| source.tensor(tensor.tensors.first()?);
    let (tensor, (values, block)) =
        quantized.iter().filter_map(of_source).find_map(|tensor| Some((tensor, tensor.integer_blocks()?)))?;
    let weights = if values <= 16 { WeightFormat::Int4 } else { WeightFormat::Int8 };
    let granularity = if block == tensor.columns() { "per_channel".into() } else { format!("{{ block: {block} }}") };
    Some(format!(
        "the source's weights are integers with a scale {}, which were rounded anew; `quant.weights: {weights}`, \
         `quant.granularity: {granularity}` and `transforms: none` keep them",
        if block == tensor.columns() { "for each row".into() } else { format!("for each {block} columns") }
    ))
}

/// Note on large quantization errors, with the remedy.
pub fn of_losses(report: &ConvertReport) -> Option<String> {
    let loss = |tensor: &TensorReport| tensor.loss.map_or(0.0, |loss| loss.relative_rms_error);
    let notable = |tensor: &TensorReport| NOTABLE_LOSS * 2f64.powf(4.0 - f64::from(tensor.weights.bits()) / 2.0);
    let worst: Vec<&TensorReport> =
        report.worst().into_iter().filter(|tensor| loss(tensor) > notable(tensor)).collect();
    let (first, count) = (worst.first()?, worst.len());
    let named: Vec<String> =
        worst.iter().take(NAMED).map(|tensor| format!("{} ({:.0} %)", tensor.name, 100.0 * loss(tensor))).collect();
    let more = if count > NAMED { format!(" and {} more", count - NAMED) } else { String::new() };
    let remedy = match (first.weights, first.granularity) {
        (WeightFormat::Int8, Some(Granularity::PerTensor)) => "quant.granularity: per_channel",
        (WeightFormat::Int8, _) => "quant.weights: none",
        (WeightFormat::Int4, Some(Granularity::Block(_))) => "quant.weights: int8",
        (WeightFormat::Int4, _) => "quant.granularity: {block: 32}",
        (_, Some(Granularity::PerTensor)) if !first.row_scale => "quant.row_scale: true",
        (WeightFormat::Palette8, _) => "quant.weights: none",
        _ => "quant.weights: palette8",
    };
    let named = named.join(", ");
    Some(format!("large quantization error (relative rms) of {named}{more}; `{remedy}` reduces it"))
}

/// Note on a converted model whose logits differ too much from those of the source's own weights.
pub fn of_quality(quality: &QualityReport, quant: &Quant) -> Option<String> {
    let remedy = match quant.feedback {
        None | Some(Feedback::None) => {
            "`quant.feedback: gptq`, finer scales (`quant.granularity`) or more bits (`quant.weights`)"
        }
        Some(Feedback::Gptq) => {
            "finer scales (`quant.granularity`), more bits (`quant.weights`) or fp16 for some roles (`quant.overrides`)"
        }
    };
    let missed = quality.missed.join(", ");
    (!quality.missed.is_empty()).then(|| format!("the parity gate would fail: {missed}; {remedy} lose less"))
}

/// Note on a model whose codes were chosen by error feedback because rounding them loses too much.
pub fn of_chosen_feedback(rounded: &QualityReport) -> String {
    let missed = rounded.missed.join(", ");
    format!(
        "with rounded weights the parity gate would fail ({missed}), so their codes are chosen by `quant.feedback: gptq`; \
         `quant.feedback: none` keeps them rounded"
    )
}

/// Note on a model that loses too much with rounded weights, and whose codes can't be chosen by error feedback.
pub fn of_rounded_codes(problem: &Error) -> String {
    format!("`quant.feedback: gptq` was tried because of that gate, without success: {problem}")
}

/// Note on roles that stay in fp16 because 8-bit integers lose too much.
pub fn of_roles_in_fp16(lost: &QualityReport, roles: &[Role]) -> String {
    let names: Vec<String> = roles.iter().map(|role| format!("`{role}`")).collect();
    let (names, missed) = (names.join(", "), lost.missed.join(", "));
    format!(
        "with all roles in int8 the parity gate would fail ({missed}), so {names} {} in fp16, which lose most; \
         `quant.feedback: gptq` or `none` keeps them quantized",
        if roles.len() == 1 { "is" } else { "are" }
    )
}

/// Note on a model that loses too much, and of which it is unknown which roles lose most.
pub fn of_unknown_losses(problem: &Error) -> String {
    format!("which roles need fp16 because of that gate was not found: {problem}")
}

/// Note on a tokenizer that the runtime can't read.
pub fn of_tokenizer(problem: &str) -> String {
    format!("the runtime can't use this tokenizer, so the bundle takes token ids only: {problem}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{PackageReport, RunReport};
    use anec_quant::Loss;

    fn report(losses: &[f64], granularity: Granularity) -> ConvertReport {
        let tensor = |(index, loss): (usize, &f64)| TensorReport {
            name: format!("w{index}"),
            tensors: vec![],
            role: Role::MlpDown,
            shape: vec![],
            weights: WeightFormat::Int8,
            granularity: Some(granularity),
            row_scale: false,
            kept: false,
            bytes: 0,
            bits_per_weight: 8.0,
            loss: Some(Loss { relative_rms_error: *loss, cosine: 1.0, largest: 1.0, saturated: 0, vanished: 0 }),
        };
        let tensors = losses.iter().enumerate().map(tensor).collect();
        let package = PackageReport { package: "p".into(), weight_bytes: 0, seconds: 0.0, tensors };
        let (run, notes) = (RunReport::default(), vec![]);
        let (anec_version, name) = Default::default();
        ConvertReport {
            anec_version,
            name,
            run,
            packages: vec![package],
            notes,
            calibration: None,
            quality: None,
            plan: None,
        }
    }

    #[test]
    fn the_worst_weights_are_named_with_the_remedy() {
        assert_eq!(of_losses(&report(&[0.01, 0.1], Granularity::PerTensor)), None);
        assert_eq!(
            of_losses(&report(&[0.01, 0.2, 0.87], Granularity::PerTensor)).unwrap(),
            "large quantization error (relative rms) of w2 (87 %), w1 (20 %); `quant.granularity: per_channel` reduces it"
        );
        let note = of_losses(&report(&[0.5, 0.2, 0.3, 0.4, 0.6], Granularity::PerChannel)).unwrap();
        assert!(note.contains("w4 (60 %), w0 (50 %), w3 (40 %) and 2 more; `quant.weights: none`"), "{note}");
    }
}
