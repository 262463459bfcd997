//! Inlining of functions.

use std::collections::{BTreeMap, BTreeSet};

use super::FunctionBuilder;
use crate::ir::{Argument, Binding, Block, Function, Op, ParameterMap, ValueId};

impl FunctionBuilder {
    /// Adds the ops of `callee` with the given values for its inputs and states, by name. Returns its outputs with the
    /// given names. Ops that neither these outputs nor a state need are left out.
    ///
    /// A missing input of `callee` or an output that it doesn't have is recorded as the builder's error.
    pub fn inline(
        &mut self,
        callee: &Function,
        inputs: &BTreeMap<String, ValueId>,
        outputs: &[String],
    ) -> Vec<ValueId> {
        let mut known = BTreeMap::new();
        for id in &callee.inputs {
            if let Some(value) = inputs.get(&callee.value(*id).name) {
                known.insert(*id, *value);
            }
        }
        let wanted: Vec<Option<ValueId>> = outputs
            .iter()
            .map(|name| callee.block.outputs.iter().copied().find(|id| callee.value(*id).name == *name))
            .collect();
        let needed = needed(&callee.block, wanted.iter().flatten().copied());
        for op in callee.block.ops.iter().filter(|op| has_effect(op) || op.outputs.iter().any(|id| needed.contains(id)))
        {
            let op = self.copied(callee, op, &mut known);
            self.function.block.ops.push(op);
        }
        let missing = |name: &String| format!("{} has no output `{name}`", callee.name);
        wanted
            .into_iter()
            .zip(outputs)
            .map(|(id, name)| match id.and_then(|id| known.get(&id).copied()) {
                Some(value) => value,
                None => {
                    self.fail(name, "inline", missing(name));
                    ValueId(0)
                }
            })
            .collect()
    }

    /// Copies an op of `callee` with values of this function.
    fn copied(&mut self, callee: &Function, op: &Op, known: &mut BTreeMap<ValueId, ValueId>) -> Op {
        let inputs: ParameterMap<Argument> = op
            .inputs
            .iter()
            .map(|(parameter, argument)| {
                let argument = argument.iter().map(|binding| match binding {
                    Binding::Value(id) => Binding::Value(self.copy_of(callee, *id, known)),
                    Binding::Constant(constant) => Binding::Constant(constant.clone()),
                });
                (parameter.clone(), argument.collect())
            })
            .collect();
        let blocks = op.blocks.iter().map(|block| self.copied_block(callee, block, known)).collect();
        let name = self.unique(&op.name);
        let outputs = op.outputs.iter().map(|id| self.defined(callee, *id, known)).collect();
        Op { operator: op.operator.clone(), name, inputs, attributes: op.attributes.clone(), outputs, blocks }
    }

    fn copied_block(&mut self, callee: &Function, block: &Block, known: &mut BTreeMap<ValueId, ValueId>) -> Block {
        let inputs = block.inputs.iter().map(|id| self.defined(callee, *id, known)).collect();
        let ops = block.ops.iter().map(|op| self.copied(callee, op, known)).collect();
        let outputs = block.outputs.iter().map(|id| self.copy_of(callee, *id, known)).collect();
        Block { inputs, ops, outputs }
    }

    /// Defines a value of this function for a value of `callee`.
    fn defined(&mut self, callee: &Function, id: ValueId, known: &mut BTreeMap<ValueId, ValueId>) -> ValueId {
        let value = callee.value(id);
        let name = self.unique(&value.name);
        let copy = self.define(name, value.ty.clone(), value.constant.clone());
        known.insert(id, copy);
        copy
    }

    fn copy_of(&mut self, callee: &Function, id: ValueId, known: &BTreeMap<ValueId, ValueId>) -> ValueId {
        match known.get(&id) {
            Some(value) => *value,
            None => {
                let problem = format!("{} needs a value for `{}`", callee.name, callee.value(id).name);
                self.fail(&callee.name, "inline", problem);
                ValueId(0)
            }
        }
    }
}

/// Returns whether an op has an effect beyond its results.
fn has_effect(op: &Op) -> bool {
    op.operator == "write_state"
}

/// Values that the wanted values and the writes of states depend on.
fn needed(block: &Block, wanted: impl Iterator<Item = ValueId>) -> BTreeSet<ValueId> {
    fn operands(op: &Op, needed: &mut BTreeSet<ValueId>) {
        needed.extend(op.operands());
        for block in &op.blocks {
            needed.extend(&block.outputs);
            block.ops.iter().for_each(|op| operands(op, needed));
        }
    }
    let mut needed: BTreeSet<ValueId> = wanted.collect();
    for op in block.ops.iter().rev() {
        if has_effect(op) || op.outputs.iter().any(|id| needed.contains(id)) {
            operands(op, &mut needed);
        }
    }
    needed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::constant::Constant;
    use crate::types::{DataType, Opset, TensorType};

    #[test]
    fn what_is_needed_comes_along_under_names_of_its_own() {
        let ty = || TensorType::new(DataType::Fp16, [2]);
        let mut callee = FunctionBuilder::new("callee", Opset::CoreMl8);
        let (x, state) = (callee.input("x", ty()), callee.state("s", ty()));
        let read = callee.read_state(state);
        let sum = callee.add(x, read);
        callee.write_state(state, sum);
        let double = callee.mul(sum, Constant::fp16(2.0));
        let unused = callee.mul(sum, Constant::fp16(3.0));
        callee.output("y", double);
        callee.output("z", unused);
        let callee = callee.finish().unwrap();

        let mut caller = FunctionBuilder::new("main", Opset::CoreMl8);
        let (a, cache) = (caller.input("x", ty()), caller.state("cache", ty()));
        let inputs = BTreeMap::from([("x".to_owned(), a), ("s".to_owned(), cache)]);
        let first = caller.inline(&callee, &inputs, &["y".to_owned()]);
        let inputs = BTreeMap::from([("x".to_owned(), first[0]), ("s".to_owned(), cache)]);
        let second = caller.inline(&callee, &inputs, &["y".to_owned()]);
        caller.output("out", second[0]);
        let function = caller.finish().unwrap();
        let count = |operator: &str| function.ops().filter(|op| op.operator == operator).count();
        assert_eq!((count("add"), count("mul"), count("write_state")), (2, 2, 2), "{function:?}");
        let names: BTreeSet<&String> = function.values.iter().map(|value| &value.name).collect();
        assert_eq!(names.len(), function.values.len());
        assert!(function.dangling().is_none());

        let mut wrong = FunctionBuilder::new("main", Opset::CoreMl8);
        let a = wrong.input("x", ty());
        wrong.inline(&callee, &BTreeMap::from([("x".to_owned(), a)]), &["y".to_owned()]);
        assert!(wrong.finish().unwrap_err().to_string().contains("needs a value for `s`"));
    }
}
