//! `anec doctor`

use std::path::Path;

use anec::base::FileError;

use serde::Serialize;

use super::{print, print_json};
use anec::base::Result;
use anec::convert::compile::Compiler;
use anec::convert::error::ConvertError;
use anec::coreml::{CoreMl, Engine};
use anec::package::available_space;
use anec::report::bytes;
use anec::report::table::table;
use anec::validate::probe::{Form, Placement, place};

/// Says what this machine can do: convert, validate, compile, read compute plans, run on the Neural Engine; and what is
/// missing for the rest.
///
/// On a Mac, small programs show in about 30 seconds which forms of weights and states the Neural Engine takes.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Leaves out the self-test of the Neural Engine
    #[arg(long)]
    quick: bool,
    /// Prints the result as JSON
    #[arg(long)]
    json: bool,
}

/// What was found.
#[derive(Debug, Serialize)]
struct Findings {
    anec_version: &'static str,
    system: String,
    cores: usize,
    /// Free bytes on the disk of the current folder.
    free_bytes: Option<u64>,
    /// The Mac, where it is one.
    machine: Option<String>,
    abilities: Vec<Ability>,
    placement: Vec<Placement>,
}

#[derive(Debug, Serialize)]
struct Ability {
    what: &'static str,
    works: bool,
    /// What it works with, or what is missing.
    because: String,
}

impl Args {
    pub(super) fn run(self) -> Result<u8> {
        let core_ml = CoreMl::new();
        let compiler = Compiler::find();
        let machine = match &core_ml {
            Ok(engine) => Some(engine.machine()?.to_string()),
            Err(_) => None,
        };
        let ability = |what, works: std::result::Result<String, String>| Ability {
            what,
            works: works.is_ok(),
            because: works.unwrap_or_else(|missing| missing),
        };
        let engine = |with: &str| match &core_ml {
            Ok(_) => Ok(with.to_owned()),
            Err(error) => Err(error.to_string()),
        };
        let abilities = vec![
            ability(
                "convert; validate structure, numerics and parity; run on the CPU",
                Ok("needs nothing else".into()),
            ),
            ability(
                "compile packages (.mlmodelc)",
                match &compiler {
                    Ok(_) => Ok("coremlcompiler of Xcode".into()),
                    Err(ConvertError::NoCompiler(why)) => Err(why.clone()),
                    Err(error) => Err(error.to_string()),
                },
            ),
            ability("judge a saved compute plan", Ok("`anec validate --plan FILE`".into())),
            ability("read compute plans (residency)", engine("MLComputePlan")),
            ability("run on the Neural Engine", engine("Core ML")),
        ];
        let mut placement = Vec::new();
        if let (Ok(engine), false) = (&core_ml, self.quick) {
            let room = tempfile::tempdir().map_err(FileError::of(&std::env::temp_dir(), "create a folder in"))?;
            for form in Form::all() {
                placement.push(place(engine, form, room.path())?);
            }
        }
        let findings = Findings {
            anec_version: env!("CARGO_PKG_VERSION"),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            free_bytes: available_space(Path::new(".")),
            machine,
            abilities,
            placement,
        };
        if self.json {
            print_json(&findings);
        } else {
            print(&text(&findings));
        }
        Ok(0)
    }
}

fn text(findings: &Findings) -> String {
    let mut text = format!("anec {} on {}, {} cores", findings.anec_version, findings.system, findings.cores);
    if let Some(free) = findings.free_bytes {
        text.push_str(&format!(", {} free here", bytes(free)));
    }
    text.push('\n');
    if let Some(machine) = &findings.machine {
        text.push_str(&format!("{machine}\n"));
    }
    let rows = findings.abilities.iter().map(|ability| {
        let works = if ability.works { "yes" } else { "no" };
        vec![ability.what.to_owned(), works.to_owned(), ability.because.clone()]
    });
    text.push_str(&format!("\n{}", table(&["this machine can", "", "with, or missing"], rows)));
    if !findings.placement.is_empty() {
        let rows = findings.placement.iter().map(|placed| {
            let share = format!("{} of {}", placed.on_neural_engine, placed.compute_ops);
            vec![placed.form.to_string(), share, placed.error.clone().unwrap_or_default()]
        });
        text.push_str(&format!("\n{}", table(&["self-test", ">on the Neural Engine", "error"], rows)));
    }
    text
}
