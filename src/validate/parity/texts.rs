//! All texts of a golden, each from its start, in the largest calls: every position, and the perplexity.

use std::ops::Range;

use indexmap::IndexMap;

use super::Comparison;
use crate::measure::{LogitMeasures, RowMeasures};
use crate::perplexity::{loss, word_perplexity, words};
use crate::verdict::{Check, Position, listed};
use anec_base::Result;
use anec_runtime::{Chunking, ForwardOptions, Tokenizer};

/// Minimum number of predicted tokens for a perplexity; losses of single tokens vary too much.
const MIN_PREDICTED: usize = 12;

/// Results of the candidate for the texts.
#[derive(Default)]
struct TextResults {
    /// Comparison of each row of the golden.
    rows: Vec<RowMeasures>,
    /// Negative log likelihood of each token in nats; NaN for the first token of a text.
    losses: Vec<f64>,
}

impl Comparison<'_> {
    /// Compares every text. The logits of the first are those of the largest calls.
    pub(super) fn all_texts(&self, first: &[f32], checks: &mut Vec<Check>) -> Result<()> {
        let golden = self.texts;
        let mut found = TextResults::default();
        for (index, (_, span)) in golden.spans().into_iter().enumerate() {
            if index == 0 {
                self.add(&mut found, span, first);
            } else {
                let tokens = &golden.tokens[span.clone()];
                let mut session = self.candidate.model.start(tokens.len() as u64)?;
                let logits = session.forward(tokens, &ForwardOptions::all(Chunking::Largest))?.logits;
                self.add(&mut found, span, &logits);
            }
        }
        let tokenizer = self.tokenizer()?;
        let measures = LogitMeasures::over(&found.rows);
        if golden.texts.len() > 1 {
            checks.push(self.logits_check(&format!("{} texts", golden.texts.len()), &measures));
        }
        checks.push(self.positions(&found.rows, &measures, tokenizer.as_ref()));
        checks.extend(self.perplexity(&found.losses, tokenizer.as_ref())?);
        Ok(())
    }

    /// Adds the logits of one text.
    fn add(&self, found: &mut TextResults, span: Range<usize>, logits: &[f32]) {
        let (golden, width) = (self.texts, self.texts.vocab_size);
        let row = |position: usize| &logits[(position - span.start) * width..(position - span.start + 1) * width];
        for (position, reference) in golden.positions.iter().zip(golden.logits.chunks_exact(width)) {
            if span.contains(position) {
                found.rows.push(RowMeasures::of(row(*position), reference));
            }
        }
        found.losses.push(f64::NAN);
        let predicted = span.clone().skip(1);
        found.losses.extend(predicted.map(|position| {
            // the golden's tokens are within its rows
            loss(row(position - 1), golden.tokens[position]).unwrap_or(f64::NAN)
        }));
    }

    /// Checks single positions, which a mean would hide. A position far from the golden is named.
    pub(super) fn positions(
        &self,
        rows: &[RowMeasures],
        measures: &LogitMeasures,
        tokenizer: Option<&Tokenizer>,
    ) -> Check {
        let golden = self.texts;
        let spans = golden.spans();
        let limits = self.thresholds;
        let place = |row: usize| {
            let position = golden.positions[row];
            let (text, span) = spans.iter().find(|(_, span)| span.contains(&position)).cloned().unwrap_or_default();
            let RowMeasures { cosine, kl, agrees, .. } = rows[row];
            let (text, token) = (text.to_owned(), golden.tokens[position]);
            Position { text, position: position - span.start, token, cosine, kl, top1: agrees }
        };
        let positions: Vec<Position> = (0..rows.len()).map(place).collect();
        let name = |at: &Position| {
            let text = if at.text.is_empty() { String::new() } else { format!("{}, ", at.text) };
            let written = tokenizer.map(|tokenizer| tokenizer.decode(&[at.token], true).unwrap_or_default());
            let written = written.map_or_else(String::new, |written| format!(" {written:?}"));
            format!("{text}position {}, token {}{written}: cosine {:.5}", at.position, at.token, at.cosine)
        };
        let mut low: Vec<&Position> = positions.iter().filter(|at| !(at.cosine >= limits.p1)).collect();
        // NaN first
        low.sort_by(|a, b| b.cosine.is_nan().cmp(&a.cosine.is_nan()).then(a.cosine.total_cmp(&b.cosine)));
        let named: Vec<String> = low.iter().map(|at| name(at)).collect();
        let below = (!low.is_empty()).then(|| {
            let (count, all) = (low.len(), rows.len());
            format!("{count} of {all} positions are below {}: {}", limits.p1, listed(&named).unwrap_or_default())
        });
        let failed = !(measures.cosine >= limits.cosine);
        let claim = "no position is far from the golden";
        let mut check = Check::of(self.subject("positions"), claim, below.clone().filter(|_| failed));
        check.detail = below.or_else(|| Some(format!("the worst is {}", name(positions.get(measures.worst)?))));
        check.measured.extend(
            [
                ("worst", measures.cosine),
                ("p1", measures.p1),
                ("median", measures.median),
                ("kl", measures.kl),
                ("top1", measures.top1),
                ("below", low.len() as f64),
            ]
            .map(|(name, value)| (name.to_owned(), value)),
        );
        Check { positions, ..check }
    }

    /// Compares the perplexity of the golden's texts. Errors of single positions can cancel out, a systematic one
    /// can't.
    fn perplexity(&self, losses: &[f64], tokenizer: Option<&Tokenizer>) -> Result<Option<Check>> {
        let reference = self.texts.losses();
        if reference.len() < MIN_PREDICTED {
            return Ok(None);
        }
        let count = reference.len() as f64;
        let ours: f64 = reference.iter().map(|(position, _)| losses[*position]).sum();
        let theirs: f64 = reference.iter().map(|(_, loss)| loss).sum();
        let [perplexity, golden] = [ours, theirs].map(|sum| (sum / count).exp());
        let difference = perplexity / golden - 1.0;
        let limit = self.thresholds.perplexity;
        // `!(<=)` is true for NaN
        let problem = (!(difference.abs() <= limit)).then(|| {
            let (found, expected) = (100.0 * difference, 100.0 * limit);
            format!(
                "{perplexity:.4}, the golden's is {golden:.4}: {found:+.2} %, expected at most {expected} % either way"
            )
        });
        let mut check = Check::of(self.subject("perplexity"), "the text is as likely as it is for the golden", problem);
        let mut measured: IndexMap<&str, f64> =
            [("perplexity", perplexity), ("golden_perplexity", golden), ("difference", difference), ("tokens", count)]
                .into();
        // words can only be counted if every token is predicted
        let starts = self.texts.spans().len();
        if let Some(tokenizer) = tokenizer.filter(|_| reference.len() + starts == self.texts.tokens.len()) {
            let texts =
                self.texts.spans().into_iter().map(|(_, span)| tokenizer.decode(&self.texts.tokens[span], false));
            let words: usize = texts.map(|text| Ok(words(&text?))).sum::<Result<_>>()?;
            measured.insert("word_perplexity", word_perplexity(ours, words));
            measured.insert("golden_word_perplexity", word_perplexity(theirs, words));
            measured.insert("words", words as f64);
        }
        check.measured = measured.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        check.measured.retain(|_, value| *value != f64::INFINITY);
        Ok(Some(check))
    }

    /// Tokenizer of the bundle, if it has one.
    pub(super) fn tokenizer(&self) -> Result<Option<Tokenizer>> {
        let model = &self.candidate.model;
        let there = model.bundle().tokenizer.contains_key("tokenizer");
        Ok(there.then(|| Tokenizer::of(model.bundle(), model.folder())).transpose()?)
    }
}
