//! Any bytes are read as a checkpoint of PyTorch or refused; what was read decodes.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/common/exercise.rs"]
#[allow(dead_code, reason = "each target uses what it needs")]
mod exercise;

fuzz_target!(|bytes: &[u8]| {
    let _ = exercise::pytorch(bytes);
});
