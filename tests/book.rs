//! The book's commands work: every line of a page that begins with `$ anec` is run, page by page, where the demo model lies.
#![cfg(unix)]

use std::path::Path;
use std::process::Command;

/// The words of a command line; quotes hold a word together.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quoted = false;
    for c in line.chars() {
        match c {
            '"' => quoted = !quoted,
            ' ' if !quoted => words.push(String::new()),
            c => words.last_mut().expect("there is always one").push(c),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

#[test]
fn the_commands_of_every_page_succeed() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut run = 0;
    for page in std::fs::read_dir(repository.join("book/src")).unwrap() {
        let page = page.unwrap().path();
        let text = std::fs::read_to_string(&page).unwrap();
        let room = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(repository.join("demo"), room.path().join("demo")).unwrap();
        for command in text.lines().filter_map(|line| line.strip_prefix("$ anec ")) {
            let mut program = Command::new(env!("CARGO_BIN_EXE_anec"));
            let output = program.args(words(command)).current_dir(room.path()).env("PATH", "").output().unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{}: anec {command}: {}\n{stderr}", page.display(), output.status);
            run += 1;
        }
    }
    assert!(run > 10, "only {run} commands were found");
}

#[test]
fn every_page_is_in_the_summary_and_every_link_leads_somewhere() {
    let book = Path::new(env!("CARGO_MANIFEST_DIR")).join("book/src");
    let summary = std::fs::read_to_string(book.join("SUMMARY.md")).unwrap();
    for page in std::fs::read_dir(&book).unwrap() {
        let name = page.unwrap().file_name().into_string().unwrap();
        assert!(name == "SUMMARY.md" || summary.contains(&format!("({name})")), "{name} is not in SUMMARY.md");
        let text = std::fs::read_to_string(book.join(&name)).unwrap();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            assert!(link.starts_with("http") || book.join(link).exists(), "{name}: {link}");
        }
    }
}
