//! Whatever the converter emits is loaded by coremltools, whose own type inference must come to the same types: every
//! form of a graph, every family, the least and the most tokens of a call. So must what type inference says in
//! `tests/filetests`.
//!
//! These tests need the Python that `ANEC_PYTHON` names, with the packages of `tests/requirements.txt`.

use crate::common::coremltools;
use crate::common::emitted;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use anec::convert::emit::Emitter;
use anec::exec::{Executable, Precision, Tensor, WeightCache};
use anec::family::EmitWeight;
use anec::manifest::{Manifest, Role};
use anec::mil::verify::infer_types;
use anec::mil::{
    Binding, Block, Constant, Data, DataType, Function, FunctionBuilder, Opset, Program, TensorType, text,
};
use anec::package::{self, WriteOptions};
use anec::source::SourceWeight;

/// Graph forms: every two choices of different keys occur together.
const FORMS: [[&str; 6]; 12] = [
    ["conv", "accurate", "bcs1", "grouped", "mask", "unified"],
    ["conv", "naive", "bc1s", "grouped", "mask", "per_layer"],
    ["conv", "layer_norm_concat", "bc1s", "per_head", "slice", "unified"],
    ["conv", "prescale", "bcs1", "per_head", "slice", "per_layer"],
    ["linear", "accurate", "bc1s", "grouped", "slice", "per_layer"],
    ["linear", "naive", "bc1s", "per_head", "slice", "unified"],
    ["linear", "layer_norm_concat", "bc1s", "grouped", "slice", "per_layer"],
    ["linear", "prescale", "bcs1", "per_head", "mask", "unified"],
    ["matmul", "accurate", "bc1s", "per_head", "mask", "unified"],
    ["matmul", "naive", "bcs1", "grouped", "slice", "unified"],
    ["matmul", "layer_norm_concat", "bcs1", "grouped", "mask", "per_layer"],
    ["matmul", "prescale", "bc1s", "grouped", "mask", "per_layer"],
];
const KEYS: [&str; 6] = ["linear", "norm", "layout", "attention", "kv_write", "state"];

/// Other manifest keys that change a graph.
const OTHERS: [(&str, &[&str]); 14] = [
    ("defaults", &[]),
    ("argmax", &["lm_head.argmax=true", "lm_head.split=3"]),
    ("one_package", &["shards.layers=[[0, 6]]", "lm_head={split: none, top_k: 3, logits: true}"]),
    ("per_channel", &["quant.granularity=per_channel"]),
    ("unquantized", &["quant.weights=none"]),
    ("mixed", &["quant.weights=none", "quant.overrides={lm_head: {weights: int8, granularity: per_channel}}"]),
    ("one_token", &["lengths.fixed=[1]", "kv_write=mask"]),
    ("functions", &["lengths.fixed=[8, 1]", "context=[32, 64]"]),
    ("ios26", &["target=iOS26", "lengths.range=[2, 5]"]),
    ("host", &["state=host", "attention=grouped"]),
    ("host_functions", &["state=host", "lengths.fixed=[8, 1]", "context=[32, 64]"]),
    ("palettes", &["quant.weights=palette4", "quant.granularity={group: 16}", "quant.row_scale=true"]),
    ("palettes_linear", &["quant.weights=palette6", "quant.row_scale=true", "linear=linear"]),
    (
        "integers",
        &["quant.op=affine", "quant.overrides={mlp_down: {weights: int4, granularity: {block: 32}, op: auto}}"],
    ),
];

/// Every number format, with the shares of scales and palettes that it has.
const FORMATS: [&str; 15] = [
    "{weights: int8}",
    "{weights: int8, granularity: per_channel}",
    "{weights: int8, granularity: {block: 16}}",
    "{weights: int8, op: affine}",
    "{weights: int8, op: affine, granularity: per_channel}",
    "{weights: int4}",
    "{weights: int4, granularity: per_channel}",
    "{weights: int4, granularity: {block: 32}}",
    "{weights: palette8}",
    "{weights: palette6, granularity: {group: 4}}",
    "{weights: palette4, row_scale: true}",
    "{weights: palette4, granularity: {group: 16}}",
    "{weights: palette3}",
    "{weights: palette2, granularity: {group: 8}}",
    "{weights: palette1}",
];

#[test]
fn every_number_format_stands_for_the_same_numbers_everywhere() {
    let Some(python) = coremltools::python() else { return };
    let room = tempfile::tempdir().unwrap();
    let mut expected = Vec::new();
    // rows that end within bytes, and rows that don't; kernels take only large ones
    for (name, rows, columns) in [("odd", 48, 35), ("even", 40, 64)] {
        for rank in [2, 4] {
            for format in FORMATS {
                let name = format!("{name}-{rank}-{}", expected.len());
                let quant = Manifest::from_yaml(&format!("quant: {format}"), "test", &[]).unwrap().quant;
                let value = |i: u64| ((i * 7919 % 2003) as f32 / 1000.0 - 1.0).powi(3) * (1.0 + (i / columns) as f32);
                let values = (0..rows * columns).map(value).collect();
                let weight = SourceWeight::from_values("w", &[rows, columns], values).unwrap();
                let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
                let shape = [rows, columns, 1, 1][..rank].to_vec();
                let x = ops.input("x", TensorType::new(DataType::Fp16, vec![1; rank]));
                let mut emitter = Emitter::new(&quant);
                let weight = emitter.emit(&mut ops, "w", Role::MlpUp, &weight, &shape).unwrap();
                let sum = ops.add(weight, x);
                ops.output("y", sum);
                let program = Program::single(ops.finish().unwrap());
                let path = room.path().join(format!("{name}.mlpackage"));
                package::write(&program, &path, &WriteOptions::default()).unwrap();
                // as read again, with what the executor makes of it, rounded to half precision as the weight is
                let program = package::open(&path).unwrap().program;
                let executable =
                    Executable::compile(&program.functions[0], Precision::F16, &WeightCache::new()).unwrap();
                let zero = Tensor::new(vec![1; rank], vec![0.0f32]);
                let found = executable.run(&[("x", &zero)], &mut executable.new_state()).unwrap();
                let bytes: Vec<u8> =
                    found[0].1.floats().unwrap().iter().flat_map(|v| (v + 0.0).to_le_bytes()).collect();
                expected.push((format!("{format} {shape:?}"), path, bytes));
            }
        }
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracle/expand.py");
    let output = Command::new(python).arg(script).arg(room.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for (name, path, expected) in expected {
        for kind in ["coremltools", "reader"] {
            let found = std::fs::read(path.with_extension(kind)).unwrap();
            // there are two zeros
            let found: Vec<u8> =
                found.as_chunks::<4>().0.iter().flat_map(|b| (f32::from_le_bytes(*b) + 0.0).to_le_bytes()).collect();
            assert!(found == expected, "{name}: {kind} expands it to other numbers");
        }
    }
}

#[test]
fn every_two_choices_of_a_form_are_tried_together() {
    for a in 0..KEYS.len() {
        for b in 0..a {
            let choices = |key: usize| FORMS.iter().map(|form| form[key]).collect::<BTreeSet<_>>().len();
            let pairs: BTreeSet<_> = FORMS.iter().map(|form| (form[a], form[b])).collect();
            assert_eq!(pairs.len(), choices(a) * choices(b), "{} and {}", KEYS[a], KEYS[b]);
        }
    }
}

#[test]
fn coremltools_types_what_we_emit_as_we_do() {
    let Some(python) = coremltools::python() else { return };
    let room = tempfile::tempdir().unwrap();
    let (mut flexible, mut structures) = (BTreeSet::new(), BTreeSet::new());
    let mut write = |name: String, program: &Program| {
        // layers that differ in their numbers only are typed alike
        if !structures.insert(structure(program)) {
            return;
        }
        let options = WriteOptions::default();
        package::write(program, &room.path().join(format!("{name}.mlpackage")), &options)
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        if program.functions.iter().any(|function| !function.lengths.is_empty()) {
            flexible.insert(name);
        }
    };
    for form in FORMS {
        let mut overrides: Vec<String> = KEYS.iter().zip(form).map(|(key, choice)| format!("{key}={choice}")).collect();
        // one position for each call fits a slice, any number of them a mask
        overrides.push(if form.contains(&"slice") { "lengths.fixed=[3]" } else { "lengths.range=[1, 4]" }.into());
        emit_demo(&form.join("-"), &overrides, &mut write);
    }
    for (name, overrides) in OTHERS {
        emit_demo(name, &overrides.iter().map(|o| o.to_string()).collect::<Vec<_>>(), &mut write);
    }
    emit_families(&mut write);
    write_filetests(&mut write);

    let verdicts = coremltools::judge(&python, room.path());
    let complaints: String = verdicts.iter().map(|verdict| verdict.complaints(true)).collect();
    assert!(complaints.is_empty(), "{complaints}");
    for verdict in &verdicts {
        let functions = verdict.json["functions"].as_array().unwrap();
        assert!(!functions.is_empty(), "{}", verdict.package);
        for function in functions {
            assert_eq!(function["ok"], true, "{}", verdict.package);
            let lengths = function["lengths"].as_object().map_or(0, |lengths| lengths.len());
            assert_eq!(lengths > 1, flexible.contains(&verdict.package), "{}: {function}", verdict.package);
        }
    }
    assert!(verdicts.len() > 60, "{} packages", verdicts.len());
    eprintln!("coremltools agrees on {} packages, {} of them flexible", verdicts.len(), flexible.len());
}

/// Everything that types depend on: operators, types and all constants except floats; no names.
fn structure(program: &Program) -> String {
    fn of_constant(constant: &Constant, out: &mut String) {
        let float = matches!(constant.ty.dtype, DataType::Fp16 | DataType::Fp32);
        match &constant.data {
            Data::Literal(bytes) if !float => write!(out, "{} {bytes:?}", constant.ty),
            Data::Strings(strings) => write!(out, "{} {strings:?}", constant.ty),
            Data::Literal(_) | Data::Content(_) => write!(out, "{}", constant.ty),
        }
        .unwrap();
    }
    fn of_block(function: &Function, block: &Block, out: &mut String) {
        for op in &block.ops {
            write!(out, "\n{}", op.operator).unwrap();
            for (name, constant) in &op.attributes {
                write!(out, " {name}=").unwrap();
                of_constant(constant, out);
            }
            for (name, argument) in &op.inputs {
                write!(out, " {name}=").unwrap();
                for binding in argument {
                    match binding {
                        Binding::Value(id) => write!(out, "%{}", id.0).unwrap(),
                        Binding::Constant(constant) => of_constant(constant, out),
                    }
                }
            }
            for id in &op.outputs {
                write!(out, " %{} {}", id.0, function.value(*id).ty).unwrap();
            }
            op.blocks.iter().for_each(|block| of_block(function, block, out));
        }
    }
    let mut out = String::new();
    for function in &program.functions {
        write!(out, "{} {:?} {:?}", function.name, function.opset, function.lengths).unwrap();
        for id in &function.inputs {
            write!(out, " %{} {}", id.0, function.value(*id).ty).unwrap();
        }
        of_block(function, &function.block, &mut out);
    }
    out
}

/// The demo model in a form: its first two layers and the first piece of its head; the rest differs in numbers only.
fn emit_demo(name: &str, overrides: &[String], write: &mut impl FnMut(String, &Program)) {
    let mut all = vec!["context=64", "shards.layers=[[0, 2], [2, 6]]"];
    all.extend(overrides.iter().map(String::as_str));
    for (package, program) in emitted::programs(&emitted::manifest("demo/model", &all)) {
        if package.starts_with("layers_0_")
            || package.starts_with("lm_head_0")
            || ["lm_head", "model"].contains(&package.as_str())
        {
            write(format!("demo-{name}-{package}"), &program);
        }
    }
}

/// Families whose layers are attention and a network, all of one kind.
const DENSE: [&str; 12] = [
    "llama",
    "mistral",
    "ministral3",
    "qwen2",
    "qwen3",
    "phi3",
    "smollm3",
    "granite",
    "olmo2",
    "glm4",
    "starcoder2",
    "hunyuan_v1_dense",
];

/// Forms of layers that a family may have beside the default one.
const LATER_FORMS: [&[&str]; 4] = [
    &["rope=product", "activations=native"],
    &["activations=native", "norm=prescale"],
    &["shards.divide=attention_mlp"],
    &["state=host", "rope=product"],
];

/// A small model of each family, in the default form and in another one; where something recurs, also with what the
/// host carries, and where there are experts, also with experts apart.
fn emit_families(write: &mut impl FnMut(String, &Program)) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families");
    let cases: serde_json::Value = serde_json::from_slice(&std::fs::read(root.join("cases.json")).unwrap()).unwrap();
    let mut families = BTreeMap::<&str, usize>::new();
    let (mut carried, mut apart) = (0, 0);
    for case in cases["cases"].as_array().unwrap().iter().chain(cases["classifiers"].as_array().unwrap()) {
        let (family, model) = (case["family"].as_str().unwrap(), case["hugging_face"].as_str().unwrap());
        let shapes = families.entry(family).or_default();
        *shapes += 1;
        let manifest = emitted::manifest(&format!("tests/fixtures/families/{model}"), &["context=32"]);
        // a third shape has no other ops than the first two, and a second none where layers are attention and a network
        if *shapes > if DENSE.contains(&family) { 1 } else { 2 } {
            continue;
        }
        for (package, program) in emitted::layers_apart(&manifest) {
            write(format!("{model}-{package}"), &program);
        }
        if *shapes == 1 {
            // one form after another, so that each meets families of every kind
            let form = LATER_FORMS[families.len() % LATER_FORMS.len()];
            let sets: Vec<&str> = ["context=32"].into_iter().chain(form.iter().copied()).collect();
            let manifest = emitted::manifest(&format!("tests/fixtures/families/{model}"), &sets);
            for (package, program) in emitted::layers_apart(&manifest) {
                write(format!("{model}-{}-{package}", form[0].replace(['=', '.'], "-")), &program);
            }
        }
        if ["lfm2", "lfm2_moe", "qwen3_5_text", "zaya", "granitemoehybrid", "falcon_h1"].contains(&family) {
            carried += 1;
            let [state, lengths] = [["per_layer", "range=[1, 4]"], ["unified", "fixed=[3, 1]"]][carried % 2];
            let (state, lengths) = (format!("state={state}"), format!("lengths.{lengths}"));
            let sets = ["context=32", "recurrent_states=input_output", &state, &lengths];
            let manifest = emitted::manifest(&format!("tests/fixtures/families/{model}"), &sets);
            for (package, program) in emitted::layers_apart(&manifest) {
                write(format!("{model}-carried-{package}"), &program);
            }
        }
        if ["lfm2_moe", "zaya", "granitemoehybrid", "openai_privacy_filter"].contains(&family) {
            apart += 1;
            let sets = ["context=32", ["experts=split", "experts=routed"][apart % 2], "shards.max_experts=3"];
            let manifest = emitted::manifest(&format!("tests/fixtures/families/{model}"), &sets);
            for (package, program) in emitted::layers_apart(&manifest) {
                write(format!("{model}-apart-{package}"), &program);
            }
        }
    }
    // values with norms, and vectors for layers that are projections, without a cache
    let manifest = emitted::manifest("tests/fixtures/encoders/embeddinggemma2", &["context=32"]);
    for (package, program) in emitted::layers_apart(&manifest) {
        write(format!("embeddinggemma2-{package}"), &program);
    }
    assert!(carried >= 10 && apart >= 7, "{carried} {apart}");
    assert!(families.len() >= 8, "{families:?}");
}

/// The programs on which type inference is tried, with types as inferred and zeros for data that they leave out.
fn write_filetests(write: &mut impl FnMut(String, &Program)) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/filetests/infer");
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        // what coremltools' inference refuses or leaves open: a `linear` without bias, a zero that keeps a dimension of
        // `reshape`, a slice that runs backwards to the beginning, a sparse mask
        // of zeros
        if ["products", "shapes", "slices", "weights"].contains(&name.as_str()) {
            continue;
        }
        let mut program = text::parse(&std::fs::read_to_string(&path).unwrap()).unwrap();
        for function in &mut program.functions {
            fill(function);
            *function = infer_types(function).unwrap();
        }
        write(format!("infer-{name}"), &program);
    }
}

fn fill(function: &mut Function) {
    fn zeros(constant: &mut Constant) {
        if let Data::Content(content) = &constant.data {
            constant.data = Data::Literal(Arc::from(vec![0; content.length() as usize]));
        }
    }
    fn fill_block(block: &mut Block) {
        for op in &mut block.ops {
            op.attributes.iter_mut().for_each(|(_, constant)| zeros(constant));
            for binding in op.bindings_mut() {
                if let Binding::Constant(constant) = binding {
                    zeros(constant);
                }
            }
            op.blocks.iter_mut().for_each(fill_block);
        }
    }
    fill_block(&mut function.block);
    function.values.iter_mut().filter_map(|value| value.constant.as_mut()).for_each(zeros);
}

/// The judge itself is judged: it accepts what is sound and finds many kinds of damage.
#[test]
fn the_judge_finds_damage() {
    let Some(python) = coremltools::python() else { return };
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracle/test_check_package.py");
    let output = Command::new(python).arg(tests).output().expect("ANEC_PYTHON runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The catalogue's facts from coremltools' registry match the registry.
#[test]
fn the_registry_is_as_it_was_written_down() {
    let Some(python) = coremltools::python() else { return };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let room = tempfile::tempdir().unwrap();
    let output = Command::new(python).arg(root.join("tests/oracle/pymil_ops.py")).arg(room.path()).output();
    let output = output.expect("ANEC_PYTHON runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for file in ["tests/oracle/pymil_ops.json", "src/mil/ops/element_types.txt"] {
        let written = std::fs::read_to_string(root.join(file)).unwrap();
        let now = std::fs::read_to_string(room.path().join(Path::new(file).file_name().unwrap())).unwrap();
        assert!(written == now, "{file} is not what tests/oracle/pymil_ops.py writes");
    }
}
