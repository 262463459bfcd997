//! Model card of a bundle: `README.md` with front matter that the hub reads.

mod speed;

use std::fmt::Write;

use anec_advice::{ChipPrediction, ForecastFinding};
use anec_bundle::{Bundle, Task};
use anec_convert::report::ConvertReport;
use anec_manifest::WeightFormat;
use anec_validate::verdict::missing_proof;
use serde_json::Value as Json;

use super::conversion::{WHOLE_MODEL, part, programs};
use super::escape::cell;
use super::forecast::{by_rule, place};
use super::{bytes, counted};

/// Contents of a card that aren't in the bundle.
#[derive(Clone, Debug, Default)]
pub struct CardFacts {
    /// Repository that receives the card, `owner/name`.
    pub repository: String,
    /// Licence of the weights, by the hub's name.
    pub license: Option<String>,
    /// Repository of the source on the hub.
    pub base: Option<String>,
    /// Output of `anec validate --json`.
    pub gates: Option<Json>,
    /// Output of `anec bench --json`.
    pub bench: Option<Json>,
    /// Predictions for chips.
    pub predictions: Vec<ChipPrediction>,
    /// Forecast of the rules.
    pub forecast: Vec<ForecastFinding>,
}

/// Formats the card. `converted` is the bundle's `report.json`.
pub fn card(bundle: &Bundle, converted: Option<&ConvertReport>, facts: &CardFacts) -> String {
    let mut text = front_matter(bundle, facts);
    // writing to a string doesn't fail
    let _ = writeln!(text, "# {} for Apple's Neural Engine\n", bundle.name);
    let source = source_name(bundle);
    let origin = match &facts.base {
        Some(base) => format!("[{base}](https://huggingface.co/{base})"),
        None => format!("`{source}`"),
    };
    let is_coreml = bundle.manifest.format.is_coreml();
    let programs = if is_coreml { "Core ML packages" } else { "Core AI asset (OS 27)" };
    let _ = writeln!(
        text,
        "{programs} of {origin} (family `{}`, {} layers, context {}), made by anec {}.\n",
        bundle.family,
        bundle.model.num_layers,
        bundle.model.contexts.iter().map(u64::to_string).collect::<Vec<_>>().join(", "),
        bundle.anec_version,
    );
    let _ = writeln!(text, "```sh\n{}\n```\n", usage(&bundle.model.task, is_coreml, &facts.repository));
    text.push_str(&weights(bundle, converted));
    text.push_str(&packages(bundle));
    text.push_str(&speed::speed(&facts.predictions, facts.bench.as_ref()));
    text.push_str(&proofs(facts.gates.as_ref(), is_coreml));
    text.push_str(&forecast(&facts.forecast));
    text.push_str(&origins(bundle, facts));
    text
}

fn front_matter(bundle: &Bundle, facts: &CardFacts) -> String {
    let task = pipeline(&bundle.model.task);
    let mut text = String::from("---\n");
    // JSON strings are valid YAML
    let quoted = |value: &str| Json::from(value).to_string();
    if let Some(license) = &facts.license {
        let _ = writeln!(text, "license: {}", quoted(license));
    }
    if let Some(base) = &facts.base {
        let _ = writeln!(text, "base_model: {}\nbase_model_relation: quantized", quoted(base));
    }
    let format = if bundle.manifest.format.is_coreml() { "coreml" } else { "coreai" };
    let _ = writeln!(
        text,
        "library_name: anec\npipeline_tag: {task}\ntags:\n- anec\n- {format}\n- apple-neural-engine\n- {}\n---\n",
        quoted(&bundle.family)
    );
    text
}

/// The hub's name of a task.
fn pipeline(task: &Task) -> &'static str {
    match task {
        Task::TextGeneration => "text-generation",
        Task::TokenClassification(_) => "token-classification",
        Task::TextEmbedding(_) => "sentence-similarity",
        Task::SequenceClassification(classification) if classification.labels.len() == 1 => "text-ranking",
        Task::SequenceClassification(_) => "text-classification",
    }
}

/// Commands that run the bundle.
fn usage(task: &Task, is_coreml: bool, repository: &str) -> String {
    let (first, serves) = match task {
        Task::TextGeneration => ("run BUNDLE --prompt \"…\"", true),
        Task::TokenClassification(_) => ("redact BUNDLE FILE", false),
        Task::TextEmbedding(_) => ("embed BUNDLE --text \"…\" --out vector.safetensors", true),
        Task::SequenceClassification(classification) if classification.labels.len() == 1 => {
            ("classify BUNDLE --prompt \"a question\" --pair \"a text\"", true)
        }
        Task::SequenceClassification(_) => ("classify BUNDLE --prompt \"…\"", false),
    };
    let name = format!("hf:{repository}");
    let first = first.replace("BUNDLE", &name);
    let backend = if is_coreml { "" } else { " --backend coreai" };
    let serve = if serves { format!("\nanec serve {name}{backend}") } else { String::new() };
    format!("anec {first}{backend}   # downloads it once; anec pull {name} for a folder{serve}")
}

/// Source without its local folders.
fn source_name(bundle: &Bundle) -> String {
    anec_manifest::without_folders(&bundle.source.name).to_owned()
}

fn weights(bundle: &Bundle, converted: Option<&ConvertReport>) -> String {
    let quant = &bundle.manifest.quant;
    let mut text = match quant.weights {
        WeightFormat::None => "Weights: fp16.".to_owned(),
        weights => format!("Weights: {weights}, {}.", quant.granularity),
    };
    if !bundle.transforms.is_empty() {
        let names: Vec<&str> = bundle.transforms.iter().map(|transform| transform.name()).collect();
        let _ = write!(text, " Before that, without a change of what the model computes: {}.", names.join(", "));
    }
    let worst = converted.and_then(|report| report.worst().into_iter().next()).and_then(|t| Some((&t.name, t.loss?)));
    if let Some((name, loss)) = worst {
        let _ = write!(text, " The weight that lost most is `{name}`: cosine {:.6} with the source's.", loss.cosine);
    }
    format!("{text}\n\n")
}

fn packages(bundle: &Bundle) -> String {
    let mut text =
        String::from("| package | holds | functions | weights | size | digest |\n|---|---|---|---|---|---|\n");
    let mut total = bundle.host.file.bytes;
    for package in &bundle.packages {
        let own: Vec<_> = bundle.all_functions().filter(|function| function.package == package.package).collect();
        let holds = match package.is_asset() {
            true => WHOLE_MODEL.to_owned(),
            false => own.first().map_or_else(String::new, |function| part(bundle, function)),
        };
        let size = package.files.iter().map(|file| file.bytes).sum::<u64>();
        total += size;
        let _ = writeln!(
            text,
            "| {} | {holds} | {} | {} | {} | `{}` |",
            cell(&package.package),
            own.len(),
            bytes(package.weight_bytes),
            bytes(size),
            package.digest(),
        );
    }
    let _ = writeln!(
        text,
        "\n{}, {} with what the host computes with. The digest of all is `{}`. `bundle.json` has the size and digest of every \
         file; the digest of several files is that of the lines `DIGEST FILE` of each.\n",
        counted(bundle.packages.len(), programs(bundle)),
        bytes(total),
        bundle.digest(),
    );
    text
}

/// Results of the gates.
fn proofs(gates: Option<&Json>, is_coreml: bool) -> String {
    let mut text = String::from("## What was checked\n\n");
    let problem = match gates {
        Some(report) => missing_proof(report),
        None => Some("no gate was tried".to_owned()),
    };
    if let Some(problem) = problem {
        let _ = writeln!(text, "**Unproven**: {problem}.\n");
    }
    let gates = gates.and_then(|report| report["gates"].as_array());
    match gates {
        None => text.push_str("No report of gates came with this bundle. `anec validate` makes one.\n\n"),
        Some(gates) => {
            text.push_str("| gate | passed | verdict |\n|---|---|---|\n");
            for gate in gates {
                let checks = gate["checks"].as_array().map(Vec::as_slice).unwrap_or_default();
                let passed = checks.iter().filter(|check| check["verdict"] == "passed").count();
                let word = |key: &str| cell(gate[key].as_str().unwrap_or_default());
                let _ = writeln!(text, "| {} | {passed} of {} | {} |", word("gate"), checks.len(), word("verdict"));
            }
            let cosines = gates
                .iter()
                .filter(|gate| gate["gate"] == "parity")
                .flat_map(|gate| gate["checks"].as_array().into_iter().flatten())
                .filter_map(|check| check["measured"]["cosine"].as_f64());
            if let Some(least) = cosines.min_by(f64::total_cmp) {
                let _ = writeln!(text, "\nParity: the least cosine with the golden is {least:.6}.");
            }
            text.push('\n');
        }
    }
    let on_a_mac = gates.into_iter().flatten().any(|gate| gate["gate"] == "residency" && gate["verdict"] == "passed");
    text.push_str(match on_a_mac {
        true => "Residency was judged by a compute plan that a Mac made.\n\n",
        false if !is_coreml => {
            "Not run on a Mac with OS 27: that this asset compiles, and runs on the Neural Engine, is not proven here.\n\n"
        }
        false => {
            "Not run on a Mac: that these packages compile, and run on the Neural Engine, is not proven here. \
             `anec validate` on a Mac proves or refutes it.\n\n"
        }
    });
    text
}

/// Forecast of the rules, one row per rule.
fn forecast(findings: &[ForecastFinding]) -> String {
    let mut text = String::from(
        "## Forecast\n\nRules of what keeps ops off the Neural Engine, applied to the packages: a forecast, no proof.\n\n",
    );
    if findings.is_empty() {
        text.push_str("No rule applies.\n\n");
        return text;
    }
    text.push_str("| rule | severity | where | found | what helps |\n|---|---|---|---|---|\n");
    for (rule, findings) in by_rule(findings) {
        let first = findings[0];
        let more = if findings.len() > 1 { format!(" and {} more", findings.len() - 1) } else { String::new() };
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} |",
            cell(rule),
            first.severity,
            cell(&(place(first) + &more)),
            cell(&first.found),
            cell(&first.remedy),
        );
    }
    text.push('\n');
    text
}

fn origins(bundle: &Bundle, facts: &CardFacts) -> String {
    let mut text =
        format!("## Where the weights came from\n\n`{}` ({})\n\n", source_name(bundle), bundle.source.format);
    text.push_str("| file | size | digest |\n|---|---|---|\n");
    for file in &bundle.source.files {
        let _ = writeln!(text, "| {} | {} | `{}` |", cell(&file.file), bytes(file.bytes), file.digest);
    }
    text.push_str(&match &facts.license {
        Some(license) => format!("\nThe weights keep their licence: {}.\n", cell(license)),
        None => {
            "\nThe licence of the weights was not known to the tool that wrote this card; the source's licence holds.\n"
                .into()
        }
    });
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_bundle::{Pooling, SequenceClassification, TextEmbedding};

    #[test]
    fn every_task_has_its_name_and_its_command() {
        let labels = |count: usize| {
            let labels = (0..count).map(|label| label.to_string()).collect();
            Task::SequenceClassification(SequenceClassification {
                labels,
                pooling: Pooling::Cls,
                causal: false,
                prompt: None,
            })
        };
        let embedding = TextEmbedding {
            bidirectional: true,
            pooling: Pooling::Mean,
            projections: Vec::new(),
            normalize: true,
            texts: Default::default(),
        };
        for (task, name, command) in [
            (Task::TextGeneration, "text-generation", "anec run hf:o/m --prompt"),
            (Task::TextEmbedding(embedding), "sentence-similarity", "anec embed hf:o/m --text"),
            (labels(1), "text-ranking", "--pair"),
            (labels(2), "text-classification", "anec classify hf:o/m --prompt"),
        ] {
            assert_eq!(pipeline(&task), name);
            let usage = usage(&task, true, "o/m");
            assert!(usage.starts_with("anec ") && usage.contains(command), "{usage}");
        }
    }

    #[test]
    fn a_card_is_front_matter_and_facts() {
        let gates = serde_json::json!({"bundle": "b", "gates": [
            {"gate": "parity", "verdict": "passed", "checks": [
                {"verdict": "passed", "measured": {"cosine": 0.9996}}, {"verdict": "passed", "measured": {"cosine": 0.9999}},
            ]},
            {"gate": "residency", "verdict": "unproven", "checks": [{"verdict": "unproven"}]},
        ]});
        let text = proofs(Some(&gates), true);
        assert!(
            text.contains("| parity | 2 of 2 | passed |") && text.contains("least cosine with the golden is 0.999600")
        );
        assert!(text.contains("| residency | 0 of 1 | unproven |") && text.contains("Not run on a Mac"), "{text}");
        assert!(proofs(None, true).contains("No report of gates"));
        let passed = serde_json::json!({"gates": [{"gate": "residency", "verdict": "passed", "checks": []}]});
        assert!(!proofs(Some(&passed), true).contains("Not run on a Mac"));
        assert!(proofs(Some(&gates), false).contains("Not run on a Mac with OS 27"));
    }
}
