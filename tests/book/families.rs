//! The table of families and of their verification, from the fixtures.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::PathBuf;

use anec::family::table::{DECODERS, OPENAI_PRIVACY_FILTER};
use anec::family::{encoder_architecture, encoder_families};
use anec::manifest::{Manifest, builtin};
use serde_json::Value as Json;

use crate::common::folder::{json, repository};

/// The encoder whose GGUF lacks a part, and is refused.
const NOT_WHOLE: &str = "bert-reranker";

/// Evidence for a family.
struct Evidence {
    family: &'static str,
    /// `general.architecture` of its GGUF files.
    architectures: Vec<&'static str>,
    /// Small random models whose logits or vectors are compared with transformers'.
    random: usize,
    /// Models that are also read from GGUF.
    gguf: usize,
}

/// One row for each family of the program.
pub fn table() -> String {
    let cases = json(&repository("tests/fixtures/families/cases.json"));
    let cases = ["cases", "classifiers"].map(|kind| cases[kind].as_array().unwrap().clone()).concat();
    let decoders = DECODERS.iter().chain([&OPENAI_PRIVACY_FILTER]).map(|row| {
        let own: Vec<&Json> = cases.iter().filter(|case| case["family"] == row.name).collect();
        let gguf = own.iter().filter(|case| case["gguf"].is_string()).count() + encoders_from_gguf(row.name);
        let architectures = row.names.gguf.to_vec();
        Evidence { family: row.name, architectures, random: own.len() + encoders(row.name), gguf }
    });
    let encoders = encoder_families().map(|(family, _)| Evidence {
        family,
        architectures: vec![encoder_architecture(family)],
        random: encoders(family),
        gguf: encoders_from_gguf(family),
    });

    let manifests: Vec<(&str, String)> = builtin::all()
        .iter()
        .filter(|builtin| !builtin.name.starts_with("demo"))
        .map(|builtin| {
            let manifest = Manifest::from_yaml(builtin.text, builtin.name, &[]).unwrap();
            (builtin.name, manifest.family.expect(builtin.name))
        })
        .collect();
    let quoted = quoted();
    let run = |name: &str| repository("tests/fixtures").join(name).is_dir();
    let mut out = "| family | random weights | of them from GGUF | published weights | configuration, compared with quotations | \
                   configuration, not compared |\n|---|---|---|---|---|---|\n"
        .to_owned();
    for evidence in decoders.chain(encoders) {
        let Evidence { family, architectures, random, gguf } = evidence;
        assert!(random > 0, "{family}: no small model of it");
        let own = || manifests.iter().filter(|(_, of)| of == family).map(|(name, _)| *name);
        let list = |names: Vec<&str>| names.join(", ");
        let gguf = match gguf {
            0 => String::new(),
            count => format!("{count} ({})", architectures.join(", ")),
        };
        let (published, compared) = (own().filter(|name| run(name)), own().filter(|name| quoted.contains(*name)));
        let rest = own().filter(|name| !run(name) && !quoted.contains(*name));
        writeln!(
            out,
            "| {family} | {random} | {gguf} | {} | {} | {} |",
            list(published.collect()),
            list(compared.collect()),
            list(rest.collect())
        )
        .unwrap();
    }
    out
}

/// Configuration of the text part of a multimodal model, or of the model itself.
fn text_part(config: &Json) -> &Json {
    config.get("text_config").unwrap_or(config)
}

/// Folders of small encoders of a family.
fn folders_of(family: &str) -> impl Iterator<Item = PathBuf> {
    let folders = std::fs::read_dir(repository("tests/fixtures/encoders")).unwrap().flatten().map(|entry| entry.path());
    folders.filter(move |folder| {
        let config = folder.join("config.json");
        config.is_file() && text_part(&json(&config))["model_type"] == family
    })
}

/// Small encoders of a family.
fn encoders(family: &str) -> usize {
    folders_of(family).count()
}

/// Small encoders that are also read from GGUF.
fn encoders_from_gguf(family: &str) -> usize {
    let whole = |folder: &PathBuf| folder.join("model.gguf").is_file() && !folder.ends_with(NOT_WHOLE);
    folders_of(family).filter(whole).count()
}

/// Names of configurations that were compared with what others quote of them, by the list beside the configurations.
fn quoted() -> BTreeSet<String> {
    let page = std::fs::read_to_string(repository("src/manifest/manifests/configs/README.md")).unwrap();
    let (_, list) = page.split_once("## What was checked").unwrap();
    let first_cells = |lines: Vec<&str>| -> BTreeSet<String> {
        let cells = lines.into_iter().map(|line| line.split('|').nth(1).unwrap());
        cells.flat_map(|cell| cell.split(',')).map(|name| name.trim().trim_matches('`').to_owned()).collect()
    };
    let names = first_cells(list.lines().filter(|line| line.starts_with("| `")).collect());
    let from_memory = first_cells(page.lines().filter(|line| line.contains("written from memory")).collect());
    assert!(from_memory.is_subset(&names), "compare {:?} with a quotation", from_memory.difference(&names));
    for name in &names {
        assert!(builtin::find(name).is_ok(), "{name} is no built-in manifest");
    }
    assert!(names.len() >= 8, "{names:?}");
    names
}
