//! Tokenization and chat template of a bundle against a golden's: the same logits are of no use behind other tokens.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::golden::{Golden, GoldenError};
use crate::verdict::{Check, listed};
use anec_base::Result;
use anec_base::json::{self, JsonError};
use anec_bundle::Bundle;
use anec_runtime::Tokenizer;
use anec_runtime::chat::{Chat, ChatTemplate, Message};

/// Metadata key with a JSON list of [`TokenizedText`].
pub const TOKENIZATION: &str = "tokenization";
/// Metadata key with a [`RenderedChat`] as JSON.
pub const CHAT: &str = "chat";
/// Metadata key with the golden's text, if it is a single one.
const TEXT: &str = "text";
/// Texts that tell tokenizers apart, by name: a JSON object.
const PROBES: &str = include_str!("../tokenization.json");
/// Characters of a text that a finding quotes.
const QUOTED: usize = 24;

/// Text as the reference tokenizes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenizedText {
    /// Name of the text.
    pub name: String,
    /// Text.
    pub text: String,
    /// Token ids, with those that the tokenizer adds.
    pub ids: Vec<u32>,
    /// Text of the ids, special tokens included.
    pub decoded: String,
}

/// Conversation as the reference renders it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RenderedChat {
    /// Messages of the conversation.
    pub messages: Vec<Message>,
    /// Text that the model continues.
    pub rendered: String,
}

/// Messages of the conversation that is rendered.
fn messages() -> Vec<Message> {
    let said = [("user", "What is 12 + 30?"), ("assistant", "42."), ("user", " Why?\n")];
    said.into_iter().map(|(role, content)| Message::new(role, content)).collect()
}

fn tokenized(tokenizer: &Tokenizer, name: &str, text: &str) -> Result<TokenizedText> {
    let ids = tokenizer.encode(text)?;
    let decoded = tokenizer.decode(&ids, true)?;
    Ok(TokenizedText { name: name.to_owned(), text: text.to_owned(), ids, decoded })
}

/// Whether a template's text depends on more than the conversation.
fn depends_on_date(template: &ChatTemplate) -> bool {
    template.source().contains("strftime_now")
}

/// Metadata of a golden with the tokenization and the chat template of a bundle; empty without a tokenizer. `texts` are
/// the golden's own, by name.
///
/// # Errors
/// If the tokenizer or the template can't be read.
pub fn record(bundle: &Bundle, folder: &Path, texts: &[(String, String)]) -> Result<BTreeMap<String, String>> {
    let mut metadata = BTreeMap::new();
    if !bundle.tokenizer.contains_key("tokenizer") {
        return Ok(metadata);
    }
    let tokenizer = Tokenizer::of(bundle, folder)?;
    let probes: BTreeMap<String, String> = serde_json::from_str(PROBES).unwrap_or_default();
    let all = probes.iter().chain(texts.iter().map(|(name, text)| (name, text)));
    let all: Vec<TokenizedText> = all.map(|(name, text)| tokenized(&tokenizer, name, text)).collect::<Result<_>>()?;
    metadata.insert(TOKENIZATION.to_owned(), serde_json::to_string(&all).unwrap_or_default());
    if bundle.tokenizer.contains_key("chat_template") {
        let template = ChatTemplate::of(bundle, folder, &tokenizer)?;
        if !depends_on_date(&template) {
            let rendered = template.render(&Chat::new(messages()))?;
            let chat = RenderedChat { messages: messages(), rendered };
            metadata.insert(CHAT.to_owned(), serde_json::to_string(&chat).unwrap_or_default());
        }
    }
    Ok(metadata)
}

/// Compares a bundle's tokenizer and chat template with what a golden recorded of them.
///
/// # Errors
/// If the golden's records can't be parsed, or the bundle's files can't be read.
pub(super) fn checks(bundle: &Bundle, folder: &Path, golden: &Golden) -> Result<Vec<Check>> {
    let mut checks = Vec::new();
    let recorded: Vec<TokenizedText> = record_of(golden, TOKENIZATION)?.unwrap_or_default();
    let text = golden.metadata.get(TEXT).filter(|_| golden.texts.is_empty());
    let chat: Option<RenderedChat> = record_of(golden, CHAT)?;
    if recorded.is_empty() && text.is_none() && chat.is_none() {
        return Ok(checks);
    }
    let claim = "texts have the golden's tokens";
    if !bundle.tokenizer.contains_key("tokenizer") {
        if !recorded.is_empty() {
            checks.push(Check::unproven("tokenizer", claim, "the bundle has no tokenizer"));
        }
        return Ok(checks);
    }
    let tokenizer = Tokenizer::of(bundle, folder)?;
    let mut problems = Vec::new();
    if let Some(text) = text {
        problems.extend(difference(&tokenizer, "the golden's text", text, &golden.tokens)?);
    }
    for of in &recorded {
        problems.extend(difference(&tokenizer, &of.name, &of.text, &of.ids)?);
    }
    checks.push(Check::of("tokenizer", claim, listed(&problems)));
    let mut problems = Vec::new();
    for TokenizedText { name, ids, decoded, .. } in &recorded {
        let found = tokenizer.decode(ids, true)?;
        if found != *decoded {
            problems.push(format!("`{name}` is decoded to {}, the golden has {}", quoted(&found), quoted(decoded)));
        }
    }
    if !recorded.is_empty() {
        checks.push(Check::of("tokenizer", "tokens have the golden's texts", listed(&problems)));
    }
    if let Some(RenderedChat { messages, rendered }) = chat {
        checks.push(chat_check(bundle, folder, &tokenizer, messages, &rendered)?);
    }
    Ok(checks)
}

fn chat_check(
    bundle: &Bundle,
    folder: &Path,
    tokenizer: &Tokenizer,
    messages: Vec<Message>,
    rendered: &str,
) -> Result<Check> {
    let claim = "a conversation is rendered as the golden's";
    if !bundle.tokenizer.contains_key("chat_template") {
        return Ok(Check::of("chat template", claim, Some("the bundle has no chat template".into())));
    }
    let template = ChatTemplate::of(bundle, folder, tokenizer)?;
    let problem = match template.render(&Chat::new(messages)) {
        Err(error) => Some(error.to_string()),
        Ok(found) if found == rendered => None,
        Ok(found) => {
            let at = found.chars().zip(rendered.chars()).take_while(|(a, b)| a == b).count();
            let rest = |text: &str| quoted(&text.chars().skip(at).collect::<String>());
            Some(format!("from character {at} on it is {}, the golden has {}", rest(&found), rest(rendered)))
        }
    };
    Ok(Check::of("chat template", claim, problem))
}

fn record_of<T: serde::de::DeserializeOwned>(golden: &Golden, key: &str) -> Result<Option<T>> {
    let wrong = |error: JsonError| GoldenError {
        path: "of the parity gate".into(),
        problem: format!("its metadata `{key}`: {error}"),
    };
    Ok(golden.metadata.get(key).map(|text| json::read(text.as_bytes()).map_err(wrong)).transpose()?)
}

/// First token that differs.
fn difference(tokenizer: &Tokenizer, name: &str, text: &str, ids: &[u32]) -> Result<Option<String>> {
    let found = tokenizer.encode(text)?;
    if found == ids {
        return Ok(None);
    }
    let at = found.iter().zip(ids).take_while(|(a, b)| a == b).count();
    let token = |ids: &[u32]| match ids.get(at) {
        Some(id) => format!("{id} {}", quoted(&tokenizer.token(*id).unwrap_or_default())),
        None => "nothing".to_owned(),
    };
    Ok(Some(format!(
        "`{name}` ({} tokens, the golden's {}): token {at} is {}, the golden's is {}",
        found.len(),
        ids.len(),
        token(&found),
        token(ids)
    )))
}

/// Beginning of a text in quotes, with control characters escaped.
fn quoted(text: &str) -> String {
    let beginning: String = text.chars().take(QUOTED).collect();
    let more = if text.chars().nth(QUOTED).is_some() { "…" } else { "" };
    format!("{beginning:?}{more}")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value as Json, json};

    use super::*;
    use crate::verdict::Verdict;
    use anec_testing::fake::convert_demo;

    const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>";

    /// The demo with a chat template, and a golden that recorded its tokenization.
    fn recorded(folder: &Path) -> (Bundle, Golden) {
        convert_demo(folder, &["context=64"]);
        let mut bundle = Bundle::read(folder).unwrap();
        std::fs::write(folder.join("chat_template.jinja"), TEMPLATE).unwrap();
        bundle.tokenizer.insert("chat_template".into(), "chat_template.jinja".into());
        let text = "It was a fine morning";
        let metadata = record(&bundle, folder, &[("text".to_owned(), text.to_owned())]).unwrap();
        let golden = Golden {
            tokens: Tokenizer::of(&bundle, folder).unwrap().encode(text).unwrap(),
            texts: Vec::new(),
            positions: Vec::new(),
            logits: Vec::new(),
            vocab_size: 2048,
            hidden: BTreeMap::new(),
            losses: None,
            greedy: None,
            metadata,
        };
        (bundle, golden)
    }

    /// The first finding, if a check fails.
    fn finding(bundle: &Bundle, folder: &Path, golden: &Golden) -> Option<String> {
        let checks = checks(bundle, folder, golden).unwrap();
        assert_eq!(checks.len(), 3);
        let failed = checks.into_iter().find(|check| check.verdict == Verdict::Failed)?;
        Some(format!("{}: {}", failed.subject, failed.detail.unwrap()))
    }

    #[test]
    fn every_change_of_a_tokenizer_or_template_is_named() {
        let room = tempfile::tempdir().unwrap();
        let (bundle, golden) = recorded(room.path());
        assert_eq!(finding(&bundle, room.path(), &golden), None);
        let path = room.path().join(&bundle.tokenizer["tokenizer"]);
        let sound: Json = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let byte_level = |prefix: bool| json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": false});
        let start = json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}});
        let mut merges = sound["model"]["merges"].as_array().unwrap().clone();
        merges.reverse();
        let without_first = sound["model"]["merges"].as_array().unwrap()[1..].to_vec();
        let mut vocabulary = sound["model"]["vocab"].clone();
        (vocabulary["!"], vocabulary["("]) =
            (sound["model"]["vocab"]["("].clone(), sound["model"]["vocab"]["!"].clone());
        let changes = [
            ("/normalizer", Json::Null, "`accents`"),
            ("/normalizer", json!({"type": "NFKC"}), "`accents`"),
            ("/normalizer", json!({"type": "Lowercase"}), "`accents`"),
            ("/normalizer", json!({"type": "Strip", "strip_left": true, "strip_right": true}), "`spaces`"),
            ("/pre_tokenizer/pretokenizers/1", byte_level(true), "`accents`"),
            ("/pre_tokenizer/pretokenizers/0", json!({"type": "WhitespaceSplit"}), "`accents`"),
            ("/model/merges", Json::Array(merges), "tokenizer: "),
            ("/model/merges", Json::Array(without_first), "tokenizer: "),
            ("/model/vocab", vocabulary, "`punctuation`"),
            ("/post_processor", start, "`accents`"),
            ("/decoder", json!({"type": "Fuse"}), "is decoded to"),
        ];
        let mut count = 0;
        for (pointer, value, expected) in changes {
            let mut changed = sound.clone();
            *changed.pointer_mut(pointer).unwrap() = value;
            std::fs::write(&path, changed.to_string()).unwrap();
            let found = finding(&bundle, room.path(), &golden).unwrap_or_else(|| panic!("{pointer}: nothing is found"));
            assert!(found.starts_with("tokenizer: ") && found.contains(expected), "{pointer}: {found}");
            count += 1;
        }
        std::fs::write(&path, sound.to_string()).unwrap();
        for (template, expected) in [
            (TEMPLATE.replace("<assistant>", "<model>"), "the golden has \"assistant>\""),
            (TEMPLATE.replace("\n", ""), "chat template: from character "),
            ("{{ raise_exception('no') }}".to_owned(), "chat template: "),
        ] {
            std::fs::write(room.path().join("chat_template.jinja"), &template).unwrap();
            let found = finding(&bundle, room.path(), &golden).unwrap();
            assert!(found.contains(expected), "{template}: {found}");
            count += 1;
        }
        assert!(count >= 12);
    }

    #[test]
    fn goldens_without_records_have_no_checks() {
        let room = tempfile::tempdir().unwrap();
        let (bundle, golden) = recorded(room.path());
        let bare = Golden { metadata: BTreeMap::new(), ..golden.clone() };
        assert!(checks(&bundle, room.path(), &bare).unwrap().is_empty());
        // the text of a single one suffices
        let text = Golden { metadata: BTreeMap::from([("text".to_owned(), "It was".to_owned())]), ..golden };
        let checks = checks(&bundle, room.path(), &text).unwrap();
        assert_eq!((checks.len(), checks[0].verdict), (1, Verdict::Failed));
        assert!(checks[0].detail.as_deref().unwrap().contains("`the golden's text`"));
    }
}
