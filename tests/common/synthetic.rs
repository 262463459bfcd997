//! Sources of random weights in the shape that a published configuration gives.

use anec::source::{Source, Tensor};
use serde_json::Value as Json;

/// Names and shapes of a decoder's tensors, as its Hugging Face checkpoint has them.
pub fn shapes(config: &Json) -> Vec<(String, Vec<u64>)> {
    let number = |key: &str| config[key].as_u64().unwrap_or_else(|| panic!("{key} is no number"));
    let family = config["model_type"].as_str().unwrap();
    let (hidden, width, vocab) = (number("hidden_size"), number("intermediate_size"), number("vocab_size"));
    let (heads, key_heads) = (number("num_attention_heads"), number("num_key_value_heads"));
    let head_dim = config["head_dim"].as_u64().unwrap_or(hidden / heads);
    let (queries, keys) = (heads * head_dim, key_heads * head_dim);
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![vocab, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    if config["tie_word_embeddings"] == false {
        shapes.push(("lm_head.weight".to_owned(), vec![vocab, hidden]));
    }
    for layer in 0..number("num_hidden_layers") {
        let mut add = |name: &str, shape: &[u64]| shapes.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
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
        if family == "qwen3" {
            add("self_attn.q_norm.weight", &[head_dim]);
            add("self_attn.k_norm.weight", &[head_dim]);
        }
        add("self_attn.o_proj.weight", &[hidden, queries]);
        add("mlp.down_proj.weight", &[hidden, width]);
        add("input_layernorm.weight", &[hidden]);
        add("post_attention_layernorm.weight", &[hidden]);
    }
    shapes
}

/// Random weights of a configuration: norms around 1, the rest around 0.
pub fn source(name: &str, config: Json) -> Source {
    let tensors = shapes(&config).into_iter().enumerate().map(|(seed, (name, shape))| {
        let mean = if name.ends_with("norm.weight") { 1.0 } else { 0.0 };
        Tensor::random(&name, &shape, seed as u64, mean, 0.02).unwrap()
    });
    Source::random(name, config, tensors.collect()).unwrap()
}
