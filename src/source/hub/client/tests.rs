//! Tests against a hub on this machine.

use tempfile::TempDir;

use super::*;
use anec_base::{Diagnostic, Fault};
use anec_testing::hub::{FakeHub, HubBehavior};

fn hub(files: &[(&str, &str)]) -> FakeHub {
    let hub = FakeHub::start(HubBehavior::default());
    let files: Vec<(&str, &[u8])> = files.iter().map(|(name, content)| (*name, content.as_bytes())).collect();
    hub.commit("owner/model", &files);
    hub
}

fn client(endpoint: &str, cache: &TempDir) -> Client {
    Client::new("hf:owner/model", HubCache::new(cache.path()), Some(Hub::new(endpoint, None)))
}

fn location(name: &str) -> Location {
    Location::parse(name).unwrap().unwrap()
}

fn download(hub: &FakeHub, cache: &TempDir, name: &str) -> Result<PathBuf> {
    client(hub.endpoint(), cache).download(&location(name), &Progress::hidden())
}

/// Address without a server.
const NOBODY: &str = "http://127.0.0.1:9";

#[test]
fn a_sharded_model_is_downloaded_once_and_then_found_offline() {
    let index = r#"{"weight_map": {"a": "s1.safetensors", "b": "s2.safetensors"}}"#;
    let hub = hub(&[
        ("README.md", "no"),
        ("config.json", "{}"),
        ("model.safetensors.index.json", index),
        ("s1.safetensors", "one"),
        ("s2.safetensors", "two"),
        ("unrelated.safetensors", "no"),
    ]);
    let cache = TempDir::new().unwrap();
    let location = location("hf:owner/model");
    let folder = download(&hub, &cache, "hf:owner/model").unwrap();
    assert_eq!(std::fs::read_to_string(folder.join("s2.safetensors")).unwrap(), "two");
    let mut given = hub.requested_files();
    given.sort();
    assert_eq!(given, ["config.json", "model.safetensors.index.json", "s1.safetensors", "s2.safetensors"]);
    assert_eq!(download(&hub, &cache, "hf:owner/model").unwrap(), folder);
    assert!(hub.requested_files().is_empty());

    let offline = Client::new("hf:owner/model", HubCache::new(cache.path()), None);
    assert_eq!(offline.download(&location, &Progress::hidden()).unwrap(), folder);
    // a hub that doesn't answer is treated like offline
    let commit = client(hub.endpoint(), &cache).commit(&location).unwrap();
    assert_eq!(client(NOBODY, &cache).download(&location, &Progress::hidden()).unwrap(), folder);
    assert_eq!(client(NOBODY, &cache).commit(&location).unwrap(), commit);
    std::fs::remove_file(folder.join("s1.safetensors")).unwrap();
    let error = offline.download(&location, &Progress::hidden()).unwrap_err();
    assert_eq!(error.fault(), Fault::Platform);
    assert!(error.to_string().contains("offline, and the cache") && error.to_string().contains("s1.safetensors"));
}

#[test]
fn of_many_ggufs_only_the_named_one_is_downloaded() {
    let hub = hub(&[("m-q4.gguf", "four"), ("m-q8.gguf", "eight"), ("config.json", "{}")]);
    let cache = TempDir::new().unwrap();
    let path = download(&hub, &cache, "hf:owner/model/m-q8.gguf").unwrap();
    assert_eq!(std::fs::read_to_string(path).unwrap(), "eight");
    assert_eq!(hub.requested_files(), ["m-q8.gguf"]);
    let error = download(&hub, &cache, "hf:owner/model").unwrap_err();
    assert!(error.to_string().contains("2 GGUF models; name one of them: m-q4.gguf, m-q8.gguf"), "{error}");
    assert_eq!(error.fault(), Fault::Source);
}

#[test]
fn a_refusing_hub_is_told_from_a_silent_one() {
    let cache = TempDir::new().unwrap();
    let error = download(&hub(&[]), &cache, "hf:owner/other").unwrap_err();
    assert!(error.to_string().contains("the hub doesn't have the repository"), "{error}");
    assert_eq!(error.fault(), Fault::Source);
    let error = client(NOBODY, &cache).download(&location("hf:owner/model"), &Progress::hidden()).unwrap_err();
    assert!(error.to_string().contains("can't ask for the repository"), "{error}");
    assert_eq!(error.fault(), Fault::Platform);
    assert!(error.help().unwrap().contains("by other means"));
}
