//! `anec schema`

use super::print_json;
use crate::convert::{bundle, report};
use crate::coreml::plan;
use crate::error::Result;
use crate::manifest;
use crate::validate::verdict;

/// Prints the JSON Schema of a file that anec reads or writes.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Which file
    file: File,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum File {
    /// The manifest of a conversion
    Manifest,
    /// bundle.json
    Bundle,
    /// report.json of a bundle
    Report,
    /// What `anec validate --json` writes
    Validation,
    /// A compute plan, which `anec validate --plan-out` writes
    Plan,
}

impl Args {
    pub(super) fn run(self) -> Result<u8> {
        print_json(&match self.file {
            File::Manifest => manifest::schema(),
            File::Bundle => bundle::schema(),
            File::Report => report::schema(),
            File::Validation => verdict::schema(),
            File::Plan => plan::schema(),
        });
        Ok(0)
    }
}
