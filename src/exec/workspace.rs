//! Memory of runs, reused by later runs of any sequence.

use std::sync::Arc;

use super::pool::Pool;
use super::slot_writes::SlotWrites;
use super::tensor::Tensor;
use super::value::Value;
use anec_base::IdlePool;

/// Maximum bytes of tensors in idle workspaces.
const MAX_BYTES: usize = 128 << 20;

/// Idle workspaces of a model's executables, as many as there were concurrent runs. A new sequence reuses the memory of
/// a previous one, which saves the system clearing new pages.
#[derive(Clone)]
pub(super) struct Workspaces(Arc<IdlePool<Workspace>>);

impl Default for Workspaces {
    fn default() -> Self {
        Workspaces(Arc::new(IdlePool::new(MAX_BYTES, |workspace| workspace.pool.bytes())))
    }
}

impl Workspaces {
    /// Workspace for a run with `slots` values: the one that was returned last, or a new one.
    pub fn take(&self, slots: usize) -> Workspace {
        let mut workspace = self.0.take().unwrap_or_default();
        workspace.pool.begin_run();
        workspace.slots.resize(slots, None);
        workspace
    }

    /// Takes a workspace back after a run.
    pub fn give(&self, mut workspace: Workspace) {
        workspace.clear();
        self.0.give(workspace);
    }
}

/// Values of a run, and memory for the arguments and results of one step.
#[derive(Default)]
pub(super) struct Workspace {
    /// Computed values that are still needed.
    pub slots: Vec<Option<Arc<Tensor>>>,
    /// Arguments of the current step.
    pub values: Vec<Option<Value>>,
    /// Results of the current step.
    pub results: Vec<Arc<Tensor>>,
    /// Free tensors.
    pub pool: Pool,
    /// Cache slots that the run writes.
    pub slot_writes: SlotWrites,
    /// Iterations of loops so far.
    pub iterations: u64,
}

impl Workspace {
    fn clear(&mut self) {
        self.slot_writes.clear(&mut self.pool);
        self.iterations = 0;
        for tensor in self.slots.drain(..).flatten().chain(self.results.drain(..)) {
            self.pool.recycle(tensor);
        }
        for value in self.values.drain(..).flatten() {
            if let Value::Tensor(tensor) = value {
                self.pool.recycle(tensor);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_reuses_the_memory_of_an_earlier_run() {
        let workspaces = Workspaces::default();
        let place = |workspace: &mut Workspace| {
            let tensor = workspace.pool.filled(&[1000], 0f32);
            let place = tensor.floats().unwrap().as_ptr();
            workspace.slots[0] = Some(tensor);
            place
        };
        let [mut first, mut second] = [(); 2].map(|()| workspaces.take(1));
        let places = [place(&mut first), place(&mut second)];
        assert_ne!(places[0], places[1], "both run");
        workspaces.clone().give(first);
        assert_eq!(place(&mut workspaces.take(1)), places[0]);
    }

    #[test]
    fn idle_workspaces_keep_a_bounded_amount_of_memory() {
        let workspaces = Workspaces::default();
        let mut taken = [(); 5].map(|()| workspaces.take(0));
        for workspace in &mut taken {
            let tensor = workspace.pool.filled(&[MAX_BYTES / 4], true);
            workspace.pool.recycle(tensor);
        }
        taken.into_iter().for_each(|workspace| workspaces.give(workspace));
        assert_eq!(workspaces.0.count(), 4);
    }
}
