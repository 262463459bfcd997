//! Reader of decoder configurations, for every row of the family table.

use half::f16;
use serde_json::{Map, Value as Json};

use super::experts::{ExpertsConfig, experts};
use super::keys::Keys;
use super::mixers::{cca, delta_net, short_conv};
use super::{BlockMultipliers, DecoderConfig, LayerHeads, Mamba2Config, gemma4, layers, rope};
use crate::error::FamilyError;
use crate::rope::{LateQueryScale, RopeConfig};
use crate::row::{
    Bias, Bidirectional, DecoderFamily, LayerForm, LayerFormRule, MixerKind, MixtureKind, QkNorm, QkvLayout,
    SharedExpertRule, Softcap,
};
use crate::table::NEUTRAL_KEYS;

impl DecoderConfig {
    /// Reads a configuration with the keys of `config.json`. `place` names the file; `acknowledged` lists keys that the
    /// user has declared harmless.
    ///
    /// # Errors
    /// Returns an error for a key that is missing, has an impossible value, or is not understood.
    pub fn read(
        place: &str,
        config: &Map<String, Json>,
        family: &'static DecoderFamily,
        acknowledged: &[String],
    ) -> Result<Self, FamilyError> {
        let with_defaults = gemma4::with_defaults(config, family);
        let config = with_defaults.as_ref().unwrap_or(config);
        let keys = &Keys::new(place, "", config).named(family.names.keys);
        let reader = Reader { keys, family };
        let size = |key: &str| reader.size(key);
        let hidden_size = size("hidden_size")?;
        let num_attention_heads = size("num_attention_heads")?;
        let heads = reader.heads(hidden_size, num_attention_heads)?;
        let LayerHeads { num_key_value_heads, head_dim } = heads;
        let num_hidden_layers = reader.num_layers()?;
        reader.check_activation()?;
        reader.check_inert_keys()?;
        let rms_norm_eps = reader.epsilon()?;
        let max_position_embeddings = size("max_position_embeddings")?;
        let attention_scale = reader.attention_scale(head_dim)?;
        let default_window = reader.default_size("sliding_window");
        let mut layers = layers::read(keys, family, num_hidden_layers, default_window)?;
        let experts = experts(keys, family)?;
        let intermediate_size = reader.intermediate_size(experts)?;
        let (mut heads, mut per_layer_embedding) = ([heads; 2], None);
        if family.has_gemma4_layers() {
            let reader = gemma4::Reader { keys, family, num_attention_heads, intermediate_size };
            heads = reader.layers(&mut layers, heads[0], acknowledged)?;
            per_layer_embedding = reader.per_layer_embedding(&size)?;
        }
        let head_dims = heads.map(|heads| heads.head_dim);
        let (rope, rope_local) = rope::read(keys, family, head_dims, max_position_embeddings, acknowledged)?;
        let late_query_scale = reader.late_query_scale(&rope, head_dim)?;
        reader.check_number_format(acknowledged)?;
        let read = DecoderConfig {
            family: family.name,
            hidden_size,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            vocab_size: size("vocab_size")?,
            max_position_embeddings,
            late_query_scale,
            rms_norm_eps,
            tie_word_embeddings: keys.bool("tie_word_embeddings")?.unwrap_or(family.residual.tied),
            bidirectional: match family.attention.bidirectional {
                Bidirectional::Never => false,
                Bidirectional::ByKey => keys.bool("use_bidirectional_attention")?.unwrap_or(false),
                Bidirectional::Always => true,
            },
            per_layer_embedding,
            embedding_dim: family.is_embedding_gemma2().then(|| size("embedding_dim")).transpose()?,
            qk_norm: reader.qk_norm()?,
            value_norm: family.has_gemma4_layers(),
            norms: family.norms.placement,
            qkv_bias: reader.bias(family.attention.qkv_bias)?,
            output_bias: reader.bias(family.attention.output_bias)?,
            mlp_bias: reader.bias(family.network.bias)?,
            head_bias: reader.bias(family.residual.head_bias)?,
            norm: family.norms.kind,
            form: reader.form()?,
            fused: family.attention.qkv != QkvLayout::Separate,
            fused_mlp: family.network.fused,
            plain_mlp: family.network.plain,
            sinks: family.attention.sinks,
            gated_attention: family.attention.gated,
            short_conv: short_conv(keys, family)?,
            cca: cca(keys, family, num_key_value_heads * head_dim)?,
            residual_scaling: family.residual.scaling,
            delta_net: delta_net(keys, family)?,
            mamba2: Mamba2Config::read(keys, family, hidden_size)?,
            block_multipliers: BlockMultipliers::read(keys, family)?,
            experts,
            activation: family.network.activation,
            rope,
            rope_local,
            layers,
            attention_scale,
            attention_softcap: reader.softcap("attn_logit_softcapping", family.attention.softcap)?,
            clip_qkv: reader.clip_qkv()?,
            logits_softcap: reader.softcap("final_logit_softcapping", family.residual.logits_softcap)?,
            embedding_multiplier: reader.embedding_multiplier(hidden_size)?,
            residual_multiplier: reader.multiplier("residual_multiplier")?,
            hidden_scale: family.residual.hidden_scale,
            logits_scaling: reader.logits_scaling()?,
        };
        let neutral = [NEUTRAL_KEYS, family.names.neutral_keys].concat();
        keys.finish(family.name, &neutral, acknowledged)?;
        Ok(read)
    }
}

/// Keys with the rules of a family.
struct Reader<'a> {
    keys: &'a Keys<'a>,
    family: &'static DecoderFamily,
}

impl Reader<'_> {
    fn default_size(&self, key: &str) -> Option<u64> {
        self.family.names.default_sizes.iter().find(|(name, _)| *name == key).map(|(_, size)| *size)
    }

    fn optional_size(&self, key: &str) -> Result<Option<u64>, FamilyError> {
        match self.keys.get(key) {
            Some(_) => self.keys.size(key).map(Some),
            None => Ok(self.default_size(key)),
        }
    }

    fn size(&self, key: &str) -> Result<u64, FamilyError> {
        self.keys.required(key, self.optional_size(key)?)
    }

    fn heads(&self, hidden_size: u64, num_attention_heads: u64) -> Result<LayerHeads, FamilyError> {
        let keys = self.keys;
        let num_key_value_heads = self.optional_size("num_key_value_heads")?.unwrap_or(num_attention_heads);
        if !num_attention_heads.is_multiple_of(num_key_value_heads) {
            return Err(keys.value("num_key_value_heads", &format!("a divisor of {num_attention_heads} heads")));
        }
        let head_dim = match self.optional_size("head_dim")? {
            Some(head_dim) => head_dim,
            None if hidden_size.is_multiple_of(num_attention_heads) => hidden_size / num_attention_heads,
            None => return Err(keys.value("hidden_size", &format!("a multiple of {num_attention_heads} heads"))),
        };
        Ok(LayerHeads { num_key_value_heads, head_dim })
    }

    fn num_layers(&self) -> Result<usize, FamilyError> {
        match self.size("num_hidden_layers")? {
            layers @ ..=4096 => Ok(layers as usize),
            _ => Err(self.keys.value("num_hidden_layers", "at most 4096")),
        }
    }

    fn check_activation(&self) -> Result<(), FamilyError> {
        let names = self.family.network.activation.names();
        match self.keys.str("hidden_act")? {
            Some("gelu") if self.family.network.gelu_is_tanh => Ok(()),
            Some(name) if !names.contains(&name) => Err(self.keys.value("hidden_act", &format!("\"{}\"", names[0]))),
            _ => Ok(()),
        }
    }

    /// Checks that keys without effect in the family have their harmless value.
    fn check_inert_keys(&self) -> Result<(), FamilyError> {
        for (key, inert) in self.family.names.inert_keys {
            // older configurations write 0 and 1 for false and true
            let plain = |value: &Json| value.as_bool().map_or_else(|| value.to_string(), |b| u8::from(b).to_string());
            if self.keys.get(key).is_some_and(|value| plain(value).as_str() != *inert) {
                return Err(self.keys.value(key, inert));
            }
        }
        Ok(())
    }

    fn epsilon(&self) -> Result<f64, FamilyError> {
        let epsilon = self.keys.f64("rms_norm_eps")?.unwrap_or(self.family.norms.eps);
        match (0.0..1.0).contains(&epsilon) {
            true => Ok(epsilon),
            false => Err(self.keys.value("rms_norm_eps", "between 0 and 1")),
        }
    }

    fn attention_scale(&self, head_dim: u64) -> Result<f64, FamilyError> {
        let Self { keys, family } = self;
        if family.residual.multipliers {
            return self.multiplier("attention_multiplier"); // granite's class default
        }
        if family.has_gemma4_layers() {
            return Ok(1.0);
        }
        if !family.attention.query_pre_attn_scalar {
            return Ok((head_dim as f64).powf(-0.5));
        }
        match keys.f64("query_pre_attn_scalar")?.unwrap_or(256.0) {
            scalar if scalar > 0.0 => Ok(scalar.powf(-0.5)),
            _ => Err(keys.value("query_pre_attn_scalar", "more than 0")),
        }
    }

    fn intermediate_size(&self, experts: Option<ExpertsConfig>) -> Result<u64, FamilyError> {
        match experts.filter(|_| self.family.has_only_experts()) {
            Some(experts) => Ok(experts.moe_intermediate_size), // there is no other network
            None if self.family.network.shared_expert == SharedExpertRule::Fused => {
                self.size("shared_intermediate_size")
            }
            None if self.family.network.fourfold && self.keys.get("intermediate_size").is_none() => {
                Ok(4 * self.size("hidden_size")?)
            }
            None => self.adjusted_size(self.size("intermediate_size")?),
        }
    }

    /// Width of a feed-forward network for the configured width. A nominal width is two thirds of it, times a factor,
    /// rounded up.
    fn adjusted_size(&self, given: u64) -> Result<u64, FamilyError> {
        let Self { keys, family } = self;
        if !family.network.nominal_width || !keys.bool("block_auto_adjust_ff_dim")?.unwrap_or(true) {
            if family.network.nominal_width {
                keys.accept("block_ffn_dim_multiplier");
                keys.accept("block_multiple_of");
            }
            return Ok(given);
        }
        let width = (2.0 * given as f64 / 3.0) as u64;
        // null also disables rounding
        if keys.has("block_ffn_dim_multiplier") && keys.get("block_ffn_dim_multiplier").is_none() {
            keys.accept("block_multiple_of");
            return Ok(width);
        }
        let factor = keys.f64("block_ffn_dim_multiplier")?.unwrap_or(1.0);
        let multiple = keys.u64("block_multiple_of")?.unwrap_or(256);
        if factor <= 0.0 || multiple == 0 || multiple > u64::from(u32::MAX) {
            return Err(keys.value("block_multiple_of", "a positive number, as block_ffn_dim_multiplier"));
        }
        Ok(((factor * width as f64) as u64).next_multiple_of(multiple))
    }

    /// Position-dependent scale of queries, if there is one.
    fn late_query_scale(&self, rotation: &RopeConfig, head_dim: u64) -> Result<Option<LateQueryScale>, FamilyError> {
        let Self { keys, family } = self;
        if !family.attention.late_query_scale {
            return Ok(None);
        }
        let Some(rope) = keys.object("rope_scaling")?.or(keys.object("rope_parameters")?) else { return Ok(None) };
        let Some(beta) = rope.f64("llama_4_scaling_beta")?.filter(|beta| *beta != 0.0) else { return Ok(None) };
        let from = rope.size("original_max_position_embeddings")?;
        if rotation.rope_dim != head_dim {
            let expected = format!("{}, for queries that are scaled with their rotation", rotation.rope_dim);
            return Err(keys.value("head_dim", &expected));
        }
        Ok(Some(LateQueryScale { beta, from }))
    }

    /// Checks that quantized experts are in MXFP4, whose format their tensors contain.
    fn check_number_format(&self, acknowledged: &[String]) -> Result<(), FamilyError> {
        if self.family.network.mixture != MixtureKind::Clamped {
            return Ok(());
        }
        let Some(format) = self.keys.object("quantization_config")? else { return Ok(()) };
        match format.str("quant_method")? {
            Some("mxfp4") => format.finish(self.family.name, &["dequantize", "modules_to_not_convert"], acknowledged),
            _ => Err(format.value("quant_method", "\"mxfp4\"")),
        }
    }

    fn qk_norm(&self) -> Result<QkNorm, FamilyError> {
        Ok(match self.family.attention.qk_norm_key {
            Some(key) if !self.keys.bool(key)?.unwrap_or(false) => QkNorm::None,
            _ => self.family.attention.qk_norm,
        })
    }

    fn bias(&self, rule: Bias) -> Result<bool, FamilyError> {
        match rule {
            Bias::Never => Ok(false),
            Bias::Always => Ok(true),
            Bias::Key(key) => Ok(self.keys.bool(key)?.unwrap_or(false)),
            Bias::Unless(key) => Ok(self.keys.bool(key)?.unwrap_or(true)),
        }
    }

    fn form(&self) -> Result<LayerForm, FamilyError> {
        Ok(match self.family.residual.form {
            LayerFormRule::Always(form) => form,
            LayerFormRule::Key(key, form) if self.keys.bool(key)?.unwrap_or(false) => form,
            LayerFormRule::Unless(key, form) if self.keys.bool(key)?.unwrap_or(true) => form,
            LayerFormRule::Key(..) | LayerFormRule::Unless(..) => LayerForm::Sequential,
        })
    }

    /// Soft cap of a key.
    fn softcap(&self, key: &str, rule: Softcap) -> Result<Option<f64>, FamilyError> {
        let keys = self.keys;
        match rule {
            Softcap::Never => Ok(None),
            Softcap::Key(default) if !keys.has(key) => Ok(default),
            Softcap::Key(_) => match keys.f64(key)? {
                Some(cap) if cap <= 0.0 => Err(keys.value(key, "more than 0, or null")),
                cap => Ok(cap),
            },
        }
    }

    /// Limit of queries, keys and values, if the family clips them.
    fn clip_qkv(&self) -> Result<Option<f64>, FamilyError> {
        const KEY: &str = "clip_qkv";
        if !self.family.attention.clips {
            return Ok(None);
        }
        match self.keys.f64(KEY)? {
            Some(limit) if limit <= 0.0 => Err(self.keys.value(KEY, "more than 0, or null")),
            // fp16 holds no larger values
            limit => Ok(limit.filter(|limit| *limit < f16::MAX.to_f64())),
        }
    }

    /// Factor of a key in families with multipliers; 1 by default.
    fn multiplier(&self, key: &str) -> Result<f64, FamilyError> {
        if !self.family.residual.multipliers {
            return Ok(1.0);
        }
        match self.keys.f64(key)? {
            Some(0.0) => Err(self.keys.value(key, "not 0")),
            value => Ok(value.unwrap_or(1.0)),
        }
    }

    fn embedding_multiplier(&self, hidden_size: u64) -> Result<f64, FamilyError> {
        if self.family.residual.scaled_embedding {
            return Ok((hidden_size as f64).sqrt());
        }
        if self.family.attention.mixer == MixerKind::AttentionAndMamba2 {
            return Ok(self.keys.f64("embedding_multiplier")?.unwrap_or(1.0));
        }
        self.multiplier("embedding_multiplier")
    }

    fn logits_scaling(&self) -> Result<f64, FamilyError> {
        let Some(default) = self.family.residual.logit_scale else { return self.multiplier("logits_scaling") };
        match self.keys.f64("logit_scale")?.unwrap_or(default) {
            scale if scale > 0.0 => Ok(1.0 / scale),
            _ => Err(self.keys.value("logit_scale", "more than 0")),
        }
    }
}
