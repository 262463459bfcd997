//! The tensors of the models that built-in manifests are for: which their published checkpoints have, of which shape. They
//! are enough to plan a conversion without the weights.
//!
//! The list is written from the checkpoints and shares nothing with what a family looks for, so that the tests of the
//! built-in manifests hold one against the other.

use super::error::FamilyError;
use anec_base::Result;
use anec_manifest::builtin::Builtin;
use anec_source::{Source, SourceDtype, SourceTensor};
use serde_json::Value as Json;

/// Names and shapes of tensors.
type Shapes = Vec<(String, Vec<u64>)>;

/// The source that a built-in manifest names, without its weights: the published configuration, and tensors that have a
/// shape and nothing to read.
///
/// # Errors
/// As [`configuration`] and [`shapes`]; a test tries every built-in manifest.
pub fn published(builtin: &Builtin) -> Result<Source> {
    let config = configuration(builtin)?;
    let tensor = |(name, shape): (String, Vec<u64>)| {
        // numbers in MXFP4 are stored as bytes
        let bytes = name.ends_with("_blocks") || name.ends_with("_scales");
        SourceTensor::shape_only(&name, if bytes { SourceDtype::U8 } else { SourceDtype::BF16 }, &shape)
    };
    let tensors = shapes(&config)?.into_iter().map(tensor).collect::<anec_source::Result<_>>()?;
    Ok(Source::shapes(builtin.source(), config, tensors)?)
}

/// The published `config.json` of the model that a built-in manifest is for.
///
/// # Errors
/// When it is no JSON.
pub fn configuration(builtin: &Builtin) -> Result<Json> {
    let problem = |error: serde_json::Error| FamilyError::Value {
        place: PLACE.into(),
        key: builtin.name.into(),
        found: error.to_string(),
        expected: "JSON".into(),
    };
    Ok(serde_json::from_str(builtin.config).map_err(problem)?)
}

/// Names and shapes of a model's tensors, as its Hugging Face checkpoint has them.
///
/// # Errors
/// When the configuration lacks a key that the published ones of its family have.
pub fn shapes(config: &Json) -> Result<Vec<(String, Vec<u64>)>> {
    match config["model_type"].as_str() {
        Some("openai_privacy_filter") => of_privacy_filter(config),
        Some("bert" | "roberta" | "xlm-roberta") => of_bert(config),
        Some("modernbert") => of_modernbert(config),
        _ => of_decoder(config),
    }
}

/// What errors call a configuration that is built in.
const PLACE: &str = "the published configuration";

fn missing(key: &str) -> FamilyError {
    FamilyError::MissingKey { place: PLACE.into(), key: key.into() }
}

fn number(config: &Json, key: &str) -> Result<u64, FamilyError> {
    config[key].as_u64().ok_or_else(|| missing(key))
}

fn of_privacy_filter(config: &Json) -> Result<Shapes> {
    let number = |key: &str| number(config, key);
    let (hidden, width, experts) = (number("hidden_size")?, number("intermediate_size")?, number("num_local_experts")?);
    let (heads, key_heads, head_dim) =
        (number("num_attention_heads")?, number("num_key_value_heads")?, number("head_dim")?);
    let labels = config["id2label"].as_object().ok_or_else(|| missing("id2label"))?.len() as u64;
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![number("vocab_size")?, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
        ("score.weight".to_owned(), vec![labels, hidden]),
        ("score.bias".to_owned(), vec![labels]),
    ];
    for layer in 0..number("num_hidden_layers")? {
        let mut add = |name: &str, shape: &[u64]| shapes.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
        add("input_layernorm.weight", &[hidden]);
        add("post_attention_layernorm.weight", &[hidden]);
        let (queries, keys) = (heads * head_dim, key_heads * head_dim);
        for (name, rows, columns) in
            [("q", queries, hidden), ("k", keys, hidden), ("v", keys, hidden), ("o", hidden, queries)]
        {
            add(&format!("self_attn.{name}_proj.weight"), &[rows, columns]);
            add(&format!("self_attn.{name}_proj.bias"), &[rows]);
        }
        add("self_attn.sinks", &[heads]);
        add("mlp.router.weight", &[experts, hidden]);
        add("mlp.router.bias", &[experts]);
        add("mlp.experts.gate_up_proj", &[experts, hidden, 2 * width]);
        add("mlp.experts.gate_up_proj_bias", &[experts, 2 * width]);
        add("mlp.experts.down_proj", &[experts, width, hidden]);
        add("mlp.experts.down_proj_bias", &[experts, hidden]);
    }
    Ok(shapes)
}

fn of_bert(config: &Json) -> Result<Shapes> {
    let number = |key: &str| number(config, key);
    let (hidden, width) = (number("hidden_size")?, number("intermediate_size")?);
    let mut shapes = Vec::new();
    for (name, rows) in
        [("word", "vocab_size"), ("position", "max_position_embeddings"), ("token_type", "type_vocab_size")]
    {
        shapes.push((format!("embeddings.{name}_embeddings.weight"), vec![number(rows)?, hidden]));
    }
    let mut with_bias = |name: String, shape: &[u64]| {
        shapes.push((format!("{name}.weight"), shape.to_vec()));
        shapes.push((format!("{name}.bias"), shape[..1].to_vec()));
    };
    with_bias("embeddings.LayerNorm".into(), &[hidden]);
    for layer in 0..number("num_hidden_layers")? {
        for (name, shape) in [
            ("attention.self.query", &[hidden, hidden][..]),
            ("attention.self.key", &[hidden, hidden]),
            ("attention.self.value", &[hidden, hidden]),
            ("attention.output.dense", &[hidden, hidden]),
            ("attention.output.LayerNorm", &[hidden]),
            ("intermediate.dense", &[width, hidden]),
            ("output.dense", &[hidden, width]),
            ("output.LayerNorm", &[hidden]),
        ] {
            with_bias(format!("encoder.layer.{layer}.{name}"), shape);
        }
    }
    Ok(shapes)
}

fn of_modernbert(config: &Json) -> Result<Shapes> {
    let number = |key: &str| number(config, key);
    let (hidden, width) = (number("hidden_size")?, number("intermediate_size")?);
    let mut shapes = vec![
        ("embeddings.tok_embeddings.weight".to_owned(), vec![number("vocab_size")?, hidden]),
        ("embeddings.norm.weight".to_owned(), vec![hidden]),
        ("final_norm.weight".to_owned(), vec![hidden]),
    ];
    for layer in 0..number("num_hidden_layers")? {
        let mut add =
            |name: &str, shape: &[u64]| shapes.push((format!("layers.{layer}.{name}.weight"), shape.to_vec()));
        if layer > 0 {
            add("attn_norm", &[hidden]);
        }
        add("attn.Wqkv", &[3 * hidden, hidden]);
        add("attn.Wo", &[hidden, hidden]);
        add("mlp_norm", &[hidden]);
        add("mlp.Wi", &[2 * width, hidden]);
        add("mlp.Wo", &[hidden, width]);
    }
    Ok(shapes)
}

fn of_decoder(config: &Json) -> Result<Shapes> {
    // the text part of a multimodal model leaves out what its class has as the default
    let (prefix, config) = match config.get("text_config") {
        Some(text) if matches!(text["model_type"].as_str(), Some("gemma3_text" | "ministral3" | "mistral")) => {
            ("language_model.model.", text)
        }
        Some(text) => ("model.language_model.", text),
        None if config["model_type"] == "gpt_neox" => ("gpt_neox.", config),
        None => ("model.", config),
    };
    let family = config["model_type"].as_str().ok_or_else(|| missing("model_type"))?;
    let default = |key: &str| match (family, key) {
        ("gemma3_text", "num_attention_heads") => Some(8),
        ("gemma3_text", "num_key_value_heads") => Some(4),
        ("gemma3_text", "head_dim") => Some(256),
        ("gemma3_text", "vocab_size") => Some(262_208),
        _ => None,
    };
    let number = |key: &str| default(key).filter(|_| config[key].is_null()).map_or_else(|| number(config, key), Ok);
    let (hidden, vocab) = (number("hidden_size")?, number("vocab_size")?);
    let lfm2 = family.starts_with("lfm2");
    let width = match family {
        "zaya" | "qwen3_5_moe_text" => 0,
        "lfm2" => (number("block_ff_dim")? * 2 / 3).next_multiple_of(number("block_multiple_of")?),
        _ => number("intermediate_size")?,
    };
    let heads = number("num_attention_heads")?;
    let key_heads = if family == "gpt_neox" { heads } else { number("num_key_value_heads")? };
    let head_dim = match family {
        "gemma2" | "gemma3_text" => number("head_dim")?,
        _ => config["head_dim"].as_u64().or(hidden.checked_div(heads)).unwrap_or(0),
    };
    let embedding = if family == "gpt_neox" { "embed_in" } else { "embed_tokens" };
    let final_norm = match family {
        "gpt_neox" => "final_layer_norm",
        "falcon_h1" | "phi" => "final_layernorm",
        _ if lfm2 => "embedding_norm",
        _ => "norm",
    };
    let mut shapes = vec![
        (format!("{prefix}{embedding}.weight"), vec![vocab, hidden]),
        (format!("{prefix}{final_norm}.weight"), vec![hidden]),
    ];
    // norms with biases
    let centred = matches!(family, "starcoder2" | "phi" | "gpt_neox" | "stablelm");
    if centred {
        shapes.push((format!("{prefix}{final_norm}.bias"), vec![hidden]));
    }
    if family == "zaya" {
        shapes.push(("model.input_hidden_states_bias".to_owned(), vec![hidden]));
        shapes.push(("model.input_hidden_states_scale".to_owned(), vec![hidden]));
    }
    match (family, prefix) {
        ("gpt_neox", _) => shapes.push(("embed_out.weight".to_owned(), vec![vocab, hidden])),
        ("mistral", "language_model.model.") => {
            shapes.push(("language_model.lm_head.weight".to_owned(), vec![vocab, hidden]));
        }
        _ if config["tie_word_embeddings"] == false || family == "qwen3_vl_moe_text" => {
            shapes.push(("lm_head.weight".to_owned(), vec![vocab, hidden]));
        }
        _ => {}
    }
    if family == "phi" {
        shapes.push(("lm_head.bias".to_owned(), vec![vocab]));
    }
    // a layer that guesses the token after the next
    let predicts = family == "qwen3_next" || config["mtp_num_hidden_layers"].as_u64().is_some_and(|layers| layers > 0);
    if predicts {
        shapes.push(("mtp.fc.weight".to_owned(), vec![hidden, 2 * hidden]));
        for name in ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"] {
            shapes.push((format!("mtp.{name}.weight"), vec![hidden]));
        }
    }
    if family == "gemma4_text" && number("hidden_size_per_layer_input")? > 0 {
        let columns = number("num_hidden_layers")? * number("hidden_size_per_layer_input")?;
        shapes.push((format!("{prefix}embed_tokens_per_layer.weight"), vec![vocab, columns]));
        shapes.push((format!("{prefix}per_layer_model_projection.weight"), vec![columns, hidden]));
        let width = vec![number("hidden_size_per_layer_input")?];
        shapes.push((format!("{prefix}per_layer_projection_norm.weight"), width));
    }
    let own = (0..number("num_hidden_layers")?).map(|layer| (prefix, layer));
    for (prefix, layer) in own.chain(predicts.then_some(("mtp.", 0))) {
        let named = match prefix {
            "mtp." => Some("full_attention"),
            _ => config["layer_types"][layer as usize].as_str(),
        };
        let kind = match config["full_attention_interval"].as_u64() {
            Some(interval) if named.is_none() && (layer + 1) % interval != 0 => Some("linear_attention"),
            _ => named,
        };
        let wide_heads = family == "gemma4_text" && kind == Some("full_attention");
        let head_dim = if wide_heads { number("global_head_dim")? } else { head_dim };
        let is_key = wide_heads && config["attention_k_eq_v"] == true;
        let key_heads = if is_key { number("num_global_key_value_heads")? } else { key_heads };
        let (queries, keys) = (heads * head_dim, key_heads * head_dim);
        let shared = family == "gemma4_text" && layer + number("num_kv_shared_layers")? >= number("num_hidden_layers")?;
        let width = if shared && config["use_double_wide_mlp"] == true { 2 * width } else { width };
        let mut add =
            |name: &str, shape: &[u64]| shapes.push((format!("{prefix}layers.{layer}.{name}"), shape.to_vec()));
        // Mamba-2 alone, or beside attention
        let mamba = kind == Some("mamba") || family == "falcon_h1";
        if mamba {
            let heads = number("mamba_n_heads")?;
            let width = heads * number("mamba_d_head")?;
            let mixed = width + 2 * number("mamba_n_groups")? * number("mamba_d_state")?;
            add("mamba.in_proj.weight", &[width + mixed + heads, hidden]);
            add("mamba.conv1d.weight", &[mixed, 1, number("mamba_d_conv")?]);
            add("mamba.conv1d.bias", &[mixed]);
            for name in ["A_log", "D", "dt_bias"] {
                add(&format!("mamba.{name}"), &[heads]);
            }
            if config["mamba_rms_norm"] != false {
                add("mamba.norm.weight", &[width]);
            }
            add("mamba.out_proj.weight", &[hidden, width]);
        }
        if kind == Some("mamba") {
            // nothing beside it
        } else if family == "gemma4_text" {
            let inner = number("hidden_size_per_layer_input")?;
            add("self_attn.q_proj.weight", &[queries, hidden]);
            add("self_attn.q_norm.weight", &[head_dim]);
            if !shared {
                add("self_attn.k_proj.weight", &[keys, hidden]);
                add("self_attn.k_norm.weight", &[head_dim]);
            }
            if !shared && !is_key {
                add("self_attn.v_proj.weight", &[keys, hidden]);
            }
            add("self_attn.o_proj.weight", &[hidden, queries]);
            if inner > 0 {
                add("per_layer_input_gate.weight", &[inner, hidden]);
                add("per_layer_projection.weight", &[hidden, inner]);
                add("post_per_layer_input_norm.weight", &[hidden]);
            }
            add("layer_scalar", &[1]);
            if let Some(experts) = config["num_experts"].as_u64() {
                let width = number("moe_intermediate_size")?;
                add("router.proj.weight", &[experts, hidden]);
                add("router.scale", &[hidden]);
                add("router.per_expert_scale", &[experts]);
                add("experts.gate_up_proj", &[experts, 2 * width, hidden]);
                add("experts.down_proj", &[experts, hidden, width]);
                for name in
                    ["post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"]
                {
                    add(&format!("{name}.weight"), &[hidden]);
                }
            }
        } else if kind == Some("conv") {
            add("conv.in_proj.weight", &[3 * hidden, hidden]);
            add("conv.conv.weight", &[hidden, 1, number("conv_L_cache")?]);
            add("conv.out_proj.weight", &[hidden, hidden]);
        } else if kind == Some("linear_attention") {
            let heads = number("linear_num_value_heads")?;
            let values = heads * number("linear_value_head_dim")?;
            let mixed = 2 * number("linear_num_key_heads")? * number("linear_key_head_dim")? + values;
            if family == "qwen3_next" {
                add("linear_attn.in_proj_qkvz.weight", &[mixed + values, hidden]);
                add("linear_attn.in_proj_ba.weight", &[2 * heads, hidden]);
            } else {
                add("linear_attn.in_proj_qkv.weight", &[mixed, hidden]);
                add("linear_attn.in_proj_z.weight", &[values, hidden]);
                add("linear_attn.in_proj_b.weight", &[heads, hidden]);
                add("linear_attn.in_proj_a.weight", &[heads, hidden]);
            }
            add("linear_attn.conv1d.weight", &[mixed, 1, number("linear_conv_kernel_dim")?]);
            add("linear_attn.A_log", &[heads]);
            add("linear_attn.dt_bias", &[heads]);
            add("linear_attn.norm.weight", &[number("linear_value_head_dim")?]);
            add("linear_attn.out_proj.weight", &[hidden, values]);
        } else if family == "zaya" {
            let qkv = "self_attn.qkv_proj";
            add(&format!("{qkv}.q_proj.weight"), &[queries, hidden]);
            add(&format!("{qkv}.k_proj.weight"), &[keys, hidden]);
            add(&format!("{qkv}.v_proj_current.weight"), &[keys / 2, hidden]);
            add(&format!("{qkv}.v_proj_delayed.weight"), &[keys / 2, hidden]);
            for (name, group, kernel) in [("depthwise", 1, "cca_time0"), ("grouped", head_dim, "cca_time1")] {
                add(&format!("{qkv}.conv_qk_{name}.weight"), &[queries + keys, group, number(kernel)?]);
                add(&format!("{qkv}.conv_qk_{name}.bias"), &[queries + keys]);
            }
            add("self_attn.qk_norm.temp", &[key_heads]);
            add("self_attn.o_proj.weight", &[hidden, queries]);
            for sum in ["post_attention_residual_scale", "post_mlp_residual_scale"] {
                for part in ["hidden_states_bias", "hidden_states_scale", "residual_bias", "residual_scale"] {
                    add(&format!("{sum}.{part}"), &[hidden]);
                }
            }
        } else {
            if family == "gpt_neox" {
                add("attention.query_key_value.weight", &[3 * hidden, hidden]);
                add("attention.query_key_value.bias", &[3 * hidden]);
            } else if family == "phi3" {
                add("self_attn.qkv_proj.weight", &[queries + 2 * keys, hidden]);
            } else {
                let gates = if matches!(family, "qwen3_5_text" | "qwen3_5_moe_text" | "qwen3_next") { 2 } else { 1 };
                for (name, rows) in [("q", gates * queries), ("k", keys), ("v", keys)] {
                    add(&format!("self_attn.{name}_proj.weight"), &[rows, hidden]);
                    if matches!(family, "qwen2" | "qwen2_moe" | "gpt_oss" | "glm4" | "starcoder2" | "phi" | "stablelm")
                    {
                        add(&format!("self_attn.{name}_proj.bias"), &[rows]);
                    }
                }
            }
            let qk_norms: &[&str] = match family {
                "qwen3" | "qwen3_moe" | "qwen3_vl_text" | "qwen3_vl_moe_text" | "exaone4" | "gemma3_text"
                | "qwen3_5_text" | "qwen3_5_moe_text" | "qwen3_next" => &["q_norm", "k_norm"],
                "hunyuan_v1_dense" => &["query_layernorm", "key_layernorm"],
                "lfm2" | "lfm2_moe" => &["q_layernorm", "k_layernorm"],
                _ => &[],
            };
            if matches!(family, "olmo3" | "olmoe") {
                add("self_attn.q_norm.weight", &[queries]);
                add("self_attn.k_norm.weight", &[keys]);
            }
            for name in qk_norms {
                add(&format!("self_attn.{name}.weight"), &[head_dim]);
            }
            let output = match family {
                "gpt_neox" => "attention.dense",
                "phi" => "self_attn.dense",
                _ if lfm2 => "self_attn.out_proj",
                _ => "self_attn.o_proj",
            };
            add(&format!("{output}.weight"), &[hidden, queries]);
            if matches!(family, "gpt_oss" | "starcoder2" | "gpt_neox" | "phi") {
                add(&format!("{output}.bias"), &[hidden]);
            }
            if family == "gpt_oss" {
                add("self_attn.sinks", &[heads]);
            }
        }
        if matches!(family, "phi3" | "glm4") {
            add("mlp.gate_up_proj.weight", &[2 * width, hidden]);
            add("mlp.down_proj.weight", &[hidden, width]);
        } else if family == "zaya" {
            let (experts, width, router) =
                (number("num_experts")?, number("moe_intermediate_size")?, "mlp.gate.router_mlp");
            let state = number("router_hidden_size")?;
            add("mlp.gate.down_proj.weight", &[state, hidden]);
            add("mlp.gate.down_proj.bias", &[state]);
            if layer > 0 {
                add("mlp.gate.router_states_scale", &[state]);
            }
            for name in ["fc1", "fc2"] {
                add(&format!("{router}.{name}.weight"), &[state, state]);
                add(&format!("{router}.{name}.bias"), &[state]);
            }
            add(&format!("{router}.norm.weight"), &[state]);
            add(&format!("{router}.out_proj.weight"), &[experts + 1, state]);
            add("mlp.gate.balancing_biases", &[experts + 1]);
            add("mlp.experts.gate_up_proj", &[experts, 2 * width, hidden]);
            add("mlp.experts.down_proj", &[experts, hidden, width]);
        } else if matches!(family, "starcoder2" | "phi" | "gpt_neox") {
            let [up, down] = match family {
                "phi" => ["fc1", "fc2"],
                "gpt_neox" => ["dense_h_to_4h", "dense_4h_to_h"],
                _ => ["c_fc", "c_proj"],
            };
            for (name, rows, columns) in [(up, width, hidden), (down, hidden, width)] {
                add(&format!("mlp.{name}.weight"), &[rows, columns]);
                add(&format!("mlp.{name}.bias"), &[rows]);
            }
        } else if family == "granitemoe" {
            let experts = number("num_local_experts")?;
            add("block_sparse_moe.router.layer.weight", &[experts, hidden]);
            add("block_sparse_moe.input_linear.weight", &[experts, 2 * width, hidden]);
            add("block_sparse_moe.output_linear.weight", &[experts, hidden, width]);
        } else if family == "granitemoehybrid" {
            let (experts, shared) = (number("num_local_experts")?, number("shared_intermediate_size")?);
            if experts > 0 {
                add("block_sparse_moe.router.layer.weight", &[experts, hidden]);
                add("block_sparse_moe.input_linear.weight", &[experts, 2 * width, hidden]);
                add("block_sparse_moe.output_linear.weight", &[experts, hidden, width]);
            }
            add("shared_mlp.input_linear.weight", &[2 * shared, hidden]);
            add("shared_mlp.output_linear.weight", &[hidden, shared]);
        } else if family == "gpt_oss" {
            let (experts, block) = (number("num_local_experts")?, 32);
            add("mlp.router.weight", &[experts, hidden]);
            add("mlp.router.bias", &[experts]);
            for (name, rows, columns) in [("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)] {
                add(&format!("mlp.experts.{name}_blocks"), &[experts, rows, columns / block, block / 2]);
                add(&format!("mlp.experts.{name}_scales"), &[experts, rows, columns / block]);
                add(&format!("mlp.experts.{name}_bias"), &[experts, rows]);
            }
        } else if family == "qwen3_vl_moe_text" {
            // on their side
            let (experts, width) = (number("num_experts")?, number("moe_intermediate_size")?);
            add("mlp.gate.weight", &[experts, hidden]);
            add("mlp.experts.gate_up_proj", &[experts, hidden, 2 * width]);
            add("mlp.experts.down_proj", &[experts, width, hidden]);
        } else if family == "qwen3_5_moe_text" {
            let (experts, width) = (number("num_experts")?, number("moe_intermediate_size")?);
            add("mlp.gate.weight", &[experts, hidden]);
            add("mlp.experts.gate_up_proj", &[experts, 2 * width, hidden]);
            add("mlp.experts.down_proj", &[experts, hidden, width]);
        } else if matches!(family, "qwen2_moe" | "qwen3_moe" | "qwen3_next" | "olmoe") {
            let (experts, width) = (number("num_experts")?, config["moe_intermediate_size"].as_u64().unwrap_or(width));
            add("mlp.gate.weight", &[experts, hidden]);
            for expert in 0..experts {
                for (name, rows, columns) in [("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)] {
                    add(&format!("mlp.experts.{expert}.{name}_proj.weight"), &[rows, columns]);
                }
            }
        } else if family == "lfm2_moe" && layer >= number("num_dense_layers")? {
            let (experts, width) = (number("num_experts")?, number("moe_intermediate_size")?);
            add("feed_forward.gate.weight", &[experts, hidden]);
            add("feed_forward.expert_bias", &[experts]);
            for expert in 0..experts {
                add(&format!("feed_forward.experts.{expert}.w1.weight"), &[width, hidden]);
                add(&format!("feed_forward.experts.{expert}.w2.weight"), &[hidden, width]);
                add(&format!("feed_forward.experts.{expert}.w3.weight"), &[width, hidden]);
            }
        } else {
            let [gate, up, down] = match family {
                "lfm2" | "lfm2_moe" => ["feed_forward.w1", "feed_forward.w3", "feed_forward.w2"],
                "falcon_h1" => ["feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"],
                _ => ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
            };
            add(&format!("{gate}.weight"), &[width, hidden]);
            add(&format!("{up}.weight"), &[width, hidden]);
            add(&format!("{down}.weight"), &[hidden, width]);
        }
        if let Some(width) = config["shared_expert_intermediate_size"].as_u64() {
            for (name, rows, columns) in [("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)] {
                add(&format!("mlp.shared_expert.{name}_proj.weight"), &[rows, columns]);
            }
            add("mlp.shared_expert_gate.weight", &[1, hidden]);
        }
        let norms: &[&str] = match family {
            "lfm2" | "lfm2_moe" => &["operator_norm", "ffn_norm"],
            "falcon_h1" => &["input_layernorm", "pre_ff_layernorm"],
            "gemma2" | "gemma3_text" | "gemma4_text" => &[
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ],
            "glm4" => {
                &["input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"]
            }
            "phi" | "cohere2" => &["input_layernorm"],
            "exaone4" | "olmo3" => &["post_attention_layernorm", "post_feedforward_layernorm"],
            _ => &["input_layernorm", "post_attention_layernorm"],
        };
        for name in norms {
            add(&format!("{name}.weight"), &[hidden]);
            if centred {
                add(&format!("{name}.bias"), &[hidden]);
            }
        }
    }
    Ok(shapes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_manifest::builtin;

    #[test]
    fn every_built_in_manifest_has_its_shapes_and_no_weights() {
        for builtin in builtin::all() {
            let source = published(builtin).unwrap();
            assert!(source.tensors().len() > 50, "{}: {} tensors", builtin.name, source.tensors().len());
            let tensor = source.tensors().next().unwrap();
            let error = tensor.read(0, &mut [0.0]).unwrap_err();
            assert!(error.to_string().contains("only its shape"), "{error}");
        }
    }

    #[test]
    fn parameters_are_as_many_as_names_and_cards_say() {
        for (name, millions) in [
            // 8,028,033,024
            ("command-r7b", 8028.0),
            ("ernie-4.5-0.3b", 360.7),
            ("exaone-4-1.2b", 1279.4),
            ("falcon-h1-0.5b", 521.4),
            ("gemma-2b", 2506.2),
            ("gemma-3-270m", 268.1),
            // 25.2 billion
            ("gemma-4-26b-a4b", 25233.1),
            ("granite-3.1-1b-a400m", 1334.6),
            ("granite-3.3-2b", 2533.5),
            ("granite-4.0-h-tiny", 6939.0),
            ("llama-3.2-1b", 1235.8),
            ("ministral-3-3b", 3429.0),
            // the same of Mistral Small 3
            ("mistral-small-3.1-24b", 23572.4),
            ("olmoe-1b-7b", 6919.2),
            ("phi-2", 2779.7),
            ("phi4-mini", 3836.0),
            // 405,334,016
            ("pythia-410m", 405.3),
            // 14.3 billion
            ("qwen1.5-moe-a2.7b", 14315.8),
            ("qwen2.5-0.5b", 494.0),
            ("qwen3-0.6b", 596.0),
            ("qwen3-30b-a3b", 30532.1),
            ("qwen3-4b", 4022.5),
            ("qwen3-next-80b-a3b", 79674.4),
            // the same of Qwen3 30B-A3B
            ("qwen3-vl-30b-a3b", 30532.1),
            ("qwen3-vl-4b", 4022.5),
            ("qwen3.5-35b-a3b", 34660.6),
            ("smollm2-1.7b", 1711.4),
            ("smollm3-3b", 3075.1),
            // the card's 1,644,417,024, and the biases of the layers' norms
            ("stablelm-2-1.6b", 1644.5),
            ("starcoder2-3b", 3030.4),
        ] {
            let source = published(builtin::find(name).unwrap()).unwrap();
            // of the model, without the layer that guesses
            let own = source.tensors().filter(|tensor| !tensor.name().starts_with("mtp."));
            let parameters: u64 = own.map(SourceTensor::elements).sum();
            assert_eq!((parameters as f64 / 1e5).round() / 10.0, millions, "{name}");
        }
    }
}
