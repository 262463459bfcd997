//! Ollama's API: conversations, texts, embeddings, and descriptions of the model.

mod about;
mod answer;
mod keep_alive;
mod request;

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};

use super::answer::{events, json_lines, whole};
use super::app::App;
use super::embeddings;
use super::error::ServeError;
use super::models::Lease;
use super::service::Service;
use answer::{AnswerHead, Kind, Writer};
use keep_alive::KeepAlive;
use request::AnswerRequest;

/// Version of Ollama's API that the routes follow. Clients refuse servers of older versions.
const API_VERSION: &str = "0.13.0";

/// Returns the routes of the API.
pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/api/version", get(async || Json(json!({"version": API_VERSION}))))
        .route("/api/tags", get(tags))
        .route("/api/ps", get(running))
        .route("/api/show", post(show))
        .route("/api/chat", post(chat))
        .route("/api/generate", post(generate))
        .route("/api/embed", post(embed))
        .route("/api/embeddings", post(embed_one))
}

async fn tags(State(app): State<Arc<App>>) -> Json<Value> {
    let models = app.models.statuses().into_iter().map(|model| about::entry(model.facts));
    Json(json!({"models": models.collect::<Value>()}))
}

async fn running(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"models": app.models.statuses().iter().filter_map(about::running).collect::<Value>()}))
}

async fn show(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ServeError> {
    let body = app.object(request).await?;
    let name = ["model", "name"].into_iter().find_map(|field| body.get(field)?.as_str());
    let name = name.ok_or_else(|| ServeError::field("model", "`model` has to name a model"))?;
    let index = app.models.find(Some(name), true)?;
    Ok(Json(about::details(app.models.facts(index))))
}

async fn chat(State(app): State<Arc<App>>, request: Request) -> Result<Response, ServeError> {
    answer(app, Kind::Chat, request).await
}

async fn generate(State(app): State<Arc<App>>, request: Request) -> Result<Response, ServeError> {
    answer(app, Kind::Text, request).await
}

/// Returns a model for a request, and keeps it loaded for as long as the request asks for.
async fn keeping(app: &App, index: usize, keep: Option<KeepAlive>) -> Result<Lease, ServeError> {
    let model = app.models.lease(index).await?;
    match keep {
        None => {}
        Some(KeepAlive::For(time)) => model.keep(Some(time)),
        Some(KeepAlive::Forever) => model.keep(None),
    }
    Ok(model)
}

async fn answer(app: Arc<App>, kind: Kind, request: Request) -> Result<Response, ServeError> {
    let body = app.object(request).await?;
    let (index, keep) = (app.find(&body)?, keep_alive::read(&body)?);
    let (id, name) = (app.answer_id(""), app.models.facts(index).name.clone());
    let only_loads = request::only_loads(kind, &body);
    if only_loads && keep == Some(KeepAlive::For(Duration::ZERO)) {
        app.models.unload(index);
        let head = AnswerHead { kind, id, model: name, logprobs: None };
        return Ok(Json(head.without_text("unload")).into_response());
    }
    let model = keeping(&app, index, keep).await?;
    let logprobs = (body["logprobs"] == true).then(|| model.clone());
    let head = AnswerHead { kind, id, model: name, logprobs };
    if only_loads {
        return Ok(Json(head.without_text("load")).into_response());
    }
    let read = move |service: &Service| {
        let AnswerRequest { submission, stream } = request::read(kind, body, service)?;
        Ok((submission, stream))
    };
    let (answer, stream) = model.ask_one(read).await?;
    if stream {
        let writer = Writer::new(head, answer.tokenize);
        return Ok(json_lines(events(model, answer, writer)));
    }
    Ok(Json(head.whole(whole(answer).await?)).into_response())
}

/// Computes the embeddings of a request; `prompt` is the older name of `input`.
async fn embeddings_of(app: &App, mut body: Value) -> Result<(Value, u128), ServeError> {
    let begun = Instant::now();
    let model = keeping(app, app.find(&body)?, keep_alive::read(&body)?).await?;
    if let Some(prompt) = body.get_mut("prompt").map(Value::take) {
        body["input"] = prompt;
    }
    request::check_options(&body, &model)?;
    let answer = model.compute(move |service, wanted| embeddings::embed(service, body, wanted)).await?;
    Ok((answer, begun.elapsed().as_nanos()))
}

/// Returns the vectors of an answer in OpenAI's form.
fn vectors(answer: &mut Value) -> Vec<Value> {
    let data = answer["data"].as_array_mut();
    data.into_iter().flatten().map(|entry| entry["embedding"].take()).collect()
}

async fn embed(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ServeError> {
    let body = app.object(request).await?;
    let (mut answer, duration) = embeddings_of(&app, body).await?;
    Ok(Json(json!({
        "model": answer["model"], "embeddings": vectors(&mut answer), "total_duration": duration as u64,
        "load_duration": 0, "prompt_eval_count": answer["usage"]["prompt_tokens"],
    })))
}

/// Answers the older route, which takes one text.
async fn embed_one(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ServeError> {
    let body = app.object(request).await?;
    if !body["prompt"].is_string() {
        return Err(ServeError::field("prompt", "`prompt` has to be a text"));
    }
    let (mut answer, _) = embeddings_of(&app, body).await?;
    Ok(Json(json!({"embedding": vectors(&mut answer).pop()})))
}
