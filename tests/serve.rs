//! `anec serve` over loopback: the demo model behind OpenAI's API, its limits, and clients that behave badly.

use crate::common::client;
use crate::common::folder;
use crate::common::http;
use crate::common::model;
use anec_testing as testing;

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anec::runtime::Tokenizer;
use folder::{anec, repository, run};
use http::{Reply, Server, post};
use model::edit_json;
use serde_json::{Value as Json, json};

/// The demo bundle with a simple chat template, converted once.
pub fn bundle() -> &'static Path {
    static BUNDLE: OnceLock<PathBuf> = OnceLock::new();
    BUNDLE.get_or_init(|| {
        let room = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("serve-{}", std::process::id()));
        let out = room.join("demo.anec");
        let (code, _, stderr) =
            run(&["convert", "--no-measure", "-m", "demo", "--out", out.to_str().unwrap(), "--force"]);
        assert_eq!(code, 0, "{stderr}");
        let template = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{# <tool_call> #}\
            {% for m in messages %}<{{ m.role }}> {{ m.content or m.tool_calls | tojson }}\n{% endfor %}<assistant>";
        std::fs::write(out.join("chat_template.jinja"), template).unwrap();
        edit_json(&out.join("bundle.json"), |bundle| {
            bundle["tokenizer"]["chat_template"] = json!("chat_template.jinja");
        });
        out
    })
}

/// Copy of the demo bundle with another chat template.
pub fn with_template(room: &Path, template: &str) -> PathBuf {
    let copy = room.join("copy.anec");
    model::copy(bundle(), &copy);
    std::fs::write(copy.join("chat_template.jinja"), template).unwrap();
    copy
}

/// Template with a variable that disables reasoning.
pub const OPTIONAL_THINKING: &str = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant>\
    {% if enable_thinking is undefined or enable_thinking %}<think>\n{% else %}<think></think>{% endif %}";
/// Template that always opens the reasoning.
pub const CONSTANT_THINKING: &str =
    "{% for m in messages %}<{{ m.role }}> {{ m.content.split('</think>')[-1] }}\n{% endfor %}<assistant><think>\n";

/// A server with the limits that most tests need.
pub fn server() -> Server {
    Server::start(bundle(), &["--queue", "512", "--max-body", "200000"])
}

fn tokenizer() -> Tokenizer {
    Tokenizer::open(&repository("demo/model/tokenizer.json")).unwrap()
}

/// Text that `anec run` generates for a prompt.
fn run_text(prompt: &str, max_tokens: u32) -> String {
    let count = max_tokens.to_string();
    let arguments = ["run", bundle().to_str().unwrap(), "--prompt", prompt, "--max-tokens", &count, "--json"];
    let (code, stdout, stderr) = run(&arguments);
    assert_eq!(code, 0, "{stderr}");
    serde_json::from_str::<Json>(&stdout).unwrap()["text"].as_str().unwrap().to_owned()
}

#[test]
fn a_completion_is_what_run_writes() {
    let prompt = "It was a dark night";
    let answer = server().complete(json!({"model": "demo", "prompt": prompt, "max_tokens": 24, "temperature": 0}));
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], run_text(prompt, 24));
    assert_eq!(
        (&choice["finish_reason"], &choice["logprobs"], &choice["index"]),
        (&json!("length"), &Json::Null, &json!(0))
    );
    assert_eq!((&answer["object"], &answer["model"]), (&json!("text_completion"), &json!("demo")));
    let prompt_tokens = tokenizer().encode(prompt).unwrap().len();
    assert_eq!(answer["usage"]["prompt_tokens"], prompt_tokens);
    assert_eq!(answer["usage"]["completion_tokens"], 24);
    assert_eq!(answer["usage"]["total_tokens"], prompt_tokens + 24);
    for time in ["prefill_tps", "decode_tps", "ttft_ms", "elapsed_s", "total_ms", "inference_ms"] {
        assert!(answer["anec"][time].as_f64().unwrap() > 0.0, "{time}: {answer}");
    }
}

/// Prompts on the bundle and on a server with OpenAI's API, which is our own here.
#[test]
fn a_suite_from_a_file_is_compared_with_a_server() {
    let server = server();
    let room = tempfile::tempdir().unwrap();
    let file = room.path().join("prompts.json");
    let prompts = json!([
        {"name": "short", "prompt": "It was", "max_tokens": 4},
        {"name": "longer", "prompt": "It was a dark night, and the house was silent", "max_tokens": 9},
    ]);
    std::fs::write(&file, prompts.to_string()).unwrap();
    let (file, url) = (file.to_str().unwrap(), format!("http://{}/v1", server.address));
    let words = ["bench", bundle().to_str().unwrap(), "--suite", file, "--warmup", "0", "--precision", "f32"];
    let (code, stdout, stderr) = run(&[&words[..], &["--repetitions", "2", "--compare", &url, "--json"]].concat());
    assert_eq!(code, 0, "{stderr}");
    let bench: Json = serde_json::from_str(&stdout).unwrap();
    assert_eq!((&bench["gates"], &bench["compared"]["model"]), (&json!("not recorded"), &json!("demo")));
    for (own, other) in bench["suite"].as_array().unwrap().iter().zip(bench["compared"]["suite"].as_array().unwrap()) {
        for key in ["name", "runs", "text", "gen_tokens", "prompt_tokens", "same_text"] {
            assert_eq!(own[key], other[key], "{key}");
        }
        assert!(other["ttft_ms"].as_f64().unwrap() > 0.0 && other["decode_tps"].as_f64().unwrap() > 0.0, "{other}");
    }
    assert!(bench["averages"]["consistency"].as_f64().unwrap() <= 1.0);
    let (code, stdout, _) = run(&[&words[..], &["--repetitions", "1", "--compare", &url]].concat());
    assert!(
        code == 0 && stdout.contains(&format!("demo on {url}")) && stdout.matches("means: ").count() == 2,
        "{stdout}"
    );
    // what isn't a suite, and what isn't a server
    std::fs::write(file, "[]").unwrap();
    let (code, _, stderr) = run(&words);
    assert!(code == 4 && stderr.contains("it has no prompts"), "{stderr}");
    let (code, _, stderr) = run(&["bench", bundle().to_str().unwrap(), "--suite", "--compare", "https://x"]);
    assert!(code == 5 && stderr.contains("expected an address that begins with http://"), "{stderr}");
}

#[test]
fn a_model_without_a_chat_template_names_the_route_that_it_has() {
    let room = tempfile::tempdir().unwrap();
    let (source, out) = (room.path().join("model"), room.path().join("plain.anec"));
    model::copy(&repository("demo/model"), &source);
    edit_json(&source.join("tokenizer_config.json"), |config| {
        config.as_object_mut().unwrap().remove("chat_template");
    });
    let names = [&source, &out].map(|path| path.to_str().unwrap());
    let convert = ["convert", "-m", "demo", "--source", names[0], "--out", names[1], "--no-compile", "--no-measure"];
    assert_eq!(run(&convert).0, 0);
    for words in [&["chat", names[1]][..], &["run", names[1], "--prompt", "x", "--chat"]] {
        let (code, _, stderr) = run(words);
        assert!(code == 2 && stderr.contains("the model has no chat template"), "{stderr}");
        assert!(stderr.contains("help: `anec run --prompt` without --chat continues a text as it is"), "{stderr}");
    }
    let server = Server::start(&out, &[]);
    let message = |path: &str, request: Json| {
        let reply = server.post(path, &request);
        assert_eq!(reply.status, 400);
        reply.json()["error"]["message"].as_str().unwrap().to_owned()
    };
    let said = message("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "Hi"}]}));
    assert_eq!(said, "this model has no chat template: /v1/completions continues a `prompt`");
    let said = message("/v1/completions", json!({"prompt": "Hi", "system": "Be kind."}));
    assert!(said.ends_with("give a `prompt` without `system`, which is continued"), "{said}");
}

#[test]
fn streamed_parts_make_the_whole_answer() {
    for (path, mut request) in [
        ("/v1/completions", json!({"prompt": "The lady", "logprobs": 2})),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "Hello"}], "logprobs": true, "top_logprobs": 3}),
        ),
    ] {
        for (key, value) in
            [("max_tokens", json!(40)), ("n", json!(3)), ("seed", json!(5)), ("stop", json!([" the", "and"]))]
        {
            request[key] = value;
        }
        let whole = server().post(path, &request).json();
        request["stream"] = json!(true);
        request["stream_options"] = json!({"include_usage": true});
        let parts = server().post(path, &request).parts();
        let (last, parts) = parts.split_last().unwrap();
        assert_eq!(last["choices"], json!([]));
        assert_eq!(last["usage"]["completion_tokens"], whole["usage"]["completion_tokens"]);
        assert_eq!(last["usage"]["prompt_tokens"], whole["usage"]["prompt_tokens"]);
        let mut texts = vec![String::new(); 3];
        let mut finishes = vec![Json::Null; 3];
        let mut likely: Vec<Vec<f64>> = vec![Vec::new(); 3];
        let chat = path.contains("chat");
        let numbers = |logprobs: &Json| -> Vec<f64> {
            let list = if chat { &logprobs["content"] } else { &logprobs["token_logprobs"] };
            let number = |entry: &Json| if chat { entry["logprob"].as_f64() } else { entry.as_f64() };
            list.as_array().into_iter().flatten().filter_map(number).collect()
        };
        for part in parts {
            assert_eq!(part["usage"], Json::Null);
            let choice = &part["choices"][0];
            let index = choice["index"].as_u64().unwrap() as usize;
            assert_eq!(finishes[index], Json::Null, "nothing follows the end");
            let text = if chat { &choice["delta"]["content"] } else { &choice["text"] };
            texts[index] += text.as_str().unwrap_or_default();
            likely[index].extend(numbers(&choice["logprobs"]));
            finishes[index] = choice["finish_reason"].clone();
        }
        for index in 0..3 {
            let choice = &whole["choices"][index];
            let text = if chat { &choice["message"]["content"] } else { &choice["text"] };
            assert_eq!(*text, texts[index]);
            assert_eq!(choice["finish_reason"], finishes[index]);
            let expected = numbers(&choice["logprobs"]);
            assert!(!expected.is_empty() || texts[index].is_empty());
            // what is reused of a prompt was computed in other calls: the last digits differ
            let far = expected.iter().zip(&likely[index]).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(expected.len() == likely[index].len() && far < 1e-3, "{expected:?} {:?}", likely[index]);
            assert!(expected.iter().all(|logprob| *logprob <= 0.0));
            assert!(!texts[index].contains(" the") && !texts[index].contains("and"), "{:?}", texts[index]);
        }
        assert!(texts[0] != texts[1] || texts[1] != texts[2], "several texts differ: {texts:?}");
    }
}

#[test]
fn logprobs_are_logarithms_of_probabilities_and_name_the_greedy_token_first() {
    let request = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0, "logprobs": true, "top_logprobs": 5});
    let answer = server().chat(request);
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 8);
    let mut text = Vec::new();
    for token in content {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 5);
        assert_eq!((&top[0]["token"], &top[0]["logprob"]), (&token["token"], &token["logprob"]));
        let sum: f64 = top.iter().map(|top| top["logprob"].as_f64().unwrap().exp()).sum();
        assert!(sum > 0.0 && sum <= 1.0 + 1e-6, "{sum}");
        text.extend(token["bytes"].as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8));
    }
    assert_eq!(answer["choices"][0]["message"]["content"], String::from_utf8(text).unwrap());
}

#[test]
fn a_stop_string_ends_the_text_before_it() {
    let whole = run_text("It was a dark night", 24);
    let stop = whole.split(' ').rev().nth(3).unwrap();
    let before = &whole[..whole.find(stop).unwrap()];
    let request = json!({"prompt": "It was a dark night", "max_tokens": 24, "temperature": 0, "stop": stop});
    let answer = server().complete(request);
    assert_eq!(answer["choices"][0]["text"], before);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
}

#[test]
fn seeds_reproduce_texts_and_several_texts_share_their_prompt() {
    let prompt = "Once upon a time there lived in the old town by the sea a man who";
    let ask = |seed: u64| {
        server().complete(json!({"prompt": prompt, "max_tokens": 16, "n": 3, "seed": seed, "temperature": 1}))
    };
    let texts = |answer: &Json| -> Vec<String> {
        answer["choices"].as_array().unwrap().iter().map(|choice| choice["text"].to_string()).collect()
    };
    let [first, again, other] = [11, 11, 12].map(ask);
    assert_eq!(texts(&first), texts(&again));
    assert_ne!(texts(&first), texts(&other));
    assert_eq!(texts(&first)[1], texts(&other)[0], "the second text of a seed is the first of the next seed");
    let prompt_tokens = first["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], prompt_tokens - 1);
}

#[test]
fn a_conversation_goes_on_without_computing_its_past_again() {
    let server = Server::start(bundle(), &[]);
    let mut messages = vec![json!({"role": "user", "content": "Tell me about the sea and the ships that sail on it"})];
    let mut cached = Vec::new();
    for _ in 0..3 {
        let request = json!({"messages": messages, "max_tokens": 12, "temperature": 0});
        let answer = server.chat(request.clone());
        let fresh = Server::start(bundle(), &["--kept", "0"]).chat(request);
        assert_eq!(answer["choices"], fresh["choices"]);
        cached.push(answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap());
        messages.push(answer["choices"][0]["message"].clone());
        messages.push(json!({"role": "user", "content": "And then?"}));
    }
    assert_eq!(cached[0], 0);
    assert!(cached[1] > 15 && cached[2] > cached[1] + 5, "{cached:?}");
}

#[test]
fn guesses_leave_the_answer_as_it_is() {
    let ask = |speculation: u64| {
        let request = json!({"prompt": "The man said that the man said that the man", "max_tokens": 120, "temperature": 0, "speculation": speculation});
        server().complete(request)
    };
    let (plain, guessed) = (ask(0), ask(3));
    assert_eq!(plain["choices"], guessed["choices"]);
    assert_eq!(plain["anec"]["drafted_tokens"], 0);
    assert!(guessed["anec"]["drafted_tokens"].as_u64().unwrap() > 0);
}

#[test]
fn an_answer_keeps_to_a_json_schema() {
    let schema = json!({
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": false,
    });
    let format = json!({"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": true}});
    for seed in 0..3 {
        let request = json!({"messages": [{"role": "user", "content": "Who?"}], "seed": seed, "max_tokens": 200, "response_format": format});
        let answer = server().chat(request);
        let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
        assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{text}");
        let value: Json = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
        jsonschema::validate(&schema, &value).unwrap();
    }
    let wrong = json!({"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}});
    let reply = server().post("/v1/completions", &wrong);
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("response_format")));
}

#[test]
fn a_call_that_is_required_comes_as_one() {
    let parameters = json!({
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": false,
    });
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    let request = |more: Json| {
        let mut request = json!({
            "messages": [{"role": "user", "content": "Rain?"}], "tools": [tool("weather"), tool("tides")], "seed": 2, "max_tokens": 150,
        });
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        request
    };
    let named = json!({"tool_choice": {"type": "function", "function": {"name": "tides"}}});
    let answer = server().chat(request(named.clone()));
    let choice = &answer["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["content"]),
        (&json!("tool_calls"), &Json::Null),
        "{answer}"
    );
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!((&call["function"]["name"], &call["type"]), (&json!("tides"), &json!("function")));
    let arguments: Json = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    jsonschema::validate(&parameters, &arguments).unwrap();

    // the form of an answer is that of later ones, and of those that are no calls
    let form = json!({"type": "json_schema", "json_schema": {"name": "form", "schema": {"enum": ["wet", "dry"]}}});
    let mut formed = request(named.clone());
    formed["response_format"] = form.clone();
    assert_eq!(server().chat(formed)["choices"][0]["message"]["tool_calls"][0]["function"], call["function"]);
    for seed in 0..4 {
        let answer = server().chat(request(json!({"response_format": form, "seed": seed})));
        let message = &answer["choices"][0]["message"];
        match message["tool_calls"].get(0) {
            Some(call) => {
                let arguments = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
                jsonschema::validate(&parameters, &arguments).unwrap();
            }
            None => assert!(["\"wet\"", "\"dry\""].contains(&message["content"].as_str().unwrap()), "{answer}"),
        }
    }

    // the same in parts
    let mut streamed = request(named);
    streamed["stream"] = json!(true);
    let parts = server().post("/v1/chat/completions", &streamed).parts();
    let deltas: Vec<&Json> = parts.iter().map(|part| &part["choices"][0]["delta"]).collect();
    assert_eq!(deltas[0]["role"], "assistant");
    let calls: Vec<&Json> = deltas.iter().filter_map(|delta| delta["tool_calls"].get(0)).collect();
    // the name first, then the arguments as they are generated
    assert_eq!((&calls[0]["function"], &calls[0]["type"]), (&json!({"name": "tides", "arguments": ""}), &call["type"]));
    assert!(calls.len() > 4 && calls.iter().all(|part| part["index"] == 0), "{calls:?}");
    assert!(calls[0]["id"].is_string() && calls[1..].iter().all(|part| part.get("id").is_none()), "{calls:?}");
    let joined: String = calls.iter().map(|part| part["function"]["arguments"].as_str().unwrap()).collect();
    assert_eq!(serde_json::from_str::<Json>(&joined).unwrap(), arguments);
    assert!(deltas.iter().all(|delta| delta["content"].as_str().unwrap_or_default().is_empty()));
    assert_eq!(parts.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");

    // one that is cut has begun, and is no text
    streamed["max_tokens"] = json!(answer["usage"]["completion_tokens"].as_u64().unwrap() - 12);
    let parts = server().post("/v1/chat/completions", &streamed).parts();
    let last = &parts.last().unwrap()["choices"][0];
    assert_eq!(last["finish_reason"], "length");
    let deltas = || parts.iter().map(|part| &part["choices"][0]["delta"]);
    assert!(deltas().any(|delta| delta["tool_calls"][0]["function"]["name"] == "tides"), "{parts:?}");
    assert!(deltas().all(|delta| delta["content"].as_str().unwrap_or_default().is_empty()), "{parts:?}");

    // the conversation continues with the function's result
    let mut next = request(json!({"tool_choice": "none", "max_tokens": 4}));
    let messages = next["messages"].as_array_mut().unwrap();
    messages.push(choice["message"].clone());
    messages.push(json!({"role": "tool", "tool_call_id": call["id"], "content": "High."}));
    assert_eq!(server().chat(next)["choices"][0]["message"].get("tool_calls"), None);

    for (more, param) in
        [(json!({"tool_choice": "sometimes"}), "tool_choice"), (json!({"tools": [{"type": "retrieval"}]}), "tools")]
    {
        let reply = server().post("/v1/chat/completions", &request(more));
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)));
    }
}

/// The mistakes that earlier servers for the Neural Engine died of, or did as they were told in a prompt.
#[test]
fn what_other_servers_died_of() {
    let server = server();
    // 4096 tokens for a context of 512: refused before any work
    let before = server.metric("anec_prompt_tokens_total");
    let long = "one ".repeat(4096);
    for path in ["/v1/completions", "/v1/chat/completions"] {
        let body = json!({"prompt": long, "messages": [{"role": "user", "content": long}], "max_tokens": 50});
        let reply = server.post(path, &body);
        assert_eq!((reply.status, reply.code()), (400, json!("context_length_exceeded")), "{}", reply.text());
    }
    assert_eq!(server.metric("anec_prompt_tokens_total"), before);
    let full = server.complete(json!({"prompt": "one", "max_tokens": 512, "logit_bias": {"0": -100}}));
    assert_eq!(full["usage"]["total_tokens"], 512, "a text ends with the context");
    // a field's name inside a text is text
    let answer = server.complete(json!({"prompt": "\"max_tokens\": 400, \"temperature\": 9", "max_tokens": 3}));
    assert_eq!(answer["usage"]["completion_tokens"], 3);
    // control tokens in a user's text are letters
    let text = "a<|endoftext|>b";
    let literal = tokenizer().encode_literal(text).unwrap();
    assert!(!literal.contains(&0) && literal.len() > 5);
    let answer = server.complete(json!({"prompt": text, "max_tokens": 1}));
    assert_eq!(answer["usage"]["prompt_tokens"], literal.len());
    let special = server.complete(json!({"prompt": text, "max_tokens": 1, "special_tokens": true}));
    assert_eq!(special["usage"]["prompt_tokens"], 3);
    // escapes are decoded
    let escaped = server.raw(post("/v1/completions", r#"{"prompt": "\u00e9t\u00e9", "max_tokens": 1}"#, "").as_bytes());
    assert_eq!(escaped.json()["usage"]["prompt_tokens"], tokenizer().encode("été").unwrap().len());
    // their own fields are understood
    let answer = server.complete(json!({"prompt": "Who are you?", "system": "You are a sailor.", "max_tokens": 4}));
    let chat = "<system> You are a sailor.\n<user> Who are you?\n<assistant>";
    assert_eq!(answer["usage"]["prompt_tokens"], tokenizer().encode(chat).unwrap().len());
    assert_eq!(server.get("/health").json()["status"], "ok");
}

#[test]
fn a_silent_client_holds_up_nobody_and_is_hung_up_on() {
    let server = server();
    let mut silent: Vec<_> = (0..8).map(|_| server.connect()).collect();
    silent[0].write_all(b"POST /v1/completions HTTP/1.1\r\nContent-Le").unwrap();
    let mut body = server.connect();
    body.write_all(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\nConnection: close\r\n\r\n{\"prompt\"",
    )
    .unwrap();
    let start = Instant::now();
    assert_eq!(server.get("/health").status, 200);
    server.complete(json!({"prompt": "x", "max_tokens": 1}));
    assert!(start.elapsed() < Duration::from_secs(30));
    let reply = Reply::read(body);
    assert_eq!((reply.status, reply.code()), (408, json!("request_timeout")));
    let mut rest = Vec::new();
    silent[0].read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty() || rest.starts_with(b"HTTP/1.1 408"), "{}", String::from_utf8_lossy(&rest));
}

#[test]
fn wrong_requests_get_the_right_codes() {
    let server = server();
    let completion = |body: &str| server.raw(post("/v1/completions", body, "").as_bytes());
    for body in [
        "",
        "{",
        "nonsense",
        "[]",
        "{}",
        "{\"prompt\": 5}",
        "{\"prompt\": \"\"}",
        "{\"prompt\": []}",
        "{\"prompt\": [99999]}",
        "{\"prompt\": \"x\", \"max_tokens\": \"many\"}",
        "{\"prompt\": \"x\", \"max_tokens\": -2}",
        "{\"prompt\": \"x\", \"temperature\": -1}",
        "{\"prompt\": \"x\", \"n\": 0}",
        "{\"prompt\": \"x\", \"n\": 1000}",
        "{\"prompt\": \"x\", \"logprobs\": 99}",
        "{\"prompt\": \"x\", \"echo\": true, \"stream\": true}",
        "{\"prompt\": \"x\", \"suffix\": \"y\"}",
        "{\"prompt\": [\"a\", 5]}",
        "{\"prompt\": \"x\", \"grammar\": \"root ::= x\"}",
        "{\"prompt\": \"x\", \"min_tokens\": 3}",
        "{\"prompt\": \"x\", \"guided_regex\": \"a\", \"guided_json\": {}}",
        "{\"prompt\": \"\\ud800\"}",
    ] {
        let reply = completion(body);
        assert_eq!(reply.status, 400, "{body}: {}", reply.text());
        let error = &reply.json()["error"];
        assert_eq!(error["type"], "invalid_request_error");
        assert!(error["message"].as_str().unwrap().len() > 10, "{body}: {error}");
    }
    assert_eq!(completion("\u{fffd}\u{0}").status, 400);
    let chat = |body: Json| server.post("/v1/chat/completions", &body);
    let hello = json!([{"role": "user", "content": "Hi"}]);
    for body in [
        json!({"messages": []}),
        json!({"messages": "Hi"}),
        json!({"messages": [{"content": "Hi"}]}),
        json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        json!({"messages": hello, "top_logprobs": 3}),
        json!({"messages": hello, "logprobs": true, "top_logprobs": 30}),
        json!({"messages": hello, "tool_choice": "required"}),
        json!({"messages": hello, "functions": []}),
        json!({"messages": hello, "response_format": {"type": "xml"}}),
        json!({"messages": hello, "logit_bias": {"x": 1}}),
        json!({"messages": hello, "continue_final_message": true, "add_generation_prompt": true}),
    ] {
        let reply = chat(body.clone());
        assert_eq!(reply.status, 400, "{body}: {}", reply.text());
    }
    let other = chat(json!({"model": "gpt-5", "messages": hello, "max_tokens": 1}));
    assert_eq!(other.status, 200, "the only model answers to every name");
    let strict = Server::start(bundle(), &["--strict-model"]);
    let other = strict.post("/v1/chat/completions", &json!({"model": "gpt-5", "messages": hello}));
    assert_eq!((other.status, other.code()), (404, json!("model_not_found")));
    assert_eq!(server.get("/v1/nothing").status, 404);
    assert_eq!(server.get("/v1/nothing").code(), "unknown_url");
    assert_eq!(server.get("/v1/completions").status, 405);
    assert_eq!(server.get("/v1/models/other").status, 404);
    assert_eq!(server.raw(b"NONSENSE\r\n\r\n").status, 400);
}

#[test]
fn large_bodies_are_refused_whether_they_say_so_or_not() {
    let large = json!({"prompt": "x".repeat(300_000)}).to_string();
    let reply = server().raw(post("/v1/completions", &large, "").as_bytes());
    assert_eq!((reply.status, reply.code()), (413, json!("request_too_large")));
    let broken = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n";
    assert_eq!(server().raw(broken.as_bytes()).status, 400, "a broken body isn't a large one");
    let head =
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n";
    let chunked = format!("{head}{:x}\r\n{large}\r\n0\r\n\r\n", large.len());
    assert_eq!(server().raw(chunked.as_bytes()).status, 413);
    // one that announces more than it would ever send is refused at once
    let huge =
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 99999999999\r\n\r\n";
    assert_eq!(server().raw(huge).status, 413);
}

#[test]
fn models_health_metrics_and_the_page_are_there() {
    let server = server();
    let models = server.get("/v1/models").json();
    assert_eq!((&models["object"], &models["data"][0]["id"]), (&json!("list"), &json!("demo")));
    assert_eq!(models["data"][0]["max_model_len"], 512);
    assert_eq!(server.get("/v1/models/demo").json()["object"], "model");
    // a client whose base address lacks `/v1`
    assert_eq!(server.get("/models").json()["data"][0]["id"], "demo");
    let messages = json!([{"role": "user", "content": "Hi"}]);
    for (path, body, object) in [
        ("/completions", json!({"prompt": "It was", "max_tokens": 2}), "text_completion"),
        ("/chat/completions", json!({"messages": messages, "max_tokens": 2}), "chat.completion"),
        ("/responses", json!({"input": "Hi", "max_output_tokens": 16}), "response"),
    ] {
        assert_eq!(server.ask(path, &body)["object"], object);
    }
    let health = server.get("/health").json();
    assert_eq!((&health["status"], &health["mode"], &health["model"]), (&json!("ok"), &json!("http"), &json!("demo")));
    let page = server.get("/");
    assert!(page.text().contains("<!doctype html>") && page.head.contains("content-security-policy"), "{}", page.head);
    server.complete(json!({"prompt": "x", "max_tokens": 2}));
    for name in
        ["anec_generated_tokens_total", "anec_time_to_first_token_seconds_count", "process_resident_memory_bytes"]
    {
        assert!(server.metric(name) > 0.0, "{name}");
    }
    assert!(server.metric("anec_http_requests_total{route=\"/v1/completions\",status=\"200\"}") >= 1.0);
}

#[test]
fn a_key_is_asked_for_and_other_origins_are_let_in_only_when_told() {
    let keyed = Server::start(bundle(), &["--api-key", "secret", "--cors", "https://example.org"]);
    let body = json!({"prompt": "x", "max_tokens": 1}).to_string();
    let ask = |headers: &str| keyed.raw(post("/v1/completions", &body, headers).as_bytes());
    for headers in
        ["", "Authorization: Bearer wrong\r\n", "Authorization: secret\r\n", "Authorization: Bearer secret2\r\n"]
    {
        let reply = ask(headers);
        assert_eq!((reply.status, reply.code()), (401, json!("invalid_api_key")), "{headers}");
    }
    assert_eq!(ask("Authorization: Bearer secret\r\n").status, 200);
    assert_eq!((ask("X-Api-Key: secret\r\n").status, ask("X-Api-Key: other\r\n").status), (200, 401));
    assert_eq!((keyed.get("/metrics").status, keyed.get("/v1/models").status), (401, 401));
    assert_eq!(keyed.get("/health").status, 200);
    let preflight = |server: &Server, origin: &str| {
        let headers = format!(
            "Origin: {origin}\r\nAccess-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: x-stainless-os\r\n\
             Connection: close\r\n"
        );
        server.raw(format!("OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n").as_bytes()).head
    };
    let allowed = preflight(&keyed, "https://example.org");
    assert!(allowed.contains("access-control-allow-origin: https://example.org"), "{allowed}");
    assert!(allowed.contains("access-control-allow-headers: x-stainless-os"), "{allowed}");
    assert!(!preflight(&keyed, "https://example.com").contains("access-control-allow-origin"));
    assert!(!preflight(&server(), "https://example.org").contains("access-control-allow-origin"));
}

#[test]
fn pages_of_others_and_rebound_names_are_refused() {
    let server = server();
    let body = json!({"prompt": "x", "max_tokens": 1}).to_string();
    let ask = |host: &str, headers: &str| {
        let length = body.len();
        let head = format!("POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{headers}");
        server.raw(format!("{head}Content-Length: {length}\r\n\r\n{body}").as_bytes())
    };
    let own = format!("Origin: http://{}\r\n", server.address);
    for (host, headers) in [
        ("localhost", ""),
        ("127.0.0.1:80", "Content-Type: application/json; charset=utf-8\r\n"),
        (server.address.as_str(), own.as_str()),
        ("host.docker.internal:8000", ""),
        ("printer.local", ""),
    ] {
        let reply = ask(host, headers);
        assert_eq!(reply.status, 200, "{host} {headers}: {}", reply.text());
    }
    for (host, headers, status, code) in [
        ("evil.com", "", 403, "foreign_host"),
        ("localhost.evil.com:8000", "", 403, "foreign_host"),
        ("localhost", "Origin: http://evil.com\r\n", 403, "foreign_origin"),
        ("localhost", "Origin: null\r\n", 403, "foreign_origin"),
        ("evil.com@localhost", "", 400, ""),
        ("localhost", "Host: evil.com\r\n", 400, ""),
        ("localhost", "Content-Type: text/plain\r\n", 415, "unsupported_media_type"),
        ("localhost", "Content-Type: application/x-www-form-urlencoded\r\n", 415, "unsupported_media_type"),
    ] {
        let reply = ask(host, headers);
        let code = if code.is_empty() { Json::Null } else { json!(code) };
        assert_eq!((reply.status, reply.code()), (status, code), "{host} {headers}");
    }
    let named = Server::start(bundle(), &["--allow-host", "evil.com"]);
    let rebound = b"GET /metrics HTTP/1.1\r\nHost: evil.com:8000\r\nConnection: close\r\n\r\n";
    assert_eq!(named.raw(rebound).status, 200);
    let rebound = server.raw(b"GET /metrics HTTP/1.1\r\nHost: evil.com\r\nConnection: close\r\n\r\n");
    assert_eq!(rebound.status, 403);
    let open = Server::start(bundle(), &["--cors", "https://example.org"]);
    let body = post("/v1/completions", &body, "Origin: https://example.org\r\n");
    assert_eq!(open.raw(body.as_bytes()).status, 200);
}

/// Asks for more text than the send buffer of any system holds (16 texts of 0.6 MB), over a connection with a small
/// receive buffer, and reads nothing.
fn unread_stream(server: &Server) -> std::net::TcpStream {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let address: std::net::SocketAddr = server.address.parse().unwrap();
    socket.connect(&address.into()).unwrap();
    let body = json!({
        "messages": [{"role": "user", "content": "The sea"}], "n": 16, "stream": true, "logprobs": true, "top_logprobs": 20,
        "max_tokens": 450, "logit_bias": {"0": -100},
    });
    let mut stream = std::net::TcpStream::from(socket);
    stream.write_all(post("/v1/chat/completions", &body.to_string(), "").as_bytes()).unwrap();
    stream
}

#[test]
fn clients_that_dont_read_hold_up_nobody() {
    let server = Server::start(bundle(), &[]);
    let unread: Vec<_> = (0..4).map(|_| unread_stream(&server)).collect();
    server.wait_for("anec_active", |count| count >= 4.0);
    let start = Instant::now();
    for _ in 0..3 {
        server.complete(json!({"prompt": "x", "max_tokens": 1}));
        std::thread::sleep(Duration::from_millis(500));
    }
    // all texts of the others are paused now
    server.complete(json!({"prompt": "x", "max_tokens": 1}));
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    assert!(server.metric("anec_active") <= 8.0, "memory has an end");
    drop(unread);
}

#[test]
fn clients_that_dont_read_are_hung_up_on() {
    let server = Server::start(bundle(), &[]);
    let _unread: Vec<_> = (0..2).map(|_| unread_stream(&server)).collect();
    server.wait_for("anec_active", |count| count > 0.0);
    server.wait_for("anec_cancelled_total", |count| count > 0.0);
    server.wait_for("anec_active", |count| count == 0.0);
    server.wait_for("anec_waiting", |count| count == 0.0);
}

#[test]
fn what_cant_fit_is_refused_before_any_work() {
    let server = Server::start(bundle(), &[]);
    let long = "wonderful ".repeat(400_000);
    let body = json!({"prompt": long, "messages": [{"role": "user", "content": long}]});
    let before = server.metric("process_resident_memory_bytes");
    std::thread::scope(|scope| {
        for i in 0..12 {
            let (path, field) = [("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")][i % 2];
            let (server, body) = (&server, &body);
            scope.spawn(move || {
                let reply = server.post(path, &json!({field: body[field]}));
                let found = (reply.status, reply.code(), reply.json()["error"]["param"].clone());
                assert_eq!(found, (400, json!("context_length_exceeded"), json!(field)), "{}", reply.text());
            });
        }
    });
    let grown = server.metric("process_resident_memory_bytes") - before;
    assert!(grown < 300e6, "12 prompts of 4 MB took {} MB", grown / 1e6);
    let few = server.post("/v1/completions", &json!({"prompt": "one ".repeat(520)}));
    assert_eq!(few.json()["error"]["param"], "prompt");
}

#[test]
fn a_huge_grammar_is_refused_without_a_backtrace() {
    let server = Server::start(bundle(), &[]);
    let words: Vec<String> = (0..100_000).map(|i| format!("\"w{i}\"")).collect();
    for grammar in [format!("start: {}", words.join(" | ")), format!("start: {}", words[..6000].join(" | "))] {
        let body = json!({"prompt": "x", "max_tokens": 2, "response_format": {"type": "grammar", "grammar": grammar}});
        let start = Instant::now();
        let reply = server.post("/v1/completions", &body);
        let text = reply.text();
        assert!(reply.status == 400 || grammar.len() < 65536, "{text}");
        assert!(!text.contains("panic") && !text.contains("backtrace"), "{text}");
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    }
}

/// Each would take a compiler minutes or gigabytes; meanwhile everybody else is answered.
#[test]
fn grammars_that_explode_are_refused_and_hold_up_nobody() {
    let server = Server::start(bundle(), &["--parallel", "2"]);
    let number = |divisor: u64| json!({"type": "integer", "multipleOf": divisor});
    let rules: String = (0..800).map(|i| format!("r{i}: \"a\"? r{}?\n", i + 1)).collect();
    let lark = format!("start: r0\n{rules}r800: \"b\"?\n");
    let schema = |schema: Json| json!({"type": "json_schema", "json_schema": {"schema": schema}});
    let wide: serde_json::Map<String, Json> = (0..2000).map(|i| (format!("k{i}"), json!({"type": "string"}))).collect();
    let forms = [
        schema(number(9_999_991)),
        schema(number(99_991)),
        schema(json!({"allOf": [number(9973), number(9967)]})),
        schema(json!({"type": "object", "properties": {"a": {"items": number(123_457)}}})),
        json!({"type": "grammar", "grammar": lark}),
        json!({"type": "regex", "regex": "((a{1,500}b{1,500}){1,500}c){1,500}"}),
        schema(json!({"type": "string", "pattern": "^(a|b|ab){0,5000}(ba){0,5000}$", "minLength": 4000})),
        schema(json!({"type": "object", "properties": wide})),
    ];
    std::thread::scope(|scope| {
        for form in &forms {
            let server = &server;
            scope.spawn(move || {
                // one that is taken all the same is no mistake, if it doesn't take long
                let start = Instant::now();
                let reply =
                    server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 2, "response_format": form}));
                let shown: String = form.to_string().chars().take(100).collect();
                assert!([200, 400, 429].contains(&reply.status), "{shown}: {}", reply.text());
                assert!(start.elapsed() < Duration::from_secs(200), "{shown}: {:?}", start.elapsed());
            });
            // a client that asks and leaves
            let body = json!({"prompt": "x", "max_tokens": 2, "response_format": form}).to_string();
            server.connect().write_all(post("/v1/completions", &body, "").as_bytes()).unwrap();
        }
        for _ in 0..5 {
            let start = Instant::now();
            assert_eq!(server.get("/health").status, 200);
            server.complete(json!({"prompt": "x", "max_tokens": 1}));
            assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
        }
    });
    let memory = server.metric("process_resident_memory_bytes");
    assert!(memory < 1e9, "{} MB", memory / 1e6);
    let refused = server.post("/v1/completions", &json!({"prompt": "x", "response_format": schema(number(9_999_991))}));
    assert!(refused.text().contains("`multipleOf` is too large"), "{}", refused.text());
}

#[test]
fn several_prompts_are_several_answers() {
    let server = server();
    let ask = |prompt: Json| server.complete(json!({"prompt": prompt, "max_tokens": 5, "temperature": 0}));
    let text = |answer: &Json, index: usize| answer["choices"][index]["text"].clone();
    let both = ask(json!(["The sea", "A dog"]));
    assert_eq!(text(&both, 0), text(&ask(json!("The sea")), 0));
    assert_eq!(text(&both, 1), text(&ask(json!("A dog")), 0));
    assert_eq!((&both["choices"][1]["index"], &both["usage"]["completion_tokens"]), (&json!(1), &json!(10)));
    let ids = ["The sea", "A dog"].map(|text| tokenizer().encode(text).unwrap());
    assert_eq!(text(&ask(json!(ids)), 1), text(&both, 1));
    assert!(both["system_fingerprint"].as_str().unwrap().starts_with("fp_"));
}

/// As lm-eval asks: how likely is each token of a text?
#[test]
fn an_echo_says_how_likely_the_prompt_is() {
    let server = Server::start(bundle(), &["--precision", "f32"]);
    let first = json!({"prompt": "It was a dark night", "max_tokens": 6, "temperature": 0, "logprobs": 2});
    let written = server.complete(first.clone())["choices"][0].clone();
    let mut ids = tokenizer().encode("It was a dark night").unwrap();
    let before = ids.len();
    ids.extend(tokenizer().encode_rest(written["text"].as_str().unwrap()).unwrap());
    for max_tokens in [0, 1] {
        let body = json!({"prompt": [ids], "max_tokens": max_tokens, "temperature": 0, "logprobs": 2, "echo": true});
        let echo = server.complete(body)["choices"][0].clone();
        let whole = format!("It was a dark night{}", written["text"].as_str().unwrap());
        assert!(echo["text"].as_str().unwrap().starts_with(&whole), "{echo}");
        let numbers = echo["logprobs"]["token_logprobs"].as_array().unwrap();
        assert_eq!((numbers.len(), &numbers[0]), (ids.len() + max_tokens, &Json::Null));
        for (found, expected) in numbers[before..].iter().zip(written["logprobs"]["token_logprobs"].as_array().unwrap())
        {
            let (found, expected) = (found.as_f64().unwrap(), expected.as_f64().unwrap());
            assert!((found - expected).abs() < 1e-4, "{found} {expected}");
        }
        assert_eq!(echo["logprobs"]["top_logprobs"][1].as_object().unwrap().len(), 2);
    }
}

#[test]
fn reasoning_is_a_field_of_its_own() {
    let room = tempfile::tempdir().unwrap();
    let server = Server::start(&with_template(room.path(), CONSTANT_THINKING), &[]);
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "seed": 1});
    let message = server.chat(body.clone())["choices"][0]["message"].clone();
    assert!(!message["reasoning_content"].as_str().unwrap().is_empty(), "{message}");
    assert_eq!(message["content"], "", "the reasoning hasn't ended");
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let parts = server.post("/v1/chat/completions", &streamed).parts();
    assert_eq!(parts[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let delta = |part: &Json| part["choices"][0]["delta"]["reasoning_content"].as_str().unwrap_or_default().to_owned();
    assert_eq!(parts.iter().map(delta).collect::<String>(), message["reasoning_content"].as_str().unwrap());
}

#[test]
fn a_schemas_loose_parts_are_warnings_unless_it_is_strict() {
    let server = server();
    let ask = |strict: bool| {
        let schema = json!({"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "uniqueItems": true, "maxItems": 2});
        let form = json!({"type": "json_schema", "json_schema": {"strict": strict, "schema": schema}});
        server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 20, "response_format": form}))
    };
    let loose = ask(false);
    assert!(loose.json()["anec"]["warnings"][0].as_str().unwrap().contains("uniqueItems"), "{}", loose.text());
    let strict = ask(true);
    assert_eq!(strict.status, 400);
    assert!(strict.text().contains("uniqueItems") && !strict.text().contains("Unimplemented"), "{}", strict.text());
}

#[test]
fn options_of_serve_are_checked_and_a_name_is_a_name() {
    let named = Server::start(bundle(), &["--name", "another"]);
    assert_eq!(named.get("/v1/models").json()["data"][0]["id"], "another");
    let path = bundle().to_str().unwrap();
    for (option, value) in [
        ("--api-key", ""),
        ("--api-key", " key"),
        ("--cors", "not an origin"),
        ("--timeout", "0"),
        ("--max-body", "0"),
        ("--parallel", "0"),
    ] {
        let (code, _, stderr) = run(&["serve", path, "--port", "0", option, value]);
        assert!(code == 2 && stderr.contains(option), "{option} {value}: {stderr}");
    }
}

#[test]
fn answers_that_the_end_cuts_off_say_so() {
    let mut server = Server::start(bundle(), &["--parallel", "1"]);
    let body = json!({"prompt": "The", "max_tokens": 500, "n": 64, "stream": true, "logit_bias": {"0": -100}});
    let mut stream = server.connect();
    stream.write_all(post("/v1/completions", &body.to_string(), "").as_bytes()).unwrap();
    let mut beginning = [0; 256];
    stream.read_exact(&mut beginning).unwrap();
    server.terminate();
    // it listens no longer; the second signal ends answers, too
    while std::net::TcpStream::connect(&server.address).is_ok() {
        std::thread::sleep(Duration::from_millis(10));
    }
    server.terminate();
    let mut rest = String::new();
    BufReader::new(stream).read_to_string(&mut rest).unwrap();
    let error = rest.find("\"shutting_down\"").unwrap_or_else(|| panic!("{}", &rest[rest.len().saturating_sub(500)..]));
    assert!(rest[error..].contains("data: [DONE]"), "{}", &rest[error..]);
    assert_eq!(server.wait(), Some(0));
}

#[test]
fn sampling_parameters_of_the_command_line_have_the_ranges_of_the_server() {
    let path = bundle().to_str().unwrap();
    for (option, value) in [
        ("--min-p", "2"),
        ("--min-p", "-1"),
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--top-p", "2"),
        ("--repetition-penalty", "0"),
        ("--presence-penalty", "inf"),
        ("--frequency-penalty", "-3"),
    ] {
        let (code, _, stderr) = run(&["run", path, "--prompt", "a", option, value]);
        let field = option.trim_start_matches("--").replace('-', "_");
        assert!(code == 2 && stderr.contains(&format!("`{field}` is")), "{option} {value}: {stderr}");
    }
}

#[test]
fn perplexities_of_unlike_tokenizers_arent_compared() {
    let room = tempfile::tempdir().unwrap();
    let other = room.path().join("other.anec");
    let (code, _, stderr) = run(&["convert", "--manifest", "demo", "--no-compile", "--out", other.to_str().unwrap()]);
    assert_eq!(code, 0, "{stderr}");
    let [one, two] = [bundle(), &other].map(|path| path.to_str().unwrap());
    let ask = || run(&["perplexity", one, "--against", two, "--max-tokens", "32"]);
    let (code, _, stderr) = ask();
    assert_eq!(code, 0, "{stderr}");
    let tokenizer = "tests/fixtures/families/qwen2-tokenizer/tokenizer.json";
    std::fs::copy(repository(tokenizer), other.join("tokenizer.json")).unwrap();
    let (code, _, stderr) = ask();
    assert!(code == 2 && stderr.contains("can't be compared"), "{stderr}");
}

/// Asks for a long text in parts and reads the beginning.
fn begin_stream(server: &Server) -> std::net::TcpStream {
    let body = json!({"prompt": "The", "max_tokens": 500, "stream": true, "ignore_eos": true}).to_string();
    let mut stream = server.connect();
    stream.write_all(post("/v1/completions", &body, "").as_bytes()).unwrap();
    let mut beginning = [0; 256];
    stream.read_exact(&mut beginning).unwrap();
    assert!(beginning.starts_with(b"HTTP/1.1 200"));
    stream
}

#[test]
fn a_full_queue_says_so_and_a_client_that_leaves_makes_room() {
    let server = Server::start(bundle(), &["--parallel", "1", "--queue", "1"]);
    let first = begin_stream(&server);
    let body = json!({"prompt": "x", "max_tokens": 1});
    let many = |texts: u64| server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 1, "n": texts}));
    assert_eq!(many(2).code(), json!("queue_full"), "all texts of a request are taken, or none");
    let waiting = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| server.post("/v1/completions", &body));
        server.wait_for("anec_waiting", |count| count == 1.0);
        let refused = server.post("/v1/completions", &body);
        assert_eq!((refused.status, refused.code()), (429, json!("queue_full")));
        assert!(refused.head.contains("retry-after: 1"), "{}", refused.head);
        assert_eq!(server.get("/health").status, 200);
        // the client leaves: its text ends long before its 500 tokens, and the next begins
        drop(first);
        waiting.join().unwrap()
    });
    assert_eq!(waiting.status, 200);
    server.wait_for("anec_cancelled_total", |count| count == 1.0);
    server.wait_for("anec_active", |count| count == 0.0);
    assert_eq!(server.metric("anec_generated_tokens_total"), 1.0, "only the finished text counts");
    // who would wait in vain isn't told to try again
    let never = many(3);
    assert_eq!((never.status, never.json()["error"]["param"].clone()), (400, json!("n")));
}

#[test]
fn a_client_that_waits_for_a_whole_text_can_leave_too() {
    let server = Server::start(bundle(), &[]);
    let body = json!({"prompt": "The", "max_tokens": 500, "ignore_eos": true, "n": 4}).to_string();
    let mut stream = server.connect();
    stream.write_all(post("/v1/completions", &body, "").as_bytes()).unwrap();
    server.wait_for("anec_active", |count| count == 4.0);
    drop(stream);
    server.wait_for("anec_cancelled_total", |count| count == 4.0);
    server.wait_for("anec_active", |count| count == 0.0);
}

#[test]
fn a_text_that_takes_too_long_is_given_up() {
    let server = Server::start(bundle(), &["--timeout", "1", "--parallel", "1"]);
    let body = json!({"prompt": "The", "max_tokens": 500, "n": 64, "ignore_eos": true});
    let reply = server.post("/v1/completions", &body);
    assert_eq!((reply.status, reply.code()), (504, json!("timeout")));
}

#[test]
fn told_to_end_it_finishes_what_it_began() {
    let mut server = Server::start(bundle(), &[]);
    let stream = begin_stream(&server);
    server.terminate();
    let mut rest = String::new();
    BufReader::new(stream).read_to_string(&mut rest).unwrap();
    assert!(rest.contains("[DONE]") && rest.contains("\"finish_reason\":\"length\""), "{rest}");
    assert_eq!(server.wait(), Some(0));
    assert!(std::net::TcpStream::connect(&server.address).is_err());
}

#[test]
fn json_lines_over_stdin() {
    let mut child = anec()
        .arg("serve")
        .arg(bundle())
        .args(["--stdin", "--max-body", "5000"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = || lines.next().unwrap().unwrap();
    let mut input = child.stdin.take().unwrap();
    let ready = next();
    let ready: Json = serde_json::from_str(ready.strip_prefix("READY ").unwrap()).unwrap();
    assert_eq!((&ready["protocol"], &ready["transport"]), (&json!("anec-jsonl-v1"), &json!("stdin")));
    let ids = tokenizer().encode("It was a dark night").unwrap();
    writeln!(input, "{}", json!({"prompt_ids": ids, "max_new": 6, "temperature": 0, "id": "a"})).unwrap();
    let answer: Json = serde_json::from_str(&next()).unwrap();
    assert_eq!((&answer["ok"], &answer["id"], &answer["gen_tokens"]), (&json!(true), &json!("a"), &json!(6)));
    assert_eq!(answer["text"], run_text("It was a dark night", 6));
    assert_eq!(answer["cache_seq_len"], ids.len() + 6);
    // the tokens of the next request follow those before
    writeln!(input, "{}", json!({"prompt_ids": [5, 6], "reset": false, "max_new": 2})).unwrap();
    let further: Json = serde_json::from_str(&next()).unwrap();
    assert_eq!(
        (&further["prompt_tokens"], &further["timing"]["cached_tokens"]),
        (&json!(ids.len() + 8), &json!(ids.len() + 5))
    );
    // parts, then the whole
    writeln!(input, "{}", json!({"prompt": "It was a dark night", "max_tokens": 6, "temperature": 0, "stream": true}))
        .unwrap();
    let mut parts = String::new();
    let whole = loop {
        let line: Json = serde_json::from_str(&next()).unwrap();
        match line.get("delta") {
            Some(delta) => parts += delta.as_str().unwrap(),
            None => break line,
        }
    };
    assert_eq!((&whole["text"], parts.as_str()), (&answer["text"], answer["text"].as_str().unwrap()));
    // the short form
    let short: Vec<String> = ids.iter().map(u32::to_string).collect();
    writeln!(input, "{}|6", short.join(" ")).unwrap();
    let expected: Vec<String> = answer["output"].as_array().unwrap().iter().map(Json::to_string).collect();
    assert_eq!(next(), format!("OUT: {}", expected.join(" ")));
    assert!(next().starts_with("PERF: prefill="));
    // mistakes end nothing
    for wrong in ["{", "{\"tokens\": []}", "{\"tokens\": [99999]}"] {
        writeln!(input, "{wrong}").unwrap();
        let answer: Json = serde_json::from_str(&next()).unwrap();
        assert_eq!(answer["ok"], false, "{wrong}");
        assert!(answer["error"].as_str().unwrap().len() > 10, "{answer}");
    }
    writeln!(input, "{}", json!({"prompt": "x", "max_tokens": 1})).unwrap();
    assert_eq!(serde_json::from_str::<Json>(&next()).unwrap()["ok"], true);
    drop(input);
    assert!(child.wait().unwrap().success());
}

#[cfg(unix)]
#[test]
fn json_lines_over_a_socket_for_several_clients() {
    use std::os::unix::net::UnixStream;
    let room = tempfile::tempdir().unwrap();
    // where there is no room for one
    let nowhere = room.path().join("missing/anec.sock");
    let (code, _, stderr) = run(&["serve", bundle().to_str().unwrap(), "--socket", nowhere.to_str().unwrap()]);
    assert!(code == 5 && stderr.contains("choose another path for --socket"), "{code}: {stderr}");
    let path = room.path().join("anec.sock");
    let mut child =
        anec().arg("serve").arg(bundle()).arg("--socket").arg(&path).stdout(Stdio::piped()).spawn().unwrap();
    let mut ready = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    assert!(ready.contains("unix-socket"), "{ready}");
    // a request in pieces, while another client is silent
    let _silent = UnixStream::connect(&path).unwrap();
    let ask = |pieces: &[&str]| {
        let mut stream = UnixStream::connect(&path).unwrap();
        for piece in pieces {
            stream.write_all(piece.as_bytes()).unwrap();
            std::thread::sleep(Duration::from_millis(30));
        }
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        serde_json::from_str::<Json>(&line).unwrap()
    };
    let answer = ask(&["{\"tokens\": [47, 1024, ", "880], \"max_tokens\": 4, \"temp", "erature\": 0}\n"]);
    assert_eq!((&answer["ok"], answer["output"].as_array().unwrap().len()), (&json!(true), 4), "{answer}");
    assert_eq!(ask(&["{\"tokens\": []}\n"])["ok"], false);
    let status = Command::new("/bin/kill").arg(child.id().to_string()).status().unwrap();
    assert!(status.success() && child.wait().unwrap().success());
    assert!(!path.exists(), "the socket is gone with its server");
}

/// The greedy text of each prompt is known beforehand; whatever else happens, it is the text that comes.
#[test]
fn many_clients_get_right_texts_and_nothing_piles_up() {
    let seconds = std::env::var("ANEC_LOAD_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(4.0);
    let server = Server::start(bundle(), &["--parallel", "8", "--queue", "40"]);
    let request = |i: usize| {
        let prompt = format!("In the year {} there was a", 1800 + i);
        json!({"prompt": prompt, "max_tokens": 4 + i % 5, "temperature": 0, "stream": i.is_multiple_of(2)})
    };
    let expected: Vec<Json> = (0..16)
        .map(|i| {
            let mut request = request(i);
            request["stream"] = json!(false);
            server.complete(request)["choices"][0]["text"].clone()
        })
        .collect();
    let resident = || server.metric("process_resident_memory_bytes");
    let load = |seconds: f64| {
        let end = Instant::now() + Duration::from_secs_f64(seconds);
        let client = |number: usize| {
            let (mut done, mut refused, mut left, mut slowest) = (0usize, 0usize, 0usize, Duration::ZERO);
            for turn in 0.. {
                if Instant::now() > end {
                    break;
                }
                let i = (number * 7 + turn) % 16;
                if (number + turn).is_multiple_of(9) {
                    // one in nine leaves without waiting
                    let mut stream = server.connect();
                    stream.write_all(post("/v1/completions", &request(i).to_string(), "").as_bytes()).unwrap();
                    left += 1;
                    continue;
                }
                let start = Instant::now();
                let reply = server.post("/v1/completions", &request(i));
                match reply.status {
                    200 => {
                        let text = if i.is_multiple_of(2) {
                            let parts = reply.parts();
                            Json::String(parts.iter().filter_map(|part| part["choices"][0]["text"].as_str()).collect())
                        } else {
                            reply.json()["choices"][0]["text"].clone()
                        };
                        assert_eq!(text, expected[i]);
                        done += 1;
                        slowest = slowest.max(start.elapsed());
                    }
                    429 => {
                        refused += 1;
                        std::thread::sleep(Duration::from_millis(50));
                    }
                    other => panic!("{other}: {}", reply.text()),
                }
            }
            (done, refused, left, slowest)
        };
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..64).map(|number| scope.spawn(move || client(number))).collect();
            clients.into_iter().map(|client| client.join().unwrap()).collect::<Vec<_>>()
        })
    };
    load(seconds / 4.0);
    let before = resident();
    let results = load(seconds);
    server.wait_for("anec_active", |count| count == 0.0);
    server.wait_for("anec_waiting", |count| count == 0.0);
    let after = resident();
    let total = |of: fn(&(usize, usize, usize, Duration)) -> usize| results.iter().map(of).sum::<usize>();
    let (done, refused, left) = (total(|r| r.0), total(|r| r.1), total(|r| r.2));
    let slowest = results.iter().map(|result| result.3).max().unwrap();
    let line = format!(
        "{done} texts, {refused} refused, {left} clients left; slowest {slowest:.1?}; memory {:.1} MB, then {:.1} MB\n",
        before / 1e6,
        after / 1e6
    );
    let _ = std::io::stderr().write_all(line.as_bytes());
    assert!(done > 64 && left > 0, "{line}");
    assert!(results.iter().all(|result| result.0 + result.1 > 0), "every client was answered: {results:?}");
    assert!(after < before * 1.25 + 20e6, "memory grows: {line}");
    assert!(slowest < Duration::from_secs(30), "{line}");
}

#[test]
#[cfg(target_os = "linux")]
fn a_server_that_nobody_asks_takes_no_processor_time() {
    let server = server();
    // threads that have worked look for more before they sleep
    server.complete(json!({"prompt": "It was", "max_tokens": 4}));
    std::thread::sleep(Duration::from_millis(500));
    let before = server.ticks();
    std::thread::sleep(Duration::from_millis(1500));
    let taken = server.ticks() - before;
    assert!(taken <= 2, "{taken} ticks in 150");
}

#[test]
fn the_official_client_works() {
    client::check(&server(), "demo");
}

#[test]
fn the_official_clients_of_other_apis_work() {
    client::run("tests/ollama_client.py", &Server::start(crate::verbs::bundle(), &[]), "demo");
    client::run("tests/anthropic_client.py", &server(), "demo");
}

#[test]
fn the_official_client_talks_with_a_real_model() {
    let Some(source) = testing::real_model("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf") else { return };
    let room = tempfile::tempdir().unwrap();
    let out = room.path().join("qwen.anec");
    let arguments =
        ["convert", "--no-measure", "--manifest", "qwen2.5-coder-0.5b", "--source", source.to_str().unwrap()];
    let (code, _, stderr) = run(&[&arguments[..], &["--out", out.to_str().unwrap()]].concat());
    assert_eq!(code, 0, "{stderr}");
    client::check(&Server::start(&out, &[]), "qwen2.5-coder-0.5b");
}
