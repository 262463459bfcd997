//! `anec validate`

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anec::base::input::read_text;
use anec::base::{Diagnostic, Fault, FileError};

use super::model::{Backend, PrecisionName, open_on_core_ml};
use super::{MOST_TEXT, print, print_json};
use anec::base::Result;
use anec::base::output::write_file;
use anec::base::progress::Progress;
use anec::bundle::Bundle;
use anec::bundle::FILE_NAME;
use anec::convert::files;
use anec::coreml::cache::Cache;
use anec::coreml::{ComputePlan, CoreMl};
use anec::exec::Precision;
use anec::manifest::Gates;
use anec::package;
use anec::report;
use anec::runtime::{Model, RuntimeError, Tokenizer};
use anec::validate::verdict::PackageFacts;
use anec::validate::{
    Candidate, Check, GateReport, Golden, Report, Thresholds, Verdict, forecast, foreign, numerics, parity, prompts,
    residency, structure,
};

/// Proves what a bundle is, gate by gate.
///
/// structure: its packages are whole and right in form. numerics: half precision computes what single precision does,
/// layer by layer, and no constant gets lost in it. parity: the emitted program computes what a golden says, in
/// calls of every size. residency: every op prefers the Neural Engine. Without the name of a gate, all of them.
///
/// Any .mlpackage can be given instead of a bundle; then parity, which needs to know what the inputs mean, is left out.
///
/// The exit code is 0 if all passed, 1 if one failed, and 3 if one could not be tried here.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder of the bundle, or an .mlpackage; the bundle of the current folder if not given
    path: Option<PathBuf>,
    /// The gate of form
    #[arg(long)]
    structure: bool,
    /// The gate of half precision
    #[arg(long)]
    numerics: bool,
    /// The gate that compares with a golden
    #[arg(long)]
    parity: bool,
    /// The gate of placement
    #[arg(long)]
    residency: bool,
    /// Says what rules expect of the Neural Engine; a forecast, beside the gate of placement, and no proof
    #[arg(long)]
    forecast: bool,
    /// Golden for parity; golden.safetensors in the bundle's folder if not given
    #[arg(long, value_name = "FILE")]
    golden: Option<PathBuf>,
    /// Precisions for parity
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [PrecisionName::F32, PrecisionName::F16])]
    precision: Vec<PrecisionName>,
    /// Text for numerics; prose, code and numbers of anec's own if not given
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Tokens of that text that are run
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u16).range(1..))]
    positions: u16,
    #[command(flatten)]
    backend: Backend,
    /// Compute plan for residency, taken on a Mac by --plan-out; with it, the gate needs no Mac
    #[arg(long, value_name = "FILE", conflicts_with = "plan_out")]
    plan: Option<PathBuf>,
    /// Writes the compute plan that residency takes on this Mac
    #[arg(long, value_name = "FILE")]
    plan_out: Option<PathBuf>,
    /// Exits with 0 when gates could not be tried here, if none failed
    #[arg(long)]
    allow_unproven: bool,
    /// Writes the report as JSON; - for stdout
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Writes the report as JUnit XML; - for stdout
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Writes the report as Markdown, for a step summary; - for stdout
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Writes the report as one HTML page; - for stdout
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Name of a golden that lies in the bundle.
const GOLDEN: &str = "golden.safetensors";

/// Two reports that would be one file.
#[derive(Debug, thiserror::Error)]
#[error("two reports go to {}", .0.display())]
struct SameOutput(PathBuf);

impl Diagnostic for SameOutput {
    fn fault(&self) -> Fault {
        Fault::Usage
    }

    fn help(&self) -> Option<String> {
        Some("give each its own file".into())
    }
}

fn is_stdout(path: &Option<PathBuf>) -> bool {
    path.as_ref().is_some_and(|path| path.as_os_str() == "-")
}

impl Args {
    pub(super) fn run(self) -> Result<u8> {
        self.outputs_differ()?;
        let path = match &self.path {
            Some(path) => path.clone(),
            None => of_current_folder()?,
        };
        let (report, plan) = if path.join(FILE_NAME).exists() {
            self.bundle(&path)?
        } else if is_package(&path) {
            (self.package(&path)?, None)
        } else {
            return Err(RuntimeError::NoBundle { path }.into());
        };
        self.write(&report, plan.as_ref())?;
        Ok(report.exit_code(self.allow_unproven))
    }

    /// Every report has a file of its own.
    fn outputs_differ(&self) -> Result<()> {
        let mut outputs: Vec<&PathBuf> =
            [&self.json, &self.junit, &self.markdown, &self.html, &self.plan_out].into_iter().flatten().collect();
        outputs.sort();
        match outputs.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(SameOutput(pair[0].clone()).into()),
            None => Ok(()),
        }
    }

    /// No gate named: all of them.
    fn all(&self) -> bool {
        !(self.structure || self.numerics || self.parity || self.wants_residency())
    }

    /// Who names a plan wants it judged; a forecast stands beside the gate that it is no proof for.
    fn wants_residency(&self) -> bool {
        self.residency || self.forecast || self.plan.is_some() || self.plan_out.is_some()
    }

    fn bundle(&self, folder: &Path) -> Result<(Report, Option<ComputePlan>)> {
        let bundle = Bundle::read(folder)?;
        let all = self.all();
        let mut gates = Vec::new();
        if all || self.structure {
            gates.push(structure(&bundle, folder));
        }
        let mut plan = None;
        if all || self.numerics {
            gates.push(run(&gates, numerics::GATE, self.numerics(&bundle, folder))?);
        }
        if all || self.parity {
            gates.push(run(&gates, parity::GATE, self.parity(&bundle, folder))?);
        }
        if all || self.wants_residency() {
            let (gate, judged) = self.residency(&bundle, folder)?;
            gates.push(gate);
            plan = judged;
        }
        let mut report = Report::new(&bundle.name, gates);
        if self.forecast {
            report.forecast = Some(Vec::new());
        }
        for entry in &bundle.packages {
            // a package that can't be read is structure's to report
            let Ok(package) = package::open(&folder.join(&entry.package)) else { continue };
            if let Some(findings) = &mut report.forecast {
                findings.extend(forecast(&entry.package, &package.program, entry.weight_bytes));
            }
            report.packages.push(PackageFacts::of(&entry.package, &package));
        }
        report.add_quantization(folder);
        Ok((report, plan))
    }

    /// A package of whatever origin.
    fn package(&self, path: &Path) -> Result<Report> {
        let package = package::open(path)?;
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let all = self.all();
        let mut gates = Vec::new();
        if all || self.structure {
            gates.push(foreign::structure(&name, &package));
        }
        if all || self.numerics {
            let thresholds = Thresholds::of(&Gates::default()).numerics;
            gates.push(foreign::numerics(&name, &package, &thresholds)?);
        }
        if self.parity {
            gates.push(foreign::parity(&name));
        }
        if all || self.wants_residency() {
            gates.push(residency::without_plan());
        }
        let facts = PackageFacts::of(&name, &package);
        let mut report = Report::new(&name, gates);
        report.forecast = (all || self.forecast).then(|| forecast(&name, &package.program, facts.weight_bytes));
        report.packages.push(facts);
        Ok(report)
    }

    fn write(&self, report: &Report, plan: Option<&ComputePlan>) -> Result<()> {
        let write = |path: &Option<PathBuf>, text: &dyn Fn() -> String| -> Result<()> {
            match path {
                Some(path) if path.as_os_str() == "-" => print(&text()),
                Some(path) => write_file(path, text().as_bytes())?,
                None => {}
            }
            Ok(())
        };
        write(&self.junit, &|| report::junit(report))?;
        write(&self.markdown, &|| report::markdown(report))?;
        write(&self.html, &|| report::html(report, plan))?;
        match &self.json {
            Some(path) if path.as_os_str() == "-" => print_json(report),
            Some(path) => {
                files::write_json(path, report)?;
                print(&report::gates(report));
            }
            // the report that goes to stdout stands for the table
            None if [&self.junit, &self.markdown, &self.html].iter().any(|path| is_stdout(path)) => {}
            None => print(&report::gates(report)),
        }
        Ok(())
    }

    fn numerics(&self, bundle: &Bundle, folder: &Path) -> Result<GateReport> {
        let count = usize::from(self.positions);
        let tokens = match &self.text {
            None => prompts::tokens(bundle, folder, count)?,
            Some(path) => {
                let text = read_text(path, MOST_TEXT)?;
                let mut tokens = Tokenizer::of(bundle, folder)?.encode(&text)?;
                tokens.truncate(count);
                tokens
            }
        };
        numerics(bundle, folder, &tokens, &Thresholds::of(&bundle.manifest.gates).numerics)
    }

    fn parity(&self, bundle: &Bundle, folder: &Path) -> Result<GateReport> {
        let own = folder.join(GOLDEN);
        let Some(path) = self.golden.clone().or_else(|| own.exists().then_some(own)) else {
            return Ok(parity::without_golden());
        };
        let golden = Golden::read(&path)?;
        let thresholds = Thresholds::of(&bundle.manifest.gates).parity;
        let candidates = match self.backend.core_ml() {
            None => candidates(folder, &self.precision)?,
            Some(units) => {
                let model = open_on_core_ml(folder, units)?;
                vec![Candidate { name: units.to_string(), model, layers: false }]
            }
        };
        parity(&candidates, &golden, &thresholds)
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
        let progress = Progress::on_stderr();
        let mut plan = residency::take(&*engine, bundle, folder, &progress)?;
        residency::time(&engine, bundle, folder, &Cache::of_user()?, &mut plan, &progress)?;
        progress.finish();
        if let Some(path) = &self.plan_out {
            files::write_json(path, &plan)?;
        }
        Ok((residency::judge(bundle, folder, &plan, Path::new("just taken"), &thresholds)?, Some(plan)))
    }
}

/// The report of a gate that runs the bundle. Where the bundle is known to be broken, an error is what was to be expected:
/// the gate failed.
fn run(before: &[GateReport], gate: &str, result: Result<GateReport>) -> Result<GateReport> {
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

/// The bundle that the current folder is, or the only one that it holds.
fn of_current_folder() -> Result<PathBuf> {
    let here = PathBuf::from(".");
    if here.join(FILE_NAME).exists() {
        return Ok(here);
    }
    let entries = std::fs::read_dir(&here).map_err(FileError::of(&here, "read"))?;
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.join(FILE_NAME).exists() && path.extension().is_none_or(|extension| extension != "partial"))
        .collect();
    found.sort();
    match found.as_slice() {
        [one] => Ok(one.clone()),
        [] => Err(RuntimeError::NoBundle { path: here }.into()),
        several => {
            let names = several.iter().map(|path| path.file_name().unwrap_or_default().to_string_lossy().into_owned());
            Err(RuntimeError::SeveralBundles { names: names.collect() }.into())
        }
    }
}

/// The bundle on the CPU in several precisions.
pub(super) fn candidates(bundle: &Path, precisions: &[PrecisionName]) -> Result<Vec<Candidate>> {
    let as_executor: Vec<_> = precisions.iter().map(|precision| precision.precision()).collect();
    let models = Model::on_cpu_in(bundle, &as_executor)?;
    let candidate = |(precision, model): (&PrecisionName, Arc<Model>)| {
        let layers = precision.precision() == Precision::F32;
        Candidate { name: precision.name().to_owned(), model, layers }
    };
    Ok(precisions.iter().zip(models).map(candidate).collect())
}
