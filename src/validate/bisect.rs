//! Finds the smallest piece of a program that fails in the same way as the whole, by leaving out ops.
//!
//! Results of omitted ops become inputs of the piece, and results that nothing in the piece reads become outputs; so
//! any set of ops is a valid program. The method bisects the end and the beginning of the piece, then applies delta
//! debugging (Zeller, Hildebrandt: Simplifying and Isolating Failure-Inducing Input, 2002).
//!
//! | module | holds |
//! |---|---|
//! | [`piece`] | some of a function's ops as a function of their own |
//! | [`search`] | which ops are enough |
//! | [`form`] | predicate: the rules of MIL |
//! | [`fp16_predicate`] | predicate: half precision, on the values that the whole function computes |
//! | [`package_predicate`] | predicates of others: Core ML's compiler, its placement, a user's program |
//! | [`placement`] | the first call of a model that isn't placed on the Neural Engine |

pub mod form;
pub mod fp16_predicate;
pub mod package_predicate;
pub mod piece;
pub mod placement;
pub mod search;

use std::collections::BTreeSet;

use serde::Serialize;

use anec_base::Result;
use anec_bundle::layer_of;
use anec_mil::Function;
use anec_mil::verify::infer_known_types;

/// Named predicates; any other text is a command.
pub const PREDICATES: [&str; 4] = ["structure", "numerics", "compile", "residency"];

/// Failure of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Identity of the failure, equal for the piece and the whole: a claim, a problem.
    pub kind: String,
    /// Finding in detail.
    pub detail: String,
}

/// Test of whether and how functions fail.
pub trait Predicate {
    /// Returns the failures of a function; empty if it passes or can't be tried.
    ///
    /// # Errors
    /// If no function can be tested: unreadable constant, missing tool.
    fn failures(&mut self, function: &Function) -> Result<Vec<Failure>>;
}

/// Smallest failing piece.
#[derive(Clone, Debug)]
pub struct MinimalRepro {
    /// Number of ops of the whole function, without constants.
    pub ops_before: usize,
    /// Remaining ops in order, without the constants that they read.
    pub ops: Vec<FailingOp>,
    /// Failures of the piece.
    pub findings: Vec<String>,
    /// Number of pieces that were tried.
    pub tries: usize,
    /// Piece as a function.
    pub piece: Function,
}

/// Op of the piece.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FailingOp {
    /// Name.
    pub name: String,
    /// Operator.
    pub operator: String,
    /// Layer, according to the name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<usize>,
}

/// Finds the smallest piece of a function that fails as the whole does. Returns `None` if the whole function passes.
///
/// # Errors
/// Any error of the predicate.
pub fn bisect(function: &Function, predicate: &mut dyn Predicate) -> Result<Option<MinimalRepro>> {
    let whole = predicate.failures(function)?;
    if whole.is_empty() {
        return Ok(None);
    }
    let kinds: BTreeSet<String> = whole.iter().map(|failure| failure.kind.clone()).collect();
    let known = infer_known_types(function);
    let ops: Vec<usize> = (0..function.block.ops.len()).filter(|at| function.block.ops[*at].is_executed()).collect();
    let chosen = |choice: &[usize]| -> BTreeSet<usize> { choice.iter().map(|index| ops[*index]).collect() };
    let mut tries = 0;
    let mut same = |choice: &[usize]| -> Result<Vec<Failure>> {
        let Some(piece) = piece::piece(function, &known, &chosen(choice)) else { return Ok(Vec::new()) };
        tries += 1;
        let failures = predicate.failures(&piece)?;
        Ok(failures.into_iter().filter(|failure| kinds.contains(&failure.kind)).collect())
    };
    let all: Vec<usize> = (0..ops.len()).collect();
    // failures outside the ops (a description, a name) disappear in a piece
    if same(&all)?.is_empty() {
        let findings = whole.into_iter().map(|failure| failure.detail).collect();
        return Ok(Some(minimal(function, function.clone(), ops.len(), &ops, findings, tries)));
    }
    let smallest = search::smallest(ops.len(), &mut |choice| Ok(!same(choice)?.is_empty()))?;
    let findings = same(&smallest)?.into_iter().map(|failure| failure.detail).collect();
    let kept: Vec<usize> = chosen(&smallest).into_iter().collect();
    let piece = piece::piece(function, &known, &chosen(&smallest)).unwrap_or_else(|| function.clone());
    Ok(Some(minimal(function, piece, ops.len(), &kept, findings, tries)))
}

fn minimal(
    function: &Function,
    piece: Function,
    ops_before: usize,
    kept: &[usize],
    findings: Vec<String>,
    tries: usize,
) -> MinimalRepro {
    let ops = kept.iter().map(|at| &function.block.ops[*at]).map(|op| FailingOp {
        name: op.name.clone(),
        operator: op.operator.to_string(),
        layer: layer_of(&op.name),
    });
    MinimalRepro { ops_before, ops: ops.collect(), findings, tries, piece }
}
