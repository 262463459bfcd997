//! State that the handlers of all APIs share, and the limits of requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, header};
use http_body_util::BodyExt;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::error::ServeError;
use super::models::{Lease, Models};
use super::openai;
use super::origin::{allowed_origin, host_name, local_name};
use super::responses::store::ConversationStore;

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
    /// Whether requests can't name another model than the only one there is.
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
    pub(super) models: Arc<Models>,
    pub(super) options: HttpOptions,
    /// Whether only this machine can connect.
    local: bool,
    /// Start time in seconds since 1970.
    created: u64,
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
impl App {
    /// Creates the state of a server; `local` tells that only this machine can connect.
    pub(super) fn new(models: Arc<Models>, options: HttpOptions, local: bool) -> Self {
        let bodies = Arc::new(Semaphore::new(BODIES * options.max_body.div_ceil(BODY_UNIT)));
        let (created, count) = (anec_base::clock::now(), AtomicU64::default());
        App { models, options, local, created, count, bodies, conversations: Arc::default() }
    }

    /// Returns why a request with these headers is refused.
    pub(super) fn foreign(&self, headers: &HeaderMap) -> Option<ServeError> {
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

    /// Reads the JSON object of a request.
    pub(super) async fn object(&self, request: Request) -> Result<Value, ServeError> {
        let (body, _held) = self.read(request).await?;
        openai::object(&body)
    }

    /// Reads the JSON object of a request, and loads the model that it names.
    pub(super) async fn model_and_object(&self, request: Request) -> Result<(Lease, Value), ServeError> {
        let object = self.object(request).await?;
        Ok((self.models.lease(self.find(&object)?).await?, object))
    }

    /// Returns the index of the model that a request names.
    ///
    /// # Errors
    /// If it is unknown here.
    pub(super) fn find(&self, object: &Value) -> Result<usize, ServeError> {
        self.models.find(object["model"].as_str(), self.options.strict_model)
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
        format!("{prefix}{:x}{number:08x}", self.created)
    }
}
