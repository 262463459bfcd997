//! Mamba-2, and Falcon-H1's multipliers of all blocks.

use serde::Serialize;
use serde_json::Value as Json;

use super::keys::Keys;
use crate::error::FamilyError;
use crate::row::{DecoderFamily, MixerKind};

/// Largest step that fp16 can hold.
const MAX_STEP: f64 = half::f16::MAX.to_f64_const();

/// Shape of Mamba-2.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Mamba2Config {
    /// Number of heads.
    pub num_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Number of groups of heads that share B and C.
    pub num_groups: u64,
    /// Width of B and of C.
    pub state_size: u64,
    /// Width of the convolution in tokens.
    pub kernel: u64,
    /// Whether the convolution has a bias.
    pub conv_bias: bool,
    /// Whether the input projection has a bias.
    pub input_bias: bool,
    /// Whether the output projection has a bias.
    pub output_bias: bool,
    /// Place of the norm on the heads' outputs.
    pub norm: Mamba2Norm,
    /// Bounds of steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step_limit: Option<[f64; 2]>,
}

/// Place of the norm on the heads' outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mamba2Norm {
    /// No norm.
    None,
    /// Before the gate.
    BeforeGate,
    /// After the gate.
    BehindGate,
}

impl Mamba2Config {
    /// Channels of all heads.
    pub fn width(&self) -> u64 {
        self.num_heads * self.head_dim
    }

    /// Channels of x, B and C, which pass through the convolution.
    pub fn mixed(&self) -> u64 {
        self.width() + 2 * self.num_groups * self.state_size
    }

    /// Reads the shape, if the family has Mamba-2.
    pub(super) fn read(keys: &Keys<'_>, family: &DecoderFamily, hidden_size: u64) -> Result<Option<Self>, FamilyError> {
        let beside_attention = match family.attention.mixer {
            MixerKind::Mamba2 => false,
            MixerKind::AttentionAndMamba2 => true,
            _ => return Ok(None),
        };
        let size = |key: &str, default: u64| if keys.get(key).is_some() { keys.size(key) } else { Ok(default) };
        let flag = |key: &str, default: bool| Ok(keys.bool(key)?.unwrap_or(default));
        let expanded = || -> Result<u64, FamilyError> {
            match keys.f64("mamba_expand")?.unwrap_or(2.0) {
                expand if expand > 0.0 && expand < 1e4 => Ok((expand * hidden_size as f64) as u64),
                _ => Err(keys.value("mamba_expand", "more than 0")),
            }
        };
        let width = match keys.has("mamba_d_ssm") && keys.get("mamba_d_ssm").is_none() {
            false if beside_attention => size("mamba_d_ssm", 1024)?,
            _ => expanded()?,
        };
        let num_heads = size("mamba_n_heads", 128)?;
        if !width.is_multiple_of(num_heads) {
            return Err(keys.value("mamba_n_heads", &format!("a divisor of {width} channels")));
        }
        let head_dim = width / num_heads;
        if keys.get("mamba_d_head").is_some_and(|given| given != "auto" && given.as_u64() != Some(head_dim)) {
            return Err(keys.value("mamba_d_head", &format!("{head_dim}, for {num_heads} heads of {width} channels")));
        }
        let num_groups = size("mamba_n_groups", 1)?;
        if !num_heads.is_multiple_of(num_groups) {
            return Err(keys.value("mamba_n_groups", &format!("a divisor of {num_heads} heads")));
        }
        let kernel = size("mamba_d_conv", 4)?;
        if !(2..=64).contains(&kernel) {
            return Err(keys.value("mamba_d_conv", "from 2 to 64"));
        }
        let input_bias = flag("mamba_proj_bias", false)?;
        Ok(Some(Mamba2Config {
            num_heads,
            head_dim,
            num_groups,
            state_size: size("mamba_d_state", 256)?,
            kernel,
            conv_bias: flag("mamba_conv_bias", true)?,
            input_bias,
            output_bias: if beside_attention { flag("projectors_bias", false)? } else { input_bias },
            norm: if !beside_attention {
                Mamba2Norm::BehindGate
            } else {
                match (flag("mamba_rms_norm", false)?, flag("mamba_norm_before_gate", true)?) {
                    (false, _) => Mamba2Norm::None,
                    (true, true) => Mamba2Norm::BeforeGate,
                    (true, false) => Mamba2Norm::BehindGate,
                }
            },
            step_limit: step_limit(keys)?,
        }))
    }
}

/// Bounds of steps; `None` if they include every step.
fn step_limit(keys: &Keys<'_>) -> Result<Option<[f64; 2]>, FamilyError> {
    let Some(given) = keys.get("time_step_limit") else { return Ok(None) };
    // transformers writes infinity as an object
    let number = |value: &Json| match value["__float__"].as_str() {
        Some("Infinity") => Some(f64::INFINITY),
        _ => value.as_f64(),
    };
    let limits: Option<Vec<f64>> = given.as_array().and_then(|list| list.iter().map(number).collect());
    match limits.as_deref() {
        Some([least, most]) if *least <= 0.0 && *most > MAX_STEP => Ok(None),
        Some([least, most]) if *least >= 0.0 && least < most && *least < MAX_STEP => {
            Ok(Some([*least, most.min(MAX_STEP)]))
        }
        _ => Err(keys.value("time_step_limit", "two numbers from 0 on, the smaller one first")),
    }
}

/// Multipliers of blocks' inputs and outputs and of the logits, folded into the weights (arXiv:2507.22448).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BlockMultipliers {
    /// Attention's input.
    pub attention_in: f64,
    /// Keys.
    pub key: f64,
    /// Attention's output.
    pub attention_out: f64,
    /// Mamba-2's input.
    pub ssm_in: f64,
    /// Mamba-2's z, x, B, C and steps.
    pub ssm: [f64; 5],
    /// Mamba-2's output.
    pub ssm_out: f64,
    /// Gate of the feed-forward network, before the activation.
    pub mlp_gate: f64,
    /// Output of the feed-forward network.
    pub mlp_out: f64,
    /// Logits.
    pub lm_head: f64,
}

impl BlockMultipliers {
    /// Reads the multipliers; `None` if the family has none or all are 1.
    pub(super) fn read(keys: &Keys<'_>, family: &DecoderFamily) -> Result<Option<Self>, FamilyError> {
        if family.attention.mixer != MixerKind::AttentionAndMamba2 {
            return Ok(None);
        }
        let one = |key: &str| Ok(keys.f64(key)?.unwrap_or(1.0));
        let [mlp_gate, mlp_out] = several(keys, "mlp_multipliers")?;
        let read = BlockMultipliers {
            attention_in: one("attention_in_multiplier")?,
            key: one("key_multiplier")?,
            attention_out: one("attention_out_multiplier")?,
            ssm_in: one("ssm_in_multiplier")?,
            ssm: several(keys, "ssm_multipliers")?,
            ssm_out: one("ssm_out_multiplier")?,
            mlp_gate,
            mlp_out,
            lm_head: one("lm_head_multiplier")?,
        };
        Ok(Some(read).filter(|read| *read != BlockMultipliers::ONES))
    }

    const ONES: BlockMultipliers = BlockMultipliers {
        attention_in: 1.0,
        key: 1.0,
        attention_out: 1.0,
        ssm_in: 1.0,
        ssm: [1.0; 5],
        ssm_out: 1.0,
        mlp_gate: 1.0,
        mlp_out: 1.0,
        lm_head: 1.0,
    };
}

fn several<const N: usize>(keys: &Keys<'_>, key: &str) -> Result<[f64; N], FamilyError> {
    let Some(list) = keys.f64s(key)? else { return Ok([1.0; N]) };
    list.try_into().map_err(|_| keys.value(key, &format!("{N} numbers")))
}
