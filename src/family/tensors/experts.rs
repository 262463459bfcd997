//! The weights of experts.

use super::{Naming, Tensors};
use crate::error::Result;
use crate::family::blocks::linear::Linear;
use crate::family::blocks::moe::{Gating, Moe, Scores};
use crate::family::config::ExpertsConfig;
use crate::manifest::Role;
use crate::source::{RowOrder, Weight};

impl Tensors<'_, '_> {
    pub(super) fn moe(&mut self, index: usize, config: ExpertsConfig) -> Result<Moe> {
        let (experts, hidden) = (config.num_experts, self.config.hidden_size);
        let router = self.layer_matrix(index, "feed_forward.gate", experts, hidden, "num_experts, hidden_size")?;
        let bias = self.layer_name(index, "feed_forward.expert_bias");
        let selection_bias = config.use_expert_bias.then(|| self.take(&bias, &[experts], "num_experts")).transpose()?;
        let [gate, up, down] = self.experts(index, config)?;
        let expert = |name, weight| Linear { name, role: Role::Expert, weight, bias: None };
        Ok(Moe {
            router: Linear { name: "gate", role: Role::Router, weight: router, bias: None },
            scores: Scores::Sigmoid,
            selection_bias,
            gate: expert("gate_proj", gate),
            up: expert("up_proj", up),
            down: expert("down_proj", side_by_side(&down, experts, hidden)?),
            down_bias: None,
            gating: Gating::Activation(self.config.activation),
            num_experts: experts,
            num_experts_per_tok: config.num_experts_per_tok,
            norm_topk_prob: config.norm_topk_prob,
            routed_scaling_factor: config.routed_scaling_factor,
        })
    }

    /// Gates and ups `[experts * width, hidden]` and downs `[experts * hidden, width]` of all experts.
    fn experts(&mut self, index: usize, config: ExpertsConfig) -> Result<[Weight; 3]> {
        let (experts, width, hidden) = (config.num_experts, config.moe_intermediate_size, self.config.hidden_size);
        let because = "num_experts, moe_intermediate_size, hidden_size";
        let stack = |weight: Weight| weight.reshape(&[weight.rows(), weight.columns()]);
        if self.naming == Naming::Gguf {
            let mut take = |name: &str, shape: &[u64]| -> Result<Weight> {
                Ok(stack(self.take(&format!("blk.{index}.{name}.weight"), shape, because)?)?)
            };
            let gate = take("ffn_gate_exps", &[experts, width, hidden])?;
            let up = take("ffn_up_exps", &[experts, width, hidden])?;
            return Ok([gate, up, take("ffn_down_exps", &[experts, hidden, width])?]);
        }
        let prefix = self.layer_name(index, "feed_forward.experts");
        let fused = format!("{prefix}.gate_up_proj");
        if self.ledger.has(&fused) {
            // since transformers 5: an expert's gate, then its up
            let both = self.take(&fused, &[experts, 2 * width, hidden], because)?;
            let both = both.reshape(&[experts, 2 * width * hidden])?;
            let half = |first: u64| -> Result<Weight> {
                let range = first * width * hidden..(first + 1) * width * hidden;
                Ok(both.columns_range(range)?.reshape(&[experts * width, hidden])?)
            };
            let down = self.take(&format!("{prefix}.down_proj"), &[experts, hidden, width], because)?;
            return Ok([half(0)?, half(1)?, stack(down)?]);
        }
        let mut all = |name: &str, rows: u64, columns: u64| -> Result<Weight> {
            let one = |expert: u64| self.matrix(&format!("{prefix}.{expert}.{name}"), rows, columns, because);
            Ok(Weight::concatenate((0..experts).map(one).collect::<Result<Vec<_>>>()?)?)
        };
        Ok([all("w1", width, hidden)?, all("w3", width, hidden)?, all("w2", hidden, width)?])
    }
}

/// Matrices of `rows` rows, one after another, as one of `rows` rows: side by side.
fn side_by_side(stacked: &Weight, count: u64, rows: u64) -> Result<Weight> {
    let order: Vec<u64> = (0..rows).flat_map(|row| (0..count).map(move |matrix| matrix * rows + row)).collect();
    let by_row = stacked.reorder(RowOrder::Explicit(order.into()))?;
    Ok(by_row.reshape(&[rows, count * stacked.columns()])?)
}
