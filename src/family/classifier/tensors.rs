//! Weights of a token classifier: finds them in a source and checks their shapes.

use super::config::ClassifierConfig;
use super::{Classifier, Layer, facts};
use crate::blocks::banded_attention::BandedAttention;
use crate::blocks::linear::Linear;
use crate::blocks::moe::Moe;
use crate::blocks::norm::Norm;
use crate::row::RouterScores;
use crate::tensors::experts::clamped_experts;
use crate::tensors::take;
use anec_base::Result;
use anec_manifest::Role;
use anec_source::{Ledger, RowOrder, SourceWeight};

/// Weights of a source, taken from its ledger.
pub(super) struct Tensors<'a, 'b> {
    ledger: &'a mut Ledger<'b>,
    config: &'a ClassifierConfig,
}

impl<'a, 'b> Tensors<'a, 'b> {
    pub(super) fn new(ledger: &'a mut Ledger<'b>, config: &'a ClassifierConfig) -> Self {
        Tensors { ledger, config }
    }

    /// Takes the whole model.
    pub(super) fn classifier(mut self) -> Result<Classifier> {
        let config = self.config;
        let (hidden, labels) = (config.hidden_size, config.labels.len() as u64);
        let embedding =
            self.take("model.embed_tokens.weight", &[config.vocab_size, hidden], "vocab_size, hidden_size")?;
        let layers = (0..config.num_hidden_layers).map(|index| self.layer(index)).collect::<Result<Vec<_>>>()?;
        Ok(Classifier {
            facts: facts(config),
            embedding,
            layers,
            final_norm: self.norm("model.norm", "norm")?,
            score: Linear {
                name: "score",
                role: Role::LmHead,
                weight: self.take("score.weight", &[labels, hidden], "labels of id2label, hidden_size")?,
                bias: Some(self.take("score.bias", &[labels], "labels of id2label")?),
            },
            config: config.clone(),
        })
    }

    fn layer(&mut self, index: usize) -> Result<Layer> {
        Ok(Layer {
            attention_norm: self.norm(&format!("model.layers.{index}.input_layernorm"), "attn_norm")?,
            attention: self.attention(&format!("model.layers.{index}.self_attn"))?,
            experts_norm: self.norm(&format!("model.layers.{index}.post_attention_layernorm"), "mlp_norm")?,
            experts: self.experts(&format!("model.layers.{index}.mlp"))?,
        })
    }

    fn norm(&mut self, tensor: &str, name: &'static str) -> Result<Norm> {
        let weight = self.take(&format!("{tensor}.weight"), &[self.config.hidden_size], "hidden_size")?;
        Ok(Norm::root_mean_square(name, weight, 0.0, self.config.rms_norm_eps))
    }

    fn attention(&mut self, prefix: &str) -> Result<BandedAttention> {
        let config = self.config;
        let (hidden, head_dim) = (config.hidden_size, config.head_dim);
        let (queries, keys) = (config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim);
        let because = "heads, head_dim, hidden_size";
        let mut projection = |tensor: &str, name, role, rows: u64, columns: u64| -> Result<Linear> {
            let weight = self.take(&format!("{prefix}.{tensor}.weight"), &[rows, columns], because)?;
            let bias = format!("{prefix}.{tensor}.bias");
            let bias = config.attention_bias.then(|| self.take(&bias, &[rows], because)).transpose()?;
            Ok(Linear { name, role, weight, bias })
        };
        let query = projection("q_proj", "q_proj", Role::AttentionQ, queries, hidden)?;
        let key = projection("k_proj", "k_proj", Role::AttentionK, keys, hidden)?;
        let value = projection("v_proj", "v_proj", Role::AttentionV, keys, hidden)?;
        let output = projection("o_proj", "o_proj", Role::AttentionOutput, hidden, queries)?;
        let sinks = self.take(&format!("{prefix}.sinks"), &[config.num_attention_heads], "num_attention_heads")?;
        Ok(BandedAttention {
            query: self.half_split(query)?,
            key: self.half_split(key)?,
            value,
            output,
            qk_norm: None,
            value_norm: None,
            sinks: Some(sinks),
            distances: None,
            num_attention_heads: config.num_attention_heads,
            num_key_value_heads: config.num_key_value_heads,
            head_dim,
            rope_dim: config.rope.rope_dim,
            scale: (head_dim as f64).powf(-0.5),
            softcap: None,
        })
    }

    /// Reorders queries or keys for half-split rotation. The family rotates neighbouring dimensions; products of
    /// queries and keys don't change if both are reordered alike.
    fn half_split(&self, linear: Linear) -> Result<Linear> {
        let order =
            || RowOrder::InterleavedToHalves { head_dim: self.config.head_dim, rotary_dim: self.config.rope.rope_dim };
        let weight = linear.weight.reorder(order())?;
        let bias = linear.bias.map(|bias| bias.reorder(order())).transpose()?;
        Ok(Linear { weight, bias, ..linear })
    }

    /// Takes the experts, stored as matrices `[inputs, outputs]` with gates before ups.
    fn experts(&mut self, prefix: &str) -> Result<Moe> {
        let config = self.config;
        let (experts, width, hidden) = (config.num_experts, config.intermediate_size, config.hidden_size);
        let because = "num_local_experts, intermediate_size, hidden_size";
        let router = Linear {
            name: "router",
            role: Role::Router,
            weight: self.take(&format!("{prefix}.router.weight"), &[experts, hidden], because)?,
            bias: Some(self.take(&format!("{prefix}.router.bias"), &[experts], because)?),
        };
        let both = self.take(&format!("{prefix}.experts.gate_up_proj"), &[experts, hidden, 2 * width], because)?;
        let both_bias = self.take(&format!("{prefix}.experts.gate_up_proj_bias"), &[experts, 2 * width], because)?;
        let half = |first: u64| -> Result<_> {
            let columns = first * width..(first + 1) * width;
            let weight = both.columns_range(columns.clone())?.transpose()?.reshape(&[experts * width, hidden])?;
            Ok((weight, both_bias.columns_range(columns)?))
        };
        let halves = [half(0)?, half(1)?];
        let down = self.take(&format!("{prefix}.experts.down_proj"), &[experts, width, hidden], because)?;
        let down: SourceWeight = down.reshape(&[experts * width, hidden])?.transpose()?;
        let down_bias = self.take(&format!("{prefix}.experts.down_proj_bias"), &[experts, hidden], because)?;
        let experts = clamped_experts(halves, down, &down_bias, experts, config.clamped)?;
        Ok(Moe {
            router,
            scores: RouterScores::ChosenSoftmax,
            selection_bias: None,
            experts,
            num_experts_per_tok: config.num_experts_per_tok,
            norm_topk_prob: false,
            routed_scaling_factor: 1.0,
            shared: None,
            expert_scale: None,
        })
    }

    fn take(&mut self, name: &str, shape: &[u64], because: &str) -> Result<SourceWeight> {
        take(self.ledger, name, shape, because)
    }
}
