//! Export of a bundle in Anemll's layout: a flat folder with `meta.yaml` and packages for the embedding, the layers
//! (functions `infer` for one token and `prefill` for a batch) and the LM head.
//!
//! The functions are the bundle's, with adapted inputs: hidden states are `[1, T, H]`, rotary rows are gathered by
//! `position_ids`, and `causal_mask` may contain -inf. Source of the layout: Anemll's published models and the readers
//! of Anemll's tools, version 0.3.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anec_base::{Progress, Result};
use anec_bundle::{Bundle, FunctionEntry, MASKED, PortRole, Stage, StateRole, Task, TokenCount};
use anec_mil::{
    Constant, DataType, Dim, Function, FunctionBuilder, OpInput, Program, SymbolRange, TensorType, ValueId,
};
use anec_package::blob::WriteProgress;
use anec_package::{PackageMetadata, WriteOptions};

use super::compile::Compiler;
use super::exported::{ExportError, ExportedBundle, into_new_folder, program, read, slot, to_columns, to_rows};
use super::files;
use super::open::name_of;

/// Name of the state with the cache of all layers.
const STATE: &str = "model_model_kv_cache_0";

/// Exported folder.
#[derive(Clone, Debug, serde::Serialize)]
pub struct AnemllExport {
    /// Output folder.
    pub path: PathBuf,
    /// Package names.
    pub packages: Vec<String>,
    /// Compiled models, if Core ML's compiler is available.
    pub compiled: Vec<String>,
    /// Context length in tokens.
    pub context: u64,
    /// Tokens per call of `prefill`.
    pub batch: u64,
}

/// Exports a bundle into a new or empty folder, and compiles the packages if Core ML's compiler is available.
///
/// # Errors
/// If the layout can't hold the bundle's form, or a file can't be written.
pub fn export(folder: &Path, out: &Path, progress: &Progress) -> Result<AnemllExport> {
    let bundle = read(folder)?;
    let parts = Parts::of(folder, &bundle)?;
    let (packages, compiled) = into_new_folder(out, |room| parts.write(room, progress))?;
    progress.finish();
    Ok(AnemllExport { path: out.to_owned(), packages, compiled, context: parts.context, batch: parts.batch })
}

/// `meta.yaml`, with the indentation that scripts expect.
fn meta(bundle: &Bundle, parts: &Parts<'_>, prefix: &str, names: &[String; 3]) -> String {
    let [embeddings, ffn, head] = names;
    let name: String = bundle.name.chars().map(|c| if c.is_whitespace() { '_' } else { c }).collect();
    format!(
        "model_info:\n  name: {name}\n  version: 0.3.5\n  description: |\n    {name} on the Apple Neural Engine, converted by anec {}\n    \
         Context length: {context}\n    Batch size: {batch}\n    Chunks: 1\n  author: anec\n  framework: Core ML\n  language: Python\n  \
         architecture: {prefix}\n  parameters:\n    context_length: {context}\n    batch_size: {batch}\n    lut_embeddings: none\n    \
         lut_ffn: none\n    lut_lmhead: none\n    num_chunks: 1\n    model_prefix: {prefix}\n    embeddings: {embeddings}.mlmodelc\n    \
         lm_head: {head}.mlmodelc\n    ffn: {ffn}.mlmodelc\n    split_lm_head: {pieces}\n",
        bundle.anec_version,
        context = parts.context,
        batch = parts.batch,
        pieces = parts.head.len(),
    )
}

/// Parts of a bundle that the layout has names for.
struct Parts<'a> {
    bundle: &'a Bundle,
    exported: ExportedBundle<'a>,
    /// Functions of all layers: one token, and a batch.
    layers: [(&'a FunctionEntry, u64); 2],
    /// Functions of the LM head.
    head: Vec<&'a FunctionEntry>,
    context: u64,
    batch: u64,
}

impl<'a> Parts<'a> {
    fn of(folder: &'a Path, bundle: &'a Bundle) -> Result<Self> {
        let wrong = |problem: String| ExportError {
            path: folder.to_owned(),
            problem,
            help:
                "convert it again with `state: unified`, `kv_write: slice`, `lengths.fixed: [1, 64]`, `shards.max_mb: \
                   8000` and one context that is a multiple of 64; models with windows, experts or recurrences have no \
                   place in the layout"
                    .into(),
        };
        if bundle.model.task != Task::TextGeneration {
            return Err(wrong("the bundle doesn't generate text, which the layout requires".into()).into());
        }
        let context = bundle.model.contexts.last().copied().unwrap_or(0);
        if bundle.functions.iter().any(|entry| matches!(entry.stage, Stage::FeedForward { .. })) {
            return Err(wrong("its feed-forward networks are in packages of their own".into()).into());
        }
        let all = Stage::Layers { first: 0, end: bundle.model.num_layers };
        let of_layers: Vec<_> =
            bundle.functions.iter().filter(|entry| entry.stage == all && entry.context == context).collect();
        if of_layers.is_empty() {
            return Err(wrong(
                "its layers are in several packages, expected one: apps create one state for all".into(),
            )
            .into());
        }
        let takes = |entry: &FunctionEntry, count: u64| match entry.tokens {
            TokenCount::Fixed(own) => own == count,
            TokenCount::Range(least, most) => (least..=most).contains(&count),
        };
        let batch = of_layers.iter().map(|entry| entry.tokens.most()).max().unwrap_or(1);
        let layer = |count: u64| {
            let found = of_layers.iter().copied().find(|entry| takes(entry, count));
            found.ok_or_else(|| wrong(format!("no function of its layers takes {count} tokens")))
        };
        if batch < 2 || context % batch != 0 {
            let problem = format!(
                "calls of {batch} tokens and a context of {context}: apps need a batch that divides the context"
            );
            return Err(wrong(problem).into());
        }
        let layers = [(layer(1)?, 1), (layer(batch)?, batch)];
        for (entry, _) in &layers {
            for port in &entry.inputs {
                match &port.role {
                    PortRole::Hidden | PortRole::SliceBegin | PortRole::SliceEnd => {}
                    PortRole::RopeCos { .. } | PortRole::RopeSin { .. } => {}
                    PortRole::PastMask { window: None } | PortRole::CallMask { window: None } => {}
                    _ => {
                        return Err(wrong(format!(
                            "`{}` has an input `{}`, which apps don't provide",
                            entry.function, port.name
                        ))
                        .into());
                    }
                }
            }
            match entry.states.as_slice() {
                [state] if matches!(state.role, StateRole::KeyValueCache { .. }) => {}
                states => {
                    return Err(wrong(format!("its layers have {} states, expected one cache", states.len())).into());
                }
            }
            if !entry.inputs.iter().any(|port| port.role == PortRole::SliceBegin) {
                return Err(wrong("its caches are written through masks, which apps don't provide".into()).into());
            }
        }
        let head: Vec<_> = bundle
            .functions
            .iter()
            .filter(|entry| matches!(entry.stage, Stage::Head { .. }) && takes(entry, 1))
            .collect();
        let rows: u64 =
            head.iter().map(|entry| if let Stage::Head { first, end } = entry.stage { end - first } else { 0 }).sum();
        if rows != bundle.model.head_rows() {
            return Err(wrong("its head has no function for one token, or two".into()).into());
        }
        let entries = layers.iter().map(|(entry, _)| *entry).chain(head.iter().copied());
        let exported = ExportedBundle::open(folder, bundle, context, entries)?;
        Ok(Parts { bundle, exported, layers, head, context, batch })
    }

    /// Writes all files into a folder; returns the names of packages and compiled models.
    fn write(&self, folder: &Path, progress: &Progress) -> Result<(Vec<String>, Vec<String>)> {
        let bundle = self.bundle;
        // used in file names
        let prefix = name_of(bundle.family.split('_').next().unwrap_or_default());
        let names =
            [format!("{prefix}_embeddings"), format!("{prefix}_FFN_PF_chunk_01of01"), format!("{prefix}_lm_head")];
        let programs = [self.embeddings()?, self.layers()?, self.head()?];
        let bytes: u64 = bundle.packages.iter().map(|package| package.weight_bytes).sum();
        progress.expect(bytes + 2 * bundle.model.vocab_size * bundle.model.hidden_size);
        let mut packages = Vec::new();
        for (name, program) in names.iter().zip(&programs) {
            progress.stage(name);
            let package = format!("{name}.mlpackage");
            let told = |step| match step {
                WriteProgress::Prepared(_) => {}
                WriteProgress::Written(bytes) => progress.add(bytes),
            };
            let metadata = PackageMetadata {
                short_description: format!("{} in Anemll's layout", bundle.name),
                user_defined: self.metadata(),
                ..Default::default()
            };
            let options = WriteOptions::new(metadata).telling(&told);
            anec_package::write(program, &folder.join(&package), &options)?;
            packages.push(package);
        }
        let mut compiled = Vec::new();
        if let Ok(compiler) = Compiler::find() {
            for package in &packages {
                progress.stage(&format!("compiling {package}"));
                compiled.push(compiler.compile(folder, package)?);
            }
        }
        files::write(&folder.join("meta.yaml"), meta(bundle, self, &prefix, &names).as_bytes())?;
        self.exported.write_tokenizer(folder)?;
        Ok((packages, compiled))
    }

    /// Metadata that readers expect in a package.
    fn metadata(&self) -> BTreeMap<String, String> {
        [
            ("context_length", self.context),
            ("state_length", self.context),
            ("batch_size", self.batch),
            ("num_chunks", 1),
        ]
        .into_iter()
        .map(|(key, value)| (format!("com.anemll.{key}"), value.to_string()))
        .collect()
    }

    /// Builds the embedding: `input_ids` `[1, T]` to `hidden_states` `[1, T, H]`, from one token to a batch.
    fn embeddings(&self) -> Result<Program> {
        let mut ops = FunctionBuilder::new("main", self.exported.opset());
        let tokens = ops.symbol("T", SymbolRange::Range { lower: 1, upper: Some(self.batch), default: 1 });
        let ids = ops.input(
            "input_ids",
            TensorType { dtype: DataType::Int32, shape: vec![Dim::Fixed(1), Dim::symbol(&tokens)] },
        );
        let rows = self.exported.embedded(&mut ops, ids)?;
        ops.output("hidden_states", rows);
        Ok(program(vec![ops.finish()?]))
    }

    /// Builds `infer` and `prefill`.
    fn layers(&self) -> Result<Program> {
        let functions =
            ["infer", "prefill"].into_iter().zip(self.layers).map(|(name, (entry, tokens))| -> Result<Function> {
                let callee = self.exported.function(entry, tokens)?;
                let mut ops = FunctionBuilder::new(name, self.exported.opset());
                let hidden = self.bundle.model.hidden_size;
                let fp16 = |shape: &[u64]| TensorType::new(DataType::Fp16, shape.iter().copied());
                let int32 = |count: u64| TensorType::new(DataType::Int32, [count]);
                let rows = ops.input("hidden_states", fp16(&[1, tokens, hidden]));
                let positions = ops.input("position_ids", int32(tokens));
                let causal = ops.input("causal_mask", fp16(&[1, 1, tokens, self.context]));
                let position = ops.input("current_pos", int32(1));
                let state = ops.state(STATE, fp16(&entry.states[0].shape));

                let mut given = BTreeMap::from([(entry.states[0].name.clone(), state)]);
                for port in &entry.inputs {
                    let value = match &port.role {
                        PortRole::Hidden => to_columns(&mut ops, rows, &port.shape_at(tokens)),
                        PortRole::PastMask { .. } => past_mask(&mut ops, causal, position, self.context),
                        PortRole::CallMask { .. } => ops.constant("call_mask", call_mask(tokens)),
                        PortRole::RopeCos { table } => self.exported.rotary(&mut ops, table, positions, true)?,
                        PortRole::RopeSin { table } => self.exported.rotary(&mut ops, table, positions, false)?,
                        PortRole::SliceEnd => {
                            let end = ops.add(position, Constant::int32s(&[tokens as i32]));
                            slot(&mut ops, end)
                        }
                        _ => slot(&mut ops, position),
                    };
                    given.insert(port.name.clone(), value);
                }
                let wanted: Vec<String> = entry
                    .outputs
                    .iter()
                    .filter(|port| port.role == PortRole::Hidden)
                    .map(|port| port.name.clone())
                    .collect();
                let result = ops.inline(&callee, &given, &wanted);
                let columns = to_rows(&mut ops, result[0]);
                ops.output("output_hidden_states", columns);
                Ok(ops.finish()?)
            });
        Ok(program(functions.collect::<Result<_>>()?))
    }

    /// Builds the LM head: `hidden_states` `[1, 1, H]` to `logits1`, `logits2`, …, each a part of the vocabulary.
    fn head(&self) -> Result<Program> {
        let mut ops = FunctionBuilder::new("main", self.exported.opset());
        let rows = ops.input("hidden_states", TensorType::new(DataType::Fp16, [1, 1, self.bundle.model.hidden_size]));
        for (index, entry) in self.head.iter().enumerate() {
            let callee = self.exported.function(entry, 1)?;
            ops.enter(&format!("piece_{}", index + 1));
            let mut given = BTreeMap::new();
            for port in &entry.inputs {
                given.insert(port.name.clone(), to_columns(&mut ops, rows, &port.shape_at(1)));
            }
            let wanted: Vec<String> = entry
                .outputs
                .iter()
                .filter(|port| port.role == PortRole::Logits)
                .map(|port| port.name.clone())
                .collect();
            let result = ops.inline(&callee, &given, &wanted);
            let logits = to_rows(&mut ops, result[0]);
            ops.leave();
            ops.output(&format!("logits{}", index + 1), logits);
        }
        Ok(program(vec![ops.finish()?]))
    }
}

/// Restricts a causal mask `[1, 1, T, S]` to the slots before a position.
fn past_mask(ops: &mut FunctionBuilder, causal: ValueId, position: ValueId, slots: u64) -> ValueId {
    // in fp16, rows of -inf only would become NaN
    let causal = ops.maximum(causal, Constant::fp16(MASKED));
    let indices: Vec<i32> = (0..slots as i32).collect();
    let indices = ops.constant("slots", Constant::int32s(&indices));
    let before: ValueId = ops.op("less", "before", [("x", indices), ("y", position)]);
    // tensors instead of scalars: coremltools gives the result the shape of `a`
    let [seen, hidden] = [0.0, MASKED].map(|value| Constant::fp16_tensor(&[slots], &vec![value; slots as usize]));
    let arguments: [(&str, OpInput); 3] = [("cond", before.into()), ("a", seen.into()), ("b", hidden.into())];
    let shown = ops.op("select", "shown", arguments);
    ops.minimum(causal, shown)
}

/// Mask `[1, 1, T, T]`: each token of a call attends to itself and the tokens before it.
fn call_mask(tokens: u64) -> Constant {
    let seen = |index: u64| if index % tokens <= index / tokens { 0.0 } else { MASKED };
    let values: Vec<f32> = (0..tokens * tokens).map(seen).collect();
    Constant::fp16_tensor(&[1, 1, tokens, tokens], &values)
}
