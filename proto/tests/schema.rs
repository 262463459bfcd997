//! The committed code is what the schema generates, and the schema is the format's.
//!
//! `ANEC_REGENERATE=1 cargo test -p coreml-proto` writes the generated code anew.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use prost_types::field_descriptor_proto::Label;
use prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorSet};
use serde_json::{Map, Value, json};

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn schema() -> FileDescriptorSet {
    protox::compile(["Model.proto"], [here("schema")]).expect("the schema compiles")
}

fn files(folder: &Path) -> BTreeMap<String, String> {
    fs::read_dir(folder)
        .expect("the folder is readable")
        .map(|entry| entry.expect("the entry is readable"))
        .map(|e| (e.file_name().to_string_lossy().into_owned(), fs::read_to_string(e.path()).expect("text")))
        .collect()
}

#[test]
fn committed_code_is_what_the_schema_generates() {
    let committed = here("src/generated");
    let scratch = tempfile::tempdir().expect("a temporary folder");
    let target = if std::env::var_os("ANEC_REGENERATE").is_some() { committed.clone() } else { scratch.path().into() };
    prost_build::Config::new().btree_map(["."]).out_dir(&target).compile_fds(schema()).expect("the schema generates");
    let (fresh, committed) = (files(&target), files(&committed));
    assert_eq!(
        fresh.keys().collect::<Vec<_>>(),
        committed.keys().collect::<Vec<_>>(),
        "files differ: run with ANEC_REGENERATE=1"
    );
    for (name, text) in &fresh {
        assert!(committed[name] == *text, "{name} is not what the schema generates: run with ANEC_REGENERATE=1");
    }
}

/// Model kinds that are only recognised; the other files state their messages in full.
const RECOGNISED_ONLY: [&str; 2] = ["Others.proto", "OthersOfCoreMLModels.proto"];

#[test]
fn schema_agrees_with_coremltools_field_by_field() {
    let text = fs::read_to_string(here("tests/descriptors.json")).expect("descriptors.json is readable");
    let theirs: Value = serde_json::from_str(&text).expect("descriptors.json is JSON");
    let (mut messages, mut enums) = (Map::new(), Map::new());
    let set = schema();
    for file in set.file.iter().filter(|f| !RECOGNISED_ONLY.contains(&f.name())) {
        for message in &file.message_type {
            collect(file.package(), message, &mut messages, &mut enums);
        }
        for e in &file.enum_type {
            enums.insert(format!("{}.{}", file.package(), e.name()), numbers(e));
        }
    }
    assert!(messages.len() > 50 && enums.len() == 3, "{} messages, {} enums", messages.len(), enums.len());
    for (name, ours) in &messages {
        assert_eq!(*ours, theirs["messages"][name], "message {name}");
    }
    for (name, ours) in &enums {
        assert_eq!(*ours, theirs["enums"][name], "enum {name}");
    }
    // MIL is stated whole: coremltools has no message there that the schema lacks
    let mil = |names: &Map<String, Value>| -> Vec<String> {
        names.keys().filter(|n| n.contains(".MILSpec.")).cloned().collect()
    };
    let mut ours = mil(&messages);
    ours.sort();
    assert_eq!(ours, mil(theirs["messages"].as_object().expect("an object")));
}

/// A message in the form of descriptors.json.
fn collect(scope: &str, message: &DescriptorProto, messages: &mut Map<String, Value>, enums: &mut Map<String, Value>) {
    let name = format!("{scope}.{}", message.name());
    let is_entry = |m: &&DescriptorProto| m.options.as_ref().is_some_and(|o| o.map_entry());
    let entries: BTreeMap<String, &DescriptorProto> =
        message.nested_type.iter().filter(is_entry).map(|m| (format!(".{name}.{}", m.name()), m)).collect();
    let mut fields: Vec<&FieldDescriptorProto> = message.field.iter().collect();
    fields.sort_by_key(|f| f.number());
    let fields: Vec<Value> = fields.into_iter().map(|f| field(f, &entries, message)).collect();
    let oneofs: Vec<&str> = message.oneof_decl.iter().map(|o| o.name()).collect();
    messages.insert(name.clone(), json!({"fields": fields, "oneofs": oneofs}));
    for e in &message.enum_type {
        enums.insert(format!("{name}.{}", e.name()), numbers(e));
    }
    for inner in message.nested_type.iter().filter(|m| !is_entry(m)) {
        collect(&name, inner, messages, enums);
    }
}

fn field(field: &FieldDescriptorProto, entries: &BTreeMap<String, &DescriptorProto>, of: &DescriptorProto) -> Value {
    let label = if field.label() == Label::Repeated { "repeated" } else { "optional" };
    let mut out = json!({
        "name": field.name(), "number": field.number(), "type": type_word(field), "label": label,
    });
    if let Some(entry) = entries.get(field.type_name()) {
        let (key, value) = (&entry.field[0], &entry.field[1]);
        out["map"] = json!({"key": type_word(key), "value": type_word(value)});
        if !value.type_name().is_empty() {
            out["map"]["value_type_name"] = json!(value.type_name().trim_start_matches('.'));
        }
    } else if !field.type_name().is_empty() {
        out["type_name"] = json!(field.type_name().trim_start_matches('.'));
    }
    if let Some(index) = field.oneof_index {
        out["oneof"] = json!(of.oneof_decl[index as usize].name());
    }
    if let Some(packed) = field.options.as_ref().and_then(|o| o.packed) {
        out["packed"] = json!(packed);
    }
    out
}

/// The word that a schema file uses for a field's type.
fn type_word(field: &FieldDescriptorProto) -> String {
    field.r#type().as_str_name().trim_start_matches("TYPE_").to_lowercase()
}

fn numbers(e: &prost_types::EnumDescriptorProto) -> Value {
    e.value.iter().map(|v| (v.name().to_owned(), json!(v.number()))).collect::<Map<_, _>>().into()
}
