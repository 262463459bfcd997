//! Sources of weights. Every format is opened into the same [`Source`]: tensors by name, the model's configuration, and
//! the data of a tokenizer.
//!
//! ```
//! use anec_source::{Source, SourceKind, SourceWeight};
//!
//! let header = br#"{"w": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}}"#;
//! let mut file = (header.len() as u64).to_le_bytes().to_vec();
//! file.extend(header);
//! file.extend([1.0f32, -2.0].map(f32::to_le_bytes).concat());
//! let folder = tempfile::tempdir().unwrap();
//! let path = folder.path().join("model.safetensors");
//! std::fs::write(&path, file).unwrap();
//!
//! let source = Source::open_path(&path)?;
//! assert_eq!(source.kind(), SourceKind::Safetensors);
//! let weight = SourceWeight::from(source.tensor("w").unwrap().clone()).scale(0.5);
//! let mut values = [0.0; 2];
//! weight.read_rows(0, &mut values)?;
//! assert_eq!(values, [0.5, -1.0]);
//! # Ok::<(), anec_source::SourceError>(())
//! ```
//!
//! | module | contents |
//! |---|---|
//! | `tensor` | a handle to one tensor, decoded row by row on demand |
//! | `weight` | lazily evaluated expressions over tensors: slices, concatenations, permutations |
//! | `ledger` | record of the tensors that a model used |
//! | [`gguf`], [`safetensors`], [`pytorch`], [`onnx`], `hugging_face` | the formats |
//! | [`sentence_transformers`] | pooling and projections of hidden states |
//! | `adapter` | low-rank adapters, merged into the weights |
//! | [`hub`] | downloads of `hf:owner/name` |
//! | `dtype`, [`dequantize`] | element types and their decoding |
//!
//! Only metadata is held in memory: tensors stay in mapped files, and reads decode straight into the caller's buffer.

#![forbid(unsafe_code)]

mod adapter;
pub mod dequantize;
mod dtype;
mod error;
mod file;
pub mod gguf;
pub mod hub;
mod hugging_face;
mod ledger;
pub mod onnx;
pub mod orthogonal;
pub mod pytorch;
pub(crate) mod quantized;
mod random;
pub mod safetensors;
pub mod sentence_transformers;
mod tensor;
pub mod tokenizer;
mod weight;
mod wire;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anec_base::listing::list;
use anec_base::{FileError, Progress};

use serde_json::Value as Json;

pub use adapter::Adapter;
pub use anec_base::MappedFile;
pub use dtype::SourceDtype;
pub use error::{Result, SourceError};
pub use file::SourceFile;
pub use file::read_json;
pub use hugging_face::HuggingFaceFiles;
pub use ledger::Ledger;
use sentence_transformers::{LogitScore, SentenceTransformers};
pub use tensor::SourceTensor;
pub use weight::{RowOrder, SourceWeight, SquareMatrix, StoredIntegers, WeightExtent, ZeroPoints};

/// The format of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceKind {
    /// GGUF, in one file or several.
    Gguf,
    /// safetensors, with the files of a Hugging Face folder where they are.
    Safetensors,
    /// Checkpoint of PyTorch, with the files of a Hugging Face folder where they are.
    Pytorch,
    /// ONNX, with the files of onnxruntime-genai's bundle where they are.
    Onnx,
    /// Random numbers.
    Random,
    /// A published configuration and the shapes of its tensors, without weights.
    Shapes,
}

impl SourceKind {
    /// Name for people and for `bundle.json`.
    pub fn name(self) -> &'static str {
        match self {
            SourceKind::Gguf => "gguf",
            SourceKind::Safetensors => "safetensors",
            SourceKind::Pytorch => "pytorch",
            SourceKind::Onnx => "onnx",
            SourceKind::Random => "random",
            SourceKind::Shapes => "shapes",
        }
    }
}

/// Description of a source's model, beside the tensors.
#[derive(Clone, Debug)]
pub enum Description {
    /// The metadata of a GGUF file, the first of several.
    Gguf(gguf::GgufMetadata),
    /// The files of a Hugging Face folder.
    HuggingFace(Box<HuggingFaceFiles>),
    /// ONNX graph and the files around it.
    Onnx(Box<onnx::OnnxBundle>),
}

/// Format of the weights in a Hugging Face folder.
struct Weights {
    kind: SourceKind,
    /// File name of the weights of an unsharded model.
    single: &'static str,
    /// File name of the index of a sharded model.
    index: &'static str,
    read: fn(&Arc<MappedFile>) -> Result<Vec<SourceTensor>>,
}

const SAFETENSORS: Weights = Weights {
    kind: SourceKind::Safetensors,
    single: safetensors::SINGLE,
    index: safetensors::INDEX,
    read: safetensors::tensors,
};
const PYTORCH: Weights =
    Weights { kind: SourceKind::Pytorch, single: pytorch::SINGLE, index: pytorch::INDEX, read: pytorch::tensors };

impl Weights {
    fn tensors(&self, path: &Path) -> Result<Vec<SourceTensor>> {
        (self.read)(&Arc::new(file::map(path)?))
    }

    /// Returns the files of a sharded model and its tensors.
    fn shards(&self, folder: &Path, index_path: &Path) -> Result<(Vec<PathBuf>, Vec<SourceTensor>)> {
        let index = read_json(index_path)?;
        let mut paths = vec![index_path.to_owned()];
        let mut tensors = Vec::new();
        for (shard, expected) in safetensors::parse_index(index_path, &index)? {
            let path = folder.join(&shard);
            if !path.exists() {
                let problem = format!("shard {shard} is missing, which has {} of the tensors", expected.len());
                return Err(SourceError::file(index_path, problem).advise("download the whole model again"));
            }
            let of_shard = self.tensors(&path)?;
            safetensors::check_shard(index_path, &path, &expected, &of_shard)?;
            tensors.extend(of_shard);
            paths.push(path);
        }
        Ok((paths, tensors))
    }
}

/// Opened source.
#[derive(Debug)]
pub struct Source {
    name: String,
    kind: SourceKind,
    files: Vec<SourceFile>,
    tensors: BTreeMap<String, SourceTensor>,
    description: Description,
}

impl Source {
    /// Opens a source by name: a path (see [`Source::open_path`]), or `hf:owner/name[@revision][/file]`, which is
    /// downloaded into the Hugging Face cache if needed (see [`hub`]).
    ///
    /// # Errors
    /// Returns an error if the name is invalid, the download fails, or the files can't be opened.
    pub fn open(name: &str) -> Result<Self> {
        Self::open_observed(name, &Progress::hidden())
    }

    /// Opens a source as [`Source::open`] does and reports downloads to `progress`.
    ///
    /// # Errors
    /// Returns any error from [`Source::open`].
    pub fn open_observed(name: &str, progress: &Progress) -> Result<Self> {
        let path = match hub::Location::parse(name)? {
            Some(location) => hub::download(name, &location, progress)?,
            None => PathBuf::from(name),
        };
        let mut source = Self::open_path(&path)?;
        source.name = name.to_owned();
        Ok(source)
    }

    /// Opens a `.gguf` file (any part of a split model), a `.safetensors` or `.onnx` file, a checkpoint of PyTorch, or
    /// a folder: a Hugging Face folder, one of onnxruntime-genai, or one that holds a single GGUF model.
    ///
    /// # Errors
    /// Returns an error if the path doesn't exist or isn't a model, or if its content is damaged, unsupported or
    /// contradictory.
    pub fn open_path(path: &Path) -> Result<Self> {
        let is_folder = std::fs::metadata(path).map_err(FileError::of(path, "open"))?.is_dir();
        if is_folder {
            return Self::open_folder(path);
        }
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("gguf") => Self::open_gguf(path),
            Some("safetensors") => Self::open_weights(&SAFETENSORS, path),
            Some("onnx") => Self::open_onnx(path, path),
            _ => {
                // caches and downloads may lose extensions, so that the content decides
                let file = file::map(path)?;
                match file.bytes() {
                    bytes if bytes.starts_with(&gguf::MAGIC) => Self::open_gguf(path),
                    bytes if pytorch::is_checkpoint(bytes) => Self::open_weights(&PYTORCH, path),
                    _ => Err(not_a_source(path)),
                }
            }
        }
    }

    fn open_gguf(path: &Path) -> Result<Self> {
        let paths = gguf::split::paths(path)?;
        let files: Vec<Arc<MappedFile>> =
            paths.iter().map(|path| file::map(path).map(Arc::new)).collect::<Result<_>>()?;
        let headers: Vec<gguf::Header> =
            files.iter().map(|file| gguf::parse(file.path(), file.bytes())).collect::<Result<_>>()?;
        gguf::split::check(&headers.iter().collect::<Vec<_>>())?;
        let mut tensors = Vec::new();
        let mut metadata = None;
        for (file, header) in files.iter().zip(headers) {
            for info in header.tensors {
                tensors.push(SourceTensor::in_file(info.name, info.dtype, info.shape, file, info.range)?);
            }
            // later parts of a split model have no metadata except for the split
            metadata.get_or_insert(header.metadata);
        }
        let metadata = metadata.ok_or_else(|| not_a_source(path))?;
        Self::assemble(path, SourceKind::Gguf, paths, tensors, Description::Gguf(metadata))
    }

    fn open_weights(format: &Weights, path: &Path) -> Result<Self> {
        let folder = path.parent().unwrap_or(Path::new(""));
        let index_path = folder.join(format.index);
        let name = path.file_name().unwrap_or_default();
        if name != format.single && index_path.exists() {
            let index = read_json(&index_path)?;
            if safetensors::parse_index(&index_path, &index)?.keys().any(|shard| name == shard.as_str()) {
                let problem = format!("it is one shard of the model that {} describes", index_path.display());
                let advice = format!("give the folder, {}, as the source", folder.display());
                return Err(SourceError::file(path, problem).advise(advice));
            }
        }
        let tensors = format.tensors(path)?;
        Self::with_folder(format, path, folder, vec![path.to_owned()], tensors)
    }

    fn open_folder(folder: &Path) -> Result<Self> {
        for format in [&SAFETENSORS, &PYTORCH] {
            let single = folder.join(format.single);
            let index_path = folder.join(format.index);
            if single.exists() {
                let tensors = format.tensors(&single)?;
                return Self::with_folder(format, folder, folder, vec![single], tensors);
            }
            if index_path.exists() {
                let (paths, tensors) = format.shards(folder, &index_path)?;
                return Self::with_folder(format, folder, folder, paths, tensors);
            }
        }
        if let Some(path) = onnx::model_of(folder)? {
            return Self::open_onnx(folder, &path);
        }
        match only_gguf(folder)? {
            Some(path) => Self::open_gguf(&path),
            None => Err(not_a_source(folder)),
        }
    }

    /// Opens the ONNX model at `path`; `name` is the path as given.
    fn open_onnx(name: &Path, path: &Path) -> Result<Self> {
        let onnx::Opened { description, tensors, paths } = onnx::open(path)?;
        Self::assemble(name, SourceKind::Onnx, paths, tensors, description)
    }

    /// Opens weights with the files of `folder` beside them.
    fn with_folder(
        format: &Weights,
        path: &Path,
        folder: &Path,
        mut paths: Vec<PathBuf>,
        tensors: Vec<SourceTensor>,
    ) -> Result<Self> {
        let mut description = HuggingFaceFiles::read(folder)?;
        let tensors = match &mut description.config {
            Some(config) => quantized::dequantized(&folder.join("config.json"), config, tensors)?,
            None => tensors,
        };
        paths.extend(hugging_face::files_beside().map(|name| folder.join(name)).filter(|path| path.exists()));
        Self::assemble(path, format.kind, paths, tensors, Description::HuggingFace(Box::new(description)))
    }

    fn assemble(
        path: &Path,
        kind: SourceKind,
        paths: Vec<PathBuf>,
        tensors: Vec<SourceTensor>,
        description: Description,
    ) -> Result<Self> {
        let mut by_name = BTreeMap::new();
        for tensor in tensors {
            if let Some(other) = by_name.insert(tensor.name().to_owned(), tensor.clone()) {
                let problem = format!("it is also in {}", other.path().unwrap_or(path).display());
                return Err(SourceError::tensor(tensor.path().unwrap_or(path), tensor.name(), problem));
            }
        }
        let folder = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
        let maps = by_name.values().filter_map(SourceTensor::map).map(|map| (map.path(), map.clone()));
        let maps: HashMap<&Path, Arc<MappedFile>> = maps.collect();
        let file = |path: &PathBuf| Ok(SourceFile::new(path, folder)?.mapped(maps.get(&**path).cloned()));
        let mut files = paths.iter().map(file).collect::<Result<Vec<_>>>()?;
        files.sort_by(|a, b| (a.name(), a.path()).cmp(&(b.name(), b.path())));
        Ok(Source { name: path.display().to_string(), kind, files, tensors: by_name, description })
    }

    /// Returns a source without files: random tensors under a configuration, for tests and benchmarks.
    ///
    /// # Errors
    /// Returns an error if two tensors have the same name.
    pub fn random(name: &str, config: Json, tensors: Vec<SourceTensor>) -> Result<Self> {
        Self::without_files(name, SourceKind::Random, config, tensors)
    }

    /// Returns a source of which only configuration and shapes are known, which suffices to plan a conversion.
    ///
    /// # Errors
    /// Returns an error if two tensors have the same name.
    pub fn shapes(name: &str, config: Json, tensors: Vec<SourceTensor>) -> Result<Self> {
        Self::without_files(name, SourceKind::Shapes, config, tensors)
    }

    fn without_files(name: &str, kind: SourceKind, config: Json, tensors: Vec<SourceTensor>) -> Result<Self> {
        let files = HuggingFaceFiles { config: Some(config), ..Default::default() };
        let description = Description::HuggingFace(Box::new(files));
        Self::assemble(Path::new(name), kind, Vec::new(), tensors, description)
    }

    /// Name as given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Format of the source.
    pub fn kind(&self) -> SourceKind {
        self.kind
    }

    /// Returns the files of the source, by name.
    pub fn files(&self) -> &[SourceFile] {
        &self.files
    }

    /// Starts to digest the parts of files that are read and released, so that [`SourceFile::digest`] reads only the
    /// rest.
    pub fn digest_released(&self) {
        self.files.iter().for_each(SourceFile::digest_released);
    }

    /// Returns all tensors, sorted by name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &SourceTensor> {
        self.tensors.values()
    }

    /// Returns the tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&SourceTensor> {
        self.tensors.get(name)
    }

    /// Description of the model.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Returns the metadata of a GGUF source.
    pub fn gguf(&self) -> Option<&gguf::GgufMetadata> {
        match &self.description {
            Description::Gguf(metadata) => Some(metadata),
            Description::HuggingFace(_) | Description::Onnx(_) => None,
        }
    }

    /// Returns the files beside the weights, unless the source is GGUF.
    pub fn hugging_face(&self) -> Option<&HuggingFaceFiles> {
        match &self.description {
            Description::Gguf(_) => None,
            Description::HuggingFace(files) => Some(files),
            Description::Onnx(bundle) => Some(&bundle.files),
        }
    }

    /// Returns pooling and projections of hidden states, if the source describes any.
    ///
    /// # Errors
    /// Returns an error if the description is invalid or unsupported.
    pub fn sentence_transformers(&self) -> Result<Option<SentenceTransformers>> {
        match &self.description {
            Description::Gguf(metadata) => SentenceTransformers::of_gguf(metadata, |name| self.tensor(name)),
            Description::HuggingFace(files) => Ok(files.sentence_transformers.clone()),
            Description::Onnx(bundle) => Ok(bundle.files.sentence_transformers.clone()),
        }
    }

    /// Tokens whose logits score pairs of texts, as sentence-transformers names them.
    pub fn logit_score(&self) -> Option<LogitScore> {
        match &self.description {
            Description::HuggingFace(files) => files.logit_score,
            Description::Gguf(_) | Description::Onnx(_) => None,
        }
    }

    /// `config.json`, if there is one.
    pub fn config(&self) -> Option<&Json> {
        self.hugging_face()?.config.as_ref()
    }

    /// Returns the chat template, if there is one.
    ///
    /// # Errors
    /// Returns an error if its key holds another type.
    pub fn chat_template(&self) -> Result<Option<&str>> {
        self.named_chat_template(hugging_face::DEFAULT_TEMPLATE)
    }

    /// Returns the chat template for conversations with tools, if there is one.
    ///
    /// # Errors
    /// Returns an error if its key holds another type.
    pub fn tools_chat_template(&self) -> Result<Option<&str>> {
        self.named_chat_template(hugging_face::TOOLS_TEMPLATE)
    }

    fn named_chat_template(&self, name: &str) -> Result<Option<&str>> {
        match &self.description {
            Description::Gguf(metadata) if name == hugging_face::DEFAULT_TEMPLATE => {
                metadata.str("tokenizer.chat_template")
            }
            Description::Gguf(metadata) => metadata.str(&format!("tokenizer.chat_template.{name}")),
            Description::HuggingFace(files) => Ok(files.chat_templates.get(name).map(String::as_str)),
            Description::Onnx(bundle) => Ok(bundle.files.chat_templates.get(name).map(String::as_str)),
        }
    }
}

/// Returns the only GGUF model of a folder, if there is exactly one: a single file, or the first part of a split model.
fn only_gguf(folder: &Path) -> Result<Option<PathBuf>> {
    let mut models: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(FileError::of(folder, "list"))? {
        let path = entry.map_err(FileError::of(folder, "list"))?.path();
        let later_part = gguf::split::name_parts(&path).is_some_and(|(_, number, _)| number != 1);
        if path.extension().is_some_and(|extension| extension == "gguf") && !later_part {
            models.push(path);
        }
    }
    if models.len() > 1 {
        models.sort();
        let names = models.iter().filter_map(|path| path.file_name()?.to_str());
        let problem = format!("the folder has {} GGUF models: {}", models.len(), list(names));
        return Err(SourceError::file(folder, problem).advise("give the path of one of them as the source"));
    }
    Ok(models.pop())
}

fn not_a_source(path: &Path) -> SourceError {
    let problem = "this is neither GGUF, safetensors, ONNX nor a checkpoint of PyTorch, nor a folder that holds one";
    SourceError::file(path, problem).advise(format!(
        "a source is a .gguf, .safetensors, .onnx or .bin file, or a folder with {}, {}, {} or {}",
        safetensors::SINGLE,
        safetensors::INDEX,
        pytorch::SINGLE,
        onnx::MODEL
    ))
}

#[cfg(test)]
mod tests;
