//! Attention with grouped key-value heads (arXiv:2305.13245) over a cache: `softmax(q k^T + mask) v`.

use super::Graph;
use super::cache::{Caches, Write};
use super::linear::{Linear, linear};
use super::norm::{Norm, rms_norm};
use super::rope::{Rotation, rotate};
use crate::manifest::{AttentionForm, Layout};
use crate::mil::{Constant, ValueId};

/// The weights and constants of one layer's attention.
#[derive(Clone, Debug)]
pub struct Attention {
    /// Query projection.
    pub query: Linear,
    /// Key projection.
    pub key: Linear,
    /// Value projection.
    pub value: Linear,
    /// Output projection.
    pub output: Linear,
    /// Norms of queries and keys.
    pub qk_norm: Option<(Norm, Norm)>,
    /// The norms work on each head (else on all heads at once).
    pub qk_norm_per_head: bool,
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

/// Attention of layer `layer` on normalised hidden states; gives what is added to the residual stream.
pub fn attention(
    g: &mut Graph<'_>,
    x: ValueId,
    weights: &Attention,
    layer: usize,
    caches: &Caches,
    inputs: AttentionInputs,
) -> ValueId {
    let mut query = linear(g, x, &weights.query);
    let mut key = linear(g, x, &weights.key);
    let value = linear(g, x, &weights.value);
    if let Some((query_norm, key_norm)) = weights.qk_norm.as_ref().filter(|_| !weights.qk_norm_per_head) {
        query = rms_norm(g, query, query_norm, 1);
        key = rms_norm(g, key, key_norm, 1);
    }
    let mut query = split_heads(g, query, weights.num_attention_heads, weights.head_dim);
    let mut key = split_heads(g, key, weights.num_key_value_heads, weights.head_dim);
    let value = split_heads(g, value, weights.num_key_value_heads, weights.head_dim);
    if let Some((query_norm, key_norm)) = weights.qk_norm.as_ref().filter(|_| weights.qk_norm_per_head) {
        query = rms_norm(g, query, query_norm, 3);
        key = rms_norm(g, key, key_norm, 3);
    }
    if let Some(rotation) = inputs.rotation {
        query = rotate(g, query, rotation, weights.rope_dim, weights.head_dim);
        key = rotate(g, key, rotation, weights.rope_dim, weights.head_dim);
    }
    // scaling the queries before the product keeps the scores in fp16's range
    let query = g.ops.mul(query, Constant::fp16(weights.scale as f32));
    let (keys, values) = caches.update(g, layer, inputs.write, key, value);
    let heads = match g.form.attention {
        AttentionForm::PerHead => per_head(g, query, keys, values, inputs.mask, weights),
        AttentionForm::Grouped => grouped(g, query, keys, values, inputs.mask, weights),
    };
    let merged = merge_heads(g, heads, weights.num_attention_heads * weights.head_dim);
    linear(g, merged, &weights.output)
}

/// `[1, heads * head_dim, T, 1]` to `[1, heads, T, head_dim]`; the same for the other layout.
fn split_heads(g: &mut Graph<'_>, x: ValueId, heads: u64, head_dim: u64) -> ValueId {
    let x = g.ops.reshape(x, &[1, heads as i32, head_dim as i32, -1]);
    g.ops.transpose(x, &[0, 1, 3, 2])
}

/// The way back.
fn merge_heads(g: &mut Graph<'_>, x: ValueId, channels: u64) -> ValueId {
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
    weights: &Attention,
) -> ValueId {
    let group = weights.num_attention_heads / weights.num_key_value_heads;
    let parts: Vec<ValueId> = (0..weights.num_key_value_heads)
        .map(|head| {
            g.scope(&format!("head_{head}"), |g| {
                let query = g.ops.slice(query, 1, head * group..(head + 1) * group);
                let keys = g.ops.slice(keys, 1, head..head + 1);
                let values = g.ops.slice(values, 1, head..head + 1);
                softmax_product(g, query, keys, values, mask)
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
    weights: &Attention,
) -> ValueId {
    let group = weights.num_attention_heads / weights.num_key_value_heads;
    let (heads, key_heads) = (weights.num_attention_heads as i32, weights.num_key_value_heads as i32);
    let width = weights.head_dim as i32;
    if group == 1 {
        return softmax_product(g, query, keys, values, mask);
    }
    let query = g.ops.reshape(query, &[1, key_heads, -1, width]);
    let mask = g.ops.concat(&vec![mask; group as usize], 2);
    let out = softmax_product(g, query, keys, values, mask);
    g.ops.reshape(out, &[1, heads, -1, width])
}

fn softmax_product(g: &mut Graph<'_>, query: ValueId, keys: ValueId, values: ValueId, mask: ValueId) -> ValueId {
    let scores = g.ops.matmul(query, keys, false, true);
    let scores = g.ops.add(scores, mask);
    let weights = g.ops.softmax(scores, -1);
    g.ops.matmul(weights, values, false, false)
}
