//! Descriptions of the model in Ollama's API.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value as Json, json};

use super::answer::timestamp;
use crate::service::{Service, Thinking};

/// Time for which a model is said to stay in memory; it is never unloaded.
const KEPT: Duration = Duration::from_secs(100 * 365 * 86_400);

/// Returns the entry of a list of models.
pub(super) fn entry(service: &Service) -> Json {
    let bundle = service.model().bundle();
    let name = match service.name.contains(':') {
        true => service.name.clone(),
        false => format!("{}:latest", service.name),
    };
    let digest = bundle.digest().to_string();
    json!({
        "name": name, "model": name, "modified_at": modified_at(service),
        "size": bundle.files().map(|file| file.bytes).sum::<u64>(),
        "digest": digest.rsplit(':').next(), "details": description(service),
    })
}

/// Returns the entry of a list of loaded models.
pub(super) fn running(service: &Service) -> Json {
    let mut entry = entry(service);
    entry["expires_at"] = json!(timestamp(SystemTime::now() + KEPT));
    entry["size_vram"] = entry["size"].clone();
    entry["context_length"] = json!(service.context());
    entry
}

/// Returns what `POST /api/show` says about the model.
pub(super) fn details(service: &Service) -> Json {
    let bundle = service.model().bundle();
    let mut info = json!({"general.architecture": bundle.family});
    for (key, number) in [
        ("context_length", service.context()),
        ("embedding_length", bundle.model.hidden_size),
        ("block_count", bundle.model.num_layers as u64),
        ("vocab_size", bundle.model.vocab_size),
    ] {
        info[format!("{}.{key}", bundle.family)] = json!(number);
    }
    json!({
        "modelfile": format!("FROM {}\n", service.name), "parameters": "", "license": "",
        "template": service.template_source().unwrap_or_default(),
        "details": description(service), "model_info": info, "capabilities": capabilities(service),
        "modified_at": modified_at(service),
    })
}

fn description(service: &Service) -> Json {
    let bundle = service.model().bundle();
    let weights = json!(bundle.manifest)["quant"]["weights"].take();
    json!({
        "parent_model": "", "format": "anec", "family": bundle.family, "families": [bundle.family],
        "parameter_size": "", "quantization_level": weights.as_str().unwrap_or_default(),
    })
}

fn capabilities(service: &Service) -> Vec<&'static str> {
    let model = service.model();
    let capabilities = [
        ("completion", model.continues_texts().is_ok()),
        ("tools", service.calls_functions()),
        ("insert", service.inserts_texts()),
        ("thinking", service.thinking() != Thinking::Never),
        ("embedding", model.bundle().model.embedding().is_some()),
    ];
    capabilities.into_iter().filter(|(_, has)| *has).map(|(name, _)| name).collect()
}

/// Returns the time of the bundle's last change.
fn modified_at(service: &Service) -> String {
    let file = service.model().folder().join("bundle.json");
    let modified = std::fs::metadata(file).and_then(|metadata| metadata.modified());
    timestamp(modified.unwrap_or(UNIX_EPOCH + Duration::from_secs(service.created)))
}
