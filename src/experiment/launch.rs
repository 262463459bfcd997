//! Runs all experiments, each in its own process: a crash or hang of Core ML is an outcome, and the others continue.

use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::IntoEnumIterator;

use super::{Experiment, OutcomeKind, ProbeOutcome, ProbeSize};
use anec_base::clock::{now, strftime};
use anec_base::output::write_file;
use anec_base::{Diagnostic, Fault, FileError, Progress, Result, json};
use anec_coreml::plan::Machine;

/// Version of the schema; other versions are refused.
pub const SCHEMA_VERSION: u32 = 1;
/// Maximum size of a report in bytes.
const MAX_BYTES: u64 = 1 << 26;
/// Characters kept of a process's last output.
const MAX_MESSAGE: usize = 400;

/// Outcomes of the experiments on a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProbeReport {
    /// Version of this schema.
    pub schema_version: u32,
    /// Version of anec.
    pub anec_version: String,
    /// Start date.
    pub date: String,
    /// Machine.
    pub machine: Machine,
    /// Outcomes, in the order of the experiments.
    pub outcomes: Vec<ProbeEntry>,
}

/// Outcome of one experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProbeEntry {
    /// Name of the experiment.
    pub experiment: String,
    /// Size of its program.
    pub size: ProbeSize,
    /// Outcome.
    pub outcome: ProbeOutcome,
}

/// Error with a report of experiments.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// File that isn't a report of this version.
    #[error("probe report {file}: {problem}")]
    Report {
        /// Path of the file.
        file: String,
        /// Found and expected.
        problem: String,
    },
    /// Report of another machine.
    #[error("probe report {file} is of {found}, this is {here}")]
    OtherMachine {
        /// Path of the file.
        file: String,
        /// Machine of the report.
        found: String,
        /// This machine.
        here: String,
    },
    /// Unknown experiment.
    #[error("there is no experiment `{0}`")]
    Unknown(String),
}

impl Diagnostic for ProbeError {
    fn fault(&self) -> Fault {
        match self {
            ProbeError::Report { .. } => Fault::Source,
            ProbeError::OtherMachine { .. } | ProbeError::Unknown(_) => Fault::Usage,
        }
    }

    fn help(&self) -> Option<String> {
        let help = match self {
            ProbeError::Report { .. } => "run the experiments on a Mac, which writes one",
            ProbeError::OtherMachine { .. } => "give another file: results of a machine and a build stay together",
            ProbeError::Unknown(_) => "`experiments()` lists them",
        };
        Some(help.into())
    }
}

impl ProbeReport {
    /// Returns the JSON Schema of a report.
    pub fn schema() -> serde_json::Value {
        schemars::schema_for!(ProbeReport).into()
    }

    /// Reads a report.
    ///
    /// # Errors
    /// If the file can't be read, or isn't a report of this version.
    pub fn read(path: &Path) -> Result<ProbeReport> {
        let wrong = |problem: String| ProbeError::Report { file: path.display().to_string(), problem };
        let text = anec_base::input::read(path, MAX_BYTES).map_err(|e| wrong(format!("can't be read: {}", e.error)))?;
        let json: serde_json::Value = json::read(&text).map_err(|e| wrong(format!("it isn't JSON: {e}")))?;
        match json.get("schema_version").and_then(serde_json::Value::as_u64) {
            Some(version) if version == u64::from(SCHEMA_VERSION) => {}
            Some(version) => {
                return Err(wrong(format!("schema version {version}, expected {SCHEMA_VERSION}")).into());
            }
            None => return Err(wrong("no `schema_version`: this is no report of experiments".into()).into()),
        }
        Ok(json::read_value(&json).map_err(|e| wrong(e.to_string()))?)
    }

    fn write(&self, path: &Path) -> Result<()> {
        let mut text = serde_json::to_vec_pretty(self).map_err(|e| FileError::of(path, "write")(e.into()))?;
        text.push(b'\n');
        Ok(write_file(path, &text)?)
    }

    fn has(&self, experiment: &Experiment, size: ProbeSize) -> bool {
        self.outcomes.iter().any(|entry| entry.experiment == experiment.id && entry.size == size)
    }
}

/// Runs the experiments that a report doesn't contain yet, and writes the report after each. `command` returns the
/// process that runs one experiment and writes its outcome to a file.
///
/// # Errors
/// If the report is of another machine, or a file can't be written.
pub fn launch(
    experiments: &[&Experiment],
    machine: Machine,
    report: &Path,
    limit: Duration,
    command: &dyn Fn(&Experiment, ProbeSize, &Path) -> Command,
    progress: &Progress,
) -> Result<ProbeReport> {
    let mut found = match report.exists() {
        true => ProbeReport::read(report)?,
        false => ProbeReport {
            schema_version: SCHEMA_VERSION,
            anec_version: env!("CARGO_PKG_VERSION").into(),
            date: strftime("%FT%TZ", now()),
            machine: machine.clone(),
            outcomes: Vec::new(),
        },
    };
    if found.machine != machine {
        let (file, here) = (report.display().to_string(), machine.to_string());
        return Err(ProbeError::OtherMachine { file, found: found.machine.to_string(), here }.into());
    }
    let room = tempfile::tempdir().map_err(FileError::of(std::env::temp_dir(), "create a folder in"))?;
    // small ones first, for early results
    for size in ProbeSize::iter() {
        let due = |experiment: &&&Experiment| experiment.sizes.contains(&size) && !found.has(experiment, size);
        for experiment in experiments.iter().filter(due).collect::<Vec<_>>() {
            progress.stage(&format!("{}, {size}", experiment.id));
            let file = room.path().join("outcome.json");
            let outcome = in_process(command(experiment, size, &file), &file, limit)?;
            found.outcomes.push(ProbeEntry { experiment: experiment.id.clone(), size, outcome });
            found.write(report)?;
        }
    }
    Ok(found)
}

/// Runs a process to its end or time limit, and reads the outcome that it wrote.
fn in_process(mut command: Command, file: &Path, limit: Duration) -> Result<ProbeOutcome> {
    let _ = std::fs::remove_file(file);
    let log = file.with_extension("log");
    let output = std::fs::File::create(&log).map_err(FileError::of(&log, "create"))?;
    let errors = output.try_clone().map_err(FileError::of(&log, "write"))?;
    let program = std::path::PathBuf::from(command.get_program());
    let started = command.stdin(Stdio::null()).stdout(output).stderr(errors).spawn();
    let mut child = started.map_err(FileError::of(&program, "start"))?;
    let Some(status) = wait(&mut child, limit) else {
        let said = format!("no end after {} s", limit.as_secs_f64());
        return Ok(ProbeOutcome::ended(OutcomeKind::Hung, said));
    };
    let text = std::fs::read(file).unwrap_or_default();
    if let (true, Ok(outcome)) = (status.success(), serde_json::from_slice::<ProbeOutcome>(&text)) {
        return Ok(outcome);
    }
    let written = std::fs::read(&log).unwrap_or_default();
    let written = String::from_utf8_lossy(&written);
    let skipped = written.trim().chars().count().saturating_sub(MAX_MESSAGE);
    let tail: String = written.trim().chars().skip(skipped).collect();
    Ok(ProbeOutcome::ended(OutcomeKind::Crashed, format!("{status}: {tail}").trim_end_matches(": ").to_owned()))
}

/// Waits for a process; kills it at the time limit.
fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let begin = Instant::now();
    let mut pause = Duration::from_millis(2);
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        if begin.elapsed() >= limit {
            let _ = child.kill();
            let _ = child.wait();
            return None;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(100));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::import::import;
    use crate::{experiments, run};
    use anec_advice::rules::Says;
    use anec_coreml::plan::Device;
    use anec_testing::fake::{DoubleEngine, machine};

    /// Recorded outcomes of the test's machine: `tests/fixtures/probes/recorded.yaml`.
    fn recorded() -> BTreeMap<String, String> {
        let path = anec_testing::root().join("tests/fixtures/probes/recorded.yaml");
        serde_yaml::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    /// Process of one experiment: this test, started by the next one.
    #[test]
    fn process_of_an_experiment() {
        let Ok(given) = std::env::var("ANEC_EXPERIMENT") else { return };
        let [id, size, file] = given.split('|').collect::<Vec<_>>()[..] else { panic!("{given}") };
        let experiment = experiments().iter().find(|experiment| experiment.id == id).unwrap();
        let outcome = match recorded().get(id).map(String::as_str) {
            Some("hang") => loop {
                std::thread::sleep(Duration::from_secs(60));
            },
            Some("crash") => {
                eprintln!("bnns::GraphCompile: assertion");
                std::process::abort()
            }
            Some(said) if said.starts_with("refuse ") => {
                ProbeOutcome::ended(OutcomeKind::Refused, said.trim_start_matches("refuse "))
            }
            other => {
                let mut engine = DoubleEngine::new();
                let elsewhere = other.map(|name| &*name.to_owned().leak());
                engine.elsewhere.extend(elsewhere.map(|name| (name, Device::Cpu)));
                let room = tempfile::tempdir().unwrap();
                run(&engine, experiment, size.parse().unwrap(), room.path()).unwrap()
            }
        };
        std::fs::write(file, serde_json::to_vec(&outcome).unwrap()).unwrap();
    }

    fn of_double(experiment: &Experiment, size: ProbeSize, file: &Path) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let name = "launch::tests::process_of_an_experiment";
        command.args(["--exact", name, "--nocapture"]);
        command.env("ANEC_EXPERIMENT", format!("{}|{size}|{}", experiment.id, file.display()));
        command
    }

    #[test]
    fn experiments_are_resumed_and_hangs_and_crashes_are_findings() {
        let room = tempfile::tempdir().unwrap();
        let file = room.path().join("probe.json");
        let recorded = recorded();
        let named = |names: &[&str]| -> Vec<&Experiment> {
            experiments().iter().filter(|experiment| names.contains(&experiment.id.as_str())).collect()
        };
        let (patient, limit) = (Duration::from_secs(60), Duration::from_secs(6));
        let silent = Progress::hidden();
        // one experiment first; then all recorded ones except that
        let first = named(&["weights-fp16"]);
        let report = launch(&first, machine(), &file, patient, &of_double, &silent).unwrap();
        assert_eq!(report.outcomes.len(), 2);
        let mut names: Vec<&str> = recorded.keys().map(String::as_str).collect();
        names.push("weights-fp16");
        // large programs are equivalent here: the report already has them
        let mut begun = ProbeReport::read(&file).unwrap();
        for experiment in named(&names) {
            if experiment.sizes.contains(&ProbeSize::Large) && !begun.has(experiment, ProbeSize::Large) {
                let outcome = ProbeOutcome::ended(OutcomeKind::Resident, "recorded");
                begun.outcomes.push(ProbeEntry { experiment: experiment.id.clone(), size: ProbeSize::Large, outcome });
            }
        }
        begun.write(&file).unwrap();
        let report = launch(&named(&names), machine(), &file, limit, &of_double, &silent).unwrap();
        assert_eq!(report.outcomes.len(), 2 * names.len());
        assert_eq!(ProbeReport::read(&file).unwrap(), report);
        jsonschema::validate(&ProbeReport::schema(), &serde_json::to_value(&report).unwrap()).unwrap();
        let of = |id: &str| {
            let small = |entry: &&ProbeEntry| entry.experiment == id && entry.size == ProbeSize::Tiny;
            &report.outcomes.iter().find(small).unwrap().outcome
        };
        for (id, recorded) in &recorded {
            let kind = match recorded.as_str() {
                "hang" => OutcomeKind::Hung,
                "crash" => OutcomeKind::Crashed,
                said if said.starts_with("refuse ") => OutcomeKind::Refused,
                "nothing" => OutcomeKind::Resident,
                _ => OutcomeKind::Elsewhere,
            };
            assert_eq!(of(id).kind, Some(kind), "{id}: {:?}", of(id));
        }
        assert_eq!(of("weights-fp16").kind, Some(OutcomeKind::Resident));
        let crashed = of("state-four");
        assert!(crashed.said.as_deref().unwrap().contains("bnns::GraphCompile"), "{crashed:?}");
        assert_eq!(of("state-one").codes, ["-14"]);

        // results of different machines don't mix
        let other = Machine { os_build: "25A1".into(), ..machine() };
        let error = launch(&first, other, &file, limit, &of_double, &silent).unwrap_err();
        assert!(error.to_string().contains("is of Apple M4 Pro"), "{error}");

        // conclusions about the rules
        let findings = import(&report);
        let says = |rule: &str| findings.iter().find(|finding| finding.rule == rule).map(|finding| finding.says);
        assert_eq!(says("state-count"), Some(Says::For));
        assert_eq!(says("order-statistics"), Some(Says::For));
        assert_eq!(says("depthwise-convolution"), Some(Says::Against));
        assert_eq!(says("infinite-mask"), Some(Says::For));
        let states = findings.iter().find(|finding| finding.rule == "state-count").unwrap();
        let row = &states.evidence[0];
        assert_eq!((row.device.as_deref(), row.os.as_deref()), (Some("M4 Pro"), Some("macOS 15.6 (24G84)")));
        assert!(row.source.starts_with("anec doctor --probe ") && row.source.contains("state-four"), "{}", row.source);
    }

    #[test]
    fn invalid_reports_are_refused() {
        let room = tempfile::tempdir().unwrap();
        let file = room.path().join("probe.json");
        let refused = |text: &str| {
            std::fs::write(&file, text).unwrap();
            ProbeReport::read(&file).unwrap_err().to_string()
        };
        assert!(refused("{}").ends_with("no `schema_version`: this is no report of experiments"));
        assert!(refused(r#"{"schema_version": 9}"#).ends_with("schema version 9, expected 1"));
        assert!(refused("probe").contains("isn't JSON"));
    }
}
