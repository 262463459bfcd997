//! Output files: anec overwrites nothing but its own files, and a failed write is a failure.

use crate::common::folder;
use crate::common::model;
use crate::verbs::bundle;

use std::fs;
use std::path::Path;
use std::process::Stdio;

use folder::{anec, contents, finish, run};
use model::edit_json;

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn the_current_folder_can_be_the_bundle_if_it_is_empty() {
    let room = tempfile::tempdir().unwrap();
    let folder = room.path().join("here");
    fs::create_dir(&folder).unwrap();
    let convert = || finish(anec().current_dir(&folder).args(["convert", "-m", "demo", "-o", "."]).output().unwrap());
    let (code, _, stderr) = convert();
    assert_eq!(code, 0, "{stderr}");
    assert!(folder.join("bundle.json").exists());
    assert_eq!(names(room.path()), ["here"]);
}

#[test]
fn a_folder_in_the_way_of_a_conversion_stays_as_it_is() {
    let room = tempfile::tempdir().unwrap();
    let at = |name: &str| room.path().join(name);
    let convert = |out: &str| run(&["convert", "-m", "demo", "--out", text(&at(out))]);
    fs::create_dir(at("mine")).unwrap();
    fs::write(at("mine/thesis.txt"), "years").unwrap();
    fs::create_dir(at("a.anec.partial")).unwrap();
    fs::write(at("a.anec.partial/thesis.txt"), "years").unwrap();
    // a file that any program may have
    fs::write(at("a.anec.partial/journal.json"), "{}").unwrap();
    #[cfg(unix)]
    std::os::unix::fs::symlink("mine", at("b.anec.partial")).unwrap();
    fs::write(at("c.anec.partial"), "years").unwrap();
    let before = contents(room.path());
    for out in ["a.anec", "b.anec", "c.anec"] {
        if !cfg!(unix) && out == "b.anec" {
            continue;
        }
        let (code, _, stderr) = convert(out);
        assert_eq!(code, 2, "{out}: {stderr}");
        assert!(stderr.contains("exists, and was not created by a conversion"), "{stderr}");
        assert!(!at(out).exists());
    }
    assert_eq!(contents(room.path()), before);
    // an empty one is as good as none
    fs::create_dir(at("d.anec.partial")).unwrap();
    let (code, _, stderr) = convert("d.anec");
    assert_eq!(code, 0, "{stderr}");
    // a finished bundle, and beside it a folder that isn't what it replaced
    fs::create_dir(at("d.anec.partial")).unwrap();
    fs::write(at("d.anec.partial/thesis.txt"), "years").unwrap();
    assert_eq!(convert("d.anec").0, 0);
    assert_eq!(fs::read(at("d.anec.partial/thesis.txt")).unwrap(), b"years");
}

#[cfg(unix)]
#[test]
fn a_link_to_a_bundle_stays_one() {
    let room = tempfile::tempdir().unwrap();
    let at = |name: &str| room.path().join(name);
    fs::create_dir(at("disk")).unwrap();
    std::os::unix::fs::symlink("disk/real.anec", at("link.anec")).unwrap();
    for more in [&[][..], &["--force", "--set", "context=64"]] {
        let (code, _, stderr) = run(&[&["convert", "-m", "demo", "--out", text(&at("link.anec"))], more].concat());
        assert_eq!(code, 0, "{stderr}");
        assert!(fs::symlink_metadata(at("link.anec")).unwrap().is_symlink());
        assert_eq!(
            (names(room.path()), names(&at("disk"))),
            (vec!["disk".into(), "link.anec".into()], vec!["real.anec".into()])
        );
    }
    assert_eq!(folder::json(&at("disk/real.anec/bundle.json"))["model"]["contexts"], serde_json::json!([64]));
}

#[cfg(unix)]
#[test]
fn reports_take_the_place_of_nothing_else() {
    let room = tempfile::tempdir().unwrap();
    let at = |name: &str| room.path().join(name);
    fs::write(at("victim.txt"), "mine").unwrap();
    fs::write(at("report.json.partial"), "mine").unwrap();
    std::os::unix::fs::symlink("victim.txt", at("report.html.partial")).unwrap();
    std::os::unix::fs::symlink("linked.md", at("report.md")).unwrap();
    let file = |name: &str| at(name).to_str().unwrap().to_owned();
    let (json, html, markdown) = (file("report.json"), file("report.html"), file("report.md"));
    let (code, _, stderr) =
        run(&["validate", text(bundle()), "--structure", "--json", &json, "--html", &html, "--markdown", &markdown]);
    assert_eq!(code, 0, "{stderr}");
    let expected = [
        "linked.md",
        "report.html",
        "report.html.partial",
        "report.json",
        "report.json.partial",
        "report.md",
        "victim.txt",
    ];
    assert_eq!(names(room.path()), expected);
    for mine in ["victim.txt", "report.json.partial"] {
        assert_eq!(fs::read(at(mine)).unwrap(), b"mine");
    }
    // two reports of one name
    let (code, _, stderr) = run(&["validate", text(bundle()), "--structure", "--json", &json, "--html", &json]);
    assert!(code == 2 && stderr.contains("two reports have the same file"), "{stderr}");
    // what isn't a file is written, not replaced
    let (code, stdout, stderr) = run(&["validate", text(bundle()), "--structure", "--json", "/dev/stdout"]);
    assert!(code == 0 && stdout.contains("\"gates\""), "{stderr}");
    let (code, stdout, stderr) = run(&["validate", text(bundle()), "--structure", "--junit", "-"]);
    assert!(code == 0 && stdout.starts_with("<?xml"), "{stdout}{stderr}");
    let pipe = at("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || fs::read(pipe).unwrap()
    });
    let (code, _, stderr) = run(&["logits", text(bundle()), "--ids", "1,2", "--out", text(&pipe)]);
    assert_eq!(code, 0, "{stderr}");
    assert!(reader.join().unwrap().len() > 1000);
    assert!(std::os::unix::fs::FileTypeExt::is_fifo(&fs::symlink_metadata(pipe).unwrap().file_type()));
}

#[cfg(target_os = "linux")]
#[test]
fn a_result_that_stdout_refuses_is_no_success() {
    let bundle = text(bundle());
    for arguments in [
        &["inspect", bundle, "--json"][..],
        &["validate", bundle, "--structure", "--json", "-"],
        &["run", bundle, "--ids", "47,1024", "--max-tokens", "2"],
        &["run", bundle, "--prompt", "It was", "--max-tokens", "2"],
        &["schema", "manifest"],
        &["manifests"],
    ] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let (code, _, stderr) = finish(anec().args(arguments).stdout(full).stderr(Stdio::piped()).output().unwrap());
        assert_eq!(code, 5, "{arguments:?}: {stderr}");
        assert!(stderr.contains("stdout: can't write"), "{stderr}");
    }
    // a reader that went away is none of anec's business
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let (code, _, stderr) = finish(anec().args(["inspect", bundle, "--json"]).stdout(writer).output().unwrap());
    assert_eq!((code, stderr.as_str()), (0, ""));
}

#[test]
fn what_is_no_bundle_is_neither_packed_nor_unpacked() {
    let room = tempfile::tempdir().unwrap();
    let at = |name: &str| room.path().join(name);
    fs::create_dir(at("photographs")).unwrap();
    fs::write(at("photographs/cat.txt"), "cat").unwrap();
    let (code, _, stderr) = run(&["pack", text(&at("photographs"))]);
    assert!(code == 2 && stderr.contains("no bundle here"), "{stderr}");
    anec::package::archive::pack(&at("photographs"), &at("cats.zip"), false, &|_| {}).unwrap();
    let (code, _, stderr) = run(&["unpack", text(&at("cats.zip"))]);
    assert!(code == 2 && stderr.contains("no bundle here"), "{stderr}");
    assert_eq!(names(room.path()), ["cats.zip", "photographs"]);
    fs::write(at("file"), "").unwrap();
    let (code, _, stderr) = run(&["convert", "-m", "demo", "--out", text(&at("file"))]);
    assert!(code == 2 && stderr.contains("exists and is not a bundle"), "{stderr}");
}

#[test]
fn names_of_strangers_do_not_command_the_terminal() {
    let room = tempfile::tempdir().unwrap();
    let path = room.path().join("model.safetensors");
    let header = "{\"a\\u001b]0;pwn\\u0007\":{\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[0,2]}}";
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend([0, 0]);
    fs::write(&path, bytes).unwrap();
    let (code, stdout, stderr) = run(&["inspect", text(&path)]);
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("pwn") && !stdout.contains(['\u{1b}', '\u{7}']), "{stdout:?}");
    let (code, _, stderr) = run(&["convert", "-m", "\u{1b}[2Jname", "--source", "x"]);
    assert!(code == 2 && stderr.contains("\\u{1b}[2Jname"), "{stderr:?}");
}

#[test]
fn what_has_no_end_is_not_read_to_it() {
    if !Path::new("/dev/zero").exists() {
        return;
    }
    let bundle = text(bundle());
    for (arguments, code) in [
        (&["convert", "-m", "/dev/zero"][..], 2),
        (&["validate", bundle, "--parity", "--golden", "/dev/zero"], 4),
        (&["perplexity", bundle, "--text", "/dev/zero"], 4),
        (&["validate", bundle, "--residency", "--plan", "/dev/zero"], 4),
        (&["run", bundle, "--prompt", "a", "--json-schema", "/dev/zero"], 4),
    ] {
        let (found, _, stderr) = run(arguments);
        assert_eq!(found, code, "{arguments:?}: {stderr}");
    }
    let endless = fs::File::open("/dev/zero").unwrap();
    let (code, _, stderr) = finish(anec().args(["run", bundle, "--prompt", "-"]).stdin(endless).output().unwrap());
    assert!(code == 4 && stderr.contains("larger than"), "{stderr}");
    // a schema that is none is the command's mistake
    let (code, _, stderr) = run(&["run", bundle, "--prompt", "a", "--json-schema", "Cargo.toml"]);
    assert!(code == 2 && stderr.contains("isn't JSON"), "{stderr}");
}

#[test]
fn json_that_is_cut_off_is_no_success() {
    let folder = tempfile::tempdir().unwrap();
    let schema = folder.path().join("schema.json");
    fs::write(&schema, r#"{"type": "array", "items": {"type": "integer"}, "minItems": 50}"#).unwrap();
    let arguments = ["run", text(bundle()), "--prompt", "a", "--max-tokens", "4", "--json-schema", text(&schema)];
    let (code, stdout, stderr) = run(&arguments);
    assert!(code == 2 && stdout.starts_with('['), "{code} {stdout}");
    assert!(
        stderr.contains("the text ended before its JSON was complete") && stderr.contains("--max-tokens"),
        "{stderr}"
    );
}

#[test]
fn a_conversion_that_is_refused_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.anec");
    let source = text(&folder::repository("tests/fixtures/families/gemma3-default")).to_owned();
    let set = ["--set", "context=40", "--set", "norm=layer_norm_concat"];
    let (code, _, stderr) = run(&[&["convert", "--source", &source, "--out", text(&out)][..], &set].concat());
    assert!(code != 0 && stderr.contains("which fp16 doesn't hold"), "{code} {stderr}");
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn exit_codes_are_explained_by_their_number() {
    for what in ["5", "exit 5", "exit code 5", "Exit Code 5"] {
        let (code, stdout, stderr) = run(&["explain", what]);
        assert!(code == 0 && stdout.starts_with("exit 5:"), "{what}: {stdout}{stderr}");
    }
}

#[test]
fn a_damaged_configuration_of_a_text_is_refused() {
    for (file, key, value) in [
        ("config.json", "eos_token_id", serde_json::json!(99999)),
        ("config.json", "eos_token_id", serde_json::json!("x")),
        ("generation_config.json", "eos_token_id", serde_json::json!([99999])),
        ("config.json", "rope_scaling", serde_json::json!({"rope_type": "linear", "factor": 0})),
        ("config.json", "rope_scaling", serde_json::json!({"rope_type": "dynamic", "factor": -1})),
    ] {
        let room = tempfile::tempdir().unwrap();
        let source = room.path().join("source");
        model::copy(Path::new("demo/model"), &source);
        edit_json(&source.join(file), |json| json[key] = value.clone());
        let out = room.path().join("out");
        let (code, _, stderr) = run(&["convert", "-m", "demo", "--source", text(&source), "--out", text(&out)]);
        assert_eq!(code, 4, "{file} {key} {value}: {stderr}");
        assert!(stderr.contains(if key == "rope_scaling" { "factor" } else { key }), "{stderr}");
        assert!(!out.exists());
    }
}
