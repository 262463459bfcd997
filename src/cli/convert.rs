//! `anec convert`

use std::path::PathBuf;

use serde_json::json;

use super::input::Input;
use super::plan::targets;
use super::{doubts, gain, print, print_json, progress};
use anec::Converter;
use anec::advice::search::{ChoiceReason, SearchLimits, search};
use anec::base::Result;
use anec::convert::Outcome;
use anec::convert::open::{open, resolve};
use anec::report;

/// Convert a model to Core ML packages
///
/// Repeat the same command to resume an interrupted conversion.
#[derive(Debug, clap::Args)]
pub struct ConvertArgs {
    #[command(flatten)]
    input: Input,
    /// Bundle folder [default: NAME.anec in the current folder]
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Search the manifest with the least predicted time per token on these chips, and convert with it: m4-max,a17-pro
    #[arg(long = "for", value_name = "CHIP", value_delimiter = ',')]
    targets: Vec<String>,
    /// Replace a bundle of other inputs, and restart an interrupted conversion
    #[arg(long)]
    force: bool,
    /// Skip compilation (`anec compile` does it later)
    #[arg(long)]
    no_compile: bool,
    /// Skip comparing the result with the source's own weights, and the choice of `quant.feedback` by it
    #[arg(long)]
    no_measure: bool,
    /// Show every package
    #[arg(long, conflicts_with = "json")]
    details: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

impl ConvertArgs {
    pub(super) fn run(self) -> Result<u8> {
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
        let mut converter = Converter::new(manifest.clone())
            .force(self.force)
            .compile(!self.no_compile)
            .measure(!self.no_measure)
            .progress(progress::bytes());
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
                    let show = if self.details { report::conversion } else { report::conversion_summary };
                    print(&show(&written.path, &written.bundle, &written.report));
                    if let Some(note) = doubts::note(&written.path, &written.bundle, &targets(&self.targets)?) {
                        eprintln!("note: {note}");
                    }
                    if let Ok(Some(note)) = gain::note_of(&manifest) {
                        eprintln!("note: {note}");
                    }
                }
            }
        }
        Ok(0)
    }
}
