//! Options that name a model: manifest, source, overrides.

use std::ffi::OsString;
use std::path::Path;

use clap::Args;

use super::demo_model;
use super::model::builtin_model;
use super::usage::UsageError;

use anec::base::Result;
use anec::manifest::{Manifest, builtin};

/// Model and manifest of a conversion.
#[derive(Clone, Debug, Default, Args)]
pub struct Input {
    /// Model: what --source takes, or what --manifest takes
    #[arg(conflicts_with_all = ["manifest", "source"])]
    model: Option<OsString>,
    /// Manifest: a file, or a built-in one (`anec manifests` lists them)
    #[arg(short, long, value_name = "FILE")]
    manifest: Option<String>,
    /// Weights: .gguf, .safetensors, .bin, .onnx, a Hugging Face or onnxruntime-genai folder, or
    /// hf:owner/name[@revision][/file] [default: the manifest's]
    #[arg(short, long, value_name = "PATH")]
    source: Option<OsString>,
    /// Override a manifest key, for example quant.granularity=per_channel
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
}

impl Input {
    /// Reads the manifest, or starts from defaults, and applies the overrides and the source.
    ///
    /// # Errors
    /// If the manifest can't be read or is invalid.
    pub fn manifest(&self) -> Result<Manifest> {
        let named = self.model.as_ref().and_then(|model| model.to_str()).filter(|model| names_manifest(model));
        let source = self.source.as_ref().or(self.model.as_ref().filter(|_| named.is_none()));
        let mut manifest = match self.manifest.as_deref().or(named) {
            Some(name) => Manifest::open(name, &self.sets)?,
            None => Manifest::from_yaml("", "of the command line", &self.sets)?,
        };
        // the sources of the demos are built in and need no files
        let named =
            manifest.source.as_deref().filter(|_| source.is_none()).filter(|source| !Path::new(source).exists());
        if let Some(demo) = named.and_then(builtin::for_source).and_then(|found| demo_model::find(found.name)) {
            manifest.source = Some(demo.source()?.display().to_string());
        }
        if let Some(source) = source {
            let source = source.to_str().ok_or_else(|| {
                let problem = format!("{}: the path isn't UTF-8, and bundle.json records it", source.display());
                UsageError::new(problem, "rename it, or use a link with another name")
            })?;
            manifest.source = Some(source.to_owned());
        }
        Ok(manifest)
    }
}

/// Whether an argument names a manifest, a YAML file or a built-in one; all else is a source.
fn names_manifest(model: &str) -> bool {
    let extension = Path::new(model).extension();
    extension.is_some_and(|extension| extension == "yaml" || extension == "yml") || builtin_model(model).is_some()
}
