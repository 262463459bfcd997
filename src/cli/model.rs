//! What verbs that run a bundle take: its folder, a precision, a backend; tokens or text.

use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueEnum};

use crate::error::Result;
use crate::exec::Precision;
use crate::runtime::{Model, RuntimeError, Tokenizer};

/// A bundle, and how it is run.
#[derive(Debug, Args)]
pub struct Runner {
    /// Folder of the bundle
    bundle: PathBuf,
    /// Precision of fp16 values on the CPU: computed in f32, or rounded to fp16 after every op, as on the Neural Engine
    #[arg(long, value_enum, default_value_t = PrecisionName::F32)]
    precision: PrecisionName,
    /// What runs it
    #[arg(long, value_enum, default_value_t = BackendName::Cpu)]
    backend: BackendName,
}

/// Precision of fp16 values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PrecisionName {
    /// Computed in f32
    F32,
    /// Rounded to fp16 after every op
    F16,
}

impl PrecisionName {
    /// As the executor has it.
    pub fn precision(self) -> Precision {
        match self {
            PrecisionName::F32 => Precision::F32,
            PrecisionName::F16 => Precision::F16,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            PrecisionName::F32 => "f32",
            PrecisionName::F16 => "f16",
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
    /// Opens the bundle.
    ///
    /// # Errors
    /// When there is none, it contradicts itself, or the backend isn't available.
    pub fn open(&self) -> Result<Arc<Model>> {
        match self.backend {
            BackendName::Cpu => Model::on_cpu(&self.bundle, self.precision.precision()),
            BackendName::Coreml => {
                let problem = "this build of anec runs bundles on the CPU only (--backend cpu)".to_owned();
                Err(RuntimeError::Backend { backend: "coreml", problem }.into())
            }
        }
    }

    /// What computes, for people.
    pub fn device(&self) -> String {
        match self.backend {
            BackendName::Cpu => format!("CPU ({})", self.precision()),
            BackendName::Coreml => "Core ML".into(),
        }
    }

    /// The precision's name.
    pub fn precision(&self) -> &'static str {
        self.precision.name()
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

impl Input {
    /// The tokens.
    ///
    /// # Errors
    /// When text is given and the bundle has no tokenizer.
    pub fn tokens(&self, model: &Model) -> Result<Vec<u32>> {
        match (&self.tokens, &self.prompt) {
            (Some(tokens), _) => Ok(tokens.clone()),
            (None, prompt) => {
                let tokenizer = Tokenizer::of(model.bundle(), model.folder())?;
                Ok(tokenizer.encode(prompt.as_deref().unwrap_or_default())?)
            }
        }
    }
}
