//! Any text is read as a manifest or refused; what was read prints as a manifest that says the same.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/common/exercise.rs"]
#[allow(dead_code, reason = "each target uses what it needs")]
mod exercise;

fuzz_target!(|text: &str| {
    let _ = exercise::manifest(text);
});
