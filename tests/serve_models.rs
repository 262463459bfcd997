//! Several models in one `anec serve`: chosen by name, loaded on demand, unloaded when idle.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use crate::common::folder::{repository, run};
use crate::common::http::{Reply, Server, post};
use crate::common::model;
use crate::serve::bundle;

use serde_json::{Value as Json, json};

/// An encoder, converted once.
fn encoder() -> &'static Path {
    static BUNDLE: OnceLock<PathBuf> = OnceLock::new();
    BUNDLE.get_or_init(|| {
        let room = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("serve-models-{}", std::process::id()));
        let (source, out) = (repository("tests/fixtures/encoders/bert-mean"), room.join("minilm.anec"));
        let names = [source.to_str().unwrap(), out.to_str().unwrap()];
        let words = ["convert", "--source", names[0], "--out", names[1], "--set", "name=minilm", "--force"];
        let (code, _, stderr) = run(&words);
        assert_eq!(code, 0, "{stderr}");
        out
    })
}

/// A server of the demo model and an encoder.
fn both(options: &[&str]) -> Server {
    Server::start(bundle(), &[&[encoder().to_str().unwrap()], options].concat())
}

/// Names of the loaded models.
fn loaded(server: &Server) -> Vec<String> {
    let models = server.get("/api/ps").json()["models"].clone();
    models.as_array().unwrap().iter().map(|model| model["name"].as_str().unwrap().to_owned()).collect()
}

/// Waits until these models are loaded.
fn wait_for(server: &Server, names: &[&str]) {
    for _ in 0..600 {
        if loaded(server) == names {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("{:?} are loaded, expected {names:?}", loaded(server));
}

/// Completion of the demo model.
fn complete(server: &Server) -> Json {
    let body = json!({"model": "demo", "prompt": "It was a dark night", "max_tokens": 8, "temperature": 0});
    server.complete(body)["choices"][0]["text"].clone()
}

fn embed(server: &Server) -> Reply {
    server.post("/v1/embeddings", &json!({"model": "minilm", "input": "sea"}))
}

/// Asks the demo model for texts of some seconds and reads the beginning.
fn begin_texts(server: &Server) -> TcpStream {
    let body = json!({"model": "demo", "prompt": "The", "max_tokens": 500, "n": 8, "stream": true, "ignore_eos": true});
    let mut stream = server.connect();
    stream.write_all(post("/v1/completions", &body.to_string(), "").as_bytes()).unwrap();
    let mut status = [0; 12];
    stream.read_exact(&mut status).unwrap();
    assert_eq!(&status, b"HTTP/1.1 200");
    stream
}

/// Reads the rest of a stream, in which no text is cut off.
fn read_texts(mut stream: TcpStream) {
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert_eq!(rest.matches("\"finish_reason\":\"length\"").count(), 8, "{}", &rest[rest.len().saturating_sub(500)..]);
    assert!(rest.contains("data: [DONE]"));
}

#[test]
fn a_name_chooses_among_several_models() {
    let server = both(&[]);
    assert_eq!(loaded(&server), [""; 0]);
    let models = server.get("/v1/models").json()["data"].clone();
    assert_eq!([&models[0]["id"], &models[1]["id"], &models[2]], [&json!("demo"), &json!("minilm"), &Json::Null]);
    assert_eq!(server.get("/v1/models/minilm").json(), models[1]);
    assert_eq!(server.get("/v1/models/other").code(), "model_not_found");
    let tags = server.get("/api/tags").json()["models"].clone();
    assert_eq!([&tags[0]["name"], &tags[1]["name"]], ["demo:latest", "minilm:latest"]);
    let shown = |name: &str| server.post("/api/show", &json!({"model": name})).json()["capabilities"].clone();
    assert_eq!((shown("demo")[0].clone(), shown("minilm:latest")), (json!("completion"), json!(["embedding"])));
    let health = server.get("/health");
    assert_eq!((health.status, &health.json()["models"][1]["status"]), (200, &json!("unloaded")));
    // descriptions need no loaded model
    assert_eq!(loaded(&server), [""; 0]);

    assert_eq!(complete(&server), complete(&Server::start(bundle(), &[])));
    assert_eq!(loaded(&server), ["demo:latest"]);
    assert_eq!(embed(&server).json()["model"], "minilm");
    assert_eq!(loaded(&server), ["demo:latest", "minilm:latest"]);
    let messages = json!([{"role": "user", "content": "Hello"}]);
    for path in ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"] {
        let body =
            json!({"model": "demo:latest", "messages": messages, "input": "Hello", "max_tokens": 4, "stream": false});
        let body = if path == "/v1/responses" { json!({"model": "demo", "input": "Hello"}) } else { body };
        assert_eq!(server.ask(path, &body)["model"], "demo", "{path}");
        // errors in the form of each API
        let refused = |name: Option<&str>| {
            let reply =
                server.post(path, &json!({"model": name, "messages": messages, "input": "Hello", "max_tokens": 4}));
            let error = &reply.json()["error"];
            (reply.status, error["message"].as_str().or(error.as_str()).unwrap().to_owned())
        };
        let unknown = "there is no model `other` here; this server has `demo`, `minilm`";
        assert_eq!(refused(Some("other")), (404, unknown.to_owned()), "{path}");
        let none = "`model` has to name one of this server's models: `demo`, `minilm`";
        assert_eq!(refused(None), (400, none.to_owned()), "{path}");
    }
    assert_eq!(server.post("/v1/embeddings", &json!({"model": "demo", "input": "sea"})).status, 400);
    assert_eq!(server.post("/tokenize", &json!({"model": "minilm", "content": "sea"})).status, 200);
    assert!(server.metric("anec_generated_tokens_total") > 8.0 && server.metric("anec_active") == 0.0);
}

#[test]
fn idle_models_are_unloaded_and_loaded_again() {
    let server = both(&["--unload-after", "3"]);
    let text = complete(&server);
    assert_eq!(loaded(&server), ["demo:latest"]);
    wait_for(&server, &[]);
    assert_eq!(complete(&server), text);
    // a request can ask for another time, as in Ollama's API
    let keep = |model: &str, path: &str, time: Json| {
        server.ask(path, &json!({"model": model, "keep_alive": time, "input": "sea", "stream": false}))
    };
    assert_eq!(keep("demo", "/api/generate", json!(-1))["done_reason"], "load");
    keep("minilm", "/api/embed", json!("1h30m"));
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!(loaded(&server), ["demo:latest", "minilm:latest"]);
    keep("minilm", "/api/embed", json!(0));
    wait_for(&server, &["demo:latest"]);
    assert_eq!(keep("demo", "/api/chat", json!("0s"))["done_reason"], "unload");
    wait_for(&server, &[]);
    let wrong = server.post("/api/generate", &json!({"model": "demo", "keep_alive": "soon"}));
    assert!(wrong.status == 400 && wrong.text().contains("`keep_alive`"), "{}", wrong.text());
}

#[test]
fn an_only_model_can_be_unloaded_too() {
    let server = Server::start(bundle(), &["--unload-after", "3"]);
    wait_for(&server, &[]);
    assert_eq!((server.get("/health").status, &server.get("/health").json()["status"]), (200, &json!("unloaded")));
    complete(&server);
    assert_eq!(server.get("/health").json()["model"], "demo");
    assert_eq!(loaded(&server), ["demo:latest"]);
}

#[test]
fn answers_arent_cut_off_by_an_unload() {
    let server = both(&[]);
    let stream = begin_texts(&server);
    let unloaded = server.ask("/api/generate", &json!({"model": "demo", "keep_alive": 0}));
    assert_eq!(unloaded["done_reason"], "unload");
    assert_eq!(loaded(&server), ["demo:latest"], "it is in use");
    read_texts(stream);
    wait_for(&server, &[]);
}

#[test]
fn the_longest_idle_model_makes_room() {
    let server = both(&["--max-loaded", "1"]);
    complete(&server);
    assert_eq!(embed(&server).status, 200);
    assert_eq!(loaded(&server), ["minilm:latest"]);
    // one in use makes room after its answers
    let stream = begin_texts(&server);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| embed(&server));
        read_texts(stream);
        assert_eq!(waiting.join().unwrap().status, 200);
    });
    assert_eq!(loaded(&server), ["minilm:latest"]);
}

#[test]
fn requests_for_a_model_share_its_load() {
    let server = both(&[]);
    let texts: Vec<Json> = std::thread::scope(|scope| {
        let asking: Vec<_> = (0..4).map(|_| scope.spawn(|| complete(&server))).collect();
        asking.into_iter().map(|asking| asking.join().unwrap()).collect()
    });
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    assert_eq!(loaded(&server), ["demo:latest"]);
}

#[test]
fn a_model_that_cant_be_loaded_fails_alone() {
    let room = tempfile::tempdir().unwrap();
    let copy = room.path().join("copy.anec");
    model::copy(bundle(), &copy);
    let names = ["--name", "demo", "--name", "copy", "--unload-after", "1"];
    let server = Server::start(bundle(), &[&[copy.to_str().unwrap()], &names[..]].concat());
    let ask = || server.post("/v1/completions", &json!({"model": "copy", "prompt": "It was", "max_tokens": 4}));
    let packages = std::fs::read_dir(&copy).unwrap().map(|entry| entry.unwrap().path());
    let package = packages.into_iter().find(|path| path.extension().is_some_and(|own| own == "mlpackage")).unwrap();
    for lost in [copy.join("bundle.json"), package] {
        let aside = room.path().join("aside");
        std::fs::rename(&lost, &aside).unwrap();
        let reply = ask();
        let name = lost.file_name().unwrap().to_str().unwrap();
        let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        let reason = if name == "bundle.json" { "no bundle" } else { name };
        assert!(reply.status == 500 && message.contains(reason), "{message}");
        complete(&server);
        // the next request tries again
        std::fs::rename(&aside, &lost).unwrap();
        assert_eq!(ask().status, 200);
        wait_for(&server, &[]);
    }
}

#[test]
fn options_for_one_model_are_refused_for_several() {
    let [demo, encoder] = [bundle(), encoder()].map(|path| path.to_str().unwrap());
    for (words, problem) in [
        (&[encoder, "--stdin"][..], "--stdin"),
        (&[encoder, "--strict-model"], "--strict-model"),
        (&[encoder, "--draft", "mtp"], "--draft"),
        (&["--max-loaded", "1"], "--max-loaded"),
        (&[encoder, "--name", "one"], "2 models and 1 names"),
        (&[demo], "two models have the name demo"),
    ] {
        let (code, _, stderr) = run(&[&["serve", demo, "--port", "0"], words].concat());
        assert!(code == 2 && stderr.contains(problem), "{words:?}: {code} {stderr}");
    }
}
