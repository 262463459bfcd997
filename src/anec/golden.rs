//! Goldens from a source's own weights.

use std::path::PathBuf;
use std::sync::Arc;

use crate::converter::{beside, unquantized};
use crate::scratch::Scratch;
use crate::session::Prompt;
use anec_base::{Progress, Result};
use anec_bundle::Task;
use anec_manifest::{Manifest, Numerics};
use anec_runtime::classify::windows::Windows;
use anec_runtime::{Finish, ForwardOptions, GenerationRequest, Hidden, LoadedModel, RuntimeError};
use anec_validate::parity::tokenization;
use anec_validate::perplexity::loss;
use anec_validate::{Golden, GoldenText, Greedy};

/// Builder of a golden from a source's unquantized weights in f32.
///
/// Such a golden shows what quantization and fp16 cost. It can't show an error in the graph, because the same graph
/// computes it, and its metadata says so.
#[derive(Clone, Debug)]
pub struct GoldenBuilder {
    manifest: Manifest,
    hidden: bool,
    greedy: usize,
    beside: Option<PathBuf>,
    progress: Progress,
}

impl GoldenBuilder {
    /// Creates a builder for the manifest's source.
    pub fn new(manifest: Manifest) -> Self {
        // hidden states in the source's own scale
        let manifest = Manifest { numerics: Numerics::default(), ..manifest };
        GoldenBuilder { manifest, hidden: false, greedy: 0, beside: None, progress: Progress::default() }
    }

    /// Includes the hidden states between the layers.
    pub fn hidden(mut self, hidden: bool) -> Self {
        self.hidden = hidden;
        self
    }

    /// Includes this number of greedily generated tokens.
    pub fn greedy(mut self, tokens: usize) -> Self {
        self.greedy = tokens;
        self
    }

    /// Sets the file beside which a temporary fp16 bundle is written. Default: the current folder.
    pub fn beside(mut self, file: impl Into<PathBuf>) -> Self {
        self.beside = Some(file.into());
        self
    }

    /// Sets the receiver of progress events.
    pub fn progress(mut self, progress: Progress) -> Self {
        self.progress = progress;
        self
    }

    /// Computes the golden of a text.
    ///
    /// # Errors
    /// If the source can't be converted, or the text doesn't fit.
    pub fn compute(&self, text: impl Into<Prompt>) -> Result<Golden> {
        let scratch = Scratch::within(&beside(self.beside.as_deref()))?;
        let model = unquantized(&self.manifest, scratch.path(), &self.progress)?;
        let text = text.into();
        let texts: Vec<_> = text.text().map(|text| ("text".to_owned(), text.to_owned())).into_iter().collect();
        let tokens = text.written_tokens(&model)?;
        let mut golden = self.compute_with(&model, tokens)?;
        golden.metadata.extend(tokenization::record(model.bundle(), model.folder(), &texts)?);
        Ok(golden)
    }

    /// Computes the golden of several named texts. Each is processed alone; the greedy continuation is that of the
    /// first.
    ///
    /// # Errors
    /// Returns any error from [`GoldenBuilder::compute`].
    pub fn compute_texts(
        &self,
        texts: impl IntoIterator<Item = (impl Into<String>, impl Into<Prompt>)>,
    ) -> Result<Golden> {
        let scratch = Scratch::within(&beside(self.beside.as_deref()))?;
        let model = unquantized(&self.manifest, scratch.path(), &self.progress)?;
        let mut all: Option<Golden> = None;
        let mut written = Vec::new();
        for (name, text) in texts {
            let (name, text): (String, Prompt) = (name.into(), text.into());
            written.extend(text.text().map(|text| (name.clone(), text.to_owned())));
            let tokens = text.written_tokens(&model)?;
            let greedy = if all.is_some() { 0 } else { self.greedy };
            let golden = GoldenBuilder { greedy, ..self.clone() }.compute_with(&model, tokens)?;
            all = Some(match all {
                None => Golden { texts: vec![GoldenText { name, start: 0 }], ..golden },
                Some(all) => all.followed_by(name, golden),
            });
        }
        let mut all = all.ok_or(RuntimeError::NoTokens)?;
        all.metadata.extend(tokenization::record(model.bundle(), model.folder(), &written)?);
        Ok(all)
    }

    fn compute_with(&self, model: &Arc<LoadedModel>, tokens: Vec<u32>) -> Result<Golden> {
        let hidden = if self.hidden { Hidden::BetweenLayers } else { Hidden::No };
        let answer = match model.bundle().model.band() {
            Some(_) => Windows::new(model, None, hidden)?.label(&tokens)?,
            None => {
                let ask = ForwardOptions::default().recording(hidden);
                model.start(tokens.len() as u64)?.forward(&tokens, &ask)?
            }
        };
        let greedy = match self.greedy {
            0 => None,
            max_tokens => {
                let stops = model.end_tokens();
                let prompt = tokens.clone();
                let request = GenerationRequest { prompt, max_tokens, stops, ..GenerationRequest::default() };
                let generation = request.start(model)?.run()?;
                if generation.finish == Finish::Context {
                    let count = generation.ids.len();
                    self.progress.note(&format!(
                        "note: the context is full after {count} of {max_tokens} tokens; a larger `context` holds more"
                    ));
                }
                Some(Greedy { prompt: tokens.clone(), ids: generation.ids })
            }
        };
        let facts = &model.bundle().model;
        let vocab_size = facts.head_rows() as usize;
        let rows = answer.logits.chunks_exact(vocab_size).zip(tokens.iter().skip(1));
        // a classifier's logits don't predict the next token
        let losses = (facts.task == Task::TextGeneration)
            .then(|| rows.filter_map(|(row, token)| Some(loss(row, *token)? as f32)));
        let losses = losses.map(Iterator::collect);
        Ok(Golden {
            positions: (0..tokens.len()).collect(),
            tokens,
            texts: Vec::new(),
            logits: answer.logits,
            vocab_size,
            losses,
            hidden: answer.hidden.into_iter().enumerate().collect(),
            greedy,
            metadata: self.metadata(model).into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
        })
    }
    /// Metadata of the golden.
    /// What the golden says of itself.
    fn metadata(&self, model: &LoadedModel) -> [(&'static str, String); 6] {
        let digests: Vec<String> =
            model.bundle().source.files.iter().map(|file| format!("{} {}", file.digest, file.file)).collect();
        [
            ("reference", "anec".to_owned()),
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
            ("kind", "self-made".to_owned()),
            (
                "case",
                "weights of the source in fp16, not quantized, through anec's own graph and executor in f32".to_owned(),
            ),
            ("source", self.manifest.source.clone().unwrap_or_default()),
            ("source_files", digests.join("\n")),
        ]
    }
}
