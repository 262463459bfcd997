//! Core ML through Apple's public interfaces and the objc2 crates.
//!
//! This module contains no logic: the meaning of plans, the shapes of calls and the caching of compiled models are in
//! modules that are tested everywhere. Objective-C exceptions become errors.

mod compile;
mod function;
mod machine;
mod plan;

use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::mpsc;

use block2::RcBlock;
use objc2::Message;
use objc2::rc::{Retained, autoreleasepool};
use objc2_core_ml::{MLComputeUnits, MLModelConfiguration};
use objc2_foundation::{NSError, NSString, NSURL};

use super::engine::Engine;
use super::error::CoreMlError;
use super::plan::{ComputeUnits, Machine, Operation};

/// Oldest supported macOS: it introduced states and functions.
const OLDEST: u32 = 15;

/// Core ML.
#[derive(Debug)]
pub struct CoreMl(());

impl CoreMl {
    /// Opens Core ML.
    ///
    /// # Errors
    /// [`CoreMlError::Unavailable`] on systems that are too old.
    pub fn new() -> Result<Self, CoreMlError> {
        let version = machine::os_version()?;
        match version.split('.').next().and_then(|major| major.parse::<u32>().ok()) {
            Some(major) if major >= OLDEST => Ok(CoreMl(())),
            _ => Err(CoreMlError::Unavailable(format!("macOS {OLDEST} or later is needed, this is {version}"))),
        }
    }
}

impl Engine for CoreMl {
    type Function = function::Function;

    fn machine(&self) -> Result<Machine, CoreMlError> {
        machine::machine()
    }

    fn compile(&self, package: &Path, target: &Path) -> Result<(), CoreMlError> {
        compile::compile(package, target)
    }

    fn plan(&self, model: &Path, units: ComputeUnits) -> Result<Vec<Operation>, CoreMlError> {
        plan::plan(model, units)
    }

    fn load(&self, model: &Path, function: Option<&str>, units: ComputeUnits) -> Result<Self::Function, CoreMlError> {
        function::Function::load(model, function, units)
    }
}

/// Current action, for errors.
#[derive(Clone, Copy)]
struct Task<'a> {
    action: &'static str,
    path: &'a Path,
}

impl Task<'_> {
    fn refused(self, problem: impl Into<String>) -> CoreMlError {
        CoreMlError::Refused { action: self.action, path: self.path.to_owned(), problem: problem.into() }
    }

    fn error(self, error: &NSError) -> CoreMlError {
        self.refused(format!("{} ({} {})", error.localizedDescription(), error.domain(), error.code()))
    }

    /// Runs code of Core ML: converts exceptions to errors and releases Objective-C's autoreleased objects.
    fn guard<T>(self, work: impl FnOnce() -> Result<T, CoreMlError>) -> Result<T, CoreMlError> {
        let caught = autoreleasepool(|_| objc2::exception::catch(AssertUnwindSafe(work)));
        caught.unwrap_or_else(|exception| {
            let text = exception.map_or_else(|| "an exception of no kind".into(), |e| e.to_string());
            Err(self.refused(text))
        })
    }

    /// Starts an operation with a completion handler and waits for it.
    fn wait<T: Message + 'static>(
        self,
        start: impl FnOnce(&block2::DynBlock<dyn Fn(*mut T, *mut NSError)>),
    ) -> Result<Retained<T>, CoreMlError> {
        let (sender, receiver) = mpsc::channel();
        let path = self.path.to_owned();
        let action = self.action;
        let handler = RcBlock::new(move |result: *mut T, error: *mut NSError| {
            let task = Task { action, path: &path };
            // SAFETY: Core ML hands the handler a valid object or nil; it is retained before the handler returns.
            let outcome = match unsafe { Retained::retain(result) } {
                Some(result) => Ok(Sent(result)),
                // SAFETY: as above.
                None => Err(match unsafe { error.as_ref() } {
                    Some(error) => task.error(error),
                    None => task.refused("it gave neither a result nor an error"),
                }),
            };
            // the receiver waits; if it is gone, nobody wants the result
            let _ = sender.send(outcome);
        });
        start(&handler);
        // drop the handler, which owns the sender: otherwise a handler that is never called would block forever
        drop(handler);
        match receiver.recv() {
            Ok(outcome) => outcome.map(|sent| sent.0),
            Err(_) => Err(self.refused("it dropped the request")),
        }
    }
}

/// Object on its way from Core ML's queue to the waiting thread.
struct Sent<T>(Retained<T>);

// SAFETY: the only reference that this side has goes through a channel once; the queue that sends it keeps none.
unsafe impl<T> Send for Sent<T> {}

fn url(path: &Path) -> Result<Retained<NSURL>, CoreMlError> {
    let task = Task { action: "open", path };
    NSURL::from_directory_path(path).ok_or_else(|| task.refused("the path can't be made a URL"))
}

fn configuration(units: ComputeUnits, function: Option<&str>) -> Retained<MLModelConfiguration> {
    let units = match units {
        ComputeUnits::CpuOnly => MLComputeUnits::CPUOnly,
        ComputeUnits::CpuAndGpu => MLComputeUnits::CPUAndGPU,
        ComputeUnits::CpuAndNeuralEngine => MLComputeUnits::CPUAndNeuralEngine,
        ComputeUnits::All => MLComputeUnits::All,
    };
    // SAFETY: a new object of ours, on one thread; the values are of the types that the setters take.
    unsafe {
        let configuration = MLModelConfiguration::new();
        configuration.setComputeUnits(units);
        if let Some(function) = function {
            configuration.setFunctionName(Some(&NSString::from_str(function)));
        }
        configuration
    }
}
