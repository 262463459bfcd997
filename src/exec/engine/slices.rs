//! Slices of the last axis that don't begin at its first element: they pass a unit that multiplies by 16 and divides by it
//! again, so that what is beyond 65504 / 16 comes out infinite.

use std::sync::Arc;

use crate::kernel::{Call, Kernel};
use crate::pool::Pool;
use crate::tensor::TensorData;
use anec_kernels::round::round_to_f16;

/// What the unit multiplies by.
const GAIN: f32 = 16.0;

/// The kernel of a slice, with the gain.
pub(super) fn with_gain(exact: Arc<dyn Kernel>) -> Arc<dyn Kernel> {
    Arc::new(Gained { exact })
}

struct Gained {
    exact: Arc<dyn Kernel>,
}

impl Kernel for Gained {
    fn run(&self, call: &mut Call<'_>, pool: &mut Pool) -> Result<(), String> {
        self.exact.run(call, pool)?;
        for result in call.results.iter_mut() {
            if result.floats().is_none() {
                continue;
            }
            if let TensorData::F32(values) = &mut pool.make_mut(result).data {
                values.iter_mut().for_each(|value| *value *= GAIN);
                round_to_f16(values);
                values.iter_mut().for_each(|value| *value /= GAIN);
            }
        }
        Ok(())
    }
}
