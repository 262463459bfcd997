//! The built-in demo model: its files and its golden.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use anec::base::output::write_file;
use anec::base::{FileError, Result};
use anec::manifest::Manifest;
use anec::validate::Golden;
use anec::validate::verdict::GatesReport;
use anec::{BundleCache, CacheError, Converter, Gate, Progress, Validator};

/// Built-in manifest of the model.
pub(super) const MANIFEST: &str = "demo";

/// Files of the model, built into the binary: name and contents.
const MODEL: [(&str, &[u8]); 5] = [
    ("config.json", include_bytes!("../../demo/model/config.json")),
    ("generation_config.json", include_bytes!("../../demo/model/generation_config.json")),
    ("tokenizer.json", include_bytes!("../../demo/model/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../demo/model/tokenizer_config.json")),
    ("model.safetensors", include_bytes!("../../demo/model/model.safetensors")),
];

/// Golden computed with transformers.
const GOLDEN: &[u8] = include_bytes!("../../demo/golden.safetensors");

/// Runs the structure and parity gates on a bundle of the model.
pub(super) fn validate(bundle: &Path) -> Result<GatesReport> {
    let path = Path::new("demo/golden.safetensors");
    let golden = Golden::from_bytes(path, GOLDEN)?;
    let validator = Validator::new(bundle).gates([Gate::Structure, Gate::Parity]).golden_data(golden);
    Ok(validator.run()?.report)
}

/// Converts the model in a temporary folder and runs the gates on it.
pub(super) fn self_check(progress: Progress) -> Result<GatesReport> {
    let folder = tempfile::tempdir().map_err(FileError::of(std::env::temp_dir(), "create a folder in"))?;
    let (source, out) = (folder.path().join("model"), folder.path().join("demo.anec"));
    unpack(&source)?;
    let manifest = Manifest::open("manifests/demo.yaml", &[])?;
    Converter::new(manifest)
        .source(source.display().to_string())
        .out(&out)
        .compile(false)
        .progress(progress)
        .convert()?;
    validate(&out)
}

/// Folder of the model in the user's cache; its name has a digest because builds of one version may differ.
pub(super) fn source() -> Result<PathBuf> {
    let digest = MODEL.iter().fold(Sha256::new(), |digest, (_, bytes)| digest.chain_update(bytes)).finalize();
    let name =
        format!("{}-{}", env!("CARGO_PKG_VERSION"), digest[..4].iter().map(|b| format!("{b:02x}")).collect::<String>());
    let cache = BundleCache::from_env()?;
    let folder = cache.folder().join("demo").join(name);
    let unwritable = |error| CacheError::Unwritable { folder: cache.folder().to_owned(), error };
    std::fs::create_dir_all(&folder).map_err(unwritable)?;
    unpack(&folder)?;
    Ok(folder)
}

/// Writes missing model files into a folder, each atomically.
pub(super) fn unpack(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(FileError::of(folder, "create"))?;
    for (name, bytes) in MODEL {
        let path = folder.join(name);
        if std::fs::metadata(&path).map(|file| file.len()).ok() != Some(bytes.len() as u64) {
            write_file(&path, bytes)?;
        }
    }
    Ok(())
}
