//! Any text is read as a MIL program or refused; what was read verifies or is found fault with, and prints as itself.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/common/exercise.rs"]
#[allow(dead_code, reason = "each target uses what it needs")]
mod exercise;

fuzz_target!(|text: &str| {
    let _ = exercise::text(text);
});
