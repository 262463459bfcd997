//! The parity gate: the emitted program against a golden, in every way that it can be called.

use std::collections::BTreeSet;
use std::sync::Arc;

use indexmap::IndexMap;

use super::golden::{Golden, GoldenError};
use super::measure::Measures;
use super::thresholds::ParityThresholds;
use super::verdict::{Check, GateReport, Verdict};
use crate::convert::bundle::Tokens;
use crate::error::Result;
use crate::family::ports::Stage;
use crate::runtime::{self, Answer, Ask, Chunking, Hidden, Model, Positions, Request, Session, Windows, generate};

/// Name of the gate.
pub const GATE: &str = "parity";

/// A bundle on a backend, with what tells it from the others: `f32`, `f16`.
pub struct Candidate {
    /// How it computes.
    pub name: String,
    /// The model.
    pub model: Arc<Model>,
}

/// Compares candidates with a golden: logits in calls of every size and in mixed ones, each after a reset; single
/// functions, where the golden has hidden states; the greedy continuation.
///
/// # Errors
/// When the golden isn't of this model, its text doesn't fit the context, or a function can't be run.
pub fn parity(candidates: &[Candidate], golden: &Golden, thresholds: &ParityThresholds) -> Result<GateReport> {
    let mut checks = Vec::new();
    for candidate in candidates {
        check_golden(&candidate.model, golden)?;
        if golden.positions.is_empty() {
            continue;
        }
        let comparison = Comparison { candidate, golden, thresholds };
        if candidate.model.bundle().model.classification().is_some() {
            let first = comparison.windows(&mut checks)?;
            checks.extend(comparison.places(&first));
            checks.extend(comparison.vocabulary(&first));
            continue;
        }
        let mut session = candidate.model.start(golden.tokens.len() as u64)?;
        let first = comparison.calls(&mut session, &mut checks)?;
        checks.push(comparison.reset(&mut session, &first)?);
        checks.extend(comparison.places(&first));
        checks.extend(comparison.vocabulary(&first));
        comparison.functions(&mut session, &mut checks)?;
        comparison.forced(&mut session, &mut checks)?;
        checks.extend(comparison.end_of_context()?);
        checks.extend(comparison.greedy()?);
    }
    Ok(GateReport::new(GATE, checks))
}

fn check_golden(model: &Model, golden: &Golden) -> Result<()> {
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
    golden: &'a Golden,
    thresholds: &'a ParityThresholds,
}

impl Comparison<'_> {
    /// Logits for every size of calls; gives those of the first.
    fn calls(&self, session: &mut Session, checks: &mut Vec<Check>) -> Result<Vec<f32>> {
        let mut first = Vec::new();
        for (name, chunking) in chunkings(session) {
            session.reset()?;
            let logits = session.forward(&self.golden.tokens, &Ask::all(chunking))?.logits;
            let measures = Measures::of(&self.rows(&logits), &self.golden.logits, self.golden.vocab_size);
            checks.push(self.logits_check(&name, &measures));
            if first.is_empty() {
                first = logits;
            }
        }
        Ok(first)
    }

    /// Labels of a token classifier: the text in one call or as few as it takes, in windows of the least size that is
    /// possible, and in ones between; gives the logits of the first.
    fn windows(&self, checks: &mut Vec<Check>) -> Result<Vec<f32>> {
        let model = &self.candidate.model;
        let bundle = model.bundle();
        let least = bundle.model.classification().map_or(1, |classification| 2 * classification.halo + 1);
        let mut sizes: BTreeSet<u64> = BTreeSet::new();
        for entry in bundle.functions.iter().filter(|entry| matches!(entry.stage, Stage::Layers { .. })) {
            sizes.extend(match entry.tokens {
                Tokens::Exactly(size) => vec![size],
                Tokens::Range([lower, upper]) => vec![lower.max(least), (least + upper) / 2],
            });
        }
        let sizes = sizes.into_iter().filter(|size| *size >= least).map(Some);
        let mut first = Vec::new();
        for size in std::iter::once(None).chain(sizes) {
            let name = size.map_or("largest windows".to_owned(), |size| format!("windows of {size}"));
            let logits = Windows::new(model, size, Hidden::No)?.label(&self.golden.tokens)?.logits;
            let measures = Measures::of(&self.rows(&logits), &self.golden.logits, self.golden.vocab_size);
            checks.push(self.logits_check(&name, &measures));
            if first.is_empty() {
                first = logits;
            }
        }
        Ok(first)
    }

    /// The rows that the golden has logits of.
    fn rows(&self, logits: &[f32]) -> Vec<f32> {
        let width = self.golden.vocab_size;
        self.golden.positions.iter().flat_map(|p| &logits[p * width..(p + 1) * width]).copied().collect()
    }

    fn logits_check(&self, name: &str, measures: &Measures) -> Check {
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
        let subject = format!("{}, {name}", self.candidate.name);
        Check { measured: measured(measures), ..Check::of(subject, "logits agree with the golden", problem) }
    }

    /// The first calls once more: after a reset nothing may be left of the texts between.
    fn reset(&self, session: &mut Session, first: &[f32]) -> Result<Check> {
        let mut problem = None;
        if let Some((name, chunking)) = chunkings(session).into_iter().next() {
            session.reset()?;
            let again = session.forward(&self.golden.tokens, &Ask::all(chunking))?.logits;
            let same = again.iter().map(|v| v.to_bits()).eq(first.iter().map(|v| v.to_bits()));
            problem = (!same).then(|| format!("{name} gives other logits the second time"));
        }
        Ok(Check::of(&self.candidate.name, "a reset forgets the text before", problem))
    }

    /// The first tokens, one in the middle and the last: what is wrong in one place only drowns in a mean, and the
    /// worst of all places doesn't say where.
    fn places(&self, logits: &[f32]) -> Option<Check> {
        let golden = self.golden;
        let (first, last) = (*golden.positions.first()?, *golden.positions.last()?);
        let middle = golden.positions[golden.positions.len() / 2];
        let mut check =
            Check::of(format!("{}, places", self.candidate.name), "the first, middle and last positions agree", None);
        let mut problems = Vec::new();
        let mut seen = Vec::new();
        for position in [first, first + 1, middle, last] {
            let Ok(row) = golden.positions.binary_search(&position) else { continue };
            if seen.contains(&position) {
                continue;
            }
            seen.push(position);
            let width = golden.vocab_size;
            let found = &logits[position * width..(position + 1) * width];
            let cosine = super::measure::cosine(found, &golden.logits[row * width..(row + 1) * width]);
            check.measured.insert(format!("cosine_at_{position}"), cosine);
            if !(cosine >= self.thresholds.cosine) {
                problems.push(format!(
                    "position {position}: cosine {cosine:.5}, expected at least {}",
                    self.thresholds.cosine
                ));
            }
        }
        if !problems.is_empty() {
            check =
                Check { measured: check.measured, ..Check::of(check.subject, check.claim, Some(problems.join("; "))) };
        }
        Some(check)
    }

    /// Every row of the vocabulary over all positions: one row of the LM head that is lost or wrong hardly changes the
    /// cosine of thousands.
    fn vocabulary(&self, logits: &[f32]) -> Option<Check> {
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
                "the logits of token {worst} are {:.3} off, relative to all; at most {limit} is expected",
                error(worst)
            )
        });
        let mut check =
            Check::of(format!("{}, tokens", self.candidate.name), "the logits of every token agree", problem);
        check.measured.insert("row_error".into(), error(worst));
        Some(check)
    }

    /// Each function alone, on the hidden states of the golden: an error can't come from the functions before, nor hide
    /// behind theirs. Those that take something else, too, which no golden has, are judged by what leaves them only.
    fn forced(&self, session: &mut Session, checks: &mut Vec<Check>) -> Result<()> {
        let golden = self.golden;
        let bundle = self.candidate.model.bundle();
        let width = bundle.model.hidden_size as usize;
        let parts: Vec<_> = session.route().layers.iter().map(|step| step.part.clone()).collect();
        for (index, part) in parts.iter().enumerate() {
            if !session.stands_alone(index) {
                continue;
            }
            let (start, end) = (part.start as usize, part.end as usize);
            let (Some(given), Some(reference)) = (golden.hidden.get(&start), golden.hidden.get(&end)) else { continue };
            for (name, chunking) in chunkings(session) {
                session.reset()?;
                let found = session.force_layers(index, given, &chunking)?;
                let measures = Measures::of(&found, reference, width);
                let subject = format!("{}, layers {start}..{end} forced, {name}", self.candidate.name);
                checks.push(self.function_check(subject, "its hidden states agree with the golden", &measures));
            }
        }
        let last = bundle.model.num_layers;
        if let Some(given) = golden.hidden.get(&last) {
            let width = golden.vocab_size;
            let logits = self.rows(&session.force_head(given)?);
            let measures = Measures::of(&logits, &golden.logits, width);
            let subject = format!("{}, head forced", self.candidate.name);
            checks.push(self.function_check(subject, "its logits agree with the golden", &measures));
        }
        session.reset()
    }

    /// The last slots of the context: calls of every size against the next smaller one, as if zeros had come before. No
    /// golden reaches that far at a reasonable price; a mask or a slot that is off by one shows without.
    fn end_of_context(&self) -> Result<Vec<Check>> {
        let model = &self.candidate.model;
        let mut session = model.start(model.context())?;
        let sizes = runtime::plan::sizes(&session.route().layers, session.limit());
        let width = self.golden.vocab_size;
        let mut checks = Vec::new();
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
                Ok(session.forward(&tokens, &Ask::all(Chunking::Pattern(vec![size])))?.logits)
            };
            let (reference, found) = (run(base)?, run(size)?);
            let measures = Measures::of(&found, &reference, width);
            let subject = format!("{}, T = {size}, last slots", self.candidate.name);
            let claim = "at the end of the context, calls agree with smaller ones";
            let low = !(measures.cosine >= self.thresholds.cosine);
            let problem = low.then(|| {
                format!("cosine {:.5} to T = {base}, expected at least {}", measures.cosine, self.thresholds.cosine)
            });
            let mut measured = measured(&measures);
            measured.retain(|name, _| matches!(name.as_str(), "cosine" | "max_abs" | "positions"));
            checks.push(Check { measured, ..Check::of(subject, claim, problem) });
        }
        Ok(checks)
    }

    /// What single functions give: the hidden states that leave a shard, a piece of the logits.
    fn functions(&self, session: &mut Session, checks: &mut Vec<Check>) -> Result<()> {
        let golden = self.golden;
        session.reset()?;
        let hidden = if golden.hidden.is_empty() { Hidden::No } else { Hidden::BetweenFunctions };
        let ask = Ask { logits: Positions::All, hidden, chunking: Chunking::Largest };
        let Answer { logits, hidden } = session.forward(&golden.tokens, &ask)?;
        let bundle = self.candidate.model.bundle();
        let route = session.route();
        for step in &route.layers {
            let end = step.part.end as usize;
            let (Some(reference), Some(found)) = (golden.hidden.get(&end), hidden.get(end)) else { continue };
            let measures = Measures::of(found, reference, bundle.model.hidden_size as usize);
            let subject = format!("{}, layers {}..{}", self.candidate.name, step.part.start, end);
            checks.push(self.function_check(subject, "hidden states agree with the golden", &measures));
        }
        if route.head.len() > 1 {
            let logits = self.rows(&logits);
            let width = golden.vocab_size;
            for step in &route.head {
                let piece = |rows: &[f32]| -> Vec<f32> {
                    let part = step.part.start as usize..step.part.end as usize;
                    rows.chunks_exact(width).flat_map(|row| &row[part.clone()]).copied().collect()
                };
                let rows = (step.part.end - step.part.start) as usize;
                let measures = Measures::of(&piece(&logits), &piece(&golden.logits), rows);
                let subject = format!("{}, head {}..{}", self.candidate.name, step.part.start, step.part.end);
                checks.push(self.function_check(subject, "its logits agree with the golden", &measures));
            }
        }
        Ok(())
    }

    fn function_check(&self, subject: String, claim: &str, measures: &Measures) -> Check {
        let limit = self.thresholds.function_cosine;
        let low = !(measures.cosine >= limit);
        let problem = low.then(|| format!("cosine {:.5}, expected at least {limit}", measures.cosine));
        let mut measured = measured(measures);
        measured.retain(|name, _| !matches!(name.as_str(), "top1" | "top5" | "kl"));
        Check { measured, ..Check::of(subject, claim, problem) }
    }

    /// How much of the golden's greedy continuation is ours, too. No threshold: where two tokens are all but equally
    /// likely, quantized weights may rightly choose the other, and all that follows differs.
    fn greedy(&self) -> Result<Option<Check>> {
        let Some(greedy) = &self.golden.greedy else { return Ok(None) };
        let request = Request { prompt: greedy.prompt.clone(), max_tokens: greedy.ids.len(), ..Request::default() };
        let mut session = request.session(&self.candidate.model)?;
        let ids = generate(&mut session, &request, |_| Ok(std::ops::ControlFlow::Continue(())))?.ids;
        let agree = ids.iter().zip(&greedy.ids).take_while(|(a, b)| a == b).count();
        let mut check = Check::of(&self.candidate.name, "greedy continuation", None);
        check.measured.insert("greedy_agree".into(), agree as f64);
        check.measured.insert("greedy_tokens".into(), greedy.ids.len() as f64);
        check.detail = Some(format!("the first {agree} of {} tokens are the golden's", greedy.ids.len()));
        Ok(Some(check))
    }
}

fn measured(measures: &Measures) -> IndexMap<String, f64> {
    let [low, high] = measures.norm_ratio;
    let pairs = [
        ("cosine", measures.cosine),
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

/// Ways of dividing a text into calls: every small size and the largest, and all of them in turn.
fn chunkings(session: &Session) -> Vec<(String, Chunking)> {
    let mut sizes = runtime::plan::sizes(&session.route().layers, session.limit());
    let mut ways: Vec<(String, Chunking)> =
        sizes.iter().map(|size| (format!("T = {size}"), Chunking::Pattern(vec![*size]))).collect();
    if sizes.len() > 1 {
        // not in order, so that a large call follows a small one and the other way round
        let middle = sizes.len() / 2;
        sizes.rotate_left(middle);
        let names: Vec<String> = sizes.iter().map(u64::to_string).collect();
        ways.push((format!("T = {} …", names.join(", ")), Chunking::Pattern(sizes)));
    }
    if ways.is_empty() {
        ways.push(("filled-up calls".into(), Chunking::Largest));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::convert::bundle::Tokens;
    use crate::manifest::Gates;
    use crate::runtime::double::{self, Form};
    use crate::validate::{Greedy, Thresholds};

    const TEXT: [u32; 9] = [3, 1, 4, 1, 5, 2, 6, 5, 3];

    fn golden() -> Golden {
        let (hidden, logits) = double::reference(&TEXT, TEXT.len() as u64);
        Golden {
            tokens: TEXT.to_vec(),
            positions: (0..TEXT.len()).collect(),
            logits,
            vocab_size: double::VOCAB,
            hidden: hidden.into_iter().enumerate().collect(),
            greedy: Some(Greedy { prompt: vec![1, 2], ids: vec![0, 0, 0] }),
            metadata: Default::default(),
        }
    }

    fn gate(form: &Form, golden: &Golden) -> GateReport {
        let candidate = Candidate { name: "double".into(), model: double::model(form).0 };
        parity(&[candidate], golden, &Thresholds::of(&Gates::default()).parity).unwrap()
    }

    #[test]
    fn the_reference_agrees_with_itself_in_every_way_of_calling() {
        let report = gate(&Form::default(), &golden());
        assert_eq!(report.verdict, Verdict::Passed, "{report:#?}");
        let subjects: Vec<&str> = report.checks.iter().map(|check| check.subject.as_str()).collect();
        let expected = [
            "double, T = 1",
            "double, T = 2",
            "double, T = 3",
            "double, T = 4",
            "double, T = 3, 4, 1, 2 …",
            "double",
            "double, places",
            "double, tokens",
            "double, layers 0..2",
            "double, layers 2..3",
            "double, head 0..5",
            "double, head 5..8",
            "double, layers 0..2 forced, T = 1",
            "double, layers 0..2 forced, T = 2",
            "double, layers 0..2 forced, T = 3",
            "double, layers 0..2 forced, T = 4",
            "double, layers 0..2 forced, T = 3, 4, 1, 2 …",
            "double, layers 2..3 forced, T = 1",
            "double, layers 2..3 forced, T = 2",
            "double, layers 2..3 forced, T = 3",
            "double, layers 2..3 forced, T = 4",
            "double, layers 2..3 forced, T = 3, 4, 1, 2 …",
            "double, head forced",
            "double, T = 2, last slots",
            "double, T = 3, last slots",
            "double, T = 4, last slots",
            "double",
        ];
        assert_eq!(subjects, expected);
        let places: Vec<&str> = report.checks[6].measured.keys().map(String::as_str).collect();
        assert_eq!(places, ["cosine_at_0", "cosine_at_1", "cosine_at_4", "cosine_at_8"]);
        assert_eq!(report.checks[0].measured["max_abs"], 0.0);
    }

    #[test]
    fn a_single_size_is_tried_with_filled_up_calls() {
        let tokens = vec![Tokens::Exactly(4)];
        let form = Form { layer_tokens: tokens.clone(), head_tokens: tokens, ..Form::default() };
        let report = gate(&form, &golden());
        assert_eq!((report.verdict, report.checks[0].subject.as_str()), (Verdict::Passed, "double, T = 4"));
    }

    #[test]
    fn a_wrong_position_fails_the_gate() {
        let mut golden = golden();
        let row = &mut golden.logits[5 * double::VOCAB..6 * double::VOCAB];
        row.reverse();
        let report = gate(&Form::default(), &golden);
        assert_eq!(report.verdict, Verdict::Failed);
        assert!(report.checks[0].detail.as_deref().unwrap().starts_with("cosine "), "{report:?}");
    }

    #[test]
    fn a_wrong_scale_fails_although_every_cosine_is_one() {
        let mut golden = golden();
        golden.logits.iter_mut().for_each(|v| *v *= 1.2);
        let report = gate(&Form::default(), &golden);
        assert_eq!(report.checks[0].detail.as_deref(), Some("norm ratio from 0.8333 to 0.8333, expected 0.9 to 1.1"));
    }

    #[test]
    fn a_wrong_shard_is_named() {
        let mut golden = golden();
        golden.hidden.get_mut(&2).unwrap().iter_mut().step_by(2).for_each(|v| *v = -*v);
        let report = gate(&Form::default(), &golden);
        let failed: Vec<&str> =
            report.checks.iter().filter(|c| c.verdict == Verdict::Failed).map(|c| c.subject.as_str()).collect();
        let (forced, free): (Vec<&str>, Vec<&str>) = failed.iter().partition(|subject| subject.contains("forced"));
        assert_eq!(free, ["double, layers 0..2"]);
        // the golden's wrong states are what the first shard should give and what the second is given
        assert_eq!(forced.len(), 10, "{forced:?}");
    }

    #[test]
    fn comparing_nothing_is_no_success() {
        let golden = Golden { positions: Vec::new(), logits: Vec::new(), ..golden() };
        assert_eq!(gate(&Form::default(), &golden).verdict, Verdict::Failed);
        assert_eq!(without_golden().verdict, Verdict::Unproven);
    }

    #[test]
    fn some_positions_are_enough() {
        let mut golden = golden();
        golden.positions = vec![0, 8];
        golden.logits = [&golden.logits[..double::VOCAB], &golden.logits[8 * double::VOCAB..]].concat();
        let report = gate(&Form::default(), &golden);
        assert_eq!((report.verdict, report.checks[0].measured["positions"]), (Verdict::Passed, 2.0));
    }

    #[test]
    fn a_golden_of_another_model_is_refused() {
        let candidate = || Candidate { name: "double".into(), model: double::model(&Form::default()).0 };
        let thresholds = Thresholds::of(&Gates::default()).parity;
        let other = Golden { vocab_size: 9, ..golden() };
        assert!(parity(&[candidate()], &other, &thresholds).is_err());
        let other = Golden { tokens: vec![double::VOCAB as u32; golden().tokens.len()], ..golden() };
        assert!(parity(&[candidate()], &other, &thresholds).is_err());
        let other = Golden { hidden: [(4, Vec::new())].into(), ..golden() };
        assert!(parity(&[candidate()], &other, &thresholds).is_err());
    }
}
