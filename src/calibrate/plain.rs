//! The model as it is not quantized, in packages of one layer each, in a folder of its own.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anec_base::{Progress, Result};
use anec_bundle::Bundle;
use anec_convert::open::{Opened, open, resolve};
use anec_convert::{ConvertOptions, ConvertPlan, convert};
use anec_manifest::{
    Contexts, ExpertsForm, KvWrite, Lengths, LinearForm, LmHead, Manifest, ProgramFormat, Quant, Shards, Transforms,
    WeightFormat,
};
use anec_runtime::host::TokenRun;
use anec_runtime::{HiddenFrame, HostTables};

/// Tokens of one piece of the text, at most: its own text for the model, which sees nothing before it.
pub const WINDOW: u64 = 512;

/// A model, not quantized.
pub struct PlainModel {
    /// The source and the model in it.
    pub opened: Opened,
    /// What is converted.
    pub plan: ConvertPlan,
    /// The bundle.
    pub bundle: Bundle,
    /// Its folder.
    pub folder: PathBuf,
    /// What its host needs.
    pub host: Arc<HostTables>,
}

impl PlainModel {
    /// Converts the model of a manifest, transformed as there but not quantized, into a folder in `scratch`.
    ///
    /// # Errors
    /// When the source can't be converted.
    pub fn new(manifest: &Manifest, scratch: &Path, progress: &Progress) -> Result<Self> {
        let opened = open(manifest)?;
        let plain = unquantized(manifest, &opened);
        let folder = scratch.join("bundle");
        convert(&ConvertOptions {
            manifest: plain.clone(),
            out: Some(folder.clone()),
            force: false,
            compile: false,
            progress: progress.clone(),
            check_tokenizer: None,
        })?;
        let bundle = Bundle::read(&folder)?;
        let host = Arc::new(HostTables::open(&bundle, &folder)?);
        let plan = plain_plan(manifest, &opened)?;
        Ok(PlainModel { opened, plan, bundle, folder, host })
    }

    /// Width of its hidden states.
    pub fn width(&self) -> usize {
        self.bundle.model.hidden_size as usize
    }

    /// What enters the first layer, `[tokens, hidden_size]`, as the source's model has it.
    ///
    /// # Errors
    /// When a token isn't the model's.
    pub fn embedded(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        let (width, count) = (self.width(), tokens.len());
        let mut columns = vec![0.0; width * count];
        self.host.embed(TokenRun { tokens, types: &[], position: 0 }, count, &mut columns)?;
        let rows: Vec<f32> = (0..width * count).map(|i| columns[i % width * count + i / width]).collect();
        Ok(HiddenFrame::new(&self.bundle.model, &self.host).leave(&rows))
    }
}

/// What is converted of a manifest's model as it is not quantized. Nothing is read but shapes.
///
/// # Errors
/// When the manifest doesn't fit the model.
pub fn plain_plan(manifest: &Manifest, opened: &Opened) -> Result<ConvertPlan> {
    let plain = unquantized(manifest, opened);
    ConvertPlan::new(&resolve(&plain, &opened.source, &*opened.model), &*opened.model)
}

/// The manifest of the model that a text runs through: its own weights, a layer in each package, calls of a window.
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
        linear: LinearForm::Conv,
        experts: ExpertsForm::default(),
        // no limit: nobody loads these packages but the executor
        shards: Shards { max_mb: 1e9, layers, ..Shards::default() },
        lm_head: LmHead::default(),
        ..manifest.clone()
    }
}
