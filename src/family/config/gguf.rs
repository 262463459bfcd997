//! Conversion of GGUF metadata to the keys of `config.json`, so that one reader serves both. Keys are those of
//! llama.cpp's converter.

mod yarn;

use std::ops::Range;

use serde_json::{Map, Value as Json, json};

use crate::error::FamilyError;
use anec_base::Result;
use anec_source::gguf::{GgufArray, GgufMetadata, GgufValue};

/// Keys below `{architecture}.` and their names in `config.json`.
const NAMES: &[(&str, &str)] = &[
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("attention.layer_norm_epsilon", "rms_norm_eps"),
    ("attention.key_length", "head_dim"),
    ("attention.key_length_swa", "local_head_dim"),
    ("attention.shared_kv_layers", "num_kv_shared_layers"),
    ("embedding_length_per_layer_input", "hidden_size_per_layer_input"),
    ("attention.sliding_window", "sliding_window"),
    ("attention.sliding_window_pattern", "sliding_window_pattern"),
    ("attention.scale", "attention_multiplier"),
    ("attention.clamp_kqv", "clip_qkv"),
    ("embedding_scale", "embedding_multiplier"),
    ("residual_scale", "residual_multiplier"),
    ("logit_scale", "logits_scaling"),
    ("use_parallel_residual", "use_parallel_residual"),
    ("rope.freq_base", "rope_theta"),
    ("rope.freq_base_swa", "rope_local_base_freq"),
    ("rope.dimension_count", "rope_dim"),
    ("context_length", "max_position_embeddings"),
    ("vocab_size", "vocab_size"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("shortconv.l_cache", "conv_L_cache"),
    ("full_attention_interval", "full_attention_interval"),
    ("ssm.conv_kernel", "linear_conv_kernel_dim"),
    ("ssm.state_size", "linear_key_head_dim"),
    ("ssm.group_count", "linear_num_key_heads"),
    ("ssm.time_step_rank", "linear_num_value_heads"),
    ("ssm.inner_size", "linear_value_width"),
];

/// Architectures with experts; others may write an expert count of 0.
const WITH_EXPERTS: &[&str] = &[
    "gemma4",
    "gpt-oss",
    "granitehybrid",
    "granitemoe",
    "lfm2moe",
    "olmoe",
    "qwen2moe",
    "qwen35moe",
    "qwen3moe",
    "qwen3next",
    "qwen3vlmoe",
];

/// Keys of experts and their names in `config.json`.
const EXPERT_NAMES: &[(&str, &str)] = &[
    ("expert_count", "num_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ("leading_dense_block_count", "num_dense_layers"),
    ("expert_gating_func", "expert_gating_func"),
];

/// Architecture of EmbeddingGemma, a bidirectional Gemma.
pub const EMBEDDING_GEMMA: &str = "gemma-embedding";

/// Key below `{architecture}.` with the number of next-token layers.
const NEXT_TOKEN_LAYERS: &str = "nextn_predict_layers";

/// Keys below `{architecture}.rope.scaling.` and their names within `rope_scaling`.
const ROPE_NAMES: &[(&str, &str)] = &[
    ("type", "rope_type"),
    ("factor", "factor"),
    ("original_context_length", "original_max_position_embeddings"),
    ("attn_factor", "attention_factor"),
];

/// Keys below `{architecture}.` that don't affect the maths.
const NEUTRAL: &[&str] = &[
    "rope.scaling.finetuned",
    "expert_count",
    "expert_used_count",
    // RoPE sections for images: text has the same position in all
    "rope.dimension_sections",
    // layers that receive image features
    "n_deepstack_layers",
    // read with the tensors behind the hidden states of embedding models
    "pooling_type",
    "dense_2_feat_in",
    "dense_2_feat_out",
    "dense_3_feat_in",
    "dense_3_feat_out",
];

/// Frequency divisors, which GGUF stores as tensors.
#[derive(Clone, Debug, Default)]
pub struct FactorTensors {
    /// `rope_freqs.weight`
    pub plain: Option<Vec<f32>>,
    /// `rope_factors_short.weight`
    pub short: Option<Vec<f32>>,
    /// `rope_factors_long.weight`
    pub long: Option<Vec<f32>>,
}

/// Configuration for the metadata of an architecture. `vocab_size` is the embedding's row count; `tied` is true if
/// there is no separate LM head.
///
/// # Errors
/// Returns an error for a metadata value without a counterpart.
pub fn configuration(
    metadata: &GgufMetadata,
    architecture: &str,
    factors: &FactorTensors,
    vocab_size: u64,
    tied: bool,
) -> Result<Map<String, Json>> {
    let place = metadata.path().display().to_string();
    let prefix = format!("{architecture}.");
    let mut config = Map::new();
    let mut rope = Map::new();
    for (key, value) in metadata.iter() {
        let Some(own) = key.strip_prefix(&prefix) else { continue };
        let expert_name =
            EXPERT_NAMES.iter().find(|(gguf, _)| *gguf == own).filter(|_| WITH_EXPERTS.contains(&architecture));
        if let Some((_, name)) = expert_name.or_else(|| NAMES.iter().find(|(gguf, _)| *gguf == own)) {
            let new = json_of(value);
            let other = config.insert((*name).to_owned(), new.clone()).filter(|other| *other != new);
            if let Some(other) = other {
                let found = new.to_string();
                let expected = format!("{other}, as another key for `{name}` says");
                return Err(FamilyError::Value { place, key: key.into(), found, expected }.into());
            }
        } else if let Some((_, name)) =
            own.strip_prefix("rope.scaling.").and_then(|own| ROPE_NAMES.iter().find(|(gguf, _)| *gguf == own))
        {
            rope.insert((*name).to_owned(), json_of(value));
        } else if yarn::is_key(own) {
            // read below, when it is known whether there is YaRN
        } else if let Some(kind) = own.strip_prefix("attention.value_length").filter(|kind| ["", "_swa"].contains(kind))
        {
            let same = metadata.u64(&format!("{prefix}attention.key_length{kind}"))? == metadata.u64(key)?;
            if !same {
                let expected = format!("the same as attention.key_length{kind}");
                let found = json_of(value).to_string();
                return Err(FamilyError::Value { place, key: key.into(), found, expected }.into());
            }
        } else if own == "attention.causal" {
            causal(&place, key, architecture, metadata.bool(key)?)?;
        } else if !NEUTRAL.contains(&own) {
            // unknown keys keep their name; the reader refuses them unless the user has acknowledged them
            config.insert(key.to_owned(), json_of(value));
        }
    }
    yarn::read(metadata, architecture, &mut rope)?;
    // llama.cpp writes 0 for no window, or omits the key
    if config.get("sliding_window").is_none_or(|window| *window == json!(0)) {
        config.insert("sliding_window".into(), Json::Null);
    }
    // llama.cpp clips only to a positive limit
    if config.get("clip_qkv").is_some_and(|limit| limit.as_f64() == Some(0.0)) {
        config.insert("clip_qkv".into(), Json::Null);
    }
    // a period, or a flag for each layer
    if let Some(sliding) = config.get("sliding_window_pattern").and_then(Json::as_array) {
        let kind = |slides: &Json| if slides == &json!(true) { "sliding_attention" } else { "full_attention" };
        let kinds: Vec<&str> = sliding.iter().map(kind).collect();
        config.insert("layer_types".into(), json!(kinds));
        config.remove("sliding_window_pattern");
    }
    match architecture {
        "gemma2" | "gemma3" => gemma(&mut config),
        EMBEDDING_GEMMA => {
            gemma(&mut config);
            config.insert("use_bidirectional_attention".into(), json!(true));
        }
        "gemma4" => gemma4(&mut config, vocab_size),
        "lfm2" | "lfm2moe" => lfm2(&mut config),
        "granitehybrid" => {
            let rotates = metadata.iter().any(|(key, value)| {
                key == "granitehybrid.rope.scaling.finetuned" && matches!(value, GgufValue::Bool(true))
            });
            granite_hybrid(&mut config, rotates);
        }
        "falcon-h1" => mamba2(&mut config),
        "qwen35" | "qwen35moe" | "qwen3next" => qwen3_5(&mut config, architecture),
        // one base for both kinds of layers; files of OLMo 2 have no windows
        "olmo2" if config.get("sliding_window").is_some_and(|window| !window.is_null()) => {
            config.insert("rope_local_base_freq".into(), config.get("rope_theta").cloned().into());
        }
        // GGUF has no key for it; llama.cpp divides the weights in the first family only
        "qwen3moe" | "qwen2moe" | "olmoe" => {
            config.insert("norm_topk_prob".into(), json!(architecture == "qwen3moe"));
        }
        // a factor here, a divisor in Granite
        "command-r" | "cohere2" => {
            let scale = config.remove("logits_scaling");
            config.insert("logit_scale".into(), scale.into());
        }
        "mistral3" => mistral3(&mut config, &mut rope),
        // GGUF has no key for it: the ramp ends between dimensions
        "gpt-oss" => {
            rope.insert("truncate".into(), json!(false));
        }
        _ => {}
    }
    config.entry("vocab_size").or_insert(json!(vocab_size));
    config.insert("tie_word_embeddings".into(), json!(tied));
    if let (Some(short), Some(long)) = (&factors.short, &factors.long) {
        rope.insert("rope_type".into(), json!("longrope"));
        rope.insert("short_factor".into(), json!(short));
        rope.insert("long_factor".into(), json!(long));
    } else if let Some(factors) = &factors.plain {
        rope.insert("rope_type".into(), json!("factors"));
        rope.insert("factors".into(), json!(factors));
    }
    match rope.get("rope_type").and_then(Json::as_str) {
        // phi3 without factor tensors still has its original length
        None => rope.retain(|key, _| key == "original_max_position_embeddings"),
        Some("none") => rope.clear(),
        Some(_) => {}
    }
    config.insert("rope_scaling".into(), Json::Object(rope));
    Ok(config)
}

/// Blocks of next-token layers behind the model's `layers`.
///
/// # Errors
/// Returns an error if their number isn't an integer.
pub fn next_token_blocks(metadata: &GgufMetadata, architecture: &str, layers: usize) -> Result<Range<usize>> {
    let count = metadata.u64(&format!("{architecture}.{NEXT_TOKEN_LAYERS}"))?.unwrap_or(0);
    Ok(layers..layers.saturating_add(count as usize))
}

/// Adds keys that files of Gemma 2 and 3 omit. Queries are scaled by the head width, and in the largest models (46 and
/// 62 layers) by the hidden size over the number of heads.
fn gemma(config: &mut Map<String, Json>) {
    let number = |key: &str| config.get(key).and_then(Json::as_u64);
    let scalar = match (number("num_hidden_layers"), number("hidden_size"), number("num_attention_heads")) {
        (Some(46 | 62), Some(width), Some(heads)) if heads > 0 => Some(width / heads),
        _ => number("head_dim"),
    };
    if let Some(scalar) = scalar {
        config.insert("query_pre_attn_scalar".into(), json!(scalar));
    }
}

/// Converts keys of Gemma 4. Its files have sizes by layer, or those of full-attention layers. They rotate whole heads
/// by divisors under which most dimensions stay still.
fn gemma4(config: &mut Map<String, Json>, vocab_size: u64) {
    let full = first_full_layer(config);
    let sliding = full.map(|full| usize::from(full == 0));
    if let Some(local) = config.remove("local_head_dim") {
        let global = config.insert("head_dim".into(), local);
        config.insert("global_head_dim".into(), global.into());
    }
    // one number for all layers, or one for each
    if let Some(Json::Array(heads)) = config.get("num_key_value_heads").cloned() {
        let of = |layer: Option<usize>| layer.and_then(|layer| heads.get(layer)).cloned();
        config.insert("num_key_value_heads".into(), of(sliding).or(of(full)).into());
        config.insert("num_global_key_value_heads".into(), of(full).into());
    }
    if let Some(Json::Array(widths)) = config.get("intermediate_size").cloned() {
        let ends = widths.first().and_then(Json::as_u64).zip(widths.last().and_then(Json::as_u64));
        config.insert("use_double_wide_mlp".into(), json!(ends.is_some_and(|(first, last)| last == 2 * first)));
        config.insert("intermediate_size".into(), widths.first().cloned().into());
    }
    if !config.contains_key("hidden_size_per_layer_input") {
        config.insert("hidden_size_per_layer_input".into(), json!(0));
    }
    config.insert("vocab_size_per_layer_input".into(), json!(vocab_size));
    let experts = config.get("num_experts").and_then(Json::as_u64).unwrap_or(0);
    config.insert("enable_moe_block".into(), json!(experts > 0));
    for redundant in ["rope_dim", "gemma4.rope.dimension_count_swa"] {
        config.remove(redundant);
    }
}

/// First layer with full attention, by the types of the layers.
pub fn first_full_layer(config: &Map<String, Json>) -> Option<usize> {
    config.get("layer_types")?.as_array()?.iter().position(|kind| kind == "full_attention")
}

/// Converts keys of LFM2. Layers without key-value heads are convolutions; the feed-forward width is the actual one.
fn lfm2(config: &mut Map<String, Json>) {
    config.insert("block_auto_adjust_ff_dim".into(), json!(false));
    let Some(heads) = config.get("num_key_value_heads").and_then(Json::as_array) else { return };
    let heads: Vec<u64> = heads.iter().filter_map(Json::as_u64).collect();
    let kinds: Vec<&str> = heads.iter().map(|n| if *n > 0 { "full_attention" } else { "conv" }).collect();
    config.insert("layer_types".into(), json!(kinds));
    config.insert("num_key_value_heads".into(), json!(heads.into_iter().max()));
}

/// Shape of Mamba-2 in the keys of `config.json`.
fn mamba2(config: &mut Map<String, Json>) {
    for (gguf, own) in [
        ("linear_conv_kernel_dim", "mamba_d_conv"),
        ("linear_key_head_dim", "mamba_d_state"),
        ("linear_num_key_heads", "mamba_n_groups"),
        ("linear_num_value_heads", "mamba_n_heads"),
        ("linear_value_width", "mamba_d_ssm"),
    ] {
        if let Some(value) = config.remove(gguf) {
            config.insert(own.into(), value);
        }
    }
    config.insert("mamba_norm_before_gate".into(), json!(false));
}

/// Converts keys of Granite 4, in whose files layers without key-value heads are Mamba-2.
fn granite_hybrid(config: &mut Map<String, Json>, rotates: bool) {
    mamba2(config);
    config.remove("mamba_norm_before_gate");
    let width = config.remove("mamba_d_ssm").and_then(|width| width.as_f64());
    if let (Some(width), Some(hidden)) = (width, config.get("hidden_size").and_then(Json::as_f64)) {
        config.insert("mamba_expand".into(), json!(width / hidden));
    }
    let shared = config.remove("shared_expert_intermediate_size").or(config.get("intermediate_size").cloned());
    if let Some(shared) = shared {
        config.insert("shared_intermediate_size".into(), shared);
    }
    if rotates {
        config.insert("position_embedding_type".into(), json!("rope"));
    }
    let Some(heads) = config.get("num_key_value_heads").and_then(Json::as_array) else { return };
    let heads: Vec<u64> = heads.iter().filter_map(Json::as_u64).collect();
    let kinds: Vec<&str> = heads.iter().map(|n| if *n > 0 { "full_attention" } else { "linear_attention" }).collect();
    config.insert("layer_types".into(), json!(kinds));
    config.insert("num_key_value_heads".into(), json!(heads.into_iter().max()));
}

/// Converts keys of Ministral 3, whose files have a scale of late queries.
fn mistral3(config: &mut Map<String, Json>, rope: &mut Map<String, Json>) {
    if let Some(beta) = config.remove("mistral3.attention.temperature_scale") {
        rope.insert("llama_4_scaling_beta".into(), beta);
    }
}

/// Checks the causal flag, which some files have beside an architecture that implies it.
fn causal(place: &str, key: &str, architecture: &str, found: Option<bool>) -> Result<()> {
    let expected = architecture != EMBEDDING_GEMMA;
    match found {
        Some(found) if found != expected => {
            let expected = format!("{expected} in files of {architecture}");
            let (place, key, found) = (place.to_owned(), key.to_owned(), found.to_string());
            Err(FamilyError::Value { place, key, found, expected }.into())
        }
        _ => Ok(()),
    }
}

/// Converts keys of Qwen3.5 and Qwen3-Next, whose files have the total width of value heads and count next-token
/// layers.
fn qwen3_5(config: &mut Map<String, Json>, architecture: &str) {
    let guessing = config.remove(&format!("{architecture}.{NEXT_TOKEN_LAYERS}")).and_then(|count| count.as_u64());
    if let (Some(guessing), Some(all)) = (guessing, config.get("num_hidden_layers").and_then(Json::as_u64)) {
        config.insert("num_hidden_layers".into(), json!(all.saturating_sub(guessing)));
    }
    let width = config.remove("linear_value_width").and_then(|width| width.as_u64());
    let heads = config.get("linear_num_value_heads").and_then(Json::as_u64);
    if let (Some(width), Some(heads @ 1..)) = (width, heads) {
        config.insert("linear_value_head_dim".into(), json!(width / heads));
    }
}

/// Converts a value to JSON.
pub fn json_of(value: &GgufValue) -> Json {
    match value {
        GgufValue::U8(v) => json!(v),
        GgufValue::I8(v) => json!(v),
        GgufValue::U16(v) => json!(v),
        GgufValue::I16(v) => json!(v),
        GgufValue::U32(v) => json!(v),
        GgufValue::I32(v) => json!(v),
        GgufValue::U64(v) => json!(v),
        GgufValue::I64(v) => json!(v),
        // through text, so that 1e-6 stays 1e-6 and isn't 9.99999997e-7
        GgufValue::F32(v) => v.to_string().parse::<f64>().map_or(Json::Null, |v| json!(v)),
        GgufValue::F64(v) => json!(v),
        GgufValue::Bool(v) => json!(v),
        GgufValue::String(v) => json!(v),
        GgufValue::Array(GgufArray::I32(values)) => json!(values),
        GgufValue::Array(GgufArray::U32(values)) => json!(values),
        GgufValue::Array(GgufArray::Bool(values)) => json!(values),
        GgufValue::Array(array) => json!(format!("{} elements", GgufArray::len(array))),
    }
}
