//! Tests of the book. Every command of a ```console block that runs `anec` is run, page by page, in a folder with the
//! demo model, and its output is compared with the lines below it. Tables between `<!-- generated: NAME -->` and
//! `<!-- end -->`, and the plots, are generated from the files that the program reads.
//!
//! `INSTA_UPDATE=always` writes the pages instead of comparing them.
#![cfg(unix)]

mod compare;
mod families;
mod generated;
mod links;
mod plots;
mod security;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::folder::repository;

/// Tools beside the program that commands of the book may use.
const TOOLS: &[&str] =
    &["cat", "chmod", "cp", "cut", "dd", "grep", "head", "ls", "mkdir", "rm", "sed", "tail", "tr", "wc"];

/// Whether pages are written instead of compared.
fn updates() -> bool {
    std::env::var("INSTA_UPDATE").is_ok_and(|mode| mode == "always")
}

/// All pages, unordered.
fn pages() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(repository("book/src")).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.extension().is_some_and(|extension| extension == "md")).collect()
}

/// Compares a file with its wanted content, or writes it.
fn compare_or_write(path: &Path, wanted: &str, wrong: &mut Vec<String>, same: impl Fn(&str, &str) -> bool) {
    let found = std::fs::read_to_string(path).unwrap_or_default();
    if same(&found, wanted) {
        return;
    }
    if updates() {
        std::fs::write(path, wanted).unwrap();
    } else {
        let line = found.lines().zip(wanted.lines()).find(|(found, wanted)| !compare::same(found, wanted));
        wrong.push(format!("{}: the page and the output differ first here: {line:#?}", path.display()));
    }
}

/// Working folder of a page: the demo model, and the only programs in the path of its commands.
fn working_folder() -> tempfile::TempDir {
    let work = tempfile::tempdir().unwrap();
    let programs = work.path().join(".bin");
    std::fs::create_dir(&programs).unwrap();
    let link = |from: &Path, to: &Path| std::os::unix::fs::symlink(from, to).unwrap();
    link(&repository("demo"), &work.path().join("demo"));
    link(Path::new(env!("CARGO_BIN_EXE_anec")), &programs.join("anec"));
    for tool in TOOLS {
        let found =
            ["/usr/bin", "/bin"].map(|folder| Path::new(folder).join(tool)).into_iter().find(|path| path.exists());
        link(&found.unwrap_or_else(|| panic!("this machine has no {tool}")), &programs.join(tool));
    }
    work
}

/// Runs a command line of the book; returns its status and output, both streams in one.
fn run(command: &str, work: &Path, status: i32) -> (i32, String) {
    let mut shell = Command::new("/bin/sh");
    shell.arg("-c").arg(format!("exec 2>&1; (exit {status}); {command}")).current_dir(work);
    shell.env_clear().env("PATH", work.join(".bin")).env("HOME", work).env("ANEC_CACHE", work.join(".cache"));
    let output = shell.output().unwrap();
    (output.status.code().unwrap_or(-1), String::from_utf8(output.stdout).unwrap())
}

/// A page with the present output of its commands, and their number.
fn rerun(page: &Path, text: &str, wrong: &mut Vec<String>) -> (String, usize) {
    let work = working_folder();
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
            let (code, printed) = run(words, work.path(), status);
            // a failing command must be followed by the line that shows its status
            if code != 0 && after.first().is_none_or(|next| *next != "$ echo $?") {
                wrong.push(format!("{}: {words}: status {code}\n{printed}", page.display()));
            }
            written.push_str(command);
            written.push('\n');
            let shown_text = shown.join("\n");
            // output that depends on the system is shown as on Linux
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
                compare_or_write(page, &written, &mut wrong, |found, wanted| found == wanted);
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
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        let (written, sections) = generated::rewrite(&page, &text);
        count += sections;
        compare_or_write(&page, &written, &mut wrong, |found, wanted| found == wanted);
    }
    for (name, plot) in plots::all() {
        compare_or_write(&repository("book/src/img").join(name), &plot, &mut wrong, |found, wanted| found == wanted);
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

/// Folders of the repository that pages name, and paths in them that builds make.
const FOLDERS: &[&str] =
    &[".ci/", "benches/", "book/", "demo/", "examples/", "fuzz/", "proto/", "src/", "swift/", "tests/", "tools/"];
const MADE: &[&str] = &["fuzz/artifacts"];

/// Paths within the repository that a text names in code: `src/lib.rs`, `tools/wheel.sh`.
fn paths(text: &str) -> impl Iterator<Item = &str> {
    let spans = text.lines().scan(false, |fenced, line| {
        let fence = line.trim_start().starts_with("```");
        *fenced ^= fence;
        // in a block every word of a line may be a path, in prose those between backticks
        let step = if *fenced { 1 } else { 2 };
        Some(line.split('`').skip(usize::from(!*fenced)).step_by(step).collect::<Vec<_>>())
    });
    let words = spans.flatten().flat_map(str::split_whitespace);
    let trimmed = words.map(|word| word.trim_matches(|c: char| "\"'(),;:".contains(c)).trim_end_matches('.'));
    // a line number or a place holder isn't part of a path
    let plain = trimmed.filter(|word| !word.contains(['*', '{', '…', '<', '$', '=', '\\']) && !word.contains("NAME"));
    plain.filter(|word| FOLDERS.iter().any(|folder| word.starts_with(folder)))
}

#[test]
fn every_path_that_pages_name_exists() {
    let (mut wrong, mut count) = (Vec::new(), 0);
    let front = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"].map(repository);
    for page in pages().into_iter().chain(front) {
        let text = std::fs::read_to_string(&page).unwrap();
        for path in paths(&text).filter(|path| !MADE.contains(path)) {
            count += 1;
            if !repository(path).exists() {
                wrong.push(format!("{}: {path}", page.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(count > 60, "only {count} paths were found");
}

#[test]
fn the_page_of_dependencies_names_those_of_the_workspace() {
    let text = std::fs::read_to_string(repository("Cargo.toml")).unwrap();
    let (_, list) = text.split_once("[workspace.dependencies]").unwrap();
    let (list, _) = list.split_once("\n[").unwrap();
    let outside = list.lines().filter(|line| !line.starts_with('#') && !line.contains("path = "));
    let declared: BTreeSet<&str> = outside.filter_map(|line| Some(line.split_once(" = ")?.0)).collect();

    let page = std::fs::read_to_string(repository("book/src/dependencies.md")).unwrap();
    let names: BTreeSet<&str> = page.split('`').skip(1).step_by(2).collect();
    let missing: Vec<&&str> = declared.difference(&names).collect();
    assert!(missing.is_empty(), "dependencies.md doesn't name {missing:?}");
    // first cells name crates and nothing else
    let rows = page.lines().filter(|line| line.starts_with("| `"));
    let cells: BTreeSet<&str> =
        rows.flat_map(|row| row.split('|').nth(1).unwrap().split('`').skip(1).step_by(2)).collect();
    let gone: Vec<&&str> = cells.difference(&declared).collect();
    assert!(gone.is_empty(), "dependencies.md names {gone:?}, which Cargo.toml doesn't");
}
