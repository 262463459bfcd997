//! Tokenizer files of a bundle: copied from a Hugging Face folder, or rebuilt from GGUF metadata.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use anec_base::input;
use anec_base::listing::{list, quote};

use serde_json::{Value as Json, json};

use super::error::ConvertError;
use super::files;
use anec_base::Result;
use anec_bundle::FileDigest;
use anec_source::gguf::GgufMetadata;
use anec_source::tokenizer::folder::FolderTokenizer;
use anec_source::tokenizer::{GgufTokenizer, end_tokens};
use anec_source::{Description, HuggingFaceFiles, Source, read_json};

/// Facts about text for the runtime.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TextFacts {
    /// File names by kind.
    pub files: BTreeMap<String, String>,
    /// Digests of the files.
    pub digests: Vec<FileDigest>,
    /// End-of-text tokens.
    pub eos_token_ids: Vec<u64>,
    /// Beginning-of-text token, if the tokenizer adds one.
    pub bos_token_id: Option<u64>,
    /// Reason why the runtime can't read the tokenizer, if checked.
    pub unreadable: Option<String>,
    /// Differences from the source that the user should know.
    pub notes: Vec<String>,
}

/// Check whether the runtime can use a tokenizer file with this content; the path is for error messages. The vocabulary
/// may be missing, because the check doesn't depend on it.
pub type TokenizerCheck = fn(&Path, &[u8]) -> Result<()>;

/// Contents of tokenizer files before they are written.
#[derive(Default)]
pub struct TokenizerFiles {
    /// `(kind, file name, content)`
    files: Vec<(&'static str, &'static str, Vec<u8>)>,
    /// Content of the tokenizer file without the vocabulary, if known separately.
    steps: Option<Vec<u8>>,
    eos_token_ids: Vec<u64>,
    bos_token_id: Option<u64>,
    unreadable: Option<String>,
    notes: Vec<String>,
}

impl TokenizerFiles {
    /// Reads the tokenizer of a source, and passes it to `check`. A source without a tokenizer gives no files.
    ///
    /// # Errors
    /// If it can't be read, or names tokens beyond the model's vocabulary.
    pub fn read(source: &Source, vocab_size: u64, check: Option<TokenizerCheck>) -> Result<Self> {
        let mut text = match source.description() {
            Description::HuggingFace(files) => from_hugging_face(source, files, vocab_size)?,
            Description::Onnx(bundle) => from_hugging_face(source, &bundle.files, vocab_size)?,
            Description::Gguf(metadata) => from_gguf(source, metadata, vocab_size)?,
        };
        let tokenizer = text.files.iter().find(|(what, ..)| *what == "tokenizer");
        let problem = check.zip(tokenizer).and_then(|(check, (_, name, content))| {
            check(Path::new(name), text.steps.as_deref().unwrap_or(content)).err()
        });
        text.unreadable = problem.map(|error| error.to_string());
        Ok(text)
    }

    /// Writes the files into `folder`.
    ///
    /// # Errors
    /// If a file can't be written.
    pub fn write(self, folder: &Path) -> Result<TextFacts> {
        let TokenizerFiles { files, eos_token_ids, bos_token_id, unreadable, notes, .. } = self;
        let mut facts = TextFacts { eos_token_ids, bos_token_id, unreadable, notes, ..Default::default() };
        for (what, name, content) in files {
            facts.digests.push(files::write(&folder.join(name), &content)?);
            facts.files.insert(what.to_owned(), name.to_owned());
        }
        Ok(facts)
    }
}

/// The `tokenizer.json` of a folder, or one made from other files; a note if there is none that is read.
fn tokenizer_json(own: &HuggingFaceFiles, vocab_size: u64, notes: &mut Vec<String>) -> Result<Option<(Vec<u8>, Json)>> {
    let (place, content, json) = match &own.tokenizer {
        Some(path) => {
            let json = read_json(path)?;
            let content = input::read_file(path, input::MOST_JSON)?;
            (Some(path.clone()), content, json)
        }
        None => (None, Vec::new(), Json::Null),
    };
    // some are published without their vocabulary
    let (place, content, mut json) = match place.filter(|_| json.get("model").is_some_and(|model| !model.is_null())) {
        Some(place) => (place, content, json),
        None => match FolderTokenizer::read(own)? {
            Some(FolderTokenizer::Rebuilt { json, path }) => {
                let parsed = serde_json::from_slice(&json).unwrap_or_default();
                (path, json, parsed)
            }
            Some(FolderTokenizer::Unsupported { path, problem }) => {
                notes.push(no_tokenizer(&path, &problem));
                return Ok(None);
            }
            None => {
                notes.extend(own.tokenizer.as_ref().map(|path| no_tokenizer(path, "it has no model")));
                return Ok(None);
            }
        },
    };
    let place = place.display().to_string();
    let dropped = drop_beyond(&mut json, own.tokenizer_config.as_ref(), vocab_size);
    let added = add_configured(&place, &mut json, own.tokenizer_config.as_ref(), vocab_size, notes);
    if !dropped.is_empty() {
        let tokens = dropped.join("`, `");
        notes.push(format!("{place}: the model has no rows for the tokens `{tokens}`, which are left out"));
    }
    check_ids(&place, &json, vocab_size)?;
    let content = if added || !dropped.is_empty() { json.to_string().into_bytes() } else { content };
    Ok(Some((content, json)))
}

fn no_tokenizer(path: &Path, problem: &str) -> String {
    let place = path.display();
    format!(
        "{place}: {problem}, so the bundle has no tokenizer; save one with transformers (save_pretrained) beside it"
    )
}

/// Removes added tokens that the model has no rows for, such as those of images, unless texts begin or end with them.
/// Returns their spellings.
fn drop_beyond(tokenizer: &mut Json, config: Option<&Json>, vocab_size: u64) -> Vec<String> {
    let mut used: HashSet<String> =
        added_around(&tokenizer["post_processor"]).map(|tokens| tokens.keys().cloned().collect()).unwrap_or_default();
    let named = ["bos_token", "eos_token"].map(|name| config.and_then(|config| content(config.get(name)?)));
    used.extend(named.into_iter().flatten().map(str::to_owned));
    let Some(added) = tokenizer.get_mut("added_tokens").and_then(Json::as_array_mut) else { return Vec::new() };
    let is_used = |token: &Json| token["content"].as_str().is_some_and(|text| used.contains(text));
    let beyond = |token: &Json| token["id"].as_u64().is_some_and(|id| id >= vocab_size) && !is_used(token);
    let dropped = added.iter().filter(|token| beyond(token));
    let dropped = dropped.map(|token| token["content"].as_str().unwrap_or_default().to_owned()).collect();
    added.retain(|token| !beyond(token));
    dropped
}

/// Adds the tokens that only `tokenizer_config.json` lists. Returns whether there were any.
fn add_configured(
    place: &str,
    tokenizer: &mut Json,
    config: Option<&Json>,
    vocab_size: u64,
    notes: &mut Vec<String>,
) -> bool {
    let listed = config.and_then(|config| config.get("added_tokens_decoder")?.as_object());
    let mut listed: Vec<(u64, &Json)> =
        listed.into_iter().flatten().filter_map(|(id, token)| Some((id.parse().ok()?, token))).collect();
    listed.sort_unstable_by_key(|(id, _)| *id);
    let known: HashSet<String> = {
        let added = tokenizer["added_tokens"].as_array().into_iter().flatten();
        added.filter_map(|token| token["content"].as_str()).map(str::to_owned).collect()
    };
    let missing: Vec<(u64, &Json)> = listed
        .into_iter()
        .filter(|(id, token)| *id < vocab_size && content(token).is_some_and(|text| !known.contains(text)))
        .collect();
    if missing.is_empty() {
        return false;
    }
    let mut next = vocabulary(tokenizer).unwrap_or(0);
    let of_added = tokenizer["added_tokens"].as_array().into_iter().flatten().filter_map(|token| token["id"].as_u64());
    next = of_added.map(|id| id + 1).fold(next, u64::max);
    let mut any = false;
    for (id, token) in missing {
        let text = content(token).unwrap_or_default();
        let in_vocabulary = tokenizer.pointer("/model/vocab").and_then(|vocab| vocab.get(text)?.as_u64());
        if in_vocabulary.is_some_and(|own| own != id) || (in_vocabulary.is_none() && id != next) {
            notes.push(format!(
                "{place}: token `{text}` of tokenizer_config.json has id {id}, which isn't free; it is left out"
            ));
            continue;
        }
        next += u64::from(in_vocabulary.is_none());
        let flag = |key: &str| token[key].as_bool().unwrap_or(false);
        let entry = json!({
            "id": id, "content": text, "single_word": flag("single_word"), "lstrip": flag("lstrip"),
            "rstrip": flag("rstrip"), "normalized": flag("normalized"), "special": flag("special"),
        });
        match tokenizer.get_mut("added_tokens").and_then(Json::as_array_mut) {
            Some(added) => added.push(entry),
            None => tokenizer["added_tokens"] = json!([entry]),
        }
        any = true;
    }
    any
}

/// Number of ids that a tokenizer's vocabulary takes.
fn vocabulary(tokenizer: &Json) -> Option<u64> {
    match tokenizer.pointer("/model/vocab")? {
        Json::Object(map) => map.values().filter_map(Json::as_u64).max()?.checked_add(1),
        Json::Array(list) => Some(list.len() as u64),
        _ => None,
    }
}

fn from_hugging_face(source: &Source, own: &HuggingFaceFiles, vocab_size: u64) -> Result<TokenizerFiles> {
    let mut text = TokenizerFiles::default();
    let tokenizer = tokenizer_json(own, vocab_size, &mut text.notes)?.map(|(content, json)| {
        text.files.push(("tokenizer", "tokenizer.json", content));
        json
    });
    for (what, name, json) in [
        ("tokenizer_config", "tokenizer_config.json", &own.tokenizer_config),
        ("generation_config", "generation_config.json", &own.generation_config),
    ] {
        if let Some(json) = json {
            text.files.push((what, name, pretty(json)));
        }
    }
    templates(source, &mut text)?;
    if !own.chat_templates.is_empty() && text.files.iter().all(|(what, ..)| !what.starts_with("chat_template")) {
        text.notes.push(format!(
            "{}: its chat templates are named {}, and none of them `default`; write one to chat_template.jinja to chat",
            source.name(),
            list(own.chat_templates.keys())
        ));
    }
    text.bos_token_id = tokenizer.as_ref().and_then(|tokenizer| added_in_front(tokenizer.get("post_processor")?));
    let configs = [("generation_config.json", &own.generation_config), ("config.json", &own.config)];
    let ends = configs.into_iter().filter_map(|(name, config)| Some((name, config.as_ref()?.get("eos_token_id")?)));
    let ends = ends.map(|(name, value)| {
        let place = format!("{}, {name}", source.name());
        ids(value).filter(|ids| !ids.iter().any(|id| *id >= vocab_size)).ok_or_else(|| ConvertError::EndToken {
            place,
            found: quote(&value.to_string()).into_owned(),
            vocab_size,
        })
    });
    let ends = ends.collect::<Result<Vec<_>, _>>()?;
    text.eos_token_ids = ends.into_iter().find(|ids| !ids.is_empty()).unwrap_or_default();
    // chat models end a turn with the tokenizer's end token, which their configuration doesn't always list
    let turn_end = own.tokenizer_config.as_ref().and_then(|config| content(config.get("eos_token")?));
    if let (Some(tokenizer), Some(turn_end)) = (&tokenizer, turn_end) {
        text.eos_token_ids.extend(added_token(tokenizer, turn_end));
    }
    finish(text, source, vocab_size)
}

fn from_gguf(source: &Source, metadata: &GgufMetadata, vocab_size: u64) -> Result<TokenizerFiles> {
    let mut text = TokenizerFiles { eos_token_ids: end_tokens(metadata)?, ..Default::default() };
    if let Some(rebuilt) = GgufTokenizer::read(metadata)? {
        let file = rebuilt.file()?;
        check_largest(source.name(), file.largest_id(), vocab_size)?;
        text.bos_token_id = added_in_front(&file.post_processor);
        text.steps = Some(file.steps_to_json());
        text.files.push(("tokenizer", "tokenizer.json", file.to_json()));
    }
    templates(source, &mut text)?;
    // special tokens that chat templates refer to by name
    let mut config = serde_json::Map::new();
    if let Some(tokens) = metadata.strings("tokenizer.ggml.tokens")? {
        for (name, key) in [
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
        ] {
            if let Some(token) = metadata.u64(key)?.and_then(|id| tokens.get(usize::try_from(id).ok()?)) {
                config.insert(name.into(), json!(token));
            }
        }
    }
    if !config.is_empty() {
        text.files.push(("tokenizer_config", "tokenizer_config.json", pretty(&Json::Object(config))));
    }
    finish(text, source, vocab_size)
}

/// The chat templates: for conversations in general, and for those with tools.
fn templates(source: &Source, text: &mut TokenizerFiles) -> Result<()> {
    let templates = [
        ("chat_template", "chat_template.jinja", source.chat_template()?),
        ("chat_template_tools", "chat_template.tool_use.jinja", source.tools_chat_template()?),
    ];
    for (what, name, template) in templates {
        text.files.extend(template.map(|template| (what, name, template.as_bytes().to_vec())));
    }
    Ok(())
}

fn finish(mut text: TokenizerFiles, source: &Source, vocab_size: u64) -> Result<TokenizerFiles> {
    let mut seen = std::collections::BTreeSet::new();
    text.eos_token_ids.retain(|id| seen.insert(*id));
    match text.eos_token_ids.iter().find(|id| **id >= vocab_size) {
        Some(id) => {
            let place = format!("{}, eos_token_id", source.name());
            Err(ConvertError::Vocabulary { place, id: *id, vocab_size }.into())
        }
        None => Ok(text),
    }
}

fn pretty(json: &Json) -> Vec<u8> {
    let mut text = format!("{json:#}").into_bytes();
    text.push(b'\n');
    text
}

/// Parses a number or a list of numbers.
fn ids(value: &Json) -> Option<Vec<u64>> {
    match value {
        Json::Null => Some(Vec::new()),
        Json::Array(list) => list.iter().map(Json::as_u64).collect(),
        value => Some(vec![value.as_u64()?]),
    }
}

/// Text of a token: a string, or an object with `content`.
fn content(value: &Json) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

fn added_token(tokenizer: &Json, text: &str) -> Option<u64> {
    let tokens = tokenizer.get("added_tokens")?.as_array()?;
    tokens.iter().find(|t| t.get("content").and_then(Json::as_str) == Some(text))?.get("id")?.as_u64()
}

/// The template of a tokenizer's post-processor.
fn template_of(processor: &Json) -> Option<&Json> {
    match processor.get("type")?.as_str()? {
        "TemplateProcessing" => Some(processor),
        "Sequence" => processor.get("processors")?.as_array()?.iter().find_map(template_of),
        _ => None,
    }
}

/// The special tokens that a tokenizer's post-processor puts around texts.
fn added_around(post_processor: &Json) -> Option<&serde_json::Map<String, Json>> {
    template_of(post_processor)?.get("special_tokens")?.as_object()
}

/// The special token that a tokenizer's post-processor puts before a text.
fn added_in_front(post_processor: &Json) -> Option<u64> {
    let template = template_of(post_processor)?;
    let first = template.get("single")?.as_array()?.first()?.get("SpecialToken")?.get("id")?.as_str()?;
    template.get("special_tokens")?.get(first)?.get("ids")?.as_array()?.first()?.as_u64()
}

/// Checks that all ids are below the number of rows. Fewer ids than rows are usual, because tables are padded.
fn check_ids(place: &str, tokenizer: &Json, vocab_size: u64) -> Result<(), ConvertError> {
    let largest = self::vocabulary(tokenizer).and_then(|size| size.checked_sub(1));
    let vocabulary = tokenizer.pointer("/model/vocab");
    let added = tokenizer.get("added_tokens").and_then(Json::as_array);
    let added = added.into_iter().flatten().filter_map(|t| t.get("id")?.as_u64()).max();
    // added tokens may give another text to an id
    let listed = vocabulary.and_then(Json::as_object).into_iter().flatten();
    let mut texts = std::collections::HashMap::new();
    for (id, text) in listed.filter_map(|(text, id)| Some((id.as_u64()?, text.as_str()))) {
        if let Some(other) = texts.insert(id, text).filter(|other| *other != text) {
            let tokens = [other.to_owned(), text.to_owned()];
            return Err(ConvertError::SameToken { place: place.to_owned(), id, tokens });
        }
    }
    check_largest(place, largest.max(added), vocab_size)
}

fn check_largest(place: &str, largest: Option<u64>, vocab_size: u64) -> Result<(), ConvertError> {
    match largest {
        Some(id) if id >= vocab_size => Err(ConvertError::Vocabulary { place: place.to_owned(), id, vocab_size }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer() -> Json {
        json!({
            "model": {"vocab": {"a": 0, "b": 1}},
            "added_tokens": [{"id": 2, "content": "<s>"}, {"id": 3, "content": "</s>"}],
            "post_processor": {"type": "Sequence", "processors": [
                {"type": "ByteLevel"},
                {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
                 "special_tokens": {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}}}
            ]}
        })
    }

    #[test]
    fn the_prepended_token_comes_from_the_post_processor() {
        assert_eq!(added_in_front(&tokenizer()["post_processor"]), Some(2));
        assert_eq!(added_in_front(&json!({"type": "ByteLevel"})), None);
        assert_eq!(added_in_front(&json!(null)), None);
    }

    #[test]
    fn a_tokenizer_with_more_ids_than_rows_is_refused() {
        check_ids("t", &tokenizer(), 4).unwrap();
        let error = check_ids("t", &tokenizer(), 3).unwrap_err();
        assert!(matches!(error, ConvertError::Vocabulary { id: 3, vocab_size: 3, .. }));
        let twice = json!({"model": {"vocab": {"a": 0, "b": 0}}});
        assert!(matches!(check_ids("t", &twice, 4).unwrap_err(), ConvertError::SameToken { id: 0, .. }));
        check_ids("t", &json!({"model": {"vocab": [["a", 0.0], ["b", 0.0]]}}), 1).unwrap_err();
    }

    #[test]
    fn added_tokens_beyond_the_vocabulary_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, json: Json| std::fs::write(folder.path().join(name), json.to_string()).unwrap();
        let mut own = tokenizer();
        own["added_tokens"].as_array_mut().unwrap().push(json!({"id": 4, "content": "<image_soft_token>"}));
        file("tokenizer.json", own);
        let read = |vocab_size: u64| {
            let own = HuggingFaceFiles::read(folder.path()).unwrap();
            from_hugging_face(&Source::random("r", json!({}), Vec::new()).unwrap(), &own, vocab_size).unwrap()
        };
        let of = |text: &TokenizerFiles| -> Json { serde_json::from_slice(&text.files[0].2).unwrap() };
        let text = read(4);
        assert_eq!(of(&text), tokenizer());
        assert_eq!(text.notes.len(), 1);
        assert!(text.notes[0].contains("no rows for the tokens `<image_soft_token>`"), "{:?}", text.notes);
        assert_eq!((read(5).notes.len(), of(&read(5))["added_tokens"][2]["id"].as_u64()), (0, Some(4)));
    }

    #[test]
    fn tokens_of_the_configuration_are_added() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, json: Json| std::fs::write(folder.path().join(name), json.to_string()).unwrap();
        file("tokenizer.json", tokenizer());
        let listed = json!({
            "2": {"content": "<s>", "special": true}, "4": {"content": "<|im_end|>", "special": true},
            "5": {"content": "<think>"}, "7": {"content": "<gap>"}, "90": {"content": "<image>"},
        });
        file("tokenizer_config.json", json!({"added_tokens_decoder": listed, "eos_token": "<|im_end|>"}));
        let own = HuggingFaceFiles::read(folder.path()).unwrap();
        let source = Source::random("r", json!({}), Vec::new()).unwrap();
        let text = from_hugging_face(&source, &own, 16).unwrap();
        let found: Json = serde_json::from_slice(&text.files[0].2).unwrap();
        let added: Vec<(u64, &str, bool)> = found["added_tokens"]
            .as_array()
            .unwrap()
            .iter()
            .map(|token| (token["id"].as_u64().unwrap(), token["content"].as_str().unwrap(), token["special"] == true))
            .collect();
        let expected = [(2, "<s>", false), (3, "</s>", false), (4, "<|im_end|>", true), (5, "<think>", false)];
        assert_eq!(added, expected);
        assert_eq!(text.eos_token_ids, [4]);
        assert!(text.notes[0].contains("`<gap>`") && text.notes.len() == 1, "{:?}", text.notes);
    }

    #[test]
    fn end_tokens_come_from_the_configurations_and_the_tokenizer() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, json: Json| std::fs::write(folder.path().join(name), json.to_string()).unwrap();
        file("tokenizer.json", tokenizer());
        file("tokenizer_config.json", json!({"eos_token": {"content": "</s>"}, "chat_template": "{{ messages }}"}));
        file("generation_config.json", json!({"eos_token_id": [1]}));
        file("config.json", json!({"eos_token_id": 0}));
        let own = HuggingFaceFiles::read(folder.path()).unwrap();
        let source = Source::random("r", json!({}), Vec::new()).unwrap();
        let text = from_hugging_face(&source, &own, 4).unwrap();
        assert_eq!((text.eos_token_ids, text.bos_token_id), (vec![1, 3], Some(2)));
        assert!(from_hugging_face(&source, &own, 3).is_err());
        // invalid configurations are refused even if another one is used
        for wrong in [json!(99), json!("x"), json!([0, -1])] {
            file("config.json", json!({ "eos_token_id": wrong }));
            let own = HuggingFaceFiles::read(folder.path()).unwrap();
            let error = from_hugging_face(&source, &own, 4).err().unwrap().to_string();
            assert!(error.contains("config.json") && error.contains("eos_token_id"), "{error}");
        }
    }
}
