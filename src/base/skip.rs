//! Tests that can't be run where they are.

use std::io::Write;

/// Says loudly that a test of this workspace, the one of this thread, was skipped, and why. It goes past the test harness,
/// which captures what `eprintln!` writes and shows it only for tests that fail.
pub fn skipped(why: &str) {
    let thread = std::thread::current();
    let message = format!("\n!!! SKIPPED: {}: {why} !!!\n", thread.name().unwrap_or("a test"));
    // a test that can't speak is still a test that was skipped
    let _ = std::io::stderr().write_all(message.as_bytes());
}
