//! Any bytes are read as the bytecode of an asset of Core AI, or refused.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/common/exercise.rs"]
#[allow(dead_code, reason = "each target uses what it needs")]
mod exercise;

fuzz_target!(|bytes: &[u8]| {
    if let Err(error) = exercise::asset(bytes.to_vec()) {
        assert!(error.to_string().contains(": "), "{error}");
    }
});
