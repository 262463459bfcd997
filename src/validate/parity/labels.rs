//! Token classifiers: labels of a text, in windows of every size.

use std::collections::BTreeSet;

use super::Comparison;
use crate::measure::{LogitMeasures, RowMeasures};
use crate::trial::not_run;
use crate::verdict::Check;
use anec_base::Result;
use anec_bundle::{Stage, TokenCount, WHOLE_TEXT};
use anec_runtime::Hidden;
use anec_runtime::classify::windows::Windows;

impl Comparison<'_> {
    /// Compares the labels in as few calls as possible, in the smallest windows, and in sizes between.
    pub(super) fn labels(&self, checks: &mut Vec<Check>) -> Result<()> {
        let mut first: Option<Vec<f32>> = None;
        for size in std::iter::once(None).chain(self.window_sizes().into_iter().map(Some)) {
            let name = size.map_or("largest windows".to_owned(), |size| format!("windows of {size}"));
            let answer = Windows::new(&self.candidate.model, size, Hidden::No)
                .and_then(|windows| windows.label(&self.golden.tokens));
            match answer {
                Ok(answer) => {
                    let measures =
                        LogitMeasures::of(&self.rows(&answer.logits), &self.golden.logits, self.golden.vocab_size);
                    checks.push(self.logits_check(&name, &measures));
                    first.get_or_insert(answer.logits);
                }
                Err(error) => checks.push(not_run(self.subject(&name), error)?),
            }
        }
        if let Some(first) = first {
            let golden = self.golden;
            let rows = RowMeasures::of_all(&self.rows(&first), &golden.logits, golden.vocab_size);
            checks.push(self.positions(&rows, &LogitMeasures::over(&rows), self.tokenizer()?.as_ref()));
            checks.extend(self.vocabulary(&first));
        }
        Ok(())
    }

    fn window_sizes(&self) -> BTreeSet<u64> {
        let bundle = self.candidate.model.bundle();
        // a text that must fit into one call has no windows
        let in_windows = bundle.model.classification().filter(|found| found.label_set.band != WHOLE_TEXT);
        let Some(classification) = in_windows else { return BTreeSet::new() };
        let least = 2 * classification.halo + 1;
        let layers = bundle.functions.iter().filter(|entry| matches!(entry.stage, Stage::Layers { .. }));
        let sizes = layers.flat_map(|entry| match entry.tokens {
            TokenCount::Fixed(size) => vec![size],
            TokenCount::Range(lower, upper) => vec![lower.max(least), (least + upper) / 2],
        });
        sizes.filter(|size| *size >= least).collect()
    }
}
