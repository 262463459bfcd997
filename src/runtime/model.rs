//! A bundle with a backend that runs it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::backend::Backend;
use super::cpu::{CpuBackend, PackageStore};
use super::error::RuntimeError;
use super::host::HostTables;
use super::plan::{self, CallPlan, Route};
use super::profile::{self, FunctionProfile};
use anec_base::Result;
use anec_bundle::{Bundle, FILE_NAME, FunctionEntry};
use anec_bundle::{Port, PortRole, StatePort};
use anec_exec::Precision;

/// A bundle with a backend that runs it.
pub struct LoadedModel {
    pub(super) bundle: Bundle,
    pub(super) folder: PathBuf,
    pub(super) host: Arc<HostTables>,
    pub(super) plan: CallPlan,
    pub(super) backend: Arc<dyn Backend>,
    /// Whether every state is written by position, so that going back is a matter of the position alone. What was written
    /// after it is closed by the masks, and overwritten before they open it.
    pub(super) rewindable: bool,
}

impl LoadedModel {
    /// The bundle in a folder, on the CPU executor.
    ///
    /// # Errors
    /// When there is no bundle, or it contradicts itself.
    pub fn on_cpu(folder: &Path, precision: Precision) -> Result<Arc<Self>> {
        Self::on_cpu_in(folder, &[precision])?.pop().ok_or(RuntimeError::NoBundle { path: folder.to_owned() }.into())
    }

    /// The bundle in a folder, on the CPU executor: a model for each precision, all with the same weights in memory.
    ///
    /// # Errors
    /// As [`LoadedModel::on_cpu`].
    pub fn on_cpu_in(folder: &Path, precisions: &[Precision]) -> Result<Vec<Arc<Self>>> {
        if !folder.join(FILE_NAME).exists() {
            return Err(RuntimeError::NoBundle { path: folder.to_owned() }.into());
        }
        let bundle = Bundle::read(folder)?;
        let host = Arc::new(HostTables::open(&bundle, folder)?);
        let programs = PackageStore::of(&bundle, folder);
        let model = |precision: &Precision| {
            let backend = CpuBackend::new(programs.clone(), *precision);
            Self::new(bundle.clone(), folder, host.clone(), Box::new(backend))
        };
        precisions.iter().map(model).collect()
    }

    /// A model of parts: a bundle, its host tensors and a backend.
    ///
    /// # Errors
    /// When the bundle's functions don't make a model.
    pub fn new(bundle: Bundle, folder: &Path, host: Arc<HostTables>, backend: Box<dyn Backend>) -> Result<Arc<Self>> {
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
        Ok(Arc::new(LoadedModel { bundle, folder: folder.to_owned(), host, plan, backend: backend.into(), rewindable }))
    }

    /// The same model, measuring how long its functions take.
    ///
    /// # Errors
    /// As [`LoadedModel::new`].
    pub fn profiled(&self) -> Result<(Arc<Self>, FunctionProfile)> {
        let (backend, profile) = profile::profiled(self.backend.clone());
        Ok((Self::new(self.bundle.clone(), &self.folder, self.host.clone(), Box::new(backend))?, profile))
    }

    /// The bundle.
    pub fn bundle(&self) -> &Bundle {
        &self.bundle
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Tokens that fit into the largest context.
    pub fn context(&self) -> u64 {
        self.plan.routes.last().map_or(0, |route| route.context)
    }

    /// Tokens of the longest text that a model which needs all of a text in one call can take; none for other models.
    pub fn longest_text(&self) -> Option<u64> {
        if self.bundle.model.classification().is_some() || self.bundle.model.band().is_none() {
            return None;
        }
        let route = self.plan.routes.last()?;
        let steps = route.layers.iter().map(|step| step.largest_at_most(route.context).unwrap_or(0));
        steps.min()
    }

    /// As a model whose states aren't written by position.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn forget_positions(&mut self) {
        self.rewindable = false;
    }

    /// Tokens that end a text.
    pub fn end_tokens(&self) -> Vec<u32> {
        self.bundle.model.eos_token_ids.iter().filter_map(|id| u32::try_from(*id).ok()).collect()
    }

    /// The host's tensors.
    pub(super) fn host(&self) -> &HostTables {
        &self.host
    }

    /// Every way through the bundle.
    pub fn plan(&self) -> &CallPlan {
        &self.plan
    }

    /// Makes every function ready, those of the first layers first. `progress` is told how many are, and of how many.
    ///
    /// # Errors
    /// When one can't be loaded.
    pub fn prepare(&self, mut progress: impl FnMut(usize, usize)) -> Result<()> {
        let mut functions: Vec<usize> = Vec::new();
        for step in self.plan.routes.iter().flat_map(Route::steps) {
            functions.extend(step.functions().filter(|function| !functions.contains(function)).collect::<Vec<_>>());
        }
        progress(0, functions.len());
        for (done, function) in functions.iter().enumerate() {
            self.backend.prepare(*function)?;
            progress(done + 1, functions.len());
        }
        Ok(())
    }

    /// Tokens, at most `most`, that one call of a text of `length` tokens can take.
    ///
    /// # Errors
    /// When such a text doesn't fit.
    pub fn largest_call(&self, length: u64, most: u64) -> Result<u64, RuntimeError> {
        let route = &self.plan.routes[self.plan.route(length)?];
        Ok(plan::chunk(&route.layers, most, None)?.real)
    }
}

/// Whether each position of a text has a place of its own in a state: not in a ring, and not in a recurrence.
fn by_position(state: &StatePort, context: u64) -> bool {
    state.role.is_cache() && state.shape.get(2).is_some_and(|slots| *slots >= context)
}
