//! Opened bundle.

use std::sync::Arc;

use anec::Model;
use anec::bundle::Task;
use anec::coreml::plan::ComputeUnits;
use anec::exec::Precision;
use anec::runtime::classify::bioes::Biases;
use anec::runtime::classify::redact::{Redactor, Span};
use anec::runtime::encode::Embedder;
use anec::runtime::{CpuOptions, LoadedModel, Tokenizer, coreml};

use super::error::AnecError;
use super::session::AnecSession;

/// Compute units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, uniffi::Enum)]
pub enum AnecUnits {
    /// Core ML with the Neural Engine and the CPU, never the GPU: macOS 15, iOS 18 and later.
    NeuralEngine,
    /// Core ML with the GPU and the CPU.
    Gpu,
    /// Core ML with the CPU alone.
    CoreMlCpu,
    /// Core ML with the units of its choice.
    Any,
    /// CPU executor of anec, on any system.
    Executor,
}

impl AnecUnits {
    /// Returns Core ML's units; `None` for the executor.
    fn core_ml(self) -> Option<ComputeUnits> {
        match self {
            AnecUnits::NeuralEngine => Some(ComputeUnits::CpuAndNeuralEngine),
            AnecUnits::Gpu => Some(ComputeUnits::CpuAndGpu),
            AnecUnits::CoreMlCpu => Some(ComputeUnits::CpuOnly),
            AnecUnits::Any => Some(ComputeUnits::All),
            AnecUnits::Executor => None,
        }
    }

    /// Returns the Neural Engine on Apple's systems, the executor elsewhere.
    fn of_this_system() -> Self {
        if cfg!(target_vendor = "apple") { AnecUnits::NeuralEngine } else { AnecUnits::Executor }
    }
}

/// Facts about a bundle.
#[derive(Clone, Debug, PartialEq, uniffi::Record)]
pub struct AnecModelInfo {
    /// Name of the bundle.
    pub name: String,
    /// Model family, for example `qwen3`.
    pub family: String,
    /// Task: `text_generation`, `token_classification`, `text_embedding`, `sequence_classification`.
    pub task: String,
    /// Maximum number of tokens of a text, prompt and continuation.
    pub context: u64,
    /// Dimensions of an embedding; 0 where the model gives none.
    pub dimensions: u64,
    /// Size of all packages' weights in bytes.
    pub weight_bytes: u64,
    /// Compute units.
    pub units: AnecUnits,
}

/// Duration of a first load: a range of published values of several devices, not a measurement of this one. Later loads
/// use the system's cache and are much shorter.
#[derive(Clone, Debug, PartialEq, uniffi::Record)]
pub struct PrewarmEstimate {
    /// Number of functions, loaded one after the other.
    pub functions: u64,
    /// Size of their weights in bytes.
    pub weight_bytes: u64,
    /// Minimum number of seconds.
    pub least_seconds: f64,
    /// Maximum number of seconds.
    pub most_seconds: f64,
}

/// Listener for the progress of a first load.
#[uniffi::export(with_foreign)]
pub trait PrewarmListener: Send + Sync {
    /// Receives the numbers of loaded and of all functions.
    ///
    /// # Errors
    /// If the app's code fails: loading continues, and the error is returned afterwards.
    fn on_progress(&self, done: u64, total: u64) -> Result<(), AnecError>;
}

/// Labelled span of a text.
#[derive(Clone, Debug, PartialEq, Eq, uniffi::Record)]
pub struct LabelledSpan {
    /// Kind of the span, for example `private_person`.
    pub label: String,
    /// Start offset in bytes of the text as UTF-8.
    pub start: u64,
    /// End offset in bytes.
    pub end: u64,
}

/// Text without its private spans.
#[derive(Clone, Debug, PartialEq, Eq, uniffi::Record)]
pub struct RedactedText {
    /// Text with `<KIND>` in place of each span.
    pub text: String,
    /// Spans, in order.
    pub spans: Vec<LabelledSpan>,
}

/// Bundle, ready to run. Several threads can use it; sessions share its weights.
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
            // returns the error why there is none
            None => Ok(Arc::new(
                Tokenizer::of(self.model.bundle(), self.loaded().folder()).map_err(anec::base::Error::from)?,
            )),
        }
    }
}

#[uniffi::export]
impl AnecModel {
    /// Opens the bundle in a folder. Weights are loaded by the first text or by `prewarm`.
    ///
    /// Without `units`, Apple's systems use the Neural Engine and others the executor. `max_memory_bytes` limits the
    /// weights in memory; the least recently used functions are evicted.
    ///
    /// # Errors
    /// If there is no bundle, it contradicts itself, there is no Core ML, or a function's weights exceed the limit.
    #[uniffi::constructor(default(units = None, max_memory_bytes = None))]
    pub fn open(path: String, units: Option<AnecUnits>, max_memory_bytes: Option<u64>) -> Result<Arc<Self>, AnecError> {
        let units = units.unwrap_or_else(AnecUnits::of_this_system);
        let loaded = match units.core_ml() {
            None => {
                let mut options = CpuOptions::to_write(Precision::F32);
                options.max_memory_bytes = max_memory_bytes;
                LoadedModel::on_cpu_with(path.as_ref(), &options)?
            }
            Some(units) => coreml::open(path.as_ref(), units, max_memory_bytes)?,
        };
        Ok(Arc::new(AnecModel { model: Model::new(loaded)?, units }))
    }

    /// Returns facts about the bundle.
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

    /// Returns the duration of `prewarm` on a device that has never loaded this bundle; `None` for the executor, which
    /// only maps files.
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

    /// Loads the functions that a text begins with, one after the other, because on a phone the Neural Engine's
    /// compiler ends apps that load several at once. Takes seconds to minutes the first time; call it on a background
    /// thread.
    ///
    /// # Errors
    /// If a function can't be loaded, or the listener fails.
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

    /// Returns the number of tokens of a text.
    ///
    /// # Errors
    /// If the bundle has no tokenizer.
    pub fn count_tokens(&self, text: String) -> Result<u64, AnecError> {
        let tokens = self.tokenizer()?.encode_literal(&text).map_err(anec::base::Error::from)?;
        Ok(tokens.len() as u64)
    }

    /// Returns the embeddings of texts.
    ///
    /// # Errors
    /// If the model gives none, or a text is empty or too long.
    pub fn embed(&self, texts: Vec<String>) -> Result<Vec<Vec<f32>>, AnecError> {
        let embedder = Embedder::new(self.loaded(), None)?;
        let tokenizer = self.tokenizer()?;
        let vector = |text: &String| -> anec::base::Result<Vec<f32>> {
            embedder.embed_prepared(&embedder.prepare(&tokenizer, text, None, true)?)
        };
        Ok(texts.iter().map(vector).collect::<anec::base::Result<_>>()?)
    }

    /// Removes private spans from a text of any length: each is replaced by its kind, `<PRIVATE_PERSON>`. `kinds`
    /// selects the kinds; all if empty.
    ///
    /// # Errors
    /// If the model doesn't label spans, or has none of these kinds.
    #[uniffi::method(default(kinds = []))]
    pub fn redact(&self, text: String, kinds: Vec<String>) -> Result<RedactedText, AnecError> {
        let redactor = Redactor::new(self.loaded(), &kinds, Biases::default(), None)?;
        let scheme = redactor.scheme().clone();
        let (text, spans) = redactor.redact(&text)?;
        let labelled = |span: Span| LabelledSpan {
            label: span.label(&scheme).to_owned(),
            start: span.range.start,
            end: span.range.end,
        };
        Ok(RedactedText { text, spans: spans.into_iter().map(labelled).collect() })
    }
}
