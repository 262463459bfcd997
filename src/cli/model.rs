//! Options of verbs that run a bundle: folder, precision, backend; prompts and token ids.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};

use super::usage::{CachedBundleError, UsageError};
use super::{demo_model, progress};

use anec::base::{Fault, Result};
use anec::coreai::bridge::BridgeOptions;
use anec::coreml::plan::ComputeUnits;
use anec::exec::Precision;
use anec::manifest::{Manifest, builtin};
use anec::runtime::classify::bioes::Biases;
use anec::runtime::coreml::PhaseUnits;
use anec::runtime::{CachePrecision, CpuOptions, LoadedModel, Tokenizer, coreai, coreml};
use anec::source::hub;
use anec::validate::verdict;
use anec::{Bundle, BundleCache, Prompt};

/// Bundle and how to run it.
#[derive(Clone, Debug, Args)]
pub struct Runner {
    /// Bundle folder; or a model, converted once into the cache: .gguf, .onnx, a Hugging Face folder,
    /// hf:owner/name[@revision][/file], or a built-in manifest
    #[arg(value_name = "MODEL")]
    bundle: PathBuf,
    /// Precision on the CPU: f32; i16 (16-bit activations); i8 (8-bit ones: fastest prefill, less exact); f16 (rounded
    /// after every op); ane (simulates the Neural Engine); ane-without-EFFECT+EFFECT
    #[arg(long, value_name = "NAME", default_value_t = Precision::F32)]
    precision: Precision,
    /// Precision of the KV cache on the CPU: f32, or f16 (half the memory, faster for long texts)
    #[arg(long, value_name = "NAME", default_value_t = CachePrecision::F32)]
    cache_precision: CachePrecision,
    #[command(flatten)]
    backend: Backend,
    /// Core ML's devices for decode, if others than for prefill; states are copied once
    #[arg(long, value_enum, value_name = "UNITS")]
    decode_units: Option<ComputeUnits>,
    /// Limit for loaded weights in MB (10^6 bytes): the least recently used functions are unloaded (on Core ML, each
    /// function has its own copy)
    #[arg(long, value_name = "N", value_parser = megabytes)]
    max_memory_mb: Option<u64>,
}

/// Default precision of verbs that generate text: the fastest that is as exact as fp16 activations.
pub const TEXT_PRECISION: fn(clap::Arg) -> clap::Arg = |precision| precision.default_value("i16");

/// Parses a number of megabytes into bytes.
fn megabytes(text: &str) -> Result<u64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    number.map(|number| (number * 1e6) as u64).ok_or_else(|| "expected a number of megabytes above 0".into())
}

/// Options of the backend.
#[derive(Clone, Debug, Args)]
pub struct Backend {
    /// Backend
    #[arg(long, value_enum, value_name = "NAME", default_value_t = BackendName::Cpu)]
    backend: BackendName,
    /// Devices of Core ML [default: cpu-and-neural-engine], or what Core AI prefers on a Mac
    #[arg(long, value_enum, value_name = "UNITS")]
    compute_units: Option<ComputeUnits>,
    /// Python with Apple's coreai-core, for --backend coreai [default: that of ANEC_PYTHON]
    #[arg(long, value_name = "FILE")]
    python: Option<PathBuf>,
}

impl Backend {
    /// Core ML's devices, or `None` for the CPU executor.
    ///
    /// # Errors
    /// If devices are given for the CPU executor.
    pub fn core_ml(&self) -> Result<Option<ComputeUnits>> {
        match (self.backend, self.compute_units) {
            (BackendName::Cpu, Some(_)) => {
                let problem = "--compute-units names devices of Core ML, but the backend is the CPU executor";
                Err(UsageError::new(problem, "add --backend coreml, or leave out --compute-units").into())
            }
            (BackendName::Cpu, None) | (BackendName::Coreai, _) => Ok(None),
            (BackendName::Coreml, units) => Ok(Some(units.unwrap_or(ComputeUnits::CpuAndNeuralEngine))),
        }
    }

    /// How Apple's Core AI runtime is started, where that is the backend.
    ///
    /// # Errors
    /// When a Python is named and it isn't; when devices are named where its runtime has the CPU only.
    pub fn core_ai(&self) -> Result<Option<BridgeOptions>> {
        match (self.backend, &self.python) {
            (BackendName::Coreai, python) => {
                let mut options = BridgeOptions::of_machine(python.clone());
                if self.compute_units.is_some() && !options.system {
                    let problem = "--compute-units names devices of a Mac, and Apple's runtime here has the CPU only";
                    return Err(UsageError::new(problem, "leave out --compute-units").into());
                }
                options.units = self.compute_units.and_then(preferred_kind).map(str::to_owned);
                Ok(Some(options))
            }
            (_, None) => Ok(None),
            (_, Some(_)) => {
                let problem = "--python names what runs Core AI, and another backend runs the bundle";
                Err(UsageError::new(problem, "add --backend coreai, or leave out --python").into())
            }
        }
    }
}

/// Kind of compute unit that Core AI shall prefer, as Apple's package names it; `None` leaves the choice to the system.
fn preferred_kind(units: ComputeUnits) -> Option<&'static str> {
    match units {
        ComputeUnits::CpuAndNeuralEngine => Some("neural_engine"),
        ComputeUnits::CpuOnly => Some("cpu_only"),
        ComputeUnits::CpuAndGpu => Some("gpu"),
        ComputeUnits::All => None,
    }
}

/// Backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendName {
    /// The CPU executor
    Cpu,
    /// Core ML, on a Mac
    Coreml,
    /// Core AI: the system's on a Mac with OS 27, the CPU runtime of Apple's coreai-core elsewhere
    Coreai,
}

impl Runner {
    /// Returns the same options for another bundle.
    pub fn another(&self, bundle: &Path) -> Runner {
        Runner { bundle: bundle.to_owned(), ..self.clone() }
    }

    /// State of the bundle's gates in one line, as `anec validate --record` left it.
    pub fn recorded_gates(&self) -> String {
        let state = self.folder().and_then(|folder| Ok(verdict::recorded_state(&Bundle::read(&folder)?, &folder)));
        state.unwrap_or_else(|_| "not recorded".to_owned())
    }

    /// Path of the bundle or model, as given.
    pub fn path(&self) -> &Path {
        &self.bundle
    }

    /// Precision for any package: the default of text generation is f32 here.
    pub fn exact_precision(&self) -> Precision {
        if matches!(self.precision, Precision::I16 | Precision::I8) { Precision::F32 } else { self.precision }
    }

    /// Opens the bundle without loading functions.
    ///
    /// # Errors
    /// If the bundle is missing or invalid, or the backend isn't available.
    pub fn open(&self) -> Result<Arc<LoadedModel>> {
        let (units, core_ai) = (self.units()?, self.backend.core_ai()?);
        let bundle = self.folder()?;
        self.open_in(&bundle, units, core_ai).map_err(|error| {
            let cached = Some(&bundle).filter(|bundle| **bundle != self.bundle).and_then(|bundle| bundle.file_name());
            match cached.filter(|_| error.fault() == Fault::Source) {
                Some(name) => CachedBundleError { error, name: name.to_string_lossy().into_owned() }.into(),
                None => error,
            }
        })
    }

    fn open_in(
        &self,
        bundle: &Path,
        units: Option<PhaseUnits>,
        core_ai: Option<BridgeOptions>,
    ) -> Result<Arc<LoadedModel>> {
        let model = match (units, &core_ai) {
            (None, Some(options)) => coreai::open(bundle, options)?,
            (None, None) => {
                let mut options = CpuOptions::new(self.precision);
                options.caches = self.cache_precision;
                options.max_memory_bytes = self.max_memory_mb;
                // other precisions are compared with validation, which uses the bundle's calls
                options.wide_calls = matches!(self.precision, Precision::I16 | Precision::I8);
                LoadedModel::on_cpu_with(bundle, &options)?
            }
            (Some(units), _) => coreml::open(bundle, units, self.max_memory_mb)?,
        };
        if let Some(units) = units {
            // report the devices that were chosen
            eprintln!("Core ML with {units}");
        }
        let needed = model.weights_of_a_token();
        if self.max_memory_mb.is_some_and(|limit| limit < needed) {
            let needed = needed as f64 / 1e6;
            eprintln!("warning: a token needs {needed:.1} MB of weights: functions are reloaded for every token");
        }
        Ok(model)
    }

    /// Core ML's devices for each phase, or `None` for the CPU executor.
    fn units(&self) -> Result<Option<PhaseUnits>> {
        match (self.backend.core_ml()?, self.decode_units) {
            (None, Some(_)) => {
                let problem = "--decode-units names devices of Core ML, but the backend is the CPU executor";
                Err(UsageError::new(problem, "add --backend coreml, or leave out --decode-units").into())
            }
            (units, writing) => Ok(units.map(|prompt| PhaseUnits { prompt, writing: writing.unwrap_or(prompt) })),
        }
    }

    /// Folder of the bundle. A model name is looked up in the cache and converted on a miss.
    fn folder(&self) -> Result<PathBuf> {
        let named = self.bundle.to_str().filter(|_| !self.bundle.exists()).unwrap_or_default();
        let found = self.bundle.to_str().and_then(builtin_model);
        if found.is_none() && !named.starts_with(hub::PREFIX) && !is_model(&self.bundle) {
            return Ok(self.bundle.clone());
        }
        let cache = BundleCache::from_env()?;
        let bar = progress::bytes();
        let folder = match found {
            Some(found) if let Some(demo) = demo_model::find(found.name) => {
                let manifest = Manifest { source: Some(demo.source()?.display().to_string()), ..demo.manifest()? };
                cache.converted(found.name, "built-in", manifest, "its built-in manifest", &bar)
            }
            Some(found) => cache.of_hub(found.source(), &bar),
            None if named.is_empty() => cache.of_path(&self.bundle, &bar),
            None => cache.of_hub(named, &bar),
        };
        bar.finish();
        folder
    }

    /// Opens the bundle and loads the functions for a prompt, with a progress bar.
    ///
    /// # Errors
    /// Returns any error from [`Runner::open`], and if a function can't be loaded.
    pub fn load(&self) -> Result<Arc<LoadedModel>> {
        let model = self.open()?;
        if self.core_ml().is_some() {
            let bar = progress::counting("loading functions");
            model.prepare(|done, of| bar.set(done as u64, of as u64))?;
            bar.finish();
        }
        Ok(model)
    }

    fn core_ml(&self) -> Option<PhaseUnits> {
        self.units().ok().flatten()
    }

    /// Name of the precision, or of Core ML's units.
    pub fn precision(&self) -> String {
        match (self.core_ml(), self.cache_precision) {
            (None, _) if self.backend.backend == BackendName::Coreai => "coreai".into(),
            (Some(units), _) => units.to_string(),
            (None, CachePrecision::F32) => self.precision.to_string(),
            (None, caches) => format!("{}, caches in {caches}", self.precision),
        }
    }

    /// Name of the device, for messages.
    pub fn device(&self) -> String {
        match self.core_ml() {
            None if self.backend.backend == BackendName::Coreai => "Core AI".into(),
            None => format!("CPU ({})", self.precision()),
            Some(units) => format!("Core ML ({units})"),
        }
    }
}

/// Returns the built-in manifest of this name, unless it is the path of a bundle, a model or another file. Other
/// folders, such as one called `demo`, don't hide a manifest.
pub fn builtin_model(name: &str) -> Option<&'static builtin::Builtin> {
    let path = Path::new(name);
    let is_there = path.is_file() || path.join(anec::bundle::FILE_NAME).exists() || is_model(path);
    if is_there { None } else { builtin::find(name).ok() }
}

/// Returns whether a path holds a model to convert, rather than a bundle.
fn is_model(path: &Path) -> bool {
    let has = |path: &Path, known: &[&str]| path.extension().is_some_and(|own| known.iter().any(|known| own == *known));
    if !path.is_dir() {
        return path.is_file() && has(path, &["gguf", "onnx", "safetensors", "bin"]);
    }
    // a bundle has a safetensors file of its own
    let has_weights =
        || std::fs::read_dir(path).is_ok_and(|files| files.flatten().any(|file| has(&file.path(), &["gguf", "onnx"])));
    !path.join(anec::bundle::FILE_NAME).exists() && (path.join("config.json").is_file() || has_weights())
}

/// Options for labelling tokens.
#[derive(Debug, Args)]
pub struct Labels {
    /// Tokens of the largest call; doesn't change the labels [default: the largest function]
    #[arg(long, value_name = "T")]
    pub window: Option<u64>,
    /// viterbi_calibration.json with biases for more or fewer spans
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Operating point of the calibration
    #[arg(long, value_name = "NAME", default_value = "default", requires = "calibration")]
    operating_point: String,
}

impl Labels {
    /// Biases of the transitions between labels.
    ///
    /// # Errors
    /// If the calibration can't be read.
    pub fn biases(&self) -> Result<Biases> {
        Ok(match &self.calibration {
            None => Biases::default(),
            Some(path) => Biases::read(path, &self.operating_point)?,
        })
    }
}

/// Prompt or token ids.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct Input {
    /// Token ids
    #[arg(long, alias = "tokens", value_delimiter = ',', value_name = "ID,ID,…")]
    ids: Option<Vec<u32>>,
    /// Prompt
    #[arg(long, alias = "text", value_name = "TEXT")]
    prompt: Option<String>,
}

impl From<Input> for Prompt {
    fn from(input: Input) -> Self {
        match (input.ids, input.prompt) {
            (Some(ids), _) => Prompt::Tokens(ids),
            (None, prompt) => Prompt::Text(prompt.unwrap_or_default()),
        }
    }
}

impl Input {
    /// Prompt, if given.
    pub fn text(&self) -> Option<&str> {
        self.prompt.as_deref()
    }

    /// Token ids, given or of the prompt.
    ///
    /// # Errors
    /// If a prompt is given and the bundle has no tokenizer.
    pub fn tokens(&self, model: &LoadedModel) -> Result<Vec<u32>> {
        match (&self.ids, &self.prompt) {
            (Some(ids), _) => Ok(ids.clone()),
            (None, prompt) => {
                let tokenizer = Tokenizer::of(model.bundle(), model.folder())?;
                Ok(tokenizer.encode(prompt.as_deref().unwrap_or_default())?)
            }
        }
    }
}
