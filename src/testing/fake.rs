//! Double of Core ML: runs packages on the CPU executor, with Core ML's element types, padded rows and states that
//! belong to one package. A test decides the compute plan.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::Duration;

use anec_convert::{ConvertOptions, convert};
use anec_coreml::array::{self, Element, OwnedValues, StridedArray, Values};
use anec_coreml::plan::{ComputeUnits, Device, Machine, Operation};
use anec_coreml::{CoreMlError, Engine, LoadedFunction};
use anec_exec::{Executable, Precision, State, Tensor, TensorData, WeightCache};
use anec_manifest::Manifest;
use anec_mil::{Block, Function, Op};

/// Converts the demo model into a folder, with changes to its manifest (`key=value`).
pub fn convert_demo(out: &Path, changes: &[&str]) {
    let (file, source) = (crate::root().join("src/manifest/manifests/demo.yaml"), crate::root().join("demo/model"));
    let source = format!("source={}", source.display());
    let changes = [&[source.as_str()], changes].concat();
    convert_into(out, |changes| Manifest::open(file.to_str().unwrap(), changes).unwrap(), &changes);
}

/// Converts a small model of a family into a folder, with manifest keys (`key=value`).
pub fn convert_family(case: &str, out: &Path, keys: &[&str]) {
    let source = format!("source={}/tests/fixtures/families/{case}", crate::root().display());
    let keys = [&[source.as_str(), "name=small"], keys].concat();
    convert_into(out, |keys| Manifest::from_yaml("", "small", keys).unwrap(), &keys);
}

fn convert_into(out: &Path, manifest: impl Fn(&[String]) -> Manifest, changes: &[&str]) {
    let changes: Vec<String> = changes.iter().map(|change| (*change).to_owned()).collect();
    let manifest = manifest(&changes);
    let mut options = ConvertOptions::new(manifest);
    options.out = Some(out.to_owned());
    convert(&options).unwrap();
}

pub struct DoubleEngine {
    /// Operators that prefer another device than the Neural Engine.
    pub elsewhere: BTreeMap<&'static str, Device>,
    /// Package whose compilation fails.
    pub refuses: Option<&'static str>,
    /// Whether functions return NaN, as forms made for the Neural Engine do on the CPU.
    pub returns_nan: bool,
    /// All actions, in order.
    pub log: Arc<Mutex<Vec<String>>>,
    meeting: Arc<Mutex<Option<Arc<CallBarrier>>>>,
    weights: WeightCache,
}

impl Default for DoubleEngine {
    fn default() -> Self {
        Self::new()
    }
}

impl DoubleEngine {
    pub fn new() -> Self {
        DoubleEngine {
            elsewhere: BTreeMap::new(),
            refuses: None,
            returns_nan: false,
            log: Arc::default(),
            meeting: Arc::default(),
            weights: WeightCache::new(),
        }
    }

    /// From now on, calls of functions without states block until `count` of them are in progress.
    pub fn require_concurrent_calls(&self, count: usize) {
        let meeting = CallBarrier { count, came: Mutex::default(), changed: Condvar::new() };
        *self.meeting.lock().unwrap() = Some(Arc::new(meeting));
    }

    /// Returns the actions since the last call.
    pub fn take_log(&self) -> Vec<String> {
        std::mem::take(&mut *self.log.lock().unwrap())
    }

    fn note(&self, what: String) {
        self.log.lock().unwrap().push(what);
    }

    fn operation(&self, function: &Function, op: &Op) -> Operation {
        let preferred = match op.operator.as_str() {
            operator if operator == "const" || operator.starts_with("constexpr_") => None,
            operator => Some(self.elsewhere.get(operator).copied().unwrap_or(Device::NeuralEngine)),
        };
        Operation {
            operator: format!("ios18.{}", op.operator),
            outputs: op.outputs.iter().map(|id| function.value(*id).name.clone()).collect(),
            preferred,
            supported: preferred.into_iter().collect(),
            cost: preferred.map(|_| 0.001),
            blocks: op.blocks.iter().map(|block| self.block(function, block)).collect(),
        }
    }

    fn block(&self, function: &Function, block: &Block) -> Vec<Operation> {
        block.ops.iter().map(|op| self.operation(function, op)).collect()
    }
}

/// Barrier for concurrent calls.
struct CallBarrier {
    count: usize,
    came: Mutex<usize>,
    changed: Condvar,
}

impl CallBarrier {
    fn join(&self) {
        let mut came = self.came.lock().unwrap();
        *came += 1;
        let all = came.div_ceil(self.count) * self.count;
        self.changed.notify_all();
        let patience = Duration::from_secs(60);
        let (came, _) = self.changed.wait_timeout_while(came, patience, |came| *came < all).unwrap();
        assert!(*came >= all, "timed out waiting for other calls");
    }
}

/// Name of the package inside a "compiled" model of the double.
const PACKAGE: &str = "model.mlpackage";

fn refused(path: &Path, problem: impl ToString) -> CoreMlError {
    CoreMlError::Refused { action: "double", path: path.to_owned(), problem: problem.to_string() }
}

pub fn machine() -> Machine {
    Machine {
        model: "Mac16,8".into(),
        chip: "Apple M4 Pro".into(),
        os_version: "15.6".into(),
        os_build: "24G84".into(),
        neural_engine_cores: Some(16),
    }
}

impl Engine for DoubleEngine {
    type Function = DoubleFunction;

    fn machine(&self) -> Result<Machine, CoreMlError> {
        Ok(machine())
    }

    fn compile(&self, package: &Path, target: &Path) -> Result<(), CoreMlError> {
        self.note(format!("compile {}", package.file_name().unwrap().display()));
        assert!(!target.exists());
        if self.refuses.is_some_and(|name| package.ends_with(name)) {
            return Err(refused(package, "no"));
        }
        let opened = anec_package::open(package).map_err(|e| refused(package, e))?;
        std::fs::create_dir(target).map_err(|e| refused(target, e))?;
        anec_package::write(&opened.program, &target.join(PACKAGE), &Default::default())
            .map_err(|e| refused(target, e))?;
        Ok(())
    }

    fn plan(&self, model: &Path, _: ComputeUnits) -> Result<Vec<Operation>, CoreMlError> {
        let program = anec_package::open(&model.join(PACKAGE)).map_err(|e| refused(model, e))?.program;
        // like Core ML: for the default function and its default shape
        let function = program.function(&program.default_function).unwrap();
        assert_eq!((function.name.as_str(), program.functions.len()), ("main", 1));
        let defaults: Vec<u64> = function.lengths.values().map(|lengths| lengths.default_size()).collect();
        self.note(format!("plan for {defaults:?}"));
        Ok(self.block(function, &function.block))
    }

    fn load(&self, model: &Path, function: Option<&str>, units: ComputeUnits) -> Result<DoubleFunction, CoreMlError> {
        self.note(format!("load {} for {units}", function.unwrap_or("the only function")));
        let program = anec_package::open(&model.join(PACKAGE)).map_err(|e| refused(model, e))?.program;
        let function = match function {
            Some(name) if program.functions.len() > 1 => program.function(name),
            None if program.functions.len() == 1 => program.functions.first(),
            _ => None,
        };
        let function = function.ok_or_else(|| refused(model, "no such function"))?;
        let executable = Executable::compile(function, Precision::F16, &self.weights).map_err(|e| refused(model, e))?;
        let names = function.states().map(|state| state.name.clone()).collect();
        let (meeting, load) = (self.meeting.clone(), Arc::new(units));
        let returns_nan = self.returns_nan;
        Ok(DoubleFunction { executable, states: names, path: model.to_owned(), load, meeting, returns_nan })
    }
}

pub struct DoubleFunction {
    executable: Executable,
    states: Vec<String>,
    path: PathBuf,
    /// Alive as long as the function is loaded; the devices that it was loaded for.
    load: Arc<ComputeUnits>,
    meeting: Arc<Mutex<Option<Arc<CallBarrier>>>>,
    returns_nan: bool,
}

/// States, with the model that they were made for and the load that made them.
pub struct DoubleState {
    state: Mutex<State>,
    path: PathBuf,
    load: Weak<ComputeUnits>,
}

impl DoubleFunction {
    fn state_of(&self, state: State) -> DoubleState {
        DoubleState { state: Mutex::new(state), path: self.path.clone(), load: Arc::downgrade(&self.load) }
    }

    /// Asserts that states are used only with their package, with functions loaded for the same devices, and while the
    /// function that made them is loaded: other uses are undefined in Core ML.
    fn assert_own(&self, state: &DoubleState) {
        assert_eq!(state.path, self.path, "states were passed to another package");
        let load = state.load.upgrade().expect("the function that made the states has been dropped");
        assert_eq!(load, self.load, "states were passed to a function for other devices");
    }
}

pub struct DoubleCall {
    inputs: Vec<(StridedArray, Vec<u8>)>,
    outputs: Vec<StridedArray>,
}

impl LoadedFunction for DoubleFunction {
    type State = DoubleState;
    type Call = DoubleCall;

    fn state(&self, names: &[String]) -> Result<DoubleState, CoreMlError> {
        if names != self.states {
            return Err(refused(&self.path, format!("states {names:?}, expected {:?}", self.states)));
        }
        Ok(self.state_of(self.executable.new_state()))
    }

    fn copy(&self, state: &DoubleState, names: &[String]) -> Result<DoubleState, CoreMlError> {
        assert_eq!(names, self.states);
        self.assert_own(state);
        let copy = state.state.lock().unwrap().clone();
        Ok(self.state_of(copy))
    }

    fn read(state: &DoubleState, arrays: &[StridedArray]) -> Result<Vec<OwnedValues>, CoreMlError> {
        let held = state.state.lock().unwrap();
        let values = |array: &StridedArray| {
            let tensor = held.get(&array.name).ok_or_else(|| refused(&state.path, &array.name))?;
            assert_eq!(tensor.shape, array.shape, "{}", array.name);
            padded(array, &tensor.data).map_err(|problem| refused(&state.path, problem))
        };
        arrays.iter().map(values).collect()
    }

    fn restore(&self, arrays: &[StridedArray], values: &[OwnedValues]) -> Result<DoubleState, CoreMlError> {
        assert!(arrays.iter().map(|array| &array.name).eq(&self.states) && arrays.len() == values.len());
        let mut state = self.executable.new_state();
        for (array, values) in arrays.iter().zip(values) {
            assert_eq!(array.element, Element::F16);
            state.set(&array.name, tensor(array.shape.clone(), values.clone()));
        }
        Ok(self.state_of(state))
    }

    fn call(&self, inputs: &[StridedArray], outputs: &[StridedArray]) -> Result<DoubleCall, CoreMlError> {
        // aligned for every element type
        let memory = |array: &StridedArray| (array.clone(), vec![0; array.count() * array.element.size()]);
        Ok(DoubleCall { inputs: inputs.iter().map(memory).collect(), outputs: outputs.to_vec() })
    }

    fn predict(
        &self,
        call: &mut DoubleCall,
        state: Option<&DoubleState>,
        inputs: &[Values<'_>],
    ) -> Result<Vec<OwnedValues>, CoreMlError> {
        let wrong = |problem: String| refused(&self.path, problem);
        assert_eq!(inputs.len(), call.inputs.len());
        let meeting = self.meeting.lock().unwrap().clone();
        if let Some(meeting) = meeting.filter(|_| self.states.is_empty()) {
            meeting.join();
        }
        for ((array, memory), values) in call.inputs.iter_mut().zip(inputs) {
            array::write(array, *values, memory).map_err(wrong)?;
        }
        let tensors: Vec<(String, Tensor)> = call
            .inputs
            .iter()
            .map(|(array, memory)| {
                let values = array::read(array.element, &array.shape, &array.strides(), memory).map_err(wrong)?;
                Ok((array.name.clone(), tensor(array.shape.clone(), values)))
            })
            .collect::<Result<_, CoreMlError>>()?;
        let tensors: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let mut none = State::default();
        let given = match state {
            Some(state) => {
                self.assert_own(state);
                self.executable.run(&tensors, &mut state.state.lock().unwrap())
            }
            None => self.executable.run(&tensors, &mut none),
        };
        let given = given.map_err(|e| wrong(e.to_string()))?;
        let output = |array: &StridedArray| {
            let (_, tensor) =
                given.iter().find(|(name, _)| *name == array.name).ok_or_else(|| wrong(array.name.clone()))?;
            assert_eq!(tensor.shape, array.shape, "{}", array.name);
            let mut values = padded(array, &tensor.data).map_err(wrong)?;
            if let OwnedValues::Floats(values) = &mut values
                && self.returns_nan
            {
                values[0] = f32::NAN;
            }
            Ok(values)
        };
        call.outputs.iter().map(output).collect()
    }
}

fn tensor(shape: Vec<usize>, values: OwnedValues) -> Tensor {
    match values {
        OwnedValues::Floats(values) => Tensor::new(shape, values),
        OwnedValues::Integers(values) => Tensor::new(shape, values),
    }
}

/// Copies elements from memory whose last axis is padded as on the Neural Engine.
fn padded(array: &StridedArray, data: &TensorData) -> Result<OwnedValues, String> {
    const PADDED: usize = 32;
    let mut wide = array.clone();
    if let Some(last) = wide.shape.last_mut() {
        *last = last.next_multiple_of(PADDED);
    }
    let strides = wide.strides();
    let mut memory = vec![0xff; wide.count() * array.element.size()];
    let row = array.shape.last().copied().unwrap_or(1);
    let one = StridedArray { name: array.name.clone(), element: array.element, shape: vec![row] };
    let rows = memory.chunks_exact_mut(wide.shape.last().copied().unwrap_or(1) * array.element.size());
    for (index, place) in rows.enumerate() {
        let values = match data {
            TensorData::F32(values) => Values::Floats(&values[index * row..][..row]),
            TensorData::I32(values) => Values::Integers(&values[index * row..][..row]),
            TensorData::Bool(_) => return Err("booleans".into()),
        };
        let bytes = row * array.element.size();
        array::write(&one, values, &mut place[..bytes])?;
    }
    match array.element {
        Element::F16 | Element::F32 | Element::I32 => array::read(array.element, &array.shape, &strides, &memory),
    }
}
