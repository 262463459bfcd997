//! `anec export`

use std::path::PathBuf;

use serde::Serialize;

use super::{print, print_json, progress};
use anec::base::Result;
use anec::convert::{anemll, coreai_llm, hf_swift};
use anec::coreai::lower::LoweringChoices;

/// Export a bundle in the layout of another runtime
#[derive(Debug, clap::Args)]
pub struct ExportArgs {
    /// Bundle folder
    bundle: PathBuf,
    #[command(flatten)]
    layout: Layout,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Layout and output folder.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct Layout {
    /// Write Anemll's layout: a flat folder with meta.yaml
    #[arg(long, value_name = "DIR")]
    anemll: Option<PathBuf>,
    /// Write the layout of Hugging Face's swift-transformers: one package (inputIds, causalMask, keyCache, valueCache,
    /// logits)
    #[arg(long, value_name = "DIR")]
    hf_swift: Option<PathBuf>,
    /// Write the folder of Apple's Core AI engine for language models: an asset, metadata.json, tokenizer
    #[arg(long, value_name = "DIR")]
    coreai_llm: Option<PathBuf>,
}

impl ExportArgs {
    pub(super) fn run(self) -> Result<u8> {
        let bar = progress::bytes();
        match (&self.layout.anemll, &self.layout.hf_swift, &self.layout.coreai_llm) {
            (Some(out), ..) => {
                let done = anemll::export(&self.bundle, out, &bar)?;
                let (names, place) = (done.packages.join(", "), done.path.display());
                let line = format!("{names}: context {}, batch {}, in {place}", done.context, done.batch);
                self.say(&done, &line, !done.compiled.is_empty());
            }
            (None, Some(out), _) => {
                let done = hf_swift::export(&self.bundle, out, &bar)?;
                let line = format!("{}: context {}, in {}", done.package, done.context, done.path.display());
                self.say(&done, &line, done.compiled.is_some());
            }
            (None, None, Some(out)) => {
                let done = coreai_llm::export(&self.bundle, out, LoweringChoices::default(), &bar)?;
                let (context, place) = (done.contexts.last().copied().unwrap_or(0), done.path.display());
                let line = format!("{}: {} functions, context {context}, in {place}", done.asset, done.functions);
                // the system compiles assets when it loads them
                self.say(&done, &line, true);
            }
            // clap requires one
            (None, None, None) => {}
        }
        Ok(0)
    }

    fn say(&self, done: &impl Serialize, line: &str, compiled: bool) {
        if !compiled {
            eprintln!("note: apps load compiled models; compile them on a Mac with `xcrun coremlcompiler compile`");
        }
        if self.json {
            print_json(done);
        } else {
            print(line);
        }
    }
}
