//! Inference of a whole function's types.

use crate::mil::catalogue::{self, Arguments};
use crate::mil::error::MilError;
use crate::mil::ir::{Block, Function};
use crate::mil::types::ValueType;

/// The function with the types of all results inferred anew from its inputs: after a symbol was fixed, or to see what
/// a foreign package's unknown dimensions are.
///
/// # Errors
/// The first op whose types can't be inferred.
pub fn infer_types(function: &Function) -> Result<Function, MilError> {
    let mut inferred = function.clone();
    let block = std::mem::take(&mut inferred.block);
    infer_block(&mut inferred, &block)?;
    inferred.block = block;
    Ok(inferred)
}

fn infer_block(function: &mut Function, block: &Block) -> Result<(), MilError> {
    for op in &block.ops {
        for inner in &op.blocks {
            infer_block(function, inner)?;
        }
        // a list is declared as such, its value is a vector
        if op.is_const() && op.outputs.iter().any(|id| matches!(function.value(*id).ty, ValueType::Opaque(_))) {
            continue;
        }
        let error = |problem: String| MilError::Op {
            function: function.name.clone(),
            op: op.name.clone(),
            operator: op.operator.clone(),
            problem,
        };
        let Some(spec) = catalogue::lookup(&op.operator, function.opset) else {
            return Err(error("the catalogue doesn't know this operator".into()));
        };
        let arguments = Arguments { function, inputs: &op.inputs, attributes: &op.attributes };
        let types = spec.results(&arguments).map_err(error)?;
        for (output, ty) in op.outputs.iter().zip(types) {
            function.values[output.0 as usize].ty = ty;
        }
    }
    Ok(())
}
