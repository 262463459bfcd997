//! Tokenizers of folders without a `tokenizer.json`: SentencePiece models, `vocab.json` with `merges.txt`, Mistral's
//! `tekken.json`, and WordPiece's `vocab.txt`.
//!
//! Each is put into the words of a GGUF file, from which [`GgufTokenizer`] makes a `tokenizer.json`.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use anec_base::input;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use indexmap::IndexMap;
use serde_json::{Value as Json, json};

use super::{CONTROL, GgufTokenizer, NORMAL, USER_DEFINED, word_piece};
use crate::error::{Result, SourceError};
use crate::file::{self, read_json};
use crate::gguf::{GgufArray, GgufMetadata, GgufValue, Strings};
use crate::hugging_face::HuggingFaceFiles;
use crate::wire::Message;

/// Tokenizer of a folder without a `tokenizer.json`.
#[derive(Debug)]
pub enum FolderTokenizer {
    /// A `tokenizer.json`, made from other files.
    Rebuilt {
        /// Content.
        json: Vec<u8>,
        /// File that it was made from.
        path: PathBuf,
    },
    /// Files of a kind that isn't read.
    Unsupported {
        /// File.
        path: PathBuf,
        /// Reason.
        problem: String,
    },
}

/// Keys of the metadata that stands for a tokenizer.
struct Metadata {
    path: PathBuf,
    keys: IndexMap<String, GgufValue>,
    /// Normalizers before the model's own.
    normalizers: Vec<Json>,
}

impl Metadata {
    fn new(path: &Path, model: &str) -> Self {
        let mut own = Metadata { path: path.to_owned(), keys: IndexMap::new(), normalizers: Vec::new() };
        own.set("model", GgufValue::String(model.to_owned()));
        own
    }

    fn set(&mut self, key: &str, value: GgufValue) {
        self.keys.insert(format!("tokenizer.ggml.{key}"), value);
    }

    fn tokens(&mut self, tokens: &[String], types: Vec<i32>) {
        let tokens: Strings = tokens.iter().map(String::as_str).collect();
        self.set("tokens", GgufValue::Array(GgufArray::String(tokens)));
        self.set("token_type", GgufValue::Array(GgufArray::I32(types)));
    }

    /// Sets the ids and the use of special tokens from the tokenizer's configuration.
    fn special(&mut self, tokens: &[String], files: &HuggingFaceFiles, defaults: &[(&str, &str)]) {
        let ids: HashMap<&str, usize> = tokens.iter().enumerate().map(|(id, token)| (token.as_str(), id)).collect();
        let configs = [&files.tokenizer_config, &files.special_tokens_map];
        let named = |name: &str| configs.iter().find_map(|config| spelling(config.as_ref()?.get(name)?));
        for (name, key) in [
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("unk_token", "unknown_token_id"),
            ("pad_token", "padding_token_id"),
            ("cls_token", "cls_token_id"),
            ("sep_token", "seperator_token_id"),
        ] {
            let default = defaults.iter().find(|(known, _)| *known == name).map(|(_, token)| *token);
            if let Some(id) = named(name).or(default).and_then(|token| ids.get(token)) {
                self.set(key, GgufValue::U32(*id as u32));
            }
        }
        for key in ["add_bos_token", "add_eos_token"] {
            let flag = files.tokenizer_config.as_ref().and_then(|config| config.get(key)?.as_bool());
            if let Some(flag) = flag {
                self.set(key, GgufValue::Bool(flag));
            }
        }
    }

    fn rebuilt(self) -> Result<FolderTokenizer> {
        let Metadata { path, keys, mut normalizers } = self;
        let metadata = GgufMetadata::new(&path, keys);
        let Some(tokenizer) = GgufTokenizer::read(&metadata)? else {
            return Err(SourceError::file(&path, "it has no tokens"));
        };
        let mut file = tokenizer.file()?;
        if !normalizers.is_empty() {
            normalizers.extend((!file.normalizer.is_null()).then_some(file.normalizer));
            file.normalizer = json!({"type": "Sequence", "normalizers": normalizers});
        }
        let json = file.to_json();
        Ok(FolderTokenizer::Rebuilt { json, path })
    }
}

impl FolderTokenizer {
    /// Returns the tokenizer of a folder without a `tokenizer.json`; `None` if there are no files of one.
    ///
    /// # Errors
    /// Returns an error if a file is damaged.
    pub fn read(files: &HuggingFaceFiles) -> Result<Option<Self>> {
        let Some(path) = &files.other_tokenizer else { return Ok(None) };
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let class = files.tokenizer_config.as_ref().and_then(|config| config.get("tokenizer_class")?.as_str());
        let class = class.map(|class| class.trim_end_matches("Fast")).unwrap_or_default();
        let unsupported = |problem: String| Ok(FolderTokenizer::Unsupported { path: path.clone(), problem });
        let found = match name {
            "tekken.json" => tekken(path, files),
            "tokenizer.model" | "spm.model" | "sentencepiece.bpe.model" | "spiece.model" => {
                let rules = SENTENCE_PIECE_CLASSES.iter().find(|known| known.file == name);
                if rules.is_some_and(|known| !known.names.contains(&class)) {
                    return unsupported(format!("the rules of `{class}` aren't in its files")).map(Some);
                }
                // Llama 3's original is a list of ranks under the same name
                let file = file::map(path)?;
                match file.bytes().first() {
                    Some(0x0a) => sentence_piece(path, file.bytes(), files, rules),
                    _ => unsupported("it isn't a SentencePiece model".into()),
                }
            }
            "vocab.json" => match byte_level_rules(class) {
                Some(pre) => byte_level(path, pre, files),
                None => unsupported(format!("the rules of `{class}` aren't in its files")),
            },
            "vocab.txt" => match word_piece_of(path, class, files)? {
                Some(found) => Ok(found),
                None => unsupported(format!("the rules of `{class}` aren't in its files")),
            },
            _ => unsupported("this kind of file isn't read".into()),
        };
        found.map(Some)
    }
}

/// Tokenizers over `vocab.txt` with BERT's rules.
struct WordPieceClass {
    /// Names of the class. A folder that names none has the first class whose first token is in its vocabulary.
    names: &'static [&'static str],
    /// Default tokens before and after a text, of padding and of a mask.
    tokens: [&'static str; 4],
    /// Number of tokens between two texts, and type of the second.
    pair: (usize, u64),
}

const WORD_PIECE_CLASSES: [WordPieceClass; 2] = [
    WordPieceClass {
        names: &["", "BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"],
        tokens: ["[CLS]", "[SEP]", "[PAD]", "[MASK]"],
        pair: (1, 1),
    },
    WordPieceClass { names: &["", "MPNetTokenizer"], tokens: ["<s>", "</s>", "<pad>", "<mask>"], pair: (2, 0) },
];

/// Tokenizers over SentencePiece models with special tokens of their own.
struct SentencePieceClass {
    /// Name of the file.
    file: &'static str,
    /// Names of the class; the first is that of a folder that names none.
    names: [&'static str; 2],
    /// Default tokens: `cls_token`, `sep_token`, `pad_token`, `unk_token`, `mask_token`.
    tokens: [&'static str; 5],
    /// Tokens in place of the model's first three.
    first: &'static [&'static str],
    /// Whether quotation marks, accents and case are normalized as ALBERT does.
    plain_letters: bool,
}

const SENTENCE_PIECE_CLASSES: [SentencePieceClass; 3] = [
    SentencePieceClass {
        file: "spiece.model",
        names: ["", "AlbertTokenizer"],
        tokens: ["[CLS]", "[SEP]", "<pad>", "<unk>", "[MASK]"],
        first: &[],
        plain_letters: true,
    },
    SentencePieceClass {
        file: "spm.model",
        names: ["", "DebertaV2Tokenizer"],
        tokens: ["[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]"],
        first: &[],
        plain_letters: false,
    },
    SentencePieceClass {
        file: "sentencepiece.bpe.model",
        names: ["", "XLMRobertaTokenizer"],
        tokens: ["<s>", "</s>", "<pad>", "<unk>", "<mask>"],
        // fairseq's order of special tokens
        first: &["<s>", "<pad>", "</s>", "<unk>"],
        plain_letters: false,
    },
];

/// Returns ALBERT's normalizers, as far as its settings ask for them.
fn plain_letters(files: &HuggingFaceFiles) -> Vec<Json> {
    let config = files.tokenizer_config.as_ref();
    let flag = |key: &str| config.and_then(|config| config.get(key)?.as_bool());
    let quotes = |marks: &str| json!({"type": "Replace", "pattern": {"String": marks}, "content": "\""});
    let mut normalizers = vec![quotes("``"), quotes("''")];
    if !flag("keep_accents").unwrap_or(false) {
        normalizers.extend(["NFKD", "StripAccents"].map(|kind| json!({"type": kind})));
    }
    if flag("do_lower_case").unwrap_or(true) {
        normalizers.push(json!({"type": "Lowercase"}));
    }
    normalizers
}

/// Returns the pre-tokenizer of a class over `vocab.json` and `merges.txt`.
fn byte_level_rules(class: &str) -> Option<&'static str> {
    match class {
        "GPT2Tokenizer" => Some("gpt-2"),
        "CodeGenTokenizer" => Some("phi-2"),
        "Qwen2Tokenizer" => Some("qwen2"),
        "RobertaTokenizer" => Some("roberta-bpe"),
        _ => None,
    }
}

/// Returns a token's text: a string, or an object with `content`.
fn spelling(value: &Json) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// Tokens beside the vocabulary: ids, and whether they are special. From `tokenizer_config.json` or
/// `added_tokens.json`.
fn added(path: &Path, files: &HuggingFaceFiles) -> Result<BTreeMap<usize, (String, bool)>> {
    let mut all = BTreeMap::new();
    let beside = path.with_file_name("added_tokens.json");
    if beside.exists() {
        for (token, id) in read_json(&beside)?.as_object().into_iter().flatten() {
            if let Some(id) = id.as_u64() {
                all.insert(id as usize, (token.clone(), false));
            }
        }
    }
    let decoder = files.tokenizer_config.as_ref().and_then(|config| config.get("added_tokens_decoder")?.as_object());
    for (id, token) in decoder.into_iter().flatten() {
        if let Some((id, content)) = id.parse().ok().zip(spelling(token)) {
            all.insert(id, (content.to_owned(), token["special"] == true));
        }
    }
    Ok(all)
}

/// Most ids that added tokens may leave open behind a vocabulary.
const MOST_OPEN: usize = 1 << 16;

/// Adds tokens to a vocabulary; ids that are left open get names of their own.
fn add(
    path: &Path,
    tokens: &mut Vec<String>,
    types: &mut Vec<i32>,
    added: BTreeMap<usize, (String, bool)>,
) -> Result<()> {
    for (id, (token, special)) in added {
        if id > tokens.len() + MOST_OPEN {
            let problem = format!("token {token:?} has id {id}, but the vocabulary has {} tokens", tokens.len());
            return Err(SourceError::file(path, problem));
        }
        while tokens.len() <= id {
            tokens.push(format!("[open {}]", tokens.len()));
            types.push(NORMAL as i32);
        }
        tokens[id] = token;
        types[id] = if special { CONTROL } else { USER_DEFINED } as i32;
    }
    Ok(())
}

fn read_text(path: &Path) -> Result<String> {
    let bytes = input::read_file(path, input::MOST_JSON)?;
    String::from_utf8(bytes).map_err(|_| SourceError::file(path, "it isn't UTF-8"))
}

/// Reads `vocab.json` and `merges.txt`.
fn byte_level(path: &Path, pre: &str, files: &HuggingFaceFiles) -> Result<FolderTokenizer> {
    let vocab = read_json(path)?;
    let wrong = |problem: &str| SourceError::file(path, problem);
    let vocab = vocab.as_object().ok_or_else(|| wrong("it isn't an object of tokens and ids"))?;
    let mut by_id = BTreeMap::new();
    for (token, id) in vocab {
        let id = id.as_u64().and_then(|id| usize::try_from(id).ok());
        by_id.insert(id.ok_or_else(|| wrong("an id isn't a whole number"))?, token.clone());
    }
    if by_id.keys().last().is_some_and(|last| *last + 1 != vocab.len()) {
        return Err(wrong("its ids aren't consecutive numbers from 0 on"));
    }
    let mut tokens: Vec<String> = by_id.into_values().collect();
    let mut types = vec![NORMAL as i32; tokens.len()];
    add(path, &mut tokens, &mut types, added(path, files)?)?;
    let merges = path.with_file_name("merges.txt");
    let text = read_text(&merges)?;
    let lines = text.lines().filter(|line| !line.starts_with("#version") && !line.is_empty());
    let mut metadata = Metadata::new(path, "gpt2");
    metadata.set("pre", GgufValue::String(pre.to_owned()));
    metadata.set("merges", GgufValue::Array(GgufArray::String(lines.collect())));
    metadata.special(&tokens, files, &[("cls_token", "<s>"), ("sep_token", "</s>")]);
    for token in ["bos_token", "eos_token", "unk_token", "cls_token", "sep_token", "pad_token", "mask_token"] {
        let config = files.tokenizer_config.as_ref().and_then(|config| spelling(config.get(token)?));
        if let Some(id) = config.and_then(|token| tokens.iter().position(|known| known == token)) {
            types[id] = CONTROL as i32;
        }
    }
    metadata.tokens(&tokens, types);
    metadata.rebuilt()
}

/// Reads `vocab.txt`; `None` if the class has other rules.
fn word_piece_of(path: &Path, class: &str, files: &HuggingFaceFiles) -> Result<Option<FolderTokenizer>> {
    let text = read_text(path)?;
    let tokens: Vec<&str> = text.lines().map(|line| line.trim_end_matches('\r')).collect();
    let classes: Vec<_> = WORD_PIECE_CLASSES.iter().filter(|known| known.names.contains(&class)).collect();
    let fits = classes.iter().find(|known| tokens.contains(&known.tokens[0]));
    let Some(WordPieceClass { tokens: defaults, pair, .. }) = fits.or(classes.first()) else { return Ok(None) };
    let config = files.tokenizer_config.as_ref();
    let flag = |key: &str| config.and_then(|config| config.get(key)?.as_bool());
    let special = |name: &str, default: &'static str| {
        config.and_then(|config| spelling(config.get(name)?)).unwrap_or(default).to_owned()
    };
    let options = word_piece::VocabOptions {
        lowercase: flag("do_lower_case").unwrap_or(true),
        strip_accents: flag("strip_accents"),
        chinese: flag("tokenize_chinese_chars").unwrap_or(true),
        unknown: special("unk_token", "[UNK]"),
        begin: special("cls_token", defaults[0]),
        end: special("sep_token", defaults[1]),
        others: vec![special("pad_token", defaults[2]), special("mask_token", defaults[3])],
        pair: *pair,
    };
    let tokens: Strings = tokens.into_iter().collect();
    match word_piece::of_vocab(&tokens, &options) {
        Ok(json) => Ok(Some(FolderTokenizer::Rebuilt { json, path: path.to_owned() })),
        Err(problem) => Err(SourceError::file(path, problem)),
    }
}

/// Reads a SentencePiece model (sentencepiece_model.proto), with the special tokens of a class, if any.
fn sentence_piece(
    path: &Path,
    bytes: &[u8],
    files: &HuggingFaceFiles,
    class: Option<&SentencePieceClass>,
) -> Result<FolderTokenizer> {
    const UNIGRAM: i64 = 1;
    const BPE: i64 = 2;
    let message = Message::new(path, "SentencePiece model", bytes);
    let (mut tokens, mut types, mut scores) = (Vec::new(), Vec::new(), Vec::new());
    let mut kind = UNIGRAM;
    let mut special_ids = BTreeMap::from([("unknown_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2)]);
    let (mut charsmap, mut prefix, mut strips) = (Vec::new(), true, true);
    for field in message.fields() {
        match field? {
            (1, piece) => {
                let (mut token, mut score, mut kind) = (String::new(), 0.0, NORMAL);
                let piece = message.message("piece", &piece)?;
                for field in piece.fields() {
                    match field? {
                        (1, value) => piece.text(&value)?.clone_into(&mut token),
                        (2, value) => score = piece.float(&value)?,
                        (3, value) => kind = piece.integer(&value)?,
                        _ => {}
                    }
                }
                tokens.push(token);
                scores.push(score);
                types.push(i32::try_from(kind).unwrap_or(NORMAL as i32));
            }
            (2, trainer) => {
                let trainer = message.message("trainer", &trainer)?;
                for field in trainer.fields() {
                    match field? {
                        (3, value) => kind = trainer.integer(&value)?,
                        (number @ 40..=42, value) => {
                            let key = ["unknown_token_id", "bos_token_id", "eos_token_id"][number as usize - 40];
                            special_ids.insert(key, trainer.integer(&value)?);
                        }
                        _ => {}
                    }
                }
            }
            (3, normalizer) => {
                let normalizer = message.message("normalizer", &normalizer)?;
                for field in normalizer.fields() {
                    match field? {
                        (2, value) => charsmap = bytes[normalizer.range_of(&value)?].to_vec(),
                        (3, value) => prefix = normalizer.integer(&value)? != 0,
                        (4, value) => strips = normalizer.integer(&value)? != 0,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    let model = match kind {
        BPE => "llama",
        UNIGRAM => "t5",
        other => {
            let problem = format!("its model is of type {other}, expected 1 (unigram) or 2 (BPE)");
            return Ok(FolderTokenizer::Unsupported { path: path.to_owned(), problem });
        }
    };
    let mut metadata = Metadata::new(path, model);
    if class.is_some_and(|class| class.plain_letters) {
        metadata.normalizers = plain_letters(files);
    }
    if let Some(first) = class.map(|class| class.first).filter(|first| !first.is_empty()) {
        let replaced = 3.min(tokens.len());
        tokens.splice(..replaced, first.iter().map(|token| (*token).to_owned()));
        types.splice(..replaced, first.iter().map(|_| CONTROL as i32));
        scores.splice(..replaced, first.iter().map(|_| 0.0));
    }
    add(path, &mut tokens, &mut types, added(path, files)?)?;
    let mut defaults = Vec::new();
    if let Some(SentencePieceClass { tokens: [begin, end, padding, unknown, mask], .. }) = class {
        special_ids.clear();
        defaults.extend([("bos_token", *begin), ("eos_token", *end), ("unk_token", *unknown), ("pad_token", *padding)]);
        // behind the vocabulary, unless a file says otherwise
        if !tokens.iter().any(|token| token == mask) {
            tokens.push((*mask).to_owned());
            types.push(CONTROL as i32);
        }
    }
    scores.resize(tokens.len(), 0.0);
    for (key, id) in special_ids {
        if let Some(id) = usize::try_from(id).ok().filter(|id| *id < tokens.len()) {
            metadata.set(key, GgufValue::U32(id as u32));
        }
    }
    metadata.special(&tokens, files, &defaults);
    metadata.set("add_space_prefix", GgufValue::Bool(prefix));
    metadata.set("remove_extra_whitespaces", GgufValue::Bool(strips));
    if !charsmap.is_empty() {
        metadata.set("precompiled_charsmap", GgufValue::Array(GgufArray::U8(charsmap)));
    }
    metadata.set("scores", GgufValue::Array(GgufArray::F32(scores)));
    metadata.tokens(&tokens, types);
    metadata.rebuilt()
}

/// Reads Mistral's `tekken.json`: special tokens first, then tokens as bytes, in the order of their ranks.
fn tekken(path: &Path, files: &HuggingFaceFiles) -> Result<FolderTokenizer> {
    let file = read_json(path)?;
    let wrong = |key: &str, problem: &str| SourceError::key(path, key, problem);
    let number = |key: &str| file.pointer(&format!("/config/{key}")).and_then(Json::as_u64).map(|n| n as usize);
    let size = number("default_vocab_size").ok_or_else(|| wrong("config.default_vocab_size", "it is missing"))?;
    let specials = number("default_num_special_tokens")
        .filter(|count| *count <= size)
        .ok_or_else(|| wrong("config.default_num_special_tokens", "it is missing, or more than all tokens"))?;
    let vocab = file["vocab"].as_array().ok_or_else(|| wrong("vocab", "it isn't a list"))?;
    if size - specials > vocab.len() {
        return Err(wrong("vocab", &format!("it has {} tokens, expected {}", vocab.len(), size - specials)));
    }
    let mut ranked = Vec::with_capacity(size - specials);
    for (rank, token) in vocab[..size - specials].iter().enumerate() {
        let bytes = token["token_bytes"].as_str().and_then(|text| STANDARD.decode(text).ok());
        let bytes = bytes.filter(|bytes| !bytes.is_empty() && token["rank"] == rank);
        ranked
            .push(bytes.ok_or_else(|| wrong(&format!("vocab[{rank}]"), "expected its rank and its bytes in base64"))?);
    }
    let mut tokens: Vec<String> = (0..specials).map(|id| format!("<SPECIAL_{id}>")).collect();
    for special in file["special_tokens"].as_array().into_iter().flatten() {
        let place = special["rank"].as_u64().and_then(|rank| tokens.get_mut(rank as usize));
        if let Some((place, text)) = place.zip(special["token_str"].as_str()) {
            text.clone_into(place);
        }
    }
    // files before version 7 have these in this order and don't list them
    if file["special_tokens"].as_array().is_none_or(Vec::is_empty) {
        for (place, text) in tokens.iter_mut().zip(TEKKEN_SPECIAL) {
            text.clone_into(place);
        }
    }
    let letters = letters();
    let spelt = |bytes: &[u8]| bytes.iter().map(|byte| letters[usize::from(*byte)]).collect::<String>();
    let mut types = vec![CONTROL as i32; specials];
    tokens.extend(ranked.iter().map(|bytes| spelt(bytes)));
    types.resize(tokens.len(), NORMAL as i32);
    let merges = merges_of_ranks(&ranked);
    let merges = merges.iter().map(|(left, right)| format!("{} {}", spelt(left), spelt(right)));
    let merges: Vec<String> = merges.collect();
    let mut metadata = Metadata::new(path, "gpt2");
    metadata.set("pre", GgufValue::String("tekken".to_owned()));
    metadata.set("merges", GgufValue::Array(GgufArray::String(merges.iter().map(String::as_str).collect())));
    metadata.special(&tokens, files, &[("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>")]);
    metadata.tokens(&tokens, types);
    metadata.rebuilt()
}

/// Special tokens of the first versions of `tekken.json`, by their ids.
const TEKKEN_SPECIAL: [&str; 20] = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
];

/// Returns merges that give the tokens of a ranked vocabulary: for each token every pair of tokens that forms it, pairs
/// of lower ranks first.
fn merges_of_ranks(ranked: &[Vec<u8>]) -> Vec<(&[u8], &[u8])> {
    let ranks: HashMap<&[u8], usize> = ranked.iter().enumerate().map(|(rank, bytes)| (&bytes[..], rank)).collect();
    let mut merges = Vec::new();
    for bytes in ranked {
        let splits = (1..bytes.len()).map(|at| bytes.split_at(at));
        let mut pairs: Vec<(usize, usize, &[u8], &[u8])> =
            splits.filter_map(|(left, right)| Some((*ranks.get(left)?, *ranks.get(right)?, left, right))).collect();
        pairs.sort_unstable_by_key(|(left, right, ..)| (*left, *right));
        merges.extend(pairs.into_iter().map(|(_, _, left, right)| (left, right)));
    }
    merges
}

/// Returns GPT-2's letter for each byte.
fn letters() -> Vec<char> {
    let mut next = 256u32;
    let letter = |byte: u8| match byte {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
        _ => {
            next += 1;
            char::from_u32(next - 1).unwrap_or_default()
        }
    };
    (0..=255).map(letter).collect()
}
