//! The files beside the weights in a Hugging Face folder.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anec_base::{FileError, input};

use serde_json::Value as Json;

use super::error::{Result, SourceError};
use super::file::read_json;
use super::sentence_transformers::{self, LogitScore, SentenceTransformers};

/// Names of optional files beside the weights.
pub const FILES: [&str; 7] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// Name of the template for conversations in general, as transformers calls it.
pub const DEFAULT_TEMPLATE: &str = "default";

/// Name of the template for conversations with tools, as transformers calls it.
pub const TOOLS_TEMPLATE: &str = "tool_use";

/// Folder of named chat templates.
pub const MORE_TEMPLATES: &str = "additional_chat_templates";

/// Files of tokenizers, by preference, for folders without `tokenizer.json`.
pub const OTHER_TOKENIZERS: [&str; 9] = [
    "tekken.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "spm.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tokenizer.tiktoken",
];

/// Files that belong to those of [`OTHER_TOKENIZERS`].
pub const OTHER_TOKENIZER_PARTS: [&str; 2] = ["merges.txt", "added_tokens.json"];

/// Returns the names of all optional files beside the weights, including those of sentence-transformers.
pub fn files_beside() -> impl Iterator<Item = &'static str> {
    FILES.into_iter().chain(sentence_transformers::files())
}

/// Whether a file of a repository belongs to its tokenizer or is one of its chat templates, beside [`FILES`].
pub(super) fn is_more_of_tokenizer(name: &str, has_tokenizer_json: bool) -> bool {
    let template =
        name.strip_prefix(MORE_TEMPLATES).is_some_and(|rest| rest.starts_with('/') && rest.ends_with(".jinja"));
    let other = OTHER_TOKENIZERS.contains(&name) || OTHER_TOKENIZER_PARTS.contains(&name);
    template || (other && !has_tokenizer_json)
}

/// The files beside the weights; each may be absent.
#[derive(Clone, Debug, Default)]
pub struct HuggingFaceFiles {
    /// `config.json`: the model's configuration.
    pub config: Option<Json>,
    /// `generation_config.json`: end tokens and sampling.
    pub generation_config: Option<Json>,
    /// `tokenizer_config.json`: special tokens, chat template.
    pub tokenizer_config: Option<Json>,
    /// `special_tokens_map.json`.
    pub special_tokens_map: Option<Json>,
    /// Path of `tokenizer.json`: the tokenizers library reads it itself.
    pub tokenizer: Option<PathBuf>,
    /// Other files of a tokenizer, where there is no `tokenizer.json`.
    pub other_tokenizer: Option<PathBuf>,
    /// Chat templates by name.
    pub chat_templates: BTreeMap<String, String>,
    /// Pooling and projections of sentence-transformers.
    pub sentence_transformers: Option<SentenceTransformers>,
    /// Tokens that score pairs of texts.
    pub logit_score: Option<LogitScore>,
}

impl HuggingFaceFiles {
    /// Reads the files of `folder` that are there.
    ///
    /// # Errors
    /// Returns an error if one can't be read or isn't a JSON object.
    pub fn read(folder: &Path) -> Result<Self> {
        let json = |name: &str| {
            let path = folder.join(name);
            if !path.exists() {
                return Ok(None);
            }
            match read_json(&path)? {
                object @ Json::Object(_) => Ok(Some(object)),
                _ => Err(SourceError::file(&path, "it isn't a JSON object")),
            }
        };
        let tokenizer = folder.join("tokenizer.json");
        let tokenizer_config = json("tokenizer_config.json")?;
        let (sentence_transformers, logit_score) = SentenceTransformers::read(folder)?;
        Ok(HuggingFaceFiles {
            config: json("config.json")?,
            generation_config: json("generation_config.json")?,
            special_tokens_map: json("special_tokens_map.json")?,
            tokenizer: tokenizer.exists().then_some(tokenizer),
            other_tokenizer: OTHER_TOKENIZERS.iter().map(|name| folder.join(name)).find(|path| path.exists()),
            chat_templates: chat_templates(folder, tokenizer_config.as_ref(), json("chat_template.json")?.as_ref())?,
            tokenizer_config,
            sentence_transformers,
            logit_score,
        })
    }
}

/// Chat templates by name, from `chat_template.jinja` and `additional_chat_templates`, else from
/// `tokenizer_config.json`, else from `chat_template.json`.
fn chat_templates(
    folder: &Path,
    tokenizer_config: Option<&Json>,
    legacy: Option<&Json>,
) -> Result<BTreeMap<String, String>> {
    let read = |path: &Path| -> Result<String> {
        let bytes = input::read_file(path, input::MOST_JSON)?;
        String::from_utf8(bytes).map_err(|_| SourceError::file(path, "it isn't UTF-8"))
    };
    let mut templates = BTreeMap::new();
    let path = folder.join("chat_template.jinja");
    if path.exists() {
        templates.insert(DEFAULT_TEMPLATE.to_owned(), read(&path)?);
    }
    let more = folder.join(MORE_TEMPLATES);
    if more.is_dir() {
        for entry in std::fs::read_dir(&more).map_err(FileError::of(&more, "read"))? {
            let path = entry.map_err(FileError::of(&more, "read"))?.path();
            let name = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".jinja"));
            if let Some(name) = name {
                templates.insert(name.to_owned(), read(&path)?);
            }
        }
    }
    if !templates.is_empty() {
        return Ok(templates);
    }
    for (file, config) in [("tokenizer_config.json", tokenizer_config), ("chat_template.json", legacy)] {
        let named: Option<Vec<(&str, &str)>> = match config.and_then(|config| config.get("chat_template")) {
            None | Some(Json::Null) => continue,
            Some(Json::String(template)) => Some(vec![(DEFAULT_TEMPLATE, template)]),
            Some(Json::Array(list)) => list
                .iter()
                .map(|entry| Some((entry.get("name")?.as_str()?, entry.get("template")?.as_str()?)))
                .collect(),
            Some(Json::Object(map)) => map.iter().map(|(name, text)| Some((name.as_str(), text.as_str()?))).collect(),
            Some(_) => None,
        };
        let Some(named) = named else {
            let problem = "it is neither a template nor a list of named templates";
            let wrong = SourceError::key(&folder.join(file), "chat_template", problem);
            return Err(wrong.advise("write the template to chat_template.jinja beside the file, and remove the key"));
        };
        return Ok(named.into_iter().map(|(name, text)| (name.to_owned(), text.to_owned())).collect());
    }
    Ok(templates)
}
