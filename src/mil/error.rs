//! Errors of the IR.

use anec_base::{Diagnostic, Fault};

/// What can be wrong with a graph.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MilError {
    /// An op's arguments don't fit.
    #[error("function `{function}`, op `{op}` ({operator}): {problem}")]
    Op {
        /// Function that holds the op.
        function: String,
        /// The op's name.
        op: String,
        /// Its operator.
        operator: String,
        /// What is wrong: found and expected.
        problem: String,
    },
    /// Something about a function as a whole.
    #[error("function `{function}`: {problem}")]
    Function {
        /// The function.
        function: String,
        /// What is wrong.
        problem: String,
    },
    /// Text that isn't a program.
    #[error("line {line}, column {column}: {problem}")]
    Text {
        /// Line, counted from 1.
        line: usize,
        /// Column, counted from 1.
        column: usize,
        /// What was found and what was expected.
        problem: String,
    },
    /// A protobuf message that isn't a valid program.
    #[error("{place}: {problem}")]
    Encoding {
        /// Where in the message.
        place: String,
        /// What is wrong.
        problem: String,
    },
}

impl Diagnostic for MilError {
    fn fault(&self) -> Fault {
        Fault::Source
    }
}
