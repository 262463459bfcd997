//! Def-use chains: producer and readers of each value.

use hashbrown::HashSet;

use super::ir::{Block, Function, Op, ValueId};

/// Producers and readers of each value of a function. Ops are identified by their index in [`Function::ops`].
#[derive(Clone, Debug)]
pub struct Uses<'a> {
    ops: Vec<&'a Op>,
    /// Producer by value.
    producers: Vec<Option<usize>>,
    /// Readers by value, in the order of the ops.
    users: Vec<Vec<usize>>,
    outputs: HashSet<ValueId>,
}

impl<'a> Uses<'a> {
    /// Collects the uses of a function, nested blocks included. Values that the function doesn't have are left out.
    pub fn of(function: &'a Function) -> Self {
        let ops: Vec<&Op> = function.ops().collect();
        let mut producers = vec![None; function.values.len()];
        let mut users = vec![Vec::new(); function.values.len()];
        for (place, op) in ops.iter().enumerate() {
            for id in &op.outputs {
                if let Some(producer) = producers.get_mut(id.0 as usize) {
                    *producer = Some(place);
                }
            }
            for id in op.operands() {
                if let Some(users) = users.get_mut(id.0 as usize) {
                    users.push(place);
                }
            }
        }
        let mut outputs = HashSet::new();
        collect_outputs(&function.block, &mut outputs);
        Uses { ops, producers, users, outputs }
    }

    /// Ops of the function.
    pub fn ops(&self) -> &[&'a Op] {
        &self.ops
    }

    /// Op that produces a value; `None` for inputs.
    pub fn producer(&self, id: ValueId) -> Option<&'a Op> {
        self.producer_place(id).map(|place| self.ops[place])
    }

    /// Index of the op that produces a value; `None` for inputs.
    pub fn producer_place(&self, id: ValueId) -> Option<usize> {
        self.producers.get(id.0 as usize).copied().flatten()
    }

    /// Ops that read a value, in order; an op that reads it twice is listed twice.
    pub fn users(&self, id: ValueId) -> impl Iterator<Item = &'a Op> + '_ {
        self.user_places(id).iter().map(|place| self.ops[*place])
    }

    /// Indices of the ops that read a value; see [`users`](Uses::users).
    pub fn user_places(&self, id: ValueId) -> &[usize] {
        self.users.get(id.0 as usize).map_or(&[], Vec::as_slice)
    }

    /// Returns whether a value is an output of the function or of a nested block.
    pub fn is_output(&self, id: ValueId) -> bool {
        self.outputs.contains(&id)
    }
}

fn collect_outputs(block: &Block, outputs: &mut HashSet<ValueId>) {
    outputs.extend(&block.outputs);
    block.ops.iter().flat_map(|op| &op.blocks).for_each(|inner| collect_outputs(inner, outputs));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Argument, Binding, DataType, FunctionBuilder, Opset, ParameterMap, TensorType};

    #[test]
    fn producers_and_users_are_found_in_nested_blocks_too() {
        let mut b = FunctionBuilder::new("main", Opset::CoreMl8);
        let x = b.input("x", TensorType::new(DataType::Fp32, [2u64]));
        let sum = b.op_with_outputs("add", "sum", [("x", x), ("y", x)])[0];
        let root = b.op_with_outputs("sqrt", "root", [("x", sum)])[0];
        b.output("out", root);
        let mut function = b.finish().unwrap();
        // move the reader of the sum into a block of an op of its own
        let root = function.block.ops.pop().unwrap();
        let inner = root.outputs[0];
        let outer = Op {
            operator: "cond".into(),
            name: "choice".into(),
            inputs: ParameterMap::from_iter([("pred".into(), Argument::from([Binding::Value(x)]))]),
            outputs: Default::default(),
            blocks: vec![Block { inputs: Vec::new(), ops: vec![root], outputs: vec![inner] }],
            ..function.block.ops[0].clone()
        };
        function.block.ops.push(outer);
        let uses = Uses::of(&function);
        let names = |ids: &[usize]| ids.iter().map(|place| uses.ops()[*place].name.as_str()).collect::<Vec<_>>();
        assert_eq!(names(uses.user_places(x)), ["sum", "sum", "choice"]);
        assert_eq!(uses.users(sum).map(|op| op.operator.as_str()).collect::<Vec<_>>(), ["sqrt"]);
        assert_eq!(uses.producer(sum).unwrap().name, "sum");
        assert!(uses.producer(x).is_none() && uses.producer(inner).is_some());
        assert!(uses.is_output(inner) && !uses.is_output(sum));
        let missing = ValueId(1000);
        assert!(uses.producer(missing).is_none() && uses.users(missing).next().is_none());
    }
}
