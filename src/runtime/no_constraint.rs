//! Stands for the module `constraint` in a build without the feature `grammar`: no constraint can be made.

use super::error::RuntimeError;
pub use super::grammar::Grammar;
use super::tokenizer::Tokenizer;

/// Would make constraints for a vocabulary; there is none in this build.
pub enum Grammars {}

/// Would be a grammar on its way through a text; there is none in this build.
#[derive(Clone)]
pub enum Constraint {}

impl Grammars {
    /// Refuses: this build has no grammars.
    ///
    /// # Errors
    /// Always.
    pub fn new(_tokenizer: &Tokenizer, _vocab_size: u64, _ends: &[u32]) -> Result<Self, RuntimeError> {
        Err(RuntimeError::Grammar { problem: "this build is without the feature `grammar`".into() })
    }

    /// A constraint at the beginning of its text.
    ///
    /// # Errors
    /// Never called.
    pub fn start(&self, _form: &Grammar) -> Result<Constraint, RuntimeError> {
        match *self {}
    }
}

impl Constraint {
    /// Closes the logits of tokens that can't come next.
    ///
    /// # Errors
    /// Never called.
    pub fn mask_logits(&mut self, _logits: &mut [f32]) -> Result<(), RuntimeError> {
        match *self {}
    }

    /// Tells that `token` is now part of the text.
    ///
    /// # Errors
    /// Never called.
    pub fn accept_token(&mut self, _token: u32) -> Result<(), RuntimeError> {
        match *self {}
    }

    /// Whether nothing can follow.
    pub fn is_finished(&self) -> bool {
        match *self {}
    }
}
