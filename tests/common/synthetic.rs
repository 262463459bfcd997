//! Sources of random weights in the shape that a published configuration gives.

use anec::source::{Source, Tensor};
use serde_json::Value as Json;

/// Names and shapes of a decoder's tensors, as its Hugging Face checkpoint has them.
pub fn shapes(config: &Json) -> Vec<(String, Vec<u64>)> {
    // the text part of a multimodal model leaves out what its class has as the default
    let (prefix, config) = match config.get("text_config") {
        Some(text) => ("language_model.model.", text),
        None => ("model.", config),
    };
    let family = config["model_type"].as_str().unwrap();
    let default = |key: &str| match (family, key) {
        ("gemma3_text", "num_attention_heads") => 8,
        ("gemma3_text", "num_key_value_heads") => 4,
        ("gemma3_text", "head_dim") => 256,
        ("gemma3_text", "vocab_size") => 262_208,
        _ => panic!("{key} is no number"),
    };
    let number = |key: &str| config[key].as_u64().unwrap_or_else(|| default(key));
    let (hidden, width, vocab) = (number("hidden_size"), number("intermediate_size"), number("vocab_size"));
    let (heads, key_heads) = (number("num_attention_heads"), number("num_key_value_heads"));
    let head_dim = match family {
        "gemma3_text" => number("head_dim"),
        _ => config["head_dim"].as_u64().unwrap_or(hidden / heads),
    };
    let (queries, keys) = (heads * head_dim, key_heads * head_dim);
    let mut shapes = vec![
        (format!("{prefix}embed_tokens.weight"), vec![vocab, hidden]),
        (format!("{prefix}norm.weight"), vec![hidden]),
    ];
    if config["tie_word_embeddings"] == false {
        shapes.push(("lm_head.weight".to_owned(), vec![vocab, hidden]));
    }
    for layer in 0..number("num_hidden_layers") {
        let mut add =
            |name: &str, shape: &[u64]| shapes.push((format!("{prefix}layers.{layer}.{name}"), shape.to_vec()));
        if family == "phi3" {
            add("self_attn.qkv_proj.weight", &[queries + 2 * keys, hidden]);
            add("mlp.gate_up_proj.weight", &[2 * width, hidden]);
        } else {
            for (name, rows) in [("q", queries), ("k", keys), ("v", keys)] {
                add(&format!("self_attn.{name}_proj.weight"), &[rows, hidden]);
                if family == "qwen2" {
                    add(&format!("self_attn.{name}_proj.bias"), &[rows]);
                }
            }
            add("mlp.gate_proj.weight", &[width, hidden]);
            add("mlp.up_proj.weight", &[width, hidden]);
        }
        let qk_norms: &[&str] = match family {
            "qwen3" | "gemma3_text" => &["q_norm", "k_norm"],
            "hunyuan_v1_dense" => &["query_layernorm", "key_layernorm"],
            _ => &[],
        };
        for name in qk_norms {
            add(&format!("self_attn.{name}.weight"), &[head_dim]);
        }
        if family == "gemma3_text" {
            add("pre_feedforward_layernorm.weight", &[hidden]);
            add("post_feedforward_layernorm.weight", &[hidden]);
        }
        add("self_attn.o_proj.weight", &[hidden, queries]);
        add("mlp.down_proj.weight", &[hidden, width]);
        add("input_layernorm.weight", &[hidden]);
        add("post_attention_layernorm.weight", &[hidden]);
    }
    shapes
}

/// Random weights of a configuration: norms that multiply by 1 or so, the rest around 0.
pub fn source(name: &str, config: Json) -> Source {
    // gemma's norms multiply by 1 + w
    let norm_mean = if config.to_string().contains("\"gemma3_text\"") { 0.0 } else { 1.0 };
    let tensors = shapes(&config).into_iter().enumerate().map(|(seed, (name, shape))| {
        let mean = if name.ends_with("norm.weight") { norm_mean } else { 0.0 };
        Tensor::random(&name, &shape, seed as u64, mean, 0.02).unwrap()
    });
    Source::random(name, config, tensors.collect()).unwrap()
}
