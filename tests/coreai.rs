//! Assets of Core AI: read, written, and made from packages. What Apple's runtime says of them is in
//! `coreai_runtime.rs`.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anec::coreai::aicode::TypeId;
use anec::coreai::inventory::AssetInventory;
use anec::coreai::migrate::{MigrateOptions, migrate};
use anec::coreai::{self, Asset, AssetOptions};
use anec::package;
use serde_json::Value as Json;

use crate::common::folder::{repository, run};

/// An asset that Apple's packages wrote (`tests/fixtures/coreai/make.py`).
fn apples(name: &str) -> Asset {
    coreai::open(&repository("tests/fixtures/coreai").join(format!("{name}.aimodel"))).unwrap()
}

fn ops(inventory: &AssetInventory, function: &str) -> Vec<String> {
    let function = inventory.functions.iter().find(|f| f.name == function).unwrap();
    function.ops.iter().map(|(op, count)| format!("{count} {op}")).collect()
}

#[test]
fn assets_of_apples_packages_are_read() {
    let asset = apples("activations");
    assert_eq!(asset.digest_matches(), Some(true));
    let inventory = asset.inventory();
    assert_eq!(inventory.version, Some(20260204));
    assert!(inventory.metadata.as_ref().unwrap().producer.starts_with("coreai-core"));
    assert_eq!(inventory.functions[0].inputs[0].to_string(), "x: tensor<2x4xf16>");
    assert_eq!(inventory.functions[0].outputs[0].to_string(), "y: tensor<2x4xf16>");
    let expected = ["1 primitive.gelu_v1", "1 primitive.mul_v1", "1 sigmoid_v1", "1 silu_v1", "1 softmax_v1"];
    assert_eq!(ops(&inventory, "main"), expected);

    let inventory = apples("weights").inventory();
    assert_eq!(inventory.version, Some(20260202));
    let expected =
        ["2 primitive.batch_matmul_v1", "1 primitive.blockwise_shift_scale_v2", "1 primitive.lut_to_dense_v1"];
    let mut found = ops(&inventory, "main");
    found.sort_by_key(|op| op[2..].to_owned());
    assert_eq!(found, expected);
    assert_eq!((inventory.constant_bytes["ui8"], inventory.constant_bytes["f16"] >= 512), (4096, true));
    assert_eq!(inventory.resource_bytes, 4096 + 4096 + 512);
    let weights: Vec<String> =
        inventory.weights.iter().map(|(form, of)| format!("{} of {form}, {} bytes", of.count, of.bytes)).collect();
    assert_eq!(weights, ["1 of palettes of 8 bits, 4096 bytes", "1 of si8 with scales, 4096 bytes"]);

    let inventory = apples("functions").inventory();
    assert_eq!(inventory.version, Some(20251114));
    assert_eq!(ops(&inventory, "sums"), ["1 primitive.pad_v1", "1 primitive.scan_v1"]);
    assert_eq!(ops(&inventory, "place"), ["1 primitive.scatter_along_axis_v1"]);
    let place = &inventory.functions[1];
    let inputs: Vec<String> = place.inputs.iter().map(ToString::to_string).collect();
    assert_eq!(inputs, ["x: tensor<2x4xf32>", "indices: tensor<2x1xsi32>", "updates: tensor<2x1xf32>"]);
}

/// Conversions between images and tensors are known.
#[test]
fn images_of_apples_packages_are_read() {
    let inventory = apples("images").inventory();
    assert_eq!((inventory.version, inventory.functions[0].unknown_ops), (Some(20260108), 0));
    assert_eq!(ops(&inventory, "main"), ["1 primitive.image_to_tensor_v1", "1 primitive.tensor_to_image_v1"]);
    assert_eq!(inventory.functions[0].outputs[0].to_string(), "same: image<4x6, BGRA>");
}

/// The encoding of sparse tensors is known.
#[test]
fn sparse_weights_of_apples_packages_are_read() {
    let asset = apples("sparse");
    let inventory = asset.inventory();
    assert_eq!((inventory.version, inventory.functions[0].unknown_ops), (Some(20251112), 0));
    assert_eq!(inventory.weights["sparse f16"].count, 1);
    let types: Vec<String> =
        (0..asset.module.types.len()).map(|id| asset.module.type_text(TypeId(id as u32))).collect();
    assert!(types.contains(&"tensor<8x16xf16, sparse, 32 stored>".to_owned()), "{types:?}");
    assert!(inventory.findings.iter().all(|finding| !finding.problem.contains("not understood")));
}

/// Broadcasting operations, images, complex numbers and debug information are known; constants of a wrong length are
/// found.
#[test]
fn types_of_apples_packages_are_named() {
    let inventory = apples("types").inventory();
    let main = &inventory.functions[0];
    let text = |values: &[anec::coreai::inventory::NamedValue]| -> Vec<String> {
        values.iter().map(ToString::to_string).collect()
    };
    let inputs =
        ["x: tensor<2x4xf16>", "row: tensor<1x4xf16>", "waves: tensor<2xcomplex<f32>>", "image: image<4x6, BGRA>"];
    assert_eq!(text(&main.inputs), inputs);
    assert_eq!(text(&main.outputs), ["y: tensor<2x4xf16>", "same: tensor<2xcomplex<f32>>"]);
    assert_eq!(main.unknown_ops, 0);
    assert_eq!(ops(&inventory, "main"), ["1 broadcasting_add_v1", "1 primitive.add_v1", "1 primitive.cast_v1"]);
    let findings: Vec<String> = inventory.findings.iter().map(ToString::to_string).collect();
    let expected = "function `main`: the constant tensor<2x4xsi4> has 8 bytes instead of 4: a byte for each element, \
                    which Apple's runtime reads as packed ones";
    assert_eq!(findings, [expected]);
}

#[test]
fn an_asset_is_shown() {
    let shown = |name: &str| {
        let path = repository("tests/fixtures/coreai").join(format!("{name}.aimodel"));
        let (status, text, errors) = run(&["inspect", path.to_str().unwrap()]);
        assert_eq!(status, 0, "{errors}");
        let (_, shown) = text.split_once(".aimodel: ").unwrap();
        let lines: Vec<&str> = shown.lines().filter(|line| !line.starts_with("created: ")).collect();
        lines.join("\n")
    };
    insta::assert_snapshot!(shown("types"));
}

/// Apple's assets read the same after being written by anec.
#[test]
fn assets_of_apples_packages_are_written_again() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["activations", "weights", "functions", "types", "images", "sparse"] {
        let asset = apples(name);
        let path = folder.path().join(format!("{name}.aimodel"));
        coreai::write(&asset.module, &path, &AssetOptions::default()).unwrap();
        let again = coreai::open(&path).unwrap();
        assert_eq!(again.digest_matches(), Some(true));
        assert_eq!(again.module.ops, asset.module.ops, "{name}");
        assert_eq!(again.module.types, asset.module.types, "{name}");
        assert_eq!(again.module.attributes, asset.module.attributes, "{name}");
        assert_eq!(again.inventory().functions, asset.inventory().functions, "{name}");
    }
}

/// Packages of coremltools' op tests that can't be migrated, with what is said of them.
const REFUSED: [(&str, &str); 4] = [
    ("state_decoder_growing", "a slice whose size is computed"),
    ("zoo_control", "operator `cond`; operator `while_loop`"),
    ("zoo_recurrent", "operator `gru`; operator `lstm`; operator `rnn`"),
    ("zoo_recurrent_ios18", "operator `gru`; operator `lstm`; operator `rnn`"),
];

#[test]
fn packages_become_assets_that_read_as_themselves() {
    let folder = tempfile::tempdir().unwrap();
    let mut packages: Vec<PathBuf> = std::fs::read_dir(repository("tests/fixtures/coremltools"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir())
        .collect();
    packages.sort();
    assert!(packages.len() > 50);
    for path in packages {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let package = package::open(&path.join("model.mlpackage")).unwrap();
        let migration = migrate(&package, &MigrateOptions::default());
        if let Some((_, problem)) = REFUSED.iter().find(|(refused, _)| *refused == name) {
            let error = migration.map(|_| ()).unwrap_err().to_string();
            assert!(error.contains(problem), "{name}: {error}");
            continue;
        }
        let migration = migration.unwrap_or_else(|error| panic!("{name}: {error}"));
        let [first, second] = ["first", "second"].map(|copy| folder.path().join(format!("{name}-{copy}.aimodel")));
        coreai::write(&migration.module, &first, &AssetOptions::default()).unwrap();
        let asset = coreai::open(&first).unwrap();
        coreai::write(&asset.module, &second, &AssetOptions::default()).unwrap();
        let bytes = |path: &PathBuf| std::fs::read(path.join("main.mlirb")).unwrap();
        assert!(bytes(&first) == bytes(&second), "{name} is written otherwise than it was read");
        let inventory = asset.inventory();
        assert!(inventory.findings.iter().all(|finding| !finding.problem.contains("bytes instead of")), "{name}");
        let unknown: usize = inventory.functions.iter().map(|function| function.unknown_ops).sum();
        assert_eq!((inventory.functions.len(), unknown), (migration.functions.len(), 0), "{name}");
        for (function, migrated) in inventory.functions.iter().zip(&migration.functions) {
            let names = |values: &[anec::coreai::inventory::NamedValue]| -> Vec<String> {
                values.iter().map(|value| value.name.clone()).collect()
            };
            let expected: Vec<String> = migrated.function.tensor_inputs().map(|value| value.name.clone()).collect();
            assert_eq!(names(&function.inputs), expected, "{name}");
            let expected: Vec<String> = migrated.function.outputs().map(|value| value.name.clone()).collect();
            assert_eq!(names(&function.outputs), expected, "{name}");
        }
    }
}

/// Everything that can't be migrated is in one message: images, classes, sizes, operators.
#[test]
fn all_that_is_refused_is_told_at_once() {
    let path = repository("tests/fixtures/coremltools/zoo_control/model.mlpackage");
    let mut package = package::open(&path).unwrap();
    package.interfaces[0].inputs[0].kind = "imageType";
    package.interfaces[0].outputs[0].kind = "dictionaryType";
    let (input, output) = (package.interfaces[0].inputs[0].name.clone(), package.interfaces[0].outputs[0].name.clone());
    let mut how = MigrateOptions::default();
    how.sizes.insert("N".into(), vec![1]);
    let error = migrate(&package, &how).map(|_| ()).unwrap_err().to_string();
    for part in [
        &format!("feature `{input}` of imageType")[..],
        &format!("feature `{output}` of dictionaryType"),
        "sizes of `N`, which no function has",
        "operator `cond`; operator `while_loop`",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
}

/// Description, author, licence, version and own keys of a package are those of its asset.
#[test]
fn metadata_is_carried_over() {
    let mut package = package::open(&repository("tests/fixtures/coremltools/mlp_fp16/model.mlpackage")).unwrap();
    let own = &mut package.metadata;
    own.short_description = "two layers".into();
    own.author = "somebody".into();
    own.license = "MIT".into();
    own.version = "3".into();
    own.user_defined.insert("key".into(), "value".into());
    let done = migrate(&package, &MigrateOptions::default()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.aimodel");
    let mut how = AssetOptions::default();
    how.metadata = done.metadata.clone();
    coreai::write(&done.module, &path, &how).unwrap();
    let found = coreai::open(&path).unwrap().metadata.unwrap();
    assert_eq!((&found.description[..], &found.author[..], &found.license[..]), ("two layers", "somebody", "MIT"));
    assert_eq!((&found.custom["version"][..], &found.custom["key"][..]), ("3", "value"));
}

/// The command: outputs that would not be written are refused before the work, sizes by name, findings are shown.
#[test]
fn a_package_is_migrated_on_the_command_line() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("m.aimodel").to_str().unwrap().to_owned();
    let fixture = |name: &str| repository(&format!("tests/fixtures/coremltools/{name}/model.mlpackage"));
    let migrated = |name: &str, more: &[&str]| {
        let package = fixture(name).to_str().unwrap().to_owned();
        run(&[&["migrate", &package, "--out", &out, "--no-verify"], more].concat())
    };
    let (status, _, errors) = migrated("range_fp16", &["--shapes", "N=2"]);
    assert!(status == 4 && errors.contains("flexible: T"), "{errors}");
    let (status, text, errors) = migrated("range_fp16", &["--shapes", "T=1,3"]);
    assert!(status == 0 && text.contains("2 functions (main_1, main_3)"), "{text} {errors}");
    let (status, text, errors) = migrated("range_fp16", &["--force"]);
    assert!(
        status == 0 && text.contains("1 function (main)") && text.contains("asset-dynamic-shapes"),
        "{text} {errors}"
    );
    assert!(text.contains("`main` has the dynamic dimension T (1 to 4 in the package)"), "{text}");
    let (status, text, errors) = migrated("enumerated", &["--force"]);
    assert!(status == 0 && text.contains("2 functions (main_1, main_4)"), "{text} {errors}");
    let (status, _, errors) = migrated("state_decoder_slice", &[]);
    assert!(status == 2 && errors.contains("--force"), "{errors}");
    let (status, text, errors) = migrated("state_decoder_slice", &["--force"]);
    assert!(
        status == 0 && text.contains("1 function (main)") && text.contains("asset-slice-update"),
        "{text} {errors}"
    );
    let package = fixture("mlp_fp16").to_str().unwrap().to_owned();
    let other = folder.path().join("m.mlpackage").to_str().unwrap().to_owned();
    let (status, _, errors) = run(&["migrate", &package, "--out", &other]);
    assert!(status == 2 && errors.contains("ends in `.aimodel`"), "{errors}");
    // a Python that lacks the runtime is found before anything is written
    let missing = folder.path().join("n.aimodel");
    let (status, _, errors) =
        run(&["migrate", &package, "--out", missing.to_str().unwrap(), "--python", "no-such-python"]);
    assert!(status == 5 && !missing.exists(), "{errors}");
}

/// A plan of `format: coreai` is of one asset: its functions by name, and the rules for assets.
#[test]
fn a_plan_knows_the_format() {
    let planned = |model: &str, weights: &str| -> Json {
        let weights = format!("quant.weights={weights}");
        let (status, text, errors) =
            run(&["plan", model, "--set", "format=coreai", "--set", &weights, "--for", "m4@27", "--json"]);
        assert_eq!(status, 0, "{errors}");
        serde_json::from_str(&text).unwrap()
    };
    let plan = planned("demo", "int8");
    let [package] = &plan["packages"].as_array().unwrap()[..] else { panic!("{plan}") };
    assert_eq!(package["package"], "demo.aimodel");
    let functions: Vec<&str> =
        package["functions"].as_array().unwrap().iter().map(|of| of["name"].as_str().unwrap()).collect();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("b");
    let (status, _, errors) =
        run(&["convert", "demo", "--set", "format=coreai", "--no-measure", "--out", out.to_str().unwrap()]);
    assert_eq!(status, 0, "{errors}");
    let inventory = coreai::open(&out.join("demo.aimodel")).unwrap().inventory();
    let written: Vec<&str> = inventory.functions.iter().map(|function| &function.name[..]).collect();
    assert_eq!(functions, written);
    let bundle: Json = serde_json::from_slice(&std::fs::read(out.join("bundle.json")).unwrap()).unwrap();
    let of_bundle = bundle["functions"].as_array().unwrap().iter();
    let sizes = |of: &Json| (of["context"].clone(), of["tokens"].clone());
    assert_eq!(
        package["functions"].as_array().unwrap().iter().map(sizes).collect::<Vec<_>>(),
        of_bundle.map(sizes).collect::<Vec<_>>()
    );
    // of this model, shapes alone are known
    let plan = planned("qwen3-0.6b", "int4");
    let rules: BTreeSet<&str> =
        plan["forecast"].as_array().unwrap().iter().map(|finding| finding["rule"].as_str().unwrap()).collect();
    assert!(rules.contains("asset-four-bit-integers"), "{rules:?}");
    assert!(rules.iter().all(|rule| rule.starts_with("asset-")), "{rules:?}");
}

/// The gates of an asset of any origin on the command line.
#[test]
fn an_asset_is_validated_on_the_command_line() {
    let fixture =
        |name: &str| repository(&format!("tests/fixtures/coreai/{name}.aimodel")).to_str().unwrap().to_owned();
    let (status, text, errors) = run(&["validate", &fixture("activations")]);
    assert!(status == 3 && text.contains("help: --backend coreai computes the asset"), "{text} {errors}");
    let (status, text, errors) = run(&["validate", &fixture("types"), "--structure"]);
    assert!(status == 1 && text.contains("has 8 bytes instead of 4"), "{text} {errors}");
    let (status, _, errors) = run(&["validate", &fixture("activations"), "--plan", "plan.json"]);
    assert!(status == 2 && errors.contains("--plan has no effect on an asset of Core AI"), "{errors}");
}

/// A search predicts calls of Core ML: it is refused before the work.
#[test]
fn a_search_is_of_core_ml() {
    for verb in [&["plan", "demo", "--search"][..], &["convert", "demo", "--out", "no-such-folder"]] {
        let (status, _, errors) = run(&[verb, &["--set", "format=coreai", "--for", "m4"]].concat());
        assert!(status == 2 && errors.contains("--set format=coreai"), "{status} {errors}");
    }
}

/// The card of a bundle of Core AI speaks of one asset and of the backend that runs it.
#[test]
fn a_card_knows_the_format() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("b").to_str().unwrap().to_owned();
    let (status, text, errors) = run(&["convert", "demo", "--set", "format=coreai", "--no-measure", "--out", &out]);
    assert!(
        status == 0 && text.contains("demo.aimodel  the whole model") && text.contains("in 1 asset"),
        "{text}{errors}"
    );
    let (status, card, errors) = run(&["push", &out, "hf:owner/name", "--dry-run", "--unproven", "--license", "mit"]);
    assert_eq!(status, 0, "{errors}");
    for part in ["- coreai\n", "Core AI asset (OS 27)", "--backend coreai", "| demo.aimodel | the whole model | 16 |"] {
        assert!(card.contains(part), "{part}: {card}");
    }
    assert!(!card.contains("Core ML"), "{card}");
}

#[test]
fn an_asset_has_another_name_or_is_refused() {
    let module = apples("activations").module;
    let error = coreai::write(&module, std::path::Path::new("x.mlpackage"), &AssetOptions::default()).unwrap_err();
    assert_eq!(error.to_string(), "x.mlpackage: the name of an asset ends in `.aimodel`");
}

/// A conversion to Core AI is measured as one to Core ML: by the packages that its asset is made of. The rules for
/// assets are applied to the result.
#[test]
fn a_conversion_is_measured_and_its_asset_judged_by_the_rules() {
    let folder = tempfile::tempdir().unwrap();
    let convert = |format: &str| {
        let out = folder.path().join(format).to_str().unwrap().to_owned();
        let (status, text, errors) = run(&["convert", "demo", "--set", &format!("format={format}"), "--out", &out]);
        assert_eq!(status, 0, "{errors}");
        let report: Json = serde_json::from_slice(&std::fs::read(format!("{out}/report.json")).unwrap()).unwrap();
        let mut quality = report["quality"].as_object().unwrap_or_else(|| panic!("not measured: {text}")).clone();
        quality.remove("seconds");
        (out, quality)
    };
    let [(_, of_coreml), (bundle, of_coreai)] = ["coreml", "coreai"].map(convert);
    assert_eq!(of_coreml, of_coreai);
    assert!(of_coreai["tokens"].as_u64().unwrap() > 100);

    let names = |path: &PathBuf| {
        let (status, text, errors) = run(&["inspect", path.to_str().unwrap(), "--json"]);
        assert_eq!(status, 0, "{errors}");
        let shown: Json = serde_json::from_str(&text).unwrap();
        let findings = shown["forecast"].as_array().unwrap().iter();
        findings.map(|finding| finding["rule"].as_str().unwrap().to_owned()).collect::<BTreeSet<_>>()
    };
    let [own, apples] = [format!("{bundle}/demo.aimodel"), "tests/fixtures/coreai/functions.aimodel".into()];
    assert_eq!(
        names(&repository(&apples)),
        BTreeSet::from(["asset-float32", "asset-last-axis-of-one", "asset-ports"].map(String::from))
    );
    let own = names(&PathBuf::from(own));
    let (status, text, errors) = run(&["validate", &bundle, "--structure", "--forecast", "--json", "-"]);
    // placement can't be proven
    assert_eq!(status, 3, "{errors}");
    let shown: Json = serde_json::from_str(&text).unwrap();
    let forecast = shown["forecast"].as_array().unwrap().iter();
    assert_eq!(forecast.map(|finding| finding["rule"].as_str().unwrap().to_owned()).collect::<BTreeSet<_>>(), own);
    assert!(!own.contains("asset-dynamic-shapes") && !own.contains("asset-slice-update"), "{own:?}");
}
