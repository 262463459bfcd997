//! A migrated package against its asset: the same random inputs through the CPU executor on the MIL and through Apple's
//! runtime on the asset.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

use super::sizes::sizes;
use super::verdict::Check;
use anec_base::{Fault, FileError, Result, SplitMix64};
use anec_coreai::AssetOptions;
use anec_coreai::bridge::{Bridge, BridgeArray, BridgeCall, BridgeOptions};
use anec_coreai::lower::LoweringChoices;
use anec_coreai::migrate::{MigrateOptions, MigratedFunction, migrate};
use anec_exec::{Executable, Precision, State, Tensor, TensorData, WeightCache};
use anec_mil::{DataType, Function, SymbolRange, Value};
use anec_package::Package;
use anec_runtime::coreai::{bridge_array, bridge_tensor};

/// Calls of each function, one after the other over the same states.
const CALLS: u64 = 2;
/// Smallest cosine between the outputs of a call.
const LEAST_COSINE: f64 = 0.999;
/// Outputs this small everywhere have no direction to compare.
const SMALL: f64 = 1e-6;
/// Claim of a check.
const CLAIM: &str = "Apple's Core AI runtime computes what the executor computes in f32";
/// Name of the asset that a package is checked as.
const ASSET: &str = "package.aimodel";
/// Number of the text whose states the runtime keeps.
const SEQUENCE: u64 = 0;

/// How a function of the asset agrees with the package.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Agreement {
    /// Name of the function in the asset.
    pub function: String,
    /// Whether all outputs and states agree.
    pub agrees: bool,
    /// Smallest cosine of an output or state.
    pub cosine: f64,
    /// Largest difference, relative to the largest value of its output.
    pub difference: f64,
}

/// Checks of a package's functions on Apple's Core AI runtime, which computes an asset made of them.
///
/// # Errors
/// When a function can't be computed on one of the two sides. Without a runtime, and for programs that Core AI can't
/// express, the check is unproven.
pub fn checks(name: &str, package: &Package, options: &BridgeOptions) -> Result<Vec<Check>> {
    let subject = |function: &str| format!("{name}, {function}, Core AI");
    let unproven = |reason: String| Ok(vec![Check::unproven(format!("{name}, Core AI"), CLAIM, reason)]);
    let mut how = MigrateOptions::default();
    for function in &package.program.functions {
        // fixed sizes, which every program can have
        let default = |range: &SymbolRange| vec![range.default_size()];
        how.sizes.extend(function.lengths.iter().map(|(symbol, range)| (symbol.name().to_owned(), default(range))));
    }
    // Apple's CPU runtime adds up half-precision products in half precision
    how.choices = LoweringChoices::wide_products(!options.system);
    let migrated = match migrate(package, &how) {
        Ok(migrated) => migrated,
        Err(error) => return unproven(error.to_string()),
    };
    let room = tempfile::tempdir().map_err(FileError::of(Path::new(name), "create a temporary folder for"))?;
    let asset = room.path().join(ASSET);
    anec_coreai::write(&migrated.module, &asset, &AssetOptions::default())?;
    match compare(&migrated.functions, &asset, options) {
        Ok(agreement) => {
            let check = |of: Agreement| {
                let problem = format!("cosine {:.6}, expected at least {LEAST_COSINE}", of.cosine);
                let mut check = Check::of(subject(&of.function), CLAIM, (!of.agrees).then_some(problem));
                check.measured.insert("cosine".into(), of.cosine);
                check
            };
            Ok(agreement.into_iter().map(check).collect())
        }
        Err(error) if error.fault() == Fault::Platform => unproven(error.to_string()),
        Err(error) => Err(error),
    }
}

/// Compares every function of an asset with the MIL that it was made from; ranges at their ends and their default.
///
/// # Errors
/// When a function can't be computed on one of the two sides, or the runtime isn't there.
pub fn compare(functions: &[MigratedFunction], asset: &Path, options: &BridgeOptions) -> Result<Vec<Agreement>> {
    let mut bridge = Bridge::open(asset, options)?;
    let cache = WeightCache::new();
    let mut out = Vec::new();
    for MigratedFunction { name, function } in functions {
        let mut agreement = Agreement { function: name.clone(), agrees: true, cosine: 1.0, difference: 0.0 };
        for fixed in sizes(function) {
            agreement.add_function(&fixed, &mut bridge, &cache)?;
        }
        out.push(agreement);
    }
    Ok(out)
}

/// Numbers that differ from place to place; integers are small, so that they may be indices.
fn random(value: &Value, seed: u64) -> Tensor {
    let ty = value.ty.tensor();
    let shape: Vec<usize> =
        ty.and_then(|ty| ty.fixed_shape()).unwrap_or_default().into_iter().map(|size| size as usize).collect();
    let count = shape.iter().product::<usize>();
    let mut numbers = SplitMix64::new(seed);
    let dtype = ty.map_or(DataType::Fp32, |ty| ty.dtype);
    if dtype == DataType::Bool {
        return Tensor::new(shape, (0..count).map(|_| numbers.bits() & 1 == 1).collect::<Vec<bool>>());
    }
    if dtype.is_integer() {
        return Tensor::new(shape, (0..count).map(|_| (numbers.bits() % 2) as i32).collect::<Vec<i32>>());
    }
    // in half precision both sides get the same numbers
    let rounded = |number: f32| half::f16::from_f32(number).to_f32();
    Tensor::new(shape, (0..count).map(|_| rounded(numbers.uniform() as f32 * 2.0 - 1.0)).collect::<Vec<f32>>())
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    match &tensor.data {
        TensorData::F32(values) => values.iter().map(|value| f64::from(*value)).collect(),
        TensorData::I32(values) => values.iter().map(|value| f64::from(*value)).collect(),
        TensorData::Bool(values) => values.iter().map(|value| f64::from(u8::from(*value))).collect(),
    }
}

impl Agreement {
    /// Adds the calls of a function with fixed shapes.
    fn add_function(&mut self, function: &Function, bridge: &mut Bridge, cache: &WeightCache) -> Result<()> {
        let executable = Executable::compile(function, Precision::F32, cache)?;
        let mut state = executable.new_state();
        bridge.forget(SEQUENCE)?;
        for call in 0..CALLS {
            let inputs: Vec<(String, Tensor)> = function
                .tensor_inputs()
                .enumerate()
                .map(|(index, value)| (value.name.clone(), random(value, 31 * call + index as u64)))
                .collect();
            let given: Vec<(&str, &Tensor)> = inputs.iter().map(|(name, tensor)| (&name[..], tensor)).collect();
            let expected = executable.run(&given, &mut state)?;
            let request = BridgeCall {
                function: &self.function,
                sequence: SEQUENCE,
                inputs: inputs.iter().map(|(name, tensor)| bridge_array(name, tensor)).collect(),
                states: function.states().map(|state| (state.name.clone(), state.name.clone())).collect(),
                outputs: expected.iter().map(|(name, _)| name.clone()).collect(),
            };
            let found = bridge.call(&request)?;
            for ((_, expected), found) in expected.iter().zip(&found) {
                self.add(expected, found);
            }
            self.add_states(function.states(), &mut state, bridge)?;
        }
        Ok(())
    }

    fn add(&mut self, expected: &Tensor, found: &BridgeArray) {
        let same_shape = expected.shape[..] == found.shape[..];
        let found = numbers(&bridge_tensor(found.clone()));
        let expected = numbers(expected);
        if !same_shape || expected.len() != found.len() {
            *self = Agreement { agrees: false, cosine: -1.0, difference: f64::INFINITY, ..self.clone() };
            return;
        }
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let largest = expected.iter().fold(0f64, |most, value| most.max(value.abs()));
        let apart = expected.iter().zip(&found).fold(0f64, |most, (a, b)| most.max((a - b).abs()));
        let (length, other) = (dot(&expected, &expected).sqrt(), dot(&found, &found).sqrt());
        let cosine = if largest <= SMALL && apart <= SMALL { 1.0 } else { dot(&expected, &found) / (length * other) };
        self.cosine = self.cosine.min(cosine);
        self.difference = self.difference.max(apart / largest.max(SMALL));
        self.agrees &= cosine >= LEAST_COSINE;
    }

    fn add_states<'a>(
        &mut self,
        states: impl Iterator<Item = &'a Value>,
        state: &mut State,
        bridge: &mut Bridge,
    ) -> Result<()> {
        let names: Vec<&str> = states.map(|value| &value.name[..]).collect();
        let found: BTreeMap<String, BridgeArray> =
            bridge.states(SEQUENCE, &names)?.into_iter().map(|array| (array.name.clone(), array)).collect();
        for name in names {
            if let (Some(expected), Some(found)) = (state.get(name), found.get(name)) {
                self.add(&expected, found);
            }
        }
        Ok(())
    }
}
