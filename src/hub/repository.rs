//! Contents of a repository at a commit.

use anec_base::path_inside;
use serde_json::Value as Json;

use crate::client::Hub;
use crate::error::{HubError, Result};
use crate::hash::FileHash;

/// File of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    /// Path within the repository.
    pub path: String,
    /// Size in bytes.
    pub size: u64,
    /// Digest of the content.
    pub hash: FileHash,
}

/// Repository at a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteRepository {
    /// Name, `owner/name`.
    pub name: String,
    /// Commit hash.
    pub commit: String,
    /// Files of the repository.
    pub files: Vec<RemoteFile>,
}

impl RemoteRepository {
    /// Returns the file at a path.
    pub fn file(&self, path: &str) -> Option<&RemoteFile> {
        self.files.iter().find(|file| file.path == path)
    }
}

impl Hub {
    /// Returns the licence of a model card, in the hub's terms.
    ///
    /// # Errors
    /// If the hub can't be reached or has no such repository.
    pub fn license(&self, name: &str) -> Result<Option<String>> {
        let json = self.get_json("the repository", &format!("/api/models/{name}"))?;
        Ok(json["cardData"]["license"].as_str().map(str::to_owned))
    }

    /// Returns the contents of a model's repository at a branch, tag or commit.
    ///
    /// # Errors
    /// If the hub can't be reached, has no such repository, or omits its files' digests.
    pub fn repository(&self, name: &str, revision: &str) -> Result<RemoteRepository> {
        let what = "the repository";
        let json = self.get_json(what, &format!("/api/models/{name}/revision/{revision}?blobs=true"))?;
        let wrong = |problem: &str| HubError::Answer { what: what.to_owned(), problem: problem.to_owned() };
        let plain = |text: &&str| text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let commit = json["sha"].as_str().filter(plain).ok_or_else(|| wrong("the hub names no commit"))?;
        let siblings = json["siblings"].as_array().ok_or_else(|| wrong("the hub lists no files"))?;
        let files = siblings.iter().map(|sibling| {
            file(sibling)
                .ok_or_else(|| wrong(&format!("the hub's entry of a file has no path, size or digest: {sibling}")))
        });
        Ok(RemoteRepository { name: name.to_owned(), commit: commit.to_owned(), files: files.collect::<Result<_>>()? })
    }
}

fn file(json: &Json) -> Option<RemoteFile> {
    let path = json["rfilename"].as_str()?;
    // names come from the network; none may leave the folder
    path_inside(path)?;
    let hexadecimal = |text: &Json, length: usize| {
        let text = text.as_str()?;
        (text.len() == length && text.bytes().all(|byte| byte.is_ascii_hexdigit())).then(|| text.to_ascii_lowercase())
    };
    let (size, hash) = match &json["lfs"] {
        Json::Null => (json["size"].as_u64()?, FileHash::GitBlob(hexadecimal(&json["blobId"], 40)?)),
        lfs => (lfs["size"].as_u64()?, FileHash::Sha256(hexadecimal(&lfs["sha256"], 64)?)),
    };
    Some(RemoteFile { path: path.to_owned(), size, hash })
}
