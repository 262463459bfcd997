//! Conversion of whole models of published shapes from random weights, which are computed as they are read and never
//! stored: measures size, memory and time without the original weights. Then the bundle's structure is checked.
//!
//! ```text
//! cargo bench --bench whole                       # zaya1-8b and privacy-filter: about 12 GB of disk
//! cargo bench --bench whole -- gemma-3-4b         # other built-in manifests
//! cargo bench --bench whole -- --all              # every one; the largest takes 82 GB of disk
//! ```
//!
//! Times include computing the weights, which takes longer than reading them. A process of its own converts each model,
//! so that the system reports its memory. `ANEC_BENCH_FOLDER` sets the folder of the bundles, which are removed at the
//! end.

#[path = "../tests/common/synthetic.rs"]
mod synthetic;

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anec::base::resources::usage;
use anec::convert::open::{Opened, open_model};
use anec::convert::{ConvertOptions, Outcome, convert_opened};
use anec::family::published;
use anec::manifest::{Manifest, builtin};
use anec::validate::structure::structure;
use anec::validate::verdict::Verdict;

/// Environment variable with the model that a child process converts.
const CONVERT: &str = "ANEC_BENCH_CONVERT";

fn main() {
    if let Ok(name) = std::env::var(CONVERT) {
        return convert(&name);
    }
    let words: Vec<String> = std::env::args().skip(1).collect();
    let named: Vec<&str> = match words.iter().map(String::as_str).filter(|word| !word.starts_with("--")).collect() {
        _ if words.iter().any(|word| word == "--all") => {
            builtin::names().filter(|name| !name.starts_with("demo")).collect()
        }
        named if Vec::is_empty(&named) => vec!["zaya1-8b", "privacy-filter"],
        named => named,
    };
    println!("| model | weights | bundle | packages | largest | convert | peak memory |");
    println!("|---|---|---|---|---|---|---|");
    let mut failed = Vec::new();
    for name in named {
        let this = std::env::current_exe().expect("this program has a path");
        let status = Command::new(this).env(CONVERT, name).status().expect("this program starts again");
        if !status.success() {
            failed.push(name);
        }
    }
    assert!(failed.is_empty(), "not converted: {failed:?}");
}

fn convert(name: &str) {
    let found = builtin::find(name).unwrap_or_else(|error| panic!("{error}"));
    let manifest = Manifest::from_yaml(found.text, name, &[]).expect("the manifest is right");
    let source = synthetic::source(name, published::configuration(found).unwrap());
    let weights: u64 = source.tensors().map(|tensor| tensor.shape().iter().product::<u64>()).sum();
    let (model, ledger) = open_model(&source, &manifest).expect("the configuration is understood");
    let folder = std::env::var_os("ANEC_BENCH_FOLDER").map_or_else(std::env::temp_dir, PathBuf::from);
    let room = tempfile::tempdir_in(folder).expect("the folder can be written to");
    let mut options = ConvertOptions::new(manifest);
    options.out = Some(room.path().join(name));

    let begin = Instant::now();
    let outcome = convert_opened(&options, &Opened { source, model, ledger }).unwrap_or_else(|e| panic!("{name}: {e}"));
    let seconds = begin.elapsed().as_secs_f64();
    let Outcome::Written(written) = outcome else { panic!("{name} was there already") };
    let gate = structure(&written.bundle, &written.path);
    assert_eq!(gate.verdict, Verdict::Passed, "{name}: {:?}", gate.checks);

    let sizes: Vec<u64> = written.bundle.packages.iter().map(|package| package.weight_bytes).collect();
    println!(
        "| {name} | {:.2} billion | {:.2} GB | {} | {:.0} MB | {seconds:.0} s | {} |",
        weights as f64 / 1e9,
        sizes.iter().sum::<u64>() as f64 / 1e9,
        sizes.len(),
        sizes.iter().max().copied().unwrap_or(0) as f64 / 1e6,
        usage().map_or("unknown".to_owned(), |usage| format!("{:.0} MB", usage.peak_memory_bytes as f64 / 1e6)),
    );
}
