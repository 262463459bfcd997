//! Export of a bundle as one package for Hugging Face's swift-transformers: inputs `inputIds` and `causalMask`, output
//! `logits`, states `keyCache` and `valueCache`.
//!
//! ```text
//! past      = |causalMask| - 1 - T                      the app's mask has one slot more than the text has tokens
//! positions = past, past + 1, … past + T - 1
//! logits    = head(layers(embedding[inputIds], rope[positions], masks, caches[.., ..past, ..]))
//! caches[.., past..past + T, ..] = keys and values of the call
//! ```
//!
//! The functions are those of a bundle with `state: host`, in sequence; the package takes the role of the host. The
//! app's mask is all zeros, so that only its length matters: the package computes the causal masks. Source of the names
//! and inputs: `LanguageModelWithStatefulKVCache` of swift-transformers, 2026. Published findings say that flexible
//! shapes and a cache written at a computed position keep such models off the Neural Engine; the library itself loads
//! them for CPU and GPU.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anec_base::{Progress, Result};
use anec_bundle::{Bundle, FunctionEntry, MASKED, Port, PortRole, StateRole, Task, TokenCount};
use anec_mil::{
    Constant, DataType, Dim, Function, FunctionBuilder, OpInput, Program, SymbolRange, TensorType, ValueId,
};
use anec_package::blob::WriteProgress;
use anec_package::{PackageMetadata, WriteOptions};

use super::compile::Compiler;
use super::exported::{ExportError, ExportedBundle, into_new_folder, program, read, slot, to_columns, to_rows};
use super::open::name_of;

/// Exported folder.
#[derive(Clone, Debug, serde::Serialize)]
pub struct HfSwiftExport {
    /// Output folder.
    pub path: PathBuf,
    /// Package name.
    pub package: String,
    /// Compiled model, if Core ML's compiler is available.
    pub compiled: Option<String>,
    /// Context length in tokens.
    pub context: u64,
}

/// Exports a bundle as one package with the tokenizer's files into a new or empty folder, and compiles the package if
/// Core ML's compiler is available.
///
/// # Errors
/// If the package can't hold the bundle's form, or a file can't be written.
pub fn export(folder: &Path, out: &Path, progress: &Progress) -> Result<HfSwiftExport> {
    let bundle = read(folder)?;
    let model = SwiftModel::of(folder, &bundle)?;
    let (package, compiled) = into_new_folder(out, |room| model.write(room, progress))?;
    progress.finish();
    Ok(HfSwiftExport { path: out.to_owned(), package, compiled, context: model.context })
}

/// Parts of a bundle that the package consists of.
struct SwiftModel<'a> {
    bundle: &'a Bundle,
    exported: ExportedBundle<'a>,
    /// Functions of the layers, then of the LM head.
    functions: Vec<&'a FunctionEntry>,
    context: u64,
    /// Maximum number of tokens per call.
    most: u64,
}

/// Values that the graph computes once for all functions.
struct Call {
    /// Positions, int32 `[T]`.
    positions: ValueId,
    /// Mask of earlier calls' tokens, `[1, 1, T, S]`.
    past_mask: ValueId,
    /// Mask of this call's tokens, `[1, 1, T, T]`.
    call_mask: ValueId,
}

/// Keys or values of all layers.
struct Caches {
    state: ValueId,
    /// Cache of earlier calls, `[1, layers * heads, S, head_dim]`.
    before: ValueId,
    /// Heads of a layer.
    heads: u64,
    /// New rows of each computed layer, `[1, heads, T, head_dim]`.
    rows: Vec<ValueId>,
}

impl Caches {
    /// Declares a state for all layers; each layer has a cache of shape `[1, heads, S, head_dim]`.
    fn new(ops: &mut FunctionBuilder, name: &str, layers: usize, of_layer: &[u64]) -> Self {
        let (heads, slots, width) = (of_layer[1], of_layer[2], of_layer[3]);
        let state = ops.state(name, TensorType::new(DataType::Fp16, [1, layers as u64 * heads, slots, width]));
        let before = ops.read_state(state);
        Caches { state, before, heads, rows: Vec::new() }
    }

    fn of_layer(&self, ops: &mut FunctionBuilder, layer: usize) -> ValueId {
        let first = layer as u64 * self.heads;
        ops.slice(self.before, 1, first..first + self.heads)
    }

    /// Writes the rows of this call from `begin` to `end`.
    fn write(self, ops: &mut FunctionBuilder, begin: ValueId, end: ValueId) {
        let rows = ops.concat(&self.rows, 1);
        let after = ops.slice_update_along(self.before, rows, 2, begin, end);
        ops.write_state(self.state, after);
    }
}

impl<'a> SwiftModel<'a> {
    fn of(folder: &'a Path, bundle: &'a Bundle) -> Result<Self> {
        let wrong = |problem: String| ExportError {
            path: folder.to_owned(),
            problem,
            help: "convert it again with `state: host` and `lengths.range: [1, 512]`; models with windows, experts, \
                   recurrences or shared keys have no place in the package"
                .into(),
        };
        if bundle.model.task != Task::TextGeneration {
            return Err(wrong("the bundle doesn't generate text, which the library requires".into()).into());
        }
        let context = bundle.model.contexts.last().copied().unwrap_or(0);
        let functions: Vec<_> = bundle.functions.iter().filter(|entry| entry.context == context).collect();
        let mut most = context;
        let mut shapes: BTreeMap<bool, Vec<Vec<u64>>> = BTreeMap::new();
        for entry in &functions {
            let name = format!("`{}` of {}", entry.function, entry.package);
            match entry.tokens {
                TokenCount::Range(1, upper) => most = most.min(upper),
                tokens => {
                    let (least, most) = (tokens.least(), tokens.most());
                    return Err(wrong(format!("{name} takes {least} to {most} tokens, expected a range from 1")).into());
                }
            }
            if let Some(state) = entry.states.first() {
                return Err(
                    wrong(format!("{name} keeps a state `{}`, expected that the host keeps it", state.name)).into()
                );
            }
            for port in &entry.inputs {
                match &port.role {
                    PortRole::Hidden | PortRole::RopeCos { .. } | PortRole::RopeSin { .. } => {}
                    PortRole::PastMask { window: None } | PortRole::CallMask { window: None } => {}
                    PortRole::Cache { holds: StateRole::KeyCache { .. }, .. } => {
                        shapes.entry(true).or_default().push(port.shape_at(1));
                    }
                    PortRole::Cache { holds: StateRole::ValueCache { .. }, .. } => {
                        shapes.entry(false).or_default().push(port.shape_at(1));
                    }
                    _ => {
                        let problem = format!("{name} has an input `{}`, which the library doesn't provide", port.name);
                        return Err(wrong(problem).into());
                    }
                }
            }
        }
        let alike = |shapes: &Vec<Vec<u64>>| {
            shapes.len() == bundle.model.num_layers && shapes.windows(2).all(|pair| pair[0] == pair[1])
        };
        if shapes.len() != 2 || !shapes.values().all(alike) {
            return Err(wrong("its layers have no caches, or caches of several shapes".into()).into());
        }
        let exported = ExportedBundle::open(folder, bundle, context, functions.iter().copied())?;
        Ok(SwiftModel { bundle, exported, functions, context, most })
    }

    /// Writes all files into a folder; returns the names of the package and the compiled model.
    fn write(&self, folder: &Path, progress: &Progress) -> Result<(String, Option<String>)> {
        let bundle = self.bundle;
        let package = format!("{}.mlpackage", name_of(&bundle.name));
        let weights: u64 = bundle.packages.iter().map(|package| package.weight_bytes).sum();
        progress.expect(weights + 2 * bundle.model.vocab_size * bundle.model.hidden_size);
        progress.stage(&package);
        let told = |step| match step {
            WriteProgress::Prepared(_) => {}
            WriteProgress::Written(bytes) => progress.add(bytes),
        };
        // the library finds the tokenizer on the hub by this name
        let source = bundle.manifest.source.as_deref().and_then(|source| source.strip_prefix("hf:"));
        let on_hub = source.map_or(bundle.name.as_str(), |source| source.split('@').next().unwrap_or(source));
        let metadata = PackageMetadata {
            short_description: format!("{} as swift-transformers runs it", bundle.name),
            user_defined: BTreeMap::from([("co.huggingface.exporters.name".to_owned(), on_hub.to_owned())]),
            ..Default::default()
        };
        let options = WriteOptions::new(metadata).telling(&told);
        anec_package::write(&self.program()?, &folder.join(&package), &options)?;
        let compiled = match Compiler::find() {
            Err(_) => None,
            Ok(compiler) => {
                progress.stage(&format!("compiling {package}"));
                Some(compiler.compile(folder, &package)?)
            }
        };
        self.exported.write_tokenizer(folder)?;
        Ok((package, compiled))
    }

    fn program(&self) -> Result<Program> {
        let mut ops = FunctionBuilder::new("main", self.exported.opset());
        // the symbols of the bundle's functions, whose bodies become parts of this one
        let range = |lower, upper, default| SymbolRange::Range { lower, upper: Some(upper), default };
        let tokens = ops.symbol("T", range(1, self.most, 1));
        let slots = ops.symbol("K", range(2, self.context + 1, 2));
        let row = TensorType { dtype: DataType::Int32, shape: vec![Dim::Fixed(1), Dim::symbol(&tokens)] };
        let ids = ops.input("inputIds", row);
        let one = Dim::Fixed(1);
        let mask =
            TensorType { dtype: DataType::Fp16, shape: vec![one.clone(), one.clone(), one, Dim::symbol(&slots)] };
        let causal = ops.input("causalMask", mask);
        let [keys, values] = [true, false].map(|wanted| self.cache_shape(wanted));
        let layers = self.bundle.model.num_layers;
        let mut keys = Caches::new(&mut ops, "keyCache", layers, &keys);
        let mut values = Caches::new(&mut ops, "valueCache", layers, &values);

        let size = |ops: &mut FunctionBuilder, of: ValueId, axis: u64| {
            let shape = ops.op("shape", "shape", [("x", of)]);
            ops.slice(shape, 0, axis..axis + 1)
        };
        let (given, count) = (size(&mut ops, causal, 3), size(&mut ops, ids, 1));
        let end = ops.sub(given, Constant::int32s(&[1]));
        let past = ops.sub(end, count);
        let call = self.call(&mut ops, ids, past);

        let embedded = self.exported.embedded(&mut ops, ids)?;
        let mut hidden = None;
        let mut logits = Vec::new();
        for entry in &self.functions {
            let callee: &Function = self.exported.flexible(entry)?;
            ops.enter(&name_of(&format!("{}_{}", entry.package.trim_end_matches(".mlpackage"), entry.function)));
            let mut inputs = BTreeMap::new();
            for port in &entry.inputs {
                let value = match &port.role {
                    PortRole::Hidden => {
                        *hidden.get_or_insert_with(|| to_columns(&mut ops, embedded, &port.shape_at(2)))
                    }
                    PortRole::RopeCos { table } => self.exported.rotary(&mut ops, table, call.positions, true)?,
                    PortRole::RopeSin { table } => self.exported.rotary(&mut ops, table, call.positions, false)?,
                    PortRole::PastMask { .. } => call.past_mask,
                    PortRole::Cache { holds: StateRole::KeyCache { layer }, .. } => keys.of_layer(&mut ops, *layer),
                    PortRole::Cache { holds: StateRole::ValueCache { layer }, .. } => values.of_layer(&mut ops, *layer),
                    _ => call.call_mask,
                };
                inputs.insert(port.name.clone(), value);
            }
            let names: Vec<String> = entry.outputs.iter().map(|port| port.name.clone()).collect();
            let results = ops.inline(callee, &inputs, &names);
            ops.leave();
            for (port, result) in entry.outputs.iter().zip(results) {
                match &port.role {
                    PortRole::Hidden => hidden = Some(result),
                    PortRole::Logits => logits.push(to_rows(&mut ops, result)),
                    PortRole::CacheRows { holds: StateRole::KeyCache { .. }, .. } => keys.rows.push(result),
                    PortRole::CacheRows { .. } => values.rows.push(result),
                    _ => {}
                }
            }
        }
        let (begin, end) = (slot(&mut ops, past), slot(&mut ops, end));
        keys.write(&mut ops, begin, end);
        values.write(&mut ops, begin, end);
        let logits = if let [logits] = logits[..] { logits } else { ops.concat(&logits, 2) };
        ops.output("logits", logits);
        Ok(program(vec![ops.finish()?]))
    }

    /// Shape of a layer's keys or values.
    fn cache_shape(&self, keys: bool) -> Vec<u64> {
        let is_wanted = |port: &&Port| match &port.role {
            PortRole::Cache { holds, .. } => matches!(holds, StateRole::KeyCache { .. }) == keys,
            _ => false,
        };
        let mut ports = self.functions.iter().flat_map(|entry| &entry.inputs);
        ports.find(is_wanted).map(|port| port.shape_at(1)).unwrap_or_default()
    }

    /// Positions and masks of a call that follows `past` tokens.
    fn call(&self, ops: &mut FunctionBuilder, ids: ValueId, past: ValueId) -> Call {
        // derived from the ids, so that the length is known statically; a computed range has an unknown one
        let zeros = ops.mul(ids, Constant::int32(0));
        let ones = ops.add(zeros, Constant::int32(1));
        let counting: [(&str, OpInput); 3] =
            [("x", ones.into()), ("axis", Constant::int32(1).into()), ("exclusive", Constant::bool(true).into())];
        let index: ValueId = ops.op("cumsum", "index", counting);
        let index = ops.squeeze(index, &[0]);
        let positions = ops.add(index, past);

        let numbers: Vec<i32> = (0..self.context as i32).collect();
        let numbers = ops.constant("slots", Constant::int32s(&numbers));
        let unwritten: ValueId = ops.op("greater_equal", "unwritten", [("x", numbers), ("y", past)]);
        let row = masked(ops, unwritten);
        let row = ops.expand_dims(row, &[0, 1, 2]);
        let column = ops.to_fp16(zeros);
        let column = ops.expand_dims(column, &[1, 3]);
        let past_mask = ops.add(column, row);

        let (rows, columns) = (ops.expand_dims(index, &[1]), ops.expand_dims(index, &[0]));
        let later: ValueId = ops.op("greater", "later", [("x", columns), ("y", rows)]);
        let call_mask = masked(ops, later);
        let call_mask = ops.expand_dims(call_mask, &[0, 1]);
        Call { positions, past_mask, call_mask }
    }
}

/// Turns a boolean mask into an additive one: 0 for false, -1e4 for true.
fn masked(ops: &mut FunctionBuilder, hidden: ValueId) -> ValueId {
    let ones = ops.to_fp16(hidden);
    ops.mul(ones, Constant::fp16(MASKED))
}
