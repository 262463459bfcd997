//! `--draft`: a smaller model that guesses.

use std::path::PathBuf;
use std::sync::Arc;

use super::model::Runner;
use super::usage::UsageError;
use anec::base::Result;
use anec::runtime::{LoadedModel, Tokenizer};

/// A smaller model that guesses.
#[derive(Debug, clap::Args)]
pub struct DraftArgs {
    /// Bundle of a smaller model with the same tokenizer, which guesses tokens that are checked in one call; the text stays the
    /// same. `mtp`: the layer for that in the bundle itself, if it was converted with `draft: mtp`
    #[arg(long, value_name = "BUNDLE")]
    draft: Option<PathBuf>,
    /// Most tokens that it guesses at a time
    #[arg(long, value_name = "N", default_value_t = 4, requires = "draft", value_parser = guesses)]
    draft_tokens: usize,
}

/// What names the layer of the bundle itself.
const OWN_LAYER: &str = "mtp";

/// A number of guesses.
fn guesses(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|count| (1..=64).contains(count)).ok_or_else(|| "it has to be from 1 to 64".into())
}

impl DraftArgs {
    /// The model and its most tokens, if there is one; `model` is what it guesses for.
    ///
    /// # Errors
    /// When it can't be opened, doesn't continue texts, or has other tokens.
    pub fn load(&self, runner: &Runner, model: &LoadedModel) -> Result<Option<(Arc<LoadedModel>, usize)>> {
        let Some(folder) = &self.draft else { return Ok(None) };
        if folder.as_os_str() == OWN_LAYER {
            let Some(layer) = model.draft_layer()? else {
                let problem = format!("{} has no layer that guesses tokens", model.folder().display());
                let help = "convert it with `--set draft=mtp`, or give --draft the bundle of a smaller model";
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
                    "{}: token {token} is another one there, so that what it guesses would never be right",
                    folder.display()
                );
                let help = "--draft takes a smaller model of the same family, with the same tokenizer";
                return Err(UsageError::new(problem, help).into());
            }
        }
        Ok(Some((draft, self.draft_tokens)))
    }
}
