//! Verifier and type inference of functions.
//!
//! Invariants of a verified program:
//!
//! 1. the default function exists, functions have different names and one opset;
//! 2. names of functions and values are legal, and no two values that are visible at one place have the same name;
//! 3. inputs are tensors whose symbols have sizes, or fp16 states of a fixed shape; outputs are distinct tensors
//!    that aren't inputs;
//! 4. every value is defined once: as an input, by one op, or as the input of a nested block;
//! 5. an op reads only values defined before it, in its own block or in an enclosing one;
//! 6. after a state is written, values that were read from it before aren't used any more;
//! 7. every operator is in the catalogue, in a form that the function's opset has;
//! 8. all required parameters are given, none is unknown, those that must be constant are, and each has an
//!    element type that the operator takes; only `read_state` and `write_state` take states;
//! 9. declared types of results equal the inferred ones;
//! 10. constants have as much data as their type requires.

mod infer;
mod operation;
mod order;
mod signature;

use hashbrown::HashSet;

use super::ir::{Block, Function, Program};
use super::names;

pub use infer::{infer_known_types, infer_types, not_inferred};

/// A violated invariant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Function of the finding; empty for the whole program.
    pub function: String,
    /// Name of the op or value; empty for the whole function.
    pub op: String,
    /// Description: found and expected.
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

/// Verifies a program; returns all violations.
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
        let (opset, expected) = (function.opset.name(), program.opset().name());
        if opset != expected {
            whole(format!("function `{}` is for {opset}; expected {expected} as in the others", function.name));
        }
    }
    for function in &program.functions {
        findings.extend(verify_function(function));
    }
    findings
}

/// Verifies a function; returns all violations.
pub fn verify_function(function: &Function) -> Vec<Finding> {
    let mut findings = Findings { function: &function.name, list: Vec::new() };
    if let Some(id) = function.dangling() {
        // the other checks would be out of bounds
        findings.add("", format!("value {} is used, there are {}", id.0, function.values.len()));
        return findings.list;
    }
    check_names(function, &mut findings);
    signature::check(function, &mut findings);
    order::check(function, &mut findings);
    operation::check(function, &mut findings);
    findings.list
}

fn check_names(function: &Function, findings: &mut Findings<'_>) {
    if let Some(problem) = names::problem(&function.name) {
        findings.add("", problem);
    }
    for value in &function.values {
        if let Some(problem) = names::problem(&value.name) {
            findings.add(&value.name, problem);
        }
    }
    let mut visible = HashSet::new();
    for id in &function.inputs {
        check_unique(&function.value(*id).name, &mut visible, findings);
    }
    check_names_of(function, &function.block, &mut visible, findings);
}

/// Checks that no two values that are visible at one place have the same name. Nested blocks that don't see each other
/// may use a name twice.
fn check_names_of<'a>(
    function: &'a Function,
    block: &'a Block,
    visible: &mut HashSet<&'a str>,
    findings: &mut Findings<'_>,
) {
    for id in &block.inputs {
        check_unique(&function.value(*id).name, visible, findings);
    }
    for op in &block.ops {
        for inner in &op.blocks {
            check_names_of(function, inner, visible, findings);
            let defined = inner.inputs.iter().chain(inner.ops.iter().flat_map(|op| &op.outputs));
            defined.for_each(|id| _ = visible.remove(function.value(*id).name.as_str()));
        }
        for id in &op.outputs {
            check_unique(&function.value(*id).name, visible, findings);
        }
    }
}

fn check_unique<'a>(name: &'a str, visible: &mut HashSet<&'a str>, findings: &mut Findings<'_>) {
    if !visible.insert(name) {
        findings.add(name, "two values have this name".into());
    }
}

/// Findings of one function.
struct Findings<'a> {
    function: &'a str,
    list: Vec<Finding>,
}

impl Findings<'_> {
    /// Adds a finding for an op or value, or for the whole function if `op` is empty.
    fn add(&mut self, op: &str, problem: String) {
        self.list.push(Finding { function: self.function.to_owned(), op: op.to_owned(), problem });
    }
}
