//! `anec bisect` on programs with one op that is wrong: it finds that op, among hundreds.

use crate::common::defect;
use crate::common::folder;
use crate::common::model;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anec::mil::{Constant, Function, ValueType};
use anec::package;
use defect::{insert_constant, position, replace_constant, with_program};
use folder::run;
use model::{copy, edit_tensors};
use serde_json::Value as Json;

const LAST: &str = "layers_3_6.mlpackage";

fn convert(source: &Path, out: &Path, more: &[&str]) {
    let (source, out) = (source.to_str().unwrap(), out.to_str().unwrap());
    let given = ["convert", "-m", "demo", "--source", source, "--out", out, "--force"];
    let (code, _, stderr) = run(&[&given, more].concat());
    assert_eq!(code, 0, "{stderr}");
}

/// The demo bundle, converted once.
fn demo() -> &'static Path {
    static BUNDLE: OnceLock<PathBuf> = OnceLock::new();
    BUNDLE.get_or_init(|| {
        let room = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("bisect-{}", std::process::id()));
        std::fs::create_dir_all(&room).unwrap();
        convert(Path::new("demo/model"), &room.join("demo.anec"), &[]);
        room.join("demo.anec")
    })
}

/// Result of a bisection, as JSON.
fn bisect(path: &Path, predicate: &str, more: &[&str]) -> Json {
    let given = ["bisect", path.to_str().unwrap(), "--predicate", predicate, "--json"];
    let (code, stdout, stderr) = run(&[&given, more].concat());
    assert_eq!(code, 0, "{stdout}{stderr}");
    serde_json::from_str(&stdout).unwrap()
}

/// The names of the ops that are left.
fn names(found: &Json) -> Vec<&str> {
    found["ops"].as_array().unwrap().iter().map(|op| op["name"].as_str().unwrap()).collect()
}

fn broken(room: &Path, change: impl FnOnce(&mut Function)) -> PathBuf {
    with_program(demo(), room, LAST, change)
}

#[test]
fn an_op_whose_declared_type_is_wrong_is_found() {
    let room = tempfile::tempdir().unwrap();
    let bundle = broken(room.path(), |function| {
        let at = position(function, "layers_4_mlp_gate_proj");
        let id = function.block.ops[at].outputs[0];
        if let ValueType::Tensor(ty) = &mut function.values[id.0 as usize].ty {
            ty.shape[1] = 511u64.into();
        }
    });
    let found = bisect(&bundle, "structure", &[]);
    assert_eq!(names(&found), ["layers_4_mlp_gate_proj"], "{found:#}");
    assert_eq!((&found["package"], &found["ops"][0]["layer"]), (&LAST.into(), &4.into()), "{found:#}");
    assert!(found["ops_before"].as_u64().unwrap() > 100 && found["tries"].as_u64().unwrap() < 100, "{found:#}");
}

#[test]
fn the_op_that_overflows_is_found_on_the_values_that_reach_it() {
    let room = tempfile::tempdir().unwrap();
    let source = room.path().join("source");
    copy(Path::new("demo/model"), &source);
    edit_tensors(&source.join("model.safetensors"), |tensors| {
        let down = tensors.iter_mut().find(|t| t.0 == "model.layers.3.mlp.down_proj.weight").unwrap();
        let large = |b: &[u8]| (half::f16::from_le_bytes([b[0], b[1]]).to_f32() * 300_000.0).clamp(-6e4, 6e4);
        down.3 = down.3.chunks_exact(2).flat_map(|b| half::f16::from_f32(large(b)).to_le_bytes()).collect();
    });
    let bundle = room.path().join("bundle");
    convert(&source, &bundle, &["--set", "quant.weights=none"]);
    let piece = room.path().join("piece.mlpackage");
    let found = bisect(&bundle, "numerics", &["--out", piece.to_str().unwrap()]);
    // everything after it overflows as well, and would not without it
    assert_eq!(names(&found), ["layers_3_mlp_down_proj"], "{found:#}");
    let place = (&found["package"], &found["ops"][0]["layer"]);
    assert_eq!(place, (&"layers_3_4.mlpackage".into(), &3.into()), "{found:#}");
    assert!(found["findings"][0].as_str().unwrap().contains("infinite"), "{found:#}");
    // the piece is a package of its own, with the one op and its weight
    let written = package::open(&piece).unwrap().program.functions.remove(0);
    let computing = written.block.ops.iter().filter(|op| op.operator != "const").count();
    assert_eq!((written.name.as_str(), computing), ("main", 1));
    assert_eq!(written.tensor_inputs().count(), 1);
    let (code, stdout, _) = run(&["validate", piece.to_str().unwrap(), "--structure"]);
    assert_eq!(code, 0, "{stdout}");
}

#[test]
fn scales_that_are_zero_are_found_by_the_op_that_reads_them() {
    let room = tempfile::tempdir().unwrap();
    let bundle = broken(room.path(), |function| {
        let scaled = function.block.ops.iter().find(|op| op.is_constexpr() && op.name.contains("layers_5_attn_v_proj"));
        let name = scaled.unwrap().name.clone();
        replace_constant(function, &name, "scale", |bytes| bytes.fill(0));
    });
    let found = bisect(&bundle, "numerics", &[]);
    assert_eq!(names(&found), ["layers_5_attn_v_proj"], "{found:#}");
    assert!(found["findings"][0].as_str().unwrap().contains("scales are zero"), "{found:#}");
}

#[test]
fn an_epsilon_that_is_lost_is_found() {
    let room = tempfile::tempdir().unwrap();
    let naive = room.path().join("naive");
    convert(Path::new("demo/model"), &naive, &["--set", "norm=naive"]);
    let bundle = with_program(&naive, room.path(), LAST, |function| {
        let nothing = insert_constant(function, 0, Constant::fp16(0.0));
        let at = position(function, "layers_5_mlp_norm_rsqrt");
        function.block.ops[at].inputs.insert("epsilon".into(), [nothing].into());
    });
    let found = bisect(&bundle, "numerics", &[]);
    assert_eq!(names(&found), ["layers_5_mlp_norm_rsqrt"], "{found:#}");
}

#[cfg(unix)]
#[test]
fn a_command_of_ones_own_decides() {
    let room = tempfile::tempdir().unwrap();
    // a package alone, as a program that knows nothing of bundles gives it
    let package = demo().join(LAST);
    let script = room.path().join("fails_with_a_softmax.sh");
    std::fs::write(&script, "! /bin/grep -q softmax \"$1/Data/com.apple.CoreML/model.mlmodel\"\n").unwrap();
    let command = format!("/bin/sh {} {{}}", script.display());
    let found = bisect(&package, &command, &[]);
    assert_eq!((found["ops"].as_array().unwrap().len(), &found["ops"][0]["operator"]), (1, &"softmax".into()));
    // temporary folders may have any name
    let folder = room.path().join("it's a blank");
    std::fs::create_dir(&folder).unwrap();
    for (command, operator) in [(command.as_str(), Some("softmax")), ("test -d", None), ("test -d \"{}/Data\"", None)] {
        let mut bisect = folder::anec();
        bisect.env("TMPDIR", &folder).arg("bisect").arg(&package).args(["--predicate", command, "--json"]);
        let (code, stdout, stderr) = folder::finish(bisect.output().unwrap());
        assert_eq!(code, 0, "{stderr}");
        let found: Json = serde_json::from_str(&stdout).unwrap();
        assert_eq!(found["ops"][0]["operator"].as_str(), operator, "{command}: {found:#}");
    }
    // nothing fails: there is nothing to look for
    for predicate in ["structure", "numerics", "exit 0"] {
        let (code, stdout, stderr) = run(&["bisect", package.to_str().unwrap(), "--predicate", predicate]);
        assert_eq!(code, 0, "{predicate}: {stderr}");
        assert!(stdout.contains("no function fails"), "{stdout}");
    }
    let missing = ["bisect", package.to_str().unwrap(), "--predicate", "structure", "--function", "other"];
    assert_eq!(run(&missing).0, 2);
    // a name that is misspelt blames no op
    let (code, stdout, stderr) = run(&["bisect", package.to_str().unwrap(), "--predicate", "structur"]);
    assert_eq!((code, stdout.as_str()), (2, ""), "{stderr}");
    assert!(stderr.contains("`structur` can't be run") && stderr.contains("did you mean `structure`?"), "{stderr}");
    // without a Mac, its tools are missing
    assert_eq!(run(&["bisect", package.to_str().unwrap(), "--predicate", "compile"]).0, 5);
}
