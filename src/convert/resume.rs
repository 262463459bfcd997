//! Journal of finished files, so that a killed run can be resumed.
//!
//! A bundle is written in `OUT.partial` beside its journal, and renamed when it is complete. The journal records the
//! digest of the run's inputs; a run with other inputs starts anew.

use std::collections::BTreeMap;
#[cfg(unix)]
use std::fs::File;
#[cfg(unix)]
use std::fs::TryLockError;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anec_base::FileError;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::error::ConvertError;
use super::report::PackageReport;
use anec_base::hexadecimal;
use anec_base::output::is_partial_name;
use anec_base::{Error, Fault};
use anec_bundle::{FunctionEntry, HostFacts, PackageEntry};
use anec_manifest::Manifest;
use anec_source::Source;

/// Marks a folder as created by a conversion; only such folders are ever removed.
const FILE_NAME: &str = ".anec-journal.json";

/// Prefix of a calibration folder's name.
const CALIBRATION: &str = ".anec-calibration-";
/// File in a calibration folder that lists what is finished.
pub const CALIBRATION_JOURNAL: &str = "calibration.json";

/// Suffix of the folder in which a bundle is written.
pub const PARTIAL: &str = ".partial";

/// Number of packages up to which the journal is written after each of them.
const FEW: usize = 64;

/// Journal of a run. While it exists its folder is locked, on systems that can lock folders.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Journal {
    /// Digest of the inputs.
    inputs: String,
    /// Finished packages by name.
    pub packages: BTreeMap<String, FinishedPackage>,
    /// Facts of the host's file, once it is written.
    pub host: Option<HostFacts>,
    /// Time of the last write, and its duration.
    #[serde(skip)]
    written: Option<(Instant, Duration)>,
    /// Whether anything was finished since the last write.
    #[serde(skip)]
    behind: bool,
    #[serde(skip)]
    path: PathBuf,
    #[serde(skip)]
    _lock: Option<FolderLock>,
}

/// Finished package.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FinishedPackage {
    /// Entry of the package in `bundle.json`.
    pub entry: PackageEntry,
    /// Entries of its functions in `bundle.json`.
    pub functions: Vec<FunctionEntry>,
    /// Entry of the package in `report.json`.
    pub report: PackageReport,
}

impl Journal {
    /// Resumes the journal in `folder` if it has the same inputs; otherwise empties the folder and starts a new one.
    ///
    /// # Errors
    /// If the folder can't be created or emptied, or another run holds it.
    pub fn open(folder: &Path, inputs: String, anew: bool) -> Result<Journal, ConvertError> {
        let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::create_dir_all(parent).map_err(FileError::of(parent, "create"))?;
        match std::fs::create_dir(folder) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(FileError::of(folder, "create")(error).into());
            }
            Err(_) if std::fs::symlink_metadata(folder).is_ok_and(|found| !found.is_dir()) => {
                return Err(ConvertError::NotOurs(folder.to_owned()));
            }
            _ => {}
        }
        // lock before looking: runs fill, rename and remove only folders that they hold
        let Some(lock) = lock(folder)? else {
            return Err(ConvertError::Busy(folder.to_owned()));
        };
        if !is_ours(folder) {
            return Err(match is_being_replaced(folder) {
                true => ConvertError::Busy(folder.to_owned()),
                false => ConvertError::NotOurs(folder.to_owned()),
            });
        }
        let path = folder.join(FILE_NAME);
        let read = || -> Option<Journal> {
            let journal: Journal = serde_json::from_slice(&std::fs::read(&path).ok()?).ok()?;
            (journal.inputs == inputs && !anew).then_some(journal)
        };
        let found = read();
        let begins = found.is_none();
        let mut journal = found.unwrap_or_else(|| Journal { inputs, ..Default::default() });
        (journal.path, journal._lock) = (path, Some(lock));
        journal.packages.retain(|_, p| complete(folder, &p.entry.files));
        let host_is_complete = |h: &HostFacts| size(&folder.join(&h.file.file)) == Some(h.file.bytes);
        journal.host = journal.host.filter(host_is_complete);
        if begins {
            journal.remove_calibration(folder)?;
            // before any other file, so that leftovers are never mistaken for this run's files
            journal.save()?;
        }
        journal.remove_unfinished(folder)?;
        Ok(journal)
    }

    /// Removes files that the journal doesn't list: an earlier run was writing them when it ended.
    fn remove_unfinished(&self, folder: &Path) -> Result<(), ConvertError> {
        let finished = |name: &str| {
            name == FILE_NAME
                || name == self.calibration()
                || self.packages.values().any(|p| p.entry.package == name)
                || self.host.as_ref().is_some_and(|h| h.file.file == name)
        };
        for entry in std::fs::read_dir(folder).map_err(FileError::of(folder, "read"))? {
            let path = entry.map_err(FileError::of(folder, "read"))?.path();
            if path.file_name().and_then(|n| n.to_str()).is_some_and(finished) {
                continue;
            }
            let is_folder = std::fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir());
            let removed = if is_folder { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
            removed.map_err(FileError::of(&path, "remove"))?;
        }
        Ok(())
    }

    /// Writes the journal.
    ///
    /// # Errors
    /// If the file can't be written.
    pub fn save(&mut self) -> Result<(), ConvertError> {
        let begin = Instant::now();
        let text = serde_json::to_vec(self).map_err(|e| FileError::of(&self.path, "write")(e.into()))?;
        anec_base::output::write_file(&self.path, &text)?;
        self.written = Some((Instant::now(), begin.elapsed()));
        self.behind = false;
        Ok(())
    }

    /// Writes the journal unless that was done moments ago: it is written as a whole, which for very many packages
    /// would dominate the run.
    ///
    /// # Errors
    /// If the file can't be written.
    pub fn save_often(&mut self) -> Result<(), ConvertError> {
        let due = |(at, took): (Instant, Duration)| at.elapsed() >= 4 * took;
        self.behind = true;
        if self.packages.len() < FEW || self.written.is_none_or(due) { self.save() } else { Ok(()) }
    }

    /// Writes the journal if it is out of date.
    ///
    /// # Errors
    /// If the file can't be written.
    pub fn save_rest(&mut self) -> Result<(), ConvertError> {
        if self.behind { self.save() } else { Ok(()) }
    }

    /// Removes the folder of a run that failed before it finished any file, or because of its source, which will fail
    /// again: there is nothing to resume.
    pub fn discard_after(self, error: &Error, folder: &Path) {
        let calibrated = folder.join(self.calibration()).exists();
        let is_empty = self.packages.is_empty() && self.host.is_none() && !calibrated;
        if (is_empty || error.fault() == Fault::Source) && is_ours(folder) {
            // report the run's own failure
            let _ = std::fs::remove_dir_all(folder);
        }
    }

    /// Name of the calibration folder within the conversion's folder, where an interrupted calibration of the same
    /// inputs resumes.
    pub fn calibration(&self) -> String {
        format!("{CALIBRATION}{}", self.inputs.get(..16).unwrap_or(&self.inputs))
    }

    /// Removes the calibration folder atomically.
    ///
    /// # Errors
    /// If it can't be removed.
    pub fn remove_calibration(&self, folder: &Path) -> Result<(), ConvertError> {
        let path = folder.join(self.calibration());
        if path.exists() {
            let removed = path.with_extension("removed");
            std::fs::rename(&path, &removed).map_err(FileError::of(&path, "remove"))?;
            std::fs::remove_dir_all(&removed).map_err(FileError::of(&removed, "remove"))?;
        }
        Ok(())
    }

    /// Returns whether a folder holds a journal.
    pub fn is_in(folder: &Path) -> bool {
        folder.join(FILE_NAME).is_file()
    }

    /// Removes the journal of a complete run.
    ///
    /// # Errors
    /// If it can't be removed.
    pub fn remove(folder: &Path) -> Result<(), ConvertError> {
        let path = folder.join(FILE_NAME);
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(FileError::of(&path, "remove")(e).into()),
            _ => Ok(()),
        }
    }
}

/// Returns whether the folder holds a just replaced bundle, which [`publish`](super::output::publish) is removing.
fn is_being_replaced(partial: &Path) -> bool {
    let name = partial.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(PARTIAL));
    name.is_some_and(|name| Journal::is_in(&partial.with_file_name(name)))
}

/// Removes the folder of a replaced bundle after `keep` has moved out of it what stays, unless another run does so or
/// has started anew there. Both happen under the folder's lock, so that of several runs one does them.
///
/// # Errors
/// If `keep` fails, or the folder can't be removed.
pub fn remove_replaced(folder: &Path, keep: impl Fn(&Path) -> Result<(), ConvertError>) -> Result<(), ConvertError> {
    // check without the lock first (the folder may be changing), then again under the lock
    while std::fs::symlink_metadata(folder).is_ok_and(|found| found.is_dir()) && !is_ours(folder) {
        match lock(folder)? {
            Some(_lock) if !is_ours(folder) => {
                keep(folder)?;
                std::fs::remove_dir_all(folder).map_err(FileError::of(folder, "remove"))?;
            }
            Some(_) => break,
            // the holder removes it, or is about to notice that it isn't its folder
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    Ok(())
}

/// Lock of a folder, held until dropped.
#[derive(Debug)]
struct FolderLock {
    #[cfg(unix)]
    _file: File,
}

/// Locks a folder. Returns `None` if the folder doesn't exist, another run holds it, or the path now names another
/// folder because a run renamed it. On systems without folder locks it always succeeds.
///
/// # Errors
/// If the folder can't be opened.
fn lock(folder: &Path) -> Result<Option<FolderLock>, ConvertError> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let file = match File::open(folder) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            file => file.map_err(FileError::of(folder, "open"))?,
        };
        let identity = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
        // systems that can't lock folders don't exclude anyone
        let is_held = matches!(file.try_lock(), Err(TryLockError::WouldBlock));
        let of_path = std::fs::symlink_metadata(folder).ok().map(identity);
        let is_same = of_path.is_some() && of_path == file.metadata().ok().map(identity);
        Ok((!is_held && is_same).then_some(FolderLock { _file: file }))
    }
    #[cfg(not(unix))]
    Ok(folder.exists().then_some(FolderLock {}))
}

/// Returns whether a conversion created the folder: it has a journal, or is about to get its first.
pub fn is_ours(folder: &Path) -> bool {
    if !std::fs::symlink_metadata(folder).is_ok_and(|found| found.is_dir()) {
        return false;
    }
    let Ok(mut entries) = std::fs::read_dir(folder) else { return false };
    Journal::is_in(folder)
        || entries.all(|entry| {
            entry.is_ok_and(|entry| {
                let name = entry.file_name().to_string_lossy().into_owned();
                name.starts_with(&format!(".{FILE_NAME}")) && is_partial_name(&name)
            })
        })
}

fn size(path: &Path) -> Option<u64> {
    std::fs::metadata(path).ok().map(|m| m.len())
}

/// Returns whether all files of a package have their full length. Contents need no check: a package appears by rename.
pub fn complete(folder: &Path, files: &[anec_bundle::FileDigest]) -> bool {
    !files.is_empty() && files.iter().all(|f| size(&folder.join(&f.file)) == Some(f.bytes))
}

/// Digest of everything that determines a bundle's bytes. Source files count by name, size, modification time and
/// identity, because reading them would cost what resuming saves.
pub fn inputs(manifest: &Manifest, source: &Source) -> String {
    let mut hasher = Sha256::new();
    hasher.update(env!("CARGO_PKG_VERSION"));
    hasher.update(serde_json::to_vec(manifest).unwrap_or_default());
    for file in source.files() {
        hasher.update(format!("\0{}\0{}\0{}", file.name(), file.size(), changed(file.path())));
    }
    hexadecimal(&hasher.finalize())
}

/// Identity of a file's contents beyond size and modification time, which archives and copies may set.
fn changed(path: &Path) -> String {
    let Ok(metadata) = std::fs::metadata(path) else { return String::new() };
    let modified = metadata.modified().ok().and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
    let modified = modified.unwrap_or_default().as_nanos();
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        format!("{modified} {} {} {} {}", metadata.dev(), metadata.ino(), metadata.ctime(), metadata.ctime_nsec())
    }
    #[cfg(not(unix))]
    modified.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_bundle::FileDigest;

    fn finished(bytes: u64) -> FinishedPackage {
        let file = FileDigest { file: "a.mlpackage/w.bin".into(), bytes, digest: anec_base::ContentDigest::of(b"a") };
        FinishedPackage {
            entry: PackageEntry {
                package: "a.mlpackage".into(),
                compiled: None,
                weight_bytes: bytes,
                files: vec![file],
            },
            functions: vec![],
            report: PackageReport { package: "a.mlpackage".into(), weight_bytes: bytes, seconds: 0.0, tensors: vec![] },
        }
    }

    #[test]
    fn finished_packages_are_kept_and_damaged_ones_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let partial = folder.path().join("out.partial");
        let mut journal = Journal::open(&partial, "same".into(), false).unwrap();
        std::fs::create_dir(partial.join("a.mlpackage")).unwrap();
        std::fs::write(partial.join("a.mlpackage/w.bin"), [0; 7]).unwrap();
        journal.packages.insert("a".into(), finished(7));
        journal.packages.insert("b".into(), finished(8));
        journal.save().unwrap();
        std::fs::create_dir(partial.join(".b.mlpackage.partial-7")).unwrap();
        std::fs::write(partial.join("host.safetensors.partial"), "x").unwrap();
        drop(journal);
        let again = Journal::open(&partial, "same".into(), false).unwrap();
        assert_eq!(again.packages.keys().collect::<Vec<_>>(), ["a"]);
        let mut left: Vec<_> = std::fs::read_dir(&partial).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, [FILE_NAME, "a.mlpackage"]);
    }

    #[test]
    fn other_inputs_or_force_start_anew() {
        let folder = tempfile::tempdir().unwrap();
        let partial = folder.path().join("out.partial");
        for (inputs, anew) in [("other", false), ("one", true)] {
            let mut journal = Journal::open(&partial, "one".into(), false).unwrap();
            std::fs::write(partial.join("left-over"), "x").unwrap();
            journal.packages.insert("a".into(), finished(1));
            journal.save().unwrap();
            drop(journal);
            let journal = Journal::open(&partial, inputs.into(), anew).unwrap();
            assert!(journal.packages.is_empty() && !partial.join("left-over").exists());
        }
    }

    #[test]
    fn two_runs_never_share_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let first = Journal::open(folder.path(), "one".into(), false).unwrap();
        let second = Journal::open(folder.path(), "one".into(), false).unwrap_err();
        assert!(matches!(second, ConvertError::Busy(_)));
        drop(first);
        Journal::open(folder.path(), "one".into(), false).unwrap();
    }

    #[test]
    fn a_replaced_file_of_equal_size_and_time_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        let write = |text: &str| {
            std::fs::write(&path, text).unwrap();
            File::options().write(true).open(&path).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
            changed(&path)
        };
        let before = write("one");
        assert_eq!(changed(&path), before);
        // longer than any file system's time resolution
        std::thread::sleep(std::time::Duration::from_millis(30));
        assert!(cfg!(not(unix)) || write("two") != before);
    }

    #[test]
    fn a_damaged_journal_starts_anew() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(FILE_NAME), "{").unwrap();
        assert!(Journal::open(folder.path(), "one".into(), false).unwrap().packages.is_empty());
    }
}
