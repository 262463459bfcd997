//! Any bytes are read as safetensors or refused; what was read decodes.
#![no_main]

use std::path::Path;
use std::sync::Arc;

use anec::source::{MappedFile, safetensors};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let file = MappedFile::from_bytes(Path::new("fuzz.safetensors"), bytes.to_vec());
    let Ok(tensors) = safetensors::tensors(&Arc::new(file)) else { return };
    for tensor in tensors {
        let mut values = vec![0.0; tensor.elements() as usize];
        // Elements are at least a byte, so this is bounded by the input.
        tensor.read(0, &mut values).expect("the whole of a tensor can be read");
    }
});
