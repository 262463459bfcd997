//! Token classification of texts of any length: windows, labels, spans.

pub mod bioes;
pub mod redact;
pub mod windows;
