//! Trial of a tokenizer of a stranger: the tokenizers crate panics at some files that can be written down, and would
//! need gigabytes for others.

use anec_base::caught::caught;
use anec_base::json::problem;
use anec_base::listing::quote;
use serde::Serialize;
use serde_json::Value as Json;
use tokenizers::{
    Decoder, DecoderWrapper, NormalizedString, Normalizer, NormalizerWrapper, PreTokenizedString, PreTokenizer,
    PreTokenizerWrapper,
};

/// Maximum number of tokens that a template adds to a text.
const MAX_ADDED: usize = 1024;

/// Texts on which steps are tried.
const TEXTS: [&str; 6] = ["", " ", "a", "Hello, world! 123", "ä 海は 🙂\n\t▁x  y", "<|x|></s>"];

/// Tokens on which a decoder is tried.
const TOKENS: [&str; 8] = ["a", "", "▁b", "##c", "<0x41>", "Ġd", "e</w>", "🙂"];

/// Runs code of the crate; a panic becomes an error.
pub(super) fn guarded<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match caught(work) {
        Some(Ok(value)) => Ok(value),
        Some(Err(error)) => Err(match error.downcast_ref() {
            Some(error) => problem(error),
            None => quote(&error.to_string()).into_owned(),
        }),
        None => Err("it can't be used: a step of it panics".to_owned()),
    }
}

/// Tries the steps of a tokenizer.
pub(super) fn steps(
    normalizer: Option<&NormalizerWrapper>,
    pre_tokenizer: Option<&PreTokenizerWrapper>,
    decoder: Option<&DecoderWrapper>,
) -> Result<(), String> {
    let tried = |what: &str, work: &mut dyn FnMut()| {
        caught(work).ok_or_else(|| format!("its {what} can't be used: it panics at a text"))
    };
    for text in TEXTS {
        let mut normalized = NormalizedString::from(text);
        // whether a step refuses a text is seen when it is needed
        tried("normalizer", &mut || drop(normalizer.map(|normalizer| normalizer.normalize(&mut normalized))))?;
        let mut parts = PreTokenizedString::from(normalized);
        tried("pre_tokenizer", &mut || drop(pre_tokenizer.map(|own| own.pre_tokenize(&mut parts))))?;
    }
    let chains = TOKENS.iter().map(|token| vec![(*token).to_owned()]);
    for chain in chains.chain([TOKENS.map(str::to_owned).to_vec(), Vec::new()]) {
        tried("decoder", &mut || drop(decoder.map(|decoder| decoder.decode_chain(chain.clone()))))?;
    }
    Ok(())
}

/// Checks the templates of a post-processor.
pub(super) fn post_processor(step: Option<&impl Serialize>) -> Result<(), String> {
    templates(&serde_json::to_value(step).map_err(|error| error.to_string())?)
}

fn templates(step: &Json) -> Result<(), String> {
    if let Some(steps) = step["processors"].as_array() {
        return steps.iter().try_for_each(templates);
    }
    if step["type"] != "TemplateProcessing" {
        return Ok(());
    }
    for (form, allowed) in [("single", &["A"][..]), ("pair", &["A", "B"])] {
        let mut added = 0_usize;
        for piece in step[form].as_array().into_iter().flatten() {
            if let Some(sequence) = piece["Sequence"]["id"].as_str() {
                if !allowed.contains(&sequence) {
                    return Err(format!("post_processor: `{form}` has the text {sequence}, which isn't there"));
                }
                continue;
            }
            let name = piece["SpecialToken"]["id"].as_str().unwrap_or_default();
            let Some(ids) = step["special_tokens"][name]["ids"].as_array() else {
                return Err(format!("post_processor: `{form}` names {name:?}, which isn't in `special_tokens`"));
            };
            added = added.saturating_add(ids.len());
        }
        if added > MAX_ADDED {
            return Err(format!(
                "post_processor: `{form}` adds {added} tokens to a text; at most {MAX_ADDED} are taken"
            ));
        }
    }
    Ok(())
}
