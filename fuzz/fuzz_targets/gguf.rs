//! Any bytes are read as GGUF or refused; what was read decodes.
#![no_main]

use std::path::Path;

use anec::source::{dequantize, gguf};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(header) = gguf::parse(Path::new("fuzz.gguf"), bytes) else { return };
    for tensor in &header.tensors {
        let data = &bytes[tensor.range.start as usize..tensor.range.end as usize];
        // A tensor of the file has at most 512 elements to two bytes, so this is bounded by the input.
        let elements: u64 = tensor.shape.iter().product();
        let mut values = vec![0.0; elements as usize];
        dequantize::read(tensor.dtype, data, 0, &mut values);
    }
});
