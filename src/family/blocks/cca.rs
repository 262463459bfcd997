//! Compressed convolutional attention (arXiv:2510.04476): attention with few narrow heads, whose queries and keys are
//! mixed over neighbouring tokens.
//!
//! ```text
//! q, k = W_q h, W_k h
//! m_q  = (q + k of the group) / 2,  m_k = mean of m_q over the group
//! q, k = conv_heads(conv_channels([q; k])) + [m_q; m_k]
//! v    = [W_v h; W_d h of the token before]
//! q, k = q / |q| * sqrt(head_dim),  k / |k| * sqrt(head_dim) * temperature      (then rotated, and as usual)
//! ```
//!
//! Zeros precede the first token: in the projections for the convolutions, in the hidden states for the values.

use super::Graph;
use super::attention::{Attention, AttentionInputs, attend, merge_heads, split_heads};
use super::causal_conv::{CausalConv, causal_conv, depthwise, kernel_shape, with_past};
use super::linear::{Linear, linear};
use super::norm::l2_normalize;
use super::rope::rotate;
use super::state::{Slot, StateKind, StateSpec};
use anec_manifest::Role;
use anec_mil::{Constant, ValueId};
use anec_source::SourceWeight;

/// Epsilon against division by a length of zero. The reference clamps lengths to its number format's epsilon; this is
/// about the least that fp16 can square and take the root of, and negligible beside actual lengths.
const LENGTH_EPS: f64 = 1e-4;

/// Weights of the block.
#[derive(Clone, Debug)]
pub struct Cca {
    /// Parts shared with plain attention. The value projection produces the first half of the values. The scale is 1,
    /// because the length of the queries and the usual scale of the scores cancel.
    pub attention: Attention,
    /// Second half of the values, for the next token, without its bias.
    pub delayed_value: Linear,
    /// Delay of one token, with the bias of the delayed values.
    pub delay: CausalConv,
    /// First convolution, of each channel of queries and keys.
    pub channel_conv: CausalConv,
    /// Second convolution, of each head, `[channels, head_dim, kernel]`.
    pub head_conv: SourceWeight,
    /// Bias of the second convolution, `[channels]`.
    pub head_conv_bias: SourceWeight,
    /// Length of each head's keys, `[num_key_value_heads]`: the temperature times the root of the head width.
    pub temperature: SourceWeight,
}

impl Cca {
    /// States: keys and values of `slots` tokens, the last inputs of both convolutions, the values for the next token.
    pub fn states(&self, slots: u64) -> Vec<StateSpec> {
        let channels = self.channel_conv.state();
        let convolution = StateSpec { slots: channels.slots + self.head_conv.columns() - 1, ..channels };
        let delay = StateSpec { kind: StateKind::Delay, ..self.delay.state() };
        let mut states = self.attention.states(slots);
        states.extend([convolution, delay]);
        states
    }
}

/// Applies attention to normed hidden states; returns the addend for the residual stream.
pub fn cca(
    g: &mut Graph<'_>,
    x: ValueId,
    weights: &Cca,
    [keys, values, convolution, delay]: [Slot; 4],
    inputs: AttentionInputs,
) -> ValueId {
    let Attention { num_attention_heads: heads, num_key_value_heads: key_heads, head_dim, rope_dim, .. } =
        weights.attention;
    let (Some(key), Some(value)) = (&weights.attention.key, &weights.attention.value) else {
        return g.missing("cca", "projections of keys and values", x);
    };
    let query = linear(g, x, &weights.attention.query);
    let key = linear(g, x, key);
    let (query_mean, key_mean) = g.scope("means", |g| means(g, query, key, weights));
    let mixed = g.ops.concat(&[query, key], 1);
    let mixed = g.scope("conv", |g| convolve(g, mixed, weights, convolution));
    let query = g.ops.slice(mixed, 1, 0..heads * head_dim);
    let query = split_heads(g, query, heads, head_dim);
    let query = g.ops.add(query, query_mean);
    let key = g.ops.slice(mixed, 1, heads * head_dim..(heads + key_heads) * head_dim);
    let key = split_heads(g, key, key_heads, head_dim);
    let key = g.ops.add(key, key_mean);

    let value = linear(g, x, value);
    let delayed = linear(g, x, &weights.delayed_value);
    let delayed = g.scope("delay", |g| causal_conv(g, delayed, &weights.delay, delay));
    let value = g.ops.concat(&[value, delayed], 1);
    let value = split_heads(g, value, key_heads, head_dim);

    let mut query = l2_normalize(g, query, 3, LENGTH_EPS * LENGTH_EPS);
    let key = l2_normalize(g, key, 3, LENGTH_EPS * LENGTH_EPS);
    let temperature = g.weight("temperature", Role::Table, &weights.temperature, &[1, key_heads, 1, 1]);
    let mut key = g.ops.mul(key, temperature);
    if let Some(rotation) = inputs.rotation {
        query = rotate(g, query, rotation, rope_dim, head_dim);
        key = rotate(g, key, rotation, rope_dim, head_dim);
    }
    let heads = attend(g, [query, key, value], &weights.attention, [keys, values], inputs);
    let merged = merge_heads(g, heads, weights.attention.output.weight.columns());
    linear(g, merged, &weights.attention.output)
}

/// Mean of each query and its key, and its mean over the queries of a key, `[1, heads, T, head_dim]`.
fn means(g: &mut Graph<'_>, query: ValueId, key: ValueId, weights: &Cca) -> (ValueId, ValueId) {
    let Attention { num_attention_heads, num_key_value_heads, head_dim, .. } = weights.attention;
    let (groups, head_dim_size) = (num_key_value_heads as i32, head_dim as i32);
    // a key-value head and its query heads are one entry of the outermost axis
    let query = g.ops.reshape(query, &[groups, (num_attention_heads / num_key_value_heads) as i32, head_dim_size, -1]);
    let key = g.ops.reshape(key, &[groups, 1, head_dim_size, -1]);
    let sum = g.ops.add(query, key);
    let query = g.ops.mul(sum, Constant::fp16(0.5));
    let key = g.ops.reduce_mean(query, &[1], true);
    (split_heads(g, query, num_attention_heads, head_dim), split_heads(g, key, num_key_value_heads, head_dim))
}

/// Applies both convolutions to the channels of all query and key heads.
fn convolve(g: &mut Graph<'_>, x: ValueId, weights: &Cca, state: Slot) -> ValueId {
    let x = with_past(g, x, state);
    let x = depthwise(g, x, &weights.channel_conv);
    let (channels, head_dim) = (weights.head_conv.shape()[0], weights.attention.head_dim);
    let shape = kernel_shape(g, channels, head_dim, weights.head_conv.columns());
    let weight = g.weight("heads_weight", Role::Table, &weights.head_conv, &shape);
    let bias = g.weight("heads_bias", Role::Bias, &weights.head_conv_bias, &[channels]);
    g.ops.grouped_conv("heads", x, weight, Some(bias), channels / head_dim)
}
