//! The small model that is part of the program: its files, and what it has to compute.

use std::path::{Path, PathBuf};

use super::packed::Packed;
use anec::base::output::write_file;
use anec::base::{FileError, Result};
use anec::manifest::Manifest;
use anec::validate::{GatesReport, Golden};
use anec::{BundleCache, CacheError, Converter, Gate, Progress, Validator};

/// The built-in manifest that is for it.
pub(super) const MANIFEST: &str = "demo";

/// The model's files, built into the binary: the demo runs wherever the binary does.
const MODEL: [(&str, Packed); 5] = [
    ("config.json", Packed(include_bytes!(concat!(env!("OUT_DIR"), "/config.json")))),
    ("generation_config.json", Packed(include_bytes!(concat!(env!("OUT_DIR"), "/generation_config.json")))),
    ("tokenizer.json", Packed(include_bytes!(concat!(env!("OUT_DIR"), "/tokenizer.json")))),
    ("tokenizer_config.json", Packed(include_bytes!(concat!(env!("OUT_DIR"), "/tokenizer_config.json")))),
    ("model.safetensors", Packed(include_bytes!(concat!(env!("OUT_DIR"), "/model.safetensors")))),
];

/// What transformers computes from it.
const GOLDEN: Packed = Packed(include_bytes!(concat!(env!("OUT_DIR"), "/golden.safetensors")));

/// What the gates of form and of parity say of a bundle that was made of the model.
pub(super) fn validate(bundle: &Path) -> Result<GatesReport> {
    let path = Path::new("demo/golden.safetensors");
    let golden = Golden::from_bytes(path, &GOLDEN.unpack().map_err(FileError::of(path, "unpack"))?)?;
    let validator = Validator::new(bundle).gates([Gate::Structure, Gate::Parity]).golden_data(golden);
    Ok(validator.run()?.report)
}

/// Converts the model in a temporary folder and computes it: whether this program does on this machine what it is to do.
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

/// The folder of the model, in the user's cache; of this very model, whatever another build of the same version has.
pub(super) fn source() -> Result<PathBuf> {
    let sum = MODEL.iter().fold(0, |sum: u32, (_, file)| sum.rotate_left(1) ^ file.sum());
    let name = format!("{}-{sum:08x}", env!("CARGO_PKG_VERSION"));
    let cache = BundleCache::from_env()?;
    let folder = cache.folder().join("demo").join(name);
    let unwritable = |error| CacheError::Unwritable { folder: cache.folder().to_owned(), error };
    std::fs::create_dir_all(&folder).map_err(unwritable)?;
    unpack(&folder)?;
    Ok(folder)
}

/// Writes the model's files into a folder that lacks them, each whole or not at all.
pub(super) fn unpack(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(FileError::of(folder, "create"))?;
    for (name, packed) in MODEL {
        let path = folder.join(name);
        if std::fs::metadata(&path).map(|file| file.len()).ok() != Some(packed.len()) {
            write_file(&path, &packed.unpack().map_err(FileError::of(&path, "unpack"))?)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_unpacked_is_what_was_packed() {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo");
        for (name, packed) in MODEL {
            let bytes = std::fs::read(demo.join("model").join(name)).unwrap();
            assert!(packed.unpack().unwrap() == bytes && packed.len() == bytes.len() as u64, "{name}");
        }
        assert!(GOLDEN.unpack().unwrap() == std::fs::read(demo.join("golden.safetensors")).unwrap());
    }
}
