//! Scale of a whole tensor: a pass over its blocks that any number of threads make together.
//!
//! No thread waits for another, because inside the pool it could wait for work further down its own stack. A thread
//! that finds no further block computes those that others haven't finished once more; each is counted once.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use half::f16;
use rayon::prelude::*;

use super::Blocks;
use super::clip::{ColumnWeights, Tail};
use super::reader::RowReader;
use anec_base::Result;

/// Scale of a tensor.
#[derive(Clone, Copy)]
pub(crate) struct TensorScale {
    pub(crate) scale: f16,
    /// Largest magnitude of the tensor.
    pub(crate) largest: f32,
}

/// Pass over a tensor.
pub(crate) struct TensorPass {
    result: OnceLock<TensorScale>,
    /// With column weights the scale may clip; without, it is that of the largest magnitude.
    weights: Option<ColumnWeights>,
    /// Next block that no thread has taken.
    next: AtomicUsize,
    /// Bits of the largest magnitude of the blocks so far; magnitudes are ordered like their bits.
    largest: AtomicU32,
    counted: Mutex<Counted>,
}

/// Blocks that were counted.
#[derive(Default)]
struct Counted {
    blocks: Vec<bool>,
    tail: Option<Tail>,
}

impl TensorPass {
    pub(crate) fn new(weights: Option<ColumnWeights>) -> Self {
        let counted = Counted { blocks: Vec::new(), tail: weights.as_ref().map(Tail::new) };
        TensorPass {
            result: OnceLock::new(),
            weights,
            next: AtomicUsize::new(0),
            largest: AtomicU32::new(0),
            counted: Mutex::new(counted),
        }
    }

    /// Result of the pass, if it was made.
    pub(crate) fn scale(&self) -> Option<TensorScale> {
        self.result.get().copied()
    }

    /// Makes the pass, or what other threads left of it. `scale` computes the scale from the largest magnitude and the
    /// values near it. `keep` keeps values that are slow to compute for the next pass.
    pub(crate) fn make(
        &self,
        reader: &RowReader,
        blocks: Blocks,
        keep: bool,
        scale: impl Fn(f32, Option<&Tail>) -> f16,
    ) -> Result<()> {
        if self.result.get().is_some() {
            return Ok(());
        }
        let count = blocks.count();
        let count_block = |block, buffers: &mut Buffers| self.count(reader, blocks, block, keep, buffers);
        let threads = count.div_ceil(blocks.at_a_time()).min(rayon::current_num_threads());
        (0..threads).into_par_iter().with_max_len(1).try_for_each(|_| {
            let mut buffers = Buffers::default();
            loop {
                let block = self.next.fetch_add(1, Ordering::Relaxed);
                if block >= count {
                    return Ok::<_, anec_base::Error>(());
                }
                count_block(block, &mut buffers)?;
            }
        })?;
        let mut buffers = Buffers::default();
        for block in 0..count {
            if !self.counted(count).blocks[block] {
                count_block(block, &mut buffers)?;
            }
        }
        if !(keep && reader.keeps()) {
            reader.weight.release(0..reader.weight.elements());
        }
        let largest = f32::from_bits(self.largest.load(Ordering::Relaxed));
        let counted = self.counted(count);
        self.result.get_or_init(|| TensorScale { scale: scale(largest, counted.tail.as_ref()), largest });
        Ok(())
    }

    fn counted(&self, count: usize) -> MutexGuard<'_, Counted> {
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        counted.blocks.resize(count, false);
        counted
    }

    /// Reads a block, counts it and keeps its values, unless another thread did meanwhile.
    fn count(&self, reader: &RowReader, blocks: Blocks, block: usize, keep: bool, buffers: &mut Buffers) -> Result<()> {
        let Buffers { values, found } = buffers;
        let rows = blocks.rows(block);
        reader.load(rows.clone(), values)?;
        let own = reader.largest(rows.start, values)?.to_bits();
        let most = f32::from_bits(self.largest.fetch_max(own, Ordering::Relaxed).max(own));
        found.clear();
        if let Some(weights) = &self.weights {
            weights.near(values, most, found);
        }
        let mut counted = self.counted(blocks.count());
        if !std::mem::replace(&mut counted.blocks[block], true) {
            counted.tail.iter_mut().for_each(|tail| tail.add(values.len(), found));
            if keep {
                // before the pass can end, so that no value is kept behind its reader
                reader.keep(rows.start, values);
            }
        }
        Ok(())
    }
}

#[derive(Default)]
struct Buffers {
    values: Vec<f32>,
    found: Vec<(u16, u32)>,
}
