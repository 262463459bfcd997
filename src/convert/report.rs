//! `report.json`: measurements of a conversion. Unlike the rest of a bundle it differs from run to run, because it has
//! times; nothing depends on it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use anec_manifest::{Granularity, Manifest, QuantOverride, QuantPlan, Role, WeightFormat};
use anec_quant::Loss;

/// File name within a bundle's folder.
pub const FILE_NAME: &str = "report.json";

/// JSON Schema of `report.json`.
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(ConvertReport).into()
}

/// Measurements of a conversion.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ConvertReport {
    /// Version of anec that converted.
    pub anec_version: String,
    /// Name of the model.
    pub name: String,
    /// Time, memory and bytes of the whole run.
    pub run: RunReport,
    /// Packages.
    pub packages: Vec<PackageReport>,
    /// Notes for the user: one sentence each.
    #[serde(default)]
    pub notes: Vec<String>,
    /// Calibration that chose codes, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<CalibrationReport>,
    /// Quality of the converted model, if measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quality: Option<QualityReport>,
    /// Reasons for the formats of roles and layers, if a budget chose them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<PlanReport>,
}

impl ConvertReport {
    /// Returns the report for publication: file names without folders of this machine.
    pub fn portable(mut self) -> Self {
        if let Some(plan) = &mut self.plan
            && let Ok(manifest) = Manifest::from_yaml(&plan.manifest, FILE_NAME, &[])
        {
            plan.manifest = manifest.portable().to_yaml();
        }
        self
    }
}

/// Quality of a converted model: its logits against those of the source's own weights, both in f32.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct QualityReport {
    /// Tokens of the built-in text.
    pub tokens: u64,
    /// Mean KL divergence of the next-token probabilities, in nats.
    pub kl: f64,
    /// Fraction of positions with the same most likely token.
    pub top1: f64,
    /// First percentile of the logits' cosines.
    pub p1: f64,
    /// Smallest cosine of the logits.
    pub cosine: f64,
    /// Thresholds of the parity gate that are missed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missed: Vec<String>,
    /// Time of the measurement in seconds.
    pub seconds: f64,
}

/// Formats chosen under a budget, with the reasons.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PlanReport {
    /// Budget.
    pub budget: QuantPlan,
    /// Tokens of the text for measuring losses.
    pub tokens: u64,
    /// Estimated loss of all choices in nats: the sum of the individual losses.
    pub kl: f64,
    /// Bits per weight of projections.
    pub bits: f64,
    /// Bytes of all packages' weights.
    pub weight_bytes: u64,
    /// All roles and layers with a choice.
    pub groups: Vec<PlannedGroup>,
    /// Equivalent manifest without a plan, as YAML.
    pub manifest: String,
}

/// Weights of a role in a layer, with the cost of each number format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PlannedGroup {
    /// Role of the weights.
    pub role: Role,
    /// Layer; absent for the LM head.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<usize>,
    /// Number of weights.
    pub weights: u64,
    /// Cost of each format, usually from large to small.
    pub formats: Vec<FormatCost>,
    /// Index of the chosen format.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chosen: Option<usize>,
}

/// Cost of a number format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FormatCost {
    /// Format, in the terms of a manifest.
    pub format: QuantOverride,
    /// Bytes of elements, scales and palettes.
    pub bytes: u64,
    /// Mean KL divergence of the next-token probabilities from the unquantized model's, in nats, with only these
    /// weights in this format.
    pub kl: f64,
}

/// Calibration of codes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CalibrationReport {
    /// Tokens of the text.
    pub tokens: u64,
    /// Weights with chosen codes.
    pub weights: usize,
    /// Quantized weights that were rounded to nearest, by source key, because their inputs were not observed or are too
    /// many.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rounded: Vec<String>,
    /// Packages of one layer, or of the head, that an earlier run had finished.
    #[serde(default)]
    pub resumed_packages: usize,
    /// Time of running the text and choosing codes, in seconds. A resumed run counts from its resumption.
    pub seconds: f64,
    /// Peak memory of second moments and their factors in bytes; hidden states come on top.
    pub moments_bytes: u64,
    /// Bytes of the text's hidden states, kept from layer to layer.
    pub hidden_bytes: u64,
    /// Bytes of codes and fp16 weights in a scratch folder beside the bundle.
    pub scratch_bytes: u64,
}

/// Time, memory and bytes of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RunReport {
    /// Bytes of the source's files.
    pub source_bytes: u64,
    /// Bytes of the bundle.
    pub bundle_bytes: u64,
    /// Elapsed time in seconds. A resumed run counts from its resumption.
    pub seconds: f64,
    /// Processor time of all threads, in seconds.
    pub cpu_seconds: f64,
    /// Peak memory in bytes.
    pub peak_memory_bytes: u64,
    /// Number of threads.
    pub threads: usize,
    /// Packages that an earlier, interrupted run had finished.
    pub resumed_packages: usize,
}

/// Measurements of a package.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PackageReport {
    /// Folder name within the bundle.
    pub package: String,
    /// Bytes of the weight file.
    pub weight_bytes: u64,
    /// Time to build and write the package, in seconds.
    pub seconds: f64,
    /// Weights in the order in which functions use them.
    pub tensors: Vec<TensorReport>,
}

/// Measurements of a weight.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TensorReport {
    /// Name in the first function that uses it.
    pub name: String,
    /// Source tensors that it consists of.
    pub tensors: Vec<String>,
    /// Role.
    pub role: Role,
    /// Shape in the package.
    pub shape: Vec<u64>,
    /// Number format.
    pub weights: WeightFormat,
    /// Granularity of scales or palettes, if the weight is quantized.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub granularity: Option<Granularity>,
    /// Whether the product's rows are multiplied by a scale.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub row_scale: bool,
    /// Whether integers and zero points are the source's, and scales its own in fp16.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub kept: bool,
    /// Bytes of elements, scales and palettes.
    pub bytes: u64,
    /// Bits per weight.
    #[serde(default)]
    pub bits_per_weight: f64,
    /// Error of the conversion.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss: Option<Loss>,
}

impl ConvertReport {
    /// Quantized weights, largest error first.
    pub fn worst(&self) -> Vec<&TensorReport> {
        let error = |t: &TensorReport| t.loss.map_or(0.0, |loss| loss.relative_rms_error);
        let mut quantized: Vec<_> =
            self.packages.iter().flat_map(|p| &p.tensors).filter(|t| t.weights != WeightFormat::None).collect();
        quantized.sort_by(|a, b| error(b).total_cmp(&error(a)).then_with(|| a.name.cmp(&b.name)));
        quantized
    }
}
