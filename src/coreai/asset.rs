//! The folder of an asset: `main.mlirb`, `main.hash`, `metadata.json`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anec_base::{ContentDigest, FileError, MappedFile, Result, clock, hexadecimal, input, json};
use anec_mil::Content;
use anec_package::blob::WriteProgress;
use anec_package::stream::{FilePart, NotWritten, write_parts};
use anec_package::{PartialFolder, WrittenFile, check_space};
use serde_json::{Map, Value as Json};
use sha2::{Digest, Sha256};

use crate::aicode::{self, AiModule, Blob};
use crate::bytecode::Container;
use crate::error::CoreAiError;

/// The program and its weights.
const BYTECODE: &str = "main.mlirb";
/// SHA-256 of [`BYTECODE`], 32 bytes.
const DIGEST: &str = "main.hash";
/// Metadata of the asset.
const METADATA: &str = "metadata.json";
/// Version of an asset's layout.
const ASSET_VERSION: &str = "2.0";
/// Metadata of more bytes is refused.
const MOST_METADATA: u64 = 4 << 20;
/// The date of an asset without one: 1980-01-01, as in archives.
const EPOCH_1980: u64 = 315_532_800;
/// Room that an asset takes beside its resources and operations.
const SLACK: u64 = 1 << 16;

/// Metadata of an asset.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct AssetMetadata {
    /// One paragraph.
    pub description: String,
    /// Author.
    pub author: String,
    /// License.
    pub license: String,
    /// Program that wrote the asset.
    pub producer: String,
    /// When it was written, as `YYYYMMDDTHHMMSSZ`.
    pub creation_date: String,
    /// Anything else, by key.
    pub custom: BTreeMap<String, String>,
}

/// How an asset is written.
#[derive(Default)]
#[non_exhaustive]
pub struct AssetOptions<'a> {
    /// Metadata. An empty date stands for `SOURCE_DATE_EPOCH`, or a fixed date.
    pub metadata: AssetMetadata,
    /// Replaces what is there; otherwise that is an error.
    pub replace: bool,
    /// Told how many bytes of resources are written, by any thread.
    pub progress: Option<&'a (dyn Fn(WriteProgress) + Sync)>,
}

/// An asset that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenAsset {
    /// Folder of the asset.
    pub path: PathBuf,
    /// Files, in the order of their paths.
    pub files: Vec<WrittenFile>,
    /// Bytes of all resources, each counted once.
    pub weight_bytes: u64,
}

/// An asset that was read. Its resources stay in the file, which must not be changed while the asset is in use.
pub struct Asset {
    /// Folder of the asset, or the bytecode file.
    pub path: PathBuf,
    /// Metadata, if the asset has some.
    pub metadata: Option<AssetMetadata>,
    /// The program.
    pub module: AiModule,
    /// Size of the bytecode file.
    pub bytes: u64,
    /// Version of the container.
    pub container_version: u64,
    digest: Option<Vec<u8>>,
    file: Arc<MappedFile>,
}

/// Reads an `.aimodel` folder, or a bytecode file alone.
///
/// # Errors
/// [`CoreAiError`] for a file that can't be read, bytecode that breaks the format, or metadata that isn't JSON.
pub fn open(path: &Path) -> Result<Asset> {
    let is_folder = std::fs::metadata(path).map_err(FileError::of(path, "open"))?.is_dir();
    if !is_folder {
        return open_bytes(MappedFile::open(path)?);
    }
    let mut asset = open_bytes(MappedFile::open(&path.join(BYTECODE))?)?;
    asset.path = path.to_owned();
    let metadata = path.join(METADATA);
    if metadata.exists() {
        asset.metadata = Some(read_metadata(&metadata)?);
    }
    let digest = path.join(DIGEST);
    if digest.exists() {
        asset.digest = Some(input::read(&digest, 1 << 10)?);
    }
    Ok(asset)
}

/// Reads bytecode that is mapped or in memory.
///
/// # Errors
/// [`CoreAiError::Bytecode`] for bytes that break the format.
pub fn open_bytes(file: MappedFile) -> Result<Asset> {
    let broken = |cause| CoreAiError::Bytecode { path: file.path().to_owned(), cause };
    let container = Container::read(file.bytes()).map_err(broken)?;
    let container_version = container.version;
    let mut module = aicode::read(&container).map_err(broken)?;
    drop(container);
    let (path, bytes, file) = (file.path().to_owned(), file.bytes().len() as u64, Arc::new(file));
    for resource in &mut module.resources {
        if let Blob::File { offset, length } = resource.blob {
            let content = FileRange { file: file.clone(), start: offset as usize, length: length as usize };
            resource.blob = Blob::Content(Arc::new(content));
        }
    }
    Ok(Asset { path, metadata: None, module, bytes, container_version, digest: None, file })
}

impl Asset {
    /// Whether `main.hash` is the SHA-256 of the bytecode; `None` without that file.
    pub fn digest_matches(&self) -> Option<bool> {
        let digest = self.digest.as_ref()?;
        Some(digest[..] == Sha256::digest(self.file.bytes())[..])
    }
}

/// Bytes of a mapped file.
struct FileRange {
    file: Arc<MappedFile>,
    start: usize,
    length: usize,
}

impl Content for FileRange {
    fn length(&self) -> u64 {
        self.length as u64
    }

    fn granule(&self) -> u64 {
        1
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let bytes = &self.file.bytes()[self.start..self.start + self.length];
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        match start.checked_add(out.len()).and_then(|end| bytes.get(start..end)) {
            Some(found) => {
                out.copy_from_slice(found);
                self.file.release(self.start + start..self.start + start + out.len());
                Ok(())
            }
            None => {
                let problem = format!("{} bytes at {offset} of a resource of {}", out.len(), self.length);
                Err(CoreAiError::asset(self.file.path(), problem).into())
            }
        }
    }
}

fn read_metadata(path: &Path) -> Result<AssetMetadata> {
    let text = input::read_text(path, MOST_METADATA)?;
    let not_json = |e: serde_json::Error| CoreAiError::asset(path, format!("no JSON object: {}", json::problem(&e)));
    let mut fields: Map<String, Json> = serde_json::from_str(&text).map_err(not_json)?;
    let mut take = |key: &str| match fields.remove(key) {
        Some(Json::String(text)) => text,
        Some(other) => other.to_string(),
        None => String::new(),
    };
    take("assetVersion");
    let mut metadata = AssetMetadata {
        description: take("description"),
        author: take("author"),
        license: take("license"),
        producer: take("producer"),
        creation_date: take("creationDate"),
        custom: BTreeMap::new(),
    };
    for (key, value) in fields {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        metadata.custom.insert(key, text);
    }
    Ok(metadata)
}

impl AssetMetadata {
    fn to_json(&self) -> Vec<u8> {
        let or = |text: &str, default: &dyn Fn() -> String| if text.is_empty() { default() } else { text.to_owned() };
        let mut fields = Map::new();
        let mut put = |key: &str, text: String| {
            if !text.is_empty() {
                fields.insert(key.to_owned(), text.into());
            }
        };
        put("assetVersion", ASSET_VERSION.into());
        put("creationDate", or(&self.creation_date, &creation_date));
        put("producer", or(&self.producer, &|| format!("anec {}", env!("CARGO_PKG_VERSION"))));
        put("author", self.author.clone());
        put("license", self.license.clone());
        put("description", self.description.clone());
        self.custom.iter().for_each(|(key, text)| put(key, text.clone()));
        let mut text = serde_json::to_vec_pretty(&Json::Object(fields)).unwrap_or_default();
        text.push(b'\n');
        text
    }
}

/// The date of `SOURCE_DATE_EPOCH`, or one that is always the same.
fn creation_date() -> String {
    let epoch = std::env::var("SOURCE_DATE_EPOCH").ok().and_then(|text| text.trim().parse::<u64>().ok());
    clock::strftime("%Y%m%dT%H%M%SZ", epoch.unwrap_or(EPOCH_1980))
}

/// Writes a module as an asset.
///
/// Equal modules give equal bytes. The asset appears under its name when it is complete. Memory is bounded by the
/// operations and a few pieces of resources.
///
/// # Errors
/// [`CoreAiError`] for another extension than `.aimodel`, a system that refuses, or a constant that can't be produced;
/// nothing is left behind then.
pub fn write(module: &AiModule, path: &Path, options: &AssetOptions<'_>) -> Result<WrittenAsset> {
    if path.extension().is_none_or(|extension| extension != "aimodel") {
        return Err(CoreAiError::asset(path, "the name of an asset ends in `.aimodel`").into());
    }
    let folder = PartialFolder::create(path, options.replace)?;
    let weight_bytes = module.resources.iter().fold(0, |sum: u64, r| sum.saturating_add(r.blob.length()));
    let encoded = module.encode();
    let operations: usize = encoded.before.iter().map(Vec::len).sum::<usize>() + encoded.after.len();
    check_space(folder.path(), weight_bytes.saturating_add(operations as u64).saturating_add(SLACK))?;
    let mut parts = Vec::new();
    for (index, before) in encoded.before.iter().enumerate() {
        parts.push(FilePart::Bytes(before[..].into()));
        match module.resources.get(index).map(|resource| &resource.blob) {
            Some(Blob::Bytes(bytes)) => parts.push(FilePart::Bytes(bytes[..].into())),
            Some(Blob::Content(content)) => parts.push(FilePart::Content(&**content)),
            Some(Blob::File { .. } | Blob::Other) => {
                let key = &module.resources[index].key;
                return Err(CoreAiError::asset(path, format!("resource `{key}` has no bytes to write")).into());
            }
            None => {}
        }
    }
    parts.push(FilePart::Bytes(encoded.after[..].into()));

    let bytecode = folder.path().join(BYTECODE);
    let file = File::options().read(true).write(true).create_new(true).open(&bytecode);
    let file = file.map_err(FileError::of(&bytecode, "create"))?;
    let progress = |part: usize, bytes: u64| {
        if let Some(progress) = options.progress.filter(|_| part % 2 == 1) {
            progress(WriteProgress::Written(bytes));
        }
    };
    let summary = match write_parts::<Sha256>(&file, &parts, &progress) {
        Ok(summary) => summary,
        Err(NotWritten::File { action, source }) => return Err(FileError::of(&bytecode, action)(source).into()),
        Err(NotWritten::Part { index, cause }) => {
            let owner = module.resources.get(index / 2).map(|resource| resource.key.clone()).unwrap_or_default();
            return Err(CoreAiError::Constant { owner, cause }.into());
        }
    };
    drop(file);
    let metadata = options.metadata.to_json();
    let digest = ContentDigest::Sha256(hexadecimal(&summary.digest));
    let mut files = vec![written(BYTECODE, summary.bytes, digest)];
    for (name, bytes) in [(DIGEST, &summary.digest[..]), (METADATA, &metadata[..])] {
        let path = folder.path().join(name);
        let mut file = File::create_new(&path).map_err(FileError::of(&path, "create"))?;
        file.write_all(bytes).map_err(FileError::of(&path, "write"))?;
        files.push(written(name, bytes.len() as u64, ContentDigest::of(bytes)));
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    folder.publish(false)?;
    Ok(WrittenAsset { path: path.to_owned(), files, weight_bytes })
}

fn written(path: &str, bytes: u64, digest: ContentDigest) -> WrittenFile {
    WrittenFile { path: path.to_owned(), bytes, digest }
}
