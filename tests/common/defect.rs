//! Seeded defects: a bundle with one of its programs changed.
#![allow(dead_code, reason = "each test uses what it needs")]

use std::path::{Path, PathBuf};

use anec::base::ContentDigest;
use anec::mil::{Binding, Constant, Function, Op, TensorType, Value, ValueId, ValueType};
use anec::package::{self, WriteOptions};
use serde_json::{Value as Json, json};

use super::folder::contents;
use super::model::edit_json;

/// Notes the files of a bundle anew, so that digests don't give a defect away.
pub fn seal(bundle: &Path) {
    let digest = |file: &str| {
        let bytes = std::fs::read(bundle.join(file)).unwrap();
        json!({"file": file, "bytes": bytes.len(), "digest": ContentDigest::of(&bytes)})
    };
    edit_json(&bundle.join("bundle.json"), |value| {
        let renew = |entry: &mut Json| *entry = digest(entry["file"].as_str().unwrap());
        for package in value["packages"].as_array_mut().unwrap() {
            package["files"].as_array_mut().unwrap().iter_mut().for_each(renew);
        }
        renew(&mut value["host"]["file"]);
    });
}

/// A copy of a bundle with the program of one package changed.
pub fn with_program(bundle: &Path, room: &Path, package: &str, change: impl FnOnce(&mut Function)) -> PathBuf {
    let out = copied(bundle, room);
    let path = out.join(package);
    let read = package::open(&path).unwrap();
    let mut program = read.program;
    change(&mut program.functions[0]);
    let new = room.join("new.mlpackage");
    package::write(&program, &new, &WriteOptions::new(read.metadata)).unwrap();
    std::fs::remove_dir_all(&path).unwrap();
    std::fs::rename(new, path).unwrap();
    seal(&out);
    out
}

/// A copy of a bundle.
pub fn copied(bundle: &Path, room: &Path) -> PathBuf {
    let out = room.join("bundle");
    for (name, bytes) in contents(bundle) {
        std::fs::create_dir_all(out.join(&name).parent().unwrap()).unwrap();
        std::fs::write(out.join(name), bytes).unwrap();
    }
    out
}

/// Where the op is that gives a value, or has this name.
pub fn position(function: &Function, name: &str) -> usize {
    let is = |op: &Op| op.outputs.iter().any(|id| function.value(*id).name == name) || op.name == name;
    let found = function.block.ops.iter().position(is);
    found.unwrap_or_else(|| {
        panic!("no `{name}` among {:?}", function.block.ops.iter().map(|op| &op.name).collect::<Vec<_>>())
    })
}

/// The value of this name.
pub fn value(function: &Function, name: &str) -> ValueId {
    ValueId(function.values.iter().position(|value| value.name == name).unwrap() as u32)
}

/// Adds a value that an op before position `at` gives.
pub fn insert(
    function: &mut Function,
    at: usize,
    operator: &str,
    inputs: &[(&str, Binding)],
    ty: TensorType,
) -> ValueId {
    let id = ValueId(function.values.len() as u32);
    let name = format!("seeded_{}", function.values.len());
    function.values.push(Value { name: name.clone(), ty: ValueType::Tensor(ty), constant: None });
    let inputs = inputs.iter().map(|(name, binding)| ((*name).into(), [binding.clone()].into())).collect();
    let (attributes, blocks) = Default::default();
    function.block.ops.insert(
        at,
        Op { operator: operator.into(), name, inputs, attributes, outputs: [id].into_iter().collect(), blocks },
    );
    id
}

/// Adds a constant before position `at`.
pub fn insert_constant(function: &mut Function, at: usize, constant: Constant) -> Binding {
    let id = insert(function, at, "const", &[], constant.ty.clone());
    function.values[id.0 as usize].constant = Some(constant.clone());
    function.block.ops[at].attributes.insert("val".into(), constant);
    Binding::Value(id)
}

/// Another content for the constant that a parameter of an op has.
pub fn replace_constant(function: &mut Function, op: &str, parameter: &str, change: impl FnOnce(&mut [u8])) {
    let at = position(function, op);
    let edited = |constant: &Constant| {
        let mut bytes = constant.bytes().unwrap().to_vec();
        change(&mut bytes);
        Constant::literal(constant.ty.clone(), bytes)
    };
    match function.block.ops[at].input(parameter).unwrap().clone() {
        Binding::Constant(constant) => {
            let edited = Binding::Constant(Box::new(edited(&constant)));
            function.block.ops[at].inputs.insert(parameter.into(), [edited].into());
        }
        Binding::Value(id) => {
            let constant = edited(function.value(id).constant.as_ref().unwrap());
            let definition = function.block.ops.iter().position(|op| op.outputs.contains(&id)).unwrap();
            function.block.ops[definition].attributes.insert("val".into(), constant.clone());
            function.values[id.0 as usize].constant = Some(constant);
        }
    }
}
