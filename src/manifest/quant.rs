//! Weight quantization.

use std::collections::BTreeMap;
use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Role of a weight in the model; decides how it may be quantized.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
    strum::Display,
    strum::EnumIter,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Role {
    /// Query, key and value projections of attention, where they have no role of their own, and its gate. Input
    /// projections of other token mixers.
    AttentionQkv,
    /// Query projection of attention; as `attention_qkv` unless named.
    AttentionQ,
    /// Key projection of attention; as `attention_qkv` unless named.
    AttentionK,
    /// Value projection of attention; as `attention_qkv` unless named.
    AttentionV,
    /// Output projection of attention.
    AttentionOutput,
    /// Gate and up projections of the feed-forward network.
    MlpUp,
    /// Down projection of the feed-forward network.
    MlpDown,
    /// Projections of experts.
    Expert,
    /// LM head.
    LmHead,
    /// Expert routers; never quantized.
    Router,
    /// Norm gains; never quantized.
    Norm,
    /// Biases; never quantized.
    Bias,
    /// Tables and other small tensors; never quantized.
    Table,
    /// Token embedding, which the host reads; never quantized.
    Embedding,
}

impl Role {
    /// Roles of projections.
    pub const PROJECTIONS: [Role; 9] = [
        Role::AttentionQkv,
        Role::AttentionQ,
        Role::AttentionK,
        Role::AttentionV,
        Role::AttentionOutput,
        Role::MlpUp,
        Role::MlpDown,
        Role::Expert,
        Role::LmHead,
    ];

    /// Whether weights of this role are projections, the only ones that may be quantized.
    pub fn is_projection(self) -> bool {
        Role::PROJECTIONS.contains(&self)
    }

    /// Role whose exceptions apply where this one has none.
    pub fn group(self) -> Role {
        match self {
            Role::AttentionQ | Role::AttentionK | Role::AttentionV => Role::AttentionQkv,
            role => role,
        }
    }
}

/// Weight quantization.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Quant {
    /// Number format of projection weights.
    pub weights: WeightFormat,
    /// Number of weights that share a scale or a palette.
    pub granularity: Granularity,
    /// Whether rows are divided by their own scale before their palette is computed; the product is multiplied by it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub row_scale: bool,
    /// Op that dequantizes int8 weights.
    #[serde(skip_serializing_if = "Int8Op::is_default")]
    pub op: Int8Op,
    /// How the codes of quantized weights are chosen. Default: `none`, or `gptq` where a converted model of at most a
    /// billion weights would fail its parity gate without; if int8 fails even so, roles that lose most stay in fp16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub feedback: Option<Feedback>,
    /// Treatment of weights above fp16's largest number.
    #[serde(skip_serializing_if = "Overflow::is_default")]
    pub overflow: Overflow,
    /// Exceptions by role.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub overrides: BTreeMap<Role, QuantOverride>,
    /// Exceptions by role for ranges of layers; the last matching entry applies.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<QuantLayers>,
    /// Budget under which formats are chosen for all roles and layers that `overrides` and `layers` don't name.
    /// Replaces the formats above.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<QuantPlan>,
}

impl Quant {
    /// Whether codes are chosen with a calibration text.
    pub fn is_calibrated(&self) -> bool {
        self.feedback == Some(Feedback::Gptq) && self.formats().any(|format| format.weights != WeightFormat::None)
    }

    /// All formats in use: of every role, and of those that differ in single layers.
    pub fn formats(&self) -> impl Iterator<Item = NumberFormat> {
        let own = self.layers.iter().flat_map(|own| own.overrides.keys().map(|role| (*role, Some(own.range[0]))));
        Role::PROJECTIONS.into_iter().map(|role| (role, None)).chain(own).map(|(role, layer)| self.of(role, layer))
    }

    /// Number format of a role's weights in a layer, or in layers without exceptions if `None`.
    pub fn of(&self, role: Role, layer: Option<usize>) -> NumberFormat {
        if !role.is_projection() {
            return NumberFormat::FP16;
        }
        let of_role = |overrides: &BTreeMap<Role, QuantOverride>| {
            let of = |role| overrides.get(&role).copied().unwrap_or_default();
            of(role).or(of(role.group()))
        };
        let is_of_layer = |own: &&QuantLayers| layer.is_some_and(|layer| (own.range[0]..own.range[1]).contains(&layer));
        let of_layers = self.layers.iter().filter(is_of_layer).map(|own| of_role(&own.overrides));
        let own = of_layers.fold(of_role(&self.overrides), |own, later| later.or(own));
        let weights = own.weights.unwrap_or(self.weights);
        if weights == WeightFormat::None {
            return NumberFormat::FP16;
        }
        NumberFormat {
            weights,
            granularity: own.granularity.unwrap_or(self.granularity),
            row_scale: own.row_scale.unwrap_or(self.row_scale),
            op: own.op.unwrap_or(self.op),
        }
    }
}

/// How the codes of quantized weights are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Feedback {
    /// Each weight is rounded to the nearest number.
    None,
    /// The error of each weight is compensated in the remaining weights of its row (GPTQ), which minimizes the error of
    /// the products with the calibration text's inputs.
    Gptq,
}

/// Exceptions for one role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct QuantOverride {
    /// Number format.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<WeightFormat>,
    /// Number of weights that share a scale or a palette.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub granularity: Option<Granularity>,
    /// Whether rows have a scale beside their palette.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub row_scale: Option<bool>,
    /// Op that dequantizes int8 weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub op: Option<Int8Op>,
}

impl QuantOverride {
    /// Fills missing values from `other`.
    fn or(self, other: QuantOverride) -> QuantOverride {
        QuantOverride {
            weights: self.weights.or(other.weights),
            granularity: self.granularity.or(other.granularity),
            row_scale: self.row_scale.or(other.row_scale),
            op: self.op.or(other.op),
        }
    }
}

/// Exceptions for roles of some layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct QuantLayers {
    /// First layer, and one past the last.
    pub range: [usize; 2],
    /// Exceptions by role.
    pub overrides: BTreeMap<Role, QuantOverride>,
}

/// Budget under which number formats are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum QuantPlan {
    /// Maximum bits per projection weight, scales and palettes included.
    Bits(f64),
    /// Maximum megabytes of all packages' weights, without the host's embedding.
    MaxMb(f64),
    /// Maximum KL divergence from the unquantized model in nats, estimated as the sum of each role's and layer's own.
    Kl(f64),
}

/// Storage format of a role's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NumberFormat {
    /// Number format.
    pub weights: WeightFormat,
    /// Number of weights that share a scale or a palette.
    pub granularity: Granularity,
    /// Whether rows have a scale beside their palette.
    pub row_scale: bool,
    /// Op that dequantizes int8 weights.
    pub op: Int8Op,
}

impl NumberFormat {
    /// Unquantized.
    pub const FP16: NumberFormat = NumberFormat {
        weights: WeightFormat::None,
        granularity: Granularity::PerTensor,
        row_scale: false,
        op: Int8Op::Auto,
    };

    /// Key, problem and remedy if the combination can't be stored.
    pub(crate) fn problem(&self) -> Option<(&'static str, String, &'static str)> {
        let weights = self.weights;
        let palette = weights.palette_bits().is_some();
        let wrong = |key, problem: &str, remedy| Some((key, format!("{problem} with `weights: {weights}`"), remedy));
        match self.granularity {
            _ if weights == WeightFormat::None => None,
            Granularity::Group(0) | Granularity::Block(0) => {
                wrong("granularity", "0, expected at least 1", "use 16 or 32")
            }
            Granularity::PerChannel | Granularity::Block(_) if palette => {
                let remedy = "palettes are shared by a tensor or by rows: use `per_tensor`, `{ group: 16 }`, or \
                              `row_scale: true` beside them";
                wrong("granularity", &format!("{} can't be", self.granularity), remedy)
            }
            Granularity::Group(_) if !palette => {
                let remedy = "scales are shared by a tensor, a channel or a block: use `per_tensor`, `per_channel` or \
                              `{ block: 32 }`";
                wrong("granularity", "rows that share a palette can't be", remedy)
            }
            _ if self.row_scale && !palette => {
                wrong("row_scale", "scales of rows can't be", "use `granularity: per_channel`, or `row_scale: false`")
            }
            Granularity::Block(_) if self.op == Int8Op::Affine => {
                wrong("op", "`affine` has no scales of blocks and can't be", "use `op: blockwise`, or `per_channel`")
            }
            _ if self.op == Int8Op::Affine && weights == WeightFormat::Int4 => {
                wrong("op", "`affine` takes bytes only and can't be", "use `op: blockwise`, or `weights: int8`")
            }
            _ => None,
        }
    }
}

impl fmt::Display for NumberFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.weights == WeightFormat::None {
            return f.write_str("fp16");
        }
        write!(f, "{} {}", self.weights, self.granularity)?;
        f.write_str(if self.row_scale { " with row scales" } else { "" })
    }
}

/// Treatment of weights above fp16's largest number, 65504.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Overflow {
    /// Fails the conversion and names the weight.
    #[default]
    Error,
    /// Clamps them to 65504; the report counts them.
    Saturate,
}

impl Overflow {
    fn is_default(&self) -> bool {
        *self == Overflow::default()
    }
}

/// Number format of projection weights.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
    strum::Display,
    strum::EnumIter,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum WeightFormat {
    /// 8-bit integers, symmetric around zero.
    #[default]
    Int8,
    /// 4-bit integers, symmetric around zero.
    Int4,
    /// 8-bit indices into a palette of 256 numbers.
    Palette8,
    /// 6-bit indices into a palette of 64 numbers.
    Palette6,
    /// 4-bit indices into a palette of 16 numbers.
    Palette4,
    /// 3-bit indices into a palette of 8 numbers.
    Palette3,
    /// 2-bit indices into a palette of 4 numbers.
    Palette2,
    /// 1-bit indices into a palette of 2 numbers.
    Palette1,
    /// Unquantized fp16.
    None,
}

impl WeightFormat {
    /// Bits of one element.
    pub fn bits(self) -> u32 {
        match self {
            WeightFormat::None => 16,
            WeightFormat::Int8 => 8,
            WeightFormat::Int4 => 4,
            palette => palette.palette_bits().unwrap_or(16),
        }
    }

    /// Bits of a palette index; `None` for other formats.
    pub fn palette_bits(self) -> Option<u32> {
        match self {
            WeightFormat::Palette8 => Some(8),
            WeightFormat::Palette6 => Some(6),
            WeightFormat::Palette4 => Some(4),
            WeightFormat::Palette3 => Some(3),
            WeightFormat::Palette2 => Some(2),
            WeightFormat::Palette1 => Some(1),
            WeightFormat::Int8 | WeightFormat::Int4 | WeightFormat::None => None,
        }
    }
}

/// Number of weights that share a scale or a palette.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Granularity {
    /// Whole tensor.
    #[default]
    PerTensor,
    /// One output channel.
    PerChannel,
    /// Number of output channels that share a palette. If it doesn't divide the number of channels, the next smaller
    /// divisor is used.
    Group(u64),
    /// Number of input channels of one output channel that share a scale. If it doesn't divide the number of channels,
    /// the next smaller divisor is used.
    Block(u64),
}

impl fmt::Display for Granularity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Granularity::PerTensor => f.write_str("per tensor"),
            Granularity::PerChannel => f.write_str("per channel"),
            Granularity::Group(rows) => write!(f, "per group of {rows}"),
            Granularity::Block(columns) => write!(f, "per block of {columns}"),
        }
    }
}

/// Op that dequantizes int8 weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Int8Op {
    /// Chosen by anec: `blockwise` at present.
    #[default]
    Auto,
    /// `constexpr_affine_dequantize`, which is older and supported by more chips.
    Affine,
    /// `constexpr_blockwise_shift_scale`.
    Blockwise,
}

impl Int8Op {
    fn is_default(&self) -> bool {
        *self == Int8Op::default()
    }
}
