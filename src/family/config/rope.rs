//! The rotary embedding of a configuration, in every spelling.

use serde_json::Map;

use super::keys::Keys;
use crate::error::FamilyError;
use crate::rope::{RopeConfig, RopeScaling};
use crate::row::DecoderFamily;

/// The rotary embedding, and that of the layers with a window where the family has another for them; `head_dims` are the
/// widths of heads in the one and the other.
pub(crate) fn read(
    keys: &Keys<'_>,
    family: &DecoderFamily,
    head_dims: [u64; 2],
    max_position_embeddings: u64,
    acknowledged: &[String],
) -> Result<(RopeConfig, Option<RopeConfig>), FamilyError> {
    let reader = Reader { keys, family, max_position_embeddings, acknowledged };
    let [full_dim, local_dim] = head_dims;
    let theta = keys.f64("rope_theta")?.unwrap_or(family.default_rope_theta);
    let local_theta = match family.local_rope {
        Some(base) => Some(keys.f64("rope_local_base_freq")?.unwrap_or(base)),
        None => None,
    };
    let parameters = keys.object("rope_parameters")?;
    if let (Some(parameters), Some(local_theta)) = (&parameters, local_theta) {
        // since transformers 5: parameters by the type of the layer
        let [full, sliding] = family.layer_types;
        let tables = [(full, theta, full_dim), (sliding, local_theta, local_dim)];
        let [full, local] = tables.map(|(name, theta, dim)| reader.table(parameters.object(name)?, theta, dim));
        // beside types of layers, the type of RoPE is that of none
        parameters.finish(family.name, &["rope_type"], acknowledged)?;
        return Ok((full?, Some(local?)));
    }
    // `rope_scaling` is the older spelling and wins where both are there, as in transformers
    let scaling = keys.object("rope_scaling")?.or(parameters);
    if family.scaled_rope {
        keys.required("rope_parameters", scaling.as_ref())?;
    }
    let local = local_theta.map(|theta| reader.table(None, theta, local_dim)).transpose()?;
    Ok((reader.table(scaling, theta, full_dim)?, local))
}

/// What the tables of a configuration share.
struct Reader<'a> {
    keys: &'a Keys<'a>,
    family: &'a DecoderFamily,
    max_position_embeddings: u64,
    acknowledged: &'a [String],
}

impl Reader<'_> {
    /// The table whose scaling the keys `scaling` tell; `theta` is its base unless they say otherwise.
    fn table(&self, scaling: Option<Keys<'_>>, theta: f64, head_dim: u64) -> Result<RopeConfig, FamilyError> {
        let &Reader { keys, family, max_position_embeddings, acknowledged } = self;
        let empty = Map::new();
        let given = scaling.is_some();
        let scaling = scaling.unwrap_or_else(|| Keys::new("", "rope_scaling.", &empty));
        let rope_theta = scaling.f64("rope_theta")?.unwrap_or(theta);
        if rope_theta <= 1.0 {
            return Err(keys.value("rope_theta", "more than 1"));
        }
        let own_factor = scaling.f64("partial_rotary_factor")?;
        let top_factor = keys.f64("partial_rotary_factor")?;
        let kind = scaling.str("rope_type")?.or(scaling.str("type")?).unwrap_or("default");
        let partial = match (family.partial_rotary, own_factor.or(top_factor)) {
            // all dimensions have their place in the table
            _ if family.gemma4_layers && kind == "proportional" => 1.0,
            // parameters by the type of the layer: what stands beside them has no effect
            (Some(default), _) if family.local_rope.is_some() => {
                let factor = own_factor.unwrap_or(if given { 1.0 } else { default });
                if top_factor.is_some_and(|top| top != factor) {
                    return Err(keys.value("partial_rotary_factor", &format!("{factor}, as in rope_parameters")));
                }
                factor
            }
            (Some(default), factor) => factor.unwrap_or(default),
            // other families' default RoPE ignores the key and scaled ones use it: refuse all but 1
            (None, None | Some(1.0)) => 1.0,
            (None, Some(_)) => return Err(keys.value("partial_rotary_factor", "1 in this family")),
        };
        if family.late_query_scale {
            // what is read elsewhere, and what is said twice
            scaling.accept("llama_4_scaling_beta");
            scaling.accept("max_position_embeddings");
        }
        if family.mrope {
            // text has the same position in every section
            scaling.accept("mrope_section");
            scaling.accept("mrope_interleaved");
        }
        let rope_dim = match keys.u64("rope_dim")? {
            Some(dim) => dim, // GGUF names the dimensions themselves
            None => (head_dim as f64 * partial) as u64,
        };
        if rope_dim == 0 || rope_dim % 2 != 0 || rope_dim > head_dim {
            return Err(
                keys.value("head_dim", &format!("to give an even number of rotated dimensions, not {rope_dim}"))
            );
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
        let factor = || match scaling.required("factor", scaling.f64("factor")?)? {
            factor if factor > 0.0 => Ok(factor),
            _ => Err(scaling.value("factor", "more than 0")),
        };
        let scaled = match kind {
            "default" => RopeScaling::Default,
            "linear" => RopeScaling::Linear { factor: factor()? },
            "proportional" if family.gemma4_layers => {
                let part = own_factor.unwrap_or(1.0);
                if !(0.0..=1.0).contains(&part) {
                    return Err(scaling.value("partial_rotary_factor", "from 0 to 1"));
                }
                let rotated = (part * head_dim as f64 / 2.0).floor() as u64;
                let factor = if scaling.has("factor") { factor()? } else { 1.0 };
                RopeScaling::Proportional { rotated, factor }
            }
            "dynamic" if family.ntk_alpha && scaling.f64("alpha")?.is_some_and(|alpha| alpha != 0.0) => {
                let alpha = scaling.required("alpha", scaling.f64("alpha")?)?;
                if alpha < 0.0 || rope_dim <= 2 {
                    return Err(scaling.value("alpha", "more than 0, with more than two rotated dimensions"));
                }
                // written beside alpha, without effect
                for key in ["factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"] {
                    scaling.accept(key);
                }
                RopeScaling::NtkAlpha { alpha }
            }
            "dynamic" => {
                if rope_dim <= 2 {
                    return Err(
                        scaling.value("rope_type", "another type: dynamic needs more than two rotated dimensions")
                    );
                }
                RopeScaling::Dynamic { factor: factor()?, max_position_embeddings }
            }
            // Phi-3's oldest configurations call LongRoPE `su` or `yarn`
            "longrope" | "su" | "yarn" if kind != "yarn" || scaling.has("short_factor") => {
                let factors = |key: &str| -> Result<Vec<f64>, FamilyError> {
                    let list = scaling.required(key, scaling.f64s(key)?)?;
                    if list.len() != half || list.iter().any(|f| *f <= 0.0) {
                        return Err(
                            scaling.value(key, &format!("{half} positive numbers, half of the rotated dimensions"))
                        );
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
        let rope = RopeConfig { rope_theta, rope_dim, scaling: scaled };
        let (frequencies, attention_factor) = rope.frequencies(max_position_embeddings);
        let sound = |number: &f64| number.is_finite() && *number > 0.0;
        let still = match &rope.scaling {
            RopeScaling::Proportional { rotated, .. } => *rotated as usize,
            _ => frequencies.len(),
        };
        if !frequencies[..still].iter().all(sound) {
            return Err(scaling.value("factor", "numbers that give positive frequencies"));
        }
        if !sound(&attention_factor) {
            return Err(scaling.value("attention_factor", "a positive number"));
        }
        Ok(rope)
    }
}
