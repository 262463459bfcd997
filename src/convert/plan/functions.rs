//! The functions of packages.

use anec_bundle::{Stage, TokenCount};
use anec_family::FunctionRequest;
use anec_manifest::{HeadOutputs, Lengths};

/// Functions of packages.
pub(super) struct Functions<'a> {
    pub lengths: &'a Lengths,
    pub contexts: &'a [u64],
    pub head: HeadOutputs,
    /// Most calls have as many tokens as a function takes.
    pub whole_texts: bool,
    /// Whether caches have a slot for every token of the context, in layers with a window, too.
    pub whole_caches: bool,
}

impl Functions<'_> {
    /// Minimum number of tokens of any call.
    pub fn fewest_tokens(&self) -> u64 {
        match self.lengths {
            Lengths::Range([lower, _]) => *lower,
            Lengths::Fixed(sizes) => sizes.iter().copied().min().unwrap_or(1),
        }
    }

    /// Maximum number of tokens of any call.
    pub fn most_tokens(&self) -> u64 {
        match self.lengths {
            Lengths::Range([_, upper]) => *upper,
            Lengths::Fixed(sizes) => sizes.iter().copied().max().unwrap_or(1),
        }
    }

    /// Number of tokens of a call that a layer's cache must hold besides its window.
    pub fn most_cached(&self, context: u64) -> u64 {
        if self.whole_caches { context } else { self.most_tokens() }
    }

    /// Functions of a stage: one for each number of tokens and, for layers, each context. Feed-forward networks,
    /// experts and the LM head don't depend on the context; their functions name the largest one.
    pub fn of(&self, stage: &Stage) -> Vec<FunctionRequest> {
        let largest = self.contexts.last().copied().unwrap_or(1);
        let sees_context = stage.whole_layers().is_some();
        let contexts = if sees_context { self.contexts } else { std::slice::from_ref(&largest) };
        let tokens: Vec<TokenCount> = match self.lengths {
            Lengths::Range([lower, upper]) => vec![TokenCount::Range(*lower, *upper)],
            Lengths::Fixed(sizes) => {
                let mut sizes = sizes.clone();
                sizes.sort_unstable();
                sizes.into_iter().map(TokenCount::Fixed).collect()
            }
        };
        let single = contexts.len() == 1 && tokens.len() == 1;
        let name = |context: u64, tokens: TokenCount| match tokens {
            _ if single => "main".to_owned(),
            TokenCount::Fixed(t) if contexts.len() == 1 => format!("tokens_{t}"),
            TokenCount::Fixed(t) => format!("context_{context}_tokens_{t}"),
            TokenCount::Range(..) => format!("context_{context}"),
        };
        contexts
            .iter()
            .flat_map(|context| tokens.iter().map(move |tokens| (*context, *tokens)))
            .map(|(context, tokens)| FunctionRequest {
                name: name(context, tokens),
                stage: stage.clone(),
                tokens,
                // most calls of a decoder have one token, those of a classifier a whole window
                default_tokens: if self.whole_texts { tokens.most() } else { tokens.least() },
                context,
                most_tokens: self.most_cached(context),
                head: self.head,
            })
            .collect()
    }
}
