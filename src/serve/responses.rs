//! OpenAI's API of responses.

mod answer;
mod request;
pub(super) mod store;

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use axum::extract::{Path, Request, State};
use axum::response::sse::KeepAlive;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};

use super::answer::{events, server_events, whole};
use super::app::App;
use super::error::ServeError;
use super::service::Service;
use answer::Writer;

/// Returns the routes of the API below `base`.
pub(super) fn routes(base: &str) -> Router<Arc<App>> {
    Router::new()
        .route(&format!("{base}/responses"), post(respond))
        .route(&format!("{base}/responses/{{id}}"), get(stored).delete(forget))
}

/// Returns a response that is still stored.
async fn stored(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Json<Value>, ServeError> {
    app.conversations.response(&id).map(Json).ok_or(ServeError::NoResponse { id })
}

/// Removes a response; it can't be continued any more.
async fn forget(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Json<Value>, ServeError> {
    match app.conversations.remove(&id) {
        true => Ok(Json(json!({"id": id, "object": "response", "deleted": true}))),
        false => Err(ServeError::NoResponse { id }),
    }
}

async fn respond(State(app): State<Arc<App>>, request: Request) -> Result<Response, ServeError> {
    let (model, body) = app.model_and_object(request).await?;
    let conversations = app.conversations.clone();
    let read = move |service: &Service| {
        let request = request::read(body, service, &conversations)?;
        Ok((request.submission, (request.response, request.stream, request.kept)))
    };
    let (answer, (mut response, stream, kept)) = model.ask_one(read).await?;
    response["id"] = unguessable_id().into();
    response["created_at"] = anec_base::clock::now().into();
    response["model"] = model.name.clone().into();
    let mut writer = Writer::new(response, kept.map(|messages| (app.conversations.clone(), messages)));
    match stream {
        true => Ok(server_events(events(model, answer, writer), KeepAlive::default())),
        false => Ok(Json(writer.whole(whole(answer).await?)).into_response()),
    }
}

/// Returns the id of a response. Only clients that were told it can continue the conversation.
fn unguessable_id() -> String {
    let [first, second] = [0, 1].map(|number| RandomState::new().hash_one(number));
    format!("resp_{first:016x}{second:016x}")
}
