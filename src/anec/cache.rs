//! Cache of converted bundles: `anec run hf:owner/name` or `anec run model.gguf` converts a model once and finds it
//! again.
//!
//! A bundle's name in the cache contains a digest of everything that determines it: origin, commit, manifest and
//! version of anec. A record, `NAME.json`, is written first, so that interrupted conversions are listed too.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anec_base::output::write_file;
use anec_base::{Diagnostic, Fault, FileError, Progress, Result, clock, hexadecimal};
use anec_convert::Outcome;
use anec_convert::open::name_of;
use anec_convert::output::partial;
use anec_convert::resume::inputs;
use anec_manifest::Manifest;
#[cfg(feature = "hub")]
use anec_manifest::builtin;
use anec_source::{Source, SourceError};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::Converter;

/// Cache of bundles.
#[derive(Clone, Debug)]
pub struct BundleCache(PathBuf);

/// Bundle in the cache.
#[derive(Clone, Debug, Serialize)]
pub struct CachedBundle {
    /// Name in the cache.
    pub name: String,
    /// Bundle folder.
    pub folder: PathBuf,
    /// Record of its origin.
    #[serde(flatten)]
    pub record: CacheRecord,
    /// Whether the bundle is complete.
    pub complete: bool,
    /// Size in bytes, including incomplete parts.
    pub bytes: u64,
    /// Time of the last use, in seconds since 1970-01-01.
    pub used: u64,
}

/// Origin of a cached bundle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheRecord {
    /// Name that the user gave: `hf:owner/name`.
    pub origin: String,
    /// Commit, or another identifier of the content.
    pub revision: String,
    /// Manifest of the conversion; `None` for a downloaded bundle.
    pub manifest: Option<String>,
    /// Version of anec that created it.
    pub anec_version: String,
    /// Time of creation, in seconds since 1970-01-01.
    pub made: u64,
}

/// Errors of the cache.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// No environment variable names the cache's folder.
    #[error("there is no folder for the cache: neither ANEC_CACHE nor XDG_CACHE_HOME nor HOME is set")]
    NoFolder,
    /// Cache folder that can't be written to.
    #[error("can't write to the cache {}: {error}", folder.display())]
    Unwritable {
        /// Cache folder.
        folder: PathBuf,
        /// Error of the system.
        error: std::io::Error,
    },
    /// Another process is writing the bundle.
    #[error("{name} is being converted by another process")]
    Busy {
        /// Bundle name.
        name: String,
    },
    /// No bundle has this name.
    #[error("the cache {} has no bundle `{name}`", folder.display())]
    Unknown {
        /// Requested name.
        name: String,
        /// Cache folder.
        folder: PathBuf,
    },
}

impl Diagnostic for CacheError {
    fn fault(&self) -> Fault {
        match self {
            CacheError::NoFolder | CacheError::Unwritable { .. } => Fault::Platform,
            CacheError::Busy { .. } | CacheError::Unknown { .. } => Fault::Usage,
        }
    }

    fn help(&self) -> Option<String> {
        let text = match self {
            CacheError::NoFolder | CacheError::Unwritable { .. } => "set ANEC_CACHE to a writable folder",
            CacheError::Busy { .. } => "wait until it finishes, or end that process",
            CacheError::Unknown { .. } => "`BundleCache::list` has the names",
        };
        Some(text.into())
    }
}

impl BundleCache {
    /// Opens the cache named by the environment: `ANEC_CACHE`, `XDG_CACHE_HOME/anec` or `~/.cache/anec`.
    ///
    /// # Errors
    /// [`CacheError::NoFolder`] if none of the variables is set.
    pub fn from_env() -> Result<Self, CacheError> {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let home = || variable("HOME").or_else(|| variable("USERPROFILE")).map(|home| home.join(".cache"));
        let user = || variable("XDG_CACHE_HOME").or_else(home).map(|cache| cache.join("anec"));
        variable("ANEC_CACHE").or_else(user).map(BundleCache).ok_or(CacheError::NoFolder)
    }

    /// Opens the cache in a folder.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        BundleCache(folder.into())
    }

    /// Cache folder.
    pub fn folder(&self) -> &Path {
        &self.0
    }

    fn bundles(&self) -> PathBuf {
        self.0.join("bundles")
    }

    /// Bundle of a model on the hub, `hf:owner/name[@revision][/file]`: of its current commit, with the built-in
    /// manifest for it or with defaults. A missing bundle is converted, resuming an interrupted conversion; `progress`
    /// receives the events.
    ///
    /// # Errors
    /// If the hub has no such model, or it can't be converted.
    #[cfg(feature = "hub")]
    pub fn of_hub(&self, origin: &str, progress: &Progress) -> Result<PathBuf> {
        use anec_hub::{Hub, HubCache};
        use anec_source::hub::Location;

        let Some(location) = Location::parse(origin)? else {
            let problem = "it doesn't begin with hf:".into();
            return Err(SourceError::Name { name: origin.to_owned(), problem }.into());
        };
        let hub = (!Hub::offline()).then(Hub::from_env);
        let asked = hub.as_ref().map(|hub| (hub, hub.repository(&location.repository, &location.revision)));
        let revision = match asked {
            Some((hub, Ok(repository))) => {
                if location.file.is_none() && repository.file(anec_bundle::FILE_NAME).is_some() {
                    return self.pulled(origin, hub, &repository, progress);
                }
                repository.commit
            }
            Some((_, Err(error))) if !error.is_silence() => {
                let absent = error.is_absence();
                return Err(SourceError::Hub { name: origin.to_owned(), problem: error.to_string(), absent }.into());
            }
            // the hub did not respond: use the cache
            _ => match self.newest(origin)? {
                Some(known) => {
                    progress.note(&format!("the hub is offline; {} is from {}", known.name, date(known.record.made)));
                    return Ok(known.folder);
                }
                None => HubCache::from_env().commit(&location.repository, &location.revision),
            },
        };
        let (manifest, by) = match builtin::for_source(origin) {
            Some(found) => {
                (Manifest::from_yaml(found.text, found.name, &[])?, format!("the built-in manifest {}", found.name))
            }
            None => (
                Manifest { source: Some(origin.to_owned()), ..Manifest::from_yaml("", "defaults", &[])? },
                "defaults".into(),
            ),
        };
        self.converted(origin, &revision, manifest, &by, progress)
    }

    /// Bundle of a model in local files: a .gguf, .safetensors or .onnx file, or a folder of one. A missing bundle is
    /// converted with defaults; changed files give another bundle.
    ///
    /// # Errors
    /// If the path isn't UTF-8, or the files can't be read or converted.
    pub fn of_path(&self, path: &Path, progress: &Progress) -> Result<PathBuf> {
        let path = path.canonicalize().map_err(FileError::of(path, "open"))?;
        let origin = path.to_str().ok_or_else(|| SourceError::File {
            path: path.clone(),
            problem: "the path isn't UTF-8, and bundle.json records it".into(),
            help: Some("rename it, or use a link with another name".into()),
        })?;
        let manifest = Manifest { source: Some(origin.to_owned()), ..Manifest::from_yaml("", "defaults", &[])? };
        let revision = inputs(&manifest, &Source::open_path(&path)?);
        self.converted(origin, &revision, manifest, "defaults", progress)
    }

    /// Bundle of a manifest's source at a revision. `by` describes the manifest for messages. A new bundle is
    /// [measured](Converter::measure); `progress` receives the notes of its report.
    ///
    /// # Errors
    /// If the source can't be converted.
    pub fn converted(
        &self,
        origin: &str,
        revision: &str,
        manifest: Manifest,
        by: &str,
        progress: &Progress,
    ) -> Result<PathBuf> {
        let record = CacheRecord {
            origin: origin.to_owned(),
            revision: revision.to_owned(),
            manifest: Some(by.to_owned()),
            anec_version: env!("CARGO_PKG_VERSION").into(),
            made: clock::now(),
        };
        let own = manifest.name.clone().unwrap_or_else(|| name_of(origin));
        let text = serde_json::to_string(&manifest).unwrap_or_default();
        let decides = [record.anec_version.as_str(), origin, revision, &text];
        let (name, folder) = self.place(&own, &decides);
        if self.has(&folder) {
            self.touch(&name);
            return Ok(folder);
        }
        let _lock = self.lock(&name, progress)?;
        if self.has(&folder) {
            self.touch(&name);
            return Ok(folder);
        }
        let begun = partial(&folder).exists();
        progress.note(&format!(
            "{} {origin} by {by}, once, into {}",
            if begun { "resuming the conversion of" } else { "converting" },
            folder.display()
        ));
        self.write(&name, &record)?;
        let made = Converter::new(manifest).out(&folder).measure(true).progress(progress.clone()).convert();
        self.settle(&name, &folder, &record)?;
        if let Outcome::Written(written) = made? {
            written.report.notes.iter().for_each(|note| progress.note(note));
        }
        Ok(folder)
    }

    /// Updates the record after a conversion or download: it stays if a bundle or a part of one exists.
    pub(crate) fn settle(&self, name: &str, folder: &Path, record: &CacheRecord) -> Result<()> {
        let path = self.record_of(name);
        if self.has(folder) && !path.exists() {
            // another process that failed may have removed it
            return self.write(name, record);
        }
        if !folder.exists() && begun(folder, record).iter().all(|begun| !begun.exists()) {
            let _ = std::fs::remove_file(path);
        }
        Ok(())
    }

    /// Name and folder of a bundle determined by these texts.
    pub(crate) fn place(&self, own: &str, decides: &[&str]) -> (String, PathBuf) {
        let mut hasher = Sha256::new();
        for text in decides {
            hasher.update((text.len() as u64).to_le_bytes());
            hasher.update(text);
        }
        let name = format!("{own}-{}", &hexadecimal(&hasher.finalize())[..12]);
        let folder = self.bundles().join(&name);
        (name, folder)
    }

    /// Waits until no other process makes a bundle of this name. The lock ends with the returned file.
    pub(crate) fn lock(&self, name: &str, progress: &Progress) -> Result<File> {
        let folder = self.0.join("locks");
        std::fs::create_dir_all(&folder).map_err(FileError::of(&folder, "create"))?;
        let path = folder.join(name);
        let file = File::options().create(true).truncate(false).write(true).open(&path);
        let file = file.map_err(FileError::of(&path, "open"))?;
        if matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
            progress.note(&format!("another process is making {name}; waiting for it"));
            file.lock().map_err(FileError::of(&path, "lock"))?;
        }
        // file systems without locks do without
        Ok(file)
    }

    /// Returns whether a bundle is complete: only then its folder exists.
    pub(crate) fn has(&self, folder: &Path) -> bool {
        folder.join(anec_bundle::FILE_NAME).is_file()
    }

    /// Writes the record of a bundle.
    pub(crate) fn write(&self, name: &str, record: &CacheRecord) -> Result<()> {
        let folder = self.bundles();
        std::fs::create_dir_all(&folder).map_err(FileError::of(&folder, "create"))?;
        let text = serde_json::to_vec_pretty(record).unwrap_or_default();
        Ok(write_file(&self.record_of(name), &text)?)
    }

    fn record_of(&self, name: &str) -> PathBuf {
        self.bundles().join(format!("{name}.json"))
    }

    /// Marks a bundle as used now. Ignores errors, because a read-only cache is still useful.
    pub(crate) fn touch(&self, name: &str) {
        let _ = File::options()
            .append(true)
            .open(self.record_of(name))
            .and_then(|file| file.set_modified(SystemTime::now()));
    }

    /// All bundles, most recently used first.
    ///
    /// # Errors
    /// If the cache can't be read.
    pub fn list(&self) -> Result<Vec<CachedBundle>> {
        let folder = self.bundles();
        let entries = match std::fs::read_dir(&folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(FileError::of(&folder, "list"))?,
        };
        let mut found: Vec<CachedBundle> = entries
            .flatten()
            .filter_map(|entry| {
                let path = entry.path();
                let name = path.file_name()?.to_str()?.strip_suffix(".json")?.to_owned();
                let record: CacheRecord = serde_json::from_slice(&std::fs::read(&path).ok()?).ok()?;
                let changed = entry.metadata().ok()?.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
                let folder = folder.join(&name);
                let begun: u64 = begun(&folder, &record).iter().map(|begun| size(begun)).sum();
                let (complete, bytes) = (self.has(&folder), size(&folder) + begun);
                Some(CachedBundle { name, folder, record, complete, bytes, used: changed.as_secs() })
            })
            .collect();
        found.sort_by(|a, b| b.used.cmp(&a.used).then_with(|| a.name.cmp(&b.name)));
        Ok(found)
    }

    /// Newest complete bundle of an origin, created by this version of anec.
    #[cfg(feature = "hub")]
    fn newest(&self, origin: &str) -> Result<Option<CachedBundle>> {
        let own = |bundle: &CachedBundle| {
            let record = &bundle.record;
            bundle.complete && record.origin == origin && record.anec_version == env!("CARGO_PKG_VERSION")
        };
        Ok(self.list()?.into_iter().filter(own).max_by_key(|bundle| bundle.record.made))
    }

    /// Finds bundles by name, by the beginning of a name, or by origin.
    ///
    /// # Errors
    /// [`CacheError::Unknown`] if there is none.
    pub fn find(&self, name: &str) -> Result<Vec<CachedBundle>> {
        let all = self.list()?;
        let exact: Vec<_> = all.iter().filter(|bundle| bundle.name == name).cloned().collect();
        let so_called = |bundle: &CachedBundle| {
            bundle.record.origin == name || bundle.name.rsplit_once('-').is_some_and(|(own, _)| own == name)
        };
        let found = if exact.is_empty() { all.into_iter().filter(so_called).collect() } else { exact };
        match found.is_empty() {
            true => Err(CacheError::Unknown { name: name.to_owned(), folder: self.0.clone() }.into()),
            false => Ok(found),
        }
    }

    /// Removes a bundle and its incomplete parts.
    ///
    /// # Errors
    /// If another process is writing it, or a file can't be removed.
    pub fn remove(&self, bundle: &CachedBundle) -> Result<()> {
        let begun = begun(&bundle.folder, &bundle.record);
        // held until everything is removed
        let locks: Vec<File> = begun.iter().filter_map(|begun| File::open(begun).ok()).collect();
        if locks.iter().any(|lock| matches!(lock.try_lock(), Err(TryLockError::WouldBlock))) {
            return Err(CacheError::Busy { name: bundle.name.clone() }.into());
        }
        // the description first, so that a kill leaves no bundle; the record last, so that the rest is still listed
        let description = bundle.folder.join(anec_bundle::FILE_NAME);
        if description.exists() {
            std::fs::remove_file(&description).map_err(FileError::of(&description, "remove"))?;
        }
        for folder in begun.iter().chain([&bundle.folder]) {
            if folder.exists() {
                std::fs::remove_dir_all(folder).map_err(FileError::of(folder, "remove"))?;
            }
        }
        let record = self.record_of(&bundle.name);
        Ok(std::fs::remove_file(&record).map_err(FileError::of(&record, "remove"))?)
    }
}

/// Folders of incomplete parts: of a conversion, of a download.
fn begun(folder: &Path, record: &CacheRecord) -> [PathBuf; 2] {
    [partial(folder), incomplete(folder, &record.revision)]
}

/// Folder of an incomplete download, one per commit so that files of different commits never mix.
pub(crate) fn incomplete(folder: &Path, commit: &str) -> PathBuf {
    let mut name = folder.file_name().unwrap_or_default().to_owned();
    name.push(format!(".incomplete-{}", commit.get(..12).unwrap_or(commit)));
    folder.with_file_name(name)
}

/// Formats a day.
#[cfg(feature = "hub")]
fn date(seconds: u64) -> String {
    clock::strftime("%F", seconds)
}

/// Total size in bytes of the files below a folder.
fn size(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| match entry.metadata() {
        Ok(found) if found.is_dir() => size(&entry.path()),
        Ok(found) => found.len(),
        Err(_) => 0,
    });
    sizes.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(revision: &str) -> CacheRecord {
        let (origin, anec_version) = ("hf:o/m".into(), "0".into());
        CacheRecord { origin, revision: revision.into(), manifest: None, anec_version, made: 0 }
    }

    #[test]
    fn a_bundle_is_made_by_one_process_at_a_time() {
        let room = tempfile::tempdir().unwrap();
        let cache = BundleCache::new(room.path());
        let held = cache.lock("a", &Progress::hidden()).unwrap();
        let _other = cache.lock("b", &Progress::hidden()).unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        let waiting = cache.clone();
        let thread = std::thread::spawn(move || {
            let _own = waiting.lock("a", &Progress::hidden()).unwrap();
            sender.send(()).unwrap();
        });
        assert!(receiver.recv_timeout(std::time::Duration::from_millis(200)).is_err(), "it waits");
        drop(held);
        receiver.recv().unwrap();
        thread.join().unwrap();
        assert!(cache.list().unwrap().is_empty(), "locks are no bundles");
    }

    #[test]
    fn incomplete_bundles_are_listed_and_removed() {
        let room = tempfile::tempdir().unwrap();
        let cache = BundleCache::new(room.path());
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let (name, folder) = cache.place("m", &["hf:o/m", commit]);
        let begun = incomplete(&folder, commit);
        assert!(begun.ends_with(format!("{name}.incomplete-0123456789ab")));
        cache.write(&name, &record(commit)).unwrap();
        std::fs::create_dir_all(&begun).unwrap();
        std::fs::write(begun.join("weight.bin"), [0; 100]).unwrap();
        cache.settle(&name, &folder, &record(commit)).unwrap();
        let found = cache.find("m").unwrap();
        assert_eq!((found[0].complete, found[0].bytes), (false, 100));
        // another process holds the lock
        let lock = File::open(&begun).unwrap();
        lock.lock().unwrap();
        assert!(cache.remove(&found[0]).unwrap_err().to_string().contains("by another process"));
        drop(lock);
        cache.remove(&found[0]).unwrap();
        assert!(std::fs::read_dir(cache.bundles()).unwrap().next().is_none());
    }

    #[test]
    fn a_record_without_a_bundle_is_removed() {
        let room = tempfile::tempdir().unwrap();
        let cache = BundleCache::new(room.path());
        let (name, folder) = cache.place("m", &["hf:o/m"]);
        cache.write(&name, &record("main")).unwrap();
        cache.settle(&name, &folder, &record("main")).unwrap();
        assert!(cache.list().unwrap().is_empty());
        // a bundle without a record gets one
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join(anec_bundle::FILE_NAME), "{}").unwrap();
        cache.settle(&name, &folder, &record("main")).unwrap();
        assert!(cache.list().unwrap()[0].complete);
    }
}
