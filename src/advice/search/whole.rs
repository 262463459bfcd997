//! Search by predictions of whole manifests: for models whose layers are not all of a division, because experts have
//! packages of their own, and for models that don't generate text.
//!
//! The manifest divides layers and experts; the search chooses weights, lengths and contexts, one key after another,
//! until none improves the prediction.

use std::collections::BTreeSet;

use super::forms::{FormChoice, Forms};
use super::{
    ChoiceReason, FoundManifest, LENGTHS, SearchError, SearchLimits, ladders, memory_limit, objective, package_limit,
};
use crate::chips::ChipTarget;
use crate::predict::{ChipPrediction, TEXT, TEXTS, TOKENS_PER_LOAD, predict};
use crate::rules::{Applies, rules};
use anec_base::{Error, Result};
use anec_convert::plan::ConvertPlan;
use anec_family::{FamilyModel, Purpose};
use anec_manifest::{Contexts, HeadSplit, Lengths, LmHead, Manifest, Shards};

/// Sizes of calls that are compared beside the largest, for models that don't generate text.
const CALLS: [u64; 4] = [32, 128, 512, 1024];

/// Compared values of the keys.
struct Choices<'a> {
    weights: &'a [FormChoice],
    lengths: Vec<Vec<u64>>,
    contexts: Vec<Vec<u64>>,
}

/// Indices of a combination.
type Combination = [usize; 3];

/// Limits with their reasons.
struct Limits<'a> {
    max_mb: f64,
    memory: Option<(f64, String)>,
    given: &'a SearchLimits,
}

/// Predicted combination.
struct Tried {
    at: Combination,
    manifest: Manifest,
    predictions: Vec<ChipPrediction>,
    /// Largest share by which a limit is exceeded, or 0.
    excess: f64,
    /// Limit that is exceeded.
    why: String,
}

impl Tried {
    fn is_better_than(&self, other: &Tried) -> bool {
        (self.excess, objective(&self.predictions)) < (other.excess, objective(&other.predictions) - 1e-9)
    }
}

/// Numbers of tokens of attention in one call that a rule doubts.
fn doubted_rows(targets: &[ChipTarget<'_>]) -> Option<[u64; 2]> {
    rules().into_iter().filter(|rule| rule.concerns(targets)).find_map(|rule| match rule.applies {
        Applies::Op(pattern) => pattern.rows_between,
        _ => None,
    })
}

/// Sets of call sizes of a model that doesn't generate text, of which `largest` holds the longest one. Doubted sizes
/// give way to the next round number; if the longest text has one, shorter texts have a call below it.
fn call_sizes(largest: u64, doubted: Option<[u64; 2]>) -> Vec<Vec<u64>> {
    let is_doubted = |size: u64| doubted.is_some_and(|[first, last]| (first..=last).contains(&size));
    let beyond = |size: u64| match doubted {
        Some([_, last]) if is_doubted(size) => (last + 1).next_multiple_of(8),
        _ => size,
    };
    let below = doubted.filter(|_| is_doubted(largest)).map(|[first, _]| (first - 1) / 4 * 4);
    let others: Vec<u64> = CALLS.into_iter().map(beyond).filter(|size| *size < largest).collect();
    let mut sets = BTreeSet::new();
    for chosen in 0u32..1 << others.len() {
        let own = others.iter().enumerate().filter(|(index, _)| chosen >> index & 1 == 1).map(|(_, size)| *size);
        let set: BTreeSet<u64> = own.chain(below).chain([largest]).collect();
        sets.insert(set.into_iter().collect::<Vec<u64>>());
    }
    sets.into_iter().collect()
}

/// Finds the manifest with the least predicted time among whole manifests.
pub(super) fn search(
    forms: &Forms,
    model: &dyn FamilyModel,
    targets: &[ChipTarget<'_>],
    limits: &SearchLimits,
) -> Result<FoundManifest> {
    let facts = model.facts();
    let generates = facts.purpose == Purpose::TextGeneration;
    let largest = forms.manifest.context.all().last().copied().unwrap_or(1);
    let possible = |lengths: &&[u64]| (!facts.recurrent || lengths[0] == 1) && lengths[lengths.len() - 1] <= largest;
    // a call holds a whole text where attention sees both sides
    let longest = if facts.is_bidirectional() { largest } else { largest.min(CALLS[3]) };
    let choices = Choices {
        weights: &forms.weights,
        lengths: match generates {
            true => LENGTHS.into_iter().filter(possible).map(<[u64]>::to_vec).collect(),
            false => call_sizes(longest, doubted_rows(targets)),
        },
        contexts: if generates { ladders(largest) } else { vec![vec![largest]] },
    };
    let (max_mb, why_max) = package_limit(targets, limits);
    let bounds = Limits { max_mb, memory: memory_limit(targets, limits), given: limits };
    let mut compared = 0;
    let mut why_not = "no combination of forms".to_owned();
    let mut tried: BTreeSet<Combination> = BTreeSet::new();
    let mut best: Option<Tried> = None;
    let mut attempt = |at: Combination, best: &mut Option<Tried>| -> Result<()> {
        if !tried.insert(at) {
            return Ok(());
        }
        match predicted(&forms.manifest, model, targets, &choices, at, &bounds) {
            Ok(found) => {
                compared += 1;
                if best.as_ref().is_none_or(|best| found.is_better_than(best)) {
                    *best = Some(found);
                }
            }
            // such lengths don't fit such contexts, or a package can't hold a layer
            Err(error) => why_not = error.to_string(),
        }
        Ok(())
    };
    for first in 0..choices.weights.len() {
        attempt([first, 0, 0], &mut best)?;
    }
    loop {
        let before = best.as_ref().map(|best| best.at);
        for (key, count) in
            [choices.weights.len(), choices.lengths.len(), choices.contexts.len()].into_iter().enumerate()
        {
            for value in 0..count {
                let mut at = best.as_ref().map_or([0; 3], |best| best.at);
                at[key] = value;
                attempt(at, &mut best)?;
            }
        }
        if best.as_ref().map(|best| best.at) == before {
            break;
        }
    }
    let found = best.ok_or_else(|| Error::from(SearchError::Nothing { why: why_not }))?;
    if found.excess > 0.0 {
        return Err(SearchError::Nothing { why: found.why }.into());
    }
    let mut reasons = forms.reasons.clone();
    reasons.extend(reasons_of(&found, &choices, &bounds, &why_max, generates));
    let times = found.predictions.iter().map(ChipPrediction::milliseconds_per_token);
    let milliseconds_per_token = times.sum::<f64>() / found.predictions.len().max(1) as f64;
    let Tried { manifest, predictions, .. } = found;
    Ok(FoundManifest { manifest, reasons, predictions, milliseconds_per_token, compared })
}

/// Predicts a combination and holds it to the limits.
fn predicted(
    base: &Manifest,
    model: &dyn FamilyModel,
    targets: &[ChipTarget<'_>],
    choices: &Choices<'_>,
    at: Combination,
    limits: &Limits<'_>,
) -> Result<Tried> {
    let [weights, lengths, contexts] = at;
    let quant = choices.weights[weights].quant.clone();
    let channels = targets.iter().filter_map(|target| target.chip.most_channels.as_ref().map(|fact| fact.value)).min();
    let rows = model.facts().head_rows();
    let generates = model.facts().purpose == Purpose::TextGeneration;
    let mut manifest = Manifest {
        context: match choices.contexts[contexts].as_slice() {
            [one] => Contexts::One(*one),
            several => Contexts::Several(several.to_vec()),
        },
        lengths: Lengths::Fixed(choices.lengths[lengths].clone()),
        quant,
        shards: Shards { max_mb: limits.max_mb, layers: None, ..base.shards.clone() },
        ..base.clone()
    };
    if generates {
        // the fewest pieces that the channel axis allows; the plan refuses those that a package can't hold
        let fewest = channels.map_or(1, |most| rows.div_ceil(most.max(1)));
        let fits = |pieces: &u64| {
            let lm_head = LmHead { split: HeadSplit::Pieces(*pieces), ..base.lm_head.clone() };
            ConvertPlan::new(&Manifest { lm_head, ..manifest.clone() }, model).is_ok_and(|plan| {
                plan.packages.iter().all(|package| package.weight_bytes as f64 <= limits.max_mb * 1e6)
            })
        };
        let pieces = (0..8).map(|doubling| fewest << doubling).find(fits).unwrap_or(fewest);
        manifest.lm_head = LmHead { split: HeadSplit::Pieces(pieces), ..base.lm_head.clone() };
    }
    let predictions = predict(&manifest, model, &ConvertPlan::new(&manifest, model)?, targets)?;
    let (mut excess, mut why) = (0.0, String::new());
    let mut hold = |share: f64, reason: String| {
        if share > 1.0 && share - 1.0 > excess {
            (excess, why) = (share - 1.0, reason);
        }
    };
    for of in &predictions {
        let loaded = of.all_loaded_bytes as f64 / 1e6;
        if let Some((most, reason)) = &limits.memory {
            hold(loaded / most, format!("{loaded:.0} MB of loaded weights are more than {most:.0} MB ({reason})"));
        }
        let load = of.first_load_seconds[1];
        if let Some(most) = limits.given.max_first_load {
            hold(load / most, format!("the first load takes up to {load:.0} s, more than {most:.0} s"));
        }
    }
    Ok(Tried { at, manifest, predictions, excess, why })
}

fn reasons_of(
    found: &Tried,
    choices: &Choices<'_>,
    limits: &Limits<'_>,
    why_max: &str,
    generates: bool,
) -> Vec<ChoiceReason> {
    let reason = |key, reason| ChoiceReason { key, reason };
    let most = |of: fn(&ChipPrediction) -> f64| found.predictions.iter().map(of).fold(0.0, f64::max);
    let limit = limits.memory.as_ref();
    let limit = limit.map_or_else(String::new, |(most, reason)| format!(" of {most:.0} MB ({reason})"));
    let fits = format!(
        "; all functions take {:.0} MB{limit} and {:.0} to {:.0} s of first load",
        most(|of| of.all_loaded_bytes as f64 / 1e6),
        most(|of| of.first_load_seconds[0]),
        most(|of| of.first_load_seconds[1])
    );
    let texts = match generates {
        true => format!("of a text of {} prompt and {} generated tokens", TEXT[0], TEXT[1]),
        false => {
            let sizes: Vec<String> = TEXTS.iter().map(u64::to_string).collect();
            format!("of texts of {} tokens, as far as the context holds them", sizes.join(", "))
        }
    };
    let least =
        format!("least predicted time per token {texts}, with the first load spread over {TOKENS_PER_LOAD} tokens");
    let mut reasons = vec![
        reason("lengths", format!("{least}, among {} sets of lengths{fits}", choices.lengths.len())),
        reason("quant", choices.weights[found.at[0]].reason.clone()),
        reason("shards", format!("packages of up to {:.0} MB ({why_max})", limits.max_mb)),
    ];
    if generates {
        reasons.push(reason("context", format!("{least}, among {} ladders of contexts", choices.contexts.len())));
        let pieces = "the fewest pieces that the limit and the chips' widest channel axis allow";
        reasons.push(reason("lm_head", pieces.to_owned()));
    }
    reasons
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubted_sizes_of_calls_are_avoided() {
        let doubted = Some([501, 512]);
        let sets = call_sizes(2048, doubted);
        assert_eq!(sets.len(), 16);
        assert!(sets.contains(&vec![32, 128, 520, 1024, 2048]) && sets.contains(&vec![2048]));
        assert!(sets.iter().flatten().all(|size| !(501..=512).contains(size)));
        assert!(call_sizes(2048, None).contains(&vec![512, 2048]));
        // a text of 512 tokens needs such a call, and no shorter one does
        let sets = call_sizes(512, doubted);
        assert!(sets.contains(&vec![128, 500, 512]) && sets.iter().all(|set| set.ends_with(&[500, 512])));
        assert_eq!(call_sizes(24, doubted), [[24]]);
    }
}
