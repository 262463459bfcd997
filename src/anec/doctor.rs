//! What this machine can do, and what is missing for the rest.

use std::path::{Path, PathBuf};

use serde::Serialize;

use anec_base::{FileError, Result};
use anec_convert::compile::Compiler;
use anec_convert::error::ConvertError;
use anec_coreml::{CoreMl, Engine};
use anec_exec::{processor, threads};
use anec_experiment::probe::{Placement, ProbeVariant, place};
use anec_package::available_space;

use crate::cache::BundleCache;

/// What was found of a machine.
#[derive(Clone, Debug, Serialize)]
pub struct MachineReport {
    /// The version of anec.
    pub anec_version: &'static str,
    /// Operating system and architecture.
    pub system: String,
    /// Processor cores.
    pub cores: usize,
    /// What of the processor the executor uses: vector units, and instructions that multiply bytes.
    pub processor: Vec<&'static str>,
    /// Threads that the executor computes with.
    pub threads: usize,
    /// Folder of what is kept between runs, if the environment names one.
    pub cache: Option<PathBuf>,
    /// Free bytes on the disk of the current folder.
    pub free_bytes: Option<u64>,
    /// The Mac, where it is one.
    pub machine: Option<String>,
    /// What it can do.
    pub abilities: Vec<Ability>,
    /// Which forms of weights and states the Neural Engine took, where that was tried.
    pub placement: Vec<Placement>,
}

/// Something that a machine can do, or can't.
#[derive(Clone, Debug, Serialize)]
pub struct Ability {
    /// What.
    pub what: &'static str,
    /// Whether it can.
    pub works: bool,
    /// What it works with, or what is missing.
    pub because: String,
}

impl Ability {
    fn of(what: &'static str, works: std::result::Result<String, String>) -> Self {
        Ability { what, works: works.is_ok(), because: works.unwrap_or_else(|missing| missing) }
    }
}

impl MachineReport {
    /// Looks at this machine. `self_test` has small programs show which forms of weights and states the Neural Engine
    /// takes, where there is one; that takes about 30 seconds.
    ///
    /// # Errors
    /// When Core ML is there and fails.
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
            Ability::of("judge a saved compute plan", Ok("`anec validate --plan FILE`".into())),
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
