//! The tensors of the models that built-in manifests are for: which their published checkpoints have, of which shape.
//! They are enough to plan a conversion without the weights.
//!
//! The list is written from the checkpoints and shares nothing with what a family looks for, so that the tests of the
//! built-in manifests hold one against the other.

mod decoder;

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
        _ => decoder::shapes(config),
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
