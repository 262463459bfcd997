//! Weights of experts.

use std::ops::Range;

use super::{Naming, Tensors, take_tensor};
use crate::blocks::depth_router::{DepthMoe, DepthRouter};
use crate::blocks::linear::Linear;
use crate::blocks::mlp::Mlp;
use crate::blocks::moe::{Experts, Gating, Moe, SharedExpert};
use crate::config::{ClampedExperts, ExpertsConfig, SharedExpertConfig};
use crate::row::SharedExpertRule;
use anec_base::Result;
use anec_manifest::Role;
use anec_source::{RowOrder, SourceDtype, SourceWeight, ZeroPoints};

/// Number of elements that share an exponent in MXFP4.
const MXFP4_BLOCK: u64 = 32;

impl Tensors<'_, '_> {
    pub(super) fn moe(&mut self, index: usize, config: ExpertsConfig) -> Result<Moe> {
        let (experts, hidden) = (config.num_experts, self.config.hidden_size);
        let router = self.layer_matrix(index, "feed_forward.gate", experts, hidden, "num_experts, hidden_size")?;
        let bias = self.layer_name(index, "feed_forward.expert_bias");
        let selection_bias = config.use_expert_bias.then(|| self.take(&bias, &[experts], "num_experts")).transpose()?;
        let router_bias = config.clamped.map(|_| self.layer_bias(index, "feed_forward.gate", experts)).transpose()?;
        Ok(Moe {
            router: Linear { name: "gate", role: Role::Router, weight: router, bias: router_bias },
            scores: config.scores,
            selection_bias,
            experts: match config.clamped {
                Some(clamped) => self.clamped_experts(index, config, clamped)?,
                None => self.experts(index, config)?,
            },
            num_experts_per_tok: config.num_experts_per_tok,
            norm_topk_prob: config.norm_topk_prob,
            routed_scaling_factor: config.routed_scaling_factor,
            shared: config.shared.map(|shared| self.shared_expert(index, shared)).transpose()?,
            expert_scale: None,
        })
    }

    fn shared_expert(&mut self, index: usize, config: SharedExpertConfig) -> Result<SharedExpert> {
        let (width, hidden) = (config.intermediate_size, self.config.hidden_size);
        let because = "the width of the shared expert, hidden_size";
        let fused = self.naming != Naming::Gguf && self.family.network.shared_expert == SharedExpertRule::Fused;
        let mut linear = |name, role, part: &str, rows: u64, columns: u64| -> Result<Linear> {
            let weight = self.layer_matrix(index, &format!("mlp.shared_expert.{part}"), rows, columns, because)?;
            Ok(Linear { name, role, weight, bias: None })
        };
        let (gate, up) = if fused {
            let both = linear("gate_up_proj", Role::MlpUp, "gate_up_proj", 2 * width, hidden)?;
            let half = |name, range: Range<u64>| -> Result<Linear> {
                Ok(Linear { name, weight: both.weight.slice(range)?, ..both.clone() })
            };
            (half("gate_proj", 0..width)?, half("up_proj", width..2 * width)?)
        } else {
            let gate = linear("gate_proj", Role::MlpUp, "gate_proj", width, hidden)?;
            (gate, linear("up_proj", Role::MlpUp, "up_proj", width, hidden)?)
        };
        let down = linear("down_proj", Role::MlpDown, "down_proj", hidden, width)?;
        let mlp = Mlp { gate, up, down, activation: self.config.activation };
        let gate = config.gated.then(|| -> Result<Linear> {
            let name = format!("{}.weight", self.layer_name(index, "mlp.shared_expert_gate"));
            // GGUF files may have it as a vector
            let weight = self.take_any(&name, &[&[1, hidden], &[hidden]], "hidden_size")?.reshape(&[1, hidden])?;
            Ok(Linear { name: "gate", role: Role::Router, weight, bias: None })
        });
        Ok(SharedExpert { mlp, gate: gate.transpose()? })
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
        // the first layer has no earlier state
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

    /// Takes gates and ups `[experts * width, hidden]` and downs `[experts * hidden, width]` of all experts.
    fn expert_weights(&mut self, index: usize, config: ExpertsConfig) -> Result<[SourceWeight; 3]> {
        let (experts, width, hidden) = (config.num_experts, config.moe_intermediate_size, self.config.hidden_size);
        let because = "num_experts, moe_intermediate_size, hidden_size";
        let stack = |weight: SourceWeight| weight.reshape(&[weight.rows(), weight.columns()]);
        if self.naming == Naming::Gguf {
            let mut take = |name: &str, shape: &[u64]| -> Result<SourceWeight> {
                Ok(stack(self.take(&format!("blk.{index}.{name}.weight"), shape, because)?)?)
            };
            let down = take("ffn_down_exps", &[experts, hidden, width])?;
            if self.ledger.has(&format!("blk.{index}.ffn_gate_up_exps.weight")) {
                let name = format!("blk.{index}.ffn_gate_up_exps.weight");
                let both = self.take(&name, &[experts, 2 * width, hidden], because)?;
                let [gate, up] = gates_and_ups(&both, [experts, width, hidden])?;
                return Ok([gate, up, down]);
            }
            let mut take = |name: &str| -> Result<SourceWeight> {
                Ok(stack(self.take(&format!("blk.{index}.{name}.weight"), &[experts, width, hidden], because)?)?)
            };
            return Ok([take("ffn_gate_exps")?, take("ffn_up_exps")?, down]);
        }
        let prefix = self.layer_name(index, "feed_forward.experts");
        let stacked = |part: &str| match self.own_name(part) {
            own if own == part => format!("{prefix}{}", &part["feed_forward.experts".len()..]),
            own => self.layer_name(index, own),
        };
        let [fused, stacked_down] =
            ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"].map(stacked);
        if self.ledger.has(&fused) {
            // some published files have transposed matrices
            let mut upright = |name: &str, rows: u64, columns: u64| -> Result<SourceWeight> {
                let shapes = [[experts, rows, columns], [experts, columns, rows]];
                let weight = self.take_any(name, &shapes.each_ref().map(|shape| &shape[..]), because)?;
                Ok(if weight.shape() == shapes[0] { weight } else { weight.transpose()? })
            };
            // since transformers 5: an expert's gate, then its up
            let both = upright(&fused, 2 * width, hidden)?;
            let [gate, up] = gates_and_ups(&both, [experts, width, hidden])?;
            let down = upright(&stacked_down, hidden, width)?;
            return Ok([gate, up, stack(down)?]);
        }
        let [gate, up, down] = ["w1", "w3", "w2"].map(|name| self.own_name(name));
        let mut all = |name: &str, rows: u64, columns: u64| -> Result<SourceWeight> {
            let one = |expert: u64| self.matrix(&format!("{prefix}.{expert}.{name}"), rows, columns, because);
            Ok(SourceWeight::concatenate((0..experts).map(one).collect::<Result<Vec<_>>>()?)?)
        };
        Ok([all(gate, width, hidden)?, all(up, width, hidden)?, all(down, hidden, width)?])
    }

    /// Takes experts with biases. transformers interleaves gates and ups, as matrices `[inputs, outputs]` or, in MXFP4,
    /// transposed.
    fn clamped_experts(&mut self, index: usize, config: ExpertsConfig, clamped: ClampedExperts) -> Result<Experts> {
        let (experts, width, hidden) = (config.num_experts, config.moe_intermediate_size, self.config.hidden_size);
        let because = "num_experts, intermediate_size, hidden_size";
        let prefix = self.layer_name(index, "feed_forward.experts");
        let (halves, down, down_bias) = if self.naming == Naming::Gguf {
            let mut bias = |name: &str, rows: u64| {
                self.take(&format!("blk.{index}.{name}.bias"), &[experts, rows], "num_experts, rows of the weight")
            };
            let biases = [bias("ffn_gate_exps", width)?, bias("ffn_up_exps", width)?, bias("ffn_down_exps", hidden)?];
            let [gate_bias, up_bias, down_bias] = biases;
            let [gate, up, down] = self.expert_weights(index, config)?;
            ([(gate, gate_bias), (up, up_bias)], side_by_side(&down, experts, hidden)?, down_bias)
        } else {
            let both_bias = self.take(&format!("{prefix}.gate_up_proj_bias"), &[experts, 2 * width], because)?;
            let down_bias = self.take(&format!("{prefix}.down_proj_bias"), &[experts, hidden], because)?;
            let (both, down) = if self.ledger.has(&format!("{prefix}.gate_up_proj_blocks")) {
                let both = self.mxfp4(&format!("{prefix}.gate_up_proj"), [experts, 2 * width, hidden], because)?;
                let down = self.mxfp4(&format!("{prefix}.down_proj"), [experts, hidden, width], because)?;
                (both, side_by_side(&down, experts, hidden)?)
            } else {
                let both = self.take(&format!("{prefix}.gate_up_proj"), &[experts, hidden, 2 * width], because)?;
                let down = self.take(&format!("{prefix}.down_proj"), &[experts, width, hidden], because)?;
                let both = both.transpose()?.reshape(&[experts * 2 * width, hidden])?;
                (both, down.reshape(&[experts * width, hidden])?.transpose()?)
            };
            let rows = experts * width;
            let apart = |weight: &SourceWeight| weight.reorder(RowOrder::Transposed([rows, 2]));
            let (both, bias) = (apart(&both)?, apart(&both_bias.reshape(&[2 * rows])?)?);
            let half = |range: Range<u64>| -> Result<_> { Ok((both.slice(range.clone())?, bias.slice(range)?)) };
            ([half(0..rows)?, half(rows..2 * rows)?], down, down_bias)
        };
        clamped_experts(halves, down, &down_bias, experts, clamped)
    }

    /// Takes matrices in MXFP4 (OCP Microscaling Formats 1.0), which safetensors files store as bytes: 32 elements of a
    /// row, two to a byte, share an exponent. Returns them concatenated.
    fn mxfp4(&mut self, name: &str, [count, rows, columns]: [u64; 3], because: &str) -> Result<SourceWeight> {
        let blocks = columns.div_ceil(MXFP4_BLOCK);
        let codes = [count, rows, blocks, MXFP4_BLOCK / 2];
        let codes = take_tensor(self.ledger, &format!("{name}_blocks"), SourceDtype::U8, &codes, because)?;
        let scales = [count, rows, blocks];
        let scales = take_tensor(self.ledger, &format!("{name}_scales"), SourceDtype::U8, &scales, because)?;
        let codes = codes.viewed_as(SourceDtype::F4_E2M1, &[count * rows, blocks * MXFP4_BLOCK])?;
        let scales = scales.viewed_as(SourceDtype::F8_E8M0, &[count * rows, blocks])?;
        let codes = SourceWeight::from(codes).columns_range(0..columns)?;
        Ok(SourceWeight::from_blocks(codes, scales.into(), ZeroPoints::All(0.0), [1, MXFP4_BLOCK])?)
    }
}

/// Builds clamped experts from gates and ups `[experts * width, hidden]` with biases `[experts, width]`, downs
/// `[hidden, experts * width]` and biases `[experts, hidden]`.
pub(crate) fn clamped_experts(
    [gate, up]: [(SourceWeight, SourceWeight); 2],
    down: SourceWeight,
    down_bias: &SourceWeight,
    num_experts: u64,
    ClampedExperts { swiglu_alpha: alpha, swiglu_limit: limit }: ClampedExperts,
) -> Result<Experts> {
    let half = |name, (weight, bias): (SourceWeight, SourceWeight)| -> Result<Linear> {
        let bias = bias.reshape(&[bias.elements()])?;
        Ok(Linear { name, role: Role::Expert, weight, bias: Some(bias) })
    };
    Ok(Experts {
        gate: half("gate_proj", gate)?,
        up: half("up_proj", up)?,
        down: Linear { name: "down_proj", role: Role::Expert, weight: down, bias: None },
        // a bias in the form of a projection: never quantized
        down_bias: Some(Linear { name: "down_biases", role: Role::Bias, weight: down_bias.transpose()?, bias: None }),
        gating: Gating::ClampedSwiGlu { alpha, limit },
        num_experts,
    })
}

/// Gates and ups `[experts * width, hidden]` from a tensor with each expert's gate followed by its up.
fn gates_and_ups(both: &SourceWeight, [experts, width, hidden]: [u64; 3]) -> Result<[SourceWeight; 2]> {
    let both = both.reshape(&[experts, 2 * width * hidden])?;
    let half = |first: u64| -> Result<SourceWeight> {
        let range = first * width * hidden..(first + 1) * width * hidden;
        Ok(both.columns_range(range)?.reshape(&[experts * width, hidden])?)
    };
    Ok([half(0)?, half(1)?])
}

/// Concatenates stacked matrices of `rows` rows side by side.
fn side_by_side(stacked: &SourceWeight, count: u64, rows: u64) -> Result<SourceWeight> {
    let by_row = stacked.reorder(RowOrder::Transposed([count, rows]))?;
    Ok(by_row.reshape(&[rows, count * stacked.columns()])?)
}
