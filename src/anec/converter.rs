//! High-level API for conversions.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anec_base::{Progress, ProgressEvent, Result};
use anec_bundle::Task;
use anec_calibrate::plan::Planned;
use anec_calibrate::sensitivity::{self, Sensitivities, SensitivityOptions};
use anec_calibrate::{calibrate, plan};
use anec_convert::plan::ConvertPlan;
use anec_convert::report::{ConvertReport, QualityReport};
use anec_convert::{
    Choose, ConvertOptions, ConvertSteps, ConvertedBundle, Outcome, convert, convert_with, notes, open, output,
};
use anec_exec::Precision;
use anec_manifest::{
    LmHead, Manifest, Numerics, ProgramFormat, Quant, QuantOverride, QuantPlan, ResidualScale, WeightFormat,
};
use anec_runtime::{Chunking, ForwardOptions, LoadedModel, Tokenizer};
use anec_validate::numerics::residual_scale;
use anec_validate::{LogitMeasures, Thresholds, prompts};

use crate::scratch::Scratch;

/// Tokens for measuring the residual stream (`numerics.scale: auto`) and the quality of a converted model.
const POSITIONS: usize = 256;
/// Largest number of weights of a model whose quality is measured.
const MEASURED_WEIGHTS: u64 = 2_200_000_000;

/// Converter of a source into a bundle.
///
/// ```no_run
/// # fn main() -> anec::base::Result<()> {
/// let manifest = anec::Manifest::open("qwen3-0.6b", &[])?;
/// let outcome = anec::Converter::new(manifest)
///     .out("qwen3.anec")
///     .observe(|event| eprintln!("{event:?}"))
///     .convert()?;
/// println!("{}", outcome.path().display());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Converter {
    pub(crate) manifest: Manifest,
    pub(crate) out: Option<PathBuf>,
    pub(crate) force: bool,
    /// Replaces a bundle of other inputs.
    pub(crate) replace: bool,
    pub(crate) compile: bool,
    pub(crate) measure: bool,
    pub(crate) progress: Progress,
}

impl Converter {
    /// Creates a conversion described by a manifest.
    pub fn new(manifest: Manifest) -> Self {
        let progress = Progress::default();
        Converter { manifest, out: None, force: false, replace: false, compile: true, measure: false, progress }
    }

    /// Sets the source: a path, or `hf:owner/name[@revision][/file]`. Default: the manifest's.
    pub fn source(mut self, source: impl Into<String>) -> Self {
        self.manifest.source = Some(source.into());
        self
    }

    /// Sets the bundle folder. Default: `NAME.anec` in the current folder.
    pub fn out(mut self, folder: impl Into<PathBuf>) -> Self {
        self.out = Some(folder.into());
        self
    }

    /// Replaces a bundle of other inputs, and restarts an interrupted conversion.
    pub fn force(mut self, force: bool) -> Self {
        self.force = force;
        self
    }

    /// Sets whether packages are compiled if Core ML's compiler is available. Default: true.
    pub fn compile(mut self, compile: bool) -> Self {
        self.compile = compile;
        self
    }

    /// Sets a callback for progress events.
    pub fn observe(self, observer: impl Fn(ProgressEvent<'_>) + Send + Sync + 'static) -> Self {
        self.progress(Progress::new(observer))
    }

    /// Sets the receiver of progress events.
    pub fn progress(mut self, progress: Progress) -> Self {
        self.progress = progress;
        self
    }

    /// Sets whether the converted model's logits are compared with those of the source's own weights, on built-in text.
    /// It takes seconds, and disk space for the weights in fp16; models of more than two billion weights, and those
    /// that generate no text, are skipped. Where the manifest leaves `quant.feedback` open and a model of at most a
    /// billion weights would fail its parity gate, it is converted again with `gptq`; if int8 weights would fail even
    /// so, again with the roles in fp16 that lose most. Default: false.
    pub fn measure(mut self, measure: bool) -> Self {
        self.measure = measure;
        self
    }

    /// Plans the conversion. Only shapes are read.
    ///
    /// # Errors
    /// If the source can't be opened, its model isn't understood, or the manifest doesn't fit it.
    pub fn plan(&self) -> Result<ConvertPlan> {
        let opened = open::open_shapes(&self.manifest, &self.progress)?;
        ConvertPlan::new(&open::resolve(&self.manifest, &opened.source, &*opened.model), &*opened.model)
    }

    /// Converts with the manifest's `quant.feedback`, where `none` is the default.
    pub(crate) fn convert_as_asked(&self) -> Result<Outcome> {
        let mut manifest = self.manifest.clone();
        if manifest.numerics.scale == Some(ResidualScale::Auto) {
            manifest.numerics.scale = Some(ResidualScale::Factor(self.measured_scale()?));
        }
        let mut plan = None;
        if let Some(budget) = manifest.quant.plan {
            let planned = self.planned(&manifest, budget)?;
            (manifest, plan) = (planned.manifest, Some(planned.report));
        }
        let calibrated = manifest.clone();
        let mut options = ConvertOptions::new(manifest);
        (options.out, options.force, options.compile) = (self.out.clone(), self.force, self.compile);
        options.replace = self.replace;
        options.progress = self.progress.clone();
        options.check_tokenizer = Some(|name, content| Ok(Tokenizer::check_steps(name, content)?));
        let choose = |folder: &Path| calibrate(&calibrated, folder, &self.progress);
        let measure = |written: &mut ConvertedBundle| {
            written.report.plan = plan.clone();
            if self.measure {
                self.measure_quality(&calibrated, written);
            }
        };
        let choose: Option<Choose<'_>> = if calibrated.quant.is_calibrated() { Some(&choose) } else { None };
        convert_with(&options, ConvertSteps { choose, measure: Some(&measure) })
    }

    /// Adds the quality of a converted model to its report. An error is a note, because the bundle is complete.
    fn measure_quality(&self, manifest: &Manifest, written: &mut ConvertedBundle) {
        let mut tensors = written.report.packages.iter().flat_map(|package| &package.tensors);
        let model = &written.bundle.model;
        let is_quantized = tensors.any(|tensor| tensor.granularity.is_some());
        let has_text = model.task == Task::TextGeneration && Tokenizer::of(&written.bundle, &written.path).is_ok();
        if !is_quantized || !has_text || weights(&written.report) > MEASURED_WEIGHTS {
            return;
        }
        match self.quality(manifest, written) {
            Ok(quality) => {
                written.report.notes.extend(notes::of_quality(&quality, &manifest.quant));
                written.report.quality = Some(quality);
            }
            Err(error) => written.report.notes.push(format!("the quality was not measured: {error}")),
        }
    }

    fn quality(&self, manifest: &Manifest, written: &ConvertedBundle) -> Result<QualityReport> {
        let start = Instant::now();
        let scratch = Scratch::within(&beside(self.out.as_deref()))?;
        let logits = |model: Arc<LoadedModel>, tokens: &[u32]| -> Result<Vec<f32>> {
            let ask = ForwardOptions::all(Chunking::Largest);
            Ok(model.start(tokens.len() as u64)?.forward(tokens, &ask)?.logits)
        };
        let tokens = prompts::tokens(&written.bundle, &written.path, POSITIONS)?;
        let reference = logits(unquantized(manifest, scratch.path(), &Progress::hidden())?, &tokens)?;
        let models = LoadedModel::on_cpu_with_logits(&written.path, &[Precision::F32])?;
        let found = models.into_iter().map(|model| logits(model, &tokens)).collect::<Result<Vec<_>>>()?.concat();
        let measured = LogitMeasures::of(&found, &reference, written.bundle.model.head_rows() as usize);
        let limits = Thresholds::of(&written.bundle.manifest.gates).parity;
        let [low, high] = measured.norm_ratio;
        // as in the gate, top-1 may be lower by its standard error
        let chance = (limits.top1 * (1.0 - limits.top1) / measured.rows as f64).sqrt();
        // written so that NaN misses its limit
        let missed = [
            (!(measured.kl <= limits.kl)).then(|| format!("KL {:.4}, limit {}", measured.kl, limits.kl)),
            (!(measured.p1 >= limits.p1)).then(|| format!("cosine (p1) {:.4}, limit {}", measured.p1, limits.p1)),
            (!(measured.cosine >= limits.cosine))
                .then(|| format!("cosine (min) {:.4}, limit {}", measured.cosine, limits.cosine)),
            (!(measured.top1 >= limits.top1 - chance))
                .then(|| format!("top-1 {:.3}, limit {}", measured.top1, limits.top1)),
            (!(low >= limits.norm_ratio[0] && high <= limits.norm_ratio[1]))
                .then(|| format!("norm ratio {low:.3} to {high:.3}, limits {:?}", limits.norm_ratio)),
        ];
        Ok(QualityReport {
            tokens: tokens.len() as u64,
            kl: measured.kl,
            top1: measured.top1,
            p1: measured.p1,
            cosine: measured.cosine,
            missed: missed.into_iter().flatten().collect(),
            seconds: start.elapsed().as_secs_f64(),
        })
    }

    /// Measures the loss of each number format in each role and layer. Measurements are stored in a file,
    /// [`saved`](Self::saved), and reused.
    ///
    /// # Errors
    /// If the source can't be converted, the calibration text can't be read, or the file can't be written.
    pub fn sensitivities(&self, formats: &[QuantOverride], tokens: usize) -> Result<Sensitivities> {
        let scratch = Scratch::within(&beside(self.out.as_deref()))?;
        let saved = self.saved()?;
        let options = SensitivityOptions::new(formats, tokens, &saved);
        sensitivity::measure(&self.manifest, &options, scratch.path(), &self.progress)
    }

    /// File with the measured losses: `NAME.sensitivities.json` beside the bundle.
    ///
    /// # Errors
    /// If the manifest has neither a name nor a source.
    pub fn saved(&self) -> Result<PathBuf> {
        let name = self.name().ok_or(anec_convert::ConvertError::NoSource)?;
        Ok(beside(self.out.as_deref()).join(format!("{name}.sensitivities.json")))
    }

    /// Name of the model: the manifest's, or that of the source.
    pub(crate) fn name(&self) -> Option<String> {
        let named = || self.manifest.source.as_deref().map(open::name_of);
        self.manifest.name.clone().or_else(named)
    }

    /// Returns the manifest with formats chosen under its budget.
    fn planned(&self, manifest: &Manifest, budget: QuantPlan) -> Result<Planned> {
        let converter = Converter { manifest: manifest.clone(), ..self.clone() };
        let measured = converter.sensitivities(&sensitivity::FORMATS, sensitivity::TOKENS)?;
        plan::plan(manifest, budget, &measured)
    }

    /// Measures the residual scale: unquantized weights in f32 on built-in text, through a temporary bundle beside the
    /// real one.
    fn measured_scale(&self) -> Result<f32> {
        let numerics = Numerics { scale: Some(ResidualScale::Factor(1.0)) };
        let manifest = Manifest { numerics, ..self.manifest.clone() };
        let scratch = Scratch::within(&beside(self.out.as_deref()))?;
        let model = unquantized(&manifest, scratch.path(), &self.progress)?;
        let tokens = prompts::tokens(model.bundle(), model.folder(), POSITIONS)?;
        let scale = residual_scale(model.bundle(), model.folder(), &tokens)?;
        self.progress
            .note(&format!("numerics.scale is {scale}, as measured on the residual stream of {} tokens", tokens.len()));
        Ok(scale)
    }
}

/// Number of weights in a bundle's packages.
pub(crate) fn weights(report: &ConvertReport) -> u64 {
    let tensors = report.packages.iter().flat_map(|package| &package.tensors);
    tensors.map(|tensor| tensor.shape.iter().product::<u64>()).sum()
}

/// Parent folder of an output path.
pub(crate) fn beside(path: Option<&Path>) -> PathBuf {
    let target = path.and_then(|path| output::target(path).ok());
    let parent = target.as_deref().and_then(Path::parent).filter(|folder| !folder.as_os_str().is_empty());
    parent.unwrap_or(Path::new(".")).to_owned()
}

/// Loads a source's model unquantized, on the CPU in f32, through a bundle in `scratch`.
pub(crate) fn unquantized(manifest: &Manifest, scratch: &Path, progress: &Progress) -> Result<Arc<LoadedModel>> {
    let quant = Quant {
        weights: WeightFormat::None,
        overrides: Default::default(),
        layers: Vec::new(),
        plan: None,
        ..manifest.quant.clone()
    };
    let folder = scratch.join("bundle");
    // the executor runs packages
    let (format, contract) = (ProgramFormat::Coreml, None);
    let plain = Manifest { quant, format, contract, lm_head: LmHead::default(), ..manifest.clone() };
    let mut options = ConvertOptions::new(plain);
    (options.out, options.progress) = (Some(folder.clone()), progress.clone());
    convert(&options)?;
    LoadedModel::on_cpu(&folder, Precision::F32)
}
