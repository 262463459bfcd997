//! Client of the hub that the environment names.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value as Json;
use ureq::config::RedirectAuthHeaders;
use ureq::http::Response;
use ureq::{Agent, Body};

use crate::error::{HubError, Result};

/// Public hub.
const ENDPOINT: &str = "https://huggingface.co";
/// Maximum size of a JSON answer in bytes; a repository of 100,000 files stays below.
const MAX_JSON: u64 = 64 << 20;
/// Maximum number of retries after temporary errors.
const ATTEMPTS: u32 = 3;

/// Hub.
#[derive(Clone, Debug)]
pub struct Hub {
    pub(crate) agent: Agent,
    pub(crate) endpoint: String,
    token: Option<String>,
}

impl Hub {
    /// Returns the hub and user of the environment: `HF_ENDPOINT`; `HF_TOKEN`, or the token that the hub's own tools
    /// keep in `HF_TOKEN_PATH` or `HF_HOME/token`.
    pub fn from_env() -> Self {
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into());
        let token = variable("HF_TOKEN").or_else(|| {
            let path = variable("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| Some(home()?.join("token")))?;
            let token = anec_base::input::read_text(&path, 4096).ok()?;
            Some(token.trim().to_owned()).filter(|token| !token.is_empty())
        });
        Self::new(&endpoint, token)
    }

    /// Returns the hub at a URL with an optional token.
    pub fn new(endpoint: &str, token: Option<String>) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .user_agent(concat!("anec/", env!("CARGO_PKG_VERSION")))
            // renamed repositories redirect to their new name; file servers get no token
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .timeout_resolve(Some(Duration::from_secs(10)))
            .timeout_connect(Some(Duration::from_secs(10)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .timeout_per_read(Some(Duration::from_secs(30)))
            .timeout_per_write(Some(Duration::from_secs(30)))
            .build();
        Hub { agent: config.into(), endpoint: endpoint.trim_end_matches('/').to_owned(), token }
    }

    /// Returns whether the environment forbids network access: `HF_HUB_OFFLINE`.
    pub fn offline() -> bool {
        variable("HF_HUB_OFFLINE").is_some_and(|value| !["0", "false"].contains(&value.as_str()))
    }

    /// Returns the URL of the hub.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Returns the authorization header, for the hub's own URLs only.
    pub(crate) fn authorization(&self) -> Option<String> {
        self.token.as_ref().map(|token| format!("Bearer {token}"))
    }

    /// Fails without a token.
    pub(crate) fn require_token(&self) -> Result<()> {
        self.token.as_ref().map(|_| ()).ok_or(HubError::NoToken)
    }

    /// Gets JSON.
    pub(crate) fn get_json(&self, what: &str, path: &str) -> Result<Json> {
        let url = format!("{}{path}", self.endpoint);
        let response = answered(what, "ask for", || {
            let mut request = self.agent.get(&url);
            if let Some(authorization) = self.authorization() {
                request = request.header("authorization", authorization);
            }
            request.call()
        })?;
        json(what, response)
    }

    /// Posts to one of the hub's own URLs; returns the JSON of the answer, if any.
    pub(crate) fn post(&self, what: &str, path: &str, kind: &str, body: &[u8]) -> Result<Json> {
        let url = format!("{}{path}", self.endpoint);
        let response = answered(what, "upload", || {
            let mut request = self.agent.post(&url).header("content-type", kind);
            if kind.contains("lfs") {
                request = request.header("accept", kind);
            }
            if let Some(authorization) = self.authorization() {
                request = request.header("authorization", authorization);
            }
            request.send(body)
        })?;
        json(what, response)
    }
}

/// Returns a non-empty environment variable.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Returns the folder of the hub's own tools: `HF_HOME`, or `huggingface` in the user's cache.
pub(crate) fn home() -> Option<PathBuf> {
    let cache = || {
        let home = variable("HOME").or_else(|| variable("USERPROFILE"))?;
        Some(variable("XDG_CACHE_HOME").map_or_else(|| PathBuf::from(home).join(".cache"), PathBuf::from))
    };
    variable("HF_HOME").map(PathBuf::from).or_else(|| Some(cache()?.join("huggingface")))
}

/// Sends a request with retries and returns a successful answer.
pub(crate) fn answered(
    what: &str,
    action: &'static str,
    send: impl Fn() -> Result<Response<Body>, ureq::Error>,
) -> Result<Response<Body>> {
    let mut attempt = 1;
    loop {
        let response = send().map_err(|error| unreachable(action, what, &error))?;
        let status = response.status().as_u16();
        let later = matches!(status, 429 | 500 | 502 | 503 | 504);
        if later && attempt < ATTEMPTS {
            pause(attempt);
            attempt += 1;
            continue;
        }
        return match status {
            200..=299 => Ok(response),
            404 => Err(HubError::Absent { what: what.to_owned() }),
            409 => Err(HubError::Exists { what: what.to_owned() }),
            401 | 403 => Err(HubError::Refused { what: what.to_owned() }),
            status if later => {
                let problem = format!("the hub says {status}, {attempt} times");
                Err(HubError::Unreachable { action, what: what.to_owned(), problem })
            }
            status => {
                let error_text = error_text(response);
                Err(HubError::Answer { what: what.to_owned(), problem: format!("the hub says {status}{error_text}") })
            }
        };
    }
}

/// Waits before a retry, longer each time.
pub(crate) fn pause(attempt: u32) {
    std::thread::sleep(Duration::from_millis(200 << (2 * (attempt - 1)).min(6)));
}

pub(crate) fn unreachable(action: &'static str, what: &str, error: &dyn std::fmt::Display) -> HubError {
    HubError::Unreachable { action, what: what.to_owned(), problem: error.to_string() }
}

/// Returns the hub's error message, shortened to fit into ours.
fn error_text(mut response: Response<Body>) -> String {
    let text = response.body_mut().with_config().limit(4096).read_to_string().unwrap_or_default();
    let json = serde_json::from_str::<Json>(&text).unwrap_or_default();
    match json["error"].as_str() {
        Some(error) => format!(": {error}"),
        None => String::new(),
    }
}

fn json(what: &str, mut response: Response<Body>) -> Result<Json> {
    let read = response.body_mut().with_config().limit(MAX_JSON).read_to_vec();
    let bytes = read.map_err(|error| unreachable("ask for", what, &error))?;
    if bytes.is_empty() {
        return Ok(Json::Null);
    }
    serde_json::from_slice(&bytes)
        .map_err(|error| HubError::Answer { what: what.to_owned(), problem: format!("the answer isn't JSON: {error}") })
}
