//! `anec completions` and `anec man`

use std::path::PathBuf;

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use super::{Cli, print, put};
use anec::base::output::write_file;
use anec::base::{FileError, Result};
use anec::report::counted;

/// Print shell completions: `anec completions zsh > ~/.zfunc/_anec`, or for bash `source <(anec completions bash)`
#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    /// Shell
    shell: Shell,
}

/// Write manual pages, one for each verb: `man -l DIR/anec-run.1`
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// Output folder
    #[arg(short, long, value_name = "DIR", default_value = ".")]
    out: PathBuf,
}

impl CompletionsArgs {
    pub(super) fn run(self) -> Result<u8> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "anec", &mut script);
        put(&String::from_utf8_lossy(&script));
        Ok(0)
    }
}

impl ManArgs {
    pub(super) fn run(self) -> Result<u8> {
        std::fs::create_dir_all(&self.out).map_err(FileError::of(&self.out, "create"))?;
        let mut command = Cli::command().disable_help_flag(true);
        command.build();
        let mut pages = vec![page(&command)];
        pages.extend(command.get_subcommands().map(page));
        for (name, text) in &pages {
            write_file(&self.out.join(name), text)?;
        }
        print(&format!("{} in {}", counted(pages.len(), "page"), self.out.display()));
        Ok(0)
    }
}

/// Manual page of a command, with its file name.
fn page(command: &Command) -> (String, Vec<u8>) {
    let man = Man::new(command.clone());
    let mut text = Vec::new();
    // writing to memory can't fail
    let _ = man.render(&mut text);
    (man.get_filename(), text)
}
