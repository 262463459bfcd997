//! Finds the smallest piece of a program that fails: ops are left out for as long as what is left fails in the same way.
//!
//! What an op that was left out would have given becomes an input of the piece, and what nothing in the piece reads
//! becomes its output; so any set of ops is a program of its own. The method is delta debugging (Zeller, Hildebrandt:
//! Simplifying and Isolating Failure-Inducing Input, 2002), after bisections of where the piece ends and begins.
//!
//! | module | holds |
//! |---|---|
//! | [`piece`] | some of a function's ops as a function of their own |
//! | [`search`] | which ops are enough |
//! | [`form`] | predicate: the rules of MIL |
//! | [`fp16_predicate`] | predicate: half precision, on the values that the whole function computes |
//! | [`outside`] | predicates of others: Core ML's compiler, its placement, a user's program |

pub mod form;
pub mod fp16_predicate;
pub mod outside;
pub mod piece;
pub mod search;

use std::collections::BTreeSet;

use serde::Serialize;

use anec_base::Result;
use anec_bundle::layer_of;
use anec_mil::Function;
use anec_mil::verify::infer_what_can_be;

/// The predicates that have a name; what has none of these is a command.
pub const NAMED: [&str; 4] = ["structure", "numerics", "compile", "residency"];

/// A way in which a function fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What is the same where a piece fails as the whole does: a claim, a problem.
    pub kind: String,
    /// What was found.
    pub detail: String,
}

/// Says in which ways functions fail.
pub trait Predicate {
    /// The ways in which a function fails; none if it doesn't, or can't be tried at all.
    ///
    /// # Errors
    /// When nothing can be said of any function: a constant that can't be read, a tool that isn't there.
    fn failures(&mut self, function: &Function) -> Result<Vec<Failure>>;
}

/// The smallest piece that was found.
#[derive(Clone, Debug)]
pub struct MinimalRepro {
    /// Ops of the whole function, without constants.
    pub ops_before: usize,
    /// The ops that are left, in their order; constants that they read aren't listed.
    pub ops: Vec<CulpritOp>,
    /// What was found of the piece.
    pub findings: Vec<String>,
    /// Pieces that were tried.
    pub tries: usize,
    /// The piece.
    pub piece: Function,
}

/// An op of the piece.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CulpritOp {
    /// Its name.
    pub name: String,
    /// Its operator.
    pub operator: String,
    /// The layer that its name says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<usize>,
}

/// The smallest piece of a function that fails as the whole does; nothing if the whole doesn't fail.
///
/// # Errors
/// As the predicate's.
pub fn bisect(function: &Function, predicate: &mut dyn Predicate) -> Result<Option<MinimalRepro>> {
    let whole = predicate.failures(function)?;
    if whole.is_empty() {
        return Ok(None);
    }
    let kinds: BTreeSet<String> = whole.iter().map(|failure| failure.kind.clone()).collect();
    let known = infer_what_can_be(function);
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
    // what isn't in the ops (a description, a name) doesn't survive being taken apart
    if same(&all)?.is_empty() {
        let findings = whole.into_iter().map(|failure| failure.detail).collect();
        return Ok(Some(culprit(function, function.clone(), ops.len(), &ops, findings, tries)));
    }
    let smallest = search::smallest(ops.len(), &mut |choice| Ok(!same(choice)?.is_empty()))?;
    let findings = same(&smallest)?.into_iter().map(|failure| failure.detail).collect();
    let kept: Vec<usize> = chosen(&smallest).into_iter().collect();
    let piece = piece::piece(function, &known, &chosen(&smallest)).unwrap_or_else(|| function.clone());
    Ok(Some(culprit(function, piece, ops.len(), &kept, findings, tries)))
}

fn culprit(
    function: &Function,
    piece: Function,
    ops_before: usize,
    kept: &[usize],
    findings: Vec<String>,
    tries: usize,
) -> MinimalRepro {
    let ops = kept.iter().map(|at| &function.block.ops[*at]).map(|op| CulpritOp {
        name: op.name.clone(),
        operator: op.operator.clone(),
        layer: layer_of(&op.name),
    });
    MinimalRepro { ops_before, ops: ops.collect(), findings, tries, piece }
}
