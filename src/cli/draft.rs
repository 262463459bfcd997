//! `--draft`: speculative decoding with a smaller model.

use std::path::PathBuf;
use std::sync::Arc;

use super::model::Runner;
use super::usage::UsageError;
use anec::base::Result;
use anec::runtime::{LoadedModel, Tokenizer};

/// Options of speculative decoding with a draft model.
#[derive(Clone, Debug, clap::Args)]
pub struct DraftArgs {
    /// Draft with this bundle, a smaller model with the same tokenizer, or with `mtp`, the bundle's own layer
    /// (converted with `draft: mtp`); the output stays the same
    #[arg(long, value_name = "BUNDLE")]
    draft: Option<PathBuf>,
    /// Maximum number of draft tokens per step
    #[arg(long, value_name = "N", default_value_t = 4, requires = "draft", value_parser = draft_tokens)]
    draft_tokens: usize,
}

/// Value of `--draft` for the bundle's own layer.
const OWN_LAYER: &str = "mtp";

/// Parses a number of draft tokens.
fn draft_tokens(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|count| (1..=64).contains(count)).ok_or_else(|| "expected a number from 1 to 64".into())
}

impl DraftArgs {
    /// Opens the draft model for `model`; returns it with the maximum number of draft tokens.
    ///
    /// # Errors
    /// If the draft can't be opened, doesn't generate text, or has another vocabulary.
    pub fn load(&self, runner: &Runner, model: &LoadedModel) -> Result<Option<(Arc<LoadedModel>, usize)>> {
        let Some(folder) = &self.draft else { return Ok(None) };
        if folder.as_os_str() == OWN_LAYER {
            let Some(layer) = model.draft_layer()? else {
                let problem = format!("{} has no draft layer", model.folder().display());
                let help = "convert the model with `--set draft=mtp`, or give --draft the bundle of a smaller model";
                return Err(UsageError::new(problem, help).into());
            };
            return Ok(Some((layer, self.draft_tokens)));
        }
        let draft = runner.another(folder).load()?;
        draft.continues_texts()?;
        let vocabulary = |model: &LoadedModel| Tokenizer::of(model.bundle(), model.folder()).ok();
        if let (Some(own), Some(other)) = (vocabulary(model), vocabulary(&draft)) {
            let common = 0..own.len().min(other.len()) as u32;
            let differs = |id: &u32| own.token_bytes(*id) != other.token_bytes(*id);
            if let Some(token) = common.into_iter().find(differs) {
                let problem = format!(
                    "{}: token {token} differs from the model's, so that no draft would be accepted",
                    folder.display()
                );
                let help = "--draft takes a smaller model of the same family, with the same tokenizer";
                return Err(UsageError::new(problem, help).into());
            }
        }
        Ok(Some((draft, self.draft_tokens)))
    }
}
