//! Models and bundles of the hub: run by name, pushed, pulled. Against a hub on this machine.

use crate::common::folder::{anec, contents, finish, json, repository};
use crate::verbs;

use std::path::Path;
use std::process::{Command, Stdio};

use anec::bundle::Bundle;
use anec::manifest::builtin;
use anec_testing::hub::{FakeHub, HubBehavior};
use serde_json::Value as Json;

const TOKEN: &str = "hf_test";

/// A user's machine: a folder for caches and work.
struct Machine {
    room: tempfile::TempDir,
    endpoint: String,
}

impl Machine {
    fn new(hub: &FakeHub) -> Self {
        Machine { room: tempfile::tempdir().unwrap(), endpoint: hub.endpoint().to_owned() }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = anec();
        command.current_dir(self.room.path()).env("HF_ENDPOINT", &self.endpoint).env("HF_TOKEN", TOKEN);
        command.env("HF_HOME", self.path("hf")).env("ANEC_CACHE", self.path("cache")).args(arguments);
        command
    }

    fn run(&self, arguments: &[&str]) -> (i32, String, String) {
        finish(self.command(arguments).output().unwrap())
    }

    /// Runs under a limit of the shell's `ulimit`.
    #[cfg(unix)]
    fn run_within(&self, limit: &str, arguments: &[&str]) -> (i32, String, String) {
        let mut limited = Command::new("/bin/sh");
        let program = self.command(arguments);
        limited.arg("-c").arg(format!("ulimit {limit}; exec \"$0\" \"$@\""));
        limited.arg(program.get_program()).args(program.get_args()).current_dir(self.room.path());
        limited.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
        finish(limited.output().unwrap())
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.room.path().join(name)
    }
}

/// A hub that has the demo model.
fn hub() -> FakeHub {
    let hub = FakeHub::start(HubBehavior { token: Some(TOKEN.into()), cut: Some(2_000_000), ..HubBehavior::default() });
    let files = contents(&repository("demo/model"));
    let files: Vec<(&str, &[u8])> = files.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())).collect();
    hub.commit("owner/demo", &files);
    hub
}

#[test]
fn local_models_run_and_are_converted_once() {
    let hub = hub();
    let machine = Machine::new(&hub);
    let copy = machine.path("model");
    std::fs::create_dir(&copy).unwrap();
    for (name, bytes) in contents(&repository("demo/model")) {
        std::fs::write(copy.join(name), bytes).unwrap();
    }
    let ask = ["run", "model", "--prompt", "It was a dark night", "--max-tokens", "8"];
    let (code, first, stderr) = machine.run(&ask);
    assert!(code == 0 && stderr.contains("by defaults, once, into"), "{stderr}");
    let (code, again, stderr) = machine.run(&ask);
    assert!(code == 0 && again == first && !stderr.contains("converting"), "{stderr}");
    let listed: Json = serde_json::from_str(&machine.run(&["ls", "--json"]).1).unwrap();
    assert_eq!(listed["bundles"].as_array().unwrap().len(), 1);
    // a damaged bundle of the cache is named with what removes it
    let name = listed["bundles"][0]["name"].as_str().unwrap();
    let folder = Path::new(listed["bundles"][0]["folder"].as_str().unwrap()).to_owned();
    let tables = folder.join("host.safetensors");
    let whole = std::fs::read(&tables).unwrap();
    std::fs::write(&tables, &whole[..whole.len() / 2]).unwrap();
    let (code, _, stderr) = machine.run(&ask);
    assert!(code == 4 && stderr.contains(&format!("`anec rm {name}` removes the bundle")), "{stderr}");
    std::fs::write(&tables, whole).unwrap();
    // changed files are another model
    std::fs::write(copy.join("generation_config.json"), "{\"eos_token_id\": 1}").unwrap();
    assert!(machine.run(&ask).2.contains("converting"));
    // other formats
    for source in ["families/llama-default/model.gguf", "onnx/qwen3-int8"] {
        let source = repository("tests/fixtures").join(source);
        let (code, ids, stderr) =
            machine.run(&["run", source.to_str().unwrap(), "--ids", "1,2,3", "--max-tokens", "4"]);
        assert!(code == 0 && !ids.trim().is_empty(), "{stderr}");
    }
    // a folder of neither kind
    std::fs::create_dir(machine.path("empty")).unwrap();
    let (code, _, stderr) = machine.run(&["run", "empty", "--ids", "1"]);
    assert!(code != 0 && stderr.contains("bundle.json") && stderr.contains("a GGUF file"), "{stderr}");
}

const RUN: [&str; 6] = ["run", "hf:owner/demo", "--prompt", "It was a dark night", "--max-tokens", "8"];

#[test]
fn a_model_of_the_hub_runs_by_its_name_and_is_converted_once() {
    let hub = hub();
    let machine = Machine::new(&hub);
    let (code, first, stderr) = machine.run(&RUN);
    assert_eq!(code, 0, "{stderr}");
    assert!(stderr.contains("converting hf:owner/demo by defaults, once, into"), "{stderr}");
    assert!(!hub.requested_files().is_empty());
    let (code, again, stderr) = machine.run(&RUN);
    assert_eq!((code, &again), (0, &first), "{stderr}");
    assert!(!stderr.contains("converting") && hub.requested_files().is_empty(), "{stderr}");
    // without the hub, and without the weights
    std::fs::remove_dir_all(machine.path("hf")).unwrap();
    let offline = machine.command(&RUN).env("HF_HUB_OFFLINE", "1").output().unwrap();
    let (code, text, stderr) = finish(offline);
    assert_eq!((code, text), (0, first), "{stderr}");

    // another commit is another model
    hub.commit("owner/demo", &[("README.md", b"better")]);
    let (_, _, stderr) = machine.run(&RUN);
    assert!(stderr.contains("converting hf:owner/demo"), "{stderr}");
    let (_, listing, _) = machine.run(&["ls", "--json"]);
    let listing: Json = serde_json::from_str(&listing).unwrap();
    let bundles = listing["bundles"].as_array().unwrap();
    assert_eq!(bundles.len(), 2);
    for bundle in bundles {
        assert_eq!((&bundle["origin"], &bundle["complete"]), (&"hf:owner/demo".into(), &true.into()));
        let files = contents(Path::new(bundle["folder"].as_str().unwrap()));
        assert_eq!(bundle["bytes"], files.values().map(Vec::len).sum::<usize>());
    }
    let name = bundles[0]["name"].as_str().unwrap();
    let (code, table, _) = machine.run(&["ls"]);
    assert!(code == 0 && table.contains(name) && table.contains("2 bundles"), "{table}");
    assert_eq!(machine.run(&["rm", "nothing", name]).0, 2);
    assert_eq!(machine.run(&["rm", name]).0, 0);
    let (code, removed, _) = machine.run(&["rm", "hf:owner/demo"]);
    assert!(code == 0 && removed.starts_with("removed demo-"), "{removed}");
    assert!(std::fs::read_dir(machine.path("cache/bundles")).unwrap().next().is_none());
    let (code, _, stderr) = machine.run(&["run", "hf:owner/none", "--prompt", "x"]);
    assert!(code == 4 && stderr.contains("the hub doesn't have the repository"), "{stderr}");
}

/// Three programs that need a model which nobody has yet: one downloads and converts it, the others wait.
#[test]
fn first_starts_at_the_same_time_share_a_download_and_a_conversion() {
    let hub = hub();
    let machine = Machine::new(&hub);
    let start = || machine.command(&RUN).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let children = [start(), start(), start()];
    let results = children.map(|child| finish(child.wait_with_output().unwrap()));
    for (code, text, stderr) in &results {
        assert!(*code == 0 && *text == results[0].1 && !text.trim().is_empty(), "{code}: {stderr}");
    }
    let converted = results.iter().filter(|(_, _, stderr)| stderr.contains("by defaults, once, into")).count();
    assert_eq!(converted, 1, "{results:?}");
}

#[cfg(target_os = "linux")]
#[test]
fn an_interrupted_first_start_leaves_nothing_half_written() {
    let hub = hub();
    let machine = Machine::new(&hub);
    // the disk ends in the middle of the weights
    let (code, _, stderr) = machine.run_within("-f 7000", &RUN);
    assert_eq!(code, 5, "{stderr}");
    let (_, listing, _) = machine.run(&["ls", "--json"]);
    let listing: Json = serde_json::from_str(&listing).unwrap();
    for bundle in listing["bundles"].as_array().unwrap() {
        assert_eq!(bundle["complete"], false);
    }
    let (code, _, stderr) = machine.run(&RUN);
    assert_eq!(code, 0, "{stderr}");
}

#[test]
fn a_bundle_is_pushed_with_its_card_pulled_and_run() {
    let hub = hub();
    let machine = Machine::new(&hub);
    let bundle = verbs::bundle().to_str().unwrap();
    let (code, _, stderr) = machine.run(&[
        "validate",
        bundle,
        "--structure",
        "--parity",
        "--golden",
        repository("demo/golden.safetensors").to_str().unwrap(),
        "--json",
        "gates.json",
    ]);
    assert_eq!(code, 0, "{stderr}");
    // a gate that wasn't tried, and no report at all
    for (options, problem) in [
        (&["--gates", "gates.json"][..], "demo isn't verified: numerics was not tried"),
        (&[], "demo isn't verified: no report of gates is recorded or given"),
    ] {
        let (code, _, stderr) = machine.run(&[&["push", bundle, "hf:owner/bundle", "--dry-run"], options].concat());
        assert!(code == 2 && stderr.contains(problem), "{stderr}");
    }
    let (code, said, stderr) = machine.run(&["push", bundle, "hf:owner/bundle", "--dry-run", "--unproven"]);
    assert!(code == 0 && said.contains("**Unproven**: no gate was tried."), "{said}{stderr}");
    let (code, bench, stderr) =
        machine.run(&["bench", bundle, "--prefill", "4", "--decode", "2", "--repetitions", "1", "--json"]);
    assert_eq!(code, 0, "{stderr}");
    std::fs::write(machine.path("bench.json"), &bench).unwrap();
    let push = [
        "push",
        bundle,
        "hf:owner/bundle",
        "--license",
        "mit",
        "--gates",
        "gates.json",
        "--bench",
        "bench.json",
        "--unproven",
    ];
    let (code, _, stderr) = finish(machine.command(&push).env_remove("HF_TOKEN").output().unwrap());
    assert!(code == 2 && stderr.contains("HF_TOKEN"), "{stderr}");
    // the same name is not the same bundle
    let mut other = json(&machine.path("gates.json"));
    other["digest"] = format!("blake3:{}", "0".repeat(64)).into();
    std::fs::write(machine.path("other.json"), other.to_string()).unwrap();
    let others: Vec<&str> = push.iter().map(|word| if *word == "gates.json" { "other.json" } else { word }).collect();
    let (code, _, stderr) = machine.run(&others);
    assert!(code == 2 && stderr.contains("a bundle of that name with other files"), "{stderr}");
    std::fs::write(machine.path("other.json"), bench.replace("blake3:", "blake3:0")).unwrap();
    let others: Vec<&str> = push.iter().map(|word| if *word == "bench.json" { "other.json" } else { word }).collect();
    let (code, _, stderr) = machine.run(&others);
    assert!(code == 2 && stderr.contains("a bundle with other files"), "{stderr}");
    let (code, plan, _) = machine.run(&[&push[..], &["--dry-run", "--json"]].concat());
    let plan: Json = serde_json::from_str(&plan).unwrap();
    assert_eq!((code, hub.commits("owner/bundle")), (0, 0));
    let (code, said, stderr) = machine.run(&push);
    assert!(code == 0 && said.contains("are at http://"), "{said}{stderr}");

    let mut there = hub.files("owner/bundle");
    assert_eq!(there.len(), plan["files"].as_array().unwrap().len());
    let card = String::from_utf8(there.remove("README.md").unwrap()).unwrap();
    assert_eq!(card, plan["card"].as_str().unwrap());
    let front: Json = serde_yaml::from_str(card.split("---").nth(1).unwrap()).unwrap();
    assert_eq!((&front["license"], &front["pipeline_tag"]), (&"mit".into(), &"text-generation".into()));
    let digest = json(&verbs::bundle().join("bundle.json"))["source"]["files"][0]["digest"].clone();
    let own = Bundle::read(verbs::bundle()).unwrap();
    let mut parts =
        vec!["Not run on a Mac", "| structure | ", "least cosine with the golden is 0.99", digest.as_str().unwrap()];
    // how fast it was where; what rules expect of it; what each package is
    parts.extend(["Measured by `anec bench` on ", "| pp4 | ", "| tg2 | ", "## Forecast", "a forecast, no proof"]);
    let digests: Vec<String> = own.packages.iter().map(|package| package.digest().to_string()).collect();
    parts.extend(digests.iter().map(String::as_str));
    for part in parts {
        assert!(card.contains(part), "no `{part}` in\n{card}");
    }
    assert!(!card.contains(repository("").to_str().unwrap()), "folders are nobody's business");
    // what the files are called here is nobody's business either, and changes nothing that is computed
    let mut here = contents(verbs::bundle());
    let told: Bundle = serde_json::from_slice(&there["bundle.json"]).unwrap();
    assert_eq!((own.source.name.as_str(), told.source.name.as_str()), ("demo/model", "model"));
    assert_eq!((told.manifest.source.as_deref(), told.digest()), (Some("model"), own.digest()));
    here.insert("bundle.json".into(), there["bundle.json"].clone());
    assert_eq!(there, here);
    let (_, said, _) = machine.run(&push);
    assert!(said.contains("is up to date"), "{said}");

    let (code, _, stderr) = machine.run(&["pull", "owner/bundle", "--out", "pulled"]);
    assert_eq!(code, 0, "{stderr}");
    let mut pulled = contents(&machine.path("pulled"));
    assert_eq!(pulled.remove("README.md").unwrap(), card.as_bytes());
    assert_eq!(pulled, there);
    assert_eq!(machine.run(&["pull", "owner/bundle", "--out", "pulled"]).0, 2, "nothing is written over");
    assert_eq!(machine.run(&["pull", "owner/demo", "--out", "other"]).0, 4, "a model is no bundle");
    let words = ["--prompt", "It was a dark night", "--max-tokens", "8"];
    let (code, pulled, stderr) = machine.run(&[&["run", "pulled"], &words[..]].concat());
    assert_eq!(code, 0, "{stderr}");
    let (code, named, stderr) = machine.run(&[&["run", "hf:owner/bundle"], &words[..]].concat());
    assert!(code == 0 && stderr.contains("hf:owner/bundle is a bundle: downloading it"), "{stderr}");
    assert_eq!(named, pulled);

    // a repository that somebody changed by hand is found out
    let manifest = there.keys().find(|name| name.ends_with("Manifest.json")).unwrap();
    hub.commit("owner/bundle", &[(manifest, b"{}")]);
    let (code, _, stderr) = machine.run(&["pull", "owner/bundle", "--out", "changed"]);
    assert!(code == 4 && stderr.contains("its digest is"), "{stderr}");
    assert!(!machine.path("changed").exists());
}

/// A golden that the manifest names is written where the source's weights are, and found beside it; what the gates said
/// is recorded in the bundle, for sharing and for benchmarks.
#[test]
fn a_manifest_names_its_golden_and_recorded_gates_go_with_the_bundle() {
    let nobody = FakeHub::start(HubBehavior::default());
    let machine = Machine::new(&nobody);
    let named = ["--manifest", "demo", "--set", "golden=own.safetensors", "--set", "quant.granularity=per_channel"];
    let (code, _, stderr) = machine.run(&[&["convert", "--out", "demo.anec", "--no-measure"], &named[..]].concat());
    assert_eq!(code, 0, "{stderr}");
    let (code, said, _) = machine.run(&["validate", "demo.anec", "--parity"]);
    assert_eq!((code, said.contains("unproven")), (3, true), "{said}");
    let text = ["--prompt", "It was a dark night, and the wind was cold", "--greedy", "4"];
    let (code, _, stderr) = machine.run(&[&["golden"], &named[..], &text].concat());
    assert!(code == 0 && machine.path("own.safetensors").exists(), "{stderr}");

    let bench = ["bench", "demo.anec", "--prefill", "4", "--decode", "2", "--repetitions", "1"];
    assert!(machine.run(&bench).1.contains("gates: not recorded"));
    let gates = ["--structure", "--numerics", "--parity"];
    let (code, said, stderr) = machine.run(&[&["validate", "demo.anec", "--record"], &gates[..]].concat());
    assert_eq!(code, 0, "{said}{stderr}");
    let said = machine.run(&bench).1;
    assert!(said.contains("gates: structure passed, numerics passed, parity passed"), "{said}");
    let push = ["push", "demo.anec", "hf:owner/bundle", "--dry-run"];
    let (code, card, stderr) = machine.run(&push);
    assert!(code == 0 && !card.contains("Unproven"), "{card}{stderr}");
    // a gate that failed
    let path = machine.path("demo.anec/gates.json");
    let mut report = json(&path);
    report["gates"][2]["verdict"] = "failed".into();
    std::fs::write(&path, report.to_string()).unwrap();
    let (code, _, stderr) = machine.run(&push);
    assert!(code == 2 && stderr.contains("demo isn't verified: parity failed"), "{stderr}");
    assert!(machine.run(&bench).1.contains("parity failed"));
    // gates of other files
    report["digest"] = format!("blake3:{}", "0".repeat(64)).into();
    std::fs::write(&path, report.to_string()).unwrap();
    assert!(machine.run(&bench).1.contains("gates: recorded for other files"));
}

/// Predicted where the source's shapes are: a chip's speeds are those of `anec plan --for`.
#[test]
fn a_card_predicts_the_speed_on_chips() {
    let nobody = FakeHub::start(HubBehavior::default());
    let machine = Machine::new(&nobody);
    let bundle = verbs::bundle().to_str().unwrap();
    let push = ["push", bundle, "hf:owner/bundle", "--dry-run", "--unproven", "--for", "m4-max,a17-pro"];
    let (code, card, stderr) = finish(machine.command(&push).current_dir(repository("")).output().unwrap());
    assert_eq!(code, 0, "{stderr}");
    let plan = ["plan", "-m", "demo", "--for", "m4-max,a17-pro", "--json"];
    let plan: Json = serde_json::from_str(&machine.run(&plan).1).unwrap();
    for chip in plan["predictions"].as_array().unwrap() {
        let context = &chip["contexts"][0];
        let rates = ["decode_per_second", "prefill_per_second"].map(|rate| context[rate].as_f64().unwrap());
        let row = format!(
            "| {} | {} | {:.1} | {:.1} |",
            chip["target"].as_str().unwrap(),
            context["context"],
            rates[0],
            rates[1]
        );
        assert!(card.contains(&row), "no `{row}` in\n{card}");
    }
    let (code, _, stderr) = machine.run(&push);
    assert!(code == 4 && stderr.contains("demo/model"), "shapes aren't here: {stderr}");
    let unknown = ["push", bundle, "hf:owner/bundle", "--dry-run", "--unproven", "--for", "m99"];
    assert_eq!(machine.run(&unknown).0, 2);
}

#[cfg(unix)]
#[test]
fn plans_and_shapes_need_neither_a_hub_nor_the_repository() {
    let nobody = FakeHub::start(HubBehavior::default());
    let machine = Machine::new(&nobody);
    for name in builtin::all().iter().map(|builtin| builtin.name) {
        assert_eq!(machine.run(&["inspect", name]).0, 0, "{name}");
        // in so many seconds of processor time, of a program that isn't optimised: parts that are alike are measured
        // once
        let (code, plan, stderr) = machine.run_within("-t 20", &["plan", "--manifest", name, "--json"]);
        assert_eq!(code, 0, "{name}: {stderr}");
        let plan: Json = serde_json::from_str(&plan).unwrap();
        assert_eq!(plan["shapes_from"], if name.starts_with("demo") { "safetensors" } else { "shapes" }, "{name}");
    }
    let (_, text, _) = machine.run(&["plan", "-m", "qwen3-0.6b"]);
    assert!(text.starts_with("shapes from the built-in configuration"), "{text}");
    assert!(nobody.log().is_empty(), "nobody was asked");

    let (code, _, stderr) = machine.run(&["convert", "--manifest", "demo"]);
    assert!(code == 0 && machine.path("demo.anec/bundle.json").exists(), "{stderr}");
    let words = ["--prompt", "It was a dark night", "--max-tokens", "8"];
    let (_, converted, _) = machine.run(&[&["run", "demo.anec"], &words[..]].concat());
    let (code, named, stderr) = machine.run(&[&["run", "demo"], &words[..]].concat());
    assert_eq!((code, named), (0, converted), "{stderr}");
    // a first chat
    let mut chat = machine.command(&["chat", "demo", "--max-tokens", "8"]);
    let mut chat = chat.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut chat.stdin.take().unwrap(), b"It was a dark night\n").unwrap();
    let (code, answer, stderr) = finish(chat.wait_with_output().unwrap());
    assert!(code == 0 && answer.trim().len() > 10, "{answer}{stderr}");
}
