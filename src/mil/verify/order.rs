//! Check of definitions and reads: values are defined once, read only after that and within their block, and not after
//! a write to the state that they were read from.

use hashbrown::HashMap;

use super::Findings;
use crate::ir::{Binding, Block, Function, Op, ValueId};

pub(super) fn check<'a>(function: &'a Function, findings: &mut Findings<'a>) {
    let visible = vec![None; function.values.len()];
    let mut order = Order { function, findings, visible, read: HashMap::new(), stale: HashMap::new() };
    for id in &function.inputs {
        order.define(*id, &function.value(*id).name);
    }
    order.block(&function.block);
}

struct Order<'a, 'f> {
    function: &'a Function,
    findings: &'f mut Findings<'a>,
    /// Defined values; true while the defining block is open.
    visible: Vec<Option<bool>>,
    /// Values read from each state since its last write.
    read: HashMap<ValueId, Vec<ValueId>>,
    /// Values read from a state before its last write, with the name of the writing op.
    stale: HashMap<ValueId, &'a str>,
}

impl<'a> Order<'a, '_> {
    /// Defines an input or the result of the op named `op`.
    fn define(&mut self, id: ValueId, op: &str) {
        if self.visible[id.0 as usize].replace(true).is_some() {
            self.findings.add(op, format!("`{}` is defined a second time", self.function.value(id).name));
        }
    }

    fn block(&mut self, block: &'a Block) {
        for id in &block.inputs {
            self.define(*id, &self.function.value(*id).name);
        }
        for op in &block.ops {
            for operand in op.operands() {
                self.reads(&op.name, operand);
            }
            for inner in &op.blocks {
                self.block(inner);
            }
            for output in &op.outputs {
                self.define(*output, &op.name);
            }
            self.state(op);
        }
        for id in &block.outputs {
            let name = &self.function.value(*id).name;
            match self.visible[id.0 as usize] {
                Some(true) => {}
                Some(false) => self.findings.add(name, "an output is defined in a block that has ended".into()),
                None => self.findings.add(name, "an output is never defined".into()),
            }
        }
        let defined = block.inputs.iter().chain(block.ops.iter().flat_map(|op| &op.outputs));
        defined.for_each(|id| self.visible[id.0 as usize] = Some(false));
    }

    /// Records that an op reads a value.
    fn reads(&mut self, op: &str, id: ValueId) {
        let name = &self.function.value(id).name;
        match self.visible[id.0 as usize] {
            Some(true) => {}
            Some(false) => self.findings.add(op, format!("`{name}` is read after the block that defines it has ended")),
            None => self.findings.add(op, format!("`{name}` is read before it is defined")),
        }
        if let Some(writer) = self.stale.get(&id) {
            let problem =
                format!("`{name}` was read from a state before `{writer}` wrote it; expected to read it again");
            self.findings.add(op, problem);
        }
    }

    /// Records the effect of an op on states.
    fn state(&mut self, op: &'a Op) {
        let Some(Binding::Value(state)) = op.input("input") else { return };
        match op.operator.as_str() {
            "read_state" => self.read.entry(*state).or_default().extend(&op.outputs),
            "write_state" => {
                let old = self.read.remove(state).unwrap_or_default();
                self.stale.extend(old.into_iter().map(|id| (id, op.name.as_str())));
            }
            _ => {}
        }
    }
}
