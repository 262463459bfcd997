//! Output folder of a bundle: existing contents and atomic replacement.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anec_base::FileError;

use serde_json::Value as Json;

use super::digests;
use super::error::ConvertError;
use super::report;
use super::resume::{self, Journal, PARTIAL};
use anec_base::Result;
use anec_bundle::{Bundle, BundleError};
use anec_manifest::Manifest;
use anec_source::Source;

/// Existing contents of the output path.
#[derive(Debug, PartialEq, Eq)]
pub enum Existing {
    /// Empty, or replaceable.
    Nothing,
    /// Complete bundle of the same inputs.
    UpToDate,
}

/// Checks the output path, after cleaning up after a killed run.
///
/// # Errors
/// If the path holds something other than a bundle, or a bundle of other inputs and `force` is false.
pub fn existing(path: &Path, manifest: &Manifest, source: &Source, force: bool) -> Result<Existing> {
    tidy(path)?;
    match std::fs::read_dir(path) {
        // creating the folder reports other obstacles
        Err(_) if std::fs::symlink_metadata(path).is_err() => return Ok(Existing::Nothing),
        Err(_) if !path.is_dir() => return Err(ConvertError::NotABundle(path.to_owned()).into()),
        Err(e) => return Err(FileError::of(path, "open")(e).into()),
        Ok(mut entries) => {
            if entries.next().is_none() {
                return Ok(Existing::Nothing);
            }
        }
    }
    if !path.join(anec_bundle::FILE_NAME).is_file() {
        return Err(ConvertError::NotABundle(path.to_owned()).into());
    }
    if force {
        return Ok(Existing::Nothing);
    }
    match difference(path, manifest, source)? {
        None => Ok(Existing::UpToDate),
        Some(difference) => Err(ConvertError::Exists { path: path.to_owned(), difference }.into()),
    }
}

/// Difference between an existing bundle and the one to be written.
fn difference(path: &Path, manifest: &Manifest, source: &Source) -> Result<Option<String>> {
    let old = match Bundle::read(path) {
        Ok(old) => old,
        Err(BundleError::Version { found, .. }) => {
            return Ok(Some(format!("its bundle.json has schema version {found}")));
        }
        Err(BundleError::Content { problem, .. }) => return Ok(Some(format!("its bundle.json is damaged: {problem}"))),
        Err(other) => return Err(other.into()),
    };
    Ok(if old.manifest != *manifest {
        let keys = differing(&old.manifest, manifest);
        Some(format!("its manifest differs in {}", keys.join(", ")))
    } else if old.anec_version != env!("CARGO_PKG_VERSION") {
        Some("it was written by another version of anec".into())
    } else if !old.packages.iter().all(|p| resume::complete(path, &p.files)) {
        Some("files are missing or truncated".into())
    } else if !digests::is_source(source, &old.source)? {
        Some("its source differs".into())
    } else {
        None
    })
}

/// Keys in which two manifests differ.
fn differing(a: &Manifest, b: &Manifest) -> Vec<String> {
    fn visit(path: &str, a: &Json, b: &Json, out: &mut Vec<String>) {
        match (a, b) {
            (a, b) if a == b => {}
            (Json::Object(a), Json::Object(b)) => {
                for key in a.keys().chain(b.keys().filter(|key| !a.contains_key(*key))) {
                    let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                    let of = |map: &serde_json::Map<String, Json>| map.get(key).cloned().unwrap_or_default();
                    visit(&path, &of(a), &of(b), out);
                }
            }
            _ => out.push(format!("`{path}`")),
        }
    }
    let mut keys = Vec::new();
    let [a, b] = [a, b].map(|manifest| serde_json::to_value(manifest).unwrap_or_default());
    visit("", &a, &b, &mut keys);
    keys
}

/// Resolves symbolic links, `.` and `..` in the output path.
///
/// # Errors
/// If links form a cycle.
pub fn target(path: &Path) -> Result<PathBuf, ConvertError> {
    let target = match path.file_name() {
        Some(_) => anec_base::output::resolve(path),
        None => std::fs::canonicalize(path),
    };
    Ok(target.map_err(FileError::of(path, "open"))?)
}

/// Path of a bundle: `out`, resolved as by [`target`], or `NAME.anec` in the current folder.
///
/// # Errors
/// If links form a cycle.
pub fn bundle_path(out: Option<&Path>, name: &str) -> Result<PathBuf, ConvertError> {
    out.map_or_else(|| target(Path::new(&format!("{name}.anec"))), target)
}

/// Folder of the incomplete bundle for `path`.
pub fn partial(path: &Path) -> PathBuf {
    with_suffix(path, PARTIAL)
}

/// Folder of a bundle being replaced, on systems that can't exchange two folders.
fn replaced(path: &Path) -> PathBuf {
    with_suffix(path, ".replaced")
}

/// Renames a complete bundle to its final path, and removes its journal and the replaced bundle. A kill at any moment
/// leaves the old or the new bundle; `tidy` cleans up the rest.
///
/// # Errors
/// If a file can't be renamed or removed.
pub fn publish(partial: &Path, path: &Path) -> Result<(), ConvertError> {
    let renamed = |e| FileError::of(path, "rename")(e);
    if !path.join(anec_bundle::FILE_NAME).exists() {
        std::fs::rename(partial, path).map_err(renamed)?;
    } else if anec_package::exchange(partial, path).is_err() {
        std::fs::rename(path, replaced(path)).map_err(renamed)?;
        std::fs::rename(partial, path).map_err(renamed)?;
    }
    tidy(path)
}

/// Finishes an interrupted [`publish`].
fn tidy(path: &Path) -> Result<(), ConvertError> {
    let (partial, replaced) = (partial(path), replaced(path));
    if !is_bundle(path) {
        // between the two renames; a folder of that name that isn't a bundle belongs to somebody else
        return match is_bundle(&replaced) && !path.exists() {
            true => Ok(std::fs::rename(&replaced, path).map_err(FileError::of(path, "rename"))?),
            false => Ok(()),
        };
    }
    // the journal arrived with the new bundle, so the folder beside it has been replaced
    if Journal::is_in(path) {
        for old in [partial, replaced] {
            resume::remove_replaced(&old, |old| keep_others(old, path))?;
        }
    }
    Journal::remove(path)
}

/// Moves what anec didn't write from a bundle that was replaced to the new one: goldens, notes, reports of other tools.
fn keep_others(old: &Path, new: &Path) -> Result<(), ConvertError> {
    if !is_bundle(old) {
        // what is left of a removal that was killed
        return Ok(());
    }
    let failed = |path: &Path, error| ConvertError::from(FileError::of(path, "move")(error));
    let listed = listed(old);
    for entry in std::fs::read_dir(old).map_err(|error| failed(old, error))? {
        let from = entry.map_err(|error| failed(old, error))?.path();
        let Some(name) = from.file_name() else { continue };
        let to = new.join(name);
        let own = name.to_str().is_some_and(|name| is_own(name) || listed.contains(name));
        if !own && std::fs::symlink_metadata(&to).is_err() {
            std::fs::rename(&from, &to).map_err(|error| failed(&from, error))?;
        }
    }
    Ok(())
}

/// Files and folders that a bundle lists, by the first part of their paths.
fn listed(folder: &Path) -> BTreeSet<String> {
    let Ok(bundle) = Bundle::read(folder) else { return BTreeSet::new() };
    let compiled = bundle.packages.iter().filter_map(|package| package.compiled.as_deref());
    let files = bundle.files().map(|file| file.file.as_str()).chain(compiled);
    files.filter_map(|file| file.split('/').next()).map(str::to_owned).collect()
}

/// Whether a name in a bundle's folder is one that anec gives, for bundles whose list can't be read.
fn is_own(name: &str) -> bool {
    let files = [
        anec_bundle::FILE_NAME,
        report::FILE_NAME,
        "host.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ];
    let package = [".mlpackage", ".mlmodelc"].iter().any(|ending| name.ends_with(ending));
    files.contains(&name) || package || name.starts_with('.') || name.starts_with("chat_template.")
}

/// Returns whether the path is a folder, not a link, with a bundle.
fn is_bundle(folder: &Path) -> bool {
    is_folder(folder) && folder.join(anec_bundle::FILE_NAME).is_file()
}

/// Returns whether the path is a folder, not a link.
fn is_folder(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|found| found.is_dir())
}

/// Appends a suffix to a path's name.
fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(suffix);
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes_are_appended_to_the_name() {
        assert_eq!(with_suffix(Path::new("a/b.anec"), ".partial"), Path::new("a/b.anec.partial"));
        assert_eq!(with_suffix(Path::new("a/b.anec/"), ".partial"), Path::new("a/b.anec.partial"));
        // `.` has no name
        assert_eq!(target(Path::new("a.anec")).unwrap(), Path::new("a.anec"));
        assert!(with_suffix(&target(Path::new(".")).unwrap(), ".partial").is_absolute());
    }

    /// An old bundle with a user's files in `old`, and a new one with its journal in `new`.
    fn old_and_new(room: &Path, old: &Path, new: &Path) {
        for folder in [old, new] {
            std::fs::create_dir_all(folder.join("layer_0.mlpackage")).unwrap();
            std::fs::write(folder.join(anec_bundle::FILE_NAME), "{}").unwrap();
            std::fs::write(folder.join("notes.txt"), format!("{}", folder == new)).unwrap();
        }
        std::fs::create_dir(old.join("goldens")).unwrap();
        std::fs::write(old.join("golden.safetensors"), "golden").unwrap();
        std::fs::write(old.join("goldens/a"), "a").unwrap();
        std::fs::create_dir(old.join("layer_9.mlpackage")).unwrap();
        Journal::open(&room.join("j"), "x".into(), false).unwrap();
        let journal = std::fs::read_dir(room.join("j")).unwrap().next().unwrap().unwrap().path();
        std::fs::copy(&journal, new.join(journal.file_name().unwrap())).unwrap();
    }

    #[test]
    fn runs_that_finish_a_replacement_together_do_it_once() {
        for _ in 0..100 {
            let room = tempfile::tempdir().unwrap();
            let path = room.path().join("m.anec");
            old_and_new(room.path(), &partial(&path), &path);
            std::thread::scope(|scope| {
                let runs = [(); 4].map(|()| scope.spawn(|| tidy(&path)));
                runs.into_iter().for_each(|run| run.join().unwrap().unwrap());
            });
            assert!(path.join("goldens/a").exists() && path.join("golden.safetensors").exists());
            assert!(!partial(&path).exists() && !Journal::is_in(&path));
        }
    }

    #[test]
    fn others_files_stay_when_a_bundle_is_replaced() {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("m.anec");
        let new = partial(&path);
        old_and_new(room.path(), &path, &new);
        publish(&new, &path).unwrap();
        let read = |name: &str| std::fs::read_to_string(path.join(name)).unwrap();
        assert_eq!([read("golden.safetensors"), read("goldens/a"), read("notes.txt")], ["golden", "a", "true"]);
        assert!(!path.join("layer_9.mlpackage").exists() && !new.exists());
    }

    #[test]
    fn differing_keys_are_named() {
        let read = |text: &str| Manifest::from_yaml(text, "test", &[]).unwrap();
        let a = read("{ context: 64, quant: { granularity: per_channel } }");
        assert_eq!(differing(&a, &a), [""; 0]);
        assert_eq!(differing(&a, &read("{ context: 64, name: b }")), ["`quant.granularity`", "`name`"]);
    }
}
