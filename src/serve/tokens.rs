//! Tokens of texts and prompts of conversations, in the form of llama.cpp's server.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::routing::post;
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};

use super::app::App;
use super::conversation::parse;
use super::error::ServeError;
use super::openai;
use super::service::Service;

/// Body of `POST /tokenize`.
#[derive(Debug, Deserialize)]
struct TokenizeRequest {
    content: String,
    /// Whether the text gets the tokens that begin and end a text.
    #[serde(default)]
    add_special: bool,
    /// Whether special tokens spelled out in the text become those tokens.
    #[serde(default = "yes")]
    parse_special: bool,
    #[serde(default)]
    with_pieces: bool,
}

/// Body of `POST /detokenize`.
#[derive(Debug, Deserialize)]
struct DetokenizeRequest {
    tokens: Vec<u32>,
}

fn yes() -> bool {
    true
}

/// Returns the routes of tokens and prompts.
pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/apply-template", post(apply_template))
}

async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ServeError> {
    let (model, body) = app.model_and_object(request).await?;
    model.compute(move |service, _| tokens(service, body)).await.map(Json)
}

async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ServeError> {
    let (model, body) = app.model_and_object(request).await?;
    model.compute(move |service, _| text(service, body)).await.map(Json)
}

async fn apply_template(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ServeError> {
    let (model, body) = app.model_and_object(request).await?;
    let prompt = move |service: &Service| Ok(json!({"prompt": service.render(&openai::conversation(body, service)?)?}));
    model.compute(move |service, _| prompt(service)).await.map(Json)
}

fn tokens(service: &Service, body: Value) -> Result<Value, ServeError> {
    let TokenizeRequest { content, add_special, parse_special, with_pieces } = parse(&body)?;
    let tokenizer = service.tokenizer();
    let ids = tokenizer.check_length(&content, service.context()).and_then(|()| match (add_special, parse_special) {
        (true, true) => tokenizer.encode(&content),
        (true, false) => tokenizer.encode_literal(&content),
        (false, true) => tokenizer.encode_rest(&content),
        (false, false) => Ok(tokenizer.tokens(&content)?.0.into_iter().map(|token| token.id).collect()),
    });
    let ids = ids.map_err(|error| service.unreadable(error, "content"))?;
    match with_pieces {
        false => Ok(json!({"tokens": ids})),
        true => {
            let pieces = ids.into_iter().map(|id| json!({"id": id, "piece": piece(service, id)}));
            Ok(json!({"tokens": pieces.collect::<Vec<_>>()}))
        }
    }
}

/// Returns the text of a token, or its bytes if they are part of a character.
fn piece(service: &Service, id: u32) -> Value {
    let bytes = service.tokenizer().token_bytes(id);
    match bytes.is_empty() {
        // a special token
        true => json!(service.tokenizer().token(id).unwrap_or_default()),
        false => String::from_utf8(bytes).map_or_else(|error| json!(error.into_bytes()), Value::from),
    }
}

fn text(service: &Service, body: Value) -> Result<Value, ServeError> {
    let DetokenizeRequest { tokens } = parse(&body)?;
    let vocab_size = service.model().bundle().model.vocab_size;
    if let Some(token) = tokens.iter().copied().find(|token| u64::from(*token) >= vocab_size) {
        let problem = format!("`tokens` has {token}, but the vocabulary ends at {vocab_size}");
        return Err(ServeError::field("tokens", problem));
    }
    Ok(json!({"content": service.tokenizer().decode(&tokens, true)?}))
}
