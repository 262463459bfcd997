//! `anec validate`

use std::path::{Path, PathBuf};

use super::model::Backend;
use super::usage::UsageError;
use super::{MOST_TEXT, print, print_json, progress};
use anec::base::Result;
use anec::base::input::read_text;
use anec::base::output::write_file;
use anec::convert::files;
use anec::coreml::ComputePlan;
use anec::exec::Precision;
use anec::report;
use anec::validate::GatesReport;
use anec::{Gate, Validator, find_bundle};

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
pub struct ValidateArgs {
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
    /// Precisions for parity: f32, i16, f16, ane (simulated), ane-without-EFFECT+EFFECT
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_values_t = [Precision::F32, Precision::F16])]
    precision: Vec<Precision>,
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

fn is_stdout(path: &Option<PathBuf>) -> bool {
    path.as_ref().is_some_and(|path| path.as_os_str() == "-")
}

impl ValidateArgs {
    pub(super) fn run(self) -> Result<u8> {
        self.outputs_differ()?;
        let validation = self.validator()?.run()?;
        self.write(&validation.report, validation.plan.as_ref())?;
        Ok(validation.report.exit_code(self.allow_unproven))
    }

    /// Every report has a file of its own.
    fn outputs_differ(&self) -> Result<()> {
        let mut outputs: Vec<&PathBuf> =
            [&self.json, &self.junit, &self.markdown, &self.html, &self.plan_out].into_iter().flatten().collect();
        outputs.sort();
        match outputs.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => {
                let problem = format!("two reports go to {}", pair[0].display());
                Err(UsageError::new(problem, "give each its own file").into())
            }
            None => Ok(()),
        }
    }

    fn validator(&self) -> Result<Validator> {
        let path = match &self.path {
            Some(path) => path.clone(),
            None => find_bundle(Path::new("."))?,
        };
        let mut validator = Validator::new(path)
            .forecast(self.forecast)
            .precisions(self.precision.iter().copied())
            .core_ml(self.backend.core_ml()?)
            .positions(usize::from(self.positions))
            .progress(progress::bytes());
        // who names a plan wants it judged; a forecast stands beside the gate that it is no proof for
        let residency = self.residency || self.forecast || self.plan.is_some() || self.plan_out.is_some();
        let gates = [
            (self.structure, Gate::Structure),
            (self.numerics, Gate::Numerics),
            (self.parity, Gate::Parity),
            (residency, Gate::Residency),
        ];
        if gates.iter().any(|(named, _)| *named) {
            // who names a golden wants to be compared with it
            let is_wanted = |(named, gate): &(bool, Gate)| *named || *gate == Gate::Parity && self.golden.is_some();
            validator = validator.gates(gates.into_iter().filter(is_wanted).map(|(_, gate)| gate));
        }
        if let Some(path) = &self.golden {
            validator = validator.golden(path);
        }
        if let Some(path) = &self.text {
            validator = validator.text(read_text(path, MOST_TEXT)?);
        }
        if let Some(path) = &self.plan {
            validator = validator.plan(path);
        }
        if let Some(path) = &self.plan_out {
            validator = validator.plan_out(path);
        }
        Ok(validator)
    }

    fn write(&self, report: &GatesReport, plan: Option<&ComputePlan>) -> Result<()> {
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
}
