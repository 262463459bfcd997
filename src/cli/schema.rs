//! `anec schema`

use super::print_json;
use anec::advice::ChipTable;
use anec::base::Result;
use anec::bundle;
use anec::convert::report;
use anec::coreml::plan;
use anec::experiment::ProbeReport;
use anec::manifest;
use anec::validate::verdict;

/// Print the JSON Schema of a file that anec reads or writes
#[derive(Debug, clap::Args)]
pub struct SchemaArgs {
    /// File
    file: File,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum File {
    /// Manifest of a conversion
    Manifest,
    /// bundle.json
    Bundle,
    /// A bundle's report.json
    Report,
    /// Output of `anec validate --json`
    Validation,
    /// Compute plan, as written by `anec validate --plan-out`
    Plan,
    /// Output of `anec doctor --probe`
    Probe,
    /// Chip data of `src/advice/tables/chips.yaml`
    Chips,
}

impl SchemaArgs {
    pub(super) fn run(self) -> Result<u8> {
        print_json(&match self.file {
            File::Manifest => manifest::schema(),
            File::Bundle => bundle::schema(),
            File::Report => report::schema(),
            File::Validation => verdict::schema(),
            File::Plan => plan::schema(),
            File::Probe => ProbeReport::schema(),
            File::Chips => ChipTable::schema(),
        });
        Ok(0)
    }
}
