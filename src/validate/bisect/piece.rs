//! A subset of a function's ops as a function.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use anec_mil::{Argument, Binding, Block, Dim, Function, Op, TensorType, Uses, Value, ValueId, ValueType};

/// Returns a function with the ops at `keep` and the constants that they read, with values renumbered. `known` is the
/// same function with inferred types: inputs of the piece get their types from it, other values keep declared types.
///
/// Returns `None` if the piece has no result, or an input of unknown shape.
pub fn piece(function: &Function, known: &Function, keep: &BTreeSet<usize>) -> Option<Function> {
    let ops = with_constants(function, keep);
    let made: BTreeSet<ValueId> = ops.iter().flat_map(|op| results(op)).collect();
    let mut read = BTreeSet::new();
    ops.iter().for_each(|op| operands(op, &mut read));

    let mut values = Arena { from: function, known, ids: HashMap::new(), values: Vec::new() };
    // the function's own inputs first, in order, then results of omitted ops
    let own = function.inputs.iter().copied().filter(|id| read.contains(id));
    let missing = read.iter().copied().filter(|id| !made.contains(id) && !function.inputs.contains(id));
    let mut inputs = Vec::new();
    for id in own.chain(missing) {
        inputs.push(values.input(id)?);
    }
    let wanted = |id: &ValueId| function.block.outputs.contains(id) || !read.contains(id);
    let outputs: Vec<ValueId> = ops
        .iter()
        .filter(|op| op.is_executed())
        .flat_map(|op| op.outputs.iter().copied())
        .filter(|id| wanted(id) && matches!(function.value(*id).ty, ValueType::Tensor(_)))
        .collect();
    if outputs.is_empty() {
        return None;
    }
    let ops = ops.into_iter().map(|op| values.op(op)).collect();
    let outputs = outputs.into_iter().map(|id| values.id(id)).collect();
    let mut piece = Function {
        name: function.name.clone(),
        opset: function.opset,
        inputs,
        values: values.values,
        block: Block { inputs: Vec::new(), ops, outputs },
        lengths: BTreeMap::new(),
    };
    let symbols = piece.tensor_inputs().filter_map(|value| value.ty.tensor()).flat_map(symbols);
    piece.lengths = symbols.filter_map(|s| Some((s.clone(), function.lengths.get(&s)?.clone()))).collect();
    Some(piece)
}

/// Kept ops with the constants that they read, plain and compressed, in order.
fn with_constants<'a>(function: &'a Function, keep: &BTreeSet<usize>) -> Vec<&'a Op> {
    let uses = Uses::of(function);
    let mut constants = BTreeSet::new();
    let mut open: Vec<&Op> = keep.iter().map(|at| &function.block.ops[*at]).collect();
    while let Some(op) = open.pop() {
        let mut read = BTreeSet::new();
        operands(op, &mut read);
        let given = read.into_iter().filter_map(|id| uses.producer(id));
        let given = given.filter(|op| op.is_const() || op.is_constexpr());
        open.extend(given.filter(|op| op.outputs.iter().any(|id| constants.insert(*id))));
    }
    let is_kept = |(at, op): &(usize, &Op)| keep.contains(at) || op.outputs.iter().any(|id| constants.contains(id));
    function.block.ops.iter().enumerate().filter(is_kept).map(|(_, op)| op).collect()
}

/// Collects the values that an op and its nested blocks read.
fn operands(op: &Op, read: &mut BTreeSet<ValueId>) {
    read.extend(op.operands());
    let inner: BTreeSet<ValueId> = op.blocks.iter().flat_map(block_results).collect();
    for block in &op.blocks {
        block.ops.iter().for_each(|op| operands(op, read));
        read.extend(&block.outputs);
    }
    read.retain(|id| !inner.contains(id));
}

/// Results of an op, including the values of nested blocks.
fn results(op: &Op) -> Vec<ValueId> {
    op.outputs.iter().copied().chain(op.blocks.iter().flat_map(block_results)).collect()
}

fn block_results(block: &Block) -> Vec<ValueId> {
    block.inputs.iter().copied().chain(block.ops.iter().flat_map(results)).collect()
}

fn symbols(ty: &TensorType) -> Vec<anec_mil::Symbol> {
    let symbol = |dim: &Dim| match dim {
        Dim::Symbolic { symbol, .. } => Some(symbol.clone()),
        Dim::Fixed(_) | Dim::Unknown => None,
    };
    ty.shape.iter().filter_map(symbol).collect()
}

/// Values of the piece, renumbered in order of first use.
struct Arena<'a> {
    from: &'a Function,
    known: &'a Function,
    ids: HashMap<ValueId, ValueId>,
    values: Vec<Value>,
}

impl Arena<'_> {
    /// New id of a value. Undeclared dimensions get inferred ones, so that types are consistent; declared ones stay,
    /// right or wrong.
    fn id(&mut self, id: ValueId) -> ValueId {
        let (from, known, values) = (self.from, self.known, &mut self.values);
        *self.ids.entry(id).or_insert_with(|| {
            let mut value = from.value(id).clone();
            if let (ValueType::Tensor(ty), Some(known)) = (&mut value.ty, known.tensor_type(id))
                && ty.rank() == known.rank()
            {
                let dims = ty.shape.iter_mut().zip(&known.shape).filter(|(dim, _)| **dim == Dim::Unknown);
                dims.for_each(|(dim, known)| *dim = known.clone());
            }
            values.push(value);
            ValueId(values.len() as u32 - 1)
        })
    }

    /// Adds an input, which needs a known type.
    fn input(&mut self, id: ValueId) -> Option<ValueId> {
        let ty = self.known.value(id).ty.clone();
        let unknown = |ty: &TensorType| ty.shape.contains(&Dim::Unknown);
        if matches!(ty, ValueType::Opaque(_)) || ty.tensor().is_some_and(unknown) {
            return None;
        }
        let new = self.id(id);
        self.values[new.0 as usize].ty = ty;
        self.values[new.0 as usize].constant = None;
        Some(new)
    }

    fn op(&mut self, op: &Op) -> Op {
        let argument = |arena: &mut Self, bindings: &[Binding]| {
            let new = |binding: &Binding| match binding {
                Binding::Value(id) => Binding::Value(arena.id(*id)),
                constant => constant.clone(),
            };
            bindings.iter().map(new).collect::<Argument>()
        };
        Op {
            operator: op.operator.clone(),
            name: op.name.clone(),
            inputs: op.inputs.iter().map(|(name, bindings)| (name.clone(), argument(self, bindings))).collect(),
            attributes: op.attributes.clone(),
            blocks: op.blocks.iter().map(|block| self.block(block)).collect(),
            outputs: op.outputs.iter().map(|id| self.id(*id)).collect(),
        }
    }

    fn block(&mut self, block: &Block) -> Block {
        Block {
            inputs: block.inputs.iter().map(|id| self.id(*id)).collect(),
            ops: block.ops.iter().map(|op| self.op(op)).collect(),
            outputs: block.outputs.iter().map(|id| self.id(*id)).collect(),
        }
    }
}
