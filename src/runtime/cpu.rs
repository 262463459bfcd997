//! Backend over the CPU executor, available everywhere: runs the emitted program.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use super::backend::{Backend, BatchMember, BatchResult, FunctionCall, Phase, Sequence, Watch, run_each, run_in_turn};
use super::cpu_options::{CachePrecision, CpuOptions};
use super::error::RuntimeError;
use super::function_pool::{FunctionPool, FunctionWeights, check_limit};
use super::idle_states::{IdleStates, SequenceStates};
use anec_base::Result;
use anec_base::listing::list;
use anec_bundle::{Bundle, FILE_NAME, PortRole};
use anec_exec::{ExecError, Executable, Precision, SequenceCall, State, Tensor, WeightCache};
use anec_mil::{Function, Program, SymbolRange, ValueType};
use smallvec::SmallVec;

/// Programs and weights of a bundle, read on first use and shared by all backends.
pub struct PackageStore {
    folder: PathBuf,
    functions: Vec<Signature>,
    packages: Arc<Packages>,
    /// Whether functions take as many tokens as the bundle says, even if their programs say fewer.
    beyond: bool,
}

/// Opened packages.
#[derive(Default)]
struct Packages {
    read: Mutex<BTreeMap<String, ReadPackage>>,
    weights: WeightCache,
}

/// Program of a package, with the state of its mapped files when it was read.
struct ReadPackage {
    program: Arc<Program>,
    files: Vec<(PathBuf, FileState)>,
}

/// Size and time of the last modification.
type FileState = (u64, Option<SystemTime>);

fn state_of(path: &Path) -> Option<FileState> {
    std::fs::metadata(path).ok().map(|metadata| (metadata.len(), metadata.modified().ok()))
}

/// Interface of a function according to the bundle.
struct Signature {
    /// Weights; functions of one package share them.
    weights: FunctionWeights,
    package: String,
    function: String,
    inputs: Vec<String>,
    outputs: Vec<String>,
    /// Output that is an inner value of the program.
    shown: Option<String>,
    /// Names and ids of its states.
    states: Vec<(String, String)>,
    /// Ids of the states that hold keys and values.
    caches: Vec<String>,
    /// Maximum number of tokens per call.
    most: u64,
}

impl PackageStore {
    /// Creates the store of a bundle in a folder. Nothing is read yet.
    pub fn of(bundle: &Bundle, folder: &Path) -> Arc<Self> {
        Arc::new(Self::with(bundle, folder, false))
    }

    /// Creates the store of a bundle that was [widened](super::widened()).
    pub fn beyond(bundle: &Bundle, folder: &Path) -> Arc<Self> {
        Arc::new(Self::with(bundle, folder, true))
    }

    fn with(bundle: &Bundle, folder: &Path, beyond: bool) -> Self {
        let names = |ports: &[anec_bundle::Port]| ports.iter().map(|port| port.name.clone()).collect();
        let weights = |name: &str| {
            let package = bundle.packages.iter().position(|package| package.package == name);
            let bytes = package.map_or(0, |index| bundle.packages[index].weight_bytes);
            FunctionWeights { id: package.unwrap_or(usize::MAX), bytes }
        };
        let caches = |entry: &anec_bundle::FunctionEntry| {
            entry.states.iter().filter(|state| state.role.is_cache()).map(|state| state.id.clone()).collect()
        };
        let signature = |entry: &anec_bundle::FunctionEntry| Signature {
            weights: weights(&entry.package),
            package: entry.package.clone(),
            function: entry.function.clone(),
            inputs: names(&entry.inputs),
            outputs: names(&entry.outputs),
            shown: entry.logits.clone().filter(|_| entry.output(&PortRole::Logits).is_some()),
            states: entry.states.iter().map(|state| (state.name.clone(), state.id.clone())).collect(),
            caches: caches(entry),
            most: entry.tokens.most(),
        };
        PackageStore {
            folder: folder.to_owned(),
            functions: bundle.functions.iter().map(signature).collect(),
            packages: Arc::default(),
            beyond,
        }
    }

    /// Returns the same programs and weights for the functions of another bundle of these packages.
    fn shared_with(&self, bundle: &Bundle) -> Arc<Self> {
        let other = Self::with(bundle, &self.folder, self.beyond);
        Arc::new(PackageStore { packages: self.packages.clone(), ..other })
    }

    /// Returns the bytes of weights in memory.
    pub fn weight_bytes(&self) -> usize {
        self.packages.weights.bytes()
    }

    /// Returns the program of a package, whose files mustn't have changed since it was read.
    fn program(&self, name: &str) -> Result<Arc<Program>> {
        let mut read = self.packages.read.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(package) = read.get(name) {
            return match package.files.iter().find(|(path, state)| state_of(path).as_ref() != Some(state)) {
                Some((path, _)) => Err(RuntimeError::Changed { path: path.clone() }.into()),
                None => Ok(package.program.clone()),
            };
        }
        let package = anec_package::open(&self.folder.join(name))?;
        let paths = package.files.iter().map(|file| package.path.join(&file.path));
        let files = paths.filter_map(|path| state_of(&path).map(|state| (path, state))).collect();
        let program = Arc::new(package.program);
        read.insert(name.to_owned(), ReadPackage { program: program.clone(), files });
        Ok(program)
    }

    fn signature(&self, index: usize) -> Result<&Signature, RuntimeError> {
        self.functions
            .get(index)
            .ok_or_else(|| RuntimeError::bundle(self.folder.join(FILE_NAME), format!("there is no function {index}")))
    }

    fn compile(&self, index: usize, precision: Precision, unfused: bool) -> Result<Executable> {
        let signature = self.signature(index)?;
        let program = self.program(&signature.package)?;
        let error = |problem: String| RuntimeError::bundle(self.folder.join(&signature.package), problem);
        let Some(function) = program.function(&signature.function) else {
            return Err(error(format!("the package has no function `{}`", signature.function)).into());
        };
        signature.check(function).map_err(error)?;
        let compile = if unfused { Executable::compile_unfused } else { Executable::compile };
        let mut function = signature.with_ids(function);
        if self.beyond {
            for lengths in function.lengths.values_mut() {
                if let SymbolRange::Range { upper: Some(upper), .. } = lengths {
                    *upper = (*upper).max(signature.most);
                }
            }
        }
        Ok(compile(&function, precision, &self.packages.weights).map_err(|error| signature.failed(error))?)
    }
}

impl Signature {
    /// Returns the error of a function that can't be compiled or run.
    fn failed(&self, error: ExecError) -> RuntimeError {
        RuntimeError::Function { package: self.package.clone(), error }
    }

    /// Returns inputs in the bundle's order with their names.
    fn named<'a, T, C: FromIterator<(&'a str, T)>>(&'a self, inputs: impl IntoIterator<Item = T>) -> C {
        self.inputs.iter().map(String::as_str).zip(inputs).collect()
    }

    /// Returns outputs in the bundle's order, which may differ from the program's.
    fn in_order(&self, mut outputs: Vec<(String, Tensor)>) -> Vec<Tensor> {
        let mut take = |name: &String| outputs.iter().position(|(n, _)| n == name).map(|i| outputs.swap_remove(i).1);
        self.outputs.iter().filter_map(&mut take).collect()
    }

    /// Sorts the outputs of a program into the bundle's order.
    fn sort(&self, executable: &Executable, outputs: &mut [Arc<Tensor>]) {
        let mut names: SmallVec<[&str; 8]> = executable.output_names().collect();
        for (index, name) in self.outputs.iter().enumerate() {
            if let Some(found) = names.iter().position(|own| own == name).filter(|found| *found > index) {
                names.swap(index, found);
                outputs.swap(index, found);
            }
        }
    }

    /// Renames the function's states to their ids, under which all functions of a text keep them. Inner values that the
    /// bundle names as outputs become outputs.
    fn with_ids(&self, function: &Function) -> Function {
        let mut function = function.clone();
        if let Some(name) = &self.shown {
            let mut made = function.block.ops.iter().flat_map(|op| op.outputs.iter().copied());
            let shown = made.find(|id| function.value(*id).name == *name);
            function.block.outputs.extend(shown);
        }
        for input in function.inputs.clone() {
            let value = &mut function.values[input.0 as usize];
            if let (ValueType::State(_), Some((_, id))) =
                (&value.ty, self.states.iter().find(|(name, _)| *name == value.name))
            {
                value.name.clone_from(id);
            }
        }
        function
    }

    /// Checks that a function has the inputs, outputs and states that the bundle names.
    fn check(&self, function: &Function) -> Result<(), String> {
        let inputs: BTreeSet<&str> = function.tensor_inputs().map(|value| value.name.as_str()).collect();
        let inner = function.block.ops.iter().flat_map(|op| &op.outputs).map(|id| function.value(*id).name.as_str());
        let shown = inner.filter(|name| self.shown.as_deref() == Some(name));
        let outputs: BTreeSet<&str> = function.outputs().map(|value| value.name.as_str()).chain(shown).collect();
        let states: BTreeSet<&str> = function.states().map(|value| value.name.as_str()).collect();
        let own_states: BTreeSet<&str> = self.states.iter().map(|(name, _)| name.as_str()).collect();
        for (what, named, found) in [
            ("inputs", self.inputs.iter().map(String::as_str).collect(), inputs),
            ("outputs", self.outputs.iter().map(String::as_str).collect(), outputs),
            ("states", own_states, states),
        ] {
            if named != found {
                let (found, named) = (list(found), list(named));
                return Err(format!(
                    "function `{}` has the {what} {found}, but {FILE_NAME} names {named}",
                    self.function
                ));
            }
        }
        Ok(())
    }
}

/// Runs a bundle on the CPU executor in one precision.
pub struct CpuBackend {
    shared: Arc<Compiled>,
}

struct Compiled {
    programs: Arc<PackageStore>,
    options: CpuOptions,
    /// Whether every op runs unfused and can be observed.
    unfused: bool,
    executables: FunctionPool<usize, Executable>,
    idle: IdleStates,
}

impl CpuBackend {
    /// Creates a backend in a precision. Functions are compiled on their first call.
    pub fn new(programs: Arc<PackageStore>, precision: Precision) -> Self {
        Self::with(programs, &CpuOptions::new(precision), false)
    }

    /// Creates a backend that runs every op unfused, so that all values can be observed.
    pub fn unfused(programs: Arc<PackageStore>, precision: Precision) -> Self {
        Self::with(programs, &CpuOptions::new(precision), true)
    }

    fn with(programs: Arc<PackageStore>, options: &CpuOptions, unfused: bool) -> Self {
        let (executables, idle) = (FunctionPool::new(options.max_memory_bytes), IdleStates::default());
        CpuBackend { shared: Arc::new(Compiled { programs, options: *options, unfused, executables, idle }) }
    }

    /// Creates the backend of `bundle` with the calls and limits of the options.
    ///
    /// # Errors
    /// If a function's weights exceed the limit.
    pub fn within(bundle: &Bundle, programs: Arc<PackageStore>, options: &CpuOptions) -> Result<Self, RuntimeError> {
        check_limit(bundle, options.max_memory_bytes)?;
        Ok(Self::with(programs, options, false))
    }
}

impl Compiled {
    fn executable(&self, index: usize) -> Result<Arc<Executable>> {
        let weights = self.programs.signature(index)?.weights;
        self.executables.get(index, weights, |let_go| {
            if let_go {
                self.programs.packages.weights.release_unused();
            }
            self.programs.compile(index, self.options.precision, self.unfused)
        })
    }

    /// Keeps the states of a function in the precision of caches.
    fn keep_caches(&self, signature: &Signature, state: &mut State) {
        if self.options.caches == CachePrecision::F16 {
            signature.caches.iter().for_each(|id| state.hold_in_half_precision(id));
        }
    }
}

impl Backend for CpuBackend {
    fn prepare(&self, function: usize) -> Result<()> {
        self.shared.executable(function).map(drop)
    }

    fn has_room(&self, function: usize) -> bool {
        let signature = self.shared.programs.signature(function);
        signature.is_ok_and(|signature| self.shared.executables.has_room(signature.weights))
    }

    fn of_bundle(&self, bundle: &Bundle) -> Result<Option<Box<dyn Backend>>> {
        let Compiled { programs, options, unfused, .. } = &*self.shared;
        let options = CpuOptions { max_memory_bytes: None, ..*options };
        Ok(Some(Box::new(Self::with(programs.shared_with(bundle), &options, *unfused))))
    }

    fn sequence(&self) -> Result<Box<dyn Sequence>> {
        Ok(Box::new(CpuSequence { shared: self.shared.clone(), states: self.shared.idle.take() }))
    }

    fn run_batch(&self, function: usize, mut members: Vec<BatchMember<'_>>) -> Vec<BatchResult> {
        let shared = &self.shared;
        let own = members.iter_mut().all(|member| self.own(member.sequence).is_some());
        let (true, Ok(executable), Ok(signature)) =
            (own, shared.executable(function), shared.programs.signature(function))
        else {
            // returns the function's error for each member
            return run_each(function, members);
        };
        let call = |BatchMember { sequence, inputs }| {
            let state = self.own(sequence)?.state_of(function, signature, &executable);
            Some(SequenceCall { inputs: signature.named(inputs), state })
        };
        let ended = |result: Result<_, _>| match result {
            Ok(outputs) => Ok(signature.in_order(outputs)),
            Err(error) => Err(signature.failed(error).into()),
        };
        let calls = members.into_iter().filter_map(call).collect();
        executable.run_batch(calls).into_iter().map(ended).collect()
    }
}

impl CpuBackend {
    /// Returns the text's sequence if this backend created it.
    fn own<'a>(&self, sequence: &'a mut (dyn Sequence + 'static)) -> Option<&'a mut CpuSequence> {
        let sequence: &mut dyn Any = sequence;
        sequence.downcast_mut::<CpuSequence>().filter(|own| Arc::ptr_eq(&own.shared, &self.shared))
    }
}

/// States of a text.
#[derive(Clone)]
struct CpuSequence {
    shared: Arc<Compiled>,
    states: SequenceStates,
}

impl CpuSequence {
    /// Returns the states, including those of a function.
    fn state_of(&mut self, function: usize, signature: &Signature, executable: &Executable) -> &mut State {
        let SequenceStates { state, known } = &mut self.states;
        if known.insert(function) {
            let mut own = executable.new_state();
            self.shared.keep_caches(signature, &mut own);
            state.merge(own);
        }
        state
    }
}

impl Drop for CpuSequence {
    fn drop(&mut self) {
        self.shared.idle.give(std::mem::take(&mut self.states));
    }
}

impl Sequence for CpuSequence {
    fn run(&mut self, function: usize, inputs: &[&Tensor], watch: Option<Watch<'_>>) -> Result<Vec<Tensor>> {
        let shared = self.shared.clone();
        let executable = shared.executable(function)?;
        let signature = shared.programs.signature(function)?;
        let state = self.state_of(function, signature, &executable);
        let inputs: Vec<_> = signature.named(inputs.iter().copied());
        let outputs = match watch {
            Some(watch) => executable.run_with(&inputs, state, watch),
            None => executable.run(&inputs, state),
        };
        Ok(signature.in_order(outputs.map_err(|error| signature.failed(error))?))
    }

    fn run_into(&mut self, call: FunctionCall<'_>, outputs: &mut Vec<Arc<Tensor>>) -> Result<()> {
        let FunctionCall { function, inputs } = call;
        let shared = self.shared.clone();
        let executable = shared.executable(function)?;
        let signature = shared.programs.signature(function)?;
        let state = self.state_of(function, signature, &executable);
        let inputs: SmallVec<[_; 16]> = signature.named(inputs);
        executable.run_into(&inputs, state, outputs).map_err(|error| signature.failed(error))?;
        signature.sort(&executable, outputs);
        Ok(())
    }

    fn run_together(&mut self, calls: &[FunctionCall<'_>], outputs: &mut [Vec<Arc<Tensor>>]) -> Result<()> {
        run_in_turn(self, calls, outputs)
    }

    fn enter(&mut self, _phase: Phase) {}

    fn states(&self, function: usize) -> Result<Option<Vec<Arc<Tensor>>>> {
        let signature = self.shared.programs.signature(function)?;
        // functions for other numbers of tokens share them
        Ok(signature.states.iter().map(|(_, id)| self.states.state.get(id)).collect())
    }

    fn set_states(&mut self, function: usize, values: Vec<Tensor>) -> Result<()> {
        let shared = self.shared.clone();
        let signature = shared.programs.signature(function)?;
        // the first call of the function adds only what is missing
        signature.states.iter().zip(values).for_each(|((_, id), tensor)| self.states.state.set(id, tensor));
        shared.keep_caches(signature, &mut self.states.state);
        Ok(())
    }

    fn reset(&mut self) -> Result<()> {
        self.states.state.reset();
        Ok(())
    }

    fn fork(&self) -> Result<Option<Box<dyn Sequence>>> {
        Ok(Some(Box::new(self.clone())))
    }
}
