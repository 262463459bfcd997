//! The front door to conversions.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anec_base::progress::{Progress, ProgressEvent};
use anec_base::{FileError, Result};
use anec_calibrate::sensitivity::{self, SensitivityOptions};
use anec_calibrate::{Planned, Sensitivities, calibrate, plan};
use anec_convert::report::FILE_NAME as REPORT;
use anec_convert::{ConvertOptions, ConvertPlan, Outcome, convert, convert_chosen, files, open, output};
use anec_exec::Precision;
use anec_manifest::{Manifest, Numerics, Quant, QuantOverride, QuantPlan, ResidualScale, WeightFormat};
use anec_runtime::{LoadedModel, Tokenizer};
use anec_validate::numerics::residual_scale;
use anec_validate::prompts;

/// Tokens that the residual stream is measured on, where the manifest leaves its scale open.
const POSITIONS: usize = 256;

/// Converts a source into a bundle.
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
    manifest: Manifest,
    out: Option<PathBuf>,
    force: bool,
    compile: bool,
    progress: Progress,
}

impl Converter {
    /// A conversion as the manifest describes it.
    pub fn new(manifest: Manifest) -> Self {
        Converter { manifest, out: None, force: false, compile: true, progress: Progress::default() }
    }

    /// Takes the weights from here instead of the manifest's source: a path, or `hf:owner/name[@revision][/file]`.
    pub fn source(mut self, source: impl Into<String>) -> Self {
        self.manifest.source = Some(source.into());
        self
    }

    /// The bundle's folder; `NAME.anec` in the current one if none is given.
    pub fn out(mut self, folder: impl Into<PathBuf>) -> Self {
        self.out = Some(folder.into());
        self
    }

    /// Replaces a bundle of other inputs, and starts anew what was interrupted.
    pub fn force(mut self, force: bool) -> Self {
        self.force = force;
        self
    }

    /// Whether packages are compiled where Core ML's compiler is there; they are by default.
    pub fn compile(mut self, compile: bool) -> Self {
        self.compile = compile;
        self
    }

    /// Who is told how far the conversion is.
    pub fn observe(self, observer: impl Fn(ProgressEvent<'_>) + Send + Sync + 'static) -> Self {
        self.progress(Progress::new(observer))
    }

    /// The same, for a receiver that there is already.
    pub fn progress(mut self, progress: Progress) -> Self {
        self.progress = progress;
        self
    }

    /// What the conversion would write. Nothing is read but shapes.
    ///
    /// # Errors
    /// When the source can't be opened, its model isn't understood, or the manifest doesn't fit it.
    pub fn plan(&self) -> Result<ConvertPlan> {
        let opened = open::open_shapes(&self.manifest, &self.progress)?;
        ConvertPlan::new(&open::resolve(&self.manifest, &opened.source, &*opened.model), &*opened.model)
    }

    /// Converts. An interrupted conversion goes on where it was. Where the manifest says `numerics.scale: auto`, the scale
    /// of the residual stream is measured first; where it has a `quant.plan`, formats are chosen by what the model loses by
    /// each; where it says `quant.feedback: gptq`, the codes of weights are chosen by a calibration text.
    ///
    /// # Errors
    /// Anything that is wrong with the source, the manifest, the output folder or the disk.
    pub fn convert(&self) -> Result<Outcome> {
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
        let options = ConvertOptions {
            manifest,
            out: self.out.clone(),
            force: self.force,
            compile: self.compile,
            progress: self.progress.clone(),
            check_tokenizer: Some(|name, content| Ok(Tokenizer::check_steps(name, content)?)),
        };
        let mut outcome = if calibrated.quant.is_calibrated() {
            convert_chosen(&options, &|folder| calibrate(&calibrated, folder, &self.progress))?
        } else {
            convert(&options)?
        };
        if let (Outcome::Written(written), Some(plan)) = (&mut outcome, plan) {
            written.report.plan = Some(plan);
            files::write_json(&written.path.join(REPORT), &written.report)?;
        }
        Ok(outcome)
    }

    /// What the model loses by each number format of each role and layer. What was measured is kept in a file,
    /// [`saved`](Self::saved), and read back from there.
    ///
    /// # Errors
    /// When the source can't be converted, the calibration text can't be read, or the file can't be written.
    pub fn sensitivities(&self, formats: &[QuantOverride], tokens: usize) -> Result<Sensitivities> {
        let scratch = scratch_beside(self.out.as_deref(), ".anec-sensitivities-")?;
        let options = SensitivityOptions { formats, tokens, saved: &self.saved()? };
        sensitivity::measure(&self.manifest, &options, scratch.path(), &self.progress)
    }

    /// The file that keeps what formats cost: `NAME.sensitivities.json` beside the bundle.
    ///
    /// # Errors
    /// When the manifest has neither name nor source.
    pub fn saved(&self) -> Result<PathBuf> {
        let named = || self.manifest.source.as_deref().map(open::name_of);
        let name = self.manifest.name.clone().or_else(named).ok_or(anec_convert::ConvertError::NoSource)?;
        Ok(beside(self.out.as_deref()).join(format!("{name}.sensitivities.json")))
    }

    /// The manifest with the formats that its budget allows.
    fn planned(&self, manifest: &Manifest, budget: QuantPlan) -> Result<Planned> {
        let converter = Converter { manifest: manifest.clone(), ..self.clone() };
        let measured = converter.sensitivities(&sensitivity::FORMATS, sensitivity::TOKENS)?;
        plan::plan(manifest, budget, &measured)
    }

    /// The residual scale that the model needs: its weights, not quantized, run in f32 over anec's own text. They go
    /// through a bundle beside the real one, which is removed afterwards.
    fn measured_scale(&self) -> Result<f32> {
        let numerics = Numerics { scale: Some(ResidualScale::Factor(1.0)) };
        let manifest = Manifest { numerics, ..self.manifest.clone() };
        let scratch = scratch_beside(self.out.as_deref(), ".anec-scale-")?;
        let model = unquantized(&manifest, scratch.path(), &self.progress)?;
        let tokens = prompts::tokens(model.bundle(), model.folder(), POSITIONS)?;
        let scale = residual_scale(model.bundle(), model.folder(), &tokens)?;
        self.progress.note(&format!(
            "numerics.scale is {scale}: what the residual stream reaches on {} tokens asks for it",
            tokens.len()
        ));
        Ok(scale)
    }
}

/// The folder that a folder which is to be written is in.
fn beside(path: Option<&Path>) -> PathBuf {
    let target = path.and_then(|path| output::target(path).ok());
    let parent = target.as_deref().and_then(Path::parent).filter(|folder| !folder.as_os_str().is_empty());
    parent.unwrap_or(Path::new(".")).to_owned()
}

/// A folder beside a file that is to be written, removed when it is dropped.
pub(crate) fn scratch_beside(path: Option<&Path>, prefix: &str) -> Result<tempfile::TempDir> {
    let folder = beside(path);
    let scratch = tempfile::Builder::new().prefix(prefix).tempdir_in(&folder);
    Ok(scratch.map_err(FileError::of(folder, "create a folder in"))?)
}

/// The model of a source without quantization, on the CPU in f32, through a bundle in `scratch`.
pub(crate) fn unquantized(manifest: &Manifest, scratch: &Path, progress: &Progress) -> Result<Arc<LoadedModel>> {
    let quant = Quant {
        weights: WeightFormat::None,
        overrides: Default::default(),
        layers: Vec::new(),
        plan: None,
        ..manifest.quant.clone()
    };
    let folder = scratch.join("bundle");
    convert(&ConvertOptions {
        manifest: Manifest { quant, ..manifest.clone() },
        out: Some(folder.clone()),
        force: false,
        compile: false,
        progress: progress.clone(),
        check_tokenizer: None,
    })?;
    LoadedModel::on_cpu(&folder, Precision::F32)
}
