//! Rows of the table of operators: an operator and its implementation.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::constants::ConstantError;
use super::kernel::Kernel;
use super::resolve::Resolver;
use super::value::Value;
use super::weight_cache::WeightCache;
use anec_mil::{Constant, TensorType};

/// Argument of a constexpr op.
pub(crate) enum FoldArgument {
    /// Constant as stored.
    Stored(Constant),
    /// Result of another constexpr op.
    Folded(Value),
}

/// Arguments and attributes by name.
pub(crate) type FoldArguments<'a> = BTreeMap<&'a str, FoldArgument>;

/// Kernel of an op, or the error in the op.
pub(crate) type Resolved = Result<Arc<dyn Kernel>, String>;

/// Folds a constexpr op to constants, given the types of its results.
pub(crate) type Fold = fn(&[TensorType], &FoldArguments<'_>, &WeightCache) -> Result<Vec<Value>, ConstantError>;

/// Row of the table.
pub(crate) struct Row {
    /// Name of the operator.
    pub operator: &'static str,
    /// Implementation of the operator.
    pub rule: Rule,
}

/// Implementation of an operator.
#[derive(Clone, Copy)]
pub(crate) enum Rule {
    /// A kernel that computes at run time.
    Kernel {
        /// Resolves an op to its kernel.
        resolve: fn(&mut Resolver<'_>) -> Resolved,
        /// Whether results only hold elements of the arguments, so that rounding them again changes nothing.
        moves: bool,
    },
    /// Constants at compile time.
    Fold(Fold),
    /// Nested blocks, which the executor runs.
    Blocks,
}

/// Rows of operators that compute.
macro_rules! computing {
    ($($operator:literal => $resolve:expr),* $(,)?) => {
        &[$($crate::row::Row {
            operator: $operator,
            rule: $crate::row::Rule::Kernel { resolve: $resolve, moves: false },
        }),*]
    };
}
/// Rows of operators that only move elements.
macro_rules! moving {
    ($($operator:literal => $resolve:expr),* $(,)?) => {
        &[$($crate::row::Row {
            operator: $operator,
            rule: $crate::row::Rule::Kernel { resolve: $resolve, moves: true },
        }),*]
    };
}
/// Rows of operators that fold to constants.
macro_rules! folding {
    ($($operator:literal => $fold:expr),* $(,)?) => {
        &[$($crate::row::Row { operator: $operator, rule: $crate::row::Rule::Fold($fold) }),*]
    };
}
pub(crate) use {computing, folding, moving};
