//! Errors of the executor.

use anec_base::listing::list;
use anec_base::{Diagnostic, Error, Fault};

/// Error of compiling or running a function.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExecError {
    /// Operators that have no kernel.
    #[error("function `{function}` uses operators that the executor doesn't have: {}", list(.operators))]
    Unsupported {
        /// The function.
        function: String,
        /// Operators without a kernel, in alphabetical order.
        operators: Vec<String>,
    },
    /// A constant whose bytes don't fit its type, or of a type that can't be held.
    #[error("function `{function}`, constant `{name}`: {problem}")]
    Constant {
        /// The function.
        function: String,
        /// The value's name.
        name: String,
        /// Mismatch between the bytes and the type.
        problem: String,
    },
    /// A constant's bytes can't be read.
    #[error("function `{function}`, constant `{name}`: {error}")]
    Content {
        /// The function.
        function: String,
        /// The value's name.
        name: String,
        /// Cause.
        error: Error,
    },
    /// The graph is invalid.
    #[error("function `{function}`: {problem}")]
    Function {
        /// The function.
        function: String,
        /// Violation.
        problem: String,
    },
    /// An input is missing, superfluous, or of the wrong type or shape.
    #[error("function `{function}`, input `{input}`: {problem}")]
    Input {
        /// The function.
        function: String,
        /// Name of the input.
        input: String,
        /// Actual and expected type or shape.
        problem: String,
    },
    /// An op can't be computed with its arguments.
    #[error("function `{function}`, op `{op}` ({operator}): {problem}")]
    Op {
        /// The function.
        function: String,
        /// The op's name.
        op: String,
        /// Operator of the op.
        operator: String,
        /// Actual and expected arguments.
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
