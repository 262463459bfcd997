//! Comparison with the formats' own libraries: `tests/fixtures/quantized`, bit for bit.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};

use crate::{Source, SourceTensor, SourceWeight};

/// Checkpoints in the folder.
const CASES: usize = 30;

fn folder() -> PathBuf {
    anec_testing::root().join("tests/fixtures/quantized")
}

fn all(tensor: &SourceTensor) -> Vec<f32> {
    let mut values = vec![0.0; tensor.elements() as usize];
    tensor.read(0, &mut values).unwrap();
    values
}

#[test]
fn values_are_those_of_the_formats_own_libraries() {
    let mut cases = 0;
    for entry in fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path();
        if !path.is_dir() {
            continue;
        }
        cases += 1;
        let golden = golden_alone(&path).unwrap();
        let source = Source::open_path(&path.join("model.safetensors")).unwrap();
        assert!(source.config().unwrap().get("quantization_config").is_none());
        assert!(source.config().unwrap().get("quantization").is_none());
        for expected in golden.tensors() {
            let found = source.tensor(expected.name()).unwrap();
            assert_eq!(found.shape(), expected.shape(), "{}", path.display());
            let (values, expected) = (all(found), all(expected));
            let differs = values.iter().zip(&expected).position(|(a, b)| a.to_bits() != b.to_bits() && a != b);
            let at = differs.map(|at| (at, values[at], expected[at]));
            assert_eq!(at, None, "{}", path.display());
            // from the middle of a row to the middle of another
            let mut middle = vec![0.0; 301];
            found.read(77, &mut middle).unwrap();
            assert_eq!(middle, values[77..378]);
            let weight = SourceWeight::from(found.clone());
            weight.check_finite(0, &values[..found.columns() as usize]).unwrap();
            found.release(0..found.elements());
            assert_eq!(all(found), values);
        }
        let names: Vec<&str> = source.tensors().map(SourceTensor::name).collect();
        assert!(names.iter().all(|name| ["a.weight", "norm.weight"].contains(name)), "{names:?}");
    }
    assert_eq!(cases, CASES);
}

/// Opens the golden file of a case in a folder of its own, because the configuration beside it is the checkpoint's.
fn golden_alone(case: &Path) -> crate::error::Result<Source> {
    let room = tempfile::tempdir().unwrap();
    let path = room.path().join("golden.safetensors");
    fs::copy(case.join("golden.safetensors"), &path).unwrap();
    Source::open_path(&path)
}

/// Returns the error of a case after changes to its configuration.
fn refusal(case: &str, pointer: &str, value: Json) -> String {
    let room = tempfile::tempdir().unwrap();
    fs::copy(folder().join(case).join("model.safetensors"), room.path().join("model.safetensors")).unwrap();
    let config = fs::read(folder().join(case).join("config.json")).unwrap();
    let mut config: Json = serde_json::from_slice(&config).unwrap();
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    config.pointer_mut(parent).unwrap()[key] = value;
    fs::write(room.path().join("config.json"), config.to_string()).unwrap();
    Source::open_path(room.path()).unwrap_err().to_string()
}

#[test]
fn settings_that_do_not_fit_are_named() {
    for (case, pointer, value, expected) in [
        (
            "fp8-block",
            "/quantization_config/quant_method",
            json!("hqq"),
            "`quantization_config.quant_method`: it is \"hqq\"",
        ),
        (
            "fp8-block",
            "/quantization_config/weight_block_size",
            json!([0, 8]),
            "`quantization_config.weight_block_size`",
        ),
        (
            "fp8-block",
            "/quantization_config/weight_block_size",
            json!([7, 8]),
            "tensor `a.weight_scale_inv`: its shape is [2, 4]",
        ),
        ("gptq-4", "/quantization_config/bits", json!(5), "`quantization_config.bits`: expected 2, 3, 4 or 8"),
        ("gptq-4", "/quantization_config/bits", json!(8), "tensor `a."),
        ("gptq-4", "/quantization_config/checkpoint_format", json!("marlin"), "checkpoint_format"),
        ("awq", "/quantization_config/bits", json!(3), "`quantization_config.bits`: expected 4"),
        ("awq", "/quantization_config/version", json!("gemv"), "it is \"gemv\", expected gemm"),
        ("compressed-int4", "/quantization_config/config_groups", json!({}), "no group describes weights"),
        ("compressed-int4", "/quantization_config/config_groups/group_0/weights/num_bits", json!(9), "expected 2 to 8"),
        (
            "compressed-int4",
            "/quantization_config/config_groups/group_0/weights/num_bits",
            json!(8),
            "tensor `a.weight_packed`: its shape is",
        ),
        ("mlx-4", "/quantization/bits", json!(7), "`quantization.bits`: expected 2, 3, 4, 5, 6 or 8"),
        ("mlx-4", "/quantization/bits", json!(8), "tensor `a.weight`: its shape is"),
        ("mlx-4", "/quantization/group_size", json!(0), "`quantization.group_size`"),
        ("mlx-4", "/quantization/mode", json!("mxfp4"), "it is \"mxfp4\", expected affine"),
    ] {
        let found = refusal(case, pointer, value);
        assert!(found.contains(expected), "{case} {pointer}: {found}");
    }
}
