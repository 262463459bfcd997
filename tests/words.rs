//! Words of comments: a doc comment is read in a hover, on docs.rs or in a diff, so it stands alone and is plain.

use std::path::{Path, PathBuf};

use crate::common::folder::repository;

/// Folders whose sources are checked.
const FOLDERS: [&str; 8] = ["src", "tests", "proto", "benches", "examples", "fuzz", "tools", "demo"];

/// First words of a doc comment that refer to another line. Start with a noun phrase or a verb in the third person.
const OPENINGS: [&str; 19] = [
    "What",
    "Who",
    "Whom",
    "Whose",
    "Those",
    "That which",
    "It",
    "Its",
    "They",
    "Them",
    "Their",
    "One that",
    "Ones that",
    "The same",
    "The others",
    "As many",
    "As often",
    "So many",
    "Nothing",
];

/// Wordings that no manual would use, and what to write instead.
const WORDINGS: [(&str, &str); 16] = [
    ("so manieth", "every Nth"),
    ("are as many", "the number of"),
    ("as many times as", "N times"),
    ("by so much", "the amount"),
    ("of so many", "the number"),
    ("nobody's question", "doesn't matter here"),
    ("is no matter", "ignore"),
    ("is no finding", "is not reported"),
    ("had here", "available"),
    ("can be had", "is available"),
    ("can't be had", "is not available"),
    ("told to end", "shut down"),
    ("goes on with", "continues with"),
    ("says nothing", "doesn't describe"),
    ("tells of", "describes"),
    ("and its like", "and similar"),
];

/// Largest width of a comment in columns.
const WIDTH: usize = 120;

/// Files with checked comments below a folder.
fn sources(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap()) {
        let (path, kind) = (entry.path(), entry.file_type().unwrap());
        let name = entry.file_name();
        if kind.is_dir() && name != "fixtures" && name != "target" && name != "generated" {
            sources(&path, out);
        } else if kind.is_file() && path.extension().is_some_and(|extension| extension == "rs" || extension == "py") {
            out.push(path);
        }
    }
}

/// A comment's text, and whether it documents an item.
fn comment<'a>(line: &'a str, extension: &str) -> Option<(&'a str, bool)> {
    let line = line.trim_start();
    if extension == "py" {
        return line.strip_prefix('#').map(|text| (text, false));
    }
    let doc = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"));
    doc.map(|text| (text, true)).or_else(|| line.strip_prefix("//").map(|text| (text, false)))
}

/// Faults of a file's comments: line number and description.
fn faults(text: &str, extension: &str) -> Vec<(usize, String)> {
    let (mut faults, mut inside_doc) = (Vec::new(), false);
    for (index, line) in text.lines().enumerate() {
        let Some((text, is_doc)) = comment(line, extension) else {
            inside_doc = false;
            continue;
        };
        let mut fault = |what: String| faults.push((index + 1, what));
        let starts = |word: &&&str| {
            text.trim()
                .strip_prefix(**word)
                .is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '\''))
        };
        if let Some(word) = OPENINGS.iter().find(starts).filter(|_| is_doc && !inside_doc) {
            fault(format!("`{word}` depends on another line: start with a noun phrase or a verb (`Returns …`)"));
        }
        let lower = text.to_lowercase();
        if let Some((_, instead)) = WORDINGS.iter().find(|(wording, _)| lower.contains(wording)) {
            fault(format!("{:?}: write plainly, for example {instead:?}", text.trim()));
        }
        // rows of tables stay in one line
        let is_row = text.trim_start().starts_with('|');
        if line.chars().count() > WIDTH && !line.contains("http") && !is_row {
            fault(format!("the comment has {} columns, expected at most {WIDTH}", line.chars().count()));
        }
        inside_doc = is_doc && !text.trim().is_empty();
    }
    faults
}

#[test]
fn comments_stand_alone_and_are_plain() {
    let mut paths = Vec::new();
    FOLDERS.map(repository).iter().filter(|folder| folder.exists()).for_each(|folder| sources(folder, &mut paths));
    paths.sort();
    assert!(paths.len() > 500, "only {} sources were found", paths.len());
    let mut found = Vec::new();
    for path in paths.iter().filter(|path| !path.ends_with("tests/words.rs")) {
        let text = std::fs::read_to_string(path).unwrap();
        let name = path.strip_prefix(env!("CARGO_MANIFEST_DIR")).unwrap_or(path);
        let name = name.display();
        let extension = path.extension().unwrap().to_str().unwrap();
        found.extend(faults(&text, extension).iter().map(|(line, what)| format!("{name}:{line}: {what}")));
    }
    assert!(found.is_empty(), "{} lines:\n{}", found.len(), found.join("\n"));
}

#[test]
fn faults_of_comments_are_found() {
    let wide = format!("// {}", "wide ".repeat(30));
    let text = format!(
        "/// Its name.\n/// It is long.\nfn a() {{}}\n/// Items.\n// every so manieth item\n//! What it is.\n{wide}\n"
    );
    let lines: Vec<usize> = faults(&text, "rs").into_iter().map(|(line, _)| line).collect();
    assert_eq!(lines, [1, 5, 6, 7]);
    assert_eq!(faults("/// Items of a list.\n/// What follows may begin so.\nlet whatever = \"What\";", "rs"), []);
    assert_eq!(faults("# as many times as told to end\n", "py").len(), 1);
}

/// Files whose texts are commands by nature: model cards, evidence rows, child processes.
const COMMANDS: [&str; 5] = [
    "src/convert/compile.rs",
    "src/experiment/import.rs",
    "src/experiment/launch.rs",
    "src/report",
    "src/runtime/energy.rs",
];

/// Returns whether a line has a string literal with a flag, or with a verb of the program in backticks.
fn names_a_flag(line: &str) -> bool {
    let literals = line.split('"').skip(1).step_by(2);
    let is_flag = |literal: &str| {
        let mut words = literal.split(|c: char| c.is_whitespace() || "`('".contains(c));
        words.any(|word| word.strip_prefix("--").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_lowercase())))
    };
    literals.into_iter().any(|literal| is_flag(literal) || literal.contains("`anec ") || literal.contains("sudo anec"))
}

#[test]
fn texts_of_libraries_name_no_flags_or_verbs() {
    let mut paths = Vec::new();
    sources(&repository("src"), &mut paths);
    let mut found = Vec::new();
    for path in paths {
        let name = path.strip_prefix(env!("CARGO_MANIFEST_DIR")).unwrap().to_owned();
        let is_free = ["cli", "cli.rs", "main.rs"].iter().any(|own| name.starts_with(format!("src/{own}")))
            || COMMANDS.iter().any(|own| name.starts_with(own));
        if is_free {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let lines =
            text.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//") && names_a_flag(line));
        found.extend(lines.map(|(line, text)| format!("{}:{}: {}", name.display(), line + 1, text.trim())));
    }
    assert!(found.is_empty(), "flags and verbs belong in src/cli/remedy.rs:\n{}", found.join("\n"));
}

#[test]
fn flags_in_texts_are_found() {
    assert!(names_a_flag("\"raise --max-tokens\""));
    assert!(names_a_flag("\"`anec ls` lists them\"") && names_a_flag("\"name a path (--out)\""));
    assert!(!names_a_flag("\"a -- b\" --flag") && !names_a_flag("\"the anec cache\""));
}
