//! The layer that drafts tokens (multi-token prediction), as a one-layer model that shares the embedding, rotary tables
//! and LM head weights of its main model.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Bundle, FunctionEntry, ModelFacts};

/// Functions of the layer that drafts.
///
/// For each token, functions of the layer take the token's embedding (role `hidden`) and the hidden state of the
/// previous token ([`PreviousHidden`](crate::PortRole::PreviousHidden)). They return a hidden state, from which the
/// head computes the logits of the token after the next. The layer has its own KV cache, whose position 0 is the text's
/// second token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DraftFunctions {
    /// Functions in the order of a call: the layer, then the head from first to last row. Functions of the head are in
    /// the packages of the main model's head and share its weights.
    pub functions: Vec<FunctionEntry>,
}

impl Bundle {
    /// Returns the layer that drafts as a bundle of the same packages; `None` if there is none.
    pub fn draft_bundle(&self) -> Option<Bundle> {
        let functions = self.draft.as_ref()?.functions.clone();
        let uses = |package: &str| functions.iter().any(|entry| entry.package == package);
        let mut config = self.config.clone();
        if let Some(layers) = config.get_mut("num_hidden_layers") {
            *layers = 1.into();
        }
        Some(Bundle {
            model: ModelFacts { num_layers: 1, ..self.model.clone() },
            config,
            packages: self.packages.iter().filter(|entry| uses(&entry.package)).cloned().collect(),
            functions,
            draft: None,
            ..self.clone()
        })
    }

    /// Whether a function belongs to the layer that drafts.
    pub fn drafts(&self, entry: &FunctionEntry) -> bool {
        self.draft.as_ref().is_some_and(|draft| draft.functions.contains(entry))
    }

    /// Functions of all packages: the model's, then those of the layer that drafts.
    pub fn all_functions(&self) -> impl Iterator<Item = &FunctionEntry> {
        self.functions.iter().chain(self.draft.iter().flat_map(|draft| &draft.functions))
    }
}
