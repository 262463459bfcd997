//! Gates of assets of Core AI that anec didn't make.

use std::collections::BTreeSet;
use std::path::Path;

use indexmap::IndexMap;

use super::measure::LogitMeasures;
use super::numerics::check;
use super::third_party::noise;
use super::thresholds::NumericsThresholds;
use super::verdict::{Check, GateReport, listed};
use super::watch::ValueRange;
use anec_base::{FileError, Result};
use anec_coreai::aicode::{AiType, ElementType};
use anec_coreai::bridge::{Bridge, BridgeArray, BridgeCall, BridgeElements, BridgeOptions, DescribedFunction};
use anec_coreai::inventory::AssetInventory;
use anec_coreai::{Asset, AssetOptions, in_single_precision};

/// Reason why a gate that computes an asset is unproven.
pub const NEEDS_RUNTIME: &str = "Apple's Core AI runtime computes an asset (backend coreai)";
/// Claim of the numerics gate.
const CLAIM: &str = "fp16 computes what f32 computes";
/// Calls of each function, so that states matter.
const CALLS: usize = 2;
/// Inputs with more elements aren't made up.
const MOST_ELEMENTS: usize = 1 << 26;
/// Name of the asset in f32.
const SINGLE: &str = "single.aimodel";

/// Structure gate of an asset called `name`.
pub fn structure(name: &str, inventory: &AssetInventory) -> GateReport {
    let empty = inventory.functions.is_empty().then(|| "it has no function".to_owned());
    GateReport::new(
        super::structure::GATE,
        vec![
            Check::of(name, "it can be read, and it has functions", empty),
            Check::of(name, "its parts are what they should be", listed(&inventory.findings)),
        ],
    )
}

/// Numerics gate of an asset without Apple's runtime.
pub fn without_runtime(name: &str) -> GateReport {
    GateReport::new(super::numerics::GATE, vec![Check::unproven(name, CLAIM, NEEDS_RUNTIME)])
}

/// Numerics gate of an asset: Apple's runtime computes each function on generated inputs, as it is and in f32.
///
/// # Errors
/// If the runtime isn't there or refuses the asset, or the asset in f32 can't be written.
pub fn numerics(
    name: &str,
    asset: &Asset,
    thresholds: &NumericsThresholds,
    options: &BridgeOptions,
) -> Result<GateReport> {
    let half = AiType::Scalar(ElementType::F16);
    let single = match asset.module.types.contains(&half) {
        true => in_single_precision(&asset.module).map_err(|error| error.to_string()),
        false => Err("nothing in it is computed in fp16".to_owned()),
    };
    let single = match single {
        Ok(single) => single,
        Err(reason) => {
            return Ok(GateReport::new(super::numerics::GATE, vec![Check::unproven(name, CLAIM, reason)]));
        }
    };
    let room = tempfile::tempdir().map_err(FileError::of(Path::new(name), "create a temporary folder for"))?;
    let path = room.path().join(SINGLE);
    anec_coreai::write(&single, &path, &AssetOptions::default())?;
    let (half, single) = rayon::join(|| Bridge::open(&asset.path, options), || Bridge::open(&path, options));
    let (mut half, mut single) = (half?, single?);
    let mut checks = Vec::new();
    for function in half.functions().to_vec() {
        let subject = format!("{name}, {}, made-up inputs", function.name);
        let Some(inputs) = made_up(&function) else {
            checks.push(Check::unproven(subject, CLAIM, "an input has no fixed shape, or too many elements"));
            continue;
        };
        let (half, single) = (computed(&mut half, &function, &inputs)?, computed(&mut single, &function, &inputs)?);
        let width = single.values.len().max(1);
        let measures = LogitMeasures::of(&half.values, &single.values, width);
        checks.push(check(subject, &half.seen, &single.seen, &BTreeSet::new(), &measures, thresholds));
    }
    Ok(GateReport::new(super::numerics::GATE, checks))
}

/// Generated inputs: floats from -1 to 1, and zero for integers, which usually are positions or indices.
fn made_up(function: &DescribedFunction) -> Option<Vec<BridgeArray>> {
    let inputs = (0..).zip(&function.inputs).map(|(seed, input)| {
        let shape: Vec<usize> = input.shape.iter().map(|size| usize::try_from(*size).ok()).collect::<Option<_>>()?;
        let count = shape.iter().try_fold(1usize, |count, size| count.checked_mul(*size));
        let count = count.filter(|count| *count <= MOST_ELEMENTS)?;
        let elements = match input.dtype.contains("float") {
            true => BridgeElements::Floats(noise(seed, count)),
            false => BridgeElements::Integers(vec![0; count]),
        };
        Some(BridgeArray { name: input.name.clone(), shape, elements })
    });
    inputs.collect()
}

/// Results of a function's calls.
#[derive(Default)]
struct Computed {
    seen: IndexMap<String, ValueRange>,
    /// Floats of all outputs and states, concatenated.
    values: Vec<f32>,
}

fn computed(bridge: &mut Bridge, function: &DescribedFunction, inputs: &[BridgeArray]) -> Result<Computed> {
    let names = |values: &[anec_coreai::bridge::DescribedValue]| -> Vec<String> {
        values.iter().map(|value| value.name.clone()).collect()
    };
    let states = names(&function.states);
    let call = BridgeCall {
        function: &function.name,
        sequence: 0,
        inputs: inputs.to_vec(),
        states: states.iter().map(|name| (name.clone(), name.clone())).collect(),
        outputs: names(&function.outputs),
    };
    let keys: Vec<&str> = states.iter().map(String::as_str).collect();
    let mut out = Computed::default();
    bridge.forget(call.sequence)?;
    for _ in 0..CALLS {
        let mut found = bridge.call(&call)?;
        found.extend(bridge.states(call.sequence, &keys)?);
        for BridgeArray { name, elements, .. } in found {
            if let BridgeElements::Floats(values) = elements {
                out.seen.entry(name).or_default().add(&values);
                out.values.extend(values);
            }
        }
    }
    Ok(out)
}
