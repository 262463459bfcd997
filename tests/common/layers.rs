//! The layers of a small model as a function that runs, and inputs for it.

use super::fp16_literals::Fp16Literals;

use std::path::Path;

use anec::bundle::TokenCount;
use anec::bundle::{PortRole, Stage};
use anec::exec::{Tensor, TensorData};
use anec::family::{FunctionGraph, FunctionRequest, LoweringOptions};
use anec::manifest::HeadOutputs;
use anec::source::{Ledger, Source};

/// Slots of its caches.
pub const CONTEXT: usize = 96;

/// Numbers between -1 and 1.
fn noise(count: usize, mut seed: u32) -> Vec<f32> {
    let mut next = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// The layers of a small model.
pub fn layers(case: &str, form: LoweringOptions, tokens: TokenCount) -> FunctionGraph {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families").join(case);
    let source = Source::open_path(&path).unwrap();
    let mut ledger = Ledger::new(&source);
    let model = anec::family::open(&mut ledger, None, &[]).unwrap();
    let stage = Stage::Layers { first: 0, end: model.facts().num_layers };
    let (most_tokens, default_tokens) = (tokens.most(), tokens.least());
    let context = CONTEXT as u64;
    let request = FunctionRequest {
        name: "main".into(),
        stage,
        tokens,
        default_tokens,
        context,
        most_tokens,
        head: HeadOutputs::default(),
    };
    model.build(&form, &request, &mut Fp16Literals).unwrap()
}

/// The inputs of a call of `count` tokens from position `first`.
pub fn inputs(graph: &FunctionGraph, first: usize, count: usize) -> Vec<(String, Tensor)> {
    let ports = graph.inputs.iter().enumerate();
    let tensor = |(seed, port): (usize, &anec::bundle::Port)| {
        let extent = |extent: &anec::bundle::PortDim| match extent {
            anec::bundle::PortDim::Fixed(n) => *n as usize,
            anec::bundle::PortDim::Tokens(_) => count,
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
                let value = |i: usize| if sees(i / slots, i % slots) { 0.0 } else { -1e4 };
                (0..size).map(value).collect::<Vec<f32>>().into()
            }
            PortRole::KvWriteMask => {
                let value = |i: usize| if i / count == (first + i % count) % shape[2] { 1.0 } else { 0.0 };
                (0..size).map(value).collect::<Vec<f32>>().into()
            }
            PortRole::PastMask { window } => {
                let slots = shape[3];
                let held = |s: usize| (s < first).then(|| first - 1 - (first - 1 - s) % slots);
                let is_seen = |t: usize, p: usize| window.is_none_or(|w| first + t - p < w as usize);
                let sees = |t: usize, s: usize| held(s).is_some_and(|position| is_seen(t, position));
                let value = |i: usize| if sees(i / slots, i % slots) { 0.0 } else { -1e4 };
                (0..size).map(value).collect::<Vec<f32>>().into()
            }
            PortRole::CallMask { window } => {
                let sees = |t: usize, s: usize| s <= t && window.is_none_or(|w| t - s < w as usize);
                let value = |i: usize| if sees(i / count, i % count) { 0.0 } else { -1e4 };
                (0..size).map(value).collect::<Vec<f32>>().into()
            }
            PortRole::SliceBegin => vec![0, 0, first as i32, 0].into(),
            PortRole::SliceEnd => vec![0, 0, (first + count) as i32, 0].into(),
            _ => noise(size, (1000 * first + seed) as u32).into(),
        };
        (port.name.clone(), Tensor::new(shape, data))
    };
    ports.map(tensor).collect()
}
