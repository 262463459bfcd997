//! EmbeddingGemma (arXiv:2509.20354) and EmbeddingGemma 2: bidirectional Gemma 3 and 4. A decoder's window becomes a
//! band of half the width on each side; EmbeddingGemma 2 has bands instead of windows. Everything else is the
//! decoder's.
//!
//! EmbeddingGemma 2 projects the final hidden states. A mean of projections is the projection of the mean, so that the
//! host projects the pooled vector.

use serde_json::Value as Json;

use super::{Encoder, EncoderLayer};
use crate::blocks::banded_attention::BandedAttention;
use crate::config::DecoderConfig;
use crate::layer::{Layer, Mixer};
use crate::row::{Bidirectional, DecoderFamily};
use crate::tensors::{Naming, Tensors};
use crate::{FamilyFacts, FamilyModel, Purpose};
use anec_base::Result;
use anec_bundle::Pooling;
use anec_source::Ledger;

/// Opens a decoder whose configuration is bidirectional.
pub(crate) fn open(
    config: DecoderConfig,
    row: &'static DecoderFamily,
    naming: Naming,
    ledger: &mut Ledger<'_>,
) -> Result<Box<dyn FamilyModel>> {
    let mut tensors = Tensors::new(ledger, naming, row, &config);
    let embedding = tensors.embedding()?.scale(config.embedding_multiplier as f32);
    let final_norm = tensors.final_norm()?;
    let bands = row.attention.bidirectional == Bidirectional::Always;
    let mut layers: Vec<EncoderLayer> =
        (0..config.num_hidden_layers).map(|index| layer(&mut tensors, &config, index, bands)).collect::<Result<_>>()?;
    let blocks = layers.iter_mut().filter_map(|layer| layer.layer.per_layer_input.as_mut());
    for ((block, _), source) in blocks.zip(tensors.per_layer_sources()?) {
        block.source = Some(source);
    }
    let final_projection = tensors.final_projection()?;
    for name in ["lm_head.weight", "output.weight"] {
        ledger.ignore(name, "not needed for hidden states");
    }
    let mut encoder = Encoder {
        embedding,
        positions: None,
        token_types: None,
        embedding_norm: None,
        embedding_projection: None,
        attention_bias: None,
        layers,
        final_norm: Some(final_norm),
        head: None,
        final_projection,
        rope: [Some(config.rope.clone()), config.rope_local.clone()],
        facts: FamilyFacts {
            family: config.family.to_owned(),
            hidden_size: config.hidden_size,
            num_layers: config.num_hidden_layers,
            vocab_size: config.vocab_size,
            purpose: Purpose::TextEmbedding { bidirectional: true, pooling: Pooling::Mean },
            max_position_embeddings: config.max_position_embeddings,
            hidden_scale: 1.0,
            recurrent: false,
            config: serde_json::to_value(&config).unwrap_or(Json::Null),
        },
    };
    encoder.set_hidden_scale(config.hidden_scale);
    Ok(Box::new(encoder))
}

/// Takes a layer; `bands` if windows are bands.
fn layer(tensors: &mut Tensors<'_, '_>, config: &DecoderConfig, index: usize, bands: bool) -> Result<EncoderLayer> {
    let layer = tensors.layer(index)?;
    let mixer = match layer.mixer {
        Mixer::Attention(attention) => match BandedAttention::of(&attention) {
            Some(banded) => Mixer::Banded(Box::new(banded)),
            None => Mixer::Attention(attention),
        },
        other => other,
    };
    // a window includes the token itself; half of it lies on each side
    let band = config.layers[index].window.map(|window| if bands { window } else { window / 2 });
    Ok(EncoderLayer { layer: Layer { mixer, ..layer }, band })
}
