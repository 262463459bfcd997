//! Apple's own runtime on what anec emits: every family against transformers' goldens, every number format against the
//! CPU executor, forms in random combinations against both. Operators are tested in the crate coreai.
//!
//! Needs the Python that `ANEC_PYTHON` names, with the packages of `tests/requirements-coreai.txt`.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anec::Converter;
use anec::base::{Fault, SplitMix64};
use anec::bundle::Bundle;
use anec::coreai::aicode::{AiModule, AiOp};
use anec::coreai::bridge::{Bridge, BridgeOptions};
use anec::coreai::definitions::is_composite;
use anec::coreai::lower::{LoweringChoices, LoweringPlan};
use anec::coreai::migrate::{MigrateOptions, MigratedFunction, migrate};
use anec::coreai::{self, AssetOptions};
use anec::exec::Precision;
use anec::manifest::Manifest;
use anec::mil::text::parse;
use anec::mil::{Constant, DataType, Dim, Function, FunctionBuilder, OpInput, Opset, SymbolRange, TensorType};
use anec::package;
use anec::runtime::classify::windows::Windows;
use anec::runtime::coreai::Arithmetic;
use anec::runtime::{self, Chunking, ForwardOptions, Hidden, HostTables, LoadedModel};
use anec::validate::verdict::{GatesReport, Verdict, missing_proof};
use anec::validate::{Golden, migration};
use rayon::prelude::*;

use crate::common::folder::repository;
use crate::interactions;
use crate::interactions::draw::{Combination, Draw, Fixture, Kind, combination, fixtures};

/// Smallest cosine between the logits of a position in half precision, which alone costs up to 5.4e-5: the executor in
/// f16 is as far from transformers, family by family.
const LEAST_COSINE: f64 = 0.9999;
/// Smallest cosine with the executor for quantized weights in half precision, which costs up to 4e-6.
const LEAST_FORMAT_COSINE: f64 = 0.99999;
/// Smallest cosine between the logits of a position in single precision; measured: 1.4e-6 from 1, of which most is
/// the weights' rounding to half precision.
const LEAST_SINGLE_COSINE: f64 = 0.99999;
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

/// A transformer block, a convolution and a mean over texts of any length in a range.
fn encoder(range: SymbolRange) -> Function {
    let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
    let length = Dim::symbol(&ops.symbol("T", range));
    let ty = |shape: &[Dim]| TensorType { dtype: DataType::Fp16, shape: shape.to_vec() };
    let x = ops.input("x", ty(&[Dim::Fixed(1), length.clone(), Dim::Fixed(16)]));
    let mask = ops.input("mask", ty(&[Dim::Fixed(1), Dim::Fixed(1), length.clone(), length]));
    let mut draw = SplitMix64::new(5);
    let mut weight = |ops: &mut FunctionBuilder, name: &str, shape: &[u64]| {
        let numbers: Vec<f32> = (0..shape.iter().product()).map(|_| draw.uniform() as f32 - 0.5).collect();
        ops.constant(name, Constant::fp16_tensor(shape, &numbers))
    };
    let norm = ops.layer_norm(x, &[-1], 1e-5);
    let [query, key, value] = ["query", "key", "value"].map(|name| {
        let weight = weight(&mut ops, name, &[16, 16]);
        let all = ops.linear(name, norm, weight, None);
        let heads = ops.reshape(all, &[1, -1, 2, 8]);
        ops.transpose(heads, &[0, 2, 1, 3])
    });
    let scores = ops.matmul(query, key, false, true);
    let masked = ops.add(scores, mask);
    let shares = ops.softmax(masked, -1);
    let attended = ops.matmul(shares, value, false, false);
    let attended = ops.transpose(attended, &[0, 2, 1, 3]);
    let attended = ops.reshape(attended, &[1, -1, 16]);
    let sum = ops.add(x, attended);
    let channels = ops.transpose(sum, &[0, 2, 1]);
    let kernel = weight(&mut ops, "kernel", &[16, 16, 3]);
    let convolved = ops.op::<OpInput>(
        "conv",
        "conv",
        [
            ("x", channels.into()),
            ("weight", kernel.into()),
            ("pad_type", Constant::string("custom").into()),
            ("pad", Constant::int32s(&[1, 1]).into()),
        ],
    );
    let active = ops.silu(convolved);
    let mean = ops.reduce_mean(active, &[-1], false);
    let last = ops.last(sum, 1, 1);
    let doubled = ops.concat(&[sum, x], 1);
    for (name, value) in [("y", active), ("mean", mean), ("last_row", last), ("doubled", doubled)] {
        ops.output(name, value);
    }
    ops.finish().unwrap()
}

/// A range becomes a dynamic dimension, which takes every size: those at which the function was lowered and others.
#[test]
fn a_dynamic_dimension_takes_every_size() {
    let range = |lower, upper| SymbolRange::Range { lower, upper, default: 9 };
    let folder = tempfile::tempdir().unwrap();
    let options = runtime();
    let ranges = [range(1, Some(512)), range(3, Some(12)), range(1, None), range(1, Some(1 << 62))];
    for (number, range) in ranges.into_iter().enumerate() {
        let function = encoder(range);
        let mut plan = LoweringPlan::new(LoweringChoices::wide_products(true));
        plan.add("main", &function).unwrap();
        let path = folder.path().join(format!("{number}.aimodel"));
        coreai::write(&plan.finish(), &path, &AssetOptions::default()).unwrap();
        let [main] = &coreai::open(&path).unwrap().inventory().functions[..] else { panic!("one function") };
        let types: Vec<String> = main.inputs.iter().chain(&main.outputs).map(ToString::to_string).collect();
        let expected = [
            "x: tensor<1x?x16xf16>",
            "mask: tensor<1x1x?x?xf16>",
            "y: tensor<1x16x?xf16>",
            "mean: tensor<1x16xf16>",
            "last_row: tensor<1x1x16xf16>",
            "doubled: tensor<1x?x16xf16>",
        ];
        assert_eq!(types, expected);
        let Some(options) = &options else { continue };
        let functions = [MigratedFunction { name: "main".into(), function }];
        let agreement = migration::compare(&functions, &path, options).unwrap();
        assert!(agreement[0].agrees && agreement[0].difference < 5e-3, "{agreement:?}");
    }
}

/// Two dynamic dimensions, of which sizes depend on one or on both.
#[test]
fn two_dynamic_dimensions_take_every_size() {
    let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
    let [rows, columns] = ["R", "C"]
        .map(|name| Dim::symbol(&ops.symbol(name, SymbolRange::Range { lower: 1, upper: Some(100), default: 6 })));
    let ty = |shape: &[Dim]| TensorType { dtype: DataType::Fp16, shape: shape.to_vec() };
    let x = ops.input("x", ty(&[rows, Dim::Fixed(8)]));
    let y = ops.input("y", ty(&[columns, Dim::Fixed(8)]));
    let products = ops.matmul(x, y, false, true);
    let shares = ops.softmax(products, -1);
    let sums = ops.reduce_sum(products, &[1], true);
    let shifted = ops.sub(shares, sums);
    let both = ops.concat(&[x, y], 0);
    ops.output("shifted", shifted);
    ops.output("both", both);
    let function = ops.finish().unwrap();
    let mut plan = LoweringPlan::new(LoweringChoices::wide_products(true));
    plan.add("main", &function).unwrap();
    let Some(options) = runtime() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.aimodel");
    coreai::write(&plan.finish(), &path, &AssetOptions::default()).unwrap();
    for (symbol, size) in [("R", 1), ("R", 17), ("C", 1), ("C", 100)] {
        let of = function.symbols().find(|of| of.name() == symbol).unwrap();
        let functions = [MigratedFunction { name: "main".into(), function: function.with_length(of, size) }];
        let agreement = migration::compare(&functions, &path, &options).unwrap();
        assert!(agreement[0].agrees && agreement[0].difference < 5e-3, "{symbol} = {size}: {agreement:?}");
    }
}

/// An operator whose form depends on a size is refused by name; fixed sizes do.
#[test]
fn a_form_that_depends_on_a_size_is_refused() {
    let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
    let length = ops.symbol("T", SymbolRange::Range { lower: 4, upper: Some(64), default: 8 });
    let shape = vec![Dim::symbol(&length), Dim::Fixed(2)];
    let x = ops.input("x", TensorType { dtype: DataType::Fp16, shape });
    let [size, axis] = [3, 0].map(Constant::int32);
    let parameters = [("x", x.into()), ("axis", axis.into()), ("size", size.into())];
    let y = ops.op::<OpInput>("sliding_windows", "windows", parameters);
    ops.output("y", y);
    let function = ops.finish().unwrap();
    let error = LoweringPlan::default().add("main", &function).unwrap_err().to_string();
    assert!(error.contains("`sliding_windows` (`windows`) with a dynamic dimension in `main`"), "{error}");
    LoweringPlan::default().add("main", &function.with_length(&length, 8)).unwrap();
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

/// A bundle on Apple's runtime.
pub(crate) fn opened(path: &Path, options: &BridgeOptions, how: Arithmetic) -> anec::base::Result<Arc<LoadedModel>> {
    let (bundle, backend) = runtime::coreai::backend(path, options, how)?;
    let host = Arc::new(HostTables::open(&bundle, path)?);
    LoadedModel::new(bundle, path, host, backend)
}

fn logits(model: &Arc<LoadedModel>, tokens: &[u32], chunk: &[u64]) -> Vec<f32> {
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
            let both = [(Arithmetic::Single, LEAST_SINGLE_COSINE), (Arithmetic::Own, LEAST_COSINE)];
            for (arithmetic, least) in both {
                let model = match opened(&path, &options, arithmetic) {
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
                    if !(cosine > least) || moved > 0 {
                        return Some(format!(
                            "{family}, {arithmetic:?}, calls of {chunk:?}: cosine {cosine}, {moved} of {count} other tokens"
                        ));
                    }
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
        let executor = logits(&LoadedModel::on_cpu(&path, Precision::F32).unwrap(), &tokens, &[4]);
        for (how, least) in [(Arithmetic::Single, LEAST_SINGLE_COSINE), (Arithmetic::Own, LEAST_FORMAT_COSINE)] {
            let apple = opened(&path, &options, how).unwrap_or_else(|error| panic!("{format}: {error}"));
            let (cosine, moved) = compared(&logits(&apple, &tokens, &[4]), &executor, executor.len() / tokens.len());
            assert!(cosine > least && moved == 0, "{format}, {how:?}: cosine {cosine}, {moved} other tokens");
        }
    }
}

/// Graph forms, number formats, states and lengths in combinations that nobody chose, in single precision against
/// transformers where weights aren't quantized, and against the executor. `ANEC_SEED` draws others.
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
    let apple = opened(path, options, Arithmetic::Single).map_err(|error| error.to_string())?;
    let golden = Golden::read(&case.fixture.golden).map_err(|error| error.to_string())?;
    let count = golden.tokens.len().min(TOKENS);
    let [executed, found] = [executor, apple].map(|model| logits(&model, &golden.tokens[..count], &case.sizes));
    let exact = case.least > LEAST_COSINE;
    let transformers = exact.then_some(("transformers", &golden.logits[..count * golden.vocab_size]));
    for (name, expected) in [("the executor", &executed[..])].into_iter().chain(transformers) {
        let (cosine, moved) = compared(&found, expected, golden.vocab_size);
        if !(cosine > LEAST_SINGLE_COSINE) || moved > 0 {
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

/// An asset in f32 computes what the executor computes in f32 of the package, weights of every form included.
#[test]
fn assets_in_single_precision_compute_what_the_executor_does() {
    let Some(options) = runtime() else { return };
    let folder = tempfile::tempdir().unwrap();
    const PACKAGES: [&str; 8] = [
        "attention_fp16",
        "conv_fp16",
        "int4_block",
        "int8_affine_channel",
        "lut4_grouped",
        "multifunction",
        "sparse",
        "state_decoder_mask",
    ];
    for name in PACKAGES {
        let package = package::open(&repository("tests/fixtures/coremltools").join(name).join("model.mlpackage"));
        let migration = migrate(&package.unwrap(), &MigrateOptions::default()).unwrap();
        let path = folder.path().join(format!("{name}.aimodel"));
        coreai::write(&coreai::in_single_precision(&migration.module).unwrap(), &path, &AssetOptions::default())
            .unwrap();
        let agreement = migration::compare(&migration.functions, &path, &options).unwrap();
        assert!(agreement.iter().all(|of| of.difference < 1e-5), "{name}: {agreement:?}");
    }
}

/// A bundle of Core AI passes the gates that `anec push` asks for on Apple's runtime, and none without it.
#[test]
fn a_bundle_of_core_ai_is_proven_on_apples_runtime() {
    let folder = tempfile::tempdir().unwrap();
    let settings = ["format=coreai", "context=64", "lengths={fixed: [1, 4]}", "lm_head.split=2"];
    let path = convert("qwen3-default", folder.path(), &settings);
    let golden = repository("tests/fixtures/families/qwen3-default/golden.safetensors");
    let report = |options: Option<BridgeOptions>| {
        let gates = [anec::Gate::Structure, anec::Gate::Numerics, anec::Gate::Parity];
        let validator = anec::Validator::new(&path).gates(gates).golden(&golden).positions(16).core_ai(options);
        validator.run().unwrap().report
    };
    let verdicts = |report: &GatesReport| report.gates.iter().map(|gate| gate.verdict).collect::<Vec<_>>();
    let without = report(None);
    assert_eq!(verdicts(&without), [Verdict::Passed, Verdict::Unproven, Verdict::Unproven]);
    assert!(without.gates[1].checks[0].detail.as_ref().unwrap().contains("backend coreai"));
    let Some(options) = runtime() else { return };
    let proven = report(Some(options));
    assert_eq!(missing_proof(&serde_json::to_value(&proven).unwrap()), None, "{proven:#?}");
    let checks = &proven.gates[1].checks;
    let layers: Vec<_> = checks.iter().filter(|check| check.layer.is_some()).collect();
    // calls of one token and of four
    assert!(layers.len() == 2 && layers.iter().all(|check| check.measured["cosine"] > 0.9999), "{checks:#?}");
}

/// The numerics gate of an asset: half precision that suffices, and a number that leaves its range.
#[test]
fn an_asset_that_overflows_in_half_precision_fails() {
    let Some(options) = runtime() else { return };
    let folder = tempfile::tempdir().unwrap();
    let verdict = |factor: f32| {
        let text = format!(
            "program(1.3) {{ func main<ios18>(tensor<fp16, [4]> x) {{
                fp16 large = const()[name = string(\"large\"), val = fp16({factor})];
                fp16 small = const()[name = string(\"small\"), val = fp16(0.5)];
                tensor<fp16, [4]> squares = mul(x = x, y = large)[name = string(\"squares\")];
                tensor<fp16, [4]> sums = mul(x = squares, y = large)[name = string(\"sums\")];
                tensor<fp16, [4]> y = mul(x = sums, y = small)[name = string(\"y\")];
            }} -> (y); }}"
        );
        let function = parse(&text).unwrap().functions.remove(0);
        let mut plan = LoweringPlan::new(LoweringChoices::default());
        plan.add("main", &function).unwrap();
        let path = folder.path().join(format!("{factor}.aimodel"));
        coreai::write(&plan.finish(), &path, &AssetOptions::default()).unwrap();
        let validator = anec::Validator::new(&path).gates([anec::Gate::Numerics]);
        let [without, with] =
            [None, Some(options.clone())].map(|options| validator.clone().core_ai(options).run().unwrap().report);
        assert_eq!(without.verdict, Verdict::Unproven);
        with.gates[0].checks[0].clone()
    };
    let sound = verdict(8.0);
    assert!(sound.verdict == Verdict::Passed && sound.measured["overflow"] == 0.0, "{sound:?}");
    // the product of 1000, 1000 and an input is above 65504
    let lost = verdict(1000.0);
    assert!(lost.verdict == Verdict::Failed && lost.measured["overflow"] > 0.0, "{lost:?}");
    assert!(lost.measured["max_abs"] > 65504.0, "{lost:?}");
}

/// The reductions of a module with their definitions, as text.
fn reductions(module: &AiModule) -> BTreeSet<String> {
    fn body(module: &AiModule, op: &AiOp) -> String {
        let ops = op.regions.iter().flat_map(|region| &region.blocks).flat_map(|block| &block.ops);
        ops.map(|op| {
            format!("{}{:?}{:?} {{{}}}", module.name(op), op.operands, module.property(op, "value"), body(module, op))
        })
        .collect::<Vec<_>>()
        .join(" ")
    }
    fn visit(module: &AiModule, ops: &[AiOp], found: &mut BTreeSet<String>) {
        for op in ops {
            let name = module.name(op);
            if name.starts_with("reduce_") && name != "reduce_mean_v1" {
                found.insert(format!("{name} of {:?}: {}", module.element(op.results[0]), body(module, op)));
            }
            if !is_composite(module, op) {
                op.regions.iter().flat_map(|region| &region.blocks).for_each(|block| visit(module, &block.ops, found));
            }
        }
    }
    let mut found = BTreeSet::new();
    visit(module, &module.ops, &mut found);
    found
}

/// Dates of the table of forms, and definitions of reductions, are those that Apple's exporter gives: it writes again
/// what ours wrote.
#[test]
fn versions_and_reductions_are_those_of_apples_exporter() {
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
        expected.insert(name, (migration.module.version().unwrap(), reductions(&migration.module)));
        coreai::write(&migration.module, &folder.path().join(format!("{name}.aimodel")), &AssetOptions::default())
            .unwrap();
    }
    let script = "import sys\nfrom pathlib import Path\nfrom coreai.authoring import AIModelAsset\n\
                  AIModelAsset.load(Path(sys.argv[1])).program.save_asset(Path(sys.argv[2]))\n";
    let mut kinds = BTreeSet::new();
    for (name, (version, own)) in expected {
        let [ours, theirs] = ["", "-again"].map(|end| folder.path().join(format!("{name}{end}.aimodel")));
        let output = std::process::Command::new(&python).args(["-c", script]).arg(&ours).arg(&theirs).output().unwrap();
        assert!(theirs.exists(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        let theirs = coreai::open(&theirs).unwrap().module;
        assert_eq!(theirs.version(), Some(version), "{name}");
        let known = reductions(&theirs);
        assert!(own.is_subset(&known), "{name}: {:#?} {known:#?}", own.difference(&known));
        kinds.extend(own.iter().filter_map(|of| Some(of.split_once(" of")?.0.to_owned())));
    }
    assert_eq!(kinds.len(), 4, "{kinds:?}");
}
