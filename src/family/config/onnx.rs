//! Configuration of a decoder's ONNX graph in the keys of `config.json`, and its comparison with a `config.json`.
//!
//! A graph contains all numbers and forms, so a bundle needs no `config.json`. If it has one, they must agree.

use std::fmt::Display;

use serde_json::{Map, Value as Json, json};

use super::DecoderConfig;
use crate::error::FamilyError;
use crate::rope::RopeConfig;
use crate::row::{Activation, DecoderFamily, LayerForm, NormKind, NormPlacement, QkNorm, RopeLayers, WindowRule};
use anec_base::Result;
use anec_source::onnx::decoder::{self, OnnxDecoder, Rope};
use anec_source::onnx::rope::{Frequencies, OnnxRope};

/// Base for frequencies that are listed individually.
const ANY_THETA: f64 = 10000.0;

/// Name of the family whose form a graph has.
pub fn family(graph: &OnnxDecoder) -> &'static str {
    let qk_norm = graph.layers.first().and_then(|layer| layer.qk_norm);
    match (graph.norms, qk_norm) {
        (decoder::OnnxNormPlacement::Both, _) => "gemma3_text",
        (decoder::OnnxNormPlacement::Post, _) => "olmo2",
        (decoder::OnnxNormPlacement::Pre, Some(decoder::OnnxQkNorm::PerHeadRotated)) => "hunyuan_v1_dense",
        (decoder::OnnxNormPlacement::Pre, Some(_)) => "qwen3",
        (decoder::OnnxNormPlacement::Pre, None) if multiplies(graph) => "granite",
        (decoder::OnnxNormPlacement::Pre, None) => "llama",
    }
}

fn multiplies(graph: &OnnxDecoder) -> bool {
    [graph.embedding_multiplier, graph.residual_multiplier, graph.logits_multiplier].iter().any(|factor| *factor != 1.0)
}

/// Configuration of a graph for the reader of a family. `context_length` is the longest text, if the bundle states it.
///
/// # Errors
/// Returns an error if a rotary table can't be read or its frequencies fit no configuration.
pub fn configuration(
    graph: &OnnxDecoder,
    context_length: Option<u64>,
    family: &DecoderFamily,
) -> Result<Map<String, Json>> {
    let positions = graph.ropes.iter().map(|rope| rope.long.as_ref().map_or(&rope.table, |(_, long)| long).positions());
    let mut config = Map::new();
    let mut set = |key: &str, value: Json| config.insert(key.to_owned(), value);
    set("hidden_size", json!(graph.hidden_size));
    set("vocab_size", json!(graph.vocab_size));
    set("num_hidden_layers", json!(graph.layers.len()));
    set("max_position_embeddings", json!(context_length.or(positions.min())));
    set("rms_norm_eps", json!(graph.epsilon));
    set("tie_word_embeddings", json!(graph.tied));
    let Some(layer) = graph.layers.first() else { return Ok(config) };
    set("num_attention_heads", json!(layer.heads));
    set("num_key_value_heads", json!(layer.key_value_heads));
    set("head_dim", json!(layer.head_dim));
    set("intermediate_size", json!(layer.intermediate_size));
    if family.attention.query_pre_attn_scalar {
        set("query_pre_attn_scalar", json!(layer.scale.powi(-2)));
    }
    if family.residual.multipliers {
        set("embedding_multiplier", json!(graph.embedding_multiplier));
        set("attention_multiplier", json!(layer.scale));
        set("residual_multiplier", json!(graph.residual_multiplier));
        set("logits_scaling", json!(1.0 / graph.logits_multiplier));
    }
    let width = graph.layers.iter().find_map(|layer| layer.window);
    let [full, sliding] = family.attention.layer_types;
    let types: Vec<&str> =
        graph.layers.iter().map(|layer| if layer.window.is_some() { sliding } else { full }).collect();
    match family.attention.window {
        WindowRule::None => {}
        WindowRule::Every(_) => {
            set("sliding_window", json!(width));
        }
        WindowRule::EveryIfUsed | WindowRule::FromLayer | WindowRule::WithoutRope => {
            if width.is_some() {
                set("use_sliding_window", json!(true));
                set("sliding_window", json!(width));
                set("layer_types", json!(types));
            }
        }
        WindowRule::Pattern(_) | WindowRule::PatternOrNone(_) | WindowRule::Types => {
            set("sliding_window", json!(width));
            set("layer_types", json!(types));
        }
    }
    if family.rope.layers == RopeLayers::Listed {
        let rotates: Vec<u8> = graph.layers.iter().map(|layer| layer.rope.is_some().into()).collect();
        set("no_rope_layers", json!(rotates));
    }
    let used = |windowed: bool| {
        let mut layers =
            graph.layers.iter().filter(|layer| layer.window.is_some() == windowed || family.rope.local_theta.is_none());
        layers.find_map(|layer| layer.rope).and_then(|index| graph.ropes.get(index))
    };
    if let Some(rope) = used(false) {
        set("rope_dim", json!(rope.table.rope_dim()));
        rope_keys(rope, &mut config)?;
    }
    if let Some(theta) =
        used(true).filter(|_| family.rope.local_theta.is_some()).map(|rope| rope.table.theta()).transpose()?.flatten()
    {
        config.insert("rope_local_base_freq".into(), json!(theta));
    }
    Ok(config)
}

/// Keys of a rotary embedding: its base if it has one, else its frequencies.
fn rope_keys(rope: &Rope, config: &mut Map<String, Json>) -> Result<()> {
    let short = rope.table.frequencies()?;
    if rope.long.is_none()
        && short.factor == 1.0
        && let Some(theta) = rope.table.theta()?
    {
        config.insert("rope_theta".into(), json!(theta));
        return Ok(());
    }
    let divisors = |of: &Frequencies| -> Vec<f64> {
        let dim = 2.0 * of.radians.len() as f64;
        of.radians.iter().enumerate().map(|(pair, r)| ANY_THETA.powf(-((2 * pair) as f64) / dim) / r).collect()
    };
    config.insert("rope_theta".into(), json!(ANY_THETA));
    let scaling = match &rope.long {
        None if short.factor == 1.0 => json!({"rope_type": "factors", "factors": divisors(&short)}),
        long => {
            let (original, long) = match long {
                Some((original, long)) => (*original, long.frequencies()?),
                None => (rope.table.positions(), short.clone()),
            };
            json!({
                "rope_type": "longrope",
                "short_factor": divisors(&short),
                "long_factor": divisors(&long),
                "original_max_position_embeddings": original,
                "attention_factor": short.factor,
            })
        }
    };
    config.insert("rope_scaling".into(), scaling);
    Ok(())
}

/// Checks that a configuration agrees with the graph. `place` names its file.
///
/// # Errors
/// Returns an error naming the first key that disagrees.
pub fn check(place: &str, config: &DecoderConfig, graph: &OnnxDecoder) -> Result<()> {
    let differs = |key: &str, found: &dyn Display, expected: &dyn Display| FamilyError::Value {
        place: place.to_owned(),
        key: key.to_owned(),
        found: found.to_string(),
        expected: format!("{expected}, as the ONNX graph computes"),
    };
    let same = |key: &str, found: u64, expected: u64| match found == expected {
        true => Ok(()),
        false => Err(differs(key, &found, &expected)),
    };
    // graphs hold single precision
    let near = |key: &str, found: f64, expected: f64| match (found / expected - 1.0).abs() < 1e-6 {
        true => Ok(()),
        false => Err(differs(key, &found, &expected)),
    };
    let alike = |key: &str, found: String, expected: String| match found == expected {
        true => Ok(()),
        false => Err(differs(key, &found, &expected)),
    };
    same("hidden_size", config.hidden_size, graph.hidden_size)?;
    same("vocab_size", config.vocab_size, graph.vocab_size)?;
    same("num_hidden_layers", config.num_hidden_layers as u64, graph.layers.len() as u64)?;
    near("rms_norm_eps", config.rms_norm_eps, graph.epsilon)?;
    near("embedding_multiplier", config.embedding_multiplier, graph.embedding_multiplier)?;
    near("residual_multiplier", config.residual_multiplier, graph.residual_multiplier)?;
    near("logits_scaling", config.logits_scaling, 1.0 / graph.logits_multiplier)?;
    let norms = match graph.norms {
        decoder::OnnxNormPlacement::Pre => NormPlacement::Pre,
        decoder::OnnxNormPlacement::Post => NormPlacement::Post,
        decoder::OnnxNormPlacement::Both => NormPlacement::Both,
    };
    alike("model_type (place of norms)", format!("{:?}", config.norms), format!("{norms:?}"))?;
    // graphs with other norms and forms are refused earlier
    alike("model_type (norms)", format!("{:?}", config.norm), format!("{:?}", NormKind::RootMeanSquare))?;
    alike("model_type (form of layers)", format!("{:?}", config.form), format!("{:?}", LayerForm::Sequential))?;
    for (index, (layer, own)) in graph.layers.iter().zip(&config.layers).enumerate() {
        same("num_attention_heads", config.num_attention_heads, layer.heads)?;
        same("num_key_value_heads", config.num_key_value_heads, layer.key_value_heads)?;
        same("head_dim", config.head_dim, layer.head_dim)?;
        same("intermediate_size", config.intermediate_size, layer.intermediate_size)?;
        near("attention scale", config.attention_scale, layer.scale)?;
        let qk_norm = match layer.qk_norm {
            None => QkNorm::None,
            Some(decoder::OnnxQkNorm::PerHead) => QkNorm::PerHead,
            Some(decoder::OnnxQkNorm::PerHeadRotated) => QkNorm::PerHeadRotated,
            Some(decoder::OnnxQkNorm::WholeWidth) => QkNorm::WholeWidth,
        };
        alike("model_type (query-key norm)", format!("{:?}", config.qk_norm), format!("{qk_norm:?}"))?;
        let activation = match layer.activation {
            decoder::OnnxActivation::Silu => Activation::Silu,
            decoder::OnnxActivation::GeluTanh => Activation::GeluTanh,
            decoder::OnnxActivation::Gelu => Activation::Gelu,
        };
        alike("hidden_act", format!("{:?}", config.activation), format!("{activation:?}"))?;
        // a window as long as the longest text is no window
        let [window, own_window] =
            [layer.window, own.window].map(|window| window.filter(|window| *window < config.max_position_embeddings));
        alike(&format!("sliding_window (layer {index})"), format!("{own_window:?}"), format!("{window:?}"))?;
        let rope = layer.rope.and_then(|rope| graph.ropes.get(rope));
        alike(&format!("rope (layer {index})"), own.rope.to_string(), rope.is_some().to_string())?;
    }
    for (used, rope) in graph.ropes.iter().enumerate() {
        let Some(layer) = graph.layers.iter().position(|layer| layer.rope == Some(used)) else { continue };
        let own = config.rope_of(layer);
        same("rope_dim", own.rope_dim, rope.table.rope_dim())?;
        let at = |table: &OnnxRope, length: u64| deviation(place, own, table, length);
        match &rope.long {
            Some((limit, long)) => {
                at(&rope.table, *limit)?;
                at(long, limit.saturating_add(1))?;
            }
            None => {
                at(&rope.table, 1)?;
                at(&rope.table, config.max_position_embeddings)?;
            }
        }
    }
    Ok(())
}

/// Checks that the rotary embedding of a configuration equals a table for texts of `length` tokens.
fn deviation(place: &str, own: &RopeConfig, table: &OnnxRope, length: u64) -> Result<()> {
    let (radians, factor) = own.frequencies(length);
    let Some((position, pair, found, expected)) = table.deviation(&Frequencies { radians, factor })? else {
        return Ok(());
    };
    Err(FamilyError::Value {
        place: place.to_owned(),
        key: "rope_theta, rope_scaling".into(),
        found: format!("one that gives cos and sin {expected:?} at position {position}, pair {pair}"),
        expected: format!("{found:?}, as the ONNX graph's table has"),
    }
    .into())
}
