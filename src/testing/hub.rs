//! Local hub that speaks the Hugging Face hub's HTTP API as far as models need it: listings, files with ranges and
//! redirects, commits, Git LFS in one piece and in parts. Keeps everything in memory.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anec_base::hexadecimal;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value as Json, json};
use sha2::{Digest, Sha256};

/// Files of a commit, by path.
type Tree = BTreeMap<String, Vec<u8>>;

/// Behaviour of the double, faults included.
#[derive(Clone, Debug, Default)]
pub struct HubBehavior {
    /// Token required for writing.
    pub token: Option<String>,
    /// Size of LFS parts in bytes.
    pub part: Option<u64>,
    /// Number of bytes after which every first answer with a file's content breaks off.
    pub cut: Option<usize>,
    /// Ignores ranges: answers with the whole content.
    pub ignores_ranges: bool,
    /// Corrupts the first byte of all content.
    pub damages: bool,
}

#[derive(Default)]
struct State {
    behavior: HubBehavior,
    /// Commits by `owner/name`, the newest last.
    repositories: BTreeMap<String, Vec<Tree>>,
    lfs: BTreeMap<String, Vec<u8>>,
    parts: BTreeMap<String, BTreeMap<u64, Vec<u8>>>,
    requested: Vec<String>,
    log: Vec<String>,
}

#[derive(Clone)]
pub struct FakeHub {
    endpoint: String,
    state: Arc<Mutex<State>>,
}

impl FakeHub {
    /// Starts an empty hub. Its thread ends with the process.
    pub fn start(behavior: HubBehavior) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
        let hub = FakeHub { endpoint, state: Arc::new(Mutex::new(State { behavior, ..State::default() })) };
        let answering = hub.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let hub = answering.clone();
                std::thread::spawn(move || hub.answer(&stream));
            }
        });
        hub
    }

    /// URL of the hub.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Commits files to a repository.
    pub fn commit(&self, repository: &str, files: &[(&str, &[u8])]) {
        let mut state = self.lock();
        let commits = state.repositories.entry(repository.to_owned()).or_default();
        let mut tree = commits.last().cloned().unwrap_or_default();
        tree.extend(files.iter().map(|(path, content)| ((*path).to_owned(), content.to_vec())));
        commits.push(tree);
    }

    /// Files of a repository's newest commit.
    pub fn files(&self, repository: &str) -> Tree {
        self.lock().repositories.get(repository).and_then(|commits| commits.last()).cloned().unwrap_or_default()
    }

    /// Number of commits of a repository.
    pub fn commits(&self, repository: &str) -> usize {
        self.lock().repositories.get(repository).map_or(0, Vec::len)
    }

    /// Paths of files whose content was requested since the last call.
    pub fn requested_files(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().requested)
    }

    /// Requests since the last call: method and path.
    pub fn log(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().log)
    }

    /// Changes the behaviour.
    pub fn change_behavior(&self, change: impl FnOnce(&mut HubBehavior)) {
        change(&mut self.lock().behavior);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, stream: &TcpStream) -> Option<()> {
        let request = Request::read(stream)?;
        let reply = self.reply(&request);
        reply.write(stream, request.method == "HEAD")
    }

    fn reply(&self, request: &Request) -> Reply {
        self.lock().log.push(format!("{} {}", request.method, request.path));
        let path = request.path.split('?').next().unwrap_or_default().trim_start_matches('/').to_owned();
        let parts: Vec<&str> = path.split('/').collect();
        let behavior = self.lock().behavior.clone();
        let bearer = request.header("authorization").and_then(|value| value.strip_prefix("Bearer "));
        let may_write = behavior.token.as_deref().is_none_or(|token| bearer == Some(token));
        match (request.method.as_str(), &parts[..]) {
            ("GET", ["api", "models", owner, name, "revision", revision]) => {
                self.info(&format!("{owner}/{name}"), revision).unwrap_or_else(Reply::absent)
            }
            ("GET", ["api", "models", owner, name, "tree", revision]) => {
                self.tree(&format!("{owner}/{name}"), revision).unwrap_or_else(Reply::absent)
            }
            ("GET" | "HEAD", [owner, name, "resolve", revision, file @ ..]) => {
                let (repository, file) = (format!("{owner}/{name}"), decoded(&file.join("/")));
                self.resolve(request, &repository, revision, &file).unwrap_or_else(Reply::absent)
            }
            // the token must not reach the content host
            (_, ["cdn", ..]) if bearer.is_some() => Reply::json(400, json!({"error": "a token came along"})),
            ("GET" | "HEAD", ["cdn", oid]) => self.cdn(request, oid).unwrap_or_else(Reply::absent),
            ("PUT", ["lfs", oid]) => self.put(oid, None, &request.body),
            ("PUT", ["lfs", oid, part]) => self.put(oid, part.parse().ok(), &request.body),
            ("POST", _) if !may_write => Reply::json(401, json!({"error": "Invalid username or password."})),
            ("POST", ["api", "repos", "create"]) => {
                let body = request.json();
                let text = |key: &str| body[key].as_str().unwrap_or_default().to_owned();
                let repository = format!("{}/{}", text("organization"), text("name"));
                let mut state = self.lock();
                if state.repositories.contains_key(&repository) {
                    return Reply::json(409, json!({"error": "You already created this model repo"}));
                }
                state.repositories.insert(repository.clone(), vec![Tree::new()]);
                Reply::json(200, json!({"url": format!("{}/{repository}", self.endpoint)}))
            }
            ("POST", ["api", "models", owner, name, "preupload", _]) => {
                self.preupload(&format!("{owner}/{name}"), &request.json())
            }
            ("POST", [_, _, "info", "lfs", "objects", "batch"]) => self.batch(&request.json(), &behavior),
            ("POST", ["lfs", oid, "complete"]) => self.complete(oid, &request.json()),
            ("POST", ["lfs", oid, "verify"]) => {
                let body = request.json();
                let right = self.lock().lfs.get(*oid).is_some_and(|bytes| body["size"] == bytes.len());
                Reply::json(if right { 200 } else { 422 }, json!({}))
            }
            ("POST", ["api", "models", owner, name, "commit", _]) => {
                self.receive_commit(&format!("{owner}/{name}"), &request.body)
            }
            _ => Reply::absent(),
        }
    }

    fn info(&self, repository: &str, revision: &str) -> Option<Reply> {
        let state = self.lock();
        let (sha, tree) = commit_of(repository, state.repositories.get(repository)?, revision)?;
        let siblings: Vec<Json> = tree
            .iter()
            .map(|(path, content)| match is_lfs(path, content.len()) {
                true => json!({
                    "rfilename": path, "size": content.len(), "blobId": git_blob(b"pointer"),
                    "lfs": {"sha256": sha256(content), "size": content.len(), "pointerSize": 130},
                }),
                false => json!({"rfilename": path, "size": content.len(), "blobId": git_blob(content)}),
            })
            .collect();
        Some(Reply::json(200, json!({"id": repository, "modelId": repository, "sha": sha, "siblings": siblings})))
    }

    /// Files of a commit, in the form that the hub's own client requests.
    fn tree(&self, repository: &str, revision: &str) -> Option<Reply> {
        let state = self.lock();
        let (_, tree) = commit_of(repository, state.repositories.get(repository)?, revision)?;
        let entries = tree.iter().map(|(path, content)| {
            let mut entry = json!({"type": "file", "path": path, "size": content.len(), "oid": git_blob(content)});
            if is_lfs(path, content.len()) {
                entry["lfs"] = json!({"oid": sha256(content), "size": content.len(), "pointerSize": 130});
            }
            entry
        });
        Some(Reply::json(200, Json::Array(entries.collect())))
    }

    fn resolve(&self, request: &Request, repository: &str, revision: &str, file: &str) -> Option<Reply> {
        let mut state = self.lock();
        let (sha, tree) = commit_of(repository, state.repositories.get(repository)?, revision)?;
        let content = tree.get(file)?.clone();
        if !state.requested.iter().any(|requested| requested == file) {
            state.requested.push(file.to_owned());
        }
        let common = vec![("x-repo-commit".to_owned(), sha)];
        if is_lfs(file, content.len()) {
            let oid = sha256(&content);
            // content is on another host, as on the real hub
            let host = self.endpoint.replace("127.0.0.1", "localhost");
            let (size, location) = (content.len().to_string(), format!("{host}/cdn/{oid}"));
            state.lfs.insert(oid.clone(), content);
            let headers = [("x-linked-etag", format!("\"{oid}\"")), ("x-linked-size", size), ("location", location)];
            let headers = headers.into_iter().map(|(name, value)| (name.to_owned(), value));
            return Some(Reply {
                status: 302,
                headers: common.into_iter().chain(headers).collect(),
                ..Reply::absent()
            });
        }
        let etag = ("etag".to_owned(), format!("\"{}\"", git_blob(&content)));
        drop(state);
        Some(self.content(request, file, &content, common.into_iter().chain([etag]).collect()))
    }

    fn cdn(&self, request: &Request, oid: &str) -> Option<Reply> {
        let content = self.lock().lfs.get(oid)?.clone();
        Some(self.content(request, oid, &content, vec![("etag".into(), format!("\"{oid}\""))]))
    }

    /// Content, or the requested range of it.
    fn content(&self, request: &Request, name: &str, content: &[u8], mut headers: Vec<(String, String)>) -> Reply {
        let mut state = self.lock();
        let range = request.header("range").and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
        let start = range.and_then(|(start, _)| start.parse().ok()).filter(|_| !state.behavior.ignores_ranges);
        let (status, start) = match start {
            Some(start) if start >= content.len() && !content.is_empty() => {
                return Reply { status: 416, headers, ..Reply::absent() };
            }
            Some(start) => (206, start),
            None => (200, 0),
        };
        let end = range.and_then(|(_, end)| end.parse::<usize>().ok()).map_or(content.len(), |end| end + 1);
        let mut body = content[start..end.min(content.len()).max(start)].to_vec();
        if status == 206 {
            let last = (start + body.len()).saturating_sub(1);
            headers.push(("content-range".into(), format!("bytes {start}-{last}/{}", content.len())));
        }
        if state.behavior.damages
            && start == 0
            && let Some(first) = body.first_mut()
        {
            *first ^= 1;
        }
        let key = format!("cut {name}");
        let cut = state.behavior.cut.filter(|_| request.method == "GET" && !state.log.contains(&key));
        if cut.is_some() {
            state.log.push(key);
        }
        Reply { status, headers, body, cut }
    }

    fn preupload(&self, repository: &str, body: &Json) -> Reply {
        let state = self.lock();
        let Some(tree) = state.repositories.get(repository).and_then(|commits| commits.last()) else {
            return Reply::json(404, json!({"error": "Repository not found"}));
        };
        let files = body["files"].as_array().into_iter().flatten().map(|file| {
            let (path, size) = (file["path"].as_str().unwrap_or_default(), file["size"].as_u64().unwrap_or(0));
            let lfs = is_lfs(path, size as usize);
            let oid = tree.get(path).map(|content| if lfs { sha256(content) } else { git_blob(content) });
            json!({"path": path, "uploadMode": if lfs { "lfs" } else { "regular" }, "shouldIgnore": false, "oid": oid})
        });
        Reply::json(200, json!({"files": files.collect::<Vec<_>>()}))
    }

    fn batch(&self, body: &Json, behavior: &HubBehavior) -> Reply {
        let state = self.lock();
        let objects = body["objects"].as_array().into_iter().flatten().map(|object| {
            let (oid, size) = (object["oid"].as_str().unwrap_or_default(), object["size"].as_u64().unwrap_or(0));
            if state.lfs.contains_key(oid) {
                return json!({"oid": oid, "size": size});
            }
            let at = format!("{}/lfs/{oid}", self.endpoint);
            let upload = match behavior.part {
                None => json!({"href": at}),
                Some(part) => {
                    let mut header = json!({"chunk_size": part.to_string()});
                    for number in 1..=size.div_ceil(part) {
                        header[format!("{number:05}")] = json!(format!("{at}/{number}"));
                    }
                    json!({"href": format!("{at}/complete"), "header": header})
                }
            };
            json!({"oid": oid, "size": size, "actions": {"upload": upload, "verify": {"href": format!("{at}/verify")}}})
        });
        let transfer = if behavior.part.is_some() { "multipart" } else { "basic" };
        Reply::json(200, json!({"transfer": transfer, "objects": objects.collect::<Vec<_>>()}))
    }

    fn put(&self, oid: &str, part: Option<u64>, body: &[u8]) -> Reply {
        let mut state = self.lock();
        let etag = sha256(body);
        match part {
            Some(part) => {
                state.parts.entry(oid.to_owned()).or_default().insert(part, body.to_vec());
            }
            None if etag != oid => return Reply::json(400, json!({"error": "the content has another digest"})),
            None => {
                state.lfs.insert(oid.to_owned(), body.to_vec());
            }
        }
        Reply { status: 200, headers: vec![("etag".into(), format!("\"{etag}\""))], ..Reply::absent() }
    }

    fn complete(&self, oid: &str, body: &Json) -> Reply {
        let mut state = self.lock();
        let parts = state.parts.remove(oid).unwrap_or_default();
        let named: Vec<(u64, String)> = body["parts"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|part| {
                (part["partNumber"].as_u64().unwrap_or(0), part["etag"].as_str().unwrap_or_default().to_owned())
            })
            .collect();
        let received: Vec<(u64, String)> =
            parts.iter().map(|(number, bytes)| (*number, format!("\"{}\"", sha256(bytes)))).collect();
        let whole: Vec<u8> = parts.into_values().flatten().collect();
        if named != received || sha256(&whole) != oid {
            return Reply::json(400, json!({"error": "the parts aren't the whole"}));
        }
        state.lfs.insert(oid.to_owned(), whole);
        Reply::json(200, json!({}))
    }

    fn receive_commit(&self, repository: &str, body: &[u8]) -> Reply {
        let mut state = self.lock();
        let Some(mut tree) = state.repositories.get(repository).and_then(|commits| commits.last()).cloned() else {
            return Reply::json(404, json!({"error": "Repository not found"}));
        };
        for line in body.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let line: Json = serde_json::from_slice(line).expect("a line of a commit is JSON");
            let value = &line["value"];
            let path = value["path"].as_str().unwrap_or_default().to_owned();
            match line["key"].as_str() {
                Some("header") => assert!(value["summary"].is_string(), "{line}"),
                Some("file") => {
                    assert_eq!(value["encoding"], "base64");
                    let content = BASE64.decode(value["content"].as_str().unwrap_or_default()).expect("base64");
                    tree.insert(path, content);
                }
                Some("lfsFile") => {
                    let Some(content) = state.lfs.get(value["oid"].as_str().unwrap_or_default()) else {
                        return Reply::json(400, json!({"error": "LFS lacks an object"}));
                    };
                    assert_eq!(value["size"], content.len());
                    tree.insert(path, content.clone());
                }
                Some("deletedFile") => {
                    tree.remove(&path);
                }
                _ => return Reply::json(400, json!({"error": format!("{line}")})),
            }
        }
        let commits = state.repositories.entry(repository.to_owned()).or_default();
        commits.push(tree);
        let oid = sha(repository, commits.len() - 1);
        let url = format!("{}/{repository}/commit/{oid}", self.endpoint);
        Reply::json(200, json!({"success": true, "commitOid": oid, "commitUrl": url, "hookOutput": ""}))
    }
}

/// Id of a commit.
fn sha(repository: &str, index: usize) -> String {
    sha1_smol::Sha1::from(format!("{repository} {index}")).digest().to_string()
}

/// Commit that a revision names; `main` is the newest.
fn commit_of(repository: &str, commits: &[Tree], revision: &str) -> Option<(String, Tree)> {
    let names = (0..commits.len()).map(|index| sha(repository, index));
    let index = match revision {
        "main" => commits.len().checked_sub(1)?,
        revision => names.into_iter().position(|name| name == revision)?,
    };
    Some((sha(repository, index), commits[index].clone()))
}

/// Whether the hub stores a file in LFS, by its extension or size.
fn is_lfs(path: &str, size: usize) -> bool {
    [".bin", ".gguf", ".mlmodel", ".onnx", ".safetensors"].iter().any(|end| path.ends_with(end)) || size > 10 << 20
}

fn sha256(bytes: &[u8]) -> String {
    hexadecimal(&Sha256::digest(bytes))
}

fn git_blob(bytes: &[u8]) -> String {
    let mut sha1 = sha1_smol::Sha1::new();
    sha1.update(format!("blob {}\0", bytes.len()).as_bytes());
    sha1.update(bytes);
    sha1.digest().to_string()
}

fn decoded(path: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = path.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let digits: Vec<u8> = rest.by_ref().take(2).collect();
                std::str::from_utf8(&digits).ok().and_then(|digits| u8::from_str_radix(digits, 16).ok()).unwrap_or(b'?')
            }
            byte => byte,
        });
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

struct Request {
    method: String,
    path: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Request {
    fn read(stream: &TcpStream) -> Option<Self> {
        let mut reader = BufReader::new(stream);
        let mut line = || {
            let mut line = String::new();
            reader.read_line(&mut line).ok().filter(|count| *count > 0)?;
            Some(line.trim_end().to_owned())
        };
        let first = line()?;
        let mut words = first.split(' ');
        let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
        let mut headers = Vec::new();
        loop {
            let line = line()?;
            if line.is_empty() {
                break;
            }
            let (name, value) = line.split_once(':')?;
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        let mut request = Request { method, path, headers, body: Vec::new() };
        if request.header("expect").is_some() {
            let mut stream = stream;
            stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").ok()?;
        }
        if let Some(length) = request.header("content-length").and_then(|length| length.parse().ok()) {
            request.body = vec![0; length];
            reader.read_exact(&mut request.body).ok()?;
        } else if request.header("transfer-encoding") == Some("chunked") {
            loop {
                let mut size = String::new();
                reader.read_line(&mut size).ok()?;
                let size = usize::from_str_radix(size.trim(), 16).ok()?;
                let mut chunk = vec![0; size + 2];
                reader.read_exact(&mut chunk).ok()?;
                if size == 0 {
                    break;
                }
                request.body.extend_from_slice(&chunk[..size]);
            }
        }
        Some(request)
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    fn json(&self) -> Json {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}

struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    /// Number of body bytes after which the answer breaks off.
    cut: Option<usize>,
}

impl Reply {
    fn absent() -> Self {
        Reply { status: 404, headers: Vec::new(), body: Vec::new(), cut: None }
    }

    fn json(status: u16, body: Json) -> Self {
        let headers = vec![("content-type".into(), "application/json; charset=utf-8".into())];
        Reply { status, headers, body: body.to_string().into_bytes(), cut: None }
    }

    fn write(self, mut stream: &TcpStream, head: bool) -> Option<()> {
        let mut text =
            format!("HTTP/1.1 {} .\r\ncontent-length: {}\r\nconnection: close\r\n", self.status, self.body.len());
        for (name, value) in &self.headers {
            text.push_str(&format!("{name}: {value}\r\n"));
        }
        stream.write_all(format!("{text}\r\n").as_bytes()).ok()?;
        let end = self.cut.unwrap_or(usize::MAX).min(self.body.len());
        if !head {
            stream.write_all(&self.body[..end]).ok()?;
        }
        stream.flush().ok()
    }
}
