//! The GitHub Action: its script, run as a runner runs it, says what the gates say.
#![cfg(unix)]

use crate::common::folder;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use folder::{json, repository, run};
use serde_json::Value as Yaml;

/// The action, and its step that validates.
fn action() -> (Yaml, Yaml) {
    let text = std::fs::read_to_string(repository("action.yml")).unwrap();
    let action: Yaml = serde_yaml::from_str(&text).unwrap();
    let steps = action["runs"]["steps"].as_array().unwrap();
    let step = steps.iter().find(|step| step["id"] == "validate").unwrap().clone();
    (action, step)
}

/// Runs the step in a folder with these inputs; returns its status, its outputs and the step summary.
fn step(folder: &Path, given: &[(&str, &str)]) -> (i32, BTreeMap<String, String>, String) {
    let (action, step) = action();
    let inputs = action["inputs"].as_object().unwrap();
    for (name, _) in given {
        assert!(inputs.contains_key(*name), "there is no input {name}");
    }
    let input = |name: &str| {
        let own = given.iter().find(|(given, _)| *given == name).map(|(_, value)| (*value).to_owned());
        own.unwrap_or_else(|| inputs[name]["default"].as_str().unwrap().to_owned())
    };
    let (output, summary) = (folder.join("output"), folder.join("summary"));
    let script = folder.join("step.sh");
    std::fs::write(&script, step["run"].as_str().unwrap()).unwrap();
    for file in [&output, &summary] {
        std::fs::write(file, "").unwrap();
    }
    // what `shell: bash` is
    let mut command = Command::new("bash");
    command.args(["--noprofile", "--norc", "-eo", "pipefail"]).arg(&script).current_dir(folder);
    command.env("GITHUB_OUTPUT", &output).env("GITHUB_STEP_SUMMARY", &summary).env("RUNNER_TEMP", folder);
    for (variable, value) in step["env"].as_object().unwrap() {
        let value = value.as_str().unwrap();
        let name = value.strip_prefix("${{ inputs.").and_then(|rest| rest.strip_suffix(" }}")).unwrap();
        command.env(variable, input(name));
    }
    let status = command.output().unwrap().status.code().unwrap();
    let outputs = std::fs::read_to_string(output).unwrap();
    let outputs = outputs.lines().filter_map(|line| line.split_once('=')).map(|(k, v)| (k.to_owned(), v.to_owned()));
    (status, outputs.collect(), std::fs::read_to_string(summary).unwrap())
}

#[test]
fn the_step_reports_what_the_gates_say() {
    let room = tempfile::tempdir().unwrap();
    let bundle = room.path().join("a model.anec");
    let (code, _, stderr) = run(&["convert", "-m", "demo", "--out", bundle.to_str().unwrap()]);
    assert_eq!(code, 0, "{stderr}");
    let golden = repository("demo/golden.safetensors");
    let anec = ("anec", env!("CARGO_BIN_EXE_anec"));
    let bundle = ("path", bundle.to_str().unwrap());

    let gates = [anec, bundle, ("gates", "structure parity"), ("golden", golden.to_str().unwrap())];
    let (code, outputs, summary) = step(room.path(), &gates);
    assert_eq!((code, outputs["exit-code"].as_str()), (0, "0"), "{summary}");
    assert!(summary.contains("| parity |") && !summary.contains("| numerics |"), "{summary}");
    let reports = room.path().join("anec-reports");
    assert_eq!(json(&reports.join("report.json"))["verdict"], "passed");
    for file in ["report.xml", "report.md", "report.html"] {
        assert!(reports.join(file).exists(), "{file}");
    }

    // what can't be tried fails the step, unless that is accepted; so does a bundle that isn't there
    let residency = [anec, bundle, ("gates", "residency"), ("reports", "placement")];
    let (code, outputs, summary) = step(room.path(), &residency);
    assert_eq!((code, outputs["exit-code"].as_str()), (3, "3"), "{summary}");
    assert_eq!(json(&room.path().join("placement/report.json"))["verdict"], "unproven");
    let accepted = [&residency[..], &[("allow-unproven", "true")]].concat();
    assert_eq!(step(room.path(), &accepted).0, 0);
    let (code, outputs, _) = step(room.path(), &[anec, ("path", "elsewhere"), ("reports", "nothing")]);
    assert_eq!((code, outputs["exit-code"].as_str()), (2, "2"));
    // a name that is a script is only a name
    let (code, _, summary) = step(room.path(), &[anec, ("path", "$(touch owned); `touch owned`")]);
    assert!(code == 2 && !room.path().join("owned").exists(), "{summary}");
}

#[test]
fn what_the_example_fetches_is_what_the_action_keeps() {
    let text = std::fs::read_to_string(repository(".github/examples/validate.yml")).unwrap();
    let example: Yaml = serde_yaml::from_str(&text).unwrap();
    let (action, _) = action();
    let steps = action["runs"]["steps"].as_array().unwrap();
    let kept = steps.last().unwrap()["with"]["name"].as_str().unwrap();
    assert_eq!(kept, "${{ inputs.artifact || format('anec-reports-{0}', github.job) }}");
    let mut fetched = 0;
    for (_, job) in example["jobs"].as_object().unwrap() {
        for step in job["steps"].as_array().unwrap() {
            let uses = step["uses"].as_str().unwrap();
            if uses.starts_with("actions/download-artifact@") {
                let name = step["with"]["name"].as_str().unwrap();
                let job = name.strip_prefix("anec-reports-").unwrap();
                assert!(example["jobs"].get(job).is_some(), "{name} is of no job");
                fetched += 1;
            }
            if uses.starts_with("anec/") {
                for (input, _) in step["with"].as_object().unwrap() {
                    assert!(action["inputs"].get(input).is_some(), "{input:?} is no input of the action");
                }
            }
        }
    }
    assert_eq!(fetched, 1);
}
