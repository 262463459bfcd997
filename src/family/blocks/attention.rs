//! Attention with grouped key-value heads (arXiv:2305.13245) over a cache: `softmax(q k^T + mask) v`.

use super::Graph;
use super::cache::{Write, update};
use super::linear::{Linear, linear};
use super::norm::{Norm, rms_norm};
use super::rope::{Rotation, rotate};
use super::state::{Slot, StateKind, StateSpec};
use crate::table::QkNorm;
use anec_manifest::{AttentionForm, Layout, Role};
use anec_mil::{Constant, ValueId};
use anec_source::SourceWeight;

/// The weights and constants of one layer's attention.
#[derive(Clone, Debug)]
pub struct Attention {
    /// Query projection.
    pub query: Linear,
    /// Key projection.
    pub key: Linear,
    /// Value projection.
    pub value: Linear,
    /// Gate on what attention gives, before the sigmoid.
    pub gate: Option<Linear>,
    /// Output projection.
    pub output: Linear,
    /// Norms of queries and keys.
    pub qk_norm: Option<(Norm, Norm)>,
    /// Where they sit.
    pub qk_norm_place: QkNorm,
    /// A score for each query head, `[num_attention_heads]`, which takes its part of the weight.
    pub sinks: Option<SourceWeight>,
    /// Query heads.
    pub num_attention_heads: u64,
    /// Key-value heads.
    pub num_key_value_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Rotated dimensions.
    pub rope_dim: u64,
    /// Multiplied to the scores.
    pub scale: f64,
    /// Holds the scores between minus and plus this.
    pub softcap: Option<f64>,
}

impl Attention {
    /// Norms queries and keys if `place` is where the norms sit.
    fn qk_norm_at(&self, g: &mut Graph<'_>, place: QkNorm, query: ValueId, key: ValueId) -> (ValueId, ValueId) {
        match self.qk_norm.as_ref().filter(|_| self.qk_norm_place == place) {
            None => (query, key),
            Some((query_norm, key_norm)) => {
                // all heads at once are channels, single heads lie in the last dimension
                let axis = if place == QkNorm::WholeWidth { 1 } else { 3 };
                (rms_norm(g, query, query_norm, axis), rms_norm(g, key, key_norm, axis))
            }
        }
    }

    /// Keys and values of `slots` tokens.
    pub fn states(&self, slots: u64) -> Vec<StateSpec> {
        let spec = |kind| StateSpec { kind, rows: self.num_key_value_heads, slots, width: self.head_dim };
        vec![spec(StateKind::Key), spec(StateKind::Value)]
    }
}

/// What the calls of all layers share.
#[derive(Clone, Copy, Debug)]
pub struct AttentionInputs {
    /// Rotation, unless the layer has none.
    pub rotation: Option<Rotation>,
    /// `[1, 1, T, S]`, added to the scores.
    pub mask: ValueId,
    /// How keys and values are written.
    pub write: Write,
}

/// Attention on normalised hidden states; gives what is added to the residual stream. `keys` and `values` are the layer's
/// caches.
pub fn attention(
    g: &mut Graph<'_>,
    x: ValueId,
    weights: &Attention,
    [keys, values]: [Slot; 2],
    inputs: AttentionInputs,
) -> ValueId {
    let mut query = linear(g, x, &weights.query);
    let mut key = linear(g, x, &weights.key);
    let value = linear(g, x, &weights.value);
    (query, key) = weights.qk_norm_at(g, QkNorm::WholeWidth, query, key);
    query = split_heads(g, query, weights.num_attention_heads, weights.head_dim);
    key = split_heads(g, key, weights.num_key_value_heads, weights.head_dim);
    let value = split_heads(g, value, weights.num_key_value_heads, weights.head_dim);
    (query, key) = weights.qk_norm_at(g, QkNorm::PerHead, query, key);
    if let Some(rotation) = inputs.rotation {
        query = rotate(g, query, rotation, weights.rope_dim, weights.head_dim);
        key = rotate(g, key, rotation, weights.rope_dim, weights.head_dim);
    }
    (query, key) = weights.qk_norm_at(g, QkNorm::PerHeadRotated, query, key);
    let heads = attend(g, [query, key, value], weights, [keys, values], inputs);
    let mut merged = merge_heads(g, heads, weights.num_attention_heads * weights.head_dim);
    if let Some(gate) = &weights.gate {
        let gate = linear(g, x, gate);
        let gate = g.ops.sigmoid(gate);
        merged = g.ops.mul(merged, gate);
    }
    linear(g, merged, &weights.output)
}

/// `cap tanh(x / cap)`, where there is a cap.
pub fn softcap(g: &mut Graph<'_>, x: ValueId, cap: Option<f64>) -> ValueId {
    let Some(cap) = cap else { return x };
    let x = g.ops.mul(x, Constant::fp16((1.0 / cap) as f32));
    let x = g.ops.tanh(x);
    g.ops.mul(x, Constant::fp16(cap as f32))
}

/// What queries find in the caches once keys and values are in them, all `[1, heads, T, head_dim]`.
pub(super) fn attend(
    g: &mut Graph<'_>,
    [query, key, value]: [ValueId; 3],
    weights: &Attention,
    [keys, values]: [Slot; 2],
    inputs: AttentionInputs,
) -> ValueId {
    // scaling the queries before the product keeps the scores in fp16's range
    let query = match weights.scale {
        1.0 => query,
        scale => g.ops.mul(query, Constant::fp16(scale as f32)),
    };
    let (keys, values) =
        g.scope("cache", |g| (update(g, keys, inputs.write, key), update(g, values, inputs.write, value)));
    let sinks = weights.sinks.as_ref().map(|sinks| sink_scores(g, sinks));
    match g.form.attention {
        AttentionForm::PerHead => per_head(g, query, keys, values, inputs.mask, sinks, weights),
        AttentionForm::Grouped => grouped(g, query, keys, values, inputs.mask, sinks, weights),
    }
}

/// The scores of sinks, `[1, heads, 1, 1]`.
pub(super) fn sink_scores(g: &mut Graph<'_>, sinks: &SourceWeight) -> ValueId {
    g.weight("sinks", Role::Table, sinks, &[1, sinks.elements(), 1, 1])
}

/// `[1, heads * head_dim, T, 1]` to `[1, heads, T, head_dim]`; the same for the other layout.
pub(super) fn split_heads(g: &mut Graph<'_>, x: ValueId, heads: u64, head_dim: u64) -> ValueId {
    let x = g.ops.reshape(x, &[1, heads as i32, head_dim as i32, -1]);
    g.ops.transpose(x, &[0, 1, 3, 2])
}

/// The way back.
pub(super) fn merge_heads(g: &mut Graph<'_>, x: ValueId, channels: u64) -> ValueId {
    let x = g.ops.transpose(x, &[0, 1, 3, 2]);
    let shape = match g.form.layout {
        Layout::Bcs1 => [1, channels as i32, -1, 1],
        Layout::Bc1s => [1, channels as i32, 1, -1],
    };
    g.ops.reshape(x, &shape)
}

/// One key-value head and its group of query heads at a time.
fn per_head(
    g: &mut Graph<'_>,
    query: ValueId,
    keys: ValueId,
    values: ValueId,
    mask: ValueId,
    sinks: Option<ValueId>,
    weights: &Attention,
) -> ValueId {
    let group = weights.num_attention_heads / weights.num_key_value_heads;
    let parts: Vec<ValueId> = (0..weights.num_key_value_heads)
        .map(|head| {
            g.scope(&format!("head_{head}"), |g| {
                let queries = head * group..(head + 1) * group;
                let query = g.ops.slice(query, 1, queries.clone());
                let sinks = sinks.map(|sinks| g.ops.slice(sinks, 1, queries));
                let keys = g.ops.slice(keys, 1, head..head + 1);
                let values = g.ops.slice(values, 1, head..head + 1);
                softmax_product(g, query, keys, values, mask, sinks, weights.softcap)
            })
        })
        .collect();
    match parts.as_slice() {
        [one] => *one,
        _ => g.ops.concat(&parts, 1),
    }
}

/// All key-value heads in one batch: the query heads of a group are stacked along the tokens.
fn grouped(
    g: &mut Graph<'_>,
    query: ValueId,
    keys: ValueId,
    values: ValueId,
    mask: ValueId,
    sinks: Option<ValueId>,
    weights: &Attention,
) -> ValueId {
    let group = weights.num_attention_heads / weights.num_key_value_heads;
    let (heads, key_heads) = (weights.num_attention_heads as i32, weights.num_key_value_heads as i32);
    let width = weights.head_dim as i32;
    if group == 1 {
        return softmax_product(g, query, keys, values, mask, sinks, weights.softcap);
    }
    // of each query: sinks are stacked as queries are
    let sinks = sinks.map(|sinks| {
        let column = g.ops.slice(query, 3, 0..1);
        let zeros = g.ops.mul(column, Constant::fp16(0.0));
        let sinks = g.ops.add(zeros, sinks);
        g.ops.reshape(sinks, &[1, key_heads, -1, 1])
    });
    let query = g.ops.reshape(query, &[1, key_heads, -1, width]);
    let mask = g.ops.concat(&vec![mask; group as usize], 2);
    let out = softmax_product(g, query, keys, values, mask, sinks, weights.softcap);
    g.ops.reshape(out, &[1, heads, -1, width])
}

/// `softmax(q k^T + mask) v`. With sinks, `e^(s - m) / (sum e^(s - m) + e^(sink - m)) v` with the scores s and the largest m of
/// them and the sink: every exponential lies between 0 and 1, and the sum is at least 1.
pub(super) fn softmax_product(
    g: &mut Graph<'_>,
    query: ValueId,
    keys: ValueId,
    values: ValueId,
    mask: ValueId,
    sinks: Option<ValueId>,
    cap: Option<f64>,
) -> ValueId {
    let scores = g.ops.matmul(query, keys, false, true);
    let scores = softcap(g, scores, cap);
    let scores = g.ops.add(scores, mask);
    let Some(sinks) = sinks else {
        let weights = g.ops.softmax(scores, -1);
        return g.ops.matmul(weights, values, false, false);
    };
    let largest = g.ops.reduce_max(scores, &[3], true);
    let largest = g.ops.maximum(largest, sinks);
    let scores = g.ops.sub(scores, largest);
    let seen = g.ops.exp(scores);
    let total = g.ops.reduce_sum(seen, &[3], true);
    let sinks = g.ops.sub(sinks, largest);
    let sunk = g.ops.exp(sinks);
    let total = g.ops.add(total, sunk);
    let weights = g.ops.real_div(seen, total);
    g.ops.matmul(weights, values, false, false)
}
