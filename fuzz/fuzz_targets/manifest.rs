//! Any text is read as a manifest or refused; what was read prints as a manifest that says the same.
#![no_main]

use anec::manifest::Manifest;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    // the first line is an override, the others are the manifest
    let (first, text) = text.split_once('\n').unwrap_or(("", text));
    let overrides: Vec<String> = if first.is_empty() { Vec::new() } else { vec![first.to_owned()] };
    let Ok(manifest) = Manifest::from_yaml(text, "fuzz", &overrides) else { return };
    let again = Manifest::from_yaml(&manifest.to_yaml(), "again", &[]).expect("what is printed is read");
    assert_eq!(again, manifest);
});
