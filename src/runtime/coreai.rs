//! The backend over Apple's Core AI runtime: an asset in a child process. A bundle of Core ML packages is lowered for
//! it, which shows what Apple's operators make of the same graphs.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::backend::{
    Backend, BatchMember, BatchResult, FunctionCall, Phase, Sequence, Watch, run_anew, run_each, run_in_turn,
};
use super::error::RuntimeError;
use super::host::HostTables;
use super::model::LoadedModel;
use anec_base::Result;
use anec_bundle::{Bundle, FILE_NAME, FunctionEntry, MASKED, PackageEntry, PortRole};
use anec_coreai::aicode::AiModule;
use anec_coreai::assemble::assemble;
use anec_coreai::bridge::{Bridge, BridgeArray, BridgeCall, BridgeElements, BridgeOptions};
use anec_coreai::lower::LoweringChoices;
use anec_coreai::{AssetOptions, in_single_precision};
use anec_exec::{Tensor, TensorData};

/// Name of the backend.
pub const NAME: &str = "coreai";

/// Mask value under Core AI for positions that a token may not attend to.
const CORE_AI_MASKED: f32 = -4e4;
/// The asset that a bundle of packages is lowered to.
const LOWERED: &str = "lowered.aimodel";

/// The bundle in a folder, on Apple's Core AI runtime.
///
/// # Errors
/// When there is no bundle, it contradicts itself, its packages can't be lowered, or the runtime isn't there.
pub fn open(folder: &Path, options: &BridgeOptions) -> Result<Arc<LoadedModel>> {
    let (bundle, backend) = backend(folder, options, Arithmetic::Own)?;
    let host = Arc::new(HostTables::open(&bundle, folder)?);
    LoadedModel::new(bundle, folder, host, backend)
}

/// Precision in which an asset is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// As the asset says.
    Own,
    /// f32 in place of f16, everywhere.
    Single,
}

/// The bundle in a folder with its functions in an asset, and the backend over Apple's Core AI runtime for them.
///
/// # Errors
/// Returns any error of [`open`]; an asset with types that aren't understood can't be computed in f32.
pub fn backend(folder: &Path, options: &BridgeOptions, how: Arithmetic) -> Result<(Bundle, Box<dyn Backend>)> {
    if !folder.join(FILE_NAME).exists() {
        return Err(RuntimeError::NoBundle { path: folder.to_owned() }.into());
    }
    let bundle = Bundle::read(folder)?;
    let made = |name: &str, module: &AiModule| -> Result<AssetPlace> {
        let room = tempfile::tempdir().map_err(anec_base::FileError::of(folder, "create a temporary folder"))?;
        let single = (how == Arithmetic::Single).then(|| in_single_precision(module)).transpose()?;
        let asset = room.path().join(name);
        anec_coreai::write(single.as_ref().unwrap_or(module), &asset, &AssetOptions::default())?;
        Ok(AssetPlace { folder: room.path().to_owned(), room: Some(room) })
    };
    let (bundle, place) = match (bundle.manifest.format.is_coreml(), how) {
        (false, Arithmetic::Own) => (bundle, AssetPlace { folder: folder.to_owned(), room: None }),
        (false, Arithmetic::Single) => {
            let asset = asset_of(&bundle);
            let place = made(&asset, &anec_coreai::open(&folder.join(&asset))?.module)?;
            (bundle, place)
        }
        (true, _) => {
            // Apple's CPU runtime adds up half-precision products in half precision
            let choices = LoweringChoices::wide_products(!options.system);
            let assembly = assemble(&bundle, folder, LOWERED, choices)?;
            let place = made(LOWERED, &assembly.module)?;
            let asset = PackageEntry { package: LOWERED.into(), compiled: None, weight_bytes: 0, files: Vec::new() };
            (assembly.in_bundle(&bundle, asset), place)
        }
    };
    let shared = Shared {
        bundle: bundle.clone(),
        place: Arc::new(place),
        options: options.clone(),
        bridge: OnceLock::new(),
        sequences: Arc::default(),
    };
    let backend = CoreAiBackend { shared: Arc::new(shared) };
    // report a missing runtime or a refused asset before the first call
    drop(backend.shared.bridge()?);
    Ok((bundle, Box::new(backend)))
}

/// Name of a bundle's asset.
fn asset_of(bundle: &Bundle) -> String {
    bundle.functions.first().map(|entry| entry.package.clone()).unwrap_or_default()
}

/// Where assets are; a temporary folder is removed with this.
struct AssetPlace {
    folder: PathBuf,
    #[allow(dead_code, reason = "removes the folder when it is dropped")]
    room: Option<tempfile::TempDir>,
}

/// A bundle on Apple's Core AI runtime.
struct CoreAiBackend {
    shared: Arc<Shared>,
}

struct Shared {
    bundle: Bundle,
    place: Arc<AssetPlace>,
    options: BridgeOptions,
    bridge: OnceLock<Arc<Mutex<Bridge>>>,
    /// Number of the next text.
    sequences: Arc<AtomicU64>,
}

impl Shared {
    fn entry(&self, index: usize) -> Result<&FunctionEntry, RuntimeError> {
        let missing =
            || RuntimeError::bundle(self.place.folder.join(FILE_NAME), format!("there is no function {index}"));
        self.bundle.functions.get(index).ok_or_else(missing)
    }

    /// The runtime, which loads the asset when it is first needed.
    fn bridge(&self) -> Result<MutexGuard<'_, Bridge>> {
        if self.bridge.get().is_none() {
            let bridge = Bridge::open(&self.place.folder.join(asset_of(&self.bundle)), &self.options)?;
            let _ = self.bridge.set(Arc::new(Mutex::new(bridge)));
        }
        match self.bridge.get() {
            Some(bridge) => Ok(bridge.lock().unwrap_or_else(PoisonError::into_inner)),
            None => Err(RuntimeError::Backend { backend: NAME, problem: "the runtime is gone".into() }.into()),
        }
    }

    fn new_sequence(self: &Arc<Self>) -> CoreAiSequence {
        let number = self.sequences.fetch_add(1, Ordering::Relaxed);
        CoreAiSequence { shared: self.clone(), number }
    }
}

impl Backend for CoreAiBackend {
    fn prepare(&self, function: usize) -> Result<()> {
        self.shared.entry(function)?;
        self.shared.bridge().map(drop)
    }

    fn has_room(&self, _function: usize) -> bool {
        true
    }

    fn run_batch(&self, function: usize, members: Vec<BatchMember<'_>>) -> Vec<BatchResult> {
        run_each(function, members)
    }

    fn of_bundle(&self, bundle: &Bundle) -> Result<Option<Box<dyn Backend>>> {
        let Shared { place, options, bridge, sequences, .. } = &*self.shared;
        let shared = Shared {
            bundle: bundle.clone(),
            place: place.clone(),
            options: options.clone(),
            bridge: bridge.clone(),
            // texts of both are numbered together: they share one runtime
            sequences: sequences.clone(),
        };
        Ok(Some(Box::new(CoreAiBackend { shared: Arc::new(shared) })))
    }

    fn sequence(&self) -> Result<Box<dyn Sequence>> {
        Ok(Box::new(self.shared.new_sequence()))
    }
}

/// A text, whose states the runtime keeps under a number.
struct CoreAiSequence {
    shared: Arc<Shared>,
    number: u64,
}

/// An array for the bridge, of a tensor.
pub fn bridge_array(name: &str, tensor: &Tensor) -> BridgeArray {
    let elements = match &tensor.data {
        TensorData::F32(values) => BridgeElements::Floats(values.to_vec()),
        TensorData::I32(values) => BridgeElements::Integers(values.to_vec()),
        TensorData::Bool(values) => BridgeElements::Integers(values.iter().map(|value| i32::from(*value)).collect()),
    };
    BridgeArray { name: name.to_owned(), shape: tensor.shape.to_vec(), elements }
}

/// A tensor of an array from the bridge.
pub fn bridge_tensor(array: BridgeArray) -> Tensor {
    match array.elements {
        BridgeElements::Floats(values) => Tensor::new(array.shape, values),
        BridgeElements::Integers(values) => Tensor::new(array.shape, values),
    }
}

/// An input of a role; masks get the value that Core AI takes.
fn input_array(name: &str, role: &PortRole, tensor: &Tensor) -> BridgeArray {
    let mut array = bridge_array(name, tensor);
    let is_mask = matches!(
        role,
        PortRole::AttentionMask { .. }
            | PortRole::BandMask { .. }
            | PortRole::PastMask { .. }
            | PortRole::CallMask { .. }
    );
    if let (true, BridgeElements::Floats(values)) = (is_mask, &mut array.elements) {
        values.iter_mut().filter(|value| **value <= MASKED).for_each(|value| *value = CORE_AI_MASKED);
    }
    array
}

impl Sequence for CoreAiSequence {
    fn run(&mut self, function: usize, inputs: &[&Tensor], watch: Option<Watch<'_>>) -> Result<Vec<Tensor>> {
        if watch.is_some() {
            let problem = "Core AI shows no values inside a function".to_owned();
            return Err(RuntimeError::Backend { backend: NAME, problem }.into());
        }
        let entry = self.shared.entry(function)?;
        let given = entry.inputs.iter().zip(inputs);
        let call = BridgeCall {
            function: &entry.function,
            sequence: self.number,
            inputs: given.map(|(port, tensor)| input_array(&port.name, &port.role, tensor)).collect(),
            states: entry.states.iter().map(|state| (state.name.clone(), state.id.clone())).collect(),
            outputs: entry.outputs.iter().map(|port| port.name.clone()).collect(),
        };
        Ok(self.shared.bridge()?.call(&call)?.into_iter().map(bridge_tensor).collect())
    }

    fn run_into(&mut self, call: FunctionCall<'_>, outputs: &mut Vec<Arc<Tensor>>) -> Result<()> {
        run_anew(self, call, outputs)
    }

    fn run_together(&mut self, calls: &[FunctionCall<'_>], outputs: &mut [Vec<Arc<Tensor>>]) -> Result<()> {
        run_in_turn(self, calls, outputs)
    }

    fn enter(&mut self, _phase: Phase) {}

    fn states(&self, function: usize) -> Result<Option<Vec<Arc<Tensor>>>> {
        let entry = self.shared.entry(function)?;
        let keys: Vec<&str> = entry.states.iter().map(|state| state.id.as_str()).collect();
        let found = self.shared.bridge()?.states(self.number, &keys)?;
        // a call uses all states of its function
        Ok((found.len() == keys.len() && !keys.is_empty())
            .then(|| found.into_iter().map(|array| Arc::new(bridge_tensor(array))).collect()))
    }

    fn set_states(&mut self, function: usize, values: Vec<Tensor>) -> Result<()> {
        let entry = self.shared.entry(function)?;
        let states = entry.states.iter().zip(&values);
        let arrays: Vec<BridgeArray> = states.map(|(state, tensor)| bridge_array(&state.id, tensor)).collect();
        self.shared.bridge()?.set_states(self.number, &arrays)
    }

    fn reset(&mut self) -> Result<()> {
        self.shared.bridge()?.forget(self.number)
    }

    fn fork(&self) -> Result<Option<Box<dyn Sequence>>> {
        let copy = self.shared.new_sequence();
        self.shared.bridge()?.copy(self.number, copy.number)?;
        Ok(Some(Box::new(copy)))
    }
}

impl Drop for CoreAiSequence {
    fn drop(&mut self) {
        // a runtime that is gone has forgotten it
        if let Ok(mut bridge) = self.shared.bridge() {
            let _ = bridge.forget(self.number);
        }
    }
}
