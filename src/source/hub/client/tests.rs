//! Against a hub of one repository that this test serves itself.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use tempfile::TempDir;

use super::*;
use anec_base::{Diagnostic, Fault};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A hub that has `owner/model` and remembers which files it gave.
struct Hub {
    endpoint: String,
    given: Arc<Mutex<Vec<String>>>,
}

impl Hub {
    fn serve(files: &[(&str, &str)]) -> Self {
        let files: BTreeMap<String, String> = files.iter().map(|(n, c)| ((*n).to_owned(), (*c).to_owned())).collect();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let given = Arc::new(Mutex::new(Vec::new()));
        let log = given.clone();
        // The thread ends with the process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (files, log) = (files.clone(), log.clone());
                std::thread::spawn(move || while answer(&stream, &files, &log).is_some() {});
            }
        });
        Hub { endpoint, given }
    }

    fn client(&self, cache: &TempDir) -> Client {
        let cache = Cache::new(cache.path().to_owned());
        let builder = ApiBuilder::from_cache(cache.clone()).with_endpoint(self.endpoint.clone()).with_progress(false);
        Client::new("hf:owner/model", cache, Some(builder)).unwrap()
    }

    fn given(&self) -> Vec<String> {
        std::mem::take(&mut self.given.lock().unwrap())
    }
}

/// Answers one request, or nothing when the connection is closed.
fn answer(mut stream: &TcpStream, files: &BTreeMap<String, String>, log: &Mutex<Vec<String>>) -> Option<()> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let path = lines.next()?.split(' ').nth(1)?.to_owned();
    let start: usize = lines
        .take_while(|line| !line.is_empty())
        .find_map(|line| line.to_lowercase().strip_prefix("range: bytes=")?.split('-').next()?.parse().ok())
        .unwrap_or(0);
    let probe = start == 0 && !log.lock().unwrap().contains(&path);
    let (status, body, extra) = if path.starts_with("/api/models/owner/model/revision/") {
        let siblings: Vec<_> = files.keys().map(|name| serde_json::json!({"rfilename": name})).collect();
        ("200 OK", serde_json::json!({"sha": COMMIT, "siblings": siblings}).to_string(), String::new())
    } else if let Some(name) = path.strip_prefix(&format!("/owner/model/resolve/{COMMIT}/")) {
        let content = &files[name];
        let headers = format!("etag: \"e-{}\"\r\nx-repo-commit: {COMMIT}\r\n", name.replace('/', "-"));
        let range = format!("content-range: bytes {start}-{}/{}\r\n", content.len() - 1, content.len());
        if probe {
            log.lock().unwrap().push(path.clone());
        }
        ("206 Partial Content", content[start..].to_owned(), headers + &range)
    } else {
        ("404 Not Found", String::new(), String::new())
    };
    let length = body.len();
    write!(stream, "HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n{extra}\r\n{body}").ok()?;
    None
}

fn location(name: &str) -> Location {
    Location::parse(name).unwrap().unwrap()
}

fn names(given: &[String]) -> Vec<&str> {
    given.iter().map(|path| path.rsplit('/').next().unwrap()).collect()
}

#[test]
fn a_sharded_model_is_downloaded_once_and_then_found_offline() {
    let index = r#"{"weight_map": {"a": "s1.safetensors", "b": "s2.safetensors"}}"#;
    let hub = Hub::serve(&[
        ("README.md", "no"),
        ("config.json", "{}"),
        ("model.safetensors.index.json", index),
        ("s1.safetensors", "one"),
        ("s2.safetensors", "two"),
        ("unrelated.safetensors", "no"),
    ]);
    let cache = TempDir::new().unwrap();
    let location = location("hf:owner/model");
    let folder = hub.client(&cache).download(&location).unwrap();
    assert_eq!(std::fs::read_to_string(folder.join("s2.safetensors")).unwrap(), "two");
    let expected = ["config.json", "model.safetensors.index.json", "s1.safetensors", "s2.safetensors"];
    assert_eq!(names(&hub.given()), expected);
    assert_eq!(hub.client(&cache).download(&location).unwrap(), folder);
    assert!(hub.given().is_empty());

    let offline = Client::new("hf:owner/model", Cache::new(cache.path().to_owned()), None).unwrap();
    assert_eq!(offline.download(&location).unwrap(), folder);
    // A hub that doesn't answer is like none.
    let nobody = Hub { endpoint: "http://127.0.0.1:9".into(), given: Arc::default() };
    assert_eq!(nobody.client(&cache).download(&location).unwrap(), folder);
    std::fs::remove_file(folder.join("s1.safetensors")).unwrap();
    let error = offline.download(&location).unwrap_err();
    assert_eq!(error.fault(), Fault::Platform);
    assert!(error.to_string().contains("offline, and the cache") && error.to_string().contains("s1.safetensors"));
}

#[test]
fn of_many_ggufs_only_the_named_one_is_downloaded() {
    let hub = Hub::serve(&[("m-q4.gguf", "four"), ("m-q8.gguf", "eight"), ("config.json", "{}")]);
    let cache = TempDir::new().unwrap();
    let path = hub.client(&cache).download(&location("hf:owner/model@v1/m-q8.gguf")).unwrap();
    assert_eq!(std::fs::read_to_string(path).unwrap(), "eight");
    assert_eq!(names(&hub.given()), ["m-q8.gguf"]);
    let error = hub.client(&cache).download(&location("hf:owner/model")).unwrap_err();
    assert!(error.to_string().contains("2 GGUF models; name one of them: m-q4.gguf, m-q8.gguf"), "{error}");
    assert_eq!(error.fault(), Fault::Source);
}

#[test]
fn a_hub_that_says_no_is_told_from_one_that_is_silent() {
    let cache = TempDir::new().unwrap();
    let hub = Hub::serve(&[]);
    let error = hub.client(&cache).download(&location("hf:owner/other")).unwrap_err();
    assert!(error.to_string().contains("the hub doesn't have the repository"), "{error}");
    assert_eq!(error.fault(), Fault::Source);
    let nobody = Hub { endpoint: "http://127.0.0.1:9".into(), given: Arc::default() };
    let error = nobody.client(&cache).download(&location("hf:owner/model")).unwrap_err();
    assert!(error.to_string().contains("can't download the repository"), "{error}");
    assert_eq!(error.fault(), Fault::Platform);
    assert!(error.help().unwrap().contains("by other means"));
}
