//! Rotary embedding of a configuration, in every spelling.

use serde_json::Map;

use super::keys::Keys;
use crate::error::FamilyError;
use crate::rope::{RopeConfig, RopeScaling};
use crate::row::DecoderFamily;

/// Reads the rotary embedding, and that of layers with a window if the family has one for them. `head_dims` are the
/// head widths of both.
pub(crate) fn read(
    keys: &Keys<'_>,
    family: &DecoderFamily,
    head_dims: [u64; 2],
    max_position_embeddings: u64,
    acknowledged: &[String],
) -> Result<(RopeConfig, Option<RopeConfig>), FamilyError> {
    let reader = Reader { keys, family, max_position_embeddings, acknowledged };
    let [full_dim, local_dim] = head_dims;
    let theta = keys.f64("rope_theta")?.unwrap_or(family.rope.theta);
    let local_theta = match family.rope.local_theta {
        Some(base) => Some(keys.f64("rope_local_base_freq")?.unwrap_or(base)),
        None => None,
    };
    let parameters = keys.object("rope_parameters")?;
    if let (Some(parameters), Some(local_theta)) = (&parameters, local_theta) {
        // since transformers 5: parameters by the type of the layer
        let [full, sliding] = family.attention.layer_types;
        let tables = [(full, theta, full_dim, "rope_theta"), (sliding, local_theta, local_dim, "rope_local_base_freq")];
        let [full, local] = tables.map(|(name, theta, dim, key)| {
            let own = parameters.object(name)?;
            reader.check_theta(key, own.as_ref())?;
            reader.table(own, theta, dim)
        });
        // a RoPE type beside the layer types has no effect
        parameters.finish(family.name, &["rope_type"], acknowledged)?;
        return Ok((full?, Some(local?)));
    }
    // `rope_scaling` is the older spelling of `rope_parameters`
    if parameters.is_some() && !acknowledged.iter().any(|key| key == "rope_scaling") {
        keys.check_equal("rope_scaling", keys, "rope_parameters")?;
    }
    let scaling = keys.object("rope_scaling")?.or(parameters);
    if family.rope.scaled {
        keys.required("rope_parameters", scaling.as_ref())?;
    }
    reader.check_theta("rope_theta", scaling.as_ref())?;
    let local = local_theta.map(|theta| reader.table(None, theta, local_dim)).transpose()?;
    Ok((reader.table(scaling, theta, full_dim)?, local))
}

/// Values that the tables of a configuration share.
struct Reader<'a> {
    keys: &'a Keys<'a>,
    family: &'a DecoderFamily,
    max_position_embeddings: u64,
    acknowledged: &'a [String],
}

impl Reader<'_> {
    /// Checks that a base in the parameters is that beside them, if both are there.
    fn check_theta(&self, key: &str, parameters: Option<&Keys<'_>>) -> Result<(), FamilyError> {
        match parameters.filter(|_| !self.acknowledged.iter().any(|known| known == key)) {
            Some(parameters) => self.keys.check_equal(key, parameters, "rope_theta"),
            None => Ok(()),
        }
    }

    /// Reads the table whose scaling is in the keys `scaling`; `theta` is its default base.
    fn table(&self, scaling: Option<Keys<'_>>, theta: f64, head_dim: u64) -> Result<RopeConfig, FamilyError> {
        let &Reader { keys, family, max_position_embeddings, acknowledged } = self;
        let empty = Map::new();
        let given = scaling.is_some();
        let scaling = &scaling.unwrap_or_else(|| Keys::new("", "rope_scaling.", &empty));
        let rope_theta = scaling.f64("rope_theta")?.unwrap_or(theta);
        if rope_theta <= 1.0 {
            return Err(keys.value("rope_theta", "more than 1"));
        }
        let own_part = scaling.f64("partial_rotary_factor")?;
        // older configurations of multimodal models call their default type by another name
        if scaling.str("type")? != Some("mrope") {
            scaling.check_equal("type", scaling, "rope_type")?;
        }
        let kind = scaling.str("rope_type")?.or(scaling.str("type")?).unwrap_or("default");
        let part = self.rotated_part(kind, own_part, given)?;
        if family.attention.late_query_scale {
            // read elsewhere, or redundant
            scaling.accept("llama_4_scaling_beta");
            scaling.accept("max_position_embeddings");
        }
        if family.rope.sections {
            // text has the same position in every section
            scaling.accept("mrope_section");
            scaling.accept("mrope_interleaved");
        }
        let rope_dim = match keys.u64("rope_dim")? {
            Some(dim) => dim, // GGUF names the dimensions themselves
            None => (head_dim as f64 * part) as u64,
        };
        if rope_dim == 0 || rope_dim % 2 != 0 || rope_dim > head_dim {
            return Err(
                keys.value("head_dim", &format!("to give an even number of rotated dimensions, not {rope_dim}"))
            );
        }
        let top_original = keys.u64("original_max_position_embeddings")?;
        keys.check_equal("original_max_position_embeddings", scaling, "original_max_position_embeddings")?;
        let types = Types { keys: scaling, family, max_position_embeddings, top_original, head_dim, rope_dim };
        let rope = RopeConfig { rope_theta, rope_dim, scaling: types.read(kind, own_part)? };
        // the length is harmless if the type doesn't use it
        scaling.accept("original_max_position_embeddings");
        scaling.finish(family.name, &["type", "rope_type"], acknowledged)?;
        check(&rope, scaling, max_position_embeddings)?;
        Ok(rope)
    }

    /// Part of a head's dimensions that is rotated. `own` is the part in a table's parameters, if those are `given`.
    fn rotated_part(&self, kind: &str, own: Option<f64>, given: bool) -> Result<f64, FamilyError> {
        let &Reader { keys, family, .. } = self;
        let top = keys.f64("partial_rotary_factor")?;
        match (family.rope.partial, own.or(top)) {
            // all dimensions have their place in the table
            _ if family.is_gemma4() && kind == "proportional" => Ok(1.0),
            // with parameters by layer type, the top-level key has no effect
            (Some(default), _) if family.rope.local_theta.is_some() => {
                let factor = own.unwrap_or(if given { 1.0 } else { default });
                match top.is_some_and(|top| top != factor) {
                    true => Err(keys.value("partial_rotary_factor", &format!("{factor}, as in rope_parameters"))),
                    false => Ok(factor),
                }
            }
            (Some(default), factor) => Ok(factor.unwrap_or(default)),
            // in other families, default RoPE ignores the key and scaled RoPE uses it: accept only 1
            (None, None | Some(1.0)) => Ok(1.0),
            (None, Some(_)) => Err(keys.value("partial_rotary_factor", "1 in this family")),
        }
    }
}

/// Source of RoPE types.
struct Types<'a> {
    /// Keys of `rope_scaling` or `rope_parameters`.
    keys: &'a Keys<'a>,
    family: &'a DecoderFamily,
    max_position_embeddings: u64,
    /// Original length given outside of those keys.
    top_original: Option<u64>,
    head_dim: u64,
    rope_dim: u64,
}

impl Types<'_> {
    /// Reads the scaling of a type; `part` is its `partial_rotary_factor`.
    fn read(&self, kind: &str, part: Option<f64>) -> Result<RopeScaling, FamilyError> {
        let keys = self.keys;
        match kind {
            "default" => Ok(RopeScaling::Default),
            "linear" => Ok(RopeScaling::Linear { factor: self.factor()? }),
            "proportional" if self.family.is_gemma4() => self.proportional(part.unwrap_or(1.0)),
            "dynamic" if self.family.rope.ntk_alpha && keys.f64("alpha")?.is_some_and(|alpha| alpha != 0.0) => {
                self.ntk_alpha()
            }
            "dynamic" => self.dynamic(),
            // the oldest configurations of Phi-3 call LongRoPE `su` or `yarn`
            "longrope" | "su" => self.longrope(),
            "yarn" if keys.has("short_factor") => self.longrope(),
            "yarn" => self.yarn(),
            "llama3" => Ok(RopeScaling::Llama3 {
                factor: self.factor()?,
                low_freq_factor: keys.required("low_freq_factor", keys.f64("low_freq_factor")?)?,
                high_freq_factor: keys.required("high_freq_factor", keys.f64("high_freq_factor")?)?,
                original_max_position_embeddings: self.original()?,
            }),
            "factors" => {
                let factors = self.factors("factors")?;
                Ok(RopeScaling::Factors { factors: factors.iter().map(|f| *f as f32).collect() })
            }
            _ => {
                let known = "default, linear, dynamic, yarn, llama3 or longrope";
                Err(keys.value(if keys.has("rope_type") { "rope_type" } else { "type" }, known))
            }
        }
    }

    fn proportional(&self, part: f64) -> Result<RopeScaling, FamilyError> {
        if !(0.0..=1.0).contains(&part) {
            return Err(self.keys.value("partial_rotary_factor", "from 0 to 1"));
        }
        let rotated = (part * self.head_dim as f64 / 2.0).floor() as u64;
        let factor = if self.keys.has("factor") { self.factor()? } else { 1.0 };
        Ok(RopeScaling::Proportional { rotated, factor })
    }

    fn ntk_alpha(&self) -> Result<RopeScaling, FamilyError> {
        let alpha = self.keys.required("alpha", self.keys.f64("alpha")?)?;
        if alpha < 0.0 || self.rope_dim <= 2 {
            return Err(self.keys.value("alpha", "more than 0, with more than two rotated dimensions"));
        }
        // written beside alpha, without effect
        for key in ["factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"] {
            self.keys.accept(key);
        }
        Ok(RopeScaling::NtkAlpha { alpha })
    }

    fn dynamic(&self) -> Result<RopeScaling, FamilyError> {
        if self.rope_dim <= 2 {
            let expected = "another type: dynamic needs more than two rotated dimensions";
            return Err(self.keys.value("rope_type", expected));
        }
        let max_position_embeddings = self.max_position_embeddings;
        Ok(RopeScaling::Dynamic { factor: self.factor()?, max_position_embeddings })
    }

    fn longrope(&self) -> Result<RopeScaling, FamilyError> {
        let original = self.original()?;
        let ratio = self.factor_or_ratio(original)?;
        Ok(RopeScaling::Longrope {
            short_factor: self.factors("short_factor")?,
            long_factor: self.factors("long_factor")?,
            original_max_position_embeddings: original,
            attention_factor: self
                .keys
                .f64("attention_factor")?
                .unwrap_or_else(|| RopeScaling::longrope_attention_factor(ratio, original)),
        })
    }

    fn yarn(&self) -> Result<RopeScaling, FamilyError> {
        let keys = self.keys;
        let original = self.original()?;
        let factor = self.factor_or_ratio(original)?;
        let (mscale, all) = (keys.f64("mscale")?, keys.f64("mscale_all_dim")?);
        Ok(RopeScaling::Yarn {
            factor,
            original_max_position_embeddings: original,
            attention_factor: keys
                .f64("attention_factor")?
                .unwrap_or_else(|| RopeScaling::yarn_attention_factor(factor, mscale, all)),
            beta_fast: keys.f64("beta_fast")?.filter(|b| *b != 0.0).unwrap_or(32.0),
            beta_slow: keys.f64("beta_slow")?.filter(|b| *b != 0.0).unwrap_or(1.0),
            truncate: keys.bool("truncate")?.unwrap_or(true),
        })
    }

    fn factor(&self) -> Result<f64, FamilyError> {
        match self.keys.required("factor", self.keys.f64("factor")?)? {
            factor if factor > 0.0 => Ok(factor),
            _ => Err(self.keys.value("factor", "more than 0")),
        }
    }

    fn factor_or_ratio(&self, original: u64) -> Result<f64, FamilyError> {
        let ratio = || self.max_position_embeddings as f64 / original as f64;
        Ok(self.keys.f64("factor")?.unwrap_or_else(ratio))
    }

    /// Length of the text that the model was trained on before its extension.
    fn original(&self) -> Result<u64, FamilyError> {
        let key = "original_max_position_embeddings";
        let nested = self.keys.u64(key)?;
        match self.top_original.or(nested).unwrap_or(self.max_position_embeddings) {
            0 => Err(self.keys.value(key, "at least 1")),
            length => Ok(length),
        }
    }

    /// Reads a factor for each frequency.
    fn factors(&self, key: &str) -> Result<Vec<f64>, FamilyError> {
        let half = (self.rope_dim / 2) as usize;
        let list = self.keys.required(key, self.keys.f64s(key)?)?;
        if list.len() != half || list.iter().any(|factor| *factor <= 0.0) {
            let expected = format!("{half} positive numbers, half of the rotated dimensions");
            return Err(self.keys.value(key, &expected));
        }
        Ok(list)
    }
}

/// Checks that frequencies are positive and finite.
fn check(rope: &RopeConfig, scaling: &Keys<'_>, max_position_embeddings: u64) -> Result<(), FamilyError> {
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
    Ok(())
}
