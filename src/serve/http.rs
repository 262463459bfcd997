//! HTTP server: connections, routes, limits.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{MatchedPath, Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
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
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_io_timeout::TimeoutStream;
use tower_http::cors::{AllowHeaders, AllowOrigin, Any, CorsLayer};

use super::clients::{Activity, ClientAddresses, IdleConnections};
use super::embeddings;
use super::error::ServeError;
use super::error_form;
use super::loading::LoadingStage;
use super::messages;
use super::ollama;
use super::openai::{self, Head, Kind, LogprobWriter};
use super::origin::{allowed_origin, host_name, local_name};
use super::responses::{self, ConversationStore};
use super::service::{Completion, Service, Submission, Times, whole};
use super::stream::parts;
use super::tokens;
use super::tools::{Parts, divide};

/// Options of the HTTP server.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct HttpOptions {
    /// API key that clients must send; `None` for no key.
    pub api_key: Option<String>,
    /// Origins of web pages that may use the server; `*` allows all.
    pub cors: Vec<String>,
    /// Host names under which the server answers, beside those of this machine.
    pub allow_hosts: Vec<String>,
    /// Whether requests must name the model; other names are answered by the only model there is.
    pub strict_model: bool,
    /// Maximum size of a request body in bytes.
    pub max_body: usize,
    /// Time in which a request must arrive: its head, and then its body.
    pub read_timeout: Duration,
    /// Time in which a client must take something of what is written to it.
    pub write_timeout: Duration,
    /// Maximum number of connections; further ones wait to be accepted. An address other than this machine's gets at
    /// most half of them.
    pub connections: usize,
    /// Time for unfinished answers when the server is to end.
    pub grace: Duration,
}

impl Default for HttpOptions {
    fn default() -> Self {
        HttpOptions {
            api_key: None,
            cors: Vec::new(),
            allow_hosts: Vec::new(),
            strict_model: false,
            max_body: 4 << 20,
            read_timeout: Duration::from_secs(20),
            write_timeout: Duration::from_secs(20),
            connections: 512,
            grace: Duration::from_secs(30),
        }
    }
}

/// State shared by the handlers.
pub(super) struct App {
    pub(super) service: Arc<Service>,
    options: HttpOptions,
    /// Whether only this machine can connect.
    local: bool,
    /// Number of requests so far, for ids of answers.
    count: AtomicU64,
    /// Bytes that bodies in progress may hold, in units of [`BODY_UNIT`].
    bodies: Arc<Semaphore>,
    /// Conversations that requests continue by the id of a response.
    pub(super) conversations: Arc<ConversationStore>,
}

/// Number of bodies of the maximum size that may be in progress.
const BODIES: usize = 8;
/// Unit in which bytes of bodies are counted.
const BODY_UNIT: usize = 1024;
/// Interval at which the longest idle connection is closed for one that waits.
const EVICTION: Duration = Duration::from_millis(20);

/// Time for sending the last error to clients whose answers were cut off.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

const PAGE: &str = include_str!("page.html");

/// Serves requests until `shutdown` completes. New requests are then refused, and unfinished answers get some time, or
/// until `shutdown` completes again.
pub async fn serve<S: Future<Output = ()>>(
    service: Arc<Service>,
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
    let (grace, write_timeout, engine) = (options.grace, options.write_timeout, service.clone());
    let local = listener.local_addr().is_ok_and(|address| address.ip().is_loopback());
    let routes = routes(service, options, local);
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
    engine.engine().close();
    let mut closed = std::pin::pin!(graceful.shutdown());
    let finished = tokio::select! {
        finished = timeout(grace, &mut closed) => finished.is_ok(),
        () = shutdown() => false,
    };
    let _ = tokio::task::spawn_blocking(move || engine.engine().stop()).await;
    if !finished {
        // unfinished answers have failed; send their clients the error
        let _ = timeout(CLOSE_TIMEOUT, closed).await;
    }
}

fn routes(service: Arc<Service>, options: HttpOptions, local: bool) -> Router {
    let cors = (!options.cors.is_empty()).then(|| cors(&options.cors));
    let bodies = Arc::new(Semaphore::new(BODIES * options.max_body.div_ceil(BODY_UNIT)));
    let (count, conversations) = (AtomicU64::default(), Arc::default());
    let app = Arc::new(App { service, options, local, count, bodies, conversations });
    let guarded = Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completion))
        .route("/v1/embeddings", post(embeddings))
        .route("/rerank", post(rerank))
        .route("/v1/rerank", post(rerank))
        .route("/v2/rerank", post(rerank))
        .route("/v1/models", get(models))
        .route("/v1/models/{name}", get(model))
        .route("/metrics", get(metrics))
        .merge(messages::routes())
        .merge(ollama::routes())
        .merge(responses::routes())
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

/// Refuses requests of foreign web pages, whose browsers send their origin. Where only this machine can connect, also
/// refuses foreign host names, which a page can resolve to this machine.
async fn same_site(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    match app.foreign(request.headers()) {
        Some(error) => error.into_response(),
        None => next.run(request).await,
    }
}

fn cors(origins: &[String]) -> CorsLayer {
    let layer =
        CorsLayer::new().allow_methods([Method::GET, Method::POST]).allow_headers(AllowHeaders::mirror_request());
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
    app.service.metrics.request(&route, response.status().as_u16());
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

/// Returns 200 once the model is loaded and 503 before, for load balancers.
async fn health(State(app): State<Arc<App>>) -> (StatusCode, Json<Value>) {
    let (waiting, active) = app.service.engine().load();
    let stage = app.service.stage();
    let mut health = stage.health();
    let facts = json!({
        "mode": "http", "model": app.service.name, "device": app.service.device,
        "context": app.service.context(), "waiting": waiting, "active": active,
        "uptime_s": app.service.metrics.uptime().as_secs_f64(),
    });
    if let (Value::Object(health), Value::Object(facts)) = (&mut health, facts) {
        health.extend(facts);
    }
    let status = if stage == LoadingStage::Ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(health))
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    let (waiting, active) = app.service.engine().load();
    let text = app.service.metrics.render(waiting, active);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

fn about_model(service: &Service) -> Value {
    json!({
        "id": service.name, "object": "model", "created": service.created, "owned_by": "anec",
        "max_model_len": service.context(), "device": service.device,
    })
}

async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [about_model(&app.service)]}))
}

async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Json<Value>, ServeError> {
    app.check_model(&name)?;
    Ok(Json(about_model(&app.service)))
}

async fn chat(State(app): State<Arc<App>>, request: Request) -> Result<Response, ServeError> {
    answer(app, Kind::Chat, request).await
}

async fn completion(State(app): State<Arc<App>>, request: Request) -> Result<Response, ServeError> {
    answer(app, Kind::Completion, request).await
}

async fn embeddings(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ServeError> {
    let body = app.object(request).await?;
    app.service.compute(move |service, wanted| embeddings::embed(service, body, wanted)).await.map(Json)
}

async fn rerank(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ServeError> {
    let body = app.object(request).await?;
    app.service.compute(move |service, wanted| embeddings::rerank(service, body, wanted)).await.map(Json)
}

async fn answer(app: Arc<App>, kind: Kind, request: Request) -> Result<Response, ServeError> {
    let body = app.object(request).await?;
    let read = move |service: &Service| openai::read(kind, body, service);
    let (answers, form) = app.service.ask(read).await?;
    let head = Head {
        kind,
        id: app.answer_id(match kind {
            Kind::Chat => "chatcmpl-",
            Kind::Completion => "cmpl-",
        }),
        created: app.service.created + app.service.metrics.uptime().as_secs(),
        model: app.service.name.clone(),
        fingerprint: app.service.fingerprint.clone(),
    };
    if form.stream {
        let parts = parts(app.service.clone(), head, form, answers);
        return Ok(Sse::new(parts).keep_alive(KeepAlive::default()).into_response());
    }
    let (mut choices, mut endings, mut warnings) = (Vec::new(), Vec::new(), Vec::new());
    let (mut prompt_tokens, mut tokenize) = (0, Duration::ZERO);
    for answer in answers {
        prompt_tokens += answer.prompt.len();
        tokenize += answer.tokenize;
        warnings.extend(answer.warnings);
        let prompt = match form.echo {
            true => app.service.tokenizer().decode(&answer.prompt, false)?,
            false => String::new(),
        };
        // all are read at once, because a text that isn't read pauses
        for text in try_join_all(answer.receivers.into_iter().map(whole)).await? {
            let scored = [&answer.scored[..], &text.tokens].concat();
            let likely = LogprobWriter::new(app.service.clone(), kind, form.logprobs).of(&scored);
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

impl App {
    /// Returns why a request with these headers is refused.
    fn foreign(&self, headers: &HeaderMap) -> Option<ServeError> {
        let text = |name| headers.get(name).map(|value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()));
        let host = text(header::HOST).unwrap_or_default();
        if headers.get_all(header::HOST).iter().count() > 1 || host.contains('@') {
            return Some(ServeError::Invalid { problem: "the request names no single `Host`".into(), field: None });
        }
        let allowed = self.options.allow_hosts.iter().any(|own| own.eq_ignore_ascii_case(host_name(&host)));
        if self.local && !host.is_empty() && !local_name(&host) && !allowed {
            return Some(ServeError::ForeignHost { host: host.into_owned() });
        }
        let origin = text(header::ORIGIN).filter(|origin| !allowed_origin(origin, &host, &self.options.cors));
        origin.map(|origin| ServeError::ForeignOrigin { origin: origin.into_owned() })
    }

    /// Reads the JSON object of a request, and checks the model that it names.
    pub(super) async fn object(&self, request: Request) -> Result<Value, ServeError> {
        let (body, _held) = self.read(request).await?;
        let object = openai::object(&body)?;
        match object.get("model").and_then(Value::as_str) {
            Some(name) if self.options.strict_model => self.check_model(name).map(|()| object),
            _ => Ok(object),
        }
    }

    /// Checks that a name is that of the model, with or without Ollama's tag `:latest`.
    ///
    /// # Errors
    /// If it is another model's.
    pub(super) fn check_model(&self, name: &str) -> Result<(), ServeError> {
        let own = &self.service.name;
        let untagged = |name: &str| name.strip_suffix(":latest").unwrap_or(name).to_owned();
        match untagged(name) == untagged(own) {
            true => Ok(()),
            false => Err(ServeError::NoModel { name: name.to_owned(), own: own.clone() }),
        }
    }

    /// Queues the one text of a request, as [`Service::ask`] does.
    ///
    /// # Errors
    /// Returns any error of [`Service::ask`].
    pub(super) async fn ask_one<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Service) -> Result<(Submission, T), ServeError> + Send + 'static,
    ) -> Result<(Completion, T), ServeError> {
        let read = |service: &Service| read(service).map(|(submission, rest)| (vec![submission], rest));
        let (answers, rest) = self.service.ask(read).await?;
        let answer = answers.into_iter().next().ok_or_else(ServeError::panicked)?;
        Ok((answer, rest))
    }

    /// Reads a body within the limits of size, time, and bytes of all bodies in progress, which count as long as the
    /// returned permits are held.
    async fn read(&self, request: Request) -> Result<(Vec<u8>, Vec<OwnedSemaphorePermit>), ServeError> {
        let limit = self.options.max_body;
        if let Some(kind) = request.headers().get(header::CONTENT_TYPE) {
            let kind = String::from_utf8_lossy(kind.as_bytes());
            let essence = kind.split(';').next().unwrap_or_default().trim();
            if !essence.eq_ignore_ascii_case("application/json") {
                return Err(ServeError::ContentType { kind: essence.to_owned() });
            }
        }
        let length =
            request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
        if length.is_some_and(|length| length > limit) {
            return Err(ServeError::TooLarge { limit });
        }
        let mut body = request.into_body();
        let read = async {
            let (mut bytes, mut held) = (Vec::new(), Vec::new());
            while let Some(frame) = body.frame().await {
                let broken =
                    || ServeError::Invalid { problem: "the body is broken off or malformed".into(), field: None };
                let Ok(data) = frame.map_err(|_| broken())?.into_data() else { continue };
                if bytes.len() + data.len() > limit {
                    return Err(ServeError::TooLarge { limit });
                }
                let units = data.len().div_ceil(BODY_UNIT) as u32;
                match self.bodies.clone().try_acquire_many_owned(units) {
                    Ok(permit) => held.push(permit),
                    Err(_) => return Err(ServeError::Busy { waiting: BODIES }),
                }
                bytes.extend_from_slice(&data);
            }
            Ok((bytes, held))
        };
        let late = |_| ServeError::Slow { seconds: self.options.read_timeout.as_secs() };
        timeout(self.options.read_timeout, read).await.map_err(late)?
    }

    /// Returns a new id that begins with `prefix`.
    pub(super) fn answer_id(&self, prefix: &str) -> String {
        let number = self.count.fetch_add(1, Ordering::Relaxed);
        format!("{prefix}{:x}{number:08x}", self.service.created)
    }
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
