//! Conversions that are killed: whatever the moment, what is under the bundle's name is whole, and the same command
//! ends with the bytes of a run that nobody killed.

use crate::common::folder;
#[cfg(target_os = "linux")]
use crate::common::killed;
use crate::common::model;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use folder::{anec, contents, finish, json, repository};
use model::{copy, edit_json, edit_tensors};
use tempfile::TempDir;

/// A room with a small model in it and the bundle that becomes of it.
struct Room {
    folder: TempDir,
    whole: BTreeMap<String, Vec<u8>>,
}

impl Room {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        copy(&repository("tests/fixtures/families/qwen2-tokenizer"), &folder.path().join("model"));
        let mut room = Room { folder, whole: BTreeMap::new() };
        room.whole = room.clean(&[]);
        room
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A conversion into `out`.
    fn convert(&self, out: &str, more: &[&str]) -> Command {
        let mut command = anec();
        command.args(["convert", "--no-measure", "--set", "name=model", "--threads", "1", "--set", "context=32"]);
        command.args(["--set", "shards.layers=[[0, 1], [1, 2]]"]).args(more);
        command.arg("--source").arg(self.at("model")).arg("--out").arg(self.at(out));
        command
    }

    /// Converts what must convert; returns how many packages were kept from an earlier run.
    fn finish(&self, out: &str, more: &[&str]) -> u64 {
        let (code, _, stderr) = finish(self.convert(out, more).output().unwrap());
        assert_eq!(code, 0, "{stderr}");
        json(&self.at(out).join("report.json"))["run"]["resumed_packages"].as_u64().unwrap()
    }

    /// Files of an uninterrupted conversion.
    fn clean(&self, more: &[&str]) -> BTreeMap<String, Vec<u8>> {
        self.finish("clean", more);
        let bundle = bundle(&self.at("clean"));
        std::fs::remove_dir_all(self.at("clean")).unwrap();
        bundle
    }

    /// Names in the room that begin with `out`.
    fn left(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with("out")).collect()
    }

    fn clear(&self) {
        for name in self.left() {
            std::fs::remove_dir_all(self.at(&name)).unwrap();
        }
    }
}

/// A bundle's files but the report, which holds times.
fn bundle(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = contents(path);
    assert!(files.remove("report.json").is_some());
    files
}

/// Compares without printing the files.
fn assert_same(found: &BTreeMap<String, Vec<u8>>, expected: &BTreeMap<String, Vec<u8>>, what: &str) {
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{what}");
    for (name, bytes) in found {
        assert!(*bytes == expected[name], "{what}: {name} differs");
    }
}

/// Kills a conversion at every step and repeats it. Returns the number of steps, and how often each number of packages
/// was kept; `None` where no process may watch another.
#[cfg(target_os = "linux")]
fn killed_everywhere(more: &[&str]) -> Option<(usize, BTreeMap<u64, usize>)> {
    use killed::{End, Steps, run};
    let mut room = Room::new();
    if !more.is_empty() {
        room.whole = room.clean(more);
    }
    let mut kept = BTreeMap::<u64, usize>::new();
    for step in 1.. {
        match run(&mut room.convert("out", more), Steps::All, step) {
            Ok(End::Killed) => {}
            Ok(End::Itself(status)) => {
                assert_eq!(status, 0);
                println!("{} steps; packages kept, and how often: {kept:?}", step - 1);
                return Some((step - 1, kept));
            }
            Err(error) => {
                anec::base::skipped(&format!("this system doesn't let a process watch another ({error})"));
                return None;
            }
        }
        if room.at("out").exists() {
            // it has its name; only the journal can be left to remove
            let mut files = bundle(&room.at("out"));
            files.remove(".anec-journal.json");
            assert_same(&files, &room.whole, &format!("killed at step {step}, before anything else"));
        }
        *kept.entry(room.finish("out", more)).or_default() += 1;
        assert_same(&bundle(&room.at("out")), &room.whole, &format!("killed at step {step}"));
        assert_eq!(room.left(), ["out"], "killed at step {step}");
        room.clear();
    }
    None
}

#[cfg(target_os = "linux")]
#[test]
fn a_run_killed_at_any_step_goes_on_and_ends_with_the_same_bytes() {
    let Some((steps, kept)) = killed_everywhere(&[]) else { return };
    assert!(steps >= 80 && kept.len() == 4, "{steps} {kept:?}");
}

/// Packages are linked to one asset at the end, and removed.
#[cfg(target_os = "linux")]
#[test]
fn a_conversion_to_core_ai_killed_at_any_step_ends_with_the_same_bytes() {
    let Some((steps, kept)) = killed_everywhere(&["--set", "format=coreai"]) else { return };
    assert!(steps >= 80 && kept.len() == 4, "{steps} {kept:?}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_bundle_is_replaced_in_one_step() {
    use killed::{End, Steps, run};
    let room = Room::new();
    let more = ["--set", "context=16", "--force"];
    let replacement = room.clean(&more);
    let (mut old, mut new) = (0, 0);
    for step in 1.. {
        room.finish("out", &[]);
        match run(&mut room.convert("out", &more), Steps::Names, step) {
            Ok(End::Killed) => {}
            Ok(End::Itself(status)) => {
                assert_eq!(status, 0);
                println!("{} steps, after {old} of which the old bundle was there, after {new} the new one", step - 1);
                assert!(old > 20 && new > 2, "{old} {new}");
                return;
            }
            Err(error) => {
                anec::base::skipped(&format!("this system doesn't let a process watch another ({error})"));
                return;
            }
        }
        let mut files = bundle(&room.at("out"));
        if files["bundle.json"] == room.whole["bundle.json"] {
            assert_same(&files, &room.whole, &format!("killed at step {step}, old"));
            old += 1;
        } else {
            files.remove(".anec-journal.json");
            assert_same(&files, &replacement, &format!("killed at step {step}, new"));
            new += 1;
        }
        room.finish("out", &more);
        assert_same(&bundle(&room.at("out")), &replacement, &format!("killed at step {step}"));
        assert_eq!(room.left(), ["out"], "killed at step {step}");
        room.clear();
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_calibration_killed_at_any_step_goes_on_and_chooses_the_same_codes() {
    use killed::{End, Steps, run};
    let room = Room::new();
    let text = room.at("text.txt");
    std::fs::write(&text, "The sea was calm, and no wind moved. ".repeat(8)).unwrap();
    let text = format!("calibration.text={}", text.display());
    let more = ["--set", "quant.feedback=gptq", "--set", &text];
    let whole = room.clean(&more);
    let mut kept = BTreeMap::<u64, usize>::new();
    for step in (1..).step_by(4) {
        match run(&mut room.convert("out", &more), Steps::Names, step) {
            Ok(End::Killed) => {}
            Ok(End::Itself(status)) => {
                assert_eq!(status, 0);
                println!("{} steps; packages kept, and how often: {kept:?}", step - 1);
                // none, the first layer, both layers, the head
                assert!(step > 40 && kept.len() == 4, "{step} {kept:?}");
                return;
            }
            Err(error) => {
                anec::base::skipped(&format!("this system doesn't let a process watch another ({error})"));
                return;
            }
        }
        if !room.at("out").exists() {
            room.finish("out", &more);
            let report = json(&room.at("out/report.json"));
            *kept.entry(report["calibration"]["resumed_packages"].as_u64().unwrap()).or_default() += 1;
        }
        let mut files = bundle(&room.at("out"));
        files.remove(".anec-journal.json");
        assert_same(&files, &whole, &format!("killed at step {step}"));
        room.clear();
    }
}

/// Kills a run when it has finished a package.
fn interrupt(room: &Room) {
    let journal = room.at("out.partial/.anec-journal.json");
    let finished = || {
        let text = std::fs::read(&journal).ok()?;
        let journal: serde_json::Value = serde_json::from_slice(&text).ok()?;
        Some(!journal["packages"].as_object()?.is_empty())
    };
    for _ in 0..100 {
        let mut child = room.convert("out", &[]).stdout(std::process::Stdio::null()).spawn().unwrap();
        while child.try_wait().unwrap().is_none() && finished() != Some(true) {
            std::thread::sleep(Duration::from_micros(100));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        if finished() == Some(true) {
            return;
        }
        // it was faster than this
        room.clear();
    }
    panic!("no run was caught in the middle");
}

#[test]
fn what_was_finished_counts_only_for_the_same_inputs() {
    let room = Room::new();
    interrupt(&room);
    assert!(room.finish("out", &[]) > 0, "the same inputs go on");
    assert_same(&bundle(&room.at("out")), &room.whole, "the same inputs");
    room.clear();

    interrupt(&room);
    let other = ["--set", "context=16"];
    assert_eq!(room.finish("out", &other), 0, "another manifest begins anew");
    assert_same(&bundle(&room.at("out")), &room.clean(&other), "another manifest");
    room.clear();

    interrupt(&room);
    // the same size, and even the same time
    let weights = room.at("model/model.safetensors");
    let modified = std::fs::metadata(&weights).unwrap().modified().unwrap();
    edit_tensors(&weights, |tensors| tensors.iter_mut().for_each(|(.., bytes)| bytes[0] ^= 1));
    std::fs::File::options().write(true).open(&weights).unwrap().set_modified(modified).unwrap();
    assert_eq!(room.finish("out", &[]), 0, "another source begins anew");
    let changed = bundle(&room.at("out"));
    assert_same(&changed, &room.clean(&[]), "another source");
    assert!(changed["bundle.json"] != room.whole["bundle.json"]);
    room.clear();

    interrupt(&room);
    edit_json(&room.at("model/generation_config.json"), |config| config["eos_token_id"] = 3.into());
    assert_eq!(room.finish("out", &[]), 0, "another file beside the weights begins anew");
    assert_same(&bundle(&room.at("out")), &room.clean(&[]), "another file beside the weights");
    room.clear();

    interrupt(&room);
    assert_eq!(room.finish("out", &["--force"]), 0, "--force begins anew");
}

#[test]
fn two_runs_do_not_disturb_each_other() {
    let room = Room::new();
    // into no folder, and in turns over the bundle that is there
    for round in 0..20 {
        let force: &[&str] = if round % 3 == 2 { &["--force"] } else { &[] };
        let children: Vec<_> = (0..3)
            .map(|_| {
                let mut command = room.convert("out", force);
                command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
                command.spawn().unwrap()
            })
            .collect();
        let mut written = 0;
        for child in children {
            let (code, _, stderr) = finish(child.wait_with_output().unwrap());
            assert!(code == 0 || code == 2 && stderr.contains("another conversion is in progress"), "{code} {stderr}");
            written += usize::from(code == 0);
        }
        assert!(written > 0);
        assert_same(&bundle(&room.at("out")), &room.whole, "after three runs at once");
        assert!(!room.at("out.partial").exists() && !room.at("out.replaced").exists(), "nothing is left beside it");
        if round % 3 != 1 {
            room.clear();
        }
    }
}
