//! Tiers of the workspace: a crate depends on crates of lower tiers only. The table in `src/anec/lib.rs` lists the tier
//! of each crate, and the book shows the same table.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use crate::common::folder::repository;

/// Crates by name (`mil`, not `anec-mil`) with their tier, out of the rows `| 3 | `family` | …` of a table.
fn tiers(text: &str) -> BTreeMap<String, u64> {
    let rows = text.lines().map(|line| line.trim_start_matches("//!").trim());
    let cells = rows.filter_map(|row| {
        let mut cells = row.strip_prefix('|')?.split('|').map(str::trim);
        Some((cells.next()?.parse::<u64>().ok()?, cells.next()?))
    });
    let names = |cell: &str| -> Vec<String> { cell.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
    cells.flat_map(|(tier, cell)| names(cell).into_iter().map(move |name| (name, tier))).collect()
}

#[test]
fn crates_depend_on_lower_tiers_only() {
    let read = |path: &str| std::fs::read_to_string(repository(path)).unwrap();
    let tiers = tiers(&read("src/anec/lib.rs"));
    let output = std::process::Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(repository(""))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Json = serde_json::from_slice(&output.stdout).unwrap();
    let (mut checked, mut wrong) = (0, Vec::new());
    for package in metadata["packages"].as_array().unwrap() {
        let name = package["name"].as_str().unwrap();
        let Some(name) = name.strip_prefix("anec-").filter(|name| *name != "testing") else { continue };
        let Some(tier) = tiers.get(name) else { panic!("src/anec/lib.rs doesn't say on which tier `{name}` is") };
        checked += 1;
        for dependency in package["dependencies"].as_array().unwrap() {
            // tests may use whatever they need
            let (kind, other) = (&dependency["kind"], dependency["name"].as_str().unwrap());
            let Some(other) = other.strip_prefix("anec-").filter(|_| kind.is_null()) else { continue };
            if tiers.get(other).is_none_or(|lower| lower >= tier) {
                wrong.push(format!("{name} (tier {tier}) depends on {other} (tier {:?})", tiers.get(other)));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(checked, tiers.len(), "crates of the table: {tiers:?}");
}

#[test]
fn the_book_shows_the_same_tiers() {
    let read = |path: &str| std::fs::read_to_string(repository(path)).unwrap();
    assert_eq!(tiers(&read("book/src/internals.md")), tiers(&read("src/anec/lib.rs")));
}

/// Rust files below a folder.
fn rust_files(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, out);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            out.push(path);
        }
    }
}

/// A reader who meets a type's name in one crate must not mistake it for another's.
#[test]
fn public_types_have_names_of_their_own() {
    // two forms of one type, of which a build has one
    let alternatives = ["constraint.rs", "no_constraint.rs", "elsewhere.rs", "macos.rs"];
    let mut files = Vec::new();
    rust_files(&repository("src"), &mut files);
    let mut places = BTreeMap::<String, Vec<String>>::new();
    for path in &files {
        let name = path.strip_prefix(repository("src")).unwrap().display().to_string();
        let apart = ["testing/", "cli/", "coreml/macos/"].iter().any(|prefix| name.starts_with(prefix));
        if apart || alternatives.iter().any(|file| name.ends_with(file)) {
            continue;
        }
        for line in std::fs::read_to_string(path).unwrap().lines() {
            let mut words = line.trim_start().split([' ', '<', '(', '{', ';', ':', '=']);
            let kinds = ["struct", "enum", "trait", "type", "union"];
            if words.next() == Some("pub") && words.next().is_some_and(|kind| kinds.contains(&kind)) {
                places.entry(words.next().unwrap().to_owned()).or_default().push(name.clone());
            }
        }
    }
    assert!(places.len() > 300, "{} types were found", places.len());
    // every crate that fails has a `Result` of its own
    places.remove("Result");
    places.retain(|_, places| places.len() > 1);
    assert!(places.is_empty(), "{places:#?}");
}

/// Files of a crate, as module paths, with those that each one imports from. A module stands for the files below it
/// that nobody else imports.
fn imports(folder: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let mut files = Vec::new();
    rust_files(folder, &mut files);
    let module = |path: &PathBuf| path.strip_prefix(folder).unwrap().with_extension("").display().to_string();
    let names: BTreeSet<String> = files.iter().map(module).filter(|name| name != "lib").collect();
    // the longest beginning of a path that is a file
    let file_of = |path: &[&str]| {
        (1..=path.len()).rev().map(|length| path[..length].join("/")).find(|beginning| names.contains(beginning))
    };
    let mut imports = BTreeMap::new();
    for path in &files {
        let own = module(path);
        let text = std::fs::read_to_string(path).unwrap();
        let code = text.split("\n#[cfg(test)]").next().unwrap();
        let code: String = code.lines().map(|line| line.split("//").next().unwrap()).collect::<Vec<_>>().join("\n");
        let here: Vec<&str> = own.split('/').collect();
        let mut found = BTreeSet::new();
        for at in code.match_indices("super::").chain(code.match_indices("crate::")).map(|(at, _)| at) {
            // the first of several
            if code[..at].ends_with("super::") {
                continue;
            }
            let (mut rest, mut base) = (&code[at..], here.clone());
            while let Some(above) = rest.strip_prefix("super::") {
                (rest, _) = (above, base.pop());
            }
            if let Some(root) = rest.strip_prefix("crate::") {
                (rest, base) = (root, Vec::new());
            }
            let group = rest.strip_prefix('{').map(|group| group.split('}').next().unwrap());
            for path in group.map_or_else(|| vec![rest], |group| group.split(',').map(str::trim).collect()) {
                let end =
                    path.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':')).unwrap_or(path.len());
                let parts: Vec<&str> = base.iter().copied().chain(path[..end].split("::")).collect();
                found.extend(file_of(&parts).filter(|other| *other != own));
            }
        }
        imports.insert(own, found);
    }
    imports
}

/// Whether one file's module is above the other's: a module and its parts know each other.
fn are_family(a: &str, b: &str) -> bool {
    let above = |a: &str, b: &str| b.strip_prefix(a).is_some_and(|rest| rest.starts_with('/'));
    above(a, b) || above(b, a)
}

#[test]
fn files_of_a_crate_do_not_import_each_other_in_circles() {
    // a model, its parts and what is done to it; a tensor that is computed from a weight, which is made of tensors
    let one_thing = [
        ["family/decoder", "family/predictor"],
        ["family/decoder", "family/transform"],
        ["source/tensor", "source/weight"],
    ];
    let mut circles = Vec::new();
    let mut checked = 0;
    for entry in std::fs::read_dir(repository("src")).unwrap() {
        let folder = entry.unwrap().path();
        if !folder.is_dir() {
            continue;
        }
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        let imports = imports(&folder);
        let goes = |from: &str, to: &str| {
            let pair = [format!("{name}/{from}"), format!("{name}/{to}")];
            let known = one_thing.iter().any(|of| of.iter().all(|file| pair.iter().any(|own| own == file)));
            imports[from].contains(to) && !are_family(from, to) && !known
        };
        for start in imports.keys() {
            checked += 1;
            // whether a way leads back
            let mut ways = vec![vec![start.as_str()]];
            let mut seen = BTreeSet::new();
            while let Some(way) = ways.pop() {
                for next in imports.keys().filter(|next| goes(way[way.len() - 1], next)) {
                    if next == start {
                        circles.push(format!("{name}: {} -> {start}", way.join(" -> ")));
                    } else if seen.insert(next.clone()) {
                        ways.push(way.iter().copied().chain([next.as_str()]).collect());
                    }
                }
            }
        }
    }
    assert!(checked > 400, "{checked} files");
    assert!(circles.is_empty(), "{circles:#?}");
}

/// Names that a `use` item brings, with their module: `error::{A, b::C}` gives (`error`, `A`) and (`error`, `b::C`).
fn exported(item: &str) -> Vec<(String, String)> {
    let Some((module, names)) = item.split_once("::") else { return Vec::new() };
    let names = names.trim_start_matches('{').trim_end_matches('}').split(',');
    names.map(|name| (module.trim().to_owned(), name.trim().to_owned())).filter(|(_, name)| !name.is_empty()).collect()
}

#[test]
fn public_items_have_one_path() {
    let (mut items_seen, mut twice) = (0, Vec::new());
    let crates = std::fs::read_dir(repository("src")).unwrap().map(|entry| entry.unwrap().path().join("lib.rs"));
    for library in crates.filter(|library| library.exists()) {
        let text = std::fs::read_to_string(&library).unwrap();
        let public: BTreeSet<&str> =
            text.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';')).collect();
        let items = text.split("\npub use ").skip(1).filter_map(|item| Some(item.split_once(';')?.0));
        let items: Vec<_> = items.flat_map(|item| exported(&item.replace("crate::", ""))).collect();
        items_seen += items.len();
        twice.extend(items.into_iter().filter(|(module, _)| public.contains(module.as_str())));
    }
    assert!(items_seen > 200, "{items_seen} items at the roots of the crates");
    assert!(twice.is_empty(), "a module is public, or its items are at the root: {twice:?}");
}
