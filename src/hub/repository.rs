//! Contents of a repository at a commit.

use anec_base::path_inside;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, SeqAccess, Visitor};
use serde_json::Value as Json;

use crate::client::{Hub, MAX_JSON};
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
        let json: Json = self.get_json("the repository", &format!("/api/models/{name}"), MAX_JSON)?;
        Ok(json["cardData"]["license"].as_str().map(str::to_owned))
    }

    /// Returns the contents of a model's repository at a branch, tag or commit.
    ///
    /// # Errors
    /// If the hub can't be reached, has no such repository, or omits its files' digests.
    pub fn repository(&self, name: &str, revision: &str) -> Result<RemoteRepository> {
        let what = "the repository";
        let listing: Listing =
            self.get_json(what, &format!("/api/models/{name}/revision/{revision}?blobs=true"), MAX_LISTING)?;
        let wrong = |problem: &str| HubError::Answer { what: what.to_owned(), problem: problem.to_owned() };
        let plain = |text: &String| text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let commit = listing.sha.filter(plain).ok_or_else(|| wrong("the hub names no commit"))?;
        let siblings = listing.siblings.ok_or_else(|| wrong("the hub lists no files"))?;
        let files = siblings.0.into_iter().map(|sibling| {
            let name = self.quoted(sibling.rfilename.as_deref().unwrap_or("without a name"));
            sibling
                .file()
                .ok_or_else(|| wrong(&format!("the hub's entry of the file {name} has no good path, size or digest")))
        });
        Ok(RemoteRepository { name: name.to_owned(), commit, files: files.collect::<Result<_>>()? })
    }
}

/// Maximum size of a listing in bytes; one of 100,000 files stays below.
const MAX_LISTING: u64 = 64 << 20;
/// Maximum number of files of a repository.
const MAX_FILES: usize = 200_000;
/// Maximum size of a file in bytes.
const MAX_SIZE: u64 = 1 << 50;

/// Answer of the hub about a repository.
#[derive(Deserialize)]
struct Listing {
    sha: Option<String>,
    siblings: Option<Siblings>,
}

struct Siblings(Vec<Sibling>);

#[derive(Deserialize)]
struct Sibling {
    rfilename: Option<String>,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
    size: Option<u64>,
}

impl<'de> Deserialize<'de> for Siblings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Limited;
        impl<'de> Visitor<'de> for Limited {
            type Value = Siblings;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "a list of files")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> std::result::Result<Siblings, A::Error> {
                let mut siblings = Vec::new();
                while let Some(sibling) = items.next_element()? {
                    if siblings.len() == MAX_FILES {
                        return Err(A::Error::custom(format!("it lists more than {MAX_FILES} files")));
                    }
                    siblings.push(sibling);
                }
                Ok(Siblings(siblings))
            }
        }
        deserializer.deserialize_seq(Limited)
    }
}

impl Sibling {
    fn file(self) -> Option<RemoteFile> {
        let path = self.rfilename?;
        // names come from the network; none may leave the folder
        path_inside(&path)?;
        let hexadecimal = |text: Option<String>, length: usize| {
            let text = text?;
            (text.len() == length && text.bytes().all(|byte| byte.is_ascii_hexdigit()))
                .then(|| text.to_ascii_lowercase())
        };
        let (size, hash) = match self.lfs {
            None => (self.size?, FileHash::GitBlob(hexadecimal(self.blob, 40)?)),
            Some(lfs) => (lfs.size?, FileHash::Sha256(hexadecimal(lfs.sha256, 64)?)),
        };
        (size <= MAX_SIZE).then_some(RemoteFile { path, size, hash })
    }
}
