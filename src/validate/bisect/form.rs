//! The rules of MIL as a predicate.

use super::{Failure, Predicate};
use crate::error::Result;
use crate::mil::Function;
use crate::mil::verify::{Finding, infer_types, verify_function};
use crate::validate::foreign::sizes;

/// Fails where a rule of MIL is broken, or a type that is inferred anew isn't the declared one.
#[derive(Debug, Default)]
pub struct Structure;

impl Predicate for Structure {
    fn failures(&mut self, function: &Function) -> Result<Vec<Failure>> {
        let mut failures: Vec<Failure> = verify_function(function).iter().map(failure).collect();
        for fixed in sizes(function) {
            match infer_types(&fixed) {
                Ok(inferred) => failures.extend(verify_function(&inferred).iter().map(failure)),
                Err(error) => failures.push(Failure { kind: error.to_string(), detail: error.to_string() }),
            }
        }
        failures.dedup();
        Ok(failures)
    }
}

/// A piece has the same finding only at the same op: its borders can break rules that the whole keeps.
fn failure(finding: &Finding) -> Failure {
    Failure { kind: finding.to_string(), detail: finding.to_string() }
}
