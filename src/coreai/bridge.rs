//! Apple's runtime in a child process: a Python with `coreai-core` loads an asset and computes calls.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use anec_base::{Diagnostic, Fault, Result};
use serde::Deserialize;
use serde_json::{Value as Json, json};

/// The child's program.
const PROGRAM: &str = include_str!("bridge.py");
/// Imports of the child's program.
const IMPORTS: &str = "import numpy, coreai.authoring, coreai.runtime";
/// Names the Python to use where no option does.
const PYTHON_VARIABLE: &str = "ANEC_PYTHON";
/// Package of Apple's runtime, in the version that was tried.
const PACKAGE: &str = "coreai-core==1.0.0b3";
/// Lines of the child's messages that an error quotes.
const QUOTED_LINES: usize = 6;

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
    child: Child,
    to: Option<BufWriter<ChildStdin>>,
    from: BufReader<ChildStdout>,
    asset: PathBuf,
    functions: Vec<DescribedFunction>,
    said: Arc<Mutex<VecDeque<String>>>,
    listener: Option<JoinHandle<()>>,
}

impl Bridge {
    /// Loads an asset.
    ///
    /// # Errors
    /// [`BridgeError`] without a Python or its package, or for an asset that the runtime refuses.
    pub fn open(asset: &Path, options: &BridgeOptions) -> Result<Bridge> {
        let python = options.python();
        let mut command = Command::new(&python);
        command.args(["-c", PROGRAM]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if options.system {
            command.env("USE_OS_COREAI", "1");
        }
        let refused = |source| BridgeError::NoPython { python: python.clone(), source };
        let mut child = command.spawn().map_err(refused)?;
        let (to, from) = (child.stdin.take().map(BufWriter::new), child.stdout.take());
        let said = Arc::<Mutex<VecDeque<String>>>::default();
        let listener = child.stderr.take().map(|stderr| {
            let said = said.clone();
            std::thread::spawn(move || listen(stderr, &said))
        });
        let Some(from) = from.map(BufReader::new) else {
            return Err(refused(std::io::ErrorKind::BrokenPipe.into()).into());
        };
        let mut bridge = Bridge { child, to, from, asset: asset.to_owned(), functions: Vec::new(), said, listener };
        let path = asset.canonicalize().unwrap_or_else(|_| asset.to_owned());
        let request = json!({"asset": path, "system": options.system, "units": options.units});
        // a Python without the package answers before it is asked
        let _ = bridge.send(request, &[]);
        let (answer, _) = bridge.receive()?;
        if let Some(problem) = answer.get("missing").and_then(Json::as_str) {
            return Err(BridgeError::NoRuntime { python, problem: problem.to_owned() }.into());
        }
        let functions = answer.get("functions").cloned().unwrap_or_default();
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
        if let Err(error) = self.send(request, arrays) {
            return Err(self.ended(&error.to_string()).into());
        }
        Ok(self.receive()?.1)
    }

    fn send(&mut self, mut request: Json, arrays: &[BridgeArray]) -> std::io::Result<()> {
        let described = arrays.iter().map(|array| {
            let kind = if matches!(array.elements, BridgeElements::Floats(_)) { "f" } else { "i" };
            json!({"name": array.name, "kind": kind, "shape": array.shape})
        });
        request["arrays"] = described.collect();
        let Some(to) = &mut self.to else { return Err(std::io::ErrorKind::BrokenPipe.into()) };
        serde_json::to_writer(&mut *to, &request)?;
        to.write_all(b"\n")?;
        for array in arrays {
            match &array.elements {
                BridgeElements::Floats(values) => write_words(to, values, |value| value.to_le_bytes())?,
                BridgeElements::Integers(values) => write_words(to, values, |value| value.to_le_bytes())?,
            }
        }
        to.flush()
    }

    fn receive(&mut self) -> Result<(Json, Vec<BridgeArray>)> {
        let mut line = Vec::new();
        match self.from.read_until(b'\n', &mut line) {
            Ok(0) => return Err(self.ended("it ended").into()),
            Ok(_) => {}
            Err(error) => return Err(self.ended(&error.to_string()).into()),
        }
        let answer: Json = serde_json::from_slice(&line).map_err(|e| self.failed(format!("no answer: {e}")))?;
        if let Some(problem) = answer.get("error").and_then(Json::as_str) {
            return Err(self.failed(problem.to_owned()).into());
        }
        let mut arrays = Vec::new();
        for of in answer.get("arrays").and_then(Json::as_array).into_iter().flatten() {
            let shape: Vec<usize> = serde_json::from_value(of["shape"].clone()).unwrap_or_default();
            let mut bytes = vec![0; 4 * shape.iter().product::<usize>()];
            self.from.read_exact(&mut bytes).map_err(|error| self.ended(&error.to_string()))?;
            let words = bytes.as_chunks().0.iter();
            let elements = match of["kind"].as_str() {
                Some("f") => BridgeElements::Floats(words.map(|word| f32::from_le_bytes(*word)).collect()),
                _ => BridgeElements::Integers(words.map(|word| i32::from_le_bytes(*word)).collect()),
            };
            arrays.push(BridgeArray { name: of["name"].as_str().unwrap_or_default().to_owned(), shape, elements });
        }
        Ok((answer, arrays))
    }

    fn failed(&self, problem: String) -> BridgeError {
        BridgeError::Runtime { asset: self.asset.clone(), problem }
    }

    /// The error of a child that is gone: what it said last.
    fn ended(&mut self, what: &str) -> BridgeError {
        self.to = None;
        let status = self.child.wait().map_or_else(|e| e.to_string(), |status| status.to_string());
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
        let said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let lines: Vec<&str> = said.iter().map(String::as_str).collect();
        self.failed(format!("{what} ({status}): {}", lines.join(" | ")))
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        // the child ends with its input
        self.to = None;
        let _ = self.child.wait();
    }
}

fn write_words<T: Copy>(to: &mut impl Write, values: &[T], bytes: impl Fn(T) -> [u8; 4]) -> std::io::Result<()> {
    values.iter().try_for_each(|value| to.write_all(&bytes(*value)))
}

/// Keeps the last lines of the child's stderr, without the runtime's line for each loaded function.
fn listen(stderr: impl Read, said: &Mutex<VecDeque<String>>) {
    for line in BufReader::new(stderr).split(b'\n').map_while(std::io::Result::ok) {
        let line = String::from_utf8_lossy(&line).trim().to_owned();
        if line.is_empty() || line.starts_with("ODIE ") {
            continue;
        }
        let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.len() == QUOTED_LINES {
            said.pop_front();
        }
        said.push_back(line);
    }
}
