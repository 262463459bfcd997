//! Output of each verb, for results and for mistakes: snapshots of stdout, stderr and exit code on the demo model.

use crate::common::folder;
use crate::common::model;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use folder::{contents, json, repository, run};

/// The demo bundle, converted once, in a folder that lives as long as the test program.
pub(crate) fn bundle() -> &'static Path {
    static BUNDLE: OnceLock<PathBuf> = OnceLock::new();
    BUNDLE.get_or_init(|| {
        let room = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("verbs-{}", std::process::id()));
        let out = room.join("demo.anec");
        let (code, _, stderr) =
            run(&["convert", "--no-measure", "-m", "demo", "--out", out.to_str().unwrap(), "--force"]);
        assert_eq!(code, 0, "{stderr}");
        out
    })
}

/// Runs a verb with `BUNDLE` and `ROOM` standing for folders; shows what it was, what it gave, and what it printed.
fn show(words: &[&str], room: &Path) -> String {
    let replaced =
        |word: &&str| word.replace("BUNDLE", bundle().to_str().unwrap()).replace("ROOM", room.to_str().unwrap());
    let arguments: Vec<String> = words.iter().map(replaced).collect();
    let (code, stdout, stderr) = run(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    let named =
        |text: String| text.replace(bundle().to_str().unwrap(), "BUNDLE").replace(room.to_str().unwrap(), "ROOM");
    let part = |name: &str, text: String| if text.is_empty() { String::new() } else { format!("--- {name}\n{text}") };
    format!("$ anec {}\n{}{}=> {code}\n", words.join(" "), part("stdout", named(stdout)), part("stderr", named(stderr)))
}

/// Snapshots of several commands as one.
fn story(name: &str, commands: &[&[&str]]) {
    let room = tempfile::tempdir().unwrap();
    let text: Vec<String> = commands.iter().map(|words| show(words, room.path())).collect();
    insta::with_settings!({
        filters => vec![
            // what the clock says differs from run to run
            (r"\d+\.\d per second", "[rate] per second"),
            (r"after \d+ ms", "after [time]"),
            (r"\d+(\.\d+)? (ms|s|min)\b", "[time]"),
            // the order of a sum, which processors choose, is all that tells these from zero
            (r" +(0\.0e0|\d\.\de-[6-9])\b", " [rounding]"),
            (r" +0\.9999[89]\d +(0\.99[89]|1\.000)-1\.00[0-2]\b", " [rounding]"),
            (r"0\.99999\d at \S+, .*", "[rounding]"),
        ],
        prepend_module_to_snapshot => false,
        snapshot_path => "snapshots",
    }, { insta::assert_snapshot!(name, text.join("\n")) });
}

#[test]
fn run_continues_a_prompt() {
    story(
        "run",
        &[
            &["run", "BUNDLE", "--prompt", "It was a dark night", "--max-tokens", "12"],
            &["run", "BUNDLE", "--ids", "47,1024,880,259,580", "--max-tokens", "3"],
            &["run", "BUNDLE", "--prompt", "The lady", "--max-tokens", "12", "--temperature", "0.8", "--seed", "7"],
        ],
    );
}

/// Every verb works with the built-in model, so that a first chat needs no download.
#[test]
fn the_demo_model_chats() {
    let (code, stdout, stderr) =
        run(&["run", bundle().to_str().unwrap(), "--chat", "--prompt", "It was a dark night", "--max-tokens", "8"]);
    assert!(code == 0 && stdout.len() > 10, "{stderr}");
    let (code, _, stderr) = run(&["chat", bundle().to_str().unwrap()]);
    assert_eq!(code, 0, "{stderr}");
}

#[test]
fn equal_seeds_give_equal_texts_and_json_holds_what_scripts_need() {
    let ask = |seed: &str| {
        let arguments = ["--prompt", "The lady", "--max-tokens", "24", "--temperature", "1", "--seed", seed, "--json"];
        let (code, stdout, stderr) = run(&[&["run", bundle().to_str().unwrap()], &arguments[..]].concat());
        assert_eq!(code, 0, "{stderr}");
        serde_json::from_str::<serde_json::Value>(&stdout).unwrap()
    };
    let [first, again, other] = ["3", "3", "4"].map(ask);
    assert_eq!((&first["ids"], &first["text"]), (&again["ids"], &again["text"]));
    assert_ne!(first["ids"], other["ids"]);
    assert_eq!(first["ids"].as_array().unwrap().len(), 24);
    assert_eq!(first["finish"], "length");
    for time in ["prefill_tps", "decode_tps", "ttft_ms", "elapsed_s"] {
        assert!(first[time].as_f64().unwrap() > 0.0, "{time}");
    }
}

#[test]
fn a_benchmark_measures_what_it_was_asked_for() {
    let lengths = ["--prefill", "5,9", "--decode", "4", "--depth", "1,20", "--repetitions", "3", "--functions"];
    let (code, stdout, stderr) = run(&[&["bench", bundle().to_str().unwrap()], &lengths[..], &["--json"]].concat());
    assert_eq!(code, 0, "{stderr}");
    let bench: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    let tests = bench["tests"].as_array().unwrap();
    let names: Vec<&str> = tests.iter().filter_map(|test| test["test"].as_str()).collect();
    assert_eq!(names, ["pp5", "pp9", "tg4", "tg4 @ d20"]);
    for test in tests {
        let mut samples: Vec<f64> = serde_json::from_value(test["samples_tps"].clone()).unwrap();
        samples.sort_by(f64::total_cmp);
        assert_eq!(samples.len(), 3);
        assert_eq!(test["median_tps"], samples[1]);
        assert!(samples[0] > 0.0 && test["ttft_ms"].as_f64().unwrap() > 0.0);
    }
    let shares: f64 = bench["functions"].as_array().unwrap().iter().map(|f| f["share"].as_f64().unwrap()).sum();
    assert!((shares - 1.0).abs() < 1e-9);
    let (code, stdout, _) =
        run(&["bench", bundle().to_str().unwrap(), "--suite", "--warmup", "0", "--threads", "1", "--json"]);
    let bench: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(bench["threads"], 1);
    let counts: Vec<u64> =
        bench["suite"].as_array().unwrap().iter().map(|case| case["gen_tokens"].as_u64().unwrap()).collect();
    assert_eq!((code, counts.len()), (0, 5));
    assert!(counts.iter().zip([10, 20, 100, 200, 50]).all(|(count, most)| *count > 0 && *count <= most), "{counts:?}");
    // a context that is smaller than what is usually measured
    let room = tempfile::tempdir().unwrap();
    let small = room.path().join("small.anec");
    let small = small.to_str().unwrap();
    let converted =
        run(&["convert", "--no-measure", "-m", "demo", "--set", "context=24", "--out", small, "--no-compile"]);
    assert_eq!(converted.0, 0, "{}", converted.2);
    let (code, stdout, stderr) = run(&["bench", small, "--repetitions", "1", "--warmup", "0"]);
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("pp24 ") && stdout.contains("tg23 ") && !stdout.contains("pp64"), "{stdout}");
    let llama = ["bench", bundle().to_str().unwrap(), "--prefill", "4", "--decode", "2", "--format", "llama"];
    assert!(run(&llama).1.lines().any(|line| line.starts_with("| demo | ") && line.contains(" | pp4 | ")));
}

/// A stand-in says what macOS' `powermetrics` would, of a Neural Engine that always takes two watts.
#[cfg(unix)]
#[test]
fn a_benchmark_measures_energy_where_the_system_tells() {
    use std::os::unix::fs::PermissionsExt;
    let room = tempfile::tempdir().unwrap();
    let script = "#!/bin/sh\nlast=$(date +%s%N)\nwhile sleep 0.05; do\n  now=$(date +%s%N)\n  \
        echo \"*** Sampled system activity (Fri Nov 20 21:04:11 2026 +0100) ($(( (now - last) / 1000000 )).00ms elapsed) ***\"\n  \
        last=$now\n  printf 'CPU Power: 500 mW\\nGPU Power: 0 mW\\nANE Power: 2000 mW\\n'\ndone\n";
    let program = room.path().join("powermetrics");
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    let bench = |path: &str| {
        let mut command = folder::anec();
        command.env("PATH", path).args(["bench", bundle().to_str().unwrap(), "--energy", "--prefill", "200", "--json"]);
        command.args(["--decode", "40", "--repetitions", "8"]).output().unwrap()
    };
    let output = bench(&format!("{}:{}", room.path().display(), std::env::var("PATH").unwrap()));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let result: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    for (test, tokens) in result["tests"].as_array().unwrap().iter().zip([200.0, 40.0]) {
        let rates: Vec<f64> = serde_json::from_value(test["samples_tps"].clone()).unwrap();
        let seconds: f64 = rates.iter().map(|rate| tokens / rate).sum();
        let [ane, cpu] = ["ane_j", "cpu_j"].map(|part| test["energy"][part].as_f64().unwrap());
        // the script's milliseconds are whole ones, and the pipe takes its time
        assert!((ane / seconds - 2.0).abs() < 0.3 && (cpu / seconds - 0.5).abs() < 0.1, "{seconds} s: {test}");
        let each = test["millijoules_per_token"].as_f64().unwrap();
        assert!((each - (ane + cpu) * 1e3 / (tokens * 8.0)).abs() < 1e-6, "{test}");
    }
    // elsewhere it says what was tried
    let output = bench("/nowhere");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(5), "{said}");
    assert!(said.contains("`powermetrics`") && said.contains("sudo anec bench --energy"), "{said}");
}

#[cfg(unix)]
#[test]
fn a_talk_remembers_what_was_said_and_an_interrupt_ends_only_the_answer() {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::process::Stdio;
    let room = tempfile::tempdir().unwrap();
    for entry in walk(bundle()) {
        let to = room.path().join(entry.strip_prefix(bundle()).unwrap());
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(&entry, to).unwrap();
    }
    let template = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant>";
    std::fs::write(room.path().join("chat_template.jinja"), template).unwrap();
    model::edit_json(&room.path().join("bundle.json"), |bundle| {
        bundle["tokenizer"]["chat_template"] = serde_json::json!("chat_template.jinja");
    });
    let mut talk = folder::anec()
        .arg("chat")
        .arg(room.path())
        .args(["--max-tokens", "450", "--ignore-eos", "--timings"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = talk.stdin.take().unwrap();
    let mut output = talk.stdout.take().unwrap();
    let mut notes = BufReader::new(talk.stderr.take().unwrap()).lines();
    writeln!(input, "Tell me of the sea").unwrap();
    let mut beginning = [0; 8];
    output.read_exact(&mut beginning).unwrap();
    let status = std::process::Command::new("/bin/kill").args(["-INT", &talk.id().to_string()]).status().unwrap();
    assert!(status.success());
    // how fast each answer came: `(9 tokens of prompt at 100.0 per second, 12 tokens at 50.0 per second, …)`
    let mut counts = || {
        let line = notes.next().unwrap().unwrap();
        let before =
            |end: &str| line[..line.find(end).unwrap()].rsplit(['(', ' ']).next().unwrap().parse::<u32>().unwrap();
        (before(" tokens of prompt"), before(" tokens at "))
    };
    let (_, first) = counts();
    assert!(first < 450, "the answer was cut short: {first} tokens");
    writeln!(input, "/system You are a sailor.\nAnd the ships?").unwrap();
    drop(input);
    let (prompt, second) = counts();
    assert!(prompt < 40, "/system forgets what was said: {prompt} tokens of prompt");
    assert_eq!(second, 450, "the next answer is whole");
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert!(rest.len() > 100 && talk.wait().unwrap().success(), "{rest}");
}

/// Every file under a folder.
fn walk(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { walk(&path) } else { vec![path] }).collect()
}

#[test]
fn wrong_requests_are_explained() {
    story(
        "mistakes",
        &[
            &["run", "BUNDLE", "--ids", "1,2,99999"],
            &["run", "BUNDLE"],
            &["run", "ROOM", "--prompt", "x"],
            &["run", "BUNDLE", "--prompt", "x", "--max-memory-mb", "0.1"],
            &["run", "BUNDLE", "--ids", "5", "--chat"],
            &["run", "BUNDLE", "--ids", "5", "--special"],
            &["run", "BUNDLE", "--prompt", "x", "--compute-units", "all"],
            &["run", "BUNDLE", "--prompt", "x", "--decode-units", "all"],
            &["bench", "BUNDLE", "--prefill", "600"],
            &["bench", "BUNDLE", "--suite", "--prefill", "9"],
            &["bench", "BUNDLE", "--format", "llama", "--functions"],
            &["bench", "BUNDLE", "--format", "llama", "--json"],
            &["serve", "BUNDLE", "--stdin", "--port", "8001"],
            &["serve", "BUNDLE", "--socket", "ROOM/socket", "--api-key", "secret"],
            &["inspect", "BUNDLE", "--mil"],
            &["inspect", "demo/model", "--mil"],
            &["logits", "BUNDLE", "--ids", "1,2,3", "--chunk", "9", "--out", "ROOM/l"],
            &["validate", "ROOM"],
            &["validate", "BUNDLE", "--parity", "--golden", "ROOM/none"],
            &["inspect", "ROOM/none"],
            &["inspect", "Cargo.toml"],
            &["plan", "--manifest", "phi-4"],
            &["plan", "--manifest", "demo", "--set", "quant.granularty=per_channel"],
            &["plan", "--manifest", "demo", "--set", "context=many"],
            &["unpack", "Cargo.toml", "--out", "ROOM/out"],
            &["manifests", "phi4"],
        ],
    );
}

#[test]
fn what_a_model_is_can_be_looked_at() {
    story(
        "inspect",
        &[
            &["inspect", "demo/model"],
            &["inspect", "BUNDLE"],
            &["inspect", "BUNDLE/layers_0_3.mlpackage"],
            &["inspect", "BUNDLE/lm_head_1.mlpackage", "--mil"],
            &["plan", "--manifest", "demo"],
            &["plan", "--manifest", "demo", "--details"],
            &["plan", "--manifest", "phi4-mini"],
            &["plan", "--manifest", "phi4-mini", "--for", "m4,a17-pro"],
            &["manifests"],
            &["manifests", "demo"],
        ],
    );
}

#[cfg_attr(target_os = "macos", ignore = "on a Mac the residency gate takes a plan, which says what it says")]
#[test]
fn the_gates_of_the_demo_bundle() {
    story(
        "validate",
        &[
            &["validate", "BUNDLE", "--structure"],
            &[
                "validate",
                "BUNDLE",
                "--parity",
                "--golden",
                "demo/golden.safetensors",
                "--precision",
                "f32",
                "--details",
            ],
            &["validate", "BUNDLE", "--golden", "demo/golden.safetensors", "--precision", "f32", "--allow-unproven"],
            &["validate", "BUNDLE"],
        ],
    );
}

#[test]
fn a_damaged_bundle_fails_its_gate() {
    let room = tempfile::tempdir().unwrap();
    let copy = room.path().join("damaged");
    for (name, bytes) in contents(bundle()) {
        std::fs::create_dir_all(copy.join(&name).parent().unwrap()).unwrap();
        std::fs::write(copy.join(name), bytes).unwrap();
    }
    let weights = copy.join("layers_3_6.mlpackage/Data/com.apple.CoreML/weights/weight.bin");
    let mut bytes = std::fs::read(&weights).unwrap();
    // some rows of layer 4's gate projection: still numbers, but others
    let middle = bytes.len() / 2 + 0x10000;
    bytes[middle..middle + 20_000].iter_mut().for_each(|byte| *byte = byte.wrapping_mul(3));
    std::fs::write(&weights, bytes).unwrap();
    let validate = |gate: &str| {
        let golden = ["--golden", "demo/golden.safetensors", "--precision", "f32", "--details"];
        run(&[&["validate", copy.to_str().unwrap(), gate], &golden[..]].concat())
    };
    let (code, stdout, _) = validate("--structure");
    assert_eq!(code, 1);
    assert!(stdout.contains("weight.bin"), "{stdout}");
    let (code, stdout, _) = validate("--parity");
    assert_eq!(code, 1);
    assert!(stdout.contains("f32, layers 3..6") && stdout.contains("failed"), "{stdout}");
    assert!(!stdout.contains("f32, layers 0..3       failed"), "{stdout}");
}

#[test]
fn logits_are_a_safetensors_file_and_chunks_do_not_matter() {
    let room = tempfile::tempdir().unwrap();
    let write = |name: &str, more: &[&str]| {
        let out = room.path().join(name);
        let tokens = ["--ids", "47,1024,880,259,580,12,283", "--out", out.to_str().unwrap()];
        let (code, _, stderr) = run(&[&["logits", bundle().to_str().unwrap()], &tokens[..], more].concat());
        assert_eq!(code, 0, "{stderr}");
        std::fs::read(out).unwrap()
    };
    let whole = write("whole", &["--hidden"]);
    let file = safetensors::SafeTensors::deserialize(&whole).unwrap();
    let shape = |name: &str| file.tensor(name).unwrap().shape().to_vec();
    assert_eq!(shape("logits"), [7, 2048]);
    assert_eq!(shape("tokens"), [7]);
    // what enters the two shards, and what leaves the last
    for name in ["hidden.0", "hidden.3", "hidden.6"] {
        assert_eq!(shape(name), [7, 256], "{name}");
    }
    let values = |bytes: &[u8]| -> Vec<f32> {
        let file = safetensors::SafeTensors::deserialize(bytes).unwrap();
        let logits = file.tensor("logits").unwrap();
        logits.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    for chunk in ["1", "2", "3", "1,4,2"] {
        let other = values(&write("other", &["--chunk", chunk]));
        for (a, b) in values(&whole).iter().zip(&other) {
            assert!((a - b).abs() < 1e-4, "chunk {chunk}: {a} and {b}");
        }
    }
}

#[test]
fn a_golden_of_the_source_passes_for_unquantized_weights() {
    let room = tempfile::tempdir().unwrap();
    let path = |name: &str| room.path().join(name).to_str().unwrap().to_owned();
    let (golden, plain) = (path("golden"), path("plain"));
    let text = ["--prompt", "It was a dark night, and the wind", "--greedy", "8", "--hidden"];
    let (code, _, stderr) = run(&[&["golden", "-m", "demo", "--out", &golden], &text[..]].concat());
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(run(&["convert", "-m", "demo", "--set", "quant.weights=none", "--out", &plain]).0, 0);
    let (code, stdout, _) = run(&["validate", &plain, "--parity", "--golden", &golden, "--json", "-"]);
    assert_eq!(code, 0, "{stdout}");
    let report: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    let checks = report["gates"][0]["checks"].as_array().unwrap();
    let cosines: Vec<f64> = checks.iter().filter_map(|check| check["measured"]["cosine"].as_f64()).collect();
    assert!(cosines.len() > 10 && cosines.iter().all(|cosine| *cosine > 0.9999), "{cosines:?}");
}

#[test]
fn a_golden_that_the_manifest_names_and_that_is_not_there_is_named() {
    let room = tempfile::tempdir().unwrap();
    let out = room.path().join("plain").to_str().unwrap().to_owned();
    let missing = room.path().join("missing.safetensors").to_str().unwrap().to_owned();
    let golden = format!("golden={missing}");
    let options = ["--set", &golden, "--no-compile", "--no-measure"];
    let (code, _, stderr) = run(&[&["convert", "-m", "demo", "--out", &out], &options[..]].concat());
    assert_eq!(code, 0, "{stderr}");
    let (code, stdout, _) = run(&["validate", &out, "--parity", "--details"]);
    assert_eq!(code, 3, "{stdout}");
    assert!(stdout.contains("the manifest's golden") && stdout.contains("missing.safetensors"), "{stdout}");
}

#[test]
fn plans_of_models_that_generate_no_text_count_forward_passes() {
    let (code, stdout, _) = run(&["plan", "all-minilm-l6-v2"]);
    assert_eq!(code, 0);
    assert!(stdout.contains("streamed per forward pass in 1 call"), "{stdout}");
    assert!(stdout.contains("forward passes/s at most") && !stdout.contains("tok/s"), "{stdout}");
    for (model, unit) in [("all-minilm-l6-v2", "forward pass"), ("phi4-mini", "token")] {
        let (_, stdout, _) = run(&["plan", model, "--json"]);
        let plan: serde_json::Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!(plan["estimate_unit"], unit);
    }
}

#[test]
fn the_demo_runs_from_the_repository_and_says_what_it_proved() {
    let (code, stdout, stderr) = run(&["demo"]);
    assert_eq!(code, 0, "{stderr}");
    for part in ["structure", "parity", "layers 0 to 5", "cosine (min)", "KL"] {
        assert!(stdout.contains(part), "no `{part}` in:\n{stdout}");
    }
    assert!(stdout.lines().count() <= 25, "{stdout}");
    let (code, stdout, stderr) = run(&["demo", "--details"]);
    assert_eq!(code, 0, "{stderr}");
    for part in ["structure", "parity", "f16, layers 3..6", "layers_0_3.mlpackage", "lm_head_1.mlpackage"] {
        assert!(stdout.contains(part), "no `{part}` in:\n{stdout}");
    }
}

#[test]
fn the_redaction_demo_agrees_with_transformers_and_redacts_its_letter() {
    let files = std::fs::read_dir("demo/redact/model").unwrap().map(|entry| entry.unwrap().metadata().unwrap().len());
    assert!(files.sum::<u64>() <= 3_000_000);
    let (code, stdout, stderr) = run(&["demo", "--redact"]);
    assert_eq!(code, 0, "{stdout}{stderr}");
    for part in ["structure", "parity", "layers 0 to 3", "cosine (min)", "My husband, <PRIVATE_PERSON>, pays"] {
        assert!(stdout.contains(part), "no `{part}` in:\n{stdout}");
    }
    let letter = std::fs::read_to_string(repository("demo/redact/letter.txt")).unwrap();
    let private = [
        "Lindholm",
        "Harrow Lane",
        "9135",
        "3 March",
        "brightmail",
        "7700",
        "Idris",
        "NWBK",
        "sk-8fK",
        "photos.",
        "Vance",
    ];
    for word in private {
        assert!(letter.contains(word) && !stdout.contains(word), "{word} in {stdout}");
    }
    let words = ["demo", "--redact", "--prompt", "Call Peter Miller on +44 20 7946 0958.", "--json"];
    let (code, stdout, stderr) = run(&words);
    assert_eq!(code, 0, "{stderr}");
    let result: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(result["spans"].as_array().unwrap().len(), 2, "{stdout}");
    assert_eq!(run(&["demo", "--redact", "--seed", "1"]).0, 2);
}

/// Answers come first and fit a screen; `--details` shows all rows.
#[test]
fn summaries_fit_a_screen() {
    let golden = "demo/golden.safetensors";
    for words in [
        &["plan", "--manifest", "phi4-mini"][..],
        &["plan", "--manifest", "phi4-mini", "--for", "m4"],
        &["plan", "--manifest", "qwen3-30b-a3b"],
        &["plan", "--manifest", "zaya1-8b", "--for", "m5,a17-pro"],
        &["validate", bundle().to_str().unwrap(), "--golden", golden, "--forecast", "--allow-unproven"],
    ] {
        let (code, stdout, stderr) = run(words);
        assert!(code == 0 && stdout.lines().count() <= 25, "{words:?}: {stderr}{stdout}");
        let (_, details, _) = run(&[words, &["--details"]].concat());
        assert!(details.lines().count() > stdout.lines().count(), "{words:?}: {details}");
    }
}

#[test]
fn a_packed_bundle_unpacks_to_itself() {
    let room = tempfile::tempdir().unwrap();
    let path = |name: &str| room.path().join(name).to_str().unwrap().to_owned();
    let pack = |name: &str| run(&["pack", bundle().to_str().unwrap(), "--out", &path(name)]);
    assert_eq!(pack("a.zip").0, 0);
    assert_eq!(pack("b.zip").0, 0);
    assert_eq!(std::fs::read(path("a.zip")).unwrap(), std::fs::read(path("b.zip")).unwrap());
    let (code, _, stderr) = pack("a.zip");
    assert_eq!(code, 2, "{stderr}");
    assert!(stderr.contains("a.zip: exists already"), "{stderr}");
    let (code, _, stderr) = run(&["unpack", &path("a.zip"), "--out", &path("out")]);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(contents(bundle()), contents(Path::new(&path("out"))));
}

#[test]
fn the_schemas_fit_what_they_describe() {
    let schema = |name: &str| {
        let (code, stdout, _) = run(&["schema", name]);
        assert_eq!(code, 0);
        serde_json::from_str::<serde_json::Value>(&stdout).unwrap()
    };
    jsonschema::validate(&schema("bundle"), &json(&bundle().join("bundle.json"))).unwrap();
    jsonschema::validate(&schema("report"), &json(&bundle().join("report.json"))).unwrap();
    let manifest = std::fs::read_to_string(repository("src/manifest/manifests/phi4-mini.yaml")).unwrap();
    let manifest: serde_json::Value = serde_yaml::from_str(&manifest).unwrap();
    jsonschema::validate(&schema("manifest"), &manifest).unwrap();
}

#[cfg(not(target_os = "macos"))]
#[test]
fn doctor_converts_and_computes_what_is_known() {
    let filters = vec![
        (r"anec [^ ]+ on .*", "anec [version] on [system], [cores], [space]"),
        (r"executor: .*, \d+ threads?", "executor: [processor], [threads]"),
        (r"cache: .*", "cache: [folder]"),
        (r"cosine \(min\) 0\.999\d+, .* s\b", "cosine (min) [cosine], [time]"),
    ];
    let text = show(&["doctor"], Path::new("ROOM"));
    insta::with_settings!({
        filters => filters, prepend_module_to_snapshot => false, snapshot_path => "snapshots",
    }, { insta::assert_snapshot!("doctor", text) });

    let (code, stdout, stderr) = run(&["doctor", "--threads", "1", "--json"]);
    assert_eq!(code, 0, "{stderr}");
    let found: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((&found["self_check"]["passed"], &found["threads"]), (&true.into(), &1.into()));
    assert_eq!(found["self_check"]["report"]["verdict"], "passed");
    assert!(!found["processor"].as_array().unwrap().is_empty());
    assert!(found["cache"].as_str().unwrap().ends_with("caches/anec"), "{found}");

    let (code, stdout, _) = run(&["doctor", "--quick", "--json"]);
    let found: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, found.get("self_check")), (0, None));
}

#[cfg(not(target_os = "macos"))]
#[test]
fn doctor_tells_what_keeps_it_from_converting() {
    let (code, stdout, stderr) =
        folder::finish(folder::anec().arg("doctor").env("TMPDIR", "/nonexistent").output().unwrap());
    assert_eq!(code, 5, "{stderr}");
    assert!(stdout.contains("failed\nerror: /nonexistent: can't create a folder in"), "{stdout}");
    assert!(stdout.contains("this machine can"), "the rest is told: {stdout}");
}
