//! Attention with grouped key-value heads (arXiv:2305.13245) and a KV cache: `softmax(q k^T + mask) v`.

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

/// Weights and constants of a layer's attention.
#[derive(Clone, Debug)]
pub struct Attention {
    /// Query projection.
    pub query: Linear,
    /// Key projection; `None` if the layer uses keys and values of another layer.
    pub key: Option<Linear>,
    /// Value projection; `None` if values are the key projection's output, or those of another layer.
    pub value: Option<Linear>,
    /// Gate of attention's output, before the sigmoid.
    pub gate: Option<Linear>,
    /// Output projection.
    pub output: Linear,
    /// Norm of queries.
    pub query_norm: Option<Norm>,
    /// Norm of keys.
    pub key_norm: Option<Norm>,
    /// Place of the query-key norms.
    pub qk_norm_place: QkNorm,
    /// Norm of each head of values.
    pub value_norm: Option<Norm>,
    /// Sink score of each query head, `[num_attention_heads]`.
    pub sinks: Option<SourceWeight>,
    /// Number of query heads.
    pub num_attention_heads: u64,
    /// Number of key-value heads.
    pub num_key_value_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Rotated dimensions.
    pub rope_dim: u64,
    /// Factor of the scores.
    pub scale: f64,
    /// Soft cap of the scores' magnitude.
    pub softcap: Option<f64>,
    /// Limit to which queries, keys and values are clipped before the rotation.
    pub clip: Option<f64>,
}

impl Attention {
    /// Norms queries and keys if `place` is the place of the norms.
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
        // all heads at once are channels; single heads are the last dimension
        let axis = if place == QkNorm::WholeWidth { 1 } else { 3 };
        let normed =
            |g: &mut Graph<'_>, x, norm: &Option<Norm>| norm.as_ref().map_or(x, |norm| rms_norm(g, x, norm, axis));
        let query = normed(g, query, &self.query_norm);
        (query, key.map(|key| normed(g, key, &self.key_norm)))
    }

    /// States: keys and values of `slots` tokens.
    pub fn states(&self, slots: u64) -> Vec<StateSpec> {
        let spec = |kind| StateSpec { kind, rows: self.num_key_value_heads, slots, width: self.head_dim };
        vec![spec(StateKind::Key), spec(StateKind::Value)]
    }
}

/// Inputs that all layers of a kind share.
#[derive(Clone, Copy, Debug)]
pub struct AttentionInputs {
    /// Rotation; `None` for layers without RoPE.
    pub rotation: Option<Rotation>,
    /// Rotation of queries, if it differs from that of keys.
    pub query_rotation: Option<Rotation>,
    /// Mask `[1, 1, T, S]`, added to the scores.
    pub mask: ValueId,
    /// Form of writes to the caches.
    pub write: Write,
    /// Layer that computes the keys and values, if several layers share them.
    pub shares: Option<usize>,
}

/// All keys and values including those of the call, `[1, heads, slots, head_dim]`.
#[derive(Clone, Copy, Debug)]
pub struct CachedKeyValues {
    keys: ValueId,
    values: ValueId,
}

/// Keys and values of a layer that other layers use, too.
#[derive(Clone, Copy, Debug)]
pub struct SharedKeyValues {
    /// Keys and values of the call's tokens, `[1, heads, T, head_dim]`.
    pub rows: [ValueId; 2],
    /// Cache contents after the write, once written.
    pub seen: Option<CachedKeyValues>,
}

/// Applies attention to normed hidden states; returns the addend for the residual stream. `slots` are the layer's
/// caches of keys and values. A layer that uses another layer's keys and values has none, unless that layer is in
/// another function.
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
    let mut clipped = |x| clip(g, x, weights.clip);
    (query, key) = (clipped(query), key.map(&mut clipped));
    let value = value.map(clipped);
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
    let Some(seen) = attended_key_values(g, key.zip(value), slots, inputs) else {
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

/// Keys and values for the queries: those of the layer once `rows` are written to its caches, or those of the layer
/// that `inputs` names.
fn attended_key_values(
    g: &mut Graph<'_>,
    rows: Option<(ValueId, ValueId)>,
    slots: Option<[Slot; 2]>,
    inputs: AttentionInputs,
) -> Option<CachedKeyValues> {
    let shared = inputs.shares.and_then(|layer| g.shared.get(&layer).copied());
    let rows = match (rows, shared) {
        (Some((key, value)), _) => [key, value],
        (None, Some(SharedKeyValues { seen: Some(seen), .. })) => return Some(seen),
        // the layer is in another function, and this is the first layer here that uses its output
        (None, Some(SharedKeyValues { rows, seen: None })) => rows,
        (None, None) => return None,
    };
    let seen = written(g, rows, slots?, inputs.write);
    if let Some(layer) = inputs.shares {
        g.shared.insert(layer, SharedKeyValues { rows, seen: Some(seen) });
    }
    Some(seen)
}

/// `cap tanh(x / cap)`, if there is a cap.
pub fn softcap(g: &mut Graph<'_>, x: ValueId, cap: Option<f64>) -> ValueId {
    let Some(cap) = cap else { return x };
    let x = g.ops.mul(x, Constant::fp16((1.0 / cap) as f32));
    let x = g.ops.tanh(x);
    g.ops.mul(x, Constant::fp16(cap as f32))
}

/// `min(max(x, -limit), limit)`, if there is a limit.
fn clip(g: &mut Graph<'_>, x: ValueId, limit: Option<f64>) -> ValueId {
    limit.map_or(x, |limit| g.ops.clip(x, -limit as f32, limit as f32))
}

/// Writes keys and values to the caches and attends to them, all `[1, heads, T, head_dim]`.
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

/// Queries times the scale of the scores: before the product, to keep the scores in fp16's range.
fn scaled(g: &mut Graph<'_>, query: ValueId, scale: f64) -> ValueId {
    match scale {
        1.0 => query,
        scale => g.ops.mul(query, Constant::fp16(scale as f32)),
    }
}

/// Writes keys and values to the caches.
fn written(g: &mut Graph<'_>, [key, value]: [ValueId; 2], [keys, values]: [Slot; 2], write: Write) -> CachedKeyValues {
    g.scope("cache", |g| CachedKeyValues { keys: update(g, keys, write, key), values: update(g, values, write, value) })
}

/// Output of attention to cached keys and values.
fn attend_to(g: &mut Graph<'_>, query: ValueId, seen: CachedKeyValues, weights: &Attention, mask: ValueId) -> ValueId {
    let CachedKeyValues { keys, values } = seen;
    let sinks = weights.sinks.as_ref().map(|sinks| sink_scores(g, sinks));
    let operands = AttentionOperands { query, keys, values, mask, sinks };
    match g.form.attention {
        AttentionForm::PerHead => per_head(g, operands, weights),
        AttentionForm::Grouped => grouped(g, operands, weights),
    }
}

/// Sink scores, `[1, heads, 1, 1]`.
pub(super) fn sink_scores(g: &mut Graph<'_>, sinks: &SourceWeight) -> ValueId {
    g.weight("sinks", Role::Table, sinks, &[1, sinks.elements(), 1, 1])
}

/// `[1, heads * head_dim, T, 1]` (or `[1, heads * head_dim, 1, T]`) to `[1, heads, T, head_dim]`.
pub(super) fn split_heads(g: &mut Graph<'_>, x: ValueId, heads: u64, head_dim: u64) -> ValueId {
    let x = g.ops.reshape(x, &[1, heads as i32, head_dim as i32, -1]);
    g.ops.transpose(x, &[0, 1, 3, 2])
}

/// Inverse of [`split_heads`].
pub(super) fn merge_heads(g: &mut Graph<'_>, x: ValueId, channels: u64) -> ValueId {
    let x = g.ops.transpose(x, &[0, 1, 3, 2]);
    let shape = match g.form.layout {
        Layout::Bcs1 => [1, channels as i32, -1, 1],
        Layout::Bc1s => [1, channels as i32, 1, -1],
    };
    g.ops.reshape(x, &shape)
}

/// Operands of attention.
#[derive(Clone, Copy)]
pub(super) struct AttentionOperands {
    /// Queries `[1, heads, T, head_dim]`.
    pub(super) query: ValueId,
    /// Keys `[1, key heads, slots, head_dim]`.
    pub(super) keys: ValueId,
    /// Values `[1, key heads, slots, head_dim]`.
    pub(super) values: ValueId,
    /// Added to scores `[1, heads, T, slots]`.
    pub(super) mask: ValueId,
    /// Scores of sinks `[1, heads, 1, 1]`.
    pub(super) sinks: Option<ValueId>,
}

/// Attention of one key-value head and its group of query heads at a time.
fn per_head(g: &mut Graph<'_>, all: AttentionOperands, weights: &Attention) -> ValueId {
    let group = weights.num_attention_heads / weights.num_key_value_heads;
    let parts: Vec<ValueId> = (0..weights.num_key_value_heads)
        .map(|head| {
            g.scope(&format!("head_{head}"), |g| {
                let queries = head * group..(head + 1) * group;
                let own = AttentionOperands {
                    query: g.ops.slice(all.query, 1, queries.clone()),
                    sinks: all.sinks.map(|sinks| g.ops.slice(sinks, 1, queries)),
                    keys: g.ops.slice(all.keys, 1, head..head + 1),
                    values: g.ops.slice(all.values, 1, head..head + 1),
                    mask: all.mask,
                };
                softmax_product(g, own, weights.softcap)
            })
        })
        .collect();
    match parts.as_slice() {
        [one] => *one,
        _ => g.ops.concat(&parts, 1),
    }
}

/// Attention of all key-value heads in a batch: the query heads of a group are stacked along the tokens.
fn grouped(g: &mut Graph<'_>, all: AttentionOperands, weights: &Attention) -> ValueId {
    let group = weights.num_attention_heads / weights.num_key_value_heads;
    let (heads, key_heads) = (weights.num_attention_heads as i32, weights.num_key_value_heads as i32);
    let width = weights.head_dim as i32;
    if group == 1 {
        return softmax_product(g, all, weights.softcap);
    }
    // one for each query: sinks are stacked as queries are
    let sinks = all.sinks.map(|sinks| {
        let column = g.ops.slice(all.query, 3, 0..1);
        let zeros = g.ops.mul(column, Constant::fp16(0.0));
        let sinks = g.ops.add(zeros, sinks);
        g.ops.reshape(sinks, &[1, key_heads, -1, 1])
    });
    let query = g.ops.reshape(all.query, &[1, key_heads, -1, width]);
    let mask = g.ops.concat(&vec![all.mask; group as usize], 2);
    let out = softmax_product(g, AttentionOperands { query, mask, sinks, ..all }, weights.softcap);
    g.ops.reshape(out, &[1, heads, -1, width])
}

/// Elements of a head's score matrix from which on results of the Neural Engine were corrupted (rule `score-matrix`).
pub const SCORES_OF_CALL: u64 = 1 << 20;

/// `softmax(q k^T + mask) v` of all queries, a chunk of them at a time where a head's scores would be too many. Rows of
/// scores don't depend on each other.
pub(super) fn softmax_product(g: &mut Graph<'_>, all: AttentionOperands, cap: Option<f64>) -> ValueId {
    let [Some(rows), Some(columns)] = [all.query, all.keys].map(|value| g.ops.ty(value).shape[2].fixed()) else {
        return product_of_rows(g, all, cap);
    };
    let most = (SCORES_OF_CALL - 1) / columns.max(1);
    if rows <= most || most == 0 {
        return product_of_rows(g, all, cap);
    }
    // as equal as possible
    let chunks = rows.div_ceil(most);
    let parts: Vec<ValueId> = (0..chunks)
        .map(|chunk| {
            let own = rows * chunk / chunks..rows * (chunk + 1) / chunks;
            g.scope(&format!("queries_{}", own.start), |g| {
                // one row serves all queries
                let part = |g: &mut Graph<'_>, x| match g.ops.ty(x).shape[2].fixed() {
                    Some(1) => x,
                    _ => g.ops.slice(x, 2, own.clone()),
                };
                let query = g.ops.slice(all.query, 2, own.clone());
                let (mask, sinks) = (part(g, all.mask), all.sinks.map(|sinks| part(g, sinks)));
                product_of_rows(g, AttentionOperands { query, mask, sinks, ..all }, cap)
            })
        })
        .collect();
    g.ops.concat(&parts, 2)
}

/// `softmax(q k^T + mask) v`. With sinks, `e^(s - m) / (sum e^(s - m) + e^(sink - m)) v` with the scores s and the
/// maximum m of scores and sink: every exponential is between 0 and 1, and the sum is at least 1.
fn product_of_rows(g: &mut Graph<'_>, all: AttentionOperands, cap: Option<f64>) -> ValueId {
    let AttentionOperands { query, keys, values, mask, sinks } = all;
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
