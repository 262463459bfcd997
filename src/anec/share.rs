//! Bundles on the Hugging Face hub: upload with a model card, download with all digests checked.

use std::fs::File;
use std::path::{Path, PathBuf};

use anec_advice::{ChipPrediction, ChipTable, predict};
use anec_base::{ContentDigest, Diagnostic, Fault, FileError, Progress, Result, clock, input};
use anec_bundle::{Bundle, BundleError, FILE_NAME, FileDigest};
use anec_convert::open::open_shapes;
use anec_convert::output;
use anec_convert::plan::ConvertPlan;
use anec_convert::report::{self, ConvertReport};
use anec_hub::download::Transfer;
use anec_hub::{FileHash, Hub, HubCommit, HubError, RemoteFile, RemoteRepository, Upload, UploadContent};
use anec_report::{CardFacts, card};
use anec_validate::verdict;
use serde_json::Value as Json;

use crate::cache::{BundleCache, CacheRecord, incomplete};
use crate::validator::forecast_of;

/// File name of the model card.
const CARD: &str = "README.md";
/// Largest size in bytes of a `report.json` or a gates report.
const MAX_JSON_BYTES: u64 = 256 << 20;

/// Errors of sharing a bundle.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShareError {
    /// Repository without a bundle.
    #[error("{repository} holds no bundle: it has no {FILE_NAME}")]
    NoBundle {
        /// Repository name.
        repository: String,
    },
    /// Repository that lacks a file of its bundle.
    #[error("{repository} lacks {file}, which its {FILE_NAME} names")]
    Lacks {
        /// Repository name.
        repository: String,
        /// File name.
        file: String,
    },
    /// Description of a bundle that is too large.
    #[error("{repository}: its {FILE_NAME} has {bytes} bytes, expected at most {MAX_JSON_BYTES}")]
    TooLarge {
        /// Repository name.
        repository: String,
        /// Size in bytes.
        bytes: u64,
    },
    /// Output path that exists.
    #[error("{}: exists already", .0.display())]
    Exists(PathBuf),
    /// Invalid name of a repository.
    #[error("{0:?} is not the name of a repository on the hub")]
    Name(String),
    /// Gates report that is invalid or of another bundle.
    #[error("{}: {problem}", path.display())]
    Gates {
        /// File path.
        path: PathBuf,
        /// Problem.
        problem: String,
    },
    /// The bundle didn't pass its gates.
    #[error("{name} isn't verified: {problem}")]
    Unproven {
        /// Name of the bundle.
        name: String,
        /// Missing, failed or unproven gate.
        problem: String,
    },
    /// Benchmark result that is invalid or of another bundle.
    #[error("{}: {problem}", path.display())]
    Bench {
        /// File path.
        path: PathBuf,
        /// Problem.
        problem: String,
    },
    /// Source that would give other packages than the bundle's.
    #[error("the packages of {origin} with the bundle's manifest differ from the bundle's")]
    OtherPlan {
        /// Source name.
        origin: String,
    },
}

impl Diagnostic for ShareError {
    fn fault(&self) -> Fault {
        match self {
            ShareError::NoBundle { .. } | ShareError::Lacks { .. } | ShareError::TooLarge { .. } => Fault::Source,
            ShareError::Exists(_)
            | ShareError::Name(_)
            | ShareError::Gates { .. }
            | ShareError::Unproven { .. }
            | ShareError::Bench { .. }
            | ShareError::OtherPlan { .. } => Fault::Usage,
        }
    }

    fn help(&self) -> Option<String> {
        let text = match self {
            ShareError::NoBundle { .. } => "convert the model, or name a repository with an uploaded bundle",
            ShareError::Lacks { .. } => "the upload was interrupted or changed by hand; push the bundle again",
            ShareError::TooLarge { .. } => "no bundle has so large a description; ask the repository's owner",
            ShareError::Exists(_) => "choose another folder, or remove this one",
            ShareError::Name(_) => "give it as hf:owner/name",
            ShareError::Gates { .. } => "give the JSON report of this bundle's gates",
            ShareError::Unproven { .. } => {
                "validate the bundle and record passed gates beside it, or share it as unproven, which its card says"
            }
            ShareError::Bench { .. } => "give the JSON result of this bundle's benchmark",
            ShareError::OtherPlan { .. } => "convert the source again, or name no chips",
        };
        Some(text.into())
    }
}

/// Downloads a bundle into a new folder, which appears when it is complete; an interrupted download is resumed. Every
/// file's digest is checked against the hub and `bundle.json`.
///
/// # Errors
/// If the repository holds no complete bundle, the folder exists, or the hub can't be reached.
pub fn pull(hub: &Hub, repository: &RemoteRepository, out: &Path, progress: &Progress) -> Result<Bundle> {
    if std::fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_some()) || out.is_file() {
        return Err(ShareError::Exists(out.to_owned()).into());
    }
    let named = |name: &str| repository.file(name);
    let Some(description) = named(FILE_NAME) else {
        return Err(ShareError::NoBundle { repository: repository.name.clone() }.into());
    };
    if description.size > MAX_JSON_BYTES {
        return Err(ShareError::TooLarge { repository: repository.name.clone(), bytes: description.size }.into());
    }
    let out = &output::target(out)?;
    let folder = incomplete(out, &repository.commit);
    std::fs::create_dir_all(&folder).map_err(FileError::of(&folder, "create"))?;
    // wait for another process that downloads it; not all systems can lock folders
    let lock = File::open(&folder).ok();
    let _ = lock.as_ref().map(File::lock);
    if out.join(FILE_NAME).is_file() {
        let _ = std::fs::remove_dir(&folder);
        return Ok(Bundle::read(out)?);
    }
    hub.download(repository, description, &folder.join(FILE_NAME), &Transfer::new(progress, description.size))?;
    let bundle = Bundle::read(&folder)?;
    if let Some(problem) = bundle.check().into_iter().next() {
        return Err(BundleError::Content { path: folder.join(FILE_NAME), problem }.into());
    }
    let mut wanted: Vec<(&RemoteFile, Option<&FileDigest>)> = Vec::new();
    for file in bundle.files() {
        let lacks = || ShareError::Lacks { repository: repository.name.clone(), file: file.file.clone() };
        wanted.push((named(&file.file).ok_or_else(lacks)?, Some(file)));
    }
    wanted.extend([report::FILE_NAME, CARD].iter().filter_map(|name| Some((named(name)?, None))));
    let transfer = Transfer::new(progress, wanted.iter().map(|(file, _)| file.size).sum());
    for (remote, digest) in wanted {
        let to = folder.join(&remote.path);
        // compare the hub's digest before anything is downloaded
        let told = match (&remote.hash, digest) {
            (FileHash::Sha256(found), Some(FileDigest { digest: ContentDigest::Sha256(expected), .. })) => {
                same(&to, expected, found)?;
                true
            }
            _ => false,
        };
        hub.download(repository, remote, &to, &transfer)?;
        if let Some(FileDigest { digest, .. }) = digest.filter(|_| !told) {
            let found = digest.rehash_file(&to).map_err(FileError::of(&to, "read"))?;
            same(&to, &digest.to_string(), &found.to_string())?;
        }
    }
    std::fs::rename(&folder, out).map_err(FileError::of(out, "create"))?;
    Ok(bundle)
}

fn same(path: &Path, expected: &str, found: &str) -> Result<(), HubError> {
    match expected == found {
        true => Ok(()),
        false => {
            Err(HubError::Digest { path: path.to_owned(), expected: expected.to_owned(), found: found.to_owned() })
        }
    }
}

/// Prepared upload of a bundle.
#[derive(Debug)]
pub struct Push {
    /// `owner/name`.
    pub repository: String,
    /// Files to upload.
    pub files: Vec<Upload>,
    /// The model card.
    pub card: String,
}

/// Facts about a bundle that aren't in it.
#[derive(Clone, Debug, Default)]
pub struct PushFacts {
    /// Licence of the weights, as the hub names it; default: the source's, if the hub knows it.
    pub license: Option<String>,
    /// Report of the gates; the one that is recorded in the bundle's folder if not given.
    pub gates: Option<PathBuf>,
    /// Whether a bundle may be pushed whose gates aren't all passed. Its card says so.
    pub unproven: bool,
    /// Output of `anec bench --json`.
    pub bench: Option<PathBuf>,
    /// Chips whose speed is predicted.
    pub chips: Vec<String>,
}

impl Push {
    /// Reads a bundle and writes its card. Nothing is sent; without a licence, `hub` is asked for that of the source.
    ///
    /// # Errors
    /// If the bundle is incomplete or can't be read, or a fact is about another bundle. For predictions, if the shapes
    /// of the source aren't available.
    pub fn prepare(folder: &Path, repository: &str, facts: &PushFacts, hub: Option<&Hub>) -> Result<Self> {
        let bundle = Bundle::read(folder)?;
        let content = |problem: String| BundleError::Content { path: folder.join(FILE_NAME), problem };
        if let Some(problem) = bundle.check().into_iter().next() {
            return Err(content(problem).into());
        }
        let mut uploads = Vec::new();
        for file in bundle.files() {
            let path = folder.join(&file.file);
            let size = std::fs::metadata(&path).map_err(FileError::of(&path, "open"))?.len();
            if size != file.bytes {
                return Err(content(format!("{} has {size} bytes, expected {}", file.file, file.bytes)).into());
            }
            let sha256 = sha256(&path, &file.digest)?;
            let content = UploadContent::File { path, bytes: size, sha256 };
            uploads.push(Upload { path: file.file.clone(), content });
        }
        let measured = folder.join(report::FILE_NAME);
        let measured = if measured.exists() { input::read(&measured, MAX_JSON_BYTES)? } else { Vec::new() };
        let converted: Option<ConvertReport> = serde_json::from_slice(&measured).ok();
        let converted = converted.map(ConvertReport::portable);
        let recorded = folder.join(verdict::FILE_NAME);
        let gates = facts.gates.clone().or_else(|| recorded.exists().then_some(recorded));
        let gates = gates.map(|path| gates_of(&path, &bundle)).transpose()?;
        let problem = match &gates {
            Some(report) => verdict::missing_proof(report),
            None => Some("no report of gates is recorded or given".to_owned()),
        };
        if let Some(problem) = problem.filter(|_| !facts.unproven) {
            return Err(ShareError::Unproven { name: bundle.name.clone(), problem }.into());
        }
        let bench = facts.bench.as_ref().map(|path| bench_of(path, &bundle)).transpose()?;
        let predictions = predictions(&bundle, &facts.chips)?;
        let base =
            anec_source::hub::Location::parse(&bundle.source.name).ok().flatten().map(|location| location.repository);
        let asked = || hub?.license(base.as_deref()?).ok().flatten();
        let forecast: Vec<_> =
            bundle.packages.iter().map(|entry| forecast_of(folder, entry, &[])).collect::<Result<_>>()?;
        let card_facts = CardFacts {
            repository: repository.to_owned(),
            license: facts.license.clone().or_else(asked),
            base,
            gates,
            bench,
            predictions,
            forecast: forecast.into_iter().flatten().collect(),
        };
        let card = card(&bundle, converted.as_ref(), &card_facts);
        let inline = |path: &str, bytes: Vec<u8>| Upload { path: path.into(), content: UploadContent::Bytes(bytes) };
        uploads.extend(converted.map(|report| inline(report::FILE_NAME, text_of(&report))));
        uploads.push(inline(CARD, card.clone().into_bytes()));
        // the description last, as in the order of a bundle's own files
        uploads.push(inline(FILE_NAME, text_of(&bundle.portable())));
        Ok(Push { repository: repository.to_owned(), files: uploads, card })
    }

    /// Uploads the bundle in one commit to a branch; creates the repository if it doesn't exist.
    ///
    /// # Errors
    /// If no token with write access is set, a file's digest doesn't match, or the hub can't be reached.
    pub fn send(
        &self,
        hub: &Hub,
        branch: &str,
        private: bool,
        message: &str,
        progress: &Progress,
    ) -> Result<HubCommit> {
        hub.create(&self.repository, private)?;
        Ok(hub.upload(&self.repository, branch, &self.files, message, progress)?)
    }
}

/// SHA-256 of a file, from the bundle's digest if it has one.
fn sha256(path: &Path, digest: &ContentDigest) -> Result<String> {
    if let ContentDigest::Sha256(hex) = digest {
        return Ok(hex.clone());
    }
    let found = digest.rehash_file(path).map_err(FileError::of(path, "read"))?;
    same(path, &digest.to_string(), &found.to_string())?;
    Ok(ContentDigest::sha256_of_file(path).map_err(FileError::of(path, "read"))?.hex().to_owned())
}

/// Formats a value as JSON, like a conversion does.
fn text_of<T: serde::Serialize>(value: &T) -> Vec<u8> {
    // these types always serialize
    let mut text = serde_json::to_vec_pretty(value).unwrap_or_default();
    text.push(b'\n');
    text
}

/// Reads the output of `anec validate --json` for this bundle.
fn gates_of(path: &Path, bundle: &Bundle) -> Result<Json> {
    let bytes = input::read(path, MAX_JSON_BYTES)?;
    let wrong = |problem: String| ShareError::Gates { path: path.to_owned(), problem };
    let json: Json = anec_base::json::read(&bytes).map_err(|error| wrong(format!("it isn't JSON: {error}")))?;
    match (json["gates"].is_array(), json["bundle"].as_str()) {
        (true, Some(name)) if name != bundle.name => {
            Err(wrong(format!("the report is of {name}, expected {}", bundle.name)).into())
        }
        (true, Some(_)) if json["digest"].as_str() != Some(&bundle.digest().to_string()) => {
            Err(wrong("the report is of a bundle of that name with other files".into()).into())
        }
        (true, Some(_)) => Ok(json),
        _ => Err(wrong("not a gates report".into()).into()),
    }
}

/// Reads the output of `anec bench --json` for this bundle.
fn bench_of(path: &Path, bundle: &Bundle) -> Result<Json> {
    let bytes = input::read(path, MAX_JSON_BYTES)?;
    let wrong = |problem: String| ShareError::Bench { path: path.to_owned(), problem };
    let json: Json = anec_base::json::read(&bytes).map_err(|error| wrong(format!("it isn't JSON: {error}")))?;
    match (json["tests"].is_array(), json["digest"].as_str()) {
        (true, Some(digest)) if digest == bundle.digest().to_string() => Ok(json),
        (true, Some(_)) => Err(wrong("the result is of a bundle with other files".into()).into()),
        _ => Err(wrong("not a benchmark result".into()).into()),
    }
}

/// Predictions for a bundle on chips. Its graphs are rebuilt from the shapes of its source.
fn predictions(bundle: &Bundle, chips: &[String]) -> Result<Vec<ChipPrediction>> {
    if chips.is_empty() {
        return Ok(Vec::new());
    }
    let targets = chips.iter().map(|name| ChipTable::built_in().target(name)).collect::<Result<Vec<_>, _>>()?;
    let opened = open_shapes(&bundle.manifest, &Progress::hidden())?;
    let manifest = bundle.manifest.with_lengths_of_functions();
    let plan = ConvertPlan::new(&manifest, &*opened.model)?;
    let planned = plan.packages.iter().map(|package| (format!("{}.mlpackage", package.name), package.weight_bytes));
    let own = bundle.packages.iter().map(|package| (package.package.clone(), package.weight_bytes));
    // an asset of Core AI holds all planned packages
    if bundle.manifest.format.is_coreml() && !planned.eq(own) {
        return Err(ShareError::OtherPlan { origin: bundle.source.name.clone() }.into());
    }
    predict(&manifest, &*opened.model, &plan, &targets)
}

impl BundleCache {
    /// Bundle that the hub stores as such: downloaded once per commit.
    pub(crate) fn pulled(
        &self,
        origin: &str,
        hub: &Hub,
        repository: &RemoteRepository,
        progress: &Progress,
    ) -> Result<PathBuf> {
        let own = anec_convert::open::name_of(origin);
        let (name, folder) = self.place(&own, &[origin, &repository.commit]);
        if self.has(&folder) {
            self.touch(&name);
            return Ok(folder);
        }
        let _lock = self.lock(&name, progress)?;
        if self.has(&folder) {
            self.touch(&name);
            return Ok(folder);
        }
        progress.note(&format!("{origin} is a bundle: downloading it into {}", folder.display()));
        let record = CacheRecord {
            origin: origin.to_owned(),
            revision: repository.commit.clone(),
            manifest: None,
            anec_version: env!("CARGO_PKG_VERSION").into(),
            made: clock::now(),
        };
        self.write(&name, &record)?;
        let pulled = pull(hub, repository, &folder, progress);
        self.settle(&name, &folder, &record)?;
        pulled.map(|_| folder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_oversized_description_is_not_downloaded() {
        let room = tempfile::tempdir().unwrap();
        let hash = FileHash::git_blob(b"");
        let file = RemoteFile { path: FILE_NAME.into(), size: 1 << 40, hash };
        let repository = RemoteRepository { name: "o/m".into(), commit: "0".repeat(40), files: vec![file] };
        let hub = Hub::new("http://127.0.0.1:9", None);
        let error = pull(&hub, &repository, &room.path().join("out"), &Progress::hidden()).unwrap_err();
        assert!(error.to_string().contains("its bundle.json has 1099511627776 bytes"), "{error}");
        assert!(std::fs::read_dir(room.path()).unwrap().next().is_none());
    }
}
