//! Backend over Core ML: compiled functions with their own kind of states, on the requested devices.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::backend::{Backend, BatchMember, BatchResult, FunctionCall, Phase, Sequence, Watch, run_anew, run_each};
use super::error::RuntimeError;
use super::function_pool::{FunctionPool, FunctionWeights, check_limit, weight_bytes};
use super::host::HostTables;
use super::inputs::shape_of;
use super::model::LoadedModel;
use anec_base::Result;
use anec_bundle::{Bundle, FILE_NAME, FunctionEntry, PackageEntry};
use anec_bundle::{Port, PortDim, PortRole, StatePort};
use anec_coreml::array::{Element, OwnedValues, StridedArray, Values};
use anec_coreml::cache::Cache;
use anec_coreml::plan::{ComputeUnits, listing_digest};
use anec_coreml::{CoreMl, Engine, LoadedFunction};
use anec_exec::{Tensor, TensorData};

/// Name of the backend.
pub const NAME: &str = "coreml";

/// Compute units of each phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhaseUnits {
    /// Units for prefill.
    pub prompt: ComputeUnits,
    /// Units for decoding.
    pub writing: ComputeUnits,
}

impl PhaseUnits {
    fn of(&self, phase: Phase) -> ComputeUnits {
        match phase {
            Phase::Prompt => self.prompt,
            Phase::Writing => self.writing,
        }
    }
}

impl From<ComputeUnits> for PhaseUnits {
    fn from(units: ComputeUnits) -> Self {
        PhaseUnits { prompt: units, writing: units }
    }
}

impl fmt::Display for PhaseUnits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PhaseUnits { prompt, writing } = self;
        match prompt == writing {
            true => write!(f, "{prompt}"),
            false => write!(f, "{prompt} for prompts, {writing} for writing"),
        }
    }
}

/// Opens a bundle on Core ML. `memory` limits the bytes of weights in memory.
///
/// # Errors
/// If there is no Core ML or no bundle, the bundle contradicts itself, or a function's weights exceed the limit.
pub fn open(folder: &Path, units: impl Into<PhaseUnits>, memory: Option<u64>) -> Result<Arc<LoadedModel>> {
    if !folder.join(FILE_NAME).exists() {
        return Err(RuntimeError::NoBundle { path: folder.to_owned() }.into());
    }
    let engine = Arc::new(CoreMl::new()?);
    let bundle = Bundle::read(folder)?;
    let host = Arc::new(HostTables::open(&bundle, folder)?);
    let backend = CoreMlBackend::new(engine, &bundle, folder, units, Cache::of_user()?).within(memory)?;
    LoadedModel::new(bundle, folder, host, Box::new(backend))
}

/// Runs a bundle on Core ML. Functions are compiled and loaded on their first call; under a memory limit others are
/// evicted for them.
pub struct CoreMlBackend<E: Engine> {
    shared: Arc<Shared<E>>,
}

struct Shared<E: Engine> {
    engine: Arc<E>,
    bundle: Bundle,
    /// Number of functions of each package, including those of a draft layer.
    siblings: BTreeMap<String, usize>,
    folder: PathBuf,
    units: PhaseUnits,
    cache: Cache,
    loaded: FunctionPool<(usize, ComputeUnits), Mutex<E::Function>>,
}

/// Function in memory, used by one call at a time.
type Loaded<E> = Mutex<<E as Engine>::Function>;

impl<E: Engine> CoreMlBackend<E> {
    /// Creates the backend for a bundle in a folder. Nothing is loaded yet.
    pub fn new(engine: Arc<E>, bundle: &Bundle, folder: &Path, units: impl Into<PhaseUnits>, cache: Cache) -> Self {
        let (bundle, folder, units) = (bundle.clone(), folder.to_owned(), units.into());
        let loaded = FunctionPool::new(None);
        let mut siblings = BTreeMap::new();
        bundle.all_functions().for_each(|entry| *siblings.entry(entry.package.clone()).or_default() += 1);
        CoreMlBackend { shared: Arc::new(Shared { engine, bundle, siblings, folder, units, cache, loaded }) }
    }

    /// Limits the bytes of weights in memory. Each function counts with all weights of its package, because Core ML
    /// copies them for it.
    ///
    /// # Errors
    /// If a function's weights exceed the limit.
    pub fn within(self, memory: Option<u64>) -> Result<Self, RuntimeError> {
        let Shared { engine, bundle, siblings, folder, units, cache, .. } = &*self.shared;
        let siblings = siblings.clone();
        check_limit(bundle, memory)?;
        let (engine, bundle, folder, cache) = (engine.clone(), bundle.clone(), folder.clone(), cache.clone());
        let loaded = FunctionPool::new(memory);
        Ok(CoreMlBackend {
            shared: Arc::new(Shared { engine, bundle, siblings, folder, units: *units, cache, loaded }),
        })
    }
}

impl<E: Engine> Shared<E> {
    fn entry(&self, index: usize) -> Result<&FunctionEntry, RuntimeError> {
        self.bundle.functions.get(index).ok_or_else(|| self.wrong(format!("there is no function {index}")))
    }

    fn wrong(&self, problem: String) -> RuntimeError {
        RuntimeError::bundle(self.folder.join(FILE_NAME), problem)
    }

    fn function(&self, index: usize, units: ComputeUnits) -> Result<Arc<Loaded<E>>> {
        let entry = self.entry(index)?;
        self.loaded.get((index, units), self.weights(index, entry, units), |_| {
            let siblings = self.siblings.get(&entry.package).copied().unwrap_or(1);
            // Core ML has no name for the only function of a package
            let name = (siblings > 1).then_some(entry.function.as_str());
            let model = self.compiled(&entry.package)?;
            Ok(Mutex::new(self.engine.load(&model, name, units)?))
        })
    }

    /// Returns a function's own copy of the weights.
    fn weights(&self, index: usize, entry: &FunctionEntry, units: ComputeUnits) -> FunctionWeights {
        let id = 2 * index + usize::from(units != self.units.prompt);
        FunctionWeights { id, bytes: weight_bytes(&self.bundle, entry) }
    }

    /// Returns the compiled model of a package: the bundle's own, or one from the cache.
    fn compiled(&self, package: &str) -> Result<PathBuf> {
        let entry = self.bundle.packages.iter().find(|entry| entry.package == package);
        let entry = entry.ok_or_else(|| self.wrong(format!("there is no package `{package}`")))?;
        let own = entry.compiled.as_ref().map(|name| self.folder.join(name)).filter(|path| path.exists());
        match own {
            Some(path) => Ok(path),
            None => Ok(self.cache.compiled(&*self.engine, &self.folder.join(package), &recorded_digest(entry))?),
        }
    }
}

/// Returns the states of a function as arrays.
fn state_arrays(entry: &FunctionEntry) -> Vec<StridedArray> {
    let array = |state: &StatePort| StridedArray {
        name: state.name.clone(),
        element: Element::F16,
        shape: state.shape.iter().map(|size| *size as usize).collect(),
    };
    entry.states.iter().map(array).collect()
}

/// Returns the names of a function's states. Functions share either all states or none, because Core ML creates the
/// states of a package's functions together.
fn state_names(entry: &FunctionEntry) -> Vec<String> {
    entry.states.iter().map(|state| state.name.clone()).collect()
}

/// Returns the digest of a package recorded in the bundle.
fn recorded_digest(entry: &PackageEntry) -> String {
    let prefix = format!("{}/", entry.package);
    let name = |file: &str| file.strip_prefix(&prefix).unwrap_or(file).to_owned();
    let files: Vec<_> = entry.files.iter().map(|file| (name(&file.file), file.digest.to_string())).collect();
    listing_digest(files.iter().map(|(file, digest)| (file.as_str(), digest.as_str())))
}

impl<E: Engine> Backend for CoreMlBackend<E> {
    fn prepare(&self, function: usize) -> Result<()> {
        self.shared.function(function, self.shared.units.prompt)?;
        self.shared.function(function, self.shared.units.writing).map(drop)
    }

    fn has_room(&self, function: usize) -> bool {
        let PhaseUnits { prompt, writing } = self.shared.units;
        self.shared.entry(function).is_ok_and(|entry| {
            let has_room = |units| self.shared.loaded.has_room(self.shared.weights(function, entry, units));
            has_room(prompt) && has_room(writing)
        })
    }

    fn of_bundle(&self, bundle: &Bundle) -> Result<Option<Box<dyn Backend>>> {
        let Shared { engine, siblings, folder, units, cache, .. } = &*self.shared;
        let (engine, folder, cache) = (engine.clone(), folder.clone(), cache.clone());
        let (siblings, loaded) = (siblings.clone(), FunctionPool::new(None));
        let shared = Shared { engine, bundle: bundle.clone(), siblings, folder, units: *units, cache, loaded };
        Ok(Some(Box::new(CoreMlBackend { shared: Arc::new(shared) })))
    }

    fn sequence(&self) -> Result<Box<dyn Sequence>> {
        Ok(Box::new(CoreMlSequence::new(self.shared.clone(), Phase::default())))
    }

    fn run_batch(&self, function: usize, members: Vec<BatchMember<'_>>) -> Vec<BatchResult> {
        run_each(function, members)
    }
}

type StateOf<E> = <<E as Engine>::Function as LoadedFunction>::State;
type ArraysOf<E> = <<E as Engine>::Function as LoadedFunction>::Call;

struct CoreMlSequence<E: Engine> {
    shared: Arc<Shared<E>>,
    phase: Phase,
    /// States by the id of a function's first state; functions with that state share all their states.
    states: BTreeMap<String, FunctionState<E>>,
    /// Arrays by function and number of tokens.
    arrays: BTreeMap<(usize, usize), Arrays<E>>,
}

/// States of a function.
struct FunctionState<E: Engine> {
    arrays: Vec<StridedArray>,
    content: StateContent<E>,
}

/// Contents of states. Core ML can use a state only with functions of the package that created it, loaded for the same
/// devices, while the creating function is in memory. Elsewhere it is created anew with the same values.
enum StateContent<E: Engine> {
    /// State created by a function that was loaded for these units.
    State { state: StateOf<E>, maker: Weak<Loaded<E>>, units: ComputeUnits },
    /// Values of states that are created when a function needs them.
    Values(Vec<OwnedValues>),
}

impl<E: Engine> FunctionState<E> {
    fn values(&self) -> Result<Vec<OwnedValues>> {
        Ok(match &self.content {
            StateContent::State { state, .. } => E::Function::read(state, &self.arrays)?,
            StateContent::Values(values) => values.clone(),
        })
    }

    /// Returns the states for the function that `maker` guards.
    fn state(&mut self, maker: &Arc<Loaded<E>>, function: &E::Function, units: ComputeUnits) -> Result<&StateOf<E>> {
        let usable = match &self.content {
            StateContent::State { maker, units: own, .. } => *own == units && maker.strong_count() > 0,
            StateContent::Values(_) => false,
        };
        if !usable {
            let state = function.restore(&self.arrays, &self.values()?)?;
            self.content = StateContent::State { state, maker: Arc::downgrade(maker), units };
        }
        match &self.content {
            StateContent::State { state, .. } => Ok(state),
            StateContent::Values(_) => {
                let problem = "states were made and aren't there".to_owned();
                Err(RuntimeError::Backend { backend: NAME, problem }.into())
            }
        }
    }

    /// Copies the values for another text.
    fn copy(&self) -> Result<Self> {
        let content = match &self.content {
            StateContent::State { state, maker, units } => match maker.upgrade() {
                Some(function) => {
                    let names: Vec<String> = self.arrays.iter().map(|array| array.name.clone()).collect();
                    let copy = function.lock().unwrap_or_else(PoisonError::into_inner).copy(state, &names)?;
                    StateContent::State { state: copy, maker: maker.clone(), units: *units }
                }
                None => StateContent::Values(self.values()?),
            },
            StateContent::Values(values) => StateContent::Values(values.clone()),
        };
        Ok(FunctionState { arrays: self.arrays.clone(), content })
    }
}

impl<E: Engine> CoreMlSequence<E> {
    fn new(shared: Arc<Shared<E>>, phase: Phase) -> Self {
        CoreMlSequence { shared, phase, states: BTreeMap::new(), arrays: BTreeMap::new() }
    }

    fn units(&self) -> ComputeUnits {
        self.shared.units.of(self.phase)
    }
}

/// Arrays of calls of one size.
struct Arrays<E: Engine> {
    bound: ArraysOf<E>,
    outputs: Vec<StridedArray>,
}

impl<E: Engine> Arrays<E> {
    fn new(function: &E::Function, entry: &FunctionEntry, size: usize) -> Result<Self> {
        let [inputs, outputs] = [&entry.inputs, &entry.outputs].map(|ports| arrays(ports, size));
        Ok(Arrays { bound: function.call(&inputs, &outputs)?, outputs })
    }

    fn run(&mut self, function: &E::Function, state: Option<&StateOf<E>>, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let values = inputs.iter().map(|tensor| match &tensor.data {
            TensorData::F32(values) => Ok(Values::Floats(values)),
            TensorData::I32(values) => Ok(Values::Integers(values)),
            TensorData::Bool(_) => {
                Err(RuntimeError::Backend { backend: NAME, problem: "Core ML takes no booleans".into() })
            }
        });
        let values = values.collect::<Result<Vec<_>, _>>()?;
        let given = function.predict(&mut self.bound, state, &values)?;
        if let Some((array, _)) = self.outputs.iter().zip(&given).find(|(_, values)| !is_finite(values)) {
            let problem = format!(
                "`{}` has values that aren't finite: the function computes beyond fp16's range, or on another device than \
                 it was made for",
                array.name
            );
            return Err(RuntimeError::Backend { backend: NAME, problem }.into());
        }
        Ok(self.outputs.iter().zip(given).map(|(array, values)| to_tensor(array, values)).collect())
    }
}

impl<E: Engine> Sequence for CoreMlSequence<E> {
    fn run(&mut self, function: usize, inputs: &[&Tensor], watch: Option<Watch<'_>>) -> Result<Vec<Tensor>> {
        if watch.is_some() {
            let problem = "Core ML shows no values inside a function".to_owned();
            return Err(RuntimeError::Backend { backend: NAME, problem }.into());
        }
        let units = self.units();
        let CoreMlSequence { shared, states, arrays, .. } = self;
        let maker = shared.function(function, units)?;
        let loaded = maker.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = shared.entry(function)?;
        let size = tokens(&entry.inputs, inputs);
        let arrays = match arrays.entry((function, size)) {
            Entry::Occupied(arrays) => arrays.into_mut(),
            Entry::Vacant(place) => place.insert(Arrays::<E>::new(&loaded, entry, size)?),
        };
        let state = match entry.states.first().map(|state| states.entry(state.id.clone())) {
            None => None,
            Some(Entry::Occupied(held)) => Some(held.into_mut().state(&maker, &loaded, units)?),
            Some(Entry::Vacant(place)) => {
                let state = loaded.state(&state_names(entry))?;
                let content = StateContent::State { state, maker: Arc::downgrade(&maker), units };
                let held = place.insert(FunctionState { arrays: state_arrays(entry), content });
                Some(held.state(&maker, &loaded, units)?)
            }
        };
        arrays.run(&loaded, state, inputs)
    }

    fn run_into(&mut self, call: FunctionCall<'_>, outputs: &mut Vec<Arc<Tensor>>) -> Result<()> {
        run_anew(self, call, outputs)
    }

    fn run_together(&mut self, calls: &[FunctionCall<'_>], outputs: &mut [Vec<Arc<Tensor>>]) -> Result<()> {
        let units = self.units();
        let weights = calls.iter().map(|call| {
            let entry = self.shared.entry(call.function)?;
            Ok(self.shared.weights(call.function, entry, units))
        });
        if !self.shared.loaded.holds_together(weights.collect::<Result<Vec<_>>>()?) {
            return calls.iter().zip(outputs).try_for_each(|(call, outputs)| self.run_into(*call, outputs));
        }
        // each call owns its arrays while it runs
        let prepared = calls.iter().map(|call| {
            let loaded = self.shared.function(call.function, units)?;
            let entry = self.shared.entry(call.function)?;
            if !entry.states.is_empty() {
                return Err(self.shared.wrong(format!("function `{}` has states", entry.function)).into());
            }
            let key = (call.function, tokens(&entry.inputs, &call.borrowed()));
            let arrays = match self.arrays.remove(&key) {
                Some(arrays) => arrays,
                None => Arrays::<E>::new(&loaded.lock().unwrap_or_else(PoisonError::into_inner), entry, key.1)?,
            };
            Ok((key, loaded, arrays))
        });
        let prepared = prepared.collect::<Result<Vec<_>>>()?;
        let done: Vec<_> = std::thread::scope(|scope| {
            let mut running = Vec::new();
            for ((key, loaded, mut arrays), call) in prepared.into_iter().zip(calls) {
                running.push(scope.spawn(move || {
                    let function = loaded.lock().unwrap_or_else(PoisonError::into_inner);
                    let outputs = arrays.run(&function, None, &call.borrowed());
                    (key, arrays, outputs)
                }));
            }
            running.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
        });
        let mut failure = Ok(());
        for ((key, arrays, given), outputs) in done.into_iter().zip(outputs) {
            self.arrays.insert(key, arrays);
            match given {
                Ok(given) => *outputs = given.into_iter().map(Arc::new).collect(),
                Err(error) => failure = failure.and(Err(error)),
            }
        }
        failure
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
    }

    fn states(&self, function: usize) -> Result<Option<Vec<Arc<Tensor>>>> {
        let entry = self.shared.entry(function)?;
        let Some(held) = entry.states.first().and_then(|state| self.states.get(&state.id)) else { return Ok(None) };
        let tensor = |(array, values): (&StridedArray, OwnedValues)| Arc::new(to_tensor(array, values));
        Ok(Some(held.arrays.iter().zip(held.values()?).map(tensor).collect()))
    }

    fn set_states(&mut self, function: usize, values: Vec<Tensor>) -> Result<()> {
        let entry = self.shared.entry(function)?;
        let Some(first) = entry.states.first() else { return Ok(()) };
        let owned = values.into_iter().map(|tensor| match tensor.data {
            TensorData::F32(values) => Ok(OwnedValues::Floats(values)),
            _ => Err(self.shared.wrong(format!("function `{}` has states of floats", entry.function))),
        });
        let content = StateContent::Values(owned.collect::<Result<_, _>>()?);
        self.states.insert(first.id.clone(), FunctionState { arrays: state_arrays(entry), content });
        Ok(())
    }

    fn reset(&mut self) -> Result<()> {
        // new states are zero
        self.states.clear();
        Ok(())
    }

    fn fork(&self) -> Result<Option<Box<dyn Sequence>>> {
        let copy = |(id, held): (&String, &FunctionState<E>)| Ok((id.clone(), held.copy()?));
        let states = self.states.iter().map(copy).collect::<Result<_>>()?;
        Ok(Some(Box::new(CoreMlSequence { states, ..CoreMlSequence::new(self.shared.clone(), self.phase) })))
    }
}

fn is_finite(values: &OwnedValues) -> bool {
    match values {
        OwnedValues::Floats(values) => values.iter().all(|value| value.is_finite()),
        OwnedValues::Integers(_) => true,
    }
}

/// Converts an array's values to a tensor.
fn to_tensor(array: &StridedArray, values: OwnedValues) -> Tensor {
    match values {
        OwnedValues::Floats(values) => Tensor::new(array.shape.clone(), values),
        OwnedValues::Integers(values) => Tensor::new(array.shape.clone(), values),
    }
}

/// Returns the number of tokens that the inputs have.
fn tokens(ports: &[Port], inputs: &[&Tensor]) -> usize {
    let of_port = |(port, tensor): (&Port, &&Tensor)| {
        let axis = port.shape.iter().position(|extent| matches!(extent, PortDim::Tokens(_)))?;
        tensor.shape.get(axis).copied()
    };
    ports.iter().zip(inputs).find_map(of_port).unwrap_or(1)
}

/// Returns the arrays of ports for calls of `size` tokens.
fn arrays(ports: &[Port], size: usize) -> Vec<StridedArray> {
    let array = |port: &Port| StridedArray {
        name: port.name.clone(),
        element: element(&port.role),
        shape: shape_of(port, size as u64),
    };
    ports.iter().map(array).collect()
}

/// Returns the element type of a port in a package.
pub fn element(role: &PortRole) -> Element {
    match role {
        PortRole::SliceBegin | PortRole::SliceEnd | PortRole::TopIndices => Element::I32,
        PortRole::Hidden
        | PortRole::PreviousHidden
        | PortRole::PreviousDrafted
        | PortRole::RouterState
        | PortRole::FeedForwardInput
        | PortRole::Embedding
        | PortRole::PerLayerInput { .. }
        | PortRole::SharedKeys { .. }
        | PortRole::SharedValues { .. }
        | PortRole::ExpertInput
        | PortRole::ExpertShares
        | PortRole::RopeCos { .. }
        | PortRole::RopeSin { .. }
        | PortRole::AttentionMask { .. }
        | PortRole::BandMask { .. }
        | PortRole::KvWriteMask
        | PortRole::TokenOrder
        | PortRole::State { .. }
        | PortRole::Cache { .. }
        | PortRole::CacheRows { .. }
        | PortRole::PastMask { .. }
        | PortRole::CallMask { .. }
        | PortRole::Logits
        | PortRole::TopValues => Element::F16,
    }
}

#[cfg(test)]
mod tests;
