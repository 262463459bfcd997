//! What tests of groups have in common.

use crate::node::Node;
use crate::{ExecOptions, ExecProfile, Executable, Precision, State, Tensor, WeightCache};
use anec_mil::Function;

/// Numbers between -2 and 2.
pub fn noise(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 37 + seed * 53) % 101) as f32 / 25.0 - 2.0).collect()
}

/// What a function gives, to the bit, if its ops are carried out together and one by one; and of how many steps its groups
/// are.
pub fn compare(function: &Function, inputs: &[(&str, &Tensor)], precision: Precision) -> Vec<usize> {
    let (options, cache) = (ExecOptions { precision }, WeightCache::new());
    let fused = Executable::compile(function, options, &cache).unwrap();
    let plain = Executable::compile_unfused(function, options, &cache).unwrap();
    let bits = |executable: &Executable| -> Vec<u32> {
        let outputs = executable.run(inputs, &mut State::default()).unwrap();
        let floats = outputs.iter().flat_map(|(_, out)| out.floats().unwrap());
        // which sign a NaN has is left open by IEEE 754
        floats.map(|v| if v.is_nan() { f32::NAN } else { *v }.to_bits()).collect()
    };
    let (found, expected) = (bits(&fused), bits(&plain));
    assert_eq!(found.len(), expected.len());
    let different = found.iter().zip(&expected).position(|(found, expected)| found != expected);
    assert_eq!(different, None, "{precision}");
    let groups = fused.nodes.iter().filter(|node| matches!(node, Node::Group(_)));
    groups.map(|group| group.steps().len()).collect()
}

/// Whether a group, which has all steps of a function, is carried out as one when this runs, not step by step.
pub fn is_carried_out(group: &str, function: &Function, inputs: &[(&str, &Tensor)], precision: Precision) -> bool {
    let executable = Executable::compile(function, ExecOptions { precision }, &WeightCache::new()).unwrap();
    let mut profile = ExecProfile::default();
    executable.run_profiled(inputs, &mut State::default(), &mut profile).unwrap();
    profile.operators().iter().all(|(name, _)| *name == group)
}
