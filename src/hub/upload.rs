//! Upload of files: the hub decides which go through Git LFS and which it has already; one commit contains all.

use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;

use anec_base::{FileError, Progress, open_file};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value as Json, json};
use ureq::SendBody;

use crate::client::{Hub, pause};
use crate::download::Transfer;
use crate::error::{HubError, Result};
use crate::hash::{FileHash, RunningDigest};

/// Maximum number of files per request.
const MAX_FILES: usize = 256;
/// Number of bytes by which the hub decides how to store a file.
const SAMPLE: usize = 512;
/// Maximum size of a file within the commit in bytes; the hub sends larger ones through LFS anyway.
const MAX_INLINE: u64 = 64 << 20;
/// Maximum number of attempts per piece.
const ATTEMPTS: u32 = 5;
/// Media type of Git LFS.
const LFS: &str = "application/vnd.git-lfs+json";

/// File to upload.
#[derive(Clone, Debug)]
pub struct Upload {
    /// Path within the repository.
    pub path: String,
    /// Content of the file.
    pub content: UploadContent,
}

/// Content of a file to upload.
#[derive(Clone, Debug)]
pub enum UploadContent {
    /// Local file.
    File {
        /// Path of the file.
        path: PathBuf,
        /// Size in bytes.
        bytes: u64,
        /// SHA-256 in hexadecimal digits.
        sha256: String,
    },
    /// Bytes in memory.
    Bytes(Vec<u8>),
}

/// Result of an upload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubCommit {
    /// Commit; `None` if the repository had all files already.
    pub commit: Option<String>,
    /// Number of new or changed files.
    pub changed: usize,
    /// Number of bytes sent through LFS.
    pub sent: u64,
}

impl UploadContent {
    fn size(&self) -> u64 {
        match self {
            UploadContent::File { bytes, .. } => *bytes,
            UploadContent::Bytes(bytes) => bytes.len() as u64,
        }
    }

    fn sha256(&self) -> String {
        match self {
            UploadContent::File { sha256, .. } => sha256.clone(),
            UploadContent::Bytes(bytes) => FileHash::sha256(bytes).hex().to_owned(),
        }
    }

    /// Returns up to `most` bytes from `first` on.
    fn read(&self, first: u64, most: u64) -> Result<Box<dyn Read>> {
        match self {
            UploadContent::File { path, .. } => {
                let (mut file, _) = open_file(path)?;
                file.seek(SeekFrom::Start(first)).map_err(FileError::of(path, "read"))?;
                Ok(Box::new(file.take(most)))
            }
            UploadContent::Bytes(bytes) => {
                let end = bytes.len().min(first.saturating_add(most) as usize);
                Ok(Box::new(std::io::Cursor::new(bytes[first as usize..end].to_vec())))
            }
        }
    }

    fn read_whole(&self, most: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let read = self.read(0, most)?.read_to_end(&mut bytes);
        match self {
            UploadContent::File { path, .. } => read.map_err(FileError::of(path, "read"))?,
            UploadContent::Bytes(_) => 0,
        };
        Ok(bytes)
    }

    /// Checks that a file has its declared digest.
    fn check(&self, read: &mut dyn FnMut(u64)) -> Result<()> {
        let UploadContent::File { path, bytes, sha256 } = self else { return Ok(()) };
        let expected = FileHash::Sha256(sha256.clone());
        let mut hash = RunningDigest::like(&expected, *bytes);
        let mut content = self.read(0, u64::MAX)?;
        let mut buffer = vec![0; 1 << 20];
        loop {
            match content.read(&mut buffer).map_err(FileError::of(path, "read"))? {
                0 => break,
                count => {
                    hash.update(&buffer[..count]);
                    read(count as u64);
                }
            }
        }
        match hash.finish() {
            found if found == expected => Ok(()),
            found => Err(HubError::Digest {
                path: path.clone(),
                expected: expected.hex().to_owned(),
                found: found.hex().to_owned(),
            }),
        }
    }
}

impl Hub {
    /// Creates a model repository unless it exists.
    ///
    /// # Errors
    /// If there is no token, or the hub refuses.
    pub fn create(&self, repository: &str, private: bool) -> Result<()> {
        self.require_token()?;
        let (owner, name) = repository.split_once('/').unwrap_or(("", repository));
        let body = json!({"type": "model", "name": name, "organization": owner, "private": private});
        match self.post("the repository", "/api/repos/create", "application/json", body.to_string().as_bytes()) {
            Err(HubError::Exists { .. }) => Ok(()),
            other => other.map(|_| ()),
        }
    }

    /// Uploads files in one commit to a branch. Present files aren't sent again, so that repeating a failed upload
    /// resumes it.
    ///
    /// # Errors
    /// If there is no token, a file differs from its digest, the hub can't be reached or refuses.
    pub fn upload(
        &self,
        repository: &str,
        branch: &str,
        files: &[Upload],
        message: &str,
        progress: &Progress,
    ) -> Result<HubCommit> {
        self.require_token()?;
        let transfer = Transfer::new(progress, files.iter().map(|file| file.content.size()).sum());
        transfer.stage("digests");
        for file in files {
            file.content.check(&mut |count| transfer.reach(transfer.done() + count))?;
        }
        drop(transfer);

        let mut lines = vec![json!({"key": "header", "value": {"summary": message, "description": ""}})];
        let mut sent = 0;
        for group in files.chunks(MAX_FILES) {
            let modes = self.modes(repository, branch, group)?;
            let lfs: Vec<&Upload> =
                group.iter().zip(&modes).filter(|(_, mode)| **mode == Mode::Lfs).map(|(file, _)| file).collect();
            sent += self.send_lfs(repository, branch, &lfs, progress)?;
            for (file, mode) in group.iter().zip(modes) {
                match mode {
                    Mode::Unchanged => {}
                    Mode::Lfs => lines.push(json!({"key": "lfsFile", "value": {
                        "path": file.path,
                        "algo": "sha256",
                        "oid": file.content.sha256(),
                        "size": file.content.size(),
                    }})),
                    Mode::Inline => lines.push(json!({"key": "file", "value": {
                        "path": file.path,
                        "encoding": "base64",
                        "content": BASE64.encode(file.content.read_whole(MAX_INLINE)?),
                    }})),
                }
            }
        }
        let changed = lines.len() - 1;
        if changed == 0 {
            return Ok(HubCommit { commit: None, changed, sent });
        }
        let body: String = lines.iter().map(|line| format!("{line}\n")).collect();
        let path = format!("/api/models/{repository}/commit/{branch}");
        let answer = self.post("the commit", &path, "application/x-ndjson", body.as_bytes())?;
        Ok(HubCommit { commit: answer["commitOid"].as_str().map(str::to_owned), changed, sent })
    }

    /// Returns how the hub stores each file.
    fn modes(&self, repository: &str, branch: &str, files: &[Upload]) -> Result<Vec<Mode>> {
        let asked = files.iter().map(|file| {
            let sample = file.content.read(0, SAMPLE as u64)?;
            let mut bytes = Vec::new();
            sample.take(SAMPLE as u64).read_to_end(&mut bytes).map_err(FileError::of(&file.path, "read"))?;
            Ok(json!({"path": file.path, "size": file.content.size(), "sample": BASE64.encode(bytes)}))
        });
        let asked = asked.collect::<Result<Vec<Json>>>()?;
        let body = json!({"files": asked}).to_string();
        let path = format!("/api/models/{repository}/preupload/{branch}");
        let answer = self.post("the repository", &path, "application/json", body.as_bytes())?;
        files
            .iter()
            .map(|file| {
                let entries = answer["files"].as_array().into_iter().flatten();
                let entry = entries.into_iter().find(|entry| entry["path"] == file.path.as_str());
                let mode =
                    entry.map(|entry| (entry["uploadMode"].as_str(), entry["shouldIgnore"] == true, &entry["oid"]));
                match mode {
                    Some((_, true, _)) => Ok(Mode::Unchanged),
                    Some((Some("lfs"), _, oid)) if *oid == file.content.sha256().as_str() => Ok(Mode::Unchanged),
                    Some((Some("lfs"), _, _)) => Ok(Mode::Lfs),
                    Some((Some("regular"), _, _)) if file.content.size() > MAX_INLINE => Err(HubError::Answer {
                        what: file.path.clone(),
                        problem: format!("the hub wants its {} bytes within the commit", file.content.size()),
                    }),
                    Some((Some("regular"), _, oid)) => {
                        let known = oid.as_str().is_some_and(|oid| !oid.is_empty());
                        let same = known && {
                            let own = FileHash::git_blob(&file.content.read_whole(MAX_INLINE)?);
                            *oid == own.hex()
                        };
                        Ok(if same { Mode::Unchanged } else { Mode::Inline })
                    }
                    _ => Err(HubError::Answer {
                        what: file.path.clone(),
                        problem: "the hub doesn't say how it wants this file".into(),
                    }),
                }
            })
            .collect()
    }

    /// Sends files that LFS lacks; returns the number of bytes sent.
    fn send_lfs(&self, repository: &str, branch: &str, files: &[&Upload], progress: &Progress) -> Result<u64> {
        if files.is_empty() {
            return Ok(0);
        }
        let objects: Vec<Json> =
            files.iter().map(|file| json!({"oid": file.content.sha256(), "size": file.content.size()})).collect();
        let body = json!({
            "operation": "upload",
            "transfers": ["basic", "multipart"],
            "hash_algo": "sha256",
            "ref": {"name": branch},
            "objects": objects,
        });
        let path = format!("/{repository}.git/info/lfs/objects/batch");
        let answer = self.post("Git LFS", &path, LFS, body.to_string().as_bytes())?;
        let wanted: Vec<(&Upload, &Json)> = files
            .iter()
            .filter_map(|file| {
                let entry =
                    answer["objects"].as_array()?.iter().find(|o| o["oid"] == file.content.sha256().as_str())?;
                Some((*file, entry))
            })
            .collect();
        if wanted.len() < files.len() {
            return Err(HubError::Answer { what: "Git LFS".into(), problem: "it doesn't know all files".into() });
        }
        if let Some((file, entry)) = wanted.iter().find(|(_, entry)| entry.get("error").is_some()) {
            return Err(HubError::Answer { what: file.path.clone(), problem: entry["error"]["message"].to_string() });
        }
        let lacking: Vec<_> = wanted.into_iter().filter(|(_, entry)| entry["actions"]["upload"].is_object()).collect();
        let total = lacking.iter().map(|(file, _)| file.content.size()).sum();
        let transfer = Transfer::new(progress, total);
        for (file, entry) in lacking {
            transfer.stage(&file.path);
            self.send_object(file, &entry["actions"], &transfer)?;
        }
        Ok(total)
    }

    /// Sends one object, whole or in parts, and verifies it.
    fn send_object(&self, file: &Upload, actions: &Json, transfer: &Transfer<'_>) -> Result<()> {
        let upload = &actions["upload"];
        let wrong = |problem: &str| HubError::Answer { what: file.path.clone(), problem: problem.to_owned() };
        let href = upload["href"].as_str().ok_or_else(|| wrong("LFS gives no address"))?;
        let (size, oid) = (file.content.size(), file.content.sha256());
        let number = |value: &Json| value.as_u64().or_else(|| value.as_str()?.parse().ok());
        match number(&upload["header"]["chunk_size"]) {
            None => {
                self.put(file, href, &upload["header"], 0, size, transfer)?;
            }
            Some(0) => return Err(wrong("LFS wants parts of no bytes")),
            Some(part_size) => {
                let mut parts = Vec::new();
                for (index, first) in (0..size).step_by(part_size as usize).enumerate() {
                    let part = index + 1;
                    // the hub pads numbers with zeros
                    let headers = upload["header"].as_object().into_iter().flatten();
                    let href =
                        headers.into_iter().find(|(key, _)| key.parse() == Ok(part)).and_then(|(_, v)| v.as_str());
                    let href = href.ok_or_else(|| wrong(&format!("LFS gives no address for part {part}")))?;
                    let etag = self.put(file, href, &Json::Null, first, part_size.min(size - first), transfer)?;
                    let etag = etag.ok_or_else(|| wrong(&format!("LFS doesn't confirm part {part}")))?;
                    parts.push(json!({"partNumber": part, "etag": etag}));
                }
                let body = json!({"oid": oid, "parts": parts}).to_string();
                self.tell(file, href, &Json::Null, &body)?;
            }
        }
        if let Some(href) = actions["verify"]["href"].as_str() {
            let body = json!({"oid": oid, "size": size}).to_string();
            self.tell(file, href, &actions["verify"]["header"], &body)?;
        }
        Ok(())
    }

    /// Puts a range of a file to a URL, with retries; returns the server's tag.
    fn put(
        &self,
        file: &Upload,
        href: &str,
        headers: &Json,
        first: u64,
        length: u64,
        transfer: &Transfer<'_>,
    ) -> Result<Option<String>> {
        let before = transfer.done();
        let mut failures = 0;
        loop {
            let sent = self.answered(&file.path, "upload", || {
                let mut request = self.agent.put(href).header("content-length", length);
                for (name, value) in headers.as_object().into_iter().flatten() {
                    if let Some(value) = value.as_str() {
                        request = request.header(name, value);
                    }
                }
                let content =
                    file.content.read(first, length).map_err(|error| std::io::Error::other(error.to_string()))?;
                request.send(SendBody::from_owned_reader(content))
            });
            match sent {
                Ok(response) => {
                    transfer.reach(before + length);
                    return Ok(response.headers().get("etag").and_then(|v| v.to_str().ok()).map(str::to_owned));
                }
                Err(error) if error.is_silence() && failures + 1 < ATTEMPTS => {
                    failures += 1;
                    pause(failures);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends JSON to a URL named by LFS. Only the hub itself receives the token.
    fn tell(&self, file: &Upload, href: &str, headers: &Json, body: &str) -> Result<()> {
        self.answered(&file.path, "upload", || {
            let mut request = self.agent.post(href).header("content-type", LFS).header("accept", LFS);
            let given =
                headers.as_object().into_iter().flatten().filter_map(|(name, value)| Some((name, value.as_str()?)));
            let mut authorized = false;
            for (name, value) in given {
                authorized |= name.eq_ignore_ascii_case("authorization");
                request = request.header(name, value);
            }
            if let Some(authorization) = self.authorization(href).filter(|_| !authorized) {
                request = request.header("authorization", authorization);
            }
            request.send(body)
        })
        .map(|_| ())
    }
}

/// Storage of an uploaded file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Present already.
    Unchanged,
    /// Git LFS.
    Lfs,
    /// Within the commit.
    Inline,
}
