//! Every dense family agrees with transformers: the emitted graph, run by the executor, gives the reference's logits
//! and hidden states at every position, whatever the chunks that the tokens come in, from either kind of source.

use crate::common::covering::covering;
use crate::common::folder;
use crate::common::forms::FORM;
use crate::common::fp16_literals::Fp16Literals;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use anec::base::Result;
use anec::bundle::{PortDim, PortRole, Stage, TokenCount};
use anec::exec::{Executable, Precision, State, Tensor, WeightCache};
use anec::family::{EmitWeight, FamilyModel, FunctionGraph, FunctionRequest, HostTensors, LoweringOptions};
use anec::manifest::{
    ActivationForm, AttentionForm, HeadOutputs, KvWrite, Layout, LinearForm, NormForm, RecurrentForm, Role, RopeForm,
    RotateBy, RotationOptions, StateForm, Transform,
};
use anec::mil::{Constant, FunctionBuilder, ValueId};
use anec::source::{Ledger, Source, SourceWeight};
use rayon::prelude::*;
use safetensors::SafeTensors;

/// One row of numbers for each token.
type Rows = Vec<Vec<f32>>;

const CONTEXT: u64 = 64;
const NORMS: [NormForm; 4] = [NormForm::Accurate, NormForm::Naive, NormForm::LayerNormConcat, NormForm::Prescale];

/// Weights as sums of two fp16 literals, which in f32 are all but the weights themselves.
struct TwoHalves;

impl EmitWeight for TwoHalves {
    fn emit(
        &mut self,
        b: &mut FunctionBuilder,
        name: &str,
        role: Role,
        w: &SourceWeight,
        shape: &[u64],
    ) -> Result<ValueId> {
        // the bias of a convolution must be a constant
        if role == Role::Bias {
            return Fp16Literals.emit(b, name, role, w, shape);
        }
        const SMALLER: f32 = 1.0 / 2048.0;
        let mut values = vec![0f32; w.elements() as usize];
        w.read(0, &mut values)?;
        let rest: Vec<f32> = values.iter().map(|v| (v - half::f16::from_f32(*v).to_f32()) / SMALLER).collect();
        let first = b.constant(&format!("{name}_first"), Constant::fp16_tensor(shape, &values));
        let rest = b.constant(&format!("{name}_rest"), Constant::fp16_tensor(shape, &rest));
        let rest = b.mul(rest, Constant::fp16(SMALLER));
        Ok(b.add(first, rest))
    }
}

/// A model's two functions, and what the host does for them.
struct Runner {
    layers: (FunctionGraph, Executable),
    head: (FunctionGraph, Executable),
    host: HostTensors,
    hidden_size: usize,
    num_layers: usize,
    layout: Layout,
}

impl Runner {
    fn new(
        model: &dyn FamilyModel,
        form: LoweringOptions,
        tokens: TokenCount,
        context: u64,
        precision: Precision,
    ) -> Result<Runner> {
        Runner::with(model, form, tokens, context, precision, &mut Fp16Literals)
    }

    fn with(
        model: &dyn FamilyModel,
        form: LoweringOptions,
        tokens: TokenCount,
        context: u64,
        precision: Precision,
        weights: &mut dyn EmitWeight,
    ) -> Result<Runner> {
        let facts = model.facts();
        let cache = WeightCache::new();
        let mut build = |stage: Stage| -> Result<(FunctionGraph, Executable)> {
            let (name, most_tokens, default_tokens) = ("main".into(), tokens.most(), tokens.least());
            let request = FunctionRequest {
                name,
                stage,
                tokens,
                default_tokens,
                context,
                most_tokens,
                head: HeadOutputs::default(),
            };
            let graph = model.build(&form, &request, weights)?;
            let executable = Executable::compile(&graph.function, precision, &cache)?;
            Ok((graph, executable))
        };
        Ok(Runner {
            layers: build(Stage::Layers { first: 0, end: facts.num_layers })?,
            head: build(Stage::Head { first: 0, end: facts.vocab_size })?,
            host: model.host(context)?,
            hidden_size: facts.hidden_size as usize,
            num_layers: facts.num_layers,
            layout: form.layout,
        })
    }

    /// `[1, channels, T, 1]` from one row for each token.
    fn hidden(&self, rows: &[Vec<f32>]) -> Tensor {
        let (channels, tokens) = (rows[0].len(), rows.len());
        let data: Vec<f32> = (0..channels * tokens).map(|i| rows[i % tokens][i / tokens]).collect();
        let shape = match self.layout {
            Layout::Bcs1 => vec![1, channels, tokens, 1],
            Layout::Bc1s => vec![1, channels, 1, tokens],
        };
        Tensor::new(shape, data)
    }

    /// Rows for each token from `[1, channels, T, 1]`.
    fn rows(tensor: &Tensor, tokens: usize) -> Vec<Vec<f32>> {
        let data = tensor.floats().expect("floats");
        let channels = data.len() / tokens;
        (0..tokens).map(|t| (0..channels).map(|c| data[c * tokens + t]).collect()).collect()
    }

    /// Logits of every token, and the hidden states that leave layers, by how many layers they went through.
    fn run(&self, tokens: &[i32], chunks: &[usize]) -> Result<(Rows, BTreeMap<usize, Rows>)> {
        self.run_from(&mut self.layers.1.new_state(), tokens, chunks)
    }

    /// Runs from a given state.
    #[allow(clippy::type_complexity, reason = "as above")]
    fn run_from(
        &self,
        state: &mut State,
        tokens: &[i32],
        chunks: &[usize],
    ) -> Result<(Vec<Vec<f32>>, BTreeMap<usize, Vec<Vec<f32>>>)> {
        let (mut logits, mut hidden) = (Vec::new(), BTreeMap::<usize, Vec<Vec<f32>>>::new());
        let (mut done, mut turn) = (0, 0);
        let mut kept = BTreeMap::new();
        while done < tokens.len() {
            let count = chunks[turn % chunks.len()].min(tokens.len() - done);
            turn += 1;
            let chunk = &tokens[done..done + count];
            let inputs = self.inputs(chunk, done, tokens.len(), &kept)?;
            let inputs: Vec<(&str, &Tensor)> = inputs.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
            let outputs = self.layers.1.run_with(&inputs, state, &mut |name, tensor| {
                let probe = self.layers.0.probes.iter().find(|probe| probe.value == name).map(|probe| probe.layer + 1);
                let last = (name == "hidden_out").then_some(self.layers.0.probes.len() + 1);
                if let Some(layers) = probe.or(last) {
                    hidden.entry(layers).or_default().extend(Runner::rows(tensor, count));
                }
            })?;
            for (name, tensor) in &outputs {
                let port = self.layers.0.outputs.iter().find(|port| port.name == *name).expect("a port");
                match &port.role {
                    PortRole::State { id, .. } => {
                        kept.insert(id.clone(), tensor.clone());
                    }
                    PortRole::CacheRows { id, .. } => self.append(&mut kept, id, tensor, done),
                    _ => {}
                }
            }
            let mut none = self.head.1.new_state();
            let out = self.head.1.run(&[("hidden", &outputs[0].1)], &mut none)?;
            logits.extend(Runner::rows(&out[0].1, count));
            done += count;
        }
        Ok((logits, hidden))
    }

    /// Appends the rows of a call that starts at position `first`, as a host does.
    fn append(&self, kept: &mut BTreeMap<String, Tensor>, id: &str, rows: &Tensor, first: usize) {
        let cache = |port: &&anec::bundle::Port| matches!(&port.role, PortRole::Cache { id: own, .. } if own == id);
        let port = self.layers.0.inputs.iter().find(cache).expect("a cache");
        let shape: Vec<usize> = port.shape_at(1).into_iter().map(|extent| extent as usize).collect();
        let cache =
            kept.entry(id.to_owned()).or_insert_with(|| Tensor::new(shape.clone(), vec![0f32; shape.iter().product()]));
        let (heads, slots, width, count) = (shape[1], shape[2], shape[3], rows.shape[2]);
        let mut values = cache.floats().expect("floats").to_vec();
        for (head, t) in (0..heads).flat_map(|head| (0..count).map(move |t| (head, t))) {
            let to = (head * slots + (first + t) % slots) * width;
            let from = (head * count + t) * width;
            values[to..to + width].copy_from_slice(&rows.floats().expect("floats")[from..from + width]);
        }
        *cache = Tensor::new(shape, values);
    }

    fn inputs(
        &self,
        chunk: &[i32],
        first: usize,
        length: usize,
        kept: &BTreeMap<String, Tensor>,
    ) -> Result<Vec<(String, Tensor)>> {
        let count = chunk.len();
        let mut inputs = Vec::new();
        for port in &self.layers.0.inputs {
            let slots = |axis: usize| match port.shape[axis] {
                PortDim::Fixed(slots) => slots as usize,
                PortDim::Tokens(_) => unreachable!("slots are fixed"),
            };
            let tensor = match &port.role {
                PortRole::Hidden => {
                    let mut rows = Vec::new();
                    for (position, token) in (first as u64..).zip(chunk) {
                        let mut row = vec![0f32; self.hidden_size];
                        self.host.embedding.read_rows(*token as u64, &mut row)?;
                        if let Some(table) = &self.host.positions {
                            let mut learned = row.clone();
                            table.read_rows(position, &mut learned)?;
                            row.iter_mut().zip(learned).for_each(|(sum, value)| *sum += value);
                        }
                        rows.push(row);
                    }
                    self.hidden(&rows)
                }
                PortRole::PerLayerInput { first: layer, end } => {
                    let table = self.host.per_layer_embedding.as_ref().expect("a table");
                    let mut rows = Vec::new();
                    for token in chunk {
                        let mut row = vec![0f32; table.columns() as usize];
                        table.read_rows(*token as u64, &mut row)?;
                        let width = row.len() / self.num_layers;
                        rows.push(row[layer * width..end * width].to_vec());
                    }
                    self.hidden(&rows)
                }
                PortRole::RopeCos { table } | PortRole::RopeSin { table } => {
                    let table = self.host.rope.iter().find(|t| t.table == *table).expect("a table");
                    let variant = table.variants.iter().find(|v| v.max_length >= length as u64).expect("a variant");
                    let values =
                        if matches!(port.role, PortRole::RopeCos { .. }) { &variant.cos } else { &variant.sin };
                    let columns = table.columns as usize;
                    let part = &values[first * columns..(first + count) * columns];
                    Tensor::new(vec![1, 1, count, columns], part.to_vec())
                }
                // position p lives in slot p mod S
                PortRole::AttentionMask { window } => {
                    let slots = slots(3);
                    let sees = |t: usize, s: usize| {
                        let position = first + t;
                        let oldest = window.map_or(0, |w| (position + 1).saturating_sub(w as usize));
                        (oldest..=position).any(|seen| seen % slots == s)
                    };
                    let data = (0..count * slots).map(|i| if sees(i / slots, i % slots) { 0.0 } else { -1e4 });
                    Tensor::new(vec![1, 1, count, slots], data.collect::<Vec<f32>>())
                }
                PortRole::PastMask { window } => {
                    let slots = slots(3);
                    let sees = |t: usize, s: usize| {
                        let oldest = window.map_or(0, |w| (first + t + 1).saturating_sub(w as usize));
                        (oldest..first).any(|seen| seen % slots == s)
                    };
                    let data = (0..count * slots).map(|i| if sees(i / slots, i % slots) { 0.0 } else { -1e4 });
                    Tensor::new(vec![1, 1, count, slots], data.collect::<Vec<f32>>())
                }
                PortRole::CallMask { window } => {
                    let sees = |t: usize, s: usize| s <= t && window.is_none_or(|w| t - s < w as usize);
                    let data = (0..count * count).map(|i| if sees(i / count, i % count) { 0.0 } else { -1e4 });
                    Tensor::new(vec![1, 1, count, count], data.collect::<Vec<f32>>())
                }
                PortRole::KvWriteMask => {
                    let slots = slots(2);
                    let data =
                        (0..slots * count).map(|i| if i / count == (first + i % count) % slots { 1.0 } else { 0.0 });
                    Tensor::new(vec![1, 1, slots, count], data.collect::<Vec<f32>>())
                }
                PortRole::TokenOrder => {
                    // halves of ever larger blocks, counted out by splitting
                    let planes = slots(1);
                    let mut data = vec![0f32; planes * count * count];
                    for (i, j) in (0..count).flat_map(|i| (0..=i).map(move |j| (i, j))) {
                        data[i * count + j] = 1.0;
                        if i > j {
                            let level = (0..).find(|n| i >> (n + 1) == j >> (n + 1)).expect("a common block");
                            data[((1 + level) * count + i) * count + j] = 1.0;
                        }
                    }
                    Tensor::new(vec![1, planes, count, count], data)
                }
                PortRole::SliceBegin => Tensor::new(vec![4], vec![0, 0, first as i32, 0]),
                PortRole::SliceEnd => Tensor::new(vec![4], vec![0, 0, (first + count) as i32, 0]),
                PortRole::State { id, .. } | PortRole::Cache { id, .. } => kept.get(id).cloned().unwrap_or_else(|| {
                    let shape: Vec<usize> = (0..port.shape.len()).map(slots).collect();
                    Tensor::new(shape.clone(), vec![0f32; shape.iter().product()])
                }),
                other => unreachable!("{other:?} is no input of layers"),
            };
            inputs.push((port.name.clone(), tensor));
        }
        Ok(inputs)
    }
}

/// A golden file's tensors.
struct Golden {
    tokens: Vec<i32>,
    logits: Vec<Vec<f32>>,
    hidden: Vec<Vec<Vec<f32>>>,
}

impl Golden {
    fn read(path: &Path) -> Golden {
        let bytes = std::fs::read(path).expect("a golden");
        let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
        let rows = |name: &str| -> Option<Vec<Vec<f32>>> {
            let view = tensors.tensor(name).ok()?;
            let floats: Vec<f32> =
                view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            Some(floats.chunks(view.shape()[1]).map(<[f32]>::to_vec).collect())
        };
        let tokens = tensors.tensor("tokens").expect("tokens").data();
        Golden {
            tokens: tokens.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            logits: rows("logits").expect("logits"),
            hidden: (0..).map_while(|i| rows(&format!("hidden.{i}"))).collect(),
        }
    }
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Smallest cosine and largest absolute difference over positions.
fn distance(found: &[Vec<f32>], expected: &[Vec<f32>]) -> (f64, f32) {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).fold((1.0, 0.0), |(worst, largest), (f, e)| {
        assert_eq!(f.len(), e.len());
        let difference = f.iter().zip(e).map(|(f, e)| (f - e).abs()).fold(0.0, f32::max);
        (cosine(f, e).min(worst), difference.max(largest))
    })
}

fn cases() -> (PathBuf, Vec<serde_json::Value>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families");
    let list = std::fs::read_to_string(root.join("cases.json")).expect("the list of cases");
    let list: serde_json::Value = serde_json::from_str(&list).expect("JSON");
    (root, list["cases"].as_array().expect("a list").clone())
}

fn with_model(root: &Path, case: &serde_json::Value, key: &str, body: impl FnOnce(&dyn FamilyModel)) {
    let Some(path) = case[key].as_str() else { return };
    let source = Source::open_path(&root.join(path)).expect(path);
    let mut ledger = Ledger::new(&source);
    let model = anec::family::open(&mut ledger, case["family"].as_str(), &[]).unwrap_or_else(|e| panic!("{path}: {e}"));
    body(&*model);
}

#[test]
fn logits_and_hidden_states_agree_with_transformers_at_every_position() {
    let (root, cases) = cases();
    let compared = cases
        .par_iter()
        .map(|case| {
            let mut compared = 0;
            for key in ["hugging_face", "gguf"] {
                with_model(&root, case, key, |model| {
                    for golden in case["goldens"].as_array().expect("goldens") {
                        let golden = Golden::read(&root.join(golden["file"].as_str().expect("a file")));
                        let length = golden.tokens.len() as u64;
                        // dynamic scaling is defined by the length of the text: the context is that length
                        let dynamic = model.facts().config["rope"]["scaling"]["rope_type"] == "dynamic";
                        let context = if dynamic { length } else { CONTEXT };
                        let range = TokenCount::Range(1, 4);
                        let runner = Runner::new(model, FORM, range, context, Precision::F32).expect("compiles");
                        let by_host = LoweringOptions { state: StateForm::Host, ..FORM };
                        let by_host = Runner::new(model, by_host, range, context, Precision::F32).expect("compiles");
                        assert_eq!(by_host.layers.0.states, []);
                        for chunks in [&[1][..], &[2], &[3], &[4], &[3, 1, 4, 2]] {
                            let (logits, hidden) = runner.run(&golden.tokens, chunks).expect("runs");
                            let name = format!("{} {key} {chunks:?}", case["name"]);
                            let (cosine, difference) = distance(&logits, &golden.logits);
                            assert!(cosine > 0.99999 && difference < 0.03, "{name}: logits {cosine} {difference}");
                            let (appended, _) = by_host.run(&golden.tokens, chunks).expect("runs");
                            let (cosine, difference) = distance(&appended, &golden.logits);
                            assert!(cosine > 0.99999 && difference < 0.03, "{name}, host: {cosine} {difference}");
                            for (layer, expected) in golden.hidden.iter().enumerate().skip(1) {
                                let (cosine, difference) = distance(&hidden[&layer], expected);
                                assert!(cosine > 0.99999, "{name}: after layer {}: {cosine} {difference}", layer - 1);
                            }
                            if model.facts().recurrent {
                                for state in [StateForm::PerLayer, StateForm::Unified] {
                                    let form =
                                        LoweringOptions { state, recurrent_states: RecurrentForm::InputOutput, ..FORM };
                                    let kept = Runner::new(model, form, range, context, Precision::F32);
                                    let (kept, _) = kept.expect("compiles").run(&golden.tokens, chunks).expect("runs");
                                    // one state for all layers is written after attention: sums run in another order
                                    let (cosine, difference) = distance(&kept, &logits);
                                    let same = state == StateForm::Unified && cosine > 0.999_999_9 && difference < 1e-3;
                                    assert!(
                                        same || kept == logits,
                                        "{name}: {cosine} {difference} from what states kept"
                                    );
                                }
                            }
                            compared += 1;
                        }
                        // what an earlier text left behind is gone after a reset
                        let mut state = runner.layers.1.new_state();
                        let (fresh, _) = runner.run_from(&mut state, &golden.tokens, &[3]).expect("runs");
                        state.reset();
                        let (again, _) = runner.run_from(&mut state, &golden.tokens, &[3]).expect("runs");
                        assert_eq!(fresh, again, "{} {key}", case["name"]);
                    }
                });
            }
            compared
        })
        .sum::<usize>();
    assert!(compared >= 5 * 40, "{compared} comparisons");
}

#[test]
fn every_form_gives_the_same_logits() {
    let (root, cases) = cases();
    let names = [
        "qwen2-tokenizer",
        "phi3-longrope",
        "qwen3-default",
        "olmo2-grouped",
        "granite-bias",
        "mistral-window",
        "gemma2-default",
        "gemma3-linear",
        "gemma4-dense",
        "gemma4-experts",
        "gemma4-overrides",
        "hunyuan-bias",
        "lfm2-bias",
        "qwen3_5-multimodal",
        "qwen3_next-default",
        "granitemoehybrid-dense",
        "granitemoehybrid-default",
        "falcon_h1-grouped",
        "falcon_h1-default",
        "lfm2_moe-default",
        "gpt_oss-default",
        "zaya-sliding",
        "phi-normed",
        "cohere-normed",
        "cohere2-types",
        "gpt_neox-default",
        "gpt2-wide",
        "stablelm-parallel",
    ];
    let choices = covering(&[2, 3, 4, 2, 3, 2, 2, 2], 3);
    names.par_iter().enumerate().for_each(|(number, name)| {
        let case = cases.iter().find(|case| case["name"] == *name).expect(name);
        with_model(&root, case, "hugging_face", |model| {
            let golden = Golden::read(&root.join(case["goldens"][0]["file"].as_str().expect("a file")));
            // each family takes a third of the forms, so that each form meets at least four families
            for choice in choices.iter().skip(number % 3).step_by(3) {
                let (kv_write, tokens, chunk) =
                    [(KvWrite::Mask, TokenCount::Range(1, 4), 3), (KvWrite::Slice, TokenCount::Fixed(1), 1)][choice[5]];
                let form = LoweringOptions {
                    layout: [Layout::Bcs1, Layout::Bc1s][choice[0]],
                    linear: [LinearForm::Conv, LinearForm::Linear, LinearForm::Matmul][choice[1]],
                    norm: NORMS[choice[2]],
                    attention: [AttentionForm::PerHead, AttentionForm::Grouped][choice[3]],
                    state: [StateForm::PerLayer, StateForm::Unified, StateForm::Host][choice[4]],
                    activations: [ActivationForm::Stable, ActivationForm::Native][choice[6]],
                    rope: [RopeForm::Halves, RopeForm::Product][choice[7]],
                    kv_write,
                    ..FORM
                };
                // layer norm takes its epsilon as it is, and fp16 doesn't hold that of a scaled stream
                if form.norm == NormForm::LayerNormConcat && model.facts().hidden_scale != 1.0 {
                    continue;
                }
                let runner = Runner::new(model, form, tokens, CONTEXT, Precision::F32);
                let (logits, _) = runner.expect("compiles").run(&golden.tokens, &[chunk]).expect("runs");
                let (cosine, _) = distance(&logits, &golden.logits);
                assert!(cosine > 0.99999, "{} {form:?}: {cosine}", case["name"]);
            }
        });
    });
}

#[test]
fn norms_of_a_scaled_stream_keep_their_epsilon() {
    let (root, cases) = cases();
    cases.par_iter().for_each(|case| {
        let Some(path) = case["hugging_face"].as_str() else { return };
        let source = Source::open_path(&root.join(path)).expect(path);
        let mut ledger = Ledger::new(&source);
        let mut model = anec::family::open(&mut ledger, case["family"].as_str(), &[]).expect(path);
        let golden = Golden::read(&root.join(case["goldens"][0]["file"].as_str().expect("a file")));
        let dynamic = model.facts().config["rope"]["scaling"]["rope_type"] == "dynamic";
        let context = if dynamic { golden.tokens.len() as u64 } else { CONTEXT };
        model.set_hidden_scale(1.0 / 16.0);
        for norm in [NormForm::Accurate, NormForm::Naive, NormForm::Prescale] {
            let range = TokenCount::Range(1, 4);
            let runner = Runner::new(&*model, LoweringOptions { norm, ..FORM }, range, context, Precision::F32)
                .expect("compiles");
            let (logits, _) = runner.run(&golden.tokens, &[4, 1]).expect("runs");
            let (cosine, _) = distance(&logits, &golden.logits);
            assert!(cosine > 0.99999, "{} {norm}: {cosine}", case["name"]);
        }
    });
}

/// Rows times the transpose of a square matrix.
fn turned_back(rows: &[Vec<f32>], matrix: Option<&SourceWeight>) -> Rows {
    let Some(matrix) = matrix else { return rows.to_vec() };
    let mut values = vec![0f32; matrix.elements() as usize];
    matrix.read(0, &mut values).expect("a matrix");
    let product = |row: &[f32], other: &[f32]| row.iter().zip(other).map(|(a, b)| a * b).sum();
    rows.iter().map(|row| values.chunks(row.len()).map(|other| product(row, other)).collect()).collect()
}

#[test]
fn transforms_keep_the_function() {
    let (root, cases) = cases();
    let [rotate, learned] = [false, true]
        .map(|learned| Transform::RotateBy(RotateBy { rotate: RotationOptions::seeded(7).learned(learned) }));
    let all = [Transform::Fold, rotate, Transform::Gains, Transform::Equalize];
    let alone = all.iter().map(|transform| vec![*transform]);
    let recipes = [vec![Transform::Gains, Transform::Equalize], vec![Transform::Fold, learned, Transform::Equalize]];
    let lists: Vec<Vec<Transform>> = alone.chain([all.to_vec()]).chain(recipes).collect();
    let learnt = AtomicUsize::new(0);
    let count = cases.par_iter().map(|case| {
        let Some(path) = case["hugging_face"].as_str() else { return 0 };
        let source = Source::open_path(&root.join(path)).expect(path);
        let golden = Golden::read(&root.join(case["goldens"][0]["file"].as_str().expect("a file")));
        let open = || anec::family::open(&mut Ledger::new(&source), case["family"].as_str(), &[]).expect(path);
        let run = |model: &dyn FamilyModel| {
            let dynamic = model.facts().config["rope"]["scaling"]["rope_type"] == "dynamic";
            let context = if dynamic { golden.tokens.len() as u64 } else { CONTEXT };
            let range = TokenCount::Range(1, 4);
            let runner = Runner::with(model, FORM, range, context, Precision::F32, &mut TwoHalves).expect("compiles");
            let (logits, hidden) = runner.run(&golden.tokens, &[4, 1]).expect("runs");
            (logits, hidden, runner.host.rotation)
        };
        let plain = open();
        if plain.facts().is_bidirectional() {
            assert!(all.iter().all(|transform| plain.permits(*transform).is_err()) && plain.recipe().is_empty());
            return 0;
        }
        let (logits, hidden, _) = run(&*plain);
        for list in &lists {
            let name = format!("{} {list:?}", case["name"]);
            let mut model = open();
            model.transform(list).expect("transforms");
            let done: Vec<Transform> = model.transformed().done;
            // of few channels, which no power of two divides, nothing can be learned
            let is_done = |transform: &Transform| done.iter().any(|done| done.name() == transform.name());
            for transform in list {
                assert_eq!(is_done(transform), model.permits(*transform).is_ok(), "{name}: {done:?}");
            }
            assert!(list.contains(&learned) || !done.contains(&learned), "{name}: {done:?}");
            learnt.fetch_add(usize::from(done.contains(&learned)), Ordering::Relaxed);
            let (found, found_hidden, rotation) = run(&*model);
            assert_eq!(rotation.is_some(), is_done(&rotate), "{name}");
            let (cosine, difference) = distance(&found, &logits);
            assert!(cosine > 0.999_999, "{name}: {cosine} {difference}");
            for (layer, expected) in &hidden {
                let (cosine, _) = distance(&turned_back(&found_hidden[layer], rotation.as_ref()), expected);
                assert!(cosine > 0.999_999, "{name}: hidden {layer}: {cosine}");
            }
        }
        lists.len()
    });
    assert!(count.sum::<usize>() >= 30 * lists.len());
    // blocks of 16 channels or more are learned, which few small models have
    let learnt = learnt.into_inner();
    assert!(learnt >= 4, "{learnt}");
}

#[test]
fn fp16_arithmetic_stays_close() {
    let (root, cases) = cases();
    cases.par_iter().for_each(|case| {
        with_model(&root, case, "hugging_face", |model| {
            let golden = Golden::read(&root.join(case["goldens"][0]["file"].as_str().expect("a file")));
            let dynamic = model.facts().config["rope"]["scaling"]["rope_type"] == "dynamic";
            let context = if dynamic { golden.tokens.len() as u64 } else { CONTEXT };
            let range = TokenCount::Range(1, 4);
            let runner = Runner::new(model, FORM, range, context, Precision::F16).expect("compiles");
            let (logits, _) = runner.run(&golden.tokens, &[4, 1]).expect("runs");
            let (cosine, difference) = distance(&logits, &golden.logits);
            assert!(cosine > 0.999, "{}: {cosine} {difference}", case["name"]);
        });
    });
}

/// The Neural Engine's arithmetic as far as it is published, beside fp16 with exact sums. In these models, whose
/// weights are noise, what it rounds more is far from what a wrong operation does.
#[test]
fn arithmetic_of_the_engine_stays_close_to_fp16() {
    let (root, cases) = cases();
    let tried = cases.par_iter().map(|case| {
        let mut tried = 0;
        with_model(&root, case, "hugging_face", |model| {
            let golden = Golden::read(&root.join(case["goldens"][0]["file"].as_str().expect("a file")));
            let dynamic = model.facts().config["rope"]["scaling"]["rope_type"] == "dynamic";
            let context = if dynamic { golden.tokens.len() as u64 } else { CONTEXT };
            let [half, engine] = [Precision::F16, Precision::ANE].map(|precision| {
                let runner = Runner::new(model, FORM, TokenCount::Range(1, 4), context, precision).expect("compiles");
                runner.run(&golden.tokens, &[4, 1]).expect("runs").0
            });
            let (cosine, difference) = distance(&engine, &half);
            // a router may choose another expert
            let has_experts = (0..model.facts().num_layers).any(|layer| model.experts(layer).is_some());
            let least = if has_experts { 0.98 } else { 0.998 };
            assert!(cosine > least && half != engine, "{}: {cosine} {difference}", case["name"]);
            tried = 1;
        });
        tried
    });
    assert!(tried.sum::<usize>() >= 60);
}

/// Learned positions are added by the host: in all calls of a text, up to the last position, and by no other runtime.
#[test]
fn the_host_adds_learned_positions() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families/gpt2-default");
    let room = tempfile::tempdir().unwrap();
    let out = room.path().join("b");
    let [source_name, out_name] = [&source, &out].map(|path| path.to_str().unwrap());
    let convert =
        |set: &str| folder::run(&["convert", "--source", source_name, "--out", out_name, "--no-compile", "--set", set]);
    let (code, _, stderr) = convert("context=65");
    assert!(code == 2 && stderr.contains("64 learned positions, too few for a context of 65"), "{stderr}");
    let (code, _, stderr) = convert("quant.weights=none");
    assert_eq!(code, 0, "{stderr}");
    let bundle = anec::bundle::Bundle::read(&out).unwrap();
    assert_eq!((bundle.model.contexts.as_slice(), bundle.host.rope.len()), (&[64][..], 0));
    let golden = source.join("golden.safetensors");
    let gates = ["--structure", "--numerics", "--parity", "--precision", "f32", "--golden", golden.to_str().unwrap()];
    let (code, stdout, stderr) = folder::run(&[&["validate", out_name][..], &gates].concat());
    assert_eq!(code, 0, "{stdout}{stderr}");
    let tokens = vec!["5"; 60].join(",");
    let (code, stdout, stderr) = folder::run(&["run", out_name, "--ids", &tokens, "--max-tokens", "20"]);
    assert_eq!(code, 0, "{stdout}{stderr}");
    let exported = room.path().join("exported");
    for layout in ["--hf-swift", "--anemll"] {
        let (code, _, stderr) = folder::run(&["export", out_name, layout, exported.to_str().unwrap()]);
        assert!(code == 2 && stderr.contains("learned positions"), "{layout}: {stderr}");
    }
}
