//! Runs a text through a bundle and observes every value.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::watch::{Log, SeenRanges};
use anec_base::Result;
use anec_bundle::{Bundle, FunctionEntry, PortRole};
use anec_exec::Precision;
use anec_mil::{Function, ValueId};
use anec_runtime::classify::windows::Windows;
use anec_runtime::{Chunking, ForwardOptions, Hidden, HostTables, LoadedModel, PackageStore, widened};

/// Values of a function whose size needs interpretation.
#[derive(Default)]
pub(super) struct Places {
    /// Residual stream, contributions to it, and their magnitudes: all values reached from the hidden states by sums
    /// and constant factors, which scale with them.
    pub(super) stream: BTreeSet<String>,
    /// Values to which a mask was added; their size is that of the mask.
    pub(super) masked: BTreeSet<String>,
}

/// Whether an input masks positions for attention.
fn is_mask(role: &PortRole) -> bool {
    matches!(
        role,
        PortRole::AttentionMask { .. }
            | PortRole::BandMask { .. }
            | PortRole::PastMask { .. }
            | PortRole::CallMask { .. }
    )
}

impl Places {
    /// Hidden states among the outputs of a function, if only those are seen.
    pub(super) fn of_outputs(entry: &FunctionEntry) -> Self {
        let hidden = entry.outputs.iter().filter(|port| port.role == PortRole::Hidden);
        Places { stream: hidden.map(|port| port.name.clone()).collect(), ..Default::default() }
    }

    pub(super) fn of(bundle: &Bundle, package: &str, function: &Function) -> Self {
        let entry = bundle.functions.iter().find(|entry| entry.package == package && entry.function == function.name);
        let inputs = |wanted: fn(&PortRole) -> bool| -> BTreeSet<ValueId> {
            let ports = entry.into_iter().flat_map(|entry| &entry.inputs).filter(|port| wanted(&port.role));
            let names: BTreeSet<&str> = ports.map(|port| port.name.as_str()).collect();
            function.inputs.iter().copied().filter(|id| names.contains(function.value(*id).name.as_str())).collect()
        };
        let mut stream = inputs(|role| *role == PortRole::Hidden);
        let mut named = stream.clone();
        let mut masked = inputs(is_mask);
        for op in &function.block.ops {
            // sums of streams and streams times a gain belong to the stream
            let gain = || op.operands().any(|id| function.value(id).constant.is_some());
            let goes_on = op.operator == "add" || op.operator == "mul" && gain();
            if goes_on && op.operands().any(|id| stream.contains(&id)) {
                stream.extend(&op.outputs);
                named.extend(op.operands().chain(op.outputs.iter().copied()));
            }
            // magnitudes by which a norm scales the stream
            let magnitude = matches!(op.operator.as_str(), "abs" | "reduce_max" | "maximum");
            if magnitude && op.operands().any(|id| named.contains(&id)) {
                named.extend(&op.outputs);
            }
            // a mask may be repeated for groups of heads, or divided into those of single heads, before it is added
            let spreads = matches!(op.operator.as_str(), "add" | "concat" | "slice_by_index");
            if spreads && op.operands().any(|id| masked.contains(&id)) {
                masked.extend(&op.outputs);
            }
        }
        let names = |ids: BTreeSet<ValueId>| ids.into_iter().map(|id| function.value(id).name.clone()).collect();
        Places { stream: names(named), masked: names(masked) }
    }
}

/// Maximum tokens of a call if any number gives the same result; equals the simulation's number.
const MAX_CALL_TOKENS: u64 = 32;

/// Programs of a bundle with observable values. Calls are large, because results don't depend on the number of tokens.
pub(super) struct WatchedPrograms {
    bundle: Bundle,
    folder: PathBuf,
    host: Arc<HostTables>,
    store: Arc<PackageStore>,
}

impl WatchedPrograms {
    pub(super) fn open(bundle: &Bundle, folder: &Path) -> Result<Self> {
        let host = Arc::new(HostTables::open(bundle, folder)?);
        let bundle = widened(&bundle.with_logits(), MAX_CALL_TOKENS);
        let store = PackageStore::beyond(&bundle, folder);
        Ok(WatchedPrograms { bundle, folder: folder.to_owned(), host, store })
    }

    /// Model in a precision, op by op; computed values are recorded in `log`.
    pub(super) fn model(&self, precision: Precision, log: &Log) -> Result<Arc<LoadedModel>> {
        let backend = log.backend(self.store.clone(), precision);
        LoadedModel::new(self.bundle.clone(), &self.folder, self.host.clone(), Box::new(backend))
    }

    /// Number of calls of the layers' functions for `count` tokens.
    pub(super) fn calls(&self, context: u64, count: usize) -> usize {
        let layers = self.bundle.functions.iter().filter(|f| f.stage.whole_layers().is_some());
        let sizes = layers.filter(|f| f.context == context).map(|f| f.tokens.most() as usize);
        count.div_ceil(sizes.max().unwrap_or(1).max(1))
    }
}

/// Results of a run.
pub(super) struct Trace {
    pub(super) seen: SeenRanges,
    /// Hidden states between the layers.
    pub(super) hidden: Vec<Vec<f32>>,
    /// Logits of all tokens, or the largest ones.
    pub(super) logits: Vec<f32>,
    /// Number of the largest logits of a position; 0 if `logits` has all.
    pub(super) largest: usize,
}

/// Runs `tokens` through the functions of a context, and records hidden states.
pub(super) fn trace(
    model: &Arc<LoadedModel>,
    log: &Log,
    context: u64,
    tokens: &[u32],
    hidden: Hidden,
) -> Result<Trace> {
    let tokens = &tokens[..tokens.len().min(context as usize)];
    if model.bundle().model.band().is_some() {
        // without overlapping windows a text is at most one window long
        let window = model.bundle().model.classification().filter(|of| of.stride == 0).map(|of| of.window);
        let most = window.or(model.longest_text()).map_or(tokens.len(), |most| most as usize);
        let answer = Windows::new(model, None, hidden)?.label(&tokens[..tokens.len().min(most)])?;
        return Ok(Trace { seen: log.take(), hidden: answer.hidden, logits: answer.logits, largest: 0 });
    }
    let mut session = model.start(context)?;
    let chunking = every_function(model.bundle(), context);
    let ask = ForwardOptions::all(chunking).recording(hidden).largest(!model.gives_logits());
    let answer = session.forward(tokens, &ask)?;
    let largest = model.largest_logits().filter(|_| !model.gives_logits()).unwrap_or(0);
    Ok(Trace { seen: log.take(), hidden: answer.hidden, logits: answer.logits, largest })
}

/// Calls that reach the functions of every number of tokens, large ones first.
fn every_function(bundle: &Bundle, context: u64) -> Chunking {
    let layers = bundle.functions.iter().filter(|f| f.stage.whole_layers().is_some() && f.context == context);
    let mut sizes: Vec<u64> = layers.map(|entry| entry.tokens.most()).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    sizes.dedup();
    Chunking::Pattern(sizes)
}
