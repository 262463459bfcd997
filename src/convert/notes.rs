//! What a user should know of a conversion that succeeded: one sentence each.

use super::plan::Plan;
use super::report::{Report, TensorReport};
use anec_family::Model;
use anec_manifest::Granularity;

/// Relative rms error from which a quantized weight is worth a note. Eight bits lose about 1 % of weights without
/// outliers, whatever their granularity; ten times that means that outliers have taken the scale for themselves.
pub const NOTABLE_LOSS: f64 = 0.1;

/// How many weights a note names.
const NAMED: usize = 3;

/// What is odd about a plan and yet allowed.
pub fn of_plan(plan: &Plan, model: &dyn Model) -> Vec<String> {
    let longest = model.facts().max_position_embeddings;
    let over = plan.contexts.iter().filter(|context| **context > longest);
    let over = over
        .map(|context| format!("context {context} is longer than the {longest} tokens that the model was made for"));
    over.chain(short_windows(plan, model)).collect()
}

/// A token classifier takes long texts in windows, which must be more than what their layers see on both sides.
fn short_windows(plan: &Plan, model: &dyn Model) -> Option<String> {
    let band = model.facts().label_set.as_ref()?.band;
    let functions = plan.packages.iter().flat_map(|package| &package.functions);
    let window = functions.map(|function| function.most_tokens).max()?;
    let seen = 2 * plan.most_layers() * band;
    (window <= seen).then(|| {
        format!(
            "calls of up to {window} tokens label no longer text than that: its layers see {seen} tokens around a \
             window; `--set lengths.range=[1,{}]` or more takes texts of any length",
            2 * seen
        )
    })
}

/// Quantization that lost much, with the remedy.
pub fn of_losses(report: &Report) -> Option<String> {
    let loss = |tensor: &TensorReport| tensor.loss.map_or(0.0, |loss| loss.relative_rms_error);
    let worst: Vec<&TensorReport> = report.worst().into_iter().filter(|tensor| loss(tensor) > NOTABLE_LOSS).collect();
    let (first, count) = (worst.first()?, worst.len());
    let named: Vec<String> =
        worst.iter().take(NAMED).map(|tensor| format!("{} ({:.0} %)", tensor.name, 100.0 * loss(tensor))).collect();
    let more = if count > NAMED { format!(" and {} more", count - NAMED) } else { String::new() };
    let remedy = match first.granularity {
        Some(Granularity::PerTensor) => "--set quant.granularity=per_channel",
        _ => "--set quant.weights=none",
    };
    let named = named.join(", ");
    Some(format!("quantization lost much (relative rms error) of {named}{more}; `{remedy}` loses less"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{PackageReport, RunReport};
    use anec_manifest::{Role, WeightFormat};
    use anec_quant::Loss;

    fn report(losses: &[f64], granularity: Granularity) -> Report {
        let tensor = |(index, loss): (usize, &f64)| TensorReport {
            name: format!("w{index}"),
            tensors: vec![],
            role: Role::MlpDown,
            shape: vec![],
            weights: WeightFormat::Int8,
            granularity: Some(granularity),
            bytes: 0,
            loss: Some(Loss { relative_rms_error: *loss, cosine: 1.0, largest: 1.0, saturated: 0, vanished: 0 }),
        };
        let tensors = losses.iter().enumerate().map(tensor).collect();
        let package = PackageReport { package: "p".into(), weight_bytes: 0, seconds: 0.0, tensors };
        let (run, notes) = (RunReport::default(), vec![]);
        Report { anec_version: String::new(), name: String::new(), run, packages: vec![package], notes }
    }

    #[test]
    fn the_weights_that_lost_most_are_named_with_the_remedy() {
        assert_eq!(of_losses(&report(&[0.01, 0.1], Granularity::PerTensor)), None);
        assert_eq!(
            of_losses(&report(&[0.01, 0.2, 0.87], Granularity::PerTensor)).unwrap(),
            "quantization lost much (relative rms error) of w2 (87 %), w1 (20 %); \
             `--set quant.granularity=per_channel` loses less"
        );
        let note = of_losses(&report(&[0.5, 0.2, 0.3, 0.4, 0.6], Granularity::PerChannel)).unwrap();
        assert!(note.contains("w4 (60 %), w0 (50 %), w3 (40 %) and 2 more; `--set quant.weights=none`"), "{note}");
    }
}
