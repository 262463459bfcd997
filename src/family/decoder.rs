//! The engine of dense decoders: one graph for every row of the family table.
//!
//! ```text
//! x = x + r * attention(norm(x))        (norms before the blocks; olmo2 norms what they give)
//! x = x + r * mlp(norm(x))
//! logits = W_head norm(x) / s
//! ```

use std::collections::BTreeSet;
use std::ops::Range;

use super::blocks::Graph;
use super::blocks::attention::{Attention, AttentionInputs, attention};
use super::blocks::cache::{Caches, Write};
use super::blocks::linear::{Linear, linear};
use super::blocks::mlp::{Mlp, mlp};
use super::blocks::norm::{Norm, rms_norm};
use super::blocks::rope::Rotation;
use super::config::DecoderConfig;
use super::ports::{Extent, Port, PortRole, Stage, StatePort, StateRole};
use super::table::NormPlacement;
use super::{EmitWeight, Facts, Form, FunctionGraph, FunctionRequest, Host, Model, PlannedWeight, TokenCount};
use crate::error::Result;
use crate::manifest::{KvWrite, Role, StateForm};
use crate::mil::{Constant, DataType, Dim, FunctionBuilder, Lengths, TensorType, ValueId};
use crate::source::Weight;

/// Name of the one rotary table.
const ROPE_TABLE: &str = "rope";

/// A dense decoder with its weights.
pub struct Decoder {
    /// Resolved configuration.
    pub config: DecoderConfig,
    /// Dimensions and configuration for the bundle.
    pub facts: Facts,
    /// Weights of each layer.
    pub layers: Vec<Layer>,
    /// Token embedding `[vocab_size, hidden_size]`.
    pub embedding: Weight,
    /// Final norm.
    pub final_norm: Norm,
    /// LM head `[vocab_size, hidden_size]`; the embedding where they are tied.
    pub head: Weight,
}

/// The weights of one layer.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Attention.
    pub attention: Attention,
    /// Norm before (or after) attention.
    pub attention_norm: Norm,
    /// Feed-forward network.
    pub mlp: Mlp,
    /// Norm before (or after) it.
    pub mlp_norm: Norm,
}

impl Decoder {
    fn layer_block(
        &self,
        g: &mut Graph<'_>,
        x: ValueId,
        index: usize,
        caches: &Caches,
        inputs: AttentionInputs,
    ) -> ValueId {
        let layer = &self.layers[index];
        g.scope(&format!("layers_{index}"), |g| {
            let x = self.residual(g, x, &layer.attention_norm, |g, x| {
                g.scope("attn", |g| attention(g, x, &layer.attention, index, caches, inputs))
            });
            let hidden = self.residual(g, x, &layer.mlp_norm, |g, x| g.scope("mlp", |g| mlp(g, x, &layer.mlp)));
            g.ops.rename(hidden, "hidden")
        })
    }

    /// `x + r * f(norm(x))`, or `x + r * norm(f(x))`.
    fn residual(
        &self,
        g: &mut Graph<'_>,
        x: ValueId,
        norm: &Norm,
        block: impl FnOnce(&mut Graph<'_>, ValueId) -> ValueId,
    ) -> ValueId {
        let mut added = match self.config.norms {
            NormPlacement::Pre => {
                let normal = rms_norm(g, x, norm, 1);
                block(g, normal)
            }
            NormPlacement::Post => {
                let out = block(g, x);
                rms_norm(g, out, norm, 1)
            }
        };
        if self.config.residual_multiplier != 1.0 {
            added = g.ops.mul(added, Constant::fp16(self.config.residual_multiplier as f32));
        }
        g.ops.add(x, added)
    }

    fn layers_function(&self, g: &mut Graph<'_>, layers: Range<usize>, request: &FunctionRequest) -> Ports {
        let config = &self.config;
        let context = request.context;
        let mut ports = Ports::default();
        let hidden = ports.input(g, "hidden", PortRole::Hidden, g.hidden_shape(config.hidden_size));
        let tokens = g.tokens.clone();
        let half = config.rope.rope_dim / 2;
        let rotation = config.layers[layers.clone()].iter().any(|l| l.rope).then(|| {
            let shape = vec![Dim::Fixed(1), Dim::Fixed(1), tokens.clone(), Dim::Fixed(half)];
            let cos = PortRole::RopeCos { table: ROPE_TABLE.into() };
            let sin = PortRole::RopeSin { table: ROPE_TABLE.into() };
            Rotation {
                cos: ports.input(g, "rope_cos", cos, shape.clone()),
                sin: ports.input(g, "rope_sin", sin, shape),
            }
        });
        // one mask for the layers that see everything, one for each width of window
        let windows: BTreeSet<Option<u64>> = config.layers[layers.clone()].iter().map(|l| l.window).collect();
        let masks: Vec<(Option<u64>, ValueId)> = windows
            .into_iter()
            .map(|window| {
                let name = if window.is_some() { "attn_mask_local" } else { "attn_mask" };
                let shape = vec![Dim::Fixed(1), Dim::Fixed(1), tokens.clone(), Dim::Fixed(context)];
                (window, ports.input(g, name, PortRole::AttentionMask { window }, shape))
            })
            .collect();
        let write = match (g.form.kv_write, request.tokens) {
            (KvWrite::Slice, TokenCount::Exactly(count)) => {
                let position = ports.input_of(g, "position", PortRole::Position, DataType::Int32, vec![Dim::Fixed(1)]);
                Write::from_position(g, position, count)
            }
            _ => {
                let shape = vec![Dim::Fixed(1), Dim::Fixed(1), Dim::Fixed(context), tokens];
                let mask = ports.input(g, "kv_write_mask", PortRole::KvWriteMask, shape);
                Write::from_mask(g, mask)
            }
        };
        let caches = Caches::declare(g, layers.clone(), config.num_key_value_heads, context, config.head_dim);
        ports.states = self.state_ports(g.form.state, &layers, context);
        let mut x = hidden;
        for index in layers {
            let layer = config.layers[index];
            let mask = masks.iter().find(|(window, _)| *window == layer.window).map_or(masks[0].1, |(_, mask)| *mask);
            let inputs = AttentionInputs { rotation: rotation.filter(|_| layer.rope), mask, write };
            x = self.layer_block(g, x, index, &caches, inputs);
        }
        ports.output(g, "hidden_out", PortRole::Hidden, x);
        ports
    }

    fn state_ports(&self, form: StateForm, layers: &Range<usize>, context: u64) -> Vec<StatePort> {
        let (heads, width) = (self.config.num_key_value_heads, self.config.head_dim);
        match form {
            StateForm::PerLayer => layers
                .clone()
                .flat_map(|layer| {
                    let port = |name: String, role| StatePort { name, role, shape: vec![1, heads, context, width] };
                    [
                        port(format!("k_cache_{layer}"), StateRole::KeyCache { layer }),
                        port(format!("v_cache_{layer}"), StateRole::ValueCache { layer }),
                    ]
                })
                .collect(),
            StateForm::Unified => vec![StatePort {
                name: format!("kv_cache_{}_{}", layers.start, layers.end),
                role: StateRole::KeyValueCache { first: layers.start, end: layers.end },
                shape: vec![1, 2 * heads * layers.len() as u64, context, width],
            }],
        }
    }

    fn head_function(&self, g: &mut Graph<'_>, rows: Range<u64>, argmax: bool) -> Result<Ports> {
        let mut ports = Ports::default();
        let hidden = ports.input(g, "hidden", PortRole::Hidden, g.hidden_shape(self.config.hidden_size));
        let normal = rms_norm(g, hidden, &self.final_norm, 1);
        let mut logits = linear(g, normal, &self.head_linear(rows)?);
        if self.config.logits_scaling != 1.0 {
            logits = g.ops.mul(logits, Constant::fp16((1.0 / self.config.logits_scaling) as f32));
        }
        ports.output(g, "logits", PortRole::Logits, logits);
        if argmax {
            let index = g.ops.reduce_argmax(logits, 1, true);
            ports.output(g, "argmax", PortRole::Argmax, index);
        }
        Ok(ports)
    }

    fn head_linear(&self, rows: Range<u64>) -> Result<Linear> {
        Ok(Linear { name: "lm_head", role: Role::LmHead, weight: self.head.slice(rows)?, bias: None })
    }
}

impl Model for Decoder {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn layer_weights(&self, layer: usize) -> Vec<PlannedWeight> {
        let Layer { attention, attention_norm, mlp, mlp_norm } = &self.layers[layer];
        let norms = [Some(attention_norm), Some(mlp_norm)].into_iter().flatten();
        let qk = attention.qk_norm.iter().flat_map(|(q, k)| [q, k]);
        let linears =
            [&attention.query, &attention.key, &attention.value, &attention.output, &mlp.gate, &mlp.up, &mlp.down];
        let mut planned: Vec<PlannedWeight> = norms
            .chain(qk)
            .map(|norm| PlannedWeight { name: norm.name.into(), role: Role::Norm, weight: norm.weight.clone() })
            .collect();
        for linear in linears {
            planned.push(PlannedWeight { name: linear.name.into(), role: linear.role, weight: linear.weight.clone() });
            if let Some(bias) = &linear.bias {
                let name = format!("{}_bias", linear.name);
                planned.push(PlannedWeight { name, role: Role::Bias, weight: bias.clone() });
            }
        }
        planned
    }

    fn head_weights(&self, rows: Range<u64>) -> Result<Vec<PlannedWeight>> {
        let head = self.head_linear(rows)?;
        let norm = &self.final_norm;
        Ok(vec![
            PlannedWeight { name: norm.name.into(), role: Role::Norm, weight: norm.weight.clone() },
            PlannedWeight { name: head.name.into(), role: head.role, weight: head.weight },
        ])
    }

    fn layer_state_bytes(&self, _layer: usize, context: u64) -> u64 {
        2 * self.config.key_width() * context * 2
    }

    fn build(&self, form: &Form, request: &FunctionRequest, weights: &mut dyn EmitWeight) -> Result<FunctionGraph> {
        let mut ops = FunctionBuilder::new(&request.name, form.opset);
        let tokens = match request.tokens {
            TokenCount::Exactly(count) => Dim::Fixed(count),
            TokenCount::Range { lower, upper, default } => {
                Dim::symbol(&ops.symbol("T", Lengths::Range { lower, upper: Some(upper), default }))
            }
        };
        let mut g = Graph::new(ops, *form, tokens, weights);
        let ports = match request.stage {
            Stage::Layers { first, end } => self.layers_function(&mut g, first..end, request),
            Stage::Head { first, end } => self.head_function(&mut g, first..end, request.argmax)?,
        };
        let function = g.into_ops()?.finish()?;
        Ok(FunctionGraph { function, inputs: ports.inputs, outputs: ports.outputs, states: ports.states })
    }

    fn host(&self, context: u64) -> Result<Host> {
        let multiplier = self.config.embedding_multiplier;
        let embedding =
            if multiplier == 1.0 { self.embedding.clone() } else { self.embedding.scale(multiplier as f32) };
        let rotates = self.config.layers.iter().any(|l| l.rope);
        let rope = if rotates { vec![self.config.rope.tables(ROPE_TABLE, context)] } else { Vec::new() };
        Ok(Host { embedding, rope })
    }

    fn scale_residual(&mut self, factor: f32) {
        Decoder::scale_residual(self, factor);
    }
}

/// The ports of a function while it is built.
#[derive(Default)]
struct Ports {
    inputs: Vec<Port>,
    outputs: Vec<Port>,
    states: Vec<StatePort>,
}

impl Ports {
    fn input(&mut self, g: &mut Graph<'_>, name: &str, role: PortRole, shape: Vec<Dim>) -> ValueId {
        self.input_of(g, name, role, DataType::Fp16, shape)
    }

    fn input_of(&mut self, g: &mut Graph<'_>, name: &str, role: PortRole, dtype: DataType, shape: Vec<Dim>) -> ValueId {
        self.inputs.push(Port { name: name.into(), role, shape: extents(&shape) });
        g.ops.input(name, TensorType { dtype, shape })
    }

    fn output(&mut self, g: &mut Graph<'_>, name: &str, role: PortRole, value: ValueId) {
        self.outputs.push(Port { name: name.into(), role, shape: extents(&g.ops.ty(value).shape) });
        g.ops.output(name, value);
    }
}

fn extents(shape: &[Dim]) -> Vec<Extent> {
    shape.iter().map(|d| d.fixed().map_or_else(|| Extent::Tokens(d.to_string()), Extent::Fixed)).collect()
}
