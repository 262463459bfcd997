//! Errors of conversions.

use std::path::PathBuf;

use anec_base::{Diagnostic, Fault, FileError};
use anec_bundle::BundleError;

/// Why a conversion can't be planned or done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// Neither manifest nor command line names a source.
    #[error("no source: the manifest names none, and --source isn't given")]
    NoSource,
    /// The factor of the residual stream has to be measured first.
    #[error("`numerics.scale: auto` needs a run of the model, which has not been made")]
    ScaleNotMeasured,
    /// Codes have to be chosen by a run of the model first.
    #[error("`quant.feedback: gptq` needs a calibration, which has not been made")]
    NotCalibrated,
    /// Formats have to be chosen by measurement first.
    #[error("`quant.plan` needs measurements, which have not been made")]
    NotPlanned,
    /// Formats of layers that the model doesn't have.
    #[error("`quant.layers` goes on to layer {end}, but the model has {layers} layers")]
    QuantLayers {
        /// One past the last layer named.
        end: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// A layer is larger than a package may be.
    #[error("layer {layer} needs {megabytes:.1} MB of weights, more than the {limit} MB of `shards.max_mb`")]
    LayerTooLarge {
        /// The layer.
        layer: usize,
        /// Its weights in units of 1,000,000 bytes.
        megabytes: f64,
        /// The limit.
        limit: f64,
    },
    /// A package holds a layer whose experts are elsewhere, and layers after it.
    #[error("layers {first}..{end} go on after layer {layer}, whose experts are not in its package")]
    ExpertsInside {
        /// First layer of the package.
        first: usize,
        /// One past its last layer.
        end: usize,
        /// The layer with experts.
        layer: usize,
    },
    /// One row of the LM head is larger than a package may be.
    #[error("an LM-head piece of one row needs {megabytes:.3} MB, more than the {limit} MB of `shards.max_mb`")]
    HeadTooLarge {
        /// Bytes of one row and the final norm, in units of 1,000,000.
        megabytes: f64,
        /// The limit.
        limit: f64,
    },
    /// Explicit ranges that don't tile the model's layers.
    #[error("`shards.layers` ends at layer {end}, but the model has {layers} layers")]
    LayersDontTile {
        /// One past the last layer listed.
        end: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// More LM-head pieces than rows.
    #[error("`lm_head.split` asks for {pieces} pieces of an LM head of {rows} rows")]
    TooManyPieces {
        /// Pieces asked for.
        pieces: u64,
        /// Rows of the LM head.
        rows: u64,
    },
    /// Calls of a recurrent model that would have to be filled up.
    #[error(
        "`lengths` has no call of one token, which this model needs: its layers carry a state that fillers would change"
    )]
    NoSingleToken,
    /// A graph that breaks Core ML's rules: a defect of this crate.
    #[error("{package}: the graph breaks the rules of Core ML:\n{}", findings.join("\n"))]
    Graph {
        /// The package.
        package: String,
        /// What doesn't hold.
        findings: Vec<String>,
    },
    /// The tokenizer or a configuration names tokens that the model doesn't have.
    #[error("{place}: token {id} is beyond the model's vocabulary of {vocab_size}")]
    Vocabulary {
        /// Where the token is named.
        place: String,
        /// Its id.
        id: u64,
        /// Rows of embedding and LM head.
        vocab_size: u64,
    },
    /// A configuration's end tokens are none of the model's.
    #[error("{place}: `eos_token_id` is {found}, expected tokens of the model's vocabulary of {vocab_size}")]
    EndToken {
        /// The file.
        place: String,
        /// What it says.
        found: String,
        /// Rows of embedding and LM head.
        vocab_size: u64,
    },
    /// Two tokens of a tokenizer have one id.
    #[error("{place}: {:?} and {:?} are both token {id}", tokens[0], tokens[1])]
    SameToken {
        /// The file.
        place: String,
        /// The id.
        id: u64,
        /// The tokens.
        tokens: [String; 2],
    },
    /// The output folder holds something else.
    #[error("{} is there already and isn't a bundle", .0.display())]
    NotABundle(PathBuf),
    /// The output folder holds another bundle.
    #[error("{} holds a bundle of other inputs: {difference}", path.display())]
    Exists {
        /// The output folder.
        path: PathBuf,
        /// What differs.
        difference: String,
    },
    /// Something else is where the bundle would be made.
    #[error("{}: it is in the way, and no conversion of anec's made it", .0.display())]
    NotOurs(PathBuf),
    /// Another run makes the same bundle.
    #[error("{}: another conversion is at work there", .0.display())]
    Busy(PathBuf),
    /// The system refused a file.
    #[error(transparent)]
    File(#[from] FileError),
    /// A `bundle.json` that can't be used.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// Core ML's compiler refused a package.
    #[error("coremlcompiler refused {package} ({status}):\n{output}")]
    Compiler {
        /// The package.
        package: String,
        /// How it ended.
        status: String,
        /// What it said.
        output: String,
    },
    /// Core ML's compiler isn't here.
    #[error("Core ML's compiler isn't here: {0}")]
    NoCompiler(String),
}

impl ConvertError {}

impl Diagnostic for ConvertError {
    fn fault(&self) -> Fault {
        match self {
            ConvertError::NoSource
            | ConvertError::ScaleNotMeasured
            | ConvertError::NotCalibrated
            | ConvertError::NotPlanned
            | ConvertError::QuantLayers { .. }
            | ConvertError::LayerTooLarge { .. }
            | ConvertError::ExpertsInside { .. }
            | ConvertError::HeadTooLarge { .. }
            | ConvertError::LayersDontTile { .. }
            | ConvertError::TooManyPieces { .. }
            | ConvertError::NoSingleToken
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
            ConvertError::NoSource => "give --source PATH, or `source:` in the manifest".into(),
            ConvertError::NotCalibrated => {
                "`anec convert` makes it; a library caller uses `Converter`, or `quant.feedback: none`".into()
            }
            ConvertError::NotPlanned => {
                "`anec convert` makes them; a library caller uses `Converter`, or leaves the plan out".into()
            }
            ConvertError::QuantLayers { layers, .. } => {
                format!("ranges are [first, one past the last]; the last one ends with {layers} at most")
            }
            ConvertError::ScaleNotMeasured => {
                "`anec convert` measures it; a library caller gives the factor of `validate::numerics`".into()
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
            ConvertError::NotABundle(_) => "choose another folder with --out".into(),
            ConvertError::NotOurs(_) => "move it away, or choose another folder with --out".into(),
            ConvertError::Busy(_) => "wait until it ends, or name another folder with --out".into(),
            ConvertError::Exists { .. } => "--force replaces it; --out names another folder".into(),
            ConvertError::File(error) => return error.help(),
            ConvertError::Bundle(error) => return error.help(),
            ConvertError::Compiler { .. } => {
                "if the model converts with the newest anec and still isn't accepted, please report it with the manifest"
                    .into()
            }
            ConvertError::NoSingleToken => {
                "add it: `lengths: { range: [1, 4] }` or `lengths: { fixed: [1, 64] }`".into()
            }
            ConvertError::NoCompiler(_) => {
                "run `anec compile BUNDLE` on a Mac that has Xcode or its command line tools".into()
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
