//! A bundle that is opened.

use std::sync::Arc;

use anec::Model;
use anec::bundle::Task;
use anec::coreml::ComputeUnits;
use anec::exec::Precision;
use anec::runtime::classify::bioes::Biases;
use anec::runtime::classify::redact::{Piece, Redactor};
use anec::runtime::{CpuOptions, Embedder, LoadedModel, Tokenizer, coreml};

use super::error::AnecError;
use super::session::AnecSession;

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, uniffi::Enum)]
pub enum AnecUnits {
    /// Core ML with the Neural Engine and the CPU, never the GPU: macOS 15, iOS 18 and later.
    NeuralEngine,
    /// Core ML with the GPU and the CPU.
    Gpu,
    /// Core ML with the CPU alone.
    CoreMlCpu,
    /// Core ML with whatever it likes best.
    Any,
    /// anec's own CPU executor, on any system.
    Executor,
}

impl AnecUnits {
    /// Those of Core ML; none for the executor.
    fn core_ml(self) -> Option<ComputeUnits> {
        match self {
            AnecUnits::NeuralEngine => Some(ComputeUnits::CpuAndNeuralEngine),
            AnecUnits::Gpu => Some(ComputeUnits::CpuAndGpu),
            AnecUnits::CoreMlCpu => Some(ComputeUnits::CpuOnly),
            AnecUnits::Any => Some(ComputeUnits::All),
            AnecUnits::Executor => None,
        }
    }

    /// The Neural Engine where there can be one.
    fn of_this_system() -> Self {
        if cfg!(target_vendor = "apple") { AnecUnits::NeuralEngine } else { AnecUnits::Executor }
    }
}

/// What a bundle says of itself.
#[derive(Clone, Debug, PartialEq, uniffi::Record)]
pub struct AnecModelInfo {
    /// Its name.
    pub name: String,
    /// The model's family, for example `qwen3`.
    pub family: String,
    /// What it is for: `text_generation`, `token_classification`, `text_embedding`, `sequence_classification`.
    pub task: String,
    /// Tokens of a text, at most: prompt and continuation.
    pub context: u64,
    /// Numbers of a text's vector; 0 where the model gives none.
    pub dimensions: u64,
    /// Bytes of weights in all packages.
    pub weight_bytes: u64,
    /// What computes.
    pub units: AnecUnits,
}

/// How long a first load takes. A range of what others published of several devices, not a measurement of this one: later
/// loads take what the system cached and are much shorter.
#[derive(Clone, Debug, PartialEq, uniffi::Record)]
pub struct PrewarmEstimate {
    /// Functions that are loaded, one after the other.
    pub functions: u64,
    /// Bytes of their weights.
    pub weight_bytes: u64,
    /// Seconds, at least.
    pub least_seconds: f64,
    /// Seconds, at most.
    pub most_seconds: f64,
}

/// Is told how far a first load is.
#[uniffi::export(with_foreign)]
pub trait PrewarmListener: Send + Sync {
    /// So many functions are loaded, of so many.
    ///
    /// # Errors
    /// When the app's code fails: the load goes on, the error is given when it is over.
    fn on_progress(&self, done: u64, total: u64) -> Result<(), AnecError>;
}

/// A span that was found in a text.
#[derive(Clone, Debug, PartialEq, Eq, uniffi::Record)]
pub struct LabelledSpan {
    /// Its kind, for example `private_person`.
    pub label: String,
    /// Where it begins, in bytes of the text as UTF-8.
    pub start: u64,
    /// Where it ends.
    pub end: u64,
}

/// A text without its private spans.
#[derive(Clone, Debug, PartialEq, Eq, uniffi::Record)]
pub struct RedactedText {
    /// The text, with `<KIND>` in place of each span.
    pub text: String,
    /// The spans, in order.
    pub spans: Vec<LabelledSpan>,
}

/// A bundle, ready to run. It can be used by several threads; sessions share its weights.
#[derive(uniffi::Object)]
pub struct AnecModel {
    model: Model,
    units: AnecUnits,
}

impl AnecModel {
    fn loaded(&self) -> &Arc<LoadedModel> {
        self.model.runtime()
    }

    fn tokenizer(&self) -> Result<Arc<Tokenizer>, AnecError> {
        match self.model.tokenizer() {
            Some(tokenizer) => Ok(tokenizer.clone()),
            // says why there is none
            None => Ok(Arc::new(
                Tokenizer::of(self.model.bundle(), self.loaded().folder()).map_err(anec::base::Error::from)?,
            )),
        }
    }
}

#[uniffi::export]
impl AnecModel {
    /// Opens the bundle in a folder. Weights aren't read yet: the first text does it, or `prewarm`.
    ///
    /// Without `units` it is the Neural Engine on systems of Apple's, and the executor elsewhere. `max_memory_bytes` limits the weights in
    /// memory: functions that were needed longest ago are let go for others.
    ///
    /// # Errors
    /// When there is no bundle, it contradicts itself, there is no Core ML, or a function has more weights than the limit.
    #[uniffi::constructor(default(units = None, max_memory_bytes = None))]
    pub fn open(path: String, units: Option<AnecUnits>, max_memory_bytes: Option<u64>) -> Result<Arc<Self>, AnecError> {
        let units = units.unwrap_or_else(AnecUnits::of_this_system);
        let loaded = match units.core_ml() {
            None => {
                let options = CpuOptions { max_memory_bytes, ..CpuOptions::to_write(Precision::F32) };
                LoadedModel::on_cpu_with(path.as_ref(), &options)?
            }
            Some(units) => coreml::open(path.as_ref(), units, max_memory_bytes)?,
        };
        Ok(Arc::new(AnecModel { model: Model::new(loaded)?, units }))
    }

    /// What the bundle says of itself.
    pub fn info(&self) -> AnecModelInfo {
        let bundle = self.model.bundle();
        let task = match bundle.model.task {
            Task::TextGeneration => "text_generation",
            Task::TokenClassification(_) => "token_classification",
            Task::TextEmbedding(_) => "text_embedding",
            Task::SequenceClassification(_) => "sequence_classification",
        };
        AnecModelInfo {
            name: bundle.name.clone(),
            family: bundle.family.clone(),
            task: task.to_owned(),
            context: self.loaded().context(),
            dimensions: Embedder::new(self.loaded(), None).map_or(0, |embedder| embedder.dimension() as u64),
            weight_bytes: bundle.packages.iter().map(|package| package.weight_bytes).sum(),
            units: self.units,
        }
    }

    /// How long `prewarm` takes on a device that has never loaded this bundle; nothing for the
    /// executor, which only maps files.
    pub fn prewarm_estimate(&self) -> Option<PrewarmEstimate> {
        self.units.core_ml()?;
        let load = self.loaded().first_load();
        let [least_seconds, most_seconds] = load.seconds();
        Some(PrewarmEstimate {
            functions: load.functions as u64,
            weight_bytes: load.weight_bytes,
            least_seconds,
            most_seconds,
        })
    }

    /// Loads what a text begins with, one function after the other: on a phone the compiler of the Neural Engine ends apps that
    /// load several at once. Takes seconds to minutes the first time; call it on a thread that may wait.
    ///
    /// # Errors
    /// When a function can't be loaded, or the listener fails.
    #[uniffi::method(default(listener = None))]
    pub fn prewarm(&self, listener: Option<Arc<dyn PrewarmListener>>) -> Result<(), AnecError> {
        let mut heard = Ok(());
        self.loaded().prepare(|done, total| {
            if let (Some(listener), Ok(())) = (&listener, &heard) {
                heard = listener.on_progress(done as u64, total as u64);
            }
        })?;
        heard
    }

    /// Begins a text, or a chat.
    pub fn session(&self) -> Arc<AnecSession> {
        Arc::new(AnecSession::new(self.model.session()))
    }

    /// Tokens of a text.
    ///
    /// # Errors
    /// When the bundle has no tokenizer.
    pub fn count_tokens(&self, text: String) -> Result<u64, AnecError> {
        let tokens = self.tokenizer()?.encode_literal(&text).map_err(anec::base::Error::from)?;
        Ok(tokens.len() as u64)
    }

    /// The vectors of texts.
    ///
    /// # Errors
    /// When the model gives none, or a text is empty or too long.
    pub fn embed(&self, texts: Vec<String>) -> Result<Vec<Vec<f32>>, AnecError> {
        let embedder = Embedder::new(self.loaded(), None)?;
        let tokenizer = self.tokenizer()?;
        let vector = |text: &String| -> anec::base::Result<Vec<f32>> {
            embedder.embed(&tokenizer.encode_whole(text, None, true)?)
        };
        Ok(texts.iter().map(vector).collect::<anec::base::Result<_>>()?)
    }

    /// Takes private spans out of a text of any length: in place of each stands its kind, `<PRIVATE_PERSON>`. `kinds` are those
    /// that are taken out; all if empty.
    ///
    /// # Errors
    /// When the model doesn't label tokens in spans, or has none of these kinds.
    #[uniffi::method(default(kinds = []))]
    pub fn redact(&self, text: String, kinds: Vec<String>) -> Result<RedactedText, AnecError> {
        let mut redactor = Redactor::new(self.loaded(), &kinds, Biases::default(), None)?;
        let names = redactor.scheme().kinds().to_vec();
        let (mut kept, mut spans) = (Vec::with_capacity(text.len()), Vec::new());
        let mut sink = |piece: Piece<'_>| {
            match piece {
                Piece::Kept(bytes) => kept.extend_from_slice(bytes),
                Piece::Span(span) => {
                    let label = names[span.kind].clone();
                    kept.extend_from_slice(format!("<{}>", label.to_uppercase()).as_bytes());
                    spans.push(LabelledSpan { label, start: span.range.start, end: span.range.end });
                }
            }
            Ok(())
        };
        redactor.push(text.as_bytes(), &mut sink)?;
        redactor.finish(&mut sink)?;
        // spans may begin or end within a character: bytes of a token
        Ok(RedactedText { text: String::from_utf8_lossy(&kept).into_owned(), spans })
    }
}
