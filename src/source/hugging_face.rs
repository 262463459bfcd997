//! The files beside the weights in a Hugging Face folder.

use std::path::{Path, PathBuf};

use anec_base::FileError;

use serde_json::Value as Json;

use super::error::{Result, SourceError};
use super::file::read_json;
use super::sentence_transformers::{self, SentenceTransformers};

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

/// Returns the names of all optional files beside the weights, including those of sentence-transformers.
pub fn files_beside() -> impl Iterator<Item = &'static str> {
    FILES.into_iter().chain(sentence_transformers::FILES)
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
    /// The chat template, from `chat_template.jinja`, else `tokenizer_config.json`, else `chat_template.json`.
    pub chat_template: Option<String>,
    /// Pooling and projections of sentence-transformers.
    pub sentence_transformers: Option<SentenceTransformers>,
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
        Ok(HuggingFaceFiles {
            config: json("config.json")?,
            generation_config: json("generation_config.json")?,
            special_tokens_map: json("special_tokens_map.json")?,
            tokenizer: tokenizer.exists().then_some(tokenizer),
            chat_template: chat_template(folder, tokenizer_config.as_ref(), json("chat_template.json")?.as_ref())?,
            tokenizer_config,
            sentence_transformers: SentenceTransformers::read(folder)?,
        })
    }
}

fn chat_template(folder: &Path, tokenizer_config: Option<&Json>, legacy: Option<&Json>) -> Result<Option<String>> {
    let path = folder.join("chat_template.jinja");
    if path.exists() {
        return Ok(Some(std::fs::read_to_string(&path).map_err(FileError::of(&path, "read"))?));
    }
    for (file, config) in [("tokenizer_config.json", tokenizer_config), ("chat_template.json", legacy)] {
        let template = match config.and_then(|config| config.get("chat_template")) {
            None | Some(Json::Null) => continue,
            Some(Json::String(template)) => template,
            // Several templates by name; the others are for tools and retrieval.
            Some(Json::Array(templates)) => {
                let default = templates.iter().find(|template| template["name"] == "default");
                match default.and_then(|template| template["template"].as_str()) {
                    Some(template) => template,
                    None => continue,
                }
            }
            Some(_) => {
                let problem = "it is neither a template nor a list of named templates";
                return Err(SourceError::key(&folder.join(file), "chat_template", problem));
            }
        };
        return Ok(Some(template.to_owned()));
    }
    Ok(None)
}
