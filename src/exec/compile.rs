//! Compilation of ops to nodes: operands, constants, and the last use of each value.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::arithmetic::{ProductArithmetic, computed_by};
use super::constants::{ConstantError, load};
use super::error::ExecError;
use super::node::control::{Blocks, Body, Control};
use super::node::{Node, mark, mark_nodes};
use super::operand::Operand;
use super::ops::{self, ReadState, Rule, WriteState};
use super::resolve::Resolver;
use super::row::FoldArgument;
use super::step::{Output, Step};
use super::value::Value;
use super::weight_cache::WeightCache;
use anec_mil::{Binding, Block, Function, Op, TensorType, ValueId, ValueType, catalogue};

/// Turns the ops of a function into nodes.
pub(super) struct Compiler<'a> {
    function: &'a Function,
    cache: &'a WeightCache,
    arithmetic: ProductArithmetic,
    constants: HashMap<ValueId, Value>,
    folded: HashMap<ValueId, &'a Op>,
    defined: BTreeSet<ValueId>,
}

impl<'a> Compiler<'a> {
    pub fn new(function: &'a Function, cache: &'a WeightCache, arithmetic: ProductArithmetic) -> Self {
        let folded = function.ops().filter(|op| op.is_constexpr());
        let folded = folded.flat_map(|op| op.outputs.iter().map(move |id| (*id, op))).collect();
        Compiler { function, cache, arithmetic, constants: HashMap::new(), folded, defined: BTreeSet::new() }
    }

    /// Error about the graph.
    pub fn wrong(&self, problem: String) -> ExecError {
        ExecError::Function { function: self.function.name.clone(), problem }
    }

    /// Marks a value as computed.
    pub fn define(&mut self, id: ValueId) {
        self.defined.insert(id);
    }

    /// Compiles the ops of a block.
    pub fn nodes(&mut self, block: &'a Block) -> Result<Vec<Node>, ExecError> {
        let mut nodes = Vec::new();
        for (place, op) in block.ops.iter().enumerate().filter(|(_, op)| op.is_executed()) {
            let (operator, resolve, moves) = match ops::lookup(&op.operator).map(|row| (row.operator, row.rule)) {
                Some((operator, Rule::Kernel { resolve, moves })) => (operator, resolve, moves),
                Some((operator, Rule::Blocks)) => {
                    nodes.push(Node::Control(self.control(op, operator)?));
                    continue;
                }
                _ => {
                    let operators = vec![op.operator.to_string()];
                    return Err(ExecError::Unsupported { function: self.function.name.clone(), operators });
                }
            };
            if !op.blocks.is_empty() {
                return Err(self.wrong(format!("op `{}` ({}) has blocks of its own", op.name, op.operator)));
            }
            // computed inputs first, then attributes
            let mut arguments = Vec::with_capacity(op.inputs.len());
            for (parameter, bindings) in &op.inputs {
                let operands: Result<Vec<_>, _> = bindings.iter().map(|b| self.operand(b)).collect();
                arguments.push((parameter.as_str(), operands?));
            }
            self.add_defaults(op, &mut arguments)?;
            let (types, outputs) = self.outputs(op)?;
            let mut resolver = Resolver::new(&arguments, &types);
            let kernel = resolve(&mut resolver).map_err(|problem| ExecError::Op {
                function: self.function.name.clone(),
                op: op.name.clone(),
                operator: op.operator.to_string(),
                problem,
            })?;
            let operands = resolver.into_operands();
            let (name, takes_state) = (op.name.clone(), false);
            let step = Step { place, operator, name, kernel, operands, types, outputs, moves, takes_state };
            nodes.push(Node::Step(computed_by(step, self.arithmetic)));
        }
        Ok(nodes)
    }

    /// Declares the results of an op.
    fn outputs(&mut self, op: &Op) -> Result<(Vec<TensorType>, Vec<Output>), ExecError> {
        let (mut types, mut outputs) = (Vec::new(), Vec::new());
        for id in &op.outputs {
            let value = self.function.value(*id);
            let ValueType::Tensor(ty) = &value.ty else {
                return Err(self.wrong(format!("`{}` is not a tensor, but {}", value.name, value.ty)));
            };
            types.push(ty.clone());
            outputs.push(Output { name: value.name.clone(), slot: id.0 as usize, read: false });
            self.defined.insert(*id);
        }
        Ok((types, outputs))
    }

    /// Compiles an op with nested blocks.
    fn control(&mut self, op: &'a Op, operator: &'static str) -> Result<Control, ExecError> {
        // counts and types are those of the catalogue's inference
        let checked = catalogue::lookup(operator, self.function.opset)
            .map(|spec| spec.results(&catalogue::Arguments::of(self.function, op)));
        let problem = |problem: String| ExecError::Op {
            function: self.function.name.clone(),
            op: op.name.clone(),
            operator: operator.to_owned(),
            problem,
        };
        match checked {
            Some(Ok(types)) if types.len() == op.outputs.len() => {}
            Some(Ok(types)) => {
                return Err(problem(format!("it gives {} results, not {}", types.len(), op.outputs.len())));
            }
            Some(Err(text)) => return Err(problem(text)),
            None => return Err(problem(format!("it is not in {}", self.function.opset.name()))),
        }
        let bindings = op.inputs.get(if operator == "cond" { "pred" } else { "loop_vars" });
        let operands = bindings.into_iter().flatten().map(|binding| self.operand(binding));
        let operands = operands.collect::<Result<Vec<_>, _>>()?;
        let [first, second] = &op.blocks[..] else { return Err(problem("it takes two blocks".into())) };
        let [first, second] = [self.body(first)?, self.body(second)?];
        let blocks = match operator {
            "cond" => Blocks::Branches([first, second]),
            _ => Blocks::Loop { condition: first, body: second },
        };
        let (types, outputs) = self.outputs(op)?;
        let captured = Control::captures(&blocks);
        Ok(Control { operator, name: op.name.clone(), operands, blocks, captured, types, outputs })
    }

    fn body(&mut self, block: &'a Block) -> Result<Body, ExecError> {
        for id in &block.inputs {
            self.define(*id);
        }
        let nodes = self.nodes(block)?;
        let outputs = block.outputs.iter().map(|id| self.operand(&Binding::Value(*id))).collect::<Result<_, _>>()?;
        Ok(Body { inputs: block.inputs.iter().map(|id| id.0 as usize).collect(), nodes, outputs })
    }

    /// Adds the catalogue's defaults for missing parameters.
    fn add_defaults(&self, op: &'a Op, arguments: &mut Vec<(&'a str, Vec<Operand>)>) -> Result<(), ExecError> {
        let Some(spec) = catalogue::lookup(&op.operator, self.function.opset) else { return Ok(()) };
        let rank = op.inputs.iter().find(|(parameter, _)| *parameter == "x").and_then(|(_, bindings)| {
            match bindings.first()? {
                Binding::Value(id) => Some(self.function.tensor_type(*id)?.rank()),
                Binding::Constant(constant) => Some(constant.ty.rank()),
            }
        });
        let has = |name: &str| op.inputs.iter().any(|(parameter, _)| *parameter == name);
        for (parameter, constant) in ops::defaults(spec, rank.unwrap_or(0), has) {
            let value = load(&constant, self.cache).map_err(|t| self.constant_error(parameter, t))?;
            arguments.push((parameter, vec![Operand::Constant(value)]));
        }
        Ok(())
    }

    /// Operand for a binding.
    pub fn operand(&mut self, binding: &Binding) -> Result<Operand, ExecError> {
        let id = match binding {
            Binding::Constant(constant) => {
                let value = load(constant, self.cache).map_err(|t| self.constant_error("(inline)", t))?;
                return Ok(Operand::Constant(value));
            }
            Binding::Value(id) => *id,
        };
        let value = self.function.value(id);
        if matches!(value.ty, ValueType::State(_)) {
            return Ok(Operand::Constant(Value::State(value.name.as_str().into())));
        }
        if value.constant.is_some() || self.folded.contains_key(&id) {
            return Ok(Operand::Constant(self.constant(id)?));
        }
        if !self.defined.contains(&id) {
            return Err(self.wrong(format!("`{}` is used before it is computed", value.name)));
        }
        Ok(Operand::Slot { slot: id.0 as usize, last: false })
    }

    /// Loads a constant, or folds a constexpr op, once.
    fn constant(&mut self, id: ValueId) -> Result<Value, ExecError> {
        if let Some(value) = self.constants.get(&id) {
            return Ok(value.clone());
        }
        let name = &self.function.value(id).name;
        let value = match (&self.function.value(id).constant, self.folded.get(&id).copied()) {
            (Some(constant), _) => load(constant, self.cache).map_err(|t| self.constant_error(name, t))?,
            (None, Some(op)) => self.fold(id, op)?,
            (None, None) => return Err(self.wrong(format!("`{name}` is not a constant"))),
        };
        self.constants.insert(id, value.clone());
        Ok(value)
    }

    fn fold(&mut self, id: ValueId, op: &'a Op) -> Result<Value, ExecError> {
        // removed while its arguments are folded, so that a cycle ends as "not a constant"
        for output in &op.outputs {
            self.folded.remove(output);
        }
        let mut parts: BTreeMap<&str, FoldArgument> = BTreeMap::new();
        for (parameter, constant) in &op.attributes {
            parts.insert(parameter, FoldArgument::Stored(constant.clone()));
        }
        for (parameter, bindings) in &op.inputs {
            let [binding] = bindings.as_slice() else {
                return Err(self.wrong(format!("op `{}`: parameter `{parameter}` takes one value", op.name)));
            };
            let part = match (self.function.constant(binding), binding) {
                (Some(constant), _) => FoldArgument::Stored(constant.clone()),
                (None, Binding::Value(inner)) => FoldArgument::Folded(self.constant(*inner)?),
                (None, Binding::Constant(constant)) => FoldArgument::Stored((**constant).clone()),
            };
            parts.insert(parameter, part);
        }
        let types: Vec<TensorType> =
            op.outputs.iter().filter_map(|id| self.function.tensor_type(*id).cloned()).collect();
        let Some(Rule::Fold(fold)) = ops::lookup(&op.operator).map(|row| row.rule) else {
            return Err(self.wrong(format!("op `{}` ({}) doesn't fold to constants", op.name, op.operator)));
        };
        let results =
            fold(&types, &parts, self.cache).map_err(|t| self.constant_error(&self.function.value(id).name, t))?;
        for (output, result) in op.outputs.iter().zip(results) {
            self.constants.insert(*output, result);
            self.folded.insert(*output, op);
        }
        match self.constants.get(&id) {
            Some(value) => Ok(value.clone()),
            None => Err(self.wrong(format!("op `{}` has more results than {} gives", op.name, op.operator))),
        }
    }

    fn constant_error(&self, name: &str, error: ConstantError) -> ExecError {
        let (function, name) = (self.function.name.clone(), name.to_owned());
        match error {
            ConstantError::Problem(problem) => ExecError::Constant { function, name, problem },
            ConstantError::Content(error) => ExecError::Content { function, name, error },
        }
    }
}

/// Marks the last use of each slot, and results that are never read. A slot that is written twice has a last use before
/// each rewrite; a slot that a group recomputes stays alive for the steps behind the group.
pub(super) fn mark_last_uses(nodes: &mut [Node], outputs: &mut [(String, Operand)]) {
    let mut needed = BTreeSet::new();
    for (_, operand) in outputs.iter_mut().rev() {
        mark(operand, &mut needed);
    }
    mark_nodes(nodes, &mut needed);
}

/// Marks reads of a state whose next op on that state is a write. Such a read may take the buffer, so that an in-place
/// computation needs no copy.
pub(super) fn mark_last_reads(nodes: &mut [Node]) {
    let mut written_next: BTreeSet<String> = BTreeSet::new();
    for node in nodes.iter_mut().rev() {
        if let Node::Control(control) = node {
            // the blocks may read a state and not write it
            control.states().iter().for_each(|state| _ = written_next.remove(&**state));
        }
        for step in node.steps_mut().iter_mut().rev() {
            let Some(state) = step.state().map(|name| name.to_string()) else { continue };
            if step.kernel.is::<WriteState>().is_some() {
                written_next.insert(state);
            } else {
                step.takes_state = step.kernel.is::<ReadState>().is_some() && written_next.remove(&state);
            }
        }
    }
}
