//! Core ML's compiler, `xcrun coremlcompiler`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anec_base::{FileError, Progress};

use super::error::ConvertError;
use super::files;
use anec_base::Result;
use anec_bundle::Bundle;

/// Core ML's compiler.
#[derive(Debug)]
pub struct Compiler {
    xcrun: PathBuf,
}

impl Compiler {
    /// Finds the compiler.
    ///
    /// # Errors
    /// [`ConvertError::NoCompiler`] with the reason if it isn't available.
    pub fn find() -> Result<Self, ConvertError> {
        let missing = |why: &str| ConvertError::NoCompiler(why.to_owned());
        let path = std::env::var_os("PATH").unwrap_or_default();
        let xcrun = std::env::split_paths(&path)
            .map(|folder| folder.join("xcrun"))
            .find(|file| file.is_file())
            .ok_or_else(|| missing("there is no xcrun on this machine"))?;
        let found = Command::new(&xcrun).args(["--find", "coremlcompiler"]).output();
        match found {
            Ok(output) if output.status.success() => Ok(Compiler { xcrun }),
            Ok(_) => Err(missing("xcrun finds no coremlcompiler; Xcode has one")),
            Err(error) => Err(missing(&format!("xcrun doesn't run: {error}"))),
        }
    }

    /// Compiles a package of `folder` next to it; returns the name of the compiled model.
    ///
    /// # Errors
    /// [`ConvertError::Compiler`] with the compiler's output.
    pub fn compile(&self, folder: &Path, package: &str) -> Result<String, ConvertError> {
        let stem = package.strip_suffix(".mlpackage").unwrap_or(package);
        let name = format!("{stem}.mlmodelc");
        let target = folder.join(&name);
        // the compiler writes a folder named after the package; compiling in a scratch folder keeps the result atomic
        let scratch = tempfile::Builder::new()
            .prefix(".compiling-")
            .tempdir_in(folder)
            .map_err(FileError::of(folder, "write to"))?;
        let output = Command::new(&self.xcrun)
            .args(["coremlcompiler", "compile"])
            .arg(folder.join(package))
            .arg(scratch.path())
            .output()
            .map_err(FileError::of(&self.xcrun, "run"))?;
        let compiled = scratch.path().join(&name);
        if !output.status.success() || !compiled.is_dir() {
            let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned());
            let text: Vec<_> = text.into_iter().filter(|t| !t.is_empty()).collect();
            return Err(ConvertError::Compiler {
                package: package.to_owned(),
                status: output.status.to_string(),
                output: text.join("\n"),
            });
        }
        if target.exists() {
            std::fs::remove_dir_all(&target).map_err(FileError::of(&target, "replace"))?;
        }
        std::fs::rename(&compiled, &target).map_err(FileError::of(&target, "rename"))?;
        Ok(name)
    }
}

/// Compiles the packages of an existing bundle and records them in its `bundle.json`.
///
/// # Errors
/// If the compiler isn't available or rejects a package.
pub fn compile_bundle(path: &Path, progress: &Progress) -> Result<Bundle> {
    let mut bundle = Bundle::read(path)?;
    let compiler = Compiler::find()?;
    for index in 0..bundle.packages.len() {
        let package = bundle.packages[index].package.clone();
        progress.stage(&format!("compiling {package}"));
        bundle.packages[index].compiled = Some(compiler.compile(path, &package)?);
        files::write_json(&path.join(anec_bundle::FILE_NAME), &bundle)?;
    }
    progress.finish();
    Ok(bundle)
}
