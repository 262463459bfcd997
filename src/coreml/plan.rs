//! Compute plans of Core ML: `plan.json`. Taken on a Mac, judged anywhere.
//!
//! A plan (`MLComputePlan`) describes the default function and the default shape of a model. So each function and each
//! number of tokens has its own plan here, taken from a package whose default they are.

mod coremltools;

use anec_base::json;
use std::fmt;
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::error::CoreMlError;
use coremltools::CoremltoolsPlan;

/// Version of the schema; readers refuse others.
pub const SCHEMA_VERSION: u32 = 1;

/// The plans of all functions of a bundle, with where they were taken.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ComputePlan {
    /// Version of this schema.
    pub schema_version: u32,
    /// Version of anec that took it.
    pub anec_version: String,
    /// Name of the bundle.
    pub bundle: String,
    /// When it was taken: `2026-11-21T13:00:00Z`.
    pub date: String,
    /// Where it was taken.
    pub machine: Machine,
    /// Compute units that the functions were loaded for.
    pub compute_units: ComputeUnits,
    /// The packages that it speaks of.
    pub packages: Vec<PackageDigest>,
    /// A plan for each function and number of tokens.
    pub functions: Vec<FunctionPlan>,
}

/// The Mac.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Machine {
    /// Model identifier: `Mac16,8`.
    pub model: String,
    /// Chip: `Apple M4 Pro`.
    pub chip: String,
    /// macOS version: `15.6`.
    pub os_version: String,
    /// macOS build: `24G84`. Placement changes between builds.
    pub os_build: String,
    /// Cores of the Neural Engine; none where Core ML sees no Neural Engine, as in a virtual machine.
    pub neural_engine_cores: Option<u32>,
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { model, chip, os_version, os_build, neural_engine_cores } = self;
        write!(f, "{chip} ({model}), macOS {os_version} ({os_build}), ")?;
        match neural_engine_cores {
            Some(cores) => write!(f, "Neural Engine of {cores} cores"),
            None => write!(f, "no Neural Engine"),
        }
    }
}

/// Devices that a model may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema, strum::Display)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "kebab-case")]
pub enum ComputeUnits {
    /// The CPU and the Neural Engine: never the GPU.
    CpuAndNeuralEngine,
    /// The CPU alone.
    CpuOnly,
    /// The CPU and the GPU.
    CpuAndGpu,
    /// Whatever Core ML likes best.
    All,
}

/// The state of a package that a plan was taken of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PackageDigest {
    /// Folder name within the bundle.
    pub package: String,
    /// SHA-256 of the listing of its files: a line for each, in the order of their paths, with the SHA-256 of the file,
    /// two spaces, its path below the package's folder with `/`, and a newline (what `sha256sum` prints).
    pub sha256: String,
}

/// Where the ops of one function run in calls of one number of tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FunctionPlan {
    /// Package that holds the function.
    pub package: String,
    /// Name within the package.
    pub function: String,
    /// Number of tokens of a call. For models without a bundle, the size of the flexible dimension. `None` for fixed
    /// shapes, or for the default shape.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
    /// Ops, in their order.
    pub operations: Vec<Operation>,
    /// Error of Core ML if it refused to compile, plan or run the function.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// How long calls took, if that was measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub timings: Vec<Timing>,
}

/// One op of a compiled function.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Operation {
    /// The operator as Core ML names it: `ios18.conv`, `const`, …
    pub operator: String,
    /// Names of its results.
    pub outputs: Vec<String>,
    /// The device that Core ML prefers; none where it plans nothing for the op.
    pub preferred: Option<Device>,
    /// The devices that could run it.
    pub supported: Vec<Device>,
    /// Share of the function's work, 0 to 1, as Core ML estimates it.
    pub cost: Option<f64>,
    /// Nested blocks (of `cond` and `while_loop`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<Vec<Operation>>,
}

impl Operation {
    /// Returns the operator without the opset: `conv` for `ios18.conv`.
    pub fn bare_operator(&self) -> &str {
        self.operator.rsplit('.').next().unwrap_or(&self.operator)
    }
}

/// Device of an op.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema, strum::Display,
)]
#[serde(rename_all = "snake_case")]
pub enum Device {
    /// The CPU.
    #[strum(to_string = "CPU")]
    Cpu,
    /// The GPU.
    #[strum(to_string = "GPU")]
    Gpu,
    /// The Neural Engine.
    #[strum(to_string = "Neural Engine")]
    NeuralEngine,
    /// Unknown device.
    #[strum(to_string = "unknown device")]
    Unknown,
}

/// How long calls of a function took.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Timing {
    /// Compute units that the function was loaded for.
    pub compute_units: ComputeUnits,
    /// Milliseconds of each call, without the first ones.
    pub milliseconds: Vec<f64>,
}

/// Maximum size of a plan in bytes; ops take some hundred bytes each.
const MAX_BYTES: u64 = 1 << 28;

impl ComputePlan {
    /// Reads a plan, in this schema or in the form of coremltools' `MLComputePlan`.
    ///
    /// # Errors
    /// If the file can't be read, or isn't a plan of this version.
    pub fn read(path: &Path) -> Result<Self, CoreMlError> {
        let text = anec_base::input::read(path, MAX_BYTES)
            .map_err(|e| CoreMlError::plan(path, format!("can't be read: {}", e.error)))?;
        let wrong = |problem: String| CoreMlError::plan(path, problem);
        let json: serde_json::Value = json::read(&text).map_err(|e| wrong(format!("it isn't JSON: {e}")))?;
        if json["format"] == coremltools::FORMAT {
            let plan: CoremltoolsPlan = json::read_value(&json).map_err(|e| wrong(e.to_string()))?;
            return plan.into_plan().map_err(wrong);
        }
        // check the version first: other versions can have other fields
        match json.get("schema_version").and_then(serde_json::Value::as_u64) {
            Some(version) if version == u64::from(SCHEMA_VERSION) => {}
            Some(version) => return Err(wrong(format!("schema version {version}, expected {SCHEMA_VERSION}"))),
            None => return Err(wrong("no `schema_version`: this is no compute plan".into())),
        }
        json::read_value(&json).map_err(|e| wrong(e.to_string()))
    }
}

/// Returns the SHA-256 of a listing of files, each with its path and digest (see [`PackageDigest`]).
pub fn listing_digest<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let mut files: Vec<(&str, &str)> = files.into_iter().collect();
    files.sort_unstable();
    let mut hasher = Sha256::new();
    for (path, digest) in files {
        hasher.update(format!("{digest}  {path}\n"));
    }
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the JSON Schema of `plan.json`.
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(ComputePlan).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_files_are_refused_by_what_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plan.json");
        let refused = |text: &str| {
            std::fs::write(&path, text).unwrap();
            let error = ComputePlan::read(&path).unwrap_err();
            error.to_string().rsplit_once("plan.json: ").unwrap().1.to_owned()
        };
        assert!(refused("plan").starts_with("it isn't JSON: "));
        assert_eq!(refused("{}"), "no `schema_version`: this is no compute plan");
        assert_eq!(refused(r#"{"schema_version": 2}"#), "schema version 2, expected 1");
        assert_eq!(refused(r#"{"schema_version": 1}"#), "`anec_version` is missing");
        let missing = ComputePlan::read(&folder.path().join("no.json")).unwrap_err();
        assert!(missing.to_string().contains("can't be read"), "{missing}");
    }
}
