//! `anec validate`

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::model::{Backend, PrecisionName, open_on_core_ml};
use super::{print, print_json};
use crate::convert::progress::Progress;
use crate::convert::{Bundle, files};
use crate::coreml::cache::Cache;
use crate::coreml::{ComputePlan, CoreMl};
use crate::error::Result;
use crate::report;
use crate::runtime::{Model, RuntimeError};
use crate::validate::{Candidate, GateReport, Golden, Report, Thresholds, parity, residency, structure};

/// Proves what a bundle is, gate by gate.
///
/// structure: its packages are whole and right in form. parity: the emitted program computes what a golden says, in
/// calls of every size. residency: every op prefers the Neural Engine. Without the name of a gate, all of them.
///
/// The exit code is 0 if all passed, 1 if one failed, and 3 if one could not be tried here.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder of the bundle
    #[arg(default_value = ".")]
    bundle: PathBuf,
    /// The gate of form
    #[arg(long)]
    structure: bool,
    /// The gate that compares with a golden
    #[arg(long)]
    parity: bool,
    /// The gate of placement
    #[arg(long)]
    residency: bool,
    /// Golden for parity; golden.safetensors in the bundle's folder if not given
    #[arg(long, value_name = "FILE")]
    golden: Option<PathBuf>,
    /// Precisions for parity
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [PrecisionName::F32, PrecisionName::F16])]
    precision: Vec<PrecisionName>,
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
}

/// Name of a golden that lies in the bundle.
const GOLDEN: &str = "golden.safetensors";

impl Args {
    pub(super) fn run(self) -> Result<u8> {
        if !self.bundle.join(crate::convert::bundle::FILE_NAME).exists() {
            return Err(RuntimeError::NoBundle { path: self.bundle }.into());
        }
        let bundle = Bundle::read(&self.bundle)?;
        // who names a plan wants it judged
        let residency = self.residency || self.plan.is_some() || self.plan_out.is_some();
        let all = !(self.structure || self.parity || self.residency);
        let mut gates = Vec::new();
        if all || self.structure {
            gates.push(structure(&bundle, &self.bundle));
        }
        if all || self.parity {
            gates.push(self.parity(&bundle)?);
        }
        if all || residency {
            gates.push(self.residency(&bundle)?);
        }
        let report = Report::new(&bundle.name, gates);
        match &self.json {
            Some(path) if path.as_os_str() == "-" => print_json(&report),
            Some(path) => {
                files::write_json(path, &report)?;
                print(&report::gates(&report));
            }
            None => print(&report::gates(&report)),
        }
        Ok(report.exit_code(self.allow_unproven))
    }

    fn parity(&self, bundle: &Bundle) -> Result<GateReport> {
        let own = self.bundle.join(GOLDEN);
        let Some(path) = self.golden.clone().or_else(|| own.exists().then_some(own)) else {
            return Ok(parity::without_golden());
        };
        let golden = Golden::read(&path)?;
        let thresholds = Thresholds::of(&bundle.manifest.gates).parity;
        let candidates = match self.backend.core_ml() {
            None => candidates(&self.bundle, &self.precision)?,
            Some(units) => {
                vec![Candidate { name: units.to_string(), model: open_on_core_ml(&self.bundle, units)? }]
            }
        };
        parity(&candidates, &golden, &thresholds)
    }

    fn residency(&self, bundle: &Bundle) -> Result<GateReport> {
        let thresholds = Thresholds::of(&bundle.manifest.gates).residency;
        if let Some(path) = &self.plan {
            return residency::judge(bundle, &self.bundle, &ComputePlan::read(path)?, path, &thresholds);
        }
        let engine = match CoreMl::new() {
            Ok(engine) => Arc::new(engine),
            Err(error) if self.plan_out.is_some() => return Err(error.into()),
            Err(_) => return Ok(residency::without_plan()),
        };
        let progress = Progress::on_stderr();
        let mut plan = residency::take(&*engine, bundle, &self.bundle, &progress)?;
        residency::time(&engine, bundle, &self.bundle, &Cache::of_user()?, &mut plan, &progress)?;
        progress.finish();
        if let Some(path) = &self.plan_out {
            files::write_json(path, &plan)?;
        }
        residency::judge(bundle, &self.bundle, &plan, Path::new("just taken"), &thresholds)
    }
}

/// The bundle on the CPU in several precisions.
pub(super) fn candidates(bundle: &Path, precisions: &[PrecisionName]) -> Result<Vec<Candidate>> {
    let as_executor: Vec<_> = precisions.iter().map(|precision| precision.precision()).collect();
    let models = Model::on_cpu_in(bundle, &as_executor)?;
    let names = precisions.iter().map(|precision| precision.name().to_owned());
    Ok(names.zip(models).map(|(name, model)| Candidate { name, model }).collect())
}
