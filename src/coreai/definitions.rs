//! Composite operations in place of which their definitions stand, as for a system that doesn't know their names.

use crate::aicode::{AiBlock, AiModule, AiOp, AiRegion};

/// Whether an operation is composite: one with a definition, not a graph or a primitive with a combiner.
pub fn is_composite(module: &AiModule, op: &AiOp) -> bool {
    const OTHERS: [&str; 3] = ["primitive.", "dataflow.", "serialization."];
    !op.regions.is_empty() && !OTHERS.iter().any(|prefix| module.name(op).starts_with(prefix))
}

/// Whether a definition is a primitive reduction. Apple's runtime for Linux computes such composites by name only.
fn is_reduction(module: &AiModule, op: &AiOp) -> bool {
    let mut ops = op.regions.iter().flat_map(|region| &region.blocks).flat_map(|block| &block.ops);
    ops.any(|op| module.name(op) == "primitive.reduce_v1")
}

/// Returns a module without composite operations but those that are reductions; `None` if a definition is no block that
/// ends with what it yields.
pub fn in_primitives(module: &AiModule) -> Option<AiModule> {
    let ops = module.ops.iter().map(|op| expanded_regions(module, op)).collect::<Option<_>>()?;
    Some(AiModule { ops, ..module.clone() })
}

/// The operation with its regions expanded.
fn expanded_regions(module: &AiModule, op: &AiOp) -> Option<AiOp> {
    let region = |region: &AiRegion| {
        let [AiBlock { arguments, ops }] = &region.blocks[..] else { return None };
        let mut values: Vec<u32> = (0..arguments.len() as u32).collect();
        let (mut out, mut next) = (Vec::new(), arguments.len() as u32);
        expand(module, ops, &mut values, &mut out, &mut next)?;
        let block = AiBlock { arguments: arguments.clone(), ops: out };
        Some(AiRegion { values: u64::from(next), blocks: vec![block] })
    };
    let regions = op.regions.iter().map(region).collect::<Option<_>>()?;
    Some(AiOp { regions, ..op.clone() })
}

/// Appends operations of a block, whose values so far have the numbers `values` in `out`.
fn expand(module: &AiModule, ops: &[AiOp], values: &mut Vec<u32>, out: &mut Vec<AiOp>, next: &mut u32) -> Option<()> {
    for op in ops {
        let operands: Vec<u32> =
            op.operands.iter().map(|id| values.get(*id as usize).copied()).collect::<Option<_>>()?;
        if !is_composite(module, op) || is_reduction(module, op) {
            out.push(AiOp { operands: operands.into(), ..expanded_regions(module, op)? });
            values.extend(*next..*next + op.results.len() as u32);
            *next += op.results.len() as u32;
            continue;
        }
        let [AiRegion { blocks, .. }] = &op.regions[..] else { return None };
        let [AiBlock { arguments, ops: definition }] = &blocks[..] else { return None };
        let (last, definition) = definition.split_last()?;
        let mut inner = operands;
        if module.name(last) != "dataflow.yield_v1" || inner.len() != arguments.len() {
            return None;
        }
        expand(module, definition, &mut inner, out, next)?;
        values.extend(last.operands.iter().map(|id| inner.get(*id as usize).copied()).collect::<Option<Vec<_>>>()?);
    }
    Some(())
}
