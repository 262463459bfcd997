//! What several verbs take: a manifest, a source, overrides.

use clap::Args;

use anec::base::Result;
use anec::manifest::Manifest;

/// Which model, and how it is converted.
#[derive(Clone, Debug, Default, Args)]
pub struct Input {
    /// Manifest: a file, or the name of a built-in one (`anec manifests` lists them)
    #[arg(short, long, value_name = "FILE")]
    manifest: Option<String>,
    /// Source of the weights: .gguf, .safetensors, .onnx, a folder of Hugging Face or onnxruntime-genai, or
    /// hf:owner/name[@revision][/file]; the manifest's if not given
    #[arg(short, long, value_name = "PATH")]
    source: Option<String>,
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
        if let Some(source) = &self.source {
            manifest.source = Some(source.clone());
        }
        Ok(manifest)
    }
}
