//! Logits against a golden's: as a whole, place by place, token by token, and by what they make of the text.

use super::{Comparison, measured};
use crate::measure::{self, LogitMeasures};
use crate::perplexity::loss;
use crate::verdict::Check;

/// Predicted tokens from which on a perplexity says something: the loss of single tokens may rightly differ.
const PREDICTED: usize = 12;

impl Comparison<'_> {
    /// The rows that the golden has logits of.
    pub(super) fn rows(&self, logits: &[f32]) -> Vec<f32> {
        let width = self.golden.vocab_size;
        let mut rows = Vec::with_capacity(self.golden.positions.len() * width);
        self.golden.positions.iter().for_each(|p| rows.extend_from_slice(&logits[p * width..(p + 1) * width]));
        rows
    }

    pub(super) fn logits_check(&self, name: &str, measures: &LogitMeasures) -> Check {
        let limits = self.thresholds;
        let [low, high] = measures.norm_ratio;
        let mut problems = Vec::new();
        // written so that NaN is a problem
        if !(measures.cosine >= limits.cosine) {
            problems.push(format!("cosine {:.5}, expected at least {}", measures.cosine, limits.cosine));
        }
        if !(measures.top1 >= limits.top1) {
            problems.push(format!("top-1 agreement {:.3}, expected at least {}", measures.top1, limits.top1));
        }
        if !(low >= limits.norm_ratio[0] && high <= limits.norm_ratio[1]) {
            let [least, most] = limits.norm_ratio;
            problems.push(format!("norm ratio from {low:.4} to {high:.4}, expected {least} to {most}"));
        }
        let problem = (!problems.is_empty()).then(|| problems.join("; "));
        let check = Check::of(self.subject(name), "logits agree with the golden", problem);
        Check { measured: measured(measures), ..check }
    }

    /// The first tokens, one in the middle and the last: what is wrong in one place only drowns in a mean, and the
    /// worst of all places doesn't say where.
    pub(super) fn places(&self, logits: &[f32]) -> Option<Check> {
        let golden = self.golden;
        let (first, last) = (*golden.positions.first()?, *golden.positions.last()?);
        let middle = golden.positions[golden.positions.len() / 2];
        let mut measured = indexmap::IndexMap::new();
        let mut problems = Vec::new();
        for position in [first, first + 1, middle, last] {
            let Ok(row) = golden.positions.binary_search(&position) else { continue };
            let width = golden.vocab_size;
            let found = &logits[position * width..(position + 1) * width];
            let cosine = measure::cosine(found, &golden.logits[row * width..(row + 1) * width]);
            let new = measured.insert(format!("cosine_at_{position}"), cosine).is_none();
            if new && !(cosine >= self.thresholds.cosine) {
                problems.push(format!(
                    "position {position}: cosine {cosine:.5}, expected at least {}",
                    self.thresholds.cosine
                ));
            }
        }
        let problem = (!problems.is_empty()).then(|| problems.join("; "));
        let check = Check::of(self.subject("places"), "the first, middle and last positions agree", problem);
        Some(Check { measured, ..check })
    }

    /// Every row of the vocabulary over all positions: one row of the LM head that is lost or wrong hardly changes the
    /// cosine of thousands.
    pub(super) fn vocabulary(&self, logits: &[f32]) -> Option<Check> {
        let (found, width) = (self.rows(logits), self.golden.vocab_size);
        let reference = &self.golden.logits;
        let mut squares = vec![[0f64; 2]; width];
        for (found, reference) in found.chunks_exact(width).zip(reference.chunks_exact(width)) {
            for ((sums, found), reference) in squares.iter_mut().zip(found).zip(reference) {
                sums[0] += (f64::from(*found) - f64::from(*reference)).powi(2);
                sums[1] += f64::from(*reference).powi(2);
            }
        }
        let mean = squares.iter().map(|sums| sums[1]).sum::<f64>() / width as f64;
        let error = |row: usize| (squares[row][0] / mean).sqrt();
        let worst = (0..width).max_by(|a, b| error(*a).total_cmp(&error(*b)))?;
        let limit = self.thresholds.row_error;
        let problem = (!(error(worst) <= limit)).then(|| {
            format!(
                "the logits of token {worst} are {:.3} off, relative to all; at most {limit} is expected{}",
                error(worst),
                self.piece_of(worst as u64)
            )
        });
        let mut check = Check::of(self.subject("tokens"), "the logits of every token agree", problem);
        check.measured.insert("row_error".into(), error(worst));
        Some(check)
    }

    /// The package that gives the logits of a token.
    fn piece_of(&self, token: u64) -> String {
        let model = &self.candidate.model;
        let steps = model.plan().routes.iter().flat_map(|route| &route.head);
        let mut holding = steps.filter(|step| (step.part.start..step.part.end).contains(&token));
        let function = holding.find_map(|step| step.functions().next());
        function.map_or_else(String::new, |index| {
            let entry = &model.bundle().functions[index];
            format!(" ({}, {})", entry.package, entry.function)
        })
    }

    /// The perplexity of the golden's text: what it is for a user that logits differ. Errors of single positions that
    /// cancel out leave it alone, a small one that is always to the same side doesn't.
    pub(super) fn perplexity(&self, logits: &[f32]) -> Option<Check> {
        let reference = self.golden.losses();
        if reference.len() < PREDICTED {
            return None;
        }
        let width = self.golden.vocab_size;
        let ours = reference.iter().map(|(position, _)| {
            let row = &logits[(position - 1) * width..position * width];
            loss(row, self.golden.tokens[*position]).unwrap_or(f64::NAN)
        });
        let count = reference.len() as f64;
        let ours = (ours.sum::<f64>() / count).exp();
        let golden = (reference.iter().map(|(_, loss)| loss).sum::<f64>() / count).exp();
        let difference = ours / golden - 1.0;
        let limit = self.thresholds.perplexity;
        // written so that NaN is a problem
        let problem = (!(difference.abs() <= limit)).then(|| {
            let (found, expected) = (100.0 * difference, 100.0 * limit);
            format!("{ours:.4}, the golden's is {golden:.4}: {found:+.2} %, expected at most {expected} % either way")
        });
        let mut check = Check::of(self.subject("perplexity"), "the text is as likely as it is for the golden", problem);
        check.measured.extend([
            ("perplexity".to_owned(), ours),
            ("golden_perplexity".to_owned(), golden),
            ("difference".to_owned(), difference),
            ("tokens".to_owned(), count),
        ]);
        Some(check)
    }
}
