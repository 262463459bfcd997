//! Errors of conversions.

use std::path::PathBuf;

use anec_base::{Diagnostic, Fault, FileError};
use anec_bundle::BundleError;

/// Errors of planning and converting.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// No source was given.
    #[error("no source is given")]
    NoSource,
    /// `numerics.scale: auto` needs a measurement first.
    #[error("`numerics.scale: auto` needs a run of the model, which has not been made")]
    ScaleNotMeasured,
    /// `quant.feedback: gptq` needs a calibration first.
    #[error("`quant.feedback: gptq` needs a calibration, which has not been made")]
    NotCalibrated,
    /// `quant.plan` needs measurements first.
    #[error("`quant.plan` needs measurements, which have not been made")]
    NotPlanned,
    /// Source that scores pairs of texts by tokens that the manifest doesn't name.
    #[error(
        "the source scores pairs of texts by the logits of certain tokens (LogitScore in modules.json), and `reranker` {}",
        if *has_others { "names others" } else { "isn't set" }
    )]
    LogitScore {
        /// Token whose logit counts for a pair.
        positive: u64,
        /// Token whose logit counts against it, if there is one.
        negative: Option<u64>,
        /// Whether the manifest names tokens.
        has_others: bool,
    },
    /// Formats for layers beyond the model's last.
    #[error("`quant.layers` names layers up to {end}, but the model has {layers} layers")]
    QuantLayers {
        /// One past the last named layer.
        end: usize,
        /// Number of layers of the model.
        layers: usize,
    },
    /// Layer larger than `shards.max_mb`.
    #[error("layer {layer} needs {megabytes:.1} MB of weights, more than the {limit} MB of `shards.max_mb`")]
    LayerTooLarge {
        /// Layer index.
        layer: usize,
        /// Weights of the layer in MB (10^6 bytes).
        megabytes: f64,
        /// Limit in MB.
        limit: f64,
    },
    /// Package with layers after one whose experts are in other packages.
    #[error("the package of layers {first}..{end} continues after layer {layer}, whose experts are in other packages")]
    ExpertsInside {
        /// First layer of the package.
        first: usize,
        /// One past the last layer of the package.
        end: usize,
        /// Layer with experts.
        layer: usize,
    },
    /// One row of the LM head larger than `shards.max_mb`.
    #[error("an LM-head piece of one row needs {megabytes:.3} MB, more than the {limit} MB of `shards.max_mb`")]
    HeadTooLarge {
        /// Size of one row and the final norm in MB (10^6 bytes).
        megabytes: f64,
        /// Limit in MB.
        limit: f64,
    },
    /// Explicit ranges that don't cover the model's layers.
    #[error("`shards.layers` ends at layer {end}, but the model has {layers} layers")]
    LayersDontTile {
        /// One past the last listed layer.
        end: usize,
        /// Number of layers of the model.
        layers: usize,
    },
    /// More pieces of the LM head than rows.
    #[error("`lm_head.split` asks for {pieces} pieces of an LM head of {rows} rows")]
    TooManyPieces {
        /// Requested number of pieces.
        pieces: u64,
        /// Rows of the LM head.
        rows: u64,
    },
    /// More than `shards.max_mb` in the one package that `lm_head.split: none` asks for.
    #[error(
        "all layers and the LM head need {megabytes:.1} MB of weights, more than the {limit} MB of `shards.max_mb`"
    )]
    ModelTooLarge {
        /// Weights of the model in MB (10^6 bytes).
        megabytes: f64,
        /// Limit in MB.
        limit: f64,
    },
    /// More of the largest logits than there are logits.
    #[error("`lm_head.top_k` asks for {k} of {rows} logits")]
    TopK {
        /// Requested number.
        k: u64,
        /// Rows of the LM head.
        rows: u64,
    },
    /// Form of the LM head for a model that doesn't generate text.
    #[error("`lm_head.argmax`, `top_k` and `split: none` are for models that generate text, which {family} does not")]
    HeadOfText {
        /// Model family.
        family: String,
    },
    /// No single-token call for a recurrent model.
    #[error(
        "`lengths` has no call of one token, which this model needs: padding would change the recurrent state of its layers"
    )]
    NoSingleToken,
    /// Recurrent model for a runtime that pads calls.
    #[error("the model has recurrent states, for which `contract: {contract}` has no place")]
    RecurrentContract {
        /// Name of the contract.
        contract: String,
    },
    /// Graph that violates Core ML's rules: a bug in this crate.
    #[error("{package}: the graph violates the rules of Core ML:\n{}", findings.join("\n"))]
    Graph {
        /// Package name.
        package: String,
        /// Violations.
        findings: Vec<String>,
    },
    /// Tokenizer or configuration with token ids beyond the vocabulary.
    #[error("{place}: token {id} is beyond the model's vocabulary of {vocab_size}")]
    Vocabulary {
        /// File and key that name the token.
        place: String,
        /// Token id.
        id: u64,
        /// Rows of embedding and LM head.
        vocab_size: u64,
    },
    /// Invalid end-of-text tokens in a configuration.
    #[error("{place}: `eos_token_id` is {found}, expected tokens of the model's vocabulary of {vocab_size}")]
    EndToken {
        /// File name.
        place: String,
        /// Value of `eos_token_id`.
        found: String,
        /// Rows of embedding and LM head.
        vocab_size: u64,
    },
    /// Two tokens of a tokenizer with the same id.
    #[error("{place}: {:?} and {:?} are both token {id}", tokens[0], tokens[1])]
    SameToken {
        /// File name.
        place: String,
        /// Shared id.
        id: u64,
        /// Both tokens.
        tokens: [String; 2],
    },
    /// Output folder that isn't a bundle.
    #[error("{} exists and is not a bundle", .0.display())]
    NotABundle(PathBuf),
    /// Output folder with another bundle.
    #[error("{} holds a bundle of other inputs: {difference}", path.display())]
    Exists {
        /// Output folder.
        path: PathBuf,
        /// Difference between the bundles.
        difference: String,
    },
    /// Foreign file or folder at the path of the partial bundle.
    #[error("{}: exists, and was not created by a conversion", .0.display())]
    NotOurs(PathBuf),
    /// Another process converts into the same folder.
    #[error("{}: another conversion is in progress", .0.display())]
    Busy(PathBuf),
    /// File that can't be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// Invalid `bundle.json`.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// Package that Core ML's compiler rejected.
    #[error("coremlcompiler rejected {package} ({status}):\n{output}")]
    Compiler {
        /// Package name.
        package: String,
        /// Exit status of the compiler.
        status: String,
        /// Output of the compiler.
        output: String,
    },
    /// Core ML's compiler isn't available.
    #[error("Core ML's compiler is not available: {0}")]
    NoCompiler(String),
}

impl Diagnostic for ConvertError {
    fn fault(&self) -> Fault {
        match self {
            ConvertError::NoSource
            | ConvertError::ScaleNotMeasured
            | ConvertError::NotCalibrated
            | ConvertError::NotPlanned
            | ConvertError::LogitScore { .. }
            | ConvertError::QuantLayers { .. }
            | ConvertError::LayerTooLarge { .. }
            | ConvertError::ExpertsInside { .. }
            | ConvertError::HeadTooLarge { .. }
            | ConvertError::LayersDontTile { .. }
            | ConvertError::TooManyPieces { .. }
            | ConvertError::ModelTooLarge { .. }
            | ConvertError::TopK { .. }
            | ConvertError::HeadOfText { .. }
            | ConvertError::NoSingleToken
            | ConvertError::RecurrentContract { .. }
            | ConvertError::NotABundle(_)
            | ConvertError::NotOurs(_)
            | ConvertError::Busy(_)
            | ConvertError::Exists { .. } => Fault::Usage,
            ConvertError::Bundle(error) => error.fault(),
            ConvertError::Vocabulary { .. }
            | ConvertError::EndToken { .. }
            | ConvertError::SameToken { .. }
            | ConvertError::Graph { .. } => Fault::Source,
            ConvertError::File(error) => error.fault(),
            ConvertError::Compiler { .. } | ConvertError::NoCompiler(_) => Fault::Platform,
        }
    }

    fn help(&self) -> Option<String> {
        Some(match self {
            ConvertError::NoSource => "set `source` in the manifest".into(),
            ConvertError::NotCalibrated => {
                "convert with `Converter`, which makes it, or set `quant.feedback: none`".into()
            }
            ConvertError::NotPlanned => {
                "convert with `Converter`, which makes them, or leave the plan out".into()
            }
            ConvertError::LogitScore { positive, negative, .. } => {
                let alone = "take modules.json away to convert a model that generates text";
                match negative {
                    None => format!("a score by token {positive} alone isn't supported; {alone}"),
                    Some(negative) => format!(
                        "set `reranker: {{ positive: {positive}, negative: {negative}, prompt: … }}` with the prompt \
                         that the model was trained with, or {alone}"
                    ),
                }
            }
            ConvertError::QuantLayers { layers, .. } => {
                format!("ranges are [first, one past the last]; the last one ends with {layers} at most")
            }
            ConvertError::ScaleNotMeasured => {
                "convert with `Converter`, which measures it, or set the factor".into()
            }
            ConvertError::LayerTooLarge { megabytes, .. } => format!(
                "raise `shards.max_mb` to {} or more, quantize (`quant.weights: int8`), or put attention and feed-forward \
                 network into packages of their own (`shards.divide: attention_mlp`)",
                megabytes.ceil()
            ),
            ConvertError::ExpertsInside { layer, .. } => {
                format!("end a range of `shards.layers` with {}, or leave `experts` at packed", layer + 1)
            }
            ConvertError::HeadTooLarge { megabytes, .. } => {
                format!("raise `shards.max_mb` to {} or more", megabytes.ceil())
            }
            ConvertError::LayersDontTile { layers, .. } => {
                format!("ranges are [first, one past the last]; the last one ends with {layers}")
            }
            ConvertError::TooManyPieces { .. } => "ask for fewer pieces, or leave `lm_head.split` at auto".into(),
            ConvertError::ModelTooLarge { megabytes, .. } => format!(
                "raise `shards.max_mb` to {} or more, or leave `lm_head.split` at auto",
                megabytes.ceil()
            ),
            ConvertError::TopK { .. } => "ask for fewer, or leave `lm_head.top_k` out".into(),
            ConvertError::HeadOfText { .. } => "leave `lm_head` out".into(),
            ConvertError::NotABundle(_) => "choose another folder".into(),
            ConvertError::NotOurs(_) => "move it away, or choose another folder".into(),
            ConvertError::Busy(_) => "wait until it ends, or choose another folder".into(),
            ConvertError::Exists { .. } => "replace it with `force`, or choose another folder".into(),
            ConvertError::File(error) => return error.help(),
            ConvertError::Bundle(error) => return error.help(),
            ConvertError::Compiler { .. } => {
                "if the model converts with the newest anec and still isn't accepted, please report it with the manifest"
                    .into()
            }
            ConvertError::NoSingleToken => {
                "add it: `lengths: { range: [1, 4] }` or `lengths: { fixed: [1, 64] }`".into()
            }
            ConvertError::RecurrentContract { .. } => "leave `contract` out, and use `format: coreai`".into(),
            ConvertError::NoCompiler(_) => {
                "compile the bundle on a Mac that has Xcode or its command line tools".into()
            }
            ConvertError::Graph { .. } => "this is a defect of anec; please report it with the manifest".into(),
            ConvertError::SameToken { .. } => "the tokenizer is damaged; download it again".into(),
            ConvertError::EndToken { .. } => {
                "correct the configuration: a text would never end, or anywhere".into()
            }
            ConvertError::Vocabulary { .. } => "tokenizer and weights are of different models".into(),
        })
    }
}
