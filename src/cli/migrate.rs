//! `anec migrate`

use std::path::PathBuf;

use serde::Serialize;

use super::usage::UsageError;
use super::{print, print_json};
use anec::advice::{ForecastFinding, forecast_asset};
use anec::base::{Fault, Result};
use anec::coreai::bridge::BridgeOptions;
use anec::coreai::migrate::{MigrateOptions, migrate};
use anec::coreai::{self, AssetOptions};
use anec::package;
use anec::report;
use anec::validate::migration::{self, Agreement};

/// Turn a Core ML package into an asset of Core AI, and compare both
///
/// All functions, states and weights stay, compressed as they are, under their names. What Core AI can't express is
/// named in one error. Where a Python has Apple's coreai-core, the same random inputs go through the package, on the
/// CPU executor, and through the asset, on Apple's runtime.
#[derive(Debug, clap::Args)]
pub struct MigrateArgs {
    /// Package (.mlpackage or .mlmodel)
    package: PathBuf,
    /// Output asset; its name ends in .aimodel
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Sizes of a flexible dimension, such as T=1,64; each gets a function
    #[arg(long, value_name = "SYMBOL=N,N,…", value_parser = sizes)]
    shapes: Vec<(String, Vec<u64>)>,
    /// Replace an existing asset
    #[arg(long)]
    force: bool,
    /// Skip the comparison with the package
    #[arg(long)]
    no_verify: bool,
    /// Python with Apple's coreai-core [default: that of ANEC_PYTHON]
    #[arg(long, value_name = "FILE", conflicts_with = "no_verify")]
    python: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// A symbol and its sizes.
fn sizes(text: &str) -> std::result::Result<(String, Vec<u64>), String> {
    let wrong = || "expected SYMBOL=N,N,…, such as T=1,64".to_owned();
    let (symbol, list) = text.split_once('=').ok_or_else(wrong)?;
    let list: std::result::Result<Vec<u64>, _> = list.split(',').map(|size| size.trim().parse()).collect();
    Ok((symbol.trim().to_owned(), list.map_err(|_| wrong())?))
}

/// Result of a migration.
#[derive(Serialize)]
struct Migrated {
    asset: PathBuf,
    functions: Vec<String>,
    weight_bytes: u64,
    notes: Vec<String>,
    /// Absent where no runtime was at hand.
    agreement: Option<Vec<Agreement>>,
    /// Rules for the Neural Engine that the asset breaks.
    forecast: Vec<ForecastFinding>,
}

impl MigrateArgs {
    pub(super) fn run(self) -> Result<u8> {
        let package = package::open(&self.package)?;
        let mut options = MigrateOptions::default();
        self.check_out()?;
        let bridge = BridgeOptions::of_machine(self.python.clone());
        if self.python.is_some() {
            bridge.check()?;
        }
        for (symbol, sizes) in &self.shapes {
            if options.sizes.insert(symbol.clone(), sizes.clone()).is_some() {
                let problem = format!("--shapes names `{symbol}` twice");
                return Err(UsageError::new(problem, "list all sizes of a symbol at once").into());
            }
        }
        let done = migrate(&package, &options)?;
        let mut how = AssetOptions::default();
        how.metadata = done.metadata.clone();
        how.replace = self.force;
        let written = coreai::write(&done.module, &self.out, &how)?;
        let mut notes = done.notes.clone();
        let name = self.out.file_name().unwrap_or(self.out.as_os_str()).to_string_lossy();
        let forecast = forecast_asset(&name, &coreai::open(&self.out)?.inventory(), &[]);
        let agreement = if self.no_verify { None } else { self.verify(&bridge, &done.functions, &mut notes)? };
        let failed = agreement.iter().flatten().any(|of| !of.agrees);
        let result = Migrated {
            asset: self.out.clone(),
            functions: done.functions.iter().map(|function| function.name.clone()).collect(),
            weight_bytes: written.weight_bytes,
            notes,
            agreement,
            forecast,
        };
        if self.json {
            print_json(&result);
        } else {
            print(&result.text());
        }
        Ok(u8::from(failed))
    }

    /// Refuses an output that would not be written, before the work.
    fn check_out(&self) -> Result<()> {
        if self.out.extension().is_none_or(|extension| extension != "aimodel") {
            let problem = format!("{}: the name of an asset ends in `.aimodel`", self.out.display());
            return Err(UsageError::new(problem, "choose another name with --out").into());
        }
        if self.out.exists() && !self.force {
            let problem = format!("{}: exists already", self.out.display());
            return Err(UsageError::new(problem, "--force replaces it; --out names another asset").into());
        }
        Ok(())
    }

    /// Compares the asset with the package; `None`, with a note, where there is no runtime.
    fn verify(
        &self,
        bridge: &BridgeOptions,
        functions: &[anec::coreai::migrate::MigratedFunction],
        notes: &mut Vec<String>,
    ) -> Result<Option<Vec<Agreement>>> {
        match migration::compare(functions, &self.out, bridge) {
            Ok(agreement) => Ok(Some(agreement)),
            Err(error) if error.fault() == Fault::Platform && self.python.is_none() => {
                let help = error.help().unwrap_or_default();
                notes.push(format!("not compared with the package: {error}; {help}"));
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

impl Migrated {
    fn text(&self) -> String {
        let mut text = format!(
            "{}: {} ({}), {} of weights\n",
            self.asset.display(),
            report::counted(self.functions.len(), "function"),
            self.functions.join(", "),
            report::bytes(self.weight_bytes)
        );
        for of in self.agreement.iter().flatten() {
            let verdict = if of.agrees { "agrees with the package" } else { "DIFFERS from the package" };
            text += &format!(
                "{}: {verdict}, cosine (min) {:.7}, largest difference {:.3e}\n",
                of.function, of.cosine, of.difference
            );
        }
        self.notes.iter().for_each(|note| text += &format!("note: {note}\n"));
        if !self.forecast.is_empty() {
            text += &format!("\n{}", report::forecast_summary(&self.forecast));
        }
        text
    }
}
