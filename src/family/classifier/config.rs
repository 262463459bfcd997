//! Resolved configuration of a token classifier.

use serde::Serialize;
use serde_json::{Map, Value as Json};

use crate::config::ClampedExperts;
use crate::config::keys::Keys;
use crate::config::rope;
use crate::error::FamilyError;
use crate::rope::RopeConfig;
use crate::table::{NEUTRAL_KEYS, OPENAI_PRIVACY_FILTER};

/// A token classifier.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClassifierConfig {
    /// Width of the hidden states.
    pub hidden_size: u64,
    /// Width of an expert.
    pub intermediate_size: u64,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: u64,
    /// Number of key-value heads; divides the query heads.
    pub num_key_value_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Rows of the embedding.
    pub vocab_size: u64,
    /// Longest supported text in tokens.
    pub max_position_embeddings: u64,
    /// Epsilon of all norms.
    pub rms_norm_eps: f64,
    /// Distance in tokens that a token sees on each side.
    pub band: u64,
    /// Whether the projections of attention have biases.
    pub attention_bias: bool,
    /// Number of experts in a layer.
    pub num_experts: u64,
    /// Number of experts chosen for a token.
    pub num_experts_per_tok: u64,
    /// Limits of the experts' gates and ups.
    #[serde(flatten)]
    pub clamped: ClampedExperts,
    /// Rotary embedding of neighbouring dimensions.
    pub rope: RopeConfig,
    /// Labels by index.
    pub labels: Vec<String>,
}

impl ClassifierConfig {
    /// Reads a `config.json`. `place` names the file; `acknowledged` lists keys that the user has declared harmless.
    ///
    /// # Errors
    /// Returns an error for a key that is missing, has an impossible value, or is not understood.
    pub fn read(place: &str, config: &Map<String, Json>, acknowledged: &[String]) -> Result<Self, FamilyError> {
        let family = &OPENAI_PRIVACY_FILTER;
        let keys = Keys::new(place, "", config);
        let number = |key: &str, default: f64| Ok(keys.f64(key)?.unwrap_or(default));
        let num_attention_heads = keys.size("num_attention_heads")?;
        let num_key_value_heads = keys.size("num_key_value_heads")?;
        if num_attention_heads % num_key_value_heads != 0 {
            return Err(keys.value("num_key_value_heads", &format!("a divisor of {num_attention_heads} heads")));
        }
        let num_hidden_layers = keys.size("num_hidden_layers")?;
        if num_hidden_layers > 4096 {
            return Err(keys.value("num_hidden_layers", "at most 4096"));
        }
        let num_experts = keys.size("num_local_experts")?;
        let num_experts_per_tok = keys.size("num_experts_per_tok")?;
        if num_experts_per_tok > num_experts {
            return Err(keys.value("num_experts_per_tok", &format!("at most {num_experts} experts")));
        }
        let rms_norm_eps = number("rms_norm_eps", family.norms.eps)?;
        if !(0.0..1.0).contains(&rms_norm_eps) {
            return Err(keys.value("rms_norm_eps", "between 0 and 1"));
        }
        let head_dim = keys.size("head_dim")?;
        let max_position_embeddings = keys.size("max_position_embeddings")?;
        let read = ClassifierConfig {
            hidden_size: keys.size("hidden_size")?,
            intermediate_size: keys.size("intermediate_size")?,
            num_hidden_layers: num_hidden_layers as usize,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            vocab_size: keys.size("vocab_size")?,
            max_position_embeddings,
            rms_norm_eps,
            band: keys.size("sliding_window")?,
            attention_bias: keys.bool("attention_bias")?.unwrap_or(true),
            num_experts,
            num_experts_per_tok,
            clamped: ClampedExperts::read(&keys)?,
            rope: rope::read(&keys, family, [head_dim; 2], max_position_embeddings, acknowledged)?.0,
            labels: labels(&keys)?,
        };
        let neutral = [NEUTRAL_KEYS, family.names.neutral_keys].concat();
        keys.finish(family.name, &neutral, acknowledged)?;
        Ok(read)
    }
}

/// Maximum number of labels of a classifier.
const MAX_LABELS: u64 = 65_536;

/// Labels of `id2label`, whose indices must be contiguous from 0. If `num_labels` is another number, that is the number
/// of labels, as in transformers, and they have no names.
pub fn labels(keys: &Keys<'_>) -> Result<Vec<String>, FamilyError> {
    let map = keys.required("id2label", keys.get("id2label"))?.as_object();
    let wrong = || keys.value("id2label", "a name for each number from 0 on");
    let map = map.filter(|map| !map.is_empty()).ok_or_else(wrong)?;
    let label = |id: usize| map.get(&id.to_string()).and_then(Json::as_str).map(str::to_owned).ok_or_else(wrong);
    let labels: Vec<String> = (0..map.len()).map(label).collect::<Result<_, _>>()?;
    match keys.u64("num_labels")? {
        Some(count) if count != labels.len() as u64 => numbered_labels(keys, count),
        _ => Ok(labels),
    }
}

/// Labels without names, as transformers calls them.
pub fn numbered_labels(keys: &Keys<'_>, count: u64) -> Result<Vec<String>, FamilyError> {
    match count {
        1..=MAX_LABELS => Ok((0..count).map(|label| format!("LABEL_{label}")).collect()),
        _ => Err(keys.value("num_labels", &format!("1 to {MAX_LABELS}"))),
    }
}
