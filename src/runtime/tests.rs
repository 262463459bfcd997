//! Realistic request sequences: texts move between contexts, functions are loaded and evicted, sessions are cached,
//! copied and rewound. Every text must equal a plain run: one session in the largest context, token by token.

use std::path::Path;
use std::sync::Arc;

use super::coreml::{CoreMlBackend, PhaseUnits};
use super::fake::{self, FakeOptions};
use super::sampling::Sampling;
use super::*;
use anec_bundle::{Bundle, TokenCount};
use anec_coreml::cache::Cache;
use anec_coreml::plan::ComputeUnits;
use anec_exec::Precision;
use anec_testing::fake::{DoubleEngine, convert_family};

/// Deterministic pseudo-random numbers.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % bound.max(1)
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    fn tokens(&mut self, count: usize, vocabulary: usize) -> Vec<u32> {
        (0..count).map(|_| self.below(vocabulary) as u32).collect()
    }
}

/// Returns a request, often beginning like an earlier text.
fn request(dice: &mut Dice, model: &LoadedModel, known: &[Vec<u32>]) -> GenerationRequest {
    let (context, vocabulary) = (model.context() as usize, model.bundle().model.vocab_size as usize);
    let mut prompt = match known.get(dice.below(2 * known.len())) {
        Some(text) => text[..1 + dice.below(text.len())].to_vec(),
        None => Vec::new(),
    };
    let most = if dice.one_in(4) { context } else { context / 8 };
    let count = 1 + dice.below(most.saturating_sub(prompt.len()).max(1));
    prompt.extend(dice.tokens(count, vocabulary));
    prompt.truncate(context - 1);
    GenerationRequest {
        max_tokens: 1 + dice.below(context / 2),
        sampling: if dice.one_in(2) {
            Sampling::default()
        } else {
            Sampling { temperature: 0.9, seed: dice.below(1000) as u64, ..Sampling::default() }
        },
        speculation: if dice.one_in(2) { dice.below(8) } else { 0 },
        prompt,
        ..GenerationRequest::default()
    }
}

/// Generated tokens, and why the text ended.
type Text = (Vec<u32>, Finish);

/// Returns the text of a request computed alone in the largest context.
fn plain(model: &Arc<LoadedModel>, request: &GenerationRequest) -> Text {
    let mut session = model.start(request.length(model)).unwrap();
    session.make_room(model.context()).unwrap();
    let request = GenerationRequest { speculation: 0, ..request.clone() };
    let output = session.generate(request).unwrap().run().unwrap();
    (output.ids, output.finish)
}

/// Generates texts, up to three at a time, batched and not. Returns them with their requests and the number of context
/// moves.
fn write(model: &Arc<LoadedModel>, count: usize, seed: u64) -> (Vec<(GenerationRequest, Text)>, usize) {
    let mut dice = Dice(seed);
    let mut kept = PrefixCache::new(model.clone(), 3);
    let mut active: Vec<Generation> = Vec::new();
    let (mut known, mut texts, mut begun, mut moves) = (Vec::new(), Vec::new(), 0, 0);
    while begun < count || !active.is_empty() {
        if begun < count && active.len() < 3 && (active.is_empty() || dice.one_in(3)) {
            let request = request(&mut dice, model, &known);
            let session = kept.take(&request.prompt, request.length(model)).unwrap();
            let mut generation = session.generate(request).unwrap();
            if dice.one_in(2) {
                generation = generation.with_prompt_chunk(1 + dice.below(5));
            }
            active.push(generation);
            begun += 1;
        }
        if dice.one_in(2) {
            Generation::compute_together(active.iter_mut());
        }
        let which = dice.below(active.len());
        let generation = &mut active[which];
        let before = generation.session().route().context;
        let finish = generation.step().unwrap();
        moves += usize::from(generation.session().route().context > before);
        if let Some(finish) = finish {
            let generation = active.swap_remove(which);
            texts.push((generation.request().clone(), (generation.output().ids, finish)));
            let session = generation.into_session();
            known.push(session.tokens().to_vec());
            known.drain(..known.len().saturating_sub(8));
            kept.put(session);
        }
    }
    (texts, moves)
}

/// Generates texts and compares them with plain runs of `judge`; returns the number of context moves.
fn write_and_compare(model: &Arc<LoadedModel>, judge: &Arc<LoadedModel>, count: usize, seed: u64) -> usize {
    let (texts, moves) = write(model, count, seed);
    for (request, text) in &texts {
        assert_eq!(*text, plain(judge, request), "{request:?}");
    }
    moves
}

#[test]
fn thousands_of_requests_move_between_contexts_with_and_without_room_for_all_functions() {
    let fixed = |sizes: &[u64]| -> Vec<TokenCount> { sizes.iter().map(|size| TokenCount::Fixed(*size)).collect() };
    let range = || vec![TokenCount::Range(1, 4)];
    for (index, (layer_tokens, slice, recurrent, forks)) in [
        (range(), false, false, true),
        (range(), true, false, false),
        (fixed(&[1, 4]), true, false, true),
        (fixed(&[8]), false, false, true),
        (fixed(&[4]), true, false, true),
        (fixed(&[1, 8]), false, false, true),
        (range(), false, true, true),
        (fixed(&[1, 4]), false, true, false),
    ]
    .into_iter()
    .enumerate()
    {
        let form = FakeOptions {
            contexts: vec![4, 8, 16, 40],
            layer_tokens,
            slice,
            recurrent,
            forks,
            ..FakeOptions::default()
        };
        let judge = fake::model(&form).0;
        // all, as many as one token takes, and one at a time
        for (functions, texts) in [(None, 250), (Some(4), 250), (Some(1), 250)] {
            let memory = functions.map(fake::FakeMemory::of);
            let model = fake::model(&FakeOptions { memory: memory.clone(), ..form.clone() }).0;
            let moves = write_and_compare(&model, &judge, texts, 88172645463325252 + index as u64);
            assert!(moves > 20, "{moves} moves in form {index}");
            if let Some(memory) = memory {
                assert!(memory.loads() > 200, "{} loads in form {index}", memory.loads());
            }
        }
    }
}

/// Forms of states: per layer and joined, kept by the host, written by masks and by slices; sliding windows with rings
/// as long as the smallest context and shorter; recurrences as states and as inputs and outputs.
const FORMS: [(&str, &[&str]); 6] = [
    ("llama-default", &["lengths={fixed: [1, 4]}", "attention=grouped"]),
    ("llama-default", &["state=host", "lengths={fixed: [1, 8]}"]),
    ("gemma3-default", &["state=unified", "kv_write=mask", "lengths={fixed: [1, 4]}"]),
    ("gemma3-default", &["state=per_layer", "lengths={fixed: [8]}"]),
    ("qwen3_5-default", &["lengths={fixed: [1, 4]}"]),
    ("zaya-default", &["recurrent_states=input_output", "lengths={fixed: [1, 4]}"]),
];

fn convert(folder: &Path, case: &str, keys: &[&str]) {
    convert_family(case, folder, &[&["context=[16, 32, 96]"], keys].concat());
}

/// Returns the size of the largest package's weights.
fn largest(folder: &Path) -> u64 {
    Bundle::read(folder).unwrap().packages.iter().map(|package| package.weight_bytes).max().unwrap()
}

/// Logits equal those of a text that began in the largest context, bit for bit.
#[test]
fn a_move_changes_no_bit_on_the_executor() {
    let room = tempfile::tempdir().unwrap();
    for (index, (case, keys)) in FORMS.into_iter().enumerate() {
        let folder = room.path().join(index.to_string());
        convert(&folder, case, keys);
        let wide = ["f32", "i16", "f16", "ane"].map(|precision| (precision, CachePrecision::F32));
        for (precision, caches) in wide.into_iter().chain([("f32", CachePrecision::F16)]) {
            let options = CpuOptions { caches, ..CpuOptions::new(precision.parse().unwrap()) };
            let model = LoadedModel::on_cpu_with(&folder, &options).unwrap();
            let mut dice = Dice(11);
            // calls that write all their tokens leave the end of the context to whole ones
            let end = model.context() - 8;
            let [mut moving, mut staying] = [(); 2].map(|()| model.start(model.context()).unwrap());
            staying.make_room(model.context()).unwrap();
            while moving.position() < end {
                let count = 1 + dice.below(7).min((end - moving.position() - 1) as usize);
                let tokens = dice.tokens(count, model.bundle().model.vocab_size as usize);
                let [found, expected] = [&mut moving, &mut staying]
                    .map(|session| session.forward(&tokens, &ForwardOptions::all(Chunking::Largest)).unwrap().logits);
                let same = found.iter().map(|value| value.to_bits()).eq(expected.iter().map(|value| value.to_bits()));
                let at = moving.position();
                assert!(
                    same && found.iter().all(|value| value.is_finite()),
                    "{case} {keys:?} {precision} {caches} at {at}"
                );
            }
        }
    }
}

#[test]
fn the_executor_writes_the_same_texts_with_little_memory() {
    let room = tempfile::tempdir().unwrap();
    for (index, (case, keys)) in FORMS.into_iter().enumerate() {
        let folder = room.path().join(index.to_string());
        convert(&folder, case, keys);
        let judge = LoadedModel::on_cpu(&folder, Precision::F32).unwrap();
        let max_memory_bytes = Some(largest(&folder));
        let options = CpuOptions { max_memory_bytes, ..CpuOptions::new(Precision::F32) };
        let model = LoadedModel::on_cpu_with(&folder, &options).unwrap();
        let moves = write_and_compare(&model, &judge, 12, 7 + index as u64);
        assert!(moves > 0, "{moves} moves in {case} {keys:?}");
    }
}

#[test]
fn half_precision_caches_equal_a_devices() {
    let room = tempfile::tempdir().unwrap();
    for (index, (case, keys)) in FORMS.into_iter().enumerate() {
        let folder = room.path().join(index.to_string());
        convert(&folder, case, keys);
        let open = |precision, caches| {
            LoadedModel::on_cpu_with(&folder, &CpuOptions { caches, ..CpuOptions::new(precision) }).unwrap()
        };
        // values are rounded anyway: texts that move, are copied and rewound have the same bits
        let [wide, half] = [CachePrecision::F32, CachePrecision::F16].map(|caches| {
            let (texts, moves) = write(&open(Precision::F16, caches), 12, 7 + index as u64);
            assert!(moves > 0, "{moves} moves in {case} {keys:?}, caches in {caches}");
            texts.into_iter().map(|(_, text)| text).collect::<Vec<_>>()
        });
        assert_eq!(wide, half, "{case} {keys:?}");
        let [wide, half] = [CachePrecision::F32, CachePrecision::F16].map(|caches| {
            let model = open(Precision::F32, caches);
            let tokens = Dice(3).tokens(60, model.bundle().model.vocab_size as usize);
            let mut session = model.start(model.context()).unwrap();
            session.forward(&tokens, &ForwardOptions::all(Chunking::Largest)).unwrap().logits
        });
        let apart = wide.iter().zip(&half).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let size = wide.iter().fold(0f32, |most, value| most.max(value.abs()));
        let by_host = keys.contains(&"state=host");
        assert_eq!(wide == half, by_host, "{case} {keys:?}: only caches that are states are rounded");
        assert!(apart <= 0.01 * size, "{case} {keys:?}: {apart}, values up to {size}");
    }
}

#[test]
fn the_executor_takes_more_tokens_at_a_time_than_a_range_has() {
    for (case, most) in [("llama-default", [50, 50]), ("gemma3-default", [50, 4])] {
        let room = tempfile::tempdir().unwrap();
        convert_family(case, room.path(), &["context=96", "lengths={range: [1, 4]}"]);
        let judge = LoadedModel::on_cpu(room.path(), Precision::F32).unwrap();
        let tokens = Dice(5).tokens(90, judge.bundle().model.vocab_size as usize);
        let all = ForwardOptions::all(Chunking::Largest);
        let mut session = judge.start(90).unwrap();
        assert_eq!(session.largest_call(50).unwrap(), 4, "what is judged makes the bundle's calls");
        let expected = session.forward(&tokens, &all).unwrap().logits;
        let rings = judge.bundle().functions.iter().flat_map(|entry| &entry.states).map(|state| state.shape[2]);
        let ring = rings.min().unwrap();
        for (precision, limit) in [(Precision::F32, 1e-4), (Precision::I16, 1e-2), (Precision::I8, 0.2)] {
            let model = LoadedModel::on_cpu_with(room.path(), &CpuOptions::to_write(precision)).unwrap();
            let mut session = model.start(96).unwrap();
            assert_eq!(session.largest_call(50).unwrap(), most[0].min(ring), "{case}");
            let found = session.forward(&tokens, &all).unwrap().logits;
            let largest = expected.iter().zip(&found).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(largest < limit, "{case} {precision}: {largest}");
            // near the end of the context
            assert_eq!(session.largest_call(50).unwrap(), most[1], "{case}");
        }
    }
}

#[test]
fn rings_of_fixed_calls_limit_none_of_them() {
    let room = tempfile::tempdir().unwrap();
    convert_family("gemma3-default", room.path(), &["context=96", "lengths={fixed: [1, 8]}"]);
    let model = LoadedModel::on_cpu_with(room.path(), &CpuOptions::to_write(Precision::F32)).unwrap();
    let mut session = model.start(96).unwrap();
    for _ in 0..11 {
        assert_eq!(session.largest_call(50).unwrap(), 8, "at {}", session.position());
        session.forward(&[1; 8], &ForwardOptions::none()).unwrap();
    }
}

#[test]
fn core_ml_loads_lets_go_and_changes_devices() {
    let room = tempfile::tempdir().unwrap();
    let (mut all_moves, mut all_loads) = (0, 0);
    for (index, (case, keys)) in FORMS.into_iter().enumerate() {
        let folder = room.path().join(index.to_string());
        convert(&folder, case, keys);
        let engine = Arc::new(DoubleEngine::new());
        let bundle = Bundle::read(&folder).unwrap();
        let host = Arc::new(HostTables::open(&bundle, &folder).unwrap());
        let units = PhaseUnits { prompt: ComputeUnits::CpuAndNeuralEngine, writing: ComputeUnits::CpuAndGpu };
        let backend = CoreMlBackend::new(engine.clone(), &bundle, &folder, units, Cache::new(folder.join("cache")));
        let backend = backend.within(Some(2 * largest(&folder))).unwrap();
        let model = LoadedModel::new(bundle, &folder, host, Box::new(backend)).unwrap();
        let (texts, moves) = write(&model, 2, 70 + index as u64);
        // half precision rounds differently for other call sizes, so the executor makes the same calls
        let executor = LoadedModel::on_cpu(&folder, Precision::F16).unwrap();
        assert_eq!(texts, write(&executor, 2, 70 + index as u64).0, "{case} {keys:?}");
        let log = engine.take_log();
        let loads = |units: &str| log.iter().filter(|line| line.starts_with("load") && line.ends_with(units)).count();
        let loaded = [loads("cpu-and-neural-engine"), loads("cpu-and-gpu")];
        all_moves += moves;
        all_loads += loaded[0] + loaded[1];
        assert!(loaded.iter().all(|count| *count > 1), "{loaded:?} loads, {case} {keys:?}");
    }
    assert!(all_moves > 2 && all_loads > 60, "{all_moves} moves, {all_loads} loads");
}

/// Weights are mapped from files: another function of a package that somebody rewrote would compute something else.
#[test]
fn packages_that_were_changed_are_not_read_on() {
    let room = tempfile::tempdir().unwrap();
    convert_family("llama-default", room.path(), &["context=96", "lengths={fixed: [1, 4]}"]);
    let model = LoadedModel::on_cpu_with(room.path(), &CpuOptions::to_write(Precision::F32)).unwrap();
    let mut session = model.start(96).unwrap();
    session.forward(&[1], &ForwardOptions::last()).unwrap();
    let package = &model.bundle().packages[0];
    let weights = package.files.iter().find(|file| file.file.ends_with("weight.bin")).unwrap();
    let weights = std::fs::File::open(room.path().join(&weights.file)).unwrap();
    weights.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    session.forward(&[1], &ForwardOptions::last()).unwrap();
    let error = session.forward(&[1; 4], &ForwardOptions::last()).map(drop).unwrap_err().to_string();
    assert!(error.contains("weight.bin: it was changed after the model was opened"), "{error}");
}
