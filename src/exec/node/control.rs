//! Control flow: ops with nested blocks.
//!
//! Values of nested blocks have slots of their own. A value from outside that a block uses stays in its slot until the
//! op has ended, because another iteration may need it.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{Node, mark, mark_nodes};
use crate::error::ExecError;
use crate::frame::Frame;
use crate::operand::Operand;
use crate::step::Output;
use crate::tensor::{Tensor, TensorData};
use crate::value::Value;
use anec_mil::TensorType;

/// Maximum number of iterations of all loops of a run. A package may come from anywhere, and a loop may have no end.
const MAX_ITERATIONS: u64 = 1 << 20;
/// Maximum bytes of the variables of a loop, which may grow with each iteration.
const MAX_BYTES: usize = if cfg!(test) { 1 << 20 } else { 1 << 30 };

/// Op with nested blocks.
pub(crate) struct Control {
    pub operator: &'static str,
    pub name: String,
    /// Arguments: the predicate, or the initial variables.
    pub operands: Vec<Operand>,
    pub blocks: Blocks,
    /// Values from outside that the blocks use.
    pub captured: Vec<Operand>,
    pub types: Vec<TensorType>,
    pub outputs: Vec<Output>,
}

/// Nested blocks of an op.
pub(crate) enum Blocks {
    /// The blocks for true and false.
    Branches([Body; 2]),
    /// The condition, which is computed before each iteration, and the body.
    Loop { condition: Body, body: Body },
}

/// Compiled block.
pub(crate) struct Body {
    /// Slots of the inputs.
    pub inputs: Vec<usize>,
    pub nodes: Vec<Node>,
    pub outputs: Vec<Operand>,
}

impl Control {
    /// Operands for values that the blocks use and don't compute.
    pub fn captures(blocks: &Blocks) -> Vec<Operand> {
        let (mut used, mut own) = (BTreeSet::new(), BTreeSet::new());
        for body in blocks.bodies() {
            body.collect(&mut used, &mut own);
        }
        used.difference(&own).map(|slot| Operand::Slot { slot: *slot, last: false }).collect()
    }

    /// Marks last uses; see [`mark_last_uses`](crate::compile::mark_last_uses).
    pub fn mark_last_uses(&mut self, needed: &mut BTreeSet<usize>) {
        for output in &mut self.outputs {
            output.read = needed.remove(&output.slot);
        }
        self.captured.iter_mut().rev().for_each(|operand| mark(operand, needed));
        let captured: BTreeSet<usize> = self.captured.iter().filter_map(Operand::slot).collect();
        for body in self.blocks.bodies_mut() {
            let mut inner = captured.clone();
            body.outputs.iter_mut().rev().for_each(|operand| mark(operand, &mut inner));
            mark_nodes(&mut body.nodes, &mut inner);
        }
        self.operands.iter_mut().rev().for_each(|operand| mark(operand, needed));
    }

    /// Names of the states that the blocks use.
    pub fn states(&self) -> BTreeSet<Arc<str>> {
        let of = |node: &Node| match node {
            Node::Control(inner) => inner.states(),
            node => node.steps().iter().filter_map(|step| step.state().cloned()).collect(),
        };
        self.blocks.bodies().into_iter().flat_map(|body| body.nodes.iter().flat_map(of)).collect()
    }

    /// Runs the op.
    pub fn run(&self, frame: &mut Frame<'_>) -> Result<(), ExecError> {
        let mut given = Vec::with_capacity(self.operands.len());
        for operand in &self.operands {
            given.push(self.tensor(frame, operand)?);
        }
        let results = match &self.blocks {
            Blocks::Branches([yes, no]) => {
                let [predicate] = &given[..] else { return Err(self.wrong(frame, "it takes one predicate".into())) };
                let chosen = if self.boolean(frame, predicate)? { yes } else { no };
                self.block(frame, chosen, Vec::new())?
            }
            Blocks::Loop { condition, body } => self.iterate(frame, condition, body, given)?,
        };
        for operand in &self.captured {
            if let Operand::Slot { slot, last: true } = operand {
                frame.free(*slot);
            }
        }
        for ((result, output), ty) in results.into_iter().zip(&self.outputs).zip(&self.types) {
            if !result.data.holds(ty.dtype) || result.rank() != ty.rank() {
                let (shape, kind) = (&result.shape, result.data.kind());
                let problem = format!("`{}` is declared {ty}; its value has shape {shape:?} and {kind}", output.name);
                return Err(self.wrong(frame, problem));
            }
            frame.store(output, result);
        }
        Ok(())
    }

    fn iterate(
        &self,
        frame: &mut Frame<'_>,
        condition: &Body,
        body: &Body,
        mut variables: Vec<Arc<Tensor>>,
    ) -> Result<Vec<Arc<Tensor>>, ExecError> {
        loop {
            let condition = self.block(frame, condition, variables.clone())?;
            let [condition] = &condition[..] else {
                return Err(self.wrong(frame, "its condition gives several values".into()));
            };
            if !self.boolean(frame, condition)? {
                return Ok(variables);
            }
            frame.workspace.iterations += 1;
            if frame.workspace.iterations > MAX_ITERATIONS {
                return Err(self.wrong(frame, format!("loops ran for {MAX_ITERATIONS} iterations without an end")));
            }
            variables = self.block(frame, body, variables)?;
            let bytes: usize = variables.iter().map(|variable| variable.data.bytes()).sum();
            if bytes > MAX_BYTES {
                return Err(self.wrong(frame, format!("its variables grew to {bytes} bytes; {MAX_BYTES} is the limit")));
            }
        }
    }

    /// Runs a block.
    fn block(
        &self,
        frame: &mut Frame<'_>,
        body: &Body,
        inputs: Vec<Arc<Tensor>>,
    ) -> Result<Vec<Arc<Tensor>>, ExecError> {
        for (slot, input) in body.inputs.iter().zip(inputs) {
            frame.workspace.slots[*slot] = Some(input);
        }
        body.nodes.iter().try_for_each(|node| node.run(frame))?;
        let outputs = body.outputs.iter().map(|operand| self.tensor(frame, operand)).collect();
        // inputs that the block doesn't use
        body.inputs.iter().for_each(|slot| frame.free(*slot));
        outputs
    }

    fn tensor(&self, frame: &mut Frame<'_>, operand: &Operand) -> Result<Arc<Tensor>, ExecError> {
        match frame.fetch(operand) {
            Some(Value::Tensor(tensor)) => Ok(tensor),
            Some(Value::Weight(weight)) => Ok(weight.dense().clone()),
            Some(_) => Err(self.wrong(frame, "an argument is not a tensor".into())),
            None => Err(self.wrong(frame, "an argument has not been computed".into())),
        }
    }

    fn boolean(&self, frame: &Frame<'_>, tensor: &Tensor) -> Result<bool, ExecError> {
        match &tensor.data {
            TensorData::Bool(values) if values.len() == 1 => Ok(values[0]),
            data => {
                let problem =
                    format!("its condition has shape {:?} and {}, not one boolean", tensor.shape, data.kind());
                Err(self.wrong(frame, problem))
            }
        }
    }

    fn wrong(&self, frame: &Frame<'_>, problem: String) -> ExecError {
        let (op, operator) = (self.name.clone(), self.operator.to_owned());
        ExecError::Op { function: frame.function.to_owned(), op, operator, problem }
    }
}

impl Blocks {
    fn bodies(&self) -> [&Body; 2] {
        match self {
            Blocks::Branches([yes, no]) => [yes, no],
            Blocks::Loop { condition, body } => [condition, body],
        }
    }

    fn bodies_mut(&mut self) -> [&mut Body; 2] {
        match self {
            Blocks::Branches([yes, no]) => [yes, no],
            Blocks::Loop { condition, body } => [condition, body],
        }
    }
}

impl Body {
    /// Collects the slots that the block uses and those that it fills.
    fn collect(&self, used: &mut BTreeSet<usize>, own: &mut BTreeSet<usize>) {
        own.extend(&self.inputs);
        used.extend(self.outputs.iter().filter_map(Operand::slot));
        for node in &self.nodes {
            match node {
                Node::Control(inner) => {
                    used.extend(inner.operands.iter().chain(&inner.captured).filter_map(Operand::slot));
                    own.extend(inner.outputs.iter().map(|output| output.slot));
                }
                node => {
                    used.extend(node.steps().iter().flat_map(|step| &step.operands).filter_map(Operand::slot));
                    own.extend(node.steps().iter().flat_map(|step| &step.outputs).map(|output| output.slot));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{ExecError, Executable, Precision, Tensor, WeightCache};
    use anec_mil::{Program, text};

    /// Program of one function of `inputs`, whose ops are `body`, and its outputs.
    fn program(inputs: &str, body: &str, outputs: &str) -> Program {
        let text = format!("program(1.3) {{ func main<ios18>({inputs}) {{ {body} }} -> ({outputs}); }}");
        text::parse(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    fn run(program: &Program, inputs: &[(&str, &Tensor)]) -> Result<Vec<Tensor>, String> {
        let function = &program.functions[0];
        let executable =
            Executable::compile(function, Precision::F32, &WeightCache::new()).map_err(|e| e.to_string())?;
        let outputs = executable.run(inputs, &mut executable.new_state()).map_err(|e| e.to_string())?;
        // a second run finds nothing of the first
        let again = executable.run(inputs, &mut executable.new_state()).map_err(|e| e.to_string())?;
        assert_eq!(outputs, again);
        Ok(outputs.into_iter().map(|(_, tensor)| tensor).collect())
    }

    /// A loop over an `int32` and a vector, with this condition and body.
    fn looping(condition: &str, body: &str) -> String {
        format!(
            "int32 one = const()[val = int32(1)]; int32 none = const()[val = int32(0)];
             int32 last, tensor<fp32, [?]> y = while_loop(loop_vars = (n, x))[name = string(\"l\")] {{
                 block(int32 i, tensor<fp32, [?]> v) {{ {condition} }} -> (c);
                 block(int32 i, tensor<fp32, [?]> v) {{ {body} }} -> (j, w);
             }};"
        )
    }

    const INPUTS: &str = "int32 n, tensor<fp32, [2]> x";
    const POSITIVE: &str = "bool c = greater(x = i, y = none);";

    #[test]
    fn a_loop_without_an_end_is_an_error() {
        let body = "int32 j = add(x = i, y = none); tensor<fp32, [?]> w = identity(x = v);";
        let program = program(INPUTS, &looping(POSITIVE, body), "y");
        let inputs = (Tensor::scalar(1), Tensor::new([2], vec![1.0f32, 2.0]));
        let problem = run(&program, &[("n", &inputs.0), ("x", &inputs.1)]).unwrap_err();
        assert!(problem.contains("op `l` (while_loop): loops ran for 1048576 iterations"), "{problem}");
    }

    #[test]
    fn variables_that_grow_for_ever_are_an_error() {
        let body = "int32 j = add(x = i, y = none); int32 axis = const()[val = int32(0)];
                    bool apart = const()[val = bool(false)];
                    tensor<fp32, [?]> w = concat(values = (v, v), axis = axis, interleave = apart);";
        let program = program(INPUTS, &looping(POSITIVE, body), "y");
        let (n, x) = (Tensor::scalar(1), Tensor::new([2], vec![1.0f32; 2]));
        let inputs = [("n", &n), ("x", &x)];
        let problem = run(&program, &inputs).unwrap_err();
        assert!(problem.contains("its variables grew to"), "{problem}");
    }

    #[test]
    fn types_of_branches_and_loops_are_checked() {
        let branches = |predicate: &str, no: &str| {
            format!(
                "{predicate} tensor<fp32, [2]> y = cond(pred = p)[name = string(\"c\")] {{
                     block() {{ tensor<fp32, [2]> a = exp(x = x); }} -> (a);
                     block() {{ {no} }} -> (b);
                 }};"
            )
        };
        let yes = "bool p = const()[val = bool(true)];";
        let x = Tensor::new([2], vec![0.0f32, 1.0]);
        let n = Tensor::scalar(1);
        let of = |body: &str| run(&program(INPUTS, body, "y"), &[("n", &n), ("x", &x)]);
        let right = "tensor<fp32, [2]> b = relu(x = x);";
        assert_eq!(of(&branches(yes, right)).unwrap()[0].floats().unwrap(), [1.0, 1f32.exp()]);
        assert_eq!(of(&branches("bool p = const()[val = bool(false)];", right)).unwrap()[0], x);
        let wrong = of(&branches(yes, "int32 b = add(x = n, y = n);")).unwrap_err();
        assert!(wrong.contains("op `c` (cond): its branches give tensor<fp32, [2]> and int32"), "{wrong}");
        let wrong = of(&branches("int32 p = add(x = n, y = n);", right)).unwrap_err();
        assert!(wrong.contains("`pred` is int32; expected bool"), "{wrong}");

        let body = "int32 j = sub(x = i, y = one); tensor<fp32, [?]> w = exp(x = v);";
        let of = |text: &str| run(&program(INPUTS, text, "y"), &[("n", &n), ("x", &x)]);
        assert_eq!(of(&looping(POSITIVE, body)).unwrap()[0].floats().unwrap(), [1.0, 1f32.exp()]);
        let wrong = of(&looping("int32 c = sub(x = i, y = one);", body)).unwrap_err();
        assert!(wrong.contains("op `l` (while_loop): the condition is int32"), "{wrong}");
        let wrong = of(&looping(POSITIVE, "fp32 j = const()[val = fp32(1)]; tensor<fp32, [?]> w = exp(x = v);"));
        assert!(wrong.as_ref().is_err_and(|text| text.contains("its body gives [fp32")), "{wrong:?}");
        // one block
        let text = looping(POSITIVE, body);
        let cut = text.find("block(int32 i, tensor<fp32, [?]> v) { int32 j").unwrap();
        let wrong = of(&format!("{}}};", &text[..cut])).unwrap_err();
        assert!(wrong.contains("it has 1 blocks; expected a condition and a body"), "{wrong}");
    }

    #[test]
    fn a_loop_reads_and_writes_a_state() {
        let text = "program(1.3) { func main<ios18>(int32 n, state<tensor<fp16, [2]>> s) {
            int32 one = const()[val = int32(1)]; int32 none = const()[val = int32(0)];
            fp16 two = const()[val = fp16(2)];
            tensor<fp16, [2]> first = read_state(input = s);
            tensor<fp16, [2]> added = add(x = first, y = two);
            write_state(input = s, data = added)[name = string(\"w0\")];
            int32 last = while_loop(loop_vars = (n))[name = string(\"l\")] {
                block(int32 i) { bool c = greater(x = i, y = none); } -> (c);
                block(int32 i) {
                    tensor<fp16, [2]> old = read_state(input = s);
                    tensor<fp16, [2]> new = mul(x = old, y = two);
                    write_state(input = s, data = new)[name = string(\"w\")];
                    int32 j = sub(x = i, y = one);
                } -> (j);
            };
            tensor<fp16, [2]> y = read_state(input = s);
        } -> (last, y); }";
        let program = text::parse(text).unwrap();
        assert_eq!(anec_mil::verify::verify(&program), []);
        let executable = Executable::compile(&program.functions[0], Precision::F32, &WeightCache::new()).unwrap();
        let mut state = executable.new_state();
        let n = Tensor::scalar(3);
        let outputs = executable.run(&[("n", &n)], &mut state).unwrap();
        assert_eq!(outputs[1].1.floats().unwrap(), [16.0; 2]);
        let outputs = executable.run(&[("n", &n)], &mut state).unwrap();
        assert_eq!(outputs[1].1.floats().unwrap(), [144.0; 2]);
    }

    #[test]
    fn values_from_outside_last_for_all_iterations_and_are_freed() {
        // `z` is last used in the body of the inner branch, and `x` as an initial variable and in the body
        let body = "tensor<fp32, [2]> z = exp(x = x);".to_owned()
            + &looping(
                POSITIVE,
                "int32 j = sub(x = i, y = one); bool even = const()[val = bool(true)];
                 tensor<fp32, [?]> w = cond(pred = even)[name = string(\"b\")] {
                     block() {
                         tensor<fp32, [?]> s = add(x = v, y = z);
                         tensor<fp32, [?]> t = add(x = s, y = x);
                     } -> (t);
                     block() { } -> (v);
                 };",
            );
        let program = program(INPUTS, &body, "y");
        let (n, x) = (Tensor::scalar(4), Tensor::new([2], vec![0.0f32, 1.0]));
        let y = run(&program, &[("n", &n), ("x", &x)]).unwrap();
        let expected = [4.0, 1.0 + 4.0 * (1f32.exp() + 1.0)];
        let near = y[0].floats().unwrap().iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-5);
        assert!(near, "{y:?}");
        let executable = Executable::compile(&program.functions[0], Precision::F32, &WeightCache::new());
        assert!(!matches!(executable, Err(ExecError::Unsupported { .. })));
    }
}
