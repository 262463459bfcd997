//! The front door to the gates.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anec_advice::forecast;
use anec_base::progress::{Progress, ProgressEvent};
use anec_base::{FileError, Result};
use anec_bundle::{Bundle, FILE_NAME};
use anec_convert::files;
use anec_coreml::cache::Cache;
use anec_coreml::{ComputePlan, ComputeUnits, CoreMl};
use anec_exec::Precision;
use anec_manifest::Gates;
use anec_package as package;
use anec_runtime::{LoadedModel, RuntimeError, Tokenizer, coreml};
use anec_validate::verdict::PackageFacts;
use anec_validate::{
    Candidate, Check, GateReport, GatesReport, Golden, Thresholds, Verdict, first_deviation, numerics, parity, prompts,
    residency, structure, third_party,
};

/// A gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Gate {
    /// Packages are whole and right in form.
    Structure,
    /// Half precision computes what single precision does, and no constant gets lost in it.
    Numerics,
    /// The emitted program computes what a golden says.
    Parity,
    /// Every op prefers the Neural Engine.
    Residency,
}

/// A report, and what it was made from.
#[derive(Debug)]
pub struct Validation {
    /// What the gates found.
    pub report: GatesReport,
    /// The compute plan that residency judged, if there was one.
    pub plan: Option<ComputePlan>,
}

/// What parity compares with.
#[derive(Clone, Debug)]
enum Reference {
    File(PathBuf),
    Read(Box<Golden>),
}

/// Name of a golden that lies in the bundle.
const GOLDEN: &str = "golden.safetensors";

/// Proves what a bundle is, gate by gate. An .mlpackage of whatever origin can be given as well; parity, which needs to
/// know what the inputs mean, can't be tried on it.
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
    text: Option<String>,
    positions: usize,
    plan: Option<PathBuf>,
    plan_out: Option<PathBuf>,
    progress: Progress,
}

impl Validator {
    /// All gates of what lies at `path`: the folder of a bundle, or an .mlpackage.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Validator {
            path: path.into(),
            gates: None,
            forecast: false,
            golden: None,
            precisions: vec![Precision::F32, Precision::F16],
            core_ml: None,
            text: None,
            positions: 256,
            plan: None,
            plan_out: None,
            progress: Progress::default(),
        }
    }

    /// Only these gates.
    pub fn gates(mut self, gates: impl IntoIterator<Item = Gate>) -> Self {
        self.gates = Some(gates.into_iter().collect());
        self
    }

    /// Adds what rules expect of the Neural Engine: no proof.
    pub fn forecast(mut self, forecast: bool) -> Self {
        self.forecast = forecast;
        self
    }

    /// The golden's file, for parity; `golden.safetensors` in the bundle's folder if none is given.
    pub fn golden(mut self, file: impl Into<PathBuf>) -> Self {
        self.golden = Some(Reference::File(file.into()));
        self
    }

    /// A golden that was read already.
    pub fn golden_data(mut self, golden: Golden) -> Self {
        self.golden = Some(Reference::Read(Box::new(golden)));
        self
    }

    /// Precisions of the CPU for parity; both if none are given.
    pub fn precisions(mut self, precisions: impl IntoIterator<Item = Precision>) -> Self {
        self.precisions = precisions.into_iter().collect();
        self
    }

    /// Parity of what Core ML computes instead of the CPU.
    pub fn core_ml(mut self, units: Option<ComputeUnits>) -> Self {
        self.core_ml = units;
        self
    }

    /// Text for numerics; prose, code and numbers of anec's own if none is given.
    pub fn text(mut self, text: impl Into<String>) -> Self {
        self.text = Some(text.into());
        self
    }

    /// Most tokens of that text.
    pub fn positions(mut self, count: usize) -> Self {
        self.positions = count;
        self
    }

    /// A compute plan that was taken on a Mac, for residency: the gate then needs no Mac.
    pub fn plan(mut self, file: impl Into<PathBuf>) -> Self {
        self.plan = Some(file.into());
        self
    }

    /// Where the compute plan goes that residency takes on this Mac.
    pub fn plan_out(mut self, file: impl Into<PathBuf>) -> Self {
        self.plan_out = Some(file.into());
        self
    }

    /// Who is told how far it is.
    pub fn observe(self, observer: impl Fn(ProgressEvent<'_>) + Send + Sync + 'static) -> Self {
        self.progress(Progress::new(observer))
    }

    /// The same, for a receiver that there is already.
    pub fn progress(mut self, progress: Progress) -> Self {
        self.progress = progress;
        self
    }

    /// Tries the gates.
    ///
    /// # Errors
    /// When there is nothing at the path, or a gate couldn't be tried for a reason that isn't the bundle's.
    pub fn run(&self) -> Result<Validation> {
        if self.path.join(FILE_NAME).exists() {
            self.bundle(&self.path)
        } else if is_package(&self.path) {
            Ok(Validation { report: self.package(&self.path)?, plan: None })
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
            gates.push(tried(&gates, numerics::GATE, self.numerics(&bundle, folder))?);
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
        if self.forecast {
            report.forecast = Some(Vec::new());
        }
        for entry in &bundle.packages {
            // a package that can't be read is structure's to report
            let Ok(package) = package::open(&folder.join(&entry.package)) else { continue };
            if let Some(findings) = &mut report.forecast {
                findings.extend(forecast(&entry.package, &package.program, entry.weight_bytes, &[]));
            }
            report.packages.push(PackageFacts::of(&entry.package, &package));
        }
        report.add_quantization(folder);
        Ok(Validation { report, plan })
    }

    /// A package of whatever origin.
    fn package(&self, path: &Path) -> Result<GatesReport> {
        let package = package::open(path)?;
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let mut gates = Vec::new();
        if self.wants(Gate::Structure) {
            gates.push(third_party::structure(&name, &package));
        }
        if self.wants(Gate::Numerics) {
            let thresholds = Thresholds::of(&Gates::default()).numerics;
            gates.push(third_party::numerics(&name, &package, &thresholds)?);
        }
        // of all gates, the one that can't be tried goes without saying
        if self.gates.as_ref().is_some_and(|gates| gates.contains(&Gate::Parity)) {
            gates.push(third_party::parity(&name));
        }
        if self.wants(Gate::Residency) {
            gates.push(residency::without_plan());
        }
        let facts = PackageFacts::of(&name, &package);
        let mut report = GatesReport::new(&name, gates);
        let forecast_too = self.gates.is_none() || self.forecast;
        report.forecast = forecast_too.then(|| forecast(&name, &package.program, facts.weight_bytes, &[]));
        report.packages.push(facts);
        Ok(report)
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
        numerics(bundle, folder, &tokens, &Thresholds::of(&bundle.manifest.gates).numerics)
    }

    fn parity(&self, bundle: &Bundle, folder: &Path) -> Result<GateReport> {
        let own = folder.join(GOLDEN);
        let golden = match &self.golden {
            Some(Reference::Read(golden)) => (**golden).clone(),
            Some(Reference::File(path)) => Golden::read(path)?,
            None if own.exists() => Golden::read(&own)?,
            None => return Ok(parity::without_golden()),
        };
        let candidates = match self.core_ml {
            None => candidates(folder, &self.precisions)?,
            Some(units) => {
                let model = coreml::open(folder, units, None)?;
                self.progress.note(&format!("Core ML with {units}"));
                vec![Candidate { name: units.to_string(), model, layers: false }]
            }
        };
        let report = parity(&candidates, &golden, &Thresholds::of(&bundle.manifest.gates).parity)?;
        let mut checks = report.checks;
        if self.core_ml.is_none() && !golden.tokens.is_empty() {
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
        let thresholds = Thresholds::of(&bundle.manifest.gates).residency;
        if let Some(path) = &self.plan {
            let plan = ComputePlan::read(path)?;
            return Ok((residency::judge(bundle, folder, &plan, path, &thresholds)?, Some(plan)));
        }
        let engine = match CoreMl::new() {
            Ok(engine) => Arc::new(engine),
            Err(error) if self.plan_out.is_some() => return Err(error.into()),
            Err(_) => return Ok((residency::without_plan(), None)),
        };
        let mut plan = residency::take(&*engine, bundle, folder, &self.progress)?;
        residency::time(&engine, bundle, folder, &Cache::of_user()?, &mut plan, &self.progress)?;
        self.progress.finish();
        if let Some(path) = &self.plan_out {
            files::write_json(path, &plan)?;
        }
        Ok((residency::judge(bundle, folder, &plan, Path::new("just taken"), &thresholds)?, Some(plan)))
    }
}

/// The report of a gate that runs the bundle. Where the bundle is known to be broken, an error is what was to be expected:
/// the gate failed.
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

fn is_package(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "mlpackage" || extension == "mlmodel") && path.exists()
}

/// The bundle that a folder is, or the only one that it holds.
///
/// # Errors
/// When there is none, or several.
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

/// The bundle on the CPU in several precisions, with the same weights in memory.
///
/// # Errors
/// When there is no bundle, or it contradicts itself.
pub fn candidates(bundle: &Path, precisions: &[Precision]) -> Result<Vec<Candidate>> {
    let models = LoadedModel::on_cpu_in(bundle, precisions)?;
    let candidate = |(precision, model): (&Precision, Arc<LoadedModel>)| Candidate {
        name: match precision {
            Precision::Ane(_) => format!("{precision}, simulated"),
            Precision::F32 | Precision::I16 | Precision::F16 => precision.to_string(),
        },
        model,
        layers: *precision == Precision::F32,
    };
    Ok(precisions.iter().zip(models).map(candidate).collect())
}
