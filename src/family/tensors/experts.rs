//! The weights of experts.

use super::{Naming, Tensors};
use crate::blocks::depth_router::{DepthMoe, DepthRouter};
use crate::blocks::linear::Linear;
use crate::blocks::moe::{Experts, Gating, Moe, Scores};
use crate::config::ExpertsConfig;
use anec_base::Result;
use anec_manifest::Role;
use anec_source::{RowOrder, SourceWeight};

impl Tensors<'_, '_> {
    pub(super) fn moe(&mut self, index: usize, config: ExpertsConfig) -> Result<Moe> {
        let (experts, hidden) = (config.num_experts, self.config.hidden_size);
        let router = self.layer_matrix(index, "feed_forward.gate", experts, hidden, "num_experts, hidden_size")?;
        let bias = self.layer_name(index, "feed_forward.expert_bias");
        let selection_bias = config.use_expert_bias.then(|| self.take(&bias, &[experts], "num_experts")).transpose()?;
        Ok(Moe {
            router: Linear { name: "gate", role: Role::Router, weight: router, bias: None },
            scores: Scores::Sigmoid,
            selection_bias,
            experts: self.experts(index, config)?,
            num_experts_per_tok: config.num_experts_per_tok,
            norm_topk_prob: config.norm_topk_prob,
            routed_scaling_factor: config.routed_scaling_factor,
        })
    }

    pub(super) fn depth_moe(&mut self, index: usize, config: ExpertsConfig, width: u64) -> Result<DepthMoe> {
        let because = "num_experts + 1, router_hidden_size, hidden_size";
        let (classes, hidden) = (config.num_experts + 1, self.config.hidden_size);
        let mut linear = |name: &'static str, tensor: &str, rows: u64, columns: u64, bias: bool| -> Result<Linear> {
            let weight = self.layer_matrix(index, tensor, rows, columns, because)?;
            let bias = bias.then(|| self.layer_bias(index, tensor, rows)).transpose()?;
            Ok(Linear { name, role: Role::Router, weight, bias })
        };
        let down = linear("down_proj", "mlp.gate.down_proj", width, hidden, true)?;
        let first = linear("fc1", "mlp.gate.router_mlp.fc1", width, width, true)?;
        let second = linear("fc2", "mlp.gate.router_mlp.fc2", width, width, true)?;
        let output = linear("out_proj", "mlp.gate.router_mlp.out_proj", classes, width, false)?;
        let mut vector = |tensor: &str, length: u64| {
            let name = self.layer_name(index, tensor);
            self.take(&name, &[length], because)
        };
        // nothing comes before the first layer
        let state_scale = (index > 0).then(|| vector("mlp.gate.router_states_scale", width)).transpose()?;
        let balancing_bias = vector("mlp.gate.balancing_biases", classes)?;
        let norm = self.norm(index, "mlp.gate.router_mlp.norm", "norm", width, "router_hidden_size")?;
        let router = DepthRouter { down, state_scale, norm, hidden: [first, second], output, balancing_bias };
        Ok(DepthMoe { router, experts: self.experts(index, config)? })
    }

    fn experts(&mut self, index: usize, config: ExpertsConfig) -> Result<Experts> {
        let [gate, up, down] = self.expert_weights(index, config)?;
        let expert = |name, weight| Linear { name, role: Role::Expert, weight, bias: None };
        Ok(Experts {
            gate: expert("gate_proj", gate),
            up: expert("up_proj", up),
            down: expert("down_proj", side_by_side(&down, config.num_experts, self.config.hidden_size)?),
            down_bias: None,
            gating: Gating::Activation(self.config.activation),
            num_experts: config.num_experts,
        })
    }

    /// Gates and ups `[experts * width, hidden]` and downs `[experts * hidden, width]` of all experts.
    fn expert_weights(&mut self, index: usize, config: ExpertsConfig) -> Result<[SourceWeight; 3]> {
        let (experts, width, hidden) = (config.num_experts, config.moe_intermediate_size, self.config.hidden_size);
        let because = "num_experts, moe_intermediate_size, hidden_size";
        let stack = |weight: SourceWeight| weight.reshape(&[weight.rows(), weight.columns()]);
        if self.naming == Naming::Gguf {
            let mut take = |name: &str, shape: &[u64]| -> Result<SourceWeight> {
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
            let half = |first: u64| -> Result<SourceWeight> {
                let range = first * width * hidden..(first + 1) * width * hidden;
                Ok(both.columns_range(range)?.reshape(&[experts * width, hidden])?)
            };
            let down = self.take(&format!("{prefix}.down_proj"), &[experts, hidden, width], because)?;
            return Ok([half(0)?, half(1)?, stack(down)?]);
        }
        let mut all = |name: &str, rows: u64, columns: u64| -> Result<SourceWeight> {
            let one = |expert: u64| self.matrix(&format!("{prefix}.{expert}.{name}"), rows, columns, because);
            Ok(SourceWeight::concatenate((0..experts).map(one).collect::<Result<Vec<_>>>()?)?)
        };
        Ok([all("w1", width, hidden)?, all("w3", width, hidden)?, all("w2", hidden, width)?])
    }
}

/// Matrices of `rows` rows, one after another, as one of `rows` rows: side by side.
fn side_by_side(stacked: &SourceWeight, count: u64, rows: u64) -> Result<SourceWeight> {
    let order: Vec<u64> = (0..rows).flat_map(|row| (0..count).map(move |matrix| matrix * rows + row)).collect();
    let by_row = stacked.reorder(RowOrder::Explicit(order.into()))?;
    Ok(by_row.reshape(&[rows, count * stacked.columns()])?)
}
