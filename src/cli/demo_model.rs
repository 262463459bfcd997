//! The built-in demo models: their files and goldens.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use anec::base::output::write_file;
use anec::base::{FileError, Result};
use anec::manifest::{Manifest, builtin};
use anec::validate::Golden;
use anec::validate::verdict::GatesReport;
use anec::{BundleCache, CacheError, Converter, Gate, Progress, Validator};

/// Model built into the binary.
pub(super) struct DemoModel {
    /// Name of its built-in manifest.
    pub name: &'static str,
    /// Name and contents of each file.
    files: &'static [(&'static str, &'static [u8])],
    /// Golden computed with transformers.
    golden: &'static [u8],
}

/// Language model.
pub(super) static LANGUAGE: DemoModel = DemoModel {
    name: "demo",
    files: &[
        ("config.json", include_bytes!("../../demo/model/config.json")),
        ("generation_config.json", include_bytes!("../../demo/model/generation_config.json")),
        ("tokenizer.json", include_bytes!("../../demo/model/tokenizer.json")),
        ("tokenizer_config.json", include_bytes!("../../demo/model/tokenizer_config.json")),
        ("model.safetensors", include_bytes!("../../demo/model/model.safetensors")),
    ],
    golden: include_bytes!("../../demo/golden.safetensors"),
};

/// Classifier of private spans.
pub(super) static REDACTION: DemoModel = DemoModel {
    name: "demo-redact",
    files: &[
        ("config.json", include_bytes!("../../demo/redact/model/config.json")),
        ("tokenizer.json", include_bytes!("../../demo/redact/model/tokenizer.json")),
        ("tokenizer_config.json", include_bytes!("../../demo/redact/model/tokenizer_config.json")),
        ("model.safetensors", include_bytes!("../../demo/redact/model/model.safetensors")),
    ],
    golden: include_bytes!("../../demo/redact/golden.safetensors"),
};

/// Finds a demo model by the name of its manifest.
pub(super) fn find(name: &str) -> Option<&'static DemoModel> {
    [&LANGUAGE, &REDACTION].into_iter().find(|model| model.name == name)
}

impl DemoModel {
    /// Built-in manifest.
    pub(super) fn manifest(&self) -> Result<Manifest> {
        Ok(Manifest::from_yaml(builtin::find(self.name)?.text, self.name, &[])?)
    }

    /// Runs the structure and parity gates on a bundle of the model.
    pub(super) fn validate(&self, bundle: &Path) -> Result<GatesReport> {
        let golden = Golden::from_bytes(Path::new("golden.safetensors"), self.golden)?;
        let validator = Validator::new(bundle).gates([Gate::Structure, Gate::Parity]).golden_data(golden);
        Ok(validator.run()?.report)
    }

    /// Converts the model in a temporary folder and runs the gates on it.
    pub(super) fn self_check(&self, progress: Progress) -> Result<GatesReport> {
        let folder = tempfile::tempdir().map_err(FileError::of(std::env::temp_dir(), "create a folder in"))?;
        let (source, out) = (folder.path().join("model"), folder.path().join("demo.anec"));
        self.unpack(&source)?;
        Converter::new(self.manifest()?)
            .source(source.display().to_string())
            .out(&out)
            .compile(false)
            .progress(progress)
            .convert()?;
        self.validate(&out)
    }

    /// Folder of the model in the user's cache; its name has a digest because builds of one version may differ.
    pub(super) fn source(&self) -> Result<PathBuf> {
        let digest = self.files.iter().fold(Sha256::new(), |digest, (_, bytes)| digest.chain_update(bytes)).finalize();
        let digest: String = digest[..4].iter().map(|byte| format!("{byte:02x}")).collect();
        let cache = BundleCache::from_env()?;
        let folder = cache.folder().join(self.name).join(format!("{}-{digest}", env!("CARGO_PKG_VERSION")));
        let unwritable = |error| CacheError::Unwritable { folder: cache.folder().to_owned(), error };
        std::fs::create_dir_all(&folder).map_err(unwritable)?;
        self.unpack(&folder)?;
        Ok(folder)
    }

    /// Writes missing model files into a folder, each atomically.
    pub(super) fn unpack(&self, folder: &Path) -> Result<()> {
        std::fs::create_dir_all(folder).map_err(FileError::of(folder, "create"))?;
        for (name, bytes) in self.files {
            let path = folder.join(name);
            if std::fs::metadata(&path).map(|file| file.len()).ok() != Some(bytes.len() as u64) {
                write_file(&path, bytes)?;
            }
        }
        Ok(())
    }
}
