//! Tests against a local hub that disconnects, corrupts and splits its answers.

use std::io::{Read, Write};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anec_base::{Diagnostic, Fault, Progress, ProgressEvent};
use anec_testing::hub::{FakeHub, HubBehavior};
use tempfile::TempDir;

use crate::download::Transfer;
use crate::{FileHash, Hub, HubCache, HubError, Upload, UploadContent};

/// Returns pseudo-random bytes, in which compression or repetition can't hide an error.
fn content(length: usize) -> Vec<u8> {
    (0..length as u32).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).take(length).collect()
}

fn fetch(hub: &Hub, name: &str, to: &Path) -> Result<(), HubError> {
    let repository = hub.repository("o/m", "main").unwrap();
    let progress = Progress::hidden();
    let file = repository.file(name).unwrap();
    hub.download(&repository, file, to, &Transfer::new(&progress, file.size))
}

#[test]
fn a_broken_download_goes_on_where_it_was() {
    let fake = FakeHub::start(HubBehavior { cut: Some(300_000), ..HubBehavior::default() });
    let weights = content(1_000_000);
    fake.commit("o/m", &[("w.safetensors", &weights), ("a b/c.json", b"{}")]);
    let hub = Hub::new(fake.endpoint(), None);
    let room = TempDir::new().unwrap();
    let to = room.path().join("w");
    fetch(&hub, "w.safetensors", &to).unwrap();
    assert!(std::fs::read(&to).unwrap() == weights);
    // the first answer broke off, the second gave the rest
    let asked = fake.log().iter().filter(|line| line.contains("/resolve/")).count();
    assert_eq!(asked, 2);
    assert_eq!(std::fs::read_dir(room.path()).unwrap().count(), 1, "nothing is left beside it");

    // a killed process left a partial file: only the rest is requested, unless the server ignores ranges
    for ignores_ranges in [false, true] {
        fake.change_behavior(|habits| (habits.cut, habits.ignores_ranges) = (None, ignores_ranges));
        std::fs::remove_file(&to).unwrap();
        std::fs::write(room.path().join("w.incomplete"), &weights[..400_000]).unwrap();
        fetch(&hub, "w.safetensors", &to).unwrap();
        assert!(std::fs::read(&to).unwrap() == weights);
    }
    fetch(&hub, "a b/c.json", &room.path().join("c")).unwrap();
    assert_eq!(std::fs::read(room.path().join("c")).unwrap(), b"{}");
}

#[test]
fn a_file_with_a_wrong_digest_never_gets_its_name() {
    let fake = FakeHub::start(HubBehavior { damages: true, ..HubBehavior::default() });
    fake.commit("o/m", &[("w.safetensors", &content(1000)), ("config.json", b"{}")]);
    let hub = Hub::new(fake.endpoint(), None);
    let room = TempDir::new().unwrap();
    for name in ["w.safetensors", "config.json"] {
        let error = fetch(&hub, name, &room.path().join(name)).unwrap_err();
        assert!(matches!(error, HubError::Digest { .. }), "{error}");
        assert_eq!(error.fault(), Fault::Source);
    }
    assert_eq!(std::fs::read_dir(room.path()).unwrap().count(), 0);
    // a damaged partial file is detected, too
    fake.change_behavior(|habits| habits.damages = false);
    std::fs::write(room.path().join("w.safetensors.incomplete"), b"something else").unwrap();
    assert!(fetch(&hub, "w.safetensors", &room.path().join("w.safetensors")).is_err());
    fetch(&hub, "w.safetensors", &room.path().join("w.safetensors")).unwrap();
}

#[test]
fn the_cache_has_the_form_of_all_hugging_face_tools() {
    let fake = FakeHub::start(HubBehavior::default());
    fake.commit("o/m", &[("w.safetensors", b"weights"), ("sub/config.json", b"{}")]);
    let hub = Hub::new(fake.endpoint(), None);
    let room = TempDir::new().unwrap();
    let cache = HubCache::new(room.path());
    let repository = hub.repository("o/m", "main").unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let heard = seen.clone();
    let progress = Progress::new(move |event| {
        if let ProgressEvent::Reached(count) = event {
            heard.lock().unwrap().push(count);
        }
    });
    let transfer = Transfer::new(&progress, 9);
    for file in &repository.files {
        cache.download(&hub, &repository, file, &transfer).unwrap();
        assert!(cache.has(&repository, file));
    }
    drop(transfer);
    cache.remember(&repository, "main").unwrap();
    let root = room.path().join("models--o--m");
    assert_eq!(std::fs::read(root.join("blobs").join(FileHash::sha256(b"weights").hex())).unwrap(), b"weights");
    assert_eq!(std::fs::read(root.join("blobs").join(FileHash::git_blob(b"{}").hex())).unwrap(), b"{}");
    let snapshot = root.join("snapshots").join(&repository.commit);
    assert_eq!(std::fs::read(snapshot.join("sub/config.json")).unwrap(), b"{}");
    assert_eq!(std::fs::read_to_string(root.join("refs/main")).unwrap(), repository.commit);
    assert_eq!(cache.commit("o/m", "main"), repository.commit);
    let seen = seen.lock().unwrap();
    assert!(seen.contains(&9) && seen.last() == Some(&0), "all of it, then a fresh start: {seen:?}");
}

fn uploads(room: &Path) -> Vec<Upload> {
    let weights = content(10_000);
    std::fs::write(room.join("weight.bin"), &weights).unwrap();
    let sha256 = FileHash::sha256(&weights).hex().to_owned();
    let content = UploadContent::File { path: room.join("weight.bin"), bytes: 10_000, sha256 };
    vec![
        Upload { path: "p.mlpackage/weights/weight.bin".into(), content },
        Upload { path: "README.md".into(), content: UploadContent::Bytes(b"a card".to_vec()) },
    ]
}

#[test]
fn files_go_up_in_one_commit_and_only_what_the_hub_lacks_is_sent() {
    for part in [None, Some(4096)] {
        let fake = FakeHub::start(HubBehavior { token: Some("t".into()), part, ..HubBehavior::default() });
        let hub = Hub::new(fake.endpoint(), Some("t".into()));
        let room = TempDir::new().unwrap();
        let files = uploads(room.path());
        hub.create("o/m", false).unwrap();
        hub.create("o/m", false).unwrap();
        let commit = hub.upload("o/m", "main", &files, "first", &Progress::hidden()).unwrap();
        assert_eq!((commit.changed, commit.sent), (2, 10_000));
        assert_eq!(fake.files("o/m")["p.mlpackage/weights/weight.bin"], content(10_000));
        assert_eq!(fake.files("o/m")["README.md"], b"a card");
        let puts = fake.log().iter().filter(|line| line.starts_with("PUT")).count();
        assert_eq!(puts, if part.is_some() { 3 } else { 1 });

        let again = hub.upload("o/m", "main", &files, "again", &Progress::hidden()).unwrap();
        assert_eq!((again.commit, again.changed, again.sent, fake.commits("o/m")), (None, 0, 0, 2));
        // an upload that broke off before its commit: LFS has the object, nothing is sent twice
        hub.create("o/other", true).unwrap();
        fake.log();
        let other = hub.upload("o/other", "main", &files, "first", &Progress::hidden()).unwrap();
        assert_eq!((other.changed, other.sent), (2, 0));
        assert!(fake.log().iter().all(|line| !line.starts_with("PUT")));
    }
}

#[test]
fn uploads_need_a_token_that_may_write_and_files_that_are_what_they_say() {
    let fake = FakeHub::start(HubBehavior { token: Some("t".into()), ..HubBehavior::default() });
    let room = TempDir::new().unwrap();
    let mut files = uploads(room.path());
    let nobody = Hub::new(fake.endpoint(), None);
    assert!(matches!(nobody.create("o/m", false), Err(HubError::NoToken)));
    let stranger = Hub::new(fake.endpoint(), Some("other".into()));
    assert!(matches!(stranger.create("o/m", false), Err(HubError::Refused { .. })));
    let hub = Hub::new(fake.endpoint(), Some("t".into()));
    let error = hub.upload("o/none", "main", &files, "m", &Progress::hidden()).unwrap_err();
    assert!(error.is_absence(), "{error}");
    std::fs::write(room.path().join("weight.bin"), vec![0; 10_000]).unwrap();
    hub.create("o/m", false).unwrap();
    let error = hub.upload("o/m", "main", &files, "m", &Progress::hidden()).unwrap_err();
    assert!(matches!(error, HubError::Digest { .. }), "{error}");
    assert!(fake.files("o/m").is_empty());
    files.truncate(0);
    assert_eq!(hub.upload("o/m", "main", &files, "m", &Progress::hidden()).unwrap().changed, 0);
}

#[test]
fn answers_that_no_hub_gives_are_refused() {
    let fake = FakeHub::start(HubBehavior::default());
    fake.commit("o/m", &[("../outside", b"x")]);
    let hub = Hub::new(fake.endpoint(), None);
    let error = hub.repository("o/m", "main").unwrap_err();
    assert!(matches!(error, HubError::Answer { .. }), "{error}");
    assert!(hub.repository("o/m", "v9").unwrap_err().is_absence());
    let nobody = Hub::new("http://127.0.0.1:9", None).repository("o/m", "main").unwrap_err();
    assert!(nobody.is_silence() && nobody.fault() == Fault::Platform);
}

/// Answers every request with a status and a body, as fast as `pause` lets each part go.
fn hub_that_says(status: &str, body: &str, pause: Option<Duration>) -> Hub {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let answer = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut head = [0; 4096];
            let _ = stream.read(&mut head);
            let parts = answer.as_bytes().chunks(if pause.is_some() { 1 } else { answer.len() });
            for part in parts {
                if stream.write_all(part).is_err() {
                    break;
                }
                pause.iter().for_each(|pause| std::thread::sleep(*pause));
            }
        }
    });
    Hub::new(&endpoint, Some("hf_secret".into()))
}

#[test]
fn listings_of_strangers_are_bounded() {
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let listing = |files: &str| format!("{{\"sha\": \"{commit}\", \"siblings\": [{files}]}}");
    let lfs = |size: &str| {
        let digest = "a".repeat(64);
        format!("{{\"rfilename\": \"w\", \"lfs\": {{\"sha256\": \"{digest}\", \"size\": {size}}}}}")
    };
    let blob = |size: &str| format!("{{\"rfilename\": \"w\", \"size\": {size}, \"blobId\": \"{commit}\"}}");
    let ask = |body: &str| hub_that_says("200 OK", body, None).repository("o/m", "main");
    assert_eq!(ask(&listing(&lfs("5"))).unwrap().files[0].size, 5);
    // sizes of which no sum of two fits, and others that are no sizes
    let sizes = ["9223372036854775808", "18446744073709551615", "1125899906842625", "-1", "1e30", "\"5\"", "null"];
    for size in sizes {
        for file in [lfs(size), blob(size)] {
            let error = ask(&listing(&file)).unwrap_err();
            assert!(matches!(error, HubError::Answer { .. }), "{size}: {error}");
        }
    }
    // more files than any repository has, and more bytes than any listing
    let many = vec!["{}"; 200_001].join(",");
    assert!(ask(&listing(&many)).unwrap_err().to_string().contains("it lists more than 200000 files"));
    let long = format!("[{}]", " ".repeat(65 << 20));
    assert!(ask(&long).unwrap_err().to_string().contains("limit"));
    assert!(ask(&"[".repeat(100_000)).unwrap_err().to_string().contains("isn't JSON"));
}

#[test]
fn a_token_that_a_hub_echoes_is_no_part_of_an_error() {
    for (status, body) in [
        ("500 Oh", "{\"error\": \"no rights for hf_secret\"}"),
        ("200 OK", "{\"sha\": \"x\", \"siblings\": [{\"rfilename\": \"../hf_secret\"}]}"),
        ("200 OK", "{\"sha\": {\"hf_secret\": 1}}"),
        ("200 OK", "hf_secret"),
        ("400 Bad", "hf_secret"),
    ] {
        let error = hub_that_says(status, body, None).repository("o/m", "main").unwrap_err().to_string();
        assert!(!error.contains("hf_secret") && error.len() < 400, "{error}");
    }
}

/// Total time of an answer, as the client has for listings: a byte from time to time doesn't prolong it.
#[test]
fn an_answer_of_a_byte_at_a_time_ends() {
    let hub = hub_that_says("200 OK", &" ".repeat(10_000), Some(Duration::from_millis(20)));
    let start = std::time::Instant::now();
    let url = format!("{}/api/models/o/m", hub.endpoint());
    let answer = hub.get(&url, None, Some(Duration::from_secs(2)));
    assert!(answer.and_then(|mut answer| answer.body_mut().read_to_vec()).is_err());
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

/// The hub's own client works with the double as with a hub, and with our cache.
#[test]
fn the_hubs_own_client_understands_the_double_and_our_cache() {
    let Some(python) = std::env::var_os("ANEC_PYTHON") else {
        return anec_base::skipped("not checked against huggingface_hub: ANEC_PYTHON isn't set");
    };
    let has = std::process::Command::new(&python).args(["-c", "import huggingface_hub"]).output().unwrap();
    if !has.status.success() {
        return anec_base::skipped("not checked against huggingface_hub: ANEC_PYTHON has none");
    }
    for part in [None, Some(4096)] {
        let fake = FakeHub::start(HubBehavior { token: Some("t".into()), part, ..HubBehavior::default() });
        let hub = Hub::new(fake.endpoint(), Some("t".into()));
        let room = TempDir::new().unwrap();
        let path = |name: &str| room.path().join(name);
        std::fs::create_dir_all(path("files/sub")).unwrap();
        std::fs::write(path("files/weight.bin"), content(10_000)).unwrap();
        std::fs::write(path("files/sub/config.json"), b"{}").unwrap();
        let sha256 = FileHash::sha256(&content(10_000)).hex().to_owned();
        let weights = UploadContent::File { path: path("files/weight.bin"), bytes: 10_000, sha256 };
        let files = [
            Upload { path: "weight.bin".into(), content: weights },
            Upload { path: "sub/config.json".into(), content: UploadContent::Bytes(b"{}".to_vec()) },
        ];
        hub.create("o/ours", false).unwrap();
        hub.upload("o/ours", "main", &files, "first", &Progress::hidden()).unwrap();
        let cache = HubCache::new(&path("cache"));
        let repository = hub.repository("o/ours", "main").unwrap();
        let progress = Progress::hidden();
        let transfer = Transfer::new(&progress, 10_002);
        repository.files.iter().for_each(|file| cache.download(&hub, &repository, file, &transfer).unwrap());
        cache.remember(&repository, "main").unwrap();

        let script = anec_testing::root().join("tests/hub_client.py");
        let mut client = std::process::Command::new(&python);
        client.arg(script).args([fake.endpoint().as_ref(), path("files").as_os_str()]);
        client.args([path("cache"), path("out")]).env("HF_HOME", path("home"));
        let output = client.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains("all of it works"), "{said}{}", String::from_utf8_lossy(&output.stderr));
        let theirs = hub.repository("o/python", "main").unwrap();
        fetch_from(&hub, &theirs, "weight.bin", &path("theirs"));
        assert_eq!(std::fs::read(path("theirs")).unwrap(), content(10_000));
    }
}

fn fetch_from(hub: &Hub, repository: &crate::RemoteRepository, name: &str, to: &Path) {
    let progress = Progress::hidden();
    let file = repository.file(name).unwrap();
    hub.download(repository, file, to, &Transfer::new(&progress, file.size)).unwrap();
}
