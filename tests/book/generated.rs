//! Tables of the book that are made from `src/advice/tables/*.yaml` from the catalogue of ops
//! and from the table of forms of Core AI.

use std::fmt::Write;
use std::path::Path;

use anec::coreai::aicode::FORMS;
use anec::mil::catalogue;
use serde_json::Value as Json;

use super::links::linked;
use crate::common::folder::repository;

const END: &str = "<!-- end -->";

/// A page with its generated sections made anew; the number of sections.
pub fn rewrite(page: &Path, text: &str) -> (String, usize) {
    let (mut out, mut rest, mut count) = (String::new(), text, 0);
    while let Some((before, after)) = rest.split_once("<!-- generated: ") {
        let (name, after) = after.split_once(" -->").unwrap();
        let Some((_, after)) = after.split_once(END) else { panic!("{}: {name} has no end", page.display()) };
        let section = section(name);
        write!(out, "{before}<!-- generated: {name} -->\n\n{}\n\n{END}", section.trim()).unwrap();
        (rest, count) = (after, count + 1);
    }
    out.push_str(rest);
    (out, count)
}

fn section(name: &str) -> String {
    match name {
        "rules-summary" => rules_summary(),
        "rules-op" => rules(&["op"]),
        "rules-weights" => rules(&["constexpr", "weights", "constant"]),
        "rules-state" => rules(&["state"]),
        "rules-program" => rules(&["lengths", "program"]),
        "rules-asset" => rules(&["asset"]),
        "chips" => chips(),
        "weights-by-chip" => weights_by_chip(),
        "chip-sources" => chip_sources(),
        "systems" => systems(),
        "arithmetic" => arithmetic(),
        "speed-sources" => speed_sources(),
        "experiments" => experiments(),
        "errors" => errors(),
        "thresholds" => thresholds(),
        "ops" => ops(),
        "aicode-forms" => aicode_forms(),
        "families" => super::families::table(),
        "family-row" => excerpt("src/family/table.rs", "rust", "name: \"qwen3\",", "    },", 1),
        "moe-row" => excerpt("src/family/table.rs", "rust", "name: \"olmoe\",", "    },", 1),
        "family-cases" => excerpt("tests/fixtures/families/case_table.py", "python", "\"qwen3-default\",", "    ),", 1),
        _ => panic!("no generated section is called {name}"),
    }
}

/// Parses a built-in table.
fn read(path: &str) -> Json {
    let text = std::fs::read_to_string(repository("src").join(path)).unwrap();
    serde_yaml::from_str(&text).unwrap()
}

/// Value of a row's key as text; empty if absent.
fn text(row: &Json, key: &str) -> String {
    plain(&row[key])
}

fn plain(value: &Json) -> String {
    match value {
        Json::Null => String::new(),
        Json::String(text) => text.clone(),
        Json::Array(values) => values.iter().map(plain).collect::<Vec<_>>().join(", "),
        other => other.to_string(),
    }
}

fn rows(value: &Json) -> &[Json] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// The lines of a source file from `above` lines before the one that holds `from` up to the first that is `to`.
fn excerpt(path: &str, language: &str, from: &str, to: &str, above: usize) -> String {
    let text = std::fs::read_to_string(repository(path)).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let first = lines.iter().position(|line| line.contains(from)).unwrap_or_else(|| panic!("{path} has no {from}"));
    let count =
        lines[first..].iter().position(|line| *line == to).unwrap_or_else(|| panic!("{path}: {from} has no end"));
    let shown = lines[first - above..=first + count].iter().map(|line| line.strip_prefix("    ").unwrap_or(line));
    format!("```{language}\n{}\n```", shown.collect::<Vec<_>>().join("\n"))
}

/// A table of Markdown.
fn table(head: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | ").replace('\n', " "));
    let mut out = line(head.iter().map(|&cell| cell.to_owned()).collect());
    out.push_str(&line(head.iter().map(|_| "---".to_owned()).collect()));
    rows.into_iter().for_each(|row| out.push_str(&line(row)));
    out
}

/// Operations of Core AI.
fn aicode_forms() -> String {
    let quoted = |text: &str| if text.is_empty() { String::new() } else { format!("`{text}`") };
    let rows = FORMS.iter().map(|form| {
        vec![
            quoted(form.name),
            quoted(form.operands),
            form.results.map_or_else(|| "any".to_owned(), |count| count.to_string()),
            if form.regions > 0 { "yes".to_owned() } else { String::new() },
            form.date.to_string(),
        ]
    });
    table(&["op", "operands", "results", "region", "date"], rows)
}

/// How far the sources of a rule agree.
fn standing(rule: &Json) -> &'static str {
    let says = |word: &str| rows(&rule["evidence"]).iter().any(|evidence| evidence["says"] == word);
    match (says("for"), says("against")) {
        (true, true) => "contradictory",
        (false, true) => "refuted",
        _ if text(&rule["evidence"][0], "source").contains("no measurement") => "no measurement",
        _ => "published",
    }
}

fn rules_summary() -> String {
    let rules = read("advice/tables/ane-rules.yaml");
    let count = |severity: &str, word: &str| {
        rows(&rules).iter().filter(|rule| rule["severity"] == severity && standing(rule) == word).count().to_string()
    };
    let row = |severity: &str, meaning: &str| {
        let numbers = ["published", "contradictory", "no measurement"].map(|word| count(severity, word));
        [format!("`{severity}`"), meaning.to_owned()].into_iter().chain(numbers).collect()
    };
    table(
        &[
            "severity",
            "what the forecast expects",
            "published, uncontradicted",
            "contradictory",
            "no measurement known",
        ],
        [
            row("wrong", "the op runs there and computes wrong numbers"),
            row("falls", "the op or the package leaves the Neural Engine, or isn't compiled for it"),
            row("doubtful", "sources differ, or it depends on chip, system and size"),
            row("slow", "runs there, slower than need be"),
        ],
    )
}

/// The rules about some part of a program, each with its evidence.
fn rules(about: &[&str]) -> String {
    let (rules, probes) = (read("advice/tables/ane-rules.yaml"), read("experiment/probes.yaml"));
    let mut out = String::new();
    for rule in rows(&rules).iter().filter(|rule| about.iter().any(|key| !rule["applies"][key].is_null())) {
        let id = text(rule, "id");
        writeln!(out, "### {id}\n\n**{}** · {} · `{}`\n", text(rule, "what"), standing(rule), text(rule, "severity"))
            .unwrap();
        writeln!(out, "{} *Remedy:* {}", text(rule, "why"), text(rule, "remedy")).unwrap();
        for (key, what) in [("chips", "chips"), ("systems", "systems")] {
            if !rule[key].is_null() {
                writeln!(out, "Only of {what} {}.", text(rule, key)).unwrap();
            }
        }
        let evidence = rows(&rule["evidence"]).iter().map(|row| {
            let device = ["device", "os"].map(|key| text(row, key)).into_iter().filter(|text| !text.is_empty());
            vec![
                text(row, "says"),
                linked(&text(row, "source")),
                device.collect::<Vec<_>>().join(", "),
                text(row, "date"),
            ]
        });
        writeln!(out, "\n{}", table(&["says", "source", "device, system", "date"], evidence)).unwrap();
        let settled = |probe: &&Json| rows(&probe["settles"]).iter().any(|settles| settles["rule"] == id);
        let asked: Vec<String> = rows(&probes["experiments"])
            .iter()
            .filter(settled)
            .map(|probe| format!("`{}`", text(probe, "id")))
            .collect();
        if !asked.is_empty() {
            writeln!(out, "Experiments that settle it: {}.\n", asked.join(", ")).unwrap();
        }
    }
    out
}

/// A fact of a chip, or of its generation; empty where nothing is published.
fn fact<'a>(chips: &'a Json, chip: &'a Json, key: &str) -> &'a Json {
    let generation =
        rows(&chips["generations"]).iter().find(|row| !row["name"].is_null() && row["name"] == chip["generation"]);
    let own = &chip[key];
    if own.is_null() { generation.map_or(&Json::Null, |row| &row[key]) } else { own }
}

/// The value of a fact with the name of its source.
fn sourced(fact: &Json) -> String {
    if fact.is_null() { "–".to_owned() } else { format!("{} *({})*", plain(&fact["value"]), text(fact, "source")) }
}

fn chips() -> String {
    let chips = read("advice/tables/chips.yaml");
    let keys = ["bandwidth_gb_s", "memory_gb_s", "palette_gweights_s", "tflops", "call_ms", "most_width"];
    let row = |chip: &Json| {
        let facts = keys.iter().map(|key| sourced(fact(&chips, chip, key)));
        std::iter::once(text(chip, "name")).chain(facts).collect()
    };
    table(
        &[
            "chip",
            "Neural Engine reads, GB/s",
            "memory, GB/s",
            "palettes, 10⁹ weights/s",
            "fp16 TFLOP/s",
            "call, ms",
            "largest last axes",
        ],
        rows(&chips["chips"]).iter().map(row),
    )
}

fn weights_by_chip() -> String {
    let chips = read("advice/tables/chips.yaml");
    let forms = ["int8_affine", "int8_blockwise", "blocks", "int4", "palette", "grouped_palette", "sparse"];
    let of = |row: &Json| -> Option<Vec<String>> {
        let weights = &row["weights"];
        (!weights.is_null()).then(|| {
            let cell = |form: &&str| {
                let fact = &weights[*form];
                let note = text(fact, "note");
                if note.is_empty() { sourced(fact) } else { format!("{}: {note}", sourced(fact)) }
            };
            std::iter::once(text(row, "name")).chain(forms.iter().map(cell)).collect()
        })
    };
    let all = rows(&chips["generations"]).iter().chain(rows(&chips["chips"])).filter_map(of);
    let names = [
        "int8 by affine",
        "int8 by blockwise",
        "scales of blocks",
        "int4",
        "one palette",
        "several palettes",
        "sparse",
    ];
    table(&[&["generation or chip"], &names[..]].concat(), all)
}

/// Sources by key, with what they are.
fn sources(sources: &Json) -> String {
    let rows = sources.as_object().unwrap().iter();
    table(
        &["key", "source", "date"],
        rows.map(|(key, row)| vec![key.clone(), linked(&text(row, "what")), text(row, "date")]),
    )
}

fn chip_sources() -> String {
    sources(&read("advice/tables/chips.yaml")["sources"])
}

fn speed_sources() -> String {
    sources(&read("advice/tables/speeds.yaml")["sources"])
}

fn systems() -> String {
    let chips = read("advice/tables/chips.yaml");
    let row = |row: &Json| ["os", "chips", "defect", "remedy", "source"].map(|key| text(row, key)).to_vec();
    table(&["system", "seen on", "defect", "remedy", "source"], rows(&chips["systems"]).iter().map(row))
}

fn arithmetic() -> String {
    let effects = read("advice/tables/ane-arithmetic.yaml");
    let row = |row: &Json| {
        let name = format!("`{}`", text(row, "effect"));
        let cells = ["says", "chips", "ours"].map(|key| text(row, key));
        let source = [linked(&text(row, "source")), text(row, "date")];
        std::iter::once(name).chain(cells).chain(source).collect()
    };
    table(
        &["effect", "what is published", "chips", "assumed by the simulation", "source", "date"],
        rows(&effects).iter().map(row),
    )
}

fn experiments() -> String {
    let probes = read("experiment/probes.yaml");
    let row = |row: &Json| {
        let rules: Vec<String> = rows(&row["settles"]).iter().map(|settles| text(settles, "rule")).collect();
        vec![format!("`{}`", text(row, "id")), text(row, "asks"), text(row, "about"), rules.join(", ")]
    };
    table(&["experiment", "what it asks", "about", "settles"], rows(&probes["experiments"]).iter().map(row))
}

fn errors() -> String {
    let errors = read("advice/tables/errors.yaml");
    let mut out = String::new();
    for row in rows(&errors) {
        let codes: Vec<String> = rows(&row["codes"]).iter().map(|code| format!("`{}`", plain(code))).collect();
        writeln!(out, "### {}\n\n**{}**\n", codes.join(" · "), text(row, "title")).unwrap();
        rows(&row["causes"]).iter().for_each(|cause| writeln!(out, "- {}", plain(cause)).unwrap());
        writeln!(out, "\n*Next:* {}", text(row, "next")).unwrap();
        if !rows(&row["evidence"]).is_empty() {
            let sources: Vec<String> = rows(&row["evidence"]).iter().map(|source| linked(&plain(source))).collect();
            writeln!(out, "\n*Sources:* {}.", sources.join(", ")).unwrap();
        }
        out.push('\n');
    }
    out
}

fn thresholds() -> String {
    let gates = read("validate/gates.yaml");
    let rows = gates.as_object().unwrap().iter().flat_map(|(gate, values)| {
        let values = values.as_object().unwrap().iter();
        values.map(move |(name, value)| vec![gate.clone(), format!("`{name}`"), plain(value).replace(", ", " to ")])
    });
    table(&["gate", "threshold", "value"], rows)
}

/// The catalogue, and what the rules about operators say of each.
fn ops() -> String {
    let rules = read("advice/tables/ane-rules.yaml");
    let said = |operator: &str| {
        let named = |rule: &&Json| {
            let applies = &rule["applies"];
            [&applies["op"], &applies["constexpr"]]
                .iter()
                .any(|about| rows(&about["operators"]).iter().any(|name| name == operator))
        };
        let found = rows(&rules).iter().filter(named);
        found.map(|rule| format!("{} (`{}`)", text(rule, "id"), text(rule, "severity"))).collect::<Vec<_>>().join(", ")
    };
    let mut specs: Vec<_> = catalogue::table().iter().collect();
    specs.sort_by_key(|spec| (spec.name, spec.since));
    let row = |spec: &&catalogue::OpSpec| {
        let parameters =
            spec.parameters.iter().map(|p| if p.optional { format!("{}?", p.name) } else { p.name.to_owned() });
        let parameters: Vec<String> = parameters.collect();
        vec![
            format!("`{}`", spec.name),
            spec.since.target().to_owned(),
            format!("`{}`", parameters.join(" ")),
            said(spec.name),
        ]
    };
    let names: std::collections::BTreeSet<&str> = specs.iter().map(|spec| spec.name).collect();
    let head = table(&["operator", "since", "parameters", "rules of the forecast"], specs.iter().map(row));
    format!("{} operators, in {} forms.\n\n{head}", names.len(), specs.len())
}
