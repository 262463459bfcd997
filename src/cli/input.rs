//! What several verbs take: a manifest, a source, overrides.

use std::ffi::OsString;
use std::path::Path;

use clap::Args;

use super::demo_model;
use super::usage::UsageError;

use anec::base::Result;
use anec::manifest::{Manifest, builtin};

/// Which model, and how it is converted.
#[derive(Clone, Debug, Default, Args)]
pub struct Input {
    /// Manifest: a file, or the name of a built-in one (`anec manifests` lists them)
    #[arg(short, long, value_name = "FILE")]
    manifest: Option<String>,
    /// Source of the weights: .gguf, .safetensors, .onnx, a folder of Hugging Face or onnxruntime-genai, or
    /// hf:owner/name[@revision][/file]; the manifest's if not given
    #[arg(short, long, value_name = "PATH")]
    source: Option<OsString>,
    /// Overrides a key of the manifest, for example quant.granularity=per_channel
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
}

impl Input {
    /// The manifest: the file's, or defaults, with overrides and source.
    ///
    /// # Errors
    /// When it isn't there or is wrong.
    pub fn manifest(&self) -> Result<Manifest> {
        let mut manifest = match &self.manifest {
            Some(name) => Manifest::open(name, &self.sets)?,
            None => Manifest::from_yaml("", "of the command line", &self.sets)?,
        };
        // the model of this manifest is at hand wherever the program is
        let names_demo =
            builtin::find(demo_model::MANIFEST).is_ok_and(|b| manifest.source.as_deref() == Some(b.source()));
        if self.source.is_none() && names_demo && !manifest.source.as_ref().is_some_and(|path| Path::new(path).exists())
        {
            manifest.source = Some(demo_model::source()?.display().to_string());
        }
        if let Some(source) = &self.source {
            let source = source.to_str().ok_or_else(|| {
                let problem =
                    format!("--source {}: the path isn't UTF-8, and bundle.json names its source", source.display());
                UsageError::new(problem, "rename it, or give a link with another name")
            })?;
            manifest.source = Some(source.to_owned());
        }
        Ok(manifest)
    }
}
