//! Errors of the executor.

use anec_base::{Diagnostic, Error, Fault};

/// Why a function can't be compiled or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExecError {
    /// Operators that have no kernel.
    #[error("function `{function}` uses operators that the executor doesn't have: {}", .operators.join(", "))]
    Unsupported {
        /// The function.
        function: String,
        /// All of them, in alphabetical order.
        operators: Vec<String>,
    },
    /// A constant whose bytes don't fit its type, or of a type that can't be held.
    #[error("function `{function}`, constant `{name}`: {problem}")]
    Constant {
        /// The function.
        function: String,
        /// The value's name.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// A constant's bytes couldn't be produced.
    #[error("function `{function}`, constant `{name}`: {error}")]
    Content {
        /// The function.
        function: String,
        /// The value's name.
        name: String,
        /// Why.
        error: Error,
    },
    /// The graph itself is wrong.
    #[error("function `{function}`: {problem}")]
    Function {
        /// The function.
        function: String,
        /// What is wrong.
        problem: String,
    },
    /// An input that is missing, superfluous or of the wrong type or shape.
    #[error("function `{function}`, input `{input}`: {problem}")]
    Input {
        /// The function.
        function: String,
        /// The input.
        input: String,
        /// Found and expected.
        problem: String,
    },
    /// An op that can't be computed with the arguments it got.
    #[error("function `{function}`, op `{op}` ({operator}): {problem}")]
    Op {
        /// The function.
        function: String,
        /// The op's name.
        op: String,
        /// Its operator.
        operator: String,
        /// What is wrong: found and expected.
        problem: String,
    },
}

impl Diagnostic for ExecError {
    fn fault(&self) -> Fault {
        match self {
            ExecError::Content { error, .. } => error.fault(),
            ExecError::Input { .. } => Fault::Usage,
            _ => Fault::Source,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            ExecError::Content { error, .. } => error.help(),
            ExecError::Unsupported { .. } => {
                Some("only the shape of such a package can be inspected here; run it on a Mac".into())
            }
            _ => None,
        }
    }
}
