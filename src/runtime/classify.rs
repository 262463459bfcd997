//! Models that look both ways at a text of any length: its tokens in windows, their labels, the spans that those mark.

pub mod bioes;
pub mod redact;
pub mod windows;
