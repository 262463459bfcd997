//! `anec doctor`

use super::{print, print_json};
use anec::MachineReport;
use anec::base::Result;
use anec::report::bytes;
use anec::report::table::table;

/// Says what this machine can do: convert, validate, compile, read compute plans, run on the Neural Engine; and what is
/// missing for the rest.
///
/// On a Mac, small programs show in about 30 seconds which forms of weights and states the Neural Engine takes.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// Leaves out the self-test of the Neural Engine
    #[arg(long)]
    quick: bool,
    /// Prints the result as JSON
    #[arg(long)]
    json: bool,
}

impl DoctorArgs {
    pub(super) fn run(self) -> Result<u8> {
        let findings = MachineReport::take(!self.quick)?;
        if self.json {
            print_json(&findings);
        } else {
            print(&text(&findings));
        }
        Ok(0)
    }
}

fn text(findings: &MachineReport) -> String {
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
