//! The book is true: every command of a ```console block in which a command names `anec` is run, page by page, where
//! the demo model lies, and what the page shows below a command is what the command prints. Tables between `<!--
//! generated: NAME -->` and `<!-- end -->` are made anew from the files that the program reads, and so are the plots.
//!
//! `INSTA_UPDATE=always` writes into the pages what is found instead.
#![cfg(unix)]

mod compare;
mod families;
mod generated;
mod links;
mod plots;

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::folder::repository;

/// Tools that commands of the book may use beside the program.
const TOOLS: &[&str] =
    &["cat", "chmod", "cp", "cut", "dd", "grep", "head", "ls", "mkdir", "rm", "sed", "tail", "tr", "wc"];

/// Whether pages are written instead of compared.
fn updates() -> bool {
    std::env::var("INSTA_UPDATE").is_ok_and(|mode| mode == "always")
}

/// The pages, in no order that matters.
fn pages() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(repository("book/src")).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.extension().is_some_and(|extension| extension == "md")).collect()
}

/// Compares a file with what it should hold, or writes it.
fn settle(path: &Path, wanted: &str, wrong: &mut Vec<String>, same: impl Fn(&str, &str) -> bool) {
    let found = std::fs::read_to_string(path).unwrap_or_default();
    if same(&found, wanted) {
        return;
    }
    if updates() {
        std::fs::write(path, wanted).unwrap();
    } else {
        let line = found.lines().zip(wanted.lines()).find(|(found, wanted)| !compare::same(found, wanted));
        wrong.push(format!("{}: the page and what is found differ first here: {line:#?}", path.display()));
    }
}

/// A folder to run commands in: the demo model, and the only programs that commands find.
fn room() -> tempfile::TempDir {
    let room = tempfile::tempdir().unwrap();
    let programs = room.path().join(".bin");
    std::fs::create_dir(&programs).unwrap();
    let link = |from: &Path, to: &Path| std::os::unix::fs::symlink(from, to).unwrap();
    link(&repository("demo"), &room.path().join("demo"));
    link(Path::new(env!("CARGO_BIN_EXE_anec")), &programs.join("anec"));
    for tool in TOOLS {
        let found =
            ["/usr/bin", "/bin"].map(|folder| Path::new(folder).join(tool)).into_iter().find(|path| path.exists());
        link(&found.unwrap_or_else(|| panic!("this machine has no {tool}")), &programs.join(tool));
    }
    room
}

/// Runs a command line of the book; returns its status and what it printed, both streams in one.
fn run(command: &str, room: &Path, status: i32) -> (i32, String) {
    let mut shell = Command::new("/bin/sh");
    shell.arg("-c").arg(format!("exec 2>&1; (exit {status}); {command}")).current_dir(room);
    shell.env_clear().env("PATH", room.join(".bin")).env("HOME", room).env("ANEC_CACHE", room.join(".cache"));
    let output = shell.output().unwrap();
    (output.status.code().unwrap_or(-1), String::from_utf8(output.stdout).unwrap())
}

/// A page with the output of its commands as it is now; the number of commands.
fn rerun(page: &Path, text: &str, wrong: &mut Vec<String>) -> (String, usize) {
    let room = room();
    let (mut written, mut count, mut lines) = (String::new(), 0, text.lines().peekable());
    while let Some(line) = lines.next() {
        written.push_str(line);
        written.push('\n');
        if line != "```console" {
            continue;
        }
        let mut block = Vec::new();
        while let Some(line) = lines.next_if(|line| *line != "```") {
            block.push(line);
        }
        if !block.iter().any(|line| line.starts_with("$ ") && line.contains("anec ")) {
            written.extend(block.iter().flat_map(|line| [line, "\n"]));
            continue;
        }
        let mut status = 0;
        let mut rest = block.as_slice();
        while let [command, after @ ..] = rest {
            let shown = after.iter().take_while(|line| !line.starts_with("$ ")).count();
            let (shown, after) = after.split_at(shown);
            let Some(words) = command.strip_prefix("$ ") else { panic!("{}: no command: {command}", page.display()) };
            let (code, printed) = run(words, room.path(), status);
            // a command that fails is followed by the line that shows its status
            if code != 0 && after.first().is_none_or(|next| *next != "$ echo $?") {
                wrong.push(format!("{}: {words}: status {code}\n{printed}", page.display()));
            }
            written.push_str(command);
            written.push('\n');
            let shown_text = shown.join("\n");
            // what depends on the system is shown as Linux prints it
            let keep = shown.is_empty() || !cfg!(target_os = "linux") || compare::same(&shown_text, printed.trim_end());
            let kept = if keep { shown_text.as_str() } else { printed.trim_end() };
            if !kept.is_empty() {
                written.push_str(kept);
                written.push('\n');
            }
            (status, rest, count) = (code, after, count + 1);
        }
    }
    (written, count)
}

#[test]
fn every_command_of_the_book_prints_what_its_page_shows() {
    let found: Vec<(usize, Vec<String>)> = pages()
        .iter()
        .map(|page| {
            let mut wrong = Vec::new();
            let text = std::fs::read_to_string(page).unwrap();
            let (written, count) = rerun(page, &text, &mut wrong);
            if wrong.is_empty() {
                settle(page, &written, &mut wrong, |found, wanted| found == wanted);
            }
            (count, wrong)
        })
        .collect();
    let wrong: Vec<&String> = found.iter().flat_map(|(_, wrong)| wrong).collect();
    assert!(wrong.is_empty(), "INSTA_UPDATE=always writes what is printed now into the pages\n{wrong:#?}");
    let commands: usize = found.iter().map(|(count, _)| count).sum();
    assert!(commands > 60, "only {commands} commands were found");
}

#[test]
fn tables_and_plots_are_those_of_the_files_that_the_program_reads() {
    let (mut wrong, mut count) = (Vec::new(), 0);
    for page in pages().into_iter().chain([repository("README.md")]) {
        let text = std::fs::read_to_string(&page).unwrap();
        let (written, sections) = generated::rewrite(&page, &text);
        count += sections;
        settle(&page, &written, &mut wrong, |found, wanted| found == wanted);
    }
    for (name, plot) in plots::all() {
        settle(&repository("book/src/img").join(name), &plot, &mut wrong, |found, wanted| found == wanted);
    }
    assert!(wrong.is_empty(), "INSTA_UPDATE=always writes them anew\n{wrong:#?}");
    assert!(count >= 8, "only {count} generated sections");
}

#[test]
fn every_page_is_in_the_summary_and_every_link_leads_somewhere() {
    let book = repository("book/src");
    let summary = std::fs::read_to_string(book.join("SUMMARY.md")).unwrap();
    let mut linked = String::new();
    for page in pages() {
        let name = page.file_name().unwrap().to_str().unwrap();
        assert!(name == "SUMMARY.md" || summary.contains(&format!("({name})")), "{name} is not in SUMMARY.md");
        let text = std::fs::read_to_string(&page).unwrap();
        let prose = text.split("```").step_by(2);
        for link in prose.flat_map(|text| text.split("](").skip(1)).filter_map(|rest| rest.split(')').next()) {
            let file = link.split('#').next().unwrap();
            assert!(link.starts_with("http") || book.join(file).exists(), "{name}: {link}");
            linked.push_str(link);
            linked.push('\n');
        }
    }
    for image in std::fs::read_dir(book.join("img")).unwrap() {
        let image = image.unwrap().path();
        let name = image.file_name().unwrap().to_str().unwrap();
        assert!(linked.contains(&format!("img/{name}")), "no page shows {name}");
        let text = std::fs::read_to_string(&image).unwrap();
        assert!(text.contains("prefers-color-scheme: dark"), "{name} has no colors for dark pages");
        assert!(
            !text.contains("fill=\"#") && !text.contains("stroke=\"#"),
            "{name} has a color that no scheme changes"
        );
    }
}
