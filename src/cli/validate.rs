//! `anec validate`

use std::path::PathBuf;

use super::model::PrecisionName;
use super::{print, print_json};
use crate::convert::{Bundle, files};
use crate::error::Result;
use crate::report;
use crate::runtime::{Model, RuntimeError, Tokenizer};
use crate::validate::{self, Candidate, Golden, Report, Thresholds, numerics, parity, prompts, structure};

/// Proves what a bundle is, gate by gate.
///
/// structure: its packages are whole and right in form. numerics: half precision computes what single precision does,
/// layer by layer, and no constant gets lost in it. parity: the emitted program computes what a golden says, in
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
    /// The gate of half precision
    #[arg(long)]
    numerics: bool,
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
    /// Text for numerics; prose, code and numbers of anec's own if not given
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Tokens of that text that are run
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u16).range(1..))]
    positions: u16,
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
        let all = !(self.structure || self.numerics || self.parity || self.residency);
        let mut gates = Vec::new();
        if all || self.structure {
            gates.push(structure(&bundle, &self.bundle));
        }
        if all || self.numerics {
            gates.push(self.numerics(&bundle)?);
        }
        if all || self.parity {
            gates.push(self.parity(&bundle)?);
        }
        if all || self.residency {
            gates.push(validate::residency());
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

    fn numerics(&self, bundle: &Bundle) -> Result<validate::GateReport> {
        let count = usize::from(self.positions);
        let tokens = match &self.text {
            None => prompts::tokens(bundle, &self.bundle, count)?,
            Some(path) => {
                let text = std::fs::read_to_string(path).map_err(RuntimeError::io(path, "read"))?;
                let mut tokens = Tokenizer::of(bundle, &self.bundle)?.encode(&text)?;
                tokens.truncate(count);
                tokens
            }
        };
        numerics(bundle, &self.bundle, &tokens, &Thresholds::of(&bundle.manifest.gates).numerics)
    }

    fn parity(&self, bundle: &Bundle) -> Result<validate::GateReport> {
        let own = self.bundle.join(GOLDEN);
        let Some(path) = self.golden.clone().or_else(|| own.exists().then_some(own)) else {
            return Ok(validate::parity::without_golden());
        };
        let golden = Golden::read(&path)?;
        let thresholds = Thresholds::of(&bundle.manifest.gates).parity;
        parity(&candidates(&self.bundle, &self.precision)?, &golden, &thresholds)
    }
}

/// The bundle on the CPU in several precisions.
pub(super) fn candidates(bundle: &std::path::Path, precisions: &[PrecisionName]) -> Result<Vec<Candidate>> {
    let as_executor: Vec<_> = precisions.iter().map(|precision| precision.precision()).collect();
    let models = Model::on_cpu_in(bundle, &as_executor)?;
    let names = precisions.iter().map(|precision| precision.name().to_owned());
    Ok(names.zip(models).map(|(name, model)| Candidate { name, model }).collect())
}
