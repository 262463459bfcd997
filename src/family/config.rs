//! The configuration of a dense decoder, resolved: every default filled in, every rule applied.
//!
//! GGUF metadata is first put into the words of `config.json` ([`gguf`]); then one reader serves both.

pub mod gguf;
pub mod keys;

use serde::Serialize;
use serde_json::{Map, Value as Json};

use super::error::FamilyError;
use super::rope::{RopeConfig, RopeScaling};
use super::table::{Bias, DecoderFamily, NEUTRAL_KEYS, NormPlacement, QkNorm, WindowRule};
use keys::Keys;

/// A dense decoder.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DecoderConfig {
    /// Family.
    pub family: &'static str,
    /// Width of the hidden states.
    pub hidden_size: u64,
    /// Width of the feed-forward network.
    pub intermediate_size: u64,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: u64,
    /// Key-value heads; divides the query heads.
    pub num_key_value_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Rows of the embedding.
    pub vocab_size: u64,
    /// Longest text.
    pub max_position_embeddings: u64,
    /// Epsilon of all norms.
    pub rms_norm_eps: f64,
    /// The LM head is the embedding.
    pub tie_word_embeddings: bool,
    /// Query-key norms.
    pub qk_norm: QkNorm,
    /// Place of the norms.
    pub norms: NormPlacement,
    /// Biases on q, k and v.
    pub qkv_bias: bool,
    /// Bias on the attention's output projection.
    pub output_bias: bool,
    /// Biases in the feed-forward network.
    pub mlp_bias: bool,
    /// The source holds q, k, v in one tensor and gate, up in another.
    pub fused: bool,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// What differs from layer to layer.
    pub layers: Vec<LayerConfig>,
    /// Multiplied to the scores before softmax.
    pub attention_scale: f64,
    /// Multiplied to the embeddings.
    pub embedding_multiplier: f64,
    /// Multiplied to what a block adds to the residual stream.
    pub residual_multiplier: f64,
    /// Divides the logits.
    pub logits_scaling: f64,
}

/// What differs from layer to layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LayerConfig {
    /// Queries and keys are rotated.
    pub rope: bool,
    /// Tokens that the layer sees, the token itself included; all if absent.
    pub window: Option<u64>,
}

impl DecoderConfig {
    /// Reads a configuration in the words of `config.json`. `place` names the file; `acknowledged` lists keys that the
    /// user has declared harmless.
    ///
    /// # Errors
    /// A key that is missing, has an impossible value, or is not understood.
    pub fn read(
        place: &str,
        config: &Map<String, Json>,
        family: &'static DecoderFamily,
        acknowledged: &[String],
    ) -> Result<Self, FamilyError> {
        let keys = Keys::new(place, "", config);
        let hidden_size = keys.size("hidden_size")?;
        let num_attention_heads = keys.size("num_attention_heads")?;
        let num_key_value_heads = match keys.get("num_key_value_heads") {
            Some(_) => keys.size("num_key_value_heads")?,
            None => num_attention_heads,
        };
        if num_attention_heads % num_key_value_heads != 0 {
            return Err(keys.value("num_key_value_heads", &format!("a divisor of {num_attention_heads} heads")));
        }
        let head_dim = match keys.get("head_dim") {
            Some(_) => keys.size("head_dim")?,
            None if hidden_size % num_attention_heads == 0 => hidden_size / num_attention_heads,
            None => return Err(keys.value("hidden_size", &format!("a multiple of {num_attention_heads} heads"))),
        };
        let num_hidden_layers = keys.size("num_hidden_layers")?;
        if num_hidden_layers > 4096 {
            return Err(keys.value("num_hidden_layers", "at most 4096"));
        }
        let num_hidden_layers = num_hidden_layers as usize;
        if let Some(act) = keys.str("hidden_act")?
            && act != "silu"
            && act != "swish"
        {
            return Err(keys.value("hidden_act", "\"silu\""));
        }
        for (key, inert) in family.inert_keys {
            let value = keys.get(key).map(|v| v.as_i64().or(v.as_bool().map(i64::from)));
            if let Some(value) = value
                && value != Some(*inert)
            {
                return Err(keys.value(key, &inert.to_string()));
            }
        }
        let bias = |bias: Bias| match bias {
            Bias::Never => Ok(false),
            Bias::Always => Ok(true),
            Bias::Key(key) => Ok(keys.bool(key)?.unwrap_or(false)),
        };
        let rms_norm_eps = keys.f64("rms_norm_eps")?.unwrap_or(family.default_rms_norm_eps);
        if !(0.0..1.0).contains(&rms_norm_eps) {
            return Err(keys.value("rms_norm_eps", "between 0 and 1"));
        }
        let max_position_embeddings = keys.size("max_position_embeddings")?;
        let multiplier = |key: &str, default: f64| match family.multipliers {
            true => match keys.f64(key)? {
                Some(0.0) => Err(keys.value(key, "not 0")),
                value => Ok(value.unwrap_or(default)),
            },
            false => Ok(default),
        };
        let read = DecoderConfig {
            family: family.name,
            hidden_size,
            intermediate_size: keys.size("intermediate_size")?,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            vocab_size: keys.size("vocab_size")?,
            max_position_embeddings,
            rms_norm_eps,
            tie_word_embeddings: keys.bool("tie_word_embeddings")?.unwrap_or(family.default_tie_word_embeddings),
            qk_norm: family.qk_norm,
            norms: family.norms,
            qkv_bias: bias(family.qkv_bias)?,
            output_bias: bias(family.output_bias)?,
            mlp_bias: bias(family.mlp_bias)?,
            fused: family.fused,
            rope: rope(&keys, family, head_dim, max_position_embeddings, acknowledged)?,
            layers: layers(&keys, family, num_hidden_layers)?,
            // granite's class default is 1, every other family scales by the root of the head's width
            attention_scale: match family.multipliers {
                true => multiplier("attention_multiplier", 1.0)?,
                false => (head_dim as f64).powf(-0.5),
            },
            embedding_multiplier: multiplier("embedding_multiplier", 1.0)?,
            residual_multiplier: multiplier("residual_multiplier", 1.0)?,
            logits_scaling: multiplier("logits_scaling", 1.0)?,
        };
        keys.finish(family.name, NEUTRAL_KEYS, acknowledged)?;
        Ok(read)
    }

    /// Rows of the query projection.
    pub fn query_width(&self) -> u64 {
        self.num_attention_heads * self.head_dim
    }

    /// Rows of the key projection, and of the value projection.
    pub fn key_width(&self) -> u64 {
        self.num_key_value_heads * self.head_dim
    }
}

fn layers(keys: &Keys<'_>, family: &DecoderFamily, count: usize) -> Result<Vec<LayerConfig>, FamilyError> {
    let rotates: Vec<bool> = if family.layers_without_rope {
        let interval = keys.u64("no_rope_layer_interval")?.unwrap_or(4);
        match keys.f64s("no_rope_layers")? {
            // 1 means that the layer has RoPE, whatever the key's name says
            Some(list) if list.len() >= count => list.iter().take(count).map(|v| *v != 0.0).collect(),
            Some(_) => return Err(keys.value("no_rope_layers", &format!("one number for each of {count} layers"))),
            None if interval == 0 => return Err(keys.value("no_rope_layer_interval", "at least 1")),
            None => (0..count as u64).map(|layer| (layer + 1) % interval != 0).collect(),
        }
    } else {
        vec![true; count]
    };
    let uses_window = match family.window {
        WindowRule::None => false,
        WindowRule::Every(_) => true,
        WindowRule::FromLayer | WindowRule::WithoutRope => keys.bool("use_sliding_window")?.unwrap_or(false),
    };
    let from_layer = keys.u64("max_window_layers")?.unwrap_or(28);
    let width = match family.window {
        WindowRule::None => None,
        WindowRule::Every(default) if !keys.has("sliding_window") => default,
        _ => keys.u64("sliding_window")?.filter(|_| uses_window),
    };
    if width == Some(0) {
        return Err(keys.value("sliding_window", "at least 1, or null"));
    }
    let types = keys.strings("layer_types")?;
    if let Some(types) = &types {
        if types.len() != count {
            return Err(keys.value("layer_types", &format!("one for each of {count} layers")));
        }
        if types.iter().any(|t| !matches!(*t, "full_attention" | "sliding_attention")) {
            return Err(keys.value("layer_types", "\"full_attention\" or \"sliding_attention\""));
        }
        if width.is_none() && types.contains(&"sliding_attention") {
            return Err(keys.value("sliding_window", "a width, for the sliding layers of layer_types"));
        }
    }
    let slides = |layer: usize| match (&types, family.window) {
        (Some(types), WindowRule::FromLayer | WindowRule::WithoutRope) => types[layer] == "sliding_attention",
        (_, WindowRule::FromLayer) => layer as u64 >= from_layer,
        (_, WindowRule::WithoutRope) => !rotates[layer],
        (_, WindowRule::Every(_)) => true,
        (_, WindowRule::None) => false,
    };
    Ok((0..count).map(|layer| LayerConfig { rope: rotates[layer], window: width.filter(|_| slides(layer)) }).collect())
}

fn rope(
    keys: &Keys<'_>,
    family: &DecoderFamily,
    head_dim: u64,
    max_position_embeddings: u64,
    acknowledged: &[String],
) -> Result<RopeConfig, FamilyError> {
    // `rope_scaling` is the older spelling and wins where both are there, as in transformers
    let nested = match keys.object("rope_scaling")? {
        Some(nested) => {
            keys.accept("rope_parameters");
            Some(nested)
        }
        None => keys.object("rope_parameters")?,
    };
    let empty = Map::new();
    let scaling = nested.unwrap_or_else(|| Keys::new("", "rope_scaling.", &empty));
    let rope_theta = match (keys.f64("rope_theta")?, scaling.f64("rope_theta")?) {
        (_, Some(theta)) | (Some(theta), None) => theta,
        (None, None) => family.default_rope_theta,
    };
    if rope_theta <= 1.0 {
        return Err(keys.value("rope_theta", "more than 1"));
    }
    let partial = match family.partial_rotary {
        true => scaling.f64("partial_rotary_factor")?.or(keys.f64("partial_rotary_factor")?).unwrap_or(1.0),
        // other families' default RoPE ignores the key and scaled ones use it: refuse all but 1
        false => match scaling.f64("partial_rotary_factor")?.or(keys.f64("partial_rotary_factor")?) {
            None | Some(1.0) => 1.0,
            Some(_) => return Err(keys.value("partial_rotary_factor", "1 in this family")),
        },
    };
    let rope_dim = match keys.u64("rope_dim")? {
        Some(dim) => dim, // GGUF names the dimensions themselves
        None => (head_dim as f64 * partial) as u64,
    };
    if rope_dim == 0 || rope_dim % 2 != 0 || rope_dim > head_dim {
        return Err(keys.value("head_dim", &format!("to give an even number of rotated dimensions, not {rope_dim}")));
    }
    let half = (rope_dim / 2) as usize;
    let top_original = keys.u64("original_max_position_embeddings")?;
    let original = || -> Result<u64, FamilyError> {
        let nested = scaling.u64("original_max_position_embeddings")?;
        match top_original.or(nested).unwrap_or(max_position_embeddings) {
            0 => Err(scaling.value("original_max_position_embeddings", "at least 1")),
            n => Ok(n),
        }
    };
    let factor = || scaling.required("factor", scaling.f64("factor")?);
    let kind = scaling.str("rope_type")?.or(scaling.str("type")?).unwrap_or("default");
    let scaled = match kind {
        "default" => RopeScaling::Default,
        "linear" => RopeScaling::Linear { factor: factor()? },
        "dynamic" => {
            if rope_dim <= 2 {
                return Err(scaling.value("rope_type", "another type: dynamic needs more than two rotated dimensions"));
            }
            RopeScaling::Dynamic { factor: factor()?, max_position_embeddings }
        }
        // Phi-3's oldest configurations call LongRoPE `su` or `yarn`
        "longrope" | "su" | "yarn" if family.partial_rotary || kind != "yarn" => {
            let factors = |key: &str| -> Result<Vec<f64>, FamilyError> {
                let list = scaling.required(key, scaling.f64s(key)?)?;
                if list.len() != half || list.iter().any(|f| *f <= 0.0) {
                    return Err(scaling.value(key, &format!("{half} positive numbers, half of the rotated dimensions")));
                }
                Ok(list)
            };
            let original = original()?;
            let ratio = match scaling.f64("factor")? {
                Some(factor) => factor,
                None => max_position_embeddings as f64 / original as f64,
            };
            RopeScaling::Longrope {
                short_factor: factors("short_factor")?,
                long_factor: factors("long_factor")?,
                original_max_position_embeddings: original,
                attention_factor: scaling
                    .f64("attention_factor")?
                    .unwrap_or_else(|| RopeScaling::longrope_attention_factor(ratio, original)),
            }
        }
        "yarn" => {
            let original = original()?;
            let factor = match scaling.f64("factor")? {
                Some(factor) => factor,
                None => max_position_embeddings as f64 / original as f64,
            };
            let (mscale, all) = (scaling.f64("mscale")?, scaling.f64("mscale_all_dim")?);
            RopeScaling::Yarn {
                factor,
                original_max_position_embeddings: original,
                attention_factor: scaling
                    .f64("attention_factor")?
                    .unwrap_or_else(|| RopeScaling::yarn_attention_factor(factor, mscale, all)),
                beta_fast: scaling.f64("beta_fast")?.filter(|b| *b != 0.0).unwrap_or(32.0),
                beta_slow: scaling.f64("beta_slow")?.filter(|b| *b != 0.0).unwrap_or(1.0),
                truncate: scaling.bool("truncate")?.unwrap_or(true),
            }
        }
        "llama3" => RopeScaling::Llama3 {
            factor: factor()?,
            low_freq_factor: scaling.required("low_freq_factor", scaling.f64("low_freq_factor")?)?,
            high_freq_factor: scaling.required("high_freq_factor", scaling.f64("high_freq_factor")?)?,
            original_max_position_embeddings: original()?,
        },
        "factors" => {
            let factors = scaling.required("factors", scaling.f64s("factors")?)?;
            if factors.len() != half || factors.iter().any(|f| *f <= 0.0) {
                return Err(scaling.value("factors", &format!("{half} positive numbers")));
            }
            RopeScaling::Factors { factors: factors.iter().map(|f| *f as f32).collect() }
        }
        _ => {
            let known = "default, linear, dynamic, yarn, llama3 or longrope";
            return Err(scaling.value(if scaling.has("rope_type") { "rope_type" } else { "type" }, known));
        }
    };
    // a length that the type doesn't use is harmless
    scaling.accept("original_max_position_embeddings");
    scaling.finish(family.name, &["type", "rope_type"], acknowledged)?;
    Ok(RopeConfig { rope_theta, rope_dim, scaling: scaled })
}
