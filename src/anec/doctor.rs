//! Capabilities of this machine.

use std::path::{Path, PathBuf};

use serde::Serialize;

use anec_base::{FileError, Result};
use anec_convert::ConvertError;
use anec_convert::compile::Compiler;
use anec_coreml::{CoreMl, Engine};
use anec_exec::{processor, threads};
use anec_experiment::probe::{Placement, ProbeVariant, place};
use anec_package::available_space;

use crate::cache::BundleCache;

/// Report on a machine.
#[derive(Clone, Debug, Serialize)]
pub struct MachineReport {
    /// Version of anec.
    pub anec_version: &'static str,
    /// Operating system and architecture.
    pub system: String,
    /// Processor cores.
    pub cores: usize,
    /// Processor features that the executor uses: vector units, and instructions that multiply bytes.
    pub processor: Vec<String>,
    /// Number of executor threads.
    pub threads: usize,
    /// Cache folder, if the environment names one.
    pub cache: Option<PathBuf>,
    /// Free bytes on the disk of the current folder.
    pub free_bytes: Option<u64>,
    /// Model of the Mac, on a Mac.
    pub machine: Option<String>,
    /// Capabilities.
    pub abilities: Vec<Ability>,
    /// Forms of weights and states that the Neural Engine took, if tried.
    pub placement: Vec<Placement>,
}

/// Capability that a machine has or lacks.
#[derive(Clone, Debug, Serialize)]
pub struct Ability {
    /// Description.
    pub what: &'static str,
    /// Whether the machine has it.
    pub works: bool,
    /// Means by which it works, or what is missing.
    pub because: String,
}

impl Ability {
    fn of(what: &'static str, works: std::result::Result<String, String>) -> Self {
        Ability { what, works: works.is_ok(), because: works.unwrap_or_else(|missing| missing) }
    }
}

impl MachineReport {
    /// Examines this machine. `self_test` runs small programs on the Neural Engine, if there is one, to see which forms
    /// of weights and states it takes; that needs about 30 seconds.
    ///
    /// # Errors
    /// If Core ML is available and fails.
    pub fn take(self_test: bool) -> Result<Self> {
        let core_ml = CoreMl::new();
        let engine = |with: &str| match &core_ml {
            Ok(_) => Ok(with.to_owned()),
            Err(error) => Err(error.to_string()),
        };
        let compiler = match Compiler::find() {
            Ok(_) => Ok("coremlcompiler of Xcode".into()),
            Err(ConvertError::NoCompiler(why)) => Err(why),
            Err(error) => Err(error.to_string()),
        };
        let abilities = vec![
            Ability::of(
                "convert; validate structure, numerics and parity; run on the CPU",
                Ok("needs nothing else".into()),
            ),
            Ability::of("compile packages (.mlmodelc)", compiler),
            Ability::of("judge a saved compute plan", Ok("needs nothing else".into())),
            Ability::of("read compute plans (residency)", engine("MLComputePlan")),
            Ability::of("run on the Neural Engine", engine("Core ML")),
        ];
        let (mut machine, mut placement) = (None, Vec::new());
        if let Ok(engine) = &core_ml {
            machine = Some(engine.machine()?.to_string());
            if self_test {
                let room = tempfile::tempdir().map_err(FileError::of(std::env::temp_dir(), "create a folder in"))?;
                placement = ProbeVariant::all()
                    .map(|form| place(engine, form, room.path()))
                    .collect::<Result<Vec<Placement>>>()?;
            }
        }
        Ok(MachineReport {
            anec_version: env!("CARGO_PKG_VERSION"),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            processor: processor(),
            threads: threads(),
            cache: BundleCache::from_env().ok().map(|cache| cache.folder().to_owned()),
            free_bytes: available_space(Path::new(".")),
            machine,
            abilities,
            placement,
        })
    }
}
