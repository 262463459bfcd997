//! Construction and verification of a package's functions.

use super::emit::Emitter;
use super::error::ConvertError;
use super::plan::PackagePlan;
use anec_base::Result;
use anec_bundle::FunctionEntry;
use anec_family::{FamilyModel, FunctionRequest, LoweringOptions};
use anec_mil::Program;
use anec_mil::verify::verify;

/// Functions of the draft layer in one of the model's packages.
#[derive(Clone, Copy)]
pub struct DraftRequests<'a> {
    /// The draft layer as a model.
    pub model: &'a dyn FamilyModel,
    /// Requested functions.
    pub requests: &'a [FunctionRequest],
}

/// Builds and verifies the functions of one package.
///
/// # Errors
/// If a weight can't be emitted, or the graph violates Core ML's rules.
pub fn build_package(
    model: &dyn FamilyModel,
    form: &LoweringOptions,
    plan: &PackagePlan,
    emitter: &mut Emitter<'_>,
) -> Result<(Program, Vec<FunctionEntry>)> {
    build_shared_package(model, form, plan, None, emitter)
}

/// Builds a package like [`build_package`], followed by functions of the draft layer.
///
/// # Errors
/// Returns any error from [`build_package`].
pub fn build_shared_package(
    model: &dyn FamilyModel,
    form: &LoweringOptions,
    plan: &PackagePlan,
    draft: Option<DraftRequests<'_>>,
    emitter: &mut Emitter<'_>,
) -> Result<(Program, Vec<FunctionEntry>)> {
    let package = format!("{}.mlpackage", plan.name);
    let mut functions = Vec::new();
    let mut entries = Vec::new();
    let own = plan.functions.iter().map(|request| (model, request));
    let draft = draft.into_iter().flat_map(|draft| draft.requests.iter().map(move |request| (draft.model, request)));
    for (model, request) in own.chain(draft) {
        let graph = model.build(form, request, emitter)?;
        emitter.name_after(&graph.function);
        entries.push(FunctionEntry {
            package: package.clone(),
            function: request.name.clone(),
            stage: request.stage.clone(),
            context: request.context,
            tokens: request.tokens,
            inputs: graph.inputs,
            outputs: graph.outputs,
            states: graph.states,
            probes: graph.probes,
            logits: graph.logits,
        });
        functions.push(graph.function);
    }
    let default_function = functions.first().map(|f| f.name.clone()).unwrap_or_default();
    let program = Program { functions, default_function };
    let findings = verify(&program);
    if !findings.is_empty() {
        let findings = findings.iter().map(ToString::to_string).collect();
        return Err(ConvertError::Graph { package, findings }.into());
    }
    Ok((program, entries))
}
