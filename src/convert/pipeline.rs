//! The conversion itself.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::coreai;
use super::error::ConvertError;
use super::open::{Opened, open_observed, resolve};
use super::output::{self, Existing};
use super::plan::ConvertPlan;
use super::report::{self, CalibrationReport, ConvertReport, RunReport};
use super::resume::{self, CALIBRATION_JOURNAL, FinishedPackage, Journal};
use super::run::{ConversionRun, WrittenParts};
use super::tokenizer::{TokenizerCheck, TokenizerFiles};
use super::{digests, files, host, notes};
use anec_base::{FileError, Progress, Result, resources};
use anec_bundle::{
    Bundle, Classification, DraftFunctions, LedgerTotals, ModelFacts, Pooling, ProjectionActivation, SourceFacts, Task,
    TextEmbedding, WHOLE_TEXT,
};
use anec_family::{FamilyFacts, HostProjection, HostTensors, Purpose};
use anec_manifest::{Manifest, ResidualScale};
use anec_quant::ChosenCodes;
use anec_source::sentence_transformers::{Dense, PoolingMode};
use anec_source::{Source, SourceWeight};

/// Options of a conversion.
#[non_exhaustive]
pub struct ConvertOptions {
    /// Manifest, which names the source.
    pub manifest: Manifest,
    /// Bundle folder; default: `NAME.anec` in the current folder.
    pub out: Option<PathBuf>,
    /// Replaces a bundle of other inputs, and restarts an interrupted conversion.
    pub force: bool,
    /// Replaces a bundle of other inputs, and resumes an interrupted conversion.
    pub replace: bool,
    /// Compiles packages if Core ML's compiler is available.
    pub compile: bool,
    /// Receiver of progress events.
    pub progress: Progress,
    /// Check of the tokenizer; the report contains its objections.
    pub check_tokenizer: Option<TokenizerCheck>,
}

impl ConvertOptions {
    /// Returns options that replace nothing, compile nothing, check no tokenizer and show no progress.
    pub fn new(manifest: Manifest) -> Self {
        let progress = Progress::hidden();
        let (force, replace, compile) = (false, false, false);
        ConvertOptions { manifest, out: None, force, replace, compile, progress, check_tokenizer: None }
    }
}

/// Outcome of a conversion.
#[derive(Debug)]
pub enum Outcome {
    /// Bundle was written.
    Written(Box<ConvertedBundle>),
    /// Bundle of these inputs existed already.
    UpToDate(PathBuf),
}

impl Outcome {
    /// Bundle folder.
    pub fn path(&self) -> &Path {
        match self {
            Outcome::Written(written) => &written.path,
            Outcome::UpToDate(path) => path,
        }
    }
}

/// Written bundle.
#[derive(Debug)]
pub struct ConvertedBundle {
    /// Bundle folder.
    pub path: PathBuf,
    /// Description of the bundle.
    pub bundle: Bundle,
    /// Measurements and notes.
    pub report: ConvertReport,
}

/// Converts a source into a bundle, on rayon's global thread pool.
///
/// # Errors
/// Returns any error of the source, the manifest, the output folder or the disk. Finished files remain in
/// `OUT.partial`, where the next run resumes.
pub fn convert(options: &ConvertOptions) -> Result<Outcome> {
    convert_opened(options, &open_observed(&options.manifest, &options.progress)?)
}

/// Converts like [`convert`], with steps of the caller, which are called if anything has to be written.
///
/// # Errors
/// Returns any error from [`convert`] and from [`ConvertSteps::choose`].
pub fn convert_with(options: &ConvertOptions, steps: ConvertSteps<'_>) -> Result<Outcome> {
    write(options, &open_observed(&options.manifest, &options.progress)?, steps)
}

/// Steps of a conversion that need more than this crate.
#[derive(Clone, Copy, Default)]
pub struct ConvertSteps<'a> {
    /// Chooses codes.
    pub choose: Option<Choose<'a>>,
    /// Adds to the report of a complete bundle of packages, before it gets its name or becomes an asset of Core AI.
    pub measure: Option<&'a dyn Fn(&mut ConvertedBundle)>,
}

/// Function that chooses codes, given a folder: empty, or that of an interrupted run with the same manifest and source.
pub type Choose<'a> = &'a dyn Fn(&Path) -> Result<Chosen>;

/// Codes chosen for a conversion.
pub struct Chosen {
    /// Codes.
    pub codes: Box<dyn ChosenCodes>,
    /// Report of the calibration.
    pub report: CalibrationReport,
}

/// Converts an open source.
///
/// # Errors
/// Returns any error from [`convert`].
pub fn convert_opened(options: &ConvertOptions, opened: &Opened) -> Result<Outcome> {
    if options.manifest.quant.is_calibrated() {
        return Err(ConvertError::NotCalibrated.into());
    }
    write(options, opened, ConvertSteps::default())
}

fn write(options: &ConvertOptions, opened: &Opened, steps: ConvertSteps<'_>) -> Result<Outcome> {
    let begin = Instant::now();
    let Opened { source, model, ledger } = opened;
    if options.manifest.numerics.scale == Some(ResidualScale::Auto) {
        return Err(ConvertError::ScaleNotMeasured.into());
    }
    let model = &**model;
    let manifest = resolve(&options.manifest, source, model);
    if manifest.quant.plan.is_some() {
        return Err(ConvertError::NotPlanned.into());
    }
    let read = || TokenizerFiles::read(source, model.facts().vocab_size, options.check_tokenizer);
    // faster than reading the tokenizer, so done in parallel
    let planned = || -> Result<(ConvertPlan, HostTensors)> {
        let plan = ConvertPlan::to_convert(&manifest, model)?;
        let host = model.host(plan.contexts.last().copied().unwrap_or(1))?;
        Ok((plan, host))
    };
    let (planned, text) = rayon::join(planned, read);
    let (plan, mut host) = planned?;
    let name = manifest.name.clone().unwrap_or_default();
    let path = output::bundle_path(options.out.as_deref(), &name)?;
    if output::existing(&path, &manifest, source, options.force || options.replace)? == Existing::UpToDate {
        return Ok(Outcome::UpToDate(path));
    }
    let text = text?;
    let partial = output::partial(&path);
    let mut journal = Journal::open(&partial, resume::inputs(&manifest, source), options.force)?;
    if matches!(model.facts().purpose, Purpose::TextEmbedding { .. }) {
        host.projections.extend(projections(source)?);
    }
    let calibration = partial.join(journal.calibration());
    let chosen = match steps.choose.map(|choose| choose_in(&calibration, choose)).transpose() {
        Ok(chosen) => chosen,
        Err(error) => {
            journal.discard_after(&error, &partial);
            return Err(error);
        }
    };
    let mut run = ConversionRun {
        manifest: &manifest,
        chosen: chosen.as_ref().map(|chosen| &*chosen.codes),
        model,
        plan: &plan,
        folder: &partial,
        progress: &options.progress,
        notes: notes::of_plan(&plan, model),
    };
    run.notes.extend(notes::of_transforms(&options.manifest, &manifest, model));
    run.check_space(&journal, &host)?;
    let resumed_packages = journal.packages.len();
    run.compute_deferred()?;

    // the conversion reads most of the source, so it is digested on the way instead of being read again
    source.digest_released();
    let mut written = match run.write_all(&mut journal, &host, text) {
        Ok(written) => written,
        Err(error) => {
            journal.discard_after(&error, &partial);
            return Err(error);
        }
    };
    if options.compile && manifest.format.is_coreml() {
        run.compile(&mut written.packages)?;
    }
    let task = task(model.facts(), &plan, &manifest, source, &host.projections)?;
    let bundle = bundle(&run, &written, name, task, digests::source_facts(source)?, ledger);
    let assembly = (!manifest.format.is_coreml()).then(|| coreai::assemble(&bundle, &partial)).transpose()?;
    let run_report = run_report(&bundle, source, begin.elapsed().as_secs_f64(), resumed_packages);
    let mut report = ConvertReport {
        anec_version: bundle.anec_version.clone(),
        name: bundle.name.clone(),
        run: run_report,
        packages: written.packages.into_iter().map(|package| package.report).collect(),
        notes: run.notes,
        calibration: chosen.as_ref().map(|chosen| chosen.report.clone()),
        quality: None,
        plan: None,
    };
    report.notes.extend(coreai::note(&manifest));
    report.notes.extend(notes::of_losses(&report));
    report.notes.extend(notes::of_integers(&report, source));
    report.notes.extend(notes::of_source(&manifest, source, &bundle));
    report.notes.extend(written.text.notes.iter().cloned());
    report.notes.extend(written.text.unreadable.as_deref().map(notes::of_tokenizer));
    drop(chosen);
    let mut converted = ConvertedBundle { path: partial.clone(), bundle, report };
    let describe = |bundle: &Bundle| files::write_json(&partial.join(anec_bundle::FILE_NAME), bundle);
    describe(&converted.bundle)?;
    if let Some(measure) = steps.measure {
        measure(&mut converted);
    }
    if let Some(assembly) = assembly {
        converted.bundle = coreai::link(assembly, &converted.bundle, &partial, &options.progress)?;
        describe(&converted.bundle)?;
    }
    files::write_json(&partial.join(report::FILE_NAME), &converted.report)?;
    journal.remove_calibration(&partial)?;
    output::publish(&partial, &path)?;
    options.progress.finish();
    Ok(Outcome::Written(Box::new(ConvertedBundle { path, ..converted })))
}

/// Description of the written files.
fn bundle(
    run: &ConversionRun<'_>,
    written: &WrittenParts,
    name: String,
    task: Task,
    source: SourceFacts,
    ledger: &LedgerTotals,
) -> Bundle {
    let (manifest, plan) = (run.manifest, run.plan);
    let facts = run.model.facts();
    let [of_model, of_draft] = run.divided(&written.packages);
    Bundle {
        schema_version: anec_bundle::SCHEMA_VERSION,
        anec_version: env!("CARGO_PKG_VERSION").into(),
        name,
        family: facts.family.clone(),
        model: ModelFacts {
            hidden_scale: facts.hidden_scale,
            hidden_size: facts.hidden_size,
            num_layers: facts.num_layers,
            vocab_size: facts.vocab_size,
            contexts: plan.contexts.clone(),
            eos_token_ids: written.text.eos_token_ids.clone(),
            bos_token_id: written.text.bos_token_id,
            task,
        },
        config: facts.config.clone(),
        manifest: manifest.clone(),
        transforms: run.model.transformed().done,
        source,
        packages: written.packages.iter().map(|package| package.entry.clone()).collect(),
        functions: of_model,
        draft: plan.draft.is_some().then_some(DraftFunctions { functions: of_draft }),
        host: written.host.clone(),
        tokenizer: written.text.files.clone(),
        tokenizer_files: written.text.digests.clone(),
        ledger: LedgerTotals { kept: kept(&written.packages), ..ledger.clone() },
    }
}

/// Number of tensors whose integers the packages keep.
fn kept(packages: &[FinishedPackage]) -> usize {
    let tensors = packages.iter().flat_map(|package| &package.report.tensors).filter(|tensor| tensor.kept);
    tensors.flat_map(|tensor| &tensor.tensors).collect::<BTreeSet<_>>().len()
}

/// Measurements of the run.
fn run_report(bundle: &Bundle, source: &Source, seconds: f64, resumed_packages: usize) -> RunReport {
    let usage = resources::usage().unwrap_or_default();
    let weights: u64 = bundle.packages.iter().flat_map(|package| &package.files).map(|file| file.bytes).sum();
    RunReport {
        source_bytes: source.files().iter().map(|f| f.size()).sum(),
        bundle_bytes: weights + bundle.host.file.bytes,
        seconds,
        cpu_seconds: usage.cpu_seconds,
        peak_memory_bytes: usage.peak_memory_bytes,
        threads: rayon::current_num_threads(),
        resumed_packages,
    }
}

/// Chooses codes in a folder, which is removed if nothing was finished in it.
fn choose_in(folder: &Path, choose: Choose<'_>) -> Result<Chosen> {
    std::fs::create_dir_all(folder).map_err(FileError::of(folder, "create"))?;
    choose(folder).inspect_err(|_| {
        if !folder.join(CALIBRATION_JOURNAL).exists() {
            // report the run's own failure
            let _ = std::fs::remove_dir_all(folder);
        }
    })
}

/// Task of the model.
fn task(
    facts: &FamilyFacts,
    plan: &ConvertPlan,
    manifest: &Manifest,
    source: &Source,
    projections: &[HostProjection],
) -> Result<Task> {
    Ok(match facts.purpose.clone() {
        Purpose::TextGeneration => Task::TextGeneration,
        Purpose::TokenClassification(label_set) => {
            let window = manifest.lengths.largest();
            let (halo, stride) = match label_set.band {
                WHOLE_TEXT => (0, 0),
                band => (plan.most_layers() * band, window.saturating_sub(2 * plan.most_layers() * band)),
            };
            Task::TokenClassification(Classification { label_set, window, halo, stride })
        }
        Purpose::TextEmbedding { bidirectional, pooling } => {
            let modules = source.sentence_transformers()?;
            let pooling = modules.as_ref().map_or(pooling, |modules| match modules.pooling {
                PoolingMode::Mean => Pooling::Mean,
                PoolingMode::Cls => Pooling::Cls,
                PoolingMode::Last => Pooling::Last,
            });
            Task::TextEmbedding(TextEmbedding {
                bidirectional,
                pooling,
                projections: host::projections(projections),
                normalize: modules.as_ref().is_some_and(|modules| modules.normalize),
                texts: modules.map(|modules| modules.texts).unwrap_or_default(),
            })
        }
        Purpose::SequenceClassification(classification) => Task::SequenceClassification(classification),
    })
}

/// Projections after pooling that modules of sentence-transformers describe.
fn projections(source: &Source) -> Result<Vec<HostProjection>> {
    let dense = source.sentence_transformers()?.map_or_else(Vec::new, |modules| modules.dense);
    let projection = |dense: &Dense| HostProjection {
        weight: SourceWeight::from(dense.weight.clone()),
        bias: dense.bias.clone().map(SourceWeight::from),
        activation: if dense.tanh { ProjectionActivation::Tanh } else { ProjectionActivation::Identity },
    };
    Ok(dense.iter().map(projection).collect())
}
