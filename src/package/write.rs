//! Writing packages.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use coreml_proto::{Model, ModelDescription};

use super::blob::{Preparation, WeightPlan, WriteProgress};
use super::features::{self, SYMBOLS_KEY};
use super::files::{PartialFolder, check_space};
use super::manifest::{Manifest, PackageMetadata};
use super::{DATA, MODEL, PackageError, WEIGHT_FILE, WEIGHTS};
use anec_base::{ContentDigest, Result};
use anec_mil::{Block, Data, Opset, Program, codec};

/// Minimum size of a package beside its large constants, in bytes.
const SLACK: u64 = 1 << 16;

/// Settings for writing a package.
#[derive(Default)]
#[non_exhaustive]
pub struct WriteOptions<'a> {
    /// Metadata of the model.
    pub metadata: PackageMetadata,
    /// Whether to replace an existing package; otherwise its existence is an error.
    pub replace: bool,
    /// Whether to flush the package to disk before it gets its name, so that it survives a power failure whole. Killed
    /// processes don't need this, and flushing takes several times as long as writing.
    pub sync: bool,
    /// Progress callback, called from any thread.
    pub progress: Option<&'a (dyn Fn(WriteProgress) + Sync)>,
}

impl<'a> WriteOptions<'a> {
    /// Returns options that keep an existing package, don't flush and show no progress.
    pub fn new(metadata: PackageMetadata) -> Self {
        WriteOptions { metadata, ..Default::default() }
    }

    /// Sets whether to [`replace`](WriteOptions::replace) an existing package.
    pub fn replacing(self, replace: bool) -> Self {
        WriteOptions { replace, ..self }
    }

    /// Sets the callback for [`progress`](WriteOptions::progress).
    pub fn telling(self, progress: &'a (dyn Fn(WriteProgress) + Sync)) -> Self {
        WriteOptions { progress: Some(progress), ..self }
    }
}

/// Result of writing a package.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenPackage {
    /// Path of the package.
    pub path: PathBuf,
    /// Files, sorted by path.
    pub files: Vec<WrittenFile>,
    /// Size of the constants in the weight file, each counted once, in bytes.
    pub weight_bytes: u64,
}

/// File of a written package.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenFile {
    /// Path below the package's folder, with `/`.
    pub path: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Digest of the content.
    pub digest: ContentDigest,
}

/// Writes a program as a package.
///
/// Equal programs give equal bytes: ids are derived from contents, and everything is sorted. The package gets its name
/// when it is complete. Until then, or after a kill, there is only a hidden folder beside it, which
/// [`clean_partials`](super::clean_partials) removes. Constants are produced by the threads of rayon's pool. Memory is
/// bounded by the number of threads times a few MB (or the largest granule of a content), plus what contents need.
///
/// # Errors
/// Returns an error, leaving nothing behind, if the format can't hold the program, a constant can't be produced, or a
/// file can't be written.
pub fn write(program: &Program, path: &Path, options: &WriteOptions<'_>) -> Result<WrittenPackage> {
    if path.extension().is_none_or(|e| e != "mlpackage") {
        let problem = "a package's name ends in `.mlpackage`".into();
        return Err(PackageError::Name { path: path.to_owned(), problem }.into());
    }
    let opset = check(program)?;
    let quiet = |_| {};
    let progress = options.progress.unwrap_or(&quiet);

    let folder = PartialFolder::create(path, options.replace)?;
    let contents = contents(program);
    check_space(folder.path(), contents.bytes().saturating_add(SLACK))?;
    // small contents become part of the message, so that all contents must be ready first
    contents.prepare(progress)?;
    let mut plan = WeightPlan::new();
    let encoded = codec::encode(program, &mut plan)?;
    let model = Model {
        specification_version: opset.specification_version(),
        description: Some(description(program, &options.metadata)?),
        is_updatable: false,
        r#type: None,
    };
    let model = coreml_proto::encode_ml_program(&model, &encoded);
    drop(encoded);

    let mut files = Vec::new();
    let weights = if plan.is_empty() {
        None
    } else {
        let weights = folder.path().join(DATA).join(WEIGHTS);
        create_folder(&weights)?;
        let digest = plan.write(&weights.join(WEIGHT_FILE), progress)?;
        files.push(written(&format!("{DATA}/{WEIGHTS}/{WEIGHT_FILE}"), plan.size(), &digest));
        Some(digest)
    };
    let digest = blake3::hash(&model);
    write_file(&folder.path().join(DATA).join(MODEL), &model)?;
    files.push(written(&format!("{DATA}/{MODEL}"), model.len() as u64, &digest));
    let manifest = Manifest::new(digest.as_bytes(), weights.as_ref().map(blake3::Hash::as_bytes)).to_json();
    write_file(&folder.path().join("Manifest.json"), manifest.as_bytes())?;
    files.push(written("Manifest.json", manifest.len() as u64, &blake3::hash(manifest.as_bytes())));
    files.sort_by(|a, b| a.path.cmp(&b.path));
    folder.publish(options.sync)?;
    Ok(WrittenPackage { path: path.to_owned(), files, weight_bytes: plan.weight_bytes() })
}

/// Checks the functions together and returns their opset.
fn check(program: &Program) -> Result<Opset, PackageError> {
    let error = |problem: String| Err(PackageError::Program { problem });
    let Some(first) = program.functions.first() else { return error("there are no functions".into()) };
    if let Some(other) = program.functions.iter().find(|f| f.opset != first.opset) {
        return error(format!(
            "function `{}` is for {}, `{}` for {}; expected one opset",
            first.name,
            first.opset.name(),
            other.name,
            other.opset.name()
        ));
    }
    if program.function(&program.default_function).is_none() {
        return error(format!("the default function `{}` doesn't exist", program.default_function));
    }
    if !is_single(program) && first.opset < Opset::CoreMl8 {
        return error(format!(
            "before iOS18 there is one function, and it is called `main`; found {} for {}",
            program.functions.iter().map(|f| format!("`{}`", f.name)).collect::<Vec<_>>().join(", "),
            first.opset.target()
        ));
    }
    Ok(first.opset)
}

/// Whether the description holds the features itself, without functions.
fn is_single(program: &Program) -> bool {
    program.functions.len() == 1 && program.functions[0].name == "main"
}

fn description(program: &Program, metadata: &PackageMetadata) -> Result<ModelDescription, PackageError> {
    let mut functions = program.functions.iter().map(features::describe).collect::<Result<Vec<_>, _>>()?;
    let symbols: BTreeMap<String, String> = program
        .functions
        .iter()
        .filter_map(|f| Some((format!("{SYMBOLS_KEY}{}", f.name), features::symbols_text(f)?)))
        .collect();
    let metadata = metadata.to_proto(symbols);
    if is_single(program)
        && let Some(main) = functions.pop()
    {
        let (input, output, state) = (main.input, main.output, main.state);
        return Ok(ModelDescription { input, output, state, metadata, ..Default::default() });
    }
    let default_function_name = program.default_function.clone();
    Ok(ModelDescription { functions, default_function_name, metadata, ..Default::default() })
}

/// Returns all contents of a program.
fn contents(program: &Program) -> Preparation {
    fn of_block(block: &Block, out: &mut Preparation) {
        for op in &block.ops {
            for (_, constant) in op.constants() {
                if let Data::Content(content) = &constant.data {
                    out.add(content, &op.name);
                }
            }
            for inner in &op.blocks {
                of_block(inner, out);
            }
        }
    }
    let mut out = Preparation::default();
    for function in &program.functions {
        of_block(&function.block, &mut out);
    }
    out
}

fn create_folder(path: &Path) -> Result<(), PackageError> {
    fs::create_dir_all(path).map_err(|e| PackageError::write(path, "create the folder", e))
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<(), PackageError> {
    create_folder(path.parent().unwrap_or(path))?;
    let mut file = File::create_new(path).map_err(|e| PackageError::write(path, "create the file", e))?;
    file.write_all(bytes).map_err(|e| PackageError::write(path, "write", e))
}

fn written(path: &str, bytes: u64, digest: &blake3::Hash) -> WrittenFile {
    WrittenFile { path: path.to_owned(), bytes, digest: ContentDigest::blake3(digest) }
}

impl std::fmt::Debug for WriteOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WriteOptions")
            .field("metadata", &self.metadata)
            .field("replace", &self.replace)
            .field("sync", &self.sync)
            .finish_non_exhaustive()
    }
}
