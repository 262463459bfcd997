//! Bidirectional attention without a cache: `softmax(q k^T + mask) v`, with optional sinks in each head's softmax.
//!
//! Every token sees the tokens up to a distance on both sides, or all tokens, and they are all in the call: there are
//! no states. A sink is a learned score for each head without a value (arXiv:2309.17453; gpt-oss): it takes a part of
//! the weight, so that a head may attend to nothing. Scores may have terms of a token and a distance, too:
//! [`distance_scores`](super::distance_scores).

use std::ops::Range;

use super::Graph;
use super::attention::{Attention, AttentionOperands, merge_heads, sink_scores, softmax_product, split_heads};
use super::distance_scores::{DistanceInputs, DistanceTables, with_distance_scores};
use super::linear::{Linear, linear};
use super::norm::{Norm, rms_norm};
use super::rope::{Rotation, rotate};
use anec_manifest::AttentionForm;
use anec_mil::{Constant, ValueId};
use anec_source::SourceWeight;

/// Weights and constants of a layer's attention.
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
    /// Norms of queries and keys, on each head, before the rotation.
    pub qk_norm: Option<(Norm, Norm)>,
    /// Norm of each head of values.
    pub value_norm: Option<Norm>,
    /// Sink score of each query head, `[num_attention_heads]`.
    pub sinks: Option<SourceWeight>,
    /// Tables of scores by distance, times the root of `scale`; each query head has its own key-value head.
    pub distances: Option<DistanceTables>,
    /// Number of query heads.
    pub num_attention_heads: u64,
    /// Number of key-value heads.
    pub num_key_value_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Rotated dimensions.
    pub rope_dim: u64,
    /// Factor of the scores, not applied to sinks.
    pub scale: f64,
    /// Soft cap of the scores' magnitude.
    pub softcap: Option<f64>,
}

impl BandedAttention {
    /// Converts attention with keys and values of its own to attention without a cache. An output gate isn't converted.
    pub fn of(attention: &Attention) -> Option<Self> {
        let attention = attention.clone();
        Some(BandedAttention {
            query: attention.query,
            key: attention.key?,
            value: attention.value?,
            output: attention.output,
            qk_norm: attention.query_norm.zip(attention.key_norm),
            value_norm: attention.value_norm,
            sinks: attention.sinks,
            distances: None,
            num_attention_heads: attention.num_attention_heads,
            num_key_value_heads: attention.num_key_value_heads,
            head_dim: attention.head_dim,
            rope_dim: attention.rope_dim,
            scale: attention.scale,
            softcap: attention.softcap,
        })
    }
}

/// Inputs that all layers of a kind share.
#[derive(Clone, Copy, Debug)]
pub struct BandInputs {
    /// Rotation; `None` for layers without RoPE.
    pub rotation: Option<Rotation>,
    /// Mask `[1, 1, T, T]`, or with biases of heads `[1, heads, T, T]`, added to the scores.
    pub mask: ValueId,
    /// For scores by distance.
    pub distances: Option<DistanceInputs>,
}

/// Applies attention to normed hidden states; returns the addend for the residual stream.
pub fn banded_attention(
    g: &mut Graph<'_>,
    x: ValueId,
    weights: &BandedAttention,
    BandInputs { rotation, mask, distances }: BandInputs,
) -> ValueId {
    let (heads, key_heads, width) = (weights.num_attention_heads, weights.num_key_value_heads, weights.head_dim);
    let query = linear(g, x, &weights.query);
    let key = linear(g, x, &weights.key);
    let value = linear(g, x, &weights.value);
    let mut query = split_heads(g, query, heads, width);
    let mut key = split_heads(g, key, key_heads, width);
    let mut value = split_heads(g, value, key_heads, width);
    if let Some((query_norm, key_norm)) = &weights.qk_norm {
        query = rms_norm(g, query, query_norm, 3);
        key = rms_norm(g, key, key_norm, 3);
    }
    if let Some(norm) = &weights.value_norm {
        value = rms_norm(g, value, norm, 3);
    }
    if let Some(rotation) = rotation {
        query = rotate(g, query, rotation, weights.rope_dim, width);
        key = rotate(g, key, rotation, weights.rope_dim, width);
    }
    if weights.scale != 1.0 {
        // the root on both sides, as in the reference: product and factors stay in fp16's range
        let root = Constant::fp16(weights.scale.sqrt() as f32);
        query = g.ops.mul(query, root.clone());
        key = g.ops.mul(key, root);
    }
    let sinks = weights.sinks.as_ref().map(|sinks| sink_scores(g, sinks));
    let group = heads / key_heads;
    let distances = weights.distances.as_ref().zip(distances);
    let merged = match g.form.attention {
        AttentionForm::PerHead => {
            let parts: Vec<ValueId> = (0..key_heads)
                .map(|head| {
                    g.scope(&format!("head_{head}"), |g| {
                        let queries = head * group..(head + 1) * group;
                        let query = g.ops.slice(query, 1, queries.clone());
                        let sinks = sinks.map(|sinks| g.ops.slice(sinks, 1, queries));
                        let key = g.ops.slice(key, 1, head..head + 1);
                        let value = g.ops.slice(value, 1, head..head + 1);
                        let mut mask = mask_of_heads(g, mask, head * group..(head + 1) * group);
                        if let Some((tables, inputs)) = distances {
                            mask = with_distance_scores(g, [query, key], head..head + 1, tables, inputs, mask);
                        }
                        softmax_product(
                            g,
                            AttentionOperands { query, keys: key, values: value, mask, sinks },
                            weights.softcap,
                        )
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
            let mask = distances
                .map_or(mask, |(tables, inputs)| with_distance_scores(g, [query, key], 0..heads, tables, inputs, mask));
            softmax_product(g, AttentionOperands { query, keys: key, values: value, mask, sinks }, weights.softcap)
        }
    };
    let merged = merge_heads(g, merged, heads * width);
    linear(g, merged, &weights.output)
}

/// Mask of a group of heads. Layers of a function share the parts of its mask.
fn mask_of_heads(g: &mut Graph<'_>, mask: ValueId, heads: Range<u64>) -> ValueId {
    if g.ops.ty(mask).shape[1].fixed() == Some(1) {
        return mask;
    }
    if let Some(part) = g.head_masks.get(&(mask, heads.start)) {
        return *part;
    }
    let part = g.ops.slice(mask, 1, heads.clone());
    g.head_masks.insert((mask, heads.start), part);
    part
}
