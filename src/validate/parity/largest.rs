//! Heads that give the largest logits: their tokens against the logits, or, on a backend that shows no others, against
//! the golden.

use super::{CallPlan, Comparison, chunkings};
use crate::trial::not_run;
use crate::verdict::Check;
use anec_base::Result;
use anec_runtime::{ForwardOptions, ForwardOutput, TokenSession, sampling};

impl Comparison<'_> {
    /// Returns the likeliest token of each position.
    pub(super) fn likeliest(&self, output: &ForwardOutput) -> Vec<u32> {
        match self.candidate.model.largest_logits().filter(|_| !output.tokens.is_empty()) {
            Some(k) => output.tokens.iter().step_by(k).copied().collect(),
            None => output.logits.chunks_exact(self.golden.vocab_size).map(sampling::argmax).collect(),
        }
    }

    /// Compares the largest logits and their tokens with all logits, computed by the same calls.
    pub(super) fn largest(
        &self,
        plan: &CallPlan,
        logits: &[f32],
        session: &mut TokenSession,
        checks: &mut Vec<Check>,
    ) -> Result<()> {
        let Some(k) = self.candidate.model.largest_logits() else { return Ok(()) };
        let output = session.forward(&self.golden.tokens, &of_largest(plan))?;
        let rows = output.logits.chunks_exact(k).zip(output.tokens.chunks_exact(k));
        let differs = |(row, (values, tokens)): (&[f32], (&[f32], &[u32]))| {
            let mut order: Vec<u32> = (0..row.len() as u32).collect();
            order.sort_by(|a, b| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b)));
            order[..k] != *tokens || tokens.iter().zip(values).any(|(token, value)| row[*token as usize] != *value)
        };
        let wrong = logits.chunks_exact(self.golden.vocab_size).zip(rows).position(differs);
        let problem = wrong.map(|position| format!("not those of the largest logits at position {position}"));
        checks.push(Check::of(
            self.subject("largest logits"),
            "the head gives the tokens of the largest logits",
            problem,
        ));
        Ok(())
    }

    /// Compares the likeliest tokens with the golden's for every call size; the logits stay unproven.
    pub(super) fn by_largest(&self, checks: &mut Vec<Check>) -> Result<()> {
        let mut session = self.start()?;
        let plans = chunkings(&session);
        self.forced(&plans, &mut session, checks)?;
        for plan in &plans {
            match self.after_reset(&mut session, |session| session.forward(&self.golden.tokens, &of_largest(plan)))? {
                Ok(output) => checks.push(self.same_tokens(&plan.name, &output)),
                Err(error) => checks.push(not_run(self.subject(&plan.name), error)?),
            }
        }
        let reason = "the bundle's head gives only the largest logits here; the CPU executor shows all of them, and so \
                      does a bundle that is converted with `lm_head.logits: true`";
        checks.push(Check::unproven(self.subject("tokens"), "logits agree with the golden", reason));
        self.attempt("greedy continuation", &mut session, checks, |_, checks| self.greedy(None, checks))
    }

    /// Compares the likeliest tokens with the golden's.
    fn same_tokens(&self, name: &str, output: &ForwardOutput) -> Check {
        let (golden, found) = (self.golden, self.likeliest(output));
        let rows = golden.positions.iter().zip(golden.logits.chunks_exact(golden.vocab_size));
        let same = rows.filter(|(position, row)| found.get(**position) == Some(&sampling::argmax(row))).count();
        let (share, limit) = (same as f64 / golden.positions.len().max(1) as f64, self.thresholds.top1);
        // tolerate the standard error of the share, which matters for few positions
        let chance = (limit * (1.0 - limit) / golden.positions.len().max(1) as f64).sqrt();
        let problem = (share < limit - chance)
            .then(|| format!("top-1 agreement {share:.3}, expected at least {limit} ± {chance:.3}"));
        let mut check = Check::of(self.subject(name), "the likeliest tokens are the golden's", problem);
        check.measured.insert("top1".into(), share);
        check
    }
}

fn of_largest(plan: &CallPlan) -> ForwardOptions {
    ForwardOptions::all(plan.chunking.clone()).largest(true)
}
