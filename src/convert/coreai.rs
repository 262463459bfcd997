//! The last step of a conversion to Core AI: the packages become one asset.

use std::path::Path;

use anec_base::{FileError, Progress, Result};
use anec_bundle::{Bundle, FileDigest, PackageEntry};
use anec_coreai::assemble::{self, Assembly};
use anec_coreai::lower::LoweringChoices;
use anec_coreai::{AssetMetadata, AssetOptions};
use anec_manifest::{Manifest, QuantOverride, WeightFormat};

/// Note about number formats that Core AI computes elsewhere than on the Neural Engine.
pub(super) fn note(manifest: &Manifest) -> Option<String> {
    let quant = &manifest.quant;
    let is_int4 = |of: &QuantOverride| of.weights == Some(WeightFormat::Int4);
    let overridden = quant.overrides.values().chain(quant.layers.iter().flat_map(|layers| layers.overrides.values()));
    let int4 = quant.weights == WeightFormat::Int4 || overridden.into_iter().any(is_int4);
    (int4 && !manifest.format.is_coreml()).then(|| {
        "Core AI computes int4 weights on the GPU only (apple/coreai-torch#55); palettes reach the Neural Engine".into()
    })
}

/// Lowers the packages of a bundle to one asset.
///
/// # Errors
/// When Core AI can't express a program, or a package can't be read.
pub(super) fn assemble(bundle: &Bundle, folder: &Path) -> Result<Assembly> {
    assemble::assemble(bundle, folder, &asset_name(&bundle.name), LoweringChoices::default())
}

/// Name of the asset of a bundle.
pub fn asset_name(bundle: &str) -> String {
    format!("{bundle}.aimodel")
}

/// Writes the asset of a bundle beside its packages, and removes them. A run that is killed here resumes with
/// the packages that are there.
///
/// # Errors
/// When the system refuses.
pub(super) fn link(assembly: Assembly, bundle: &Bundle, folder: &Path, progress: &Progress) -> Result<Bundle> {
    let asset = asset_name(&bundle.name);
    progress.stage(&asset);
    let mut options = AssetOptions::default();
    options.replace = true;
    options.metadata = AssetMetadata { description: bundle.name.clone(), ..Default::default() };
    let written = anec_coreai::write(&assembly.module, &folder.join(&asset), &options)?;
    let in_bundle = |file: &anec_package::WrittenFile| FileDigest {
        file: format!("{asset}/{}", file.path),
        bytes: file.bytes,
        digest: file.digest.clone(),
    };
    let files = written.files.iter().map(in_bundle).collect();
    let entry = PackageEntry { package: asset.clone(), compiled: None, weight_bytes: written.weight_bytes, files };
    let linked = assembly.in_bundle(bundle, entry);
    // it maps the packages
    drop(assembly);
    for package in &bundle.packages {
        let path = folder.join(&package.package);
        std::fs::remove_dir_all(&path).map_err(FileError::of(&path, "remove"))?;
    }
    Ok(linked)
}
