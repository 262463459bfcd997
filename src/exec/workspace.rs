//! What a run works with, kept from run to run so that the next one finds it, whatever sequence it is for.

use std::sync::Arc;

use super::pool::Pool;
use super::slot_writes::SlotWrites;
use super::tensor::Tensor;
use super::value::Value;
use anec_base::IdlePool;

/// Most bytes of tensors that are kept in workspaces without a run.
const MOST_BYTES: usize = 128 << 20;

/// Workspaces of the executables of a model that no run has. There are as many as there were runs at a time: a sequence that
/// begins finds the memory that another one left, which the system need not clear once more.
#[derive(Clone)]
pub(super) struct Workspaces(Arc<IdlePool<Workspace>>);

impl Default for Workspaces {
    fn default() -> Self {
        Workspaces(Arc::new(IdlePool::new(MOST_BYTES, |workspace| workspace.pool.bytes())))
    }
}

impl Workspaces {
    /// One for a run of a function with so many values: the one that was given back last, or a new one.
    pub fn take(&self, slots: usize) -> Workspace {
        let mut workspace = self.0.take().unwrap_or_default();
        workspace.pool.begin_run();
        workspace.slots.resize(slots, None);
        workspace
    }

    /// Takes one back from a run that has ended.
    pub fn give(&self, mut workspace: Workspace) {
        workspace.clear();
        self.0.give(workspace);
    }
}

/// Values of a run, and room for the arguments and results of one step.
#[derive(Default)]
pub(super) struct Workspace {
    /// Values that have been computed and are still needed.
    pub slots: Vec<Option<Arc<Tensor>>>,
    /// Arguments of a step.
    pub values: Vec<Option<Value>>,
    /// Results of a step.
    pub results: Vec<Arc<Tensor>>,
    /// Tensors that nobody needs.
    pub pool: Pool,
    /// Slots of caches that the run writes.
    pub slot_writes: SlotWrites,
}

impl Workspace {
    /// Gives up all values.
    fn clear(&mut self) {
        self.slot_writes.clear(&mut self.pool);
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
    fn a_run_finds_the_memory_of_one_that_has_ended() {
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
    fn what_idle_workspaces_keep_has_an_end() {
        let workspaces = Workspaces::default();
        let mut taken = [(); 5].map(|()| workspaces.take(0));
        for workspace in &mut taken {
            let tensor = workspace.pool.filled(&[MOST_BYTES / 4], true);
            workspace.pool.recycle(tensor);
        }
        taken.into_iter().for_each(|workspace| workspaces.give(workspace));
        assert_eq!(workspaces.0.count(), 4);
    }
}
