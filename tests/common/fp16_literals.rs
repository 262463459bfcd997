//! Weights that stay as they are.

use anec::base::Result;
use anec::family::EmitWeight;
use anec::manifest::Role;
use anec::mil::{Constant, FunctionBuilder, ValueId};
use anec::source::SourceWeight;

/// Puts weights into functions as fp16 literals.
pub struct Fp16Literals;

impl EmitWeight for Fp16Literals {
    fn emit(
        &mut self,
        builder: &mut FunctionBuilder,
        name: &str,
        _: Role,
        weight: &SourceWeight,
        shape: &[u64],
    ) -> Result<ValueId> {
        let mut values = vec![0f32; weight.elements() as usize];
        weight.read(0, &mut values)?;
        Ok(builder.constant(name, Constant::fp16_tensor(shape, &values)))
    }
}
