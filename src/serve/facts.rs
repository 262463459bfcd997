//! Facts about a model, known while it isn't loaded.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::service::{Service, Thinking};
use anec_bundle::Bundle;

/// Facts about a model.
pub(super) struct Facts {
    /// Name under which clients know the model.
    pub name: String,
    /// Device that runs the model.
    pub device: String,
    /// Size of the context in tokens.
    pub context: u64,
    /// Time at which the server learned of the model, in seconds since 1970.
    pub created: u64,
    /// Time of the bundle's last change.
    pub modified: SystemTime,
    /// Bundle of the model.
    pub bundle: Bundle,
    /// Source of the chat template.
    pub template: Option<String>,
    /// Capabilities in Ollama's words.
    pub capabilities: Vec<&'static str>,
}

impl Facts {
    /// Returns the facts about an opened model.
    pub(super) fn of(service: &Service) -> Self {
        let (model, created) = (service.model(), anec_base::clock::now());
        let file = model.folder().join(anec_bundle::FILE_NAME);
        let modified = std::fs::metadata(file).and_then(|metadata| metadata.modified());
        let capabilities = [
            ("completion", model.continues_texts().is_ok()),
            ("tools", service.calls_functions()),
            ("insert", service.inserts_texts()),
            ("thinking", service.thinking() != Thinking::Never),
            ("embedding", model.bundle().model.embedding().is_some()),
        ];
        Facts {
            name: service.name.clone(),
            device: service.device.clone(),
            context: service.context(),
            created,
            modified: modified.unwrap_or(UNIX_EPOCH + Duration::from_secs(created)),
            bundle: model.bundle().clone(),
            template: service.template_source().map(str::to_owned),
            capabilities: capabilities.into_iter().filter(|(_, has)| *has).map(|(name, _)| name).collect(),
        }
    }
}
