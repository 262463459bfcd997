//! High-level API for the gates.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anec_advice::{ChipTarget, ForecastFinding, forecast, forecast_asset};
use anec_base::{Fault, FileError, Progress, ProgressEvent, Result};
use anec_bundle::{Bundle, FILE_NAME, PackageEntry};
use anec_convert::files;
use anec_coreai::bridge::BridgeOptions;
use anec_coreai::inventory::AssetInventory;
use anec_coreml::CoreMl;
use anec_coreml::cache::Cache;
use anec_coreml::plan::{ComputePlan, ComputeUnits};
use anec_exec::Precision;
use anec_manifest::Gates;
use anec_package::{self as package, Package};
use anec_runtime::{LoadedModel, RuntimeError, Tokenizer, coreai, coreml};
use anec_validate::parity::{self, Candidate};
use anec_validate::residency::{self, ResidencySubject};
use anec_validate::structure::structure;
use anec_validate::verdict::{Check, GateReport, GatesReport, PackageFacts, Verdict};
use anec_validate::{
    Golden, ResidencyThresholds, Thresholds, asset, first_deviation, migration, numerics, prompts, third_party,
};

/// Gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Gate {
    /// Packages are complete and well-formed.
    Structure,
    /// fp16 computes the same as f32, and no constant is lost in fp16.
    Numerics,
    /// The program computes a golden's values.
    Parity,
    /// Every op prefers the Neural Engine.
    Residency,
}

/// Report of the gates, with the compute plan.
#[derive(Debug)]
pub struct Validation {
    /// Report.
    pub report: GatesReport,
    /// Compute plan of the residency gate, if any.
    pub plan: Option<ComputePlan>,
}

/// Golden of the parity gate.
#[derive(Clone, Debug)]
enum Reference {
    File(PathBuf),
    Read(Box<Golden>),
}

/// File name of a golden in the bundle folder.
const GOLDEN: &str = "golden.safetensors";

/// Verifies a bundle, gate by gate. Packages (.mlpackage), assets of Core AI (.aimodel) and compiled models (.mlmodelc)
/// of any origin can be given as well: parity can't be tried on packages and assets, which don't say what their inputs
/// mean, and only residency on compiled models.
///
/// ```no_run
/// # fn main() -> anec::base::Result<()> {
/// let validation = anec::Validator::new("qwen3.anec").golden("golden.safetensors").run()?;
/// assert_eq!(validation.report.exit_code(true), 0);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Validator {
    path: PathBuf,
    gates: Option<BTreeSet<Gate>>,
    forecast: bool,
    golden: Option<Reference>,
    precisions: Vec<Precision>,
    core_ml: Option<ComputeUnits>,
    core_ai: Option<BridgeOptions>,
    text: Option<String>,
    positions: usize,
    plan: Option<PathBuf>,
    plan_out: Option<PathBuf>,
    progress: Progress,
}

impl Validator {
    /// Creates a validator with all gates for a bundle folder or an .mlpackage.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Validator {
            path: path.into(),
            gates: None,
            forecast: false,
            golden: None,
            precisions: vec![Precision::F32, Precision::F16],
            core_ml: None,
            core_ai: None,
            text: None,
            positions: 256,
            plan: None,
            plan_out: None,
            progress: Progress::default(),
        }
    }

    /// Sets the gates.
    pub fn gates(mut self, gates: impl IntoIterator<Item = Gate>) -> Self {
        self.gates = Some(gates.into_iter().collect());
        self
    }

    /// Adds the rules' forecast for the Neural Engine, which proves nothing.
    pub fn forecast(mut self, forecast: bool) -> Self {
        self.forecast = forecast;
        self
    }

    /// Sets the golden's file. Default: `golden.safetensors` in the bundle's folder, or the golden that the manifest
    /// names.
    pub fn golden(mut self, file: impl Into<PathBuf>) -> Self {
        self.golden = Some(Reference::File(file.into()));
        self
    }

    /// Sets the golden.
    pub fn golden_data(mut self, golden: Golden) -> Self {
        self.golden = Some(Reference::Read(Box::new(golden)));
        self
    }

    /// Sets the CPU precisions for parity. Default: f32 and f16.
    pub fn precisions(mut self, precisions: impl IntoIterator<Item = Precision>) -> Self {
        self.precisions = precisions.into_iter().collect();
        self
    }

    /// Runs Core ML instead of the CPU for parity, or beside it for the numerics of a package.
    pub fn core_ml(mut self, units: Option<ComputeUnits>) -> Self {
        self.core_ml = units;
        self
    }

    /// Sets Apple's Core AI runtime: for parity in place of the CPU, and for the numerics of an asset.
    pub fn core_ai(mut self, options: Option<BridgeOptions>) -> Self {
        self.core_ai = options;
        self
    }

    /// Sets the text for numerics. Default: built-in prose, code and numbers.
    pub fn text(mut self, text: impl Into<String>) -> Self {
        self.text = Some(text.into());
        self
    }

    /// Sets the maximum number of tokens of that text.
    pub fn positions(mut self, count: usize) -> Self {
        self.positions = count;
        self
    }

    /// Sets a compute plan for residency that was taken on a Mac: the gate then needs no Mac.
    pub fn plan(mut self, file: impl Into<PathBuf>) -> Self {
        self.plan = Some(file.into());
        self
    }

    /// Sets the file for the compute plan that residency reads on this Mac.
    pub fn plan_out(mut self, file: impl Into<PathBuf>) -> Self {
        self.plan_out = Some(file.into());
        self
    }

    /// Sets a callback for progress events.
    pub fn observe(self, observer: impl Fn(ProgressEvent<'_>) + Send + Sync + 'static) -> Self {
        self.progress(Progress::new(observer))
    }

    /// Sets the receiver of progress events.
    pub fn progress(mut self, progress: Progress) -> Self {
        self.progress = progress;
        self
    }

    /// Runs the gates.
    ///
    /// # Errors
    /// If the path doesn't exist, or a gate can't be run for a reason other than the bundle.
    pub fn run(&self) -> Result<Validation> {
        if self.path.join(FILE_NAME).exists() {
            self.bundle(&self.path)
        } else if is_package(&self.path) {
            self.package(&self.path)
        } else if is_compiled(&self.path) {
            self.compiled(&self.path)
        } else if is_asset(&self.path) {
            self.asset(&self.path)
        } else {
            Err(RuntimeError::NoBundle { path: self.path.clone() }.into())
        }
    }

    fn wants(&self, gate: Gate) -> bool {
        self.gates.as_ref().is_none_or(|gates| gates.contains(&gate))
    }

    fn bundle(&self, folder: &Path) -> Result<Validation> {
        let bundle = Bundle::read(folder)?;
        let mut gates = Vec::new();
        if self.wants(Gate::Structure) {
            gates.push(structure(&bundle, folder));
        }
        if self.wants(Gate::Numerics) {
            let gate = self.numerics(&bundle, folder);
            gates.push(tried(&gates, numerics::GATE, gate)?);
        }
        if self.wants(Gate::Parity) {
            gates.push(tried(&gates, parity::GATE, self.parity(&bundle, folder))?);
        }
        let mut plan = None;
        if self.wants(Gate::Residency) {
            let (gate, judged) = self.residency(&bundle, folder)?;
            gates.push(gate);
            plan = judged;
        }
        let mut report = GatesReport::new(&bundle.name, gates);
        report.digest = Some(bundle.digest());
        let mut findings = Vec::new();
        for entry in &bundle.packages {
            // the structure gate reports unreadable packages
            let Ok(program) = OpenedProgram::read(folder, entry) else { continue };
            if self.forecast {
                findings.extend(program.forecast(entry, &[]));
            }
            if let OpenedProgram::Package(package) = &program {
                report.packages.push(PackageFacts::of(&entry.package, package));
            }
        }
        report.forecast = self.forecast.then_some(findings);
        report.add_quantization(folder);
        Ok(Validation { report, plan })
    }

    /// Runs the gates on a package of any origin.
    fn package(&self, path: &Path) -> Result<Validation> {
        let package = package::open(path)?;
        let name = file_name(path);
        let thresholds = Thresholds::of(&Gates::default());
        let mut gates = Vec::new();
        if self.wants(Gate::Structure) {
            gates.push(third_party::structure(&name, &package));
        }
        if self.wants(Gate::Numerics) {
            let mut gate = third_party::numerics(&name, &package, &thresholds.numerics)?;
            if let Some(units) = self.core_ml {
                let checks = third_party::core_ml(&CoreMl::new()?, &name, &package, units, &thresholds.numerics)?;
                gate = GateReport::new(numerics::GATE, gate.checks.into_iter().chain(checks).collect());
            }
            if let Some(options) = &self.core_ai {
                let checks = migration::checks(&name, &package, options)?;
                gate = GateReport::new(numerics::GATE, gate.checks.into_iter().chain(checks).collect());
            }
            gates.push(gate);
        }
        // report a gate that can't run only if it was requested by name
        if self.gates.as_ref().is_some_and(|gates| gates.contains(&Gate::Parity)) {
            gates.push(third_party::parity(&name));
        }
        let facts = PackageFacts::of(&name, &package);
        let forecast_too = self.gates.is_none() || self.forecast;
        let forecast = forecast_too.then(|| forecast(&name, &package.program, facts.weight_bytes, &[]));
        let mut plan = None;
        if self.wants(Gate::Residency) {
            let gate;
            (gate, plan) = self.placement(&ResidencySubject::of_package(&name, package), &thresholds.residency)?;
            gates.push(gate);
        }
        let mut report = GatesReport::new(&name, gates);
        report.forecast = forecast;
        report.packages.push(facts);
        Ok(Validation { report, plan })
    }

    /// Runs the gates on an asset of Core AI of any origin.
    fn asset(&self, path: &Path) -> Result<Validation> {
        let (asset, name) = (anec_coreai::open(path)?, file_name(path));
        let inventory = asset.inventory();
        let thresholds = Thresholds::of(&Gates::default());
        let mut gates = Vec::new();
        if self.wants(Gate::Structure) {
            gates.push(asset::structure(&name, &inventory));
        }
        if self.wants(Gate::Numerics) {
            gates.push(match &self.core_ai {
                None => asset::without_runtime(&name),
                Some(options) => {
                    let gate = asset::numerics(&name, &asset, &thresholds.numerics, options);
                    unproven_without_runtime(numerics::GATE, gate)?
                }
            });
        }
        if self.gates.as_ref().is_some_and(|gates| gates.contains(&Gate::Parity)) {
            gates.push(third_party::parity(&name));
        }
        if self.wants(Gate::Residency) {
            gates.push(residency::of_asset());
        }
        let mut report = GatesReport::new(&name, gates);
        report.forecast = (self.gates.is_none() || self.forecast).then(|| forecast_asset(&name, &inventory, &[]));
        Ok(Validation { report, plan: None })
    }

    /// Compiled model, of which only the placement can be judged.
    fn compiled(&self, path: &Path) -> Result<Validation> {
        let name = file_name(path);
        let subject = ResidencySubject::of_compiled(&name, path)?;
        let (gate, plan) = self.placement(&subject, &Thresholds::of(&Gates::default()).residency)?;
        Ok(Validation { report: GatesReport::new(&name, vec![gate]), plan })
    }

    /// Judges the given plan, or takes and times one.
    fn placement(
        &self,
        subject: &ResidencySubject,
        thresholds: &ResidencyThresholds,
    ) -> Result<(GateReport, Option<ComputePlan>)> {
        self.judged(subject, thresholds, |engine, plan| {
            residency::time_directly(&**engine, subject, plan, &self.progress)
        })
    }

    fn numerics(&self, bundle: &Bundle, folder: &Path) -> Result<GateReport> {
        let tokens = match &self.text {
            None => prompts::tokens(bundle, folder, self.positions)?,
            Some(text) => {
                let mut tokens = Tokenizer::of(bundle, folder)?.encode(text)?;
                tokens.truncate(self.positions);
                tokens
            }
        };
        let thresholds = Thresholds::of(&bundle.manifest.gates).numerics;
        match (bundle.manifest.format.is_coreml(), &self.core_ai) {
            (true, _) => numerics::numerics(bundle, folder, &tokens, &thresholds),
            (false, None) => Ok(unproven(numerics::GATE, asset::NEEDS_RUNTIME)),
            (false, Some(options)) => {
                let gate = numerics::numerics_of_asset(bundle, folder, &tokens, &thresholds, options);
                unproven_without_runtime(numerics::GATE, gate)
            }
        }
    }

    fn parity(&self, bundle: &Bundle, folder: &Path) -> Result<GateReport> {
        let own = folder.join(GOLDEN);
        // the golden of the manifest may be of a machine that has the weights
        let named = bundle.manifest.golden.as_deref();
        let golden = match &self.golden {
            Some(Reference::Read(golden)) => (**golden).clone(),
            Some(Reference::File(path)) => Golden::read(path)?,
            None if own.exists() => Golden::read(&own)?,
            None => match named {
                Some(path) if path.exists() => Golden::read(path)?,
                named => return Ok(parity::without_golden(named)),
            },
        };
        let candidates = match (self.core_ml, &self.core_ai) {
            (None, Some(options)) => match coreai::open(folder, options) {
                Ok(model) => vec![Candidate { name: coreai::NAME.into(), model, layers: false }],
                // no runtime here proves nothing
                Err(error) => return unproven_without_runtime(parity::GATE, Err(error)),
            },
            (None, None) if !bundle.manifest.format.is_coreml() => {
                return Ok(unproven(parity::GATE, asset::NEEDS_RUNTIME));
            }
            (None, None) => candidates(folder, &self.precisions)?,
            (Some(units), _) => {
                let model = coreml::open(folder, units, None)?;
                self.progress.note(&format!("Core ML with {units}"));
                vec![Candidate { name: units.to_string(), model, layers: false }]
            }
        };
        let report = parity::parity(&candidates, &golden, &Thresholds::of(&bundle.manifest.gates).parity)?;
        let mut checks = report.checks;
        if self.core_ml.is_none() && self.core_ai.is_none() && !golden.tokens.is_empty() {
            for (candidate, precision) in candidates.iter().zip(&self.precisions) {
                let Precision::Ane(effects) = precision else { continue };
                let own = |check: &&Check| check.subject.starts_with(&candidate.name);
                let failed = checks.iter().filter(own).any(|check| check.verdict == Verdict::Failed);
                checks.push(first_deviation(bundle, folder, &golden.tokens, *effects, failed)?);
            }
        }
        Ok(GateReport { notes: report.notes, ..GateReport::new(parity::GATE, checks) })
    }

    fn residency(&self, bundle: &Bundle, folder: &Path) -> Result<(GateReport, Option<ComputePlan>)> {
        if !bundle.manifest.format.is_coreml() {
            if self.plan.is_some() || self.plan_out.is_some() {
                let problem = "a compute plan is about packages of Core ML, and the bundle has `format: coreai`";
                return Err(RuntimeError::bundle(folder.join(FILE_NAME), problem).into());
            }
            return Ok((residency::of_asset(), None));
        }
        let thresholds = Thresholds::of(&bundle.manifest.gates).residency;
        let subject = ResidencySubject::of_bundle(bundle, folder)?;
        self.judged(&subject, &thresholds, |engine, plan| {
            residency::time(engine, bundle, folder, &Cache::of_user()?, plan, &self.progress)
        })
    }

    /// Judges the given plan. Without one, takes a plan on this machine, adds latencies with `time`, and judges that.
    fn judged(
        &self,
        subject: &ResidencySubject,
        thresholds: &ResidencyThresholds,
        time: impl FnOnce(&Arc<CoreMl>, &mut ComputePlan) -> Result<()>,
    ) -> Result<(GateReport, Option<ComputePlan>)> {
        if let Some(path) = &self.plan {
            let plan = ComputePlan::read(path)?;
            return Ok((residency::judge(subject, &plan, path, thresholds)?, Some(plan)));
        }
        let engine = match CoreMl::new() {
            Ok(engine) => Arc::new(engine),
            Err(error) if self.plan_out.is_some() => return Err(error.into()),
            Err(_) => return Ok((residency::without_plan(), None)),
        };
        let mut plan = residency::take(&*engine, subject, &self.progress)?;
        time(&engine, &mut plan)?;
        self.progress.finish();
        if let Some(path) = &self.plan_out {
            files::write_json(path, &plan)?;
        }
        Ok((residency::judge(subject, &plan, Path::new("just taken"), thresholds)?, Some(plan)))
    }
}

/// Report of a gate that can't run here.
fn unproven(gate: &str, reason: &str) -> GateReport {
    GateReport::new(gate, vec![Check::unproven("bundle", "it computes what it should", reason)])
}

/// Report of a gate that Apple's runtime runs: unproven where there is no runtime.
fn unproven_without_runtime(gate: &str, result: Result<GateReport>) -> Result<GateReport> {
    match result {
        Err(error) if error.fault() == Fault::Platform => Ok(unproven(gate, &error.to_string())),
        other => other,
    }
}

/// Report of a gate that runs the bundle. If the bundle is known to be broken, an error means that the gate failed.
fn tried(before: &[GateReport], gate: &str, result: Result<GateReport>) -> Result<GateReport> {
    let broken = before.iter().any(|gate| gate.verdict == Verdict::Failed);
    match result {
        Err(error) if broken => {
            let check = Check::of("bundle", "it can be run", Some(error.to_string()));
            Ok(GateReport::new(gate, vec![check]))
        }
        other => other,
    }
}

/// The forecast of the rules that concern the targets for a package of a bundle, or for its asset of Core AI; of all
/// rules if there are no targets.
///
/// # Errors
/// When it can't be read.
pub fn forecast_of(folder: &Path, entry: &PackageEntry, targets: &[ChipTarget<'_>]) -> Result<Vec<ForecastFinding>> {
    Ok(OpenedProgram::read(folder, entry)?.forecast(entry, targets))
}

/// A package of a bundle, or its asset of Core AI.
enum OpenedProgram {
    Package(Package),
    Asset(AssetInventory),
}

impl OpenedProgram {
    fn read(folder: &Path, entry: &PackageEntry) -> Result<Self> {
        let path = folder.join(&entry.package);
        Ok(match entry.is_asset() {
            true => OpenedProgram::Asset(anec_coreai::open(&path)?.inventory()),
            false => OpenedProgram::Package(package::open(&path)?),
        })
    }

    /// Findings of the rules that concern the targets, or of all.
    fn forecast(&self, entry: &PackageEntry, targets: &[ChipTarget<'_>]) -> Vec<ForecastFinding> {
        match self {
            OpenedProgram::Package(package) => forecast(&entry.package, &package.program, entry.weight_bytes, targets),
            OpenedProgram::Asset(inventory) => forecast_asset(&entry.package, inventory, targets),
        }
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// Whether a path is a compiled model.
pub fn is_compiled(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "mlmodelc") && path.is_dir()
}

/// Whether a path is an asset of Core AI.
pub fn is_asset(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "aimodel") && path.is_dir()
}

/// Whether a path is a package.
pub fn is_package(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "mlpackage" || extension == "mlmodel") && path.exists()
}

/// Returns the folder if it is a bundle, or the only bundle in it.
///
/// # Errors
/// If there is none, or several.
pub fn find_bundle(folder: &Path) -> Result<PathBuf> {
    if folder.join(FILE_NAME).exists() {
        return Ok(folder.to_owned());
    }
    let entries = std::fs::read_dir(folder).map_err(FileError::of(folder, "read"))?;
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.join(FILE_NAME).exists() && path.extension().is_none_or(|extension| extension != "partial"))
        .collect();
    found.sort();
    match found.as_slice() {
        [one] => Ok(one.clone()),
        [] => Err(RuntimeError::NoBundle { path: folder.to_owned() }.into()),
        several => {
            let names = several.iter().map(|path| path.file_name().unwrap_or_default().to_string_lossy().into_owned());
            Err(RuntimeError::SeveralBundles { names: names.collect() }.into())
        }
    }
}

/// Opens a bundle on the CPU in several precisions, which share the weights in memory.
///
/// # Errors
/// If the bundle is missing or invalid.
pub fn candidates(bundle: &Path, precisions: &[Precision]) -> Result<Vec<Candidate>> {
    let models = LoadedModel::on_cpu_with_logits(bundle, precisions)?;
    let candidate = |(precision, model): (&Precision, Arc<LoadedModel>)| Candidate {
        name: match precision {
            Precision::Ane(_) => format!("{precision}, simulated"),
            Precision::F32 | Precision::I16 | Precision::I8 | Precision::F16 => precision.to_string(),
        },
        model,
        layers: *precision == Precision::F32,
    };
    Ok(precisions.iter().zip(models).map(candidate).collect())
}
