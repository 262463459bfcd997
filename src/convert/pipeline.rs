//! The conversion itself.

use std::path::{Path, PathBuf};
use std::time::Instant;

use super::bundle::{
    self, Bundle, FileDigest, FunctionEntry, HostFacts, ModelFacts, PackageEntry, SourceFacts, Tokens,
};
use super::compile::{self, Compiler};
use super::emit::Emitter;
use super::error::ConvertError;
use super::plan::{PackagePlan, Plan};
use super::progress::Progress;
use super::report::{self, PackageReport, Report, RunReport};
use super::resume::{self, FinishedPackage, Journal};
use super::tokenizer::{self, TextFacts};
use super::{files, host, resources};
use crate::error::Result;
use crate::family::ports::Stage;
use crate::family::{self, Form, FunctionRequest, Host, Model, TokenCount};
use crate::manifest::{Manifest, ResidualScale};
use crate::mil::Program;
use crate::mil::verify::verify;
use crate::package::{self, WriteOptions};
use crate::source::{Ledger, LedgerTotals, Source};

/// What to convert, and how.
pub struct Options {
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
    Written(Box<Written>),
    /// The bundle of these inputs was there already.
    UpToDate(PathBuf),
}

/// A bundle that was written.
#[derive(Debug)]
pub struct Written {
    /// Its folder.
    pub path: PathBuf,
    /// What is in it.
    pub bundle: Bundle,
    /// What was measured.
    pub report: Report,
    /// What the user should know: one sentence each.
    pub notes: Vec<String>,
}

/// A source with the model that was found in it.
pub struct Opened {
    /// The source.
    pub source: Source,
    /// The model.
    pub model: Box<dyn Model>,
    /// The account of the source's tensors.
    pub ledger: LedgerTotals,
}

/// Opens the source that a manifest names, and the model in it.
///
/// # Errors
/// When there is no source, it can't be read, or its model isn't understood in every tensor and key.
pub fn open(manifest: &Manifest) -> Result<Opened> {
    let name = manifest.source.as_deref().ok_or(ConvertError::NoSource)?;
    let source = Source::open(name)?;
    let (model, ledger) = open_model(&source, manifest)?;
    Ok(Opened { source, model, ledger })
}

/// Opens the model of a source.
///
/// # Errors
/// When it isn't understood in every tensor and key.
pub fn open_model(source: &Source, manifest: &Manifest) -> Result<(Box<dyn Model>, LedgerTotals)> {
    let mut ledger = Ledger::new(source);
    let mut model = family::open(&mut ledger, manifest.family.as_deref(), &manifest.acknowledge)?;
    if manifest.numerics.factor() != 1.0 {
        model.scale_residual(manifest.numerics.factor());
    }
    Ok((model, ledger.finish()?))
}

/// The manifest with what the source decides and all defaults filled in.
pub fn resolve(manifest: &Manifest, source: &Source, model: &dyn Model) -> Manifest {
    let mut manifest = manifest.clone();
    manifest.kv_write = Some(manifest.kv_write());
    manifest.family = Some(model.facts().family.clone());
    manifest.source = Some(source.name().to_owned());
    manifest.name.get_or_insert_with(|| name_of(source.name()));
    manifest
}

/// A bundle's name, where the manifest gives none: the last part of the source's, without extension.
pub fn name_of(source: &str) -> String {
    let name = source.trim_end_matches('/').rsplit(['/', ':']).next().unwrap_or(source);
    let name = name.split('@').next().unwrap_or(name);
    let name = name.strip_suffix(".gguf").or_else(|| name.strip_suffix(".safetensors")).unwrap_or(name);
    let name: String = name.chars().map(|c| if c.is_alphanumeric() || "-_.+".contains(c) { c } else { '_' }).collect();
    match name.trim_start_matches('.') {
        "" => "model".into(),
        name => name.into(),
    }
}

/// Converts a source into a bundle. Work is done by the threads of rayon's global pool.
///
/// # Errors
/// Anything that is wrong with the source, the manifest, the output folder or the disk. What was finished before stays
/// in `OUT.partial`, and the next run goes on from there.
pub fn convert(options: &Options) -> Result<Outcome> {
    let opened = open(&options.manifest)?;
    convert_opened(options, &opened)
}

/// Converts a source that is open.
///
/// # Errors
/// As [`convert`].
pub fn convert_opened(options: &Options, opened: &Opened) -> Result<Outcome> {
    let begin = Instant::now();
    let Opened { source, model, ledger } = opened;
    if options.manifest.numerics.scale == ResidualScale::Auto {
        return Err(ConvertError::ScaleNotMeasured.into());
    }
    let model = &**model;
    let manifest = resolve(&options.manifest, source, model);
    let plan = Plan::new(&manifest, model)?;
    let name = manifest.name.clone().unwrap_or_default();
    let path = options.out.clone().unwrap_or_else(|| PathBuf::from(format!("{name}.anec")));
    if let Some(outcome) = existing(&path, &manifest, source, options.force)? {
        return Ok(outcome);
    }
    let partial = with_suffix(&path, ".partial");
    let mut journal = Journal::open(&partial, resume::inputs(&manifest, source), options.force)?;
    let host = model.host(plan.contexts.last().copied().unwrap_or(1))?;
    let mut run = Run {
        manifest: &manifest,
        source,
        model,
        plan: &plan,
        folder: &partial,
        progress: &options.progress,
        notes: notes(&plan, model),
    };
    run.check_space(&journal, &host)?;
    let resumed_packages = journal.packages.len();

    // the source is digested beside the conversion: it is read anyway
    let (digests, converted) = rayon::join(|| source_facts(source), || run.write_all(&mut journal, &host));
    let (packages, host_facts, text) = converted?;
    let mut entries: Vec<PackageEntry> = packages.iter().map(|p| p.entry.clone()).collect();
    if options.compile {
        run.compile(&mut entries)?;
    }
    let facts = model.facts();
    let bundle = Bundle {
        schema_version: bundle::SCHEMA_VERSION,
        anec_version: env!("CARGO_PKG_VERSION").into(),
        name: name.clone(),
        family: facts.family.clone(),
        model: ModelFacts {
            hidden_size: facts.hidden_size,
            num_layers: facts.num_layers,
            vocab_size: facts.vocab_size,
            contexts: plan.contexts.clone(),
            eos_token_ids: text.eos_token_ids,
            bos_token_id: text.bos_token_id,
        },
        config: facts.config.clone(),
        manifest: manifest.clone(),
        source: digests?,
        packages: entries,
        functions: packages.iter().flat_map(|p| p.functions.clone()).collect(),
        host: host_facts,
        tokenizer: text.files,
        ledger: ledger.clone(),
    };
    let usage = resources::usage().unwrap_or_default();
    let weights: u64 = bundle.packages.iter().flat_map(|p| &p.files).map(|f| f.bytes).sum();
    let report = Report {
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
    };
    files::write_json(&partial.join(report::FILE_NAME), &report)?;
    files::write_json(&partial.join(bundle::FILE_NAME), &bundle)?;
    journal.remove()?;
    publish(&partial, &path)?;
    options.progress.finish();
    Ok(Outcome::Written(Box::new(Written { path, bundle, report, notes: run.notes })))
}

/// A conversion at work.
struct Run<'a> {
    manifest: &'a Manifest,
    source: &'a Source,
    model: &'a dyn Model,
    plan: &'a Plan,
    folder: &'a Path,
    progress: &'a Progress,
    notes: Vec<String>,
}

impl Run<'_> {
    /// Refuses to begin what the disk can't hold.
    fn check_space(&self, journal: &Journal, host: &Host) -> Result<()> {
        let packages = self.plan.packages.iter().filter(|p| !journal.packages.contains_key(&p.name));
        let mut needed: u64 = packages.map(|p| p.weight_bytes).sum();
        if journal.host.is_none() {
            needed += host::bytes(host);
        }
        self.progress.expect(needed);
        // graphs, tokenizer and bundle.json take a few megabytes
        let needed = needed + (16 << 20);
        Ok(package::check_space(self.folder, needed)?)
    }

    /// Writes all files but `bundle.json` and the report.
    fn write_all(&self, journal: &mut Journal, host: &Host) -> Result<(Vec<FinishedPackage>, HostFacts, TextFacts)> {
        let text = tokenizer::write(self.folder, self.source, self.model.facts().vocab_size)?;
        let mut packages = Vec::new();
        for plan in &self.plan.packages {
            let finished = match journal.packages.get(&plan.name) {
                Some(finished) => finished.clone(),
                None => {
                    let finished = self.write_package(plan)?;
                    journal.packages.insert(plan.name.clone(), finished.clone());
                    journal.save()?;
                    finished
                }
            };
            packages.push(finished);
        }
        let host = match &journal.host {
            Some(facts) => facts.clone(),
            None => {
                self.progress.stage("host tensors");
                let path = self.folder.join(host::FILE_NAME);
                let facts = host::write(&path, host, self.manifest.quant.overflow, self.progress)?;
                journal.host = Some(facts.clone());
                journal.save()?;
                facts
            }
        };
        Ok((packages, host, text))
    }

    /// Builds, checks and writes one package.
    fn write_package(&self, plan: &PackagePlan) -> Result<FinishedPackage> {
        let begin = Instant::now();
        self.progress.stage(&plan.name);
        let package = format!("{}.mlpackage", plan.name);
        let mut emitter = Emitter::new(&self.manifest.quant);
        let (program, functions) = build_package(self.model, &self.plan.form, plan, &mut emitter)?;
        let progress = |step| match step {
            package::Progress::Prepared(_) => {}
            package::Progress::Written(bytes) => self.progress.add(bytes),
        };
        // what a killed run finished is in the journal; a package that isn't may still be there
        let metadata = self.metadata(plan);
        let options = WriteOptions { metadata, progress: Some(&progress), replace: true, ..Default::default() };
        let written = package::write(&program, &self.folder.join(&package), &options)?;
        let weight_bytes = written.weight_bytes;
        let report = PackageReport {
            package: package.clone(),
            weight_bytes,
            seconds: begin.elapsed().as_secs_f64(),
            tensors: emitter.reports(),
        };
        let in_bundle = |file: &package::WrittenFile| FileDigest {
            file: format!("{package}/{}", file.path),
            bytes: file.bytes,
            sha256: file.sha256.clone(),
        };
        let files = written.files.iter().map(in_bundle).collect();
        let entry = PackageEntry { package: package.clone(), compiled: None, weight_bytes, files };
        Ok(FinishedPackage { entry, functions, report })
    }

    /// What a package says of itself.
    fn metadata(&self, plan: &PackagePlan) -> package::Metadata {
        let name = self.manifest.name.as_deref().unwrap_or_default();
        let part = match plan.stage {
            Stage::Layers { first, end } => format!("layers {first} to {}", end - 1),
            Stage::Head { first, end } => format!("LM head, rows {first} to {}", end - 1),
        };
        let own = [
            ("anec.version", env!("CARGO_PKG_VERSION")),
            // quantized programs are known to stop Core ML's GPU compiler
            ("anec.compute_units", "cpuAndNeuralEngine"),
        ];
        package::Metadata {
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

/// Builds and checks the functions of one package.
///
/// # Errors
/// When a weight can't be emitted, or the graph breaks Core ML's rules.
pub fn build_package(
    model: &dyn Model,
    form: &Form,
    plan: &PackagePlan,
    emitter: &mut Emitter<'_>,
) -> Result<(Program, Vec<FunctionEntry>)> {
    let package = format!("{}.mlpackage", plan.name);
    let mut functions = Vec::new();
    let mut entries = Vec::new();
    for request in &plan.functions {
        let graph = model.build(form, request, emitter)?;
        emitter.name_after(&graph.function);
        entries.push(FunctionEntry {
            package: package.clone(),
            function: request.name.clone(),
            stage: request.stage.clone(),
            context: request.context,
            tokens: tokens(request),
            inputs: graph.inputs,
            outputs: graph.outputs,
            states: graph.states,
        });
        functions.push(graph.function);
    }
    let default_function = functions.first().map(|f| f.name.clone()).unwrap_or_default();
    let program = Program { functions, default_function };
    let findings = verify(&program);
    if !findings.is_empty() {
        let findings = findings.iter().map(ToString::to_string).collect();
        return Err(ConvertError::Graph { package, findings }.into());
    }
    Ok((program, entries))
}

fn tokens(request: &FunctionRequest) -> Tokens {
    match request.tokens {
        TokenCount::Range { lower, upper, .. } => Tokens::Range([lower, upper]),
        TokenCount::Exactly(count) => Tokens::Exactly(count),
    }
}

/// Name, format and digests of a source.
fn source_facts(source: &Source) -> Result<SourceFacts> {
    source.digest()?;
    let digest = |file: &crate::source::SourceFile| -> Result<FileDigest> {
        Ok(FileDigest { file: file.name().into(), bytes: file.size(), sha256: file.sha256()?.into() })
    };
    Ok(SourceFacts {
        name: source.name().into(),
        format: source.kind().name().into(),
        files: source.files().iter().map(digest).collect::<Result<_>>()?,
    })
}

/// What is odd about a plan and yet allowed.
fn notes(plan: &Plan, model: &dyn Model) -> Vec<String> {
    let longest = model.facts().max_position_embeddings;
    let over = plan.contexts.iter().filter(|context| **context > longest);
    over.map(|context| format!("context {context} is longer than the {longest} tokens that the model was made for"))
        .collect()
}

/// What to do about an output folder that is there already.
fn existing(path: &Path, manifest: &Manifest, source: &Source, force: bool) -> Result<Option<Outcome>> {
    let replaced = with_suffix(path, ".replaced");
    if replaced.exists() {
        // an earlier run was killed between its last two steps
        std::fs::remove_dir_all(&replaced).map_err(ConvertError::io(&replaced, "remove"))?;
    }
    match std::fs::read_dir(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(ConvertError::io(path, "open")(e).into()),
        Ok(mut entries) => {
            if entries.next().is_none() {
                return Ok(None);
            }
        }
    }
    if !path.join(bundle::FILE_NAME).is_file() {
        return Err(ConvertError::NotABundle(path.to_owned()).into());
    }
    if force {
        return Ok(None);
    }
    let old = Bundle::read(path)?;
    let difference = if old.manifest != *manifest {
        "its manifest differs"
    } else if old.anec_version != env!("CARGO_PKG_VERSION") {
        "another version of anec wrote it"
    } else if !old.packages.iter().all(|p| resume::complete(path, &p.files)) {
        "files of it are missing or cut short"
    } else if source_facts(source)? != old.source {
        "its source differs"
    } else {
        return Ok(Some(Outcome::UpToDate(path.to_owned())));
    };
    Err(ConvertError::Exists { path: path.to_owned(), difference: difference.into() }.into())
}

/// Gives a complete bundle its name.
fn publish(partial: &Path, path: &Path) -> Result<(), ConvertError> {
    let replaced = with_suffix(path, ".replaced");
    let replaces = path.join(bundle::FILE_NAME).exists();
    if replaces {
        std::fs::rename(path, &replaced).map_err(ConvertError::io(path, "rename"))?;
    }
    std::fs::rename(partial, path).map_err(ConvertError::io(path, "rename"))?;
    if replaces {
        std::fs::remove_dir_all(&replaced).map_err(ConvertError::io(&replaced, "remove"))?;
    }
    Ok(())
}

/// A path beside another.
fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    // `.` and `..` have no name of their own
    let path = match path.file_name() {
        Some(_) => path.to_owned(),
        None => std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned()),
    };
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(suffix);
    path.with_file_name(name)
}

/// Compiles the packages of a bundle that is there, and notes it in its `bundle.json`.
///
/// # Errors
/// When the compiler isn't there or refuses a package.
pub fn compile_bundle(path: &Path, progress: &Progress) -> Result<Bundle> {
    let mut bundle = Bundle::read(path)?;
    let compiler = compile::Compiler::find()?;
    for index in 0..bundle.packages.len() {
        let package = bundle.packages[index].package.clone();
        progress.stage(&format!("compiling {package}"));
        bundle.packages[index].compiled = Some(compiler.compile(path, &package)?);
        files::write_json(&path.join(bundle::FILE_NAME), &bundle)?;
    }
    progress.finish();
    Ok(bundle)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_from_sources() {
        for (source, name) in [
            ("hf:Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
            ("hf:Qwen/Qwen3-0.6B@main", "Qwen3-0.6B"),
            ("hf:owner/name/file.gguf", "file"),
            ("/models/phi4/", "phi4"),
            ("./a b.safetensors", "a_b"),
            ("..", "model"),
        ] {
            assert_eq!(name_of(source), name, "{source}");
        }
    }

    #[test]
    fn suffixes_go_to_the_name() {
        assert_eq!(with_suffix(Path::new("a/b.anec"), ".partial"), Path::new("a/b.anec.partial"));
        assert_eq!(with_suffix(Path::new("a/b.anec/"), ".partial"), Path::new("a/b.anec.partial"));
        assert!(with_suffix(Path::new("."), ".partial").is_absolute());
    }
}
