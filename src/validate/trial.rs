//! Errors of running functions, as checks: a program that can't be executed is a finding, and the report continues.

use super::verdict::Check;
use anec_base::{Error, Result};
use anec_bundle::layer_of;
use anec_exec::ExecError;
use anec_runtime::RuntimeError;

const CLAIM: &str = "it can be run";

/// Converts an error into a check: failed if the program is at fault, unproven if the executor lacks an operator.
///
/// # Errors
/// Returns the error if it isn't about the program: an unreadable file, a text that doesn't fit.
pub fn not_run(subject: impl Into<String>, error: Error) -> Result<Check> {
    let inner: &(dyn std::error::Error + 'static) = error.inner();
    let cause = match inner.downcast_ref::<RuntimeError>() {
        Some(RuntimeError::Function { error, .. }) => error,
        _ => return Err(error),
    };
    match cause {
        ExecError::Content { .. } => Err(error),
        ExecError::Unsupported { .. } => Ok(Check::unproven(subject, CLAIM, error.to_string())),
        ExecError::Op { op, .. } => {
            Ok(Check { layer: layer_of(op), ..Check::of(subject, CLAIM, Some(error.to_string())) })
        }
        ExecError::Constant { name, .. } => {
            Ok(Check { layer: layer_of(name), ..Check::of(subject, CLAIM, Some(error.to_string())) })
        }
        _ => Ok(Check::of(subject, CLAIM, Some(error.to_string()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::Verdict;

    fn of_function(error: ExecError) -> Result<Check> {
        not_run("f32", RuntimeError::Function { package: "p.mlpackage".into(), error }.into())
    }

    #[test]
    fn a_program_at_fault_is_refuted_at_its_op() {
        let (function, problem) = ("main".to_owned(), "the slice ends at 9 of 8".to_owned());
        let (op, operator) = ("layers_12_attn_cache_slice_update".to_owned(), "slice_update".to_owned());
        let check = of_function(ExecError::Op { function, op, operator, problem }).unwrap();
        assert_eq!((check.verdict, check.layer), (Verdict::Failed, Some(12)));
        let detail = check.detail.unwrap();
        assert!(detail.starts_with("p.mlpackage, function `main`, op `layers_12_attn_cache_slice_update`"), "{detail}");
    }

    #[test]
    fn unrelated_errors_are_returned() {
        let operators = vec!["topk".to_owned()];
        let check = of_function(ExecError::Unsupported { function: "main".into(), operators }).unwrap();
        assert_eq!(check.verdict, Verdict::Unproven);
        assert!(not_run("f32", RuntimeError::NoTokens.into()).is_err());
    }
}
