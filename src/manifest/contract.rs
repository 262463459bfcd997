//! Contracts: forms that another runtime prescribes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json, json};

use super::error::ManifestError;
use super::{Contexts, Lengths, Manifest, StateForm};

/// A runtime whose calls a bundle is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, strum::Display)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Contract {
    /// Apple's engine for language models of fixed shapes in Core AI; `anec export --coreai-llm` writes its folder.
    CoreaiLlm,
}

/// Smallest context of Apple's engine.
const LEAST_CONTEXT: u64 = 256;

impl Contract {
    /// Numbers of tokens per call.
    pub const fn queries(self) -> [u64; 3] {
        match self {
            Contract::CoreaiLlm => [8, 16, 64],
        }
    }

    /// Contexts from the smallest one to the first that holds `tokens`, each twice the one before.
    pub fn contexts(self, tokens: u64) -> Vec<u64> {
        let mut contexts = vec![LEAST_CONTEXT];
        while let Some(last) = contexts.last().filter(|last| **last < tokens) {
            contexts.push(last.saturating_mul(2));
        }
        contexts
    }

    /// Adds the keys that the contract prescribes to a manifest that doesn't have them. A single context becomes all
    /// contexts up to it.
    pub(super) fn complete(self, keys: &mut Map<String, Json>, context: &Contexts) {
        if let Contexts::One(tokens) = context {
            let ladder = self.contexts(*tokens);
            if ladder.last() == Some(tokens) {
                keys.insert("context".into(), json!(ladder));
            }
        }
        keys.entry("lengths").or_insert_with(|| json!({"fixed": self.queries()}));
        keys.entry("state").or_insert_with(|| json!("host"));
    }

    /// Checks that the manifest has the prescribed forms.
    pub(super) fn check(self, manifest: &Manifest) -> Result<(), ManifestError> {
        let wrong = |key: &str, found: String, expected: String| {
            let problem = format!("{found}, but `contract: {self}` needs {expected}");
            Err(ManifestError::value(key, problem).advise(format!("leave `{key}` out, or use {expected}")))
        };
        if !manifest.format.is_coreml() {
            let problem = format!("`coreai` leaves no packages that `contract: {self}` is exported from");
            return Err(ManifestError::value("format", problem).advise("leave `format` out"));
        }
        if manifest.state != StateForm::Host {
            return wrong("state", "caches that a function keeps".into(), "`state: host`".into());
        }
        let queries = self.queries();
        if !matches!(&manifest.lengths, Lengths::Fixed(sizes) if sorted(sizes) == queries) {
            return wrong(
                "lengths",
                "other numbers of tokens per call".into(),
                format!("`lengths: {{ fixed: {queries:?} }}`"),
            );
        }
        let contexts = manifest.context.all();
        let largest = contexts.last().copied().unwrap_or(0);
        let ladder = self.contexts(largest);
        if contexts != ladder {
            let expected = match ladder.last() {
                Some(last) if *last != largest => format!("`context: {last}`, or another one of 256 * 2^k"),
                _ => format!("`context: {ladder:?}`"),
            };
            return wrong("context", format!("{contexts:?}"), expected);
        }
        Ok(())
    }
}

fn sorted(sizes: &[u64]) -> Vec<u64> {
    let mut sizes = sizes.to_vec();
    sizes.sort_unstable();
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_contract_fills_in_its_forms() {
        let set = |given: &[&str]| {
            let given: Vec<String> = given.iter().map(|set| (*set).to_owned()).collect();
            Manifest::from_yaml("contract: coreai-llm", "test.yaml", &given)
        };
        let manifest = set(&["context=1024"]).unwrap();
        assert_eq!(manifest.context.all(), [256, 512, 1024]);
        assert_eq!((manifest.state, &manifest.lengths), (StateForm::Host, &Lengths::Fixed(vec![8, 16, 64])));
        assert_eq!(Manifest::from_yaml(&manifest.to_yaml(), "again", &[]).unwrap(), manifest);
        for (given, key, word) in [
            ("context=384", "context", "`context: 512`"),
            ("context=[512]", "context", "`context: [256, 512]`"),
            ("state=unified", "state", "`state: host`"),
            ("lengths.range=[1, 4]", "lengths", "[8, 16, 64]"),
            ("format=coreai", "format", "no packages"),
        ] {
            let error = set(&[given]).unwrap_err();
            let ManifestError::Value { key: found, problem, .. } = &error else { panic!("{given}: {error}") };
            assert!(found == key && problem.contains(word), "{given}: {error}");
        }
    }
}
