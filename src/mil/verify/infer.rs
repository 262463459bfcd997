//! Inference of a whole function's types.

use crate::catalogue::{self, Arguments};
use crate::error::MilError;
use crate::ir::{Block, Function, Op};
use crate::types::ValueType;

/// The function with the types of all results inferred anew from its inputs: after a symbol was fixed, or to see what
/// a foreign package's unknown dimensions are.
///
/// # Errors
/// The first op whose types can't be inferred.
pub fn infer_types(function: &Function) -> Result<Function, MilError> {
    let mut inferred = function.clone();
    let block = std::mem::take(&mut inferred.block);
    infer_block(&mut inferred, &block, &mut Err)?;
    inferred.block = block;
    Ok(inferred)
}

/// As [`infer_types`], but what can't be inferred keeps the type that is declared.
pub fn infer_what_can_be(function: &Function) -> Function {
    let mut inferred = function.clone();
    let block = std::mem::take(&mut inferred.block);
    // every error is let go: there is none to give
    let _ = infer_block(&mut inferred, &block, &mut |_| Ok(()));
    inferred.block = block;
    inferred
}

/// What becomes of an op whose types can't be inferred.
type OnError<'a> = &'a mut dyn FnMut(MilError) -> Result<(), MilError>;

fn infer_block(function: &mut Function, block: &Block, on_error: OnError<'_>) -> Result<(), MilError> {
    for op in &block.ops {
        for inner in &op.blocks {
            infer_block(function, inner, on_error)?;
        }
        // a list is declared as such, its value is a vector
        if op.is_const() && op.outputs.iter().any(|id| matches!(function.value(*id).ty, ValueType::Opaque(_))) {
            continue;
        }
        match infer_op(function, op) {
            Ok(types) => {
                for (output, ty) in op.outputs.iter().zip(types) {
                    function.values[output.0 as usize].ty = ty;
                }
            }
            Err(problem) => on_error(MilError::Op {
                function: function.name.clone(),
                op: op.name.clone(),
                operator: op.operator.clone(),
                problem,
            })?,
        }
    }
    Ok(())
}

fn infer_op(function: &Function, op: &Op) -> Result<Vec<ValueType>, String> {
    let spec = catalogue::lookup(&op.operator, function.opset).ok_or("the catalogue doesn't know this operator")?;
    spec.results(&Arguments { function, inputs: &op.inputs, attributes: &op.attributes })
}
