//! `anec validate`

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::model::Backend;
use super::usage::UsageError;
use super::{MAX_TEXT_BYTES, print, print_json, progress};
use anec::base::Result;
use anec::base::input::read_text;
use anec::base::output::write_file;
use anec::convert::files;
use anec::coreml::plan::ComputePlan;
use anec::exec::Precision;
use anec::report;
use anec::validate::verdict::{GateReport, GatesReport, Verdict};
use anec::validate::{asset, parity, residency, verdict};
use anec::{Bundle, Gate, Validator, find_bundle, is_asset, is_compiled, is_package};

/// Verify a bundle, gate by gate
///
/// structure: packages are complete and well-formed. numerics: fp16 computes the same as f32, layer by layer, and no
/// constant is lost in fp16. parity: the program computes a golden's values in calls of every size. residency: every op
/// prefers the Neural Engine. Without the name of a gate, all of them run.
///
/// An .mlpackage or .aimodel can be given instead of a bundle; parity is then left out, because the meaning of inputs
/// is unknown. Only the placement of a compiled model (.mlmodelc) can be judged. Apple's runtime computes assets of
/// Core AI, with --backend coreai. tools/export_plan.py takes a plan for --plan on a Mac with coremltools instead of
/// anec.
///
/// Exit code: 0 all gates passed, 1 a gate failed, 3 a gate could not run here.
#[derive(Debug, clap::Args)]
pub struct ValidateArgs {
    /// Bundle folder, .mlpackage, .aimodel or .mlmodelc [default: the bundle in the current folder]
    path: Option<PathBuf>,
    /// Run the structure gate: packages are complete and well-formed
    #[arg(long)]
    structure: bool,
    /// Run the numerics gate: fp16 against f32
    #[arg(long)]
    numerics: bool,
    /// Run the parity gate: the program against a golden
    #[arg(long)]
    parity: bool,
    /// Run the residency gate: placement on the Neural Engine
    #[arg(long)]
    residency: bool,
    /// Add the rules' forecast for the Neural Engine to the residency gate
    #[arg(long)]
    forecast: bool,
    /// Golden for parity [default: golden.safetensors in the bundle folder, or the manifest's `golden`]
    #[arg(long, value_name = "FILE")]
    golden: Option<PathBuf>,
    /// Precisions for parity: f32, i16, i8, f16, ane (simulated), ane-without-EFFECT+EFFECT [default: f32,f16]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    precision: Vec<Precision>,
    /// Text file for numerics [default: built-in prose, code and numbers]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Number of tokens of the text for numerics [default: 256]
    #[arg(long, alias = "positions", value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    max_tokens: Option<u16>,
    #[command(flatten)]
    backend: Backend,
    /// Compute plan for residency, written on a Mac by --plan-out; the gate then needs no Mac
    #[arg(long, value_name = "FILE", conflicts_with = "plan_out")]
    plan: Option<PathBuf>,
    /// Write the compute plan that residency reads on this Mac
    #[arg(long, value_name = "FILE")]
    plan_out: Option<PathBuf>,
    /// Show every check
    #[arg(long)]
    details: bool,
    /// Exit with 0 if gates could not run here and none failed
    #[arg(long)]
    allow_unproven: bool,
    /// Record the report in the bundle (gates.json), for `anec push` and `anec bench`
    #[arg(long)]
    record: bool,
    /// Write the report as JSON; - for stdout
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the report as JUnit XML; - for stdout
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Write the report as Markdown, for a step summary; - for stdout
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Write the report as an HTML page; - for stdout
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

fn is_stdout(path: &Option<PathBuf>) -> bool {
    path.as_ref().is_some_and(|path| path.as_os_str() == "-")
}

impl ValidateArgs {
    pub(super) fn run(self) -> Result<u8> {
        self.outputs_differ()?;
        let path = match &self.path {
            Some(path) => path.clone(),
            None => find_bundle(Path::new("."))?,
        };
        let validation = self.validator(&path)?.run()?;
        self.write(&validation.report, validation.plan.as_ref())?;
        if self.record {
            files::write_json(&path.join(verdict::FILE_NAME), &validation.report)?;
        }
        Ok(validation.report.exit_code(self.allow_unproven))
    }

    /// Rejects two reports in one file.
    fn outputs_differ(&self) -> Result<()> {
        let mut outputs: Vec<&PathBuf> =
            [&self.json, &self.junit, &self.markdown, &self.html, &self.plan_out].into_iter().flatten().collect();
        outputs.sort();
        match outputs.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => {
                let problem = format!("two reports have the same file {}", pair[0].display());
                Err(UsageError::new(problem, "choose a file for each").into())
            }
            None => Ok(()),
        }
    }

    fn validator(&self, path: &Path) -> Result<Validator> {
        let (core_ml, core_ai) = (self.backend.core_ml()?, self.backend.core_ai()?);
        let mut validator = Validator::new(path)
            .forecast(self.forecast)
            .core_ml(core_ml)
            .core_ai(core_ai.clone())
            .progress(progress::bytes());
        if !self.precision.is_empty() {
            validator = validator.precisions(self.precision.iter().copied());
        }
        if let Some(count) = self.max_tokens {
            validator = validator.positions(usize::from(count));
        }
        // --plan and --plan-out request the residency gate; the forecast is shown with it
        let residency = self.residency || self.forecast || self.plan.is_some() || self.plan_out.is_some();
        let gates = [
            (self.structure, Gate::Structure),
            (self.numerics, Gate::Numerics),
            (self.parity, Gate::Parity),
            (residency, Gate::Residency),
        ];
        let all = gates.iter().all(|(named, _)| !*named);
        // --golden requests the parity gate
        let is_wanted = |(named, gate): &(bool, Gate)| all || *named || *gate == Gate::Parity && self.golden.is_some();
        let wanted: BTreeSet<Gate> = gates.into_iter().filter(is_wanted).map(|(_, gate)| gate).collect();
        self.check_effects(path, &wanted, core_ml.is_some(), core_ai.is_some())?;
        if !all {
            validator = validator.gates(wanted);
        }
        if let Some(path) = &self.golden {
            validator = validator.golden(path);
        }
        if let Some(path) = &self.text {
            validator = validator.text(read_text(path, MAX_TEXT_BYTES)?);
        }
        if let Some(path) = &self.plan {
            validator = validator.plan(path);
        }
        if let Some(path) = &self.plan_out {
            validator = validator.plan_out(path);
        }
        Ok(validator)
    }

    /// Report for the terminal, with the options that unproven gates need.
    fn text(&self, report: &GatesReport) -> String {
        let mut text = if self.details { report::gates(report) } else { report::gates_summary(report) };
        let unproven =
            |name: &str| report.gates.iter().any(|gate| gate.gate == name && gate.verdict == Verdict::Unproven);
        if self.golden.is_none() && unproven(parity::GATE) {
            text.push_str("help: --golden FILE names a golden; `anec golden` computes one\n");
        }
        let mut checks = report.gates.iter().flat_map(|gate| &gate.checks);
        if checks.any(|check| check.detail.as_deref() == Some(asset::NEEDS_RUNTIME)) {
            text.push_str("help: --backend coreai computes the asset, with a Python that has Apple's coreai-core\n");
        }
        // an asset of Core AI has no plan
        let plan_helps = |gate: &GateReport| gate.gate == residency::GATE && *gate != residency::of_asset();
        if self.plan.is_none() && unproven(residency::GATE) && report.gates.iter().any(plan_helps) {
            text.push_str("help: --plan-out FILE writes a compute plan on a Mac; --plan FILE judges it anywhere\n");
        }
        text
    }

    /// Refuses options that have no effect on what is validated.
    fn check_effects(&self, path: &Path, gates: &BTreeSet<Gate>, core_ml: bool, core_ai: bool) -> Result<()> {
        let (package, compiled, asset) = (is_package(path), is_compiled(path), is_asset(path));
        let (kind, bundle) = match (package, compiled, asset) {
            (true, ..) => ("a package", false),
            (_, true, _) => ("a compiled model", false),
            (.., true) => ("an asset of Core AI", false),
            _ => ("the gates that run", true),
        };
        let of_asset = || asset || Bundle::read(path).is_ok_and(|bundle| !bundle.manifest.format.is_coreml());
        let parity = bundle && gates.contains(&Gate::Parity);
        let numerics = gates.contains(&Gate::Numerics);
        let residency = gates.contains(&Gate::Residency);
        let options = [
            ("--structure", self.structure, !compiled),
            ("--numerics", self.numerics, !compiled),
            ("--parity", self.parity, !compiled),
            ("--forecast", self.forecast, !compiled),
            ("--golden", self.golden.is_some(), parity),
            ("--precision", !self.precision.is_empty(), parity),
            ("--text", self.text.is_some(), bundle && numerics),
            ("--max-tokens", self.max_tokens.is_some(), bundle && numerics),
            ("--backend coreml", core_ml, parity || package && numerics),
            ("--backend coreai", core_ai, parity || numerics && (package || of_asset())),
            ("--plan", self.plan.is_some(), residency && !asset),
            ("--plan-out", self.plan_out.is_some(), residency && !asset),
            ("--record", self.record, bundle),
        ];
        match options.into_iter().find(|(_, given, effective)| *given && !effective) {
            Some((option, ..)) => {
                Err(UsageError::new(format!("{option} has no effect on {kind}"), "leave it out").into())
            }
            None => Ok(()),
        }
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
                print(&self.text(report));
            }
            // a report on stdout replaces the table
            None if [&self.junit, &self.markdown, &self.html].iter().any(|path| is_stdout(path)) => {}
            None => print(&self.text(report)),
        }
        Ok(())
    }
}
