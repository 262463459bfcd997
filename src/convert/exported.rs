//! Parts shared by exports to other runtimes: a bundle's functions with adapted inputs, the host's tables as constants,
//! an output folder that appears complete or not at all.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anec_base::output::partial_name;
use anec_base::{Diagnostic, Fault, FileError, Result};
use anec_bundle::{Bundle, BundleError, FunctionEntry, Task};
use anec_manifest::Overflow;
use anec_mil::verify::infer_types;
use anec_mil::{Constant, DataType, Dim, Function, FunctionBuilder, OpInput, Opset, Program, TensorType, ValueId};
use anec_package::Package;
use anec_quant::Fp16;
use anec_source::{Source, SourceTensor, SourceWeight};
use serde_json::json;

use super::files;

/// Reason why a bundle can't be exported in a layout.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct ExportError {
    pub(super) path: PathBuf,
    pub(super) problem: String,
    pub(super) help: String,
}

impl Diagnostic for ExportError {
    fn fault(&self) -> Fault {
        Fault::Usage
    }

    fn help(&self) -> Option<String> {
        Some(self.help.clone())
    }
}

/// Reads the description of a complete bundle.
pub(super) fn read(folder: &Path) -> Result<Bundle> {
    let bundle = Bundle::read(folder)?;
    if let Some(problem) = bundle.check().into_iter().next() {
        return Err(BundleError::Content { path: folder.join(anec_bundle::FILE_NAME), problem }.into());
    }
    if bundle.host.positions.is_some() && bundle.model.task == Task::TextGeneration {
        let problem = "its host adds learned positions to the embeddings, which other runtimes don't do".into();
        let help = "use it with anec, or by the book's page on bundles".into();
        return Err(ExportError { path: folder.to_owned(), problem, help }.into());
    }
    if !bundle.gives_logits() {
        let problem = "its head gives only the largest logits, and other runtimes choose tokens from all".into();
        let help = "convert it again with `lm_head.logits: true`, or without `argmax` and `top_k`".into();
        return Err(ExportError { path: folder.to_owned(), problem, help }.into());
    }
    Ok(bundle)
}

/// Writes a new or empty folder. It gets its name when it is complete; nothing remains after an error.
pub(super) fn into_new_folder<T>(out: &Path, write: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    if std::fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_some()) || out.is_file() {
        let (problem, help) = ("exists already".into(), "choose another folder, or remove this one".into());
        return Err(ExportError { path: out.to_owned(), problem, help }.into());
    }
    let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).map_err(FileError::of(parent, "create"))?;
    let room = partial_name(out);
    std::fs::create_dir(&room).map_err(FileError::of(out, "create"))?;
    let written = write(&room).and_then(|written| {
        std::fs::rename(&room, out).map_err(FileError::of(out, "create"))?;
        Ok(written)
    });
    if written.is_err() {
        let _ = std::fs::remove_dir_all(&room);
    }
    written
}

/// Bundle whose functions become parts of other functions.
pub(super) struct ExportedBundle<'a> {
    folder: &'a Path,
    bundle: &'a Bundle,
    packages: BTreeMap<String, Package>,
    /// Context length in tokens.
    context: u64,
}

impl<'a> ExportedBundle<'a> {
    /// Opens the packages of the functions.
    pub(super) fn open(
        folder: &'a Path,
        bundle: &'a Bundle,
        context: u64,
        entries: impl IntoIterator<Item = &'a FunctionEntry>,
    ) -> Result<Self> {
        let mut packages = BTreeMap::new();
        for entry in entries {
            if !packages.contains_key(&entry.package) {
                packages.insert(entry.package.clone(), anec_package::open(&folder.join(&entry.package))?);
            }
        }
        Ok(ExportedBundle { folder, bundle, packages, context })
    }

    /// Highest opset of the functions.
    pub(super) fn opset(&self) -> Opset {
        let functions = self.packages.values().flat_map(|package| &package.program.functions);
        functions.map(|function| function.opset).max().unwrap_or(Opset::CoreMl8)
    }

    /// Returns a function unchanged.
    pub(super) fn flexible(&self, entry: &FunctionEntry) -> Result<&Function> {
        let package = &self.packages[&entry.package];
        let found = package.program.functions.iter().find(|function| function.name == entry.function);
        Ok(found.ok_or_else(|| ExportError {
            path: self.folder.join(&entry.package),
            problem: format!("there is no function `{}`", entry.function),
            help: "convert the model again".into(),
        })?)
    }

    /// Returns a function specialized to a number of tokens.
    pub(super) fn function(&self, entry: &FunctionEntry, tokens: u64) -> Result<Function> {
        let function = self.flexible(entry)?;
        let mut fixed = function.clone();
        for symbol in function.symbols() {
            fixed = fixed.with_length(symbol, tokens);
        }
        Ok(if function.lengths.is_empty() { fixed } else { infer_types(&fixed)? })
    }

    /// Returns a tensor of the host's file.
    fn host(&self, name: &str) -> Result<SourceTensor> {
        let path = self.folder.join(&self.bundle.host.file.file);
        let source = Source::open_path(&path)?;
        let tensor = source.tensor(name).cloned();
        Ok(tensor.ok_or_else(|| ExportError {
            path,
            problem: format!("there is no tensor `{name}`"),
            help: "convert the model again".into(),
        })?)
    }

    /// Returns the embedding `[vocab_size, hidden_size]`, multiplier included.
    pub(super) fn embedding(&self) -> Result<SourceTensor> {
        self.host(&self.bundle.host.embedding)
    }

    /// Embeds tokens `[1, T]` as `[1, T, H]`.
    pub(super) fn embedded(&self, ops: &mut FunctionBuilder, ids: ValueId) -> Result<ValueId> {
        let (vocab, hidden) = (self.bundle.model.vocab_size, self.bundle.model.hidden_size);
        let table = SourceWeight::from(self.embedding()?);
        let content = Arc::new(Fp16::new(table, Overflow::default()));
        let table =
            ops.constant("embedding", Constant::content(TensorType::new(DataType::Fp16, [vocab, hidden]), content));
        Ok(gather(ops, table, ids))
    }

    /// Gathers the rows of a rotary table at positions `[T]` as `[1, 1, T, n]`.
    pub(super) fn rotary(
        &self,
        ops: &mut FunctionBuilder,
        table: &str,
        positions: ValueId,
        cosines: bool,
    ) -> Result<ValueId> {
        let found = self.bundle.host.rope.iter().find(|rope| rope.table == table);
        // apps have a single table, so the variant for the full context serves all lengths
        let variant = found.and_then(|rope| rope.variants.iter().find(|variant| variant.max_length >= self.context));
        let name = variant.map(|variant| if cosines { &variant.cos } else { &variant.sin });
        let tensor = self.host(name.map_or(table, String::as_str))?;
        let mut values = vec![0.0; (self.context * tensor.columns()) as usize];
        tensor.read(0, &mut values)?;
        let constant = Constant::fp16_tensor(&[self.context, tensor.columns()], &values);
        let name = format!("{table}_{}", if cosines { "cos" } else { "sin" });
        let table = ops.constant(&name, constant);
        let rows = gather(ops, table, positions);
        Ok(ops.expand_dims(rows, &[0, 1]))
    }

    /// Writes the tokenizer's files and the `config.json` by which readers choose a tokenizer.
    pub(super) fn write_tokenizer(&self, folder: &Path) -> Result<()> {
        for (what, file) in &self.bundle.tokenizer {
            let from = self.folder.join(file);
            let text = std::fs::read(&from).map_err(FileError::of(&from, "read"))?;
            files::write(&folder.join(file), &text)?;
            if what == "tokenizer_config" {
                let class =
                    serde_json::from_slice::<serde_json::Value>(&text).unwrap_or_default()["tokenizer_class"].clone();
                let config = json!({"tokenizer_class": class, "model_type": self.bundle.family});
                files::write_json(&folder.join("config.json"), &config)?;
            }
        }
        Ok(())
    }
}

/// Program whose default function is the first.
pub(super) fn program(functions: Vec<Function>) -> Program {
    let default_function = functions.first().map(|function| function.name.clone()).unwrap_or_default();
    Program { functions, default_function }
}

/// Index of a position in a cache `[1, heads, S, head_dim]`: `0, 0, position, 0`.
pub(super) fn slot(ops: &mut FunctionBuilder, position: ValueId) -> ValueId {
    let (before, after) =
        (ops.constant("before", Constant::int32s(&[0, 0])), ops.constant("after", Constant::int32s(&[0])));
    ops.concat(&[before, position, after], 0)
}

/// Gathers rows of a table.
pub(super) fn gather(ops: &mut FunctionBuilder, table: ValueId, ids: ValueId) -> ValueId {
    ops.op::<OpInput>(
        "gather",
        "rows",
        [("x", table.into()), ("indices", ids.into()), ("axis", Constant::int32(0).into())],
    )
}

/// Transposes `[1, T, H]` to `[1, H, T, 1]` or `[1, H, 1, T]`.
pub(super) fn to_columns(ops: &mut FunctionBuilder, rows: ValueId, shape: &[u64]) -> ValueId {
    let columns = ops.transpose(rows, &[0, 2, 1]);
    // with one token, both layouts have the same shape
    let axis = if shape.last() == Some(&1) { 3 } else { 2 };
    ops.expand_dims(columns, &[axis])
}

/// Transposes `[1, H, T, 1]` or `[1, H, 1, T]` to `[1, T, H]`.
pub(super) fn to_rows(ops: &mut FunctionBuilder, columns: ValueId) -> ValueId {
    let last = ops.ty(columns).shape.last() == Some(&Dim::Fixed(1));
    let flat = ops.squeeze(columns, &[if last { 3 } else { 2 }]);
    ops.transpose(flat, &[0, 2, 1])
}
