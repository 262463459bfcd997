//! `anec export`

use std::path::PathBuf;

use super::{print, print_json, progress};
use anec::base::Result;
use anec::convert::anemll;

/// Writes a bundle in the layout of other runtimes.
#[derive(Debug, clap::Args)]
pub struct ExportArgs {
    /// Folder of the bundle
    bundle: PathBuf,
    /// The flat folder with meta.yaml that apps made for Anemll's models read
    #[arg(long, value_name = "DIR", required = true)]
    anemll: PathBuf,
    /// Prints the result as JSON
    #[arg(long)]
    json: bool,
}

impl ExportArgs {
    pub(super) fn run(self) -> Result<u8> {
        let exported = anemll::export(&self.bundle, &self.anemll, &progress::bytes())?;
        if exported.compiled.is_empty() {
            eprintln!(
                "note: meta.yaml names compiled models; on a Mac, `xcrun coremlcompiler compile` makes them of the packages"
            );
        }
        if self.json {
            print_json(&exported);
        } else {
            print(&format!(
                "{}: context {}, batch {}, in {}",
                exported.packages.join(", "),
                exported.context,
                exported.batch,
                exported.path.display()
            ));
        }
        Ok(0)
    }
}
