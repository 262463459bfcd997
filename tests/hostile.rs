//! Hostile files, tokenizers, schemas and connections; several of each kind.

use crate::common::folder::{self, anec, finish};
use crate::common::http::{Reply, Server, post};
use crate::common::model::{self, edit_json};
use crate::serve::{self, bundle};

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value as Json, json};

/// Runs the program, which must end by itself within some seconds.
fn ends(what: &str, command: &mut Command) -> (i32, String, String) {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            panic!("{what} waits for ever");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    finish(child.wait_with_output().unwrap())
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Puts a pipe, a folder or a device in the place of a file.
#[cfg(unix)]
fn replace(path: &Path, kind: &str) {
    remove(path);
    match kind {
        "pipe" => assert!(Command::new("mkfifo").arg(path).status().unwrap().success()),
        "folder" => fs::create_dir(path).unwrap(),
        device => std::os::unix::fs::symlink(device, path).unwrap(),
    }
}

#[cfg(unix)]
fn restore(path: &Path, bytes: &[u8]) {
    remove(path);
    fs::write(path, bytes).unwrap();
}

#[cfg(unix)]
fn remove(path: &Path) {
    let _ = fs::remove_file(path);
    let _ = fs::remove_dir(path);
}

/// A pipe has no end, a device no size: neither is waited for, as whatever file of a model it stands.
#[cfg(unix)]
#[test]
fn inputs_that_are_no_files_are_refused() {
    let room = tempfile::tempdir().unwrap();
    let (source, own, out) = (room.path().join("model"), room.path().join("own.anec"), room.path().join("out"));
    model::copy(&folder::repository("demo/model"), &source);
    model::copy(bundle(), &own);
    let package = fs::read_dir(&own).unwrap().map(|entry| entry.unwrap().path());
    let package = package.into_iter().find(|path| path.extension().is_some_and(|end| end == "mlpackage")).unwrap();
    let data = package.join("Data/com.apple.CoreML");
    let convert = ["convert", "-m", "demo", "--source", text(&source), "--out", text(&out)];
    let run = ["run", text(&own), "--prompt", "a", "--max-tokens", "1"];
    let chat = ["run", text(&own), "--chat", "--prompt", "a", "--max-tokens", "1"];
    let validate = ["validate", text(&own), "--structure"];
    for (file, arguments) in [
        (source.join("config.json"), &convert[..]),
        (source.join("model.safetensors"), &convert),
        (source.join("tokenizer.json"), &convert),
        (own.join("bundle.json"), &run),
        (own.join("tokenizer.json"), &run),
        (own.join("host.safetensors"), &run),
        (own.join("chat_template.jinja"), &chat),
        (package.join("Manifest.json"), &validate),
        (data.join("model.mlmodel"), &validate),
        (data.join("weights/weight.bin"), &validate),
    ] {
        let whole = fs::read(&file).unwrap();
        for kind in ["pipe", "folder", "/dev/zero"] {
            replace(&file, kind);
            let what = format!("{kind} as {}", file.display());
            let (code, stdout, stderr) = ends(&what, anec().args(arguments));
            // a gate reports what it finds
            let refused = code == 4 || (code == 1 && arguments[0] == "validate");
            assert!(refused && !stderr.contains("panicked"), "{what}: {code} {stdout}{stderr}");
            let name = file.file_name().unwrap().to_str().unwrap();
            assert!((stdout + &stderr).contains(name), "{what} is named: {stderr}");
        }
        restore(&file, &whole);
    }
    let (code, _, stderr) = ends("the whole", anec().args(run));
    assert_eq!(code, 0, "{stderr}");
}

/// Tokenizers at which their library panics, or that would take gigabytes, in each place where one is opened.
#[test]
fn tokenizers_that_cant_be_used_are_refused_by_every_verb() {
    let room = tempfile::tempdir().unwrap();
    let own = room.path().join("own.anec");
    model::copy(bundle(), &own);
    let whole = folder::json(&own.join("tokenizer.json"));
    let template = |single: Json| {
        json!({"type": "TemplateProcessing", "single": single, "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
               "special_tokens": {"[X]": {"id": "[X]", "ids": [1], "tokens": ["x"]}}})
    };
    for (place, value) in [
        ("/pre_tokenizer", json!({"type": "FixedLength", "length": 0})),
        ("/normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "AQ=="})),
        ("/post_processor", template(json!([{"Sequence": {"id": "B", "type_id": 0}}]))),
        ("/post_processor", template(json!([{"SpecialToken": {"id": "[Y]", "type_id": 0}}]))),
        ("/decoder", json!({"type": "Strip", "content": "a", "start": 0, "stop": 5})),
        ("/model/continuing_subword_prefix", json!("####")),
    ] {
        edit_json(&own.join("tokenizer.json"), |json| {
            *json = whole.clone();
            *json.pointer_mut(place).unwrap() = value.clone();
        });
        for arguments in [
            &["run", text(&own), "--prompt", "Hello", "--max-tokens", "1"][..],
            &["perplexity", text(&own), "--text", "README.md"],
            &["serve", text(&own), "--port", "0"],
        ] {
            let what = format!("{} with {place}", arguments[0]);
            let (code, _, stderr) = ends(&what, anec().args(arguments));
            assert!(code == 4 && stderr.contains("tokenizer.json"), "{what}: {code} {stderr}");
            assert!(!stderr.contains("panicked"), "{what}: {stderr}");
        }
    }
}

/// Numbers of `bundle.json` that no function has: findings of the structure gate, and no sum of them overflows.
#[test]
fn numbers_that_no_function_has_are_findings() {
    let room = tempfile::tempdir().unwrap();
    let own = room.path().join("own.anec");
    model::copy(bundle(), &own);
    let whole = folder::json(&own.join("bundle.json"));
    for (place, value) in [
        ("/functions/0/tokens", json!({"range": [9, 1]})),
        ("/functions/0/tokens", json!({"range": [2_000_000_000, 1]})),
        ("/functions/0/tokens", json!({"range": [1, 2_000_000_000]})),
        ("/functions/0/tokens", json!({"fixed": 0})),
        ("/config/num_attention_heads", json!(u64::MAX)),
        ("/config/num_attention_heads", json!(1u64 << 62)),
        ("/config/intermediate_size", json!(u64::MAX)),
        ("/model/hidden_size", json!(2_000_000_000)),
        ("/host/file/bytes", json!(1u64 << 47)),
    ] {
        edit_json(&own.join("bundle.json"), |json| {
            *json = whole.clone();
            *json.pointer_mut(place).unwrap_or_else(|| panic!("{place}")) = value.clone();
        });
        let what = format!("{place}: {value}");
        let (code, stdout, stderr) = ends(&what, anec().args(["validate", text(&own), "--structure"]));
        assert!(matches!(code, 1 | 4) && !stderr.contains("panicked"), "{what}: {code} {stdout}{stderr}");
        if place.starts_with("/functions") {
            let (code, _, stderr) = ends(&what, anec().args(["run", text(&own), "--prompt", "a", "--max-tokens", "1"]));
            // the packages may know what only the gate compares with them
            assert!(matches!(code, 0 | 2 | 4) && !stderr.contains("panicked"), "{what}: {code} {stderr}");
        }
    }
}

/// Schemas that take a compiler minutes or gigabytes, on the command line.
#[test]
fn schemas_that_explode_are_refused_on_the_command_line() {
    let room = tempfile::tempdir().unwrap();
    let file = room.path().join("schema.json");
    let number = |divisor: u64| json!({"type": "integer", "multipleOf": divisor});
    for schema in [
        number(9_999_991),
        number(99_991),
        json!({"allOf": [number(9973), number(9967)]}),
        json!({"type": "object", "properties": {"a": {"items": number(123_457)}}}),
        json!({"type": "string", "pattern": "^(a|b|ab){0,5000}(ba){0,5000}$", "minLength": 4000}),
    ] {
        fs::write(&file, schema.to_string()).unwrap();
        let mut command = anec();
        command.args(["run", text(bundle()), "--prompt", "a", "--max-tokens", "2", "--json-schema", text(&file)]);
        let start = Instant::now();
        let (code, _, stderr) = ends(&schema.to_string(), &mut command);
        assert!(code == 2 && stderr.contains("grammar"), "{schema}: {code} {stderr}");
        assert!(!stderr.contains("panicked") && start.elapsed() < Duration::from_secs(40), "{schema}: {stderr}");
    }
}

/// A template that makes megabytes of a word is refused before they are tokenized.
#[test]
fn chats_that_cant_fit_are_refused_before_they_are_tokenized() {
    let room = tempfile::tempdir().unwrap();
    let many = "{% for i in range(20000) %}once upon a time there was a man who went to the sea and never came back \
                {% endfor %}";
    let own = serve::with_template(room.path(), &format!("{many}{{{{ messages[0].content }}}}"));
    let start = Instant::now();
    for special in [&[][..], &["--special"]] {
        let arguments = [&["run", text(&own), "--chat", "--prompt", "Hi", "--max-tokens", "1"][..], special].concat();
        let (code, _, stderr) = ends("a long template", anec().args(arguments));
        assert!(code == 2 && stderr.contains("bytes") && stderr.contains("context"), "{code}: {stderr}");
    }
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

/// A limit of memory stands for a machine that has no more.
#[cfg(target_os = "linux")]
#[test]
fn an_allocation_that_fails_ends_with_a_message() {
    let room = tempfile::tempdir().unwrap();
    let file = room.path().join("large.txt");
    fs::write(&file, "word ".repeat(12 << 20)).unwrap();
    let mut failed = 0;
    for limit in [150, 200, 250, 300, 400] {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -v {}; exec \"$0\" \"$@\"", limit << 10), env!("CARGO_BIN_EXE_anec")]);
        command.args(["--threads", "1", "perplexity", text(bundle()), "--text", text(&file)]);
        command.current_dir(env!("CARGO_MANIFEST_DIR"));
        let (code, _, stderr) = ends("perplexity", &mut command);
        assert!(matches!(code, 2 | 4 | 5) && stderr.contains("help: "), "{limit} MB: {code} {stderr}");
        failed += usize::from(stderr.contains("bytes of memory can't be had") && code == 5);
    }
    assert!(failed > 0, "a limit is met by an allocation");
}

/// Three programs that need a model which nobody has yet.
#[test]
fn programs_that_start_together_wait_for_each_other() {
    let room = tempfile::tempdir().unwrap();
    let source = room.path().join("model");
    model::copy(&folder::repository("demo/model"), &source);
    let start = || {
        let mut command = anec();
        command.env("ANEC_CACHE", room.path().join("cache")).current_dir(room.path());
        command.args(["run", "model", "--prompt", "It was", "--max-tokens", "4"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let children = [start(), start(), start()];
    let results = children.map(|child| finish(child.wait_with_output().unwrap()));
    let converted = results.iter().filter(|(_, _, stderr)| stderr.contains("by defaults, once, into")).count();
    for (code, stdout, stderr) in &results {
        assert!(*code == 0 && *stdout == results[0].1 && !stdout.trim().is_empty(), "{code}: {stderr}");
    }
    assert_eq!(converted, 1, "one converts: {results:?}");
}

/// A tokenizer whose tokens are escape sequences: a terminal shows them, a pipe gets them as they are.
#[cfg(target_os = "linux")]
#[test]
fn generated_text_does_not_command_the_terminal() {
    let room = tempfile::tempdir().unwrap();
    let own = room.path().join("own.anec");
    model::copy(bundle(), &own);
    edit_json(&own.join("tokenizer.json"), |json| {
        let vocab: serde_json::Map<String, Json> =
            (0..2048).map(|id| (format!("\u{1b}]0;pwn{id}\u{7}"), json!(id))).collect();
        *json = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": null, "post_processor": null, "decoder": null,
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "\u{1b}]0;pwn0\u{7}"},
        });
    });
    let arguments = ["run", text(&own), "--ids", "47,1024,880", "--max-tokens", "4"];
    let (code, stdout, stderr) = finish(anec().args(arguments).output().unwrap());
    assert!(code == 0 && stdout.contains("\u{1b}]0;pwn"), "raw in a pipe: {stdout:?}{stderr}");
    let line = [&[env!("CARGO_BIN_EXE_anec")][..], &arguments].concat().join(" ");
    let Ok(output) = Command::new("script").args(["-qec", &line, "/dev/null"]).stdin(Stdio::null()).output() else {
        anec::base::skipped("there is no `script`, which gives a program a terminal");
        return;
    };
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(shown.contains("\\u{1b}]0;pwn") && !shown.contains('\u{1b}') && !shown.contains('\u{7}'), "{shown:?}");
}

/// Bodies that never end hold some memory together, and no more.
#[test]
fn half_sent_bodies_share_a_budget() {
    let server = Server::start(bundle(), &["--max-body", "4000000"]);
    let before = server.metric("process_resident_memory_bytes");
    let head =
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\nConnection: close\r\n\r\n";
    let part = vec![b' '; 1 << 20];
    let mut held = Vec::new();
    for _ in 0..60 {
        let mut stream = server.connect();
        // one that is refused is closed while it sends
        let _ = stream.write_all(head).and_then(|()| (0..3).try_for_each(|_| stream.write_all(&part)));
        held.push(stream);
    }
    let mut refused = 0;
    for stream in &mut held {
        stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let mut start = [0; 12];
        refused += usize::from(stream.read_exact(&mut start).is_ok() && start.ends_with(b"429"));
    }
    assert!(refused >= 30, "{refused} of 60 are refused");
    let grown = server.metric("process_resident_memory_bytes") - before;
    assert!(grown < 120e6, "60 bodies of 3 MB hold {} MB", grown / 1e6);
    // smaller ones are answered meanwhile
    assert_eq!(server.get("/health").status, 200);
}

/// Connections without a request make room for one that has some.
#[test]
fn idle_connections_keep_nobody_waiting() {
    let server = Server::start(bundle(), &[]);
    let mut idle: Vec<_> = (0..600).map(|_| server.connect()).collect();
    idle.iter_mut().step_by(3).for_each(|stream| drop(stream.write_all(b"POST /v1/comp")));
    let start = Instant::now();
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 1})).status, 200);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

/// A line that has begun must end; the socket is then free for others.
#[cfg(unix)]
#[test]
fn a_line_that_never_ends_is_hung_up_on() {
    use std::os::unix::net::UnixStream;
    let room = tempfile::tempdir().unwrap();
    let path = room.path().join("anec.sock");
    let mut child =
        anec().arg("serve").arg(bundle()).arg("--socket").arg(&path).stdout(Stdio::piped()).spawn().unwrap();
    let mut ready = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    let begun: Vec<_> = ["{\"prompt\": \"", "1 2", "["]
        .map(|start| {
            let mut stream = UnixStream::connect(&path).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            stream.write_all(start.as_bytes()).unwrap();
            stream
        })
        .into();
    for stream in begun {
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        let answer: Json = serde_json::from_str(&line).unwrap();
        assert_eq!((&answer["ok"], &answer["code"]), (&json!(false), &json!("request_timeout")), "{answer}");
    }
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.write_all(b"{\"prompt\": \"x\", \"max_tokens\": 1}\n").unwrap();
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    assert_eq!(serde_json::from_str::<Json>(&line).unwrap()["ok"], true);
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Errors name the field, in the words of clients.
#[test]
fn errors_of_requests_have_the_clients_words() {
    let server = serve::server();
    let hello = json!([{"role": "user", "content": "Hi"}]);
    for (path, body, said, field) in [
        ("/v1/completions", json!({}), "`prompt` is missing", Json::Null),
        (
            "/v1/completions",
            json!({"prompt": "x", "max_tokens": "many"}),
            "`max_tokens`: found \"many\", expected a whole number",
            json!("max_tokens"),
        ),
        (
            "/v1/completions",
            json!({"prompt": "x", "stop": [1]}),
            "`stop`: expected a text, or a list of texts",
            json!("stop"),
        ),
        (
            "/v1/completions",
            json!({"prompt": "x", "logit_bias": {"5": "a"}}),
            "`logit_bias.5`: found \"a\", expected a number",
            json!("logit_bias"),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": 5, "content": "Hi"}]}),
            "`messages[0].role`: found 5, expected a text",
            json!("messages"),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": hello, "stream": "yes"}),
            "`stream`: found \"yes\", expected true or false",
            json!("stream"),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": {"role": "user"}}),
            "`messages`: found an object, expected a list",
            json!("messages"),
        ),
        ("/v1/embeddings", json!({"input": {}, "encoding_format": "hex"}), "`input`: ", json!("input")),
        ("/detokenize", json!({"tokens": ["x".repeat(100_000)]}), "`tokens[0]`: found \"xxx", json!("tokens")),
    ] {
        let reply = server.post(path, &body);
        let error = &reply.json()["error"];
        let message = error["message"].as_str().unwrap();
        assert_eq!(reply.status, 400, "{path}: {message}");
        assert!(message.contains(said) && message.len() < 600, "{path}: {message}");
        assert_eq!(error["param"], field, "{path}: {message}");
        for foreign in ["struct", "invalid type", "untagged", "i64", "map", "sequence"] {
            assert!(!message.contains(foreign), "{path}: {message}");
        }
    }
}

/// Sixteen slow and sixteen deaf clients, and sixteen with hostile requests, beside eight whose texts are known.
#[test]
fn valid_clients_get_right_texts_beside_hostile_ones() {
    let server = Server::start(bundle(), &["--parallel", "8", "--queue", "64"]);
    let request =
        |i: usize| json!({"prompt": format!("In the year {} there was", 1800 + i), "max_tokens": 4, "temperature": 0});
    let expected: Vec<Json> = (0..8).map(|i| server.complete(request(i))["choices"][0]["text"].clone()).collect();
    let end = Instant::now() + Duration::from_secs(5);
    let hostile = [
        json!({"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "multipleOf": 99_991}}}}),
        json!({"prompt": "x", "max_tokens": 1, "response_format": {"type": "regex", "regex": "((a{1,300}b){1,300}c){1,300}"}}),
        json!({"prompt": "x".repeat(100_000), "max_tokens": 4}),
        json!({"prompt": [[1, 2], "x"], "n": 1_000_000}),
        json!({"prompt": "x", "max_tokens": 9_223_372_036_854_775_807i64, "stop": vec!["y"; 500]}),
    ];
    std::thread::scope(|scope| {
        let (server, request, expected, hostile) = (&server, &request, &expected, &hostile);
        let mut deaf: Vec<_> = (0..16).map(|_| server.connect()).collect();
        for stream in &mut deaf {
            let body = json!({"prompt": "a", "max_tokens": 200, "stream": true, "logprobs": 5}).to_string();
            let _ = stream.write_all(post("/v1/completions", &body, "").as_bytes());
        }
        for i in 0..16 {
            scope.spawn(move || {
                let mut stream = server.connect();
                let text = post("/v1/completions", &request(i).to_string(), "");
                for byte in text.as_bytes() {
                    if Instant::now() > end || stream.write_all(&[*byte]).is_err() {
                        break;
                    }
                    std::thread::sleep(Duration::from_millis(100));
                }
            });
            scope.spawn(move || {
                for turn in 0.. {
                    if Instant::now() > end {
                        break;
                    }
                    let reply = server.post("/v1/completions", &hostile[(i + turn) % hostile.len()]);
                    assert!([200, 400, 429].contains(&reply.status), "{}: {}", reply.status, reply.text());
                }
            });
        }
        let valid: Vec<_> = (0..8)
            .map(|i| {
                scope.spawn(move || {
                    let mut answered = 0;
                    while Instant::now() < end {
                        let reply: Reply = server.post("/v1/completions", &request(i));
                        match reply.status {
                            200 => assert_eq!(reply.json()["choices"][0]["text"], expected[i]),
                            429 => continue,
                            other => panic!("{other}: {}", reply.text()),
                        }
                        answered += 1;
                    }
                    answered
                })
            })
            .collect();
        for client in valid {
            assert!(client.join().unwrap() > 0, "everybody is answered");
        }
        drop(deaf);
    });
    server.wait_for("anec_active", |count| count == 0.0);
    assert!(server.metric("process_resident_memory_bytes") < 1e9);
}
