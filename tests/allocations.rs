//! A decoding step allocates nothing, on any thread: neither in the executor nor in a session around it. These tests
//! are alone in their program, for they count what the whole process allocates.

#[path = "common/fp16_literals.rs"]
mod fp16_literals;
#[path = "common/layers.rs"]
mod layers;

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anec::bundle::TokenCount;
use anec::exec::{Executable, Precision, WeightCache};
use anec::family::LoweringOptions;
use anec::manifest::{
    ActivationForm, AttentionForm, ExpertsForm, KvWrite, LayerDivision, Layout as GraphLayout, LinearForm, NormForm,
    RecurrentForm, RopeForm, StateForm,
};
use anec::mil::Opset;
use anec::runtime::{CachePrecision, ForwardOptions, ForwardOutput, GenerationRequest, LoadedModel};
use anec::{Converter, Manifest};
use layers::{CONTEXT, inputs, layers};

/// The system's allocator, which counts requests.
struct Counting;

static REQUESTS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        REQUESTS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are those of this method.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are those of this method.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        REQUESTS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are those of this method.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One test at a time is counted.
static TURN: Mutex<()> = Mutex::new(());

/// Waits until the executor's threads have begun: they allocate as they do, some time after the first work is divided.
fn start_threads() {
    let sums: Vec<AtomicUsize> = (0..1000).map(AtomicUsize::new).collect();
    anec_kernels::pool::for_each(sums.len(), |i| _ = sums[i].fetch_add(1, Ordering::Relaxed));
    std::thread::sleep(Duration::from_millis(500));
}

/// How many requests something makes.
fn counted<T>(body: impl FnOnce() -> T) -> (usize, T) {
    let before = REQUESTS.load(Ordering::Relaxed);
    let result = body();
    (REQUESTS.load(Ordering::Relaxed) - before, result)
}

/// How many requests each step of a text makes, from the first token on.
fn requests(case: &str, form: LoweringOptions, precision: Precision, caches: CachePrecision) -> Vec<usize> {
    let graph = layers(case, form, TokenCount::Range(1, 8));
    let executable = Executable::compile(&graph.function, precision, &WeightCache::new()).unwrap();
    let (mut state, mut outputs) = (executable.new_state(), Vec::new());
    if caches == CachePrecision::F16 {
        executable.states().for_each(|(name, _)| state.hold_in_half_precision(name));
    }
    let step = |position: usize| {
        let tensors = inputs(&graph, position, 1).into_iter().map(|(name, tensor)| (name, Arc::new(tensor)));
        let tensors: Vec<_> = tensors.collect();
        let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        counted(|| executable.run_into(&tensors, &mut state, &mut outputs).unwrap()).0
    };
    (0..CONTEXT).map(step).collect()
}

#[test]
fn a_decoding_step_allocates_nothing() {
    // tensors and scratch memory are made in the first steps
    const WARM: usize = 32;
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    start_threads();
    for case in ["qwen2-tokenizer", "llama-default", "olmo2-grouped", "gemma3-default"] {
        for (layout, linear, norm, attention, state) in [
            (GraphLayout::Bcs1, LinearForm::Conv, NormForm::Naive, AttentionForm::PerHead, StateForm::PerLayer),
            (
                GraphLayout::Bcs1,
                LinearForm::Conv,
                NormForm::LayerNormConcat,
                AttentionForm::Grouped,
                StateForm::Unified,
            ),
            (GraphLayout::Bc1s, LinearForm::Linear, NormForm::Naive, AttentionForm::Grouped, StateForm::PerLayer),
        ] {
            if norm == NormForm::LayerNormConcat && case.starts_with("gemma3") {
                // refused: fp16 doesn't hold the epsilon of a scaled residual stream in this form
                continue;
            }
            for (precision, caches) in [
                (Precision::F32, CachePrecision::F32),
                (Precision::F16, CachePrecision::F32),
                (Precision::F32, CachePrecision::F16),
            ] {
                let (experts, recurrent_states) = (ExpertsForm::Packed, RecurrentForm::State);
                let (opset, kv_write) = (Opset::CoreMl8, KvWrite::Mask);
                let form = LoweringOptions {
                    opset,
                    layout,
                    linear,
                    norm,
                    attention,
                    activations: ActivationForm::Stable,
                    rope: RopeForm::Halves,
                    kv_write,
                    state,
                    recurrent_states,
                    experts,
                    divide: LayerDivision::None,
                };
                let requests = requests(case, form, precision, caches);
                assert!(requests[0] > 0, "the count counts");
                let late: Vec<_> = requests.iter().enumerate().skip(WARM).filter(|(_, count)| **count > 0).collect();
                assert!(late.is_empty(), "{case} {form:?} {precision:?} {caches}: (position, requests) {late:?}");
            }
        }
    }
}

/// The demo's bundle.
fn demo(room: &Path) -> Arc<LoadedModel> {
    let manifest = include_str!("../src/manifest/manifests/demo.yaml");
    let manifest = Manifest::from_yaml(manifest, "demo", &[]).unwrap();
    let outcome = Converter::new(manifest).source("demo/model").out(room.join("demo.anec")).convert().unwrap();
    LoadedModel::on_cpu(outcome.path(), Precision::F32).unwrap()
}

/// A session's step gives its logits in memory of the step before; a generation's step chooses the most likely token,
/// which a draw would need memory for.
#[test]
fn a_step_of_a_session_allocates_nothing() {
    const WARM: usize = 32;
    const STEPS: usize = 64;
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    start_threads();
    let room = tempfile::tempdir().unwrap();
    let model = demo(room.path());
    let length = (WARM + STEPS) as u64 + 8;

    let mut session = model.start(length).unwrap();
    let (ask, mut output) = (ForwardOptions::last(), ForwardOutput::default());
    session.forward_into(&[1, 2, 3, 4], &ask, &mut output).unwrap();
    let steps = (0..WARM + STEPS).map(|step| {
        let token = [step as u32 % 250];
        counted(|| session.forward_into(&token, &ask, &mut output).unwrap()).0
    });
    let late: Vec<(usize, usize)> = steps.enumerate().skip(WARM).filter(|(_, count)| *count > 0).collect();
    assert!(late.is_empty(), "session: (step, requests) {late:?}");

    let request =
        GenerationRequest { prompt: vec![1, 2, 3, 4], max_tokens: WARM + STEPS, ..GenerationRequest::default() };
    let mut generation = request.start(&model).unwrap();
    let steps = (0..WARM + STEPS).map(|_| {
        let (count, token) = counted(|| {
            generation.step().unwrap();
            generation.ready()
        });
        assert!(token.is_some());
        count
    });
    let late: Vec<(usize, usize)> = steps.enumerate().skip(WARM).filter(|(_, count)| *count > 0).collect();
    assert!(late.is_empty(), "generation: (step, requests) {late:?}");
}
