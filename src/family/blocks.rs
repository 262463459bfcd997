//! Blocks: the equations that families are composed of, as ops.
//!
//! | module | equation |
//! |---|---|
//! | [`linear`] | `W x + b` |
//! | [`norm`] | `x / sqrt(mean(x^2) + eps) * w`, with or without the mean of x |
//! | [`rope`] | rotation of queries and keys by position |
//! | [`state`] | states that are carried from call to call |
//! | [`cache`] | KV caches |
//! | [`attention`] | `softmax(q k^T + mask) v` |
//! | [`banded_attention`] | bidirectional attention to the whole text or within a band, without a cache |
//! | [`distance_scores`] | attention scores of a token and a distance |
//! | [`cca`] | attention whose queries and keys are mixed over neighbouring tokens |
//! | [`causal_conv`] | depthwise convolution with carried inputs |
//! | [`short_conv`] | `W_out (C * conv(B * x))` |
//! | [`delta_net`] | linear recurrence with delta rule |
//! | [`mamba2`] | linear recurrence without delta rule |
//! | [`activation`] | SiLU, GELU, softplus |
//! | [`mlp`] | `W_down (act(W_gate x) * W_up x)`, `W_down act(W_up x)` |
//! | [`moe`] | mixture of experts |
//! | [`depth_router`] | mixture of experts with a router state that passes from layer to layer |
//! | [`dense_and_moe`] | `norm(mlp x) + norm(moe x)` |
//! | [`per_layer_input`] | `W_out (act(W_gate x) * e)` |
//! | [`residual`] | `(f + b_f) s_f + (x + b_x) s_x` |

pub mod activation;
pub mod attention;
pub mod banded_attention;
pub mod cache;
pub mod causal_conv;
pub mod cca;
pub mod delta_net;
pub mod dense_and_moe;
pub mod depth_router;
pub mod distance_scores;
pub mod linear;
pub mod mamba2;
pub mod mlp;
pub mod moe;
pub mod norm;
pub mod per_layer_input;
pub mod residual;
pub mod rope;
pub mod short_conv;
pub mod state;

use std::collections::BTreeMap;

use super::{EmitWeight, LoweringOptions};
use anec_base::{Error, Result};
use anec_bundle::{PortDim, layer_scope};
use anec_manifest::{Layout, Role};
use anec_mil::{Dim, FunctionBuilder, ValueId};
use anec_source::SourceWeight;
use attention::SharedKeyValues;

/// A function under construction: its ops, its op forms and its weight emitter.
pub struct Graph<'a> {
    /// Builder of the ops.
    pub ops: FunctionBuilder,
    /// Op forms.
    pub form: LoweringOptions,
    /// Tokens of a call: a number or the symbol `T`.
    pub tokens: Dim,
    /// Current values of states that are inputs and outputs.
    state_values: Vec<ValueId>,
    /// Keys and values that several layers use, by the layer that computes them.
    pub shared: BTreeMap<usize, SharedKeyValues>,
    /// Rotary tables widened to heads, by their source and width.
    wide: Vec<(rope::Rotation, u64, rope::Rotation)>,
    /// Parts of masks with biases of heads, by the mask and the first head.
    head_masks: BTreeMap<(ValueId, u64), ValueId>,
    weights: &'a mut dyn EmitWeight,
    error: Option<Error>,
}

impl<'a> Graph<'a> {
    /// Creates an empty function.
    pub fn new(ops: FunctionBuilder, form: LoweringOptions, tokens: Dim, weights: &'a mut dyn EmitWeight) -> Self {
        Graph {
            ops,
            form,
            tokens,
            state_values: Vec::new(),
            shared: BTreeMap::new(),
            wide: Vec::new(),
            head_masks: BTreeMap::new(),
            weights,
            error: None,
        }
    }

    /// fp16 value of a weight, reshaped to `shape`.
    pub fn weight(&mut self, name: &str, role: Role, weight: &SourceWeight, shape: &[u64]) -> ValueId {
        match self.weights.emit(&mut self.ops, name, role, weight, shape) {
            Ok(value) => value,
            Err(error) => {
                self.error.get_or_insert(error);
                self.ops.constant(name, anec_mil::Constant::fp16(0.0))
            }
        }
    }

    /// Factor of each row of a projection's product, reshaped to `shape`; `None` if the weight's number format has no
    /// scale per row.
    pub fn row_scale(&mut self, name: &str, role: Role, weight: &SourceWeight, shape: &[u64]) -> Option<ValueId> {
        match self.weights.emit_row_scale(&mut self.ops, name, role, weight, shape) {
            Ok(value) => value,
            Err(error) => {
                self.error.get_or_insert(error);
                None
            }
        }
    }

    /// Records why the function can't be built; only the first reason is kept.
    pub fn refuse(&mut self, error: impl Into<Error>) {
        self.error.get_or_insert(error.into());
    }

    /// Records that a block lacks an input, which is an internal error of a family's engine; returns `x`.
    pub fn missing(&mut self, block: &str, what: &str, x: ValueId) -> ValueId {
        self.ops.fail(block, block, format!("it needs {what}"));
        x
    }

    /// Prefixes the names of values that `body` adds with `scope_`.
    pub fn scope<R>(&mut self, scope: &str, body: impl FnOnce(&mut Self) -> R) -> R {
        self.ops.enter(scope);
        let result = body(self);
        self.ops.leave();
        result
    }

    /// Prefixes the names of values that `body` adds with the layer, and assigns its weights to the layer.
    pub fn layer<R>(&mut self, index: usize, body: impl FnOnce(&mut Self) -> R) -> R {
        self.weights.of_layer(Some(index));
        let result = self.scope(&layer_scope(index), body);
        self.weights.of_layer(None);
        result
    }

    /// Shape of hidden states with this many channels.
    pub fn hidden_shape(&self, channels: u64) -> Vec<Dim> {
        match self.form.layout {
            Layout::Bcs1 => vec![Dim::Fixed(1), Dim::Fixed(channels), self.tokens.clone(), Dim::Fixed(1)],
            Layout::Bc1s => vec![Dim::Fixed(1), Dim::Fixed(channels), Dim::Fixed(1), self.tokens.clone()],
        }
    }

    /// Returns the builder.
    ///
    /// # Errors
    /// Returns the error of the first weight that could not be emitted.
    pub fn into_ops(self) -> Result<FunctionBuilder> {
        match self.error {
            Some(error) => Err(error),
            None => Ok(self.ops),
        }
    }
}

/// Dimensions of a shape as in a bundle.
pub(crate) fn extents(shape: &[Dim]) -> Vec<PortDim> {
    shape.iter().map(|d| d.fixed().map_or_else(|| PortDim::Tokens(d.to_string()), PortDim::Fixed)).collect()
}
