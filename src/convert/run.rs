//! Execution of a conversion: packages and the host's file, several at a time.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::compile::Compiler;
use super::emit::Emitter;
use super::error::ConvertError;
use super::functions::{DraftRequests, build_shared_package};
use super::host;
use super::plan::{ConvertPlan, PackagePlan};
use super::report::PackageReport;
use super::resume::{FinishedPackage, Journal};
use super::tokenizer::{TextFacts, TokenizerFiles};
use anec_base::{Progress, Result};
use anec_bundle::{FileDigest, FunctionEntry, HostFacts, PackageEntry, Stage};
use anec_family::{FamilyModel, HostTensors, Purpose};
use anec_manifest::Manifest;
use anec_package::WriteOptions;
use anec_quant::ChosenCodes;
use anec_source::SourceWeight;
use rayon::prelude::*;

/// Maximum number of files written at once. Each holds a graph and some chunks in memory.
const AT_ONCE: usize = 4;

/// File or package to write.
enum Job<'a> {
    Host(&'a HostTensors),
    Package(&'a PackagePlan),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Files written by a run.
pub(super) struct WrittenParts {
    /// Packages in the order of the plan.
    pub(super) packages: Vec<FinishedPackage>,
    /// Facts of the host's file.
    pub(super) host: HostFacts,
    /// Facts of the tokenizer.
    pub(super) text: TextFacts,
}

/// Running conversion.
pub(super) struct ConversionRun<'a> {
    pub(super) manifest: &'a Manifest,
    pub(super) chosen: Option<&'a dyn ChosenCodes>,
    pub(super) model: &'a dyn FamilyModel,
    pub(super) plan: &'a ConvertPlan,
    /// Folder of the incomplete bundle.
    pub(super) folder: &'a Path,
    pub(super) progress: &'a Progress,
    /// Notes for the user.
    pub(super) notes: Vec<String>,
}

impl ConversionRun<'_> {
    /// All packages: the model's, then those of the draft layer.
    fn packages(&self) -> impl Iterator<Item = &PackagePlan> {
        self.plan.packages.iter().chain(self.plan.draft.iter().flat_map(|draft| &draft.packages))
    }

    /// Model of a package's layers, and functions of the draft layer in it.
    fn models_of(&self, plan: &PackagePlan) -> (&dyn FamilyModel, Option<DraftRequests<'_>>) {
        let (Some(planned), Some(draft)) = (&self.plan.draft, self.model.draft()) else { return (self.model, None) };
        match planned.heads.get(&plan.name) {
            Some(requests) => (self.model, Some(DraftRequests { model: draft, requests })),
            None if planned.packages.iter().any(|package| package.name == plan.name) => (draft, None),
            None => (self.model, None),
        }
    }

    /// Splits the functions of packages into the model's and the draft layer's.
    pub(super) fn divided(&self, packages: &[FinishedPackage]) -> [Vec<FunctionEntry>; 2] {
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

    /// Refuses to start if the disk is too small.
    pub(super) fn check_space(&self, journal: &Journal, host: &HostTensors) -> Result<()> {
        let packages = self.packages().filter(|p| !journal.packages.contains_key(&p.name));
        let mut needed: u64 = packages.map(|p| p.weight_bytes).sum();
        if journal.host.is_none() {
            needed += host::bytes(host);
        }
        self.progress.expect(needed);
        // for graphs, tokenizer and bundle.json
        let needed = needed + (16 << 20);
        Ok(anec_package::check_space(self.folder, needed)?)
    }

    /// Computes deferred values that weights depend on, in parallel instead of one at a time on first use.
    pub(super) fn compute_deferred(&self) -> Result<()> {
        let deferred = self.model.transformed().deferred;
        if !deferred.is_empty() {
            self.progress.stage("transforms");
        }
        let compute = |vector: &SourceWeight| vector.read(0, &mut vec![0.0; vector.elements() as usize]);
        Ok(deferred.par_iter().try_for_each(compute)?)
    }

    /// Writes all files except `bundle.json` and the report, several at a time, because one file alone alternates
    /// between writing and digesting.
    pub(super) fn write_all(
        &self,
        journal: &mut Journal,
        host: &HostTensors,
        text: TokenizerFiles,
    ) -> Result<WrittenParts> {
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
        let (text, ()) = rayon::join(
            || text.write(self.folder),
            || rayon::scope(|pool| (0..at_once).for_each(|_| pool.spawn(|_| work()))),
        );
        let text = text?;
        // all jobs before the first failure were started and succeeded, so the reported error is deterministic
        if let Some((_, error)) = failures.into_inner().unwrap_or_else(PoisonError::into_inner).pop_first() {
            return Err(error);
        }
        let mut journal = lock(&journal);
        journal.save_rest()?;
        let packages = self.packages().filter_map(|p| journal.packages.get(&p.name).cloned()).collect();
        Ok(WrittenParts { packages, host: journal.host.clone().expect("the host's file was just written"), text })
    }

    /// Executes a job and records it.
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

    /// Builds, verifies and writes one package.
    fn write_package(&self, plan: &PackagePlan) -> Result<FinishedPackage> {
        let begin = Instant::now();
        self.progress.stage(&plan.name);
        let package = format!("{}.mlpackage", plan.name);
        let mut emitter = Emitter::new(&self.manifest.quant).chosen(self.chosen);
        let (model, draft) = self.models_of(plan);
        let (program, functions) = build_shared_package(model, &self.plan.form, plan, draft, &mut emitter)?;
        let progress = |step| match step {
            anec_package::blob::WriteProgress::Prepared(_) => {}
            anec_package::blob::WriteProgress::Written(bytes) => self.progress.add(bytes),
        };
        // the package may exist already if a run was killed before it updated the journal
        let metadata = self.metadata(plan);
        let options = WriteOptions::new(metadata).replacing(true).telling(&progress);
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

    /// Metadata of a package.
    fn metadata(&self, plan: &PackagePlan) -> anec_package::PackageMetadata {
        let name = self.manifest.name.as_deref().unwrap_or_default();
        let part = match plan.stage {
            Stage::Layers { .. } if plan.name.starts_with("draft_") => "the layer that drafts".to_owned(),
            Stage::Layers { first, end } => format!("layers {first} to {}", end - 1),
            Stage::FeedForward { layer } => format!("layer {layer}, feed-forward network"),
            Stage::Experts { layer, first, end } => format!("layer {layer}, experts {first} to {}", end - 1),
            Stage::Head { first, end } if self.model.facts().purpose != Purpose::TextGeneration => {
                format!("classifier, labels {first} to {}", end - 1)
            }
            Stage::Head { first, end } => format!("LM head, rows {first} to {}", end - 1),
            Stage::Model { layers, rows } => format!("{layers} layers and LM head of {rows} rows"),
        };
        let own = [
            ("anec.version", env!("CARGO_PKG_VERSION")),
            // Core ML's GPU compiler is known to fail on quantized programs
            ("anec.compute_units", "cpuAndNeuralEngine"),
        ];
        anec_package::PackageMetadata {
            short_description: format!("{name}: {part}"),
            user_defined: own.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
            ..Default::default()
        }
    }

    /// Compiles the packages, or notes why not.
    pub(super) fn compile(&mut self, packages: &mut [FinishedPackage]) -> Result<()> {
        match Compiler::find() {
            Ok(compiler) => {
                for FinishedPackage { entry, .. } in packages {
                    self.progress.stage(&format!("compiling {}", entry.package));
                    entry.compiled = Some(compiler.compile(self.folder, &entry.package)?);
                }
            }
            Err(ConvertError::NoCompiler(why)) => {
                self.notes.push(format!("packages are not compiled ({why}); compile them on a Mac"));
            }
            Err(other) => return Err(other.into()),
        }
        Ok(())
    }
}
