//! Helpers for tests of fusion.

use crate::node::Node;
use crate::{ExecProfile, Executable, Precision, State, Tensor, WeightCache};
use anec_mil::Function;

/// Numbers between -2 and 2.
pub fn noise(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 37 + seed * 53) % 101) as f32 / 25.0 - 2.0).collect()
}

/// Asserts that a function gives the same bits with and without fusion; returns the number of steps in each group.
pub fn compare(function: &Function, inputs: &[(&str, &Tensor)], precision: Precision) -> Vec<usize> {
    let cache = WeightCache::new();
    let fused = Executable::compile(function, precision, &cache).unwrap();
    let plain = Executable::compile_unfused(function, precision, &cache).unwrap();
    let bits = |executable: &Executable| -> Vec<u32> {
        let outputs = executable.run(inputs, &mut State::default()).unwrap();
        let floats = outputs.iter().flat_map(|(_, out)| out.floats().unwrap());
        // IEEE 754 leaves the sign of NaN open
        floats.map(|v| if v.is_nan() { f32::NAN } else { *v }.to_bits()).collect()
    };
    let (found, expected) = (bits(&fused), bits(&plain));
    assert_eq!(found.len(), expected.len());
    let different = found.iter().zip(&expected).position(|(found, expected)| found != expected);
    assert_eq!(different, None, "{precision}");
    let groups = fused.nodes.iter().filter(|node| matches!(node, Node::Group(_)));
    groups.map(|group| group.steps().len()).collect()
}

/// Returns whether a group that covers all steps of a function runs fused, not step by step.
pub fn runs_fused(group: &str, function: &Function, inputs: &[(&str, &Tensor)], precision: Precision) -> bool {
    let executable = Executable::compile(function, precision, &WeightCache::new()).unwrap();
    let mut profile = ExecProfile::default();
    executable.run_profiled(inputs, &mut State::default(), &mut profile).unwrap();
    profile.operators().iter().all(|(name, _)| *name == group)
}
