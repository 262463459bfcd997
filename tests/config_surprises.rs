//! A newer configuration of a known family can hold keys that nobody here has seen. Whatever key of transformers'
//! classes changes, the change is understood, refused, or known not to touch the maths: never overlooked.

use crate::common::folder;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anec::family::encoder_families;
use anec::family::row::{Bidirectional, DecoderFamily};
use anec::family::table::{DECODERS, NEUTRAL_KEYS, OPENAI_PRIVACY_FILTER};
use anec::source::{Ledger, Source};
use folder::json;
use rayon::prelude::*;
use serde_json::{Map, Value as Json, json};

/// A small model of a family, of which single keys are changed.
struct Small {
    family: String,
    folder: PathBuf,
    config: Map<String, Json>,
    /// The configuration of the multimodal model that it is the text part of, if transformers has no other.
    around: Option<Map<String, Json>>,
}

impl Small {
    /// The models of a family, each also in the words of the newest class, and with windows where those are a choice: a
    /// key can mean nothing beside others, such as a window's width where there are no windows.
    fn all_of(family: &str, class: &Map<String, Json>) -> Vec<Small> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families");
        let cases = json(&root.join("cases.json"));
        let cases = ["cases", "classifiers"].map(|kind| cases[kind].as_array().unwrap().clone()).concat();
        let mut all = Vec::new();
        for case in cases.iter().filter(|case| case["family"] == family) {
            let folder = root.join(case["hugging_face"].as_str().unwrap());
            let mut config = json(&folder.join("config.json")).as_object().unwrap().clone();
            let mut around = None;
            if config["model_type"] != family {
                if has_text_model(family) {
                    continue;
                }
                around = Some(config.clone());
                config = config["text_config"].as_object().unwrap().clone();
            }
            let mut newest = config.clone();
            let names = row(family).names.keys.iter().chain(&[("_sliding_window_pattern", "sliding_window_pattern")]);
            for (modern, older) in names {
                if let Some(value) = newest.remove(*older) {
                    let name = if class.contains_key(*older) { older } else { modern };
                    newest.insert(name.to_string(), value);
                }
            }
            let mut windowed = newest.clone();
            windowed.extend(
                [("use_sliding_window", json!(true)), ("sliding_window", json!(8))].map(|(k, v)| (k.into(), v)),
            );
            windowed
                .extend([("layer_types", json!(null)), ("max_window_layers", json!(1))].map(|(k, v)| (k.into(), v)));
            let mut variants = vec![config, newest];
            let refuses_windows = row(family).names.inert_keys.contains(&("use_sliding_window", "0"));
            if class.contains_key("use_sliding_window") && !refuses_windows {
                variants.push(windowed);
            }
            let (family, around) = (family.to_owned(), around);
            let small =
                |config| Small { family: family.clone(), folder: folder.clone(), config, around: around.clone() };
            all.extend(variants.into_iter().map(small));
        }
        let encoders = root.with_file_name("encoders");
        for entry in std::fs::read_dir(encoders).unwrap().flatten().filter(|entry| entry.path().is_dir()) {
            let config = json(&entry.path().join("config.json")).as_object().unwrap().clone();
            if config["model_type"] == family && is_encoder(family) {
                all.push(Small { family: family.to_owned(), folder: entry.path(), config, around: None });
            }
        }
        assert!(!all.is_empty(), "no model of {family}");
        all
    }

    /// Dimensions and resolved configuration of the model after changes of its keys.
    fn understood(&self, changes: &[(&str, &Json)]) -> Result<String, String> {
        let room = tempfile::tempdir().unwrap();
        let mut config = self.config.clone();
        config.extend(changes.iter().map(|(key, value)| (key.to_string(), (*value).clone())));
        if let Some(mut around) = self.around.clone() {
            around.insert("text_config".into(), config.into());
            config = around;
        }
        std::fs::write(room.path().join("config.json"), serde_json::to_vec(&config).unwrap()).unwrap();
        for file in std::fs::read_dir(&self.folder).unwrap().flatten() {
            let name = file.file_name().into_string().unwrap();
            if name.starts_with("model") && name.contains("safetensors") {
                std::fs::copy(file.path(), room.path().join(name)).unwrap();
            }
        }
        let source = Source::open_path(room.path()).unwrap();
        let mut ledger = Ledger::new(&source);
        let model = anec::family::open(&mut ledger, None, &[]).map_err(|error| error.to_string())?;
        ledger.finish().map_err(|error| error.to_string())?;
        Ok(format!("{:?}", model.facts()))
    }

    /// Keys that are listed as not touching the maths.
    fn neutral(&self) -> BTreeSet<&'static str> {
        let own = match encoder_families().find(|(name, _)| *name == self.family) {
            Some((_, neutral)) => neutral,
            None => row(&self.family).names.neutral_keys,
        };
        NEUTRAL_KEYS.iter().chain(own).copied().collect()
    }
}

/// Whether there are models of the family that aren't part of a multimodal one.
fn has_text_model(family: &str) -> bool {
    !family.starts_with("qwen3_vl")
}

/// Whether all models of the family are encoders.
fn is_encoder(family: &str) -> bool {
    encoder_families().any(|(name, _)| name == family) || row(family).attention.bidirectional == Bidirectional::Always
}

/// A family's row of the table.
fn row(family: &str) -> &'static DecoderFamily {
    DECODERS.iter().chain([&OPENAI_PRIVACY_FILTER]).find(|row| row.name == family).unwrap()
}

/// Other values than a key has.
fn others(value: &Json) -> Vec<Json> {
    match value {
        Json::Bool(flag) => vec![json!(!flag)],
        Json::Number(number) if number.is_u64() => vec![json!(number.as_u64().unwrap() + 1)],
        Json::Number(number) => vec![json!(number.as_f64().unwrap() * 1.5 + 0.125)],
        Json::String(_) => vec![json!("surprise")],
        Json::Null => vec![json!(3), json!(true), json!("surprise")],
        Json::Array(_) => vec![json!(["surprise"])],
        Json::Object(object) => {
            let mut more = object.clone();
            more.insert("surprise".into(), json!(2));
            vec![Json::Object(more)]
        }
    }
}

#[test]
fn no_key_of_a_class_is_overlooked() {
    let listing = json(Path::new("tests/fixtures/configs/classes.json"));
    let classes = listing["classes"].as_object().unwrap();
    let known = DECODERS.iter().chain([&OPENAI_PRIVACY_FILTER]).map(|row| row.name);
    let known: BTreeSet<&str> = known.chain(encoder_families().map(|(name, _)| name)).collect();
    assert_eq!(classes.keys().map(String::as_str).collect::<BTreeSet<_>>(), known);
    let overlooked = classes.iter().collect::<Vec<_>>().into_par_iter().flat_map_iter(|(family, class)| {
        let class = class.as_object().unwrap();
        // what is overlooked in all of the family's models
        let mut common: Option<BTreeSet<String>> = None;
        for small in Small::all_of(family, class) {
            let plain = small.understood(&[]).unwrap_or_else(|error| panic!("{family}: {error}"));
            let neutral = small.neutral();
            let checked = class.iter().filter(|(key, _)| !neutral.contains(key.as_str()));
            let silent = checked.filter(|(key, default)| {
                let values = others(small.config.get(*key).unwrap_or(default));
                // refused is as good as understood
                values.iter().any(|value| small.understood(&[(key, value)]).is_ok_and(|found| found == plain))
            });
            let silent: BTreeSet<String> = silent.map(|(key, _)| format!("{family}: {key}")).collect();
            common = Some(match common {
                Some(others) => others.intersection(&silent).cloned().collect(),
                None => silent,
            });
        }
        common.unwrap_or_default()
    });
    let overlooked: Vec<String> = overlooked.collect();
    assert!(overlooked.is_empty(), "{overlooked:#?}");
}

/// A key that no class has is refused by name, and that name can be acknowledged.
#[test]
fn a_key_that_nobody_knows_is_named() {
    let listing = json(Path::new("tests/fixtures/configs/classes.json"));
    for (family, class) in listing["classes"].as_object().unwrap() {
        let small = &Small::all_of(family, class.as_object().unwrap())[0];
        for (key, value) in
            [("attention_surprise", json!(2)), ("use_surprise", json!(true)), ("surprise_types", json!(["a"]))]
        {
            let error = small.understood(&[(key, &value)]).unwrap_err();
            assert!(
                error.contains(&format!("the key `{key}` = {value} is not known for family `{family}`")),
                "{error}"
            );
        }
    }
}
