//! Takes the compute plan of a bundle with Core ML.

use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;

use anec_base::{ContentDigest, FileError};

use super::{UNITS, latency};
use anec_base::Result;
use anec_base::clock::{now, strftime};
use anec_base::progress::Progress;
use anec_bundle::{Bundle, TokenCount};
use anec_coreml::cache::Cache;
use anec_coreml::plan::{FunctionPlan, PackageDigest, SCHEMA_VERSION, Timing, listing_digest};
use anec_coreml::{ComputePlan, ComputeUnits, CoreMlError, Engine, project};
use anec_package::{Package, WriteOptions};
use anec_runtime::{Backend, CoreMlBackend};

/// Takes the plan of every function of a bundle at every number of tokens. Each is compiled and planned separately, in
/// a temporary copy of its package, which takes Core ML seconds to minutes.
///
/// # Errors
/// If a package can't be read. Functions that Core ML refuses are noted in the plan.
pub fn take(engine: &impl Engine, bundle: &Bundle, folder: &Path, progress: &Progress) -> Result<ComputePlan> {
    let mut plan = ComputePlan {
        schema_version: SCHEMA_VERSION,
        anec_version: env!("CARGO_PKG_VERSION").into(),
        bundle: bundle.name.clone(),
        date: strftime("%FT%TZ", now()),
        machine: engine.machine()?,
        compute_units: UNITS,
        packages: Vec::new(),
        functions: Vec::new(),
    };
    let room = tempfile::tempdir().map_err(FileError::of(&std::env::temp_dir(), "create a folder in"))?;
    for entry in &bundle.packages {
        let package = anec_package::open(&folder.join(&entry.package))?;
        plan.packages.push(PackageDigest { package: entry.package.clone(), sha256: digest(&package)? });
        for function in bundle.all_functions().filter(|function| function.package == entry.package) {
            for tokens in lengths(function.tokens) {
                progress.stage(&format!("planning {}, {}, T = {tokens}", entry.package, function.function));
                let copy = room.path().join(&entry.package);
                let compiled = copy.with_extension("mlmodelc");
                let projected = project(&package.program, &function.function, tokens)?;
                anec_package::write(&projected, &copy, &WriteOptions::default())?;
                let planned = engine.compile(&copy, &compiled).and_then(|()| engine.plan(&compiled, UNITS));
                // only refusals by Core ML are findings about the bundle
                let (operations, refused) = match planned {
                    Ok(operations) => (operations, None),
                    Err(error @ CoreMlError::Refused { .. }) => (Vec::new(), Some(error.to_string())),
                    Err(other) => return Err(other.into()),
                };
                for folder in [copy, compiled].iter().filter(|folder| folder.exists()) {
                    std::fs::remove_dir_all(folder).map_err(FileError::of(folder, "remove"))?;
                }
                plan.functions.push(FunctionPlan {
                    package: entry.package.clone(),
                    function: function.function.clone(),
                    tokens,
                    operations,
                    refused,
                    timings: Vec::new(),
                });
            }
        }
    }
    Ok(plan)
}

/// Adds latencies of calls to a plan, with the Neural Engine and on the CPU alone. A function that can't run with the
/// Neural Engine is marked as refused.
///
/// # Errors
/// If states can't be created.
pub fn time<E: Engine>(
    engine: &Arc<E>,
    bundle: &Bundle,
    folder: &Path,
    cache: &Cache,
    plan: &mut ComputePlan,
    progress: &Progress,
) -> Result<()> {
    for units in [UNITS, ComputeUnits::CpuOnly] {
        let backend = CoreMlBackend::new(engine.clone(), bundle, folder, units, cache.clone());
        for planned in plan.functions.iter_mut().filter(|planned| planned.refused.is_none()) {
            let same =
                |f: &anec_bundle::FunctionEntry| (&f.package, &f.function) == (&planned.package, &planned.function);
            let Some(index) = bundle.functions.iter().position(same) else { continue };
            progress
                .stage(&format!("timing {}, {}, T = {}, {units}", planned.package, planned.function, planned.tokens));
            // separate states, because calls change them
            let mut sequence = backend.sequence()?;
            match latency::measure(&mut *sequence, index, &bundle.functions[index], planned.tokens) {
                Ok(milliseconds) => planned.timings.push(Timing { compute_units: units, milliseconds }),
                Err(error) if units == UNITS => planned.refused = Some(format!("when it was run: {error}")),
                // without a CPU time there is nothing to compare
                Err(_) => {}
            }
        }
    }
    Ok(())
}

/// All numbers of tokens that a function supports.
pub(super) fn lengths(tokens: TokenCount) -> RangeInclusive<u64> {
    tokens.least()..=tokens.most()
}

/// Digest of a package on disk.
pub(super) fn digest(package: &Package) -> Result<String, CoreMlError> {
    let mut files = Vec::new();
    for file in &package.files {
        let path = package.path.join(&file.path);
        let sha256 = ContentDigest::sha256_of_file(&path).map_err(FileError::of(&path, "read"))?;
        files.push((file.path.as_str(), sha256));
    }
    Ok(listing_digest(files.iter().map(|(path, sha256)| (*path, sha256.hex()))))
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;
    use anec_bundle::FileDigest;
    use anec_testing::fake::DoubleEngine;
    use anec_testing::fake::convert_demo;

    #[test]
    fn every_function_is_planned_at_every_length() {
        let room = tempfile::tempdir().unwrap();
        for (name, changes, expected) in [
            ("range", &["lengths={range: [1, 3]}"][..], "plan for [1] plan for [2] plan for [3]"),
            (
                "fixed",
                &["lengths={fixed: [1, 4]}", "context=[256, 512]"],
                "plan for [] plan for [] plan for [] plan for []",
            ),
        ] {
            let folder = room.path().join(name);
            convert_demo(&folder, changes);
            let bundle = Bundle::read(&folder).unwrap();
            let engine = DoubleEngine::new();
            let plan = take(&engine, &bundle, &folder, &Progress::hidden()).unwrap();
            let planned: Vec<String> = engine.take_log().into_iter().filter(|line| line.starts_with("plan")).collect();
            assert!(planned.join(" ").starts_with(expected), "{planned:?}");
            let found: Vec<(&str, &str, u64)> =
                plan.functions.iter().map(|f| (f.package.as_str(), f.function.as_str(), f.tokens)).collect();
            let due: Vec<(&str, &str, u64)> = bundle
                .functions
                .iter()
                .flat_map(|f| lengths(f.tokens).map(|t| (f.package.as_str(), f.function.as_str(), t)))
                .collect();
            assert_eq!(found, due);
            for function in &plan.functions {
                let of = |name: &str| function.operations.iter().filter(|op| op.bare_operator() == name).count();
                // 7 projections in each of 3 layers
                let convs = if function.package.starts_with("layers") { 21 } else { 1 };
                assert_eq!(of("conv"), convs, "{}", function.package);
            }
            let value = serde_json::to_value(&plan).unwrap();
            jsonschema::validate(&anec_coreml::plan::schema(), &value).unwrap();
            assert_eq!(serde_json::from_value::<ComputePlan>(value).unwrap(), plan);
        }
    }

    #[test]
    fn a_function_that_core_ml_refuses_is_noted() {
        let room = tempfile::tempdir().unwrap();
        convert_demo(room.path(), &["lengths={fixed: [1]}"]);
        let bundle = Bundle::read(room.path()).unwrap();
        let progress = Progress::hidden();
        let refused =
            |plan: &ComputePlan| -> Vec<bool> { plan.functions.iter().map(|f| f.refused.is_some()).collect() };
        // refused by the compiler
        let mut engine = DoubleEngine::new();
        engine.refuses = Some("layers_3_6.mlpackage");
        let plan = take(&engine, &bundle, room.path(), &progress).unwrap();
        assert_eq!(refused(&plan), [false, true, false, false]);
        // refused when it is run
        let engine = Arc::new(engine);
        let mut plan = take(&DoubleEngine::new(), &bundle, room.path(), &progress).unwrap();
        let cache = Cache::new(room.path().join("cache"));
        time(&engine, &bundle, room.path(), &cache, &mut plan, &progress).unwrap();
        assert_eq!(refused(&plan), [false, true, false, false]);
        let text = plan.functions[1].refused.as_deref().unwrap();
        assert!(text.starts_with("when it was run: Core ML can't double"), "{text}");
        assert!(plan.functions[1].timings.is_empty() && plan.functions[2].timings.len() == 2);
    }

    #[test]
    fn calls_are_timed_on_both() {
        let room = tempfile::tempdir().unwrap();
        convert_demo(room.path(), &["lengths={fixed: [1]}"]);
        let bundle = Bundle::read(room.path()).unwrap();
        let engine = Arc::new(DoubleEngine::new());
        let progress = Progress::hidden();
        let mut plan = take(&*engine, &bundle, room.path(), &progress).unwrap();
        engine.take_log();
        let cache = Cache::new(room.path().join("cache"));
        time(&engine, &bundle, room.path(), &cache, &mut plan, &progress).unwrap();
        let loads: Vec<String> = engine.take_log().into_iter().filter(|line| line.starts_with("load")).collect();
        assert_eq!(loads.len(), 2 * bundle.functions.len());
        for function in &plan.functions {
            let timed: Vec<ComputeUnits> = function.timings.iter().map(|timing| timing.compute_units).collect();
            assert_eq!(timed, [UNITS, ComputeUnits::CpuOnly]);
            for timing in &function.timings {
                assert!(timing.milliseconds.len() >= 10 && timing.milliseconds.iter().all(|ms| *ms > 0.0));
            }
        }
    }

    #[test]
    fn the_digest_is_what_sha256sum_prints() {
        let room = tempfile::tempdir().unwrap();
        convert_demo(room.path(), &[]);
        let bundle = Bundle::read(room.path()).unwrap();
        let package = anec_package::open(&room.path().join("layers_0_3.mlpackage")).unwrap();
        let found = digest(&package).unwrap();
        let sha256 = |bytes: &[u8]| anec_base::hexadecimal(&Sha256::digest(bytes));
        let line = |file: &FileDigest| {
            let bytes = std::fs::read(room.path().join(&file.file)).unwrap();
            format!("{}  {}\n", sha256(&bytes), file.file.split_once('/').unwrap().1)
        };
        let listed: String = bundle.packages[0].files.iter().map(line).collect();
        assert_eq!(found, sha256(listed.as_bytes()));
        std::fs::write(package.path.join("Manifest.json"), "{}").unwrap();
        assert_ne!(digest(&package).unwrap(), found);
    }
}
