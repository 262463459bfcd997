//! Weights of token mixers.

use std::ops::Range;

use super::{Naming, Tensors};
use crate::blocks::attention::Attention;
use crate::blocks::causal_conv::CausalConv;
use crate::blocks::cca::Cca;
use crate::blocks::delta_net::DeltaNet;
use crate::blocks::linear::Linear;
use crate::blocks::norm::Norm;
use crate::blocks::short_conv::ShortConv;
use crate::config::{CcaConfig, DeltaNetConfig, LayerConfig, ShortConvConfig};
use crate::error::FamilyError;
use crate::row::{QkNorm, QkvLayout, RopePairs};
use anec_base::Result;
use anec_manifest::Role;
use anec_source::{RowOrder, SourceWeight};

impl Tensors<'_, '_> {
    pub(super) fn attention(&mut self, index: usize) -> Result<Attention> {
        let config = self.config;
        let (query_rows, key_rows) = (config.query_width(index), config.key_width(index));
        let LayerConfig { value_is_key, keys_of, .. } = config.layers[index];
        let gates = if config.gated_attention { 2 } else { 1 };
        let fused = self.is_fused(index);
        let (query, key, value) = if fused {
            let because = "(num_attention_heads + 2 num_key_value_heads) head_dim, hidden_size";
            let rows = query_rows + 2 * key_rows;
            let all = self.layer_matrix(index, "self_attn.qkv_proj", rows, config.hidden_size, because)?;
            let [query, key, value] = self.unfused(index, &all)?;
            (query, Some(key), Some(value))
        } else {
            let query_because = "num_attention_heads head_dim, hidden_size";
            let key_because = "num_key_value_heads head_dim, hidden_size";
            let query =
                self.layer_matrix(index, "self_attn.q_proj", gates * query_rows, config.hidden_size, query_because)?;
            let mut own = |name: &str, there: bool| {
                there.then(|| self.layer_matrix(index, name, key_rows, config.hidden_size, key_because)).transpose()
            };
            let key = own("self_attn.k_proj", keys_of.is_none())?;
            let value = own("self_attn.v_proj", keys_of.is_none() && !value_is_key)?;
            (self.half_split(query)?, key.map(|key| self.half_split(key)).transpose()?, value)
        };
        if keys_of.is_some() {
            self.ignore_keys(index);
        }
        let of_qkv = if fused { "self_attn.qkv_proj" } else { "self_attn.q_proj" };
        let [query_bias, key_bias, value_bias] = if !self.has_bias(config.qkv_bias, index, of_qkv) {
            [None, None, None]
        } else if fused {
            let all = self.layer_bias(index, of_qkv, query_rows + 2 * key_rows)?;
            self.unfused(index, &all)?.map(Some)
        } else {
            let query = self.layer_bias(index, "self_attn.q_proj", gates * query_rows)?;
            let mut own = |name: &str, weight: &Option<SourceWeight>| {
                weight.as_ref().map(|_| self.layer_bias(index, name, key_rows)).transpose()
            };
            let (key, value) = (own("self_attn.k_proj", &key)?, own("self_attn.v_proj", &value)?);
            [Some(self.half_split(query)?), key.map(|key| self.half_split(key)).transpose()?, value]
        };
        let output_bias = self.has_bias(config.output_bias, index, "self_attn.o_proj");
        let output = Linear {
            name: "o_proj",
            role: Role::AttentionOutput,
            weight: self.layer_matrix(
                index,
                "self_attn.o_proj",
                config.hidden_size,
                query_rows,
                "hidden_size, num_attention_heads head_dim",
            )?,
            bias: output_bias.then(|| self.layer_bias(index, "self_attn.o_proj", config.hidden_size)).transpose()?,
        };
        let linear = |name, role, weight, bias| Linear { name, role, weight, bias };
        let (query, gate) = if config.gated_attention {
            let [query, gate] = self.query_and_gate(index, query)?;
            let [query_bias, gate_bias] = match query_bias {
                Some(bias) => self.query_and_gate(index, bias)?.map(Some),
                None => [None, None],
            };
            let gate = linear("gate_proj", Role::AttentionQkv, gate, gate_bias);
            (linear("q_proj", Role::AttentionQ, query, query_bias), Some(gate))
        } else {
            (linear("q_proj", Role::AttentionQ, query, query_bias), None)
        };
        let heads = config.heads_of(index);
        let (query_norm, key_norm) = self.qk_norm(index)?;
        let value_norm = config.value_norm && key.is_some();
        Ok(Attention {
            query,
            key: key.map(|key| linear("k_proj", Role::AttentionK, key, key_bias)),
            value: value.map(|value| linear("v_proj", Role::AttentionV, value, value_bias)),
            gate,
            output,
            query_norm,
            key_norm,
            qk_norm_place: config.qk_norm,
            value_norm: value_norm.then(|| Norm::without_gain("v_norm", config.rms_norm_eps)),
            sinks: config.sinks.then(|| self.sinks(index)).transpose()?,
            num_attention_heads: config.num_attention_heads,
            num_key_value_heads: heads.num_key_value_heads,
            head_dim: heads.head_dim,
            rope_dim: config.rope_of(index).rope_dim,
            scale: config.attention_scale,
            softcap: config.attention_softcap,
            clip: config.clip_qkv,
        })
    }

    /// Returns whether one tensor of the source contains q, k and v; some GGUF files do.
    fn is_fused(&self, index: usize) -> bool {
        let holds = || self.ledger.has(&format!("{}.weight", self.layer_name(index, "self_attn.qkv_proj")));
        self.config.fused || (self.naming == Naming::Gguf && holds())
    }

    /// Splits such a tensor, or its bias, into queries, keys and values.
    fn unfused(&self, index: usize, all: &SourceWeight) -> Result<[SourceWeight; 3]> {
        let (queries, keys) = (self.config.query_width(index), self.config.key_width(index));
        let (heads, width) = (self.config.num_key_value_heads, self.config.head_dim);
        if self.family.attention.qkv == QkvLayout::FusedByHead && self.naming == Naming::HuggingFace {
            let part = |part: u64| of_key_heads(all, heads, part * width..(part + 1) * width);
            return Ok([part(0)?, part(1)?, part(2)?]);
        }
        let (values, end) = (queries + keys, queries + 2 * keys);
        Ok([all.slice(0..queries)?, all.slice(queries..values)?, all.slice(values..end)?])
    }

    fn sinks(&mut self, index: usize) -> Result<SourceWeight> {
        let name = self.layer_name(index, "self_attn.sinks");
        let name = if self.naming == Naming::Gguf { format!("{name}.weight") } else { name };
        self.take(&name, &[self.config.num_attention_heads], "num_attention_heads")
    }

    /// Ignores keys and values of layers that use another layer's; published files contain them, without effect.
    fn ignore_keys(&mut self, index: usize) {
        for name in ["self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm", "self_attn.v_norm"] {
            let name = self.layer_name(index, name);
            self.ledger.ignore(&format!("{name}.*"), "the layer uses the keys and values of another");
        }
    }

    /// Splits a projection with a head's queries followed by its gates, or its bias.
    fn query_and_gate(&self, index: usize, both: SourceWeight) -> Result<[SourceWeight; 2]> {
        let (heads, rows) = (self.config.num_attention_heads, self.config.query_width(index));
        let shape: Vec<u64> = [rows].iter().chain(&both.shape()[1..]).copied().collect();
        let half = both.elements() / heads / 2;
        let by_head = both.reshape(&[heads, 2 * half])?;
        Ok([by_head.columns_range(0..half)?.reshape(&shape)?, by_head.columns_range(half..2 * half)?.reshape(&shape)?])
    }

    /// Takes the norms of queries and keys.
    fn qk_norm(&mut self, index: usize) -> Result<(Option<Norm>, Option<Norm>)> {
        let config = self.config;
        let head_dim = config.heads_of(index).head_dim;
        let (query_width, key_width, because) = match config.qk_norm {
            QkNorm::None => return Ok((None, None)),
            QkNorm::PerHeadOwn => return self.own_qk_norms(index),
            QkNorm::PerHead | QkNorm::PerHeadRotated => (head_dim, head_dim, "head_dim"),
            QkNorm::WholeWidth => (config.query_width(index), config.key_width(index), "heads, head_dim"),
        };
        let query = self.norm(index, "self_attn.q_norm", "q_norm", query_width, because)?;
        let own = config.layers[index].keys_of.is_none();
        let key = own.then(|| self.norm(index, "self_attn.k_norm", "k_norm", key_width, because)).transpose()?;
        Ok((Some(query), key))
    }

    /// Takes layer norms of queries and keys with a gain for each head: one tensor, or one for each head.
    fn own_qk_norms(&mut self, index: usize) -> Result<(Option<Norm>, Option<Norm>)> {
        let config = self.config;
        let mut norm = |tensor: &str, name: &'static str, heads: u64| -> Result<Norm> {
            let tensor = self.layer_name(index, tensor);
            let because = "heads, head_dim";
            let gain = if self.ledger.has(&format!("{tensor}.norms.0.weight")) {
                let of_head = |head| self.take(&format!("{tensor}.norms.{head}.weight"), &[config.head_dim], because);
                SourceWeight::concatenate((0..heads).map(of_head).collect::<Result<_>>()?)?
            } else {
                let gain = self.take(&format!("{tensor}.weight"), &[heads, config.head_dim], because)?;
                gain.reshape(&[heads * config.head_dim])?
            };
            Ok(Norm::layer(name, self.half_split(gain)?, None, config.rms_norm_eps))
        };
        let query = norm("self_attn.q_norm", "q_norm", config.num_attention_heads)?;
        Ok((Some(query), Some(norm("self_attn.k_norm", "k_norm", config.num_key_value_heads)?)))
    }

    /// Reorders rows of q or k (or of biases or gains) for half-split rotation.
    fn half_split(&self, weight: SourceWeight) -> Result<SourceWeight> {
        let head_dim = self.config.head_dim;
        let rotary_dim = match (self.family.rope.pairs, self.naming) {
            // products of queries and keys don't change if both are reordered alike
            (RopePairs::Neighbours, Naming::HuggingFace | Naming::Gguf) => self.config.rope.rope_dim,
            // llama.cpp's converter interleaves whole heads, rotated or not
            (RopePairs::NeighboursInGguf, Naming::Gguf) => head_dim,
            _ => return Ok(weight),
        };
        Ok(weight.reorder(RowOrder::InterleavedToHalves { head_dim, rotary_dim })?)
    }

    pub(super) fn cca(&mut self, index: usize) -> Result<Cca> {
        let config = self.config;
        let Some(CcaConfig { channel_kernel, head_kernel }) = config.cca else {
            return Err(self.missing_mixer(index, "compressed convolutional attention"));
        };
        let (queries, keys, hidden) = (config.query_width(index), config.key_width(index), config.hidden_size);
        let (channels, values) = (queries + keys, keys / 2);
        let because = "num_attention_heads, num_key_value_heads, head_dim, cca_time";
        let mut linear = |name: &'static str, tensor: &str, role: Role, rows: u64, columns: u64| -> Result<Linear> {
            let weight = self.layer_matrix(index, tensor, rows, columns, because)?;
            let bias = config.qkv_bias.then(|| self.layer_bias(index, tensor, rows)).transpose()?;
            Ok(Linear { name, role, weight, bias })
        };
        let query = linear("q_proj", "self_attn.q_proj", Role::AttentionQ, queries, hidden)?;
        let key = linear("k_proj", "self_attn.k_proj", Role::AttentionK, keys, hidden)?;
        let mut of_value = |name, part: &str| {
            linear(name, &format!("self_attn.qkv_proj.v_proj_{part}"), Role::AttentionV, values, hidden)
        };
        let (value, mut delayed_value) = (of_value("v_proj", "current")?, of_value("v_delayed_proj", "delayed")?);
        let output = linear("o_proj", "self_attn.o_proj", Role::AttentionOutput, hidden, queries)?;
        // the delayed value before the first token is the bias: the projection of zeros
        let shift = [1.0, 0.0].repeat(values as usize);
        let delay = CausalConv {
            weight: SourceWeight::from_values("delay", &[values, 2], shift)?,
            bias: delayed_value.bias.take(),
        };
        let channel_conv = "self_attn.qkv_proj.conv_qk_depthwise";
        let channel_conv = CausalConv {
            weight: self.conv_weight(index, channel_conv, channels, channel_kernel, because)?,
            bias: Some(self.layer_bias(index, channel_conv, channels)?),
        };
        let head_conv = "self_attn.qkv_proj.conv_qk_grouped";
        let head_conv_weight = format!("{}.weight", self.layer_name(index, head_conv));
        let temperature = self.layer_name(index, "self_attn.qk_norm.temp");
        let temperature = self.take(&temperature, &[config.num_key_value_heads], "num_key_value_heads")?;
        Ok(Cca {
            attention: Attention {
                query,
                key: Some(key),
                value: Some(value),
                gate: None,
                output,
                query_norm: None,
                key_norm: None,
                qk_norm_place: config.qk_norm,
                value_norm: None,
                sinks: None,
                num_attention_heads: config.num_attention_heads,
                num_key_value_heads: config.num_key_value_heads,
                head_dim: config.head_dim,
                rope_dim: config.rope_of(index).rope_dim,
                scale: 1.0,
                softcap: None,
                clip: None,
            },
            delayed_value,
            delay,
            channel_conv,
            head_conv: self.take(&head_conv_weight, &[channels, config.head_dim, head_kernel], because)?,
            head_conv_bias: self.layer_bias(index, head_conv, channels)?,
            temperature: temperature.scale((config.head_dim as f32).sqrt()),
        })
    }

    pub(super) fn short_conv(&mut self, index: usize) -> Result<ShortConv> {
        let Some(ShortConvConfig { kernel, bias }) = self.config.short_conv else {
            return Err(self.missing_mixer(index, "short convolution"));
        };
        let width = self.config.hidden_size;
        let input = self.layer_matrix(index, "conv.in_proj", 3 * width, width, "3 hidden_size, hidden_size")?;
        let output = self.layer_matrix(index, "conv.out_proj", width, width, "hidden_size, hidden_size")?;
        let weight = self.conv_weight(index, "conv.conv", width, kernel, "hidden_size, conv_L_cache")?;
        let mut bias = |name: &str, rows: u64| bias.then(|| self.layer_bias(index, name, rows)).transpose();
        Ok(ShortConv {
            input: Linear {
                name: "in_proj",
                role: Role::AttentionQkv,
                weight: input,
                bias: bias("conv.in_proj", 3 * width)?,
            },
            conv: CausalConv { weight, bias: bias("conv.conv", width)? },
            output: Linear {
                name: "out_proj",
                role: Role::AttentionOutput,
                weight: output,
                bias: bias("conv.out_proj", width)?,
            },
        })
    }

    pub(super) fn delta_net(&mut self, index: usize) -> Result<DeltaNet> {
        let Some(config) = self.config.delta_net else { return Err(self.missing_mixer(index, "DeltaNet")) };
        let hidden = self.config.hidden_size;
        let (keys, values, heads) = (config.key_width(), config.value_width(), config.num_value_heads);
        let mixed = 2 * keys + values;
        let because = "linear_num_{key,value}_heads linear_{key,value}_head_dim";
        let take = |tensors: &mut Self, name: &str, rows: u64, columns: u64| {
            tensors.layer_matrix(index, &format!("linear_attn.{name}"), rows, columns, because)
        };
        // Qwen3-Next groups projections by key head, Qwen3.5 has them apart; value heads have the same order
        let holds = |tensors: &Self, name: &str| {
            let name = tensors.layer_name(index, &format!("linear_attn.{name}"));
            tensors.ledger.has(&format!("{name}.weight"))
        };
        let [query_key_value, gate] = match holds(self, "in_proj_qkvz") {
            true => {
                let all = take(self, "in_proj_qkvz", mixed + values, hidden)?;
                let (width, inner) = (config.key_head_dim, values / config.num_key_heads);
                let part = |first: u64, rows: u64| of_key_heads(&all, config.num_key_heads, first..first + rows);
                let parts = vec![part(0, width)?, part(width, width)?, part(2 * width, inner)?];
                [SourceWeight::concatenate(parts)?, part(2 * width + inner, inner)?]
            }
            false => [take(self, "in_proj_qkv", mixed, hidden)?, take(self, "in_proj_z", values, hidden)?],
        };
        let together = holds(self, "in_proj_ba");
        let [step, decay] = match together {
            true => {
                let both = take(self, "in_proj_ba", 2 * heads, hidden)?;
                let group = heads / config.num_key_heads;
                [0..group, group..2 * group].map(|range| of_key_heads(&both, config.num_key_heads, range))
            }
            false => [take(self, "in_proj_b", heads, hidden), take(self, "in_proj_a", heads, hidden)],
        };
        let (step, decay) = (step?, decay?);
        let output = take(self, "out_proj", hidden, values)?;
        let conv = self.conv_weight(index, "linear_attn.conv1d", mixed, config.kernel, because)?;
        let decay_bias = self.layer_name(index, "linear_attn.dt_bias");
        let decay_bias = self.take(&decay_bias, &[heads], "linear_num_value_heads")?;
        let decay_rate = self.layer_name(index, "linear_attn.A_log");
        let mut decay_rate = self.take(&decay_rate, &[heads], "linear_num_value_heads")?;
        if self.naming == Naming::HuggingFace {
            decay_rate = decay_rate.exp().scale(-1.0); // GGUF files hold that already
        }
        // in every family, this norm multiplies by its weight alone
        let norm = format!("{}.weight", self.layer_name(index, "linear_attn.norm"));
        let norm = self.take(&norm, &[config.value_head_dim], "linear_value_head_dim")?;
        let order = ValueHeads { config, sorted: self.naming == Naming::Gguf && !together };
        let small = |name, weight| Linear { name, role: Role::Table, weight, bias: None };
        Ok(DeltaNet {
            query_key_value: Linear {
                name: "qkv_proj",
                role: Role::AttentionQkv,
                weight: order.after(2 * keys, &query_key_value)?,
                bias: None,
            },
            gate: Linear { name: "gate_proj", role: Role::AttentionQkv, weight: order.rows(&gate)?, bias: None },
            step: small("step_proj", order.rows(&step)?),
            decay: small("decay_proj", order.rows(&decay)?),
            conv: CausalConv { weight: order.after(2 * keys, &conv)?, bias: None },
            decay_bias: order.rows(&decay_bias)?,
            decay_rate: order.rows(&decay_rate)?,
            norm: Norm::root_mean_square("norm", norm, 0.0, self.config.rms_norm_eps),
            output: Linear {
                name: "out_proj",
                role: Role::AttentionOutput,
                weight: order.columns(&output)?,
                bias: None,
            },
            num_key_heads: config.num_key_heads,
            num_value_heads: heads,
            key_head_dim: config.key_head_dim,
            value_head_dim: config.value_head_dim,
        })
    }

    /// Takes a kernel `[channels, kernel]`; in transformers it has a dimension of 1 in between.
    pub(super) fn conv_weight(
        &mut self,
        index: usize,
        name: &str,
        channels: u64,
        kernel: u64,
        because: &str,
    ) -> Result<SourceWeight> {
        let name = format!("{}.weight", self.layer_name(index, name));
        match self.naming {
            Naming::HuggingFace | Naming::Onnx => {
                Ok(self.take(&name, &[channels, 1, kernel], because)?.reshape(&[channels, kernel])?)
            }
            Naming::Gguf => self.take(&name, &[channels, kernel], because),
        }
    }

    pub(super) fn missing_mixer(&self, index: usize, what: &str) -> anec_base::Error {
        let (place, key) = (self.family.name.to_owned(), format!("layers.{index}"));
        FamilyError::Value { place, key, found: what.into(), expected: "a mixer of this family".into() }.into()
    }
}

/// Slices rows `range` of each key head of a projection that is grouped by head.
fn of_key_heads(all: &SourceWeight, heads: u64, range: Range<u64>) -> Result<SourceWeight> {
    let inner = all.shape().get(1..).unwrap_or_default();
    let run: u64 = inner.iter().product();
    let by_head = all.reshape(&[heads, all.elements() / heads])?;
    let part = by_head.columns_range(range.start * run..range.end * run)?;
    Ok(part.reshape(&[&[heads * (range.end - range.start)], inner].concat())?)
}

/// Order of value heads. transformers groups them by key head. The graph, like GGUF, has the first value head of every
/// key head first, so that repeating keys is one concatenation.
struct ValueHeads {
    config: DeltaNetConfig,
    sorted: bool,
}

impl ValueHeads {
    /// Positions in the source of the heads in the graph's order; `None` if the order is the same.
    fn origins(&self) -> Option<Vec<u64>> {
        let (key_heads, heads) = (self.config.num_key_heads, self.config.num_value_heads);
        let origin = |head: u64| head % key_heads * (heads / key_heads) + head / key_heads;
        (!self.sorted && key_heads != heads).then(|| (0..heads).map(origin).collect())
    }

    /// Reorders a weight whose rows are heads.
    fn rows(&self, weight: &SourceWeight) -> Result<SourceWeight> {
        let Some(origins) = self.origins() else { return Ok(weight.clone()) };
        let by_head = weight.reshape(&[origins.len() as u64, weight.elements() / origins.len() as u64])?;
        Ok(by_head.reorder(RowOrder::Explicit(origins.into()))?.reshape(weight.shape())?)
    }

    /// Reorders a weight whose rows are heads after `first` other rows.
    fn after(&self, first: u64, weight: &SourceWeight) -> Result<SourceWeight> {
        if self.origins().is_none() {
            return Ok(weight.clone());
        }
        let values = self.rows(&weight.slice(first..weight.shape()[0])?)?;
        Ok(SourceWeight::concatenate(vec![weight.slice(0..first)?, values])?)
    }

    /// Reorders a weight whose columns are heads.
    fn columns(&self, weight: &SourceWeight) -> Result<SourceWeight> {
        let Some(origins) = self.origins() else { return Ok(weight.clone()) };
        let heads = origins.len() as u64;
        let order: Vec<u64> =
            (0..weight.rows()).flat_map(|row| origins.iter().map(move |head| row * heads + head)).collect();
        let by_head = weight.reshape(&[order.len() as u64, weight.columns() / heads])?;
        Ok(by_head.reorder(RowOrder::Explicit(order.into()))?.reshape(weight.shape())?)
    }
}
