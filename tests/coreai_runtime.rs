//! Apple's own runtime on what anec emits: every family against transformers' goldens, every number format against the
//! CPU executor, forms in random combinations against both. Operators are tested in the crate coreai.
//!
//! Needs the Python that `ANEC_PYTHON` names, with the packages of `tests/requirements-coreai.txt`.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use anec::Converter;
use anec::base::Fault;
use anec::bundle::Bundle;
use anec::coreai::bridge::{Bridge, BridgeOptions};
use anec::coreai::lower::{LoweringChoices, LoweringPlan};
use anec::coreai::migrate::{MigrateOptions, MigratedFunction, migrate};
use anec::coreai::{self, AssetOptions};
use anec::exec::Precision;
use anec::manifest::Manifest;
use anec::mil::text::parse;
use anec::package;
use anec::runtime::classify::windows::Windows;
use anec::runtime::{self, Chunking, ForwardOptions, Hidden, LoadedModel};
use anec::validate::{Golden, migration};
use rayon::prelude::*;

use crate::common::folder::repository;
use crate::interactions;
use crate::interactions::draw::{Combination, Draw, Fixture, Kind, combination, fixtures};

/// Smallest cosine between the logits of a position. Half precision alone costs up to 6e-5: the executor in f16 is as
/// far from transformers, family by family.
const LEAST_COSINE: f64 = 0.9999;
/// Smallest cosine with the executor for quantized weights in random forms.
const LEAST_QUANTIZED_COSINE: f64 = 0.999;
/// Tokens of a golden that are run.
const TOKENS: usize = 16;
/// Random combinations of a run.
const COMBINATIONS: usize = 40;
/// The seed of a run that names none.
const SEED: u64 = 27;

/// Options for this machine; nothing, said loudly, where there is no runtime.
pub(crate) fn runtime() -> Option<BridgeOptions> {
    let options = BridgeOptions::of_machine(None);
    let asset = repository("tests/fixtures/coreai/functions.aimodel");
    match Bridge::open(&asset, &options) {
        Ok(_) => Some(options),
        Err(error) if error.fault() == Fault::Platform => {
            anec::base::skipped(&format!("not run by Apple's Core AI runtime: {error}"));
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// The comparison of `anec migrate`, for the right asset and for another one.
#[test]
fn a_migration_is_compared_with_its_package() {
    let Some(options) = runtime() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.aimodel");
    let fixture = |name: &str| repository("tests/fixtures/coremltools").join(name).join("model.mlpackage");
    let [right, other] = ["state_decoder_slice", "state_decoder_mask"]
        .map(|name| migrate(&package::open(&fixture(name)).unwrap(), &MigrateOptions::default()).unwrap());
    coreai::write(&right.module, &path, &AssetOptions::default()).unwrap();
    let agreement = migration::compare(&right.functions, &path, &options).unwrap();
    assert!(agreement.iter().all(|of| of.agrees && of.cosine > 0.9999), "{agreement:?}");
    let wrong = migration::compare(&other.functions, &path, &options);
    assert!(wrong.is_err() || wrong.unwrap().iter().any(|of| !of.agrees), "another package's asset agrees");
}

/// The numerics gate of a package with the backend over Apple's runtime.
#[test]
fn a_package_is_validated_on_apples_runtime() {
    let Some(options) = runtime() else { return };
    let path = repository("tests/fixtures/coremltools/multifunction/model.mlpackage");
    let validator = anec::Validator::new(&path).gates([anec::Gate::Numerics]).core_ai(Some(options));
    let report = validator.run().unwrap().report;
    let checks: Vec<_> = report.gates[0].checks.iter().filter(|check| check.subject.ends_with("Core AI")).collect();
    assert!(checks.len() == 2 && checks.iter().all(|check| check.measured["cosine"] > 0.999), "{checks:?}");
}

/// Operators, and forms of them, that no package of the fixtures has.
const PROGRAMS: [&str; 8] = [
    "program(1.0) { func main<ios15>(tensor<fp32, [1, 1, 7]> x) {
        tensor<int32, [1]> size = const()[name = string(\"size\"), val = tensor<int32, [1]>([3])];
        tensor<int32, [1]> strides = const()[name = string(\"strides\"), val = tensor<int32, [1]>([2])];
        string pads = const()[name = string(\"pads\"), val = string(\"valid\")];
        tensor<fp32, [1, 1, 3]> y = l2_pool(x = x, kernel_sizes = size, strides = strides, pad_type = pads)[name = string(\"y\")];
    } -> (y); }",
    "program(1.0) { func main<ios15>(tensor<fp32, [1, 3, 2]> x) {
        int32 size = const()[name = string(\"size\"), val = int32(3)];
        tensor<fp32, [1, 3, 2]> y = local_response_norm(x = x, size = size)[name = string(\"y\")];
    } -> (y); }",
    "program(1.0) { func main<ios16>(tensor<fp32, [1, 2, 4, 6]> x) {
        uint32 factor = const()[name = string(\"factor\"), val = uint32(2)];
        tensor<fp32, [1, 8, 2, 3]> y = pixel_unshuffle(x = x, downscale_factor = factor)[name = string(\"y\")];
    } -> (y); }",
    "program(1.0) { func main<ios16>(tensor<fp32, [4]> x) {
        tensor<fp32, [4]> wide = constexpr_cast()[name = string(\"wide\"), source_val = tensor<fp16, [4]>([1.0, 2.0, 3.0, 4.0]), output_dtype = string(\"fp32\")];
        tensor<fp32, [4]> y = add(x = x, y = wide)[name = string(\"y\")];
    } -> (y); }",
    "program(1.0) { func main<ios15>(tensor<fp32, [2, 4, 3]> x) {
        tensor<int32, [2]> lengths = const()[name = string(\"lengths\"), val = tensor<int32, [2]>([3, 1])];
        int32 along = const()[name = string(\"along\"), val = int32(1)];
        int32 batch = const()[name = string(\"batch\"), val = int32(0)];
        tensor<fp32, [2, 4, 3]> y = reverse_sequence(x = x, lengths = lengths, seq_axis = along, batch_axis = batch)[name = string(\"y\")];
    } -> (y); }",
    // products of floats and integers
    "program(1.0) { func main<ios17>(tensor<fp16, [1, 1, 2]> x) {
        tensor<int32, [3, 2]> weight = const()[name = string(\"weight\"), val = tensor<int32, [3, 2]>([[3, 0], [4, 3], [6, 0]])];
        tensor<int32, [3]> bias = const()[name = string(\"bias\"), val = tensor<int32, [3]>([5, 6, 3])];
        tensor<fp16, [1, 1, 3]> y = linear(x = x, weight = weight, bias = bias)[name = string(\"y\")];
    } -> (y); }",
    // a zero point of another type than the weight
    "program(1.0) { func main<ios16>(tensor<fp16, [2, 2]> x) {
        tensor<fp16, [2, 2]> weight = constexpr_affine_dequantize()[name = string(\"weight\"), quantized_data = tensor<int8, [2, 2]>([[-118, 58], [63, 77]]), zero_point = uint8(177), scale = tensor<fp16, [2]>([0.5, 0.25]), axis = int32(-2)];
        tensor<fp16, [2, 2]> y = add(x = x, y = weight)[name = string(\"y\")];
    } -> (y); }",
    // the elements that a palette gives sparse, used as they are
    "program(1.3) { func main<ios18>(tensor<fp16, [3]> x) {
        tensor<uint1, [2, 3]> mask, tensor<fp16, [3]> stored = constexpr_lut_to_sparse(indices_mask = tensor<uint1, [2, 3]>([[1, 0, 1], [0, 1, 0]]), indices_nonzero_data = tensor<uint1, [3]>([1, 0, 1]), lut = tensor<fp16, [1, 1, 2, 1]>([[[[2.5], [7.0]]]]))[name = string(\"stored\")];
        tensor<fp16, [3]> y = add(x = x, y = stored)[name = string(\"y\")];
    } -> (y); }",
];

#[test]
fn other_operators_are_computed_as_by_the_executor() {
    let Some(options) = runtime() else { return };
    let folder = tempfile::tempdir().unwrap();
    for (number, text) in PROGRAMS.iter().enumerate() {
        let function = parse(text).unwrap_or_else(|error| panic!("{text}: {error}")).functions.remove(0);
        let mut plan = LoweringPlan::new(LoweringChoices::wide_products(true));
        plan.add("main", &function).unwrap_or_else(|error| panic!("{text}: {error}"));
        let path = folder.path().join(format!("{number}.aimodel"));
        coreai::write(&plan.finish(), &path, &AssetOptions::default()).unwrap();
        let functions = [MigratedFunction { name: "main".into(), function }];
        let agreement = migration::compare(&functions, &path, &options).unwrap_or_else(|e| panic!("{text}: {e}"));
        assert!(agreement[0].agrees && agreement[0].difference < 2e-3, "{text}: {agreement:?}");
    }
}

/// Converts a model of `tests/fixtures/families`.
fn convert(family: &str, out: &Path, settings: &[&str]) -> PathBuf {
    let source = repository("tests/fixtures/families").join(family);
    let mut all = vec![format!("source={}", source.display()), "context=64".into()];
    all.extend(settings.iter().map(|setting| (*setting).to_owned()));
    let manifest = Manifest::from_yaml("quant: {weights: none}", "test", &all).unwrap();
    let path = out.join(format!("{family}.anec"));
    Converter::new(manifest).out(&path).compile(false).convert().unwrap_or_else(|error| panic!("{family}: {error}"));
    path
}

/// Smallest cosine of a position, and positions whose largest logit is another.
pub(crate) fn compared(found: &[f32], expected: &[f32], rows: usize) -> (f64, usize) {
    let mut least = 1.0f64;
    let mut moved = 0;
    for (found, expected) in found.chunks_exact(rows).zip(expected.chunks_exact(rows)) {
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let cosine = dot(found, expected) / (dot(found, found) * dot(expected, expected)).sqrt();
        least = if cosine.is_nan() { -1.0 } else { least.min(cosine) };
        let best = |row: &[f32]| runtime::sampling::argmax(row);
        // a near tie may go either way
        let margin = expected[best(expected) as usize] - expected[best(found) as usize];
        let size = expected.iter().fold(0f32, |most, value| most.max(value.abs()));
        moved += usize::from(margin > size * 5e-3);
    }
    (least, moved)
}

fn logits(model: &std::sync::Arc<LoadedModel>, tokens: &[u32], chunk: &[u64]) -> Vec<f32> {
    if model.bundle().model.classification().is_some() {
        return Windows::new(model, None, Hidden::No).unwrap().label(tokens).unwrap().logits;
    }
    let options = ForwardOptions::all(Chunking::Pattern(chunk.to_vec()));
    model.start(tokens.len() as u64).unwrap().forward(tokens, &options).unwrap().logits
}

/// One model of each family of decoders, on Apple's runtime by one token and by four, against transformers.
#[test]
fn every_family_computes_transformers_logits_on_apples_runtime() {
    let mut families: Vec<String> = std::fs::read_dir(repository("tests/fixtures/families"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name.ends_with("-default"))
        .collect();
    families.sort();
    let readme = std::fs::read_to_string(repository("README.md")).unwrap();
    assert!(readme.contains(&format!("models of {} families run on Apple's", families.len())), "{families:?}");
    let Some(options) = runtime() else { return };
    let folder = tempfile::tempdir().unwrap();
    let problems: Vec<String> = families
        .par_iter()
        .filter_map(|family| {
            // a classifier needs windows longer than its layers look
            let own: &[&str] = if family.starts_with("privacy_filter") { &["lengths.fixed=[24]"] } else { &[] };
            let path = convert(family, folder.path(), own);
            let golden = Golden::read(&repository("tests/fixtures/families").join(family).join("golden.safetensors"));
            let golden = golden.unwrap_or_else(|error| panic!("{family}: {error}"));
            let model = match runtime::coreai::open(&path, &options) {
                Ok(model) => model,
                Err(error) => return Some(format!("{family}: {error}")),
            };
            // labels depend on the whole text
            let most = if model.bundle().model.classification().is_some() { usize::MAX } else { TOKENS };
            let count = golden.tokens.len().min(most);
            let expected = &golden.logits[..count * golden.vocab_size];
            for chunk in [&[1][..], &[4, 3]] {
                let found = logits(&model, &golden.tokens[..count], chunk);
                let (cosine, moved) = compared(&found, expected, golden.vocab_size);
                if !(cosine > LEAST_COSINE) || moved > 0 {
                    return Some(format!(
                        "{family}, calls of {chunk:?}: cosine {cosine}, {moved} of {count} other tokens"
                    ));
                }
            }
            None
        })
        .collect();
    assert!(problems.is_empty(), "{problems:#?}");
}

/// Every number format: the asset expands weights as the executor does.
#[test]
fn every_number_format_is_the_same_on_apples_runtime() {
    let Some(options) = runtime() else { return };
    const FORMATS: [&str; 12] = [
        "{weights: int8}",
        "{weights: int8, granularity: per_channel}",
        "{weights: int8, granularity: {block: 16}}",
        "{weights: int8, op: affine}",
        "{weights: int4, granularity: {block: 32}}",
        "{weights: palette8}",
        "{weights: palette6}",
        "{weights: palette4, granularity: {group: 16}}",
        "{weights: palette4, row_scale: true}",
        "{weights: palette3}",
        "{weights: palette2}",
        "{weights: palette1}",
    ];
    let folder = tempfile::tempdir().unwrap();
    for (number, format) in FORMATS.iter().enumerate() {
        let out = folder.path().join(number.to_string());
        let path = convert("qwen3-default", &out, &[&format!("quant={format}")]);
        let tokens: Vec<u32> = (3..11).collect();
        let [executor, apple] = [
            LoadedModel::on_cpu(&path, Precision::F32).unwrap(),
            runtime::coreai::open(&path, &options).unwrap_or_else(|error| panic!("{format}: {error}")),
        ]
        .map(|model| logits(&model, &tokens, &[4]));
        let rows = executor.len() / tokens.len();
        let (cosine, moved) = compared(&apple, &executor, rows);
        assert!(cosine > LEAST_COSINE && moved == 0, "{format}: cosine {cosine}, {moved} other tokens");
    }
}

/// Graph forms, number formats, states and lengths in combinations that nobody chose, against transformers where
/// weights aren't quantized, and against the executor. `ANEC_SEED` draws others.
#[test]
fn forms_meet_at_random_on_apples_runtime() {
    let Some(options) = runtime() else { return };
    let seed = std::env::var("ANEC_SEED").map_or(SEED, |text| text.parse().expect("ANEC_SEED is a number"));
    let _ = std::io::stderr().write_all(format!("ANEC_SEED={seed}\n").as_bytes());
    let families = fixtures();
    let decoders: Vec<&Vec<Fixture>> = families.values().filter(|fixtures| fixtures[0].kind == Kind::Decoder).collect();
    let mut draw = Draw(seed);
    let first = draw.below(decoders.len());
    let drawn = decoders.iter().cycle().skip(first).take(COMBINATIONS);
    // a range has a function for each number of tokens, most of which would not be called
    let fixed = |set: String| {
        set.replace("{range: [1, 4]}", "{fixed: [1, 3, 4]}").replace("{range: [1, 16]}", "{fixed: [1, 7, 16]}")
    };
    let cases: Vec<Combination> = drawn
        .map(|fixtures| combination(&mut draw, fixtures))
        .map(|case| Combination { sets: case.sets.into_iter().map(fixed).collect(), ..case })
        .collect();
    let room = tempfile::tempdir().unwrap();
    let fault = |(index, case): (usize, &Combination)| -> Option<String> {
        let path = room.path().join(index.to_string());
        let found = computed_alike(case, &path, &options).err();
        let _ = std::fs::remove_dir_all(&path);
        let model = case.fixture.folder.file_name().unwrap_or_default().display();
        found.map(|problem| format!("{model} {}: {problem}", case.sets.join(" ")))
    };
    let problems: Vec<String> = cases.par_iter().enumerate().filter_map(fault).collect();
    assert!(problems.is_empty(), "seed {seed}, {} of {COMBINATIONS}: {problems:#?}", problems.len());
}

/// Compares Apple's runtime with the executor and transformers.
fn computed_alike(case: &Combination, path: &Path, options: &BridgeOptions) -> Result<(), String> {
    let executor = interactions::converted(case, path)?;
    let apple = runtime::coreai::open(path, options).map_err(|error| error.to_string())?;
    let golden = Golden::read(&case.fixture.golden).map_err(|error| error.to_string())?;
    let count = golden.tokens.len().min(TOKENS);
    let [executed, found] = [executor, apple].map(|model| logits(&model, &golden.tokens[..count], &case.sizes));
    let exact = case.least > LEAST_COSINE;
    // layers of few levels amplify what half precision rounds
    let least = if exact { LEAST_COSINE } else { LEAST_QUANTIZED_COSINE };
    let transformers = exact.then_some(("transformers", &golden.logits[..count * golden.vocab_size]));
    for (name, expected) in [("the executor", &executed[..])].into_iter().chain(transformers) {
        let (cosine, moved) = compared(&found, expected, golden.vocab_size);
        if !(cosine > least) || moved > 0 {
            return Err(format!(
                "calls of {:?}: cosine {cosine}, {moved} of {count} other tokens than {name}",
                case.sizes
            ));
        }
    }
    Ok(())
}

/// A bundle of `format: coreai`: one asset, the same bytes twice, run as it is, with products in half precision.
#[test]
fn a_bundle_of_core_ai_is_one_asset_that_apples_runtime_runs() {
    let folder = tempfile::tempdir().unwrap();
    let settings = ["format=coreai", "context=[32, 64]", "lengths={fixed: [1, 4]}", "lm_head.split=2"];
    let [first, second] =
        ["first", "second"].map(|name| convert("qwen3-default", &folder.path().join(name), &settings));
    let bundle = Bundle::read(&first).unwrap();
    assert_eq!(bundle.check(), [""; 0]);
    let [package] = &bundle.packages[..] else { panic!("{:?}", bundle.packages) };
    assert!(package.package.ends_with(".aimodel"));
    for file in &package.files {
        assert!(std::fs::read(first.join(&file.file)).unwrap() == std::fs::read(second.join(&file.file)).unwrap());
    }
    let names: Vec<String> = std::fs::read_dir(&first)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name.contains(".ml"))
        .collect();
    assert!(names.is_empty(), "{names:?} are left");
    let inventory = coreai::open(&first.join(&package.package)).unwrap().inventory();
    assert_eq!(inventory.functions.len(), bundle.functions.len());
    let refused = LoadedModel::on_cpu(&first, Precision::F32).map(drop).unwrap_err().to_string();
    assert!(refused.contains("format: coreai"), "{refused}");

    let Some(options) = runtime() else { return };
    let golden = Golden::read(&repository("tests/fixtures/families/qwen3-default/golden.safetensors")).unwrap();
    let model = runtime::coreai::open(&first, &options).unwrap();
    let count = golden.tokens.len().min(TOKENS);
    let found = logits(&model, &golden.tokens[..count], &[4, 1]);
    // products in half precision, as the asset has them
    let (cosine, _) = compared(&found, &golden.logits[..count * golden.vocab_size], golden.vocab_size);
    assert!(cosine > 0.999, "{cosine}");
}

/// The dates of the table of forms are those that Apple's exporter gives: it writes again what ours wrote.
#[test]
fn versions_are_those_of_apples_exporter() {
    if runtime().is_none() {
        return;
    }
    let python = std::env::var_os("ANEC_PYTHON").expect("the runtime was there");
    let folder = tempfile::tempdir().unwrap();
    let fixtures = repository("tests/fixtures/coremltools");
    let mut expected = BTreeMap::new();
    for name in
        ["mlp_fp32", "lut3_tensor", "zoo_elementwise_fp32", "zoo_reductions", "zoo_shapes", "state_decoder_mask"]
    {
        let package = package::open(&fixtures.join(name).join("model.mlpackage")).unwrap();
        let migration = migrate(&package, &MigrateOptions::default()).unwrap();
        expected.insert(name, migration.module.version().unwrap());
        coreai::write(&migration.module, &folder.path().join(format!("{name}.aimodel")), &AssetOptions::default())
            .unwrap();
    }
    let script = "import sys\nfrom pathlib import Path\nfrom coreai.authoring import AIModelAsset\n\
                  AIModelAsset.load(Path(sys.argv[1])).program.save_asset(Path(sys.argv[2]))\n";
    for (name, version) in expected {
        let [ours, theirs] = ["", "-again"].map(|end| folder.path().join(format!("{name}{end}.aimodel")));
        let output = std::process::Command::new(&python).args(["-c", script]).arg(&ours).arg(&theirs).output().unwrap();
        assert!(theirs.exists(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(coreai::open(&theirs).unwrap().module.version(), Some(version), "{name}");
    }
}
