//! HTTP server: connections and routes.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{MatchedPath, Path, Request, State};
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::sse::{KeepAlive, Sse};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use futures_util::future::try_join_all;
use http_body_util::BodyExt;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_io_timeout::TimeoutStream;
use tower_http::cors::{AllowHeaders, AllowOrigin, Any, CorsLayer};

use super::app::{App, HttpOptions};
use super::clients::{Activity, ClientAddresses, IdleConnections};
use super::embeddings;
use super::error::ServeError;
use super::error_form;
use super::facts::Facts;
use super::messages;
use super::models::{ModelStatus, Models};
use super::ollama;
use super::openai::{self, Head, Kind, LogprobWriter};
use super::responses;
use super::service::{Service, Times, whole};
use super::stream::parts;
use super::tokens;
use super::tools::{Parts, divide};

/// Interval at which the longest idle connection is closed for one that waits.
const EVICTION: Duration = Duration::from_millis(20);

/// Time for sending the last error to clients whose answers were cut off.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

const PAGE: &str = include_str!("page.html");

/// Serves requests until `shutdown` completes. New requests are then refused, and unfinished answers get some time, or
/// until `shutdown` completes again.
pub async fn serve<S: Future<Output = ()>>(
    models: Arc<Models>,
    listener: TcpListener,
    options: HttpOptions,
    shutdown: impl Fn() -> S,
) {
    let places = Arc::new(Semaphore::new(options.connections));
    let addresses = ClientAddresses::new(options.connections.div_ceil(2));
    let idle = IdleConnections::default();
    let graceful = GracefulShutdown::new();
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(options.read_timeout);
    let (grace, write_timeout) = (options.grace, options.write_timeout);
    let local = listener.local_addr().is_ok_and(|address| address.ip().is_loopback());
    let routes = routes(models.clone(), options, local);
    let unloading = tokio::spawn({
        let models = models.clone();
        async move { models.unload_idle().await }
    });
    let mut first = std::pin::pin!(shutdown());
    loop {
        let accepted = async {
            let accepted = listener.accept().await;
            // a connection without a request makes room for one that may have some
            let place = loop {
                match timeout(EVICTION, places.clone().acquire_owned()).await {
                    Ok(place) => break place,
                    Err(_) => idle.close_longest(),
                }
            };
            (place, accepted)
        };
        let (place, accepted) = tokio::select! {
            () = &mut first => break,
            accepted = accepted => accepted,
        };
        let Ok((stream, address)) = accepted else {
            // out of file descriptors, or the client has disconnected
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        // all programs of this machine have one address
        let client = match address.ip().to_canonical().is_loopback() {
            true => None,
            false => match addresses.connect(address.ip()) {
                None => continue,
                counted => counted,
            },
        };
        // parts of a stream are small and should arrive at once
        let _ = stream.set_nodelay(true);
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(write_timeout));
        let stream = TokioIo::new(Box::pin(stream));
        let activity = idle.add();
        let service = TowerToHyperService::new(routes.clone().layer(Extension(activity.clone())));
        let connection = graceful.watch(builder.serve_connection(stream, service));
        tokio::spawn(async move {
            tokio::select! {
                // ignore client disconnects
                _ = connection => {}
                () = activity.closed() => {}
            }
            drop((place, client));
        });
    }
    drop(listener);
    unloading.abort();
    models.close();
    let mut closed = std::pin::pin!(graceful.shutdown());
    let finished = tokio::select! {
        finished = timeout(grace, &mut closed) => finished.is_ok(),
        () = shutdown() => false,
    };
    let _ = tokio::task::spawn_blocking(move || models.stop()).await;
    if !finished {
        // unfinished answers have failed; send their clients the error
        let _ = timeout(CLOSE_TIMEOUT, closed).await;
    }
}

fn routes(models: Arc<Models>, options: HttpOptions, local: bool) -> Router {
    let cors = (!options.cors.is_empty()).then(|| cors(&options.cors));
    let app = Arc::new(App::new(models, options, local));
    let guarded = Router::new()
        .route("/v2/rerank", post(rerank))
        .route("/metrics", get(metrics))
        .merge(openai_routes())
        .merge(messages::routes())
        .merge(ollama::routes())
        .merge(tokens::routes())
        .route_layer(from_fn_with_state(app.clone(), guard));
    let routes = Router::new()
        .route("/", get(page))
        .route("/health", get(health))
        .merge(guarded)
        .fallback(async |uri: Uri| ServeError::NoRoute { path: uri.path().to_owned() })
        .method_not_allowed_fallback(async |method: Method, uri: Uri| ServeError::Method {
            path: uri.path().to_owned(),
            method: method.to_string(),
        })
        .layer(from_fn_with_state(app.clone(), count_requests));
    let routes = match cors {
        Some(cors) => routes.layer(cors),
        None => routes,
    };
    routes.layer(from_fn_with_state(app.clone(), same_site)).layer(from_fn(error_form::convert)).with_state(app)
}

/// Returns the routes of OpenAI's API; those without `/v1` are for clients whose base address lacks it.
fn openai_routes() -> Router<Arc<App>> {
    ["/v1", ""].into_iter().fold(Router::new(), |router, base| {
        let at = |path: &str| format!("{base}{path}");
        router
            .route(&at("/chat/completions"), post(chat))
            .route(&at("/completions"), post(completion))
            .route(&at("/embeddings"), post(embeddings))
            .route(&at("/rerank"), post(rerank))
            .route(&at("/models"), get(list_models))
            .route(&at("/models/{name}"), get(model))
            .merge(responses::routes(base))
    })
}

/// Refuses requests of foreign web pages, whose browsers send their origin. Where only this machine can connect, also
/// refuses foreign host names, which a page can resolve to this machine.
async fn same_site(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    match app.foreign(request.headers()) {
        Some(error) => error.into_response(),
        None => next.run(request).await,
    }
}

fn cors(origins: &[String]) -> CorsLayer {
    let methods = [Method::GET, Method::POST, Method::DELETE];
    let layer = CorsLayer::new().allow_methods(methods).allow_headers(AllowHeaders::mirror_request());
    if origins.iter().any(|origin| origin == "*") {
        return layer.allow_origin(Any);
    }
    layer.allow_origin(AllowOrigin::list(origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok())))
}

/// Checks the API key.
async fn guard(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    if let Some(key) = &app.options.api_key {
        let text = |name: &str| request.headers().get(name).and_then(|value| value.to_str().ok());
        let bearer = text("authorization")
            .and_then(|value| value.split_once(' '))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
            .map(|(_, key)| key);
        let sent = bearer.or_else(|| text("x-api-key"));
        if !sent.is_some_and(|sent| same(sent.trim().as_bytes(), key.as_bytes())) {
            return ServeError::Unauthorized.into_response();
        }
    }
    next.run(request).await
}

/// Compares in constant time.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}

async fn count_requests(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().map_or("other", MatchedPath::as_str).to_owned();
    let busy = request.extensions().get::<Arc<Activity>>().map(Activity::begin);
    let response = next.run(request).await;
    app.models.metrics.request(&route, response.status().as_u16());
    // the connection is busy until the whole answer is sent
    response.map(|body| {
        Body::new(body.map_frame(move |frame| {
            let _ = &busy;
            frame
        }))
    })
}

async fn page() -> Response {
    // the page loads nothing from elsewhere
    let policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'";
    ([(header::CONTENT_SECURITY_POLICY, policy)], Html(PAGE)).into_response()
}

/// Returns 200 once the only model is loaded and 503 before, for load balancers. Several models are loaded on demand,
/// so that their server is always ready.
async fn health(State(app): State<Arc<App>>) -> (StatusCode, Json<Value>) {
    let (waiting, active) = app.models.texts();
    let mut health = match &app.models.statuses()[..] {
        [model] => health_of(model),
        models => json!({"status": "ok", "models": models.iter().map(health_of).collect::<Vec<_>>()}),
    };
    let facts = json!({
        "mode": "http", "waiting": waiting, "active": active, "uptime_s": app.models.metrics.uptime().as_secs_f64(),
    });
    if let (Value::Object(health), Value::Object(facts)) = (&mut health, facts) {
        health.extend(facts);
    }
    let is_ready = ["ok", "unloaded"].iter().any(|status| health["status"] == *status);
    (if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, Json(health))
}

/// Returns the loading stage of a model with facts about it.
fn health_of(ModelStatus { facts, service, .. }: &ModelStatus<'_>) -> Value {
    let mut health = match service {
        Some(service) => service.stage().health(),
        None => json!({"status": "unloaded"}),
    };
    (health["model"], health["device"]) = (json!(facts.name), json!(facts.device));
    health["context"] = json!(facts.context);
    health
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    let (waiting, active) = app.models.texts();
    let text = app.models.metrics.render(waiting, active);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

fn about_model(facts: &Facts) -> Value {
    json!({
        "id": facts.name, "object": "model", "created": facts.created, "owned_by": "anec",
        "max_model_len": facts.context, "device": facts.device,
    })
}

async fn list_models(State(app): State<Arc<App>>) -> Json<Value> {
    let models = app.models.statuses().into_iter().map(|model| about_model(model.facts));
    Json(json!({"object": "list", "data": models.collect::<Value>()}))
}

async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Json<Value>, ServeError> {
    let index = app.models.find(Some(&name), true)?;
    Ok(Json(about_model(app.models.facts(index))))
}

async fn chat(State(app): State<Arc<App>>, request: Request) -> Result<Response, ServeError> {
    answer(app, Kind::Chat, request).await
}

async fn completion(State(app): State<Arc<App>>, request: Request) -> Result<Response, ServeError> {
    answer(app, Kind::Completion, request).await
}

async fn embeddings(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ServeError> {
    let (model, body) = app.model_and_object(request).await?;
    model.compute(move |service, wanted| embeddings::embed(service, body, wanted)).await.map(Json)
}

async fn rerank(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ServeError> {
    let (model, body) = app.model_and_object(request).await?;
    model.compute(move |service, wanted| embeddings::rerank(service, body, wanted)).await.map(Json)
}

async fn answer(app: Arc<App>, kind: Kind, request: Request) -> Result<Response, ServeError> {
    let (model, body) = app.model_and_object(request).await?;
    let read = move |service: &Service| openai::read(kind, body, service);
    let (answers, form) = model.ask(read).await?;
    let head = Head {
        kind,
        id: app.answer_id(match kind {
            Kind::Chat => "chatcmpl-",
            Kind::Completion => "cmpl-",
        }),
        created: anec_base::clock::now(),
        model: model.name.clone(),
        fingerprint: model.fingerprint.clone(),
    };
    if form.stream {
        let parts = parts(model, head, form, answers);
        return Ok(Sse::new(parts).keep_alive(KeepAlive::default()).into_response());
    }
    let (mut choices, mut endings, mut warnings) = (Vec::new(), Vec::new(), Vec::new());
    let (mut prompt_tokens, mut tokenize) = (0, Duration::ZERO);
    for answer in answers {
        prompt_tokens += answer.prompt.len();
        tokenize += answer.tokenize;
        warnings.extend(answer.warnings);
        let prompt = match form.echo {
            true => model.tokenizer().decode(&answer.prompt, false)?,
            false => String::new(),
        };
        // all are read at once, because a text that isn't read pauses
        for text in try_join_all(answer.receivers.into_iter().map(whole)).await? {
            let scored = [&answer.scored[..], &text.tokens].concat();
            let likely = LogprobWriter::new(model.clone(), kind, form.logprobs).of(&scored);
            let parts = match &answer.reader {
                Some(reader) => divide(reader.clone(), &text.text),
                None => Parts { text: prompt.clone() + &text.text, ..Parts::default() },
            };
            choices.push(openai::choice(&head, choices.len(), parts, text.ending.generation.finish, likely));
            endings.push(text.ending);
        }
    }
    let usage = openai::usage(prompt_tokens, endings.iter());
    let times = endings.first().map(|ending| Times::of(ending, tokenize)).unwrap_or_default();
    let mut answer = head.answer(choices, usage, &times);
    if !warnings.is_empty() {
        answer["anec"]["warnings"] = json!(warnings);
    }
    Ok(Json(answer).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_compared_whole() {
        assert!(same(b"key", b"key"));
        assert!(!same(b"key", b"kex") && !same(b"key", b"ke") && !same(b"", b"k"));
    }
}
