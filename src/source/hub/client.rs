//! Downloads into the cache that all Hugging Face tools share.

use std::path::{Path, PathBuf};

use anec_base::Progress;
use anec_hub::download::Transfer;
use anec_hub::{Hub, HubCache, HubError, RemoteFile, RemoteRepository};

use super::{Location, needed};
use crate::error::{Result, SourceError};
use crate::file::read_json;
use crate::safetensors;

/// Cache, and the hub unless offline.
pub struct Client {
    name: String,
    cache: HubCache,
    hub: Option<Hub>,
}

impl Client {
    /// Returns the cache and hub of the environment: `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`.
    pub fn from_env(name: &str) -> Self {
        Self::new(name, HubCache::from_env(), (!Hub::offline()).then(Hub::from_env))
    }

    pub(super) fn new(name: &str, cache: HubCache, hub: Option<Hub>) -> Self {
        Client { name: name.to_owned(), cache, hub }
    }

    /// Downloads the needed files into the cache and returns the path to open.
    pub fn download(&self, location: &Location, progress: &Progress) -> Result<PathBuf> {
        let Some(hub) = &self.hub else {
            return self.cached(location).map_err(|problem| self.wrong(format!("offline, and {problem}"), false));
        };
        let repository = match hub.repository(&location.repository, &location.revision) {
            Ok(repository) => repository,
            // use the cache only if the hub did not respond
            Err(error) => return self.cached(location).ok().filter(|_| error.is_silence()).ok_or(self.failed(error)),
        };
        let available: Vec<String> = repository.files.iter().map(|file| file.path.clone()).collect();
        let needed = needed(&available, location.file.as_deref()).map_err(|problem| self.wrong(problem, true))?;
        let folder = self.cache.snapshot(&repository.name, &repository.commit);
        let mut files = needed.files;
        if let Some(index) = needed.index {
            // the index first: it names the rest
            self.fetch(hub, &repository, std::slice::from_ref(&index), progress)?;
            files.extend(shards(&folder.join(&index))?);
        }
        self.fetch(hub, &repository, &files, progress)?;
        self.cache.remember(&repository, &location.revision).map_err(|error| self.failed(error))?;
        Ok(opened(folder, needed.open))
    }

    fn fetch(&self, hub: &Hub, repository: &RemoteRepository, names: &[String], progress: &Progress) -> Result<()> {
        let files = names.iter().map(|name| {
            let missing = || self.wrong(format!("the hub doesn't have {name}, or not for everybody"), true);
            repository.file(name).ok_or_else(missing)
        });
        let files = files.collect::<Result<Vec<&RemoteFile>>>()?;
        let lacking: Vec<&RemoteFile> = files.into_iter().filter(|file| !self.cache.has(repository, file)).collect();
        if lacking.is_empty() {
            return Ok(());
        }
        let transfer = Transfer::new(progress, lacking.iter().map(|file| file.size).sum());
        for file in lacking {
            self.cache.download(hub, repository, file, &transfer).map_err(|error| self.failed(error))?;
        }
        Ok(())
    }

    /// Returns the commit of a location.
    pub fn commit(&self, location: &Location) -> Result<String> {
        let known = || self.cache.commit(&location.repository, &location.revision);
        match self.hub.as_ref().map(|hub| hub.repository(&location.repository, &location.revision)) {
            None => Ok(known()),
            Some(Ok(repository)) => Ok(repository.commit),
            Some(Err(error)) if error.is_silence() => Ok(known()),
            Some(Err(error)) => Err(self.failed(error)),
        }
    }

    /// Returns the path to open if the cache holds the whole model, else the missing part.
    pub fn cached(&self, location: &Location) -> Result<PathBuf, String> {
        let commit = self.cache.commit(&location.repository, &location.revision);
        let folder = self.cache.snapshot(&location.repository, &commit);
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

    fn wrong(&self, problem: String, absent: bool) -> SourceError {
        SourceError::Hub { name: self.name.clone(), problem, absent }
    }

    fn failed(&self, error: HubError) -> SourceError {
        match error {
            HubError::Io(error) => error.into(),
            error => self.wrong(error.to_string(), !error.is_silence()),
        }
    }
}

/// Returns the shards that an index names.
fn shards(index: &Path) -> Result<Vec<String>> {
    let json = read_json(index)?;
    Ok(safetensors::parse_index(index, &json)?.into_keys().collect())
}

fn opened(folder: PathBuf, file: Option<String>) -> PathBuf {
    match file {
        Some(file) => folder.join(file),
        None => folder,
    }
}

/// Returns the paths of files below `folder`, relative to `root`.
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

#[cfg(test)]
mod tests;
