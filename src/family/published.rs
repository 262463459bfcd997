//! Sources of built-in manifests without weights: the published configuration, and the tensors that the model takes.
//! They are enough to plan a conversion.
//!
//! The tensors come from a dry run: the family opens the configuration with a [recording](Ledger::recording) ledger.
//! [`SourceNames::published`](crate::row::SourceNames) decides between alternative layouts of checkpoints.

use super::error::FamilyError;
use super::open::open_recording;
use anec_base::Result;
use anec_manifest::builtin::Builtin;
use anec_source::{Ledger, Source, SourceTensor};
use serde_json::Value as Json;

/// Creates the source of a built-in manifest without its weights: reading a tensor is an error.
///
/// # Errors
/// Returns the errors of [`configuration`] and [`tensors`]; a test opens every built-in manifest.
pub fn published(builtin: &Builtin) -> Result<Source> {
    let config = configuration(builtin)?;
    let tensors = tensors(builtin.source(), &config)?;
    Ok(Source::shapes(builtin.source(), config, tensors)?)
}

/// Parses the published `config.json` of a built-in manifest's model.
///
/// # Errors
/// Returns an error if it isn't JSON.
pub fn configuration(builtin: &Builtin) -> Result<Json> {
    let problem = |error: serde_json::Error| FamilyError::Value {
        place: "the published configuration".into(),
        key: builtin.name.into(),
        found: error.to_string(),
        expected: "JSON".into(),
    };
    Ok(serde_json::from_str(builtin.config).map_err(problem)?)
}

/// Tensors of the checkpoint of a configuration, without their elements; `name` names the source in errors.
///
/// # Errors
/// Returns an error if the configuration isn't understood.
pub fn tensors(name: &str, config: &Json) -> Result<Vec<SourceTensor>> {
    let source = Source::shapes(name, config.clone(), Vec::new())?;
    let mut ledger = Ledger::recording(&source);
    open_recording(&mut ledger)?;
    Ok(ledger.into_recorded())
}

#[cfg(test)]
mod tests {
    use super::*;
    use anec_manifest::builtin;

    #[test]
    fn built_in_manifests_have_shapes_without_weights() {
        for builtin in builtin::all() {
            let source = published(builtin).unwrap();
            assert!(source.tensors().len() > 50, "{}: {} tensors", builtin.name, source.tensors().len());
            let tensor = source.tensors().next().unwrap();
            let error = tensor.read(0, &mut [0.0]).unwrap_err();
            assert!(error.to_string().contains("only its shape"), "{error}");
        }
    }

    #[test]
    fn parameter_counts_equal_those_of_names_and_model_cards() {
        for (name, millions) in [
            // 8,028,033,024
            ("command-r7b", 8028.0),
            // 271,002,624, and the factors of the layers
            ("embeddinggemma-2", 271.0),
            ("ernie-4.5-0.3b", 360.7),
            ("exaone-4-1.2b", 1279.4),
            ("falcon-h1-0.5b", 521.4),
            ("gemma-2b", 2506.2),
            ("gemma-3-270m", 268.1),
            // 25.2 billion
            ("gemma-4-26b-a4b", 25233.1),
            ("granite-3.1-1b-a400m", 1334.6),
            ("granite-3.3-2b", 2533.5),
            ("granite-4.0-h-tiny", 6939.0),
            ("llama-3.2-1b", 1235.8),
            ("ministral-3-3b", 3429.0),
            // as Mistral Small 3
            ("mistral-small-3.1-24b", 23572.4),
            ("olmoe-1b-7b", 6919.2),
            ("phi-2", 2779.7),
            ("phi4-mini", 3836.0),
            // 405,334,016
            ("pythia-410m", 405.3),
            // 14.3 billion
            ("qwen1.5-moe-a2.7b", 14315.8),
            ("qwen2.5-0.5b", 494.0),
            ("qwen3-0.6b", 596.0),
            ("qwen3-30b-a3b", 30532.1),
            ("qwen3-4b", 4022.5),
            ("qwen3-next-80b-a3b", 79674.4),
            // as Qwen3 30B-A3B
            ("qwen3-vl-30b-a3b", 30532.1),
            ("qwen3-vl-4b", 4022.5),
            ("qwen3.5-35b-a3b", 34660.6),
            ("smollm2-1.7b", 1711.4),
            ("smollm3-3b", 3075.1),
            // 1,644,417,024 of the card, and the biases of the layers' norms
            ("stablelm-2-1.6b", 1644.5),
            ("starcoder2-3b", 3030.4),
        ] {
            let source = published(builtin::find(name).unwrap()).unwrap();
            // without the next-token layer
            let own = source.tensors().filter(|tensor| !tensor.name().starts_with("mtp."));
            let parameters: u64 = own.map(SourceTensor::elements).sum();
            assert_eq!((parameters as f64 / 1e5).round() / 10.0, millions, "{name}");
        }
    }
}
