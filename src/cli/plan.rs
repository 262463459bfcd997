//! `anec plan`

use std::path::PathBuf;

use serde_json::json;

use super::input::Input;
use super::usage::UsageError;
use super::{print, print_json, progress};
use anec::advice::chips::{ChipError, ChipTable, ChipTarget};
use anec::advice::search::{SearchLimits, search};
use anec::advice::{forecast, predict};
use anec::base::Result;
use anec::base::output::write_file;
use anec::convert::emit::Emitter;
use anec::convert::functions::build_package;
use anec::convert::notes::{of_draft, of_transforms};
use anec::convert::open::{Opened, open_shapes, resolve};
use anec::convert::{ConvertPlan, Estimate, FormEstimate};
use anec::manifest::Manifest;
use anec::report;
use anec::source::SourceKind;

/// Shows what a conversion would emit, without reading weights: packages, functions, bytes, an estimate of speed, and a
/// forecast of what keeps ops off the Neural Engine.
///
/// --for predicts the speed on chips. --search finds the manifest with the least predicted time for each token, and prints
/// it with the reason of every choice.
#[derive(Debug, clap::Args)]
pub struct PlanArgs {
    #[command(flatten)]
    input: Input,
    /// Predicts the speed on these chips, and keeps to the rules about them: m4-max,a17-pro; m5@27 is an M5 with OS 27
    #[arg(long = "for", value_name = "CHIP", value_delimiter = ',')]
    targets: Vec<String>,
    /// Searches for the manifest that takes least time on the chips
    #[arg(long, requires = "targets")]
    search: bool,
    #[command(flatten)]
    limits: Limits,
    /// Writes the manifest that was found, instead of printing it
    #[arg(short, long, value_name = "FILE", requires = "search")]
    out: Option<PathBuf>,
    /// Prints the plan as JSON
    #[arg(long)]
    json: bool,
}

/// Limits of a search.
#[derive(Debug, clap::Args)]
struct Limits {
    /// Weights of one package at most, in units of 1,000,000 bytes; what rules and chips allow if not given
    #[arg(long, value_name = "N", requires = "search", value_parser = megabytes)]
    max_mb: Option<f64>,
    /// Memory with the functions of a text loaded at most, likewise
    #[arg(long, value_name = "N", requires = "search", value_parser = megabytes)]
    max_memory_mb: Option<f64>,
    /// Fewest bits of a weight; 8 if not given
    #[arg(long, value_name = "N", requires = "search", value_parser = clap::value_parser!(u32).range(1..=16))]
    least_bits: Option<u32>,
}

fn megabytes(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    number.ok_or_else(|| "expected a number of megabytes above 0".into())
}

/// The targets of names.
pub(super) fn targets(names: &[String]) -> Result<Vec<ChipTarget<'static>>, ChipError> {
    names.iter().map(|name| ChipTable::built_in().target(name)).collect()
}

impl PlanArgs {
    pub(super) fn run(self) -> Result<u8> {
        let targets = targets(&self.targets)?;
        let asked = self.input.manifest()?;
        let opened = open_shapes(&asked, &progress::bytes())?;
        let manifest = resolve(&asked, &opened.source, &*opened.model);
        if self.search {
            self.search(&manifest, &opened, &targets)
        } else {
            self.plan(&asked, &manifest, &opened, &targets)
        }
    }

    fn plan(&self, asked: &Manifest, manifest: &Manifest, opened: &Opened, targets: &[ChipTarget<'_>]) -> Result<u8> {
        let plan = ConvertPlan::new(manifest, &*opened.model)?;
        let estimate = Estimate::of(&plan);
        let transforms = opened.model.transformed().done;
        let mut notes = of_transforms(asked, manifest, &*opened.model);
        notes.extend(of_draft(&plan));
        let forms = FormEstimate::of(manifest, &*opened.model);
        let predictions = predict(manifest, &*opened.model, &plan, targets)?;
        let mut findings = Vec::new();
        for package in &plan.packages {
            // the graphs are built, their weights are not read
            let mut emitter = Emitter::new(&manifest.quant);
            let (program, _) = build_package(&*opened.model, &plan.form, package, &mut emitter)?;
            let name = format!("{}.mlpackage", package.name);
            findings.extend(forecast(&name, &program, package.weight_bytes, targets));
        }
        if self.json {
            let mut json = report::plan_json(manifest, opened.model.facts(), &plan, &estimate, &forms);
            json["shapes_from"] = opened.source.kind().name().into();
            json["transforms"] = json!(transforms);
            json["notes"] = json!(notes);
            json["forecast"] = json!(findings);
            if !targets.is_empty() {
                json["predictions"] = json!(predictions);
            }
            print_json(&json);
        } else {
            if opened.source.kind() == SourceKind::Shapes {
                print("shapes from the built-in configuration; the weights, which aren't here, were not looked at\n");
            }
            print(&report::plan(manifest, opened.model.facts(), &plan, &estimate, &forms));
            print(&report::transforms(&transforms, &notes));
            if !targets.is_empty() {
                print(&format!("\n{}", report::predictions(&predictions)));
            }
            print(&report::forecast(&findings));
        }
        Ok(0)
    }

    fn search(&self, manifest: &Manifest, opened: &Opened, targets: &[ChipTarget<'_>]) -> Result<u8> {
        let limits = SearchLimits {
            max_mb: self.limits.max_mb,
            max_memory_mb: self.limits.max_memory_mb,
            least_bits: self.limits.least_bits.unwrap_or(SearchLimits::default().least_bits),
        };
        let found = search(manifest, &*opened.model, targets, &limits)?;
        if let Some(out) = &self.out {
            if out.exists() {
                let problem = format!("{} is there already", out.display());
                return Err(UsageError::new(problem, "remove it, or give another name").into());
            }
            write_file(out, found.to_yaml().as_bytes())?;
        }
        if self.json {
            print_json(&json!({
                "manifest": found.manifest,
                "choices": found.reasons,
                "predictions": found.predictions,
                "milliseconds_per_token": found.milliseconds_per_token,
                "compared": found.compared,
                "written": self.out,
            }));
            return Ok(0);
        }
        match &self.out {
            None => print(&found.to_yaml()),
            Some(out) => {
                print(&report::choices(&found.reasons));
                print(&format!("\n{}", report::predictions(&found.predictions)));
                print(&format!("{} has the manifest", out.display()));
            }
        }
        Ok(0)
    }
}
