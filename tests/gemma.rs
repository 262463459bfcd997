//! A real Gemma 3 270M, from its Q4_K_M GGUF to text: the greedy continuations are those of transformers, also where the
//! prompt is longer than the sliding window, and also in fp16, which the model's own hidden states would overflow.

#[path = "../src/testing.rs"]
mod testing;

use std::path::Path;
use std::process::Command;

use serde_json::Value as Json;

/// What the program prints, as JSON where it is JSON.
fn anec(arguments: &[&str]) -> Json {
    let output = Command::new(env!("CARGO_BIN_EXE_anec")).args(arguments).output().expect("anec starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "anec {}: {errors}", arguments.join(" "));
    serde_json::from_slice(&output.stdout).unwrap_or(Json::Null)
}

#[test]
fn the_real_model_continues_as_transformers_does() {
    let Some(source) = testing::real_model("gemma-3-270m-q4_k_m.gguf") else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let bundle = folder.path().join("gemma");
    let (source, bundle) = (source.display().to_string(), bundle.display().to_string());
    let form = ["--set", "quant.weights=none", "--set", "context=1024", "--no-compile"];
    anec(&[&["convert", "--source", &source, "--out", &bundle][..], &form].concat());

    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gemma-3-270m/golden.json");
    let golden: Json = serde_json::from_slice(&std::fs::read(golden).expect("the golden")).expect("JSON");
    for prompt in golden["prompts"].as_array().expect("a list") {
        let expected = &prompt["greedy"].as_array().expect("a list");
        let expected = &expected[..prompt["until_stop"].as_u64().expect("a number") as usize];
        // choices by less than fp16 resolves may go either way
        let clear = prompt["margins"]["greedy"].as_f64().expect("a number") > 0.1;
        for precision in if clear { &["f32", "f16"][..] } else { &["f32"] } {
            let text = prompt["prompt"].as_str().expect("text");
            let run = ["run", &bundle, "--prompt", text, "--max-tokens", "64", "--temperature", "0", "--json"];
            let answer = anec(&[&run[..], &["--precision", *precision]].concat());
            assert_eq!(answer["prompt_ids"], prompt["prompt_ids"], "{}", prompt["name"]);
            let ids = answer["ids"].as_array().expect("ids");
            assert_eq!(&ids[..expected.len()], expected, "{} in {precision}", prompt["name"]);
        }
    }
}
