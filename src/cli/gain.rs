//! Speed that `--for` would gain, as a one-line note.

use anec::advice::{ChipTable, ChipTarget, ContextPrediction, predict};
use anec::convert::open::{open_shapes, resolve};
use anec::convert::plan::ConvertPlan;
use anec::family::FamilyModel;
use anec::manifest::{Lengths, Manifest};
use anec::{Progress, base::Result};

/// Chip of the prediction if none is named.
const CHIP: &str = "m4";
/// Ratio of predicted speeds above which there is a note.
const NOTABLE: f64 = 4.0 / 3.0;
/// Tokens per call of the compared functions of fixed length: decode and prefill.
const FIXED: [u64; 2] = [1, 64];

/// Note on a plan: the predicted speed with functions of fixed length, which `--for` chooses, if it is much higher.
pub(super) fn note(
    manifest: &Manifest,
    model: &dyn FamilyModel,
    plan: &ConvertPlan,
    targets: &[ChipTarget<'_>],
) -> Option<String> {
    if matches!(manifest.lengths, Lengths::Fixed(_)) {
        return None;
    }
    let target = targets.first().copied().or_else(|| ChipTable::built_in().target(CHIP).ok())?;
    let context = plan.contexts.last().copied()?;
    let fixed = FIXED.iter().copied().filter(|tokens| *tokens < context).collect();
    let fixed = Manifest { lengths: Lengths::Fixed(fixed), ..manifest.clone() };
    let speed = |manifest: &Manifest, plan: &ConvertPlan| -> Option<ContextPrediction> {
        predict(manifest, model, plan, &[target]).ok()?.first()?.contexts.last().copied()
    };
    let (own, other) = (speed(manifest, plan)?, speed(&fixed, &ConvertPlan::new(&fixed, model).ok()?)?);
    let gains = [
        (own.decode_per_second, other.decode_per_second, "decode tok/s"),
        (own.prefill_per_second, other.prefill_per_second, "prefill tok/s"),
    ];
    let gains: Vec<String> = gains
        .iter()
        .filter(|(own, other, _)| other / own > NOTABLE)
        .map(|(own, other, unit)| format!("{other:.0} instead of {own:.0} {unit}"))
        .collect();
    let name = &target.chip.name;
    (!gains.is_empty()).then(|| {
        format!("predicted for {name}: {} with functions of fixed length, which `--for` chooses", gains.join(", "))
    })
}

/// Note on a converted manifest.
pub(super) fn note_of(manifest: &Manifest) -> Result<Option<String>> {
    let opened = open_shapes(manifest, &Progress::hidden())?;
    let manifest = resolve(manifest, &opened.source, &*opened.model);
    let manifest = manifest.with_lengths_of_functions();
    let plan = ConvertPlan::new(&manifest, &*opened.model)?;
    Ok(note(&manifest, &*opened.model, &plan, &[]))
}
