//! The gates on bundles that have something wrong with them: each defect is caught, by a gate that names the place.

use crate::common::defect;
use crate::common::folder;
use crate::common::model;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anec::mil::{Binding, Constant, DataType, Function, Op, TensorType, ValueType};
use defect::{copied, insert, insert_constant, position, replace_constant, seal, value, with_program};
use folder::{json, run};
use model::{RawTensor, copy, edit_json, edit_tensors};
use serde_json::{Value as Json, json};

/// The demo model's source with some tensors changed.
fn source(folder: &Path, change: impl Fn(&str, &mut [f32])) -> String {
    let source = folder.join("source");
    copy(Path::new("demo/model"), &source);
    edit_tensors(&source.join("model.safetensors"), |tensors| {
        for (name, dtype, _, bytes) in tensors {
            assert_eq!(*dtype, safetensors::Dtype::F16, "{name}");
            let mut values: Vec<f32> =
                bytes.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
            change(name, &mut values);
            *bytes = values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect();
        }
    });
    source.to_str().unwrap().to_owned()
}

fn convert(source: &str, out: &Path, more: &[&str]) -> String {
    let out = out.to_str().unwrap();
    let (code, _, stderr) =
        run(&[&["convert", "--no-measure", "-m", "demo", "--source", source, "--out", out], more].concat());
    assert_eq!(code, 0, "{stderr}");
    out.to_owned()
}

/// Validates and gives the exit code and the report.
fn validate(bundle: &str, more: &[&str]) -> (i32, Json) {
    let (code, stdout, stderr) = run(&[&["validate", bundle, "--json", "-"], more].concat());
    let report = serde_json::from_str(&stdout).unwrap_or_else(|e| panic!("{e}: {stdout}{stderr}"));
    (code, report)
}

/// Checks of a verdict, as `subject: claim: detail`.
fn checks(report: &Json, verdict: &str) -> Vec<String> {
    let gates = report["gates"].as_array().unwrap().iter();
    let checks = gates.flat_map(|gate| gate["checks"].as_array().unwrap());
    let text = |check: &Json, key: &str| check[key].as_str().unwrap_or_default().to_owned();
    checks
        .filter(|check| check["verdict"] == verdict)
        .map(|check| format!("{}: {}: {}", text(check, "subject"), text(check, "claim"), text(check, "detail")))
        .collect()
}

#[test]
fn a_residual_stream_that_overflows_is_found_and_scaled() {
    let room = tempfile::tempdir().unwrap();
    // single channels of real models are as far out
    let source = source(room.path(), |name, values| {
        if name == "model.layers.3.mlp.down_proj.weight" {
            values.iter_mut().for_each(|value| *value = (*value * 300_000.0).clamp(-6e4, 6e4));
        }
    });
    let golden = room.path().join("golden");
    let golden = golden.to_str().unwrap();
    let text = ["--prompt", "It was a dark night, and the wind", "--greedy", "8", "--hidden"];
    let (code, _, stderr) = run(&[&["golden", "-m", "demo", "--source", &source, "--out", golden], &text[..]].concat());
    assert_eq!(code, 0, "{stderr}");

    // no loss but that of fp16
    let exact = ["--set", "quant.weights=none"];
    let plain = convert(&source, &room.path().join("plain"), &exact);
    let (code, report) = validate(&plain, &["--numerics", "--max-tokens", "40"]);
    let failed = checks(&report, "failed");
    assert_eq!(code, 1, "{report:#}");
    // the layers before it are sound
    assert!(!failed.iter().any(|check| check.starts_with("layers_0_3")), "{failed:#?}");
    let layer = failed.iter().find(|check| check.contains("layer 3")).unwrap();
    assert!(layer.contains("`layers_3_mlp_down_proj` is the first with"), "{layer}");
    assert!(failed.iter().any(|check| check.contains("`numerics.scale: 0.")), "{failed:#?}");
    let (code, report) = validate(&plain, &["--parity", "--golden", golden, "--precision", "f16"]);
    assert_eq!(code, 1, "{report:#}");

    let scaled =
        convert(&source, &room.path().join("scaled"), &["--set", "numerics.scale=auto", "--set", "quant.weights=none"]);
    let (code, report) = validate(&scaled, &["--numerics", "--parity", "--golden", golden, "--max-tokens", "40"]);
    assert_eq!(code, 0, "{:#?}", checks(&report, "failed"));
    let bundle = folder::json(&Path::new(&scaled).join("bundle.json"));
    let scale = bundle["manifest"]["numerics"]["scale"].as_f64().unwrap();
    assert!(scale < 1.0 && scale.log2().fract() == 0.0, "{scale}");
}

/// The residual stream in another unit, for every place that norms have: transformers computed the goldens.
#[test]
fn a_scaled_residual_stream_leaves_the_logits_alone() {
    for family in ["llama-bias", "olmo2-default", "gemma3-default", "granite-default", "zaya-sliding"] {
        let room = tempfile::tempdir().unwrap();
        let folder = format!("tests/fixtures/families/{family}");
        let out = room.path().join("bundle");
        let out = out.to_str().unwrap();
        let sets = ["--set", "numerics.scale=0.125", "--set", "quant.weights=none", "--set", "context=64"];
        let (code, _, stderr) =
            run(&[&["convert", "--no-measure", "--source", &folder, "--out", out], &sets[..]].concat());
        assert_eq!(code, 0, "{family}: {stderr}");
        let golden = format!("{folder}/golden.safetensors");
        let (code, report) = validate(out, &["--parity", "--golden", &golden, "--precision", "f32"]);
        assert_eq!(code, 0, "{family}: {:#?}", checks(&report, "failed"));
        // hidden states are an eighth of the golden's, and the gate knows
        let forced = report["gates"][0]["checks"].as_array().unwrap().iter();
        let forced: Vec<&Json> = forced.filter(|c| c["subject"].as_str().unwrap().contains("forced")).collect();
        assert!(forced.len() > 1, "{family}");
        for check in forced {
            let ratio = check["measured"]["norm_ratio_max"].as_f64().unwrap();
            assert!((ratio - 1.0).abs() < 0.02, "{family}: {check}");
        }
    }
}

/// The demo bundle, converted once.
fn demo() -> &'static Path {
    static BUNDLE: OnceLock<PathBuf> = OnceLock::new();
    BUNDLE.get_or_init(|| {
        let room = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("validate-{}", std::process::id()));
        std::fs::create_dir_all(&room).unwrap();
        convert("demo/model", &room.join("demo.anec"), &["--force"]).into()
    })
}

const LAST: &str = "layers_3_6.mlpackage";

/// Records a defect, the gates that catch it, and the first failed check of each.
fn caught(defect: &str, bundle: &Path, caught: &mut String) {
    let (code, report) = validate(
        bundle.to_str().unwrap(),
        &[
            "--structure",
            "--numerics",
            "--parity",
            "--golden",
            "demo/golden.safetensors",
            "--precision",
            "f32",
            "--max-tokens",
            "24",
        ],
    );
    assert_eq!(code, 1, "{defect} goes through");
    caught.push_str(&format!("{defect}\n"));
    let text =
        |check: &Json, key: &str| check[key].as_str().unwrap_or_default().replace(bundle.to_str().unwrap(), "BUNDLE");
    for gate in report["gates"].as_array().unwrap() {
        let name = gate["gate"].as_str().unwrap();
        let failed = failed(&report, name);
        if let Some(first) = failed.first() {
            let (subject, detail) = (text(first, "subject"), text(first, "detail"));
            caught.push_str(&format!("  {name}, {} of its checks: {subject}: {detail}\n", failed.len()));
        }
        // where it is
        if let Some(place) = failed.iter().find(|check| check["layer"].is_u64()) {
            let (subject, detail) = (text(place, "subject"), text(place, "detail"));
            caught.push_str(&format!("    layer {}: {subject}: {detail}\n", place["layer"]));
        }
    }
}

/// Checks of a gate that failed.
fn failed<'a>(report: &'a Json, gate: &str) -> Vec<&'a Json> {
    let gate = report["gates"].as_array().unwrap().iter().find(|found| found["gate"] == gate);
    gate.into_iter().flat_map(|gate| gate["checks"].as_array().unwrap()).filter(|c| c["verdict"] == "failed").collect()
}

/// Defects in the source: what a wrong reader would make of it.
#[test]
fn weights_in_the_wrong_place_are_caught() {
    let mut report = String::new();
    let mut with = |defect: &str, change: &dyn Fn(&mut Vec<RawTensor>)| {
        let room = tempfile::tempdir().unwrap();
        let source = room.path().join("source");
        copy(Path::new("demo/model"), &source);
        edit_tensors(&source.join("model.safetensors"), |tensors| change(tensors));
        let bundle = convert(source.to_str().unwrap(), &room.path().join("bundle"), &[]);
        caught(defect, Path::new(&bundle), &mut report);
    };
    let find = |tensors: &[RawTensor], name: &str| tensors.iter().position(|t| t.0 == name).unwrap();
    let exchange = |tensors: &mut Vec<RawTensor>, a: &str, b: &str| {
        let (a, b) = (find(tensors, a), find(tensors, b));
        let bytes = tensors[a].3.clone();
        tensors[a].3 = std::mem::replace(&mut tensors[b].3, bytes);
    };
    with("gate and up exchanged in layer 4", &|tensors| {
        exchange(tensors, "model.layers.4.mlp.gate_proj.weight", "model.layers.4.mlp.up_proj.weight");
    });
    with("layers 1 and 2 exchanged", &|tensors| {
        let names: Vec<String> =
            tensors.iter().map(|t| t.0.clone()).filter(|n| n.starts_with("model.layers.1.")).collect();
        for name in names {
            exchange(tensors, &name, &name.replace("layers.1", "layers.2"));
        }
    });
    with("norms of layer 0 exchanged", &|tensors| {
        exchange(tensors, "model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight");
    });
    with("o_proj of layer 5 read in the wrong order", &|tensors| {
        let at = find(tensors, "model.layers.5.self_attn.o_proj.weight");
        let (rows, columns) = (tensors[at].2[0], tensors[at].2[1]);
        let old = tensors[at].3.clone();
        for (i, pair) in tensors[at].3.chunks_exact_mut(2).enumerate() {
            let from = (i % rows) * columns + i / rows;
            pair.copy_from_slice(&old[2 * from..2 * from + 2]);
        }
    });
    with("down_proj of layer 2 all zeros", &|tensors| {
        let at = find(tensors, "model.layers.2.mlp.down_proj.weight");
        tensors[at].3.fill(0);
    });
    insta::with_settings!({ prepend_module_to_snapshot => false, snapshot_path => "snapshots" }, {
        insta::assert_snapshot!("defects_of_sources", report);
    });
}

/// Every token of a call sees in layer 3 what the last one sees.
fn see_what_the_last_token_sees(function: &mut Function) {
    let mask = value(function, "attn_mask");
    let uses = |op: &Op| op.operator == "add" && op.name.starts_with("layers_3_") && op.operands().any(|id| id == mask);
    let at = function.block.ops.iter().position(uses).unwrap();
    let mut ty = function.tensor_type(mask).unwrap().clone();
    ty.shape[2] = 1u64.into();
    let axes = insert_constant(function, at, Constant::int32s(&[2]));
    let keep = insert_constant(function, at, Constant::bool(true));
    let inputs = [("x", Binding::Value(mask)), ("axes", axes), ("keep_dims", keep)];
    let open = insert(function, at + 2, "reduce_max", &inputs, ty);
    for op in function.block.ops.iter_mut().filter(|op| op.operator == "add" && op.name.starts_with("layers_3_")) {
        for binding in op.bindings_mut().filter(|binding| **binding == Binding::Value(mask)) {
            *binding = Binding::Value(open);
        }
    }
}

/// Casts what enters a projection of layer 5 to fp32 and back.
fn add_island_of_fp32(function: &mut Function) {
    let at = position(function, "layers_5_mlp_down_proj");
    let Some(Binding::Value(x)) = function.block.ops[at].input("x").cloned() else { panic!() };
    let half = function.tensor_type(x).unwrap().clone();
    let wide = TensorType { dtype: DataType::Fp32, ..half.clone() };
    let fp32 = insert_constant(function, at, Constant::string("fp32"));
    let a = insert(function, at + 1, "cast", &[("x", Binding::Value(x)), ("dtype", fp32)], wide.clone());
    let b = insert(function, at + 2, "abs", &[("x", Binding::Value(a))], wide.clone());
    let c = insert(function, at + 3, "sub", &[("x", Binding::Value(b)), ("y", Binding::Value(b))], wide.clone());
    let d = insert(function, at + 4, "add", &[("x", Binding::Value(a)), ("y", Binding::Value(c))], wide);
    let fp16 = insert_constant(function, at + 5, Constant::string("fp16"));
    let e = insert(function, at + 6, "cast", &[("x", Binding::Value(d)), ("dtype", fp16)], half);
    function.block.ops[at + 7].inputs.insert("x".into(), [Binding::Value(e)].into());
}

/// Defects in the emitted graph, with digests renewed.
#[test]
fn graphs_that_compute_something_else_are_caught() {
    let mut report = String::new();
    let mut with = |defect: &str, package: &str, change: &dyn Fn(&mut Function)| {
        let room = tempfile::tempdir().unwrap();
        let bundle = with_program(demo(), room.path(), package, change);
        caught(defect, &bundle, &mut report);
    };
    with("the norm before the feed-forward network of layer 4 left out", LAST, &|function| {
        let residual = value(function, "layers_4_add");
        for name in ["layers_4_mlp_gate_proj", "layers_4_mlp_up_proj"] {
            let at = position(function, name);
            function.block.ops[at].inputs.insert("x".into(), [Binding::Value(residual)].into());
        }
    });
    with("the norm of layer 4 before the residual connection instead of after it", LAST, &|function| {
        let residual = value(function, "layers_4_add");
        let before = value(function, "layers_4_attn_o_proj");
        for op in function.block.ops.iter_mut().filter(|op| op.name.starts_with("layers_4_mlp_norm")) {
            for binding in op.bindings_mut().filter(|binding| **binding == Binding::Value(residual)) {
                *binding = Binding::Value(before);
            }
        }
    });
    with("attention of layer 4 scaled by 1 / d instead of 1 / sqrt(d)", LAST, &|function| {
        let scale = (1.0f32 / 32.0f32.sqrt(), 1.0f32 / 32.0);
        let at = function.block.ops.iter().position(|op| {
            let y = op.input("y").and_then(|y| function.constant(y)).and_then(Constant::as_float);
            op.operator == "mul"
                && op.name.starts_with("layers_4_attn")
                && y.is_some_and(|y| (y - scale.0).abs() < 1e-3)
        });
        let name = function.block.ops[at.unwrap()].name.clone();
        replace_constant(function, &name, "y", |bytes| {
            bytes.copy_from_slice(&half::f16::from_f32(scale.1).to_le_bytes())
        });
    });
    with("a mask that is wrong from two tokens on, in layer 3", LAST, &see_what_the_last_token_sees);
    with("keys of layer 5 not written back", LAST, &|function| {
        let state = value(function, "k_cache_5");
        function.block.ops.retain(|op| !(op.operator == "write_state" && op.operands().any(|id| id == state)));
    });
    with("scales of layer 3's query projection zeroed", LAST, &|function| {
        let name = function
            .block
            .ops
            .iter()
            .find(|op| op.is_constexpr() && op.name.contains("layers_3_attn_q_proj"))
            .unwrap()
            .name
            .clone();
        replace_constant(function, &name, "scale", |bytes| bytes.fill(0));
    });
    with("one row of the LM head lost", "lm_head_0.mlpackage", &|function| {
        let name = function.block.ops.iter().find(|op| op.is_constexpr()).unwrap().name.clone();
        replace_constant(function, &name, "data", |bytes| bytes[259 * 256..260 * 256].fill(0));
    });
    with("minus infinity in a mask of layer 3", LAST, &|function| {
        let mask = value(function, "attn_mask");
        let uses = |op: &Op| op.operator == "add" && op.operands().any(|id| id == mask);
        let at = function.block.ops.iter().position(uses).unwrap();
        let infinite = insert_constant(function, at, Constant::fp16(f32::NEG_INFINITY));
        let ty = function.tensor_type(mask).unwrap().clone();
        let lower = insert(function, at + 1, "maximum", &[("x", Binding::Value(mask)), ("y", infinite)], ty);
        for binding in function.block.ops[at + 2].bindings_mut() {
            if *binding == Binding::Value(mask) {
                *binding = Binding::Value(lower);
            }
        }
    });
    with("a declared type that isn't the inferred one", LAST, &|function| {
        let at = position(function, "layers_4_mlp_gate_proj");
        let id = function.block.ops[at].outputs[0];
        if let ValueType::Tensor(ty) = &mut function.values[id.0 as usize].ty {
            ty.shape[1] = 511u64.into();
        }
    });
    with("an island of fp32 in layer 5", LAST, &add_island_of_fp32);
    insta::with_settings!({ prepend_module_to_snapshot => false, snapshot_path => "snapshots" }, {
        insta::assert_snapshot!("defects_of_graphs", report);
    });
}

/// Scales of rows stand behind the product, where a palette has none of its own.
#[test]
fn damaged_scales_of_rows_are_caught() {
    let room = tempfile::tempdir().unwrap();
    let bundle = room.path().join("bundle");
    convert(
        "demo/model",
        &bundle,
        &["--set", "quant.weights=palette6", "--set", "quant.row_scale=true", "--no-compile"],
    );
    let (code, report) = validate(bundle.to_str().unwrap(), &["--structure"]);
    assert_eq!(code, 0, "{report}");
    for (scale, said) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (0.0, "0")] {
        let damaged = with_program(&bundle, &room.path().join(said), LAST, |function| {
            let product = value(function, "layers_4_attn_o_proj");
            let scaled =
                function.block.ops.iter().find(|op| op.operator == "mul" && op.operands().any(|id| id == product));
            let name = scaled.unwrap().name.clone();
            replace_constant(function, &name, "y", |bytes| {
                bytes[6..8].copy_from_slice(&half::f16::from_f32(scale).to_le_bytes());
            });
        });
        let (code, report) = validate(damaged.to_str().unwrap(), &["--structure"]);
        let failed = checks(&report, "failed");
        assert_eq!((code, failed.len()), (1, 1), "{failed:?}");
        assert!(failed[0].contains(&format!("the scale of row 3 is {said}, expected a normal number")), "{failed:?}");
    }
}

/// Defects in what lies beside the graph.
#[test]
fn files_that_say_something_else_are_caught() {
    let mut report = String::new();
    let mut with = |defect: &str, change: &dyn Fn(&Path)| {
        let room = tempfile::tempdir().unwrap();
        let bundle = copied(demo(), room.path());
        change(&bundle);
        seal(&bundle);
        caught(defect, &bundle, &mut report);
    };
    let tables = |bundle: &Path, change: &dyn Fn(&str, &mut Vec<f32>)| {
        edit_tensors(&bundle.join("host.safetensors"), |tensors| {
            for (name, _, _, bytes) in tensors.iter_mut().filter(|tensor| tensor.0.starts_with("rope")) {
                let mut values: Vec<f32> =
                    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
                change(name, &mut values);
                *bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            }
        });
    };
    with("cosines of the rotation one position off", &|bundle| {
        tables(bundle, &|name, values| {
            if name.contains("cos") {
                values.rotate_left(16);
            }
        });
    });
    with("the attention factor of a longrope scaling, 1.19, lost", &|bundle| {
        tables(bundle, &|_, values| values.iter_mut().for_each(|value| *value /= 1.19));
    });
    with("the embedding in another order", &|bundle| {
        edit_tensors(&bundle.join("host.safetensors"), |tensors| {
            let embedding = tensors.iter_mut().find(|tensor| tensor.0 == "embedding").unwrap();
            embedding.3.rotate_left(512);
        });
    });
    with("cosines that are gone where no golden reaches", &|bundle| {
        tables(bundle, &|_, values| values[100 * 16..].fill(0.0));
    });
    with("an embedding that is no number in a row that no golden uses", &|bundle| {
        edit_tensors(&bundle.join("host.safetensors"), |tensors| {
            let embedding = tensors.iter_mut().find(|tensor| tensor.0 == "embedding").unwrap();
            embedding.3[2047 * 512..2047 * 512 + 2].copy_from_slice(&half::f16::NAN.to_le_bytes());
        });
    });
    with("a blob offset off by 64", &|bundle| {
        let path = bundle.join(LAST).join("Data/com.apple.CoreML/model.mlmodel");
        let bytes = std::fs::read(&path).unwrap();
        let mut model = <coreml_proto::Model as coreml_proto::Message>::decode(bytes.as_slice()).unwrap();
        assert!(shift_blob(&mut model), "there is a blob");
        std::fs::write(path, coreml_proto::Message::encode_to_vec(&model)).unwrap();
    });
    insta::with_settings!({ prepend_module_to_snapshot => false, snapshot_path => "snapshots" }, {
        insta::assert_snapshot!("defects_of_files", report);
    });
}

/// A bundle.json that contradicts the packages, itself or the files beside it: a runtime would believe it.
#[test]
fn a_description_that_contradicts_the_bundle_is_caught() {
    let with = |defect: &str, claim: &str, change: &dyn Fn(&Path)| {
        let room = tempfile::tempdir().unwrap();
        let bundle = copied(demo(), room.path());
        change(&bundle);
        let (code, report) = validate(bundle.to_str().unwrap(), &["--structure"]);
        assert_eq!(code, 1, "{defect}");
        let failed = checks(&report, "failed");
        assert!(failed.iter().any(|check| check.contains(claim)), "{defect}: {failed:#?}");
    };
    let described =
        |change: &'static dyn Fn(&mut Json)| move |bundle: &Path| edit_json(&bundle.join("bundle.json"), change);
    let states = "its states are those";
    let order = "in the order of their calls";
    with("functions in another order", order, &described(&|b| b["functions"].as_array_mut().unwrap().reverse()));
    with("a state of another layer", states, &described(&|b| b["functions"][0]["states"][0]["layer"] = json!(5)));
    with(
        "a key cache that is to hold values",
        states,
        &described(&|b| {
            b["functions"][0]["states"][0]["role"] = json!("value_cache");
        }),
    );
    with("other heads", states, &described(&|b| b["config"]["num_key_value_heads"] = json!(1)));
    with("another scale", "attention has the scale", &described(&|b| b["config"]["attention_scale"] = json!(0.375)));
    with(
        "another base of the rotation",
        "rotary tables",
        &described(&|b| b["config"]["rope"]["rope_theta"] = json!(5000.0)),
    );
    with("no rotation", "rotary tables", &described(&|b| b["config"]["rope"] = json!(null)));
    with("other bytes of weights", "as many bytes", &described(&|b| b["packages"][0]["weight_bytes"] = json!(5)));
    let end = "ends with its end tokens";
    with("an end token that isn't there", end, &described(&|b| b["model"]["eos_token_ids"] = json!([99999])));
    with("no end token", end, &described(&|b| b["model"]["eos_token_ids"] = json!([])));
    let text = "its files are those that were written";
    with("another tokenizer", text, &|bundle| {
        edit_json(&bundle.join("tokenizer.json"), |tokenizer| {
            let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
            let [a, b]: [String; 2] = [300, 301].map(|id| {
                vocabulary.iter().find(|(_, value)| **value == json!(id)).map(|(token, _)| token.clone()).unwrap()
            });
            vocabulary.insert(a, json!(301));
            vocabulary.insert(b, json!(300));
        });
    });
    with("digests left out", text, &described(&|b| b["tokenizer_files"] = json!([])));
    with("another file", "nothing lies in its folder", &|bundle| {
        std::fs::write(bundle.join("other.bin"), "x").unwrap()
    });
    with("an embedding of f32", "finite fp16", &|bundle| {
        edit_tensors(&bundle.join("host.safetensors"), |tensors| {
            let embedding = tensors.iter_mut().find(|tensor| tensor.0 == "embedding").unwrap();
            embedding.1 = safetensors::Dtype::F32;
            let halves: Vec<half::f16> =
                embedding.3.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]])).collect();
            embedding.3 = halves.iter().flat_map(|v| v.to_f32().to_le_bytes()).collect();
        });
        seal(bundle);
    });
}

/// Moves the first blob reference of a model by 64 bytes.
fn shift_blob(model: &mut coreml_proto::Model) -> bool {
    use coreml_proto::mil_spec::value::Value as Kind;
    let Some(coreml_proto::model::Type::MlProgram(program)) = &mut model.r#type else { return false };
    let blocks = program.functions.values_mut().flat_map(|function| function.block_specializations.values_mut());
    for op in blocks.flat_map(|block| &mut block.operations) {
        let inline =
            op.inputs.values_mut().flat_map(|argument| &mut argument.arguments).filter_map(
                |binding| match &mut binding.binding {
                    Some(coreml_proto::mil_spec::argument::binding::Binding::Value(value)) => Some(value),
                    _ => None,
                },
            );
        for value in op.attributes.values_mut().chain(inline) {
            if let Some(Kind::BlobFileValue(blob)) = &mut value.value {
                blob.offset += 64;
                return true;
            }
        }
    }
    false
}

#[test]
fn a_state_written_one_slot_late_is_caught() {
    let room = tempfile::tempdir().unwrap();
    let plain = convert(
        "demo/model",
        &room.path().join("plain"),
        &["--set", "lengths.fixed=[1,4]", "--set", "shards.layers=[[0,3],[3,6]]"],
    );
    let golden = ["--parity", "--golden", "demo/golden.safetensors", "--precision", "f32"];
    let (code, report) = validate(&plain, &golden);
    assert_eq!(code, 0, "{:#?}", checks(&report, "failed"));
    let broken = with_program(Path::new(&plain), room.path(), LAST, |function| {
        for end in ["cache_begin", "cache_end"] {
            let place = value(function, end);
            let ty = function.tensor_type(place).unwrap().clone();
            let one = insert_constant(function, 0, Constant::int32s(&[0, 0, 1, 0]));
            let late = insert(function, 1, "add", &[("x", Binding::Value(place)), ("y", one)], ty);
            for op in function.block.ops.iter_mut().skip(2) {
                for binding in op.bindings_mut().filter(|binding| **binding == Binding::Value(place)) {
                    *binding = Binding::Value(late);
                }
            }
        }
    });
    let (code, report) = validate(broken.to_str().unwrap(), &golden);
    assert_eq!(code, 1, "{report:#}");
    // the gate goes up to the last slot, and behind it there is none: what can't be run is one finding among others
    let failed = failed(&report, "parity");
    let run = failed.iter().find(|check| check["claim"] == "it can be run").unwrap();
    assert_eq!((run["subject"].as_str(), run["layer"].as_u64()), (Some("f32, last slots"), Some(3)), "{run:#}");
    let detail = run["detail"].as_str().unwrap();
    assert!(detail.starts_with("layers_3_6.mlpackage, function `"), "{detail}");
    assert!(detail.contains("op `layers_3_attn_cache_slice_update`"), "{detail}");
    // and the golden's own text shows it, too
    assert!(failed.iter().any(|check| check["claim"] == "logits agree with the golden"), "{failed:#?}");
}

#[test]
fn an_epsilon_that_fp16_loses_is_caught() {
    let room = tempfile::tempdir().unwrap();
    let naive = convert("demo/model", &room.path().join("naive"), &["--set", "norm=naive"]);
    let broken = with_program(Path::new(&naive), room.path(), "layers_0_3.mlpackage", |function| {
        let nothing = insert_constant(function, 0, Constant::fp16(0.0));
        for op in function.block.ops.iter_mut().filter(|op| op.operator == "rsqrt") {
            op.inputs.insert("epsilon".into(), [nothing.clone()].into());
        }
    });
    let (code, report) = validate(broken.to_str().unwrap(), &["--numerics", "--max-tokens", "16"]);
    assert_eq!(code, 1);
    let failed = checks(&report, "failed");
    assert!(failed[0].contains("every epsilon counts in half precision"), "{failed:#?}");
    assert!(failed[0].contains("`layers_0_attn_norm_rsqrt` (rsqrt)"), "{failed:#?}");
    // one that is smaller than any fp16 number is emitted as the smallest
    let source = room.path().join("source");
    copy(Path::new("demo/model"), &source);
    edit_json(&source.join("config.json"), |config| config["rms_norm_eps"] = json!(1e-9));
    let accurate = convert(source.to_str().unwrap(), &room.path().join("accurate"), &["--set", "norm=naive"]);
    assert_eq!(validate(&accurate, &["--numerics", "--max-tokens", "16"]).0, 0);
}

#[test]
fn parity_in_the_engines_arithmetic_names_the_operation_and_the_effect() {
    let room = tempfile::tempdir().unwrap();
    // one size of calls: that suffices to tell what an operation computes
    let native = ["--set", "activations=native", "--set", "lengths={fixed: [16]}"];
    let bundle = convert("demo/model", &room.path().join("native.anec"), &native);
    let judged = |precision: &str| -> String {
        let golden = ["--parity", "--golden", "demo/golden.safetensors", "--precision", precision];
        let (_, report) = validate(&bundle, &golden);
        let all = ["passed", "failed"].into_iter().flat_map(|verdict| checks(&report, verdict));
        let named: Vec<String> = all.filter(|check| check.contains("computes what f32 computes")).collect();
        assert_eq!(named.len(), 1, "{precision}: {report}");
        named[0].clone()
    };
    let all = judged("f32,ane");
    assert!(all.contains("deviates by") && all.contains("by silu: "), "{all}");
    assert!(all.contains("`silu-table` (M1, M6: ane-guide"), "{all}");
    assert!(all.starts_with("ane, simulated: ") && all.ends_with("(a simulation of published measurements)"), "{all}");
    // one effect less, and it isn't that operation any more
    let rest = judged("ane-without-silu-table");
    assert!(rest.starts_with("ane-without-silu-table, simulated") && !rest.contains("silu-table` ("), "{rest}");
}

#[test]
fn packages_of_others_are_validated_too() {
    let fixture = |name: &str| format!("tests/fixtures/coremltools/{name}/model.mlpackage");
    for name in ["state_decoder_mask", "mlp_fp16", "int8_channel", "multifunction", "range_fp16"] {
        let (code, report) = validate(&fixture(name), &[]);
        let failed = checks(&report, "failed");
        // placement can't be proven here
        assert_eq!(code, 3, "{name}: {failed:#?}");
        let verdicts: Vec<&str> =
            report["gates"].as_array().unwrap().iter().map(|gate| gate["verdict"].as_str().unwrap()).collect();
        assert_eq!(verdicts, ["passed", "passed", "unproven"], "{name}");
    }
    // what people convert by way of torch: a decoder layer of convolutions, one to four tokens, int8, states
    let (code, report) =
        validate(&fixture("conv_decoder"), &["--structure", "--numerics", "--forecast", "--allow-unproven"]);
    assert_eq!(code, 0, "{report:#}");
    let sizes = report["gates"][1]["checks"].as_array().unwrap().iter().filter(|c| c["measured"]["cosine"].is_number());
    let sizes: Vec<&str> = sizes.map(|check| check["subject"].as_str().unwrap()).collect();
    let at = |size: u32| format!("model.mlpackage, main, made-up inputs, x [1, 32, {size}, 1]");
    assert_eq!(sizes, [at(1), at(4)]);
    let rules: Vec<(&str, &str)> = report["forecast"]
        .as_array()
        .unwrap()
        .iter()
        .map(|finding| (finding["rule"].as_str().unwrap(), finding["severity"].as_str().unwrap()))
        .collect();
    // a head of 8: the cache's last axis is no multiple of 32, which falls off the Neural Engine
    for expected in [("state-last-axis", "falls"), ("last-axis-of-one", "slow"), ("flexible-length", "doubtful")] {
        assert!(rules.contains(&expected), "{expected:?} in {rules:?}");
    }
    assert_eq!(report["packages"][0]["ops"]["conv"], 4);
    // all of it in fp32: nothing can be said of fp16, and the forecast says what becomes of it
    let (_, report) = validate(&fixture("mlp_fp32"), &["--numerics", "--forecast"]);
    assert_eq!(report["gates"][0]["verdict"], "unproven", "{report:#}");
    let rules: Vec<&str> = report["forecast"].as_array().unwrap().iter().map(|f| f["rule"].as_str().unwrap()).collect();
    assert!(rules.contains(&"float32"), "{rules:?}");
}

#[test]
fn reports_come_in_every_form() {
    let room = tempfile::tempdir().unwrap();
    let path = |name: &str| room.path().join(name).to_str().unwrap().to_owned();
    let (code, stdout, stderr) = run(&[
        "validate",
        demo().to_str().unwrap(),
        "--golden",
        "demo/golden.safetensors",
        "--max-tokens",
        "24",
        "--forecast",
        "--structure",
        "--numerics",
        "--parity",
        "--json",
        &path("r.json"),
        "--junit",
        &path("r.xml"),
        "--markdown",
        &path("r.md"),
        "--html",
        &path("r.html"),
    ]);
    assert_eq!(code, 3, "{stdout}{stderr}");
    assert!(stdout.contains("forecast (no proof)"), "{stdout}");
    let report = json(Path::new(&path("r.json")));
    let (code, schema, _) = run(&["schema", "validation"]);
    assert_eq!(code, 0);
    jsonschema::validate(&serde_json::from_str(&schema).unwrap(), &report).unwrap();
    assert_eq!(report["schema_version"], 1);
    let read = |name: &str| std::fs::read_to_string(path(name)).unwrap();
    assert!(read("r.xml").contains("<testsuite name=\"parity\""));
    assert!(read("r.md").contains("| numerics |"));
    let page = read("r.html");
    assert_eq!(
        page.matches("<svg").count(),
        7,
        "plots of cosine, magnitude, norm ratio, positions, parity, quantization"
    );
    assert!(!page.contains("http://") && !page.contains("https://"), "the page loads something");
}

#[test]
fn the_bundle_of_the_current_folder_is_found() {
    let parent = demo().parent().unwrap();
    let here = |folder: &Path| {
        folder::finish(folder::anec().current_dir(folder).args(["validate", "--structure"]).output().unwrap())
    };
    assert_eq!(here(demo()).0, 0);
    assert_eq!(here(parent).0, 0);
    let room = tempfile::tempdir().unwrap();
    assert_eq!(here(room.path()).0, 2);
}

/// StarCoder2's and GPT-NeoX's epsilons of 0.001, by whose root half of fp16's normal numbers can't be divided.
#[test]
fn norms_with_a_large_epsilon_pass_the_numerics_gate() {
    let room = tempfile::tempdir().unwrap();
    for case in ["starcoder2-window", "gpt_neox-plain"] {
        let (source, out) = (folder::repository("tests/fixtures/families").join(case), room.path().join(case));
        let words = ["convert", "--no-measure", "--source", source.to_str().unwrap(), "--out", out.to_str().unwrap()];
        let (code, _, stderr) = run(&words);
        assert_eq!(code, 0, "{case}: {stderr}");
        let (code, report) = validate(out.to_str().unwrap(), &["--numerics", "--positions", "8"]);
        assert_eq!(code, 0, "{case}: {:#?}", checks(&report, "failed"));
    }
}
