//! Bindings for apps: the Python module generates the program's texts and vectors, piece by piece; generation can be
//! cancelled; errors are exceptions. The Swift module is generated from the same library.

use crate::common::coremltools;
use crate::common::folder::{anec, repository, run};

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The library with the bindings, which is built with the tests.
fn library() -> PathBuf {
    let name = format!("{}anec_bindings{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let path = std::env::current_exe().unwrap().with_file_name(name);
    assert!(path.exists(), "{} is built with the tests", path.display());
    path
}

/// UniFFI's generator, beside the Python of the tests.
fn generator() -> Option<PathBuf> {
    let path = coremltools::python()?.with_file_name("uniffi-bindgen");
    if !path.exists() {
        anec::base::skipped("bindings not tested: tests/requirements.txt isn't installed, it has uniffi-bindgen");
        return None;
    }
    Some(path)
}

fn generate(generator: &Path, language: &str, out: &Path) {
    let mut command = Command::new(generator);
    // it asks cargo where the crate's settings are
    command
        .args(["generate", "--no-format", "--metadata-no-deps", "--language", language, "--out-dir"])
        .arg(out)
        .arg(library());
    let output = command.current_dir(repository("")).env("CARGO_NET_OFFLINE", "true").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Folder with the module `anec`, as the wheel has it; it is generated once.
fn module(generator: &Path) -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("python-{}", std::process::id()));
        let package = folder.join("anec");
        std::fs::create_dir_all(&package).unwrap();
        generate(generator, "python", &package);
        for file in ["__init__.py", "toolchain.py"] {
            std::fs::copy(repository("python/anec").join(file), package.join(file)).unwrap();
        }
        std::fs::copy(library(), package.join(library().file_name().unwrap())).unwrap();
        folder
    })
}

/// Runs a script with the module, and the program in `ANEC`; it must print a line at its end.
fn run_client(generator: &Path, script: &str, arguments: &[&Path], line: &str) {
    let mut client = Command::new(generator.with_file_name("python"));
    client.arg(repository(script)).args(arguments);
    client.env("PYTHONPATH", module(generator)).env("ANEC", anec().get_program());
    let output = client.output().unwrap();
    let [printed, said] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert!(output.status.success() && printed.contains(line), "{printed}{said}");
}

#[test]
fn a_notebook_in_python_converts_and_validates() {
    let Some(generator) = generator() else { return };
    let room = tempfile::tempdir().unwrap();
    let arguments = [&repository("demo/model"), room.path()];
    run_client(&generator, "tests/toolchain_client.py", &arguments, "toolchain: ok");
}

#[test]
fn an_app_in_python_gets_the_programs_texts_and_vectors() {
    let Some(generator) = generator() else { return };
    let room = tempfile::tempdir().unwrap();
    let small = |source: &str, sets: &[&str]| {
        let out = room.path().join(Path::new(source).file_name().unwrap()).with_extension("anec");
        let mut words =
            vec!["convert", "--source", source, "--out", out.to_str().unwrap(), "--set", "quant.weights=none"];
        words.extend(sets.iter().flat_map(|set| ["--set", set]));
        let (code, _, stderr) = run(&words);
        assert_eq!(code, 0, "{stderr}");
        out
    };
    let embedder = small("tests/fixtures/encoders/bert-mean", &[]);
    let filter = small("tests/fixtures/families/privacy_filter-default", &["context=96", "lengths.range=[1,96]"]);
    let arguments = [crate::verbs::bundle(), &embedder, &filter];
    run_client(&generator, "tests/bindings_client.py", &arguments, "bindings: ok");
}

/// The generated Swift module has all symbols that the example app uses.
#[test]
fn swift_has_what_the_example_app_calls() {
    let Some(generator) = generator() else { return };
    let room = tempfile::tempdir().unwrap();
    generate(&generator, "swift", room.path());
    let swift = std::fs::read_to_string(room.path().join("anec.swift")).unwrap();
    let declared = [
        "open class AnecModel",
        "public static func `open`(path: String",
        "open func prewarm(listener: PrewarmListener?",
        "open func embed(texts: [String])throws  -> [[Float]]",
        "open class AnecSession",
        "open func cancel()",
        "public protocol TextListener",
        "func onText(piece: String) throws  -> Bool",
        "public enum AnecError",
        "public func fileHasDigest(path: String, digest: String)throws  -> Bool",
    ];
    for line in declared {
        assert!(swift.contains(line), "{line}");
    }
    assert!(room.path().join("anecFFI.h").exists() && room.path().join("anecFFI.modulemap").exists());
}

#[test]
fn apps_are_told_the_first_load_that_the_forecast_predicts() {
    let text = std::fs::read_to_string(repository("src/advice/tables/speeds.yaml")).unwrap();
    let speeds: serde_json::Value = serde_yaml::from_str(&text).unwrap();
    let published: Vec<f64> =
        speeds["first_load"]["seconds_per_gb"].as_array().unwrap().iter().map(|n| n.as_f64().unwrap()).collect();
    assert_eq!(published, anec::runtime::FirstLoadWork::SECONDS_PER_GB);
    let model = anec::Model::on_cpu(crate::verbs::bundle()).unwrap();
    let load = model.runtime().first_load();
    let weights: u64 = model.bundle().packages.iter().map(|package| package.weight_bytes).sum();
    assert_eq!(
        (load.functions, load.weight_bytes),
        (model.bundle().packages.len(), weights),
        "one function of each package"
    );
    assert!((load.seconds()[0] - 26e-9 * weights as f64).abs() < 1e-9);
}

/// Between its steps a prompt can be cancelled.
#[test]
fn a_prompt_that_is_computed_in_steps_is_continued_the_same() {
    let model = anec::Model::on_cpu(crate::verbs::bundle()).unwrap();
    let options = anec::GenerateOptions::default().max_tokens(12);
    let prompt = "It was a fine morning, and the carriage";
    let whole = model.session().generate(prompt, &options).unwrap().text().unwrap();
    let mut stepped = options.clone();
    stepped.prompt_chunk = 2;
    let mut session = model.session();
    let mut pieces = session.generate(prompt, &stepped).unwrap();
    let (mut text, mut silent) = (String::new(), 0);
    while let Some(piece) = pieces.step().unwrap() {
        silent += usize::from(text.is_empty() && piece.is_empty());
        text += &piece;
    }
    assert_eq!(text, whole);
    assert!(silent >= 3, "{silent} steps of the prompt");
}

#[test]
fn a_file_is_compared_with_a_digest_of_either_function() {
    let bundle = anec::Bundle::read(crate::verbs::bundle()).unwrap();
    let file = bundle.files().max_by_key(|file| file.bytes).unwrap();
    let path = Path::new(crate::verbs::bundle()).join(&file.file);
    let sha256 = anec::base::ContentDigest::sha256_of_file(&path).unwrap();
    let has = |digest: &str| anec_bindings::file_has_digest(path.display().to_string(), digest.to_owned());
    for digest in [&file.digest.to_string(), &sha256.to_string(), sha256.hex()] {
        assert!(has(digest).unwrap(), "{digest}");
    }
    assert!(!has(file.digest.hex()).unwrap(), "without a name it is a SHA-256");
    assert!(matches!(has("blake3:0"), Err(anec_bindings::AnecError::WrongArgument { .. })));
}

/// A struct of Swift that JSON is decoded into: its name, and its properties with their types.
type SwiftStruct = (String, Vec<(String, String)>);

/// The structs of a file that are `Decodable`, inner ones before what is around them.
fn decodable_structs(swift: &str) -> Vec<SwiftStruct> {
    let (mut open, mut done): (Vec<SwiftStruct>, Vec<SwiftStruct>) = Default::default();
    for line in swift.lines().map(str::trim) {
        if let Some((_, name)) = line.strip_suffix(": Decodable {").and_then(|head| head.split_once("struct ")) {
            open.push((name.to_owned(), Vec::new()));
        } else if let (Some((_, properties)), "}") = (open.last(), line) {
            assert!(!properties.is_empty(), "nothing but properties is expected here");
            done.extend(open.pop());
        } else if let (Some((_, properties)), Some(property)) = (open.last_mut(), line.strip_prefix("let ")) {
            let (name, of) = property.split_once(": ").unwrap();
            properties.push((name.to_owned(), of.to_owned()));
        }
    }
    done
}

/// Reason why a JSON value can't be decoded as a Swift type.
fn undecodable(value: &serde_json::Value, of: &str, structs: &[SwiftStruct]) -> Option<String> {
    if let Some(inner) = of.strip_suffix('?') {
        return if value.is_null() { None } else { undecodable(value, inner, structs) };
    }
    if let Some(inner) = of.strip_prefix('[') {
        let Some(items) = value.as_array() else { return Some(format!("{value} is no list")) };
        return items.iter().find_map(|item| undecodable(item, inner.trim_end_matches(']'), structs));
    }
    let fits = match of {
        "String" => value.is_string(),
        "UInt64" => value.is_u64(),
        _ => value.is_object(),
    };
    if !fits {
        return Some(format!("{value} is no {of}"));
    }
    let properties = structs.iter().find(|(name, _)| name == of).map_or(&[][..], |(_, properties)| properties);
    properties.iter().find_map(|(name, of)| Some(format!("{name}: {}", undecodable(&value[name], of, structs)?)))
}

/// The example app downloads what a `bundle.json` of this version lists, and of version 2.
#[test]
fn the_example_app_decodes_bundle_json() {
    let swift = std::fs::read_to_string(repository("swift/Example/BundleDownload.swift")).unwrap();
    let structs = decodable_structs(&swift);
    assert_eq!(structs.last().unwrap().0, "Description");
    let file = structs.iter().find(|(name, _)| name == "File").unwrap();
    for key in ["digest", "sha256"] {
        assert!(file.1.contains(&(key.into(), "String?".into())), "{key}, of one version each");
    }
    let text = std::fs::read_to_string(Path::new(crate::verbs::bundle()).join("bundle.json")).unwrap();
    let bundle: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(undecodable(&bundle, "Description", &structs), None);
    assert!(bundle["host"]["file"]["digest"].is_string(), "the name of the digest is the example's");
    let earlier = text.replace("\"digest\": \"blake3:", "\"sha256\": \"");
    assert_ne!(earlier, text);
    assert_eq!(undecodable(&serde_json::from_str(&earlier).unwrap(), "Description", &structs), None);
    let other = text.replace("\"bytes\"", "\"size\"");
    let found = undecodable(&serde_json::from_str(&other).unwrap(), "Description", &structs);
    assert_eq!(found.unwrap(), "packages: files: bytes: null is no UInt64");
}
