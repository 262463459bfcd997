//! The parity gate: compares the bundle with a golden, for every call size.
//!
//! | module | holds |
//! |---|---|
//! | `logits` | comparison of logits: rows and tokens |
//! | `largest` | heads that give the largest logits |
//! | [`tokenization`] | tokenizer and chat template |
//! | `texts` | all texts of a golden: positions and perplexity |
//! | `labels` | token classifiers, in windows of every size |
//! | `alone` | each function and layer on the golden's hidden states |

mod alone;
mod labels;
mod largest;
mod logits;
#[cfg(test)]
mod tests;
mod texts;
pub mod tokenization;

use std::path::Path;
use std::sync::Arc;

use indexmap::IndexMap;

use super::golden::{Golden, GoldenError, Greedy};
use super::measure::{LogitMeasures, RowMeasures};
use super::thresholds::ParityThresholds;
use super::trial::not_run;
use super::verdict::{Check, GateReport, Verdict};
use anec_base::Result;
use anec_runtime::{Chunking, ForwardOptions, Hidden, LoadedModel, TokenSession};

/// Name of the gate.
pub const GATE: &str = "parity";

/// Minimum length of a golden: with fewer tokens attention and RoPE are hardly tested.
const MIN_TOKENS: usize = 4;

/// Bundle on a backend, with a distinguishing name: `f32`, `f16`.
pub struct Candidate {
    /// Name of the precision.
    pub name: String,
    /// Model.
    pub model: Arc<LoadedModel>,
    /// Whether the contribution of single layers to the residual stream is compared. Requires a backend that shows
    /// inner values and computes in f32: rounding a large stream can exceed a layer's contribution.
    pub layers: bool,
}

/// Compares candidates with a golden: logits in calls of every size and of mixed sizes, each after a reset; single
/// functions and layers, if the golden has hidden states; the perplexity of its text; the greedy continuation. All call
/// sizes are tried with the golden's first text, and all texts with the largest calls.
///
/// # Errors
/// If the golden isn't of this model or its text doesn't fit the context. A function that can't be run fails the gate.
pub fn parity(candidates: &[Candidate], golden: &Golden, thresholds: &ParityThresholds) -> Result<GateReport> {
    let mut checks = match candidates.first() {
        Some(Candidate { model, .. }) => tokenization::checks(model.bundle(), model.folder(), golden)?,
        None => Vec::new(),
    };
    let first_text = (golden.texts.len() > 1).then(|| golden.first_text());
    for candidate in candidates {
        check_golden(&candidate.model, golden)?;
        if golden.positions.is_empty() {
            continue;
        }
        let comparison =
            Comparison { candidate, golden: first_text.as_ref().unwrap_or(golden), texts: golden, thresholds };
        if golden.tokens.len() < MIN_TOKENS {
            let reason = format!("the golden has {} tokens, at least {MIN_TOKENS} are needed", golden.tokens.len());
            checks.push(Check::unproven(&candidate.name, "tokens see those before them as in the golden", reason));
        }
        match candidate.model.bundle().model.band() {
            Some(_) => comparison.labels(&mut checks)?,
            None => comparison.all(&mut checks)?,
        }
    }
    Ok(GateReport::new(GATE, checks))
}

fn check_golden(model: &LoadedModel, golden: &Golden) -> Result<()> {
    let facts = &model.bundle().model;
    let wrong = |problem: String| GoldenError { path: "of the parity gate".into(), problem };
    if golden.vocab_size as u64 != facts.head_rows() {
        let problem = format!("its vocabulary has {} tokens, the bundle's {}", golden.vocab_size, facts.head_rows());
        return Err(wrong(problem).into());
    }
    if let Some(token) = golden.tokens.iter().find(|token| u64::from(**token) >= facts.vocab_size) {
        return Err(wrong(format!("token {token} is outside the bundle's vocabulary of {}", facts.vocab_size)).into());
    }
    for (number, values) in &golden.hidden {
        if *number > facts.num_layers || values.len() as u64 != golden.tokens.len() as u64 * facts.hidden_size {
            let (layers, width) = (facts.num_layers, facts.hidden_size);
            let problem = format!("`hidden.{number}` isn't of a model of {layers} layers and hidden size {width}");
            return Err(wrong(problem).into());
        }
    }
    Ok(())
}

struct Comparison<'a> {
    candidate: &'a Candidate,
    /// First text of the golden.
    golden: &'a Golden,
    /// Whole golden.
    texts: &'a Golden,
    thresholds: &'a ParityThresholds,
}

impl Comparison<'_> {
    fn all(&self, checks: &mut Vec<Check>) -> Result<()> {
        if !self.candidate.model.gives_logits() {
            return self.by_largest(checks);
        }
        let mut called = self.start()?;
        let plans = chunkings(&called);
        // forced runs come first, so that the golden's text follows another one in its session
        let mut forced = Vec::new();
        self.forced(&plans, &mut called, &mut forced)?;
        if let Some(whole) = self.calls(&plans, &mut called, checks)? {
            checks.extend(self.vocabulary(&whole.logits));
            let mut session = self.start()?;
            self.functions(&whole, &session, checks);
            self.attempt("largest logits", &mut session, checks, |session, checks| {
                self.largest(&whole.plan, &whole.logits, session, checks)
            })?;
            self.attempt("all texts", &mut session, checks, |_, checks| self.all_texts(&whole.logits, checks))?;
        }
        checks.extend(forced);
        // the session that repeated the largest calls already contains their text
        let mut last = Some(called);
        let mut session = self.start()?;
        self.attempt("last slots", &mut session, checks, |_, checks| self.end_of_context(checks))?;
        self.attempt("greedy continuation", &mut session, checks, |_, checks| self.greedy(last.take(), checks))?;
        checks.extend(self.suspect(checks));
        Ok(())
    }

    /// Session for a text of the golden's length.
    fn start(&self) -> Result<TokenSession> {
        self.candidate.model.start(self.golden.tokens.len() as u64)
    }

    fn subject(&self, what: &str) -> String {
        format!("{}, {what}", self.candidate.name)
    }

    /// Runs a part of the comparison. A function that can't be run is reported, and the other parts get a session with
    /// valid states.
    fn attempt(
        &self,
        what: &str,
        session: &mut TokenSession,
        checks: &mut Vec<Check>,
        part: impl FnOnce(&mut TokenSession, &mut Vec<Check>) -> Result<()>,
    ) -> Result<()> {
        if let Err(error) = part(session, checks) {
            checks.push(not_run(self.subject(what), error)?);
            *session = self.start()?;
        }
        Ok(())
    }

    /// Compares the logits for every call size. Returns the results of the largest calls, with the hidden states
    /// between functions. Those calls are repeated to check that a reset clears the session.
    fn calls(&self, plans: &[CallPlan], session: &mut TokenSession, checks: &mut Vec<Check>) -> Result<Option<Whole>> {
        let largest = plans.iter().rposition(|plan| !plan.mixed).unwrap_or(0);
        let mut whole = None;
        for (index, plan) in plans.iter().enumerate() {
            match self.after_reset(session, |session| self.whole_run(plan, index == largest, session))? {
                Ok(given) => {
                    checks.push(self.logits_check(&plan.name, &given.measures));
                    if !plan.mixed {
                        whole = Some((index, given));
                    }
                }
                Err(error) => checks.push(not_run(self.subject(&plan.name), error)?),
            }
        }
        let Some((index, mut given)) = whole else { return Ok(None) };
        if index != largest {
            // the logits of these calls weren't kept
            let mut session = self.start()?;
            given.logits =
                Some(session.forward(&self.golden.tokens, &ForwardOptions::all(plans[index].chunking.clone()))?.logits);
        }
        let whole =
            Whole { plan: plans[index].clone(), logits: given.logits.unwrap_or_default(), hidden: given.hidden };
        match self.after_reset(session, |session| self.whole_run(&plans[largest], true, session))? {
            Ok(again) => checks.push(self.reset(&whole, &again.logits.unwrap_or_default())),
            Err(error) => checks.push(not_run(self.subject("after a reset"), error)?),
        }
        Ok(Some(whole))
    }

    /// Runs `compute` in the session after a reset. After an error the session is replaced by a new one.
    fn after_reset<R>(
        &self,
        session: &mut TokenSession,
        compute: impl FnOnce(&mut TokenSession) -> Result<R>,
    ) -> Result<Result<R>> {
        let found = session.reset().and_then(|()| compute(session));
        if found.is_err() {
            *session = self.start()?;
        }
        Ok(found)
    }

    /// Runs the golden's text through the whole program; keeps the logits of all positions if `keeps_logits`.
    fn whole_run(&self, plan: &CallPlan, keeps_logits: bool, session: &mut TokenSession) -> Result<WholeRun> {
        let (golden, width) = (self.golden, self.golden.vocab_size);
        let ask = ForwardOptions::all(plan.chunking.clone()).recording(Hidden::BetweenFunctions);
        let mut pass = session.begin(&golden.tokens, &ask)?;
        let mut rows = vec![None; golden.positions.len()];
        let mut kept = keeps_logits.then(Vec::new);
        loop {
            let first = pass.done();
            let more = session.advance(&mut pass)?;
            let logits = pass.take_logits();
            let references = golden.logits.chunks_exact(width);
            for ((position, reference), measured) in golden.positions.iter().zip(references).zip(&mut rows) {
                if (first..pass.done()).contains(position) {
                    let row = &logits[(position - first) * width..(position + 1 - first) * width];
                    *measured = Some(RowMeasures::of(row, reference));
                }
            }
            if let Some(kept) = &mut kept {
                kept.extend(logits);
            }
            if !more {
                break;
            }
        }
        let rows: Vec<RowMeasures> = rows.into_iter().flatten().collect();
        let hidden = session.finish(pass)?.hidden;
        Ok(WholeRun { measures: LogitMeasures::over(&rows), logits: kept, hidden })
    }

    /// Compares the largest calls in a used session and in a new one.
    fn reset(&self, whole: &Whole, again: &[f32]) -> Check {
        let same = bytemuck::cast_slice::<_, u8>(again) == bytemuck::cast_slice::<_, u8>(&whole.logits);
        let problem = (!same).then(|| format!("{} gives other logits the second time", whole.plan.name));
        Check::of(&self.candidate.name, "a reset forgets the text before", problem)
    }

    /// Tests the last slots of the context: calls of every size against the next smaller one, as if zeros had come
    /// before. Goldens of that length would be too expensive; off-by-one errors of masks and slots show without.
    fn end_of_context(&self, checks: &mut Vec<Check>) -> Result<()> {
        let model = &self.candidate.model;
        let mut session = model.start(model.context())?;
        let sizes = anec_runtime::plan::sizes(&session.route().layers, session.limit());
        let width = self.golden.vocab_size;
        for pair in sizes.windows(2) {
            let (small, size) = (pair[0], pair[1]);
            if !size.is_multiple_of(small) && small != 1 && sizes[0] != 1 {
                continue;
            }
            // sizes that don't divide each other are compared with single tokens
            let base = if size.is_multiple_of(small) { small } else { 1 };
            let count = size.min(session.limit());
            let tokens: Vec<u32> = self.golden.tokens.iter().copied().cycle().take(count as usize).collect();
            let mut run = |size: u64| -> Result<Vec<f32>> {
                session.seek(session.limit() - count)?;
                Ok(session.forward(&tokens, &ForwardOptions::all(Chunking::Pattern(vec![size])))?.logits)
            };
            let (reference, found) = (run(base)?, run(size)?);
            let measures = LogitMeasures::of(&found, &reference, width);
            let subject = self.subject(&format!("T = {size}, last slots"));
            let claim = "at the end of the context, calls agree with smaller ones";
            let limit = self.thresholds.p1;
            let problem = (!(measures.p1 >= limit))
                .then(|| format!("cosine {:.5} to T = {base}, expected at least {limit}", measures.p1));
            let mut measured = measured(&measures);
            measured.retain(|name, _| matches!(name.as_str(), "cosine" | "max_abs" | "positions"));
            checks.push(Check { measured, ..Check::of(subject, claim, problem) });
        }
        Ok(())
    }

    /// Compares the golden's greedy continuation token by token. A few tokens may differ, because quantized weights can
    /// prefer the other of two almost equally likely tokens. Each token is judged after the golden's own tokens, so
    /// that a difference doesn't affect the following ones. `after` may already have computed the beginning.
    fn greedy(&self, after: Option<TokenSession>, checks: &mut Vec<Check>) -> Result<()> {
        let Some(Greedy { prompt, ids }) = self.golden.greedy.as_ref().filter(|greedy| !greedy.ids.is_empty()) else {
            return Ok(());
        };
        let text: Vec<u32> = prompt.iter().chain(&ids[..ids.len() - 1]).copied().collect();
        let length = text.len() as u64;
        // the first token of the continuation is predicted by the last prompt token
        let before = prompt.len().saturating_sub(1);
        let begun = after.filter(|session| {
            let known = session.tokens();
            let sizes = anec_runtime::plan::sizes(&session.route().layers, session.limit());
            // with room for padding of the last call
            known.len() >= before
                && text.starts_with(&known[..before])
                && session.is_compatible_with(length)
                && length + sizes.last().unwrap_or(&0) <= session.limit()
        });
        let mut session = match begun {
            Some(mut session) => {
                session.set_length(length)?;
                session.rewind(before as u64)?;
                session
            }
            None => self.candidate.model.start(length)?,
        };
        let position = session.position() as usize;
        let ask = ForwardOptions::default().largest(!self.candidate.model.gives_logits());
        let found = self.likeliest(&session.forward(&text[position..], &ask)?);
        let same: Vec<bool> = found[before - position..].iter().zip(ids).map(|(found, id)| found == id).collect();
        let (count, agree) = (ids.len(), same.iter().take_while(|same| **same).count());
        let wrong = same.iter().filter(|same| !**same).count();
        let most = (((1.0 - self.thresholds.top1) * count as f64) as usize).max(1);
        let claim = "greedy continuation";
        let mut check = if count <= most {
            Check::unproven(&self.candidate.name, claim, format!("{count} tokens are too few to tell"))
        } else {
            let problem = (wrong > most)
                .then(|| format!("{wrong} of {count} tokens aren't the golden's, expected at most {most}"));
            Check::of(&self.candidate.name, claim, problem)
        };
        check.measured.insert("greedy_agree".into(), agree as f64);
        check.measured.insert("greedy_wrong".into(), wrong as f64);
        check.measured.insert("greedy_tokens".into(), count as f64);
        check.detail.get_or_insert_with(|| format!("the first {agree} of {count} tokens are the golden's"));
        checks.push(check);
        Ok(())
    }
}

fn measured(measures: &LogitMeasures) -> IndexMap<String, f64> {
    let [low, high] = measures.norm_ratio;
    let pairs = [
        ("cosine", measures.cosine),
        ("p1", measures.p1),
        ("median", measures.median),
        ("max_abs", measures.max_abs),
        ("norm_ratio_min", low),
        ("norm_ratio_max", high),
        ("psnr", measures.psnr),
        ("top1", measures.top1),
        ("top5", measures.top5),
        ("kl", measures.kl),
        ("positions", measures.rows as f64),
    ];
    // PSNR is infinite for equal rows, and JSON has no infinity
    let pairs = pairs.into_iter().filter(|(_, value)| *value != f64::INFINITY);
    pairs.map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Division of a text into calls.
#[derive(Clone)]
struct CallPlan {
    name: String,
    chunking: Chunking,
    /// Whether calls of different sizes alternate.
    mixed: bool,
}

/// Measures, logits and hidden states of the whole program with one call plan.
struct WholeRun {
    measures: LogitMeasures,
    /// Logits of all positions, if requested.
    logits: Option<Vec<f32>>,
    hidden: Vec<Vec<f32>>,
}

/// Results of the whole program.
struct Whole {
    plan: CallPlan,
    logits: Vec<f32>,
    /// Hidden states between functions, in the order of [`ForwardOutput::hidden`].
    hidden: Vec<Vec<f32>>,
}

/// Divisions of a text into calls: every small size and the largest, and all of them in turn.
fn chunkings(session: &TokenSession) -> Vec<CallPlan> {
    let mut sizes = anec_runtime::plan::sizes(&session.route().layers, session.limit());
    let plan = |name: String, chunking, mixed| CallPlan { name, chunking, mixed };
    let mut plans: Vec<CallPlan> =
        sizes.iter().map(|size| plan(format!("T = {size}"), Chunking::Pattern(vec![*size]), false)).collect();
    if sizes.len() > 1 {
        // unsorted, so that large calls follow small ones and vice versa
        let middle = sizes.len() / 2;
        sizes.rotate_left(middle);
        let names: Vec<String> = sizes.iter().map(u64::to_string).collect();
        plans.push(plan(format!("T = {} …", names.join(", ")), Chunking::Pattern(sizes), true));
    }
    if plans.is_empty() {
        plans.push(plan("filled-up calls".into(), Chunking::Largest, false));
    }
    plans
}

/// Report of the gate without a golden; `named` is the one that the manifest names, which isn't there.
pub fn without_golden(named: Option<&Path>) -> GateReport {
    let reason = match named {
        Some(path) => format!("the manifest's golden {} isn't here", path.display()),
        None => "no golden is given".to_owned(),
    };
    let check = Check::unproven("bundle", "logits agree with a golden", &reason);
    debug_assert_eq!(check.verdict, Verdict::Unproven);
    GateReport::new(GATE, vec![check])
}
