//! The first call of a model whose ops don't all prefer the Neural Engine, for bundles and packages.

use std::sync::Arc;

use super::package_predicate::{PackagePredicate, Residency};
use super::{MinimalRepro, bisect};
use crate::residency::ResidencySubject;
use anec_base::Result;
use anec_coreml::{Engine, project};
use anec_mil::Function;

/// Call that isn't resident.
#[derive(Clone, Debug)]
pub struct MisplacedCall {
    /// Package.
    pub package: String,
    /// Function.
    pub function: String,
    /// Number of tokens, or size of the flexible dimension; `None` for fixed shapes.
    pub tokens: Option<u64>,
    /// Smallest part that isn't resident.
    pub repro: MinimalRepro,
}

/// Returns the first call whose ops don't all prefer the Neural Engine, reduced. Every size of a function is a call,
/// because Core ML plans for the default one. `is_selected` limits the search to some functions.
///
/// # Errors
/// If Core ML fails for another reason than the program.
pub fn misplaced_call<E: Engine>(
    engine: &Arc<E>,
    subject: &ResidencySubject,
    is_selected: impl Fn(&Function) -> bool,
) -> Result<Option<MisplacedCall>> {
    for call in &subject.calls {
        let part = subject.part(call);
        let Some((program, function)) = part.program().zip(part.function(&call.function)) else { continue };
        if !is_selected(function) {
            continue;
        }
        let projected = project(program, &call.function, call.tokens.unwrap_or(1))?;
        for of_call in &projected.functions {
            let mut predicate = PackagePredicate::new(Residency(engine.clone()))?;
            if let Some(repro) = bisect(of_call, &mut predicate)? {
                let (package, function) = (part.name.clone(), call.function.clone());
                return Ok(Some(MisplacedCall { package, function, tokens: call.tokens, repro }));
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_bundle::Bundle;
    use anec_coreml::plan::Device;
    use anec_testing::fake::{DoubleEngine, convert_demo};

    #[test]
    fn packages_are_searched_as_bundles_are() {
        let room = tempfile::tempdir().unwrap();
        convert_demo(room.path(), &["lengths={fixed: [1, 2]}"]);
        let bundle = Bundle::read(room.path()).unwrap();
        let package = anec_package::open(&room.path().join("layers_3_6.mlpackage")).unwrap();
        let subjects = [
            ResidencySubject::of_bundle(&bundle, room.path()).unwrap(),
            ResidencySubject::of_package("layers_3_6.mlpackage", package),
        ];
        let mut elsewhere = DoubleEngine::new();
        elsewhere.elsewhere.insert("softmax", Device::Cpu);
        let (elsewhere, resident) = (Arc::new(elsewhere), Arc::new(DoubleEngine::new()));
        for (subject, first) in subjects.iter().zip(["layers_0_3.mlpackage", "layers_3_6.mlpackage"]) {
            let found = misplaced_call(&elsewhere, subject, |_| true).unwrap().unwrap();
            assert_eq!((found.package.as_str(), found.function.as_str()), (first, "tokens_1"));
            assert_eq!(found.repro.ops.len(), 1);
            assert_eq!(found.repro.ops[0].operator, "softmax");
            let other = misplaced_call(&elsewhere, subject, |function| function.name == "tokens_2").unwrap().unwrap();
            assert_eq!(other.function, "tokens_2");
            assert!(misplaced_call(&resident, subject, |_| true).unwrap().is_none());
        }
    }
}
