//! `anec plan`

use super::input::Input;
use super::{print, print_json};
use crate::convert::open::{open, resolve};
use crate::convert::{Estimate, Plan};
use crate::error::Result;
use crate::report;

/// Shows what a conversion would emit, without reading weights: packages, functions, bytes, and an estimate of speed.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    input: Input,
    /// Prints the plan as JSON
    #[arg(long)]
    json: bool,
}

impl Args {
    pub(super) fn run(self) -> Result<u8> {
        let manifest = self.input.manifest()?;
        let opened = open(&manifest)?;
        let manifest = resolve(&manifest, &opened.source, &*opened.model);
        let plan = Plan::new(&manifest, &*opened.model)?;
        let estimate = Estimate::of(&plan);
        if self.json {
            print_json(&report::plan_json(&manifest, opened.model.facts(), &plan, &estimate));
        } else {
            print(&report::plan(&manifest, opened.model.facts(), &plan, &estimate));
        }
        Ok(0)
    }
}
