//! A decoding step allocates nothing in the executor, on any thread. This test is alone in its program, for it counts what
//! the whole process allocates.

#[path = "common/fp16_literals.rs"]
mod fp16_literals;
#[path = "common/layers.rs"]
mod layers;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anec::bundle::TokenCount;
use anec::exec::{ExecOptions, Executable, Precision, WeightCache};
use anec::family::LoweringOptions;
use anec::manifest::{
    ActivationForm, AttentionForm, ExpertsForm, KvWrite, LayerDivision, Layout as GraphLayout, LinearForm, NormForm,
    RecurrentForm, RopeForm, StateForm,
};
use anec::mil::Opset;
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

/// How many requests each step of a text makes, from the first token on.
fn requests(case: &str, form: LoweringOptions, precision: Precision) -> Vec<usize> {
    let graph = layers(case, form, TokenCount::Range(1, 8));
    let executable = Executable::compile(&graph.function, ExecOptions { precision }, &WeightCache::new()).unwrap();
    let (mut state, mut outputs) = (executable.new_state(), Vec::new());
    let step = |position: usize| {
        let tensors = inputs(&graph, position, 1);
        let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let before = REQUESTS.load(Ordering::Relaxed);
        executable.run_into(&tensors, &mut state, &mut outputs).unwrap();
        REQUESTS.load(Ordering::Relaxed) - before
    };
    (0..CONTEXT).map(step).collect()
}

#[test]
fn a_decoding_step_allocates_nothing() {
    // tensors and scratch memory are made in the first steps
    const WARM: usize = 32;
    // the executor's threads allocate as they begin, which is some time after the first work is divided
    let sums: Vec<AtomicUsize> = (0..1000).map(AtomicUsize::new).collect();
    anec_kernels::pool::for_each(sums.len(), |i| _ = sums[i].fetch_add(1, Ordering::Relaxed));
    std::thread::sleep(Duration::from_millis(500));
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
            for precision in [Precision::F32, Precision::F16] {
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
                let requests = requests(case, form, precision);
                assert!(requests[0] > 0, "the count counts");
                let late: Vec<_> = requests.iter().enumerate().skip(WARM).filter(|(_, count)| **count > 0).collect();
                assert!(late.is_empty(), "{case} {form:?} {precision:?}: (position, requests) {late:?}");
            }
        }
    }
}
