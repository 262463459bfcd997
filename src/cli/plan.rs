//! `anec plan`

use std::borrow::Cow;
use std::path::PathBuf;

use serde_json::json;

use super::input::Input;
use super::usage::UsageError;
use super::{gain, granularity, print, print_json, progress};
use anec::advice::search::{SearchLimits, search};
use anec::advice::{ChipError, ChipPrediction, ChipTable, ChipTarget, forecast, forecast_graphs, predict};
use anec::base::Result;
use anec::base::output::write_file;
use anec::convert::emit::Emitter;
use anec::convert::functions::build_package;
use anec::convert::notes::{of_draft, of_transforms};
use anec::convert::open::{Opened, open_shapes, resolve};
use anec::convert::plan::ConvertPlan;
use anec::convert::{Estimate, FormEstimate, asset_name};
use anec::coreai::assemble::AssetSketch;
use anec::manifest::Manifest;
use anec::report;
use anec::source::SourceKind;

/// Limit of predictions for assets of Core AI.
const CORE_AI_CALLS: &str = "  predicted for calls of Core ML: Core AI divides a graph into more of them, published for \
                             one encoder as 25 instead of 1\n";

/// Preview a conversion without reading weights: packages, functions, sizes, estimated speed, and a forecast for the
/// Neural Engine
///
/// --for predicts the speed on chips. --search prints the manifest with the least predicted time per token, with the
/// reason for every choice.
#[derive(Debug, clap::Args)]
pub struct PlanArgs {
    #[command(flatten)]
    input: Input,
    /// Predict the speed on these chips and apply their rules: m4-max,a17-pro; m5@27 is an M5 with OS 27
    #[arg(long = "for", value_name = "CHIP", value_delimiter = ',')]
    targets: Vec<String>,
    /// Search the manifest with the least predicted time per token
    #[arg(long, requires = "targets")]
    search: bool,
    #[command(flatten)]
    limits: Limits,
    /// Write the manifest to a file instead of printing it
    #[arg(short, long, value_name = "FILE", requires = "search")]
    out: Option<PathBuf>,
    /// Show every package and function, and the remedies of the forecast
    #[arg(long, conflicts_with = "json")]
    details: bool,
    /// Print the plan as JSON
    #[arg(long)]
    json: bool,
}

/// Limits of a search.
#[derive(Debug, clap::Args)]
struct Limits {
    /// Maximum weights per package in MB (10^6 bytes) [default: the limits of rules and chips]
    #[arg(long, value_name = "N", requires = "search", value_parser = positive)]
    max_mb: Option<f64>,
    /// Maximum memory with all functions loaded, in MB [default: the limits of chips]
    #[arg(long, value_name = "N", requires = "search", value_parser = positive)]
    max_memory_mb: Option<f64>,
    /// Maximum seconds of the first load of all functions, by the slowest load on record
    #[arg(long, value_name = "SECONDS", requires = "search", value_parser = positive)]
    max_first_load: Option<f64>,
    /// Fewest bits per weight [default: 8]
    #[arg(long, value_name = "N", requires = "search", value_parser = clap::value_parser!(u32).range(1..=16))]
    least_bits: Option<u32>,
}

fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    number.ok_or_else(|| "expected a number above 0".into())
}

/// Parses the names of chips.
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
        let sized = manifest.with_lengths_of_functions();
        let of_functions = match sized {
            Cow::Borrowed(_) => plan.clone(),
            Cow::Owned(_) => ConvertPlan::new(&sized, &*opened.model)?,
        };
        let predictions = predict(&sized, &*opened.model, &of_functions, targets)?;
        let gain = gain::note(&sized, &*opened.model, &of_functions, targets);
        let granularity = granularity::note(manifest, &*opened.model, &plan);
        let mut findings = Vec::new();
        let (mut sketch, mut emitted) = (AssetSketch::default(), Vec::new());
        for package in &plan.packages {
            // builds the graphs without reading weights
            let mut emitter = Emitter::new(&manifest.quant);
            let (program, entries) = build_package(&*opened.model, &plan.form, package, &mut emitter)?;
            if manifest.format.is_coreml() {
                let name = format!("{}.mlpackage", package.name);
                findings.extend(forecast(&name, &program, package.weight_bytes, targets));
                continue;
            }
            for (function, entry) in program.functions.iter().zip(&entries) {
                emitted.extend(sketch.add(&package.name, function, entry.tokens)?.into_iter().map(|sized| {
                    let (context, stage) = (entry.context, &entry.stage);
                    json!({"name": sized.name, "context": context, "tokens": {"fixed": sized.tokens}, "stage": stage})
                }));
            }
        }
        let asset = (!manifest.format.is_coreml()).then(|| asset_name(manifest.name.as_deref().unwrap_or("model")));
        let functions = sketch.functions()?;
        if let Some(asset) = &asset {
            findings = forecast_graphs(asset, &functions, targets);
        }
        if self.json {
            let mut json = report::plan_json(manifest, opened.model.facts(), &plan, &estimate, &forms);
            json["shapes_from"] = opened.source.kind().name().into();
            json["transforms"] = json!(transforms);
            json["notes"] = json!(notes.iter().chain(&gain).chain(&granularity).collect::<Vec<_>>());
            json["forecast"] = json!(findings);
            if let Some(asset) = &asset {
                json["packages"] = json!([{
                    "package": asset,
                    "functions": emitted,
                    "weight_bytes": plan.weight_bytes(),
                    "state_bytes": plan.state_bytes(),
                }]);
            }
            if !targets.is_empty() {
                json["predictions"] = json!(predictions);
            }
            print_json(&json);
        } else {
            if opened.source.kind() == SourceKind::Shapes {
                print("shapes from the built-in configuration; weights were not read");
            }
            let facts = opened.model.facts();
            let transforms = report::transforms(&transforms, &notes);
            let mut text = match self.details {
                true => report::plan(manifest, facts, &plan, &estimate, &forms) + &transforms,
                false => report::plan_summary(manifest, facts, &plan, &estimate) + transforms.trim_start(),
            };
            if let Some(asset) = &asset {
                text += &format!("the packages become one asset, {asset}, with {} functions\n", functions.len());
            }
            if !targets.is_empty() {
                text += &format!("\n{}", self.predictions(&predictions));
                if asset.is_some() {
                    text += CORE_AI_CALLS;
                }
            }
            for note in gain.iter().chain(&granularity) {
                text += &format!("{note}\n");
            }
            let forecast = if self.details { report::forecast } else { report::forecast_summary };
            text += &format!("\n{}", forecast(&findings));
            print(&text);
        }
        Ok(0)
    }

    /// Predictions for the terminal.
    fn predictions(&self, predictions: &[ChipPrediction]) -> String {
        if self.details { report::predictions(predictions) } else { report::predictions_summary(predictions) }
    }

    fn search(&self, manifest: &Manifest, opened: &Opened, targets: &[ChipTarget<'_>]) -> Result<u8> {
        let limits = SearchLimits::default()
            .max_mb(self.limits.max_mb)
            .max_memory_mb(self.limits.max_memory_mb)
            .max_first_load(self.limits.max_first_load);
        let limits = match self.limits.least_bits {
            Some(bits) => limits.least_bits(bits),
            None => limits,
        };
        let found = search(manifest, &*opened.model, targets, &limits)?;
        if let Some(out) = &self.out {
            if out.exists() {
                let problem = format!("{} already exists", out.display());
                return Err(UsageError::new(problem, "remove it, or choose another name").into());
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
                print(&format!("\n{}", self.predictions(&found.predictions)));
                print(&format!("wrote the manifest to {}", out.display()));
            }
        }
        Ok(0)
    }
}
