//! Skipped tests.

use std::io::Write;

/// Reports that the current test was skipped, and why. Writes past the test harness, which captures `eprintln!` and
/// shows it only for failed tests.
pub fn skipped(why: &str) {
    let thread = std::thread::current();
    let message = format!("\n!!! SKIPPED: {}: {why} !!!\n", thread.name().unwrap_or("a test"));
    let _ = std::io::stderr().write_all(message.as_bytes());
}
