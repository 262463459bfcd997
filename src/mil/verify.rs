//! The verifier, and inference of a whole function's types.
//!
//! What holds for a program that verifies:
//!
//! 1. every value has a unique, legal name within its function;
//! 2. every op reads only values that are inputs or results of earlier ops, or of an enclosing block;
//! 3. every operator is in the catalogue, in a form that the function's opset has;
//! 4. every parameter that must be given is given, none is unknown, and those that must be constant are;
//! 5. declared types of results equal the inferred ones;
//! 6. constants have as much data as their type asks for;
//! 7. after a state is written, what was read from it before isn't used any more;
//! 8. the default function exists, and function names are unique.

use std::collections::{HashMap, HashSet};

use super::catalogue::{self, Arguments, Presence};
use super::error::MilError;
use super::ir::{Argument, Binding, Block, Function, Op, Program, ValueId};
use super::types::{Dim, TensorType, ValueType};

/// Something that doesn't hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Function it was found in; empty for the program as a whole.
    pub function: String,
    /// Name of the op, or of the value; empty for the function as a whole.
    pub op: String,
    /// What was found and what was expected.
    pub problem: String,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.function.is_empty(), self.op.is_empty()) {
            (true, _) => write!(f, "{}", self.problem),
            (false, true) => write!(f, "{}: {}", self.function, self.problem),
            (false, false) => write!(f, "{}: {}: {}", self.function, self.op, self.problem),
        }
    }
}

/// Everything that doesn't hold for a program.
pub fn verify(program: &Program) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut whole = |problem: String| findings.push(Finding { function: String::new(), op: String::new(), problem });
    if program.function(&program.default_function).is_none() {
        whole(format!("the default function `{}` doesn't exist", program.default_function));
    }
    let mut names = HashSet::new();
    for function in &program.functions {
        if !names.insert(&function.name) {
            whole(format!("two functions are named `{}`", function.name));
        }
    }
    for function in &program.functions {
        findings.extend(verify_function(function));
    }
    findings
}

/// Everything that doesn't hold for a function.
pub fn verify_function(function: &Function) -> Vec<Finding> {
    let constexpr =
        function.ops().into_iter().filter(|op| op.is_constexpr()).flat_map(|op| op.outputs.clone()).collect();
    let mut checker =
        Checker { function, constexpr, defined: HashSet::new(), stale: HashMap::new(), findings: Vec::new() };
    let mut names = HashSet::new();
    for value in &function.values {
        if !is_legal_name(&value.name) {
            checker
                .report(&value.name, "the name is not of letters, digits, `_` and `@`, starting with no digit".into());
        }
        if !names.insert(&value.name) {
            checker.report(&value.name, "two values have this name".into());
        }
    }
    checker.defined.extend(&function.inputs);
    checker.block(&function.block);
    checker.findings
}

/// Whether a name can be written to a package.
pub fn is_legal_name(name: &str) -> bool {
    let mut chars = name.chars();
    chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '@')
}

struct Checker<'a> {
    function: &'a Function,
    /// Weights expanded by a constexpr op, which count as constants.
    constexpr: HashSet<ValueId>,
    defined: HashSet<ValueId>,
    /// What was read from a state before it was written: value, and the op that wrote.
    stale: HashMap<ValueId, String>,
    findings: Vec<Finding>,
}

impl<'a> Checker<'a> {
    fn report(&mut self, op: &str, problem: String) {
        self.findings.push(Finding { function: self.function.name.clone(), op: op.to_owned(), problem });
    }

    fn name(&self, id: ValueId) -> &'a str {
        self.function.values.get(id.0 as usize).map_or("?", |v| &v.name)
    }

    fn block(&mut self, block: &'a Block) {
        let mut read: HashMap<ValueId, Vec<ValueId>> = HashMap::new();
        self.defined.extend(&block.inputs);
        for op in &block.ops {
            for operand in op.operands() {
                if !self.defined.contains(&operand) {
                    self.report(&op.name, format!("`{}` is read before it is defined", self.name(operand)));
                }
                if let Some(writer) = self.stale.get(&operand) {
                    let problem = format!("`{}` was read from a state before `{writer}` wrote it", self.name(operand));
                    self.report(&op.name, problem);
                }
            }
            self.op(op);
            for inner in &op.blocks {
                self.block(inner);
            }
            self.defined.extend(&op.outputs);
            let state = match op.input("input") {
                Some(Binding::Value(id)) => Some(*id),
                _ => None,
            };
            match (op.operator.as_str(), state) {
                ("read_state", Some(state)) => read.entry(state).or_default().extend(&op.outputs),
                ("write_state", Some(state)) => {
                    for value in read.remove(&state).unwrap_or_default() {
                        self.stale.insert(value, op.name.clone());
                    }
                }
                _ => {}
            }
        }
        for output in &block.outputs {
            if !self.defined.contains(output) {
                self.report(self.name(*output), "an output is never defined".into());
            }
        }
    }

    fn op(&mut self, op: &Op) {
        let opset = self.function.opset;
        let Some(spec) = catalogue::lookup(&op.operator, opset) else {
            let problem = match catalogue::first_opset(&op.operator) {
                Some(since) => format!("`{}` needs {}, the function is {}", op.operator, since.name(), opset.name()),
                None => format!("the operator `{}` is not in the catalogue", op.operator),
            };
            return self.report(&op.name, problem);
        };
        for (attribute, constant) in &op.attributes {
            if !constant.is_consistent() {
                self.report(&op.name, format!("the data of `{attribute}` doesn't fill its type {}", constant.ty));
            }
        }
        if op.is_const() {
            return self.results(op, &op.inputs, spec);
        }
        for given in op.inputs.keys().chain(op.attributes.keys()) {
            if spec.parameter(given).is_none() {
                self.report(&op.name, format!("`{}` has no parameter `{given}`", op.operator));
            }
        }
        for parameter in &spec.parameters {
            let given = op.inputs.get(parameter.name);
            if given.is_none() && !op.attributes.contains_key(parameter.name) {
                if !matches!(parameter.presence, Presence::Optional) && !parameter.unwritten {
                    self.report(&op.name, format!("parameter `{}` is missing", parameter.name));
                }
                continue;
            }
            let known = |b: &Binding| {
                let expanded = matches!(b, Binding::Value(id) if self.constexpr.contains(id));
                expanded || self.function.constant(b).is_some()
            };
            if parameter.constant && !given.is_none_or(|bindings| bindings.iter().all(known)) {
                self.report(&op.name, format!("parameter `{}` must be a constant", parameter.name));
            }
        }
        self.results(op, &op.inputs, spec);
    }

    fn results(&mut self, op: &Op, inputs: &std::collections::BTreeMap<String, Argument>, spec: &catalogue::OpSpec) {
        let arguments = Arguments { function: self.function, inputs, attributes: &op.attributes };
        let inferred = match (spec.infer)(&arguments) {
            Ok(inferred) => inferred,
            Err(problem) => return self.report(&op.name, problem),
        };
        if inferred.len() != op.outputs.len() {
            return self
                .report(&op.name, format!("{} results are declared, {} follow", op.outputs.len(), inferred.len()));
        }
        for (output, inferred) in op.outputs.iter().zip(inferred) {
            let Some(value) = self.function.values.get(output.0 as usize) else { continue };
            if !agrees(&value.ty, &inferred) {
                self.report(&op.name, format!("`{}` is declared {}, but {inferred} follows", value.name, value.ty));
            }
        }
    }
}

/// Whether a declared type and the inferred one can be the same: a declared dimension that says less than the inferred
/// one (an unknown of a foreign package) agrees with it.
fn agrees(declared: &ValueType, inferred: &ValueType) -> bool {
    let dims = |a: &TensorType, b: &TensorType| {
        a.dtype == b.dtype
            && a.rank() == b.rank()
            && a.shape.iter().zip(&b.shape).all(|(a, b)| match (a, b) {
                (Dim::Fixed(a), Dim::Fixed(b)) => a == b,
                (Dim::Fixed(_), _) => false,
                (Dim::Symbolic { .. }, Dim::Symbolic { .. }) => a == b,
                _ => true,
            })
    };
    match (declared, inferred) {
        (ValueType::Tensor(a), ValueType::Tensor(b)) | (ValueType::State(a), ValueType::State(b)) => dims(a, b),
        _ => declared == inferred,
    }
}

/// The function with the types of all results inferred anew from its inputs: after a symbol was fixed, or to see what
/// a foreign package's unknown dimensions are.
///
/// # Errors
/// The first op whose types can't be inferred.
pub fn infer_types(function: &Function) -> Result<Function, MilError> {
    let mut inferred = function.clone();
    let block = std::mem::take(&mut inferred.block);
    infer_block(&mut inferred, &block)?;
    inferred.block = block;
    Ok(inferred)
}

fn infer_block(function: &mut Function, block: &Block) -> Result<(), MilError> {
    for op in &block.ops {
        for inner in &op.blocks {
            infer_block(function, inner)?;
        }
        if op.is_const() {
            continue;
        }
        let error = |problem: String| MilError::Op {
            function: function.name.clone(),
            op: op.name.clone(),
            operator: op.operator.clone(),
            problem,
        };
        let Some(spec) = catalogue::lookup(&op.operator, function.opset) else {
            return Err(error("the catalogue doesn't know this operator".into()));
        };
        let arguments = Arguments { function, inputs: &op.inputs, attributes: &op.attributes };
        let types = (spec.infer)(&arguments).map_err(error)?;
        for (output, ty) in op.outputs.iter().zip(types) {
            function.values[output.0 as usize].ty = ty;
        }
    }
    Ok(())
}
