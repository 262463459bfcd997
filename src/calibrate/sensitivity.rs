//! Loss by each number format of each role and layer: the divergence of the model's predictions on a text from those of
//! the unquantized model, where only the weights of one role in one layer have that format.
//!
//! `loss(role, layer, format) = mean over tokens of Σ p log(p / q)`, with `p` the next-token probabilities of the
//! unquantized model and `q` those with these weights quantized.
//!
//! Layers before the changed one are unaffected, so that the hidden states at the entry of each layer are kept and a
//! measurement runs only the changed layer and those after it. Each result is written to a file at once, from which
//! later measurements of the same model and text read it. Codes are rounded to nearest; error feedback would lower all
//! losses alike.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anec_base::{Progress, Result, hexadecimal, input};
use anec_bundle::{Port, Stage};
use anec_convert::emit::Emitter;
use anec_convert::files;
use anec_convert::open::{Opened, open};
use anec_convert::plan::{ConvertPlan, PackagePlan};
use anec_convert::report::{FormatCost, PlannedGroup};
use anec_exec::{Executable, Precision, WeightCache};
use anec_family::Purpose;
use anec_kernels::distance::divergence;
use anec_manifest::{
    Calibration, CalibrationText, Granularity, Manifest, NumberFormat, Quant, QuantOverride, QuantPlan, Role,
    WeightFormat,
};
use anec_quant::WeightLayout;
use anec_runtime::{Chunking, CpuBackend, Hidden, LoadedModel, PackageStore, TokenSession};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::substitute::{SubstituteHandle, SubstitutingBackend};
use super::unquantized::{UnquantizedModel, unquantized_plan};
use super::{CalibrateError, observed, text};

/// Default number of tokens that losses are measured on; a few hundred suffice to rank formats and layers.
pub const TOKENS: usize = 256;
/// Number of tokens in a window of the text.
const WINDOW: usize = 64;
/// Maximum size of a calibration text in bytes.
const MOST_TEXT: u64 = 1 << 28;

/// Formats that a plan chooses from, largest first; all of them run on the Neural Engine.
pub const FORMATS: [QuantOverride; 5] = [
    QuantOverride { weights: Some(WeightFormat::None), granularity: None, row_scale: None, op: None },
    format(WeightFormat::Int8, Granularity::PerChannel, false),
    format(WeightFormat::Int8, Granularity::PerTensor, false),
    format(WeightFormat::Palette6, Granularity::PerTensor, true),
    format(WeightFormat::Palette4, Granularity::PerTensor, true),
];

/// Returns the formats of the given kinds of numbers, or all of [`FORMATS`] if none are given. 4-bit integers, which
/// are for GPU and CPU, come in blocks of 32.
pub fn formats(kinds: &[WeightFormat]) -> Vec<QuantOverride> {
    if kinds.is_empty() {
        return FORMATS.to_vec();
    }
    let of_kind = |kind: &WeightFormat| -> Vec<QuantOverride> {
        let known: Vec<_> = FORMATS.into_iter().filter(|format| format.weights == Some(*kind)).collect();
        match kind {
            _ if !known.is_empty() => known,
            WeightFormat::Int4 => vec![format(*kind, Granularity::Block(32), false)],
            palette => vec![format(*palette, Granularity::PerTensor, true)],
        }
    };
    kinds.iter().flat_map(of_kind).collect()
}

const fn format(weights: WeightFormat, granularity: Granularity, row_scale: bool) -> QuantOverride {
    QuantOverride { weights: Some(weights), granularity: Some(granularity), row_scale: Some(row_scale), op: None }
}

/// Returns the number format of an override that stands alone.
pub fn number_format(format: QuantOverride) -> NumberFormat {
    let overrides = BTreeMap::from([(Role::MlpUp, format)]);
    Quant { overrides, ..Quant::default() }.of(Role::MlpUp, None)
}

/// Loss by each format of each role and layer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sensitivities {
    /// Number of tokens of the text.
    pub tokens: u64,
    /// Each role of each layer that the manifest sets no format for; the LM head last.
    pub groups: Vec<PlannedGroup>,
}

/// Settings of a measurement.
#[non_exhaustive]
pub struct SensitivityOptions<'a> {
    /// Formats to measure.
    pub formats: &'a [QuantOverride],
    /// Number of tokens to measure on.
    pub tokens: usize,
    /// File that keeps the results.
    pub saved: &'a Path,
}

impl<'a> SensitivityOptions<'a> {
    /// Returns options of a measurement.
    pub fn new(formats: &'a [QuantOverride], tokens: usize, saved: &'a Path) -> Self {
        SensitivityOptions { formats, tokens, saved }
    }
}

/// Content of the results file.
#[derive(Default, Serialize, Deserialize)]
struct Saved {
    /// Digest of everything that losses depend on.
    inputs: String,
    tokens: u64,
    losses: BTreeMap<String, f64>,
}

/// Weights of one role and layer.
struct Group {
    role: Role,
    /// Roles of the weights: those of `role`, or `role` alone.
    roles: BTreeSet<Role>,
    layer: Option<usize>,
    /// Rows and columns of each weight, by key.
    shapes: BTreeMap<String, (u64, u64)>,
}

impl Group {
    fn key(&self, format: QuantOverride) -> String {
        let place = self.layer.map_or_else(|| "head".to_owned(), |layer| format!("layer {layer}"));
        format!("{place}, {}: {}", self.role, number_format(format))
    }

    fn bytes(&self, format: QuantOverride) -> u64 {
        let format = number_format(format);
        self.shapes.values().map(|(rows, columns)| WeightLayout::of(format, *rows, *columns).bytes()).sum()
    }
}

/// Returns the manifest as a plan sees it; a plan may choose formats that need transformed weights.
pub(super) fn as_planned(manifest: &Manifest) -> Manifest {
    let plan = manifest.quant.plan.or(Some(QuantPlan::Kl(1.0)));
    Manifest { quant: Quant { plan, ..manifest.quant.clone() }, ..manifest.clone() }
}

/// Measures losses. `scratch` is an empty folder for the model's weights.
///
/// # Errors
/// Returns an error if the source can't be converted, the text can't be read, a function fails, or the file can't be
/// written.
pub fn measure(
    manifest: &Manifest,
    options: &SensitivityOptions<'_>,
    scratch: &Path,
    progress: &Progress,
) -> Result<Sensitivities> {
    let manifest = as_planned(manifest);
    let opened = open(&manifest)?;
    if opened.model.facts().is_bidirectional() {
        return Err(CalibrateError::Bidirectional("plan").into());
    }
    if opened.model.facts().purpose != Purpose::TextGeneration {
        return Err(CalibrateError::NoPredictions.into());
    }
    let groups = groups(&manifest, &opened, &unquantized_plan(&manifest, &opened)?)?;
    if groups.is_empty() {
        return Err(CalibrateError::NothingToChoose.into());
    }
    let inputs = inputs(&manifest, &opened, options.tokens)?;
    let mut saved = read(options.saved, inputs);
    let all = groups.iter().flat_map(|group| options.formats.iter().map(move |format| (group, *format)));
    let unknown: Vec<(&Group, QuantOverride)> = all
        .filter(|(group, format)| {
            format.weights != Some(WeightFormat::None) && !saved.losses.contains_key(&group.key(*format))
        })
        .collect();
    if !unknown.is_empty() {
        let mut measurement = Measurement::new(&manifest, options.tokens, scratch, progress)?;
        saved.tokens = measurement.tokens;
        let (begin, count) = (Instant::now(), unknown.len());
        for (done, (group, format)) in unknown.into_iter().enumerate() {
            let left = begin.elapsed().as_secs_f64() * (count - done) as f64 / done.max(1) as f64;
            let left = if done == 0 { String::new() } else { format!(", {left:.0} s left") };
            progress.stage(&format!("{}{left}", group.key(format)));
            let loss = measurement.loss(group, format)?;
            saved.losses.insert(group.key(format), loss);
            files::write_json(options.saved, &saved)?;
            progress.set(done as u64 + 1, count as u64);
        }
        progress.finish();
    }
    let cost = |group: &Group, format: QuantOverride| FormatCost {
        format,
        bytes: group.bytes(format),
        // unquantized weights lose nothing
        kl: saved.losses.get(&group.key(format)).copied().unwrap_or(0.0),
    };
    let planned = groups.iter().map(|group| PlannedGroup {
        role: group.role,
        layer: group.layer,
        weights: group.shapes.values().map(|(rows, columns)| rows * columns).sum(),
        formats: options.formats.iter().map(|format| cost(group, *format)).collect(),
        chosen: None,
    });
    Ok(Sensitivities { tokens: saved.tokens, groups: planned.collect() })
}

/// Reads the results file; ignored unless it is of the same inputs.
fn read(path: &Path, inputs: String) -> Saved {
    let found = input::read_text(path, MOST_TEXT).ok().and_then(|text| serde_json::from_str::<Saved>(&text).ok());
    let usable = found.filter(|saved| saved.inputs == inputs && saved.losses.values().all(|loss| loss.is_finite()));
    usable.unwrap_or(Saved { inputs, ..Saved::default() })
}

/// Returns a digest of everything that losses depend on.
fn inputs(manifest: &Manifest, opened: &Opened, tokens: usize) -> Result<String> {
    let text = match &manifest.calibration.text {
        CalibrationText::Builtin => "builtin".to_owned(),
        CalibrationText::File(path) => hexadecimal(&Sha256::digest(input::read_text(path, MOST_TEXT)?)),
    };
    // by content: fine-tuned weights keep the names and sizes of the original
    let files = opened.source.files().par_iter().map(|file| Ok(file.digest()?.to_string()));
    let files = files.collect::<Result<Vec<String>>>()?;
    let of = serde_json::json!({
        "anec": env!("CARGO_PKG_VERSION"),
        "files": files,
        "adapters": manifest.adapters,
        "overflow": manifest.quant.overflow,
        "transforms": opened.model.transformed().done,
        "scale": opened.model.facts().hidden_scale,
        "text": text,
        "tokens": [tokens as u64, manifest.calibration.tokens],
    });
    Ok(hexadecimal(&Sha256::digest(of.to_string())))
}

/// Returns the projections by role and layer, except those that the manifest names a format for. Roles of a group are
/// one, unless the manifest names one of them.
fn groups(manifest: &Manifest, opened: &Opened, plan: &ConvertPlan) -> Result<Vec<Group>> {
    let mut groups: BTreeMap<(usize, Role), Group> = BTreeMap::new();
    let quant = &manifest.quant;
    let said = |role: Role, layer: Option<usize>| {
        let names = |overrides: &BTreeMap<Role, QuantOverride>| {
            overrides.contains_key(&role) || overrides.contains_key(&role.group())
        };
        let of_layer = |layer: usize| {
            let mut own = quant.layers.iter().filter(|own| (own.range[0]..own.range[1]).contains(&layer));
            own.any(|own| names(&own.overrides))
        };
        names(&quant.overrides) || layer.is_some_and(of_layer)
    };
    let mut named = quant.layers.iter().map(|own| &own.overrides).chain([&quant.overrides]).flat_map(BTreeMap::keys);
    let apart = named.any(|role| role.group() != *role);
    for package in &plan.packages {
        let (_, weights) = observed::built(&*opened.model, &plan.form, &package.functions[0])?;
        for weight in weights {
            let (role, layer) = (weight.role, weight.layer);
            if role.is_projection() && !said(role, layer) {
                let of = if apart { role } else { role.group() };
                let new = || Group { role: of, roles: BTreeSet::new(), layer, shapes: BTreeMap::new() };
                let group = groups.entry((layer.unwrap_or(usize::MAX), of)).or_insert_with(new);
                group.roles.insert(role);
                let columns = weight.weight.elements() / weight.channels.max(1);
                group.shapes.insert(weight.weight.key(), (weight.channels, columns));
            }
        }
    }
    Ok(groups.into_values().collect())
}

/// Model whose functions are replaced one at a time.
struct Measurement {
    plain: UnquantizedModel,
    manifest: Manifest,
    model: Arc<LoadedModel>,
    substitute: SubstituteHandle,
    tokens: u64,
    /// Input of each layer and output of the last: per window, `[tokens, hidden_size]`.
    entering: Vec<Vec<Vec<f32>>>,
    /// Logits of each window by the unquantized model.
    reference: Vec<Vec<f32>>,
    /// Sessions that aren't in use: as many as ran at a time.
    idle: Mutex<Vec<Run>>,
}

impl Measurement {
    fn new(manifest: &Manifest, tokens: usize, scratch: &Path, progress: &Progress) -> Result<Self> {
        let plain = UnquantizedModel::new(manifest, scratch, progress)?;
        let substitute = SubstituteHandle::default();
        let inner = CpuBackend::new(PackageStore::of(&plain.bundle, &plain.folder), Precision::F32);
        let backend = Box::new(SubstitutingBackend::new(inner, substitute.clone()));
        let model = LoadedModel::new(plain.bundle.clone(), &plain.folder, plain.host.clone(), backend)?;
        // windows from all over the text
        let whole =
            Calibration { tokens: manifest.calibration.tokens.max(tokens as u64), ..manifest.calibration.clone() };
        let windows = text::windows(&whole, &plain.bundle, &plain.folder, WINDOW)?;
        let step = (windows.len() * WINDOW / tokens.max(1)).max(1);
        let windows: Vec<Vec<u32>> = windows.into_iter().step_by(step).take(tokens.div_ceil(WINDOW)).collect();
        let tokens = windows.iter().map(|window| window.len() as u64).sum();
        let mut hidden = windows.iter().map(|tokens| plain.embedded(tokens)).collect::<Result<Vec<_>>>()?;
        let mut measurement = Measurement {
            plain,
            manifest: manifest.clone(),
            model,
            substitute,
            tokens,
            entering: Vec::new(),
            reference: Vec::new(),
            idle: Mutex::default(),
        };
        for layer in 0..measurement.layers() {
            let left = hidden.iter().map(|hidden| measurement.in_session(|run| run.layer(layer, hidden)));
            let left = left.collect::<Result<_>>()?;
            measurement.entering.push(std::mem::replace(&mut hidden, left));
        }
        let logits = hidden.iter().map(|hidden| measurement.in_session(|run| Ok(run.head(hidden)?.to_vec())));
        measurement.reference = logits.collect::<Result<_>>()?;
        measurement.entering.push(hidden);
        Ok(measurement)
    }

    fn layers(&self) -> usize {
        self.plain.opened.model.facts().num_layers
    }

    /// Calls `run` with a session that no other thread uses, and memory for logits.
    fn in_session<T>(&self, run: impl FnOnce(&mut Run) -> Result<T>) -> Result<T> {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let own = idle().pop();
        let mut own = match own {
            Some(own) => own,
            None => Run { session: self.model.start(WINDOW as u64)?, logits: Vec::new() },
        };
        let result = run(&mut own)?;
        idle().push(own);
        Ok(result)
    }

    /// Returns the loss by a format of a group.
    fn loss(&mut self, group: &Group, format: QuantOverride) -> Result<f64> {
        let first = group.layer.unwrap_or(self.layers());
        let package = self.plain.plan.packages.iter().find(|package| match package.stage {
            Stage::Layers { first, .. } => group.layer == Some(first),
            Stage::Head { .. } => group.layer.is_none(),
            Stage::FeedForward { .. } | Stage::Experts { .. } | Stage::Model { .. } => false,
        });
        let Some(package) = package else { return Err(CalibrateError::NothingToChoose.into()) };
        self.change(package, &group.roles, format)?;
        // windows at the same time: what one does on a single thread fills the others
        let losses = (0..self.reference.len()).into_par_iter().map(|window| self.losses(first, window));
        let losses = losses.collect::<Result<Vec<Vec<f64>>>>();
        self.substitute.clear();
        Ok(mean_loss(&losses?.concat()))
    }

    /// Returns the loss of each token of a window, whose hidden states first change in layer `first`.
    fn losses(&self, first: usize, window: usize) -> Result<Vec<f64>> {
        self.in_session(|run| {
            let mut hidden = self.entering[first][window].clone();
            for layer in first..self.layers() {
                hidden = run.layer(layer, &hidden)?;
            }
            let logits = run.head(&hidden)?;
            let width = self.plain.bundle.model.vocab_size as usize;
            let rows = self.reference[window].chunks_exact(width).zip(logits.chunks_exact(width));
            Ok(rows.map(|(reference, found)| divergence(reference, found)).collect())
        })
    }

    /// Replaces a package's function by one with some roles in another format.
    fn change(&self, package: &PackagePlan, roles: &BTreeSet<Role>, format: QuantOverride) -> Result<()> {
        let unquantized = QuantOverride { weights: Some(WeightFormat::None), ..QuantOverride::default() };
        let of = |role: Role| (role, if roles.contains(&role) { format } else { unquantized });
        let quant = Quant {
            weights: WeightFormat::None,
            overflow: self.manifest.quant.overflow,
            overrides: Role::PROJECTIONS.into_iter().map(of).collect(),
            ..Quant::default()
        };
        let mut emitter = Emitter::new(&quant);
        let graph = self.plain.opened.model.build(&self.plain.plan.form, &package.functions[0], &mut emitter)?;
        let executable = Executable::compile(&graph.function, Precision::F32, &WeightCache::new())?;
        let name = format!("{}.mlpackage", package.name);
        let entries = &self.plain.bundle.functions;
        if let Some((index, entry)) = entries.iter().enumerate().find(|(_, entry)| entry.package == name) {
            let inputs = entry.inputs.iter().map(|port: &Port| port.name.clone()).collect();
            self.substitute.set(index, inputs, executable);
        }
        Ok(())
    }
}

/// Session that runs one window after another, and memory for their logits. Each call leaves the session empty.
struct Run {
    session: TokenSession,
    logits: Vec<f32>,
}

impl Run {
    /// Runs a layer on a window.
    fn layer(&mut self, layer: usize, hidden: &[f32]) -> Result<Vec<f32>> {
        if !self.session.stands_alone(layer) {
            return Err(CalibrateError::Router("plan").into());
        }
        let mut left = self.session.force_layers(layer, hidden, Hidden::BetweenFunctions, &Chunking::Largest)?;
        self.session.reset()?;
        Ok(std::mem::take(&mut left[layer + 1]))
    }

    /// Returns the logits of a window.
    fn head(&mut self, hidden: &[f32]) -> Result<&[f32]> {
        self.session.force_head(hidden, &mut self.logits)?;
        self.session.reset()?;
        Ok(&self.logits)
    }
}

/// Returns the mean of divergences, at least 0. If a format makes the model's numbers infinite, returns [`f64::MAX`],
/// because JSON has no infinity.
fn mean_loss(losses: &[f64]) -> f64 {
    let mean = losses.iter().sum::<f64>() / losses.len().max(1) as f64;
    if mean.is_finite() { mean.max(0.0) } else { f64::MAX }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_format_that_breaks_the_model_loses_everything() {
        assert_eq!(mean_loss(&[0.5, 1.5]), 1.0);
        assert_eq!(mean_loss(&[-1e-9]), 0.0);
        let broken = divergence(&[1.0, 2.0], &[f32::INFINITY, f32::NEG_INFINITY]);
        assert_eq!(mean_loss(&[0.0, broken]), f64::MAX);
        assert_eq!(mean_loss(&[0.0, f64::INFINITY]), f64::MAX);
    }

    #[test]
    fn formats_have_names_of_their_own() {
        let mut names: Vec<String> = FORMATS.iter().map(|format| number_format(*format).to_string()).collect();
        assert_eq!(names[3], "palette6 per tensor with row scales");
        names.dedup();
        assert_eq!(names.len(), FORMATS.len());
        assert_eq!(formats(&[]), FORMATS);
        let named = formats(&[WeightFormat::Int8, WeightFormat::Int4]);
        let named: Vec<String> = named.into_iter().map(|format| number_format(format).to_string()).collect();
        assert_eq!(named, ["int8 per channel", "int8 per tensor", "int4 per block of 32"]);
    }
}
