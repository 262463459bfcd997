//! ONNX models: a graph with its constants, and the bundle of onnxruntime-genai around it.
//!
//! A graph says more than the names of its weights: the purpose of each, and all of the maths. It is followed from the
//! logits, or an encoder's hidden states, back to the embedding. The result is a table of weights under the names of
//! transformers, decoded when they are read, and an [`OnnxDecoder`] with the model's structure, or an encoder's
//! configuration. Anything that isn't understood is refused.
//!
//! | module | contents |
//! |---|---|
//! | `crate::wire` | protocol buffers, read in place |
//! | `model` | messages of an ONNX file |
//! | `network` | a graph with its constants, also in external files |
//! | `blocks` | quantized matrices with a scale per block |
//! | `projection`, `norm`, `attention`, `embedding` | parts of a decoder, as graphs express them |
//! | `encoder` | encoders with BERT's layers |
//! | `stream` | shared types of these parts |
//! | `follow`, `assemble` | search for a decoder's parts, and their assembly |
//! | [`decoder`] | structure of a decoder |
//! | [`rope`] | rotary tables and the frequencies behind them |

mod assemble;
mod attention;
mod blocks;
pub mod decoder;
mod embedding;
mod encoder;
mod follow;
mod model;
mod network;
mod norm;
mod projection;
pub mod rope;
mod stream;

use std::path::{Component, Path, PathBuf};

use anec_base::FileError;

use serde_json::{Value as Json, json};

use super::Description;
use super::error::{Result, SourceError};
use super::file::read_json;
use super::hugging_face::{self, HuggingFaceFiles};
use super::tensor::SourceTensor;
use anec_base::MappedFile;
pub use decoder::OnnxDecoder;
use follow::Weights;
use network::Network;

/// Default file name of a model.
pub const MODEL: &str = "model.onnx";
/// File name of onnxruntime-genai's configuration.
pub const CONFIG: &str = "genai_config.json";
/// Default name of a decoder's output.
const LOGITS: &str = "logits";

/// Description of an ONNX bundle, beside the weights.
#[derive(Clone, Debug)]
pub struct OnnxBundle {
    /// Files shared with a Hugging Face folder. Their configuration, if there is one, is checked against the graph.
    pub files: HuggingFaceFiles,
    /// `genai_config.json`, if there is one.
    pub genai: Option<Json>,
    /// Name of the program that wrote the graph.
    pub producer: String,
    /// Version of ONNX's operators.
    pub opset: i64,
    /// Structure of the graph.
    pub decoder: OnnxDecoder,
}

/// Opened model.
#[derive(Debug)]
pub(super) struct Opened {
    /// Description of the model; that of an encoder has the configuration of the graph.
    pub description: Description,
    /// Weights.
    pub tensors: Vec<SourceTensor>,
    /// Paths of the files read.
    pub paths: Vec<PathBuf>,
}

/// Returns the model of a folder, if it has one: the file named by the configuration, `model.onnx`, or the only `.onnx`
/// file.
///
/// # Errors
/// Returns an error if there are several and none is named, or the named one doesn't exist.
pub(super) fn model_of(folder: &Path) -> Result<Option<PathBuf>> {
    let config_path = folder.join(CONFIG);
    if config_path.exists() {
        let config = read_json(&config_path)?;
        if let Some(name) = config.pointer("/model/decoder/filename") {
            let plain = name.as_str().filter(|name| {
                let mut parts = Path::new(name).components();
                matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
            });
            let problem = format!("it is {name}, expected the name of a file in the same folder");
            let name = plain.ok_or_else(|| SourceError::key(&config_path, "model.decoder.filename", problem))?;
            return Ok(Some(folder.join(name)));
        }
    }
    let mut models = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(FileError::of(folder, "list"))? {
        let path = entry.map_err(FileError::of(folder, "list"))?.path();
        if path.extension().is_some_and(|extension| extension == "onnx") {
            models.push(path);
        }
    }
    if let Some(model) = models.iter().find(|path| path.ends_with(MODEL)) {
        return Ok(Some(model.clone()));
    }
    if models.len() > 1 {
        let problem = format!("the folder has {} ONNX models and no {CONFIG} that names one", models.len());
        return Err(SourceError::file(folder, problem).advise("give the path of one of them as the source"));
    }
    Ok(models.pop())
}

/// Opens the model at `path` with the files beside it.
///
/// # Errors
/// Returns an error if a file is damaged, or the graph isn't a supported decoder.
pub(super) fn open(path: &Path) -> Result<Opened> {
    let folder = path.parent().unwrap_or(Path::new(""));
    let mut files = HuggingFaceFiles::read(folder)?;
    let config_path = folder.join(CONFIG);
    let genai = match config_path.exists() {
        true => Some(read_json(&config_path)?),
        false => None,
    };
    if let (Some(config), None) = (&genai, &files.generation_config) {
        files.generation_config = generation_config(config);
    }
    let network = Network::open(crate::file::map(path)?)?;
    let (description, tensors) = if is_encoder(&network, genai.as_ref()) {
        let (config, weights) = network.encoder()?;
        files.config = Some(encoder_config(&folder.join("config.json"), files.config.take(), config)?);
        (Description::HuggingFace(Box::new(files)), tensors(&network, weights))
    } else {
        let (decoder, weights) = decoder(&network, genai.as_ref())?;
        if let Some(config) = &genai {
            check(&config_path, config, &decoder)?;
        }
        let (producer, opset) = (network.producer_name().to_owned(), network.opset());
        let bundle = OnnxBundle { files, genai, producer, opset, decoder };
        (Description::Onnx(Box::new(bundle)), tensors(&network, weights))
    };
    let beside = hugging_face::files_beside().chain([CONFIG]).map(|name| folder.join(name));
    let paths =
        [path.to_owned()].into_iter().chain(network.external_files()).chain(beside.filter(|path| path.exists()));
    let paths = paths.collect();
    Ok(Opened { description, tensors, paths })
}

/// Whether a graph looks at whole texts: a decoder has caches.
fn is_encoder(network: &Network, genai: Option<&Json>) -> bool {
    let graph = network.graph();
    let has_caches = graph.nodes.iter().any(|node| node.is_contrib("GroupQueryAttention"))
        || graph.inputs.iter().any(|input| input.starts_with("past"));
    genai.is_none() && !has_caches && graph.inputs.iter().any(|input| input == "input_ids")
}

/// Returns the configuration of an encoder's graph. Where a file says the same, it must agree.
fn encoder_config(path: &Path, file: Option<Json>, mut config: Json) -> Result<Json> {
    let file = file.unwrap_or_default();
    let of_head = ["model_type", "architectures", "num_labels"];
    for (key, of_graph) in config.as_object().into_iter().flatten().filter(|(key, _)| !of_head.contains(&key.as_str()))
    {
        let differs = match (file.get(key).map(|found| (found, found.as_f64())), of_graph.as_f64()) {
            (None | Some((Json::Null, _)), _) => false,
            // graphs hold single precision
            (Some((_, Some(found))), Some(of_graph)) => (found - of_graph).abs() > 1e-6 * of_graph.abs(),
            (Some((found, _)), _) => found != of_graph && !of_graph.is_null(),
        };
        if differs {
            let problem = format!("it is {}, but the graph has {of_graph}", file[key]);
            return Err(SourceError::key(path, key, problem)
                .advise("the configuration is another model's; get both from the same place"));
        }
    }
    // a graph has as many labels as it has, but not their names
    let labels = config.get("num_labels").and_then(Json::as_u64);
    let names = file.get("id2label").filter(|names| names.as_object().map(|names| names.len() as u64) == labels);
    if let Some(names) = names {
        config["id2label"] = names.clone();
    }
    Ok(config)
}

/// Returns the decoder and weights of an ONNX file.
///
/// # Errors
/// Returns an error if the file is damaged or isn't a supported decoder.
pub fn parse(file: MappedFile) -> Result<(OnnxDecoder, Vec<SourceTensor>)> {
    let network = Network::open(file)?;
    let (decoder, weights) = decoder(&network, None)?;
    Ok((decoder, tensors(&network, weights)))
}

/// Returns the configuration and weights of the encoder in an ONNX file.
///
/// # Errors
/// Returns an error if the file is damaged or isn't a supported encoder.
pub fn parse_encoder(file: MappedFile) -> Result<(Json, Vec<SourceTensor>)> {
    let network = Network::open(file)?;
    let (config, weights) = network.encoder()?;
    Ok((config, tensors(&network, weights)))
}

fn tensors(network: &Network, weights: Weights) -> Vec<SourceTensor> {
    let tensor = |(name, constant): (String, network::Constant)| {
        SourceTensor::computed(name, constant.weight, constant.dtype, constant.bytes, network.path())
    };
    weights.into_iter().map(tensor).collect()
}

fn decoder(network: &Network, genai: Option<&Json>) -> Result<(OnnxDecoder, Weights)> {
    let name = |pointer: &str, default| {
        genai.and_then(|config| config.pointer(pointer)).and_then(Json::as_str).unwrap_or(default)
    };
    let logits = name("/model/decoder/outputs/logits", LOGITS);
    let input_ids = name("/model/decoder/inputs/input_ids", "input_ids");
    network.decoder(logits, input_ids)
}

/// Returns the part of onnxruntime-genai's configuration that belongs into `generation_config.json`.
fn generation_config(genai: &Json) -> Option<Json> {
    let model = genai.get("model")?;
    let ids = ["bos_token_id", "eos_token_id", "pad_token_id"];
    let ids = ids.iter().filter_map(|key| Some(((*key).to_owned(), model.get(*key)?.clone())));
    Some(Json::Object(ids.filter(|(_, id)| !id.is_null()).collect()))
}

/// Checks onnxruntime-genai's configuration against the graph.
fn check(path: &Path, config: &Json, decoder: &OnnxDecoder) -> Result<()> {
    let first = decoder.layers.first();
    let layer = |of: fn(&decoder::OnnxLayer) -> u64| first.map_or(0, of);
    for (key, of_graph) in [
        ("hidden_size", decoder.hidden_size),
        ("num_hidden_layers", decoder.layers.len() as u64),
        ("num_attention_heads", layer(|layer| layer.heads)),
        ("num_key_value_heads", layer(|layer| layer.key_value_heads)),
        ("head_size", layer(|layer| layer.head_dim)),
    ] {
        if let Some(found) = config["model"]["decoder"].get(key).filter(|found| **found != json!(of_graph)) {
            let problem = format!("it is {found}, but the graph has {of_graph}");
            return Err(SourceError::key(path, &format!("model.decoder.{key}"), problem)
                .advise("the configuration is another model's; get both from the same place"));
        }
    }
    let vocab_size = config["model"].get("vocab_size").and_then(Json::as_u64);
    if let Some(found) = vocab_size.filter(|found| *found > decoder.vocab_size) {
        let problem = format!("it is {found}, but the embedding of the graph has {} rows", decoder.vocab_size);
        return Err(SourceError::key(path, "model.vocab_size", problem));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
