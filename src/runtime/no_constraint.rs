//! Stand-in for the module `constraint` in builds without the feature `grammar`.

use super::error::RuntimeError;
pub use super::grammar::Grammar;
use super::tokenizer::Tokenizer;

/// Compiler of grammars; absent in this build.
pub enum Grammars {}

/// Grammar with the state of a text; absent in this build.
#[derive(Clone)]
pub enum Constraint {}

impl Grammars {
    /// Fails, because this build has no grammars.
    ///
    /// # Errors
    /// Always.
    pub fn new(_tokenizer: &Tokenizer, _vocab_size: u64, _ends: &[u32]) -> Result<Self, RuntimeError> {
        Err(RuntimeError::Grammar { problem: "this build is without the feature `grammar`".into() })
    }

    /// Never called.
    ///
    /// # Errors
    /// Never.
    pub fn start(&self, _form: &Grammar) -> Result<Constraint, RuntimeError> {
        match *self {}
    }
}

impl Constraint {
    /// Never called.
    #[must_use]
    pub fn independent(self) -> Self {
        self
    }

    /// Never called.
    ///
    /// # Errors
    /// Never.
    pub fn mask_logits(&mut self, _logits: &mut [f32]) -> Result<(), RuntimeError> {
        match *self {}
    }

    /// Never called.
    ///
    /// # Errors
    /// Never.
    pub fn accept_token(&mut self, _token: u32) -> Result<(), RuntimeError> {
        match *self {}
    }

    /// Never called.
    pub fn is_finished(&self) -> bool {
        match *self {}
    }
}
