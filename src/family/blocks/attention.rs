//! Attention with grouped key-value heads (arXiv:2305.13245) over a cache: `softmax(q k^T + mask) v`.

use super::Graph;
use super::cache::Write;
use super::linear::{Linear, linear};
use super::norm::{Norm, rms_norm};
use super::rope::{Rotation, rotate};
use super::state::{Slot, StateKind, StateSpec, update};
use crate::row::QkNorm;
use anec_manifest::{AttentionForm, Layout, Role};
use anec_mil::{Constant, ValueId};
use anec_source::SourceWeight;

/// The weights and constants of one layer's attention.
#[derive(Clone, Debug)]
pub struct Attention {
    /// Query projection.
    pub query: Linear,
    /// Key projection; none where keys and values are those of another layer.
    pub key: Option<Linear>,
    /// Value projection; none where values are what the key projection gives, or those of another layer.
    pub value: Option<Linear>,
    /// Gate on what attention gives, before the sigmoid.
    pub gate: Option<Linear>,
    /// Output projection.
    pub output: Linear,
    /// Norm of queries.
    pub query_norm: Option<Norm>,
    /// Norm of keys.
    pub key_norm: Option<Norm>,
    /// Where they sit.
    pub qk_norm_place: QkNorm,
    /// Norm of each head of values.
    pub value_norm: Option<Norm>,
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
    fn qk_norm_at(
        &self,
        g: &mut Graph<'_>,
        place: QkNorm,
        query: ValueId,
        key: Option<ValueId>,
    ) -> (ValueId, Option<ValueId>) {
        let own = self.qk_norm_place == QkNorm::PerHeadOwn && place == QkNorm::PerHead;
        if self.qk_norm_place != place && !own {
            return (query, key);
        }
        // all heads at once are channels, single heads lie in the last dimension
        let axis = if place == QkNorm::WholeWidth { 1 } else { 3 };
        let normed =
            |g: &mut Graph<'_>, x, norm: &Option<Norm>| norm.as_ref().map_or(x, |norm| rms_norm(g, x, norm, axis));
        let query = normed(g, query, &self.query_norm);
        (query, key.map(|key| normed(g, key, &self.key_norm)))
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
    /// Rotation of queries, where it isn't that of keys.
    pub query_rotation: Option<Rotation>,
    /// `[1, 1, T, S]`, added to the scores.
    pub mask: ValueId,
    /// How keys and values are written.
    pub write: Write,
    /// The layer whose keys and values those are, where several layers look at them.
    pub shares: Option<usize>,
}

/// What attention looks at: all keys and values with those of the call, `[1, heads, slots, head_dim]`.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    keys: ValueId,
    values: ValueId,
}

/// Keys and values of a layer that others look at, too.
#[derive(Clone, Copy, Debug)]
pub struct SharedKeyValues {
    /// Keys and values of the call's tokens, `[1, heads, T, head_dim]`.
    pub rows: [ValueId; 2],
    /// What is looked at, once they were written.
    pub seen: Option<Seen>,
}

/// Attention on normalised hidden states; gives what is added to the residual stream. `slots` are the layer's caches of keys
/// and values, of which a layer that looks at another one's has none, unless that layer is in another function.
pub fn attention(
    g: &mut Graph<'_>,
    x: ValueId,
    weights: &Attention,
    slots: Option<[Slot; 2]>,
    inputs: AttentionInputs,
) -> ValueId {
    let mut query = linear(g, x, &weights.query);
    let mut key = weights.key.as_ref().map(|key| linear(g, x, key));
    let value = weights.value.as_ref().map(|value| linear(g, x, value));
    (query, key) = weights.qk_norm_at(g, QkNorm::WholeWidth, query, key);
    query = split_heads(g, query, weights.num_attention_heads, weights.head_dim);
    key = key.map(|key| split_heads(g, key, weights.num_key_value_heads, weights.head_dim));
    let mut value = value.map(|value| split_heads(g, value, weights.num_key_value_heads, weights.head_dim)).or(key);
    if let Some(norm) = &weights.value_norm {
        value = value.map(|value| rms_norm(g, value, norm, 3));
    }
    (query, key) = weights.qk_norm_at(g, QkNorm::PerHead, query, key);
    if let Some(rotation) = inputs.rotation {
        query = rotate(g, query, inputs.query_rotation.unwrap_or(rotation), weights.rope_dim, weights.head_dim);
        key = key.map(|key| rotate(g, key, rotation, weights.rope_dim, weights.head_dim));
    }
    (query, key) = weights.qk_norm_at(g, QkNorm::PerHeadRotated, query, key);
    let query = scaled(g, query, weights.scale);
    let Some(seen) = look_up(g, key.zip(value), slots, inputs) else {
        return g.missing("attention", "keys and values, and two states for them", x);
    };
    let heads = attend_to(g, query, seen, weights, inputs.mask);
    let mut merged = merge_heads(g, heads, weights.num_attention_heads * weights.head_dim);
    if let Some(gate) = &weights.gate {
        let gate = linear(g, x, gate);
        let gate = g.ops.sigmoid(gate);
        merged = g.ops.mul(merged, gate);
    }
    linear(g, merged, &weights.output)
}

/// What a layer looks at: its own keys and values once `rows` are written to its caches, or those of the layer that
/// `inputs` names.
fn look_up(
    g: &mut Graph<'_>,
    rows: Option<(ValueId, ValueId)>,
    slots: Option<[Slot; 2]>,
    inputs: AttentionInputs,
) -> Option<Seen> {
    let shared = inputs.shares.and_then(|layer| g.shared.get(&layer).copied());
    let rows = match (rows, shared) {
        (Some((key, value)), _) => [key, value],
        (None, Some(SharedKeyValues { seen: Some(seen), .. })) => return Some(seen),
        // the layer is in another function, and this is the first here that looks at what it gave
        (None, Some(SharedKeyValues { rows, seen: None })) => rows,
        (None, None) => return None,
    };
    let seen = written(g, rows, slots?, inputs.write);
    if let Some(layer) = inputs.shares {
        g.shared.insert(layer, SharedKeyValues { rows, seen: Some(seen) });
    }
    Some(seen)
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
    let query = scaled(g, query, weights.scale);
    let seen = written(g, [key, value], [keys, values], inputs.write);
    attend_to(g, query, seen, weights, inputs.mask)
}

/// Queries times what the scores are scaled by: before the product, which keeps the scores in fp16's range.
fn scaled(g: &mut Graph<'_>, query: ValueId, scale: f64) -> ValueId {
    match scale {
        1.0 => query,
        scale => g.ops.mul(query, Constant::fp16(scale as f32)),
    }
}

/// The caches once keys and values are in them.
fn written(g: &mut Graph<'_>, [key, value]: [ValueId; 2], [keys, values]: [Slot; 2], write: Write) -> Seen {
    g.scope("cache", |g| Seen { keys: update(g, keys, write, key), values: update(g, values, write, value) })
}

/// What queries find there.
fn attend_to(g: &mut Graph<'_>, query: ValueId, seen: Seen, weights: &Attention, mask: ValueId) -> ValueId {
    let Seen { keys, values } = seen;
    let sinks = weights.sinks.as_ref().map(|sinks| sink_scores(g, sinks));
    match g.form.attention {
        AttentionForm::PerHead => per_head(g, query, keys, values, mask, sinks, weights),
        AttentionForm::Grouped => grouped(g, query, keys, values, mask, sinks, weights),
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
