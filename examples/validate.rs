//! Tries the gates of a bundle or an .mlpackage: `cargo run --release --example validate -- PATH [GOLDEN]`.

use anec::{Validator, report};

fn main() -> anec::base::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut validator = Validator::new(arguments.next().unwrap_or_else(|| "example.anec".into()));
    if let Some(golden) = arguments.next() {
        validator = validator.golden(golden);
    }
    let validation = validator.run()?;
    print!("{}", report::gates(&validation.report));
    // what could not be tried here is no failure
    std::process::exit(validation.report.exit_code(true).into())
}
