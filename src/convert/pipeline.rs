//! The conversion itself.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::compile::Compiler;
use super::emit::Emitter;
use super::error::ConvertError;
use super::functions::{DraftRequests, build_shared_package};
use super::open::{Opened, open_observed, resolve};
use super::output::{self, Existing};
use super::plan::{ConvertPlan, PackagePlan};
use super::report::{self, CalibrationReport, ConvertReport, PackageReport, RunReport};
use super::resume::{self, CALIBRATION_JOURNAL, FinishedPackage, Journal};
use super::tokenizer::{self, TextFacts};
use super::{digests, files, host, notes};
use anec_base::progress::Progress;
use anec_base::resources;
use anec_base::{FileError, Result};
use anec_bundle::Stage;
use anec_bundle::{
    Bundle, Classification, DraftFunctions, FileDigest, FunctionEntry, HostFacts, ModelFacts, PackageEntry, Pooling,
    ProjectionActivation, Task, TextEmbedding,
};
use anec_family::{FamilyFacts, FamilyModel, HostProjection, HostTensors, Purpose};
use anec_manifest::{Manifest, ResidualScale};
use anec_package::WriteOptions;
use anec_quant::ChosenCodes;
use anec_source::sentence_transformers::Dense;
use anec_source::{PoolingMode, Source, SourceWeight};
use rayon::prelude::*;

/// What to convert, and how.
pub struct ConvertOptions {
    /// The manifest; its `source` is what is converted.
    pub manifest: Manifest,
    /// The bundle's folder; `NAME.anec` in the current one if absent.
    pub out: Option<PathBuf>,
    /// Replaces a bundle of other inputs, and starts anew what was interrupted.
    pub force: bool,
    /// Compiles packages where Core ML's compiler is there.
    pub compile: bool,
    /// Where progress is shown.
    pub progress: Progress,
}

/// How a conversion ended.
#[derive(Debug)]
pub enum Outcome {
    /// A bundle was written.
    Written(Box<ConvertedBundle>),
    /// The bundle of these inputs was there already.
    UpToDate(PathBuf),
}

impl Outcome {
    /// The bundle's folder.
    pub fn path(&self) -> &Path {
        match self {
            Outcome::Written(written) => &written.path,
            Outcome::UpToDate(path) => path,
        }
    }
}

/// A bundle that was written.
#[derive(Debug)]
pub struct ConvertedBundle {
    /// Its folder.
    pub path: PathBuf,
    /// What is in it.
    pub bundle: Bundle,
    /// What was measured, and what the user should know.
    pub report: ConvertReport,
}

/// Converts a source into a bundle. Work is done by the threads of rayon's global pool.
///
/// # Errors
/// Anything that is wrong with the source, the manifest, the output folder or the disk. What was finished before stays
/// in `OUT.partial`, and the next run goes on from there.
pub fn convert(options: &ConvertOptions) -> Result<Outcome> {
    convert_opened(options, &open_observed(&options.manifest, &options.progress)?)
}

/// As [`convert`], with codes that `choose` gives, which is asked if there is something to be written.
///
/// # Errors
/// As [`convert`], and those of `choose`.
pub fn convert_chosen(options: &ConvertOptions, choose: Choose<'_>) -> Result<Outcome> {
    write(options, &open_observed(&options.manifest, &options.progress)?, Some(choose))
}

/// Chooses codes, in a folder of the conversion: an empty one, or that of an interrupted run with the same manifest and source.
pub type Choose<'a> = &'a dyn Fn(&Path) -> Result<Chosen>;

/// Codes that were chosen for a conversion.
pub struct Chosen {
    /// The codes.
    pub codes: Box<dyn ChosenCodes>,
    /// By what.
    pub report: CalibrationReport,
}

/// Converts a source that is open.
///
/// # Errors
/// As [`convert`].
pub fn convert_opened(options: &ConvertOptions, opened: &Opened) -> Result<Outcome> {
    if options.manifest.quant.is_calibrated() {
        return Err(ConvertError::NotCalibrated.into());
    }
    write(options, opened, None)
}

fn write(options: &ConvertOptions, opened: &Opened, choose: Option<Choose<'_>>) -> Result<Outcome> {
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
    let plan = ConvertPlan::new(&manifest, model)?;
    let name = manifest.name.clone().unwrap_or_default();
    let path = options.out.clone().unwrap_or_else(|| PathBuf::from(format!("{name}.anec")));
    let path = output::target(&path)?;
    if output::existing(&path, &manifest, source, options.force)? == Existing::UpToDate {
        return Ok(Outcome::UpToDate(path));
    }
    let partial = output::partial(&path);
    let mut journal = Journal::open(&partial, resume::inputs(&manifest, source), options.force)?;
    let mut host = model.host(plan.contexts.last().copied().unwrap_or(1))?;
    if matches!(model.facts().purpose, Purpose::TextEmbedding { .. }) {
        host.projections = projections(source)?;
    }
    let calibration = partial.join(journal.calibration());
    let chosen = match choose.map(|choose| choose_in(&calibration, choose)).transpose() {
        Ok(chosen) => chosen,
        Err(error) => {
            journal.discard_if_empty(&partial);
            return Err(error);
        }
    };
    let mut run = Run {
        manifest: &manifest,
        chosen: chosen.as_ref().map(|chosen| &*chosen.codes),
        source,
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

    // the source is digested beside the conversion: it is read anyway
    let (digests, converted) = rayon::join(|| digests::source_facts(source), || run.write_all(&mut journal, &host));
    let (packages, host_facts, text) = match converted {
        Ok(converted) => converted,
        Err(error) => {
            journal.discard_if_empty(&partial);
            return Err(error);
        }
    };
    let mut entries: Vec<PackageEntry> = packages.iter().map(|p| p.entry.clone()).collect();
    if options.compile {
        run.compile(&mut entries)?;
    }
    let facts = model.facts();
    let [of_model, of_draft] = run.divided(&packages);
    let bundle = Bundle {
        schema_version: anec_bundle::SCHEMA_VERSION,
        anec_version: env!("CARGO_PKG_VERSION").into(),
        name: name.clone(),
        family: facts.family.clone(),
        model: ModelFacts {
            hidden_scale: facts.hidden_scale,
            hidden_size: facts.hidden_size,
            num_layers: facts.num_layers,
            vocab_size: facts.vocab_size,
            contexts: plan.contexts.clone(),
            eos_token_ids: text.eos_token_ids,
            bos_token_id: text.bos_token_id,
            task: task(facts, &plan, &manifest, source)?,
        },
        config: facts.config.clone(),
        manifest: manifest.clone(),
        transforms: model.transformed().done,
        source: digests?,
        packages: entries,
        functions: of_model,
        draft: plan.draft.is_some().then_some(DraftFunctions { functions: of_draft }),
        host: host_facts,
        tokenizer: text.files,
        tokenizer_files: text.digests,
        ledger: ledger.clone(),
    };
    let usage = resources::usage().unwrap_or_default();
    let weights: u64 = bundle.packages.iter().flat_map(|p| &p.files).map(|f| f.bytes).sum();
    let mut report = ConvertReport {
        anec_version: bundle.anec_version.clone(),
        name,
        run: RunReport {
            source_bytes: source.files().iter().map(|f| f.size()).sum(),
            bundle_bytes: weights + bundle.host.file.bytes,
            seconds: begin.elapsed().as_secs_f64(),
            cpu_seconds: usage.cpu_seconds,
            peak_memory_bytes: usage.peak_memory_bytes,
            threads: rayon::current_num_threads(),
            resumed_packages,
        },
        packages: packages.into_iter().map(|p| p.report).collect(),
        notes: run.notes,
        calibration: chosen.as_ref().map(|chosen| chosen.report.clone()),
        plan: None,
    };
    report.notes.extend(notes::of_losses(&report));
    report.notes.extend(notes::of_source(&manifest, source, &bundle));
    files::write_json(&partial.join(report::FILE_NAME), &report)?;
    files::write_json(&partial.join(anec_bundle::FILE_NAME), &bundle)?;
    drop(chosen);
    journal.remove_calibration(&partial)?;
    output::publish(&partial, &path)?;
    options.progress.finish();
    Ok(Outcome::Written(Box::new(ConvertedBundle { path, bundle, report })))
}

/// Chooses codes in a folder. One in which nothing was finished isn't kept.
fn choose_in(folder: &Path, choose: Choose<'_>) -> Result<Chosen> {
    std::fs::create_dir_all(folder).map_err(FileError::of(folder, "create"))?;
    choose(folder).inspect_err(|_| {
        if !folder.join(CALIBRATION_JOURNAL).exists() {
            // the failure of the run is what is told
            let _ = std::fs::remove_dir_all(folder);
        }
    })
}

/// What the model is for.
fn task(facts: &FamilyFacts, plan: &ConvertPlan, manifest: &Manifest, source: &Source) -> Result<Task> {
    Ok(match facts.purpose.clone() {
        Purpose::TextGeneration => Task::TextGeneration,
        Purpose::TokenClassification(label_set) => {
            let (window, halo) = (manifest.lengths.largest(), plan.most_layers() * label_set.band);
            let stride = window.saturating_sub(2 * halo);
            Task::TokenClassification(Classification { label_set, window, halo, stride })
        }
        Purpose::TextEmbedding { bidirectional, pooling } => {
            let modules = source.sentence_transformers()?;
            Task::TextEmbedding(TextEmbedding {
                bidirectional,
                pooling: modules.as_ref().map_or(pooling, |modules| match modules.pooling {
                    PoolingMode::Mean => Pooling::Mean,
                    PoolingMode::Cls => Pooling::Cls,
                    PoolingMode::Last => Pooling::Last,
                }),
                projections: host::projections(&projections(source)?),
                normalize: modules.is_some_and(|modules| modules.normalize),
            })
        }
        Purpose::SequenceClassification(classification) => Task::SequenceClassification(classification),
    })
}

/// The projections of what is pooled.
fn projections(source: &Source) -> Result<Vec<HostProjection>> {
    let dense = source.sentence_transformers()?.map_or_else(Vec::new, |modules| modules.dense);
    let projection = |dense: &Dense| HostProjection {
        weight: SourceWeight::from(dense.weight.clone()),
        bias: dense.bias.clone().map(SourceWeight::from),
        activation: if dense.tanh { ProjectionActivation::Tanh } else { ProjectionActivation::Identity },
    };
    Ok(dense.iter().map(projection).collect())
}

/// Files that are written at once, at most. Each holds a graph and some pieces in memory.
const AT_ONCE: usize = 4;

/// A file, or folder of files, to write.
enum Job<'a> {
    Host(&'a HostTensors),
    Package(&'a PackagePlan),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A conversion at work.
struct Run<'a> {
    manifest: &'a Manifest,
    chosen: Option<&'a dyn ChosenCodes>,
    source: &'a Source,
    model: &'a dyn FamilyModel,
    plan: &'a ConvertPlan,
    folder: &'a Path,
    progress: &'a Progress,
    notes: Vec<String>,
}

impl Run<'_> {
    /// All packages: the model's, then those of the layer that drafts.
    fn packages(&self) -> impl Iterator<Item = &PackagePlan> {
        self.plan.packages.iter().chain(self.plan.draft.iter().flat_map(|draft| &draft.packages))
    }

    /// The model whose layers a package holds, and the functions of the layer that drafts in it, if it has some among others.
    fn models_of(&self, plan: &PackagePlan) -> (&dyn FamilyModel, Option<DraftRequests<'_>>) {
        let (Some(planned), Some(draft)) = (&self.plan.draft, self.model.draft()) else { return (self.model, None) };
        match planned.heads.get(&plan.name) {
            Some(requests) => (self.model, Some(DraftRequests { model: draft, requests })),
            None if planned.packages.iter().any(|package| package.name == plan.name) => (draft, None),
            None => (self.model, None),
        }
    }

    /// The functions of packages that are the model's, and those that are the drafting layer's: of packages of its own first.
    fn divided(&self, packages: &[FinishedPackage]) -> [Vec<FunctionEntry>; 2] {
        let mut divided = [Vec::new(), Vec::new()];
        let mut heads = Vec::new();
        for (plan, finished) in self.packages().zip(packages) {
            let own = plan.functions.len().min(finished.functions.len());
            let of_draft = self
                .plan
                .draft
                .as_ref()
                .is_some_and(|draft| draft.packages.iter().any(|package| package.name == plan.name));
            divided[usize::from(of_draft)].extend_from_slice(&finished.functions[..own]);
            heads.extend_from_slice(&finished.functions[own..]);
        }
        divided[1].append(&mut heads);
        divided
    }

    /// Refuses to begin what the disk can't hold.
    fn check_space(&self, journal: &Journal, host: &HostTensors) -> Result<()> {
        let packages = self.packages().filter(|p| !journal.packages.contains_key(&p.name));
        let mut needed: u64 = packages.map(|p| p.weight_bytes).sum();
        if journal.host.is_none() {
            needed += host::bytes(host);
        }
        self.progress.expect(needed);
        // graphs, tokenizer and bundle.json take a few megabytes
        let needed = needed + (16 << 20);
        Ok(anec_package::check_space(self.folder, needed)?)
    }

    /// Computes what weights depend on, several vectors at a time: whoever needs one later would compute it alone.
    fn compute_deferred(&self) -> Result<()> {
        let deferred = self.model.transformed().deferred;
        if !deferred.is_empty() {
            self.progress.stage("transforms");
        }
        let compute = |vector: &SourceWeight| vector.read(0, &mut vec![0.0; vector.elements() as usize]);
        Ok(deferred.par_iter().try_for_each(compute)?)
    }

    /// Writes all files but `bundle.json` and the report, several at a time: only so do threads that write files and
    /// digest them not wait for each other.
    fn write_all(
        &self,
        journal: &mut Journal,
        host: &HostTensors,
    ) -> Result<(Vec<FinishedPackage>, HostFacts, TextFacts)> {
        let text = tokenizer::write(self.folder, self.source, self.model.facts().vocab_size)?;
        // the largest first
        let host_job = journal.host.is_none().then_some(Job::Host(host));
        let packages = self.packages().filter(|p| !journal.packages.contains_key(&p.name)).map(Job::Package);
        let jobs: Vec<Job> = host_job.into_iter().chain(packages).collect();
        let journal = Mutex::new(journal);
        let next = AtomicUsize::new(0);
        let failures = Mutex::new(BTreeMap::new());
        let work = || {
            while lock(&failures).is_empty() {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(job) = jobs.get(index) else { break };
                if let Err(error) = self.work(job, &journal) {
                    lock(&failures).insert(index, error);
                }
            }
        };
        let at_once = rayon::current_num_threads().min(AT_ONCE);
        rayon::scope(|pool| (0..at_once).for_each(|_| pool.spawn(|_| work())));
        // those before the first that failed were all begun, and ended well: it is the same one every time
        if let Some((_, error)) = failures.into_inner().unwrap_or_else(PoisonError::into_inner).pop_first() {
            return Err(error);
        }
        let mut journal = lock(&journal);
        journal.save()?;
        let packages = self.packages().filter_map(|p| journal.packages.get(&p.name).cloned()).collect();
        Ok((packages, journal.host.clone().expect("the host's file was just written"), text))
    }

    /// Writes what a job asks for and notes that it is there.
    fn work(&self, job: &Job<'_>, journal: &Mutex<&mut Journal>) -> Result<()> {
        match job {
            Job::Package(plan) => {
                let finished = self.write_package(plan)?;
                let mut journal = lock(journal);
                journal.packages.insert(plan.name.clone(), finished);
                journal.save_often()?;
            }
            Job::Host(host) => {
                self.progress.stage("host tensors");
                let path = self.folder.join(host::FILE_NAME);
                let facts = host::write(&path, host, self.manifest.quant.overflow, self.progress)?;
                let mut journal = lock(journal);
                journal.host = Some(facts);
                journal.save_often()?;
            }
        }
        Ok(())
    }

    /// Builds, checks and writes one package.
    fn write_package(&self, plan: &PackagePlan) -> Result<FinishedPackage> {
        let begin = Instant::now();
        self.progress.stage(&plan.name);
        let package = format!("{}.mlpackage", plan.name);
        let mut emitter = Emitter::new(&self.manifest.quant).chosen(self.chosen);
        let (model, draft) = self.models_of(plan);
        let (program, functions) = build_shared_package(model, &self.plan.form, plan, draft, &mut emitter)?;
        let progress = |step| match step {
            anec_package::WriteProgress::Prepared(_) => {}
            anec_package::WriteProgress::Written(bytes) => self.progress.add(bytes),
        };
        // what a killed run finished is in the journal; a package that isn't may still be there
        let metadata = self.metadata(plan);
        let options = WriteOptions { metadata, progress: Some(&progress), replace: true, ..Default::default() };
        let written = anec_package::write(&program, &self.folder.join(&package), &options)?;
        let weight_bytes = written.weight_bytes;
        let report = PackageReport {
            package: package.clone(),
            weight_bytes,
            seconds: begin.elapsed().as_secs_f64(),
            tensors: emitter.reports(),
        };
        let in_bundle = |file: &anec_package::WrittenFile| FileDigest {
            file: format!("{package}/{}", file.path),
            bytes: file.bytes,
            digest: file.digest.clone(),
        };
        let files = written.files.iter().map(in_bundle).collect();
        let entry = PackageEntry { package: package.clone(), compiled: None, weight_bytes, files };
        Ok(FinishedPackage { entry, functions, report })
    }

    /// What a package says of itself.
    fn metadata(&self, plan: &PackagePlan) -> anec_package::PackageMetadata {
        let name = self.manifest.name.as_deref().unwrap_or_default();
        let part = match plan.stage {
            Stage::Layers { .. } if plan.name.starts_with("draft_") => "the layer that drafts".to_owned(),
            Stage::Layers { first, end } => format!("layers {first} to {}", end - 1),
            Stage::FeedForward { layer } => format!("layer {layer}, feed-forward network"),
            Stage::Experts { layer, first, end } => format!("layer {layer}, experts {first} to {}", end - 1),
            Stage::Head { first, end } if self.model.facts().is_bidirectional() => {
                format!("classifier, labels {first} to {}", end - 1)
            }
            Stage::Head { first, end } => format!("LM head, rows {first} to {}", end - 1),
        };
        let own = [
            ("anec.version", env!("CARGO_PKG_VERSION")),
            // quantized programs are known to stop Core ML's GPU compiler
            ("anec.compute_units", "cpuAndNeuralEngine"),
        ];
        anec_package::PackageMetadata {
            short_description: format!("{name}: {part}"),
            user_defined: own.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
            ..Default::default()
        }
    }

    /// Compiles the packages, or notes why not.
    fn compile(&mut self, entries: &mut [PackageEntry]) -> Result<()> {
        match Compiler::find() {
            Ok(compiler) => {
                for entry in entries {
                    self.progress.stage(&format!("compiling {}", entry.package));
                    entry.compiled = Some(compiler.compile(self.folder, &entry.package)?);
                }
            }
            Err(ConvertError::NoCompiler(why)) => {
                self.notes.push(format!("packages are not compiled ({why}); on a Mac, `anec compile` does it"));
            }
            Err(other) => return Err(other.into()),
        }
        Ok(())
    }
}
