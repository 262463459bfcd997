//! Mamba-2 (arXiv:2405.21060): a linear recurrence whose state is a matrix `S` `[head width, state size]` for each
//! head. Heads share their keys B and queries C in groups. For a token with input x, step t and rate a < 0:
//!
//! ```text
//! S <- exp(a t) S + t x B^T;  y = S C + D x
//! ```
//!
//! where `[z; x; B; C; t] = W_in h`, x, B and C pass through a causal convolution and SiLU, and t through a softplus.
//! The output is `W_out norm(y * silu(z))`, with the norm over each group of heads.
//!
//! The tokens of a call are computed in parallel, as columns. With `d[i, j] = exp(a (t[j+1] + … + t[i]))` for j <= i,
//! else 0, and
//! `e[i] = exp(a (t[0] + … + t[i]))`:
//!
//! ```text
//! Y = (t X) (C^T B * d)^T + e (S C) + D X
//! S <- e[T-1] S + (t X * d[T-1]) B^T
//! ```

use super::Graph;
use super::activation::{silu, softplus};
use super::causal_conv::{CausalConv, causal_conv};
use super::delta_net::{TokenOrder, decays, per_head};
use super::linear::{Linear, linear};
use super::norm::{Norm, rms_norm};
use super::state::{Slot, StateKind, StateSpec};
use anec_manifest::{Layout, Role};
use anec_mil::{Constant, ValueId};
use anec_source::SourceWeight;

/// Weights and constants of a layer's Mamba-2.
#[derive(Clone, Debug)]
pub struct Mamba2 {
    /// Projection to z.
    pub gate: Linear,
    /// Projection to x, B and C, before the convolution.
    pub inputs: Linear,
    /// Steps, before the softplus.
    pub step: Linear,
    /// Convolution of x, B and C.
    pub conv: CausalConv,
    /// Bias of the steps, `[num_heads]`.
    pub step_bias: SourceWeight,
    /// Bounds of steps after the softplus.
    pub step_limit: Option<[f64; 2]>,
    /// Negative rates, `[num_heads]`.
    pub rate: SourceWeight,
    /// Skip connection D, `[num_heads]`.
    pub skip: SourceWeight,
    /// Norm `[num_heads * head_dim]`, if there is one.
    pub norm: Option<Norm>,
    /// Whether the norm comes before the gate.
    pub norm_before_gate: bool,
    /// Output projection.
    pub output: Linear,
    /// Number of heads.
    pub num_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Number of groups of heads that share B and C.
    pub num_groups: u64,
    /// Width of B and of C.
    pub state_size: u64,
}

impl Mamba2 {
    /// States: the convolution's last inputs, and the matrices.
    pub fn states(&self) -> Vec<StateSpec> {
        let matrices = StateSpec {
            kind: StateKind::Recurrent,
            rows: self.num_heads,
            slots: self.head_dim,
            width: self.state_size,
        };
        vec![self.conv.state(), matrices]
    }

    fn width(&self) -> u64 {
        self.num_heads * self.head_dim
    }

    /// `[1, heads, head width, …]` from groups `[1, groups, heads of a group * head width, …]`, for either last
    /// dimension.
    fn by_head(&self, g: &mut Graph<'_>, x: ValueId, last: i32) -> ValueId {
        g.ops.reshape(x, &[1, self.num_heads as i32, self.head_dim as i32, last])
    }

    /// Inverse of [`by_head`](Self::by_head).
    fn by_group(&self, g: &mut Graph<'_>, x: ValueId, last: i32) -> ValueId {
        g.ops.reshape(x, &[1, self.num_groups as i32, (self.width() / self.num_groups) as i32, last])
    }
}

/// Applies the block to normed hidden states; returns the addend for the residual stream. `order` is `None` in calls of
/// one token.
pub fn mamba2(
    g: &mut Graph<'_>,
    x: ValueId,
    weights: &Mamba2,
    [conv_state, matrices]: [Slot; 2],
    order: Option<&TokenOrder>,
) -> ValueId {
    let (heads, groups, size) = (weights.num_heads, weights.num_groups, weights.state_size);
    let gate = linear(g, x, &weights.gate);
    let mixed = linear(g, x, &weights.inputs);
    let step = linear(g, x, &weights.step);
    let mixed = causal_conv(g, mixed, &weights.conv, conv_state);
    let mixed = silu(g, mixed);
    let input = g.ops.slice(mixed, 1, 0..weights.width());
    let input = weights.by_head(g, input, -1);
    let shared = |g: &mut Graph<'_>, first: u64| {
        let part = g.ops.slice(mixed, 1, first..first + groups * size);
        g.ops.reshape(part, &[1, groups as i32, size as i32, -1])
    };
    let key = shared(g, weights.width());
    let query = shared(g, weights.width() + groups * size);

    let bias = g.weight("step_bias", Role::Bias, &weights.step_bias, &[1, heads, 1, 1]);
    let step = g.ops.add(step, bias);
    let mut step = softplus(g, step);
    if let Some([least, most]) = weights.step_limit {
        step = g.ops.maximum(step, Constant::fp16(least as f32));
        step = g.ops.minimum(step, Constant::fp16(most as f32));
    }
    let rate = g.weight("rate", Role::Table, &weights.rate, &[1, heads, 1, 1]);
    let decay = g.ops.mul(step, rate);
    let decay = per_head(g, decay);
    let step = match g.form.layout {
        Layout::Bcs1 => g.ops.transpose(step, &[0, 1, 3, 2]),
        Layout::Bc1s => step,
    };
    let stepped = g.ops.mul(input, step);

    let out = g.scope("scan", |g| {
        let before = matrices.read(g);
        let (out, after) = match order {
            None => recur(g, weights, [query, key, stepped], decay, before),
            Some(order) => scan(g, weights, [query, key, stepped], decay, before, order),
        };
        matrices.write(g, after);
        out
    });
    let skip = g.weight("skip", Role::Table, &weights.skip, &[1, heads, 1, 1]);
    let skipped = g.ops.mul(input, skip);
    let out = g.ops.add(out, skipped);
    let out = channels(g, out, weights.width());
    let gate = silu(g, gate);
    let out = match &weights.norm {
        None => g.ops.mul(out, gate),
        Some(norm) if weights.norm_before_gate => {
            let normal = group_norm(g, out, norm, groups);
            g.ops.mul(normal, gate)
        }
        Some(norm) => {
            let gated = g.ops.mul(out, gate);
            group_norm(g, gated, norm, groups)
        }
    };
    linear(g, out, &weights.output)
}

/// Recurrence for one token. Returns the output and the new state.
fn recur(
    g: &mut Graph<'_>,
    weights: &Mamba2,
    [query, key, stepped]: [ValueId; 3],
    decay: ValueId,
    before: ValueId,
) -> (ValueId, ValueId) {
    let factor = g.ops.exp(decay);
    let decayed = g.ops.mul(before, factor);
    let after = add_products(g, weights, decayed, stepped, key);
    (read(g, weights, after, query), after)
}

/// Recurrence for several tokens in parallel.
fn scan(
    g: &mut Graph<'_>,
    weights: &Mamba2,
    [query, key, stepped]: [ValueId; 3],
    decay: ValueId,
    before: ValueId,
    order: &TokenOrder,
) -> (ValueId, ValueId) {
    let (between, since) = decays(g, decay, order);
    let products = g.ops.matmul(query, key, true, false);
    let scores = for_heads(g, weights, products, between);
    let new = g.ops.matmul(stepped, scores, false, true);
    let old = read(g, weights, before, query);
    let since_row = g.ops.transpose(since, &[0, 1, 3, 2]);
    let old = g.ops.mul(old, since_row);
    let out = g.ops.add(old, new);

    let left = g.ops.last(since, 2, 1);
    let left = g.ops.mul(before, left);
    let until_end = g.ops.last(between, 2, 1);
    let stepped = g.ops.mul(stepped, until_end);
    (out, add_products(g, weights, left, stepped, key))
}

/// `S C`, `[1, heads, head width, T]`.
fn read(g: &mut Graph<'_>, weights: &Mamba2, state: ValueId, query: ValueId) -> ValueId {
    let state = weights.by_group(g, state, weights.state_size as i32);
    let out = g.ops.matmul(state, query, false, false);
    weights.by_head(g, out, -1)
}

/// `S + X B^T`
fn add_products(g: &mut Graph<'_>, weights: &Mamba2, state: ValueId, input: ValueId, key: ValueId) -> ValueId {
    let input = weights.by_group(g, input, -1);
    let added = g.ops.matmul(input, key, false, true);
    let added = weights.by_head(g, added, weights.state_size as i32);
    g.ops.add(state, added)
}

/// Product of values of groups, `[1, groups, T, T]`, and values of their heads, `[1, heads, T, T]`.
fn for_heads(g: &mut Graph<'_>, weights: &Mamba2, of_groups: ValueId, of_heads: ValueId) -> ValueId {
    let group = weights.num_heads / weights.num_groups;
    if weights.num_groups == 1 || group == 1 {
        return g.ops.mul(of_heads, of_groups);
    }
    let parts: Vec<ValueId> = (0..weights.num_groups)
        .map(|index| {
            let heads = g.ops.slice(of_heads, 1, index * group..(index + 1) * group);
            let shared = g.ops.slice(of_groups, 1, index..index + 1);
            g.ops.mul(heads, shared)
        })
        .collect();
    g.ops.concat(&parts, 1)
}

/// `[1, width, T, 1]` (or `[1, width, 1, T]`) from heads or groups.
fn channels(g: &mut Graph<'_>, x: ValueId, width: u64) -> ValueId {
    match g.form.layout {
        Layout::Bcs1 => g.ops.reshape(x, &[1, width as i32, -1, 1]),
        Layout::Bc1s => g.ops.reshape(x, &[1, width as i32, 1, -1]),
    }
}

/// Norm over each group of channels.
fn group_norm(g: &mut Graph<'_>, x: ValueId, norm: &Norm, groups: u64) -> ValueId {
    if groups == 1 {
        return rms_norm(g, x, norm, 1);
    }
    let width = g.ops.ty(x).shape[1].fixed().unwrap_or(groups);
    let apart = g.ops.reshape(x, &[1, groups as i32, (width / groups) as i32, -1]);
    let normal = rms_norm(g, apart, &Norm { weight: None, ..norm.clone() }, 2);
    let normal = channels(g, normal, width);
    let Some(weight) = &norm.weight else { return normal };
    let weight = g.weight(&format!("{}_weight", norm.name), Role::Norm, weight, &[1, width, 1, 1]);
    g.ops.mul(normal, weight)
}
