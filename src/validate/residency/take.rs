//! Takes the compute plan of a model with Core ML.

use std::path::Path;
use std::sync::Arc;

use anec_base::{FileError, Progress};

use super::subject::{PartContent, ResidencySubject, Signature, SubjectCall};
use super::{UNITS, latency};
use crate::sizes;
use anec_base::Result;
use anec_base::clock::{now, strftime};
use anec_bundle::Bundle;
use anec_coreml::cache::Cache;
use anec_coreml::plan::{ComputePlan, ComputeUnits, FunctionPlan, PackageDigest, SCHEMA_VERSION, Timing};
use anec_coreml::{CoreMlError, Engine, project};
use anec_package::{Package, WriteOptions};
use anec_runtime::Backend;
use anec_runtime::coreml::CoreMlBackend;

/// Takes the plan of every call of a model. Calls of packages are compiled and planned separately, in a temporary copy,
/// which takes Core ML seconds to minutes. Compiled models are planned as they are: Core ML plans their default
/// function.
///
/// # Errors
/// If a package can't be read. Functions that Core ML refuses are noted in the plan.
pub fn take(engine: &impl Engine, subject: &ResidencySubject, progress: &Progress) -> Result<ComputePlan> {
    let mut plan = ComputePlan {
        schema_version: SCHEMA_VERSION,
        anec_version: env!("CARGO_PKG_VERSION").into(),
        bundle: subject.name.clone(),
        date: strftime("%FT%TZ", now()),
        machine: engine.machine()?,
        compute_units: UNITS,
        packages: Vec::new(),
        functions: Vec::new(),
    };
    let room = tempfile::tempdir().map_err(FileError::of(&std::env::temp_dir(), "create a folder in"))?;
    for (index, part) in subject.parts.iter().enumerate() {
        plan.packages.push(PackageDigest { package: part.name.clone(), sha256: part.digest()? });
        for call in subject.calls.iter().filter(|call| call.part == index) {
            progress.stage(&format!("planning {}, {}{}", part.name, call.function, size_of(call)));
            let mut planned = FunctionPlan {
                package: part.name.clone(),
                function: call.function.clone(),
                tokens: call.tokens,
                operations: Vec::new(),
                refused: None,
                timings: Vec::new(),
            };
            let result = match &part.content {
                PartContent::Package(package) => {
                    // unless it is in its package, there is nothing to plan
                    if package.program.function(&call.function).is_none() {
                        continue;
                    }
                    with_compiled(engine, package, call, room.path(), |compiled| engine.plan(compiled, UNITS))?
                }
                PartContent::Compiled(model) if call.function == "main" => engine.plan(&model.path, UNITS),
                // Core ML plans the default function only
                PartContent::Compiled(_) => continue,
            };
            // only refusals by Core ML are findings about the model
            match result {
                Ok(operations) => planned.operations = operations,
                Err(error @ CoreMlError::Refused { .. }) => planned.refused = Some(error.to_string()),
                Err(other) => return Err(other.into()),
            }
            plan.functions.push(planned);
        }
    }
    Ok(plan)
}

/// `, T = 4`, or nothing for fixed shapes.
fn size_of(call: &SubjectCall) -> String {
    call.tokens.map_or_else(String::new, |tokens| format!(", T = {tokens}"))
}

/// Compiles a package whose default is the call, and removes it after `then`.
pub(crate) fn with_compiled<T>(
    engine: &impl Engine,
    package: &Package,
    call: &SubjectCall,
    room: &Path,
    then: impl FnOnce(&Path) -> Result<T, CoreMlError>,
) -> Result<Result<T, CoreMlError>> {
    let name = package.path.file_name().unwrap_or(package.path.as_os_str());
    let copy = room.join(name).with_extension("mlpackage");
    let compiled = copy.with_extension("mlmodelc");
    let projected = project(&package.program, &call.function, call.tokens.unwrap_or(1))?;
    anec_package::write(&projected, &copy, &WriteOptions::default())?;
    let result = engine.compile(&copy, &compiled).and_then(|()| then(&compiled));
    for folder in [copy, compiled].iter().filter(|folder| folder.exists()) {
        std::fs::remove_dir_all(folder).map_err(FileError::of(folder, "remove"))?;
    }
    Ok(result)
}

/// Adds latencies of calls to the plan of a package or compiled model, with the Neural Engine and on the CPU alone.
/// Inputs are zeros, which some programs refuse: calls that fail have no latency.
///
/// # Errors
/// If a package can't be copied.
pub fn time_directly(
    engine: &impl Engine,
    subject: &ResidencySubject,
    plan: &mut ComputePlan,
    progress: &Progress,
) -> Result<()> {
    let room = tempfile::tempdir().map_err(FileError::of(&std::env::temp_dir(), "create a folder in"))?;
    for call in &subject.calls {
        let part = subject.part(call);
        let is_of_call = |planned: &&mut FunctionPlan| {
            (&planned.package, &planned.function, planned.tokens) == (&part.name, &call.function, call.tokens)
                && planned.refused.is_none()
        };
        let Some(planned) = plan.functions.iter_mut().find(is_of_call) else { continue };
        progress.stage(&format!("timing {}, {}{}", part.name, call.function, size_of(call)));
        let time = |compiled: &Path, signature: &Signature| -> Vec<Timing> {
            let of = |units| {
                let milliseconds = latency::measure_directly(engine, compiled, units, signature).ok()?;
                Some(Timing { compute_units: units, milliseconds })
            };
            [UNITS, ComputeUnits::CpuOnly].into_iter().filter_map(of).collect()
        };
        planned.timings = match &part.content {
            PartContent::Package(package) => {
                let fixed = package.program.function(&call.function).map(|f| sizes::fixed_at(f, call.tokens));
                let Some(signature) = fixed.as_ref().and_then(Signature::of) else { continue };
                let timed = with_compiled(engine, package, call, room.path(), |path| Ok(time(path, &signature)))?;
                timed.unwrap_or_default()
            }
            PartContent::Compiled(model) => {
                let Some(signature) = &model.signature else { continue };
                time(&model.path, signature)
            }
        };
    }
    Ok(())
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
            let size = planned.tokens.map_or_else(String::new, |tokens| format!(", T = {tokens}"));
            progress.stage(&format!("timing {}, {}{size}, {units}", planned.package, planned.function));
            // separate states, because calls change them
            let mut sequence = backend.sequence()?;
            let Some(tokens) = planned.tokens else { continue };
            match latency::measure(&mut *sequence, index, &bundle.functions[index], tokens) {
                Ok(milliseconds) => planned.timings.push(Timing { compute_units: units, milliseconds }),
                Err(error) if units == UNITS => planned.refused = Some(format!("when it was run: {error}")),
                // without a CPU time there is nothing to compare
                Err(_) => {}
            }
        }
    }
    Ok(())
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
            let subject = ResidencySubject::of_bundle(&bundle, &folder).unwrap();
            let plan = take(&engine, &subject, &Progress::hidden()).unwrap();
            let planned: Vec<String> = engine.take_log().into_iter().filter(|line| line.starts_with("plan")).collect();
            assert!(planned.join(" ").starts_with(expected), "{planned:?}");
            let found: Vec<(&str, &str, Option<u64>)> =
                plan.functions.iter().map(|f| (f.package.as_str(), f.function.as_str(), f.tokens)).collect();
            let due: Vec<(&str, &str, Option<u64>)> = bundle
                .functions
                .iter()
                .flat_map(|f| {
                    (f.tokens.least()..=f.tokens.most()).map(|t| (f.package.as_str(), f.function.as_str(), Some(t)))
                })
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
        let subject = ResidencySubject::of_bundle(&bundle, room.path()).unwrap();
        let plan = take(&engine, &subject, &progress).unwrap();
        assert_eq!(refused(&plan), [false, true, false, false]);
        // refused when it is run
        let engine = Arc::new(engine);
        let mut plan = take(&DoubleEngine::new(), &subject, &progress).unwrap();
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
        let subject = ResidencySubject::of_bundle(&bundle, room.path()).unwrap();
        let mut plan = take(&*engine, &subject, &progress).unwrap();
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
        let subject = ResidencySubject::of_bundle(&bundle, room.path()).unwrap();
        let found = subject.parts[0].digest().unwrap();
        let sha256 = |bytes: &[u8]| anec_base::hexadecimal(&Sha256::digest(bytes));
        let line = |file: &FileDigest| {
            let bytes = std::fs::read(room.path().join(&file.file)).unwrap();
            format!("{}  {}\n", sha256(&bytes), file.file.split_once('/').unwrap().1)
        };
        let listed: String = bundle.packages[0].files.iter().map(line).collect();
        assert_eq!(found, sha256(listed.as_bytes()));
        std::fs::write(room.path().join("layers_0_3.mlpackage/Manifest.json"), "{}").unwrap();
        assert_ne!(subject.parts[0].digest().unwrap(), found);
    }
}
