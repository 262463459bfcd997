//! The numerics gate: the effect of fp16 on a model. The [lint](super::lint) reads the program. This module runs it
//! over a text in f32 and with every result rounded to fp16 (infinite beyond 65504), and compares layer by layer. The
//! Neural Engine's additional effects are simulated (`simulation`).
//!
//! An asset of Core AI holds no MIL. Apple's runtime computes it as it is and in f32; functions are compared as wholes.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use indexmap::IndexMap;
use rayon::prelude::*;

use super::lint::lint;
use super::measure::LogitMeasures;
use super::simulation::simulation;
use super::thresholds::{NumericsThresholds, Thresholds};
use super::trace::{Places, Trace, WatchedPrograms, trace};
use super::trial::not_run;
use super::verdict::{Check, GateReport, listed};
use super::watch::{Log, ValueRange};
use anec_base::Result;
use anec_bundle::{Bundle, Stage, layer_of};
use anec_coreai::bridge::BridgeOptions;
use anec_exec::Precision;
use anec_runtime::coreai::{self, Arithmetic};
use anec_runtime::{Hidden, HostTables, LoadedModel, PackageStore};

/// Name of the gate.
pub const GATE: &str = "numerics";

/// Largest fp16 number.
const MAX_FP16: f64 = half::f16::MAX.to_f64_const();
/// Smallest residual scale that a manifest may have.
const MIN_SCALE: f64 = 1.0 / 65536.0;

/// Checks the bundle in `folder` on `tokens`.
///
/// # Errors
/// If a package can't be read. A function that can't be run fails the gate.
pub fn numerics(bundle: &Bundle, folder: &Path, tokens: &[u32], thresholds: &NumericsThresholds) -> Result<GateReport> {
    let read = |name: &String| -> Result<(Vec<Check>, BTreeMap<String, Places>)> {
        let program = anec_package::open(&folder.join(name))?.program;
        let streams = program.functions.iter().map(|f| (f.name.clone(), Places::of(bundle, name, f))).collect();
        Ok((lint(name, &program)?, streams))
    };
    let names: Vec<&String> = bundle.packages.iter().map(|entry| &entry.package).collect();
    let read: Vec<_> = names.par_iter().map(|name| read(name)).collect::<Result<_>>()?;
    let (mut checks, mut places) = (Vec::new(), BTreeMap::new());
    for (name, (of_package, of_functions)) in names.into_iter().zip(read) {
        checks.extend(of_package);
        places.insert(name.clone(), of_functions);
    }
    let mut run = BTreeSet::new();
    let mut simulated = Vec::new();
    for context in &bundle.model.contexts {
        let texts = texts(bundle, *context, tokens);
        // in parallel, because each has single-threaded phases
        let (traces, check) = rayon::join(
            || texts.iter().map(|text| Traces::watched(bundle, folder, *context, text)).collect::<Vec<_>>(),
            || simulation(bundle, folder, *context, &texts[0], &places, thresholds),
        );
        for (text, traces) in texts.iter().zip(traces) {
            let subject = subject(*context, text, texts.len());
            match traces {
                Ok(traces) => {
                    run.extend(traces.functions());
                    checks.extend(traces.checks(subject, bundle, &places, thresholds));
                }
                Err(error) => checks.push(not_run(subject, error)?),
            }
        }
        simulated.push(match check {
            Ok(check) => check,
            Err(error) => not_run(format!("context {context}, simulated"), error)?,
        });
    }
    checks.push(coverage(bundle, &run));
    checks.extend(simulated);
    Ok(GateReport::new(GATE, checks))
}

/// Checks the asset of the bundle in `folder` on `tokens`, on Apple's runtime.
///
/// # Errors
/// If the runtime isn't there, or can't compute the asset.
pub fn numerics_of_asset(
    bundle: &Bundle,
    folder: &Path,
    tokens: &[u32],
    thresholds: &NumericsThresholds,
    options: &BridgeOptions,
) -> Result<GateReport> {
    let (single, half) = rayon::join(
        || AssetTracer::open(folder, options, Arithmetic::Single),
        || AssetTracer::open(folder, options, Arithmetic::Own),
    );
    let (single, half) = (single?, half?);
    let mut places = BTreeMap::<String, BTreeMap<String, Places>>::new();
    for entry in &bundle.functions {
        places.entry(entry.package.clone()).or_default().insert(entry.function.clone(), Places::of_outputs(entry));
    }
    let (mut checks, mut run) = (Vec::new(), BTreeSet::new());
    for context in &bundle.model.contexts {
        let texts = texts(bundle, *context, tokens);
        for text in &texts {
            let (single, half) = rayon::join(|| single.trace(*context, text), || half.trace(*context, text));
            let traces = Traces { single: single?, half: half?, inside: false };
            run.extend(traces.functions());
            checks.extend(traces.checks(subject(*context, text, texts.len()), bundle, &places, thresholds));
        }
    }
    checks.push(coverage(bundle, &run));
    Ok(GateReport::new(GATE, checks))
}

/// A bundle's asset on Apple's runtime, whose outputs are recorded.
struct AssetTracer {
    model: Arc<LoadedModel>,
    log: Log,
}

impl AssetTracer {
    fn open(folder: &Path, options: &BridgeOptions, how: Arithmetic) -> Result<Self> {
        let (bundle, backend) = coreai::backend(folder, options, how)?;
        let (log, host) = (Log::default(), Arc::new(HostTables::open(&bundle, folder)?));
        let backend = log.outputs(&bundle, backend);
        Ok(AssetTracer { model: LoadedModel::new(bundle, folder, host, Box::new(backend))?, log })
    }

    fn trace(&self, context: u64, tokens: &[u32]) -> Result<Trace> {
        trace(&self.model, &self.log, context, tokens, Hidden::BetweenFunctions)
    }
}

/// Name of a text, one of `count`.
fn subject(context: u64, text: &[u32], count: usize) -> String {
    match count {
        1 => format!("context {context}"),
        _ => format!("context {context}, {} tokens", text.len()),
    }
}

/// Texts that reach every function of a context, at least one. If a text must fit into one call, there is one text for
/// each call size: as long as `tokens`, or as close to that as no other function takes it.
fn texts(bundle: &Bundle, context: u64, tokens: &[u32]) -> Vec<Vec<u32>> {
    if bundle.model.band() != Some(u64::MAX) {
        return vec![tokens.to_vec()];
    }
    let own = bundle.functions.iter().filter(|entry| entry.context == context);
    let sizes: BTreeSet<u64> = own.map(|entry| entry.tokens.most()).collect();
    let mut least = 1;
    let of_size = |most: u64| {
        let length = (tokens.len() as u64).clamp(least, most.max(least));
        least = most + 1;
        tokens.iter().copied().cycle().take(length as usize).collect()
    };
    let texts: Vec<Vec<u32>> = sizes.into_iter().map(of_size).collect();
    if texts.is_empty() { vec![tokens.to_vec()] } else { texts }
}

/// Functions that no call reached are unproven.
fn coverage(bundle: &Bundle, run: &BTreeSet<usize>) -> Check {
    let (subject, claim) = ("bundle", "every function was run");
    let left: Vec<String> = (0..bundle.functions.len())
        .filter(|index| !run.contains(index))
        .map(|index| format!("{} of {}", bundle.functions[index].function, bundle.functions[index].package))
        .collect();
    match listed(&left) {
        None => Check::of(subject, claim, None),
        Some(left) => {
            Check::unproven(subject, claim, format!("no call of the text reaches {left}; another number of tokens may"))
        }
    }
}

/// Runs of the same text in both precisions.
struct Traces {
    single: Trace,
    half: Trace,
    /// Whether values inside functions were seen, or outputs only.
    inside: bool,
}

impl Traces {
    fn watched(bundle: &Bundle, folder: &Path, context: u64, tokens: &[u32]) -> Result<Self> {
        let programs = WatchedPrograms::open(bundle, folder)?;
        let run = |precision| -> Result<Trace> {
            let log = Log::default();
            trace(&programs.model(precision, &log)?, &log, context, tokens, Hidden::BetweenLayers)
        };
        let (single, half) = rayon::join(|| run(Precision::F32), || run(Precision::F16));
        Ok(Traces { single: single?, half: half?, inside: true })
    }

    fn functions(&self) -> impl Iterator<Item = usize> + '_ {
        self.half.seen.keys().copied()
    }

    fn checks(
        &self,
        subject: String,
        bundle: &Bundle,
        places: &BTreeMap<String, BTreeMap<String, Places>>,
        thresholds: &NumericsThresholds,
    ) -> Vec<Check> {
        let mut checks = Vec::new();
        let mut residual = ValueRange::default();
        let width = bundle.model.hidden_size as usize;
        for (function, half) in &self.half.seen {
            let entry = &bundle.functions[*function];
            let empty = IndexMap::new();
            let single = self.single.seen.get(function).unwrap_or(&empty);
            let none = Places::default();
            let places = places.get(&entry.package).and_then(|places| places.get(&entry.function)).unwrap_or(&none);
            for name in &places.stream {
                if let Some(extent) = single.get(name) {
                    residual.largest = residual.largest.max(extent.largest);
                }
            }
            let groups: Vec<(String, Option<usize>)> = match entry.stage {
                // of an asset, the last layer's output is seen
                Stage::Layers { first, end } if !self.inside => {
                    vec![(format!("layers {first} to {}", end - 1), Some(end - 1))]
                }
                Stage::Model { .. } if !self.inside => vec![("the whole model".to_owned(), None)],
                Stage::Layers { first, end } => {
                    (first..end).map(|layer| (format!("layer {layer}"), Some(layer))).collect()
                }
                Stage::FeedForward { layer } => vec![(format!("layer {layer}, feed-forward network"), Some(layer))],
                Stage::Experts { layer, first, end } => {
                    vec![(format!("layer {layer}, experts {first}..{end}"), Some(layer))]
                }
                Stage::Head { first, end } => vec![(format!("head {first}..{end}"), None)],
                Stage::Model { layers, rows } => {
                    let layers = (0..layers).map(|layer| (format!("layer {layer}"), Some(layer)));
                    layers.chain([(format!("head 0..{rows}"), None)]).collect()
                }
            };
            for (name, layer) in groups {
                let within = |values: &IndexMap<String, ValueRange>| -> IndexMap<String, ValueRange> {
                    let mine = |value: &str| match (layer, layer_of(value)) {
                        (None, own) => own.is_none(),
                        (Some(layer), Some(own)) => layer == own,
                        // values outside layers (the last hidden state has the output's name) count for the last layer
                        (Some(layer), None) => match entry.stage {
                            Stage::Layers { end, .. } => layer + 1 == end,
                            Stage::FeedForward { layer: own } | Stage::Experts { layer: own, .. } => layer == own,
                            Stage::Head { .. } | Stage::Model { .. } => false,
                        },
                    };
                    let counts = |value: &str| !self.inside || mine(value) && !places.masked.contains(value);
                    values.iter().filter(|(value, _)| counts(value)).map(|(n, e)| (n.clone(), *e)).collect()
                };
                let measures = match layer {
                    Some(layer) => {
                        LogitMeasures::of(&self.half.hidden[layer + 1], &self.single.hidden[layer + 1], width)
                    }
                    None => self.head(bundle, &entry.stage),
                };
                let subject = format!("{}, {}, {name}", entry.package, entry.function);
                let check = check(subject, &within(half), &within(single), &places.stream, &measures, thresholds);
                checks.push(Check { layer, ..check });
            }
        }
        checks.push(self.residual(subject, bundle, residual.largest, thresholds));
        checks
    }

    /// Compares the logits of a piece of the head.
    fn head(&self, bundle: &Bundle, stage: &Stage) -> LogitMeasures {
        let Some(Range { start: first, end }) = stage.head_rows() else { return LogitMeasures::of(&[], &[], 1) };
        let width = self.half.largest;
        if width > 0 {
            return LogitMeasures::of(&self.half.logits, &self.single.logits, width);
        }
        let piece = |logits: &[f32]| -> Vec<f32> {
            let rows = logits.chunks_exact(bundle.model.head_rows() as usize);
            rows.flat_map(|row| &row[first as usize..end as usize]).copied().collect()
        };
        LogitMeasures::of(&piece(&self.half.logits), &piece(&self.single.logits), (end - first) as usize)
    }

    fn residual(&self, subject: String, bundle: &Bundle, largest: f32, thresholds: &NumericsThresholds) -> Check {
        let own = bundle.model.hidden_scale;
        let problem = (f64::from(largest) * thresholds.headroom > MAX_FP16).then(|| {
            let scale = own * f64::from(scale_for(largest, thresholds));
            let power = scale.log2() as i64;
            format!(
                "it reaches {largest}, fp16 ends at 65504; `numerics.scale: {scale}` (2^{power}, or `auto`) cures it and \
                 leaves the logits as they are"
            )
        });
        let mut check = Check::of(subject, "the residual stream stays in fp16's range", problem);
        check.measured.insert("max_abs".into(), f64::from(largest));
        check.measured.insert("scale".into(), own);
        check
    }
}

pub(super) fn check(
    subject: String,
    half: &IndexMap<String, ValueRange>,
    single: &IndexMap<String, ValueRange>,
    stream: &BTreeSet<String>,
    measures: &LogitMeasures,
    thresholds: &NumericsThresholds,
) -> Check {
    let mut problems = Vec::new();
    let overflow: u64 = half.values().map(|extent| extent.infinite).sum();
    let nan: u64 = half.values().map(|extent| extent.nan).sum();
    let largest = single.iter().max_by(|a, b| a.1.largest.total_cmp(&b.1.largest));
    // the first overflow is the cause of the others
    if let Some((name, extent)) = half.iter().find(|(_, extent)| !extent.is_finite()) {
        let ValueRange { infinite, nan, .. } = extent;
        problems.push(format!("`{name}` is the first with {infinite} infinite numbers and {nan} that are none"));
    }
    if let Some((name, extent)) = largest
        && !(f64::from(extent.largest) * thresholds.headroom <= MAX_FP16)
        && !stream.contains(name)
    {
        let cure = "no residual scale reaches it, it is inside a block";
        problems.push(format!("`{name}` reaches {} in f32, fp16 ends at 65504; {cure}", extent.largest));
    }
    if let Some((name, _)) = single.iter().find(|(_, extent)| !extent.is_finite()) {
        problems.push(format!("`{name}` isn't finite in f32 either"));
    }
    // `!(>=)` is true for NaN
    if !(measures.cosine >= thresholds.cosine) {
        problems.push(format!("cosine {:.5}, expected at least {}", measures.cosine, thresholds.cosine));
    }
    let [low, high] = measures.norm_ratio;
    if !(low >= thresholds.norm_ratio[0] && high <= thresholds.norm_ratio[1]) {
        let [least, most] = thresholds.norm_ratio;
        problems.push(format!("norm ratio from {low:.4} to {high:.4}, expected {least} to {most}"));
    }
    let problem = (!problems.is_empty()).then(|| problems.join("; "));
    let mut check = Check::of(subject, "fp16 computes what f32 computes", problem);
    check.measured = [
        ("cosine", measures.cosine),
        ("max_abs", largest.map_or(0.0, |(_, extent)| f64::from(extent.largest))),
        ("norm_ratio_min", low),
        ("norm_ratio_max", high),
        ("overflow", overflow as f64),
        ("nan", nan as f64),
        ("positions", measures.rows as f64),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into_iter()
    .collect();
    check
}

/// Largest power of two, at most 1, that leaves the required headroom above `largest`.
fn scale_for(largest: f32, thresholds: &NumericsThresholds) -> f32 {
    let mut scale = 1.0;
    while f64::from(largest) * scale * thresholds.scale_headroom > MAX_FP16 && scale > MIN_SCALE {
        scale /= 2.0;
    }
    scale as f32
}

/// Residual scale that a model needs. Runs the bundle in `folder`, whose residual stream must be unscaled, in f32.
///
/// # Errors
/// If a package can't be read or a function can't be run.
pub fn residual_scale(bundle: &Bundle, folder: &Path, tokens: &[u32]) -> Result<f32> {
    let host = Arc::new(HostTables::open(bundle, folder)?);
    let bundle = &bundle.with_logits();
    let log = Log::default();
    let backend = log.backend(PackageStore::of(bundle, folder), Precision::F32);
    let model = LoadedModel::new(bundle.clone(), folder, host, Box::new(backend))?;
    let seen = trace(&model, &log, model.context(), tokens, Hidden::BetweenLayers)?.seen;
    let mut largest = 0f32;
    for (function, values) in seen {
        let entry = &bundle.functions[function];
        let program = anec_package::open(&folder.join(&entry.package))?.program;
        let places =
            program.function(&entry.function).map(|f| Places::of(bundle, &entry.package, f)).unwrap_or_default();
        let inside = places.stream.iter().filter_map(|name| values.get(name)).map(|extent| extent.largest);
        largest = inside.fold(largest, f32::max);
    }
    Ok(scale_for(largest, &Thresholds::built_in().numerics))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_is_the_largest_power_of_two_that_leaves_room() {
        let thresholds = Thresholds::built_in().numerics;
        assert_eq!(scale_for(100.0, &thresholds), 1.0);
        assert_eq!(scale_for(16376.0, &thresholds), 1.0);
        assert_eq!(scale_for(16377.0, &thresholds), 0.5);
        assert_eq!(scale_for(200_000.0, &thresholds), 1.0 / 16.0);
        assert_eq!(scale_for(f32::MAX, &thresholds), 1.0 / 65536.0);
    }
}
