//! What can be wrong with a model: its configuration or how its tensors fit it.

use anec_base::{Diagnostic, Fault};

/// Why a source can't become a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FamilyError {
    /// No row of the table.
    #[error("{place}: the model type `{found}` is not known; known: {known}")]
    UnknownFamily {
        /// File and key.
        place: String,
        /// The model type.
        found: String,
        /// Families of the table.
        known: String,
    },
    /// A model type that no row can say.
    #[error("{place}: models of type `{found}` aren't supported: {why}")]
    Unsupported {
        /// File and key.
        place: String,
        /// The model type.
        found: String,
        /// Why it isn't, as a part of a sentence.
        why: &'static str,
    },
    /// The manifest asks for another family than the source says it is.
    #[error("the manifest says family `{asked}`, but {place} says `{found}`")]
    OtherFamily {
        /// Where the source says it.
        place: String,
        /// From the manifest.
        asked: String,
        /// From the source.
        found: String,
    },
    /// A key that must be there.
    #[error("{place}: the key `{key}` is missing")]
    MissingKey {
        /// File.
        place: String,
        /// Key.
        key: String,
    },
    /// A key that nobody here understands.
    #[error("{place}: the key `{key}` = {value} is not known for family `{family}`")]
    UnknownKey {
        /// File.
        place: String,
        /// Key.
        key: String,
        /// Its value, shortened.
        value: String,
        /// Family.
        family: String,
    },
    /// A key whose value isn't supported or makes no sense.
    #[error("{place}: `{key}` is {found}; expected {expected}")]
    Value {
        /// File.
        place: String,
        /// Key.
        key: String,
        /// Value.
        found: String,
        /// What it may be.
        expected: String,
    },
    /// A tensor whose shape isn't what the configuration says.
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
        /// Keys that say so.
        because: String,
    },
    /// A norm's epsilon that half precision can't hold in the form that was asked for.
    #[error(
        "`norm: {form}`: the norms' epsilon, times the square of the factor of the residual stream, is {eps:e}, which fp16 doesn't hold"
    )]
    Epsilon {
        /// The form of norms.
        form: String,
        /// The epsilon, scaled as the stream is.
        eps: f64,
    },
    /// Experts in functions of their own, in layers that are told of tokens behind them.
    #[error(
        "`experts: {form}`: layers are told of tokens behind their experts, and functions of experts know nothing of tokens"
    )]
    ExpertsInside {
        /// The form of experts.
        form: String,
    },
    /// A head for whole texts of which a part is missing, or another's.
    #[error("{place}: it is to judge whole texts, but {problem}")]
    PartialHead {
        /// The source.
        place: String,
        /// What is wrong, as a part of a sentence.
        problem: String,
    },
    /// No layer that guesses tokens, where one is asked for.
    #[error("{place}: there is no layer for `draft: mtp` in it (family `{family}`)")]
    NoDraftLayer {
        /// The source.
        place: String,
        /// Its family.
        family: String,
    },
    /// A context that the model's learned positions don't reach.
    #[error("the model has {positions} learned positions, too few for a context of {context} tokens")]
    Positions {
        /// Tokens asked for.
        context: u64,
        /// Positions that there are.
        positions: u64,
    },
    /// The source has no configuration at all.
    #[error("{place}: there is no config.json beside the weights")]
    NoConfig {
        /// The source.
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
                "a port is a row in the family table; the porting guide in book/ shows how to add one".into()
            }
            FamilyError::Unsupported { .. } => {
                "convert a model of another type; the known ones are rows of the family table".into()
            }
            FamilyError::OtherFamily { .. } => "leave `family` out, or name the one that the source has".into(),
            FamilyError::UnknownKey { key, .. } => format!(
                "it may change the maths, so it is not skipped; if you know that it does not, add `acknowledge: \
                 [{key}]` to the manifest"
            ),
            FamilyError::Epsilon { .. } => "use `norm: accurate`, or a larger `numerics.scale`".into(),
            FamilyError::ExpertsInside { .. } => "use `experts: packed`".into(),
            FamilyError::NoDraftLayer { .. } => {
                "leave `draft` out; Qwen3-Next and Qwen3.5 have such a layer in their safetensors".into()
            }
            FamilyError::Positions { positions, .. } => format!("`--set context={positions}` is the most"),
            FamilyError::PartialHead { .. } => {
                "convert the model's Hugging Face folder, which has all of the head; or set the key `pooling_type` to 1 (mean), 2 \
                 (cls) or 3 (last) to have the vectors of its encoder"
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
