//! Gated DeltaNet (arXiv:2412.06464): a linear recurrence whose state is a matrix `S` `[key width, value width]` for
//! each head. For a token with key k, value v, query q, step b and log-decay g:
//!
//! ```text
//! S <- exp(g) S;  S <- S + k (b (v - S^T k))^T;  o = S^T q
//! ```
//!
//! The tokens of a call are computed in parallel. With `d[i, j] = exp(g[j+1] + … + g[i])` for j <= i, else 0, and
//! `e[i] = exp(g[0] + … + g[i])`:
//!
//! ```text
//! L = strictly lower part of b (k k^T * d)
//! U = (I + L)^-1 b (v - e (k S))
//! o = e (q S) + (q k^T * d) U
//! S <- e[T-1] S + (k * d[T-1])^T U
//! ```
//!
//! The inverse is built from blocks of 1, 2, 4 … tokens: that of `[[A, 0], [B, C]]` is `[[A', 0], [-C' B A', C']]`,
//! which is `X - X (M * L) X` where X inverts the diagonal blocks and M picks B. It is as stable as substitution and
//! takes log2 T steps. Sums of log-decays are formed over their own tokens, not as differences of running sums, which
//! would lose digits in fp16.
//!
//! Queries are not divided by the root of their width: the norm of the output cancels any factor. The factor is applied
//! to the norm's epsilon, so that small outputs keep their digits.

use super::Graph;
use super::activation::{silu, softplus};
use super::attention::{merge_heads, split_heads};
use super::causal_conv::{CausalConv, causal_conv};
use super::linear::{Linear, linear};
use super::norm::{Norm, l2_normalize, rms_norm};
use super::state::{Slot, StateKind, StateSpec};
use anec_manifest::{Layout, Role};
use anec_mil::ValueId;
use anec_source::SourceWeight;

/// Epsilon of the L2 norms of queries and keys.
const L2_EPS: f64 = 1e-6;

/// Weights and constants of a layer's DeltaNet. Value heads that share a key head are `num_key_heads` apart.
#[derive(Clone, Debug)]
pub struct DeltaNet {
    /// Projection to queries, keys and values, before the convolution.
    pub query_key_value: Linear,
    /// Gate of the output.
    pub gate: Linear,
    /// Steps, before the sigmoid.
    pub step: Linear,
    /// Decays, before the softplus.
    pub decay: Linear,
    /// Convolution of queries, keys and values.
    pub conv: CausalConv,
    /// Bias of the decays, `[num_value_heads]`.
    pub decay_bias: SourceWeight,
    /// Negative factor of the softplus, `[num_value_heads]`.
    pub decay_rate: SourceWeight,
    /// Norm of each head's output.
    pub norm: Norm,
    /// Output projection.
    pub output: Linear,
    /// Number of query and key heads.
    pub num_key_heads: u64,
    /// Number of value heads; a multiple of the key heads.
    pub num_value_heads: u64,
    /// Width of a query or key.
    pub key_head_dim: u64,
    /// Width of a value.
    pub value_head_dim: u64,
}

/// Order of the tokens of a call, as zeros and ones `[1, 1, T, T]`; not needed in calls of one token.
#[derive(Clone, Debug)]
pub struct TokenOrder {
    /// j <= i
    lower: ValueId,
    /// j < i
    strict: ValueId,
    /// j = i, for inversions.
    identity: Option<ValueId>,
    /// For blocks of 1, 2, 4 … tokens: i in the second and j in the first of two neighbouring blocks.
    levels: Vec<ValueId>,
}

impl TokenOrder {
    /// Number of planes beside the first for calls of up to `tokens` tokens.
    pub fn levels(tokens: u64) -> u64 {
        u64::from(tokens.max(1).next_power_of_two().trailing_zeros())
    }

    /// Splits the input `token_order` `[1, 1 + levels, T, T]`; `inverts` is true if a layer is a DeltaNet.
    pub fn from_planes(g: &mut Graph<'_>, planes: ValueId, levels: u64, inverts: bool) -> TokenOrder {
        g.scope("token_order", |g| {
            let lower = g.ops.slice(planes, 1, 0..1);
            let levels: Vec<ValueId> = (1..=levels).map(|level| g.ops.slice(planes, 1, level..level + 1)).collect();
            // every pair j < i belongs to exactly one level
            let strict = levels.iter().copied().reduce(|sum, level| g.ops.add(sum, level)).unwrap_or(lower);
            let identity = inverts.then(|| g.ops.sub(lower, strict));
            TokenOrder { lower, strict, identity, levels }
        })
    }
}

impl DeltaNet {
    /// States: the convolution's last inputs, and the matrices.
    pub fn states(&self) -> Vec<StateSpec> {
        let matrices = StateSpec {
            kind: StateKind::Recurrent,
            rows: self.num_value_heads,
            slots: self.key_head_dim,
            width: self.value_head_dim,
        };
        vec![self.conv.state(), matrices]
    }
}

/// Applies the block to normed hidden states; returns the addend for the residual stream. `order` is `None` in calls of
/// one token.
pub fn delta_net(
    g: &mut Graph<'_>,
    x: ValueId,
    weights: &DeltaNet,
    [conv_state, matrices]: [Slot; 2],
    order: Option<&TokenOrder>,
) -> ValueId {
    let (key_heads, value_heads) = (weights.num_key_heads, weights.num_value_heads);
    let (key_dim, value_dim) = (weights.key_head_dim, weights.value_head_dim);
    let keys = key_heads * key_dim;
    let mixed = linear(g, x, &weights.query_key_value);
    let gate = linear(g, x, &weights.gate);
    let step = linear(g, x, &weights.step);
    let decay = linear(g, x, &weights.decay);
    let mixed = causal_conv(g, mixed, &weights.conv, conv_state);
    let mixed = silu(g, mixed);

    let unit = |g: &mut Graph<'_>, name: &str, first: u64| {
        g.scope(name, |g| {
            let part = g.ops.slice(mixed, 1, first..first + keys);
            let heads = split_heads(g, part, key_heads, key_dim);
            let normal = l2_normalize(g, heads, 3, L2_EPS);
            let repeats = (value_heads / key_heads) as usize;
            if repeats == 1 { normal } else { g.ops.concat(&vec![normal; repeats], 1) }
        })
    };
    let query = unit(g, "query", 0);
    let key = unit(g, "key", keys);
    let value = g.ops.slice(mixed, 1, 2 * keys..2 * keys + value_heads * value_dim);
    let value = split_heads(g, value, value_heads, value_dim);

    let step = g.ops.sigmoid(step);
    let step = per_head(g, step);
    let decay = per_head(g, decay);
    let bias = g.weight("decay_bias", Role::Bias, &weights.decay_bias, &[1, value_heads, 1, 1]);
    let rate = g.weight("decay_rate", Role::Table, &weights.decay_rate, &[1, value_heads, 1, 1]);
    let decay = g.ops.add(decay, bias);
    let decay = softplus(g, decay);
    let decay = g.ops.mul(decay, rate);

    let out = g.scope("delta", |g| {
        let before = matrices.read(g);
        let (out, after) = match order {
            None => recur(g, query, key, value, step, decay, before),
            Some(order) => chunk(g, query, key, value, step, decay, before, order),
        };
        matrices.write(g, after);
        out
    });
    let norm = Norm { eps: weights.norm.eps * key_dim as f64, ..weights.norm.clone() };
    let normal = rms_norm(g, out, &norm, 3);
    let gate = split_heads(g, gate, value_heads, value_dim);
    let gate = silu(g, gate);
    let gated = g.ops.mul(normal, gate);
    let merged = merge_heads(g, gated, value_heads * value_dim);
    linear(g, merged, &weights.output)
}

/// `[1, heads, T, 1]` from one channel for each head.
pub(super) fn per_head(g: &mut Graph<'_>, x: ValueId) -> ValueId {
    match g.form.layout {
        Layout::Bcs1 => x,
        Layout::Bc1s => g.ops.transpose(x, &[0, 1, 3, 2]),
    }
}

/// Recurrence for one token. Returns the output and the new state.
fn recur(
    g: &mut Graph<'_>,
    query: ValueId,
    key: ValueId,
    value: ValueId,
    step: ValueId,
    decay: ValueId,
    before: ValueId,
) -> (ValueId, ValueId) {
    let factor = g.ops.exp(decay);
    let decayed = g.ops.mul(before, factor);
    let known = g.ops.matmul(key, decayed, false, false);
    let wrong = g.ops.sub(value, known);
    let correction = g.ops.mul(wrong, step);
    let outer = g.ops.matmul(key, correction, true, false);
    let after = g.ops.add(decayed, outer);
    (g.ops.matmul(query, after, false, false), after)
}

/// Recurrence for several tokens in parallel.
#[allow(clippy::too_many_arguments, reason = "the symbols of the equations")]
fn chunk(
    g: &mut Graph<'_>,
    query: ValueId,
    key: ValueId,
    value: ValueId,
    step: ValueId,
    decay: ValueId,
    before: ValueId,
    order: &TokenOrder,
) -> (ValueId, ValueId) {
    let (between, since) = decays(g, decay, order);
    let products = g.ops.matmul(key, key, false, true);
    let products = g.ops.mul(products, between);
    let coupling = g.ops.mul(products, step);
    let inverse = invert(g, coupling, order);
    let known = g.ops.matmul(key, before, false, false);
    let known = g.ops.mul(known, since);
    let wrong = g.ops.sub(value, known);
    let wrong = g.ops.mul(wrong, step);
    let corrections = g.ops.matmul(inverse, wrong, false, false);

    let old = g.ops.matmul(query, before, false, false);
    let old = g.ops.mul(old, since);
    let scores = g.ops.matmul(query, key, false, true);
    let scores = g.ops.mul(scores, between);
    let new = g.ops.matmul(scores, corrections, false, false);
    let out = g.ops.add(old, new);

    let left = g.ops.last(since, 2, 1);
    let left = g.ops.mul(before, left);
    let until_end = g.ops.last(between, 2, 1);
    let until_end = g.ops.transpose(until_end, &[0, 1, 3, 2]);
    let key = g.ops.mul(key, until_end);
    let added = g.ops.matmul(key, corrections, true, false);
    (out, g.ops.add(left, added))
}

/// Decays from log-decays `[1, heads, T, 1]`: d between two tokens, `[1, heads, T, T]`, and e since the start of the
/// call, `[1, heads, T, 1]`.
pub(super) fn decays(g: &mut Graph<'_>, decay: ValueId, order: &TokenOrder) -> (ValueId, ValueId) {
    let row = g.ops.transpose(decay, &[0, 1, 3, 2]);
    let up_to = g.ops.mul(order.lower, row);
    let between = g.ops.matmul(up_to, order.strict, false, false);
    let between = g.ops.exp(between);
    let between = g.ops.mul(between, order.lower);
    let since = g.ops.reduce_sum(up_to, &[3], true);
    (between, g.ops.exp(since))
}

/// `(I + L)^-1`, where L is the strictly lower part of `coupling`.
fn invert(g: &mut Graph<'_>, coupling: ValueId, order: &TokenOrder) -> ValueId {
    let Some(mut inverse) = order.identity else { return g.missing("delta_net", "the identity", coupling) };
    for (level, mask) in order.levels.iter().enumerate() {
        let below = g.ops.mul(coupling, *mask);
        inverse = if level == 0 {
            g.ops.sub(inverse, below)
        } else {
            let right = g.ops.matmul(below, inverse, false, false);
            let both = g.ops.matmul(inverse, right, false, false);
            g.ops.sub(inverse, both)
        };
    }
    inverse
}
