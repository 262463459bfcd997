//! Anthropic's API: messages, and their number of tokens.

mod answer;
mod request;

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::sse::{Event, KeepAlive};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use serde_json::{Value, json};

use super::answer::{events, server_events, whole};
use super::app::App;
use super::error::ServeError;
use super::service::Service;
use answer::{AnswerHead, Writer};

/// Returns the routes of the API.
pub(super) fn routes() -> Router<Arc<App>> {
    Router::new().route("/v1/messages", post(messages)).route("/v1/messages/count_tokens", post(count_tokens))
}

async fn messages(State(app): State<Arc<App>>, request: Request) -> Result<Response, ServeError> {
    let (model, body) = app.model_and_object(request).await?;
    let read = move |service: &Service| {
        let request = request::read(body, service)?;
        Ok((request.submission, (request.stops, request.stream)))
    };
    let (answer, (stops, stream)) = model.ask_one(read).await?;
    let head = AnswerHead {
        id: app.answer_id("msg_"),
        model: model.name.clone(),
        tokenizer: model.tokenizer().clone(),
        stops,
    };
    if stream {
        let writer = Writer::new(head, answer.prompt.len());
        let ping = Event::default().event("ping").data(answer::ping().to_string());
        return Ok(server_events(events(model, answer, writer), KeepAlive::new().event(ping)));
    }
    Ok(Json(head.whole(whole(answer).await?)?).into_response())
}

async fn count_tokens(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ServeError> {
    let (model, body) = app.model_and_object(request).await?;
    let count = move |service: &Service| Ok(service.tokens(request::prompt(body, service)?)?.len());
    let tokens = model.compute(move |service, _| count(service)).await?;
    Ok(Json(json!({"input_tokens": tokens})))
}
