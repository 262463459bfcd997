//! `anec manifests`

use serde_json::json;

use super::{print, print_json};
use anec::base::Result;
use anec::manifest::{Manifest, builtin};
use anec::report;

/// List the built-in manifests, or print one
#[derive(Debug, clap::Args)]
pub struct ManifestsArgs {
    /// Manifest to print
    name: Option<String>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

impl ManifestsArgs {
    pub(super) fn run(self) -> Result<u8> {
        let read = |b: &builtin::Builtin| Manifest::from_yaml(b.text, b.name, &[]);
        let Some(name) = self.name else {
            let all = builtin::all().iter().map(|b| Ok((b, read(b)?))).collect::<Result<Vec<_>>>()?;
            if self.json {
                let row = |(b, manifest): &(&builtin::Builtin, Manifest)| {
                    let doubted: Vec<&str> = b.doubted().collect();
                    json!({"name": b.name, "manifest": manifest, "doubted": doubted})
                };
                print_json(&all.iter().map(row).collect::<Vec<_>>());
            } else {
                print(&report::manifests(&all));
            }
            return Ok(0);
        };
        let found = builtin::find(&name)?;
        if self.json {
            print_json(&read(found)?);
        } else {
            print(found.text);
        }
        Ok(0)
    }
}
