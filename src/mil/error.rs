//! Errors of the IR.

use anec_base::{Diagnostic, Fault};

/// Error of a graph, its text or its encoding.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MilError {
    /// Invalid arguments of an op.
    #[error("function `{function}`, op `{op}` ({operator}): {problem}")]
    Op {
        /// Function that holds the op.
        function: String,
        /// Name of the op.
        op: String,
        /// Operator.
        operator: String,
        /// Description: found and expected.
        problem: String,
    },
    /// Error of a whole function.
    #[error("function `{function}`: {problem}")]
    Function {
        /// Name of the function.
        function: String,
        /// Description.
        problem: String,
    },
    /// Error of the text form.
    #[error("line {line}, column {column}: {problem}")]
    Text {
        /// Line, counted from 1.
        line: usize,
        /// Column, counted from 1.
        column: usize,
        /// Description: found and expected.
        problem: String,
    },
    /// Invalid protobuf message.
    #[error("{place}: {problem}")]
    Encoding {
        /// Position in the message.
        place: String,
        /// Description.
        problem: String,
    },
}

impl Diagnostic for MilError {
    fn fault(&self) -> Fault {
        Fault::Source
    }
}
