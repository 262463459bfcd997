//! A program whose compute plan speaks for one function and number of tokens.
//!
//! Core ML plans for the default function of a model and for the default shape of its inputs, whatever else the model
//! has. To learn what it plans for another function or another shape, these are made the default. The range of
//! shapes stays as it is: a function of one fixed shape may be placed where one of a range isn't.

use super::error::CoreMlError;
use anec_mil::{Program, SymbolRange};

/// The program that has nothing but `function`, for which `tokens` is the default length.
///
/// # Errors
/// When there is no such function, or calls of it can't have so many tokens.
pub fn project(program: &Program, function: &str, tokens: u64) -> Result<Program, CoreMlError> {
    let error = |problem: String| CoreMlError::Function { function: function.to_owned(), problem };
    let mut projected = program.function(function).ok_or_else(|| error("the package doesn't have it".into()))?.clone();
    for (symbol, lengths) in &mut projected.lengths {
        if !lengths.contains(tokens) {
            let name = symbol.name();
            return Err(error(format!("{name} = {tokens} isn't among its lengths: {lengths:?}")));
        }
        match lengths {
            SymbolRange::Range { default, .. } => *default = tokens,
            // the first is the default
            SymbolRange::Enumerated(sizes) => {
                sizes.retain(|size| *size != tokens);
                sizes.insert(0, tokens);
            }
        }
    }
    // what the only function of a package is called
    projected.name = "main".into();
    Ok(Program::single(projected))
}
