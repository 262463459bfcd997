//! Tests each function and layer alone, on the golden's hidden states, so that errors neither propagate nor hide.

use super::{CallPlan, Comparison, Whole, measured};
use crate::measure::{self, LogitMeasures};
use crate::trial::not_run;
use crate::verdict::{Check, Verdict};
use anec_base::Result;
use anec_kernels::distance::difference;
use anec_runtime::plan::Step;
use anec_runtime::{Hidden, TokenSession};

/// Measure of a layer's check.
const MEASURE: &str = "added_cosine";
/// Ratio of a layer's error to that of the best quarter from which the layer is suspect. In a real model with one scale
/// per tensor, the worst correct layer was 3.5 times the median.
const OUTLIER_RATIO: f64 = 20.0;
/// Difference of cosines that may be due to the order of sums, which depends on the processor.
const ROUNDING: f64 = 1e-6;

impl Comparison<'_> {
    /// Compares intermediate results of the whole run: hidden states after each function, pieces of the logits.
    pub(super) fn functions(&self, whole: &Whole, session: &TokenSession, checks: &mut Vec<Check>) {
        let golden = self.golden;
        let route = session.route();
        let hidden_size = self.candidate.model.bundle().model.hidden_size as usize;
        for step in &route.layers {
            let end = step.part.end as usize;
            let (Some(reference), Some(found)) = (golden.hidden.get(&end), whole.hidden.get(end)) else { continue };
            let measures = LogitMeasures::of(found, reference, hidden_size);
            let subject = self.subject(&format!("layers {}..{end}", step.part.start));
            checks.push(self.function_check(subject, "hidden states agree with the golden", &measures));
        }
        if route.head.len() > 1 {
            let logits = self.rows(&whole.logits);
            for step in &route.head {
                let piece = |rows: &[f32]| -> Vec<f32> {
                    let part = step.part.start as usize..step.part.end as usize;
                    rows.chunks_exact(golden.vocab_size).flat_map(|row| &row[part.clone()]).copied().collect()
                };
                let rows = (step.part.end - step.part.start) as usize;
                let measures = LogitMeasures::of(&piece(&logits), &piece(&golden.logits), rows);
                let subject = self.subject(&format!("head {}..{}", step.part.start, step.part.end));
                checks.push(self.function_check(subject, "its logits agree with the golden", &measures));
            }
        }
    }

    /// Runs each function on the golden's hidden states with every call size; then compares its layers, and the head.
    pub(super) fn forced(&self, plans: &[CallPlan], session: &mut TokenSession, checks: &mut Vec<Check>) -> Result<()> {
        let golden = self.golden;
        let model = &self.candidate.model;
        let steps = session.route().layers.clone();
        for (index, step) in steps.iter().enumerate() {
            // functions with inputs that goldens lack are judged by their output in the whole run
            if !session.stands_alone(index) {
                continue;
            }
            let (start, end) = (step.part.start as usize, step.part.end as usize);
            let (Some(given), Some(reference)) = (golden.hidden.get(&start), golden.hidden.get(&end)) else { continue };
            let inside = self.candidate.layers && (start..=end).all(|layer| golden.hidden.contains_key(&layer));
            let wanted = if inside { Hidden::BetweenLayers } else { Hidden::BetweenFunctions };
            let mut layers = Layers::new(step);
            for plan in plans {
                let found =
                    self.after_reset(session, |session| session.force_layers(index, given, wanted, &plan.chunking))?;
                let subject = self.subject(&format!("layers {start}..{end} forced, {}", plan.name));
                let found = match found {
                    Ok(found) => found,
                    Err(error) => {
                        checks.push(not_run(subject, error)?);
                        continue;
                    }
                };
                let measures = LogitMeasures::of(&found[end], reference, model.bundle().model.hidden_size as usize);
                checks.push(self.function_check(subject, "its hidden states agree with the golden", &measures));
                if inside {
                    self.compare_layers(&mut layers, &plan.name, &found);
                }
            }
            checks.extend(self.layer_checks(&layers));
        }
        let last = model.bundle().model.num_layers;
        let alone = model.gives_logits() && !session.route().head.is_empty();
        if let Some(given) = golden.hidden.get(&last).filter(|_| alone) {
            self.attempt("head forced", session, checks, |session, checks| {
                let mut logits = Vec::new();
                session.force_head(given, &mut logits)?;
                let measures = LogitMeasures::of(&self.rows(&logits), &golden.logits, golden.vocab_size);
                let subject = self.subject("head forced");
                checks.push(self.function_check(subject, "its logits agree with the golden", &measures));
                Ok(())
            })?;
        }
        Ok(())
    }

    fn function_check(&self, subject: String, claim: &str, measures: &LogitMeasures) -> Check {
        let limit = self.thresholds.function_cosine;
        let low = !(measures.cosine >= limit);
        let problem = low.then(|| format!("cosine {:.5}, expected at least {limit}", measures.cosine));
        let mut measured = measured(measures);
        measured.retain(|name, _| !matches!(name.as_str(), "top1" | "top5" | "kl"));
        Check { measured, ..Check::of(subject, claim, problem) }
    }

    /// Compares the contributions of layers for one division into calls; keeps the worst of all.
    fn compare_layers(&self, layers: &mut Layers, plan: &str, found: &[Vec<f32>]) {
        let golden = &self.golden.hidden;
        let width = self.candidate.model.bundle().model.hidden_size as usize;
        for (index, seen) in layers.seen.iter_mut().enumerate() {
            let layer = layers.first + index;
            let (before, after) = (&golden[&layer], &golden[&(layer + 1)]);
            // the first layer's input is the golden's
            let entered = if index == 0 { before } else { &found[layer] };
            let cosines = difference(&found[layer + 1], entered)
                .chunks_exact(width)
                .zip(difference(after, before).chunks_exact(width))
                .map(|(ours, theirs)| measure::cosine(ours, theirs))
                .collect::<Vec<f64>>();
            let mean = cosines.iter().sum::<f64>() / cosines.len() as f64;
            // `!(>=)` ranks NaN worst; of equal results except for rounding, the first is named
            if seen.as_ref().is_none_or(|(worst, _)| !worst.is_nan() && !(mean >= *worst - ROUNDING)) {
                *seen = Some((mean, plan.to_owned()));
            }
        }
    }

    /// Checks of a function's layers up to the first wrong one, whose successors get wrong inputs.
    fn layer_checks(&self, layers: &Layers) -> Vec<Check> {
        let model = &self.candidate.model;
        let place = layers.function.map(|index| &model.bundle().functions[index]);
        let place = place.map_or_else(String::new, |entry| format!("{}, {}, ", entry.package, entry.function));
        let limit = self.thresholds.layer_cosine;
        let mut checks = Vec::new();
        for (index, seen) in layers.seen.iter().enumerate() {
            let Some((cosine, plan)) = seen else { continue };
            let layer = layers.first + index;
            // `!(>=)` is true for NaN
            let problem = (!(*cosine >= limit)).then(|| {
                let last = index + 1 == layers.seen.len();
                let after = if last { "" } else { "; the layers after it in this function aren't judged" };
                format!("cosine {cosine:.5} in the mean over the positions, expected at least {limit} ({plan}){after}")
            });
            let subject = self.subject(&format!("{place}layer {layer}"));
            let check = Check::of(subject, "what the layer adds agrees with the golden", problem);
            let failed = check.verdict == Verdict::Failed;
            let measured = [(MEASURE.to_owned(), *cosine)].into_iter().collect();
            checks.push(Check { layer: Some(layer), measured, ..check });
            if failed {
                break;
            }
        }
        checks
    }

    /// If something failed and no layer is below the limit: the first layer that is much worse than the others, if any.
    /// A small error of one layer shows in that layer and in its successors within the function.
    pub(super) fn suspect(&self, checks: &[Check]) -> Option<Check> {
        let own = || checks.iter().filter(|check| check.subject.starts_with(&self.candidate.name));
        let mut failed = own().filter(|check| check.verdict == Verdict::Failed).peekable();
        failed.peek()?;
        if failed.any(|check| check.layer.is_some()) {
            return None;
        }
        let layers: Vec<(f64, &Check)> =
            own().filter_map(|check| Some((1.0 - check.measured.get(MEASURE)?, check))).collect();
        let errors: Vec<f64> = layers.iter().map(|(error, _)| *error).collect();
        let (first, usual) = first_outlier(&errors)?;
        let (error, check) = layers[first];
        let problem = format!(
            "what it adds has a cosine of {:.5} to the golden; a quarter of the layers reach {:.5}",
            1.0 - error,
            1.0 - usual
        );
        let (subject, layer) = (check.subject.clone(), check.layer);
        Some(Check { layer, ..Check::of(subject, "the layer doesn't stand out from the others", Some(problem)) })
    }
}

/// First outlier among the errors, and the first quartile. More than a quarter can be affected by predecessors.
fn first_outlier(errors: &[f64]) -> Option<(usize, f64)> {
    let mut sorted = errors.to_vec();
    sorted.sort_by(f64::total_cmp);
    let usual = *sorted.get(sorted.len() / 4)?;
    let first = errors.iter().position(|error| *error > OUTLIER_RATIO * usual.max(f64::from(f32::EPSILON)))?;
    Some((first, usual))
}

/// Agreement of each layer's contribution with the golden: the mean cosine over the positions for the worst division
/// into calls, and that division.
struct Layers {
    first: usize,
    /// Index of a function of the step, which identifies the package.
    function: Option<usize>,
    seen: Vec<Option<(f64, String)>>,
}

impl Layers {
    fn new(step: &Step) -> Self {
        let count = (step.part.end - step.part.start) as usize;
        Layers { first: step.part.start as usize, function: step.functions().next(), seen: vec![None; count] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_layer_that_is_unlike_the_others_is_named() {
        // layer 0 affects the following layers in its function
        assert_eq!(first_outlier(&[2e-2, 1e-2, 8e-3, 1e-4, 2e-4, 1e-4]), Some((0, 1e-4)));
        assert_eq!(first_outlier(&[1e-4, 2e-4, 3e-4, 1e-2, 9e-3, 8e-3]), Some((3, 2e-4)));
        assert_eq!(first_outlier(&[1e-4, 2e-4, 3e-4, 1.5e-3]), None, "an ordinary spread");
        assert_eq!(first_outlier(&[0.0, 0.0, 0.0, 1e-7]), None, "rounding");
        assert_eq!(first_outlier(&[]), None);
    }
}
