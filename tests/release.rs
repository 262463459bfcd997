//! Contents of a release: archives, checksums, the formula, completions, manual pages.
#![cfg(unix)]

use crate::common::folder::{anec, finish, repository, run};

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// Runs a script of `tools/` with the system's own programs.
fn tool(name: &str, arguments: &[&str]) -> (i32, String, String) {
    finish(Command::new(repository("tools").join(name)).args(arguments).output().unwrap())
}

#[test]
fn an_archive_has_the_program_and_what_describes_it_and_the_formula_its_digest() {
    let room = tempfile::tempdir().unwrap();
    let out = room.path().to_str().unwrap();
    let targets = ["aarch64-apple-darwin", "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"];
    let (code, _, stderr) = tool("formula.sh", &["1.2.3", "https://example.org/a/releases/download/v1.2.3", out]);
    assert!(code == 4 && stderr.contains("is missing"), "{stderr}");
    // a script that runs the program, which is large, stands for it in the other archives
    let program = env!("CARGO_BIN_EXE_anec");
    let script = room.path().join("anec");
    std::fs::write(&script, format!("#!/bin/sh\nexec '{program}' \"$@\"\n")).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let packed = [script.to_str().unwrap(), program, script.to_str().unwrap()];
    for (target, program) in targets.into_iter().zip(packed) {
        let (code, _, stderr) = tool("archive.sh", &[program, target, out]);
        assert_eq!(code, 0, "{stderr}");
    }
    let listing = Command::new("tar").args(["-tzf", &format!("{out}/anec-{}.tar.gz", targets[1])]).output().unwrap();
    let (_, listing, _) = finish(listing);
    for file in ["anec", "LICENSE", "completions/_anec", "completions/anec.bash", "man/anec.1", "man/anec-run.1"] {
        assert!(listing.lines().any(|line| line == format!("anec-{}/{file}", targets[1])), "{file}: {listing}");
    }
    let mut check = Command::new(if cfg!(target_os = "macos") { "shasum" } else { "sha256sum" });
    let sums = format!("anec-{}.tar.gz.sha256", targets[0]);
    assert!(check.args(["--check", "--status", &sums]).current_dir(room.path()).status().unwrap().success());

    let (code, formula, stderr) = tool("formula.sh", &["1.2.3", "https://example.org/a/releases/download/v1.2.3", out]);
    assert_eq!(code, 0, "{stderr}");
    assert!(
        formula.starts_with("class Anec < Formula\n") && formula.contains("homepage \"https://example.org/a\""),
        "{formula}"
    );
    for target in targets {
        let digest = std::fs::read_to_string(room.path().join(format!("anec-{target}.tar.gz.sha256"))).unwrap();
        let digest = digest.split(' ').next().unwrap();
        assert!(
            formula.contains(&format!("/anec-{target}.tar.gz\"")) && formula.contains(&format!("sha256 \"{digest}\""))
        );
    }
    if Command::new("ruby").arg("-v").output().is_ok() {
        std::fs::write(room.path().join("anec.rb"), &formula).unwrap();
        let status = Command::new("ruby").arg("-c").arg(room.path().join("anec.rb")).status().unwrap();
        assert!(status.success());
    }
}

#[test]
fn completions_and_pages_know_every_verb() {
    let (_, help, _) = run(&["--help"]);
    let verbs: Vec<&str> = help
        .lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty())
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert!(verbs.len() > 20, "{verbs:?}");
    let room = tempfile::tempdir().unwrap();
    assert_eq!(run(&["man", "--out", room.path().to_str().unwrap()]).0, 0);
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let (code, script, _) = run(&["completions", shell]);
        assert!(code == 0 && verbs.iter().all(|verb| script.contains(verb)), "{shell}");
    }
    for verb in verbs {
        let page = std::fs::read_to_string(room.path().join(format!("anec-{verb}.1"))).unwrap();
        assert!(page.contains(&format!("anec\\-{verb}")), "{page}");
    }
    // a shell that has read the script is content with it
    let (_, script, _) = run(&["completions", "bash"]);
    let path = room.path().join("anec.bash");
    std::fs::write(&path, script).unwrap();
    if let Ok(status) = Command::new("/bin/bash").arg("-n").arg(&path).status() {
        assert!(status.success());
    }
    assert!(!anec().args(["completions", "cobol"]).output().unwrap().status.success());
}
