//! Test double: a bundle without packages and a backend that computes a tiny attention model from the ports alone, so
//! that wrong masks, rows or orders give wrong numbers.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::backend::{Backend, BatchMember, BatchResult, FunctionCall, Phase, Sequence, Watch};
use super::backend::{run_anew, run_each, run_in_turn};
use super::error::RuntimeError;
use super::function_pool::{FunctionPool, FunctionWeights};
use super::host::HostTables;
use super::model::LoadedModel;
use anec_base::MappedFile;
use anec_base::Result;
use anec_bundle::*;
use anec_exec::{Tensor, TensorData};

pub const HIDDEN: usize = 4;
pub const VOCAB: usize = 8;
/// Layers of each shard, and vocabulary rows of each head part.
pub const SHARDS: [[usize; 2]; 2] = [[0, 2], [2, 3]];
pub const PIECES: [[u64; 2]; 2] = [[0, 5], [5, 8]];
/// Sliding window of the second layer.
pub const WINDOW: u64 = 3;
/// Length above which texts use another rotary table.
pub const SHORT: u64 = 6;
pub const EOS: u64 = 7;

/// Options of the double.
#[derive(Clone)]
pub struct FakeOptions {
    pub contexts: Vec<u64>,
    pub layer_tokens: Vec<TokenCount>,
    pub head_tokens: Vec<TokenCount>,
    /// Whether keys are written at a position instead of through a mask.
    pub slice: bool,
    /// Whether the first layer is a recurrence, which no position undoes.
    pub recurrent: bool,
    /// Whether states can be copied.
    pub forks: bool,
    /// Failures by call number, counted over all texts.
    pub script: Vec<(usize, FakeFailure)>,
    /// Memory from which functions are evicted; `None` keeps all functions loaded.
    pub memory: Option<Arc<FakeMemory>>,
}

/// Size of a loaded function of the double in bytes.
const FUNCTION_BYTES: u64 = 10;

/// Functions in memory.
pub struct FakeMemory {
    pool: FunctionPool<usize, ()>,
    limit: u64,
    loads: AtomicUsize,
}

impl FakeMemory {
    /// Creates a memory for this many functions.
    pub fn of(functions: u64) -> Arc<Self> {
        let limit = FUNCTION_BYTES * functions;
        Arc::new(FakeMemory { pool: FunctionPool::new(Some(limit)), limit, loads: AtomicUsize::new(0) })
    }

    /// Returns how often a function was loaded.
    #[cfg(test)]
    pub fn loads(&self) -> usize {
        self.loads.load(Ordering::Relaxed)
    }

    fn weights(function: usize) -> FunctionWeights {
        FunctionWeights { id: function, bytes: FUNCTION_BYTES }
    }

    fn load(&self, function: usize) -> Result<()> {
        self.pool.get(function, Self::weights(function), |_| {
            self.loads.fetch_add(1, Ordering::Relaxed);
            Ok(())
        })?;
        assert!(self.pool.bytes() <= self.limit, "more is in memory than the limit allows");
        Ok(())
    }
}

/// Failure of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FakeFailure {
    /// The backend returns an error.
    Error,
    /// The backend panics.
    Panic,
    /// The backend returns too few numbers.
    Short,
}

impl Default for FakeOptions {
    fn default() -> Self {
        let range = vec![TokenCount::Range(1, 4)];
        FakeOptions {
            contexts: vec![16],
            layer_tokens: range.clone(),
            head_tokens: range,
            slice: false,
            recurrent: false,
            forks: true,
            script: Vec::new(),
            memory: None,
        }
    }
}

/// Recorded calls: the function's name and number of tokens, 0 for a call of `prepare`.
pub type FakeCalls = Arc<Mutex<Vec<(String, usize)>>>;

pub fn model(form: &FakeOptions) -> (Arc<LoadedModel>, FakeCalls) {
    let bundle = bundle(form);
    let host =
        HostTables::from_file(&bundle, MappedFile::from_bytes(Path::new("host.safetensors"), host_file(form))).unwrap();
    let calls = FakeCalls::default();
    let backend = Double { bundle: Arc::new(bundle.clone()), calls: calls.clone(), form: form.clone() };
    let model = LoadedModel::new(bundle, Path::new("double"), Arc::new(host), Box::new(backend)).unwrap();
    (model, calls)
}

/// Returns the part of a name that tells functions for several numbers of tokens apart.
fn size(all: &[TokenCount], one: &TokenCount) -> String {
    if all.len() > 1 { format!("_at_{}", one.most()) } else { String::new() }
}

fn port(name: &str, role: PortRole, shape: Vec<PortDim>) -> Port {
    Port { name: name.into(), role, shape }
}

/// Returns a shape with these channels for each token.
fn channels(channels: u64) -> Vec<PortDim> {
    vec![PortDim::Fixed(1), PortDim::Fixed(channels), PortDim::Tokens("T".into()), PortDim::Fixed(1)]
}

fn layers_function(form: &FakeOptions, [first, end]: [usize; 2], context: u64, tokens: TokenCount) -> FunctionEntry {
    let t = || PortDim::Tokens("T".into());
    let fixed = PortDim::Fixed;
    let row = |columns| vec![fixed(1), fixed(1), t(), fixed(columns)];
    let mask = |window| PortRole::AttentionMask { window };
    let mut inputs = vec![
        port("hidden", PortRole::Hidden, channels(HIDDEN as u64)),
        port("rope_cos", PortRole::RopeCos { table: "rope".into() }, row(1)),
        port("rope_sin", PortRole::RopeSin { table: "rope".into() }, row(1)),
        port("attn_mask", mask(None), row(context)),
        port("attn_mask_local", mask(Some(WINDOW)), row(context)),
    ];
    if form.slice {
        inputs.push(port("cache_begin", PortRole::SliceBegin, vec![fixed(4)]));
        inputs.push(port("cache_end", PortRole::SliceEnd, vec![fixed(4)]));
    } else {
        inputs.push(port("kv_write_mask", PortRole::KvWriteMask, vec![fixed(1), fixed(1), fixed(context), t()]));
    }
    let cache = |layer: usize| StatePort {
        name: format!("v_cache_{layer}"),
        id: state_id(&format!("v_cache_{layer}"), context),
        role: StateRole::ValueCache { layer },
        shape: vec![1, 1, context, HIDDEN as u64],
    };
    let memory = (form.recurrent && first == 0).then(|| StatePort {
        name: "memory".into(),
        id: state_id("memory", context),
        role: StateRole::DelayState { layers: vec![0] },
        shape: vec![1, 1, 1, 1],
    });
    let probe = |layer| HiddenProbe { layer, value: format!("after_{layer}") };
    FunctionEntry {
        package: format!("layers_{first}_{end}.mlpackage"),
        function: format!("layers_{first}_{end}_of_{context}{}", size(&form.layer_tokens, &tokens)),
        stage: Stage::Layers { first, end },
        context,
        tokens,
        inputs,
        outputs: vec![port("hidden_out", PortRole::Hidden, channels(HIDDEN as u64))],
        states: (first..end).map(cache).chain(memory).collect(),
        probes: (first..end - 1).map(probe).collect(),
        logits: None,
    }
}

fn head_function(form: &FakeOptions, [first, end]: [u64; 2], context: u64, tokens: TokenCount) -> FunctionEntry {
    FunctionEntry {
        package: format!("head_{first}_{end}.mlpackage"),
        function: format!("head_{first}_{end}{}", size(&form.head_tokens, &tokens)),
        stage: Stage::Head { first, end },
        context,
        tokens,
        inputs: vec![port("hidden", PortRole::Hidden, channels(HIDDEN as u64))],
        outputs: vec![port("logits", PortRole::Logits, channels(end - first))],
        states: Vec::new(),
        probes: Vec::new(),
        logits: None,
    }
}

pub fn bundle(form: &FakeOptions) -> Bundle {
    let mut functions = Vec::new();
    let mut contexts = form.contexts.clone();
    contexts.sort_unstable();
    let longest = contexts[contexts.len() - 1];
    for shard in SHARDS {
        for &context in &contexts {
            functions.extend(form.layer_tokens.iter().map(|tokens| layers_function(form, shard, context, *tokens)));
        }
    }
    for piece in PIECES {
        functions.extend(form.head_tokens.iter().map(|tokens| head_function(form, piece, longest, *tokens)));
    }
    let mut packages: Vec<PackageEntry> = Vec::new();
    for FunctionEntry { package, .. } in &functions {
        if packages.last().is_none_or(|last| last.package != *package) {
            let (package, files) = (package.clone(), Vec::new());
            packages.push(PackageEntry { package, compiled: None, weight_bytes: 0, files });
        }
    }
    let digest = FileDigest { file: "host.safetensors".into(), bytes: 0, digest: anec_base::ContentDigest::of(&[]) };
    let variant = |max_length: u64, name: &str| RopeVariant {
        max_length,
        cos: format!("{name}.cos"),
        sin: format!("{name}.sin"),
    };
    Bundle {
        schema_version: SCHEMA_VERSION,
        anec_version: "0".into(),
        name: "double".into(),
        family: "double".into(),
        model: ModelFacts {
            task: Task::default(),
            hidden_scale: 1.0,
            hidden_size: HIDDEN as u64,
            num_layers: 3,
            vocab_size: VOCAB as u64,
            contexts,
            eos_token_ids: vec![EOS],
            bos_token_id: None,
        },
        config: serde_json::Value::Null,
        manifest: Manifest::default(),
        transforms: Vec::new(),
        source: SourceFacts { name: String::new(), format: String::new(), files: Vec::new() },
        packages,
        functions,
        draft: None,
        host: HostFacts {
            file: digest,
            embedding: "embedding".into(),
            positions: None,
            token_types: None,
            embedding_size: None,
            attention_bias: None,
            per_layer_embedding: None,
            rope: vec![RopeTable {
                table: "rope".into(),
                variants: vec![variant(SHORT, "short"), variant(longest, "long")],
            }],
            rotation: None,
        },
        tokenizer: BTreeMap::new(),
        tokenizer_files: Vec::new(),
        ledger: LedgerTotals::default(),
    }
}

fn embedding(token: usize, channel: usize) -> f32 {
    ((token * 7 + channel * 3) % 11) as f32 / 8.0 - 0.5
}

fn wave(position: usize, long: bool) -> (f32, f32) {
    let angle = position as f32 * if long { 0.25 } else { 0.5 };
    (angle.cos(), angle.sin())
}

fn host_file(form: &FakeOptions) -> Vec<u8> {
    let embedding: Vec<u8> = (0..VOCAB)
        .flat_map(|token| (0..HIDDEN).map(move |channel| half::f16::from_f32(embedding(token, channel))))
        .flat_map(half::f16::to_le_bytes)
        .collect();
    let long = *form.contexts.iter().max().unwrap() as usize;
    let table = |rows: usize, long: bool, sine: bool| -> Vec<u8> {
        let value = |position| if sine { wave(position, long).1 } else { wave(position, long).0 };
        (0..rows).flat_map(|position| value(position).to_le_bytes()).collect()
    };
    let tables = [
        ("short.cos", SHORT as usize, table(SHORT as usize, false, false)),
        ("short.sin", SHORT as usize, table(SHORT as usize, false, true)),
        ("long.cos", long, table(long, true, false)),
        ("long.sin", long, table(long, true, true)),
    ];
    let mut views = vec![("embedding", TensorView::new(Dtype::F16, vec![VOCAB, HIDDEN], &embedding).unwrap())];
    for (name, rows, bytes) in &tables {
        views.push((name, TensorView::new(Dtype::F32, vec![*rows, 1], bytes).unwrap()));
    }
    safetensors::serialize(views, None).unwrap()
}

/// Returns the value that a token leaves in the cache of a layer.
fn cached(hidden: f32, (cos, sin): (f32, f32)) -> f32 {
    hidden * cos + sin
}

/// Returns what a layer adds for a cache slot that a token sees.
fn seen(slot: usize, value: f32) -> f32 {
    value / (slot + 2) as f32
}

fn logit(row: usize, hidden: &[f32]) -> f32 {
    hidden.iter().enumerate().map(|(channel, h)| h * (((row * 5 + channel * 2) % 7) as f32 - 3.0)).sum()
}

/// Reference of the model: for each token the hidden states before and after the layers, and the logits. Computed over
/// whole texts without calls, masks or caches.
pub fn reference(tokens: &[u32], length: u64) -> (Vec<Vec<f32>>, Vec<f32>) {
    let long = length > SHORT;
    let mut hidden: Vec<Vec<f32>> =
        tokens.iter().map(|token| (0..HIDDEN).map(|c| embedding(*token as usize, c)).collect()).collect();
    let mut layers = vec![hidden.concat()];
    for layer in 0..3 {
        let before = hidden.clone();
        for (p, now) in hidden.iter_mut().enumerate() {
            let first = if layer == 1 { (p + 1).saturating_sub(WINDOW as usize) } else { 0 };
            for (slot, old) in before.iter().enumerate().take(p + 1).skip(first) {
                for c in 0..HIDDEN {
                    now[c] += seen(slot, cached(old[c], wave(slot, long)));
                }
            }
        }
        layers.push(hidden.concat());
    }
    let logits = hidden.iter().flat_map(|h| (0..VOCAB).map(|row| logit(row, h))).collect();
    (layers, logits)
}

struct Double {
    bundle: Arc<Bundle>,
    calls: FakeCalls,
    form: FakeOptions,
}

/// Records a call and returns its scripted failure, if any.
fn note(calls: &FakeCalls, form: &FakeOptions, function: &str, tokens: usize) -> Result<Option<FakeFailure>> {
    let number = {
        let mut calls = calls.lock().unwrap();
        calls.push((function.to_owned(), tokens));
        calls.len() - 1
    };
    match form.script.iter().find(|(at, _)| *at == number).map(|(_, failure)| *failure) {
        Some(FakeFailure::Error) => {
            let problem = "the device is busy".to_owned();
            Err(RuntimeError::Backend { backend: "double", problem }.into())
        }
        Some(FakeFailure::Panic) => panic!("as the script says"),
        other => Ok(other),
    }
}

impl Backend for Double {
    fn prepare(&self, function: usize) -> Result<()> {
        note(&self.calls, &self.form, &self.bundle.functions[function].function, 0)?;
        self.form.memory.as_ref().map_or(Ok(()), |memory| memory.load(function))
    }

    fn has_room(&self, function: usize) -> bool {
        self.form.memory.as_ref().is_none_or(|memory| memory.pool.has_room(FakeMemory::weights(function)))
    }

    fn of_bundle(&self, _bundle: &Bundle) -> Result<Option<Box<dyn Backend>>> {
        Ok(None)
    }

    fn run_batch(&self, function: usize, members: Vec<BatchMember<'_>>) -> Vec<BatchResult> {
        run_each(function, members)
    }

    fn sequence(&self) -> Result<Box<dyn Sequence>> {
        Ok(Box::new(Text {
            bundle: self.bundle.clone(),
            calls: self.calls.clone(),
            form: self.form.clone(),
            caches: Default::default(),
            memory: 0.0,
        }))
    }
}

#[derive(Clone)]
struct Text {
    bundle: Arc<Bundle>,
    calls: FakeCalls,
    form: FakeOptions,
    /// Caches `[S, HIDDEN]` by layer.
    caches: BTreeMap<usize, Vec<f32>>,
    memory: f32,
}

impl Sequence for Text {
    fn run(&mut self, function: usize, inputs: &[&Tensor], mut watch: Option<Watch<'_>>) -> Result<Vec<Tensor>> {
        let entry = self.bundle.functions[function].clone();
        let named: BTreeMap<&str, &Tensor> =
            entry.inputs.iter().map(|p| p.name.as_str()).zip(inputs.iter().copied()).collect();
        let t = named["hidden"].shape[2];
        assert!(entry.tokens.allows(t as u64), "{} got {t} tokens", entry.function);
        if note(&self.calls, &self.form, &entry.function, t)? == Some(FakeFailure::Short) {
            return Ok(vec![Tensor::new(vec![1], vec![0.0])]);
        }
        self.form.memory.as_ref().map_or(Ok(()), |memory| memory.load(function))?;
        let mut hidden = named["hidden"].floats().unwrap().to_vec();
        let (first, end) = match entry.stage {
            Stage::Layers { first, end } => (first, end),
            Stage::FeedForward { .. } | Stage::Experts { .. } | Stage::Model { .. } => {
                unreachable!("the double's layers are whole, and its head is apart")
            }
            Stage::Head { first, end } => {
                let rows = first as usize..end as usize;
                let mut logits = vec![0.0; rows.len() * t];
                for t_ in 0..t {
                    let column: Vec<f32> = (0..HIDDEN).map(|c| hidden[c * t + t_]).collect();
                    for (i, row) in rows.clone().enumerate() {
                        logits[i * t + t_] = logit(row, &column);
                    }
                }
                return Ok(vec![Tensor::new(vec![1, rows.len(), t, 1], logits)]);
            }
        };
        let slots = entry.context as usize;
        let (cos, sin) = (named["rope_cos"].floats().unwrap(), named["rope_sin"].floats().unwrap());
        if first == 0 && self.form.recurrent {
            for t_ in 0..t {
                self.memory = self.memory * 0.5 + hidden[t_];
                hidden[t + t_] += self.memory;
            }
        }
        // slots that each token is written to
        let written: Vec<Vec<usize>> = match named.get("cache_begin").map(|p| &p.data) {
            Some(TensorData::I32(begin)) => (begin[2] as usize..slots).take(t).map(|slot| vec![slot]).collect(),
            _ => {
                let mask = named["kv_write_mask"].floats().unwrap();
                (0..t).map(|t_| (0..slots).filter(|slot| mask[slot * t + t_] == 1.0).collect()).collect()
            }
        };
        for layer in first..end {
            let cache = self.caches.entry(layer).or_insert_with(|| vec![0.0; slots * HIDDEN]);
            for (t_, written) in written.iter().enumerate() {
                for slot in written {
                    for c in 0..HIDDEN {
                        cache[slot * HIDDEN + c] = cached(hidden[c * t + t_], (cos[t_], sin[t_]));
                    }
                }
            }
            let mask = named[if layer == 1 { "attn_mask_local" } else { "attn_mask" }].floats().unwrap();
            for t_ in 0..t {
                for slot in (0..slots).filter(|slot| mask[t_ * slots + slot] == 0.0) {
                    for c in 0..HIDDEN {
                        hidden[c * t + t_] += seen(slot, cache[slot * HIDDEN + c]);
                    }
                }
            }
            let shown = Tensor::new(vec![1, HIDDEN, t, 1], hidden.clone());
            if let Some(watch) = &mut watch {
                watch(&format!("after_{layer}"), &shown);
            }
        }
        Ok(vec![Tensor::new(vec![1, HIDDEN, t, 1], hidden)])
    }

    fn run_into(&mut self, call: FunctionCall<'_>, outputs: &mut Vec<Arc<Tensor>>) -> Result<()> {
        run_anew(self, call, outputs)
    }

    fn run_together(&mut self, calls: &[FunctionCall<'_>], outputs: &mut [Vec<Arc<Tensor>>]) -> Result<()> {
        run_in_turn(self, calls, outputs)
    }

    fn enter(&mut self, _phase: Phase) {}

    fn states(&self, function: usize) -> Result<Option<Vec<Arc<Tensor>>>> {
        let tensor = |state: &StatePort| {
            let values = match &state.role {
                StateRole::ValueCache { layer } => self.caches.get(layer)?.clone(),
                _ => vec![self.memory],
            };
            Some(Arc::new(Tensor::new(state.shape.iter().map(|size| *size as usize).collect::<Vec<_>>(), values)))
        };
        Ok(self.bundle.functions[function].states.iter().map(tensor).collect())
    }

    fn set_states(&mut self, function: usize, values: Vec<Tensor>) -> Result<()> {
        for (state, tensor) in self.bundle.functions[function].states.iter().zip(values) {
            let TensorData::F32(values) = tensor.data else { panic!("states are floats") };
            match &state.role {
                StateRole::ValueCache { layer } => drop(self.caches.insert(*layer, values)),
                _ => self.memory = values[0],
            }
        }
        Ok(())
    }

    fn reset(&mut self) -> Result<()> {
        self.caches.clear();
        self.memory = 0.0;
        Ok(())
    }

    fn fork(&self) -> Result<Option<Box<dyn Sequence>>> {
        Ok(self.form.forks.then(|| Box::new(self.clone()) as Box<dyn Sequence>))
    }
}
