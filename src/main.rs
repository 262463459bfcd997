//! The `anec` command line.

#![forbid(unsafe_code)]

mod cli;

fn main() -> std::process::ExitCode {
    anec::base::fault::report_truncated_files();
    cli::main()
}
