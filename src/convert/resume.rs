//! What a run has finished, so that the next one can go on after a kill.
//!
//! A bundle is made in `OUT.partial`, beside its journal, and gets its name when it is complete. The journal says which
//! inputs the run has; a run with other inputs starts anew.

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
use anec_bundle::{FunctionEntry, HostFacts, PackageEntry};
use anec_manifest::Manifest;
use anec_source::Source;

/// Marks a folder as one that a conversion fills; nothing in another is ever removed.
const FILE_NAME: &str = ".anec-journal.json";

/// What the name of a calibration's folder begins with.
const CALIBRATION: &str = ".anec-calibration-";
/// In the folder of a calibration: says what is finished, once something is.
pub const CALIBRATION_JOURNAL: &str = "calibration.json";

/// The end of the name of a folder in which a bundle is made.
pub const PARTIAL: &str = ".partial";

/// Packages up to which the journal is written for each of them.
const FEW: usize = 64;

/// The journal of a run. While it exists its folder is locked, where the system locks folders.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Journal {
    /// Digest of the inputs.
    inputs: String,
    /// Finished packages by name.
    pub packages: BTreeMap<String, FinishedPackage>,
    /// The host's file, once it is written.
    pub host: Option<HostFacts>,
    /// When it was written last, and how long that took.
    #[serde(skip)]
    written: Option<(Instant, Duration)>,
    /// Something was finished after that.
    #[serde(skip)]
    behind: bool,
    #[serde(skip)]
    path: PathBuf,
    #[serde(skip)]
    _lock: Option<FolderLock>,
}

/// What is known of a finished package.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FinishedPackage {
    /// For the bundle.
    pub entry: PackageEntry,
    /// For the bundle.
    pub functions: Vec<FunctionEntry>,
    /// For the report.
    pub report: PackageReport,
}

impl Journal {
    /// Goes on with the journal in `folder` if it is of the same inputs, else empties the folder and begins one.
    ///
    /// # Errors
    /// When the folder can't be made or emptied, or another run is at work there.
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
        // first the lock, then whose it is: runs fill, rename and remove only folders that they hold
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
            // first, so that what is left by others is never taken for this run's
            journal.save()?;
        }
        journal.remove_unfinished(folder)?;
        Ok(journal)
    }

    /// Removes what the journal doesn't name: what an earlier run was writing when it ended.
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
    /// When the system refuses.
    pub fn save(&mut self) -> Result<(), ConvertError> {
        let begin = Instant::now();
        let text = serde_json::to_vec(self).map_err(|e| FileError::of(&self.path, "write")(e.into()))?;
        anec_base::output::write_file(&self.path, &text)?;
        self.written = Some((Instant::now(), begin.elapsed()));
        self.behind = false;
        Ok(())
    }

    /// Writes the journal of a run that goes on, unless that has just been done. It is written whole, so that with very many
    /// packages most of the time would go there.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn save_often(&mut self) -> Result<(), ConvertError> {
        let due = |(at, took): (Instant, Duration)| at.elapsed() >= 4 * took;
        self.behind = true;
        if self.packages.len() < FEW || self.written.is_none_or(due) { self.save() } else { Ok(()) }
    }

    /// Writes the journal, unless it says all that is finished.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn save_rest(&mut self) -> Result<(), ConvertError> {
        if self.behind { self.save() } else { Ok(()) }
    }

    /// Removes the folder of a run that failed before it finished any file: there is nothing to go on with.
    pub fn discard_if_empty(self, folder: &Path) {
        let calibrated = folder.join(self.calibration()).exists();
        if self.packages.is_empty() && self.host.is_none() && !calibrated && is_ours(folder) {
            // the failure of the run is what is told
            let _ = std::fs::remove_dir_all(folder);
        }
    }

    /// The folder of this conversion's calibration, within its own. An interrupted one goes on there; it is of these inputs
    /// alone.
    pub fn calibration(&self) -> String {
        format!("{CALIBRATION}{}", self.inputs.get(..16).unwrap_or(&self.inputs))
    }

    /// Removes the folder of the calibration, in one step for those who look for it.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn remove_calibration(&self, folder: &Path) -> Result<(), ConvertError> {
        let path = folder.join(self.calibration());
        if path.exists() {
            let removed = path.with_extension("removed");
            std::fs::rename(&path, &removed).map_err(FileError::of(&path, "remove"))?;
            std::fs::remove_dir_all(&removed).map_err(FileError::of(&removed, "remove"))?;
        }
        Ok(())
    }

    /// Whether a folder holds a journal: a run is, or was, at work there.
    pub fn is_in(folder: &Path) -> bool {
        folder.join(FILE_NAME).is_file()
    }

    /// Removes the journal of a folder, if there is one: the run is complete.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn remove(folder: &Path) -> Result<(), ConvertError> {
        let path = folder.join(FILE_NAME);
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(FileError::of(&path, "remove")(e).into()),
            _ => Ok(()),
        }
    }
}

/// Whether the folder where a bundle is made holds the one that was just replaced, which [`publish`](super::output::publish) is about to remove or
/// is removing.
fn is_being_replaced(partial: &Path) -> bool {
    let name = partial.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(PARTIAL));
    name.is_some_and(|name| Journal::is_in(&partial.with_file_name(name)))
}

/// Removes the folder of a bundle that has been replaced, unless another run does so, or has begun anew there.
///
/// # Errors
/// When the system refuses.
pub fn remove_replaced(folder: &Path) -> Result<(), ConvertError> {
    // what is looked at without the lock may just be filled or removed; what is looked at under it may not
    while std::fs::symlink_metadata(folder).is_ok_and(|found| found.is_dir()) && !is_ours(folder) {
        match lock(folder)? {
            Some(_lock) if !is_ours(folder) => {
                std::fs::remove_dir_all(folder).map_err(FileError::of(folder, "remove"))?;
            }
            Some(_) => break,
            // who holds it removes it, or is about to see that it isn't a folder to fill
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    Ok(())
}

/// The lock of a folder, which lasts as long as this does.
#[derive(Debug)]
struct FolderLock {
    #[cfg(unix)]
    _file: File,
}

/// The lock of a folder; none when there is no such folder, when another run holds it, or when it is no longer the one of
/// that path: another run may have given it another name. Where the system doesn't lock folders everybody gets it.
///
/// # Errors
/// When the system refuses to open it.
fn lock(folder: &Path) -> Result<Option<FolderLock>, ConvertError> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let file = match File::open(folder) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            file => file.map_err(FileError::of(folder, "open"))?,
        };
        let identity = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
        // a system that can't lock it lets everybody at it
        let is_held = matches!(file.try_lock(), Err(TryLockError::WouldBlock));
        let of_path = std::fs::symlink_metadata(folder).ok().map(identity);
        let is_same = of_path.is_some() && of_path == file.metadata().ok().map(identity);
        Ok((!is_held && is_same).then_some(FolderLock { _file: file }))
    }
    #[cfg(not(unix))]
    Ok(folder.exists().then_some(FolderLock {}))
}

/// Whether a folder was made by a conversion: it has a journal, or is about to get its first.
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

/// Whether the files of a package are there in full length. Their content needs no check: a package appears by rename.
pub fn complete(folder: &Path, files: &[anec_bundle::FileDigest]) -> bool {
    !files.is_empty() && files.iter().all(|f| size(&folder.join(&f.file)) == Some(f.bytes))
}

/// A digest of everything that decides a bundle's bytes. Source files count by name, size, time of change and identity;
/// reading them whole is what a resumed run wants to save.
pub fn inputs(manifest: &Manifest, source: &Source) -> String {
    let mut hasher = Sha256::new();
    hasher.update(env!("CARGO_PKG_VERSION"));
    hasher.update(serde_json::to_vec(manifest).unwrap_or_default());
    for file in source.files() {
        hasher.update(format!("\0{}\0{}\0{}", file.name(), file.size(), changed(file.path())));
    }
    hexadecimal(&hasher.finalize())
}

/// What tells that a file may have another content than before, even with the size and time of the one before: archives
/// and copies set times.
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
    fn other_inputs_or_force_begin_anew() {
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
    fn two_runs_are_never_at_work_in_one_folder() {
        let folder = tempfile::tempdir().unwrap();
        let first = Journal::open(folder.path(), "one".into(), false).unwrap();
        let second = Journal::open(folder.path(), "one".into(), false).unwrap_err();
        assert!(matches!(second, ConvertError::Busy(_)));
        drop(first);
        Journal::open(folder.path(), "one".into(), false).unwrap();
    }

    #[test]
    fn a_file_with_the_size_and_time_of_another_is_another() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        let write = |text: &str| {
            std::fs::write(&path, text).unwrap();
            File::options().write(true).open(&path).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
            changed(&path)
        };
        let before = write("one");
        assert_eq!(changed(&path), before);
        // longer than any system's unit of time
        std::thread::sleep(std::time::Duration::from_millis(30));
        assert!(cfg!(not(unix)) || write("two") != before);
    }

    #[test]
    fn a_damaged_journal_begins_anew() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(FILE_NAME), "{").unwrap();
        assert!(Journal::open(folder.path(), "one".into(), false).unwrap().packages.is_empty());
    }
}
