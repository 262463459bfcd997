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
use anec_mil::constant::Data;
use anec_mil::{Binding, Block, Opset, Program, codec};

/// Room that a package takes at least beside its large constants.
const SLACK: u64 = 1 << 16;

/// How a package is written.
#[derive(Default)]
pub struct WriteOptions<'a> {
    /// What the model says of itself.
    pub metadata: PackageMetadata,
    /// Whether to replace what is there; without it, that is an error.
    pub replace: bool,
    /// Whether the package appears under its name only once it is on the disk, which a power failure then leaves whole.
    /// A killed process doesn't need it, and waiting for the disk takes several times as long as writing.
    pub sync: bool,
    /// Told how far it has come, by any thread.
    pub progress: Option<&'a (dyn Fn(WriteProgress) + Sync)>,
}

/// A package that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenPackage {
    /// Its folder.
    pub path: PathBuf,
    /// Its files, in the order of their paths.
    pub files: Vec<WrittenFile>,
    /// Bytes of constants in the weight file, each counted once.
    pub weight_bytes: u64,
}

/// A file of a package that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenFile {
    /// Path below the package's folder, with `/`.
    pub path: String,
    /// Its size.
    pub bytes: u64,
    /// Digest of its content.
    pub digest: ContentDigest,
}

/// Writes a program as a package.
///
/// Equal programs give equal bytes: ids are derived from contents, and everything has an order. The package appears
/// under its name when it is complete; until then, and after a kill, there is only a hidden folder
/// beside it, which [`clean_partials`](super::clean_partials) removes. Constants are produced by the threads of rayon's
/// pool, at any number of them. Memory is bounded by that number times a few MB (or the largest granule of a content), and
/// what contents need themselves.
///
/// # Errors
/// A program that the format can't hold, a constant that can't be produced, or a system that refuses: nothing is left
/// behind then.
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
    // Small contents are written into the message itself, so all must be ready before it is made.
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

/// What must hold for the functions together; gives their opset.
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

/// Whether the description has the features itself instead of functions that have them.
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

/// Every content of a program.
fn contents(program: &Program) -> Preparation {
    fn of_block(block: &Block, out: &mut Preparation) {
        for op in &block.ops {
            let bound = op.inputs.values().flatten().filter_map(|binding| match binding {
                Binding::Constant(constant) => Some(constant),
                Binding::Value(_) => None,
            });
            for constant in bound.chain(op.attributes.values()) {
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
