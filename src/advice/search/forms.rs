//! Forms of states and weights that rules and chips allow.

use std::collections::BTreeSet;

use strum::IntoEnumIterator;

use super::{ChoiceReason, SearchError, SearchLimits};
use crate::arithmetic::published_effects;
use crate::chips::{ChipTarget, Reading, WeightPath};
use crate::forecast::forecast;
use crate::rules::Severity;
use crate::speed::SpeedModel;
use anec_base::{Error, Result};
use anec_bundle::{Stage, TokenCount};
use anec_convert::{Workload, plan};
use anec_exec::EngineEffect;
use anec_family::{FamilyModel, FunctionRequest, LoweringOptions};
use anec_manifest::{
    ExpertsForm, Granularity, Int8Op, KvWrite, LayerDivision, Lengths, Manifest, Quant, RecurrentForm, RopeForm,
    StateForm, WeightFormat,
};
use anec_mil::Program;

/// Package size to which no rule about sizes applies.
const NEUTRAL_BYTES: u64 = 100_000_000;
/// Number of layers on which rules are tried, so that layers of every kind are included.
const SAMPLE_LAYERS: usize = 4;

/// Allowed form of weights.
#[derive(Clone, Debug)]
pub struct FormChoice {
    /// Form.
    pub quant: Quant,
    /// Reason why it is allowed.
    pub reason: String,
}

/// Remaining choices, and choices already made.
#[derive(Clone, Debug)]
pub struct Forms {
    /// Manifest with the chosen forms of states.
    pub manifest: Manifest,
    /// Allowed forms of weights.
    pub weights: Vec<FormChoice>,
    /// Reasons for the forms of states.
    pub reasons: Vec<ChoiceReason>,
}

/// Findings of the rules for a form.
struct FormFindings {
    falls: BTreeSet<String>,
    doubted: BTreeSet<String>,
    states: usize,
}

/// Chooses the form of states and lists the allowed forms of weights.
///
/// # Errors
/// If a rule expects every form to leave the Neural Engine of one of the chips.
pub fn choose(
    manifest: &Manifest,
    model: &dyn FamilyModel,
    targets: &[ChipTarget<'_>],
    limits: &SearchLimits,
) -> Result<Forms> {
    let base = Manifest { lengths: Lengths::Fixed(vec![1]), ..manifest.clone() };
    if model.facts().is_bidirectional() {
        return without_states(manifest, &base, model, targets, limits);
    }
    let recurrent: Vec<RecurrentForm> =
        if model.facts().recurrent { RecurrentForm::iter().collect() } else { vec![manifest.recurrent_states] };
    let mut judged = Vec::new();
    for state in StateForm::iter() {
        for recurrent_states in &recurrent {
            // functions don't write caches stored by the host; Core AI takes no slice writes
            let write = if manifest.format.is_coreml() { KvWrite::Slice } else { KvWrite::Mask };
            let kv_write = (state != StateForm::Host).then_some(write);
            let candidate = Manifest { state, kv_write, recurrent_states: *recurrent_states, ..base.clone() };
            // skip forms that can't express the model
            if let Ok(of) = judge(&candidate, model, targets) {
                judged.push((candidate, of));
            }
        }
    }
    let tried = judged.len();
    let most_states = targets.iter().filter_map(|target| target.chip.most_states.as_ref().map(|fact| (target, fact)));
    let most_states = most_states.min_by_key(|(_, fact)| fact.value);
    let too_many = |of: &FormFindings| most_states.is_some_and(|(_, fact)| of.states > fact.value);
    let best = judged.into_iter().min_by_key(|(_, of)| (of.falls.len(), too_many(of), of.doubted.len()));
    let Some((chosen, of)) = best else {
        return Err(SearchError::Nothing { why: "no form of states expresses the model".into() }.into());
    };
    if let Some(rule) = of.falls.first() {
        return Err(nothing(format!("rule {rule} expects the layers to leave the Neural Engine")));
    }
    let mut state =
        format!("of {tried} forms that take equal time, the one that fewest rules doubt{}", list(&of.doubted));
    if let (Some((target, fact)), true) = (most_states, too_many(&of)) {
        state += &format!(
            "; {} took {} states at most ({}), and no form has so few",
            target.chip.name, fact.value, fact.source
        );
    }
    let numbers = SpeedModel::built_in();
    let write = format!(
        "new rows only: {} passes over the caches in a call, {} with a mask",
        numbers.slice_passes, numbers.mask_passes
    );
    let mut reasons = vec![ChoiceReason { key: "state", reason: state }];
    if chosen.kv_write.is_some() {
        reasons.push(ChoiceReason { key: "kv_write", reason: write });
    }
    if model.facts().recurrent {
        let reason = "chosen together with the form of states".to_owned();
        reasons.push(ChoiceReason { key: "recurrent_states", reason });
    }
    let chosen = match rope(&chosen, &of, model, targets)? {
        Some((with_product, reason)) => {
            reasons.push(reason);
            with_product
        }
        None => chosen,
    };
    Ok(Forms { weights: weights(&chosen, model, targets, limits)?, manifest: chosen, reasons })
}

/// Lists the allowed forms of weights of a model without states.
fn without_states(
    manifest: &Manifest,
    base: &Manifest,
    model: &dyn FamilyModel,
    targets: &[ChipTarget<'_>],
    limits: &SearchLimits,
) -> Result<Forms> {
    let of = judge(base, model, targets)?;
    if let Some(rule) = of.falls.first() {
        return Err(nothing(format!("rule {rule} expects the layers to leave the Neural Engine")));
    }
    let (rope, reasons) = match rope(base, &of, model, targets)? {
        Some((with_product, reason)) => (with_product.rope, vec![reason]),
        None => (manifest.rope, Vec::new()),
    };
    let manifest = Manifest { rope, ..manifest.clone() };
    let base = Manifest { rope, ..base.clone() };
    Ok(Forms { weights: weights(&base, model, targets, limits)?, manifest, reasons })
}

/// Chooses RoPE without slices of the last axis if a target's arithmetic is published to corrupt those and no rule
/// objects. Otherwise halves stay, because no speed is published for either.
fn rope(
    chosen: &Manifest,
    halves: &FormFindings,
    model: &dyn FamilyModel,
    targets: &[ChipTarget<'_>],
) -> Result<Option<(Manifest, ChoiceReason)>> {
    let rows = published_effects();
    let row = rows.iter().find(|row| row.effect == EngineEffect::SliceGain.name());
    let concerned = row.and_then(|row| {
        let of = |target: &&ChipTarget<'_>| {
            let names = [Some(&target.chip.name), target.chip.generation.as_ref()];
            names.into_iter().flatten().any(|name| row.chips.contains(name))
        };
        Some((row, targets.iter().find(of)?))
    });
    let Some((row, target)) = concerned.filter(|_| chosen.rope.is_halves()) else { return Ok(None) };
    let with_product = Manifest { rope: RopeForm::Product, ..chosen.clone() };
    // skip forms that can't express the model
    let Ok(of) = judge(&with_product, model, targets) else { return Ok(None) };
    if of.falls.len() > halves.falls.len() || of.doubted.len() > halves.doubted.len() {
        return Ok(None);
    }
    let reason = format!("nothing is cut out of the last axis; {}: {} ({})", target.chip.name, row.says, row.source);
    Ok(Some((with_product, ChoiceReason { key: "rope", reason })))
}

fn nothing(why: String) -> Error {
    SearchError::Nothing { why }.into()
}

fn list(rules: &BTreeSet<String>) -> String {
    if rules.is_empty() {
        return String::new();
    }
    format!(" ({})", rules.iter().cloned().collect::<Vec<_>>().join(", "))
}

/// Applies the rules that concern the targets to the first layers and the head.
fn judge(manifest: &Manifest, model: &dyn FamilyModel, targets: &[ChipTarget<'_>]) -> Result<FormFindings> {
    let form = plan::form(manifest);
    let context = manifest.context.all().last().copied().unwrap_or(1);
    // division doesn't change the ops
    let form = LoweringOptions { divide: LayerDivision::None, ..form };
    let count = model.facts().num_layers.min(SAMPLE_LAYERS);
    let mut stages = match manifest.experts.is_packed() {
        true => vec![Stage::Layers { first: 0, end: count }],
        // functions end before the experts of a layer
        false => (0..count).map(|layer| Stage::Layers { first: layer, end: layer + 1 }).collect(),
    };
    let apart = |layer: usize| model.experts(layer).filter(|_| !manifest.experts.is_packed());
    stages.extend((0..count).find_map(|layer| {
        let all = apart(layer)?.count;
        let end = if manifest.experts == ExpertsForm::Routed { 1 } else { manifest.shards.max_experts.unwrap_or(all) };
        Some(Stage::Experts { layer, first: 0, end: end.min(all) })
    }));
    // embedding models have no head
    let rows = model.facts().head_rows().min(64);
    stages.extend((rows > 0).then_some(Stage::Head { first: 0, end: rows }));
    let mut judged = FormFindings { falls: BTreeSet::new(), doubted: BTreeSet::new(), states: 0 };
    for stage in stages {
        for tokens in [1, 16u64.min(context)] {
            let request = FunctionRequest {
                name: "main".into(),
                stage: stage.clone(),
                tokens: TokenCount::Fixed(tokens),
                default_tokens: tokens,
                context,
                most_tokens: tokens,
                head: manifest.lm_head.outputs(),
            };
            let function = Workload::of(model, &form, &manifest.quant, &request)?.function;
            judged.states = judged.states.max(function.states().count());
            for finding in forecast("sample", &Program::single(function), NEUTRAL_BYTES, targets) {
                match finding.severity {
                    Severity::Wrong | Severity::Falls => judged.falls.insert(finding.rule),
                    Severity::Doubtful => judged.doubted.insert(finding.rule),
                    Severity::Slow => false,
                };
            }
        }
    }
    Ok(judged)
}

/// Whether the manifest leaves the form of weights open by having the default.
fn is_open(quant: &Quant) -> bool {
    let plain = Quant::default();
    (quant.weights, quant.granularity, quant.row_scale, quant.op)
        == (plain.weights, plain.granularity, plain.row_scale, plain.op)
        && quant.layers.is_empty()
        && quant.overrides.values().all(|own| own.weights.is_none())
}

/// Compared forms of weights if the manifest leaves them open: for each number of bits the most accurate ones, with a
/// scale for each row.
fn candidates(manifest: &Manifest) -> Vec<Quant> {
    let plain = Quant { overrides: Default::default(), ..manifest.quant.clone() };
    let int8 = |op| Quant { granularity: Granularity::PerChannel, op, ..plain.clone() };
    let palette = |weights| Quant { weights, row_scale: true, ..plain.clone() };
    vec![
        int8(Int8Op::Auto),
        int8(Int8Op::Affine),
        palette(WeightFormat::Palette8),
        palette(WeightFormat::Palette6),
        palette(WeightFormat::Palette4),
        Quant { weights: WeightFormat::None, ..plain.clone() },
    ]
}

fn weights(
    manifest: &Manifest,
    model: &dyn FamilyModel,
    targets: &[ChipTarget<'_>],
    limits: &SearchLimits,
) -> Result<Vec<FormChoice>> {
    if !is_open(&manifest.quant) {
        return Ok(vec![FormChoice { quant: manifest.quant.clone(), reason: "as the manifest has it".into() }]);
    }
    let mut allowed = Vec::new();
    let mut why = format!("no form of weights has {} bits or more", limits.least_bits);
    for quant in candidates(manifest).into_iter().filter(|quant| quant.weights.bits() >= limits.least_bits) {
        let format = quant.of(anec_manifest::Role::MlpUp, None);
        let path = WeightPath::of(&format);
        let reading = |target: &&ChipTarget<'_>| target.chip.reading(path);
        if let Some(target) = targets.iter().find(|target| reading(target) == Some(Reading::Fails)) {
            why = format!("{} doesn't take {format} weights", target.chip.name);
            continue;
        }
        let judged = judge(&Manifest { quant: quant.clone(), ..manifest.clone() }, model, targets)?;
        if let Some(rule) = judged.falls.first() {
            why = format!("rule {rule} expects {format} weights to leave the Neural Engine");
            continue;
        }
        let read: Vec<String> = targets
            .iter()
            .map(|target| match reading(&target) {
                Some(reading) => format!("{reading} on {}", target.chip.name),
                None => format!("nothing published for {}", target.chip.name),
            })
            .collect();
        let reason = format!(
            "{format}: least predicted time among the forms of {} bits or more that rules allow; {}",
            limits.least_bits,
            read.join(", ")
        );
        allowed.push(FormChoice { quant, reason });
    }
    if allowed.is_empty() { Err(nothing(why)) } else { Ok(allowed) }
}
