//! Anthropic's API of `anec serve`.

use crate::common::http::{Reply, Server, post};
use crate::serve::{CONSTANT_THINKING, OPTIONAL_THINKING, bundle, server, with_template};

use serde_json::{Value as Json, json};

fn request(text: &str, more: Json) -> Json {
    let mut body = json!({"model": "demo", "max_tokens": 24, "messages": [{"role": "user", "content": text}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Answer to a request that must succeed.
fn ask(server: &Server, body: &Json) -> Json {
    server.ask("/v1/messages", body)
}

/// Events of a streamed answer, each under its name.
pub fn events(reply: &Reply) -> Vec<Json> {
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert!(reply.head.contains("text/event-stream"), "{}", reply.head);
    let text = reply.text();
    let blocks = text.split("\n\n").filter(|block| block.starts_with("event: "));
    let event = |block: &str| {
        let (name, data) = block.split_once("\ndata: ").unwrap();
        let event: Json = serde_json::from_str(data).unwrap();
        assert_eq!(event["type"].as_str().unwrap(), name.strip_prefix("event: ").unwrap());
        event
    };
    blocks.map(event).collect()
}

/// Names of the events; equal names that follow each other are one.
pub fn kinds(events: &[Json]) -> Vec<&str> {
    let mut kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    kinds.dedup();
    kinds
}

/// Parameters of a function.
fn schema() -> Json {
    json!({
        "type": "object", "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["days"], "additionalProperties": false,
    })
}

fn tool(name: &str) -> Json {
    json!({"name": name, "description": "", "input_schema": schema()})
}

#[test]
fn messages_are_those_of_openais_api() {
    let server = server();
    let messages = json!([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]);
    let same = server.chat(json!({"messages": messages, "max_tokens": 24, "temperature": 0}));
    let text = same["choices"][0]["message"]["content"].as_str().unwrap();
    let blocks = json!([{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]);
    for system in [json!("Be kind."), blocks] {
        let answer = ask(&server, &request("Hello", json!({"system": system, "temperature": 0})));
        assert_eq!(answer["content"], json!([{"type": "text", "text": text}]));
        assert_eq!(
            (&answer["type"], &answer["role"], &answer["model"]),
            (&json!("message"), &json!("assistant"), &json!("demo"))
        );
        assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!("max_tokens"), &Json::Null));
        let usage = &answer["usage"];
        let prompt = usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap();
        assert_eq!((json!(prompt), &usage["output_tokens"]), (same["usage"]["prompt_tokens"].clone(), &json!(24)));
    }
    let mut counted = request("Hello", json!({"system": "Be kind."}));
    counted.as_object_mut().unwrap().remove("max_tokens");
    let count = server.post("/v1/messages/count_tokens", &counted).json();
    assert_eq!(count, json!({"input_tokens": same["usage"]["prompt_tokens"]}));

    let parts = events(
        &server
            .post("/v1/messages", &request("Hello", json!({"system": "Be kind.", "temperature": 0, "stream": true}))),
    );
    assert_eq!(
        kinds(&parts),
        [
            "message_start",
            "ping",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop"
        ]
    );
    let joined: String = parts.iter().filter_map(|part| part["delta"]["text"].as_str()).collect();
    assert_eq!(joined, text);
    assert_eq!(parts[0]["message"]["usage"]["input_tokens"], same["usage"]["prompt_tokens"]);
    let delta = &parts[parts.len() - 2];
    assert_eq!((&delta["delta"]["stop_reason"], &delta["usage"]["output_tokens"]), (&json!("max_tokens"), &json!(24)));
}

#[test]
fn a_stop_sequence_is_named() {
    let server = server();
    let body = |more: Json| request("Hello", json!({"temperature": 0, "stop_sequences": more}));
    let whole = ask(&server, &body(json!([])))["content"][0]["text"].as_str().unwrap().to_owned();
    let stop = whole.split(' ').rev().nth(3).unwrap();
    let answer = ask(&server, &body(json!(["\u{1}never", stop])));
    assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!("stop_sequence"), &json!(stop)));
    assert_eq!(answer["content"][0]["text"], whole[..whole.find(stop).unwrap()]);
}

#[test]
fn a_text_of_the_assistant_is_continued() {
    let server = server();
    let messages = json!([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "It was a"}]);
    let body = json!({"messages": messages, "max_tokens": 8, "temperature": 0});
    let mut same = body.clone();
    (same["continue_final_message"], same["add_generation_prompt"]) = (json!(true), json!(false));
    let answer = ask(&server, &body);
    assert_eq!(answer["content"][0]["text"], server.chat(same)["choices"][0]["message"]["content"]);
}

#[test]
fn a_tool_that_is_chosen_is_called_and_its_result_taken() {
    let server = server();
    let more = json!({
        "tools": [tool("weather"), tool("tides")], "tool_choice": {"type": "tool", "name": "tides"}, "max_tokens": 150,
    });
    let answer = ask(&server, &request("Rain?", more.clone()));
    assert_eq!(answer["stop_reason"], "tool_use", "{answer}");
    let call = &answer["content"][0];
    assert_eq!((&call["type"], &call["name"]), (&json!("tool_use"), &json!("tides")));
    jsonschema::validate(&schema(), &call["input"]).unwrap();

    let mut streamed = request("Rain?", more);
    streamed["stream"] = json!(true);
    let parts = events(&server.post("/v1/messages", &streamed));
    let start = parts.iter().find(|part| part["type"] == "content_block_start").unwrap();
    assert_eq!((&start["content_block"]["name"], &start["content_block"]["input"]), (&json!("tides"), &json!({})));
    let deltas: Vec<&str> = parts.iter().filter_map(|part| part["delta"]["partial_json"].as_str()).collect();
    assert!(deltas.len() > 2, "{deltas:?}");
    let arguments = deltas.concat();
    jsonschema::validate(&schema(), &serde_json::from_str(&arguments).unwrap()).unwrap();
    assert!(parts.iter().any(|part| part["delta"]["stop_reason"] == "tool_use"));

    let messages = json!([
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "None."}]},
            {"type": "text", "text": "So?"},
        ]},
    ]);
    let any =
        json!({"messages": messages, "tools": [tool("tides")], "tool_choice": {"type": "any"}, "max_tokens": 150});
    assert_eq!(ask(&server, &any)["stop_reason"], "tool_use");
    let none =
        json!({"messages": messages, "tools": [tool("tides")], "tool_choice": {"type": "none"}, "max_tokens": 5});
    assert_eq!(ask(&server, &none)["stop_reason"], "max_tokens");
}

#[test]
fn an_answer_keeps_to_a_schema() {
    let format = json!({"output_config": {"format": {"type": "json_schema", "schema": schema()}}, "max_tokens": 100});
    let answer = ask(&server(), &request("Days?", format));
    let text = answer["content"][0]["text"].as_str().unwrap();
    jsonschema::validate(&schema(), &serde_json::from_str(text).unwrap()).unwrap();
    assert_eq!(answer["stop_reason"], "end_turn");
}

#[test]
fn thinking_is_a_block_and_off_by_default() {
    let room = tempfile::tempdir().unwrap();
    let server = Server::start(&with_template(room.path(), OPTIONAL_THINKING), &[]);
    let body = |more: Json| {
        let mut body = request("Hi", json!({"max_tokens": 8, "temperature": 0}));
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    for more in [json!({}), json!({"thinking": {"type": "disabled"}})] {
        assert_eq!(ask(&server, &body(more))["content"][0]["type"], "text");
    }
    let enabled = json!({"thinking": {"type": "enabled", "budget_tokens": 1024}});
    let block = ask(&server, &body(enabled.clone()))["content"][0].clone();
    assert_eq!((&block["type"], &block["signature"]), (&json!("thinking"), &json!("")));
    assert_eq!(ask(&server, &body(json!({"thinking": {"type": "adaptive"}})))["content"][0], block);
    let mut streamed = body(enabled.clone());
    streamed["stream"] = json!(true);
    let parts = events(&server.post("/v1/messages", &streamed));
    let joined: String = parts.iter().filter_map(|part| part["delta"]["thinking"].as_str()).collect();
    assert_eq!(joined, block["thinking"].as_str().unwrap());

    let refused = |server: &Server, more: Json| {
        let reply = server.post("/v1/messages", &body(more));
        assert_eq!(reply.status, 400);
        reply.json()["error"]["message"].as_str().unwrap().to_owned()
    };
    assert!(refused(&super::serve::server(), enabled).contains("doesn't think"));
    let room = tempfile::tempdir().unwrap();
    let always = Server::start(&with_template(room.path(), CONSTANT_THINKING), &[]);
    assert!(refused(&always, json!({"thinking": {"type": "disabled"}})).contains("always thinks"));
    assert_eq!(ask(&always, &body(json!({})))["content"][0]["type"], "thinking");
}

#[test]
fn errors_have_anthropics_form() {
    let server = Server::start(bundle(), &["--api-key", "secret", "--strict-model", "--max-body", "20000"]);
    let ask = |path: &str, body: &str, headers: &str| {
        let reply = server.raw(post(path, body, headers).as_bytes());
        let json = reply.json();
        assert_eq!(json["type"], "error", "{json}");
        let text = |field: &str| json["error"][field].as_str().unwrap().to_owned();
        (reply.status, text("type"), text("message"))
    };
    let key = "x-api-key: secret\r\nanthropic-version: 2023-06-01\r\n";
    for (more, problem) in [
        (json!({"max_tokens": null}), "`max_tokens` is required"),
        (json!({"max_tokens": 0}), "`max_tokens`"),
        (json!({"messages": []}), "`messages` is empty"),
        (json!({"messages": [{"role": "system", "content": "x"}]}), "\"system\""),
        (json!({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}), "\"image\""),
        (json!({"messages": [{"role": "user", "content": 1}]}), "content blocks"),
        (json!({"messages": [{"role": "assistant", "content": ""}]}), "continued"),
        (json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}), "web_search_20250305"),
        (json!({"tools": [{"name": "f"}]}), "`input_schema`"),
        (json!({"tool_choice": {"type": "any"}}), "`tools` has no function"),
        (json!({"tool_choice": {"type": "tool"}}), "`tool_choice`"),
        (json!({"thinking": {"type": "deep"}}), "`thinking`"),
        (json!({"mcp_servers": [{"url": "x"}]}), "`mcp_servers`"),
        (json!({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}), "`context_management`"),
        (json!({"output_config": {"format": {"type": "xml"}}}), "`output_config.format`"),
        (json!({"top_p": 2}), "`top_p` is 2"),
        (json!({"stop_sequences": vec!["x"; 17]}), "`stop_sequences` has 17 strings"),
    ] {
        let (status, kind, message) = ask("/v1/messages", &request("Hi", more.clone()).to_string(), key);
        assert!(status == 400 && kind == "invalid_request_error" && message.contains(problem), "{more}: {message}");
    }
    let neutral = json!({
        "metadata": {"user_id": "x"}, "service_tier": "auto", "tools": [], "mcp_servers": [], "container": null, "max_tokens": 1,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    });
    let reply = server.raw(post("/v1/messages?beta=true", &request("Hi", neutral).to_string(), key).as_bytes());
    assert_eq!(reply.status, 200, "{}", reply.text());
    let body = request("Hi", json!({})).to_string();
    for (path, body, headers, expected) in [
        ("/v1/messages", &*body, "", (401, "authentication_error")),
        ("/v1/messages", &*body, "x-api-key: wrong\r\n", (401, "authentication_error")),
        ("/v1/messages/count_tokens", "{", key, (400, "invalid_request_error")),
        ("/v1/messages", &*request("Hi", json!({"model": "other"})).to_string(), key, (404, "not_found_error")),
        ("/v1/messages", &*" ".repeat(30_000), key, (413, "request_too_large")),
    ] {
        let (status, kind, _) = ask(path, body, headers);
        assert_eq!((status, &*kind), expected);
    }
    assert_eq!(server.raw(post("/v1/other", "{}", key).as_bytes()).code(), "unknown_url", "others keep OpenAI's form");
}
