//! Client of the hub that the environment names.

use std::path::PathBuf;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::Value as Json;
use ureq::http::{Response, Uri};
use ureq::{Agent, Body};

use crate::error::{HubError, Result};

/// Public hub.
const ENDPOINT: &str = "https://huggingface.co";
/// Maximum size of a JSON answer in bytes.
pub(crate) const MAX_JSON: u64 = 4 << 20;
/// Total time of a JSON answer.
const JSON_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum number of redirects.
const MAX_REDIRECTS: usize = 10;
/// Maximum number of characters of an answer that an error quotes.
const MAX_QUOTED: usize = 200;
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
            // followed by `get`, which knows who gets the token
            .max_redirects(0)
            .max_redirects_will_error(false)
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

    /// Returns the authorization header for a URL; `None` unless scheme, host and port are the hub's.
    pub(crate) fn authorization(&self, url: &str) -> Option<String> {
        let origin = origin(url)?;
        self.token
            .as_ref()
            .filter(|_| Some(origin) == self::origin(&self.endpoint))
            .map(|token| format!("Bearer {token}"))
    }

    /// Gets a URL with a header, and follows redirects: renamed repositories have a new name, and files lie elsewhere.
    pub(crate) fn get(
        &self,
        url: &str,
        header: Option<(&str, &str)>,
        time: Option<Duration>,
    ) -> Result<Response<Body>, ureq::Error> {
        let mut url = url.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self.agent.get(&url);
            if let Some(authorization) = self.authorization(&url) {
                request = request.header("authorization", authorization);
            }
            if let Some((name, value)) = header {
                request = request.header(name, value);
            }
            let response = request.config().timeout_global(time).build().call()?;
            let location = response.headers().get("location").and_then(|location| location.to_str().ok());
            match (response.status().as_u16(), location) {
                (301 | 302 | 303 | 307 | 308, Some(location)) => url = redirected(&url, location),
                _ => return Ok(response),
            }
        }
        Err(ureq::Error::TooManyRedirects)
    }

    /// Returns text without the token, on one line of limited length.
    pub(crate) fn quoted(&self, text: &str) -> String {
        let text = match &self.token {
            Some(token) => text.replace(token.as_str(), "…"),
            None => text.to_owned(),
        };
        text.lines().next().unwrap_or_default().chars().take(MAX_QUOTED).collect()
    }

    /// Fails without a token.
    pub(crate) fn require_token(&self) -> Result<()> {
        self.token.as_ref().map(|_| ()).ok_or(HubError::NoToken)
    }

    /// Gets JSON of up to `limit` bytes.
    pub(crate) fn get_json<T: DeserializeOwned>(&self, what: &str, path: &str, limit: u64) -> Result<T> {
        let url = format!("{}{path}", self.endpoint);
        let mut response = self.answered(what, "ask for", || self.get(&url, None, Some(JSON_TIMEOUT)))?;
        let bytes = bytes(what, &mut response, limit)?;
        serde_json::from_slice(&bytes).map_err(|error| self.not_json(what, &error))
    }

    fn not_json(&self, what: &str, error: &serde_json::Error) -> HubError {
        let problem =
            format!("the answer isn't JSON of the hub's API: {}", self.quoted(&anec_base::json::problem(error)));
        HubError::Answer { what: what.to_owned(), problem }
    }

    /// Posts to one of the hub's own URLs; returns the JSON of the answer, if any.
    pub(crate) fn post(&self, what: &str, path: &str, kind: &str, body: &[u8]) -> Result<Json> {
        let url = format!("{}{path}", self.endpoint);
        let mut response = self.answered(what, "upload", || {
            let mut request = self.agent.post(&url).header("content-type", kind);
            if kind.contains("lfs") {
                request = request.header("accept", kind);
            }
            if let Some(authorization) = self.authorization(&url) {
                request = request.header("authorization", authorization);
            }
            request.send(body)
        })?;
        match bytes(what, &mut response, MAX_JSON)? {
            bytes if bytes.is_empty() => Ok(Json::Null),
            bytes => serde_json::from_slice(&bytes).map_err(|error| self.not_json(what, &error)),
        }
    }

    /// Sends a request with retries and returns a successful answer.
    pub(crate) fn answered(
        &self,
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
                    let error_text = self.error_text(response);
                    Err(HubError::Answer {
                        what: what.to_owned(),
                        problem: format!("the hub says {status}{error_text}"),
                    })
                }
            };
        }
    }

    /// Returns the hub's error message, shortened to fit into ours.
    fn error_text(&self, mut response: Response<Body>) -> String {
        let text = response.body_mut().with_config().limit(4096).read_to_string().unwrap_or_default();
        let json = serde_json::from_str::<Json>(&text).unwrap_or_default();
        match json["error"].as_str() {
            Some(error) => format!(": {}", self.quoted(error)),
            None => String::new(),
        }
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

/// Waits before a retry, longer each time.
pub(crate) fn pause(attempt: u32) {
    std::thread::sleep(Duration::from_millis(200 << (2 * (attempt - 1)).min(6)));
}

pub(crate) fn unreachable(action: &'static str, what: &str, error: &dyn std::fmt::Display) -> HubError {
    HubError::Unreachable { action, what: what.to_owned(), problem: error.to_string() }
}

fn bytes(what: &str, response: &mut Response<Body>, limit: u64) -> Result<Vec<u8>> {
    let read = response.body_mut().with_config().limit(limit).read_to_vec();
    read.map_err(|error| unreachable("ask for", what, &error))
}

/// Returns scheme, host and port of a URL.
fn origin(url: &str) -> Option<(String, String, u16)> {
    let uri: Uri = url.parse().ok()?;
    let scheme = uri.scheme_str()?.to_ascii_lowercase();
    let port = uri.port_u16().unwrap_or(if scheme == "http" { 80 } else { 443 });
    // an authority with userinfo may look like another host
    let host = uri.host().filter(|_| !uri.authority().is_some_and(|authority| authority.as_str().contains('@')))?;
    Some((scheme, host.to_ascii_lowercase(), port))
}

/// Returns the URL that a redirect of `url` leads to.
fn redirected(url: &str, location: &str) -> String {
    if location.contains("://") {
        return location.to_owned();
    }
    let (scheme, rest) = url.split_once("://").unwrap_or(("https", url));
    let host = rest.split('/').next().unwrap_or_default();
    match location.strip_prefix("//") {
        Some(other) => format!("{scheme}://{other}"),
        None if location.starts_with('/') => format!("{scheme}://{host}{location}"),
        None => {
            let folder = rest.split('?').next().unwrap_or_default().rsplit_once('/').map_or(host, |(folder, _)| folder);
            format!("{scheme}://{folder}/{location}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_token_goes_to_the_hubs_own_addresses_alone() {
        let hub = Hub::new("https://hub.example", Some("secret".into()));
        for own in ["https://hub.example/a", "https://HUB.example:443/a"] {
            assert_eq!(hub.authorization(own).as_deref(), Some("Bearer secret"), "{own}");
        }
        for other in [
            "http://hub.example/a",
            "https://hub.example:8443/a",
            "https://hub.example.evil.org/a",
            "https://hub.example@evil.org/a",
            "https://evil.org/https://hub.example",
        ] {
            assert_eq!(hub.authorization(other), None, "{other}");
        }
        assert_eq!(hub.quoted("no secret here\nand more"), "no … here");
        assert_eq!(hub.quoted(&"x".repeat(1000)).len(), MAX_QUOTED);
    }

    #[test]
    fn redirects_are_relative_or_whole() {
        let from = "https://hub.example/a/b?c=d";
        for (location, target) in [
            ("https://cdn.example/x", "https://cdn.example/x"),
            ("/x", "https://hub.example/x"),
            ("x", "https://hub.example/a/x"),
            ("//cdn.example/x", "https://cdn.example/x"),
        ] {
            assert_eq!(redirected(from, location), target);
        }
    }
}
