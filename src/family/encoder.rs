//! Encoders: bidirectional models for text embeddings and classification of texts or of their tokens.
//!
//! ```text
//! x = norm(embedding + position + type)
//! x = layer(x)                            (for each layer: bidirectional attention, feed-forward network)
//! x = norm(x)
//! logits = W_out act(W_dense pooled x)    (sequence classification)
//! logits = W_out x                        (token classification; ModernBERT: W_out norm(act(W_dense x)))
//! ```
//!
//! Functions have no state, and a text must fit into a call, because some layers see all of it. The host adds learned
//! positions and token types to the embeddings. Embedding models have no head: the last function outputs the final
//! hidden states. Sums and norms depend on the family:
//! | module | family |
//! |---|---|
//! | [`bert`] | BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, ELECTRA, ALBERT, MPNet, DeBERTa v2 and v3 |
//! | [`modernbert`] | ModernBERT |
//! | [`nomic`] | NomicBERT |
//! | [`gemma`] | EmbeddingGemma and EmbeddingGemma 2: bidirectional Gemma 3 and 4 |
//!
//! [`gguf`] reads the keys of llama.cpp's files; [`naming`] maps tensor names.

mod bert;
mod gemma;
mod gguf;
mod head;
mod modernbert;
mod naming;
mod nomic;

use std::ops::Range;

use serde_json::{Map, Value as Json};

use super::blocks::Graph;
use super::blocks::banded_attention::BandInputs;
use super::blocks::distance_scores::DistanceInputs;
use super::blocks::linear::{Linear, linear};
use super::blocks::norm::{Norm, rms_norm};
use super::blocks::rope::Rotation;
use super::config::keys::Keys;
use super::decoder::Ports;
use super::error::FamilyError;
use super::layer::{Layer, Mixer, MixerInputs, Stream};
use super::rope::RopeConfig;
use super::scale::scale_block;
use super::{
    EmitWeight, FamilyFacts, FamilyModel, FunctionGraph, FunctionRequest, HostProjection, HostTensors, LoweringOptions,
    Purpose,
};
use crate::classifier::config::{labels, numbered_labels};
use crate::tensors::first_positions;
use anec_base::Result;
use anec_bundle::{
    LabelSet, Pooling, PortRole, ProjectionActivation, SequenceClassification, Stage, WHOLE_TEXT, layer_scope,
};
use anec_mil::{Dim, ValueId};
use anec_source::{Ledger, SourceWeight};
use head::Head;

pub(super) use gemma::open as open_gemma;
pub(super) use gguf::{is_architecture, open as open_gguf};

/// Names of the rotary tables: for layers that see the whole text, and for layers that see a band.
const ROPE_TABLES: [&str; 2] = ["rope", "rope_local"];

/// An encoder with its weights.
struct Encoder {
    facts: FamilyFacts,
    /// Token embedding `[vocab_size, columns]`; columns = hidden_size without a projection.
    embedding: SourceWeight,
    /// Learned positions `[positions, columns]`.
    positions: Option<SourceWeight>,
    /// Token types `[types, columns]`.
    token_types: Option<SourceWeight>,
    /// Norm of the sum of embeddings.
    embedding_norm: Option<Norm>,
    /// Projection of the normed sum to hidden states.
    embedding_projection: Option<Linear>,
    /// Attention biases by distance, `[2 r + 1, heads]`, of all layers.
    attention_bias: Option<SourceWeight>,
    layers: Vec<EncoderLayer>,
    /// Norm of the last layer's output.
    final_norm: Option<Norm>,
    head: Option<Head>,
    /// Projection of the pooled vector, `[embedding_dim, hidden_size]`, which the host computes.
    final_projection: Option<SourceWeight>,
    /// Rotary embeddings of layers that see the whole text, and of layers that see a band.
    rope: [Option<RopeConfig>; 2],
}

/// A layer.
#[derive(Clone)]
struct EncoderLayer {
    layer: Layer,
    /// Distance in tokens that a token sees on each side; `None` for the whole text.
    band: Option<u64>,
}

/// Returns whether a model type is an encoder's.
pub(super) fn is_encoder(model_type: &str) -> bool {
    names().any(|name| name == model_type)
}

/// Model types of encoders.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    families().map(|(name, _)| name)
}

/// Model types of encoders, each with the neutral keys of its configuration beside
/// [`NEUTRAL_KEYS`](crate::table::NEUTRAL_KEYS).
pub fn families() -> impl Iterator<Item = (&'static str, &'static [&'static str])> {
    let others = [(modernbert::ROPE.name, modernbert::NEUTRAL), (nomic::ROPE.name, nomic::NEUTRAL)];
    bert::ROWS.iter().map(|row| (row.name, bert::NEUTRAL)).chain(others)
}

/// Architecture of the GGUF files of an encoder's model type.
pub fn gguf_architecture(model_type: &str) -> &'static str {
    gguf::architecture_of(model_type)
}

/// Opens an encoder: reads its configuration and takes its tensors.
pub(super) fn open(
    model_type: &str,
    place: &str,
    config: &Map<String, Json>,
    ledger: &mut Ledger<'_>,
    acknowledged: &[String],
) -> Result<Box<dyn FamilyModel>> {
    // published checkpoints have no prefix
    ledger.assume(["embeddings.*_embeddings.weight"]);
    let encoder = match bert::ROWS.iter().find(|row| row.name == model_type) {
        Some(row) => bert::open(row, place, config, ledger, acknowledged)?,
        None if model_type == nomic::ROPE.name => nomic::open(place, config, ledger, acknowledged)?,
        None => modernbert::open(place, config, ledger, acknowledged)?,
    };
    Ok(Box::new(encoder))
}

/// Task by the configuration; `pooling` is that of the family's classifiers.
fn purpose(keys: &Keys<'_>, pooling: Pooling) -> Result<Purpose, FamilyError> {
    let architecture = architecture(keys)?;
    if let Some(labels) = text_labels(keys)? {
        return Ok(Purpose::SequenceClassification(SequenceClassification {
            labels,
            pooling,
            causal: false,
            prompt: None,
        }));
    }
    if architecture.ends_with("ForTokenClassification") {
        return Ok(Purpose::TokenClassification(LabelSet { labels: label_names(keys)?, band: WHOLE_TEXT }));
    }
    let others = ["ForQuestionAnswering", "ForMultipleChoice", "ForNextSentencePrediction"];
    if others.iter().any(|task| architecture.ends_with(task)) {
        let known = "an encoder alone, one for masked tokens, …ForSequenceClassification or …ForTokenClassification";
        return Err(keys.value("architectures", known));
    }
    Ok(Purpose::TextEmbedding { bidirectional: true, pooling: Pooling::Mean })
}

/// Class of the model in transformers; empty if there is none.
fn architecture<'a>(keys: &Keys<'a>) -> Result<&'a str, FamilyError> {
    Ok(keys.strings("architectures")?.and_then(|all| all.first().copied()).unwrap_or_default())
}

/// Labels of a model …ForSequenceClassification; `None` for other models.
pub(super) fn text_labels(keys: &Keys<'_>) -> Result<Option<Vec<String>>, FamilyError> {
    architecture(keys)?.ends_with("ForSequenceClassification").then(|| label_names(keys)).transpose()
}

/// Labels of a classifier; two without names, as in transformers, if there are no names.
fn label_names(keys: &Keys<'_>) -> Result<Vec<String>, FamilyError> {
    match keys.get("id2label") {
        Some(_) => labels(keys),
        None => numbered_labels(keys, keys.u64("num_labels")?.unwrap_or(2)),
    }
}

/// Reason for leaving out a head for masked tokens.
pub const MASKED_TOKEN_HEAD: &str = "head for masked tokens, not needed for hidden states";

/// Ignores tensors that embeddings don't need.
fn ignore_heads(ledger: &mut Ledger<'_>, patterns: &[&str]) {
    for pattern in patterns {
        let is_pooler = pattern.contains("pooler");
        ledger.ignore(pattern, if is_pooler { "pooler, not needed for hidden states" } else { MASKED_TOKEN_HEAD });
    }
}

impl Encoder {
    /// Shared inputs of layers that see the whole text, or of layers that see a band; `context` is the longest text.
    fn shared(&self, g: &mut Graph<'_>, ports: &mut Ports, band: Option<u64>, context: u64) -> BandInputs {
        let local = band.is_some();
        let suffix = if local { "_local" } else { "" };
        let table = usize::from(local && self.rope[1].is_some());
        let (one, tokens) = (Dim::Fixed(1), g.tokens.clone());
        let rotation = self.rope[table].as_ref().map(|rope| {
            let shape = vec![one.clone(), one.clone(), tokens.clone(), Dim::Fixed(rope.rope_dim / 2)];
            let table = || ROPE_TABLES[table].to_owned();
            Rotation {
                cos: ports.input(g, &format!("rope_cos{suffix}"), PortRole::RopeCos { table: table() }, shape.clone()),
                sin: ports.input(g, &format!("rope_sin{suffix}"), PortRole::RopeSin { table: table() }, shape),
            }
        });
        // the distance of two tokens is less than the text's length
        let biases = self.attention_bias.as_ref();
        let band = band.unwrap_or(self.facts.max_position_embeddings);
        let role = PortRole::BandMask { band, biased: biases.is_some() };
        let heads = Dim::Fixed(biases.map_or(1, SourceWeight::columns));
        let mask = ports.input(g, &format!("attn_mask{suffix}"), role, vec![one, heads, tokens.clone(), tokens]);
        let distances = self.distance_heads().map(|heads| DistanceInputs::new(g, mask, heads, context));
        BandInputs { rotation, mask, distances }
    }

    fn layers_function(&self, g: &mut Graph<'_>, range: Range<usize>, context: u64) -> Ports {
        let mut ports = Ports::default();
        let mut hidden: ValueId = ports.input(g, "hidden", PortRole::Hidden, g.hidden_shape(self.facts.hidden_size));
        let layers = &self.layers[range.clone()];
        let mixes = g.form.omits_feed_forward(false);
        let mut bands: Vec<Option<u64>> = layers.iter().map(|layer| layer.band).collect();
        bands.sort_unstable();
        bands.dedup();
        let shared: Vec<_> = bands.into_iter().map(|band| (band, self.shared(g, &mut ports, band, context))).collect();
        let sum = hidden;
        if range.start == 0 {
            hidden = self.first_input(g, hidden);
        }
        let per_layer = match range.start {
            _ if mixes => None,
            0 => Some(sum),
            _ => self.token_embedding(g, &mut ports, range.clone()),
        };
        for (index, EncoderLayer { layer, band }) in range.clone().zip(layers) {
            let band = shared.iter().find(|(of, _)| of == band).map(|(_, inputs)| *inputs);
            let inputs = MixerInputs { attention: None, band, order: None, states: &[], per_layer };
            let stream = Stream { hidden, network: None, router: None };
            let apply = if mixes { Layer::mix } else { Layer::apply };
            hidden = g.scope(&layer_scope(index), |g| apply(layer, g, stream, inputs, 1.0).hidden);
            if index + 1 < range.end {
                ports.between.push((index, hidden));
            }
        }
        if !mixes {
            hidden = self.with_final_norm(g, hidden, range.end);
        }
        ports.output(g, "hidden_out", PortRole::Hidden, hidden);
        ports
    }

    /// Input of the token embeddings, if a layer of `range` makes its per-layer embeddings of them.
    fn token_embedding(&self, g: &mut Graph<'_>, ports: &mut Ports, range: Range<usize>) -> Option<ValueId> {
        let takes = |layer: &EncoderLayer| layer.layer.per_layer_input.is_some();
        let shape = g.hidden_shape(self.facts.hidden_size);
        self.layers[range].iter().any(takes).then(|| ports.input(g, "embedding", PortRole::Embedding, shape))
    }

    /// Hidden states for the first layer: the normed and projected sum of embeddings.
    fn first_input(&self, g: &mut Graph<'_>, sum: ValueId) -> ValueId {
        let mut hidden = sum;
        if let Some(size) = self.embedding_size() {
            hidden = g.ops.slice(hidden, 1, 0..size);
        }
        if let Some(norm) = &self.embedding_norm {
            hidden = rms_norm(g, hidden, norm, 1);
        }
        self.embedding_projection.as_ref().map_or(hidden, |projection| linear(g, hidden, projection))
    }

    /// Number of heads if their scores depend on distances.
    fn distance_heads(&self) -> Option<u64> {
        match &self.layers.first()?.layer.mixer {
            Mixer::Banded(attention) => attention.distances.as_ref().map(|_| attention.num_attention_heads),
            _ => None,
        }
    }

    /// Columns of the embeddings if they have fewer than `hidden_size`.
    fn embedding_size(&self) -> Option<u64> {
        Some(self.embedding.columns()).filter(|columns| *columns < self.facts.hidden_size)
    }

    /// Function of the feed-forward network of a layer whose function omits it.
    fn feed_forward_function(&self, g: &mut Graph<'_>, index: usize) -> Ports {
        let mut ports = Ports::default();
        let hidden = ports.input(g, "hidden", PortRole::Hidden, g.hidden_shape(self.facts.hidden_size));
        let per_layer = self.token_embedding(g, &mut ports, index..index + 1);
        let layer = &self.layers[index].layer;
        let stream = Stream { hidden, network: None, router: None };
        let hidden = g.scope(&layer_scope(index), |g| layer.apply_feed_forward(g, stream, per_layer, 1.0).hidden);
        let hidden = self.with_final_norm(g, hidden, index + 1);
        ports.output(g, "hidden_out", PortRole::Hidden, hidden);
        ports
    }

    /// Hidden states for layer `next`, with the final norm after the last layer.
    fn with_final_norm(&self, g: &mut Graph<'_>, hidden: ValueId, next: usize) -> ValueId {
        let norm = self.final_norm.as_ref().filter(|_| next == self.layers.len());
        norm.map_or(hidden, |norm| rms_norm(g, hidden, norm, 1))
    }
}

/// Projection of the pooled vector. Without a bias, it is the mean of the projected states, as in the reference.
fn final_projection(weight: &SourceWeight) -> HostProjection {
    HostProjection { weight: weight.clone(), bias: None, activation: ProjectionActivation::Identity }
}

impl FamilyModel for Encoder {
    fn facts(&self) -> &FamilyFacts {
        &self.facts
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
        let ports = match (&request.stage, &self.head) {
            (Stage::Layers { first, end }, _) => self.layers_function(&mut g, *first..*end, request.context),
            (Stage::FeedForward { layer }, _) => self.feed_forward_function(&mut g, *layer),
            (Stage::Head { first, end }, Some(head)) => head.function(&mut g, self.facts.hidden_size, *first..*end)?,
            _ => {
                let mut ports = Ports::default();
                let shape = g.hidden_shape(self.facts.hidden_size);
                let hidden = ports.input(&mut g, "hidden", PortRole::Hidden, shape);
                g.missing("function", "a head or experts, which the model doesn't have", hidden);
                ports
            }
        };
        ports.finish(g)
    }

    fn host(&self, context: u64) -> Result<HostTensors> {
        let tables =
            self.rope.iter().zip(ROPE_TABLES).filter_map(|(rope, name)| Some(rope.as_ref()?.tables(name, context)));
        Ok(HostTensors {
            embedding: self.embedding.clone(),
            positions: self.positions.as_ref().map(|table| first_positions(table, context)).transpose()?,
            token_types: self.token_types.clone(),
            embedding_size: self.embedding_size(),
            attention_bias: self.attention_bias.clone(),
            rope: tables.collect(),
            rotation: None,
            per_layer_embedding: None,
            projections: self.final_projection.iter().map(final_projection).collect(),
        })
    }

    fn set_hidden_scale(&mut self, scale: f64) {
        let factor = scale / self.facts.hidden_scale;
        self.facts.hidden_scale = scale;
        if factor == 1.0 {
            return;
        }
        let tables = [&mut self.positions, &mut self.token_types].into_iter().flatten();
        tables.chain([&mut self.embedding]).for_each(|table| *table = table.scale(factor as f32));
        // a norm cancels the scale of its input; its gain determines the scale of its output
        for norm in [&mut self.embedding_norm, &mut self.final_norm].into_iter().flatten() {
            norm.eps *= factor * factor;
            norm.scale_result(factor as f32);
        }
        // its input is scaled, so that its bias is, too
        if let Some(projection) = &mut self.embedding_projection {
            projection.bias = projection.bias.as_ref().map(|bias| bias.scale(factor as f32));
        }
        let blocks = self.layers.iter_mut().flat_map(|layer| layer.layer.blocks());
        blocks.for_each(|block| scale_block(block, factor));
        if let Some(head) = &mut self.head {
            head.take_scaled(factor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_number_of_labels_is_one_that_a_classifier_can_have() {
        let labels = |number: Json| {
            let names = json!({"0": "no", "1": "yes"});
            let mut config = json!({"architectures": ["BertForSequenceClassification"], "num_labels": number});
            // published files have names of another number of labels, which transformers passes over
            if number == json!(3) || number == json!(2) {
                config["id2label"] = names;
            }
            let config = config.as_object().unwrap();
            purpose(&Keys::new("config.json", "", config), Pooling::Cls).map_err(|error| error.to_string())
        };
        let Ok(Purpose::SequenceClassification(found)) = labels(json!(3)) else { panic!("no classifier") };
        assert_eq!(found.labels, ["LABEL_0", "LABEL_1", "LABEL_2"]);
        let Ok(Purpose::SequenceClassification(found)) = labels(json!(2)) else { panic!("no classifier") };
        assert_eq!(found.labels, ["no", "yes"]);
        for wrong in [json!(0), json!(1e18), json!(u64::MAX)] {
            let error = labels(wrong).unwrap_err();
            assert!(error.contains("num_labels") && error.contains("1 to 65536"), "{error}");
        }
    }
}
