//! `report.json`: what a conversion measured. Unlike the rest of a bundle it isn't the same from run to run, because it
//! holds times; nothing depends on it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use anec_manifest::{Granularity, Role, WeightFormat};
use anec_quant::Loss;

/// File name within a bundle's folder.
pub const FILE_NAME: &str = "report.json";

/// JSON Schema of `report.json`.
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(ConvertReport).into()
}

/// What a conversion measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ConvertReport {
    /// Version of anec that converted.
    pub anec_version: String,
    /// Name of the model.
    pub name: String,
    /// Time, memory and bytes of the whole run.
    pub run: RunReport,
    /// Each package.
    pub packages: Vec<PackageReport>,
    /// What the user should know: one sentence each.
    #[serde(default)]
    pub notes: Vec<String>,
    /// How codes were chosen, if by a calibration text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<CalibrationReport>,
}

/// How codes were chosen.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CalibrationReport {
    /// Tokens of the text.
    pub tokens: u64,
    /// Weights whose codes were chosen.
    pub weights: usize,
    /// Weights that were rounded to the nearest although they are quantized, by the key of their source: nothing was seen
    /// of their inputs, or they have too many.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rounded: Vec<String>,
    /// Time to run the text and to choose the codes, in seconds.
    pub seconds: f64,
    /// Largest memory of second moments and their factors at any time, in bytes; hidden states of the text beside it.
    pub moments_bytes: u64,
    /// Bytes of the hidden states of the text, which are kept from layer to layer.
    pub hidden_bytes: u64,
    /// Bytes of the codes and of the weights in fp16, in a folder beside the bundle while it is made.
    pub scratch_bytes: u64,
}

/// Time, memory and bytes of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RunReport {
    /// Bytes of the source's files.
    pub source_bytes: u64,
    /// Bytes of the bundle.
    pub bundle_bytes: u64,
    /// Time from start to end, in seconds. A resumed run counts from its resumption.
    pub seconds: f64,
    /// Processor time of all threads, in seconds.
    pub cpu_seconds: f64,
    /// Largest memory in use at any time, in bytes.
    pub peak_memory_bytes: u64,
    /// Threads that converted.
    pub threads: usize,
    /// Packages that an earlier, interrupted run had finished.
    pub resumed_packages: usize,
}

/// One package.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PackageReport {
    /// Folder name within the bundle.
    pub package: String,
    /// Bytes of its weight file.
    pub weight_bytes: u64,
    /// Time to build and write it, in seconds.
    pub seconds: f64,
    /// Its weights, in the order in which functions use them.
    pub tensors: Vec<TensorReport>,
}

/// One weight.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TensorReport {
    /// Name in the function that uses it first.
    pub name: String,
    /// Tensors of the source that it is made of.
    pub tensors: Vec<String>,
    /// What it does.
    pub role: Role,
    /// Shape in the package.
    pub shape: Vec<u64>,
    /// Number format.
    pub weights: WeightFormat,
    /// How many weights share one scale or palette, if it is quantized.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub granularity: Option<Granularity>,
    /// Whether products of rows are multiplied by a scale.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub row_scale: bool,
    /// Bytes of elements, scales and palettes.
    pub bytes: u64,
    /// The same in bits, for each weight.
    #[serde(default)]
    pub bits_per_weight: f64,
    /// What the conversion lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss: Option<Loss>,
}

impl ConvertReport {
    /// Quantized weights, those that lost most first.
    pub fn worst(&self) -> Vec<&TensorReport> {
        let error = |t: &TensorReport| t.loss.map_or(0.0, |loss| loss.relative_rms_error);
        let mut quantized: Vec<_> =
            self.packages.iter().flat_map(|p| &p.tensors).filter(|t| t.weights != WeightFormat::None).collect();
        quantized.sort_by(|a, b| error(b).total_cmp(&error(a)).then_with(|| a.name.cmp(&b.name)));
        quantized
    }
}
