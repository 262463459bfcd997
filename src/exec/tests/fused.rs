//! Steps that are carried out as one give what they give one by one, in every form that the families are built in.

use std::path::Path;

use crate::fuse::Group;
use crate::step::Node;
use crate::{Executable, Options, Precision, Profile, Tensor, TensorData, WeightCache};
use anec_base::Result;
use anec_bundle::{MASKED, PortRole, Stage, TokenCount};
use anec_family::{EmitWeight, Form, FunctionGraph, FunctionRequest};
use anec_manifest::{
    AttentionForm, ExpertsForm, KvWrite, Layout, LinearForm, NormForm, RecurrentForm, Role, StateForm,
};
use anec_mil::{Binding, Constant, FunctionBuilder, Op, Opset, ValueId, ValueType};
use anec_source::{Ledger, Source, Weight};

const CONTEXT: usize = 96;

/// Numbers between -1 and 1.
fn noise(count: usize, mut seed: u32) -> Vec<f32> {
    let mut next = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Weights as fp16 literals.
struct Fp16;

impl EmitWeight for Fp16 {
    fn emit(&mut self, b: &mut FunctionBuilder, name: &str, _: Role, w: &Weight, shape: &[u64]) -> Result<ValueId> {
        let mut values = vec![0f32; w.elements() as usize];
        w.read(0, &mut values)?;
        Ok(b.constant(name, Constant::fp16_tensor(shape, &values)))
    }
}

/// The layers of a small model.
fn layers(case: &str, form: Form, tokens: TokenCount) -> FunctionGraph {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/families").join(case);
    let source = Source::open_path(&path).unwrap();
    let mut ledger = Ledger::new(&source);
    let model = anec_family::open(&mut ledger, None, &[]).unwrap();
    let stage = Stage::Layers { first: 0, end: model.facts().num_layers };
    let (most_tokens, default_tokens) = (tokens.most(), tokens.least());
    let (name, context) = ("main".into(), CONTEXT as u64);
    let request = FunctionRequest { name, stage, tokens, default_tokens, context, most_tokens, argmax: false };
    model.build(&form, &request, &mut Fp16).unwrap()
}

/// The inputs of a call of `count` tokens from position `first`.
fn inputs(graph: &FunctionGraph, first: usize, count: usize) -> Vec<(String, Tensor)> {
    let ports = graph.inputs.iter().enumerate();
    let tensor = |(seed, port): (usize, &anec_bundle::Port)| {
        let extent = |extent: &anec_bundle::Extent| match extent {
            anec_bundle::Extent::Fixed(n) => *n as usize,
            anec_bundle::Extent::Tokens(_) => count,
        };
        let shape: Vec<usize> = port.shape.iter().map(extent).collect();
        let size = shape.iter().product();
        let data: TensorData = match &port.role {
            PortRole::AttentionMask { window } => {
                let slots = shape[3];
                // the last position that was written to a slot
                let last = first + count - 1;
                let held = |s: usize| (s <= last).then(|| last - (last - s) % slots);
                let is_seen = |t: usize, p: usize| p <= first + t && window.is_none_or(|w| first + t - p < w as usize);
                let sees = |t: usize, s: usize| held(s).is_some_and(|position| is_seen(t, position));
                let value = |i: usize| if sees(i / slots, i % slots) { 0.0 } else { MASKED };
                (0..size).map(value).collect::<Vec<f32>>().into()
            }
            PortRole::KvWriteMask => {
                let value = |i: usize| if i / count == (first + i % count) % shape[2] { 1.0 } else { 0.0 };
                (0..size).map(value).collect::<Vec<f32>>().into()
            }
            PortRole::Position => vec![first as i32].into(),
            _ => noise(size, (1000 * first + seed) as u32).into(),
        };
        (port.name.clone(), Tensor::new(shape, data))
    };
    ports.map(tensor).collect()
}

fn groups(executable: &Executable) -> Vec<&Group> {
    fn group(node: &Node) -> Option<&Group> {
        match node {
            Node::Group(group) => Some(group),
            Node::Step(_) => None,
        }
    }
    executable.nodes.iter().filter_map(group).collect()
}

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

fn compare(case: &str, form: Form, precision: Precision) {
    let (tokens, chunks) = match form.kv_write {
        KvWrite::Mask => (TokenCount::Range(1, 8), &[3, 1, 8, 1, 1, 4][..]),
        KvWrite::Slice => (TokenCount::Fixed(2), &[2, 2, 2][..]),
    };
    let what = format!("{case} {form:?} {precision:?}");
    let graph = layers(case, form, tokens);
    let cache = WeightCache::new();
    let fused = Executable::compile(&graph.function, Options { precision }, &cache).unwrap();
    let plain = Executable::compile_as_written(&graph.function, Options { precision }, &cache).unwrap();
    let count = |name: &str| groups(&fused).iter().filter(|group| group.name() == name).count();
    let softmaxes = graph.function.ops().iter().filter(|op| op.operator == "softmax").count();
    assert_eq!(count("attention"), softmaxes, "{what}");
    // rings are written through masks in every form
    let masked = |op: &&&Op| op.operator == "write_state" && (form.kv_write == KvWrite::Mask || is_ring(&graph, op));
    assert_eq!(count("cache write"), graph.function.ops().iter().filter(masked).count(), "{what}");
    let (mut fused_state, mut plain_state) = (fused.new_state(), plain.new_state());
    let mut position = 0;
    for chunk in chunks {
        let inputs = inputs(&graph, position, *chunk);
        let inputs: Vec<(&str, &Tensor)> = inputs.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let mut profile = Profile::default();
        let found = fused.run_profiled(&inputs, &mut fused_state, &mut profile).unwrap();
        let expected = plain.run(&inputs, &mut plain_state).unwrap();
        assert!(profile.operators().iter().all(|(name, _)| *name != "softmax"), "{what}: the groups gave up");
        let size = expected[0].1.floats().unwrap().iter().fold(0f32, |most, v| most.max(v.abs()));
        // in half precision a sum in another order may round to the next number
        let limit = size * if precision == Precision::F32 { 1e-6 } else { 2e-3 };
        let most = apart(&found[0].1, &expected[0].1);
        assert!(most <= limit, "{what}: {most} at position {position}, values up to {size}");
        for name in plain_state.names() {
            let (found, expected) = (fused_state.get(name).unwrap(), plain_state.get(name).unwrap());
            assert!(apart(found, expected) <= 1e-5f32.max(limit), "{what}: {name} at position {position}");
        }
        position += chunk;
    }
}

#[test]
fn groups_give_what_their_steps_give() {
    for case in ["qwen2-tokenizer", "llama-default", "olmo2-grouped", "gemma3-default", "gemma3-linear"] {
        for attention in [AttentionForm::PerHead, AttentionForm::Grouped] {
            for state in [StateForm::PerLayer, StateForm::Unified] {
                for kv_write in [KvWrite::Mask, KvWrite::Slice] {
                    let (linear, norm) = (LinearForm::Conv, NormForm::Naive);
                    let (opset, layout) = (Opset::CoreMl8, Layout::Bcs1);
                    let (experts, recurrent_states) = (ExpertsForm::Packed, RecurrentForm::State);
                    let form =
                        Form { opset, layout, linear, norm, attention, kv_write, state, recurrent_states, experts };
                    compare(case, form, Precision::F32);
                    compare(case, form, Precision::F16);
                }
            }
        }
    }
}
