//! `anec convert`

use std::path::PathBuf;

use serde_json::json;

use super::input::Input;
use super::plan::targets;
use super::{print, print_json, progress};
use anec::Converter;
use anec::advice::search::{ChoiceReason, SearchLimits, search};
use anec::base::Result;
use anec::convert::Outcome;
use anec::convert::open::{open, resolve};
use anec::report;

/// Converts weights into a bundle of Core ML packages.
///
/// An interrupted conversion goes on where it was when the same command is given again.
#[derive(Debug, clap::Args)]
pub struct ConvertArgs {
    #[command(flatten)]
    input: Input,
    /// Folder of the bundle; NAME.anec in the current folder if not given
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Searches for the manifest that takes least time on these chips, by the prediction, and converts with it: m4-max,a17-pro
    /// (`anec plan --search` has more to say)
    #[arg(long = "for", value_name = "CHIP", value_delimiter = ',')]
    targets: Vec<String>,
    /// Threads; one for each core if not given
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    jobs: Option<u16>,
    /// Replaces a bundle of other inputs, and starts an interrupted conversion anew
    #[arg(long)]
    force: bool,
    /// Leaves compilation to `anec compile`
    #[arg(long)]
    no_compile: bool,
    /// Prints the result as JSON
    #[arg(long)]
    json: bool,
}

impl ConvertArgs {
    pub(super) fn run(self) -> Result<u8> {
        if let Some(jobs) = self.jobs {
            // fails only where the pool was made before, which nothing here does
            let _ = rayon::ThreadPoolBuilder::new().num_threads(usize::from(jobs)).build_global();
        }
        let mut manifest = self.input.manifest()?;
        if !self.targets.is_empty() {
            let opened = open(&manifest)?;
            let asked = resolve(&manifest, &opened.source, &*opened.model);
            let found = search(&asked, &*opened.model, &targets(&self.targets)?, &SearchLimits::default())?;
            for ChoiceReason { key, reason } in &found.reasons {
                eprintln!("{key}: {reason}");
            }
            manifest = found.manifest;
        }
        let mut converter =
            Converter::new(manifest).force(self.force).compile(!self.no_compile).progress(progress::bytes());
        if let Some(out) = self.out {
            converter = converter.out(out);
        }
        match converter.convert()? {
            Outcome::UpToDate(path) if self.json => {
                print_json(&json!({"status": "up_to_date", "path": path}));
            }
            Outcome::UpToDate(path) => print(&format!("{} is up to date", path.display())),
            Outcome::Written(written) => {
                for note in &written.report.notes {
                    eprintln!("note: {}", super::visible(note));
                }
                if self.json {
                    print_json(&json!({
                        "status": "written",
                        "path": written.path,
                        "notes": written.report.notes,
                        "report": written.report,
                    }));
                } else {
                    print(&report::conversion(&written.path, &written.bundle, &written.report));
                }
            }
        }
        Ok(0)
    }
}
