//! The `anec` command line.

#![forbid(unsafe_code)]

mod cli;

/// Reports an allocation that fails, which a stranger's numbers may cause.
#[global_allocator]
static ALLOCATOR: anec::base::allocation::ReportingAllocator = anec::base::allocation::ReportingAllocator;

fn main() -> std::process::ExitCode {
    anec::base::fault::report_truncated_files();
    anec::base::caught::silence();
    cli::main()
}
