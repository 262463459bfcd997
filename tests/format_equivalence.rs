//! A model as GGUF and as a Hugging Face folder gives the same packages, byte for byte: the formats differ only in
//! names, the order of rows, the storage of numbers, and configuration keys.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anec::bundle::Bundle;
use anec::convert::{ConvertOptions, Outcome, convert};
use anec::family::table::DECODERS;
use anec::manifest::Manifest;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::Value as Json;

/// Converts a source; returns the bundle and the bytes of its packages and of the host's file.
fn converted(source: &Path, sets: &[&str], folder: &Path) -> (Bundle, BTreeMap<String, Vec<u8>>) {
    let source = format!("source={}", serde_json::to_string(source).unwrap());
    let sets: Vec<String> = ["name=twin", "context=32", &source].iter().chain(sets).map(|s| s.to_string()).collect();
    let mut options = ConvertOptions::new(Manifest::from_yaml("", "test", &sets).unwrap());
    options.out = Some(folder.to_owned());
    let Outcome::Written(written) = convert(&options).unwrap_or_else(|e| panic!("{source} {sets:?}: {e}")) else {
        panic!("{source} {sets:?}: there was a bundle already")
    };
    let bundle = written.bundle;
    let files = bundle.packages.iter().flat_map(|p| &p.files).chain([&bundle.host.file]);
    let files = files.map(|f| (f.file.clone(), std::fs::read(folder.join(&f.file)).unwrap())).collect();
    (bundle, files)
}

fn cases() -> (PathBuf, Vec<Json>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families");
    let list: Json = serde_json::from_slice(&std::fs::read(root.join("cases.json")).unwrap()).unwrap();
    let cases = list["cases"].as_array().unwrap().iter().filter(|case| case["gguf"].is_string());
    (root, cases.cloned().collect())
}

/// Whether two of the host's files differ in nothing but the rounding of rotary tables: GGUF keeps divisors of
/// frequencies, where it has them, as f32.
fn rounded(a: &[u8], b: &[u8]) -> bool {
    let [a, b] = [a, b].map(|bytes| SafeTensors::deserialize(bytes).unwrap());
    let names = |file: &SafeTensors| file.names().into_iter().map(str::to_owned).collect::<BTreeSet<_>>();
    assert_eq!(names(&a), names(&b));
    names(&a).iter().all(|name| {
        let [a, b] = [&a, &b].map(|file| file.tensor(name).unwrap());
        let floats = |view: &TensorView| -> Vec<f32> {
            view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
        };
        // angles are less than 32, whose unit in the last place is 2e-6
        let near = || floats(&a).iter().zip(floats(&b)).all(|(a, b)| (a - b).abs() < 4e-6);
        a.shape() == b.shape() && (a.data() == b.data() || name.starts_with("rope.") && near())
    })
}

#[test]
fn both_formats_of_a_model_give_the_same_packages() {
    let (root, cases) = cases();
    let mut seen = BTreeSet::new();
    let settings = [
        &["quant.granularity=per_tensor"][..],
        &["quant.granularity=per_channel", "lengths.fixed=[1, 4]"],
        &["quant.weights=none", "lm_head.split=2"],
    ];
    for (index, case) in cases.iter().enumerate() {
        let name = case["name"].as_str().unwrap();
        // a source's names and layouts don't depend on settings: each case takes one of them
        let sets = settings[index % settings.len()];
        let folder = tempfile::tempdir().unwrap();
        let of = |key: &str| converted(&root.join(case[key].as_str().unwrap()), sets, &folder.path().join(key));
        let ((safetensors, a), (gguf, b)) = (of("hugging_face"), of("gguf"));
        assert_eq!((safetensors.source.format.as_str(), gguf.source.format.as_str()), ("safetensors", "gguf"));
        assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>(), "{name} {sets:?}");
        for (file, bytes) in &a {
            let same = *bytes == b[file] || *file == safetensors.host.file.file && rounded(bytes, &b[file]);
            assert!(same, "{name} {sets:?}: {file} differs");
        }
        assert_eq!(safetensors.functions, gguf.functions, "{name} {sets:?}");
        assert_eq!(safetensors.model.vocab_size, gguf.model.vocab_size, "{name}");
        seen.insert((case["family"].as_str().unwrap(), case["gguf_matrices"].as_str().unwrap()));
    }
    let stored: BTreeSet<&str> = seen.iter().map(|(_, stored)| *stored).collect();
    assert!(stored.is_superset(&BTreeSet::from(["F16", "F32", "BF16", "Q8_0"])), "{seen:?}");
    let families: BTreeSet<&str> = seen.iter().map(|(family, _)| *family).collect();
    // all that llama.cpp's converter knows
    let known = DECODERS.iter().filter(|row| !row.names.gguf.is_empty()).map(|row| row.name);
    assert_eq!(families, known.collect());
}
