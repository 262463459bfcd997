//! Quantization that a manifest leaves open, for small models: weights are rounded; where they would fail their parity
//! gate, codes are chosen by error feedback; where those would fail too, the roles that lose most stay in fp16.

use std::path::Path;

use anec_base::Result;
use anec_bundle::Bundle;
use anec_calibrate::sensitivity::{self, SensitivityOptions};
use anec_convert::report::{ConvertReport, FILE_NAME as REPORT, QualityReport};
use anec_convert::{ConvertedBundle, Outcome, files, notes, output};
use anec_manifest::{Feedback, Manifest, Quant, QuantOverride, Role, WeightFormat};
use anec_validate::Thresholds;

use crate::converter::{Converter, beside, weights};
use crate::scratch::Scratch;

/// Largest number of weights of a model whose quantization is chosen unasked, which takes minutes.
const CHOSEN_WEIGHTS: u64 = 1_000_000_000;

impl Converter {
    /// Converts, resuming an interrupted conversion. With `numerics.scale: auto`, the scale of the residual stream is
    /// measured first; with `quant.plan`, formats are chosen by their measured loss; with `quant.feedback: gptq`, the
    /// codes of weights are chosen on a calibration text.
    ///
    /// # Errors
    /// Returns any error of the source, the manifest, the output folder or the disk.
    pub fn convert(&self) -> Result<Outcome> {
        let own = &self.manifest.quant;
        if own.feedback.is_some() || own.plan.is_some() {
            return self.convert_as_asked();
        }
        let quant = if self.force { own.clone() } else { self.existing_choice() };
        let mut outcome = self.with(quant.clone()).convert_as_asked()?;
        let Some(quality) = self.quality_to_improve(&outcome) else { return Ok(outcome) };
        let replacing = Converter { force: false, replace: true, ..self.clone() };
        let (mut best, mut loss) = (quant, quality);
        if best.feedback.is_none() {
            let chosen = Quant { feedback: Some(Feedback::Gptq), ..best.clone() };
            let mut written = match replacing.with(chosen.clone()).convert_as_asked() {
                Ok(Outcome::Written(written)) => written,
                Ok(up_to_date) => return Ok(up_to_date),
                // the rounded bundle is complete
                Err(error) => return noted(outcome, notes::of_rounded_codes(&error)),
            };
            match written.report.quality.clone() {
                Some(quality) if (quality.missed.len(), quality.kl) < (loss.missed.len(), loss.kl) => {
                    add_first(&mut written, notes::of_chosen_feedback(&loss))?;
                    (best, loss, outcome) = (chosen, quality, Outcome::Written(written));
                }
                _ if has_eight_bits(&best) => {}
                _ => return replacing.with(best).convert_as_asked(),
            }
        }
        if loss.missed.is_empty() || !has_eight_bits(&best) {
            return Ok(outcome);
        }
        replacing.with_roles_in_fp16(best, &loss)
    }

    /// Puts the roles that lose most into fp16, as many as the parity gate needs.
    fn with_roles_in_fp16(&self, quant: Quant, lost: &QualityReport) -> Result<Outcome> {
        let losses = match self.losses_by_role(&quant) {
            Ok(losses) => losses,
            Err(error) => return noted(self.with(quant).convert_as_asked()?, notes::of_unknown_losses(&error)),
        };
        let limit = Thresholds::of(&self.manifest.gates).parity.kl;
        let total: f64 = losses.iter().map(|(_, loss)| loss).sum();
        // losses of single roles add up to about that of all, and error feedback lowers all alike
        let left = |count: usize| losses[count..].iter().map(|(_, loss)| loss / total * lost.kl).sum::<f64>();
        let first = (1..losses.len()).find(|count| left(*count) <= limit).unwrap_or(losses.len()).max(1);
        for count in first..=losses.len() {
            let mut roles: Vec<Role> = losses[..count].iter().map(|(role, _)| *role).collect();
            roles.sort_unstable();
            let mut written = match self.with(in_fp16(&quant, &roles)).convert_as_asked()? {
                Outcome::Written(written) => written,
                up_to_date => return Ok(up_to_date),
            };
            if count == losses.len() || written.report.quality.as_ref().is_none_or(|found| found.missed.is_empty()) {
                add_first(&mut written, notes::of_roles_in_fp16(lost, &roles))?;
                return Ok(Outcome::Written(written));
            }
        }
        self.with(quant).convert_as_asked()
    }

    /// Estimated loss of each role in its format, largest first.
    fn losses_by_role(&self, quant: &Quant) -> Result<Vec<(Role, f64)>> {
        let scratch = Scratch::within(&beside(self.out.as_deref()))?;
        // formats of some roles follow from the model
        let resolved = self.existing().map_or_else(|| quant.clone(), |bundle| bundle.manifest.quant);
        let format_of = |role: Role| {
            let format = resolved.of(role, None);
            let granularity = Some(format.granularity);
            QuantOverride { weights: Some(format.weights), granularity, row_scale: Some(format.row_scale), op: None }
        };
        let mut formats: Vec<QuantOverride> = Vec::new();
        Role::PROJECTIONS.map(format_of).into_iter().for_each(|format| {
            if !formats.contains(&format) {
                formats.push(format);
            }
        });
        let plain = Quant { overrides: Default::default(), ..quant.clone() };
        let manifest = Manifest { quant: plain, ..self.manifest.clone() };
        let saved = scratch.path().join("sensitivities.json");
        let options = SensitivityOptions::new(&formats, sensitivity::TOKENS, &saved);
        let measured = sensitivity::measure(&manifest, &options, &scratch.path().join("model"), &self.progress)?;
        let mut losses: Vec<(Role, f64)> = Vec::new();
        for group in &measured.groups {
            let own = format_of(group.role);
            let loss = group.formats.iter().find(|cost| cost.format == own).map_or(0.0, |cost| cost.kl);
            match losses.iter_mut().find(|(role, _)| *role == group.role) {
                Some((_, sum)) => *sum += loss,
                None => losses.push((group.role, loss)),
            }
        }
        losses.sort_by(|a, b| b.1.total_cmp(&a.1));
        Ok(losses)
    }

    /// Returns the measured quality of a bundle that would fail its parity gate and whose form may be changed.
    fn quality_to_improve(&self, outcome: &Outcome) -> Option<QualityReport> {
        let report: ConvertReport = match outcome {
            _ if !self.measure => return None,
            Outcome::Written(written) => written.report.clone(),
            // a run that was interrupted while it made another form
            Outcome::UpToDate(path) if output::partial(path).exists() => {
                std::fs::read(path.join(REPORT)).ok().and_then(|json| serde_json::from_slice(&json).ok())?
            }
            Outcome::UpToDate(_) => return None,
        };
        let is_small = weights(&report) <= CHOSEN_WEIGHTS;
        report.quality.filter(|quality| is_small && !quality.missed.is_empty())
    }

    /// Quantization of the manifest with what an earlier run chose for the bundle at the output path.
    fn existing_choice(&self) -> Quant {
        let own = &self.manifest.quant;
        let Some(existing) = self.existing().map(|bundle| bundle.manifest.quant) else { return own.clone() };
        let is_half = |role: &Role| {
            let of = |quant: &Quant| quant.overrides.get(role).and_then(|format| format.weights);
            of(&existing) == Some(WeightFormat::None) && of(own).is_none()
        };
        let roles: Vec<Role> = existing.overrides.keys().copied().filter(is_half).collect();
        let feedback = existing.feedback.filter(|feedback| *feedback == Feedback::Gptq);
        in_fp16(&Quant { feedback, ..own.clone() }, if has_eight_bits(own) { &roles } else { &[] })
    }

    /// Bundle at the output path.
    fn existing(&self) -> Option<Bundle> {
        Bundle::read(&output::bundle_path(self.out.as_deref(), &self.name()?).ok()?).ok()
    }

    fn with(&self, quant: Quant) -> Converter {
        Converter { manifest: Manifest { quant, ..self.manifest.clone() }, ..self.clone() }
    }
}

/// Whether all projections have eight bits, so that fp16 for some is no breach of a chosen size.
fn has_eight_bits(quant: &Quant) -> bool {
    let own = quant.overrides.values().chain(quant.layers.iter().flat_map(|layers| layers.overrides.values()));
    quant.weights == WeightFormat::Int8 && own.into_iter().all(|format| format.weights.is_none())
}

/// Returns a quantization with some roles in fp16.
fn in_fp16(quant: &Quant, roles: &[Role]) -> Quant {
    let mut quant = quant.clone();
    for role in roles {
        quant.overrides.entry(*role).or_default().weights = Some(WeightFormat::None);
    }
    quant
}

/// Adds a note to the report of a bundle, first of all.
fn add_first(written: &mut ConvertedBundle, note: String) -> Result<()> {
    written.report.notes.insert(0, note);
    write_report(&written.path, &written.report)
}

/// Adds a note to the report of a bundle that was written.
fn noted(mut outcome: Outcome, note: String) -> Result<Outcome> {
    if let Outcome::Written(written) = &mut outcome {
        written.report.notes.push(note);
        write_report(&written.path, &written.report)?;
    }
    Ok(outcome)
}

fn write_report(path: &Path, report: &ConvertReport) -> Result<()> {
    files::write_json(&path.join(REPORT), report)?;
    Ok(())
}
