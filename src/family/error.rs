//! Errors of models: configuration and tensors.

use anec_base::{Diagnostic, Fault};

/// Error of opening or building a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FamilyError {
    /// The model type is no row of the table.
    #[error("{place}: the model type `{found}` is not known; the most similar ones that are: {}", nearest.join(", "))]
    UnknownFamily {
        /// File and key.
        place: String,
        /// Model type.
        found: String,
        /// Known families with the most similar names.
        nearest: Vec<&'static str>,
    },
    /// The model type can't be expressed as a row.
    #[error("{place}: models of type `{found}` aren't supported: {why}")]
    Unsupported {
        /// File and key.
        place: String,
        /// Model type.
        found: String,
        /// Reason, as a part of a sentence.
        why: &'static str,
    },
    /// The manifest asks for another family than the source's.
    #[error("the manifest says family `{asked}`, but {place} says `{found}`")]
    OtherFamily {
        /// File and key of the source's family.
        place: String,
        /// Family in the manifest.
        asked: String,
        /// Family of the source.
        found: String,
    },
    /// A required key is missing.
    #[error("{place}: the key `{key}` is missing")]
    MissingKey {
        /// File.
        place: String,
        /// Key.
        key: String,
    },
    /// A key is unknown.
    #[error("{place}: the key `{key}` = {value} is not known for family `{family}`")]
    UnknownKey {
        /// File.
        place: String,
        /// Key.
        key: String,
        /// Value, shortened.
        value: String,
        /// Family.
        family: String,
    },
    /// The value of a key isn't supported.
    #[error("{place}: `{key}` is {found}; expected {expected}")]
    Value {
        /// File.
        place: String,
        /// Key.
        key: String,
        /// Value.
        found: String,
        /// Description of valid values.
        expected: String,
    },
    /// The shape of a tensor contradicts the configuration.
    #[error("{place}: tensor `{tensor}` has shape {found:?}; the configuration says {expected:?} ({because})")]
    Shape {
        /// File or source.
        place: String,
        /// Name in the source.
        tensor: String,
        /// Shape in the source.
        found: Vec<u64>,
        /// Shape by the configuration.
        expected: Vec<u64>,
        /// Keys that determine the expected shape.
        because: String,
    },
    /// fp16 can't hold a norm's epsilon in the requested form.
    #[error(
        "`norm: {form}`: the norms' epsilon, times the square of the hidden states' scale, is {eps:e}, which fp16 doesn't hold"
    )]
    Epsilon {
        /// Form of norms.
        form: String,
        /// Epsilon, scaled with the residual stream.
        eps: f64,
    },
    /// Experts in functions of their own don't support layers with per-layer embeddings.
    #[error("`experts: {form}`: layers with per-layer embeddings can't have experts in functions of their own")]
    ExpertsInside {
        /// Form of experts.
        form: String,
    },
    /// A head of a sequence classifier is incomplete or unknown.
    #[error("{place}: it is to judge whole texts, but {problem}")]
    PartialHead {
        /// Source.
        place: String,
        /// Problem, as a part of a sentence.
        problem: String,
    },
    /// The model can't score pairs of texts as the manifest asks.
    #[error("the model, of family `{family}`, can't score pairs as `reranker` says: {problem}")]
    Reranker {
        /// Family of the source.
        family: String,
        /// Problem, as a sentence.
        problem: String,
    },
    /// A next-token layer is requested, and the source has none.
    #[error("{place}: there is no layer for `draft: mtp` in it (family `{family}`)")]
    NoDraftLayer {
        /// Source.
        place: String,
        /// Family of the source.
        family: String,
    },
    /// The context exceeds the model's learned positions.
    #[error("the model has {positions} learned positions, too few for a context of {context} tokens")]
    Positions {
        /// Requested tokens.
        context: u64,
        /// Positions of the model.
        positions: u64,
    },
    /// The source has no configuration.
    #[error("{place}: there is no config.json beside the weights")]
    NoConfig {
        /// Source.
        place: String,
    },
}

impl Diagnostic for FamilyError {
    fn fault(&self) -> Fault {
        match self {
            FamilyError::OtherFamily { .. }
            | FamilyError::Epsilon { .. }
            | FamilyError::ExpertsInside { .. }
            | FamilyError::NoDraftLayer { .. }
            | FamilyError::Positions { .. } => Fault::Usage,
            _ => Fault::Source,
        }
    }

    fn help(&self) -> Option<String> {
        Some(match self {
            FamilyError::UnknownFamily { .. } => {
                "book/src/families.md lists all families; a port is a row in their table, as book/src/porting.md \
                 shows"
                    .into()
            }
            FamilyError::Unsupported { .. } => {
                "convert a model of a supported type (rows of the family table)".into()
            }
            FamilyError::OtherFamily { .. } => "omit `family`, or name the source's family".into(),
            FamilyError::UnknownKey { key, .. } => format!(
                "it may change the maths, so it is not skipped; if you know that it does not, add `acknowledge: \
                 [{key}]` to the manifest"
            ),
            FamilyError::Epsilon { .. } => "use `norm: accurate`, or a larger `numerics.scale`".into(),
            FamilyError::ExpertsInside { .. } => "use `experts: packed`".into(),
            FamilyError::NoDraftLayer { .. } => {
                "omit `draft`; Qwen3-Next and Qwen3.5 have such a layer in their safetensors files".into()
            }
            FamilyError::Reranker { .. } => {
                "omit `reranker`, or give a decoder that continues texts and the ids of two of its tokens".into()
            }
            FamilyError::Positions { positions, .. } => format!("reduce the context to at most {positions}"),
            FamilyError::PartialHead { .. } => {
                "convert the model's Hugging Face folder, which contains the whole head; or set the key `pooling_type` to 1 \
                 (mean), 2 (cls) or 3 (last) to get embeddings from its encoder"
                    .into()
            }
            FamilyError::NoConfig { .. } => {
                "give the Hugging Face folder instead of the single file: config.json must lie beside the weights"
                    .into()
            }
            FamilyError::Shape { .. } => {
                "weights and configuration don't belong together: check that both come from the same model".into()
            }
            FamilyError::MissingKey { .. } | FamilyError::Value { .. } => {
                "check that the configuration is the one that the weights were published with".into()
            }
        })
    }
}
