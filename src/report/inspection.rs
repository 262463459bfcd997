//! Contents of a source, package or bundle.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value as Json, json};

use super::conversion::part;
use super::table::table;
use super::{bytes, counted};
use anec_advice::ForecastFinding;
use anec_bundle::{Bundle, TokenCount};
use anec_coreai::inventory::{AssetFinding, AssetInventory, GraphInventory};
use anec_package::describe::{FunctionInventory, Inventory};
use anec_source::gguf::{GgufArray, GgufMetadata, GgufValue};
use anec_source::onnx::{CONFIG, OnnxBundle};
use anec_source::{Description, Source, SourceTensor};

/// Longest metadata value that is shown in full.
const MAX_VALUE_CHARS: usize = 100;

/// Formats a source as text. Unless `all` is set, tensors that differ only in layer numbers share a line.
pub fn source(source: &Source, all: bool) -> String {
    let total: u64 = source.tensors().map(SourceTensor::byte_length).sum();
    let parameters: u64 = source.tensors().map(SourceTensor::elements).sum();
    let mut text = format!(
        "{}: {}, {} of {}, {} of {} parameters\n\n",
        source.name(),
        source.kind().name(),
        counted(source.tensors().len(), "tensor"),
        bytes(total),
        counted(source.files().len(), "file"),
        millions(parameters),
    );
    let files = source.files().iter().map(|f| vec![f.name().to_owned(), bytes(f.size())]);
    text.push_str(&table(&["file", ">size"], files));
    text.push('\n');
    match source.description() {
        Description::Gguf(metadata) => text.push_str(&gguf(metadata)),
        Description::HuggingFace(files) => text.push_str(&json_file("config.json", files.config.as_ref())),
        Description::Onnx(bundle) => {
            text.push_str(&graph(bundle));
            text.push('\n');
            text.push_str(&json_file(CONFIG, bundle.genai.as_ref().and_then(|config| config.get("model"))));
            text.push_str(&json_file("config.json", bundle.files.config.as_ref()));
        }
    }
    text.push('\n');
    let mut by_dtype: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for tensor in source.tensors() {
        let (count, size) = by_dtype.entry(tensor.dtype().name()).or_default();
        *count += 1;
        *size += tensor.byte_length();
    }
    let rows = by_dtype.iter().map(|(name, (count, size))| vec![(*name).to_owned(), count.to_string(), bytes(*size)]);
    text.push_str(&table(&["type", ">tensors", ">size"], rows));
    text.push('\n');
    text.push_str(&tensors(source, all));
    text
}

/// Keys of a JSON file.
fn json_file(name: &str, content: Option<&Json>) -> String {
    let Some(Json::Object(content)) = content else { return String::new() };
    let rows = content.iter().map(|(key, value)| vec![key.clone(), shortened(&value.to_string())]);
    table(&[name, "value"], rows)
}

/// Properties of the decoder in an ONNX graph.
fn graph(bundle: &OnnxBundle) -> String {
    let rows = graph_facts(bundle).into_iter().map(|(key, value)| vec![key.to_owned(), value.to_string()]);
    table(&["graph", "value"], rows)
}

fn graph_facts(bundle: &OnnxBundle) -> Vec<(&'static str, Json)> {
    let decoder = &bundle.decoder;
    let mut facts = vec![
        ("producer", json!(bundle.producer)),
        ("opset", json!(bundle.opset)),
        ("layers", json!(decoder.layers.len())),
        ("hidden_size", json!(decoder.hidden_size)),
        ("vocab_size", json!(decoder.vocab_size)),
        ("norms", json!(format!("{:?}, epsilon {:e}", decoder.norms, decoder.epsilon))),
        ("tied", json!(decoder.tied)),
    ];
    if let Some(layer) = decoder.layers.first() {
        let heads = format!("{} of {} for {}", layer.heads, layer.head_dim, layer.key_value_heads);
        facts.push(("heads", json!(heads)));
        facts.push(("intermediate_size", json!(layer.intermediate_size)));
        facts.push(("activation", json!(format!("{:?}", layer.activation))));
        if let Some(place) = layer.qk_norm {
            facts.push(("query-key norm", json!(format!("{place:?}"))));
        }
    }
    for rope in &decoder.ropes {
        let theta = rope.table.theta().ok().flatten();
        let shape = format!("{} positions of {} dimensions", rope.table.positions(), rope.table.rope_dim());
        let base = theta.map_or_else(|| "no single base".to_owned(), |theta| format!("base {theta}"));
        let long = rope.long.as_ref().map_or_else(String::new, |(limit, _)| format!(", another beyond {limit}"));
        facts.push(("rotary table", json!(format!("{shape}, {base}{long}"))));
    }
    facts
}

fn gguf(metadata: &GgufMetadata) -> String {
    let rows = metadata.iter().map(|(key, value)| vec![shortened(key), shortened(&value_text(value))]);
    table(&["key", "value"], rows)
}

fn value_text(value: &GgufValue) -> String {
    match value {
        GgufValue::U8(v) => v.to_string(),
        GgufValue::I8(v) => v.to_string(),
        GgufValue::U16(v) => v.to_string(),
        GgufValue::I16(v) => v.to_string(),
        GgufValue::U32(v) => v.to_string(),
        GgufValue::I32(v) => v.to_string(),
        GgufValue::U64(v) => v.to_string(),
        GgufValue::I64(v) => v.to_string(),
        GgufValue::F32(v) => v.to_string(),
        GgufValue::F64(v) => v.to_string(),
        GgufValue::Bool(v) => v.to_string(),
        GgufValue::String(v) => format!("{v:?}"),
        GgufValue::Array(array) => counted(GgufArray::len(array), "element"),
    }
}

fn shortened(text: &str) -> String {
    if text.chars().count() <= MAX_VALUE_CHARS {
        return text.to_owned();
    }
    text.chars().take(MAX_VALUE_CHARS - 1).chain(['…']).collect()
}

fn tensors(source: &Source, all: bool) -> String {
    let shape = |tensor: &SourceTensor| tensor.shape().iter().map(u64::to_string).collect::<Vec<_>>().join(" x ");
    if all {
        let rows = source
            .tensors()
            .map(|t| vec![shortened(t.name()), t.dtype().name().to_owned(), shape(t), bytes(t.byte_length())]);
        return table(&["tensor", "type", "shape", ">size"], rows);
    }
    let mut groups: BTreeMap<(String, &str, String), (usize, u64)> = BTreeMap::new();
    for tensor in source.tensors() {
        let group = groups.entry((pattern(tensor.name()), tensor.dtype().name(), shape(tensor))).or_default();
        group.0 += 1;
        group.1 += tensor.byte_length();
    }
    let rows = groups.into_iter().map(|((name, dtype, shape), (count, size))| {
        vec![shortened(&name), count.to_string(), dtype.to_owned(), shape, bytes(size)]
    });
    table(&["tensor", ">number", "type", "shape", ">size"], rows)
}

/// Replaces the numbers in a tensor's name (layers, experts) by `*`.
fn pattern(name: &str) -> String {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    name.split('.').map(|part| if is_number(part) { "*" } else { part }).collect::<Vec<_>>().join(".")
}

fn millions(count: u64) -> String {
    if count >= 1_000_000_000 {
        format!("{:.2} billion", count as f64 / 1e9)
    } else {
        format!("{:.2} million", count as f64 / 1e6)
    }
}

/// Formats a source as JSON.
pub fn source_json(source: &Source) -> Json {
    let description = match source.description() {
        Description::Gguf(metadata) => {
            let values: serde_json::Map<String, Json> = metadata
                .iter()
                .map(|(key, value)| {
                    let value = match value {
                        GgufValue::String(text) => json!(text),
                        GgufValue::Bool(v) => json!(v),
                        GgufValue::Array(array) => json!({"elements": GgufArray::len(array)}),
                        number => serde_json::from_str(&value_text(number)).unwrap_or(Json::Null),
                    };
                    (key.to_owned(), value)
                })
                .collect();
            json!({"gguf": values})
        }
        Description::HuggingFace(files) => json!({"config": files.config}),
        Description::Onnx(bundle) => {
            let graph: Vec<Json> =
                graph_facts(bundle).into_iter().map(|(key, value)| json!({"key": key, "value": value})).collect();
            json!({"graph": graph, "genai_config": bundle.genai, "config": bundle.files.config})
        }
    };
    let tensors: Vec<Json> = source
        .tensors()
        .map(|t| json!({"name": t.name(), "dtype": t.dtype().name(), "shape": t.shape(), "bytes": t.byte_length()}))
        .collect();
    let files: Vec<Json> = source.files().iter().map(|f| json!({"name": f.name(), "bytes": f.size()})).collect();
    json!({
        "kind": "source",
        "name": source.name(),
        "format": source.kind().name(),
        "files": files,
        "description": description,
        "tensors": tensors,
    })
}

/// Formats a package as text, with the problems of its description (`findings`) and of its program (`graph`).
pub fn package(path: &Path, inventory: &Inventory, findings: &[String], graph: &[String]) -> String {
    let size: u64 = inventory.files.iter().map(|f| f.bytes).sum();
    let mut text = format!(
        "{}: specification version {}, {}, {} of weights, {} in all\n",
        path.display(),
        inventory.specification_version,
        counted(inventory.functions.len(), "function"),
        bytes(inventory.weight_bytes),
        bytes(size),
    );
    if !inventory.metadata.short_description.is_empty() {
        text.push_str(&format!("{}\n", inventory.metadata.short_description));
    }
    for (key, value) in inventory.metadata.user_defined.iter().chain(&inventory.build_info) {
        text.push_str(&format!("{key}: {}\n", shortened(value)));
    }
    for function in &inventory.functions {
        text.push('\n');
        text.push_str(&package_function(function));
    }
    text.push('\n');
    let files = inventory.files.iter().map(|f| vec![f.path.clone(), bytes(f.bytes)]);
    text.push_str(&table(&["file", ">size"], files));
    for (what, list) in [("description", findings), ("program", graph)] {
        for finding in list {
            text.push_str(&format!("{what}: {finding}\n"));
        }
    }
    text
}

fn package_function(function: &FunctionInventory) -> String {
    let mut text = format!("function {} ({})\n", function.name, function.opset);
    for (what, list) in [("input", &function.inputs), ("state", &function.states), ("output", &function.outputs)] {
        for feature in list {
            text.push_str(&format!("  {what:6} {feature}\n"));
        }
    }
    for (symbol, lengths) in &function.lengths {
        text.push_str(&format!("  {symbol} = {lengths}\n"));
    }
    let constants: Vec<String> =
        function.constant_bytes.iter().map(|(dtype, size)| format!("{dtype} {}", bytes(*size))).collect();
    text.push_str(&format!("  constants {}; states {}\n", constants.join(", "), bytes(function.state_bytes)));
    let ops: Vec<(&String, &usize)> = function.ops.iter().filter(|(op, _)| *op != "const").collect();
    text.push_str(&op_census(&ops));
    text
}

/// Formats a package as JSON.
pub fn package_json(inventory: &Inventory, findings: &[String], graph: &[String]) -> Json {
    json!({"kind": "package", "inventory": inventory, "description_findings": findings, "program_findings": graph})
}

/// Formats an asset of Core AI as text, with the rules that apply to it.
pub fn asset(path: &Path, inventory: &AssetInventory, rules: &[ForecastFinding]) -> String {
    let mut text = format!(
        "{}: Core AI, dialect date {}, {}, {} in resources, {} in all\n",
        path.display(),
        inventory.version.map_or("unknown".into(), |version| version.to_string()),
        counted(inventory.functions.len(), "function"),
        bytes(inventory.resource_bytes),
        bytes(inventory.bytes),
    );
    if let Some(metadata) = &inventory.metadata {
        let named = [
            ("description", &metadata.description),
            ("author", &metadata.author),
            ("license", &metadata.license),
            ("producer", &metadata.producer),
            ("created", &metadata.creation_date),
        ];
        let custom = metadata.custom.iter().map(|(key, value)| (&key[..], value));
        for (key, value) in named.into_iter().chain(custom).filter(|(_, value)| !value.is_empty()) {
            text.push_str(&format!("{key}: {}\n", shortened(value)));
        }
    }
    for function in &inventory.functions {
        text.push('\n');
        text.push_str(&asset_function(function));
    }
    if !inventory.private_functions.is_empty() {
        let names: Vec<&str> = inventory.private_functions.iter().map(|function| &function.name[..]).collect();
        text.push_str(&format!("\nprivate functions, called by others: {}\n", names.join(", ")));
    }
    let constants: Vec<String> =
        inventory.constant_bytes.iter().map(|(element, size)| format!("{element} {}", bytes(*size))).collect();
    if !constants.is_empty() || !inventory.findings.is_empty() {
        text.push('\n');
    }
    if !inventory.weights.is_empty() {
        let weights: Vec<String> = inventory
            .weights
            .iter()
            .map(|(form, totals)| format!("{} of {form} {}", totals.count, bytes(totals.bytes)))
            .collect();
        text.push_str(&format!("weights: {}\n", weights.join(", ")));
    }
    if !constants.is_empty() {
        text.push_str(&format!("constants: {}\n", constants.join(", ")));
    }
    text += &asset_findings(&inventory.findings);
    if !rules.is_empty() {
        text += &format!("\n{}", super::forecast(rules));
    }
    text
}

/// Findings; one that several functions share is one line.
fn asset_findings(findings: &[AssetFinding]) -> String {
    let mut lines = Vec::new();
    for (index, finding) in findings.iter().enumerate() {
        let is_alike = |other: &&AssetFinding| other.problem == finding.problem && other.function.is_some();
        if finding.function.is_none() {
            lines.push(format!("note: {finding}\n"));
        } else if !findings[..index].iter().any(|other| is_alike(&other)) {
            lines.push(match findings.iter().filter(is_alike).count() {
                1 => format!("note: {finding}\n"),
                count => format!("note: {finding}; alike in {}\n", counted(count - 1, "other function")),
            });
        }
    }
    lines.concat()
}

fn asset_function(function: &GraphInventory) -> String {
    let composite = function.composite.as_ref().map_or(String::new(), |name| format!(" ({name})"));
    let mut text = format!("function {}{composite}\n", function.name);
    for (what, list) in [("input", &function.inputs), ("state", &function.states), ("output", &function.outputs)] {
        for value in list {
            text.push_str(&format!("  {what:6} {value}\n"));
        }
    }
    text.push_str(&op_census(&function.ops.iter().collect::<Vec<_>>()));
    text
}

/// How often each operator occurs, the most frequent first.
fn op_census(ops: &[(&String, &usize)]) -> String {
    let mut ops = ops.to_vec();
    ops.sort_by(|a, b| b.1.cmp(a.1).then_with(|| a.0.cmp(b.0)));
    let count: usize = ops.iter().map(|(_, count)| **count).sum();
    let list: Vec<String> = ops.iter().map(|(op, count)| format!("{count} {op}")).collect();
    match count {
        0 => "  no ops\n".into(),
        _ => format!("  {}: {}\n", counted(count, "op"), list.join(", ")),
    }
}

/// Formats an asset of Core AI as JSON, with the rules that apply to it.
pub fn asset_json(inventory: &AssetInventory, rules: &[ForecastFinding]) -> Json {
    json!({"kind": "asset", "inventory": inventory, "forecast": rules})
}

/// Formats a bundle as text.
pub fn bundle(bundle: &Bundle) -> String {
    let model = &bundle.model;
    let weights: u64 = bundle.packages.iter().map(|p| p.weight_bytes).sum();
    let list = |numbers: &[u64]| numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    let mut text = format!(
        "{}: {}, {} layers of {}, vocabulary {}, context {}; anec {}\nsource: {} ({}, {})\n\
         {} of weights, {} for the host\nend of text: {}; tokenizer: {}\n\n",
        bundle.name,
        bundle.family,
        model.num_layers,
        model.hidden_size,
        model.vocab_size,
        list(&model.contexts),
        bundle.anec_version,
        bundle.source.name,
        bundle.source.format,
        bytes(bundle.source.files.iter().map(|f| f.bytes).sum()),
        bytes(weights),
        bytes(bundle.host.file.bytes),
        if model.eos_token_ids.is_empty() { "not known".to_owned() } else { list(&model.eos_token_ids) },
        if bundle.tokenizer.contains_key("tokenizer") { "yes" } else { "none" },
    );
    let rows = bundle.all_functions().map(|function| {
        let package = bundle.packages.iter().find(|p| p.package == function.package);
        let tokens = match function.tokens {
            TokenCount::Range(lower, upper) => format!("{lower}..{upper}"),
            TokenCount::Fixed(count) => count.to_string(),
        };
        vec![
            function.package.clone(),
            function.function.clone(),
            part(bundle, function),
            tokens,
            function.context.to_string(),
            package.map_or_else(String::new, |p| bytes(p.weight_bytes)),
            package.map_or("", |p| if p.compiled.is_some() { "yes" } else { "no" }).to_owned(),
        ]
    });
    let head = ["package", "function", "holds", "T", ">context", ">weights", "compiled"];
    text.push_str(&table(&head, rows));
    let (ignored, kept) = (&bundle.ledger.ignored, bundle.ledger.kept);
    text.push_str(&format!(
        "\n{} of the source used{}{}\n",
        counted(bundle.ledger.used, "tensor"),
        if kept == 0 { String::new() } else { format!(", {kept} with their integers kept") },
        if ignored.is_empty() { String::new() } else { format!(", {} ignored:", ignored.len()) }
    ));
    for (tensor, reason) in ignored {
        text.push_str(&format!("  {tensor}: {reason}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_differ_in_numbers_share_a_pattern() {
        assert_eq!(pattern("model.layers.12.mlp.experts.3.w1"), "model.layers.*.mlp.experts.*.w1");
        assert_eq!(pattern("blk.0.attn_q.weight"), "blk.*.attn_q.weight");
        assert_eq!(pattern("output"), "output");
    }

    #[test]
    fn long_values_are_cut() {
        assert_eq!(shortened("short"), "short");
        let long = shortened(&"ä".repeat(500));
        assert_eq!(long.chars().count(), MAX_VALUE_CHARS);
        assert!(long.ends_with('…'));
    }
}
