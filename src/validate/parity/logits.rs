//! Comparison of logits with a golden's, as a whole and by token.

use std::borrow::Cow;

use super::{Comparison, measured};
use crate::measure::LogitMeasures;
use crate::verdict::Check;
use anec_kernels::distance::add_columns;

impl Comparison<'_> {
    /// Rows for which the golden has logits.
    pub(super) fn rows<'l>(&self, logits: &'l [f32]) -> Cow<'l, [f32]> {
        let width = self.golden.vocab_size;
        // usually all rows
        if self.golden.positions.iter().copied().eq(0..logits.len() / width.max(1)) {
            return Cow::Borrowed(logits);
        }
        let mut rows = Vec::with_capacity(self.golden.positions.len() * width);
        self.golden.positions.iter().for_each(|p| rows.extend_from_slice(&logits[p * width..(p + 1) * width]));
        Cow::Owned(rows)
    }

    pub(super) fn logits_check(&self, name: &str, measures: &LogitMeasures) -> Check {
        let limits = self.thresholds;
        let [low, high] = measures.norm_ratio;
        let mut problems = Vec::new();
        // `!(>=)` is true for NaN
        if !(measures.cosine >= limits.cosine) {
            problems.push(format!("cosine {:.5}, expected at least {}", measures.cosine, limits.cosine));
        } else if !(measures.p1 >= limits.p1) {
            let (found, limit) = (measures.p1, limits.p1);
            problems
                .push(format!("cosine {found:.5} at ninety-nine of a hundred positions, expected at least {limit}"));
        }
        if !(measures.kl <= limits.kl) {
            problems.push(format!("divergence {:.5} nats, expected at most {}", measures.kl, limits.kl));
        }
        // tolerate the standard error of the share, which matters for few positions
        let chance = (limits.top1 * (1.0 - limits.top1) / measures.rows as f64).sqrt();
        if !(measures.top1 >= limits.top1 - chance) {
            let (found, limit, count) = (measures.top1, limits.top1, measures.rows);
            problems.push(format!(
                "top-1 agreement {found:.3}, expected at least {limit} ± {chance:.3} ({count} positions)"
            ));
        }
        if !(low >= limits.norm_ratio[0] && high <= limits.norm_ratio[1]) {
            let [least, most] = limits.norm_ratio;
            problems.push(format!("norm ratio from {low:.4} to {high:.4}, expected {least} to {most}"));
        }
        let problem = (!problems.is_empty()).then(|| problems.join("; "));
        let check = Check::of(self.subject(name), "logits agree with the golden", problem);
        Check { measured: measured(measures), ..check }
    }

    /// Compares each vocabulary row over all positions: a wrong row of the LM head hardly changes the cosine of
    /// thousands.
    pub(super) fn vocabulary(&self, logits: &[f32]) -> Option<Check> {
        let (found, width) = (self.rows(logits), self.golden.vocab_size);
        let mut squares = vec![[0f64; 2]; width];
        add_columns(&found, &self.golden.logits, &mut squares);
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

    /// Package that computes the logits of a token.
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
}
