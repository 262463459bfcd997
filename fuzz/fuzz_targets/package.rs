//! Any manifest, model message or weight file in a package is read or refused.
//!
//! The first byte says which package of coremltools is damaged, and which of its files the other bytes stand for.
#![no_main]

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use libfuzzer_sys::{Corpus, fuzz_target};

#[path = "../../tests/common/exercise.rs"]
#[allow(dead_code, reason = "each target uses what it needs")]
mod exercise;

const FILES: [&str; 3] =
    ["Manifest.json", "Data/com.apple.CoreML/model.mlmodel", "Data/com.apple.CoreML/weights/weight.bin"];
const PACKAGES: [&str; 4] = ["state_decoder_mask", "multifunction", "range_fp16", "lut4_grouped"];

/// Copies of the packages, which are damaged and made whole again.
static ROOM: LazyLock<PathBuf> = LazyLock::new(|| {
    // the fuzzer ends in the middle of a run: the folder is left to the system to clean
    let folder = std::env::temp_dir().join(format!("anec-fuzz-{}", std::process::id()));
    for package in PACKAGES {
        for file in FILES {
            let to = folder.join(package).join(file);
            std::fs::create_dir_all(to.parent().expect("a folder")).expect("a folder for the package");
            std::fs::copy(fixture(package).join(file), to).expect("a copy of the package");
        }
    }
    folder
});

fn fixture(package: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/coremltools").join(package).join("model.mlpackage")
}

fuzz_target!(|bytes: &[u8]| -> Corpus {
    let Some((choice, bytes)) = bytes.split_first() else { return Corpus::Reject };
    let choice = usize::from(*choice);
    let (package, file) = (PACKAGES[choice / FILES.len() % PACKAGES.len()], FILES[choice % FILES.len()]);
    let path = ROOM.join(package);
    std::fs::write(path.join(file), bytes).expect("the file can be written");
    let read = exercise::package(&path);
    std::fs::copy(fixture(package).join(file), path.join(file)).expect("a copy of the file");
    if let Err(error) = read {
        assert!(error.to_string().contains(": "), "{error}");
    }
    Corpus::Keep
});
