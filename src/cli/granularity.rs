//! Cost of the other granularity of int8, as a one-line note.

use anec::convert::plan::ConvertPlan;
use anec::family::FamilyModel;
use anec::manifest::{Granularity, Manifest, Quant, Transform, WeightFormat};

/// Cost of each form; divergences are those of the book's page of measured formats.
const PER_TENSOR: &str = "a rotation is learned first; KL of Qwen2.5-Coder-0.5B 0.0019";
const PER_CHANNEL: &str = "converts fastest; KL of Qwen2.5-Coder-0.5B 0.0014";

/// Note on a plan for int8 weights: sizes with one scale per tensor and per channel, and what each costs.
pub(super) fn note(manifest: &Manifest, model: &dyn FamilyModel, plan: &ConvertPlan) -> Option<String> {
    let Quant { weights: WeightFormat::Int8, granularity: own, plan: None, .. } = manifest.quant else { return None };
    if model.permits(Transform::Rotate).is_err() {
        // the largest weights decide, and per tensor often fails the gate
        return None;
    }
    let other = match own {
        Granularity::PerTensor => Granularity::PerChannel,
        Granularity::PerChannel => Granularity::PerTensor,
        _ => return None,
    };
    let quant = Quant { granularity: other, ..manifest.quant.clone() };
    let other_plan = ConvertPlan::new(&Manifest { quant, ..manifest.clone() }, model).ok()?;
    let cost = |granularity| match granularity {
        Granularity::PerTensor => PER_TENSOR,
        _ => PER_CHANNEL,
    };
    let form = |granularity, plan: &ConvertPlan| {
        let megabytes = plan.packages.iter().map(|package| package.weight_bytes).sum::<u64>() as f64 / 1e6;
        format!("int8 {granularity} {megabytes:.1} MB ({})", cost(granularity))
    };
    let key = if other == Granularity::PerTensor { "per_tensor" } else { "per_channel" };
    Some(format!("{}, {}: `--set quant.granularity={key}`", form(own, plan), form(other, &other_plan)))
}
