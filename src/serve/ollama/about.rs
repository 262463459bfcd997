//! Descriptions of the model in Ollama's API.

use std::time::{Duration, SystemTime};

use serde_json::{Value as Json, json};

use super::answer::timestamp;
use crate::facts::Facts;
use crate::models::ModelStatus;
use anec_bundle::Bundle;

/// Time for which a model that is never unloaded is said to stay in memory.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 86_400);

/// Returns the entry of a list of models.
pub(super) fn entry(facts: &Facts) -> Json {
    let Facts { name, bundle, .. } = facts;
    let name = if name.contains(':') { name.clone() } else { format!("{name}:latest") };
    let digest = bundle.digest().to_string();
    json!({
        "name": name, "model": name, "modified_at": timestamp(facts.modified),
        "size": bundle.files().map(|file| file.bytes).sum::<u64>(),
        "digest": digest.rsplit(':').next(), "details": description(bundle),
    })
}

/// Returns the entry of a list of loaded models, if the model is loaded.
pub(super) fn running(model: &ModelStatus<'_>) -> Option<Json> {
    model.service.as_ref()?;
    let mut entry = entry(model.facts);
    entry["expires_at"] = json!(timestamp(SystemTime::now() + model.expires.unwrap_or(FOREVER).min(FOREVER)));
    entry["size_vram"] = entry["size"].clone();
    entry["context_length"] = json!(model.facts.context);
    Some(entry)
}

/// Returns what `POST /api/show` says about the model.
pub(super) fn details(facts: &Facts) -> Json {
    let bundle = &facts.bundle;
    let mut info = json!({"general.architecture": bundle.family});
    for (key, number) in [
        ("context_length", facts.context),
        ("embedding_length", bundle.model.hidden_size),
        ("block_count", bundle.model.num_layers as u64),
        ("vocab_size", bundle.model.vocab_size),
    ] {
        info[format!("{}.{key}", bundle.family)] = json!(number);
    }
    json!({
        "modelfile": format!("FROM {}\n", facts.name), "parameters": "", "license": "",
        "template": facts.template.as_deref().unwrap_or_default(),
        "details": description(bundle), "model_info": info, "capabilities": facts.capabilities,
        "modified_at": timestamp(facts.modified),
    })
}

fn description(bundle: &Bundle) -> Json {
    let weights = json!(bundle.manifest)["quant"]["weights"].take();
    json!({
        "parent_model": "", "format": "anec", "family": bundle.family, "families": [bundle.family],
        "parameter_size": "", "quantization_level": weights.as_str().unwrap_or_default(),
    })
}
