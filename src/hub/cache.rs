//! The cache that all Hugging Face tools share: `models--OWNER--NAME/{blobs,refs,snapshots}`.

use std::path::{Path, PathBuf};

use anec_base::FileError;
use anec_base::output::write_file;

use crate::client::{Hub, home, variable};
use crate::download::Transfer;
use crate::error::Result;
use crate::repository::{RemoteFile, RemoteRepository};

/// A cache of repositories.
#[derive(Clone, Debug)]
pub struct HubCache(PathBuf);

impl HubCache {
    /// The cache that the environment names: `HF_HUB_CACHE`, or `hub` in `HF_HOME`.
    pub fn from_env() -> Self {
        let named = variable("HF_HUB_CACHE").map(PathBuf::from);
        HubCache(named.or_else(|| Some(home()?.join("hub"))).unwrap_or_else(|| PathBuf::from(".huggingface")))
    }

    /// The cache in a folder.
    pub fn new(folder: &Path) -> Self {
        HubCache(folder.to_owned())
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.0
    }

    fn of(&self, repository: &str) -> PathBuf {
        self.0.join(format!("models--{}", repository.replace('/', "--")))
    }

    /// The folder of a commit.
    pub fn snapshot(&self, repository: &str, commit: &str) -> PathBuf {
        self.of(repository).join("snapshots").join(commit)
    }

    /// The commit that a branch or tag had when it was last asked for; a commit is itself.
    pub fn commit(&self, repository: &str, revision: &str) -> String {
        let reference = std::fs::read_to_string(self.of(repository).join("refs").join(revision));
        reference.map_or_else(|_| revision.to_owned(), |commit| commit.trim().to_owned())
    }

    /// Remembers the commit of a branch or tag, so that it is found without the hub next time.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn remember(&self, repository: &RemoteRepository, revision: &str) -> Result<()> {
        let folder = self.of(&repository.name).join("refs");
        std::fs::create_dir_all(&folder).map_err(FileError::of(&folder, "create"))?;
        Ok(write_file(&folder.join(revision), repository.commit.as_bytes())?)
    }

    /// Whether a file of a commit is there.
    pub fn has(&self, repository: &RemoteRepository, file: &RemoteFile) -> bool {
        self.snapshot(&repository.name, &repository.commit).join(&file.path).exists()
    }

    /// Downloads a file of a commit, unless it is there.
    ///
    /// # Errors
    /// As [`Hub::download`].
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
            // what is left of a link to a blob that somebody removed
            let _ = std::fs::remove_file(&place);
            link(&blob, &place, file).map_err(FileError::of(&place, "create"))?;
        }
        Ok(())
    }
}

/// Gives a blob a name in a snapshot: by a link that stays right when the cache is moved.
#[cfg(unix)]
fn link(blob: &Path, place: &Path, file: &RemoteFile) -> std::io::Result<()> {
    // snapshots/COMMIT/a/b.json leads to blobs/HASH over as many folders as it has parts, and two
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
