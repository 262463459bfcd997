//! The structure gate: files are complete, packages are as described, programs are well-formed.
//!
//! | module | holds |
//! |---|---|
//! | `description` | `bundle.json` against itself and the folder |
//! | `declared` | family, configuration, transforms and formats against the packages |
//! | `host` | the host's tensors |
//! | `weights` | scales and palettes of weights |

mod declared;
mod description;
mod host;
mod weights;

use anec_base::listing::list;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::path::Path;

use rayon::prelude::*;

use super::verdict::{Check, GateReport, listed};
use anec_bundle::Port;
use anec_bundle::{Bundle, FileDigest, FunctionEntry, PackageEntry, TokenCount};
use anec_convert::plan::form;
use anec_mil::verify::{infer_types, verify, verify_function};
use anec_mil::{Dim, Function, SymbolRange, TensorType, Value};
use anec_package::Package;
use anec_runtime::{HostTables, Tokenizer};

/// Name of the gate.
pub const GATE: &str = "structure";

/// Maximum number of tested sizes of a range: all of a small one, the first few and the last of a large one.
const MAX_SIZES: u64 = 16;

/// Checks the bundle in `folder`.
pub fn structure(bundle: &Bundle, folder: &Path) -> GateReport {
    let mut checks = vec![
        Check::of(
            "bundle",
            "it doesn't contradict itself, and its functions make the whole model",
            listed(&bundle.check()),
        ),
        Check::of("bundle", "every tensor of the source is accounted for", ledger(bundle)),
        Check::of(
            "bundle",
            "its family, configuration and transforms agree",
            listed(&declared::bundle_problems(bundle)),
        ),
        files(&bundle.host.file.file, std::slice::from_ref(&bundle.host.file), folder),
        Check::of(
            &bundle.host.file.file,
            "it has the host's tensors",
            HostTables::open(bundle, folder).err().map(text),
        ),
    ];
    checks.extend(host::checks(bundle, folder));
    checks.extend(description::checks(bundle, folder));
    checks.extend(tokenizer(bundle, folder));
    // in parallel: reading large packages dominates
    let of_packages: Vec<Vec<Check>> =
        bundle.packages.par_iter().map(|entry| check_package(bundle, entry, folder)).collect();
    checks.extend(of_packages.into_iter().flatten());
    GateReport::new(GATE, checks)
}

fn text(error: impl Display) -> String {
    error.to_string()
}

fn ledger(bundle: &Bundle) -> Option<String> {
    if bundle.ledger.used == 0 {
        return Some("the bundle says that it uses no tensor".into());
    }
    let unexplained = bundle.ledger.ignored.iter().find(|(_, reason)| reason.is_empty());
    unexplained.map(|(tensor, _)| format!("`{tensor}` is ignored without a reason"))
}

fn tokenizer(bundle: &Bundle, folder: &Path) -> Option<Check> {
    let file = bundle.tokenizer.get("tokenizer")?;
    let problem = match Tokenizer::of(bundle, folder) {
        Ok(tokenizer) if tokenizer.len() as u64 > bundle.model.vocab_size => {
            let rows = bundle.model.vocab_size;
            Some(format!("it has {} tokens, the model's vocabulary {rows}", tokenizer.len()))
        }
        Ok(_) => None,
        Err(error) => Some(text(error)),
    };
    Some(Check::of(file, "it is a tokenizer for the model's vocabulary", problem))
}

/// Compares files with their listed sizes and digests.
fn files(subject: &str, files: &[FileDigest], folder: &Path) -> Check {
    let problems: Vec<String> = files.iter().filter_map(|file| check_file(file, folder).err()).collect();
    let problem = if files.is_empty() { Some("no file is listed".into()) } else { listed(&problems) };
    Check::of(subject, "its files are those that were written", problem)
}

fn check_file(file: &FileDigest, folder: &Path) -> Result<(), String> {
    let path = folder.join(&file.file);
    let system = |error: std::io::Error| format!("{}: {error}", file.file);
    let bytes = std::fs::metadata(&path).map_err(system)?.len();
    if bytes != file.bytes {
        return Err(format!("{}: {bytes} bytes, expected {}", file.file, file.bytes));
    }
    let found = file.digest.rehash_file(&path).map_err(system)?;
    if found == file.digest { Ok(()) } else { Err(format!("{}: digest {found}, expected {}", file.file, file.digest)) }
}

/// An asset of Core AI: it can be read, and has the functions that the bundle names.
fn check_asset(bundle: &Bundle, name: &str, folder: &Path) -> Vec<Check> {
    let asset = match anec_coreai::open(&folder.join(name)) {
        Ok(asset) => asset,
        Err(error) => return vec![Check::of(name, "it can be read", Some(text(error)))],
    };
    let inventory = asset.inventory();
    let names = |values: &[anec_coreai::inventory::NamedValue]| -> BTreeSet<String> {
        values.iter().map(|value| value.name.clone()).collect()
    };
    let mut problems = Vec::new();
    let entries: Vec<&FunctionEntry> = bundle.all_functions().filter(|entry| entry.package == *name).collect();
    for entry in &entries {
        let Some(function) = inventory.functions.iter().find(|function| function.name == entry.function) else {
            problems.push(format!("no function `{}`", entry.function));
            continue;
        };
        let ports = |ports: &[Port]| -> BTreeSet<String> { ports.iter().map(|port| port.name.clone()).collect() };
        let states = entry.states.iter().map(|state| state.name.clone()).collect();
        for (what, named, found) in [
            ("inputs", ports(&entry.inputs), names(&function.inputs)),
            ("states", states, names(&function.states)),
            ("outputs", ports(&entry.outputs), names(&function.outputs)),
        ] {
            if named != found {
                problems.push(format!("`{}` has the {what} {found:?}, expected {named:?}", entry.function));
            }
        }
    }
    if inventory.functions.len() != entries.len() {
        problems.push(format!("{} functions, expected {}", inventory.functions.len(), entries.len()));
    }
    let digest = (asset.digest_matches() != Some(true)).then(|| "main.hash isn't the SHA-256 of main.mlirb".to_owned());
    vec![
        Check::of(name, "it can be read", None),
        Check::of(name, "its digest is that of its bytecode", digest),
        Check::of(name, "its functions are those of the bundle", listed(&problems)),
    ]
}

fn check_package(bundle: &Bundle, entry: &PackageEntry, folder: &Path) -> Vec<Check> {
    let name = &entry.package;
    let mut checks = vec![files(name, &entry.files, folder)];
    if !bundle.manifest.format.is_coreml() {
        checks.extend(check_asset(bundle, name, folder));
        return checks;
    }
    let package = match anec_package::open(&folder.join(name)) {
        Ok(package) => package,
        Err(error) => {
            checks.push(Check::of(name, "it can be read", Some(text(error))));
            return checks;
        }
    };
    let functions: Vec<&FunctionEntry> = bundle.all_functions().filter(|f| f.package == *name).collect();
    let limit = (bundle.manifest.shards.max_mb * 1e6) as u64;
    let scale = |entry: &&FunctionEntry| {
        description::attention_scale(bundle, entry, package.program.function(&entry.function)?)
    };
    let scales: Vec<String> = functions.iter().filter_map(scale).collect();
    // explicit layer ranges are the user's responsibility
    let size = (bundle.manifest.shards.layers.is_none() && entry.weight_bytes > limit)
        .then(|| format!("{} bytes of weights, at most {limit} are allowed", entry.weight_bytes));
    checks.extend([
        Check::of(name, "it can be read", None),
        Check::of(name, "its program obeys the rules of MIL", listed(&verify(&package.program))),
        Check::of(name, "its description is that of its program", listed(&package.check_description())),
        Check::of(name, "its specification version is that of the target", specification(bundle, &package)),
        Check::of(name, "its functions are those of the bundle", listed(&signatures(&functions, &package))),
        Check::of(name, "types inferred anew at every T are the declared ones", listed(&types(&functions, &package))),
        Check::of(name, "it has all its files, and no others", listed(&contents(entry, &package))),
        Check::of(name, "its weights are under the limit of a package", size),
        Check::of(
            name,
            "scales and palettes of its weights are normal numbers",
            match weights::unusable(&package.program) {
                Ok(problems) => listed(&problems),
                Err(error) => Some(text(error)),
            },
        ),
        Check::of(
            name,
            "it has as many bytes of weights as the bundle says",
            description::weight_bytes(entry, &package),
        ),
        Check::of(name, "its attention has the scale of the configuration", listed(&scales)),
        Check::of(
            name,
            "its weights are those that the bundle describes",
            listed(&declared::package_problems(bundle, &package.program)),
        ),
    ]);
    checks
}

fn specification(bundle: &Bundle, package: &Package) -> Option<String> {
    let opset = form(&bundle.manifest).opset;
    let expected = opset.specification_version();
    let found = package.specification_version;
    (found != expected).then(|| format!("version {found}, {} needs {expected}", opset.name()))
}

/// Compares the package's files with the bundle's list.
fn contents(entry: &PackageEntry, package: &Package) -> Vec<String> {
    let listed: BTreeMap<String, u64> = entry.files.iter().map(|file| (file.file.clone(), file.bytes)).collect();
    let found: BTreeMap<String, u64> =
        package.files.iter().map(|file| (format!("{}/{}", entry.package, file.path), file.bytes)).collect();
    let missing = listed.keys().filter(|file| !found.contains_key(*file)).map(|file| format!("{file} is missing"));
    let extra = found.keys().filter(|file| !listed.contains_key(*file)).map(|file| format!("{file} isn't listed"));
    missing.chain(extra).collect()
}

/// Compares functions, ports and states of the package with the bundle's.
fn signatures(functions: &[&FunctionEntry], package: &Package) -> Vec<String> {
    let mut problems = Vec::new();
    let listed: BTreeSet<&str> = functions.iter().map(|entry| entry.function.as_str()).collect();
    for function in &package.program.functions {
        if !listed.contains(function.name.as_str()) {
            problems.push(format!("function `{}` isn't in the bundle", function.name));
        }
    }
    for entry in functions {
        let Some(function) = package.program.function(&entry.function) else {
            problems.push(format!("function `{}` isn't in the package", entry.function));
            continue;
        };
        let mut add = |what: &str, problem: Option<String>| {
            problems.extend(problem.map(|problem| format!("function `{}`, {what}: {problem}", entry.function)));
        };
        add("inputs", names(entry.inputs.iter().map(|port| &port.name), function.tensor_inputs()));
        add("outputs", names(entry.outputs.iter().map(|port| &port.name), function.outputs()));
        add("states", names(entry.states.iter().map(|state| &state.name), function.states()));
        for (state, value) in entry.states.iter().zip(function.states()) {
            let shape = value.ty.tensor().and_then(TensorType::fixed_shape);
            if shape.as_deref() != Some(&state.shape) {
                add(&format!("state `{}`", state.name), Some(format!("{}, expected {:?}", value.ty, state.shape)));
            }
        }
        let lengths: Vec<&SymbolRange> = function.lengths.values().collect();
        let same = match (entry.tokens, lengths.as_slice()) {
            (TokenCount::Fixed(_), []) => true,
            (TokenCount::Range(a, b), [SymbolRange::Range { lower, upper, .. }]) => (a, Some(b)) == (*lower, *upper),
            _ => false,
        };
        if !same {
            add("numbers of tokens", Some(format!("{lengths:?}, expected {:?}", entry.tokens)));
        }
    }
    problems
}

fn names<'a>(listed: impl Iterator<Item = &'a String>, found: impl Iterator<Item = &'a Value>) -> Option<String> {
    let listed: Vec<&str> = listed.map(String::as_str).collect();
    let found: Vec<&str> = found.map(|value| value.name.as_str()).collect();
    (listed != found).then(|| format!("{}, expected {}", list(found), list(listed)))
}

/// Infers all types at every number of tokens; inputs and outputs must match the bundle's.
fn types(functions: &[&FunctionEntry], package: &Package) -> Vec<String> {
    let mut problems = Vec::new();
    for entry in functions {
        let Some(function) = package.program.function(&entry.function) else { continue };
        for size in sizes(entry.tokens) {
            let at = |problem: String| format!("function `{}`, T = {size}: {problem}", entry.function);
            let symbols: Vec<_> = function.symbols().cloned().collect();
            let fixed = symbols.iter().fold(function.clone(), |function, symbol| function.with_length(symbol, size));
            match infer_types(&fixed) {
                Err(error) => problems.push(at(error.to_string())),
                Ok(inferred) => {
                    problems.extend(verify_function(&inferred).into_iter().map(|finding| at(finding.to_string())));
                    problems.extend(ports(entry, &inferred, size).into_iter().map(at));
                }
            }
        }
    }
    problems
}

/// Numbers of tokens to test.
fn sizes(tokens: TokenCount) -> Vec<u64> {
    match tokens {
        TokenCount::Fixed(size) => vec![size],
        // a range that ends before it begins is a finding of the bundle
        TokenCount::Range(lower, upper) if upper.saturating_sub(lower) < MAX_SIZES => (lower..=upper).collect(),
        TokenCount::Range(lower, upper) => (lower..lower + MAX_SIZES - 1).chain([upper]).collect(),
    }
}

fn ports(entry: &FunctionEntry, function: &Function, size: u64) -> Vec<String> {
    let pairs = entry.inputs.iter().zip(function.tensor_inputs()).chain(entry.outputs.iter().zip(function.outputs()));
    let wrong = |(port, value): (&Port, &Value)| {
        let expected: Vec<Dim> = port.shape_at(size).into_iter().map(Dim::Fixed).collect();
        let same = value.ty.tensor().is_some_and(|ty| ty.shape == expected);
        (!same).then(|| format!("`{}` is {}, the bundle has {:?}", port.name, value.ty, port.shape))
    };
    pairs.filter_map(wrong).collect()
}
