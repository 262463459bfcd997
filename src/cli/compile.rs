//! `anec compile`

use std::path::PathBuf;

use serde_json::json;

use super::{print, print_json, progress};
use anec::base::Result;
use anec::convert::compile::compile_bundle;

/// Compile the packages of a bundle with Core ML's compiler, and record them in the bundle
#[derive(Debug, clap::Args)]
pub struct CompileArgs {
    /// Bundle folder
    #[arg(default_value = ".")]
    bundle: PathBuf,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

impl CompileArgs {
    pub(super) fn run(self) -> Result<u8> {
        let bundle = compile_bundle(&self.bundle, &progress::bytes())?;
        let compiled: Vec<_> = bundle.packages.iter().filter_map(|p| p.compiled.as_deref()).collect();
        if self.json {
            print_json(&json!({"bundle": self.bundle, "compiled": compiled}));
        } else {
            print(&format!("compiled {} packages of {}", compiled.len(), self.bundle.display()));
        }
        Ok(0)
    }
}
