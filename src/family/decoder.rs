//! Decoder engine: one graph for every row of the family table.
//!
//! ```text
//! x = layer(x)                          (for each layer: see the module `layer`)
//! logits = (W_head norm(x) + b_head) / s
//! ```

mod attention;

use std::collections::BTreeSet;
use std::ops::Range;

use super::blocks::attention::{SharedKeyValues, softcap};
use super::blocks::delta_net::TokenOrder;
use super::blocks::linear::{Linear, linear};
use super::blocks::norm::{Norm, rms_norm};
use super::blocks::rope::Rotation;
use super::blocks::state::{StateSpec, States};
use super::blocks::{Graph, extents};
use super::config::DecoderConfig;
use super::layer::{ExpertTask, Layer, Mixer, MixerInputs, Stream};
use super::predictor::{OutsideLayers, Predictor};
use super::rope::{LateQueryScale, QUERY_ROPE_TABLE};
use super::row::{LayerForm, MixerKind, NormPlacement};
use super::tensors::first_positions;
use super::transform::{Transformed, permit};
use super::{
    EmitWeight, ExpertCounts, FamilyFacts, FamilyModel, FunctionGraph, FunctionRequest, HostTensors, LoweringOptions,
    Purpose,
};
use anec_base::Result;
use anec_bundle::{HiddenProbe, Port, PortRole, Stage, StatePort, TokenCount};
use anec_manifest::{HeadOutputs, Largest, Reranker, Transform};
use anec_mil::{Constant, DataType, Dim, TensorType, ValueId};
use anec_source::SourceWeight;
use attention::AttentionPorts;

/// Name of the rotary table.
const ROPE_TABLE: &str = "rope";
/// Name of the rotary table of layers with a window, if they have their own.
const LOCAL_ROPE_TABLE: &str = "rope_local";

/// A decoder with its weights.
pub struct Decoder {
    /// Resolved configuration.
    pub config: DecoderConfig,
    /// Dimensions and configuration for the bundle.
    pub facts: FamilyFacts,
    /// Weights of each layer.
    pub layers: Vec<Layer>,
    /// Token embedding `[vocab_size, hidden_size]`, without the multiplier.
    pub embedding: SourceWeight,
    /// Learned positions `[max_position_embeddings, hidden_size]`.
    pub positions: Option<SourceWeight>,
    /// Per-layer embeddings of tokens, `[vocab_size, layers * width]`.
    pub per_layer_embedding: Option<SourceWeight>,
    /// Final norm.
    pub final_norm: Norm,
    /// LM head `[vocab_size, hidden_size]`; if tied, its weight is the embedding.
    pub head: Linear,
    /// Rotation of the residual stream `[hidden_size, hidden_size]`, if it is rotated.
    pub rotation: Option<SourceWeight>,
    /// Transforms applied to the weights.
    pub transformed: Transformed,
    /// Projections before the layer of a next-token predictor.
    pub predictor: Option<Predictor>,
    /// Next-token layer as a model.
    pub draft: Option<Box<Decoder>>,
}

impl Decoder {
    /// Returns whether the model outputs final hidden states instead of logits: the last function norms them.
    pub(super) fn gives_hidden_states(&self) -> bool {
        matches!(self.facts.purpose, Purpose::TextEmbedding { .. })
    }

    /// Number of tokens that a layer sees in a function with this context; `None` for all.
    fn window(&self, layer: usize, context: u64) -> Option<u64> {
        self.config.layers[layer].window.filter(|window| *window < context)
    }

    /// Slots of a layer's KV cache. A layer with a window has a ring buffer: after a call has written its tokens, the
    /// first of them must still see its whole window.
    fn slots(&self, layer: usize, context: u64, most_tokens: u64) -> u64 {
        match self.window(layer, context) {
            Some(window) => context.min(window.saturating_add(most_tokens.saturating_sub(1))),
            None => context,
        }
    }

    /// Window and cache slots of a layer.
    fn view(&self, layer: usize, request: &FunctionRequest) -> (Option<u64>, u64) {
        let context = request.context;
        (self.window(layer, context), self.slots(layer, context, request.most_tokens))
    }

    /// Position-dependent scale of queries, if texts of this context reach it.
    fn late_query_scale(&self, context: u64) -> Option<LateQueryScale> {
        self.config.late_query_scale.filter(|scale| context > scale.from)
    }

    /// Returns whether a layer uses the rotary table of layers with a window.
    fn rotates_locally(&self, layer: usize) -> bool {
        self.config.rope_local.is_some() && self.config.layers[layer].window.is_some()
    }

    /// Builds layers and returns their ports, with the hidden states that they output.
    fn layers_function(
        &self,
        g: &mut Graph<'_>,
        layers: Range<usize>,
        request: &FunctionRequest,
    ) -> Result<(Ports, ValueId)> {
        let config = &self.config;
        let context = request.context;
        let mut ports = Ports::default();
        let hidden = ports.input(g, "hidden", PortRole::Hidden, g.hidden_shape(config.hidden_size));
        let hidden = match &self.predictor {
            Some(predictor) => predictor.enter(g, &mut ports, hidden, config.hidden_size),
            None => hidden,
        };
        // a function of one layer whose feed-forward network is in another function
        let mixes = self.omits_feed_forward(g, layers.end - 1);
        if mixes && layers.len() > 1 {
            g.missing("layers", "to be one, where feed-forward networks are left out", hidden);
        }
        let [router, per_layer] = match mixes {
            true => [None, None],
            false => [self.router_input(g, &mut ports, layers.start), self.per_layer_inputs(g, &mut ports, &layers)],
        };
        let attention = AttentionPorts::declare(self, g, &mut ports, &layers, request);
        let order = match layers.clone().any(|layer| config.layers[layer].mixer.scans()) {
            true => self.token_order(g, &mut ports, layers.clone(), request),
            false => None,
        };
        let given = self.key_value_inputs(g, &mut ports, &layers);
        let specs = layers.clone().map(|layer| {
            let slots = self.slots(layer, context, request.most_tokens);
            match &self.layers[layer].mixer {
                // caches that earlier functions provide
                Mixer::Attention(attention) if given.contains(&layer) => (layer, attention.states(slots)),
                _ => (layer, self.layers[layer].states(slots)),
            }
        });
        let specs = specs.collect();
        let states = States::declare(g, specs, context);
        ports.inputs.extend(states.inputs.iter().cloned());
        let mut stream = Stream { hidden, network: None, router };
        let mut task = None;
        for index in layers.clone() {
            let per_layer = per_layer.zip(config.per_layer_embedding).map(|(vectors, of)| {
                let first = (index - layers.start) as u64 * of.width;
                if layers.len() == 1 { vectors } else { g.ops.slice(vectors, 1, first..first + of.width) }
            });
            let order = order.as_ref();
            let attention = attention.of(self, index, request);
            let inputs = MixerInputs { attention, band: None, order, states: states.of(index), per_layer };
            let layer = &self.layers[index];
            if task.is_some() {
                g.missing("layers", "to end where experts are left out", stream.hidden);
            }
            g.layer(index, |g| -> Result<()> {
                if mixes {
                    stream = layer.mix(g, stream, inputs, config.residual_multiplier);
                    stream.hidden = g.ops.rename(stream.hidden, "hidden");
                } else if g.form.experts.is_packed() || layer.expert_counts().is_none() {
                    stream = layer.apply(g, stream, inputs, config.residual_multiplier);
                } else {
                    let (rest, asked) = layer.apply_without_experts(g, stream, inputs, config.residual_multiplier)?;
                    (stream, task) = (rest, Some(asked));
                }
                Ok(())
            })?;
            if index + 1 < layers.end {
                ports.between.push((index, stream.hidden));
            }
        }
        let stream = self.stream_outputs(g, &mut ports, stream, layers.end, !mixes);
        for layer in layers.clone().filter(|layer| config.has_shared_keys(*layer, layers.end)) {
            let Some(SharedKeyValues { rows: [keys, values], .. }) = g.shared.get(&layer).copied() else { continue };
            ports.output(g, &format!("shared_k_{layer}_out"), PortRole::SharedKeys { layer }, keys);
            ports.output(g, &format!("shared_v_{layer}_out"), PortRole::SharedValues { layer }, values);
        }
        ports.expert_outputs(g, task);
        states.write_stacked(g, |slots| attention.write(slots));
        ports.outputs.extend(states.outputs(g));
        ports.states = states.ports;
        Ok((ports, stream.hidden))
    }

    /// Returns whether the function of a layer leaves its feed-forward network to another function.
    fn omits_feed_forward(&self, g: &Graph<'_>, layer: usize) -> bool {
        g.form.omits_feed_forward(self.layers[layer].expert_counts().is_some())
    }

    /// Input of the router state from the layers before `first`, if routers pass one on.
    fn router_input(&self, g: &mut Graph<'_>, ports: &mut Ports, first: usize) -> Option<ValueId> {
        let width = self.config.experts.and_then(|experts| experts.router_hidden_size).filter(|_| first > 0)?;
        let shape = g.hidden_shape(width);
        Some(ports.input(g, "router_state", PortRole::RouterState, shape))
    }

    /// Input of the per-layer embeddings, if the model has them.
    fn per_layer_inputs(&self, g: &mut Graph<'_>, ports: &mut Ports, layers: &Range<usize>) -> Option<ValueId> {
        let width = self.config.per_layer_embedding?.width;
        let shape = g.hidden_shape(layers.len() as u64 * width);
        let role = PortRole::PerLayerInput { first: layers.start, end: layers.end };
        Some(ports.input(g, "per_layer_input", role, shape))
    }

    /// Outputs for layer `next`; `whole` if the layer before it is complete.
    fn stream_outputs(
        &self,
        g: &mut Graph<'_>,
        ports: &mut Ports,
        mut stream: Stream,
        next: usize,
        whole: bool,
    ) -> Stream {
        let ends = next == self.layers.len();
        if self.gives_hidden_states() && ends && whole {
            stream.hidden = rms_norm(g, stream.hidden, &self.final_norm, 1);
        }
        ports.output(g, "hidden_out", PortRole::Hidden, stream.hidden);
        if let Some(network) = stream.network {
            ports.output(g, "feed_forward_input_out", PortRole::FeedForwardInput, network);
        }
        if let Some(state) = stream.router.filter(|_| !ends) {
            ports.output(g, "router_state_out", PortRole::RouterState, state);
        }
        stream
    }

    /// Function of a layer's feed-forward network and the rest of the layer, if the layer's function omits them.
    fn feed_forward_function(&self, g: &mut Graph<'_>, index: usize) -> Ports {
        let (config, layer) = (&self.config, &self.layers[index]);
        let mut ports = Ports::default();
        let hidden = ports.input(g, "hidden", PortRole::Hidden, g.hidden_shape(config.hidden_size));
        let router = self.router_input(g, &mut ports, index);
        let per_layer = self.per_layer_inputs(g, &mut ports, &(index..index + 1));
        let network = (layer.form != LayerForm::Sequential).then(|| {
            let shape = g.hidden_shape(config.hidden_size);
            ports.input(g, "feed_forward_input", PortRole::FeedForwardInput, shape)
        });
        let stream = Stream { hidden, network, router };
        let stream = g.layer(index, |g| layer.apply_feed_forward(g, stream, per_layer, config.residual_multiplier));
        self.stream_outputs(g, &mut ports, stream, index + 1, true);
        ports
    }

    /// Inputs of keys and values that layers of earlier functions share with those of this one. Returns the first layer
    /// here that uses each.
    fn key_value_inputs(&self, g: &mut Graph<'_>, ports: &mut Ports, layers: &Range<usize>) -> BTreeSet<usize> {
        let mut first = BTreeSet::new();
        for index in layers.clone() {
            let of = self.config.layers[index].keys_of.filter(|of| *of < layers.start && !g.shared.contains_key(of));
            let Some(layer) = of else { continue };
            let heads = self.config.heads_of(layer);
            let mut rows = |g: &mut Graph<'_>, name: &str, role: PortRole| {
                let [count, width] = [heads.num_key_value_heads, heads.head_dim].map(Dim::Fixed);
                ports.input(g, &format!("{name}_{layer}"), role, vec![Dim::Fixed(1), count, g.tokens.clone(), width])
            };
            let keys = rows(g, "shared_k", PortRole::SharedKeys { layer });
            let values = rows(g, "shared_v", PortRole::SharedValues { layer });
            g.shared.insert(layer, SharedKeyValues { rows: [keys, values], seen: None });
            first.insert(index);
        }
        first
    }

    fn experts_function(&self, g: &mut Graph<'_>, index: usize, range: Range<u64>) -> Result<Ports> {
        let (config, layer) = (&self.config, &self.layers[index]);
        let counts = layer.expert_counts();
        let count = counts.map_or(0, |counts| counts.apart());
        // the joining function receives the hidden states and the dense network's output
        let parts = if counts.is_some_and(|counts| counts.joined) { 3 } else { 1 };
        let mut ports = Ports::default();
        let hidden = ports.input(g, "hidden", PortRole::Hidden, g.hidden_shape(config.hidden_size));
        let task = ports.expert_task(g, parts * config.hidden_size, count);
        let hidden = g.layer(index, |g| layer.add_experts(g, hidden, task, range, config.residual_multiplier))?;
        ports.output(g, "hidden_out", PortRole::Hidden, hidden);
        Ok(ports)
    }

    /// Order of the tokens of a call with several tokens.
    fn token_order(
        &self,
        g: &mut Graph<'_>,
        ports: &mut Ports,
        mut layers: Range<usize>,
        request: &FunctionRequest,
    ) -> Option<TokenOrder> {
        let most = match request.tokens {
            TokenCount::Fixed(1) => return None,
            several => several.most(),
        };
        // a range that ends at 1 has one unused plane, so that the tensor isn't empty
        let levels = TokenOrder::levels(most).max(1);
        let shape = vec![Dim::Fixed(1), Dim::Fixed(1 + levels), g.tokens.clone(), g.tokens.clone()];
        let planes = ports.input(g, "token_order", PortRole::TokenOrder, shape);
        let inverts = layers.any(|layer| self.config.layers[layer].mixer == MixerKind::DeltaNet);
        Some(TokenOrder::from_planes(g, planes, levels, inverts))
    }

    fn head_function(&self, g: &mut Graph<'_>, rows: Range<u64>, outputs: HeadOutputs) -> Result<Ports> {
        let mut ports = Ports::default();
        let hidden = ports.input(g, "hidden", PortRole::Hidden, g.hidden_shape(self.config.hidden_size));
        self.head_outputs(g, &mut ports, hidden, rows, outputs)?;
        Ok(ports)
    }

    /// Outputs of rows of the head.
    fn head_outputs(
        &self,
        g: &mut Graph<'_>,
        ports: &mut Ports,
        hidden: ValueId,
        rows: Range<u64>,
        outputs: HeadOutputs,
    ) -> Result<()> {
        let count = rows.end.saturating_sub(rows.start);
        let normal = rms_norm(g, hidden, &self.final_norm, 1);
        let mut logits = linear(g, normal, &self.head.slice(rows)?);
        if self.config.logits_scaling != 1.0 {
            logits = g.ops.mul(logits, Constant::fp16((1.0 / self.config.logits_scaling) as f32));
        }
        logits = softcap(g, logits, self.config.logits_softcap);
        match outputs.logits {
            true => ports.output(g, "logits", PortRole::Logits, logits),
            false => ports.logits = Some(g.ops.rename(logits, "logits")),
        }
        let [values, indices] = match outputs.largest {
            None => return Ok(()),
            Some(Largest::Argmax) => [g.ops.reduce_max(logits, &[1], true), g.ops.reduce_argmax(logits, 1, true)],
            Some(Largest::TopK(k)) => g.ops.top(logits, k.min(count), 1),
        };
        ports.output(g, "top_values", PortRole::TopValues, values);
        ports.output(g, "top_indices", PortRole::TopIndices, indices);
        Ok(())
    }
}

impl FamilyModel for Decoder {
    fn facts(&self) -> &FamilyFacts {
        &self.facts
    }

    fn experts(&self, layer: usize) -> Option<ExpertCounts> {
        self.layers[layer].expert_counts()
    }

    fn positions(&self) -> Option<u64> {
        self.positions.as_ref().map(SourceWeight::rows)
    }

    fn draft(&self) -> Option<&dyn FamilyModel> {
        self.draft.as_deref().map(|draft| draft as &dyn FamilyModel)
    }

    fn layer_state_bytes(&self, layer: usize, context: u64, most_tokens: u64) -> u64 {
        let slots = self.slots(layer, context, most_tokens);
        self.layers[layer].states(slots).iter().map(StateSpec::bytes).sum()
    }

    fn build(
        &self,
        form: &LoweringOptions,
        request: &FunctionRequest,
        weights: &mut dyn EmitWeight,
    ) -> Result<FunctionGraph> {
        let mut of_no_layer;
        let weights: &mut dyn EmitWeight = match self.predictor {
            Some(_) => {
                of_no_layer = OutsideLayers(weights);
                &mut of_no_layer
            }
            None => weights,
        };
        let mut g = request.begin(form, weights);
        let ports = match request.stage {
            Stage::Layers { first, end } => self.layers_function(&mut g, first..end, request)?.0,
            Stage::FeedForward { layer } => self.feed_forward_function(&mut g, layer),
            Stage::Experts { layer, first, end } => self.experts_function(&mut g, layer, first..end)?,
            Stage::Head { first, end } => self.head_function(&mut g, first..end, request.head)?,
            Stage::Model { layers, rows } => {
                let (mut ports, hidden) = self.layers_function(&mut g, 0..layers, request)?;
                self.head_outputs(&mut g, &mut ports, hidden, 0..rows, request.head)?;
                ports
            }
        };
        ports.finish(g)
    }

    fn host(&self, context: u64) -> Result<HostTensors> {
        let multiplier = self.config.embedding_multiplier;
        let embedding =
            if multiplier == 1.0 { self.embedding.clone() } else { self.embedding.scale(multiplier as f32) };
        let config = &self.config;
        let rotates = |local: bool| {
            (0..config.layers.len()).any(|layer| config.layers[layer].rope && self.rotates_locally(layer) == local)
        };
        let rope = Some(&config.rope).filter(|_| rotates(false)).map(|rope| rope.tables(ROPE_TABLE, context));
        let queries = self.late_query_scale(context).filter(|_| rotates(false));
        let queries = queries.map(|scale| config.rope.query_tables(QUERY_ROPE_TABLE, context, scale));
        let local = config.rope_local.as_ref().filter(|_| rotates(true));
        let local = local.map(|rope| rope.tables(LOCAL_ROPE_TABLE, context));
        let rotation = self.rotation.clone();
        let positions = self.positions.as_ref().map(|table| first_positions(table, context)).transpose()?;
        Ok(HostTensors {
            embedding,
            positions,
            token_types: None,
            embedding_size: None,
            attention_bias: None,
            rope: rope.into_iter().chain(queries).chain(local).collect(),
            rotation,
            per_layer_embedding: self.per_layer_embedding.clone(),
            projections: Vec::new(),
        })
    }

    fn recipe(&self) -> Vec<Transform> {
        match self.gives_hidden_states() {
            _ if self.draft.is_some() => vec![Transform::Equalize],
            true => vec![Transform::Equalize],
            false => permit::recipe(&self.config),
        }
    }

    fn permits(&self, transform: Transform) -> Result<(), &'static str> {
        if self.gives_hidden_states() && transform != Transform::Equalize {
            return Err("hidden states are what is wanted, and there is no head to undo it");
        }
        if self.draft.is_some() && transform != Transform::Equalize {
            return Err("the layer that drafts reads the embedding and the last hidden states as they are");
        }
        permit::permits(&self.config, transform)
    }

    fn transform(&mut self, transforms: &[Transform]) -> Result<()> {
        self.apply_transforms(transforms)
    }

    fn transformed(&self) -> Transformed {
        self.transformed.clone()
    }

    fn norms_behind_blocks(&self) -> bool {
        self.config.norms == NormPlacement::Both
    }

    fn score_pairs(&mut self, reranker: &Reranker) -> Result<()> {
        Decoder::score_pairs(self, reranker)
    }

    fn set_hidden_scale(&mut self, scale: f64) {
        self.scale_hidden(scale / self.facts.hidden_scale);
        self.facts.hidden_scale = scale;
    }
}

/// Ports of a function under construction.
#[derive(Default)]
pub(super) struct Ports {
    pub(super) inputs: Vec<Port>,
    pub(super) outputs: Vec<Port>,
    states: Vec<StatePort>,
    /// Hidden states between the layers of the function, by layer.
    pub(super) between: Vec<(usize, ValueId)>,
    /// Logits that are no output.
    logits: Option<ValueId>,
}

impl Ports {
    /// Finishes the function of these ports.
    pub(super) fn finish(self, g: Graph<'_>) -> Result<FunctionGraph> {
        let Ports { inputs, outputs, states, between, logits } = self;
        let function = g.into_ops()?.finish()?;
        let name = |value| function.value(value).name.clone();
        let probes = between.into_iter().map(|(layer, hidden)| HiddenProbe { layer, value: name(hidden) }).collect();
        let logits = logits.map(name);
        Ok(FunctionGraph { function, inputs, outputs, states, probes, logits })
    }

    /// Inputs of a rotary table's rows, `[1, 1, T, half]`.
    fn rotation(&mut self, g: &mut Graph<'_>, suffix: &str, table: &str, half: u64) -> Rotation {
        let shape = vec![Dim::Fixed(1), Dim::Fixed(1), g.tokens.clone(), Dim::Fixed(half)];
        let cos = PortRole::RopeCos { table: table.into() };
        let sin = PortRole::RopeSin { table: table.into() };
        Rotation {
            cos: self.input(g, &format!("rope_cos{suffix}"), cos, shape.clone()),
            sin: self.input(g, &format!("rope_sin{suffix}"), sin, shape),
        }
    }

    pub(super) fn input(&mut self, g: &mut Graph<'_>, name: &str, role: PortRole, shape: Vec<Dim>) -> ValueId {
        self.input_of(g, name, role, DataType::Fp16, shape)
    }

    fn input_of(&mut self, g: &mut Graph<'_>, name: &str, role: PortRole, dtype: DataType, shape: Vec<Dim>) -> ValueId {
        self.inputs.push(Port { name: name.into(), role, shape: extents(&shape) });
        g.ops.input(name, TensorType { dtype, shape })
    }

    pub(super) fn output(&mut self, g: &mut Graph<'_>, name: &str, role: PortRole, value: ValueId) {
        self.outputs.push(Port { name: name.into(), role, shape: extents(&g.ops.ty(value).shape) });
        g.ops.output(name, value);
    }

    /// Outputs of a layer that omits its experts.
    pub(super) fn expert_outputs(&mut self, g: &mut Graph<'_>, task: Option<ExpertTask>) {
        let Some(ExpertTask { input, shares }) = task else { return };
        self.output(g, "expert_input", PortRole::ExpertInput, input);
        self.output(g, "expert_shares", PortRole::ExpertShares, shares);
    }

    /// Inputs of a function with some of a layer's `count` experts; `channels` is the width of their input.
    pub(super) fn expert_task(&mut self, g: &mut Graph<'_>, channels: u64, count: u64) -> ExpertTask {
        ExpertTask {
            input: self.input(g, "expert_input", PortRole::ExpertInput, g.hidden_shape(channels)),
            shares: self.input(g, "expert_shares", PortRole::ExpertShares, g.hidden_shape(count)),
        }
    }
}
