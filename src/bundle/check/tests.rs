//! Tests of the bundle's consistency: any contradiction that a runtime would rely on is found.

use serde_json::{Value as Json, json};

use crate::{Bundle, Manifest, OLDEST_VERSION, SCHEMA_VERSION};
use anec_base::{ContentDigest, Diagnostic};

/// Model of two layers in two packages, for two contexts and two numbers of tokens. The first layer is a recurrence
/// stored by the host, the second has a cache.
fn sound() -> Json {
    let mut functions = Vec::new();
    let mut function = |package: &str, name: String, rest: [(&str, Json); 6]| {
        let mut entry = json!({"package": package, "function": name});
        entry.as_object_mut().unwrap().extend(rest.map(|(key, value)| (key.to_owned(), value)));
        functions.push(entry);
    };
    let hidden = |name: &str, tokens: u64| json!({"name": name, "role": "hidden", "shape": [1, 8, tokens, 1]});
    for layer in [0, 1] {
        for context in [16, 32] {
            for tokens in [1, 4] {
                let state = json!({"role": "recurrent_state", "layers": [0]});
                let port = |name: &str| json!({"name": name, "role": "state", "id": format!("r@{context}"), "holds": state, "shape": [1, 2, 4, 4]});
                let cache = |kind: &str| json!({"name": kind, "id": format!("{kind}@{context}"), "role": kind, "layer": 1, "shape": [1, 2, context, 4]});
                let (inputs, outputs, states) = if layer == 0 {
                    (
                        json!([hidden("hidden", tokens), port("r")]),
                        json!([hidden("out", tokens), port("r_out")]),
                        json!([]),
                    )
                } else {
                    let rope =
                        |name: &str| json!({"name": name, "role": name, "table": "rope", "shape": [1, 1, tokens, 2]});
                    let mask = json!({"name": "mask", "role": "attention_mask", "shape": [1, 1, tokens, context]});
                    let [begin, end] =
                        ["begin", "end"].map(|end| json!({"name": end, "role": format!("slice_{end}"), "shape": [4]}));
                    let inputs =
                        json!([hidden("hidden", tokens), rope("rope_cos"), rope("rope_sin"), mask, begin, end]);
                    (inputs, json!([hidden("out", tokens)]), json!([cache("key_cache"), cache("value_cache")]))
                };
                function(
                    &format!("layer_{layer}.mlpackage"),
                    format!("context_{context}_tokens_{tokens}"),
                    [
                        ("stage", json!({"kind": "layers", "first": layer, "end": layer + 1})),
                        ("context", json!(context)),
                        ("tokens", json!({"fixed": tokens})),
                        ("inputs", inputs),
                        ("outputs", outputs),
                        ("states", states),
                    ],
                );
            }
        }
    }
    for [first, end] in [[0, 5], [5, 9]] {
        let logits = json!({"name": "logits", "role": "logits", "shape": [1, end - first, "T", 1]});
        let hidden = json!({"name": "hidden", "role": "hidden", "shape": [1, 8, "T", 1]});
        function(
            &format!("head_{first}.mlpackage"),
            "main".into(),
            [
                ("stage", json!({"kind": "head", "first": first, "end": end})),
                ("context", json!(32)),
                ("tokens", json!({"range": [1, 4]})),
                ("inputs", json!([hidden])),
                ("outputs", json!([logits])),
                ("states", json!([])),
            ],
        );
    }
    let package = |name: &str| {
        let file =
            json!({"file": format!("{name}.mlpackage/weight.bin"), "bytes": 100, "digest": ContentDigest::of(b"")});
        json!({"package": format!("{name}.mlpackage"), "weight_bytes": 80, "files": [file]})
    };
    let packages = ["layer_0", "layer_1", "head_0", "head_5"].map(package);
    json!({
        "schema_version": SCHEMA_VERSION,
        "anec_version": "0",
        "name": "sound",
        "family": "none",
        "model": {"hidden_size": 8, "num_layers": 2, "vocab_size": 9, "contexts": [16, 32], "eos_token_ids": [1]},
        "config": {},
        "manifest": Manifest::default(),
        "source": {"name": "", "format": "", "files": []},
        "packages": packages,
        "functions": functions,
        "host": {
            "file": {"file": "host.safetensors", "bytes": 1, "digest": ContentDigest::of(b"")},
            "embedding": "embedding",
            "rope": [{"table": "rope", "variants": [{"max_length": 32, "cos": "cos", "sin": "sin"}]}],
        },
        "tokenizer": {},
        "ledger": {"used": 1, "used_bytes": 1, "ignored": {}},
    })
}

fn findings(json: Json) -> Vec<String> {
    serde_json::from_value::<Bundle>(json).unwrap().check()
}

#[test]
fn a_sound_bundle_has_no_findings() {
    assert_eq!(findings(sound()), Vec::<String>::new());
}

/// Changes single values; the finding must say what is wrong.
#[test]
fn every_contradiction_is_found() {
    let changes = [
        ("/model/contexts", json!([32, 16]), "context lengths"),
        ("/model/contexts", json!([16, 32, 64]), "expected ascending lengths up to 64"),
        ("/model/num_layers", json!(3), "layers of context 16: they end at 2 of 3"),
        ("/model/vocab_size", json!(10), "LM head: they end at 9 of 10"),
        ("/model/hidden_size", json!(6), "which its role contradicts"),
        ("/model/hidden_scale", json!(0.3), "expected a power of two"),
        ("/config", json!({"hidden_size": 6}), "its configuration says `hidden_size` 6, the model has 8"),
        ("/config", json!({"num_hidden_layers": "2"}), "says `num_hidden_layers` \"2\", the model has 2"),
        ("/config", json!({"vocab_size": 10}), "its configuration says `vocab_size` 10, the model has 9"),
        ("/host/rope/0/variants/0/max_length", json!(31), "rotary table `rope`"),
        ("/host/rope/0/table", json!("other"), "asks for a rotary table `rope`"),
        ("/packages/0/weight_bytes", json!(101), "101 bytes of weights in files of 100"),
        ("/packages/0/files/0/file", json!("layer_1.mlpackage/weight.bin"), "layer_0.mlpackage lists the file"),
        ("/packages/3/package", json!("head_6.mlpackage"), "isn't listed"),
        ("/packages/0/package", json!("../x.mlpackage"), "\"../x.mlpackage\" is outside of its folder"),
        ("/packages/0/files/0/file", json!("layer_0.mlpackage/../../x"), "is outside of its folder"),
        ("/packages/0/compiled", json!("C:\\x.mlmodelc"), "is outside of its folder"),
        ("/host/file/file", json!("/etc/passwd"), "\"/etc/passwd\" is outside of its folder"),
        ("/tokenizer/chat_template", json!("../../.profile"), "is outside of its folder"),
        ("/functions/1/function", json!("context_16_tokens_1"), "there are two functions"),
        ("/functions/0/tokens", json!({"fixed": 2}), "which its role contradicts"),
        ("/functions/0/tokens", json!({"range": [4, 1]}), "it takes 4 to 1 tokens"),
        ("/functions/0/context", json!(8), "its context is 8"),
        ("/functions/8/context", json!(16), "its context is 16"),
        ("/functions/0/stage/end", json!(3), "the model has no"),
        ("/functions/0/inputs/0/name", json!("r"), "two of its ports are named `r`"),
        ("/functions/0/inputs/0/role", json!("logits"), "has no input like"),
        ("/functions/8/outputs/0/role", json!("argmax"), "0 results"),
        ("/functions/8/outputs/0/shape", json!([1, 4, "T", 1]), "`logits` has shape"),
        ("/functions/0/inputs/1/id", json!("r@32"), "other states than it takes"),
        ("/functions/0/outputs/1/shape", json!([1, 2, 4, 8]), "other states than it takes"),
        ("/functions/4/inputs/3/shape", json!([1, 1, 1, 15]), "no attention mask is for the 16 slots"),
        ("/functions/4/inputs/3/shape", json!([1, 1, 1, 17]), "which its role contradicts"),
        ("/functions/4/states/0/layer", json!(0), "is of layer 0"),
        ("/functions/4/states/0/role", json!("value_cache"), "hold the same of one layer"),
        ("/functions/4/states/1/id", json!("key_cache@16"), "have the same id"),
        ("/functions/5/states/0/id", json!("key_cache@32"), "not the same states"),
        ("/functions/5/states/0/name", json!("other"), "not the same states"),
        ("/functions/5/states/0/shape", json!([1, 1, 16, 4]), "not the same states"),
        ("/functions/6/states/0/id", json!("key_cache@16"), "not the same states"),
        ("/functions/4/states/0/shape", json!([1, 2, 12, 4]), "no attention mask is for the 12 slots"),
    ];
    for (place, value, expected) in changes {
        let mut changed = sound();
        match changed.pointer_mut(place) {
            Some(old) => *old = value.clone(),
            None => {
                let (parent, key) = place.rsplit_once('/').unwrap();
                changed.pointer_mut(parent).unwrap()[key] = value.clone();
            }
        }
        let found = findings(changed);
        assert!(found.iter().any(|finding| finding.contains(expected)), "{place} = {value}: {found:?}");
    }
}

/// Masks with biases need the host's table, and embeddings aren't larger than hidden states.
#[test]
fn biased_masks_and_narrow_embeddings_are_checked() {
    let biased = |table: bool, heads: u64| {
        let mut json = sound();
        if table {
            json["host"]["attention_bias"] = json!("attention_bias");
        }
        for function in json["functions"].as_array_mut().unwrap() {
            if function["package"] == "layer_1.mlpackage" {
                let tokens = function["tokens"]["fixed"].clone();
                let mask = json!({"name": "band", "role": "band_mask", "band": 4, "biased": true, "shape": [1, heads, tokens, tokens]});
                function["inputs"].as_array_mut().unwrap().push(mask);
            }
        }
        findings(json)
    };
    assert_eq!(biased(true, 3), Vec::<String>::new());
    for (table, heads) in [(false, 3), (true, 0)] {
        let found = biased(table, heads);
        assert!(found.iter().any(|finding| finding.contains("`band` has shape")), "{found:?}");
    }
    for (columns, sound_size) in [(1, true), (8, true), (0, false), (9, false)] {
        let mut json = sound();
        json["host"]["embedding_size"] = json!(columns);
        assert_eq!(findings(json).is_empty(), sound_size, "{columns}");
    }
}

#[test]
fn untrusted_ports_do_not_panic() {
    let held = json!({"role": "key_cache", "layer": 1});
    let roles = [
        json!({"role": "kv_write_mask"}),
        json!({"role": "slice_begin"}),
        json!({"role": "attention_mask"}),
        json!({"role": "past_mask"}),
        json!({"role": "call_mask"}),
        json!({"role": "token_order"}),
        json!({"role": "cache", "id": "c", "holds": held}),
        json!({"role": "cache_rows", "id": "c", "holds": held}),
        json!({"role": "state", "id": "s", "holds": held}),
        json!({"role": "per_layer_input", "first": 1, "end": 2}),
        json!({"role": "per_layer_input", "first": 2, "end": 1}),
        json!({"role": "shared_keys", "layer": 0}),
    ];
    for (role, rank) in roles.iter().flat_map(|role| (0..6).map(move |rank| (role, rank))) {
        let mut port = json!({"name": "port", "shape": vec![16; rank]});
        port.as_object_mut().unwrap().extend(role.as_object().unwrap().clone());
        let mut changed = sound();
        for side in ["inputs", "outputs"] {
            changed["functions"][4][side].as_array_mut().unwrap().push(port.clone());
        }
        assert!(!findings(changed).is_empty(), "{port}");
    }
}

/// Bundle whose second layer uses the first one's keys and per-layer embeddings.
fn sharing() -> Json {
    let mut bundle = sound();
    bundle["host"]["per_layer_embedding"] = json!("per_layer");
    for index in 0..8 {
        let tokens = bundle["functions"][index]["tokens"]["fixed"].clone();
        let keys = json!({"name": "keys", "role": "shared_keys", "layer": 0, "shape": [1, 2, tokens, 4]});
        let layer = index / 4;
        let per_layer = json!({"name": "per_layer", "role": "per_layer_input", "first": layer, "end": layer + 1, "shape": [1, 3, tokens, 1]});
        let side = if layer == 0 { "outputs" } else { "inputs" };
        bundle["functions"][index][side].as_array_mut().unwrap().push(keys);
        bundle["functions"][index]["inputs"].as_array_mut().unwrap().push(per_layer);
    }
    bundle
}

#[test]
fn shared_values_are_computed_before_use() {
    assert_eq!(findings(sharing()), Vec::<String>::new());
    let changes = [
        // one of two functions of a layer doesn't return them
        ("/functions/1/outputs/2/layer", json!(1), "no function before it gives `keys`"),
        ("/functions/4/inputs/6/layer", json!(1), "no function before it gives `keys`"),
        ("/functions/4/inputs/6/shape", json!([1, 2, 3, 4]), "which its role contradicts"),
        ("/functions/4/inputs/7/first", json!(0), "which its role contradicts"),
        ("/functions/4/inputs/7/shape", json!([1, 3, 2, 1]), "which its role contradicts"),
        ("/host/per_layer_embedding", Json::Null, "which its role contradicts"),
        ("/functions/8/inputs/0/role", json!("shared_values"), "has no input like"),
    ];
    for (place, value, expected) in changes {
        let mut changed = sharing();
        *changed.pointer_mut(place).unwrap() = value.clone();
        if expected.contains("no input") {
            changed["functions"][8]["inputs"][0]["layer"] = json!(0);
        }
        let found = findings(changed);
        assert!(found.iter().any(|finding| finding.contains(expected)), "{place} = {value}: {found:?}");
    }
}

#[test]
fn functions_stand_in_the_order_of_a_call() {
    for (a, b) in [(0, 4), (8, 9), (7, 8)] {
        let mut changed = sound();
        changed["functions"].as_array_mut().unwrap().swap(a, b);
        let found = findings(changed);
        assert!(found.iter().any(|finding| finding.contains("which is called first")), "{a}, {b}: {found:?}");
    }
}

/// Bundle whose second layer leaves its feed-forward network to functions of a separate package.
fn divided() -> Json {
    let mut json = sound();
    let entries = [1, 4].map(|tokens| {
        let hidden = |name: &str| json!({"name": name, "role": "hidden", "shape": [1, 8, tokens, 1]});
        json!({
            "package": "network.mlpackage", "function": format!("tokens_{tokens}"),
            "stage": {"kind": "feed_forward", "layer": 1}, "context": 32, "tokens": {"fixed": tokens},
            "inputs": [hidden("hidden")], "outputs": [hidden("out")], "states": [],
        })
    });
    let head = json["functions"].as_array().unwrap().iter().position(|f| f["stage"]["kind"] == "head").unwrap();
    let file = json!({"file": "network.mlpackage/weight.bin", "bytes": 100, "digest": ContentDigest::of(b"")});
    let package = json!({"package": "network.mlpackage", "weight_bytes": 80, "files": [file]});
    json["packages"].as_array_mut().unwrap().push(package);
    json["functions"].as_array_mut().unwrap().splice(head..head, entries);
    json
}

#[test]
fn a_feed_forward_network_follows_its_layer_and_takes_its_numbers_of_tokens() {
    assert_eq!(findings(divided()), Vec::<String>::new());
    let changed = |change: &dyn Fn(&mut Vec<Json>, usize)| -> String {
        let mut json = divided();
        let functions = json["functions"].as_array_mut().unwrap();
        let first = functions.iter().position(|f| f["stage"]["kind"] == "feed_forward").unwrap();
        change(functions, first);
        findings(json).join("; ")
    };
    let early = changed(&|functions, first| functions.swap(first - 1, first));
    assert!(early.contains("stands before"), "{early}");
    let missing = changed(&|functions, first| drop(functions.remove(first)));
    assert!(missing.contains("the feed-forward network of layer 1 has no function for 1 tokens"), "{missing}");
    let foreign = changed(&|functions, first| {
        functions[first]["stage"]["layer"] = json!(2);
        functions[first + 1]["stage"]["layer"] = json!(2);
    });
    assert!(foreign.contains("the model has no FeedForward"), "{foreign}");
    let stateful = changed(&|functions, first| {
        let mask = json!({"name": "mask", "role": "attention_mask", "shape": [1, 1, 1, 32]});
        functions[first]["inputs"].as_array_mut().unwrap().push(mask);
    });
    assert!(stateful.contains("a function of its stage has no input like `mask`"), "{stateful}");
}

#[test]
fn two_functions_for_one_number_of_tokens_are_one_too_many() {
    let mut changed = sound();
    let mut twin = changed["functions"][9].clone();
    twin["function"] = json!("twin");
    changed["functions"].as_array_mut().unwrap().push(twin);
    assert_eq!(findings(changed), ["LM head: `main` and `twin` are both for 1 to 4 tokens"]);
}

#[test]
fn a_bundle_whose_files_have_a_sha256_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let mut old = sound();
    old["schema_version"] = json!(OLDEST_VERSION);
    let hex = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    old["host"]["file"] = json!({"file": "host.safetensors", "bytes": 1, "sha256": hex});
    std::fs::write(folder.path().join(crate::FILE_NAME), old.to_string()).unwrap();
    let read = Bundle::read(folder.path()).unwrap();
    assert_eq!(read.host.file.digest, ContentDigest::Sha256(hex.into()));
    // rewritten with the current version
    let written = serde_json::to_value(&read).unwrap();
    assert_eq!(written["schema_version"], SCHEMA_VERSION);
    assert_eq!(written["host"]["file"]["digest"], format!("sha256:{hex}"));
}

#[test]
fn a_bundle_of_another_version_is_refused_with_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    for (version, remedy) in [(1, "convert the model again"), (SCHEMA_VERSION + 1, "update anec")] {
        let mut other = sound();
        other["schema_version"] = json!(version);
        // other content has another form
        other["functions"] = json!({"of": "that version"});
        std::fs::write(folder.path().join(crate::FILE_NAME), other.to_string()).unwrap();
        let error = Bundle::read(folder.path()).unwrap_err();
        let text = error.to_string();
        assert!(text.ends_with(&format!("schema version {version}, expected {SCHEMA_VERSION}")), "{text}");
        assert!(error.help().unwrap().contains(remedy), "{:?}", error.help());
    }
}

#[test]
fn numbers_that_no_sum_can_hold_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let read = |pointer: &str, number: u64| {
        let mut json = sound();
        *json.pointer_mut(pointer).unwrap() = json!(number);
        std::fs::write(folder.path().join(crate::FILE_NAME), json.to_string()).unwrap();
        Bundle::read(folder.path()).map_err(|error| error.to_string())
    };
    let functions = sound()["functions"].as_array().unwrap().clone();
    let ranged = functions.iter().position(|function| function["tokens"].get("range").is_some()).unwrap();
    let range = [format!("/functions/{ranged}/tokens/range/0"), format!("functions[{ranged}].tokens.range[0]")];
    for (pointer, place) in [
        (range[0].as_str(), range[1].as_str()),
        ("/model/hidden_size", "model.hidden_size"),
        ("/model/contexts/1", "model.contexts[1]"),
        ("/packages/0/files/0/bytes", "packages[0].files[0].bytes"),
        ("/packages/0/weight_bytes", "packages[0].weight_bytes"),
        ("/host/rope/0/variants/0/max_length", "host.rope[0].variants[0].max_length"),
        ("/ledger/used", "ledger.used"),
    ] {
        for number in [u64::MAX, 1 << 63, (1 << 63) - 1, (1 << 48) + 1] {
            let problem = format!("`{place}` is {number}, larger than any model has");
            assert!(read(pointer, number).unwrap_err().contains(&problem), "{problem}");
        }
    }
    assert!(read("/packages/0/weight_bytes", 1 << 40).is_ok() && read("/model/hidden_size", 1 << 20).is_ok());
}
