//! Compiling a function to steps over value slots, and running them.

use anec_base::listing::list;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use smallvec::SmallVec;

use super::arithmetic::ProductArithmetic;
use super::compile::{Compiler, mark_last_reads, mark_last_uses};
use super::engine::{EngineEffect, EngineEffects};
use super::error::ExecError;
use super::frame::{Frame, ValueObserver};
use super::fuse::fuse;
use super::node::Node;
use super::operand::Operand;
use super::ops;
use super::pool::Pool;
use super::profile::ExecProfile;
use super::state::State;
use super::step::Step;
use super::tensor::Tensor;
use super::value::Value;
use super::weight_cache::WeightCache;
use super::workspace::{Workspace, Workspaces};
use anec_kernels::product::Activations;
use anec_mil::{Binding, Dim, Function, Symbol, SymbolRange, TensorType, Uses, ValueType};

/// Precision of values that are declared fp16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// f32 throughout; fp16 constants at their stored value.
    F32,
    /// As [`Precision::F32`], but products that are summed in integers use 16-bit activations ([`Activations::I16`]):
    /// faster for many tokens, and as exact as fp16 activations.
    I16,
    /// As [`Precision::I16`] with 8-bit activations but for a token's largest elements ([`Activations::I8`]):
    /// faster for many tokens, less exact.
    I8,
    /// Every result declared fp16 is rounded to fp16 (nearest even, infinite beyond the range). Sums, matrix products
    /// and softmax accumulate in f32 before. Compressed weights are not rounded on their own: a scale multiplies the
    /// finished sum, as in the hardware.
    F16,
    /// As [`Precision::F16`], with the published arithmetic of the Neural Engine: a simulation. Ops run one by one.
    Ane(EngineEffects),
}

impl Precision {
    /// All published effects of the Neural Engine's arithmetic.
    pub const ANE: Precision = Precision::Ane(EngineEffects::ALL);

    /// Effects that are simulated.
    pub fn effects(self) -> EngineEffects {
        match self {
            Precision::F32 | Precision::I16 | Precision::I8 | Precision::F16 => EngineEffects::NONE,
            Precision::Ane(effects) => effects,
        }
    }

    /// Returns whether results declared fp16 are rounded.
    pub fn rounds(self) -> bool {
        match self {
            Precision::F32 | Precision::I16 | Precision::I8 => false,
            Precision::F16 | Precision::Ane(_) => true,
        }
    }

    /// Arithmetic of products with weights.
    fn arithmetic(self) -> ProductArithmetic {
        let activations = match self {
            Precision::I16 => Activations::I16,
            Precision::I8 => Activations::I8,
            Precision::F32 | Precision::F16 | Precision::Ane(_) => Activations::F32,
        };
        ProductArithmetic { activations, effects: self.effects() }
    }
}

/// Prefix of the names of the simulated precision without some effects.
const WITHOUT: &str = "ane-without-";

/// `f32`, `i16`, `i8`, `f16`, `ane`, or `ane-without-` followed by names of effects joined with `+`.
impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Precision::F32 => f.write_str("f32"),
            Precision::I16 => f.write_str("i16"),
            Precision::I8 => f.write_str("i8"),
            Precision::F16 => f.write_str("f16"),
            Precision::Ane(EngineEffects::ALL) => f.write_str("ane"),
            Precision::Ane(effects) => {
                let without: Vec<&str> = EngineEffect::ALL
                    .iter()
                    .filter(|effect| !effects.has(**effect))
                    .map(|effect| effect.name())
                    .collect();
                write!(f, "{WITHOUT}{}", without.join("+"))
            }
        }
    }
}

impl FromStr for Precision {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "f32" => Ok(Precision::F32),
            "i16" => Ok(Precision::I16),
            "i8" => Ok(Precision::I8),
            "f16" => Ok(Precision::F16),
            "ane" => Ok(Precision::ANE),
            _ => {
                let without = text.strip_prefix(WITHOUT);
                let without = without.ok_or("expected f32, i16, i8, f16, ane or ane-without-EFFECT+EFFECT")?;
                let effects = without.split('+').map(str::parse::<EngineEffect>);
                let effects = effects.collect::<Result<Vec<_>, _>>()?;
                Ok(Precision::Ane(effects.into_iter().fold(EngineEffects::ALL, EngineEffects::without)))
            }
        }
    }
}

/// Function that is ready to run.
pub struct Executable {
    function: String,
    precision: Precision,
    inputs: Vec<(String, TensorType, usize)>,
    states: Vec<(String, TensorType)>,
    lengths: BTreeMap<Symbol, SymbolRange>,
    pub(super) nodes: Vec<Node>,
    outputs: Vec<(String, Operand)>,
    pub(super) slots: usize,
    pub(super) workspaces: Workspaces,
}

impl std::fmt::Debug for Executable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Executable({}, {} steps)", self.function, self.nodes.len())
    }
}

/// Tensor that a run takes as input.
pub(super) trait RunInput {
    /// Returns the tensor.
    fn tensor(&self) -> &Tensor;

    /// Returns the tensor as the run holds it: shared if possible, else a copy. Caches of the host are too large to
    /// copy for each token.
    fn shared(&self, pool: &mut Pool) -> Arc<Tensor>;
}

impl RunInput for Tensor {
    fn tensor(&self) -> &Tensor {
        self
    }

    fn shared(&self, pool: &mut Pool) -> Arc<Tensor> {
        pool.reshaped(&self.shape, &self.data)
    }
}

impl RunInput for Arc<Tensor> {
    fn tensor(&self) -> &Tensor {
        self
    }

    fn shared(&self, _: &mut Pool) -> Arc<Tensor> {
        self.clone()
    }
}

impl Executable {
    /// Compiles a function: finds a kernel for each op, loads constants, fuses ops, and finds the last use of each
    /// value.
    ///
    /// # Errors
    /// [`ExecError::Unsupported`] if an operator has no kernel; [`ExecError::Constant`] or [`ExecError::Content`] if a
    /// constant can't be loaded; [`ExecError::Function`] if the graph is invalid.
    pub fn compile(function: &Function, precision: Precision, cache: &WeightCache) -> Result<Executable, ExecError> {
        if let Precision::Ane(_) = precision {
            return Self::compile_unfused(function, precision, cache);
        }
        Self::assemble(function, precision, cache, |steps, outputs| fuse(steps, &Uses::of(function), outputs))
    }

    /// Compiles a function without fusing ops, so that an observer sees each of them.
    ///
    /// # Errors
    /// As [`compile`](Executable::compile).
    pub fn compile_unfused(
        function: &Function,
        precision: Precision,
        cache: &WeightCache,
    ) -> Result<Executable, ExecError> {
        Self::assemble(function, precision, cache, |steps, _| steps.into_iter().map(Node::Step).collect())
    }

    fn assemble(
        function: &Function,
        precision: Precision,
        cache: &WeightCache,
        arrange: impl FnOnce(Vec<Step>, &[(String, Operand)]) -> Vec<Node>,
    ) -> Result<Executable, ExecError> {
        let operators: BTreeSet<String> = function
            .ops()
            .filter(|op| !op.is_const() && ops::lookup(&op.operator).is_none())
            .map(|op| op.operator.to_string())
            .collect();
        if !operators.is_empty() {
            let operators = operators.into_iter().collect();
            return Err(ExecError::Unsupported { function: function.name.clone(), operators });
        }
        let mut compiler = Compiler::new(function, cache, precision.arithmetic());
        let (mut inputs, mut states) = (Vec::new(), Vec::new());
        for id in &function.inputs {
            let value = function.value(*id);
            match &value.ty {
                ValueType::Tensor(ty) => {
                    inputs.push((value.name.clone(), ty.clone(), id.0 as usize));
                    compiler.define(*id);
                }
                ValueType::State(ty) => states.push((value.name.clone(), ty.clone())),
                ValueType::Opaque(text) => {
                    return Err(
                        compiler.wrong(format!("input `{}` is a {text}, only tensors can be given", value.name))
                    );
                }
            }
        }
        let nodes = compiler.nodes(&function.block)?;
        let mut outputs = Vec::new();
        for id in &function.block.outputs {
            outputs.push((function.value(*id).name.clone(), compiler.operand(&Binding::Value(*id))?));
        }
        // ops of a function with control flow run one by one
        let mut nodes = match nodes.iter().any(|node| matches!(node, Node::Control(_))) {
            true => nodes,
            false => arrange(nodes.into_iter().filter_map(Node::into_step).collect(), &outputs),
        };
        mark_last_uses(&mut nodes, &mut outputs);
        mark_last_reads(&mut nodes);
        Ok(Executable {
            function: function.name.clone(),
            precision,
            inputs,
            states,
            lengths: function.lengths.clone(),
            nodes,
            outputs,
            slots: function.values.len(),
            workspaces: cache.workspaces().clone(),
        })
    }

    /// Zeros for each state of the function.
    pub fn new_state(&self) -> State {
        let mut state = State::default();
        for (name, ty) in &self.states {
            let shape: Vec<usize> = ty.shape.iter().map(|d| d.fixed().unwrap_or(0) as usize).collect();
            state.add_zeros(name, Tensor::zeros(ty.dtype, shape));
        }
        state
    }

    /// Tensor inputs of the function with their declared types, in order.
    pub fn inputs(&self) -> impl Iterator<Item = (&str, &TensorType)> {
        self.inputs.iter().map(|(name, ty, _)| (name.as_str(), ty))
    }

    /// States of the function with their declared types, in order.
    pub fn states(&self) -> impl Iterator<Item = (&str, &TensorType)> {
        self.states.iter().map(|(name, ty)| (name.as_str(), ty))
    }

    /// Output names of the function, in order.
    pub fn output_names(&self) -> impl Iterator<Item = &str> {
        self.outputs.iter().map(|(name, _)| name.as_str())
    }

    /// Runs the function on inputs by name, in any order. Returns the outputs in the function's order. After an error
    /// the state may be incomplete: restore a snapshot or reset it.
    ///
    /// # Errors
    /// [`ExecError::Input`] if an input doesn't fit its declared type; [`ExecError::Op`] if an op can't be computed
    /// with the resulting shapes.
    pub fn run(&self, inputs: &[(&str, &Tensor)], state: &mut State) -> Result<Vec<(String, Tensor)>, ExecError> {
        self.named(inputs, state, None, None)
    }

    /// Runs the function and replaces `outputs` by its outputs, in the function's order. Memory of the previous tensors
    /// in `outputs` is reused: repeated calls with the same input shapes and state allocate nothing.
    ///
    /// # Errors
    /// As [`run`](Executable::run).
    pub fn run_into(
        &self,
        inputs: &[(&str, &Arc<Tensor>)],
        state: &mut State,
        outputs: &mut Vec<Arc<Tensor>>,
    ) -> Result<(), ExecError> {
        self.in_frame(inputs, state, None, None, outputs)
    }

    /// Runs the function and adds the time of each operator to `profile`.
    ///
    /// # Errors
    /// As [`run`](Executable::run).
    pub fn run_profiled(
        &self,
        inputs: &[(&str, &Tensor)],
        state: &mut State,
        profile: &mut ExecProfile,
    ) -> Result<Vec<(String, Tensor)>, ExecError> {
        self.named(inputs, state, None, Some(profile))
    }

    /// Runs the function and passes the result of each op to `observer`, by name. Values inside fused ops (attention,
    /// cache writes, norms) aren't shown.
    ///
    /// # Errors
    /// As [`run`](Executable::run).
    pub fn run_with(
        &self,
        inputs: &[(&str, &Tensor)],
        state: &mut State,
        observer: &mut dyn FnMut(&str, &Tensor),
    ) -> Result<Vec<(String, Tensor)>, ExecError> {
        self.named(inputs, state, Some(observer), None)
    }

    fn named<'a>(
        &'a self,
        inputs: &[(&str, &Tensor)],
        state: &'a mut State,
        observer: Option<ValueObserver<'a>>,
        profile: Option<&'a mut ExecProfile>,
    ) -> Result<Vec<(String, Tensor)>, ExecError> {
        let mut outputs = Vec::with_capacity(self.outputs.len());
        self.in_frame(inputs, state, observer, profile, &mut outputs)?;
        Ok(self.with_names(outputs))
    }

    /// Outputs with their names.
    pub(super) fn with_names(&self, outputs: Vec<Arc<Tensor>>) -> Vec<(String, Tensor)> {
        let names = self.outputs.iter().map(|(name, _)| name.clone());
        names.zip(outputs.into_iter().map(Arc::unwrap_or_clone)).collect()
    }

    fn in_frame<'a>(
        &'a self,
        inputs: &[(&str, &impl RunInput)],
        state: &'a mut State,
        observer: Option<ValueObserver<'a>>,
        profile: Option<&'a mut ExecProfile>,
        outputs: &mut Vec<Arc<Tensor>>,
    ) -> Result<(), ExecError> {
        self.check_inputs(inputs)?;
        let mut workspace = self.workspaces.take(self.slots);
        outputs.drain(..).for_each(|tensor| workspace.pool.recycle(tensor));
        let mut frame = self.frame(workspace, state, observer, profile);
        let result = self.run_frame(&mut frame, inputs, outputs);
        self.workspaces.give(frame.workspace);
        result
    }

    /// Frame for a run.
    pub(super) fn frame<'a>(
        &'a self,
        workspace: Workspace,
        state: &'a mut State,
        observer: Option<ValueObserver<'a>>,
        profile: Option<&'a mut ExecProfile>,
    ) -> Frame<'a> {
        let half = self.precision.rounds();
        Frame { function: &self.function, workspace, state, half, observer, profile }
    }

    fn run_frame(
        &self,
        frame: &mut Frame<'_>,
        inputs: &[(&str, &impl RunInput)],
        outputs: &mut Vec<Arc<Tensor>>,
    ) -> Result<(), ExecError> {
        self.set_inputs(frame, inputs);
        self.nodes.iter().try_for_each(|node| node.run(frame))?;
        self.take_outputs(frame, outputs)
    }

    /// Puts checked inputs into their slots.
    pub(super) fn set_inputs(&self, frame: &mut Frame<'_>, inputs: &[(&str, &impl RunInput)]) {
        for (name, ty, slot) in &self.inputs {
            if let Some((_, tensor)) = inputs.iter().find(|(given, _)| given == name) {
                let mut tensor = tensor.shared(&mut frame.workspace.pool);
                if frame.rounds(ty.dtype) {
                    frame.round(&mut tensor);
                }
                frame.workspace.slots[*slot] = Some(tensor);
            }
        }
    }

    /// Appends the outputs of a run.
    pub(super) fn take_outputs(&self, frame: &mut Frame<'_>, outputs: &mut Vec<Arc<Tensor>>) -> Result<(), ExecError> {
        for (name, operand) in &self.outputs {
            outputs.push(match frame.fetch(operand) {
                Some(Value::Tensor(tensor)) => tensor,
                Some(Value::Weight(weight)) => weight.dense().clone(),
                _ => {
                    let problem = format!("output `{name}` is not a tensor");
                    return Err(ExecError::Function { function: self.function.clone(), problem });
                }
            });
        }
        Ok(())
    }

    pub(super) fn check_inputs(&self, given: &[(&str, &impl RunInput)]) -> Result<(), ExecError> {
        let wrong = |input: &str, problem: String| ExecError::Input {
            function: self.function.clone(),
            input: input.to_owned(),
            problem,
        };
        for (i, (name, _)) in given.iter().enumerate() {
            if !self.inputs.iter().any(|(input, ..)| input == name) {
                let names = list(self.inputs.iter().map(|(name, ..)| name));
                return Err(wrong(name, format!("there is no such input; the inputs are {names}")));
            }
            if given[..i].iter().any(|(earlier, _)| earlier == name) {
                return Err(wrong(name, "it is given twice".into()));
            }
        }
        let mut symbols = SmallVec::<[(&Symbol, u64, &str); 4]>::new();
        for (name, ty, _) in &self.inputs {
            let Some((_, tensor)) = given.iter().find(|(given, _)| given == name) else {
                return Err(wrong(name, format!("it is missing; a {ty} is expected")));
            };
            let tensor = tensor.tensor();
            if !tensor.is_consistent() {
                let count = tensor.data.len();
                return Err(wrong(name, format!("its shape is {:?}, but it has {count} elements", tensor.shape)));
            }
            if !tensor.data.holds(ty.dtype) {
                return Err(wrong(name, format!("it holds {}, a {ty} is expected", tensor.data.kind())));
            }
            let misfit = || wrong(name, format!("its shape is {:?}, a {ty} is expected", tensor.shape));
            if tensor.shape.len() != ty.rank() {
                return Err(misfit());
            }
            for (size, dim) in tensor.shape.iter().zip(&ty.shape) {
                match dim {
                    Dim::Fixed(n) if *n != *size as u64 => return Err(misfit()),
                    Dim::Fixed(_) | Dim::Unknown => {}
                    Dim::Symbolic { factor, symbol, offset } => {
                        let rest = *size as i128 - i128::from(*offset);
                        let factor = i128::from(*factor);
                        if rest < 0 || rest % factor != 0 {
                            return Err(misfit());
                        }
                        let value = (rest / factor) as u64;
                        if self.lengths.get(symbol).is_some_and(|lengths| !lengths.contains(value)) {
                            let symbol = symbol.name();
                            return Err(wrong(name, format!("{symbol} = {value} is not among the function's lengths")));
                        }
                        let known = symbols.iter().find(|(other, ..)| *other == symbol).copied();
                        if known.is_none() {
                            symbols.push((symbol, value, name));
                        }
                        if let Some((_, known, by)) = known.filter(|(_, known, _)| *known != value) {
                            let symbol = symbol.name();
                            let problem = format!("{symbol} = {value}, but input `{by}` has {symbol} = {known}");
                            return Err(wrong(name, problem));
                        }
                    }
                }
            }
        }
        Ok(())
    }
}
