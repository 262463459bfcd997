//! anec as a library: features and packages.

use std::path::Path;
use std::process::Command;

/// Crates that the library is built from: its default features and these.
fn dependencies(features: &str) -> Vec<String> {
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(env!("CARGO_MANIFEST_DIR"));
    command.args(["tree", "--offline", "-p", "anec", "-e", "normal", "--prefix", "none"]);
    let output = command.args(["--features", features]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let mut names: Vec<String> = text.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect();
    names.sort();
    names.dedup();
    names
}

#[test]
fn a_program_that_only_runs_bundles_builds_neither_converter_nor_server() {
    let has = |crates: &[String], name: &str| crates.iter().any(|found| found == name);
    let least = dependencies("");
    for name in ["anec-runtime", "anec-exec", "anec-package"] {
        assert!(has(&least, name), "{name} runs bundles");
    }
    let converter = ["anec-source", "anec-family", "anec-quant", "anec-convert", "anec-validate", "anec-report"];
    let others = ["anec-serve", "axum", "tokio", "llguidance", "anec-hub", "clap", "indicatif"];
    for name in converter.iter().chain(&others) {
        assert!(!has(&least, name), "{name} isn't needed to run bundles");
    }
    let (convert, serve) = (dependencies("convert"), dependencies("serve"));
    assert!(converter.iter().all(|name| has(&convert, name) && !has(&serve, name)));
    assert!(["anec-serve", "axum", "tokio"].iter().all(|name| has(&serve, name) && !has(&convert, name)));
    assert!(has(&serve, "llguidance") && !has(&convert, "llguidance") && !has(&convert, "anec-hub"));
    assert!(has(&dependencies("hub"), "anec-hub"));
}

/// Files that a crate includes are in its folder, so that they are in its package: what lies in folders of the
/// repository is reached through links.
#[test]
fn crates_include_no_file_from_outside_their_folder() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut looked_at = 0;
    let mut folders: Vec<_> = std::fs::read_dir(&source).unwrap().map(|entry| entry.unwrap().path()).collect();
    while let Some(path) = folders.pop() {
        if path.is_dir() {
            // the program's own files are packed with the whole root
            if path != source.join("cli") {
                folders.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            }
            continue;
        }
        let text = match path.extension() {
            Some(extension) if extension == "rs" => std::fs::read_to_string(&path).unwrap(),
            _ => continue,
        };
        looked_at += 1;
        // unit tests come last in a file, and aren't built from a package
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let outside = code.lines().any(|line| line.contains("include_") && line.contains("\"../../"));
        let of_tests = path.file_stem().is_some_and(|stem| stem == "tests");
        assert!(!outside || of_tests, "{} includes a file from outside its crate", path.display());
    }
    assert!(looked_at > 300, "only {looked_at} files were found");
}
