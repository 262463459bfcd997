//! Consistency of `bundle.json` with the packages and files. A runtime relies on it.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value as Json;

use super::{files, text};
use crate::verdict::{Check, listed};
use anec_base::input;
use anec_bundle::{Bundle, FunctionEntry, PackageEntry, PortRole, Stage, StatePort, StateRole, Task};
use anec_mil::Function;
use anec_package::Package;

/// Unlisted files of a bundle: its own, and a golden.
const OWN_FILES: [&str; 4] =
    [anec_bundle::FILE_NAME, anec_convert::report::FILE_NAME, crate::verdict::FILE_NAME, "golden.safetensors"];
/// Prefixes of unrelated files beside a model.
const IGNORED_PREFIXES: [&str; 4] = [".git", ".DS_Store", "README", "LICENSE"];
/// Suffixes of documents, such as reports.
const DOCUMENT_SUFFIXES: [&str; 2] = [".html", ".md"];

/// Checks of the bundle as a whole.
pub(super) fn checks(bundle: &Bundle, folder: &Path) -> Vec<Check> {
    let mut checks = vec![
        Check::of("bundle", "its functions are listed in the order of their calls", order(bundle)),
        Check::of("bundle", "its states are those of its functions' layers", listed(&states(bundle))),
        Check::of("bundle", "nothing lies in its folder that it doesn't list", listed(&unlisted(bundle, folder))),
    ];
    if !bundle.tokenizer.is_empty() {
        let named: BTreeSet<&String> = bundle.tokenizer.values().collect();
        let with_digest: BTreeSet<&String> = bundle.tokenizer_files.iter().map(|file| &file.file).collect();
        checks.push(if named == with_digest {
            files("tokenizer", &bundle.tokenizer_files, folder)
        } else {
            let problem = format!("{named:?} are named, {with_digest:?} have digests; convert the model again");
            Check::of("tokenizer", "its files are those that were written", Some(problem))
        });
    }
    if bundle.model.task == Task::TextGeneration {
        checks.push(Check::of("tokenizer", "a text ends with its end tokens", listed(&ends(bundle, folder))));
    }
    checks
}

/// Sort key of a function in the order of calls.
fn place(stage: &Stage) -> [u64; 4] {
    match *stage {
        Stage::Layers { first, .. } => [0, first as u64, 0, 0],
        Stage::FeedForward { layer } => [0, layer as u64, 1, 0],
        Stage::Experts { layer, first, .. } => [0, layer as u64, 2, first],
        Stage::Head { first, .. } => [1, first, 0, 0],
        Stage::Model { .. } => [0, 0, 0, 0],
    }
}

fn order(bundle: &Bundle) -> Option<String> {
    let mut pairs = bundle.functions.windows(2);
    let wrong = pairs.find(|pair| place(&pair[0].stage) > place(&pair[1].stage))?;
    let name = |entry: &FunctionEntry| format!("`{}` of {}", entry.function, entry.package);
    Some(format!("{} stands before {}, which is called first", name(&wrong[0]), name(&wrong[1])))
}

fn states(bundle: &Bundle) -> Vec<String> {
    // layers may have individual head sizes
    let of_layer = |layer: usize, key: &str| {
        let own = bundle.config.get("layers").and_then(|layers| layers.get(layer)?.get("heads")?.get(key));
        own.or(bundle.config.get(key)).and_then(Json::as_u64)
    };
    let mut problems = Vec::new();
    for entry in &bundle.functions {
        for state in entry.states.iter().chain(&caches(entry)) {
            let mut add = |problem: String| {
                problems.push(format!("{}, function `{}`, `{}`: {problem}", entry.package, entry.function, state.name));
            };
            let layers = layers(&state.role);
            let inside = |layer: &usize| entry.stage.whole_layers().is_some_and(|own| own.contains(layer));
            if let Some(layer) = layers.iter().find(|layer| !inside(layer)) {
                add(format!("it is of layer {layer}, which the function doesn't have"));
            }
            if let Some(expected) = name_of(&state.role).filter(|name| *name != state.name) {
                add(format!("what it holds has the name `{expected}`"));
            }
            let of_layers = |key: &str| layers.iter().map(|layer| of_layer(*layer, key)).collect::<Option<Vec<u64>>>();
            if let (Some(heads), Some(widths)) = (of_layers("num_key_value_heads"), of_layers("head_dim")) {
                let heads = heads.into_iter().fold(0, u64::saturating_add);
                let wrong =
                    |width: &&u64| cache_of(&state.role, heads).is_some_and(|rows| !is_cache(state, rows, **width));
                if let Some(width) = widths.iter().find(wrong) {
                    add(format!("its shape is {:?}; the configuration has {heads} heads of {width}", state.shape));
                }
            }
        }
    }
    problems
}

/// Caches stored by the host, as states.
fn caches(entry: &FunctionEntry) -> Vec<StatePort> {
    let caches = entry.inputs.iter().filter_map(|port| match &port.role {
        PortRole::Cache { id, holds } => {
            Some(StatePort { name: port.name.clone(), id: id.clone(), role: holds.clone(), shape: port.shape_at(1) })
        }
        _ => None,
    });
    caches.collect()
}

fn layers(role: &StateRole) -> Vec<usize> {
    match role {
        StateRole::KeyCache { layer } | StateRole::ValueCache { layer } => vec![*layer],
        StateRole::KeyValueCache { layers }
        | StateRole::ConvolutionState { layers }
        | StateRole::DelayState { layers }
        | StateRole::RecurrentState { layers } => layers.clone(),
    }
}

/// Name of the state with the content of one layer.
fn name_of(role: &StateRole) -> Option<String> {
    match role {
        StateRole::KeyCache { layer } => Some(format!("k_cache_{layer}")),
        StateRole::ValueCache { layer } => Some(format!("v_cache_{layer}")),
        _ => None,
    }
}

/// Rows of a cache for a number of key-value heads.
fn cache_of(role: &StateRole, heads: u64) -> Option<u64> {
    match role {
        StateRole::KeyCache { .. } | StateRole::ValueCache { .. } => Some(heads),
        StateRole::KeyValueCache { .. } => Some(heads.saturating_mul(2)),
        _ => None,
    }
}

fn is_cache(state: &StatePort, rows: u64, width: u64) -> bool {
    matches!(state.shape[..], [1, found, _, found_width] if found == rows && found_width == width)
}

/// Files in the folder, outside packages, that the bundle doesn't list.
fn unlisted(bundle: &Bundle, folder: &Path) -> Vec<String> {
    let packages = bundle.packages.iter().flat_map(|entry| [Some(&entry.package), entry.compiled.as_ref()]).flatten();
    let known: BTreeSet<&str> = packages
        .chain(bundle.tokenizer.values())
        .chain([&bundle.host.file.file])
        .map(String::as_str)
        .chain(OWN_FILES)
        .collect();
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) => return vec![text(error)],
    };
    let names = entries.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()));
    let mut unlisted: Vec<String> = names
        .filter(|name| !known.contains(name.as_str()))
        .filter(|name| !IGNORED_PREFIXES.iter().any(|begin| name.starts_with(begin)))
        .filter(|name| !DOCUMENT_SUFFIXES.iter().any(|end| name.ends_with(end)))
        .map(|name| format!("`{name}`"))
        .collect();
    unlisted.sort();
    unlisted
}

/// Compares end tokens with the vocabulary and the bundle's tokenizer files.
fn ends(bundle: &Bundle, folder: &Path) -> Vec<String> {
    let ends = &bundle.model.eos_token_ids;
    let size = bundle.model.vocab_size;
    let beyond = ends.iter().filter(|id| **id >= size).map(|id| format!("{id} is beyond the vocabulary of {size}"));
    let mut problems: Vec<String> = beyond.collect();
    let read = |what: &str| -> Option<Json> {
        let name = bundle.tokenizer.get(what)?;
        serde_json::from_slice(&input::read_file(&folder.join(name), input::MOST_JSON).ok()?).ok()
    };
    let of_config = read("generation_config").map(|config| match &config["eos_token_id"] {
        Json::Array(list) => list.iter().filter_map(Json::as_u64).collect(),
        value => value.as_u64().into_iter().collect::<Vec<u64>>(),
    });
    for id in of_config.unwrap_or_default() {
        if !ends.contains(&id) {
            problems.push(format!("{ends:?} lack {id} of generation_config.json"));
        }
    }
    problems
}

/// Compares the bytes of a package's weights with its weight file, in which each constant has a header and padding.
pub(super) fn weight_bytes(entry: &PackageEntry, package: &Package) -> Option<String> {
    /// Size of a header, and alignment.
    const HEADER: u64 = 64;
    let ops = package.program.functions.iter().flat_map(Function::ops);
    let constants: usize = ops.map(|op| op.attributes.len() + op.inputs.len()).sum();
    let files = entry.files.iter().filter(|file| file.file.contains("/weights/"));
    let file: u64 = files.map(|file| file.bytes).sum();
    let around = HEADER + 2 * HEADER * constants as u64;
    let fits = entry.weight_bytes <= file && file - entry.weight_bytes <= around;
    (!fits).then(|| format!("{} bytes, its weight file has {file}", entry.weight_bytes))
}

/// Checks that functions with caches multiply by the configuration's attention scale.
pub(super) fn attention_scale(bundle: &Bundle, entry: &FunctionEntry, function: &Function) -> Option<String> {
    let scale = bundle.config.get("attention_scale").and_then(Json::as_f64)?;
    // compressed convolutional attention has a learned scale
    let own = bundle.config.get("cca").is_some_and(|cca| !cca.is_null());
    if scale == 1.0 || own || !entry.states.iter().chain(&caches(entry)).any(|state| cache_of(&state.role, 1).is_some())
    {
        return None;
    }
    let expected = half::f16::from_f64(scale).to_f32();
    let multiplies = function.ops().filter(|op| op.operator == "mul").any(|op| {
        let factors = ["x", "y"].into_iter().filter_map(|name| function.constant(op.input(name)?)?.as_float());
        factors.into_iter().any(|factor| factor == expected)
    });
    (!multiplies).then(|| format!("function `{}` has no scale of attention of {scale}", entry.function))
}
