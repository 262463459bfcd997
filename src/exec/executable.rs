//! Compiling a function to steps over value slots, and running them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::compile::{Compiler, mark_last_reads, mark_last_uses};
use super::constexpr;
use super::error::ExecError;
use super::kernels::round::round_to_f16;
use super::ops::{self, Call, Row, Value};
use super::tensor::{Tensor, TensorData};
use super::weight::WeightCache;
use crate::mil::{Binding, DataType, Dim, Function, Lengths, Symbol, TensorType, ValueType};

/// How values declared fp16 are computed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// In f32 throughout; fp16 constants at their stored value.
    F32,
    /// Every result declared fp16 is rounded to fp16 (nearest even, infinite beyond the range); sums, products of
    /// matrices and softmax accumulate in f32 before that. Compressed weights are not rounded on their own: a scale
    /// multiplies the finished sum, as the hardware does it.
    F16,
}

/// How to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Precision of fp16 values.
    pub precision: Precision,
}

/// The states of one sequence, by name. Functions that declare states of the same name share them. A clone is a
/// snapshot: buffers are copied when one of the two is written.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    tensors: BTreeMap<String, Arc<Tensor>>,
}

impl State {
    /// The content of a state.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name).map(Arc::as_ref)
    }

    /// Puts a content in place of a state's own, or adds a state.
    pub fn set(&mut self, name: &str, tensor: Tensor) {
        self.tensors.insert(name.to_owned(), Arc::new(tensor));
    }

    /// Names, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Sets everything to zero.
    pub fn reset(&mut self) {
        for tensor in self.tensors.values_mut() {
            *tensor = Arc::new(Tensor::zeros(DataType::Fp16, tensor.shape.clone()));
        }
    }

    /// Adds the states of another that this one doesn't have, so that several executables can run on it.
    pub fn merge(&mut self, other: State) {
        for (name, tensor) in other.tensors {
            self.tensors.entry(name).or_insert(tensor);
        }
    }

    /// The buffer of a state, kept here as well.
    pub(super) fn share(&self, name: &str) -> Option<Arc<Tensor>> {
        self.tensors.get(name).cloned()
    }

    /// The buffer of a state, which is missing until it is put back.
    pub(super) fn take(&mut self, name: &str) -> Option<Arc<Tensor>> {
        self.tensors.remove(name)
    }

    /// Puts a buffer in.
    pub(super) fn put(&mut self, name: &str, tensor: Arc<Tensor>) {
        self.tensors.insert(name.to_owned(), tensor);
    }
}

/// Where a step finds an argument.
#[derive(Clone, Debug)]
pub(super) enum Operand {
    /// A constant.
    Constant(Value),
    /// A computed value; `last` when nothing later needs it.
    Slot { slot: usize, last: bool },
}

/// One op made ready.
pub(super) struct Step {
    pub operator: String,
    pub name: String,
    pub row: &'static Row,
    pub arguments: Vec<(String, Vec<Operand>)>,
    pub types: Vec<TensorType>,
    pub outputs: Vec<Output>,
    pub takes_state: bool,
}

/// Where a result of a step goes.
pub(super) struct Output {
    pub name: String,
    pub slot: usize,
    /// Whether anything reads it.
    pub read: bool,
}

/// A function made ready to run.
pub struct Executable {
    function: String,
    options: Options,
    inputs: Vec<(String, TensorType, usize)>,
    states: Vec<(String, TensorType)>,
    lengths: BTreeMap<Symbol, Lengths>,
    steps: Vec<Step>,
    outputs: Vec<(String, Operand)>,
    slots: usize,
}

impl std::fmt::Debug for Executable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Executable({}, {} steps)", self.function, self.steps.len())
    }
}

impl Executable {
    /// Makes a function ready: finds a kernel for each op, loads the constants, and works out when each value is needed
    /// for the last time.
    ///
    /// # Errors
    /// [`ExecError::Unsupported`] names every operator without a kernel; constants that can't be read or don't fit
    /// their type; a graph that isn't in order.
    pub fn compile(function: &Function, options: Options, cache: &WeightCache) -> Result<Executable, ExecError> {
        let operators: BTreeSet<String> = function
            .ops()
            .into_iter()
            .filter(|op| {
                !op.is_const() && !constexpr::is_supported(&op.operator) && ops::lookup(&op.operator).is_none()
            })
            .map(|op| op.operator.clone())
            .collect();
        if !operators.is_empty() {
            let operators = operators.into_iter().collect();
            return Err(ExecError::Unsupported { function: function.name.clone(), operators });
        }
        let mut compiler = Compiler::new(function, cache);
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
        let mut steps = compiler.steps(&function.block)?;
        let mut outputs = Vec::new();
        for id in &function.block.outputs {
            outputs.push((function.value(*id).name.clone(), compiler.operand(&Binding::Value(*id))?));
        }
        mark_last_uses(&mut steps, &mut outputs);
        mark_last_reads(&mut steps);
        Ok(Executable {
            function: function.name.clone(),
            options,
            inputs,
            states,
            lengths: function.lengths.clone(),
            steps,
            outputs,
            slots: function.values.len(),
        })
    }

    /// Zeros for every state of the function.
    pub fn new_state(&self) -> State {
        let mut state = State::default();
        for (name, ty) in &self.states {
            let shape: Vec<usize> = ty.shape.iter().map(|d| d.fixed().unwrap_or(0) as usize).collect();
            state.set(name, Tensor::zeros(ty.dtype, shape));
        }
        state
    }

    /// The function's tensor inputs and their declared types, in order.
    pub fn inputs(&self) -> impl Iterator<Item = (&str, &TensorType)> {
        self.inputs.iter().map(|(name, ty, _)| (name.as_str(), ty))
    }

    /// The function's states and their declared types, in order.
    pub fn states(&self) -> impl Iterator<Item = (&str, &TensorType)> {
        self.states.iter().map(|(name, ty)| (name.as_str(), ty))
    }

    /// The names of the function's outputs, in order.
    pub fn output_names(&self) -> impl Iterator<Item = &str> {
        self.outputs.iter().map(|(name, _)| name.as_str())
    }

    /// Runs the function on inputs by name, in any order, and gives the outputs in the function's order. After an
    /// error the state may lack what the run was about to write; take a snapshot or reset it to go on.
    ///
    /// # Errors
    /// Inputs that don't fit the declared types; ops that can't be computed with the shapes that follow from them.
    pub fn run(&self, inputs: &[(&str, &Tensor)], state: &mut State) -> Result<Vec<(String, Tensor)>, ExecError> {
        self.run_with(inputs, state, &mut |_, _| {})
    }

    /// As [`run`](Executable::run), and shows `observer` the results of every op by name as they are computed.
    ///
    /// # Errors
    /// As [`run`](Executable::run).
    pub fn run_with(
        &self,
        inputs: &[(&str, &Tensor)],
        state: &mut State,
        observer: &mut dyn FnMut(&str, &Tensor),
    ) -> Result<Vec<(String, Tensor)>, ExecError> {
        self.check_inputs(inputs)?;
        let mut slots: Vec<Option<Arc<Tensor>>> = vec![None; self.slots];
        for (name, ty, slot) in &self.inputs {
            if let Some((_, tensor)) = inputs.iter().find(|(given, _)| given == name) {
                let mut tensor = Tensor::clone(tensor);
                self.round(&mut tensor, ty.dtype);
                slots[*slot] = Some(Arc::new(tensor));
            }
        }
        for step in &self.steps {
            self.step(step, &mut slots, state, observer)?;
        }
        let mut outputs = Vec::with_capacity(self.outputs.len());
        for (name, operand) in &self.outputs {
            let tensor = match fetch(operand, &mut slots) {
                Some(Value::Tensor(tensor)) => Arc::unwrap_or_clone(tensor),
                Some(Value::Weight(weight)) => Tensor::clone(weight.dense()),
                _ => {
                    let problem = format!("output `{name}` is not a tensor");
                    return Err(ExecError::Function { function: self.function.clone(), problem });
                }
            };
            outputs.push((name.clone(), tensor));
        }
        Ok(outputs)
    }

    fn step(
        &self,
        step: &Step,
        slots: &mut [Option<Arc<Tensor>>],
        state: &mut State,
        observer: &mut dyn FnMut(&str, &Tensor),
    ) -> Result<(), ExecError> {
        let wrong = |problem: String| ExecError::Op {
            function: self.function.clone(),
            op: step.name.clone(),
            operator: step.operator.clone(),
            problem,
        };
        let mut arguments = Vec::with_capacity(step.arguments.len());
        for (parameter, operands) in &step.arguments {
            let values: Option<Vec<Value>> = operands.iter().map(|operand| fetch(operand, slots)).collect();
            let values = values.ok_or_else(|| wrong(format!("parameter `{parameter}` has not been computed")))?;
            arguments.push((parameter.as_str(), values));
        }
        let mut call = Call { arguments, types: &step.types, state, takes_state: step.takes_state };
        let results = (step.row.kernel)(&mut call).map_err(wrong)?;
        drop(call);
        if results.len() != step.outputs.len() {
            return Err(wrong(format!("it gives {} results, {} are declared", results.len(), step.outputs.len())));
        }
        for ((mut result, output), ty) in results.into_iter().zip(&step.outputs).zip(&step.types) {
            if !step.row.moves && self.rounds(ty.dtype) {
                self.round(Arc::make_mut(&mut result), ty.dtype);
            }
            observer(&output.name, &result);
            if output.read {
                slots[output.slot] = Some(result);
            }
        }
        Ok(())
    }

    fn rounds(&self, dtype: DataType) -> bool {
        self.options.precision == Precision::F16 && dtype == DataType::Fp16
    }

    fn round(&self, tensor: &mut Tensor, dtype: DataType) {
        if let TensorData::F32(values) = &mut tensor.data
            && self.rounds(dtype)
        {
            round_to_f16(values);
        }
    }

    fn check_inputs(&self, given: &[(&str, &Tensor)]) -> Result<(), ExecError> {
        let wrong = |input: &str, problem: String| ExecError::Input {
            function: self.function.clone(),
            input: input.to_owned(),
            problem,
        };
        for (i, (name, _)) in given.iter().enumerate() {
            if !self.inputs.iter().any(|(input, ..)| input == name) {
                let names: Vec<&str> = self.inputs.iter().map(|(n, ..)| n.as_str()).collect();
                return Err(wrong(name, format!("there is no such input; the inputs are {}", names.join(", "))));
            }
            if given[..i].iter().any(|(earlier, _)| earlier == name) {
                return Err(wrong(name, "it is given twice".into()));
            }
        }
        let mut symbols: BTreeMap<&Symbol, (u64, &str)> = BTreeMap::new();
        for (name, ty, _) in &self.inputs {
            let Some((_, tensor)) = given.iter().find(|(given, _)| given == name) else {
                return Err(wrong(name, format!("it is missing; a {ty} is expected")));
            };
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
                        let (known, by) = *symbols.entry(symbol).or_insert((value, name));
                        if known != value {
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

/// The value of an operand; moved out of its slot if this is its last use.
fn fetch(operand: &Operand, slots: &mut [Option<Arc<Tensor>>]) -> Option<Value> {
    match operand {
        Operand::Constant(value) => Some(value.clone()),
        Operand::Slot { slot, last: true } => slots[*slot].take().map(Value::Tensor),
        Operand::Slot { slot, last: false } => slots[*slot].clone().map(Value::Tensor),
    }
}
