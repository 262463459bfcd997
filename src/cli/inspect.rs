//! `anec inspect`

use std::path::PathBuf;

use super::usage::UsageError;
use super::{demo_model, print, print_json, progress};
use anec::advice::forecast_asset;
use anec::base::Result;
use anec::bundle::{self, Bundle};
use anec::coreai;
use anec::family::published::published;
use anec::manifest::builtin;
use anec::mil::verify::verify;
use anec::package;
use anec::report::inspection;
use anec::source::Source;

/// Show the contents of a source (.gguf, .safetensors, .onnx, a folder), a package (.mlpackage, .mlmodel), an asset of
/// Core AI (.aimodel) or a bundle
#[derive(Debug, clap::Args)]
pub struct InspectArgs {
    /// Path, hf:owner/name, or a built-in manifest for the shapes of its model
    path: String,
    /// Print a package's program as MIL text
    #[arg(long, conflicts_with = "json")]
    mil: bool,
    /// List every tensor of a source
    #[arg(long)]
    all: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Kind of input.
enum Kind {
    Asset,
    Bundle,
    Package,
    Source,
}

impl InspectArgs {
    pub(super) fn run(self) -> Result<u8> {
        let path = PathBuf::from(&self.path);
        match self.kind() {
            Kind::Bundle => {
                let bundle = Bundle::read(&path)?;
                self.no_program("a bundle")?;
                if self.json {
                    print_json(&bundle);
                } else {
                    print(&inspection::bundle(&bundle));
                }
            }
            Kind::Asset => {
                self.no_program("an asset of Core AI")?;
                let inventory = coreai::open(&path)?.inventory();
                let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
                let rules = forecast_asset(&name, &inventory, &[]);
                if self.json {
                    print_json(&inspection::asset_json(&inventory, &rules));
                } else {
                    print(&inspection::asset(&path, &inventory, &rules));
                }
            }
            Kind::Package => {
                let package = package::open(&path)?;
                if self.mil {
                    print(&package.program.to_string());
                    return Ok(0);
                }
                let inventory = package.inventory();
                let findings: Vec<String> = package.check_description().iter().map(ToString::to_string).collect();
                let graph: Vec<String> = verify(&package.program).iter().map(ToString::to_string).collect();
                if self.json {
                    print_json(&inspection::package_json(&inventory, &findings, &graph));
                } else {
                    print(&inspection::package(&path, &inventory, &findings, &graph));
                }
            }
            Kind::Source => {
                let source = self.source()?;
                self.no_program("a source of weights")?;
                if self.json {
                    print_json(&inspection::source_json(&source));
                } else {
                    print(&inspection::source(&source, self.all));
                }
            }
        }
        Ok(0)
    }

    /// Rejects `--mil` for inputs that are no package.
    fn no_program(&self, what: &str) -> Result<()> {
        if self.mil {
            let problem = format!("{}: --mil prints the program of a package, and this is {what}", self.path);
            return Err(UsageError::new(problem, "name an .mlpackage, for example one in the bundle's folder").into());
        }
        Ok(())
    }

    /// Opens the path or, if there is none, the built-in manifest of that name: its published configuration and shapes,
    /// or the demo's files.
    fn source(&self) -> Result<Source> {
        match builtin::find(&self.path) {
            Ok(found) if !PathBuf::from(&self.path).exists() => match demo_model::find(found.name) {
                Some(demo) => Ok(Source::open_path(&demo.source()?)?),
                None => published(found),
            },
            _ => Ok(Source::open_observed(&self.path, &progress::bytes())?),
        }
    }

    fn kind(&self) -> Kind {
        let path = PathBuf::from(&self.path);
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
        if path.join(bundle::FILE_NAME).is_file() {
            Kind::Bundle
        } else if matches!(extension, "mlpackage" | "mlmodel" | "mlmodelc") || path.join("Manifest.json").is_file() {
            Kind::Package
        } else if matches!(extension, "aimodel" | "mlirb") {
            Kind::Asset
        } else {
            Kind::Source
        }
    }
}
