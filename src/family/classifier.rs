//! Token classifiers: a label for every token, from bidirectional context.
//!
//! ```text
//! x = x + attention(norm(x))            (for each layer: a band on both sides)
//! x = x + experts(norm(x))
//! logits = W_score norm(x) + b
//! ```
//!
//! The only family is OpenAI's privacy filter (transformers' `openai_privacy_filter`), a bidirectional gpt-oss block.
//! Functions have no state. A layer's output at a token depends on the tokens up to `band` away. So a function of n
//! layers is correct for all tokens of a call except n times the band at each end that isn't an end of the text.

pub mod config;
mod tensors;

use std::ops::Range;

use serde_json::{Map, Value as Json};

use super::blocks::Graph;
use super::blocks::banded_attention::{BandInputs, BandedAttention, banded_attention};
use super::blocks::linear::{Linear, linear};
use super::blocks::moe::{Moe, experts, moe, shares};
use super::blocks::norm::{Norm, rms_norm};
use super::blocks::rope::Rotation;
use super::decoder::Ports;
use super::layer::ExpertTask;
use super::{
    EmitWeight, ExpertCounts, FamilyFacts, FamilyModel, FunctionGraph, FunctionRequest, HostTensors, LoweringOptions,
    Purpose, table::OPENAI_PRIVACY_FILTER,
};
use anec_base::Result;
use anec_bundle::{LabelSet, PortRole, Stage};
use anec_mil::Dim;
use anec_source::{Ledger, SourceWeight};
use config::ClassifierConfig;

/// Name of the rotary table.
const ROPE_TABLE: &str = "rope";

/// A token classifier with its weights.
struct Classifier {
    config: ClassifierConfig,
    facts: FamilyFacts,
    layers: Vec<Layer>,
    /// Token embedding `[vocab_size, hidden_size]`.
    embedding: SourceWeight,
    final_norm: Norm,
    /// Output projection with a row for each label.
    score: Linear,
}

/// Weights of a layer.
struct Layer {
    attention_norm: Norm,
    attention: BandedAttention,
    experts_norm: Norm,
    experts: Moe,
}

/// Opens a token classifier: reads its configuration and takes its tensors.
pub(super) fn open(
    place: &str,
    config: &Map<String, Json>,
    ledger: &mut Ledger<'_>,
    acknowledged: &[String],
) -> Result<Box<dyn FamilyModel>> {
    let config = ClassifierConfig::read(place, config, acknowledged)?;
    let weights = tensors::Tensors::new(ledger, &config);
    Ok(Box::new(weights.classifier()?))
}

impl Classifier {
    /// Function of layers. With separate experts, `layers` ends with the first one, because all layers have experts.
    fn layers_function(&self, g: &mut Graph<'_>, layers: Range<usize>) -> Ports {
        let mut ports = Ports::default();
        let mut x = ports.input(g, "hidden", PortRole::Hidden, g.hidden_shape(self.config.hidden_size));
        let (one, tokens) = (Dim::Fixed(1), g.tokens.clone());
        let waves = vec![one.clone(), one.clone(), tokens.clone(), Dim::Fixed(self.config.rope.rope_dim / 2)];
        let table = || ROPE_TABLE.to_owned();
        let rotation = Rotation {
            cos: ports.input(g, "rope_cos", PortRole::RopeCos { table: table() }, waves.clone()),
            sin: ports.input(g, "rope_sin", PortRole::RopeSin { table: table() }, waves),
        };
        let band = PortRole::BandMask { band: self.config.band, biased: false };
        let mask = ports.input(g, "attn_mask", band, vec![one.clone(), one, tokens.clone(), tokens]);
        let shared = BandInputs { rotation: Some(rotation), mask, distances: None };
        let mut task = None;
        for index in layers.clone() {
            let layer = &self.layers[index];
            if task.is_some() {
                g.missing("layers", "to end where experts are left out", x);
            }
            (x, task) = g.layer(index, |g| {
                let normal = rms_norm(g, x, &layer.attention_norm, 1);
                let seen = g.scope("attn", |g| banded_attention(g, normal, &layer.attention, shared));
                let x = g.ops.add(x, seen);
                if g.form.omits_feed_forward(true) {
                    return (g.ops.rename(x, "hidden"), None);
                }
                let normal = rms_norm(g, x, &layer.experts_norm, 1);
                if g.form.experts.is_packed() {
                    let thought = g.scope("moe", |g| moe(g, normal, &layer.experts));
                    let hidden = g.ops.add(x, thought);
                    return (g.ops.rename(hidden, "hidden"), None);
                }
                let shares = g.scope("moe", |g| shares(g, normal, &layer.experts));
                (x, Some(ExpertTask { input: normal, shares }))
            });
            if index + 1 < layers.end {
                ports.between.push((index, x));
            }
        }
        ports.output(g, "hidden_out", PortRole::Hidden, x);
        ports.expert_outputs(g, task);
        ports
    }

    /// Function of all experts of a layer whose function omits them.
    fn feed_forward_function(&self, g: &mut Graph<'_>, index: usize) -> Ports {
        let layer = &self.layers[index];
        let mut ports = Ports::default();
        let x = ports.input(g, "hidden", PortRole::Hidden, g.hidden_shape(self.config.hidden_size));
        let hidden = g.layer(index, |g| {
            let normal = rms_norm(g, x, &layer.experts_norm, 1);
            let thought = g.scope("moe", |g| moe(g, normal, &layer.experts));
            g.ops.add(x, thought)
        });
        ports.output(g, "hidden_out", PortRole::Hidden, hidden);
        ports
    }

    fn experts_function(&self, g: &mut Graph<'_>, index: usize, range: Range<u64>) -> Result<Ports> {
        let all = &self.layers[index].experts.experts;
        let mut ports = Ports::default();
        let hidden = ports.input(g, "hidden", PortRole::Hidden, g.hidden_shape(self.config.hidden_size));
        let task = ports.expert_task(g, self.config.hidden_size, all.num_experts);
        let part = all.part(range.clone())?;
        let hidden = g.layer(index, |g| {
            let thought = g.scope("moe", |g| {
                let shares = g.ops.slice(task.shares, 1, range);
                experts(g, task.input, shares, &part)
            });
            g.ops.add(hidden, thought)
        });
        ports.output(g, "hidden_out", PortRole::Hidden, hidden);
        Ok(ports)
    }

    fn head_function(&self, g: &mut Graph<'_>, rows: Range<u64>) -> Result<Ports> {
        let mut ports = Ports::default();
        let hidden = ports.input(g, "hidden", PortRole::Hidden, g.hidden_shape(self.config.hidden_size));
        let normal = rms_norm(g, hidden, &self.final_norm, 1);
        let logits = linear(g, normal, &self.score_of(rows)?);
        ports.output(g, "logits", PortRole::Logits, logits);
        Ok(ports)
    }

    fn score_of(&self, rows: Range<u64>) -> Result<Linear> {
        let Linear { name, role, weight, bias } = &self.score;
        let bias = bias.as_ref().map(|bias| bias.slice(rows.clone())).transpose()?;
        Ok(Linear { name, role: *role, weight: weight.slice(rows)?, bias })
    }
}

impl FamilyModel for Classifier {
    fn facts(&self) -> &FamilyFacts {
        &self.facts
    }

    fn experts(&self, layer: usize) -> Option<ExpertCounts> {
        let moe = &self.layers[layer].experts;
        Some(ExpertCounts::new(moe.experts.num_experts, moe.num_experts_per_tok))
    }

    fn layer_state_bytes(&self, _layer: usize, _context: u64, _most_tokens: u64) -> u64 {
        0
    }

    fn build(
        &self,
        form: &LoweringOptions,
        request: &FunctionRequest,
        weights: &mut dyn EmitWeight,
    ) -> Result<FunctionGraph> {
        let mut g = request.begin(form, weights);
        let ports = match request.stage {
            Stage::Layers { first, end } => self.layers_function(&mut g, first..end),
            Stage::FeedForward { layer } => self.feed_forward_function(&mut g, layer),
            Stage::Experts { layer, first, end } => self.experts_function(&mut g, layer, first..end)?,
            Stage::Head { first, end } => self.head_function(&mut g, first..end)?,
            Stage::Model { .. } => {
                let mut ports = Ports::default();
                let shape = g.hidden_shape(self.config.hidden_size);
                let hidden = ports.input(&mut g, "hidden", PortRole::Hidden, shape);
                g.missing("function", "a head apart from the layers, which see a text in windows", hidden);
                ports
            }
        };
        ports.finish(g)
    }

    fn host(&self, context: u64) -> Result<HostTensors> {
        Ok(HostTensors {
            embedding: self.embedding.clone(),
            rope: vec![self.config.rope.tables(ROPE_TABLE, context)],
            rotation: None,
            positions: None,
            token_types: None,
            embedding_size: None,
            attention_bias: None,
            per_layer_embedding: None,
            projections: Vec::new(),
        })
    }

    fn set_hidden_scale(&mut self, scale: f64) {
        let factor = scale / self.facts.hidden_scale;
        self.facts.hidden_scale = scale;
        if factor == 1.0 {
            return;
        }
        // norms that read the stream scale their epsilon; blocks that write to it apply the factor
        self.embedding = self.embedding.scale(factor as f32);
        self.final_norm.eps *= factor * factor;
        for layer in &mut self.layers {
            layer.attention_norm.eps *= factor * factor;
            layer.experts_norm.eps *= factor * factor;
            let experts = &mut layer.experts.experts;
            let writers = [&mut layer.attention.output, &mut experts.down];
            for writer in writers.into_iter().chain(&mut experts.down_bias) {
                writer.weight = writer.weight.scale(factor as f32);
                writer.bias = writer.bias.as_ref().map(|bias| bias.scale(factor as f32));
            }
        }
    }
}

/// Dimensions of a configuration for the bundle.
fn facts(config: &ClassifierConfig) -> FamilyFacts {
    FamilyFacts {
        family: OPENAI_PRIVACY_FILTER.name.to_owned(),
        hidden_size: config.hidden_size,
        num_layers: config.num_hidden_layers,
        vocab_size: config.vocab_size,
        purpose: Purpose::TokenClassification(LabelSet { labels: config.labels.clone(), band: config.band }),
        max_position_embeddings: config.max_position_embeddings,
        hidden_scale: 1.0,
        recurrent: false,
        config: serde_json::to_value(config).unwrap_or(Json::Null),
    }
}
