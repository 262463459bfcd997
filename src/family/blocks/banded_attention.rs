//! Attention of a text on itself within a band, with sinks and without a cache:
//! `softmax(q k^T + mask) v`, where each head's softmax also counts a sink that gives nothing.
//!
//! Every token sees the tokens up to a distance on both sides, and they are all in the call: nothing is carried from one
//! call to the next. The sink is a number per head among the scores (arXiv:2309.17453; learned as in gpt-oss): it takes
//! its part of the weight, so that a head may look at nothing at all.

use super::Graph;
use super::attention::{merge_heads, split_heads};
use super::linear::{Linear, linear};
use super::rope::{Rotation, rotate};
use anec_manifest::{AttentionForm, Role};
use anec_mil::{Constant, ValueId};
use anec_source::SourceWeight;

/// The weights and constants of one layer's attention.
#[derive(Clone, Debug)]
pub struct BandedAttention {
    /// Query projection.
    pub query: Linear,
    /// Key projection.
    pub key: Linear,
    /// Value projection.
    pub value: Linear,
    /// Output projection.
    pub output: Linear,
    /// A score for each query head, `[num_attention_heads]`.
    pub sinks: SourceWeight,
    /// Query heads.
    pub num_attention_heads: u64,
    /// Key-value heads.
    pub num_key_value_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Rotated dimensions.
    pub rope_dim: u64,
    /// Multiplied to the scores, but not to the sinks.
    pub scale: f64,
}

/// Attention on normalised hidden states; gives what is added to the residual stream. `mask` is `[1, 1, T, T]`.
pub fn banded_attention(
    g: &mut Graph<'_>,
    x: ValueId,
    weights: &BandedAttention,
    rotation: Rotation,
    mask: ValueId,
) -> ValueId {
    let (heads, key_heads, width) = (weights.num_attention_heads, weights.num_key_value_heads, weights.head_dim);
    let query = linear(g, x, &weights.query);
    let key = linear(g, x, &weights.key);
    let value = linear(g, x, &weights.value);
    let query = split_heads(g, query, heads, width);
    let key = split_heads(g, key, key_heads, width);
    let value = split_heads(g, value, key_heads, width);
    let query = rotate(g, query, rotation, weights.rope_dim, width);
    let key = rotate(g, key, rotation, weights.rope_dim, width);
    // the root on both sides, as the reference has it: neither product nor factors leave fp16's range
    let root = Constant::fp16(weights.scale.sqrt() as f32);
    let query = g.ops.mul(query, root.clone());
    let key = g.ops.mul(key, root);
    let sinks = g.weight("sinks", Role::Table, &weights.sinks, &[1, heads, 1, 1]);
    let group = heads / key_heads;
    let merged = match g.form.attention {
        AttentionForm::PerHead => {
            let parts: Vec<ValueId> = (0..key_heads)
                .map(|head| {
                    g.scope(&format!("head_{head}"), |g| {
                        let queries = head * group..(head + 1) * group;
                        let query = g.ops.slice(query, 1, queries.clone());
                        let sinks = g.ops.slice(sinks, 1, queries);
                        let key = g.ops.slice(key, 1, head..head + 1);
                        let value = g.ops.slice(value, 1, head..head + 1);
                        with_sinks(g, query, key, value, mask, sinks)
                    })
                })
                .collect();
            match parts.as_slice() {
                [one] => *one,
                _ => g.ops.concat(&parts, 1),
            }
        }
        AttentionForm::Grouped => {
            let mut repeat = |x: ValueId| match group {
                1 => x,
                _ => {
                    let heads = (0..key_heads).flat_map(|head| vec![head; group as usize]);
                    let copies: Vec<ValueId> = heads.map(|head| g.ops.slice(x, 1, head..head + 1)).collect();
                    g.ops.concat(&copies, 1)
                }
            };
            let (key, value) = (repeat(key), repeat(value));
            with_sinks(g, query, key, value, mask, sinks)
        }
    };
    let merged = merge_heads(g, merged, heads * width);
    linear(g, merged, &weights.output)
}

/// `e^(s - m) / (sum e^(s - m) + e^(sink - m)) v` with the scores s and the largest m of them and the sink: every
/// exponential lies between 0 and 1, and the sum is at least 1.
fn with_sinks(
    g: &mut Graph<'_>,
    query: ValueId,
    key: ValueId,
    value: ValueId,
    mask: ValueId,
    sinks: ValueId,
) -> ValueId {
    let scores = g.ops.matmul(query, key, false, true);
    let scores = g.ops.add(scores, mask);
    let largest = g.ops.reduce_max(scores, &[3], true);
    let largest = g.ops.maximum(largest, sinks);
    let scores = g.ops.sub(scores, largest);
    let seen = g.ops.exp(scores);
    let total = g.ops.reduce_sum(seen, &[3], true);
    let sinks = g.ops.sub(sinks, largest);
    let sunk = g.ops.exp(sinks);
    let total = g.ops.add(total, sunk);
    let weights = g.ops.real_div(seen, total);
    g.ops.matmul(weights, value, false, false)
}
