//! Predicate: the rules of MIL.

use super::{Failure, Predicate};
use crate::sizes::sizes;
use anec_base::Result;
use anec_mil::Function;
use anec_mil::verify::{Finding, infer_types, verify_function};

/// Fails if a rule of MIL is broken, or an inferred type differs from the declared one.
#[derive(Debug, Default)]
pub struct Structure;

impl Predicate for Structure {
    fn failures(&mut self, function: &Function) -> Result<Vec<Failure>> {
        let mut failures: Vec<Failure> = verify_function(function).iter().map(failure).collect();
        for fixed in sizes(function) {
            match infer_types(&fixed) {
                Ok(inferred) => failures.extend(verify_function(&inferred).iter().map(failure)),
                Err(error) => failures.push(named(error.to_string())),
            }
        }
        failures.dedup();
        Ok(failures)
    }
}

fn failure(finding: &Finding) -> Failure {
    named(finding.to_string())
}

/// Identifies a finding by its op and text without shapes, because sizes that are unknown in the whole can be known at
/// the border of a piece.
fn named(detail: String) -> Failure {
    let mut kind = String::new();
    for part in detail.split('[') {
        kind.push_str(part.split_once(']').map_or(part, |(_, rest)| rest));
    }
    Failure { kind, detail }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_finding_has_the_same_kind_at_any_shape() {
        let of = |shape: &str| named(format!("`a` is tensor<fp16, {shape}>, but tensor<fp16, [1, 2]> follows")).kind;
        assert_eq!(of("[1, ?]"), of("[1, T]"));
        assert_eq!(of("[1, ?]"), "`a` is tensor<fp16, >, but tensor<fp16, > follows");
        assert_ne!(of("[1]"), named("`b` is tensor<fp16, [1]>".into()).kind);
    }
}
