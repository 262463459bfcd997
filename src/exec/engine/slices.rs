//! Slices of the last axis that don't begin at its first element. They pass a unit that multiplies by 16 and divides
//! again, so values beyond 65504 / 16 become infinite.

use std::sync::Arc;

use crate::kernel::{Call, Kernel};
use crate::pool::Pool;
use crate::tensor::TensorData;
use anec_kernels::round::round_to_f16;

/// Factor of the unit.
const GAIN: f32 = 16.0;

/// Kernel of a slice with the gain.
pub(crate) fn with_gain(exact: Arc<dyn Kernel>) -> Arc<dyn Kernel> {
    Arc::new(GainedSlice { exact })
}

struct GainedSlice {
    exact: Arc<dyn Kernel>,
}

impl Kernel for GainedSlice {
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

#[cfg(test)]
mod tests {
    use super::super::{EngineEffect, EngineEffects};
    use crate::{Executable, Precision, Tensor, WeightCache};
    use anec_mil::{DataType, FunctionBuilder, Opset, TensorType};

    /// Slices two of four elements, from `first` on, in the engine's arithmetic with some effects.
    fn slice(effects: EngineEffects, first: u64, values: [f32; 4]) -> Vec<f32> {
        let mut ops = FunctionBuilder::new("main", Opset::CoreMl8);
        let x = ops.input("x", TensorType::new(DataType::Fp16, [1, 1, 1, 4]));
        let part = ops.slice(x, 3, first..first + 2);
        ops.output("out", part);
        let executable =
            Executable::compile(&ops.finish().unwrap(), Precision::Ane(effects), &WeightCache::new()).unwrap();
        let x = Tensor::new([1, 1, 1, 4], values.to_vec());
        executable.run(&[("x", &x)], &mut executable.new_state()).unwrap()[0].1.floats().unwrap().to_vec()
    }

    #[test]
    fn a_slice_that_skips_the_first_element_is_infinite_beyond_4094() {
        let values = [4096.0, -4096.0, 4094.0, -4096.0];
        assert_eq!(slice(EngineEffects::ALL, 0, values), [4096.0, -4096.0]);
        assert_eq!(slice(EngineEffects::ALL, 1, values), [f32::NEG_INFINITY, 4094.0]);
        assert_eq!(slice(EngineEffects::ALL, 2, values), [4094.0, f32::NEG_INFINITY]);
        assert_eq!(slice(EngineEffects::ALL.without(EngineEffect::SliceGain), 2, values), [4094.0, -4096.0]);
    }
}
