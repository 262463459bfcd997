//! The `anec` command line.

fn main() -> std::process::ExitCode {
    anec::cli::main()
}
