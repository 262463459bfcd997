//! Effect of the Neural Engine's published arithmetic beyond fp16. A text runs with exact sums and with the simulated
//! [effects](anec_advice::arithmetic); the first deviating value is named. A simulation proves nothing: its effects are
//! measurements by others on some chips.

use std::collections::BTreeMap;
use std::path::Path;

use indexmap::IndexMap;

use super::measure::LogitMeasures;
use super::thresholds::NumericsThresholds;
use super::trace::{Places, Trace, WatchedPrograms, trace};
use super::verdict::Check;
use super::watch::{Log, Samples};
use anec_advice::arithmetic::published_effects;
use anec_base::Result;
use anec_bundle::Bundle;
use anec_exec::{EngineEffect, EngineEffects, Precision};
use anec_runtime::Hidden;

/// Number of tokens; few, because simulated sums are slow.
const TOKENS: usize = 32;
/// Number of tokens for finding the cause, which takes one run per effect.
const CAUSE_TOKENS: usize = 8;
/// Relative difference from which a value deviates.
const DEVIATES: f64 = 0.02;

/// Root mean square below which a value is ignored: fp16 represents it with few digits, and larger values are added to
/// it.
const MIN_MAGNITUDE: f64 = 1e-3;

/// Claim of the check.
const CLAIM: &str = "the Neural Engine's arithmetic, simulated, computes what fp16 computes";

/// Compares the beginning of `tokens` with and without the effects, in the functions of a context.
///
/// # Errors
/// If a function can't be run.
pub(super) fn simulation(
    bundle: &Bundle,
    folder: &Path,
    context: u64,
    tokens: &[u32],
    places: &BTreeMap<String, BTreeMap<String, Places>>,
    thresholds: &NumericsThresholds,
) -> Result<Check> {
    let tokens = &tokens[..tokens.len().min(TOKENS)];
    let programs = WatchedPrograms::open(bundle, folder)?;
    let run = |precision| -> Result<(Trace, Samples)> {
        let log = Log::sampling(programs.calls(context, tokens.len()));
        let trace = trace(&programs.model(precision, &log)?, &log, context, tokens, Hidden::BetweenLayers)?;
        Ok((trace, log.samples()))
    };
    let (half, engine) = rayon::join(|| run(Precision::F16), || run(Precision::ANE));
    let ((half, exact), (engine, simulated)) = (half?, engine?);
    let measures = LogitMeasures::of(&engine.logits, &half.logits, bundle.model.head_rows() as usize);
    let first = find_first_deviation(bundle, &exact, &simulated, places).map(|first| first.in_words(bundle));
    let mut problems = Vec::new();
    // `!(>=)` is true for NaN
    if !(measures.cosine >= thresholds.simulated_cosine) {
        problems.push(format!(
            "cosine of the logits {:.5}, expected at least {}",
            measures.cosine, thresholds.simulated_cosine
        ));
    }
    if let Some(first) = &first
        && !problems.is_empty()
    {
        problems.push(format!("{first} first"));
    }
    let mut check = Check::of(
        format!("context {context}, simulated"),
        CLAIM,
        (!problems.is_empty()).then(|| format!("{} (a simulation of published measurements)", problems.join("; "))),
    );
    if check.detail.is_none() {
        check.detail = first.map(|first| format!("{first} first (a simulation of published measurements)"));
    }
    check.measured.insert("cosine".into(), measures.cosine);
    check.measured.insert("norm_ratio_min".into(), measures.norm_ratio[0]);
    check.measured.insert("norm_ratio_max".into(), measures.norm_ratio[1]);
    check.measured.insert("positions".into(), measures.rows as f64);
    Ok(check)
}

/// Finds the first value that deviates from f32 when computed with `effects`, its operation, and the responsible
/// effect: the one without which it doesn't deviate. `failed` says whether the gate failed, of which this is then the
/// cause.
///
/// # Errors
/// If a package can't be read or a function can't be run.
pub fn first_deviation(
    bundle: &Bundle,
    folder: &Path,
    tokens: &[u32],
    effects: EngineEffects,
    failed: bool,
) -> Result<Check> {
    let tokens = &tokens[..tokens.len().min(CAUSE_TOKENS)];
    let programs = WatchedPrograms::open(bundle, folder)?;
    let context = bundle.model.contexts.iter().copied().find(|context| *context >= CAUSE_TOKENS as u64);
    let context = context.or(bundle.model.contexts.last().copied()).unwrap_or(1);
    let run = |precision| -> Result<Samples> {
        let log = Log::sampling(programs.calls(context, tokens.len()));
        trace(&programs.model(precision, &log)?, &log, context, tokens, Hidden::BetweenLayers)?;
        Ok(log.samples())
    };
    let mut places: BTreeMap<String, BTreeMap<String, Places>> = BTreeMap::new();
    // operators by value
    let mut operators: BTreeMap<(String, String), String> = BTreeMap::new();
    for entry in &bundle.packages {
        let program = anec_package::open(&folder.join(&entry.package))?.program;
        for function in &program.functions {
            let of = Places::of(bundle, &entry.package, function);
            places.entry(entry.package.clone()).or_default().insert(function.name.clone(), of);
            for op in &function.block.ops {
                let names = op.outputs.iter().map(|id| function.value(*id).name.clone());
                operators.extend(names.map(|name| ((entry.package.clone(), name), op.operator.to_string())));
            }
        }
    }
    let simulated = Precision::Ane(effects);
    let single = run(Precision::F32)?;
    let subject = format!("{simulated}, simulated");
    let claim = "the Neural Engine's arithmetic, simulated, computes what f32 computes";
    let Some(first) = find_first_deviation(bundle, &single, &run(simulated)?, &places) else {
        let nothing = format!("no value leaves f32 by {} % in {CAUSE_TOKENS} tokens", 100.0 * DEVIATES);
        let mut check = Check::of(subject, claim, failed.then(|| nothing.clone()));
        check.detail.get_or_insert(nothing);
        return Ok(check);
    };
    let by = |precision| -> Result<f64> { Ok(first.within(&single, &run(precision)?)) };
    let rounding = by(Precision::F16)?;
    let cause = if !(rounding <= DEVIATES) {
        "fp16 alone does it".to_owned()
    } else {
        let mut causes = Vec::new();
        for effect in EngineEffect::ALL.into_iter().filter(|effect| effects.has(*effect)) {
            let rest = by(Precision::Ane(effects.without(effect)))?;
            if rest <= DEVIATES {
                causes.push(in_words(effect, rest));
            }
        }
        match causes.is_empty() {
            true => "several effects do it together: no single one leaves it where it is by being left out".to_owned(),
            false => causes.join("; "),
        }
    };
    let key = (bundle.functions[first.function].package.clone(), first.value.clone());
    let operator = operators.get(&key).map_or("", String::as_str);
    let text =
        format!("{} first, by {operator}: {cause} (a simulation of published measurements)", first.in_words(bundle));
    let mut check = Check::of(subject, claim, failed.then(|| text.clone()));
    check.detail.get_or_insert(text);
    if first.by.is_finite() {
        check.measured.insert("departs_by".into(), first.by);
    }
    Ok(check)
}

/// Responsible effect with its source.
fn in_words(effect: EngineEffect, rest: f64) -> String {
    let rows = published_effects();
    let row = rows.iter().find(|row| row.effect == effect.name());
    let who = row.map_or_else(String::new, |row| format!(" ({}: {})", row.chips.join(", "), row.source));
    format!("`{effect}`{who} does it: without it by {:.1} %", 100.0 * rest)
}

/// Deviating value.
struct Deviation {
    /// Index of the function in `bundle.json`.
    function: usize,
    value: String,
    /// Relative difference.
    by: f64,
}

impl Deviation {
    fn in_words(&self, bundle: &Bundle) -> String {
        let by = if self.by.is_finite() { format!("{:.1} %", 100.0 * self.by) } else { "infinitely much".into() };
        format!("`{}` of {} deviates by {by}", self.value, bundle.functions[self.function].package)
    }

    /// Difference of the value in another run.
    fn within(&self, exact: &Samples, other: &Samples) -> f64 {
        let of = |samples: &Samples| samples.get(&self.function).and_then(|values| values.get(&self.value)).cloned();
        of(exact).zip(of(other)).map_or(f64::INFINITY, |(exact, other)| difference(&exact, &other))
    }
}

/// Finds the first deviating value.
fn find_first_deviation(
    bundle: &Bundle,
    exact: &Samples,
    simulated: &Samples,
    places: &BTreeMap<String, BTreeMap<String, Places>>,
) -> Option<Deviation> {
    let empty = IndexMap::new();
    exact.iter().find_map(|(function, values)| {
        let entry = &bundle.functions[*function];
        let simulated = simulated.get(function).unwrap_or(&empty);
        let places = places.get(&entry.package).and_then(|places| places.get(&entry.function));
        values.iter().find_map(|(name, values)| {
            let closed = places.is_some_and(|places| places.masked.contains(name));
            let difference = difference(values, simulated.get(name)?);
            // masked values have no magnitude of their own
            let deviates = !closed && !(difference <= DEVIATES) && size(values) >= MIN_MAGNITUDE;
            deviates.then(|| Deviation { function: *function, value: name.clone(), by: difference })
        })
    })
}

/// Root mean square.
fn size(values: &[f32]) -> f64 {
    (values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>() / values.len().max(1) as f64).sqrt()
}

/// Root mean square of the difference, relative to that of the values.
fn difference(values: &[f32], others: &[f32]) -> f64 {
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
    let total = square(&mut values.iter().map(|value| f64::from(*value)));
    let apart = square(&mut values.iter().zip(others).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    match (total, apart) {
        (_, 0.0) => 0.0,
        (total, apart) if total > 0.0 => (apart / total).sqrt(),
        _ => f64::INFINITY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_relative() {
        assert_eq!(difference(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
        assert!((difference(&[3.0, 4.0], &[3.0, 4.5]) - 0.1).abs() < 1e-12);
        assert!(difference(&[1.0], &[f32::INFINITY]).is_infinite());
        assert!(difference(&[0.0], &[1.0]).is_infinite());
    }
}
