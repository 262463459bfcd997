//! Downloads through hf-hub.

use std::path::{Path, PathBuf};

use anec_base::FileError;

use hf_hub::api::sync::{Api, ApiBuilder, ApiError};
use hf_hub::{Cache, Repo, RepoType};

use super::{Location, needed};
use crate::error::{Result, SourceError};
use crate::{hugging_face, safetensors};

/// A cache, and the hub behind it unless it is not to be asked.
pub struct Client {
    name: String,
    cache: Cache,
    api: Option<Api>,
}

impl Client {
    /// The cache and hub that the environment names: `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`.
    pub fn from_env(name: &str) -> Result<Self> {
        let offline = std::env::var("HF_HUB_OFFLINE").is_ok_and(|value| !["", "0", "false"].contains(&value.as_str()));
        let mut builder = ApiBuilder::from_env();
        if let Ok(token) = std::env::var("HF_TOKEN") {
            builder = builder.with_token(Some(token));
        }
        Self::new(name, Cache::from_env(), (!offline).then_some(builder))
    }

    fn new(name: &str, cache: Cache, builder: Option<ApiBuilder>) -> Result<Self> {
        let api = builder.map(|builder| builder.build().map_err(|error| failed(name, "", &error))).transpose()?;
        Ok(Client { name: name.to_owned(), cache, api })
    }

    /// Brings what is needed into the cache; gives the path to open.
    pub fn download(&self, location: &Location) -> Result<PathBuf> {
        let repo =
            |revision: &str| Repo::with_revision(location.repository.clone(), RepoType::Model, revision.to_owned());
        let Some(api) = &self.api else {
            return self.cached(location).map_err(|problem| self.wrong(format!("offline, and {problem}"), false));
        };
        let info = match api.repo(repo(&location.revision)).info() {
            Ok(info) => info,
            Err(error) => {
                let error = failed(&self.name, "the repository", &error);
                // An answer is an answer; only silence makes the cache the best that can be had.
                let silent = matches!(error, SourceError::Hub { absent: false, .. });
                return self.cached(location).ok().filter(|_| silent).ok_or(error);
            }
        };
        // All files from one commit, even if the branch moves meanwhile.
        let folder = self.snapshot(&info.sha);
        let commit = api.repo(repo(&info.sha));
        let fetch = |file: &str| -> Result<()> {
            if folder(location).join(file).exists() {
                return Ok(());
            }
            commit.download(file).map(|_| ()).map_err(|error| failed(&self.name, file, &error))
        };
        let available: Vec<String> = info.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
        let needed = needed(&available, location.file.as_deref()).map_err(|problem| self.wrong(problem, true))?;
        needed.files.iter().try_for_each(|file| fetch(file))?;
        if let Some(index) = &needed.index {
            fetch(index)?;
            shards(&folder(location).join(index))?.iter().try_for_each(|shard| fetch(shard))?;
        }
        // So that the branch is found without the hub next time.
        self.cache
            .repo(repo(&location.revision))
            .create_ref(&info.sha)
            .map_err(FileError::of(self.cache.path(), "write"))?;
        Ok(opened(folder(location), needed.open))
    }

    /// The path to open if the cache has all of the model; else what it lacks.
    fn cached(&self, location: &Location) -> Result<PathBuf, String> {
        let repo = Repo::with_revision(location.repository.clone(), RepoType::Model, location.revision.clone());
        let reference = self.cache.path().join(repo.folder_name()).join("refs").join(&location.revision);
        let commit = std::fs::read_to_string(reference).unwrap_or_else(|_| location.revision.clone());
        let folder = self.snapshot(commit.trim())(location);
        let available = files_below(&folder, &folder);
        if available.is_empty() {
            return Err(format!("the cache, {}, doesn't have the model", self.cache.path().display()));
        }
        let needed = needed(&available, location.file.as_deref())?;
        if let Some(index) = &needed.index {
            let shards = shards(&folder.join(index)).map_err(|error| error.to_string())?;
            if let Some(missing) = shards.iter().find(|shard| !available.contains(shard)) {
                return Err(format!("the cache, {}, doesn't have {missing}", folder.display()));
            }
        }
        Ok(opened(folder, needed.open))
    }

    /// The folder of a commit in the cache.
    fn snapshot(&self, commit: &str) -> impl Fn(&Location) -> PathBuf {
        let commit = commit.to_owned();
        move |location| {
            let repo = Repo::with_revision(location.repository.clone(), RepoType::Model, commit.clone());
            self.cache.path().join(repo.folder_name()).join("snapshots").join(&commit)
        }
    }

    fn wrong(&self, problem: String, absent: bool) -> SourceError {
        SourceError::Hub { name: self.name.clone(), problem, absent }
    }
}

/// The shards that an index names.
fn shards(index: &Path) -> Result<Vec<String>> {
    let json = hugging_face::read_json(index)?;
    Ok(safetensors::parse_index(index, &json)?.into_keys().collect())
}

fn opened(folder: PathBuf, file: Option<String>) -> PathBuf {
    match file {
        Some(file) => folder.join(file),
        None => folder,
    }
}

/// Paths of files below `folder`, relative to `root`.
fn files_below(folder: &Path, root: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut files = Vec::new();
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            files.extend(files_below(&path, root));
        } else if let Some(name) = path.strip_prefix(root).ok().and_then(Path::to_str).filter(|_| path.exists()) {
            files.push(name.to_owned());
        }
    }
    files
}

/// What went wrong while `file` was asked for.
fn failed(name: &str, file: &str, error: &ApiError) -> SourceError {
    let text = error.to_string();
    // hf-hub shows the client's error, which names the status in its text.
    let status = |code: &str| text.contains(&format!("status: {code}"));
    let (problem, absent) = if status("404") {
        (format!("the hub doesn't have {file}, or not for everybody"), true)
    } else if status("401") || status("403") {
        let problem = format!(
            "the hub refuses {file}: the model may not exist, or its licence must be accepted on its page and HF_TOKEN set"
        );
        (problem, true)
    } else {
        (format!("can't download {file}: {text}"), false)
    };
    SourceError::Hub { name: name.to_owned(), problem, absent }
}

#[cfg(test)]
mod tests;
