//! The layer that guesses the tokens after the next (multi-token prediction), as a model of its own: of one layer, with the
//! embedding, the rotary tables and the weights of the LM head of the model that it guesses for.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Bundle, FunctionEntry, ModelFacts};

/// The functions of a layer that drafts.
///
/// Its functions of layers take, for each token, the embedding of the token (role `hidden`) and the hidden state of the token
/// before it ([`PreviousHidden`](crate::PortRole::PreviousHidden)); they give a hidden state, of which its functions of the head
/// make the logits of the token that follows. They have a key-value cache of their own, whose position 0 is the text's second token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DraftFunctions {
    /// In the order of a call: the layer, then the head from the first row to the last. Functions of the head are in the
    /// packages of the model's own, with which they have the weights in common.
    pub functions: Vec<FunctionEntry>,
}

impl Bundle {
    /// The layer that drafts, as a bundle of the same packages; none if there is none.
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

    /// Whether a function is the drafting layer's.
    pub fn drafts(&self, entry: &FunctionEntry) -> bool {
        self.draft.as_ref().is_some_and(|draft| draft.functions.contains(entry))
    }

    /// The functions of every package: the model's, then those of the layer that drafts.
    pub fn all_functions(&self) -> impl Iterator<Item = &FunctionEntry> {
        self.functions.iter().chain(self.draft.iter().flat_map(|draft| &draft.functions))
    }
}
