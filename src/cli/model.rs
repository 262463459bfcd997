//! What verbs that run a bundle take: its folder, a precision, a backend; tokens or text.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};

use super::usage::UsageError;
use super::{demo_model, progress};

use anec::base::Result;
use anec::coreml::ComputeUnits;
use anec::exec::Precision;
use anec::manifest::{Manifest, builtin};
use anec::runtime::classify::bioes::Biases;
use anec::runtime::{CachePrecision, CpuOptions, LoadedModel, PhaseUnits, Tokenizer, coreml};
use anec::source::hub;
use anec::{BundleCache, Prompt};

/// A bundle, and how it is run.
#[derive(Clone, Debug, Args)]
pub struct Runner {
    /// Folder of the bundle; or a model: hf:owner/name[@revision][/file], or the name of a built-in manifest, which is converted
    /// once, into the cache
    bundle: PathBuf,
    /// Precision of fp16 values on the CPU: `f32`; `i16`, with activations of 16 bits in products with compressed weights and
    /// calls of up to 64 tokens where a function has a range, which is faster; `f16`, rounded after every op; `ane`, with the
    /// Neural Engine's arithmetic as far as it is published, a simulation; `ane-without-EFFECT+EFFECT`, without some of it
    #[arg(long, value_name = "NAME", default_value_t = Precision::F32)]
    precision: Precision,
    /// How keys and values are kept on the CPU: `f32`, as they were computed; `f16`, rounded as a device keeps them, which takes half of
    /// the memory, and less time for each token of a long text
    #[arg(long, value_name = "NAME", default_value_t = CachePrecision::F32)]
    cache_precision: CachePrecision,
    #[command(flatten)]
    backend: Backend,
    /// The devices that Core ML may use for tokens that are written one after the other, where these are others than for
    /// prompts; the states of a text are copied between them once
    #[arg(long, value_enum, value_name = "UNITS")]
    decode_units: Option<ComputeUnits>,
    /// Weights that functions may have in memory, in units of 1,000,000 bytes: those that were needed longest ago are let go
    /// for others. On Core ML each function has a copy of its own
    #[arg(long, value_name = "N", value_parser = megabytes)]
    max_memory_mb: Option<u64>,
}

/// The precision that verbs have which write texts, where none is named: the fastest of those that are as exact as fp16
/// activations are.
pub const TEXT_PRECISION: fn(clap::Arg) -> clap::Arg = |precision| precision.default_value("i16");

/// Bytes, of a number of megabytes.
fn megabytes(text: &str) -> Result<u64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    number.map(|number| (number * 1e6) as u64).ok_or_else(|| "expected a number of megabytes above 0".into())
}

/// What runs a bundle.
#[derive(Clone, Debug, Args)]
pub struct Backend {
    /// What runs it
    #[arg(long, value_enum, value_name = "NAME", default_value_t = BackendName::Cpu)]
    backend: BackendName,
    /// The devices that Core ML may use; cpu-and-neural-engine if not given
    #[arg(long, value_enum, value_name = "UNITS")]
    compute_units: Option<ComputeUnits>,
}

impl Backend {
    /// What Core ML may use, where that is the backend.
    ///
    /// # Errors
    /// When devices are named and it isn't.
    pub fn core_ml(&self) -> Result<Option<ComputeUnits>> {
        match (self.backend, self.compute_units) {
            (BackendName::Cpu, Some(_)) => {
                let problem = "--compute-units names devices of Core ML, and the CPU executor runs the bundle";
                Err(UsageError::new(problem, "add --backend coreml, or leave out --compute-units").into())
            }
            (BackendName::Cpu, None) => Ok(None),
            (BackendName::Coreml, units) => Ok(Some(units.unwrap_or(ComputeUnits::CpuAndNeuralEngine))),
        }
    }
}

/// A backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendName {
    /// The CPU executor
    Cpu,
    /// Core ML, on a Mac
    Coreml,
}

impl Runner {
    /// Another bundle, run the same way.
    pub fn another(&self, bundle: &Path) -> Runner {
        Runner { bundle: bundle.to_owned(), ..self.clone() }
    }

    /// Opens the bundle. Nothing is loaded yet.
    ///
    /// # Errors
    /// When there is none, it contradicts itself, or the backend isn't available.
    pub fn open(&self) -> Result<Arc<LoadedModel>> {
        let units = self.units()?;
        let bundle = self.folder()?;
        let model = match units {
            None => {
                let options = CpuOptions {
                    precision: self.precision,
                    caches: self.cache_precision,
                    max_memory_bytes: self.max_memory_mb,
                    // other precisions are compared with what makes the bundle's calls
                    wide_calls: self.precision == Precision::I16,
                };
                LoadedModel::on_cpu_with(&bundle, &options)?
            }
            Some(units) => coreml::open(&bundle, units, self.max_memory_mb)?,
        };
        if let Some(units) = units {
            // devices are never chosen silently
            eprintln!("Core ML with {units}");
        }
        let needed = model.weights_of_a_token();
        if self.max_memory_mb.is_some_and(|limit| limit < needed) {
            let needed = needed as f64 / 1e6;
            eprintln!("warning: a token needs {needed:.1} MB of weights: functions are loaded again for every one");
        }
        Ok(model)
    }

    /// The devices that Core ML may use, where that is the backend.
    fn units(&self) -> Result<Option<PhaseUnits>> {
        match (self.backend.core_ml()?, self.decode_units) {
            (None, Some(_)) => {
                let problem = "--decode-units names devices of Core ML, and the CPU executor runs the bundle";
                Err(UsageError::new(problem, "add --backend coreml, or leave out --decode-units").into())
            }
            (units, writing) => Ok(units.map(|prompt| PhaseUnits { prompt, writing: writing.unwrap_or(prompt) })),
        }
    }

    /// The bundle's folder: what is a model's name and no path is looked for in the cache, and converted if it isn't there.
    fn folder(&self) -> Result<PathBuf> {
        let Some(named) = self.bundle.to_str().filter(|_| !self.bundle.exists()) else {
            return Ok(self.bundle.clone());
        };
        let found = builtin::find(named).ok();
        if found.is_none() && !named.starts_with(hub::PREFIX) {
            return Ok(self.bundle.clone());
        }
        let cache = BundleCache::from_env()?;
        let bar = progress::bytes();
        let folder = match found {
            Some(found) if found.name == demo_model::MANIFEST => {
                let manifest = Manifest::from_yaml(found.text, found.name, &[])?;
                let manifest = Manifest { source: Some(demo_model::source()?.display().to_string()), ..manifest };
                cache.converted(found.name, "built-in", manifest, "its built-in manifest", &bar)
            }
            Some(found) => cache.of_hub(found.source(), &bar),
            None => cache.of_hub(named, &bar),
        };
        bar.finish();
        folder
    }

    /// Opens the bundle and loads what a text begins with, with a progress bar where that takes long.
    ///
    /// # Errors
    /// As [`Runner::open`], and when a function can't be loaded.
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

    /// How numbers are computed with and kept: the names of the precisions, or Core ML's units.
    pub fn precision(&self) -> String {
        match (self.core_ml(), self.cache_precision) {
            (Some(units), _) => units.to_string(),
            (None, CachePrecision::F32) => self.precision.to_string(),
            (None, caches) => format!("{}, caches in {caches}", self.precision),
        }
    }

    /// What computes, for people.
    pub fn device(&self) -> String {
        match self.core_ml() {
            None => format!("CPU ({})", self.precision()),
            Some(units) => format!("Core ML ({units})"),
        }
    }
}

/// How a text is labelled.
#[derive(Debug, Args)]
pub struct Labels {
    /// Tokens of the largest call; as many as the functions take if not given. The labels stay the same
    #[arg(long, value_name = "T")]
    pub window: Option<u64>,
    /// A viterbi_calibration.json, whose biases make for more or fewer spans
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// The operating point of the calibration
    #[arg(long, value_name = "NAME", default_value = "default", requires = "calibration")]
    operating_point: String,
}

impl Labels {
    /// What transitions between labels add.
    ///
    /// # Errors
    /// When the calibration can't be read.
    pub fn biases(&self) -> Result<Biases> {
        Ok(match &self.calibration {
            None => Biases::default(),
            Some(path) => Biases::read(path, &self.operating_point)?,
        })
    }
}

/// Tokens, or text that becomes tokens.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct Input {
    /// Token ids
    #[arg(long, value_delimiter = ',', value_name = "ID,ID,…")]
    tokens: Option<Vec<u32>>,
    /// Text
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
}

impl From<Input> for Prompt {
    fn from(input: Input) -> Self {
        match (input.tokens, input.prompt) {
            (Some(tokens), _) => Prompt::Tokens(tokens),
            (None, prompt) => Prompt::Text(prompt.unwrap_or_default()),
        }
    }
}

impl Input {
    /// The text, if that is what was given.
    pub fn text(&self) -> Option<&str> {
        self.prompt.as_deref()
    }

    /// The tokens.
    ///
    /// # Errors
    /// When text is given and the bundle has no tokenizer.
    pub fn tokens(&self, model: &LoadedModel) -> Result<Vec<u32>> {
        match (&self.tokens, &self.prompt) {
            (Some(tokens), _) => Ok(tokens.clone()),
            (None, prompt) => {
                let tokenizer = Tokenizer::of(model.bundle(), model.folder())?;
                Ok(tokenizer.encode(prompt.as_deref().unwrap_or_default())?)
            }
        }
    }
}
