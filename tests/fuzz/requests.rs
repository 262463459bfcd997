//! Requests to the server: valid ones of all its APIs, with changed fields, headers and bytes.

use std::sync::LazyLock;

use serde_json::{Value as Json, json};

use super::grammars;
use super::mutate::{self, Random};

/// Valid requests by route.
static REQUESTS: LazyLock<Vec<(&str, Json)>> = LazyLock::new(|| {
    let hi = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]);
    let tool =
        json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}});
    vec![
        ("/v1/completions", json!({"prompt": "It was", "max_tokens": 3, "temperature": 0, "n": 2, "seed": 1})),
        ("/v1/completions", json!({"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 3, "echo": true, "stop": ["x"]})),
        (
            "/v1/completions",
            json!({"prompt": [[5, 6], [7]], "max_tokens": 2, "stream": true, "top_p": 0.5, "top_k": 3}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "x", "max_tokens": 2, "logit_bias": {"5": -100}, "min_p": 0.1, "model": "m"}),
        ),
        ("/v1/completions", json!({"prompt": "x", "max_tokens": 3, "repetition_penalty": 1.2, "speculation": 2})),
        ("/v1/completions", json!({"prompt": "x", "max_tokens": 3, "guided_choice": ["a", "b"], "ignore_eos": true})),
        ("/v1/chat/completions", json!({"messages": hi, "max_tokens": 3, "stream": true, "stream_options": {}})),
        ("/v1/chat/completions", json!({"messages": hi, "max_tokens": 3, "logprobs": true, "top_logprobs": 2})),
        ("/v1/chat/completions", json!({"messages": hi, "max_tokens": 3, "tools": [tool], "tool_choice": "auto"})),
        ("/v1/chat/completions", json!({"messages": hi, "chat_template_kwargs": {"a": 1}, "max_completion_tokens": 2})),
        (
            "/v1/messages",
            json!({"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 2}),
        ),
        ("/v1/messages/count_tokens", json!({"model": "m", "messages": [{"role": "user", "content": "a"}]})),
        ("/v1/responses", json!({"input": "Hi", "max_output_tokens": 16, "instructions": "x", "store": true})),
        (
            "/v1/responses",
            json!({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "max_output_tokens": 16}),
        ),
        (
            "/api/chat",
            json!({"messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": 2}, "stream": false}),
        ),
        ("/api/generate", json!({"prompt": "Hi", "raw": true, "options": {"num_predict": 2, "stop": ["a"]}})),
        ("/api/show", json!({"model": "demo"})),
        ("/api/embed", json!({"input": ["a"]})),
        ("/v1/embeddings", json!({"input": ["a", "b"], "encoding_format": "base64"})),
        ("/v1/rerank", json!({"query": "a", "documents": ["b"]})),
        ("/tokenize", json!({"content": "a b", "add_special": true, "with_pieces": true})),
        ("/detokenize", json!({"tokens": [5, 6]})),
        ("/apply-template", json!({"messages": [{"role": "user", "content": "Hi"}]})),
    ]
});

/// Returns the bytes of a request.
pub fn request(random: &mut Random) -> Vec<u8> {
    let (path, valid) = random.pick(&REQUESTS);
    let mut body = if random.chance(0.9) { mutate::json(random, valid) } else { valid.clone() };
    if random.chance(0.05) && body.is_object() {
        body["response_format"] = format(random);
    }
    let mut bytes = body.to_string().into_bytes();
    if random.chance(0.1) {
        bytes = mutate::bytes(random, &bytes, b"\"\\ud800\x00\xff[{");
    }
    let method = if random.chance(0.97) { "POST" } else { *random.pick(&["GET", "PUT", "OPTIONS", "HEAD", "x"]) };
    let length = if random.chance(0.97) { bytes.len() } else { random.below(1 << 40) };
    let mut head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
    match random.below(40) {
        0 => head += "Transfer-Encoding: chunked\r\n\r\n5\r\n",
        1 => head += &format!("Content-Length: {length}\r\nContent-Length: 5\r\n\r\n"),
        2 => head += &format!("Content-Type: text/plain\r\nContent-Length: {length}\r\n\r\n"),
        3 => head += &format!("X-A: {}\r\nContent-Length: {length}\r\n\r\n", "a".repeat(random.below(100_000))),
        4 => head += &format!("Expect: 100-continue\r\nContent-Length: {length}\r\n\r\n"),
        5 => head += &format!("Host: other\r\nContent-Length: {length}\r\n\r\n"),
        _ => head += &format!("Content-Length: {length}\r\n\r\n"),
    }
    let request = [head.as_bytes(), &bytes].concat();
    if random.chance(0.03) { mutate::bytes(random, &request, b"\r\n\r\n HTTP/1.1:") } else { request }
}

/// Returns a line of the protocol of lines.
pub fn line(random: &mut Random) -> Vec<u8> {
    let valid = [
        json!({"prompt": "Hi", "max_tokens": 2, "id": "a", "system": "x"}),
        json!({"tokens": [5, 6], "max_new": 2, "temperature": 0, "reset": false}),
        json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": true}),
    ];
    let seed = random.pick(&valid);
    match random.below(10) {
        0 => mutate::bytes(random, b"1 2 3|4", b"|  -1 99999999999 x"),
        1 => mutate::bytes(random, seed.to_string().as_bytes(), b"\n\"\\ud800\x00\xff[{"),
        _ => mutate::json(random, seed).to_string().into_bytes(),
    }
}

fn format(random: &mut Random) -> Json {
    let grammar = grammars::grammar(random);
    match grammar["kind"].as_str() {
        Some("json") => json!({"type": "json_schema", "json_schema": {"name": "a", "schema": grammar["source"]}}),
        Some("regex") => json!({"type": "regex", "regex": grammar["source"]}),
        _ => json!({"type": "grammar", "grammar": grammar["source"]}),
    }
}
