//! coremltools, which judges packages on any OS.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Verdict of coremltools on one package.
pub struct Verdict {
    /// The package's name, without extension.
    pub package: String,
    /// Output line: functions with their ops and lengths, errors, warnings.
    pub json: serde_json::Value,
}

/// The Python with coremltools, as `ANEC_PYTHON` names it. Warns, past the test harness, where there is none.
pub fn python() -> Option<PathBuf> {
    let python = std::env::var_os("ANEC_PYTHON").map(PathBuf::from);
    if python.is_none() {
        anec::base::skipped("not checked against coremltools: ANEC_PYTHON isn't set");
    }
    python
}

/// Judges every package of a folder, in one process, at the least and the most tokens that a package allows.
pub fn judge(python: &Path, packages: &Path) -> Vec<Verdict> {
    judge_at(python, packages, "ends")
}

/// Judges every package at the given lengths, which all flexible dimensions share; without lengths, sizes stay unknown.
pub fn judge_at(python: &Path, packages: &Path, lengths: &str) -> Vec<Verdict> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracle/check_package.py");
    let output = Command::new(python).arg(script).args(["--lengths", lengths]).arg(packages).output();
    let output = output.expect("ANEC_PYTHON runs");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let verdicts: Vec<Verdict> = stdout
        .lines()
        .map(|line| {
            let json: serde_json::Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
            let package = Path::new(json["package"].as_str().unwrap()).file_stem().unwrap();
            Verdict { package: package.to_string_lossy().into_owned(), json }
        })
        .collect();
    let given = std::fs::read_dir(packages).unwrap().count();
    assert!(given > 0, "there is nothing to judge");
    assert_eq!(verdicts.len(), given, "a verdict for each package\n{stderr}");
    let unsound = verdicts.iter().any(|verdict| verdict.json["errors"] != serde_json::json!([]));
    assert_eq!(output.status.code(), Some(i32::from(unsound)), "{stderr}");
    verdicts
}

impl Verdict {
    /// Errors, and with `strict` warnings, one per line.
    pub fn complaints(&self, strict: bool) -> String {
        let kinds = if strict { &["errors", "warnings"][..] } else { &["errors"] };
        let lists = kinds.iter().flat_map(|kind| self.json[kind].as_array().unwrap());
        lists.map(|text| format!("{}: {}\n", self.package, text.as_str().unwrap())).collect()
    }
}
