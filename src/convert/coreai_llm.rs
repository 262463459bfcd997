//! Export of a bundle as a folder that `CoreAILanguageModel(resourcesAt:)` of Apple's coreai-models takes: one asset
//! whose functions have the signatures of Apple's exporter for the Neural Engine, `metadata.json`, and the tokenizer.
//!
//! ```text
//! load_embeddings()                      -> the embedding in int8, one scale
//! gather_embeddings_Q(ids, table)        -> x = scale * table[ids]
//! extend_C_Q(x, positions, step, mask)   -> head(layers(x, rope[positions], mask, caches[.., ..step]))
//! prompt_opt_C_Q(…)                      -> nothing but the caches
//!     caches[.., step..step + Q] = keys and values of the call, of all layers
//! ```
//!
//! Q is a number of tokens per call, C a context. The functions are those of a bundle with `contract: coreai-llm`,
//! whose caches the host keeps; here the asset takes the role of the host. The signatures and the layout of the shared
//! memory are in `contract`, the graphs in `functions`. Source: apple/coreai-models at 86b363d, its exporter and
//! its engine for fixed shapes.

mod contract;
mod functions;

use std::path::{Path, PathBuf};

use anec_base::{Progress, Result};
use anec_bundle::{Bundle, FunctionEntry, Port, PortRole, Stage, StateRole, Task, TokenCount};
use anec_coreai::aicode::AiModule;
use anec_coreai::lower::{LoweringChoices, LoweringPlan};
use anec_coreai::{AssetMetadata, AssetOptions};
use anec_manifest::Contract;
use anec_package::blob::WriteProgress;
use serde_json::json;

use super::exported::{ExportError, ExportedBundle, into_new_folder, read};
use super::files;
use super::open::name_of;
use contract::Dimensions;

/// Exported folder.
#[derive(Clone, Debug, serde::Serialize)]
pub struct CoreAiLlmExport {
    /// Output folder.
    pub path: PathBuf,
    /// Asset name.
    pub asset: String,
    /// Context lengths in tokens, ascending.
    pub contexts: Vec<u64>,
    /// Number of functions.
    pub functions: usize,
}

/// Exports a bundle with the tokenizer's files into a new or empty folder.
///
/// # Errors
/// If the contract can't hold the bundle's form, or a file can't be written.
pub fn export(folder: &Path, out: &Path, choices: LoweringChoices, progress: &Progress) -> Result<CoreAiLlmExport> {
    let bundle = read(folder)?;
    let model = EngineModel::of(folder, &bundle, choices)?;
    let asset = format!("{}.aimodel", name_of(&bundle.name));
    let functions = into_new_folder(out, |room| model.write(room, &asset, choices, progress))?;
    progress.finish();
    Ok(CoreAiLlmExport { path: out.to_owned(), asset, contexts: bundle.model.contexts, functions })
}

/// Parts of a bundle that the asset consists of.
struct EngineModel<'a> {
    bundle: &'a Bundle,
    exported: ExportedBundle<'a>,
    dimensions: Dimensions,
}

impl<'a> EngineModel<'a> {
    fn of(folder: &'a Path, bundle: &'a Bundle, choices: LoweringChoices) -> Result<Self> {
        let wrong = |problem: String, help: &str| ExportError { path: folder.to_owned(), problem, help: help.into() };
        if bundle.model.task != Task::TextGeneration {
            let problem = "the bundle doesn't generate text, which Apple's engine requires".into();
            return Err(wrong(problem, "choose a model that generates text").into());
        }
        if bundle.manifest.contract != Some(Contract::CoreaiLlm) {
            let problem = "its functions aren't those that Apple's engine calls".into();
            return Err(wrong(problem, "convert it again with `contract: coreai-llm`").into());
        }
        let dense = "Apple's engine has no place for it: use `format: coreai` without a contract, which takes models \
                     with experts, recurrent states and shared keys";
        for entry in &bundle.functions {
            if let Some(part) = entry.inputs.iter().find_map(unknown_part) {
                let problem = format!("`{}` of {} needs {part}", entry.function, entry.package);
                return Err(wrong(problem, dense).into());
            }
        }
        let shapes: Vec<Vec<u64>> = bundle.functions.iter().flat_map(caches_of).collect();
        let [_, heads, _, head_dim] =
            shapes.first().and_then(|shape| shape.first_chunk::<4>()).copied().unwrap_or([0; 4]);
        let alike = shapes.iter().all(|shape| (shape[1], shape[3]) == (heads, head_dim));
        let largest = bundle.model.contexts.last().copied().unwrap_or(0);
        let layers = bundle.model.num_layers;
        let of_largest = bundle.functions.iter().filter(|entry| entry.context == largest);
        // one function for each number of tokens
        let count = of_largest.flat_map(caches_of).filter(|shape| shape[2] == largest).count();
        if heads == 0 || !alike || count != 2 * layers * contract::QUERIES.len() {
            let problem = "its layers have no caches, or caches of several shapes, expected two alike in every layer";
            return Err(wrong(problem.into(), dense).into());
        }
        let dimensions = Dimensions {
            layers: layers as u64,
            heads,
            head_dim,
            hidden_size: bundle.model.hidden_size,
            vocab_size: bundle.model.vocab_size,
            context: largest,
        };
        if let Some((problem, help)) = dimensions.problem(choices.plain_memory) {
            return Err(wrong(problem, &help).into());
        }
        let exported = ExportedBundle::open(folder, bundle, largest, &bundle.functions)?;
        Ok(EngineModel { bundle, exported, dimensions })
    }

    /// Functions of the layers for a context, or of the LM head, for a number of tokens.
    fn entries(&self, context: Option<u64>, tokens: u64) -> impl Iterator<Item = &'a FunctionEntry> {
        let is_of = move |entry: &&FunctionEntry| match (&entry.stage, context) {
            (Stage::Head { .. }, of) => of.is_none(),
            (Stage::FeedForward { .. }, of) => of.is_some(),
            (_, of) => of == Some(entry.context),
        };
        self.bundle.functions.iter().filter(is_of).filter(move |entry| entry.tokens == TokenCount::Fixed(tokens))
    }

    /// Builds all functions as one module.
    fn module(&self, choices: LoweringChoices) -> Result<(AiModule, usize)> {
        let mut plan = LoweringPlan::new(choices);
        for (name, constraints) in self.dimensions.memory() {
            plan.constrain(name, constraints);
        }
        let mut count = 0;
        self.each_function(|function| {
            plan.try_add(&function.name, &function);
            count += 1;
        })?;
        plan.check()?;
        Ok((plan.finish(), count))
    }

    /// Writes all files into a folder; returns the number of functions.
    fn write(&self, folder: &Path, asset: &str, choices: LoweringChoices, progress: &Progress) -> Result<usize> {
        let bundle = self.bundle;
        let weights: u64 = bundle.packages.iter().map(|package| package.weight_bytes).sum();
        progress.expect(weights + bundle.model.vocab_size * bundle.model.hidden_size);
        progress.stage(asset);
        let (module, functions) = self.module(choices)?;
        let told = |step| match step {
            WriteProgress::Prepared(_) => {}
            WriteProgress::Written(bytes) => progress.add(bytes),
        };
        let mut options = AssetOptions::default();
        options.progress = Some(&told);
        options.metadata = AssetMetadata { description: bundle.name.clone(), ..Default::default() };
        anec_coreai::write(&module, &folder.join(asset), &options)?;
        files::write_json(&folder.join("metadata.json"), &self.metadata(asset))?;
        let tokenizer = folder.join("tokenizer");
        std::fs::create_dir(&tokenizer).map_err(anec_base::FileError::of(&tokenizer, "create"))?;
        self.exported.write_tokenizer(&tokenizer)?;
        Ok(functions)
    }

    /// Description of the folder, version 0.2.
    fn metadata(&self, asset: &str) -> serde_json::Value {
        let bundle = self.bundle;
        let source = bundle.manifest.source.as_deref().and_then(|source| source.strip_prefix("hf:"));
        let on_hub = source.map_or(bundle.name.as_str(), |source| source.split('@').next().unwrap_or(source));
        json!({
            "metadata_version": "0.2",
            "kind": "llm",
            "name": bundle.name,
            "assets": {"main": asset},
            "language": {
                "tokenizer": on_hub,
                "vocab_size": bundle.model.vocab_size,
                "max_context_length": self.dimensions.context,
                "embedded_tokenizer": true,
            },
            "source": {"model_definition": "anec", "hf_model_id": on_hub},
        })
    }
}

/// Part of a model that needs an input, if Apple's engine doesn't have it.
fn unknown_part(port: &Port) -> Option<&'static str> {
    match &port.role {
        PortRole::Hidden | PortRole::RopeCos { .. } | PortRole::RopeSin { .. } => None,
        PortRole::PastMask { .. } | PortRole::CallMask { .. } => None,
        PortRole::Cache { holds: StateRole::KeyCache { .. } | StateRole::ValueCache { .. }, .. } => None,
        PortRole::ExpertInput | PortRole::ExpertShares => Some("experts in functions of their own"),
        PortRole::SharedKeys { .. } | PortRole::SharedValues { .. } => Some("keys that layers share"),
        PortRole::Embedding | PortRole::PerLayerInput { .. } => Some("embeddings for each layer"),
        PortRole::State { .. } | PortRole::TokenOrder => Some("a recurrent state"),
        _ => Some("an input that Apple's engine doesn't provide"),
    }
}

/// Shapes of the caches that a function takes.
fn caches_of(entry: &FunctionEntry) -> impl Iterator<Item = Vec<u64>> + '_ {
    let caches = entry.inputs.iter().filter(|port| matches!(port.role, PortRole::Cache { .. }));
    caches.map(|port| port.shape_at(1))
}
