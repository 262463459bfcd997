//! The official clients for Python against a server of ours.

use std::io::Write;
use std::process::Command;

use crate::common::folder::repository;
use crate::common::http::Server;

/// Has the client do everything in `openai_client.py`, where there is a Python with it; Warns where there
/// isn't.
pub fn check(server: &Server, model: &str) {
    run("tests/openai_client.py", server, model);
}

/// Runs a script named after the client that it uses, `tests/openai_….py`.
pub fn run(script: &str, server: &Server, model: &str) {
    let client = script.trim_start_matches("tests/").split('_').next().unwrap();
    let skip = |why: &str| {
        // past the test harness, which would keep it to itself
        let _ = writeln!(std::io::stderr(), "!!! SKIPPED: the {client} client: {why} !!!");
    };
    let Some(python) = std::env::var_os("ANEC_PYTHON") else { return skip("ANEC_PYTHON is not set") };
    if !Command::new(&python).args(["-c", &format!("import {client}")]).output().unwrap().status.success() {
        return skip("ANEC_PYTHON lacks it");
    }
    let output = Command::new(python)
        .arg(repository(script))
        .args([format!("http://{}/v1", server.address), model.to_owned()])
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success() && text[0].contains("all of it works"), "{}{}", text[0], text[1]);
}
