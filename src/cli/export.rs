//! `anec export`

use std::path::PathBuf;

use serde::Serialize;

use super::{print, print_json, progress};
use anec::base::Result;
use anec::convert::{anemll, hf_swift};

/// Writes a bundle in the layout of other runtimes.
#[derive(Debug, clap::Args)]
pub struct ExportArgs {
    /// Folder of the bundle
    bundle: PathBuf,
    #[command(flatten)]
    layout: Layout,
    /// Prints the result as JSON
    #[arg(long)]
    json: bool,
}

/// Which layout, and where.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct Layout {
    /// The flat folder with meta.yaml that apps made for Anemll's models read
    #[arg(long, value_name = "DIR")]
    anemll: Option<PathBuf>,
    /// A folder with the one package that Hugging Face's swift-transformers runs: inputIds, causalMask, keyCache, valueCache, logits
    #[arg(long, value_name = "DIR")]
    hf_swift: Option<PathBuf>,
}

impl ExportArgs {
    pub(super) fn run(self) -> Result<u8> {
        let bar = progress::bytes();
        match (&self.layout.anemll, &self.layout.hf_swift) {
            (Some(out), _) => {
                let done = anemll::export(&self.bundle, out, &bar)?;
                let (names, place) = (done.packages.join(", "), done.path.display());
                let line = format!("{names}: context {}, batch {}, in {place}", done.context, done.batch);
                self.say(&done, &line, !done.compiled.is_empty());
            }
            (None, Some(out)) => {
                let done = hf_swift::export(&self.bundle, out, &bar)?;
                let line = format!("{}: context {}, in {}", done.package, done.context, done.path.display());
                self.say(&done, &line, done.compiled.is_some());
            }
            // clap asks for one
            (None, None) => {}
        }
        Ok(0)
    }

    fn say(&self, done: &impl Serialize, line: &str, compiled: bool) {
        if !compiled {
            eprintln!(
                "note: apps load compiled models; on a Mac, `xcrun coremlcompiler compile` makes them of the packages"
            );
        }
        if self.json {
            print_json(done);
        } else {
            print(line);
        }
    }
}
