//! The parity gate: the emitted program against a golden, in every way that it can be called.
//!
//! | module | holds |
//! |---|---|
//! | `logits` | what logits are compared for in every way of calling: rows and tokens |
//! | `texts` | all texts of a golden: each position, and the perplexity |
//! | `labels` | token classifiers, in windows of every size |
//! | `alone` | each function, and each layer, on the golden's hidden states |
//! | `together` | ways of calling side by side, which share products with weights |

mod alone;
mod labels;
mod logits;
#[cfg(test)]
mod tests;
mod texts;
mod together;

use std::sync::Arc;

use indexmap::IndexMap;

use super::golden::{Golden, GoldenError, Greedy};
use super::measure::LogitMeasures;
use super::thresholds::ParityThresholds;
use super::trial::not_run;
use super::verdict::{Check, GateReport, Verdict};
use anec_base::Result;
use anec_runtime::{Chunking, ForwardOptions, Hidden, LoadedModel, TokenSession, sampling};
use together::{STATES, Sessions, WholeRun};

/// Name of the gate.
pub const GATE: &str = "parity";

/// Tokens of a golden below which it shows too little: of one token, attention sees nothing but itself, and nothing is
/// rotated.
const SHORTEST: usize = 4;

/// A bundle on a backend, with what tells it from the others: `f32`, `f16`.
pub struct Candidate {
    /// How it computes.
    pub name: String,
    /// The model.
    pub model: Arc<LoadedModel>,
    /// Whether what single layers add to the residual stream is compared. Its backend must show values inside functions,
    /// and compute in f32: what rounding takes of a large stream can be more than a layer adds.
    pub layers: bool,
}

/// Compares candidates with a golden: logits in calls of every size and in mixed ones, each after a reset; single
/// functions and layers, where the golden has hidden states; the perplexity of its text; the greedy continuation. Of a
/// golden of several texts, all ways of calling are tried with the first one, and all texts in the largest calls.
///
/// # Errors
/// When the golden isn't of this model or its text doesn't fit the context. A function that can't be run fails the gate.
pub fn parity(candidates: &[Candidate], golden: &Golden, thresholds: &ParityThresholds) -> Result<GateReport> {
    parity_within(STATES, candidates, golden, thresholds)
}

/// The same, with sessions whose states have at most so many bytes together, but for one.
fn parity_within(
    states: u64,
    candidates: &[Candidate],
    golden: &Golden,
    thresholds: &ParityThresholds,
) -> Result<GateReport> {
    let mut checks = Vec::new();
    let first_text = (golden.texts.len() > 1).then(|| golden.first_text());
    for candidate in candidates {
        check_golden(&candidate.model, golden)?;
        if golden.positions.is_empty() {
            continue;
        }
        let comparison =
            Comparison { candidate, golden: first_text.as_ref().unwrap_or(golden), texts: golden, thresholds, states };
        if golden.tokens.len() < SHORTEST {
            let reason = format!("the golden has {} tokens, at least {SHORTEST} are needed", golden.tokens.len());
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
    /// The golden's first text.
    golden: &'a Golden,
    /// All of it.
    texts: &'a Golden,
    thresholds: &'a ParityThresholds,
    /// Most bytes of states that sessions may have together.
    states: u64,
}

impl Comparison<'_> {
    fn all(&self, checks: &mut Vec<Check>) -> Result<()> {
        let first = self.start()?;
        let ways = chunkings(&first);
        let mut sessions = Sessions::new(self, first, ways.len() + 1)?;
        // so that what is compared with a golden comes after another text in its session
        let mut forced = Vec::new();
        let all = self.forced(&ways, &mut sessions, &mut forced)?;
        if let Some(whole) = self.calls(&ways, &mut sessions, all, checks)? {
            checks.extend(self.vocabulary(&whole.logits));
            let mut session = self.start()?;
            self.functions(&whole, &session, checks);
            self.attempt("all texts", &mut session, checks, |_, checks| self.all_texts(&whole.logits, checks))?;
        }
        checks.extend(forced);
        // what computed the largest calls again can go on with their text
        let mut last = Some(sessions.into_session_of(ways.len()));
        let mut session = self.start()?;
        self.attempt("last slots", &mut session, checks, |_, checks| self.end_of_context(checks))?;
        self.attempt("greedy continuation", &mut session, checks, |_, checks| self.greedy(last.take(), checks))?;
        checks.extend(self.suspect(checks));
        Ok(())
    }

    /// A text of the golden's length.
    fn start(&self) -> Result<TokenSession> {
        self.candidate.model.start(self.golden.tokens.len() as u64)
    }

    fn subject(&self, what: &str) -> String {
        format!("{}, {what}", self.candidate.name)
    }

    /// Tries a part of the comparison. A function that can't be run is what the gate is there to find: it is noted, and
    /// the other parts get a session whose states are whole.
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

    /// Logits for every size of calls; gives what the largest calls answered, with the hidden states between functions. These
    /// are made once more: after a reset nothing may be left of what a session has computed. `filled` says whether each has
    /// computed something for every position in all parts of the layers.
    fn calls(
        &self,
        ways: &[Way],
        sessions: &mut Sessions,
        filled: bool,
        checks: &mut Vec<Check>,
    ) -> Result<Option<Whole>> {
        let largest = ways.iter().rposition(|way| !way.mixed).unwrap_or(0);
        // a session of several ways has computed others before
        if sessions.own.len() > largest && sessions.own.len() > 1 && !filled {
            // what fails says so below
            let _ = sessions.own[largest].forward(&self.golden.tokens, &ForwardOptions::none());
        }
        let ask = |way: &Way| ForwardOptions {
            hidden: Hidden::BetweenFunctions,
            ..ForwardOptions::all(way.chunking.clone())
        };
        let tries: Vec<Way> = ways.iter().chain([&ways[largest]]).cloned().collect();
        let asks: Vec<ForwardOptions> = tries.iter().map(ask).collect();
        let keeps = |index: usize| index == largest || index == ways.len();
        let mut given = sessions
            .run(self, &tries, |index, session| WholeRun::begin(self.golden, &asks[index], keeps(index), session))?;
        let again = given.pop();
        let mut whole = None;
        for (index, (way, given)) in ways.iter().zip(given).enumerate() {
            match given {
                Ok(given) => {
                    checks.push(self.logits_check(&way.name, &given.measures));
                    if !way.mixed {
                        whole = Some((index, given));
                    }
                }
                Err(error) => checks.push(not_run(self.subject(&way.name), error)?),
            }
        }
        let Some((index, mut given)) = whole else { return Ok(None) };
        if index != largest {
            // the logits of these calls weren't kept
            let mut session = sessions.another(self)?;
            given.logits =
                Some(session.forward(&self.golden.tokens, &ForwardOptions::all(ways[index].chunking.clone()))?.logits);
        }
        let whole = Whole { way: ways[index].clone(), logits: given.logits.unwrap_or_default(), hidden: given.hidden };
        match again {
            Some(Ok(again)) => checks.push(self.reset(&whole, &again.logits.unwrap_or_default())),
            Some(Err(error)) => checks.push(not_run(self.subject("after a reset"), error)?),
            None => {}
        }
        Ok(Some(whole))
    }

    /// The largest calls in a session that has computed something before, and in another one.
    fn reset(&self, whole: &Whole, again: &[f32]) -> Check {
        let same = bytemuck::cast_slice::<_, u8>(again) == bytemuck::cast_slice::<_, u8>(&whole.logits);
        let problem = (!same).then(|| format!("{} gives other logits the second time", whole.way.name));
        Check::of(&self.candidate.name, "a reset forgets the text before", problem)
    }

    /// The last slots of the context: calls of every size against the next smaller one, as if zeros had come before. No
    /// golden reaches that far at a reasonable price; a mask or a slot that is off by one shows without.
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

    /// The golden's greedy continuation: after each token of it, the next one is the likeliest. Where two tokens are all but
    /// equally likely, quantized weights may rightly choose the other, so a few may differ; each is judged behind the
    /// golden's own tokens, so that one that differs doesn't change what follows.
    /// `after` may have computed the beginning.
    fn greedy(&self, after: Option<TokenSession>, checks: &mut Vec<Check>) -> Result<()> {
        let Some(Greedy { prompt, ids }) = self.golden.greedy.as_ref().filter(|greedy| !greedy.ids.is_empty()) else {
            return Ok(());
        };
        let text: Vec<u32> = prompt.iter().chain(&ids[..ids.len() - 1]).copied().collect();
        let (width, length) = (self.golden.vocab_size, text.len() as u64);
        // the first of the continuation is judged by the logits of the last token before it
        let before = prompt.len().saturating_sub(1);
        let begun = after.filter(|session| {
            let known = session.tokens();
            let sizes = anec_runtime::plan::sizes(&session.route().layers, session.limit());
            // with room for what fills the last call up
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
        let logits = session.forward(&text[position..], &ForwardOptions::all(Chunking::Largest))?.logits;
        let rows = logits.chunks_exact(width).skip(before - position);
        let same: Vec<bool> = rows.zip(ids).map(|(row, id)| sampling::argmax(row) == *id).collect();
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
    // where nothing differs there is no noise to compare with, and JSON has no infinity
    let pairs = pairs.into_iter().filter(|(_, value)| *value != f64::INFINITY);
    pairs.map(|(name, value)| (name.to_owned(), value)).collect()
}

/// A way of dividing a text into calls.
#[derive(Clone)]
struct Way {
    name: String,
    chunking: Chunking,
    /// Whether calls of different sizes follow each other.
    mixed: bool,
}

/// What the whole program answered.
struct Whole {
    way: Way,
    logits: Vec<f32>,
    /// Between functions, in the places of [`ForwardOutput::hidden`].
    hidden: Vec<Vec<f32>>,
}

/// Ways of dividing a text into calls: every small size and the largest, and all of them in turn.
fn chunkings(session: &TokenSession) -> Vec<Way> {
    let mut sizes = anec_runtime::plan::sizes(&session.route().layers, session.limit());
    let way = |name: String, chunking, mixed| Way { name, chunking, mixed };
    let mut ways: Vec<Way> =
        sizes.iter().map(|size| way(format!("T = {size}"), Chunking::Pattern(vec![*size]), false)).collect();
    if sizes.len() > 1 {
        // not in order, so that a large call follows a small one and the other way round
        let middle = sizes.len() / 2;
        sizes.rotate_left(middle);
        let names: Vec<String> = sizes.iter().map(u64::to_string).collect();
        ways.push(way(format!("T = {} …", names.join(", ")), Chunking::Pattern(sizes), true));
    }
    if ways.is_empty() {
        ways.push(way("filled-up calls".into(), Chunking::Largest, false));
    }
    ways
}

/// The gate where there is nothing to compare with.
pub fn without_golden() -> GateReport {
    let reason = "no golden is given (--golden FILE)";
    let check = Check::unproven("bundle", "logits agree with a golden", reason);
    debug_assert_eq!(check.verdict, Verdict::Unproven);
    GateReport::new(GATE, vec![check])
}
