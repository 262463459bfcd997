//! Sources of random weights in the shape that a published configuration gives.

use anec::family::published::tensors;
use anec::source::{Source, SourceTensor};
use serde_json::Value as Json;

/// Random weights of a configuration: norms that multiply by 1 or so, the rest around 0.
pub fn source(name: &str, config: Json) -> Source {
    // the norms of some multiply by 1 + w
    let text = config.to_string();
    let plus_one =
        ["\"gemma2\"", "\"gemma3_text\"", "\"qwen3_5_", "\"qwen3_next\""].iter().any(|family| text.contains(family));
    let norm_mean = if plus_one { 0.0 } else { 1.0 };
    let tensors = tensors(name, &config).unwrap().into_iter().enumerate().map(|(seed, tensor)| {
        let mean = match tensor.name() {
            name if name.ends_with("norm.weight") => norm_mean,
            name if name.ends_with("_scale") || name.ends_with("_scales") || name.ends_with(".temp") => 1.0,
            _ => 0.0,
        };
        SourceTensor::random(tensor.name(), tensor.shape(), seed as u64, mean, 0.02).unwrap()
    });
    Source::random(name, config, tensors.collect()).unwrap()
}
