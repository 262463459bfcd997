//! Tensor names of encoders.

use anec_source::Ledger;

/// Tensors outside of layers: names in transformers and in GGUF.
const NAMES: &[(&str, &str)] = &[
    ("embeddings.word_embeddings", "token_embd"),
    ("embeddings.position_embeddings", "position_embd"),
    ("embeddings.token_type_embeddings", "token_types"),
    ("embeddings.LayerNorm", "token_embd_norm"),
    ("embeddings.tok_embeddings", "token_embd"),
    ("embeddings.norm", "token_embd_norm"),
    ("final_norm", "output_norm"),
    ("bert.pooler.dense", "cls"),
    ("classifier.dense", "cls"),
    ("classifier.out_proj", "cls.output"),
    ("head.dense", "cls"),
    ("head.norm", "cls.norm"),
    ("classifier", "cls.output"),
];

/// Tensors of a layer: names below `encoder.layer.N.` or `layers.N.`, and below `blk.N.`.
const LAYER_NAMES: &[(&str, &str)] = &[
    ("attention.self.query", "attn_q"),
    ("attention.self.key", "attn_k"),
    ("attention.self.value", "attn_v"),
    ("attention.output.dense", "attn_output"),
    ("attention.output.LayerNorm", "attn_output_norm"),
    ("intermediate.dense", "ffn_up"),
    ("output.dense", "ffn_down"),
    ("output.LayerNorm", "layer_output_norm"),
    ("attn_norm", "attn_norm"),
    ("attn.Wqkv", "attn_qkv"),
    ("attn.Wo", "attn_output"),
    ("mlp_norm", "ffn_norm"),
    ("mlp.Wi", "ffn_up"),
    ("mlp.Wo", "ffn_down"),
];

/// Naming scheme of a file's tensors.
#[derive(Clone, Copy, Debug)]
pub(super) enum EncoderNaming {
    /// Names of transformers with a prefix.
    HuggingFace(&'static str),
    /// Names of llama.cpp.
    Gguf,
}

impl EncoderNaming {
    /// Naming of a file whose embedding is called `embedding` in transformers and has `prefix` in files with a head.
    pub(super) fn of(ledger: &Ledger<'_>, embedding: &str, prefix: &'static str) -> Self {
        match ledger.source().gguf() {
            Some(_) => EncoderNaming::Gguf,
            None if ledger.has(&format!("{embedding}.weight")) => EncoderNaming::HuggingFace(""),
            None => EncoderNaming::HuggingFace(prefix),
        }
    }

    /// Naming of tensors outside of the encoder.
    pub(super) fn outside(self) -> Self {
        match self {
            EncoderNaming::HuggingFace(_) => EncoderNaming::HuggingFace(""),
            EncoderNaming::Gguf => EncoderNaming::Gguf,
        }
    }

    /// Name of a tensor, without `.weight` or `.bias`.
    pub(super) fn name(self, tensor: &str) -> String {
        let find = |names: &[(&str, &str)], name: &str| {
            names.iter().find(|(own, _)| *own == name).map_or(name, |(_, gguf)| gguf).to_owned()
        };
        match self {
            EncoderNaming::HuggingFace(prefix) => format!("{prefix}{tensor}"),
            EncoderNaming::Gguf => {
                let layer = ["encoder.layer.", "layers."].iter().find_map(|layers| tensor.strip_prefix(layers));
                match layer.and_then(|rest| rest.split_once('.')) {
                    Some((index, part)) => format!("blk.{index}.{}", find(LAYER_NAMES, part)),
                    None => find(NAMES, tensor),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_layers_and_others_have_names() {
        let gguf = EncoderNaming::Gguf;
        for (own, expected) in [
            ("embeddings.LayerNorm", "token_embd_norm"),
            ("encoder.layer.11.attention.output.LayerNorm", "blk.11.attn_output_norm"),
            ("encoder.layer.0.output.LayerNorm", "blk.0.layer_output_norm"),
            ("layers.3.mlp.Wo", "blk.3.ffn_down"),
            ("classifier", "cls.output"),
        ] {
            assert_eq!(gguf.name(own), expected);
        }
        assert_eq!(EncoderNaming::HuggingFace("bert.").name("pooler.dense"), "bert.pooler.dense");
    }
}
