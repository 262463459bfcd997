//! MIL to `aicode`. MIL stays the only description of a graph: an operator of MIL becomes the operations that compute
//! the same.
//!
//! A function with ranges of sizes gets dynamic dimensions, where its operators can have them. Operators whose form
//! `aicode` names after what they compute ("composite") carry their definition as a body, so that a system that doesn't
//! know the name can compute it.

mod arithmetic;
mod composite;
mod context;
mod convolution;
mod flexible;
mod fold;
mod image;
mod indexing;
mod matrix;
mod normalization;
mod numbers;
mod reduction;
mod shape;
mod space;
mod state;
mod weights;

use std::collections::{BTreeMap, BTreeSet};

use anec_base::Result;
use anec_mil::{Function, Op};

use crate::aicode::{AiModule, Constraints};
use crate::builder::{GraphKind, ModuleBuilder};
use crate::error::CoreAiError;
use context::{Lowering, Tensor};

/// Words of a problem that fixed sizes avoid.
pub const DYNAMIC: &str = "with a dynamic dimension";

/// How programs are lowered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoweringChoices {
    /// Computes products of half-precision matrices in f32. Apple's runtime for Linux adds up such products in half
    /// precision, one by one; an oracle needs better sums.
    pub wide_products: bool,
    /// Reads no weights: constants that aren't literals have zeros. The module must not be written then.
    pub without_weights: bool,
    /// Ignores constraints on memory. Apple's runtime for Linux can't be given arrays that follow them.
    pub plain_memory: bool,
}

impl LoweringChoices {
    /// Choices with products in f32, or without.
    pub fn wide_products(wide_products: bool) -> Self {
        LoweringChoices { wide_products, ..Default::default() }
    }
}

/// Functions that will be one asset. Weights that are the same object are stored once.
#[derive(Default)]
pub struct LoweringPlan {
    module: ModuleBuilder,
    choices: LoweringChoices,
    memory: Memory,
    problems: BTreeSet<String>,
    names: BTreeSet<String>,
}

/// Constraints on the memory of inputs, states and outputs, by name.
type Memory = BTreeMap<String, Constraints>;
/// Results of an operator, or the part that can't be expressed.
type Lowered = std::result::Result<Vec<Tensor>, String>;
/// Lowers an operator.
type Rule = fn(&mut Lowering<'_>, &Op) -> Lowered;
/// A row of the table: operator and rule.
type Row = (&'static str, Rule);

/// The table, by group.
const GROUPS: [&[Row]; 11] = [
    arithmetic::ROWS,
    convolution::ROWS,
    image::ROWS,
    indexing::ROWS,
    matrix::ROWS,
    normalization::ROWS,
    reduction::ROWS,
    shape::ROWS,
    space::ROWS,
    state::ROWS,
    weights::ROWS,
];

/// The rule of an operator.
fn rule(operator: &str) -> Option<Rule> {
    GROUPS.iter().flat_map(|group| group.iter()).find(|(name, _)| *name == operator).map(|(_, rule)| *rule)
}

/// Operators of MIL that can be lowered, in the order of their names.
pub fn operators() -> Vec<&'static str> {
    let mut all: Vec<&str> = GROUPS.iter().flat_map(|group| group.iter()).map(|(name, _)| *name).collect();
    all.sort_unstable();
    all
}

impl LoweringPlan {
    /// An empty plan.
    pub fn new(choices: LoweringChoices) -> Self {
        LoweringPlan { choices, ..Default::default() }
    }

    /// Constrains the memory of inputs, states and outputs of this name, in functions that are added later.
    pub fn constrain(&mut self, name: &str, constraints: Constraints) {
        if !self.choices.plain_memory {
            self.memory.insert(name.to_owned(), constraints);
        }
    }

    /// Adds a function under a name. Ranges become dynamic dimensions; all other shapes must be fixed.
    ///
    /// # Errors
    /// [`CoreAiError::Unsupported`] names everything in the function that can't be expressed. The plan must not be
    /// used further then.
    pub fn add(&mut self, name: &str, function: &Function) -> Result<()> {
        self.try_add(name, function);
        if self.problems.is_empty() {
            return Ok(());
        }
        Err(CoreAiError::Unsupported { problems: std::mem::take(&mut self.problems).into_iter().collect() }.into())
    }

    /// Adds a function and keeps its problems for [`check`](LoweringPlan::check), so that those of all functions are
    /// told at once.
    pub fn try_add(&mut self, name: &str, function: &Function) {
        if !self.names.insert(name.to_owned()) {
            self.problems.insert(format!("two functions called `{name}`"));
            return;
        }
        let (module, choices, memory) = (&mut self.module, self.choices, &self.memory);
        let lowered = match function.lengths.is_empty() {
            true => Lowering::lower(module, choices, memory, function),
            false => flexible::lower(module, choices, memory, function),
        };
        match lowered {
            Ok(graph) => {
                self.module.graph(name, GraphKind::default(), &graph.arguments, &graph.results, graph.body);
            }
            Err(problems) => self.problems.extend(problems),
        }
    }

    /// Whether all functions could be expressed.
    ///
    /// # Errors
    /// [`CoreAiError::Unsupported`] names everything that can't.
    pub fn check(&self) -> Result<()> {
        match self.problems.is_empty() {
            true => Ok(()),
            false => Err(CoreAiError::Unsupported { problems: self.problems.iter().cloned().collect() }.into()),
        }
    }

    /// The module of all functions.
    pub fn finish(self) -> AiModule {
        self.module.finish()
    }
}
