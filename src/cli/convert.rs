//! `anec convert`

use std::path::{Path, PathBuf};

use anec::base::FileError;

use serde_json::json;

use super::golden::unquantized;
use super::input::Input;
use super::{print, print_json};
use anec::base::Result;
use anec::base::progress::Progress;
use anec::convert::{Options, Outcome, convert};
use anec::manifest::{Manifest, Numerics, Quant, ResidualScale, WeightFormat};
use anec::report;
use anec::validate::numerics::residual_scale;
use anec::validate::prompts;

/// Converts weights into a bundle of Core ML packages.
///
/// An interrupted conversion goes on where it was when the same command is given again.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    input: Input,
    /// Folder of the bundle; NAME.anec in the current folder if not given
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,
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

/// Tokens that the residual stream is measured on.
const POSITIONS: usize = 256;

/// The residual scale that a model needs: its weights, not quantized, run in f32 over anec's own text. They go through a
/// bundle beside the real one, which is removed afterwards.
fn measured_scale(manifest: &Manifest, out: Option<&Path>) -> Result<f32> {
    let beside = out.and_then(Path::parent).filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = tempfile::Builder::new()
        .prefix(".anec-scale-")
        .tempdir_in(beside)
        .map_err(FileError::of(beside, "create a folder in"))?;
    let mut manifest = manifest.clone();
    manifest.quant = Quant { weights: WeightFormat::None, overrides: Default::default(), ..manifest.quant.clone() };
    manifest.numerics = Numerics { scale: Some(ResidualScale::Factor(1.0)) };
    let bundle = folder.path().join("bundle");
    let model = unquantized(&manifest, &bundle)?;
    let tokens = prompts::tokens(model.bundle(), &bundle, POSITIONS)?;
    let scale = residual_scale(model.bundle(), &bundle, &tokens)?;
    eprintln!(
        "note: numerics.scale is {scale}: what the residual stream reaches on {} tokens asks for it",
        tokens.len()
    );
    Ok(scale)
}

impl Args {
    pub(super) fn run(self) -> Result<u8> {
        if let Some(jobs) = self.jobs {
            // fails only where the pool was made before, which nothing here does
            let _ = rayon::ThreadPoolBuilder::new().num_threads(usize::from(jobs)).build_global();
        }
        let mut manifest = self.input.manifest()?;
        if manifest.numerics.scale == Some(ResidualScale::Auto) {
            manifest.numerics.scale = Some(ResidualScale::Factor(measured_scale(&manifest, self.out.as_deref())?));
        }
        let options = Options {
            manifest,
            out: self.out,
            force: self.force,
            compile: !self.no_compile,
            progress: Progress::on_stderr(),
        };
        match convert(&options)? {
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
