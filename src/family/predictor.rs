//! Multi-token prediction (arXiv:2412.19437, section 2.2): a layer after the last one that predicts the token after
//! next.
//!
//! ```text
//! x_t = layer(W [norm_e(embedding(token_t)); norm_h(h_(t-1))])
//! logits = W_head norm(x_t)
//! ```
//!
//! h is the output of the model's last layer after the model's final norm. For tokens that the layer has predicted
//! itself, it is the layer's own x after its own norm.

use super::blocks::Graph;
use super::blocks::linear::{Linear, linear};
use super::blocks::norm::{Norm, rms_norm};
use super::config::DecoderConfig;
use super::decoder::{Decoder, Ports};
use super::row::MixerKind;
use super::tensors::Tensors;
use super::transform::Transformed;
use super::{EmitWeight, FamilyFacts};
use anec_base::Result;
use anec_bundle::PortRole;
use anec_manifest::Role;
use anec_mil::{FunctionBuilder, ValueId};
use anec_source::{Ledger, SourceWeight};

/// Projections before the layer.
pub struct Predictor {
    /// Norm of the embedding.
    embedding_norm: Norm,
    /// Norm of the previous hidden state.
    hidden_norm: Norm,
    /// Joining projection `[hidden_size, 2 hidden_size]`, with the embedding first.
    join: Linear,
    /// Final norm of the model.
    model_norm: Norm,
    /// Final norm of the layer.
    own_norm: Norm,
}

/// Configuration of the layer as a model: one of the model's full-attention layers.
pub fn configuration(config: &DecoderConfig) -> DecoderConfig {
    let attends = config.layers.iter().find(|layer| layer.mixer == MixerKind::Attention);
    DecoderConfig {
        num_hidden_layers: 1,
        delta_net: None,
        layers: attends.or(config.layers.first()).cloned().into_iter().collect(),
        ..config.clone()
    }
}

/// Opens the layer as a model, from the tensors `mtp.*`; `of` is its base model.
///
/// # Errors
/// Returns an error if a tensor is missing or has another shape.
pub fn open(of: &Decoder, row: &'static super::row::DecoderFamily, ledger: &mut Ledger<'_>) -> Result<Decoder> {
    let config = configuration(&of.config);
    let mut tensors = Tensors::of_predictor(ledger, row, &config);
    let own_norm = tensors.final_norm()?;
    let named = |name: &'static str, norm: Norm| Norm { name, ..norm };
    let predictor = Predictor {
        embedding_norm: tensors.model_norm("pre_fc_norm_embedding", "embedding_norm")?,
        hidden_norm: tensors.model_norm("pre_fc_norm_hidden", "hidden_norm")?,
        join: Linear { name: "join", role: Role::MlpUp, weight: tensors.join()?, bias: None },
        model_norm: named("model_norm", of.final_norm.clone()),
        own_norm: named("own_norm", own_norm.clone()),
    };
    let layers = vec![tensors.layer(0)?];
    let facts = FamilyFacts { num_layers: 1, recurrent: false, config: serde_json::Value::Null, ..of.facts.clone() };
    Ok(Decoder {
        config,
        facts,
        layers,
        embedding: of.embedding.clone(),
        positions: None,
        per_layer_embedding: None,
        final_norm: own_norm,
        head: of.head.clone(),
        rotation: None,
        transformed: Transformed::default(),
        predictor: Some(predictor),
        draft: None,
    })
}

impl Predictor {
    /// Input of the layer for the tokens' embedding.
    pub(super) fn enter(&self, g: &mut Graph<'_>, ports: &mut Ports, embedding: ValueId, width: u64) -> ValueId {
        let previous = ports.input(g, "previous_hidden", PortRole::PreviousHidden, g.hidden_shape(width));
        let drafted = ports.input(g, "previous_drafted", PortRole::PreviousDrafted, g.hidden_shape(1));
        g.scope("predictor", |g| {
            let of_model = rms_norm(g, previous, &self.model_norm, 1);
            let own = rms_norm(g, previous, &self.own_norm, 1);
            let difference = g.ops.sub(own, of_model);
            let chosen = g.ops.mul(difference, drafted);
            let previous = g.ops.add(of_model, chosen);
            let embedding = rms_norm(g, embedding, &self.embedding_norm, 1);
            let previous = rms_norm(g, previous, &self.hidden_norm, 1);
            let both = g.ops.concat(&[embedding, previous], 1);
            linear(g, both, &self.join)
        })
    }

    /// Adapts the layer to embeddings and hidden states multiplied by `factor`.
    pub(super) fn scale_inputs(&mut self, factor: f64) {
        self.embedding_norm.eps *= factor * factor;
        self.model_norm.eps *= factor * factor;
    }
}

/// Emitter of weights outside of the model's layers, whose number formats don't apply.
pub struct OutsideLayers<'a>(pub &'a mut dyn EmitWeight);

impl EmitWeight for OutsideLayers<'_> {
    fn emit(
        &mut self,
        builder: &mut FunctionBuilder,
        name: &str,
        role: Role,
        weight: &SourceWeight,
        shape: &[u64],
    ) -> Result<ValueId> {
        self.0.emit(builder, name, role, weight, shape)
    }

    fn emit_row_scale(
        &mut self,
        builder: &mut FunctionBuilder,
        name: &str,
        role: Role,
        weight: &SourceWeight,
        shape: &[u64],
    ) -> Result<Option<ValueId>> {
        self.0.emit_row_scale(builder, name, role, weight, shape)
    }
}
