//! Program whose compute plan describes one function and number of tokens.
//!
//! Core ML plans for the default function of a model and the default shape of its inputs only. To get the plan of
//! another function or shape, these are made the default. The range of shapes stays unchanged, because a function of
//! one fixed shape may be placed where one with a range isn't.

use super::error::CoreMlError;
use anec_mil::{Program, SymbolRange};

/// Returns the program with only `function`, whose default length is `tokens`. Of several flexible dimensions, those
/// that don't have this size keep their default.
///
/// # Errors
/// If there is no such function, or no flexible dimension has this size.
pub fn project(program: &Program, function: &str, tokens: u64) -> Result<Program, CoreMlError> {
    let error = |problem: String| CoreMlError::Function { function: function.to_owned(), problem };
    let mut projected = program.function(function).ok_or_else(|| error("the package doesn't have it".into()))?.clone();
    if let Some((symbol, lengths)) = projected.lengths.first_key_value()
        && !projected.lengths.values().any(|lengths| lengths.contains(tokens))
    {
        return Err(error(format!("{} = {tokens} isn't among its lengths: {lengths:?}", symbol.name())));
    }
    for lengths in projected.lengths.values_mut().filter(|lengths| lengths.contains(tokens)) {
        match lengths {
            SymbolRange::Range { default, .. } => *default = tokens,
            // the first is the default
            SymbolRange::Enumerated(sizes) => {
                sizes.retain(|size| *size != tokens);
                sizes.insert(0, tokens);
            }
        }
    }
    // Core ML's name of the only function of a package
    projected.name = "main".into();
    Ok(Program::single(projected))
}
