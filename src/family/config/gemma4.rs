//! Layers of Gemma 4 and of EmbeddingGemma 2. Layers with full attention have their own head size. In Gemma 4, their
//! values may be the output of the key projection, the last layers use the keys and values of earlier ones, and tokens
//! may have an embedding for each layer. In EmbeddingGemma 2, the embeddings for layers are projections of the token
//! embeddings.

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};

use super::keys::Keys;
use super::{LayerConfig, LayerHeads, PerLayerEmbeddingConfig};
use crate::error::FamilyError;
use crate::row::DecoderFamily;

/// Fills in the class's default RoPE: in Gemma 4, a quarter of the full-attention heads' dimensions rotates.
pub(super) fn with_defaults(config: &Map<String, Json>, family: &DecoderFamily) -> Option<Map<String, Json>> {
    let says = |key: &str| config.get(key).is_some_and(|value| !value.is_null());
    // the defaults of the row are those of EmbeddingGemma 2
    if !family.is_gemma4() || says("rope_parameters") || says("rope_scaling") || says("rope_theta") {
        return None;
    }
    let mut config = config.clone();
    let rope = json!({
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    });
    config.insert("rope_parameters".into(), rope);
    Some(config)
}

pub(super) struct Reader<'a> {
    pub(super) keys: &'a Keys<'a>,
    pub(super) family: &'a DecoderFamily,
    pub(super) num_attention_heads: u64,
    pub(super) intermediate_size: u64,
}

impl Reader<'_> {
    /// Fills in the layers apart from their windows. Returns the heads of full-attention layers and of layers with a
    /// window, which default to `plain`.
    pub(super) fn layers(
        &self,
        layers: &mut [LayerConfig],
        plain: LayerHeads,
        acknowledged: &[String],
    ) -> Result<[LayerHeads; 2], FamilyError> {
        let (keys, shares) = (self.keys, self.family.is_gemma4());
        if shares && !matches!(keys.str("use_bidirectional_attention")?, None | Some("vision")) {
            return Err(keys.value("use_bidirectional_attention", "null or \"vision\": text has causal attention"));
        }
        // the last layer has full attention, whatever its type says
        if let Some(last) = layers.last_mut() {
            last.window = None;
        }
        let value_is_key = shares && keys.bool("attention_k_eq_v")?.unwrap_or(false);
        let own = self.own_heads(layers, plain, value_is_key, acknowledged)?;
        for (layer, heads) in layers.iter_mut().zip(&own) {
            layer.heads = Some(*heads).filter(|heads| *heads != plain);
            layer.value_is_key = value_is_key && layer.window.is_none();
        }
        let of_type = |sliding: bool| {
            let mut all = layers.iter().zip(&own).filter(|(layer, _)| layer.window.is_some() == sliding);
            let first = all.next().map_or(plain, |(_, heads)| *heads);
            match all.all(|(_, heads)| heads.head_dim == first.head_dim) {
                true => Ok(first),
                false => {
                    Err(keys.value("per_layer_config", "one head_dim for all layers of a type: they rotate alike"))
                }
            }
        };
        let heads = [of_type(false)?, of_type(true)?];
        if shares {
            self.share_keys(layers, &own)?;
        }
        Ok(heads)
    }

    /// Heads of each layer.
    fn own_heads(
        &self,
        layers: &[LayerConfig],
        plain: LayerHeads,
        value_is_key: bool,
        acknowledged: &[String],
    ) -> Result<Vec<LayerHeads>, FamilyError> {
        let keys = self.keys;
        let size = |key: &str| if keys.get(key).is_some() { keys.size(key).map(Some) } else { Ok(None) };
        let head_dim = size("global_head_dim")?;
        let key_heads = match size("num_global_key_value_heads")? {
            given if self.family.is_embedding_gemma2() => Some(given.unwrap_or(1)), // the class's default
            given => given.filter(|_| value_is_key),
        };
        let mut given: BTreeMap<usize, LayerHeads> = BTreeMap::new();
        // since transformers 5.20: per-layer overrides by layer number, in as many digits as the last layer's has
        let overrides = keys.object("per_layer_config")?;
        let digits = layers.len().saturating_sub(1).to_string().len();
        for index in 0..layers.len() {
            let of_layer = |name: String| overrides.as_ref().map(|all| all.object(&name)).transpose();
            let padded = of_layer(format!("{index:0digits$}"))?.flatten();
            let Some(own) = padded.or(of_layer(index.to_string())?.flatten()) else { continue };
            let size = |key: &str, plain| if own.get(key).is_some() { own.size(key) } else { Ok(plain) };
            let heads = LayerHeads {
                num_key_value_heads: size("num_key_value_heads", plain.num_key_value_heads)?,
                head_dim: size("head_dim", plain.head_dim)?,
            };
            own.finish(self.family.name, &[], acknowledged)?;
            given.insert(index, heads);
        }
        if let Some(overrides) = &overrides {
            overrides.finish(self.family.name, &[], acknowledged)?;
        }
        let full = LayerHeads {
            num_key_value_heads: key_heads.unwrap_or(plain.num_key_value_heads),
            head_dim: head_dim.unwrap_or(512), // the class's default
        };
        let heads = |(index, layer): (usize, &LayerConfig)| match (&overrides, layer.window) {
            (Some(_), _) => given.get(&index).copied().unwrap_or(plain),
            (None, None) => full,
            (None, Some(_)) => plain,
        };
        let own: Vec<LayerHeads> = layers.iter().enumerate().map(heads).collect();
        let divides = |heads: &LayerHeads| self.num_attention_heads.is_multiple_of(heads.num_key_value_heads);
        if !own.iter().all(divides) {
            let expected = format!("a divisor of {} heads", self.num_attention_heads);
            return Err(keys.value("num_global_key_value_heads", &expected));
        }
        Ok(own)
    }

    /// Makes the last layers use the keys and values of the last earlier layer of their type.
    fn share_keys(&self, layers: &mut [LayerConfig], own: &[LayerHeads]) -> Result<(), FamilyError> {
        let keys = self.keys;
        let shared = keys.u64("num_kv_shared_layers")?.unwrap_or(0) as usize;
        let wide = keys.bool("use_double_wide_mlp")?.unwrap_or(false);
        if shared >= layers.len() {
            return Err(keys.value("num_kv_shared_layers", &format!("less than {} layers", layers.len())));
        }
        let first = layers.len() - shared;
        for index in first..layers.len() {
            let sliding = layers[index].window.is_some();
            let of = (0..first).rev().find(|of| layers[*of].window.is_some() == sliding);
            match of.filter(|of| own[*of] == own[index]) {
                Some(of) => layers[index].keys_of = Some(of),
                None => {
                    let expected = "so many that each type has a layer before them, with equal heads";
                    return Err(keys.value("num_kv_shared_layers", expected));
                }
            }
            layers[index].value_is_key = false;
            if wide {
                layers[index].intermediate_size = Some(2 * self.intermediate_size);
            }
        }
        Ok(())
    }

    /// Per-layer embeddings of tokens, if there are any.
    pub(super) fn per_layer_embedding(
        &self,
        size: &dyn Fn(&str) -> Result<u64, FamilyError>,
    ) -> Result<Option<PerLayerEmbeddingConfig>, FamilyError> {
        let keys = self.keys;
        let key = "hidden_size_per_layer_input";
        if self.family.is_embedding_gemma2() {
            return Ok(Some(PerLayerEmbeddingConfig { vocab_size: None, width: size(key)? }));
        }
        // 0 and null stand for none, but not the class's default
        let by_default = self.family.names.default_sizes.iter().any(|(name, _)| *name == key);
        let none = match keys.has(key) {
            true => keys.u64(key)?.is_none_or(|width| width == 0),
            false => !by_default,
        };
        if none {
            keys.accept("vocab_size_per_layer_input");
            return Ok(None);
        }
        let (width, vocab_size) = (size(key)?, size("vocab_size_per_layer_input")?);
        let tokens = size("vocab_size")?;
        if vocab_size < tokens {
            return Err(keys.value("vocab_size_per_layer_input", &format!("at least {tokens}, a row for each token")));
        }
        Ok(Some(PerLayerEmbeddingConfig { vocab_size: Some(vocab_size), width }))
    }
}
