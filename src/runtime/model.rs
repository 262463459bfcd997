//! Bundle with a backend that runs it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::backend::Backend;
use super::cpu::{CpuBackend, PackageStore};
use super::cpu_options::CpuOptions;
use super::error::RuntimeError;
use super::function_pool::weight_bytes;
use super::host::HostTables;
use super::plan::{CallPlan, Route};
use super::profile::{self, FunctionProfile};
use super::widened::{RingLimit, by_position, widened_within};
use anec_base::Result;
use anec_bundle::{Bundle, FILE_NAME, FunctionEntry, PackageEntry, Port, PortRole, Task, WHOLE_TEXT};
use anec_exec::Precision;

/// Maximum number of tokens of a wide call; larger calls take no less time per token.
const WIDE_CALL: u64 = 64;

/// Bundle with a backend that runs it.
pub struct LoadedModel {
    pub(super) bundle: Bundle,
    pub(super) folder: PathBuf,
    pub(super) host: Arc<HostTables>,
    pub(super) plan: CallPlan,
    pub(super) backend: Arc<dyn Backend>,
    /// Whether every state is written by position, so that rewinding only moves the position. Later entries are masked,
    /// and overwritten before a mask opens them.
    pub(super) rewindable: bool,
    /// Whether calls can be padded with tokens that don't count, because only caches are carried on.
    pub(super) fills: bool,
    /// Whether functions write all tokens of a call from a position on, padding included.
    pub(super) writes_slices: bool,
    /// Limit of calls beside the plan.
    pub(super) ring: Option<RingLimit>,
    /// Whether functions of the head give all logits.
    pub(super) gives_logits: bool,
    /// Number of the largest logits that they give with their tokens.
    pub(super) largest: Option<usize>,
}

impl LoadedModel {
    /// Opens a bundle on the CPU executor.
    ///
    /// # Errors
    /// If there is no bundle, or it contradicts itself.
    pub fn on_cpu(folder: &Path, precision: Precision) -> Result<Arc<Self>> {
        let (bundle, host) = read_for_cpu(folder)?;
        let backend = CpuBackend::new(PackageStore::of(&bundle, folder), precision);
        Self::new(bundle, folder, host, Box::new(backend))
    }

    /// Opens a bundle on the CPU executor with options.
    ///
    /// # Errors
    /// Returns any error of [`LoadedModel::on_cpu`]; also if a function's weights exceed the limit.
    pub fn on_cpu_with(folder: &Path, options: &CpuOptions) -> Result<Arc<Self>> {
        let (bundle, host) = read_for_cpu(folder)?;
        let (bundle, ring, programs) = match options.wide_calls && bundle.model.task == Task::TextGeneration {
            true => {
                let (bundle, ring) = widened_within(&bundle, WIDE_CALL);
                let programs = PackageStore::beyond(&bundle, folder);
                (bundle, ring, programs)
            }
            false => {
                let programs = PackageStore::of(&bundle, folder);
                (bundle, None, programs)
            }
        };
        let backend = CpuBackend::within(&bundle, programs, options)?;
        Self::with(bundle, folder, host, Box::new(backend), ring)
    }

    /// Opens a bundle on the CPU executor once per precision, with shared weights, and gives its logits even where they
    /// are only inside of its functions.
    ///
    /// # Errors
    /// Returns any error of [`LoadedModel::on_cpu`].
    pub fn on_cpu_with_logits(folder: &Path, precisions: &[Precision]) -> Result<Vec<Arc<Self>>> {
        let (bundle, host) = read_for_cpu(folder)?;
        let bundle = bundle.with_logits();
        let programs = PackageStore::of(&bundle, folder);
        let model = |precision: &Precision| {
            let backend = CpuBackend::new(programs.clone(), *precision);
            Self::new(bundle.clone(), folder, host.clone(), Box::new(backend))
        };
        precisions.iter().map(model).collect()
    }

    /// Creates a model of a bundle, its host tensors and a backend.
    ///
    /// # Errors
    /// If the bundle's functions don't form a model.
    pub fn new(bundle: Bundle, folder: &Path, host: Arc<HostTables>, backend: Box<dyn Backend>) -> Result<Arc<Self>> {
        Self::with(bundle, folder, host, backend, None)
    }

    fn with(
        bundle: Bundle,
        folder: &Path,
        host: Arc<HostTables>,
        backend: Box<dyn Backend>,
        ring: Option<RingLimit>,
    ) -> Result<Arc<Self>> {
        let plan = CallPlan::new(&bundle, folder)?;
        let rewindable = |entry: &FunctionEntry| {
            let by_host = |port: &Port| match &port.role {
                PortRole::State { .. } => false,
                PortRole::Cache { .. } => port.shape_at(1).get(2).is_some_and(|slots| *slots >= entry.context),
                _ => true,
            };
            entry.states.iter().all(|state| by_position(state, entry.context)) && entry.inputs.iter().all(by_host)
        };
        let rewindable = bundle.functions.iter().all(rewindable);
        let inputs = || bundle.functions.iter().flat_map(|entry| &entry.inputs);
        let recurs = |port: &Port| matches!(port.role, PortRole::State { .. } | PortRole::RouterState);
        let mut states = bundle.functions.iter().flat_map(|entry| &entry.states);
        let fills = states.all(|state| state.role.is_cache()) && !inputs().any(recurs);
        let writes_slices = inputs().any(|port| port.role == PortRole::SliceBegin);
        let (folder, backend) = (folder.to_owned(), backend.into());
        let (gives_logits, largest) = (bundle.gives_logits(), bundle.largest_logits().map(|k| k as usize));
        Ok(Arc::new(LoadedModel {
            bundle,
            folder,
            host,
            plan,
            backend,
            rewindable,
            fills,
            writes_slices,
            ring,
            gives_logits,
            largest,
        }))
    }

    /// Returns the same model with a profile of its functions.
    ///
    /// # Errors
    /// Returns any error of [`LoadedModel::new`].
    pub fn profiled(&self) -> Result<(Arc<Self>, FunctionProfile)> {
        let (backend, profile) = profile::profiled(self.backend.clone());
        let (bundle, host) = (self.bundle.clone(), self.host.clone());
        Ok((Self::with(bundle, &self.folder, host, Box::new(backend), self.ring)?, profile))
    }

    /// Returns the bundle's draft layer as a model of its own, which reads hidden states of this one; `None` if the
    /// bundle has no such layer.
    ///
    /// # Errors
    /// If the backend can't run it.
    pub fn draft_layer(&self) -> Result<Option<Arc<Self>>> {
        let Some(bundle) = self.bundle.draft_bundle() else { return Ok(None) };
        let Some(backend) = self.backend.of_bundle(&bundle)? else { return Ok(None) };
        Ok(Some(Self::with(bundle, &self.folder, self.host.clone(), backend, self.ring)?))
    }

    /// Returns whether its functions read hidden states of another model, as a draft layer does.
    pub(super) fn reads_hidden(&self) -> bool {
        let mut inputs = self.bundle.functions.iter().flat_map(|entry| &entry.inputs);
        inputs.any(|port| port.role == PortRole::PreviousHidden)
    }

    /// Returns the bundle.
    pub fn bundle(&self) -> &Bundle {
        &self.bundle
    }

    /// Returns the bundle's folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the size of the largest context in tokens.
    pub fn context(&self) -> u64 {
        self.plan.routes.last().map_or(0, |route| route.context)
    }

    /// Returns the maximum number of tokens of a model that takes a text in one call; `None` for other models.
    pub fn longest_text(&self) -> Option<u64> {
        if self.bundle.model.band() != Some(WHOLE_TEXT) {
            return None;
        }
        let route = self.plan.routes.last()?;
        let steps = route.layers.iter().map(|step| step.largest_at_most(route.context).unwrap_or(0));
        steps.min()
    }

    /// Returns the tokens that end a text.
    pub fn end_tokens(&self) -> Vec<u32> {
        self.bundle.model.eos_token_ids.iter().filter_map(|id| u32::try_from(*id).ok()).collect()
    }

    /// Returns whether the LM head gives the logits of all tokens.
    pub fn gives_logits(&self) -> bool {
        self.gives_logits
    }

    /// Returns how many of the largest logits the LM head gives with their tokens; `None` if it doesn't.
    pub fn largest_logits(&self) -> Option<usize> {
        self.largest
    }

    pub(super) fn host(&self) -> &HostTables {
        &self.host
    }

    /// Returns the plan of all contexts.
    pub fn plan(&self) -> &CallPlan {
        &self.plan
    }

    /// Loads the functions that a text begins with, first layers first, as far as memory allows; other functions are
    /// loaded when needed. `progress` receives the numbers of loaded and of all these functions.
    ///
    /// # Errors
    /// If a function can't be loaded.
    pub fn prepare(&self, mut progress: impl FnMut(usize, usize)) -> Result<()> {
        let first = self.plan.routes.first().into_iter().flat_map(Route::steps);
        let functions: Vec<usize> = first.flat_map(|step| step.functions().collect::<Vec<_>>()).collect();
        progress(0, functions.len());
        for (done, function) in functions.iter().enumerate() {
            if self.backend.has_room(*function) {
                self.backend.prepare(*function)?;
            }
            progress(done + 1, functions.len());
        }
        Ok(())
    }

    /// Loads one function of every part that a text begins with, as far as memory allows. Loading time is dominated by
    /// weights, which functions for other numbers of tokens share. A function that can't be loaded fails when it is
    /// called.
    pub fn preload(&self) {
        let first = self.plan.routes.first().into_iter().flat_map(Route::steps);
        let functions: Vec<usize> = first.filter_map(|step| step.functions().next()).collect();
        for function in functions.into_iter().filter(|function| self.backend.has_room(*function)) {
            if self.backend.prepare(function).is_err() {
                break;
            }
        }
    }

    /// Returns the work of [`LoadedModel::prepare`].
    pub fn first_load(&self) -> FirstLoadWork {
        let first = self.plan.routes.first().into_iter().flat_map(Route::steps);
        let functions: Vec<usize> = first.flat_map(|step| step.functions().collect::<Vec<_>>()).collect();
        let bytes = functions.iter().map(|function| weight_bytes(&self.bundle, &self.bundle.functions[*function]));
        FirstLoadWork { functions: functions.len(), weight_bytes: bytes.sum() }
    }

    /// Returns the bytes of weights that one token of a short text needs, each function with all weights of its
    /// package. With less memory, functions are reloaded for every token.
    pub fn weights_of_a_token(&self) -> u64 {
        let first = self.plan.routes.first().into_iter().flat_map(Route::steps);
        let functions = first.filter_map(|step| step.functions().next());
        functions.map(|function| weight_bytes(&self.bundle, &self.bundle.functions[function])).sum()
    }
}

/// Reads a bundle and its host tensors.
fn read(folder: &Path) -> Result<(Bundle, Arc<HostTables>)> {
    if !folder.join(FILE_NAME).exists() {
        return Err(RuntimeError::NoBundle { path: folder.to_owned() }.into());
    }
    let bundle = Bundle::read(folder)?;
    let host = Arc::new(HostTables::open(&bundle, folder)?);
    Ok((bundle, host))
}

/// As [`read`]; the CPU executor runs MIL, which only packages of Core ML hold.
fn read_for_cpu(folder: &Path) -> Result<(Bundle, Arc<HostTables>)> {
    let (bundle, host) = read(folder)?;
    // the executor may call functions in other sizes than those that the bundle names
    if let Some(problem) = bundle.check().into_iter().next() {
        return Err(RuntimeError::bundle(folder.join(anec_bundle::FILE_NAME), problem).into());
    }
    if bundle.packages.iter().any(PackageEntry::is_asset) {
        let problem = "the bundle has `format: coreai`, whose asset the CPU executor doesn't run; use the backend coreai, \
                       or convert the model with `format: coreml`";
        return Err(RuntimeError::Backend { backend: "cpu", problem: problem.into() }.into());
    }
    Ok((bundle, host))
}

/// Functions and weights that a system loads on first use of a bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstLoadWork {
    /// Number of functions.
    pub functions: usize,
    /// Bytes of their weights, each function with all weights of its package.
    pub weight_bytes: u64,
}

impl FirstLoadWork {
    /// Seconds per 10^9 bytes on the Neural Engine, minimum and maximum of published values: 26 (M-series, ane-book's
    /// Phi-4-mini) to 171 (iPhone, CoreML-LLM). The forecast of `anec plan --for` uses the same values.
    pub const SECONDS_PER_GB: [f64; 2] = [26.0, 171.0];

    /// Returns the minimum and maximum number of seconds.
    pub fn seconds(self) -> [f64; 2] {
        Self::SECONDS_PER_GB.map(|seconds| seconds * self.weight_bytes as f64 / 1e9)
    }
}
