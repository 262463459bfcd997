//! Any bytes are read as ONNX or refused; what was read decodes.
#![no_main]

use std::path::Path;

use anec::source::{MappedFile, onnx};
use libfuzzer_sys::fuzz_target;

/// Beside this one lie weights, which models name as `model.onnx.data`.
const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/onnx/edge/model.onnx");

fuzz_target!(|bytes: &[u8]| {
    let file = MappedFile::from_bytes(Path::new(PATH), bytes.to_vec());
    let Ok((decoder, tensors)) = onnx::parse(file) else { return };
    for tensor in tensors {
        // codes have two bits or more, so this is bounded by the files
        let mut values = vec![0.0; tensor.elements() as usize];
        tensor.read(0, &mut values).expect("the whole of a tensor can be read");
    }
    for rope in &decoder.ropes {
        let _ = rope.table.theta();
    }
});
