//! `anec plan`

use super::input::Input;
use super::{print, print_json, progress};
use anec::base::Result;
use anec::convert::emit::Emitter;
use anec::convert::functions::build_package;
use anec::convert::notes::of_transforms;
use anec::convert::open::{open_shapes, resolve};
use anec::convert::{ConvertPlan, Estimate, FormEstimate};
use anec::report;
use anec::source::SourceKind;
use anec::validate::forecast;

/// Shows what a conversion would emit, without reading weights: packages, functions, bytes, an estimate of speed, and a
/// forecast of what keeps ops off the Neural Engine.
#[derive(Debug, clap::Args)]
pub struct PlanArgs {
    #[command(flatten)]
    input: Input,
    /// Prints the plan as JSON
    #[arg(long)]
    json: bool,
}

impl PlanArgs {
    pub(super) fn run(self) -> Result<u8> {
        let asked = self.input.manifest()?;
        let opened = open_shapes(&asked, &progress::bytes())?;
        let manifest = resolve(&asked, &opened.source, &*opened.model);
        let plan = ConvertPlan::new(&manifest, &*opened.model)?;
        let estimate = Estimate::of(&plan);
        let transforms = opened.model.transformed().done;
        let notes = of_transforms(&asked, &manifest, &*opened.model);
        let forms = FormEstimate::of(&manifest, &*opened.model);
        let mut findings = Vec::new();
        for package in &plan.packages {
            // the graphs are built, their weights are not read
            let mut emitter = Emitter::new(&manifest.quant);
            let (program, _) = build_package(&*opened.model, &plan.form, package, &mut emitter)?;
            findings.extend(forecast(&format!("{}.mlpackage", package.name), &program, package.weight_bytes));
        }
        if self.json {
            let mut json = report::plan_json(&manifest, opened.model.facts(), &plan, &estimate, &forms);
            json["shapes_from"] = opened.source.kind().name().into();
            json["transforms"] = serde_json::json!(transforms);
            json["notes"] = serde_json::json!(notes);
            json["forecast"] = serde_json::json!(findings);
            print_json(&json);
        } else {
            if opened.source.kind() == SourceKind::Shapes {
                print("shapes from the built-in configuration; the weights, which aren't here, were not looked at\n");
            }
            print(&report::plan(&manifest, opened.model.facts(), &plan, &estimate, &forms));
            print(&report::transforms(&transforms, &notes));
            print(&report::forecast(&findings));
        }
        Ok(0)
    }
}
