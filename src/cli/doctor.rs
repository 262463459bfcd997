//! `anec doctor`

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::json;

use super::{demo_model, explain, print, print_json, progress};
use anec::MachineReport;
use anec::base::output::write_file;
use anec::base::{FileError, Result};
use anec::coreml::{CoreMl, Engine};
use anec::experiment::{
    Experiment, ProbeError, ProbeReport, ProbeSize, experiments, import, import_arithmetic, launch, run,
};
use anec::report;
use anec::report::table::table;
use anec::report::{bytes, counted};
use anec::validate::verdict::GatesReport;

/// Show what this machine can do and what is missing: convert, validate, compile, read compute plans, use the Neural
/// Engine
///
/// Converts a small built-in model, runs it on the CPU and compares the result with a golden; the exit code is 1 if
/// they differ. On a Mac, small programs show in about 30 seconds which forms of weights and states the Neural Engine
/// takes. --probe runs every experiment that settles a contested rule or shows a published risk, in about an hour, each
/// in its own process; repeat the command to resume. --import evaluates such a file on any machine: which rules it
/// confirms or refutes.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// Run the experiments that FILE lacks, and add their results to it
    #[arg(long, value_name = "FILE", conflicts_with_all = ["import", "experiments", "experiment"])]
    probe: Option<PathBuf>,
    /// Run only these experiments
    #[arg(long, value_name = "ID", value_delimiter = ',', requires = "probe")]
    only: Vec<String>,
    /// Time limit of an experiment
    #[arg(long, value_name = "SECONDS", default_value_t = 300, requires = "probe")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,
    /// Evaluate a file of experiments against the rules, as rows of evidence
    #[arg(long, value_name = "FILE", conflicts_with_all = ["experiments", "experiment"])]
    import: Option<PathBuf>,
    /// List the experiments
    #[arg(long, conflicts_with = "experiment")]
    experiments: bool,
    /// Run one experiment in this process (started by --probe)
    #[arg(long, value_name = "ID", hide = true, requires = "outcome")]
    experiment: Option<String>,
    /// Program size
    #[arg(long, hide = true, default_value = "tiny")]
    size: ProbeSize,
    /// File for the result
    #[arg(long, value_name = "FILE", hide = true)]
    outcome: Option<PathBuf>,
    /// Skip the self-check and the self-test of the Neural Engine
    #[arg(long)]
    quick: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

impl DoctorArgs {
    pub(super) fn run(self) -> Result<u8> {
        match (&self.probe, &self.import, &self.experiment) {
            (Some(file), _, _) => self.probe(file),
            (_, Some(file), _) => self.import(file),
            (_, _, Some(id)) => self.carry_out(id),
            _ if self.experiments => self.list(),
            _ => self.look(),
        }
    }

    /// Returns the experiment with this id.
    fn named(id: &str) -> Result<&'static Experiment> {
        let found = experiments().iter().find(|experiment| experiment.id == id);
        Ok(found.ok_or_else(|| ProbeError::Unknown(id.to_owned()))?)
    }

    fn probe(&self, file: &Path) -> Result<u8> {
        let chosen = match self.only.is_empty() {
            true => experiments().iter().collect(),
            false => self.only.iter().map(|id| Self::named(id)).collect::<Result<Vec<_>>>()?,
        };
        let machine = CoreMl::new()?.machine()?;
        let program = std::env::current_exe().map_err(FileError::of(Path::new("anec"), "find"))?;
        let command = |experiment: &Experiment, size: ProbeSize, outcome: &Path| {
            let mut command = Command::new(&program);
            command.args(["doctor", "--experiment", &experiment.id, "--size", &size.to_string(), "--outcome"]);
            command.arg(outcome);
            command
        };
        let limit = Duration::from_secs(self.limit);
        let found = launch(&chosen, machine, file, limit, &command, &progress::bytes())?;
        if self.json {
            print_json(&found);
        } else {
            print(&report::experiments(&found));
            print(&format!(
                "results are in {}; `anec doctor --import` evaluates them against the rules",
                file.display()
            ));
        }
        Ok(0)
    }

    fn import(&self, file: &Path) -> Result<u8> {
        let found = ProbeReport::read(file)?;
        let (findings, arithmetic) = (import(&found), import_arithmetic(&found));
        if self.json {
            print_json(&json!({ "machine": found.machine, "findings": findings, "arithmetic": arithmetic }));
        } else {
            print(&(report::rule_findings(&found, &findings) + &report::arithmetic_findings(&arithmetic)));
        }
        Ok(0)
    }

    fn carry_out(&self, id: &str) -> Result<u8> {
        let experiment = Self::named(id)?;
        let room = tempfile::tempdir().map_err(FileError::of(std::env::temp_dir(), "create a folder in"))?;
        let found = run(&CoreMl::new()?, experiment, self.size, room.path())?;
        if let Some(outcome) = &self.outcome {
            let text = serde_json::to_vec(&found).map_err(|e| FileError::of(outcome, "write")(e.into()))?;
            write_file(outcome, &text)?;
        }
        Ok(0)
    }

    fn list(&self) -> Result<u8> {
        if self.json {
            print_json(&experiments());
        } else {
            let rows = experiments().iter().map(|experiment| {
                let rules: Vec<&str> = experiment.settles.iter().map(|settles| settles.rule.as_str()).collect();
                vec![experiment.id.clone(), experiment.asks.clone(), experiment.about.clone(), rules.join(", ")]
            });
            print(&table(&["experiment", "asks", "about", "settles"], rows));
        }
        Ok(0)
    }

    fn look(&self) -> Result<u8> {
        let machine = MachineReport::take(!self.quick)?;
        let self_check = (!self.quick).then(SelfCheck::run);
        let code = self_check.as_ref().map_or(0, |check| check.exit_code);
        if self.json {
            print_json(&Findings { machine, self_check });
        } else {
            print(&text(&machine));
            self_check.iter().for_each(|check| print(&format!("\n{}", check.text())));
        }
        Ok(code)
    }
}

/// Result of `anec doctor`.
#[derive(Debug, Serialize)]
struct Findings {
    #[serde(flatten)]
    machine: MachineReport,
    /// Absent with `--quick`.
    #[serde(skip_serializing_if = "Option::is_none")]
    self_check: Option<SelfCheck>,
}

/// Result of converting and running the demo model.
#[derive(Debug, Serialize)]
struct SelfCheck {
    passed: bool,
    seconds: f64,
    /// Report of the gates, if they ran.
    report: Option<GatesReport>,
    /// Error that prevented the gates from running.
    error: Option<String>,
    #[serde(skip)]
    exit_code: u8,
}

impl SelfCheck {
    fn run() -> Self {
        let start = Instant::now();
        let checked = demo_model::LANGUAGE.self_check(progress::bytes());
        let seconds = start.elapsed().as_secs_f64();
        match checked {
            Ok(report) => {
                let exit_code = report.exit_code(false);
                SelfCheck { passed: exit_code == 0, seconds, report: Some(report), error: None, exit_code }
            }
            Err(error) => {
                let exit_code = error.fault().exit_code();
                SelfCheck { passed: false, seconds, report: None, error: Some(explain(&error)), exit_code }
            }
        }
    }

    fn text(&self) -> String {
        let what = "self-check: the demo model, converted, run on the CPU and compared with transformers' golden";
        let verdict = if self.passed { "passed" } else { "failed" };
        let detail = match (&self.report, &self.error) {
            (_, Some(error)) => error.clone(),
            (Some(report), _) if self.passed => {
                let checks = report.gates.iter().flat_map(|gate| &gate.checks);
                let cosines = checks.clone().filter_map(|check| check.measured.get("cosine").copied());
                let least =
                    cosines.min_by(f64::total_cmp).map_or(String::new(), |least| format!(", cosine (min) {least:.5}"));
                format!("{}{least}, {:.1} s\n", counted(checks.count(), "check"), self.seconds)
            }
            (Some(report), _) => report::gates(report),
            (None, None) => String::new(),
        };
        let between = if self.passed { "; " } else { "\n" };
        format!("{what}: {verdict}{between}{detail}")
    }
}

fn text(findings: &MachineReport) -> String {
    let mut text = format!("anec {} on {}, {} cores", findings.anec_version, findings.system, findings.cores);
    if let Some(free) = findings.free_bytes {
        text.push_str(&format!(", {} free here", bytes(free)));
    }
    let cache = findings.cache.as_ref().map_or("none: HOME isn't set".into(), |folder| folder.display().to_string());
    text.push_str(&format!(
        "\nexecutor: {}, {}\ncache: {cache}\n",
        findings.processor.join(", "),
        counted(findings.threads, "thread"),
    ));
    if let Some(machine) = &findings.machine {
        text.push_str(&format!("{machine}\n"));
    }
    let rows = findings.abilities.iter().map(|ability| {
        let works = if ability.works { "yes" } else { "no" };
        vec![ability.what.to_owned(), works.to_owned(), ability.because.clone()]
    });
    text.push_str(&format!("\n{}", table(&["this machine can", "", "with, or missing"], rows)));
    if !findings.placement.is_empty() {
        let rows = findings.placement.iter().map(|placed| {
            let share = format!("{} of {}", placed.on_neural_engine, placed.compute_ops);
            vec![placed.form.to_string(), share, placed.error.clone().unwrap_or_default()]
        });
        text.push_str(&format!("\n{}", table(&["self-test", ">on the Neural Engine", "error"], rows)));
    }
    text
}
