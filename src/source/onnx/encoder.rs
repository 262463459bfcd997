//! Encoders with BERT's layers, as PyTorch exports them: followed from the hidden states back to the embedding.
//!
//! ```text
//! h = norm(x + attention(x))
//! y = norm(h + W_down gelu(W_up h))
//! ```
//!
//! The result is a configuration and weights under the names that transformers gives BERT. ONNX Runtime's dynamically
//! quantized products are read as products with the dequantized weights.

mod activation;
mod attention;
mod embedding;
mod head;
mod layer_norm;

use serde_json::{Value as Json, json};

use self::attention::EncoderAttention;
use self::embedding::EmbeddingSum;
use self::head::ClassifierHead;
use self::layer_norm::LayerNorm;
use super::LOGITS;
use super::follow::Weights;
use super::network::{Constant, Network};
use super::projection::Projection;
use crate::error::{Result, SourceError};
use anec_base::listing::list;

/// Maximum number of layers.
const MOST_LAYERS: usize = 4096;

/// A layer of a graph, from its end to its beginning.
struct EncoderLayer<'a> {
    attention: EncoderAttention<'a>,
    attention_norm: LayerNorm<'a>,
    up: Projection<'a>,
    down: Projection<'a>,
    activation: &'static str,
    norm: LayerNorm<'a>,
    /// Hidden state at the layer's input.
    from: &'a str,
}

/// Family with BERT's layers; they differ in their heads and names.
#[derive(Clone, Copy, PartialEq, Eq)]
enum EncoderKind {
    Bert,
    DistilBert,
    Electra,
    Roberta,
}

/// Parts of a layer in BERT and in DistilBERT.
const DISTILBERT: [(&str, &str); 8] = [
    ("attention.self.query", "attention.q_lin"),
    ("attention.self.key", "attention.k_lin"),
    ("attention.self.value", "attention.v_lin"),
    ("attention.output.dense", "attention.out_lin"),
    ("attention.output.LayerNorm", "sa_layer_norm"),
    ("intermediate.dense", "ffn.lin1"),
    ("output.dense", "ffn.lin2"),
    ("output.LayerNorm", "output_layer_norm"),
];

impl EncoderKind {
    fn model_type(self) -> &'static str {
        match self {
            EncoderKind::Bert => "bert",
            EncoderKind::DistilBert => "distilbert",
            EncoderKind::Electra => "electra",
            EncoderKind::Roberta => "roberta",
        }
    }

    /// Name of a part of a layer.
    fn name(self, layer: usize, part: &str) -> String {
        let known = DISTILBERT.iter().find(|(own, _)| *own == part && self == EncoderKind::DistilBert);
        match known {
            Some((_, name)) => format!("transformer.layer.{layer}.{name}"),
            None => format!("encoder.layer.{layer}.{part}"),
        }
    }
}

impl Network {
    /// Follows the graph from its hidden states. Returns the configuration of a BERT or RoBERTa with these numbers, and
    /// its weights.
    ///
    /// # Errors
    /// Returns an error that names the operation if something on the way isn't understood.
    pub(super) fn encoder(&self) -> Result<(Json, Weights)> {
        let head = match self.graph().outputs.iter().find(|output| *output == LOGITS) {
            Some(logits) => Some(self.classifier_head(logits)?),
            None => None,
        };
        let mut value = match &head {
            Some(head) => head.hidden,
            None => self.hidden_states()?,
        };
        let mut layers = Vec::new();
        while let Some(layer) = self.encoder_layer(value)? {
            if layers.len() == MOST_LAYERS {
                return Err(self.refuse_value(value, "it has more layers than any model"));
            }
            value = layer.from;
            layers.push(layer);
        }
        layers.reverse();
        let Some(first) = layers.first() else {
            return Err(self.refuse_value(value, "before the hidden states should be a layer with BERT's attention"));
        };
        let embedding = self.embedding_sum(value)?;
        let kind = self.kind(&embedding, head.as_ref())?;
        let mut weights = Weights::new();
        let mut config = json!({
            "model_type": kind.model_type(),
            "pad_token_id": embedding.padding,
            "vocab_size": embedding.words.weight.rows(),
            "max_position_embeddings": embedding.positions.weight.rows(),
            "hidden_size": embedding.words.weight.columns(),
            "intermediate_size": first.up.rows(),
            "num_hidden_layers": layers.len(),
            "num_attention_heads": first.attention.heads,
            "hidden_act": first.activation,
            "layer_norm_eps": embedding.norm.epsilon,
        });
        for (index, layer) in layers.iter().enumerate() {
            let same = layer.attention.heads == first.attention.heads && layer.activation == first.activation;
            if !same || [&layer.attention_norm, &layer.norm].iter().any(|norm| !norm.is_like(&embedding.norm)) {
                let problem = format!("layer {index} has other heads, activation or epsilon than the others");
                return Err(SourceError::file(self.path(), problem));
            }
        }
        if let Some(head) = head {
            let task = if head.activation().is_some() { "Sequence" } else { "Token" };
            config["architectures"] = json!([format!("BertFor{task}Classification")]);
            config["num_labels"] = json!(head.labels());
            head.put(&mut weights, kind)?;
        }
        if kind == EncoderKind::Electra {
            config["embedding_size"] = config["hidden_size"].clone();
        }
        if kind != EncoderKind::DistilBert {
            config["type_vocab_size"] = json!(embedding.types.as_ref().map_or(1, |types| types.weight.rows()));
        }
        embedding.put(&mut weights, kind != EncoderKind::DistilBert)?;
        for (index, layer) in layers.into_iter().enumerate() {
            let name = |part: &str| kind.name(index, part);
            let EncoderAttention { query, key, value, output, .. } = layer.attention;
            for (part, projection) in [
                ("attention.self.query", query),
                ("attention.self.key", key),
                ("attention.self.value", value),
                ("attention.output.dense", output),
                ("intermediate.dense", layer.up),
                ("output.dense", layer.down),
            ] {
                put_projection(&mut weights, &name(part), projection)?;
            }
            layer.attention_norm.put(&mut weights, &name("attention.output.LayerNorm"));
            layer.norm.put(&mut weights, &name("output.LayerNorm"));
        }
        Ok((config, weights))
    }

    /// Returns the family with this embedding and this head.
    fn kind(&self, embedding: &EmbeddingSum<'_>, head: Option<&ClassifierHead<'_>>) -> Result<EncoderKind> {
        let activation = head.and_then(ClassifierHead::activation);
        match (embedding.padding, activation) {
            (Some(_), None | Some("tanh")) => Ok(EncoderKind::Roberta),
            (None, None | Some("tanh")) => Ok(EncoderKind::Bert),
            (None, Some("gelu")) => Ok(EncoderKind::Electra),
            (None, Some("relu")) if embedding.types.is_none() => Ok(EncoderKind::DistilBert),
            (_, other) => {
                let problem = format!("no known encoder has {} before its labels", other.unwrap_or("nothing"));
                Err(SourceError::file(self.path(), problem))
            }
        }
    }

    /// Returns the output that is a norm of hidden states; others are pooled.
    fn hidden_states(&self) -> Result<&str> {
        let outputs = &self.graph().outputs;
        for output in outputs {
            let value = self.behind_casts(output);
            if self.layer_norm(value)?.is_some() {
                return Ok(value);
            }
        }
        let problem = format!(
            "the graph has neither an output `logits`, nor one that is the hidden states of an encoder; it has {}",
            list(outputs)
        );
        Err(SourceError::file(self.path(), problem)
            .advise("give a decoder with its LM head, or an encoder whose last norm is an output (last_hidden_state)"))
    }

    /// Returns the layer that a hidden state comes from; `None` for the embedding.
    fn encoder_layer<'a>(&'a self, value: &'a str) -> Result<Option<EncoderLayer<'a>>> {
        let Some((norm, down, middle)) = self.normed_sum(value)? else { return Ok(None) };
        let (gate, activation) = self.activation(down.input)?;
        let Some(up) = self.projection(gate)?.filter(|up| self.behind_casts(up.input) == middle) else {
            return Err(self.refuse_value(gate, "it isn't a projection of the sum that it is added to"));
        };
        let Some((attention_norm, output, from)) = self.normed_sum(middle)? else {
            return Err(self.refuse_value(middle, "it isn't the norm of attention and the hidden state before"));
        };
        let attention = self.encoder_attention(output, from)?;
        Ok(Some(EncoderLayer { attention, attention_norm, up, down, activation, norm, from }))
    }

    /// Returns norm, projection and residual of `norm(projection + residual)`.
    fn normed_sum<'a>(&'a self, value: &'a str) -> Result<Option<(LayerNorm<'a>, Projection<'a>, &'a str)>> {
        let Some(norm) = self.layer_norm(value)? else { return Ok(None) };
        let Some(sum) = self.made_by(norm.input, "Add") else { return Ok(None) };
        for [projected, residual] in [[0, 1], [1, 0]].map(|order| order.map(|index| sum.input(index))) {
            let residual = self.behind_casts(residual);
            if self.layer_norm(residual)?.is_some()
                && let Some(projection) = self.projection(projected)?
            {
                return Ok(Some((norm, projection, residual)));
            }
        }
        Ok(None)
    }
}

/// Adds the weight and bias of a projection; transformers' BERT has biases everywhere.
fn put_projection(weights: &mut Weights, name: &str, projection: Projection<'_>) -> Result<()> {
    let rows = projection.rows();
    let bias = match projection.bias {
        Some(bias) => bias,
        None => Constant::zeros(&format!("{name}.bias"), &[rows])?,
    };
    weights.push((format!("{name}.weight"), projection.weight));
    weights.push((format!("{name}.bias"), bias));
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use anec_base::MappedFile;

    use super::*;
    use crate::Source;
    use crate::onnx::parse_encoder;
    use crate::tensor::SourceTensor;
    use crate::tests::mutated;

    /// Exports of every form: exporter, version of the operators, kind of attention, quantization.
    const CASES: [(&str, &str); 20] = [
        ("bert-eager-11", "bert-mean"),
        ("bert-sdpa-14", "bert-mean"),
        ("bert-sdpa-17", "bert-mean"),
        ("bert-dynamo", "bert-mean"),
        ("bert-int8", "bert-mean"),
        ("bert-int8-channels", "bert-mean"),
        ("roberta-sdpa-17", "roberta-mean"),
        ("roberta-dynamo", "roberta-mean"),
        ("camembert-eager-14", "camembert-mean"),
        ("distilbert-eager-11", "distilbert-mean"),
        ("distilbert-sdpa-14", "distilbert-mean"),
        ("distilbert-int8", "distilbert-mean"),
        ("electra-eager-17", "electra-mean"),
        ("xlm-roberta-sdpa-14", "xlm-roberta-dense"),
        ("bert-reranker-sdpa-14", "bert-reranker"),
        ("xlm-roberta-labels-eager-17", "xlm-roberta-labels"),
        ("distilbert-labels-sdpa-14", "distilbert-labels"),
        ("electra-labels-eager-17", "electra-labels"),
        ("bert-tokens-sdpa-14", "bert-tokens"),
        ("roberta-tokens-eager-17", "roberta-tokens"),
    ];

    fn fixtures(folder: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(folder)
    }

    fn open(case: &str) -> Result<(Json, Vec<SourceTensor>)> {
        let path = fixtures("onnx_encoders").join(case).join("model.onnx");
        parse_encoder(MappedFile::open(&path)?)
    }

    fn values(tensor: &SourceTensor) -> Vec<f32> {
        let mut values = vec![f32::NAN; tensor.elements() as usize];
        tensor.read(0, &mut values).unwrap();
        values
    }

    #[test]
    fn mutated_files_never_panic() {
        let good = ["bert-int8", "distilbert-sdpa-14", "bert-reranker-sdpa-14"];
        let (mut read_anyway, mut refused) = (0, 0);
        for case in good {
            let path = fixtures("onnx_encoders").join(case).join("model.onnx");
            let good = std::fs::read(&path).unwrap();
            for round in 0..500u64 {
                let Ok((_, tensors)) = parse_encoder(MappedFile::from_bytes(&path, mutated(&good, round))) else {
                    refused += 1;
                    continue;
                };
                tensors.iter().for_each(|tensor| drop(values(tensor)));
                read_anyway += 1;
            }
        }
        assert!(read_anyway > 50 && refused > 50, "{read_anyway} read, {refused} refused");
    }

    /// Weights and numbers are those of the model that was exported; of quantized ones, within half a step.
    #[test]
    fn weights_and_numbers_are_those_of_the_exported_model() {
        for (case, model) in CASES {
            let (config, tensors) = open(case).unwrap_or_else(|error| panic!("{case}: {error}"));
            let source = Source::open_path(&fixtures("encoders").join(model)).unwrap();
            let published = source.hugging_face().unwrap().config.clone().unwrap();
            for (key, other) in [
                ("vocab_size", ""),
                ("max_position_embeddings", ""),
                ("hidden_size", "dim"),
                ("intermediate_size", "hidden_dim"),
                ("num_hidden_layers", "n_layers"),
                ("num_attention_heads", "n_heads"),
                ("hidden_act", "activation"),
                ("layer_norm_eps", ""),
            ] {
                let expected = published.get(key).or_else(|| published.get(other));
                let expected = expected.cloned().unwrap_or(json!(1e-12));
                let same = match (config[key].as_f64(), expected.as_f64()) {
                    (Some(found), Some(expected)) => (found / expected - 1.0).abs() < 1e-6,
                    _ => config[key] == expected,
                };
                assert!(same, "{case}: {key}: {} {expected}", config[key]);
            }
            let mut compared = 0;
            for expected in source.tensors() {
                let own = expected.name().replace("transformer.layer", "encoder.layer");
                let renamed = DISTILBERT
                    .iter()
                    .fold(own, |name, (bert, here)| name.replace(&format!(".{here}."), &format!(".{bert}.")));
                let name = renamed.replace(".gamma", ".weight").replace(".beta", ".bias");
                let bare = |name: &str| {
                    let prefixes = ["bert.", "roberta.", "distilbert.", "electra."];
                    prefixes.iter().find_map(|of| name.strip_prefix(of)).unwrap_or_default().to_owned()
                };
                let names = [&name, &bare(&name), &bare(expected.name())].map(String::clone);
                let found = |name: &String| tensors.iter().find(|tensor| tensor.name() == *name);
                let Some(found) = names.iter().find_map(found) else {
                    let unused = ["pooler", "position_ids", "lm_head", "cls.", "dense", "linear"];
                    assert!(unused.iter().any(|part| name.contains(part)), "{case}: {name}");
                    continue;
                };
                let (found, expected) = (values(found), values(expected));
                let largest = expected.iter().fold(0f32, |most, value| most.max(value.abs()));
                let step = if case.contains("int8") && !name.contains("bias") { largest / 127.0 } else { 0.0 };
                assert_eq!(found.len(), expected.len(), "{case}: {name}");
                for (found, expected) in found.iter().zip(&expected) {
                    assert!((found - expected).abs() <= step, "{case}: {name}: {found} {expected}");
                }
                compared += 1;
            }
            // token types that a graph lacks are zeros where a model of BERT's has them
            let zeros = usize::from(model == "distilbert-mean");
            assert_eq!(compared + zeros, tensors.len(), "{case}");
        }
    }
}
