//! Type inference of functions.

use std::collections::BTreeSet;

use crate::catalogue::{self, Arguments};
use crate::error::MilError;
use crate::ir::{Block, Function, Op};
use crate::types::ValueType;

/// Infers the types of all results from the inputs: after fixing a symbol, or to resolve unknown dimensions of another
/// producer's package.
///
/// # Errors
/// Returns the first op whose types can't be inferred.
pub fn infer_types(function: &Function) -> Result<Function, MilError> {
    let mut inferred = function.clone();
    let block = std::mem::take(&mut inferred.block);
    infer_block(&mut inferred, &block, &mut Err)?;
    inferred.block = block;
    Ok(inferred)
}

/// Infers types as [`infer_types`] does; ops whose types can't be inferred keep the declared ones.
pub fn infer_known_types(function: &Function) -> Function {
    let mut inferred = function.clone();
    let block = std::mem::take(&mut inferred.block);
    // the callback ignores every error
    let _ = infer_block(&mut inferred, &block, &mut |_| Ok(()));
    inferred.block = block;
    inferred
}

/// Names of ops whose types can't be inferred from those of the inputs; others take their declared types.
pub fn not_inferred(function: &Function) -> BTreeSet<String> {
    let mut inferred = function.clone();
    let block = std::mem::take(&mut inferred.block);
    let mut ops = BTreeSet::new();
    // the callback never fails
    let _ = infer_block(&mut inferred, &block, &mut |error| {
        if let MilError::Op { op, .. } = error {
            ops.insert(op);
        }
        Ok(())
    });
    ops
}

/// Handler for an op whose types can't be inferred.
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
                operator: op.operator.to_string(),
                problem,
            })?,
        }
    }
    Ok(())
}

fn infer_op(function: &Function, op: &Op) -> Result<Vec<ValueType>, String> {
    let spec = catalogue::lookup(&op.operator, function.opset).ok_or("the catalogue doesn't know this operator")?;
    spec.results(&Arguments::of(function, op))
}
