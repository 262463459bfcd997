//! Any bytes are read as ONNX or refused; what was read decodes.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/common/exercise.rs"]
#[allow(dead_code, reason = "each target uses what it needs")]
mod exercise;

/// Path of a model beside which lie weights, which models name as `model.onnx.data`.
const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/onnx/edge/model.onnx");

fuzz_target!(|bytes: &[u8]| {
    let _ = exercise::onnx(Path::new(PATH), bytes);
});
