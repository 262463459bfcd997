//! A decoder layer: a token mixer and a feed-forward network, each with norms and a residual connection.
//!
//! ```text
//! y = x + r * mixer(n)                      n = norm(x)
//! x = y + r * feed_forward(m)               m = norm'(y); in parallel layers n, or norm'(x)
//! x = s (x + norm(per_layer_input(x)))      (in families that have it)
//! ```
//!
//! Some families norm the blocks' outputs, instead or as well, or the sum; some scale both sides of the sum. A router
//! may pass its state to that of the next layer.

use std::ops::Range;

use super::ExpertCounts;
use super::blocks::Graph;
use super::blocks::attention::{Attention, AttentionInputs, attention};
use super::blocks::banded_attention::{BandInputs, BandedAttention, banded_attention};
use super::blocks::cca::{Cca, cca};
use super::blocks::delta_net::{DeltaNet, TokenOrder, delta_net};
use super::blocks::dense_and_moe::{DenseAndMoe, dense_and_moe, expert_inputs, join};
use super::blocks::depth_router::{DepthMoe, depth_moe, depth_shares};
use super::blocks::linear::Linear;
use super::blocks::mamba2::{Mamba2, mamba2};
use super::blocks::mlp::{Mlp, PlainMlp, mlp, plain_mlp};
use super::blocks::moe::{Experts, Moe, SharedExpert, experts, moe, shared_expert, shares};
use super::blocks::norm::rms_norm;
use super::blocks::per_layer_input::{PerLayerInput, per_layer_input};
use super::blocks::residual::{scaled_addend, scaled_base};
use super::blocks::short_conv::{ShortConv, short_conv};
use super::blocks::state::{Slot, StateSpec};
use super::error::FamilyError;
use super::residual_block::{Norms, ResidualBlock};
use super::row::LayerForm;
use anec_base::Result;
use anec_manifest::Role;
use anec_mil::{Constant, ValueId};
use anec_source::SourceWeight;

/// Weights of a layer.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Order of the blocks: sequential or parallel.
    pub form: LayerForm,
    /// Token mixer.
    pub mixer: Mixer,
    /// Norms of the mixer.
    pub mixer_norms: Norms,
    /// Feed-forward network.
    pub feed_forward: FeedForward,
    /// Norms of the feed-forward network; in a parallel layer with one norm, none before it.
    pub feed_forward_norms: Norms,
    /// Per-layer embedding block with its norms.
    pub per_layer_input: Option<(PerLayerInput, Norms)>,
    /// Factor of the layer's output, `[1]`.
    pub scalar: Option<SourceWeight>,
}

/// Token mixer of a layer.
#[derive(Clone, Debug)]
pub enum Mixer {
    /// Softmax attention with a KV cache.
    Attention(Box<Attention>),
    /// Bidirectional softmax attention without a cache.
    Banded(Box<BandedAttention>),
    /// Compressed convolutional attention.
    Cca(Box<Cca>),
    /// Gated short convolution.
    ShortConv(Box<ShortConv>),
    /// Gated DeltaNet.
    DeltaNet(Box<DeltaNet>),
    /// Mamba-2.
    Mamba2(Box<Mamba2>),
    /// Softmax attention and Mamba-2 on the same input; their outputs are added.
    AttentionAndMamba2(Box<(Attention, Mamba2)>),
}

/// Feed-forward network of a layer.
#[derive(Clone, Debug)]
pub enum FeedForward {
    /// A gated network.
    Mlp(Box<Mlp>),
    /// A network without a gate.
    Plain(Box<PlainMlp>),
    /// A mixture of experts.
    Moe(Box<Moe>),
    /// A gated network and a mixture of experts side by side.
    DenseAndMoe(Box<DenseAndMoe>),
    /// A mixture of experts whose router receives the state of earlier layers' routers.
    DepthMoe(Box<DepthMoe>),
}

/// Inputs of a layer's experts.
#[derive(Clone, Copy, Debug)]
pub struct ExpertTask {
    /// Normalised hidden states.
    pub input: ValueId,
    /// Weight of each expert for each token.
    pub shares: ValueId,
}

/// Values passed between layers.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    /// Hidden states.
    pub hidden: ValueId,
    /// Input of the feed-forward network, between the halves of a parallel layer.
    pub network: Option<ValueId>,
    /// Router state, if routers pass one on.
    pub router: Option<ValueId>,
}

/// Inputs of a layer's mixer beside the hidden states.
#[derive(Clone, Copy, Debug)]
pub struct MixerInputs<'a> {
    /// For attention.
    pub attention: Option<AttentionInputs>,
    /// For bidirectional attention.
    pub band: Option<BandInputs>,
    /// For linear recurrences in calls of several tokens.
    pub order: Option<&'a TokenOrder>,
    /// States of the layer.
    pub states: &'a [Slot],
    /// Per-layer embeddings, or the token embeddings that they are made of, if the model has them.
    pub per_layer: Option<ValueId>,
}

impl Layer {
    /// Blocks of the layer: mixer, feed-forward network, and other readers and writers of the residual stream.
    pub fn blocks(&mut self) -> Vec<ResidualBlock<'_>> {
        let (mut readers, mut writers) = of_mixer(&mut self.mixer);
        let (of_network, by_network, own) = of_feed_forward(&mut self.feed_forward);
        let mut blocks = if self.form == LayerForm::ParallelOneNorm {
            // both read through one norm
            readers.extend(of_network);
            writers.extend(by_network);
            vec![self.mixer_norms.around(readers, writers)]
        } else {
            let mixer = self.mixer_norms.around(readers, writers);
            vec![mixer, self.feed_forward_norms.around(of_network, by_network)]
        };
        blocks.extend(own);
        if let Some((block, norms)) = &mut self.per_layer_input {
            blocks.push(norms.around(vec![&mut block.gate], vec![&mut block.projection]));
            // token embeddings are the residual stream before the first layer
            let source = block.source.as_mut().map(|source| &mut source.projection);
            blocks.extend(source.map(|projection| ResidualBlock::plain(vec![projection])));
        }
        blocks
    }

    /// States of the layer; `slots` is the size of KV caches.
    pub fn states(&self, slots: u64) -> Vec<StateSpec> {
        match &self.mixer {
            // a layer that uses another one's keys and values has none
            Mixer::Attention(attention) if attention.key.is_none() => Vec::new(),
            Mixer::Attention(attention) => attention.states(slots),
            Mixer::Banded(_) => Vec::new(),
            Mixer::Cca(cca) => cca.states(slots),
            Mixer::ShortConv(conv) => conv.states(),
            Mixer::DeltaNet(delta) => delta.states(),
            Mixer::Mamba2(mamba) => mamba.states(),
            Mixer::AttentionAndMamba2(both) => [both.0.states(slots), both.1.states()].concat(),
        }
    }

    /// Gain of the norm before the feed-forward network, if there is one.
    pub fn feed_forward_gain(&self) -> Option<SourceWeight> {
        match self.form {
            LayerForm::ParallelOneNorm => self.mixer_norms.gain(),
            LayerForm::Sequential | LayerForm::ParallelTwoNorms => self.feed_forward_norms.gain(),
        }
    }

    /// Applies the layer; `residual_multiplier` is r.
    pub fn apply(
        &self,
        g: &mut Graph<'_>,
        stream: Stream,
        inputs: MixerInputs<'_>,
        residual_multiplier: f64,
    ) -> Stream {
        let stream = self.mix(g, stream, inputs, residual_multiplier);
        self.apply_feed_forward(g, stream, inputs.per_layer, residual_multiplier)
    }

    /// Applies the first half: the mixer with its norms and sum. In a parallel layer, also computes the second half's
    /// input.
    pub fn mix(&self, g: &mut Graph<'_>, stream: Stream, inputs: MixerInputs<'_>, residual_multiplier: f64) -> Stream {
        let x = stream.hidden;
        let normal = self.mixer_norms.enter(g, x);
        let out = self.apply_mixer(g, normal, inputs);
        let hidden = self.mixer_norms.leave(g, x, out, residual_multiplier);
        let network = match self.form {
            LayerForm::Sequential => None,
            LayerForm::ParallelOneNorm => Some(normal),
            LayerForm::ParallelTwoNorms => Some(self.feed_forward_norms.enter(g, x)),
        };
        Stream { hidden, network, ..stream }
    }

    /// Applies the second half: the feed-forward network with its norms and sum, and the rest of the layer. `per_layer`
    /// are the per-layer embeddings, or the token embeddings that they are made of, if the model has them.
    pub fn apply_feed_forward(
        &self,
        g: &mut Graph<'_>,
        stream: Stream,
        per_layer: Option<ValueId>,
        residual_multiplier: f64,
    ) -> Stream {
        let Stream { hidden: x, network, mut router } = stream;
        let norms = &self.feed_forward_norms;
        let normal = network.unwrap_or_else(|| norms.enter(g, x));
        let out = match &self.feed_forward {
            FeedForward::Mlp(weights) => g.scope("mlp", |g| mlp(g, normal, weights)),
            FeedForward::Plain(weights) => g.scope("mlp", |g| plain_mlp(g, normal, weights)),
            FeedForward::Moe(weights) => g.scope("moe", |g| moe(g, normal, weights)),
            FeedForward::DenseAndMoe(weights) => dense_and_moe(g, x, normal, weights),
            FeedForward::DepthMoe(weights) => {
                let (out, state) = g.scope("moe", |g| depth_moe(g, normal, weights, router));
                router = Some(state);
                out
            }
        };
        let hidden = norms.leave(g, x, out, residual_multiplier);
        let hidden = self.finish(g, hidden, per_layer, residual_multiplier);
        Stream { hidden: g.ops.rename(hidden, "hidden"), network: None, router }
    }

    /// Applies the parts after the feed-forward network.
    fn finish(&self, g: &mut Graph<'_>, x: ValueId, per_layer: Option<ValueId>, residual_multiplier: f64) -> ValueId {
        let x = match &self.per_layer_input {
            None => x,
            Some((weights, norms)) => {
                let normal = norms.enter(g, x);
                let out = g.scope("per_layer_input", |g| match per_layer {
                    Some(vectors) => per_layer_input(g, normal, vectors, weights),
                    None => g.missing("per_layer_input", "the tokens' vectors", normal),
                });
                norms.leave(g, x, out, residual_multiplier)
            }
        };
        self.scaled(g, x)
    }

    /// Hidden states times the layer's factor, if it has one.
    fn scaled(&self, g: &mut Graph<'_>, x: ValueId) -> ValueId {
        let Some(scalar) = &self.scalar else { return x };
        let scalar = g.weight("scalar", Role::Table, scalar, &[1, 1, 1, 1]);
        g.ops.mul(x, scalar)
    }

    /// Applies the second half without its experts. Also returns the experts' inputs and weights.
    ///
    /// # Errors
    /// Returns an error if a weight can't be made.
    pub fn apply_without_experts(
        &self,
        g: &mut Graph<'_>,
        stream: Stream,
        inputs: MixerInputs<'_>,
        residual_multiplier: f64,
    ) -> Result<(Stream, ExpertTask)> {
        let stream = self.mix(g, stream, inputs, residual_multiplier);
        let (x, norms) = (stream.hidden, &self.feed_forward_norms);
        let input = stream.network.unwrap_or_else(|| norms.enter(g, x));
        let (shares, router) = match &self.feed_forward {
            FeedForward::Moe(weights) => (g.scope("moe", |g| shares(g, input, weights)), None),
            FeedForward::DepthMoe(weights) => {
                let (shares, state) = g.scope("moe", |g| depth_shares(g, input, weights, stream.router));
                (shares, Some(state))
            }
            FeedForward::Mlp(_) | FeedForward::Plain(_) => (g.missing("experts", "experts", x), None),
            FeedForward::DenseAndMoe(weights) => {
                if self.per_layer_input.is_some() {
                    g.refuse(FamilyError::ExpertsInside { form: g.form.experts.to_string() });
                }
                let [input, shares] = expert_inputs(g, x, input, weights);
                // the experts are added to zero: their sum has a norm
                let nothing = g.ops.sub(x, x);
                return Ok((Stream { hidden: nothing, network: None, router: None }, ExpertTask { input, shares }));
            }
        };
        let mut hidden = match &norms.scaling {
            Some(scaling) => scaled_base(g, x, scaling)?,
            None => x,
        };
        if let FeedForward::Moe(moe) = &self.feed_forward
            && let Some(shared) = &moe.shared
        {
            let mut out = g.scope("moe", |g| shared_expert(g, input, shared));
            if residual_multiplier != 1.0 {
                out = g.ops.mul(out, Constant::fp16(residual_multiplier as f32));
            }
            hidden = g.ops.add(hidden, out);
        }
        Ok((Stream { hidden, network: None, router }, ExpertTask { input, shares }))
    }

    /// Adds the outputs of experts `range` to the result of [`Layer::apply_without_experts`].
    ///
    /// # Errors
    /// Returns an error if there are fewer experts.
    pub fn add_experts(
        &self,
        g: &mut Graph<'_>,
        hidden: ValueId,
        task: ExpertTask,
        range: Range<u64>,
        residual_multiplier: f64,
    ) -> Result<ValueId> {
        if let FeedForward::DenseAndMoe(weights) = &self.feed_forward {
            return self.add_beside_dense(g, hidden, task, range, weights);
        }
        let Some(all) = self.experts() else { return Ok(g.missing("experts", "experts", hidden)) };
        let part = all.part(range.clone())?;
        let out = g.scope("moe", |g| {
            let shares = g.ops.slice(task.shares, 1, range);
            experts(g, task.input, shares, &part)
        });
        let norms = &self.feed_forward_norms;
        // a norm can't be applied to parts of a sum
        let out = if norms.after.is_some() { g.missing("experts", "no norm after them", out) } else { out };
        let out = match &norms.scaling {
            Some(scaling) => scaled_addend(g, out, scaling),
            None if residual_multiplier != 1.0 => g.ops.mul(out, Constant::fp16(residual_multiplier as f32)),
            None => out,
        };
        Ok(g.ops.add(hidden, out))
    }

    /// Adds the outputs of experts `range` beside a dense network to those of earlier functions. The last of the range
    /// may be the part after all experts, which ends the layer.
    fn add_beside_dense(
        &self,
        g: &mut Graph<'_>,
        hidden: ValueId,
        task: ExpertTask,
        range: Range<u64>,
        weights: &DenseAndMoe,
    ) -> Result<ValueId> {
        let count = weights.moe.experts.num_experts;
        let width = weights.moe.experts.gate.weight.columns();
        let part_of_input = |g: &mut Graph<'_>, part: u64| g.ops.slice(task.input, 1, part * width..(part + 1) * width);
        let own = range.start..range.end.min(count);
        let mut sum = hidden;
        if !own.is_empty() {
            let part = weights.moe.experts.part(own.clone())?;
            let input = part_of_input(g, 0);
            let out = g.scope("moe", |g| {
                let shares = g.ops.slice(task.shares, 1, own);
                experts(g, input, shares, &part)
            });
            sum = g.ops.add(sum, out);
        }
        if range.end <= count {
            return Ok(sum);
        }
        let [x, dense] = [part_of_input(g, 1), part_of_input(g, 2)];
        let both = join(g, dense, sum, weights);
        let after = self.feed_forward_norms.after.as_ref();
        let added = after.map_or(both, |norm| rms_norm(g, both, norm, 1));
        let x = g.ops.add(x, added);
        Ok(self.scaled(g, x))
    }

    /// Number of experts, and of experts for each token.
    pub fn expert_counts(&self) -> Option<ExpertCounts> {
        match &self.feed_forward {
            FeedForward::Mlp(_) | FeedForward::Plain(_) => None,
            FeedForward::DenseAndMoe(both) => {
                let (count, per_token) = (both.moe.experts.num_experts, both.moe.num_experts_per_tok);
                Some(ExpertCounts { count, per_token, joined: true })
            }
            FeedForward::Moe(moe) => Some(ExpertCounts::new(moe.experts.num_experts, moe.num_experts_per_tok)),
            FeedForward::DepthMoe(moe) => Some(ExpertCounts::new(moe.experts.num_experts, 1)),
        }
    }

    fn experts(&self) -> Option<&Experts> {
        match &self.feed_forward {
            FeedForward::Moe(moe) => Some(&moe.experts),
            FeedForward::DenseAndMoe(both) => Some(&both.moe.experts),
            FeedForward::DepthMoe(moe) => Some(&moe.experts),
            FeedForward::Mlp(_) | FeedForward::Plain(_) => None,
        }
    }

    /// Applies the mixer to normed hidden states; returns the addend for the residual stream.
    fn apply_mixer(&self, g: &mut Graph<'_>, x: ValueId, inputs: MixerInputs<'_>) -> ValueId {
        match &self.mixer {
            Mixer::Attention(weights) => g.scope("attn", |g| match (inputs.attention, inputs.states) {
                (Some(shared), &[keys, values]) => attention(g, x, weights, Some([keys, values]), shared),
                (Some(shared), &[]) => attention(g, x, weights, None, shared),
                _ => g.missing("attention", "its inputs and two states", x),
            }),
            Mixer::Banded(weights) => g.scope("attn", |g| match inputs.band {
                Some(shared) => banded_attention(g, x, weights, shared),
                None => g.missing("banded_attention", "its inputs", x),
            }),
            Mixer::Cca(weights) => g.scope("attn", |g| match (inputs.attention, inputs.states) {
                (Some(shared), &[keys, values, convolution, delay]) => {
                    cca(g, x, weights, [keys, values, convolution, delay], shared)
                }
                _ => g.missing("cca", "its inputs and four states", x),
            }),
            Mixer::ShortConv(weights) => g.scope("short_conv", |g| match inputs.states {
                &[state] => short_conv(g, x, weights, state),
                _ => g.missing("short_conv", "one state", x),
            }),
            Mixer::DeltaNet(weights) => g.scope("delta_net", |g| match inputs.states {
                &[conv, matrices] => delta_net(g, x, weights, [conv, matrices], inputs.order),
                _ => g.missing("delta_net", "two states", x),
            }),
            Mixer::Mamba2(weights) => g.scope("mamba", |g| match inputs.states {
                &[conv, matrices] => mamba2(g, x, weights, [conv, matrices], inputs.order),
                _ => g.missing("mamba2", "two states", x),
            }),
            Mixer::AttentionAndMamba2(both) => match (inputs.attention, inputs.states) {
                (Some(shared), &[keys, values, conv, matrices]) => {
                    let seen = g.scope("attn", |g| attention(g, x, &both.0, Some([keys, values]), shared));
                    let kept = g.scope("mamba", |g| mamba2(g, x, &both.1, [conv, matrices], inputs.order));
                    g.ops.add(kept, seen)
                }
                _ => g.missing("attention beside mamba2", "its inputs and four states", x),
            },
        }
    }
}

/// Readers and writers of the residual stream in a mixer.
fn of_mixer(mixer: &mut Mixer) -> (Vec<&mut Linear>, Vec<&mut Linear>) {
    match mixer {
        Mixer::Attention(attention) => of_attention(attention),
        Mixer::Banded(attention) => {
            let BandedAttention { query, key, value, output, .. } = &mut **attention;
            (vec![query, key, value], vec![output])
        }
        Mixer::Cca(cca) => {
            let Attention { query, key, value, output, .. } = &mut cca.attention;
            let readers = [query].into_iter().chain(key).chain(value).chain([&mut cca.delayed_value]);
            (readers.collect(), vec![output])
        }
        Mixer::ShortConv(conv) => (vec![&mut conv.input], vec![&mut conv.output]),
        Mixer::DeltaNet(net) => {
            let DeltaNet { query_key_value, gate, step, decay, output, .. } = &mut **net;
            (vec![query_key_value, gate, step, decay], vec![output])
        }
        Mixer::Mamba2(mamba) => of_mamba2(mamba),
        Mixer::AttentionAndMamba2(both) => {
            let (mut readers, mut writers) = of_attention(&mut both.0);
            let (more_readers, more_writers) = of_mamba2(&mut both.1);
            readers.extend(more_readers);
            writers.extend(more_writers);
            (readers, writers)
        }
    }
}

/// Readers and writers of the residual stream in a feed-forward network, and readers with norms of their own.
#[allow(clippy::type_complexity, reason = "two lists of projections as above, and blocks")]
fn of_feed_forward(network: &mut FeedForward) -> (Vec<&mut Linear>, Vec<&mut Linear>, Vec<ResidualBlock<'_>>) {
    match network {
        FeedForward::Mlp(mlp) => (vec![&mut mlp.gate, &mut mlp.up], vec![&mut mlp.down], Vec::new()),
        FeedForward::Plain(mlp) => (vec![&mut mlp.up], vec![&mut mlp.down], Vec::new()),
        FeedForward::Moe(moe) => {
            let (mut readers, mut writers) = of_experts(&mut moe.router, &mut moe.experts);
            if let Some(SharedExpert { mlp, gate }) = &mut moe.shared {
                readers.extend([&mut mlp.gate, &mut mlp.up].into_iter().chain(gate));
                writers.push(&mut mlp.down);
            }
            (readers, writers, Vec::new())
        }
        FeedForward::DepthMoe(moe) => {
            let (readers, writers) = of_experts(&mut moe.router.down, &mut moe.experts);
            (readers, writers, Vec::new())
        }
        FeedForward::DenseAndMoe(both) => {
            let DenseAndMoe { mlp, moe, router_norm, experts_norm, .. } = &mut **both;
            let Experts { gate, up, .. } = &mut moe.experts;
            let router = ResidualBlock::reading(router_norm, vec![&mut moe.router]);
            let experts = ResidualBlock::reading(experts_norm, vec![gate, up]);
            // both write through the norm after, and through norms of their own before it
            (vec![&mut mlp.gate, &mut mlp.up], Vec::new(), vec![router, experts])
        }
    }
}

/// Readers and writers of the residual stream in attention.
fn of_attention(attention: &mut Attention) -> (Vec<&mut Linear>, Vec<&mut Linear>) {
    let Attention { query, key, value, gate, output, .. } = attention;
    ([query].into_iter().chain(key).chain(value).chain(gate).collect(), vec![output])
}

/// Readers and writers of the residual stream in Mamba-2.
fn of_mamba2(mamba: &mut Mamba2) -> (Vec<&mut Linear>, Vec<&mut Linear>) {
    let Mamba2 { gate, inputs, step, output, .. } = mamba;
    (vec![gate, inputs, step], vec![output])
}

/// Readers and writers of the residual stream in experts with a router.
fn of_experts<'a>(router: &'a mut Linear, experts: &'a mut Experts) -> (Vec<&'a mut Linear>, Vec<&'a mut Linear>) {
    let Experts { gate, up, down, down_bias, .. } = experts;
    (vec![router, gate, up], [down].into_iter().chain(down_bias).collect())
}
