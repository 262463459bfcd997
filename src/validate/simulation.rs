//! What the Neural Engine's arithmetic, as far as it is published, adds to that of half precision: a text runs with exact
//! sums and with [the effects](super::arithmetic) that the executor simulates, and what departs first is named. A
//! simulation is no proof: its effects are other people's measurements of some chips.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use indexmap::IndexMap;

use super::measure::LogitMeasures;
use super::numerics::{Places, Trace, trace};
use super::thresholds::NumericsThresholds;
use super::verdict::Check;
use super::watch::{Log, Samples};
use anec_base::Result;
use anec_bundle::Bundle;
use anec_exec::Precision;
use anec_runtime::{HostTables, LoadedModel, PackageStore};

/// Tokens that are run: sums are simulated one product after the other, which takes its time.
const TOKENS: usize = 32;
/// From which relative difference on a value is said to depart.
const DEPARTS: f64 = 0.02;

/// Root mean square below which a value says nothing: fp16 holds it with few digits, and what is added to it has more.
const SMALL: f64 = 1e-3;

/// What is claimed.
const CLAIM: &str = "the Neural Engine's arithmetic, simulated, computes what fp16 computes";

/// Runs the beginning of `tokens` through the functions of a context both ways.
///
/// # Errors
/// When a function can't be run.
pub(super) fn simulation(
    bundle: &Bundle,
    folder: &Path,
    context: u64,
    tokens: &[u32],
    places: &BTreeMap<String, BTreeMap<String, Places>>,
    thresholds: &NumericsThresholds,
) -> Result<Check> {
    let host = Arc::new(HostTables::open(bundle, folder)?);
    let programs = PackageStore::of(bundle, folder);
    let run = |precision| -> Result<(Trace, Samples)> {
        let log = Log::sampling();
        let backend = log.backend(programs.clone(), precision);
        let model = LoadedModel::new(bundle.clone(), folder, host.clone(), Box::new(backend))?;
        let trace = trace(&model, &log, context, &tokens[..tokens.len().min(TOKENS)])?;
        Ok((trace, log.samples()))
    };
    let ((half, exact), (engine, simulated)) = (run(Precision::F16)?, run(Precision::ANE)?);
    let measures = LogitMeasures::of(&engine.logits, &half.logits, bundle.model.head_rows() as usize);
    let first = first_departure(bundle, &exact, &simulated, places);
    let mut problems = Vec::new();
    // written so that NaN is a problem
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

/// The first value that departs, in words.
fn first_departure(
    bundle: &Bundle,
    exact: &Samples,
    simulated: &Samples,
    places: &BTreeMap<String, BTreeMap<String, Places>>,
) -> Option<String> {
    let empty = IndexMap::new();
    exact.iter().find_map(|(function, values)| {
        let entry = &bundle.functions[*function];
        let simulated = simulated.get(function).unwrap_or(&empty);
        let places = places.get(&entry.package).and_then(|places| places.get(&entry.function));
        values.iter().find_map(|(name, values)| {
            let closed = places.is_some_and(|places| places.masked.contains(name));
            let difference = difference(values, simulated.get(name)?);
            // what a mask closes is of no size of its own
            let departs = !closed && !(difference <= DEPARTS) && size(values) >= SMALL;
            let by =
                if difference.is_finite() { format!("{:.1} %", 100.0 * difference) } else { "infinitely much".into() };
            departs.then(|| format!("`{name}` of {} departs by {by}", entry.package))
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
