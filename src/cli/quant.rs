//! `anec quant`

use std::path::PathBuf;

use serde_json::json;

use super::input::Input;
use super::usage::UsageError;
use super::{print, print_json, progress};
use anec::Converter;
use anec::base::Result;
use anec::base::output::write_file;
use anec::calibrate::plan;
use anec::calibrate::sensitivity::{TOKENS, formats};
use anec::manifest::{QuantPlan, WeightFormat};
use anec::report;

/// Measure the cost of number formats by role and layer, and choose formats under a budget
///
/// Quantizes the weights of one role in one layer at a time; the cost is the change of the model's predictions on a few
/// hundred tokens. Measurements are stored in NAME.sensitivities.json, which later runs and conversions with
/// `quant.plan` reuse.
#[derive(Debug, clap::Args)]
pub struct QuantArgs {
    #[command(flatten)]
    input: Input,
    /// Formats, for example int8,palette6,int4 [default: all that the Neural Engine supports]
    #[arg(long, value_delimiter = ',', value_name = "NAME,…", value_parser = kind)]
    weights: Vec<WeightFormat>,
    /// Budget: bits=5 (per weight), max_mb=400 (all packages) or kl=0.01 (nats) [default: the manifest's]
    #[arg(long, value_name = "KEY=NUMBER", value_parser = budget)]
    plan: Option<QuantPlan>,
    /// Number of tokens of the calibration text
    #[arg(long, alias = "tokens", value_name = "N", default_value_t = TOKENS as u32)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=65536))]
    max_tokens: u32,
    /// Write the manifest with the chosen formats
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Write a plot
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

fn kind(name: &str) -> Result<WeightFormat, String> {
    serde_json::from_value(json!(name)).map_err(|_| "expected int8, int4, palette8, 6, 4, 3, 2 or 1, or none".into())
}

fn budget(text: &str) -> Result<QuantPlan, String> {
    let expected = "expected bits=5, max_mb=400 or kl=0.01";
    let (key, value) = text.split_once('=').ok_or(expected)?;
    let value = value.parse().ok().filter(|value: &f64| value.is_finite() && *value > 0.0).ok_or(expected)?;
    match key {
        "bits" => Ok(QuantPlan::Bits(value)),
        "max_mb" => Ok(QuantPlan::MaxMb(value)),
        "kl" => Ok(QuantPlan::Kl(value)),
        _ => Err(expected.into()),
    }
}

impl QuantArgs {
    pub(super) fn run(self) -> Result<u8> {
        let manifest = self.input.manifest()?;
        let budget = self.plan.or(manifest.quant.plan);
        if self.out.is_some() && budget.is_none() {
            let problem = "--out needs a budget, and neither --plan nor `quant.plan` sets one";
            let help = "add --plan bits=5, --plan max_mb=400 or --plan kl=0.01";
            return Err(UsageError::new(problem, help).into());
        }
        let converter = Converter::new(manifest.clone()).progress(progress::counting(""));
        let mut measured = converter.sensitivities(&formats(&self.weights), self.max_tokens as usize)?;
        let planned = budget.map(|budget| plan::plan(&manifest, budget, &measured)).transpose()?;
        if let Some(planned) = &planned {
            measured.groups.clone_from(&planned.report.groups);
        }
        if let (Some(out), Some(planned)) = (&self.out, &planned) {
            write_file(out, planned.report.manifest.as_bytes())?;
        }
        if let Some(svg) = &self.svg {
            write_file(svg, report::sensitivities_svg(&measured.groups).as_bytes())?;
        }
        let planned = planned.map(|planned| planned.report);
        if self.json {
            print_json(&json!({ "tokens": measured.tokens, "groups": measured.groups, "plan": planned }));
        } else {
            print(&report::sensitivities(measured.tokens, &measured.groups, planned.as_ref()));
        }
        Ok(0)
    }
}
