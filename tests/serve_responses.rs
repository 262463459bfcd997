//! OpenAI's API of responses of `anec serve`.

use crate::common::http::Server;
use crate::serve::{OPTIONAL_THINKING, server, with_template};
use crate::serve_messages::{events, kinds};

use serde_json::{Value as Json, json};

/// Answer to a request that must succeed.
fn ask(server: &Server, body: &Json) -> Json {
    server.ask("/v1/responses", body)
}

fn text_of(response: &Json) -> &str {
    let output = response["output"].as_array().unwrap();
    let message = output.iter().find(|item| item["type"] == "message").unwrap();
    message["content"][0]["text"].as_str().unwrap()
}

/// Names of the events without what all have in common.
fn steps(events: &[Json]) -> Vec<&str> {
    kinds(events).iter().map(|kind| kind.strip_prefix("response.").unwrap()).collect()
}

fn tool() -> Json {
    let parameters = json!({
        "type": "object", "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["days"], "additionalProperties": false,
    });
    json!({"type": "function", "name": "tides", "parameters": parameters, "strict": true})
}

#[test]
fn responses_are_chats_and_stream_the_same_text() {
    let server = server();
    let messages = json!([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]);
    let same = server.chat(json!({"messages": messages, "max_tokens": 24, "temperature": 0}));
    let text = same["choices"][0]["message"]["content"].as_str().unwrap();
    let items = json!([{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]);
    for input in [json!("Hello"), items] {
        let body = json!({"input": input, "instructions": "Be kind.", "max_output_tokens": 24, "temperature": 0});
        let response = ask(&server, &body);
        assert_eq!(
            (text_of(&response), &response["object"], &response["model"]),
            (text, &json!("response"), &json!("demo"))
        );
        assert_eq!(response["status"], "incomplete");
        assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
        assert_eq!(response["usage"]["input_tokens"], same["usage"]["prompt_tokens"]);
        assert_eq!(response["usage"]["output_tokens"], 24);
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        let parts = events(&server.post("/v1/responses", &streamed));
        let expected = [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "incomplete",
        ];
        assert_eq!(steps(&parts), expected);
        assert!(parts.iter().zip(0..).all(|(part, number)| part["sequence_number"] == number));
        let joined: String = parts.iter().filter_map(|part| part["delta"].as_str()).collect();
        assert_eq!(joined, text);
        let last = &parts.last().unwrap()["response"];
        assert_eq!((text_of(last), &last["usage"]["output_tokens"]), (text, &json!(24)));
    }
}

#[test]
fn a_conversation_goes_on_by_the_id_of_its_response() {
    let server = server();
    let ask_more = |more: Json| {
        let mut body = json!({"max_output_tokens": 12, "temperature": 0});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ask(&server, &body)
    };
    let first = ask_more(json!({"input": "Hello", "instructions": "Be kind."}));
    let second = ask_more(json!({"input": "And then?", "previous_response_id": first["id"]}));
    assert_eq!(second["previous_response_id"], first["id"]);
    let messages = json!([
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": text_of(&first)},
        {"role": "user", "content": "And then?"},
    ]);
    let whole = server.chat(json!({"messages": messages, "max_tokens": 12, "temperature": 0}));
    assert_eq!(text_of(&second), whole["choices"][0]["message"]["content"].as_str().unwrap());
    assert_eq!(second["usage"]["input_tokens"], whole["usage"]["prompt_tokens"], "instructions aren't carried over");
    let forgotten = ask_more(json!({"input": "Hello", "store": false}));
    for id in [forgotten["id"].clone(), json!("resp_unknown")] {
        let reply = server.post("/v1/responses", &json!({"input": "x", "previous_response_id": id}));
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("previous_response_id")));
    }
    // a stored response is given again, until it is deleted
    let path = format!("/v1/responses/{}", second["id"].as_str().unwrap());
    assert_eq!(server.get(&path).json(), second);
    let delete = |path: &str| {
        server.raw(format!("DELETE {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").as_bytes())
    };
    let deleted = delete(&path);
    let expected = json!({"id": second["id"], "object": "response", "deleted": true});
    assert_eq!((deleted.status, deleted.json()), (200, expected));
    let hidden = format!("/v1/responses/{}", forgotten["id"].as_str().unwrap());
    for reply in [server.get(&path), delete(&path), server.get(&hidden), server.get("/v1/responses/resp_unknown")] {
        let error = &reply.json()["error"];
        assert_eq!(
            (reply.status, &error["type"], &error["param"]),
            (404, &json!("invalid_request_error"), &json!("id"))
        );
        assert!(error["message"].as_str().unwrap().starts_with("there is no response `resp_"), "{error}");
    }
    // a streamed answer is kept, too
    let parts =
        events(&server.post("/v1/responses", &json!({"input": "Hello", "max_output_tokens": 4, "stream": true})));
    let id = &parts[0]["response"]["id"];
    assert_eq!(ask_more(json!({"input": "x", "previous_response_id": id}))["status"], "incomplete");
}

#[test]
fn calls_are_items_and_their_outputs_are_taken() {
    let server = server();
    let mut body = json!({"input": "Tides?", "tools": [tool()], "tool_choice": {"type": "function", "name": "tides"}});
    let response = ask(&server, &body);
    let call = &response["output"][0];
    assert_eq!(
        (&call["type"], &call["name"], &response["status"]),
        (&json!("function_call"), &json!("tides"), &json!("completed"))
    );
    let arguments: Json = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    jsonschema::validate(&tool()["parameters"], &arguments).unwrap();

    body["stream"] = json!(true);
    let parts = events(&server.post("/v1/responses", &body));
    let expected = [
        "created",
        "in_progress",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ];
    assert_eq!(steps(&parts), expected);
    assert_eq!(parts[3]["item_id"], parts[2]["item"]["id"]);
    let deltas: Vec<&str> = parts.iter().filter_map(|part| part["delta"].as_str()).collect();
    let done = |kind: &str| parts.iter().find(|part| part["type"] == kind).unwrap();
    assert!(deltas.len() > 2, "{deltas:?}");
    assert_eq!(done("response.function_call_arguments.done")["arguments"], deltas.concat());
    let item = &done("response.output_item.done")["item"];
    assert_eq!((&item["arguments"], &item["status"]), (&json!(deltas.concat()), &json!("completed")));

    let output = json!({"type": "function_call_output", "call_id": call["call_id"], "output": "none"});
    let items = json!([{"role": "user", "content": "Tides?"}, call, output]);
    let by_items = ask(&server, &json!({"input": items, "max_output_tokens": 5, "temperature": 0}));
    let by_id =
        json!({"input": [output], "previous_response_id": response["id"], "max_output_tokens": 5, "temperature": 0});
    let by_id = ask(&server, &by_id);
    assert_eq!(text_of(&by_id), text_of(&by_items));
    assert_eq!(by_id["usage"]["input_tokens"], by_items["usage"]["input_tokens"]);
}

#[test]
fn a_response_keeps_to_a_schema() {
    let schema = tool()["parameters"].clone();
    let format = json!({"format": {"type": "json_schema", "name": "days", "schema": schema, "strict": true}});
    let response = ask(&server(), &json!({"input": "Days?", "text": format, "max_output_tokens": 100}));
    jsonschema::validate(&schema, &serde_json::from_str(text_of(&response)).unwrap()).unwrap();
    assert_eq!((&response["status"], &response["text"]), (&json!("completed"), &format));
}

#[test]
fn reasoning_is_an_item() {
    let room = tempfile::tempdir().unwrap();
    let server = Server::start(&with_template(room.path(), OPTIONAL_THINKING), &[]);
    let body = |effort: &str| json!({"input": "Hi", "reasoning": {"effort": effort}, "max_output_tokens": 8, "temperature": 0});
    let thinks = ask(&server, &body("low"));
    let item = &thinks["output"][0];
    assert_eq!((&item["type"], &item["content"][0]["type"]), (&json!("reasoning"), &json!("reasoning_text")));
    assert_eq!(ask(&server, &body("none"))["output"][0]["type"], "message");
    let mut streamed = body("low");
    streamed["stream"] = json!(true);
    let parts = events(&server.post("/v1/responses", &streamed));
    let deltas = parts.iter().filter(|part| part["type"] == "response.reasoning_text.delta");
    let joined: String = deltas.map(|part| part["delta"].as_str().unwrap()).collect();
    assert_eq!(joined, item["content"][0]["text"].as_str().unwrap());
}

#[test]
fn fields_that_would_change_the_response_are_refused_by_name() {
    let server = server();
    for (more, problem) in [
        (json!({"tools": [{"type": "web_search"}]}), "\"web_search\""),
        (json!({"tools": [{"type": "function"}]}), "without `function.name`"),
        (json!({"tool_choice": {"type": "allowed_tools"}}), "allowed_tools"),
        (json!({"background": true}), "`background`"),
        (json!({"truncation": "auto"}), "`truncation`"),
        (json!({"conversation": "x"}), "`conversation`"),
        (json!({"include": ["message.output_text.logprobs"]}), "`include`"),
        (json!({"text": {"format": {"type": "xml"}}}), "xml"),
        (json!({"text": {"verbosity": "low"}}), "`text.verbosity`"),
        (json!({"input": []}), "`input` is empty"),
        (json!({"input": 1}), "`input`"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "item_reference"),
        (json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}), "input_image"),
        (json!({"max_output_tokens": -5}), "`max_output_tokens`"),
    ] {
        let mut body = json!({"input": "Hi", "max_output_tokens": 1});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let reply = server.post("/v1/responses", &body);
        let message = reply.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
        assert!(reply.status == 400 && message.contains(problem), "{more}: {}", reply.text());
    }
    let neutral = json!({
        "input": "Hi", "max_output_tokens": 1, "background": false, "truncation": "disabled", "user": "x", "metadata": {"a": "b"},
        "include": ["reasoning.encrypted_content"], "service_tier": "auto", "prompt_cache_key": "x", "stream": false,
    });
    assert_eq!(ask(&server, &neutral)["metadata"], json!({"a": "b"}));
}
