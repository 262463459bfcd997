//! Output folder of a bundle: existing contents and atomic replacement.

use std::path::{Path, PathBuf};

use anec_base::FileError;

use serde_json::Value as Json;

use super::digests;
use super::error::ConvertError;
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
            resume::remove_replaced(&old)?;
        }
    }
    Journal::remove(path)
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

    #[test]
    fn differing_keys_are_named() {
        let read = |text: &str| Manifest::from_yaml(text, "test", &[]).unwrap();
        let a = read("{ context: 64, quant: { granularity: per_channel } }");
        assert_eq!(differing(&a, &a), [""; 0]);
        assert_eq!(differing(&a, &read("{ context: 64, name: b }")), ["`quant.granularity`", "`name`"]);
    }
}
