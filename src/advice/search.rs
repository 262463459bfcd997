//! Search for the manifest with the least predicted time on chips.
//!
//! The search chooses the division of the layers (exactly, as a shortest path), the pieces of the LM head, numbers of
//! tokens of calls, contexts, and the forms of states and weights. Forms that rules expect to leave the Neural Engine
//! of one of the chips are excluded; of forms with equal time the one with the fewest doubtful rules is taken.
//!
//! The manifest divides layers whose experts have packages of their own, and those of models that don't generate text:
//! for these, weights, lengths and contexts are compared by the prediction of the whole manifest.

pub mod forms;
pub mod layers;
mod whole;

use serde::Serialize;

use super::chips::ChipTarget;
use super::predict::{ChipPrediction, TOKENS_PER_LOAD, predict, text};
use super::rules::{Applies, rules};
use anec_base::{Diagnostic, Error, Fault, Result};
use anec_convert::plan::ConvertPlan;
use anec_family::{FamilyModel, Purpose};
use anec_manifest::{Contexts, HeadSplit, LayerDivision, Lengths, LmHead, Manifest, Shards};

use forms::FormChoice;
use layers::{Division, LayerTable};

/// Limits of a search.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SearchLimits {
    /// Maximum weights of a package, in MB; defaults to what the rules and chips allow.
    pub max_mb: Option<f64>,
    /// Maximum memory with all functions loaded, in MB; defaults to what the chips allow.
    pub max_memory_mb: Option<f64>,
    /// Maximum seconds of the first load of all functions, by the slowest load that was seen.
    pub max_first_load: Option<f64>,
    /// Minimum bits of a weight. The search predicts speed and not the loss by fewer bits.
    pub least_bits: u32,
}

impl Default for SearchLimits {
    fn default() -> Self {
        SearchLimits { max_mb: None, max_memory_mb: None, max_first_load: None, least_bits: 8 }
    }
}

impl SearchLimits {
    /// Limits the weights of a package, in MB.
    pub fn max_mb(mut self, megabytes: impl Into<Option<f64>>) -> Self {
        self.max_mb = megabytes.into();
        self
    }

    /// Limits the memory with all functions loaded, in MB.
    pub fn max_memory_mb(mut self, megabytes: impl Into<Option<f64>>) -> Self {
        self.max_memory_mb = megabytes.into();
        self
    }

    /// Limits the seconds of the first load of all functions.
    pub fn max_first_load(mut self, seconds: impl Into<Option<f64>>) -> Self {
        self.max_first_load = seconds.into();
        self
    }

    /// Sets the minimum bits of a weight.
    pub fn least_bits(mut self, bits: u32) -> Self {
        self.least_bits = bits;
        self
    }
}

/// Result of a search, with the reason of every choice.
#[derive(Clone, Debug)]
pub struct FoundManifest {
    /// Manifest.
    pub manifest: Manifest,
    /// Choices with reasons.
    pub reasons: Vec<ChoiceReason>,
    /// Predictions for the chips.
    pub predictions: Vec<ChipPrediction>,
    /// Milliseconds per token of the compared text, as the mean of the chips.
    pub milliseconds_per_token: f64,
    /// Number of combinations whose time was computed.
    pub compared: usize,
}

/// Reason of a choice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ChoiceReason {
    /// Key of the manifest.
    pub key: &'static str,
    /// Reason.
    pub reason: String,
}

/// Reason why a search fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SearchError {
    /// No chip was given.
    #[error("a search needs a chip")]
    NoChip,
    /// Formats of weights are to be chosen by measurement.
    #[error("a search chooses formats by speed, and `quant.plan` by what they lose: only one of them can be asked for")]
    Plan,
    /// The programs are to be an asset of Core AI, about whose calls nothing is published.
    #[error("a search predicts calls of Core ML, and the manifest has `format: coreai`")]
    CoreAi,
    /// No form stays within the limits.
    #[error("no form of the model is allowed: {why}")]
    Nothing {
        /// Limit that excluded the last form.
        why: String,
    },
}

impl Diagnostic for SearchError {
    fn fault(&self) -> Fault {
        Fault::Usage
    }

    fn help(&self) -> Option<String> {
        let help = match self {
            SearchError::NoChip => "name one, for example m4-max",
            SearchError::Plan => "leave `quant.plan` out, or search with a manifest of planned formats, which stay",
            SearchError::CoreAi => {
                "search with `format: coreml`, and set `format: coreai` in the manifest that is found"
            }
            SearchError::Nothing { .. } => "raise the limits (`SearchLimits`), or name fewer chips",
        };
        Some(help.into())
    }
}

/// Sets of call sizes that are compared.
pub const LENGTHS: [&[u64]; 12] =
    [&[1], &[1, 8], &[1, 16], &[1, 32], &[1, 64], &[1, 128], &[8], &[16], &[8, 64], &[8, 128], &[16, 64], &[16, 128]];

/// Contexts that are compared for texts of up to `largest` tokens: it alone, and with a quarter and a sixteenth of it.
pub fn ladders(largest: u64) -> Vec<Vec<u64>> {
    let mut ladders = vec![vec![largest]];
    let quarter = largest / 4;
    if quarter >= 128 {
        ladders.push(vec![quarter, largest]);
    }
    if quarter / 4 >= 128 {
        ladders.push(vec![quarter / 4, quarter, largest]);
    }
    ladders
}

/// Quantity that the search minimizes: the mean over the chips of the time per token, with the first load spread over
/// many tokens.
pub fn objective(predictions: &[ChipPrediction]) -> f64 {
    let sum: f64 = predictions.iter().map(ChipPrediction::cost_per_token).sum();
    sum / predictions.len().max(1) as f64
}

/// Maximum weight bytes of a package: the user's limit, or the smallest of the chips' and rules'.
fn package_limit(targets: &[ChipTarget<'_>], limits: &SearchLimits) -> (f64, String) {
    let mut limit = (f64::INFINITY, "nothing limits a package".to_owned());
    let mut tighten = |megabytes: f64, reason: String| {
        if megabytes < limit.0 {
            limit = (megabytes, reason);
        }
    };
    for rule in rules().iter().filter(|rule| rule.severity.excludes() && rule.concerns(targets)) {
        if let Applies::Weights(pattern) = &rule.applies
            && let Some(bytes) = pattern.bytes_above
        {
            tighten(bytes as f64 / 1e6, format!("rule {}", rule.id));
        }
    }
    for target in targets {
        if let Some(fact) = &target.chip.most_package_mb {
            tighten(fact.value, format!("the largest package seen on {} ({})", target.chip.name, fact.source));
        }
    }
    if let Some(megabytes) = limits.max_mb {
        tighten(megabytes, "the given limit".into());
    }
    limit
}

/// Maximum bytes of loaded functions.
fn memory_limit(targets: &[ChipTarget<'_>], limits: &SearchLimits) -> Option<(f64, String)> {
    let facts = targets.iter().filter_map(|target| {
        let fact = target.chip.process_mb.as_ref()?;
        Some((fact.value, format!("what a process on {} may use ({})", target.chip.name, fact.source)))
    });
    let given = limits.max_memory_mb.map(|megabytes| (megabytes, "the given limit".to_owned()));
    facts.chain(given).min_by(|a, b| a.0.total_cmp(&b.0))
}

/// Finds the manifest with the least predicted time on chips. Keys that the search doesn't choose keep the values of
/// `manifest`, a resolved manifest; its largest context is the largest one used.
///
/// # Errors
/// If there is no chip, too little is published about one, or no form of the model is allowed.
pub fn search(
    manifest: &Manifest,
    model: &dyn FamilyModel,
    targets: &[ChipTarget<'_>],
    limits: &SearchLimits,
) -> Result<FoundManifest> {
    if targets.is_empty() {
        return Err(SearchError::NoChip.into());
    }
    if manifest.quant.plan.is_some() {
        return Err(SearchError::Plan.into());
    }
    if !manifest.format.is_coreml() {
        return Err(SearchError::CoreAi.into());
    }
    let forms = forms::choose(manifest, model, targets, limits)?;
    let has_experts = (0..model.facts().num_layers).any(|layer| model.experts(layer).is_some());
    let generates = matches!(model.facts().purpose, Purpose::TextGeneration);
    if !generates || has_experts && !manifest.experts.is_packed() {
        return whole::search(&forms, model, targets, limits);
    }
    let (max_mb, why_max) = package_limit(targets, limits);
    let memory = memory_limit(targets, limits);
    let largest = manifest.context.all().last().copied().unwrap_or(1);
    let ladders = ladders(largest);
    let mut table = LayerTable::of(&forms.manifest, model, &ladders, targets)?;
    let too_large = |table: &LayerTable<'_>| forms.weights.iter().all(|of| !table.fits(&of.quant, max_mb));
    // two calls never take less time than one that does both: divide layers only if necessary
    if forms.manifest.shards.divide.is_none() && too_large(&table) {
        let shards = Shards { divide: LayerDivision::AttentionMlp, layers: None, ..forms.manifest.shards.clone() };
        table = LayerTable::of(&Manifest { shards, ..forms.manifest.clone() }, model, &ladders, targets)?;
    }
    let mut best: Option<(f64, Candidate<'_>)> = None;
    let mut compared = 0;
    let mut why_not = format!("every layer is larger than {max_mb:.0} MB ({why_max})");
    for weights in &forms.weights {
        let Some(pieces) = table.head_pieces(&weights.quant, targets, max_mb) else {
            why_not = format!("a row of the LM head is larger than {max_mb:.0} MB ({why_max})");
            continue;
        };
        for lengths in table.lengths() {
            let most_tokens = lengths[lengths.len() - 1];
            for contexts in ladders.iter().filter(|contexts| contexts[0] >= most_tokens) {
                let (of_lengths, of_contexts) = (lengths.len(), contexts.len());
                let loaded = table.loaded_bytes(&weights.quant, targets, of_lengths, of_contexts);
                if let Some((most, reason)) = &memory
                    && loaded > most * 1e6
                {
                    why_not = format!("{:.0} MB of loaded weights are more than {most:.0} MB ({reason})", loaded / 1e6);
                    continue;
                }
                let first_load = table.first_load_seconds(&weights.quant, of_lengths, of_contexts);
                if let Some(most) = limits.max_first_load
                    && first_load[1] > most
                {
                    why_not = format!("the first load takes up to {:.0} s, more than {most:.0} s", first_load[1]);
                    continue;
                }
                compared += 1;
                let Some(division) = table.divide(&weights.quant, lengths, contexts, targets, max_mb) else { continue };
                let cost = division.milliseconds + (first_load[0] + first_load[1]) / 2.0 * 1e3 / TOKENS_PER_LOAD;
                if best.as_ref().is_none_or(|(least, _)| cost < least - 1e-9) {
                    best = Some((cost, Candidate { weights, lengths, contexts, pieces, loaded, first_load, division }));
                }
            }
        }
    }
    let (_, found) = best.ok_or_else(|| Error::from(SearchError::Nothing { why: why_not }))?;
    let mut reasons = forms.reasons.clone();
    reasons.extend(found.reasons(max_mb, &why_max, memory.as_ref(), &table));
    let predicted = |manifest: &Manifest| predict(manifest, model, &ConvertPlan::new(manifest, model)?, targets);
    let mut manifest = found.manifest(table.manifest(), max_mb);
    let mut predictions = predicted(&manifest)?;
    let allowed = |of: &ChipPrediction| {
        memory.as_ref().is_none_or(|(most, _)| of.all_loaded_bytes as f64 <= most * 1e6)
            && limits.max_first_load.is_none_or(|most| of.first_load_seconds[1] <= most)
    };
    if let Some(one) = found.in_one_package(&manifest)
        // too large for a package
        && let Ok(of_one) = predicted(&one)
        && objective(&of_one) < objective(&predictions)
        && of_one.iter().all(allowed)
    {
        let reason = format!(
            "layers and LM head in one package: one call for a token, {:.3} ms instead of {:.3} ms",
            objective(&of_one),
            objective(&predictions)
        );
        reasons.retain(|reason| reason.key != "lm_head");
        reasons.push(ChoiceReason { key: "lm_head", reason });
        (manifest, predictions) = (one, of_one);
    }
    let times = predictions.iter().map(ChipPrediction::milliseconds_per_token);
    let milliseconds_per_token = times.sum::<f64>() / predictions.len().max(1) as f64;
    Ok(FoundManifest { manifest, reasons, predictions, milliseconds_per_token, compared })
}

/// Combination of choices.
struct Candidate<'a> {
    weights: &'a FormChoice,
    lengths: &'static [u64],
    contexts: &'a [u64],
    pieces: u64,
    loaded: f64,
    first_load: [f64; 2],
    division: Division,
}

impl Candidate<'_> {
    fn manifest(&self, base: &Manifest, max_mb: f64) -> Manifest {
        // divided layers are separate packages
        let layers = self.division.ranges.as_ref();
        let layers = layers.map(|ranges| ranges.iter().map(|range| [range.start, range.end]).collect());
        Manifest {
            context: match self.contexts {
                [one] => Contexts::One(*one),
                several => Contexts::Several(several.to_vec()),
            },
            lengths: Lengths::Fixed(self.lengths.to_vec()),
            quant: self.weights.quant.clone(),
            shards: Shards { max_mb, layers, ..base.shards.clone() },
            lm_head: LmHead { split: HeadSplit::Pieces(self.pieces), ..base.lm_head.clone() },
            ..base.clone()
        }
    }

    /// Returns the manifest with the LM head in the package of the layers, if these are in one.
    fn in_one_package(&self, apart: &Manifest) -> Option<Manifest> {
        let is_one = self.pieces == 1 && self.division.ranges.as_ref().is_some_and(|ranges| ranges.len() == 1);
        (is_one && apart.contract.is_none()).then(|| Manifest {
            shards: Shards { layers: None, ..apart.shards.clone() },
            lm_head: LmHead { split: HeadSplit::None, ..apart.lm_head.clone() },
            ..apart.clone()
        })
    }

    fn reasons(
        &self,
        max_mb: f64,
        why_max: &str,
        memory: Option<&(f64, String)>,
        table: &LayerTable<'_>,
    ) -> Vec<ChoiceReason> {
        let reason = |key, reason| ChoiceReason { key, reason };
        let limit = memory.map_or_else(String::new, |(most, reason)| format!(" of {most:.0} MB ({reason})"));
        let [least_load, most_load] = self.first_load;
        let fits = format!(
            "; all functions take {:.0} MB{limit} and {least_load:.0} to {most_load:.0} s of first load",
            self.loaded / 1e6
        );
        let [read, written] = text(table.largest());
        let least = format!(
            "least predicted time per token of a text of {read} prompt and {written} generated tokens, with the first load \
             spread over {TOKENS_PER_LOAD} tokens"
        );
        vec![
            reason("context", format!("{least}, among {} ladders of contexts", ladders(table.largest()).len())),
            reason("lengths", format!("{least}, among {} sets of lengths{fits}", table.lengths().count())),
            reason("quant", self.weights.reason.clone()),
            reason(
                "shards",
                match &self.division.ranges {
                    Some(ranges) => format!(
                        "the shortest path through all divisions into packages of up to {max_mb:.0} MB ({why_max}): {} of them",
                        ranges.len()
                    ),
                    None => format!(
                        "a layer's attention and its feed-forward network are packages of up to {max_mb:.0} MB ({why_max}) each"
                    ),
                },
            ),
            reason(
                "lm_head",
                format!("the fewest pieces that the limit and the chips' widest channel axis allow: {}", self.pieces),
            ),
        ]
    }
}

impl FoundManifest {
    /// Formats the manifest as YAML, with each choice below its reason.
    pub fn to_yaml(&self) -> String {
        let targets: Vec<&str> = self.predictions.iter().map(|prediction| prediction.target.as_str()).collect();
        let mut text = format!(
            "# Found by a search for {}: {:.2} ms for each token, predicted and not measured ({} combinations).\n",
            targets.join(", "),
            self.milliseconds_per_token,
            self.compared
        );
        for line in self.manifest.to_yaml().lines() {
            let key = line.split(':').next().unwrap_or_default();
            for reason in self.reasons.iter().filter(|reason| reason.key == key) {
                text.push_str(&format!("# {}\n", reason.reason));
            }
            text.push_str(line);
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::path::Path;

    use super::*;
    use crate::chips::ChipTable;
    use anec_base::SplitMix64;
    use anec_convert::open::{Opened, open, resolve};
    use anec_manifest::{Granularity, KvWrite, Quant, RecurrentForm, RopeForm, StateForm, WeightFormat};

    fn targets(names: &[&str]) -> Vec<ChipTarget<'static>> {
        names.iter().map(|name| ChipTable::built_in().target(name).unwrap()).collect()
    }

    fn demo() -> (Opened, Manifest) {
        of("demo/model")
    }

    /// Opens a model of the repository.
    fn of(folder: &str) -> (Opened, Manifest) {
        let source = format!("source={}", anec_testing::root().join(folder).display());
        let manifest = Manifest::from_yaml("context: 512", "test", &[source]).unwrap();
        let opened = open(&manifest).unwrap();
        let manifest = resolve(&manifest, &opened.source, &*opened.model);
        (opened, manifest)
    }

    /// Reproducible random numbers.
    struct Numbers(SplitMix64);

    impl Numbers {
        fn below(&mut self, end: u64) -> u64 {
            self.0.bits() % end
        }

        fn one_of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
            &all[self.below(all.len() as u64) as usize]
        }
    }

    /// Random valid manifest.
    fn random(base: &Manifest, layers: usize, numbers: &mut Numbers) -> Manifest {
        let ladders = ladders(512);
        let contexts = numbers.one_of(&ladders).clone();
        let fitting: Vec<&[u64]> = LENGTHS.into_iter().filter(|l| l[l.len() - 1] <= contexts[0]).collect();
        let int8 = Quant { granularity: Granularity::PerChannel, ..Quant::default() };
        let palette = Quant { weights: WeightFormat::Palette8, row_scale: true, ..Quant::default() };
        let fp16 = Quant { weights: WeightFormat::None, ..Quant::default() };
        let mut ranges: Vec<[usize; 2]> = vec![[0, 1]];
        for layer in 1..layers {
            match numbers.below(3) {
                0 => ranges.push([layer, layer + 1]),
                _ => ranges.last_mut().unwrap()[1] = layer + 1,
            }
        }
        let state = *numbers.one_of(&[StateForm::PerLayer, StateForm::Unified, StateForm::Host]);
        let write = *numbers.one_of(&[KvWrite::Slice, KvWrite::Mask]);
        Manifest {
            context: Contexts::Several(contexts),
            lengths: Lengths::Fixed(numbers.one_of(&fitting).to_vec()),
            kv_write: (state != StateForm::Host).then_some(write),
            state,
            recurrent_states: *numbers.one_of(&[RecurrentForm::State, RecurrentForm::InputOutput]),
            rope: *numbers.one_of(&[RopeForm::Halves, RopeForm::Product]),
            quant: numbers.one_of(&[int8, palette, fp16]).clone(),
            shards: Shards { layers: Some(ranges), ..Shards::default() },
            lm_head: LmHead { split: HeadSplit::Pieces(1 + numbers.below(8)), ..LmHead::default() },
            ..base.clone()
        }
    }

    #[test]
    fn the_search_is_never_worse_than_random_manifests() {
        // attention; with recurrence; with experts: numbers of manifests, and the smallest share that random choice
        // makes worse by more than a thousandth (calls dominate the time of small models)
        for (folder, names, count, least) in [
            ("demo/model", &["m5", "a17-pro"][..], 200, 0.9),
            ("demo/model", &["m1"], 70, 0.9),
            ("demo/model", &["m4-max@26"], 70, 0.9),
            ("tests/fixtures/families/qwen3_5-default", &["m4", "m1"], 70, 0.75),
            ("tests/fixtures/families/qwen3_moe-default", &["m2-pro"], 70, 0.75),
        ] {
            let (opened, manifest) = of(folder);
            let model = &*opened.model;
            let targets = targets(names);
            let found = search(&manifest, model, &targets, &SearchLimits::default()).unwrap();
            let mut numbers = Numbers(SplitMix64::new(13));
            let (mut worse, mut tried) = (0, 0);
            while tried < count {
                let other = random(&manifest, model.facts().num_layers, &mut numbers);
                // invalid combinations are skipped
                let Ok(plan) = ConvertPlan::new(&other, model) else { continue };
                let time = objective(&predict(&other, model, &plan, &targets).unwrap());
                let best = objective(&found.predictions);
                // forms of states within 1 % of each other's time are distinguished by the rules
                let states = |of: &Manifest| (of.state, of.kv_write, of.recurrent_states);
                let even = if states(&other) == states(&found.manifest) { 1e-9 } else { 0.01 };
                assert!(best <= time * (1.0 + even), "{names:?}: {best} against {time} of {}", other.to_yaml());
                worse += i32::from(best < time * 0.999);
                tried += 1;
            }
            assert!(f64::from(worse) > f64::from(tried) * least, "{folder}: {worse} of {tried}");
        }
    }

    #[test]
    fn the_time_of_a_division_is_that_of_the_prediction_and_no_division_is_better() {
        let (opened, manifest) = demo();
        let model = &*opened.model;
        let targets = targets(&["m2", "m4"]);
        // such a small limit that a call costs less than the layers that it would contain
        let limits = SearchLimits::default().max_mb(1.7);
        let found = search(&manifest, model, &targets, &limits).unwrap();
        let time = |ranges: Vec<[usize; 2]>| {
            let shards = Shards { layers: Some(ranges), ..found.manifest.shards.clone() };
            let manifest = Manifest { shards, ..found.manifest.clone() };
            let plan = ConvertPlan::new(&manifest, model).unwrap();
            let fits = plan.packages.iter().all(|package| package.weight_bytes as f64 <= 1.7e6);
            fits.then(|| objective(&predict(&manifest, model, &plan, &targets).unwrap()))
        };
        let mut least = f64::INFINITY;
        for cuts in 0u32..1 << 5 {
            let mut ranges = vec![[0, 1]];
            for layer in 1..6 {
                match cuts >> (layer - 1) & 1 {
                    1 => ranges.push([layer, layer + 1]),
                    _ => ranges.last_mut().unwrap()[1] = layer + 1,
                }
            }
            least = time(ranges).map_or(least, |time| least.min(time));
        }
        assert!(
            (objective(&found.predictions) - least).abs() < 1e-9 * least,
            "{} {least}",
            found.milliseconds_per_token
        );
        assert!(found.predictions[0].contexts.iter().all(|context| context.decode_per_second > 0.0));
    }

    #[test]
    fn every_choice_has_its_reason_and_the_text_is_the_manifest() {
        let (opened, manifest) = demo();
        let found = search(&manifest, &*opened.model, &targets(&["m2"]), &SearchLimits::default()).unwrap();
        let text = found.to_yaml();
        assert_eq!(Manifest::from_yaml(&text, "found", &[]).unwrap(), found.manifest);
        assert_eq!(found.manifest.kv_write.is_none(), found.manifest.state == StateForm::Host);
        for key in ["context", "lengths", "state", "quant", "shards", "lm_head"] {
            assert!(found.reasons.iter().any(|reason| reason.key == key), "{key}");
            let line = text.lines().position(|line| line.starts_with(&format!("{key}:"))).unwrap();
            assert!(text.lines().nth(line - 1).unwrap().starts_with("# "), "{key}");
        }
        // M2 streams int8 of the older op only
        assert_eq!(found.manifest.quant.op, anec_manifest::Int8Op::Affine);
        assert_eq!(found.manifest.rope, RopeForm::Halves);
        // on M1, slices of the last axis are published to overflow
        let old = search(&manifest, &*opened.model, &targets(&["m2", "m1"]), &SearchLimits::default()).unwrap();
        assert_eq!(old.manifest.rope, RopeForm::Product);
        let reason = old.reasons.iter().find(|reason| reason.key == "rope").unwrap();
        assert!(reason.reason.contains("M1: a slice of the last axis"), "{}", reason.reason);
        assert!(old.to_yaml().contains("\nrope: product\n"), "{}", old.to_yaml());
        // a form set by the user stays
        let fixed = Manifest { quant: Quant { weights: WeightFormat::None, ..Quant::default() }, ..manifest };
        let found = search(&fixed, &*opened.model, &targets(&["m2"]), &SearchLimits::default()).unwrap();
        assert_eq!(found.manifest.quant, fixed.quant);
    }

    #[test]
    fn a_small_model_takes_one_call_for_a_token() {
        let (opened, manifest) = demo();
        let (model, targets) = (&*opened.model, targets(&["m4"]));
        let found = search(&manifest, model, &targets, &SearchLimits::default()).unwrap();
        assert_eq!(found.manifest.lm_head.split, HeadSplit::None);
        let plan = ConvertPlan::new(&found.manifest, model).unwrap();
        assert_eq!((plan.packages.len(), plan.of_one_token()[1].calls), (1, 1.0));
        let reason = found.reasons.iter().find(|reason| reason.key == "lm_head").unwrap();
        assert!(reason.reason.contains("one call for a token"), "{}", reason.reason);
        let lm_head = LmHead { split: HeadSplit::Pieces(1), ..LmHead::default() };
        let apart = Manifest { lm_head, ..found.manifest.clone() };
        let apart = predict(&apart, model, &ConvertPlan::new(&apart, model).unwrap(), &targets).unwrap();
        assert!(objective(&found.predictions) < objective(&apart));
        // where a package can't hold both, the head stands alone
        let limited = search(&manifest, model, &targets, &SearchLimits::default().max_mb(2.6)).unwrap();
        assert_ne!(limited.manifest.lm_head.split, HeadSplit::None);
    }

    #[test]
    fn packages_stay_below_the_limit_of_the_system() {
        let most = |target: &str| package_limit(&targets(&[target]), &SearchLimits::default());
        let (of_27, rule) = most("m2@27");
        assert_eq!((of_27, rule.as_str()), (1_073.741_824, "rule weights-above-1-gib"));
        assert_eq!(most("m2@26").0, 2000.0);
    }

    #[test]
    fn failed_searches_name_the_limit() {
        let (opened, manifest) = demo();
        let search = |names: &[&str], limits| {
            search(&manifest, &*opened.model, &targets(names), &limits).map(|_| ()).unwrap_err().to_string()
        };
        let tiny = SearchLimits::default().max_mb(0.1);
        let error = search(&["m4"], tiny);
        assert!(error.contains("every layer is larger than 0 MB (the given limit)"), "{error}");
        let little = SearchLimits::default().max_memory_mb(1.0);
        let error = search(&["m4"], little);
        assert!(error.contains("are more than 1 MB (the given limit)"), "{error}");
        let error = search(&["m4"], SearchLimits::default().max_first_load(1e-6));
        assert!(error.contains("the first load takes up to") && error.contains("more than 0 s"), "{error}");
        assert_eq!(search(&[], SearchLimits::default()), "a search needs a chip");
        assert!(search(&["a14"], SearchLimits::default()).starts_with("the speed of A14 can't be predicted"));
        let plan = Some(anec_manifest::QuantPlan::Bits(5.0));
        let planned = Manifest { quant: Quant { plan, ..manifest.quant.clone() }, ..manifest.clone() };
        let error = super::search(&planned, &*opened.model, &targets(&["m5"]), &SearchLimits::default()).unwrap_err();
        assert!(error.to_string().contains("only one of them can be asked for"), "{error}");
    }

    /// Opens a model of the fixtures with a manifest.
    fn fixture(folder: &str, text: &str) -> (Opened, Manifest) {
        let source = format!("source={}", anec_testing::root().join("tests/fixtures").join(folder).display());
        let manifest = Manifest::from_yaml(text, "test", &[source]).unwrap();
        let opened = open(&manifest).unwrap();
        let manifest = resolve(&manifest, &opened.source, &*opened.model);
        (opened, manifest)
    }

    const WHOLE: [(&str, &str); 6] = [
        ("families/qwen3_moe-default", "{ context: 512, experts: split, shards: { max_experts: 2 } }"),
        ("families/zaya-default", "{ context: 512, experts: routed }"),
        ("families/privacy_filter-default", ""),
        ("encoders/bert-reranker", ""),
        ("encoders/embeddinggemma", ""),
        ("encoders/qwen3-embedding", "context: 64"),
    ];

    #[test]
    fn separate_experts_classifiers_and_encoders_are_searched() {
        for (folder, text) in WHOLE {
            let (opened, manifest) = fixture(folder, text);
            let (model, targets) = (&*opened.model, targets(&["m4-max", "m2@27"]));
            let found = search(&manifest, model, &targets, &SearchLimits::default())
                .unwrap_or_else(|error| panic!("{folder}: {error}"));
            assert_eq!(Manifest::from_yaml(&found.to_yaml(), "found", &[]).unwrap(), found.manifest, "{folder}");
            assert_eq!(found.manifest.experts, manifest.experts);
            let reason = |key: &str| found.reasons.iter().find(|reason| reason.key == key).unwrap().reason.clone();
            assert!(reason("lengths").contains(" s of first load") && reason("lengths").contains(" MB"), "{folder}");
            assert!(!reason("quant").is_empty() && !reason("shards").is_empty());
            // no other lengths of the same form take less time
            let Lengths::Fixed(own) = &found.manifest.lengths else { panic!("{folder}") };
            let best = objective(&found.predictions);
            let largest = own[own.len() - 1];
            for lengths in [vec![largest], vec![1.max(largest / 8), largest], vec![1.max(largest / 2), largest]] {
                let other = Manifest { lengths: Lengths::Fixed(lengths), ..found.manifest.clone() };
                let Ok(plan) = ConvertPlan::new(&other, model) else { continue };
                let of_other = objective(&predict(&other, model, &plan, &targets).unwrap());
                // few sizes are compared, and none of them is much worse than one between them
                assert!(best <= of_other * 1.05, "{folder}: {best} against {of_other} of {:?}", other.lengths);
            }
            // each limit bounds what is found, or is named
            let first = |of: &FoundManifest| of.predictions.iter().map(|p| p.first_load_seconds[1]).fold(0.0, f64::max);
            let memory = |of: &FoundManifest| of.predictions.iter().map(|p| p.all_loaded_bytes).max().unwrap() as f64;
            for share in [0.7, 1e-9] {
                let load = SearchLimits::default().max_first_load(first(&found) * share);
                match search(&manifest, model, &targets, &load) {
                    Ok(limited) => assert!(share > 0.1 && first(&limited) <= first(&found) * share, "{folder}"),
                    Err(error) => {
                        assert!(error.to_string().contains("the first load takes up to"), "{folder}: {error}")
                    }
                }
                let room = SearchLimits::default().max_memory_mb(memory(&found) / 1e6 * share);
                match search(&manifest, model, &targets, &room) {
                    Ok(limited) => assert!(share > 0.1 && memory(&limited) <= memory(&found) * share, "{folder}"),
                    Err(error) => {
                        assert!(error.to_string().contains("of loaded weights are more"), "{folder}: {error}")
                    }
                }
            }
        }
    }

    #[test]
    fn layers_are_divided_where_a_package_cant_hold_them() {
        let (opened, manifest) = demo();
        let model = &*opened.model;
        let limits = SearchLimits::default().max_mb(0.45);
        let found = search(&manifest, model, &targets(&["m4"]), &limits).unwrap();
        assert_eq!(found.manifest.shards.divide, LayerDivision::AttentionMlp);
        let plan = ConvertPlan::new(&found.manifest, model).unwrap();
        assert!(plan.packages.iter().all(|package| package.weight_bytes as f64 <= 0.45e6));
        let whole = search(&manifest, model, &targets(&["m4"]), &SearchLimits::default()).unwrap();
        assert!(whole.manifest.shards.divide.is_none());
        assert!(whole.milliseconds_per_token < found.milliseconds_per_token);
        // the compared time is the predicted time
        let divided =
            Manifest { shards: Shards { max_mb: 250.0, ..found.manifest.shards.clone() }, ..manifest.clone() };
        let asked = search(&divided, model, &targets(&["m4"]), &SearchLimits::default()).unwrap();
        assert_eq!(asked.manifest.shards.divide, LayerDivision::AttentionMlp);
        assert!(asked.milliseconds_per_token <= found.milliseconds_per_token);
        assert_eq!(Manifest::from_yaml(&found.to_yaml(), "found", &[]).unwrap(), found.manifest);
    }

    /// Model with Qwen3 8B's dimensions whose weights are a sparse file.
    fn large(folder: &Path) {
        let (hidden, ff, vocab) = (4096u64, 12288u64, 151_936u64);
        let config = serde_json::json!({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": ff,
            "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": vocab, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
            "tie_word_embeddings": false, "hidden_act": "silu", "attention_bias": false, "torch_dtype": "bfloat16",
        });
        std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
        let mut tensors: Vec<(String, Vec<u64>)> = vec![
            ("model.embed_tokens.weight".into(), vec![vocab, hidden]),
            ("model.norm.weight".into(), vec![hidden]),
            ("lm_head.weight".into(), vec![vocab, hidden]),
        ];
        for layer in 0..36 {
            for (name, shape) in [
                ("input_layernorm", vec![hidden]),
                ("post_attention_layernorm", vec![hidden]),
                ("self_attn.q_norm", vec![128]),
                ("self_attn.k_norm", vec![128]),
                ("self_attn.q_proj", vec![4096, hidden]),
                ("self_attn.k_proj", vec![1024, hidden]),
                ("self_attn.v_proj", vec![1024, hidden]),
                ("self_attn.o_proj", vec![hidden, 4096]),
                ("mlp.gate_proj", vec![ff, hidden]),
                ("mlp.up_proj", vec![ff, hidden]),
                ("mlp.down_proj", vec![hidden, ff]),
            ] {
                tensors.push((format!("model.layers.{layer}.{name}.weight"), shape));
            }
        }
        let mut at = 0;
        let mut header = serde_json::Map::new();
        for (name, shape) in tensors {
            let end = at + 2 * shape.iter().product::<u64>();
            header.insert(name, serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}));
            at = end;
        }
        let header = serde_json::to_vec(&header).unwrap();
        let mut file = File::create(folder.join("model.safetensors")).unwrap();
        file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
        file.write_all(&header).unwrap();
        file.set_len(8 + header.len() as u64 + at).unwrap();
    }

    #[test]
    fn eight_billion_weights_take_seconds() {
        let room = tempfile::tempdir().unwrap();
        large(room.path());
        let source = format!("source={}", room.path().display());
        let manifest = Manifest::from_yaml("context: 4096", "test", &[source]).unwrap();
        let opened = open(&manifest).unwrap();
        let manifest = resolve(&manifest, &opened.source, &*opened.model);
        let begin = std::time::Instant::now();
        let limits = SearchLimits::default().max_mb(1000.0);
        let found = search(&manifest, &*opened.model, &targets(&["m5-max", "m4-max"]), &limits).unwrap();
        let seconds = begin.elapsed().as_secs_f64();
        // takes some seconds; the limit allows for a loaded machine
        assert!(seconds < 60.0, "{seconds} s");
        eprintln!("8B: {seconds:.1} s, {} combinations", found.compared);
        let ranges = found.manifest.shards.layers.as_ref().unwrap();
        // 193 MB per layer in 8 bits: five fit
        assert!(ranges.iter().all(|[first, end]| end - first <= 5) && ranges.len() == 8, "{ranges:?}");
        let [m5, m4] = &found.predictions[..] else { panic!() };
        let written = |prediction: &ChipPrediction| prediction.contexts.last().unwrap().decode_per_second;
        assert!(written(m5) > written(m4) && (5.0..20.0).contains(&written(m4)), "{}", written(m4));
    }
}
