//! SECURITY.md: each promise names tests that exist.

use std::collections::BTreeSet;
use std::path::Path;

use crate::common::folder::repository;

/// Names of all tests below a folder.
fn tests(folder: &Path, names: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            tests(&path, names);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            // attributes such as `cfg` stand between the mark and the function
            let marked = text.split("#[test]").skip(1).chain(text.split("#[tokio::test]").skip(1));
            let name = |part: &str| Some(part.split_once("fn ")?.1.split_once('(')?.0.to_owned());
            names.extend(marked.filter_map(name));
        }
    }
}

#[test]
fn every_promise_of_security_names_tests_that_exist() {
    let page = std::fs::read_to_string(repository("SECURITY.md")).unwrap();
    let mut known = BTreeSet::new();
    for folder in ["src", "tests"] {
        tests(&repository(folder), &mut known);
    }
    let rows: Vec<&str> = page.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
    assert!(rows.len() > 15, "{} promises", rows.len());
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [promise, _, named] = cells[..] else { panic!("three cells: {row}") };
        let named: Vec<&str> = named.split('`').skip(1).step_by(2).collect();
        assert!(!named.is_empty(), "{promise} has a test");
        for name in named {
            assert!(known.contains(name), "{promise}: there is no test `{name}`");
        }
    }
    let links = page.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    for link in links {
        assert!(repository(link).exists(), "{link}");
    }
}
