//! Damaged packages, texts and manifests are refused or read, but never end in a panic, and never make the program ask
//! for more memory than a file of their size can account for. The cases are the same in every run.

mod common {
    pub mod folder;
    #[allow(dead_code, reason = "for tests of the server")]
    pub mod http;
}
#[path = "common/exercise.rs"]
mod exercise;
#[cfg(unix)]
#[path = "fuzz/driver.rs"]
mod fuzz;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::{Path, PathBuf};

use anec::manifest::Manifest;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

/// The system's allocator, which remembers the largest request of each thread.
struct Watched;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

fn note(size: usize) {
    // a thread that is ending has no place for it any more
    let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(size)));
}

// SAFETY: every call is passed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller's promises are those of this method.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller's promises are those of this method.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are those of this method.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size);
        // SAFETY: the caller's promises are those of this method.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

/// Largest allocation in bytes that a damaged file of a few KB may cause.
const MAX_REQUEST: usize = 8 << 20;

/// Runs something that may fail, but must not ask for much memory.
fn frugally<T>(run: impl FnOnce() -> T) -> T {
    LARGEST.set(0);
    let result = run();
    let largest = LARGEST.get();
    assert!(largest <= MAX_REQUEST, "{largest} bytes were asked for at once");
    result
}

/// One way to damage a file; places are fractions of its length.
#[derive(Clone, Debug)]
enum Damage {
    Flip(u16, u8),
    Set(u16, u8),
    Remove(u16),
    Insert(u16, u8),
    Cut(u16),
    Repeat(u16, u16),
    /// A number of 8 bytes in the place of what is there.
    Number(u16, u64),
}

fn damage() -> impl Strategy<Value = Damage> {
    let extreme = proptest::sample::select(vec![0, 1, 63, 64, u64::from(u32::MAX), 1 << 40, i64::MAX as u64, u64::MAX]);
    prop_oneof![
        4 => (any::<u16>(), 0..8u8).prop_map(|(at, bit)| Damage::Flip(at, bit)),
        4 => any::<(u16, u8)>().prop_map(|(at, byte)| Damage::Set(at, byte)),
        2 => any::<u16>().prop_map(Damage::Remove),
        2 => any::<(u16, u8)>().prop_map(|(at, byte)| Damage::Insert(at, byte)),
        1 => any::<u16>().prop_map(Damage::Cut),
        1 => any::<(u16, u16)>().prop_map(|(from, to)| Damage::Repeat(from, to)),
        1 => (any::<u16>(), extreme).prop_map(|(at, number)| Damage::Number(at, number)),
    ]
}

fn damaged(bytes: &[u8], damages: &[Damage]) -> Vec<u8> {
    let mut out = bytes.to_vec();
    for damage in damages {
        let place = |at: u16| usize::from(at) * out.len() / 65536;
        match *damage {
            _ if out.is_empty() => {}
            Damage::Flip(at, bit) => {
                let at = place(at);
                out[at] ^= 1 << bit;
            }
            Damage::Set(at, byte) => {
                let at = place(at);
                out[at] = byte;
            }
            Damage::Remove(at) => drop(out.remove(place(at))),
            Damage::Insert(at, byte) => out.insert(place(at), byte),
            Damage::Cut(at) => out.truncate(place(at)),
            Damage::Repeat(from, to) => {
                let (from, to) = (place(from.min(to)), place(from.max(to)));
                let part = out[from..to].to_vec();
                out.splice(to..to, part);
            }
            Damage::Number(at, number) => {
                let at = place(at);
                let end = (at + 8).min(out.len());
                out[at..end].copy_from_slice(&number.to_le_bytes()[..end - at]);
            }
        }
    }
    out
}

fn damages() -> impl Strategy<Value = Vec<Damage>> {
    proptest::collection::vec(damage(), 1..6)
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, rng_seed: RngSeed::Fixed(0x616e6563), failure_persistence: None, ..Default::default() }
}

/// Small packages that hold something of everything: states, functions, lengths, compressed and plain weights.
const PACKAGES: [&str; 6] =
    ["state_decoder_mask", "multifunction", "range_fp16", "lut4_grouped", "sparse_int8", "enumerated"];

const FILES: [&str; 3] =
    ["Manifest.json", "Data/com.apple.CoreML/model.mlmodel", "Data/com.apple.CoreML/weights/weight.bin"];

/// A copy of a fixture that may be damaged.
struct Room {
    _folder: tempfile::TempDir,
    package: PathBuf,
}

impl Room {
    fn new(fixture: &str) -> Room {
        let folder = tempfile::tempdir().unwrap();
        let package = folder.path().join("m.mlpackage");
        std::fs::create_dir_all(package.join("Data/com.apple.CoreML/weights")).unwrap();
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/coremltools").join(fixture);
        for file in FILES {
            std::fs::copy(from.join("model.mlpackage").join(file), package.join(file)).unwrap();
        }
        exercise::package(&package).unwrap();
        Room { _folder: folder, package }
    }

    /// Puts bytes in the place of a file while something runs.
    fn with<T>(&self, file: &str, bytes: &[u8], run: impl FnOnce() -> T) -> T {
        let path = self.package.join(file);
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, bytes).unwrap();
        let result = run();
        std::fs::write(&path, whole).unwrap();
        result
    }
}

#[test]
fn damaged_packages() {
    let mut refused = [0u32; FILES.len()];
    for fixture in PACKAGES {
        let room = Room::new(fixture);
        for (file, refused) in FILES.iter().zip(&mut refused) {
            let whole = std::fs::read(room.package.join(file)).unwrap();
            let count = std::cell::Cell::new(0);
            let mut runner = proptest::test_runner::TestRunner::new(config(250));
            let tried = runner.run(&damages(), |damages| {
                let bytes = damaged(&whole, &damages);
                let result = room.with(file, &bytes, || frugally(|| exercise::package(&room.package)));
                if let Err(error) = result {
                    // what is wrong is said, and in which file
                    let text = error.to_string();
                    prop_assert!(text.contains("m.mlpackage") && text.contains(": "), "{text}");
                    count.set(count.get() + 1);
                }
                Ok(())
            });
            tried.unwrap_or_else(|error| panic!("{fixture}, {file}: {error}"));
            *refused += count.get();
        }
    }
    assert!(
        refused.iter().all(|count| *count > 200),
        "{refused:?} of {} damaged files are refused",
        250 * PACKAGES.len()
    );
}

#[test]
fn packages_cut_anywhere() {
    for fixture in PACKAGES {
        let room = Room::new(fixture);
        for file in FILES {
            let whole = std::fs::read(room.package.join(file)).unwrap();
            // every length of a small file, many of a large one
            let step = (whole.len() / 500).max(1);
            for length in (0..whole.len()).step_by(step) {
                let result = room.with(file, &whole[..length], || frugally(|| exercise::package(&room.package)));
                // a message may end after any field and be another message, and a manifest before its last newline
                let may_be_whole = file.ends_with(".mlmodel") || whole[length..].trim_ascii().is_empty();
                assert!(may_be_whole || result.is_err(), "{fixture}, {file} of {length} bytes");
            }
        }
    }
}

/// Assets of Core AI: Apple's, and one of ours with states and several functions.
fn assets() -> Vec<(String, Vec<u8>)> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let apples = ["activations", "weights", "functions"].map(|name| {
        let path = fixtures.join("coreai").join(format!("{name}.aimodel/main.mlirb"));
        (name.to_owned(), std::fs::read(path).unwrap())
    });
    let ours = ["state_decoder_slice", "multifunction", "lut4_grouped"].map(|name| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.aimodel");
        let package = anec::package::open(&fixtures.join("coremltools").join(name).join("model.mlpackage")).unwrap();
        let migration = anec::coreai::migrate::migrate(&package, &Default::default()).unwrap();
        anec::coreai::write(&migration.module, &path, &Default::default()).unwrap();
        (name.to_owned(), std::fs::read(path.join("main.mlirb")).unwrap())
    });
    apples.into_iter().chain(ours).collect()
}

#[test]
fn damaged_assets() {
    let refused = Cell::new(0);
    for (name, whole) in assets() {
        exercise::asset(whole.clone()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut runner = proptest::test_runner::TestRunner::new(config(500));
        let tried = runner.run(&damages(), |damages| {
            let bytes = damaged(&whole, &damages);
            if let Err(error) = frugally(|| exercise::asset(bytes)) {
                let text = error.to_string();
                prop_assert!(text.starts_with("memory, byte "), "{text}");
                refused.set(refused.get() + 1);
            }
            Ok(())
        });
        tried.unwrap_or_else(|error| panic!("{name}: {error}"));
        let step = (whole.len() / 500).max(1);
        for length in (0..whole.len()).step_by(step) {
            assert!(frugally(|| exercise::asset(whole[..length].to_vec())).is_err(), "{name} of {length} bytes");
        }
    }
    assert!(refused.get() > 1500, "{} of 3000 damaged assets are refused", refused.get());
}

/// The texts of the filetests.
fn texts() -> Vec<String> {
    let mut texts = Vec::new();
    for folder in ["print", "verify", "infer"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/filetests").join(folder);
        let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        texts.extend(paths.iter().map(|path| std::fs::read_to_string(path).unwrap()));
    }
    assert!(texts.len() > 15);
    texts
}

#[test]
fn damaged_texts() {
    let texts = texts();
    let mut runner = proptest::test_runner::TestRunner::new(config(3000));
    let tried = runner.run(&(proptest::sample::select(texts), damages()), |(text, damages)| {
        let bytes = damaged(text.as_bytes(), &damages);
        if let Err(error) = frugally(|| exercise::text(&String::from_utf8_lossy(&bytes))) {
            prop_assert!(error.to_string().starts_with("line "), "{error}");
        }
        Ok(())
    });
    tried.unwrap_or_else(|error| panic!("{error}"));
}

/// Numbers, names and marks in the place of others: more of this is a program than of flipped bits.
#[test]
fn texts_with_other_tokens() {
    const TOKENS: [&str; 14] =
        ["0", "-1", "4294967296", "9223372036854775807", "T", "2*T-1", "?", "x", "[", "]", "(", ")", "fp16", "int32"];
    let texts = texts();
    let token = proptest::sample::select(TOKENS.to_vec());
    let edits = proptest::collection::vec((any::<u16>(), token), 1..4);
    let mut runner = proptest::test_runner::TestRunner::new(config(4000));
    let read = Cell::new(0);
    let tried = runner.run(&(proptest::sample::select(texts), edits), |(text, edits)| {
        let program: String =
            text.lines().filter(|line| !line.starts_with("//")).map(|line| format!("{line}\n")).collect();
        let mut tokens: Vec<&str> = program.split_inclusive([' ', ',', '(', ')', '[', ']', ';', '=']).collect();
        for (at, token) in edits {
            let at = usize::from(at) * tokens.len() / 65536;
            tokens[at] = token;
        }
        let text = tokens.concat();
        read.set(read.get() + u32::from(frugally(|| exercise::text(&text)).is_ok()));
        Ok(())
    });
    tried.unwrap_or_else(|error| panic!("{error}"));
    assert!(read.get() > 40, "{} of 4000 texts are programs", read.get());
}

/// A manifest that says something of everything.
const MANIFEST: &str = "\
name: phi4-mini
source: hf:microsoft/Phi-4-mini-instruct
family: phi3
context: [512, 2048]
lengths: { fixed: [1, 4] }
quant: { weights: int8, granularity: per_tensor, overrides: { lm_head: { granularity: per_channel } } }
shards: { layers: [[0, 20], [20, 24], [24, 30], [30, 32]] }
lm_head: { split: 2, argmax: true, logits: true }
target: iOS18
gates: { parity: { cosine: 0.995, top1: 0.95 } }
";

#[test]
fn damaged_manifests() {
    Manifest::from_yaml(MANIFEST, "manifest", &[]).unwrap();
    let refused = Cell::new(0);
    let mut runner = proptest::test_runner::TestRunner::new(config(3000));
    let tried = runner.run(&damages(), |damages| {
        let bytes = damaged(MANIFEST.as_bytes(), &damages);
        let text = String::from_utf8_lossy(&bytes);
        match frugally(|| Manifest::from_yaml(&text, "manifest", &["context=64".into()])) {
            // what is read prints and reads again
            Ok(manifest) => prop_assert_eq!(Manifest::from_yaml(&manifest.to_yaml(), "again", &[]).unwrap(), manifest),
            Err(error) => {
                prop_assert!(!error.to_string().is_empty());
                refused.set(refused.get() + 1);
            }
        }
        Ok(())
    });
    tried.unwrap_or_else(|error| panic!("{error}"));
    assert!(refused.get() > 1000, "{} of 3000 manifests are refused", refused.get());
}

#[test]
fn a_manifest_that_grows_is_refused() {
    let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..12 {
        let all = vec![format!("*a{}", level - 1); 10].join(", ");
        bomb += &format!("a{level}: &a{level} [{all}]\n");
    }
    frugally(|| Manifest::from_yaml(&bomb, "bomb", &[])).unwrap_err();
    let deep = "[".repeat(100_000);
    frugally(|| Manifest::from_yaml(&deep, "deep", &[])).unwrap_err();
}
