//! Any text is parsed as a chat template or refused; what was parsed renders a conversation or refuses it.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../tests/common/exercise.rs"]
#[allow(dead_code, reason = "each target uses what it needs")]
mod exercise;

fuzz_target!(|text: &str| {
    let _ = exercise::template(text);
});
