//! Cache shared by all Hugging Face tools: `models--OWNER--NAME/{blobs,refs,snapshots}`.

use std::path::{Path, PathBuf};

use anec_base::FileError;
use anec_base::output::write_file;

use crate::client::{Hub, home, variable};
use crate::download::Transfer;
use crate::error::Result;
use crate::repository::{RemoteFile, RemoteRepository};

/// Cache of repositories.
#[derive(Clone, Debug)]
pub struct HubCache(PathBuf);

impl HubCache {
    /// Returns the cache of the environment: `HF_HUB_CACHE`, or `hub` in `HF_HOME`.
    pub fn from_env() -> Self {
        let named = variable("HF_HUB_CACHE").map(PathBuf::from);
        HubCache(named.or_else(|| Some(home()?.join("hub"))).unwrap_or_else(|| PathBuf::from(".huggingface")))
    }

    /// Returns the cache in a folder.
    pub fn new(folder: &Path) -> Self {
        HubCache(folder.to_owned())
    }

    /// Returns the folder of the cache.
    pub fn path(&self) -> &Path {
        &self.0
    }

    fn of(&self, repository: &str) -> PathBuf {
        self.0.join(format!("models--{}", repository.replace('/', "--")))
    }

    /// Returns the folder of a commit.
    pub fn snapshot(&self, repository: &str, commit: &str) -> PathBuf {
        self.of(repository).join("snapshots").join(commit)
    }

    /// Returns the last known commit of a branch or tag; a commit is itself.
    pub fn commit(&self, repository: &str, revision: &str) -> String {
        let reference = std::fs::read_to_string(self.of(repository).join("refs").join(revision));
        reference.map_or_else(|_| revision.to_owned(), |commit| commit.trim().to_owned())
    }

    /// Stores the commit of a branch or tag, so that it is found offline.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn remember(&self, repository: &RemoteRepository, revision: &str) -> Result<()> {
        let folder = self.of(&repository.name).join("refs");
        std::fs::create_dir_all(&folder).map_err(FileError::of(&folder, "create"))?;
        Ok(write_file(&folder.join(revision), repository.commit.as_bytes())?)
    }

    /// Returns whether a file of a commit is cached.
    pub fn has(&self, repository: &RemoteRepository, file: &RemoteFile) -> bool {
        self.snapshot(&repository.name, &repository.commit).join(&file.path).exists()
    }

    /// Downloads a file of a commit unless it is cached.
    ///
    /// # Errors
    /// Returns any error of [`Hub::download`].
    pub fn download(
        &self,
        hub: &Hub,
        repository: &RemoteRepository,
        file: &RemoteFile,
        transfer: &Transfer<'_>,
    ) -> Result<()> {
        let place = self.snapshot(&repository.name, &repository.commit).join(&file.path);
        let blob = self.of(&repository.name).join("blobs").join(file.hash.hex());
        if !place.exists() {
            hub.download(repository, file, &blob, transfer)?;
            let folder = place.parent().unwrap_or(&self.0);
            std::fs::create_dir_all(folder).map_err(FileError::of(folder, "create"))?;
            // a dangling link to a removed blob
            let _ = std::fs::remove_file(&place);
            link(&blob, &place, file).map_err(FileError::of(&place, "create"))?;
        }
        Ok(())
    }
}

/// Links a blob into a snapshot; the link is relative, so that the cache can be moved.
#[cfg(unix)]
fn link(blob: &Path, place: &Path, file: &RemoteFile) -> std::io::Result<()> {
    // a link in snapshots/COMMIT/a/ reaches blobs/ through one `..` per folder of the path, and two more
    let up = "../".repeat(file.path.split('/').count() + 1);
    let blob = blob.file_name().unwrap_or_default();
    match std::os::unix::fs::symlink(Path::new(&up).join("blobs").join(blob), place) {
        // another process was faster
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

#[cfg(not(unix))]
fn link(blob: &Path, place: &Path, _: &RemoteFile) -> std::io::Result<()> {
    std::fs::hard_link(blob, place).or_else(|_| std::fs::copy(blob, place).map(|_| ()))
}
