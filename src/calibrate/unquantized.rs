//! The model without quantization, in packages of one layer, in a folder of its own.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anec_base::{Progress, Result};
use anec_bundle::Bundle;
use anec_convert::open::{Opened, open, resolve};
use anec_convert::plan::ConvertPlan;
use anec_convert::{ConvertOptions, convert};
use anec_manifest::{
    Contexts, ExpertsForm, KvWrite, Lengths, LinearForm, LmHead, Manifest, ProgramFormat, Quant, Shards, Transforms,
    WeightFormat,
};
use anec_runtime::{HiddenFrame, HostTables, TokenRun};

/// Maximum number of tokens in a window of the text; windows don't see each other.
pub const WINDOW: u64 = 512;

/// Model converted without quantization.
pub struct UnquantizedModel {
    /// Source and model.
    pub opened: Opened,
    /// Conversion plan.
    pub plan: ConvertPlan,
    /// Bundle.
    pub bundle: Bundle,
    /// Folder of the bundle.
    pub folder: PathBuf,
    /// Tables of the host.
    pub host: Arc<HostTables>,
}

impl UnquantizedModel {
    /// Converts a manifest's model, transformed but not quantized, into a folder in `scratch`.
    ///
    /// # Errors
    /// Returns an error if the source can't be converted.
    pub fn new(manifest: &Manifest, scratch: &Path, progress: &Progress) -> Result<Self> {
        let opened = open(manifest)?;
        let plain = unquantized(manifest, &opened);
        let folder = scratch.join("bundle");
        let mut options = ConvertOptions::new(plain.clone());
        (options.out, options.progress) = (Some(folder.clone()), progress.clone());
        convert(&options)?;
        let bundle = Bundle::read(&folder)?;
        let host = Arc::new(HostTables::open(&bundle, &folder)?);
        let plan = unquantized_plan(manifest, &opened)?;
        Ok(UnquantizedModel { opened, plan, bundle, folder, host })
    }

    /// Width of the hidden states.
    pub fn width(&self) -> usize {
        self.bundle.model.hidden_size as usize
    }

    /// Returns the input of the first layer, `[tokens, hidden_size]`, in the source model's units.
    ///
    /// # Errors
    /// Returns an error if a token isn't in the vocabulary.
    pub fn embedded(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        let (width, count) = (self.width(), tokens.len());
        let mut columns = vec![0.0; width * count];
        self.host.embed(TokenRun { tokens, types: &[], position: 0 }, count, &mut columns)?;
        let rows: Vec<f32> = (0..width * count).map(|i| columns[i % width * count + i / width]).collect();
        Ok(HiddenFrame::new(&self.bundle.model, &self.host).leave(&rows))
    }
}

/// Returns the conversion plan of a manifest's model without quantization. Reads shapes only.
///
/// # Errors
/// Returns an error if the manifest doesn't fit the model.
pub fn unquantized_plan(manifest: &Manifest, opened: &Opened) -> Result<ConvertPlan> {
    let plain = unquantized(manifest, opened);
    ConvertPlan::new(&resolve(&plain, &opened.source, &*opened.model), &*opened.model)
}

/// Returns the manifest of the calibrated model: unquantized, one layer per package, calls of one window.
fn unquantized(manifest: &Manifest, opened: &Opened) -> Manifest {
    let layers = Some((0..opened.model.facts().num_layers).map(|layer| [layer, layer + 1]).collect());
    Manifest {
        transforms: Transforms::List(opened.model.transformed().done),
        quant: Quant { weights: WeightFormat::None, overflow: manifest.quant.overflow, ..Quant::default() },
        context: Contexts::One(WINDOW),
        lengths: Lengths::Range([1, WINDOW]),
        kv_write: Some(KvWrite::Mask),
        // the executor runs MIL
        format: ProgramFormat::Coreml,
        contract: None,
        linear: LinearForm::Conv,
        experts: ExpertsForm::default(),
        // no limit: only the executor loads these packages
        shards: Shards { max_mb: 1e9, layers, ..Shards::default() },
        lm_head: LmHead::default(),
        ..manifest.clone()
    }
}
