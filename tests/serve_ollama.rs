//! Ollama's API of `anec serve`.

use crate::common::folder::{repository, run};
use crate::common::http::{Reply, Server, post};
use crate::serve::{CONSTANT_THINKING, OPTIONAL_THINKING, bundle, server, with_template};

use serde_json::{Value as Json, json};

fn user(text: &str) -> Json {
    json!([{"role": "user", "content": text}])
}

/// Lines of a streamed answer.
fn lines(reply: &Reply) -> Vec<Json> {
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert!(reply.head.contains("application/x-ndjson"), "{}", reply.head);
    reply.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Message of an error, which must be a 400.
fn refusal(server: &Server, path: &str, body: &Json) -> String {
    let reply = server.post(path, body);
    assert_eq!(reply.status, 400, "{body}: {}", reply.text());
    reply.json()["error"].as_str().unwrap().to_owned()
}

#[test]
fn chats_are_those_of_openais_api_and_stream_by_default() {
    let server = server();
    let same = server.chat(json!({"messages": user("Hello"), "max_tokens": 24, "temperature": 0}));
    let text = &same["choices"][0]["message"]["content"];
    let mut body = json!({
        "model": "demo:latest", "messages": user("Hello"), "options": {"num_predict": 24, "temperature": 0, "num_ctx": 512},
        "keep_alive": "5m",
    });
    let parts = lines(&server.post("/api/chat", &body));
    let (last, parts) = parts.split_last().unwrap();
    assert!(
        parts.len() > 3 && parts.iter().all(|part| part["done"] == false && part["message"]["role"] == "assistant")
    );
    let joined: String = parts.iter().map(|part| part["message"]["content"].as_str().unwrap()).collect();
    assert_eq!(joined, text.as_str().unwrap());
    assert_eq!(
        (&last["done"], &last["done_reason"], &last["message"]["content"]),
        (&json!(true), &json!("length"), &json!(""))
    );
    body["stream"] = json!(false);
    let whole = server.post("/api/chat", &body).json();
    assert_eq!((&whole["message"]["content"], &whole["done"], &whole["model"]), (text, &json!(true), &json!("demo")));
    for answer in [last, &whole] {
        assert_eq!(answer["prompt_eval_count"], same["usage"]["prompt_tokens"]);
        assert_eq!(answer["eval_count"], 24);
        let time = |name: &str| answer[name].as_u64().unwrap();
        let parts = time("load_duration") + time("prompt_eval_duration") + time("eval_duration");
        assert!(time("eval_duration") > 1000 && time("total_duration").abs_diff(parts) < 1000, "{answer}");
    }
    assert!(whole["created_at"].as_str().unwrap().ends_with('Z'), "{whole}");
}

#[test]
fn texts_are_answers_or_continue_a_raw_prompt() {
    let server = server();
    let ask = |mut body: Json| {
        body["stream"] = json!(false);
        body["options"] = json!({"num_predict": 12, "temperature": 0});
        let reply = server.post("/api/generate", &body);
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()["response"].clone()
    };
    let raw = server.complete(json!({"prompt": "It was a dark", "max_tokens": 12, "temperature": 0}));
    assert_eq!(ask(json!({"prompt": "It was a dark", "raw": true})), raw["choices"][0]["text"]);
    let messages = json!([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "It was a dark"}]);
    let chat = server.chat(json!({"messages": messages, "max_tokens": 12, "temperature": 0}));
    let answer = ask(json!({"prompt": "It was a dark", "system": "Be kind."}));
    assert_eq!(answer, chat["choices"][0]["message"]["content"]);
    let parts = lines(&server.post("/api/generate", &json!({"prompt": "It was", "options": {"num_predict": 5}})));
    assert_eq!((parts.last().unwrap()["done"].clone(), &parts.last().unwrap()["response"]), (json!(true), &json!("")));
}

#[test]
fn requests_without_a_prompt_find_the_model_loaded() {
    let server = server();
    for (path, body) in [("/api/generate", json!({"model": "demo"})), ("/api/chat", json!({"messages": []}))] {
        let answer = server.post(path, &body).json();
        assert_eq!((&answer["done"], &answer["done_reason"]), (&json!(true), &json!("load")), "{answer}");
    }
}

#[test]
fn log_probabilities_are_those_of_openais_api() {
    let server = server();
    let body =
        json!({"messages": user("Hello"), "max_tokens": 12, "temperature": 0, "logprobs": true, "top_logprobs": 2});
    let same = server.chat(body);
    let expected = &same["choices"][0]["logprobs"]["content"];
    // a prompt that shares a prefix with an earlier one is computed in other parts, so that sums are rounded otherwise
    let agrees = |found: &[Json]| {
        let alike = |(found, expected): (&Json, &Json)| {
            let apart = found["logprob"].as_f64().unwrap() - expected["logprob"].as_f64().unwrap();
            let alternatives = |entry: &Json| entry["top_logprobs"].as_array().unwrap().len();
            found["token"] == expected["token"]
                && found["bytes"] == expected["bytes"]
                && apart.abs() < 0.01
                && (alternatives(found), alternatives(expected)) == (2, 2)
        };
        assert_eq!(found.len(), 12);
        assert!(found.iter().zip(expected.as_array().unwrap()).all(alike), "{found:?}\n{expected}");
    };
    let mut body = json!({
        "messages": user("Hello"), "options": {"num_predict": 12, "temperature": 0}, "logprobs": true, "top_logprobs": 2,
        "stream": false,
    });
    agrees(server.post("/api/chat", &body).json()["logprobs"].as_array().unwrap());
    body["stream"] = json!(true);
    let parts = lines(&server.post("/api/chat", &body));
    let joined: Vec<Json> =
        parts.iter().flat_map(|part| part["logprobs"].as_array().cloned().unwrap_or_default()).collect();
    agrees(&joined);
    // without alternatives, and for a raw prompt
    let raw = json!({
        "prompt": "It was", "raw": true, "options": {"num_predict": 3, "temperature": 0}, "logprobs": true, "stream": false,
    });
    let raw = server.post("/api/generate", &raw).json();
    let entries = raw["logprobs"].as_array().unwrap();
    assert_eq!(entries.len(), 3);
    assert!(
        entries.iter().all(|entry| entry["logprob"].as_f64().unwrap() <= 0.0 && entry["top_logprobs"] == json!([]))
    );
    body["logprobs"] = json!(false);
    assert!(lines(&server.post("/api/chat", &body)).iter().all(|part| part.get("logprobs").is_none()));
}

#[test]
fn formats_and_stops_are_kept_to() {
    let server = server();
    let schema = json!({
        "type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["age"], "additionalProperties": false,
    });
    let body = json!({"messages": user("Who?"), "stream": false, "format": schema, "options": {"seed": 1, "num_predict": 100}});
    let answer = server.post("/api/chat", &body).json();
    assert_eq!(answer["done_reason"], "stop", "{answer}");
    jsonschema::validate(&schema, &serde_json::from_str(answer["message"]["content"].as_str().unwrap()).unwrap())
        .unwrap();
    let options = json!({"temperature": 0, "num_predict": 24});
    let ask = |options: &Json| {
        let body = json!({"prompt": "It was a dark night", "raw": true, "stream": false, "options": options});
        server.post("/api/generate", &body).json()["response"].as_str().unwrap().to_owned()
    };
    let whole = ask(&options);
    let stop = whole.split(' ').rev().nth(3).unwrap();
    let mut stopped = options.clone();
    stopped["stop"] = json!([stop]);
    assert_eq!(ask(&stopped), whole[..whole.find(stop).unwrap()]);
}

#[test]
fn tools_reach_the_prompt_and_results_are_taken() {
    let server = server();
    let tool = json!({"type": "function", "function": {"name": "weather", "description": "", "parameters": {"type": "object", "properties": {}}}});
    let ask = |tools: Json| {
        let messages = json!([
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}]},
            {"role": "tool", "content": "no", "tool_name": "weather"},
        ]);
        let body = json!({"messages": messages, "tools": tools, "stream": false, "options": {"num_predict": 4}});
        let reply = server.post("/api/chat", &body);
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()["prompt_eval_count"].as_u64().unwrap()
    };
    assert!(ask(json!([tool])) > ask(json!([])));
    let body = json!({"messages": user("Hi"), "tools": [{"type": "web_search"}]});
    assert!(refusal(&server, "/api/chat", &body).contains("web_search"));
}

#[test]
fn thinking_is_a_field_that_can_be_disabled() {
    let room = tempfile::tempdir().unwrap();
    let server = Server::start(&with_template(room.path(), OPTIONAL_THINKING), &[]);
    let body = |think: Json, stream: bool| json!({"messages": user("Hi"), "think": think, "stream": stream, "options": {"num_predict": 8, "seed": 3}});
    let message = |think: Json| server.post("/api/chat", &body(think, false)).json()["message"].clone();
    let thinks = message(json!(true));
    assert!(!thinks["thinking"].as_str().unwrap().is_empty() && thinks["content"] == "", "{thinks}");
    assert_eq!(message(Json::Null)["thinking"], thinks["thinking"]);
    assert_eq!(message(json!("high"))["thinking"], thinks["thinking"]);
    let plain = message(json!(false));
    assert!(plain.get("thinking").is_none() && plain["content"] != "", "{plain}");
    let parts = lines(&server.post("/api/chat", &body(json!(true), true)));
    let joined: String = parts.iter().filter_map(|part| part["message"]["thinking"].as_str()).collect();
    assert_eq!(joined, thinks["thinking"].as_str().unwrap());
    assert!(
        server.post("/api/show", &json!({"model": "demo"})).json()["capabilities"].to_string().contains("thinking")
    );

    assert!(refusal(&super::serve::server(), "/api/chat", &body(json!(true), true)).contains("doesn't think"));
    let room = tempfile::tempdir().unwrap();
    let always = Server::start(&with_template(room.path(), CONSTANT_THINKING), &[]);
    assert!(refusal(&always, "/api/chat", &body(json!(false), true)).contains("always thinks"));
}

#[test]
fn the_model_is_described() {
    let server = server();
    let version = server.get("/api/version").json()["version"].as_str().unwrap().to_owned();
    assert!(version.split('.').count() == 3, "{version}");
    let listed = server.get("/api/tags").json()["models"][0].clone();
    assert_eq!((&listed["name"], &listed["model"]), (&json!("demo:latest"), &json!("demo:latest")));
    assert!(listed["size"].as_u64().unwrap() > 1_000_000 && listed["digest"].as_str().unwrap().len() == 64, "{listed}");
    assert_eq!(listed["details"]["quantization_level"], "int8");
    let running = server.get("/api/ps").json()["models"][0].clone();
    assert_eq!((&running["name"], &running["context_length"]), (&listed["name"], &json!(512)));
    for body in [json!({"model": "demo:latest"}), json!({"name": "demo"})] {
        let shown = server.post("/api/show", &body).json();
        assert_eq!(shown["model_info"]["qwen3.context_length"], 512, "{shown}");
        assert_eq!(shown["capabilities"], json!(["completion", "tools"]));
    }
    assert_eq!(server.post("/api/show", &json!({"model": "other"})).status, 404);
}

#[test]
fn errors_have_one_field_and_name_the_problem() {
    let server = Server::start(bundle(), &["--api-key", "secret", "--strict-model", "--max-body", "20000"]);
    let ask = |path: &str, body: &str| {
        let reply = server.raw(post(path, body, "Authorization: Bearer secret\r\n").as_bytes());
        let json = reply.json();
        assert_eq!(json.as_object().unwrap().len(), 1, "{json}");
        (reply.status, json["error"].as_str().unwrap().to_owned())
    };
    let chat = |more: Json| {
        let mut body = json!({"model": "demo:latest", "messages": user("Hi")});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ask("/api/chat", &body.to_string())
    };
    for (more, problem) in [
        (json!({"options": {"num_ctx": 513}}), "`num_ctx` is 513"),
        (json!({"options": {"mirostat": 2}}), "`mirostat`"),
        (json!({"options": {"repeat_last_n": 64}}), "`repeat_last_n`"),
        (json!({"options": {"temperature": -1}}), "`temperature` is -1"),
        (json!({"options": {"num_predict": "x"}}), "`options.num_predict`: found \"x\", expected a whole number"),
        (json!({"options": {"num_predict": -3}}), "`num_predict`"),
        (json!({"format": "yaml"}), "`format`"),
        (json!({"think": "deeply"}), "`think`"),
        (json!({"logprobs": true, "top_logprobs": 21}), "`top_logprobs` is 21"),
        (json!({"logprobs": "yes"}), "`logprobs`"),
        (json!({"messages": [{"role": "user", "content": "Hi", "images": ["AA"]}]}), "`images`"),
        (json!({"messages": [{"content": "Hi"}]}), "`role`"),
    ] {
        let (status, error) = chat(more.clone());
        assert!(status == 400 && error.contains(problem), "{more}: {status} {error}");
    }
    let (status, error) = ask("/api/generate", &json!({"prompt": "x", "context": [1, 2]}).to_string());
    assert!(status == 400 && error.contains("`context`"), "{error}");
    let (status, error) = ask("/api/generate", &json!({"prompt": "x", "suffix": "y"}).to_string());
    assert!(status == 400 && error.contains("no tokens for a text between others"), "{error}");
    assert_eq!(chat(json!({"model": "other"})).0, 404);
    assert_eq!(ask("/api/chat", "{").0, 400);
    assert_eq!(ask("/api/pull", "{}").0, 404);
    assert_eq!(ask("/api/tags", "{}").0, 405);
    assert_eq!(ask("/api/chat", &" ".repeat(30_000)).0, 413);
    let reply = server.post("/api/chat", &json!({}));
    assert!(reply.status == 401 && reply.json()["error"].is_string(), "{}", reply.text());
    assert_eq!(server.get("/api/tags").status, 401);
}

#[test]
fn a_model_of_vectors_embeds() {
    let room = tempfile::tempdir().unwrap();
    let out = room.path().join("b");
    let source = repository("tests/fixtures/encoders/bert-mean");
    let names = [source.to_str().unwrap(), out.to_str().unwrap()];
    let (code, _, stderr) = run(&["convert", "--source", names[0], "--out", names[1], "--set", "name=minilm"]);
    assert_eq!(code, 0, "{stderr}");
    let server = Server::start(&out, &[]);
    let expected = server.post("/v1/embeddings", &json!({"input": ["the sea", "sea"]})).json();
    let body = json!({"model": "minilm", "input": ["the sea", "sea"], "truncate": true, "options": {"num_ctx": 8}});
    let answer = server.post("/api/embed", &body).json();
    assert_eq!(answer["embeddings"], json!([expected["data"][0]["embedding"], expected["data"][1]["embedding"]]));
    assert_eq!(answer["prompt_eval_count"], 7);
    let one = server.post("/api/embeddings", &json!({"prompt": "sea"})).json();
    assert_eq!(one["embedding"], answer["embeddings"][1]);
    let shown = server.post("/api/show", &json!({"model": "minilm"})).json();
    assert_eq!(shown["capabilities"], json!(["embedding"]));
    assert!(refusal(&server, "/api/embed", &json!({"input": "sea ".repeat(63), "truncate": false})).contains("tokens"));
    assert_eq!(server.post("/api/chat", &json!({"messages": user("Hi")})).status, 400);
}
