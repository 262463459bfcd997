//! `report.json`: what a conversion measured. Unlike the rest of a bundle it isn't the same from run to run, because it
//! holds times; nothing depends on it.

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
    /// Why roles and layers have the formats that they have, if a budget decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<PlanReport>,
}

impl ConvertReport {
    /// The report as it is given to others: files are named without the folders of this machine.
    pub fn portable(mut self) -> Self {
        if let Some(plan) = &mut self.plan
            && let Ok(manifest) = Manifest::from_yaml(&plan.manifest, FILE_NAME, &[])
        {
            plan.manifest = manifest.portable().to_yaml();
        }
        self
    }
}

/// Formats that were chosen under a budget, and why.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PlanReport {
    /// The budget.
    pub budget: QuantPlan,
    /// Tokens of the text that losses were measured on.
    pub tokens: u64,
    /// What the choices lose together, in nats: the sum of what each loses alone.
    pub kl: f64,
    /// Bits for each weight of a projection.
    pub bits: f64,
    /// Bytes of all packages' weights.
    pub weight_bytes: u64,
    /// Every role of every layer that was chosen for.
    pub groups: Vec<PlannedGroup>,
    /// The manifest that says the same without a plan, as YAML.
    pub manifest: String,
}

/// The weights of a role in a layer, and what each number format costs there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PlannedGroup {
    /// What they do.
    pub role: Role,
    /// Their layer; none for the LM head.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<usize>,
    /// How many they are.
    pub weights: u64,
    /// What each format costs, the most accurate ones being larger as a rule.
    pub formats: Vec<FormatCost>,
    /// Which of these was chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chosen: Option<usize>,
}

/// What a number format costs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FormatCost {
    /// The format, in the words of a manifest.
    pub format: QuantOverride,
    /// Bytes of elements, scales and palettes.
    pub bytes: u64,
    /// Mean divergence of the next token's probabilities from the model's that isn't quantized, in nats, where these
    /// weights alone are in this format.
    pub kl: f64,
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
    /// Packages of one layer, or of the head, that an earlier run had finished.
    #[serde(default)]
    pub resumed_packages: usize,
    /// Time to run the text and to choose the codes, in seconds. A resumed run counts from its resumption.
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
