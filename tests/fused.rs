//! Steps that are carried out as one give what they give one by one, in every form that the families are built in.

use crate::common::forms::FORM;
use crate::common::layers::{CONTEXT, inputs, layers};

use anec::bundle::TokenCount;
use anec::exec::{ExecProfile, Executable, Precision, Tensor, WeightCache};
use anec::family::{FunctionGraph, LoweringOptions};
use anec::manifest::{AttentionForm, KvWrite, NormForm, StateForm};
use anec::mil::{Binding, Op, ValueType};
use anec::runtime::CachePrecision;

/// Largest absolute difference of two tensors of floats.
fn apart(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.shape, b.shape);
    let (a, b) = (a.floats().unwrap(), b.floats().unwrap());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Whether an op reads or writes a state of fewer slots than the context.
fn is_ring(graph: &FunctionGraph, op: &Op) -> bool {
    op.inputs.values().flatten().any(|binding| match binding {
        Binding::Value(id) => match &graph.function.value(*id).ty {
            ValueType::State(ty) => ty.shape[2].fixed().is_some_and(|slots| slots < CONTEXT as u64),
            _ => false,
        },
        Binding::Constant(_) => false,
    })
}

fn compare(case: &str, form: LoweringOptions, precision: Precision, caches: CachePrecision) {
    let (tokens, chunks) = match form.kv_write {
        // more tokens than are computed at a time, too
        KvWrite::Mask => (TokenCount::Range(1, 70), &[3, 1, 8, 70, 1, 4][..]),
        KvWrite::Slice => (TokenCount::Fixed(2), &[2, 2, 2][..]),
    };
    let what = format!("{case} {form:?} {precision:?}, caches in {caches}");
    let graph = layers(case, form, tokens);
    let cache = WeightCache::new();
    let fused = Executable::compile(&graph.function, precision, &cache).unwrap();
    let plain = Executable::compile_unfused(&graph.function, precision, &cache).unwrap();
    let softmaxes = graph.function.ops().filter(|op| op.operator == "softmax").count();
    // rings are written through masks in every form
    let by_mask = |op: &&Op| form.kv_write == KvWrite::Mask || is_ring(&graph, op);
    let writes = graph.function.ops().filter(|op| op.operator == "write_state");
    let (masked, sliced): (Vec<&Op>, Vec<&Op>) = writes.partition(by_mask);
    let kept = |executable: &Executable| {
        let mut state = executable.new_state();
        let names: Vec<String> = state.names().map(str::to_owned).collect();
        if caches == CachePrecision::F16 {
            names.iter().for_each(|name| state.hold_in_half_precision(name));
        }
        state
    };
    let (mut fused_state, mut plain_state, mut wide_state) = (kept(&fused), kept(&plain), fused.new_state());
    let mut position = 0;
    for chunk in chunks {
        let inputs = inputs(&graph, position, *chunk);
        let inputs: Vec<(&str, &Tensor)> = inputs.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let mut profile = ExecProfile::default();
        let found = fused.run_profiled(&inputs, &mut fused_state, &mut profile).unwrap();
        let expected = plain.run(&inputs, &mut plain_state).unwrap();
        let operators = profile.operators();
        let count = |name: &str| operators.iter().find(|(n, _)| *n == name).map_or(0, |(_, o)| o.calls as usize);
        let found_writes = (count("cache write"), count("slice write"));
        assert_eq!((count("attention"), found_writes), (softmaxes, (masked.len(), sliced.len())), "{what}");
        assert_eq!((count("softmax"), count("matmul")), (0, 0), "{what}: the groups gave up");
        let size = expected[0].1.floats().unwrap().iter().fold(0f32, |most, v| most.max(v.abs()));
        // in half precision a sum in another order may round to the next number
        let exact = precision == Precision::F32 && caches == CachePrecision::F32;
        let limit = size * if exact { 1e-6 } else { 2e-3 };
        let most = apart(&found[0].1, &expected[0].1);
        assert!(most <= limit, "{what}: {most} at position {position}, values up to {size}");
        for name in plain_state.names() {
            let (found, expected) = (fused_state.get(name).unwrap(), plain_state.get(name).unwrap());
            assert!(apart(&found, &expected) <= 1e-5f32.max(limit), "{what}: {name} at position {position}");
        }
        if precision == Precision::F16 {
            // what is rounded already is the same in half of the memory
            let wide = fused.run(&inputs, &mut wide_state).unwrap();
            assert_eq!(found, wide, "{what} at position {position}");
        }
        position += chunk;
    }
    // what was written is all that had to be cleared
    for (state, executable) in [(fused_state, &fused), (plain_state, &plain)] {
        assert_eq!(state.into_zeros(), Some(kept(executable)), "{what}");
    }
}

#[test]
fn groups_give_what_their_steps_give() {
    for case in ["qwen2-tokenizer", "llama-default", "olmo2-grouped", "gemma3-default", "gemma3-linear"] {
        for attention in [AttentionForm::PerHead, AttentionForm::Grouped] {
            for state in [StateForm::PerLayer, StateForm::Unified, StateForm::Host] {
                for kv_write in [KvWrite::Mask, KvWrite::Slice] {
                    let form = LoweringOptions { norm: NormForm::Naive, attention, kv_write, state, ..FORM };
                    for caches in [CachePrecision::F32, CachePrecision::F16] {
                        compare(case, form, Precision::F32, caches);
                        compare(case, form, Precision::F16, caches);
                    }
                }
            }
        }
    }
}
