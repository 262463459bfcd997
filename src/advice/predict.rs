//! Prediction of a conversion on a chip: time of every call, decode and prefill speed, memory, first load.

use std::collections::{BTreeMap, BTreeSet};

use rayon::prelude::*;
use schemars::JsonSchema;
use serde::Serialize;

use super::chips::{ChipTable, ChipTarget, Reading, WeightPath};
use super::speed::points::SpeedPoints;
use super::speed::{CallWork, ChipRates, PredictedTime, SpeedModel};
use anec_base::Result;
use anec_bundle::{Stage, TokenCount};
use anec_convert::plan::ConvertPlan;
use anec_convert::{WeightUse, Workload};
use anec_family::{FamilyModel, Purpose};
use anec_manifest::{Manifest, Quant};

/// Prediction for a chip.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct ChipPrediction {
    /// Chip, with `@` and the system if one was given.
    pub target: String,
    /// Kind of evidence: always `predicted`.
    pub evidence: &'static str,
    /// Calls of every function at every number of tokens; for ranges the first and the last.
    pub functions: Vec<FunctionPrediction>,
    /// Speeds for each context.
    pub contexts: Vec<ContextPrediction>,
    /// Calls of all functions for each number of tokens, ascending; only of models that don't generate text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<CallPrediction>,
    /// Memory in bytes with one function of each package loaded and the states of one text.
    pub loaded_bytes: u64,
    /// Memory in bytes with all functions loaded.
    pub all_loaded_bytes: u64,
    /// Seconds of the first load of all functions, least and most.
    pub first_load_seconds: [f64; 2],
    /// Unpublished facts and their replacements.
    pub assumptions: Vec<String>,
    /// Notes about the chip and its systems.
    pub notes: Vec<String>,
}

/// Predicted call of a function.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct FunctionPrediction {
    /// Package.
    pub package: String,
    /// Name.
    pub function: String,
    /// Context length.
    pub context: u64,
    /// Tokens of the call.
    pub tokens: u64,
    /// Predicted time.
    #[serde(flatten)]
    pub time: PredictedTime,
}

/// Call of all functions by which a model that doesn't generate text processes one, or a part of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct CallPrediction {
    /// Tokens of the call.
    pub tokens: u64,
    /// Time of all functions.
    pub milliseconds: f64,
}

/// Speeds for a context.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct ContextPrediction {
    /// Context length in tokens.
    pub context: u64,
    /// Tokens per decode call.
    pub decode_tokens: u64,
    /// Decode speed in tokens per second.
    pub decode_per_second: f64,
    /// Tokens per prefill call.
    pub prefill_tokens: u64,
    /// Prefill speed in tokens per second.
    pub prefill_per_second: f64,
}

/// Numbers of prompt and generated tokens of the text by which forms are compared, if the context can hold them.
pub const TEXT: [u64; 2] = [512, 256];

/// Numbers of tokens of the texts by which forms of models that don't generate text are compared, as far as the context
/// holds them.
pub const TEXTS: [u64; 5] = [32, 128, 480, 1900, 7600];

/// Tokens over which the search spreads the time of a first load, which the system repeats after each update.
pub const TOKENS_PER_LOAD: f64 = 1e5;

impl ChipPrediction {
    /// Milliseconds per token of the compared text, with the first load of all functions spread over
    /// `TOKENS_PER_LOAD`.
    pub fn cost_per_token(&self) -> f64 {
        let [least, most] = self.first_load_seconds;
        self.milliseconds_per_token() + (least + most) / 2.0 * 1e3 / TOKENS_PER_LOAD
    }

    /// Milliseconds per token of a text with `TEXT` prompt and generated tokens, or two thirds and one third of the
    /// largest context if that is shorter. Each token uses the smallest context that holds it. Models that don't
    /// generate text are compared by `TEXTS`.
    pub fn milliseconds_per_token(&self) -> f64 {
        let largest = self.contexts.last().map_or(1, |context| context.context);
        if !self.calls.is_empty() {
            let texts = texts(largest);
            return texts.iter().map(|tokens| self.milliseconds_of_text(*tokens)).sum::<f64>()
                / texts.iter().sum::<u64>() as f64;
        }
        let [read, written] = text(largest);
        let holding = |tokens: u64| self.contexts.iter().find(|context| context.context >= tokens);
        let time = |position: u64, rate: fn(&ContextPrediction) -> f64| {
            holding(position + 1).map_or(f64::INFINITY, |context| 1e3 / rate(context))
        };
        let reading: f64 = (0..read).map(|position| time(position, |context| context.prefill_per_second)).sum();
        let writing: f64 =
            (read..read + written).map(|position| time(position, |context| context.decode_per_second)).sum();
        (reading + writing) / (read + written) as f64
    }

    /// Milliseconds of a text of a model that doesn't generate any: as many of the largest calls as it fills, and the
    /// smallest that holds the rest.
    fn milliseconds_of_text(&self, tokens: u64) -> f64 {
        let Some(largest) = self.calls.last() else { return f64::INFINITY };
        let (full, rest) = (tokens / largest.tokens, tokens % largest.tokens);
        let holding = self.calls.iter().find(|call| call.tokens >= rest).filter(|_| rest > 0);
        full as f64 * largest.milliseconds + holding.map_or(0.0, |call| call.milliseconds)
    }
}

/// Numbers of tokens of the compared texts that fit into a context.
fn texts(context: u64) -> Vec<u64> {
    let fitting: Vec<u64> = TEXTS.into_iter().filter(|tokens| *tokens <= context).collect();
    if fitting.is_empty() { vec![context] } else { fitting }
}

/// Numbers of prompt and generated tokens that fit into a context.
pub(crate) fn text(context: u64) -> [u64; 2] {
    let [read, written] = TEXT;
    if read + written <= context {
        return TEXT;
    }
    let written = (context / 3).max(1);
    [context - written, written]
}

/// Cost of a weight on a chip: bytes that are streamed, weights that are looked up in palettes.
pub(crate) fn reading(weight: &WeightUse, quant: &Quant, target: &ChipTarget<'_>) -> (f64, f64) {
    let (format, layout) = weight.layout(quant);
    let path = WeightPath::of(&format);
    match target.chip.reading(path) {
        Some(Reading::Unfolds | Reading::Fails) => (2.0 * weight.elements() as f64, 0.0),
        Some(Reading::Streams) | None => {
            let palette = matches!(path, WeightPath::Palette | WeightPath::GroupedPalette);
            (layout.bytes() as f64, if palette { weight.elements() as f64 } else { 0.0 })
        }
    }
}

/// Notes about the forms of weights on a chip.
fn notes(quant: &Quant, weights: &[WeightUse], target: &ChipTarget<'_>) -> Vec<String> {
    let mut notes = Vec::new();
    for weight in weights {
        let (format, _) = weight.layout(quant);
        let path = WeightPath::of(&format);
        let chip = &target.chip.name;
        let note = match target.chip.reading(path) {
            Some(Reading::Streams) => continue,
            Some(Reading::Unfolds) => format!("{chip} unfolds {format} weights to fp16 when they are loaded"),
            Some(Reading::Fails) => format!("{chip} doesn't take {format} weights on its Neural Engine"),
            None => format!("how {chip} reads {format} weights isn't published: as if streamed"),
        };
        if !notes.contains(&note) {
            notes.push(note);
        }
    }
    notes
}

/// Function of a plan with its weights and operations.
#[derive(Clone)]
struct PlannedFunction<'a> {
    package: usize,
    stage: &'a Stage,
    name: &'a str,
    context: u64,
    tokens: u64,
    weights: Vec<WeightUse>,
    macs: u64,
    scores: u64,
}

/// Predicts the conversion of a resolved manifest on chips.
///
/// # Errors
/// If too little is published about a chip, or a function can't be built.
pub fn predict(
    manifest: &Manifest,
    model: &dyn FamilyModel,
    plan: &ConvertPlan,
    targets: &[ChipTarget<'_>],
) -> Result<Vec<ChipPrediction>> {
    if targets.is_empty() {
        return Ok(Vec::new());
    }
    let requests = plan.packages.iter().enumerate();
    let requests: Vec<_> = requests
        .flat_map(|(package, planned)| planned.functions.iter().map(move |request| (package, request)))
        .collect();
    // functions are built for counting only, and dropped
    let counted = requests.into_par_iter().map(|(package, request)| {
        let workload = Workload::of(model, &plan.form, &manifest.quant, request)?;
        let mut lengths = match request.tokens {
            TokenCount::Fixed(tokens) => vec![tokens],
            TokenCount::Range(lower, upper) => vec![lower, upper],
        };
        lengths.dedup();
        let functions = lengths.into_iter().map(|tokens| PlannedFunction {
            package,
            stage: &request.stage,
            name: &request.name,
            context: request.context,
            tokens,
            weights: workload.weights.clone(),
            macs: workload.macs(tokens),
            scores: workload.scores(tokens),
        });
        Ok(functions.collect::<Vec<_>>())
    });
    let functions = counted.collect::<Result<Vec<_>>>()?.concat();
    let generates = model.facts().purpose == Purpose::TextGeneration;
    targets.iter().map(|target| Ok(on_chip(manifest, generates, plan, &functions, target)?)).collect()
}

fn on_chip(
    manifest: &Manifest,
    generates: bool,
    plan: &ConvertPlan,
    functions: &[PlannedFunction<'_>],
    target: &ChipTarget<'_>,
) -> Result<ChipPrediction, super::chips::ChipError> {
    let table = ChipTable::built_in();
    let rates = ChipRates::of(target.chip, table, SpeedModel::built_in())?;
    let works: Vec<CallWork> = functions.iter().map(|function| work(manifest, plan, function, target)).collect();
    let calls = |function: &PlannedFunction<'_>, work: &CallWork| FunctionPrediction {
        package: format!("{}.mlpackage", plan.packages[function.package].name),
        function: function.name.to_owned(),
        context: function.context,
        tokens: function.tokens,
        time: rates.call(work),
    };
    let fewest = functions.iter().map(|function| function.tokens).min().unwrap_or(1);
    let most = functions.iter().map(|function| function.tokens).max().unwrap_or(1);
    let of = |context: Option<u64>, tokens: u64| {
        functions.iter().zip(&works).filter(move |(function, _)| {
            function.tokens == tokens && context.is_none_or(|context| function.context == context)
        })
    };
    // milliseconds of a call of all functions, without the head
    let layers = |context: u64, tokens: u64| -> f64 {
        let layers = of(Some(context), tokens).filter(|(function, _)| function.stage.whole_layers().is_some());
        let networks = of(None, tokens).filter(|(function, _)| matches!(function.stage, Stage::FeedForward { .. }));
        let times = layers.chain(networks).map(|(_, work)| rates.call(work).milliseconds);
        let mut experts: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
        for (function, work) in of(None, tokens) {
            if let Stage::Experts { layer, .. } = function.stage {
                experts.entry(*layer).or_default().push(rates.call(work).milliseconds);
            }
        }
        let asked = (plan.experts_per_token() * tokens) as usize;
        let experts = experts.into_values().map(|mut times| {
            times.sort_by(|a, b| b.total_cmp(a));
            times.into_iter().take(asked).sum::<f64>()
        });
        times.sum::<f64>() + experts.sum::<f64>()
    };
    let head = |tokens: u64| {
        let pieces = of(None, tokens).filter(|(function, _)| matches!(function.stage, Stage::Head { .. }));
        rates.side_by_side(pieces.map(|(_, work)| work)).map_or(0.0, |time| time.milliseconds)
    };
    let contexts = plan.contexts.iter().map(|context| ContextPrediction {
        context: *context,
        decode_tokens: fewest,
        decode_per_second: 1e3 / (layers(*context, fewest) + head(fewest)),
        prefill_tokens: most,
        prefill_per_second: 1e3 * most as f64 / layers(*context, most),
    });
    let mut sizes: Vec<u64> = functions.iter().map(|function| function.tokens).filter(|_| !generates).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let largest = plan.contexts.last().copied().unwrap_or(1);
    let whole =
        |tokens: &u64| CallPrediction { tokens: *tokens, milliseconds: layers(largest, *tokens) + head(*tokens) };
    let numbers = SpeedPoints::built_in();
    let loaded = |function: &PlannedFunction<'_>| {
        let weights = function.weights.iter().map(|weight| reading(weight, &manifest.quant, target).0);
        weights.sum::<f64>() * numbers.loaded.factor
    };
    // functions of one package and length share their weights
    let mut each: BTreeMap<usize, f64> = BTreeMap::new();
    functions.iter().for_each(|function| {
        let bytes = each.entry(function.package).or_default();
        *bytes = bytes.max(loaded(function));
    });
    // a function with a range of lengths is there twice
    let mut seen = BTreeSet::new();
    let distinct: Vec<_> = functions.iter().filter(|function| seen.insert((function.package, function.name))).collect();
    let stored =
        distinct.iter().flat_map(|function| &function.weights).map(|weight| weight.file_bytes(&manifest.quant));
    let stored = stored.sum::<u64>() as f64;
    let mut weights: Vec<WeightUse> = functions.iter().flat_map(|function| function.weights.clone()).collect();
    weights.dedup();
    let mut notes = notes(&manifest.quant, &weights, target);
    notes.extend(
        table.defects_of(target.chip).map(|system| format!("{}: {}; {}", system.os, system.defect, system.remedy)),
    );
    Ok(ChipPrediction {
        target: target.id(),
        evidence: "predicted",
        functions: functions.iter().zip(&works).map(|(function, work)| calls(function, work)).collect(),
        contexts: contexts.collect(),
        calls: sizes.iter().map(whole).collect(),
        loaded_bytes: each.values().sum::<f64>() as u64 + plan.state_bytes(),
        all_loaded_bytes: distinct.into_iter().map(loaded).sum::<f64>() as u64 + plan.state_bytes(),
        first_load_seconds: numbers.first_load.seconds_per_gb.map(|seconds| seconds * stored / 1e9),
        assumptions: rates.assumptions,
        notes,
    })
}

fn work(manifest: &Manifest, plan: &ConvertPlan, function: &PlannedFunction<'_>, target: &ChipTarget<'_>) -> CallWork {
    let package = &plan.packages[function.package];
    let index = plan.contexts.iter().position(|context| *context == function.context).unwrap_or(0);
    let head = matches!(function.stage, Stage::Head { .. });
    let mut work = CallWork {
        state_bytes: package.state_bytes.get(index).copied().unwrap_or(0) as f64,
        macs: function.macs as f64,
        scores: function.scores as f64,
        head,
        ..CallWork::default()
    }
    .written(manifest.kv_write());
    for weight in &function.weights {
        let (bytes, palette) = reading(weight, &manifest.quant, target);
        work.weight_bytes += bytes;
        work.palette_weights += palette;
    }
    work
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_convert::open::{open, resolve};

    fn predicted(folder: &str, text: &str) -> (ChipPrediction, u64) {
        let source = format!("source={}", anec_testing::root().join(folder).display());
        let manifest = Manifest::from_yaml(text, "test", &[source]).unwrap();
        let opened = open(&manifest).unwrap();
        let manifest = resolve(&manifest, &opened.source, &*opened.model);
        let plan = ConvertPlan::new(&manifest, &*opened.model).unwrap();
        let target = ChipTable::built_in().target("m4").unwrap();
        (predict(&manifest, &*opened.model, &plan, &[target]).unwrap().remove(0), plan.weight_bytes())
    }

    #[test]
    fn each_function_is_loaded_once_with_its_own_weights() {
        // one function for a range of lengths
        let (range, _) = predicted("demo/model", "{ context: 512, lengths: { range: [1, 4] } }");
        assert_eq!(range.loaded_bytes, range.all_loaded_bytes);
        let (two, weights) = predicted("demo/model", "{ context: 512, lengths: { fixed: [1, 4] } }");
        assert!(two.all_loaded_bytes as f64 > two.loaded_bytes as f64 * 1.5);
        let load =
            |of: &ChipPrediction| of.first_load_seconds[1] / SpeedPoints::built_in().first_load.seconds_per_gb[1];
        assert!((load(&two) * 1e9 / weights as f64 - 2.0).abs() < 0.2, "{} of {weights}", load(&two) * 1e9);
        // a function of one expert holds that expert, and constants that all have
        let [routed, split] = ["routed", "split"].map(|form| {
            let text = format!("{{ context: 512, experts: {form}, lengths: {{ fixed: [1] }} }}");
            load(&predicted("tests/fixtures/families/zaya-default", &text).0)
        });
        assert!((routed / split - 1.0).abs() < 0.5, "{routed} and {split}");
    }

    #[test]
    fn models_that_generate_no_text_have_calls_instead_of_decode_speeds() {
        let (encoder, _) = predicted("tests/fixtures/encoders/bert-mean", "lengths: { fixed: [8, 32] }");
        let tokens: Vec<u64> = encoder.calls.iter().map(|call| call.tokens).collect();
        assert_eq!(tokens, [8, 32]);
        assert!(encoder.calls[0].milliseconds < encoder.calls[1].milliseconds);
        assert!(predicted("demo/model", "context: 512").0.calls.is_empty());
        // one full call and one for the rest
        let [small, large] = [0, 1].map(|index| encoder.calls[index].milliseconds);
        assert!((encoder.milliseconds_of_text(40) - small - large).abs() < 1e-12);
        assert!((encoder.milliseconds_of_text(9) - large).abs() < 1e-12);
    }
}
