//! Tokens of texts and prompts of conversations of `anec serve`.

use crate::common::folder::repository;
use crate::serve::server;

use anec::runtime::Tokenizer;
use serde_json::json;

#[test]
fn texts_become_tokens_and_back() {
    let server = server();
    let tokenizer = Tokenizer::open(&repository("demo/model/tokenizer.json")).unwrap();
    let text = "It was a dark night 🙂 größte";
    let answer = server.post("/tokenize", &json!({"content": text})).json();
    assert_eq!(answer, json!({"tokens": tokenizer.encode_rest(text).unwrap()}));
    assert_eq!(server.post("/detokenize", &answer).json(), json!({"content": text}));
    let special = server.post("/tokenize", &json!({"content": text, "add_special": true})).json();
    assert_eq!(special, json!({"tokens": tokenizer.encode(text).unwrap()}));
    let pieces = server.post("/tokenize", &json!({"content": text, "with_pieces": true})).json();
    let mut bytes = Vec::new();
    for (piece, id) in pieces["tokens"].as_array().unwrap().iter().zip(answer["tokens"].as_array().unwrap()) {
        assert_eq!(piece["id"], *id);
        match piece["piece"].as_str() {
            Some(text) => bytes.extend(text.bytes()),
            None => bytes.extend(piece["piece"].as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8)),
        }
    }
    assert_eq!(String::from_utf8(bytes).unwrap(), text);
}

#[test]
fn special_tokens_in_a_text_are_parsed_unless_they_are_not_to_be() {
    let server = server();
    let tokenizer = Tokenizer::open(&repository("demo/model/tokenizer.json")).unwrap();
    let special = tokenizer.token(0).unwrap();
    let tokens = |parse: bool| {
        let body = json!({"content": special, "parse_special": parse});
        server.post("/tokenize", &body).json()["tokens"].as_array().unwrap().len()
    };
    assert!(tokens(true) == 1 && tokens(false) > 1, "{special}");
    assert_eq!(server.post("/detokenize", &json!({"tokens": [0]})).json()["content"], special);
    let piece = server.post("/tokenize", &json!({"content": special, "with_pieces": true})).json();
    assert_eq!(piece["tokens"][0]["piece"], special);
}

#[test]
fn a_conversation_becomes_a_prompt() {
    let server = server();
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let answer = server.post("/apply-template", &json!({"messages": messages})).json();
    assert_eq!(answer, json!({"prompt": "<user> Hi\n<assistant>"}));
    let tool = json!({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}});
    let answer = server.post("/apply-template", &json!({"messages": messages, "tools": [tool]})).json();
    assert_eq!(answer, json!({"prompt": "weather <user> Hi\n<assistant>"}));
}

#[test]
fn wrong_requests_are_refused_by_name() {
    let server = server();
    for (path, body, problem) in [
        ("/tokenize", json!({"content": ["x"]}), "`content`: found a list, expected a text"),
        ("/tokenize", json!({"text": "x"}), "`content`"),
        ("/tokenize", json!({"content": "x".repeat(150_000)}), "shorten"),
        ("/detokenize", json!({"tokens": [2048]}), "`tokens` has 2048"),
        ("/detokenize", json!({"tokens": [-1]}), "`tokens[0]`: found -1, expected a whole number that isn't negative"),
        ("/apply-template", json!({"messages": []}), "`messages` is empty"),
        ("/apply-template", json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "image_url"),
    ] {
        let reply = server.post(path, &body);
        let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(reply.status == 400 && message.contains(problem), "{path}: {message}");
    }
}
