//! Calibration: runs a text through the model, layer by layer, and chooses the codes of each weight by its inputs
//! ([`anec_quant::ErrorFeedback`]).
//!
//! The model is the source's, unquantized, in f32, as packages of one layer each. For every projection the second
//! moments of the inputs, `Σ xᵀx` over the tokens, are added up. The codes of its weights are then chosen and written
//! to a file, and the moments are freed before the next layer runs. Only the hidden states of the text and the moments
//! of one layer stay in memory.
//!
//! ```
//! use anec_base::Progress;
//! use anec_calibrate::calibrate;
//! use anec_manifest::Manifest;
//!
//! let text = "source: ../../demo/model\ncalibration: { tokens: 64 }\nquant: { feedback: gptq }";
//! let manifest = Manifest::from_yaml(text, "the example", &[])?;
//! let scratch = tempfile::tempdir().unwrap();
//! let chosen = calibrate(&manifest, scratch.path(), &Progress::hidden())?;
//! assert_eq!(chosen.report.tokens, 64);
//! # Ok::<(), anec_base::Error>(())
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`text`] | calibration tokens |
//! | `observed` | values of a function that are inputs of weights |
//! | `moments` | second moments |
//! | `moment_log` | second moments of observed values, added up as functions run |
//! | `codes` | chosen codes, in files |
//! | `journal` | progress of a calibration, for resuming |
//! | `unquantized` | the model without quantization, in packages of one layer |
//! | [`sensitivity`] | loss by each number format of each role and layer |
//! | `substitute` | a backend that can replace one function by another |
//! | `budget` | choice of formats under a budget |
//! | [`plan`] | a manifest with the chosen formats |

#![forbid(unsafe_code)]

mod budget;
mod codes;
mod error;
mod journal;
mod moment_log;
mod moments;
mod observed;
pub mod plan;
pub mod sensitivity;
mod substitute;
pub mod text;
mod unquantized;

use std::iter::repeat_n;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anec_base::{Progress, Result};
use anec_bundle::{Bundle, Port, Stage};
use anec_convert::Chosen;
use anec_convert::open::{open, resolve};
use anec_convert::plan::PackagePlan;
use anec_convert::report::CalibrationReport;
use anec_exec::{Executable, Precision, Tensor, WeightCache};
use anec_family::{FamilyModel, LoweringOptions};
use anec_manifest::Manifest;
use anec_mil::Function;
use anec_quant::{Damping, ErrorFeedback};
use anec_runtime::inputs::{shape_of, shaped};
use anec_runtime::{
    Chunking, CpuBackend, Hidden, HiddenFrame, HostTables, InterceptedBackend, LoadedModel, PackageStore,
};

use codes::{Codes, WeightCodes};
pub use error::CalibrateError;
use journal::{CalibrationJournal, CalibrationProgress};
use moment_log::MomentLog;
use moments::SecondMoments;
use observed::{ObservedInput, ObservedTokens, QuantTarget, targets};
use unquantized::{UnquantizedModel, WINDOW};

/// Chooses codes by a manifest's calibration text. `scratch` is a folder for the model's weights and the codes, which
/// are read from there until the conversion ends. It must be empty, or left by an interrupted run with the same
/// manifest and source, which is then resumed.
///
/// # Errors
/// Returns an error if the source can't be converted, the text can't be read, or a function fails.
pub fn calibrate(manifest: &Manifest, scratch: &Path, progress: &Progress) -> Result<Chosen> {
    let begin = Instant::now();
    if open(manifest)?.model.facts().is_bidirectional() {
        return Err(CalibrateError::Bidirectional("feedback: gptq").into());
    }
    let plain = UnquantizedModel::new(manifest, scratch, progress)?;
    let UnquantizedModel { opened, plan, bundle, folder, host } = &plain;
    let texts = text::windows_and_starts(&manifest.calibration, bundle, folder, WINDOW as usize)?;
    let hidden = texts.iter().map(|tokens| plain.embedded(tokens)).collect::<Result<_>>()?;
    let (mut journal, CalibrationProgress { hidden, codes, most_moments }) =
        CalibrationJournal::open(scratch, &texts, hidden)?;
    let (model, form, host) = (&*opened.model, &plan.form, host.clone());
    let mut run = Run { model, form, bundle, folder, host, codes, hidden, most_moments };
    let tokens: u64 = texts.iter().map(|tokens| tokens.len() as u64).sum();
    let targets = targets(&resolve(manifest, &opened.source, &*opened.model), &*opened.model)?;
    let jobs = plan.packages.iter().map(|package| run.job(package, &targets, tokens)).collect::<Result<Vec<_>>>()?;
    let resumed = journal.packages();
    let all: f64 = jobs.iter().skip(resumed).map(|job| job.cost).sum();
    let started = Instant::now();
    let mut done = 0.0;
    for (part, job) in jobs.iter().enumerate().skip(resumed) {
        let left = (done > 0.0).then(|| started.elapsed().as_secs_f64() * (all - done) / done);
        let left = left.map_or_else(String::new, |left| format!(", {left:.0} s left"));
        progress.stage(&format!("calibration, {}{left}", job.package.name));
        run.part(part, job)?;
        journal.finish(&run.hidden, &run.codes, run.most_moments)?;
        done += job.cost;
        progress.set((1000.0 * done / all) as u64, 1000);
    }
    progress.finish();
    let rounded = targets.iter().filter(|target| !run.codes.has(&target.key, target.channels));
    let rounded: Vec<String> = rounded.map(|target| target.key.clone()).collect();
    let weights: u64 = bundle.packages.iter().map(|package| package.weight_bytes).sum();
    let report = CalibrationReport {
        tokens,
        weights: run.codes.count(),
        rounded,
        resumed_packages: resumed,
        seconds: begin.elapsed().as_secs_f64(),
        moments_bytes: run.most_moments,
        hidden_bytes: 4 * tokens * bundle.model.hidden_size,
        scratch_bytes: weights + bundle.host.file.bytes + run.codes.bytes(),
    };
    progress.note(&format!("calibrated {} weights on {tokens} tokens in {:.0} s", report.weights, report.seconds));
    Ok(Chosen { codes: Box::new(run.codes), report })
}

/// Package whose inputs are observed.
struct Job<'a> {
    package: &'a PackagePlan,
    function: Function,
    inputs: Vec<Port>,
    observed: Vec<ObservedInput<'a>>,
    /// Approximate number of multiplications, the measure of progress.
    cost: f64,
}

struct Run<'a> {
    model: &'a dyn FamilyModel,
    form: &'a LoweringOptions,
    bundle: &'a Bundle,
    folder: &'a Path,
    host: Arc<HostTables>,
    codes: Codes,
    /// Hidden states of each window, `[tokens, hidden_size]`, at the entry of the next layer.
    hidden: Vec<Vec<f32>>,
    most_moments: u64,
}

impl Run<'_> {
    /// Returns the job of a package: the weights whose inputs it computes.
    fn job<'a>(&self, package: &'a PackagePlan, targets: &'a [QuantTarget], tokens: u64) -> Result<Job<'a>> {
        let (graph, emitted) = observed::built(self.model, self.form, &package.functions[0])?;
        let (head, experts) = match package.stage {
            Stage::Layers { first, .. } => (false, self.model.experts(first).map(|experts| experts.count as usize)),
            Stage::FeedForward { .. } | Stage::Experts { .. } => (false, None),
            Stage::Head { .. } | Stage::Model { .. } => (true, None),
        };
        let observed = observed::inputs(&graph.function, &emitted, head, experts, targets);
        let cost = observed.iter().map(|input| input.cost(tokens)).sum::<f64>() + 1.0;
        Ok(Job { package, function: graph.function, inputs: graph.inputs, observed, cost })
    }

    /// Runs the text through a package and chooses the codes of its weights.
    fn part(&mut self, part: usize, job: &Job<'_>) -> Result<()> {
        let log = MomentLog::new(&job.observed);
        match job.package.stage {
            Stage::Layers { end, .. } => self.layers(part, end, &log)?,
            // calibrated models have no such packages
            Stage::FeedForward { .. } | Stage::Experts { .. } | Stage::Model { .. } => {}
            Stage::Head { .. } => self.head(job, &log)?,
        }
        let all = log.take();
        let together: u64 = all.iter().flatten().map(SecondMoments::bytes).sum();
        // the matrix being factorized and its factor
        let largest = all.iter().flatten().map(|moments| 2 * moments.bytes()).max();
        self.most_moments = self.most_moments.max(together + largest.unwrap_or(0));
        for (input, moments) in job.observed.iter().zip(all) {
            let parts = moments.len() as u64;
            let of_channels = input.of_channels(&moments);
            let weight_codes: Vec<WeightCodes<'_>> =
                input.targets.iter().map(|target| self.codes.begin(target, &of_channels)).collect();
            for (part, moments) in moments.into_iter().enumerate() {
                let share = |whole: u64| whole / parts * part as u64..whole / parts * (part as u64 + 1);
                let (channels, tokens, sums) = (moments.sums().nrows(), moments.tokens(), moments.into_sums());
                let damping = |weight_codes: &WeightCodes<'_>| {
                    Damping::of(channels, tokens, weight_codes.target().format.weights.bits())
                };
                let alike: Vec<_> = weight_codes.chunk_by(|a, b| damping(a) == damping(b)).collect();
                for (sums, alike) in repeat_n(sums, alike.len()).zip(alike) {
                    let feedback = ErrorFeedback::of(sums, damping(&alike[0]));
                    let feedback = feedback.map_err(|error| CalibrateError::Moments {
                        package: job.package.name.clone(),
                        value: input.value.clone(),
                        error,
                    })?;
                    for weight_codes in alike {
                        let target = weight_codes.target();
                        let (mut rows, mut columns) = (0..target.channels, 0..target.weight.columns());
                        match input.tokens {
                            ObservedTokens::All => {}
                            ObservedTokens::Before { .. } => rows = share(rows.end),
                            ObservedTokens::Inside { .. } => columns = share(columns.end),
                        }
                        self.codes.choose(weight_codes, rows, columns, &feedback)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Runs the layers of a package, window by window.
    fn layers(&mut self, part: usize, end: usize, log: &MomentLog) -> Result<()> {
        // a separate model, whose weights are freed after the package
        let programs = PackageStore::of(self.bundle, self.folder);
        let log = log.clone();
        let observer = Arc::new(move |_, name: &str, tensor: &Tensor| log.add(name, tensor));
        let backend = InterceptedBackend::observed(Arc::new(CpuBackend::new(programs, Precision::F32)), observer);
        let model = LoadedModel::new(self.bundle.clone(), self.folder, self.host.clone(), Box::new(backend))?;
        let width = self.bundle.model.hidden_size as usize;
        for hidden in &mut self.hidden {
            let mut session = model.start((hidden.len() / width) as u64)?;
            if !session.stands_alone(part) {
                return Err(CalibrateError::Router("feedback: gptq").into());
            }
            let mut left = session.force_layers(part, hidden, Hidden::BetweenFunctions, &Chunking::Largest)?;
            *hidden = std::mem::take(&mut left[end]);
        }
        Ok(())
    }

    /// Runs the head up to its projection; logits aren't needed.
    fn head(&self, job: &Job<'_>, log: &MomentLog) -> Result<()> {
        let Some(observed) = job.observed.first() else { return Ok(()) };
        let head =
            Executable::compile(&observed::up_to(&job.function, &observed.value), Precision::F32, &WeightCache::new())?;
        let input = &job.inputs[0];
        let width = self.bundle.model.hidden_size as usize;
        let frame = HiddenFrame::new(&self.bundle.model, &self.host);
        for hidden in &self.hidden {
            let (count, rows) = (hidden.len() / width, frame.enter(hidden));
            let columns = (0..width * count).map(|i| rows[i % count * width + i / count]).collect();
            let tensor = shaped(input, shape_of(input, count as u64), columns)?;
            let outputs = head.run(&[(&input.name, &tensor)], &mut head.new_state())?;
            outputs.iter().for_each(|(_, normed)| log.add(&observed.value, normed));
        }
        Ok(())
    }
}
