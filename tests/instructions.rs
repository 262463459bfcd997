//! How many instructions a step of decoding, a token of a prompt and a conversion take, counted by callgrind: a slow
//! machine is not mistaken for slow code, and slow code not for a slow machine.

use std::process::Command;

use anec::base::skipped;

use crate::common::folder;
use folder::{json, repository, run};

/// How much more and how much less a count may be than the one that is kept. How code is divided into units of
/// compilation differs from build to build: those that aren't incremental have fewer, and inline more.
const MORE: f64 = 0.1;
const LESS: f64 = 0.3;

/// Instructions of a command of anec, on one thread. Callgrind shows the processor as one without AVX-512.
fn instructions(arguments: &[&str]) -> f64 {
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null", env!("CARGO_BIN_EXE_anec")]);
    let output = command.args(arguments).args(["--threads", "1"]).env("RAYON_NUM_THREADS", "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    let collected = said.lines().find_map(|line| line.split_once("Collected : ")?.1.trim().parse().ok());
    collected.unwrap_or_else(|| panic!("callgrind gave no count: {said}"))
}

/// `tests/fixtures/instructions.json` has the counts, which `tools/instructions.sh` compares those of other profiles
/// with. Who makes code slower or faster on purpose puts the new ones there.
#[test]
fn a_step_and_a_conversion_take_as_many_instructions_as_before() {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return skipped("the counts that are kept are of Linux on x86-64");
    }
    if !Command::new("valgrind").arg("--version").output().is_ok_and(|output| output.status.success()) {
        return skipped("valgrind, which counts instructions, isn't here");
    }
    let room = tempfile::tempdir().unwrap();
    let bundle = |name: &str| room.path().join(name).to_str().unwrap().to_owned();
    let (whole, converted) = (bundle("demo.anec"), bundle("again.anec"));
    let (code, _, stderr) = run(&["convert", "-m", "demo", "--no-compile", "-o", &whole]);
    assert_eq!(code, 0, "{stderr}");
    let text = |ids: &str, tokens| {
        let words = ["run", &whole, "--ids", ids, "--ignore-eos", "--temperature", "0", "--max-tokens", tokens];
        instructions(&words)
    };
    let prompt = |tokens: usize| {
        let ids: Vec<String> = (1..=tokens).map(|id| id.to_string()).collect();
        text(&ids.join(","), "1")
    };
    let conversion = || {
        let form = ["--set", "quant.granularity=per_channel", "--no-compile", "--no-measure"];
        instructions(&[&["convert", "-m", "demo", "-o", &converted][..], &form].concat())
    };
    // what all runs have in common, such as reading the bundle, isn't counted
    let steps = || (text("1,2,3", "32") - text("1,2,3", "8")) / 24.0;
    let tokens = || (prompt(200) - prompt(8)) / 192.0;
    let ((step, token), conversion) = rayon::join(|| rayon::join(steps, tokens), conversion);
    let found = [("decode_step", step), ("prompt_token", token), ("conversion", conversion)];

    let kept = json(&repository("tests/fixtures/instructions.json"));
    for (name, count) in found {
        let expected = kept[name].as_f64().unwrap_or(f64::NAN);
        let change = count / expected - 1.0;
        // written so that NaN is a change
        assert!(
            (-LESS..=MORE).contains(&change),
            "{name}: {count:.0} instructions, {:+.1} % against the {expected:.0} in tests/fixtures/instructions.json; \
             found: {found:?}",
            100.0 * change
        );
    }
}
