//! Blocks: the equations that families are composed of, in ops.
//!
//! | module | equation |
//! |---|---|
//! | [`linear`] | `W x + b` |
//! | [`norm`] | `x / sqrt(mean(x^2) + eps) * w`, with or without the mean of x |
//! | [`rope`] | rotation of queries and keys by position |
//! | [`state`] | what a function carries from call to call |
//! | [`cache`] | where keys and values are kept between calls |
//! | [`attention`] | `softmax(q k^T + mask) v` |
//! | [`banded_attention`] | the same on both sides, of all the text or within a band, without a cache |
//! | [`cca`] | attention whose queries and keys are mixed over neighbouring tokens |
//! | [`causal_conv`] | depthwise convolution with carried inputs |
//! | [`short_conv`] | `W_out (C * conv(B * x))` |
//! | [`delta_net`] | a linear recurrence of matrices |
//! | [`mamba2`] | another, whose corrections don't depend on what is known |
//! | [`activation`] | SiLU, GELU, softplus |
//! | [`mlp`] | `W_down (act(W_gate x) * W_up x)`, `W_down act(W_up x)` |
//! | [`moe`] | a few of many such networks |
//! | [`depth_router`] | one of them or none, by a state that goes from layer to layer |
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

/// A function being built: its ops, its form and the way weights get in.
pub struct Graph<'a> {
    /// Ops so far.
    pub ops: FunctionBuilder,
    /// Op forms.
    pub form: LoweringOptions,
    /// Tokens of one call: a number or the symbol `T`.
    pub tokens: Dim,
    /// What the states that are inputs and outputs hold at this point.
    kept: Vec<ValueId>,
    /// Keys and values that several layers look at, by the layer that they come from.
    pub shared: BTreeMap<usize, SharedKeyValues>,
    /// Rotary tables as wide as heads, by the tables that came in.
    wide: Vec<(rope::Rotation, u64, rope::Rotation)>,
    weights: &'a mut dyn EmitWeight,
    error: Option<Error>,
}

impl<'a> Graph<'a> {
    /// An empty function.
    pub fn new(ops: FunctionBuilder, form: LoweringOptions, tokens: Dim, weights: &'a mut dyn EmitWeight) -> Self {
        Graph { ops, form, tokens, kept: Vec::new(), shared: BTreeMap::new(), wide: Vec::new(), weights, error: None }
    }

    /// The fp16 value of a weight, seen as a tensor of `shape`.
    pub fn weight(&mut self, name: &str, role: Role, weight: &SourceWeight, shape: &[u64]) -> ValueId {
        match self.weights.emit(&mut self.ops, name, role, weight, shape) {
            Ok(value) => value,
            Err(error) => {
                self.error.get_or_insert(error);
                self.ops.constant(name, anec_mil::Constant::fp16(0.0))
            }
        }
    }

    /// What the product of a projection's weight is to be multiplied by, seen as a tensor of `shape`, if its number format
    /// has a scale for each row.
    pub fn row_scale(&mut self, name: &str, role: Role, weight: &SourceWeight, shape: &[u64]) -> Option<ValueId> {
        match self.weights.emit_row_scale(&mut self.ops, name, role, weight, shape) {
            Ok(value) => value,
            Err(error) => {
                self.error.get_or_insert(error);
                None
            }
        }
    }

    /// Records why the function can't be built; the first reason counts.
    pub fn refuse(&mut self, error: impl Into<Error>) {
        self.error.get_or_insert(error.into());
    }

    /// Records that a block lacks what it needs, which only a mistake in a family's engine can cause; gives `x` back.
    pub fn missing(&mut self, block: &str, what: &str, x: ValueId) -> ValueId {
        self.ops.fail(block, block, format!("it needs {what}"));
        x
    }

    /// Names what `body` adds `scope_…`.
    pub fn scope<R>(&mut self, scope: &str, body: impl FnOnce(&mut Self) -> R) -> R {
        self.ops.enter(scope);
        let result = body(self);
        self.ops.leave();
        result
    }

    /// Names what `body` adds after a layer, whose weights it emits.
    pub fn layer<R>(&mut self, index: usize, body: impl FnOnce(&mut Self) -> R) -> R {
        self.weights.of_layer(Some(index));
        let result = self.scope(&layer_scope(index), body);
        self.weights.of_layer(None);
        result
    }

    /// The shape of hidden states with this many channels.
    pub fn hidden_shape(&self, channels: u64) -> Vec<Dim> {
        match self.form.layout {
            Layout::Bcs1 => vec![Dim::Fixed(1), Dim::Fixed(channels), self.tokens.clone(), Dim::Fixed(1)],
            Layout::Bc1s => vec![Dim::Fixed(1), Dim::Fixed(channels), Dim::Fixed(1), self.tokens.clone()],
        }
    }

    /// The finished builder, or the first weight that could not be emitted.
    ///
    /// # Errors
    /// That weight's error.
    pub fn into_ops(self) -> Result<FunctionBuilder> {
        match self.error {
            Some(error) => Err(error),
            None => Ok(self.ops),
        }
    }
}

/// What a bundle says of a shape.
pub(crate) fn extents(shape: &[Dim]) -> Vec<PortDim> {
    shape.iter().map(|d| d.fixed().map_or_else(|| PortDim::Tokens(d.to_string()), PortDim::Fixed)).collect()
}
