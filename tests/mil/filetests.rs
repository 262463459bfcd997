//! The programs of `tests/filetests`, each with what must become of it.
//!
//! A file begins with comments that say so:
//!
//! | comment | what is tested |
//! |---|---|
//! | `// test parse` | the text is refused with the message of the line `// error: …` |
//! | `// test print` | the program prints as the snapshot has it |
//! | `// test verify` | the verifier finds what the lines `// finds: …` say, in their order, and nothing else |
//! | `// test infer T = 4` | with symbols fixed, if any are named, types inferred anew print as the snapshot has them |
//!
//! Whatever is read must also print and be read again as the same program.

use std::path::{Path, PathBuf};

use anec::mil::verify::{infer_types, verify};
use anec::mil::{Program, Symbol, text};

use crate::mil::round_trip::assert_round_trip;

#[test]
fn filetests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/filetests");
    let mut files = Vec::new();
    collect(&root, &mut files);
    files.sort();
    assert!(files.len() >= 20, "{} files", files.len());
    let failed = files.iter().filter(|file| {
        let source = std::fs::read_to_string(file).unwrap();
        let name = file.strip_prefix(&root).unwrap().with_extension("").to_string_lossy().replace('/', "_");
        std::panic::catch_unwind(|| run(&name, &source, &root)).is_err()
    });
    let failed: Vec<&PathBuf> = failed.collect();
    assert!(failed.is_empty(), "{failed:#?}");
}

fn collect(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, out);
        } else if path.extension().is_some_and(|e| e == "mil") {
            out.push(path);
        }
    }
}

/// The comments of a file that begin with a word.
fn comments<'a>(source: &'a str, word: &'a str) -> impl Iterator<Item = &'a str> {
    source.lines().filter_map(move |line| line.strip_prefix("// ")?.strip_prefix(word)?.strip_prefix(' '))
}

fn run(name: &str, source: &str, root: &Path) {
    let parsed = text::parse(source);
    let program = || parsed.as_ref().unwrap_or_else(|e| panic!("{name}: {e}"));
    let snapshot = |suffix: &str, text: String| {
        let mut settings = insta::Settings::clone_current();
        settings.set_snapshot_path(root.join("snapshots"));
        settings.set_prepend_module_to_snapshot(false);
        settings.set_omit_expression(true);
        settings.bind(|| insta::assert_snapshot!(format!("{name}{suffix}"), text));
    };
    let mut tests = 0;
    for test in comments(source, "test") {
        tests += 1;
        match test.split_once(' ').unwrap_or((test, "")) {
            ("parse", "") => {
                let expected: Vec<&str> = comments(source, "error:").collect();
                let found = parsed.as_ref().err().map(ToString::to_string);
                assert_eq!(found.as_deref(), expected.first().copied(), "{name}");
            }
            ("print", "") => snapshot("", program().to_string()),
            ("verify", "") => {
                let expected: Vec<&str> = comments(source, "finds:").collect();
                let found: Vec<String> = verify(program()).iter().map(ToString::to_string).collect();
                assert!(found == expected, "{name} finds:\n{}", found.join("\n"));
            }
            ("infer", sizes) => {
                let suffix = if sizes.is_empty() { String::new() } else { format!("_{}", sizes.replace(" = ", "_")) };
                snapshot(&suffix, infer(program(), sizes).to_string());
            }
            _ => panic!("{name}: there is no test `{test}`"),
        }
    }
    assert!(tests > 0, "{name} tests nothing");
    if let Ok(program) = &parsed {
        assert_round_trip(name, program);
    }
}

/// The program with types inferred anew for sizes of symbols, `T = 4, n = 2`.
fn infer(program: &Program, sizes: &str) -> Program {
    let mut program = program.clone();
    for function in &mut program.functions {
        for size in sizes.split(", ").filter(|size| !size.is_empty()) {
            let (symbol, size) = size.split_once(" = ").expect("`SYMBOL = SIZE`");
            *function = function.with_length(&Symbol::new(symbol), size.parse().expect("a size"));
        }
        *function = infer_types(function).unwrap_or_else(|e| panic!("{e}"));
    }
    program
}
