//! Apple's runtime in a child process: a Python with `coreai-core` loads an asset and computes calls.

mod process;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anec_base::{Diagnostic, Fault, Result};
use serde::Deserialize;
use serde_json::{Value as Json, json};

use process::Process;

/// Imports of the child's program.
const IMPORTS: &str = "import numpy, coreai.authoring, coreai.runtime";
/// Names the Python to use where no option does.
const PYTHON_VARIABLE: &str = "ANEC_PYTHON";
/// Package of Apple's runtime, in the version that was tried.
const PACKAGE: &str = "coreai-core==1.0.0b3";

/// Errors of Apple's runtime and of starting it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BridgeError {
    /// The Python can't be started.
    #[error("{}: can't start: {source}", .python.display())]
    NoPython {
        /// The program.
        python: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// The Python lacks Apple's package.
    #[error("{}: no Core AI runtime: {problem}", .python.display())]
    NoRuntime {
        /// The program.
        python: PathBuf,
        /// Error of the import.
        problem: String,
    },
    /// The runtime refused something, or ended.
    #[error("Apple's Core AI runtime, {}: {problem}", .asset.display())]
    Runtime {
        /// The asset.
        asset: PathBuf,
        /// Message of the runtime.
        problem: String,
    },
}

impl Diagnostic for BridgeError {
    fn fault(&self) -> Fault {
        match self {
            BridgeError::NoPython { .. } | BridgeError::NoRuntime { .. } => Fault::Platform,
            BridgeError::Runtime { .. } => Fault::Source,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            BridgeError::NoPython { .. } | BridgeError::NoRuntime { .. } => Some(format!(
                "name a Python 3.11 or newer in {PYTHON_VARIABLE}, and install `pip install {PACKAGE} numpy` in it"
            )),
            BridgeError::Runtime { .. } => None,
        }
    }
}

/// Which Core AI runs an asset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BridgeOptions {
    /// The Python; that of `ANEC_PYTHON`, else `python3`, if absent.
    pub python: Option<PathBuf>,
    /// The system's Core AI instead of the package's own CPU runtime: a Mac with OS 27.
    pub system: bool,
    /// The kind of compute unit that the system shall prefer, as Apple's package names it: `cpu`, `gpu`,
    /// `neural_engine`; or `cpu_only`.
    pub units: Option<String>,
}

impl BridgeOptions {
    /// Options for this machine: the system's Core AI on a Mac, the package's CPU runtime elsewhere.
    pub fn of_machine(python: Option<PathBuf>) -> Self {
        BridgeOptions { python, system: cfg!(target_os = "macos"), units: None }
    }

    /// Checks that the Python has Apple's package.
    ///
    /// # Errors
    /// [`BridgeError::NoPython`] and [`BridgeError::NoRuntime`].
    pub fn check(&self) -> Result<()> {
        let python = self.python();
        let found = Command::new(&python).args(["-c", IMPORTS]).stdin(Stdio::null()).output();
        let found = found.map_err(|source| BridgeError::NoPython { python: python.clone(), source })?;
        if found.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&found.stderr);
        let problem = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it ended").to_owned();
        Err(BridgeError::NoRuntime { python, problem }.into())
    }

    fn python(&self) -> PathBuf {
        let named = || std::env::var_os(PYTHON_VARIABLE).filter(|name| !name.is_empty()).map(PathBuf::from);
        self.python.clone().or_else(named).unwrap_or_else(|| "python3".into())
    }
}

/// A value of a function, as the runtime describes it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct DescribedValue {
    /// Name.
    pub name: String,
    /// Element type: `float16`, `int32`, …
    pub dtype: String,
    /// Shape; -1 is a dynamic dimension.
    pub shape: Vec<i64>,
}

/// A function, as the runtime describes it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct DescribedFunction {
    /// Name.
    pub name: String,
    /// Inputs.
    pub inputs: Vec<DescribedValue>,
    /// States.
    pub states: Vec<DescribedValue>,
    /// Outputs.
    pub outputs: Vec<DescribedValue>,
}

/// Elements of an array on its way.
#[derive(Clone, Debug, PartialEq)]
pub enum BridgeElements {
    /// Floats of any width.
    Floats(Vec<f32>),
    /// Integers and booleans.
    Integers(Vec<i32>),
}

/// An array on its way.
#[derive(Clone, Debug, PartialEq)]
pub struct BridgeArray {
    /// Name of the input, output or state.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// Elements.
    pub elements: BridgeElements,
}

/// A call of a function.
#[derive(Clone, Debug)]
pub struct BridgeCall<'a> {
    /// Name.
    pub function: &'a str,
    /// The text whose states it works on.
    pub sequence: u64,
    /// Inputs.
    pub inputs: Vec<BridgeArray>,
    /// Names of the states, with the keys under which functions share them.
    pub states: Vec<(String, String)>,
    /// Names of the outputs that are wanted.
    pub outputs: Vec<String>,
}

/// An asset in Apple's runtime.
pub struct Bridge {
    /// Absent only while it is dropped.
    process: Option<Process>,
    asset: PathBuf,
    functions: Vec<DescribedFunction>,
}

impl Bridge {
    /// Loads an asset.
    ///
    /// # Errors
    /// [`BridgeError`] without a Python or its package, or for an asset that the runtime refuses.
    pub fn open(asset: &Path, options: &BridgeOptions) -> Result<Bridge> {
        let python = options.python();
        let path = asset.canonicalize().unwrap_or_else(|_| asset.to_owned());
        let request = json!({"asset": path, "system": options.system, "units": options.units});
        // one that waited too long is gone
        let idle = Process::idle(&python, options.system)
            .and_then(|mut process| process.ask(request.clone(), &[]).ok().map(|(answer, _)| (process, answer)));
        let (process, answer) = match idle {
            Some(loaded) => loaded,
            None => {
                let process = Process::start(&python, options.system);
                let mut process = process.map_err(|source| BridgeError::NoPython { python: python.clone(), source })?;
                let answer = process.ask(request, &[]);
                let problem = |problem| BridgeError::Runtime { asset: asset.to_owned(), problem };
                (process, answer.map_err(problem)?.0)
            }
        };
        if let Some(problem) = answer.get("missing").and_then(Json::as_str) {
            return Err(BridgeError::NoRuntime { python, problem: problem.to_owned() }.into());
        }
        let functions = answer.get("functions").cloned().unwrap_or_default();
        let mut bridge = Bridge { process: Some(process), asset: asset.to_owned(), functions: Vec::new() };
        bridge.functions = serde_json::from_value(functions).map_err(|e| bridge.failed(e.to_string()))?;
        Ok(bridge)
    }

    /// The asset's functions.
    pub fn functions(&self) -> &[DescribedFunction] {
        &self.functions
    }

    /// Runs a function; gives the outputs in the order of their names in the call.
    ///
    /// # Errors
    /// [`BridgeError::Runtime`] with what the runtime says.
    pub fn call(&mut self, call: &BridgeCall<'_>) -> Result<Vec<BridgeArray>> {
        let request = json!({
            "do": "call",
            "function": call.function,
            "sequence": call.sequence,
            "states": call.states,
            "outputs": call.outputs,
        });
        self.ask(request, &call.inputs)
    }

    /// Returns the contents of a text's states, without those that no call has used.
    ///
    /// # Errors
    /// As [`call`](Bridge::call).
    pub fn states(&mut self, sequence: u64, keys: &[&str]) -> Result<Vec<BridgeArray>> {
        self.ask(json!({"do": "show", "sequence": sequence, "keys": keys}), &[])
    }

    /// Puts values into states of a text, in half precision.
    ///
    /// # Errors
    /// As [`call`](Bridge::call).
    pub fn set_states(&mut self, sequence: u64, states: &[BridgeArray]) -> Result<()> {
        self.ask(json!({"do": "keep", "sequence": sequence}), states).map(drop)
    }

    /// Copies the states of a text to another.
    ///
    /// # Errors
    /// As [`call`](Bridge::call).
    pub fn copy(&mut self, sequence: u64, to: u64) -> Result<()> {
        self.ask(json!({"do": "copy", "sequence": sequence, "to": to}), &[]).map(drop)
    }

    /// Forgets the states of a text.
    ///
    /// # Errors
    /// As [`call`](Bridge::call).
    pub fn forget(&mut self, sequence: u64) -> Result<()> {
        self.ask(json!({"do": "forget", "sequence": sequence}), &[]).map(drop)
    }

    fn ask(&mut self, request: Json, arrays: &[BridgeArray]) -> Result<Vec<BridgeArray>> {
        let Some(process) = &mut self.process else { return Err(self.failed("it is closed".into()).into()) };
        match process.ask(request, arrays) {
            Ok((_, arrays)) => Ok(arrays),
            Err(problem) => Err(self.failed(problem).into()),
        }
    }

    /// Number of the Python's process.
    #[cfg(test)]
    pub(crate) fn process(&self) -> Option<u32> {
        self.process.as_ref().map(Process::id)
    }

    fn failed(&self, problem: String) -> BridgeError {
        BridgeError::Runtime { asset: self.asset.clone(), problem }
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        if let Some(process) = self.process.take() {
            process.release();
        }
    }
}
