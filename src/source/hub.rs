//! Sources on the Hugging Face hub, `hf:owner/name[@revision][/file]`.
//!
//! Only the needed files are downloaded, into the cache that all Hugging Face tools share: configuration, tokenizer and
//! weights of a model, or the files of the named GGUF or ONNX model. Cached files aren't downloaded again. With
//! `HF_HUB_OFFLINE` set, or if the hub can't be reached, a complete cached model is used as it is.

#[cfg(feature = "hub")]
mod client;

use std::path::{Path, PathBuf};

use anec_base::listing::list;
use anec_base::{Progress, path_inside};

use super::error::{Result, SourceError};
use super::{gguf, hugging_face, onnx, pytorch, safetensors};

/// Prefix of sources on the hub.
pub const PREFIX: &str = "hf:";

/// Location on the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// `owner/name`.
    pub repository: String,
    /// Branch, tag or commit; `main` if none is given.
    pub revision: String,
    /// A file of the repository.
    pub file: Option<String>,
}

impl Location {
    /// Parses a source's name; `None` if it isn't one of the hub.
    ///
    /// # Errors
    /// Returns an error if the name begins with `hf:` but isn't `hf:owner/name[@revision][/file]`.
    pub fn parse(name: &str) -> Result<Option<Self>> {
        let Some(rest) = name.strip_prefix(PREFIX) else { return Ok(None) };
        let wrong = |problem: String| SourceError::Name { name: name.to_owned(), problem };
        let mut parts = rest.splitn(3, '/');
        let (owner, model, file) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default(), parts.next());
        let (model, revision) = model.split_once('@').unwrap_or((model, "main"));
        for (what, part) in [("owner", owner), ("model", model), ("revision", revision)] {
            let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
            if part.is_empty() || part.starts_with('.') || !part.chars().all(plain) {
                return Err(wrong(format!("the {what} is {part:?}, expected letters, digits, `.`, `_` and `-`")));
            }
        }
        if let Some(file) = file.filter(|file| path_inside(file).is_none()) {
            return Err(wrong(format!("{file:?} isn't the path of a file in a repository")));
        }
        let repository = format!("{owner}/{model}");
        Ok(Some(Location { repository, revision: revision.to_owned(), file: file.map(str::to_owned) }))
    }
}

/// Downloads the files of `location` that aren't cached and returns the path to open. `name` is the source as given;
/// `progress` receives byte counts.
///
/// # Errors
/// Returns an error if this build can't download, the hub can't be reached or refuses, or there is no model at the
/// location.
#[cfg(feature = "hub")]
pub fn download(name: &str, location: &Location, progress: &Progress) -> Result<PathBuf> {
    client::Client::from_env(name).download(location, progress)
}

/// Returns the commit of `location`, from the hub, or from the cache if the hub doesn't answer.
///
/// # Errors
/// Returns an error if this build can't download, or the hub refuses.
#[cfg(feature = "hub")]
pub fn commit(name: &str, location: &Location) -> Result<String> {
    client::Client::from_env(name).commit(location)
}

/// Returns the path to open if the cache holds the whole model at `location`. Makes no requests.
#[cfg(feature = "hub")]
pub fn cached(location: &Location) -> Option<PathBuf> {
    client::Client::from_env("").cached(location).ok()
}

/// Returns `None`: this build has no cache.
#[cfg(not(feature = "hub"))]
pub fn cached(_: &Location) -> Option<PathBuf> {
    None
}

/// Returns an error: this build can't download.
///
/// # Errors
/// Always returns an error.
#[cfg(not(feature = "hub"))]
pub fn download(name: &str, _: &Location, _: &Progress) -> Result<PathBuf> {
    let problem = "this anec was built without its Cargo feature `hub`, which downloads models".into();
    Err(SourceError::Hub { name: name.to_owned(), problem, absent: false })
}

/// Files of a repository to download.
#[derive(Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "hub"), allow(dead_code, reason = "only downloads ask"))]
struct Needed {
    /// Files that are needed.
    files: Vec<String>,
    /// Index that names further files.
    index: Option<String>,
    /// File to open afterwards; `None` for the folder.
    open: Option<String>,
}

/// Chooses from the files of a repository, or explains why there is no model.
#[cfg_attr(not(feature = "hub"), allow(dead_code, reason = "only downloads ask"))]
fn needed(available: &[String], file: Option<&str>) -> Result<Needed, String> {
    let has = |name: &str| available.iter().any(|file| file == name);
    let beside = || {
        let known = hugging_face::files_beside().filter(|name| has(name)).map(str::to_owned);
        let is_more = |name: &&String| hugging_face::is_more_of_tokenizer(name, has("tokenizer.json"));
        known.chain(available.iter().filter(is_more).cloned())
    };
    let gguf_parts = |file: &str| -> Vec<String> {
        match gguf::split::name_parts(Path::new(file)) {
            None => vec![file.to_owned()],
            Some((prefix, _, count)) => {
                let is_part = |name: &&String| {
                    let parts = gguf::split::name_parts(Path::new(name.as_str()));
                    let same_folder = Path::new(name.as_str()).parent() == Path::new(file).parent();
                    same_folder && parts.is_some_and(|(other, _, of)| other == prefix && of == count)
                };
                available.iter().filter(is_part).cloned().collect()
            }
        }
    };
    let single = |name: &str| Needed { files: beside().chain([name.to_owned()]).collect(), index: None, open: None };
    let sharded = |index: &str| Needed { files: beside().collect(), index: Some(index.to_owned()), open: None };
    match file {
        Some(file) if !has(file) => Err(format!("the repository has no file {file}")),
        Some(file) if file.ends_with(".gguf") => {
            Ok(Needed { files: gguf_parts(file), index: None, open: Some(file.to_owned()) })
        }
        Some(file) if file.ends_with(".onnx") => {
            Ok(Needed { files: onnx_files(available, file), index: None, open: Some(file.to_owned()) })
        }
        Some(file) => {
            let files = beside().filter(|name| name != file).chain([file.to_owned()]).collect();
            Ok(Needed { files, index: None, open: Some(file.to_owned()) })
        }
        None if has(safetensors::SINGLE) => Ok(single(safetensors::SINGLE)),
        None if has(safetensors::INDEX) => Ok(sharded(safetensors::INDEX)),
        None if has(pytorch::SINGLE) => Ok(single(pytorch::SINGLE)),
        None if has(pytorch::INDEX) => Ok(sharded(pytorch::INDEX)),
        None => {
            let first_part =
                |name: &str| gguf::split::name_parts(Path::new(name)).is_none_or(|(_, number, _)| number == 1);
            let models: Vec<&String> =
                available.iter().filter(|name| name.ends_with(".gguf") && first_part(name)).collect();
            let bundles: Vec<&str> = available
                .iter()
                .filter(|name| name.ends_with(".onnx") && has(&in_folder_of(name, onnx::CONFIG)))
                .map(String::as_str)
                .collect();
            match models[..] {
                [] => match bundles[..] {
                    [] => Err(
                        "the repository has neither safetensors, nor pytorch_model.bin, nor GGUF, nor an ONNX bundle"
                            .into(),
                    ),
                    [model] => {
                        Ok(Needed { files: onnx_files(available, model), index: None, open: Some(model.to_owned()) })
                    }
                    _ => Err(format!(
                        "the repository has {} ONNX models; name one of them: {}",
                        bundles.len(),
                        list(bundles)
                    )),
                },
                [model] => Ok(Needed { files: gguf_parts(model), index: None, open: Some(model.clone()) }),
                _ => {
                    Err(format!("the repository has {} GGUF models; name one of them: {}", models.len(), list(&models)))
                }
            }
        }
    }
}

/// Returns the path of a file of this name in the folder of another.
fn in_folder_of(file: &str, name: &str) -> String {
    match file.rsplit_once('/') {
        Some((folder, _)) => format!("{folder}/{name}"),
        None => name.to_owned(),
    }
}

/// Returns the files of an ONNX model: the model, its weight files, whose names by convention begin with the model's,
/// and the configuration in its folder.
fn onnx_files(available: &[String], model: &str) -> Vec<String> {
    let described: Vec<String> =
        hugging_face::FILES.iter().chain([&onnx::CONFIG]).map(|name| in_folder_of(model, name)).collect();
    available.iter().filter(|name| name.starts_with(model) || described.contains(name)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_base::{Diagnostic, Fault};

    fn strings(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn a_name_is_owner_model_revision_and_file() {
        let location = |name: &str| Location::parse(name).unwrap();
        assert_eq!(location("models/x.gguf"), None);
        let parsed = |repository: &str, revision: &str, file: Option<&str>| {
            let file = file.map(str::to_owned);
            Some(Location { repository: repository.into(), revision: revision.into(), file })
        };
        assert_eq!(location("hf:Qwen/Qwen2.5-0.5B"), parsed("Qwen/Qwen2.5-0.5B", "main", None));
        assert_eq!(location("hf:o/m@v1.0"), parsed("o/m", "v1.0", None));
        assert_eq!(location("hf:o/m@abc/d/q4.gguf"), parsed("o/m", "abc", Some("d/q4.gguf")));
    }

    #[test]
    fn a_name_that_leads_elsewhere_is_a_usage_error() {
        for name in
            ["hf:", "hf:model", "hf:o/", "hf:o/m@", "hf:o/m/", "hf:../m", "hf:o/m/../x", "hf:o/m//x", "hf:o/m?x"]
        {
            let error = Location::parse(name).unwrap_err();
            assert_eq!(error.fault(), Fault::Usage, "{name}");
            assert!(error.help().unwrap().contains("hf:owner/name"));
        }
    }

    #[test]
    fn only_what_a_model_needs_is_chosen() {
        let folder = strings(&["README.md", "config.json", "model.safetensors", "pytorch_model.bin", "tokenizer.json"]);
        assert_eq!(
            needed(&folder, None).unwrap(),
            Needed { files: strings(&["config.json", "tokenizer.json", "model.safetensors"]), index: None, open: None }
        );
        let sharded = strings(&["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]);
        assert_eq!(needed(&sharded, None).unwrap().index.as_deref(), Some("model.safetensors.index.json"));
        let ggufs =
            strings(&["a-q4.gguf", "b/x-00001-of-00002.gguf", "b/x-00002-of-00002.gguf", "c/x-00002-of-00002.gguf"]);
        assert!(needed(&ggufs, None).unwrap_err().contains("2 GGUF models"));
        assert_eq!(needed(&ggufs, Some("a-q4.gguf")).unwrap().files, strings(&["a-q4.gguf"]));
        assert_eq!(needed(&ggufs, Some("b/x-00001-of-00002.gguf")).unwrap().files, ggufs[1..3]);
        assert!(needed(&ggufs, Some("z.gguf")).unwrap_err().contains("no file z.gguf"));
        let old = strings(&["config.json", "pytorch_model.bin", "tf_model.h5", "vocab.txt"]);
        assert_eq!(needed(&old, None).unwrap().files, strings(&["config.json", "vocab.txt", "pytorch_model.bin"]));
        let sharded = strings(&["config.json", "pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"]);
        assert_eq!(needed(&sharded, None).unwrap().index.as_deref(), Some("pytorch_model.bin.index.json"));
        assert!(needed(&strings(&["tf_model.h5"]), None).unwrap_err().contains("neither"));
        let bundles = strings(&[
            "README.md",
            "config.json",
            "cpu/config.json",
            "cpu/genai_config.json",
            "cpu/model.onnx",
            "cpu/model.onnx.data",
            "cpu/tokenizer.json",
            "gpu/genai_config.json",
            "gpu/model.onnx",
        ]);
        assert!(needed(&bundles, None).unwrap_err().contains("2 ONNX models; name one of them: cpu/model.onnx, gpu"));
        assert_eq!(needed(&bundles[..7], None).unwrap().files, bundles[2..7]);
        let named = needed(&bundles, Some("cpu/model.onnx")).unwrap();
        assert_eq!((named.files, named.open.as_deref()), (bundles[2..7].to_vec(), Some("cpu/model.onnx")));
    }

    #[cfg(not(feature = "hub"))]
    #[test]
    fn a_build_without_downloads_says_so() {
        let location = Location::parse("hf:o/m").unwrap().unwrap();
        let error = download("hf:o/m", &location, &Progress::hidden()).unwrap_err();
        assert_eq!(error.fault(), Fault::Platform);
        assert!(error.to_string().contains("feature `hub`"));
    }
}
