//! The Python of a bridge. It starts in half a second, so it takes one asset after another; its program ends when none
//! comes for a while.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use serde_json::{Value as Json, json};

use super::{BridgeArray, BridgeElements};

/// The child's program.
const PROGRAM: &str = include_str!("../bridge.py");
/// Lines of the child's messages that an error quotes.
const QUOTED_LINES: usize = 6;
/// Maximum number of children without an asset.
const MAX_IDLE: usize = 4;

/// Children without an asset.
static IDLE: Mutex<Vec<Process>> = Mutex::new(Vec::new());

/// Child process.
pub(super) struct Process {
    child: Child,
    to: Option<BufWriter<ChildStdin>>,
    from: BufReader<ChildStdout>,
    said: Arc<Mutex<VecDeque<String>>>,
    listener: Option<JoinHandle<()>>,
    python: PathBuf,
    system: bool,
    /// Whether it has answered everything without an error.
    sound: bool,
}

impl Process {
    /// Takes a child that has no asset.
    pub fn idle(python: &Path, system: bool) -> Option<Process> {
        let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain_mut(|process| process.child.try_wait().is_ok_and(|status| status.is_none()));
        let fits = |process: &Process| process.python == python && process.system == system;
        idle.iter().position(fits).map(|place| idle.swap_remove(place))
    }

    /// Starts a child.
    pub fn start(python: &Path, system: bool) -> std::io::Result<Process> {
        let mut command = Command::new(python);
        command.args(["-c", PROGRAM]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if system {
            command.env("USE_OS_COREAI", "1");
        }
        let mut child = command.spawn()?;
        let (to, from) = (child.stdin.take().map(BufWriter::new), child.stdout.take());
        let said = Arc::<Mutex<VecDeque<String>>>::default();
        let listener = child.stderr.take().map(|stderr| {
            let said = said.clone();
            std::thread::spawn(move || listen(stderr, &said))
        });
        let from = BufReader::new(from.ok_or(std::io::ErrorKind::BrokenPipe)?);
        Ok(Process { child, to, from, said, listener, python: python.to_owned(), system, sound: true })
    }

    #[cfg(test)]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a request with its arrays, and returns the answer with its.
    pub fn ask(&mut self, request: Json, arrays: &[BridgeArray]) -> Result<(Json, Vec<BridgeArray>), String> {
        // a child that is gone may have said why: a Python without the package answers before it is asked
        let _ = self.send(request, arrays);
        let answer = self.receive();
        self.sound &= answer.is_ok();
        answer
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

    fn receive(&mut self) -> Result<(Json, Vec<BridgeArray>), String> {
        let mut line = Vec::new();
        match self.from.read_until(b'\n', &mut line) {
            Ok(0) => return Err(self.ended("it ended")),
            Ok(_) => {}
            Err(error) => return Err(self.ended(&error.to_string())),
        }
        let answer: Json = serde_json::from_slice(&line).map_err(|e| format!("no answer: {e}"))?;
        if let Some(problem) = answer.get("error").and_then(Json::as_str) {
            return Err(problem.to_owned());
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

    /// Returns the last words of a child that is gone.
    fn ended(&mut self, what: &str) -> String {
        self.to = None;
        let status = self.child.wait().map_or_else(|e| e.to_string(), |status| status.to_string());
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
        let said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let lines: Vec<&str> = said.iter().map(String::as_str).collect();
        format!("{what} ({status}): {}", lines.join(" | "))
    }

    /// Closes the asset and keeps the child for another, unless something went wrong in it.
    pub fn release(mut self) {
        if !self.sound || self.ask(json!({"do": "close"}), &[]).is_err() {
            return;
        }
        let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < MAX_IDLE {
            idle.push(self);
        }
    }
}

impl Drop for Process {
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
