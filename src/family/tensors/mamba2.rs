//! Weights of Mamba-2 and of attention beside it.

use super::{Naming, Tensors};
use crate::blocks::attention::Attention;
use crate::blocks::causal_conv::CausalConv;
use crate::blocks::linear::Linear;
use crate::blocks::mamba2::Mamba2;
use crate::blocks::norm::Norm;
use crate::config::{BlockMultipliers, Mamba2Config, Mamba2Norm};
use anec_base::Result;
use anec_manifest::Role;
use anec_source::SourceWeight;

impl Tensors<'_, '_> {
    pub(super) fn mamba2(&mut self, index: usize) -> Result<Mamba2> {
        let Some(config) = self.config.mamba2 else { return Err(self.missing_mixer(index, "Mamba-2")) };
        let (hidden, width, heads) = (self.config.hidden_size, config.width(), config.num_heads);
        let because = "mamba_n_heads, mamba_d_head, mamba_n_groups, mamba_d_state, hidden_size";
        let rows = width + config.mixed() + heads;
        let weight = self.layer_matrix(index, "mamba.in_proj", rows, hidden, because)?;
        let has_bias = self.has_bias(config.input_bias, index, "mamba.in_proj");
        let bias = has_bias.then(|| self.layer_bias(index, "mamba.in_proj", rows)).transpose()?;
        let (weight, bias) = match self.config.block_multipliers {
            None => (weight, bias),
            Some(factors) => {
                let behind = row_factors(config, factors)?;
                let bias = bias.map(|bias| bias.multiply_rows(&behind)).transpose()?;
                (weight.scale_rows(&behind)?.scale(factors.ssm_in as f32), bias)
            }
        };
        let part = |name, role, first: u64, count: u64| -> Result<Linear> {
            let range = first..first + count;
            let bias = bias.as_ref().map(|bias| bias.slice(range.clone())).transpose()?;
            Ok(Linear { name, role, weight: weight.slice(range)?, bias })
        };
        let gate = part("gate_proj", Role::AttentionQkv, 0, width)?;
        let inputs = part("xbc_proj", Role::AttentionQkv, width, config.mixed())?;
        let step = part("step_proj", Role::Table, width + config.mixed(), heads)?;

        let conv = self.conv_weight(index, "mamba.conv1d", config.mixed(), config.kernel, "mamba_d_conv")?;
        let conv_bias = config.conv_bias.then(|| self.layer_bias(index, "mamba.conv1d", config.mixed())).transpose()?;
        let step_bias = self.layer_name(index, "mamba.dt_bias");
        let step_bias = self.take(&step_bias, &[heads], "mamba_n_heads")?;
        // GGUF files have matrices of one column
        let mut by_head = |name: &str| -> Result<SourceWeight> {
            let name = self.layer_name(index, name);
            Ok(self.take_any(&name, &[&[heads], &[heads, 1]], "mamba_n_heads")?.reshape(&[heads])?)
        };
        let (mut rate, skip) = (by_head("mamba.A_log")?, by_head("mamba.D")?);
        if self.naming == Naming::HuggingFace {
            rate = rate.exp().scale(-1.0); // GGUF files hold that already
        }
        let norm = match config.norm {
            Mamba2Norm::None => None,
            Mamba2Norm::BeforeGate | Mamba2Norm::BehindGate => {
                let name = format!("{}.weight", self.layer_name(index, "mamba.norm"));
                let shapes: [&[u64]; 2] = [&[width], &[config.num_groups, width / config.num_groups]];
                let weight = self.take_any(&name, &shapes, "mamba_n_heads, mamba_d_head")?.reshape(&[width])?;
                Some(Norm::root_mean_square("norm", weight, 0.0, self.config.rms_norm_eps))
            }
        };
        let mut output = Linear {
            name: "out_proj",
            role: Role::AttentionOutput,
            weight: self.layer_matrix(index, "mamba.out_proj", hidden, width, because)?,
            bias: match self.has_bias(config.output_bias, index, "mamba.out_proj") {
                true => Some(self.layer_bias(index, "mamba.out_proj", hidden)?),
                false => None,
            },
        };
        if let Some(factors) = self.config.block_multipliers {
            multiply(&mut output, factors.ssm_out, factors.ssm_out);
        }
        Ok(Mamba2 {
            gate,
            inputs,
            step,
            conv: CausalConv { weight: conv, bias: conv_bias },
            step_bias,
            step_limit: config.step_limit,
            rate,
            skip,
            norm,
            norm_before_gate: config.norm == Mamba2Norm::BeforeGate,
            output,
            num_heads: heads,
            head_dim: config.head_dim,
            num_groups: config.num_groups,
            state_size: config.state_size,
        })
    }

    /// Takes attention with the multipliers of its input, keys and output folded into the weights.
    pub(super) fn multiplied_attention(&mut self, index: usize) -> Result<Attention> {
        let mut attention = self.attention(index)?;
        if let Some(factors) = self.config.block_multipliers {
            multiply(&mut attention.query, factors.attention_in, 1.0);
            if let Some(key) = &mut attention.key {
                multiply(key, factors.attention_in * factors.key, factors.key);
            }
            if let Some(value) = &mut attention.value {
                multiply(value, factors.attention_in, 1.0);
            }
            multiply(&mut attention.output, factors.attention_out, factors.attention_out);
        }
        Ok(attention)
    }
}

/// Multiplies the weights of a projection by one factor and its bias by another.
fn multiply(linear: &mut Linear, of_weight: f64, of_bias: f64) {
    linear.weight = linear.weight.scale(of_weight as f32);
    linear.bias = linear.bias.as_ref().map(|bias| bias.scale(of_bias as f32));
}

/// Factor of every row of the input projection: z, x, B, C, steps.
fn row_factors(config: Mamba2Config, factors: BlockMultipliers) -> Result<SourceWeight> {
    let shared = config.num_groups * config.state_size;
    let rows = [config.width(), config.width(), shared, shared, config.num_heads];
    let values: Vec<f32> =
        rows.iter().zip(factors.ssm).flat_map(|(rows, factor)| vec![factor as f32; *rows as usize]).collect();
    Ok(SourceWeight::from_values("ssm_multipliers", &[values.len() as u64], values)?)
}
