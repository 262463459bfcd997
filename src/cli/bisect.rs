//! `anec bisect`

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::json;

use super::usage::UsageError;
use super::{print, print_json};
use anec::base::{Diagnostic, Fault, Result};
use anec::bundle::Bundle;
use anec::bundle::FILE_NAME;
use anec::convert::compile::Compiler;
use anec::coreml::CoreMl;
use anec::manifest::Gates;
use anec::mil::Function;
use anec::package::{self, Package, WriteOptions};
use anec::report;
use anec::validate::bisect::form::Structure;
use anec::validate::bisect::fp16_predicate::{Fp16Predicate, RecordedCall, calls_of_bundle, calls_of_package};
use anec::validate::bisect::package_predicate::{self, Compile, PackagePredicate, UserCommand};
use anec::validate::bisect::placement::{MisplacedCall, misplaced_call};
use anec::validate::bisect::{MinimalRepro, Predicate, bisect};
use anec::validate::residency::ResidencySubject;
use anec::validate::{Thresholds, prompts};

/// Find the op behind a failure: remove ops until the smallest part remains that fails in the same way
///
/// The predicate is a gate: structure (the rules of MIL), numerics (fp16, on a real text for a bundle), and on a Mac
/// compile and residency. Or it is a command of your own: {} stands for the package with the part, and any status
/// except 0 means failure (125: undecided; 126 and 127: the command can't run, which ends the search).
///
/// The results of removed ops become inputs, so that the part runs on its own; --out writes it as a package.
#[derive(Debug, clap::Args)]
pub struct BisectArgs {
    /// Bundle folder or .mlpackage
    path: PathBuf,
    /// structure, numerics, compile, residency, or a command
    #[arg(long, value_name = "GATE | COMMAND {}")]
    predicate: String,
    /// Search this function only
    #[arg(long, value_name = "NAME")]
    function: Option<String>,
    /// Number of tokens for numerics of a bundle, limited to the largest call [default: 64]
    #[arg(long, alias = "positions", value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    max_tokens: Option<u16>,
    /// Write the failing part as a package
    #[arg(short, long, value_name = "X.mlpackage")]
    out: Option<PathBuf>,
    /// Replace an existing package
    #[arg(long)]
    force: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Default number of tokens for numerics.
const MAX_TOKENS: u16 = 64;

/// Errors of the search.
#[derive(Debug, thiserror::Error)]
enum BisectError {
    /// No function has the requested name.
    #[error("{}: there is no function `{function}`", path.display())]
    NoFunction { path: PathBuf, function: String },
}

impl Diagnostic for BisectError {
    fn fault(&self) -> Fault {
        Fault::Usage
    }

    fn help(&self) -> Option<String> {
        let help = match self {
            BisectError::NoFunction { .. } => "`anec inspect` lists the functions",
        };
        Some(help.into())
    }
}

/// A failing part and its location.
struct FailingPart {
    package: String,
    function: String,
    culprit: MinimalRepro,
}

impl BisectArgs {
    pub(super) fn run(self) -> Result<u8> {
        let is_text = self.predicate == "numerics" && self.path.join(FILE_NAME).exists();
        if self.max_tokens.is_some() && !is_text {
            let problem = "--max-tokens has no effect: only numerics of a bundle take a text";
            return Err(UsageError::new(problem, "leave it out").into());
        }
        let found = match self.predicate.as_str() {
            "structure" => self.first(|_| Ok(Structure))?,
            "numerics" => self.numerics()?,
            "compile" => {
                let compiler = Arc::new(Compiler::find()?);
                self.first(|_| PackagePredicate::new(Compile(compiler.clone())))?
            }
            "residency" => self.placement()?,
            command => self.first(|_| PackagePredicate::new(UserCommand::new(command)))?,
        };
        let Some(found) = found else {
            let (path, predicate) = (self.path, self.predicate);
            if self.json {
                print_json(&json!({"status": "nothing_fails", "predicate": predicate}));
            } else {
                print(&format!("{}: no function fails: {predicate}", path.display()));
            }
            return Ok(0);
        };
        if let Some(out) = &self.out {
            let options = WriteOptions::default().replacing(self.force);
            package::write(&package_predicate::program(&found.culprit.piece), out, &options)?;
        }
        self.print(&found);
        Ok(0)
    }

    /// Packages at the path, with their names.
    fn packages(&self) -> Result<Vec<(String, Package)>> {
        if self.path.join(FILE_NAME).exists() {
            let bundle = Bundle::read(&self.path)?;
            let names = bundle.packages.into_iter().map(|entry| entry.package);
            return names.map(|name| Ok((name.clone(), package::open(&self.path.join(name))?))).collect();
        }
        Ok(vec![(name(&self.path), package::open(&self.path)?)])
    }

    fn is_selected(&self, function: &Function) -> bool {
        self.function.as_ref().is_none_or(|name| function.name == *name)
    }

    /// Returns the first failing function, reduced.
    fn first<P: Predicate>(&self, predicate: impl Fn(&Function) -> Result<P>) -> Result<Option<FailingPart>> {
        let mut seen = false;
        for (package, opened) in self.packages()? {
            for function in opened.program.functions.iter().filter(|function| self.is_selected(function)) {
                seen = true;
                if let Some(culprit) = bisect(function, &mut predicate(function)?)? {
                    return Ok(Some(FailingPart { package, function: function.name.clone(), culprit }));
                }
            }
        }
        if seen { Ok(None) } else { Err(self.no_function()) }
    }

    /// Returns the first call whose ops don't all prefer the Neural Engine, reduced.
    fn placement(&self) -> Result<Option<FailingPart>> {
        let engine = Arc::new(CoreMl::new()?);
        let subject = if self.path.join(FILE_NAME).exists() {
            ResidencySubject::of_bundle(&Bundle::read(&self.path)?, &self.path)?
        } else {
            ResidencySubject::of_package(&name(&self.path), package::open(&self.path)?)
        };
        let is_known = |name: &String| subject.calls.iter().any(|call| call.function == *name);
        if !self.function.as_ref().is_none_or(is_known) {
            return Err(self.no_function());
        }
        let found = misplaced_call(&engine, &subject, |function| self.is_selected(function))?;
        Ok(found.map(|MisplacedCall { package, function, repro, .. }| FailingPart {
            package,
            function,
            culprit: repro,
        }))
    }

    fn no_function(&self) -> anec::base::Error {
        let function = self.function.clone().unwrap_or_default();
        BisectError::NoFunction { path: self.path.clone(), function }.into()
    }

    fn numerics(&self) -> Result<Option<FailingPart>> {
        let (calls, thresholds) = self.calls()?;
        let (mut tried, mut refused) = (false, None);
        for call in calls.into_iter().filter(|call| self.is_selected(&call.function)) {
            let mut predicate = match Fp16Predicate::of(&call, &thresholds.numerics) {
                Ok(predicate) => predicate,
                // random inputs may not fit a function; try the others
                Err(error) => {
                    refused = Some(error);
                    continue;
                }
            };
            tried = true;
            if let Some(culprit) = bisect(&call.function, &mut predicate)? {
                return Ok(Some(FailingPart { package: call.package, function: call.function.name, culprit }));
            }
        }
        match refused {
            Some(error) if !tried => Err(error),
            None if !tried => Err(self.no_function()),
            _ => Ok(None),
        }
    }

    fn calls(&self) -> Result<(Vec<RecordedCall>, Thresholds)> {
        if self.path.join(FILE_NAME).exists() {
            let bundle = Bundle::read(&self.path)?;
            let tokens = prompts::tokens(&bundle, &self.path, usize::from(self.max_tokens.unwrap_or(MAX_TOKENS)))?;
            return Ok((calls_of_bundle(&bundle, &self.path, &tokens)?, Thresholds::of(&bundle.manifest.gates)));
        }
        let package = package::open(&self.path)?;
        Ok((calls_of_package(&name(&self.path), &package), Thresholds::of(&Gates::default())))
    }

    fn print(&self, found: &FailingPart) {
        let FailingPart { package, function, culprit } = found;
        if self.json {
            print_json(&json!({
                "package": package,
                "function": function,
                "predicate": self.predicate,
                "ops_before": culprit.ops_before,
                "ops": culprit.ops,
                "findings": culprit.findings,
                "tries": culprit.tries,
                "written": self.out,
            }));
        } else {
            let written = self.out.as_deref();
            print(&report::bisection(package, function, &self.predicate, culprit, written));
        }
    }
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}
