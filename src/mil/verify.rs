//! The verifier, and inference of a whole function's types.
//!
//! What holds for a program that verifies:
//!
//! 1. the default function exists, functions have different names and one opset;
//! 2. names of functions and values are legal, and those of values unique within their function;
//! 3. inputs are tensors, whose symbols have lengths, or fp16 states of a fixed shape; outputs are tensors, none of them
//!    twice and none an input;
//! 4. every value is defined once: as an input, by one op, or as the input of a nested block;
//! 5. an op reads only what is defined before it, in its own block or in one around it;
//! 6. after a state is written, what was read from it before isn't used any more;
//! 7. every operator is in the catalogue, in a form that the function's opset has;
//! 8. every parameter that must be given is given, none is unknown, those that must be constant are, and each has an
//!    element type that the operator takes; only `read_state` and `write_state` take states;
//! 9. declared types of results equal the inferred ones;
//! 10. constants have as much data as their type asks for.

mod infer;
mod operation;
mod order;
mod signature;

use hashbrown::HashSet;

use super::ir::{Function, Program};
use super::names;

pub use infer::{infer_types, infer_what_can_be};

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

/// Everything that doesn't hold for a function.
pub fn verify_function(function: &Function) -> Vec<Finding> {
    let mut findings = Findings { function: &function.name, list: Vec::new() };
    if let Some(id) = function.dangling() {
        // nothing else can be looked at
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
    let mut names = HashSet::new();
    for value in &function.values {
        if let Some(problem) = names::problem(&value.name) {
            findings.add(&value.name, problem);
        }
        if !names.insert(&value.name) {
            findings.add(&value.name, "two values have this name".into());
        }
    }
}

/// What was found in one function.
struct Findings<'a> {
    function: &'a str,
    list: Vec<Finding>,
}

impl Findings<'_> {
    /// Adds a problem of an op or value; of the function as a whole where `op` is empty.
    fn add(&mut self, op: &str, problem: String) {
        self.list.push(Finding { function: self.function.to_owned(), op: op.to_owned(), problem });
    }
}
